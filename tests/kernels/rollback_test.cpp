// Rollbacks of a recurrent model (patch 0007): llama.cpp itself refuses what the last decode has
// stored no state for, whoever asks.
//
//   rollback_test MODEL   prints what differs and returns 1, or prints "ok"
#include "llama.h"

#include <cstdint>
#include <cstdio>
#include <utility>
#include <vector>

namespace {

constexpr uint32_t N_RS_SEQ = 3;

struct fixture {
    llama_context * ctx = nullptr;
    std::vector<llama_pos> n_past = std::vector<llama_pos>(4, 0);
    int n_failures = 0;

    // Decodes some tokens more of each of these sequences, all in one batch.
    void decode(const std::vector<std::pair<llama_seq_id, int>> & pieces) {
        llama_batch batch = llama_batch_init(64, 0, 1);
        for (const auto & [seq_id, n] : pieces) {
            for (int i = 0; i < n; ++i) {
                const int at = batch.n_tokens++;
                batch.token[at] = 5 + at;
                batch.pos[at] = n_past[size_t(seq_id)]++;
                batch.n_seq_id[at] = 1;
                batch.seq_id[at][0] = seq_id;
                batch.logits[at] = i == n - 1;
            }
        }
        if (llama_decode(ctx, batch) != 0) {
            std::printf("a decode failed\n");
            ++n_failures;
        }
        llama_batch_free(batch);
    }

    void check(const char * what, llama_seq_id seq_id, int n_back, bool is_possible) {
        llama_pos & n = n_past[size_t(seq_id)];
        const bool is_done = llama_memory_seq_rm(llama_get_memory(ctx), seq_id, n - n_back, -1);
        if (is_done != is_possible) {
            std::printf("%s: %s, expected the contrary\n", what, is_done ? "done" : "refused");
            ++n_failures;
        }
        n -= is_done ? n_back : 0;
    }
};

void check_all(fixture & f) {
    f.decode({{0, 6}});
    f.check("as far as there are snapshots", 0, int(N_RS_SEQ), true);
    f.check("twice after one decode", 0, 1, false);
    f.decode({{0, 6}});
    f.check("further than there are snapshots", 0, int(N_RS_SEQ) + 1, false);

    f.decode({{1, 6}});
    f.decode({{1, 1}});
    f.check("beyond a decode of one token", 1, 1, false);
    f.check("two tokens beyond it", 1, 2, false);
    f.decode({{1, 2}});
    f.check("beyond a decode of two tokens", 1, 2, false);
    f.check("within a decode of two tokens", 1, 1, true);

    f.decode({{0, 3}, {1, 3}});
    f.check("one of two sequences of a decode", 0, 2, true);
    f.check("the other", 1, 1, true);
    f.decode({{0, 2}, {1, 2}});
    llama_memory_seq_cp(llama_get_memory(f.ctx), 0, 2, -1, -1);
    f.n_past[2] = f.n_past[0];
    f.check("a copy, which no decode has touched", 2, 1, false);
    f.check("beyond the start", 1, f.n_past[1], true);
}

} // namespace

int main(int argc, char ** argv) {
    if (argc != 2) {
        std::printf("usage: rollback_test MODEL\n");
        return 2;
    }
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    llama_backend_init();
    llama_model * model = llama_model_load_from_file(argv[1], llama_model_default_params());
    llama_context_params params = llama_context_default_params();
    params.n_ctx = 256;
    params.n_batch = 64;
    params.n_seq_max = 4;
    params.n_rs_seq = N_RS_SEQ;
    params.n_threads = 1;
    params.n_threads_batch = 1;
    fixture f;
    f.ctx = model != nullptr ? llama_init_from_model(model, params) : nullptr;
    if (f.ctx == nullptr || llama_n_rs_seq(f.ctx) != N_RS_SEQ) {
        std::printf("%s is no recurrent model that can be rolled back\n", argv[1]);
        return 1;
    }
    check_all(f);
    llama_free(f.ctx);
    llama_model_free(model);
    if (f.n_failures == 0) {
        std::printf("ok\n");
    }
    return f.n_failures != 0;
}
