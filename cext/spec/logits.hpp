// Rows of logits, whole: what all of a vocabulary is asked, in vectors.

#ifndef DRAFTHOUSE_SPEC_LOGITS_HPP
#define DRAFTHOUSE_SPEC_LOGITS_HPP

#include "llama.h"

#include <cstdint>
#include <vector>

namespace drafthouse {

// The first sampler of a chain that does something, where that is a top-p or a min-p: what it
// leaves of a whole vocabulary is found in less time without it.
struct first_cut {
    int32_t n_done = 0; // samplers of the chain that need not be asked; 0: there is no such cut
    float top_p = 0.0f; // 0: it is a min-p
    float min_p = 0.0f;
};

// Raises SPEC_ERR_NO_TOKEN_ALLOWED: no token of a row may be chosen.
[[noreturn]] void nothing_allowed();

// Refuses a row with a logit that is no number, or infinite upwards: it would leave no token a
// probability, or all of it to one token, and breaks the order that sorting relies on. Models do
// give minus infinity, to tokens that are never meant.
void check_logits(const float * logits, int32_t n);

// Natural log of the sum of exp(logits).
double log_total(const float * logits, int32_t n);

// The token of the greatest logit, the first one where several tie; none of `banned`.
llama_token argmax(const float * logits, int32_t n, const std::vector<llama_token> & banned);

// The greatest logits as candidates, the greatest first; the lower id first where they tie.
void find_greatest(const float * logits, int32_t n_vocab, int32_t n,
                   std::vector<llama_token_data> & out);

// The likeliest tokens that have `top_p` of the probability together, the likeliest first; the
// lower id first where they tie.
void find_nucleus(const float * logits, int32_t n_vocab, float top_p,
                  std::vector<llama_token_data> & out);

// The tokens that have at least `min_p` of the likeliest one's probability, in order of their ids.
void find_likely(const float * logits, int32_t n_vocab, float min_p,
                 std::vector<llama_token_data> & out);

} // namespace drafthouse

#endif
