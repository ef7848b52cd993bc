"""How a key is written, and what keeps its digest from being tested without the pepper's file."""

from __future__ import annotations

import hmac
import math
import re
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafthouse_server.errors import ConfigError
from drafthouse_server.tenancy import keys
from drafthouse_server.tenancy.keys import digest_of, id_of_key, make_key, pepper_id, read_pepper

ALPHABET = keys._ALPHABET
TEXTS = st.text(alphabet=ALPHABET)


def test_a_key_has_its_form_and_enough_randomness() -> None:
    made = [make_key() for _ in range(500)]
    for key in made:
        match = re.fullmatch(r"dh_([0-9A-Za-z]+)_([0-9A-Za-z]+)", key.text)
        assert match is not None
        assert match[1] == key.id == id_of_key(key.text)
        assert (len(match[2]) - keys._N_CHECK) * math.log2(len(ALPHABET)) >= 160
    secrets = [key.text.split("_")[2] for key in made]
    assert len(set(secrets)) == len({key.id for key in made}) == len(made)
    assert {character for secret in secrets for character in secret} == set(ALPHABET)


@given(
    body=st.text(alphabet=ALPHABET, min_size=44, max_size=44),
    place=st.integers(0, 52),
    to=st.characters(codec="utf-8"),
)
def test_one_wrong_character_is_seen_without_a_lookup(body: str, place: int, to: str) -> None:
    text = f"dh_{body[:12]}_{body[12:]}"
    text += keys._check_of(text)
    assert id_of_key(text) == body[:12]
    changed = text[:place] + to + text[place + 1 :]
    assert (id_of_key(changed) is None) == (changed != text)


@given(body=st.text(alphabet=ALPHABET, min_size=44, max_size=44), place=st.integers(4, 50))
def test_two_characters_in_the_wrong_order_are_seen(body: str, place: int) -> None:
    text = f"dh_{body[:12]}_{body[12:]}"
    text += keys._check_of(text)
    changed = text[:place] + text[place + 1] + text[place] + text[place + 2 :]
    assert (id_of_key(changed) is None) == (changed != text)


@given(text=st.text() | TEXTS.map(lambda rest: f"dh_{rest}") | st.text(min_size=54, max_size=54))
def test_garbage_is_no_key(text: str) -> None:
    assert id_of_key(text) is None


def test_a_digest_needs_text_and_pepper() -> None:
    key, pepper = make_key(), bytes(32)
    assert digest_of(key.text, pepper) == hmac.new(pepper, key.text.encode(), "sha256").digest()
    assert digest_of(make_key().text, pepper) != digest_of(key.text, pepper)
    assert digest_of(key.text, b"1" * 32) != digest_of(key.text, pepper)
    assert key.text not in repr(key)


def test_the_pepper_is_made_once_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "pepper"
    with pytest.raises(ConfigError, match="cannot be read"):
        read_pepper(path)
    found = set[bytes]()
    threads = [
        threading.Thread(target=lambda: found.add(read_pepper(path, may_make=True)))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 1
    assert path.stat().st_mode & 0o777 == 0o600
    assert [entry.name for entry in tmp_path.iterdir()] == ["pepper"]
    pepper = found.pop()
    assert len(pepper) == 32
    assert read_pepper(path, may_make=True) == pepper
    assert pepper.hex()[:8] not in pepper_id(pepper)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o666])
def test_a_pepper_that_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "pepper"
    read_pepper(path, may_make=True)
    path.chmod(mode)
    with pytest.raises(ConfigError, match=r"may be read by others .* chmod 600"):
        read_pepper(path)


@pytest.mark.parametrize("text", [b"", b"abc", b"\xff" * 64, b"0" * 63, b"z" * 64])
def test_a_file_that_is_no_pepper_is_refused_and_not_shown(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "pepper"
    path.write_bytes(text)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="is no pepper of 64 hexadecimal digits") as caught:
        read_pepper(path)
    assert text.decode("latin-1") not in str(caught.value) or not text


def test_a_folder_that_cannot_be_written_is_told() -> None:
    with pytest.raises(ConfigError, match="cannot be made"):
        read_pepper(Path("/proc/pepper"), may_make=True)  # where root makes no file either
