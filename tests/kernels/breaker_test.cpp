// Breakers of DRY samplers (patch 0011): those that looking at each token for each breaker finds,
// and a sampler that is given them does what one does that was made with them.
//
//   breaker_test MODEL.gguf    prints "ok", or what differs
#include "vocabulary.h"

#include "llama-sampler.h"
#include "llama-vocab.h"
#include "llama.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace {

using tail = std::pair<llama_token, std::vector<llama_token>>;

// Each token for each breaker, as the definition says.
void find_plainly(const llama_vocab & vocab, const std::string & str, std::set<llama_token> & whole,
                  std::set<tail> & tails) {
    for (llama_token id = 0; id < (llama_token)vocab.n_tokens(); ++id) {
        const std::string word = vocab.detokenize({id}, true);
        if (word.find(str) != std::string::npos) {
            whole.insert(id);
            continue;
        }
        for (size_t n = 1; n < str.size() && n <= word.size(); ++n) {
            if (word.compare(word.size() - n, n, str, 0, n) == 0) {
                std::vector<llama_token> rest = vocab.tokenize(str.substr(n), false, false);
                rest.resize(std::min<size_t>(rest.size(), 20));
                tails.insert({id, rest});
            }
        }
    }
}

void compare_breakers(const llama_vocab & vocab) {
    const std::vector<std::string> texts = {"\n",
                                            ":",
                                            "\"",
                                            "*",
                                            "the",
                                            "ee",
                                            " and then",
                                            "\xc3\xa9",
                                            std::string(60, 'a'),
                                            "abracadabra abracadabra abracadabra abra",
                                            ""};
    const auto found = llama_dry_find_breakers(vocab, texts);
    REQUIRE(found.size() == texts.size());
    for (size_t i = 0; i < texts.size(); ++i) {
        std::set<llama_token> whole;
        std::set<tail> tails;
        if (!texts[i].empty()) {
            find_plainly(vocab, texts[i].substr(0, 40), whole, tails);
        }
        std::set<llama_token> found_whole;
        for (size_t id = 0; id < found[i]->is_whole.size(); ++id) {
            if (found[i]->is_whole[id]) {
                found_whole.insert((llama_token)id);
            }
        }
        REQUIRE(found_whole == whole);
        REQUIRE(found[i]->tails.size() == tails.size());
        REQUIRE(std::set<tail>(found[i]->tails.begin(), found[i]->tails.end()) == tails);
    }
}

// A sampler that is given its breakers does what one does that was made with them.
void compare_samplers(const llama_vocab & vocab) {
    const char * breakers[] = {"\n", "the", " a"};
    llama_sampler * made = llama_sampler_init_dry(&vocab, 0.8f, 1.75f, 1, 64, breakers, 3);
    llama_sampler * given = llama_sampler_init_dry(&vocab, 0.8f, 1.75f, 1, 64, nullptr, 0);
    REQUIRE(
        llama_sampler_dry_add_breakers(given, llama_dry_find_breakers(vocab, {"\n", "the", " a"})));
    llama_sampler * other = llama_sampler_init_top_k(3);
    REQUIRE(!llama_sampler_dry_add_breakers(other, {}));
    llama_sampler * bare = llama_sampler_init_dry(&vocab, 0.8f, 1.75f, 1, 64, nullptr, 0);
    bool has_mattered = false;
    const std::vector<llama_token> tokens =
        vocab.tokenize("say the word and say the word again\nsay the", false, false);
    for (const llama_token token : tokens) {
        std::vector<float> logits[4];
        llama_sampler * copy = llama_sampler_clone(given);
        llama_sampler * const all[] = {made, given, copy, bare};
        for (int i = 0; i < 4; ++i) {
            llama_sampler_accept(all[i], token);
            std::vector<llama_token_data> data;
            for (llama_token id = 0; id < (llama_token)vocab.n_tokens(); ++id) {
                data.push_back({id, 1.0f, 0.0f});
            }
            llama_token_data_array array = {data.data(), data.size(), -1, false};
            llama_sampler_apply(all[i], &array);
            for (const llama_token_data & it : data) {
                logits[i].push_back(it.logit);
            }
        }
        llama_sampler_free(copy);
        REQUIRE(logits[0] == logits[1]);
        REQUIRE(logits[0] == logits[2]);
        has_mattered = has_mattered || logits[0] != logits[3];
    }
    REQUIRE(has_mattered);
    for (llama_sampler * sampler : {made, given, other, bare}) {
        llama_sampler_free(sampler);
    }
}

} // namespace

int main(int argc, char ** argv) {
    return with_vocabulary(argc, argv, [](const llama_vocab * vocab) {
        compare_breakers(*vocab);
        compare_samplers(*vocab);
    });
}
