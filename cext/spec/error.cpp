// Errors, llama.cpp's log, and checks of arguments.

#include "survey.hpp"

#include "log.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <string>

namespace drafthouse {

namespace {

constexpr int32_t LOG_WARN = 3;
constexpr size_t REASON_CHARS_MAX = 160;
constexpr size_t LINE_CHARS_MAX = 400; // of a warning or an error

thread_local std::string last_error;
thread_local std::string last_llama_error;
thread_local bool is_skipping_mtp = false; // while a model is loaded
thread_local bool is_hushed = false;

std::atomic<spec_log_callback> log_callback{nullptr};
std::atomic<void *> log_user{nullptr};

int32_t log_level(ggml_log_level level) {
    thread_local int32_t last = 1;
    switch (level) {
    case GGML_LOG_LEVEL_ERROR:
        last = 4;
        break;
    case GGML_LOG_LEVEL_WARN:
        last = 3;
        break;
    case GGML_LOG_LEVEL_INFO:
        last = 2;
        break;
    case GGML_LOG_LEVEL_CONT:
        break; // goes on with the line before
    default:
        last = 1;
    }
    return last;
}

// Keeps what llama.cpp complains about during a call: the cause comes first, what follows from it
// after. A path may be long.
void remember(const char * text) {
    constexpr size_t N_MAX = 400;
    if (last_llama_error.size() > N_MAX) {
        return;
    }
    last_llama_error += last_llama_error.empty() ? "" : "; ";
    last_llama_error += printable(text, REASON_CHARS_MAX);
}

// Lets so many warnings and errors through at once, and one more each eighth of a second. What asks
// for them may be a client, and whoever reads them formats each.
class line_limit {
public:
    // Whether a line goes through at this time. *n_left_out is how many did not since the last.
    bool takes(double now_s, int64_t & n_left_out) {
        const std::lock_guard<std::mutex> guard(lock_);
        n_free_ = std::min(N_AT_ONCE, n_free_ + (now_s - last_s_) * N_PER_S);
        last_s_ = now_s;
        if (n_free_ < 1.0) {
            ++n_left_out_;
            return false;
        }
        n_free_ -= 1.0;
        n_left_out = n_left_out_;
        n_left_out_ = 0;
        return true;
    }

private:
    static constexpr double N_AT_ONCE = 64.0;
    static constexpr double N_PER_S = 8.0;

    std::mutex lock_;
    double n_free_ = N_AT_ONCE;
    double last_s_ = 0.0;
    int64_t n_left_out_ = 0;
};

line_limit complaints;

double now_s() {
    using namespace std::chrono;
    return duration<double>(steady_clock::now().time_since_epoch()).count();
}

// Whether what llama.cpp warns of is our choice: what a window drops cannot be rolled back, and MTP
// layers that nobody drafts with are not loaded.
bool is_chosen(const char * text) {
    return std::strstr(text, "full-size SWA cache") != nullptr ||
           (is_skipping_mtp && std::strstr(text, "model has unused tensor blk.") != nullptr);
}

void pass_on(ggml_log_level level, const char * text) {
    if (is_chosen(text)) {
        level = GGML_LOG_LEVEL_INFO;
    }
    if (level == GGML_LOG_LEVEL_ERROR) {
        remember(text);
    }
    const spec_log_callback callback = log_callback.load(std::memory_order_acquire);
    if (callback == nullptr || is_hushed) {
        return;
    }
    void * const user = log_user.load(std::memory_order_acquire);
    const int32_t n_level = log_level(level);
    if (n_level < LOG_WARN) {
        callback(n_level, text, user);
        return;
    }
    int64_t n_left_out = 0;
    if (!complaints.takes(now_s(), n_left_out)) {
        return;
    }
    if (n_left_out > 0) {
        callback(LOG_WARN, (std::to_string(n_left_out) + " lines were left out").c_str(), user);
    }
    callback(n_level, printable(text, LINE_CHARS_MAX).c_str(), user);
}

void on_llama_log(ggml_log_level level, const char * text, void * /*user*/) noexcept {
    if (text == nullptr) {
        return;
    }
    try {
        pass_on(level, text);
    } catch (...) { // no memory for the line: it is lost, and what llama.cpp was doing goes on
    }
}

} // namespace

// The beginning of a text on one line: no control characters, no blanks at its end.
std::string printable(const char * text, size_t n_max) {
    std::string line(text, std::min(std::strlen(text), n_max));
    std::replace_if(
        line.begin(), line.end(), [](unsigned char c) { return c < 0x20 || c == 0x7f; }, ' ');
    line.erase(line.find_last_not_of(' ') + 1);
    return line;
}

[[noreturn]] void fail(int32_t code, const std::string & text) {
    throw failure(code, text);
}

// Takes no std::string: it is called where there may be no memory to make one.
int32_t report(int32_t code, const char * text) noexcept {
    try {
        last_error = text;
    } catch (...) {
        last_error.clear();
    }
    return code;
}

// Writes a warning of our own to llama.cpp's log.
void warn(const char * text) {
    on_llama_log(GGML_LOG_LEVEL_WARN, text, nullptr);
}

// Whether llama.cpp says nothing on this thread, though its errors are remembered: what a survey
// tries is no news, and what goes wrong in it the caller is told.
void hush(bool is_on) {
    is_hushed = is_on;
}

// The log, made once. `common` logs through a worker thread of its own, which stays paused.
void init_process() {
    static std::once_flag once;
    std::call_once(once, [] {
        take_aborts();
        llama_log_set(on_llama_log, nullptr);
        common_log_pause(common_log_main());
    });
}

// llama.cpp's list of backends, made once, and not by an import: those of accelerators ask their
// drivers, which take memory and cannot be forked.
void init_devices() {
    static std::once_flag once;
    init_process();
    std::call_once(once, llama_backend_init);
}

// What llama.cpp said last, in parentheses, or nothing.
std::string llama_reason() {
    return last_llama_error.empty() ? std::string() : " (" + last_llama_error + ")";
}

// What llama.cpp refuses before it makes anything of a context is a setting that does not suit the
// model; what fails then is memory.
[[noreturn]] void fail_context(const std::string & whose) {
    const std::string reason = llama_reason();
    const bool is_setting = reason.find("llama_init_from_model: ") != std::string::npos &&
                            reason.find("failed to initialize the context") == std::string::npos;
    fail(is_setting ? SPEC_ERR_INVALID_ARGUMENT : SPEC_ERR_OUT_OF_MEMORY,
         whose + " context cannot be made" + reason);
}

// Before a call whose failure `llama_reason` is to explain.
void forget_llama_reason() {
    last_llama_error.clear();
}

// Whether a model is being loaded without its MTP layers, which llama.cpp then calls unused.
void expect_unused_mtp(bool is_expected) {
    is_skipping_mtp = is_expected;
}

void check_range(const char * name, double value, double low, double high) {
    if (!(value >= low && value <= high)) { // also false for NaN
        char text[160];
        std::snprintf(text, sizeof text, "%s is %g; expected a value in [%g, %g]", name, value, low,
                      high);
        fail(SPEC_ERR_INVALID_ARGUMENT, text);
    }
}

void check_above(const char * name, double value, double low, double high) {
    if (!(value > low && value <= high)) {
        char text[160];
        std::snprintf(text, sizeof text, "%s is %g; expected a value in (%g, %g]", name, value, low,
                      high);
        fail(SPEC_ERR_INVALID_ARGUMENT, text);
    }
}

void check_token(int32_t token, int32_t n_vocab, const char * where) {
    if (token < 0 || token >= n_vocab) {
        fail(SPEC_ERR_INVALID_ARGUMENT, std::string(where) + ": token " + std::to_string(token) +
                                            " is not in [0, " + std::to_string(n_vocab) + ")");
    }
}

void check_seq_id(int32_t seq_id, int32_t n_seq_max) {
    if (seq_id < 0 || seq_id >= n_seq_max) {
        fail(SPEC_ERR_BAD_SEQ_ID, "seq_id is " + std::to_string(seq_id) + "; expected [0, " +
                                      std::to_string(n_seq_max) + ")");
    }
}

// A 64-bit digest. Each word is mixed in by a bijection, so that two inputs that differ in one
// word only never have the same digest. Several words are mixed side by side, since each mixing
// waits for the one before: 6 GB/s for 2.
uint64_t digest(uint64_t seed, const void * source, size_t n) {
    const auto mix = [](uint64_t x) {
        x = (x ^ (x >> 32)) * 0x9e3779b97f4a7c15u;
        x = (x ^ (x >> 29)) * 0xd6e8feb86659fd93u;
        return x ^ (x >> 32);
    };
    constexpr size_t N_LANES = 8;
    const char * bytes = static_cast<const char *>(source);
    const auto next = [&bytes](uint64_t h) {
        uint64_t word;
        std::memcpy(&word, bytes, sizeof word);
        bytes += sizeof word;
        return h ^ word;
    };
    uint64_t h = mix(seed ^ n);
    if (n >= N_LANES * sizeof h) {
        std::array<uint64_t, N_LANES> lanes;
        for (size_t i = 0; i < N_LANES; ++i) {
            lanes[i] = mix(h + i);
        }
        for (; n >= N_LANES * sizeof h; n -= N_LANES * sizeof h) {
            for (uint64_t & lane : lanes) {
                lane = mix(next(lane));
            }
        }
        for (const uint64_t lane : lanes) {
            h = mix(h ^ lane);
        }
    }
    for (; n >= sizeof h; n -= sizeof h) {
        h = mix(next(h));
    }
    uint64_t word = 0;
    std::memcpy(&word, bytes, n);
    return mix(h ^ word);
}

// Copies bytes and a NUL into a caller's buffer; the needed size is always told.
void copy_out(const std::string & text, char * buf, size_t cap, size_t * n_needed) {
    deref(n_needed, "n_needed") = text.size() + 1;
    if (cap < text.size() + 1 || buf == nullptr) {
        fail(SPEC_ERR_BUFFER_TOO_SMALL,
             "the text needs " + std::to_string(text.size() + 1) + " bytes");
    }
    std::memcpy(buf, text.data(), text.size());
    buf[text.size()] = '\0';
}

} // namespace drafthouse

using namespace drafthouse;

extern "C" {

#define XX(name, code, text)                                                                       \
    case code:                                                                                     \
        return #name;
const char * spec_status_name(int32_t status) {
    switch (status) {
    case SPEC_OK:
        return "OK";
        SPEC_ERR_MAP(XX)
    default:
        return "UNKNOWN";
    }
}
#undef XX

const char * spec_last_error(void) {
    return last_error.c_str();
}

int32_t spec_abi_version(void) {
    return SPEC_ABI_VERSION;
}

const char * spec_build_info(void) {
    static const std::string text =
        std::string("llama.cpp ") + llama_version() + "; " + llama_print_system_info();
    return text.c_str();
}

void spec_set_log(spec_log_callback callback, void * user) {
    log_callback.store(nullptr, std::memory_order_release);
    log_user.store(user, std::memory_order_release);
    log_callback.store(callback, std::memory_order_release);
    guarded([] { init_process(); });
}

} // extern "C"
