# Where weights lie, as spec.h has it.

cimport cython

from drafthouse_engine cimport spec

from drafthouse_engine.devices import LOAD_MODES, SPLIT_MODES, Placement


@cython.final
cdef class PlacementText:
    """A `Placement` in C, valid as long as this object lives."""

    cdef object places
    cdef bytes devices
    cdef bytes overrides
    cdef float shares[16]

    def __cinit__(self, placement):
        self.places = Placement() if placement is None else placement
        if not isinstance(self.places, Placement):
            raise TypeError(f"placement must be Placement, not {type(placement).__name__}")
        names = self.places.devices
        self.devices = encode("" if names is None else ",".join(names) or "none", "devices")
        self.overrides = encode(self.places.override_tensor, "override_tensor")
        for i, share in enumerate(self.places.tensor_split):
            self.shares[i] = share

    cdef int fill(self, spec.spec_model_params * c) except -1:
        c.devices = self.devices
        c.split_mode = SPLIT_MODES.index(self.places.split_mode)
        c.main_gpu = self.places.main_gpu
        c.tensor_split = self.shares
        c.n_tensor_split = len(self.places.tensor_split)
        c.override_tensor = self.overrides
        c.n_cpu_moe = self.places.n_cpu_moe
        c.load_mode = LOAD_MODES.index(self.places.load_mode)
        return 0
