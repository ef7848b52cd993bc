"""Settings: which source wins, what is refused and how it is told; nothing is undocumented."""

from __future__ import annotations

import argparse
import dataclasses
import re
import tomllib
from pathlib import Path

import pytest

from drafthouse_server.config import (
    _FOREIGN_VARIABLES,
    DRAFT_TYPES,
    Config,
    add_flags,
    describe,
    is_loopback,
    load,
)
from drafthouse_server.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent


def test_later_sources_win(tmp_path: Path) -> None:
    file = tmp_path / "drafthouse.toml"
    file.write_text('port = 1\nn_seq_max = 2\nhost = "::1"\ndrain_timeout_s = 5\n')
    config = load(
        str(file), {"DRAFTHOUSE_PORT": "3", "DRAFTHOUSE_N_SEQ_MAX": "4"}, {"n_seq_max": "5"}
    )
    assert (config.host, config.port, config.n_seq_max) == ("::1", 3, 5)
    assert config.drain_timeout_s == 5.0
    assert config.n_batch == Config().n_batch


def test_the_environment_can_name_the_file(tmp_path: Path) -> None:
    file = tmp_path / "drafthouse.toml"
    file.write_text("port = 7\n")
    assert load(environment={"DRAFTHOUSE_CONFIG": str(file)}).port == 7


def test_flags_that_are_not_given_change_nothing() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    flags = vars(parser.parse_args(["--n-seq-max", "3", "--is-kv-unified", "true"]))
    config = load(environment={}, flags=flags)
    assert (config.n_seq_max, config.is_kv_unified) == (3, True)
    assert dataclasses.replace(config, n_seq_max=8, is_kv_unified=False) == Config()


def test_help_of_the_flags_can_be_formatted() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    assert all(f"--{field.name.replace('_', '-')}" in parser.format_help() for field in fields())


def test_variables_of_the_build_and_of_others_are_left_alone() -> None:
    names = "LLAMA_CPP CACHE CPU_KERNELS PORTABLE DEV SANITIZE PINNED API_KEY PYTHON BUILD"
    environment = {f"DRAFTHOUSE_{name}": text for name in names.split() for text in ("", "/x")}
    assert load(environment=environment | {"PATH": "", "LANG": "C"}) == Config()


def test_every_variable_that_is_left_alone_is_read_by_something_else() -> None:
    folders = ("scripts", "cext", "clients", "tests/fuzz", "service", "bench")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.*") if path.is_file()]
    endings = {".py", ".sh", ".h", ".cpp", ".txt", ".cmake"}
    texts = [
        path.read_text("utf-8")
        for path in paths
        if path.suffix in endings and path.name != "config.py"
    ]
    unread = {name for name in _FOREIGN_VARIABLES if not any(name in text for text in texts)}
    assert unread == set()


@pytest.mark.parametrize(
    ("variable", "similar"),
    [
        ("DRAFTHOUSE_N_SEQS_MAX", "DRAFTHOUSE_N_SEQ_MAX"),
        ("DRAFTHOUSE_API_KEYZ", "DRAFTHOUSE_API_KEYS"),
        ("DRAFTHOUSE_prot", "DRAFTHOUSE_PORT"),
        ("DRAFTHOUSE_CONFG", "DRAFTHOUSE_CONFIG"),
        ("DRAFTHOUSE_", ""),
        ("DRAFTHOUSE_ZZZZZZ", ""),
    ],
)
def test_a_variable_that_is_no_setting_is_refused(variable: str, similar: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown setting '{variable}'") as caught:
        load(environment={variable: "1"})
    assert str(caught.value).endswith(f"did you mean '{similar}'?" if similar else "remove it")


@pytest.mark.parametrize("name", ["API_KEYS", "PORT", "DRAFT_MODEL", "INSECURE_NO_AUTH", "CONFIG"])
@pytest.mark.parametrize("text", ["", "  ", " , "])
def test_an_empty_variable_is_refused(name: str, text: str) -> None:
    with pytest.raises(ConfigError, match="unset the variable") as caught:
        load(environment={f"DRAFTHOUSE_{name}": text})
    assert f"DRAFTHOUSE_{name}" in str(caught.value)


@pytest.mark.parametrize("text", ["", "  ", " , "])
def test_keys_that_are_none_open_no_server(text: str, tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text('api_keys = ["acme:k"]')
    with pytest.raises(ConfigError, match="flag --api-keys"):
        load(str(file), {}, {"api_keys": text})


def test_a_flag_that_names_no_file_is_refused() -> None:
    with pytest.raises(ConfigError, match="flag --config"):
        load("", {})


def test_an_unknown_key_of_a_file_names_what_was_meant(tmp_path: Path) -> None:
    file = tmp_path / "drafthouse.toml"
    file.write_text("n_seqs_max = 2\n")
    with pytest.raises(ConfigError, match="did you mean 'n_seq_max'") as caught:
        load(str(file), {})
    assert str(file) in str(caught.value)


LOOPBACK = ("127.0.0.1", "127.8.9.1", "::1", "[::1]", "localhost", "LOCALHOST", "unix:/tmp/d.sock")
EVERY = "0.0.0.0"  # noqa: S104  # nothing listens there in these tests
BEYOND = (EVERY, "::", "[::]", "10.0.0.1", "::ffff:10.0.0.1", "server.example", "h", "0", "*")


@pytest.mark.parametrize("host", LOOPBACK)
def test_on_loopback_no_key_is_needed(host: str) -> None:
    assert is_loopback(host)
    assert not Config(host=host).is_open


@pytest.mark.parametrize("host", BEYOND)
def test_beyond_loopback_a_server_needs_keys_or_to_be_told_that_it_is_open(host: str) -> None:
    assert not is_loopback(host)
    with pytest.raises(ConfigError) as caught:
        Config(host=host)
    for words in (repr(host), "everybody", "api_keys", "insecure_no_auth"):
        assert words in str(caught.value)
    assert not Config(host=host, api_keys=("acme:k",)).is_open
    assert Config(host=host, insecure_no_auth=True).is_open


def test_a_flag_that_is_true_or_false_may_stand_alone() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    words = ["--insecure-no-auth", "--has-prefix-cache", "false", "--host", EVERY]
    config = load(environment={}, flags=vars(parser.parse_args(words)))
    assert (config.insecure_no_auth, config.has_prefix_cache) == (True, False)
    assert config.host == EVERY


@pytest.mark.parametrize(
    ("settings", "key", "value"),
    [
        ({"port": 70000}, "port", 70000),
        ({"draft_type": "magic"}, "draft_type", "magic"),
        ({"model": ""}, "model", ""),
        ({"n_seq_max": 0}, "n_seq_max", 0),
        ({"p_min": 1.0}, "p_min", 1.0),
        ({"retry_after_s": float("nan")}, "retry_after_s", None),
        ({"n_batch": 4, "n_ubatch": 4}, "n_batch", 4),
        ({"n_ubatch": 1024}, "n_ubatch", 1024),
        ({"n_draft_default": 9, "draft_policy": "fixed"}, "n_draft_default", 9),
        ({"draft_type": "eagle3"}, "draft_model", ""),
        ({"draft_type": "mtp", "draft_model": "d.gguf"}, "draft_model", "d.gguf"),
        ({"log_level": "loud"}, "log_level", "loud"),
        ({"host": ""}, "host", ""),
        ({"host": "unix:"}, "host", "unix:"),
        ({"host": "unix:/d.sock", "metrics_port": 9090}, "metrics_port", 9090),
    ],
)
def test_a_wrong_value_is_named_with_its_key(
    settings: dict[str, object], key: str, value: object
) -> None:
    with pytest.raises(ConfigError) as caught:
        Config(**settings)  # type: ignore[arg-type]  # wrong on purpose
    assert caught.value.key == key
    assert value is None or caught.value.value == value
    assert repr(key) in str(caught.value)
    assert caught.value.expected in str(caught.value)


@pytest.mark.parametrize(
    ("variable", "text", "expected"),
    [
        ("DRAFTHOUSE_PORT", "many", "a whole number"),
        ("DRAFTHOUSE_P_MIN", "low", "a number"),
        ("DRAFTHOUSE_IS_KV_UNIFIED", "maybe", "true or false"),
    ],
)
def test_a_text_of_the_wrong_kind_names_its_source(variable: str, text: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected) as caught:
        load(environment={variable: text})
    assert variable in str(caught.value)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [
        'port = "50051"',
        "n_seq_max = 2.5",
        "is_kv_unified = 1",
        "prot = 1",
        "api_keys = 'acme:k'",
        "port = ",
    ],
)
def test_a_wrong_file_is_refused_with_its_name(tmp_path: Path, content: str) -> None:
    file = tmp_path / "wrong.toml"
    file.write_text(content)
    with pytest.raises(ConfigError, match=r"wrong\.toml"):
        load(str(file), {})


def test_a_missing_file_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml"):
        load("nowhere.toml", {})


@pytest.mark.parametrize("entry", ["hush", ":hush", "hush:", "a:hush,b:hush"])
def test_wrong_keys_are_refused_and_never_shown(entry: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(environment={"DRAFTHOUSE_API_KEYS": entry})
    assert "hush" not in str(caught.value)


def test_keys_come_from_every_source(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text('api_keys = ["acme:one"]')
    assert load(str(file), {}).api_keys == ("acme:one",)
    variables = {"DRAFTHOUSE_API_KEYS": "acme:one, acme:two"}
    assert load(environment=variables).api_keys == ("acme:one", "acme:two")


def test_the_model_is_named_after_its_file_unless_told_otherwise() -> None:
    assert Config(model="dir/tiny-f16.gguf").model_name == "tiny-f16"
    assert Config(model="dir/tiny-f16.gguf", name="demo").model_name == "demo"


@pytest.mark.parametrize("draft_type", DRAFT_TYPES)
def test_every_draft_type_can_be_configured(draft_type: str) -> None:
    draft_model = "d.gguf" if draft_type in ("eagle3", "simple", "dflash", "dspark") else ""
    assert Config(draft_type=draft_type, draft_model=draft_model).draft_type == draft_type


def test_lookup_before_the_drafter_needs_a_drafter() -> None:
    assert Config(has_ngram_first=True).has_ngram_first
    with pytest.raises(ConfigError, match="has_ngram_first"):
        Config(has_ngram_first=True, draft_type="none")


def test_the_example_lists_every_setting_with_its_default_and_a_sentence(tmp_path: Path) -> None:
    example = describe()
    file = tmp_path / "example.toml"
    file.write_text(example)
    assert load(str(file), {}) == Config()
    assert set(tomllib.loads(example)) == {field.name for field in fields()}
    for field in fields():
        about = field.metadata["about"]
        assert re.match(r"[A-Z].{15,}\.$", about), f"{field.name} is not documented"
        assert re.search(rf"# {re.escape(about)}.*\n{field.name} = ", example)


def fields() -> tuple[dataclasses.Field[object], ...]:
    return dataclasses.fields(Config)
