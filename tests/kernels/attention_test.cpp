// Attention on the processor, as our patches 0008 and 0009 compute it, against a plain sum in
// double precision: rows one by one, in tiles, with masks, biases by head (ALiBi), soft caps and
// sinks; of every type of cells; laid out as a cache is; beside cells that hold what is no number.
//
// Prints what differs and returns 1, or prints "ok".
#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

namespace {

#ifdef WITHOUT_CPU_KERNELS // llama.cpp's own tiles multiply cells that no row sees by 0
constexpr bool IS_STOCK = true;
#else
constexpr bool IS_STOCK = false;
#endif

struct setup {
    int64_t n_rows = 1;
    int64_t n_cells = 40;
    int64_t d_k = 64;
    int64_t d_v = 64;
    int64_t n_head = 4;
    int64_t n_head_kv = 2;
    int64_t n_stream = 1;
    ggml_type type = GGML_TYPE_F16;
    ggml_type type_v = GGML_TYPE_COUNT; // COUNT: as K
    bool is_cache = false;              // heads of a token side by side, as in llama.cpp's cache
    bool is_latent = false;             // V is the first columns of K (MLA)
    int64_t n_pad = 0;                  // more rows of the mask than of Q
    int64_t n_unused = 0;               // cells at the end that no row sees, and that hold NaN
    int64_t n_blind = 0;                // rows at the end that see nothing
    float max_bias = 0.0f;
    float softcap = 0.0f;
    bool has_mask = true;
    bool has_sinks = false;
    int n_threads = 1;
    double share_seen = 0.7; // of the cells, by each row
    bool is_prompt = false;  // a row sees what comes before it, and itself

    ggml_type v_type() const { return type_v == GGML_TYPE_COUNT ? type : type_v; }

    float scale() const { return 1.0f / std::sqrt(static_cast<float>(d_k)); }

    std::string name() const {
        char text[320];
        std::snprintf(text, sizeof text,
                      "rows %d cells %d d %d/%d heads %d/%d streams %d %s bias %g cap %g mask %d "
                      "sinks %d threads %d seen %g prompt %d v %s cache %d latent %d pad %d unused "
                      "%d blind %d",
                      int(n_rows), int(n_cells), int(d_k), int(d_v), int(n_head), int(n_head_kv),
                      int(n_stream), ggml_type_name(type), double(max_bias), double(softcap),
                      has_mask, has_sinks, n_threads, share_seen, is_prompt,
                      ggml_type_name(v_type()), is_cache, is_latent, int(n_pad), int(n_unused),
                      int(n_blind));
        return text;
    }
};

// Values of the tensors, in f32; those of K and V are what f16 can hold.
struct values {
    std::vector<float> q, k, v, mask, sinks;
};

// Rows of d values as a type holds them.
std::vector<char> packed(ggml_type type, const std::vector<float> & from, int64_t d) {
    std::vector<char> bytes(ggml_row_size(type, int64_t(from.size())));
    if (type == GGML_TYPE_F32) {
        std::memcpy(bytes.data(), from.data(), bytes.size());
        return bytes;
    }
    std::vector<float> numbers(from);
    for (float & value : numbers) {
        value = std::isfinite(value) || !ggml_is_quantized(type) ? value : 0.0f;
    }
    const auto n_rows = int64_t(from.size()) / d;
    ggml_quantize_chunk(type, numbers.data(), bytes.data(), 0, n_rows, d, nullptr);
    const size_t n_bytes = ggml_row_size(type, d);
    for (int64_t row = 0; row < n_rows && ggml_is_quantized(type); ++row) {
        if (!std::isfinite(from[size_t(row * d)])) { // all bits set: its scales are no numbers
            std::memset(bytes.data() + size_t(row) * n_bytes, 0xff, n_bytes);
        }
    }
    return bytes;
}

std::vector<float> rounded(ggml_type type, const std::vector<float> & from, int64_t d) {
    std::vector<float> x(from);
    if (type != GGML_TYPE_F32) {
        ggml_get_type_traits(type)->to_float(packed(type, from, d).data(), x.data(),
                                             int64_t(x.size()));
    }
    return x;
}

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
    const int64_t n_used = s.n_cells - s.n_unused;
    for (int64_t row = 0; row < s.n_rows * s.n_stream; ++row) {
        float * mask = x.mask.data() + row * s.n_cells;
        const bool is_blind = row % s.n_rows >= s.n_rows - s.n_blind;
        for (int64_t cell = 0; cell < s.n_cells; ++cell) {
            const bool is_wanted = s.is_prompt
                                       ? cell - row % s.n_rows <= n_used - s.n_rows
                                       : cell == row % n_used || uniform(random) < s.share_seen;
            const bool is_seen = is_wanted && cell < n_used && !is_blind;
            mask[cell] = !is_seen ? -INFINITY : s.max_bias > 0 ? -float(cell % 7) : 0.0f;
        }
    }
    const auto spoil = [&](std::vector<float> & cells, int64_t d) {
        for (int64_t i = 0; i < int64_t(cells.size()); ++i) {
            const int64_t cell = i / d % s.n_cells;
            cells[size_t(i)] = cell < n_used ? cells[size_t(i)] : i % 3 == 0 ? INFINITY : NAN;
        }
    };
    for (size_t i = 0; s.is_latent && i < x.v.size(); ++i) { // the columns of K that are V
        x.v[i] = x.k[i / size_t(s.d_v) * size_t(s.d_k) + i % size_t(s.d_v)];
    }
    if (!IS_STOCK) {
        spoil(x.k, s.d_k);
        spoil(x.v, s.d_v);
    }
    return x;
}

// From [heads, n, d] of each stream to [n, heads, d].
std::vector<float> side_by_side(const std::vector<float> & from, int64_t d, int64_t n,
                                int64_t n_head) {
    std::vector<float> to(from.size());
    for (size_t i = 0; i < from.size(); ++i) {
        const auto at = int64_t(i);
        const int64_t stream = at / (d * n * n_head);
        const int64_t head = at / (d * n) % n_head;
        to[size_t(((stream * n + at / d % n) * n_head + head) * d + at % d)] = from[i];
    }
    return to;
}

void set(ggml_tensor * tensor, const std::vector<float> & from) {
    const std::vector<char> bytes = packed(tensor->type, from, tensor->ne[0]);
    ggml_backend_tensor_set(tensor, bytes.data(), 0, bytes.size());
}

// A tensor of [d, n, heads, streams], in memory as it is or, as a cache, with heads side by side.
struct rows_of_heads {
    ggml_tensor * memory;
    ggml_tensor * tensor;
    int64_t d, n, n_head;
    bool is_cache;

    rows_of_heads(ggml_context * ctx, ggml_type type, int64_t d, int64_t n, int64_t n_head,
                  int64_t n_stream, bool is_cache)
        : d(d), n(n), n_head(n_head), is_cache(is_cache) {
        memory = is_cache ? ggml_new_tensor_4d(ctx, type, d, n_head, n, n_stream)
                          : ggml_new_tensor_4d(ctx, type, d, n, n_head, n_stream);
        tensor = is_cache ? ggml_permute(ctx, memory, 0, 2, 1, 3) : memory;
    }

    void fill(const std::vector<float> & from) const {
        set(memory, is_cache ? side_by_side(from, d, n, n_head) : from);
    }
};

std::vector<float> computed(const setup & s, const values & x) {
    ggml_init_params params = {size_t(64) << 20, nullptr, true};
    ggml_context * ctx = ggml_init(params);
    const rows_of_heads q(ctx, GGML_TYPE_F32, s.d_k, s.n_rows, s.n_head, s.n_stream, s.is_cache);
    const rows_of_heads k(ctx, s.type, s.d_k, s.n_cells, s.n_head_kv, s.n_stream, s.is_cache);
    const rows_of_heads v(ctx, s.v_type(), s.d_v, s.n_cells, s.n_head_kv, s.n_stream, s.is_cache);
    ggml_tensor * columns =
        ggml_view_4d(ctx, k.tensor, s.is_latent ? s.d_v : s.d_k, s.n_cells, s.n_head_kv, s.n_stream,
                     k.tensor->nb[1], k.tensor->nb[2], k.tensor->nb[3], 0);
    const int64_t n_mask = s.n_rows + s.n_pad;
    ggml_tensor * mask =
        s.has_mask ? ggml_new_tensor_4d(ctx, GGML_TYPE_F16, s.n_cells, n_mask, 1, s.n_stream)
                   : nullptr;
    ggml_tensor * sinks = s.has_sinks ? ggml_new_tensor_1d(ctx, GGML_TYPE_F32, s.n_head) : nullptr;
    ggml_tensor * out =
        ggml_flash_attn_ext(ctx, q.tensor, k.tensor, s.is_latent ? columns : v.tensor, mask,
                            s.scale(), s.max_bias, s.softcap);
    if (sinks != nullptr) {
        ggml_flash_attn_ext_add_sinks(out, sinks);
    }
    ggml_cgraph * graph = ggml_new_graph(ctx);
    ggml_build_forward_expand(graph, out);
    ggml_backend_t backend = ggml_backend_cpu_init();
    ggml_backend_cpu_set_n_threads(backend, s.n_threads);
    ggml_backend_buffer_t buffer = ggml_backend_alloc_ctx_tensors(ctx, backend);
    q.fill(x.q);
    k.fill(x.k);
    v.fill(x.v);
    if (mask != nullptr) {
        // The rows behind those of Q hold anything.
        std::vector<float> padded(size_t(s.n_cells * n_mask * s.n_stream), 1.0f);
        const size_t n = size_t(s.n_cells * s.n_rows);
        for (size_t stream = 0; stream < size_t(s.n_stream); ++stream) {
            std::copy_n(x.mask.data() + stream * n, n,
                        padded.data() + stream * size_t(s.n_cells * n_mask));
        }
        std::vector<ggml_fp16_t> half(padded.size());
        ggml_fp32_to_fp16_row(padded.data(), half.data(), int64_t(padded.size()));
        ggml_backend_tensor_set(mask, half.data(), 0, ggml_nbytes(mask));
    }
    if (sinks != nullptr) {
        ggml_backend_tensor_set(sinks, x.sinks.data(), 0, ggml_nbytes(sinks));
    }
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

std::vector<float> expected(const setup & s, values x) {
    x.k = rounded(s.type, x.k, s.d_k);
    x.v = rounded(s.v_type(), x.v, s.d_v);
    std::vector<float> result;
    std::vector<double> weight(static_cast<size_t>(s.n_cells));
    std::vector<double> sums(static_cast<size_t>(s.d_v));
    for (int64_t stream = 0; stream < s.n_stream; ++stream) {
        for (int64_t row = 0; row < s.n_rows; ++row) {
            for (int64_t head = 0; head < s.n_head; ++head) {
                const int64_t head_kv = stream * s.n_head_kv + head / (s.n_head / s.n_head_kv);
                const float * q =
                    &x.q[size_t(((stream * s.n_head + head) * s.n_rows + row) * s.d_k)];
                const double slope = slope_of(s, head);
                double most = s.has_sinks ? x.sinks[size_t(head)] : -INFINITY;
                const float * mask =
                    s.has_mask ? &x.mask[size_t((stream * s.n_rows + row) * s.n_cells)] : nullptr;
                for (int64_t cell = 0; cell < s.n_cells; ++cell) {
                    if (mask != nullptr && mask[cell] == -INFINITY) {
                        weight[size_t(cell)] = -INFINITY; // whatever the cell holds
                        continue;
                    }
                    const float * k = &x.k[size_t((head_kv * s.n_cells + cell) * s.d_k)];
                    double sum = 0;
                    for (int64_t d = 0; d < s.d_k; ++d) {
                        sum += double(q[d]) * k[d];
                    }
                    sum *= s.scale();
                    if (s.softcap > 0) {
                        sum = s.softcap * std::tanh(sum / s.softcap);
                    }
                    sum += mask != nullptr ? slope * mask[cell] : 0.0;
                    weight[size_t(cell)] = sum;
                    most = std::max(most, sum);
                }
                double all = s.has_sinks ? std::exp(x.sinks[size_t(head)] - most) : 0.0;
                for (double & w : weight) {
                    w = w == -INFINITY ? 0.0 : std::exp(w - most);
                    all += w;
                }
                std::fill(sums.begin(), sums.end(), 0.0);
                for (int64_t cell = 0; cell < s.n_cells; ++cell) {
                    const double w = weight[size_t(cell)];
                    const float * v = &x.v[size_t((head_kv * s.n_cells + cell) * s.d_v)];
                    for (size_t d = 0; w > 0.0 && d < sums.size(); ++d) {
                        sums[d] += w * v[d];
                    }
                }
                for (const double sum : sums) {
                    result.push_back(all > 0.0 ? float(sum / all) : 0.0f);
                }
            }
        }
    }
    return result;
}

int n_failures = 0;
int n_checks = 0;
int stride = 1; // an emulator takes half an hour for all of them: one in so many is made

bool is_left_out() {
    return n_checks++ % stride != 0;
}

void check_values(const setup & s) {
    if (is_left_out()) {
        return;
    }
    const values x = make_values(s, uint32_t(n_checks));
    const std::vector<float> found = computed(s, x);
    const std::vector<float> wanted = expected(s, x);
    // llama.cpp's own rows, which every CPU but one with AVX2 takes, keep sums in half precision,
    // and round queries to it: 0.0052 is the most that they have differed by.
    // Where cells are quantized, they round queries to eight bits.
    const bool is_rounded = ggml_is_quantized(s.type) && (IS_STOCK || ggml_cpu_has_avx2() == 0);
    const double tolerance = is_rounded ? 5e-2 : 1e-2;
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
    if (is_left_out()) {
        return;
    }
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

// A cell that holds what is no number ends who sees it, and changes no bit of its neighbours.
void check_neighbours(const setup & s) {
    if (IS_STOCK || is_left_out()) {
        return;
    }
    values x = make_values(s, uint32_t(n_checks));
    const std::vector<float> wanted = computed(s, x);
    constexpr int64_t cell = 3;
    for (int64_t head = 0; head < s.n_head_kv; ++head) {
        for (int64_t d = 0; d < s.d_k; ++d) {
            x.k[size_t((head * s.n_cells + cell) * s.d_k + d)] = NAN;
        }
        for (int64_t d = 0; d < s.d_v; ++d) {
            x.v[size_t((head * s.n_cells + cell) * s.d_v + d)] = d % 2 ? INFINITY : NAN;
        }
    }
    const std::vector<float> found = computed(s, x);
    const auto n = size_t(s.n_head * s.d_v);
    for (int64_t row = 0; row < s.n_rows; ++row) {
        const bool is_seen = x.mask[size_t(row * s.n_cells + cell)] != -INFINITY;
        const float * own = found.data() + size_t(row) * n;
        const bool is_right =
            is_seen ? std::none_of(own, own + n, [](float y) { return std::isfinite(y); })
                    : !std::memcmp(own, wanted.data() + size_t(row) * n, n * sizeof(float));
        if (!is_right) {
            std::printf("row %d, which %s a cell of NaN, is wrong: %s\n", int(row),
                        is_seen ? "sees" : "does not see", s.name().c_str());
            ++n_failures;
            return;
        }
    }
}

// However the heads are shared out among threads, each gives the same bits.
void check_threads(setup s) {
    if (is_left_out()) {
        return;
    }
    const values x = make_values(s, 79);
    s.n_threads = 1;
    const std::vector<float> alone = computed(s, x);
    for (int n_threads : {2, 3, 5, 8, 13}) {
        s.n_threads = n_threads;
        const std::vector<float> found = computed(s, x);
        if (std::memcmp(found.data(), alone.data(), alone.size() * sizeof(float)) != 0) {
            std::printf("threads make a difference: %s\n", s.name().c_str());
            ++n_failures;
        }
    }
}

void check_shared_heads() {
    const int64_t heads[][2] = {{1, 1}, {2, 1}, {3, 1},  {5, 1},  {8, 1}, {16, 1},
                                {6, 2}, {8, 4}, {14, 2}, {40, 1}, {44, 2}};
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
    const int64_t shapes[][4] = {
        {64, 64, 4, 4},   {64, 64, 8, 1},  {64, 64, 6, 2},   {128, 128, 4, 2}, {256, 256, 2, 1},
        {96, 96, 3, 1},   {72, 40, 4, 2},  {80, 80, 5, 5},   {128, 64, 16, 1}, {192, 128, 2, 2},
        {320, 320, 2, 1}, {64, 64, 17, 1}, {112, 112, 6, 3}, {36, 36, 2, 2},   {4104, 8, 1, 1}};
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

// As llama.cpp's cache lays them out: heads of a token side by side, several streams, masks with
// more rows than Q, cells that nobody sees and rows that see nothing.
void check_caches() {
    for (int64_t n_rows : {1, 3, 15, 16, 40, 64, 100}) {
        for (int64_t n_cells : {70, 256, 600}) {
            for (ggml_type type : {GGML_TYPE_F16, GGML_TYPE_F32}) {
                for (int which = 0; which < 8; ++which) {
                    setup s;
                    s.is_cache = true;
                    s.n_rows = n_rows;
                    s.n_cells = n_cells;
                    s.type = type;
                    s.n_threads = 2;
                    s.n_pad = n_rows % 8;
                    s.n_stream = (which & 1) != 0 ? 2 : 1;
                    s.n_unused = (which & 2) != 0 ? 37 : 0;
                    s.n_blind = (which & 4) != 0 ? (n_rows + 1) / 2 : 0;
                    s.share_seen = n_cells == 600 ? 0.1 : 0.8;
                    s.max_bias = (which & 3) == 3 ? 8.0f : 0.0f;
                    check_values(s);
                }
            }
        }
    }
}

// Tiles in which all rows see all cells, in which none does, and such of which a few are hidden.
void check_prompts() {
    for (int64_t n_rows : {16, 129, 200}) {
        for (int64_t n_before : {0, 300}) {
            for (ggml_type type : {GGML_TYPE_F16, GGML_TYPE_F32}) {
                for (int which = 0; which < 4; ++which) {
                    setup s;
                    s.is_cache = true;
                    s.n_rows = n_rows;
                    s.n_unused = 64;
                    s.n_cells = n_before + n_rows + s.n_unused;
                    s.type = type;
                    s.n_threads = 2;
                    s.is_prompt = which < 3;
                    s.share_seen = 0.999;
                    s.d_k = which == 1 ? 36 : 64;
                    s.max_bias = which == 2 ? 8.0f : 0.0f;
                    check_values(s);
                }
            }
        }
    }
}

// Keys and values of other types, and of two.
void check_types() {
    const ggml_type types[][2] = {
        {GGML_TYPE_Q8_0, GGML_TYPE_Q8_0}, {GGML_TYPE_Q4_0, GGML_TYPE_Q4_0},
        {GGML_TYPE_Q4_1, GGML_TYPE_Q4_1}, {GGML_TYPE_IQ4_NL, GGML_TYPE_IQ4_NL},
        {GGML_TYPE_Q5_0, GGML_TYPE_Q5_1}, {GGML_TYPE_BF16, GGML_TYPE_BF16},
        {GGML_TYPE_Q8_0, GGML_TYPE_F16},  {GGML_TYPE_F16, GGML_TYPE_Q4_0},
        {GGML_TYPE_F16, GGML_TYPE_F32}};
    for (const auto & pair : types) {
        for (int64_t n_rows : {1, 5, 20, 70, 200}) {
            for (int64_t d : {64, 96, 128, 288}) {
                setup s;
                s.is_cache = true;
                s.type = pair[0];
                s.type_v = pair[1];
                s.d_k = s.d_v = d;
                s.n_rows = n_rows;
                s.n_cells = 600;
                s.n_stream = n_rows == 20 ? 3 : 1;
                s.n_threads = 2;
                s.n_unused = 9;
                s.has_sinks = n_rows == 5;
                check_values(s);
            }
        }
    }
}

void check_latent() {
    const int64_t shapes[][4] = {
        {576, 512, 4, 1}, {576, 512, 23, 1}, {320, 256, 3, 1}, {192, 128, 8, 1}, {72, 40, 4, 2}};
    for (const auto & shape : shapes) {
        for (int64_t n_rows : {1, 7, 18, 64}) {
            setup s;
            s.is_cache = s.is_latent = true;
            s.type = shape[0] % 32 == 0 && n_rows % 2 == 0 ? GGML_TYPE_Q8_0 : GGML_TYPE_F16;
            s.d_k = shape[0];
            s.d_v = shape[1];
            s.n_head = shape[2];
            s.n_head_kv = shape[3];
            s.n_rows = n_rows;
            s.n_cells = 100;
            s.n_unused = 5;
            check_values(s);
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

// Arguments: the stride of checks; none: all of them.
int main(int argc, char ** argv) {
    stride = argc > 1 ? std::max(1, std::atoi(argv[1])) : 1;
    check_widths();
    check_shapes();
    check_extras();
    check_caches();
    check_prompts();
    check_types();
    check_latent();
    check_shared_heads();
    for (int64_t n_rows : {1, 5, 16, 40, 64, 100}) {
        for (ggml_type type : {GGML_TYPE_F16, GGML_TYPE_F32}) {
            setup s;
            s.n_rows = n_rows;
            s.n_cells = 150;
            s.type = type;
            s.n_threads = 2;
            check_neighbours(s);
        }
    }
    for (int64_t n_rows : {1, 2, 7, 15}) {
        for (int64_t n_cells : {5, 64, 100, 300}) {
            for (int64_t n_gap : {1, 3, 5}) {
                setup s;
                s.n_rows = n_rows;
                s.n_cells = n_cells;
                s.type = n_rows == 7 ? GGML_TYPE_Q8_0 : GGML_TYPE_F16;
                check_alone(s, n_rows - 1, n_gap);
                s.has_sinks = true;
                s.softcap = 20.0f;
                s.d_k = s.d_v = 512;
                check_alone(s, n_rows / 2, n_gap);
            }
        }
    }
    if (n_failures != 0) {
        std::printf("%d of %d checks failed\n", n_failures, n_checks / stride);
        return 1;
    }
    std::printf("ok: %d checks\n", n_checks / stride);
    return 0;
}
