// What the files of this folder share: the types behind spec.h, and the functions that a chapter
// calls of another. The folder alone includes llama.cpp; no other file includes this one.
//
// Reading order: error, abort, devices, model, grammar, masks, breakers, sampler; fits, settings,
// engine; snapshot, start; plan, moves; draft, decode, feed, choose, step; hand; decoder, tree;
// embedder; machine, survey.

#ifndef DRAFTHOUSE_SPEC_INTERNAL_HPP
#define DRAFTHOUSE_SPEC_INTERNAL_HPP

#include "breakers.hpp"
#include "logits.hpp"
#include "masks.hpp"
#include "settings.hpp"
#include "spec.h"

#include "common.h"
#include "ggml-cpp.h"
#include "ggml-cpu.h"
#include "llama.h"
#include "sampling.h"
#include "speculative.h"

#include <algorithm>
#include <atomic>
#include <cfloat>
#include <cstddef>
#include <cstdint>
#include <iosfwd>
#include <memory>
#include <new>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace drafthouse {

constexpr int32_t N_RS_SEQ_LIMIT = 64; // llama.cpp's graphs have room for some hundred nodes more
constexpr int32_t N_SEQ_LIMIT = 256;   // llama.cpp's own bound
constexpr int32_t LOOK_BACK_MAX = 65536;
constexpr int32_t DRY_BREAKERS_MAX = 256;

// error.cpp

// A failure with a documented code.
struct failure : std::runtime_error {
    int32_t code;
    failure(int32_t code, const std::string & text) : std::runtime_error(text), code(code) {}
};

[[noreturn]] void fail(int32_t code, const std::string & text);

// Whether a choice failed by what was asked for, and not by what the model or the engine did.
inline bool is_of_request(int32_t code) {
    return code == SPEC_ERR_GRAMMAR_TOO_COSTLY || code == SPEC_ERR_NO_TOKEN_ALLOWED;
}

int32_t report(int32_t code, const char * text) noexcept;

// Runs a body that may throw and turns whatever it throws into a code: no exception leaves
// this folder.
template <typename Body> int32_t guarded(Body && body) noexcept {
    try {
        body();
        return SPEC_OK;
    } catch (const failure & e) {
        return report(e.code, e.what());
    } catch (const std::bad_alloc &) {
        return report(SPEC_ERR_OUT_OF_MEMORY, "memory could not be allocated");
    } catch (const std::exception & e) {
        return report(SPEC_ERR_INTERNAL, e.what());
    } catch (...) {
        return report(SPEC_ERR_INTERNAL, "unknown exception");
    }
}

void warn(const char * text);
std::string printable(const char * text, size_t n_max);
void init_process();
void take_aborts();
void init_devices();
std::string llama_reason();
[[noreturn]] void fail_context(const std::string & whose); // with llama_reason
void forget_llama_reason();
void expect_unused_mtp(bool is_expected);
void check_range(const char * name, double value, double low, double high);
void check_above(const char * name, double value, double low, double high);
void check_token(int32_t token, int32_t n_vocab, const char * where);
void check_seq_id(int32_t seq_id, int32_t n_seq_max);
uint64_t digest(uint64_t seed, const void * source, size_t n);
void copy_out(const std::string & text, char * buf, size_t cap, size_t * n_needed);

template <typename T> T & deref(T * pointer, const char * name) {
    if (pointer == nullptr) {
        fail(SPEC_ERR_INVALID_ARGUMENT, std::string(name) + " is NULL");
    }
    return *pointer;
}

} // namespace drafthouse

// Models and samplers.

struct spec_model {
    std::unique_ptr<drafthouse::placement> places; // the model is freed before it
    llama_model_ptr model;
    const llama_vocab * vocab = nullptr;
    bool vocab_only = false;
    uint64_t fingerprint = 0; // digest of the file
    std::vector<std::string>
        control; // control tokens' spellings, in order; none begins with another
    std::unique_ptr<drafthouse::breaker_cache> breakers =
        std::make_unique<drafthouse::breaker_cache>();
    std::unique_ptr<drafthouse::grammar_cache> grammars =
        std::make_unique<drafthouse::grammar_cache>();

    int32_t n_vocab() const { return llama_vocab_n_tokens(vocab); }

    std::string meta(const std::string & key) const {
        std::vector<char> buf(256);
        int32_t n = llama_model_meta_val_str(model.get(), key.c_str(), buf.data(), buf.size());
        if (n < 0) {
            return "";
        }
        if (static_cast<size_t>(n) >= buf.size()) {
            buf.resize(static_cast<size_t>(n) + 1);
            n = llama_model_meta_val_str(model.get(), key.c_str(), buf.data(), buf.size());
        }
        return std::string(buf.data(), static_cast<size_t>(std::max(n, 0)));
    }

    std::string arch() const { return meta("general.architecture"); }
};

namespace drafthouse {

// The plain fields of spec_sampler_params, once: name, default, check and its bounds, and what
// llama.cpp's chain calls them; OWN are those that it does not have. In the order of snapshots.
#define SAMPLER_FIELDS(XX, OWN)                                                                    \
    XX(seed, SPEC_SEED_RANDOM, check_range, 0, UINT32_MAX, seed)                                   \
    XX(temperature, 0.8f, check_range, 0, FLT_MAX, temp)                                           \
    XX(top_k, 40, check_range, 0, INT32_MAX, top_k)                                                \
    XX(top_p, 0.95f, check_above, 0, 1, top_p)                                                     \
    XX(min_p, 0.05f, check_range, 0, 1, min_p)                                                     \
    XX(typical_p, 1.0f, check_above, 0, 1, typ_p)                                                  \
    XX(top_n_sigma, -1.0f, check_above_or_off, 0, FLT_MAX, top_n_sigma)                            \
    XX(penalty_last_n, 64, check_range, -1, LOOK_BACK_MAX, penalty_last_n)                         \
    XX(penalty_repeat, 1.0f, check_range, 1e-6f, 1e6, penalty_repeat)                              \
    XX(penalty_frequency, 0.0f, check_range, -1e6, 1e6, penalty_freq)                              \
    XX(penalty_presence, 0.0f, check_range, -1e6, 1e6, penalty_present)                            \
    XX(dry_multiplier, 0.0f, check_range, 0, 1e6, dry_multiplier)                                  \
    XX(dry_base, 1.75f, check_range, 1, 1e6, dry_base)                                             \
    XX(dry_allowed_length, 2, check_range, 0, LOOK_BACK_MAX, dry_allowed_length)                   \
    XX(dry_penalty_last_n, -1, check_range, -1, LOOK_BACK_MAX, dry_penalty_last_n)                 \
    OWN(n_dry_breakers, -1, check_range, -1, DRY_BREAKERS_MAX, none)                               \
    XX(xtc_probability, 0.0f, check_range, 0, 1, xtc_probability)                                  \
    XX(xtc_threshold, 0.1f, check_range, 0, 1, xtc_threshold)                                      \
    XX(ignore_eos, false, check_range, 0, 1, ignore_eos)                                           \
    OWN(logprobs, false, check_range, 0, 1, none)                                                  \
    OWN(n_top_logprobs, 0, check_range, 0, SPEC_TOP_LOGPROBS_MAX, none)                            \
    XX(min_keep, 0, check_range, 0, INT32_MAX, min_keep)                                           \
    XX(dynatemp_range, 0.0f, check_range, 0, FLT_MAX, dynatemp_range)                              \
    XX(dynatemp_exponent, 1.0f, check_range, 0, 1e6, dynatemp_exponent)                            \
    XX(mirostat, 0, check_range, 0, 2, mirostat)                                                   \
    XX(mirostat_tau, 5.0f, check_range, 0, 1e6, mirostat_tau)                                      \
    XX(mirostat_eta, 0.1f, check_range, 0, 1, mirostat_eta)                                        \
    XX(adaptive_target, -1.0f, check_range_or_off, 0, 1, adaptive_target)                          \
    XX(adaptive_decay, 0.9f, check_range, 0, 0.99f, adaptive_decay)                                \
    OWN(n_samplers, -1, check_range, -1, SPEC_SAMPLER_COUNT, none)                                 \
    OWN(match_only, false, check_range, 0, 1, none)

// A new field belongs into the list above, or a restored sampler lacks it.
static_assert(sizeof(spec_sampler_params) == 168, "spec_sampler_params and its list differ");

// A copy of a sampler's parameters that owns what they point to.
struct sampler_source {
    spec_sampler_params params = {};
    std::string grammar;
    std::vector<std::string> breakers;
    std::vector<spec_logit_bias> bias;
    std::vector<int32_t> samplers;

    // The parameters with pointers into this object; `pointers` holds what needs an array.
    spec_sampler_params view(std::vector<const char *> & pointers) const {
        spec_sampler_params p = params;
        pointers.clear();
        for (const std::string & text : breakers) {
            pointers.push_back(text.c_str());
        }
        p.grammar = grammar.c_str();
        p.dry_breakers = pointers.data();
        p.logit_bias = bias.data();
        p.n_logit_bias = static_cast<int32_t>(bias.size());
        p.samplers = samplers.data();
        return p;
    }
};

// What a preempted sampler knows of its sequence, so that the sequence can be computed again
// without its being fed twice.
struct sampler_history {
    llama_tokens known;         // the sequence's tokens that it was fed or chose, from the first on
    std::vector<int32_t> heard; // as in `sequence`
    bool has_emitted = false;   // it chose the last of `known`
    bool has_drafter_begun = false;
    int32_t n_prompt = 0;
    uint64_t tag = 0;        // of its sequence
    std::string drafter_rng; // the draft sampler's random state, where it has one
};

} // namespace drafthouse

struct spec_sampler {
    common_sampler_ptr chain;                          // has no grammar: that is ours
    std::unique_ptr<drafthouse::grammar_walk> grammar; // null: none
    std::mt19937 rng; // of the rejection rule; independent of the chain's and the draft's
    drafthouse::sampler_source source; // for snapshots
    float temperature = 0.0f;
    uint32_t seed = 0;
    bool logprobs = false;
    int32_t n_top_logprobs = 0;
    // Verified by sample-and-match only: asked for, or its samplers learn from what they drew, or a
    // grammar must see an end token that it forbids before that is accepted.
    bool is_match_only = false;
    int32_t n_vocab = 0;                 // of the model that it was made for
    drafthouse::sampler_history history; // of a preempted one; empty in use and when new
    bool is_argmax = false;              // it always chooses the greatest logit outside `banned`
    // Only so many of the greatest logits can be chosen or change what is; 0: all may.
    int32_t n_greatest = 0;
    drafthouse::first_cut cut;
    std::vector<llama_token> banned; // biased by -inf; valid with is_argmax and `cut`
    int64_t n_sort_work = 0;         // comparisons for a row where the chain sorts many candidates

    llama_sampler * samplers() const { return common_sampler_get(chain.get()); }

    // A grammar knows of what was generated only.
    void accept(llama_token token, bool is_generated) {
        if (grammar && is_generated) {
            grammar->accept(token);
        }
        common_sampler_accept(chain.get(), token, is_generated);
    }
};

namespace drafthouse {

// Engines.

// What a context can take back.
enum class rollback_kind { any, bounded, none };

// A draft of one sequence: tokens, and the distribution of each where the drafter sampled.
struct proposal {
    llama_tokens tokens;
    // One more where a token was drafted behind them that the target does not have.
    std::vector<std::vector<llama_token_data>> q;
    bool is_external = false; // by the plan, not by the drafter
};

// A draft of an n-gram drafter and what became of it. Its state is a function of the tokens and of
// these, so that a snapshot holds them and a restored drafter lives through them again.
struct ngram_event {
    int32_t n_past;
    llama_token id_last;
    int32_t n_draft;
    int32_t n_accepted; // -1: never verified
};

// MTP's hidden rows at the end of a prompt: those of the last two tokens processed, for forks.
struct hidden_rows {
    int32_t n_past = 0;        // tokens processed
    std::vector<float> last;   // of the last of them; empty: not known
    std::vector<float> before; // of the one before

    // The row that a sequence of n tokens goes on from; empty where it is not known.
    const std::vector<float> & at(int32_t n) const {
        static const std::vector<float> none;
        return n == n_past ? last : n == n_past - 1 ? before : none;
    }
};

// The rows of the last layer that the drafter has the target give, as llama.cpp's flags.
struct row_flags {
    bool has_last = false;
    bool is_masked = false;
};

struct sequence {
    bool is_begun = false;
    uint64_t tag = 0;           // whose it is; 0: nobody's
    bool is_cold = false;       // no draft state: no drafts
    bool is_warming_up = false; // cold, and fed again from its next tokens on
    bool has_emitted = false;   // a step has chosen a token: generation
    bool has_drafter_begun = false;
    llama_token id_last = LLAMA_TOKEN_NULL;
    int32_t n_prompt = 0; // tokens given before the first one was chosen
    llama_tokens tokens;  // those in the target's KV cache
    std::unique_ptr<spec_sampler> sampler;
    common_speculative_ptr ngram; // keeps tokens: one per sequence, made anew for each
    std::vector<ngram_event> ngram_events;
    std::vector<int32_t> heard; // what the sampler was fed: token, or -1 - token where it chose it
    int32_t n_heard = 0;        // tokens of the sequence, from the first on, that are in `heard`
    llama_tokens known;         // resumed: those tokens, until they are computed again
    proposal draft;             // of this step or round
    hidden_rows hidden;
    std::vector<uint8_t> checkpoint;
    int64_t i_decode = -1;  // the target's decode that had its tokens last
    int32_t n_back_max = 0; // recurrent targets: how far that decode's states reach back
    std::mt19937 synth_rng; // of synthetic acceptance

    // one call at a time
    bool is_proposed = false;
    int32_t n_past_proposed = 0;
    int32_t n_past_decoded = 0; // tokens before its last decode

    int32_t n_past() const { return static_cast<int32_t>(tokens.size()); }

    // Whether its next tokens go to the drafter.
    bool is_fed() const { return !is_cold || is_warming_up; }

    // Tokens of the sequence, from the first on, that the sampler must not be fed (again).
    int32_t n_known() const { return std::max(n_heard, n_past() + (has_emitted ? 1 : 0)); }

    // Whether the sampler has heard a token at a position: it was fed it, or chose it.
    bool has_heard(llama_token token, int32_t pos) const {
        const bool is_choice = pos + 1 == n_heard && !heard.empty() && heard.back() < 0;
        return pos < n_heard && (!is_choice || token == -1 - heard.back());
    }

    // Feeds the sampler a token that it did not choose.
    void feed(llama_token token) {
        sampler->accept(token, false);
        heard.push_back(token);
    }
};

// What became of one entry of a plan, before it is put into the result.
struct outcome {
    std::vector<const float *> rows; // logits after each token that may be chosen on: [n_vocab]
    llama_tokens emitted;
    std::vector<float> logprobs;
    std::vector<int32_t> top_tokens;
    std::vector<float> top_logprobs;
    int64_t n_mask_work = 0; // comparisons of the grammar, and of samplers that sort
    int32_t status = SPEC_OK;
};

// Runs jobs on ggml's threads, which are awake right after a decode: a graph of one node, whose
// threads take the jobs one by one.
//
// The hand-over is by two counters of its own, not by ggml's barriers alone: whoever takes a job
// sees what was written before `run`, and whoever called `run` sees what the jobs wrote. So a
// sanitizer sees it too.
struct team {
    int32_t n_threads = 1;
    ggml_context_ptr ctx;
    ggml_threadpool * pool = nullptr;
    ggml_cgraph * graph = nullptr;
    std::vector<uint8_t> work;
    ggml_cplan plan = {};
    std::atomic<size_t> i_next{0};
    std::atomic<size_t> n_done{0};
    size_t n_jobs = 0;
    void (*job)(const void *, size_t) = nullptr; // throws nothing
    const void * user = nullptr;

    team() = default;
    team(const team &) = delete;
    team & operator=(const team &) = delete;
    ~team() { ggml_threadpool_free(pool); }

    static void take(ggml_tensor * /*node*/, int /*ith*/, int /*nth*/, void * self) {
        team & t = *static_cast<team *>(self);
        for (size_t i = t.i_next++; i < t.n_jobs; i = t.i_next++) {
            t.job(t.user, i);
            ++t.n_done;
        }
    }

    void init(int32_t n) {
        n_threads = n;
        if (n < 2) {
            return;
        }
        ggml_threadpool_params params = ggml_threadpool_params_default(n);
        params.poll = 0; // sleeps between steps
        pool = ggml_threadpool_new(&params);
        ctx.reset(ggml_init({2 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, false}));
        if (!ctx || pool == nullptr) {
            throw std::bad_alloc();
        }
        ggml_tensor * node = ggml_custom_4d(ctx.get(), GGML_TYPE_I8, 1, 1, 1, 1, nullptr, 0, take,
                                            GGML_N_TASKS_MAX, this);
        graph = ggml_new_graph(ctx.get());
        ggml_build_forward_expand(graph, node);
        plan = ggml_graph_plan(graph, n, pool);
        work.resize(plan.work_size);
        plan.work_data = work.data();
    }

    template <typename Body> void run(size_t n, bool is_parallel, const Body & body) {
        if (!is_parallel || n_threads < 2 || n < 2) {
            for (size_t i = 0; i < n; ++i) {
                body(i);
            }
            return;
        }
        n_jobs = n;
        job = [](const void * b, size_t i) { (*static_cast<const Body *>(b))(i); };
        user = &body;
        n_done = 0;
        i_next = 0; // last: it hands the rest over
        if (ggml_graph_compute(graph, &plan) != GGML_STATUS_SUCCESS || n_done != n) {
            fail(SPEC_ERR_INTERNAL, "the threads that choose tokens did not finish");
        }
    }
};

struct threadpool_deleter {
    void operator()(ggml_threadpool * pool) const { ggml_threadpool_free(pool); }
};

using threadpool_ptr = std::unique_ptr<ggml_threadpool, threadpool_deleter>;

} // namespace drafthouse

struct spec_engine {
    const spec_model * target_model = nullptr;
    const spec_model * draft_model = nullptr; // null for NONE, MTP and the n-gram kinds
    spec_engine_limits limits = {};
    spec_engine_params params = {};
    drafthouse::threadpool_ptr pool; // of both contexts, which are freed before it
    llama_context_ptr target;
    llama_context_ptr draft; // null for NONE and the n-gram kinds
    common_params_speculative spec_params;
    common_speculative_ptr spec; // null for NONE and the n-gram kinds; freed before the contexts
    drafthouse::rollback_kind target_rollback = drafthouse::rollback_kind::any;
    std::vector<drafthouse::sequence> sequences;
    std::vector<bool> has_drafted; // by id, since the engine was made; see can_verify_external
    common_batch batch;
    int64_t n_decodes = 0; // of the target
    int32_t n_threads = 1; // of narrow decodes
    int32_t n_threads_batch = 1;
    int32_t n_threads_max = 1; // of the pool

    drafthouse::row_flags asked; // by the drafter
    bool has_rows = true;        // the target's last decode gave them
    int32_t n_unfed = 0;         // decodes in a row without a drafter to feed

    std::vector<int32_t> rows;                 // batch index of each plan entry's first token
    std::vector<drafthouse::outcome> outcomes; // one per plan entry
    drafthouse::team sampling;                 // its threads choose tokens
    std::vector<spec_result_entry> out_entries;
    std::vector<int32_t> out_tokens;
    std::vector<float> out_logprobs;
    std::vector<int32_t> out_top_tokens; // [n_tokens, n_top]
    std::vector<float> out_top_logprobs;
    int32_t n_top = 0; // of this step
    std::vector<size_t> out_saved;
    std::vector<spec_sampler *> out_samplers; // the caller's
    std::vector<int32_t> out_kept;
    spec_draft_work draft_work = {};

    bool has_copies_left = false; // what a copy that failed has ordered of llama.cpp

    std::atomic<bool> is_interrupted{false}; // by another thread: the run ends with this step

    // Benchmarks: probability that a drafted token is accepted when those before it were.
    std::vector<double> synth_probs;
    uint32_t n_synth_begun = 0; // seeds their generators: the same order, the same decisions

    bool is_decoded = false; // by hand: a batch is there for logits and process
    bool is_processed = false;
    int32_t fault = SPEC_FAULT_NONE;
    int32_t n_fault = 0;

    llama_memory_t target_memory() const { return llama_get_memory(target.get()); }
    llama_memory_t draft_memory() const { return llama_get_memory(draft.get()); }

    bool is_ngram() const {
        return limits.draft_type >= SPEC_DRAFT_NGRAM_SIMPLE &&
               limits.draft_type <= SPEC_DRAFT_NGRAM_CACHE;
    }

    bool take_fault(int32_t wanted) {
        if (fault != wanted || n_fault <= 0) {
            return false;
        }
        --n_fault;
        return true;
    }

    ~spec_engine() {
        spec.reset(); // its destructor touches the draft context
    }
};

namespace drafthouse {

// Decoders.

// A node of a draft tree in the cache: it belongs to the sequences of all branches through it, of
// which one is enough to find its ancestors.
struct tree_node {
    int32_t parent; // -1: the end of the sequence
    llama_pos pos;
    llama_seq_id branch;
};

struct decoder_sequence {
    int32_t n_past = 0;
    int32_t n_back_max = 0; // what a recurrent model can still take back
};

constexpr int32_t N_TREE_SPARE = 8; // nodes that bring tokens of the sequence itself

} // namespace drafthouse

struct spec_decoder {
    const spec_model * model = nullptr;
    spec_decoder * target = nullptr; // of an EAGLE-3 decoder: whose hidden states it drafts from
    spec_decoder_limits limits = {};
    llama_context_ptr context;
    drafthouse::rollback_kind rollback = drafthouse::rollback_kind::any;
    common_batch batch;
    std::vector<drafthouse::decoder_sequence> sequences;
    std::vector<bool> wanted_layers; // kept from the next decode on
    std::vector<bool> kept_layers;   // kept by the last decode
    std::vector<bool> read_inputs;   // inputs of layers that an EAGLE-3 decoder reads, by layer
    std::vector<float> states;       // of an EAGLE-3 decoder: rows for the tokens that come next
    int32_t n_rows = 0;              // of the last scored decode
    int32_t n_decoded = 0;           // tokens of the last decode, scored or not

    int32_t tree_owner = -1; // the sequence that the tree hangs on
    std::vector<drafthouse::tree_node> tree;
    int32_t n_branches = 0;

    llama_memory_t memory() const { return llama_get_memory(context.get()); }
    bool is_recurrent() const { return rollback != drafthouse::rollback_kind::any; }
    size_t n_embd() const { return static_cast<size_t>(limits.n_embd); }
};

namespace drafthouse {

// Sequences of an engine or a decoder.

// One whose id was checked.
template <typename Owner> auto & seq_of(Owner & owner, int32_t seq_id) {
    return owner.sequences[static_cast<size_t>(seq_id)];
}

template <typename Owner> auto & at(Owner & owner, int32_t seq_id) {
    check_seq_id(seq_id, owner.limits.n_seq_max);
    return seq_of(owner, seq_id);
}

template <typename Engine> auto & begun(Engine & engine, int32_t seq_id) {
    auto & seq = at(engine, seq_id);
    if (!seq.is_begun) {
        fail(SPEC_ERR_SEQ_IDLE, "sequence " + std::to_string(seq_id) + " has not begun");
    }
    return seq;
}

// A sequence as a snapshot has it: all but the cells, which stay where they are in the bytes.
struct snapshot_parts {
    sequence seq;
    std::string drafter_state;
    const uint8_t * target = nullptr;
    uint64_t n_target = 0;
    const uint8_t * draft = nullptr;
    uint64_t n_draft = 0;
};

// What a sequence will be when a plan's entries come, if every start keeps what it should.
struct planned_sequence {
    bool is_begun = false;
    bool is_proposed = false;
    bool has_emitted = false;
    bool is_started = false; // by this plan
    bool is_lost = false;    // with the sampler of a snapshot that cannot be read
    llama_token id_last = LLAMA_TOKEN_NULL;
    int32_t n_past = 0;
    int32_t n_known = 0;                  // as `sequence::n_known`
    const llama_tokens * known = nullptr; // as `sequence::known`; null: none
    uint64_t tag = 0;
};

// What a start goes on from, read before anything is done.
struct read_start {
    std::unique_ptr<snapshot_parts> parts; // null: no snapshot, or one that is refused
    llama_tokens known;                    // what its own sampler knows
};

// A plan's moves, which may be made.
struct checked_moves {
    std::vector<planned_sequence> sequences; // by id
    std::vector<read_start> starts;          // in the plan's order
};

// upstream.cpp

int32_t window_of(const llama_context * context);
int32_t window_cells_of(const llama_context * context);
bool holds_window(const llama_context * context, int32_t seq_id, int32_t n_past);
void keep_states(llama_context * context, int32_t n_kept);
void set_seq_length(llama_context * context, int32_t n_tokens);
[[noreturn]] void no_window(int32_t n_past);
void give_rows(spec_engine & engine, bool is_on);
std::vector<int32_t> layers_read(const llama_model * draft);
int32_t selector_top_k(const llama_model * draft);
llama_context * other_context(llama_context * context);
ggml_backend_sched_t scheduler_of(llama_context * context);
void copy_ordered(llama_context * context);
void drop_ordered(llama_context * context);
bool carries_trees(llama_memory_t memory);
void give_last_layer(llama_context * context, bool is_on, bool is_masked);
const float * last_layer_rows(llama_context * context);
const float * last_layer_row(llama_context * context, int32_t i);
void give_layer_input(llama_context * context, int32_t layer, bool is_on);
const float * layer_input_rows(llama_context * context, int32_t layer);
row_flags asked_rows(const llama_context * target);
void write_rng(std::ostream & out, const std::mt19937 & rng);
void read_rng(std::istream & in, std::mt19937 & rng);
bool get_sampler_state(const llama_sampler * sampler, std::string & out);
bool set_sampler_state(llama_sampler * sampler, const std::string & state);
std::vector<dry_breaker> find_breakers(const llama_vocab * vocab,
                                       const std::vector<std::string> & texts);
size_t breaker_bytes(const dry_breaker & breaker);
llama_sampler * dry_of(llama_sampler * chain);
void add_breakers(llama_sampler * dry, const std::vector<dry_breaker> & breakers);
llama_tokens tokenize_plain(const llama_vocab * vocab, const std::string & text, bool add_special,
                            const std::vector<std::pair<size_t, size_t>> & plain);

// gguf_header.cpp

void check_gguf_magic(const std::string & path);
bool is_one_of(const std::string & name, std::initializer_list<const char *> names);
void check_header(const std::string & path);

// grammar.cpp

[[noreturn]] void bad_grammar(const std::string & text);
void check_grammar(const std::string & grammar);
std::shared_ptr<llama_grammar> compile_grammar(const llama_vocab * vocab,
                                               const std::string & grammar);

// sampler.cpp

spec_sampler * make_sampler(const spec_model & model, const spec_sampler_params & params);

// fits.cpp

// The layers that llama.cpp marks in the graphs of an architecture.
struct layer_marks {
    const char * arch;
    bool is_residual; // the rows are those of the residual stream: a decoder shows them
    bool has_last;    // what comes out of the last layer is marked as well
};

const layer_marks * marks_of(const std::string & arch);
common_speculative_type to_common_type(int32_t type);
bool drafts_blocks(int32_t type);
int32_t positions_of(const spec_model & model);
bool needs_draft_context(int32_t type);
void check_engine_params(const spec_engine_params & p);
void check_eagle3(const spec_model & target, const spec_model & draft);
void check_target_name(const spec_model & target, const spec_model & draft);
void check_generates(const spec_model & model, const char * which);
void check_hidden_rows(const spec_model & model, bool has_logits);
void check_draft(const spec_model & target, const spec_model * draft, const spec_engine_params & p);

// engine.cpp

void check_memory(llama_context * context, const char * which);
rollback_kind probe_rollback(llama_context * context, const char * which);
void clear_memory(spec_engine & engine, int32_t seq_id);
void drop_copies(spec_engine & engine);
void order_copy(spec_engine & engine, int32_t src, int32_t dst);
void make_copy(spec_engine & engine);
void clear_sequence(spec_engine & engine, int32_t seq_id);
void begin_drafter(spec_engine & engine, sequence & seq, int32_t seq_id);
bool is_unprocessed(const spec_engine & engine, int32_t seq_id);
void check_new_sampler(const spec_engine & engine, int32_t seq_id, const spec_sampler & sampler);
void begin_sequence(spec_engine & engine, int32_t seq_id, std::unique_ptr<spec_sampler> sampler);

// plan.cpp

[[noreturn]] void bad_plan(int32_t seq_id, const std::string & text);
checked_moves check_plan(spec_engine & engine, const spec_plan & plan);
void check_draft_requests(spec_engine & engine, const spec_draft_request * requests, int32_t n);
void check_tokens(spec_engine & engine, const spec_token * tokens, int32_t n);
int64_t cells_with(const spec_engine & engine, int64_t n);

// moves.cpp

planned_sequence & planned_begun(const spec_engine & engine,
                                 std::vector<planned_sequence> & sequences, int32_t seq_id);
checked_moves check_moves(spec_engine & engine, const spec_plan & plan);
std::vector<bool> make_moves(spec_engine & engine, const spec_plan & plan, checked_moves & moves);

// draft.cpp

common_speculative * drafter_of(spec_engine & engine, sequence & seq);
llama_seq_id drafter_id(const sequence & seq, int32_t seq_id);
int32_t draft_vocabulary(const spec_engine & engine);
bool is_too_short_to_draft(const spec_engine & engine, int32_t n_past);
bool can_draft(const spec_engine & engine, const sequence & seq, llama_token id_last);
void arm(spec_engine & engine, sequence & seq, int32_t seq_id, int32_t n_draft,
         llama_token id_last);
void accept_draft(spec_engine & engine, sequence & seq, int32_t seq_id, int32_t n_accepted);
void settle_draft(spec_engine & engine, sequence & seq, int32_t seq_id, int32_t n_draft);
void run_drafters(spec_engine & engine, const std::vector<int32_t> & armed);
void draft_plan(spec_engine & engine, const spec_plan & plan);

// Orders to draft. They are withdrawn when the drafters have run, or when something fails before:
// one that is left would draft for a sequence that is gone, or end the process beside a given
// draft.
struct draft_orders {
    spec_engine & engine;
    std::vector<int32_t> armed;

    void give(sequence & seq, int32_t seq_id, int32_t n_draft, llama_token id_last) {
        armed.push_back(seq_id); // first: nothing is armed that is not withdrawn
        arm(engine, seq, seq_id, n_draft, id_last);
        if (engine.take_fault(SPEC_FAULT_DRAFT)) {
            throw std::runtime_error("injected fault of a draft");
        }
    }

    ~draft_orders() {
        for (const int32_t seq_id : armed) {
            sequence & seq = seq_of(engine, seq_id);
            common_speculative_get_draft_params(drafter_of(engine, seq), drafter_id(seq, seq_id))
                .drafting = false;
        }
    }
};

// feed.cpp

void choose_rows(spec_engine & engine);
bool has_draft_cells(const spec_engine & engine);
void make_cold(spec_engine & engine, int32_t seq_id);
void drafts_on(spec_engine & engine, int32_t seq_id);
void restart_unless_held(spec_engine & engine, int32_t seq_id, int32_t n_past);
void process_batch(spec_engine & engine);

// decode.cpp

// Entries of a plan, by index, that one decode of the target carries.
using group = std::vector<size_t>;

void save_checkpoint(spec_engine & engine, sequence & seq, int32_t seq_id);
void build_batch(spec_engine & engine, const spec_plan & plan, const group & entries);
bool needs_one_ubatch(const spec_engine & engine);
std::vector<group> make_groups(const spec_engine & engine, const spec_plan & plan);
void set_threads(const spec_engine & engine, llama_context * context);
int32_t decode_batch(spec_engine & engine, int32_t n_kept);
bool drop_drafts(spec_engine & engine, const spec_plan & plan, const group & entries);
void replay(spec_engine & engine, sequence & seq, int32_t seq_id, int32_t n_past,
            const llama_tokens & kept);
void cut_draft(spec_engine & engine, int32_t seq_id, int32_t n_past);
bool cut_target(spec_engine & engine, int32_t seq_id, int32_t n_past);

// choose.cpp

llama_token sample_checked(const spec_sampler & sampler, const float * logits, int32_t n_vocab);
void choose_all(spec_engine & engine, const spec_plan & plan, const group & entries);

// snapshot.cpp

void save_sequence(spec_engine & engine, int32_t seq_id, bool has_sampler, uint8_t * buf,
                   size_t cap, size_t & n_needed);
snapshot_parts read_snapshot(const spec_engine & engine, const uint8_t * buf, size_t n,
                             bool wants_sampler);
void load_parts(spec_engine & engine, int32_t seq_id, snapshot_parts & parts);

// start.cpp

size_t drafter_row_bytes(const spec_engine & engine);
void begin_drafter_again(spec_engine & engine, int32_t seq_id);
llama_tokens known_tokens(const sequence & seq);
std::unique_ptr<spec_sampler> swap_out(spec_engine & engine, int32_t seq_id);
int32_t start_sequence(spec_engine & engine, const spec_start & start, snapshot_parts * parts);

// decoder.cpp

bool is_recurrent_model(const spec_model & model);
void check_decoder_room(const spec_decoder & decoder, int64_t n_end);
void check_states(const spec_decoder & decoder, int32_t n);
int32_t run_decoder(spec_decoder & decoder, bool is_output) noexcept;
std::string decode_reason(int32_t rc);

} // namespace drafthouse

#endif
