"""What changes under a server that works: certificates, keys, databases, its disk, its process.

No stream that has begun is cut off by any of it, and each is billed what its client has read.
`make test` makes a few changes of each kind, `make whole` as many as the proof asks for.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.rpc.test_tls import client_of, files, shake_hands
from tests.rpc.test_usage_crash import recovered, serving
from tests.rpc.test_usage_store import impatient, quick_looks, stored
from tests.support.certificates import Authority
from tests.support.databases import Daemon, postgresql, redis_server
from tests.support.shell import Shell

import drafthouse
from drafthouse_server.engine.fake import FakeEngine
from drafthouse_server.rpc.server import Server
from drafthouse_server.tenancy import redis_counters

if TYPE_CHECKING:
    from tests.conftest import Eventually, ServerFactory

__all__ = ["quick_looks"]  # a fixture of all tests here, too

N_ASKERS = 6
N_MORE = 20  # streams that end after each change, before the next one


class Load:
    """Clients that ask for one stream after the other, some over a connection of its own each."""

    def __init__(self, server: Server, authority: Authority, key: str) -> None:
        self._server = server
        self._authority = authority
        self.key = key
        """With which calls begin from now on."""
        self.beginning: Counter[str] = Counter()
        """Calls by key that were sent, and of which nothing has come yet."""
        self.counts: list[int] = []
        """Tokens of the streams that have ended."""
        self.is_over = False
        """Whether no more calls are to begin."""

    def client(self, key: str) -> drafthouse.AsyncClient:
        return client_of(self._server, self._authority, key=key)

    async def ask(self, number: int) -> None:
        while not self.is_over:
            key = self.key
            async with self.client(key) as client:
                while key == self.key and not self.is_over:
                    await self._generate(client, key)
                    if number % 2:
                        break

    async def _generate(self, client: drafthouse.AsyncClient, key: str) -> None:
        n_tokens = len(self.counts) % 50 + 1
        self.beginning[key] += 1
        stream = client.generate("x", max_output_tokens=n_tokens, end_user=f"user {n_tokens % 3}")
        try:
            chunks = aiter(stream)
            await anext(chunks)
        finally:
            self.beginning[key] -= 1
        async for _ in chunks:
            pass
        result = await stream.result()
        assert result.usage.output_tokens == n_tokens
        self.counts.append(n_tokens)


@pytest.fixture
def databases(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Daemon, str]]]:
    """A PostgreSQL and a Redis, with their URLs."""
    monkeypatch.setattr(redis_counters, "_TIMEOUT_S", 1.0)  # a Redis that is slow is not away
    with postgresql() as database, redis_server() as redis:
        yield [database, redis]


async def refusal(client: drafthouse.AsyncClient) -> type[drafthouse.DrafthouseError] | None:
    """Why the server refuses a client; None where it does not."""
    try:
        await client.tokenize("x")
    except drafthouse.DrafthouseError as error:
        return type(error)
    return None


class Changes:
    """What is changed while the load goes on. Each change is over when the server knows it."""

    def __init__(
        self, server: Server, load: Load, authority: Authority, shell: Shell, folder: Path
    ) -> None:
        self._server = server
        self._load = load
        self._authority = authority
        self._shell = shell
        self._folder = folder

    async def certificate(self) -> None:
        """The server gets another certificate, which newcomers see."""
        new = self._authority.issue()
        new.write(self._folder)
        seen, _ = await asyncio.to_thread(shake_hands, self._server.port, self._authority)
        assert seen == new.serial

    async def key(self, eventually: Eventually) -> None:
        """The tenant gets another key, and the one before is revoked."""
        old, new = self._load.key, await asyncio.to_thread(self._shell.add_key)
        async with self._load.client(new) as client:
            while await refusal(client) is drafthouse.StoreUnavailable:  # it is slow now
                pass
        self._load.key = new
        await eventually(lambda: not self._load.beginning[old])
        await asyncio.to_thread(self._shell.revoke, old)
        async with self._load.client(old) as client:
            while await refusal(client) is not drafthouse.InvalidApiKey:
                pass

    async def away(
        self, daemon: Daemon, is_away: Callable[[], bool], eventually: Eventually, *, is_held: bool
    ) -> None:
        """A database does not answer, streams come and go without it, and it is back."""
        try:
            with impatient():
                (daemon.hold if is_held else daemon.stop)()
                await eventually(is_away)
                await self.progress(eventually)
        finally:
            daemon.revive()
        await eventually(lambda: not is_away())

    async def progress(self, eventually: Eventually) -> None:
        n_before = len(self._load.counts)
        await eventually(lambda: len(self._load.counts) > n_before + N_MORE)


@pytest.mark.timeout(600)
async def test_certificates_keys_and_databases_change_and_no_stream_is_cut_off(
    start_server: ServerFactory,
    databases: list[tuple[Daemon, str]],
    eventually: Eventually,
    tmp_path: Path,
    is_whole: bool,
) -> None:
    database, redis = databases
    authority, shell = Authority(), Shell(database[1], tmp_path / "pepper")
    key = shell.add_key()
    shell.run(
        "tenants", "set", "acme", "requests_per_s=1000000", "output_tokens_per_min=1000000000"
    )
    server = await start_server(
        FakeEngine(step_s=0.001),
        usage_journal=str(tmp_path / "usage"),
        rate_counters_url=redis[1],
        revoked_streams="finish",
        **shell.settings,
        **files(authority, tmp_path),
    )
    usage, rates = server.backends.usage, server.backends.rates
    key_ring = server.backends.key_ring
    assert usage is not None
    assert rates is not None
    assert key_ring is not None
    shared = rates.counters
    assert isinstance(shared, redis_counters.RedisCounters)
    load = Load(server, authority, key)
    changes = Changes(server, load, authority, shell, tmp_path)
    kinds: list[Callable[[bool], Coroutine[Any, Any, None]]] = [
        lambda _: changes.certificate(),
        lambda _: changes.key(eventually),
        lambda is_held: changes.away(
            database[0], lambda: usage.is_away or key_ring.is_away, eventually, is_held=is_held
        ),
        lambda is_held: changes.away(redis[0], lambda: shared.is_away, eventually, is_held=is_held),
    ]
    askers = [asyncio.create_task(load.ask(number)) for number in range(N_ASKERS)]
    chance = random.Random(1)
    for number in range(10 if is_whole else 1):
        for change in chance.sample(kinds, len(kinds)):
            await changes.progress(eventually)
            await change(number % 2 == 0)
            assert not any(asker.done() for asker in askers)  # or its error is told below
    await changes.progress(eventually)
    load.is_over = True
    await asyncio.gather(*askers)
    await server.close()
    found = [record.n_output for record in stored(shell.url) if record.tenant == "acme"]
    assert sorted(found) == sorted(load.counts)


@pytest.mark.timeout(600)
async def test_a_disk_that_is_full_now_and_then_refuses_newcomers_and_cuts_no_stream_off(
    tmp_path: Path, eventually: Eventually, is_whole: bool
) -> None:
    counts: list[int] = []
    n_refused, is_over = 0, False

    async def ask(client: drafthouse.AsyncClient) -> None:
        nonlocal n_refused
        while not is_over:
            n_tokens, n_read = len(counts) % 200 + 1, 0
            stream = client.generate("x", max_output_tokens=n_tokens)
            try:
                async for chunk in stream:
                    n_read += len(chunk.token_ids)
                counts.append((await stream.result()).usage.output_tokens)
            except drafthouse.UsageUnavailable:
                assert not n_read, "a stream was cut off"
                n_refused += 1
            else:
                assert counts[-1] == n_tokens

    # No log: it is a file too where pytest captures it.
    with serving(tmp_path, ["t"], has_log=False) as (process, port):
        async with drafthouse.AsyncClient(f"127.0.0.1:{port}", api_key="t", retry=None) as client:
            askers = [asyncio.create_task(ask(client)) for _ in range(N_ASKERS)]
            for _ in range(10 if is_whole else 2):
                for number in (signal.SIGUSR1, signal.SIGUSR2):
                    n_before = n_refused if number == signal.SIGUSR1 else len(counts)
                    os.kill(process.pid, number)
                    if number == signal.SIGUSR1:
                        await eventually(lambda: n_refused > n_before)  # noqa: B023  # waited for here
                    else:
                        await eventually(lambda: len(counts) > n_before + N_MORE)  # noqa: B023  # here too
                    assert not any(asker.done() for asker in askers)
            is_over = True
            await asyncio.gather(*askers)
        process.terminate()
        assert process.wait() == 0
    [records] = recovered(tmp_path).values()
    assert sorted(record.n_output for record in records if record.n_output) == sorted(counts)


@pytest.mark.timeout(3600)  # a hundred servers that start and drain
async def test_sigterm_under_load_cuts_no_stream_off(
    tmp_path: Path, eventually: Eventually, is_whole: bool
) -> None:
    """A server after the other, over one journal; each is told to end while streams run."""
    counts: list[int] = []

    async def ask(client: drafthouse.AsyncClient, chance: random.Random, news: list[int]) -> None:
        while True:
            n_tokens, n_read = chance.choice([1, 20, 300]), 0
            stream = client.generate("x", max_output_tokens=n_tokens)
            try:
                async for chunk in stream:
                    n_read += len(chunk.token_ids)
                    news.append(n_read)
                result = await stream.result()
            # It drains, or it is gone; or gRPC's core had the call, and the server had not seen it
            # yet, when it stopped: the core cancels those.
            except (drafthouse.Unavailable, drafthouse.Cancelled):
                assert not n_read, "a stream was cut off"
                return
            assert result.usage.output_tokens == n_tokens == n_read
            counts.append(n_tokens)

    for number in range(100 if is_whole else 1):
        chance, news = random.Random(number), list[int]()
        n_before_end = chance.randrange(1500)
        with serving(tmp_path, ["t"]) as (process, port):
            async with contextlib.AsyncExitStack() as stack:
                clients = [
                    await stack.enter_async_context(
                        drafthouse.AsyncClient(f"127.0.0.1:{port}", api_key="t", retry=None)
                    )
                    for _ in range(4)
                ]
                askers = asyncio.gather(
                    *(ask(clients[i % 4], random.Random(f"{number} {i}"), news) for i in range(24))
                )
                await eventually(lambda: len(news) >= n_before_end)  # noqa: B023  # waited for here
                process.terminate()
                await askers
            assert process.wait(100) == 0
    [records] = recovered(tmp_path).values()
    assert sorted(record.n_output for record in records if record.n_output) == sorted(counts)
    assert {record.outcome for record in records} <= {"length", "SERVER_DRAINING"}
