// Grammars: bounded before llama.cpp parses one, and probed before it constrains a sequence.

#include "grammar_budget.hpp"
#include "internal.hpp"

#include "../src/llama-grammar.h"
#include "../src/unicode.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace drafthouse {

namespace {

constexpr size_t GRAMMAR_BYTES_MAX = 65536;
constexpr int32_t GRAMMAR_DEPTH_MAX = 128; // llama.cpp's parser recurses once per open parenthesis

constexpr int64_t GRAMMAR_ELEMENTS_MAX = 1 << 20; // of all rules, repetitions written out
constexpr int64_t GRAMMAR_REPEAT_MAX = 2000;      // above, llama.cpp reads "no bound"
constexpr int64_t GRAMMAR_CHOICES_MAX = 1024;     // ways to begin any one rule
constexpr size_t GRAMMAR_STACKS_MAX = 1024;       // parses of one text at a time
constexpr int32_t GRAMMAR_PROBE_CHARS = 256;
constexpr uint64_t GRAMMAR_PROBE_WORK = 4000000; // comparisons, some milliseconds
constexpr int64_t GRAMMAR_CHECK_WORK = 1 << 24;  // of parser and probe together
constexpr int32_t GRAMMAR_RULE_DEPTH_MAX = 2048;
constexpr size_t GRAMMAR_TEXT_BYTES_MAX = 65536;
constexpr int64_t GRAMMAR_WORK_BASE = 1 << 22; // comparisons for one token, some milliseconds
constexpr int64_t GRAMMAR_WORK_VOCAB = 64;     // more for each token of the vocabulary

// The grammar's text, read once from left to right, to bound what llama.cpp's parser makes of it:
// it recurses once per open parenthesis and writes every repetition out. So comments, literals and
// tokens must end here where they end there.
struct grammar_scan {
    const std::string & text;
    size_t i = 0;
    int32_t depth = 0;
    int64_t n_symbol = 1; // elements of the last symbol
    int64_t n_elements = 0;

    // Over a literal or a class, to behind its end; its length is the symbol's number of elements.
    void skip_quoted(char end) {
        n_symbol = 0;
        for (++i; i < text.size() && text[i] != end; ++i, ++n_symbol) {
            const auto byte = static_cast<uint8_t>(text[i]);
            // llama.cpp takes as many bytes as the first one says, whatever they are.
            i += byte == '\\' ? 1 : byte < 0xc0 ? 0 : byte < 0xe0 ? 1 : byte < 0xf0 ? 2 : 3;
        }
        n_elements += n_symbol;
    }

    // Over a comment, to the end of its line.
    void skip_comment() {
        while (i < text.size() && text[i] != '\n' && text[i] != '\r') {
            ++i;
        }
    }

    int64_t number() {
        int64_t n = 0;
        for (; i < text.size() && text[i] >= '0' && text[i] <= '9'; ++i) {
            n = std::min<int64_t>(n * 10 + (text[i] - '0'), INT32_MAX);
        }
        return n;
    }

    void repetition() {
        int64_t n_max = 0;
        while (i < text.size() && text[i] != '}') {
            n_max = std::max(n_max, number());
            if (i < text.size() && text[i] == '#') {
                skip_comment();
            } else {
                i += i < text.size() && text[i] != '}' ? 1 : 0;
            }
        }
        if (n_max > GRAMMAR_REPEAT_MAX) {
            bad_grammar("a repetition of " + std::to_string(n_max) + "; at most " +
                        std::to_string(GRAMMAR_REPEAT_MAX) + " are possible");
        }
        n_elements += std::max<int64_t>(n_symbol, 1) * n_max;
    }

    void symbol(char c) {
        depth += c == '(' ? 1 : c == ')' ? -1 : 0;
        n_symbol = c == ' ' ? n_symbol : 1;
        n_elements += 1;
        if (depth > GRAMMAR_DEPTH_MAX) {
            bad_grammar("the grammar nests parentheses deeper than " +
                        std::to_string(GRAMMAR_DEPTH_MAX) + " levels");
        }
    }

    void run() {
        for (; i < text.size(); ++i) {
            switch (text[i]) {
            case '"':
                skip_quoted('"');
                break;
            case '[':
                skip_quoted(']');
                break;
            case '{':
                ++i;
                repetition();
                break;
            case '<': // a token, whatever it has before its end
                symbol('<');
                i = std::min(text.find('>', i), text.size());
                break;
            case '#':
                skip_comment();
                break;
            default:
                symbol(text[i]);
            }
            if (n_elements > GRAMMAR_ELEMENTS_MAX) {
                bad_grammar("the grammar's repetitions expand to more than " +
                            std::to_string(GRAMMAR_ELEMENTS_MAX) + " elements");
            }
        }
    }
};

// In how many ways each rule can begin. llama.cpp walks all of them, again and again, when it looks
// for left recursion and at every token: a few lines of grammar can make that take for ever.
struct grammar_choices {
    const llama_grammar_rules & rules;
    std::vector<int64_t> n_ways;
    std::vector<uint8_t> state; // 0 new, 1 in progress, 2 done
    std::vector<bool> is_nullable;

    explicit grammar_choices(const llama_grammar_rules & rules)
        : rules(rules), n_ways(rules.size()), state(rules.size()), is_nullable(rules.size()) {}

    static bool is_end(const llama_grammar_element & e) {
        return e.type == LLAMA_GRETYPE_END || e.type == LLAMA_GRETYPE_ALT;
    }

    // One element of the left edge of an alternative; false where the edge ends.
    bool count(const llama_grammar_element & e, int64_t & n, int32_t depth) {
        if (e.type != LLAMA_GRETYPE_RULE_REF) {
            n += 1;
            return false;
        }
        visit(e.value, depth + 1);
        n += n_ways[e.value];
        return is_nullable[e.value];
    }

    void visit(size_t id, int32_t depth) {
        if (state[id] == 2) {
            return;
        }
        if (state[id] == 1) {
            bad_grammar("a rule refers to itself before it takes a character (left recursion)");
        }
        if (depth > GRAMMAR_RULE_DEPTH_MAX) {
            bad_grammar("rules begin with rules, more than " +
                        std::to_string(GRAMMAR_RULE_DEPTH_MAX) + " deep");
        }
        state[id] = 1;
        int64_t n = 0;
        bool is_edge = true;
        for (const llama_grammar_element & e : rules[id]) {
            if (is_end(e)) {
                is_nullable[id] = is_nullable[id] || is_edge;
                n += is_edge ? 1 : 0;
                is_edge = true;
            } else if (is_edge) {
                is_edge = count(e, n, depth);
            }
            if (n > GRAMMAR_CHOICES_MAX) {
                bad_grammar("a rule can begin in more than " + std::to_string(GRAMMAR_CHOICES_MAX) +
                            " ways; give alternatives with the same beginning a common rule");
            }
        }
        n_ways[id] = n;
        state[id] = 2;
    }
};

// Whether some ranges of characters, or all that is not in them, have one that a text can have: no
// surrogate, and no NUL, at which a token's piece ends.
bool has_character(std::vector<std::pair<uint32_t, uint32_t>> ranges, bool is_negated) {
    if (!is_negated) {
        return std::any_of(ranges.begin(), ranges.end(), [](const auto & range) {
            const uint32_t low = std::max<uint32_t>(range.first, 1);
            const uint32_t high = std::min<uint32_t>(range.second, 0x10ffff);
            return low <= high && (low < 0xd800 || high > 0xdfff);
        });
    }
    ranges.emplace_back(0xd800, 0xdfff);
    std::sort(ranges.begin(), ranges.end());
    uint64_t next = 1; // the least one that may be a gap
    for (const auto & [low, high] : ranges) {
        if (low > next) {
            return true;
        }
        next = low <= high ? std::max<uint64_t>(next, uint64_t{high} + 1) : next;
    }
    return next <= 0x10ffff;
}

// The ranges of a class, whose first element this is; `i` is then at its last one.
std::vector<std::pair<uint32_t, uint32_t>> ranges_of(const llama_grammar_rule & rule, size_t & i) {
    std::vector<std::pair<uint32_t, uint32_t>> ranges;
    for (;; ++i) { // a rule ends with an element that is none of these
        const bool is_range = rule[i + 1].type == LLAMA_GRETYPE_CHAR_RNG_UPPER;
        ranges.emplace_back(rule[i].value, rule[i + is_range].value);
        i += is_range;
        if (rule[i + 1].type != LLAMA_GRETYPE_CHAR_ALT) {
            return ranges;
        }
    }
}

// Refuses what no text can go on with: a stream would end there, behind whatever came before.
void check_characters(const llama_grammar_parser & parser) {
    for (const auto & [name, id] : parser.symbol_ids) {
        const llama_grammar_rule & rule = parser.rules[id];
        for (size_t i = 0; i < rule.size(); ++i) {
            const bool is_negated = rule[i].type == LLAMA_GRETYPE_CHAR_NOT;
            if ((is_negated || rule[i].type == LLAMA_GRETYPE_CHAR) &&
                !has_character(ranges_of(rule, i), is_negated)) {
                bad_grammar("the rule " + printable(name.c_str(), 80) +
                            " has a character, or a class of them, that no text has: NUL, "
                            "surrogates, a range whose ends are reversed; write characters beyond "
                            "\\uFFFF as one, such as \\U0001F600");
            }
        }
    }
}

using grammar_ptr = std::unique_ptr<llama_grammar, decltype(&llama_grammar_free_impl)>;

// Over white space and comments, which may stand before the first rule.
const char * skip_blank(const char * at) {
    for (;;) {
        at += std::strspn(at, " \t\r\n");
        if (*at != '#') {
            return at;
        }
        at += std::strcspn(at, "\r\n");
    }
}

// Rule by rule: where llama.cpp parses a whole grammar that is wrong, it writes the text to
// standard error. It is a client's, who is told the reason.
void parse_rules(llama_grammar_parser & parser, const char * text) {
    try {
        for (const char * at = skip_blank(text); *at != '\0';) {
            at = parser.parse_rule(at);
        }
    } catch (const std::bad_alloc &) {
        throw;
    } catch (const std::exception & error) {
        constexpr size_t N_MAX = 160; // the reason may end with the rest of the text
        bad_grammar("the grammar cannot be parsed (" + printable(error.what(), N_MAX) + ")");
    }
    if (parser.rules.empty()) {
        bad_grammar("the grammar has no rules");
    }
    for (const auto & [name, id] : parser.symbol_ids) {
        if (id >= parser.rules.size() || parser.rules[id].empty()) {
            const std::string reason = printable(("Undefined rule " + name).c_str(), 160);
            bad_grammar("the grammar cannot be parsed (" + reason + ")");
        }
    }
}

grammar_ptr parse_grammar(const llama_vocab * vocab, const std::string & grammar) {
    check_grammar(grammar);
    forget_llama_reason();
    {
        llama_grammar_parser parser(vocab);
        parse_rules(parser, grammar.c_str());
        check_characters(parser);
        grammar_choices choices(parser.rules);
        for (size_t id = 0; id < parser.rules.size(); ++id) {
            choices.visit(id, 0);
        }
    }
    grammar_ptr g(
        llama_grammar_init_impl(vocab, grammar.c_str(), "root", false, nullptr, 0, nullptr, 0),
        llama_grammar_free_impl);
    if (!g) {
        bad_grammar("the grammar cannot be parsed" + llama_reason());
    }
    return g;
}

// A character that the parse can go on with, or 0.
uint32_t next_char(const llama_grammar_stack & stack) {
    if (stack.empty()) {
        return 0;
    }
    const llama_grammar_element & e = *stack.back();
    if (e.type == LLAMA_GRETYPE_CHAR) {
        return e.value;
    }
    return e.type == LLAMA_GRETYPE_CHAR_ANY || e.type == LLAMA_GRETYPE_CHAR_NOT ? 'a' : 0;
}

// llama_grammar_accept, parse by parse: together they would take time with the square of their
// number before it could be seen. What it takes besides is counted with the rest.
void accept_bounded(llama_grammar & g, uint32_t c) {
    llama_grammar_stacks & stacks = llama_grammar_get_stacks(&g);
    const llama_grammar_stacks before = std::move(stacks);
    llama_grammar_stacks after;
    for (const llama_grammar_stack & stack : before) {
        stacks.assign(1, stack);
        llama_grammar_accept(&g, c);
        llama_grammar_thread_work().n += stacks.size() * (after.size() + 1);
        for (const llama_grammar_stack & next : stacks) {
            if (std::find(after.begin(), after.end(), next) == after.end()) {
                after.push_back(next);
            }
        }
        if (after.size() > GRAMMAR_STACKS_MAX) {
            bad_grammar("the grammar is too ambiguous: one text has more than " +
                        std::to_string(GRAMMAR_STACKS_MAX) + " parses at a time");
        }
    }
    stacks = std::move(after);
}

// The character that most parses can go on with, or 0.
uint32_t likeliest_char(const llama_grammar_stacks & stacks) {
    std::map<uint32_t, size_t> counts;
    for (const llama_grammar_stack & stack : stacks) {
        ++counts[next_char(stack)];
    }
    counts.erase(0);
    const auto best = std::max_element(counts.begin(), counts.end(),
                                       [](auto & a, auto & b) { return a.second < b.second; });
    return best != counts.end() ? best->first : 0;
}

// Follows one text for a while, to find grammars whose parses multiply with every character.
void probe_grammar(llama_grammar & g) {
    const llama_grammar_work & work = llama_grammar_thread_work();
    const uint64_t n_work_max = work.n + GRAMMAR_PROBE_WORK;
    for (int32_t i = 0; i < GRAMMAR_PROBE_CHARS && work.n < n_work_max; ++i) {
        const uint32_t c = likeliest_char(llama_grammar_get_stacks(&g));
        if (c == 0) {
            return;
        }
        accept_bounded(g, c);
    }
}

bool grammar_accepts(const std::string & grammar, const std::string & text) {
    if (text.size() > GRAMMAR_TEXT_BYTES_MAX) {
        fail(SPEC_ERR_INVALID_ARGUMENT, "the text is longer than 64 KiB");
    }
    const grammar_ptr g = parse_grammar(nullptr, grammar);
    for (const uint32_t c : unicode_cpts_from_utf8(text)) {
        accept_bounded(*g, c);
    }
    const llama_grammar_stacks & stacks = llama_grammar_get_stacks(g.get());
    return std::any_of(stacks.begin(), stacks.end(), [](const auto & s) { return s.empty(); });
}

} // namespace

[[noreturn]] void bad_grammar(const std::string & text) {
    fail(SPEC_ERR_BAD_GRAMMAR, text);
}

void check_grammar(const std::string & grammar) {
    if (grammar.size() > GRAMMAR_BYTES_MAX) {
        bad_grammar("the grammar has " + std::to_string(grammar.size()) + " bytes; at most " +
                    std::to_string(GRAMMAR_BYTES_MAX) + " are accepted");
    }
    if (grammar.compare(0, 11, "%llguidance") == 0) {
        bad_grammar("llguidance grammars are not supported; expected GBNF");
    }
    grammar_scan{grammar}.run();
}

int64_t grammar_work_max(int32_t n_vocab) {
    return GRAMMAR_WORK_BASE + GRAMMAR_WORK_VOCAB * n_vocab;
}

grammar_budget::grammar_budget(int64_t n_max, int64_t & n_done) : n_done_(n_done) {
    llama_grammar_work & work = llama_grammar_thread_work();
    n_before_ = work.n;
    n_max_before_ = work.n_max;
    work.n = 0;
    work.n_max = static_cast<uint64_t>(n_max);
}

grammar_budget::~grammar_budget() {
    llama_grammar_work & work = llama_grammar_thread_work();
    n_done_ += static_cast<int64_t>(work.n);
    work.n = n_before_;
    work.n_max = n_max_before_;
}

bool grammar_budget::is_exceeded() const {
    const llama_grammar_work & work = llama_grammar_thread_work();
    return work.n > work.n_max;
}

// Compiles a grammar and probes it, in bounded time.
std::shared_ptr<llama_grammar> compile_grammar(const llama_vocab * vocab,
                                               const std::string & grammar) {
    int64_t n_done = 0;
    const grammar_budget budget(GRAMMAR_CHECK_WORK, n_done);
    try {
        grammar_ptr g = parse_grammar(vocab, grammar);
        const llama_grammar_stacks start = g->stacks;
        probe_grammar(*g);
        g->stacks = start;
        return g;
    } catch (const failure &) {
        throw;
    } catch (...) {
        if (budget.is_exceeded()) {
            bad_grammar("the grammar is too ambiguous: a few characters take more than " +
                        std::to_string(GRAMMAR_CHECK_WORK) + " comparisons");
        }
        throw;
    }
}

} // namespace drafthouse

using namespace drafthouse;

extern "C" {

int32_t spec_grammar_check(const char * grammar) {
    return guarded([&] { compile_grammar(nullptr, &deref(grammar, "grammar")); });
}

int32_t spec_grammar_accepts(const char * grammar, const char * text, size_t n_text, bool * out) {
    return guarded([&] {
        const std::string input(n_text > 0 ? &deref(text, "text") : "", n_text);
        deref(out, "out") = grammar_accepts(&deref(grammar, "grammar"), input);
    });
}

} // extern "C"
