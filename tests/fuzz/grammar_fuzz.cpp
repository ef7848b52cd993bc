// grammar_fuzz.cpp: any bytes as a grammar. It is refused with BAD_GRAMMAR, or it compiles and up
// to three tokens are chosen under it; nothing else may happen.
#include "harness.h"

#include <string>

namespace {

constexpr int32_t N_TOKENS = 3;

const spec_model * target() {
    static const spec_model * model = load_demo("tiny-mimo2-f16.gguf");
    return model;
}

spec_engine * engine() {
    static spec_engine * made = make_demo_engine(target(), nullptr, SPEC_DRAFT_NGRAM_SIMPLE);
    return made;
}

void generate(spec_sampler * sampler) {
    REQUIRE(spec_engine_seq_begin(engine(), 0, &sampler) == SPEC_OK);
    int32_t token = 300;
    for (int32_t i = 0; i < N_TOKENS; ++i) {
        const spec_plan_entry entry = {0, i, 0, 1, 0, 1};
        const spec_plan plan = {&entry, 1, &token, 1, nullptr, 0, 0};
        spec_result result = {};
        REQUIRE(spec_engine_step(engine(), &plan, &result) == SPEC_OK);
        const int32_t status = result.entries[0].status;
        REQUIRE(status == SPEC_OK || status == SPEC_ERR_SAMPLING_FAILED ||
                status == SPEC_ERR_GRAMMAR_TOO_COSTLY || status == SPEC_ERR_NO_TOKEN_ALLOWED);
        if (status != SPEC_OK || (result.entries[0].flags & SPEC_RESULT_EOG) != 0) {
            break;
        }
        token = result.tokens[0];
    }
    REQUIRE(spec_engine_seq_end(engine(), 0) == SPEC_OK);
}

} // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t * data, size_t size) {
    const std::string grammar(reinterpret_cast<const char *>(data), size);
    spec_sampler_params params;
    spec_sampler_default_params(&params);
    params.seed = 1;
    params.grammar = grammar.c_str();
    spec_sampler * sampler = nullptr;
    const int32_t rc = spec_sampler_init(target(), &params, &sampler);
    REQUIRE((rc == SPEC_OK) == (sampler != nullptr));
    if (rc == SPEC_OK) {
        generate(sampler);
    } else {
        REQUIRE(rc == SPEC_ERR_BAD_GRAMMAR && spec_last_error()[0] != '\0');
    }
    return 0;
}
