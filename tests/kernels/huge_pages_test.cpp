// Patch 0021: large buffers of the CPU ask Linux for huge pages, small ones do not. Whether any are
// given is the machine's affair, so what is read back is the request itself: the flag "hg" of the
// mapping (proc_pid_smaps(5)).

#include "ggml-backend.h"
#include "ggml-cpu.h"

#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <sstream>
#include <string>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace {

constexpr size_t MiB = 1u << 20;

// The flags of the mapping that has an address; empty where the kernel tells none.
std::string flags_of(uintptr_t address) {
    std::ifstream smaps("/proc/self/smaps");
    std::string line;
    bool is_it = false;
    while (std::getline(smaps, line)) {
        uintptr_t from = 0;
        uintptr_t to = 0;
        if (std::sscanf(line.c_str(), "%" SCNxPTR "-%" SCNxPTR " ", &from, &to) == 2) {
            is_it = from <= address && address < to;
        } else if (is_it && line.rfind("VmFlags:", 0) == 0) {
            return line.substr(8) + " ";
        }
    }
    return "";
}

// Whether a buffer of a size has asked for huge pages, or -1 where the kernel does not tell.
int asks(size_t size) {
    ggml_backend_buffer_t buffer =
        ggml_backend_buft_alloc_buffer(ggml_backend_cpu_buffer_type(), size);
    if (buffer == nullptr) {
        std::printf("no buffer of %zu MiB\n", size / MiB);
        return -2;
    }
    const auto base = reinterpret_cast<uintptr_t>(ggml_backend_buffer_get_base(buffer));
    const std::string flags = flags_of(base + size / 2);
    ggml_backend_buffer_free(buffer);
    return flags.empty() ? -1 : static_cast<int>(flags.find(" hg ") != std::string::npos);
}

} // namespace

int main() {
#ifndef __linux__
    std::printf("skip: not Linux\n");
    return 77;
#else
    // A kernel without huge pages refuses the advice.
    void * page =
        mmap(nullptr, 4 * MiB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    const bool has_advice = page != MAP_FAILED && madvise(page, 4 * MiB, MADV_HUGEPAGE) == 0;
    const int large = asks(64 * MiB);
    const int small = asks(32 * MiB);
    if (!has_advice || large == -1) {
        std::printf("skip: the kernel has no huge pages on request\n");
        return 77;
    }
    std::printf(
        "%s: a buffer of 64 MiB %s, one of 32 MiB %s\n", large == 1 && small == 0 ? "ok" : "fail",
        large == 1 ? "asks for huge pages" : "does not ask", small == 0 ? "does not" : "does");
    return large == 1 && small == 0 ? 0 : 1;
#endif
}
