// What programs share that test what is done with a model's vocabulary.
#pragma once

#include "llama-grammar.h"
#include "llama.h"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

#define REQUIRE(condition)                                                                         \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            std::printf("%s:%d: %s\n", __FILE__, __LINE__, #condition);                            \
            std::exit(1);                                                                          \
        }                                                                                          \
    } while (0)

// Of all tokens, those that llama.cpp's mask leaves.
inline std::vector<bool> mask(const llama_grammar & g, int n_vocab) {
    std::vector<llama_token_data> data;
    for (int id = 0; id < n_vocab; ++id) {
        data.push_back({id, 1.0f, 0.0f});
    }
    llama_token_data_array array = {data.data(), data.size(), -1, false};
    llama_grammar_apply_impl(g, &array);
    std::vector<bool> allowed;
    for (const llama_token_data & token : data) {
        allowed.push_back(token.logit > -INFINITY);
    }
    return allowed;
}

// Runs a test with the vocabulary of the file that the command line names; prints "ok" at its end.
template <typename Test> int with_vocabulary(int argc, char ** argv, Test && test) {
    if (argc != 2) {
        return 2;
    }
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    llama_backend_init();
    llama_model_params params = llama_model_default_params();
    params.vocab_only = true;
    llama_model * model = llama_model_load_from_file(argv[1], params);
    REQUIRE(model != nullptr);
    test(llama_model_get_vocab(model));
    llama_model_free(model);
    std::printf("ok\n");
    return 0;
}
