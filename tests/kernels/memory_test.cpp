// What a call leaves behind when memory runs out in its midst: every allocation of C++ that it
// makes fails once, in turn, and in a second round all from that one on. Each time the call says so
// with a status; what it was to do is then done as if nothing had been, and gives the same tokens.
//
//   memory_test MODEL [-v]   prints what differs and returns 1, or prints "ok"
#include "spec.h"

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <new>
#include <string>
#include <vector>

namespace {

// Of this thread: allocations until the one that fails; below 0: none fails.
thread_local int64_t n_left = -1;
thread_local bool is_lasting = false; // all from that one on fail
thread_local int64_t n_failed = 0;

void * allocate(size_t n) {
    if (n_left >= 0 && (n_left == 0 || n_left-- == 0)) {
        ++n_failed;
        n_left = is_lasting ? 0 : -1;
        throw std::bad_alloc();
    }
    void * found = std::malloc(n > 0 ? n : 1);
    if (found == nullptr) {
        throw std::bad_alloc();
    }
    return found;
}

} // namespace

void * operator new(size_t n) {
    return allocate(n);
}
void * operator new[](size_t n) {
    return allocate(n);
}
void operator delete(void * at) noexcept {
    std::free(at);
}
void operator delete[](void * at) noexcept {
    std::free(at);
}
void operator delete(void * at, size_t) noexcept {
    std::free(at);
}
void operator delete[](void * at, size_t) noexcept {
    std::free(at);
}

namespace {

int n_wrong = 0;
bool is_verbose = false;

void expect(bool is_true, const std::string & what, int64_t at) {
    if (!is_true) {
        std::printf("allocation %lld%s: %s (%s)\n", static_cast<long long>(at),
                    is_lasting ? " and all after it" : "", what.c_str(), spec_last_error());
        ++n_wrong;
    }
}

void must(int32_t status, const char * what) {
    if (status != SPEC_OK) {
        std::printf("%s: %s\n", what, spec_last_error());
        std::exit(1);
    }
}

// Repeats `prepare`, `call` with a failing allocation, `check`, until the call has no such one.
// After the first few, or n_each, not every allocation is tried: most are of one loop.
void each_allocation(const char * what, const std::function<void()> & prepare,
                     const std::function<int32_t()> & call,
                     const std::function<void(int32_t, int64_t)> & check, int64_t n_each = 0) {
    for (const bool lasting : {false, true}) {
        is_lasting = lasting;
        int64_t n_tried = 0;
        for (int64_t at = 0;; at += at < n_each ? 1 : 1 + at / 6) {
            prepare();
            n_failed = 0;
            n_left = at;
            const int32_t status = call();
            n_left = -1;
            const bool is_over = n_failed == 0;
            check(status, at);
            if (is_over) {
                expect(status == SPEC_OK, std::string(what) + " failed without a reason", at);
                break;
            }
            ++n_tried;
        }
        if (is_verbose) {
            std::printf("%s: %lld tried\n", what, static_cast<long long>(n_tried));
        }
    }
    is_lasting = false;
}

constexpr int32_t N_PROMPT = 12;
constexpr int32_t N_SEQS = 2;
constexpr int32_t N_MORE = 4; // tokens that follow, whatever has failed

int32_t prompt_token(int32_t seq_id, int32_t i) {
    return 300 + 7 * seq_id + 3 * i;
}

struct fixture {
    spec_model * model = nullptr;
    spec_engine * engine = nullptr;
    spec_engine_limits limits = {};
    std::vector<int32_t> n_past = std::vector<int32_t>(N_SEQS, 0);
    std::vector<std::vector<int32_t>> emitted = std::vector<std::vector<int32_t>>(N_SEQS);
    int32_t n_draft = 0;
    bool is_sampled = false;

    spec_sampler * sampler() const {
        spec_sampler_params params;
        spec_sampler_default_params(&params);
        params.seed = 7;
        params.temperature = is_sampled ? 0.9f : 0.0f;
        params.logprobs = true;
        params.n_top_logprobs = 2;
        spec_sampler * made = nullptr;
        must(spec_sampler_init(model, &params, &made), "sampler");
        return made;
    }

    void begin(int32_t seq_id) {
        must(spec_engine_seq_end(engine, seq_id), "end");
        spec_sampler * made = sampler();
        must(spec_engine_seq_begin(engine, seq_id, &made), "begin");
        n_past[size_t(seq_id)] = 0;
        emitted[size_t(seq_id)].clear();
    }

    // One step of these sequences: their prompts, or their last tokens. With is_tried it may fail.
    int32_t step(const std::vector<int32_t> & ids, std::vector<int32_t> & statuses, bool is_tried) {
        static std::vector<spec_plan_entry> entries;
        static std::vector<int32_t> tokens;
        const int64_t held = n_left; // what is ours does not count
        n_left = -1;
        entries.clear();
        tokens.clear();
        for (const int32_t id : ids) {
            const bool is_new = n_past[size_t(id)] == 0;
            const int32_t n = is_new ? N_PROMPT : 1;
            entries.push_back(
                {id, n_past[size_t(id)], int32_t(tokens.size()), n, is_new ? 0 : n_draft, 1});
            for (int32_t i = 0; i < n; ++i) {
                tokens.push_back(is_new ? prompt_token(id, i) : emitted[size_t(id)].back());
            }
        }
        spec_plan plan = {};
        plan.entries = entries.data();
        plan.n_entries = int32_t(entries.size());
        plan.tokens = tokens.data();
        plan.n_tokens = int32_t(tokens.size());
        spec_result result = {};
        n_left = held;
        const int32_t status = spec_engine_step(engine, &plan, &result);
        n_left = -1;
        statuses.assign(ids.size(), status);
        if (status != SPEC_OK) {
            if (!is_tried) {
                must(status, "step");
            }
            return status;
        }
        for (size_t i = 0; i < ids.size(); ++i) {
            const spec_result_entry & r = result.entries[i];
            const auto id = size_t(r.seq_id);
            statuses[i] = r.status;
            n_past[id] = r.n_past;
            emitted[id].insert(emitted[id].end(), result.tokens + r.token_offset,
                               result.tokens + r.token_offset + r.n_tokens);
        }
        return status;
    }

    void go_on(size_t n_tokens, int64_t at) {
        std::vector<int32_t> statuses;
        for (int32_t id = 0; id < N_SEQS; ++id) {
            if (spec_engine_seq_n_past(engine, id) != n_past[size_t(id)]) {
                expect(false, "a sequence has another length than it was told", at);
                begin(id);
            }
        }
        for (int i = 0; i < 64; ++i) {
            std::vector<int32_t> ids;
            for (int32_t id = 0; id < N_SEQS; ++id) {
                if (emitted[size_t(id)].size() < n_tokens) {
                    ids.push_back(id);
                }
            }
            if (ids.empty()) {
                return;
            }
            step(ids, statuses, false);
            for (const int32_t status : statuses) {
                expect(status == SPEC_OK, "a later step failed", at);
                if (status != SPEC_OK) {
                    return;
                }
            }
        }
    }
};

void check_steps(fixture & f, int32_t draft_type, bool is_prompt, bool is_sampled) {
    spec_engine_params params;
    spec_engine_default_params(&params);
    params.draft_type = draft_type;
    params.n_seq_max = N_SEQS;
    params.n_ctx_seq = 256;
    params.n_batch = 64;
    params.n_ubatch = 64;
    params.n_draft_max = draft_type == SPEC_DRAFT_NONE ? 0 : 3;
    params.probabilistic = is_sampled;
    params.n_threads = 1;
    f.n_draft = params.n_draft_max;
    f.is_sampled = is_sampled;
    must(spec_engine_init(f.model, nullptr, &params, &f.engine), "engine");
    std::vector<int32_t> statuses;
    const std::vector<int32_t> both = {0, 1};
    const auto prepare = [&] {
        f.begin(0);
        f.begin(1);
        if (!is_prompt) {
            f.step(both, statuses, false);
        }
    };
    prepare();
    f.go_on(N_MORE, -1);
    auto wanted = f.emitted;
    const auto cut = [](std::vector<std::vector<int32_t>> rows) {
        for (auto & row : rows) {
            row.resize(N_MORE);
        }
        return rows;
    };
    wanted = cut(wanted);
    each_allocation(
        "step", prepare, [&] { return f.step(both, statuses, true); },
        [&](int32_t status, int64_t at) {
            bool is_lost = false;
            for (int32_t id = 0; id < N_SEQS && status == SPEC_OK; ++id) {
                if (statuses[size_t(id)] != SPEC_OK) {
                    expect(spec_engine_seq_n_past(f.engine, id) == 0,
                           "a sequence that failed still holds tokens", at);
                    f.begin(id);
                    is_lost = true;
                }
            }
            f.go_on(N_MORE, at);
            // A sampled sequence that lost its drafts draws other numbers than with them.
            expect(is_sampled || is_lost || cut(f.emitted) == wanted, "other tokens follow", at);
            expect(is_sampled || !is_lost || cut(f.emitted) == wanted,
                   "other tokens follow a sequence that was begun again", at);
        });
    spec_engine_free(f.engine);
    f.engine = nullptr;
}

void check_snapshots(fixture & f) {
    spec_engine_params params;
    spec_engine_default_params(&params);
    params.n_seq_max = N_SEQS;
    params.n_ctx_seq = 256;
    params.n_batch = 64;
    params.n_ubatch = 64;
    params.n_draft_max = 0;
    params.n_threads = 1;
    f.n_draft = 0;
    f.is_sampled = false;
    must(spec_engine_init(f.model, nullptr, &params, &f.engine), "engine");
    std::vector<int32_t> statuses;
    f.begin(0);
    f.begin(1);
    f.step({0, 1}, statuses, false);
    std::vector<char> bytes(size_t(1) << 22);
    size_t n = 0;
    must(spec_engine_seq_save(f.engine, 0, bytes.data(), bytes.size(), &n), "save");
    std::vector<char> again(bytes.size());
    size_t n_again = 0;
    each_allocation(
        "save", [] {},
        [&] { return spec_engine_seq_save(f.engine, 0, again.data(), again.size(), &n_again); },
        [&](int32_t status, int64_t at) {
            expect(status != SPEC_OK ||
                       (n == n_again && !std::memcmp(bytes.data(), again.data(), n)),
                   "another snapshot", at);
        });
    each_allocation(
        "load", [&] { must(spec_engine_seq_end(f.engine, 0), "end"); },
        [&] { return spec_engine_seq_load(f.engine, 0, bytes.data(), n); },
        [&](int32_t status, int64_t at) {
            const int32_t n_past = spec_engine_seq_n_past(f.engine, 0);
            expect(n_past == (status == SPEC_OK ? N_PROMPT : 0), "a load that left tokens", at);
        });
    spec_engine_free(f.engine);
    f.engine = nullptr;
}

// A sequence that begins with tokens of another, in cells of its own: kept whole or not at all, and
// nothing that was ordered of llama.cpp in between is done later.
void check_copies(fixture & f, int32_t draft_type, bool is_fork) {
    constexpr int32_t N_COPIED = N_PROMPT - 2;
    const int32_t copy = N_SEQS;
    spec_engine_params params;
    spec_engine_default_params(&params);
    params.draft_type = draft_type;
    params.n_seq_max = N_SEQS + 1;
    params.n_ctx_seq = 256;
    params.n_batch = 64;
    params.n_ubatch = 64;
    params.n_draft_max = draft_type == SPEC_DRAFT_NONE ? 0 : 3;
    params.n_threads = 1;
    f.n_draft = params.n_draft_max;
    f.is_sampled = false;
    must(spec_engine_init(f.model, nullptr, &params, &f.engine), "engine");
    std::vector<int32_t> statuses;
    f.begin(0);
    f.begin(1);
    f.step({0, 1}, statuses, false);
    const std::vector<int32_t> wanted = f.emitted[0];
    spec_sampler * given = nullptr;
    int32_t n_kept = 0;
    const auto go_on_with_copy = [&](int64_t at) {
        if (spec_engine_seq_n_past(f.engine, copy) != n_kept) {
            expect(false, "a copy has another length than it was told", at);
            return;
        }
        int32_t tokens[N_PROMPT];
        for (int32_t i = 0; i < N_PROMPT; ++i) {
            tokens[i] = prompt_token(0, i);
        }
        const spec_plan_entry entry = {copy, n_kept, n_kept, N_PROMPT - n_kept, 0, 1};
        spec_plan plan = {};
        plan.entries = &entry;
        plan.n_entries = 1;
        plan.tokens = tokens;
        plan.n_tokens = N_PROMPT;
        spec_result result = {};
        const int32_t status = spec_engine_step(f.engine, &plan, &result);
        if (status != SPEC_ERR_SEQ_IDLE) { // it began, with what is told
            must(status, "step");
            expect(result.n_tokens > 0 && result.tokens[0] == wanted[0],
                   "another token follows a copy", at);
        }
    };
    each_allocation(
        is_fork ? "fork" : "copy",
        [&] {
            must(spec_engine_seq_end(f.engine, copy), "end");
            given = f.sampler();
        },
        [&] {
            n_kept = 0;
            if (is_fork) {
                const int32_t status = spec_engine_fork(f.engine, 0, N_COPIED, &copy, &given, 1);
                n_kept = status == SPEC_OK ? N_COPIED : 0;
                return status;
            }
            const spec_start start = {copy, N_COPIED, 0, false, nullptr, 0, given, 0};
            spec_plan plan = {};
            plan.starts = &start;
            plan.n_starts = 1;
            spec_result result = {};
            const int32_t status = spec_engine_step(f.engine, &plan, &result);
            given = status == SPEC_OK ? nullptr : given;
            n_kept = status == SPEC_OK ? result.n_kept[0] : 0;
            return status;
        },
        [&](int32_t, int64_t at) {
            spec_sampler_free(given);
            go_on_with_copy(at);
        });
    spec_engine_free(f.engine);
    f.engine = nullptr;
}

// Logits after a prompt and one token more, read through a decoder.
std::vector<float> logits_of(spec_decoder * decoder, int32_t seq_id, int32_t n_vocab,
                             int32_t token) {
    std::vector<float> rows(static_cast<size_t>(n_vocab));
    must(spec_decoder_decode(decoder, seq_id, &token, 1, true), "decode");
    must(spec_decoder_read(decoder, SPEC_ROWS_LOGITS, rows.data(), rows.size()), "read");
    return rows;
}

void check_decoders(fixture & f) {
    spec_decoder_params params;
    spec_decoder_default_params(&params);
    params.n_seq_max = 2;
    params.n_branch_max = 4;
    params.n_outputs_max = 16;
    params.n_ctx_seq = 64; // little: cells that are not given back are soon missed
    params.n_batch = 32;
    params.n_ubatch = 32;
    params.n_threads = 1;
    spec_decoder * decoder = nullptr;
    must(spec_decoder_init(f.model, &params, &decoder), "decoder");
    spec_decoder_limits limits;
    must(spec_decoder_get_limits(decoder, &limits), "limits");
    int32_t prompt[N_PROMPT];
    for (int32_t i = 0; i < N_PROMPT; ++i) {
        prompt[i] = prompt_token(0, i);
    }
    const auto prepare = [&] {
        must(spec_decoder_seq_rollback(decoder, 0, 0), "rollback");
        must(spec_decoder_decode(decoder, 0, prompt, N_PROMPT, false), "prompt");
    };
    prepare();
    const std::vector<float> wanted = logits_of(decoder, 0, limits.n_vocab, 400);
    const auto check_rest = [&](int64_t at) {
        if (spec_decoder_seq_n_past(decoder, 0) == 0) {
            must(spec_decoder_decode(decoder, 0, prompt, N_PROMPT, false), "prompt");
        }
        expect(spec_decoder_seq_n_past(decoder, 0) == N_PROMPT, "another length", at);
        expect(logits_of(decoder, 0, limits.n_vocab, 400) == wanted, "other logits follow", at);
    };
    each_allocation(
        "decode", prepare,
        [&] {
            const int32_t tokens[2] = {401, 402};
            return spec_decoder_decode(decoder, 0, tokens, 2, true);
        },
        [&](int32_t status, int64_t at) {
            if (status == SPEC_OK) {
                must(spec_decoder_seq_rollback(decoder, 0, N_PROMPT), "rollback");
            }
            check_rest(at);
        });
    if (limits.n_branch_max > 0) {
        const int32_t tokens[5] = {401, 402, 403, 404, 405};
        const int32_t parents[5] = {-1, 0, 0, -1, 3};
        each_allocation(
            "tree", prepare, [&] { return spec_decoder_tree(decoder, 0, tokens, parents, 5); },
            [&](int32_t status, int64_t at) {
                if (status == SPEC_OK) {
                    must(spec_decoder_tree_commit(decoder, 0, nullptr, 0), "commit");
                }
                check_rest(at);
            });
    }
    spec_decoder_free(decoder);
}

void check_texts(fixture & f) {
    const char * text = "def parse(text):\n    return [int(x) for x in text.split()]\n";
    int32_t tokens[128];
    size_t n = 0;
    each_allocation(
        "tokenize", [] {},
        [&] {
            return spec_model_tokenize(f.model, text, std::strlen(text), true, false, tokens, 128,
                                       &n);
        },
        [](int32_t, int64_t) {});
    spec_sampler * made = nullptr;
    spec_sampler_params params;
    spec_sampler_default_params(&params);
    params.grammar = "root ::= \"a\" [b-d]{1,5} \"e\"";
    params.dry_multiplier = 0.5f;
    each_allocation(
        "sampler", [] {}, [&] { return spec_sampler_init(f.model, &params, &made); },
        [&](int32_t status, int64_t at) {
            expect((status == SPEC_OK) == (made != nullptr), "a sampler of a failed call", at);
            spec_sampler_free(made);
            made = nullptr;
        });
}

// What a failed call has put among a model's DRY breakers counts as what is kept, or is not there.
void check_breakers(fixture & f) {
    int n_made = 0;
    spec_breaker_stats before = {};
    spec_sampler * made = nullptr;
    std::string text;
    const char * breaker = nullptr;
    spec_sampler_params params;
    spec_sampler_default_params(&params);
    params.dry_multiplier = 0.5f;
    params.dry_breakers = &breaker;
    params.n_dry_breakers = 1;
    each_allocation(
        "breakers",
        [&] {
            text = "a breaker longer than a short string, number " + std::to_string(n_made++);
            breaker = text.c_str();
            must(spec_model_get_breaker_stats(f.model, &before), "stats");
        },
        [&] { return spec_sampler_init(f.model, &params, &made); },
        [&](int32_t, int64_t at) {
            spec_breaker_stats after = {};
            must(spec_model_get_breaker_stats(f.model, &after), "stats");
            expect((after.n_held > before.n_held) == (after.n_bytes > before.n_bytes),
                   "a breaker is held whose bytes are not counted", at);
            spec_sampler_free(made);
            made = nullptr;
        },
        10000);
}

} // namespace

int main(int argc, char ** argv) {
    if (argc < 2) {
        std::printf("usage: memory_test MODEL [-v]\n");
        return 2;
    }
    is_verbose = argc > 2;
    std::setvbuf(stdout, nullptr, _IOLBF, 0);
    fixture f;
    spec_model_params params = {};
    params.path = argv[1];
    params.use_mmap = true;
    must(spec_model_load(&params, &f.model), "model");
    check_texts(f);
    check_breakers(f);
    check_steps(f, SPEC_DRAFT_NONE, true, false);
    check_steps(f, SPEC_DRAFT_NONE, false, false);
    check_steps(f, SPEC_DRAFT_MTP, false, false);
    check_steps(f, SPEC_DRAFT_MTP, false, true);
    check_steps(f, SPEC_DRAFT_NGRAM_MOD, false, false);
    check_snapshots(f);
    check_copies(f, SPEC_DRAFT_NONE, false);
    check_copies(f, SPEC_DRAFT_MTP, false);
    check_copies(f, SPEC_DRAFT_MTP, true);
    check_decoders(f);
    spec_model_free(f.model);
    if (n_wrong > 0) {
        std::printf("%d wrong\n", n_wrong);
        return 1;
    }
    std::puts("ok");
    return 0;
}
