// handover_test.cpp: one engine that two threads use in turn, under ThreadSanitizer.
//
// A mutex is all that stands between the two, as between the server's engine thread and the one
// that closes it. Every other turn is a run of steps. Meanwhile others interrupt it, tokenise,
// format and build samplers from the same model.
#include "harness.h"

#include <atomic>
#include <mutex>
#include <thread>
#include <vector>

namespace {

constexpr int32_t N_ROUNDS = 60;

struct table {
    std::mutex mutex;
    const spec_model * target = nullptr;
    spec_engine * engine = nullptr;
    int32_t last = 300;
    int32_t n_past = 0;
    int32_t rounds = 0;
    bool is_over = false;
};

void take_step(table & t) {
    if (t.n_past == 0) {
        spec_sampler * sampler = greedy(t.target, 0.8f);
        REQUIRE(spec_engine_seq_begin(t.engine, 0, &sampler) == SPEC_OK);
    }
    const bool is_run = t.rounds % 2 == 0;
    const spec_plan_entry entry = {0, t.n_past, 0, 1, t.n_past > 0 && !is_run ? 3 : 0, 1};
    const spec_plan plan = {&entry, 1, &t.last, 1, nullptr, 0, is_run ? 4 : 1};
    spec_result result = {};
    REQUIRE(spec_engine_step(t.engine, &plan, &result) == SPEC_OK);
    REQUIRE(result.entries[0].status == SPEC_OK);
    t.n_past = result.entries[0].n_past;
    t.last = result.tokens[result.n_tokens - 1];
    if (t.n_past > 60 || (result.entries[0].flags & SPEC_RESULT_EOG) != 0) {
        REQUIRE(spec_engine_seq_end(t.engine, 0) == SPEC_OK);
        t.n_past = 0;
        t.last = 300;
    }
}

void drive(table & t) {
    for (;;) {
        const std::lock_guard<std::mutex> lock(t.mutex);
        if (t.rounds++ >= N_ROUNDS) {
            t.is_over = true;
            return;
        }
        take_step(t);
    }
}

void talk(const spec_model * model, spec_engine * engine, std::atomic<bool> & is_over) {
    while (!is_over.load()) {
        spec_engine_interrupt(engine);
        int32_t tokens[64];
        size_t n = 0;
        REQUIRE(spec_model_tokenize(model, "the river and the mill", 22, true, true, tokens, 64,
                                    &n) == SPEC_OK);
        char buf[64];
        REQUIRE(spec_model_token_bytes(model, tokens[0], true, buf, sizeof buf, &n) == SPEC_OK);
        spec_sampler_params params;
        spec_sampler_default_params(&params);
        params.grammar = "root ::= [a-z]+";
        spec_sampler * sampler = nullptr;
        REQUIRE(spec_sampler_init(model, &params, &sampler) == SPEC_OK);
        spec_sampler_free(sampler);
        params.grammar = "root ::= (";
        REQUIRE(spec_sampler_init(model, &params, &sampler) == SPEC_ERR_BAD_GRAMMAR);
        REQUIRE(spec_last_error()[0] != '\0');
    }
}

} // namespace

int main() {
    table t;
    t.target = load_demo("tiny-qwen35-f16.gguf");
    t.engine = make_demo_engine(t.target, nullptr, SPEC_DRAFT_MTP);
    std::atomic<bool> is_over{false};
    std::vector<std::thread> talkers;
    for (int i = 0; i < 2; ++i) {
        talkers.emplace_back([&] { talk(t.target, t.engine, is_over); });
    }
    std::thread first([&] { drive(t); });
    std::thread second([&] { drive(t); });
    first.join();
    second.join();
    is_over = true;
    for (std::thread & talker : talkers) {
        talker.join();
    }
    spec_engine_free(t.engine);
    spec_model_free(const_cast<spec_model *>(t.target));
    std::puts("handover: done");
    return 0;
}
