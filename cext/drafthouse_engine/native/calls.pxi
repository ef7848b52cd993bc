# Calls in flight, interpreter exit, errors and log lines.

from cpython.mem cimport PyMem_Free, PyMem_Malloc
from cpython.pythread cimport PyThread_get_thread_ident
from libc.stdint cimport int32_t
from posix.unistd cimport pause, usleep

from drafthouse_engine cimport spec

import atexit
import ctypes
import logging
import os
import weakref

from drafthouse_engine import errors


cdef extern from "log_ring.h" nogil:
    enum:
        LOG_RING_BYTES
    void log_ring_put(int32_t level, const char * text, void * user) noexcept
    bint log_ring_is_empty() noexcept
    void log_ring_set_level(int32_t level) noexcept
    size_t log_ring_take(char * out, size_t * n_dropped) noexcept


# Calls in flight and interpreter exit. All of these change under the GIL only.

cdef enum:
    EXIT_WAIT_MS = 10000  # a step takes less; a thread that is stuck must not keep the process

cdef int n_in_flight = 0
cdef bint is_exiting = False
cdef unsigned long exiting_thread = 0

engines = weakref.WeakSet()
decoders = weakref.WeakSet()
embedders = weakref.WeakSet()


cdef void sleep_if_exiting() noexcept:
    if is_exiting and PyThread_get_thread_ident() != exiting_thread:
        with nogil:
            while True:
                pause()


cdef void enter_call() noexcept:
    global n_in_flight
    sleep_if_exiting()
    n_in_flight += 1


cdef int leave_call(int32_t rc, int32_t seq_id=-1) except -1:
    global n_in_flight
    n_in_flight -= 1
    sleep_if_exiting()
    # Before the log is delivered: whoever reads it may make a call that fails in another way.
    error = None if rc >= 0 else error_in(rc, seq_id)
    if not log_ring_is_empty():
        deliver_log()
    if error is not None:
        raise error
    return 0


def _at_exit():
    global is_exiting, exiting_thread
    exiting_thread = PyThread_get_thread_ident()
    is_exiting = True
    cdef int n_waited_ms = 0
    while n_in_flight > 0 and n_waited_ms < EXIT_WAIT_MS:
        with nogil:
            usleep(1000)
        n_waited_ms += 1
    for engine in list(engines):
        (<Engine>engine)._free_if_idle()
    for decoder in list(decoders):
        (<DecoderContext>decoder)._free_if_idle()
    for embedder in list(embedders):
        (<Embedder>embedder)._free_if_idle()


atexit.register(_at_exit)


# Forks.

OMP_PAUSE_SOFT = 1


def _before_fork():
    """Ends the OpenMP threads of the calling thread; its next parallel region starts new ones.

    A child has none of them, and GNU's OpenMP would wait for them there for ever.
    """
    pause = getattr(ctypes.PyDLL(__file__), "omp_pause_resource_all", None)
    if pause is not None:  # OpenMP 5.0
        pause(OMP_PAUSE_SOFT)


def _after_fork_in_child():
    global n_in_flight
    n_in_flight = 0  # the threads of those calls are the parent's


os.register_at_fork(before=_before_fork, after_in_child=_after_fork_in_child)


# Errors.

cdef int check(int32_t rc, int32_t seq_id=-1) except -1:
    if rc < 0:
        raise error_in(rc, seq_id)
    return 0


cdef object error_in(int32_t rc, int32_t seq_id):
    error = error_of(rc)
    if isinstance(error, (errors.SeqBusy, errors.SeqIdle)):
        error.seq_id = seq_id
    if isinstance(error, errors.SnapshotError):
        error.kind = errors.SnapshotKind(rc)
    return error


cdef object error_of(int32_t rc):
    text = spec.spec_last_error().decode("utf-8", "replace")
    name = spec.spec_status_name(rc).decode("ascii")
    kind = errors.BY_STATUS.get(rc, errors.InternalError)
    return kind(text or name)


cdef object file_error(int32_t rc, str path):
    error = error_of(rc)
    if isinstance(error, (errors.ModelNotFound, errors.BadModel)):
        error.path = path
    return error


# The log.

_log_names = {1: logging.DEBUG, 2: logging.INFO, 3: logging.WARNING, 4: logging.ERROR}
_log_sink = None


cdef void deliver_log() noexcept:
    cdef size_t n_dropped = 0
    cdef size_t n_bytes
    cdef char * store = <char *>PyMem_Malloc(LOG_RING_BYTES)
    if store is NULL:
        return
    try:
        n_bytes = log_ring_take(store, &n_dropped)
        records = store[:n_bytes]
    finally:
        PyMem_Free(store)
    for record in records.split(b"\0")[:-1]:
        report_log(_log_names[record[0]], record[1:].decode("utf-8", "replace"))
    if n_dropped > 0:
        report_log(logging.WARNING, f"{n_dropped} log lines were lost")


cdef report_log(int level, str text):
    sink = _log_sink or logging.getLogger("drafthouse_engine.llama").log
    for line in text.splitlines():
        if line.strip():
            sink(level, line)


def set_log(level, callback=None):
    """Chooses which log lines of llama.cpp arrive, and where.

    Lines arrive at the end of the call of this library that caused them, on its thread. At first,
    warnings and errors go to the logger `drafthouse_engine.llama`.

    Args:
        level: the least level, as in `logging`; `logging.CRITICAL` silences llama.cpp.
        callback: called with (level, line); None means the logger `drafthouse_engine.llama`.

    Thread:
        Any; process-wide.
    """
    global _log_sink
    if callback is not None and not callable(callback):
        raise TypeError("callback must be callable or None")
    _log_sink = callback
    log_ring_set_level(min(5, max(1, (int(level) + 9) // 10)))
