// Engines: how one is made, and the life of a sequence.

#include "survey.hpp"

#include "ggml-backend.h"
#include "ggml-cpu.h"

#include <algorithm>
#include <limits>
#include <memory>
#include <new>
#include <string>
#include <utility>

namespace drafthouse {

namespace {

llama_flash_attn_type flash_attention(const spec_engine_params & p) {
    if (!p.flash_attention) {
        return LLAMA_FLASH_ATTN_TYPE_DISABLED;
    }
    return p.flash_forced ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_AUTO;
}

llama_context_params context_params(const spec_engine & engine) {
    const spec_engine_params & p = engine.params;
    llama_context_params c = llama_context_default_params();
    c.n_batch = static_cast<uint32_t>(p.n_batch);
    c.n_ubatch = static_cast<uint32_t>(p.n_ubatch);
    c.n_seq_max = static_cast<uint32_t>(p.n_seq_max);
    c.n_threads = p.n_threads > 0 ? p.n_threads : all_cores();
    c.n_threads_batch = p.n_threads_batch > 0 ? p.n_threads_batch : c.n_threads;
    c.flash_attn_type = flash_attention(p);
    c.kv_unified = p.kv_unified;
    return c;
}

// Cells as llama.cpp makes them: of each cache a multiple of 256.
int64_t rounded_cells(const spec_engine_params & p, int64_t n) {
    constexpr int64_t N_PAD = 256;
    const int64_t n_caches = p.kv_unified ? 1 : p.n_seq_max;
    return (n / n_caches + N_PAD - 1) / N_PAD * N_PAD * n_caches;
}

// The tokens that every sequence needs when its context is full.
int64_t wanted_cells(const spec_engine & engine) {
    const spec_engine_params & p = engine.params;
    const int32_t n_train = llama_model_n_ctx_train(engine.target_model->model.get());
    const int64_t n_seq = p.n_ctx_seq > 0 ? p.n_ctx_seq : n_train;
    return p.n_ctx > 0 ? p.n_ctx : n_seq * p.n_seq_max;
}

// Weights that are not as the file has them, on another device or repacked for wider kernels, are
// multiplied by kernels that have no reference beside them.
void check_plain_weights(const llama_model * model) {
    for (const auto & [name, tensor] : tensors_of(model)) {
        if (tensor->buffer != nullptr && !ggml_backend_buffer_is_host(tensor->buffer)) {
            fail(SPEC_ERR_UNSUPPORTED, "exact needs weights as they are in the file; \"" + name +
                                           "\" lies in " +
                                           ggml_backend_buffer_name(tensor->buffer) +
                                           ": use a model in f16 or f32, without an accelerator");
        }
    }
}

// llama.cpp chooses kernels by the width of a batch: tinyBLAS from two rows on, tiled flash
// attention from 64 queries on, attention split over the cells for a single query. Each sums in an
// order of its own. The reference kernels sum a row alone, always in one order.
void make_exact(const spec_engine & engine, llama_context * context) {
    if (!engine.params.exact) {
        return;
    }
    check_plain_weights(llama_get_model(context));
    ggml_backend_sched_t sched = scheduler_of(context);
    for (int i = 0; i < ggml_backend_sched_get_n_backends(sched); ++i) {
        ggml_backend_t backend = ggml_backend_sched_get_backend(sched, i);
        if (!ggml_backend_is_cpu(backend)) {
            fail(SPEC_ERR_UNSUPPORTED, std::string("exact holds on the CPU alone; this model also "
                                                   "computes on ") +
                                           ggml_backend_name(backend));
        }
        ggml_backend_cpu_set_use_ref(backend, true);
    }
}

llama_context_params target_params(const spec_engine & engine) {
    const spec_engine_params & p = engine.params;
    llama_context_params c = context_params(engine);
    const int64_t n = wanted_cells(engine);
    if (rounded_cells(p, n) > std::numeric_limits<int32_t>::max()) {
        const std::string what = p.n_ctx > 0 ? "n_ctx" : "n_ctx_seq * n_seq_max";
        fail(SPEC_ERR_INVALID_ARGUMENT,
             what + " is " + std::to_string(n) +
                 " cells, which llama.cpp rounds up to more than fit into 32 bits");
    }
    const int32_t n_draft = p.draft_type == SPEC_DRAFT_NONE ? 0 : p.n_draft_max;
    const int32_t n_rs_seq = p.n_rs_seq >= 0 ? p.n_rs_seq : std::min(n_draft, N_RS_SEQ_LIMIT);
    // llama.cpp cuts n_ubatch down to the context, and ends the process when a draft and what it
    // may have to take back do not fit.
    const int64_t n_least = 2 + std::max(n_draft, n_rs_seq);
    const int64_t n_cells = p.kv_unified ? n : n / p.n_seq_max;
    if (n_cells < n_least || (p.n_ctx_seq > 0 && p.n_ctx_seq < n_least)) {
        fail(SPEC_ERR_INVALID_ARGUMENT,
             "a sequence has room for " + std::to_string(n_cells) +
                 " tokens (n_ctx_seq, n_ctx); expected at least 2 + n_draft_max = " +
                 std::to_string(n_least));
    }
    set_context_settings(*engine.target_model, p, false, c);
    c.n_ctx = static_cast<uint32_t>(n);
    c.n_rs_seq = static_cast<uint32_t>(n_rs_seq);
    c.n_outputs_max = static_cast<uint32_t>(p.n_seq_max * (1 + n_draft));
    return c;
}

void make_target(spec_engine & engine) {
    const llama_context_params c = target_params(engine);
    forget_llama_reason();
    engine.target.reset(llama_init_from_model(engine.target_model->model.get(), c));
    if (!engine.target) {
        fail_context("the target's");
    }
    make_exact(engine, engine.target.get());
}

// Beside a target's context of so many cells, and so many for each sequence.
llama_context_params draft_params(const spec_engine & engine, uint32_t n_ctx, uint32_t n_ctx_seq) {
    llama_context_params c = context_params(engine);
    const bool is_own = engine.draft_model != nullptr;
    set_context_settings(is_own ? *engine.draft_model : *engine.target_model, engine.params, true,
                         c);
    c.n_ctx = n_ctx;
    c.n_rs_seq = 0;
    c.n_outputs_max = static_cast<uint32_t>(engine.params.n_seq_max);
    if (drafts_blocks(engine.params.draft_type)) {
        // Whatever K, a block is computed whole: in one physical batch for all sequences, since
        // llama.cpp ends the process when it is cut, and behind the last token of a full sequence.
        const uint32_t n_block = 1 + static_cast<uint32_t>(engine.params.n_draft_max);
        const uint32_t n_blocks = n_block * c.n_seq_max;
        constexpr uint32_t N_PAD = 256; // llama.cpp rounds the cells of a sequence up to this
        const uint32_t n_seq = n_ctx_seq + n_block;
        c.n_ctx =
            c.kv_unified ? c.n_ctx + n_blocks : (n_seq + N_PAD - 1) / N_PAD * N_PAD * c.n_seq_max;
        c.n_batch = std::max(c.n_batch, n_blocks);
        c.n_ubatch = std::max(c.n_ubatch, n_blocks);
        c.n_outputs_max = n_blocks;
    }
    if (engine.params.draft_type == SPEC_DRAFT_MTP) {
        c.ctx_type = LLAMA_CONTEXT_TYPE_MTP;
    }
    return c;
}

void make_draft(spec_engine & engine, const spec_model * draft) {
    llama_context * target = engine.target.get();
    llama_context_params c = draft_params(engine, llama_n_ctx(target), llama_n_ctx_seq(target));
    c.ctx_other = target;
    llama_model * model = draft != nullptr ? draft->model.get() : engine.target_model->model.get();
    forget_llama_reason();
    engine.draft.reset(llama_init_from_model(model, c));
    if (!engine.draft) {
        fail_context("the draft's");
    }
    make_exact(engine, engine.draft.get());
}

void fill_spec_params(spec_engine & engine) {
    common_params_speculative & s = engine.spec_params;
    const spec_engine_params & p = engine.params;
    s.types = {to_common_type(p.draft_type)};
    s.draft.n_max = p.n_draft_max;
    s.draft.n_min = 0; // settle_draft drops short drafts, of all types alike
    s.draft.p_min = p.p_min;
    s.draft.probabilistic = p.probabilistic;
    // EAGLE-3 drafts wrongly with it when there are several sequences.
    s.draft.backend_sampling = false;
    s.draft.ctx_tgt = engine.target.get();
    s.draft.ctx_dft = engine.draft.get();
    const uint16_t n_draft = static_cast<uint16_t>(p.n_draft_max);
    s.ngram_simple = {4, std::max<uint16_t>(n_draft, 8), 1}; // it drafts nothing shorter than 4
    s.ngram_map_k = {4, n_draft, 1};
    s.ngram_map_k4v = {4, n_draft, 1};
    s.ngram_mod.n_match = 16;
    s.ngram_mod.n_max = p.n_draft_max;
    s.ngram_mod.n_min = 1;
}

void make_drafter(spec_engine & engine, const spec_model * draft) {
    const int32_t type = engine.params.draft_type;
    fill_spec_params(engine);
    if (!needs_draft_context(type)) {
        return;
    }
    make_draft(engine, draft);
    if (probe_rollback(engine.draft.get(), "draft model") != rollback_kind::any) {
        fail(SPEC_ERR_UNSUPPORTED, "the draft model has recurrent layers; drafts need a model "
                                   "whose cache can be cut anywhere");
    }
    fill_spec_params(engine); // again, with the draft context
    engine.spec.reset(common_speculative_init(engine.spec_params,
                                              static_cast<uint32_t>(engine.params.n_seq_max)));
    if (!engine.spec) {
        fail(SPEC_ERR_UNSUPPORTED, "llama.cpp offers no drafter of this type");
    }
    engine.asked = asked_rows(engine.target.get());
}

// The most tokens of one sequence: as asked for, as far as the target's positions go.
int32_t context_of(const spec_engine & engine) {
    const int32_t n_train = llama_model_n_ctx_train(engine.target_model->model.get());
    const int32_t n_asked = engine.params.n_ctx_seq > 0 ? engine.params.n_ctx_seq : n_train;
    const int32_t n_positions = positions_of(*engine.target_model);
    if (n_asked > n_positions) {
        warn(("n_ctx_seq is " + std::to_string(n_positions) + ", not " + std::to_string(n_asked) +
              ": the target has learned its positions one by one, and no more\n")
                 .c_str());
    }
    const auto n_cells = static_cast<int32_t>(llama_n_ctx_seq(engine.target.get()));
    return std::min({n_asked, n_positions, n_cells});
}

void check_draft_positions(const spec_engine & engine) {
    if (engine.draft_model == nullptr) {
        return;
    }
    const int32_t n_positions = positions_of(*engine.draft_model);
    if (engine.limits.n_ctx_seq > n_positions) {
        fail(SPEC_ERR_INCOMPATIBLE_DRAFT,
             "the draft model has learned " + std::to_string(n_positions) +
                 " positions, one by one; a sequence may have " +
                 std::to_string(engine.limits.n_ctx_seq) + " tokens (n_ctx_seq)");
    }
}

void fill_limits(spec_engine & engine) {
    const spec_engine_params & p = engine.params;
    const llama_context * ctx = engine.target.get();
    spec_engine_limits & l = engine.limits;
    l.draft_type = p.draft_type;
    l.n_ctx = static_cast<int32_t>(llama_n_ctx(ctx));
    l.n_ctx_seq = context_of(engine);
    check_draft_positions(engine);
    l.n_batch = static_cast<int32_t>(llama_n_batch(ctx));
    l.n_ubatch = static_cast<int32_t>(llama_n_ubatch(ctx));
    l.n_seq_max = p.n_seq_max;
    l.n_draft_max = p.draft_type == SPEC_DRAFT_NONE ? 0 : p.n_draft_max;
    if (engine.spec) {
        l.n_draft_max = std::min(l.n_draft_max, common_speculative_n_max(engine.spec.get()));
    }
    l.n_outputs_max = p.n_seq_max * (1 + l.n_draft_max);
    l.n_rs_seq = engine.target_rollback == rollback_kind::bounded
                     ? static_cast<int32_t>(llama_n_rs_seq(ctx))
                     : 0;
    l.n_vocab = engine.target_model->n_vocab();
    l.kv_unified = p.kv_unified;
    l.n_window = window_of(ctx);
    l.n_window_cells = window_cells_of(ctx);
    l.has_checkpoints = engine.target_rollback != rollback_kind::any && l.n_draft_max > l.n_rs_seq;
}

void fill_synth_probs(spec_engine & engine) {
    double before = 1.0;
    for (int32_t i = 0; i < engine.params.n_synth_rates; ++i) {
        const double rate = static_cast<double>(engine.params.synth_rates[i]);
        engine.synth_probs.push_back(before > 0.0 ? rate / before : 0.0);
        before = rate;
    }
    engine.params.synth_rates = nullptr; // the caller's
    if (!engine.synth_probs.empty()) {
        warn("BENCHMARK: drafts are accepted at random (synth_rates); what is generated is not the "
             "model's output\n");
    }
}

// Gives both contexts threads that outlive a decode. Without a pool ggml makes one for every
// decode: with OpenMP that costs an allocation, without it the start and the end of every thread.
void attach_pool(spec_engine & engine) {
    llama_context * target = engine.target.get();
    engine.n_threads_max = std::max(engine.n_threads, engine.n_threads_batch);
    ggml_threadpool_params params = ggml_threadpool_params_default(engine.n_threads_max);
    engine.pool.reset(ggml_threadpool_new(&params));
    if (!engine.pool) {
        throw std::bad_alloc();
    }
    llama_attach_threadpool(target, engine.pool.get(), nullptr);
    if (engine.draft) {
        llama_attach_threadpool(engine.draft.get(), engine.pool.get(), nullptr);
    }
}

// An engine with its models and parameters, checked, and nothing else.
std::unique_ptr<spec_engine> bare_engine(const spec_model & target, const spec_model * draft,
                                         const spec_engine_params & params) {
    check_engine_params(params);
    if (target.vocab_only) {
        fail(SPEC_ERR_INVALID_ARGUMENT, "the target was loaded with vocab_only");
    }
    check_draft(target, draft, params);
    auto engine = std::make_unique<spec_engine>();
    engine->target_model = &target;
    engine->draft_model = draft;
    engine->params = params;
    return engine;
}

spec_engine * make_engine(const spec_model & target, const spec_model * draft,
                          const spec_engine_params & params) {
    auto engine = bare_engine(target, draft, params);
    make_target(*engine);
    engine->target_rollback = probe_rollback(engine->target.get(), "target");
    make_drafter(*engine, draft);
    fill_limits(*engine);
    for (llama_context * context : {engine->target.get(), engine->draft.get()}) {
        if (context != nullptr && engine->limits.kv_unified) {
            set_seq_length(context, engine->limits.n_ctx_seq);
        }
    }
    fill_synth_probs(*engine);
    engine->batch = common_batch(engine->target.get());
    engine->sampling.init(llama_n_threads(engine->target.get()));
    engine->n_threads = llama_n_threads(engine->target.get());
    engine->n_threads_batch = llama_n_threads_batch(engine->target.get());
    attach_pool(*engine);
    engine->sequences.resize(static_cast<size_t>(params.n_seq_max));
    engine->has_drafted.resize(engine->sequences.size());
    target.grammars->prepare(target.vocab);
    return engine.release();
}

} // namespace

// The contexts of a survey's engine, which computes nothing.
std::unique_ptr<spec_engine> make_contexts(const spec_model & target, const spec_model * draft,
                                           const spec_engine_params & params) {
    auto engine = bare_engine(target, draft, params);
    make_target(*engine);
    check_memory(engine->target.get(), "target");
    if (needs_draft_context(params.draft_type)) {
        make_draft(*engine, draft);
    }
    return engine;
}

// What these contexts would be made with: the target's, and beside it the draft's.
context_plan plan_contexts(const spec_model & target, const spec_model * draft,
                           const spec_engine_params & params) {
    const auto engine = bare_engine(target, draft, params);
    const llama_context_params c = target_params(*engine);
    return {c, draft_params(*engine, c.n_ctx, c.n_ctx / c.n_seq_max)};
}

void check_memory(llama_context * context, const char * which) {
    if (llama_get_memory(context) == nullptr) {
        fail(SPEC_ERR_UNSUPPORTED, std::string("the ") + which +
                                       " keeps no tokens in a cache: it is made for embeddings or "
                                       "the like, not to generate");
    }
    // llama.cpp ends the process at such a prompt of more than a ubatch. Block drafters read their
    // own blocks so.
    if (!llama_get_causal_attn(context) && layers_read(llama_get_model(context)).empty()) {
        fail(SPEC_ERR_UNSUPPORTED, std::string("the ") + which +
                                       " reads a text in both directions (attention.causal is "
                                       "false): it is made for embeddings or the like, not to "
                                       "generate");
    }
}

rollback_kind probe_rollback(llama_context * context, const char * which) {
    check_memory(context, which);
    // It clears the context's memory: only here, before the first step.
    switch (common_context_can_seq_rm(context)) {
    case COMMON_CONTEXT_SEQ_RM_TYPE_PART:
        return rollback_kind::any;
    case COMMON_CONTEXT_SEQ_RM_TYPE_RS:
        return rollback_kind::bounded;
    case COMMON_CONTEXT_SEQ_RM_TYPE_FULL:
        return rollback_kind::none;
    default:
        fail(SPEC_ERR_UNSUPPORTED,
             std::string("the ") + which + " cannot take tokens back from its memory");
    }
}

void clear_memory(spec_engine & engine, int32_t seq_id) {
    llama_memory_seq_rm(engine.target_memory(), seq_id, -1, -1);
    if (engine.draft) {
        llama_memory_seq_rm(engine.draft_memory(), seq_id, -1, -1);
    }
}

// Between separate caches llama.cpp puts the copying of cells off, in both contexts, until each
// decodes next. Where memory runs out in its midst nobody knows what it would copy then: half an
// order, or none of them. So a copy is made before anything else is done, and one that fails, whose
// sequence is cleared, leaves no order: before a decode, and before cells are read or written.
void drop_copies(spec_engine & engine) {
    if (!engine.has_copies_left) {
        return;
    }
    drop_ordered(engine.target.get());
    if (engine.draft) {
        drop_ordered(engine.draft.get());
    }
    engine.has_copies_left = false;
}

// Orders the cells of a whole sequence: llama.cpp copies between separate caches only so.
// `make_copy` copies those that are still held there.
void order_copy(spec_engine & engine, int32_t src, int32_t dst) {
    drop_copies(engine);
    engine.has_copies_left = !engine.limits.kv_unified; // first: what fails may have ordered some
    llama_memory_seq_cp(engine.target_memory(), src, dst, -1, -1);
    if (engine.draft && !seq_of(engine, src).is_cold) {
        llama_memory_seq_cp(engine.draft_memory(), src, dst, -1, -1);
    }
}

void make_copy(spec_engine & engine) {
    if (!engine.has_copies_left) {
        return;
    }
    copy_ordered(engine.target.get());
    if (engine.draft) {
        copy_ordered(engine.draft.get());
    }
    engine.has_copies_left = false;
}

// Gives everything of a sequence back. Safe on an idle one.
void clear_sequence(spec_engine & engine, int32_t seq_id) {
    clear_memory(engine, seq_id);
    seq_of(engine, seq_id) = sequence{};
}

// A drafter that knows nothing of former sequences.
void begin_drafter(spec_engine & engine, sequence & seq, int32_t seq_id) {
    if (engine.is_ngram()) {
        common_params_speculative params = engine.spec_params;
        seq.ngram_events.clear();
        seq.has_drafter_begun = false;
        seq.ngram.reset(common_speculative_init(params, 1));
        if (!seq.ngram) {
            fail(SPEC_ERR_UNSUPPORTED, "llama.cpp offers no n-gram drafter of this type");
        }
    }
    if (engine.spec) {
        // An empty prompt makes the carried patch drop the hidden rows that the slot's former
        // sequence left behind.
        common_speculative_begin(engine.spec.get(), seq_id, {});
    }
}

// Whether tokens of this id wait, decoded by hand, for `process`.
bool is_unprocessed(const spec_engine & engine, int32_t seq_id) {
    if (!engine.spec || !engine.is_decoded || engine.is_processed) {
        return false;
    }
    const auto & tokens = engine.batch.tokens;
    return std::any_of(tokens.begin(), tokens.end(),
                       [&](const auto & token) { return token.seq_id == seq_id; });
}

// A sequence that begins with nothing computed takes a sampler that knows nothing.
void check_new_sampler(const spec_engine & engine, int32_t seq_id, const spec_sampler & sampler) {
    if (sampler.n_vocab != engine.limits.n_vocab) {
        fail(SPEC_ERR_INVALID_ARGUMENT, "the sampler was made for a model with another vocabulary");
    }
    if (!sampler.history.heard.empty()) {
        bad_plan(seq_id, "a preempted sampler goes on by a start of a plan alone, with is_resumed");
    }
}

void begin_sequence(spec_engine & engine, int32_t seq_id, std::unique_ptr<spec_sampler> sampler) {
    sequence & seq = at(engine, seq_id);
    if (seq.is_begun) {
        fail(SPEC_ERR_SEQ_BUSY, "sequence " + std::to_string(seq_id) + " has begun already");
    }
    if (is_unprocessed(engine, seq_id)) {
        fail(SPEC_ERR_BAD_PLAN, "sequence " + std::to_string(seq_id) +
                                    ": a batch with tokens of its former sequence has not been "
                                    "processed");
    }
    check_new_sampler(engine, seq_id, *sampler);
    clear_sequence(engine, seq_id);
    begin_drafter(engine, seq, seq_id);
    if (!engine.synth_probs.empty()) {
        seq.synth_rng.seed(engine.n_synth_begun++);
    }
    seq.sampler = std::move(sampler);
    seq.is_begun = true;
}

} // namespace drafthouse

using namespace drafthouse;

extern "C" {

void spec_engine_default_params(spec_engine_params * out) {
    if (out == nullptr) {
        return;
    }
    *out = {};
    out->draft_type = SPEC_DRAFT_NONE;
    out->n_batch = 2048;
    out->n_ubatch = 512;
    out->n_seq_max = 1;
    out->n_draft_max = 3;
    out->n_rs_seq = -1;
    out->flash_attention = true;
    out->n_wide = 2;
    out->yarn_ext_factor = -1.0f;
    out->yarn_attn_factor = -1.0f;
    out->yarn_beta_slow = -1.0f;
    out->yarn_beta_fast = -1.0f;
}

int32_t spec_engine_init(const spec_model * target, const spec_model * draft,
                         const spec_engine_params * params, spec_engine ** out) {
    return guarded([&] {
        deref(out, "out") = nullptr;
        *out = make_engine(deref(target, "target"), draft, deref(params, "params"));
    });
}

void spec_engine_free(spec_engine * engine) {
    delete engine;
}

int32_t spec_engine_get_limits(const spec_engine * engine, spec_engine_limits * out) {
    return guarded([&] { deref(out, "out") = deref(engine, "engine").limits; });
}

int32_t spec_engine_seq_begin(spec_engine * engine, int32_t seq_id, spec_sampler ** sampler) {
    return guarded([&] {
        std::unique_ptr<spec_sampler> owned(&deref(deref(sampler, "sampler"), "*sampler"));
        *sampler = nullptr;
        begin_sequence(deref(engine, "engine"), seq_id, std::move(owned));
    });
}

int32_t spec_engine_seq_end(spec_engine * engine, int32_t seq_id) {
    return guarded([&] {
        at(deref(engine, "engine"), seq_id);
        clear_sequence(*engine, seq_id);
    });
}

int32_t spec_engine_seq_n_past(const spec_engine * engine, int32_t seq_id) {
    int32_t n = 0;
    const int32_t rc = guarded([&] { n = at(deref(engine, "engine"), seq_id).n_past(); });
    return rc == SPEC_OK ? n : rc;
}

int32_t spec_engine_n_cells_used(const spec_engine * engine) {
    int32_t n = 0;
    const int32_t rc = guarded([&] {
        const spec_engine & e = deref(engine, "engine");
        for (int32_t seq_id = 0; seq_id < e.limits.n_seq_max; ++seq_id) {
            const llama_pos target = llama_memory_seq_pos_max(e.target_memory(), seq_id) + 1;
            const llama_pos draft =
                e.draft ? llama_memory_seq_pos_max(e.draft_memory(), seq_id) + 1 : 0;
            n += std::max(target, draft);
        }
    });
    return rc == SPEC_OK ? n : rc;
}

int32_t spec_engine_seq_tokens(const spec_engine * engine, int32_t seq_id, int32_t * tokens,
                               size_t cap, size_t * n_needed, int32_t * id_last) {
    return guarded([&] {
        const sequence & seq = begun(deref(engine, "engine"), seq_id);
        deref(n_needed, "n_needed") = seq.tokens.size();
        if (id_last != nullptr) {
            *id_last = seq.id_last;
        }
        if (seq.tokens.size() > cap || (tokens == nullptr && !seq.tokens.empty())) {
            fail(SPEC_ERR_BUFFER_TOO_SMALL,
                 "the sequence has " + std::to_string(seq.tokens.size()) + " tokens");
        }
        std::copy(seq.tokens.begin(), seq.tokens.end(), tokens);
    });
}

int32_t spec_engine_set_threads(spec_engine * engine, int32_t n_threads, int32_t n_threads_batch) {
    return guarded([&] {
        spec_engine & e = deref(engine, "engine");
        check_range("n_threads", n_threads, 1, e.n_threads_max);
        check_range("n_threads_batch", n_threads_batch, 1, e.n_threads_max);
        e.n_threads = n_threads;
        e.n_threads_batch = n_threads_batch;
    });
}

int32_t spec_engine_inject_fault(spec_engine * engine, int32_t fault, int32_t n_steps) {
    return guarded([&] {
        spec_engine & e = deref(engine, "engine");
        check_range("fault", fault, SPEC_FAULT_NONE, SPEC_FAULT_COUNT - 1);
        check_range("n_steps", n_steps, 0, std::numeric_limits<int32_t>::max());
        e.fault = fault;
        e.n_fault = n_steps;
    });
}

} // extern "C"
