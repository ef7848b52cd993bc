"""An error of the SDK is an ordinary exception: it can be copied, and sent to another process."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import grpc
import pytest

import drafthouse

CLASSES = [
    kind
    for kind in map(vars(drafthouse).get, drafthouse.__all__)
    if isinstance(kind, type) and issubclass(kind, drafthouse.DrafthouseError)
]


def failed(kind: type[drafthouse.DrafthouseError]) -> drafthouse.DrafthouseError:
    """Returns an error that tells all that one can."""
    return kind(
        "it went wrong",
        code=grpc.StatusCode.DATA_LOSS,
        reason="NEWER",
        metadata={"tenant": "acme"},
        request_id="req_1",
        retry_after=1.5,
        violations=[drafthouse.FieldViolation("seed", "must be in [0, 4294967294]")],
        quota_violations=[drafthouse.QuotaViolation("tenant:acme", "requests")],
        usage=drafthouse.Usage(3, 2, 1),
    )


def told(error: drafthouse.DrafthouseError) -> dict[str, Any]:
    """Returns all that an error tells."""
    names = (
        "message", "code", "reason", "metadata", "request_id", "retry_after", "violations",
        "quota_violations", "usage",
    )  # fmt: skip
    return {name: getattr(error, name) for name in names} | {"str": str(error), "args": error.args}


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize(
    "copied",
    [lambda it: pickle.loads(pickle.dumps(it)), copy.copy, copy.deepcopy],  # noqa: S301  # our own
)
def test_a_copy_tells_what_the_error_does(
    kind: type[drafthouse.DrafthouseError],
    copied: Callable[[drafthouse.DrafthouseError], drafthouse.DrafthouseError],
) -> None:
    """Its metadata was of a kind that none can copy: a TypeError came in place of the error."""
    error = failed(kind)
    error.add_note("while it was asked for the third time")
    found = copied(error)
    assert type(found) is kind
    assert told(found) == told(error)
    assert found.__notes__ == error.__notes__
    for it in (error, found):
        with pytest.raises(TypeError, match="does not support item assignment"):
            it.metadata["tenant"] = "other"  # type: ignore[index]  # wrong on purpose


def fail() -> None:
    raise failed(drafthouse.QueueFull)


def test_an_error_of_another_process_arrives() -> None:
    # A new interpreter: this one has threads of gRPC, which no fork may copy.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        with pytest.raises(drafthouse.QueueFull) as caught:
            pool.submit(fail).result()
        assert told(caught.value) == told(failed(drafthouse.QueueFull))
