"""Which of a wheel's libraries suits this CPU.

A build for one machine has one compiled library, beside this file. A wheel for many has one for
each level of x86-64 (`levels/v2`, `v3`, `v4`), with the wider vectors that the CPUs of that level
have, and the highest that this CPU has is loaded.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

__all__ = ["CPU_LEVEL", "cpu_level", "level_folder", "level_folders"]

CPU_LEVEL = "DRAFTHOUSE_CPU_LEVEL"
"""Environment variable that names the level to load, "v3", say, instead of the highest."""

_FOLDER = "levels"


def cpu_level() -> int:
    """Returns this CPU's level of x86-64, 1 to 4; 0 where it is another architecture or unknown."""
    try:
        from drafthouse_engine import _cpu  # noqa: PLC0415  # an older build lacks it
    except ImportError:
        return 0
    return _cpu.level()


def level_folder(
    package: Path, n_cpu: int | None = None, environment: Mapping[str, str] = os.environ
) -> Path | None:
    """Returns the folder of the library to load; None where there is one library for all.

    Args:
        package: This package's folder.
        n_cpu: The CPU's level; found out when not given.
        environment: Where `DRAFTHOUSE_CPU_LEVEL` may stand.

    Raises:
        ImportError: the wheel has no library that this CPU can run, or none of the level asked for.
    """
    found = {path.name: path for path in sorted((package / _FOLDER).glob("v[1-4]"))}
    wanted = environment.get(CPU_LEVEL, "")
    if not found:
        return None  # of what was built for this machine there is one
    names = ", ".join(found)
    n_cpu = cpu_level() if n_cpu is None else n_cpu
    if wanted and wanted not in found:
        raise ImportError(
            f"{CPU_LEVEL} is {wanted!r}, and drafthouse_engine has the levels {names};"
            " unset it, or name one of these"
        )
    can = [name for name in found if int(name[1:]) <= n_cpu]
    if not can or (wanted and wanted not in can):
        needed = wanted or min(found)
        raise ImportError(
            f"drafthouse_engine was built for x86-64-{needed} and newer, and this CPU is"
            f" x86-64-v{n_cpu}; " + ("unset " + CPU_LEVEL if can else "build it from source")
        )
    return found[wanted or max(can)]


def level_folders() -> list[str]:
    """Returns what stands before this package's own folder where the library is looked for.

    Raises:
        ImportError: as `level_folder` says.
    """
    folder = level_folder(Path(__file__).parent)
    return [] if folder is None else [str(folder)]
