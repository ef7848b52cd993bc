"""Where settings come from: defaults < TOML file < environment < flags; and how they are listed."""

from __future__ import annotations

import argparse
import difflib
import functools
import math
import os
import re
import textwrap
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drafthouse_server.access import is_api_key
from drafthouse_server.cli.key_files import check_sources
from drafthouse_server.cli.terminal import Terminal
from drafthouse_server.config import SETTINGS, Config
from drafthouse_server.errors import ConfigError, UnknownSetting
from drafthouse_server.setting import Setting
from drafthouse_server.tenancy.tenants import LIMITS

__all__ = [
    "add_config",
    "add_flags",
    "example",
    "external_flags",
    "flags_of",
    "load",
    "reference",
    "similar_flag",
]

_PREFIX = "DRAFTHOUSE_"
_WHOLE_MAX = 1 << 64
"""A greater number of a file is as good as infinity, which no setting allows."""
_N_FILE_BYTES_MAX = 16 << 20
"""Larger files hold no settings, and no keys: a device, or a model, was named instead."""
_WIDTH = 100
# Read by the build, its tests and the client, not by the server.
_FOREIGN_VARIABLES = frozenset(
    {
        "DRAFTHOUSE_API_KEY",
        "DRAFTHOUSE_BUILD",
        "DRAFTHOUSE_BUILT",
        "DRAFTHOUSE_CACHE",
        "DRAFTHOUSE_CPU_KERNELS",
        "DRAFTHOUSE_CPU_LEVEL",
        "DRAFTHOUSE_DEV",
        "DRAFTHOUSE_FUZZ_MODELS",
        "DRAFTHOUSE_LLAMA_CPP",
        "DRAFTHOUSE_PINNED",
        "DRAFTHOUSE_PORTABLE",
        "DRAFTHOUSE_PYTHON",
        "DRAFTHOUSE_SANITIZE",
    }
)
# Kubernetes gives every container such variables of every service of its namespace, so those of a
# service named drafthouse, or drafthouse-something, begin like ours.
_LINK_NAME = re.compile(
    r"DRAFTHOUSE_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_PROTO|_PORT|_ADDR)?)"
)
_LINK_VALUE = re.compile(r"(tcp|udp|sctp)://\S+", re.IGNORECASE)

_MUST_NOT_BE_EMPTY = frozenset(
    {
        "admin_client_ca_file",
        "api_keys",
        "api_keys_file",
        "audit_file",
        "key_pepper_file",
        "rate_counters_url",
        "ssl_cert_file",
        "ssl_client_ca_file",
        "ssl_key_file",
        "store",
        "usage_journal",
    }
)
_BY_OLD_NAME = {setting.old: setting for setting in SETTINGS.values() if setting.old}
_TYPE_NAMES = {
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    tuple: "a list of texts",
}
_TENANTS = (
    "Weight and limits of a tenant stand in a section [tenants.NAME] of the settings file, where"
    ' NAME is that of its keys, or "default" without keys. What is left out is not limited.'
)
_TENANT_EXAMPLE = {int: "1000", float: "1.0", list: '["NAME"]'}
# On and off are llama-server's words: `--fit off`.
_TRUTH = {"true": True, "1": True, "on": True, "false": False, "0": False, "off": False}


@dataclass(frozen=True, slots=True)
class _Source:
    """One place that settings come from, and how it writes their names."""

    spell: Callable[[str], str]
    """Returns the name as it is written there, of the name of a key."""
    describe: Callable[[str], str]
    """Returns where a setting is given, of the name of a key."""


_FLAGS = _Source(
    lambda name: f"--{name.replace('_', '-')}",
    lambda name: f"flag --{name.replace('_', '-')}",
)
_ENVIRONMENT = _Source(
    lambda name: _PREFIX + name.upper(),
    lambda name: f"environment variable {_PREFIX}{name.upper()}",
)


def _file(path: Path) -> _Source:
    return _Source(lambda name: name, lambda _: str(path))


def _from_text(setting: Setting, text: str, where: str) -> object:
    """Returns the value that a text, from a flag or the environment, stands for."""
    kind = type(setting.default)
    if not text.isascii() and text.encode(errors="ignore").decode() != text:
        raise ConfigError(setting.name, setting.shown(text), "a text in UTF-8", where)
    if kind is tuple:
        return tuple(part.strip() for part in text.split(",") if part.strip())
    if kind is bool:
        value = _TRUTH.get(text.lower())
        if value is None:
            raise ConfigError(setting.name, text, _TYPE_NAMES[bool], where)
        return value
    if kind is str:
        is_number = re.fullmatch(r"\s*[+-]?[0-9]{1,18}\s*", text) is not None
        return int(text) if setting.may_be_number and is_number else text
    try:
        return int(text) if kind is int else float(text)
    except ValueError:
        raise ConfigError(setting.name, text, _TYPE_NAMES[kind], where) from None


def _from_toml(setting: Setting, value: object, where: str) -> object:
    """Returns a value of a TOML file in the setting's own type."""
    kind = type(setting.default)
    if kind is tuple:
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            return tuple(value)
        raise ConfigError(setting.name, setting.shown(value), _TYPE_NAMES[tuple], where)
    if kind is float and type(value) is int:
        return float(value) if abs(value) < _WHOLE_MAX else math.inf
    if setting.may_be_number and type(value) is int:
        return value
    if type(value) is not kind:
        raise ConfigError(setting.name, setting.shown(value), _TYPE_NAMES[kind], where)
    return value


class _Reader:
    """Reads one source into values by name, and takes old names for new ones.

    Args:
        source: How it writes names.
        parse: Returns the value of a setting in its own type.
        warn: Takes a line for each old name.
    """

    def __init__(
        self,
        source: _Source,
        parse: Callable[[Setting, object, str], object],
        warn: Callable[[str], object],
    ) -> None:
        self._source = source
        self._parse = parse
        self._warn = warn
        self.values: dict[str, object] = {}
        self.places: dict[str, str] = {}
        """Where each of them is given."""

    def take(self, name: str, value: object) -> bool:
        """Takes what is given by a name. Returns whether there is such a setting.

        Raises:
            ConfigError: the value has the wrong type, or the setting is given by both its names.
        """
        setting = SETTINGS.get(name) or _BY_OLD_NAME.get(name)
        if setting is None:
            return False
        spell = self._source.spell
        if setting.name in self.values:
            problem = f"{spell(setting.old)} is now {spell(setting.name)}; give one of them"
            if not setting.old:  # a variable in capitals and in small letters
                problem = f"{spell(name)} is given twice; give it once"
            raise ConfigError(setting.name, setting.shown(value), problem=problem)
        if name == setting.old:
            value = self._translated(setting, value)
        where = self._source.describe(name)
        self.places[setting.name] = where
        self.values[setting.name] = self._parse(setting, value, where)
        return True

    def _translated(self, setting: Setting, value: object) -> object:
        """Returns the new text of a value by an old name, and warns of the name."""
        spell = self._source.spell
        old, new = spell(setting.old), spell(setting.name)
        meant = setting.old_values.get(str(value).strip().lower())
        if meant is not None:
            old, new, value = f"{old} {str(value).lower()}", f"{new} {meant}", meant
        self._warn(f"{old} is now {new}; the old name works until the next release")
        return value


def _parse_text(setting: Setting, text: object, where: str) -> object:
    return _from_text(setting, str(text), where)


def _read_text(path: Path) -> str:
    """Returns the text of a file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is too large, or no UTF-8.
    """
    with path.open("rb") as file:
        content = file.read(_N_FILE_BYTES_MAX + 1)
    if len(content) > _N_FILE_BYTES_MAX:
        raise ValueError(f"it has more than {_N_FILE_BYTES_MAX >> 20} MiB")
    return content.decode("utf-8-sig").replace("\r\n", "\n")  # both as Windows writes them


def _read_file(path: Path, warn: Callable[[str], object]) -> _Reader:
    try:
        entries = tomllib.loads(_read_text(path))
        str(entries)  # raises where a number, in hexadecimal say, is too long for any message
    except OSError as error:
        problem = f"cannot read the settings in {path}: {error.strerror}; check the path"
        raise ConfigError("config", str(path), problem=problem) from None
    except (ValueError, RecursionError) as error:  # no TOML, no UTF-8, or beyond Python's bounds
        problem = (
            f"the settings in {path} are no valid TOML: {error};"
            " `drafthouse config --example` prints a file that is"
        )
        raise ConfigError("config", str(path), problem=problem) from None
    reader = _Reader(_file(path), _from_toml, warn)
    if "tenants" in entries:
        reader.values["tenants"] = _tenants(entries.pop("tenants"), str(path))
    for name, value in entries.items():
        if not reader.take(name, value):
            raise UnknownSetting(name, _similar(name), str(path))
    return reader


def _tenants(sections: object, where: str) -> object:
    """Returns the sections of single tenants; what stands in them is checked with the keys."""
    if not isinstance(sections, dict) or not all(isinstance(s, dict) for s in sections.values()):
        raise ConfigError("tenants", sections, "sections [tenants.NAME]", where)
    return sections


def _read_environment(environment: Mapping[str, str], warn: Callable[[str], object]) -> _Reader:
    reader = _Reader(_ENVIRONMENT, _parse_text, warn)
    links = []
    for variable, text in environment.items():
        if not variable.startswith(_PREFIX) or variable in _FOREIGN_VARIABLES:
            continue
        if _LINK_NAME.fullmatch(variable) or _is_link(variable, text):
            links.append(variable)
            continue
        name = variable.removeprefix(_PREFIX).lower()
        if name != "config":
            _check_known(variable, name)
        if not text.strip(" ,"):  # a list of nothing is empty too
            expected = "a value; unset the variable to leave the default"
            raise ConfigError(name, text, expected, _ENVIRONMENT.describe(name))
        reader.take(name, text)
        if name == "api_keys":
            warn(
                f"{variable} is deprecated: variables are copied into every process that is started"
                " with them; put the keys into a file and set DRAFTHOUSE_API_KEYS_FILE, or use a"
                " store"
            )
    if links:
        warn(
            f"ignored {len(links)} environment variables that Kubernetes sets for services"
            f" ({links[0]}, …); enableServiceLinks: false in the pod's spec leaves them out"
        )
    return reader


def _is_link(variable: str, text: str) -> bool:
    return variable.endswith("_PORT") and _LINK_VALUE.fullmatch(text) is not None


def _check_known(variable: str, name: str) -> None:
    if name in SETTINGS or name in _BY_OLD_NAME:
        return
    similar = _similar(name, "config")
    meant = _ENVIRONMENT.spell(similar) if similar else ""
    raise UnknownSetting(variable, meant, "the environment")


def _similar(name: str, *more: str) -> str:
    """Returns the setting that is meant by an unknown name; empty when none is like it."""
    meant = {name: name for name in (*SETTINGS, *more)}
    for setting in SETTINGS.values():
        others = (setting.old, *setting.peers) if setting.old else setting.peers
        meant |= dict.fromkeys(others, setting.name)
    found = difflib.get_close_matches(name.lower(), meant, n=1)
    return meant[found[0]] if found else ""


def similar_flag(flag: str) -> str:
    """Returns the flag that is meant by an unknown one; empty when none is like it."""
    similar = _similar(flag.removeprefix("--").removeprefix("no-").replace("-", "_"), "config")
    return _FLAGS.spell(similar) if similar else ""


def load(
    path: str | None = None,
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, str] | None = None,
    warn: Callable[[str], object] = lambda _: None,
) -> Config:
    """Returns the settings of all sources: defaults < file < environment < flags.

    Args:
        path: A TOML file; without one the variable DRAFTHOUSE_CONFIG names it, or there is none.
        environment: Variables; `os.environ` when not given. A DRAFTHOUSE_* that is empty or no
            setting is an error, but for those that the build and the client read, and those that
            Kubernetes sets for services.
        flags: Texts by setting name, as `external_flags` returns them. No keys, and no path, are an
            error as they are in a variable.
        warn: Takes one line for each old name, and one for the variables of Kubernetes.

    Raises:
        ConfigError: a source cannot be read, or a value breaks its rule.
    """
    environment = os.environ if environment is None else environment
    variables = _read_environment(environment, warn)
    if path is None:
        path = environment.get(_ENVIRONMENT.spell("config"))
    elif not path.strip():
        expected = "a path; leave the flag out to read none"
        raise ConfigError("config", path, expected, "flag --config")
    readers = [_read_file(Path(path), warn)] if path else []
    readers += [variables, _read_flags(flags or {}, warn)]
    values: dict[str, Any] = {}
    places: dict[str, str] = {}
    for reader in readers:
        values |= reader.values
        places |= reader.places
    if values.get("api_keys_file"):
        values["api_keys"] = _read_keys(Path(values["api_keys_file"]), values.get("api_keys"))
        places["api_keys"] = places["api_keys_file"]
    try:
        config = Config(**values)
    except ConfigError as error:
        if not error.expected or error.key not in places:
            raise  # it is about several settings, and names them
        place = places[error.key]
        raise ConfigError(error.key, error.value, error.expected, place) from None
    flag = _FLAGS.describe("api_keys")
    by_flag = [flag] if places.get("api_keys") == flag else []
    check_sources(config.host, by_flag, _key_files(config, places, path), warn)
    return config


def _key_files(
    config: Config, places: Mapping[str, str], path: str | None
) -> Iterator[tuple[str, Path]]:
    """Yields the files that keys come from, each with the name of the setting that says so."""
    for name in ("api_keys_file", "ssl_key_file"):
        if text := getattr(config, name):
            yield name, Path(text)
    if config.api_keys and path and places.get("api_keys") == str(Path(path)):
        yield "config", Path(path)


def _read_flags(flags: Mapping[str, str], warn: Callable[[str], object]) -> _Reader:
    reader = _Reader(_FLAGS, _parse_text, warn)
    for name, text in flags.items():
        # As "$KEYS" is where nobody has set it: that must not open the server.
        if name in _MUST_NOT_BE_EMPTY and not text.strip(" ,"):
            expected = "a value; leave the flag out to set none"
            raise ConfigError(name, text, expected, _FLAGS.describe(name))
        known = reader.take(name, text)
        assert known, f"{name} is no setting"
    return reader


def _read_keys(path: Path, others: object) -> tuple[str, ...]:
    """Returns the keys of a file. Its errors name lines, never what stands there."""

    def refuse(problem: str) -> ConfigError:
        return ConfigError("api_keys_file", str(path), problem=f"api_keys_file {path} {problem}")

    if others:
        raise refuse("and api_keys are both given; give one of them")
    try:
        lines = _read_text(path).splitlines()
    except OSError as error:
        raise refuse(f"cannot be read: {error.strerror}; check path and permissions") from None
    except ValueError:
        raise refuse("is no UTF-8 text of a list of keys; write one tenant:key a line") from None
    keys: dict[str, tuple[int, str]] = {}
    for number, line in enumerate(map(str.strip, lines), 1):
        if line and not line.startswith("#"):
            if not is_api_key(line):
                raise refuse(f'has a line {number} that is not of the form "tenant:key"')
            before, _ = keys.setdefault(line.partition(":")[2], (number, line))
            if before != number:
                raise refuse(f"has the same key twice, in lines {before} and {number}; keep one")
    if not keys:
        raise refuse("has no keys; write one tenant:key a line")
    return tuple(line for _, line in keys.values())


class _Switch(argparse.Action):
    """A flag that is true alone, or says true or false; with `--no-` before it, false."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        """Stores the text."""
        is_not = option_string is not None and option_string.startswith("--no-")
        if is_not and values is not None:
            parser.error(f"{option_string} takes no value")
        alone = "false" if is_not else "true"
        setattr(namespace, self.dest, alone if values is None else values)


class _Formatter(argparse.HelpFormatter):
    """Shows a switch as its two flags."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if isinstance(action, _Switch):
            return ", ".join(action.option_strings)
        return super()._format_action_invocation(action)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of all settings, in groups: `--parallel`, `--kv-unified, --no-kv-unified`.

    Old names are taken too, and not shown. What is given, `external_flags` returns.
    """
    parser.formatter_class = functools.partial(_Formatter, max_help_position=30)
    for title, settings in _groups():
        group = parser.add_argument_group(title)
        for setting in settings:
            _add_flag(group, setting)


def _groups() -> Iterator[tuple[str, list[Setting]]]:
    for title in dict.fromkeys(setting.group for setting in SETTINGS.values()):
        yield title, [setting for setting in SETTINGS.values() if setting.group == title]


def _add_flag(group: argparse._ArgumentGroup, setting: Setting) -> None:
    # argparse reads % in a help text as a format.
    about = f"{setting.about}{_default(setting)}".replace("%", "%%")
    if setting.is_switch:
        flags = (setting.flag, f"--no-{setting.flag.removeprefix('--')}")
        group.add_argument(*flags, dest=setting.name, action=_Switch, nargs="?", help=about)
    else:
        group.add_argument(setting.flag, dest=setting.name, metavar=_metavar(setting), help=about)
    if setting.old:
        alone = {"nargs": "?", "const": "true"} if _was_switch(setting) else {}
        group.add_argument(
            _FLAGS.spell(setting.old),
            dest=setting.old,
            help=argparse.SUPPRESS,
            **alone,  # type: ignore[arg-type]  # as the two say
        )


def _was_switch(setting: Setting) -> bool:
    return setting.is_switch or "true" in setting.old_values


def _metavar(setting: Setting) -> str:
    if 0 < len(setting.rule.choices) <= 4:
        return "|".join(setting.rule.choices)
    if setting.rule.choices:
        return "TYPE"
    if setting.about.startswith("Path"):
        return "FILE"
    return {int: "N", float: "X", str: "TEXT", tuple: "A,B,…"}[type(setting.default)]


def _default(setting: Setting) -> str:
    """Returns the sentence on the default; none where that is empty, which the help speaks of."""
    return "" if setting.default in ("", ()) else f" Default: {_text(setting.default)}."


def external_flags(arguments: argparse.Namespace) -> dict[str, str]:
    """Returns the texts of the flags that were given, by setting name, old names included."""
    names = (*SETTINGS, *_BY_OLD_NAME)
    return {name: text for name in names if (text := getattr(arguments, name)) is not None}


def flags_of(config: Config) -> list[str]:
    """Returns the flags of `drafthouse serve` for settings that are not the default."""
    flags = []
    for setting in SETTINGS.values():
        value = getattr(config, setting.name)
        if value != setting.default:
            text = ",".join(value) if isinstance(value, tuple) else _text(value)
            flags += [setting.flag, text]
    return flags


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _toml(value: object) -> str:
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    return _text(value)


def _expected(setting: Setting) -> str:
    return f" Expected: {setting.rule.expected}." if setting.rule.expected else ""


def example() -> str:
    """Returns a TOML file of every setting with its default, help and rule."""
    lines = [
        "# Every setting of Drafthouse with its default; keep the lines that you change.",
        "# A flag (--parallel) wins over the environment (DRAFTHOUSE_PARALLEL), which wins over",
        "# this file.",
    ]
    for title, settings in _groups():
        lines += ["", "", f"# {title}"]
        for setting in settings:
            lines += ["", *_comment(f"{setting.about}{_expected(setting)}")]
            lines.append(f"{setting.name} = {_toml(setting.default)}")
    lines += ["", "", *_comment(_TENANTS), "", "# [tenants.NAME]"]
    for limit in LIMITS:
        lines += ["", *_comment(f"{limit.about} Expected: {limit.rule.expected}.")]
        lines.append(f"# {limit.key} = {_TENANT_EXAMPLE[limit.kind]}")
    return "\n".join(lines) + "\n"


def _comment(text: str) -> list[str]:
    lines = textwrap.wrap(text, _WIDTH - 2, break_long_words=False, break_on_hyphens=False)
    return [f"# {line}" for line in lines]


def add_config(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command `config`."""
    parser = commands.add_parser(
        "config",
        help="print an example of the settings file",
        description="Prints every setting with its default, help and range, as a TOML file for"
        " `drafthouse serve --config FILE`.",
        allow_abbrev=False,
    )
    parser.add_argument("--example", action="store_true", required=True, help="print the example")
    parser.set_defaults(run=_config)


def _config(_: argparse.Namespace, terminal: Terminal) -> int:
    terminal.write(example())
    return 0


def reference() -> str:
    """Returns the list of settings, and of their old names, as Markdown."""
    lines = []
    for title, settings in _groups():
        lines += [f"## {title}", "", "| setting | default | meaning |", "|---|---|---|"]
        for setting in settings:
            about = f"{setting.about}{_expected(setting)}".replace("|", "\\|")
            lines.append(f"| `{setting.name}` | `{_toml(setting.default)}` | {about} |")
        lines.append("")
    lines += ["## Single tenants", "", _TENANTS, "", "| setting | meaning |", "|---|---|"]
    lines += [
        f"| `{limit.key}` | {limit.about} Expected: {limit.rule.expected}. |" for limit in LIMITS
    ]
    lines.append("")
    lines += ["## Old names", "", "| until 0.1 | now |", "|---|---|"]
    for setting in _BY_OLD_NAME.values():
        translated = setting.old_values.items()
        values = (f"`{old}` is `{new}`" for old, new in translated if old not in "01")
        note = ", ".join(values)
        lines.append(f"| `{setting.old}` | `{setting.name}`{f' ({note})' if note else ''} |")
    return "\n".join(lines) + "\n"
