// Products of Q4_0 weights, repacked as our patch 0014 reads them, with any number of rows: each
// sum is made block by block in the order of the columns, to the last bit, alone and in any
// company.
//
// Prints what differs and returns 1, or prints "ok", or why nothing was compared.
#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

namespace {

constexpr int64_t n_block = 32;

struct block {
    float scale;
    int quants[n_block];
};

using blocks = std::vector<block>;

// What Q4_0 holds of a file's row: two bytes of scale, sixteen of quants.
blocks read_q4_0(const uint8_t * from, int64_t n) {
    blocks found(static_cast<size_t>(n / n_block));
    for (block & each : found) {
        uint16_t half = 0;
        std::memcpy(&half, from, sizeof half);
        each.scale = ggml_fp16_to_fp32(half);
        for (int i = 0; i < n_block / 2; ++i) {
            each.quants[i] = (from[2 + i] & 15) - 8;
            each.quants[i + n_block / 2] = (from[2 + i] >> 4) - 8;
        }
        from += 18;
    }
    return found;
}

// A row as the CPU backend rounds it: whole numbers up to 127, and a scale that f16 holds.
blocks read_row(const float * row, int64_t n) {
    blocks found(static_cast<size_t>(n / n_block));
    for (block & each : found) {
        float most = 0.0f;
        for (int i = 0; i < n_block; ++i) {
            most = std::max(most, std::fabs(row[i]));
        }
        const float inverse = most != 0.0f ? 127.0f / most : 0.0f;
        each.scale = ggml_fp16_to_fp32(ggml_fp32_to_fp16(most / 127.0f));
        for (int i = 0; i < n_block; ++i) {
            each.quants[i] = static_cast<int>(std::nearbyint(row[i] * inverse));
        }
        row += n_block;
    }
    return found;
}

float product(const blocks & weights, const blocks & row) {
    float sum = 0.0f;
    for (size_t b = 0; b < weights.size(); ++b) {
        int dot = 0;
        for (int i = 0; i < n_block; ++i) {
            dot += weights[b].quants[i] * row[b].quants[i];
        }
        sum = std::fma(static_cast<float>(dot), weights[b].scale * row[b].scale, sum);
    }
    return sum;
}

struct shape {
    int64_t n;      // of a row, and of a column of weights
    int64_t n_cols; // of the result
    int n_threads;
};

// The products of rows with weights that lie in the buffer type which repacks them.
std::vector<float> multiply(ggml_backend_buffer_type_t type, const shape & s,
                            const std::vector<uint8_t> & weights, const std::vector<float> & rows) {
    const int64_t n_rows = static_cast<int64_t>(rows.size()) / s.n;
    ggml_init_params params = {};
    params.mem_size = 16 * ggml_tensor_overhead() + ggml_graph_overhead();
    params.no_alloc = true;
    ggml_context * own = ggml_init(params);
    ggml_context * rest = ggml_init(params);
    ggml_tensor * w = ggml_new_tensor_2d(own, GGML_TYPE_Q4_0, s.n, s.n_cols);
    ggml_tensor * x = ggml_new_tensor_2d(rest, GGML_TYPE_F32, s.n, n_rows);
    ggml_tensor * y = ggml_mul_mat(rest, w, x);
    ggml_backend_t backend = ggml_backend_cpu_init();
    ggml_backend_cpu_set_n_threads(backend, s.n_threads);
    ggml_backend_buffer_t of_weights = ggml_backend_alloc_ctx_tensors_from_buft(own, type);
    ggml_backend_buffer_t of_rest = ggml_backend_alloc_ctx_tensors(rest, backend);
    ggml_backend_tensor_set(w, weights.data(), 0, weights.size());
    ggml_backend_tensor_set(x, rows.data(), 0, rows.size() * sizeof(float));
    ggml_cgraph * graph = ggml_new_graph(rest);
    ggml_build_forward_expand(graph, y);
    ggml_backend_graph_compute(backend, graph);
    std::vector<float> found(static_cast<size_t>(s.n_cols * n_rows));
    ggml_backend_tensor_get(y, found.data(), 0, found.size() * sizeof(float));
    ggml_backend_buffer_free(of_weights);
    ggml_backend_buffer_free(of_rest);
    ggml_backend_free(backend);
    ggml_free(own);
    ggml_free(rest);
    return found;
}

ggml_backend_buffer_type_t find_repacking() {
    ggml_backend_dev_t cpu = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    auto * get =
        reinterpret_cast<ggml_backend_dev_get_extra_bufts_t>(ggml_backend_reg_get_proc_address(
            ggml_backend_dev_backend_reg(cpu), "ggml_backend_dev_get_extra_bufts"));
    for (ggml_backend_buffer_type_t * each = get ? get(cpu) : nullptr; each && *each; ++each) {
        if (std::strcmp(ggml_backend_buft_name(*each), "CPU_REPACK") == 0) {
            return *each;
        }
    }
    return nullptr;
}

int n_compared = 0;

bool is_exact(ggml_backend_buffer_type_t type, const shape & s, int64_t n_rows, uint32_t seed) {
    std::mt19937 random(seed);
    std::vector<uint8_t> weights(static_cast<size_t>(s.n_cols * s.n / n_block * 18));
    for (size_t i = 0; i < weights.size(); i += 18) {
        const uint16_t scale =
            ggml_fp32_to_fp16(static_cast<float>(int(random() % 2001) - 1000) / 7000.0f);
        std::memcpy(&weights[i], &scale, sizeof scale);
        for (size_t k = 2; k < 18; ++k) {
            weights[i + k] = static_cast<uint8_t>(random());
        }
    }
    std::vector<float> rows(static_cast<size_t>(s.n * n_rows));
    std::normal_distribution<float> normal;
    for (size_t i = 0; i < rows.size(); ++i) {
        // Some blocks are all zeros, and some all extremes: the largest sums of whole numbers.
        const size_t which = i / n_block % 7;
        rows[i] = which == 0 ? 0.0f : which == 1 ? (seed % 2 ? 3.0f : -3.0f) : normal(random);
    }
    for (size_t i = 0; i + 18 <= weights.size() && seed % 3 == 0; i += 36) {
        std::memset(&weights[i + 2], seed % 2 ? 0xff : 0x00, 16);
    }
    const std::vector<float> found = multiply(type, s, weights, rows);
    for (int64_t r = 0; r < n_rows; ++r) {
        const blocks row = read_row(&rows[static_cast<size_t>(r * s.n)], s.n);
        for (int64_t c = 0; c < s.n_cols; ++c) {
            const float expected =
                product(read_q4_0(&weights[static_cast<size_t>(c * s.n / n_block * 18)], s.n), row);
            const float value = found[static_cast<size_t>(r * s.n_cols + c)];
            ++n_compared;
            if (std::memcmp(&expected, &value, sizeof value) != 0) {
                std::printf(
                    "n %d columns %d threads %d rows %d: row %d column %d is %.9g, not %.9g\n",
                    int(s.n), int(s.n_cols), s.n_threads, int(n_rows), int(r), int(c),
                    double(value), double(expected));
                return false;
            }
        }
    }
    return true;
}

} // namespace

int main() {
    ggml_backend_buffer_type_t type = find_repacking();
    if (type == nullptr || !ggml_cpu_has_avx2() || !ggml_cpu_has_fma() || !ggml_cpu_has_f16c()) {
        std::printf("ok: nothing to compare, this processor multiplies otherwise\n");
        return 0;
    }
    bool is_ok = true;
    uint32_t seed = 0;
    // Rows on both sides of a tile and of a four; columns with and without eight left over; blocks
    // on both sides of a strip.
    for (const shape & s :
         {shape{32, 8, 1}, shape{96, 24, 2}, shape{1024, 16, 2}, shape{1056, 40, 1},
          shape{4128, 72, 3}, shape{8224, 8, 1}, shape{64, 264, 5}}) {
        for (const int64_t n_rows : {1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 15, 16, 17, 31, 33}) {
            is_ok = is_exact(type, s, n_rows, ++seed) && is_ok;
        }
    }
    if (is_ok) {
        std::printf("ok: %d products, to the last bit\n", n_compared);
    }
    return is_ok ? 0 : 1;
}
