"""The program: `drafthouse`, or `python -m drafthouse_server`."""

from __future__ import annotations

import sys

_INTERRUPTED = 130


def main() -> int:
    """Runs the command line and returns its exit code (`cli.main`).

    Ctrl-C while it is still imported, a second on a busy machine, ends it as at any other time.
    """
    try:
        from drafthouse_server.cli.main import main as run  # noqa: PLC0415  # see above

        return run()
    except KeyboardInterrupt:
        return _INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
