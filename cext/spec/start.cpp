// Forks, starts and swaps out: sequences that begin with tokens that are there already.

#include "internal.hpp"

#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace drafthouse {

namespace {

int32_t prompt_length(const sequence & seq) {
    return seq.has_emitted ? seq.n_prompt : seq.n_past();
}

void check_fork_source(spec_engine & engine, int32_t src, int32_t n_past) {
    const sequence & seq = begun(engine, src);
    if (engine.target_rollback != rollback_kind::any) {
        fail(SPEC_ERR_UNSUPPORTED,
             "the state of a recurrent target cannot be shared; prefill each sequence");
    }
    if (seq.is_proposed) {
        bad_plan(src, "a proposal is pending; accept it first");
    }
    if (engine.is_decoded && !engine.is_processed && engine.spec) {
        fail(SPEC_ERR_BAD_PLAN, "the last batch has not been processed");
    }
    const int32_t n_max = std::min(prompt_length(seq), seq.n_past() - 1);
    if (n_past < 1 || n_past > n_max) {
        bad_plan(src, "n_past is " + std::to_string(n_past) +
                          "; a fork takes tokens of the prompt, all but the last that the source "
                          "holds: [1, " +
                          std::to_string(n_max) + "]");
    }
    if (!holds_window(engine.target.get(), src, n_past)) {
        no_window(n_past);
    }
}

void check_fork(spec_engine & engine, int32_t src, int32_t n_past, const int32_t * dst,
                spec_sampler * const * samplers, int32_t n) {
    check_fork_source(engine, src, n_past);
    check_range("n", n, 0, engine.limits.n_seq_max);
    for (int32_t i = 0; i < n; ++i) {
        const int32_t id = (&deref(dst, "dst"))[i];
        if (at(engine, id).is_begun || std::find(dst, dst + i, id) != dst + i) {
            fail(SPEC_ERR_SEQ_BUSY, "sequence " + std::to_string(id) + " has begun already");
        }
        const spec_sampler & sampler = deref((&deref(samplers, "samplers"))[i], "sampler");
        if (std::find(samplers, samplers + i, &sampler) != samplers + i) {
            fail(SPEC_ERR_INVALID_ARGUMENT, "a sampler is given twice");
        }
        check_new_sampler(engine, id, sampler);
    }
}

// Gives a fork the hidden row that its first token pairs with, where it is known.
void carry_hidden_row(spec_engine & engine, const sequence & from, int32_t dst, int32_t n_past) {
    const std::vector<float> & row = from.hidden.at(n_past);
    std::string state;
    if (row.empty() || !common_speculative_seq_save(engine.spec.get(), dst, state)) {
        return;
    }
    const size_t n_bytes = row.size() * sizeof(float);
    if (state.size() < n_bytes) {
        fail(SPEC_ERR_INTERNAL, "the drafter's state is shorter than a hidden row");
    }
    std::memcpy(state.data(), row.data(), n_bytes); // the state begins with it (patch 0003)
    if (!common_speculative_seq_load(engine.spec.get(), dst, state)) {
        fail(SPEC_ERR_INTERNAL, "the drafter refused a hidden row");
    }
}

// The whole sequence is ordered and then cut.
void fork_one(spec_engine & engine, int32_t src, int32_t n_past, int32_t dst,
              std::unique_ptr<spec_sampler> sampler) {
    begin_sequence(engine, dst, std::move(sampler));
    const sequence & from = seq_of(engine, src);
    sequence & to = seq_of(engine, dst);
    to.tokens.assign(from.tokens.begin(), from.tokens.begin() + n_past);
    to.tag = from.tag;
    to.is_cold = from.is_cold;
    to.is_warming_up = from.is_warming_up;
    for (const llama_token token : to.tokens) {
        to.feed(token);
    }
    to.n_heard = n_past;
    order_copy(engine, src, dst);
    if (engine.draft && !from.is_cold) {
        llama_memory_seq_rm(engine.draft_memory(), dst, n_past, -1);
    }
    carry_hidden_row(engine, from, dst, n_past);
    if (!llama_memory_seq_rm(engine.target_memory(), dst, n_past, -1)) {
        fail(SPEC_ERR_INTERNAL, "the copy could not be cut");
    }
    make_copy(engine);
    restart_unless_held(engine, dst, n_past);
}

void fork_sequences(spec_engine & engine, int32_t src, int32_t n_past, const int32_t * dst,
                    spec_sampler ** samplers, int32_t n) {
    if (n_past == -1) {
        const sequence & seq = begun(engine, src);
        n_past = std::min(prompt_length(seq), seq.n_past() - 1);
    }
    check_fork(engine, src, n_past, dst, samplers, n);
    try {
        for (int32_t i = 0; i < n; ++i) {
            std::unique_ptr<spec_sampler> owned(samplers[i]);
            samplers[i] = nullptr;
            fork_one(engine, src, n_past, dst[i], std::move(owned));
        }
    } catch (...) {
        std::for_each(dst, dst + n, [&](int32_t id) { clear_sequence(engine, id); });
        throw;
    }
}

std::string drafter_state(spec_engine & engine, int32_t seq_id) {
    std::string state;
    if (engine.spec && !common_speculative_seq_save(engine.spec.get(), seq_id, state)) {
        state.clear();
    }
    return state;
}

// The rows that the drafter pairs with the next token of a sequence; empty where there are none.
std::string drafter_rows(spec_engine & engine, int32_t seq_id) {
    const std::string state = drafter_state(engine, seq_id);
    return state.substr(0, std::min(state.size(), drafter_row_bytes(engine)));
}

std::string drafter_rng(spec_engine & engine, int32_t seq_id) {
    const std::string state = drafter_state(engine, seq_id);
    return state.substr(std::min(state.size(), drafter_row_bytes(engine)));
}

// Gives a slot with tokens, or without any, its sampler. A new one is fed the tokens; a resumed one
// goes on where it was.
void adopt_sampler(spec_engine & engine, int32_t seq_id, std::unique_ptr<spec_sampler> sampler) {
    sequence & seq = at(engine, seq_id);
    sampler_history history = std::move(sampler->history);
    sampler->history = {};
    seq.sampler = std::move(sampler);
    seq.heard = std::move(history.heard);
    seq.known = std::move(history.known);
    seq.n_heard = static_cast<int32_t>(seq.known.size());
    seq.has_emitted = history.has_emitted;
    seq.n_prompt = history.n_prompt;
    if (history.has_emitted) {
        seq.id_last = seq.known.back();
    }
    for (int32_t i = seq.n_heard; i < seq.n_past(); ++i) {
        seq.feed(seq.tokens[static_cast<size_t>(i)]);
    }
    seq.n_heard = std::max(seq.n_heard, seq.n_past());
    if (!history.drafter_rng.empty() && engine.spec) {
        const std::string state = drafter_rows(engine, seq_id) + history.drafter_rng;
        seq.has_drafter_begun = history.has_drafter_begun &&
                                common_speculative_seq_load(engine.spec.get(), seq_id, state);
    }
    seq.is_begun = true;
}

// Takes the sampler out of a slot with all that it knows of the sequence. The slot lacks it then.
std::unique_ptr<spec_sampler> preempt_sampler(spec_engine & engine, int32_t seq_id) {
    sequence & seq = begun(engine, seq_id);
    sampler_history history;
    history.known = known_tokens(seq);
    history.tag = seq.tag;
    history.heard = seq.heard;
    history.has_emitted = seq.has_emitted;
    history.has_drafter_begun = seq.has_drafter_begun;
    history.n_prompt = seq.n_prompt;
    history.drafter_rng = drafter_rng(engine, seq_id);
    seq.sampler->history = std::move(history);
    return std::move(seq.sampler);
}

// A sequence with the first tokens of another, or of itself, and no sampler yet. `rows` belong to
// the last of them and go on with it; without them the drafter's first row is poorer.
void begin_kept(spec_engine & engine, int32_t seq_id, const sequence & from, int32_t n_kept,
                const std::string & rows) {
    llama_tokens tokens(from.tokens.begin(), from.tokens.begin() + n_kept);
    const bool is_cold = from.is_cold;
    const bool is_warming_up = from.is_warming_up;
    sequence & seq = at(engine, seq_id);
    seq = sequence{};
    begin_drafter(engine, seq, seq_id);
    if (!rows.empty() && !common_speculative_seq_load(engine.spec.get(), seq_id, rows)) {
        fail(SPEC_ERR_INTERNAL, "the drafter's state has another size");
    }
    seq.tokens = std::move(tokens);
    seq.is_cold = is_cold;
    seq.is_warming_up = is_warming_up;
}

// EAGLE-3's row of the last kept token was written with the token that followed it there. It stays:
// a poorer row is better than none, after which llama.cpp refuses the positions that follow.
void cut_cells(spec_engine & engine, int32_t seq_id, int32_t n_kept) {
    if (!llama_memory_seq_rm(engine.target_memory(), seq_id, n_kept, -1)) {
        fail(SPEC_ERR_UNSUPPORTED, "the target cannot go back from here");
    }
    if (engine.draft) {
        llama_memory_seq_rm(engine.draft_memory(), seq_id, n_kept, -1);
    }
}

// Whether the first tokens of a slot can be kept without the others. The snapshots of a recurrent
// state last until the next decode only.
bool can_keep_part(const spec_engine & engine, int32_t seq_id, int32_t n_kept) {
    return engine.target_rollback == rollback_kind::any &&
           holds_window(engine.target.get(), seq_id, n_kept);
}

// Goes on from the first tokens that the slot holds. False where the target cannot go back.
bool keep_in_place(spec_engine & engine, int32_t seq_id, int32_t n_kept) {
    const sequence & seq = seq_of(engine, seq_id);
    const bool is_whole = n_kept == seq.n_past();
    if (!is_whole && !can_keep_part(engine, seq_id, n_kept)) {
        return false;
    }
    const std::string rows =
        is_whole && !seq.is_cold ? drafter_rows(engine, seq_id) : std::string();
    if (!is_whole) {
        cut_cells(engine, seq_id, n_kept);
    }
    begin_kept(engine, seq_id, seq, n_kept, rows);
    if (!is_whole) {
        restart_unless_held(engine, seq_id, n_kept);
    }
    return true;
}

// The whole sequence is ordered and then cut.
bool keep_copy(spec_engine & engine, int32_t seq_id, int32_t source, int32_t n_kept) {
    if (engine.target_rollback != rollback_kind::any) {
        return false; // the state of a recurrent target cannot be shared
    }
    const sequence & from = seq_of(engine, source);
    const bool is_whole = n_kept == from.n_past();
    if (!is_whole && !can_keep_part(engine, source, n_kept)) {
        return false;
    }
    const std::string rows =
        is_whole && !from.is_cold ? drafter_rows(engine, source) : std::string();
    clear_sequence(engine, seq_id);
    order_copy(engine, source, seq_id);
    if (!is_whole) {
        cut_cells(engine, seq_id, n_kept);
    }
    make_copy(engine);
    begin_kept(engine, seq_id, from, n_kept, rows);
    if (!is_whole) {
        restart_unless_held(engine, seq_id, n_kept);
    }
    return true;
}

// Goes on from a snapshot: as it was saved, where its own sampler goes on with all of it.
bool keep_snapshot(spec_engine & engine, const spec_start & start, snapshot_parts & parts) {
    clear_sequence(engine, start.seq_id);
    if (start.n_kept > parts.seq.n_past()) {
        return false;
    }
    load_parts(engine, start.seq_id, parts);
    sequence & seq = at(engine, start.seq_id);
    if (start.is_resumed && start.n_kept == seq.n_past()) {
        return true; // with what its drafter has learnt
    }
    std::unique_ptr<spec_sampler> own;
    if (start.sampler == nullptr) {
        own = preempt_sampler(engine, start.seq_id);
    }
    if (!keep_in_place(engine, start.seq_id, start.n_kept)) {
        return false;
    }
    if (own) {
        adopt_sampler(engine, start.seq_id, std::move(own));
    }
    return true;
}

bool keep_tokens(spec_engine & engine, const spec_start & start, snapshot_parts * parts) {
    if (start.n_kept == 0) {
        return false;
    }
    if (start.snapshot != nullptr) {
        return parts != nullptr && keep_snapshot(engine, start, *parts);
    }
    const int32_t from = start.source >= 0 ? start.source : start.seq_id;
    if (start.n_kept > seq_of(engine, from).n_past()) {
        return false; // a start before this one has kept less there than it should
    }
    return start.source >= 0 ? keep_copy(engine, start.seq_id, start.source, start.n_kept)
                             : keep_in_place(engine, start.seq_id, start.n_kept);
}

} // namespace

// Bytes of the hidden rows in a drafter's saved state; the draft sampler's random state follows.
size_t drafter_row_bytes(const spec_engine & engine) {
    switch (engine.limits.draft_type) {
    case SPEC_DRAFT_MTP:
        return static_cast<size_t>(llama_model_n_embd_out(llama_get_model(engine.draft.get()))) *
               sizeof(float);
    case SPEC_DRAFT_SIMPLE:
        return 0;
    default:
        return std::numeric_limits<size_t>::max(); // nothing but rows
    }
}

// Begins the drafter of a sequence that goes on, but for its random numbers: from its seed again it
// would draw the same ones, and drafts that are no new draws shift what is accepted of them.
void begin_drafter_again(spec_engine & engine, int32_t seq_id) {
    const std::string rng = drafter_rng(engine, seq_id);
    common_speculative_begin(engine.spec.get(), seq_id, {});
    if (!rng.empty() && !common_speculative_seq_load(engine.spec.get(), seq_id,
                                                     drafter_rows(engine, seq_id) + rng)) {
        fail(SPEC_ERR_INTERNAL, "the drafter's state has another size");
    }
}

// The tokens that a sequence's sampler was fed or chose, from the first on.
llama_tokens known_tokens(const sequence & seq) {
    llama_tokens known =
        static_cast<int32_t>(seq.known.size()) > seq.n_past() ? seq.known : seq.tokens;
    if (known.size() > seq.tokens.size()) {
        return known;
    }
    if (seq.has_emitted) {
        known.push_back(seq.id_last);
    } else if (seq.n_heard > seq.n_past() && !seq.heard.empty() && seq.heard.back() < 0) {
        known.push_back(-1 - seq.heard.back()); // chosen by hand
    }
    return known;
}

std::unique_ptr<spec_sampler> swap_out(spec_engine & engine, int32_t seq_id) {
    std::unique_ptr<spec_sampler> sampler = preempt_sampler(engine, seq_id);
    clear_sequence(engine, seq_id);
    return sampler;
}

// Returns the tokens that are kept. Whatever goes wrong with them, the sequence begins: without.
// Where its sampler cannot begin, or is the one of a snapshot that cannot be kept, it is idle.
int32_t start_sequence(spec_engine & engine, const spec_start & start, snapshot_parts * parts) {
    std::unique_ptr<spec_sampler> owned(start.sampler);
    bool is_kept = false;
    if (guarded([&] { is_kept = keep_tokens(engine, start, parts); }) != SPEC_OK) {
        is_kept = false;
    }
    const int32_t rc = guarded([&] {
        if (!is_kept) {
            clear_sequence(engine, start.seq_id);
        }
        if (owned) {
            if (!is_kept) {
                begin_drafter(engine, at(engine, start.seq_id), start.seq_id);
            }
            adopt_sampler(engine, start.seq_id, std::move(owned));
        }
    });
    if (rc != SPEC_OK) {
        clear_sequence(engine, start.seq_id);
        return 0;
    }
    seq_of(engine, start.seq_id).tag = start.tag;
    return is_kept ? start.n_kept : 0;
}

} // namespace drafthouse

using namespace drafthouse;

extern "C" {

int32_t spec_engine_fork(spec_engine * engine, int32_t src, int32_t n_past, const int32_t * dst,
                         spec_sampler ** samplers, int32_t n) {
    return guarded([&] { fork_sequences(deref(engine, "engine"), src, n_past, dst, samplers, n); });
}

} // extern "C"
