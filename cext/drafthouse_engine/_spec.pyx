# cython: language_level=3, embedsignature=False
"""Models, samplers and engines of llama.cpp over `spec.h`.

Rules of this module
1. Every call that can take time runs between `enter_call` and `leave_call`, without the GIL.
2. `check` is the only place that turns a status into an exception.
3. Handles of models are counted: a model that is closed while something uses it is freed by its
   last user.
4. No callback takes the GIL on a foreign thread: log lines go through `log_ring.h`; the progress
   callback runs on the thread that loads, the room for snapshots is made on the one that steps.
5. When the interpreter exits, calls in flight are waited for, engines are freed, and a daemon
   thread that comes back or calls again sleeps for ever instead of failing in a dying interpreter.
"""

from drafthouse_engine cimport spec

import os

from drafthouse_engine import errors
from drafthouse_engine.cores import Cores
from drafthouse_engine.devices import (
    CACHE_TYPES,
    DEVICES_MAX,
    LOAD_MODES,
    NUMA_STRATEGIES,
    ROPE_SCALINGS,
    SPLIT_MODES,
)
from drafthouse_engine.embedding import POOLINGS
from drafthouse_engine.machine import DEVICE_KINDS
from drafthouse_engine.options import DRAFT_TYPES, SAMPLERS
from drafthouse_engine.step import PLAN_DTYPE, RESULT_DTYPE

__all__ = [
    "ChatTemplate",
    "DecoderContext",
    "Embedder",
    "Engine",
    "Model",
    "Sampler",
    "Survey",
    "abi_version",
    "add_rpc_server",
    "apply_lm_head",
    "build_facts",
    "build_version",
    "check_grammar",
    "embed_tokens",
    "find_cores",
    "grammar_accepts",
    "int32_array",
    "list_devices",
    "on_abort",
    "rpc_version",
    "set_log",
    "set_numa",
]

# One module, in files by class. Modules of their own would each need llama.cpp: a copy each, whose
# backends, log and locks are not the others'; or a shared library beside them, which wheels and
# editable installs must find; or several initialisers in one file, which no importer looks for.
# And calls in flight are counted in one place, for the interpreter's exit.
include "native/calls.pxi"
include "native/conversions.pxi"
include "native/placement.pxi"
include "native/survey.pxi"
include "native/model.pxi"
include "native/sampler.pxi"
include "native/plan.pxi"
include "native/engine.pxi"
include "native/decoder.pxi"
include "native/embedder.pxi"


# The end of the process.

def on_abort(words, exit_code=None):
    """Says what the process says, and how it ends, where llama.cpp or ggml gives up.

    Their assertions end a process, and nothing can catch that: their line goes to standard error,
    then these words, another line.

    Args:
        words: for whoever reads it; cut to 1,023 bytes. Empty: llama.cpp's line alone.
        exit_code: with which it ends, at once, [0, 255], also by a fault such as SIGSEGV: while a
            model is loaded, which may be damaged. None: by SIGABRT, and a fault by its signal.

    Raises:
        InvalidArgument: the words have a zero byte, or the code is out of range.
    """
    if exit_code is not None and not 0 <= exit_code <= 255:
        raise errors.InvalidArgument(f"exit_code is {exit_code}; expected 0 to 255, or None")
    encoded = encode(words, "words")
    spec.spec_on_abort(encoded, -1 if exit_code is None else exit_code)


# Devices.

def add_rpc_server(endpoint):
    """Adds the devices of one RPC server; `add_rpc_servers` asks before whether it answers."""
    encoded = encode(endpoint, "endpoint")
    cdef const char * text = encoded
    cdef int32_t rc
    enter_call()
    with nogil:
        rc = spec.spec_add_rpc_server(text)
    leave_call(rc)


def rpc_version():
    """Returns major and minor version of the RPC protocol; None where the build has none."""
    cdef int32_t major = 0
    cdef int32_t minor = 0
    if spec.spec_rpc_version(&major, &minor) != spec.SPEC_OK:
        return None
    return major, minor


def set_numa(strategy):
    """Chooses where threads run on a machine with several memory nodes, for the whole process.

    Args:
        strategy: one of `NUMA_STRATEGIES`; before the first model is loaded.

    Returns:
        Whether llama.cpp sees several nodes; without, the strategy changes nothing.

    Raises:
        InvalidArgument: there is no such strategy.
        BadPlan: another one was chosen before.
    """
    cdef int32_t n_nodes = 1
    if strategy not in NUMA_STRATEGIES:
        raise errors.InvalidArgument(
            f"strategy is {strategy!r}; expected one of {', '.join(NUMA_STRATEGIES)}")
    enter_call()
    leave_call(spec.spec_set_numa(NUMA_STRATEGIES.index(strategy), &n_nodes))
    return n_nodes > 1


# The library that this was linked with.

def abi_version():
    """Returns the version of the C boundary (`SPEC_ABI_VERSION`)."""
    return spec.spec_abi_version()


def build_version():
    """Returns the version of llama.cpp and the CPU features that it was built for."""
    return spec.spec_build_info().decode("utf-8", "replace")


def find_cores(*, root="", cpus=""):
    """Returns what this process may compute on: affinity mask, cgroups' quota, cores.

    Args:
        root: Put before /proc and /sys, by tests.
        cpus: Hardware threads, as "0-3,8", in place of the calling thread's affinity mask.
    """
    cdef spec.spec_cores found
    cdef bytes c_root = os.fsencode(root)
    cdef bytes c_cpus = cpus.encode("ascii")
    check(spec.spec_find_cores(c_root, c_cpus, &found))
    return Cores(found.n_cores, found.n_physical, found.n_logical, found.quota)


cdef int check_layout() except -1:
    cdef spec.spec_plan_entry p
    cdef spec.spec_result_entry r
    plan = (
        <char *>&p.seq_id - <char *>&p,
        <char *>&p.n_past - <char *>&p,
        <char *>&p.token_offset - <char *>&p,
        <char *>&p.n_tokens - <char *>&p,
        <char *>&p.n_draft - <char *>&p,
        <char *>&p.is_output - <char *>&p,
        sizeof(p),
    )
    result = (
        <char *>&r.seq_id - <char *>&r,
        <char *>&r.status - <char *>&r,
        <char *>&r.n_past - <char *>&r,
        <char *>&r.token_offset - <char *>&r,
        <char *>&r.n_tokens - <char *>&r,
        <char *>&r.n_drafted - <char *>&r,
        <char *>&r.n_accepted - <char *>&r,
        <char *>&r.flags - <char *>&r,
        <char *>&r.n_mask_work - <char *>&r,
        sizeof(r),
    )
    for dtype, offsets in ((PLAN_DTYPE, plan), (RESULT_DTYPE, result)):
        if (*[field[1] for field in dtype.fields.values()], dtype.itemsize) != offsets:
            raise ImportError("drafthouse_engine/step.py does not fit spec.h")
    if (
        sizeof(spec.spec_token) != 16
        or sizeof(spec.spec_draft_request) != 16
        or sizeof(spec.spec_logit_bias) != BIAS_DTYPE.itemsize
    ):
        raise ImportError("_spec.pyx does not fit spec.h")
    return 0


cdef int check_library() except -1:
    if spec.spec_abi_version() != spec.SPEC_ABI_VERSION:
        raise ImportError(
            f"the library has ABI {spec.spec_abi_version()}, the extension was compiled for "
            f"{spec.SPEC_ABI_VERSION}; build both again")
    for status in errors.Status:
        if spec.spec_status_name(status).decode("ascii") != status.name:
            raise ImportError(f"drafthouse_engine/errors.py does not fit spec.h at {status.name}")
    if (
        len(DRAFT_TYPES) != spec.SPEC_DRAFT_COUNT
        or len(SAMPLERS) != spec.SPEC_SAMPLER_COUNT
        or len(POOLINGS) != spec.SPEC_POOLING_COUNT
    ):
        raise ImportError("drafthouse_engine/options.py does not fit spec.h")
    if (
        len(CACHE_TYPES) != spec.SPEC_CACHE_COUNT
        or len(LOAD_MODES) != spec.SPEC_LOAD_COUNT
        or len(NUMA_STRATEGIES) != spec.SPEC_NUMA_COUNT
        or len(ROPE_SCALINGS) != spec.SPEC_ROPE_COUNT
        or len(SPLIT_MODES) != spec.SPEC_SPLIT_COUNT
        or DEVICES_MAX != spec.SPEC_DEVICES_MAX
    ):
        raise ImportError("drafthouse_engine/devices.py does not fit spec.h")
    return check_layout()


check_library()
spec.spec_set_log(log_ring_put, NULL)
