// The step, and runs of steps.

#include "internal.hpp"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace drafthouse {

namespace {

int64_t now_us() {
    using namespace std::chrono;
    return duration_cast<microseconds>(steady_clock::now().time_since_epoch()).count();
}

// A sequence whose checkpoint must be replayed, after the logits of this step have been read for
// all.
struct pending_replay {
    size_t i_entry;
    int32_t n_past;
    llama_tokens kept;
};

void roll_back(spec_engine & engine, sequence & seq, const spec_plan_entry & e, size_t i_entry,
               int32_t n_new, int32_t n_back, std::vector<pending_replay> & replays) {
    if (n_back <= 0) {
        return;
    }
    cut_draft(engine, e.seq_id, n_new);
    seq.n_back_max = 0; // once per decode
    if (seq.checkpoint.empty() ||
        (engine.target_rollback == rollback_kind::bounded && n_back <= engine.limits.n_rs_seq)) {
        if (!cut_target(engine, e.seq_id, n_new)) {
            fail(SPEC_ERR_DECODE_FAILED, "the rejected draft could not be taken back");
        }
        return;
    }
    replays.push_back(
        {i_entry, e.n_past, llama_tokens(seq.tokens.begin() + e.n_past, seq.tokens.end())});
}

template <typename T> void append(std::vector<T> & all, const std::vector<T> & some) {
    all.insert(all.end(), some.begin(), some.end());
}

void emit(spec_engine & engine, spec_result_entry & r, const outcome & out) {
    r.token_offset = static_cast<int32_t>(engine.out_tokens.size());
    r.n_tokens = static_cast<int32_t>(out.emitted.size());
    append(engine.out_tokens, out.emitted);
    append(engine.out_logprobs, out.logprobs);
    append(engine.out_top_tokens, out.top_tokens);
    append(engine.out_top_logprobs, out.top_logprobs);
    if (llama_vocab_is_eog(engine.target_model->vocab, out.emitted.back())) {
        r.flags |= SPEC_RESULT_EOG;
    }
}

int32_t mask_work(int64_t n) {
    return static_cast<int32_t>(std::min<int64_t>(n, INT32_MAX));
}

void finish_output(spec_engine & engine, sequence & seq, const spec_plan_entry & e, size_t i_entry,
                   spec_result_entry & r, std::vector<pending_replay> & replays) {
    const int32_t n_draft = static_cast<int32_t>(seq.draft.tokens.size());
    if (!seq.has_emitted) {
        seq.n_prompt = seq.n_past();
    }
    const outcome & out = engine.outcomes[i_entry];
    const int32_t n_acc = static_cast<int32_t>(out.emitted.size()) - 1;
    emit(engine, r, out);
    r.n_drafted = n_draft;
    r.n_accepted = n_acc;
    r.n_mask_work = mask_work(out.n_mask_work);
    r.flags |= seq.draft.is_external ? SPEC_RESULT_EXTERNAL : 0;
    if (n_draft > 0) {
        accept_draft(engine, seq, e.seq_id, n_acc);
    }
    seq.tokens.insert(seq.tokens.end(), out.emitted.begin(), out.emitted.end() - 1);
    seq.id_last = out.emitted.back();
    seq.has_emitted = true;
    seq.n_heard = seq.n_past() + 1;
    seq.known.clear();
    roll_back(engine, seq, e, i_entry, seq.n_past(), n_draft - n_acc, replays);
}

void finish_entry(spec_engine & engine, const spec_plan & plan, size_t i_entry,
                  std::vector<pending_replay> & replays) {
    const spec_plan_entry & e = plan.entries[i_entry];
    sequence & seq = seq_of(engine, e.seq_id);
    spec_result_entry & r = engine.out_entries[i_entry];
    if (engine.outcomes[i_entry].status != SPEC_OK) {
        fail(engine.outcomes[i_entry].status, "no token could be chosen");
    }
    const int32_t * ids = plan.tokens + e.token_offset;
    seq.tokens.insert(seq.tokens.end(), ids, ids + e.n_tokens);
    if (e.is_output != 0) {
        finish_output(engine, seq, e, i_entry, r, replays);
    }
    r.n_past = seq.n_past();
    r.flags |= seq.is_cold ? SPEC_RESULT_DRAFT_COLD : 0;
    seq.draft = {};
    if (!seq.checkpoint.empty() && (replays.empty() || replays.back().i_entry != i_entry)) {
        seq.checkpoint.clear();
    }
}

void fail_entry(spec_engine & engine, const spec_plan & plan, size_t i_entry, int32_t status) {
    spec_result_entry & r = engine.out_entries[i_entry];
    clear_sequence(engine, plan.entries[i_entry].seq_id);
    r = {};
    r.seq_id = plan.entries[i_entry].seq_id;
    r.status = status;
    r.n_mask_work = mask_work(engine.outcomes[i_entry].n_mask_work);
}

void fail_entries(spec_engine & engine, const spec_plan & plan, const group & entries) {
    for (const size_t i : entries) {
        fail_entry(engine, plan, i, SPEC_ERR_DECODE_FAILED);
    }
}

// One sequence's trouble stays its own: whatever is thrown for it ends it and no other.
template <typename Body>
void isolated(spec_engine & engine, const spec_plan & plan, size_t i_entry, Body && body) {
    const int32_t rc = guarded(body);
    if (rc != SPEC_OK) {
        const bool is_known = rc == SPEC_ERR_DECODE_FAILED || is_of_request(rc);
        fail_entry(engine, plan, i_entry, is_known ? rc : SPEC_ERR_SAMPLING_FAILED);
    }
}

void finish_entries(spec_engine & engine, const spec_plan & plan, const group & entries) {
    std::vector<pending_replay> replays;
    choose_all(engine, plan, entries);
    for (const size_t i : entries) {
        isolated(engine, plan, i, [&] { finish_entry(engine, plan, i, replays); });
    }
    for (const pending_replay & r : replays) {
        isolated(engine, plan, r.i_entry, [&] {
            sequence & seq = seq_of(engine, plan.entries[r.i_entry].seq_id);
            replay(engine, seq, plan.entries[r.i_entry].seq_id, r.n_past, r.kept);
            seq.checkpoint.clear();
            engine.out_entries[r.i_entry].flags |= SPEC_RESULT_REPLAYED;
        });
    }
}

void begin_result(spec_engine & engine, const spec_plan & plan) {
    engine.is_decoded = false;
    engine.out_tokens.clear();
    engine.out_logprobs.clear();
    engine.out_top_tokens.clear();
    engine.out_top_logprobs.clear();
    engine.n_top = 0;
    engine.out_entries.assign(static_cast<size_t>(plan.n_entries), spec_result_entry{});
    for (int32_t i = 0; i < plan.n_entries; ++i) {
        engine.outcomes[static_cast<size_t>(i)].n_mask_work = 0;
        engine.out_entries[static_cast<size_t>(i)].seq_id = plan.entries[i].seq_id;
        engine.out_entries[static_cast<size_t>(i)].n_past = plan.entries[i].n_past;
        const sequence & seq = seq_of(engine, plan.entries[i].seq_id);
        engine.n_top = std::max(engine.n_top, seq.sampler->n_top_logprobs);
    }
}

void refuse_entries(spec_engine & engine, const spec_plan & plan, const group & entries) {
    for (const size_t i : entries) {
        engine.out_entries[i].status = SPEC_ERR_NO_ROOM;
        seq_of(engine, plan.entries[i].seq_id).draft = {};
    }
}

int32_t longest_draft(spec_engine & engine, const spec_plan & plan, const group & entries) {
    size_t n = 0;
    for (const size_t i : entries) {
        n = std::max(n, seq_of(engine, plan.entries[i].seq_id).draft.tokens.size());
    }
    return static_cast<int32_t>(n);
}

// One decode of the target and all that must happen before the next one.
void run_group(spec_engine & engine, const spec_plan & plan, const group & entries,
               spec_result & out) {
    const int64_t t_begin = now_us();
    build_batch(engine, plan, entries);
    int32_t rc = decode_batch(engine, longest_draft(engine, plan, entries));
    if (rc == 1 && drop_drafts(engine, plan, entries)) {
        rc = decode_batch(engine, 0);
    }
    const int64_t t_decoded = now_us();
    out.t_decode_us += t_decoded - t_begin;
    out.n_batch_tokens += engine.batch.size();
    if (rc == 1) {
        refuse_entries(engine, plan, entries);
        return;
    }
    if (rc != 0) {
        fail(SPEC_ERR_DECODE_FAILED,
             "the target's decode returned " + std::to_string(rc) + llama_reason());
    }
    process_batch(engine);
    const int64_t t_processed = now_us();
    out.t_process_us += t_processed - t_decoded;
    finish_entries(engine, plan, entries);
    out.t_sample_us += now_us() - t_processed;
}

// Draft, save what a rollback reads, decode, process, verify.
void run_step(spec_engine & engine, const spec_plan & plan, spec_result & out) {
    const int64_t t_begin = now_us();
    draft_plan(engine, plan);
    for (int32_t i = 0; i < plan.n_entries; ++i) {
        const int32_t seq_id = plan.entries[i].seq_id;
        save_checkpoint(engine, seq_of(engine, seq_id), seq_id);
    }
    out.t_draft_us += now_us() - t_begin;
    if (engine.take_fault(SPEC_FAULT_THROW)) {
        throw std::runtime_error("injected fault");
    }
    for (const group & entries : make_groups(engine, plan)) {
        if (guarded([&] { run_group(engine, plan, entries, out); }) != SPEC_OK) {
            fail_entries(engine, plan, entries);
        }
    }
}

// One step of a plan that was checked.
void step_once(spec_engine & engine, const spec_plan & plan, spec_result & out) {
    begin_result(engine, plan);
    if (plan.n_entries > 0 && guarded([&] { run_step(engine, plan, out); }) != SPEC_OK) {
        group all(static_cast<size_t>(plan.n_entries));
        std::iota(all.begin(), all.end(), size_t{0});
        fail_entries(engine, plan, all);
    }
    ++out.n_steps;
}

template <typename T>
void append_range(std::vector<T> & all, const std::vector<T> & some, size_t from, size_t n) {
    const auto start = some.begin() + static_cast<std::ptrdiff_t>(from);
    all.insert(all.end(), start, start + static_cast<std::ptrdiff_t>(n));
}

// Adds to each entry's outcome what the last step has emitted for it.
void collect(const spec_engine & engine, std::vector<outcome> & outcomes) {
    const auto n_top = static_cast<size_t>(engine.n_top);
    for (size_t i = 0; i < outcomes.size(); ++i) {
        outcomes[i].n_mask_work += engine.outcomes[i].n_mask_work;
        const auto from = static_cast<size_t>(engine.out_entries[i].token_offset);
        const auto n = static_cast<size_t>(engine.out_entries[i].n_tokens);
        append_range(outcomes[i].emitted, engine.out_tokens, from, n);
        append_range(outcomes[i].logprobs, engine.out_logprobs, from, n);
        append_range(outcomes[i].top_tokens, engine.out_top_tokens, from * n_top, n * n_top);
        append_range(outcomes[i].top_logprobs, engine.out_top_logprobs, from * n_top, n * n_top);
    }
}

// Makes the last step's result that of the whole run.
void tell_run(spec_engine & engine, const std::vector<outcome> & outcomes) {
    engine.out_tokens.clear();
    engine.out_logprobs.clear();
    engine.out_top_tokens.clear();
    engine.out_top_logprobs.clear();
    for (size_t i = 0; i < outcomes.size(); ++i) {
        spec_result_entry & r = engine.out_entries[i];
        r.token_offset = static_cast<int32_t>(engine.out_tokens.size());
        r.n_tokens = static_cast<int32_t>(outcomes[i].emitted.size());
        r.n_mask_work = mask_work(outcomes[i].n_mask_work);
        if (r.status == SPEC_ERR_NO_ROOM) {
            r.status = SPEC_OK; // it is where the step before has left it
            const bool is_cold = seq_of(engine, r.seq_id).is_cold;
            r.flags = is_cold ? SPEC_RESULT_DRAFT_COLD : 0;
        }
        append(engine.out_tokens, outcomes[i].emitted);
        append(engine.out_logprobs, outcomes[i].logprobs);
        append(engine.out_top_tokens, outcomes[i].top_tokens);
        append(engine.out_top_logprobs, outcomes[i].top_logprobs);
    }
}

// Whether there is nothing to decide between the last step and the next one.
bool may_go_on(const spec_engine & engine) {
    const auto goes_on = [&](const spec_result_entry & r) {
        return r.status == SPEC_OK && (r.flags & SPEC_RESULT_EOG) == 0 &&
               r.n_past < engine.limits.n_ctx_seq;
    };
    // Copies in one pool share cells, which the next plan's count as each sequence's own.
    const auto n_entries = static_cast<int64_t>(engine.out_entries.size());
    const bool has_cells =
        !engine.limits.kv_unified || cells_with(engine, n_entries) <= engine.limits.n_ctx;
    return has_cells && !engine.is_interrupted &&
           std::all_of(engine.out_entries.begin(), engine.out_entries.end(), goes_on);
}

// The further steps of a run: each sequence goes on from the token that it has emitted.
void run_on(spec_engine & engine, const spec_plan & plan, spec_result & out) {
    std::vector<outcome> outcomes(static_cast<size_t>(plan.n_entries));
    std::vector<spec_plan_entry> entries(plan.entries, plan.entries + plan.n_entries);
    std::vector<int32_t> tokens(entries.size());
    spec_plan next = {};
    next.entries = entries.data();
    next.n_entries = plan.n_entries;
    next.tokens = tokens.data();
    next.n_tokens = plan.n_entries;
    collect(engine, outcomes);
    while (out.n_steps < plan.n_steps && may_go_on(engine)) {
        for (size_t i = 0; i < entries.size(); ++i) {
            entries[i].n_past = engine.out_entries[i].n_past;
            entries[i].token_offset = static_cast<int32_t>(i);
            entries[i].n_tokens = 1;
            tokens[i] = outcomes[i].emitted.back();
        }
        step_once(engine, next, out);
        collect(engine, outcomes);
    }
    if (out.n_steps > 1) {
        tell_run(engine, outcomes);
    }
}

// The part of a plan whose starts have kept what they should.
struct computable_plan {
    std::vector<spec_plan_entry> entries;
    std::vector<spec_external_draft> drafts;
    spec_plan plan;

    computable_plan(const spec_plan & whole, const std::vector<bool> & is_lacking) : plan(whole) {
        const auto is_left_out = [&](const auto & part) {
            return is_lacking[static_cast<size_t>(part.seq_id)];
        };
        std::remove_copy_if(whole.entries, whole.entries + whole.n_entries,
                            std::back_inserter(entries), is_left_out);
        std::remove_copy_if(whole.drafts, whole.drafts + whole.n_drafts, std::back_inserter(drafts),
                            is_left_out);
        plan.entries = entries.data();
        plan.n_entries = static_cast<int32_t>(entries.size());
        plan.drafts = drafts.data();
        plan.n_drafts = static_cast<int32_t>(drafts.size());
        plan.n_steps = 1;
    }
};

void compute(spec_engine & engine, const spec_plan & plan, spec_result & out) {
    const int64_t t_begin = now_us();
    step_once(engine, plan, out);
    if (plan.n_steps > 1 && plan.n_entries > 0) {
        run_on(engine, plan, out);
    }
    out.t_total_us = now_us() - t_begin;
}

// What is told of an entry that was not computed.
spec_result_entry not_computed(const spec_engine & engine, int32_t seq_id) {
    const sequence & seq = seq_of(engine, seq_id);
    spec_result_entry r = {};
    r.seq_id = seq_id;
    r.status = seq.is_begun ? SPEC_OK : SPEC_ERR_DECODE_FAILED;
    r.n_past = seq.n_past();
    r.flags = seq.is_cold ? SPEC_RESULT_DRAFT_COLD : 0;
    return r;
}

// Computes what can be, and tells of the other entries in their places.
void compute_part(spec_engine & engine, const spec_plan & plan,
                  const std::vector<bool> & is_lacking, spec_result & out) {
    const computable_plan part(plan, is_lacking);
    std::vector<spec_result_entry> all(static_cast<size_t>(plan.n_entries));
    compute(engine, part.plan, out);
    size_t n_computed = 0;
    for (size_t i = 0; i < all.size(); ++i) {
        const int32_t seq_id = plan.entries[i].seq_id;
        all[i] = is_lacking[static_cast<size_t>(seq_id)] ? not_computed(engine, seq_id)
                                                         : engine.out_entries[n_computed++];
    }
    engine.out_entries = std::move(all);
}

// Fails every entry, without asking for memory.
void fail_all(spec_engine & engine, const spec_plan & plan) {
    engine.out_tokens.clear();
    engine.out_logprobs.clear();
    engine.out_top_tokens.clear();
    engine.out_top_logprobs.clear();
    engine.out_entries.resize(static_cast<size_t>(plan.n_entries));
    for (size_t i = 0; i < engine.out_entries.size(); ++i) {
        fail_entry(engine, plan, i, SPEC_ERR_DECODE_FAILED);
    }
}

void step(spec_engine & engine, const spec_plan & plan, spec_result & out) {
    checked_moves moves = check_plan(engine, plan);
    engine.out_entries.reserve(static_cast<size_t>(plan.n_entries));
    engine.outcomes.resize(std::max(engine.outcomes.size(), static_cast<size_t>(plan.n_entries)));
    out = {};
    const std::vector<bool> is_lacking = make_moves(engine, plan, moves);
    // The samplers are the engine's now: whatever comes, the plan is carried out.
    const int32_t rc = guarded([&] {
        if (std::find(is_lacking.begin(), is_lacking.end(), true) == is_lacking.end()) {
            compute(engine, plan, out);
        } else {
            compute_part(engine, plan, is_lacking, out);
        }
    });
    if (rc != SPEC_OK) {
        fail_all(engine, plan);
    }
    engine.is_interrupted = false;
    out.entries = engine.out_entries.data();
    out.n_entries = static_cast<int32_t>(engine.out_entries.size());
    out.tokens = engine.out_tokens.data();
    out.logprobs = engine.out_logprobs.data();
    out.n_tokens = static_cast<int32_t>(engine.out_tokens.size());
    out.top_tokens = engine.out_top_tokens.data();
    out.top_logprobs = engine.out_top_logprobs.data();
    out.n_top = engine.n_top;
    out.n_saved = engine.out_saved.data();
    out.samplers = engine.out_samplers.data();
    out.n_kept = engine.out_kept.data();
}

} // namespace

} // namespace drafthouse

using namespace drafthouse;

extern "C" {

int32_t spec_engine_step(spec_engine * engine, const spec_plan * plan, spec_result * out) {
    return guarded([&] { step(deref(engine, "engine"), deref(plan, "plan"), deref(out, "out")); });
}

void spec_engine_interrupt(spec_engine * engine) {
    if (engine != nullptr) {
        engine->is_interrupted = true;
    }
}

} // extern "C"
