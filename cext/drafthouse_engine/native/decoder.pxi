# Decoders.

cimport cython
from cpython.pythread cimport PyThread_get_thread_ident
from libc.stdint cimport int32_t

from drafthouse_engine cimport spec
from libcpp cimport bool as c_bool

import numpy as np

from drafthouse_engine import errors
from drafthouse_engine.decoder_config import DecoderConfig, DecoderLimits


@cython.final
@cython.no_gc_clear
cdef class DecoderContext:
    """A model over one context, several sequences, no sampler: what `Decoder` stands on.

    Args:
        model: any model that decodes on its own, or, with a target, an EAGLE-3 draft model.
        config: None means the defaults of `DecoderConfig`.
        target: the context of the model that an EAGLE-3 model drafts for; it is held.

    Raises:
        Unsupported: the model has an encoder, or drafts from another model's hidden states and no
            target was given; the target does not show them; llama.cpp gives no hidden states beside
            the logits of its architecture.
        NotEagle3, IncompatibleDraft: the model does not draft for this target.
        InvalidArgument: the configuration does not fit the model.
        OutOfMemory: memory could not be allocated.

    Thread:
        The thread that made it only; every other call raises WrongThread, except `close` while no
        call is in flight. A call of an EAGLE-3 model's context reads its target: it is in flight
        there, too.
    """

    cdef spec.spec_decoder * _handle
    cdef readonly Model model
    """The model."""
    cdef readonly object config
    """The configuration that it was made with."""
    cdef readonly object limits
    """What it offers (`DecoderLimits`)."""
    cdef readonly unsigned long owner
    """Identifier of the owning thread, as `threading.get_ident` gives it."""
    cdef readonly int32_t n_rows
    """Rows of the last scored decode."""
    cdef readonly int32_t n_decoded
    """Tokens of the last decode or tree, scored or not."""
    cdef readonly DecoderContext target
    """The context that an EAGLE-3 model drafts for; None for other models."""
    cdef bint _is_busy
    cdef bint _holds_model
    cdef object __weakref__

    def __cinit__(self, Model model not None, config=None, DecoderContext target=None):
        cdef spec.spec_decoder_params c
        self.config = DecoderConfig() if config is None else config
        if not isinstance(self.config, DecoderConfig):
            raise TypeError(f"config must be DecoderConfig, not {type(config).__name__}")
        fill_decoder_params(&c, self.config)
        self.owner = PyThread_get_thread_ident()
        model._use()
        self.model = model
        self._holds_model = True
        self.target = target
        if target is None:
            self._init(&c)
        else:
            self._init_eagle3(&c)
        self.limits = self._read_limits()
        decoders.add(self)

    cdef int _init_eagle3(self, const spec.spec_decoder_params * params) except -1:
        cdef int32_t rc
        cdef const spec.spec_model * model = self.model._handle
        cdef spec.spec_decoder * target = self.target._enter()
        with nogil:
            rc = spec.spec_decoder_init_eagle3(model, target, params, &self._handle)
        return self.target._leave(rc)

    cdef int _init(self, const spec.spec_decoder_params * params) except -1:
        cdef int32_t rc
        cdef const spec.spec_model * model = self.model._handle
        enter_call()
        with nogil:
            rc = spec.spec_decoder_init(model, params, &self._handle)
        return leave_call(rc)

    cdef object _read_limits(self):
        cdef spec.spec_decoder_limits c
        check(spec.spec_decoder_get_limits(self._handle, &c))
        return DecoderLimits(
            n_ctx_seq=c.n_ctx_seq,
            n_batch=c.n_batch,
            n_seq=c.n_seq_max,
            n_branch_max=c.n_branch_max,
            n_outputs_max=c.n_outputs_max,
            n_rs_seq=None if c.n_rs_seq < 0 else c.n_rs_seq,
            n_vocab=c.n_vocab,
            n_embd=c.n_embd,
            n_embd_out=c.n_embd_out,
            n_layer=c.n_layer,
            has_layers=c.has_layers,
            is_last_layer_normed=c.is_last_layer_normed,
        )

    def __dealloc__(self):
        self._free()

    cdef void _free(self) noexcept:
        spec.spec_decoder_free(self._handle)
        self._handle = NULL
        if self._holds_model:
            self.model._unuse()
        self._holds_model = False

    cdef void _free_if_idle(self) noexcept:
        if not self._is_busy:
            self._free()

    cdef spec.spec_decoder * _enter(self) except NULL:
        """Begins a call: the context is open, the thread owns it, no other call is in flight.

        The same holds of its target, which the call may read.
        """
        enter_call()
        if self._handle is NULL:
            self._refuse(errors.Closed("the decoder context is closed"))
        if self.target is not None and self.target._handle is NULL:
            self._refuse(errors.Closed("the target's decoder context is closed"))
        if self._is_busy or PyThread_get_thread_ident() != self.owner:
            self._refuse(self._wrong_thread())
        if self.target is not None:
            if self.target._is_busy:
                self._refuse(self.target._wrong_thread())
            self.target._is_busy = True
        self._is_busy = True
        return self._handle

    cdef int _refuse(self, error) except -1:
        global n_in_flight
        n_in_flight -= 1
        raise error

    cdef object _wrong_thread(self):
        caller = PyThread_get_thread_ident()
        what = "a call is in flight" if self._is_busy else "it was made there"
        return errors.WrongThread(
            f"thread {caller} called a decoder context of thread {self.owner} ({what})",
            owner=self.owner, caller=caller)

    cdef int _leave(self, int32_t rc) except -1:
        self._is_busy = False
        if self.target is not None:
            self.target._is_busy = False
        return leave_call(rc)

    cdef int32_t _seq_id(self, value) except -1:
        cdef int32_t seq_id = int32_of(value, "seq_id")
        if not 0 <= seq_id < self.limits.n_seq:
            n_seq = self.limits.n_seq
            raise errors.BadSeqId(
                f"sequence id {seq_id} is not in [0, {n_seq})", seq_id=seq_id, n_seq=n_seq)
        return seq_id

    @property
    def is_closed(self):
        """Whether `close` was called."""
        return self._handle is NULL

    def close(self):
        """Frees the context. Harmless when done twice.

        Raises:
            WrongThread: a call is in flight.
        """
        if self._handle is NULL:
            return
        if self._is_busy:
            raise self._wrong_thread()
        self._free()

    def seq_n_past(self, seq_id):
        """Returns the number of tokens that a sequence has in its cache.

        Args:
            seq_id: [0, n_seq).

        Raises:
            BadSeqId: there is no such sequence.
        """
        cdef int32_t c_seq_id = self._seq_id(seq_id)
        cdef int32_t n = spec.spec_decoder_seq_n_past(self._enter(), c_seq_id)
        self._leave(n)
        return n

    def decode(self, seq_id, tokens, is_output):
        """Appends tokens to a sequence.

        Args:
            seq_id: [0, n_seq).
            tokens: ids in [0, n_vocab); at most n_batch, or n_outputs_max when they are scored.
            is_output: score all of them, else none.

        Shape:
            tokens [n_tokens] int32.

        Raises:
            NoRoom: the sequence would be too long; nothing has changed.
            BadPlan: a tree hangs on the sequence; nothing has changed.
            DecodeFailed: the decode failed; the sequence is empty.
        """
        cdef int32_t c_seq_id = self._seq_id(seq_id)
        cdef Buffer c_tokens = Buffer(int32_array(tokens, "tokens"))
        cdef int32_t n = <int32_t>(c_tokens.view.len // <Py_ssize_t>sizeof(int32_t))
        cdef c_bool c_is_output = bool(is_output)
        cdef int32_t rc
        cdef spec.spec_decoder * handle = self._enter()
        with nogil:
            rc = spec.spec_decoder_decode(
                handle, c_seq_id, <const int32_t *>c_tokens.view.buf, n, c_is_output)
        if rc == spec.SPEC_OK:
            self.n_rows = n if c_is_output else 0
            self.n_decoded = n
        self._leave(rc)

    def rollback(self, seq_id, n_past):
        """Cuts a sequence to its first n_past tokens.

        Args:
            seq_id: [0, n_seq).
            n_past: [0, tokens in the cache].

        Raises:
            Unsupported: a recurrent model cannot go back so far.
            BadPlan: a tree hangs on the sequence.
        """
        cdef int32_t c_seq_id = self._seq_id(seq_id)
        cdef int32_t n = int32_of(n_past, "n_past")
        cdef int32_t rc
        cdef spec.spec_decoder * handle = self._enter()
        with nogil:
            rc = spec.spec_decoder_seq_rollback(handle, c_seq_id, n)
        self._leave(rc)

    def tree(self, seq_id, tokens, parents):
        """Scores tree nodes that hang on a sequence; see `spec_decoder_tree` in `spec.h`.

        Args:
            seq_id: [0, n_seq).
            tokens: ids in [0, n_vocab).
            parents: number of an earlier node, −1 for the end of the sequence.

        Shape:
            Both [n_nodes] int32.

        Raises:
            Unsupported: this context has no trees.
            InvalidArgument: the tree has too many nodes or leaves, or a wrong parent.
            BadPlan: a tree hangs on another sequence.
            NoRoom, DecodeFailed: the tree is gone, the sequence as it was.
        """
        cdef int32_t c_seq_id = self._seq_id(seq_id)
        cdef Buffer c_tokens = Buffer(int32_array(tokens, "tokens"))
        cdef Buffer c_parents = Buffer(int32_array(parents, "parents"))
        if c_tokens.view.len != c_parents.view.len:
            raise errors.InvalidArgument("tokens and parents must have the same length")
        cdef int32_t n = <int32_t>(c_tokens.view.len // <Py_ssize_t>sizeof(int32_t))
        cdef int32_t rc
        cdef spec.spec_decoder * handle = self._enter()
        with nogil:
            rc = spec.spec_decoder_tree(
                handle, c_seq_id, <const int32_t *>c_tokens.view.buf,
                <const int32_t *>c_parents.view.buf, n)
        if rc == spec.SPEC_OK:
            self.n_rows = self.n_decoded = n
        self._leave(rc)

    def encode(self):
        """Returns the encoded states of all tokens of the target's last decode or tree.

        Shape:
            [n_decoded of the target, n_embd] float32.

        Raises:
            Unsupported: this is no EAGLE-3 model's context.
            BadPlan: the target's last decode failed, or there was none since this was made.
            DecodeFailed: the encoder failed; nothing has changed.
        """
        if self.target is None:
            raise errors.Unsupported("only an EAGLE-3 model encodes a target's states")
        rows = np.empty((self.target.n_decoded, self.limits.n_embd), np.float32)
        cdef Buffer out = Buffer(rows, True)
        cdef size_t n_out = <size_t>out.view.len // sizeof(float)
        cdef int32_t rc
        cdef spec.spec_decoder * handle = self._enter()
        with nogil:
            rc = spec.spec_decoder_encode(handle, <float *>out.view.buf, n_out)
        self._leave(rc)
        return rows

    def set_states(self, states):
        """Sets the states that the tokens of the next decode or tree come with.

        Args:
            states: one row for each of those tokens.

        Shape:
            [n_tokens, n_embd] float32.

        Raises:
            Unsupported: this is no EAGLE-3 model's context.
            InvalidArgument: the rows have another width, or there are too many.
        """
        rows = np.ascontiguousarray(states, np.float32)
        if rows.ndim != 2 or rows.shape[1] != self.limits.n_embd:
            raise errors.InvalidArgument(
                f"states must be [n_tokens, {self.limits.n_embd}], not {list(rows.shape)}")
        cdef Buffer c_states = Buffer(rows)
        cdef int32_t n = int32_of(rows.shape[0], "n_tokens")
        cdef int32_t rc
        cdef spec.spec_decoder * handle = self._enter()
        with nogil:
            rc = spec.spec_decoder_set_states(handle, <const float *>c_states.view.buf, n)
        self._leave(rc)

    def tree_commit(self, seq_id, path):
        """Makes a path of the tree part of the sequence and drops the other nodes.

        Args:
            seq_id: [0, n_seq).
            path: node numbers from a root downwards; empty drops all.

        Raises:
            BadPlan: no tree hangs on the sequence.
            InvalidArgument: the path is none.
        """
        cdef int32_t c_seq_id = self._seq_id(seq_id)
        cdef Buffer c_path = Buffer(int32_array(path, "path"))
        cdef int32_t n = <int32_t>(c_path.view.len // <Py_ssize_t>sizeof(int32_t))
        cdef int32_t rc
        cdef spec.spec_decoder * handle = self._enter()
        with nogil:
            rc = spec.spec_decoder_tree_commit(
                handle, c_seq_id, <const int32_t *>c_path.view.buf, n)
        self._leave(rc)

    def set_layer(self, layer, is_kept=True):
        """Chooses whether the rows after a layer are kept from the next decode on.

        Args:
            layer: [0, n_layer).
            is_kept: keep them.

        Raises:
            Unsupported: llama.cpp does not show the layers of this architecture.
            InvalidArgument: there is no such layer.
        """
        cdef int32_t c_layer = int32_of(layer, "layer")
        cdef c_bool c_is_kept = bool(is_kept)
        self._leave(spec.spec_decoder_set_layer(self._enter(), c_layer, c_is_kept))

    def logits(self):
        """Returns the logits of the last scored decode. Shape: [n_rows, n_vocab] float32."""
        return self._read(-2, self.limits.n_vocab)

    def hidden(self):
        """Returns the rows after the final norm. Shape: [n_rows, n_embd_out] float32."""
        return self._read(-1, self.limits.n_embd_out)

    def layer(self, layer):
        """Returns the rows after a layer that was kept. Shape: [n_rows, n_embd] float32.

        Args:
            layer: [0, n_layer).

        Raises:
            BadPlan: the last decode did not keep it.
        """
        cdef int32_t c_layer = int32_of(layer, "layer")
        limits = self.limits
        if not 0 <= c_layer < limits.n_layer:
            raise errors.InvalidArgument(f"layer {c_layer} is not in [0, {limits.n_layer})")
        is_hidden = limits.is_last_layer_normed and c_layer == limits.n_layer - 1
        return self._read(c_layer, limits.n_embd_out if is_hidden else limits.n_embd)

    cdef object _read(self, int32_t what, Py_ssize_t width):
        rows = np.empty((self.n_rows, width), np.float32)
        cdef Buffer out = Buffer(rows, True)
        cdef size_t n_out = <size_t>out.view.len // sizeof(float)
        cdef int32_t rc
        cdef spec.spec_decoder * handle = self._enter()
        with nogil:
            rc = spec.spec_decoder_read(handle, what, <float *>out.view.buf, n_out)
        self._leave(rc)
        return rows


cdef int fill_decoder_params(spec.spec_decoder_params * c, config) except -1:
    c.n_seq_max = config.n_seq
    c.n_branch_max = config.n_branch_max
    c.n_outputs_max = config.n_outputs_max
    c.n_ctx_seq = config.n_ctx_seq
    c.n_batch = config.n_batch
    c.n_ubatch = config.n_ubatch
    c.n_rs_seq = config.n_rs_seq
    c.n_threads = config.n_threads
    c.flash_attention = config.flash_attention
    return 0


def default_decoder_config():
    """Returns the defaults of `spec.h`; those of `DecoderConfig` are the same."""
    cdef spec.spec_decoder_params c
    spec.spec_decoder_default_params(&c)
    return DecoderConfig(
        n_seq=c.n_seq_max,
        n_branch_max=c.n_branch_max,
        n_outputs_max=c.n_outputs_max,
        n_ctx_seq=c.n_ctx_seq,
        n_batch=c.n_batch,
        n_ubatch=c.n_ubatch,
        n_rs_seq=c.n_rs_seq,
        n_threads=c.n_threads,
        flash_attention=c.flash_attention,
    )
