// Drafts: ordered, made, given, settled.

#include "internal.hpp"

#include <algorithm>
#include <cmath>
#include <vector>

namespace drafthouse {

namespace {

// Whether the drafter, if there is one to follow the sequence, can be told what became of a draft
// that is not its own. MTP and EAGLE-3 must be: they go on from the hidden row of the last accepted
// token. llama.cpp lets them only for an id that they have drafted for before, be it for another
// sequence (`impl_last` of common_speculative is set by a draft, and never reset); before that it
// would end the process. A cold sequence that warms up has its drafter follow from this very step
// on.
bool can_verify_external(const spec_engine & engine, const sequence & seq, int32_t seq_id) {
    const bool is_followed = engine.spec && (!seq.is_cold || seq.is_warming_up);
    return !is_followed || engine.has_drafted[static_cast<size_t>(seq_id)];
}

// Takes an external draft, up to its first end token: nothing follows that. The target's own draws
// verify it, so any cut is exact.
void take_external(const spec_engine & engine, sequence & seq, const int32_t * tokens, int32_t n) {
    const int32_t * end = std::find_if(tokens, tokens + n, [&](llama_token token) {
        return llama_vocab_is_eog(engine.target_model->vocab, token);
    });
    seq.draft.tokens.assign(tokens, end);
    seq.draft.is_external = !seq.draft.tokens.empty();
}

// Counts what the drafts have left in the draft's cache, before it is undone. A pass computes one
// token of each sequence that still drafts, or all their blocks.
void count_work(spec_engine & engine, const std::vector<int32_t> & armed) {
    if (!engine.draft || armed.empty()) {
        return;
    }
    // An EAGLE-3 row pairs a position with the token after it, and so lies one place further ahead.
    const int32_t n_ahead = engine.limits.draft_type == SPEC_DRAFT_EAGLE3 ? 1 : 0;
    int64_t n_most = 0;
    for (const int32_t seq_id : armed) {
        const llama_pos last = llama_memory_seq_pos_max(engine.draft_memory(), seq_id);
        const int32_t n_past = seq_of(engine, seq_id).n_past() - n_ahead;
        const int64_t n = std::max(last + 1 - n_past, 0);
        engine.draft_work.n_positions += n;
        n_most = std::max(n_most, n);
    }
    engine.draft_work.n_drafts += static_cast<int64_t>(armed.size());
    const bool is_block = drafts_blocks(engine.limits.draft_type);
    engine.draft_work.n_passes += is_block ? std::min<int64_t>(n_most, 1) : n_most;
}

} // namespace

common_speculative * drafter_of(spec_engine & engine, sequence & seq) {
    return seq.ngram ? seq.ngram.get() : engine.spec.get();
}

llama_seq_id drafter_id(const sequence & seq, int32_t seq_id) {
    return seq.ngram ? 0 : seq_id;
}

// Tokens that the draft's context reads. A draft model may lack some of the target's.
int32_t draft_vocabulary(const spec_engine & engine) {
    return engine.draft
               ? llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(engine.draft.get())))
               : engine.limits.n_vocab;
}

// llama.cpp's n-gram cache reads before the start of a history that is shorter than its n-grams.
bool is_too_short_to_draft(const spec_engine & engine, int32_t n_past) {
    constexpr int32_t N_NGRAM_CACHE = 4;
    return engine.limits.draft_type == SPEC_DRAFT_NGRAM_CACHE && n_past + 1 < N_NGRAM_CACHE;
}

// llama.cpp ends the process when it gives a draft model a token that this lacks.
bool can_draft(const spec_engine & engine, const sequence & seq, llama_token id_last) {
    return !seq.is_cold && id_last < draft_vocabulary(engine) &&
           !is_too_short_to_draft(engine, seq.n_past());
}

void arm(spec_engine & engine, sequence & seq, int32_t seq_id, int32_t n_draft,
         llama_token id_last) {
    common_speculative * drafter = drafter_of(engine, seq);
    const llama_seq_id id = drafter_id(seq, seq_id);
    if (!seq.has_drafter_begun) {
        common_speculative_begin(drafter, id, seq.tokens);
        seq.has_drafter_begun = true;
    }
    seq.draft = {};
    if (seq.ngram) {
        seq.ngram_events.push_back({seq.n_past(), id_last, n_draft, -1});
    }
    // A restored n-gram drafter lives through its drafts again before its sequence has a sampler.
    const spec_sampler * sampler = seq.sampler.get();
    const bool is_sampled = engine.params.probabilistic && sampler != nullptr &&
                            sampler->temperature > 0.0f && !sampler->is_match_only;
    auto & dp = common_speculative_get_draft_params(drafter, id);
    dp.drafting = true;
    dp.n_max = n_draft;
    dp.pos0 = seq.n_past();
    dp.id_last = id_last;
    dp.prompt = &seq.tokens;
    dp.result = &seq.draft.tokens;
    dp.result_q = is_sampled ? &seq.draft.q : nullptr;
    dp.temp = sampler != nullptr ? sampler->temperature : 0.0f;
    dp.seed = sampler != nullptr ? sampler->seed : 0;
}

// Tells the drafter how much of the draft was accepted.
void accept_draft(spec_engine & engine, sequence & seq, int32_t seq_id, int32_t n_accepted) {
    if (seq.draft.is_external && (seq.ngram || !engine.spec || seq.is_cold)) {
        return; // drafters that follow the tokens alone need not know
    }
    common_speculative_accept(drafter_of(engine, seq), drafter_id(seq, seq_id),
                              static_cast<uint16_t>(n_accepted));
    if (!seq.ngram_events.empty()) {
        seq.ngram_events.back().n_accepted = n_accepted;
    }
}

// Whether a draft can be weighed against what it was drawn from. A model's weights may be broken.
bool is_distribution(const std::vector<llama_token_data> & q) {
    return std::all_of(q.begin(), q.end(), [](const auto & it) { return std::isfinite(it.p); });
}

// After the drafter ran: what it wrote is made fit for verification, and its KV is undone.
void settle_draft(spec_engine & engine, sequence & seq, int32_t seq_id, int32_t n_draft) {
    llama_tokens & tokens = seq.draft.tokens;
    if (static_cast<int32_t>(tokens.size()) > n_draft) {
        tokens.resize(static_cast<size_t>(n_draft));
    }
    const bool has_q = !tokens.empty() && seq.draft.q.size() >= tokens.size();
    seq.draft.q.resize(has_q ? tokens.size() : 0);
    // Rejected by numbers that are none, it would take its candidates from the target's own.
    const auto broken = std::find_if_not(seq.draft.q.begin(), seq.draft.q.end(), is_distribution);
    if (broken != seq.draft.q.end()) {
        seq.draft.q.erase(broken, seq.draft.q.end());
        tokens.resize(seq.draft.q.size());
    }
    for (size_t i = 0; i < tokens.size(); ++i) {
        const bool is_valid = tokens[i] >= 0 && tokens[i] < engine.limits.n_vocab;
        if (is_valid && !llama_vocab_is_eog(engine.target_model->vocab, tokens[i])) {
            continue;
        }
        // Nothing follows an end token. Cutting it as well is exact for argmax drafts only: a
        // sampled draft must not be cut by its own value, so there the end token stays and what
        // follows it goes. Of a token that the target does not have its distribution stays: it is
        // rejected by that.
        tokens.resize(is_valid && has_q ? i + 1 : i);
        seq.draft.q.resize(has_q ? i + 1 : 0);
        break;
    }
    const bool is_rejected = seq.draft.q.size() > tokens.size();
    if (static_cast<int32_t>(tokens.size()) < engine.params.n_min && !is_rejected) {
        seq.draft = {};
    }
    if (engine.draft) {
        llama_memory_seq_rm(engine.draft_memory(), seq_id, seq.n_past(), -1);
    }
}

// Drafts for all armed sequences: one batched call, or one call per sequence for the n-gram kinds.
void run_drafters(spec_engine & engine, const std::vector<int32_t> & armed) {
    if (!engine.is_ngram()) {
        if (!armed.empty()) {
            common_speculative_draft(engine.spec.get());
            count_work(engine, armed);
        }
        for (const int32_t seq_id : armed) {
            const auto id = static_cast<size_t>(seq_id);
            engine.has_drafted[id] =
                engine.has_drafted[id] || !engine.sequences[id].draft.tokens.empty();
        }
        return;
    }
    for (const int32_t seq_id : armed) {
        common_speculative_draft(seq_of(engine, seq_id).ngram.get());
    }
}

void draft_plan(spec_engine & engine, const spec_plan & plan) {
    draft_orders orders{engine, {}};
    for (int32_t i = 0; i < plan.n_entries; ++i) {
        seq_of(engine, plan.entries[i].seq_id).draft = {};
    }
    for (int32_t i = 0; i < plan.n_drafts; ++i) {
        const spec_external_draft & d = plan.drafts[i];
        sequence & seq = seq_of(engine, d.seq_id);
        if (can_verify_external(engine, seq, d.seq_id)) {
            take_external(engine, seq, plan.tokens + d.token_offset, d.n_tokens);
        }
    }
    for (int32_t i = 0; i < plan.n_entries; ++i) {
        const spec_plan_entry & e = plan.entries[i];
        sequence & seq = seq_of(engine, e.seq_id);
        if (e.n_draft > 0 && !seq.draft.is_external && can_draft(engine, seq, seq.id_last)) {
            orders.give(seq, e.seq_id, e.n_draft, seq.id_last);
        }
    }
    const std::vector<int32_t> & armed = orders.armed;
    run_drafters(engine, armed);
    for (int32_t i = 0; i < plan.n_entries; ++i) {
        const spec_plan_entry & e = plan.entries[i];
        if (std::find(armed.begin(), armed.end(), e.seq_id) != armed.end()) {
            settle_draft(engine, seq_of(engine, e.seq_id), e.seq_id, e.n_draft);
        }
    }
}

} // namespace drafthouse

using namespace drafthouse;

extern "C" {

int32_t spec_engine_get_draft_work(const spec_engine * engine, spec_draft_work * out) {
    return guarded([&] { deref(out, "out") = deref(engine, "engine").draft_work; });
}

} // extern "C"
