// Masks of grammars (patch 0004): a token is masked where, and only where, the grammar does not
// take it; classes of characters mean what they say, however they are written; what is counted is
// bounded.
//
//   mask_test MODEL.gguf    prints "ok", or what differs
#include "vocabulary.h"

#include "llama-grammar.h"
#include "llama-vocab.h"
#include "llama.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

using grammar_ptr = std::unique_ptr<llama_grammar, decltype(&llama_grammar_free_impl)>;

grammar_ptr parse(const llama_vocab * vocab, const std::string & text) {
    grammar_ptr g(
        llama_grammar_init_impl(vocab, text.c_str(), "root", false, nullptr, 0, nullptr, 0),
        llama_grammar_free_impl);
    REQUIRE(g != nullptr);
    return g;
}

bool is_whole(const std::string & piece) {
    size_t i = 0;
    while (i < piece.size()) {
        const unsigned char c = piece[i];
        const size_t n = c < 0x80 ? 1 : c < 0xc0 ? 99 : c < 0xe0 ? 2 : c < 0xf0 ? 3 : 4;
        i += n;
    }
    return i == piece.size();
}

// Whether the grammar takes a token; it is asked by being given it.
bool takes(const llama_grammar & g, const llama_vocab * vocab, llama_token id) {
    const grammar_ptr copy(llama_grammar_clone_impl(g), llama_grammar_free_impl);
    if (vocab->is_eog(id)) {
        return std::any_of(copy->stacks.begin(), copy->stacks.end(),
                           [](const auto & s) { return s.empty(); });
    }
    try {
        llama_grammar_accept_token(*copy, id, vocab->token_to_piece(id));
        return true;
    } catch (const std::exception &) {
        return false;
    }
}

void compare(const llama_vocab * vocab, const std::string & grammar, const std::string & text) {
    const int n_vocab = (int)vocab->n_tokens();
    const grammar_ptr g = parse(vocab, grammar);
    for (size_t i = 0, n = 0; i <= text.size(); i += n) {
        const std::vector<bool> allowed = mask(*g, n_vocab);
        for (int id = 0; id < n_vocab; ++id) {
            const std::string & piece = vocab->token_to_piece(id);
            if (!vocab->is_eog(id) && (piece.empty() || piece[0] == 0 || !is_whole(piece))) {
                continue; // never allowed, or the beginning of a character: its mask may be too
                          // narrow
            }
            if (allowed[id] != takes(*g, vocab, id)) {
                std::printf("%s\nafter \"%s\": token %d \"%s\" is %s\n", grammar.c_str(),
                            text.substr(0, i).c_str(), id, piece.c_str(),
                            allowed[id] ? "allowed" : "masked");
                std::exit(1);
            }
        }
        n = 1; // the next character, whole
        while (i + n < text.size() && (text[i + n] & 0xc0) == 0x80) {
            ++n;
        }
        if (i < text.size()) {
            llama_grammar_accept_str(*g, text.substr(i, n));
        }
    }
}

// Grammars of every kind of stack: literals, classes both ways, "any", tokens, ends, and many of
// them at once.
void compare_all(const llama_vocab * vocab) {
    compare(vocab, "root ::= [a-z ]* | \"(\" [^)]* \")\" | \"0\"", "ab ");
    compare(vocab, "root ::= [a-z ]* | \"(\" [^)]* \")\" | \"0\"", "(a");
    compare(vocab, "root ::= [zyxa-cb-fA-C\\n ]+ \"!\"", "ab");
    compare(vocab, "root ::= [^aeiou]* [aeiou] .*", "th");
    compare(vocab, "root ::= \"the\" | \"them\" | \"theme\" [s]? | <[300]> | !<[301]> \"x\"",
            "the");
    compare(vocab, "root ::= ([a-m] | [n-z] | \" \" | \"e\" \"x\" | [^a-z])+", "say");
    compare(vocab,
            "root ::= \"{\" (string \":\" string)? \"}\"\nstring ::= \"\\\"\" "
            "([^\"\\\\\\x00-\\x1f] | \"\\\\\" "
            "[\"nrt])* \"\\\"\"",
            "{\"a");
    compare(vocab, "root ::= ([é-ü] | [a-zé])* \".\"", "a\xc3\xa9");
    std::string words; // stacks of many literals
    for (int i = 0; i < 60; ++i) {
        words += words.empty() ? "" : " | ";
        words += std::string("\"") + (char)('a' + i % 7) + (char)('a' + i % 11) +
                 (char)('a' + i % 3) + "\"";
    }
    compare(vocab, "root ::= (" + words + " | [A-Z]+ | \"a\" [^b]*)+", "a");
}

// The same class, written in any order, with doubles and overlaps, is the same mask; and costs the
// same.
void compare_classes(const llama_vocab * vocab) {
    std::mt19937 rng(1);
    const int n_vocab = (int)vocab->n_tokens();
    for (int round = 0; round < 20; ++round) {
        std::set<int> chars;
        std::vector<std::string> parts;
        for (int i = 0; i < 12; ++i) {
            const int first = 'A' + (int)(rng() % 50);
            const int last = first + (int)(rng() % 6);
            char text[32];
            std::snprintf(text, sizeof text, "\\x%02x-\\x%02x", first, last);
            parts.push_back(text);
            for (int c = first; c <= last; ++c) {
                chars.insert(c);
            }
        }
        std::string once;
        for (const int c : chars) {
            char text[8];
            std::snprintf(text, sizeof text, "\\x%02x", c);
            once += text;
        }
        std::string many;
        for (int i = 0; i < 100; ++i) {
            many += parts[rng() % parts.size()];
        }
        for (const std::string & part : parts) {
            many += part;
        }
        const char * const not_in = round % 2 == 0 ? "" : "^";
        const grammar_ptr a = parse(vocab, std::string("root ::= [") + not_in + once + "]*");
        const grammar_ptr b = parse(vocab, std::string("root ::= [") + not_in + many + "]*");
        llama_grammar_work & work = llama_grammar_thread_work();
        work.n = 0;
        const std::vector<bool> mask_a = mask(*a, n_vocab);
        const uint64_t n_a = work.n;
        work.n = 0;
        REQUIRE(mask_a == mask(*b, n_vocab));
        REQUIRE(work.n == n_a);
    }
}

void check_budget(const llama_vocab * vocab) {
    const int n_vocab = (int)vocab->n_tokens();
    llama_grammar_work & work = llama_grammar_thread_work();
    const grammar_ptr g = parse(vocab, "root ::= [a-z ]*");
    work = {};
    mask(*g, n_vocab);
    const uint64_t n = work.n;
    REQUIRE(n >= (uint64_t)n_vocab / 2);
    work = {0, n};
    mask(*g, n_vocab); // just enough
    work = {0, n - 1};
    bool is_refused = false;
    try {
        mask(*g, n_vocab);
    } catch (const std::exception &) {
        is_refused = true;
    }
    REQUIRE(is_refused);
    work = {};
    mask(*g, n_vocab); // the grammar is as it was
    REQUIRE(work.n == n);
}

} // namespace

int main(int argc, char ** argv) {
    return with_vocabulary(argc, argv, [](const llama_vocab * vocab) {
        compare_all(vocab);
        compare_classes(vocab);
        check_budget(vocab);
    });
}
