"""Where the time to first token goes: a server that notes when each request got how far.

    drafthouse-bench timeline FILE serve --model models/tiny-mimo2-f16.gguf --port 9000 ...
    drafthouse-bench timeline FILE [--tenant NAME] [--slowest 10] [--after 7]

The first form runs `drafthouse serve` with the flags that follow, and at its end writes what it has
noted to FILE: of each generation the monotonic times at which its call began, its message was read,
a text worker was free for it, its text was read, it was submitted, a plan gave it its slot, its
first token was handed to the event loop and was written; of each step when it began and ended,
how many streams went on in it, how many tokens of prompts and drafts it had, and for how long its
thread had no core; of the event loop the turns that took more than a millisecond.

The second form prints, for each tenant, how long each of these takes: median, 95th percentile and
the longest, in ms; then the slowest requests with the steps that they waited for. Of the steps
without prompts it prints, for each number of streams, how many took much longer than the median of
their kind, in runs of how many one after the other, and what those had: runs of one length are
something that the server does; single ones are mostly the machine's.

The server's own code is wrapped for it, so figures are a few microseconds too long; without this
program it notes nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import sys
import time
from collections import Counter, abc
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from drafthouse_bench.report import percentile
from drafthouse_server.cli.main import main as run_server
from drafthouse_server.rpc.gate import Receive
from drafthouse_server.rpc.interceptors import current_call
from drafthouse_server.rpc.responses import StreamWriter
from drafthouse_server.scheduling.sequence import Event, Sequence, TokensEvent
from drafthouse_server.serving.engine_thread import EngineThread
from drafthouse_server.serving.loop import StepLoop
from drafthouse_server.serving.text_workers import TextWorkers
from drafthouse_server.step import StepPlan

__all__ = ["MARKS", "Timeline", "slow_runs", "spans"]

MARKS = (
    "received",
    "read",
    "waits",
    "worker",
    "text",
    "submitted",
    "planned",
    "stepping",
    "stepped",
    "delivered",
    "written",
)
"""What is noted of a request, in order; `waits` to `text` only where it has a text."""

_N_REQUESTS_MAX = 200_000
_TURN_S = 1e-3
_N_STEPS_SHOWN = 8
_SLOW = 1.25
"""A step is slow from so many times the median of steps of as many streams on."""


class Timeline:
    """Notes when requests got how far, and what steps had to do."""

    def __init__(self) -> None:
        self.requests: dict[str, dict[str, Any]] = {}
        """By request id: its tenant, and the monotonic time of each mark."""
        self.steps: list[list[float]] = []
        """Began, ended, streams that went on, sequences with prompts, tokens of prompts, steps run,
        slots taken, slots lost, draft tokens, and the seconds for which the engine thread was ready
        to run and had no core (0 where the system does not tell)."""

        self.turns: list[tuple[float, float, float, str]] = []
        """Turns of the event loop that took long: began, seconds, processor time, whose."""

    def mark(self, request_id: str, name: str, tenant: str = "") -> None:
        """Notes that a request got so far, if it had not."""
        found = self.requests.get(request_id)
        if found is None:
            if len(self.requests) >= _N_REQUESTS_MAX:
                return
            found = self.requests[request_id] = {}
        if tenant:
            found["tenant"] = tenant
        found.setdefault(name, time.monotonic())

    def write(self, path: Path) -> None:
        """Writes all to a file."""
        told = {"requests": self.requests, "steps": self.steps, "turns": self.turns}
        path.write_text(json.dumps(told) + "\n", encoding="utf-8")

    # --- what is wrapped

    def watch(self) -> None:
        """Wraps what the requests pass."""
        _wrap(asyncio.Handle, "_run", self._turn)
        _wrap(Receive, "_read", self._read)
        _wrap(TextWorkers, "_wait", self._wait)
        _wrap(TextWorkers, "run", self._run)
        _wrap(StepLoop, "submit", self._submit)
        _wrap(StepLoop, "_deliver", self._deliver)
        _wrap(EngineThread, "_step", self._step)
        _wrap(StreamWriter, "write", self._write)

    def _turn(self, inner: Callable[..., Any], own: Any) -> None:
        began, cpu_s = time.monotonic(), time.thread_time()
        inner(own)
        took_s = time.monotonic() - began
        if took_s > _TURN_S and len(self.turns) < _N_REQUESTS_MAX:
            task = getattr(own._callback, "__self__", None)
            whose = task.get_coro() if isinstance(task, asyncio.Task) else own._callback
            name = getattr(whose, "__qualname__", None) or type(whose).__name__
            self.turns.append((began, took_s, time.thread_time() - cpu_s, name))

    async def _read(self, inner: Callable[..., Any], own: object, call: Any, context: Any) -> Any:
        data = await inner(own, call, context)
        if call.method.endswith("/Generate"):
            self.mark(call.request_id, "read", call.tenant.name)
            self.requests.get(call.request_id, {})["received"] = call.received_at
        return data

    async def _wait(self, inner: Callable[..., Any], *arguments: Any) -> Any:
        request_id = current_call().request_id
        if request_id not in self.requests:
            return await inner(*arguments)
        self.mark(request_id, "waits")
        worker = await inner(*arguments)
        self.mark(request_id, "worker")
        return worker

    async def _run(self, inner: Callable[..., Any], *arguments: Any) -> Any:
        answer = await inner(*arguments)
        request_id = current_call().request_id
        if request_id in self.requests:
            self.mark(request_id, "text")
        return answer

    def _submit(
        self, inner: Callable[..., Any], own: object, sequence: Sequence, ticket: Any = None
    ) -> Any:
        self.mark(sequence.request.request_id, "submitted")
        return inner(own, sequence, ticket)

    def _step(self, inner: Callable[..., Any], own: Any, plan: StepPlan) -> Any:
        slots, began, waited_s = dict(own._slots), time.monotonic(), _waited_s()
        for start in plan.starts:
            self.mark(slots[start.seq_id].request.request_id, "planned")
        outputs = [entry for entry in plan.entries if entry.is_output]
        firsts = [slots[entry.seq_id] for entry in outputs if not slots[entry.seq_id].tally.n_steps]
        for sequence in firsts:
            self.mark(sequence.request.request_id, "stepping")
        ended = inner(own, plan)
        for sequence in firsts:
            self.mark(sequence.request.request_id, "stepped")
        lengths = [len(entry.tokens) for entry in plan.entries]
        n_rows = len(outputs) - len(firsts)
        n_prompt = sum(lengths) - n_rows
        counts = (n_rows, len(lengths) - n_rows, n_prompt, plan.n_steps)
        moves = (len(plan.starts), len(plan.swap_outs))
        n_draft = sum(entry.n_draft for entry in plan.entries)
        waited_s = _waited_s() - waited_s
        self.steps.append([began, time.monotonic(), *counts, *moves, n_draft, waited_s])
        return ended

    def _deliver(
        self, inner: Callable[..., Any], own: object, events: Iterable[tuple[Sequence, Event]]
    ) -> Any:
        events = list(events)
        inner(own, events)
        for sequence, event in events:
            if type(event) is TokensEvent:
                self.mark(sequence.request.request_id, "delivered")

    async def _write(self, inner: Callable[..., Any], own: Any, response: Any) -> Any:
        await inner(own, response)
        if len(response.chunk.token_ids):
            self.mark(own._caller.request_id, "written")


def _waited_s() -> float:
    """Returns for how long the calling thread was ready to run and had no core, so far."""
    try:
        with open("/proc/thread-self/schedstat", "rb", buffering=0) as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def _wrap(owner: type, name: str, wrapper: Callable[..., Any]) -> None:
    inner = getattr(owner, name)

    @functools.wraps(inner)
    def wrapped(*arguments: Any, **more: Any) -> Any:
        return wrapper(inner, *arguments, **more)

    setattr(owner, name, wrapped)


def spans(request: dict[str, Any]) -> dict[str, float]:
    """Returns the seconds from each mark of a request to the next that it has; empty if unfinished.

    Args:
        request: As `Timeline` notes it.
    """
    if "written" not in request or "received" not in request:
        return {}
    found, before = {}, request["received"]
    for name in MARKS[1:]:
        if name in request:
            found[name] = request[name] - before
            before = request[name]
    found["all"] = before - request["received"]
    return found


def _figures(values: abc.Sequence[float]) -> str:
    """Returns median, 95th percentile and the longest of some seconds, in ms."""
    return "".join(f"{percentile(values, share) * 1e3:9.2f}" for share in (0.5, 0.95, 1.0))


def _show(path: Path, tenant: str, n_slowest: int, after_s: float) -> None:
    told = json.loads(path.read_text(encoding="utf-8"))
    begin = after_s + min((each["received"] for each in told["requests"].values()), default=0.0)
    steps = [step for step in told["steps"] if step[0] >= begin]
    by_tenant: dict[str, list[dict[str, Any]]] = {}
    for request in told["requests"].values():
        name = request.get("tenant", "")
        if request["received"] >= begin and spans(request) and tenant in ("", name):
            by_tenant.setdefault(name, []).append(request)
    for name in sorted(by_tenant):
        _show_requests(name, by_tenant[name])
        slowest = sorted(by_tenant[name], key=lambda request: -spans(request)["all"])
        for request in slowest[:n_slowest]:
            _show_request(request, steps)
    _show_turns([turn for turn in told["turns"] if turn[0] >= begin])
    _show_steps(steps)


def _show_steps(steps: abc.Sequence[abc.Sequence[float]]) -> None:
    print(f"{len(steps)} steps; ms by what they had, median / p95 / most")
    for kind, has_prompts in (("with prompts", True), ("without", False)):
        took = [step[1] - step[0] for step in steps if (step[4] > 0) is has_prompts]
        if took:
            print(f"  {kind:13}{_figures(took)}")

    for n_streams in sorted({int(step[2]) for step in steps}):
        _show_slow_runs(n_streams, slow_runs(steps, n_streams))


def slow_runs(
    steps: abc.Sequence[abc.Sequence[float]], n_streams: int
) -> tuple[float, int, list[list[abc.Sequence[float]]]]:
    """Returns the steps without prompts that were slow, as they followed each other.

    Args:
        steps: As `Timeline` notes them.
        n_streams: Which steps: those in which so many streams went on, and no prompt.

    Returns:
        The median of such steps in seconds, their number, and the runs of slow ones; a run ends
        with a step of the same kind that was not slow, and steps of other kinds do not end it.
    """
    alike = [step for step in steps if step[2] == n_streams and not step[4]]
    if not alike or not n_streams:
        return 0.0, 0, []
    median_s = percentile([step[1] - step[0] for step in alike], 0.5)
    runs: list[list[abc.Sequence[float]]] = [[]]
    for step in alike:
        if step[1] - step[0] > _SLOW * median_s:
            runs[-1].append(step)
        elif runs[-1]:
            runs.append([])
    return median_s, len(alike), [run for run in runs if run]


def _show_slow_runs(
    n_streams: int, found: tuple[float, int, list[list[abc.Sequence[float]]]]
) -> None:
    median_s, n_steps, runs = found
    slow = [step for run in runs for step in run]
    if not slow:
        return
    by_length = Counter(map(len, runs))
    told = ", ".join(f"{n} of {length}" for length, n in sorted(by_length.items()))
    n_drafted = sum(step[8] > 0 for step in slow)
    n_moved = sum(step[6] + step[7] > 0 for step in slow)
    waited_s = percentile([step[9] for step in slow], 0.5)
    print(
        f"  {n_streams} streams, no prompt: {n_steps} steps, median {median_s * 1e3:.2f} ms;"
        f" {len(slow)} ({len(slow) / n_steps:.1%}) took {_SLOW:g} times as long and more, in runs:"
        f" {told}; {n_drafted} had drafts, {n_moved} took or lost slots, median"
        f" {waited_s * 1e3:.2f} ms without a core"
    )


def _show_requests(name: str, requests: abc.Sequence[dict[str, Any]]) -> None:
    print(f"{name}: {len(requests)} requests; ms until, median / p95 / most")
    found = [spans(request) for request in requests]
    for mark in (*MARKS[1:], "all"):
        values = [each[mark] for each in found if mark in each]
        if values:
            print(f"  {mark:10}{_figures(values)}")


def _show_request(request: dict[str, Any], steps: abc.Sequence[abc.Sequence[float]]) -> None:
    print("  " + " ".join(f"{mark} {took * 1e3:.1f}" for mark, took in spans(request).items()))
    began, ended = request["received"], request["written"]
    near = [step for step in steps if step[1] > began and step[0] < ended]
    for step in near[:_N_STEPS_SHOWN]:
        first, last = (1e3 * (at - began) for at in step[:2])
        n_streams, n_prompts, n_tokens, n_run, n_taken, n_lost, n_draft = map(int, step[2:9])
        print(
            f"      step from {first:.1f} to {last:.1f}: {n_streams} streams, {n_tokens} tokens of"
            f" {n_prompts} prompts, {n_run} in a row, {n_draft} drafted, {n_taken} slots taken,"
            f" {n_lost} lost, {step[9] * 1e3:.1f} ms without a core"
        )


def _show_turns(turns: Iterable[abc.Sequence[Any]]) -> None:
    by_name: dict[str, list[tuple[float, float]]] = {}
    for _, took_s, cpu_s, name in turns:
        by_name.setdefault(name, []).append((took_s * 1e3, cpu_s * 1e3))
    longest_first = sorted(by_name.items(), key=lambda each: -sum(ms for ms, _ in each[1]))
    for name, found in longest_first[:_N_STEPS_SHOWN]:
        print(
            f"{len(found)} turns of the event loop of more than {_TURN_S * 1e3:g} ms, of {name}:"
            f" {sum(ms for ms, _ in found):.0f} ms, {sum(ms for _, ms in found):.0f} ms of the"
            f" processor; the longest {max(found)[0]:.1f} and {max(found)[1]:.1f}"
        )


def main() -> int:
    """Runs a server that takes notes, or prints such notes."""
    if len(sys.argv) > 2 and sys.argv[2] == "serve":
        timeline = Timeline()
        timeline.watch()
        try:
            return run_server(sys.argv[2:])
        finally:
            timeline.write(Path(sys.argv[1]))
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--tenant", default="", help="this one's requests; all without")
    parser.add_argument("--slowest", type=int, default=0, help="requests to print one by one")
    parser.add_argument("--after", type=float, default=0.0, help="seconds to leave out")
    asked = parser.parse_args()
    _show(asked.file, asked.tenant, asked.slowest, asked.after)
    return 0


if __name__ == "__main__":
    sys.exit(main())
