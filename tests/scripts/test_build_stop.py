"""`make build`, stopped: what it has started ends with it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# A signal that is ignored where the tests are started (nohup, a background shell) is inherited.
SCRIPT = """
import pathlib, signal, sys
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.path.insert(0, sys.argv[1])
import build
build.LOG = pathlib.Path(sys.argv[2]) / "build.log"
build.stop_on_signals()
build.run(["sh", "-c", "sleep 60 & echo compiler $!; wait"], build.Progress(5, "engine"))
"""


def is_running(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except FileNotFoundError:
        return False
    return stat.rsplit(")", 1)[1].split()[0] != "Z"


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_compilers_end_with_a_build_that_is_stopped(tmp_path: Path, stop: signal.Signals) -> None:
    command = [sys.executable, "-c", SCRIPT, str(ROOT / "scripts"), str(tmp_path)]
    log = tmp_path / "build.log"
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as building:
        end = time.monotonic() + 50
        while not (log.exists() and log.read_text(encoding="utf-8").endswith("\n")):
            assert time.monotonic() < end, "it did not start"
            time.sleep(0.02)
        compiler = int(log.read_text(encoding="utf-8").split()[1])
        assert is_running(compiler)
        building.send_signal(stop)
        assert building.wait(50) != 0
    end = time.monotonic() + 25
    while is_running(compiler) and time.monotonic() < end:
        time.sleep(0.02)
    assert not is_running(compiler)
