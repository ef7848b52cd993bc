// An RPC server whose device rounds as a GPU does: by another kernel, with other sums, for another
// width of the batch. It computes on the CPU and then changes each product and attention by what
// such a kernel would; the same numbers in the same shape always give the same bits.
//
//   rounding_server PORT [SCALE]
//
// Tests whose verdict depends on rounding fail against it (`make test-device`, part "rounding").
// With SCALE 0 it is a device that does not round by the batch at all: ggml's reference kernels sum
// each row alone, always in one order, and tests of exact tokens hold on it (part "exact").

#include "ggml-backend-impl.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml-impl.h"
#include "ggml-rpc.h"
#include "ggml.h"

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>

namespace {

double scale = 1.0;

// How a result is changed: by at most 2^-bits of each number, the same for the same seed.
struct Rounding {
    int bits; // 0: not at all
    uint32_t seed;
};

// Widths at which ggml's CUDA backend takes another kernel, and what is left of a number there:
// float32 sums in another order, or operands that were rounded to float16.
Rounding rounding_of(const ggml_tensor * node) {
    if (node->op == GGML_OP_MUL_MAT || node->op == GGML_OP_MUL_MAT_ID) {
        const int64_t n = node->src[1]->ne[1];
        if (ggml_is_quantized(node->src[0]->type)) {
            return n <= 8    ? Rounding{18, static_cast<uint32_t>(n)}
                   : n <= 64 ? Rounding{17, static_cast<uint32_t>(100 + n / 16)}
                             : Rounding{11, 1000};
        }
        return n <= 3    ? Rounding{18, static_cast<uint32_t>(n)}
               : n <= 16 ? Rounding{11, 100}
                         : Rounding{11, 1000};
    }
    if (node->op == GGML_OP_FLASH_ATTN_EXT) {
        const int64_t n = node->src[0]->ne[1];
        const auto cells = static_cast<uint32_t>(node->src[1]->ne[1] / 256);
        const uint32_t tile = n <= 1 ? 1 : n <= 8 ? 8 : 64;
        return Rounding{n <= 1 ? 16 : 11, tile + (1000 * cells)};
    }
    if (node->op == GGML_OP_GATED_DELTA_NET || node->op == GGML_OP_SSM_SCAN ||
        node->op == GGML_OP_RMS_NORM) {
        return Rounding{18, 1};
    }
    return Rounding{0, 0};
}

uint32_t mixed(uint32_t x) {
    x ^= x >> 16;
    x *= 0x7feb352dU;
    x ^= x >> 15;
    x *= 0x846ca68bU;
    return x ^ (x >> 16);
}

void round_as_a_device(ggml_tensor * node) {
    const Rounding rounding = rounding_of(node);
    const bool is_computed = (node->flags & GGML_TENSOR_FLAG_COMPUTE) != 0;
    if (rounding.bits == 0 || !is_computed || node->type != GGML_TYPE_F32 ||
        !ggml_is_contiguous(node)) {
        return;
    }
    const double largest = scale * std::ldexp(1.0, -rounding.bits);
    auto * numbers = static_cast<float *>(node->data);
    const int64_t n_columns = node->ne[0];
    for (int64_t row = 0; row < ggml_nrows(node); ++row) {
        for (int64_t column = 0; column < n_columns; ++column) {
            const uint32_t random =
                mixed((rounding.seed * 2654435761U) + static_cast<uint32_t>(column));
            const double part = (static_cast<double>(random) / 2147483648.0) - 1.0;
            float & number = numbers[(row * n_columns) + column];
            number *= static_cast<float>(1.0 + (largest * part));
        }
    }
}

decltype(ggml_backend_i::graph_compute) cpu_compute = nullptr;
decltype(ggml_backend_device_i::init_backend) cpu_init = nullptr;
ggml_backend_dev_t cpu = nullptr;

ggml_status compute(ggml_backend_t backend, ggml_cgraph * graph) {
    for (int i = 0; i < ggml_graph_n_nodes(graph); ++i) {
        ggml_cgraph one = ggml_graph_view(graph, i, i + 1);
        const ggml_status status = cpu_compute(backend, &one);
        if (status != GGML_STATUS_SUCCESS) {
            return status;
        }
        round_as_a_device(ggml_graph_node(graph, i));
    }
    return GGML_STATUS_SUCCESS;
}

ggml_backend_t init_backend(ggml_backend_dev_t, const char * params) {
    ggml_backend_t backend = cpu_init(cpu, params);
    if (backend != nullptr && scale == 0.0) {
        ggml_backend_cpu_set_use_ref(backend, true);
    } else if (backend != nullptr) {
        cpu_compute = backend->iface.graph_compute;
        backend->iface.graph_compute = compute;
    }
    return backend;
}

} // namespace

int main(int argc, char ** argv) {
    if (argc < 2 || argc > 3) {
        std::fprintf(stderr, "usage: rounding_server PORT [SCALE]\n");
        return 2;
    }
    scale = argc > 2 ? std::atof(argv[2]) : scale;
    cpu = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    ggml_backend_device device = *cpu;
    cpu_init = device.iface.init_backend;
    device.iface.init_backend = init_backend;
    ggml_backend_dev_t devices[] = {&device};
    const std::string endpoint = std::string("127.0.0.1:") + argv[1];
    ggml_backend_rpc_start_server(endpoint.c_str(), nullptr, 1, 1, devices);
    return 0;
}
