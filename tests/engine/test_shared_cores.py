"""An engine computes with fewer threads while other processes take the cores."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator

import pytest
from tests.engine.test_engine_contract import TEXTS, assert_same_or_tied, config, make, run
from tests.support.built import needs_extension

from drafthouse_engine import find_cores
from drafthouse_server.config import Config
from drafthouse_server.engine import llama
from drafthouse_server.engine.llama import LlamaEngine
from drafthouse_server.engine.threads import threads_of
from drafthouse_server.scheduling.sequence import Sequence
from drafthouse_server.step import StepPlan

pytestmark = needs_extension()


class Neighbours:
    """Other processes, which leave now one core and now two."""

    def __init__(self, numbers: Iterator[int]) -> None:
        self.n_threads = 2
        self.numbers = numbers

    def look(self, steps_s: float) -> bool:
        before = self.n_threads
        self.n_threads = next(self.numbers)
        return self.n_threads != before


def loaded(monkeypatch: pytest.MonkeyPatch, numbers: Iterator[int] | None) -> LlamaEngine:
    beside = None if numbers is None else Neighbours(numbers)
    monkeypatch.setattr(llama, "_free_cores", lambda _: beside)
    return LlamaEngine.load(config("tiny-mimo2-f16.gguf", "mtp", "", threads=2))


def generated(engine: LlamaEngine) -> list[Sequence]:
    crowd = [make(engine, text) for text in TEXTS]
    run(engine, crowd, 2)
    return crowd


def test_threads_that_come_and_go_change_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    fixed = loaded(monkeypatch, None)
    expected = generated(fixed)
    fixed.close()
    engine = loaded(monkeypatch, itertools.cycle([2, 1, 1, 2, 1]))
    for found, one in zip(generated(engine), expected, strict=True):
        assert_same_or_tied(engine, found, one)
    engine.close()


def test_a_step_tells_its_threads_and_the_log_tells_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = loaded(monkeypatch, iter([2, 1, 1, 2, 1]))
    with caplog.at_level(logging.INFO, "drafthouse_server.engine.llama"):
        assert [engine.step(StepPlan()).n_threads for _ in range(5)] == [2, 1, 1, 2, 1]
    engine.close()
    assert [record.getMessage()[:34] for record in caplog.records] == [
        "computing with 1 of 2 threads, bec"
    ]


@pytest.mark.parametrize(
    ("n", "n_batch", "n_host_bytes", "follows"),
    [
        (2, 0, 10_000_000, True),
        (1, 2, 10_000_000, True),
        (1, 0, 10_000_000, False),
        (1, 1, 10_000_000, False),
        (4, 0, 0, False),  # devices compute
    ],
)
def test_threads_follow_where_there_is_more_than_one_that_computes(
    n: int, n_batch: int, n_host_bytes: int, follows: bool
) -> None:
    settings = Config(threads=n, threads_batch=n_batch)
    assert threads_of(settings, 10_000_000, n_host_bytes).follows == follows


def test_threads_that_nobody_has_set_follow_on_more_than_one_core() -> None:
    assert threads_of(Config(), 10**9, 10**9).follows == (find_cores().n_cores > 1)
