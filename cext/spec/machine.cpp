// The devices of this machine, and how this library was built.

#include "internal.hpp"

#include "build-info.h"
#include "ggml-backend.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#ifndef DRAFTHOUSE_BUILD_FACTS
#define DRAFTHOUSE_BUILD_FACTS "" // CMakeLists.txt names cpu, kernels, patches, backends and more
#endif

namespace drafthouse {

namespace {

int32_t kind_of(ggml_backend_dev_t device) {
    switch (ggml_backend_dev_type(device)) {
    case GGML_BACKEND_DEVICE_TYPE_CPU:
        return SPEC_DEVICE_CPU;
    case GGML_BACKEND_DEVICE_TYPE_GPU:
        return SPEC_DEVICE_GPU;
    case GGML_BACKEND_DEVICE_TYPE_IGPU:
        return SPEC_DEVICE_IGPU;
    case GGML_BACKEND_DEVICE_TYPE_ACCEL:
        return SPEC_DEVICE_ACCEL;
    default:
        return SPEC_DEVICE_OTHER;
    }
}

template <size_t N> void copy_text(char (&out)[N], const char * text) {
    const size_t n = std::min(std::strlen(text), N - 1);
    std::memcpy(out, text, n);
    out[n] = '\0';
}

spec_device describe(ggml_backend_dev_t device) {
    spec_device found = {};
    copy_text(found.name, ggml_backend_dev_name(device));
    copy_text(found.description, ggml_backend_dev_description(device));
    found.kind = kind_of(device);
    size_t n_free = 0;
    size_t n_total = 0;
    ggml_backend_dev_memory(device, &n_free, &n_total);
    found.total_bytes = static_cast<int64_t>(n_total);
    found.free_bytes = static_cast<int64_t>(n_free);
    return found;
}

} // namespace

} // namespace drafthouse

using namespace drafthouse;

extern "C" {

const char * spec_build_facts(void) {
    static const std::string text =
        std::string("llama_cpp=") + llama_commit() + "\ncompiler=" + llama_compiler() +
        "\ntarget=" + llama_build_target() + "\n" DRAFTHOUSE_BUILD_FACTS;
    return text.c_str();
}

int32_t spec_list_devices(spec_device * out, size_t cap, size_t * n_needed) {
    return guarded([&] {
        init_devices();
        const size_t n = ggml_backend_dev_count();
        deref(n_needed, "n_needed") = n;
        if (n > cap || (out == nullptr && n > 0)) {
            fail(SPEC_ERR_BUFFER_TOO_SMALL, "there are " + std::to_string(n) + " devices");
        }
        for (size_t i = 0; i < n; ++i) {
            out[i] = describe(ggml_backend_dev_get(i));
        }
    });
}

} // extern "C"
