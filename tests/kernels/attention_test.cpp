// Attention on the processor, as our patches 0008 and 0009 compute it, against a plain sum in
// double precision: rows one by one, in tiles, with masks, biases by head (ALiBi), soft caps and
// sinks.
//
// Prints what differs and returns 1, or prints "ok".
#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml.h"

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <vector>

namespace {

struct setup {
    int64_t n_rows = 1;
    int64_t n_cells = 40;
    int64_t d_k = 64;
    int64_t d_v = 64;
    int64_t n_head = 4;
    int64_t n_head_kv = 2;
    int64_t n_stream = 1;
    ggml_type type = GGML_TYPE_F16;
    float max_bias = 0.0f;
    float softcap = 0.0f;
    bool has_mask = true;
    bool has_sinks = false;
    int n_threads = 1;
    double share_seen = 0.7; // of the cells, by each row

    float scale() const { return 1.0f / std::sqrt(static_cast<float>(d_k)); }

    std::string name() const {
        char text[256];
        std::snprintf(text, sizeof text,
                      "rows %d cells %d d %d/%d heads %d/%d streams %d %s bias %g cap %g mask %d "
                      "sinks %d threads %d seen %g",
                      int(n_rows), int(n_cells), int(d_k), int(d_v), int(n_head), int(n_head_kv),
                      int(n_stream), ggml_type_name(type), double(max_bias), double(softcap),
                      has_mask, has_sinks, n_threads, share_seen);
        return text;
    }
};

// Values of the tensors, in f32; those of K and V are what f16 can hold.
struct values {
    std::vector<float> q, k, v, mask, sinks;
};

values make_values(const setup & s, uint32_t seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    std::uniform_real_distribution<double> uniform;
    const auto fill = [&](int64_t n) {
        std::vector<float> x(static_cast<size_t>(n));
        for (float & value : x) {
            value = ggml_fp16_to_fp32(ggml_fp32_to_fp16(normal(random)));
        }
        return x;
    };
    values x;
    x.q = fill(s.d_k * s.n_rows * s.n_head * s.n_stream);
    x.k = fill(s.d_k * s.n_cells * s.n_head_kv * s.n_stream);
    x.v = fill(s.d_v * s.n_cells * s.n_head_kv * s.n_stream);
    x.sinks = fill(s.n_head);
    x.mask.assign(static_cast<size_t>(s.n_cells * s.n_rows * s.n_stream), 0.0f);
    for (int64_t row = 0; row < s.n_rows * s.n_stream; ++row) {
        float * mask = x.mask.data() + row * s.n_cells;
        for (int64_t cell = 0; cell < s.n_cells; ++cell) {
            const bool is_seen = cell == row % s.n_cells || uniform(random) < s.share_seen;
            mask[cell] = !is_seen ? -INFINITY : s.max_bias > 0 ? -float(cell % 7) : 0.0f;
        }
    }
    return x;
}

std::vector<float> computed(const setup & s, const values & x) {
    ggml_init_params params = {size_t(64) << 20, nullptr, true};
    ggml_context * ctx = ggml_init(params);
    ggml_tensor * q = ggml_new_tensor_4d(ctx, GGML_TYPE_F32, s.d_k, s.n_rows, s.n_head, s.n_stream);
    ggml_tensor * k = ggml_new_tensor_4d(ctx, s.type, s.d_k, s.n_cells, s.n_head_kv, s.n_stream);
    ggml_tensor * v = ggml_new_tensor_4d(ctx, s.type, s.d_v, s.n_cells, s.n_head_kv, s.n_stream);
    ggml_tensor * mask =
        s.has_mask ? ggml_new_tensor_4d(ctx, GGML_TYPE_F16, s.n_cells, s.n_rows, 1, s.n_stream)
                   : nullptr;
    ggml_tensor * sinks = s.has_sinks ? ggml_new_tensor_1d(ctx, GGML_TYPE_F32, s.n_head) : nullptr;
    ggml_tensor * out = ggml_flash_attn_ext(ctx, q, k, v, mask, s.scale(), s.max_bias, s.softcap);
    if (sinks != nullptr) {
        ggml_flash_attn_ext_add_sinks(out, sinks);
    }
    ggml_cgraph * graph = ggml_new_graph(ctx);
    ggml_build_forward_expand(graph, out);
    ggml_backend_t backend = ggml_backend_cpu_init();
    ggml_backend_cpu_set_n_threads(backend, s.n_threads);
    ggml_backend_buffer_t buffer = ggml_backend_alloc_ctx_tensors(ctx, backend);
    const auto set = [](ggml_tensor * tensor, const std::vector<float> & from) {
        if (tensor == nullptr) {
            return;
        }
        if (tensor->type == GGML_TYPE_F32) {
            ggml_backend_tensor_set(tensor, from.data(), 0, ggml_nbytes(tensor));
            return;
        }
        std::vector<ggml_fp16_t> half(from.size());
        ggml_fp32_to_fp16_row(from.data(), half.data(), int64_t(from.size()));
        ggml_backend_tensor_set(tensor, half.data(), 0, ggml_nbytes(tensor));
    };
    set(q, x.q);
    set(k, x.k);
    set(v, x.v);
    set(mask, x.mask);
    set(sinks, x.sinks);
    ggml_backend_graph_compute(backend, graph);
    std::vector<float> result(static_cast<size_t>(ggml_nelements(out)));
    ggml_backend_tensor_get(out, result.data(), 0, ggml_nbytes(out));
    ggml_backend_buffer_free(buffer);
    ggml_backend_free(backend);
    ggml_free(ctx);
    return result;
}

double slope_of(const setup & s, int64_t head) {
    if (s.max_bias <= 0) {
        return 1.0;
    }
    const double n = std::pow(2.0, std::floor(std::log2(double(s.n_head))));
    const double base =
        double(head) < n ? std::pow(2.0, -s.max_bias / n) : std::pow(2.0, -s.max_bias / 2.0 / n);
    return std::pow(base, double(head) < n ? double(head + 1) : 2.0 * (double(head) - n) + 1.0);
}

std::vector<float> expected(const setup & s, const values & x) {
    std::vector<float> result;
    std::vector<double> weight(static_cast<size_t>(s.n_cells));
    for (int64_t stream = 0; stream < s.n_stream; ++stream) {
        for (int64_t row = 0; row < s.n_rows; ++row) {
            for (int64_t head = 0; head < s.n_head; ++head) {
                const int64_t head_kv = stream * s.n_head_kv + head / (s.n_head / s.n_head_kv);
                const float * q =
                    &x.q[size_t(((stream * s.n_head + head) * s.n_rows + row) * s.d_k)];
                double most = s.has_sinks ? x.sinks[size_t(head)] : -INFINITY;
                for (int64_t cell = 0; cell < s.n_cells; ++cell) {
                    const float * k = &x.k[size_t((head_kv * s.n_cells + cell) * s.d_k)];
                    double sum = 0;
                    for (int64_t d = 0; d < s.d_k; ++d) {
                        sum += double(q[d]) * k[d];
                    }
                    sum *= s.scale();
                    if (s.softcap > 0) {
                        sum = s.softcap * std::tanh(sum / s.softcap);
                    }
                    if (s.has_mask) {
                        sum += slope_of(s, head) *
                               x.mask[size_t((stream * s.n_rows + row) * s.n_cells + cell)];
                    }
                    weight[size_t(cell)] = sum;
                    most = std::max(most, sum);
                }
                double all = s.has_sinks ? std::exp(x.sinks[size_t(head)] - most) : 0.0;
                for (double & w : weight) {
                    w = std::exp(w - most);
                    all += w;
                }
                for (int64_t d = 0; d < s.d_v; ++d) {
                    double sum = 0;
                    for (int64_t cell = 0; cell < s.n_cells; ++cell) {
                        sum += weight[size_t(cell)] *
                               x.v[size_t((head_kv * s.n_cells + cell) * s.d_v + d)];
                    }
                    result.push_back(float(sum / all));
                }
            }
        }
    }
    return result;
}

int n_failures = 0;
int n_checks = 0;

void check_values(const setup & s) {
    ++n_checks;
    const values x = make_values(s, uint32_t(n_checks));
    const std::vector<float> found = computed(s, x);
    const std::vector<float> wanted = expected(s, x);
    // llama.cpp's own rows, which every CPU but one with AVX2 takes, keep sums in half precision,
    // and round queries to it: 0.0052 is the most that they have differed by.
    const double tolerance = 1e-2;
    double worst = 0;
    for (size_t i = 0; i < wanted.size(); ++i) {
        const double error = std::fabs(double(found[i]) - wanted[i]);
        worst = std::isfinite(error) ? std::max(worst, error) : INFINITY;
    }
    if (!(worst <= tolerance)) {
        std::printf("differs by %g: %s\n", worst, s.name().c_str());
        ++n_failures;
    }
}

// A row alone, its cells spread over a larger cache, gives bit for bit what it gives among others.
void check_alone(setup s, int64_t row, int64_t n_gap) {
    ++n_checks;
    const values x = make_values(s, 77);
    const std::vector<float> together = computed(s, x);
    setup alone = s;
    alone.n_rows = 1;
    alone.n_cells = s.n_cells * n_gap;
    values y = make_values(alone, 78);
    for (int64_t head = 0; head < s.n_head; ++head) {
        std::memcpy(&y.q[size_t(head * s.d_k)], &x.q[size_t((head * s.n_rows + row) * s.d_k)],
                    size_t(s.d_k) * sizeof(float));
    }
    y.mask.assign(y.mask.size(), -INFINITY);
    y.sinks = x.sinks;
    for (int64_t cell = 0; cell < s.n_cells; ++cell) {
        const int64_t at = cell * n_gap + (cell % n_gap);
        y.mask[size_t(at)] = x.mask[size_t(row * s.n_cells + cell)];
        for (int64_t head = 0; head < s.n_head_kv; ++head) {
            std::memcpy(&y.k[size_t((head * alone.n_cells + at) * s.d_k)],
                        &x.k[size_t((head * s.n_cells + cell) * s.d_k)],
                        size_t(s.d_k) * sizeof(float));
            std::memcpy(&y.v[size_t((head * alone.n_cells + at) * s.d_v)],
                        &x.v[size_t((head * s.n_cells + cell) * s.d_v)],
                        size_t(s.d_v) * sizeof(float));
        }
    }
    const std::vector<float> single = computed(alone, y);
    const size_t n = size_t(s.n_head * s.d_v);
    if (std::memcmp(single.data(), together.data() + size_t(row) * n, n * sizeof(float)) != 0) {
        std::printf("row %d alone in %d cells is another: %s\n", int(row), int(alone.n_cells),
                    s.name().c_str());
        ++n_failures;
    }
}

// However the heads are shared out among threads, each gives the same bits.
void check_threads(setup s) {
    const values x = make_values(s, 79);
    s.n_threads = 1;
    const std::vector<float> alone = computed(s, x);
    for (int n_threads : {2, 3, 5, 8, 13}) {
        ++n_checks;
        s.n_threads = n_threads;
        const std::vector<float> found = computed(s, x);
        if (std::memcmp(found.data(), alone.data(), alone.size() * sizeof(float)) != 0) {
            std::printf("threads make a difference: %s\n", s.name().c_str());
            ++n_failures;
        }
    }
}

void check_shared_heads() {
    const int64_t heads[][2] = {{1, 1},  {2, 1}, {3, 1}, {5, 1}, {8, 1},
                                {16, 1}, {6, 2}, {8, 4}, {14, 2}};
    for (const auto & pair : heads) {
        for (int64_t n_rows : {1, 2, 4, 15}) {
            setup s;
            s.n_rows = n_rows;
            s.n_cells = n_rows == 1 ? 300 : 700; // a single row of many cells is cut by threads
            s.n_head = pair[0];
            s.n_head_kv = pair[1];
            check_threads(s);
            s.max_bias = 8.0f;
            s.has_sinks = true;
            s.n_stream = 2;
            check_threads(s);
        }
    }
}

void check_widths() {
    for (int64_t n_rows : {1, 2, 3, 8, 15, 16, 17, 33, 64, 65}) {
        for (int64_t n_cells : {1, 3, 31, 64, 65, 130, 512, 700}) {
            for (int n_threads : {1, 3}) {
                setup s;
                s.n_rows = n_rows;
                s.n_cells = n_cells;
                s.n_threads = n_threads;
                check_values(s);
            }
        }
    }
}

void check_shapes() {
    const int64_t shapes[][4] = {{64, 64, 4, 4},   {64, 64, 8, 1},   {64, 64, 6, 2},
                                 {128, 128, 4, 2}, {256, 256, 2, 1}, {96, 96, 3, 1},
                                 {72, 40, 4, 2},   {80, 80, 5, 5},   {128, 64, 16, 1},
                                 {192, 128, 2, 2}, {320, 320, 2, 1}, {64, 64, 17, 1}};
    for (const auto & shape : shapes) {
        for (int64_t n_rows : {1, 5, 20}) {
            for (ggml_type type : {GGML_TYPE_F16, GGML_TYPE_F32}) {
                setup s;
                s.n_rows = n_rows;
                s.n_cells = 150;
                s.d_k = shape[0];
                s.d_v = shape[1];
                s.n_head = shape[2];
                s.n_head_kv = shape[3];
                s.type = type;
                check_values(s);
            }
        }
    }
}

void check_extras() {
    for (int64_t n_rows : {1, 4, 24, 70}) {
        for (int64_t n_cells : {100, 600}) {
            for (int mask = 0; mask < 16; ++mask) {
                setup s;
                s.n_rows = n_rows;
                s.n_cells = n_cells;
                s.n_head = 6;
                s.has_mask = (mask & 1) == 0;
                s.max_bias = (mask & 2) != 0 && s.has_mask ? 8.0f : 0.0f;
                s.softcap = (mask & 4) != 0 ? 30.0f : 0.0f;
                s.has_sinks = (mask & 8) != 0;
                check_values(s);
            }
        }
    }
    for (double share_seen : {0.0, 0.02, 0.5, 1.0}) {
        setup s;
        s.share_seen = share_seen;
        s.n_cells = 700;
        for (int64_t n_rows : {1, 9, 40}) {
            for (int64_t n_stream : {1, 3}) {
                s.n_rows = n_rows;
                s.n_stream = n_stream;
                check_values(s);
            }
        }
    }
}

} // namespace

int main() {
    check_widths();
    check_shapes();
    check_extras();
    check_shared_heads();
    for (int64_t n_rows : {1, 2, 7, 15}) {
        for (int64_t n_cells : {5, 64, 100, 300}) {
            for (int64_t n_gap : {1, 3, 5}) {
                setup s;
                s.n_rows = n_rows;
                s.n_cells = n_cells;
                check_alone(s, n_rows - 1, n_gap);
                s.has_sinks = true;
                s.softcap = 20.0f;
                check_alone(s, n_rows / 2, n_gap);
            }
        }
    }
    if (n_failures != 0) {
        std::printf("%d of %d checks failed\n", n_failures, n_checks);
        return 1;
    }
    std::printf("ok: %d checks\n", n_checks);
    return 0;
}
