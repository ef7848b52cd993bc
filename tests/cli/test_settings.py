"""Where settings come from: which source wins, old names, and how what is wrong is told."""

from __future__ import annotations

import argparse
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from drafthouse_server.cli.settings import (
    _FOREIGN_VARIABLES,
    add_flags,
    example,
    external_flags,
    flags_of,
    load,
    reference,
)
from drafthouse_server.config import SETTINGS, Config
from drafthouse_server.errors import ConfigError
from drafthouse_server.setting import Setting

ROOT = Path(__file__).resolve().parents[2]

# A value of each renamed setting that is not the default: as the old name took it, and now.
OLD_VALUES: dict[str, tuple[str, object]] = {
    "draft_model": ("d.gguf", "d.gguf"),
    "n_seq_max": ("3", 3),
    "n_ctx_seq": ("300", 300),
    "n_ctx": ("900", 900),
    "n_batch": ("600", 600),
    "n_ubatch": ("300", 300),
    "n_parked_mib_max": ("5", 5),
    "has_prefix_cache": ("false", False),
    "n_prefix_mib_max": ("6", 6),
    "n_draft_max": ("7", 7),
    "n_draft_default": ("2", 2),
    "has_ngram_first": ("true", True),
    "n_ngram_min": ("4", 4),
    "n_ngram_pool_max": ("100", 100),
    "p_min": ("0.5", 0.5),
    "is_probabilistic": ("false", "greedy"),
    "n_threads": ("2", 2),
    "n_threads_batch": ("2", 2),
    "n_gpu_layers": ("12", 12),
    "is_kv_unified": ("true", True),
    "has_flash_attention": ("false", "off"),
    "n_waiting_max": ("9", 9),
    "n_waiting_tenant_max": ("8", 8),
}
RENAMED = {setting.old: setting for setting in SETTINGS.values() if setting.old}


def parsed(*words: str) -> dict[str, str]:
    """Returns the flags of a command line."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_flags(parser)
    return external_flags(parser.parse_args(words))


def toml_of(text: str) -> str:
    """Returns a value as a TOML file has it."""
    is_plain = re.fullmatch(r"-?[\d.]+|true|false", text)
    return text if is_plain else f'"{text}"'


def test_later_sources_win(tmp_path: Path) -> None:
    file = tmp_path / "drafthouse.toml"
    file.write_text('port = 1\nparallel = 2\nhost = "::1"\ndrain_timeout_s = 5\n')
    environment = {"DRAFTHOUSE_PORT": "3", "DRAFTHOUSE_PARALLEL": "4"}
    config = load(str(file), environment, {"parallel": "5"})
    assert (config.host, config.port, config.parallel) == ("::1", 3, 5)
    assert config.drain_timeout_s == 5.0
    assert config.batch_size == Config().batch_size


def test_the_environment_can_name_the_file(tmp_path: Path) -> None:
    file = tmp_path / "drafthouse.toml"
    file.write_text("port = 7\n")
    assert load(environment={"DRAFTHOUSE_CONFIG": str(file)}).port == 7


def test_flags_that_are_not_given_change_nothing() -> None:
    config = load(environment={}, flags=parsed("--parallel", "3", "--kv-unified"))
    assert config == Config(parallel=3, kv_unified=True)


def test_a_switch_may_stand_alone_say_so_or_be_denied() -> None:
    words = ["--insecure-no-auth", "--no-prefix-cache", "--kv-unified", "true"]
    config = load(environment={}, flags=parsed(*words))
    assert (config.insecure_no_auth, config.prefix_cache, config.kv_unified) == (True, False, True)
    assert load(environment={}, flags=parsed("--prefix-cache", "false")).prefix_cache is False
    assert load(environment={}, flags=parsed("--no-kv-unified", "--kv-unified")).kv_unified
    # As llama-server's `--fit off`.
    assert load(environment={}, flags=parsed("--fit", "off", "--kv-unified", "on")) == Config(
        fit=False, kv_unified=True
    )
    assert load(environment={"DRAFTHOUSE_FIT": "off"}).fit is False
    with pytest.raises(SystemExit):
        parsed("--no-prefix-cache", "false")


@pytest.mark.parametrize("flag", ["--insecure-no-auth", "--kv-unified", "--is-kv-unified"])
def test_a_switch_with_an_empty_text_is_refused(flag: str) -> None:
    # As "$OPEN" is where nobody has set it: that must not open the server.
    with pytest.raises(ConfigError, match="expected true or false"):
        load(environment={}, flags=parsed(flag, ""))


def test_help_is_in_groups_and_shows_every_setting_and_no_old_name() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    text = parser.format_help()
    for setting in SETTINGS.values():
        assert re.search(rf"^  {setting.flag}\b", text, re.MULTILINE), setting.name
        assert f"\n{setting.group}:\n" in text
    assert "  --prefix-cache, --no-prefix-cache\n" in text
    for old in RENAMED:
        assert f"--{old.replace('_', '-')}" not in text
    groups = [setting.group for setting in SETTINGS.values()]
    assert text.count(":\n  --") == len(set(groups))


def test_a_layer_count_is_what_llama_server_takes(tmp_path: Path) -> None:
    file = tmp_path / "layers.toml"
    file.write_text("gpu_layers = 3")
    assert load(str(file), {}).gpu_layers == 3
    assert load(environment={"DRAFTHOUSE_GPU_LAYERS": "4"}).gpu_layers == 4
    for name in ("gpu_layers", "gpu_layers_draft"):
        for given, taken in (("auto", "auto"), ("-1", -1), ("all", "all"), ("0", 0)):
            flags = parsed(f"--{name.replace('_', '-')}", given, "--model-draft", "d.gguf")
            assert getattr(load(environment={}, flags=flags), name) == taken
    for wrong in ("most", "-2", "10001"):
        with pytest.raises(ConfigError, match=r"auto \(or -1\), all, or a whole number"):
            load(environment={}, flags={"gpu_layers": wrong})


# Old names.


def test_every_renamed_setting_is_driven_by_its_old_name() -> None:
    assert OLD_VALUES.keys() == RENAMED.keys()


@pytest.mark.parametrize("source", ["flag", "variable", "key"])
@pytest.mark.parametrize("old", RENAMED)
def test_an_old_name_works_and_one_line_names_the_new_one(
    old: str, source: str, tmp_path: Path
) -> None:
    setting, (text, value) = RENAMED[old], OLD_VALUES[old]
    warnings: list[str] = []
    config = load_by(source, old, text, tmp_path, warnings)
    changed: dict[str, Any] = {setting.name: value}
    assert config == Config(**changed)
    assert value != setting.default
    before, now = written(source, old), written(source, setting.name)
    assert len(warnings) == 1
    assert re.match(rf"{before}\b.* is now {now}\b", warnings[0])
    assert "\n" not in warnings[0]


def written(source: str, name: str) -> str:
    """Returns a setting's name as a source writes it."""
    if source == "flag":
        return f"--{name.replace('_', '-')}"
    return f"DRAFTHOUSE_{name.upper()}" if source == "variable" else name


def load_by(source: str, name: str, text: str, folder: Path, warnings: list[str]) -> Config:
    """Returns the settings with one given by a source."""
    if source == "flag":
        flags = parsed(f"--{name.replace('_', '-')}", text)
        return load(environment={}, flags=flags, warn=warnings.append)
    if source == "variable":
        return load(environment={f"DRAFTHOUSE_{name.upper()}": text}, warn=warnings.append)
    file = folder / "old.toml"
    file.write_text(f"{name} = {toml_of(text)}\n")
    return load(str(file), {}, warn=warnings.append)


@pytest.mark.parametrize("source", ["flag", "variable", "key"])
@pytest.mark.parametrize(
    ("old", "old_value"),
    [(s.old, value) for s in RENAMED.values() for value in s.old_values if value not in "01"],
)
def test_an_old_value_is_translated(source: str, old: str, old_value: str, tmp_path: Path) -> None:
    setting, warnings = RENAMED[old], list[str]()
    config = load_by(source, old, old_value, tmp_path, warnings)
    assert getattr(config, setting.name) == setting.old_values[old_value]
    assert setting.old_values[old_value] in warnings[0]


@pytest.mark.parametrize("setting", [s for s in RENAMED.values() if s.is_switch])
def test_an_old_switch_may_stand_alone(setting: Setting) -> None:
    flags = parsed(f"--{setting.old.replace('_', '-')}")
    assert getattr(load(environment={}, flags=flags), setting.name) is True


def test_both_names_in_one_source_are_refused_and_of_two_sources_the_later_wins() -> None:
    with pytest.raises(ConfigError, match="--n-seq-max is now --parallel; give one of them"):
        load(environment={}, flags={"parallel": "2", "n_seq_max": "3"})
    environment = {"DRAFTHOUSE_N_SEQ_MAX": "3"}
    assert load(environment=environment, flags={"parallel": "2"}).parallel == 2
    assert load(environment={"DRAFTHOUSE_PARALLEL": "2"}, flags={"n_seq_max": "3"}).parallel == 3


# The environment.


def test_a_variable_in_two_spellings_is_refused_by_its_name() -> None:
    with pytest.raises(ConfigError, match="DRAFTHOUSE_PORT is given twice; give it once"):
        load(environment={"DRAFTHOUSE_PORT": "1", "DRAFTHOUSE_port": "2"})


def test_variables_of_the_build_and_of_others_are_left_alone() -> None:
    names = "LLAMA_CPP CACHE CPU_KERNELS PORTABLE DEV SANITIZE PINNED API_KEY PYTHON BUILD"
    environment = {f"DRAFTHOUSE_{name}": text for name in names.split() for text in ("", "/x")}
    assert load(environment=environment | {"PATH": "", "LANG": "C"}) == Config()


def test_variables_that_make_sets_are_left_alone() -> None:
    names = set(re.findall(r"export (DRAFTHOUSE_\w+)", (ROOT / "Makefile").read_text("utf-8")))
    assert names <= _FOREIGN_VARIABLES
    assert load(environment=dict.fromkeys(names, "1")) == Config()


def test_every_variable_that_is_left_alone_is_read_by_something_else() -> None:
    folders = ("scripts", "cext", "clients", "tests/fuzz", "tests/support", "service")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.*") if path.is_file()]
    endings = {".py", ".sh", ".h", ".cpp", ".txt", ".cmake"}
    texts = [
        path.read_text("utf-8")
        for path in paths
        if path.suffix in endings and path.name != "settings.py"
    ]
    unread = {name for name in _FOREIGN_VARIABLES if not any(name in text for text in texts)}
    assert unread == set()


LINKS = {
    "DRAFTHOUSE_SERVICE_HOST": "10.0.0.11",
    "DRAFTHOUSE_SERVICE_PORT": "50051",
    "DRAFTHOUSE_SERVICE_PORT_GRPC": "50051",
    "DRAFTHOUSE_PORT": "tcp://10.0.0.11:50051",
    "DRAFTHOUSE_PORT_50051_TCP": "tcp://10.0.0.11:50051",
    "DRAFTHOUSE_PORT_50051_TCP_PROTO": "tcp",
    "DRAFTHOUSE_PORT_50051_TCP_PORT": "50051",
    "DRAFTHOUSE_PORT_50051_TCP_ADDR": "10.0.0.11",
    "DRAFTHOUSE_METRICS_SERVICE_HOST": "10.0.0.12",
    "DRAFTHOUSE_METRICS_PORT": "tcp://10.0.0.12:9090",
    "DRAFTHOUSE_METRICS_PORT_9090_TCP_ADDR": "10.0.0.12",
}


def test_what_kubernetes_sets_for_services_is_ignored_with_one_line() -> None:
    warnings: list[str] = []
    config = load(environment=LINKS | {"DRAFTHOUSE_PARALLEL": "3"}, warn=warnings.append)
    assert config == Config(parallel=3)
    assert len(warnings) == 1
    assert f"ignored {len(LINKS)} environment variables" in warnings[0]
    assert "enableServiceLinks" in warnings[0]
    assert load(environment={"DRAFTHOUSE_PORT": "7"}, warn=warnings.append).port == 7
    assert len(warnings) == 1


@pytest.mark.parametrize(
    "variable", ["DRAFTHOUSE_PORT_X_TCP", "DRAFTHOUSE_SERVICE_HOSTS", "DRAFTHOUSE_POORT"]
)
def test_what_only_looks_like_a_service_is_refused(variable: str) -> None:
    with pytest.raises(ConfigError, match="unknown setting"):
        load(environment={variable: "7"})


@pytest.mark.parametrize(
    ("variable", "similar"),
    [
        ("DRAFTHOUSE_PARRALEL", "DRAFTHOUSE_PARALLEL"),
        ("DRAFTHOUSE_N_SEQS_MAX", "DRAFTHOUSE_PARALLEL"),
        ("DRAFTHOUSE_API_KEYZ", "DRAFTHOUSE_API_KEYS"),
        ("DRAFTHOUSE_SERVED_MODEL_NAME", "DRAFTHOUSE_NAME"),
        ("DRAFTHOUSE_prot", "DRAFTHOUSE_PORT"),
        ("DRAFTHOUSE_CONFG", "DRAFTHOUSE_CONFIG"),
        ("DRAFTHOUSE_", ""),
        ("DRAFTHOUSE_ZZZZZZ", ""),
    ],
)
def test_a_variable_that_is_no_setting_is_refused(variable: str, similar: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(environment={variable: "1"})
    text = str(caught.value)
    assert text.startswith(f"unknown setting '{variable}' in the environment; ")
    assert text.endswith(f"did you mean '{similar}'?" if similar else "lists all settings")


@pytest.mark.parametrize("name", ["API_KEYS", "PORT", "MODEL_DRAFT", "INSECURE_NO_AUTH", "CONFIG"])
@pytest.mark.parametrize("text", ["", "  ", " , "])
def test_an_empty_variable_is_refused(name: str, text: str) -> None:
    with pytest.raises(ConfigError, match="unset the variable") as caught:
        load(environment={f"DRAFTHOUSE_{name}": text})
    assert f"DRAFTHOUSE_{name}" in str(caught.value)


def test_a_value_out_of_its_range_names_its_source(tmp_path: Path) -> None:
    file = tmp_path / "drafthouse.toml"
    file.write_text("parallel = 0\nport = 70000\n")
    with pytest.raises(ConfigError, match=r"'port' \(.*toml\) is 70000; expected a value"):
        load(str(file), {"DRAFTHOUSE_PARALLEL": "1"})
    with pytest.raises(ConfigError, match=r"'port' \(flag --port\) is -1; expected a value"):
        load(str(file), {"DRAFTHOUSE_PARALLEL": "1"}, {"port": "-1"})


@pytest.mark.parametrize(
    ("variable", "text", "expected"),
    [
        ("DRAFTHOUSE_PORT", "many", "a whole number"),
        ("DRAFTHOUSE_DRAFT_P_MIN", "low", "a number"),
        ("DRAFTHOUSE_KV_UNIFIED", "maybe", "true or false"),
    ],
)
def test_a_text_of_the_wrong_kind_names_its_source(variable: str, text: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected) as caught:
        load(environment={variable: text})
    assert variable in str(caught.value)
    assert text in str(caught.value)


# The file.


@pytest.mark.parametrize("written", ["parralel", "n_seqs_max", "max_num_seqs"])
def test_an_unknown_key_of_a_file_names_what_was_meant(tmp_path: Path, written: str) -> None:
    file = tmp_path / "drafthouse.toml"
    file.write_text(f"{written} = 2\n")
    with pytest.raises(ConfigError) as caught:
        load(str(file), {})
    meant = f"unknown setting '{written}' in {file}; did you mean 'parallel'?"
    assert str(caught.value) == meant


@pytest.mark.parametrize(
    "content",
    [
        'port = "50051"',
        "parallel = 2.5",
        "kv_unified = 1",
        "prot = 1",
        "api_keys = 'acme:k'",
        "port = ",
        "gpu_layers = true",
    ],
)
def test_a_wrong_file_is_refused_with_its_name(tmp_path: Path, content: str) -> None:
    file = tmp_path / "wrong.toml"
    file.write_text(content)
    with pytest.raises(ConfigError, match=r"wrong\.toml"):
        load(str(file), {})


@pytest.mark.parametrize("name", ["parallel", "model", "tenants", "gpu_layers"])
def test_a_number_that_is_too_long_to_be_shown_is_refused(tmp_path: Path, name: str) -> None:
    """Python shows none of more than 4300 digits: the message was a traceback."""
    file = tmp_path / "huge.toml"
    file.write_text(f"{name} = 0x{'f' * 4000}\n")
    with pytest.raises(ConfigError, match=r"huge\.toml are no valid TOML"):
        load(str(file), {})


def test_files_may_begin_with_the_mark_that_windows_writes(tmp_path: Path) -> None:
    """It was no TOML, by "Invalid statement (at line 1, column 1)", and a wrong line of keys."""
    keys, path = tmp_path / "keys", tmp_path / "drafthouse.toml"
    keys.write_bytes("\ufeffacme:hunter2\r\n".encode())
    keys.chmod(0o600)
    path.write_bytes(f"\ufeffapi_keys_file = '{keys}'\r\n".encode())
    assert load(str(path), {}).api_keys == ("acme:hunter2",)


def test_a_missing_file_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml: .*; check the path"):
        load("nowhere.toml", {})


def test_a_flag_that_names_no_file_is_refused() -> None:
    with pytest.raises(ConfigError, match="flag --config"):
        load("", {})


# Keys.


@pytest.mark.parametrize("name", ["usage_journal", "rate_counters_url", "key_pepper_file"])
def test_what_an_unset_variable_leaves_empty_is_refused(name: str) -> None:
    """`--usage-journal "$JOURNAL"` served unbilled, and said nothing."""
    with pytest.raises(ConfigError, match=f"flag --{name.replace('_', '-')}"):
        load(environment={}, flags={name: ""})


@pytest.mark.parametrize("text", ["", "  ", " , "])
@pytest.mark.parametrize(
    "name",
    ["api_keys", "api_keys_file", "ssl_cert_file", "ssl_key_file", "ssl_client_ca_file"],
)
def test_keys_that_are_none_open_no_server(name: str, text: str, tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text('api_keys = ["acme:k"]')
    with pytest.raises(ConfigError, match=f"flag --{name.replace('_', '-')}"):
        load(str(file), {}, {name: text})


@pytest.mark.parametrize("entry", ["hush", ":hush", "hush:", "a:hush,b:hush"])
def test_wrong_keys_are_refused_and_never_shown(entry: str, tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(f"api_keys = '{entry}'")
    sources: list[dict[str, Any]] = [
        {"environment": {"DRAFTHOUSE_API_KEYS": entry}},
        {"environment": {}, "flags": {"api_keys": entry}},
        {"environment": {}, "path": str(file)},
    ]
    for source in sources:
        with pytest.raises(ConfigError) as caught:
            load(**source)
        assert "hush" not in str(caught.value)


def test_keys_come_from_every_source(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text('api_keys = ["acme:one"]')
    assert load(str(file), {}).api_keys == ("acme:one",)
    variables = {"DRAFTHOUSE_API_KEYS": "acme:one, acme:two"}
    told: list[str] = []
    assert load(environment=variables, warn=told.append).api_keys == ("acme:one", "acme:two")
    (line,) = told
    assert line.startswith("DRAFTHOUSE_API_KEYS is deprecated: ")
    assert "acme" not in line
    secret = tmp_path / "secret"
    secret.write_text("# comment\n\nacme:one\n  beta:t:wo \n")
    config = load(environment={"DRAFTHOUSE_API_KEYS_FILE": str(secret)})
    assert config.api_keys == ("acme:one", "beta:t:wo")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"acme:one\nhush\n", "has a line 2 that is not of the form"),
        (b":hush\n", "has a line 1 that is not of the form"),
        (b"# hush\n", "has no keys"),
        (b"acme:hush\xff", "is no UTF-8 text"),
        (None, "cannot be read: No such file"),
    ],
)
def test_a_file_of_keys_that_is_wrong_is_refused_and_never_shown(
    content: bytes | None, words: str, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    if content is not None:
        secret.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load(environment={"DRAFTHOUSE_API_KEYS_FILE": str(secret)})
    assert f"api_keys_file {secret} {words}" in str(caught.value)
    assert "hush" not in str(caught.value)


def test_a_key_that_a_file_has_twice_names_both_lines(tmp_path: Path) -> None:
    secret, file = tmp_path / "secret", tmp_path / "drafthouse.toml"
    secret.write_text("acme:hush\n\nbeta:hush\n")
    file.write_text("api_keys = []\n")  # as the example has it
    with pytest.raises(ConfigError, match="same key twice, in lines 1 and 3") as caught:
        load(str(file), {"DRAFTHOUSE_API_KEYS_FILE": str(secret)})
    assert f"api_keys_file {secret}" in str(caught.value)
    assert "hush" not in str(caught.value)


def test_keys_and_a_file_of_keys_are_refused_together(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("acme:one")
    variables = {"DRAFTHOUSE_API_KEYS_FILE": str(secret), "DRAFTHOUSE_API_KEYS": "acme:hush"}
    with pytest.raises(ConfigError, match="give one of them") as caught:
        load(environment=variables)
    assert "hush" not in str(caught.value)


# Lists of all settings.


def test_the_example_lists_every_setting_and_loads_back_to_the_defaults(tmp_path: Path) -> None:
    file = tmp_path / "example.toml"
    file.write_text(example())
    warnings: list[str] = []
    assert load(str(file), {}, warn=warnings.append) == Config()
    assert warnings == []
    assert max(map(len, example().splitlines())) <= 100
    assert sorted(tomllib.loads(example())) == sorted(SETTINGS)
    for setting in SETTINGS.values():
        comment = re.search(rf"\n\n((?:# .*\n)+){setting.name} = ", example())
        assert comment, setting.name
        assert setting.about in re.sub(r"^# ", "", comment[1], flags=re.MULTILINE).replace(
            "\n", " "
        )
        assert f"\n# {setting.group}\n" in example()


def test_flags_of_settings_give_the_settings_back() -> None:
    config = Config(parallel=3, prefix_cache=False, gpu_layers=5, synth_rates=("0.5",) * 4)
    assert load(environment={}, flags=parsed(*flags_of(config))) == config
    assert flags_of(Config()) == []


def test_the_reference_lists_every_setting_and_every_old_name() -> None:
    cells = re.findall(r"^\| `(\w+)` \| `", reference(), re.MULTILINE)
    assert sorted(cells) == sorted([*SETTINGS, *(it.old for it in RENAMED.values())])
