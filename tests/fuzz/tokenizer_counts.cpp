// tokenizer_counts.cpp: what it costs to tokenise a text, counted, not timed: the basic blocks that
// the tokenisers execute (llama-vocab.cpp and unicode.cpp are compiled with
// -fsanitize-coverage=trace-pc), and one for each 16 bytes that the C library moves, compares,
// searches or hashes for them (linked with --wrap). The same on every run.
//
// tokenizer_counts VOCABULARY MODEL PRE KIND BYTES…: a line for each kind of text: kind, then for
// each size tokens and count. MODEL and PRE replace tokenizer.ggml.model and tokenizer.ggml.pre,
// unless they are empty. No KIND means all.
#include "llama.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <utility>
#include <vector>

static uint64_t count = 0;

static void add_bytes(size_t n) {
    count += 1 + n / 16;
}

extern "C" {
void __sanitizer_cov_trace_pc() {
    ++count;
}

void * __real_memcpy(void * to, const void * from, size_t n);
void * __real_memmove(void * to, const void * from, size_t n);
void * __real_memset(void * to, int c, size_t n);
int __real_memcmp(const void * a, const void * b, size_t n);
void * __real_memchr(const void * s, int c, size_t n);
size_t __real__ZSt11_Hash_bytesPKvmm(const void * s, size_t n, size_t seed);

void * __wrap_memcpy(void * to, const void * from, size_t n) {
    add_bytes(n);
    return __real_memcpy(to, from, n);
}

void * __wrap_memmove(void * to, const void * from, size_t n) {
    add_bytes(n);
    return __real_memmove(to, from, n);
}

void * __wrap_memset(void * to, int c, size_t n) {
    add_bytes(n);
    return __real_memset(to, c, n);
}

int __wrap_memcmp(const void * a, const void * b, size_t n) {
    add_bytes(n);
    return __real_memcmp(a, b, n);
}

void * __wrap_memchr(const void * s, int c, size_t n) {
    void * found = __real_memchr(s, c, n);
    add_bytes(found == nullptr
                  ? n
                  : static_cast<size_t>(static_cast<char *>(found) - static_cast<const char *>(s)));
    return found;
}

size_t __wrap__ZSt11_Hash_bytesPKvmm(const void * s, size_t n, size_t seed) {
    add_bytes(n);
    return __real__ZSt11_Hash_bytesPKvmm(s, n, seed);
}
}

namespace {

using maker = std::function<std::string(size_t)>;

maker repeat(std::string piece) {
    return [piece = std::move(piece)](size_t n_bytes) {
        std::string text;
        text.reserve(n_bytes + piece.size());
        while (text.size() < n_bytes) {
            text += piece;
        }
        return text;
    };
}

// Spaces, then something after all of them: no part of them is the end of the text.
std::string spaces_and_letter(size_t n_bytes) {
    return std::string(n_bytes - 1, ' ') + "x";
}

std::string newline_and_spaces(size_t n_bytes) {
    return std::string(n_bytes / 2, '\n') + std::string(n_bytes / 2 - 1, ' ') + "x";
}

// One after the other, each with a letter behind it.
std::string special_tokens(const llama_vocab * vocab) {
    std::string all;
    for (int32_t token = 0; token < llama_vocab_n_tokens(vocab) && all.size() < 4096; ++token) {
        const auto attr = llama_vocab_get_attr(vocab, token);
        if ((attr & (LLAMA_TOKEN_ATTR_CONTROL | LLAMA_TOKEN_ATTR_USER_DEFINED)) != 0) {
            all += llama_vocab_get_text(vocab, token) + std::string("x");
        }
    }
    return all.empty() ? "x" : all;
}

std::vector<std::pair<const char *, maker>> kinds(const llama_vocab * vocab) {
    return {
        {"exclamation", repeat("!")},
        {"letter", repeat("a")},
        {"capital", repeat("A")},
        {"digit", repeat("1")},
        {"apostrophe", repeat("'")},
        {"ideograph", repeat("\xE4\xB8\xAD")},
        {"accent", repeat("\xCC\x81")},
        {"private", repeat("\xEE\x80\x80")}, // in no vocabulary
        {"emoji", repeat("\xF0\x9F\x91\xA8\xE2\x80\x8D")},
        {"not-utf8", repeat("\xFF")},
        {"spaces", repeat(" ")},
        {"spaces-x", spaces_and_letter},
        {"newlines", repeat("\n")},
        {"newlines-spaces-x", newline_and_spaces},
        {"spaces-of-511", repeat(std::string(511, ' ') + "x")},
        {"letters-spaces", repeat("a ")},
        {"mixed",
         repeat("The quick brown fox doesn't; 12345 "
                "\xD0\x9F\xD1\x80\xD0\xB8\xD0\xB2\xD0\xB5\xD1\x82, \xE4\xBD\xA0\xE5\xA5\xBD"
                " \xE0\xA4\xA8\xE0\xA4\xAE\xE0\xA4\xB8\xE0\xA5\x8D\xE0\xA4\xA4\xE0\xA5\x87 "
                "\xD9\x85\xD8\xB1\xD8\xAD"
                "\xD8\xA8\xD8\xA7 \xED\x95\x9C\xEA\xB8\x80\r\n\tif (x == 0x1F) { return; } // "
                "\xC3\xA9t\xC3\xA9 ")},
        {"special", repeat(special_tokens(vocab))},
    };
}

llama_model * load(const char * path, const char * tokenizer, const char * pre) {
    llama_model_kv_override overrides[3] = {}; // the last ends the list
    int n = 0;
    for (const auto & [key, value] :
         {std::pair("tokenizer.ggml.model", tokenizer), std::pair("tokenizer.ggml.pre", pre)}) {
        if (*value != 0) {
            overrides[n].tag = LLAMA_KV_OVERRIDE_TYPE_STR;
            std::snprintf(overrides[n].key, sizeof overrides[n].key, "%s", key);
            std::snprintf(overrides[n].val_str, sizeof overrides[n].val_str, "%s", value);
            ++n;
        }
    }
    llama_model_params params = llama_model_default_params();
    params.vocab_only = true;
    params.kv_overrides = overrides;
    return llama_model_load_from_file(path, params);
}

void tokenize(const llama_vocab * vocab, const std::string & text) {
    std::vector<llama_token> tokens(2 * text.size() + 8); // a byte may become two unknown symbols
    const uint64_t before = count;
    const int32_t n =
        llama_tokenize(vocab, text.data(), static_cast<int32_t>(text.size()), tokens.data(),
                       static_cast<int32_t>(tokens.size()), true, true);
    std::printf(" %d %llu", n, static_cast<unsigned long long>(count - before));
}

} // namespace

int main(int argc, char ** argv) {
    if (argc < 6) {
        std::fprintf(stderr, "usage: tokenizer_counts VOCABULARY MODEL PRE KIND BYTES…\n");
        return 2;
    }
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    llama_model * model = load(argv[1], argv[2], argv[3]);
    if (model == nullptr) {
        std::fprintf(stderr, "%s cannot be loaded as \"%s\", \"%s\"\n", argv[1], argv[2], argv[3]);
        return 1;
    }
    const llama_vocab * vocab = llama_model_get_vocab(model);
    for (const auto & [name, make] : kinds(vocab)) {
        if (*argv[4] != 0 && std::strcmp(argv[4], name) != 0) {
            continue;
        }
        std::printf("%s", name);
        for (int i = 5; i < argc; ++i) {
            tokenize(vocab, make(static_cast<size_t>(std::atoll(argv[i]))));
        }
        std::printf("\n");
        std::fflush(stdout);
    }
    llama_model_free(model);
    return 0;
}
