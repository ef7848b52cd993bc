"""Ctrl-C that stops what runs, wherever it arrives."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

__all__ = ["CtrlC", "stopping_at_ctrl_c"]


@dataclass(slots=True)
class CtrlC:
    """What the user has done with it."""

    is_pressed: bool = False
    """Whether it came, so that the block was stopped."""


@contextmanager
def stopping_at_ctrl_c(stop: Callable[[], None]) -> Iterator[CtrlC]:
    """Has the first Ctrl-C in a block stop what runs there; a second raises KeyboardInterrupt.

    KeyboardInterrupt may come between any two instructions, also where `threading.Condition.wait`
    has just released its lock, out of which comes "cannot release un-acquired lock". So a thread is
    told, by the descriptor of `signal.set_wakeup_fd`, and stops what the main thread waits for.
    Where Ctrl-C is ignored, or outside of the main thread, which alone takes signals, nothing is
    changed.

    Args:
        stop: Called once, on another thread.
    """
    found = CtrlC()
    before = signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()
    if before != signal.default_int_handler or not is_main:
        yield found
        return

    def pressed(number: int, frame: FrameType | None) -> None:
        del number, frame
        found.is_pressed = True
        signal.signal(signal.SIGINT, before)

    def watch() -> None:
        while number := os.read(reader, 1):
            if number[0] == signal.SIGINT:
                stop()
                return

    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    watcher = threading.Thread(target=watch, name="ctrl-c", daemon=True)
    watcher.start()
    before_fd = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGINT, pressed)
    try:
        yield found
    finally:
        signal.signal(signal.SIGINT, before)
        signal.set_wakeup_fd(before_fd)
        os.close(writer)
        watcher.join()
        os.close(reader)
