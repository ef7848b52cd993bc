# Models, their chat templates, and the tables at both ends.

cimport cython
from cpython.bytearray cimport PyByteArray_FromStringAndSize
from cpython.exc cimport PyErr_CheckSignals
from libc.stdint cimport int32_t
from libc.string cimport memset

from drafthouse_engine cimport spec
from libcpp cimport bool as c_bool

import os

import numpy as np

from drafthouse_engine import errors
from drafthouse_engine.chat_process import ChatProcess
from drafthouse_engine.limits import BreakerStats


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
        use_mmap: map the file instead of reading it, where placement does not say how.
        vocab_only: load tokenizer and metadata only; such a model cannot make an engine.
        load_mtp: load the weights of MTP heads too, if there are any; the draft type `mtp` needs
            them.
        placement: where the weights lie (`Placement`); None is whole layers over all devices.
        placed_by: a `Survey` of this file, whose last `fit` says which weights lie where; then
            n_gpu_layers does not count.
        progress: called with the share loaded, [0, 1]; an exception in it stops the load and is
            raised again.

    Raises:
        ModelNotFound: the file does not exist or cannot be read.
        BadModel: the file is not a usable GGUF model.
        Unsupported: the file holds MTP layers alone, without their model.
        InvalidArgument: a placement that this machine, its devices or the model cannot have.
        OutOfMemory: the host's memory or a device's could not be allocated.
        Closed: placed_by is closed.
        WrongThread: another call of placed_by is in flight.

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
        Survey placed_by=None, placement=None, progress=None
    ):
        cdef spec.spec_model_params params
        cdef PlacementText places
        memset(&params, 0, sizeof(params))
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
        places = PlacementText(placement)
        places.fill(&params)
        if placed_by is not None:
            placed_by._enter()  # so that nobody closes it while it is read
            params.placed_by = placed_by._handle
        try:
            self._load(&params, watcher)
        finally:
            if placed_by is not None:
                placed_by._leave()
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

    def setting(self, key):
        """Returns what llama.cpp has made of a parameter of the load, as text.

        Args:
            key: `device` (names, commas between; empty is the CPU alone), `split_mode`,
                `tensor_split`, `gpu_layers`, `buffers` (`TYPE=BYTES`, commas between), `host_bytes`
                (of the weights that the CPU computes with), or `buffer:NAME`, the buffer type in
                which the tensor NAME lies.

        Raises:
            InvalidArgument: there is no such key, or the model was loaded with vocab_only.
            ModelNotFound: there is no such tensor.
        """
        encoded = encode(key, "key")
        self._use()
        try:
            return self._text(spec.spec_model_setting, encoded)
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

    def tokenize_plain(self, text, plain, *, add_special=True):
        """Returns the tokens of a text of which parts are plain.

        The spelling of a control token is read as that token, but where it touches a plain part:
        there it is text. Without control tokens in plain parts the tokens are those of `tokenize`
        with `parse_special`: merges go across the borders of a part.

        Args:
            text: any text, or its UTF-8 bytes.
            plain: bytes [begin, end) of the text's UTF-8, in order and apart.
            add_special: add the tokens that begin (and end) a text, where the model wants them.

        Shape:
            plain [n, 2] integers; returns [n_tokens] int32.

        Raises:
            InvalidArgument: the text has a lone surrogate, or a span is not within it.
        """
        encoded = text if isinstance(text, bytes) else encode_text(text, "text")
        spans = span_array(plain)
        tokens = np.empty(len(encoded) + 2, np.int32)
        n = self._tokenize_plain(encoded, spans, tokens, bool(add_special))
        if n > len(tokens):
            tokens = np.empty(n, np.int32)
            n = self._tokenize_plain(encoded, spans, tokens, bool(add_special))
        return tokens[:n].copy()

    cdef Py_ssize_t _tokenize_plain(
        self, bytes text, spans, tokens, c_bool add_special
    ) except -1:
        cdef Buffer out = Buffer(tokens, True)
        cdef Buffer plain = Buffer(spans)
        cdef const char * source = text
        cdef size_t n_source = len(text)
        cdef size_t n_plain = len(spans)
        cdef size_t n = 0
        cdef int32_t rc
        cdef const spec.spec_model * handle = self._use()
        enter_call()
        with nogil:
            rc = spec.spec_model_tokenize_plain(
                handle, source, n_source, <const spec.spec_span *>plain.view.buf, n_plain,
                add_special, <int32_t *>out.view.buf, <size_t>out.view.len // sizeof(int32_t), &n)
        self._unuse()
        leave_call(spec.SPEC_OK if rc == spec.SPEC_ERR_BUFFER_TOO_SMALL else rc)
        return <Py_ssize_t>n

    def find_control(self, text):
        """Returns where a text spells control tokens: those that `parse_special` reads as such.

        Args:
            text: any text.

        Shape:
            [n, 2] int64: bytes [begin, end) of the text's UTF-8, in order and apart.

        Raises:
            InvalidArgument: the text has a lone surrogate.
        """
        cdef bytes encoded = encode_text(text, "text")
        cdef const char * source = encoded
        cdef size_t n_source = len(encoded)
        cdef size_t n = 8
        cdef int32_t rc = spec.SPEC_ERR_BUFFER_TOO_SMALL
        cdef Buffer out
        cdef const spec.spec_model * handle
        while rc == spec.SPEC_ERR_BUFFER_TOO_SMALL:
            spans = np.empty((n, 2), np.uintp)
            out = Buffer(spans, True)
            handle = self._use()
            enter_call()
            with nogil:
                rc = spec.spec_model_find_control(
                    handle, source, n_source, <spec.spec_span *>out.view.buf, n, &n)
            self._unuse()
            leave_call(spec.SPEC_OK if rc == spec.SPEC_ERR_BUFFER_TOO_SMALL else rc)
        return spans[:n].astype(np.int64)

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
            Unsupported: the model has no tokenizer.
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
            Unsupported: the model has no tokenizer.
        """
        ids = int32_array(tokens, "tokens")
        self._use()
        try:
            return b"".join([self._token_bytes(token, bool(special)) for token in ids])
        finally:
            self._unuse()

    @property
    def breaker_stats(self):
        """What finding the DRY breakers of its samplers has cost (`BreakerStats`)."""
        cdef spec.spec_breaker_stats c
        handle = self._use()
        rc = spec.spec_model_get_breaker_stats(handle, &c)
        self._unuse()
        check(rc)
        return BreakerStats(n_searched=c.n_searched, n_bytes=c.n_bytes, n_held=c.n_held)

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

    def open_template(self):
        """Returns the model's chat template, to be run in this process, which a hostile one ends:
        for a process that has nothing to lose. `format_chat` runs it elsewhere.

        Raises:
            Unsupported: the model has no template.
            BadTemplate: it cannot be parsed, is too long or nests too deep.
        """
        self._chat_process()
        return ChatTemplate(
            self.chat_template, self._spelling(self._facts.token_bos),
            self._spelling(self._facts.token_eos), self._facts.add_bos, self._facts.add_eos)

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
        return self.format_marked(roles, contents, add_generation_prompt)[0].decode(
            "utf-8", "replace")

    def format_marked(self, roles, contents, c_bool add_generation_prompt, arguments=None):
        """Returns messages in the template's format, and which of its bytes messages brought.

        A role that is a word (ASCII letters, digits, _ and -) counts as the template's own.

        Args:
            roles: who says each message.
            contents: what they say.
            add_generation_prompt: end with what makes a model answer.
            arguments: what the template finds under names such as enable_thinking: JSON texts
                of at most 64 levels.

        Returns:
            The text as UTF-8, and spans of it for `Model.tokenize_plain`. There are none where
            llama.cpp has changed the text after the template made it.

        Shape:
            spans [n, 2] int64: bytes [begin, end), in order and apart.

        Raises:
            InvalidArgument: there are no messages, or not as many roles as contents; an argument
                has a name of messages or the tokenizer, or nests more.
            BadTemplate: the template failed on these messages, or an argument is no JSON.
        """
        cdef Strings c_roles = Strings(roles, "role")
        cdef Strings c_contents = Strings(contents, "content")
        given = {} if arguments is None else dict(arguments)
        cdef Strings c_names = Strings(given, "name of an argument")
        cdef Strings c_values = Strings(given.values(), "argument")
        cdef size_t n_arguments = len(given)
        cdef size_t n_messages = len(c_roles.encoded)
        cdef size_t n = 65536 + 2 * sum(map(len, c_contents.encoded))
        cdef size_t n_input = 16 + 2 * n_messages
        cdef size_t cap = 0
        cdef size_t cap_input = 0
        cdef int32_t rc = spec.SPEC_ERR_BUFFER_TOO_SMALL
        cdef char * out
        cdef Buffer input
        if len(c_contents.encoded) != n_messages:
            raise errors.InvalidArgument(
                f"there are {n_messages} roles and {len(c_contents.encoded)} contents")
        while rc == spec.SPEC_ERR_BUFFER_TOO_SMALL:
            cap = max(cap, n)
            cap_input = max(cap_input, n_input)
            buf = PyByteArray_FromStringAndSize(NULL, cap)
            spans = np.empty((cap_input, 2), np.uintp)
            out = buf
            input = Buffer(spans, True)
            enter_call()
            with nogil:
                rc = spec.spec_chat_format_marked(
                    self._handle, c_roles.pointers, c_contents.pointers, n_messages,
                    c_names.pointers, c_values.pointers, n_arguments, add_generation_prompt, out,
                    cap, &n, <spec.spec_span *>input.view.buf, cap_input, &n_input)
            leave_call(spec.SPEC_OK if rc == spec.SPEC_ERR_BUFFER_TOO_SMALL else rc)
        return bytes(buf[:n - 1]), spans[:n_input].astype(np.int64)


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
