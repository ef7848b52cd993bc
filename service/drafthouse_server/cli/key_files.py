"""Where keys come from: files that others cannot read, and no command line that others can see."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from drafthouse_server.access import is_loopback, mode_problem
from drafthouse_server.errors import ConfigError

__all__ = ["check_sources"]


def check_sources(
    host: str,
    flags: Iterable[str],
    files: Iterable[tuple[str, Path]],
    warn: Callable[[str], object],
) -> None:
    """Checks where keys come from: beyond loopback what is unsafe is refused, else warned of.

    Args:
        host: Address to listen at.
        flags: Flags that gave keys.
        files: Files that keys were read from, each with the setting that named it.
        warn: Takes a line for each fault.

    Raises:
        ConfigError: a key is visible to others, and the server is reached from other machines.
    """
    faults = [
        (name, f"{name} shows keys to every user of this machine; put them into a file and give"
         " --api-keys-file")
        for name in flags
    ]  # fmt: skip
    faults += [
        (setting, problem) for setting, path in files if (problem := mode_problem(setting, path))
    ]
    for name, problem in faults:
        if not is_loopback(host):
            raise ConfigError(name, "(hidden)", problem=problem)
        warn(problem)
