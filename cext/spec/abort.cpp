// What is said, and how the process ends, where llama.cpp or ggml gives up: GGML_ASSERT,
// GGML_ABORT.

#include "internal.hpp"

#include "ggml.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <mutex>

#include <unistd.h>

namespace drafthouse {

namespace {

std::mutex words_mutex;
char words[1024];
int32_t ends_with = -1;

void write_line(const char * text) {
    std::string line = text;
    if (line.empty() || line.back() != '\n') { // some of llama.cpp's lines end with one
        line += '\n';
    }
    for (size_t n = 0; n < line.size();) {
        const ssize_t n_written = ::write(STDERR_FILENO, line.data() + n, line.size() - n);
        if (n_written <= 0) {
            return;
        }
        n += static_cast<size_t>(n_written);
    }
}

// Returns to llama.cpp, which calls abort(), or not at all.
void on_abort(const char * message) {
    words_mutex.lock(); // for good: another thread that gives up, too, waits for the end
    write_line(message);
    if (words[0] != '\0') {
        write_line(words);
    }
    if (ends_with >= 0) {
        ::_exit(ends_with);
    }
}

} // namespace

// ggml would start a debugger, if there is one; and where two threads give up at once, as at an
// operation that both compute, each would wait for the other's forever.
void take_aborts() {
    ::setenv("GGML_NO_BACKTRACE", "1", 0); // nor for an exception that nothing catches
    ggml_set_abort_callback(on_abort);
}

} // namespace drafthouse

using namespace drafthouse;

extern "C" {

void spec_on_abort(const char * text, int32_t exit_code) {
    const std::lock_guard<std::mutex> lock(words_mutex);
    const size_t n = text == nullptr ? 0 : std::min(std::strlen(text), sizeof words - 1);
    std::memcpy(words, text == nullptr ? "" : text, n);
    words[n] = '\0';
    ends_with = exit_code;
}

} // extern "C"
