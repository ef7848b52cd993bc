"""Metrics for Prometheus: the text format, and an endpoint that nobody can hold up."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from typing import TYPE_CHECKING

import pytest

import drafthouse
from drafthouse_server.errors import ConfigError
from drafthouse_server.serving.exposition import render
from drafthouse_server.serving.metrics import Metrics
from drafthouse_server.step import ResultEntry, SchedulerCounts, SequenceStatus, StepResult

if TYPE_CHECKING:
    from tests.conftest import ServerFactory


def values_of(text: str) -> dict[str, float]:
    """Returns the samples of an exposition; every line must be of the format."""
    values: dict[str, float] = {}
    kinds: dict[str, str] = {}
    for line in text.splitlines():
        if found := re.fullmatch(r"# TYPE (\w+) (counter|gauge)", line):
            assert found[1] not in kinds
            kinds[found[1]] = found[2]
        elif not re.fullmatch(r"# HELP \w+ [A-Z].*\.", line):
            found = re.fullmatch(r'(\w+)(\{\w+="(?:[^"\\]|\\.)*"\})? (\S+)', line)
            assert found, line
            assert kinds[found[1]] == ("counter" if found[1].endswith("_total") else "gauge")
            assert line.rpartition(" ")[0] not in values
            values[line.rpartition(" ")[0]] = float(found[3])
    assert text.endswith("\n")
    return values


def test_every_count_is_told_with_its_source() -> None:
    metrics = Metrics(scheduler=SchedulerCounts(n_planned=4, n_draft_planned=10))
    entries = [
        ResultEntry(0, SequenceStatus.OK, 5, [1, 2, 3], n_drafted=4, n_accepted=2),
        ResultEntry(1, SequenceStatus.OK, 5, [1] * 6, n_drafted=6, n_accepted=5, is_given=True),
    ]
    metrics.count_step(StepResult(entries, n_batch_tokens=12))
    metrics.count_request('a"b\\c\n', 7, 8)
    values = values_of(render(metrics.statistics()))
    assert values['drafthouse_draft_tokens_total{source="drafter"}'] == 4
    assert values['drafthouse_draft_tokens_total{source="ngram"}'] == 6
    assert values['drafthouse_accepted_tokens_total{source="ngram"}'] == 5
    assert values["drafthouse_draft_tokens_chosen_total"] == 10
    assert values["drafthouse_draft_turns_total"] == 4
    assert values['drafthouse_requests_total{outcome="a\\"b\\\\c\\n"}'] == 1
    assert values["drafthouse_prompt_tokens_total"] == 7


async def fetch(port: int, request: bytes, host: str = "127.0.0.1") -> tuple[str, str]:
    """Returns status line and body of an answer."""
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(request)
    answer = (await asyncio.wait_for(reader.read(), 100)).decode()
    writer.close()
    await writer.wait_closed()
    head, _, body = answer.partition("\r\n\r\n")
    return head.split("\r\n")[0], body


async def test_a_server_tells_its_metrics_and_survives_strange_clients(
    start_server: ServerFactory, free_port: int
) -> None:
    server = await start_server(metrics_port=free_port)
    async with drafthouse.AsyncClient(server.target, retry=None) as client:
        await client.generate("hello", temperature=0, max_output_tokens=20)
    silent = socket.create_connection(("127.0.0.1", free_port))
    for request, status in (
        (b"GET / HTTP/1.1\r\n\r\n", "HTTP/1.1 404 Not Found"),
        (b"POST /metrics HTTP/1.1\r\n\r\n", "HTTP/1.1 405 Method Not Allowed"),
        (b"\x00\xff\r\n\r\n", "HTTP/1.1 404 Not Found"),
    ):
        assert (await fetch(free_port, request))[0] == status
    with contextlib.suppress(ConnectionError):  # it hangs up without reading all of it
        assert await fetch(free_port, b"GET /" + b"x" * 100_000) == ("", "")
    status, body = await fetch(free_port, b"GET /metrics?x=1 HTTP/1.1\r\nHost: x\r\n\r\n")
    silent.close()
    values = values_of(body)
    assert status == "HTTP/1.1 200 OK"
    assert values['drafthouse_requests_total{outcome="length"}'] == 1
    assert values["drafthouse_output_tokens_total"] == 20
    assert values['drafthouse_drafts_total{source="drafter"}'] > 0


@pytest.mark.parametrize("host", ["::1", "[::1]"])
async def test_metrics_are_told_at_the_servers_own_address(
    start_server: ServerFactory, free_port: int, host: str
) -> None:
    await start_server(host=host, metrics_port=free_port)
    status, _ = await fetch(free_port, b"GET /metrics HTTP/1.1\r\n\r\n", "::1")
    assert status == "HTTP/1.1 200 OK"


async def test_a_taken_port_is_an_error_of_its_setting(
    start_server: ServerFactory, free_port: int
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", free_port))
        taken.listen()
        with pytest.raises(ConfigError, match="metrics_port"):
            await start_server(metrics_port=free_port)
