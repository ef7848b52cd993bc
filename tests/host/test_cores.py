"""Threads follow the cores that other processes leave."""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafthouse_server.host.cores import CoreTimes, FreeCores, n_threads_beside, read_core_times

TICKS = os.sysconf("SC_CLK_TCK")

STAT = """\
cpu  999 999 999 999 999 999 999 999 0 0
cpu0 100 7 20 5000 30 4 5 600 50 60
cpu1 200 7 30 5000 30 5 6 600 50 60
cpu10 400 7 40 5000 30 6 7 600 50 60
intr 123456789 0 0
ctxt 42
"""


class Machine:
    """A machine of some cores, on which this process and others compute."""

    def __init__(self, n_cores: int) -> None:
        self.now_s = 100.0
        self.all_s = 5000.0
        self.own_s = 70.0
        self.steps_s = 3.0
        self.n_cores = n_cores
        self.is_told = True

    def clock(self) -> float:
        return self.now_s

    def read(self) -> CoreTimes | None:
        cores = frozenset(range(self.n_cores))
        return CoreTimes(self.now_s, self.all_s, self.own_s, cores) if self.is_told else None

    def spend(self, seconds: float, n_own: float, n_others: float, in_steps: float = 1.0) -> None:
        """Lets time pass in which so many cores computed for this process, and for others.

        Args:
            seconds: How much time.
            n_own: Cores.
            n_others: Cores.
            in_steps: Share of the time that was spent in steps.
        """
        self.now_s += seconds
        self.steps_s += seconds * in_steps
        self.own_s += seconds * n_own
        self.all_s += seconds * (n_own + n_others)


def started(machine: Machine, n_threads: int) -> FreeCores:
    cores = FreeCores(n_threads, machine.read, machine.clock)
    assert not cores.look(machine.steps_s)
    assert cores.n_threads == n_threads
    return cores


def written(tmp_path: Path, text: str) -> Path:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/stat").write_text(text, "ascii")
    return tmp_path


def test_only_the_process_s_cores_count_and_nothing_idle_or_stolen(
    tmp_path: Path,
) -> None:
    root = written(tmp_path, STAT)
    found = read_core_times({0, 10}, lambda: 3.5, root)
    assert found is not None
    assert found.at_s == 3.5
    assert found.all_s * TICKS == pytest.approx(100 + 7 + 20 + 4 + 5 + 400 + 7 + 40 + 6 + 7)


@pytest.mark.parametrize("text", ["cpu0 1 2\n", "cpu0 a b c d e f g h\n", "cpux 1 2 3 4 5 6 7\n"])
def test_what_the_kernel_does_not_tell_is_not_known(tmp_path: Path, text: str) -> None:
    assert read_core_times({0}, time.monotonic, tmp_path) is None
    assert read_core_times({0}, time.monotonic, written(tmp_path, text)) is None


def test_this_machine_tells_what_this_process_computes() -> None:
    cores = os.sched_getaffinity(0)
    before = read_core_times(cores, time.monotonic)
    if before is None:
        pytest.skip("this kernel does not tell what its cores compute")
    while time.process_time() < before.own_s + 0.05:
        pass
    after = read_core_times(cores, time.monotonic)
    assert after is not None
    assert after.own_s >= before.own_s + 0.05
    assert after.at_s > before.at_s
    assert after.all_s >= before.all_s


@given(n_left=st.floats(-100, 1000), more=st.floats(0, 100), n_most=st.integers(1, 512))
def test_there_is_always_one_thread_and_more_room_never_gives_fewer(
    n_left: float, more: float, n_most: int
) -> None:
    n = n_threads_beside(n_left, n_most)
    assert 1 <= n <= n_most
    assert n_threads_beside(n_left + more, n_most) >= n
    assert n_threads_beside(n_most, n_most) == n_most


@pytest.mark.parametrize(
    ("n_cores", "n_threads", "n_others", "n_expected"),
    [
        (2, 2, 0.0, 2),
        (2, 2, 0.4, 2),  # the second thread still pays
        (2, 2, 0.5, 1),  # a process that wants a core, and shares it with a thread
        (2, 2, 1.0, 1),
        (2, 2, 2.0, 1),
        (16, 16, 0.5, 15),
        (16, 16, 4.0, 12),
        (16, 8, 8.0, 8),  # hardware threads that share cores are cores enough
        (16, 8, 9.0, 7),
    ],
)
def test_threads_are_as_many_as_find_a_core_each(
    n_cores: int, n_threads: int, n_others: float, n_expected: int
) -> None:
    machine = Machine(n_cores)
    cores = started(machine, n_threads)
    machine.spend(0.3, n_cores - n_others, n_others)
    assert cores.look(machine.steps_s) == (n_expected != n_threads)
    assert cores.n_threads == n_expected


def test_they_come_back_when_the_others_have_gone() -> None:
    machine = Machine(2)
    cores = started(machine, 2)
    machine.spend(0.3, 1.0, 1.0)
    assert cores.look(machine.steps_s)
    for _ in range(3):
        machine.spend(0.3, 1.0, 1.0)
        assert not cores.look(machine.steps_s)
        assert cores.n_threads == 1
    machine.spend(0.3, 1.0, 0.0)
    assert cores.look(machine.steps_s)
    assert cores.n_threads == 2


def test_one_that_takes_all_that_is_left_is_followed_until_each_thread_has_a_core() -> None:
    """Four others on sixteen cores: where a thread shares a core with one, each has half."""
    machine = Machine(16)
    cores = started(machine, 16)
    seen = []
    for _ in range(6):
        n_shared = max(0, cores.n_threads + 4 - 16)
        machine.spend(0.3, cores.n_threads - n_shared / 2, 4 - n_shared / 2)
        cores.look(machine.steps_s)
        seen.append(cores.n_threads)
    assert seen == [14, 13, 12, 12, 12, 12]


def test_steps_of_any_length_are_followed() -> None:
    """Threads that share a core may need seconds for a step; that is when it matters most."""
    machine = Machine(2)
    cores = started(machine, 2)
    machine.spend(3.0, 1.0, 1.0)
    assert cores.look(machine.steps_s)
    assert cores.n_threads == 1


def test_who_takes_what_idle_threads_leave_takes_no_thread() -> None:
    """A process that is nice has a core to itself between two requests, and goes when one comes."""
    machine = Machine(2)
    cores = started(machine, 2)
    for _ in range(10):
        machine.spend(0.3, 1.0, 1.0, in_steps=0.5)
        assert not cores.look(machine.steps_s)
    assert cores.n_threads == 2


def changes(machine: Machine, cores: FreeCores, seconds: float, taken: list[float]) -> list[float]:
    """Lets threads compute beside others; returns when their number changed.

    Args:
        machine: They run there.
        cores: Theirs.
        seconds: How long.
        taken: Cores that others take, by the number of threads.
    """
    begun_s, found = machine.now_s, []
    while machine.now_s < begun_s + seconds:
        n_others = taken[cores.n_threads]
        machine.spend(0.25, machine.n_cores - n_others, n_others)
        if cores.look(machine.steps_s):
            found.append(machine.now_s - begun_s)
    return found


def test_a_process_that_gives_way_is_found_out_and_costs_no_thread() -> None:
    """It takes a core while one thread leaves it, and a tenth of one beside two."""
    machine = Machine(2)
    cores = started(machine, 2)
    machine.spend(0.3, 1.0, 1.0)
    assert cores.look(machine.steps_s)
    assert changes(machine, cores, 60, [0, 1.0, 0.1]) == [1.0]
    assert cores.n_threads == 2


def test_all_threads_of_a_large_machine_come_back_one_after_the_other() -> None:
    machine = Machine(16)
    cores = started(machine, 16)
    machine.spend(0.3, 12.0, 4.0)
    assert cores.look(machine.steps_s)
    assert cores.n_threads == 12
    took = [16.0 - n if n < 16 else 0.3 for n in range(17)]
    assert changes(machine, cores, 60, took) == [1.0, 1.25, 1.5, 1.75]
    assert cores.n_threads == 16


def test_one_that_does_not_give_way_is_tried_less_and_less_often() -> None:
    machine = Machine(2)
    cores = started(machine, 2)
    found = changes(machine, cores, 3600, [0, 1.0, 0.5])
    assert found[:8] == [0.25, 1.25, 1.5, 3.5, 3.75, 7.75, 8.0, 16.0]
    tries = found[1::2]
    assert max(later - sooner for sooner, later in itertools.pairwise(tries)) == 64.25
    assert len(tries) < 70


def test_nothing_is_read_again_within_a_quarter_of_a_second() -> None:
    machine = Machine(2)
    cores = started(machine, 2)
    machine.spend(0.2, 1.0, 1.0)
    assert not cores.look(machine.steps_s)
    assert cores.n_threads == 2
    machine.spend(0.1, 1.0, 1.0)
    assert cores.look(machine.steps_s)


def test_what_this_process_computes_itself_takes_no_thread() -> None:
    machine = Machine(2)
    cores = started(machine, 2)
    machine.spend(0.3, 2.0, 0.0)
    assert not cores.look(machine.steps_s)
    machine.spend(0.3, 2.5, -0.5)  # ticks lag behind
    assert not cores.look(machine.steps_s)
    assert cores.n_threads == 2


def test_without_word_of_the_kernel_nothing_changes() -> None:
    machine = Machine(2)
    cores = started(machine, 2)
    machine.is_told = False
    machine.spend(0.3, 1.0, 1.0)
    assert not cores.look(machine.steps_s)
    machine.is_told = True
    machine.spend(0.3, 1.0, 1.0)
    assert not cores.look(machine.steps_s)  # the first word after that tells of no time
    machine.spend(0.3, 1.0, 1.0)
    assert cores.look(machine.steps_s)


def test_a_clock_that_goes_back_changes_nothing() -> None:
    machine = Machine(2)
    cores = FreeCores(2, machine.read, itertools.count(200.0).__next__)
    assert not cores.look(machine.steps_s)
    machine.spend(-0.5, 1.0, -3.0)
    assert not cores.look(machine.steps_s)
    assert cores.n_threads == 2


def test_threads_follow_the_cores_that_a_container_has_now() -> None:
    """Two threads shared the one core that was left, each waiting for the other at every layer."""
    machine = Machine(2)
    cores = started(machine, 2)
    machine.spend(1.0, 2.0, 0.0)
    assert not cores.look(machine.steps_s)
    # The other core's times are not among those that are read now.
    machine.n_cores, machine.all_s = 1, 3000.0
    machine.spend(0.5, 1.0, 0.0)
    assert not cores.look(machine.steps_s)
    for _ in range(2):
        machine.spend(0.5, 1.0, 0.0)
        cores.look(machine.steps_s)
        assert cores.n_threads == 1
    machine.n_cores, machine.all_s = 2, 9000.0
    for _ in range(4):
        machine.spend(1.0, 1.0, 0.0)
        cores.look(machine.steps_s)
    assert cores.n_threads == 2
