"""Texts of clients, read by a thread for the fake engine and by processes for the real one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.support import built

from drafthouse_server.engine.fake import FakeEngine
from drafthouse_server.engine.text_jobs import TextJob, TextModel, perform
from drafthouse_server.errors import InvalidRequest, StartupError
from drafthouse_server.serving.text_workers import TextWorkers
from drafthouse_server.step import SamplingOptions
from drafthouse_server.tenancy.tenants import Tenant

if TYPE_CHECKING:
    from tests.conftest import Eventually

MODELS = Path(__file__).resolve().parents[2] / "models"
MODEL = str(MODELS / "tiny-mimo2-f16.gguf")
TENANT, OTHER = Tenant("a"), Tenant("b")
needs_extension = built.needs_extension()

PROGRAM = (
    "{% if messages[0].content == 'crash' %}{{ 1 is divisibleby(0) }}{% endif %}"
    "{% if messages[0].content == 'loop' %}"
    + "{% for i in range(9999) %}" * 3
    + "{% endfor %}" * 3
    + "{% endif %}"
    "{% if messages[0].content == 'memory' %}{{ 'x' * 2000000000 }}{% endif %}"
    "{{ messages[0].content }}"
)
"""A template that does harm when a chat asks for it."""


def open_text() -> TextModel:
    """Returns the vocabulary of the model, in this process."""
    from drafthouse_server.engine.llama_text import LlamaText

    return LlamaText.open(MODEL)


def pool_of(kind: str) -> TextWorkers:
    if kind == "fake":
        return TextWorkers(FakeEngine().make_text_worker, 2)
    return process_pool(MODEL)


def process_pool(
    path: str, n: int = 2, memory_bytes: int = 512 << 20, **options: Any
) -> TextWorkers:
    from drafthouse_server.engine.text_process import TextProcess

    return TextWorkers(lambda: TextProcess(path, memory_bytes=memory_bytes), n, **options)


@pytest.fixture(params=["fake", pytest.param("real", marks=needs_extension)])
async def reader(request: pytest.FixtureRequest) -> AsyncIterator[tuple[TextWorkers, TextModel]]:
    """A pool, and what it must agree with."""
    pool = pool_of(request.param)
    await pool.open()
    yield pool, FakeEngine() if request.param == "fake" else open_text()
    await pool.close()


TEXTS = (
    "",
    "def parse(",
    "def grüße(名前):  # 😀\n\treturn 名前\n",
    "<|im_end|><|eos|>",
    "\0",
    " " * 3000,
    "a" * 30_000,
    "Don't 123 При 你好, 한글\r\n\t{x+1}",
)


async def test_texts_have_the_engines_own_tokens(reader: tuple[TextWorkers, TextModel]) -> None:
    pool, model = reader
    for text in TEXTS:
        for add_special in (False, True):
            for parse_special in (False, True):
                job = TextJob(text=text, add_special=add_special, parse_special=parse_special)
                answer = await pool.run(job, TENANT)
                assert answer.tokens == model.tokenize(
                    text, add_special=add_special, parse_special=parse_special
                )


@pytest.mark.model
async def test_hostile_texts_have_the_engines_own_tokens() -> None:
    from tests.support.hostile_texts import texts

    pool, model = pool_of("real"), open_text()
    await pool.open()
    for text in texts(4096).values():
        for parse_special in (False, True):
            answer = await pool.run(TextJob(text=text, parse_special=parse_special), TENANT)
            assert answer.tokens == model.tokenize(
                text, add_special=True, parse_special=parse_special
            )
    await pool.close()


async def test_token_ids_become_the_engines_own_text(
    reader: tuple[TextWorkers, TextModel],
) -> None:
    pool, model = reader
    for text in TEXTS:
        ids = model.tokenize(text, add_special=True, parse_special=True)
        for keep_special in (False, True):
            answer = await pool.run(TextJob(tokens=ids, keep_special=keep_special), TENANT)
            pieces = [model.token_bytes(token, special=keep_special) for token in ids]
            assert answer.text == b"".join(pieces).decode("utf-8", "replace")


async def test_chats_are_formatted_and_tokenised(reader: tuple[TextWorkers, TextModel]) -> None:
    pool, model = reader
    chat = [("system", "Be short."), ("user", "Hi there")]
    answer = await pool.run(TextJob(messages=chat), TENANT)
    assert answer.tokens == perform(TextJob(messages=chat), model).tokens
    text = (await pool.run(TextJob(tokens=answer.tokens), TENANT)).text
    assert 0 <= text.index("Be short.") < text.index("Hi there")


async def test_options_are_checked(reader: tuple[TextWorkers, TextModel]) -> None:
    pool, _ = reader
    good = SamplingOptions(grammar='root ::= "a"', dry_multiplier=0.8, dry_breakers=("\n",))
    assert (await pool.run(TextJob(sampling=good), TENANT)).tokens is None
    answer = await pool.run(TextJob(text="x", sampling=good), TENANT)
    assert answer.tokens
    with pytest.raises(InvalidRequest) as caught:
        await pool.run(TextJob(text="x", sampling=SamplingOptions(grammar="x")), TENANT)
    assert [violation.field for violation in caught.value.violations] == ["grammar"]
    with pytest.raises(InvalidRequest) as caught:
        await pool.run(TextJob(tokens=[65] * 10, n_bytes_max=5), TENANT)
    assert [violation.field for violation in caught.value.violations] == ["token_ids"]
    assert (await pool.run(TextJob(text="", add_special=False), TENANT)).tokens == []


async def test_jobs_of_many_tenants_are_all_answered(
    reader: tuple[TextWorkers, TextModel],
) -> None:
    pool, model = reader
    texts = [f"{'x' * i} {i}" for i in range(60)]
    answers = await asyncio.gather(
        *(pool.run(TextJob(text=t), Tenant(f"t{i % 7}")) for i, t in enumerate(texts))
    )
    how = {"add_special": True, "parse_special": False}
    assert [answer.tokens for answer in answers] == [model.tokenize(t, **how) for t in texts]
    assert (len(pool._turns), len(pool._idle)) == (0, 2)


async def test_a_killed_worker_loses_its_job_alone(
    reader: tuple[TextWorkers, TextModel], eventually: Eventually
) -> None:
    pool, _ = reader
    await eventually(lambda: len(pool.workers) == 3)
    first = set(pool.workers)
    for worker in pool.workers[:2]:
        worker.kill()
    await eventually(lambda: len(pool.workers) == 3 and len(first & set(pool.workers)) == 1)
    assert (await pool.run(TextJob(text="", add_special=False), TENANT)).tokens == []


def pids(pool: TextWorkers) -> list[int]:
    from drafthouse_server.engine.text_process import TextProcess

    return [worker.pid for worker in pool.workers if isinstance(worker, TextProcess)]


def descriptors() -> Counter[str]:
    """Returns what this process has open; each pipe and each socket has a name of its own.

    Not how much: what tests before have left may be closed at any time.
    """
    found: Counter[str] = Counter()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # by which the folder was read
            found[os.readlink(f"/proc/self/fd/{number}")] += 1
    return found


def children() -> list[str]:
    """Returns the ids of the processes that this thread has started, where the system tells them.

    One that has ended and has not been waited for is among them.
    """
    path = Path(f"/proc/self/task/{os.getpid()}/children")
    return path.read_text().split() if path.exists() else []


def does_exist(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.model
async def test_processes_and_descriptors_are_given_back(eventually: Eventually) -> None:
    await asyncio.sleep(0)
    before = descriptors()
    pool = process_pool(MODEL)
    await pool.open()
    await eventually(lambda: len(pool.workers) == 3)
    found = set(pids(pool))
    for _ in range(3):
        victim = pids(pool)[0]
        os.kill(victim, signal.SIGKILL)
        await eventually(lambda victim=victim: len(set(pids(pool)) - {victim}) == 3)  # type: ignore[misc]  # a default has no type
        found |= set(pids(pool))
    await pool.close()
    assert len(found) == 6
    assert not any(does_exist(pid) for pid in found)
    assert descriptors() <= before


@pytest.mark.model
async def test_a_pool_that_closes_while_its_spare_worker_starts_leaves_nothing() -> None:
    before, others = descriptors(), set(children())  # of other tests in this process
    pool = process_pool(MODEL, 1)
    await pool.open()
    await asyncio.sleep(0.02)
    await pool.close()
    assert descriptors() <= before
    assert set(children()) <= others


@pytest.fixture
async def harmful(tmp_path: Path) -> AsyncIterator[TextWorkers]:
    """A pool whose template does what it is told."""
    from tests.support.templates import write_model

    path = write_model(tmp_path / "model.gguf", Path(MODEL), PROGRAM)
    pool = process_pool(str(path), memory_bytes=32 << 20)
    await pool.open()
    yield pool
    await pool.close()


@pytest.mark.model
@pytest.mark.parametrize(
    ("order", "told"),
    [
        ("loop", "could not be read within 0.25 s of processor time"),
        ("crash", "could not be read: it ended the process that read it"),
        ("memory", "could not be read within 32 MiB of memory"),
    ],
)
async def test_a_harmful_text_fails_alone_while_others_go_on(
    harmful: TextWorkers, order: str, told: str
) -> None:
    harm = asyncio.create_task(harmful.run(TextJob(messages=[("user", order)]), TENANT))
    others = [harmful.run(TextJob(messages=[("user", f"{i}")]), OTHER) for i in range(20)]
    assert len({tuple(answer.tokens or ()) for answer in await asyncio.gather(*others)}) == 20
    with pytest.raises(InvalidRequest) as caught:
        await harm
    assert [(v.field, v.description) for v in caught.value.violations] == [("messages", told)]
    assert (await harmful.run(TextJob(messages=[("user", "x")]), TENANT)).tokens


@pytest.mark.model
async def test_a_text_that_spells_the_lack_of_memory_is_told_of_itself_and_ends_no_worker() -> None:
    pool = process_pool(MODEL, 1)
    await pool.open()
    before = pids(pool)
    with pytest.raises(InvalidRequest) as caught:
        await pool.run(
            TextJob(sampling=SamplingOptions(grammar="root ::= ) std::bad_alloc")), TENANT
        )
    assert "cannot be parsed" in caught.value.violations[0].description
    assert (await pool.run(TextJob(text="x"), TENANT)).tokens
    assert pids(pool) == before
    await pool.close()


@pytest.mark.model
async def test_a_job_whose_process_is_killed_is_done_by_another(harmful: TextWorkers) -> None:
    for pid in pids(harmful):
        os.kill(pid, signal.SIGSTOP)
    again = asyncio.create_task(harmful.run(TextJob(text="x"), TENANT))
    await asyncio.sleep(0.01)
    for pid in pids(harmful):
        os.kill(pid, signal.SIGKILL)
    assert (await again).tokens
    assert (await harmful.run(TextJob(text="x"), TENANT)).tokens


@pytest.mark.model
async def test_a_stopped_process_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drafthouse_server.serving.text_workers._PATIENCE", 0.0)
    pool = process_pool(MODEL, 1, patience_s=0.2)
    await pool.open()
    stopped = pids(pool)[0]
    os.kill(stopped, signal.SIGSTOP)
    with pytest.raises(InvalidRequest, match="could not be read within"):
        await pool.run(TextJob(text="x"), TENANT)
    await pool.close()
    assert not does_exist(stopped)


@pytest.mark.model
async def test_a_process_that_dies_with_the_servers_end_of_the_channel_leaves_nothing(
    eventually: Eventually,
) -> None:
    program = (
        "import asyncio, os, sys; from drafthouse_server.engine.text_process import TextProcess\n"
        "async def main():\n"
        "    worker = TextProcess(sys.argv[1]); await worker.start()\n"
        "    print(worker.pid, flush=True); os._exit(1)\n"
        "asyncio.run(main())"
    )
    run = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", program, MODEL], capture_output=True, check=False
    )
    pid = int(run.stdout)
    await eventually(lambda: not does_exist(pid))


@pytest.mark.model
async def test_a_template_that_refuses_chats_is_told_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from tests.support.templates import write_model

    template = "{{ messages|no_such }}"
    pool = process_pool(str(write_model(tmp_path / "model.gguf", Path(MODEL), template)), 1)
    await pool.open()
    await pool.close()
    (record,) = [it for it in caplog.records if "a chat of one user's message" in it.message]
    assert "Unknown (built-in) filter 'no_such'" in record.message


@pytest.mark.model
async def test_a_worker_has_no_rights_and_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTHOUSE_API_KEYS", "a:secret")
    pool = process_pool(MODEL, 1)
    await pool.open()
    assert pool.workers[0].not_dropped == ""
    proc = Path(f"/proc/{pids(pool)[0]}")
    status = dict(
        line.split(":\t", 1) for line in (proc / "status").read_text().splitlines() if ":\t" in line
    )
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    if os.geteuid() == 0:  # others cannot look into it at all
        assert b"secret" not in (proc / "environ").read_bytes()
        links = {os.readlink(link) for link in (proc / "fd").iterdir()}
        assert len([link for link in links if link.startswith("socket:")]) == 1
    else:
        with pytest.raises(PermissionError):
            (proc / "environ").read_bytes()
    assert os.getpriority(os.PRIO_PROCESS, pids(pool)[0]) > os.getpriority(os.PRIO_PROCESS, 0)
    await pool.close()


FORBIDDEN = """
import ctypes, os, socket
from drafthouse_server.host.sandbox import drop_rights
pipe = os.pipe()
assert drop_rights() == ""
libc = ctypes.CDLL(None, use_errno=True)
def refused(do):
    try:
        do()
    except PermissionError:
        return True
    return False
assert refused(lambda: open("/proc/self/environ"))
assert refused(lambda: open("/tmp/drafthouse-test", "w"))
assert refused(socket.socket)
assert refused(socket.socketpair)
assert refused(os.fork)
assert refused(lambda: os.execv("/bin/true", ["true"]))
assert refused(lambda: os.kill(os.getppid(), 0))
assert refused(lambda: os.readlink("/proc/self/exe"))
assert libc.tgkill(os.getppid(), os.getppid(), 0) == -1 and ctypes.get_errno() == 1
assert libc.tgkill(os.getpid(), os.getpid(), 0) == 0
os.write(pipe[1], b"x" * 100)
assert len(os.read(pipe[0], 100)) == 100
assert len(bytearray(50_000_000)) == 50_000_000
os.write(1, b"end")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs seccomp")
def test_without_rights_a_process_can_compute_and_answer_and_nothing_else() -> None:
    run = subprocess.run(
        [sys.executable, "-c", FORBIDDEN], capture_output=True, text=True, check=False
    )
    assert (run.returncode, run.stdout) == (0, "end"), run.stderr


@pytest.mark.model
async def test_a_worker_that_cannot_start_says_why(tmp_path: Path) -> None:
    before = descriptors()
    for path in (tmp_path / "missing.gguf", Path(__file__)):
        with pytest.raises(StartupError, match="a text worker cannot read the vocabulary"):
            await process_pool(str(path)).open()
    assert descriptors() <= before


async def test_an_interpreter_that_is_none_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    before = descriptors()
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(StartupError, match="a text worker cannot be started"):
        await process_pool(MODEL).open()
    monkeypatch.setattr(sys, "executable", "/no/such/program")
    with pytest.raises(StartupError, match="a text worker cannot be started"):
        await process_pool(MODEL).open()
    assert descriptors() <= before
