"""How much memory this process may use: the machine's, and what its cgroups grant of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["HostMemory", "read_memory"]

_NO_LIMIT_BYTES = 1 << 60
"""What cgroup v1 writes where there is no limit is about 2⁶³."""


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Memory of the machine and of this process's cgroups, in bytes."""

    total_bytes: int
    """The machine's; 0: it is not told, and nothing of what is free."""
    available_bytes: int
    """What programs may still take of it, as the kernel estimates."""
    limit_bytes: int = 0
    """The least limit of the cgroups; 0: none."""
    limit_free_bytes: int = 0
    """What is left until the nearest limit, files that the kernel can drop counted as free."""
    has_huge_pages: bool = False
    """Whether memory that is read into gets huge pages, by itself or where it asks for them."""

    @property
    def most_bytes(self) -> int:
        """What this process may ever have."""
        return min(self.total_bytes, self.limit_bytes or self.total_bytes)

    @property
    def free_bytes(self) -> int:
        """What it may take now."""
        if not self.limit_bytes:
            return self.available_bytes
        return min(self.available_bytes, self.limit_free_bytes)


@dataclass(frozen=True, slots=True)
class _Group:
    """One cgroup's folder, and the names of its files."""

    folder: Path
    limits: tuple[str, ...]
    used: str
    droppable: tuple[str, ...]

    def read(self) -> tuple[int, int] | None:
        """Returns limit and what is left of it; None where there is no limit."""
        told = [_number(_text(self.folder / name)) for name in self.limits]
        limit = min((it for it in told if it is not None), default=_NO_LIMIT_BYTES)
        if limit >= _NO_LIMIT_BYTES:
            return None
        used = _number(_text(self.folder / self.used)) or 0
        counts = dict(_pairs(_text(self.folder / "memory.stat")))
        dropped = sum(counts.get(name, 0) for name in self.droppable)
        return limit, max(0, limit - max(0, used - dropped))


def read_memory(root: Path = Path("/")) -> HostMemory:
    """Returns what this process may use. Where a limit cannot be read there is none.

    Args:
        root: Where /proc and /sys lie; another folder in tests.
    """
    lines = _text(root / "proc/meminfo").splitlines()
    kib = {name: _number(rest.split()[0]) for name, _, rest in map(_cut, lines) if rest.split()}
    total = (kib.get("MemTotal") or 0) * 1024
    available = (kib.get("MemAvailable") or 0) * 1024
    found = [read for group in _groups(root) if (read := group.read())]
    huge = _text(root / "sys/kernel/mm/transparent_hugepage/enabled")
    return HostMemory(
        total,
        available,
        min((limit for limit, _ in found), default=0),
        min((left for _, left in found), default=0),
        bool(huge) and "[never]" not in huge,
    )


def _groups(root: Path) -> Iterator[_Group]:
    """Yields the process's cgroup and those around it, of both versions."""
    mounts = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "memory" not in controllers.split(","):
            continue
        # A container may see its own group's path and yet find its files at the top.
        places = [path, *map(str, Path(path).parents)]
        for place in dict.fromkeys([*places, "/"]):
            inner = place.strip("/")
            if controllers:
                yield _Group(
                    mounts / "memory" / inner,
                    ("memory.limit_in_bytes",),
                    "memory.usage_in_bytes",
                    ("total_inactive_file", "total_active_file"),
                )
            else:
                for mount in (mounts, mounts / "unified"):
                    yield _Group(
                        mount / inner,
                        # Beyond memory.high the kernel slows a process down until it stands still.
                        ("memory.max", "memory.high"),
                        "memory.current",
                        ("inactive_file", "active_file"),
                    )


def _cut(line: str) -> tuple[str, str, str]:
    return line.partition(":")


def _pairs(text: str) -> Iterator[tuple[str, int]]:
    for line in text.splitlines():
        name, _, number = line.partition(" ")
        if (value := _number(number)) is not None:
            yield name, value


def _number(text: str) -> int | None:
    text = text.strip()
    return int(text) if text.isdigit() else None


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return ""
