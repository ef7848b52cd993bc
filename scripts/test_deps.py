"""Installs the Debian packages that `make test` and its like can use besides.

What the build needs of a bare Debian: g++, Python's headers and venv. Compilers that a user does
not need: two Clangs, libc++, a compiler for ARM; qemu-user; SIMDe, which has AVX-512 as functions;
PostgreSQL and Redis, which tests start by themselves; systemd, which checks our unit; Node, for buf
and a client in JavaScript, unless there is one from elsewhere. What is there is not installed
again. Without them the tests that need them are skipped, and fail where CI is set.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys

FIXED = (
    "clang-14",
    "libclang-rt-14-dev",
    "g++",
    "git",
    "libsimde-dev",
    "patch",
    "postgresql",
    "python3-dev",
    "python3-venv",
    "qemu-user",
    "redis-server",
    "systemd",
)
CROSS = ("g++-aarch64-linux-gnu", "libc6-dev-arm64-cross")
NODE = ("nodejs", "npm")
NEWEST = ("clang-{}", "libc++-{}-dev", "libc++abi-{}-dev")


class DepsError(Exception):
    """Says in one sentence why the packages are not there."""


def output(*command: str) -> str:
    """Returns what a command prints; nothing where it fails."""
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def is_installed(package: str) -> bool:
    """Tells whether a Debian package is installed."""
    return output("dpkg-query", "-W", "-f=${Status}", package) == "install ok installed"


def newest_clang() -> int:
    """Returns the number of the newest Clang that apt knows, 0 where it knows none."""
    names = output("apt-cache", "search", "--names-only", r"^clang-[0-9]+$")
    return max((int(n) for n in re.findall(r"^clang-(\d+)", names, re.MULTILINE)), default=0)


def wanted() -> list[str]:
    """Returns the packages, the newest Clang among them."""
    newest = newest_clang()
    if not newest:
        raise DepsError("apt knows no clang: apt-get update has found no Debian archive.")
    machine = os.uname().machine
    cross = CROSS if machine == "x86_64" else ()
    # One from elsewhere brings npm along, and Debian's cannot lie beside it.
    node = () if shutil.which("npm") else NODE
    return sorted({*FIXED, *cross, *node, *(name.format(newest) for name in NEWEST)})


def apt(*arguments: str) -> None:
    """Runs apt-get as root.

    Raises:
        DepsError: it failed, or this is not root and there is no sudo.
    """
    command = ["apt-get", "-qq", "-o", "Dpkg::Use-Pty=0", *arguments]
    if os.geteuid() != 0:
        if not shutil.which("sudo"):
            raise DepsError(f"This needs root: run `{shlex.join(command)}` as root.")
        command = ["sudo", *command]
    sys.stdout.write(f"{shlex.join(command)}\n")
    sys.stdout.flush()
    env = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    if done.returncode:
        lines = (done.stdout + done.stderr).splitlines()[-5:]
        raise DepsError(f"apt-get failed: {' / '.join(lines)}")


def install() -> None:
    """Installs what is missing; asks the archives first, where apt has not done so.

    Raises:
        DepsError: apt is missing, or it failed.
    """
    if not shutil.which("apt-get"):
        raise DepsError("This is no Debian: install the packages of scripts/test_deps.py yourself.")
    if not newest_clang():
        apt("update")
    missing = [name for name in wanted() if not is_installed(name)]
    unknown = [name for name in missing if not output("apt-cache", "show", name)]
    if unknown:  # one of them would have apt-get install none
        sys.stdout.write(f"test-deps: this release has no {', '.join(unknown)}: left out\n")
    missing = [name for name in missing if name not in unknown]
    if not missing:
        sys.stdout.write("test-deps: there\n")
        return
    try:
        apt("install", "--yes", "--no-install-recommends", *missing)
    except DepsError:  # lists of packages that are older than the archive
        apt("update")
        apt("install", "--yes", "--no-install-recommends", *missing)
    sys.stdout.write(f"test-deps: installed {len(missing)} packages\n")


def main() -> int:
    """Installs; 0 or, after one sentence on standard error, 1."""
    try:
        install()
    except DepsError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
