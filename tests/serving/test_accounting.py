"""Accounts: each ends once, and no crash at any moment leaves more than 64 tokens unbilled."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.support.usage_store import MemoryUsageStore

from drafthouse_server.errors import UsageUnavailable
from drafthouse_server.scheduling.sequence import (
    Event,
    FinishEvent,
    FinishReason,
    Request,
    Sequence,
    SpeculationCounts,
    Timings,
    TokensEvent,
)
from drafthouse_server.serving.accounting import N_UNMARKED_MAX, Account, Accounting
from drafthouse_server.serving.metrics import Metrics
from drafthouse_server.usage.frames import Entry, Mark
from drafthouse_server.usage.journal import Journal
from drafthouse_server.usage.record import UsageCounts, UsageRecord

END = FinishEvent(FinishReason.LENGTH, Timings(0, 0, 0, 0), SpeculationCounts(0, 0, 0, (), 0))


class HeldJournal:
    """A journal whose entries a test writes when it wants."""

    has_failed = False

    def __init__(self) -> None:
        self.counts = UsageCounts()
        self.entries: list[tuple[list[Entry], Callable[[bool], None]]] = []
        self.n_written = 0

    @property
    def is_failing(self) -> bool:
        return self.counts.is_failing

    def watch(self) -> bool:
        return self.counts.is_failing

    def write(self, entry: Entry, done: Callable[[bool], None]) -> None:
        self.entries.append(([entry], done))

    def write_marks(self, marks: list[Mark], done: Callable[[bool], None]) -> None:
        self.entries.append(([*marks], done))

    def write_next(self, *, is_written: bool = True) -> None:
        _, done = self.entries[self.n_written]
        self.n_written += 1
        done(is_written)

    def marks(self, n_written: int | None = None) -> list[Mark]:
        """The marks that were asked for, or those that are written, in their order."""
        entries = [entry for group, _ in self.entries[:n_written] for entry in group]
        return [entry for entry in entries if isinstance(entry, Mark)]

    def billed(self, account: Account) -> int:
        """What is billed of a stream if the process is killed now."""
        marks = self.marks(self.n_written)
        return max(
            (m.n_output for m in marks if m.record_id == account._start.record_id), default=0
        )


def make_sequence() -> Sequence:
    return Sequence(Request("r1", [1] * 5, tenant="acme", end_user="u"), None)


def make(
    journal: HeldJournal | None, *, is_open_unbilled: bool = False
) -> tuple[Accounting, Account]:
    accounting = Accounting(
        Metrics(),
        "m",
        journal=journal,  # type: ignore[arg-type]  # as much of one as accounts use
        is_open_unbilled=is_open_unbilled,
    )
    return accounting, accounting.open(make_sequence(), key_id="k")


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.mark.parametrize("n_streams", [1, 3])
async def test_a_killed_server_bills_at_most_what_it_sent_and_64_less_at_worst(
    n_streams: int,
) -> None:
    """Messages of any sizes; the journal writes whenever it wants; a kill at every moment."""
    for seed in range(50 // n_streams):
        chance = random.Random(seed)
        journal = HeldJournal()
        accounting, first = make(journal)
        accounts = [first, *(accounting.open(make_sequence()) for _ in range(n_streams - 1))]
        all_sent = dict.fromkeys(accounts, 0)

        async def send(account: Account, sizes: list[int], sent: dict[Account, int]) -> None:
            for size in sizes:
                events: list[Event] = [TokensEvent([7] * size)]
                for part in account.parts(events):
                    n_tokens = sum(len(e.tokens) for e in part if isinstance(e, TokensEvent))
                    if account.must_wait(n_tokens):
                        await account.wait(n_tokens)
                    sent[account] += n_tokens  # as soon as it is handed over a client may have it
                    await asyncio.sleep(0)
                    account.sent(n_tokens)

        sizes = [[chance.choice([1, 3, 8, 33, 200]) for _ in range(30)] for _ in accounts]
        sending = asyncio.gather(*map(send, accounts, sizes, [all_sent] * n_streams))
        while not sending.done():
            await asyncio.sleep(0)
            for number, (account, n_sent) in enumerate(all_sent.items()):
                assert n_sent == 0 or journal.n_written > number, "something before the start"
                billed = journal.billed(account)
                assert billed <= n_sent <= billed + N_UNMARKED_MAX
            if journal.n_written < len(journal.entries) and chance.random() < 0.3:
                journal.write_next()
        await sending
        assert [account.n_output for account in accounts] == [sum(each) for each in sizes]


async def test_a_mark_leaves_the_last_message_out() -> None:
    journal = HeldJournal()
    _, account = make(journal)
    for n_tokens in (20, 10, 10, 10, 10, 15):
        account.sent(n_tokens)
    assert [mark.n_output for mark in journal.marks()] == [30, 60]


async def test_streams_that_run_side_by_side_are_marked_together() -> None:
    journal = HeldJournal()
    accounting, first = make(journal)
    others = [accounting.open(make_sequence()) for _ in range(9)]
    late = accounting.open(make_sequence())
    for _ in range(40):
        for account in (*others, first):
            account.sent(1)
    late.sent(16)  # all of them in its last message, of which nobody knows that it has left
    for account in (*others, first):
        account.sent(1)
    [(group, _)] = journal.entries[11:]  # behind the starts: one write, one call
    assert {mark.record_id for mark in group if isinstance(mark, Mark)} == {
        account._start.record_id for account in (*others, first)
    }
    assert {mark.n_output for mark in journal.marks()} == {38, 39}
    assert all(account.must_wait(24) for account in others)
    for _ in range(12):
        journal.write_next()
    assert not any(account.must_wait(24) for account in (*others, first, late))


async def test_a_stream_that_has_ended_here_waits_for_no_mark_that_does_not_come() -> None:
    """As when the server closes while a handler still writes."""
    journal = HeldJournal()
    _, account = make(journal)
    account.end("SERVER_DRAINING")
    for _ in range(60):
        account.sent(1)
    assert account.must_wait(24)
    while journal.n_written < len(journal.entries):
        journal.write_next()
    assert not account.must_wait(24)


async def test_without_a_journal_nothing_waits_and_messages_are_whole() -> None:
    _, account = make(None)
    events: list[Event] = [TokensEvent([1] * 500), END]
    assert list(account.parts(events)) == [events]
    assert not account.must_wait(500)


@pytest.mark.parametrize("sizes", [[], [1], [24], [25], [48], [23, 1, 1], [500, 2], [16, 16, 16]])
async def test_parts_are_the_events_in_messages_of_24_tokens(sizes: list[int]) -> None:
    _, account = make(HeldJournal())
    tokens = iter(range(10_000))
    news = [[next(tokens) for _ in range(size)] for size in sizes]
    events: list[Event] = [TokensEvent(new, [0.5] * len(new)) for new in news]
    parts = list(account.parts([*events, END]))
    assert parts[-1][-1] is END
    found = [[e for e in part if isinstance(e, TokensEvent)] for part in parts]
    assert [t for part in found for e in part for t in e.tokens] == list(range(sum(sizes)))
    assert all(len(e.tokens) == len(e.logprobs) > 0 for part in found for e in part)
    counts = [sum(len(e.tokens) for e in part) for part in found]
    assert all(count == 24 for count in counts[:-1])
    assert counts[-1] <= 24


async def test_an_account_ends_once_and_tells_everybody() -> None:
    accounting, account = make(HeldJournal())
    told: list[UsageRecord] = []
    accounting.on_end.append(told.append)
    account.sent(7)
    account.end("stop")
    account.end("cancelled")
    [record] = told
    assert (record.outcome, record.n_output, record.n_prompt) == ("stop", 7, 5)
    assert (record.tenant, record.key_id, record.end_user) == ("acme", "k", "u")
    statistics = accounting.metrics.statistics()
    assert (statistics.n_prompt_tokens, statistics.n_output_tokens) == (5, 7)
    assert record.record_id == account._start.record_id


async def test_an_end_waits_for_its_record() -> None:
    journal = HeldJournal()
    _, account = make(journal)
    account.end("stop")
    waiting = asyncio.create_task(account.written())
    await settle()
    assert not waiting.done()
    journal.write_next()
    await settle()
    assert not waiting.done()
    journal.write_next()
    await waiting


async def test_a_cancelled_wait_has_no_effect() -> None:
    journal = HeldJournal()
    _, account = make(journal)
    waiting = asyncio.create_task(account.wait(1))
    await settle()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    journal.write_next()
    assert not account.must_wait(1)


async def test_while_the_journal_fails_running_streams_go_on() -> None:
    journal = HeldJournal()
    accounting, account = make(journal)
    waiting = asyncio.create_task(account.wait(1))
    await settle()
    journal.counts.is_failing = True
    journal.write_next(is_written=False)
    await waiting
    account.sent(24)
    account.sent(24)
    assert not account.must_wait(200)
    account.end("stop")
    journal.write_next(is_written=False)
    journal.write_next(is_written=False)
    await account.written()
    with pytest.raises(UsageUnavailable):
        accounting.check_open()


async def test_a_disk_that_does_not_answer_stops_no_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drafthouse_server.serving.accounting._WATCH_S", 0.001)
    journal = HeldJournal()
    accounting, account = make(journal)
    other = accounting.open(make_sequence())
    other.end("stop")
    waiting = [asyncio.create_task(account.wait(1)), asyncio.create_task(other.written())]
    await settle()
    assert not any(task.done() for task in waiting)
    journal.counts.is_failing = True  # as `watch` of a stuck one finds
    await asyncio.gather(*waiting)
    assert journal.n_written == 0


async def test_streams_without_a_record_are_counted_where_they_are_let_in() -> None:
    journal = HeldJournal()
    accounting, _ = make(journal, is_open_unbilled=True)
    journal.counts.is_failing = True
    accounting.check_open()
    n_entries = len(journal.entries)
    account = accounting.open(make_sequence())
    account.sent(3)
    account.end("stop")
    await account.written()
    assert len(journal.entries) == n_entries
    assert accounting.metrics.statistics().usage.n_unbilled == 1
    assert accounting.metrics.statistics().n_output_tokens == 3


@pytest.fixture
async def accounting(tmp_path: Path) -> AsyncIterator[Accounting]:
    journal = Journal.open(
        tmp_path, MemoryUsageStore(), post=asyncio.get_running_loop().call_soon_threadsafe
    )
    accounting = Accounting(Metrics(), "m", journal=journal)
    yield accounting
    await accounting.close()


async def test_a_thousand_accounts_over_a_real_journal(accounting: Accounting) -> None:
    async def run(number: int) -> int:
        chance = random.Random(number)
        account = accounting.open(make_sequence())
        for _ in range(chance.randrange(6)):
            for part in account.parts([TokensEvent([1] * chance.randrange(1, 90))]):
                n_tokens = sum(len(e.tokens) for e in part if isinstance(e, TokensEvent))
                await account.wait(n_tokens)
                account.sent(n_tokens)
        account.end("stop")
        if chance.random() < 0.7:  # the others have left
            await account.written()
        return account.n_output

    n_output = sum(await asyncio.gather(*(run(number) for number in range(1000))))
    await accounting.close()
    usage = accounting.metrics.statistics().usage
    assert usage.n_records == 1000
    assert accounting.metrics.statistics().n_output_tokens == n_output > 0


async def test_a_close_ends_what_is_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drafthouse_server.serving.accounting._CLOSE_S", 0.01)
    store = MemoryUsageStore()
    journal = Journal.open(tmp_path, store, post=asyncio.get_running_loop().call_soon_threadsafe)
    accounting = Accounting(Metrics(), "m", journal=journal)
    told: list[UsageRecord] = []
    accounting.on_end.append(told.append)
    accounting.open(make_sequence()).sent(3)
    await accounting.close()
    assert [(record.outcome, record.n_output) for record in told] == [("SERVER_DRAINING", 3)]
    assert journal.counts.n_records == 1


async def test_a_close_needs_no_thread_of_those_that_may_all_hang(accounting: Accounting) -> None:
    """As when a few acts of operators wait for the disk of the audit trail."""
    loop, may_end = asyncio.get_running_loop(), threading.Event()
    loop.set_default_executor(ThreadPoolExecutor(1))
    hanging = loop.run_in_executor(None, may_end.wait, 60)
    try:
        await asyncio.wait_for(accounting.close(), 100)
    finally:
        may_end.set()
    assert await hanging
