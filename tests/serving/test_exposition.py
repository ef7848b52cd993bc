"""Metrics for Prometheus: the text format, and an endpoint that nobody can hold up."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
import socket
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from prometheus_client import generate_latest
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

import drafthouse
from drafthouse_server.config import Config
from drafthouse_server.engine.protocol import TextWorkerLost
from drafthouse_server.errors import ConfigError, EngineError
from drafthouse_server.operations.histograms import FIRST_TOKEN_BOUNDS_S
from drafthouse_server.serving import exposition
from drafthouse_server.serving.exposition import MetricsEndpoint, reference, render
from drafthouse_server.serving.metrics import Metrics, Statistics
from drafthouse_server.step import (
    ResultEntry,
    SchedulerCounts,
    SequenceStatus,
    StepResult,
    StepTimings,
)
from drafthouse_server.usage.record import UsageCounts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.conftest import Eventually, ServerFactory


def values_of(text: str) -> dict[str, float]:
    """Returns the samples of an exposition; every line must be of the format."""
    values: dict[str, float] = {}
    kinds: dict[str, str] = {}
    for line in text.splitlines():
        if found := re.fullmatch(r"# TYPE (\w+) (counter|gauge|histogram)", line):
            assert found[1] not in kinds
            kinds[found[1]] = found[2]
        elif not re.fullmatch(r"# HELP \w+ [A-Z].*\.", line):
            found = re.fullmatch(r'(\w+)(\{(?:\w+="(?:[^"\\]|\\.)*",?)+\})? (\S+)', line)
            assert found, line
            name = re.sub(r"_(bucket|sum|count)$", "", found[1])
            if kinds.get(name) != "histogram":
                assert kinds[found[1]] == ("counter" if found[1].endswith("_total") else "gauge")
            assert line.rpartition(" ")[0] not in values
            values[line.rpartition(" ")[0]] = float(found[3])
    assert text.endswith("\n")
    return values


def test_every_count_is_told_with_its_source() -> None:
    metrics = Metrics(scheduler=SchedulerCounts(n_planned=4, n_draft_planned=10))
    entries = [
        ResultEntry(0, SequenceStatus.OK, 5, [1, 2, 3], n_drafted=4, n_accepted=2),
        ResultEntry(1, SequenceStatus.OK, 5, [1] * 6, n_drafted=6, n_accepted=5, is_external=True),
    ]
    assert values_of(render(metrics.statistics()))["drafthouse_threads"] == 0
    metrics.count_step(StepResult(entries, n_batch_tokens=12, n_threads=3))
    metrics.count_request('a"b\\c\n')
    metrics.count_tokens(7, 8)
    metrics.usage = UsageCounts(
        n_records=1, n_pending=2, n_journal_failures=3, n_store_failures=4, n_unbilled=5
    )
    metrics.usage.is_failing = True
    values = values_of(render(metrics.statistics()))
    assert values['drafthouse_draft_tokens_total{source="drafter"}'] == 4
    assert values['drafthouse_draft_tokens_total{source="ngram"}'] == 6
    assert values['drafthouse_accepted_tokens_total{source="ngram"}'] == 5
    assert values["drafthouse_draft_tokens_chosen_total"] == 10
    assert values["drafthouse_scheduled_decodes_total"] == 4
    assert values["drafthouse_threads"] == 3
    assert values['drafthouse_requests_total{outcome="a\\"b\\\\c\\n"}'] == 1
    assert values["drafthouse_prompt_tokens_total"] == 7
    assert {name: value for name, value in values.items() if "_usage_" in name} == {
        "drafthouse_usage_records_total": 1,
        "drafthouse_usage_entries_waiting": 2,
        "drafthouse_usage_journal_failures_total": 3,
        "drafthouse_usage_store_failures_total": 4,
        "drafthouse_usage_unbilled_streams_total": 5,
        "drafthouse_usage_journal_failing": 1,
    }


def test_what_has_not_happened_is_told_as_zero() -> None:
    """Of a series that begins at 1, `increase` and `rate` miss the first: an alert stays silent."""
    metrics = Metrics()
    metrics.count_request(EngineError.reason)
    metrics.n_text_workers_lost[TextWorkerLost.LATE] += 1
    values = values_of(render(metrics.statistics()))
    told = [name for name in values if name.startswith("drafthouse_requests_total")]
    outcomes = {name.split('"')[1]: values[name] for name in told}
    assert outcomes.pop("ENGINE_FAILURE") == 1
    assert {"stop", "length", "cancelled", "deadline"} < outcomes.keys()
    assert {"NO_TOKEN_ALLOWED", "INVALID_API_KEY", "QUEUE_FULL", "SLOW_READER"} < outcomes.keys()
    assert set(outcomes.values()) == {0}
    lost = {
        cause: values[f'drafthouse_text_workers_lost_total{{cause="{cause}"}}']
        for cause in (TextWorkerLost.LATE, TextWorkerLost.CRASHED, TextWorkerLost.ENDED)
    }
    assert lost == {"late": 1, "crashed": 0, "ended": 0}


def test_the_phases_add_up_to_the_engines_time_and_no_phase_is_their_sum() -> None:
    metrics = Metrics()
    for total_s in (10.5, 9.0):  # the second by a clock that lies
        timings = StepTimings(draft_s=1, decode_s=2, process_s=3, sample_s=4, total_s=total_s)
        metrics.count_step(StepResult([], timings=timings))
    values = values_of(render(metrics.statistics()))
    phases = {key: value for key, value in values.items() if "engine_seconds" in key}
    assert phases == {
        f'drafthouse_engine_seconds_total{{phase="{phase}"}}': seconds
        for phase, seconds in (
            *(("draft", 2), ("decode", 4), ("process", 6), ("sample", 8), ("other", 0.5)),
        )
    }


def test_buckets_count_all_up_to_their_bound() -> None:
    metrics = Metrics(model="m")
    for seconds in (0.0, 0.25, 0.26, 1e6):
        metrics.tenants.of("acme").first_token.observe(seconds)
    values = values_of(render(metrics.statistics()))
    name, labels = "drafthouse_time_to_first_token_seconds", 'model="m",tenant="acme"'

    def up_to(bound: str) -> float:
        found = [
            value
            for key, value in values.items()
            if key.startswith(f"{name}_bucket")
            and f'le="{bound}"' in key
            and 'tenant="acme"' in key
        ]
        assert len(found) == 1
        return found[0]

    assert {bound: up_to(bound) for bound in ("0.1", "0.25", "0.5")} == {
        "0.1": 1,
        "0.25": 2,
        "0.5": 3,
    }
    assert up_to("100.0") == 3
    assert up_to("+Inf") == values[f"{name}_count{{{labels}}}"] == 4
    assert values[f"{name}_sum{{{labels}}}"] == pytest.approx(1e6 + 0.51)


def test_histograms_are_written_as_the_library_writes_them() -> None:
    """The library takes ten times as long: a first scrape of 4,500 tenants was not answered."""
    metrics = Metrics(model='a "b"\\c\nd')
    for tenant, seconds in (("acme", 0.25), ("beta", 1e6), ("beta", 0.0)):
        metrics.tenants.of(tenant).first_token.observe(seconds)
    statistics = metrics.statistics()
    name = "drafthouse_time_to_first_token_seconds"
    labels = ["model", "tenant"]
    about = "Time from the receipt of a request to its first message with a token."
    expected = HistogramMetricFamily(name, about, labels=labels)
    for tenant, counts in statistics.tenants.items():
        found = counts.first_token
        sums = [*itertools.accumulate(found.counts)]
        buckets = [*zip([*map(str, found.bounds_s), "+Inf"], sums, strict=True)]
        expected.add_metric([statistics.model, tenant], buckets, found.sum_s)

    class One(Collector):
        def collect(self) -> Iterator[Metric]:
            yield expected

    told = [line for line in render(statistics).splitlines() if name in line]
    wanted = generate_latest(One()).decode().splitlines()
    assert len(told) == len(wanted) > 2 * len(FIRST_TOKEN_BOUNDS_S)
    for line, other in zip(told, wanted, strict=True):
        if line.startswith("#"):
            assert line == other
        else:
            assert line.rpartition(" ")[0] == other.rpartition(" ")[0]
            assert float(line.rpartition(" ")[2]) == float(other.rpartition(" ")[2])


def test_the_text_of_many_tenants_is_bounded() -> None:
    texts = []
    for n_tenants in (60, 6000):
        metrics = Metrics(model="m")
        for i in range(n_tenants):
            metrics.tenants.of(f"tenant-{i:05}").first_token.observe(0.5)
        texts.append(render(metrics.statistics()).count("\n"))
    assert texts[0] == texts[1]


async def test_a_server_tells_times_by_tenant_and_names_no_more_than_it_may(
    start_server: ServerFactory, free_port: int
) -> None:
    keys = tuple(f"tenant-{i}:{'k' * 20}{i}" for i in range(4))
    server = await start_server(metrics_port=free_port, max_metrics_tenants=2, api_keys=keys)
    for i in range(4):
        key = keys[i].partition(":")[2]
        async with drafthouse.AsyncClient(server.target, api_key=key, retry=None) as client:
            await client.generate("hello", temperature=0, max_output_tokens=20)
    _, text = await fetch(free_port, b"GET /metrics HTTP/1.1\r\n\r\n")
    values = values_of(text)
    for name in ("time_to_first_token_seconds", "queue_seconds", "draft_length_tokens"):
        counts = {
            key.partition('tenant="')[2].rstrip('"}'): value
            for key, value in values.items()
            if key.startswith(f"drafthouse_{name}_count")
        }
        assert counts == {"tenant-0": 1, "tenant-1": 1, "other": 2}
    steps = values['drafthouse_step_seconds_count{model="fake",phase="decode"}']
    assert steps == values["drafthouse_steps_total"]


def test_every_metric_stands_in_the_reference_with_its_type() -> None:
    text = render(Metrics().statistics())
    kinds = dict(re.findall(r"# TYPE (\w+) (\w+)", text))
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| [A-Z].*\. \|$", reference(), re.MULTILINE)
    assert dict(rows) == kinds
    assert len(rows) == len(kinds) > 20


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
    head = await fetch(free_port, b"HEAD /metrics HTTP/1.1\r\n\r\n")
    assert head == ("HTTP/1.1 200 OK", "")
    with contextlib.suppress(ConnectionError):  # it hangs up without reading all of it
        assert await fetch(free_port, b"GET /" + b"x" * 100_000) == ("", "")
    status, body = await fetch(free_port, b"GET /metrics?x=1 HTTP/1.1\r\nHost: x\r\n\r\n")
    silent.close()
    values = values_of(body)
    assert status == "HTTP/1.1 200 OK"
    assert values['drafthouse_requests_total{outcome="length"}'] == 1
    assert values["drafthouse_output_tokens_total"] == 20
    assert values["drafthouse_request_bytes_total"] == server.receive.n_bytes > 0
    assert values["drafthouse_file_descriptors"] > 0
    assert values['drafthouse_drafts_total{source="drafter"}'] > 0
    assert (
        values['drafthouse_time_to_first_token_seconds_count{model="fake",tenant="default"}'] == 1
    )
    labels = '{model="fake",tenant="default"}'
    n_gaps = values[f"drafthouse_inter_token_gap_seconds_count{labels}"]
    assert n_gaps <= 19
    assert values[f"drafthouse_time_per_output_token_seconds_count{labels}"] == min(1, n_gaps)


async def test_connections_are_bounded_and_come_free_again(
    free_port: int, monkeypatch: pytest.MonkeyPatch, eventually: Eventually
) -> None:
    monkeypatch.setattr(exposition, "_ANSWER_TIMEOUT_S", 1000.0)
    endpoint = MetricsEndpoint(Metrics().statistics)
    await endpoint.open("127.0.0.1", free_port)
    request = b"GET /metrics HTTP/1.1\r\n\r\n"
    silent = [await asyncio.open_connection("127.0.0.1", free_port) for _ in range(32)]
    with contextlib.suppress(ConnectionError):
        assert await fetch(free_port, request) == ("", "")
    for _, writer in silent:
        writer.close()
    await eventually(lambda: endpoint.n_connections == 0)
    assert (await fetch(free_port, request))[0] == "HTTP/1.1 200 OK"
    endpoint.close()


@pytest.mark.parametrize(("fresh_s", "n_read"), [(1000.0, 1), (-1.0, 3)])
async def test_a_text_is_given_out_again_while_it_is_fresh(
    free_port: int, monkeypatch: pytest.MonkeyPatch, fresh_s: float, n_read: int
) -> None:
    monkeypatch.setattr(exposition, "_FRESH_S", fresh_s)
    monkeypatch.setattr(exposition, "_REST", 0)
    asked: list[Statistics] = []

    def read() -> Statistics:
        asked.append(Metrics(n_running=len(asked)).statistics())
        return asked[-1]

    endpoint = MetricsEndpoint(read)
    await endpoint.open("127.0.0.1", free_port)
    bodies = [(await fetch(free_port, b"GET /metrics HTTP/1.1\r\n\r\n"))[1] for _ in range(3)]
    assert [values_of(body)["drafthouse_requests_running"] for body in bodies] == [
        min(i, n_read - 1) for i in range(3)
    ]
    assert len(asked) == n_read
    endpoint.close()


async def test_a_text_that_takes_longer_than_an_answer_may_is_written_once(
    free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with thousands of tenants: each scrape began another one, and none was ever answered."""
    monkeypatch.setattr(exposition, "_ANSWER_TIMEOUT_S", 0.05)
    monkeypatch.setattr(exposition, "_FRESH_S", 1000.0)
    may_end = threading.Event()
    written: list[Statistics] = []

    def write(statistics: Statistics) -> str:
        written.append(statistics)
        assert may_end.wait(100)
        return "the text"

    monkeypatch.setattr(exposition, "render", write)
    endpoint = MetricsEndpoint(Metrics().statistics)
    await endpoint.open("127.0.0.1", free_port)
    request = b"GET /metrics HTTP/1.1\r\n\r\n"
    try:
        for _ in range(3):
            with contextlib.suppress(ConnectionError):
                assert await fetch(free_port, request) == ("", "")
    finally:
        may_end.set()
    monkeypatch.setattr(exposition, "_ANSWER_TIMEOUT_S", 1000.0)
    assert (await fetch(free_port, request))[1] == "the text"
    assert len(written) == 1
    endpoint.close()


async def test_a_client_that_does_not_read_is_hung_up_on(
    free_port: int, monkeypatch: pytest.MonkeyPatch, eventually: Eventually
) -> None:
    monkeypatch.setattr(exposition, "_ANSWER_TIMEOUT_S", 0.05)
    # More than the buffers of both sides hold.
    monkeypatch.setattr(exposition, "render", lambda _: "x" * (64 << 20))
    asked: list[Statistics] = []

    def read() -> Statistics:
        asked.append(Metrics().statistics())
        return asked[0]

    endpoint = MetricsEndpoint(read)
    await endpoint.open("127.0.0.1", free_port)
    with socket.create_connection(("127.0.0.1", free_port), timeout=100) as client:
        client.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        await eventually(lambda: bool(asked))
        await eventually(lambda: endpoint.n_connections == 0)
        # On a thread: the event loop is what closes the connection.
        n_read = await asyncio.to_thread(drain, client)
    assert n_read < 64 << 20
    endpoint.close()


def drain(client: socket.socket) -> int:
    """Returns how many bytes come until the other side hangs up."""
    n_read = 0
    with contextlib.suppress(ConnectionError):
        while part := client.recv(1 << 20):
            n_read += len(part)
    return n_read


@pytest.mark.parametrize("host", ["::1", "[::1]"])
async def test_metrics_are_served_on_an_address_of_their_own(
    start_server: ServerFactory, free_port: int, host: str
) -> None:
    await start_server(metrics_host=host, metrics_port=free_port)
    status, _ = await fetch(free_port, b"GET /metrics HTTP/1.1\r\n\r\n", "::1")
    assert status == "HTTP/1.1 200 OK"
    with pytest.raises(ConnectionRefusedError):  # nothing at the server's own
        await fetch(free_port, b"GET /metrics HTTP/1.1\r\n\r\n", "127.0.0.1")


async def test_a_server_on_every_address_tells_its_metrics_on_loopback_alone() -> None:
    config = Config(host="0.0.0.0", insecure_no_auth=True, insecure_no_tls=True)  # noqa: S104  # nobody listens
    assert config.metrics_host == "127.0.0.1"


async def test_a_server_on_a_socket_tells_its_metrics(
    start_server: ServerFactory, free_port: int, tmp_path: Path
) -> None:
    await start_server(host=f"unix:{tmp_path}/d.sock", metrics_port=free_port)
    status, body = await fetch(free_port, b"GET /metrics HTTP/1.1\r\n\r\n")
    assert status == "HTTP/1.1 200 OK"
    assert values_of(body)["drafthouse_calls_open"] == 0


async def test_a_taken_port_is_an_error_of_its_setting(
    start_server: ServerFactory, free_port: int
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", free_port))
        taken.listen()
        with pytest.raises(ConfigError, match="metrics_port"):
            await start_server(metrics_port=free_port)
