// plan_fuzz.cpp: engines under plans and calls that no honest caller would make.
//
// The input chooses an engine and a row of calls. A shadow of the engine makes valid plans, and
// most of them are then damaged in one place. Between the steps sequences are forked, saved and
// loaded, preempted, turned off from their drafter and turned on, and started again with what is
// kept of them, alone or in the plan of a step; drafts are given, steps run in a row. Whatever
// comes: no crash, a refused call changes nothing, nothing is gone on from under another tag, what
// a step reports agrees with what the engine says afterwards, and each token that a step chose has
// the probability that the target alone gives it after the tokens before it; a greedy one is the
// best.
#include "harness.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <utility>
#include <vector>

namespace {

constexpr int32_t N_SEQ = 4;
constexpr int32_t N_CALLS_MAX = 48;
constexpr size_t N_HELD_MAX = 3;     // preempted samplers, and snapshots
constexpr int32_t N_REFERENCE = 128; // > n_ctx_seq of every engine
constexpr float TIE_LOGITS = 0.05f;  // of two kernels over the same numbers

constexpr char DENSE[] = "tiny-mimo2-f16.gguf";
constexpr char HYBRID[] = "tiny-qwen35-f16.gguf";
constexpr char SIMPLE[] = "tiny-draft-f16.gguf";

struct engine_kind {
    const char * target;
    const char * draft; // a demo model; null for none
    int32_t draft_type;
    bool is_unified;
    int32_t n_rs_seq;
};

constexpr engine_kind ENGINES[] = {
    {DENSE, nullptr, SPEC_DRAFT_NONE, false, -1},
    {DENSE, nullptr, SPEC_DRAFT_MTP, false, -1},
    {DENSE, "tiny-mimo2-eagle3-f16.gguf", SPEC_DRAFT_EAGLE3, false, -1},
    {DENSE, SIMPLE, SPEC_DRAFT_SIMPLE, true, -1},
    {DENSE, nullptr, SPEC_DRAFT_NGRAM_CACHE, true, -1},
    {DENSE, "dflash.gguf", SPEC_DRAFT_DFLASH, false, -1},
    {DENSE, "dspark.gguf", SPEC_DRAFT_DSPARK, true, -1},
    {DENSE, nullptr, SPEC_DRAFT_NGRAM_SIMPLE, false, -1},
    {DENSE, nullptr, SPEC_DRAFT_NGRAM_MAP_K4V, true, -1},
    {HYBRID, nullptr, SPEC_DRAFT_NONE, true, -1},
    {HYBRID, nullptr, SPEC_DRAFT_MTP, false, -1},
    {HYBRID, "tiny-qwen35-eagle3-f16.gguf", SPEC_DRAFT_EAGLE3, false, -1},
    {HYBRID, SIMPLE, SPEC_DRAFT_SIMPLE, false, 0}, // rolls back through checkpoints
    {HYBRID, nullptr, SPEC_DRAFT_NGRAM_MOD, false, -1},
    {HYBRID, nullptr, SPEC_DRAFT_NGRAM_MAP_K, false, 0},
    {HYBRID, "dflash.gguf", SPEC_DRAFT_DFLASH, true, -1},
};
constexpr int32_t N_ENGINES = sizeof ENGINES / sizeof *ENGINES;

// The target alone, one sequence, no speculation: what its logits are after given tokens.
class reference {
public:
    explicit reference(const spec_model * target) {
        spec_decoder_params params;
        spec_decoder_default_params(&params);
        params.n_seq_max = 1;
        params.n_branch_max = 0;
        params.n_ctx_seq = params.n_outputs_max = params.n_batch = params.n_ubatch = N_REFERENCE;
        params.n_threads = 1;
        REQUIRE(spec_decoder_init(target, &params, &decoder_) == SPEC_OK);
        spec_decoder_limits limits;
        REQUIRE(spec_decoder_get_limits(decoder_, &limits) == SPEC_OK);
        n_vocab_ = static_cast<size_t>(limits.n_vocab);
    }

    reference(const reference &) = delete;
    reference & operator=(const reference &) = delete;
    ~reference() { spec_decoder_free(decoder_); }

    // Reads the tokens from the start; then `row(i)` is what comes after token i.
    void read(const std::vector<int32_t> & tokens) {
        REQUIRE(spec_decoder_seq_rollback(decoder_, 0, 0) == SPEC_OK);
        go_on(tokens);
    }

    const float * row(size_t i) const { return rows_.data() + i * n_vocab_; }

    // The likeliest token after token i.
    int32_t best(size_t i) const {
        return static_cast<int32_t>(std::max_element(row(i), row(i) + n_vocab_) - row(i));
    }

    // The likeliest n tokens after these, one after the other.
    std::vector<int32_t> follow(const std::vector<int32_t> & tokens, int32_t n) {
        read(tokens);
        std::vector<int32_t> next = {best(tokens.size() - 1)};
        while (static_cast<int32_t>(next.size()) < n) {
            go_on({next.back()});
            next.push_back(best(0));
        }
        return next;
    }

    float logprob(size_t i, int32_t token) const {
        const float * const logits = row(i);
        const float most = logits[best(i)];
        double sum = 0.0;
        for (size_t k = 0; k < n_vocab_; ++k) {
            sum += std::exp(static_cast<double>(logits[k] - most));
        }
        return logits[token] - most - static_cast<float>(std::log(sum));
    }

private:
    void go_on(const std::vector<int32_t> & tokens) {
        rows_.resize(tokens.size() * n_vocab_);
        REQUIRE(spec_decoder_decode(decoder_, 0, tokens.data(), static_cast<int32_t>(tokens.size()),
                                    true) == SPEC_OK);
        REQUIRE(spec_decoder_read(decoder_, SPEC_ROWS_LOGITS, rows_.data(), rows_.size()) ==
                SPEC_OK);
    }

    spec_decoder * decoder_ = nullptr;
    size_t n_vocab_ = 0;
    std::vector<float> rows_;
};

struct fixture {
    const spec_model * target;
    spec_engine * engine;
    reference * alone;
};

const spec_model * model_of(const std::string & name) {
    static std::map<std::string, const spec_model *> models;
    const spec_model *& model = models[name];
    if (model == nullptr) {
        model = load_demo(name.c_str());
    }
    return model;
}

reference * reference_of(const spec_model * target) {
    static std::map<const spec_model *, std::unique_ptr<reference>> references;
    std::unique_ptr<reference> & r = references[target];
    if (!r) {
        r = std::make_unique<reference>(target);
    }
    return r.get();
}

// Made at first use; kept, since a context costs more than a step.
fixture & engine_of(int32_t i) {
    static fixture fixtures[N_ENGINES] = {};
    fixture & f = fixtures[i];
    if (f.engine == nullptr) {
        const engine_kind & kind = ENGINES[i];
        f.target = model_of(kind.target);
        f.engine =
            make_demo_engine(f.target, kind.draft != nullptr ? model_of(kind.draft) : nullptr,
                             kind.draft_type, kind.is_unified, kind.n_rs_seq);
        f.alone = reference_of(f.target);
    }
    return f;
}

// A token that a step chose.
struct emission {
    int32_t pos;
    int32_t token;
    float logprob;
};

// What the caller knows of a sequence.
struct shadow {
    bool is_begun = false;
    bool has_emitted = false;
    bool is_greedy = false;
    bool is_warming_up = false; // turned on, and nothing but steps has touched it since
    int32_t last = 0;
    uint64_t tag = 0;
    std::vector<int32_t> known;      // resumed: what must be computed again, up to the last token
    bool is_exact = true;            // false: not all of it is known here, so plans may be refused
    std::vector<emission> emissions; // those whose tokens before are still the sequence's

    // The tokens from position n on are others now, or may be.
    void forget_from(int32_t n) {
        is_warming_up = false;
        emissions.erase(std::remove_if(emissions.begin(), emissions.end(),
                                       [n](const emission & e) { return e.pos > n; }),
                        emissions.end());
    }
};

struct preempted_sampler {
    spec_sampler * sampler = nullptr;
    shadow s;
};

struct saved_sequence {
    std::vector<uint8_t> bytes;
    bool is_bare = false; // it holds no sampler
    int32_t n_past = 0;
    shadow s;
};

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
            call(in_.below(33));
        }
        for (int32_t id = 0; id < N_SEQ; ++id) {
            compare(id);
        }
    }

private:
    using state = std::vector<int32_t>;

    state look() const {
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

    void call(int32_t kind) {
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
        default:
            ask();
        }
    }

    static shadow begun_anew(bool is_greedy) {
        shadow s;
        s.is_begun = true;
        s.is_greedy = is_greedy;
        return s;
    }

    void begin(int32_t id) {
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

    void end(int32_t id) {
        REQUIRE(spec_engine_seq_end(f_.engine, id) == SPEC_OK);
        REQUIRE(spec_engine_seq_n_past(f_.engine, id) == 0);
        seqs_[id] = {};
    }

    void odd_ids() {
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

    void fault() {
        const int32_t kind = in_.below(SPEC_FAULT_COUNT);
        REQUIRE(spec_engine_inject_fault(f_.engine, kind, in_.below(3)) == SPEC_OK);
        has_fault_ = has_fault_ || kind != SPEC_FAULT_NONE;
        REQUIRE(spec_engine_inject_fault(f_.engine, SPEC_FAULT_COUNT + in_.below(100), 1) ==
                SPEC_ERR_INVALID_ARGUMENT);
    }

    void rollback() {
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

    // The tokens of a sequence and, once it has chosen one, the last.
    std::vector<int32_t> tokens_of(int32_t id) const {
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

    // What a sampler that leaves its sequence knows of it.
    shadow history_of(int32_t id) const {
        shadow s = seqs_[id];
        s.is_warming_up = false;
        const int32_t n_past = spec_engine_seq_n_past(f_.engine, id);
        if (static_cast<int32_t>(s.known.size()) <= n_past) {
            s.known = tokens_of(id);
        }
        return s;
    }

    template <typename T> void hold(std::vector<T> & all, T one) {
        all.push_back(std::move(one));
        if (all.size() > N_HELD_MAX) {
            all.erase(all.begin());
        }
    }

    void preempt() {
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

    void save() {
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

    static void * give_room(int32_t /*i*/, size_t n, void * user) {
        auto & bytes = *static_cast<std::vector<uint8_t> *>(user);
        REQUIRE(n < bytes.size()); // of the whole
        bytes.resize(n);
        return bytes.data();
    }

    bool save_by_plan(int32_t id, saved_sequence & saved) {
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

    // One of the snapshots, now and then damaged; damage shows in n_past -1.
    saved_sequence a_snapshot() {
        if (saved_.empty()) {
            return {};
        }
        saved_sequence b =
            saved_[static_cast<size_t>(in_.below(static_cast<int32_t>(saved_.size())))];
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

    void load() {
        const saved_sequence from = a_snapshot();
        const int32_t id = in_.below(N_SEQ);
        const state before = look();
        const int32_t rc =
            spec_engine_seq_load(f_.engine, id, from.bytes.data(), from.bytes.size());
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

    void fork() {
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

    // Lets a sequence go from its drafter, or takes it up.
    void turn(int32_t id) {
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
    void compare(int32_t id) {
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

    void ask() {
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
        REQUIRE(spec_sampler_get_history(nullptr, &n_known, &has_chosen) ==
                SPEC_ERR_INVALID_ARGUMENT);
        REQUIRE(look() == before);
    }

    // Where a start takes its tokens from: nowhere, the slot itself, another one, a snapshot.
    spec_start make_start(int32_t id, const saved_sequence & from) {
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

    // Of the tokens that a start would keep.
    uint64_t tag_of(const spec_start & start, const saved_sequence & from) const {
        return start.snapshot != nullptr ? from.s.tag
               : start.source >= 0       ? seqs_[start.source].tag
                                         : seqs_[start.seq_id].tag;
    }

    void damage(spec_start & start) {
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

    // What is known of a sequence after a start that kept n tokens.
    shadow started(const spec_start & start, int32_t n, const shadow & s,
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

    void start() {
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

    // A valid plan of random sequences, in `entries_` and `tokens_`; of a run all generate.
    void make_plan(bool is_run) {
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
            e.n_tokens = n_again == 0 ? 1 + in_.below(12)
                         : is_run     ? n_again
                                      : 1 + in_.below(n_again);
            const bool is_last = s.has_emitted && e.n_tokens == n_again;
            e.is_output =
                is_last || (is_run && !s.has_emitted) || (n_again == 0 && in_.below(3) != 0);
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

    // A draft of the caller's own; one in four is what the target will choose.
    void give(int32_t id, int32_t n) {
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

    void damage_draft() {
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

    void damage() {
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

    // Frees sequences that the plan has no entry for, and turns drafters, of which some may have
    // one.
    void add_moves(spec_plan & plan, bool is_valid) {
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

    // What a plan's moves have made of the sequences.
    void note_moves() {
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

    void step(bool is_valid) {
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
            REQUIRE(rc == SPEC_ERR_BAD_PLAN || rc == SPEC_ERR_BAD_SEQ_ID ||
                    rc == SPEC_ERR_SEQ_IDLE || rc == SPEC_ERR_INVALID_ARGUMENT);
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

    // A run ends before its last step for a reason; a plan without entries has nothing to go on
    // with.
    void check_run(const spec_plan & plan, const spec_result & result) {
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

    void check(const spec_plan_entry & e, const spec_result_entry & r, const spec_result & result) {
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

    // What was accepted of an external draft is what was given.
    void check_external(const spec_result_entry & r, const spec_result & result) {
        const auto d = std::find_if(drafts_.begin(), drafts_.end(),
                                    [&](const auto & one) { return one.seq_id == r.seq_id; });
        REQUIRE(d != drafts_.end() && r.n_drafted > 0 && r.n_drafted <= d->n_tokens);
        REQUIRE(std::equal(tokens_.begin() + d->token_offset,
                           tokens_.begin() + d->token_offset + r.n_accepted,
                           result.tokens + r.token_offset));
    }

    void check_cells() {
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

    void decode(bool is_valid) {
        std::vector<spec_token> tokens;
        const int32_t n_seqs = 1 + in_.below(2);
        for (int32_t i = 0; i < n_seqs; ++i) {
            const int32_t id = in_.below(N_SEQ);
            const int32_t n_past = spec_engine_seq_n_past(f_.engine, id);
            const int32_t n = 1 + in_.below(6);
            for (int32_t k = 0; k < n; ++k) {
                tokens.push_back({id, n_past + k, 300 + in_.below(6), in_.below(2)});
            }
        }
        if (!is_valid) {
            spec_token & t =
                tokens[static_cast<size_t>(in_.below(static_cast<int32_t>(tokens.size())))];
            int32_t * const fields[] = {&t.seq_id, &t.pos, &t.token, &t.is_output};
            *fields[in_.below(4)] = in_.wild();
        }
        unfeed();
        const state before = look();
        const int32_t rc =
            spec_engine_decode(f_.engine, tokens.data(), static_cast<int32_t>(tokens.size()));
        if (rc == SPEC_OK) {
            is_by_hand_ = true;
            for (const spec_token & t : tokens) {
                seqs_[t.seq_id].forget_from(before[static_cast<size_t>(t.seq_id)]);
            }
        } else if (rc == SPEC_ERR_DECODE_FAILED) {
            REQUIRE(has_fault_);
            for (const spec_token & t : tokens) {
                seqs_[t.seq_id] = {};
            }
        } else {
            REQUIRE(look() == before);
        }
    }

    void by_hand() {
        const state before = look();
        const float * logits = nullptr;
        int32_t token = -1;
        const int32_t id = in_.below(N_SEQ);
        const int32_t i = in_.below(2) == 0 ? in_.wild() : in_.below(16);
        switch (in_.below(4)) {
        case 0:
            if (spec_engine_logits(f_.engine, i, &logits) == SPEC_OK) {
                REQUIRE(std::isfinite(logits[0]) && std::isfinite(logits[limits_.n_vocab - 1]));
            }
            break;
        case 1:
            if (spec_engine_seq_sample(f_.engine, id, i, &token) == SPEC_OK) {
                REQUIRE(token >= 0 && token < limits_.n_vocab);
            }
            break;
        case 2:
            spec_engine_process(f_.engine);
            is_by_hand_ = true;
            return; // it may write rows of the draft's cache, and end a wait for the drafter
        default:
            if (spec_engine_seq_accept(f_.engine, id, i) == SPEC_OK) {
                is_by_hand_ = true;
                return;
            }
        }
        REQUIRE(look() == before);
    }

    void maybe_turn(int32_t id) {
        if (in_.below(8) == 0) {
            turn(id);
        }
    }

    // draft -> decode -> process -> accept, sometimes with a part left out.
    void round_by_hand() {
        const int32_t id = in_.below(N_SEQ);
        const int32_t n_past = spec_engine_seq_n_past(f_.engine, id);
        const int32_t n_draft = 1 + in_.below(std::max(limits_.n_draft_max, 1));
        const spec_draft_request request = {id, n_past, 300 + in_.below(6),
                                            in_.below(8) == 0 ? in_.wild() : n_draft};
        std::vector<int32_t> drafted(static_cast<size_t>(limits_.n_draft_max) + 1);
        int32_t count = 0;
        if (spec_engine_seq_draft(f_.engine, &request, 1, drafted.data(), &count) != SPEC_OK) {
            return;
        }
        is_by_hand_ = true;
        REQUIRE(count >= 0 && count <= request.n_draft);
        std::vector<spec_token> tokens = {{id, n_past, request.id_last, 1}};
        for (int32_t k = 0; k < count; ++k) {
            tokens.push_back({id, n_past + 1 + k, drafted[static_cast<size_t>(k)], 1});
        }
        tokens.resize(tokens.size() - static_cast<size_t>(in_.below(count + 1)));
        maybe_turn(id);
        if (in_.below(8) == 0) {
            return; // leaves the proposal open
        }
        const int32_t n = static_cast<int32_t>(tokens.size());
        const int32_t rc = spec_engine_decode(f_.engine, tokens.data(), n);
        if (rc == SPEC_OK) {
            seqs_[id].forget_from(n_past);
        } else if (rc == SPEC_ERR_DECODE_FAILED) {
            seqs_[id] = {};
        }
        if (rc != SPEC_OK || in_.below(8) == 0) {
            return;
        }
        maybe_turn(id);
        spec_engine_process(f_.engine);
        maybe_turn(id);
        const int32_t n_accepted = in_.below(n + 1);
        const int32_t accepted = spec_engine_seq_accept(f_.engine, id, n_accepted);
        REQUIRE(accepted != SPEC_OK ||
                spec_engine_seq_n_past(f_.engine, id) == n_past + 1 + n_accepted);
        if (accepted == SPEC_ERR_DECODE_FAILED) {
            seqs_[id] = {};
        }
    }

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

} // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t * data, size_t size) {
    if (size < 2) {
        return 0;
    }
    choices input(data, size);
    driver(engine_of(input.below(N_ENGINES)), input).run();
    return 0;
}
