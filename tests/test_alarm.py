"""A test that takes too long fails alone: `tests/support/alarm.py`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

HOOKS = """
import signal

def is_running():
    return signal.getitimer(signal.ITIMER_REAL)[0] > 0

def pytest_runtest_makereport(item, call):
    print(f"{call.when} {item.name}: {is_running()}")

def pytest_runtest_logreport(report):
    print(f"report of {report.when}: {is_running()}")
"""

TESTS = """
import signal
import pytest
from conftest import is_running

@pytest.fixture
def fixture():
    assert is_running()
    yield signal.getitimer(signal.ITIMER_REAL)[0]
    print(f"last phase: {is_running()}")

def test_good(fixture):
    assert 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= fixture

def test_bad(fixture):
    assert not is_running()

@pytest.mark.timeout(0)
def test_endless():
    assert not is_running()

def test_rings():
    signal.raise_signal(signal.SIGALRM)
"""


def test_the_alarm_rings_within_phases_alone(tmp_path: Path) -> None:
    """It rang while a report was written, and of 3,900 tests none was told any more."""
    (tmp_path / "pytest.ini").write_text("[pytest]\ntimeout = 1000\n")
    (tmp_path / "conftest.py").write_text(HOOKS)
    (tmp_path / "test_it.py").write_text(TESTS)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-s", "-p", "no:cacheprovider"),
            *("-p", "pytest_timeout", "-p", "tests.support.alarm", "--rootdir", tmp_path, tmp_path),
        ],
        cwd=ROOT,
        env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "2 failed, 2 passed" in done.stdout
    # pytest-timeout gives up with a test's first failure.
    assert re.findall(r"last phase: (\w+)", done.stdout) == ["True", "False"]
    between = re.findall(r"(?:setup|call|teardown)(?: \w+)?: (True|False)", done.stdout)
    assert between == ["False"] * 24
