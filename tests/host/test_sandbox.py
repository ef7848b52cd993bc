"""What is taken from a process, where its own limits are lower already."""

from __future__ import annotations

import subprocess
import sys
import textwrap

SCRIPT = textwrap.dedent(
    """
    import resource
    from drafthouse_server.host.sandbox import bound_memory, drop_rights

    resource.setrlimit(resource.RLIMIT_AS, (1 << 32, 1 << 32))
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    bound_memory(1 << 40)
    print(resource.getrlimit(resource.RLIMIT_AS))
    drop_rights()
    print("dropped")
    """
)


def test_limits_that_are_lower_already_stay() -> None:
    """No text worker could start where `ulimit -f`, or LimitFSIZE, is below what it may print."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.stdout == f"{(1 << 32, 1 << 32)}\ndropped\n", done.stderr
