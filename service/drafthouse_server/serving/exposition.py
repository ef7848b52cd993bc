"""Statistics for Prometheus: the list of metrics, their text, and the HTTP endpoint.

`prometheus_client` writes the text, but for histograms: many tenants have 100 lines each. Its HTTP
servers are not used: `start_http_server` starts a thread for each connection, as many as are
opened, and waits for a silent client without a limit (version 0.26); the ASGI application needs a
server of its own; the Twisted and aiohttp ones need these. The endpoint below answers on the event
loop, and bounds the number of connections, the seconds and the bytes of each, and the texts written
per second. The library's counters are not used either: the values are those of `Statistics`, read
when they are asked for, so that nothing is counted twice and there is no global registry.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeAlias

from prometheus_client import generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from drafthouse_server import errors
from drafthouse_server.access import bare_host
from drafthouse_server.engine.protocol import TextWorkerLost
from drafthouse_server.operations.histograms import Distribution, TenantCounts
from drafthouse_server.serving.metrics import (
    DraftCounts,
    Statistics,
)

__all__ = ["MetricsEndpoint", "reference", "render"]

_HEAD_BYTES_MAX = 8192
_ANSWER_TIMEOUT_S = 5.0
_N_CONNECTIONS_MAX = 32
"""Connections that are answered at once. Prometheus opens one; more are hung up on."""

_FRESH_S = 0.1
"""Age up to which a text is given out again: nobody needs a key to ask for one."""

_REST = 20
"""A text may also be as old as this many times what it took to write (many tenants: 40 ms)."""

_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_ByLabels: TypeAlias = Mapping[tuple[str, ...], Distribution]
_Value: TypeAlias = float | Mapping[str, float] | _ByLabels


@dataclass(frozen=True, slots=True)
class _Family:
    """One metric. Its value tells its kind, and "_total" in its name that it is a counter."""

    name: str
    """Name without the prefix "drafthouse_"."""
    about: str
    """What it counts, with the unit: one or more sentences."""
    read: Callable[[Statistics], _Value]
    """Returns the value: a number, numbers by the label's value, or distributions by labels."""
    label: str = ""
    """Name of the label; empty when there is none."""
    label_about: str = ""
    """Values of the label, for the reference."""
    labels: tuple[str, ...] = ()
    """Names of the labels of a histogram; empty of any other metric."""

    @property
    def full_name(self) -> str:
        """The name that Prometheus sees."""
        return f"drafthouse_{self.name}"

    @property
    def kind(self) -> str:
        """The type that Prometheus is told."""
        if self.name.endswith("_total"):
            return "counter"
        return "histogram" if self.labels else "gauge"

    def metric(self, statistics: Statistics) -> Metric:
        """Returns it in the library's form."""
        value: Any = self.read(statistics)
        family = CounterMetricFamily if self.name.endswith("_total") else GaugeMetricFamily
        labels = [self.label] if self.label else []
        metric = family(self.full_name, self.about, labels=labels)
        for key, number in value.items() if isinstance(value, Mapping) else (("", value),):
            metric.add_metric([key] if self.label else [], number)
        return metric

    def lines(self, statistics: Statistics) -> Iterator[str]:
        """Yields the lines of a histogram, which the library takes ten times as long to write."""
        value: Any = self.read(statistics)
        name = self.full_name
        yield f"# HELP {name} {self.about}\n# TYPE {name} histogram\n"
        for of, found in value.items():
            pairs = zip(self.labels, map(_escaped, of), strict=True)
            labels = ",".join(f'{label}="{text}"' for label, text in pairs)
            n = 0
            for bound, count in zip((*found.bounds_s, "+Inf"), found.counts, strict=True):
                n += count
                yield f'{name}_bucket{{le="{bound}",{labels}}} {n}\n'
            yield f"{name}_count{{{labels}}} {n}\n{name}_sum{{{labels}}} {found.sum_s}\n"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


_OUTCOMES = (
    *("stop", "length", "cancelled", "deadline"),
    *(error.reason for error in (
        errors.InvalidRequest, errors.ContextTooLong, errors.GrammarTooCostly,
        errors.NoTokenAllowed, errors.Unauthenticated, errors.PermissionDenied, errors.NotFound,
        errors.QuotaExceeded, errors.SlowReader, errors.QueueFull, errors.Draining,
        errors.DeadlineTooShort, errors.ServerOverloaded, errors.EngineUnhealthy,
        errors.StoreUnavailable, errors.UsageUnavailable, errors.EngineError,
    )),
)  # fmt: skip
"""Outcomes that are told before one has come: of a series that begins at 1, `increase` misses the
first, so that an alert on it would stay silent."""

_CAUSES = (TextWorkerLost.LATE, TextWorkerLost.CRASHED, TextWorkerLost.ENDED)


def _by_source(read: Callable[[DraftCounts], int]) -> Callable[[Statistics], Mapping[str, float]]:
    return lambda s: {source: read(counts) for source, counts in s.by_source.items()}


def _days_left(statistics: Statistics) -> Mapping[str, float]:
    expires_at = statistics.certificate_expires_at
    return {} if expires_at is None else {"": (expires_at - time.time()) / 86400}


_BACKENDS = (
    "`store`: tenants, keys and limits; `usage`: usage records in the store; `rate_counters`: the"
    " Redis of shared rates"
)


def _by_tenant(pick: Callable[[TenantCounts], Distribution]) -> Callable[[Statistics], _ByLabels]:
    return lambda s: {(s.model, tenant): pick(counts) for tenant, counts in s.tenants.items()}


def _by_phase(statistics: Statistics) -> _ByLabels:
    return {(statistics.model, phase): times for phase, times in statistics.steps.items()}


_TENANT = ("model", "tenant")

_SOURCES = "`drafter`: the MTP heads or the draft model; `ngram`: prompt lookup"

_FAMILIES = (
    _Family(
        "requests_total",
        "Calls of Generate that ended or were refused, by outcome; not those that were refused"
        " before their message was read, such as one with a wrong key.",
        lambda s: {**dict.fromkeys(_OUTCOMES, 0), **s.n_requests},
        "outcome",
        "`stop`, `length`, `cancelled`, `deadline`, or the reason of an error that came once the"
        " message was read",
    ),
    _Family("requests_running", "Requests that have a slot now.", lambda s: s.n_running),
    _Family("requests_waiting", "Requests that wait for a slot now.", lambda s: s.n_waiting),
    _Family("calls_open", "Calls whose client has not taken all yet.", lambda s: s.front.n_calls),
    _Family(
        "calls_refused_total",
        "Calls that were one too many, or whose key was missing, wrong or not to be looked up, by"
        " reason.",
        lambda s: s.front.n_refused,
        "reason",
        "`SERVER_OVERLOADED`: too many are open, or too little memory or too few file descriptors"
        " are left; `TENANT_QUOTA_EXCEEDED`: their tenant has too many open, or has sent too much;"
        " `INVALID_API_KEY`: no key, or a wrong one; `TOO_MANY_BAD_KEYS`: their address has sent"
        " too many wrong keys; `STORE_UNAVAILABLE`: the store of keys does not answer",
    ),
    _Family(
        "front_bytes",
        "Bytes of memory that are held for open calls: their requests and outboxes.",
        lambda s: s.front.n_held_bytes,
    ),
    _Family(
        "calls_stuck_total",
        "Calls that were ended because their client sent or read nothing for too long.",
        lambda s: s.front.n_stuck,
    ),
    _Family("health_watchers", "Calls of Health.Watch now.", lambda s: s.front.n_watchers),
    _Family(
        "file_descriptors",
        "File descriptors that are open, connections among them, as of the last call.",
        lambda s: s.front.n_descriptors,
    ),
    _Family(
        "request_bytes_total",
        "Bytes of the requests that were read, none of them before its key was known.",
        lambda s: s.front.n_bytes,
    ),
    _Family(
        "requests_preempted",
        "Requests that lost their slot to others and have not resumed.",
        lambda s: s.scheduler.n_preempted_now,
    ),
    _Family(
        "text_jobs_waiting", "Texts that wait for a text worker now.", lambda s: s.n_text_waiting
    ),
    _Family(
        "text_worker_seconds_total",
        "Processor seconds of text workers, and of starting those that a text has ended.",
        lambda s: s.text_s,
    ),
    _Family(
        "text_workers_lost_total",
        "Text workers that ended in the middle of a text.",
        lambda s: {**dict.fromkeys(_CAUSES, 0), **s.n_text_workers_lost},
        "cause",
        "`late`: the text took too long; `crashed`: it ended the process; `ended`: something else"
        " did, such as the system for lack of memory",
    ),
    _Family(
        "time_to_first_token_seconds",
        "Time from the receipt of a request to its first message with a token.",
        _by_tenant(lambda counts: counts.first_token),
        labels=_TENANT,
    ),
    _Family(
        "time_per_output_token_seconds",
        "Time from the first to the last message of a stream, divided by its output tokens less"
        " one. Left out are streams of one message, those that failed, and those that their client"
        " left.",
        _by_tenant(lambda counts: counts.output_token),
        labels=_TENANT,
    ),
    _Family(
        "inter_token_gap_seconds",
        "Gap between two messages with tokens of one stream. A message may carry several tokens.",
        _by_tenant(lambda counts: counts.message_gap),
        labels=_TENANT,
    ),
    _Family(
        "queue_seconds",
        "Time from the receipt of a request to its first slot, of requests that ended.",
        _by_tenant(lambda counts: counts.queue),
        labels=_TENANT,
    ),
    _Family(
        "draft_length_tokens",
        "Draft tokens (K) of a request's verified drafts in the mean, of requests that ended.",
        _by_tenant(lambda counts: counts.n_draft),
        labels=_TENANT,
    ),
    _Family(
        "accepted_per_draft_tokens",
        "Accepted tokens of each verified draft, of requests that ended.",
        _by_tenant(lambda counts: counts.n_accepted),
        labels=_TENANT,
    ),
    _Family(
        "step_seconds",
        "Time of one step by phase, as of engine_seconds_total. A step computes requests of several"
        " tenants.",
        _by_phase,
        labels=("model", "phase"),
    ),
    _Family(
        "prompt_tokens_total", "Prompt tokens of requests that ended.", lambda s: s.n_prompt_tokens
    ),
    _Family(
        "output_tokens_total",
        "Tokens in the messages of requests that ended: as many as their usage tells.",
        lambda s: s.n_output_tokens,
    ),
    _Family(
        "usage_records_total",
        "Usage records written to the journal, one for each accepted stream.",
        lambda s: s.usage.n_records,
    ),
    _Family(
        "usage_unbilled_streams_total",
        "Streams that were let in without a usage record, because the journal could not be"
        " written. Alert on any: nobody is billed for them.",
        lambda s: s.usage.n_unbilled,
    ),
    _Family(
        "usage_journal_failing",
        "Whether the usage journal cannot be written now, as with a full disk: 1 or 0.",
        lambda s: float(s.usage.is_failing),
    ),
    _Family(
        "usage_journal_failures_total",
        "Attempts to write the usage journal that failed.",
        lambda s: s.usage.n_journal_failures,
    ),
    _Family(
        "usage_entries_waiting",
        "Entries that wait in memory now for a usage journal that cannot be written.",
        lambda s: s.usage.n_pending,
    ),
    _Family(
        "usage_store_failures_total",
        "Attempts to bring usage records to the store that failed; they wait in the journal.",
        lambda s: s.usage.n_store_failures,
    ),
    _Family("steps_total", "Steps that succeeded.", lambda s: s.n_steps),
    _Family("steps_failed_total", "Steps that the engine lost.", lambda s: s.n_steps_failed),
    _Family(
        "threads",
        "Threads that the engine had for its last step; fewer than at the start while other"
        " processes take the cores, or fewer are granted, 0 before the first step.",
        lambda s: s.n_threads,
    ),
    _Family("batch_tokens_total", "Tokens in the target's decodes.", lambda s: s.n_batch_tokens),
    _Family(
        "generated_tokens_total",
        "Tokens that steps have yielded, those beyond a stop text or for clients that left, too.",
        lambda s: s.n_generated,
    ),
    _Family(
        "engine_seconds_total",
        "Seconds spent inside the engine, by phase.",
        lambda s: {phase: times.sum_s for phase, times in s.steps.items()},
        "phase",
        "`draft`; `decode` (the target); `process` (feeding the drafter); `sample` (sampling and"
        " verification); `other`",
    ),
    _Family(
        "host_seconds_total",
        "Seconds between two steps, in which the engine waits for the scheduler.",
        lambda s: s.host_s,
    ),
    _Family(
        "fan_out_seconds_total",
        "Seconds that the event loop spent on handing new tokens to their streams.",
        lambda s: s.fan_out_s,
    ),
    _Family(
        "scheduled_decodes_total",
        "Scheduled decodes: one per generating request and step.",
        lambda s: s.scheduler.n_planned,
    ),
    _Family(
        "draft_tokens_chosen_total",
        "Draft tokens chosen (K), summed over scheduled decodes.",
        lambda s: s.scheduler.n_draft_planned,
    ),
    _Family(
        "drafts_total",
        "Drafts verified, by source.",
        _by_source(lambda counts: counts.n_drafts),
        "source",
        _SOURCES,
    ),
    _Family(
        "draft_tokens_total",
        "Draft tokens verified, by source.",
        _by_source(lambda counts: counts.n_drafted),
        "source",
        _SOURCES,
    ),
    _Family(
        "accepted_tokens_total",
        "Draft tokens accepted, by source.",
        _by_source(lambda counts: counts.n_accepted),
        "source",
        _SOURCES,
    ),
    _Family(
        "backend_up",
        "Whether what the server keeps elsewhere has answered when it was asked last: 1, or 0.",
        lambda s: {name: float(state.is_up) for name, state in s.backends.items()},
        "backend",
        _BACKENDS,
    ),
    _Family(
        "backend_silence_seconds",
        "Seconds since it has answered last. The usage of the store is asked only when streams end"
        " or lists are read.",
        lambda s: {name: state.silent_s for name, state in s.backends.items()},
        "backend",
        _BACKENDS,
    ),
    _Family(
        "certificate_expiry_days",
        "Days until the certificate expires that new connections get; below 0 when it has. Absent"
        " without TLS.",
        _days_left,
    ),
    _Family(
        "estimator_resets_total",
        "Times that an estimator failed and started over; the log tells of the first time.",
        lambda s: s.scheduler.n_estimator_resets,
    ),
    _Family(
        "preemptions_total",
        "Times that a request lost its slot to others.",
        lambda s: s.scheduler.n_preempted,
    ),
    _Family(
        "resumes_total",
        "Times that a preempted request got a slot again.",
        lambda s: s.scheduler.n_resumed,
    ),
    _Family(
        "recomputed_tokens_total",
        "Tokens of preempted requests that were computed again.",
        lambda s: s.scheduler.n_recomputed,
    ),
    _Family(
        "preempted_bytes",
        "Bytes of host memory that preempted requests take now.",
        lambda s: s.scheduler.n_preempted_bytes,
    ),
    _Family(
        "prefix_lookups_total",
        "Prompts that were looked up in the prefix cache.",
        lambda s: s.scheduler.n_prefix_lookups,
    ),
    _Family(
        "prefix_hits_total",
        "Prompts of which the prefix cache had a part.",
        lambda s: s.scheduler.n_prefix_hits,
    ),
    _Family(
        "prefix_lookup_tokens_total",
        "Tokens of prompts that were looked up in the prefix cache.",
        lambda s: s.scheduler.n_prefix_tokens,
    ),
    _Family(
        "reused_tokens_total",
        "Prompt tokens that the prefix cache had, so that they were not computed again.",
        lambda s: s.scheduler.n_reused,
    ),
    _Family(
        "prefix_evictions_total",
        "Prefixes that had to leave a slot or host memory.",
        lambda s: s.scheduler.n_prefix_evicted,
    ),
    _Family(
        "prefix_bytes",
        "Bytes of host memory that prefixes take now.",
        lambda s: s.scheduler.n_prefix_bytes,
    ),
    _Family(
        "slots_retained",
        "Slots without a request that keep a prefix now.",
        lambda s: s.scheduler.n_retained,
    ),
)


class _Snapshot(Collector):
    """Statistics of one moment, as the library reads them."""

    def __init__(self, statistics: Statistics) -> None:
        self._statistics = statistics

    def collect(self) -> Iterator[Metric]:
        """Yields every metric but histograms."""
        for family in _FAMILIES:
            if not family.labels:
                yield family.metric(self._statistics)


def render(statistics: Statistics) -> str:
    """Returns statistics in Prometheus's text format 0.0.4."""
    histograms = (family.lines(statistics) for family in _FAMILIES if family.labels)
    text: str = generate_latest(_Snapshot(statistics)).decode()
    return text + "".join(chain.from_iterable(histograms))


def reference() -> str:
    """Returns the list of metrics as a Markdown table."""
    lines = ["| metric | type | meaning |", "|---|---|---|"]
    for family in _FAMILIES:
        label = f" `{family.label}` is {family.label_about}." if family.label else ""
        if family.labels:
            label = f" By {' and '.join(f'`{name}`' for name in family.labels)}."
        lines.append(f"| `{family.full_name}` | {family.kind} | {family.about}{label} |")
    return "\n".join(lines) + "\n"


class MetricsEndpoint:
    """Answers `GET /metrics`, and HEAD, one request for each connection.

    Args:
        read: Returns the statistics as they are now; called on the event loop.

    Thread:
        Event loop only.
    """

    def __init__(self, read: Callable[[], Statistics]) -> None:
        self._read = read
        self._server: asyncio.Server | None = None
        self.n_connections = 0
        """Connections that are answered now."""
        self._text = ""
        self._fresh_until = -math.inf
        self._writing: asyncio.Task[None] | None = None

    async def open(self, host: str, port: int) -> None:
        """Listens.

        Raises:
            ConfigError: the port cannot be listened at.
        """
        try:
            self._server = await asyncio.start_server(
                self._answer, bare_host(host), port, limit=_HEAD_BYTES_MAX
            )
        except OSError as error:
            expected = f"a port of {host} that is free ({error.strerror})"
            raise errors.ConfigError("metrics_port", port, expected) from None

    def close(self) -> None:
        """Listens no more; answers that have begun are finished. Harmless when done twice."""
        if self._server is not None:
            # Not `wait_closed`: from Python 3.12 on it waits for clients who say nothing.
            self._server.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.n_connections >= _N_CONNECTIONS_MAX:
            writer.transport.abort()
            return
        self.n_connections += 1
        # A client that hangs up, says nothing, says too much, or does not read, is not worth a
        # word in the log.
        gone = (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError)
        try:
            with contextlib.suppress(*gone):
                async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                    head = await reader.readuntil(b"\r\n\r\n")
                    writer.write(await self._response(head))
                    writer.close()
                    await writer.wait_closed()
        finally:
            self.n_connections -= 1
            # `close` alone would wait for a client that never reads its answer.
            writer.transport.abort()

    async def _response(self, head: bytes) -> bytes:
        method, _, rest = head.partition(b" ")
        path = rest.partition(b" ")[0].partition(b"?")[0]
        status, text, more = "200 OK", "", ""
        if path != b"/metrics":
            status, text = "404 Not Found", "see /metrics\n"
        elif method not in (b"GET", b"HEAD"):
            status, text = "405 Method Not Allowed", "GET /metrics\n"
            more = "Allow: GET, HEAD\r\n"
        else:
            text = await self._current_text()
        body = text.encode()
        return (
            f"HTTP/1.1 {status}\r\nContent-Type: {_CONTENT_TYPE}\r\n"
            f"Content-Length: {len(body)}\r\n{more}Connection: close\r\n\r\n"
        ).encode() + (b"" if method == b"HEAD" else body)

    async def _current_text(self) -> str:
        """Returns the text, which is written on a thread: of many tenants it takes a while."""
        if self._writing is None and asyncio.get_running_loop().time() >= self._fresh_until:
            self._writing = asyncio.create_task(self._write())
        if self._writing is not None:
            # Whoever has no time left leaves it to those who come later, and no other is begun.
            await asyncio.shield(self._writing)
        return self._text

    async def _write(self) -> None:
        clock = asyncio.get_running_loop().time
        began_at = clock()
        try:
            self._text = await asyncio.to_thread(render, self._read())
            now = clock()
            self._fresh_until = now + max(_FRESH_S, _REST * (now - began_at))
        finally:
            self._writing = None
