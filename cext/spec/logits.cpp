// Rows of logits, whole: what all of a vocabulary is asked, in vectors.

#include "logits.hpp"

#include "internal.hpp"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <string>
#include <vector>

namespace drafthouse {

namespace {

constexpr int32_t LANES = 16;

// The greatest of LANES numbers. Written so that compilers use vectors.
float greatest_of_lanes(const float * x) {
    float m[LANES];
    std::copy(x, x + LANES, m);
    for (int32_t width = LANES / 2; width > 0; width /= 2) {
        for (int32_t i = 0; i < width; ++i) {
            m[i] = m[i + width] > m[i] ? m[i + width] : m[i];
        }
    }
    return m[0];
}

// The greatest of a row; -infinity where there is none.
float greatest(const float * x, int32_t n) {
    float m[LANES];
    std::fill(m, m + LANES, -INFINITY);
    const int32_t n_even = n - n % LANES;
    for (int32_t i = 0; i < n_even; i += LANES) {
        for (int32_t j = 0; j < LANES; ++j) {
            m[j] = x[i + j] > m[j] ? x[i + j] : m[j];
        }
    }
    float best = greatest_of_lanes(m);
    for (int32_t i = n_even; i < n; ++i) {
        best = x[i] > best ? x[i] : best;
    }
    return best;
}

// exp(x - most) of LANES numbers, none above `most`, to a ten-millionth; 1e-38 where it is less.
// As 2^n times exp(r), |r| <= ln(2) / 2 (coefficients of Cephes' expf, S. Moshier).
void exp_of_lanes(const float * x, float most, float * out) {
    constexpr float TO_INTEGER = 12582912.0f; // 1.5 * 2^23: what is added to it is rounded
    float y[LANES];
    float n[LANES];
    float p[LANES];
    float scale[LANES];
    int32_t bits[LANES];
    for (int32_t j = 0; j < LANES; ++j) {
        y[j] = x[j] - most;
    }
    for (int32_t j = 0; j < LANES; ++j) {
        y[j] = y[j] > -87.0f ? y[j] : -87.0f;
    }
    for (int32_t j = 0; j < LANES; ++j) {
        n[j] = y[j] * 1.44269504f + TO_INTEGER - TO_INTEGER;
        bits[j] = (static_cast<int32_t>(n[j]) + 127) << 23;
    }
    std::memcpy(scale, bits, sizeof(scale));
    for (int32_t j = 0; j < LANES; ++j) {
        const float r = y[j] - n[j] * 0.693359375f + n[j] * 2.12194440e-4f;
        p[j] = 1.9875691500e-4f;
        p[j] = p[j] * r + 1.3981999507e-3f;
        p[j] = p[j] * r + 8.3334519073e-3f;
        p[j] = p[j] * r + 4.1665795894e-2f;
        p[j] = p[j] * r + 1.6666665459e-1f;
        p[j] = p[j] * r + 5.0000001201e-1f;
        p[j] = (p[j] * r * r + r + 1.0f) * scale[j];
    }
    std::copy(p, p + LANES, out);
}

// The exponentials of a row over that of its greatest; returns their sum. `out` may be null.
double exponentials(const float * logits, int32_t n, float most, float * out) {
    constexpr int32_t N_SUMMED = 64; // vectors, before their sums lose digits
    double total = 0.0;
    float sums[LANES] = {};
    float e[LANES];
    int32_t i = 0;
    for (int32_t n_vectors = 1; i + LANES <= n; i += LANES, ++n_vectors) {
        exp_of_lanes(logits + i, most, e);
        for (int32_t j = 0; j < LANES; ++j) {
            sums[j] += e[j];
        }
        if (out != nullptr) {
            std::copy(e, e + LANES, out + i);
        }
        if (n_vectors % N_SUMMED == 0) {
            for (float & sum : sums) {
                total += static_cast<double>(sum);
                sum = 0.0f;
            }
        }
    }
    for (const float sum : sums) {
        total += static_cast<double>(sum);
    }
    float rest[LANES];
    std::fill(rest, rest + LANES, -INFINITY);
    std::copy(logits + i, logits + n, rest);
    exp_of_lanes(rest, most, e);
    for (int32_t j = 0; i + j < n; ++j) {
        total += static_cast<double>(e[j]);
        if (out != nullptr) {
            out[i + j] = e[j];
        }
    }
    return total;
}

// Calls `take` with the place of every number that is at least as great as another.
template <typename Take>
void for_each_at_least(const float * x, int32_t n, float least, const Take & take) {
    int32_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        if (!(greatest_of_lanes(x + i) >= least)) {
            continue;
        }
        for (int32_t j = i; j < i + LANES; ++j) {
            if (x[j] >= least) {
                take(j);
            }
        }
    }
    for (; i < n; ++i) {
        if (x[i] >= least) {
            take(i);
        }
    }
}

// Tokens whose exponentials are less than a sixteenth apart.
struct bucket {
    size_t n = 0;
    size_t begin = 0; // of its tokens, among those of all, the likeliest first
    double sum = 0.0;
};

constexpr size_t N_BUCKETS = (0x3F800000u >> 19) + 1; // by the first bits of a number up to 1

size_t bucket_of(float odd) {
    uint32_t bits = 0;
    std::memcpy(&bits, &odd, sizeof(bits));
    return std::min<size_t>(bits >> 19, N_BUCKETS - 1);
}

bool is_likelier(const llama_token_data & a, const llama_token_data & b) {
    return a.logit != b.logit ? a.logit > b.logit : a.id < b.id;
}

} // namespace

[[noreturn]] void nothing_allowed() {
    fail(SPEC_ERR_NO_TOKEN_ALLOWED, "no token is allowed here: the grammar, the biases or the "
                                    "temperature leave none a probability");
}

void check_logits(const float * logits, int32_t n) {
    int32_t n_wrong = 0;
    for (int32_t i = 0; i < n; ++i) {
        n_wrong += logits[i] <= FLT_MAX ? 0 : 1;
    }
    if (n_wrong > 0) {
        fail(SPEC_ERR_SAMPLING_FAILED,
             "the model's output is not finite: " + std::to_string(n_wrong) + " of " +
                 std::to_string(n) + " logits");
    }
}

double log_total(const float * logits, int32_t n) {
    const float most = greatest(logits, n);
    return static_cast<double>(most) + std::log(exponentials(logits, n, most, nullptr));
}

llama_token argmax(const float * logits, int32_t n, const std::vector<llama_token> & banned) {
    const float best = greatest(logits, n);
    const float * at = std::find(logits, logits + n, best);
    const auto is_banned = [&](int32_t token) {
        return std::find(banned.begin(), banned.end(), token) != banned.end();
    };
    if (best > -INFINITY && at != logits + n && !is_banned(static_cast<int32_t>(at - logits))) {
        return static_cast<llama_token>(at - logits);
    }
    // Rare: the greatest may not be chosen.
    llama_token chosen = -1;
    for (int32_t i = 0; i < n; ++i) {
        if (logits[i] > (chosen < 0 ? -INFINITY : logits[chosen]) && !is_banned(i)) {
            chosen = i;
        }
    }
    if (chosen < 0) {
        nothing_allowed();
    }
    return chosen;
}

void find_greatest(const float * logits, int32_t n_vocab, int32_t n,
                   std::vector<llama_token_data> & out) {
    out.clear();
    const auto n_wanted = static_cast<size_t>(n);
    const auto add = [&](int32_t id) {
        if (out.size() == n_wanted) {
            if (!(logits[id] > out.front().logit)) {
                return;
            }
            std::pop_heap(out.begin(), out.end(), is_likelier);
            out.pop_back();
        }
        out.push_back({id, logits[id], 0.0f});
        std::push_heap(out.begin(), out.end(), is_likelier);
    };
    int32_t i = 0;
    for (; i + LANES <= n_vocab; i += LANES) {
        if (out.size() == n_wanted && !(greatest_of_lanes(logits + i) > out.front().logit)) {
            continue;
        }
        for (int32_t j = i; j < i + LANES; ++j) {
            add(j);
        }
    }
    for (; i < n_vocab; ++i) {
        add(i);
    }
    std::sort(out.begin(), out.end(), is_likelier);
}

void find_nucleus(const float * logits, int32_t n_vocab, float top_p,
                  std::vector<llama_token_data> & out) {
    thread_local std::vector<float> odds;
    odds.resize(static_cast<size_t>(n_vocab));
    const float most = greatest(logits, n_vocab);
    if (!(most > -INFINITY)) {
        nothing_allowed();
    }
    const double total = exponentials(logits, n_vocab, most, odds.data());
    const double wanted = static_cast<double>(top_p) * total;
    std::vector<bucket> buckets(N_BUCKETS);
    for (int32_t id = 0; id < n_vocab; ++id) {
        if (logits[id] > -INFINITY) {
            const float odd = odds[static_cast<size_t>(id)];
            bucket & b = buckets[bucket_of(odd)];
            ++b.n;
            b.sum += static_cast<double>(odd);
        }
    }
    double sum = 0.0;
    size_t n = 0;
    size_t last = N_BUCKETS; // the least likely one that is needed
    while (last > 0 && (last == N_BUCKETS || sum < wanted)) {
        bucket & b = buckets[--last];
        b.begin = n;
        n += b.n;
        sum += b.sum;
    }
    out.resize(n);
    for (int32_t id = 0; id < n_vocab; ++id) {
        const float odd = odds[static_cast<size_t>(id)];
        const size_t i = bucket_of(odd);
        if (i >= last && logits[id] > -INFINITY) {
            out[buckets[i].begin++] = {id, logits[id], static_cast<float>(odd / total)};
        }
    }
    sum = 0.0;
    n = 0;
    for (size_t i = N_BUCKETS; i > last && sum < wanted; --i) {
        std::sort(out.begin() + static_cast<std::ptrdiff_t>(n),
                  out.begin() + static_cast<std::ptrdiff_t>(n + buckets[i - 1].n), is_likelier);
        for (const size_t end = n + buckets[i - 1].n; n < end && sum < wanted; ++n) {
            sum += static_cast<double>(odds[static_cast<size_t>(out[n].id)]);
        }
    }
    out.resize(n);
}

void find_likely(const float * logits, int32_t n_vocab, float min_p,
                 std::vector<llama_token_data> & out) {
    const float most = greatest(logits, n_vocab);
    if (!(most > -INFINITY)) {
        nothing_allowed();
    }
    out.clear();
    const float least = std::max(most + std::log(min_p), -FLT_MAX);
    for_each_at_least(logits, n_vocab, least,
                      [&](int32_t id) { out.push_back({id, logits[id], 0.0f}); });
}

} // namespace drafthouse
