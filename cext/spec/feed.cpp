// What follows the target's decode on the drafter's side: for whom it is fed, and who is cold.

#include "internal.hpp"

#include <algorithm>
#include <utility>
#include <vector>

namespace drafthouse {

namespace {

// Decodes in a row without a drafter to feed, after which the target gives no rows. Each change
// costs one more graph.
constexpr int32_t N_UNFED = 8;

// Tokens that a draft model reads again when it is turned on again. The other drafters read the
// target's hidden rows, which are gone: they start from nothing, and are as good as before some
// tokens later.
constexpr int32_t N_CATCH_UP = 256;

// Has the draft model read the end of what comes before a position.
void catch_up(spec_engine & engine, int32_t seq_id, int32_t n_past) {
    const sequence & seq = seq_of(engine, seq_id);
    llama_context * ctx = engine.draft.get();
    common_batch batch(ctx);
    const int32_t n_most = std::min(N_CATCH_UP, static_cast<int32_t>(llama_n_batch(ctx)));
    const int32_t n_vocab = draft_vocabulary(engine);
    for (int32_t pos = std::max(0, n_past - n_most); pos < n_past; ++pos) {
        const llama_token token = seq.tokens[static_cast<size_t>(pos)];
        if (token < n_vocab) {
            batch.add(token, pos, seq_id, false);
        } else {
            batch.clear(); // it cannot be read, and positions have no gaps
        }
    }
    if (batch.size() > 0 && llama_process(ctx, LLAMA_PROCESS_TYPE_DECODE, batch.get()) != 0) {
        llama_memory_seq_rm(engine.draft_memory(), seq_id, -1, -1);
    }
}

// Where the draft model lacks a token, its sequence goes on without drafts: llama.cpp ends the
// process when it is given one.
void leave_unreadable(spec_engine & engine) {
    const int32_t n_vocab = draft_vocabulary(engine);
    for (const auto & token : engine.batch.tokens) {
        if (token.id >= n_vocab) {
            make_cold(engine, token.seq_id);
        }
    }
}

// Tells the drafter which sequences it is fed for, and prepares those that are enabled again. False
// if there are none. A sequence that was enabled by hand after a decode without rows waits for the
// next decode.
bool choose_fed(spec_engine & engine) {
    if (!engine.has_rows) {
        return false;
    }
    bool is_wanted = false;
    int32_t before = -1;
    for (const auto & token : engine.batch.tokens) {
        if (token.seq_id == before) {
            continue;
        }
        before = token.seq_id;
        const sequence & seq = seq_of(engine, token.seq_id);
        common_speculative_set_fed(engine.spec.get(), token.seq_id, seq.is_fed());
        is_wanted = is_wanted || seq.is_fed();
        if (seq.is_warming_up) {
            begin_drafter_again(engine, token.seq_id);
            if (engine.limits.draft_type == SPEC_DRAFT_SIMPLE) {
                catch_up(engine, token.seq_id, token.pos[0]);
            }
        }
    }
    return is_wanted;
}

// Keeps the hidden rows of the last two tokens of each prompt in the batch, while the target still
// holds them: a fork goes on from one of them.
void keep_hidden_rows(spec_engine & engine) {
    if (engine.limits.draft_type != SPEC_DRAFT_MTP ||
        engine.target_rollback != rollback_kind::any) {
        return;
    }
    const auto n_embd =
        static_cast<size_t>(llama_model_n_embd_out(llama_get_model(engine.target.get())));
    const auto & tokens = engine.batch.tokens;
    for (size_t i = 0; i < tokens.size(); ++i) {
        const bool is_end = i + 1 == tokens.size() || tokens[i + 1].seq_id != tokens[i].seq_id;
        const bool is_next_end =
            !is_end && (i + 2 == tokens.size() || tokens[i + 2].seq_id != tokens[i].seq_id);
        sequence & seq = seq_of(engine, tokens[i].seq_id);
        const bool is_first = i == 0 || tokens[i - 1].seq_id != tokens[i].seq_id;
        if (seq.has_emitted || seq.is_proposed || !(is_end || is_next_end)) {
            continue;
        }
        hidden_rows & rows = seq.hidden;
        if (is_end && is_first) { // the only token of this batch
            rows.before =
                rows.n_past == tokens[i].pos[0] ? std::move(rows.last) : std::vector<float>{};
        }
        const float * row = last_layer_row(engine.target.get(), static_cast<int32_t>(i));
        std::vector<float> & kept = is_end ? rows.last : rows.before;
        kept.clear();
        if (row != nullptr) {
            kept.assign(row, row + n_embd);
        }
        rows.n_past = tokens[i].pos[0] + 1;
    }
}

} // namespace

// Chooses whether the coming decode gives rows. They cost little where every token is an output; of
// a prompt they make the last layer compute all tokens, not the last one alone.
void choose_rows(spec_engine & engine) {
    if (!engine.spec || !engine.asked.has_last) {
        return;
    }
    const auto & tokens = engine.batch.tokens;
    const bool is_wanted = std::any_of(tokens.begin(), tokens.end(), [&](const auto & token) {
        return seq_of(engine, token.seq_id).is_fed();
    });
    engine.n_unfed = is_wanted ? 0 : std::min(engine.n_unfed + 1, N_UNFED);
    const bool is_on = engine.n_unfed < N_UNFED;
    if (is_on != engine.has_rows) {
        give_rows(engine, is_on);
    }
}

// Whether the draft's cells are in a context of its own: some MTP heads draft inside the target's
// cache. (An EAGLE-3 context names the target too, for its token embeddings only.)
bool has_draft_cells(const spec_engine & engine) {
    return engine.draft && (engine.limits.draft_type != SPEC_DRAFT_MTP ||
                            other_context(engine.draft.get()) != engine.target.get());
}

// From here on the sequence generates without drafts: its draft state no longer follows the target.
// EAGLE-3's last row goes too: its position may lie beyond what stays.
void make_cold(spec_engine & engine, int32_t seq_id) {
    seq_of(engine, seq_id).is_cold = true;
    seq_of(engine, seq_id).is_warming_up = false;
    if (engine.limits.draft_type == SPEC_DRAFT_EAGLE3) {
        common_speculative_begin(engine.spec.get(), seq_id, {});
    }
    if (has_draft_cells(engine)) {
        llama_memory_seq_rm(engine.draft_memory(), seq_id, -1, -1);
    }
}

// Where the drafter's own layers lack the window before n_past, it starts from nothing, as one that
// is turned on again. (In a shared pool drafts lose cells at the far end of their window to one
// another, at most a draft's length of them. That costs a little acceptance, and is let be.)
void restart_unless_held(spec_engine & engine, int32_t seq_id, int32_t n_past) {
    sequence & seq = seq_of(engine, seq_id);
    if (!seq.is_cold && has_draft_cells(engine) &&
        !holds_window(engine.draft.get(), seq_id, n_past)) {
        make_cold(engine, seq_id);
        seq.is_warming_up = true;
    }
}

// Feeds a cold sequence's drafter again, from its next tokens on; those of a batch that waits for
// `process` are none of them, and may have been taken back. An n-gram drafter reads the sequence's
// tokens: it has missed nothing.
void drafts_on(spec_engine & engine, int32_t seq_id) {
    sequence & seq = begun(engine, seq_id);
    if (is_unprocessed(engine, seq_id)) {
        bad_plan(seq_id, "its last batch has not been processed");
    }
    if (seq.ngram) {
        seq.is_cold = false;
    }
    seq.is_warming_up = seq.is_cold && engine.spec;
}

void process_batch(spec_engine & engine) {
    if (!engine.spec) {
        return;
    }
    leave_unreadable(engine);
    if (!choose_fed(engine)) {
        return;
    }
    if (engine.draft) {
        set_threads(engine, engine.draft.get());
    }
    bool is_processed = false;
    const bool is_failed = engine.take_fault(SPEC_FAULT_PROCESS);
    if (!is_failed) { // what it throws costs drafts, no sequence
        guarded(
            [&] { is_processed = common_speculative_process(engine.spec.get(), engine.batch); });
    }
    if (is_processed) {
        keep_hidden_rows(engine);
        for (const auto & token : engine.batch.tokens) {
            sequence & seq = seq_of(engine, token.seq_id);
            seq.is_cold = seq.is_cold && !seq.is_warming_up;
            seq.is_warming_up = false;
        }
        return;
    }
    for (const auto & token : engine.batch.tokens) {
        make_cold(engine, token.seq_id);
    }
}

} // namespace drafthouse

using namespace drafthouse;

extern "C" {

int32_t spec_engine_seq_is_cold(const spec_engine * engine, int32_t seq_id, bool * out) {
    return guarded([&] {
        const sequence & seq = begun(deref(engine, "engine"), seq_id);
        deref(out, "out") = seq.is_cold;
    });
}

int32_t spec_engine_seq_drafts_off(spec_engine * engine, int32_t seq_id) {
    return guarded([&] {
        begun(deref(engine, "engine"), seq_id);
        make_cold(*engine, seq_id);
    });
}

int32_t spec_engine_seq_drafts_on(spec_engine * engine, int32_t seq_id) {
    return guarded([&] { drafts_on(deref(engine, "engine"), seq_id); });
}

} // extern "C"
