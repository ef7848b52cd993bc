// Places in grammars (cext/spec/masks.cpp): at each place that a text comes to, the tokens that are
// allowed are those that llama.cpp's grammar allows, to the token, but for those behind which a
// text is not UTF-8; and going on by one leads where llama.cpp goes. Texts are drawn token by
// token, from what is allowed.
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

int n_left_out = 0; // of what llama.cpp allows, as no text of UTF-8 goes on or ends so

int draw(int n) {
    return static_cast<int>(rng() % static_cast<unsigned>(n));
}

// How many bytes of its last character a text lacks; -1: it is not UTF-8. By the table of the
// standard (Unicode 15, table 3-7), not by bits as in masks.cpp.
int n_lacking(const std::string & text) {
    struct row {
        int first_low, first_high, second_low, second_high, n_bytes;
    };
    constexpr row ROWS[] = {
        {0x00, 0x7f, 0, 0, 1},       {0xc2, 0xdf, 0x80, 0xbf, 2}, {0xe0, 0xe0, 0xa0, 0xbf, 3},
        {0xe1, 0xec, 0x80, 0xbf, 3}, {0xed, 0xed, 0x80, 0x9f, 3}, {0xee, 0xef, 0x80, 0xbf, 3},
        {0xf0, 0xf0, 0x90, 0xbf, 4}, {0xf1, 0xf3, 0x80, 0xbf, 4}, {0xf4, 0xf4, 0x80, 0x8f, 4},
    };
    const auto byte = [&](size_t at) { return static_cast<int>(static_cast<uint8_t>(text[at])); };
    int n = 0;
    for (size_t at = 0; at < text.size(); at += static_cast<size_t>(n)) {
        const row * found = nullptr;
        for (const row & r : ROWS) {
            found = r.first_low <= byte(at) && byte(at) <= r.first_high ? &r : found;
        }
        if (found == nullptr) {
            return -1;
        }
        n = found->n_bytes;
        for (int i = 1; i < n; ++i) {
            if (at + static_cast<size_t>(i) == text.size()) {
                return n - i;
            }
            const int next = byte(at + static_cast<size_t>(i));
            if (next < (i == 1 ? found->second_low : 0x80) ||
                next > (i == 1 ? found->second_high : 0xbf)) {
                return -1;
            }
        }
    }
    return 0;
}

// What a grammar allows behind a text: by llama.cpp's mask, without the tokens behind which the
// text is not UTF-8, and without the end where a character lacks bytes. llama.cpp allows some of
// them.
std::vector<bool> utf8_mask(const llama_grammar & g, const llama_vocab * vocab,
                            const std::string & so_far) {
    std::vector<bool> allowed = mask(g, static_cast<int>(vocab->n_tokens()));
    for (size_t at = 0; at < allowed.size(); ++at) {
        const auto id = static_cast<llama_token>(at);
        const int n = n_lacking(vocab->is_eog(id) ? so_far : so_far + vocab->token_to_piece(id));
        if (allowed[at] && (vocab->is_eog(id) ? n != 0 : n < 0)) {
            allowed[at] = false;
            ++n_left_out;
        }
    }
    return allowed;
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
        const std::vector<bool> allowed = utf8_mask(*g, vocab, so_far);
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
    REQUIRE(n_left_out > 100);
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
