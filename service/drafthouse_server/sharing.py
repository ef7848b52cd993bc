"""Settings of tenants: the store of their keys, how they share the server, what is recorded.

Part of `config.Config`; docs/keys.md, docs/fairness.md and docs/usage.md tell of them.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from drafthouse_server.setting import ANY, Rule, between, declare, one_of

__all__ = ["SharingSettings"]


def _are_weights(texts: tuple[str, ...]) -> bool:
    try:
        weights = [float(text) for text in texts]
    except ValueError:
        return False
    return len(weights) == 3 and all(0 < weight <= 1000 for weight in weights)


_WEIGHTS = Rule("three numbers in (0, 1000]", _are_weights)

_share = functools.partial(declare, "Tenants")
_usage = functools.partial(declare, "Usage")


@dataclass(frozen=True, kw_only=True)  # no slots: `Config` has several bases
class SharingSettings:
    """The settings of tenants."""

    store: str = _share(
        "",
        ANY,
        "URL of a database of tenants, keys, limits and usage: sqlite:///FILE, or"
        " postgresql://USER@HOST/DATABASE for several servers. `drafthouse keys` and `drafthouse"
        " tenants` work on it; changes are seen within a second or two. Empty: api_keys alone.",
        is_secret=True,
    )
    """URL of the store; empty: none."""
    key_pepper_file: str = _share(
        "",
        ANY,
        "Path of the secret that the store's keys are hashed with, a file of mode 0600 which is"
        " made with the first key. Without it no key of the store works: back it up, apart from"
        " the store. Empty: the file of a SQLite store with .pepper after its name.",
    )
    """Path of the pepper; empty: beside a SQLite store."""
    store_grace_s: float = _share(
        900.0,
        between(0, 7 * 86400),
        "Seconds that keys which were seen within the hour before go on when the store does not"
        " answer. Others are refused with STORE_UNAVAILABLE at once.",
    )
    """How long known keys go on without the store."""
    revoked_streams: str = _share(
        "end",
        one_of("end", "finish"),
        "What becomes of the running calls of a key of the store that is revoked: end, with"
        " UNAUTHENTICATED, within a second or two; or finish. Those of a tenant that is deleted end"
        " in any case.",
    )
    """Whether running calls of a revoked key end."""
    bad_keys_per_minute: int = _share(
        30,
        between(0, 1_000_000),
        "Wrong keys that one address may send at once, and again within a minute, one by one;"
        " unknown keys beyond are refused with TOO_MANY_BAD_KEYS, unread. Keys that the server"
        " knows work on. 0: any number.",
    )
    """Wrong keys of an address per minute; 0: any number."""
    service_weights: tuple[str, ...] = _share(
        ("1", "2", "1"),
        _WEIGHTS,
        "What counts as service of a tenant: a computed token of a prompt, a token of output, a"
        " drafted token that was rejected. Of the tenants that wait, the one with the least service"
        " for its weight goes first.",
    )
    """Units of service of a token."""
    mask_service_weight: float = _share(
        10.0,
        between(0, 1000),
        "Units of service (service_weights) that a million comparisons of a request's grammar, or"
        " of samplers that sort a large vocabulary, count as; they take about ten milliseconds of"
        " the step that all share.",
    )
    """Units of service of a million comparisons of a grammar."""
    text_service_weight: float = _share(
        1000.0,
        between(0, 1e6),
        "Units of service (service_weights) that a second of a text worker's processor time counts"
        " as. Texts that were read put a tenant behind the one that is served next by fair_quantum"
        " at most.",
    )
    """Units of service of a second of a text worker."""
    fair_quantum: float = _share(
        512.0,
        between(1, 1e9),
        "Units of service (service_weights) by which a tenant that waits may fall behind one that"
        " runs; then a stream of that one is preempted. A tenant with fewer slots than its share"
        " does not wait for it.",
    )
    """Lag after which a slot changes hands."""
    preempt_interval_s: float = _share(
        0.1,
        between(0, 3600),
        "Seconds in which a request is preempted once at most, for another tenant or for a higher"
        " priority of its own.",
    )
    """Bound of how often a sequence loses its slot."""
    preempt_mib_s: float = _share(
        64.0,
        between(0, 1e6),
        "MiB of preempted requests that may be saved a second for each tenant that takes slots; no"
        " stream goes on while they are written. 0: no request takes a slot from another.",
    )
    """Bytes of snapshots for slots that change hands."""
    priority_aging_s: float = _share(
        10.0,
        between(0, 86400),
        "Seconds of waiting that are worth one point of priority. 0: priorities do not age.",
    )
    """Aging of priorities."""
    rate_counters_url: str = _share(
        "",
        ANY,
        "URL of a Redis in which several servers count tenants' rates together:"
        " redis://HOST:PORT/NUMBER, or rediss:// with TLS. While it does not answer, each server"
        " counts for itself, with its part of each rate, or with the whole where it has not"
        " answered since the start. Empty: each server counts for itself, with the whole.",
        is_secret=True,
    )
    """URL of the Redis of shared rates; empty: none."""
    usage_journal: str = _usage(
        "",
        ANY,
        "Folder of the usage journal, in which each accepted stream has one record that survives a"
        " crash; `drafthouse usage` lists them. Servers must not share one. Empty: nothing is"
        " recorded.",
    )
    """Folder of the usage journal; empty: nothing is recorded."""
    usage_on_full: str = _usage(
        "refuse",
        one_of("refuse", "unbilled"),
        "What becomes of new streams while the usage journal cannot be written, as with a full"
        " disk. refuse: USAGE_UNAVAILABLE; unbilled: they are served without a record, which is"
        " logged and counted. Running streams go on either way.",
    )
    """What becomes of new streams while the usage journal cannot be written."""
