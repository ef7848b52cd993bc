"""DRY breakers: a model's vocabulary is searched once for each text, whoever names it."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator

import pytest
from tests.support.built import built
from tests.support.demo import MODELS, TARGETS

from drafthouse_engine import BreakerStats, Model, Sampler, SamplingParams

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]


@pytest.fixture
def model() -> Iterator[Model]:
    with Model(MODELS / TARGETS["dense"], vocab_only=True) as model:
        yield model


def make(model: Model, *breakers: str, multiplier: float = 0.8) -> None:
    params = SamplingParams(
        dry_multiplier=multiplier, dry_breakers=breakers or None, dry_penalty_last_n=64
    )
    Sampler(model, params).close()


def n_searched(model: Model) -> int:
    return model.breaker_stats.n_searched


def test_breakers_are_found_where_they_are() -> None:
    run = subprocess.run(
        [str(built("breaker_test")), str(MODELS / TARGETS["dense"])],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert (run.returncode, run.stdout) == (0, "ok\n"), run.stdout + run.stderr


def test_the_vocabulary_is_searched_once_for_each_text(model: Model) -> None:
    assert model.breaker_stats == BreakerStats(n_searched=0, n_bytes=0, n_held=0)
    make(model, "one", "two", "one")
    assert n_searched(model) == 2
    for _ in range(5):
        make(model, "two", "one")
    make(model, "three", "two")
    assert n_searched(model) == 3
    assert model.breaker_stats.n_held == 3
    assert model.breaker_stats.n_bytes > 0


def test_a_vocabulary_alone_is_searched_with_the_default_look_back(model: Model) -> None:
    """That is the training context, which it does not have: text workers searched for nothing."""
    before = n_searched(model)
    params = SamplingParams(dry_multiplier=0.8, dry_breakers=("as far as one can",))
    Sampler(model, params).close()
    assert n_searched(model) == before + 1


def test_llama_cpp_s_own_four_are_kept_too(model: Model) -> None:
    make(model)
    make(model, "\n", ":", '"', "*")
    assert n_searched(model) == 4


def test_nothing_is_searched_where_dry_is_off(model: Model) -> None:
    make(model, "one", multiplier=0.0)
    assert n_searched(model) == 0


def test_texts_that_agree_as_far_as_they_are_read_are_one(model: Model) -> None:
    make(model, "a" * 40 + "b", "a" * 40 + "c")
    assert n_searched(model) == 1


def test_another_model_has_its_own(model: Model) -> None:
    make(model, "one")
    with Model(MODELS / TARGETS["hybrid"], vocab_only=True) as other:
        make(other, "one")
        assert n_searched(other) == 1


def test_no_more_than_256_are_kept_and_those_used_last(model: Model) -> None:
    texts = [f"text {i}" for i in range(300)]
    for i in range(0, 300, 25):
        make(model, "kept", *texts[i : i + 25])
    assert model.breaker_stats.n_held == 256
    assert n_searched(model) == 301
    make(model, "kept", texts[-1])
    assert n_searched(model) == 301
    make(model, texts[0])
    assert n_searched(model) == 302


def test_several_threads_make_samplers_at_once(model: Model) -> None:
    """Each text is searched by at most as many as there are; all get the same."""
    threads = [
        threading.Thread(target=make, args=(model, *(f"text {k % 7}" for k in range(i, i + 5))))
        for i in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert model.breaker_stats.n_held == 7
