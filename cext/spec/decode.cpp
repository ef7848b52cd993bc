// The target's decode: batches, groups of sequences, and the way back.

#include "internal.hpp"

#include <algorithm>
#include <map>
#include <numeric>
#include <stdexcept>
#include <utility>
#include <vector>

namespace drafthouse {

namespace {

// The plan's entries by sequence. llama.cpp puts sequences into one ubatch only while their ids
// follow one another, so the order decides how many graphs a decode computes.
group sorted_entries(const spec_plan & plan) {
    group entries(static_cast<size_t>(plan.n_entries));
    std::iota(entries.begin(), entries.end(), size_t{0});
    std::sort(entries.begin(), entries.end(),
              [&](size_t a, size_t b) { return plan.entries[a].seq_id < plan.entries[b].seq_id; });
    return entries;
}

// Tokens that an entry with a draft brings.
size_t n_verified(const spec_engine & engine, const spec_plan & plan, size_t i) {
    const auto id = static_cast<size_t>(plan.entries[i].seq_id);
    return 1 + engine.sequences[id].draft.tokens.size();
}

// Whether an entry fits into the ubatch of a group.
bool joins(const spec_engine & engine, const spec_plan & plan, const group & entries, size_t i) {
    size_t n_tokens = n_verified(engine, plan, i);
    for (const size_t other : entries) {
        n_tokens += n_verified(engine, plan, other);
    }
    if (n_tokens > static_cast<size_t>(engine.limits.n_ubatch)) {
        return false;
    }
    return engine.limits.kv_unified ||
           plan.entries[entries.back()].seq_id + 1 == plan.entries[i].seq_id;
}

// Notes how far the sequences of a batch can go back from here. A recurrent target has the states
// of the tokens of one ubatch, and the tail of a lone sequence always is one; of sequences of
// unlike lengths, or without neighbouring ids in caches of their own, one ubatch may follow
// another, and then the states of the first lie elsewhere.
void note_states(spec_engine & engine, int32_t n_kept) {
    const auto & tokens = engine.batch.tokens;
    const auto n_all = static_cast<int32_t>(tokens.size());
    std::vector<int32_t> counts(engine.sequences.size(), 0);
    int32_t n_seqs = 0;
    for (const auto & token : tokens) {
        int32_t & count = counts[static_cast<size_t>(token.seq_id)];
        n_seqs += count == 0 ? 1 : 0;
        ++count;
    }
    const int32_t n = counts[static_cast<size_t>(tokens.front().seq_id)];
    const int32_t n_ids = tokens.back().seq_id - tokens.front().seq_id + 1;
    bool is_whole = n_seqs == 1 || (n_all <= engine.limits.n_ubatch &&
                                    (engine.limits.kv_unified || n_ids == n_seqs));
    for (const auto & token : tokens) {
        is_whole = is_whole && counts[static_cast<size_t>(token.seq_id)] == n;
    }
    for (const auto & token : tokens) {
        sequence & seq = seq_of(engine, token.seq_id);
        seq.i_decode = engine.n_decodes;
        seq.n_back_max = is_whole ? std::min(n - 1, n_kept) : 0;
    }
}

} // namespace

// The recurrent part of a sequence's state, where the coming draft may have to be taken back
// further than the context can.
void save_checkpoint(spec_engine & engine, sequence & seq, int32_t seq_id) {
    seq.checkpoint.clear();
    if (engine.target_rollback == rollback_kind::any ||
        static_cast<int32_t>(seq.draft.tokens.size()) <= engine.limits.n_rs_seq) {
        return;
    }
    llama_context * ctx = engine.target.get();
    const size_t n = llama_state_seq_get_size_ext(ctx, seq_id, LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY);
    seq.checkpoint.resize(n);
    if (llama_state_seq_get_data_ext(ctx, seq.checkpoint.data(), n, seq_id,
                                     LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY) != n) {
        seq.checkpoint.clear();
        seq.draft = {}; // without a checkpoint nothing can be taken back: decode without the draft
    }
}

void build_batch(spec_engine & engine, const spec_plan & plan, const group & entries) {
    engine.batch.clear();
    engine.rows.resize(static_cast<size_t>(plan.n_entries));
    for (const size_t i : entries) {
        const spec_plan_entry & e = plan.entries[i];
        const sequence & seq = seq_of(engine, e.seq_id);
        engine.rows[i] = engine.batch.size();
        int32_t pos = e.n_past;
        for (int32_t k = 0; k < e.n_tokens; ++k) {
            const bool is_output = e.is_output != 0 && k == e.n_tokens - 1;
            engine.batch.add(plan.tokens[e.token_offset + k], pos++, e.seq_id, is_output);
        }
        for (const llama_token token : seq.draft.tokens) {
            engine.batch.add(token, pos++, e.seq_id, true);
        }
    }
}

// Whether a draft can be taken back only if the decode that verified it was one ubatch. With
// recurrent layers llama.cpp moves the state of a sequence, but not the snapshots that its rollback
// needs, when a later ubatch of the same decode gathers other sequences. In a shared pool a later
// ubatch takes the cells that lie behind the window of the draft's end.
bool needs_one_ubatch(const spec_engine & engine) {
    return engine.target_rollback != rollback_kind::any ||
           (engine.limits.kv_unified && engine.limits.n_window > 0);
}

// Which entries are decoded together. All of them, except where a decode with drafts must be one
// ubatch: then as many as fit; on a target with recurrent layers neighbours with drafts of one
// length. What has no draft is never taken back and goes first.
std::vector<group> make_groups(const spec_engine & engine, const spec_plan & plan) {
    std::vector<group> groups(1);
    std::map<size_t, group> open; // by length of the draft, where that matters
    const bool is_recurrent = engine.target_rollback != rollback_kind::any;
    for (const size_t i : sorted_entries(plan)) {
        const size_t n = n_verified(engine, plan, i);
        if (n == 1 || !needs_one_ubatch(engine)) {
            groups.front().push_back(i);
            continue;
        }
        group & neighbours = open[is_recurrent ? n : 0];
        if (!neighbours.empty() && !joins(engine, plan, neighbours, i)) {
            groups.push_back(std::move(neighbours));
            neighbours.clear();
        }
        neighbours.push_back(i);
    }
    for (auto & [n, entries] : open) {
        groups.push_back(std::move(entries));
    }
    if (groups.front().empty()) {
        groups.erase(groups.begin());
    }
    return groups;
}

// Gives a context the threads that a batch of this width gets.
void set_threads(const spec_engine & engine, llama_context * context) {
    const size_t n_wide = static_cast<size_t>(std::max(2, engine.params.n_wide));
    const bool is_wide = engine.batch.tokens.size() >= n_wide;
    const int32_t n = is_wide ? engine.n_threads_batch : engine.n_threads;
    llama_set_n_threads(context, n, n);
}

// n_kept: tokens that each sequence may have to go back from here. A recurrent target keeps a state
// for each; a piece of a prompt needs none, and they take time.
int32_t decode_batch(spec_engine & engine, int32_t n_kept) {
    n_kept = std::max(0, std::min(n_kept, engine.limits.n_rs_seq));
    keep_states(engine.target.get(), n_kept);
    set_threads(engine, engine.target.get());
    choose_rows(engine);
    ++engine.n_decodes;
    if (engine.take_fault(SPEC_FAULT_DECODE_NO_ROOM)) {
        return 1;
    }
    drop_copies(engine);
    const int32_t rc =
        llama_process(engine.target.get(), LLAMA_PROCESS_TYPE_DECODE, engine.batch.get());
    if (rc == 0) {
        llama_synchronize(engine.target.get());
        note_states(engine, n_kept);
    }
    if (engine.take_fault(SPEC_FAULT_DECODE_THROW)) {
        throw std::runtime_error("injected fault of a decode");
    }
    return engine.take_fault(SPEC_FAULT_DECODE_FATAL) ? -3 : rc;
}

// Takes the drafts of a decode back and builds its batch again without them. False when there were
// none.
bool drop_drafts(spec_engine & engine, const spec_plan & plan, const group & entries) {
    bool has_dropped = false;
    for (const size_t i : entries) {
        sequence & seq = seq_of(engine, plan.entries[i].seq_id);
        has_dropped = has_dropped || !seq.draft.tokens.empty();
        seq.draft = {};
    }
    if (has_dropped) {
        build_batch(engine, plan, entries);
    }
    return has_dropped;
}

// Back to the checkpoint, then the tokens that stay are decoded again. Only the target: the draft
// was cut already.
void replay(spec_engine & engine, sequence & seq, int32_t seq_id, int32_t n_past,
            const llama_tokens & kept) {
    llama_context * ctx = engine.target.get();
    const size_t n = llama_state_seq_set_data_ext(ctx, seq.checkpoint.data(), seq.checkpoint.size(),
                                                  seq_id, LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY);
    if (n != seq.checkpoint.size() ||
        !llama_memory_seq_rm(engine.target_memory(), seq_id, n_past, -1)) {
        fail(SPEC_ERR_DECODE_FAILED, "the checkpoint could not be restored");
    }
    common_batch batch(ctx);
    ++engine.n_decodes;
    for (size_t i = 0; i < kept.size(); ++i) {
        batch.add(kept[i], n_past + static_cast<int32_t>(i), seq_id, false);
    }
    if (llama_process(ctx, LLAMA_PROCESS_TYPE_DECODE, batch.get()) != 0) {
        fail(SPEC_ERR_DECODE_FAILED, "the accepted tokens could not be decoded again");
    }
}

// Cuts the draft context to what the target holds. EAGLE-3's rows pair a position with the token
// after it, so the row of the last position was written with the rejected token and goes as well.
void cut_draft(spec_engine & engine, int32_t seq_id, int32_t n_past) {
    if (!engine.draft) {
        return;
    }
    const int32_t n_keep = engine.limits.draft_type == SPEC_DRAFT_EAGLE3 ? n_past - 1 : n_past;
    llama_memory_seq_rm(engine.draft_memory(), seq_id, std::max(n_keep, 0), -1);
}

// Cuts the target's cells, within what its last decode brought. False where it cannot go back.
bool cut_target(spec_engine & engine, int32_t seq_id, int32_t n_past) {
    const bool is_any = engine.target_rollback == rollback_kind::any;
    return (!is_any || holds_window(engine.target.get(), seq_id, n_past)) &&
           llama_memory_seq_rm(engine.target_memory(), seq_id, n_past, -1);
}

} // namespace drafthouse
