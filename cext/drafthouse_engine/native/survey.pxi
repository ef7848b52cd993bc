# Devices, how the library was built, and what memory an engine would take.

cimport cython
from libc.stdint cimport int32_t, int64_t
from libc.string cimport memset

from drafthouse_engine cimport spec

import os

from drafthouse_engine import errors
from drafthouse_engine.machine import DEVICE_KINDS, Device, Fit, MemoryUse


cdef enum:
    N_DEVICES_MAX = 256


def build_facts():
    """Returns how the library was built, by name.

    Names: llama_cpp (its version or commit), compiler, target, cpu, kernels, patches, backends,
    build_type.
    """
    lines = spec.spec_build_facts().decode("utf-8", "replace").splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line)


def list_devices():
    """Returns what llama.cpp can compute on, the CPU included (`Device`), in its own order."""
    cdef spec.spec_device found[N_DEVICES_MAX]
    cdef size_t n = 0
    cdef int32_t rc
    enter_call()
    with nogil:
        rc = spec.spec_list_devices(found, N_DEVICES_MAX, &n)
    leave_call(rc)
    return tuple(
        Device(
            name=found[i].name.decode("utf-8", "replace"),
            description=found[i].description.decode("utf-8", "replace"),
            kind=DEVICE_KINDS[found[i].kind],
            total_bytes=found[i].total_bytes,
            free_bytes=found[i].free_bytes)
        for i in range(<int>n))


cdef int fill_survey_params(
    spec.spec_model_params * c, const char * path, int32_t n_gpu_layers, bint use_mmap,
    bint load_mtp
) except -1:
    memset(c, 0, sizeof(c[0]))
    c.path = path
    c.n_gpu_layers = n_gpu_layers
    c.use_mmap = use_mmap
    c.vocab_only = False
    c.skip_mtp = not load_mtp
    c.progress = NULL
    c.user = NULL
    c.placed_by = NULL
    return 0


cdef str text_of(const spec.spec_model * model, const char * key):
    cdef char found[256]
    cdef size_t n = 0
    check(spec.spec_model_text(model, key, found, 256, &n))
    return found[:n - 1].decode("utf-8", "replace")


cdef object host_bytes_of(const spec.spec_model * model):
    cdef char found[32]
    cdef size_t n = 0
    check(spec.spec_model_setting(model, b"host_bytes", found, 32, &n))
    return int(found[:n - 1])


@cython.final
cdef class Survey:
    """Tells what memory an engine over these files would take, without taking it.

    Metadata and vocabulary are read, weights are not. Of recurrent targets the states are allocated
    for the time of `measure`.

    Args:
        path: a GGUF file; of a split model, its first part.
        draft_path: the draft model, if there is to be one.
        n_gpu_layers: layers kept on an accelerator; −1 all.
        n_gpu_layers_draft: the same of the draft model; None is n_gpu_layers.
        use_mmap: as the models will be loaded.
        load_mtp: as the target will be loaded.
        placement: as the models will be loaded.
        draft_placement: as the draft model will be loaded; None is placement.

    Raises:
        ModelNotFound: a file does not exist or cannot be read.
        BadModel: a file is not a usable GGUF model.
        Unsupported: a file holds MTP layers alone, without their model.

    Thread:
        Any, one at a time.
    """

    cdef spec.spec_survey * _handle
    cdef readonly str path
    """The target's file."""
    cdef readonly str draft_path
    """The draft model's file; empty when there is none."""
    cdef readonly str arch
    """The target's architecture, such as `qwen35`."""
    cdef readonly str draft_arch
    """The draft model's architecture; empty when there is none."""
    cdef readonly str description
    """One line on the target: architecture, size, quantisation."""
    cdef spec.spec_model_info _facts
    cdef bint _is_busy

    def __cinit__(
        self, path, draft_path=None, *, n_gpu_layers=-1, use_mmap=True, load_mtp=True,
        placement=None, n_gpu_layers_draft=None, draft_placement=None
    ):
        cdef spec.spec_model_params target
        cdef spec.spec_model_params draft
        cdef bint has_draft = draft_path is not None
        cdef PlacementText places = PlacementText(placement)
        cdef PlacementText draft_places = (
            places if draft_placement is None else PlacementText(draft_placement))
        cdef int32_t rc
        self.path = os.fsdecode(path)
        self.draft_path = os.fsdecode(draft_path) if has_draft else ""
        encoded = encode(self.path, "path")
        encoded_draft = encode(self.draft_path, "draft_path")
        n_layers = int32_of(n_gpu_layers, "n_gpu_layers")
        n_layers_draft = n_layers
        if n_gpu_layers_draft is not None:
            n_layers_draft = int32_of(n_gpu_layers_draft, "n_gpu_layers_draft")
        fill_survey_params(&target, encoded, n_layers, bool(use_mmap), bool(load_mtp))
        fill_survey_params(&draft, encoded_draft, n_layers_draft, bool(use_mmap), True)
        places.fill(&target)
        draft_places.fill(&draft)
        enter_call()
        with nogil:
            rc = spec.spec_survey_open(&target, &draft if has_draft else NULL, &self._handle)
        leave_call(rc)
        cdef const spec.spec_model * model = spec.spec_survey_model(self._handle, False)
        check(spec.spec_model_get_info(model, &self._facts))
        self.arch = text_of(model, b"arch")
        self.description = text_of(model, b"desc")
        self.draft_arch = ""
        if has_draft:
            self.draft_arch = text_of(spec.spec_survey_model(self._handle, True), b"arch")

    @property
    def n_params(self):
        """Number of weights of the target."""
        return self._facts.n_params

    @property
    def size_bytes(self):
        """Bytes of the target's weights in the file."""
        return self._facts.size_bytes

    @property
    def host_bytes(self):
        """Bytes of the weights that the CPU computes with, target and draft model together.

        0 where devices have all layers; after `fit`, as they were found to fit.
        """
        self._enter()
        try:
            found = host_bytes_of(spec.spec_survey_model(self._handle, False))
            if self.draft_path:
                found += host_bytes_of(spec.spec_survey_model(self._handle, True))
            return found
        finally:
            self._leave()

    @property
    def n_vocab(self):
        """Tokens of the target's vocabulary."""
        return self._facts.n_vocab

    @property
    def is_recurrent(self):
        """Whether the target keeps recurrent states, in all layers or in some."""
        return self._facts.is_recurrent or self._facts.is_hybrid

    @property
    def n_ctx_train(self):
        """Context length that the target was trained with, in tokens."""
        return self._facts.n_ctx_train

    def __dealloc__(self):
        spec.spec_survey_free(self._handle)

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        self.close()

    cdef int _enter(self) except -1:
        if self._handle is NULL:
            raise errors.Closed("the survey is closed")
        if self._is_busy:
            raise errors.WrongThread("another call of this survey is in flight")
        self._is_busy = True
        enter_call()
        return 0

    cdef int _leave(self) except -1:
        self._is_busy = False
        return leave_call(spec.SPEC_OK)

    def measure(self, params):
        """Returns what an engine of these parameters (`EngineParams`) would take.

        A `MemoryUse` for the host comes first, then one for each device in use.

        Raises:
            EngineError: as `Engine` does, where no such engine can be made.
        """
        cdef spec.spec_engine_params c
        cdef spec.spec_memory_use found[N_DEVICES_MAX]
        cdef size_t n = 0
        cdef int32_t rc
        fill_engine_params(&c, params)
        self._enter()
        with nogil:
            rc = spec.spec_survey_measure(self._handle, &c, found, N_DEVICES_MAX, &n)
        self._is_busy = False
        leave_call(rc)
        names = [device.name for device in list_devices()]
        return tuple(
            MemoryUse(
                device=names[found[i].device] if found[i].device >= 0 else "",
                weights_bytes=found[i].weights_bytes,
                mapped_bytes=found[i].mapped_bytes,
                cells_bytes=found[i].cells_bytes,
                compute_bytes=found[i].compute_bytes,
                draft_cells_bytes=found[i].draft_cells_bytes,
                draft_compute_bytes=found[i].draft_compute_bytes)
            for i in range(<int>n))

    def fit(self, params, *, is_ctx_fixed=False, n_ctx_seq_min=1024, margin_bytes=1 << 30):
        """Returns what fits on the devices (`Fit`), by llama.cpp's own search; None where nothing.

        `Model(…, placed_by=survey)` then loads the target as found, and `measure` tells what an
        engine over it takes.

        Args:
            params: of the engine (`EngineParams`).
            is_ctx_fixed: the cells must be those of params.
            n_ctx_seq_min: least cells of one sequence.
            margin_bytes: left free on each device.

        Raises:
            EngineError: as `Engine` does, where no such engine can be made.
        """
        cdef spec.spec_engine_params c
        cdef spec.spec_fit found
        cdef bint is_fixed = bool(is_ctx_fixed)
        cdef int32_t n_min = int32_of(n_ctx_seq_min, "n_ctx_seq_min")
        cdef int64_t margin = margin_bytes
        cdef int32_t rc
        fill_engine_params(&c, params)
        self._enter()
        with nogil:
            rc = spec.spec_survey_fit(self._handle, &c, is_fixed, n_min, margin, &found)
        self._is_busy = False
        leave_call(rc)
        return Fit(found.n_gpu_layers, found.n_ctx) if found.has_fit else None

    def close(self):
        """Frees what was read. Harmless when done twice.

        Raises:
            WrongThread: a call is in flight.
        """
        if self._is_busy:
            raise errors.WrongThread("a call of this survey is in flight")
        spec.spec_survey_free(self._handle)
        self._handle = NULL
