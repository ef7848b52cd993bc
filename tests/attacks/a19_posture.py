"""F12, F17: what an anonymous caller sees: TLS, a key asked for, health, reflection, metrics.

--metrics-port names the metrics. Bound: TLS or loopback; a key is asked for;
metrics not without one.
"""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import socket
import ssl
from typing import Any

import grpc
from tests.attacks.common import GENERATION, OPTIONS, arguments, field, verdict

args = arguments(__doc__, metrics_port=0)
host, _, port = args.target.rpartition(":")
host = host.strip("[]")


def has_tls() -> bool:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    with (
        contextlib.suppress(OSError),
        socket.create_connection((host, int(port)), 3) as plain,
        context.wrap_socket(plain),
    ):
        return True
    return False


def answer(method: str, message: bytes) -> str:
    with grpc.insecure_channel(args.target, OPTIONS) as channel:
        try:
            call: Any = channel.unary_unary(method)
            call(message, timeout=5)
            return "OK"
        except grpc.RpcError as error:
            return error.code().name


def reflection() -> str:
    with grpc.insecure_channel(args.target, OPTIONS) as channel:
        method: Any = channel.stream_stream(
            "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
        )
        try:
            return f"{len(next(iter(method(iter([field(7, b'')]), timeout=5))))} bytes"
        except (grpc.RpcError, StopIteration):
            return "closed"


def metrics() -> str:
    if not args.metrics_port:
        return "not asked"
    with contextlib.suppress(OSError, http.client.HTTPException):
        connection = http.client.HTTPConnection(host, args.metrics_port, timeout=3)
        connection.request("GET", "/metrics")
        response = connection.getresponse()
        return f"{response.status}, {len(response.read())} bytes"
    return "closed"


address = socket.gethostbyname(host)
is_loopback = ipaddress.ip_address(address).is_loopback
tls = has_tls()
without_key = answer(GENERATION + "Tokenize", field(2, b"hello"))
told_metrics = metrics()
verdict(
    "a19_posture",
    (without_key == "OK" and not is_loopback) or (not tls and not is_loopback),
    f"{address} loopback {is_loopback}; TLS {tls}; Tokenize without a key {without_key}; health"
    f" {answer('/grpc.health.v1.Health/Check', b'')}; reflection {reflection()}; metrics"
    f" {told_metrics}",
)
