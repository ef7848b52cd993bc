// plan_fuzz.cpp: engines under plans and calls that no honest caller would make.
//
// The input chooses an engine and a row of calls. A shadow of the engine makes valid plans, and
// most of them are then damaged in one place. Whatever comes: no crash, a refused call changes
// nothing, and what a step reports agrees with what the engine says afterwards.
#include "harness.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace {

constexpr int32_t N_SEQ = 4;
constexpr int32_t N_CALLS_MAX = 48;
constexpr int32_t N_ENGINES = 9;

struct fixture {
    const spec_model * target;
    spec_engine * engine;
};

// Made at first use; kept, since a context costs more than a step.
fixture & engine_of(int32_t i) {
    static const spec_model * dense = load_demo("tiny-mimo2-f16.gguf");
    static const spec_model * hybrid = load_demo("tiny-qwen35-f16.gguf");
    static const spec_model * draft = load_demo("tiny-draft-f16.gguf");
    static const spec_model * eagle_dense = load_demo("tiny-mimo2-eagle3-f16.gguf");
    static const spec_model * eagle_hybrid = load_demo("tiny-qwen35-eagle3-f16.gguf");
    static fixture fixtures[N_ENGINES] = {};
    fixture & f = fixtures[i];
    if (f.engine == nullptr) {
        const bool is_hybrid = i >= 5;
        f.target = is_hybrid ? hybrid : dense;
        switch (i) {
        case 0:
            f.engine = make_demo_engine(dense, nullptr, SPEC_DRAFT_NONE);
            break;
        case 1:
            f.engine = make_demo_engine(dense, nullptr, SPEC_DRAFT_MTP);
            break;
        case 2:
            f.engine = make_demo_engine(dense, eagle_dense, SPEC_DRAFT_EAGLE3);
            break;
        case 3:
            f.engine = make_demo_engine(dense, draft, SPEC_DRAFT_SIMPLE, true);
            break;
        case 4:
            f.engine = make_demo_engine(dense, nullptr, SPEC_DRAFT_NGRAM_CACHE, true);
            break;
        case 5:
            f.engine = make_demo_engine(hybrid, nullptr, SPEC_DRAFT_MTP);
            break;
        case 6:
            f.engine = make_demo_engine(hybrid, draft, SPEC_DRAFT_SIMPLE);
            break;
        case 7:
            f.engine = make_demo_engine(hybrid, eagle_hybrid, SPEC_DRAFT_EAGLE3);
            break;
        default:
            f.engine = make_demo_engine(hybrid, nullptr, SPEC_DRAFT_NGRAM_MOD);
        }
    }
    return f;
}

// What the caller knows of a sequence.
struct shadow {
    bool is_begun = false;
    bool has_emitted = false;
    int32_t last = 0;
};

class driver {
public:
    driver(fixture & f, choices & input) : f_(f), in_(input) {
        REQUIRE(spec_engine_get_limits(f.engine, &limits_) == SPEC_OK);
        REQUIRE(spec_engine_inject_fault(f.engine, SPEC_FAULT_NONE, 0) == SPEC_OK);
        spec_engine_process(f.engine); // what an earlier input left decoded
        for (int32_t id = 0; id < N_SEQ; ++id) {
            end(id);
        }
        REQUIRE(spec_engine_n_cells_used(f.engine) == 0);
    }

    void run() {
        for (int32_t i = 0; i < N_CALLS_MAX && !in_.is_empty(); ++i) {
            call(in_.below(20));
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
        return s;
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
            step(true);
            break;
        default:
            step(false);
        }
    }

    void begin(int32_t id) {
        const state before = look();
        spec_sampler * sampler = greedy(f_.target, in_.below(2) == 0 ? 0.0f : 1.0f);
        const int32_t rc = spec_engine_seq_begin(f_.engine, id, &sampler);
        REQUIRE(sampler == nullptr);
        // By hand a batch may wait for process, with tokens of the former sequence of this id.
        REQUIRE(rc == (seqs_[id].is_begun ? SPEC_ERR_SEQ_BUSY : SPEC_OK) ||
                (rc == SPEC_ERR_BAD_PLAN && is_by_hand_));
        if (rc == SPEC_OK) {
            seqs_[id] = {true, false, 0};
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
        REQUIRE(look() == before);
    }

    void fault() {
        const int32_t kind = in_.below(5);
        REQUIRE(spec_engine_inject_fault(f_.engine, kind, in_.below(3)) == SPEC_OK);
        has_fault_ = has_fault_ || kind != SPEC_FAULT_NONE;
        REQUIRE(spec_engine_inject_fault(f_.engine, 5 + in_.below(100), 1) ==
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
        }
    }

    // A valid plan of random sequences, in `entries_` and `tokens_`.
    void make_plan() {
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
            e.n_tokens = s.has_emitted ? 1 : 1 + in_.below(12);
            e.is_output = s.has_emitted || in_.below(3) != 0;
            e.n_draft = s.has_emitted ? in_.below(limits_.n_draft_max + 1) : 0;
            if (e.n_past + e.n_tokens + e.n_draft > limits_.n_ctx_seq ||
                e.n_tokens + e.n_draft > n_left) {
                end(id); // full: it makes room for the next
                continue;
            }
            n_left -= e.n_tokens + e.n_draft;
            for (int32_t k = 0; k < e.n_tokens; ++k) {
                // Few different tokens, so that n-gram drafters find something.
                tokens_.push_back(s.has_emitted ? s.last : 300 + in_.below(6));
            }
            entries_.push_back(e);
            if (e.n_draft > 0 && in_.below(2) == 0) {
                give(id, 1 + in_.below(e.n_draft));
            }
        }
    }

    // A draft of the caller's own.
    void give(int32_t id, int32_t n) {
        drafts_.push_back({id, static_cast<int32_t>(tokens_.size()), n});
        for (int32_t k = 0; k < n; ++k) {
            tokens_.push_back(in_.below(limits_.n_vocab));
        }
    }

    void damage_draft() {
        if (drafts_.empty()) {
            give(in_.below(N_SEQ), 1);
            return;
        }
        spec_given_draft & d =
            drafts_[static_cast<size_t>(in_.below(static_cast<int32_t>(drafts_.size())))];
        switch (in_.below(4)) {
        case 0:
            d.seq_id = in_.wild();
            break;
        case 1:
            d.token_offset = in_.wild();
            break;
        case 2:
            d.n_tokens = in_.wild();
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

    void step(bool is_valid) {
        make_plan();
        spec_plan plan = {};
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
        const state before = look();
        spec_result result = {};
        const int32_t rc = spec_engine_step(f_.engine, &plan, &result);
        if (rc != SPEC_OK) {
            REQUIRE(rc == SPEC_ERR_BAD_PLAN || rc == SPEC_ERR_BAD_SEQ_ID ||
                    rc == SPEC_ERR_SEQ_IDLE || rc == SPEC_ERR_INVALID_ARGUMENT);
            REQUIRE(!is_valid || is_by_hand_ || rc == SPEC_ERR_BAD_PLAN);
            REQUIRE(spec_last_error()[0] != '\0');
            REQUIRE(look() == before);
            return;
        }
        REQUIRE(result.n_entries == plan.n_entries);
        for (int32_t i = 0; i < result.n_entries; ++i) {
            check(plan.entries[i], result.entries[i], result);
        }
        check_cells();
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
            REQUIRE(r.n_past == 0 && r.n_tokens == 0);
            s = {};
            return;
        }
        REQUIRE(r.n_drafted <= e.n_draft && r.n_accepted <= r.n_drafted && r.n_accepted >= 0);
        REQUIRE(r.n_tokens == (e.is_output != 0 ? r.n_accepted + 1 : 0));
        REQUIRE(r.n_past == e.n_past + e.n_tokens + r.n_accepted);
        REQUIRE(r.token_offset >= 0 && r.token_offset + r.n_tokens <= result.n_tokens);
        for (int32_t k = r.token_offset; k < r.token_offset + r.n_tokens; ++k) {
            REQUIRE(result.tokens[k] >= 0 && result.tokens[k] < limits_.n_vocab);
            REQUIRE(result.logprobs[k] <= 1e-4f);
            s.last = result.tokens[k];
            s.has_emitted = true;
        }
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
        const state before = look();
        const int32_t rc =
            spec_engine_decode(f_.engine, tokens.data(), static_cast<int32_t>(tokens.size()));
        if (rc == SPEC_OK) {
            is_by_hand_ = true;
            // A generating sequence has moved on: what it emitted last is decoded.
            n_decoded_ = static_cast<int32_t>(tokens.size());
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
            return; // it may write rows of the draft's cache
        default:
            if (spec_engine_seq_accept(f_.engine, id, i) == SPEC_OK) {
                is_by_hand_ = true;
                return;
            }
        }
        REQUIRE(look() == before);
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
        REQUIRE(count >= 0 && count <= n_draft);
        std::vector<spec_token> tokens = {{id, n_past, request.id_last, 1}};
        for (int32_t k = 0; k < count; ++k) {
            tokens.push_back({id, n_past + 1 + k, drafted[static_cast<size_t>(k)], 1});
        }
        tokens.resize(tokens.size() - static_cast<size_t>(in_.below(count + 1)));
        if (in_.below(8) == 0) {
            return; // leaves the proposal open
        }
        const int32_t n = static_cast<int32_t>(tokens.size());
        const int32_t rc = spec_engine_decode(f_.engine, tokens.data(), n);
        if (rc == SPEC_ERR_DECODE_FAILED) {
            seqs_[id] = {};
        }
        if (rc != SPEC_OK || in_.below(8) == 0) {
            return;
        }
        spec_engine_process(f_.engine);
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
    bool has_fault_ = false;
    bool is_by_hand_ = false; // sequences moved without a step: a valid plan may be refused
    int32_t n_decoded_ = 0;
    std::vector<spec_plan_entry> entries_;
    std::vector<spec_given_draft> drafts_;
    std::vector<int32_t> tokens_;
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
