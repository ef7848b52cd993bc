// Products of weights with any number of rows, as our patches 0014 (Q4_0), 0016 (Q4_K), 0017, 0025
// and 0027 (what is not repacked), 0023 (F16, BF16, F32), 0024 (experts) and 0026 (many rows of
// what is) compute them: each sum is made in the order that the type has, to the last bit, alone
// and in any company.
//
// Prints what differs and returns 1, or prints "ok", or why nothing was compared.
#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml.h"
#include "weights.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

namespace {

using namespace weights;

// A type of weights.
struct kind {
    const char * name;
    ggml_type type;
    int64_t n_block;
    size_t n_bytes;   // of a block
    size_t n_scales;  // f16 numbers in it
    size_t scales_at; // where
    bool is_repacked; // its tensors lie in the buffer type that does so
    int64_t n_plain;  // as many rows give these bits without our patches
    column (*read)(const uint8_t * from, int64_t n);
    rounded (*round)(const float * row, int64_t n);
    float (*product)(const column & weights, const rounded & row);
};

constexpr kind q4_0 = {"Q4_0",    GGML_TYPE_Q4_0, 32,     18, 1, 0, true, 1000,
                       read_q4_0, round_to_q8_0,  product};
constexpr kind mxfp4 = {"MXFP4",    GGML_TYPE_MXFP4, 32,     17, 0, 0, true, 3,
                        read_mxfp4, round_to_q8_0,   product};
// Four rows together are rounded four times a block.
constexpr kind q4_k = {"Q4_K", GGML_TYPE_Q4_K, 256,           144,    2, 0, true,
                       3,      read_q4_k,      round_to_q8_k, product};

constexpr kind of_32(const char * name, ggml_type type, size_t n_bytes, size_t n_scales,
                     int64_t n_plain, decltype(kind::read) read, decltype(kind::round) round) {
    return {name, type, 32, n_bytes, n_scales, 0, false, n_plain, read, round, product_in_fours};
}

constexpr kind of_256(const char * name, ggml_type type, size_t n_bytes, size_t n_scales,
                      size_t scales_at, decltype(kind::read) read) {
    return {name,  type, 256,  n_bytes,       n_scales,         scales_at,
            false, 0,    read, round_to_q8_k, product_of_blocks};
}

// Those that are not repacked (patches 0017 and 0025); Q4_0 and Q4_K where they have planes.
const std::vector<kind> PLAIN = {
    of_32("Q8_0", GGML_TYPE_Q8_0, 34, 1, 0, read_q8_0, round_to_q8_0),
    of_32("Q4_0, plain", GGML_TYPE_Q4_0, 18, 1, 0, read_q4_0, round_to_q8_0),
    of_32("Q5_0", GGML_TYPE_Q5_0, 22, 1, 0, read_q5_0, round_to_q8_0),
    of_32("Q4_1", GGML_TYPE_Q4_1, 20, 2, 0, read_q4_1, round_to_q8_1),
    of_32("Q5_1", GGML_TYPE_Q5_1, 24, 2, 0, read_q5_1, round_to_q8_1),
    of_32("IQ4_NL", GGML_TYPE_IQ4_NL, 18, 1, 0, read_iq4_nl, round_to_q8_0),
    of_256("Q2_K", GGML_TYPE_Q2_K, 84, 2, 80, read_q2_k),
    of_256("Q3_K", GGML_TYPE_Q3_K, 110, 1, 108, read_q3_k),
    of_256("Q4_K, plain", GGML_TYPE_Q4_K, 144, 2, 0, read_q4_k),
    of_256("Q5_K", GGML_TYPE_Q5_K, 176, 2, 0, read_q5_k),
    of_256("Q6_K", GGML_TYPE_Q6_K, 210, 1, 208, read_q6_k),
    of_256("IQ4_XS", GGML_TYPE_IQ4_XS, 136, 1, 0, read_iq4_xs),
    of_256("IQ1_S", GGML_TYPE_IQ1_S, 50, 1, 0, read_iq1_s),
    of_256("IQ1_M", GGML_TYPE_IQ1_M, 56, 0, 0, read_iq1_m),
    of_256("IQ2_XXS", GGML_TYPE_IQ2_XXS, 66, 1, 0, read_iq2_xxs),
    of_256("IQ2_XS", GGML_TYPE_IQ2_XS, 74, 1, 0, read_iq2_xs),
    of_256("IQ2_S", GGML_TYPE_IQ2_S, 82, 1, 0, read_iq2_s),
    of_256("IQ3_XXS", GGML_TYPE_IQ3_XXS, 98, 1, 0, read_iq3_xxs),
    of_256("IQ3_S", GGML_TYPE_IQ3_S, 110, 1, 0, read_iq3_s),
};

struct shape {
    int64_t n;      // of a row, and of a column of weights
    int64_t n_cols; // of the result
    int n_threads;
    int64_t n_planes = 1;  // rows of some sequences, as recurrent layers have them
    int64_t n_apart = 0;   // what lies between two rows
    int64_t n_heads = 1;   // weights in planes, as MLA has them: 1, or as many as rows
    int64_t n_streams = 1; // all planes of rows once for each, where streams have their own cells
};

// What y is once `fill` has set the tensors of `own`, the weights, which lie in the buffer type
// that repacks them if they are so, and of `rest`. Frees both.
template <typename Fill>
std::vector<float> computed(ggml_backend_buffer_type_t type, const kind & k, int n_threads,
                            ggml_context * own, ggml_context * rest, ggml_tensor * y, Fill fill) {
    ggml_backend_t backend = ggml_backend_cpu_init();
    ggml_backend_cpu_set_n_threads(backend, n_threads);
    ggml_backend_buffer_t of_weights = ggml_backend_alloc_ctx_tensors_from_buft(
        own, k.is_repacked ? type : ggml_backend_get_default_buffer_type(backend));
    ggml_backend_buffer_t of_rest = ggml_backend_alloc_ctx_tensors(rest, backend);
    ggml_backend_buffer_clear(of_rest, 0x41); // of another step: nothing is added to it
    fill();
    ggml_cgraph * graph = ggml_new_graph(rest);
    ggml_build_forward_expand(graph, y);
    ggml_backend_graph_compute(backend, graph);
    std::vector<float> found(static_cast<size_t>(ggml_nelements(y)));
    ggml_backend_tensor_get(y, found.data(), 0, found.size() * sizeof(float));
    ggml_backend_buffer_free(of_weights);
    ggml_backend_buffer_free(of_rest);
    ggml_backend_free(backend);
    ggml_free(own);
    ggml_free(rest);
    return found;
}

// The products of rows with weights.
std::vector<float> multiply(ggml_backend_buffer_type_t type, const kind & k, const shape & s,
                            const std::vector<uint8_t> & weights, const std::vector<float> & rows) {
    const int64_t n_rows = static_cast<int64_t>(rows.size()) / s.n;
    const int64_t n_of_plane = n_rows / s.n_planes / s.n_streams;
    ggml_init_params params = {};
    params.mem_size = 16 * ggml_tensor_overhead() + ggml_graph_overhead();
    params.no_alloc = true;
    ggml_context * own = ggml_init(params);
    ggml_context * rest = ggml_init(params);
    ggml_tensor * w = ggml_new_tensor_3d(own, k.type, s.n, s.n_cols, s.n_heads);
    ggml_tensor * all = ggml_new_tensor_4d(rest, GGML_TYPE_F32, s.n + s.n_apart, n_of_plane,
                                           s.n_planes, s.n_streams);
    ggml_tensor * x = ggml_view_4d(rest, all, s.n, n_of_plane, s.n_planes, s.n_streams, all->nb[1],
                                   all->nb[2], all->nb[3], 0);
    ggml_tensor * y = ggml_mul_mat(rest, w, x);
    return computed(type, k, s.n_threads, own, rest, y, [&] {
        ggml_backend_tensor_set(w, weights.data(), 0, weights.size());
        for (int64_t r = 0; r < n_rows; ++r) {
            ggml_backend_tensor_set(all, &rows[static_cast<size_t>(r * s.n)],
                                    static_cast<size_t>(r) * all->nb[1],
                                    static_cast<size_t>(s.n) * sizeof(float));
        }
    });
}

// The buffer type of this name; null where the processor, or the build, has none.
ggml_backend_buffer_type_t find_buffers(const char * name) {
    ggml_backend_dev_t cpu = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    auto * get =
        reinterpret_cast<ggml_backend_dev_get_extra_bufts_t>(ggml_backend_reg_get_proc_address(
            ggml_backend_dev_backend_reg(cpu), "ggml_backend_dev_get_extra_bufts"));
    for (ggml_backend_buffer_type_t * each = get ? get(cpu) : nullptr; each && *each; ++each) {
        if (std::strcmp(ggml_backend_buft_name(*each), name) == 0) {
            return *each;
        }
    }
    return nullptr;
}

int n_compared = 0;

size_t bytes_of_column(const kind & k, int64_t n) {
    return static_cast<size_t>(n / k.n_block) * k.n_bytes;
}

std::vector<uint8_t> draw_weights(std::mt19937 & random, const kind & k, int64_t n, int64_t n_cols,
                                  uint32_t seed) {
    std::vector<uint8_t> weights(static_cast<size_t>(n_cols) * bytes_of_column(k, n));
    for (size_t i = 0; i < weights.size(); i += k.n_bytes) {
        for (size_t at = 0; at < k.n_bytes; ++at) {
            weights[i + at] = static_cast<uint8_t>(random());
        }
    }
    for (size_t i = 0; i < weights.size() && seed % 3 == 0; i += 2 * k.n_bytes) {
        std::memset(&weights[i], seed % 2 ? 0xff : 0x00, k.n_bytes);
    }
    const auto draw_scale = [&] {
        return ggml_fp32_to_fp16(static_cast<float>(int(random() % 2001) - 1000) / 7000.0f);
    };
    for (size_t i = 0; i < weights.size(); i += k.n_bytes) {
        for (size_t number = 0; number < k.n_scales; ++number) {
            const uint16_t scale = draw_scale();
            std::memcpy(&weights[i + k.scales_at + 2 * number], &scale, sizeof scale);
        }
        if (k.type == GGML_TYPE_IQ1_M) {
            write_apart(&weights[i + 48], draw_scale());
        }
        if (k.type == GGML_TYPE_MXFP4) { // some as small as there are
            const auto which = random() % 10;
            weights[i] = static_cast<uint8_t>(which < 3 ? which : 110 + random() % 30);
        }
    }
    return weights;
}

std::vector<float> draw_rows(std::mt19937 & random, const kind & k, int64_t n, uint32_t seed) {
    std::vector<float> rows(static_cast<size_t>(n));
    std::normal_distribution<float> normal;
    for (size_t i = 0; i < rows.size(); ++i) {
        // Some blocks are all zeros, and some all extremes: the largest sums of whole numbers;
        // some have extremes of both signs, either of which a way of rounding may go by.
        const size_t which = i / static_cast<size_t>(k.n_block) % 7;
        rows[i] = which == 0                 ? 0.0f
                  : which == 1               ? (seed % 2 ? 3.0f : -3.0f)
                  : which == 2 && i % 5 == 0 ? (i % 2 ? 3.5f : -3.5f)
                                             : normal(random);
    }
    return rows;
}

std::vector<column> read_columns(const kind & k, const std::vector<uint8_t> & weights, int64_t n) {
    std::vector<column> columns;
    for (size_t at = 0; at < weights.size(); at += bytes_of_column(k, n)) {
        columns.push_back(k.read(&weights[at], n));
    }
    return columns;
}

bool is_exact(ggml_backend_buffer_type_t type, const kind & k, const shape & s, int64_t n_of_plane,
              uint32_t seed) {
    const int64_t n_rows = n_of_plane * s.n_planes * s.n_streams;
    std::mt19937 random(seed);
    const std::vector<uint8_t> weights = draw_weights(random, k, s.n, s.n_cols * s.n_heads, seed);
    const std::vector<float> rows = draw_rows(random, k, s.n * n_rows, seed);
    const std::vector<float> found = multiply(type, k, s, weights, rows);
    const std::vector<column> columns = read_columns(k, weights, s.n);
    for (int64_t r = 0; r < n_rows; ++r) {
        const rounded row = k.round(&rows[static_cast<size_t>(r * s.n)], s.n);
        const int64_t first = s.n_heads > 1 ? r / n_of_plane % s.n_heads * s.n_cols : 0;
        for (int64_t c = 0; c < s.n_cols; ++c) {
            const float expected = k.product(columns[static_cast<size_t>(first + c)], row);
            const float value = found[static_cast<size_t>(r * s.n_cols + c)];
            ++n_compared;
            if (std::memcmp(&expected, &value, sizeof value) != 0) {
                std::printf(
                    "%s n %d columns %d threads %d rows %d of %d planes, %d streams, %d apart: row "
                    "%d column %d is %.9g, not %.9g\n",
                    k.name, int(s.n), int(s.n_cols), s.n_threads, int(n_of_plane), int(s.n_planes),
                    int(s.n_streams), int(s.n_apart), int(r), int(c), double(value),
                    double(expected));
                return false;
            }
        }
    }
    return true;
}

// Experts of a token, whose rows are the token's own or one for each expert.
struct choice {
    int64_t n_expert;
    int64_t n_used;
    int64_t n_tokens;
    bool is_shared; // one row for all experts of a token
};

// Whether the products of each token's rows with its experts (patch 0024) are those of the row
// alone.
bool is_exact_with_experts(ggml_backend_buffer_type_t type, const kind & k, const shape & s,
                           const choice & of, uint32_t seed) {
    std::mt19937 random(seed);
    const std::vector<uint8_t> weights = draw_weights(random, k, s.n, s.n_cols * of.n_expert, seed);
    const int64_t n_of_token = of.is_shared ? 1 : of.n_used;
    const std::vector<float> rows = draw_rows(random, k, s.n * n_of_token * of.n_tokens, seed);
    std::vector<int32_t> chosen;
    for (int64_t t = 0; t < of.n_tokens; ++t) { // some experts have many tokens, some none
        std::vector<int32_t> all(static_cast<size_t>(of.n_expert));
        std::iota(all.begin(), all.end(), 0);
        std::shuffle(all.begin() + (t % 3 == 0 ? 1 : 0), all.end(), random);
        chosen.insert(chosen.end(), all.begin(), all.begin() + of.n_used);
    }
    ggml_init_params params = {};
    params.mem_size = 16 * ggml_tensor_overhead() + ggml_graph_overhead();
    params.no_alloc = true;
    ggml_context * own = ggml_init(params);
    ggml_context * rest = ggml_init(params);
    ggml_tensor * w = ggml_new_tensor_3d(own, k.type, s.n, s.n_cols, of.n_expert);
    ggml_tensor * x = ggml_new_tensor_3d(rest, GGML_TYPE_F32, s.n, n_of_token, of.n_tokens);
    ggml_tensor * ids = ggml_new_tensor_2d(rest, GGML_TYPE_I32, of.n_used, of.n_tokens);
    ggml_tensor * y = ggml_mul_mat_id(rest, w, x, ids);
    const std::vector<float> found = computed(type, k, s.n_threads, own, rest, y, [&] {
        ggml_backend_tensor_set(w, weights.data(), 0, weights.size());
        ggml_backend_tensor_set(x, rows.data(), 0, rows.size() * sizeof(float));
        ggml_backend_tensor_set(ids, chosen.data(), 0, chosen.size() * sizeof(int32_t));
    });

    const std::vector<column> columns = read_columns(k, weights, s.n);
    for (int64_t i = 0; i < of.n_used * of.n_tokens; ++i) {
        const int64_t at = of.is_shared ? i / of.n_used : i;
        const rounded row = k.round(&rows[static_cast<size_t>(at * s.n)], s.n);
        for (int64_t c = 0; c < s.n_cols; ++c) {
            const auto column = static_cast<size_t>(chosen[static_cast<size_t>(i)] * s.n_cols + c);
            const float expected = k.product(columns[column], row);
            const float value = found[static_cast<size_t>(i * s.n_cols + c)];
            ++n_compared;
            if (std::memcmp(&expected, &value, sizeof value) != 0) {
                std::printf("%s n %d columns %d threads %d, %d of %d experts, %d tokens: row %d "
                            "column %d is %.9g, not %.9g\n",
                            k.name, int(s.n), int(s.n_cols), s.n_threads, int(of.n_used),
                            int(of.n_expert), int(of.n_tokens), int(i), int(c), double(value),
                            double(expected));
                return false;
            }
        }
    }
    return true;
}

// Products by tiles (patch 0018), and with F16, BF16 and F32 (patch 0023): rows alone and in
// company, in one plane and in some, each with weights of its own or not, side by side and apart,
// have the same bits, and are what the weights say but for what the rounding of rows takes.
bool is_same_in_company(ggml_backend_buffer_type_t type, const kind & k, const shape & s,
                        int64_t n_of_plane, uint32_t seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    const int64_t n_rows = n_of_plane * s.n_planes * s.n_streams;
    std::vector<float> plain(static_cast<size_t>(s.n * s.n_cols * s.n_heads));
    std::vector<float> rows(static_cast<size_t>(s.n * n_rows));
    for (float & value : plain) {
        value = normal(random);
    }
    for (float & value : rows) {
        value = normal(random);
    }
    const size_t n_bytes = ggml_row_size(k.type, s.n) * static_cast<size_t>(s.n_cols); // of a plane
    std::vector<uint8_t> weights(n_bytes * static_cast<size_t>(s.n_heads));
    ggml_quantize_chunk(k.type, plain.data(), weights.data(), 0, s.n_cols * s.n_heads, s.n,
                        nullptr);
    if (k.type != GGML_TYPE_F32) {
        ggml_get_type_traits(k.type)->to_float(weights.data(), plain.data(),
                                               s.n * s.n_cols * s.n_heads);
    }
    const std::vector<float> found = multiply(type, k, s, weights, rows);
    const shape alone = {s.n, s.n_cols, s.n_threads};
    for (int64_t r = 0; r < n_rows; ++r) {
        const auto row = rows.begin() + r * s.n;
        const int64_t head = s.n_heads > 1 ? r / n_of_plane % s.n_heads : 0;
        const auto of_head = weights.begin() + head * static_cast<int64_t>(n_bytes);
        const std::vector<float> expected = multiply(
            type, k, alone, {of_head, of_head + static_cast<int64_t>(n_bytes)}, {row, row + s.n});
        for (int64_t c = 0; c < s.n_cols; ++c) {
            const float value = found[static_cast<size_t>(r * s.n_cols + c)];
            double sum = 0.0;
            for (int64_t i = 0; i < s.n; ++i) {
                sum += double(plain[static_cast<size_t>((head * s.n_cols + c) * s.n + i)]) *
                       double(row[i]);
            }
            ++n_compared;
            // A product of n normal numbers is about the root of n; a row is rounded to 1 in 127 of
            // its largest number.
            const bool is_near = std::fabs(double(value) - sum) < 0.2 * std::sqrt(double(s.n));
            if (std::memcmp(&expected[static_cast<size_t>(c)], &value, sizeof value) != 0 ||
                !is_near) {
                std::printf("%s, n %d columns %d threads %d rows %d of %d planes, %d streams, "
                            "%d heads, %d apart: row %d column %d is %.9g, alone %.9g, about "
                            "%.9g\n",
                            k.name, int(s.n), int(s.n_cols), s.n_threads, int(n_of_plane),
                            int(s.n_planes), int(s.n_streams), int(s.n_heads), int(s.n_apart),
                            int(r), int(c), double(value), double(expected[static_cast<size_t>(c)]),
                            sum);
                return false;
            }
        }
    }
    return true;
}

// What of the tiles' types is wrong, for all of them; true where this processor has none.
bool are_tiles_right() {
    ggml_backend_buffer_type_t type = find_buffers("AMX");
    const auto tiles = [](const char * name, ggml_type of) { // name: and what computes it
        return kind{name, of, 0, 0, 0, 0, true, 0, nullptr, nullptr, nullptr};
    };
    const std::vector<shape> shapes = {{32, 64, 1},   {256, 32, 1},    {1024, 96, 2},
                                       {512, 160, 3}, {512, 64, 2, 3}, {256, 64, 2, 2, 5}};
    bool is_ok = true;
    uint32_t seed = 0;
    for (const kind & k :
         {tiles("Q4_1 by tiles", GGML_TYPE_Q4_1), tiles("Q8_0 by tiles", GGML_TYPE_Q8_0),
          tiles("Q5_K by tiles", GGML_TYPE_Q5_K), tiles("IQ4_XS by tiles", GGML_TYPE_IQ4_XS)}) {
        for (const shape & s : shapes) {
            for (const int64_t n_rows : {1, 2, 5, 16, 17, 32, 33, 70}) {
                const bool is_left_out = type == nullptr || s.n % ggml_blck_size(k.type) != 0;
                is_ok = is_ok && (is_left_out || is_same_in_company(type, k, s, n_rows, ++seed));
            }
        }
    }
    return is_ok;
}

#ifndef WITHOUT_CPU_KERNELS
// A row times columns of which each has a single one: the row as it was rounded, which is to be as
// ggml rounds it, large, small, without a number and half-way between two.
bool is_rounded_right(const kind & k) {
    constexpr int64_t n = 64;
    std::vector<float> ones(n * n);
    for (int64_t i = 0; i < n; ++i) {
        ones[static_cast<size_t>(i * n + i)] = 1.0f;
    }
    std::vector<uint8_t> weights(ggml_row_size(k.type, n) * n);
    ggml_quantize_chunk(k.type, ones.data(), weights.data(), 0, n, n, nullptr);
    std::mt19937 random(1);
    for (int trial = 0; trial < 1000; ++trial) {
        std::vector<float> row(n);
        for (float & value : row) {
            const uint32_t small = k.type == GGML_TYPE_F16 ? 0x0fffffffu : 0x3fffffffu;
            uint32_t bits = static_cast<uint32_t>(random()) & (0x80000000u | small);
            bits += k.type == GGML_TYPE_F16 ? 0x33000000u : 0x10000000u;
            bits &= random() % 3 == 0 ? 0xffff8000u : random() % 2 == 0 ? 0xfffff000u : 0xffffffffu;
            std::memcpy(&value, &bits, sizeof value);
        }
        if (trial == 0) {                    // whoever meets it is no number, either
            const uint32_t all = 0x7fffffff; // to add to it would make a number of it
            std::memcpy(&row[5], &all, sizeof all);
        }
        std::vector<uint8_t> rounded(ggml_row_size(k.type, n));
        ggml_get_type_traits_cpu(k.type)->from_float(row.data(), rounded.data(), n);
        std::vector<float> expected(n);
        ggml_get_type_traits(k.type)->to_float(rounded.data(), expected.data(), n);
        const std::vector<float> found = multiply(nullptr, k, {n, n, 1}, weights, row);
        for (size_t i = 0; i < n; ++i) {
            ++n_compared;
            const bool is_same = trial == 0 ? std::isnan(found[i])
                                            : std::isfinite(expected[i]) && found[i] == expected[i];
            if (!is_same) {
                std::printf("%s, trial %d: %.9g is %.9g, not %.9g\n", k.name, trial, double(row[i]),
                            double(found[i]), double(expected[i]));
                return false;
            }
        }
    }
    return true;
}

// Keys times a query without flash attention: a stream's own cells, alone and beside another's.
bool are_cells_alike(ggml_type type, int64_t n_heads_kv) {
    constexpr int64_t d = 128, n_cells = 256, n_heads = 4;
    std::mt19937 random(3);
    std::normal_distribution<float> normal;
    std::vector<float> cells(static_cast<size_t>(d * n_heads_kv * n_cells));
    std::vector<float> queries(static_cast<size_t>(d * n_heads));
    std::generate(cells.begin(), cells.end(), [&] { return normal(random); });
    std::generate(queries.begin(), queries.end(), [&] { return normal(random); });
    std::vector<uint8_t> bytes(ggml_row_size(type, d * n_heads_kv) * n_cells);
    ggml_quantize_chunk(type, cells.data(), bytes.data(), 0, n_heads_kv * n_cells, d, nullptr);
    kind k = {};
    std::vector<float> found[2];
    for (const int64_t n_streams : {1, 2}) {
        ggml_init_params params = {};
        params.mem_size = 16 * ggml_tensor_overhead() + ggml_graph_overhead();
        params.no_alloc = true;
        ggml_context * own = ggml_init(params);
        ggml_context * rest = ggml_init(params);
        ggml_tensor * cache = ggml_new_tensor_4d(own, type, d, n_heads_kv, n_cells, n_streams);
        ggml_tensor * q = ggml_new_tensor_4d(rest, GGML_TYPE_F32, d, 1, n_heads, n_streams);
        ggml_tensor * y = ggml_mul_mat(rest, ggml_permute(rest, cache, 0, 2, 1, 3), q);
        found[n_streams - 1] = computed(nullptr, k, 2, own, rest, y, [&] {
            for (size_t s = 0; s < static_cast<size_t>(n_streams); ++s) {
                ggml_backend_tensor_set(cache, bytes.data(), s * cache->nb[3], bytes.size());
                ggml_backend_tensor_set(q, queries.data(), s * q->nb[3],
                                        queries.size() * sizeof(float));
            }
        });
    }
    if (std::memcmp(found[0].data(), found[1].data(), found[0].size() * sizeof(float)) != 0) {
        std::printf("%s: %d heads' cells give a stream other bits beside another one\n",
                    ggml_type_name(type), int(n_heads_kv));
        return false;
    }
    return true;
}

// What of F16, BF16 and F32 is wrong: columns on both sides of a tile's and of what stays near,
// rows that are no whole vectors, planes, with and without weights and streams of their own, rows
// apart.
bool are_floats_right() {
    const auto plain = [](const char * name, ggml_type of) {
        return kind{name, of, 0, 0, 0, 0, false, 0, nullptr, nullptr, nullptr};
    };
    bool is_ok = true;
    uint32_t seed = 0;
    for (const kind & k : {plain("F16", GGML_TYPE_F16), plain("F32", GGML_TYPE_F32),
                           plain("BF16", GGML_TYPE_BF16)}) {
        is_ok = (k.type == GGML_TYPE_F32 || is_rounded_right(k)) && is_ok;
        for (const shape & s : std::vector<shape>{{32, 1, 1},
                                                  {96, 25, 2},
                                                  {1024, 64, 2},
                                                  {4128, 73, 3},
                                                  {8224, 65, 1},
                                                  {4, 16, 1},
                                                  {77, 20, 2},
                                                  {96, 24, 2, 3},
                                                  {64, 17, 3, 2, 5},
                                                  {48, 20, 2, 3, 0, 3},
                                                  {128, 17, 3, 4, 5, 4},
                                                  {33, 24, 2, 3, 2, 3, 2}}) {
            for (const int64_t n_rows : {1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 33}) {
                is_ok = is_same_in_company(nullptr, k, s, n_rows, ++seed) && is_ok;
            }
        }
        // One row of each stream for each head: what a step of many streams multiplies.
        for (const int64_t n_streams : {2, 3, 9, 40}) {
            is_ok =
                is_same_in_company(nullptr, k, {96, 24, 2, 4, 0, 4, n_streams}, 1, ++seed) && is_ok;
        }
    }
    return is_ok;
}
#endif

} // namespace

int main() {
    const bool are_tiles_ok = are_tiles_right();
    ggml_backend_buffer_type_t type = find_buffers("CPU_REPACK");
    if (type == nullptr || !ggml_cpu_has_avx2() || !ggml_cpu_has_fma() || !ggml_cpu_has_f16c()) {
        std::printf("ok: nothing to compare, this processor multiplies otherwise\n");
        return are_tiles_ok ? 0 : 1;
    }
    bool is_ok = are_tiles_ok;
#ifndef WITHOUT_CPU_KERNELS
    is_ok = are_floats_right() && is_ok;
    for (const ggml_type cells : {GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0}) {
        is_ok = are_cells_alike(cells, 1) && is_ok; // one head of keys, as MLA has
        is_ok = are_cells_alike(cells, 4) && is_ok;
    }
#endif
    uint32_t seed = 0;
    // Rows on both sides of a tile and of a four; columns with and without eight left over; blocks
    // on both sides of a strip. The last two: planes of rows, and rows that lie apart.
    const std::vector<int64_t> counts = {1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 15, 16, 17, 31, 33};
    const std::vector<shape> of_32 = {{32, 8, 1},    {96, 24, 2},    {1024, 16, 2},
                                      {1056, 40, 1}, {4128, 24, 3},  {8224, 8, 1},
                                      {64, 264, 5},  {96, 24, 2, 3}, {64, 16, 3, 2, 5}};
    const std::vector<shape> of_256 = {{256, 8, 1},     {512, 24, 2},      {1024, 16, 2},
                                       {768, 40, 1},    {4352, 24, 3},     {256, 264, 5},
                                       {512, 24, 2, 3}, {256, 16, 3, 2, 5}};
    std::vector<kind> kinds = {q4_0, mxfp4, q4_k};
    kinds.insert(kinds.end(), PLAIN.begin(), PLAIN.end());
    for (const kind & k : kinds) {
        for (shape s : k.n_block == 32 ? of_32 : of_256) {
            s.n_cols -= k.is_repacked ? 0 : s.n_cols % 3; // any number
            s.n_apart *= k.is_repacked ? 0 : 1; // upstream rounds fours as if nothing lay between
            for (const int64_t n_rows : counts) {
#ifdef WITHOUT_CPU_KERNELS
                if (n_rows > k.n_plain) {
                    continue;
                }
#endif
                is_ok = is_exact(type, k, s, n_rows, ++seed) && is_ok;
            }
        }
    }
#ifdef WITHOUT_CPU_KERNELS
    const std::vector<kind> with_experts = {q4_0, mxfp4, q4_k};
#else
    const std::vector<kind> & with_experts = kinds;
    for (const kind & k : PLAIN) {
        // Rows on both sides of where upstream's tiles are quicker.
        for (const int64_t n_rows : {47, 48, 70, 255, 256, 300}) {
            is_ok = is_exact(type, k, {512, 21, 2}, n_rows, ++seed) && is_ok;
        }
        // Of many rows side by side more than a strip, and than there is room for.
        for (const int64_t n_rows : {33, 37, 130}) {
            is_ok = is_exact(type, k, {8960, 11, 1}, n_rows, ++seed) && is_ok;
            is_ok = is_exact(type, k, {20480, 11, 1}, n_rows, ++seed) && is_ok; // VNNI's, too
        }
        // Nor for all columns of a strip, of which a thread alone takes a quarter.
        if (k.type == GGML_TYPE_Q8_0) {
            is_ok = is_exact(type, k, {8960, 530, 1}, 33, ++seed) && is_ok;
        } else if (k.type == GGML_TYPE_Q5_K) {
            is_ok = is_exact(type, k, {4352, 2090, 1}, 33, ++seed) && is_ok;
        }
        for (const int64_t n_rows : {1, 2, 7, 8, 11, 12, 50}) {
            is_ok = is_exact(type, k, {256, 21, 2, 3, 0, 3}, n_rows, ++seed) && is_ok;
            is_ok = is_exact(type, k, {512, 64, 3, 4, 0, 4}, n_rows, ++seed) && is_ok;
            is_ok = is_exact(type, k, {256, 21, 2, 3, 0, 3, 2}, n_rows, ++seed) && is_ok;
        }
    }
    // One row of each stream for each head: what a step of many streams multiplies.
    for (const kind & k : PLAIN) {
        for (const int64_t n_streams : {2, 3, 9, 40}) {
            is_ok = is_exact(type, k, {512, 24, 3, 4, 0, 4, n_streams}, 1, ++seed) && is_ok;
        }
    }
    // Rows on both sides of as many as go at a time where columns are unpacked for many.
    for (const kind & k : {q4_0, mxfp4, q4_k}) {
        for (const int64_t n_rows : {63, 64, 66, 131}) {
            is_ok = is_exact(type, k, {1280, 40, 1}, n_rows, ++seed) && is_ok;
        }
    }
#endif
    for (const kind & k : with_experts) {
        for (shape s : {shape{256, 24, 1}, shape{1024, 40, 3}, shape{8448, 16, 2}}) {
            s.n_cols -= k.is_repacked ? 0 : s.n_cols % 3;
            for (const choice & of :
                 {choice{4, 2, 1, true}, choice{3, 1, 9, false}, choice{5, 4, 23, true},
                  choice{8, 3, 7, false}, choice{2, 1, 140, true}}) {
                is_ok = is_exact_with_experts(type, k, s, of, ++seed) && is_ok;
            }
        }
        is_ok = is_exact_with_experts(type, k, {256, 24, 2}, {2, 1, 600, true}, ++seed) && is_ok;
    }
    if (is_ok) {
        std::printf("ok: %d products, to the last bit\n", n_compared);
    }
    return is_ok ? 0 : 1;
}
