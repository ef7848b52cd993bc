// What plan_fuzz drives: engines of every kind, each beside its target alone, and what a caller
// knows of their sequences.
#ifndef DRAFTHOUSE_FUZZ_PLAN_ENGINES_HPP
#define DRAFTHOUSE_FUZZ_PLAN_ENGINES_HPP

#include "harness.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace plan_fuzz {

constexpr int32_t N_SEQ = 4;
constexpr int32_t N_CALLS_MAX = 48;
constexpr size_t N_HELD_MAX = 3;     // preempted samplers, and snapshots
constexpr int32_t N_REFERENCE = 128; // > n_ctx_seq of every engine
constexpr float TIE_LOGITS = 0.05f;  // of two kernels over the same numbers

constexpr char DENSE[] = "tiny-mimo2-f16.gguf";
constexpr char HYBRID[] = "tiny-qwen35-f16.gguf";
constexpr char SIMPLE[] = "tiny-draft-f16.gguf";

struct engine_kind {
    const char * target;
    const char * draft; // a demo model; null for none
    int32_t draft_type;
    bool is_unified;
    int32_t n_rs_seq;
};

constexpr engine_kind ENGINES[] = {
    {DENSE, nullptr, SPEC_DRAFT_NONE, false, -1},
    {DENSE, nullptr, SPEC_DRAFT_MTP, false, -1},
    {DENSE, "tiny-mimo2-eagle3-f16.gguf", SPEC_DRAFT_EAGLE3, false, -1},
    {DENSE, SIMPLE, SPEC_DRAFT_SIMPLE, true, -1},
    {DENSE, nullptr, SPEC_DRAFT_NGRAM_CACHE, true, -1},
    {DENSE, "dflash.gguf", SPEC_DRAFT_DFLASH, false, -1},
    {DENSE, "dspark.gguf", SPEC_DRAFT_DSPARK, true, -1},
    {DENSE, nullptr, SPEC_DRAFT_NGRAM_SIMPLE, false, -1},
    {DENSE, nullptr, SPEC_DRAFT_NGRAM_MAP_K4V, true, -1},
    {HYBRID, nullptr, SPEC_DRAFT_NONE, true, -1},
    {HYBRID, nullptr, SPEC_DRAFT_MTP, false, -1},
    {HYBRID, "tiny-qwen35-eagle3-f16.gguf", SPEC_DRAFT_EAGLE3, false, -1},
    {HYBRID, SIMPLE, SPEC_DRAFT_SIMPLE, false, 0}, // rolls back through checkpoints
    {HYBRID, nullptr, SPEC_DRAFT_NGRAM_MOD, false, -1},
    {HYBRID, nullptr, SPEC_DRAFT_NGRAM_MAP_K, false, 0},
    {HYBRID, "dflash.gguf", SPEC_DRAFT_DFLASH, true, -1},
};
constexpr int32_t N_ENGINES = sizeof ENGINES / sizeof *ENGINES;

// The target alone, one sequence, no speculation: what its logits are after given tokens.
class reference {
public:
    explicit reference(const spec_model * target) {
        spec_decoder_params params;
        spec_decoder_default_params(&params);
        params.n_seq_max = 1;
        params.n_branch_max = 0;
        params.n_ctx_seq = params.n_outputs_max = params.n_batch = params.n_ubatch = N_REFERENCE;
        params.n_threads = 1;
        REQUIRE(spec_decoder_init(target, &params, &decoder_) == SPEC_OK);
        spec_decoder_limits limits;
        REQUIRE(spec_decoder_get_limits(decoder_, &limits) == SPEC_OK);
        n_vocab_ = static_cast<size_t>(limits.n_vocab);
    }

    reference(const reference &) = delete;
    reference & operator=(const reference &) = delete;
    ~reference() { spec_decoder_free(decoder_); }

    // Reads the tokens from the start; then `row(i)` is what comes after token i.
    void read(const std::vector<int32_t> & tokens) {
        REQUIRE(spec_decoder_seq_rollback(decoder_, 0, 0) == SPEC_OK);
        go_on(tokens);
    }

    const float * row(size_t i) const { return rows_.data() + i * n_vocab_; }

    // The likeliest token after token i.
    int32_t best(size_t i) const {
        return static_cast<int32_t>(std::max_element(row(i), row(i) + n_vocab_) - row(i));
    }

    // The likeliest n tokens after these, one after the other.
    std::vector<int32_t> follow(const std::vector<int32_t> & tokens, int32_t n) {
        read(tokens);
        std::vector<int32_t> next = {best(tokens.size() - 1)};
        while (static_cast<int32_t>(next.size()) < n) {
            go_on({next.back()});
            next.push_back(best(0));
        }
        return next;
    }

    float logprob(size_t i, int32_t token) const {
        const float * const logits = row(i);
        const float most = logits[best(i)];
        double sum = 0.0;
        for (size_t k = 0; k < n_vocab_; ++k) {
            sum += std::exp(static_cast<double>(logits[k] - most));
        }
        return logits[token] - most - static_cast<float>(std::log(sum));
    }

private:
    void go_on(const std::vector<int32_t> & tokens) {
        rows_.resize(tokens.size() * n_vocab_);
        REQUIRE(spec_decoder_decode(decoder_, 0, tokens.data(), static_cast<int32_t>(tokens.size()),
                                    true) == SPEC_OK);
        REQUIRE(spec_decoder_read(decoder_, SPEC_ROWS_LOGITS, rows_.data(), rows_.size()) ==
                SPEC_OK);
    }

    spec_decoder * decoder_ = nullptr;
    size_t n_vocab_ = 0;
    std::vector<float> rows_;
};

struct fixture {
    const spec_model * target;
    spec_engine * engine;
    reference * alone;
};

inline const spec_model * model_of(const std::string & name) {
    static std::map<std::string, const spec_model *> models;
    const spec_model *& model = models[name];
    if (model == nullptr) {
        model = load_demo(name.c_str());
    }
    return model;
}

inline reference * reference_of(const spec_model * target) {
    static std::map<const spec_model *, std::unique_ptr<reference>> references;
    std::unique_ptr<reference> & r = references[target];
    if (!r) {
        r = std::make_unique<reference>(target);
    }
    return r.get();
}

// Made at first use; kept, since a context costs more than a step.
inline fixture & engine_of(int32_t i) {
    static fixture fixtures[N_ENGINES] = {};
    fixture & f = fixtures[i];
    if (f.engine == nullptr) {
        const engine_kind & kind = ENGINES[i];
        f.target = model_of(kind.target);
        f.engine =
            make_demo_engine(f.target, kind.draft != nullptr ? model_of(kind.draft) : nullptr,
                             kind.draft_type, kind.is_unified, kind.n_rs_seq);
        f.alone = reference_of(f.target);
    }
    return f;
}

// A token that a step chose.
struct emission {
    int32_t pos;
    int32_t token;
    float logprob;
};

// What the caller knows of a sequence.
struct shadow {
    bool is_begun = false;
    bool has_emitted = false;
    bool is_greedy = false;
    bool is_warming_up = false; // turned on, and nothing but steps has touched it since
    int32_t last = 0;
    uint64_t tag = 0;
    std::vector<int32_t> known;      // resumed: what must be computed again, up to the last token
    bool is_exact = true;            // false: not all of it is known here, so plans may be refused
    std::vector<emission> emissions; // those whose tokens before are still the sequence's

    // The tokens from position n on are others now, or may be.
    void forget_from(int32_t n) {
        is_warming_up = false;
        emissions.erase(std::remove_if(emissions.begin(), emissions.end(),
                                       [n](const emission & e) { return e.pos > n; }),
                        emissions.end());
    }
};

struct preempted_sampler {
    spec_sampler * sampler = nullptr;
    shadow s;
};

struct saved_sequence {
    std::vector<uint8_t> bytes;
    bool is_bare = false; // it holds no sampler
    int32_t n_past = 0;
    shadow s;
};

} // namespace plan_fuzz

#endif
