// AVX-512, its VNNI, and VNNI of 256 bits as functions for a processor with AVX2: included before
// all else, it lets our kernels for them compile and run where there are none of them.
// EMULATED_AVX512, EMULATED_AVX512VNNI or EMULATED_AVXVNNI chooses. Most is SIMDe's (Debian's
// libsimde-dev); what that lacks in version 0.7.4 stands here. For tests alone: it is slow.
#pragma once

#include <immintrin.h>
#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cassert>
#include <cfloat>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cwchar>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace emulated {

// --- vectors as their halves and as their numbers ---

template <class Half, class Whole> Half half(Whole x, int i) {
    Half halves[2];
    static_assert(sizeof(halves) == sizeof(x));
    std::memcpy(halves, &x, sizeof(x));
    return halves[i];
}
inline __m256i low(__m512i x) {
    return half<__m256i>(x, 0);
}
inline __m256i high(__m512i x) {
    return half<__m256i>(x, 1);
}

template <class Whole, class Half> Whole join(Half low, Half high) {
    const Half halves[2] = {low, high};
    Whole x;
    static_assert(sizeof(halves) == sizeof(x));
    std::memcpy(&x, halves, sizeof(x));
    return x;
}
inline __m512i ints(__m256i low, __m256i high) {
    return join<__m512i>(low, high);
}
inline __m512 floats(__m256 low, __m256 high) {
    return join<__m512>(low, high);
}

template <class Number, class Whole>
std::array<Number, sizeof(Whole) / sizeof(Number)> numbers(Whole x) {
    std::array<Number, sizeof(Whole) / sizeof(Number)> values;
    std::memcpy(values.data(), &x, sizeof(x));
    return values;
}
template <class Whole, class Numbers> Whole whole(const Numbers & values) {
    Whole x;
    static_assert(sizeof(values) == sizeof(x));
    std::memcpy(&x, values.data(), sizeof(x));
    return x;
}
inline bool has(__mmask16 mask, size_t i) {
    return mask >> i & 1;
}

// --- conversions ---

inline __m512 cvtepi32_ps(__m512i x) {
    return floats(_mm256_cvtepi32_ps(low(x)), _mm256_cvtepi32_ps(high(x)));
}
inline __m512i cvtepu8_epi32(__m128i x) {
    return ints(_mm256_cvtepu8_epi32(x), _mm256_cvtepu8_epi32(_mm_srli_si128(x, 8)));
}
inline __m512i cvtepu8_epi16(__m256i x) {
    return ints(_mm256_cvtepu8_epi16(_mm256_castsi256_si128(x)),
                _mm256_cvtepu8_epi16(_mm256_extracti128_si256(x, 1)));
}
inline __m512i cvtepu16_epi32(__m256i x) {
    return ints(_mm256_cvtepu16_epi32(_mm256_castsi256_si128(x)),
                _mm256_cvtepu16_epi32(_mm256_extracti128_si256(x, 1)));
}
inline __m512 cvtph_ps(__m256i x) {
    return floats(_mm256_cvtph_ps(_mm256_castsi256_si128(x)),
                  _mm256_cvtph_ps(_mm256_extracti128_si256(x, 1)));
}
template <int Rounding> __m256i cvtps_ph(__m512 x) {
    constexpr int rounding =
        Rounding & 7; // 8 asks for no exceptions, of which only the wider instruction knows
    return _mm256_set_m128i(_mm256_cvtps_ph(half<__m256>(x, 1), rounding),
                            _mm256_cvtps_ph(half<__m256>(x, 0), rounding));
}
inline __m512 zextps256_ps512(__m256 x) {
    return floats(x, _mm256_setzero_ps());
}

// --- integers ---

template <int Order> __m512i shuffle_epi32(__m512i x) {
    return ints(_mm256_shuffle_epi32(low(x), Order), _mm256_shuffle_epi32(high(x), Order));
}
inline __m512i madd_epi16(__m512i a, __m512i b) {
    return ints(_mm256_madd_epi16(low(a), low(b)), _mm256_madd_epi16(high(a), high(b)));
}
inline __mmask16 cmplt_epi32_mask(__m512i a, __m512i b) {
    const auto x = numbers<int32_t>(a);
    const auto y = numbers<int32_t>(b);
    unsigned mask = 0;
    for (size_t i = 0; i < x.size(); i++) {
        mask |= unsigned(x[i] < y[i]) << i;
    }
    return __mmask16(mask);
}
inline __m512i mask_sllv_epi32(__m512i otherwise, __mmask16 mask, __m512i a, __m512i counts) {
    auto result = numbers<uint32_t>(otherwise);
    const auto x = numbers<uint32_t>(a);
    const auto n = numbers<uint32_t>(counts);
    for (size_t i = 0; i < x.size(); i++) {
        if (has(mask, i)) {
            result[i] = n[i] < 32 ? x[i] << n[i] : 0;
        }
    }
    return whole<__m512i>(result);
}
inline int kortestz(__mmask16 a, __mmask16 b) {
    return (a | b) == 0;
}

// Four products of a byte without sign by one with sign, each added to a sum of 32 bits.
inline __m256i dpbusd(__m256i sums, __m256i a, __m256i b) {
    const __m256i even = _mm256_madd_epi16(_mm256_and_si256(a, _mm256_set1_epi16(0xff)),
                                           _mm256_srai_epi16(_mm256_slli_epi16(b, 8), 8));
    const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(a, 8), _mm256_srai_epi16(b, 8));
    return _mm256_add_epi32(sums, _mm256_add_epi32(even, odd));
}
inline __m512i dpbusd_wide(__m512i sums, __m512i a, __m512i b) {
    return ints(dpbusd(low(sums), low(a), low(b)), dpbusd(high(sums), high(a), high(b)));
}
// Two products of 16 bits, each added to a sum of 32 bits.
inline __m256i dpwssd(__m256i sums, __m256i a, __m256i b) {
    return _mm256_add_epi32(sums, _mm256_madd_epi16(a, b));
}
inline __m512i dpwssd_wide(__m512i sums, __m512i a, __m512i b) {
    return ints(dpwssd(low(sums), low(a), low(b)), dpwssd(high(sums), high(a), high(b)));
}

// --- floats ---

// As GCC and Clang do it: halves, quarters, pairs.
inline float reduce_add_ps(__m512 x) {
    const __m256 eight = _mm256_add_ps(half<__m256>(x, 1), half<__m256>(x, 0));
    const __m128 four = _mm_add_ps(_mm256_extractf128_ps(eight, 1), _mm256_castps256_ps128(eight));
    const __m128 two = _mm_add_ps(_mm_shuffle_ps(four, four, _MM_SHUFFLE(1, 0, 3, 2)), four);
    return two[0] + two[1];
}
inline __m512 mask3_fmadd_ps(__m512 a, __m512 b, __m512 c, __mmask16 mask) {
    auto result = numbers<float>(c);
    const auto sums = numbers<float>(_mm512_fmadd_ps(a, b, c));
    for (size_t i = 0; i < sums.size(); i++) {
        result[i] = has(mask, i) ? sums[i] : result[i];
    }
    return whole<__m512>(result);
}
inline __m512 maskz_loadu_ps(__mmask16 mask, const void * from) {
    std::array<float, 16> result{};
    for (size_t i = 0; i < result.size(); i++) {
        result[i] = has(mask, i) ? static_cast<const float *>(from)[i] : 0;
    }
    return whole<__m512>(result);
}
template <class Whole> Whole maskz_loadu_epi16(uint32_t mask, const void * from) {
    std::array<uint16_t, sizeof(Whole) / 2> result{};
    for (size_t i = 0; i < result.size(); i++) {
        result[i] = mask >> i & 1 ? static_cast<const uint16_t *>(from)[i] : 0;
    }
    return whole<Whole>(result);
}
inline void mask_storeu_ps(void * to, __mmask16 mask, __m512 x) {
    const auto values = numbers<float>(x);
    for (size_t i = 0; i < values.size(); i++) {
        if (has(mask, i)) {
            static_cast<float *>(to)[i] = values[i];
        }
    }
}

} // namespace emulated

// SIMDe 0.7.4 gives one of these four parameters, and knows others of a later version.
#undef _mm512_madd_epi16
#undef _mm256_dpbusd_epi32
#undef _mm256_dpwssd_epi32
#undef _mm512_dpbusd_epi32
#undef _mm512_dpwssd_epi32
#undef _mm512_shuffle_epi32
#define _mm256_dpbusd_avx_epi32 emulated::dpbusd
#define _mm256_dpbusd_epi32 emulated::dpbusd
#define _mm256_dpwssd_avx_epi32 emulated::dpwssd
#define _mm256_dpwssd_epi32 emulated::dpwssd
#define _mm512_cmplt_epi32_mask emulated::cmplt_epi32_mask
#define _mm512_cvtepi32_ps emulated::cvtepi32_ps
#define _mm512_cvtepu16_epi32 emulated::cvtepu16_epi32
#define _mm512_cvtepu8_epi16 emulated::cvtepu8_epi16
#define _mm512_cvtepu8_epi32 emulated::cvtepu8_epi32
#define _mm512_cvtph_ps emulated::cvtph_ps
#define _mm512_cvtps_ph(x, rounding) emulated::cvtps_ph<rounding>(x)
#define _mm512_dpbusd_epi32 emulated::dpbusd_wide
#define _mm512_dpwssd_epi32 emulated::dpwssd_wide
#define _mm512_kortestz emulated::kortestz
#define _mm512_madd_epi16 emulated::madd_epi16
#define _mm512_mask3_fmadd_ps emulated::mask3_fmadd_ps
#define _mm512_mask_sllv_epi32 emulated::mask_sllv_epi32
#define _mm512_mask_storeu_ps emulated::mask_storeu_ps
#define _mm512_maskz_loadu_ps emulated::maskz_loadu_ps
#define _mm256_maskz_loadu_epi16 emulated::maskz_loadu_epi16<__m256i>
#define _mm_maskz_loadu_epi16 emulated::maskz_loadu_epi16<__m128i>
#define _mm512_reduce_add_ps emulated::reduce_add_ps
#define _mm512_shuffle_epi32(x, order) emulated::shuffle_epi32<int(order)>(x)
#define _mm512_zextps256_ps512 emulated::zextps256_ps512

// What the kernels choose by. Only now: SIMDe would take the instructions themselves.
#ifdef EMULATED_AVXVNNI
#define __AVXVNNI__ 1
#else
#define __AVX512F__ 1
#define __AVX512BW__ 1
#define __AVX512CD__ 1
#define __AVX512DQ__ 1
#define __AVX512VL__ 1
#endif
#ifdef EMULATED_AVX512VNNI
#define __AVX512VNNI__ 1
#endif

// An empty asm that keeps a wide vector in a register: there is none for it here.
#define __asm__(...)
