# Plans and results of a step: Python values to C and back.

cimport cython
from cpython.buffer cimport PyBuffer_FillInfo
from cpython.long cimport PyLong_AsLong
from cpython.mem cimport PyMem_Calloc, PyMem_Free
from libc.stdint cimport INT32_MAX, INT32_MIN, INT64_MAX, int32_t, uint64_t

from drafthouse_engine cimport spec

from drafthouse_engine import errors
from drafthouse_engine.moves import Moved
from drafthouse_engine.step import RESULT_DTYPE, StepResult, StepRows


@cython.final
cdef class Numbers:
    """Lists of integers of 32 bits, one after the other in C memory, held with this object."""

    cdef int32_t * data

    def __cinit__(self, *lists):
        # The lengths are read once: an integer's own `__index__` may change a list.
        lengths = [len(values) for values in lists]
        cdef Py_ssize_t n_copied = 0
        self.data = <int32_t *>PyMem_Calloc(sum(lengths) + 1, sizeof(int32_t))
        if self.data is NULL:
            raise MemoryError
        for values, n in zip(lists, lengths):
            copy_numbers(values, n, self.data + n_copied)
            n_copied += n

    def __dealloc__(self):
        PyMem_Free(self.data)


cdef int copy_numbers(list values, Py_ssize_t n, int32_t * out) except -1:
    """Copies n integers of 32 bits."""
    cdef Py_ssize_t i
    cdef long value
    for i in range(n):
        try:
            value = PyLong_AsLong(values[i])  # takes no fraction
        except OverflowError:
            value = INT64_MAX
        if not INT32_MIN <= value <= INT32_MAX:
            raise errors.InvalidArgument(f"{values[i]} does not fit 32 bits")
        out[i] = <int32_t>value
    return 0


cdef void * room_of(int32_t i, size_t n, void * packed) noexcept nogil:
    if is_exiting:
        return NULL
    with gil:
        return (<PackedMoves>packed).room(i, n)


@cython.final
cdef class Room:
    """Memory of one snapshot, read only for Python; the next one gets its pages."""

    cdef void * data
    cdef size_t n

    def __cinit__(self, size_t n):
        self.data = spec.spec_room_take(n)
        self.n = n
        if self.data is NULL:
            raise MemoryError

    def __getbuffer__(self, Py_buffer * view, int flags):
        PyBuffer_FillInfo(view, self, self.data, <Py_ssize_t>self.n, True, flags)

    def __dealloc__(self):
        with nogil:
            spec.spec_room_give(self.data, self.n)


cdef Buffer snapshot_buffer(source):
    """Holds a snapshot; a copy where others may write to it between its check and its use."""
    owner = source.obj if isinstance(source, memoryview) else source
    if isinstance(owner, (bytes, Room)):
        return Buffer(source)
    return Buffer(memoryview(source).tobytes())


@cython.final
cdef class PackedMoves:
    """What a plan does before its entries, in C's terms, and what comes of it."""

    cdef list saves
    cdef list swap_outs
    cdef list rooms  # of the snapshots that were written so far, by place in `saves`
    cdef list preempted  # samplers to be filled in, by place in `swap_outs`
    cdef list samplers  # of the starts; None: the snapshot's own
    cdef list buffers  # of the starts' snapshots
    cdef Numbers numbers  # saves, swap_outs, frees, drafts_off, drafts_on
    cdef int32_t n_frees
    cdef int32_t n_drafts_off
    cdef int32_t n_drafts_on
    cdef Py_ssize_t n_starts
    cdef Py_ssize_t n_taken
    cdef spec.spec_start * starts

    def __cinit__(self, moves):
        frees = list(moves.frees)
        drafts_off, drafts_on = list(moves.drafts_off), list(moves.drafts_on)
        starts = list(moves.starts)
        self.saves, self.swap_outs = list(moves.saves), list(moves.swap_outs)
        self.rooms = [None] * len(self.saves)
        self.numbers = Numbers(self.saves, self.swap_outs, frees, drafts_off, drafts_on)
        self.n_frees = <int32_t>len(frees)
        self.n_drafts_off = <int32_t>len(drafts_off)
        self.n_drafts_on = <int32_t>len(drafts_on)
        self.samplers = [start.sampler for start in starts]
        self.buffers = [None if start.snapshot is None else snapshot_buffer(start.snapshot)
                        for start in starts]
        self.n_starts = len(starts)
        self.starts = <spec.spec_start *>PyMem_Calloc(self.n_starts + 1, sizeof(spec.spec_start))
        if self.starts is NULL:
            raise MemoryError
        for i, start in enumerate(starts):
            self._fill(&self.starts[i], start, self.buffers[i])

    def __dealloc__(self):
        PyMem_Free(self.starts)

    cdef int _fill(self, spec.spec_start * c, start, Buffer snapshot) except -1:
        if not 0 <= start.tag < 1 << 64:
            raise errors.InvalidArgument(f"tag is {start.tag}, which does not fit 64 bits")
        if start.sampler is not None and not isinstance(start.sampler, Sampler):
            kind = type(start.sampler).__name__
            raise errors.InvalidArgument(f"sampler must be Sampler or None, not {kind}")
        c.seq_id = int32_of(start.seq_id, "seq_id")
        c.n_kept = int32_of(start.n_kept, "n_kept")
        c.source = -1 if start.source is None else int32_of(start.source, "source")
        c.is_resumed = start.is_resumed
        c.tag = start.tag
        if snapshot is not None:
            c.snapshot = snapshot.view.buf
            c.n_snapshot = <size_t>snapshot.view.len
        return 0

    cdef int take(self, Model target, dict params, spec.spec_plan * plan) except -1:
        """Writes the moves into a plan and takes the starts' samplers; `settle` must follow."""
        cdef Sampler sampler
        cdef Py_ssize_t i
        self.preempted = [
            Sampler(target, params.get(seq_id), _is_preempted=True) for seq_id in self.swap_outs]
        for i in range(self.n_starts):
            sampler = self.samplers[i]
            if sampler is not None:
                if sampler._handle is NULL:
                    raise errors.InvalidArgument("a sampler that was used or closed before")
                self.starts[i].sampler = sampler._take(target)
            self.n_taken += 1
        plan.saves = self.numbers.data
        plan.n_saves = <int32_t>len(self.saves)
        plan.room = room_of
        plan.room_user = <void *>self
        plan.swap_outs = plan.saves + plan.n_saves
        plan.n_swap_outs = <int32_t>len(self.swap_outs)
        plan.frees = plan.swap_outs + plan.n_swap_outs
        plan.n_frees = self.n_frees
        plan.starts = self.starts
        plan.n_starts = <int32_t>self.n_starts
        plan.drafts_off = plan.frees + plan.n_frees
        plan.n_drafts_off = self.n_drafts_off
        plan.drafts_on = plan.drafts_off + plan.n_drafts_off
        plan.n_drafts_on = self.n_drafts_on
        return 0

    cdef void * room(self, int32_t i, size_t n) noexcept:
        """Makes the room that a snapshot is written into; NULL: there is no memory."""
        try:
            room = Room(n)
            self.rooms[i] = room
            return (<Room>room).data
        except BaseException:
            return NULL

    cdef void settle(self, dict params, const spec.spec_result * r) noexcept:
        """Notes whose the samplers are after the step; r is NULL where the plan was refused."""
        cdef Py_ssize_t i
        cdef Sampler sampler
        for i in range(self.n_taken):
            sampler = self.samplers[i]
            if sampler is not None:
                sampler._put(self.starts[i].sampler if r is NULL else NULL)
            if r is not NULL:
                params[self.starts[i].seq_id] = None if sampler is None else sampler.params
        if r is not NULL:
            for i in range(len(self.preempted)):
                (<Sampler>self.preempted[i])._handle = r.samplers[i]

    cdef object result(self, const spec.spec_result * r):
        cdef Py_ssize_t i
        snapshots = {
            self.saves[i]: memoryview(self.rooms[i])
            for i in range(len(self.saves)) if r.n_saved[i] > 0}
        samplers = {
            self.swap_outs[i]: self.preempted[i]
            for i in range(len(self.swap_outs)) if r.samplers[i] is not NULL}
        return Moved(snapshots, samplers, [r.n_kept[i] for i in range(self.n_starts)])


cdef object rows_of(const spec.spec_result * r, bint has_logprobs, moved):
    cdef int32_t i
    cdef const spec.spec_result_entry * e
    entries = []
    for i in range(r.n_entries):
        e = &r.entries[i]
        entries.append((
            e.seq_id, e.status, e.n_past, e.token_offset, e.n_tokens, e.n_drafted, e.n_accepted,
            e.flags, e.n_mask_work))
    tokens = [r.tokens[i] for i in range(r.n_tokens)]
    logprobs = [r.logprobs[i] for i in range(r.n_tokens)] if has_logprobs else []
    return StepRows(
        entries, tokens, logprobs, r.n_batch_tokens, r.n_steps,
        r.t_draft_us, r.t_decode_us, r.t_process_us, r.t_sample_us, r.t_total_us, moved)


cdef object result_of(const spec.spec_result * r, moved):
    return StepResult(
        array_of(r.entries, r.n_entries, RESULT_DTYPE), array_of(r.tokens, r.n_tokens, _int32),
        array_of(r.logprobs, r.n_tokens, _float32), r.n_batch_tokens,
        r.t_draft_us, r.t_decode_us, r.t_process_us, r.t_sample_us, r.t_total_us,
        array_of(r.top_tokens, r.n_tokens * r.n_top, _int32).reshape(r.n_tokens, r.n_top),
        array_of(r.top_logprobs, r.n_tokens * r.n_top, _float32).reshape(r.n_tokens, r.n_top),
        r.n_steps, moved)
