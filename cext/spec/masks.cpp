// Masks of grammars: places in a grammar with what may follow them, found once for all sequences
// that follow it, and the pieces of a vocabulary as a tree, so that what begins alike is asked
// about once.
//
// llama.cpp asks a grammar about each token of the vocabulary, at every place anew: 131,072 tokens
// take 15 to 35 ms. What is allowed is the same here, to the token (tests/kernels/place_test.cpp),
// but for texts that are not UTF-8: llama.cpp lets them begin with any byte behind a first one, and
// end within a character.

#include "masks.hpp"
#include "grammar_budget.hpp"
#include "internal.hpp"

#include "../src/llama-grammar.h"
#include "../src/llama-vocab.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <iterator>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <stdexcept>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

namespace drafthouse {

namespace {

// Of one grammar: what stays between two tokens, and what it may come to while one is chosen.
constexpr size_t PLACES_BYTES_MAX = size_t{4} << 20;
constexpr size_t PLACES_BYTES_LIMIT = size_t{16} << 20;
// Of one model.
constexpr size_t GRAMMARS_MAX = 64;
constexpr size_t GRAMMARS_BYTES_MAX = size_t{32} << 20;

using token_bits = std::vector<uint64_t>;

void set_bit(token_bits & bits, llama_token token) {
    bits[static_cast<size_t>(token) / 64] |= uint64_t{1} << (token % 64);
}

bool has_bit(const token_bits & bits, llama_token token) {
    return (bits[static_cast<size_t>(token) / 64] >> (token % 64) & 1) != 0;
}

// What has been done is told with what llama.cpp does, and bounded with it.
void count_work(uint64_t n) {
    llama_grammar_work & work = llama_grammar_thread_work();
    work.n += n;
    if (work.n > work.n_max) {
        throw std::runtime_error("the grammar takes too many comparisons for one token");
    }
}

// Pieces.

// How many bytes a character has behind its first one; -1: none begins so.
int32_t n_bytes_behind(uint8_t first) {
    if (first < 0x80) {
        return 0;
    }
    return first < 0xc2 ? -1 : first < 0xe0 ? 1 : first < 0xf0 ? 2 : first < 0xf5 ? 3 : -1;
}

// Whether a byte goes on with what is begun: neither with more bytes than the character needs, nor
// to a surrogate, nor beyond the last character. The second byte decides. The bits so far tell
// which one it is: behind it a character of four bytes has at least 0x10.
bool goes_on(llama_partial_utf8 begun, uint8_t byte) {
    uint8_t low = 0x80;
    uint8_t high = 0xbf;
    if (begun.n_remain == 2) {
        low = begun.value == 0 ? 0xa0 : low;
        high = begun.value == 0xd ? 0x9f : high;
    } else if (begun.n_remain == 3) {
        low = begun.value == 0 ? 0x90 : low;
        high = begun.value == 4 ? 0x8f : high;
    }
    return low <= byte && byte <= high;
}

// The characters that a piece ends or has, and what is begun behind it, where `begun` is so before
// it. False where they are not UTF-8, and no grammar takes it. llama.cpp reads them without a look
// at the bytes behind the first.
bool decode_piece(const std::string & piece, std::vector<uint32_t> & chars,
                  llama_partial_utf8 & begun) {
    chars.clear();
    const char * at = piece.c_str(); // up to a zero
    for (; *at != '\0'; ++at) {
        const auto byte = static_cast<uint8_t>(*at);
        if (begun.n_remain > 0) {
            if (!goes_on(begun, byte)) {
                return false;
            }
            begun = {(begun.value << 6) + (byte & 0x3fu), begun.n_remain - 1};
        } else {
            const int32_t n = n_bytes_behind(byte);
            if (n < 0) {
                return false;
            }
            begun = {n == 0 ? byte : byte & ((1u << (6 - n)) - 1), n};
        }
        if (begun.n_remain == 0) {
            chars.push_back(begun.value);
        }
    }
    return at != piece.c_str();
}

// The pieces of a vocabulary by their characters.
struct piece_tree {
    struct node {
        uint32_t chr;
        uint32_t depth;  // characters of the piece up to this one
        uint32_t behind; // the node behind all that begin with this one
        uint32_t first;  // of its tokens; they end where the next node's begin
    };

    std::vector<node> nodes; // depth first; the first has no character, the last is none
    std::vector<llama_token> tokens;
    std::vector<llama_partial_utf8> rests; // of the tokens, what they begin of a last character
    std::vector<llama_token> inner;        // those that begin within a character
    std::vector<llama_token> ends;         // those that end a text
    uint32_t depth_max = 0;

    explicit piece_tree(const llama_vocab * vocab) {
        const auto n_vocab = static_cast<llama_token>(vocab->n_tokens());
        std::vector<std::vector<uint32_t>> chars(static_cast<size_t>(n_vocab));
        std::vector<llama_partial_utf8> begun(static_cast<size_t>(n_vocab));
        std::vector<llama_token> order;
        for (llama_token id = 0; id < n_vocab; ++id) {
            const std::string & piece = vocab->token_to_piece(id);
            const auto i = static_cast<size_t>(id);
            if (vocab->is_eog(id)) {
                ends.push_back(id);
            } else if (decode_piece(piece, chars[i], begun[i])) {
                order.push_back(id);
            } else if ((static_cast<uint8_t>(piece.c_str()[0]) & 0xc0) == 0x80) {
                inner.push_back(id);
            }
        }
        const auto chars_of = [&](llama_token id) -> const std::vector<uint32_t> & {
            return chars[static_cast<size_t>(id)];
        };
        // By what they are, then by number. Clang 18 and later warn of GCC's std::stable_sort.
        std::sort(order.begin(), order.end(), [&](auto a, auto b) {
            return std::tie(chars_of(a), a) < std::tie(chars_of(b), b);
        });
        std::vector<uint32_t> path = {0};
        nodes.push_back({0, 0, 0, 0});
        for (const llama_token id : order) {
            add(path, chars_of(id));
            tokens.push_back(id);
            rests.push_back(begun[static_cast<size_t>(id)]);
        }
        leave(path, 0);
        nodes.push_back({0, 0, 0, static_cast<uint32_t>(tokens.size())});
    }

    size_t n_nodes() const { return nodes.size() - 1; }

private:
    // The nodes of a path from this depth on have no more to come.
    void leave(std::vector<uint32_t> & path, size_t depth) {
        for (; path.size() > depth; path.pop_back()) {
            nodes[path.back()].behind = static_cast<uint32_t>(nodes.size());
        }
    }

    // Goes from a path to that of these characters, which come behind it.
    void add(std::vector<uint32_t> & path, const std::vector<uint32_t> & chars) {
        size_t n_alike = 0;
        while (n_alike + 1 < path.size() && n_alike < chars.size() &&
               nodes[path[n_alike + 1]].chr == chars[n_alike]) {
            ++n_alike;
        }
        leave(path, n_alike + 1);
        for (size_t i = n_alike; i < chars.size(); ++i) {
            path.push_back(static_cast<uint32_t>(nodes.size()));
            nodes.push_back(
                {chars[i], static_cast<uint32_t>(i + 1), 0, static_cast<uint32_t>(tokens.size())});
        }
        depth_max = std::max(depth_max, static_cast<uint32_t>(chars.size()));
    }
};

// The tree of a model, made where it is first needed: what only compiles grammars needs none.
class piece_tree_once {
public:
    const piece_tree & of(const llama_vocab * vocab) {
        std::call_once(once_, [&] { tree_ = std::make_unique<const piece_tree>(vocab); });
        return *tree_;
    }

private:
    std::once_flag once_;
    std::unique_ptr<const piece_tree> tree_;
};

bool is_char(const llama_grammar_element * e) {
    return e->type != LLAMA_GRETYPE_TOKEN && e->type != LLAMA_GRETYPE_TOKEN_NOT;
}

} // namespace

// A place that texts come to: how they can be read so far, and what may follow.
struct grammar_place {
    llama_grammar_stacks stacks; // in order
    bool takes_end = false;
    // The first characters of the ranges that it does not tell apart, in order, and where a
    // character of each leads to; null: not known yet.
    std::vector<uint32_t> ranges;
    std::vector<grammar_place *> next;
    std::array<uint32_t, 128> low = {};        // the ranges of ASCII
    std::shared_ptr<const token_bits> allowed; // null: not known yet

    explicit grammar_place(llama_grammar_stacks && sorted) : stacks(std::move(sorted)) {
        ranges.push_back(0);
        for (const llama_grammar_stack & stack : stacks) {
            takes_end = takes_end || stack.empty();
            if (!stack.empty() && is_char(stack.back())) {
                add_ranges(stack.back());
            }
        }
        std::sort(ranges.begin(), ranges.end());
        ranges.erase(std::unique(ranges.begin(), ranges.end()), ranges.end());
        next.assign(ranges.size(), nullptr);
        for (uint32_t chr = 0; chr < low.size(); ++chr) {
            low[chr] = search(chr);
        }
    }

    size_t range_of(uint32_t chr) const { return chr < low.size() ? low[chr] : search(chr); }

    size_t n_bytes() const {
        size_t n = sizeof *this + ranges.size() * (sizeof ranges[0] + sizeof next[0]);
        for (const llama_grammar_stack & stack : stacks) {
            n += sizeof stack + stack.size() * sizeof stack[0];
        }
        return n + (allowed ? allowed->size() * sizeof(uint64_t) : 0);
    }

private:
    uint32_t search(uint32_t chr) const {
        const auto behind = std::upper_bound(ranges.begin(), ranges.end(), chr);
        return static_cast<uint32_t>(behind - ranges.begin() - 1);
    }

    void add_ranges(const llama_grammar_element * e) {
        do {
            const bool is_range = e[1].type == LLAMA_GRETYPE_CHAR_RNG_UPPER;
            if (e->type != LLAMA_GRETYPE_CHAR_ANY) {
                ranges.push_back(e->value);
                ranges.push_back(e[is_range].value + 1); // 0 behind the last: no bound
            }
            e += 1 + is_range;
        } while (e->type == LLAMA_GRETYPE_CHAR_ALT);
    }
};

// The places of one grammar that are known. Any thread.
class grammar_places {
public:
    grammar_places(std::shared_ptr<llama_grammar> grammar, std::shared_ptr<piece_tree_once> tree)
        : grammar_(std::move(grammar)), tree_(std::move(tree)), start_(grammar_->stacks) {
        for (const llama_grammar_rule & rule : grammar_->rules) {
            n_rule_bytes_ += sizeof rule + rule.size() * sizeof rule[0];
            for (const llama_grammar_element & e : rule) {
                has_tokens_ = has_tokens_ || !is_char(&e);
            }
        }
    }

    size_t n_bytes() const { return n_rule_bytes_ + n_bytes_; }

    std::shared_ptr<grammar_place> start() {
        const visit guard(*this);
        return find(llama_grammar_stacks(start_));
    }

    bool allows(const std::shared_ptr<grammar_place> & at, llama_partial_utf8 begun,
                llama_token token) {
        const visit guard(*this);
        if (grammar_->vocab->is_eog(token)) {
            return at->takes_end && begun.n_remain == 0;
        }
        if (has_tokens_ || begun.n_remain != 0) {
            token_bits bits(n_words());
            ask(*at, begun, {token}, bits);
            return has_bit(bits, token);
        }
        if (at->allowed) {
            return has_bit(*at->allowed, token);
        }
        return follow(*at, token, begun) != nullptr;
    }

    void accept(std::shared_ptr<grammar_place> & at, llama_partial_utf8 & begun,
                llama_token token) {
        const visit guard(*this);
        if (grammar_->vocab->is_eog(token)) {
            if (!at->takes_end || begun.n_remain != 0) {
                throw std::runtime_error("the grammar does not allow the end here");
            }
            return;
        }
        if (has_tokens_ || begun.n_remain != 0) {
            if (!stays_utf8(begun, token)) {
                throw std::runtime_error("the grammar does not allow this token here");
            }
            go_to(*at, begun);
            llama_grammar_accept_impl(*grammar_, token);
            at = find(std::move(grammar_->stacks));
            begun = grammar_->partial_utf8;
        } else {
            llama_partial_utf8 rest = {0, 0};
            grammar_place * to = follow(*at, token, rest);
            if (to == nullptr) {
                throw std::runtime_error("the grammar does not allow this token here");
            }
            at = places_.at(&to->stacks);
            begun = rest;
        }
    }

    std::shared_ptr<const token_bits> allowed(const std::shared_ptr<grammar_place> & at,
                                              llama_partial_utf8 begun) {
        const visit guard(*this);
        if (begun.n_remain == 0 && at->allowed) {
            return at->allowed;
        }
        const piece_tree & tree = tree_->of(grammar_->vocab);
        auto bits = std::make_shared<token_bits>(n_words());
        if (begun.n_remain != 0 && !has_tokens_) { // none else ends the character
            ask(*at, begun, tree.inner, *bits);
        } else if (has_tokens_ || !walk(tree, *at, *bits)) {
            std::vector<llama_token> all(grammar_->vocab->n_tokens());
            std::iota(all.begin(), all.end(), 0);
            ask(*at, begun, all, *bits);
        }
        if (at->takes_end && begun.n_remain == 0) {
            for (const llama_token id : tree.ends) {
                set_bit(*bits, id);
            }
        }
        if (begun.n_remain == 0) {
            n_bytes_ -= at->n_bytes();
            at->allowed = bits;
            n_bytes_ += at->n_bytes();
        }
        return bits;
    }

private:
    // Has the places to itself, and leaves as few as may stay.
    class visit {
    public:
        explicit visit(grammar_places & places) : places_(places), guard_(places.lock_) {}
        visit(const visit &) = delete;
        visit & operator=(const visit &) = delete;
        ~visit() { places_.forget_some(); }

    private:
        grammar_places & places_;
        const std::lock_guard<std::mutex> guard_;
    };

    struct by_stacks {
        bool operator()(const llama_grammar_stacks * a, const llama_grammar_stacks * b) const {
            return *a < *b;
        }
    };

    size_t n_words() const { return (grammar_->vocab->n_tokens() + size_t{63}) / 64; }

    void go_to(const grammar_place & at, llama_partial_utf8 begun) {
        grammar_->stacks = at.stacks;
        grammar_->partial_utf8 = begun;
    }

    bool stays_utf8(llama_partial_utf8 begun, llama_token token) const {
        thread_local std::vector<uint32_t> chars;
        return decode_piece(grammar_->vocab->token_to_piece(token), chars, begun);
    }

    // Asks llama.cpp about tokens: those behind which a text is still UTF-8, and that do not end
    // it.
    void ask(const grammar_place & at, llama_partial_utf8 begun,
             const std::vector<llama_token> & tokens, token_bits & bits) {
        std::vector<llama_token_data> data;
        data.reserve(tokens.size());
        for (const llama_token id : tokens) {
            if (!grammar_->vocab->is_eog(id) && stays_utf8(begun, id)) {
                data.push_back({id, 0.0f, 0.0f});
            }
        }
        llama_token_data_array array = {data.data(), data.size(), -1, false};
        go_to(at, begun);
        llama_grammar_apply_impl(*grammar_, &array);
        for (const llama_token_data & candidate : data) {
            if (candidate.logit != -INFINITY) {
                set_bit(bits, candidate.id);
            }
        }
    }

    // The place of these readings, made where it is not known.
    std::shared_ptr<grammar_place> find(llama_grammar_stacks && stacks) {
        std::sort(stacks.begin(), stacks.end());
        const auto known = places_.find(&stacks);
        if (known != places_.end()) {
            return known->second;
        }
        auto place = std::make_shared<grammar_place>(std::move(stacks));
        const size_t n = place->n_bytes();
        count_work(n / sizeof(void *));
        places_.emplace(&place->stacks, place);
        n_bytes_ += n;
        return place;
    }

    // Where a character leads to; null: it is not allowed.
    grammar_place * step(grammar_place & at, uint32_t chr) {
        grammar_place *& to = at.next[at.range_of(chr)];
        if (to == nullptr) {
            go_to(at, {0, 0});
            llama_grammar_accept(grammar_.get(), chr);
            to = grammar_->stacks.empty() ? &nowhere_ : find(std::move(grammar_->stacks)).get();
        }
        return to != &nowhere_ ? to : nullptr;
    }

    // Where a token leads to, but for what it begins of a last character; null: it is not allowed.
    grammar_place * follow(grammar_place & at, llama_token token, llama_partial_utf8 & rest) {
        thread_local std::vector<uint32_t> chars;
        if (!decode_piece(grammar_->vocab->token_to_piece(token), chars, rest)) {
            return nullptr;
        }
        grammar_place * to = &at;
        for (size_t i = 0; i < chars.size() && to != nullptr; ++i) {
            to = step(*to, chars[i]);
        }
        count_work(chars.size());
        if (to == nullptr || (rest.n_remain > 0 && !takes_begun(*to, rest))) {
            return nullptr;
        }
        return to;
    }

    // Whether some character that begins so is allowed.
    bool takes_begun(const grammar_place & at, llama_partial_utf8 begun) const {
        const uint32_t end = 0;
        const llama_grammar_candidates candidates = {{0, &end, begun, 0}};
        return std::any_of(at.stacks.begin(), at.stacks.end(), [&](const auto & stack) {
            return llama_grammar_reject_candidates_for_stack(grammar_->rules, stack, candidates)
                .empty();
        });
    }

    // Finds the tokens that a place allows. False where it comes to more places than are kept.
    bool walk(const piece_tree & tree, grammar_place & from, token_bits & bits) {
        std::vector<grammar_place *> path(tree.depth_max + size_t{1});
        path[0] = &from;
        uint32_t n_asked = 0;
        for (size_t i = 0; i < tree.n_nodes(); ++n_asked) {
            const piece_tree::node & node = tree.nodes[i];
            if (node.depth > 0) {
                path[node.depth] = step(*path[node.depth - 1], node.chr);
                if (path[node.depth] == nullptr) {
                    i = node.behind;
                    continue;
                }
            }
            take(*path[node.depth], tree, i++, bits);
            if (n_bytes_ > PLACES_BYTES_LIMIT) {
                return false;
            }
        }
        count_work(n_asked);
        return true;
    }

    // Allows the tokens of a node, which leads to a place, but for those that begin what it does
    // not take.
    void take(const grammar_place & at, const piece_tree & tree, size_t i, token_bits & bits) {
        llama_partial_utf8 asked = {0, 0};
        bool is_taken = true;
        for (size_t k = tree.nodes[i].first; k < tree.nodes[i + 1].first; ++k) {
            const llama_partial_utf8 rest = tree.rests[k];
            if (rest.n_remain != asked.n_remain || rest.value != asked.value) {
                is_taken = rest.n_remain == 0 || takes_begun(at, rest);
                asked = rest;
            }
            if (is_taken) {
                set_bit(bits, tree.tokens[k]);
            }
        }
    }

    // Where there are too many places, only those that sequences are at stay.
    void forget_some() {
        if (n_bytes_ <= PLACES_BYTES_MAX) {
            return;
        }
        for (auto it = places_.begin(); it != places_.end();) {
            it = it->second.use_count() == 1 ? places_.erase(it) : std::next(it);
        }
        size_t n = 0;
        for (const auto & entry : places_) {
            std::fill(entry.second->next.begin(), entry.second->next.end(), nullptr);
            entry.second->allowed = nullptr;
            n += entry.second->n_bytes();
        }
        n_bytes_ = n;
    }

    std::mutex lock_;
    std::shared_ptr<llama_grammar> grammar_; // at any place: each question goes to its own
    std::shared_ptr<piece_tree_once> tree_;
    llama_grammar_stacks start_;
    bool has_tokens_ = false; // it names tokens, not only characters: llama.cpp is asked
    size_t n_rule_bytes_ = 0;
    std::atomic<size_t> n_bytes_ = 0;
    std::map<const llama_grammar_stacks *, std::shared_ptr<grammar_place>, by_stacks> places_;
    grammar_place nowhere_{llama_grammar_stacks()};
};

grammar_walk::grammar_walk(std::shared_ptr<grammar_places> places)
    : places_(std::move(places)), at_(places_->start()) {}

bool grammar_walk::allows(llama_token token) const {
    return places_->allows(at_, {begun_, n_bytes_left_}, token);
}

void grammar_walk::accept(llama_token token) {
    llama_partial_utf8 begun = {begun_, n_bytes_left_};
    places_->accept(at_, begun, token);
    begun_ = begun.value;
    n_bytes_left_ = begun.n_remain;
}

const float * grammar_walk::masked(const float * logits, int32_t n_vocab) const {
    thread_local std::vector<float> copy;
    const std::shared_ptr<const token_bits> bits = places_->allowed(at_, {begun_, n_bytes_left_});
    copy.resize(static_cast<size_t>(n_vocab));
    for (int32_t id = 0; id < n_vocab; ++id) {
        copy[static_cast<size_t>(id)] = has_bit(*bits, id) ? logits[id] : -INFINITY;
    }
    return copy.data();
}

// The grammars of a model, by their texts.
struct grammar_cache::entries {
    struct entry {
        std::string text;
        std::shared_ptr<grammar_places> places;
    };

    std::mutex lock;
    std::shared_ptr<piece_tree_once> tree = std::make_shared<piece_tree_once>();
    std::list<entry> by_use;
    std::unordered_map<std::string, std::list<entry>::iterator> by_text;

    std::shared_ptr<grammar_places> find(const std::string & text) {
        const std::lock_guard<std::mutex> guard(lock);
        const auto at = by_text.find(text);
        if (at == by_text.end()) {
            return nullptr;
        }
        by_use.splice(by_use.begin(), by_use, at->second);
        return at->second->places;
    }

    void put(const std::string & text, const std::shared_ptr<grammar_places> & places) {
        const std::lock_guard<std::mutex> guard(lock);
        if (by_text.count(text) != 0) {
            return; // another thread was quicker
        }
        by_use.push_front({text, places});
        by_text[text] = by_use.begin();
        while (by_use.size() > GRAMMARS_MAX || n_bytes() > GRAMMARS_BYTES_MAX) {
            by_text.erase(by_use.back().text);
            by_use.pop_back();
        }
    }

    size_t n_bytes() const {
        size_t n = 0;
        for (const entry & e : by_use) {
            n += 2 * e.text.size() + e.places->n_bytes();
        }
        return n;
    }
};

grammar_cache::grammar_cache() : entries_(std::make_unique<entries>()) {}

grammar_cache::~grammar_cache() = default;

void grammar_cache::prepare(const llama_vocab * vocab) {
    if (llama_vocab_type(vocab) != LLAMA_VOCAB_TYPE_NONE) { // else no sampler has a grammar
        entries_->tree->of(vocab);
    }
}

std::unique_ptr<grammar_walk> grammar_cache::begin(const llama_vocab * vocab,
                                                   const std::string & grammar) {
    std::shared_ptr<grammar_places> places = entries_->find(grammar);
    if (!places) {
        places = std::make_shared<grammar_places>(compile_grammar(vocab, grammar), entries_->tree);
        entries_->put(grammar, places);
    }
    return std::make_unique<grammar_walk>(std::move(places));
}

} // namespace drafthouse
