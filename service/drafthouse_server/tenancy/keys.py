"""API keys: how they are written, made, recognised and digested; and the pepper of the digests.

A key is `dh_<id>_<secret><check>`: an id that may be shown and logged, a secret of 190 random bits,
and a checksum over both, so that a typing error, or a text that is no key, is refused without a
lookup, and a scanner of leaked secrets recognises keys without asking anybody.

What is stored of a key is the HMAC-SHA-256 of its whole text. Its own key, the pepper, stands in a
file outside the store: whoever reads the store alone can neither use nor test a key. The hash is a
fast one on purpose: a secret of 190 random bits cannot be guessed, and every call pays for it.
"""

from __future__ import annotations

import hmac
import os
import re
import secrets
import stat
import zlib
from dataclasses import dataclass
from pathlib import Path

from drafthouse_server.errors import ConfigError

__all__ = [
    "ApiKey",
    "claimed_id",
    "digest_of",
    "id_of_key",
    "make_key",
    "pepper_id",
    "read_pepper",
]

_ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_N_ID, _N_SECRET, _N_CHECK = 12, 32, 6
_N_BODY = len("dh_") + _N_ID + len("_") + _N_SECRET
_N_KEY = _N_BODY + _N_CHECK
_FORM = re.compile(rf"dh_([0-9A-Za-z]{{{_N_ID}}})_[0-9A-Za-z]{{{_N_SECRET + _N_CHECK}}}")
_N_PEPPER_BYTES = 32
_PEPPER_FORM = re.compile(rf"[0-9a-f]{{{2 * _N_PEPPER_BYTES}}}\s*")


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key at the only time at which it is known whole: when it is made."""

    id: str
    """Public part of the key, by which it is listed, revoked and logged."""
    text: str
    """The whole key. It is shown once and stored nowhere."""

    def __repr__(self) -> str:
        return f"ApiKey(id={self.id!r})"


def make_key() -> ApiKey:
    """Returns a new key of 190 random bits, and 71 more in its id."""
    key_id, secret = (
        "".join(secrets.choice(_ALPHABET) for _ in range(n)) for n in (_N_ID, _N_SECRET)
    )
    body = f"dh_{key_id}_{secret}"
    return ApiKey(key_id, body + _check_of(body))


def id_of_key(text: str) -> str | None:
    """Returns the id of a key, or None where a text is no key: wrong form or checksum."""
    if len(text) != _N_KEY:
        return None
    match = _FORM.fullmatch(text)
    if match is None or _check_of(text[:_N_BODY]) != text[_N_BODY:]:
        return None
    return match[1]


def claimed_id(text: str) -> str:
    """Returns what stands where a key has its id; of a text that is no key, anything.

    A digest that agrees proves more than the checksum: where one follows, this is enough.
    """
    return text[3 : 3 + _N_ID]


def _check_of(body: str) -> str:
    """Returns the CRC-32 of a text in base 62, six digits."""
    rest = zlib.crc32(body.encode("ascii"))
    digits = []
    for _ in range(_N_CHECK):
        rest, digit = divmod(rest, len(_ALPHABET))
        digits.append(_ALPHABET[digit])
    return "".join(reversed(digits))


def digest_of(text: str, pepper: bytes) -> bytes:
    """Returns what the store keeps of a key, 32 bytes.

    Args:
        text: The whole key.
        pepper: As `read_pepper` returns it.
    """
    return hmac.digest(pepper, text.encode(), "sha256")


def pepper_id(pepper: bytes) -> str:
    """Returns a name of a pepper that tells nothing of it; the store remembers it."""
    return hmac.digest(pepper, b"drafthouse pepper id", "sha256").hex()[:16]


def read_pepper(path: Path, *, may_make: bool = False) -> bytes:
    """Returns the pepper of a file, which only its owner may read.

    Args:
        path: The file.
        may_make: Whether a file that is missing is made, with random bytes and mode 0600.

    Raises:
        ConfigError: the file is missing, is no pepper, or others may read it.
    """
    if may_make:
        _make_pepper(path)
    try:
        with path.open(encoding="ascii") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            text = file.read(4096)
    except OSError as error:
        raise _wrong(
            path, f"cannot be read: {error.strerror}; check path and permissions"
        ) from None
    except UnicodeDecodeError:
        text, mode = "", 0
    if mode & 0o077:
        raise _wrong(path, f"may be read by others (mode {mode:04o}); chmod 600 {path}")
    if not _PEPPER_FORM.fullmatch(text):
        expected = f"{2 * _N_PEPPER_BYTES} hexadecimal digits"
        raise _wrong(path, f"is no pepper of {expected}; restore the file from its backup")
    return bytes.fromhex(text.strip())


def _make_pepper(path: Path) -> None:
    """Makes the file where there is none. Of several that try at once, one does it.

    It is written beside its place and linked there, so that nobody ever reads half of it.
    """
    if path.exists():
        return
    beside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        file = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.write(file, secrets.token_bytes(_N_PEPPER_BYTES).hex().encode() + b"\n")
            os.fsync(file)
        finally:
            os.close(file)
        try:
            os.link(beside, path)
        except FileExistsError:
            pass  # somebody else was first
        finally:
            beside.unlink()
    except OSError as error:
        raise _wrong(
            path, f"cannot be made: {error.strerror}; check path and permissions"
        ) from None


def _wrong(path: Path, problem: str) -> ConfigError:
    return ConfigError("key_pepper_file", str(path), problem=f"key_pepper_file {path} {problem}")
