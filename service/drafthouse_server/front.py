"""Settings of the front: what clients may hold of the server before and after their requests run.

Part of `config.Config`; docs/security.md says what each bounds.
"""

from __future__ import annotations

import functools
import ipaddress
import itertools
from dataclasses import dataclass
from typing import Protocol

from drafthouse_server import template_kwargs
from drafthouse_server.access import UNIX, bare_host
from drafthouse_server.errors import ConfigError
from drafthouse_server.setting import ANY, Rule, between, declare, one_of

__all__ = ["FrontSettings", "check_outbox", "check_ports"]

_ADDRESS = Rule("an address or a name", lambda host: bool(host) and not host.startswith("unix:"))


def _are_template_kwargs(text: str) -> bool:
    try:
        template_kwargs.read(text)
    except ValueError:
        return False
    return True


_TEMPLATE_KWARGS = Rule(
    f'a JSON object of at most {template_kwargs.N_BYTES_MAX} bytes, such as {{"enable_thinking":'
    " false}, without names that the server itself sets",
    _are_template_kwargs,
)

_LOCAL = {"localhost": "127.0.0.1"}

_model = functools.partial(declare, "Model")
_clients = functools.partial(declare, "Bounds on clients")
_watch = functools.partial(declare, "Health and metrics")


@dataclass(frozen=True, kw_only=True)  # no slots: `Config` has several bases
class FrontSettings:
    """The settings of the front."""

    max_message_bytes: int = _clients(
        0,
        between(0, 1 << 30),
        "Maximum size of a request in bytes, of any method; each method has a bound of its own"
        " besides, by what its fields may hold. 0: 4 MiB, or what the longest prompt of the context"
        " may take.",
    )
    """Largest request; 0 is automatic."""
    max_chat_messages: int = _clients(
        1024,
        between(1, 1 << 20),
        "Maximum messages of a chat; at most as many as the context has tokens.",
    )
    """Most messages of a chat."""
    chat_template_kwargs: str = _model(
        "",
        _TEMPLATE_KWARGS,
        "Arguments of the chat template, a JSON object: those that a chat does not set itself."
        " Empty: none.",
    )
    """Defaults of the chat template's arguments; empty is none."""
    max_calls: int = _clients(
        0,
        between(0, 1_000_000),
        "Calls that may be open at once, over all tenants: until their client has taken the last"
        " byte. Where all are open, a tenant below its share, by weight, opens more. 0: parallel +"
        " queue_size + 256.",
    )
    """Open calls over all tenants; 0 is automatic."""
    tenant_max_calls: int = _clients(
        0,
        between(0, 1_000_000),
        "Calls of one tenant that may be open at once. 0: parallel + tenant_queue_size + 128.",
    )
    """Open calls of a tenant; 0 is automatic."""
    front_mib: int = _clients(
        1024,
        between(16, 1 << 20),
        "MiB that open calls may hold, over all tenants: their requests, as read and as parsed, and"
        " outbox_kib for each stream. Where it is full, calls of tenants below their share, by"
        " weight, are taken all the same.",
    )
    """Memory of open calls."""
    tenant_read_mib_per_s: int = _clients(
        32,
        between(1, 1 << 20),
        "MiB of requests a second that are read of one tenant; a second's worth may come at once."
        " Further ones are refused unread until that is made up for. Each element of a message"
        " beyond 64, such as a message of a chat, counts as a KiB.",
    )
    """Bytes read of a tenant."""
    max_concurrent_streams: int = _clients(
        0,
        between(0, 1_000_000),
        "Calls that one connection may have open at once; more wait at the client."
        " 0: parallel or tenant_queue_size, the larger.",
    )
    """Streams of a connection; 0 is automatic: a client alone is not refused for its own queue."""
    max_connections: int = _clients(
        0,
        between(0, 1_000_000),
        "Connections that may be open at once at each address that host names; a further one is"
        " closed as it is accepted."
        " 0: as many as the limit of file descriptors leaves, less twice reserved_descriptors.",
    )
    """Connections of all clients; 0 is automatic."""
    first_message_timeout_s: float = _clients(
        10.0,
        between(0.01, 3600),
        "Seconds within which the request of a call must come, after its headers.",
    )
    """Bound of a client that sends nothing."""
    slow_reader_timeout_s: float = _clients(
        20.0,
        between(0.01, 3600),
        "Seconds within which a client must take a message. One that does not loses its stream.",
    )
    """Bound of a client that reads nothing."""
    outbox_kib: int = _clients(
        256,
        between(1, 1 << 20),
        "KiB of tokens that may wait for a client that reads more slowly than they come; beyond,"
        " its generation is ended.",
    )
    """Bound of what waits for a client."""
    max_connection_idle_s: float = _clients(
        300.0, between(1, 86400), "Seconds after which a connection without a call is closed."
    )
    """Bound of an idle connection."""
    max_connection_age_s: float = _clients(
        1800.0,
        between(1, 864000),
        "Seconds after which a connection takes no more calls, so that clients spread over the"
        " servers anew; its calls go on.",
    )
    """Bound of a connection's age."""
    max_connection_age_grace_s: float = _clients(
        3600.0,
        between(0, 864000),
        "Seconds that the calls of a connection may go on beyond its age; longer than the longest"
        " stream.",
    )
    """Bound of calls on an old connection."""
    max_metadata_bytes: int = _clients(
        8192, between(1024, 1 << 20), "Maximum size of the headers of a call in bytes."
    )
    """Largest headers."""
    reserved_descriptors: int = _clients(
        64,
        between(0, 1 << 20),
        "File descriptors that are kept free: new calls are refused while fewer are left.",
    )
    """Reserve of file descriptors."""
    open_health: bool = _watch(
        True,
        ANY,
        "Answer health checks without a key, as probes of load balancers need it.",
    )
    """Whether health checks need no key."""
    max_health_watchers: int = _watch(
        64, between(1, 1 << 20), "Calls of Health.Watch that may be open at once."
    )
    """Most watchers."""
    reflection: str = _watch(
        "auto",
        one_of("auto", "on", "off"),
        "Tell clients without a key which services there are (gRPC reflection). auto: on loopback"
        " only.",
    )
    """Whether there is reflection."""
    metrics_host: str = _watch(
        "127.0.0.1",
        _ADDRESS,
        "Address of the Prometheus endpoint, which asks for no key: beyond loopback whoever reaches"
        " it reads how busy the server is.",
    )
    """Address of the Prometheus endpoint."""
    max_metrics_tenants: int = _watch(
        20,
        between(0, 10_000),
        "Tenants that metrics name, the first that come; all others are counted together, as tenant"
        " other. 0: none is named.",
    )
    """Most tenants that metrics name."""
    unhealthy_exit_s: float = _watch(
        60.0,
        between(0, 86400),
        "Seconds after which a server whose steps are all lost, or that can start no text worker,"
        " ends with exit code 71, so that its supervisor starts it again. 0: never.",
    )
    """Bound of a broken engine; 0 is none."""
    step_timeout_s: float = _watch(
        600.0,
        between(0, 86400),
        "Seconds after which a step that has not ended counts as lost: health says so, requests"
        " are refused, and unhealthy_exit_s begins. 0: never.",
    )
    """Bound of a step; 0 is none."""


class _Listening(Protocol):
    """The settings that `check_ports` looks at; they are documented above and in `config`."""

    @property
    def host(self) -> str:
        """Address to listen at."""

    @property
    def port(self) -> int:
        """Port to listen at."""

    @property
    def metrics_host(self) -> str:
        """Address of the Prometheus endpoint."""

    @property
    def metrics_port(self) -> int:
        """Port of the Prometheus endpoint."""

    @property
    def admin_host(self) -> str:
        """Address of AdminService."""

    @property
    def admin_port(self) -> int:
        """Port of AdminService."""


def check_ports(settings: _Listening) -> None:
    """Checks that each listener has a place of its own, before a model is loaded for nothing.

    Raises:
        ConfigError: two of them have the same port of the same address, or the same socket; names
            both settings.
    """
    if settings.host.startswith(UNIX) and settings.host == settings.admin_host:
        problem = (
            f"host and admin_host are both {settings.host}, and only one of them can listen there;"
            " choose another admin_host"
        )
        raise ConfigError("admin_host", settings.admin_host, problem=problem)
    places = (
        ("port", settings.host, settings.port),
        ("metrics_port", settings.metrics_host, settings.metrics_port),
        ("admin_port", settings.admin_host, settings.admin_port),
    )
    used = [place for place in places if place[2] and not place[1].startswith(UNIX)]
    for (one, host, port), (other, other_host, other_port) in itertools.combinations(used, 2):
        if port == other_port and _meet(host, other_host):
            problem = (
                f"{one} and {other} are both {port}, and only one of them can listen there; choose"
                f" another {other}"
            )
            raise ConfigError(other, port, problem=problem)


def check_outbox(settings: FrontSettings) -> None:
    """Checks that there is memory for a stream: each holds a whole outbox.

    Raises:
        ConfigError: no call could ever be taken.
    """
    if settings.outbox_kib >> 10 >= settings.front_mib:
        problem = (
            f"outbox_kib is {settings.outbox_kib}, and front_mib has {settings.front_mib} MiB for"
            " the outboxes and requests of all calls; lower outbox_kib or raise front_mib"
        )
        raise ConfigError("outbox_kib", settings.outbox_kib, problem=problem)


def _meet(one: str, other: str) -> bool:
    """Returns whether two addresses are the same, or one of them is every address."""
    first, second = (_LOCAL.get(host.lower(), bare_host(host).lower()) for host in (one, other))
    return first == second or _is_every(first) or _is_every(second)


def _is_every(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False
