// sampling_test.cpp: many sequences of one step choose their tokens on several threads at once,
// under ThreadSanitizer: by rejection, by matching, with grammars, penalties and log-probabilities.
#include "harness.h"

#include <vector>

namespace {

constexpr int32_t N_SEQ = 16;
constexpr int32_t N_STEPS = 6;

spec_engine * make_engine(const spec_model * target, const spec_model * draft, int32_t draft_type) {
    spec_engine_params params;
    spec_engine_default_params(&params);
    params.draft_type = draft_type;
    params.n_ctx_seq = 128;
    params.n_batch = 256;
    params.n_ubatch = 256;
    params.n_seq_max = N_SEQ;
    params.n_threads = N_THREADS;
    params.probabilistic = true;
    spec_engine * engine = nullptr;
    REQUIRE(spec_engine_init(target, draft, &params, &engine) == SPEC_OK);
    return engine;
}

// Of every kind of sampler that has code of its own in cext/spec, and of llama.cpp's.
spec_sampler * sampler_of(const spec_model * target, int32_t i) {
    spec_sampler_params params;
    spec_sampler_default_params(&params);
    params.seed = static_cast<uint32_t>(i);
    params.temperature = i % 4 == 0 ? 0.0f : 1.0f;
    params.top_k = i % 4 == 1 ? 8 : 0;
    params.penalty_repeat = i % 4 == 2 ? 1.2f : 1.0f;
    params.grammar = i % 4 == 3 ? "root ::= [a-zA-Z ,.\\n]*" : "";
    params.logprobs = i % 2 == 0;
    params.n_top_logprobs = i % 3;
    spec_sampler * sampler = nullptr;
    REQUIRE(spec_sampler_init(target, &params, &sampler) == SPEC_OK);
    return sampler;
}

struct stream {
    int32_t last = 300;
    int32_t n_past = 0;
};

void begin(spec_engine * engine, const spec_model * target, int32_t id, stream & s) {
    s = {300 + id, 0};
    REQUIRE(spec_engine_seq_end(engine, id) == SPEC_OK);
    spec_sampler * sampler = sampler_of(target, id);
    REQUIRE(spec_engine_seq_begin(engine, id, &sampler) == SPEC_OK);
}

// Returns the tokens emitted.
int32_t step(spec_engine * engine, const spec_model * target, std::vector<stream> & streams) {
    std::vector<spec_plan_entry> entries;
    std::vector<int32_t> tokens;
    for (int32_t id = 0; id < N_SEQ; ++id) {
        stream & s = streams[static_cast<size_t>(id)];
        if (s.n_past == 0) {
            begin(engine, target, id, s);
        }
        entries.push_back({id, s.n_past, id, 1, s.n_past > 0 ? 3 : 0, 1});
        tokens.push_back(s.last);
    }
    const spec_plan plan = {entries.data(), N_SEQ, tokens.data(), N_SEQ};
    spec_result result = {};
    REQUIRE(spec_engine_step(engine, &plan, &result) == SPEC_OK);
    for (int32_t id = 0; id < N_SEQ; ++id) {
        const spec_result_entry & r = result.entries[id];
        REQUIRE(r.status == SPEC_OK);
        const bool is_over = r.n_past > 100 || (r.flags & SPEC_RESULT_EOG) != 0;
        streams[static_cast<size_t>(id)] = {result.tokens[r.token_offset + r.n_tokens - 1],
                                            is_over ? 0 : r.n_past};
    }
    return result.n_tokens;
}

void drive(const spec_model * target, const spec_model * draft, int32_t draft_type) {
    spec_engine * engine = make_engine(target, draft, draft_type);
    std::vector<stream> streams(N_SEQ);
    int32_t n = 0;
    for (int32_t i = 0; i < N_STEPS; ++i) {
        n += step(engine, target, streams);
    }
    REQUIRE(n > N_SEQ * N_STEPS); // some drafts were accepted
    spec_engine_free(engine);
}

} // namespace

int main() {
    spec_model * dense = load_demo("tiny-mimo2-f16.gguf");
    spec_model * hybrid = load_demo("tiny-qwen35-f16.gguf");
    spec_model * draft = load_demo("tiny-draft-f16.gguf");
    drive(dense, nullptr, SPEC_DRAFT_MTP);
    drive(dense, draft, SPEC_DRAFT_SIMPLE);
    drive(hybrid, nullptr, SPEC_DRAFT_MTP);
    spec_model_free(draft);
    spec_model_free(hybrid);
    spec_model_free(dense);
    std::puts("sampling: done");
    return 0;
}
