# Embeddings.

cimport cython
from libc.stdint cimport INT32_MAX, int32_t

from drafthouse_engine cimport spec

import numpy as np

from drafthouse_engine import errors
from drafthouse_engine.embedding import POOLINGS, EmbedderLimits, EmbedderParams


@cython.final
@cython.no_gc_clear
cdef class Embedder:
    """Embeddings of texts, through a context of its own over a model.

    Args:
        model: the model whose hidden states are read; the embedder keeps it alive.
        params: None means the defaults of `EmbedderParams`.

    Raises:
        Unsupported: the model is a draft model, or has no classification head for rank; llama.cpp
            gives no hidden states of its architecture.
        InvalidArgument: the parameters do not fit the model.
        OutOfMemory: memory could not be allocated.

    Thread:
        Any, one at a time; a second call while one is in flight raises WrongThread.
    """

    cdef spec.spec_embedder * _handle
    cdef readonly Model model
    """The model."""
    cdef readonly object params
    """The parameters that it was made with."""
    cdef readonly object limits
    """What it offers (`EmbedderLimits`)."""
    cdef bint _is_busy
    cdef object __weakref__

    def __cinit__(self, Model model not None, params=None):
        cdef spec.spec_embedder_params c
        self.params = EmbedderParams() if params is None else params
        if not isinstance(self.params, EmbedderParams):
            raise TypeError(f"params must be EmbedderParams, not {type(params).__name__}")
        spec.spec_embedder_default_params(&c)
        c.pooling = POOLINGS.index(self.params.pooling)
        c.n_batch = self.params.n_batch
        c.n_seq_max = self.params.n_seq_max
        c.n_threads = self.params.n_threads
        c.flash_attention = self.params.flash_attention
        self._init(model, &c)
        self._read_limits()
        embedders.add(self)

    cdef int _init(self, Model model, const spec.spec_embedder_params * params) except -1:
        cdef int32_t rc
        cdef const spec.spec_model * handle = model._use()
        self.model = model
        enter_call()
        with nogil:
            rc = spec.spec_embedder_init(handle, params, &self._handle)
        if rc != spec.SPEC_OK:
            model._unuse()
        return leave_call(rc)

    cdef int _read_limits(self) except -1:
        cdef spec.spec_embedder_limits c
        check(spec.spec_embedder_get_limits(self._handle, &c))
        self.limits = EmbedderLimits(
            pooling=POOLINGS[c.pooling], n_batch=c.n_batch, n_seq_max=c.n_seq_max,
            n_vocab=c.n_vocab, n_embd=c.n_embd)
        return 0

    def __dealloc__(self):
        self._free()

    cdef void _free(self) noexcept:
        if self._handle is NULL:
            return
        spec.spec_embedder_free(self._handle)
        self._handle = NULL
        self.model._unuse()

    cdef void _free_if_idle(self) noexcept:
        if not self._is_busy:
            self._free()

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        self.close()

    def __repr__(self):
        if self._handle is NULL:
            return "<Embedder, closed>"
        return f"<Embedder {self.limits.pooling}, {self.limits.n_embd} wide>"

    @property
    def is_closed(self):
        """Whether `close` was called."""
        return self._handle is NULL

    def close(self):
        """Frees the context. Harmless when done twice.

        Raises:
            WrongThread: a call is in flight.
        """
        if self._is_busy:
            raise errors.WrongThread("an embedder was closed while a call was in flight")
        self._free()

    def encode(self, texts):
        """Returns the pooled rows of texts; texts of any number, batched as they fit.

        Args:
            texts: token ids of each text, [1, n_batch] of them.

        Shape:
            [n_texts, n_embd] float32; of unit length with `is_normalised`.

        Raises:
            Unsupported: the pooling is none; see `encode_tokens`.
            InvalidArgument: a text is empty, too long, or has a wrong token.
            DecodeFailed: the decode failed.
        """
        if self._handle is not NULL and self.limits.pooling == "none":
            raise errors.Unsupported("pooling none gives rows of tokens: call encode_tokens")
        arrays = [int32_array(text, "texts") for text in texts]
        rows = self._encode(arrays, len(arrays))
        return self._normalised(rows)

    def encode_tokens(self, texts):
        """Returns the hidden states of every token, text by text.

        Args:
            texts: token ids of each text, [1, n_batch] of them.

        Shape:
            A list with [n_tokens of the text, n_embd] float32 of each text.

        Raises:
            Unsupported: the pooling is another than none.
            InvalidArgument: a text is empty, too long, or has a wrong token.
            DecodeFailed: the decode failed.
        """
        if self._handle is not NULL and self.limits.pooling != "none":
            raise errors.Unsupported("hidden states of tokens need pooling none")
        arrays = [int32_array(text, "texts") for text in texts]
        lengths = [len(array) for array in arrays]
        rows = self._normalised(self._encode(arrays, sum(lengths)))
        return np.split(rows, np.cumsum(lengths)[:-1]) if lengths else []

    cdef object _normalised(self, rows):
        if not self.params.is_normalised or self.limits.pooling == "rank":
            return rows
        norms = np.linalg.norm(rows, axis=1, keepdims=True)
        return rows / np.maximum(norms, np.finfo(np.float32).tiny)

    cdef object _encode(self, list arrays, Py_ssize_t n_rows):
        cdef int32_t rc
        tokens = np.concatenate(arrays) if arrays else np.empty(0, np.int32)
        if n_rows > INT32_MAX or len(tokens) > INT32_MAX:
            raise errors.InvalidArgument("there are more than 2^31 − 1 tokens")
        rows = np.empty((n_rows, self.limits.n_embd), np.float32)
        cdef Buffer c_tokens = Buffer(tokens)
        cdef Buffer c_lengths = Buffer(np.array([len(array) for array in arrays], np.int32))
        cdef Buffer out = Buffer(rows, True)
        cdef int32_t n_tokens = <int32_t>len(tokens)
        cdef int32_t n_texts = <int32_t>len(arrays)
        cdef size_t cap = rows.size
        cdef spec.spec_embedder * handle = self._enter()
        with nogil:
            rc = spec.spec_embedder_encode(
                handle, <const int32_t *>c_tokens.view.buf, n_tokens,
                <const int32_t *>c_lengths.view.buf, n_texts, <float *>out.view.buf, cap)
        self._is_busy = False
        leave_call(rc)
        return rows

    cdef spec.spec_embedder * _enter(self) except NULL:
        """Begins a call: from here on no other one, nor `close`, comes in between."""
        if self._handle is NULL:
            raise errors.Closed("the embedder is closed")
        if self._is_busy:
            raise errors.WrongThread("an embedder was called while a call was in flight")
        enter_call()
        self._is_busy = True
        return self._handle
