"""The folder of a usage journal: its files in order, what they hold, and who may write there."""

from __future__ import annotations

import dataclasses
import fcntl
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from drafthouse_server.errors import StartupError
from drafthouse_server.usage.frames import (
    FILE_MAGIC,
    FILE_MAGIC_ANY,
    Entry,
    Frame,
    Gap,
    Mark,
    decode,
    frames,
)
from drafthouse_server.usage.record import LOST, UsageRecord

__all__ = ["JournalFolder", "Left"]

_log = logging.getLogger(__name__)

_PREFIX, _SUFFIX = "usage-", ".journal"
_LOCK = "lock"


@dataclass(slots=True)
class Left:
    """The streams of whose end the files of a journal tell nothing.

    It keeps no others: after a long absence of the store there are millions of them.
    """

    starts: dict[str, UsageRecord] = field(default_factory=dict)
    """Their records, by id."""
    marks: dict[str, Mark] = field(default_factory=dict)
    """Their last known progress, by id."""

    def take(self, entry: Entry) -> None:
        """Takes the next entry. One that comes twice, as after a repeated write, counts once."""
        record_id = entry.record_id
        if isinstance(entry, Mark):
            known = self.marks.get(record_id)
            if record_id in self.starts and (known is None or known.n_output <= entry.n_output):
                self.marks[record_id] = entry
        elif entry.outcome:
            self.starts.pop(record_id, None)
            self.marks.pop(record_id, None)
        else:
            # If a crash repeated it after its end, it ends as lost too: the first end counts.
            self.starts.setdefault(record_id, entry)

    def lost(self) -> list[UsageRecord]:
        """Returns the ends of the streams that their server has not survived.

        Each is billed what its last mark says, and that is never more than its client was sent.
        """
        found = []
        for record_id, start in self.starts.items():
            mark = self.marks.get(record_id) or Mark(record_id, start.started_at, 0)
            end = dataclasses.replace(
                start,
                outcome=LOST,
                # What a Timestamp can tell, as all ends; and the clock may have been set back.
                ended_at=max(round(mark.at, 6), start.started_at),
                n_output=mark.n_output,
                n_reused=mark.n_reused,
                n_drafted=mark.n_drafted,
                n_accepted=mark.n_accepted,
            )
            found.append(end)
        return found


class JournalFolder:
    """Files by number; those that read take no lock, one server alone writes.

    Args:
        path: The folder. It is made where it does not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock_fd = -1

    def lock(self) -> None:
        """Makes the folder, and keeps other servers from writing there until `unlock`.

        Raises:
            StartupError: it cannot be written, or another server does.
        """
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock_fd = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.unlock()
            raise StartupError(self._taken()) from None
        except OSError as error:
            self.unlock()
            raise StartupError(
                f"cannot write the usage journal in {str(self.path)!r}:"
                f" {(error.strerror or str(error)).lower()}; choose another usage_journal, or leave"
                " it empty to record nothing"
            ) from error

    def check_free(self) -> None:
        """Looks whether a server writes there. Makes nothing.

        Raises:
            StartupError: one does.
        """
        try:
            descriptor = os.open(self.path / _LOCK, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # no server was there, or `lock` tells
            return
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            raise StartupError(self._taken()) from error
        finally:
            os.close(descriptor)

    def _taken(self) -> str:
        return (
            f"another server writes the usage journal in {str(self.path)!r}; stop it, or give this"
            " one another usage_journal"
        )

    def unlock(self) -> None:
        """Lets others write. Harmless when done twice."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def numbers(self) -> list[int]:
        """Returns the numbers of the files that are there, rising. Other names are not its own."""
        names = [path.name for path in self.path.glob(f"{_PREFIX}*{_SUFFIX}")]
        texts = [name[len(_PREFIX) : -len(_SUFFIX)] for name in names]
        numbers = {int(text) for text in texts if text.isdecimal()}
        return sorted(number for number in numbers if self.file(number).name in names)

    def file(self, number: int) -> Path:
        """Returns the path of a file."""
        return self.path / f"{_PREFIX}{number:08}{_SUFFIX}"

    def size(self, number: int) -> int:
        """Returns the bytes of a file; 0 where there is no such file."""
        try:
            return self.file(number).stat().st_size
        except FileNotFoundError:
            return 0

    def sync(self) -> None:
        """Makes sure that files which were made or removed stay so. It waits for the disk."""
        fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def read(self, number: int, start: int = 0, end: int | None = None) -> Iterator[Frame | Gap]:
        """Yields what a file has from one byte to another; nothing where there is no such file."""
        try:
            with self.file(number).open("rb") as file:
                file.seek(start)
                content = file.read(-1 if end is None else max(0, end - start))
        except FileNotFoundError:
            return
        if start == 0 and content.startswith(FILE_MAGIC):
            start = len(FILE_MAGIC)
            content = content[start:]
        yield from frames(content, start)

    def left(self) -> Left:
        """Returns the streams that have not ended."""
        left = Left()
        for entry in self.entries():
            left.take(entry)
        return left

    def entries(self) -> Iterator[Entry]:
        """Yields what all files tell, in order. Of what is damaged it tells nothing."""
        for number in self.numbers():
            for part in self.read(number):
                if isinstance(part, Frame):
                    try:
                        entry = decode(part.body)
                    except ValueError as error:
                        path = self.file(number)
                        _log.error("usage journal %s: an entry was left out: %s", path, error)
                    else:
                        yield entry

    def repair(self) -> None:
        """Cuts off what a crash has torn, and says of all damage how much it is.

        Raises:
            StartupError: it cannot be cut off, or a newer version has written a file.
        """
        numbers = self.numbers()
        for number in numbers:
            self._check_version(number)
            for part in self.read(number):
                if isinstance(part, Gap):
                    self._repair(number, part, is_last=number == numbers[-1])

    def _check_version(self, number: int) -> None:
        with self.file(number).open("rb") as file:
            magic = file.read(len(FILE_MAGIC))
        is_other = magic.startswith(FILE_MAGIC_ANY) and len(magic) == len(FILE_MAGIC)
        if is_other and magic != FILE_MAGIC:
            raise StartupError(
                f"another version of Drafthouse has written the usage journal"
                f" {str(self.file(number))!r}; start that version, or give this one another"
                " usage_journal"
            )

    def _repair(self, number: int, gap: Gap, *, is_last: bool) -> None:
        path, n_bytes = self.file(number), gap.end - gap.start
        if not gap.is_tail:
            _log.error("usage journal %s: %d bytes at %d are damaged", path, n_bytes, gap.start)
            return
        _log.warning("usage journal %s: %d torn bytes at its end are cut off", path, n_bytes)
        if is_last:
            try:
                os.truncate(path, gap.start)
            except OSError as error:
                raise StartupError(
                    f"cannot repair the usage journal {str(path)!r}:"
                    f" {(error.strerror or str(error)).lower()}"
                ) from error
