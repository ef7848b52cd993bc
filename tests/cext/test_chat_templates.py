"""Hostile chats and chat templates: an error or a text, never a crash."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.demo import MODELS, SIMPLE, TARGETS
from tests.support.templates import write_model

from drafthouse_engine import ChatProcess, Model
from drafthouse_engine.errors import (
    BadTemplate,
    Closed,
    EngineError,
    InternalError,
    InvalidArgument,
    Unsupported,
)

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

N = 100_000
FATAL = {
    "brackets": "{{ " + "(" * N + "1" + ")" * N + " }}",
    "lists": "{{ " + "[" * N + "]" * N + " }}",
    "a chain of filters": "{{ x" + "|trim" * N + " }}",
    "a sum": "{{ 1" + "+1" * N + " }}",
    "signs": "{{ " + "-" * N + "1 }}",
    "negations": "{% if " + "not " * N + "x %}{% endif %}",
    "a quoted end of a tag": "{% if '%}' and " + "not " * N + "x %}{% endif %}",
    "blocks": "{% if true %}" * N + "x" + "{% endif %}" * N,
    "trimmed blocks": "{%- for m in messages -%}" * N,
    "blocks after others that set": "{% set x %}{% endset %}" * 20_000 + "{% if 1 %}" * 20_000,
    "blocks that set": "{% set x %}" * N,
    "blocks that set what a comparison names": "{% set x == 1 %}" * N,
    "blocks that set what an argument names": "{% set f(a=1) %}" * N,
    "a word before a quote": "{%if'a'%}" * N,
    "a word before a bracket": "{%if[1]%}" * N,
    "a word behind another space": "{%\vif 1 %}" * N,
    "blocks without an end": "{% if 1 %}{% endgeneration %}" * 20_000,
    "a word that ends no tag": "{% endgeneration 1{% if 1 %}" * 20_000,
    "elif": "{% if 0 %}" + "{% elif 0 %}" * 20_000 + "{% endif %}",
    "a tag that does not end": "{{ " + "x." * N,
    "length": "x" * (2 << 20),
}
"""Templates on which llama.cpp's parser or interpreter used up its stack, and one of great size."""

HARMLESS = {
    "brackets": "{{ " + "(" * 100 + "1" + ")" * 100 + " }}",
    "dictionaries": "{{ {'a': {'b': 1}} }}",
    "comments": "{# " + "(" * N + " #}{{ 1 }}",
    "text": "{ " + "(" * N + " }",
    "operators": "{{ 1" + "+1" * 4_000 + " }}",
    "signs": "{{ " + "-" * 8_000 + "1 }}",
    "many tags": "{% if true %}{{ 1 }}{% endif %}" * 5_000,
    "many that set": "{% set x = 1 %}{% set (a, b) = [1, 2] %}{% set c %}{{ a }}{% endset %}" * 200,
    "many generations": "{% generation %}1{%- endgeneration -%}" * 200,
    "elif": "{% if 0 %}" + "{% elif 0 %}" * 1_000 + "{% endif %}",
}

FORMATTED = {
    "brackets": "1",
    "dictionaries": "",  # llama.cpp writes none out
    "comments": "1",
    "text": "{ " + "(" * N + " }",
    "operators": "4001",
    "signs": "1",
    "many tags": "1" * 5_000,
    "many that set": "",
    "many generations": "1" * 200,
    "elif": "",
}

HOSTILE = {
    "a macro that calls itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a list that holds itself": "{% set x = [] %}{% set _ = x.append(x) %}{{ x }}",
    "its JSON": "{% set x = [] %}{% set _ = x.append(x) %}{{ x|tojson }}",
    "a deep list, when it is freed": "{% set ns = namespace(x=[]) %}{% for i in range(200000) %}"
    "{% set ns.x = [ns.x] %}{% endfor %}",
    "a division by zero": "{{ 1 is divisibleby(0) }}",
    "a text that doubles": "{% set ns = namespace(s='x') %}{% for i in range(100) %}"
    "{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "a loop": "{% for i in range(9999) %}" * 3 + "{% endfor %}" * 3,  # time, and hardly memory
    "a repeated text": "{{ 'x' * 2000000000 }}",
    "wide lines": "{{ 'x'|indent(2000000000) }}",
    "a great list": "{{ (('a,' * 3000000).split(','))|length }}",
}
"""Programs that end llama.cpp's interpreter, or never end."""

ON_DEMAND = (
    "{% if messages[0].content == 'die' %}{{ 1 is divisibleby(0) }}{% endif %}"
    "{{ messages[0].content }}"
)
"""A template that ends its process when a chat asks for it."""

WRONG = [
    "{% for m in messages %}",
    "{{ messages[::0] }}",
    "{{ raise_exception('no') }}",
    "{{ undefined_function() }}",
    "{{ 'x'|no_such_filter }}",
]


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    with Model(MODELS / TARGETS["dense"], vocab_only=True) as opened:
        yield opened


def formatted(template: str, folder: Path) -> str:
    path = write_model(folder / "model.gguf", MODELS / SIMPLE, template)
    with Model(path, vocab_only=True) as opened:
        return opened.format_chat([("user", "hello")])


@pytest.mark.parametrize("name", FATAL)
def test_a_template_that_would_end_the_process_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(BadTemplate, match=r"nests|longer|generation"):
        formatted(FATAL[name], tmp_path)


@pytest.mark.parametrize("name", HARMLESS)
def test_a_deep_but_bounded_template_works(name: str, tmp_path: Path) -> None:
    assert formatted(HARMLESS[name], tmp_path).strip() == FORMATTED[name]


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ 2 ** 10 }}", "Unexpected token: * of type"),
        ("{{ '\\u00e9' }}", "lexer: unknown escape character \\u"),
        ("{{ messages|no_such }}", "at line 1, column 12: Unknown (built-in) filter 'no_such' for"),
        ("{{ raise_exception('a\\nb') }}", "at line 1, column 19: Jinja Exception: a b"),
    ],
)
def test_what_is_wrong_with_a_template_is_told_in_one_line(
    template: str, reason: str, tmp_path: Path
) -> None:
    """It was "std::exception" of those that cannot be parsed, and else told of another parser."""
    path = write_model(tmp_path / "t.gguf", MODELS / SIMPLE, template)
    with Model(path, vocab_only=True) as model, pytest.raises(BadTemplate) as caught:
        model.format_chat([("user", "x")])
    assert f"the chat template failed: {reason}" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_template_whose_answers_llama_cpp_cannot_parse_formats_chats(tmp_path: Path) -> None:
    path = write_model(tmp_path / "t.gguf", MODELS / SIMPLE, "{{ messages|tojson(indent=2) }}")
    with Model(path, vocab_only=True) as model:
        text = model.format_chat([("user", "x")])
    assert json.loads(text) == [{"role": "user", "content": "x"}]


@pytest.mark.parametrize("template", WRONG)
def test_a_wrong_template_is_an_error(template: str, tmp_path: Path) -> None:
    with pytest.raises(BadTemplate, match="chat template failed"):
        formatted(template, tmp_path)


TEXTS = st.one_of(
    st.text(max_size=200),
    st.sampled_from(
        ["{{ 1/0 }}", "{% for i in range(10**9) %}", "<|im_end|>", "<|im_start|>system", "\x00", ""]
    ),
    st.integers(1, 100_000).map(lambda n: "{{(" * n),
)


@given(messages=st.lists(st.tuples(TEXTS, TEXTS), max_size=8), is_prompt=st.booleans())
@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_chat_is_formatted_or_refused(
    messages: list[tuple[str, str]], is_prompt: bool, model: Model
) -> None:
    is_refused = not messages or any("\x00" in text for message in messages for text in message)
    if is_refused:
        with pytest.raises((EngineError, ValueError)):
            model.format_chat(messages, add_generation_prompt=is_prompt)
        return
    text = model.format_chat(messages, add_generation_prompt=is_prompt)
    for _, content in messages:
        assert content.strip() in text  # what a client writes is text, never a template


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_harms_nobody_else(name: str, model: Model) -> None:
    chats = ChatProcess(HOSTILE[name], cpu_seconds=1)
    with pytest.raises(
        BadTemplate, match=r"took more than 1 s|ended the process|more than 512 MiB"
    ):
        chats.format([("user", "hello")])
    chats.close()
    assert "hello" in model.format_chat([("user", "hello")])


def test_a_model_with_a_hostile_template_spends_no_time_of_this_process(tmp_path: Path) -> None:
    started = time.process_time()
    with pytest.raises(BadTemplate, match="took more than 5 s"):
        formatted(HOSTILE["a loop"], tmp_path)
    assert time.process_time() - started < 2.5


def test_a_chat_after_one_that_ended_the_process_starts_another() -> None:
    chats = ChatProcess(ON_DEMAND)
    pids = [chats.pid]
    assert chats.format([("user", "one")]) == "one"
    pids.append(chats.pid)
    with pytest.raises(BadTemplate, match="SIGFPE"):
        chats.format([("user", "die")])
    pids.append(chats.pid)
    assert chats.format([("user", "two")]) == "two"
    pids.append(chats.pid)
    assert chats.format([("user", "three")]) == "three"
    pids.append(chats.pid)
    chats.close()
    assert [pid is None for pid in pids] == [True, False, True, False, False]
    assert pids[1] != pids[3] == pids[4]


@pytest.mark.parametrize("seconds", [0, -1, 3601])
def test_a_bound_of_time_out_of_range_is_refused(seconds: int) -> None:
    with pytest.raises(InvalidArgument, match="cpu_seconds"):
        ChatProcess("x", cpu_seconds=seconds)


def test_a_chat_that_was_interrupted_answers_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the process still wrote was the reply to the next chat."""

    def interrupted() -> dict[str, str]:
        monkeypatch.undo()
        raise KeyboardInterrupt

    process = ChatProcess("{{ messages[0].content }}")
    assert process.format([("user", "warm")]) == "warm"
    monkeypatch.setattr(process._child, "receive", interrupted)
    with pytest.raises(KeyboardInterrupt):
        process.format([("user", "one")])
    assert process.format([("user", "two")]) == "two"
    process.close()


def test_a_process_that_was_killed_while_idle_is_replaced() -> None:
    chats = ChatProcess("{{ messages[0].content }}")
    assert chats.format([("user", "one")]) == "one"
    pid = chats.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: chats._child is None or chats._child.process.poll() is not None)
    assert chats.format([("user", "two")]) == "two"
    chats.close()


def test_signals_to_the_whole_group_leave_the_process_running() -> None:
    chats = ChatProcess("{{ messages[0].content }}")
    assert chats.format([("user", "one")]) == "one"
    pid = chats.pid
    assert pid is not None
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(pid, number)
    assert chats.format([("user", "two")]) == "two"
    assert chats.pid == pid
    chats.close()


def test_closing_ends_the_process_and_the_chat_that_waits() -> None:
    chats = ChatProcess(HOSTILE["a loop"])
    chats.start()
    pid = chats.pid
    assert pid is not None
    caught: list[BaseException] = []

    def chat() -> None:
        try:
            chats.format([("user", "x")])
        except Closed as error:
            caught.append(error)

    thread = threading.Thread(target=chat)
    thread.start()
    wait_until(chats._lock.locked)
    time.sleep(0.2)
    chats.close()
    chats.close()
    thread.join()
    assert len(caught) == 1
    assert not is_running(pid)
    with pytest.raises(Closed):
        chats.format([("user", "x")])
    with pytest.raises(Closed):
        chats.start()


def test_a_forgotten_process_ends() -> None:
    chats = ChatProcess("{{ messages[0].content }}")
    assert chats.format([("user", "x")]) == "x"
    pid = chats.pid
    assert pid is not None
    assert is_running(pid)
    del chats
    gc.collect()
    assert not is_running(pid)


def test_the_process_has_no_variable_that_may_be_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs a stranger's program: what it does not have, that cannot tell."""
    for name in ("DRAFTHOUSE_API_KEYS", "DRAFTHOUSE_API_KEY", "AWS_SECRET_ACCESS_KEY", "PASSWORD"):
        monkeypatch.setenv(name, "acme:hush")
    chats = ChatProcess("{{ messages[0].content }}")
    assert chats.format([("user", "x")]) == "x"
    variables = Path(f"/proc/{chats.pid}/environ").read_bytes()
    assert b"hush" not in variables
    assert b"PYTHONPATH=" in variables
    chats.close()


def test_the_process_ends_with_the_one_that_started_it() -> None:
    code = (
        "import os, signal\n"
        "from drafthouse_engine import ChatProcess\n"
        "chats = ChatProcess('{{ messages[0].content }}')\n"
        "print(chats.format([('user', 'x')]), chats.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False
    )
    text, pid = result.stdout.split()
    assert text == "x"
    assert result.returncode == -signal.SIGKILL
    wait_until(lambda: not is_running(int(pid)))


def test_a_closed_model_has_no_process() -> None:
    before = set(children())
    with Model(MODELS / TARGETS["dense"], vocab_only=True) as opened:
        opened.start_chat()
        pid = (set(children()) - before).pop()
    assert not is_running(pid)


def test_a_model_without_a_template_starts_no_process(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf", MODELS / SIMPLE, "")
    content = path.read_bytes().replace(b"tokenizer.chat_template", b"tokenizer.CHAT_template")
    path.write_bytes(content)
    with Model(path, vocab_only=True) as opened:
        assert opened.chat_template == ""
        with pytest.raises(Unsupported, match="no chat template"):
            opened.format_chat([("user", "x")])
        with pytest.raises(Unsupported, match="no chat template"):
            opened.start_chat()


def test_many_threads_get_their_own_texts(model: Model) -> None:
    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(lambda i: model.format_chat([("user", f"number {i};")]), range(200)))
    assert all(f"number {i};" in text for i, text in enumerate(texts))


def test_a_text_of_too_great_length_is_refused() -> None:
    chats = ChatProcess("{{ messages[0].content * 12 }}")
    with pytest.raises(BadTemplate, match="gives more than 64 MiB"):
        chats.format([("user", "\x01" * 1_000_000)])  # six bytes each in JSON
    assert chats.format([("user", "x")]) == "x" * 12
    chats.close()


def test_what_the_tokenizer_adds_is_taken_away() -> None:
    template = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"
    for add_bos in (False, True):
        for add_eos in (False, True):
            chats = ChatProcess(template, bos="<s>", eos="</s>", add_bos=add_bos, add_eos=add_eos)
            expected = ("" if add_bos else "<s>") + "x" + ("" if add_eos else "</s>")
            assert chats.format([("user", "x")]) == expected
            chats.close()


def test_an_interpreter_that_cannot_be_started_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    chats = ChatProcess("x")
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    with pytest.raises(InternalError, match=r"sys\.executable is '/nonexistent/python'"):
        chats.format([("user", "x")])
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(InternalError, match="ended with code 1"):
        chats.format([("user", "x")])
    monkeypatch.undo()
    assert chats.format([("user", "x")]) == "x"
    chats.close()


def test_chats_need_no_folder_that_may_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise FileNotFoundError("no usable temporary directory")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    chats = ChatProcess(ON_DEMAND)
    assert chats.format([("user", "x")]) == "x"
    with pytest.raises(BadTemplate, match="SIGFPE"):
        chats.format([("user", "die")])
    chats.close()


@pytest.mark.parametrize("messages", [[("user", b"x")], [(1, "x")]])
def test_messages_must_be_texts(messages: list[tuple[str, str]], model: Model) -> None:
    with pytest.raises(TypeError):
        model.format_chat(messages)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 50
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    return "chat_worker" in command(pid)


def command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def children() -> list[int]:
    """Returns the processes that this one started and that run."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(parent) == os.getpid():
            found.append(int(folder.name))
    return found
