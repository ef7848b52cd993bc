# cython: language_level=3, embedsignature=False
"""Models, samplers and engines of llama.cpp over `spec.h`.

Rules of this file
1. Every call that can take time runs between `enter_call` and `leave_call`, without the GIL.
2. `check` is the only place that turns a status into an exception.
3. Handles of models are counted: a model that is closed while something uses it is freed by its
   last user.
4. No callback takes the GIL on a foreign thread: log lines go through `log_ring.h`, and the
   progress callback runs on the thread that loads.
5. When the interpreter exits, calls in flight are waited for, engines are freed, and a daemon
   thread that comes back or calls again sleeps for ever instead of failing in a dying interpreter.
"""

cimport cython
from cpython.buffer cimport PyBUF_C_CONTIGUOUS, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytearray cimport PyByteArray_FromStringAndSize
from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.exc cimport PyErr_CheckSignals
from cpython.long cimport PyLong_AsLong
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from cpython.pythread cimport PyThread_get_thread_ident
from libc.stdint cimport INT32_MAX, INT32_MIN, INT64_MAX, int32_t
from posix.unistd cimport pause, usleep

from drafthouse_engine cimport spec
from libcpp cimport bool as c_bool

import atexit
import logging
import os
import weakref

import numpy as np

from drafthouse_engine import errors
from drafthouse_engine.chat_process import ChatProcess
from drafthouse_engine.cores import Cores
from drafthouse_engine.decoder_config import DecoderConfig, DecoderLimits
from drafthouse_engine.embedding import POOLINGS, EmbedderLimits, EmbedderParams
from drafthouse_engine.limits import DraftWork, EngineLimits
from drafthouse_engine.options import DRAFT_TYPES, SAMPLERS, EngineParams, SamplingParams
from drafthouse_engine.step import DRAFT_DTYPE, PLAN_DTYPE, RESULT_DTYPE, StepResult, StepRows

__all__ = [
    "ChatTemplate",
    "DecoderContext",
    "Embedder",
    "Engine",
    "Model",
    "Sampler",
    "abi_version",
    "apply_lm_head",
    "build_version",
    "check_grammar",
    "embed_tokens",
    "find_cores",
    "grammar_accepts",
    "set_log",
]


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


# Conversions.

@cython.final
cdef class Buffer:
    """Memory of an array, held as long as this object lives."""

    cdef Py_buffer view

    def __cinit__(self, array, bint is_writable=False):
        flags = PyBUF_C_CONTIGUOUS | (PyBUF_WRITABLE if is_writable else 0)
        PyObject_GetBuffer(array, &self.view, flags)

    def __dealloc__(self):
        PyBuffer_Release(&self.view)


@cython.final
cdef class Strings:
    """Texts as an array of C strings, valid as long as this object lives."""

    cdef list encoded
    cdef const char ** pointers

    def __cinit__(self, texts, str name):
        self.encoded = [encode(text, name) for text in texts]
        self.pointers = <const char **>PyMem_Malloc(max(1, len(self.encoded)) * sizeof(char *))
        if self.pointers is NULL:
            raise MemoryError
        for i, text in enumerate(self.encoded):
            self.pointers[i] = <const char *>(<bytes>text)

    def __dealloc__(self):
        PyMem_Free(self.pointers)


cdef bytes encode_text(text, str name):
    if not isinstance(text, str):
        raise TypeError(f"{name} must be str, not {type(text).__name__}")
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise errors.InvalidArgument(
            f"{name} has a lone surrogate at index {error.start}, which UTF-8 cannot hold"
        ) from None


cdef bytes encode(text, str name):
    encoded = encode_text(text, name)
    if b"\0" in encoded:
        raise errors.InvalidArgument(f"{name} has a NUL character at byte {encoded.index(0)}")
    return encoded


cdef int32_t int32_of(value, str name) except? -1:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be an integer, not {type(value).__name__}")
    number = value.__index__()
    if not INT32_MIN <= number <= INT32_MAX:
        raise errors.InvalidArgument(f"{name} is {number}, which does not fit 32 bits")
    return number


cdef object int32_array(values, str name):
    array = np.asarray(values)
    if array.ndim != 1:
        raise errors.InvalidArgument(f"{name} must have one dimension, not {array.ndim}")
    if array.size == 0:
        return np.empty(0, np.int32)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} must be integers of 32 bits, not {array.dtype}")
    if array.dtype != np.int32 and not (INT32_MIN <= array.min() and array.max() <= INT32_MAX):
        raise errors.InvalidArgument(f"{name} has values that do not fit 32 bits")
    return np.ascontiguousarray(array, np.int32)


cdef object array_of(const void * source, size_t n, dtype):
    """A read-only copy of n elements in C memory."""
    if n == 0:
        return np.empty(0, dtype)
    return np.frombuffer(PyBytes_FromStringAndSize(<const char *>source, n * dtype.itemsize), dtype)


_int32 = np.dtype(np.int32)
_float32 = np.dtype(np.float32)


# Models.

@cython.final
cdef class Progress:
    """The progress callback of a load, and what it raised."""

    cdef object callback
    cdef object error

    def __cinit__(self, callback):
        self.callback = callback

    cdef bint report(self, float share) noexcept:
        try:
            PyErr_CheckSignals()
            if self.callback is not None:
                self.callback(share)
        except BaseException as error:
            self.error = error
            return False
        return True


cdef c_bool on_progress(float share, void * user) noexcept nogil:
    if is_exiting:
        return False
    with gil:
        return (<Progress>user).report(share)


ctypedef int32_t (*text_getter)(
    const spec.spec_model * model, const char * key, char * buf, size_t cap,
    size_t * n_needed) noexcept nogil


@cython.final
@cython.no_gc_clear
cdef class Model:
    """A loaded GGUF file: tokenizer, metadata, chat template, weights.

    Closing a model refuses further calls at once; its memory is freed when the last engine, sampler
    or call that uses it is gone.

    Args:
        path: a GGUF file; of a split model, its first part.
        n_gpu_layers: layers kept on an accelerator; −1 all.
        use_mmap: map the file instead of reading it.
        vocab_only: load tokenizer and metadata only; such a model cannot make an engine.
        load_mtp: load the weights of MTP heads too, if there are any; the draft type `mtp` needs
            them.
        progress: called with the share loaded, [0, 1]; an exception in it stops the load and is
            raised again.

    Raises:
        ModelNotFound: the file does not exist or cannot be read.
        BadModel: the file is not a usable GGUF model.
        Unsupported: the file holds MTP layers alone, without their model.
        OutOfMemory: memory could not be allocated.

    Thread:
        Every method may run on any thread, several at once.
    """

    cdef spec.spec_model * _handle
    cdef spec.spec_model_info _facts
    cdef int _n_users
    cdef readonly bint is_closed
    """Whether `close` was called."""
    cdef readonly str path
    """The file."""
    cdef readonly str arch
    """Architecture, such as `qwen35`."""
    cdef readonly str description
    """One line: architecture, size, quantisation."""
    cdef readonly str chat_template
    """The chat template (Jinja); empty when the model has none."""
    cdef tuple _eos_token_ids
    cdef object _chat

    def __cinit__(
        self, path, *, n_gpu_layers=-1, use_mmap=True, vocab_only=False, load_mtp=True,
        progress=None
    ):
        cdef spec.spec_model_params params
        if progress is not None and not callable(progress):
            raise TypeError("progress must be callable or None")
        self.path = os.fsdecode(path)
        encoded = encode(self.path, "path")
        watcher = Progress(progress)
        params.path = encoded
        params.n_gpu_layers = int32_of(n_gpu_layers, "n_gpu_layers")
        params.use_mmap = bool(use_mmap)
        params.vocab_only = bool(vocab_only)
        params.skip_mtp = not load_mtp
        params.progress = on_progress
        params.user = <void *>watcher
        self._load(&params, watcher)
        check(spec.spec_model_get_info(self._handle, &self._facts))
        self.arch = self._text(spec.spec_model_text, b"arch")
        self.description = self._text(spec.spec_model_text, b"desc")
        self.chat_template = self._text(spec.spec_model_text, b"chat_template")
        if self.chat_template:
            self._chat = ChatProcess(
                self.chat_template, bos=self._spelling(self._facts.token_bos),
                eos=self._spelling(self._facts.token_eos), add_bos=self._facts.add_bos,
                add_eos=self._facts.add_eos)

    cdef str _spelling(self, int32_t token):
        if token < 0:
            return ""
        return self._token_bytes(token, True).decode("utf-8", "replace").partition("\0")[0]

    cdef int _load(self, const spec.spec_model_params * params, Progress watcher) except -1:
        cdef int32_t rc
        enter_call()
        with nogil:
            rc = spec.spec_model_load(params, &self._handle)
        error = None if rc == spec.SPEC_OK else file_error(rc, self.path)
        leave_call(spec.SPEC_OK)
        if watcher.error is not None:
            raise watcher.error
        if error is not None:
            raise error
        return 0

    def __dealloc__(self):
        spec.spec_model_free(self._handle)

    cdef spec.spec_model * _use(self) except NULL:
        """Keeps the handle alive until `_unuse`."""
        if self.is_closed:
            raise errors.Closed(f"the model {self.path} is closed")
        self._n_users += 1
        return self._handle

    cdef int _unuse(self) except -1:
        self._n_users -= 1
        self._free_if_unused()
        return 0

    cdef void _free_if_unused(self) noexcept:
        if self.is_closed and self._n_users == 0:
            spec.spec_model_free(self._handle)
            self._handle = NULL

    def close(self):
        """Refuses further calls and frees the model when nothing uses it any more. Harmless when
        done twice."""
        self.is_closed = True
        if self._chat is not None:
            self._chat.close()
        self._free_if_unused()

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        self.close()

    def __repr__(self):
        return f"<Model {self.path!r}, {self.description}{', closed' if self.is_closed else ''}>"

    @property
    def n_params(self):
        """Number of weights."""
        return self._facts.n_params

    @property
    def size_bytes(self):
        """Size of the weights."""
        return self._facts.size_bytes

    @property
    def n_vocab(self):
        """Token ids are [0, n_vocab)."""
        return self._facts.n_vocab

    @property
    def n_ctx_train(self):
        """Context in tokens that the model was trained with."""
        return self._facts.n_ctx_train

    @property
    def n_embd(self):
        """Width of a hidden row."""
        return self._facts.n_embd

    @property
    def n_layer(self):
        """Layers of the trunk, MTP blocks not counted."""
        return self._facts.n_layer

    @property
    def n_layer_nextn(self):
        """MTP (NextN) blocks."""
        return self._facts.n_layer_nextn

    @property
    def n_target_layers(self):
        """Layers of the target that an EAGLE-3 or DFlash draft model reads; 0 for others."""
        return self._facts.n_target_layers

    @property
    def token_bos(self):
        """Token that begins a text; −1 if none."""
        return self._facts.token_bos

    @property
    def token_eos(self):
        """Token that ends a text; −1 if none."""
        return self._facts.token_eos

    @property
    def add_bos(self):
        """Whether the tokenizer begins texts with `token_bos`."""
        return self._facts.add_bos

    @property
    def is_recurrent(self):
        """Whether all layers are recurrent."""
        return self._facts.is_recurrent

    @property
    def is_hybrid(self):
        """Whether some layers are recurrent."""
        return self._facts.is_hybrid

    @property
    def has_encoder(self):
        """Whether the model has an encoder."""
        return self._facts.has_encoder

    @property
    def eos_token_ids(self):
        """All tokens that end a generation."""
        if self._eos_token_ids is None:
            self._eos_token_ids = tuple(i for i in range(self._facts.n_vocab) if self.is_eog(i))
        return self._eos_token_ids

    cdef str _text(self, text_getter get, const char * key):
        cdef size_t n = 0
        cdef int32_t rc = get(self._handle, key, NULL, 0, &n)
        if rc != spec.SPEC_ERR_BUFFER_TOO_SMALL:
            check(rc)
            return ""
        buf = PyByteArray_FromStringAndSize(NULL, n)
        check(get(self._handle, key, buf, n, &n))
        return bytes(buf[:n - 1]).decode("utf-8", "replace")

    def meta(self, key):
        """Returns the metadata value as text, None when the key is absent.

        Args:
            key: such as `general.name`.
        """
        encoded = encode(key, "key")
        self._use()
        try:
            return self._text(spec.spec_model_meta, encoded)
        except errors.ModelNotFound:
            return None
        finally:
            self._unuse()

    def tokenize(self, text, *, add_special=True, parse_special=False):
        """Returns the tokens of a text.

        Args:
            text: any text.
            add_special: add the tokens that begin (and end) a text, where the model wants them.
            parse_special: read the spelling of control tokens as these tokens.

        Shape:
            [n_tokens] int32.

        Raises:
            InvalidArgument: the text has a lone surrogate.
        """
        encoded = encode_text(text, "text")
        tokens = np.empty(len(encoded) + 2, np.int32)
        n = self._tokenize(encoded, tokens, bool(add_special), bool(parse_special))
        if n > len(tokens):
            tokens = np.empty(n, np.int32)
            n = self._tokenize(encoded, tokens, bool(add_special), bool(parse_special))
        return tokens[:n].copy()

    cdef Py_ssize_t _tokenize(
        self, bytes text, tokens, c_bool add_special, c_bool parse_special
    ) except -1:
        cdef Buffer out = Buffer(tokens, True)
        cdef const char * source = text
        cdef size_t n_source = len(text)
        cdef size_t n = 0
        cdef int32_t rc
        cdef const spec.spec_model * handle = self._use()
        enter_call()
        with nogil:
            rc = spec.spec_model_tokenize(
                handle, source, n_source, add_special, parse_special, <int32_t *>out.view.buf,
                <size_t>out.view.len // sizeof(int32_t), &n)
        self._unuse()
        leave_call(spec.SPEC_OK if rc == spec.SPEC_ERR_BUFFER_TOO_SMALL else rc)
        return <Py_ssize_t>n

    def token_bytes(self, token, special=False):
        """Returns the bytes of one token; alone they need not be valid UTF-8.

        Args:
            token: [0, n_vocab).
            special: spell control tokens out; else they are empty.

        Raises:
            InvalidArgument: there is no such token.
        """
        cdef int32_t token_id = int32_of(token, "token")
        self._use()
        try:
            return self._token_bytes(token_id, bool(special))
        finally:
            self._unuse()

    cdef bytes _token_bytes(self, int32_t token, c_bool special):
        cdef char small[256]
        cdef size_t n = 0
        cdef int32_t rc = spec.spec_model_token_bytes(
            self._handle, token, special, small, sizeof(small), &n)
        if rc == spec.SPEC_OK:
            return small[:n - 1]
        if rc != spec.SPEC_ERR_BUFFER_TOO_SMALL:
            check(rc)
        buf = PyByteArray_FromStringAndSize(NULL, n)
        check(spec.spec_model_token_bytes(self._handle, token, special, buf, n, &n))
        return bytes(buf[:n - 1])

    def detokenize(self, tokens, special=False):
        """Returns the bytes of several tokens; see `token_bytes`.

        Args:
            tokens: ids in [0, n_vocab).
            special: spell control tokens out; else they are left out.

        Raises:
            InvalidArgument: there is no such token.
        """
        ids = int32_array(tokens, "tokens")
        self._use()
        try:
            return b"".join([self._token_bytes(token, bool(special)) for token in ids])
        finally:
            self._unuse()

    def is_eog(self, token):
        """Returns whether the token ends a generation.

        Args:
            token: [0, n_vocab).

        Raises:
            InvalidArgument: there is no such token.
        """
        cdef c_bool out = False
        cdef int32_t token_id = int32_of(token, "token")
        handle = self._use()
        rc = spec.spec_model_is_eog(handle, token_id, &out)
        self._unuse()
        check(rc)
        return out

    def format_chat(self, messages, add_generation_prompt=True):
        """Returns messages in the model's chat format.

        The template is a program of the model's file; it runs in a process of its own
        (`ChatProcess`), which starts with the first chat, or with `start_chat`.

        Args:
            messages: pairs of role and content.
            add_generation_prompt: end with what makes the model answer.

        Raises:
            InvalidArgument: there are no messages, or a text has a NUL or a lone surrogate.
            BadTemplate: the template failed on these messages, or used up its time or memory.
            Unsupported: the model has no template.
            InternalError: the process cannot be started.
        """
        return self._chat_process().format(messages, add_generation_prompt)

    def start_chat(self):
        """Starts the process that formats chats and returns at once, so that the first chat need
        not wait for it (about 0.3 s).

        Raises:
            Unsupported: the model has no template.
            InternalError: the process cannot be started.
        """
        self._chat_process().start()

    cdef object _chat_process(self):
        self._use()
        self._unuse()
        if self._chat is None:
            raise errors.Unsupported(f"the model {self.path} has no chat template")
        return self._chat


# Chat templates.

@cython.final
cdef class ChatTemplate:
    """A chat template, run here: a hostile one ends this process. `ChatProcess` runs it elsewhere.

    Args:
        source: the template (Jinja).
        bos: spelling of the token at the beginning; empty when there is none.
        eos: spelling of the token at the end.
        add_bos: the tokenizer adds the token, so it is taken away from a chat's beginning.
        add_eos: likewise at the end.

    Raises:
        BadTemplate: the template cannot be parsed, is too long or nests too deep.

    Thread:
        One at a time.
    """

    cdef spec.spec_chat * _handle

    def __cinit__(self, source, bos, eos, bint add_bos, bint add_eos):
        cdef spec.spec_chat_params params
        cdef int32_t rc
        encoded = (encode(source, "source"), encode(bos, "bos"), encode(eos, "eos"))
        params.source = encoded[0]
        params.bos = encoded[1]
        params.eos = encoded[2]
        params.add_bos = add_bos
        params.add_eos = add_eos
        enter_call()
        with nogil:
            rc = spec.spec_chat_open(&params, &self._handle)
        leave_call(rc)

    def __dealloc__(self):
        spec.spec_chat_free(self._handle)

    def format(self, roles, contents, c_bool add_generation_prompt):
        """Returns messages in the template's format.

        Args:
            roles: who says each message.
            contents: what they say.
            add_generation_prompt: end with what makes a model answer.

        Raises:
            InvalidArgument: there are no messages, or not as many roles as contents.
            BadTemplate: the template failed on these messages.
        """
        cdef Strings c_roles = Strings(roles, "role")
        cdef Strings c_contents = Strings(contents, "content")
        cdef size_t n_messages = len(c_roles.encoded)
        cdef size_t n = 65536 + 2 * sum(map(len, c_contents.encoded))
        cdef int32_t rc = spec.SPEC_ERR_BUFFER_TOO_SMALL
        cdef char * out
        if len(c_contents.encoded) != n_messages:
            raise errors.InvalidArgument(
                f"there are {n_messages} roles and {len(c_contents.encoded)} contents")
        while rc == spec.SPEC_ERR_BUFFER_TOO_SMALL:
            buf = PyByteArray_FromStringAndSize(NULL, n)
            out = buf
            enter_call()
            with nogil:
                rc = spec.spec_chat_format(
                    self._handle, c_roles.pointers, c_contents.pointers, n_messages,
                    add_generation_prompt, out, n, &n)
            leave_call(spec.SPEC_OK if rc == spec.SPEC_ERR_BUFFER_TOO_SMALL else rc)
        return bytes(buf[:n - 1]).decode("utf-8", "replace")


# Samplers.

@cython.final
@cython.no_gc_clear
cdef class Sampler:
    """Chooses the tokens of one sequence; made on any thread, used once: `Engine.seq_begin` takes
    it over.

    Args:
        model: the target model.
        params: None means the defaults of `SamplingParams`.

    Raises:
        InvalidArgument: a parameter is out of its range for this model.
        BadGrammar: the grammar cannot be parsed.
    """

    cdef spec.spec_sampler * _handle
    cdef Model _model
    cdef readonly object params
    """The parameters that it was made with; None of one that came out of a snapshot."""

    def __cinit__(self, Model model not None, params=None, *, bint _is_parked=False):
        cdef spec.spec_sampler_params c
        if _is_parked:  # `Engine.park` fills in what it has
            model._use()
            self._model = model
            self.params = params
            return
        self.params = SamplingParams() if params is None else params
        if not isinstance(self.params, SamplingParams):
            raise TypeError(f"params must be SamplingParams, not {type(params).__name__}")
        _kept = fill_sampler_params(&c, self.params)
        self._init(model, &c)

    cdef int _init(self, Model model, const spec.spec_sampler_params * params) except -1:
        cdef int32_t rc
        cdef const spec.spec_model * handle = model._use()
        self._model = model
        enter_call()
        with nogil:
            rc = spec.spec_sampler_init(handle, params, &self._handle)
        return leave_call(rc)

    def __dealloc__(self):
        self._free()

    cdef spec.spec_sampler * _take(self, Model target) except NULL:
        """Takes the handle out, so that no other thread can close it or hand it over meanwhile."""
        cdef spec.spec_sampler * handle = self._handle
        if handle is NULL:
            raise errors.Closed("the sampler was used or closed before")
        if self._model is not target:
            raise errors.InvalidArgument("the sampler was made for another model")
        self._handle = NULL
        return handle

    cdef void _put(self, spec.spec_sampler * handle) noexcept:
        """Puts back what `_take` returned; NULL where an engine owns it now."""
        if handle is NULL or self._model is None:  # closed meanwhile
            spec.spec_sampler_free(handle)
            self._free()
        else:
            self._handle = handle

    cdef void _free(self) noexcept:
        spec.spec_sampler_free(self._handle)
        self._handle = NULL
        if self._model is not None:
            self._model._unuse()
            self._model = None

    @property
    def is_used(self):
        """Whether an engine took it over, or it was closed."""
        return self._handle is NULL

    @property
    def n_known(self):
        """Tokens of its sequence that a parked sampler knows; 0 of a new or used one."""
        return self._history()[0]

    @property
    def has_chosen(self):
        """Whether a parked sampler chose the last of these tokens."""
        return self._history()[1]

    cdef tuple _history(self):
        cdef int32_t n_known = 0
        cdef c_bool has_chosen = False
        if self._handle is not NULL:
            check(spec.spec_sampler_get_history(self._handle, &n_known, &has_chosen))
        return n_known, bool(has_chosen)

    def close(self):
        """Frees it, unless an engine has it. Harmless when done twice."""
        self._free()


BIAS_DTYPE = np.dtype([("token", np.int32), ("bias", np.float32)])


cdef object fill_sampler_params(spec.spec_sampler_params * c, params):
    """Fills the C struct; it is valid as long as the returned object lives."""
    grammar = encode(params.grammar, "grammar")
    breakers = Strings(params.dry_breakers or (), "dry_breakers")
    bias = Buffer(np.array(list(params.logit_bias), BIAS_DTYPE))
    order = [SAMPLERS.index(name) for name in params.samplers or ()]
    kinds = Buffer(np.array(order, np.int32))
    c.seed = spec.SPEC_SEED_RANDOM if params.seed is None else params.seed
    c.temperature = params.temperature
    c.top_k = params.top_k
    c.top_p = params.top_p
    c.min_p = params.min_p
    c.typical_p = params.typical_p
    c.top_n_sigma = -1.0 if params.top_n_sigma is None else params.top_n_sigma
    c.penalty_last_n = params.penalty_last_n
    c.penalty_repeat = params.penalty_repeat
    c.penalty_frequency = params.penalty_frequency
    c.penalty_presence = params.penalty_presence
    c.dry_multiplier = params.dry_multiplier
    c.dry_base = params.dry_base
    c.dry_allowed_length = params.dry_allowed_length
    c.dry_penalty_last_n = params.dry_penalty_last_n
    c.dry_breakers = NULL if params.dry_breakers is None else (<Strings>breakers).pointers
    c.n_dry_breakers = -1 if params.dry_breakers is None else len(params.dry_breakers)
    c.xtc_probability = params.xtc_probability
    c.xtc_threshold = params.xtc_threshold
    c.logit_bias = <const spec.spec_logit_bias *>(<Buffer>bias).view.buf
    c.n_logit_bias = len(params.logit_bias)
    c.grammar = <const char *>(<bytes>grammar)
    c.ignore_eos = params.ignore_eos
    c.logprobs = params.logprobs
    c.n_top_logprobs = params.n_top_logprobs
    c.min_keep = params.min_keep
    c.dynatemp_range = params.dynatemp_range
    c.dynatemp_exponent = params.dynatemp_exponent
    c.mirostat = params.mirostat
    c.mirostat_tau = params.mirostat_tau
    c.mirostat_eta = params.mirostat_eta
    c.adaptive_target = -1.0 if params.adaptive_target is None else params.adaptive_target
    c.adaptive_decay = params.adaptive_decay
    c.samplers = <const int32_t *>(<Buffer>kinds).view.buf
    c.n_samplers = -1 if params.samplers is None else len(order)
    return grammar, breakers, bias, kinds


def default_sampling_params():
    """Returns the defaults of `spec.h`; those of `SamplingParams` are the same."""
    cdef spec.spec_sampler_params c
    spec.spec_sampler_default_params(&c)
    return SamplingParams(
        seed=None if c.seed == spec.SPEC_SEED_RANDOM else c.seed,
        top_n_sigma=None if c.top_n_sigma <= 0 else c.top_n_sigma,
        dry_breakers=None,
        temperature=c.temperature,
        top_k=c.top_k,
        top_p=c.top_p,
        min_p=c.min_p,
        typical_p=c.typical_p,
        penalty_last_n=c.penalty_last_n,
        penalty_repeat=c.penalty_repeat,
        penalty_frequency=c.penalty_frequency,
        penalty_presence=c.penalty_presence,
        dry_multiplier=c.dry_multiplier,
        dry_base=c.dry_base,
        dry_allowed_length=c.dry_allowed_length,
        dry_penalty_last_n=c.dry_penalty_last_n,
        xtc_probability=c.xtc_probability,
        xtc_threshold=c.xtc_threshold,
        ignore_eos=c.ignore_eos,
        logprobs=c.logprobs,
        n_top_logprobs=c.n_top_logprobs,
        min_keep=c.min_keep,
        dynatemp_range=c.dynatemp_range,
        dynatemp_exponent=c.dynatemp_exponent,
        mirostat=c.mirostat,
        mirostat_tau=c.mirostat_tau,
        mirostat_eta=c.mirostat_eta,
        adaptive_target=None if c.adaptive_target < 0 else c.adaptive_target,
        adaptive_decay=c.adaptive_decay,
    )


# Engines.

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
    c.n_min = params.n_min
    c.exact = params.exact
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
        n_min=c.n_min,
        exact=c.exact,
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
        self._sampler_params[c_seq_id] = sampler.params
        self._leave(rc, c_seq_id)

    def start(
        self, seq_id, Sampler sampler, n_kept=0, *, source=None, snapshot=None, is_resumed=False
    ):
        """Takes a sequence into use, idle or not, with tokens that are computed already.

        They are the first ones of a snapshot, of another sequence, or else of what this one holds;
        the rest of that is gone. A new sampler is fed them. A resumed one, which `park` returned,
        is not fed what it knows: the sequence's tokens up to the last one chosen are computed
        again by entries, of which the one with the last token is an output.

        Args:
            seq_id: [0, n_seq_max).
            sampler: as in `seq_begin`, or parked; None is the snapshot's own, with is_resumed.
            n_kept: tokens that stay, [0, those held there]; 0 begins empty.
            source: another sequence whose first tokens are copied; it stays as it is.
            snapshot: what `save` returned; any bytes-like object.
            is_resumed: whether the sampler was parked, or is the snapshot's.

        Returns:
            n_kept, or 0 where nothing could be kept: a recurrent target goes on only from all that
            a sequence or snapshot holds, and copies from no other; a snapshot may be damaged or
            foreign. The sequence has begun then, empty; without a sampler it stays idle.

        Raises:
            BadSeqId: there is no such sequence.
            SeqIdle: the source has not begun.
            BadPlan: n_kept is more than is held there, or more than a parked sampler allows; or
                tokens are pending.
            InvalidArgument: the sampler was made for another model, or there is none.
            Closed: the sampler was used before.
        """
        cdef spec.spec_start c
        cdef spec.spec_sampler * owned = NULL
        cdef int32_t n = 0
        cdef int32_t rc
        cdef Buffer held = None
        c.seq_id = self._seq_id(seq_id)
        c.n_kept = int32_of(n_kept, "n_kept")
        c.source = -1 if source is None else self._seq_id(source)
        c.is_resumed = is_resumed
        c.snapshot = NULL
        c.n_snapshot = 0
        if snapshot is not None:
            held = Buffer(snapshot)
            c.snapshot = held.view.buf
            c.n_snapshot = <size_t>held.view.len
        cdef spec.spec_engine * handle = self._enter()
        if sampler is not None:
            try:
                owned = sampler._take(self.target)
            except BaseException:
                self._leave(spec.SPEC_OK)
                raise
        with nogil:
            rc = spec.spec_engine_seq_start(handle, &c, &owned, &n)
        if sampler is not None:
            sampler._put(owned)
        if rc == spec.SPEC_OK:
            self._sampler_params[c.seq_id] = None if sampler is None else sampler.params
        self._leave(rc, c.seq_id)
        return n

    def accepts(self, Sampler sampler not None):
        """Whether a sampler was made for this engine's target and is not used yet."""
        return sampler._model is self.target and sampler._handle is not NULL

    def park(self, seq_id):
        """Frees a sequence but for its sampler, which it returns.

        The sampler keeps what it knows of the sequence: penalties, grammar and random state, that
        of sampled drafts too. `start` with is_resumed takes it up again.

        Args:
            seq_id: [0, n_seq_max).

        Raises:
            BadSeqId: there is no such sequence.
            SeqIdle: the sequence has not begun.
            BadPlan: a proposal of this sequence is pending, or its last batch was not processed.
        """
        cdef int32_t c_seq_id = self._seq_id(seq_id)
        cdef int32_t rc
        params = self._sampler_params.get(c_seq_id)
        cdef Sampler sampler = Sampler(self.target, params, _is_parked=True)
        cdef spec.spec_engine * handle = self._enter()
        with nogil:
            rc = spec.spec_engine_seq_park(handle, c_seq_id, &sampler._handle)
        self._leave(rc, c_seq_id)
        return sampler

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

    @property
    def draft_work(self):
        """What drafting has cost since the engine was made (`DraftWork`)."""
        cdef spec.spec_draft_work c
        self._leave(spec.spec_engine_get_draft_work(self._enter(), &c))
        return DraftWork(n_drafts=c.n_drafts, n_positions=c.n_positions, n_passes=c.n_passes)

    def step(self, entries, tokens, drafts=None, n_steps=1):
        """Runs one step of all sequences of a plan: draft, decode, verify, accept, roll back.

        With `n_steps` it may run more of them, each sequence going on from the token that it has
        emitted: for callers who have nothing to decide in between, and whose part takes longer
        than a step of a small model. The run ends early with the step in which a sequence emits an
        end token, fails, finds no room or fills its context, or when somebody calls `interrupt`.

        Args:
            entries: one per sequence; see `spec_plan_entry` in `spec.h`.
            tokens: the tokens that the entries and drafts point to.
            drafts: drafts to be verified in place of the drafter's; see `spec_given_draft`.
            n_steps: most steps of a run, [1, 64]; above 1 every entry is an output without a
                draft.

        Shape:
            entries [n_entries] PLAN_DTYPE, tokens [n_tokens] int32,
            drafts [n_drafts] DRAFT_DTYPE.

        Raises:
            BadPlan, BadSeqId, SeqIdle, InvalidArgument: the plan is wrong; nothing has changed.

        Returns:
            A `StepResult`; each entry's status tells what became of its sequence. Its arrays are
            copies.
        """
        if not isinstance(entries, np.ndarray) or entries.dtype != PLAN_DTYPE or entries.ndim != 1:
            raise TypeError("entries must be an array of PLAN_DTYPE with one dimension")
        cdef Buffer c_entries = Buffer(np.ascontiguousarray(entries))
        cdef Buffer c_drafts
        cdef Buffer c_tokens = Buffer(int32_array(tokens, "tokens"))
        cdef spec.spec_plan plan
        plan.entries = <const spec.spec_plan_entry *>c_entries.view.buf
        plan.n_entries = <int32_t>(c_entries.view.len // <Py_ssize_t>sizeof(spec.spec_plan_entry))
        plan.tokens = <const int32_t *>c_tokens.view.buf
        plan.n_tokens = <int32_t>(c_tokens.view.len // <Py_ssize_t>sizeof(int32_t))
        plan.drafts = NULL
        plan.n_drafts = 0
        plan.n_steps = int32_of(n_steps, "n_steps")
        if drafts is not None:
            if getattr(drafts, "dtype", None) != DRAFT_DTYPE or drafts.ndim != 1:
                raise TypeError("drafts must be an array of DRAFT_DTYPE with one dimension")
            c_drafts = Buffer(np.ascontiguousarray(drafts))
            plan.drafts = <const spec.spec_given_draft *>c_drafts.view.buf
            plan.n_drafts = <int32_t>(
                c_drafts.view.len // <Py_ssize_t>sizeof(spec.spec_given_draft)
            )
        cdef spec.spec_result r
        return self._step(&plan, &r, False, False)

    def step_rows(
        self, list entries, list tokens, list drafts, n_steps=1, *, bint has_logprobs=False
    ):
        """Runs one step, or a run of them, as `step` does, from plain numbers and to plain numbers.

        For servers: between two steps the engine idles, and arrays take longer to make than small
        plans to compute.

        Args:
            entries: the fields of PLAN_DTYPE, one entry after the other.
            tokens: the tokens that the entries and drafts point to.
            drafts: the fields of DRAFT_DTYPE, one draft after the other.
            n_steps: most steps of a run; see `step`.
            has_logprobs: whether log-probabilities are wanted.

        Raises:
            BadPlan, BadSeqId, SeqIdle, InvalidArgument: the plan is wrong; nothing has changed.

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
        cdef size_t n = <size_t>(n_entries + n_tokens + n_drafts) + 1
        cdef int32_t * numbers = <int32_t *>PyMem_Malloc(n * sizeof(int32_t))
        if numbers is NULL:
            raise MemoryError
        cdef spec.spec_plan plan
        cdef spec.spec_result r
        try:
            copy_numbers(entries, n_entries, numbers)
            copy_numbers(tokens, n_tokens, numbers + n_entries)
            copy_numbers(drafts, n_drafts, numbers + n_entries + n_tokens)
            plan.entries = <const spec.spec_plan_entry *>numbers
            plan.n_entries = <int32_t>(n_entries // 6)
            plan.tokens = numbers + n_entries
            plan.n_tokens = <int32_t>n_tokens
            plan.drafts = <const spec.spec_given_draft *>(numbers + n_entries + n_tokens)
            plan.n_drafts = <int32_t>(n_drafts // 3)
            plan.n_steps = int32_of(n_steps, "n_steps")
            return self._step(&plan, &r, True, has_logprobs)
        finally:
            PyMem_Free(numbers)

    cdef object _step(
        self, const spec.spec_plan * plan, spec.spec_result * r, bint is_plain, bint has_logprobs
    ):
        cdef int32_t rc
        cdef int32_t i
        cdef spec.spec_engine * handle = self._enter()
        with nogil:
            rc = spec.spec_engine_step(handle, plan, r)
        result = error = None
        try:
            if rc == spec.SPEC_OK:
                result = rows_of(r, has_logprobs) if is_plain else result_of(r)
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

    def seq_let_go(self, seq_id):
        """Gives up a sequence's draft state: it goes on without drafts.

        Feeding its drafter costs no time any more. `seq_take_up` turns it back.

        Args:
            seq_id: [0, n_seq_max).

        Raises:
            SeqIdle: the sequence has not begun.
        """
        cdef int32_t c_seq_id = self._seq_id(seq_id)
        self._leave(spec.spec_engine_seq_let_go(self._enter(), c_seq_id), c_seq_id)

    def seq_take_up(self, seq_id):
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
        self._leave(spec.spec_engine_seq_take_up(self._enter(), c_seq_id), c_seq_id)

    cdef tuple _tokens(self, int32_t seq_id):
        tokens = np.empty(self.limits.n_ctx_seq, np.int32)
        cdef Buffer out = Buffer(tokens, True)
        cdef size_t n = 0
        cdef int32_t id_last = -1
        cdef int32_t rc = spec.spec_engine_seq_tokens(
            self._enter(), seq_id, <int32_t *>out.view.buf, len(tokens), &n, &id_last)
        self._leave(rc, seq_id)
        return tokens[:n].copy(), None if id_last < 0 else id_last

    def save(self, seq_id):
        """Returns a snapshot: the sequence whole, to go on from here later, elsewhere or twice.

        It holds the tokens, the cells of both contexts, the drafter's state and the sampler with
        its random state. Other sequences may hold open proposals.

        Args:
            seq_id: [0, n_seq_max).

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
        self._save(c_seq_id, NULL, 0, &n)
        blob = PyBytes_FromStringAndSize(NULL, n)
        if not self._save(c_seq_id, <char *>blob, n, &n):
            raise errors.InternalError("the snapshot grew while it was written")
        return blob

    cdef bint _save(self, int32_t seq_id, char * buf, size_t cap, size_t * n) except -1:
        """Writes a snapshot; False where the buffer is too small."""
        cdef int32_t rc
        cdef spec.spec_engine * handle = self._enter()
        with nogil:
            rc = spec.spec_engine_seq_save(handle, seq_id, buf, cap, n)
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
            SeqBusy: the sequence has begun already.
            NoRoom: no KV cells are free; nothing has changed.
        """
        cdef int32_t c_seq_id = self._seq_id(seq_id)
        cdef Buffer source = Buffer(snapshot)
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
        ids = np.array([self._seq_id(seq_id) for seq_id in samplers], np.int32)
        handles = np.zeros(len(ids), np.uintp)
        held = list(samplers.values())
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


cdef int copy_numbers(list values, Py_ssize_t n, int32_t * out) except -1:
    """Copies n integers of 32 bits.

    The length is the caller's: an integer's own `__index__` may have changed the list since.
    """
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


cdef object rows_of(const spec.spec_result * r, bint has_logprobs):
    cdef int32_t i
    cdef const spec.spec_result_entry * e
    entries = []
    for i in range(r.n_entries):
        e = &r.entries[i]
        entries.append((
            e.seq_id, e.status, e.n_past, e.token_offset, e.n_tokens, e.n_drafted, e.n_accepted,
            e.flags))
    tokens = [r.tokens[i] for i in range(r.n_tokens)]
    logprobs = [r.logprobs[i] for i in range(r.n_tokens)] if has_logprobs else []
    return StepRows(
        entries, tokens, logprobs, r.n_batch_tokens, r.n_steps,
        r.t_draft_us, r.t_decode_us, r.t_process_us, r.t_sample_us, r.t_total_us)


cdef object result_of(const spec.spec_result * r):
    return StepResult(
        array_of(r.entries, r.n_entries, RESULT_DTYPE), array_of(r.tokens, r.n_tokens, _int32),
        array_of(r.logprobs, r.n_tokens, _float32), r.n_batch_tokens,
        r.t_draft_us, r.t_decode_us, r.t_process_us, r.t_sample_us, r.t_total_us,
        array_of(r.top_tokens, r.n_tokens * r.n_top, _int32).reshape(r.n_tokens, r.n_top),
        array_of(r.top_logprobs, r.n_tokens * r.n_top, _float32).reshape(r.n_tokens, r.n_top),
        r.n_steps)


# Grammars.

def check_grammar(grammar):
    """Compiles a grammar without a model, to see whether it can constrain a sequence.

    Args:
        grammar: GBNF with a rule `root`, at most 64 KiB.

    Raises:
        BadGrammar: it cannot be parsed, its repetitions expand too far, it is left-recursive or too
            ambiguous.

    Thread:
        Any, several at once.
    """
    encoded = encode(grammar, "grammar")
    cdef const char * text = encoded
    cdef int32_t rc
    enter_call()
    with nogil:
        rc = spec.spec_grammar_check(text)
    leave_call(rc)


def grammar_accepts(grammar, text):
    """Returns whether a grammar generates exactly this text.

    Args:
        grammar: GBNF with a rule `root`, at most 64 KiB.
        text: at most 64 KiB of UTF-8.

    Raises:
        BadGrammar: see `check_grammar`.

    Thread:
        Any, several at once.
    """
    encoded = encode(grammar, "grammar")
    encoded_text = encode_text(text, "text")
    cdef const char * c_grammar = encoded
    cdef const char * c_text = encoded_text
    cdef size_t n_text = len(encoded_text)
    cdef c_bool out = False
    cdef int32_t rc
    enter_call()
    with nogil:
        rc = spec.spec_grammar_accepts(c_grammar, c_text, n_text, &out)
    leave_call(rc)
    return out


# Embeddings.

@cython.final
@cython.no_gc_clear
cdef class Embedder:
    """Embeddings of texts, through a context of its own over a model.

    Args:
        model: the model whose hidden states are read; the embedder keeps it alive.
        params: None means the defaults of `EmbedderParams`.

    Raises:
        Unsupported: the model is a draft model, or has no classification head for rank.
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


# Decoders.

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
            target was given; the target does not show them.
        NotEagle3, IncompatibleDraft: the model does not draft for this target.
        InvalidArgument: the configuration does not fit the model.
        OutOfMemory: memory could not be allocated.

    Thread:
        The thread that made it only; every other call raises WrongThread, except `close` while no
        call is in flight.
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
        """Begins a call: the context is open, the thread owns it, no other call is in flight."""
        enter_call()
        if self._handle is NULL:
            self._refuse(errors.Closed("the decoder context is closed"))
        if self.target is not None and self.target._handle is NULL:
            self._refuse(errors.Closed("the target's decoder context is closed"))
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
        what = "a call is in flight" if self._is_busy else "it was made there"
        return errors.WrongThread(
            f"thread {caller} called a decoder context of thread {self.owner} ({what})",
            owner=self.owner, caller=caller)

    cdef int _leave(self, int32_t rc) except -1:
        self._is_busy = False
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


def embed_tokens(Model model not None, tokens):
    """Returns rows of a model's embedding table, before any scale of the architecture.

    Args:
        model: loaded with its weights.
        tokens: ids in [0, n_vocab), at most 65,536.

    Shape:
        [n_tokens, n_embd] float32.

    Raises:
        InvalidArgument: there is no such token, or there are none.
        Unsupported: the model has no such table, or its device cannot read it alone.
    """
    cdef Buffer c_tokens = Buffer(int32_array(tokens, "tokens"))
    cdef int32_t n = <int32_t>(c_tokens.view.len // <Py_ssize_t>sizeof(int32_t))
    rows = np.empty((n, model.n_embd), np.float32)
    cdef Buffer out = Buffer(rows, True)
    cdef int32_t rc
    cdef const spec.spec_model * handle = model._use()
    enter_call()
    with nogil:
        rc = spec.spec_model_embed(
            handle, <const int32_t *>c_tokens.view.buf, n, <float *>out.view.buf)
    model._unuse()
    leave_call(rc)
    return rows


def apply_lm_head(Model model not None, hidden, int width):
    """Returns the product of hidden rows and a model's output matrix, tied or not.

    Args:
        model: loaded with its weights.
        hidden: rows after the final norm, [n_rows, width].
        width: of a row; `DecoderLimits.n_embd_out`.

    Shape:
        [n_rows, n_vocab] float32.

    Raises:
        InvalidArgument: the rows have another width, or there are none.
        Unsupported: the model has no such matrix, or its device cannot compute this alone.
    """
    rows = np.ascontiguousarray(hidden, np.float32)
    if rows.ndim != 2 or rows.shape[1] != width:
        raise errors.InvalidArgument(f"hidden must be [n_rows, {width}], not {rows.shape}")
    scores = np.empty((len(rows), model.n_vocab), np.float32)
    cdef Buffer c_rows = Buffer(rows)
    cdef Buffer out = Buffer(scores, True)
    cdef int32_t n = <int32_t>len(rows)
    cdef int32_t rc
    cdef const spec.spec_model * handle = model._use()
    enter_call()
    with nogil:
        rc = spec.spec_model_lm_head(
            handle, <const float *>c_rows.view.buf, n, <float *>out.view.buf)
    model._unuse()
    leave_call(rc)
    return scores


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
    return check_layout()


check_library()
spec.spec_set_log(log_ring_put, NULL)
