"""What the timeline notes of requests, and what it prints of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from drafthouse_bench import timeline as notes
from drafthouse_bench.timeline import MARKS, Timeline, slow_runs, spans


def test_marks_count_once_and_spans_are_their_distances() -> None:
    timeline = Timeline()
    timeline.mark("r", "read", "acme")
    first = timeline.requests["r"]["read"]
    timeline.mark("r", "read")
    assert timeline.requests["r"] == {"tenant": "acme", "read": first}
    request = {"received": 1.0, "read": 1.5, "submitted": 2.0, "planned": 4.0, "written": 7.0}
    found = spans(request)
    assert found == {"read": 0.5, "submitted": 0.5, "planned": 2.0, "written": 3.0, "all": 6.0}
    assert not spans({"received": 1.0, "read": 1.5}), "it has no first token"


async def test_requests_beyond_those_that_are_noted_are_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(notes, "_N_REQUESTS_MAX", 0)
    timeline = Timeline()
    call = SimpleNamespace(
        method="/Generate", request_id="r", received_at=1.0, tenant=SimpleNamespace(name="acme")
    )

    async def read(*_: object) -> bytes:
        return b"message"

    assert await timeline._read(read, None, call, None) == b"message"
    assert not timeline.requests


def test_what_was_noted_is_printed_by_tenant(tmp_path: Path) -> None:
    times = {mark: float(i) / 1000 for i, mark in enumerate(MARKS)}
    step = [0.006, 0.007, 7, 1, 16, 1, 1, 0, 14, 0.002]
    told = {"requests": {"r": {"tenant": "acme", **times}}, "steps": [step], "turns": []}
    path = tmp_path / "told.json"
    path.write_text(json.dumps(told))
    command = [sys.executable, "-m", "drafthouse_bench", "timeline", str(path), "--slowest", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "acme: 1 requests" in done.stdout
    assert "7 streams, 16 tokens of 1 prompts, 1 in a row, 14 drafted" in done.stdout
    assert "other: " not in done.stdout


def test_slow_steps_are_told_in_the_runs_in_which_they_came(tmp_path: Path) -> None:
    def step(took_ms: float, *, n_prompt: int = 0, n_draft: int = 0) -> list[float]:
        return [0.0, took_ms / 1000, 1, 0, n_prompt, 1, 0, 0, n_draft, 0.0003]

    steps = [step(10)] * 6 + [step(15, n_draft=4)] * 3 + [step(10)] * 6 + [step(16), step(10)]
    steps[7:7] = [step(90, n_prompt=64)]  # a prompt between two of a run does not end it
    steps += [[0.0, 0.03, 2, *step(30)[3:]]] * 4  # two streams: none is slow of its kind
    median_s, n_steps, runs = slow_runs(steps, 1)
    assert (median_s, n_steps, [len(run) for run in runs]) == (0.010, 17, [3, 1])
    assert slow_runs(steps, 2) == (0.03, 4, [])
    assert slow_runs(steps, 0) == slow_runs(steps, 3) == (0.0, 0, [])
    path = tmp_path / "told.json"
    path.write_text(json.dumps({"requests": {}, "steps": steps, "turns": []}))
    command = [sys.executable, "-m", "drafthouse_bench", "timeline", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "4 (23.5%) took 1.25 times as long and more, in runs: 1 of 1, 1 of 3" in done.stdout
    assert "3 had drafts, 0 took or lost slots, median 0.30 ms without a core" in done.stdout
    assert "2 streams" not in done.stdout


def test_a_server_that_nobody_has_asked_has_nothing_to_print(tmp_path: Path) -> None:
    path = tmp_path / "told.json"
    Timeline().write(path)
    command = [sys.executable, "-m", "drafthouse_bench", "timeline", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "0 steps" in done.stdout
