// The parts of a step, one call at a time.

#include "grammar_budget.hpp"
#include "internal.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

namespace drafthouse {

namespace {

void draft_by_hand(spec_engine & engine, const spec_draft_request * requests, int32_t n,
                   int32_t * tokens, int32_t * counts) {
    check_draft_requests(engine, requests, n);
    if (n > 0) {
        deref(tokens, "tokens");
        deref(counts, "counts");
    }
    draft_orders orders{engine, {}};
    for (int32_t i = 0; i < n; ++i) {
        sequence & seq = begun(engine, requests[i].seq_id);
        seq.draft = {};
        if (can_draft(engine, seq, requests[i].id_last)) {
            orders.give(seq, requests[i].seq_id, requests[i].n_draft, requests[i].id_last);
        }
    }
    run_drafters(engine, orders.armed);
    for (int32_t i = 0; i < n; ++i) {
        sequence & seq = begun(engine, requests[i].seq_id);
        settle_draft(engine, seq, requests[i].seq_id, requests[i].n_draft);
        seq.is_proposed = true;
        seq.n_past_proposed = seq.n_past();
        counts[i] = static_cast<int32_t>(seq.draft.tokens.size());
        std::copy(seq.draft.tokens.begin(), seq.draft.tokens.end(),
                  tokens + int64_t{i} * engine.limits.n_draft_max);
    }
}

// After a decode that failed in its midst nobody knows what the cache holds of its sequences.
void clear_batch(spec_engine & engine, const spec_token * tokens, int32_t n) {
    for (int32_t i = 0; i < n; ++i) {
        clear_sequence(engine, tokens[i].seq_id);
    }
}

void decode_or_clear(spec_engine & engine, const spec_token * tokens, int32_t n) {
    int32_t rc = 0;
    try {
        rc = decode_batch(engine, engine.limits.n_rs_seq);
    } catch (const std::exception & error) {
        clear_batch(engine, tokens, n);
        fail(SPEC_ERR_DECODE_FAILED,
             std::string(error.what()) + "; the batch's sequences were cleared");
    }
    if (rc == 1) {
        fail(SPEC_ERR_NO_ROOM, "no room in the KV cache");
    }
    if (rc != 0) {
        clear_batch(engine, tokens, n);
        fail(SPEC_ERR_DECODE_FAILED, "the decode returned " + std::to_string(rc) +
                                         "; the batch's sequences were cleared" + llama_reason());
    }
}

// A decoded token is the sequence's. Its sampler hears it, unless it has chosen it, or will hear of
// it as it verifies a draft, of which the token before is none.
void take_decoded(sequence & seq, const spec_token & token, bool is_first) {
    if (is_first) {
        seq.n_past_decoded = token.pos;
    }
    seq.tokens.push_back(token.token);
    if (seq.is_proposed && token.pos > seq.n_past_proposed) {
        return;
    }
    if (!seq.has_heard(token.token, token.pos)) {
        seq.feed(token.token);
    }
    seq.n_heard = std::max(seq.n_heard, seq.n_past());
}

void decode_by_hand(spec_engine & engine, const spec_token * tokens, int32_t n) {
    check_range("n_tokens", n, 1, engine.limits.n_batch);
    deref(tokens, "tokens");
    if (engine.is_decoded && !engine.is_processed && engine.spec) {
        fail(SPEC_ERR_BAD_PLAN, "the last batch has not been processed");
    }
    check_tokens(engine, tokens, n);
    engine.is_decoded = false;
    engine.batch.clear();
    for (int32_t i = 0; i < n; ++i) {
        engine.batch.add(tokens[i].token, tokens[i].pos, tokens[i].seq_id,
                         tokens[i].is_output != 0);
    }
    decode_or_clear(engine, tokens, n);
    for (int32_t i = 0; i < n; ++i) {
        take_decoded(begun(engine, tokens[i].seq_id), tokens[i],
                     i == 0 || tokens[i - 1].seq_id != tokens[i].seq_id);
    }
    engine.is_decoded = true;
    engine.is_processed = false;
}

void check_logits_index(const spec_engine & engine, int32_t i) {
    if (!engine.is_decoded) {
        fail(SPEC_ERR_BAD_PLAN, "nothing has been decoded");
    }
    if (i < 0 || i >= engine.batch.size() || !engine.batch.tokens[static_cast<size_t>(i)].output) {
        fail(SPEC_ERR_INVALID_ARGUMENT,
             "batch index " + std::to_string(i) + " is no output of the last decode");
    }
}

// As in a step, a sequence for which no token can be chosen is cleared: its sampler may have been
// fed in part.
llama_token sample_by_hand(spec_engine & engine, int32_t seq_id, int32_t i) {
    sequence & seq = begun(engine, seq_id);
    try {
        const float * logits = llama_get_logits_ith(engine.target.get(), i);
        llama_token token = LLAMA_TOKEN_NULL;
        int64_t n_mask_work = 0;
        within_budget(*seq.sampler, n_mask_work, [&] {
            token = sample_checked(*seq.sampler, logits, engine.limits.n_vocab);
            seq.sampler->accept(token, true);
        });
        seq.heard.push_back(-1 - token);
        seq.id_last = token;
        const int32_t pos = engine.batch.tokens[static_cast<size_t>(i)].pos[0];
        seq.n_heard = std::max(seq.n_heard, std::min(pos + 1, seq.n_past()) + 1);
        return token;
    } catch (const std::exception & error) {
        const std::string reason = error.what();
        const auto * known = dynamic_cast<const failure *>(&error);
        const bool is_told = known != nullptr && is_of_request(known->code);
        clear_sequence(engine, seq_id);
        fail(is_told ? known->code : SPEC_ERR_SAMPLING_FAILED,
             reason + "; the sequence was cleared");
    }
}

// Tells the drafter how much of a proposal stays. MTP and EAGLE-3 go on from the hidden row of the
// last token that does, and hold those of its last decode alone: where that began behind it they
// start without. Returns whether they have the row.
bool tell_accepted(spec_engine & engine, sequence & seq, int32_t seq_id, int32_t n_accepted) {
    const int32_t type = engine.limits.draft_type;
    const bool has_rows = type == SPEC_DRAFT_MTP || type == SPEC_DRAFT_EAGLE3;
    const int32_t n_before = has_rows ? seq.n_past_decoded - seq.n_past_proposed : 0;
    if (n_accepted < n_before || (has_rows && seq.draft.tokens.empty() &&
                                  seq.n_past() > seq.n_past_proposed + 1 + n_accepted)) {
        begin_drafter_again(engine, seq_id);
        return false;
    }
    if (!seq.draft.tokens.empty()) {
        accept_draft(engine, seq, seq_id, n_accepted - n_before);
    }
    return true;
}

void accept_by_hand(spec_engine & engine, int32_t seq_id, int32_t n_accepted) {
    sequence & seq = begun(engine, seq_id);
    if (!seq.is_proposed) {
        bad_plan(seq_id, "no proposal is pending");
    }
    if (engine.spec && !engine.is_processed) {
        bad_plan(seq_id, "the last batch has not been processed");
    }
    const int32_t n_draft = static_cast<int32_t>(seq.draft.tokens.size());
    const int32_t n_decoded = seq.n_past() - seq.n_past_proposed;
    if (n_accepted < 0 || n_accepted > n_draft || n_accepted > n_decoded - 1) {
        bad_plan(seq_id, "n_accepted is " + std::to_string(n_accepted) + "; " +
                             std::to_string(n_draft) + " were drafted and " +
                             std::to_string(std::max(n_decoded - 1, 0)) + " of them decoded");
    }
    const int32_t n_new = seq.n_past_proposed + 1 + n_accepted;
    const int32_t n_back = seq.n_past() - n_new;
    if (engine.target_rollback != rollback_kind::any && n_back > seq.n_back_max) {
        fail(SPEC_ERR_UNSUPPORTED,
             "a recurrent target can take back " + std::to_string(seq.n_back_max) +
                 " tokens of this draft, not " + std::to_string(n_back) +
                 ": as many as its last decode holds; verify a draft in one, or accept more");
    }
    const bool has_row = tell_accepted(engine, seq, seq_id, n_accepted);
    seq.is_proposed = false;
    seq.draft = {};
    seq.n_heard = std::min(seq.n_heard, n_new + 1);
    seq.known.clear();
    if (n_back == 0) {
        return;
    }
    seq.n_back_max = 0; // once per decode
    if (has_row) {
        cut_draft(engine, seq_id, n_new);
    } else if (engine.draft) { // all that it has: positions must follow one another
        llama_memory_seq_rm(engine.draft_memory(), seq_id, n_new, -1);
    }
    if (!cut_target(engine, seq_id, n_new)) {
        clear_sequence(engine, seq_id);
        fail(SPEC_ERR_DECODE_FAILED,
             "the rejected draft could not be taken back; the sequence was cleared");
    }
    seq.tokens.resize(static_cast<size_t>(n_new));
}

void check_way_back(const spec_engine & engine, const sequence & seq, int32_t seq_id,
                    int32_t n_past) {
    const int32_t n_back = seq.n_past() - n_past;
    const int32_t n_back_max = seq.i_decode == engine.n_decodes ? seq.n_back_max : 0;
    if (n_past > 0 && engine.target_rollback != rollback_kind::any && n_back > n_back_max) {
        fail(SPEC_ERR_UNSUPPORTED, "a recurrent target can go back " + std::to_string(n_back_max) +
                                       " tokens here, not " + std::to_string(n_back) +
                                       ": as many as its last decode holds, if no other followed");
    }
    if (engine.target_rollback == rollback_kind::any &&
        !holds_window(engine.target.get(), seq_id, n_past)) {
        no_window(n_past);
    }
}

void take_cells_back(spec_engine & engine, int32_t seq_id, int32_t n_past) {
    cut_draft(engine, seq_id, n_past);
    restart_unless_held(engine, seq_id, n_past);
}

// Drops what `process` wrote for sequences that have ended, and of tokens that were taken back.
void drop_processed(spec_engine & engine) {
    const auto & tokens = engine.batch.tokens;
    for (size_t i = 0; i < tokens.size(); ++i) {
        const llama_seq_id seq_id = tokens[i].seq_id;
        if (i + 1 < tokens.size() && tokens[i + 1].seq_id == seq_id) {
            continue;
        }
        const sequence & seq = at(engine, seq_id);
        if (!seq.is_begun) {
            clear_memory(engine, seq_id);
        } else if (engine.spec && tokens[i].pos[0] >= seq.n_past()) {
            take_cells_back(engine, seq_id, seq.n_past());
        }
    }
}

// A block drafter follows `process`, which brings it all of a batch that waits, whatever has been
// taken back of it meanwhile: it goes back then.
void take_drafter_back(spec_engine & engine, sequence & seq, int32_t seq_id, int32_t n_past) {
    const bool is_block = drafts_blocks(engine.limits.draft_type);
    if (engine.spec && !is_block) {
        make_cold(engine, seq_id); // the draft's hidden rows do not go back with the cache
    }
    if (engine.spec && !(is_block && is_unprocessed(engine, seq_id))) {
        take_cells_back(engine, seq_id, n_past);
    }
    if (engine.is_ngram()) {
        begin_drafter(engine, seq, seq_id); // what it has learnt includes the tokens taken back
    }
}

void rollback_by_hand(spec_engine & engine, int32_t seq_id, int32_t n_past) {
    sequence & seq = begun(engine, seq_id);
    if (n_past < 0 || n_past > seq.n_past()) {
        bad_plan(seq_id, "n_past is " + std::to_string(n_past) + "; expected [0, " +
                             std::to_string(seq.n_past()) + "]");
    }
    if (n_past == seq.n_past()) {
        seq.is_proposed = false;
        seq.draft = {};
        return;
    }
    check_way_back(engine, seq, seq_id, n_past);
    if (!llama_memory_seq_rm(engine.target_memory(), seq_id, n_past > 0 ? n_past : -1, -1)) {
        fail(SPEC_ERR_UNSUPPORTED, "the target cannot go back from here; decode first");
    }
    seq.n_back_max = 0; // once per decode
    seq.is_proposed = false;
    seq.has_emitted = false;
    seq.draft = {};
    take_drafter_back(engine, seq, seq_id, n_past);
    seq.tokens.resize(static_cast<size_t>(n_past));
    seq.hidden = {};
    seq.n_heard = std::min(seq.n_heard, n_past);
    seq.known.clear();
}

} // namespace

} // namespace drafthouse

using namespace drafthouse;

extern "C" {

int32_t spec_engine_seq_draft(spec_engine * engine, const spec_draft_request * requests,
                              int32_t n_requests, int32_t * tokens, int32_t * counts) {
    return guarded(
        [&] { draft_by_hand(deref(engine, "engine"), requests, n_requests, tokens, counts); });
}

int32_t spec_engine_decode(spec_engine * engine, const spec_token * tokens, int32_t n_tokens) {
    return guarded([&] { decode_by_hand(deref(engine, "engine"), tokens, n_tokens); });
}

int32_t spec_engine_process(spec_engine * engine) {
    return guarded([&] {
        spec_engine & e = deref(engine, "engine");
        if (!e.is_decoded || e.is_processed) {
            fail(SPEC_ERR_BAD_PLAN, "there is no decoded batch that has not been processed");
        }
        process_batch(e);
        e.is_processed = true;
        drop_processed(e);
    });
}

int32_t spec_engine_logits(spec_engine * engine, int32_t i, const float ** out) {
    return guarded([&] {
        check_logits_index(deref(engine, "engine"), i);
        deref(out, "out") = llama_get_logits_ith(engine->target.get(), i);
        if (*out == nullptr) {
            fail(SPEC_ERR_INTERNAL, "the decode left no logits");
        }
    });
}

int32_t spec_engine_seq_sample(spec_engine * engine, int32_t seq_id, int32_t i, int32_t * token) {
    return guarded([&] {
        begun(deref(engine, "engine"), seq_id);
        check_logits_index(*engine, i);
        if (engine->batch.tokens[static_cast<size_t>(i)].seq_id != seq_id) {
            fail(SPEC_ERR_INVALID_ARGUMENT,
                 "batch index " + std::to_string(i) + " belongs to another sequence");
        }
        deref(token, "token") = sample_by_hand(*engine, seq_id, i);
    });
}

int32_t spec_engine_seq_accept(spec_engine * engine, int32_t seq_id, int32_t n_accepted) {
    return guarded([&] { accept_by_hand(deref(engine, "engine"), seq_id, n_accepted); });
}

int32_t spec_engine_seq_rollback(spec_engine * engine, int32_t seq_id, int32_t n_past) {
    return guarded([&] { rollback_by_hand(deref(engine, "engine"), seq_id, n_past); });
}

} // extern "C"
