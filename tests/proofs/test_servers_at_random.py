"""Servers that share a store and rates, drawn at random: databases go away, servers are replaced.

A key that works is never called unknown, who has no limit is never refused for one, a stream that
has begun goes to its end, tokens are those of alone, and each stream is billed once. While Redis
answers, a tenant has one rate on all servers together.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import random
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.proofs.test_changes_under_load import databases
from tests.rpc.test_rpc_generation import expected_tokens
from tests.rpc.test_usage_store import quick_looks, stored
from tests.support.databases import Daemon
from tests.support.shell import Shell

import drafthouse
from drafthouse_server.engine.fake import FakeEngine
from drafthouse_server.errors import StartupError
from drafthouse_server.rpc.server import Server
from drafthouse_server.step import EngineLimits
from drafthouse_server.tenancy import key_ring, redis_counters, store
from drafthouse_server.tenancy.keys import id_of_key, make_key

if TYPE_CHECKING:
    from tests.conftest import Eventually, ServerFactory

__all__ = ["databases", "quick_looks"]  # fixtures

N_SERVERS, N_CLIENTS = 3, 16
LIMITS = {"paced": "requests_per_s=30", "spare": "output_tokens_per_min=6000", "free": ""}
N_PACED_BURST = 60
ENGINE = EngineLimits(
    draft_type="mtp", n_seq_max=3, n_ctx=1536, n_ctx_seq=512, n_batch=64, n_ubatch=64,
    n_draft_max=4, n_outputs_max=15,
)  # fmt: skip
PATIENCE_S = 5.0
"""After a database is back, so long a server may still say that it is away."""


@dataclasses.dataclass
class Outage:
    """A time in which the store was away."""

    ended_at: float = float("inf")
    """When it was back, by the monotonic clock."""


class Fleet:
    """The servers, their databases, and all that goes on there."""

    def __init__(self, start: ServerFactory, folder: Path, *, loses_databases: bool) -> None:
        self.seed = 0
        self.loses_databases = loses_databases
        self.keys: dict[str, list[str]] = {}
        self.gone: set[str] = set()
        self.revoked: dict[str, list[str]] = {tenant: [] for tenant in LIMITS}
        self.servers: dict[int, Server] = {}
        self.leaving: set[Server] = set()
        self.outages: list[Outage] = []
        self.ends: Counter[str] = Counter()
        self.begun: Counter[str] = Counter()
        self.read: Counter[str] = Counter()
        self.until = 0.0
        self._start_server = start
        self._folder = folder

    def use(self, postgresql: tuple[Daemon, str], redis: tuple[Daemon, str]) -> None:
        self._databases = [postgresql[0], redis[0]]
        self._rates_url = redis[1]
        self._shell = Shell(postgresql[1], self._folder / "pepper")

    @property
    def is_open(self) -> bool:
        return time.monotonic() < self.until

    def chance(self, who: str) -> random.Random:
        return random.Random(f"{self.seed} {who}")

    def was_away(self, since: float) -> bool:
        """Whether the store was away at some moment since then, or had just been."""
        return any(outage.ended_at + PATIENCE_S > since for outage in self.outages)

    async def shell(self, *words: str) -> str:
        return await asyncio.to_thread(self._shell.run, *words)

    async def add_key(self, tenant: str) -> None:
        self.keys.setdefault(tenant, []).append(await self.shell("keys", "add", "--tenant", tenant))

    async def begin(self, seconds: float) -> None:
        for tenant, limit in LIMITS.items():
            await self.add_key(tenant)
            if limit:
                await self.shell("tenants", "set", tenant, limit)
        for number in range(N_SERVERS):
            await self.start(number)
        self.until = time.monotonic() + seconds

    async def start(self, number: int) -> None:
        """Starts a server, as soon as it starts."""
        while True:
            began = time.monotonic()
            try:
                self.servers[number] = await self._start_server(
                    FakeEngine(ENGINE, step_s=0.0005),
                    parallel=3,
                    usage_journal=str(self._folder / f"usage {number}"),
                    rate_counters_url=self._rates_url,
                    revoked_streams="finish",
                    **self._shell.settings,
                )
            except StartupError:
                assert self.was_away(began)
                await asyncio.sleep(0.1)
            else:
                return

    async def replace(self) -> None:
        """Ends one server after the other as SIGTERM does, and starts another in its place."""
        chance = self.chance("replace")
        while self.is_open:
            await asyncio.sleep(chance.random() * 2)
            number = chance.randrange(N_SERVERS)
            server = self.servers.pop(number)
            self.leaving.add(server)
            await server.shutdown()
            await self.start(number)

    async def take_away(self) -> None:
        """Holds databases, or ends them, for a while."""
        chance = self.chance("take away")
        postgresql, _ = self._databases
        while self.is_open:
            await asyncio.sleep(chance.random() * 1.5)
            daemons = chance.choice([self._databases, *([it] for it in self._databases)])
            outage = Outage()
            if postgresql in daemons:
                self.outages.append(outage)
            is_held = chance.random() < 0.5
            try:
                for daemon in daemons:
                    (daemon.hold if is_held else daemon.stop)()
                await asyncio.sleep(chance.choice([0.05, 0.5, 1.5]))
            finally:
                for daemon in daemons:
                    await asyncio.to_thread(daemon.revive)
            outage.ended_at = time.monotonic()

    async def operate(self) -> None:
        """Adds keys and revokes them."""
        chance = self.chance("operate")
        while self.is_open:
            await asyncio.sleep(chance.random() / 3)
            tenant, began = chance.choice([*LIMITS]), time.monotonic()
            try:
                if len(self.keys[tenant]) < 3:
                    await self.add_key(tenant)
                    continue
                key = self.keys[tenant].pop(0)
                self.gone.add(key)
                await self.shell("keys", "revoke", id_of_key(key) or "")
                self.revoked[tenant].append(key)
            except AssertionError:  # the command line says that the store is away
                assert self.was_away(began)

    async def ask(self, number: int) -> None:
        """Sends requests of one tenant after another, with one key to one server each."""
        chance = self.chance(f"client {number}")
        while self.is_open:
            await asyncio.sleep(0.001)
            tenant = chance.choice([*LIMITS])
            key = chance.choice(
                [*self.keys[tenant] * 5, make_key().text, *self.revoked[tenant][-1:]]
            )
            if self.servers:
                server = chance.choice([*self.servers.values()])
                async with drafthouse.AsyncClient(server.target, api_key=key, retry=None) as client:
                    for _ in range(chance.randrange(1, 8)):
                        await self.request(client, server, tenant, key, chance)

    async def request(
        self,
        client: drafthouse.AsyncClient,
        server: Server,
        tenant: str,
        key: str,
        chance: random.Random,
    ) -> None:
        was_good, began, tokens = key in self.keys[tenant], time.monotonic(), list[int]()
        timeout = chance.choice([None] * 6 + [chance.random() / 2])
        prompt = "".join(chance.choices("xyz ", k=chance.randrange(1, 30)))
        stream = client.generate(
            prompt, timeout=timeout, temperature=0, max_output_tokens=chance.choice([1, 5, 20, 80])
        )
        try:
            async for chunk in stream:
                self.begun[tenant] += not tokens
                tokens += chunk.token_ids
            assert (await stream.result()).usage.output_tokens == len(tokens)
            self.ends["whole"] += 1
            self.read[tenant] += len(tokens) * was_good
        except drafthouse.DrafthouseError as error:
            name, is_leaving = type(error).__name__, server in self.leaving and not tokens
            self.ends[name] += 1
            asked_for = {
                "InvalidApiKey": not was_good or key in self.gone,
                "TooManyBadKeys": True,
                "DeadlineExceeded": timeout is not None,
                "DeadlineTooShort": timeout is not None,
                "TenantQuotaExceeded": tenant != "free",
                "StoreUnavailable": self.was_away(began),
                "ServerDraining": is_leaving,
                "Unavailable": is_leaving,
                "Cancelled": is_leaving,  # by gRPC's core, of a call that the server had not seen
            }
            if not asked_for.get(name, False):
                raise AssertionError(f"{name} of {tenant}") from error
        assert tokens == expected_tokens([256, *prompt.encode()], len(tokens))

    async def settle(self, eventually: Eventually) -> None:
        """Sees that all is as if nothing had been, and ends the servers."""
        for server in self.servers.values():
            await eventually(functools.partial(is_settled, server))
            assert server.loop.is_healthy
            for keys in self.revoked.values():
                for key in keys[-1:]:
                    await refused(server, key)
        for server in self.servers.values():
            await server.shutdown()
        records = stored(self._shell.url)
        assert len({record.record_id for record in records}) == len(records)
        billed: Counter[str] = Counter()
        for record in records:
            billed[record.tenant] += record.n_output
        for tenant in LIMITS:
            assert billed[tenant] >= self.read[tenant] > 0


def is_settled(server: Server) -> bool:
    """Whether nobody is served, and all that the server shares with the others answers."""
    counters = server.backends.rates and server.backends.rates.counters
    assert isinstance(counters, redis_counters.RedisCounters)
    is_up = all(state.is_up for state in server.backends.states().values())
    return is_up and not server.loop.admission.n_active and counters.n_replicas == N_SERVERS


async def refused(server: Server, key: str) -> None:
    """Sees that a key is refused; its address may have shown too many wrong ones before."""
    async with drafthouse.AsyncClient(server.target, api_key=key, retry=None) as client:
        with pytest.raises((drafthouse.InvalidApiKey, drafthouse.TooManyBadKeys)):
            await client.tokenize("x")


@pytest.fixture(params=[False, True], ids=["answering", "away"])
def fleet(
    request: pytest.FixtureRequest,
    start_server: ServerFactory,
    databases: list[tuple[Daemon, str]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> Fleet:
    # Where databases go away, that is known soon; where not, one that is slow is not away.
    monkeypatch.setattr(key_ring, "_TIMEOUT_S", 0.5 if request.param else 20.0)
    monkeypatch.setattr(store, "_USAGE_S", 1.0 if request.param else 20.0)
    monkeypatch.setattr(redis_counters, "_TIMEOUT_S", 0.3 if request.param else 20.0)
    monkeypatch.setattr(redis_counters, "_BEAT_S", 0.1)
    monkeypatch.setattr(redis_counters, "_BEATEN_S", 2.0)
    found = Fleet(start_server, tmp_path, loses_databases=request.param)
    found.use(*databases)
    return found


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [1])
async def test_servers_that_share_all_are_one_server(
    fleet: Fleet, eventually: Eventually, seed: int, *, is_whole: bool
) -> None:
    began = time.monotonic()
    fleet.seed = seed
    await fleet.begin(60.0 if is_whole else 4.0)
    work = [fleet.ask(number) for number in range(N_CLIENTS)]
    work += [fleet.replace(), fleet.operate()]
    if fleet.loses_databases:
        work.append(fleet.take_away())
    await asyncio.gather(*work)
    n_paced_max = N_PACED_BURST + 30 * (time.monotonic() - began)
    assert fleet.loses_databases or fleet.begun["paced"] <= n_paced_max
    await fleet.settle(eventually)
    assert fleet.ends["whole"]
