"""What a stream is billed for: the record of it, what lists of records ask for, and their store.

A record belongs to a stream that was accepted: whose prompt was tokenised and which waited for a
slot. `journal` writes records down at once, a `UsageStore` keeps them and finds them again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

__all__ = [
    "LOST",
    "UsageCounts",
    "UsageCursor",
    "UsageQuery",
    "UsageRecord",
    "UsageStore",
    "UsageStoreFailed",
    "cursor_of",
    "make_record_id",
]

LOST = "lost"
"""Outcome of a stream that its server has not survived."""

_ID_ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
"""Crockford's: digits and capitals without I, L, O and U."""

_N_ID_CHARACTERS = 26


@dataclass(frozen=True, slots=True)
class UsageRecord:
    """What one accepted stream took, and how it ended."""

    record_id: str
    """A ULID, made by the server: 26 characters that begin with the time and never repeat."""
    tenant: str
    """Name of the tenant."""
    key_id: str
    """Id of the API key; empty where there was none."""
    end_user: str
    """Whom the tenant served, in the tenant's own words; empty where it did not say."""
    model: str
    """Name of the model."""
    request_id: str
    """Id of the call, as in logs and errors."""
    started_at: float
    """When the call was received: seconds since 1970, UTC."""
    n_prompt: int
    """Tokens of the prompt."""
    ended_at: float = 0.0
    """When the stream ended: seconds since 1970, UTC; of a lost one, when it was last heard of."""
    outcome: str = ""
    """stop, length, cancelled, deadline, the reason of an error, or `LOST`."""
    n_reused: int = 0
    """Tokens of the prompt that were not computed again."""
    n_output: int = 0
    """Tokens in the messages that were handed to the transport: those that are billed."""
    n_drafted: int = 0
    """Draft tokens verified."""
    n_accepted: int = 0
    """Draft tokens accepted."""
    queue_s: float = 0.0
    """Seconds from the receipt to the first slot."""
    prefill_s: float = 0.0
    """Seconds from the slot to the first token."""
    decode_s: float = 0.0
    """Seconds from the first token to the last."""
    preempted_s: float = 0.0
    """Seconds without a slot after the first one, within the spans above."""

    @property
    def n_rejected(self) -> int:
        """Draft tokens that were not accepted."""
        return self.n_drafted - self.n_accepted

    @property
    def n_limited(self) -> int:
        """Tokens that count toward its tenant's limits: a prompt that never got a slot does not."""
        has_begun = self.queue_s > 0 or self.n_output > 0
        return self.n_output + (self.n_prompt if has_begun else 0)


@dataclass(frozen=True, slots=True, order=True)
class UsageCursor:
    """A place in a list of records, which is ordered by end and id."""

    ended_at: float
    """End of the record before it, seconds since 1970."""
    record_id: str
    """Id of the record before it."""


@dataclass(frozen=True, slots=True)
class UsageQuery:
    """Which records a list has; each condition that is not given holds for all."""

    tenant: str | None = None
    """Name of the tenant."""
    key_id: str | None = None
    """Id of the API key."""
    model: str | None = None
    """Name of the model."""
    since: float | None = None
    """Earliest end, seconds since 1970."""
    until: float | None = None
    """End before which all of them ended, seconds since 1970."""
    after: UsageCursor | None = None
    """Last record of the page before."""
    n_max: int | None = None
    """Most records; None is all of them."""

    def matches(self, record: UsageRecord) -> bool:
        """Returns whether a record is in the list, whatever the number of them."""
        return (
            self.tenant in {None, record.tenant}
            and self.key_id in {None, record.key_id}
            and self.model in {None, record.model}
            and (self.since is None or record.ended_at >= self.since)
            and (self.until is None or record.ended_at < self.until)
            and (self.after is None or cursor_of(record) > self.after)
        )


class UsageStoreFailed(Exception):
    """The store cannot be read or written now; another attempt may succeed."""


class UsageStore(Protocol):
    """Keeps records. Its methods may wait for a disk or a server.

    Thread:
        Any, several at once.
    """

    def add(self, records: Sequence[UsageRecord]) -> None:
        """Keeps records, all or none of them; those that it has already change nothing.

        Raises:
            UsageStoreFailed: It kept none.
        """
        ...

    def find(self, query: UsageQuery) -> Sequence[UsageRecord]:
        """Returns records by their end, and where that is the same, by their id.

        Raises:
            UsageStoreFailed: It cannot tell.
        """
        ...

    def sum_tokens(self, since: float) -> Mapping[str, int]:
        """Returns the tokens of prompts and outputs of streams that began since a time, by tenant.

        As `UsageRecord.n_limited` counts them.

        Args:
            since: Earliest start, seconds since 1970.

        Raises:
            UsageStoreFailed: It cannot tell.
        """
        ...

    def close(self) -> None:
        """Gives back what it holds."""
        ...


@dataclass(slots=True)
class UsageCounts:
    """How the recording does. Counts only grow; what says "now" is as of now."""

    n_records: int = 0
    """Records written to the journal."""
    n_pending: int = 0
    """Entries that wait now for a journal which cannot be written."""
    n_journal_failures: int = 0
    """Times that the journal could not be written."""
    n_store_failures: int = 0
    """Times that the store did not take records."""
    n_unbilled: int = 0
    """Streams let in without a record, because the journal could not be written."""
    is_failing: bool = False
    """Whether the journal cannot be written now."""

    def copy(self) -> UsageCounts:
        """Returns the counts as they are now."""
        return dataclasses.replace(self)


def cursor_of(record: UsageRecord) -> UsageCursor:
    """Returns the place behind a record."""
    return UsageCursor(record.ended_at, record.record_id)


def make_record_id(unix_ms: int, chance: bytes) -> str:
    """Returns a ULID: 48 bits of time, then 80 of chance, in Crockford's base 32.

    Args:
        unix_ms: Milliseconds since 1970, [0, 2^48).
        chance: Ten random bytes.

    Source:
        https://github.com/ulid/spec
    """
    assert len(chance) == 10, "a record's id has 80 random bits"
    number = unix_ms << 80 | int.from_bytes(chance)
    return "".join(
        _ID_ALPHABET[number >> shift & 31] for shift in range(5 * _N_ID_CHARACTERS - 5, -5, -5)
    )
