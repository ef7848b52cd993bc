"""Lifetimes and threads: use after close raises, other threads are refused, exit is silent."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.support.hand import (
    DENSE,
    EAGLE3,
    MODELS,
    TEXTS,
    emitted,
    engine,
    model,
    params,
    plan,
    sampler,
    tokens_of,
)

from drafthouse_engine import (
    PLAN_DTYPE,
    Closed,
    DecoderConfig,
    Engine,
    Model,
    Sampler,
    WrongThread,
)
from drafthouse_engine._spec import DecoderContext

pytestmark = pytest.mark.model

ROOT = Path(__file__).resolve().parents[2]


def in_thread(call: Callable[[], object]) -> object:
    """Returns what the call gave, or raised, on another thread."""
    found: list[object] = []

    def run() -> None:
        try:
            found.append(call())
        except BaseException as error:  # handed to the test
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


def test_closed_engine_refuses_everything_and_closes_twice() -> None:
    closed = engine("mtp")
    closed.seq_begin(0, sampler())
    closed.close()
    closed.close()
    assert closed.is_closed
    calls: list[Callable[[], object]] = [
        lambda: closed.step(np.zeros(0, PLAN_DTYPE), []),
        lambda: closed.seq_begin(1, sampler()),
        lambda: closed.seq_end(0),
        lambda: closed.seq_n_past(0),
        lambda: closed.n_cells_used,
        lambda: closed.draft_many([(0, 0, 5, 1)]),
        lambda: closed.decode([5], [0], [0], [True]),
        closed.process,
        lambda: closed.logits(0),
        lambda: closed.sample(0, 0),
        lambda: closed.accept(0, 0),
        lambda: closed.rollback(0, 0),
        lambda: closed.inject_fault(0),
        lambda: closed.set_threads(1, 1),
        closed.bind_thread,
    ]
    for call in calls:
        with pytest.raises(Closed):
            call()
    assert closed.limits.n_seq_max == 3


def test_engine_works_on_after_its_models_were_closed() -> None:
    target = Model(MODELS / DENSE)
    draft = Model(MODELS / EAGLE3[DENSE])
    made = Engine(target, draft, params("eagle3"))
    left = Sampler(target)
    target.close()
    draft.close()
    assert target.is_closed
    made.seq_begin(0, left)
    prompt = tokens_of(TEXTS[0])
    last = emitted(made.step(plan((0, 0, 0, len(prompt), 0, 1)), prompt), 0)
    del target, draft
    gc.collect()
    assert emitted(made.step(plan((0, len(prompt), 0, 1, 3, 1)), last), 0)
    made.close()


def test_engine_in_a_cycle_is_collected() -> None:
    class Holder:
        def __init__(self) -> None:
            self.me = self
            self.engine = engine("mtp")

    holder = Holder()
    alive = weakref.ref(holder.engine)
    del holder
    gc.collect()
    assert alive() is None


def test_another_thread_is_refused_until_it_is_bound() -> None:
    made = engine()
    error = in_thread(lambda: made.seq_n_past(0))
    assert isinstance(error, WrongThread)
    assert error.owner == threading.get_ident() != error.caller

    def take_over() -> int:
        made.bind_thread()
        return made.seq_n_past(0)

    assert in_thread(take_over) == 0
    with pytest.raises(WrongThread):
        made.seq_n_past(0)
    made.bind_thread()
    assert made.seq_n_past(0) == 0
    made.close()


def test_engine_may_be_closed_from_another_thread_when_idle() -> None:
    made = engine()
    assert in_thread(made.close) is None
    assert made.is_closed


def test_other_threads_run_during_a_step_and_cannot_take_the_engine() -> None:
    made = engine(n_ctx_seq=1024, n_batch=900, n_ubatch=900)
    made.seq_begin(0, sampler())
    prompt = [5] * 900
    refused, done = list[object](), threading.Event()

    def intrude() -> None:
        while not done.is_set():
            try:
                made.seq_tokens(0)  # always refused; the refusal tells whether a call is in flight
            except WrongThread as error:
                if "in flight" not in str(error):
                    continue
            # An earlier attempt would be no intrusion: an idle engine may be taken and closed.
            for call in (made.bind_thread, made.close):
                try:
                    refused.append(call())
                except WrongThread as error:
                    refused.append(error)
            return

    thread = threading.Thread(target=intrude)
    step = made.step
    rows = plan((0, 0, 0, len(prompt), 0, 1))
    thread.start()
    try:
        step(rows, prompt)
    finally:
        done.set()
        thread.join()
    assert [type(answer) for answer in refused] == [WrongThread, WrongThread]
    made.close()


def test_model_closed_while_others_tokenise_fails_cleanly() -> None:
    shared = Model(MODELS / DENSE, vocab_only=True)
    text = "def f(x):\n    return x\n" * 500
    expected = len(shared.tokenize(text))
    found: list[object] = []

    def run() -> None:
        try:
            while True:
                found.append(len(shared.tokenize(text)))
        except Closed as error:
            found.append(error)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    while len(found) < 8:
        threading.Event().wait(0.001)
    shared.close()
    for thread in threads:
        thread.join()
    assert sum(isinstance(value, Closed) for value in found) == 4
    assert {value for value in found if isinstance(value, int)} == {expected}


def test_many_engines_are_freed_by_their_last_reference() -> None:
    for _ in range(20):
        engine("mtp").seq_begin(0, sampler())
    gc.collect()
    alive = [thing for thing in gc.get_objects() if type(thing) is Engine and not thing.is_closed]
    assert not alive


EXITS = {
    "leftover engine": "engine.seq_begin(0, Sampler(model))",
    "engine in a cycle": """
        class Holder:
            pass
        holder = Holder()
        holder.me, holder.it = holder, engine
    """,
    "engine at atexit": "import atexit\natexit.register(lambda: engine.seq_n_past(0))",
    "closed at atexit": "import atexit\natexit.register(engine.close)",
    "embedder left": "embedder = Embedder(model, EmbedderParams(n_batch=64, n_threads=1))",
    "embedder in a cycle": """
        class Holder:
            pass
        holder = Holder()
        holder.me, holder.it = holder, Embedder(model, EmbedderParams(n_batch=64, n_threads=1))
    """,
    "model left alone": "engine.close()\ndel engine",
    "sampler left": "sampler = Sampler(model)",
    "engine in a module": "import builtins\nbuiltins.engine = engine\ndel engine, model",
    "daemon thread waits": """
        import threading
        threading.Thread(target=threading.Event().wait, args=(), daemon=True).start()
    """,
    "daemon thread steps": """
        import threading, time
        started = threading.Event()
        def run():
            engine.bind_thread()
            while True:
                engine.seq_begin(0, Sampler(model))
                engine.step(np.array([(0, 0, 0, 200, 0, 1)], PLAN_DTYPE), [5] * 200)
                engine.seq_end(0)
                started.set()
        threading.Thread(target=run, daemon=True).start()
        started.wait()
    """,
    "daemon thread loads": """
        import threading, time
        started = threading.Event()
        def run():
            while True:
                Model(path, progress=lambda share: started.set())
        threading.Thread(target=run, daemon=True).start()
        started.wait()
    """,
    "daemon thread tokenises": """
        import threading
        started = threading.Event()
        def run():
            while True:
                model.tokenize("x = 1\\n" * 2000)
                started.set()
        threading.Thread(target=run, daemon=True).start()
        started.wait()
    """,
    "system exit in a session": "import sys\nsys.exit(0)",
}
PREAMBLE = """
import numpy as np
from drafthouse_engine import *
path = {path!r}
model = Model(path)
engine = Engine(model, None, EngineParams(draft_type="mtp", n_ctx_seq=256, n_threads=1))
"""


@pytest.mark.parametrize("name", EXITS)
def test_interpreter_exit_is_silent(name: str) -> None:
    script = PREAMBLE.format(path=str(MODELS / DENSE)) + textwrap.dedent(EXITS[name])
    command = [sys.executable, "-X", "dev", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_embedders_are_freed_at_exit() -> None:
    script = textwrap.dedent(f"""
        import atexit
        left = []
        atexit.register(lambda: print(left[0].is_closed))  # after those that were registered later
        from drafthouse_engine import Embedder, EmbedderParams, Model
        model = Model({str(MODELS / DENSE)!r})
        left.append(Embedder(model, EmbedderParams(n_batch=64, n_threads=1)))
    """)
    command = [sys.executable, "-X", "dev", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")


def test_keyboard_interrupt_stops_a_load() -> None:
    script = textwrap.dedent(f"""
        import _thread, signal
        from drafthouse_engine import Model
        # A job in the background begins with SIGINT ignored.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            Model({str(MODELS / DENSE)!r}, progress=lambda share: _thread.interrupt_main())
        except KeyboardInterrupt:
            print("stopped")
    """)
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "stopped\n", "")


def test_unbuilt_extension_says_what_to_run() -> None:
    script = textwrap.dedent("""
        import sys
        sys.modules["drafthouse_engine._spec"] = None
        try:
            import drafthouse_engine
        except ImportError as error:
            print(error)
    """)
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert "make build" in done.stdout


def test_engine_and_model_say_what_they_are() -> None:
    made = engine("mtp")
    assert "mtp" in repr(made)
    assert DENSE in repr(model())
    made.close()
    assert "closed" in repr(made)


def test_a_sampler_is_handed_over_once_whoever_else_would_have_it() -> None:
    """Closed, or given to another engine, by other threads meanwhile: it was freed twice."""
    engines = [engine(), engine()]
    for i in range(300):
        shared = sampler()
        found: list[object] = []

        def take(target: Engine, shared: Sampler = shared, found: list[object] = found) -> None:
            target.bind_thread()
            try:
                target.seq_begin(0, shared)
                found.append(target)
            except Closed:
                pass

        threads = [threading.Thread(target=take, args=(target,)) for target in engines]
        threads += [threading.Thread(target=shared.close)] * (i % 2)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) <= 1
        for target in engines:
            target.bind_thread()
            target.seq_end(0)
    for target in engines:
        target.close()


def is_in_flight(call: Callable[[], object]) -> bool:
    """Returns whether a call of another thread is refused since one is in flight."""
    try:
        call()
    except WrongThread as error:
        return "in flight" in str(error)
    return False


def test_what_another_thread_writes_into_a_plan_in_its_step_changes_nothing() -> None:
    """C had checked the caller's own arrays: what was written afterwards could end the process."""
    made = engine(n_ctx_seq=1024, n_batch=900, n_ubatch=900)
    made.seq_begin(0, sampler())
    tokens = np.full(900, 5, np.int32)
    rows = plan((0, 0, 0, len(tokens), 0, 1))
    is_over = threading.Event()

    def write() -> None:
        while not is_over.is_set() and not is_in_flight(lambda: made.seq_n_past(0)):
            pass
        rows["is_output"] = 0
        tokens[:] = 6

    thread = threading.Thread(target=write)
    thread.start()
    try:
        result = made.step(rows, tokens)
    finally:
        is_over.set()
        thread.join()
    assert rows["is_output"][0] == 0
    assert len(emitted(result, 0)) == 1
    assert set(made.seq_tokens(0).tolist()) == {5}
    made.close()


def test_a_target_is_not_closed_in_a_call_of_its_draft() -> None:
    """An EAGLE-3 draft reads its target's context: it was freed under the draft's call."""
    config = DecoderConfig(
        n_ctx_seq=1024, n_batch=900, n_ubatch=900, n_outputs_max=64, n_branch_max=4, n_threads=1
    )
    target = DecoderContext(model(), config)
    draft = DecoderContext(model(EAGLE3[DENSE]), config, target)
    target.decode(0, [5] * 900, False)
    draft.set_states(draft.encode()[:-1])
    found: list[object] = []
    is_over = threading.Event()

    def intrude() -> None:
        while not is_over.is_set() and not is_in_flight(lambda: draft.seq_n_past(0)):
            pass
        found.append(is_in_flight(lambda: target.seq_n_past(0)))
        if found[0]:  # else it would be closed, and the process could end
            try:
                target.close()
            except WrongThread as error:
                found.append(type(error))

    thread = threading.Thread(target=intrude)
    thread.start()
    try:
        draft.decode(0, [5] * 899, False)
    finally:
        is_over.set()
        thread.join()
    assert found == [True, WrongThread]
    assert target.seq_n_past(0) == 900
    target.close()
    with pytest.raises(Closed, match="target"):
        draft.rollback(0, 0)
    draft.close()


FORKED = {
    "the parent's engine": "print(len(step(engine, 3, last)))",
    "the parent's embedder": "print(embedder.encode([[5, 6, 7]]).shape[0])",
    "an engine of its own": "print(len(step(begun(), 0, [5, 6, 7])))",
    "a decoder of its own": """
        with DecoderPool(model, DecoderConfig(n_ctx_seq=64, n_threads=2)) as pool:
            decoder = pool.decoder()
            decoder.observe([5, 6, 7])
            print(decoder.next_logits().ndim)
    """,
    "closes what it has": "engine.close(); embedder.close(); model.close(); print(1)",
}
FORK_PREAMBLE = """
import os, signal, sys
import numpy as np
from drafthouse_engine import *
model = Model({path!r})
def begun():
    made = Engine(model, None, EngineParams(n_ctx_seq=256, n_threads=2, n_threads_batch=2))
    made.seq_begin(0, Sampler(model, SamplingParams(temperature=0.0)))
    return made
def step(engine, n_past, tokens):
    plan = np.array([(0, n_past, 0, len(tokens), 0, 1)], PLAN_DTYPE)
    return engine.step(plan, tokens).tokens.tolist()
engine, embedder = begun(), Embedder(model, EmbedderParams(pooling="mean", n_batch=64, n_threads=2))
embedder.encode([[5, 6, 7]])
last = step(engine, 0, [5, 6, 7])
pid = os.fork()
if pid == 0:
    signal.alarm(60)  # of a child that waits for ever
"""
FORK_END = """
    sys.stdout.flush()
    os._exit(0)
status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
print(status, len(step(engine, 3, last)))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="without GNU's OpenMP a child may not compute")
@pytest.mark.parametrize("name", FORKED)
def test_a_forked_child_computes(name: str) -> None:
    """It waited for ever for threads that only its parent has."""
    script = FORK_PREAMBLE.format(path=str(MODELS / DENSE))
    script += textwrap.indent(textwrap.dedent(FORKED[name]), "    ") + FORK_END
    # Since 3.12 Python warns of forks beside threads, such as numpy's.
    command = [sys.executable, "-X", "dev", "-W", "ignore::DeprecationWarning", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n0 1\n", "")
