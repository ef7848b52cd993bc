// Choosing tokens from logits: argmax, the chain, the rejection rule, and their scores.

#include "grammar_budget.hpp"
#include "internal.hpp"
#include "logits.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

namespace drafthouse {

namespace {

// The likeliest tokens of a row, with what they are worth beside the log of the whole.
void score_top(outcome & out, const float * logits, int32_t n_vocab, int32_t n, int32_t n_columns,
               double log_sum) {
    thread_local std::vector<llama_token_data> best;
    best.clear();
    if (n > 0) {
        find_greatest(logits, n_vocab, std::min(n, n_vocab), best);
    }
    for (size_t k = 0; k < static_cast<size_t>(n_columns); ++k) {
        const bool is_told = k < best.size();
        out.top_tokens.push_back(is_told ? best[k].id : -1);
        out.top_logprobs.push_back(
            is_told ? static_cast<float>(static_cast<double>(best[k].logit) - log_sum)
                    : std::numeric_limits<float>::quiet_NaN());
    }
}

// Log-probabilities of an emitted token, as far as its sequence asked for them.
void score(const spec_engine & engine, const spec_sampler & sampler, outcome & out,
           const float * logits, llama_token token) {
    const float nan = std::numeric_limits<float>::quiet_NaN();
    if (!sampler.logprobs && sampler.n_top_logprobs == 0) {
        const auto n_top = static_cast<size_t>(engine.n_top);
        out.logprobs.push_back(nan);
        out.top_tokens.resize(out.top_tokens.size() + n_top, -1);
        out.top_logprobs.resize(out.top_tokens.size(), nan);
        return;
    }
    const int32_t n_vocab = engine.limits.n_vocab;
    const double log_sum = log_total(logits, n_vocab);
    const double logprob = static_cast<double>(logits[token]) - log_sum;
    out.logprobs.push_back(sampler.logprobs ? static_cast<float>(logprob) : nan);
    score_top(out, logits, n_vocab, sampler.n_top_logprobs, engine.n_top, log_sum);
}

// What a chain has chosen; it may have chosen nothing.
const llama_token_data & choice(const llama_token_data_array & array) {
    if (array.selected < 0 || array.selected >= static_cast<int64_t>(array.size)) {
        nothing_allowed();
    }
    return array.data[array.selected];
}

// Sees that the chain left it a probability: where a grammar, a bias or an overflow leaves none,
// llama.cpp returns any token, and a grammar that is given it aborts.
const llama_token_data & checked_choice(const llama_token_data_array & array) {
    const llama_token_data & chosen = choice(array);
    if (!std::isfinite(chosen.logit)) {
        nothing_allowed();
    }
    return chosen;
}

// The tokens of a row that a chain is asked about: each thread's own, from logits in host memory.
// The context is not asked, so threads share nothing but the logits.
struct row_candidates {
    std::vector<llama_token_data> data;
    llama_token_data_array array = {};

    // Those that the chain's first samplers would leave, as far as that can be told without them.
    // Returns how many of its samplers are done.
    int32_t fill(const spec_sampler & sampler, const float * logits, int32_t n_vocab) {
        int32_t n_done = 0;
        if (sampler.n_greatest > 0) {
            find_greatest(logits, n_vocab, std::min(sampler.n_greatest, n_vocab), data);
        } else if (sampler.cut.n_done > 0) {
            logits = without_banned(sampler, logits, n_vocab);
            n_done = sampler.cut.n_done;
            if (sampler.cut.top_p > 0.0f) {
                find_nucleus(logits, n_vocab, sampler.cut.top_p, data);
            } else {
                find_likely(logits, n_vocab, sampler.cut.min_p, data);
            }
        } else {
            fill_all(logits, n_vocab);
        }
        array = {data.data(), data.size(), -1, n_done > 0 && sampler.cut.top_p > 0.0f};
        if (data.empty()) {
            nothing_allowed();
        }
        return n_done;
    }

    void fill_all(const float * logits, int32_t n_vocab) {
        data.resize(static_cast<size_t>(n_vocab));
        for (int32_t id = 0; id < n_vocab; ++id) {
            data[static_cast<size_t>(id)] = {id, logits[id], 0.0f};
        }
        array = {data.data(), data.size(), -1, false};
    }

private:
    // A copy of the logits where some tokens are not to be chosen.
    static const float * without_banned(const spec_sampler & sampler, const float * logits,
                                        int32_t n_vocab) {
        thread_local std::vector<float> copy;
        if (sampler.banned.empty()) {
            return logits;
        }
        copy.assign(logits, logits + n_vocab);
        for (const llama_token token : sampler.banned) {
            copy[static_cast<size_t>(token)] = -INFINITY;
        }
        return copy.data();
    }
};

bool is_allowed(const spec_sampler & sampler, llama_token token) {
    return !sampler.grammar || sampler.grammar->allows(token);
}

// Asks the chain, but for its first samplers that are done.
void apply_chain(const spec_sampler & sampler, int32_t n_done, llama_token_data_array & array) {
    llama_sampler * chain = sampler.samplers();
    if (n_done == 0) {
        llama_sampler_apply(chain, &array);
        return;
    }
    for (int32_t i = n_done; i < llama_sampler_chain_n(chain); ++i) {
        llama_sampler_apply(llama_sampler_chain_get(chain, i), &array);
    }
}

// Chooses a token of a row with the chain, and leaves what it was chosen from in `row`. Only if the
// grammar forbids the choice, it is asked about all tokens, and the chain again.
llama_token sample_row(const spec_sampler & sampler, const float * logits, int32_t n_vocab,
                       row_candidates & row) {
    apply_chain(sampler, row.fill(sampler, logits, n_vocab), row.array);
    if (!is_allowed(sampler, choice(row.array).id)) {
        logits = sampler.grammar->masked(logits, n_vocab);
        apply_chain(sampler, row.fill(sampler, logits, n_vocab), row.array);
    }
    return checked_choice(row.array).id;
}

// Chooses the token of one position. What fails behind the first one is left to the next step,
// which begins there: what came before it is told, as it is without a draft.
template <typename Body> bool is_position_done(size_t i, Body && body) {
    if (i == 0) {
        body();
        return true;
    }
    return guarded(body) == SPEC_OK;
}

void check_finite(const float * logits, llama_token token) {
    if (!std::isfinite(logits[token])) {
        fail(SPEC_ERR_SAMPLING_FAILED, "the model's output is not finite");
    }
}

// Each position is sampled as without a draft; the draft stands as long as it agrees. So a seed
// draws what it draws without speculation, and samplers that learn from their draws stay right.
// Where a grammar has spent what one token may cost, no further position is verified in this step.
void sample_and_match(const spec_engine & engine, const sequence & seq, outcome & out) {
    const llama_tokens & draft = seq.draft.tokens;
    const int64_t n_work_max = grammar_work_max(engine.limits.n_vocab);
    for (size_t i = 0; i < out.rows.size(); ++i) {
        llama_token id = LLAMA_TOKEN_NULL;
        const bool is_done = is_position_done(i, [&] {
            within_budget(*seq.sampler, out.n_mask_work, [&] {
                id = sample_checked(*seq.sampler, out.rows[i], engine.limits.n_vocab);
                check_finite(out.rows[i], id);
                seq.sampler->accept(id, true);
            });
        });
        if (!is_done) {
            break;
        }
        out.emitted.push_back(id);
        if (i >= draft.size() || id != draft[i] || out.n_mask_work > n_work_max ||
            llama_vocab_is_eog(engine.target_model->vocab, id)) {
            break;
        }
    }
}

// The probability of a token among candidates, 0 where it is none of them.
float probability(const llama_token_data * candidates, size_t n, llama_token token) {
    const auto * end = candidates + n;
    const auto * at =
        std::find_if(candidates, end, [&](const auto & it) { return it.id == token; });
    return at != end ? at->p : 0.0f;
}

// Draws from what the target's distribution has more than the draft's; `otherwise` where it has
// nothing more.
llama_token draw_rest(std::mt19937 & rng, const llama_token_data_array & p,
                      const std::vector<llama_token_data> & q, llama_token otherwise) {
    std::vector<llama_token_data> rest;
    float sum = 0.0f;
    for (size_t k = 0; k < p.size; ++k) {
        const float more = p.data[k].p - probability(q.data(), q.size(), p.data[k].id);
        if (more > 0.0f) {
            rest.push_back({p.data[k].id, 0.0f, more});
            sum += more;
        }
    }
    if (rest.empty()) {
        return otherwise;
    }
    float u = std::uniform_real_distribution<float>(0.0f, 1.0f)(rng) * sum;
    for (const llama_token_data & candidate : rest) {
        u -= candidate.p;
        if (u <= 0.0f) {
            return candidate.id;
        }
    }
    return rest.back().id;
}

// A drafted token stands with probability min(1, p/q); the first that does not is drawn anew from
// the rest, so that what is emitted has the target's distribution (Leviathan et al.,
// arXiv:2211.17192, Alg. 1). Without a grammar: see is_match_only.
void sample_and_reject(const spec_engine & engine, const sequence & seq, outcome & out) {
    thread_local row_candidates row;
    spec_sampler & sampler = *seq.sampler;
    std::uniform_real_distribution<float> uniform(0.0f, 1.0f);
    for (size_t i = 0; i < out.rows.size(); ++i) {
        llama_token emitted = LLAMA_TOKEN_NULL;
        bool is_accepted = false;
        const bool is_done = is_position_done(i, [&] {
            check_logits(out.rows[i], engine.limits.n_vocab);
            emitted = sample_row(sampler, out.rows[i], engine.limits.n_vocab, row);
            if (i < seq.draft.tokens.size()) {
                const llama_token drafted = seq.draft.tokens[i];
                const std::vector<llama_token_data> & draft_q = seq.draft.q[i];
                const float p = probability(row.array.data, row.array.size, drafted);
                const float q = probability(draft_q.data(), draft_q.size(), drafted);
                is_accepted = q > 0.0f && (p >= q || uniform(sampler.rng) < p / q);
                emitted =
                    is_accepted ? drafted : draw_rest(sampler.rng, row.array, draft_q, emitted);
            } else if (i < seq.draft.q.size()) { // drafted was what the target does not have
                emitted = draw_rest(sampler.rng, row.array, seq.draft.q[i], emitted);
            }
            check_finite(out.rows[i], emitted);
            sampler.accept(emitted, true);
        });
        if (!is_done) {
            break;
        }
        out.emitted.push_back(emitted);
        if (!is_accepted || llama_vocab_is_eog(engine.target_model->vocab, emitted)) {
            break;
        }
    }
}

// Benchmarks: accepts drafts at the rates asked for. Every position is sampled all the same, as a
// verification would, for its cost. A drafted end token is never accepted: it would end the
// sequence early.
void accept_at_random(const spec_engine & engine, sequence & seq, outcome & out) {
    const llama_tokens & draft = seq.draft.tokens;
    std::uniform_real_distribution<double> uniform(0.0, 1.0);
    for (size_t i = 0; i < out.rows.size(); ++i) {
        bool is_accepted = false;
        within_budget(*seq.sampler, out.n_mask_work, [&] {
            const llama_token own =
                sample_checked(*seq.sampler, out.rows[i], engine.limits.n_vocab);
            is_accepted = i < draft.size() && uniform(seq.synth_rng) < engine.synth_probs[i] &&
                          !llama_vocab_is_eog(engine.target_model->vocab, draft[i]);
            out.emitted.push_back(is_accepted ? draft[i] : own);
            check_finite(out.rows[i], out.emitted.back());
            // A drafted token need not fit the grammar; the target's own does.
            seq.sampler->accept(out.emitted.back(), !is_accepted);
        });
        if (!is_accepted) {
            break;
        }
    }
}

// Chooses the tokens that a sequence emits: the accepted part of its draft and one of the target's
// own.
void verify(const spec_engine & engine, sequence & seq, outcome & out) {
    if (!engine.synth_probs.empty()) {
        accept_at_random(engine, seq, out);
    } else if (seq.draft.q.empty()) {
        sample_and_match(engine, seq, out);
    } else {
        sample_and_reject(engine, seq, out);
    }
    out.n_mask_work += seq.sampler->n_sort_work * static_cast<int64_t>(out.emitted.size());
    for (const llama_token token : out.emitted) {
        seq.heard.push_back(-1 - token);
    }
    for (size_t i = 0; i < out.emitted.size(); ++i) {
        score(engine, *seq.sampler, out, out.rows[i], out.emitted[i]);
    }
}

// The part of an entry's end that touches its own sequence only, so that threads may share the
// entries. They read the target's logits where find_rows has found them: a context belongs to one
// thread, and even waiting for one writes to it.
void choose(spec_engine & engine, const spec_plan & plan, size_t i_entry) {
    const spec_plan_entry & e = plan.entries[i_entry];
    sequence & seq = seq_of(engine, e.seq_id);
    // Emitted tokens have passed the sampler already, and those of a resumed sequence.
    for (int32_t k = std::max(seq.n_known() - e.n_past, 0); k < e.n_tokens; ++k) {
        seq.feed(plan.tokens[e.token_offset + k]);
    }
    seq.n_heard = std::max(seq.n_known(), e.n_past + e.n_tokens);
    if (e.is_output != 0) {
        verify(engine, seq, engine.outcomes[i_entry]);
    }
}

// Finds the logits that an entry's tokens are chosen from.
void find_rows(spec_engine & engine, const spec_plan & plan, size_t i_entry) {
    const spec_plan_entry & e = plan.entries[i_entry];
    const sequence & seq = seq_of(engine, e.seq_id);
    outcome & out = engine.outcomes[i_entry];
    out.rows.clear();
    out.emitted.clear();
    out.logprobs.clear();
    out.top_tokens.clear();
    out.top_logprobs.clear();
    out.status = SPEC_OK;
    const size_t n_rows = e.is_output != 0 ? seq.draft.tokens.size() + 1 : 0;
    for (size_t i = 0; i < n_rows; ++i) {
        const int32_t i_batch = engine.rows[i_entry] + e.n_tokens - 1 + static_cast<int32_t>(i);
        out.rows.push_back(llama_get_logits_ith(engine.target.get(), i_batch));
        if (out.rows.back() == nullptr) {
            out.status = SPEC_ERR_SAMPLING_FAILED;
            return;
        }
    }
}

} // namespace

// Chooses a token of a row, in the shortest way that its sampler allows.
llama_token sample_checked(const spec_sampler & sampler, const float * logits, int32_t n_vocab) {
    check_logits(logits, n_vocab);
    if (sampler.is_argmax) {
        llama_token token = argmax(logits, n_vocab, sampler.banned);
        if (!is_allowed(sampler, token)) {
            token = argmax(sampler.grammar->masked(logits, n_vocab), n_vocab, sampler.banned);
        }
        return token;
    }
    thread_local row_candidates row;
    return sample_row(sampler, logits, n_vocab, row);
}

// Chooses the tokens of all entries of a decode, on as many threads as it pays.
void choose_all(spec_engine & engine, const spec_plan & plan, const group & entries) {
    constexpr size_t N_LOGITS_PARALLEL = 32768; // below, waking threads takes longer
    size_t n_rows = 0;
    for (const size_t i : entries) {
        find_rows(engine, plan, i);
        n_rows += engine.outcomes[i].rows.size();
    }
    const auto choose_one = [&](size_t k) {
        outcome & out = engine.outcomes[entries[k]];
        if (out.status == SPEC_OK) {
            out.status = guarded([&] { choose(engine, plan, entries[k]); });
        }
    };
    const size_t n_logits = n_rows * static_cast<size_t>(engine.limits.n_vocab);
    engine.sampling.run(entries.size(), n_logits >= N_LOGITS_PARALLEL, choose_one);
}

} // namespace drafthouse
