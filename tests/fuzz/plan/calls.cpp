// Calls between the steps: sequences are begun, moved, kept, turned and compared.
#include "plan/driver.hpp"

namespace plan_fuzz {

driver::state driver::look() const {
    state s;
    for (int32_t id = 0; id < N_SEQ; ++id) {
        s.push_back(spec_engine_seq_n_past(f_.engine, id));
    }
    s.push_back(spec_engine_n_cells_used(f_.engine));
    for (int32_t id = 0; id < N_SEQ; ++id) {
        s.push_back(is_cold(id) ? 1 : 0);
    }
    return s;
}

void driver::call(int32_t kind) {
    switch (kind) {
    case 0:
    case 1:
        begin(in_.below(N_SEQ));
        break;
    case 2:
        end(in_.below(N_SEQ));
        break;
    case 3:
        odd_ids();
        break;
    case 4:
        fault();
        break;
    case 5:
        rollback();
        break;
    case 6:
    case 7:
        decode(true);
        break;
    case 8:
        decode(false);
        break;
    case 9:
        by_hand();
        break;
    case 10:
        round_by_hand();
        break;
    case 11:
    case 12:
    case 13:
    case 14:
    case 15:
        step(true);
        break;
    case 16:
    case 17:
    case 18:
    case 19:
        step(false);
        break;
    case 20:
    case 21:
    case 22:
        start();
        break;
    case 23:
    case 24:
        preempt();
        break;
    case 25:
        save();
        break;
    case 26:
        load();
        break;
    case 27:
        fork();
        break;
    case 28:
    case 29:
    case 30:
        turn(in_.below(N_SEQ));
        break;
    case 31:
        is_unfed_ = !is_unfed_;
        break;
    case 32:
        change_threads();
        break;
    default:
        ask();
    }
}

void driver::begin(int32_t id) {
    const state before = look();
    const bool is_greedy = in_.below(2) == 0;
    spec_sampler * sampler = greedy(f_.target, is_greedy ? 0.0f : 1.0f);
    const int32_t rc = spec_engine_seq_begin(f_.engine, id, &sampler);
    REQUIRE(sampler == nullptr);
    // By hand a batch may wait for process, with tokens of the former sequence of this id.
    REQUIRE(rc == (seqs_[id].is_begun ? SPEC_ERR_SEQ_BUSY : SPEC_OK) ||
            (rc == SPEC_ERR_BAD_PLAN && is_by_hand_));
    if (rc == SPEC_OK) {
        seqs_[id] = begun_anew(is_greedy);
        REQUIRE(spec_engine_seq_n_past(f_.engine, id) == 0);
    } else {
        REQUIRE(look() == before);
    }
}

void driver::odd_ids() {
    const state before = look();
    int32_t id = in_.wild();
    if (id >= 0 && id < N_SEQ) {
        id = -1 - id;
    }
    spec_sampler * sampler = greedy(f_.target);
    REQUIRE(spec_engine_seq_begin(f_.engine, id, &sampler) == SPEC_ERR_BAD_SEQ_ID);
    REQUIRE(spec_engine_seq_end(f_.engine, id) == SPEC_ERR_BAD_SEQ_ID);
    REQUIRE(spec_engine_seq_n_past(f_.engine, id) == SPEC_ERR_BAD_SEQ_ID);
    REQUIRE(spec_engine_seq_rollback(f_.engine, id, 0) == SPEC_ERR_BAD_SEQ_ID);
    REQUIRE(spec_engine_seq_accept(f_.engine, id, 0) == SPEC_ERR_BAD_SEQ_ID);
    spec_plan plan = {};
    spec_result result = {};
    plan.swap_outs = plan.frees = &id;
    plan.n_swap_outs = in_.below(2);
    plan.n_frees = 1 - plan.n_swap_outs;
    REQUIRE(spec_engine_step(f_.engine, &plan, &result) == SPEC_ERR_BAD_SEQ_ID || is_by_hand_);
    REQUIRE(spec_engine_seq_drafts_off(f_.engine, id) == SPEC_ERR_BAD_SEQ_ID);
    REQUIRE(spec_engine_seq_drafts_on(f_.engine, id) == SPEC_ERR_BAD_SEQ_ID);
    size_t n = 0;
    REQUIRE(spec_engine_seq_save(f_.engine, id, nullptr, 0, &n) == SPEC_ERR_BAD_SEQ_ID);
    REQUIRE(spec_engine_seq_load(f_.engine, id, "", 0) == SPEC_ERR_BAD_SEQ_ID);
    REQUIRE(look() == before);
}

void driver::rollback() {
    const int32_t id = in_.below(N_SEQ);
    const int32_t n = in_.below(2) == 0 ? in_.wild() : in_.below(64);
    const state before = look();
    const int32_t rc = spec_engine_seq_rollback(f_.engine, id, n);
    if (rc != SPEC_OK) {
        REQUIRE(look() == before);
        return;
    }
    REQUIRE(spec_engine_seq_n_past(f_.engine, id) == n);
    if (n != before[static_cast<size_t>(id)]) {
        seqs_[id].has_emitted = false;
        seqs_[id].known.clear();
        seqs_[id].forget_from(n);
    }
}

std::vector<int32_t> driver::tokens_of(int32_t id) const {
    std::vector<int32_t> tokens(static_cast<size_t>(limits_.n_ctx_seq) + 1);
    size_t n = 0;
    int32_t last = -1;
    REQUIRE(spec_engine_seq_tokens(f_.engine, id, tokens.data(), tokens.size(), &n, &last) ==
            SPEC_OK);
    REQUIRE(static_cast<int32_t>(n) == spec_engine_seq_n_past(f_.engine, id));
    tokens.resize(n);
    if (seqs_[id].has_emitted) {
        REQUIRE(last == seqs_[id].last || !seqs_[id].is_exact || is_by_hand_);
        tokens.push_back(seqs_[id].last);
    }
    return tokens;
}

shadow driver::history_of(int32_t id) const {
    shadow s = seqs_[id];
    s.is_warming_up = false;
    const int32_t n_past = spec_engine_seq_n_past(f_.engine, id);
    if (static_cast<int32_t>(s.known.size()) <= n_past) {
        s.known = tokens_of(id);
    }
    return s;
}

void driver::preempt() {
    const int32_t id = in_.below(N_SEQ);
    const state before = look();
    const shadow s = seqs_[id].is_begun ? history_of(id) : shadow{};
    spec_plan plan = {};
    spec_result result = {};
    plan.swap_outs = &id;
    plan.n_swap_outs = 1;
    const int32_t rc = spec_engine_step(f_.engine, &plan, &result);
    if (rc != SPEC_OK) {
        REQUIRE((rc == SPEC_ERR_SEQ_IDLE && !s.is_begun) ||
                (rc == SPEC_ERR_BAD_PLAN && is_by_hand_));
        REQUIRE(look() == before);
        return;
    }
    is_interrupted_ = false;
    spec_sampler * sampler = result.samplers[0];
    REQUIRE(sampler != nullptr && result.n_entries == 0);
    REQUIRE(spec_engine_seq_n_past(f_.engine, id) == 0);
    int32_t n_known = -1;
    bool has_chosen = false;
    REQUIRE(spec_sampler_get_history(sampler, &n_known, &has_chosen) == SPEC_OK);
    if (s.is_exact && !is_by_hand_) {
        REQUIRE(n_known == static_cast<int32_t>(s.known.size()));
        REQUIRE(has_chosen == s.has_emitted);
    }
    seqs_[id] = {};
    if (preempted_.size() == N_HELD_MAX) {
        spec_sampler_free(preempted_.front().sampler);
    }
    hold(preempted_, {sampler, s});
}

void driver::save() {
    const int32_t id = in_.below(N_SEQ);
    const state before = look();
    size_t n = 0;
    int32_t rc = spec_engine_seq_save(f_.engine, id, nullptr, 0, &n);
    if (!seqs_[id].is_begun) {
        REQUIRE(rc == SPEC_ERR_SEQ_IDLE);
    } else if (rc != SPEC_ERR_BUFFER_TOO_SMALL) {
        REQUIRE(rc == SPEC_ERR_BAD_PLAN && is_by_hand_);
    } else {
        saved_sequence saved;
        saved.bytes.resize(n);
        saved.n_past = spec_engine_seq_n_past(f_.engine, id);
        saved.s = seqs_[id];
        if (in_.below(2) == 0) {
            rc = spec_engine_seq_save(f_.engine, id, saved.bytes.data(), n, &n);
            REQUIRE(rc == SPEC_OK && n == saved.bytes.size());
        } else if (!save_by_plan(id, saved)) {
            return;
        }
        hold(saved_, std::move(saved));
    }
    REQUIRE(look() == before);
}

bool driver::save_by_plan(int32_t id, saved_sequence & saved) {
    spec_plan plan = {};
    spec_result result = {};
    plan.saves = &id;
    plan.n_saves = 1;
    plan.room = give_room;
    plan.room_user = &saved.bytes;
    saved.is_bare = true; // it is not preempted too
    const int32_t rc = spec_engine_step(f_.engine, &plan, &result);
    REQUIRE(rc == SPEC_OK || (rc == SPEC_ERR_BAD_PLAN && is_by_hand_));
    REQUIRE(rc != SPEC_OK || result.n_saved[0] == saved.bytes.size());
    is_interrupted_ = is_interrupted_ && rc != SPEC_OK;
    return rc == SPEC_OK;
}

saved_sequence driver::a_snapshot() {
    if (saved_.empty()) {
        return {};
    }
    saved_sequence b = saved_[static_cast<size_t>(in_.below(static_cast<int32_t>(saved_.size())))];
    const int32_t how = in_.below(8);
    if (how == 0) {
        b.bytes[(static_cast<size_t>(in_.byte()) << 8 | in_.byte()) % b.bytes.size()] ^= 1;
        b.n_past = -1;
    } else if (how == 1) {
        b.bytes.resize(b.bytes.size() / 2);
        b.n_past = -1;
    }
    return b;
}

void driver::load() {
    const saved_sequence from = a_snapshot();
    const int32_t id = in_.below(N_SEQ);
    const state before = look();
    const int32_t rc = spec_engine_seq_load(f_.engine, id, from.bytes.data(), from.bytes.size());
    if (rc == SPEC_OK) {
        REQUIRE(from.n_past >= 0 && !seqs_[id].is_begun && !from.is_bare);
        REQUIRE(spec_engine_seq_n_past(f_.engine, id) == from.n_past);
        seqs_[id] = from.s;
        return;
    }
    REQUIRE(look() == before);
    REQUIRE(from.n_past < 0 || from.bytes.empty() ||
            (rc == SPEC_ERR_INVALID_ARGUMENT && from.is_bare) ||
            (rc == SPEC_ERR_SEQ_BUSY && seqs_[id].is_begun) ||
            (rc == SPEC_ERR_BAD_PLAN && is_by_hand_) ||
            (rc == SPEC_ERR_NO_ROOM && limits_.kv_unified));
}

void driver::fork() {
    const int32_t src = in_.below(N_SEQ);
    const int32_t n_past = in_.below(2) == 0 ? -1 : in_.below(64);
    const int32_t n = 1 + in_.below(2);
    const int32_t dst[] = {in_.below(N_SEQ), in_.below(N_SEQ)};
    spec_sampler * samplers[] = {greedy(f_.target), greedy(f_.target, 1.0f)};
    const state before = look();
    const int32_t rc = spec_engine_fork(f_.engine, src, n_past, dst, samplers, n);
    for (int32_t i = 0; i < 2; ++i) {
        REQUIRE((samplers[i] == nullptr) == (rc == SPEC_OK && i < n));
        spec_sampler_free(samplers[i]);
    }
    if (rc != SPEC_OK) {
        REQUIRE(look() == before);
        return;
    }
    for (int32_t i = 0; i < n; ++i) {
        REQUIRE(n_past == -1 || spec_engine_seq_n_past(f_.engine, dst[i]) == n_past);
        const uint64_t tag = seqs_[src].tag;
        seqs_[dst[i]] = begun_anew(i == 0);
        seqs_[dst[i]].tag = tag;
    }
}

void driver::turn(int32_t id) {
    const bool is_up = in_.below(2) == 0;
    const auto call = is_up ? spec_engine_seq_drafts_on : spec_engine_seq_drafts_off;
    shadow & s = seqs_[id];
    const state before = look();
    const bool was_cold = is_cold(id);
    const int32_t rc = call(f_.engine, id);
    REQUIRE(rc == (s.is_begun ? SPEC_OK : SPEC_ERR_SEQ_IDLE) ||
            (rc == SPEC_ERR_BAD_PLAN && is_up && is_by_hand_));
    const state after = look(); // fewer cells, the draft's, may be in use
    REQUIRE(std::equal(before.begin(), before.begin() + N_SEQ, after.begin()));
    if (rc != SPEC_OK) {
        REQUIRE(after == before);
        return;
    }
    REQUIRE(is_cold(id) == (!is_up || (was_cold && !is_ngram())));
    REQUIRE(call(f_.engine, id) == SPEC_OK && look() == after); // twice is once
    s.is_warming_up = is_up && is_cold(id) && limits_.draft_type != SPEC_DRAFT_NONE;
}

void driver::compare(int32_t id) {
    const shadow & s = seqs_[id];
    const int32_t n_past = spec_engine_seq_n_past(f_.engine, id);
    if (!s.is_begun || n_past == 0 || s.emissions.empty()) {
        return;
    }
    std::vector<int32_t> tokens(static_cast<size_t>(n_past));
    size_t n = 0;
    REQUIRE(spec_engine_seq_tokens(f_.engine, id, tokens.data(), tokens.size(), &n, nullptr) ==
            SPEC_OK);
    f_.alone->read(tokens);
    for (const emission & e : s.emissions) {
        if (e.pos > n_past) {
            continue; // resumed, and not yet computed again
        }
        const auto i = static_cast<size_t>(e.pos - 1);
        const float expected = f_.alone->logprob(i, e.token);
        const float best = f_.alone->logprob(i, f_.alone->best(i));
        if (std::fabs(e.logprob - expected) > TIE_LOGITS ||
            (s.is_greedy && best - expected > TIE_LOGITS)) {
            std::fprintf(stderr,
                         "sequence %d, draft type %d: token %d at %d has log-probability %f, "
                         "alone %f; the best has %f\n",
                         id, limits_.draft_type, e.token, e.pos, e.logprob, expected, best);
            REQUIRE(!"the token is the target's own");
        }
    }
}

void driver::change_threads() {
    const auto any = [this] { return in_.below(4) == 0 ? in_.wild() : 1 + in_.below(N_THREADS); };
    const int32_t n_threads = any();
    const int32_t n_threads_batch = any();
    const auto is_known = [](int32_t n) { return n >= 1 && n <= N_THREADS; };
    const state before = look();
    REQUIRE(
        spec_engine_set_threads(f_.engine, n_threads, n_threads_batch) ==
        (is_known(n_threads) && is_known(n_threads_batch) ? SPEC_OK : SPEC_ERR_INVALID_ARGUMENT));
    REQUIRE(look() == before);
}

void driver::ask() {
    const int32_t id = in_.below(N_SEQ);
    const state before = look();
    int32_t token = 0;
    size_t n = 0;
    const int32_t rc = spec_engine_seq_tokens(f_.engine, id, &token, 1, &n, nullptr);
    const auto n_past = static_cast<size_t>(std::max(before[static_cast<size_t>(id)], 0));
    REQUIRE(rc == (!seqs_[id].is_begun ? SPEC_ERR_SEQ_IDLE
                   : n_past > 1        ? SPEC_ERR_BUFFER_TOO_SMALL
                                       : SPEC_OK));
    REQUIRE(!seqs_[id].is_begun || n == n_past);
    int32_t n_known = 0;
    bool has_chosen = false;
    REQUIRE(spec_sampler_get_history(nullptr, &n_known, &has_chosen) == SPEC_ERR_INVALID_ARGUMENT);
    REQUIRE(look() == before);
}

} // namespace plan_fuzz
