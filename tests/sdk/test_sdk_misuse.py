"""What the SDK is given wrongly is told at once, by a class that the documentation names."""

from __future__ import annotations

from typing import Any

import pytest

import drafthouse
from drafthouse._options import generate_request

NOBODY = "127.0.0.1:1"


@pytest.mark.parametrize("key", ["0123456789abcdef\n", "schlüssel", "a\0b"])
@pytest.mark.parametrize("kind", ["Client", "AsyncClient"])
async def test_a_key_that_no_header_can_carry_is_refused_and_not_told(key: str, kind: str) -> None:
    """Calls failed as if the server were at fault, and one of asyncio by an error of grpc."""
    with pytest.raises(ValueError, match="no header can carry the key") as caught:
        getattr(drafthouse, kind)(NOBODY, api_key=key)
    assert key.strip() not in str(caught.value)


@pytest.mark.parametrize("request_id", ["a\n", "straße"])
async def test_a_request_id_that_no_header_can_carry_is_refused(request_id: str) -> None:
    """It ended the call by an internal error."""
    with drafthouse.Client(NOBODY) as client:
        with pytest.raises(drafthouse.InvalidField, match="request_id") as caught:
            client.generate("x", request_id=request_id)
        assert [violation.field for violation in caught.value.violations] == ["request_id"]
    async with drafthouse.AsyncClient(NOBODY) as other:
        with pytest.raises(drafthouse.InvalidField, match="request_id"):
            other.generate("x", request_id=request_id)


def test_calls_of_a_closed_client_are_cancelled() -> None:
    """They ended in an error of grpc, which nothing of ours catches."""
    client = drafthouse.Client(NOBODY)
    client.close()
    for call in (client.tokenize, client.count_tokens, client.generate):
        with pytest.raises(drafthouse.Cancelled, match="closed"):
            call("x")
    with pytest.raises(drafthouse.Cancelled, match="closed"):
        client.health()


@pytest.mark.parametrize(
    "prompt", [b"def", bytearray(b"def"), memoryview(b"def"), {"role": "user", "content": "x"}]
)
def test_bytes_are_no_token_ids_and_a_message_is_no_list(prompt: Any) -> None:
    """Bytes are a sequence of integers: each was sent as a token id."""
    with drafthouse.Client(NOBODY) as client, pytest.raises(TypeError, match="a prompt is text"):
        client.generate(prompt)


def test_one_text_at_which_repetitions_end_is_one() -> None:
    """Its letters were."""
    request = generate_request("x", {"dry": drafthouse.Dry(breakers="END")})
    assert list(request.sampling.dry.breakers) == ["END"]
    request = generate_request("x", {"dry": drafthouse.Dry(breakers=("a", "b"))})
    assert list(request.sampling.dry.breakers) == ["a", "b"]


def test_a_list_without_names_is_no_limit() -> None:
    """On the wire it is no change: the tenant could use all models as before."""
    with drafthouse.AdminClient(NOBODY) as client, pytest.raises(ValueError, match="reset="):
        client.set_limits("acme", {"models": ()})
