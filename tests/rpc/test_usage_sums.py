"""Some clients leave, some are too late: the sums of records are the clients' to the token."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from drafthouse.v1 import generation_pb2, generation_pb2_grpc
from drafthouse_server.engine.fake import FakeEngine
from drafthouse_server.rpc import services
from drafthouse_server.rpc.interceptors import current_call
from drafthouse_server.usage.record import UsageQuery
from drafthouse_server.usage.stores import list_all

if TYPE_CHECKING:
    from tests.conftest import ServerFactory

N_REQUESTS, N_REQUESTS_WHOLE = 2_000, 10_000
N_AT_ONCE = 48


class CountingContext:
    """A call's context that counts tokens where messages go to the transport."""

    def __init__(self, inner: Any, handed: Handed) -> None:
        self._inner = inner
        self._handed = handed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def write(self, message: generation_pb2.GenerateResponse) -> None:
        await self._inner.write(message)
        self._handed.n_tokens[current_call().client_request_id] += len(message.chunk.token_ids)


@dataclasses.dataclass(slots=True)
class Handed:
    """What the server knows of each call, by the id that its client gave it."""

    n_tokens: Counter[str] = dataclasses.field(default_factory=Counter)
    """Tokens that the transport has taken."""
    request_ids: dict[str, str] = dataclasses.field(default_factory=dict)
    """The server's own ids."""


@pytest.fixture
def handed(monkeypatch: pytest.MonkeyPatch) -> Handed:
    found = Handed()
    generate: Any = services.GenerationService.Generate

    async def counted(self: Any, asked: Any, context: Any) -> None:
        call = current_call()
        found.request_ids[call.client_request_id] = call.request_id
        await generate(self, asked, CountingContext(context, found))

    monkeypatch.setattr(services.GenerationService, "Generate", counted)
    return found


@dataclasses.dataclass(slots=True)
class Client:
    """One request, and what its client knows of it."""

    number: int
    n_read: int = 0
    has_result: bool = False
    told: int | None = None
    """Tokens by the trailers, where there were any."""

    @property
    def name(self) -> str:
        return f"req-{self.number}"

    async def run(self, stub: Any) -> None:
        chance = random.Random(self.number)
        kind = chance.choices(["whole", "leave", "deadline"], [6, 2, 2])[0]
        n_messages = chance.randrange(3) if kind == "leave" else 1 << 30
        call = stub.Generate(
            generation_pb2.GenerateRequest(
                prompt=generation_pb2.Prompt(text="x" * chance.randrange(1, 30)),
                max_output_tokens=chance.choice([1, 5, 40, 90]),
                stop=generation_pb2.StopOptions(
                    sequences=chance.choice([[], ["e", "f", "g", "h"]])
                ),
            ),
            metadata=(("x-request-id", self.name),),
            timeout=chance.choice([0.002, 0.02, 0.1]) if kind == "deadline" else None,
        )
        try:
            await self._read(call, n_messages)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                raise
            for key, value in error.trailing_metadata() or ():
                if key == "drafthouse-usage-bin" and isinstance(value, bytes):
                    self.told = generation_pb2.Usage.FromString(value).output_tokens
        call.cancel()

    async def _read(self, call: Any, n_messages: int) -> None:
        for _ in range(n_messages):
            message = await call.read()
            if message is grpc.aio.EOF:
                return
            self.n_read += len(message.chunk.token_ids)
            self.has_result |= message.HasField("result")


async def run_all(target: str, n: int) -> list[Client]:
    clients = [Client(number) for number in range(n)]
    waiting = iter(clients)
    async with grpc.aio.insecure_channel(target) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)

        async def work() -> None:
            for client in waiting:
                await client.run(stub)

        await asyncio.gather(*(work() for _ in range(N_AT_ONCE)))
    return clients


@pytest.mark.timeout(600)
async def test_sums_of_records_are_the_clients_to_the_token(
    start_server: ServerFactory, tmp_path: Path, handed: Handed, is_whole: bool
) -> None:
    """What a client that leaves has not read is counted where messages go to the transport."""
    limits = dataclasses.replace(
        FakeEngine().limits, n_seq_max=16, n_ctx=16384, n_batch=128, n_outputs_max=80
    )
    server = await start_server(FakeEngine(limits), usage_journal=str(tmp_path), parallel=16)
    n = N_REQUESTS_WHOLE if is_whole else N_REQUESTS
    clients = await run_all(server.target, n)
    await server.close()
    records = list_all(tmp_path, UsageQuery())
    billed = {record.request_id: record.n_output for record in records}
    assert len(billed) == len(records), "one record a stream"
    for client in clients:
        n_billed = billed.get(handed.request_ids.get(client.name, ""), 0)
        assert client.n_read <= n_billed == handed.n_tokens[client.name]
        assert client.n_read == n_billed or not client.has_result
        assert client.told in {None, client.n_read}
    statistics = server.loop.statistics()
    assert sum(billed.values()) == handed.n_tokens.total() == statistics.n_output_tokens
    assert sum(record.n_prompt for record in records) == statistics.n_prompt_tokens
    assert statistics.usage.n_records == len(records)
    outcomes, counted = Counter(record.outcome for record in records), statistics.n_requests
    assert counted["stop"] == outcomes["stop"] > 0
    assert counted["length"] == outcomes["length"] > 0
    n_refused = Counter(counted) - outcomes
    assert outcomes + n_refused == counted, "what has no record was refused"
    assert set(n_refused) <= {"cancelled", "deadline"}
    assert sum(counted.values()) == len(handed.request_ids), "each was counted once"
    assert 0 < sum(client.has_result for client in clients) < n
