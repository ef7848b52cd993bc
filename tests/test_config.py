"""Settings: their rules, what is refused and how it is told; nothing is undocumented."""

from __future__ import annotations

import re
from typing import Any

import pytest

from drafthouse_server.access import is_loopback, is_tenant_name
from drafthouse_server.config import DRAFT_TYPES, SETTINGS, Config
from drafthouse_server.errors import ConfigError

LOOPBACK = ("127.0.0.1", "127.8.9.1", "::1", "[::1]", "localhost", "LOCALHOST", "unix:/tmp/d.sock")
EVERY = "0.0.0.0"  # noqa: S104  # nothing listens there in these tests
BEYOND = (EVERY, "::", "[::]", "10.0.0.1", "::ffff:10.0.0.1", "server.example", "h", "0", "*")


KEY = "acme:" + "k" * 20
TLS = {"ssl_cert_file": "server.crt", "ssl_key_file": "server.key"}


@pytest.mark.parametrize("host", LOOPBACK)
def test_on_loopback_no_key_and_no_tls_is_needed(host: str) -> None:
    assert is_loopback(host)
    config = Config(host=host, api_keys=("acme:k",))
    assert (config.is_open, config.is_plain) == (False, False)
    assert not Config(host=host).is_open


@pytest.mark.parametrize("host", BEYOND)
@pytest.mark.parametrize("has_keys", [False, True])
@pytest.mark.parametrize("has_tls", [False, True])
def test_beyond_loopback_a_server_needs_keys_and_tls_or_a_word_for_each(
    host: str, has_keys: bool, has_tls: bool
) -> None:
    assert not is_loopback(host)
    given: dict[str, Any] = ({"api_keys": (KEY,)} if has_keys else {}) | (TLS if has_tls else {})
    flags = {"insecure_no_auth": not has_keys, "insecure_no_tls": not has_tls}
    words = {"insecure_no_auth": "everybody", "insecure_no_tls": "read on their way"}
    for flag, is_missing in flags.items():
        if is_missing:
            with pytest.raises(ConfigError) as caught:
                Config(host=host, **given | flags | {flag: False})
            assert repr(host) in str(caught.value)
            for other, word in words.items():
                assert (
                    (other in str(caught.value)) is (word in str(caught.value)) is (other == flag)
                )
    config = Config(host=host, **given | flags)
    assert (config.is_open, config.is_plain) == (not has_keys, not has_tls)
    if not (has_keys or has_tls):
        with pytest.raises(ConfigError) as caught:
            Config(host=host)
        assert all(word in str(caught.value) for word in ("everybody", "read on their way", *flags))


def test_certificates_of_clients_are_as_good_as_keys() -> None:
    assert not Config(host=EVERY, **TLS, ssl_client_ca_file="ca.crt").is_open  # type: ignore[arg-type]  # by name


def test_beyond_loopback_a_key_that_could_be_guessed_is_refused_and_not_shown() -> None:
    with pytest.raises(ConfigError, match="'beta'") as caught:
        Config(host=EVERY, api_keys=(KEY, "beta:hush"), insecure_no_tls=True)
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize("name", ["", "-a", ".a", "a b", "a/b", "a\n", "ä", "a" * 65])
def test_a_tenant_has_a_name_that_fits_a_line(name: str) -> None:
    assert not is_tenant_name(name)
    with pytest.raises(ConfigError, match="api_keys"):
        Config(api_keys=(f"{name}:hush",))


@pytest.mark.parametrize("name", ["a", "A-1", "acme.example", "0_0", "a" * 64])
def test_names_of_tenants(name: str) -> None:
    assert is_tenant_name(name)
    assert Config(api_keys=(f"{name}:k",)).api_keys == (f"{name}:k",)


@pytest.mark.parametrize(
    ("settings", "key", "value"),
    [
        ({"port": 70000}, "port", 70000),
        ({"draft_type": "magic"}, "draft_type", "magic"),
        ({"model": ""}, "model", ""),
        ({"parallel": 0}, "parallel", 0),
        ({"draft_p_min": 1.0}, "draft_p_min", 1.0),
        ({"retry_after_s": float("nan")}, "retry_after_s", None),
        ({"log_level": "loud"}, "log_level", "loud"),
        ({"flash_attn": "maybe"}, "flash_attn", "maybe"),
        ({"gpu_layers": -2}, "gpu_layers", -2),
        ({"chat_template_kwargs": "{"}, "chat_template_kwargs", "{"),
        ({"chat_template_kwargs": '{"tools": []}'}, "chat_template_kwargs", '{"tools": []}'),
        ({"host": ""}, "host", ""),
        ({"host": "unix:"}, "host", "unix:"),
    ],
)
def test_a_wrong_value_is_named_with_its_setting(
    settings: dict[str, object], key: str, value: object
) -> None:
    with pytest.raises(ConfigError) as caught:
        Config(**settings)  # type: ignore[arg-type]  # wrong on purpose
    assert caught.value.key == key
    assert value is None or caught.value.value == value
    assert repr(key) in str(caught.value)
    assert caught.value.expected in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "key", "words"),
    [
        ({"batch_size": 4, "ubatch_size": 4}, "batch_size", "raise batch_size or lower parallel"),
        ({"ubatch_size": 1024}, "ubatch_size", "lower it or raise batch_size"),
        (
            {"draft_default": 9, "draft_policy": "fixed"},
            "draft_default",
            "lower draft_default or raise draft_max",
        ),
        ({"draft_type": "eagle3"}, "model_draft", "'eagle3' needs model_draft"),
        (
            {"draft_type": "mtp", "model_draft": "d.gguf"},
            "model_draft",
            "'mtp' takes no model_draft; remove it, or choose auto, eagle3, simple",
        ),
        ({"prompt_lookup": True, "draft_type": "none"}, "prompt_lookup", "set draft_type to"),
        ({"synth_rates": ("0.5",)}, "synth_rates", "has 1 rates; expected as many as draft_max, 4"),
        ({"outbox_kib": 16 << 10, "front_mib": 16}, "outbox_kib", "lower outbox_kib or raise"),
        ({"ssl_cert_file": "c"}, "ssl_cert_file", "ssl_key_file is not; TLS needs both"),
        ({"ssl_key_file": "k"}, "ssl_key_file", "ssl_cert_file is not; TLS needs both"),
        ({"ssl_client_ca_file": "a"}, "ssl_client_ca_file", "set ssl_cert_file and ssl_key_file"),
    ],
)
def test_settings_that_contradict_each_other_say_what_to_do(
    settings: dict[str, object], key: str, words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        Config(**settings)  # type: ignore[arg-type]  # wrong on purpose
    assert caught.value.key == key
    assert caught.value.value == settings.get(key, "")
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"port": 9000, "metrics_port": 9000}, "metrics_port"),
        ({"port": 9000, "admin_port": 9000}, "admin_port"),
        ({"metrics_port": 9000, "admin_port": 9000}, "admin_port"),
        ({"host": "localhost", "port": 9000, "metrics_port": 9000}, "metrics_port"),
        ({"host": EVERY, "insecure_no_tls": True, "port": 9000, "metrics_port": 9000,
          "api_keys": (KEY,)}, "metrics_port"),
        ({"metrics_host": "::", "port": 9000, "metrics_port": 9000}, "metrics_port"),
    ],
)  # fmt: skip
def test_two_listeners_in_one_place_are_refused_before_a_model_is_loaded(
    settings: dict[str, Any], key: str
) -> None:
    """The second was refused by the kernel, when the model had been loaded."""
    with pytest.raises(ConfigError) as caught:
        Config(**settings)
    assert caught.value.key == key
    assert "are both 9000" in str(caught.value)
    assert str(caught.value).endswith(f"choose another {key}")


def test_one_socket_for_clients_and_administrators_is_refused() -> None:
    """The second listener took the socket of the first, and clients found no service there."""
    with pytest.raises(ConfigError, match=r"host and admin_host are both unix:/tmp/d\.sock"):
        Config(host="unix:/tmp/d.sock", admin_host="unix:/tmp/d.sock")


@pytest.mark.parametrize(
    "settings",
    [
        {"port": 0, "metrics_port": 0, "admin_port": 0},
        {"port": 9000, "metrics_port": 9001, "admin_port": 9002},
        {"host": "unix:/tmp/d.sock", "port": 9000, "metrics_port": 9000},
        {"host": "127.0.0.2", "port": 9000, "metrics_port": 9000},
        {"host": "[::1]", "port": 9000, "metrics_port": 9000},
    ],
)
def test_listeners_in_places_of_their_own_are_taken(settings: dict[str, Any]) -> None:
    assert Config(**settings).port == settings["port"]


@pytest.mark.parametrize("entry", ["hush", ":hush", "hush:"])
def test_keys_are_never_shown(entry: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config(api_keys=(entry,))
    assert "hush" not in str(caught.value)
    assert "hush" not in repr(Config(api_keys=("a:hush",)))


def test_the_model_is_named_after_its_file_unless_told_otherwise() -> None:
    assert Config(model="dir/tiny-f16.gguf").model_name == "tiny-f16"
    assert Config(model="dir/tiny-f16.gguf", name="demo").model_name == "demo"


@pytest.mark.parametrize("draft_type", DRAFT_TYPES)
def test_every_draft_type_can_be_configured(draft_type: str) -> None:
    draft_model = "d.gguf" if draft_type in ("eagle3", "simple", "dflash", "dspark") else ""
    assert Config(draft_type=draft_type, model_draft=draft_model).draft_type == draft_type


def test_lookup_before_the_drafter_is_taken_with_one() -> None:
    assert Config(prompt_lookup=True).prompt_lookup


def test_every_setting_is_explained_by_sentences_and_has_a_group() -> None:
    for setting in SETTINGS.values():
        assert re.match(r"[A-Z].{15,}\.$", setting.about), f"{setting.name} is not documented"
        assert setting.group
        assert setting.name not in {setting.old, *setting.peers}


def test_no_name_stands_for_two_settings() -> None:
    names = [name for s in SETTINGS.values() for name in (s.name, s.old, *s.peers) if name]
    assert len(names) == len(set(names))
