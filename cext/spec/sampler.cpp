// Samplers: parameters, their checks, and what a chain need not be asked.

#include "internal.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace drafthouse {

namespace {

constexpr int32_t LOGIT_BIAS_MAX = 65536;
constexpr size_t DRY_BREAKER_BYTES_MAX = 1024;
constexpr size_t DRY_BREAKER_BYTES_READ = 40; // llama.cpp looks at no more

constexpr common_sampler_type SAMPLER_TYPES[SPEC_SAMPLER_COUNT] = {
    COMMON_SAMPLER_TYPE_PENALTIES, COMMON_SAMPLER_TYPE_DRY,       COMMON_SAMPLER_TYPE_TOP_N_SIGMA,
    COMMON_SAMPLER_TYPE_TOP_K,     COMMON_SAMPLER_TYPE_TYPICAL_P, COMMON_SAMPLER_TYPE_TOP_P,
    COMMON_SAMPLER_TYPE_MIN_P,     COMMON_SAMPLER_TYPE_XTC,       COMMON_SAMPLER_TYPE_TEMPERATURE,
    COMMON_SAMPLER_TYPE_INFILL,
};

void check_sampler_order(const spec_sampler_params & p) {
    uint32_t seen = 0;
    for (int32_t i = 0; i < p.n_samplers; ++i) {
        const int32_t kind = (&deref(p.samplers, "samplers"))[i];
        check_range("samplers", kind, 0, SPEC_SAMPLER_COUNT - 1);
        if ((seen >> kind & 1u) != 0) {
            fail(SPEC_ERR_INVALID_ARGUMENT,
                 "samplers names kind " + std::to_string(kind) + " twice");
        }
        seen |= 1u << kind;
    }
}

// llama.cpp's infill compares all pairs of candidates, and puts an end token into the list that a
// grammar has not seen.
void check_infill(const spec_model & model, const spec_sampler_params & p, bool has_grammar) {
    bool is_narrow = false;
    for (int32_t i = 0; i < p.n_samplers; ++i) {
        is_narrow =
            is_narrow || (p.samplers[i] == SPEC_SAMPLER_TOP_K && p.top_k >= 1 && p.top_k <= 1024);
        if (p.samplers[i] != SPEC_SAMPLER_INFILL) {
            continue;
        }
        if (!is_narrow || has_grammar) {
            fail(SPEC_ERR_INVALID_ARGUMENT,
                 "infill needs a top_k in [1, 1024] before it and no grammar");
        }
        if (llama_vocab_eot(model.vocab) < 0 && llama_vocab_eos(model.vocab) < 0) {
            fail(SPEC_ERR_UNSUPPORTED, "infill needs a model with an end token");
        }
    }
}

void check_biases(const spec_sampler_params & p, int32_t n_vocab) {
    check_range("n_logit_bias", p.n_logit_bias, 0, LOGIT_BIAS_MAX);
    for (int32_t i = 0; i < p.n_logit_bias; ++i) {
        const spec_logit_bias & b = (&deref(p.logit_bias, "logit_bias"))[i];
        check_token(b.token, n_vocab, "logit_bias");
        if (std::isnan(b.bias) || b.bias == std::numeric_limits<float>::infinity()) {
            fail(SPEC_ERR_INVALID_ARGUMENT, "logit_bias of token " + std::to_string(b.token) +
                                                " is not a number below infinity");
        }
    }
}

void check_breakers(const spec_sampler_params & p) {
    for (int32_t i = 0; i < p.n_dry_breakers; ++i) {
        const char * text = &deref((&deref(p.dry_breakers, "dry_breakers"))[i], "dry_breakers");
        check_range("length of a dry_breaker", static_cast<double>(std::strlen(text)), 1,
                    DRY_BREAKER_BYTES_MAX);
    }
}

// -1: what the number is for does not happen.
void check_range_or_off(const char * name, double value, double low, double high) {
    if (value != -1.0) {
        check_range(name, value, low, high);
    }
}

void check_above_or_off(const char * name, double value, double low, double high) {
    if (value != -1.0) {
        check_above(name, value, low, high);
    }
}

void check_sampler_params(const spec_sampler_params & p, int32_t n_vocab) {
#define XX(name, otherwise, check, low, high, theirs) check(#name, p.name, low, high);
    SAMPLER_FIELDS(XX, XX)
#undef XX
    check_biases(p, n_vocab);
    if (p.mirostat != 0 && p.adaptive_target >= 0.0f) {
        fail(SPEC_ERR_INVALID_ARGUMENT, "mirostat and adaptive_target both choose the token");
    }
    check_sampler_order(p);
    check_breakers(p);
}

// A vocabulary alone has no training context, and a sampler is made of it to check what it is made
// of: without a token to look back at llama.cpp would make no DRY, and no breaker were looked up.
int32_t look_back(int32_t n, const spec_model & model) {
    const int32_t n_train = model.vocab_only ? 1 : llama_model_n_ctx_train(model.model.get());
    return n >= 0 ? n : std::min(n_train, LOOK_BACK_MAX);
}

// Adds the biases that the caller gives, and those that forbid the end.
void add_biases(common_params_sampling & s, const spec_sampler_params & p,
                const spec_model & model) {
    for (int32_t i = 0; i < p.n_logit_bias; ++i) {
        s.logit_bias.push_back({p.logit_bias[i].token, p.logit_bias[i].bias});
    }
    for (int32_t token = 0; p.ignore_eos && token < model.n_vocab(); ++token) {
        if (llama_vocab_is_eog(model.vocab, token)) {
            s.logit_bias.push_back({token, -INFINITY});
        }
    }
}

void add_samplers(common_params_sampling & s, const spec_sampler_params & p) {
    if (p.n_samplers >= 0) {
        s.samplers.clear();
    }
    for (int32_t i = 0; i < p.n_samplers; ++i) {
        s.samplers.push_back(SAMPLER_TYPES[p.samplers[i]]);
    }
    if (p.adaptive_target >= 0.0f) {
        s.samplers.push_back(COMMON_SAMPLER_TYPE_ADAPTIVE_P);
    }
}

common_params_sampling to_common(const spec_sampler_params & p, const spec_model & model) {
    common_params_sampling s;
#define XX(name, otherwise, check, low, high, theirs) s.theirs = p.name;
#define OWN(name, otherwise, check, low, high, theirs)
    SAMPLER_FIELDS(XX, OWN)
#undef XX
#undef OWN
    // A threshold of 0 would leave the least likely candidate, which may be a forbidden one.
    s.xtc_threshold = std::max(p.xtc_threshold, std::numeric_limits<float>::min());
    s.penalty_last_n = look_back(p.penalty_last_n, model);
    s.dry_penalty_last_n = look_back(p.dry_penalty_last_n, model);
    s.no_perf = true;
    add_samplers(s, p);
    if (p.n_dry_breakers >= 0) {
        s.dry_sequence_breakers.assign(p.dry_breakers, p.dry_breakers + p.n_dry_breakers);
    }
    add_biases(s, p, model);
    return s;
}

sampler_source copy_source(const spec_sampler_params & p) {
    sampler_source source;
    source.params = p;
    source.params.grammar = nullptr;
    source.params.dry_breakers = nullptr;
    source.params.logit_bias = nullptr;
    source.grammar = p.grammar != nullptr ? p.grammar : "";
    for (int32_t i = 0; i < p.n_dry_breakers; ++i) {
        source.breakers.emplace_back(p.dry_breakers[i]);
    }
    source.bias.assign(p.logit_bias, p.logit_bias + p.n_logit_bias);
    source.params.samplers = nullptr;
    source.samplers.assign(p.samplers, p.samplers + std::max(p.n_samplers, 0));
    return source;
}

// Whether the penalties can only lower a logit, and by which many tokens at most.
bool has_lowering_penalties(const spec_sampler_params & p) {
    return p.penalty_repeat >= 1.0f && p.penalty_frequency >= 0.0f && p.penalty_presence >= 0.0f;
}

bool has_penalties(const spec_sampler_params & p) {
    return p.penalty_last_n != 0 &&
           (p.penalty_repeat != 1.0f || p.penalty_frequency != 0.0f || p.penalty_presence != 0.0f);
}

// Whether a sampler of the chain leaves its candidates alone with these parameters.
bool is_neutral(common_sampler_type kind, const spec_sampler_params & p) {
    switch (kind) {
    case COMMON_SAMPLER_TYPE_PENALTIES:
        return !has_penalties(p);
    case COMMON_SAMPLER_TYPE_DRY:
        return p.dry_multiplier == 0.0f || p.dry_base < 1.0f || p.dry_penalty_last_n == 0;
    case COMMON_SAMPLER_TYPE_TOP_N_SIGMA:
        return p.top_n_sigma < 0.0f;
    case COMMON_SAMPLER_TYPE_TYPICAL_P:
        return p.typical_p >= 1.0f;
    case COMMON_SAMPLER_TYPE_XTC:
        return p.xtc_probability <= 0.0f;
    default:
        return false;
    }
}

// Whether the chain comes to the greatest logit whatever the others are. What keeps the likeliest
// candidates only, keeps that one.
bool is_argmax(const spec_sampler_params & p, const common_params_sampling & s) {
    const auto keeps_greatest = [&](common_sampler_type kind) {
        return is_neutral(kind, p) || kind == COMMON_SAMPLER_TYPE_TOP_K ||
               kind == COMMON_SAMPLER_TYPE_TOP_P || kind == COMMON_SAMPLER_TYPE_MIN_P ||
               kind == COMMON_SAMPLER_TYPE_TOP_N_SIGMA || kind == COMMON_SAMPLER_TYPE_TEMPERATURE;
    };
    const bool has_temperature =
        std::count(s.samplers.begin(), s.samplers.end(), COMMON_SAMPLER_TYPE_TEMPERATURE) == 1;
    return p.temperature == 0.0f && p.dynatemp_range == 0.0f && has_temperature &&
           std::all_of(s.samplers.begin(), s.samplers.end(), keeps_greatest);
}

// How many of the greatest logits the chain must see: its top-k, and as many more as biases and
// penalties may push out of it. 0 where something before top-k looks at all of them.
int32_t count_greatest(const spec_sampler_params & p, const common_params_sampling & s,
                       size_t n_banned) {
    int64_t n = static_cast<int64_t>(n_banned) + p.top_k;
    for (const common_sampler_type kind : s.samplers) {
        if (kind == COMMON_SAMPLER_TYPE_TOP_K) {
            return p.top_k >= 1 && n <= 1024 ? static_cast<int32_t>(n) : 0;
        }
        if (kind == COMMON_SAMPLER_TYPE_PENALTIES && has_lowering_penalties(p)) {
            n += has_penalties(p) ? s.penalty_last_n : 0;
        } else if (!is_neutral(kind, p)) {
            return 0;
        }
    }
    return 0;
}

// Finds a cut by probability that nothing comes before. llama.cpp marks samplers that do nothing.
first_cut find_cut(const spec_sampler & sampler, const spec_sampler_params & p) {
    llama_sampler * chain = sampler.samplers();
    for (int32_t i = 0; p.min_keep == 0 && i < llama_sampler_chain_n(chain); ++i) {
        const std::string name = llama_sampler_name(llama_sampler_chain_get(chain, i));
        if (name == "top-p") {
            return {i + 1, p.top_p, 0.0f};
        }
        if (name == "min-p") {
            return {i + 1, 0.0f, p.min_p};
        }
        if (name[0] != '?' && name != "logit-bias") { // biases are -inf, see find_shortcuts
            break;
        }
    }
    return {};
}

// Comparisons of the chain for a row where it sorts all of a large vocabulary, or of a large top-k.
// Tens of candidates, and what a cut leaves, cost nothing to speak of.
int64_t count_sort_work(const spec_sampler & sampler, const spec_sampler_params & p,
                        const common_params_sampling & s) {
    constexpr int64_t N_ONCE = 8; // for each candidate; typical sorts twice
    constexpr int64_t N_FEW = 1024;
    if (sampler.is_argmax || sampler.n_greatest > 0 || sampler.cut.n_done > 0) {
        return 0;
    }
    int64_t n = sampler.n_vocab;
    int64_t n_work = 0;
    for (const common_sampler_type kind : s.samplers) {
        int64_t n_each = 0;
        if (kind == COMMON_SAMPLER_TYPE_TOP_K && p.top_k > 0) {
            n = std::min<int64_t>(n, p.top_k);
            n_each = N_ONCE;
        } else if (kind == COMMON_SAMPLER_TYPE_TYPICAL_P && !is_neutral(kind, p)) {
            n_each = 2 * N_ONCE;
        } else if (kind == COMMON_SAMPLER_TYPE_XTC && !is_neutral(kind, p)) {
            n_each = N_ONCE;
        } else if (kind == COMMON_SAMPLER_TYPE_TOP_P && p.top_p < 1.0f) {
            n_each = N_ONCE;
        }
        n_work = n > N_FEW ? std::max(n_work, n_each * n) : n_work; // sorted once, it stays so
    }
    return n_work;
}

// Finds out what the chain need not be asked.
void find_shortcuts(spec_sampler & sampler, const spec_model & model, const spec_sampler_params & p,
                    const common_params_sampling & s) {
    int32_t n_suppressed = 0;
    const llama_token * suppressed = llama_vocab_get_suppress_tokens(model.vocab, &n_suppressed);
    sampler.banned.assign(suppressed, suppressed + n_suppressed);
    bool is_banning = true; // no bias but -inf
    for (const llama_logit_bias & b : s.logit_bias) {
        is_banning = is_banning && b.bias == -INFINITY;
        sampler.banned.push_back(b.token);
    }
    if (p.mirostat != 0 || p.adaptive_target >= 0.0f || !is_banning) {
        return;
    }
    sampler.is_argmax = is_argmax(p, s);
    sampler.n_greatest = count_greatest(p, s, sampler.banned.size());
    sampler.cut = find_cut(sampler, p);
}

common_sampler_ptr make_chain(const spec_model & model, common_params_sampling & params) {
    forget_llama_reason();
    try {
        return common_sampler_ptr(common_sampler_init(model.model.get(), params));
    } catch (const std::bad_alloc &) {
        throw;
    } catch (const std::exception & e) {
        fail(SPEC_ERR_INVALID_ARGUMENT, e.what() + llama_reason());
    }
}

// Gives a chain its DRY breakers. Made with them, it would read the vocabulary anew for each.
void give_breakers(const spec_model & model, llama_sampler * chain,
                   std::vector<std::string> texts) {
    llama_sampler * dry = dry_of(chain);
    if (dry == nullptr) {
        return;
    }
    for (std::string & text : texts) {
        text.resize(std::min(text.size(), DRY_BREAKER_BYTES_READ));
    }
    add_breakers(dry, model.breakers->find(model.vocab, texts));
}

} // namespace

spec_sampler * make_sampler(const spec_model & model, const spec_sampler_params & params) {
    check_sampler_params(params, model.n_vocab());
    const std::string grammar = params.grammar != nullptr ? params.grammar : "";
    check_grammar(grammar);
    if (!grammar.empty() && params.ignore_eos) {
        fail(SPEC_ERR_INVALID_ARGUMENT,
             "ignore_eos with a grammar: a finished grammar allows no token but the end");
    }
    if (!grammar.empty() && llama_vocab_type(model.vocab) == LLAMA_VOCAB_TYPE_NONE) {
        fail(SPEC_ERR_UNSUPPORTED,
             "a grammar constrains texts, and the model's file has no tokenizer");
    }
    check_infill(model, params, !grammar.empty());
    spec_sampler_params p = params;
    if (p.seed == SPEC_SEED_RANDOM) {
        p.seed = std::random_device{}() & 0x7FFFFFFFu;
    }
    auto sampler = std::make_unique<spec_sampler>();
    common_params_sampling sparams = to_common(p, model);
    std::vector<std::string> breakers;
    std::swap(breakers, sparams.dry_sequence_breakers);
    sampler->chain = make_chain(model, sparams);
    give_breakers(model, sampler->samplers(), std::move(breakers));
    if (!grammar.empty()) {
        sampler->grammar = model.grammars->begin(model.vocab, grammar);
    }
    // From the same seed as the chain, but not the same numbers.
    sampler->rng.seed(llama_sampler_get_seed(sampler->samplers()) ^ 0x9e3779b9u);
    sampler->source = copy_source(p);
    sampler->temperature = p.temperature;
    sampler->seed = p.seed;
    sampler->logprobs = p.logprobs;
    sampler->n_top_logprobs = p.n_top_logprobs;
    sampler->is_match_only =
        p.match_only || p.mirostat != 0 || p.adaptive_target >= 0.0f || !grammar.empty();
    sampler->n_vocab = model.n_vocab();
    find_shortcuts(*sampler, model, p, sparams);
    sampler->n_sort_work = count_sort_work(*sampler, p, sparams);
    return sampler.release();
}

} // namespace drafthouse

using namespace drafthouse;

extern "C" {

void spec_sampler_default_params(spec_sampler_params * out) {
    if (out == nullptr) {
        return;
    }
    *out = {};
#define XX(name, otherwise, check, low, high, theirs) out->name = otherwise;
    SAMPLER_FIELDS(XX, XX)
#undef XX
}

int32_t spec_sampler_init(const spec_model * model, const spec_sampler_params * params,
                          spec_sampler ** out) {
    return guarded([&] {
        deref(out, "out") = nullptr;
        *out = make_sampler(deref(model, "model"), deref(params, "params"));
    });
}

int32_t spec_sampler_get_history(const spec_sampler * sampler, int32_t * n_known,
                                 bool * has_chosen) {
    return guarded([&] {
        const sampler_history & history = deref(sampler, "sampler").history;
        deref(n_known, "n_known") = static_cast<int32_t>(history.known.size());
        deref(has_chosen, "has_chosen") = history.has_emitted;
    });
}

void spec_sampler_free(spec_sampler * sampler) {
    delete sampler;
}

} // extern "C"
