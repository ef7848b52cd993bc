"""`drafthouse doctor` on three models, and with what is broken."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shutil
import socket
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from tests.support.built import needs_extension
from tests.support.certificates import Authority
from tests.support.gguf_copy import Tensor, copied
from tests.support.windows import windowed

from drafthouse_server.cli.main import main
from drafthouse_server.cli.terminal import Terminal
from drafthouse_server.config import Config
from drafthouse_server.doctor import examine as examining
from drafthouse_server.engine.surveyor import Surveyor
from drafthouse_server.host.memory import HostMemory
from drafthouse_server.tenancy.store import Store, read_pepper_of
from drafthouse_server.usage.folder import JournalFolder

pytestmark = needs_extension()

MODELS = Path(__file__).resolve().parents[2] / "models"
DENSE = str(MODELS / "tiny-mimo2-f16.gguf")
HYBRID = str(MODELS / "tiny-qwen35-f16.gguf")
DRAFT = str(MODELS / "tiny-draft-f16.gguf")
AMPLE = HostMemory(10**12, 10**12)


@pytest.fixture(autouse=True)
def _ample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examining, "read_memory", lambda: AMPLE)


def doctor(*words: str) -> tuple[int, str]:
    out = io.StringIO()
    code = main(["doctor", "--port", "0", *words], Terminal(out, out))
    return code, out.getvalue()


def told(*words: str) -> dict[str, Any]:
    code, text = doctor("--json", *words)
    found: dict[str, Any] = json.loads(text)
    assert (code == 0) == found["ok"]
    return found


def error_of(*words: str, check: str) -> str:
    """Returns the one error that is told, which is of this check."""
    found = told(*words)
    (problem,) = [it for it in found["problems"] if it["severity"] == "error"]
    assert problem["check"] == check
    assert not found["ok"]
    sentence: str = problem["problem"]
    return sentence


@pytest.mark.parametrize(
    ("path", "architecture", "draft_type"),
    [(DENSE, "mimo2", "mtp"), (HYBRID, "qwen35", "mtp"), (DRAFT, "", "none")],
)
def test_three_models(path: str, architecture: str, draft_type: str) -> None:
    found = told(path)
    assert found["ok"]
    assert found["model"]["file"] == path
    assert found["model"]["architecture"] == (architecture or found["model"]["architecture"])
    assert found["model"]["draft_type"] == draft_type
    needs = found["needs"]
    parts = ("weights", "cells", "compute", "drafter")
    total = sum(needs[f"host_{name}_bytes"] for name in parts) + needs["processes_bytes"]
    assert needs["host_total_bytes"] == total
    assert needs["host_at_most_bytes"] == total + needs["caches_at_most_bytes"]
    assert "?" not in found["model"]["description"]
    assert (needs["host_drafter_bytes"] > 0) == (draft_type != "none")
    assert needs["each_token_bytes"] > 0
    assert found["fits"]["1024"] == 256  # what llama.cpp allows
    assert found["fits"]["served"].startswith("8 x ")
    assert found["build"]["llama_cpp"], "b and a number; unknown of another checkout"
    assert "CPU" in found["devices"]


def test_a_drafter_with_a_file_of_its_own() -> None:
    eagle3 = str(MODELS / "tiny-mimo2-eagle3-f16.gguf")
    found = told(DENSE, "--model-draft", eagle3)
    assert found["model"]["draft_type"] == "eagle3"
    assert found["model"]["draft_model"] == eagle3
    assert found["needs"]["host_weights_bytes"] > told(DENSE)["needs"]["host_weights_bytes"]


def test_people_get_a_table() -> None:
    code, text = doctor(DENSE)
    assert code == 0
    assert "\nneeds\n" in text
    assert "slots of 1024 tokens" in text
    assert text.rstrip().endswith("warnings")
    assert "checked  " in text


def test_what_the_settings_do_not_ask_for_is_told_as_not_checked(tmp_path: Path) -> None:
    unset = ["metrics", "admin", "tls", "store", "rate_counters", "journal", "audit"]
    found = told(DENSE)
    assert found["left_out"] == unset
    assert not set(unset) & set(found["passed"])
    assert f"not set up  {', '.join(unset)}: not checked\n" in doctor(DENSE)[1]
    found = told(DENSE, f"--store=sqlite:///{tmp_path}/store.db")
    assert "store" in found["passed"]
    assert "store" not in found["left_out"]


def test_a_small_step_has_few_slots() -> None:
    found = told(DENSE, "--batch-size", "64", "--parallel", "4", "--draft-max", "3")
    assert found["ok"]
    assert found["fits"]["1024"] == 16


def test_less_memory_fits_less(monkeypatch: pytest.MonkeyPatch) -> None:
    n_bytes = told(DENSE)["needs"]["host_total_bytes"]
    monkeypatch.setattr(examining, "read_memory", lambda: HostMemory(10**12, n_bytes))
    found = told(DENSE)
    assert found["ok"]  # a server would start, with less
    (problem,) = [it for it in found["problems"] if it["check"] == "memory"]
    assert problem["severity"] == "warning"
    n_slots = int(found["fits"]["served"].partition(" x ")[0])
    assert 1 <= n_slots < 8
    assert n_slots == found["fits"]["1024"]
    monkeypatch.setattr(examining, "read_memory", lambda: HostMemory(10**6, 10**6))
    sentence = error_of(DENSE, check="memory")
    assert "this process may have 1 MB" in sentence
    monkeypatch.setattr(examining, "read_memory", lambda: HostMemory(190 * 10**6, 10**6))
    sentence = error_of(DENSE, check="memory")
    assert "this process may have 190 MB" in sentence
    for part in ("weights", "cells", "compute", "drafter", "processes"):
        assert re.search(rf"[(,] ?{part} [\d.]+ [kMG]B", sentence), sentence


def test_windows_that_are_kept_alone_so_that_all_fits_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = str(windowed(64)), "--ubatch-size", "64"
    least = told(*words, "--no-swa-full")
    assert "swa_full" not in least["model"]  # it is set
    n_bytes = int(least["needs"]["host_total_bytes"] / 0.95) + 1000
    monkeypatch.setattr(examining, "read_memory", lambda: HostMemory(10**12, n_bytes))
    found = told(*words)
    assert found["model"]["swa_full"] == "false"
    assert found["needs"]["host_total_bytes"] == least["needs"]["host_total_bytes"]
    assert found["fits"]["served"].startswith("8 x ")


def test_caches_that_have_no_room_once_they_are_full_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    n_bytes = int(told(DENSE)["needs"]["host_total_bytes"] / 0.95) + 10**6
    monkeypatch.setattr(examining, "read_memory", lambda: HostMemory(10**12, n_bytes))
    found = told(DENSE)
    assert found["fits"]["served"].startswith("8 x ")
    (problem,) = [it for it in found["problems"] if it["check"] == "memory"]
    assert problem["severity"] == "warning"
    assert "with its caches full the server takes" in problem["problem"]


def test_where_memory_is_not_told_only_what_fits_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without /proc/meminfo, as on macOS; a server starts there, and this was an error."""
    monkeypatch.setattr(examining, "read_memory", lambda: HostMemory(0, 0))
    found = told(DENSE, "--parallel", "4")
    assert found["ok"]
    (problem,) = [it for it in found["problems"] if it["check"] == "memory"]
    assert problem["severity"] == "warning"
    assert "does not tell how much memory" in problem["problem"]
    assert found["memory"]["total_bytes"] is found["memory"]["free_bytes"] is None
    assert found["needs"]["for"].startswith("4 x ")
    assert found["needs"]["host_total_bytes"] > 0
    assert "fits" not in found
    code, text = doctor(HYBRID)
    assert code == 0
    assert re.search(r"\n  free +unknown\n", text)


def test_a_model_that_is_missing_or_broken(tmp_path: Path) -> None:
    assert "check the path" in error_of(str(tmp_path / "none.gguf"), check="model")
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(Path(DENSE).read_bytes()[:4000])
    assert "give a complete GGUF file" in error_of(str(broken), check="model")


def test_a_tensor_that_serve_refuses_is_an_error(tmp_path: Path) -> None:
    def change(name: str, tensor: Tensor) -> Tensor:
        wide = np.asarray(tensor[0]).astype(np.float64)
        return (wide, GGMLQuantizationType.F64) if name == "output_norm.weight" else tensor

    path = copied(Path(DENSE), tmp_path / "wide.gguf", change=change)
    assert 'its tensor "output_norm.weight" has the type f64' in error_of(str(path), check="model")


def test_a_chat_template_that_serve_cannot_read_is_a_warning(tmp_path: Path) -> None:
    values = {"tokenizer.chat_template": "{{ messages|no_such }}"}
    found = told(str(copied(Path(DENSE), tmp_path / "odd.gguf", values)))
    (problem,) = found["problems"]
    assert (problem["check"], problem["severity"]) == ("model", "warning")
    assert "a chat of one user's message is refused" in problem["problem"]
    assert "Unknown (built-in) filter 'no_such'" in problem["problem"]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"tokenizer.ggml.eot_token_id": 5000}, "eot_token_id is 5000, which is no token"),
        ({"tokenizer.ggml.eos_token_id": None}, "answers end at token 11, which llama.cpp takes"),
        ({"tokenizer.ggml.add_eos_token": True}, "prompts get the end token, too"),
    ],
)
def test_an_end_token_that_is_none_or_ends_prompts_is_a_warning(
    tmp_path: Path, values: dict[str, int | None], words: str
) -> None:
    """Of the first llama.cpp alone told, and of the others nobody: answers ended at a comma."""
    found = told(str(copied(Path(DENSE), tmp_path / "odd.gguf", values)))
    (problem,) = found["problems"]
    assert (problem["check"], problem["severity"]) == ("model", "warning")
    assert words in problem["problem"]


def test_settings_that_are_wrong_are_told_beside_the_machine() -> None:
    found = told(DENSE, "--parallel", "1000")
    assert [it["check"] for it in found["problems"]] == ["settings"]
    assert "cpu" in found
    assert "model" not in found


@pytest.mark.parametrize(
    ("flags", "check"),
    [
        (["--ctx-size=2147483647"], "settings"),
        (["--config=none.toml"], "settings"),
        (["--store=mysql://host"], "store"),
        (["--rate-counters-url=http://host"], "rate_counters"),
    ],
)
def test_a_setting_that_is_wrong_has_the_exit_code_that_serve_has(
    flags: list[str], check: str
) -> None:
    """Doctor's was 1, by which a script took it for a machine that does not suit."""
    serve = ["serve", "--port", "0", *flags]
    assert main(serve, Terminal(io.StringIO(), io.StringIO())) == doctor(*flags)[0] == 2
    assert error_of(*flags, check=check)
    assert doctor("none.gguf")[0] == 1


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        yield listener.getsockname()[1]


def test_a_port_that_is_taken(taken_port: int) -> None:
    sentence = error_of(DENSE, "--port", str(taken_port), check="address")
    assert f"cannot listen at 127.0.0.1:{taken_port}" in sentence
    sentence = error_of(DENSE, "--metrics-port", str(taken_port), check="metrics")
    assert sentence.endswith(
        "choose another metrics_port or metrics_host, or stop what listens there"
    )
    sentence = error_of(DENSE, "--admin-port", str(taken_port), check="admin")
    assert "choose another --admin-port or --admin-host" in sentence


def test_certificates_that_do_not_belong_together(tmp_path: Path) -> None:
    authority = Authority()
    pairs = [authority.issue().write(tmp_path, name) for name in ("one", "two")]
    (cert, key), (_, other) = pairs
    flags = ("--ssl-cert-file", cert, "--ssl-key-file")
    assert told(DENSE, *flags, key)["ok"]
    assert "are not a certificate and its key" in error_of(DENSE, *flags, other, check="tls")
    assert "cannot be read" in error_of(DENSE, *flags, str(tmp_path / "none"), check="tls")


def test_keys_that_others_can_read(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("acme:0123456789012345678901234567890123456789\n")
    keys.chmod(0o644)
    problems = told(DENSE, "--api-keys-file", str(keys))["problems"]
    (told_of,) = [it for it in problems if it["check"] == "settings"]
    assert "chmod 640" in told_of["problem"]
    keys.chmod(0o640)
    assert told(DENSE, "--api-keys-file", str(keys))["problems"] == [
        it for it in problems if it["check"] != "settings"
    ]


def test_a_store_is_asked_and_not_changed(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    flag = f"--store=sqlite:///{path}"
    assert told(DENSE, flag)["ok"]
    assert not path.exists()
    missing = tmp_path / "nowhere" / "store.db"
    assert "cannot be written; check the path" in error_of(
        DENSE, f"--store=sqlite:///{missing}", check="store"
    )
    folder = f"--store=sqlite:///{tmp_path}"
    assert "is a folder; give the path of a file" in error_of(DENSE, folder, check="store")
    path.write_bytes(b"no database, but long enough to be looked at" * 100)
    assert "the store cannot be used" in error_of(DENSE, flag, check="store")
    path.unlink()
    with contextlib.closing(sqlite3.connect(path)) as database, database:
        database.execute("CREATE TABLE drafthouse_schema (version_num TEXT)")
        database.execute("INSERT INTO drafthouse_schema VALUES ('9999')")
    database.close()
    assert "of a newer release" in error_of(DENSE, flag, check="store")
    path.unlink()
    pepper = tmp_path / "store.db.pepper"
    pepper.write_text("0" * 64)
    pepper.chmod(0o644)
    assert "chmod 600" in error_of(DENSE, flag, check="store")


def test_a_pepper_that_is_missing_or_of_another_store(tmp_path: Path) -> None:
    stores = [tmp_path / "one.db", tmp_path / "two.db"]
    for path in stores:
        url = f"sqlite:///{path}"
        with contextlib.closing(Store.open(url)) as store:
            read_pepper_of(Config(store=url), store)
    flag, pepper = f"--store=sqlite:///{stores[0]}", tmp_path / "one.db.pepper"
    assert told(DENSE, flag)["ok"]
    other = f"--key-pepper-file={tmp_path / 'two.db.pepper'}"
    assert "made with another pepper" in error_of(DENSE, flag, other, check="store")
    gone = f"--key-pepper-file={tmp_path / 'gone'}"
    assert f"{tmp_path / 'gone'} cannot be read" in error_of(DENSE, flag, gone, check="store")
    pepper.unlink()
    assert f"{pepper} cannot be read" in error_of(DENSE, flag, check="store")
    assert not pepper.exists()
    new = f"--store=sqlite:///{tmp_path}/new.db"
    assert told(DENSE, new)["ok"], "both are made at the first start"
    nowhere = f"--key-pepper-file={tmp_path}/none/pepper"
    assert "cannot be made" in error_of(DENSE, new, nowhere, check="store")


def test_a_store_of_another_kind_is_not_asked() -> None:
    assert "a URL of 'mysql'" in error_of(DENSE, "--store=mysql://me:hunter2@host", check="store")


def test_cells_beyond_the_memory_are_told_before_any_is_surveyed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small = HostMemory(10**9, 10**9)
    monkeypatch.setattr(examining, "read_memory", lambda: small)
    monkeypatch.setattr(Surveyor, "__init__", lambda *_: pytest.fail("it was surveyed"))
    for flags in (["--ctx-size=268435456"], ["--parallel=256", "--max-model-len=1048576"]):
        sentence = error_of(DENSE, *flags, check="model")
        assert "268435456 KV cells take 26.8 GB of host memory" in sentence
        assert "this process may have 1 GB, all there is" in sentence
        assert "lower parallel, max_model_len or ctx_size" in sentence


def test_a_draft_model_that_the_server_refuses() -> None:
    sentence = error_of(DENSE, f"--model-draft={HYBRID}", check="model")
    assert HYBRID in sentence
    assert "the draft model has recurrent layers" in sentence


def test_a_small_ctx_size_is_shared_by_the_slots() -> None:
    for flags in ([], ["--max-model-len=900"]):
        found = told(DENSE, "--ctx-size=100", *flags)
        assert found["ok"]
        assert found["fits"]["served"] == "8 x 12"
    assert "has room for 0 tokens" in error_of(DENSE, "--ctx-size=5", check="model")


def test_a_store_that_does_not_answer_shows_no_password(taken_port: int) -> None:
    del taken_port
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    flag = f"--store=postgresql://me:secret@127.0.0.1:{port}/none"
    sentence = error_of(DENSE, flag, check="store")
    assert "the store cannot be used" in sentence
    assert "secret" not in sentence
    assert "store is no URL" in error_of(DENSE, "--store=nothing", check="store")
    flag = f"--store=postgresql://me@127.0.0.1:{port}/none?password=secret"
    sentence = error_of(DENSE, flag, check="store")
    assert "the store cannot be used" in sentence
    assert "secret" not in sentence


@pytest.mark.parametrize("name", ["a#b.db", "a%41.db", "a?b.db", "a b.db"])
def test_the_store_that_is_looked_at_is_the_one_of_its_path(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(b"no database, but long enough to be looked at" * 100)
    sentence = error_of(DENSE, f"--store=sqlite:///{quote(str(path))}", check="store")
    assert "the file: file is not a database" in sentence
    assert [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///:memory:"])
def test_a_store_in_memory_is_none(url: str) -> None:
    sentence = error_of(DENSE, f"--store={url}", check="store")
    assert "store needs a file that outlives the server" in sentence


def test_prompt_lookup_without_a_drafter() -> None:
    assert "prompt_lookup needs a drafter" in error_of(DRAFT, "--prompt-lookup", check="model")
    assert told(DENSE, "--prompt-lookup")["ok"]


def test_synthetic_rates_without_a_drafter() -> None:
    """Both ended with a trace."""
    flags = f"--model={DRAFT}", "--synth-rates=0.5,0.4,0.3,0.2"
    words = "and a draft_type that is not 'none', as set or as found for this model"
    assert error_of(*flags, check="model").endswith(words)
    err = io.StringIO()
    assert main(["serve", "--port=0", *flags], Terminal(io.StringIO(), err)) == 1
    assert words in err.getvalue()


def test_a_journal_s_folder_and_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flag = f"--usage-journal={tmp_path / 'usage'}"
    assert told(DENSE, flag)["ok"]
    assert not (tmp_path / "usage").exists()
    (tmp_path / "file").write_text("")
    assert "cannot be written" in error_of(
        DENSE, f"--usage-journal={tmp_path / 'file'}", check="journal"
    )
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    assert "has 1 kB left" in error_of(DENSE, flag, check="journal")


def test_a_journal_that_another_server_writes(tmp_path: Path) -> None:
    """It said that all was well, and `serve` refused to start."""
    folder, flag = JournalFolder(tmp_path), f"--usage-journal={tmp_path}"
    folder.lock()
    assert "another server writes the usage journal" in error_of(DENSE, flag, check="journal")
    folder.unlock()
    assert told(DENSE, flag)["ok"]
    folder.lock()  # which doctor does not hold
    folder.unlock()


@pytest.mark.usefixtures("ordinary_user")
def test_a_journal_s_folder_of_somebody_else(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert "cannot be written" in error_of(
        DENSE, f"--usage-journal={tmp_path / 'usage'}", check="journal"
    )


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"tokenizer.ggml.model": "rwkv"}, "its tokenizer cannot read a text"),
        ({"tokenizer.ggml.model": "no_vocab", "mimo2.vocab_size": 2048}, "has no tokenizer"),
    ],
)
def test_a_tokenizer_that_serve_refuses_is_an_error(
    values: dict[str, str | float], problem: str, tmp_path: Path
) -> None:
    """It said that all was well."""
    path = copied(Path(DENSE), tmp_path / "model.gguf", values)
    assert problem in error_of(str(path), check="model")


def test_a_training_context_of_0_is_no_error_where_lengths_are_set(tmp_path: Path) -> None:
    """`serve` takes such a model."""
    path = copied(Path(DENSE), tmp_path / "model.gguf", {"mimo2.context_length": 0})
    assert told(str(path), "--max-model-len", "256", "--parallel", "2")["ok"]
