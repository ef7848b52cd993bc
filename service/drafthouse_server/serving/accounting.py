"""Who has had how much: one account for each accepted stream, which ends once on every way out.

An account counts the tokens in messages that the transport has taken. That one number is the
stream's `usage.output_tokens`, its record's, the metric's, and what its tenant's limits count. With
a journal (`usage_journal`), the account also sees to it that no message is handed over which a
crash would leave unbilled by more than `N_UNMARKED_MAX` tokens, and that the record is written
before the client is told the end (`docs/internals/usage.md`).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import time
from collections import abc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from drafthouse_server.errors import Draining, StartupError, UsageUnavailable
from drafthouse_server.scheduling.sequence import Event, Sequence, TokensEvent, Usage
from drafthouse_server.serving.metrics import Metrics
from drafthouse_server.tenancy.admission import Admission, Ticket
from drafthouse_server.usage.frames import Mark
from drafthouse_server.usage.journal import Journal
from drafthouse_server.usage.record import UsageRecord, UsageStoreFailed, make_record_id

__all__ = ["N_UNMARKED_MAX", "Account", "Accounting"]

N_UNMARKED_MAX = 64
"""Most tokens that a client may have beyond the last mark of its stream in the journal."""

_N_MESSAGE, _N_MARK = 24, 40
"""Tokens of one message at most, and those beyond the last mark that ask for the next one. Together
they are no more than a client may have beyond a mark: waiting for the one asked for is enough."""

_N_JOIN = 16
"""Tokens to bill beyond the last mark of a stream with which it joins the marks of another: so
streams that run side by side wake the journal together, and not each for itself."""

_WATCH_S = 1.0
"""Seconds from one look at the journal's disk to the next."""

_CLOSE_S = 1.0
"""Seconds that handlers have to end their accounts when the server closes."""


class Accounting:
    """Opens accounts, and counts them when they end.

    Args:
        metrics: Takes the counts.
        model: Name of the model, for records.
        journal: Where records are written; None: nowhere.
        is_open_unbilled: Whether streams are let in, without a record, while the journal cannot be
            written; else they are refused.
        retry_after_s: Advice to those who are refused, seconds.
        unix_clock: Seconds since 1970.
        on_change: Called with `is_open`, soon after it has changed.
        on_failure: Called once, when it is not open and never will be.

    Thread:
        Event loop only.
    """

    def __init__(
        self,
        metrics: Metrics,
        model: str,
        *,
        journal: Journal | None = None,
        is_open_unbilled: bool = False,
        retry_after_s: float = 1.0,
        unix_clock: Callable[[], float] = time.time,
        on_change: Callable[[bool], None] = lambda _: None,
        on_failure: Callable[[], None] | None = None,
    ) -> None:
        self.metrics = metrics
        """Takes the counts."""
        self.journal = journal
        """Where records are written."""
        self.unix_clock = unix_clock
        """Seconds since 1970."""
        self.on_end: list[Callable[[UsageRecord], None]] = []
        """Called with the record of every accepted stream, once, when it ends: with a journal or
        without."""
        self._model = model
        self._is_open_unbilled = is_open_unbilled
        self._on_change = on_change
        self._on_failure = on_failure
        self._was_open = True
        self._retry_after_s = retry_after_s
        self._accounts: set[Account] = set()
        self._is_empty: asyncio.Event | None = None
        self._waiting: set[Account] = set()
        self._timer: asyncio.TimerHandle | None = None
        if journal is not None:
            metrics.usage = journal.counts
            self._watch(journal)

    def _watch(self, journal: Journal) -> None:
        """Lets nobody wait for a disk that does not answer."""
        if journal.watch():
            for account in (*self._accounts, *self._waiting):
                account.drafts_off()
        if self.is_open != self._was_open:
            self._was_open = not self._was_open
            self._on_change(self._was_open)
        if journal.has_failed and not self.is_open and self._on_failure is not None:
            self._on_failure()
            self._on_failure = None
        self._timer = asyncio.get_running_loop().call_later(_WATCH_S, self._watch, journal)

    async def restore(self, admission: Admission) -> None:
        """Has the monthly budgets of tenants go on from what the journal's store tells.

        Raises:
            StartupError: the store cannot tell.
        """
        journal = self.journal
        if journal is None:
            return
        try:
            await admission.restore(lambda since: asyncio.to_thread(journal.sum_tokens, since))
        except UsageStoreFailed as error:
            raise StartupError(
                f"what tenants have used of this month is unknown: {error}"
            ) from error

    @property
    def is_open(self) -> bool:
        """Whether a stream can be recorded now, or may go without."""
        journal = self.journal
        return journal is None or not journal.is_failing or self._is_open_unbilled

    def check_open(self) -> None:
        """Checks that a stream can be recorded, or may go without.

        Raises:
            UsageUnavailable: neither (USAGE_UNAVAILABLE).
        """
        if not self.is_open:
            raise UsageUnavailable(self._retry_after_s)

    def refuse(self, outcome: str) -> None:
        """Counts a request that was not accepted.

        Args:
            outcome: cancelled, deadline, or an error's reason.
        """
        self.metrics.count_request(outcome)

    def open(
        self,
        sequence: Sequence,
        *,
        age_s: float = 0.0,
        key_id: str = "",
        ticket: Ticket | None = None,
    ) -> Account:
        """Opens the account of a stream that is accepted now.

        Args:
            sequence: The stream.
            age_s: Seconds since its call was received.
            key_id: Id of the API key.
            ticket: Has what was reserved for it, which is settled with what is billed.
        """
        now, request = self.unix_clock(), sequence.request
        start = UsageRecord(
            record_id=make_record_id(int(now * 1000), os.urandom(10)),
            tenant=request.tenant,
            key_id=key_id,
            end_user=request.end_user,
            model=self._model,
            request_id=request.request_id,
            started_at=round(now - age_s, 6),
            n_prompt=sequence.n_prompt,
        )
        journal = self.journal
        if journal is not None and journal.is_failing and self._is_open_unbilled:
            journal.counts.n_unbilled += 1
            journal = None
        account = Account(self, sequence, start, journal, ticket)
        self._accounts.add(account)
        return account

    def settle(self, account: Account, record: UsageRecord) -> None:
        """Counts an account that has ended. Accounts call it."""
        self._accounts.discard(account)
        if self._is_empty is not None and not self._accounts:
            self._is_empty.set()
        self.metrics.count_request(record.outcome)
        self.metrics.count_tokens(record.n_prompt, record.n_output)
        for tell in self.on_end:
            tell(record)

    def mark(self, asking: Account, journal: Journal) -> None:
        """Has a mark of a stream written, and of all others of which there is enough to tell.

        Accounts call it; one that has ended here meanwhile may still have a handler that writes.
        """
        marks = [(account, account.take_mark()) for account in {asking, *self._accounts}]
        found = [(account, mark) for account, mark in marks if mark is not None]

        def tell(_: bool) -> None:
            for account, mark in found:
                account.note_mark(mark.n_output)

        journal.write_marks([mark for _, mark in found], tell)

    @contextlib.contextmanager
    def waiting(self, account: Account) -> Iterator[None]:
        """Knows, for the time of a block, of an ended account whose record is waited for."""
        self._waiting.add(account)
        try:
            yield
        finally:
            self._waiting.discard(account)

    async def close(self) -> None:
        """Waits for the accounts to end, ends those that do not, and closes the journal."""
        if self._accounts:
            self._is_empty = asyncio.Event()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_CLOSE_S):
                    await self._is_empty.wait()
        for account in tuple(self._accounts):
            account.end(Draining.reason)
        if self._timer is not None:
            self._timer.cancel()
        if self.journal is not None:
            # Those that others share may all wait for a disk that hangs.
            own = ThreadPoolExecutor(1, thread_name_prefix="usage-end")
            try:
                await asyncio.get_running_loop().run_in_executor(own, self.journal.close)
            finally:
                own.shutdown(wait=False)


class Account:
    """What one accepted stream has had. Made by `Accounting.open`.

    Around every message with tokens: `wait` where `must_wait` says so, write, `sent`.

    Args:
        accounting: Counts it when it ends.
        sequence: The stream.
        start: Its record so far.
        journal: Where it is written; None: nowhere.
        ticket: Has what was reserved for it; None: nothing was.
    """

    __slots__ = (
        "_accounting", "_end", "_is_started", "_journal", "_n_asked", "_n_gone", "_n_marked",
        "_sequence", "_start", "_ticket", "_waiter", "n_output",
    )  # fmt: skip

    def __init__(
        self,
        accounting: Accounting,
        sequence: Sequence,
        start: UsageRecord,
        journal: Journal | None,
        ticket: Ticket | None,
    ) -> None:
        self._accounting = accounting
        self._ticket = ticket
        self._sequence = sequence
        self._start = start
        self._journal = journal
        self._is_started = False
        self._n_asked = 0
        self._n_gone = 0
        self._n_marked = 0
        self._end: asyncio.Future[None] | None = None
        self._waiter: asyncio.Future[None] | None = None
        self.n_output = 0
        """Tokens in messages that the transport has taken."""
        if journal is not None:
            journal.write(start, self._on_started)

    @property
    def usage(self) -> Usage:
        """Tokens counted so far."""
        return Usage(self._start.n_prompt, self.n_output, self._sequence.n_reused)

    def parts(self, events: abc.Sequence[Event]) -> Iterator[abc.Sequence[Event]]:
        """Yields events in messages' worth: as few parts as a crash at any moment allows."""
        if self._journal is None:
            yield events
            return
        part: list[Event] = []
        n_left = _N_MESSAGE
        for event in events:
            if isinstance(event, TokensEvent):
                while len(event.tokens) > n_left:
                    head, event = _cut(event, n_left)  # noqa: PLW2901  # what is left of it
                    yield [*part, head] if head.tokens else part
                    part, n_left = [], _N_MESSAGE
                n_left -= len(event.tokens)
            part.append(event)
        yield part

    def must_wait(self, n_tokens: int) -> bool:
        """Returns whether a message with so many tokens must not be handed over yet."""
        journal = self._journal
        if journal is None or journal.is_failing:
            return False
        return not self._is_started or self.n_output + n_tokens - self._n_marked > N_UNMARKED_MAX

    async def wait(self, n_tokens: int) -> None:
        """Waits until a message with so many tokens, `_N_MESSAGE` at most, may be handed over.

        Cancellation:
            Atomic: it has no effect.
        """
        while self.must_wait(n_tokens):
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    def sent(self, n_tokens: int) -> None:
        """Takes note that the transport has taken a message with so many tokens."""
        # Those of the message before: that the transport has taken another proves that they left.
        self._n_gone = self.n_output
        self.n_output += n_tokens
        journal = self._journal
        if journal is not None and self.n_output - self._n_asked >= _N_MARK:
            self._accounting.mark(self, journal)

    def take_mark(self) -> Mark | None:
        """Returns a mark that is to be written, if there is enough to tell. Accounting calls it."""
        n_new = self._n_gone - self._n_asked
        is_due = self.n_output - self._n_asked >= _N_MARK
        if self._journal is None or not (is_due or n_new >= _N_JOIN):
            return None
        self._n_asked = self._n_gone
        return Mark(
            self._start.record_id,
            self._accounting.unix_clock(),
            self._n_gone,
            self._sequence.n_reused,  # set before the first token
            *self._drafted(),
        )

    def _drafted(self) -> tuple[int, int]:
        """Returns the draft tokens verified so far, and of these, those accepted.

        Of a sequence that still runs: two counters of the engine thread that only grow, the smaller
        one read first.
        """
        n_accepted = self._sequence.tally.n_accepted
        return self._sequence.tally.n_drafted, n_accepted

    def end(self, outcome: str) -> None:
        """Ends the account and has its record written. Of no effect when it has ended.

        Args:
            outcome: stop, length, cancelled, deadline, or an error's reason.
        """
        if self._end is not None:
            return
        self._end = asyncio.get_running_loop().create_future()
        start, timings = self._start, self._sequence.timings
        n_drafted, n_accepted = self._drafted()
        record = UsageRecord(
            start.record_id,
            start.tenant,
            start.key_id,
            start.end_user,
            start.model,
            start.request_id,
            start.started_at,
            start.n_prompt,
            # What a Timestamp can tell; a clock that was set back must not end it before it began.
            ended_at=max(start.started_at, round(self._accounting.unix_clock(), 6)),
            outcome=outcome,
            n_reused=self._sequence.n_reused,
            n_output=self.n_output,
            n_drafted=n_drafted,
            n_accepted=n_accepted,
            queue_s=timings.queue_s,
            prefill_s=timings.prefill_s,
            decode_s=timings.decode_s,
            preempted_s=timings.preempted_s,
        )
        if self._ticket is not None:
            # A prompt that never got a slot was not computed.
            n_prompt = 0 if math.isnan(self._sequence.clock.slot_at) else start.n_prompt
            self._ticket.settle(n_prompt, self.n_output)
        self._accounting.settle(self, record)
        if self._journal is None:
            self._end.set_result(None)
        else:
            self._journal.write(record, self._on_ended)

    async def written(self) -> None:
        """Waits until the record is on the disk, or cannot be written there now."""
        assert self._end is not None, "only an account that has ended has a record"
        with self._accounting.waiting(self):
            await asyncio.shield(self._end)

    def drafts_off(self) -> None:
        """Lets nobody wait for the journal, which fails. Accounting calls it."""
        self._wake()
        if self._end is not None:
            self._on_ended(False)

    def note_mark(self, n_output: int) -> None:
        """Takes note that a mark with so many tokens is written. Accounting calls it."""
        self._n_marked = n_output
        self._wake()

    # What the journal tells. Whether it was written makes no difference: what was not waits in
    # front of all that comes later, and while the journal is failing nobody waits for it.

    def _on_started(self, _: bool) -> None:
        self._is_started = True
        self._wake()

    def _on_ended(self, _: bool) -> None:
        assert self._end is not None
        if not self._end.done():
            self._end.set_result(None)

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


def _cut(event: TokensEvent, n: int) -> tuple[TokensEvent, TokensEvent]:
    """Returns the first n tokens of an event, and the others."""
    head = TokensEvent(event.tokens[:n], event.logprobs[:n])
    return head, TokensEvent(event.tokens[n:], event.logprobs[n:])
