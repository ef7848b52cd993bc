// What a file's weights hold, how the CPU backend rounds rows that meet them, and in which order it
// makes their sums: for rows_test, written from the formats, number by number.
#pragma once

#include "ggml.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace weights {

// A column of weights: quants times scales, less minima.
struct column {
    std::vector<int> quants;
    std::vector<int> scales; // of some quants each
    std::vector<int> minima;
    std::vector<float> d; // of a block: what a scale counts
    std::vector<float> d_min;
};

// A row as the CPU backend rounds it: whole numbers up to 127.
struct rounded {
    std::vector<int> quants;
    std::vector<float> d;    // of a block
    std::vector<float> sums; // of a block's quants, as they count; where minima ask for them
};

inline float read_half(const uint8_t * from) {
    uint16_t half = 0;
    std::memcpy(&half, from, sizeof half);
    return ggml_fp16_to_fp32(half);
}

// What a file's column holds: of 32 weights two bytes of scale, sixteen of quants.
inline column read_q4_0(const uint8_t * from, int64_t n) {
    column found;
    for (int64_t b = 0; b < n / 32; ++b, from += 18) {
        found.d.push_back(read_half(from));
        found.d_min.push_back(0.0f);
        found.scales.push_back(1);
        found.minima.push_back(0);
        for (int i = 0; i < 32; ++i) {
            found.quants.push_back((from[2 + i % 16] >> (i / 16 * 4) & 15) - 8);
        }
    }
    return found;
}

// Of 32 weights a byte that is an exponent of two, sixteen of quants: halves, as twice as many.
inline column read_mxfp4(const uint8_t * from, int64_t n) {
    static const int numbers[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
    column found;
    for (int64_t b = 0; b < n / 32; ++b, from += 17) {
        found.d.push_back(std::ldexp(1.0f, from[0] - 128));
        found.d_min.push_back(0.0f);
        found.scales.push_back(1);
        found.minima.push_back(0);
        for (int i = 0; i < 32; ++i) {
            found.quants.push_back(numbers[from[1 + i % 16] >> (i / 16 * 4) & 15]);
        }
    }
    return found;
}

// Twelve bytes: eight scales, and minima, in six bits.
inline void read_sixes(column & to, const uint8_t * six) {
    for (int sub = 0; sub < 8; ++sub) {
        const bool is_whole = sub < 4; // else two of its bits are with another
        to.scales.push_back(is_whole ? six[sub] & 63
                                     : (six[sub + 4] & 15) | six[sub - 4] >> 6 << 4);
        to.minima.push_back(is_whole ? six[sub + 4] & 63 : six[sub + 4] >> 4 | six[sub] >> 6 << 4);
    }
}

// Of 256 weights twice two bytes of scale, twelve of scales and minima, 128 of quants.
inline column read_q4_k(const uint8_t * from, int64_t n) {
    column found;
    for (int64_t b = 0; b < n / 256; ++b, from += 144) {
        found.d.push_back(read_half(from));
        found.d_min.push_back(read_half(from + 2));
        read_sixes(found, from + 4);
        for (int i = 0; i < 256; ++i) {
            found.quants.push_back(from[16 + i / 64 * 32 + i % 32] >> (i / 32 % 2 * 4) & 15);
        }
    }
    return found;
}

// The same, and 32 bytes of fifth bits before the quants.
inline column read_q5_k(const uint8_t * from, int64_t n) {
    column found;
    for (int64_t b = 0; b < n / 256; ++b, from += 176) {
        found.d.push_back(read_half(from));
        found.d_min.push_back(read_half(from + 2));
        read_sixes(found, from + 4);
        for (int i = 0; i < 256; ++i) {
            const int fifth = from[16 + i % 32] >> (i / 32) & 1;
            const int low = from[48 + i / 64 * 32 + i % 32] >> (i / 32 % 2 * 4) & 15;
            found.quants.push_back(low | fifth << 4);
        }
    }
    return found;
}

// Of 256 weights sixteen bytes of scales and minima in four bits, 64 of quants, twice two of scale.
inline column read_q2_k(const uint8_t * from, int64_t n) {
    column found;
    for (int64_t b = 0; b < n / 256; ++b, from += 84) {
        found.d.push_back(read_half(from + 80));
        found.d_min.push_back(read_half(from + 82));
        for (int sub = 0; sub < 16; ++sub) {
            found.scales.push_back(from[sub] & 15);
            found.minima.push_back(from[sub] >> 4);
        }
        for (int i = 0; i < 256; ++i) {
            found.quants.push_back(from[16 + i / 128 * 32 + i % 32] >> (i / 32 % 4 * 2) & 3);
        }
    }
    return found;
}

// Of 256 weights 32 bytes of high bits, 64 of quants, twelve of scales in six bits, two of scale.
inline column read_q3_k(const uint8_t * from, int64_t n) {
    column found;
    for (int64_t b = 0; b < n / 256; ++b, from += 110) {
        found.d.push_back(read_half(from + 108));
        for (int sub = 0; sub < 16; ++sub) {
            const int low = from[96 + sub % 8] >> (sub / 8 * 4) & 15;
            const int high = from[104 + sub % 4] >> (sub / 4 * 2) & 3;
            found.scales.push_back((low | high << 4) - 32);
        }
        for (int i = 0; i < 256; ++i) {
            const int high = from[i % 32] >> (i / 32) & 1;
            const int low = from[32 + i / 128 * 32 + i % 32] >> (i / 32 % 4 * 2) & 3;
            found.quants.push_back((low | high << 2) - 4);
        }
    }
    return found;
}

constexpr int TABLE[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                           1,    13,   25,  38,  53,  69,  89,  113};

// Of 256 weights two bytes of scale, two and four of scales in six bits, 128 of a table's places.
inline column read_iq4_xs(const uint8_t * from, int64_t n) {
    column found;
    for (int64_t b = 0; b < n / 256; ++b, from += 136) {
        found.d.push_back(read_half(from));
        for (int sub = 0; sub < 8; ++sub) {
            const int low = from[4 + sub / 2] >> (sub % 2 * 4) & 15;
            const int high = from[2 + sub / 4] >> (sub % 4 * 2) & 3;
            found.scales.push_back((low | high << 4) - 32);
        }
        for (int i = 0; i < 256; ++i) {
            found.quants.push_back(TABLE[from[8 + i / 32 * 16 + i % 16] >> (i / 16 % 2 * 4) & 15]);
        }
    }
    return found;
}

inline int read_nibble(const uint8_t * from, int i) {
    return from[i / 2] >> (i % 2 * 4) & 15;
}

// IQ1_M: of a block's scale four bits lie above each of four times twelve.
constexpr size_t N_APART = 4;

inline uint16_t read_two(const uint8_t * from) {
    uint16_t two = 0;
    std::memcpy(&two, from, sizeof two);
    return two;
}

inline uint16_t read_apart(const uint8_t * from) {
    uint16_t half = 0;
    for (size_t i = 0; i < N_APART; ++i) {
        half = static_cast<uint16_t>(half | read_two(from + 2 * i) >> 12 << (4 * i));
    }
    return half;
}

inline void write_apart(uint8_t * to, uint16_t half) {
    for (size_t i = 0; i < N_APART; ++i) {
        const int four = half >> (4 * i) & 15;
        const auto two = static_cast<uint16_t>((read_two(to + 2 * i) & 0x0fff) | four << 12);
        std::memcpy(to + 2 * i, &two, sizeof two);
    }
}

// Of 256 weights places in a grid: what lies there ggml itself says, where the block's scale is 1.
// `scale_of` gives of `n_scales` the one of a number; `parts` of the block's scale are 1.
template <typename Scale>
column read_grid(const uint8_t * from, int64_t n, ggml_type type, float parts, int n_scales,
                 Scale scale_of) {
    column found;
    const size_t n_bytes = ggml_type_size(type);
    for (int64_t b = 0; b < n / 256; ++b, from += n_bytes) {
        std::vector<uint8_t> block(from, from + n_bytes);
        const uint16_t one = ggml_fp32_to_fp16(1.0f);
        if (type == GGML_TYPE_IQ1_M) {
            found.d.push_back(ggml_fp16_to_fp32(read_apart(from + 48)) / parts);
            write_apart(&block[48], one);
        } else {
            found.d.push_back(read_half(from) / parts);
            std::memcpy(block.data(), &one, sizeof one);
        }
        std::vector<float> values(256);
        ggml_get_type_traits(type)->to_float(block.data(), values.data(), 256);
        for (int i = 0; i < 256; ++i) {
            const int scale = 2 * scale_of(from, i / (256 / n_scales)) + 1;
            if (i % (256 / n_scales) == 0) {
                found.scales.push_back(scale);
            }
            const float quant = values[static_cast<size_t>(i)] * parts / static_cast<float>(scale);
            // One that is no whole number makes every sum wrong.
            const bool is_whole = quant == std::round(quant);
            found.quants.push_back(is_whole ? static_cast<int>(quant) : 1000);
        }
    }
    return found;
}

inline uint32_t read_four(const uint8_t * from) {
    uint32_t four = 0;
    std::memcpy(&four, from, sizeof four);
    return four;
}

inline column read_iq1_s(const uint8_t * from, int64_t n) {
    return read_grid(from, n, GGML_TYPE_IQ1_S, 8, 8,
                     [](const uint8_t * x, int sub) { return x[34 + 2 * sub + 1] >> 4 & 7; });
}

inline column read_iq1_m(const uint8_t * from, int64_t n) {
    return read_grid(from, n, GGML_TYPE_IQ1_M, 8, 16, [](const uint8_t * x, int sub) {
        return read_two(x + 48 + sub / 4 * 2) >> (sub % 4 * 3) & 7;
    });
}

inline column read_iq2_xxs(const uint8_t * from, int64_t n) {
    return read_grid(from, n, GGML_TYPE_IQ2_XXS, 8, 8, [](const uint8_t * x, int sub) {
        return static_cast<int>(read_four(x + 2 + 8 * sub + 4) >> 28);
    });
}

inline column read_iq2_xs(const uint8_t * from, int64_t n) {
    return read_grid(from, n, GGML_TYPE_IQ2_XS, 8, 16,
                     [](const uint8_t * x, int sub) { return read_nibble(x + 66, sub); });
}

inline column read_iq2_s(const uint8_t * from, int64_t n) {
    return read_grid(from, n, GGML_TYPE_IQ2_S, 8, 16,
                     [](const uint8_t * x, int sub) { return read_nibble(x + 74, sub); });
}

inline column read_iq3_xxs(const uint8_t * from, int64_t n) {
    return read_grid(from, n, GGML_TYPE_IQ3_XXS, 4, 8, [](const uint8_t * x, int sub) {
        return static_cast<int>(read_four(x + 66 + 4 * sub) >> 28);
    });
}

inline column read_iq3_s(const uint8_t * from, int64_t n) {
    return read_grid(from, n, GGML_TYPE_IQ3_S, 1, 8,
                     [](const uint8_t * x, int sub) { return read_nibble(x + 106, sub); });
}

// Of 32 weights two bytes of scale, sixteen of a table's places.
inline column read_iq4_nl(const uint8_t * from, int64_t n) {
    column found;
    for (int64_t b = 0; b < n / 32; ++b, from += 18) {
        found.d.push_back(read_half(from));
        found.scales.push_back(1);
        for (int i = 0; i < 32; ++i) {
            found.quants.push_back(TABLE[from[2 + i % 16] >> (i / 16 * 4) & 15]);
        }
    }
    return found;
}

// Of 32 weights two bytes of scale, and two of a least one where there is one, then four of fifth
// bits where there are some, sixteen of quants.
inline column read_of_32(const uint8_t * from, int64_t n, bool has_least, bool has_fifth,
                         int offset) {
    column found;
    for (int64_t b = 0; b < n / 32; ++b) {
        found.d.push_back(read_half(from));
        found.d_min.push_back(has_least ? read_half(from + 2) : 0.0f);
        found.scales.push_back(1);
        const uint8_t * fifth = from + (has_least ? 4 : 2);
        const uint8_t * low = fifth + (has_fifth ? 4 : 0);
        for (int i = 0; i < 32; ++i) {
            const int high = has_fifth ? fifth[i / 8] >> (i % 8) & 1 : 0;
            found.quants.push_back((low[i % 16] >> (i / 16 * 4) & 15) + (high << 4) - offset);
        }
        from = low + 16;
    }
    return found;
}

inline column read_q4_1(const uint8_t * from, int64_t n) {
    return read_of_32(from, n, true, false, 0);
}

inline column read_q5_0(const uint8_t * from, int64_t n) {
    return read_of_32(from, n, false, true, 16);
}

inline column read_q5_1(const uint8_t * from, int64_t n) {
    return read_of_32(from, n, true, true, 0);
}

// Of 32 weights two bytes of scale, 32 of quants.
inline column read_q8_0(const uint8_t * from, int64_t n) {
    column found;
    for (int64_t b = 0; b < n / 32; ++b, from += 34) {
        found.d.push_back(read_half(from));
        found.scales.push_back(1);
        for (int i = 0; i < 32; ++i) {
            found.quants.push_back(static_cast<int8_t>(from[2 + i]));
        }
    }
    return found;
}

// Of 256 weights 128 bytes of low and 64 of high bits of quants, sixteen scales, two bytes of
// scale.
inline column read_q6_k(const uint8_t * from, int64_t n) {
    column found;
    for (int64_t b = 0; b < n / 256; ++b, from += 210) {
        found.d.push_back(read_half(from + 208));
        for (int i = 0; i < 16; ++i) {
            found.scales.push_back(static_cast<int8_t>(from[192 + i]));
        }
        for (int i = 0; i < 256; ++i) {
            const int low = from[i / 128 * 64 + i % 64] >> (i / 64 % 2 * 4) & 15;
            const int high = from[128 + i / 128 * 32 + i % 32] >> (i / 32 % 4 * 2) & 3;
            found.quants.push_back((low | high << 4) - 32);
        }
    }
    return found;
}

// Blocks of 32, with a scale that f16 holds.
inline rounded round_to_q8_0(const float * row, int64_t n) {
    rounded found;
    for (int64_t b = 0; b < n / 32; ++b, row += 32) {
        float most = 0.0f;
        for (int i = 0; i < 32; ++i) {
            most = std::max(most, std::fabs(row[i]));
        }
        const float inverse = most != 0.0f ? 127.0f / most : 0.0f;
        found.d.push_back(ggml_fp16_to_fp32(ggml_fp32_to_fp16(most / 127.0f)));
        for (int i = 0; i < 32; ++i) {
            found.quants.push_back(static_cast<int>(std::nearbyint(row[i] * inverse)));
        }
    }
    return found;
}

// The same, and the sum of the quants times the scale before it was rounded.
inline rounded round_to_q8_1(const float * row, int64_t n) {
    rounded found = round_to_q8_0(row, n);
    for (int64_t b = 0; b < n / 32; ++b) {
        float most = 0.0f;
        int sum = 0;
        for (int64_t i = 32 * b; i < 32 * (b + 1); ++i) {
            most = std::max(most, std::fabs(row[i]));
            sum += found.quants[static_cast<size_t>(i)];
        }
        const float s = most / 127.0f * static_cast<float>(sum);
        found.sums.push_back(ggml_fp16_to_fp32(ggml_fp32_to_fp16(s)));
    }
    return found;
}

// Blocks of 256; the largest value becomes -127.
inline rounded round_to_q8_k(const float * row, int64_t n) {
    rounded found;
    for (int64_t b = 0; b < n / 256; ++b, row += 256) {
        float most = 0.0f;
        for (int i = 0; i < 256; ++i) {
            most = std::fabs(row[i]) > std::fabs(most) ? row[i] : most;
        }
        const float inverse = most != 0.0f ? -127.0f / most : 0.0f;
        found.d.push_back(most != 0.0f ? 1.0f / inverse : 0.0f);
        for (int i = 0; i < 256; ++i) {
            found.quants.push_back(
                std::min(127, static_cast<int>(std::nearbyint(row[i] * inverse))));
        }
    }
    return found;
}

// One sum, and one of what the minima take away.
inline float product(const column & weights, const rounded & row) {
    float sum = 0.0f;
    float less = 0.0f;
    const size_t n_scale = weights.quants.size() / weights.scales.size();
    const size_t n_block = weights.quants.size() / weights.d.size();
    for (size_t b = 0; b < weights.d.size(); ++b) {
        int dot = 0;
        int minima = 0;
        for (size_t i = b * n_block; i < (b + 1) * n_block; ++i) {
            dot += weights.scales[i / n_scale] * weights.quants[i] * row.quants[i];
            minima += weights.minima[i / n_scale] * row.quants[i];
        }
        sum = std::fma(static_cast<float>(dot), weights.d[b] * row.d[b], sum);
        less = std::fma(static_cast<float>(minima), weights.d_min[b] * row.d[b], less);
    }
    return sum - less;
}

// Four sums, each of every fourth block, and of what its least weights add.
inline float product_in_fours(const column & weights, const rounded & row) {
    float sums[4] = {};
    for (size_t b = 0; b < weights.d.size(); ++b) {
        int dot = 0;
        for (size_t i = 32 * b; i < 32 * (b + 1); ++i) {
            dot += weights.quants[i] * row.quants[i];
        }
        float & sum = sums[b % 4];
        sum = std::fma(static_cast<float>(dot), weights.d[b] * row.d[b], sum);
        sum = row.sums.empty() ? sum : std::fma(weights.d_min[b], row.sums[b], sum);
    }
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

// One sum of blocks, each less what its minima take away.
inline float product_of_blocks(const column & weights, const rounded & row) {
    float sum = 0.0f;
    const size_t n_scale = weights.quants.size() / weights.scales.size();
    for (size_t b = 0; b < weights.d.size(); ++b) {
        int dot = 0;
        int minima = 0;
        for (size_t i = 256 * b; i < 256 * (b + 1); ++i) {
            dot += weights.scales[i / n_scale] * weights.quants[i] * row.quants[i];
            minima += weights.minima.empty() ? 0 : weights.minima[i / n_scale] * row.quants[i];
        }
        float of_block = static_cast<float>(dot) * weights.d[b];
        if (!weights.minima.empty()) {
            of_block = std::fma(-weights.d_min[b], static_cast<float>(minima), of_block);
        }
        sum = std::fma(of_block, row.d[b], sum);
    }
    return sum;
}

} // namespace weights
