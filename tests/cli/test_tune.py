"""`drafthouse tune`: the settings follow from what was measured."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest

from drafthouse_server.cli.terminal import Terminal
from drafthouse_server.cli.tune import Advice, Measurements, advise, read_texts, tune
from drafthouse_server.config import Config
from drafthouse_server.engine.fake import FakeEngine
from drafthouse_server.step import EngineLimits, StepPlan, StepResult

LIMITS = EngineLimits("mtp", 4, 4096, 1024, 64, 64, 3, 16)


class Clock:
    """Virtual time."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class TimedEngine(FakeEngine):
    """Steps take a millisecond, and so much per token; more threads are faster, up to a point."""

    def __init__(self, config: Config, clock: Clock, token_s: float) -> None:
        super().__init__(LIMITS, acceptance=(0, 2, 1))
        self._clock = clock
        self._slowness = {1: 2.0, 2: 1.0}.get(config.threads, 1.5)
        self._token_s = token_s

    def step(self, plan: StepPlan) -> StepResult:
        result = super().step(plan)
        self._clock.now += self._slowness * (0.001 + self._token_s * result.n_batch_tokens)
        return result


def tuned(token_s: float) -> tuple[dict[str, Any], str]:
    clock, out = Clock(), io.StringIO()
    terminal = Terminal(out=out, err=io.StringIO())
    advice = tune(
        Config(), lambda c: TimedEngine(c, clock, token_s), ["held out text " * 9], terminal, clock
    )
    return {found.name: found.value for found in advice}, out.getvalue()


def test_cheap_tokens_ask_for_drafts_and_the_report_says_how_to_use_them() -> None:
    settings, report = tuned(token_s=1e-6)
    assert settings["draft_max"] in (2, 3)
    assert settings["draft_policy"] == "adaptive"
    assert f"--draft-max {settings['draft_max']}" in report
    assert 'draft_policy = "adaptive"' in report
    assert "x none" in report
    assert dataclasses.replace(Config(), **settings).batch_size == settings["batch_size"]


def test_dear_tokens_ask_for_none() -> None:
    settings, report = tuned(token_s=1e-2)
    assert settings["draft_type"] == "none"
    assert "no draft pays" in report


def test_a_slow_model_is_measured_by_fewer_steps() -> None:
    clock, err = Clock(), io.StringIO()
    terminal = Terminal(out=io.StringIO(), err=err)
    tune(Config(), lambda c: TimedEngine(c, clock, 0.03), ["held out text " * 90], terminal, clock)
    assert clock.now < 90  # 122 s when every K had prompts of its own, and as many steps
    assert "4 streams, K = 0, 1, …: " in err.getvalue()


def test_the_smallest_batch_that_is_nearly_as_fast_is_enough() -> None:
    measured = Measurements(
        threads={1: 50.0, 2: 90.0, 4: 80.0},
        prefill={16: 100.0, 32: 196.0, 64: 200.0},
        prefill_s={16: 0.16, 32: 0.163, 64: 0.32},
    )
    settings = {found.name: found.value for found in advise(measured)}
    assert settings == {"threads": 2, "batch_size": 32, "ubatch_size": 32}


def test_what_is_printed_starts_the_same_model_and_drafter() -> None:
    out, clock = io.StringIO(), Clock()
    config = Config(model="my model.gguf", model_draft="a 'b'.gguf", draft_type="simple")
    terminal = Terminal(out=out, err=io.StringIO())
    advice = tune(config, lambda c: TimedEngine(c, clock, 1e-6), ["text " * 90], terminal, clock)
    command, _, toml = out.getvalue().partition("\ndrafthouse serve ")[2].partition("\n\n# ")
    words = shlex.split(command)
    chosen = {words[i]: words[i + 1] for i in range(0, len(words), 2)}
    assert chosen["--model"] == "my model.gguf"
    assert chosen["--model-draft"] == "a 'b'.gguf"
    settings = tomllib.loads("# " + toml)
    assert settings["model_draft"] == "a 'b'.gguf"
    assert settings["threads"] == next(found.value for found in advice if found.name == "threads")


def test_what_is_printed_where_no_draft_pays_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """It named the draft model beside `--draft-type none`, which is refused."""
    monkeypatch.setattr(
        "drafthouse_server.cli.tune.advise", lambda _: [Advice("draft_type", "none", "no gain")]
    )
    out, clock = io.StringIO(), Clock()
    config = Config(model="m.gguf", model_draft="d.gguf", draft_type="simple", parallel=4)
    terminal = Terminal(out=out, err=io.StringIO())
    tune(config, lambda c: TimedEngine(c, clock, 1e-6), ["text " * 90], terminal, clock)
    settings = tomllib.loads("# " + out.getvalue().partition("\n\n# ")[2])
    assert settings == {"model": "m.gguf", "draft_type": "none", "parallel": 4}
    Config(**settings)


def test_a_path_that_is_not_ascii_is_printed_as_toml_has_it() -> None:
    out, clock = io.StringIO(), Clock()
    config = Config(model="/m/\N{GRINNING FACE}\x7f.gguf")
    terminal = Terminal(out=out, err=io.StringIO())
    tune(config, lambda c: TimedEngine(c, clock, 1e-6), ["text " * 90], terminal, clock)
    settings = tomllib.loads("# " + out.getvalue().partition("\n\n# ")[2])
    assert settings["model"] == config.model


def test_no_more_threads_are_tried_than_a_server_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(600))
    err, clock = io.StringIO(), Clock()
    terminal = Terminal(out=io.StringIO(), err=err)
    tune(Config(), lambda c: TimedEngine(c, clock, 1e-6), ["text " * 90], terminal, clock)
    assert "512 threads" in err.getvalue()


@pytest.mark.parametrize("prompts", [[], [{"text": ""}], [{"text": "one"}, {"text": ""}]])
def test_prompts_without_text_are_refused(tmp_path: Path, prompts: list[dict[str, str]]) -> None:
    path = tmp_path / "prompts.json"
    path.write_text(json.dumps({"prompts": prompts}))
    with pytest.raises(ValueError, match="without a text"):
        read_texts(path)


def test_texts_that_are_not_there_are_asked_for(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("drafthouse_server.cli.tune._PROMPTS", tmp_path / "prompts.json")
        with pytest.raises(ValueError, match="--prompts"):
            read_texts(tmp_path / "prompts.json")
