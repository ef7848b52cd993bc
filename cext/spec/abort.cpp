// What is said, and how the process ends, where llama.cpp or ggml gives up (GGML_ASSERT,
// GGML_ABORT) or, while a model is loaded, reads what a damaged file has not.

#include "internal.hpp"

#include "ggml.h"

#include <algorithm>
#include <array>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <mutex>

#include <poll.h>
#include <unistd.h>

namespace drafthouse {

namespace {

std::mutex words_mutex;
char words[1024];
int32_t ends_with = -1;

constexpr std::array FAULTS = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};
std::array<struct sigaction, FAULTS.size()> faults_before;
bool takes_faults = false;

// Where the handler runs of the thread that loads: a stack that has overflowed has no room for it.
constexpr size_t N_STACK_BYTES = 64 << 10;
alignas(64) char stack_of_handler[N_STACK_BYTES];
stack_t stack_before;

// Only what a signal handler may call. A pipe that nobody reads must not keep the process: what is
// written is shorter than what a pipe has free that is ready (PIPE_BUF).
void write_text(const char * text, size_t n) {
    constexpr int PATIENCE_MS = 1000;
    pollfd reader = {STDERR_FILENO, POLLOUT, 0};
    while (n > 0 && ::poll(&reader, 1, PATIENCE_MS) > 0) {
        const ssize_t n_written = ::write(STDERR_FILENO, text, n);
        if (n_written <= 0) {
            return;
        }
        text += n_written;
        n -= static_cast<size_t>(n_written);
    }
}

void write_line(const char * text) {
    const size_t n = std::strlen(text);
    write_text(text, n);
    if (n == 0 || text[n - 1] != '\n') { // some of llama.cpp's lines end with one
        write_text("\n", 1);
    }
}

void on_fault(int number) {
    write_line(number == SIGSEGV  ? "SIGSEGV: what was to be read is not there"
               : number == SIGBUS ? "SIGBUS: a file, or memory, ends before what was to be read"
               : number == SIGFPE ? "SIGFPE: a division by zero"
                                  : "SIGILL: an instruction that this processor does not have");
    write_line(words);
    ::_exit(ends_with);
}

void take_faults(bool wanted) {
    struct sigaction action = {};
    action.sa_handler = on_fault;
    action.sa_flags = SA_ONSTACK;
    stack_t stack = {};
    stack.ss_sp = stack_of_handler;
    stack.ss_size = N_STACK_BYTES;
    if (wanted != takes_faults) {
        ::sigaltstack(wanted ? &stack : &stack_before, wanted ? &stack_before : nullptr);
    }
    for (size_t i = 0; i < FAULTS.size() && wanted != takes_faults; i++) {
        ::sigaction(FAULTS[i], wanted ? &action : &faults_before[i],
                    wanted ? &faults_before[i] : nullptr);
    }
    takes_faults = wanted;
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
    take_faults(exit_code >= 0);
}

} // extern "C"
