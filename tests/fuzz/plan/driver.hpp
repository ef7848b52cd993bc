// Drives one engine by an input: calls, plans and damage, each checked against a shadow of the
// engine.
#ifndef DRAFTHOUSE_FUZZ_PLAN_DRIVER_HPP
#define DRAFTHOUSE_FUZZ_PLAN_DRIVER_HPP

#include "plan/engines.hpp"

namespace plan_fuzz {

class driver {
public:
    driver(fixture & f, choices & input) : f_(f), in_(input) {
        REQUIRE(spec_engine_get_limits(f.engine, &limits_) == SPEC_OK);
        REQUIRE(spec_engine_inject_fault(f.engine, SPEC_FAULT_NONE, 0) == SPEC_OK);
        spec_engine_process(f.engine); // what an earlier input left decoded
        const spec_plan nothing = {};
        spec_result result = {};
        REQUIRE(spec_engine_step(f.engine, &nothing, &result) == SPEC_OK); // takes an interrupt
        for (int32_t id = 0; id < N_SEQ; ++id) {
            end(id);
        }
        REQUIRE(spec_engine_n_cells_used(f.engine) == 0);
    }

    driver(const driver &) = delete;
    driver & operator=(const driver &) = delete;

    ~driver() {
        for (const preempted_sampler & p : preempted_) {
            spec_sampler_free(p.sampler);
        }
    }

    void run() {
        for (int32_t i = 0; i < N_CALLS_MAX && !in_.is_empty(); ++i) {
            call(in_.below(34));
        }
        for (int32_t id = 0; id < N_SEQ; ++id) {
            compare(id);
        }
    }

private:
    using state = std::vector<int32_t>;

    state look() const;

    bool is_cold(int32_t id) const {
        bool is_cold = false;
        REQUIRE(spec_engine_seq_is_cold(f_.engine, id, &is_cold) ==
                (seqs_[id].is_begun ? SPEC_OK : SPEC_ERR_SEQ_IDLE));
        return is_cold;
    }

    bool is_ngram() const {
        return limits_.draft_type >= SPEC_DRAFT_NGRAM_SIMPLE &&
               limits_.draft_type <= SPEC_DRAFT_NGRAM_CACHE;
    }

    void call(int32_t kind);

    static shadow begun_anew(bool is_greedy) {
        shadow s;
        s.is_begun = true;
        s.is_greedy = is_greedy;
        return s;
    }

    void begin(int32_t id);

    void end(int32_t id) {
        REQUIRE(spec_engine_seq_end(f_.engine, id) == SPEC_OK);
        REQUIRE(spec_engine_seq_n_past(f_.engine, id) == 0);
        seqs_[id] = {};
    }

    void odd_ids();

    void fault() {
        const int32_t kind = in_.below(SPEC_FAULT_COUNT);
        REQUIRE(spec_engine_inject_fault(f_.engine, kind, in_.below(3)) == SPEC_OK);
        has_fault_ = has_fault_ || kind != SPEC_FAULT_NONE;
        REQUIRE(spec_engine_inject_fault(f_.engine, SPEC_FAULT_COUNT + in_.below(100), 1) ==
                SPEC_ERR_INVALID_ARGUMENT);
    }

    void rollback();

    // The tokens of a sequence and, once it has chosen one, the last.
    std::vector<int32_t> tokens_of(int32_t id) const;

    // What a sampler that leaves its sequence knows of it.
    shadow history_of(int32_t id) const;

    template <typename T> void hold(std::vector<T> & all, T one) {
        all.push_back(std::move(one));
        if (all.size() > N_HELD_MAX) {
            all.erase(all.begin());
        }
    }

    void preempt();

    void save();

    static void * give_room(int32_t /*i*/, size_t n, void * user) {
        auto & bytes = *static_cast<std::vector<uint8_t> *>(user);
        REQUIRE(n < bytes.size()); // of the whole
        bytes.resize(n);
        return bytes.data();
    }

    bool save_by_plan(int32_t id, saved_sequence & saved);

    // One of the snapshots, now and then damaged; damage shows in n_past -1.
    saved_sequence a_snapshot();

    void load();

    void fork();

    // Lets a sequence go from its drafter, or takes it up.
    void turn(int32_t id);

    // While it is so, every decode finds all sequences turned off: after some of them the target
    // gives no rows for the drafter.
    void unfeed() {
        for (int32_t id = 0; id < N_SEQ && is_unfed_; ++id) {
            REQUIRE(spec_engine_seq_drafts_off(f_.engine, id) ==
                    (seqs_[id].is_begun ? SPEC_OK : SPEC_ERR_SEQ_IDLE));
            seqs_[id].is_warming_up = false;
        }
    }

    // Whether the target alone would have chosen what a sequence's steps chose.
    void compare(int32_t id);

    void change_threads();
    void ask();

    // Where a start takes its tokens from: nowhere, the slot itself, another one, a snapshot.
    spec_start make_start(int32_t id, const saved_sequence & from);

    // Of the tokens that a start would keep.
    uint64_t tag_of(const spec_start & start, const saved_sequence & from) const {
        return start.snapshot != nullptr ? from.s.tag
               : start.source >= 0       ? seqs_[start.source].tag
                                         : seqs_[start.seq_id].tag;
    }

    void damage(spec_start & start);

    // What is known of a sequence after a start that kept n tokens.
    shadow started(const spec_start & start, int32_t n, const shadow & s,
                   const saved_sequence & from) const;

    void start();

    // A valid plan of random sequences, in `entries_` and `tokens_`; of a run all generate.
    void make_plan(bool is_run);

    // A draft of the caller's own; one in four is what the target will choose.
    void give(int32_t id, int32_t n);

    void damage_draft();

    void damage();

    // Frees sequences that the plan has no entry for, and turns drafters, of which some may have
    // one.
    void add_moves(spec_plan & plan, bool is_valid);

    // What a plan's moves have made of the sequences.
    void note_moves();

    void step(bool is_valid);

    // A run ends before its last step for a reason; a plan without entries has nothing to go on
    // with.
    void check_run(const spec_plan & plan, const spec_result & result);

    void check(const spec_plan_entry & e, const spec_result_entry & r, const spec_result & result);

    // What was accepted of an external draft is what was given.
    void check_external(const spec_result_entry & r, const spec_result & result) {
        const auto d = std::find_if(drafts_.begin(), drafts_.end(),
                                    [&](const auto & one) { return one.seq_id == r.seq_id; });
        REQUIRE(d != drafts_.end() && r.n_drafted > 0 && r.n_drafted <= d->n_tokens);
        REQUIRE(std::equal(tokens_.begin() + d->token_offset,
                           tokens_.begin() + d->token_offset + r.n_accepted,
                           result.tokens + r.token_offset));
    }

    void check_cells();

    void decode(bool is_valid);

    void by_hand();

    void maybe_turn(int32_t id) {
        if (in_.below(8) == 0) {
            turn(id);
        }
    }

    // draft -> decode -> process -> accept, sometimes with a part left out.
    void round_by_hand();

    fixture & f_;
    choices & in_;
    spec_engine_limits limits_ = {};
    shadow seqs_[N_SEQ];
    std::vector<preempted_sampler> preempted_;
    std::vector<saved_sequence> saved_;
    bool is_cold_[N_SEQ] = {};
    bool has_fault_ = false;
    bool is_interrupted_ = false;
    bool is_unfed_ = false;
    bool is_by_hand_ = false; // sequences moved without a step: a valid plan may be refused
    std::vector<spec_plan_entry> entries_;
    std::vector<spec_external_draft> drafts_;
    std::vector<int32_t> tokens_;
    std::vector<int32_t> frees_;
    std::vector<int32_t> drafts_off_;
    std::vector<int32_t> drafts_on_;
};

} // namespace plan_fuzz

#endif
