# Samplers and grammars.

cimport cython
from libc.stdint cimport int32_t

from drafthouse_engine cimport spec
from libcpp cimport bool as c_bool

import numpy as np

from drafthouse_engine import errors
from drafthouse_engine.options import SAMPLERS, SamplingParams


@cython.final
@cython.no_gc_clear
cdef class Sampler:
    """Chooses the tokens of one sequence; made on any thread, used once: `Engine.seq_begin`, or a
    start of a step, takes it over.

    Args:
        model: the target model.
        params: None means the defaults of `SamplingParams`.

    Raises:
        InvalidArgument: a parameter is out of its range for this model.
        BadGrammar: the grammar cannot be parsed.
        Unsupported: the model's tokenizer has no tokens for a grammar or a DRY breaker.
    """

    cdef spec.spec_sampler * _handle
    cdef Model _model
    cdef readonly object params
    """The parameters that it was made with; None of one that came out of a snapshot."""

    def __cinit__(self, Model model not None, params=None, *, bint _is_preempted=False):
        cdef spec.spec_sampler_params c
        if _is_preempted:  # a step fills in what it has
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

    def close(self):
        """Frees it, unless an engine has it. Harmless when done twice."""
        self._free()


BIAS_DTYPE = np.dtype([("token", np.int32), ("bias", np.float32)])


cdef object fill_sampler_params(spec.spec_sampler_params * c, params):
    """Fills the C struct; it is valid as long as the returned object lives.

    Lists are counted where they have been copied: another thread may write to the caller's.
    """
    grammar = encode(params.grammar, "grammar")
    breakers = Strings(params.dry_breakers or (), "dry_breakers")
    pairs = np.array(list(map(tuple, params.logit_bias)), BIAS_DTYPE)
    bias = Buffer(pairs)
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
    c.n_dry_breakers = -1 if params.dry_breakers is None else len((<Strings>breakers).encoded)
    c.xtc_probability = params.xtc_probability
    c.xtc_threshold = params.xtc_threshold
    c.logit_bias = <const spec.spec_logit_bias *>(<Buffer>bias).view.buf
    c.n_logit_bias = <int32_t>len(pairs)
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
    c.match_only = params.match_only
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
        match_only=c.match_only,
    )


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
