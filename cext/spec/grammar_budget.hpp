// What a grammar may do for one token, and what it did: grammar.cpp counts, choose.cpp and hand.cpp
// ask.

#ifndef DRAFTHOUSE_SPEC_GRAMMAR_BUDGET_HPP
#define DRAFTHOUSE_SPEC_GRAMMAR_BUDGET_HPP

#include "internal.hpp"

namespace drafthouse {

// Counts the comparisons that a grammar takes on this thread while it lives, adds them to a sum,
// and bounds them: beyond its budget the grammar throws.
class grammar_budget {
public:
    grammar_budget(int64_t n_max, int64_t & n_done);
    grammar_budget(const grammar_budget &) = delete;
    grammar_budget & operator=(const grammar_budget &) = delete;
    ~grammar_budget();

    bool is_exceeded() const;

private:
    int64_t & n_done_;
    uint64_t n_before_; // of whoever counts around it
    uint64_t n_max_before_;
};

// Comparisons for one token. A mask of a string in a JSON schema takes some 16 for each token of
// the vocabulary.
int64_t grammar_work_max(int32_t n_vocab);

// Runs what chooses one token of a sequence: within the budget of its grammar, if it has one.
template <typename Body>
void within_budget(const spec_sampler & sampler, int64_t & n_done, Body && body) {
    if (!sampler.grammar) {
        body();
        return;
    }
    const grammar_budget budget(grammar_work_max(sampler.n_vocab), n_done);
    try {
        body();
    } catch (...) {
        if (budget.is_exceeded()) {
            fail(SPEC_ERR_GRAMMAR_TOO_COSTLY, "the grammar takes more comparisons for one token "
                                              "than the model's vocabulary allows");
        }
        throw;
    }
}

} // namespace drafthouse

#endif
