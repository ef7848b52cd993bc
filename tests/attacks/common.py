"""What the attack scripts share: arguments, raw messages, the victim's probe, the result."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc

GENERATION = "/drafthouse.v1.GenerationService/"
MODELS = "/drafthouse.v1.ModelService/"
OPTIONS: Sequence[tuple[str, int]] = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),  # a connection of its own for each channel
)


def arguments(about: str, **extra: object) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("target", help="host:port")
    parser.add_argument("--key", help="the attacker's API key")
    parser.add_argument("--other-key", help="the victim's API key; the attacker's when not given")
    parser.add_argument("--victim-key", help="a third tenant's")
    parser.add_argument("--ca-file", default="", help="the server's authority; without, plain text")
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument(
        "--patience",
        type=float,
        default=1.0,
        help="times as long as on a quiet machine that what must come may take",
    )
    for name, default in extra.items():
        kind = type(default) if default is not None else str
        parser.add_argument("--" + name.replace("_", "-"), type=kind, default=default)
    found = parser.parse_args()
    found.seconds = min(max(found.seconds, 1.0), 120.0)
    found.victim = found.victim_key or found.other_key or found.key
    return found


def metadata(key: str | None) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {key}"),) if key else ()


def connect(target: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(target, OPTIONS)


def opened(target: str, ca_file: str = "") -> grpc.Channel:
    """Returns a channel; with TLS where an authority is given."""
    if not ca_file:
        return grpc.insecure_channel(target, OPTIONS)
    credentials = grpc.ssl_channel_credentials(Path(ca_file).read_bytes())
    return grpc.secure_channel(target, credentials, OPTIONS)


def varint(n: int) -> bytes:
    out = bytearray()
    while n > 127:
        out.append(n & 127 | 128)
        n >>= 7
    out.append(n)
    return bytes(out)


def field(number: int, payload: bytes) -> bytes:
    """Returns a length-delimited field of a protobuf message."""
    return varint(number << 3 | 2) + varint(len(payload)) + payload


def number(number: int, value: int) -> bytes:
    """Returns a varint field."""
    return varint(number << 3) + varint(value)


def raw_unary(channel: grpc.aio.Channel, method: str) -> Any:
    return channel.unary_unary(method)  # bytes in, bytes out


def raw_stream(channel: grpc.aio.Channel, method: str) -> Any:
    return channel.unary_stream(method)


class Probe:
    """A victim in a process of its own. kind: health, text, tokens, chat, stream.

    It is not niced as the attacker is whose child it is, for it too would have a machine of its
    own, and niced it would wait for the server's threads. That takes the right to be as urgent
    again; without it `nice` says so and runs it as it is.
    """

    def __init__(
        self, target: str, key: str | None, kind: str, seconds: float, ca_file: str = ""
    ) -> None:
        command = ["nice", "-n", str(-os.nice(0)), sys.executable, "-m", "tests.attacks.probe"]
        command += [target, kind, str(seconds)]
        environment = dict(os.environ, PROBE_KEY=key or "", PROBE_CA_FILE=ca_file)
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
        )

    def result(self) -> dict[str, Any]:
        """Waits for its end: n, p50, p95, p99, max in ms; errors by code.

        `worst` is the number of the longest, from 1 on.
        """
        text, _ = self._process.communicate(timeout=240)
        lines = text.decode().strip().splitlines()
        none: dict[str, Any] = dict.fromkeys(("p50", "p95", "p99", "max"), -1.0)
        none |= {"n": 0, "worst": 0, "errors": {"no result": 1}}
        return json.loads(lines[-1]) if lines else none


def baseline(target: str, key: str | None, kind: str, ca_file: str = "") -> dict[str, Any]:
    return Probe(target, key, kind, 3.0, ca_file).result()


def shown(found: dict[str, Any]) -> str:
    errors = "".join(f" {code}:{n}" for code, n in found["errors"].items())
    figures = f"p50 {found['p50']:.0f} p95 {found['p95']:.0f} max {found['max']:.0f} ms"
    return f"{figures} (n {found['n']}{errors})"


def verdict(name: str, is_bad: bool | None, figures: str) -> None:
    word = "?" if is_bad is None else "VULNERABLE" if is_bad else "ok"
    print(f"{name} | {word} | {figures}", flush=True)


LEAST_MS = 10.0
"""What a client's clock can tell on a machine whose cores are busy: less is no verdict."""
LEAST_TAIL_MS = 40.0
"""What a step may take beside running streams (`STEP_FREE_S`): who comes in its midst waits."""


def worse(before: dict[str, Any], during: dict[str, Any], factor: float) -> bool:
    """Returns whether a victim fares worse by more than a factor, or got errors that it had not.

    By the median of its times; by the 95th percentile, too, where that is more than a step that was
    under way explains. The worst of fifty says what else the machine had to do.
    """
    if before["p50"] < 0:
        raise SystemExit("the victim was not served before the attack: nothing to compare")
    if during["p50"] < 0 or (during["errors"] and not before["errors"]):
        return True
    least_ms = {"p50": LEAST_MS, "p95": LEAST_TAIL_MS}
    return any(during[each] > max(factor * before[each], ms) for each, ms in least_ms.items())


def is_alive(target: str, seconds: float = 60.0) -> bool:
    with grpc.insecure_channel(target, OPTIONS) as channel:
        try:
            call: Any = channel.unary_unary("/grpc.health.v1.Health/Check")
            call(b"", timeout=seconds)
        except grpc.RpcError as error:
            found: bool = error.code() not in (
                grpc.StatusCode.UNAVAILABLE,
                grpc.StatusCode.DEADLINE_EXCEEDED,
            )
            return found
    return True


def model(target: str, key: str | None) -> Any:
    from drafthouse.v1 import model_pb2, model_pb2_grpc

    with grpc.insecure_channel(target, OPTIONS) as channel:
        stub = model_pb2_grpc.ModelServiceStub(channel)
        return stub.GetModel(model_pb2.GetModelRequest(), timeout=60, metadata=metadata(key)).model
