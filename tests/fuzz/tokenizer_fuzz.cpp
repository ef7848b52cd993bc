// tokenizer_fuzz.cpp: any bytes as a text. Every pre-tokeniser splits it into what it was split
// into before patch 0010, and nothing of it is lost; the tokenisers of llama.cpp's own vocabularies
// take it.
#include "harness.h"
#include "splitters.h"
#include "src/unicode.h"

#include <vector>

namespace {

// SPM, WPM, byte-level BPE with many merges and with few, SPM that strips spaces around special
// tokens. Never freed: a vector that the end of the process destroys would have its models reported
// as leaks.
const std::vector<const spec_model *> & vocabularies() {
    static const std::vector<const spec_model *> & loaded = *[] {
        auto * models = new std::vector<const spec_model *>;
        for (const char * name : {"llama-spm", "bert-bge", "gpt-2", "deepseek-coder", "phi-3"}) {
            const std::string path = std::string("build/fuzz/models/ggml-vocab-") + name + ".gguf";
            spec_model_params params = {};
            params.path = path.c_str();
            params.use_mmap = true;
            params.vocab_only = true;
            spec_model * model = nullptr;
            REQUIRE(spec_model_load(&params, &model) == SPEC_OK);
            models->push_back(model);
        }
        return models;
    }();
    return loaded;
}

void split(const std::string & text, const splitter & exprs) {
    std::vector<std::string> was;
    std::vector<std::string> is;
    std::string was_error;
    std::string is_error;
    try {
        was = unpatched_split(text, exprs, false);
    } catch (const std::exception & e) {
        was_error = e.what();
    }
    try {
        is = unicode_regex_split(text, exprs, false);
    } catch (const std::exception & e) {
        is_error = e.what();
    }
    std::string was_words;
    std::string is_words;
    for (const std::string & word : was) {
        was_words += word.empty() ? "" : std::to_string(word.size()) + ":" + word;
    }
    for (const std::string & word : is) {
        is_words += word.empty() ? "" : std::to_string(word.size()) + ":" + word;
    }
    REQUIRE(was_words == is_words);
    REQUIRE(was_error == is_error);
}

void tokenize(const std::string & text, const spec_model * model, bool parse_special) {
    std::vector<int32_t> tokens(text.size() + 2);
    for (;;) {
        size_t n = 0;
        const int32_t rc = spec_model_tokenize(model, text.data(), text.size(), true, parse_special,
                                               tokens.data(), tokens.size(), &n);
        if (rc != SPEC_ERR_BUFFER_TOO_SMALL) {
            return; // a text of code points that are none is refused
        }
        REQUIRE(n > tokens.size());
        tokens.resize(n);
    }
}

} // namespace

// Not with the first input: they take longer than any text may.
extern "C" int LLVMFuzzerInitialize(int *, char ***) {
    vocabularies();
    return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t * data, size_t size) {
    choices choice(data, size < 2 ? size : 2);
    const std::vector<splitter> & splitters = all_splitters();
    const splitter & exprs = splitters[choice.byte() % splitters.size()];
    const uint8_t which = choice.byte();
    const std::string text(reinterpret_cast<const char *>(data) + (size < 2 ? size : 2),
                           size < 2 ? 0 : size - 2);
    split(text, exprs);
    tokenize(text, vocabularies()[which / 2 % vocabularies().size()], which % 2 == 0);
    return 0;
}
