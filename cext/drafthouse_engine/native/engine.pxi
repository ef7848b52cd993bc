# Engines.

cimport cython
from cpython.bytearray cimport PyByteArray_FromStringAndSize
from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.pythread cimport PyThread_get_thread_ident
from libc.stdint cimport int32_t
from libc.string cimport memset

from drafthouse_engine cimport spec
from libcpp cimport bool as c_bool

import numpy as np

from drafthouse_engine import errors
from drafthouse_engine.devices import CACHE_TYPES, ROPE_SCALINGS, CacheParams, RopeParams
from drafthouse_engine.limits import DraftWork, EngineLimits
from drafthouse_engine.options import DRAFT_TYPES, EngineParams
from drafthouse_engine.step import DRAFT_DTYPE, PLAN_DTYPE


cdef int fill_engine_params(spec.spec_engine_params * c, params) except -1:
    spec.spec_engine_default_params(c)
    c.draft_type = DRAFT_TYPES.index(params.draft_type)
    c.n_ctx = params.n_ctx
    c.n_ctx_seq = params.n_ctx_seq
    c.n_batch = params.n_batch
    c.n_ubatch = params.n_ubatch
    c.n_seq_max = params.n_seq_max
    c.n_draft_max = params.n_draft_max
    c.n_rs_seq = params.n_rs_seq
    c.n_threads = params.n_threads
    c.n_threads_batch = params.n_threads_batch
    c.n_wide = params.n_wide
    c.p_min = params.p_min
    c.probabilistic = params.probabilistic
    c.kv_unified = params.kv_unified
    c.flash_attention = params.flash_attention
    c.flash_forced = params.flash_forced
    c.n_min = params.n_min
    c.exact = params.exact
    c.type_k = CACHE_TYPES.index(params.cache.type_k)
    c.type_v = CACHE_TYPES.index(params.cache.type_v)
    c.type_k_draft = CACHE_TYPES.index(params.cache.type_k_draft)
    c.type_v_draft = CACHE_TYPES.index(params.cache.type_v_draft)
    c.swa_small = not params.cache.swa_full
    c.rope_scaling = ROPE_SCALINGS.index(params.rope.scaling)
    c.rope_freq_base = params.rope.freq_base
    c.rope_freq_scale = params.rope.freq_scale
    c.yarn_orig_ctx = params.rope.yarn_orig_ctx
    c.yarn_ext_factor = params.rope.yarn_ext_factor
    c.yarn_attn_factor = params.rope.yarn_attn_factor
    c.yarn_beta_slow = params.rope.yarn_beta_slow
    c.yarn_beta_fast = params.rope.yarn_beta_fast
    return 0


def default_engine_params():
    """Returns the defaults of `spec.h`; those of `EngineParams` are the same."""
    cdef spec.spec_engine_params c
    spec.spec_engine_default_params(&c)
    return EngineParams(
        draft_type=DRAFT_TYPES[c.draft_type],
        n_ctx=c.n_ctx,
        n_ctx_seq=c.n_ctx_seq,
        n_batch=c.n_batch,
        n_ubatch=c.n_ubatch,
        n_seq_max=c.n_seq_max,
        n_draft_max=c.n_draft_max,
        n_rs_seq=c.n_rs_seq,
        n_threads=c.n_threads,
        n_threads_batch=c.n_threads_batch,
        n_wide=c.n_wide,
        p_min=c.p_min,
        probabilistic=c.probabilistic,
        kv_unified=c.kv_unified,
        flash_attention=c.flash_attention,
        flash_forced=c.flash_forced,
        n_min=c.n_min,
        exact=c.exact,
        cache=CacheParams(
            type_k=CACHE_TYPES[c.type_k],
            type_v=CACHE_TYPES[c.type_v],
            type_k_draft=CACHE_TYPES[c.type_k_draft],
            type_v_draft=CACHE_TYPES[c.type_v_draft],
            swa_full=not c.swa_small,
        ),
        rope=RopeParams(
            scaling=ROPE_SCALINGS[c.rope_scaling],
            freq_base=c.rope_freq_base,
            freq_scale=c.rope_freq_scale,
            yarn_orig_ctx=c.yarn_orig_ctx,
            yarn_ext_factor=c.yarn_ext_factor,
            yarn_attn_factor=c.yarn_attn_factor,
            yarn_beta_slow=c.yarn_beta_slow,
            yarn_beta_fast=c.yarn_beta_fast,
        ),
    )


@cython.final
@cython.no_gc_clear
cdef class Engine:
    """The contexts of a target and its draft, and up to n_seq_max sequences.

    The engine keeps its models alive. An engine that is dropped without `close` is freed silently.

    Args:
        target: the model whose tokens are generated.
        draft: the draft model of the types eagle3, simple, dflash and dspark; None for all others.
        params: None means the defaults of `EngineParams`.

    Raises:
        NoMtpHeads: draft_type is mtp and the target has no MTP heads.
        NotEagle3, NotDflash, NotDspark: the draft model is of another kind than draft_type.
        IncompatibleDraft: the draft model does not fit the target.
        InvalidArgument: the parameters do not fit the models.
        OutOfMemory: memory could not be allocated.

    Thread:
        One thread owns an engine: the one that made it, until another calls `bind_thread`. Every
        other call from another thread raises WrongThread, except `close` while no call is in
        flight.
    """

    cdef spec.spec_engine * _handle
    cdef readonly Model target
    """The target model."""
    cdef readonly Model draft
    """The draft model, if any."""
    cdef readonly object params
    """The parameters that it was made with."""
    cdef readonly object limits
    """What the engine offers (`EngineLimits`)."""
    cdef readonly unsigned long owner
    """Identifier of the owning thread, as `threading.get_ident` gives it."""
    cdef dict _sampler_params
    cdef bint _is_busy
    cdef int _n_models_held
    cdef object __weakref__

    def __cinit__(self, Model target not None, Model draft=None, params=None):
        cdef spec.spec_engine_params c
        cdef float synth_rates[256]
        cdef int32_t i
        self.params = EngineParams() if params is None else params
        if not isinstance(self.params, EngineParams):
            raise TypeError(f"params must be EngineParams, not {type(params).__name__}")
        fill_engine_params(&c, self.params)
        self._sampler_params = {}
        for i in range(len(self.params.synth_rates)):
            synth_rates[i] = self.params.synth_rates[i]
        c.synth_rates = synth_rates
        c.n_synth_rates = len(self.params.synth_rates)
        self.owner = PyThread_get_thread_ident()
        self._hold(target, draft)
        self._init(&c)
        self.limits = self._read_limits()
        engines.add(self)

    cdef int _hold(self, Model target, Model draft) except -1:
        target._use()
        self.target = target
        self._n_models_held = 1
        if draft is not None:
            draft._use()
            self.draft = draft
            self._n_models_held = 2
        return 0

    cdef int _init(self, const spec.spec_engine_params * params) except -1:
        cdef int32_t rc
        cdef const spec.spec_model * target = self.target._handle
        cdef const spec.spec_model * draft = NULL if self.draft is None else self.draft._handle
        enter_call()
        with nogil:
            rc = spec.spec_engine_init(target, draft, params, &self._handle)
        return leave_call(rc)

    cdef object _read_limits(self):
        cdef spec.spec_engine_limits c
        check(spec.spec_engine_get_limits(self._handle, &c))
        return EngineLimits(
            draft_type=DRAFT_TYPES[c.draft_type],
            n_ctx=c.n_ctx,
            n_ctx_seq=c.n_ctx_seq,
            n_batch=c.n_batch,
            n_ubatch=c.n_ubatch,
            n_seq_max=c.n_seq_max,
            n_draft_max=c.n_draft_max,
            n_outputs_max=c.n_outputs_max,
            n_rs_seq=c.n_rs_seq,
            n_vocab=c.n_vocab,
            kv_unified=c.kv_unified,
            has_checkpoints=c.has_checkpoints,
            n_window=c.n_window,
            n_window_cells=c.n_window_cells,
        )

    def __dealloc__(self):
        self._free()

    cdef void _free(self) noexcept:
        spec.spec_engine_free(self._handle)
        self._handle = NULL
        if self._n_models_held > 1:
            self.draft._unuse()
        if self._n_models_held > 0:
            self.target._unuse()
        self._n_models_held = 0

    cdef void _free_if_idle(self) noexcept:
        if not self._is_busy:
            self._free()

    cdef spec.spec_engine * _enter(self) except NULL:
        """Begins a call: the engine is open, the thread owns it, no other call is in flight."""
        enter_call()
        if self._handle is NULL:
            self._refuse(errors.Closed("the engine is closed"))
        if self._is_busy or PyThread_get_thread_ident() != self.owner:
            self._refuse(self._wrong_thread())
        self._is_busy = True
        return self._handle

    cdef int _refuse(self, error) except -1:
        global n_in_flight
        n_in_flight -= 1
        raise error

    cdef object _wrong_thread(self):
        caller = PyThread_get_thread_ident()
        what = "a call is in flight" if self._is_busy else "bind_thread was not called here"
        return errors.WrongThread(
            f"thread {caller} called an engine that thread {self.owner} owns ({what})",
            owner=self.owner, caller=caller)

    cdef int _leave(self, int32_t rc, int32_t seq_id=-1) except -1:
        self._is_busy = False
        return leave_call(rc, seq_id)

    cdef int32_t _seq_id(self, value) except -1:
        cdef int32_t seq_id = int32_of(value, "seq_id")
        if not 0 <= seq_id < self.limits.n_seq_max:
            n_seq = self.limits.n_seq_max
            raise errors.BadSeqId(
                f"sequence id {seq_id} is not in [0, {n_seq})", seq_id=seq_id, n_seq=n_seq)
        return seq_id

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        self.close()

    def __repr__(self):
        if self._handle is NULL:
            return "<Engine, closed>"
        x = self.limits
        return f"<Engine {x.draft_type}, {x.n_seq_max} sequences of {x.n_ctx_seq} tokens>"

    @property
    def is_closed(self):
        """Whether `close` was called."""
        return self._handle is NULL

    def close(self):
        """Frees the contexts. Harmless when done twice.

        Thread:
            Any, while no call is in flight.

        Raises:
            WrongThread: a call is in flight.
        """
        cdef spec.spec_engine * handle = self._handle
        if handle is NULL:
            return
        if self._is_busy:
            raise self._wrong_thread()
        self._handle = NULL
        enter_call()
        with nogil:
            spec.spec_engine_free(handle)
        self._free()
        leave_call(spec.SPEC_OK)

    def bind_thread(self):
        """Makes the calling thread the owner.

        Raises:
            WrongThread: a call is in flight.
        """
        if self._handle is NULL:
            raise errors.Closed("the engine is closed")
        if self._is_busy:
            raise self._wrong_thread()
        self.owner = PyThread_get_thread_ident()

    def seq_begin(self, seq_id, Sampler sampler not None):
        """Takes a free sequence into use, empty; the engine owns the sampler from then on.

        Args:
            seq_id: [0, n_seq_max).
            sampler: made for the target of this engine, not used before.

        Raises:
            BadSeqId: there is no such sequence.
            SeqBusy: the sequence has begun already; the sampler is used up.
            BadPlan: the sampler was preempted, which a `Start` resumes; it is used up.
            Closed: the sampler was used before.
        """
        cdef int32_t c_seq_id = self._seq_id(seq_id)
        cdef spec.spec_engine * handle = self._enter()
        cdef spec.spec_sampler * owned = NULL
        cdef int32_t rc
        try:
            owned = sampler._take(self.target)
        except BaseException:
            self._leave(spec.SPEC_OK)
            raise
        with nogil:
            rc = spec.spec_engine_seq_begin(handle, c_seq_id, &owned)
        sampler._put(owned)
        if rc == spec.SPEC_OK:
            self._sampler_params[c_seq_id] = sampler.params
        self._leave(rc, c_seq_id)

    def seq_end(self, seq_id):
        """Frees a sequence: KV cells, speculative state, sampler. Harmless when it has not begun.

        Args:
            seq_id: [0, n_seq_max).

        Raises:
            BadSeqId: there is no such sequence.
        """
        cdef int32_t c_seq_id = self._seq_id(seq_id)
        cdef int32_t rc
        cdef spec.spec_engine * handle = self._enter()
        with nogil:
            rc = spec.spec_engine_seq_end(handle, c_seq_id)
        self._leave(rc, c_seq_id)

    def seq_n_past(self, seq_id):
        """Returns the number of tokens that a sequence has in the KV cache.

        Args:
            seq_id: [0, n_seq_max).

        Raises:
            BadSeqId: there is no such sequence.
        """
        cdef int32_t c_seq_id = self._seq_id(seq_id)
        cdef int32_t n = spec.spec_engine_seq_n_past(self._enter(), c_seq_id)
        self._leave(n)
        return n

    @property
    def n_cells_used(self):
        """KV cells in use, over all sequences."""
        cdef int32_t n = spec.spec_engine_n_cells_used(self._enter())
        self._leave(n)
        return n

    def setting(self, key):
        """Returns what llama.cpp has made of a parameter, as text.

        Args:
            key: `cache_type_k`, `cache_type_v`, the same with `_draft` (empty without a draft
                context), `rope_scaling`, `rope_freq_base`, `rope_freq_scale`, `yarn_orig_ctx`,
                `yarn_ext_factor`, `yarn_attn_factor`, `yarn_beta_slow`, `yarn_beta_fast`,
                `swa_full` (empty without sliding windows) or `flash_attn`.

        Raises:
            InvalidArgument: there is no such key.
        """
        cdef char buf[64]
        cdef size_t n = 0
        encoded = encode(key, "key")
        cdef const char * name = encoded
        self._leave(spec.spec_engine_setting(self._enter(), name, buf, 64, &n))
        return (<bytes>buf[:n - 1]).decode("ascii")

    @property
    def draft_work(self):
        """What drafting has cost since the engine was made (`DraftWork`)."""
        cdef spec.spec_draft_work c
        self._leave(spec.spec_engine_get_draft_work(self._enter(), &c))
        return DraftWork(n_drafts=c.n_drafts, n_positions=c.n_positions, n_passes=c.n_passes)

    def step(self, entries, tokens, drafts=None, n_steps=1, moves=None):
        """Runs one step of all sequences of a plan: draft, decode, verify, accept, roll back.

        With `n_steps` it may run more of them, each sequence going on from the token that it has
        emitted: for callers who have nothing to decide in between, and whose part takes longer
        than a step of a small model. The run ends early with the step in which a sequence emits an
        end token, fails, finds no room or fills its context, or when somebody calls `interrupt`.

        Args:
            entries: one per sequence; see `spec_plan_entry` in `spec.h`.
            tokens: the tokens that the entries and drafts point to.
            drafts: drafts to be verified in place of the drafter's; see `spec_external_draft`.
            n_steps: most steps of a run, [1, 64]; above 1 every entry is an output without a
                draft.
            moves: what is done before the entries (`Moves`).

        Shape:
            entries [n_entries] PLAN_DTYPE, tokens [n_tokens] int32,
            drafts [n_drafts] DRAFT_DTYPE.

        Raises:
            BadPlan, BadSeqId, SeqIdle, InvalidArgument: the plan is wrong; nothing has changed,
                and the samplers of its starts are still the caller's.

        Returns:
            A `StepResult`; each entry's status tells what became of its sequence. Its arrays are
            copies.
        """
        if not isinstance(entries, np.ndarray) or entries.dtype != PLAN_DTYPE or entries.ndim != 1:
            raise TypeError("entries must be an array of PLAN_DTYPE with one dimension")
        # Copies: another thread may write to the caller's arrays when they have been checked.
        cdef Buffer c_entries = Buffer(np.array(entries, order="C"))
        cdef Buffer c_drafts
        cdef Buffer c_tokens = Buffer(int32_array(tokens, "tokens"))
        cdef spec.spec_plan plan
        memset(&plan, 0, sizeof(plan))
        plan.entries = <const spec.spec_plan_entry *>c_entries.view.buf
        plan.n_entries = <int32_t>(c_entries.view.len // <Py_ssize_t>sizeof(spec.spec_plan_entry))
        plan.tokens = <const int32_t *>c_tokens.view.buf
        plan.n_tokens = <int32_t>(c_tokens.view.len // <Py_ssize_t>sizeof(int32_t))
        plan.n_steps = int32_of(n_steps, "n_steps")
        if drafts is not None:
            if getattr(drafts, "dtype", None) != DRAFT_DTYPE or drafts.ndim != 1:
                raise TypeError("drafts must be an array of DRAFT_DTYPE with one dimension")
            c_drafts = Buffer(np.array(drafts, order="C"))
            plan.drafts = <const spec.spec_external_draft *>c_drafts.view.buf
            plan.n_drafts = <int32_t>(
                c_drafts.view.len // <Py_ssize_t>sizeof(spec.spec_external_draft)
            )
        return self._step(&plan, moves, False, False)

    def step_rows(
        self, list entries, list tokens, list drafts, n_steps=1, *, moves=None,
        bint has_logprobs=False
    ):
        """Runs one step, or a run of them, as `step` does, from plain numbers and to plain numbers.

        For servers: between two steps the engine idles, and arrays take longer to make than small
        plans to compute.

        Args:
            entries: the fields of PLAN_DTYPE, one entry after the other.
            tokens: the tokens that the entries and drafts point to.
            drafts: the fields of DRAFT_DTYPE, one draft after the other.
            n_steps: most steps of a run; see `step`.
            moves: what is done before the entries (`Moves`).
            has_logprobs: whether log-probabilities are wanted.

        Raises:
            BadPlan, BadSeqId, SeqIdle, InvalidArgument: see `step`.

        Returns:
            `StepRows`.
        """
        cdef Py_ssize_t n_entries = len(entries)
        cdef Py_ssize_t n_tokens = len(tokens)
        cdef Py_ssize_t n_drafts = len(drafts)
        if n_entries % 6 or n_drafts % 3:
            raise errors.InvalidArgument(
                "entries are rows of 6 numbers and drafts of 3; got "
                f"{n_entries} and {n_drafts} numbers")
        cdef Numbers numbers = Numbers(entries, tokens, drafts)
        cdef spec.spec_plan plan
        memset(&plan, 0, sizeof(plan))
        plan.entries = <const spec.spec_plan_entry *>numbers.data
        plan.n_entries = <int32_t>(n_entries // 6)
        plan.tokens = numbers.data + n_entries
        plan.n_tokens = <int32_t>n_tokens
        plan.drafts = <const spec.spec_external_draft *>(plan.tokens + n_tokens)
        plan.n_drafts = <int32_t>(n_drafts // 3)
        plan.n_steps = int32_of(n_steps, "n_steps")
        return self._step(&plan, moves, True, has_logprobs)

    cdef object _step(self, spec.spec_plan * plan, moves, bint is_plain, bint has_logprobs):
        cdef PackedMoves packed = None if moves is None else PackedMoves(moves)
        cdef spec.spec_result r
        cdef int32_t rc
        cdef int32_t i
        cdef spec.spec_engine * handle = self._enter()
        result = error = None
        try:
            if packed is not None:
                try:
                    packed.take(self.target, self._sampler_params, plan)
                except BaseException:
                    packed.settle(self._sampler_params, NULL)
                    raise
            with nogil:
                rc = spec.spec_engine_step(handle, plan, &r)
            if packed is not None:
                packed.settle(self._sampler_params, &r if rc == spec.SPEC_OK else NULL)
            if rc == spec.SPEC_OK:
                moved = None if packed is None else packed.result(&r)
                result = rows_of(&r, has_logprobs, moved) if is_plain else result_of(&r, moved)
            elif rc == spec.SPEC_ERR_BAD_SEQ_ID:
                error = error_of(rc)
        except BaseException:
            self._leave(spec.SPEC_OK)
            raise
        self._leave(spec.SPEC_OK if error is not None else rc)
        if error is not None:
            for i in range(plan.n_entries):
                self._seq_id(plan.entries[i].seq_id)
            raise error
        return result

    def interrupt(self):
        """Ends the run of steps in flight, or else the next one, after the step that it is in.

        Harmless on a closed engine, and where no run is in flight.

        Thread:
            Any.
        """
        # The interpreter is not released: `close` cannot come in between.
        spec.spec_engine_interrupt(self._handle)

    def set_threads(self, n_threads, n_threads_batch):
        """Changes the threads of decodes from the next one on.

        Sums over a long context may round otherwise than with another number.

        Args:
            n_threads: of narrow decodes.
            n_threads_batch: of wide ones; both in [1, the greater of what the engine was made
                with].

        Raises:
            InvalidArgument: a number is out of range; nothing has changed.
        """
        cdef int32_t n = int32_of(n_threads, "n_threads")
        cdef int32_t n_batch = int32_of(n_threads_batch, "n_threads_batch")
        self._leave(spec.spec_engine_set_threads(self._enter(), n, n_batch))

    def draft_many(self, requests):
        """Drafts for several sequences in one batched call.

        Args:
            requests: tuples (seq_id, n_past, id_last, n_draft): the sequence, its tokens in the KV
                cache, its last chosen token that is not decoded yet, and how many draft tokens are
                wanted, [1, n_draft_max].

        Returns:
            The draft of each request, at most n_draft tokens.

        Raises:
            BadPlan: a request contradicts the state of its sequence; nothing has changed.
        """
        requests = [tuple(request) for request in requests]  # another thread may write to them
        flat = int32_array([value for request in requests for value in request], "requests")
        if len(flat) != 4 * len(requests):
            raise errors.InvalidArgument("a request is (seq_id, n_past, id_last, n_draft)")
        for request in requests:
            self._seq_id(request[0])
        tokens = np.zeros((len(requests), max(1, self.limits.n_draft_max)), np.int32)
        counts = np.zeros(len(requests), np.int32)
        self._draft(Buffer(flat), len(requests), Buffer(tokens, True), Buffer(counts, True))
        return [row[:n].tolist() for row, n in zip(tokens, counts)]

    cdef int _draft(self, Buffer requests, int32_t n, Buffer tokens, Buffer counts) except -1:
        cdef int32_t rc
        cdef spec.spec_engine * handle = self._enter()
        with nogil:
            rc = spec.spec_engine_seq_draft(
                handle, <const spec.spec_draft_request *>requests.view.buf, n,
                <int32_t *>tokens.view.buf,
                <int32_t *>counts.view.buf)
        return self._leave(rc)

    def decode(self, tokens, positions, seq_ids, is_output):
        """Runs one decode of the target.

        Args:
            tokens: ids in [0, n_vocab).
            positions: contiguous in each sequence, from its n_past.
            seq_ids: the tokens of a sequence stand together.
            is_output: whether logits are wanted after the token.

        Shape:
            Each [n_tokens] int32, n_tokens ≤ n_batch.

        Raises:
            BadPlan: the batch contradicts the state of a sequence; nothing has changed.
            NoRoom: no KV cells are free; nothing has changed.
            DecodeFailed: the decode failed; the sequences of the batch are cleared.
        """
        columns = (
            int32_array(seq_ids, "seq_ids"),
            int32_array(positions, "positions"),
            int32_array(tokens, "tokens"),
            np.asarray(is_output, np.bool_).astype(np.int32),
        )
        if len({len(column) for column in columns}) != 1:
            raise errors.InvalidArgument(
                "tokens, positions, seq_ids and is_output must have the same length")
        for seq_id in columns[0]:
            self._seq_id(seq_id)
        cdef Buffer rows = Buffer(np.ascontiguousarray(np.stack(columns, axis=1)))
        cdef int32_t n = <int32_t>len(columns[0])
        cdef int32_t rc
        cdef spec.spec_engine * handle = self._enter()
        with nogil:
            rc = spec.spec_engine_decode(handle, <const spec.spec_token *>rows.view.buf, n)
        self._leave(rc)

    def process(self):
        """Feeds the last decoded batch to the speculative state; once, before the next decode.

        Raises:
            BadPlan: there is no such batch.
        """
        cdef int32_t rc
        cdef spec.spec_engine * handle = self._enter()
        with nogil:
            rc = spec.spec_engine_process(handle)
        self._leave(rc)

    def logits(self, i):
        """Returns the logits after token i of the last decode.

        Args:
            i: index in the batch; an output.

        Shape:
            [n_vocab] float32, a copy.

        Raises:
            InvalidArgument: token i is no output.
            BadPlan: nothing has been decoded.
        """
        cdef int32_t index = int32_of(i, "i")
        cdef const float * out = NULL
        cdef int32_t rc
        cdef int32_t n_vocab = self.limits.n_vocab
        cdef spec.spec_engine * handle = self._enter()
        with nogil:
            rc = spec.spec_engine_logits(handle, index, &out)
        copy = b""
        try:
            if rc == spec.SPEC_OK:
                copy = PyByteArray_FromStringAndSize(<char *>out, n_vocab * sizeof(float))
        except BaseException:
            self._leave(spec.SPEC_OK)
            raise
        self._leave(rc)
        return np.frombuffer(copy, _float32)

    def sample(self, seq_id, i):
        """Chooses a token with the sequence's sampler and feeds it to the sampler.

        Args:
            seq_id: [0, n_seq_max).
            i: index in the last decoded batch; an output of this sequence.

        Raises:
            InvalidArgument: token i is no output of this sequence.
            SeqIdle: the sequence has not begun.
            BadPlan: nothing has been decoded.
            SamplingFailed: no token is allowed; the sequence was cleared and must begin again.
        """
        cdef int32_t c_seq_id = self._seq_id(seq_id)
        cdef int32_t index = int32_of(i, "i")
        cdef int32_t token = -1
        cdef int32_t rc
        cdef spec.spec_engine * handle = self._enter()
        with nogil:
            rc = spec.spec_engine_seq_sample(handle, c_seq_id, index, &token)
        self._leave(rc, c_seq_id)
        return token

    def accept(self, seq_id, n_accepted):
        """Ends a round: the accepted draft tokens stay, the rest is rolled back in both contexts.

        Args:
            seq_id: [0, n_seq_max).
            n_accepted: [0, drafted].

        Raises:
            BadPlan: no draft is pending, or it was shorter; nothing has changed.
            Unsupported: it was verified in several decodes, and a recurrent target cannot take back
                what those before the last brought; nothing has changed.
        """
        cdef int32_t c_seq_id = self._seq_id(seq_id)
        cdef int32_t n = int32_of(n_accepted, "n_accepted")
        cdef int32_t rc
        cdef spec.spec_engine * handle = self._enter()
        with nogil:
            rc = spec.spec_engine_seq_accept(handle, c_seq_id, n)
        self._leave(rc, c_seq_id)

    def rollback(self, seq_id, n_past):
        """Cuts a sequence to its first n_past tokens; a pending draft is dropped.

        Args:
            seq_id: [0, n_seq_max).
            n_past: [0, tokens in the KV cache].

        Raises:
            Unsupported: a recurrent target cannot go back so far.
            BadPlan: the sequence is shorter.
        """
        cdef int32_t c_seq_id = self._seq_id(seq_id)
        cdef int32_t n = int32_of(n_past, "n_past")
        cdef int32_t rc
        cdef spec.spec_engine * handle = self._enter()
        with nogil:
            rc = spec.spec_engine_seq_rollback(handle, c_seq_id, n)
        self._leave(rc, c_seq_id)

    # Snapshots.

    def seq_tokens(self, seq_id):
        """Returns the tokens that a sequence has in the KV cache.

        Args:
            seq_id: [0, n_seq_max).

        Shape:
            [n_past] int32.

        Raises:
            SeqIdle: the sequence has not begun.
        """
        return self._tokens(self._seq_id(seq_id))[0]

    def seq_id_last(self, seq_id):
        """Returns the last token that was chosen for a sequence; None before the first.

        Args:
            seq_id: [0, n_seq_max).

        Raises:
            SeqIdle: the sequence has not begun.
        """
        return self._tokens(self._seq_id(seq_id))[1]

    def seq_is_cold(self, seq_id):
        """Returns whether a sequence has lost its draft state and goes on without drafts.

        Args:
            seq_id: [0, n_seq_max).

        Raises:
            SeqIdle: the sequence has not begun.
        """
        cdef int32_t c_seq_id = self._seq_id(seq_id)
        cdef c_bool out = False
        self._leave(spec.spec_engine_seq_is_cold(self._enter(), c_seq_id, &out), c_seq_id)
        return out

    def seq_drafts_off(self, seq_id):
        """Gives up a sequence's draft state: it goes on without drafts.

        Feeding its drafter costs no time any more. `seq_drafts_on` turns it back.

        Args:
            seq_id: [0, n_seq_max).

        Raises:
            SeqIdle: the sequence has not begun.
        """
        cdef int32_t c_seq_id = self._seq_id(seq_id)
        self._leave(spec.spec_engine_seq_drafts_off(self._enter(), c_seq_id), c_seq_id)

    def seq_drafts_on(self, seq_id):
        """Has a sequence without draft state fed to its drafter again, from its next tokens on.

        After them it is cold no more. Its drafts are as good as before some ten tokens later: what
        lies before is missing; a draft model (`simple`) reads the last 256 tokens again, an n-gram
        drafter all, and at once. Does nothing where the sequence has its draft state.

        Args:
            seq_id: [0, n_seq_max).

        Raises:
            SeqIdle: the sequence has not begun.
            BadPlan: its last batch was not processed.
        """
        cdef int32_t c_seq_id = self._seq_id(seq_id)
        self._leave(spec.spec_engine_seq_drafts_on(self._enter(), c_seq_id), c_seq_id)

    cdef tuple _tokens(self, int32_t seq_id):
        tokens = np.empty(self.limits.n_ctx_seq, np.int32)
        cdef Buffer out = Buffer(tokens, True)
        cdef size_t n = 0
        cdef int32_t id_last = -1
        cdef int32_t rc = spec.spec_engine_seq_tokens(
            self._enter(), seq_id, <int32_t *>out.view.buf, len(tokens), &n, &id_last)
        self._leave(rc, seq_id)
        return tokens[:n].copy(), None if id_last < 0 else id_last

    def save(self, seq_id, *, with_sampler=True):
        """Returns a snapshot: the sequence whole, to go on from here later, elsewhere or twice.

        It holds the tokens, the cells of both contexts, the drafter's state and the sampler with
        its random state. Other sequences may hold open proposals.

        Args:
            seq_id: [0, n_seq_max).
            with_sampler: whether it holds the sampler, and with it what its request asked for.
                Without, a `Start` with a sampler goes on from it, and `load` refuses it.

        Returns:
            Bytes for `load`, of this or another engine over the same models with the same
            parameters. The checksum in them guards against damage, not against forgery.

        Raises:
            SeqIdle: the sequence has not begun.
            BadPlan: a proposal of this sequence is pending, or its last batch was not processed.
            Unsupported: its sampler has a state that cannot be written.
        """
        cdef int32_t c_seq_id = self._seq_id(seq_id)
        cdef size_t n = 0
        cdef bint has_sampler = bool(with_sampler)
        self._save(c_seq_id, has_sampler, NULL, 0, &n)
        blob = PyBytes_FromStringAndSize(NULL, n)
        if not self._save(c_seq_id, has_sampler, <char *>blob, n, &n):
            raise errors.InternalError("the snapshot grew while it was written")
        return blob

    cdef bint _save(
        self, int32_t seq_id, bint has_sampler, char * buf, size_t cap, size_t * n
    ) except -1:
        """Writes a snapshot; False where the buffer is too small."""
        cdef int32_t rc
        cdef spec.spec_engine * handle = self._enter()
        with nogil:
            if has_sampler:
                rc = spec.spec_engine_seq_save(handle, seq_id, buf, cap, n)
            else:
                rc = spec.spec_engine_seq_save_prefix(handle, seq_id, buf, cap, n)
        self._leave(spec.SPEC_OK if rc == spec.SPEC_ERR_BUFFER_TOO_SMALL else rc, seq_id)
        return rc == spec.SPEC_OK

    def load(self, seq_id, snapshot):
        """Takes an idle sequence into use as a snapshot left it.

        Args:
            seq_id: [0, n_seq_max); need not be the one that was saved.
            snapshot: what `save` returned; any bytes-like object.

        Raises:
            SnapshotError: it is damaged, or belongs to other models, parameters or another version;
                `kind` says which. Nothing has changed.
            InvalidArgument: it was saved without its sampler; a `Start` brings one. Nothing has
                changed.
            SeqBusy: the sequence has begun already.
            NoRoom: no KV cells are free; nothing has changed.
        """
        cdef int32_t c_seq_id = self._seq_id(seq_id)
        cdef Buffer source = snapshot_buffer(snapshot)
        cdef int32_t rc
        cdef spec.spec_engine * handle = self._enter()
        with nogil:
            rc = spec.spec_engine_seq_load(
                handle, c_seq_id, source.view.buf, <size_t>source.view.len)
        if rc == spec.SPEC_OK:
            self._sampler_params[c_seq_id] = None
        self._leave(rc, c_seq_id)

    def fork(self, src, samplers, n_past=None):
        """Begins idle sequences with the first tokens of another's prompt, without computing them.

        The caller gives the next tokens of each new sequence, at least one. Drafts go on there; the
        first may be poorer, as the MTP heads' last hidden row is not copied.

        Args:
            src: the sequence that is copied; it stays as it is.
            samplers: the sampler of each new sequence, by its id; handed over as in `seq_begin`,
                unless the call fails.
            n_past: tokens of the prompt to share, [1, those that src holds); None is as many as
                possible.

        Raises:
            Unsupported: the target has recurrent layers; see `begin_many`, which prefills then.
            BadPlan: src has no such prompt, or waits for accept or process; nothing has changed.
            SeqIdle, SeqBusy: src has not begun, or a new one has.
            Closed: a sampler was used before.
        """
        cdef int32_t c_src = self._seq_id(src)
        pairs = list(samplers.items())  # at once: another thread may write to them
        ids = np.array([self._seq_id(seq_id) for seq_id, _ in pairs], np.int32)
        handles = np.zeros(len(ids), np.uintp)
        held = [sampler for _, sampler in pairs]
        for sampler in held:
            if not isinstance(sampler, Sampler):
                raise TypeError(f"samplers must be Sampler, not {type(sampler).__name__}")
        if len({id(sampler) for sampler in held}) < len(held):
            raise errors.InvalidArgument("a sampler is given twice")
        cdef int32_t n = -1 if n_past is None else int32_of(n_past, "n_past")
        self._fork(c_src, n, Buffer(ids), Buffer(handles, True), held)

    cdef int _fork(
        self, int32_t src, int32_t n_past, Buffer ids, Buffer handles, list samplers
    ) except -1:
        cdef int32_t rc
        cdef Py_ssize_t i
        cdef int32_t n = <int32_t>len(samplers)
        cdef spec.spec_sampler ** owned = <spec.spec_sampler **>handles.view.buf
        cdef Py_ssize_t n_taken = 0
        cdef spec.spec_engine * handle = self._enter()
        try:
            for sampler in samplers:
                owned[n_taken] = (<Sampler>sampler)._take(self.target)
                n_taken += 1
        except BaseException:
            for i in range(n_taken):
                (<Sampler>samplers[i])._put(owned[i])
            self._leave(spec.SPEC_OK)
            raise
        with nogil:
            rc = spec.spec_engine_fork(
                handle, src, n_past, <const int32_t *>ids.view.buf, owned, n)
        for i, sampler in enumerate(samplers):
            if owned[i] is NULL:  # the engine took it
                self._sampler_params[(<const int32_t *>ids.view.buf)[i]] = sampler.params
            (<Sampler>sampler)._put(owned[i])
        return self._leave(rc, src)

    def inject_fault(self, fault, n_steps=1):
        """Makes the next steps fail, for tests of the failure paths.

        Args:
            fault: a `Fault`.
            n_steps: how many, ≥ 0.

        Raises:
            InvalidArgument: there is no such fault.
        """
        cdef int32_t c_fault = int32_of(fault, "fault")
        cdef int32_t n = int32_of(n_steps, "n_steps")
        self._leave(spec.spec_engine_inject_fault(self._enter(), c_fault, n))
