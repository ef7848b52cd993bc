// Decodes and rounds of drafting by hand.
#include "plan/driver.hpp"

namespace plan_fuzz {

void driver::decode(bool is_valid) {
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

void driver::by_hand() {
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

void driver::round_by_hand() {
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

} // namespace plan_fuzz
