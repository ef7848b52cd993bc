// Places in grammars (cext/spec/masks.cpp): at each place that a text comes to, the tokens that are
// allowed are those that llama.cpp's grammar allows, to the token; and going on by one leads where
// llama.cpp goes. Texts are drawn token by token, from what is allowed.
//
//   place_test MODEL.gguf    prints "ok", or what differs
#include "spec/internal.hpp"
#include "spec/masks.hpp"
#include "vocabulary.h"

#include "llama-grammar.h"
#include "llama-vocab.h"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <vector>

namespace {

std::mt19937 rng(1);

int draw(int n) {
    return static_cast<int>(rng() % static_cast<unsigned>(n));
}

// A text of a grammar, and what may follow each of its tokens. Tokens that begin within a character
// or leave one begun are taken as often as all others together, where there are any.
int compare(drafthouse::grammar_cache & cache, const llama_vocab * vocab, const std::string & text,
            int n_tokens) {
    const int n_vocab = static_cast<int>(vocab->n_tokens());
    const std::shared_ptr<llama_grammar> g = drafthouse::compile_grammar(vocab, text);
    const auto walk = cache.begin(vocab, text);
    const std::vector<float> logits(static_cast<size_t>(n_vocab), 1.0f);
    std::string so_far;
    for (int i = 0; i < n_tokens; ++i) {
        const std::vector<bool> allowed = mask(*g, n_vocab);
        std::vector<llama_token> usual, odd;
        for (int round = 0; round < 2; ++round) { // before the mask is known, and after
            for (int id = 0; id < n_vocab; ++id) {
                const bool is_asked_all = id % 7 == i % 7;
                const auto at = static_cast<size_t>(id);
                if (is_asked_all && walk->allows(id) != allowed[at]) {
                    std::printf("%s\nafter \"%s\": token %d \"%s\" is %s\n", text.c_str(),
                                so_far.c_str(), id, vocab->token_to_piece(id).c_str(),
                                allowed[at] ? "allowed" : "masked");
                    std::exit(1);
                }
            }
            const float * masked = walk->masked(logits.data(), n_vocab);
            for (int id = 0; id < n_vocab; ++id) {
                const auto at = static_cast<size_t>(id);
                if ((masked[id] == 1.0f) != allowed[at]) {
                    std::printf("%s\nbehind \"%s\": token %d \"%s\" is %s\n", text.c_str(),
                                so_far.c_str(), id, vocab->token_to_piece(id).c_str(),
                                allowed[at] ? "allowed" : "masked");
                    std::exit(1);
                }
            }
        }
        for (int id = 0; id < n_vocab; ++id) {
            if (allowed[static_cast<size_t>(id)] && !vocab->is_eog(id)) {
                const std::string & piece = vocab->token_to_piece(id);
                const bool is_odd = (piece.back() & 0x80) != 0;
                (is_odd ? odd : usual).push_back(id);
            }
        }
        const std::vector<llama_token> & from =
            odd.empty() || (!usual.empty() && draw(2) == 0) ? usual : odd;
        if (from.empty()) {
            return i + 1; // only the end is left
        }
        const llama_token token = from[static_cast<size_t>(draw(static_cast<int>(from.size())))];
        llama_grammar_accept_impl(*g, token);
        walk->accept(token);
        so_far += vocab->token_to_piece(token);
    }
    return n_tokens;
}

// Grammars.

std::string drawn_class() {
    static const std::vector<std::string> parts = {"a-f", "e-z",         "A-Z",   "0-9",   " ",
                                                   "\\n", "é-ü",         "\\\"",  "一-龥", "x",
                                                   "\\]", "\\x00-\\x1f", "🌀-🙏", "а-я"};
    std::string text = draw(3) == 0 ? "[^" : "[";
    for (int i = 1 + draw(3); i > 0; --i) {
        text += parts[static_cast<size_t>(draw(static_cast<int>(parts.size())))];
    }
    return text + "]";
}

std::string drawn_part(int depth) {
    static const std::vector<std::string> words = {"the", " of",  "é",   "日本", "{",  "\\\"",
                                                   "in",  "int ", "\\n", "0",    "🙂", "self."};
    const int kind = draw(depth > 0 ? 7 : 3);
    if (kind < 1) {
        return drawn_class();
    }
    if (kind < 2) {
        return "\"" + words[static_cast<size_t>(draw(static_cast<int>(words.size())))] + "\"";
    }
    if (kind < 3) {
        return draw(4) == 0 ? "." : drawn_class() + "+";
    }
    static const std::vector<std::string> counts = {"", "*", "+", "?", "{2}", "{1,3}", "{0,2}"};
    std::string text = "(";
    for (int i = 1 + draw(3); i > 0; --i) {
        text += drawn_part(depth - 1) + (i > 1 ? (draw(2) == 0 ? " | " : " ") : "");
    }
    return text + ")" + counts[static_cast<size_t>(draw(static_cast<int>(counts.size())))];
}

const char * const JSON =
    "root ::= object\n"
    "value ::= object | array | string | number | \"true\" | \"null\"\n"
    "object ::= \"{\" ws (string \":\" ws value (\",\" ws string \":\" ws value)*)? \"}\" ws\n"
    "array ::= \"[\" ws (value (\",\" ws value)*)? \"]\" ws\n"
    "string ::= \"\\\"\" ([^\"\\\\\\x7F\\x00-\\x1F] | \"\\\\\" ([\"\\\\bfnrt] | \"u\" "
    "[0-9a-fA-F]{4}))* \"\\\"\" ws\n"
    "number ::= \"-\"? [0-9]+ (\".\" [0-9]+)? ws\n"
    "ws ::= | \" \" | \"\\n\" [ \\t]{0,20}\n";

void compare_all(const llama_vocab * vocab) {
    drafthouse::grammar_cache cache;
    cache.prepare(vocab);
    compare(cache, vocab, JSON, 60);
    compare(cache, vocab, JSON, 60); // another text, with places that are known
    compare(cache, vocab, "root ::= .*", 30);
    compare(cache, vocab, "root ::= [é-ü一-龥🌀-🙏]*", 40);
    compare(cache, vocab, "root ::= [^ -~]{3,9} \"!\"", 20);
    compare(cache, vocab, "root ::= (<[300]> | !<[301]> \"x\" | [a-z])*", 20);
    compare(cache, vocab, "root ::= \"a\"? \"b\"? <[300]>", 8);
    int n_compared = 0;
    for (int i = 0; i < 150; ++i) {
        std::string text = "root ::= " + drawn_part(2) + " | " + drawn_part(3) + "*";
        try {
            drafthouse::compile_grammar(vocab, text);
        } catch (const drafthouse::failure &) {
            continue; // too ambiguous
        }
        n_compared += compare(cache, vocab, text, 8);
    }
    REQUIRE(n_compared > 300);
}

// More places than are kept: they are found anew, and those of other texts stay right.
void forget_places(const llama_vocab * vocab) {
    drafthouse::grammar_cache cache;
    // Each character leads to another place, with a mask of its own.
    const std::string text = "root ::= [a-z ]{0,1000} \"!\" | [a-y ]{0,999} \"?\"";
    const auto first = cache.begin(vocab, text);
    const int n_vocab = static_cast<int>(vocab->n_tokens());
    const std::vector<float> logits(static_cast<size_t>(n_vocab), 1.0f);
    llama_token letter = -1;
    for (int id = 0; id < n_vocab; ++id) {
        letter = vocab->token_to_piece(id) == "e" ? id : letter;
    }
    REQUIRE(letter >= 0);
    first->accept(letter);
    compare(cache, vocab, text, 300);
    const auto g = drafthouse::compile_grammar(vocab, text);
    llama_grammar_accept_impl(*g, letter);
    const std::vector<bool> allowed = mask(*g, n_vocab);
    const float * masked = first->masked(logits.data(), n_vocab);
    for (int id = 0; id < n_vocab; ++id) {
        REQUIRE((masked[id] == 1.0f) == allowed[static_cast<size_t>(id)]);
    }
    for (int i = 0; i < 200; ++i) { // more grammars than are kept
        compare(cache, vocab, "root ::= \"a\"{" + std::to_string(i) + "} \"b\"*", 2);
    }
}

// What is not allowed is refused, and changes nothing.
void refuse(const llama_vocab * vocab) {
    drafthouse::grammar_cache cache;
    const auto walk = cache.begin(vocab, "root ::= \"the\" [0-9]*");
    const int n_vocab = static_cast<int>(vocab->n_tokens());
    int n_refused = 0;
    for (int id = 0; id < n_vocab; ++id) {
        if (!walk->allows(id)) {
            try {
                walk->accept(id);
                REQUIRE(false);
            } catch (const std::runtime_error &) {
                ++n_refused;
            }
        }
    }
    REQUIRE(n_refused > n_vocab - 10);
    for (int id = 0; id < n_vocab; ++id) {
        if (vocab->token_to_piece(id) == "the") {
            REQUIRE(walk->allows(id));
            walk->accept(id);
        }
    }
    for (int id = 0; id < n_vocab; ++id) {
        REQUIRE(!vocab->is_eog(id) || walk->allows(id));
    }
}

} // namespace

int main(int argc, char ** argv) {
    return with_vocabulary(argc, argv, [](const llama_vocab * vocab) {
        refuse(vocab);
        compare_all(vocab);
        forget_places(vocab);
    });
}
