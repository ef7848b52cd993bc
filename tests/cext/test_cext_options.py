"""Parameters are refused with field, value and range before they reach C."""

from __future__ import annotations

import dataclasses
import pickle
from enum import Enum
from typing import Any

import numpy as np
import pytest

from drafthouse_engine import EngineParams, InvalidConfig, SamplingParams, _spec, errors

NAN, INF = float("nan"), float("inf")

BAD_SAMPLING: list[tuple[str, object]] = [
    *[(name, NAN) for name in ("temperature", "top_p", "min_p", "typical_p", "top_n_sigma")],
    *[(name, INF) for name in ("temperature", "penalty_repeat", "penalty_frequency")],
    *[(name, NAN) for name in ("penalty_presence", "dry_multiplier", "dry_base")],
    *[(name, NAN) for name in ("xtc_probability", "xtc_threshold")],
    ("temperature", -0.1),
    ("temperature", 1e39),  # infinite as a float
    ("temperature", "hot"),
    ("temperature", True),
    ("top_k", -1),
    ("top_k", 2**31),
    ("top_k", 1.5),
    ("top_p", 0.0),
    ("top_p", 1.01),
    ("min_p", -0.01),
    ("min_p", 1.01),
    ("typical_p", 0.0),
    ("top_n_sigma", 0.0),
    ("penalty_last_n", -2),
    ("penalty_repeat", 0.0),
    ("penalty_presence", -INF),
    ("dry_multiplier", -1.0),
    ("dry_base", 0.5),
    ("dry_allowed_length", -1),
    ("dry_penalty_last_n", -2),
    ("dry_breakers", ("ok", "nul\0")),
    ("xtc_probability", 1.5),
    ("xtc_threshold", -0.5),
    ("logit_bias", ((-1, 1.0),)),
    ("logit_bias", ((2**31, 1.0),)),
    ("logit_bias", ((1, NAN),)),
    ("logit_bias", ((1, INF),)),
    ("seed", -1),
    ("seed", 2**32 - 1),  # means "at random" in C
    ("grammar", "root ::= \0"),
    ("grammar", "\ud800"),
    ("grammar", None),
    ("ignore_eos", 1),
    ("logprobs", "yes"),
]


@pytest.mark.parametrize(("field", "value"), BAD_SAMPLING)
def test_sampling_refuses_and_names_the_field(field: str, value: object) -> None:
    with pytest.raises(InvalidConfig, match=rf"SamplingParams\.{field} must be ") as caught:
        SamplingParams(**{field: value})  # type: ignore[arg-type]  # wrong on purpose
    assert caught.value.field == field
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("draft_type", "MTP"),
        ("n_ctx", -1),
        ("n_batch", 0),
        ("n_ubatch", 0),
        ("n_ubatch", 2049),
        ("n_seq_max", 0),
        ("n_seq_max", 257),
        ("n_rs_seq", -2),
        ("n_threads", -1),
        ("p_min", 1.0),
        ("p_min", NAN),
        ("kv_unified", 1),
    ],
)
def test_engine_params_refuse_and_name_the_field(field: str, value: object) -> None:
    with pytest.raises(InvalidConfig, match=rf"EngineParams\.{field} must be "):
        EngineParams(**{field: value})  # type: ignore[arg-type]  # wrong on purpose


def test_draft_length_zero_is_refused_only_with_speculation() -> None:
    assert EngineParams(n_draft_max=0).n_draft_max == 0
    with pytest.raises(InvalidConfig, match="n_draft_max"):
        EngineParams(draft_type="mtp", n_draft_max=0)


def test_edges_of_the_ranges_are_allowed() -> None:
    SamplingParams(temperature=0, top_p=1, min_p=0, typical_p=1, penalty_last_n=-1, seed=2**32 - 2)
    SamplingParams(logit_bias=((0, -INF), (5, -3.5)), dry_breakers=(), xtc_threshold=1.0)
    EngineParams(n_seq_max=256, n_batch=1, n_ubatch=1, p_min=0.0, n_rs_seq=0)


def test_defaults_are_those_of_the_header() -> None:
    theirs = dataclasses.asdict(_spec.default_sampling_params())
    for field, value in dataclasses.asdict(SamplingParams()).items():
        wanted = pytest.approx(value) if isinstance(value, float) else value
        assert theirs[field] == wanted, field
    assert _spec.default_engine_params() == EngineParams()


@pytest.mark.parametrize("name", errors.__all__)
def test_errors_survive_pickle_with_their_values(name: str) -> None:
    kind = getattr(errors, name)
    if issubclass(kind, Enum):
        return
    error = kind("what happened")
    error.extra = 7
    again = pickle.loads(pickle.dumps(error))  # noqa: S301  # our own
    assert type(again) is kind
    assert (str(again), again.extra) == ("what happened", 7)
    assert isinstance(again, errors.EngineError)


def test_numbers_of_numpy_are_numbers() -> None:
    """They were refused: "must be an integer in [0, 2147483647], not np.int64(4)"."""
    top_k: Any = np.int64(4)
    temperature: Any = np.float32(0.5)
    params = SamplingParams(temperature=temperature, top_k=top_k)
    assert params == SamplingParams(temperature=0.5, top_k=4)
    assert [type(params.temperature), type(params.top_k)] == [float, int]
    for wrong in (np.bool_(True), np.float64("nan"), np.array([1])):
        given: Any = wrong
        with pytest.raises(InvalidConfig, match="top_k"):
            SamplingParams(top_k=given)
        with pytest.raises(InvalidConfig, match="temperature"):
            SamplingParams(temperature=given)


@pytest.mark.parametrize("bias", [{"a": 1.0}, {5: 1.0}, ((5,),), (5,), 5, None, "ab", ((5, "x"),)])
def test_a_bias_that_is_no_pair_is_named(bias: Any) -> None:
    """A mapping ended in "not enough values to unpack"."""
    with pytest.raises(InvalidConfig, match=r"logit_bias must be "):
        SamplingParams(logit_bias=bias)
