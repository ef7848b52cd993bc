"""The journal's bytes: what was written is read, whatever a crash or a disk did to the rest."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafthouse_server.usage.frames import (
    N_FRAME_BYTES_MAX,
    Entry,
    Frame,
    Gap,
    Mark,
    decode,
    encode,
    frames,
)
from drafthouse_server.usage.record import UsageRecord, make_record_id

NAMES = st.text(max_size=64)  # of any characters, halves of surrogate pairs too
SECONDS = st.floats(0, 1e10, allow_nan=False)
COUNTS = st.integers(0, 2**32 - 1)
IDS = st.builds(make_record_id, st.integers(0, 2**48 - 1), st.binary(min_size=10, max_size=10))

RECORDS = st.builds(
    UsageRecord,
    record_id=IDS,
    tenant=NAMES,
    key_id=NAMES,
    end_user=NAMES,
    model=NAMES,
    request_id=NAMES,
    started_at=SECONDS,
    n_prompt=COUNTS,
    ended_at=SECONDS,
    outcome=NAMES,
    n_reused=COUNTS,
    n_output=COUNTS,
    n_drafted=COUNTS,
    n_accepted=COUNTS,
    queue_s=SECONDS,
    prefill_s=SECONDS,
    decode_s=SECONDS,
    preempted_s=SECONDS,
)
MARKS = st.builds(Mark, IDS, SECONDS, COUNTS, COUNTS, COUNTS, COUNTS)
ENTRIES = st.one_of(RECORDS, MARKS)

SOME: list[Entry] = [
    UsageRecord("0" * 26, "t", "", "", "m", "r1", 1.0, 5),
    Mark("0" * 26, 2.0, 32, 1, 3, 2),
    UsageRecord("0" * 26, "t", "", "", "m", "r1", 1.0, 5, 3.0, "stop", n_output=40),
]


def read(content: bytes) -> list[Entry]:
    return [decode(part.body) for part in frames(content) if isinstance(part, Frame)]


def gaps(content: bytes) -> list[Gap]:
    return [part for part in frames(content) if isinstance(part, Gap)]


@given(st.lists(ENTRIES, max_size=8))
def test_what_is_written_is_read(entries: list[Entry]) -> None:
    content = b"".join(map(encode, entries))
    assert read(content) == entries
    assert not gaps(content)


@given(st.lists(ENTRIES, min_size=1, max_size=4), st.data())
def test_a_tail_torn_anywhere_costs_the_last_entry_alone(
    entries: list[Entry], data: st.DataObject
) -> None:
    *whole, last = [encode(entry) for entry in entries]
    n_kept = data.draw(st.integers(0, len(last) - 1))
    content = b"".join(whole)
    torn = content + last[:n_kept]
    assert read(torn) == entries[:-1]
    assert gaps(torn) == [Gap(len(content), len(torn), is_tail=True)] * (n_kept > 0)


def test_a_tail_torn_at_every_byte_is_seen() -> None:
    content = b"".join(map(encode, SOME))
    ends = [part.end for part in frames(content)]
    for n_bytes in range(len(content)):
        n_whole = sum(end <= n_bytes for end in ends)
        assert read(content[:n_bytes]) == SOME[:n_whole]


def test_a_changed_byte_anywhere_costs_its_entry_alone() -> None:
    content = b"".join(map(encode, SOME))
    ends = [part.end for part in frames(content)]
    for i in range(len(content)):
        damaged = bytearray(content)
        damaged[i] ^= 0x10
        n_before = sum(end <= i for end in ends)
        assert read(bytes(damaged)) == SOME[:n_before] + SOME[n_before + 1 :]
        assert sum(gap.end - gap.start for gap in gaps(bytes(damaged))) > 0


@given(st.binary(max_size=200))
def test_any_bytes_are_read_to_their_end(content: bytes) -> None:
    parts = list(frames(content, 7))
    assert (parts[-1].end if parts else 7) == 7 + len(content)


@given(st.binary(max_size=60))
def test_any_body_is_an_entry_or_refused(body: bytes) -> None:
    try:
        entry = decode(body)
    except ValueError:
        return
    assert isinstance(entry, UsageRecord | Mark)


def test_an_entry_of_the_longest_names_fits_a_frame() -> None:
    text = "\N{GRINNING FACE}" * 256
    record = UsageRecord("0" * 26, text, text, text, text, text, math.pi, 1, outcome=text)
    assert len(encode(record)) <= N_FRAME_BYTES_MAX
    assert read(encode(record)) == [record]


def test_an_entry_of_a_newer_version_is_refused_and_not_misread() -> None:
    with pytest.raises(ValueError, match="newer version"):
        decode(b"X{}")


def test_a_record_of_an_older_version_has_defaults_for_what_is_new() -> None:
    fields = len(dataclasses.fields(UsageRecord))
    body = b'E["' + b"0" * 26 + b'","t","","","m","r",1.0,5,2.0,"stop"]'
    record = decode(body)
    assert isinstance(record, UsageRecord)
    assert (record.outcome, record.n_output, fields > 10) == ("stop", 0, True)
