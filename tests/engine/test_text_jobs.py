"""Jobs and answers are the same before and behind the bytes that they are sent as."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafthouse_server.engine.fake import FakeEngine
from drafthouse_server.engine.text_jobs import (
    TextAnswer,
    TextJob,
    grammar_bytes,
    perform,
    read_answer,
    read_job,
    write_answer,
    write_job,
)
from drafthouse_server.errors import FieldViolation
from drafthouse_server.step import SamplingOptions

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
IDS = st.lists(st.integers(0, 2**31 - 1), max_size=40)
SAMPLING = st.one_of(
    st.none(),
    st.builds(
        SamplingOptions,
        grammar=TEXT,
        dry_breakers=st.one_of(st.none(), st.lists(TEXT, max_size=3).map(tuple)),
        dry_multiplier=st.floats(0, 100),
        logit_bias=st.lists(
            st.tuples(st.integers(0, 999), st.sampled_from([-math.inf, -1.5, 100.0])), max_size=3
        ).map(tuple),
        seed=st.one_of(st.none(), st.integers(0, 4294967294)),
    ),
)
JOBS = st.one_of(
    st.builds(
        TextJob,
        text=TEXT,
        add_special=st.booleans(),
        parse_special=st.booleans(),
        sampling=SAMPLING,
    ),
    st.builds(
        TextJob,
        messages=st.lists(st.tuples(TEXT, TEXT), max_size=5),
        chat_template_kwargs=TEXT,
        sampling=SAMPLING,
    ),
    st.builds(TextJob, tokens=IDS, keep_special=st.booleans(), n_bytes_max=st.integers(0, 10**9)),
    st.builds(TextJob, sampling=SAMPLING),
)
ANSWERS = st.one_of(
    st.builds(
        TextAnswer, tokens=IDS, cpu_s=st.floats(0, 9), n_grammar_bytes=st.integers(0, 1 << 23)
    ),
    st.builds(
        TextAnswer,
        text=TEXT,
        problems=st.lists(st.builds(FieldViolation, TEXT, TEXT), max_size=3).map(tuple),
        is_last=st.booleans(),
    ),
)


@given(JOBS, st.floats(0, 100))
def test_a_job_is_read_as_it_was_written(job: TextJob, cpu_s: float) -> None:
    assert read_job(write_job(job, cpu_s)) == (job, cpu_s)


@given(ANSWERS)
def test_an_answer_is_read_as_it_was_written(answer: TextAnswer) -> None:
    assert read_answer(write_answer(answer)) == answer


@given(st.binary(max_size=80), st.binary(max_size=20))
def test_what_is_no_answer_is_a_value_error_and_nothing_else(start: bytes, end: bytes) -> None:
    answer = write_answer(TextAnswer([1, 2, 3], cpu_s=1.0))
    for content in (start, start + end, answer[: len(start)], answer[:-1], answer + b"x"):
        with contextlib.suppress(ValueError):
            read_answer(content)


@pytest.mark.parametrize("wrong", [-1, 260, 2**31 - 1])
def test_ids_of_no_vocabulary_are_no_answer(wrong: int) -> None:
    assert read_answer(write_answer(TextAnswer([0, 259])), 260).tokens == [0, 259]
    assert read_answer(write_answer(TextAnswer([])), 260).tokens == []
    with pytest.raises(ValueError, match="ids of no vocabulary"):
        read_answer(write_answer(TextAnswer([1, wrong, 2])), 260)


@pytest.mark.parametrize("wrong", [-1.0, math.nan, math.inf])
def test_a_time_that_is_none_is_no_answer(wrong: float) -> None:
    """It is charged, and a metric adds it up."""
    with pytest.raises(ValueError, match="a time that is none"):
        read_answer(write_answer(TextAnswer([1], cpu_s=wrong)))


@pytest.mark.parametrize("wrong", [{"n_grammar_bytes": math.inf}, {"cpu_s": 10**400}])
def test_numbers_that_are_none_are_no_answer(wrong: dict[str, Any]) -> None:
    """Not told as that, they left the call of the next tenant without an answer for ever."""
    with pytest.raises(ValueError, match="not an answer"):
        read_answer(write_answer(TextAnswer([1], **wrong)))


@pytest.mark.parametrize(
    ("job", "n_bytes", "path"),
    [
        (TextJob(text="héllo"), 6, "text"),
        (TextJob(messages=[("user", "é"), ("a", "")]), 7, "messages"),
        (TextJob(messages=[("user", "é")], chat_template_kwargs='{"é":1}'), 14, "messages"),
        (TextJob(tokens=[1, 2, 3]), 12, "token_ids"),
        (TextJob(sampling=SamplingOptions(grammar="root")), 4, "grammar"),
        (TextJob(sampling=SamplingOptions(dry_breakers=("é", "b"))), 3, "dry_breakers"),
        (TextJob(text="x", sampling=SamplingOptions(grammar="root")), 5, "text"),
    ],
)
def test_a_job_has_a_size_and_a_field(job: TextJob, n_bytes: int, path: str) -> None:
    assert (job.n_bytes, job.path) == (n_bytes, path)


def test_a_text_that_would_be_too_long_is_refused_before_it_is_made() -> None:
    class Counting(FakeEngine):
        n_asked = 0

        def token_bytes(self, token: int, *, special: bool) -> bytes:
            self.n_asked += 1
            return super().token_bytes(token, special=special)

    model = Counting()
    answer = perform(TextJob(tokens=[97] * 1000, n_bytes_max=10), model)
    assert [problem.field for problem in answer.problems] == ["token_ids"]
    assert "at most 10 bytes" in answer.problems[0].description
    assert model.n_asked == 11
    assert perform(TextJob(tokens=[97] * 10, n_bytes_max=10), model).text == "a" * 10


def test_a_start_token_that_template_and_tokenizer_have_written_is_there_once() -> None:
    class Twice(FakeEngine):
        def tokenize_chat(self, messages: object, chat_template_kwargs: str = "") -> list[int]:
            return [256, 256, *b"hi"]

    assert perform(TextJob(messages=[("user", "hi")]), Twice()).tokens == [256, *b"hi"]


@pytest.mark.parametrize(
    ("text", "n_least", "n_most"),
    [
        ("", 0, 0),
        ('root ::= "abc"', 3, 20),
        ('root ::= "abc"{2,1000}', 3000, 3030),
        ("root ::= [a-z]{1000}", 3000, 3030),
        ('root ::= ("a" | "b"){500}', 500, 560),
        ('root ::= "{1000}" # x{1000}', 6, 30),
        ('root ::= "a\\"b{9}"  {20}', 20, 180),
        ('root ::= "unclosed', 8, 30),
        ("root ::= x{2000", 2000, 2030),
    ],
)
def test_a_grammar_costs_its_elements_with_repetitions_written_out(
    text: str, n_least: int, n_most: int
) -> None:
    assert n_least <= grammar_bytes(text) // 8 <= n_most


def test_the_bytes_of_a_grammar_are_told_with_the_answer_and_never_too_many() -> None:
    sampling = SamplingOptions(grammar='root ::= "abc"{1000}')
    answer = perform(TextJob(text="x", sampling=sampling), FakeEngine())
    assert answer.n_grammar_bytes == grammar_bytes(sampling.grammar) > 8 * 3000
    assert read_answer(write_answer(answer)).n_grammar_bytes == answer.n_grammar_bytes
    for wrong in (-1, 1 << 60):
        broken = write_answer(TextAnswer(n_grammar_bytes=wrong))
        assert 0 <= read_answer(broken).n_grammar_bytes <= 16 << 20
