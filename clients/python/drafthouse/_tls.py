"""How a client reaches its server: by TLS, or in plain text where nobody else can read it."""

from __future__ import annotations

import ipaddress
import os
import re
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from drafthouse._transport import wrong_type

__all__ = ["Tls", "is_local", "secured"]

_PLAIN_SCHEMES = ("dns:", "ipv4:", "ipv6:", "passthrough:")
_SOCKET_SCHEMES = ("unix:", "unix-abstract:")
_NO_PAIR = ("KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH")
"""What OpenSSL says of a private key that is not the certificate's."""

_PEM = {
    "ca_file": (rb"-----BEGIN [A-Z0-9 ]*CERTIFICATE-----", "certificate"),
    "key_file": (rb"-----BEGIN [A-Z ]*PRIVATE KEY-----", "private key"),
    "cert_file": (rb"-----BEGIN [A-Z0-9 ]*CERTIFICATE-----", "certificate"),
}
"""What each file must have, in the order in which gRPC takes them."""

_URL = re.compile(r"(https?|grpcs?|h2c?|tcp|tls)://", re.IGNORECASE)
_NO_TARGET = re.compile(r"^\s|\s$|[\0\ud800-\udfff]")
"""What gRPC cannot be told, or would look for as it is: a newline of a file."""
_PORT = re.compile(r":(\d+)(?:,|$)")
_PORT_MAX = 65535

_Options = Sequence[tuple[str, int | str]]


@dataclass(frozen=True, slots=True)
class Tls:
    """A connection by TLS. Files are PEM, and are read when the client is made."""

    ca_file: str | os.PathLike[str] | None = None
    """Authorities that sign the server's certificate; None: those that gRPC brings, which are the
    public ones, or those of the variable GRPC_DEFAULT_SSL_ROOTS_FILE_PATH."""
    cert_file: str | os.PathLike[str] | None = None
    """The client's own certificate, for a server that asks for one; None shows none."""
    key_file: str | os.PathLike[str] | None = None
    """Private key of `cert_file`."""
    server_name: str | None = None
    """Name that the server's certificate must have; None: the host of the target."""

    def __post_init__(self) -> None:
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("cert_file and key_file belong together: give both, or none")

    def credentials(self) -> grpc.ChannelCredentials:
        """Returns what a gRPC channel is made with.

        Raises:
            OSError: a file cannot be read.
            ValueError: a file is not PEM, or `key_file` is not the private key of `cert_file`.
        """
        files = {name: getattr(self, name) for name in _PEM}
        credentials = grpc.ssl_channel_credentials(
            *(None if file is None else _content(name, Path(file)) for name, file in files.items())
        )
        if self.cert_file is not None and self.key_file is not None:
            _check_pair(Path(self.cert_file), Path(self.key_file))
        return credentials

    def options(self) -> _Options:
        """Returns the channel's options."""
        if self.server_name is None:
            return ()
        return (
            ("grpc.ssl_target_name_override", self.server_name),
            ("grpc.default_authority", self.server_name),
        )


def _content(name: str, file: Path) -> bytes:
    """Reads a file of certificates or of a private key.

    Raises:
        OSError: it cannot be read.
        ValueError: it has none; where `ca_file` is empty, gRPC would trust the public authorities.
    """
    content = file.read_bytes()
    pattern, kind = _PEM[name]
    if not re.search(pattern, content):
        raise ValueError(
            f"{name} {str(file)!r} has no {kind}; it must be PEM, with a line such as"
            f" -----BEGIN {kind.upper()}-----"
        )
    return content


def _check_pair(certificate: Path, key: Path) -> None:
    """Checks that a private key is the certificate's; gRPC would only fail to connect.

    What else may be wrong with them is left to gRPC, whose library may take what Python's does not.

    Raises:
        ValueError: it is another one's.
    """
    if not (certificate.is_file() and key.is_file()):
        return  # a pipe, which can be read once alone
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_cert_chain(certificate, key, password="")  # which asks for none
    except ssl.SSLError as error:
        if error.reason in _NO_PAIR:
            problem = f"key_file {str(key)!r} is not the private key of cert_file"
            raise ValueError(f"{problem} {str(certificate)!r}") from None


def secured(
    target: str,
    api_key: str | None,
    tls: bool | Tls,
    credentials: grpc.ChannelCredentials | None,
    insecure_no_tls: bool,
) -> tuple[grpc.ChannelCredentials | None, _Options]:
    """Returns a channel's credentials, None for plain text, and its options.

    Args:
        target: address of the server.
        api_key: goes with every call; None is none.
        tls: how to connect by TLS; True by what gRPC brings.
        credentials: in place of `tls`.
        insecure_no_tls: whether a key may travel in plain text beyond loopback.

    Raises:
        ValueError: the key would be readable on its way, both `tls` and `credentials` are given,
            a file of `tls` is not PEM, certificate and private key do not belong together, or the
            target is no address.
        TypeError: the target or `tls` is of the wrong type.
        OSError: a file cannot be read.
    """
    if not isinstance(target, str):
        raise wrong_type("target", "text, such as 'host:port'", target)
    if not target or _URL.match(target) or _NO_TARGET.search(target):
        raise ValueError(f"target {target!r} must be an address, such as 'host:port'")
    if not (tls or credentials or api_key is None or insecure_no_tls or is_local(target)):
        raise ValueError(
            f"the API key would travel in plain text to {target!r}, which is not this machine;"
            " pass tls=True, or tls=drafthouse.Tls(ca_file=...) for an authority of your own;"
            " insecure_no_tls=True sends it all the same"
        )
    ports = [] if target.startswith(_SOCKET_SCHEMES) else _PORT.findall(target)
    if any(int(port) > _PORT_MAX for port in ports):  # gRPC would take its last 16 bits
        raise ValueError(f"target {target!r} must have a port of at most {_PORT_MAX}")
    # What is for this machine goes through no proxy.
    options: _Options = (("grpc.enable_http_proxy", 0),) if is_local(target) else ()
    if tls:
        if not isinstance(tls, bool | Tls):  # a file's name would be taken for True
            raise wrong_type("tls", "True, False or a drafthouse.Tls", tls)
        if credentials is not None:
            raise ValueError("tls and credentials are two ways to say the same; give one of them")
        tls = tls if isinstance(tls, Tls) else Tls()
        return tls.credentials(), (*options, *tls.options())
    return credentials, options


def is_local(target: str) -> bool:
    """Returns whether a target of gRPC is this machine; no other name than localhost is."""
    if target.startswith(_SOCKET_SCHEMES):
        return True
    scheme = next((scheme for scheme in _PLAIN_SCHEMES if target.startswith(scheme)), "")
    places = target.removeprefix(scheme)
    if places.startswith("//"):  # dns://AUTHORITY/HOST:PORT
        places = places[2:].partition("/")[2]
    return all(_is_loopback(place) for place in places.split(","))


def _is_loopback(place: str) -> bool:
    if place.startswith("["):
        host = place[1:].partition("]")[0]
    elif place.count(":") > 1:
        host = place  # an IPv6 address without a port
    else:
        host = place.partition(":")[0]
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
