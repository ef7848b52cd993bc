"""Usage survives: servers that are killed in the middle of streams, and a disk that is full."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.support.http2 import RawClient, RawStream

import drafthouse
from drafthouse.v1 import generation_pb2
from drafthouse_server.usage.journal import Journal
from drafthouse_server.usage.record import LOST, UsageQuery, UsageRecord
from drafthouse_server.usage.stores import STORE_NAME, SqliteUsageStore, list_all

ROOT = Path(__file__).resolve().parents[2]
N_KILLS, N_KILLS_WHOLE = 6, 20
N_UNBILLED_MAX = 64


@contextmanager
def serving(
    folder: Path, tenants: list[str], *, has_log: bool = True
) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Starts a server process whose tenants' keys are their names; it is killed in the end."""
    keys = ",".join(f"{name}:{name}" for name in tenants)
    with subprocess.Popen(
        [sys.executable, "-m", "tests.support.usage_server", str(folder), keys],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=None if has_log else subprocess.DEVNULL,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            yield process, int(process.stdout.readline())
        finally:
            process.kill()


def recovered(folder: Path) -> dict[str, list[UsageRecord]]:
    """Returns the records of a folder after a start, by tenant."""
    Journal.open(folder, SqliteUsageStore(folder / STORE_NAME), post=lambda call: call()).close()
    found: dict[str, list[UsageRecord]] = {}
    for record in list_all(folder, UsageQuery()):
        found.setdefault(record.tenant, []).append(record)
    return found


def asked(n_tokens: int) -> generation_pb2.GenerateRequest:
    return generation_pb2.GenerateRequest(
        prompt=generation_pb2.Prompt(text="kill me"), max_output_tokens=n_tokens
    )


@pytest.mark.timeout(600)
def test_a_kill_at_any_moment_leaves_one_record_of_each_stream(
    tmp_path: Path, is_whole: bool
) -> None:
    """Each round goes on in the folder that the kill before has left. A stream is a tenant."""
    got: dict[str, RawStream] = {}
    for number in range(N_KILLS_WHOLE if is_whole else N_KILLS):
        chance = random.Random(number)
        names = [f"r{number}s{i}" for i in range(12)]
        n_before_kill = chance.randrange(1, 4000)
        with serving(tmp_path, names) as (process, port):
            client = RawClient(port)
            for name in names:
                got[name] = client.generate(name, asked(chance.choice([3, 40, 900])))
            while client.n_tokens < n_before_kill and not all(
                stream.is_over for stream in client.streams.values()
            ):
                assert client.receive()
            process.kill()
            while client.receive():  # what is on its way arrives
                pass
            client.close()
    records = recovered(tmp_path)
    n_cut = 0
    for name, stream in got.items():
        found = records.get(name, [])
        n_billed = sum(record.n_output for record in found)
        if stream.result is not None:
            assert len(found) == 1, name
            assert n_billed == stream.n_tokens == stream.result.usage.output_tokens
            assert found[0].outcome != LOST
        else:
            assert len(found) == 1 or (not found and not stream.n_tokens), name
            assert stream.n_tokens - N_UNBILLED_MAX <= n_billed <= stream.n_tokens, name
            n_cut += stream.n_tokens > 0
    assert 0 < n_cut < len(got)
    assert recovered(tmp_path) == records


async def test_a_full_disk_refuses_new_streams_and_loses_none(tmp_path: Path) -> None:
    results: list[drafthouse.Result] = []
    # No log: it is a file too where pytest captures it.
    with serving(tmp_path, ["t"], has_log=False) as (process, port):
        address = f"127.0.0.1:{port}"
        async with drafthouse.AsyncClient(address, api_key="t", retry=None) as client:

            async def generate_until(*, is_refused: bool) -> None:
                was_refused = not is_refused
                while was_refused != is_refused:
                    try:
                        results.append(await client.generate("x", max_output_tokens=50))
                        was_refused = False
                    except drafthouse.UsageUnavailable:
                        was_refused = True

            running = client.generate("x", max_output_tokens=900)
            chunks = aiter(running)  # leaving it would end the stream
            await anext(chunks)
            os.kill(process.pid, signal.SIGUSR1)
            await generate_until(is_refused=True)
            results.append(await running)
            os.kill(process.pid, signal.SIGUSR2)
            await generate_until(is_refused=False)
        process.terminate()
        assert process.wait() == 0
    [records] = recovered(tmp_path).values()
    billed = sorted(record.n_output for record in records)
    assert billed == sorted(len(result.token_ids) for result in results)
    assert billed[-1] == 900
