"""TLS: certificates from files, which may be replaced while the server runs, and whom they name."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import datetime
import hashlib
import logging
import re
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import grpc

from drafthouse_server.access import is_tenant_name, mode_problem
from drafthouse_server.config import Config
from drafthouse_server.errors import ConfigError, Unauthenticated

__all__ = ["Certificates", "admin_certificates", "tenant_of"]

_log = logging.getLogger(__name__)

_LOOK_S = 10.0
"""Seconds between two looks at the files when nobody connects."""

_VERSION_TAG, _UTC_TIME_TAG = 0xA0, 0x17
_N_ATTEMPTS = 3
"""Reads of files that change while they are read."""

_TENANT_URI = re.compile(r"spiffe://[^/]+/drafthouse/tenant/([^/]+)")

_Stamp = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class _Read:
    """The files as they were at one time."""

    stamp: _Stamp
    """What changes when a file does."""
    configuration: grpc.ServerCertificateConfiguration
    """What gRPC is given."""
    fingerprint: str
    """SHA-256 of the server's own certificate, hexadecimal."""
    begins_at: float
    """From when that is valid, seconds since 1970."""
    expires_at: float
    """When that expires, seconds since 1970."""
    digests: Mapping[str, str]
    """SHA-256 by file, hexadecimal: the server's certificate, and the authorities' file."""


class Certificates:
    """The server's certificate and key, and the authorities that sign its clients' certificates.

    gRPC asks for them at each new connection, and gets those of the files as they are then. Streams
    that run keep their connection. Where new files cannot be used, because certificate and key do
    not belong together, say, the ones before stay in use and the log says why, once.

    Args:
        config: Has `ssl_cert_file` and `ssl_key_file`, and `ssl_client_ca_file` when clients must
            show a certificate.
        is_told_alone: A file, where another one here tells of the others' changes.

    Raises:
        ConfigError: a file cannot be read or used; names the setting.

    Thread:
        Any; gRPC asks on threads of its own.
    """

    def __init__(self, config: Config, is_told_alone: str = "") -> None:
        self._config = config
        self._is_told_alone = is_told_alone
        self._paths = [Path(config.ssl_cert_file), Path(config.ssl_key_file)]
        if config.ssl_client_ca_file:
            self._paths.append(Path(config.ssl_client_ca_file))
        self._lock = threading.Lock()
        self._in_use = self._read()
        self._seen = self._in_use.stamp
        self._handed_over = self._in_use
        self._told: tuple[_Read, str] | None = None
        self.on_renewal: Callable[[str, str], object] | None = None
        """Called with a file that has changed, and the SHA-256 of what of it is in use; empty where
        it cannot be used. On any thread."""

    @property
    def path(self) -> str:
        """File of the server's certificate."""
        return self._config.ssl_cert_file

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the server's certificate that new connections get, hexadecimal."""
        return self._in_use.fingerprint

    @property
    def expires_at(self) -> float:
        """When the certificate expires that new connections get, seconds since 1970."""
        return self._in_use.expires_at

    def refusal(self, now: float) -> str:
        """Returns why clients refuse the certificate at a time; empty where its days are right."""
        read = self._in_use
        if read.begins_at <= now < read.expires_at:
            return ""
        if now < read.begins_at:
            return time.strftime("is not valid before %Y-%m-%d %H:%M", time.gmtime(read.begins_at))
        return time.strftime("expired on %Y-%m-%d", time.gmtime(read.expires_at))

    def credentials(self) -> grpc.ServerCredentials:
        """Returns what a gRPC server listens with."""
        return grpc.dynamic_ssl_server_credentials(
            self._in_use.configuration,
            self._renewed,  # type: ignore[arg-type]  # None is allowed: what there is stays
            bool(self._config.ssl_client_ca_file),
        )

    def look(self) -> None:
        """Reads the files again if they have changed; tells of a certificate out of its days."""
        with self._lock:
            self._look()
            self._tell_refusal()

    async def watch(self) -> None:
        """Looks at once, then every ten seconds, so that the log tells before a client does.

        Cancellation:
            ends it.
        """
        while True:
            await asyncio.to_thread(self.look)
            await asyncio.sleep(_LOOK_S)

    def _renewed(self) -> grpc.ServerCertificateConfiguration | None:
        """Returns what gRPC does not have yet; None when it has what there is."""
        with self._lock:
            self._look()
            if self._handed_over is self._in_use:
                return None
            self._handed_over = self._in_use
            return self._in_use.configuration

    def _look(self) -> None:
        stamp = self._stamp()
        if stamp == self._seen:
            return
        self._seen = stamp
        before = self._in_use.digests
        try:
            self._in_use = self._read()
        except ConfigError as error:
            told = "new certificates are not used, those before stay in use"
            is_own = error.key != "ssl_client_ca_file"
            path = self.path if is_own else self._config.ssl_client_ca_file
            self._tell(path, "", f"{told}: {error}")
            return
        self._seen, found = self._in_use.stamp, self._in_use.digests
        if not self._is_told_alone and (
            problem := mode_problem("ssl_key_file", Path(self._config.ssl_key_file))
        ):
            _log.warning("%s; beyond loopback the next start refuses it", problem)
        changed = {path: digest for path, digest in found.items() if digest != before[path]}
        # A new key, or the same once more: the certificate stands for both.
        for path, digest in (changed or {self.path: self.fingerprint}).items():
            told = (
                "new connections get the certificate with SHA-256"
                if path == self.path
                else "who connects needs a certificate of its authorities; its SHA-256 is"
            )
            self._tell(path, digest, f"{path} was read again: {told} {digest}")

    def _tell_refusal(self) -> None:
        """Tells of each certificate once: its clients refuse it, and gRPC says nothing of that."""
        told = self._in_use, self.refusal(time.time())
        if self._is_told_alone or not told[1] or told == self._told:
            return
        self._told = told
        _log.error("the certificate in %s %s: clients refuse it", self.path, told[1])

    def _tell(self, path: str, digest: str, text: str) -> None:
        if self._is_told_alone not in ("", path):
            return
        _log.log(logging.INFO if digest else logging.ERROR, "%s", text)
        if self.on_renewal is not None:
            self.on_renewal(path, digest)

    def _stamp(self) -> _Stamp:
        """Returns what changes when a file does; nothing where one is missing."""
        try:
            found = [path.stat() for path in self._paths]
        except OSError:
            return ()
        return tuple((s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for s in found)

    def _read(self) -> _Read:
        """Returns the files, which belong together.

        Raises:
            ConfigError: one cannot be read or used.
        """
        for _ in range(_N_ATTEMPTS - 1):
            read = self._read_once()
            if self._stamp() == read.stamp:
                return read
        return self._read_once()

    def _read_once(self) -> _Read:
        stamp = self._stamp()
        config = self._config
        certificate = _content("ssl_cert_file", config.ssl_cert_file)
        key = _content("ssl_key_file", config.ssl_key_file)
        roots = None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        # Python asks a terminal for the password of an encrypted key, unless there is one.
        _use(
            lambda: context.load_cert_chain(config.ssl_cert_file, config.ssl_key_file, password=""),
            "ssl_key_file",
            config.ssl_key_file,
            f"ssl_cert_file {config.ssl_cert_file} and ssl_key_file {config.ssl_key_file} are not a"
            " certificate and its key (PEM, not encrypted)",
        )
        if config.ssl_client_ca_file:
            roots = _content("ssl_client_ca_file", config.ssl_client_ca_file)
            _use(
                lambda: context.load_verify_locations(config.ssl_client_ca_file),
                "ssl_client_ca_file",
                config.ssl_client_ca_file,
                f"ssl_client_ca_file {config.ssl_client_ca_file} has no certificates (PEM)",
            )
        configuration = grpc.ssl_server_certificate_configuration([(key, certificate)], roots)
        try:
            own = _first_of(certificate)
            begins_at, expires_at = _validity_of(own)
        except (ValueError, IndexError):
            problem = f"ssl_cert_file {config.ssl_cert_file} was changed while it was read"
            raise ConfigError("ssl_cert_file", config.ssl_cert_file, problem=problem) from None
        fingerprint = hashlib.sha256(own).hexdigest()
        digests = {config.ssl_cert_file: fingerprint}
        if roots is not None:
            digests[config.ssl_client_ca_file] = hashlib.sha256(roots).hexdigest()
        return _Read(stamp, configuration, fingerprint, begins_at, expires_at, digests)


def admin_certificates(config: Config) -> Certificates | None:
    """Returns those of the administrators' listener; None without authorities of their own.

    Raises:
        ConfigError: a file cannot be read or used; names the setting.
    """
    authorities = config.admin_client_ca_file
    if not authorities:
        return None
    own = dataclasses.replace(
        config, ssl_client_ca_file=authorities, admin_client_ca_file="", admin_port=0
    )
    try:
        return Certificates(own, authorities)
    except ConfigError as error:
        if error.key != "ssl_client_ca_file":
            raise
        problem = str(error).replace("ssl_client_ca_file", "admin_client_ca_file")
        raise ConfigError("admin_client_ca_file", authorities, problem=problem) from None


def _content(setting: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        problem = f"{setting} {path} cannot be read: {error.strerror}; check path and permissions"
        raise ConfigError(setting, path, problem=problem) from None


def _use(load: Callable[[], None], setting: str, path: str, problem: str) -> None:
    try:
        load()
    except OSError as error:  # of which ssl.SSLError is one
        reason = getattr(error, "reason", None) or "there is none in it"
        told = f"{problem}: {str(reason).lower().replace('_', ' ')}; check the files"
        raise ConfigError(setting, path, problem=told) from None


def _first_of(chain: bytes) -> bytes:
    """Returns the first certificate of a chain, which is the server's own, in DER."""
    _, _, first = chain.partition(b"CERTIFICATE-----")
    return base64.b64decode(first.partition(b"-----END")[0])


def _validity_of(certificate: bytes) -> tuple[float, float]:
    """Returns from when a certificate is valid, and when it expires, seconds since 1970.

    Args:
        certificate: In DER, and whole: the TLS library has taken it.

    Source:
        RFC 5280, 4.1: Certificate, TBSCertificate, Validity.
    """
    (_, whole), *_ = _elements(certificate)
    (_, signed), *_ = _elements(whole)
    fields = [content for tag, content in _elements(signed) if tag != _VERSION_TAG]
    begins, expires = _elements(fields[3])  # number, algorithm, issuer, validity
    return _time_of(*begins), _time_of(*expires)


def _time_of(tag: int, text: bytes) -> float:
    digits = text.decode("ascii")
    if tag == _UTC_TIME_TAG:
        digits = ("19" if digits >= "50" else "20") + digits
    return datetime.datetime.strptime(digits, "%Y%m%d%H%M%S%z").timestamp()


def _elements(content: bytes) -> Iterator[tuple[int, bytes]]:
    """Yields tag and content of each element of a sequence in DER."""
    at = 0
    while at < len(content):
        tag, n_bytes, start = content[at], content[at + 1], at + 2
        if n_bytes & 0x80:
            start += n_bytes & 0x7F
            n_bytes = int.from_bytes(content[at + 2 : start])
        yield tag, content[start : start + n_bytes]
        at = start + n_bytes


def tenant_of(properties: Mapping[str, Iterable[bytes]]) -> str | None:
    """Returns the tenant that a client's certificate names; None when it names none.

    Only a URI among the certificate's alternative names counts, of the form
    "spiffe://DOMAIN/drafthouse/tenant/NAME"; never its common name or a host name.

    Args:
        properties: Of the connection, as gRPC's `auth_context` returns them. It holds a certificate
            only after an authority of `ssl_client_ca_file` was found to have signed it.

    Raises:
        Unauthenticated: it names several, or what may be no tenant's name (INVALID_API_KEY).
    """
    uris = (value.decode("utf-8", "replace") for value in properties.get("peer_uri", ()))
    names = [match[1] for match in map(_TENANT_URI.fullmatch, uris) if match]
    if not names:
        return None
    if len(names) > 1 or not is_tenant_name(names[0]):
        raise Unauthenticated("the client certificate does not name one tenant by its URI")
    return names[0]
