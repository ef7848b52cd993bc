"""Ctrl-C stops what runs in a block, once; afterwards all is as it was."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from drafthouse_server.host.ctrl_c import stopping_at_ctrl_c

pytestmark = pytest.mark.usefixtures("interruptible")


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_the_first_stops_and_the_second_interrupts() -> None:
    stopped = threading.Event()
    with stopping_at_ctrl_c(stopped.set) as ctrl_c:
        press()
        assert stopped.wait(100)
        assert ctrl_c.is_pressed
        with pytest.raises(KeyboardInterrupt):
            press()


def test_without_ctrl_c_nothing_is_stopped_and_all_is_as_before() -> None:
    names = {thread.name for thread in threading.enumerate()}
    n_open = len(os.listdir("/dev/fd"))
    with stopping_at_ctrl_c(pytest.fail) as ctrl_c:
        pass
    assert not ctrl_c.is_pressed
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.set_wakeup_fd(-1) == -1
    assert {thread.name for thread in threading.enumerate()} == names
    assert len(os.listdir("/dev/fd")) == n_open


def test_where_it_is_ignored_it_stays_so() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with stopping_at_ctrl_c(pytest.fail) as ctrl_c:
        press()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    assert not ctrl_c.is_pressed


def test_outside_of_the_main_thread_nothing_is_changed() -> None:
    seen = []

    def run() -> None:
        with stopping_at_ctrl_c(pytest.fail):
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]
