"""Several tenants, and who administers them, at once and drawn at random, over loopback.

Keys come, are revoked and replaced, limits change, tenants are deleted and made again, clients
leave, are late, or read nothing, steps fail. Whoever is asked for nothing else gets the tokens that
he gets alone; every call ends, by an error that somebody has asked for; nothing is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from tests.rpc.test_rpc_generation import expected_tokens
from tests.support.admin import admin, reason_of
from tests.support.http2 import connect
from tests.support.shell import Shell

import drafthouse
from drafthouse.v1 import admin_pb2, generation_pb2
from drafthouse_server.engine.fake import FakeEngine
from drafthouse_server.errors import EngineError
from drafthouse_server.rpc.server import Server
from drafthouse_server.step import EngineLimits, SequenceStatus
from drafthouse_server.tenancy import key_ring
from drafthouse_server.tenancy.keys import id_of_key, make_key
from drafthouse_server.usage.record import UsageQuery
from drafthouse_server.usage.stores import list_all

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.conftest import Eventually, ServerFactory

GENERATE = "/drafthouse.v1.GenerationService/Generate"
N_CLIENTS = 24
SECONDS = 3.0
LIMITS: dict[str, list[Any]] = {
    "weight": [0.1, 1.0, 3.0],
    "requests_per_second": [5.0, 50.0],
    "input_tokens_per_minute": [2000],
    "output_tokens_per_minute": [1000, 100_000],
    "tokens_per_month": [10_000],
    "max_streams": [1, 3, 20],
    "queue_size": [1, 5],
    "max_prompt_tokens": [50],
    "max_output_tokens": [10, 50],
    "max_priority": [-5, 3],
    "max_draft_tokens": [0, 2],
    "end_user_requests_per_second": [2.0],
    "end_user_max_streams": [1, 4],
}


@dataclasses.dataclass
class Customer:
    """A tenant, as those know it who run the server."""

    name: str
    keys: list[str] = dataclasses.field(default_factory=list)
    gone: set[str] = dataclasses.field(default_factory=set)
    """Keys that are revoked, or just being so."""
    served: set[str] = dataclasses.field(default_factory=set)
    """Keys that the server has let in once."""
    is_limited: bool = False
    """Whether it ever had a limit."""
    n_tokens: int = 0
    """Tokens of its whole streams, as its clients have counted."""
    lock: asyncio.Lock = dataclasses.field(default_factory=asyncio.Lock)


class Town:
    """A server, its tenants, and all that goes on there."""

    def __init__(self, seed: int, server: Server, engine: FakeEngine, shell: Shell) -> None:
        self.seed = seed
        self.server = server
        self.engine = engine
        self.shell = shell
        self.customers = [Customer(f"t{i}") for i in range(4)]
        self.until = time.monotonic() + SECONDS
        self.has_faults = False
        self.ends: Counter[str] = Counter()

    @property
    def is_open(self) -> bool:
        return time.monotonic() < self.until

    async def run(self, *words: str) -> str:
        return await asyncio.to_thread(self.shell.run, *words)

    async def client(self, number: int) -> None:
        """Sends requests of one tenant after another, with one key each."""
        chance = random.Random(f"{self.seed} client {number}")
        while self.is_open:
            customer = chance.choice(self.customers)
            good: list[str | None] = [*customer.keys] or [None]
            key = chance.choice([*good * 12, *sorted(customer.gone)[:1], make_key().text])
            async with drafthouse.AsyncClient(self.server.target, api_key=key, retry=None) as sdk:
                for _ in range(chance.randrange(1, 8)):
                    await self.request(sdk, customer, key, chance)

    async def request(
        self,
        sdk: drafthouse.AsyncClient,
        customer: Customer,
        key: str | None,
        chance: random.Random,
    ) -> None:
        was_good = key in customer.keys
        timeout = chance.choice([None] * 6 + [chance.random() / 2])
        try:
            if chance.random() < 0.8:
                await self.generate(sdk, customer, chance, timeout)
            else:
                await sdk.count_tokens("some words", timeout=timeout)
                self.ends["counted"] += 1
                customer.served.add(key or "")
        except drafthouse.DrafthouseError as error:
            name = type(error).__name__
            self.ends[name] += 1
            is_good = was_good and key not in customer.gone
            asked_for = {
                "InvalidApiKey": not is_good,
                "TooManyBadKeys": not is_good or key not in customer.served,
                "DeadlineExceeded": timeout is not None,
                "DeadlineTooShort": timeout is not None,
                "TenantQuotaExceeded": customer.is_limited,
                "QueueFull": True,
                "EngineFailure": self.has_faults,
                "EngineUnhealthy": self.has_faults,
                "GrammarTooCostly": self.has_faults,
            }
            if not asked_for.get(name, False):
                raise AssertionError(f"{name} of {customer.name}") from error

    async def generate(
        self,
        sdk: drafthouse.AsyncClient,
        customer: Customer,
        chance: random.Random,
        limit_s: float | None,
    ) -> None:
        """Reads one stream, or some of it."""
        head = ("abc def ghi " * 30)[: chance.choice([0, 20, 100, 300])]
        prompt = head + "".join(chance.choices("xyz ", k=chance.randrange(1, 30)))
        n_read = chance.choice([10_000] * 4 + [chance.randrange(3)])
        stream = sdk.generate(
            prompt,
            timeout=limit_s,
            temperature=0,
            max_output_tokens=chance.choice([1, 2, 5, 20, 80]),
            end_user=chance.choice(["", "", "u1", "u2"]),
            priority=chance.choice([0, 0, -100, 5, 100]),
            progress=chance.random() < 0.1,
        )
        tokens: list[int] = []
        if n_read:
            async for chunk in stream:
                tokens += chunk.token_ids
                n_read -= 1
                if not n_read:
                    break
        if n_read > 0 and tokens:
            assert (await stream.result()).usage.output_tokens == len(tokens)
            customer.n_tokens += len(tokens)
            self.ends["whole"] += 1
        else:
            await stream.aclose()
            self.ends["left"] += 1
        assert tokens == expected_tokens([256, *prompt.encode()], len(tokens))

    async def rude(self) -> None:
        """Opens streams with a good key, reads nothing, and hangs up."""
        chance = random.Random(f"{self.seed} rude")
        request = generation_pb2.GenerateRequest(
            prompt=generation_pb2.Prompt(text="zz"), max_output_tokens=400
        ).SerializeToString()
        while self.is_open:
            for key in chance.choice(self.customers).keys[:1]:
                with contextlib.suppress(ConnectionError):
                    async with connect(self.server.target, window=chance.choice([0, 20])) as raw:
                        raw.open(GENERATE, chance.choice([request, None]), key)
                        await asyncio.sleep(chance.random() / 2)
            await asyncio.sleep(0.01)

    async def breaker(self) -> None:
        """Has steps fail, starts keep nothing, and saves refused."""
        chance = random.Random(f"{self.seed} breaker")
        while self.is_open:
            await asyncio.sleep(chance.random() / 2)
            seq_id = chance.randrange(2)
            if chance.random() < 0.5:
                self.engine.refuse(n_starts=chance.randrange(3), n_saves=chance.randrange(3))
                self.engine.inject(SequenceStatus.NO_ROOM, seq_id=seq_id)
                continue
            self.has_faults = True
            faults: list[SequenceStatus | Exception] = [
                SequenceStatus.DECODE_FAILED,
                SequenceStatus.GRAMMAR_TOO_COSTLY,
                EngineError("DECODE_FAILED"),
            ]
            self.engine.inject(chance.choice(faults))

    async def operator(self, number: int, stub: Any) -> None:
        """Changes keys, limits and tenants, and asks how it is."""
        chance = random.Random(f"{self.seed} operator {number}")
        acts = [self.add, self.revoke, self.rotate, self.delete]
        while self.is_open:
            await asyncio.sleep(chance.random() / 8)
            customer = chance.choice(self.customers)
            if chance.random() < 0.5:
                async with customer.lock:
                    await chance.choices(acts, [4, 2, 1, 0.7])[0](customer, chance)
                continue
            try:
                await self.limit(customer, chance, stub)
            except grpc.aio.AioRpcError as error:
                if reason_of(error) != "TENANT_NOT_FOUND":  # just deleted
                    raise
            load = (await stub.GetStatus(admin_pb2.GetStatusRequest())).load
            assert load.running_requests <= self.engine.limits.n_seq_max
            await stub.ListTenants(admin_pb2.ListTenantsRequest())

    async def add(self, customer: Customer, _: random.Random) -> None:
        if len(customer.keys) < 4:
            customer.keys.append(await self.run("keys", "add", "--tenant", customer.name))

    async def revoke(self, customer: Customer, chance: random.Random) -> None:
        if customer.keys:
            await self.run("keys", "revoke", self.take_key(customer, chance))

    async def rotate(self, customer: Customer, chance: random.Random) -> None:
        if customer.keys:
            told = await self.run("keys", "rotate", self.take_key(customer, chance))
            customer.keys.append(told.split()[-1])

    def take_key(self, customer: Customer, chance: random.Random) -> str:
        """Returns the id of a key that is about to go."""
        key = customer.keys.pop(chance.randrange(len(customer.keys)))
        customer.gone.add(key)
        return id_of_key(key) or ""

    async def delete(self, customer: Customer, _: random.Random) -> None:
        """Deletes a tenant, and makes it again."""
        customer.gone.update(customer.keys)
        customer.keys.clear()
        await self.run("tenants", "delete", customer.name)
        customer.keys.append(await self.run("keys", "add", "--tenant", customer.name))

    async def limit(self, customer: Customer, chance: random.Random, stub: Any) -> None:
        customer.is_limited = True
        names = [name for name in LIMITS if chance.random() < 0.2]
        limits = admin_pb2.TenantLimits(**{name: chance.choice(LIMITS[name]) for name in names})
        reset = [name for name in LIMITS if name not in names]
        request = admin_pb2.SetLimitsRequest(
            tenant=customer.name, limits=limits, reset_fields=reset
        )
        await stub.SetLimits(request)

    async def watch(self, stub: Any) -> None:
        """Follows the prefix cache: what goes was there, and what comes hangs on something."""
        while self.is_open:
            call, blocks = stub.WatchCache(admin_pb2.WatchCacheRequest()), set[Any]()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.7):
                    async for message in call:
                        follow(message, blocks)
                        self.ends["cache events"] += 1
            call.cancel()


def follow(message: admin_pb2.WatchCacheResponse, blocks: set[Any]) -> None:
    """Takes a change of the prefix cache into the blocks that there are."""
    stored, removed = message.stored, message.removed

    def named(change: Any, hashes: Iterable[int]) -> set[Any]:
        return {(change.tenant, change.end_user, block) for block in hashes}

    if message.HasField("reset"):
        blocks.clear()
    if stored.HasField("parent_hash"):
        assert named(stored, [stored.parent_hash]) <= blocks
    blocks |= named(stored, stored.hashes)
    assert named(removed, removed.hashes) <= blocks
    blocks -= named(removed, removed.hashes)


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_ring, "POLL_S", 0.05)
    monkeypatch.setattr(key_ring, "_TIMEOUT_S", 20.0)  # a slow store is not away


@pytest.mark.parametrize("seed", [1, 2, 5])
async def test_whatever_tenants_and_operators_do_every_call_ends_as_it_was_asked_for(
    start_server: ServerFactory,
    free_port: int,
    tmp_path: Path,
    eventually: Eventually,
    seed: int,
) -> None:
    chance = random.Random(seed)
    shell = Shell(f"sqlite:///{tmp_path / 'store.db'}", tmp_path / "pepper")
    n_seq, is_unified = chance.choice([2, 3, 4]), chance.random() < 0.5
    limits = EngineLimits(
        draft_type="mtp",
        n_seq_max=n_seq,
        n_ctx=512 if is_unified else n_seq * 512,
        n_ctx_seq=512,
        n_batch=64,
        n_ubatch=64,
        n_draft_max=4,
        n_outputs_max=5 * n_seq,
    )
    engine = FakeEngine(limits, step_s=0.0005, is_recurrent=chance.random() < 0.3)
    server = await start_server(
        engine,
        parallel=n_seq,
        kv_unified=is_unified,
        admin_port=free_port,
        usage_journal=str(tmp_path / "usage"),
        queue_size=chance.choice([8, 64, 512]),
        draft_policy=chance.choice(["fixed", "adaptive"]),
        prompt_lookup=chance.random() < 0.5,
        prefix_cache_mib=chance.choice([0, 1, 64]),
        revoked_streams=chance.choice(["end", "finish"]),
        slow_reader_timeout_s=chance.choice([1.0, 30.0]),
        **shell.settings,
    )
    town = Town(seed, server, engine, shell)
    for customer in town.customers:
        await town.add(customer, chance)
    async with admin(free_port) as stub:
        work = [town.client(i) for i in range(N_CLIENTS)]
        work += [town.operator(i, stub) for i in range(2)]
        await asyncio.gather(*work, town.rude(), town.breaker(), town.watch(stub))
    admission = server.loop.admission
    await eventually(lambda: admission.n_active == server.loop.statistics().n_running == 0)
    assert engine.n_cells_used == server.loop.statistics().scheduler.n_retained_cells
    assert server.loop.is_healthy
    await server.close()
    billed: Counter[str] = Counter()
    for record in list_all(tmp_path / "usage", UsageQuery()):
        billed[record.tenant] += record.n_output
    for customer in town.customers:
        assert billed[customer.name] >= customer.n_tokens
    assert town.ends["whole"]
    assert town.ends["left"]
