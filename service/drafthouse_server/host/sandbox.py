"""What takes a process's rights away: it may compute, and answer on the channel that it has.

Linux. Where the kernel or the processor is not known, less is taken away, and that is told.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import resource
import signal
import struct
from typing import NamedTuple

__all__ = ["bound_memory", "drop_rights", "limit_time"]

_PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 4, 38
_SECCOMP_SET_MODE_FILTER, _SECCOMP_FILTER_FLAG_TSYNC = 1, 1
_N_POINTER = 8
_N_OUTPUT_BYTES_MAX = 1 << 16
"""Bytes that the process may print."""


class _Machine(NamedTuple):
    """The numbers that a filter of system calls needs of a kind of processor."""

    audit_arch: int
    """AUDIT_ARCH_* of linux/audit.h."""
    seccomp: int
    """Number of the call `seccomp`."""
    tgkill: int
    """Number of the call `tgkill`, allowed towards the process itself: `abort` uses it."""
    allowed: tuple[int, ...]
    """Numbers of the other calls that are allowed."""


# read write close fstat poll lseek mmap mprotect munmap brk rt_sigaction rt_sigprocmask
# rt_sigreturn mremap sched_yield madvise getitimer setitimer getpid sendto recvfrom exit getrusage
# sigaltstack gettid futex restart_syscall clock_gettime clock_nanosleep exit_group getrandom rseq
_MACHINES = {
    "x86_64": _Machine(
        0xC000003E,
        317,
        234,
        (
            *(0, 1, 3, 5, 7, 8, 9, 10, 11, 12, 13, 14, 15, 25, 24, 28, 36, 38, 39, 44, 45, 60, 98),
            *(131, 186, 202, 219, 228, 230, 231, 318, 334),
        ),
    ),
    # It has ppoll in place of poll.
    "aarch64": _Machine(
        0xC00000B7,
        277,
        131,
        (
            *(63, 64, 57, 80, 73, 62, 222, 226, 215, 214, 134, 135, 139, 216, 124, 233, 102, 103),
            *(172, 206, 207, 93, 165, 132, 178, 98, 128, 113, 115, 94, 278, 293),
        ),
    ),
}
"""From the tables of system calls of the kernel, by `platform.machine()`."""

# Classic BPF: load a word of seccomp_data; jump if equal, over so many; return.
_LOAD, _JUMP_EQUAL, _RETURN = 0x20, 0x15, 0x06
_NUMBER, _ARCH, _FIRST_ARGUMENT = 0, 4, 16  # offsets in seccomp_data
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000


def bound_memory(n_bytes: int) -> None:
    """Allows so many bytes more than this process has now, where the system says what it has."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            n_pages = int(file.read().split()[0])
    except OSError:
        return
    most = n_pages * os.sysconf("SC_PAGE_SIZE") + n_bytes
    _limit(resource.RLIMIT_AS, most)


def _limit(what: int, most: int) -> None:
    """Sets a limit for good; one that is lower already stays, as it cannot be raised."""
    _, hard = resource.getrlimit(what)
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(what, (most, most))


def limit_time(cpu_s: float) -> None:
    """Has the system end this process by SIGPROF after so much processor time; 0: no more."""
    signal.setitimer(signal.ITIMER_PROF, cpu_s)


def drop_rights() -> str:
    """Takes from this process, for good, what work on a text does not need.

    No rights by programs that it starts, no core file, no tracing by others of the same user; and
    no system call but those that compute, take memory, or use what is open already: it opens no
    file and no connection, starts no process, and signals none but itself.

    Returns:
        What could not be done, in a few words; empty when all was.
    """
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_FSIZE, _N_OUTPUT_BYTES_MAX)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    libc = ctypes.CDLL(None, use_errno=True)
    with contextlib.suppress(AttributeError):
        libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
        if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0:
            return _filter_calls(libc)
    return "no_new_privs is not known here"


def _filter_calls(libc: ctypes.CDLL) -> str:
    machine = _MACHINES.get(platform.machine())
    if machine is None or struct.calcsize("P") != _N_POINTER:
        return f"no filter of system calls for {platform.machine()}"
    code = _program(machine, os.getpid())
    buffer = ctypes.create_string_buffer(code, len(code))
    # struct sock_fprog: the number of instructions, and where they are.
    program = struct.pack("@HP", len(code) // 8, ctypes.addressof(buffer))
    failed = libc.syscall(
        machine.seccomp, _SECCOMP_SET_MODE_FILTER, _SECCOMP_FILTER_FLAG_TSYNC, program
    )
    return f"no filter of system calls: {os.strerror(ctypes.get_errno())}" if failed else ""


def _program(machine: _Machine, pid: int) -> bytes:
    """Returns a filter that answers EPERM to all calls but the allowed ones."""
    n = len(machine.allowed)
    refuse = (_RETURN, 0, 0, _ERRNO | errno.EPERM)
    # After the two lines on the processor: a line for each call, three for tgkill, then the ends.
    lines: list[tuple[int, int, int, int]] = [
        (_LOAD, 0, 0, _ARCH),
        (_JUMP_EQUAL, 1, 0, machine.audit_arch),
        refuse,
        (_LOAD, 0, 0, _NUMBER),
        # Each jumps to the last line, over the rest of them and the four that are between.
        *((_JUMP_EQUAL, n + 3 - i, 0, number) for i, number in enumerate(machine.allowed)),
        (_JUMP_EQUAL, 0, 2, machine.tgkill),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_JUMP_EQUAL, 1, 0, pid),
        refuse,
        (_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(struct.pack("HBBI", *line) for line in lines)
