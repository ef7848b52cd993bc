// Steps: plans and drafts, valid or damaged, and whether what they report is so.
#include "plan/driver.hpp"

namespace plan_fuzz {

void driver::make_plan(bool is_run) {
    entries_.clear();
    drafts_.clear();
    tokens_.clear();
    int32_t n_left = limits_.n_batch;
    const int32_t first = in_.below(N_SEQ);
    const int32_t n = 1 + in_.below(N_SEQ);
    for (int32_t i = 0; i < n; ++i) {
        const int32_t id = (first + i) % N_SEQ;
        shadow & s = seqs_[id];
        if (!s.is_begun) {
            begin(id);
        }
        spec_plan_entry e = {};
        e.seq_id = id;
        e.n_past = spec_engine_seq_n_past(f_.engine, id);
        e.token_offset = static_cast<int32_t>(tokens_.size());
        // A resumed sequence computes again what it knew, up to the last token it chose.
        const int32_t n_again =
            std::max(static_cast<int32_t>(s.known.size()) - e.n_past, s.has_emitted ? 1 : 0);
        e.n_tokens = n_again == 0 ? 1 + in_.below(12) : is_run ? n_again : 1 + in_.below(n_again);
        const bool is_last = s.has_emitted && e.n_tokens == n_again;
        e.is_output = is_last || (is_run && !s.has_emitted) || (n_again == 0 && in_.below(3) != 0);
        e.n_draft = is_last && n_again == 1 && !is_run ? in_.below(limits_.n_draft_max + 1) : 0;
        if (e.n_past + e.n_tokens + e.n_draft > limits_.n_ctx_seq ||
            e.n_tokens + e.n_draft > n_left) {
            end(id); // full: it makes room for the next
            continue;
        }
        n_left -= e.n_tokens + e.n_draft;
        for (int32_t k = 0; k < e.n_tokens; ++k) {
            // Few different tokens, so that n-gram drafters find something.
            const auto at = static_cast<size_t>(e.n_past + k);
            tokens_.push_back(at < s.known.size() ? s.known[at]
                              : s.has_emitted     ? s.last
                                                  : 300 + in_.below(6));
        }
        entries_.push_back(e);
        if (e.n_draft > 0 && in_.below(2) == 0) {
            give(id, 1 + in_.below(e.n_draft));
        }
    }
}

void driver::give(int32_t id, int32_t n) {
    std::vector<int32_t> draft;
    if (in_.below(4) == 0 && seqs_[id].is_begun && spec_engine_seq_n_past(f_.engine, id) > 0) {
        std::vector<int32_t> before = tokens_of(id);
        before.resize(std::min(before.size(), static_cast<size_t>(N_REFERENCE - n)));
        draft = f_.alone->follow(before, n);
    }
    for (auto k = static_cast<int32_t>(draft.size()); k < n; ++k) {
        draft.push_back(in_.below(4) * 256 + in_.byte());
    }
    drafts_.push_back({id, static_cast<int32_t>(tokens_.size()), n});
    tokens_.insert(tokens_.end(), draft.begin(), draft.end());
}

void driver::damage_draft() {
    if (drafts_.empty() || in_.below(8) == 0) { // for whoever it is: prefilling, not there
        give(in_.below(N_SEQ), 1 + in_.below(limits_.n_draft_max + 1));
        return;
    }
    spec_external_draft & d =
        drafts_[static_cast<size_t>(in_.below(static_cast<int32_t>(drafts_.size())))];
    switch (in_.below(6)) {
    case 0:
        d.seq_id = in_.wild();
        break;
    case 1:
        d.token_offset = in_.wild();
        break;
    case 2:
        d.n_tokens = in_.wild();
        break;
    case 3:
        d.n_tokens = in_.below(limits_.n_draft_max + 2);
        break;
    case 4:
        tokens_.back() = in_.wild(); // of the last draft
        break;
    default:
        drafts_.push_back(d);
    }
}

void driver::damage() {
    const int32_t n_damages = 1 + in_.below(3);
    for (int32_t i = 0; i < n_damages; ++i) {
        if (entries_.empty()) {
            return;
        }
        spec_plan_entry & e =
            entries_[static_cast<size_t>(in_.below(static_cast<int32_t>(entries_.size())))];
        switch (in_.below(10)) {
        case 9:
            damage_draft();
            break;
        case 0:
            e.seq_id = in_.wild();
            break;
        case 1:
            e.n_past = in_.wild();
            break;
        case 2:
            e.token_offset = in_.wild();
            break;
        case 3:
            e.n_tokens = in_.wild();
            break;
        case 4:
            e.n_draft = in_.wild();
            break;
        case 5:
            e.is_output = in_.wild();
            break;
        case 6:
            tokens_[static_cast<size_t>(in_.below(static_cast<int32_t>(tokens_.size())))] =
                in_.wild();
            break;
        case 7:
            entries_.push_back(e);
            break;
        default:
            e.n_past = in_.below(2) == 0 ? e.n_past / 2 : -1;
        }
    }
}

void driver::add_moves(spec_plan & plan, bool is_valid) {
    for (std::vector<int32_t> * list : {&frees_, &drafts_off_, &drafts_on_}) {
        list->clear();
    }
    for (int32_t id = 0; id < N_SEQ && in_.below(2) == 0; ++id) {
        const bool has_entry =
            std::any_of(entries_.begin(), entries_.end(),
                        [id](const spec_plan_entry & e) { return e.seq_id == id; });
        if (in_.below(4) == 0 && !has_entry) {
            frees_.push_back(id);
        } else if (in_.below(4) == 0 && seqs_[id].is_begun && !is_unfed_) {
            (in_.below(2) == 0 ? drafts_off_ : drafts_on_).push_back(id);
        }
    }
    if (!is_valid && in_.below(4) == 0) {
        drafts_off_.push_back(in_.below(2) == 0 ? in_.wild() : in_.below(N_SEQ));
    }
    plan.frees = frees_.data();
    plan.n_frees = static_cast<int32_t>(frees_.size());
    plan.drafts_off = drafts_off_.data();
    plan.n_drafts_off = static_cast<int32_t>(drafts_off_.size());
    plan.drafts_on = drafts_on_.data();
    plan.n_drafts_on = static_cast<int32_t>(drafts_on_.size());
    if (!is_valid && in_.below(8) == 0) { // so many that none is read
        plan.n_frees = in_.below(2) == 0 ? -1 : N_SEQ + 1 + in_.below(100);
    }
}

void driver::note_moves() {
    for (const int32_t id : frees_) {
        seqs_[id] = {};
        REQUIRE(spec_engine_seq_n_past(f_.engine, id) == 0);
    }
    for (const int32_t id : drafts_off_) {
        is_cold_[id] = true;
        seqs_[id].is_warming_up = false;
    }
    for (const int32_t id : drafts_on_) {
        is_cold_[id] = is_cold_[id] && !is_ngram();
        seqs_[id].is_warming_up = is_cold_[id] && limits_.draft_type != SPEC_DRAFT_NONE;
    }
}

void driver::step(bool is_valid) {
    if (in_.below(4) == 0) {
        turn(in_.below(N_SEQ));
    }
    spec_plan plan = {};
    plan.n_steps = in_.below(4) == 0 ? 2 + in_.below(6) : in_.below(2);
    make_plan(plan.n_steps > 1);
    unfeed();
    if (!is_valid) {
        damage();
    }
    plan.entries = entries_.empty() ? nullptr : entries_.data();
    plan.n_entries = static_cast<int32_t>(entries_.size());
    plan.tokens = tokens_.empty() ? nullptr : tokens_.data();
    plan.n_tokens = static_cast<int32_t>(tokens_.size());
    plan.drafts = drafts_.empty() ? nullptr : drafts_.data();
    plan.n_drafts = static_cast<int32_t>(drafts_.size());
    if (!is_valid && in_.below(8) == 0) { // fewer than there are: reads nothing beyond
        plan.n_entries = in_.below(plan.n_entries + 1) - 1;
        plan.n_tokens = in_.below(plan.n_tokens + 1) - 1;
    }
    if (!is_valid && in_.below(8) == 0) { // as many as there are, or so many that none is read
        const int32_t n_wild = in_.wild();
        const bool is_read = n_wild >= 0 && n_wild <= plan.n_entries;
        plan.n_drafts = is_read ? plan.n_drafts : n_wild;
        plan.drafts = in_.below(2) == 0 ? nullptr : plan.drafts;
    }
    if (!is_valid && in_.below(8) == 0) {
        plan.n_steps = in_.wild();
    }
    add_moves(plan, is_valid);
    if (in_.below(8) == 0) {
        spec_engine_interrupt(f_.engine);
        is_interrupted_ = true;
    }
    const state before = look();
    for (int32_t id = 0; id < N_SEQ; ++id) {
        is_cold_[id] = is_cold(id);
    }
    const bool is_exact = std::all_of(entries_.begin(), entries_.end(), [&](const auto & e) {
        return e.seq_id < 0 || e.seq_id >= N_SEQ || seqs_[e.seq_id].is_exact;
    });
    spec_result result = {};
    const int32_t rc = spec_engine_step(f_.engine, &plan, &result);
    if (rc != SPEC_OK) {
        REQUIRE(rc == SPEC_ERR_BAD_PLAN || rc == SPEC_ERR_BAD_SEQ_ID || rc == SPEC_ERR_SEQ_IDLE ||
                rc == SPEC_ERR_INVALID_ARGUMENT);
        REQUIRE(!is_valid || is_by_hand_ || !is_exact || entries_.empty());
        REQUIRE(spec_last_error()[0] != '\0');
        REQUIRE(look() == before);
        return;
    }
    REQUIRE(result.n_entries == plan.n_entries);
    note_moves();
    check_run(plan, result);
    for (int32_t i = 0; i < result.n_entries; ++i) {
        check(plan.entries[i], result.entries[i], result);
    }
    check_cells();
}

void driver::check_run(const spec_plan & plan, const spec_result & result) {
    REQUIRE(result.n_steps >= 1 && result.n_steps <= std::max(plan.n_steps, 1));
    const auto is_end = [&](const spec_result_entry & r) {
        return r.status != SPEC_OK || (r.flags & SPEC_RESULT_EOG) != 0 ||
               r.n_past >= limits_.n_ctx_seq || r.n_tokens < result.n_steps;
    };
    REQUIRE(result.n_steps >= plan.n_steps || is_interrupted_ || result.n_entries == 0 ||
            std::any_of(result.entries, result.entries + result.n_entries, is_end));
    REQUIRE(result.n_steps == 1 || !is_interrupted_);
    is_interrupted_ = false;
}

void driver::check(const spec_plan_entry & e, const spec_result_entry & r,
                   const spec_result & result) {
    shadow & s = seqs_[e.seq_id];
    REQUIRE(r.seq_id == e.seq_id);
    REQUIRE(r.n_past == spec_engine_seq_n_past(f_.engine, e.seq_id));
    if (r.status == SPEC_ERR_NO_ROOM) {
        REQUIRE(has_fault_ || limits_.kv_unified);
        REQUIRE(r.n_past == e.n_past && r.n_tokens == 0);
        return;
    }
    if (r.status != SPEC_OK) {
        REQUIRE(has_fault_);
        REQUIRE(r.n_past == 0 && (r.n_tokens == 0 || result.n_steps > 1));
        s = {};
        return;
    }
    const bool is_external = (r.flags & SPEC_RESULT_EXTERNAL) != 0;
    REQUIRE(!is_cold_[e.seq_id] || r.n_drafted == 0 || is_external);
    REQUIRE(((r.flags & SPEC_RESULT_DRAFT_COLD) != 0) == is_cold(e.seq_id));
    REQUIRE(!s.is_warming_up || has_fault_ || !is_cold(e.seq_id));
    s.is_warming_up = s.is_warming_up && is_cold(e.seq_id);
    REQUIRE(r.n_drafted <= e.n_draft && r.n_accepted <= r.n_drafted && r.n_accepted >= 0);
    if (result.n_steps > 1) {
        REQUIRE(r.n_tokens == result.n_steps ||
                (r.n_tokens == result.n_steps - 1 && (has_fault_ || limits_.kv_unified)));
        REQUIRE(e.is_output != 0 && r.n_drafted == 0);
    } else {
        REQUIRE(r.n_tokens == (e.is_output != 0 ? r.n_accepted + 1 : 0));
    }
    REQUIRE(r.n_past == e.n_past + e.n_tokens + std::max(r.n_tokens - 1, 0));
    REQUIRE(r.token_offset >= 0 && r.token_offset + r.n_tokens <= result.n_tokens);
    for (int32_t k = r.token_offset; k < r.token_offset + r.n_tokens; ++k) {
        REQUIRE(result.tokens[k] >= 0 && result.tokens[k] < limits_.n_vocab);
        REQUIRE(result.logprobs[k] <= 1e-4f);
        s.last = result.tokens[k];
        s.has_emitted = true;
        s.known.clear();
        s.emissions.push_back(
            {e.n_past + e.n_tokens + k - r.token_offset, s.last, result.logprobs[k]});
    }
    if (is_external) {
        check_external(r, result);
    }
}

void driver::check_cells() {
    int32_t n = 0;
    for (int32_t id = 0; id < N_SEQ; ++id) {
        n += spec_engine_seq_n_past(f_.engine, id);
    }
    const int32_t n_used = spec_engine_n_cells_used(f_.engine);
    if (n_used != n) {
        std::fprintf(stderr, "%d cells used, %d tokens; draft type %d, by hand %d\n", n_used, n,
                     limits_.draft_type, is_by_hand_);
    }
    REQUIRE(n_used == n);
}

} // namespace plan_fuzz
