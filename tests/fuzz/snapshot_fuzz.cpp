// snapshot_fuzz.cpp: damaged and forged snapshots of a sequence. A snapshot is refused and nothing
// has changed, or it is taken and the sequence goes on.
//
// The input chooses one of several valid snapshots and edits it, or is a snapshot itself. Without
// a seal the checksum refuses nearly every edit; so most inputs are sealed again afterwards and
// meet what lies behind. The cells are llama.cpp's own bytes, which only the checksum guards: in a
// sealed input they stay whole.
#include "harness.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace {

constexpr int32_t N_ENGINES = 5;
constexpr int32_t N_SAMPLERS = 3;
// One for each sampler, without draft state, awaiting it, and without a sampler.
constexpr int32_t N_KINDS = 6;
constexpr int32_t BARE = 5;
constexpr size_t N_BYTES_AT = 16; // place of the header's size
constexpr size_t WORD = sizeof(uint64_t);

using bytes = std::vector<uint8_t>;

struct fixture {
    const spec_model * target = nullptr;
    spec_engine * engine = nullptr;
    bytes snapshots[N_KINDS];
    size_t cells_at[N_KINDS] = {}; // what comes before is ours
};

uint64_t word_at(const bytes & b, size_t at) {
    uint64_t word = 0;
    std::memcpy(&word, b.data() + at, sizeof word);
    return word;
}

void put_word(bytes & b, size_t at, uint64_t word) {
    std::memcpy(b.data() + at, &word, WORD);
}

// The digest of error.cpp: a test of its own that the two agree is that every snapshot is found
// sealed in `begin`.
uint64_t digest(const uint8_t * data, size_t n) {
    const auto mix = [](uint64_t x) {
        x = (x ^ (x >> 32)) * 0x9e3779b97f4a7c15u;
        x = (x ^ (x >> 29)) * 0xd6e8feb86659fd93u;
        return x ^ (x >> 32);
    };
    const auto next = [&](uint64_t h) {
        uint64_t word;
        std::memcpy(&word, data, WORD);
        data += WORD;
        return mix(h ^ word);
    };
    constexpr size_t N_LANES = 8;
    uint64_t h = mix(n);
    if (n >= N_LANES * WORD) {
        uint64_t lanes[N_LANES];
        for (size_t i = 0; i < N_LANES; ++i) {
            lanes[i] = mix(h + i);
        }
        for (; n >= N_LANES * WORD; n -= N_LANES * WORD) {
            for (uint64_t & lane : lanes) {
                lane = next(lane);
            }
        }
        for (const uint64_t lane : lanes) {
            h = mix(h ^ lane);
        }
    }
    for (; n >= WORD; n -= WORD) {
        h = next(h);
    }
    uint64_t word = 0;
    std::memcpy(&word, data, n);
    return mix(h ^ word);
}

void seal(bytes & b) {
    put_word(b, N_BYTES_AT, b.size());
    put_word(b, b.size() - WORD, digest(b.data(), b.size() - WORD));
}

// Where the two runs of cells begin: [n][n bytes][m][m bytes][checksum] fills the end exactly.
size_t find_cells(const bytes & b) {
    const size_t end = b.size() - WORD;
    for (size_t at = 128; at + 2 * WORD <= end; ++at) {
        const uint64_t n = word_at(b, at);
        if (n > end - at - 2 * WORD) {
            continue;
        }
        const size_t next = at + WORD + n;
        if (n > 0 && word_at(b, next) == end - next - WORD) {
            return at;
        }
    }
    REQUIRE(!"a snapshot has cells");
    return 0;
}

spec_sampler * sampler_of(const spec_model * model, int32_t kind) {
    if (kind == 0) {
        return greedy(model, 0.8f);
    }
    static const char * const breakers[] = {"\n", ":"};
    static const int32_t order[] = {SPEC_SAMPLER_PENALTIES, SPEC_SAMPLER_TOP_K,
                                    SPEC_SAMPLER_TEMPERATURE};
    spec_sampler_params params;
    spec_sampler_default_params(&params);
    params.seed = 3;
    params.temperature = 0.9f;
    params.penalty_repeat = 1.1f;
    if (kind == 1) {
        params.grammar = "root ::= ([a-zA-Z ,.\\n] | \"é\")*";
        params.samplers = order;
        params.n_samplers = 3;
    } else {
        params.dry_multiplier = 0.5f;
        params.dry_breakers = breakers;
        params.n_dry_breakers = 2;
        params.xtc_probability = 0.5f;
    }
    spec_sampler * sampler = nullptr;
    REQUIRE(spec_sampler_init(model, &params, &sampler) == SPEC_OK);
    return sampler;
}

// Few different tokens, so that n-gram drafters find something.
constexpr int32_t PROMPT[] = {300, 301, 302, 303, 300, 301, 302, 303, 300, 301, 302};
constexpr int32_t N_PROMPT = sizeof PROMPT / sizeof *PROMPT;

int32_t id_last_of(const fixture & f, int32_t seq_id) {
    int32_t tokens[512];
    size_t n = 0;
    int32_t id_last = -1;
    REQUIRE(spec_engine_seq_tokens(f.engine, seq_id, tokens, 512, &n, &id_last) == SPEC_OK);
    return id_last;
}

// One step of one sequence from what the engine knows of it; true when it may go on.
bool step(fixture & f, int32_t seq_id, int32_t n_draft) {
    const int32_t id_last = id_last_of(f, seq_id);
    const int32_t n_past = spec_engine_seq_n_past(f.engine, seq_id);
    const int32_t token = id_last >= 0 ? id_last : 300;
    const spec_plan_entry entry = {seq_id, n_past, 0, 1, id_last >= 0 ? n_draft : 0, 1};
    const spec_plan plan = {&entry, 1, &token, 1, nullptr, 0, 0};
    spec_result result = {};
    const int32_t rc = spec_engine_step(f.engine, &plan, &result);
    REQUIRE(rc == SPEC_OK || rc == SPEC_ERR_BAD_PLAN);
    return rc == SPEC_OK && result.entries[0].status == SPEC_OK;
}

void begin(fixture & f, int32_t seq_id, int32_t kind) {
    spec_sampler * sampler = sampler_of(f.target, kind);
    REQUIRE(spec_engine_seq_begin(f.engine, seq_id, &sampler) == SPEC_OK);
    const spec_plan_entry entry = {seq_id, 0, 0, N_PROMPT, 0, 1};
    const spec_plan plan = {&entry, 1, PROMPT, N_PROMPT, nullptr, 0, 0};
    spec_result result = {};
    REQUIRE(spec_engine_step(f.engine, &plan, &result) == SPEC_OK);
    REQUIRE(result.entries[0].status == SPEC_OK);
}

spec_engine * engine_of(int32_t i, const spec_model * target) {
    switch (i) {
    case 2:
        return make_demo_engine(target, load_demo("tiny-mimo2-eagle3-f16.gguf"), SPEC_DRAFT_EAGLE3);
    case 3:
        return make_demo_engine(target, nullptr, SPEC_DRAFT_NGRAM_CACHE);
    case 4:
        return make_demo_engine(target, load_demo("tiny-draft-f16.gguf"), SPEC_DRAFT_SIMPLE, true);
    default:
        return make_demo_engine(target, nullptr, SPEC_DRAFT_MTP);
    }
}

fixture & fixture_of(int32_t i) {
    static fixture fixtures[N_ENGINES];
    fixture & f = fixtures[i];
    if (f.engine != nullptr) {
        return f;
    }
    f.target = load_demo(i == 1 ? "tiny-qwen35-f16.gguf" : "tiny-mimo2-f16.gguf");
    f.engine = engine_of(i, f.target);
    for (int32_t kind = 0; kind < N_KINDS; ++kind) {
        begin(f, 0, kind % N_SAMPLERS);
        for (int32_t k = 0; k < 3; ++k) {
            REQUIRE(step(f, 0, 2));
        }
        if (kind >= N_SAMPLERS && kind != BARE) {
            REQUIRE(spec_engine_seq_drafts_off(f.engine, 0) == SPEC_OK);
            REQUIRE(step(f, 0, 2));
        }
        if (kind > N_SAMPLERS && kind != BARE) {
            REQUIRE(spec_engine_seq_drafts_on(f.engine, 0) == SPEC_OK);
        }
        size_t n = 0;
        bytes & snapshot = f.snapshots[kind];
        auto * const save = kind == BARE ? spec_engine_seq_save_prefix : spec_engine_seq_save;
        REQUIRE(save(f.engine, 0, nullptr, 0, &n) == SPEC_ERR_BUFFER_TOO_SMALL);
        snapshot.resize(n);
        REQUIRE(save(f.engine, 0, snapshot.data(), n, &n) == SPEC_OK);
        REQUIRE(spec_engine_seq_end(f.engine, 0) == SPEC_OK);
        f.cells_at[kind] = find_cells(snapshot);
        bytes sealed = snapshot;
        seal(sealed);
        REQUIRE(sealed == snapshot);
    }
    begin(f, 1, 0); // a neighbour that must not notice anything
    return f;
}

// Changes, inserts or removes a few bytes of [0, n); returns the new n.
size_t edit(bytes & b, size_t n, choices & in) {
    const size_t far = static_cast<size_t>(static_cast<uint32_t>(in.wild()));
    const size_t near = static_cast<size_t>(in.byte()) << 8 | in.byte();
    const size_t at = (in.below(4) == 0 ? far : near) % n;
    const auto here = b.begin() + static_cast<std::ptrdiff_t>(at);
    const size_t n_left = n - at;
    switch (in.below(6)) {
    case 0:
    case 1:
        b[at] = in.byte();
        return n;
    case 2: { // a length, a float, a token
        const int32_t value = in.wild();
        std::memcpy(b.data() + at, &value, std::min(n_left, sizeof value));
        return n;
    }
    case 3: {
        const auto value = static_cast<int64_t>(in.wild());
        std::memcpy(b.data() + at, &value, std::min(n_left, sizeof value));
        return n;
    }
    case 4: {
        const size_t count = 1 + static_cast<size_t>(in.below(16));
        b.insert(here, count, in.byte());
        return n + count;
    }
    default: {
        const size_t count = std::min(n_left - 1, 1 + static_cast<size_t>(in.below(16)));
        b.erase(here, here + static_cast<std::ptrdiff_t>(count));
        return n - count;
    }
    }
}

bytes edited(const fixture & f, int32_t kind, bool is_sealed, choices & in) {
    bytes b = f.snapshots[kind];
    size_t n = is_sealed ? f.cells_at[kind] + WORD : b.size();
    while (!in.is_empty() && n > 128) {
        n = edit(b, n, in);
    }
    if (is_sealed) {
        seal(b);
    } else if (in.below(4) == 0) {
        b.resize(1 + b.size() / 2);
    }
    return b;
}

// Whatever was taken can be used like any other sequence.
void use(fixture & f, int32_t seq_id) {
    size_t n = 0;
    REQUIRE(spec_engine_seq_save(f.engine, seq_id, nullptr, 0, &n) == SPEC_ERR_BUFFER_TOO_SMALL);
    bytes again(n);
    REQUIRE(spec_engine_seq_save(f.engine, seq_id, again.data(), n, &n) == SPEC_OK);
    for (int32_t k = 0; k < 3 && step(f, seq_id, 2); ++k) {
    }
    REQUIRE(spec_engine_seq_end(f.engine, seq_id) == SPEC_OK);
}

// Takes a sequence into use with what a snapshot holds, or empty, and a sampler of the caller's.
// False where the snapshot has a tag, which makes it somebody else's.
bool start(fixture & f, int32_t seq_id, const bytes & b) {
    spec_start how = {};
    how.seq_id = seq_id;
    how.n_kept = N_PROMPT;
    how.source = -1;
    how.snapshot = b.data();
    how.n_snapshot = b.size();
    how.sampler = sampler_of(f.target, 0);
    spec_plan plan = {};
    plan.starts = &how;
    plan.n_starts = 1;
    spec_result result = {};
    const int32_t rc = spec_engine_step(f.engine, &plan, &result);
    if (rc == SPEC_ERR_BAD_PLAN) {
        spec_sampler_free(how.sampler);
        return false;
    }
    REQUIRE(rc == SPEC_OK);
    const int32_t n_past = spec_engine_seq_n_past(f.engine, seq_id);
    REQUIRE(n_past == 0 || n_past == N_PROMPT);
    return true;
}

} // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t * data, size_t size) {
    choices in(data, size);
    fixture & f = fixture_of(in.below(N_ENGINES));
    const int32_t kind = in.below(N_KINDS);
    const int32_t how = in.below(16);
    const bytes b = how == 0 ? bytes(data, data + size) : edited(f, kind, how > 2, in);
    const int32_t n_past = spec_engine_seq_n_past(f.engine, 1);
    const int32_t n_cells = spec_engine_n_cells_used(f.engine);
    const bool is_started = in.below(2) == 0;
    const int32_t rc = is_started ? SPEC_OK : spec_engine_seq_load(f.engine, 2, b.data(), b.size());
    if (is_started) {
        if (start(f, 2, b)) {
            use(f, 2);
        }
    } else if (rc == SPEC_OK) {
        REQUIRE(how > 2 || (b == f.snapshots[kind] && kind != BARE));
        use(f, 2);
    } else {
        REQUIRE(spec_last_error()[0] != '\0');
    }
    REQUIRE(spec_engine_seq_n_past(f.engine, 2) == 0);
    REQUIRE(spec_engine_seq_n_past(f.engine, 1) == n_past);
    REQUIRE(spec_engine_n_cells_used(f.engine) == n_cells);
    return 0;
}
