// What a grammar allows next. Its places are found as texts come to them, each with the tokens that
// may follow, and are shared by all sequences of a model that follow the same grammar.

#ifndef DRAFTHOUSE_SPEC_MASKS_HPP
#define DRAFTHOUSE_SPEC_MASKS_HPP

#include "llama.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

struct llama_grammar;

namespace drafthouse {

class grammar_places; // of one grammar
struct grammar_place;

// Where a sequence is in its grammar. One thread at a time.
class grammar_walk {
public:
    explicit grammar_walk(std::shared_ptr<grammar_places> places);

    // Whether the grammar takes a token here; the end where it may end.
    bool allows(llama_token token) const;
    // Goes on by a token. Throws where it is not allowed.
    void accept(llama_token token);
    // Sets the logits of what is not allowed to -inf, in a copy that this thread has until it asks
    // for the next.
    const float * masked(const float * logits, int32_t n_vocab) const;

private:
    std::shared_ptr<grammar_places> places_;
    std::shared_ptr<grammar_place> at_;
    uint32_t begun_ = 0; // the bits of a character that the last token began
    int32_t n_bytes_left_ = 0;
};

// The grammars of a model that are known, least recently used ones left out. Any thread.
class grammar_cache {
public:
    grammar_cache();
    grammar_cache(const grammar_cache &) = delete;
    grammar_cache & operator=(const grammar_cache &) = delete;
    ~grammar_cache();

    // Reads the vocabulary, so that no request has to wait for it. Once.
    void prepare(const llama_vocab * vocab);
    // Begins a text. Throws what compile_grammar throws.
    std::unique_ptr<grammar_walk> begin(const llama_vocab * vocab, const std::string & grammar);

private:
    struct entries;
    std::unique_ptr<entries> entries_;
};

} // namespace drafthouse

#endif
