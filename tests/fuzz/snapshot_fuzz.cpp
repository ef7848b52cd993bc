// snapshot_fuzz.cpp: damaged snapshots of a sequence. A snapshot is refused and nothing has
// changed, or it is taken and the sequence goes on.
//
// The input edits a valid snapshot of one of three engines, or is a snapshot itself. A checksum
// guards the whole, so most edits end there; what lies behind it meets whole inputs only.
#include "harness.h"

#include <vector>

namespace {

constexpr int32_t N_ENGINES = 3;

struct fixture {
    const spec_model * target = nullptr;
    spec_engine * engine = nullptr;
    std::vector<uint8_t> snapshot;
};

void step(fixture & f, int32_t seq_id, int32_t & last, int32_t n_draft) {
    const int32_t n_past = spec_engine_seq_n_past(f.engine, seq_id);
    const spec_plan_entry entry = {seq_id, n_past, 0, 1, n_past > 0 ? n_draft : 0, 1};
    const spec_plan plan = {&entry, 1, &last, 1};
    spec_result result = {};
    REQUIRE(spec_engine_step(f.engine, &plan, &result) == SPEC_OK);
    REQUIRE(result.entries[0].status == SPEC_OK);
    last = result.tokens[result.n_tokens - 1];
}

int32_t begin(fixture & f, int32_t seq_id) {
    spec_sampler * sampler = greedy(f.target, 0.8f);
    REQUIRE(spec_engine_seq_begin(f.engine, seq_id, &sampler) == SPEC_OK);
    int32_t last = 300;
    step(f, seq_id, last, 0);
    return last;
}

fixture & fixture_of(int32_t i) {
    static fixture fixtures[N_ENGINES];
    fixture & f = fixtures[i];
    if (f.engine != nullptr) {
        return f;
    }
    f.target = load_demo(i == 1 ? "tiny-qwen35-f16.gguf" : "tiny-mimo2-f16.gguf");
    const spec_model * draft = i == 2 ? load_demo("tiny-mimo2-eagle3-f16.gguf") : nullptr;
    f.engine = make_demo_engine(f.target, draft, i == 2 ? SPEC_DRAFT_EAGLE3 : SPEC_DRAFT_MTP);
    int32_t last = begin(f, 0);
    for (int32_t k = 0; k < 3; ++k) {
        step(f, 0, last, 2);
    }
    size_t n = 0;
    REQUIRE(spec_engine_seq_save(f.engine, 0, nullptr, 0, &n) == SPEC_ERR_BUFFER_TOO_SMALL);
    f.snapshot.resize(n);
    REQUIRE(spec_engine_seq_save(f.engine, 0, f.snapshot.data(), n, &n) == SPEC_OK);
    REQUIRE(spec_engine_seq_end(f.engine, 0) == SPEC_OK);
    begin(f, 1); // a neighbour that must not notice anything
    return f;
}

std::vector<uint8_t> edited(const fixture & f, choices & in, const uint8_t * data, size_t size) {
    if (in.below(8) == 0) {
        return std::vector<uint8_t>(data, data + size);
    }
    std::vector<uint8_t> bytes = f.snapshot;
    while (!in.is_empty()) {
        const auto at = static_cast<size_t>(static_cast<uint32_t>(in.wild()));
        const size_t i = in.below(2) == 0 ? at % 256 : at;
        bytes[i % bytes.size()] = in.byte();
        if (in.below(16) == 0) {
            bytes.resize(1 + at % bytes.size());
        }
    }
    return bytes;
}

} // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t * data, size_t size) {
    choices in(data, size);
    fixture & f = fixture_of(in.below(N_ENGINES));
    const std::vector<uint8_t> bytes = edited(f, in, data, size);
    const int32_t n_past = spec_engine_seq_n_past(f.engine, 1);
    const int32_t n_cells = spec_engine_n_cells_used(f.engine);
    const int32_t rc = spec_engine_seq_load(f.engine, 2, bytes.data(), bytes.size());
    if (rc == SPEC_OK) {
        REQUIRE(bytes == f.snapshot);
        REQUIRE(spec_engine_seq_end(f.engine, 2) == SPEC_OK);
    } else {
        REQUIRE(spec_last_error()[0] != '\0');
    }
    REQUIRE(spec_engine_seq_n_past(f.engine, 2) == 0);
    REQUIRE(spec_engine_seq_n_past(f.engine, 1) == n_past);
    REQUIRE(spec_engine_n_cells_used(f.engine) == n_cells);
    return 0;
}
