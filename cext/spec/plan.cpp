// Validation: of a plan, and of the same things by hand.

#include "internal.hpp"

#include <algorithm>
#include <string>
#include <vector>

namespace drafthouse {

namespace {

// A generating sequence computes its last emitted token; a resumed one all that it had before, in
// pieces, of which the one with the last emitted token is an output.
void check_known(const planned_sequence & seq, const spec_plan_entry & e, const int32_t * tokens) {
    const int32_t n_after = e.n_past + e.n_tokens;
    const int32_t n_old = seq.known != nullptr ? static_cast<int32_t>(seq.known->size()) : 0;
    for (int32_t i = 0; i < e.n_tokens && e.n_past + i < n_old; ++i) {
        if (tokens[i] != (*seq.known)[static_cast<size_t>(e.n_past + i)]) {
            bad_plan(e.seq_id, "a resumed sequence must be given the tokens that it had");
        }
    }
    if (!seq.has_emitted) {
        if (e.n_draft > 0) {
            bad_plan(e.seq_id, "n_draft needs a sequence that has emitted a token");
        }
        return;
    }
    const bool is_last = n_after == seq.n_known;
    if (n_after > seq.n_known || (is_last && tokens[e.n_tokens - 1] != seq.id_last) ||
        e.is_output != (is_last ? 1 : 0)) {
        bad_plan(e.seq_id, "a generating sequence must be given its last emitted token alone, with "
                           "is_output, or what a resumed one lacks up to that token");
    }
    if (e.n_draft > 0 && (!is_last || e.n_tokens != 1)) {
        bad_plan(e.seq_id, "n_draft needs the last emitted token alone");
    }
}

void check_entry(const spec_engine & engine, const planned_sequence & seq,
                 const spec_plan_entry & e, const spec_plan & plan) {
    if (e.n_past != seq.n_past) {
        bad_plan(e.seq_id, "n_past is " + std::to_string(e.n_past) + ", but its cache holds " +
                               std::to_string(seq.n_past) + " tokens");
    }
    if (e.n_tokens < 1 || e.token_offset < 0 || e.token_offset > plan.n_tokens - e.n_tokens) {
        bad_plan(e.seq_id, "its tokens lie outside the plan's tokens, or there are none");
    }
    if (e.is_output != 0 && e.is_output != 1) {
        bad_plan(e.seq_id, "is_output is neither 0 nor 1");
    }
    if (e.n_draft < 0 || e.n_draft > engine.limits.n_draft_max) {
        bad_plan(e.seq_id, "n_draft is " + std::to_string(e.n_draft) + "; expected [0, " +
                               std::to_string(engine.limits.n_draft_max) + "]");
    }
    if (int64_t{e.n_past} + e.n_tokens + e.n_draft > engine.limits.n_ctx_seq) {
        bad_plan(e.seq_id,
                 "it would hold " + std::to_string(int64_t{e.n_past} + e.n_tokens + e.n_draft) +
                     " tokens; a sequence has room for " + std::to_string(engine.limits.n_ctx_seq));
    }
    const int32_t * tokens = plan.tokens + e.token_offset;
    for (int32_t i = 0; i < e.n_tokens; ++i) {
        check_token(tokens[i], engine.limits.n_vocab, "plan");
    }
    if (!seq.is_lost) {
        check_known(seq, e, tokens);
    }
    if (seq.is_proposed) {
        bad_plan(e.seq_id, "a proposal is pending; accept it first");
    }
}

void check_capacity(const spec_engine & engine, const spec_plan & plan,
                    const std::vector<planned_sequence> & sequences) {
    int64_t n_batch = 0;
    int64_t n_outputs = 0;
    for (int32_t i = 0; i < plan.n_entries; ++i) {
        n_batch += plan.entries[i].n_tokens + plan.entries[i].n_draft;
        n_outputs += plan.entries[i].is_output != 0 ? 1 + plan.entries[i].n_draft : 0;
    }
    if (n_batch > engine.limits.n_batch) {
        fail(SPEC_ERR_BAD_PLAN, "the plan has " + std::to_string(n_batch) +
                                    " tokens; a step takes " +
                                    std::to_string(engine.limits.n_batch));
    }
    if (n_outputs > engine.limits.n_outputs_max) {
        fail(SPEC_ERR_BAD_PLAN, "the plan samples at " + std::to_string(n_outputs) +
                                    " positions; a step takes " +
                                    std::to_string(engine.limits.n_outputs_max));
    }
    if (!engine.limits.kv_unified) {
        return; // each sequence has cells of its own: n_ctx_seq bounds them
    }
    int64_t n_cells = n_batch;
    for (const planned_sequence & seq : sequences) {
        n_cells += seq.n_past;
    }
    if (n_cells > engine.limits.n_ctx) {
        fail(SPEC_ERR_BAD_PLAN, "the plan needs " + std::to_string(n_cells) +
                                    " KV cells; there are " + std::to_string(engine.limits.n_ctx));
    }
}

// External drafts are the caller's to choose, but not their place.
void check_external(const spec_engine & engine, const spec_plan & plan) {
    if (plan.n_drafts < 0 || plan.n_drafts > plan.n_entries) {
        fail(SPEC_ERR_BAD_PLAN, "the plan has " + std::to_string(plan.n_drafts) + " drafts and " +
                                    std::to_string(plan.n_entries) + " entries");
    }
    if (plan.n_drafts > 0) {
        deref(plan.drafts, "plan.drafts");
    }
    std::vector<int32_t> n_drafts(engine.sequences.size(), 0);
    for (int32_t i = 0; i < plan.n_entries; ++i) {
        n_drafts[static_cast<size_t>(plan.entries[i].seq_id)] = plan.entries[i].n_draft;
    }
    for (int32_t i = 0; i < plan.n_drafts; ++i) {
        const spec_external_draft & d = plan.drafts[i];
        if (d.seq_id < 0 || d.seq_id >= engine.limits.n_seq_max) {
            bad_plan(d.seq_id, "a draft for a sequence that does not exist");
        }
        int32_t & n_draft = n_drafts[static_cast<size_t>(d.seq_id)];
        if (d.n_tokens < 1 || d.n_tokens > n_draft) {
            bad_plan(d.seq_id, "a draft of " + std::to_string(d.n_tokens) +
                                   " tokens is given; expected one, of [1, n_draft] tokens");
        }
        n_draft = 0; // each once
        if (d.token_offset < 0 || d.token_offset > plan.n_tokens - d.n_tokens) {
            bad_plan(d.seq_id, "its draft lies outside the plan's tokens");
        }
        for (int32_t k = 0; k < d.n_tokens; ++k) {
            check_token(plan.tokens[d.token_offset + k], engine.limits.n_vocab, "draft");
        }
    }
}

void check_run(const spec_plan & plan) {
    if (plan.n_steps < 0 || plan.n_steps > SPEC_RUN_MAX) {
        fail(SPEC_ERR_BAD_PLAN, "n_steps is " + std::to_string(plan.n_steps) + "; expected [0, " +
                                    std::to_string(SPEC_RUN_MAX) + "]");
    }
    for (int32_t i = 0; plan.n_steps > 1 && i < plan.n_entries; ++i) {
        if (plan.entries[i].is_output == 0 || plan.entries[i].n_draft != 0) {
            bad_plan(plan.entries[i].seq_id, "in a run every entry is an output without a draft");
        }
    }
}

// By hand, what a step does by grouping is asked of the caller: on a recurrent target a decode that
// verifies drafts must be one ubatch (see make_groups), and short enough to be taken back.
void check_one_ubatch(const spec_engine & engine, const spec_token * tokens, int32_t n) {
    int32_t n_first = 0; // tokens of the first sequence: all must have as many
    while (n_first < n && tokens[n_first].seq_id == tokens[0].seq_id) {
        ++n_first;
    }
    bool is_even = n % n_first == 0 && n <= engine.limits.n_ubatch;
    for (int32_t i = 1; is_even && i < n; ++i) {
        const int32_t step = tokens[i].seq_id - tokens[i - 1].seq_id;
        is_even = i % n_first != 0 ? step == 0 : engine.limits.kv_unified ? step != 0 : step == 1;
    }
    if (!is_even || n_first > engine.limits.n_rs_seq + 1) {
        fail(SPEC_ERR_UNSUPPORTED,
             "on a recurrent target a decode by hand that verifies drafts takes sequences with "
             "ascending neighbouring ids and equally many tokens, at most " +
                 std::to_string(engine.limits.n_rs_seq + 1) + " each and " +
                 std::to_string(engine.limits.n_ubatch) + " together");
    }
}

// Checks that the tokens of each sequence stand together and continue its cache. Returns whether a
// draft is among them.
bool check_positions(spec_engine & engine, const spec_token * tokens, int32_t n) {
    std::vector<int32_t> next(engine.sequences.size(), -1);
    bool is_verified = false;
    for (int32_t i = 0; i < n; ++i) {
        const spec_token & t = tokens[i];
        const sequence & seq = begun(engine, t.seq_id);
        const auto id = static_cast<size_t>(t.seq_id);
        if (next[id] >= 0 && tokens[i - 1].seq_id != t.seq_id) {
            bad_plan(t.seq_id, "its tokens do not stand together");
        }
        const int32_t pos = next[id] >= 0 ? next[id] : seq.n_past();
        if (t.pos != pos) {
            bad_plan(t.seq_id,
                     "position is " + std::to_string(t.pos) + "; expected " + std::to_string(pos));
        }
        if (t.pos >= engine.limits.n_ctx_seq) {
            bad_plan(t.seq_id, "a sequence has room for " +
                                   std::to_string(engine.limits.n_ctx_seq) + " tokens");
        }
        check_token(t.token, engine.limits.n_vocab, "batch");
        next[id] = pos + 1;
        is_verified = is_verified || (seq.is_proposed && pos > seq.n_past());
    }
    return is_verified;
}

void check_draft_request(spec_engine & engine, const spec_draft_request & r) {
    const sequence & seq = begun(engine, r.seq_id);
    if (!engine.spec && !seq.ngram) {
        fail(SPEC_ERR_UNSUPPORTED, "this engine has no drafter");
    }
    if (r.n_past != seq.n_past() || seq.n_past() == 0) {
        bad_plan(r.seq_id, "n_past is " + std::to_string(r.n_past) + ", but its cache holds " +
                               std::to_string(seq.n_past()) + " tokens");
    }
    if (seq.is_proposed) {
        bad_plan(r.seq_id, "a proposal is pending; accept it first");
    }
    if (r.n_draft < 1 || r.n_draft > engine.limits.n_draft_max) {
        bad_plan(r.seq_id, "n_draft is " + std::to_string(r.n_draft) + "; expected [1, " +
                               std::to_string(engine.limits.n_draft_max) + "]");
    }
    if (int64_t{r.n_past} + 1 + r.n_draft > engine.limits.n_ctx_seq) {
        bad_plan(r.seq_id, "the draft does not fit the sequence's context");
    }
    check_token(r.id_last, engine.limits.n_vocab, "id_last");
}

} // namespace

[[noreturn]] void bad_plan(int32_t seq_id, const std::string & text) {
    fail(SPEC_ERR_BAD_PLAN, "sequence " + std::to_string(seq_id) + ": " + text);
}

// Checks all of a plan against what its moves will have made of the sequences.
checked_moves check_plan(spec_engine & engine, const spec_plan & plan) {
    if (plan.n_entries < 0 || plan.n_entries > engine.limits.n_seq_max || plan.n_tokens < 0) {
        fail(SPEC_ERR_BAD_PLAN, "the plan has " + std::to_string(plan.n_entries) + " entries and " +
                                    std::to_string(plan.n_tokens) + " tokens; expected at most " +
                                    std::to_string(engine.limits.n_seq_max) + " entries");
    }
    if (engine.is_decoded && !engine.is_processed && engine.spec) {
        fail(SPEC_ERR_BAD_PLAN, "the last batch decoded by hand has not been processed");
    }
    if (plan.n_entries > 0) {
        deref(plan.entries, "plan.entries");
        deref(plan.tokens, "plan.tokens");
    }
    checked_moves moves = check_moves(engine, plan);
    std::vector<bool> is_seen(engine.sequences.size());
    for (int32_t i = 0; i < plan.n_entries; ++i) {
        const spec_plan_entry & e = plan.entries[i];
        const planned_sequence & seq = planned_begun(engine, moves.sequences, e.seq_id);
        const auto id = static_cast<size_t>(e.seq_id);
        if (is_seen[id]) {
            bad_plan(e.seq_id, "it stands in the plan twice");
        }
        is_seen[id] = true;
        check_entry(engine, seq, e, plan);
    }
    check_external(engine, plan);
    check_capacity(engine, plan, moves.sequences);
    check_run(plan);
    return moves;
}

void check_draft_requests(spec_engine & engine, const spec_draft_request * requests, int32_t n) {
    check_range("n_requests", n, 0, engine.limits.n_seq_max);
    if (n > 0) {
        deref(requests, "requests");
    }
    if (engine.is_decoded && !engine.is_processed && engine.spec) {
        fail(SPEC_ERR_BAD_PLAN, "the last batch has not been processed");
    }
    std::vector<bool> is_asked(engine.sequences.size());
    for (int32_t i = 0; i < n; ++i) {
        check_draft_request(engine, requests[i]);
        const auto id = static_cast<size_t>(requests[i].seq_id);
        if (is_asked[id]) {
            bad_plan(requests[i].seq_id, "it is asked for twice");
        }
        is_asked[id] = true;
    }
}

void check_tokens(spec_engine & engine, const spec_token * tokens, int32_t n) {
    const bool is_verified = check_positions(engine, tokens, n);
    if (is_verified && engine.target_rollback != rollback_kind::any) {
        check_one_ubatch(engine, tokens, n);
    } else if (is_verified && needs_one_ubatch(engine) && n > engine.limits.n_ubatch) {
        fail(SPEC_ERR_UNSUPPORTED,
             "with sliding windows in a shared pool a decode by hand that verifies drafts takes at "
             "most n_ubatch = " +
                 std::to_string(engine.limits.n_ubatch) + " tokens, not " + std::to_string(n));
    }
    const auto n_outputs =
        std::count_if(tokens, tokens + n, [](const spec_token & t) { return t.is_output != 0; });
    if (n_outputs > engine.limits.n_outputs_max) {
        fail(SPEC_ERR_BAD_PLAN, "the batch has " + std::to_string(n_outputs) +
                                    " outputs; at most " +
                                    std::to_string(engine.limits.n_outputs_max) + " are possible");
    }
    if (engine.limits.kv_unified && cells_with(engine, n) > engine.limits.n_ctx) {
        fail(SPEC_ERR_BAD_PLAN, "the batch needs more KV cells than there are");
    }
}

// Cells of a shared pool that are taken once n more are.
int64_t cells_with(const spec_engine & engine, int64_t n) {
    for (const sequence & seq : engine.sequences) {
        n += seq.n_past();
    }
    return n;
}

} // namespace drafthouse
