// harness.h: what the fuzz targets share: bytes as a source of choices, the demo models, engines.
#ifndef DRAFTHOUSE_FUZZ_HARNESS_H
#define DRAFTHOUSE_FUZZ_HARNESS_H

#include "spec.h"

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>

// Not assert: it must hold in every build.
#define REQUIRE(what)                                                                              \
    do {                                                                                           \
        if (!(what)) {                                                                             \
            std::fprintf(stderr, "%s:%d: not true: %s (%s)\n", __FILE__, __LINE__, #what,          \
                         spec_last_error());                                                       \
            std::abort();                                                                          \
        }                                                                                          \
    } while (false)

// The fuzzer's input, read as numbers; zeros once it is used up.
class choices {
public:
    choices(const uint8_t * data, size_t size) : data_(data), size_(size) {}

    bool is_empty() const { return at_ >= size_; }

    uint8_t byte() { return is_empty() ? uint8_t{0} : data_[at_++]; }

    // [0, n)
    int32_t below(int32_t n) { return n > 0 ? byte() % n : 0; }

    // Any 32 bits, most often near a boundary.
    int32_t wild() {
        static const int32_t edges[] = {0,       -1, 1,   2,   INT32_MAX,     65536,  INT32_MIN,
                                        1 << 30, -2, 255, 256, INT32_MAX / 2, 100000, INT32_MIN / 2,
                                        4096};
        const uint8_t kind = byte();
        if (kind < 200) {
            return edges[kind % (sizeof edges / sizeof *edges)];
        }
        uint32_t value = 0;
        for (int i = 0; i < 4; ++i) {
            value = value << 8 | byte();
        }
        return static_cast<int32_t>(value);
    }

private:
    const uint8_t * data_;
    size_t size_;
    size_t at_ = 0;
};

// A demo model: of DRAFTHOUSE_FUZZ_MODELS, or models/ of the current directory; or one that
// instrument.sh has made, of build/fuzz/models.
inline spec_model * load_demo(const char * name) {
    const char * folder = std::getenv("DRAFTHOUSE_FUZZ_MODELS");
    std::string path = std::string(folder != nullptr ? folder : "models") + "/" + name;
    if (!std::ifstream(path)) {
        path = std::string("build/fuzz/models/") + name;
    }
    spec_model_params params = {};
    params.path = path.c_str();
    params.use_mmap = true;
    spec_model * model = nullptr;
    spec_set_log(nullptr, nullptr);
    REQUIRE(spec_model_load(&params, &model) == SPEC_OK);
    return model;
}

inline spec_sampler * greedy(const spec_model * model, float temperature = 0.0f) {
    spec_sampler_params params;
    spec_sampler_default_params(&params);
    params.temperature = temperature;
    params.seed = 1;
    params.logprobs = true;
    spec_sampler * sampler = nullptr;
    REQUIRE(spec_sampler_init(model, &params, &sampler) == SPEC_OK);
    return sampler;
}

// What an engine may be given at most.
constexpr int32_t N_THREADS = 3;

inline spec_engine * make_demo_engine(const spec_model * target, const spec_model * draft,
                                      int32_t draft_type, bool is_unified = false,
                                      int32_t n_rs_seq = -1) {
    spec_engine_params params;
    spec_engine_default_params(&params);
    params.draft_type = draft_type;
    params.n_ctx_seq = is_unified ? 64 : 96;
    params.n_ctx = is_unified ? 256 : 0;
    params.n_batch = 64;
    params.n_ubatch = 32;
    params.n_seq_max = 4;
    params.n_rs_seq = n_rs_seq;
    params.n_threads = 1;
    params.n_threads_batch = N_THREADS;
    params.kv_unified = is_unified;
    params.probabilistic = true;
    spec_engine * engine = nullptr;
    REQUIRE(spec_engine_init(target, draft, &params, &engine) == SPEC_OK);
    REQUIRE(spec_engine_set_threads(engine, 1, 1) == SPEC_OK); // quick, until the input asks
    return engine;
}

#endif
