// Starts: what a sequence goes on with, valid or damaged, and what is known of it then.
#include "plan/driver.hpp"

namespace plan_fuzz {

spec_start driver::make_start(int32_t id, const saved_sequence & from) {
    spec_start start = {};
    start.seq_id = id;
    start.source = -1;
    int32_t n_there = 0;
    switch (in_.below(4)) {
    case 0:
        start.tag = static_cast<uint64_t>(in_.below(3));
        return start;
    case 1:
        n_there = spec_engine_seq_n_past(f_.engine, id);
        break;
    case 2:
        start.source = (id + 1 + in_.below(N_SEQ - 1)) % N_SEQ;
        n_there = spec_engine_seq_n_past(f_.engine, start.source);
        break;
    default:
        start.snapshot = from.bytes.data();
        start.n_snapshot = from.bytes.size();
        n_there = std::max(from.n_past, 1);
    }
    start.tag = in_.below(8) == 0 ? static_cast<uint64_t>(in_.below(4)) : tag_of(start, from);
    // All of it is what recurrent targets can go on from.
    start.n_kept = in_.below(2) == 0 ? n_there : in_.below(n_there + 1);
    return start;
}

void driver::damage(spec_start & start) {
    switch (in_.below(5)) {
    case 0:
        start.seq_id = in_.wild();
        break;
    case 1:
        start.n_kept = in_.wild();
        break;
    case 2:
        start.source = in_.wild();
        break;
    case 3:
        start.n_snapshot = start.snapshot != nullptr ? start.n_snapshot / 2 : 0;
        break;
    default:
        start.is_resumed = !start.is_resumed;
    }
}

shadow driver::started(const spec_start & start, int32_t n, const shadow & s,
                       const saved_sequence & from) const {
    if (!start.is_resumed) {
        return begun_anew(s.is_greedy);
    }
    shadow now = s;
    const bool is_own = &s == &from.s;
    if (is_own && n == from.n_past) {
        return now; // as it was saved
    }
    // Which tokens a snapshot's sampler knew is not known here, and a preempted one may meet
    // other tokens than it knows.
    now.is_exact = now.is_exact && !is_own && n == 0;
    now.is_begun = true;
    now.is_warming_up = false;
    if (!now.is_exact) {
        now.emissions.clear();
    }
    return now;
}

void driver::start() {
    const saved_sequence from = a_snapshot();
    const int32_t id = in_.below(N_SEQ);
    spec_start start = make_start(id, from);
    const int32_t kind = in_.below(3); // a new sampler, a preempted one, the snapshot's
    preempted_sampler p;
    if (kind == 1 && !preempted_.empty()) {
        p = preempted_.back();
        preempted_.pop_back();
        start.is_resumed = true;
    } else if (kind == 2 && start.snapshot != nullptr) {
        start.is_resumed = true;
    } else {
        p.s.is_greedy = in_.below(2) == 0;
        p.sampler = greedy(f_.target, p.s.is_greedy ? 0.0f : 1.0f);
    }
    const bool is_damaged = in_.below(4) == 0;
    if (is_damaged) {
        damage(start);
    }
    const bool has_sampler = p.sampler != nullptr;
    const state before = look();
    start.sampler = p.sampler;
    spec_plan plan = {};
    spec_result result = {};
    plan.starts = &start;
    plan.n_starts = 1;
    const int32_t rc = spec_engine_step(f_.engine, &plan, &result);
    if (rc != SPEC_OK) {
        spec_sampler_free(p.sampler); // still the caller's
        REQUIRE(look() == before);
        return;
    }
    is_interrupted_ = false;
    const int32_t n = result.n_kept[0];
    REQUIRE(start.seq_id == id || is_damaged);
    REQUIRE(n == start.n_kept || n == 0);
    REQUIRE(n == 0 || start.tag == tag_of(start, from));
    REQUIRE(kind != 1 || !start.is_resumed || p.s.known.empty() || start.tag == p.s.tag);
    REQUIRE(spec_engine_seq_n_past(f_.engine, start.seq_id) == n);
    shadow & s = seqs_[start.seq_id];
    if (!has_sampler && n == 0) {
        s = {}; // its snapshot was refused
        return;
    }
    REQUIRE(has_sampler || !from.is_bare);
    s = started(start, n, has_sampler ? p.s : from.s, from);
    s.tag = start.tag;
}

} // namespace plan_fuzz
