// What a plan does before its entries: sequences saved, preempted, freed and started, and whose
// drafter is fed. All of it is checked first, each move against what those before will have made of
// the sequences; then it is made, and what goes wrong concerns one sequence.

#include "internal.hpp"

#include <algorithm>
#include <iterator>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace drafthouse {

namespace {

planned_sequence as_it_is(const sequence & seq) {
    planned_sequence planned;
    planned.is_begun = seq.is_begun;
    planned.is_proposed = seq.is_proposed;
    planned.has_emitted = seq.has_emitted;
    planned.id_last = seq.id_last;
    planned.n_past = seq.n_past();
    planned.n_known = seq.n_known();
    planned.known = &seq.known;
    planned.tag = seq.tag;
    return planned;
}

planned_sequence & planned_at(const spec_engine & engine, std::vector<planned_sequence> & sequences,
                              int32_t seq_id) {
    check_seq_id(seq_id, engine.limits.n_seq_max);
    return sequences[static_cast<size_t>(seq_id)];
}

void check_list(const spec_engine & engine, const char * name, const void * items, int32_t n) {
    if (n < 0 || n > engine.limits.n_seq_max) {
        fail(SPEC_ERR_BAD_PLAN, "the plan has " + std::to_string(n) + " " + name +
                                    "; expected [0, " + std::to_string(engine.limits.n_seq_max) +
                                    "]");
    }
    if (n > 0 && items == nullptr) {
        fail(SPEC_ERR_INVALID_ARGUMENT, std::string("plan.") + name + " is NULL");
    }
}

void check_lists(const spec_engine & engine, const spec_plan & plan) {
    check_list(engine, "saves", plan.saves, plan.n_saves);
    check_list(engine, "swap_outs", plan.swap_outs, plan.n_swap_outs);
    check_list(engine, "frees", plan.frees, plan.n_frees);
    check_list(engine, "starts", plan.starts, plan.n_starts);
    check_list(engine, "drafts_off", plan.drafts_off, plan.n_drafts_off);
    check_list(engine, "drafts_on", plan.drafts_on, plan.n_drafts_on);
    if (plan.n_saves > 0 && plan.room == nullptr) {
        fail(SPEC_ERR_INVALID_ARGUMENT, "plan.room is NULL");
    }
}

// Where the tokens to be kept are, unless they are a snapshot's.
void check_kept(const spec_engine & engine, const spec_start & start,
                std::vector<planned_sequence> & sequences) {
    const bool is_copy = start.source != -1;
    const bool is_loaded = start.snapshot != nullptr;
    if (start.n_kept < 0 || start.n_kept >= engine.limits.n_ctx_seq) {
        bad_plan(start.seq_id, "n_kept is " + std::to_string(start.n_kept) + "; expected [0, " +
                                   std::to_string(engine.limits.n_ctx_seq) + ")");
    }
    if ((is_copy && is_loaded) || (start.n_kept == 0 && (is_copy || is_loaded))) {
        bad_plan(start.seq_id, "a source or a snapshot, one of them, is for tokens to be kept");
    }
    if (start.source == start.seq_id) {
        bad_plan(start.seq_id, "it cannot be its own source");
    }
    if (start.n_kept == 0 || is_loaded) {
        return;
    }
    const planned_sequence & from = is_copy ? planned_begun(engine, sequences, start.source)
                                            : planned_at(engine, sequences, start.seq_id);
    if (from.is_proposed) {
        bad_plan(start.seq_id, "a proposal is pending where its tokens are; accept it first");
    }
    if (start.n_kept > from.n_past) {
        bad_plan(start.seq_id, "n_kept is " + std::to_string(start.n_kept) + "; " +
                                   std::to_string(from.n_past) + " tokens are there");
    }
    if (start.tag != from.tag) {
        bad_plan(start.seq_id, "the tokens that it would keep have another tag");
    }
}

void check_sampler(const spec_engine & engine, const spec_start & start) {
    if (start.sampler == nullptr) {
        if (start.snapshot == nullptr || !start.is_resumed) {
            bad_plan(start.seq_id, "its sampler is NULL");
        }
        return;
    }
    if (start.sampler->n_vocab != engine.limits.n_vocab) {
        fail(SPEC_ERR_INVALID_ARGUMENT, "the sampler was made for a model with another vocabulary");
    }
    const sampler_history & history = start.sampler->history;
    if (!start.is_resumed && !history.heard.empty()) {
        bad_plan(start.seq_id, "a preempted sampler needs is_resumed");
    }
    if (!history.known.empty() && history.tag != start.tag) {
        bad_plan(start.seq_id, "its sampler has another tag");
    }
    if (history.has_emitted && start.n_kept >= static_cast<int32_t>(history.known.size())) {
        bad_plan(start.seq_id, "n_kept is " + std::to_string(start.n_kept) +
                                   "; the sampler knows " + std::to_string(history.known.size()) +
                                   " tokens, of which the last must be computed");
    }
}

// One that cannot be read keeps nothing; one of somebody else is a wrong plan.
void read_snapshot_of(const spec_engine & engine, const spec_start & start, read_start & read) {
    if (start.snapshot == nullptr) {
        return;
    }
    auto parts = std::make_unique<snapshot_parts>();
    const auto * bytes = static_cast<const uint8_t *>(start.snapshot);
    const bool wants_sampler = start.sampler == nullptr;
    if (guarded([&] { *parts = read_snapshot(engine, bytes, start.n_snapshot, wants_sampler); }) !=
        SPEC_OK) {
        return;
    }
    if (parts->seq.tag != start.tag) {
        bad_plan(start.seq_id, "its snapshot has another tag");
    }
    const bool has_sampler = !wants_sampler || parts->seq.sampler != nullptr;
    if (has_sampler && start.n_kept <= parts->seq.n_past()) {
        read.known = known_tokens(parts->seq);
        read.parts = std::move(parts);
    }
}

// A sequence with a new sampler, or a resumed one that knows these tokens.
void plan_sampler(planned_sequence & planned, const llama_tokens & known, bool has_emitted) {
    planned.has_emitted = has_emitted;
    planned.known = &known;
    planned.n_known = std::max(static_cast<int32_t>(known.size()), planned.n_past);
    if (has_emitted) {
        planned.id_last = known.back();
    }
}

planned_sequence as_started(const spec_start & start, const read_start & read) {
    planned_sequence planned;
    planned.is_begun = true;
    planned.is_started = true;
    planned.n_past = start.n_kept;
    planned.tag = start.tag;
    if (start.sampler != nullptr) {
        plan_sampler(planned, start.sampler->history.known, start.sampler->history.has_emitted);
    } else if (read.parts) {
        plan_sampler(planned, read.known, read.parts->seq.has_emitted);
    } else {
        planned.is_lost = true;
    }
    return planned;
}

void check_starts(const spec_engine & engine, const spec_plan & plan, checked_moves & moves) {
    moves.starts.resize(static_cast<size_t>(plan.n_starts));
    for (int32_t i = 0; i < plan.n_starts; ++i) {
        const spec_start & start = plan.starts[i];
        planned_sequence & planned = planned_at(engine, moves.sequences, start.seq_id);
        if (planned.is_started) {
            bad_plan(start.seq_id, "it is started twice");
        }
        const auto is_same = [&](const spec_start & other) {
            return start.sampler != nullptr && other.sampler == start.sampler;
        };
        if (std::any_of(plan.starts, plan.starts + i, is_same)) {
            fail(SPEC_ERR_INVALID_ARGUMENT, "a sampler is given twice");
        }
        check_kept(engine, start, moves.sequences);
        check_sampler(engine, start);
        read_start & read = moves.starts[static_cast<size_t>(i)];
        read_snapshot_of(engine, start, read);
        planned = as_started(start, read);
    }
}

// Writes to each page of fresh memory, all threads at once: the system gives pages one by one,
// which takes most of a large snapshot's time, and all running sequences wait for it.
void touch(spec_engine & engine, void * room, size_t n) {
    constexpr size_t PAGE_BYTES = 4096;
    constexpr size_t PIECE_BYTES = 256 * PAGE_BYTES;
    auto * bytes = static_cast<volatile uint8_t *>(room);
    const size_t n_pieces = (n + PIECE_BYTES - 1) / PIECE_BYTES;
    engine.sampling.run(n_pieces, n_pieces > 1, [&](size_t i) {
        const size_t end = std::min(n, (i + 1) * PIECE_BYTES);
        for (size_t at = i * PIECE_BYTES; at < end; at += PAGE_BYTES) {
            bytes[at] = 0;
        }
    });
}

// Writes a snapshot into the caller's room: of a sequence that is preempted too with its sampler.
// Returns its bytes; 0 where it could not be written.
size_t save(spec_engine & engine, const spec_plan & plan, int32_t i) {
    size_t n = 0;
    const int32_t seq_id = plan.saves[i];
    const auto * swap_outs_end = plan.swap_outs + plan.n_swap_outs;
    const bool has_sampler = std::find(plan.swap_outs, swap_outs_end, seq_id) != swap_outs_end;
    const auto write = [&](void * room) {
        return guarded([&] {
            save_sequence(engine, seq_id, has_sampler, static_cast<uint8_t *>(room), n, n);
        });
    };
    if (write(nullptr) != SPEC_ERR_BUFFER_TOO_SMALL) {
        return 0;
    }
    void * room = plan.room(i, n, plan.room_user);
    if (room == nullptr) {
        return 0;
    }
    const bool is_touched = guarded([&] { touch(engine, room, n); }) == SPEC_OK;
    return is_touched && write(room) == SPEC_OK ? n : 0;
}

spec_sampler * swapped_out(spec_engine & engine, int32_t seq_id) {
    std::unique_ptr<spec_sampler> sampler;
    if (guarded([&] { sampler = swap_out(engine, seq_id); }) != SPEC_OK) {
        clear_sequence(engine, seq_id);
    }
    return sampler.release();
}

} // namespace

planned_sequence & planned_begun(const spec_engine & engine,
                                 std::vector<planned_sequence> & sequences, int32_t seq_id) {
    planned_sequence & planned = planned_at(engine, sequences, seq_id);
    if (!planned.is_begun) {
        fail(SPEC_ERR_SEQ_IDLE, "sequence " + std::to_string(seq_id) + " has not begun");
    }
    return planned;
}

checked_moves check_moves(spec_engine & engine, const spec_plan & plan) {
    check_lists(engine, plan);
    checked_moves moves;
    std::vector<planned_sequence> & sequences = moves.sequences;
    sequences.reserve(engine.sequences.size());
    std::transform(engine.sequences.begin(), engine.sequences.end(), std::back_inserter(sequences),
                   as_it_is);
    const auto check_pending = [&](int32_t id) {
        if (planned_begun(engine, sequences, id).is_proposed) {
            bad_plan(id, "a proposal is pending; accept it first");
        }
    };
    std::for_each(plan.saves, plan.saves + plan.n_saves, check_pending);
    for (int32_t i = 0; i < plan.n_swap_outs; ++i) {
        check_pending(plan.swap_outs[i]);
        planned_at(engine, sequences, plan.swap_outs[i]) = {};
    }
    for (int32_t i = 0; i < plan.n_frees; ++i) {
        planned_at(engine, sequences, plan.frees[i]) = {};
    }
    check_starts(engine, plan, moves);
    const auto check_begun = [&](int32_t id) { planned_begun(engine, sequences, id); };
    std::for_each(plan.drafts_off, plan.drafts_off + plan.n_drafts_off, check_begun);
    std::for_each(plan.drafts_on, plan.drafts_on + plan.n_drafts_on, check_begun);
    return moves;
}

// Makes the moves of a plan that was checked. Returns, by id, which sequences lack what their start
// should have given them: their entries cannot be computed.
std::vector<bool> make_moves(spec_engine & engine, const spec_plan & plan, checked_moves & moves) {
    std::vector<bool> is_lacking(engine.sequences.size());
    engine.out_saved.assign(static_cast<size_t>(plan.n_saves), 0);
    engine.out_samplers.assign(static_cast<size_t>(plan.n_swap_outs), nullptr);
    engine.out_kept.assign(static_cast<size_t>(plan.n_starts), 0);
    // Nothing is thrown from here on.
    for (int32_t i = 0; i < plan.n_saves; ++i) {
        engine.out_saved[static_cast<size_t>(i)] = save(engine, plan, i);
    }
    for (int32_t i = 0; i < plan.n_swap_outs; ++i) {
        engine.out_samplers[static_cast<size_t>(i)] = swapped_out(engine, plan.swap_outs[i]);
    }
    for (int32_t i = 0; i < plan.n_frees; ++i) {
        clear_sequence(engine, plan.frees[i]);
    }
    for (int32_t i = 0; i < plan.n_starts; ++i) {
        const spec_start & start = plan.starts[i];
        const auto n = static_cast<size_t>(i);
        engine.out_kept[n] = start_sequence(engine, start, moves.starts[n].parts.get());
        is_lacking[static_cast<size_t>(start.seq_id)] =
            engine.out_kept[n] < start.n_kept || !seq_of(engine, start.seq_id).is_begun;
    }
    const auto is_begun = [&](int32_t id) { return seq_of(engine, id).is_begun; };
    for (int32_t i = 0; i < plan.n_drafts_off; ++i) {
        if (is_begun(plan.drafts_off[i])) {
            make_cold(engine, plan.drafts_off[i]);
        }
    }
    for (int32_t i = 0; i < plan.n_drafts_on; ++i) {
        if (is_begun(plan.drafts_on[i])) {
            drafts_on(engine, plan.drafts_on[i]);
        }
    }
    return is_lacking;
}

} // namespace drafthouse
