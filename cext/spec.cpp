// spec.cpp: the only file that includes llama.cpp. See spec.h for the contract.
//
// Reading order: errors and log; checks of arguments; models; samplers; engine construction;
// validation of a plan; the parts of a step; the step; the same parts one call at a time;
// decoders; snapshots.

#include "spec.h"

#include "cores.hpp"

#include "chat.h"
#include "common.h"
#include "llama.h"
#include "log.h"
#include "sampling.h"
#include "speculative.h"

// Staging API of llama.cpp: the layers that an EAGLE-3 draft reads.
#include "../src/llama-ext.h"
// Patch 0003: random generators as text.
#include "../src/llama-rng.h"
// Which kind of cache a context has: only the plain ones are known to carry draft trees.
#include "../src/llama-kv-cache-iswa.h"
#include "../src/llama-kv-cache.h"

#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "ggml-cpu.h"
// Grammars without a model: checked and bounded before they constrain a sequence.
#include "../src/llama-grammar.h"
#include "../src/unicode.h"
// Internal, for its scheduler: the way to the CPU backend of a context.
#include "../src/llama-context.h"
// Internal, for the tensors by name and the shape of the attention windows.
#include "../src/llama-model.h"
#include "gguf.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <limits>
#include <locale>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <numeric>
#include <random>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

namespace {

// Errors and log.

thread_local std::string last_error;
thread_local std::string last_llama_error;
thread_local bool is_skipping_mtp = false; // while a model is loaded

std::atomic<spec_log_callback> log_callback{nullptr};
std::atomic<void *> log_user{nullptr};

// A failure with a documented code.
struct failure : std::runtime_error {
    int32_t code;
    failure(int32_t code, const std::string & text) : std::runtime_error(text), code(code) {}
};

[[noreturn]] void fail(int32_t code, const std::string & text) {
    throw failure(code, text);
}

int32_t report(int32_t code, const std::string & text) noexcept {
    try {
        last_error = text;
    } catch (...) {
        last_error.clear();
    }
    return code;
}

// Runs a body that may throw and turns whatever it throws into a code: no exception leaves this
// file.
template <typename Body> int32_t guarded(Body && body) noexcept {
    try {
        body();
        return SPEC_OK;
    } catch (const failure & e) {
        return report(e.code, e.what());
    } catch (const std::bad_alloc &) {
        return report(SPEC_ERR_OUT_OF_MEMORY, "memory could not be allocated");
    } catch (const std::exception & e) {
        return report(SPEC_ERR_INTERNAL, e.what());
    } catch (...) {
        return report(SPEC_ERR_INTERNAL, "unknown exception");
    }
}

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
// after. A grammar or a path may be long.
void remember(const char * text) {
    constexpr size_t N_MAX = 400;
    if (last_llama_error.size() > N_MAX) {
        return;
    }
    last_llama_error += last_llama_error.empty() ? "" : "; ";
    last_llama_error.append(text, std::min(std::strlen(text), N_MAX));
    while (!last_llama_error.empty() && last_llama_error.back() == '\n') {
        last_llama_error.pop_back();
    }
}

// Whether what llama.cpp warns of is our choice: what a window drops cannot be rolled back, and MTP
// layers that nobody drafts with are not loaded.
bool is_chosen(const char * text) {
    return std::strstr(text, "full-size SWA cache") != nullptr ||
           (is_skipping_mtp && std::strstr(text, "model has unused tensor blk.") != nullptr);
}

void on_llama_log(ggml_log_level level, const char * text, void * /*user*/) {
    if (text != nullptr && is_chosen(text)) {
        level = GGML_LOG_LEVEL_INFO;
    }
    if (level == GGML_LOG_LEVEL_ERROR && text != nullptr) {
        remember(text);
    }
    const spec_log_callback callback = log_callback.load(std::memory_order_acquire);
    if (callback != nullptr && text != nullptr) {
        callback(log_level(level), text, log_user.load(std::memory_order_acquire));
    }
}

// llama.cpp's own state, made once: backends, log. `common` logs through a worker thread of its
// own, which stays paused.
void init_process() {
    static std::once_flag once;
    std::call_once(once, [] {
        llama_log_set(on_llama_log, nullptr);
        common_log_pause(common_log_main());
        llama_backend_init();
    });
}

// What llama.cpp said last, in parentheses, or nothing.
std::string llama_reason() {
    return last_llama_error.empty() ? std::string() : " (" + last_llama_error + ")";
}

int64_t now_us() {
    using namespace std::chrono;
    return duration_cast<microseconds>(steady_clock::now().time_since_epoch()).count();
}

// Checks of arguments.

template <typename T> T & deref(T * pointer, const char * name) {
    if (pointer == nullptr) {
        fail(SPEC_ERR_INVALID_ARGUMENT, std::string(name) + " is NULL");
    }
    return *pointer;
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

// A 64-bit digest. Each word is mixed in by a bijection, so that two inputs that differ in one
// word only never have the same digest.
uint64_t digest(uint64_t seed, const void * source, size_t n) {
    const auto mix = [](uint64_t x) {
        x = (x ^ (x >> 32)) * 0x9e3779b97f4a7c15u;
        x = (x ^ (x >> 29)) * 0xd6e8feb86659fd93u;
        return x ^ (x >> 32);
    };
    const char * bytes = static_cast<const char *>(source);
    uint64_t h = mix(seed ^ n);
    for (; n >= sizeof h; n -= sizeof h, bytes += sizeof h) {
        uint64_t word;
        std::memcpy(&word, bytes, sizeof word);
        h = mix(h ^ word);
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

} // namespace

// Models.

struct spec_model {
    llama_model_ptr model;
    const llama_vocab * vocab = nullptr;
    bool vocab_only = false;
    uint64_t fingerprint = 0; // digest of the file

    int32_t n_vocab() const { return llama_vocab_n_tokens(vocab); }

    std::string meta(const std::string & key) const {
        std::vector<char> buf(256);
        int32_t n = llama_model_meta_val_str(model.get(), key.c_str(), buf.data(), buf.size());
        if (n < 0) {
            return "";
        }
        if (static_cast<size_t>(n) >= buf.size()) {
            buf.resize(static_cast<size_t>(n) + 1);
            n = llama_model_meta_val_str(model.get(), key.c_str(), buf.data(), buf.size());
        }
        return std::string(buf.data(), static_cast<size_t>(std::max(n, 0)));
    }

    std::string arch() const { return meta("general.architecture"); }
};

namespace {

struct load_progress {
    spec_progress_callback callback;
    void * user;
    bool is_cancelled;
};

bool on_progress(float progress, void * user) {
    auto & state = *static_cast<load_progress *>(user);
    if (state.callback != nullptr && !state.callback(progress, state.user)) {
        state.is_cancelled = true;
        return false;
    }
    return true;
}

void check_gguf_magic(const std::string & path) {
    std::ifstream file(path, std::ios::binary);
    if (!file) {
        fail(SPEC_ERR_NOT_FOUND, "cannot read " + path);
    }
    char magic[4] = {};
    file.read(magic, sizeof magic);
    if (file.gcount() != sizeof magic || std::memcmp(magic, "GGUF", sizeof magic) != 0) {
        fail(SPEC_ERR_BAD_MODEL,
             path + " is not a GGUF file: it does not begin with the bytes \"GGUF\"");
    }
}

// Tells models apart: all of a small file; of a large one its size, its head, where metadata and
// tensor table lie, and pieces spread over the rest. Of a split model, the first part.
uint64_t fingerprint_of(const std::string & path) {
    constexpr std::streamoff HEAD_BYTES = 32 << 20;
    constexpr std::streamoff PIECE_BYTES = 64 << 10;
    constexpr int N_PIECES = 128;
    std::ifstream file(path, std::ios::binary | std::ios::ate);
    const std::streamoff n = file.tellg();
    std::vector<char> buf(
        static_cast<size_t>(std::min(std::max<std::streamoff>(n, 0), HEAD_BYTES)));
    uint64_t h = static_cast<uint64_t>(n);
    const auto add = [&](std::streamoff at, std::streamoff size) {
        file.clear(); // a piece at the end may have been cut short
        file.seekg(at);
        file.read(buf.data(), size);
        h = digest(h, buf.data(), static_cast<size_t>(file.gcount()));
    };
    add(0, static_cast<std::streamoff>(buf.size()));
    for (int i = 1; n > HEAD_BYTES && i <= N_PIECES; ++i) {
        const std::streamoff end = HEAD_BYTES + (n - HEAD_BYTES) / N_PIECES * i;
        add(std::max(end - PIECE_BYTES, HEAD_BYTES), PIECE_BYTES);
    }
    return h;
}

// A number of a GGUF header, or the default where it is absent or of another type.
uint32_t header_u32(const gguf_context * header, const std::string & key, uint32_t otherwise) {
    const int64_t id = gguf_find_key(header, key.c_str());
    const bool is_there = id >= 0 && gguf_get_kv_type(header, id) == GGUF_TYPE_UINT32;
    return is_there ? gguf_get_val_u32(header, id) : otherwise;
}

bool is_one_of(const std::string & name, std::initializer_list<const char *> names) {
    return std::find(names.begin(), names.end(), name) != names.end();
}

bool ends_with(const std::string & text, const std::string & end) {
    return text.size() >= end.size() &&
           text.compare(text.size() - end.size(), end.size(), end) == 0;
}

// Why a floating-point number of an architecture cannot be, or nullptr. llama.cpp's own saver
// writes the numbers of all architectures, and "no bound" is minus infinity.
const char * wrong_float(const std::string & key, float value) {
    if (ends_with(key, ".kda.gate_lower_bound") && value == -INFINITY) {
        return nullptr;
    }
    if (!std::isfinite(value)) {
        return "not a finite number";
    }
    if (ends_with(key, "epsilon") && value < 0.0f) {
        return "negative";
    }
    if (key.find(".rope.freq_base") != std::string::npos && value <= 0.0f) {
        return "not above 0";
    }
    return nullptr;
}

// The reason why the numbers of a header make llama.cpp end the process or hang, or nullptr.
template <typename Number> const char * wrong_layers(const std::string & arch, Number && number) {
    constexpr uint32_t N_LAYERS_MAX = 512; // LLAMA_MAX_LAYERS
    const uint32_t n_layer = number(".block_count", 1);
    if (n_layer < 1 || n_layer > N_LAYERS_MAX) {
        return "block_count is not in [1, 512]";
    }
    if (number(".nextn_predict_layers", 0) > n_layer) {
        return "nextn_predict_layers is above block_count";
    }
    if (number(".full_attention_interval", 1) == 0) {
        return "full_attention_interval is 0";
    }
    if (arch == "eagle3" && n_layer != 1) {
        return "block_count is not 1, as in every EAGLE-3 model";
    }
    return nullptr;
}

// Architectures whose graphs assert that the heads of keys and values are rotated whole, and those
// that assert no more than that both are equally wide. Read from llama.cpp's graphs;
// tests/cext/test_malformed_models.py compares.
const std::initializer_list<const char *> ROTATED_WHOLE = {
    "apertus",    "arcee",         "arctic",       "baichuan",       "chameleon",     "codeshell",
    "cogvlm",     "cohere2moe",    "dbrx",         "deci",           "deepseek",      "dots1",
    "dream",      "ernie4_5",      "ernie4_5-moe", "exaone",         "exaone-moe",    "exaone4",
    "falcon",     "granite",       "granite_swa",  "granitemoe",     "graniteswitch", "grok",
    "grovemoe",   "hunyuan-dense", "hunyuan-moe",  "hunyuan_vl",     "hy_v3",         "internlm2",
    "jais2",      "llada",         "llada-moe",    "llama",          "llama-embed",   "llama4",
    "maincoder",  "mellum",        "minicpm",      "mistral3",       "olmo",          "olmo2",
    "olmoe",      "orion",         "paddleocr",    "pangu-embedded", "plamo",         "pockettts",
    "qwen2",      "qwen2moe",      "qwen2vl",      "qwen3",          "qwen3moe",      "qwen3tts",
    "qwen3vl",    "qwen3vlmoe",    "rnd1",         "seed_oss",       "smallthinker",  "smollm3",
    "starcoder2", "talkie",        "xverse"};
const std::initializer_list<const char *> OF_EQUAL_WIDTHS = {
    "afmoe",        "bailingmoe2",  "bert",           "bitnet",   "bloom",         "chatglm",
    "clef",         "cohere2",      "command-r",      "dflash",   "eagle3",        "eurobert",
    "glm4",         "glm4moe",      "gpt2",           "gptneox",  "granitehybrid", "jais",
    "jina-bert-v2", "jina-bert-v3", "k2-horizon",     "laguna",   "maple",         "minimax-01",
    "minimax-m2",   "minimax-m3",   "modern-bert",    "mpt",      "muse-glimmer",  "nanbeige",
    "nemotron",     "nemotron_h",   "nemotron_h_moe", "neo-bert", "nomic-bert",    "nomic-bert-moe",
    "openelm",      "phi2",         "phi3",           "phimoe",   "qwen",          "qwen35",
    "qwen35moe",    "qwen3next",    "qwen4exp",       "refact",   "spark2_5",      "stablelm",
    "starcoder",    "t5",           "t5encoder"};

template <typename Number> const char * wrong_heads(const std::string & arch, Number && number) {
    const uint32_t n_head = number(".attention.head_count", 0);
    const uint32_t n_embd = number(".embedding_length", 0);
    const uint32_t width = number(".attention.key_length", n_head > 0 ? n_embd / n_head : 0);
    const uint32_t n_rot = number(".rope.dimension_count", width);
    if (n_rot % 2 != 0 || (width > 0 && n_rot > width)) {
        return "rope.dimension_count is odd or above attention.key_length";
    }
    if (is_one_of(arch, ROTATED_WHOLE) && width > 0 && n_rot != width) {
        return "rope.dimension_count is not the width of a head";
    }
    const bool has_equal_widths =
        is_one_of(arch, ROTATED_WHOLE) || is_one_of(arch, OF_EQUAL_WIDTHS);
    if (has_equal_widths && number(".attention.value_length", width) != width) {
        return "attention.value_length is not attention.key_length";
    }
    return nullptr;
}

// What a DFlash model with hyper-connections divides by.
template <typename Number> const char * wrong_blocks(const std::string & arch, Number && number) {
    if (arch != "dflash" || number(".hyper_connection.count", 0) == 0) {
        return nullptr;
    }
    if (number(".attention.output_group_count", 0) == 0) {
        return "attention.output_group_count is missing or 0";
    }
    if (number(".attention.sliding_window", 0) == 0) {
        return "attention.sliding_window is missing or 0";
    }
    return nullptr;
}

template <typename Number> const char * wrong_states(const std::string & arch, Number && number) {
    constexpr uint32_t N_KERNEL_MAX = 64;
    if (!is_one_of(arch, {"qwen35", "qwen35moe", "qwen3next"})) {
        return nullptr;
    }
    const uint64_t n_heads = number(".ssm.time_step_rank", 1);
    const uint64_t n_groups = number(".ssm.group_count", 1);
    const uint64_t width = number(".ssm.state_size", 1);
    if (number(".ssm.inner_size", 1) != width * n_heads || width == 0) {
        return "ssm.inner_size is not ssm.state_size * ssm.time_step_rank";
    }
    if (n_groups == 0 || n_heads % n_groups != 0) {
        return "ssm.group_count does not divide ssm.time_step_rank";
    }
    const uint32_t n_kernel = number(".ssm.conv_kernel", 1);
    if (n_kernel < 1 || n_kernel > N_KERNEL_MAX) {
        return "ssm.conv_kernel is not in [1, 64]";
    }
    return nullptr;
}

// Refuses numbers on which llama.cpp ends the process instead of refusing them itself: found by
// tests/proofs/malformed.py.
void check_header(const std::string & path) {
    const std::unique_ptr<gguf_context, decltype(&gguf_free)> header(
        gguf_init_from_file(path.c_str(), {/*no_alloc=*/true, /*ctx=*/nullptr}), gguf_free);
    const int64_t id = header ? gguf_find_key(header.get(), "general.architecture") : -1;
    if (id < 0 || gguf_get_kv_type(header.get(), id) != GGUF_TYPE_STRING) {
        return; // the loader says what is wrong
    }
    const std::string arch = gguf_get_val_str(header.get(), id);
    const auto number = [&](const char * name, uint32_t otherwise) {
        return header_u32(header.get(), arch + name, otherwise);
    };
    for (const char * reason : {wrong_layers(arch, number), wrong_heads(arch, number),
                                wrong_states(arch, number), wrong_blocks(arch, number)}) {
        if (reason != nullptr) {
            fail(SPEC_ERR_BAD_MODEL, path + " is damaged: " + arch + "." + reason);
        }
    }
    if (number(".nextn_predict_layers", 0) == number(".block_count", 1)) {
        fail(SPEC_ERR_UNSUPPORTED,
             path + " holds MTP layers alone (" + arch +
                 "), which draft inside another model; only models that bring their MTP layers in "
                 "their own file are supported. Give the target's file with its MTP layers, or "
                 "another kind of draft");
    }
    for (int64_t i = 0; i < gguf_get_n_kv(header.get()); ++i) {
        const std::string key = gguf_get_key(header.get(), i);
        const bool is_float = gguf_get_kv_type(header.get(), i) == GGUF_TYPE_FLOAT32;
        const char * reason = is_float && key.rfind(arch + ".", 0) == 0
                                  ? wrong_float(key, gguf_get_val_f32(header.get(), i))
                                  : nullptr;
        if (reason != nullptr) {
            fail(SPEC_ERR_BAD_MODEL, path + " is damaged: " + key + " is " + reason);
        }
    }
}

// llama.cpp ends the process where it is to add a token that does not exist.
void check_special_tokens(const llama_vocab & vocab, const std::string & path) {
    const enum llama_vocab_type type = llama_vocab_type(&vocab);
    if (type == LLAMA_VOCAB_TYPE_NONE || type == LLAMA_VOCAB_TYPE_RWKV) {
        return; // adds none
    }
    const bool is_wpm = type == LLAMA_VOCAB_TYPE_WPM;
    const bool lacks_bos =
        (is_wpm || llama_vocab_get_add_bos(&vocab)) && llama_vocab_bos(&vocab) == LLAMA_TOKEN_NULL;
    const bool lacks_end =
        is_wpm ? llama_vocab_sep(&vocab) == LLAMA_TOKEN_NULL
               : llama_vocab_get_add_eos(&vocab) && llama_vocab_eos(&vocab) == LLAMA_TOKEN_NULL;
    if (lacks_bos || lacks_end) {
        fail(SPEC_ERR_BAD_MODEL, path + " is damaged: its tokenizer adds a token to every text, " +
                                     (lacks_bos ? "bos"
                                      : is_wpm  ? "sep"
                                                : "eos") +
                                     ", that the file does not name (tokenizer.ggml.*_token_id)");
    }
}

spec_model * load_model(const spec_model_params & params) {
    init_process();
    const std::string path = &deref(params.path, "path");
    check_gguf_magic(path);
    check_header(path);

    load_progress progress{params.progress, params.user, false};
    llama_model_params mparams = llama_model_default_params();
    mparams.n_gpu_layers = params.n_gpu_layers;
    mparams.load_mode = params.use_mmap ? LLAMA_LOAD_MODE_AUTO : LLAMA_LOAD_MODE_NONE;
    mparams.vocab_only = params.vocab_only;
    mparams.load_mtp = !params.skip_mtp;
    mparams.progress_callback = on_progress;
    mparams.progress_callback_user_data = &progress;

    last_llama_error.clear();
    auto model = std::make_unique<spec_model>();
    is_skipping_mtp = params.skip_mtp;
    model->model.reset(llama_model_load_from_file(path.c_str(), mparams));
    is_skipping_mtp = false;
    if (progress.is_cancelled) {
        fail(SPEC_ERR_CANCELLED, "loading " + path + " was stopped");
    }
    if (!model->model) {
        fail(SPEC_ERR_BAD_MODEL, path + " cannot be loaded" + llama_reason());
    }
    model->vocab = llama_model_get_vocab(model->model.get());
    check_special_tokens(*model->vocab, path);
    model->vocab_only = params.vocab_only;
    model->fingerprint = params.vocab_only ? 0 : fingerprint_of(path);
    return model.release();
}

spec_model_info describe(const spec_model & model) {
    const llama_model * m = model.model.get();
    spec_model_info info = {};
    info.n_vocab = model.n_vocab();
    info.token_bos = llama_vocab_bos(model.vocab);
    info.token_eos = llama_vocab_eos(model.vocab);
    info.add_bos = llama_vocab_get_add_bos(model.vocab);
    info.add_eos = llama_vocab_get_add_eos(model.vocab);
    if (model.vocab_only) {
        return info;
    }
    info.n_params = static_cast<int64_t>(llama_model_n_params(m));
    info.size_bytes = static_cast<int64_t>(llama_model_size(m));
    info.n_ctx_train = llama_model_n_ctx_train(m);
    info.n_embd = llama_model_n_embd(m);
    info.n_layer = llama_model_n_layer(m);
    info.n_layer_nextn = llama_model_n_layer_nextn(m);
    info.n_target_layers = static_cast<int32_t>(llama_model_target_layer_ids_n(m));
    info.is_recurrent = llama_model_is_recurrent(m);
    info.is_hybrid = llama_model_is_hybrid(m);
    info.has_encoder = llama_model_has_encoder(m);
    return info;
}

std::string model_text(const spec_model & model, const std::string & key) {
    if (key == "arch") {
        return model.arch();
    }
    if (key == "desc") {
        char buf[256] = {};
        llama_model_desc(model.model.get(), buf, sizeof buf);
        return buf;
    }
    if (key == "chat_template") {
        const char * text = llama_model_chat_template(model.model.get(), nullptr);
        return text != nullptr ? text : "";
    }
    fail(SPEC_ERR_INVALID_ARGUMENT,
         "unknown key \"" + key + "\"; expected arch, desc or chat_template");
}

// Change of the depth of blocks by a tag such as {% if … %} or {% endfor %}.
int block_step(const std::string & tag) {
    const size_t first = tag.find_first_not_of("-+ \t\r\n");
    const size_t last = tag.find_first_of(" \t\r\n-(", first);
    const std::string word = first == std::string::npos ? "" : tag.substr(first, last - first);
    if (word.rfind("end", 0) == 0) {
        return -1;
    }
    return is_one_of(word, {"if", "for", "macro", "call", "filter", "generation"}) ? 1 : 0;
}

[[noreturn]] void bad_template(const char * why) {
    fail(SPEC_ERR_BAD_TEMPLATE, std::string("the chat template ") + why);
}

// Where a tag {{ or {% ends whose text begins at `begin`; its length and brackets are bounded.
size_t end_of_tag(const std::string & text, size_t begin, char kind) {
    constexpr size_t N_TAG_MAX = 8 << 10; // bytes: bounds chains of operators too
    constexpr int N_BRACKETS_MAX = 128;
    const char closing = kind == '%' ? '%' : '}';
    int n_brackets = 0;
    char quote = '\0';
    size_t at = begin;
    for (; at < text.size(); ++at) {
        const char c = text[at];
        if (quote != '\0') {
            at += c == '\\' ? 1 : 0;
            quote = c == quote ? '\0' : quote;
        } else if (c == '\'' || c == '"') {
            quote = c;
        } else if (c == closing && text.compare(at + 1, 1, "}") == 0 &&
                   (kind == '%' || n_brackets <= 0)) {
            break;
        } else if (c == '(' || c == '[' || c == '{') {
            n_brackets += 1;
        } else if (c == ')' || c == ']' || c == '}') {
            n_brackets -= 1;
        }
        if (n_brackets > N_BRACKETS_MAX) {
            bad_template("nests more than 128 brackets");
        }
        if (at - begin > N_TAG_MAX) {
            bad_template("has a tag longer than 8 KiB");
        }
    }
    return std::min(at, text.size());
}

// llama.cpp parses a template by recursion without a bound and dies of a full stack, so its nesting
// is bounded here. What it does when it runs is bounded from outside (chat_process.py).
void check_template(const std::string & text) {
    constexpr size_t N_BYTES_MAX = 1 << 20;
    constexpr int N_BLOCKS_MAX = 128;
    constexpr int N_ELIF_MAX = 1024;
    if (text.size() > N_BYTES_MAX) {
        bad_template("is longer than 1 MiB");
    }
    int n_blocks = 0;
    int n_elif = 0;
    size_t at = 0;
    while ((at = text.find('{', at)) != std::string::npos) {
        const char kind = at + 1 < text.size() ? text[at + 1] : '\0';
        const size_t begin = at + 2;
        if (kind == '#') {
            at = std::min(text.find("#}", begin), text.size());
        } else if (kind == '{') {
            at = end_of_tag(text, begin, kind);
        } else if (kind == '%') {
            at = end_of_tag(text, begin, kind);
            const std::string tag = text.substr(begin, at - begin);
            n_blocks += block_step(tag);
            n_elif += tag.find("elif") != std::string::npos ? 1 : 0; // each a level deeper
        } else {
            ++at;
        }
        if (n_blocks > N_BLOCKS_MAX || n_elif > N_ELIF_MAX) {
            bad_template("nests more than 128 blocks, or has more than 1024 times elif");
        }
    }
}

} // namespace

// A chat template, and what the tokenizer adds to its texts.
struct spec_chat {
    common_chat_templates_ptr templates;
    std::string bos;
    std::string eos;
    bool add_bos = false;
    bool add_eos = false;

    // The text without the tokens that the tokenizer adds itself.
    std::string without_added(std::string text) const {
        if (add_bos && text.compare(0, bos.size(), bos) == 0) {
            text.erase(0, bos.size());
        }
        if (add_eos && text.size() >= eos.size() &&
            text.compare(text.size() - eos.size(), eos.size(), eos) == 0) {
            text.resize(text.size() - eos.size());
        }
        return text;
    }
};

namespace {

// What a template throws becomes BAD_TEMPLATE.
template <typename Body> auto run_template(const Body & body) {
    try {
        return body();
    } catch (const failure &) {
        throw;
    } catch (const std::exception & e) {
        fail(SPEC_ERR_BAD_TEMPLATE, std::string("the chat template failed: ") + e.what());
    }
}

std::unique_ptr<spec_chat> open_chat(const spec_chat_params & params) {
    auto chat = std::make_unique<spec_chat>();
    const std::string source = &deref(params.source, "source");
    chat->bos = &deref(params.bos, "bos");
    chat->eos = &deref(params.eos, "eos");
    chat->add_bos = params.add_bos;
    chat->add_eos = params.add_eos;
    if (source.empty()) { // llama.cpp asserts that it has a model then
        fail(SPEC_ERR_INVALID_ARGUMENT, "the chat template is empty");
    }
    check_template(source);
    chat->templates = run_template(
        [&] { return common_chat_templates_init(nullptr, source, chat->bos, chat->eos); });
    return chat;
}

std::string format_chat(const spec_chat & chat, const char * const * roles,
                        const char * const * contents, size_t n, bool add_generation_prompt) {
    common_chat_templates_inputs inputs;
    inputs.add_generation_prompt = add_generation_prompt;
    inputs.use_jinja = true;
    for (size_t i = 0; i < n; ++i) {
        common_chat_msg message;
        message.role = &deref(roles[i], "role");
        message.content = &deref(contents[i], "content");
        inputs.messages.push_back(std::move(message));
    }
    return run_template([&] {
        return chat.without_added(common_chat_templates_apply(chat.templates.get(), inputs).prompt);
    });
}

} // namespace

// Samplers.

// A copy of a sampler's parameters that owns what they point to.
struct sampler_source {
    spec_sampler_params params = {};
    std::string grammar;
    std::vector<std::string> breakers;
    std::vector<spec_logit_bias> bias;
    std::vector<int32_t> samplers;

    // The parameters with pointers into this object; `pointers` holds what needs an array.
    spec_sampler_params view(std::vector<const char *> & pointers) const {
        spec_sampler_params p = params;
        pointers.clear();
        for (const std::string & text : breakers) {
            pointers.push_back(text.c_str());
        }
        p.grammar = grammar.c_str();
        p.dry_breakers = pointers.data();
        p.logit_bias = bias.data();
        p.n_logit_bias = static_cast<int32_t>(bias.size());
        p.samplers = samplers.data();
        return p;
    }
};

// What a parked sampler knows of its sequence, so that the sequence can be computed again without
// its being fed twice.
struct sampler_history {
    llama_tokens known;         // the sequence's tokens that it was fed or chose, from the first on
    std::vector<int32_t> heard; // as in `sequence`
    bool has_emitted = false;   // it chose the last of `known`
    bool has_drafter_begun = false;
    int32_t n_prompt = 0;
    std::string drafter_rng; // the draft sampler's random state, where it has one
};

struct spec_sampler {
    common_sampler_ptr chain;  // has no grammar: that is ours
    llama_sampler_ptr grammar; // null: none
    std::mt19937 rng;          // of the rejection rule; independent of the chain's and the draft's
    sampler_source source;     // for snapshots
    float temperature = 0.0f;
    uint32_t seed = 0;
    bool logprobs = false;
    int32_t n_top_logprobs = 0;
    // Verified by sample-and-match only: mirostat and adaptive-p learn from the token that they
    // drew, and an end token that a grammar forbids must be seen before it is accepted.
    bool is_match_only = false;
    int32_t n_vocab = 0;     // of the model that it was made for
    sampler_history history; // of a parked one; empty in use and when new
    bool is_argmax = false;  // it always chooses the greatest logit outside `banned`
    // Only so many of the greatest logits can be chosen or change what is; 0: all may.
    int32_t n_greatest = 0;
    std::vector<llama_token> banned; // biased by -inf; valid with is_argmax

    llama_sampler * samplers() const { return common_sampler_get(chain.get()); }

    // A grammar knows of what was generated only.
    void accept(llama_token token, bool is_generated) {
        if (grammar && is_generated) {
            llama_sampler_accept(grammar.get(), token);
        }
        common_sampler_accept(chain.get(), token, is_generated);
    }
};

namespace {

constexpr int32_t N_RS_SEQ_LIMIT = 64; // llama.cpp's graphs have room for some hundred nodes more
constexpr int32_t N_SEQ_LIMIT = 256;   // llama.cpp's own bound
constexpr size_t GRAMMAR_BYTES_MAX = 65536;
constexpr int32_t GRAMMAR_DEPTH_MAX = 128; // llama.cpp's parser recurses once per open parenthesis
constexpr int32_t LOOK_BACK_MAX = 65536;
constexpr int32_t LOGIT_BIAS_MAX = 65536;
constexpr int32_t DRY_BREAKERS_MAX = 256;
constexpr size_t DRY_BREAKER_BYTES_MAX = 1024;

constexpr int64_t GRAMMAR_ELEMENTS_MAX = 1 << 20; // of all rules, repetitions written out
constexpr int64_t GRAMMAR_REPEAT_MAX = 2000;      // above, llama.cpp reads "no bound"
constexpr int64_t GRAMMAR_CHOICES_MAX = 1024;     // ways to begin any one rule
constexpr size_t GRAMMAR_STACKS_MAX = 1024;       // parses of one text at a time
constexpr int32_t GRAMMAR_PROBE_CHARS = 256;
constexpr size_t GRAMMAR_PROBE_WORK = 4000000; // comparisons, some milliseconds
constexpr int32_t GRAMMAR_RULE_DEPTH_MAX = 2048;
constexpr size_t GRAMMAR_TEXT_BYTES_MAX = 65536;

[[noreturn]] void bad_grammar(const std::string & text) {
    fail(SPEC_ERR_BAD_GRAMMAR, text);
}

// The grammar's text, read once from left to right, to bound what llama.cpp's parser makes of it:
// it recurses once per open parenthesis and writes every repetition out.
struct grammar_scan {
    const std::string & text;
    size_t i = 0;
    int32_t depth = 0;
    int64_t n_symbol = 1; // elements of the last symbol
    int64_t n_elements = 0;

    // Over a literal or a class, to behind its end; its length is the symbol's number of elements.
    void skip_quoted(char end) {
        n_symbol = 0;
        for (++i; i < text.size() && text[i] != end; ++i, ++n_symbol) {
            i += text[i] == '\\' ? 1 : 0;
        }
        n_elements += n_symbol;
    }

    int64_t number() {
        int64_t n = 0;
        for (; i < text.size() && text[i] >= '0' && text[i] <= '9'; ++i) {
            n = std::min<int64_t>(n * 10 + (text[i] - '0'), INT32_MAX);
        }
        return n;
    }

    void repetition() {
        int64_t n_max = 0;
        while (i < text.size() && text[i] != '}') {
            n_max = std::max(n_max, number());
            i += i < text.size() && text[i] != '}' ? 1 : 0;
        }
        if (n_max > GRAMMAR_REPEAT_MAX) {
            bad_grammar("a repetition of " + std::to_string(n_max) + "; at most " +
                        std::to_string(GRAMMAR_REPEAT_MAX) + " are possible");
        }
        n_elements += std::max<int64_t>(n_symbol, 1) * n_max;
    }

    void symbol(char c) {
        depth += c == '(' ? 1 : c == ')' ? -1 : 0;
        n_symbol = c == ' ' ? n_symbol : 1;
        n_elements += 1;
        if (depth > GRAMMAR_DEPTH_MAX) {
            bad_grammar("the grammar nests parentheses deeper than " +
                        std::to_string(GRAMMAR_DEPTH_MAX) + " levels");
        }
    }

    void run() {
        for (; i < text.size(); ++i) {
            switch (text[i]) {
            case '"':
                skip_quoted('"');
                break;
            case '[':
                skip_quoted(']');
                break;
            case '{':
                ++i;
                repetition();
                break;
            case '#':
                while (i < text.size() && text[i] != '\n') {
                    ++i;
                }
                break;
            default:
                symbol(text[i]);
            }
            if (n_elements > GRAMMAR_ELEMENTS_MAX) {
                bad_grammar("the grammar's repetitions expand to more than " +
                            std::to_string(GRAMMAR_ELEMENTS_MAX) + " elements");
            }
        }
    }
};

void check_grammar(const std::string & grammar) {
    if (grammar.size() > GRAMMAR_BYTES_MAX) {
        bad_grammar("the grammar has " + std::to_string(grammar.size()) + " bytes; at most " +
                    std::to_string(GRAMMAR_BYTES_MAX) + " are accepted");
    }
    if (grammar.compare(0, 11, "%llguidance") == 0) {
        bad_grammar("llguidance grammars are not supported; expected GBNF");
    }
    grammar_scan{grammar}.run();
}

// In how many ways each rule can begin. llama.cpp walks all of them, again and again, when it looks
// for left recursion and at every token: a few lines of grammar can make that take for ever.
struct grammar_choices {
    const llama_grammar_rules & rules;
    std::vector<int64_t> n_ways;
    std::vector<uint8_t> state; // 0 new, 1 in progress, 2 done
    std::vector<bool> is_nullable;

    explicit grammar_choices(const llama_grammar_rules & rules)
        : rules(rules), n_ways(rules.size()), state(rules.size()), is_nullable(rules.size()) {}

    static bool is_end(const llama_grammar_element & e) {
        return e.type == LLAMA_GRETYPE_END || e.type == LLAMA_GRETYPE_ALT;
    }

    // One element of the left edge of an alternative; false where the edge ends.
    bool count(const llama_grammar_element & e, int64_t & n, int32_t depth) {
        if (e.type != LLAMA_GRETYPE_RULE_REF) {
            n += 1;
            return false;
        }
        visit(e.value, depth + 1);
        n += n_ways[e.value];
        return is_nullable[e.value];
    }

    void visit(size_t id, int32_t depth) {
        if (state[id] == 2) {
            return;
        }
        if (state[id] == 1) {
            bad_grammar("a rule refers to itself before it takes a character (left recursion)");
        }
        if (depth > GRAMMAR_RULE_DEPTH_MAX) {
            bad_grammar("rules begin with rules, more than " +
                        std::to_string(GRAMMAR_RULE_DEPTH_MAX) + " deep");
        }
        state[id] = 1;
        int64_t n = 0;
        bool is_edge = true;
        for (const llama_grammar_element & e : rules[id]) {
            if (is_end(e)) {
                is_nullable[id] = is_nullable[id] || is_edge;
                n += is_edge ? 1 : 0;
                is_edge = true;
            } else if (is_edge) {
                is_edge = count(e, n, depth);
            }
            if (n > GRAMMAR_CHOICES_MAX) {
                bad_grammar("a rule can begin in more than " + std::to_string(GRAMMAR_CHOICES_MAX) +
                            " ways; give alternatives with the same beginning a common rule");
            }
        }
        n_ways[id] = n;
        state[id] = 2;
    }
};

using grammar_ptr = std::unique_ptr<llama_grammar, decltype(&llama_grammar_free_impl)>;

// Over white space and comments, which may stand before the first rule.
const char * skip_blank(const char * at) {
    for (;;) {
        at += std::strspn(at, " \t\r\n");
        if (*at != '#') {
            return at;
        }
        at += std::strcspn(at, "\r\n");
    }
}

// Rule by rule: where llama.cpp parses a whole grammar that is wrong, it writes the text to
// standard error. It is a client's, who is told the reason.
void parse_rules(llama_grammar_parser & parser, const char * text) {
    try {
        for (const char * at = skip_blank(text); *at != '\0';) {
            at = parser.parse_rule(at);
        }
    } catch (const std::bad_alloc &) {
        throw;
    } catch (const std::exception & error) {
        constexpr size_t N_MAX = 400; // the reason may end with the rest of the text
        const std::string reason = std::string(error.what()).substr(0, N_MAX);
        bad_grammar("the grammar cannot be parsed (" + reason + ")");
    }
    if (parser.rules.empty()) {
        bad_grammar("the grammar has no rules");
    }
    for (const auto & [name, id] : parser.symbol_ids) {
        if (id >= parser.rules.size() || parser.rules[id].empty()) {
            bad_grammar("the grammar cannot be parsed (Undefined rule " + name + ")");
        }
    }
}

grammar_ptr parse_grammar(const llama_vocab * vocab, const std::string & grammar) {
    check_grammar(grammar);
    last_llama_error.clear();
    {
        llama_grammar_parser parser(vocab);
        parse_rules(parser, grammar.c_str());
        grammar_choices choices(parser.rules);
        for (size_t id = 0; id < parser.rules.size(); ++id) {
            choices.visit(id, 0);
        }
    }
    grammar_ptr g(
        llama_grammar_init_impl(vocab, grammar.c_str(), "root", false, nullptr, 0, nullptr, 0),
        llama_grammar_free_impl);
    if (!g) {
        bad_grammar("the grammar cannot be parsed" + llama_reason());
    }
    return g;
}

// A character that the parse can go on with, or 0.
uint32_t next_char(const llama_grammar_stack & stack) {
    if (stack.empty()) {
        return 0;
    }
    const llama_grammar_element & e = *stack.back();
    if (e.type == LLAMA_GRETYPE_CHAR) {
        return e.value;
    }
    return e.type == LLAMA_GRETYPE_CHAR_ANY || e.type == LLAMA_GRETYPE_CHAR_NOT ? 'a' : 0;
}

// llama_grammar_accept, parse by parse: together they would take time with the square of their
// number before it could be seen.
// Returns how many comparisons it took.
size_t accept_bounded(llama_grammar & g, uint32_t c) {
    size_t n_work = 0;
    llama_grammar_stacks & stacks = llama_grammar_get_stacks(&g);
    const llama_grammar_stacks before = std::move(stacks);
    llama_grammar_stacks after;
    for (const llama_grammar_stack & stack : before) {
        stacks.assign(1, stack);
        llama_grammar_accept(&g, c);
        n_work += stacks.size() * (stacks.size() + after.size() + 1);
        for (const llama_grammar_stack & next : stacks) {
            if (std::find(after.begin(), after.end(), next) == after.end()) {
                after.push_back(next);
            }
        }
        if (after.size() > GRAMMAR_STACKS_MAX) {
            bad_grammar("the grammar is too ambiguous: one text has more than " +
                        std::to_string(GRAMMAR_STACKS_MAX) + " parses at a time");
        }
    }
    stacks = std::move(after);
    return n_work;
}

// The character that most parses can go on with, or 0.
uint32_t likeliest_char(const llama_grammar_stacks & stacks) {
    std::map<uint32_t, size_t> counts;
    for (const llama_grammar_stack & stack : stacks) {
        ++counts[next_char(stack)];
    }
    counts.erase(0);
    const auto best = std::max_element(counts.begin(), counts.end(),
                                       [](auto & a, auto & b) { return a.second < b.second; });
    return best != counts.end() ? best->first : 0;
}

// Follows one text for a while, to find grammars whose parses multiply with every character.
void probe_grammar(llama_grammar & g) {
    size_t n_work = 0;
    for (int32_t i = 0; i < GRAMMAR_PROBE_CHARS && n_work < GRAMMAR_PROBE_WORK; ++i) {
        const uint32_t c = likeliest_char(llama_grammar_get_stacks(&g));
        if (c == 0) {
            return;
        }
        n_work += accept_bounded(g, c);
    }
}

void check_grammar_compiles(const spec_model & model, const std::string & grammar) {
    if (!grammar.empty()) {
        probe_grammar(*parse_grammar(model.vocab, grammar));
    }
}

bool grammar_accepts(const std::string & grammar, const std::string & text) {
    if (text.size() > GRAMMAR_TEXT_BYTES_MAX) {
        fail(SPEC_ERR_INVALID_ARGUMENT, "the text is longer than 64 KiB");
    }
    const grammar_ptr g = parse_grammar(nullptr, grammar);
    for (const uint32_t c : unicode_cpts_from_utf8(text)) {
        accept_bounded(*g, c);
    }
    const llama_grammar_stacks & stacks = llama_grammar_get_stacks(g.get());
    return std::any_of(stacks.begin(), stacks.end(), [](const auto & s) { return s.empty(); });
}

constexpr common_sampler_type SAMPLER_TYPES[SPEC_SAMPLER_COUNT] = {
    COMMON_SAMPLER_TYPE_PENALTIES, COMMON_SAMPLER_TYPE_DRY,       COMMON_SAMPLER_TYPE_TOP_N_SIGMA,
    COMMON_SAMPLER_TYPE_TOP_K,     COMMON_SAMPLER_TYPE_TYPICAL_P, COMMON_SAMPLER_TYPE_TOP_P,
    COMMON_SAMPLER_TYPE_MIN_P,     COMMON_SAMPLER_TYPE_XTC,       COMMON_SAMPLER_TYPE_TEMPERATURE,
    COMMON_SAMPLER_TYPE_INFILL,
};

void check_sampler_order(const spec_sampler_params & p) {
    check_range("n_samplers", p.n_samplers, -1, SPEC_SAMPLER_COUNT);
    uint32_t seen = 0;
    for (int32_t i = 0; i < p.n_samplers; ++i) {
        const int32_t kind = (&deref(p.samplers, "samplers"))[i];
        check_range("samplers", kind, 0, SPEC_SAMPLER_COUNT - 1);
        if ((seen >> kind & 1u) != 0) {
            fail(SPEC_ERR_INVALID_ARGUMENT,
                 "samplers names kind " + std::to_string(kind) + " twice");
        }
        seen |= 1u << kind;
    }
}

void check_adaptive_params(const spec_sampler_params & p) {
    const double inf = std::numeric_limits<float>::max();
    check_range("n_top_logprobs", p.n_top_logprobs, 0, SPEC_TOP_LOGPROBS_MAX);
    check_range("min_keep", p.min_keep, 0, std::numeric_limits<int32_t>::max());
    check_range("dynatemp_range", p.dynatemp_range, 0.0, inf);
    check_range("dynatemp_exponent", p.dynatemp_exponent, 0.0, 1e6);
    check_range("mirostat", p.mirostat, 0, 2);
    check_range("mirostat_tau", p.mirostat_tau, 0.0, 1e6);
    check_range("mirostat_eta", p.mirostat_eta, 0.0, 1.0);
    if (p.adaptive_target != -1.0f) {
        check_range("adaptive_target", p.adaptive_target, 0.0, 1.0);
    }
    check_range("adaptive_decay", p.adaptive_decay, 0.0, 0.99);
    if (p.mirostat != 0 && p.adaptive_target >= 0.0f) {
        fail(SPEC_ERR_INVALID_ARGUMENT, "mirostat and adaptive_target both choose the token");
    }
    check_sampler_order(p);
}

// llama.cpp's infill compares all pairs of candidates, and puts an end token into the list that a
// grammar has not seen.
void check_infill(const spec_model & model, const spec_sampler_params & p, bool has_grammar) {
    bool is_narrow = false;
    for (int32_t i = 0; i < p.n_samplers; ++i) {
        is_narrow =
            is_narrow || (p.samplers[i] == SPEC_SAMPLER_TOP_K && p.top_k >= 1 && p.top_k <= 1024);
        if (p.samplers[i] != SPEC_SAMPLER_INFILL) {
            continue;
        }
        if (!is_narrow || has_grammar) {
            fail(SPEC_ERR_INVALID_ARGUMENT,
                 "infill needs a top_k in [1, 1024] before it and no grammar");
        }
        if (llama_vocab_eot(model.vocab) < 0 && llama_vocab_eos(model.vocab) < 0) {
            fail(SPEC_ERR_UNSUPPORTED, "infill needs a model with an end token");
        }
    }
}

void check_sampler_params(const spec_sampler_params & p, int32_t n_vocab) {
    const double inf = std::numeric_limits<float>::max();
    check_range("temperature", p.temperature, 0.0, inf);
    check_range("top_k", p.top_k, 0, std::numeric_limits<int32_t>::max());
    check_above("top_p", p.top_p, 0.0, 1.0);
    check_range("min_p", p.min_p, 0.0, 1.0);
    check_above("typical_p", p.typical_p, 0.0, 1.0);
    if (p.top_n_sigma != -1.0f) {
        check_above("top_n_sigma", p.top_n_sigma, 0.0, inf);
    }
    check_range("penalty_last_n", p.penalty_last_n, -1, LOOK_BACK_MAX);
    check_range("penalty_repeat", p.penalty_repeat, 1e-6, 1e6);
    check_range("penalty_frequency", p.penalty_frequency, -1e6, 1e6);
    check_range("penalty_presence", p.penalty_presence, -1e6, 1e6);
    check_range("dry_multiplier", p.dry_multiplier, 0.0, 1e6);
    check_range("dry_base", p.dry_base, 1.0, 1e6);
    check_range("dry_allowed_length", p.dry_allowed_length, 0, LOOK_BACK_MAX);
    check_range("dry_penalty_last_n", p.dry_penalty_last_n, -1, LOOK_BACK_MAX);
    check_range("xtc_probability", p.xtc_probability, 0.0, 1.0);
    check_range("xtc_threshold", p.xtc_threshold, 0.0, 1.0);
    check_range("n_logit_bias", p.n_logit_bias, 0, LOGIT_BIAS_MAX);
    for (int32_t i = 0; i < p.n_logit_bias; ++i) {
        const spec_logit_bias & b = (&deref(p.logit_bias, "logit_bias"))[i];
        check_token(b.token, n_vocab, "logit_bias");
        if (std::isnan(b.bias) || b.bias == std::numeric_limits<float>::infinity()) {
            fail(SPEC_ERR_INVALID_ARGUMENT, "logit_bias of token " + std::to_string(b.token) +
                                                " is not a number below infinity");
        }
    }
    check_adaptive_params(p);
    check_range("n_dry_breakers", p.n_dry_breakers, -1, DRY_BREAKERS_MAX);
    for (int32_t i = 0; i < p.n_dry_breakers; ++i) {
        const char * text = &deref((&deref(p.dry_breakers, "dry_breakers"))[i], "dry_breakers");
        check_range("length of a dry_breaker", static_cast<double>(std::strlen(text)), 1,
                    DRY_BREAKER_BYTES_MAX);
    }
}

int32_t look_back(int32_t n, const spec_model & model) {
    return n >= 0 ? n : std::min(llama_model_n_ctx_train(model.model.get()), LOOK_BACK_MAX);
}

common_params_sampling to_common(const spec_sampler_params & p, const spec_model & model) {
    common_params_sampling s;
    s.seed = p.seed;
    s.temp = p.temperature;
    s.top_k = p.top_k;
    s.top_p = p.top_p;
    s.min_p = p.min_p;
    s.typ_p = p.typical_p;
    s.top_n_sigma = p.top_n_sigma;
    s.penalty_last_n = look_back(p.penalty_last_n, model);
    s.penalty_repeat = p.penalty_repeat;
    s.penalty_freq = p.penalty_frequency;
    s.penalty_present = p.penalty_presence;
    s.dry_multiplier = p.dry_multiplier;
    s.dry_base = p.dry_base;
    s.dry_allowed_length = p.dry_allowed_length;
    s.dry_penalty_last_n = look_back(p.dry_penalty_last_n, model);
    s.xtc_probability = p.xtc_probability;
    s.xtc_threshold = p.xtc_threshold;
    s.ignore_eos = p.ignore_eos;
    s.no_perf = true;
    s.min_keep = p.min_keep;
    s.dynatemp_range = p.dynatemp_range;
    s.dynatemp_exponent = p.dynatemp_exponent;
    s.mirostat = p.mirostat;
    s.mirostat_tau = p.mirostat_tau;
    s.mirostat_eta = p.mirostat_eta;
    s.adaptive_target = p.adaptive_target;
    s.adaptive_decay = p.adaptive_decay;
    if (p.n_samplers >= 0) {
        s.samplers.clear();
    }
    for (int32_t i = 0; i < p.n_samplers; ++i) {
        s.samplers.push_back(SAMPLER_TYPES[p.samplers[i]]);
    }
    if (p.adaptive_target >= 0.0f) {
        s.samplers.push_back(COMMON_SAMPLER_TYPE_ADAPTIVE_P);
    }
    if (p.n_dry_breakers >= 0) {
        s.dry_sequence_breakers.assign(p.dry_breakers, p.dry_breakers + p.n_dry_breakers);
    }
    for (int32_t i = 0; i < p.n_logit_bias; ++i) {
        s.logit_bias.push_back({p.logit_bias[i].token, p.logit_bias[i].bias});
    }
    if (p.ignore_eos) {
        for (int32_t token = 0; token < model.n_vocab(); ++token) {
            if (llama_vocab_is_eog(model.vocab, token)) {
                s.logit_bias.push_back({token, -INFINITY});
            }
        }
    }
    return s;
}

sampler_source copy_source(const spec_sampler_params & p) {
    sampler_source source;
    source.params = p;
    source.params.grammar = nullptr;
    source.params.dry_breakers = nullptr;
    source.params.logit_bias = nullptr;
    source.grammar = p.grammar != nullptr ? p.grammar : "";
    for (int32_t i = 0; i < p.n_dry_breakers; ++i) {
        source.breakers.emplace_back(p.dry_breakers[i]);
    }
    source.bias.assign(p.logit_bias, p.logit_bias + p.n_logit_bias);
    source.params.samplers = nullptr;
    source.samplers.assign(p.samplers, p.samplers + std::max(p.n_samplers, 0));
    return source;
}

// Whether the penalties can only lower a logit, and by which many tokens at most.
bool has_lowering_penalties(const spec_sampler_params & p) {
    return p.penalty_repeat >= 1.0f && p.penalty_frequency >= 0.0f && p.penalty_presence >= 0.0f;
}

bool has_penalties(const spec_sampler_params & p) {
    return p.penalty_last_n != 0 &&
           (p.penalty_repeat != 1.0f || p.penalty_frequency != 0.0f || p.penalty_presence != 0.0f);
}

// Whether a sampler of the chain leaves its candidates alone with these parameters.
bool is_neutral(common_sampler_type kind, const spec_sampler_params & p) {
    switch (kind) {
    case COMMON_SAMPLER_TYPE_PENALTIES:
        return !has_penalties(p);
    case COMMON_SAMPLER_TYPE_DRY:
        return p.dry_multiplier == 0.0f || p.dry_base < 1.0f || p.dry_penalty_last_n == 0;
    case COMMON_SAMPLER_TYPE_TOP_N_SIGMA:
        return p.top_n_sigma < 0.0f;
    case COMMON_SAMPLER_TYPE_TYPICAL_P:
        return p.typical_p >= 1.0f;
    case COMMON_SAMPLER_TYPE_XTC:
        return p.xtc_probability <= 0.0f;
    default:
        return false;
    }
}

// Whether the chain comes to the greatest logit whatever the others are. What keeps the likeliest
// candidates only, keeps that one.
bool is_argmax(const spec_sampler_params & p, const common_params_sampling & s) {
    const auto keeps_greatest = [&](common_sampler_type kind) {
        return is_neutral(kind, p) || kind == COMMON_SAMPLER_TYPE_TOP_K ||
               kind == COMMON_SAMPLER_TYPE_TOP_P || kind == COMMON_SAMPLER_TYPE_MIN_P ||
               kind == COMMON_SAMPLER_TYPE_TOP_N_SIGMA || kind == COMMON_SAMPLER_TYPE_TEMPERATURE;
    };
    const bool has_temperature =
        std::count(s.samplers.begin(), s.samplers.end(), COMMON_SAMPLER_TYPE_TEMPERATURE) == 1;
    return p.temperature == 0.0f && p.dynatemp_range == 0.0f && has_temperature &&
           std::all_of(s.samplers.begin(), s.samplers.end(), keeps_greatest);
}

// How many of the greatest logits the chain must see: its top-k, and as many more as biases and
// penalties may push out of it. 0 where something before top-k looks at all of them.
int32_t count_greatest(const spec_sampler_params & p, const common_params_sampling & s,
                       size_t n_banned) {
    int64_t n = static_cast<int64_t>(n_banned) + p.top_k;
    for (const common_sampler_type kind : s.samplers) {
        if (kind == COMMON_SAMPLER_TYPE_TOP_K) {
            return p.top_k >= 1 && n <= 1024 ? static_cast<int32_t>(n) : 0;
        }
        if (kind == COMMON_SAMPLER_TYPE_PENALTIES && has_lowering_penalties(p)) {
            n += has_penalties(p) ? s.penalty_last_n : 0;
        } else if (!is_neutral(kind, p)) {
            return 0;
        }
    }
    return 0;
}

// Finds out what the chain need not be asked.
void find_shortcuts(spec_sampler & sampler, const spec_model & model, const spec_sampler_params & p,
                    const common_params_sampling & s) {
    int32_t n_suppressed = 0;
    const llama_token * suppressed = llama_vocab_get_suppress_tokens(model.vocab, &n_suppressed);
    sampler.banned.assign(suppressed, suppressed + n_suppressed);
    bool is_banning = true; // no bias but -inf
    for (const llama_logit_bias & b : s.logit_bias) {
        is_banning = is_banning && b.bias == -INFINITY;
        sampler.banned.push_back(b.token);
    }
    if (sampler.is_match_only || !is_banning) {
        return; // mirostat, adaptive-p, grammars and other biases
    }
    sampler.is_argmax = is_argmax(p, s);
    sampler.n_greatest = count_greatest(p, s, sampler.banned.size());
}

spec_sampler * make_sampler(const spec_model & model, const spec_sampler_params & params) {
    check_sampler_params(params, model.n_vocab());
    const std::string grammar = params.grammar != nullptr ? params.grammar : "";
    check_grammar(grammar);
    if (!grammar.empty() && params.ignore_eos) {
        fail(SPEC_ERR_INVALID_ARGUMENT,
             "ignore_eos with a grammar: a finished grammar allows no token but the end");
    }
    check_infill(model, params, !grammar.empty());
    check_grammar_compiles(model, grammar);
    spec_sampler_params p = params;
    if (p.seed == SPEC_SEED_RANDOM) {
        p.seed = std::random_device{}() & 0x7FFFFFFFu;
    }
    auto sampler = std::make_unique<spec_sampler>();
    common_params_sampling sparams = to_common(p, model);
    last_llama_error.clear();
    try {
        sampler->chain.reset(common_sampler_init(model.model.get(), sparams));
    } catch (const std::bad_alloc &) {
        throw;
    } catch (const std::exception & e) {
        fail(SPEC_ERR_INVALID_ARGUMENT, e.what() + llama_reason());
    }
    if (!grammar.empty()) {
        sampler->grammar.reset(llama_sampler_init_grammar(model.vocab, grammar.c_str(), "root"));
        if (!sampler->grammar) {
            bad_grammar("the grammar cannot be parsed" + llama_reason());
        }
    }
    // From the same seed as the chain, but not the same numbers.
    sampler->rng.seed(llama_sampler_get_seed(sampler->samplers()) ^ 0x9e3779b9u);
    sampler->source = copy_source(p);
    sampler->temperature = p.temperature;
    sampler->seed = p.seed;
    sampler->logprobs = p.logprobs;
    sampler->n_top_logprobs = p.n_top_logprobs;
    sampler->is_match_only = p.mirostat != 0 || p.adaptive_target >= 0.0f || !grammar.empty();
    sampler->n_vocab = model.n_vocab();
    find_shortcuts(*sampler, model, p, sparams);
    return sampler.release();
}

} // namespace

// Engines.

namespace {

// What a context can take back.
enum class rollback_kind { any, bounded, none };

// A draft of one sequence: tokens, and the distribution of each where the drafter sampled.
struct proposal {
    llama_tokens tokens;
    std::vector<std::vector<llama_token_data>> q;
    bool is_given = false; // by the plan, not by the drafter
};

// A draft of an n-gram drafter and what became of it. Its state is a function of the tokens and of
// these, so that a snapshot holds them and a restored drafter lives through them again.
struct ngram_event {
    int32_t n_past;
    llama_token id_last;
    int32_t n_draft;
    int32_t n_accepted; // -1: never verified
};

// MTP's hidden rows at the end of a prompt: those of the last two tokens processed, for forks.
struct hidden_rows {
    int32_t n_past = 0;        // tokens processed
    std::vector<float> last;   // of the last of them; empty: not known
    std::vector<float> before; // of the one before

    // The row that a sequence of n tokens goes on from; empty where it is not known.
    const std::vector<float> & at(int32_t n) const {
        static const std::vector<float> none;
        return n == n_past ? last : n == n_past - 1 ? before : none;
    }
};

// The hidden rows that the drafter has the target give, as llama.cpp's flags.
struct row_flags {
    bool has_last = false; // of the last layer
    bool is_masked = false;
    std::vector<bool> layers; // inputs of layers

    bool is_any() const {
        return has_last || std::find(layers.begin(), layers.end(), true) != layers.end();
    }
};

struct sequence {
    bool is_begun = false;
    bool is_cold = false;     // no draft state: no drafts
    bool is_awaited = false;  // cold, and fed again from its next tokens on
    bool has_emitted = false; // a step has chosen a token: generation
    bool has_drafter_begun = false;
    llama_token id_last = LLAMA_TOKEN_NULL;
    int32_t n_prompt = 0; // tokens given before the first one was chosen
    llama_tokens tokens;  // those in the target's KV cache
    std::unique_ptr<spec_sampler> sampler;
    common_speculative_ptr
        ngram; // n-gram drafters keep tokens: one per sequence, made anew for each
    std::vector<ngram_event> ngram_events;
    std::vector<int32_t> heard; // what the sampler was fed: token, or -1 - token where it chose it
    int32_t n_heard = 0;        // tokens of the sequence, from the first on, that are in `heard`
    llama_tokens known;         // resumed: those tokens, until they are computed again
    proposal draft;             // of this step or round
    hidden_rows hidden;
    std::vector<uint8_t> checkpoint;
    int64_t i_decode = -1;  // the target's decode that had its tokens last
    int32_t n_back_max = 0; // recurrent targets: how far that decode's states reach back
    std::mt19937 synth_rng; // of synthetic acceptance

    // one call at a time
    bool is_proposed = false;
    int32_t n_past_proposed = 0;

    int32_t n_past() const { return static_cast<int32_t>(tokens.size()); }

    // Whether its next tokens go to the drafter.
    bool is_fed() const { return !is_cold || is_awaited; }

    // Tokens of the sequence, from the first on, that the sampler must not be fed (again).
    int32_t n_known() const { return std::max(n_heard, n_past() + (has_emitted ? 1 : 0)); }

    // Feeds the sampler a token that it did not choose.
    void feed(llama_token token) {
        sampler->accept(token, false);
        heard.push_back(token);
    }
};

} // namespace

namespace {

// What became of one entry of a plan, before it is put into the result.
struct outcome {
    std::vector<const float *> rows; // logits after each token that may be chosen on: [n_vocab]
    llama_tokens emitted;
    std::vector<float> logprobs;
    std::vector<int32_t> top_tokens;
    std::vector<float> top_logprobs;
    int32_t status = SPEC_OK;
};

// Runs jobs on ggml's threads, which are awake right after a decode: a graph of one node, whose
// threads take the jobs one by one.
//
// The hand-over is by two counters of its own, not by ggml's barriers alone: whoever takes a job
// sees what was written before `run`, and whoever called `run` sees what the jobs wrote. So a
// sanitizer sees it too.
struct team {
    int32_t n_threads = 1;
    ggml_context_ptr ctx;
    ggml_threadpool * pool = nullptr;
    ggml_cgraph * graph = nullptr;
    std::vector<uint8_t> work;
    ggml_cplan plan = {};
    std::atomic<size_t> i_next{0};
    std::atomic<size_t> n_done{0};
    size_t n_jobs = 0;
    void (*job)(const void *, size_t) = nullptr; // throws nothing
    const void * user = nullptr;

    team() = default;
    team(const team &) = delete;
    team & operator=(const team &) = delete;
    ~team() { ggml_threadpool_free(pool); }

    static void take(ggml_tensor * /*node*/, int /*ith*/, int /*nth*/, void * self) {
        team & t = *static_cast<team *>(self);
        for (size_t i = t.i_next++; i < t.n_jobs; i = t.i_next++) {
            t.job(t.user, i);
            ++t.n_done;
        }
    }

    void init(int32_t n) {
        n_threads = n;
        if (n < 2) {
            return;
        }
        ggml_threadpool_params params = ggml_threadpool_params_default(n);
        params.poll = 0; // sleeps between steps
        pool = ggml_threadpool_new(&params);
        ctx.reset(ggml_init({2 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, false}));
        if (!ctx || pool == nullptr) {
            throw std::bad_alloc();
        }
        ggml_tensor * node = ggml_custom_4d(ctx.get(), GGML_TYPE_I8, 1, 1, 1, 1, nullptr, 0, take,
                                            GGML_N_TASKS_MAX, this);
        graph = ggml_new_graph(ctx.get());
        ggml_build_forward_expand(graph, node);
        plan = ggml_graph_plan(graph, n, pool);
        work.resize(plan.work_size);
        plan.work_data = work.data();
    }

    template <typename Body> void run(size_t n, bool is_parallel, const Body & body) {
        if (!is_parallel || n_threads < 2 || n < 2) {
            for (size_t i = 0; i < n; ++i) {
                body(i);
            }
            return;
        }
        n_jobs = n;
        job = [](const void * b, size_t i) { (*static_cast<const Body *>(b))(i); };
        user = &body;
        n_done = 0;
        i_next = 0; // last: it hands the rest over
        if (ggml_graph_compute(graph, &plan) != GGML_STATUS_SUCCESS || n_done != n) {
            fail(SPEC_ERR_INTERNAL, "the threads that choose tokens did not finish");
        }
    }
};

} // namespace

struct threadpool_deleter {
    void operator()(ggml_threadpool * pool) const { ggml_threadpool_free(pool); }
};

using threadpool_ptr = std::unique_ptr<ggml_threadpool, threadpool_deleter>;

struct spec_engine {
    const spec_model * target_model = nullptr;
    const spec_model * draft_model = nullptr; // null for NONE, MTP and the n-gram kinds
    spec_engine_limits limits = {};
    spec_engine_params params = {};
    threadpool_ptr pool; // of both contexts, which are freed before it
    llama_context_ptr target;
    llama_context_ptr draft; // null for NONE and the n-gram kinds
    common_params_speculative spec_params;
    common_speculative_ptr spec; // null for NONE and the n-gram kinds; freed before the contexts
    rollback_kind target_rollback = rollback_kind::any;
    std::vector<sequence> sequences;
    std::vector<bool> has_drafted; // by id, since the engine was made; see can_verify_given
    common_batch batch;
    int64_t n_decodes = 0; // of the target
    int32_t n_threads = 1; // of narrow decodes
    int32_t n_threads_batch = 1;

    row_flags asked;      // by the drafter
    bool has_rows = true; // the target's last decode gave them
    int32_t n_unfed = 0;  // decodes in a row that fed nobody

    std::vector<int32_t> rows;     // batch index of each plan entry's first token
    std::vector<outcome> outcomes; // one per plan entry
    team sampling;                 // its threads choose tokens
    std::vector<spec_result_entry> out_entries;
    std::vector<int32_t> out_tokens;
    std::vector<float> out_logprobs;
    std::vector<int32_t> out_top_tokens; // [n_tokens, n_top]
    std::vector<float> out_top_logprobs;
    int32_t n_top = 0; // of this step
    spec_draft_work draft_work = {};

    bool has_copies_due = false; // cells of forks that llama.cpp has yet to copy

    std::atomic<bool> is_interrupted{false}; // by another thread: the run ends with this step

    // Benchmarks: probability that a drafted token is accepted when those before it were.
    std::vector<double> synth_probs;
    uint32_t n_synth_begun = 0; // seeds their generators: the same order, the same decisions

    bool is_decoded = false; // by hand: a batch is there for logits and process
    bool is_processed = false;
    int32_t fault = SPEC_FAULT_NONE;
    int32_t n_fault = 0;

    llama_memory_t target_memory() const { return llama_get_memory(target.get()); }
    llama_memory_t draft_memory() const { return llama_get_memory(draft.get()); }

    bool is_ngram() const {
        return limits.draft_type >= SPEC_DRAFT_NGRAM_SIMPLE &&
               limits.draft_type <= SPEC_DRAFT_NGRAM_CACHE;
    }

    bool take_fault(int32_t wanted) {
        if (fault != wanted || n_fault <= 0) {
            return false;
        }
        --n_fault;
        return true;
    }

    ~spec_engine() {
        spec.reset(); // its destructor touches the draft context
    }
};

namespace {

common_speculative_type to_common_type(int32_t type) {
    switch (type) {
    case SPEC_DRAFT_MTP:
        return COMMON_SPECULATIVE_TYPE_DRAFT_MTP;
    case SPEC_DRAFT_EAGLE3:
        return COMMON_SPECULATIVE_TYPE_DRAFT_EAGLE3;
    case SPEC_DRAFT_SIMPLE:
        return COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE;
    case SPEC_DRAFT_NGRAM_SIMPLE:
        return COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE;
    case SPEC_DRAFT_NGRAM_MAP_K:
        return COMMON_SPECULATIVE_TYPE_NGRAM_MAP_K;
    case SPEC_DRAFT_NGRAM_MAP_K4V:
        return COMMON_SPECULATIVE_TYPE_NGRAM_MAP_K4V;
    case SPEC_DRAFT_NGRAM_MOD:
        return COMMON_SPECULATIVE_TYPE_NGRAM_MOD;
    case SPEC_DRAFT_NGRAM_CACHE:
        return COMMON_SPECULATIVE_TYPE_NGRAM_CACHE;
    case SPEC_DRAFT_DFLASH:
        return COMMON_SPECULATIVE_TYPE_DRAFT_DFLASH;
    case SPEC_DRAFT_DSPARK:
        return COMMON_SPECULATIVE_TYPE_DRAFT_DSPARK;
    default:
        return COMMON_SPECULATIVE_TYPE_NONE;
    }
}

// Types that draft a whole block of tokens in one pass, from the target's layers. All of their
// state is in their cache.
bool drafts_blocks(int32_t type) {
    return type == SPEC_DRAFT_DFLASH || type == SPEC_DRAFT_DSPARK;
}

bool needs_draft_model(int32_t type) {
    return type == SPEC_DRAFT_EAGLE3 || type == SPEC_DRAFT_SIMPLE || drafts_blocks(type);
}

bool needs_draft_context(int32_t type) {
    return type == SPEC_DRAFT_MTP || needs_draft_model(type);
}

void check_synth_rates(const spec_engine_params & p) {
    if (p.n_synth_rates == 0) {
        return;
    }
    if (p.draft_type == SPEC_DRAFT_NONE || p.n_synth_rates != p.n_draft_max ||
        p.synth_rates == nullptr) {
        fail(SPEC_ERR_INVALID_ARGUMENT,
             "there are " + std::to_string(p.n_synth_rates) +
                 " synth_rates; expected none, or n_draft_max of them with a draft type");
    }
    double before = 1.0;
    for (int32_t i = 0; i < p.n_synth_rates; ++i) {
        const double rate = static_cast<double>(p.synth_rates[i]);
        check_range("synth_rates", rate, 0.0, before);
        before = rate;
    }
}

void check_engine_params(const spec_engine_params & p) {
    check_range("draft_type", p.draft_type, 0, SPEC_DRAFT_COUNT - 1);
    check_range("n_ctx", p.n_ctx, 0, std::numeric_limits<int32_t>::max());
    check_range("n_ctx_seq", p.n_ctx_seq, 0, std::numeric_limits<int32_t>::max());
    check_range("n_batch", p.n_batch, 1, 1 << 20);
    check_range("n_ubatch", p.n_ubatch, 1, p.n_batch);
    check_range("n_seq_max", p.n_seq_max, 1, N_SEQ_LIMIT);
    check_range("n_draft_max", p.n_draft_max, p.draft_type == SPEC_DRAFT_NONE ? 0 : 1, 256);
    check_range("n_rs_seq", p.n_rs_seq, -1, N_RS_SEQ_LIMIT);
    check_range("n_threads", p.n_threads, 0, 512);
    check_range("n_threads_batch", p.n_threads_batch, 0, 512);
    check_range("n_wide", p.n_wide, 0, std::numeric_limits<int32_t>::max());
    check_range("p_min", p.p_min, 0.0, 0.999999);
    check_range("n_min", p.n_min, 0, p.draft_type == SPEC_DRAFT_NONE ? 0 : p.n_draft_max);
    if (p.probabilistic && p.n_min > 1) {
        fail(
            SPEC_ERR_INVALID_ARGUMENT,
            "n_min is " + std::to_string(p.n_min) +
                " with probabilistic; expected at most 1: whether a sampled draft is dropped would "
                "depend on what was sampled, and change the distribution");
    }
    const int32_t n_draft = p.draft_type == SPEC_DRAFT_NONE ? 0 : p.n_draft_max;
    if (p.n_batch < p.n_seq_max * (1 + n_draft)) {
        fail(SPEC_ERR_INVALID_ARGUMENT,
             "n_batch is " + std::to_string(p.n_batch) +
                 "; expected at least n_seq_max * (1 + n_draft_max) = " +
                 std::to_string(p.n_seq_max * (1 + n_draft)) +
                 ", so that every sequence can verify a draft in one step");
    }
    check_synth_rates(p);
    if (p.exact && p.kv_unified) {
        fail(SPEC_ERR_INVALID_ARGUMENT,
             "exact with kv_unified: where a sequence's cells lie depends on the others");
    }
    const int32_t n_rollback = std::max(n_draft, p.n_rs_seq);
    if (p.n_ubatch < 2 + n_rollback) {
        fail(SPEC_ERR_INVALID_ARGUMENT,
             "n_ubatch is " + std::to_string(p.n_ubatch) +
                 "; expected at least 2 + n_draft_max = " + std::to_string(2 + n_rollback) +
                 ": a draft is verified inside one ubatch");
    }
}

// A tensor of a model by its name, or null.
const ggml_tensor * tensor_of(const spec_model & model, const std::string & name) {
    for (const auto & [found, tensor] : llama_internal_get_tensor_map(model.model.get())) {
        if (found == name) {
            return tensor;
        }
    }
    return nullptr;
}

// Architectures whose graphs mark the input of every layer, on which other models can draft; on
// others llama.cpp ends the process when asked for one. (Not all of them show a decoder their
// layers: in some the input is no row of the residual stream.)
bool feeds_drafts(const std::string & arch) {
    static const char * const NAMES[] = {
        "llama",    "mimo2",      "qwen3",      "qwen3moe",       "qwen35",      "qwen35moe",
        "gpt-oss",  "qwen3next",  "minimax-01", "minimax-m2",     "bailingmoe3", "deepseek4",
        "gemma4",   "hunyuan_vl", "k2-horizon", "lfm2",           "lfm2moe",     "muse-glimmer",
        "nanbeige", "nemotron_h", "qwen4exp",   "nemotron_h_moe",
    };
    return std::any_of(std::begin(NAMES), std::end(NAMES),
                       [&](const char * name) { return arch == name; });
}

// Of these, those that mark the output of the last layer as well.
bool feeds_last_layer(const std::string & arch) {
    return arch == "mimo2" || arch == "deepseek4" || arch == "nemotron_h" ||
           arch == "nemotron_h_moe";
}

// Each layer that the draft reads must be one that the target shows.
void check_layers_read(const spec_model & target, const spec_model & draft) {
    const std::string arch = target.arch();
    if (!feeds_drafts(arch)) {
        fail(SPEC_ERR_UNSUPPORTED, "the draft model (" + draft.arch() +
                                       ") reads the target's layers, which llama.cpp does not show "
                                       "of the architecture \"" +
                                       arch + "\"; choose another draft type");
    }
    const int32_t n_layer = llama_model_n_layer(target.model.get());
    const int32_t n_shown = feeds_last_layer(arch) ? n_layer : n_layer - 1;
    for (uint32_t i = 0; i < llama_model_target_layer_ids_n(draft.model.get()); ++i) {
        const int32_t id = llama_model_target_layer_ids(draft.model.get())[i];
        if (id < 0 || id > n_shown) {
            fail(SPEC_ERR_INCOMPATIBLE_DRAFT,
                 "the draft model (" + draft.arch() + ") reads layer " + std::to_string(id) +
                     " of its target; this target has " + std::to_string(n_layer) +
                     " and shows the inputs of [0, " + std::to_string(n_shown) + "]");
        }
    }
}

// What a draft model does not have itself it takes from the target, row by row of its vocabulary.
void check_shared_tables(const spec_model & target, const spec_model & draft) {
    const int32_t n_embd = llama_model_n_embd(target.model.get());
    const int32_t n_embd_draft = llama_model_n_embd(draft.model.get());
    if (draft.n_vocab() != target.n_vocab()) {
        fail(SPEC_ERR_INCOMPATIBLE_DRAFT,
             "the draft model (" + draft.arch() + ") has " + std::to_string(draft.n_vocab()) +
                 " tokens; this target has " + std::to_string(target.n_vocab()));
    }
    const bool has_embd = tensor_of(draft, "token_embd.weight") != nullptr;
    const bool has_output = tensor_of(draft, "output.weight") != nullptr;
    const bool is_wide = n_embd == n_embd_draft;
    if (!is_wide && !(has_embd && has_output)) {
        fail(SPEC_ERR_INCOMPATIBLE_DRAFT, "the draft model (" + draft.arch() +
                                              ") has rows of width " +
                                              std::to_string(n_embd_draft) +
                                              " and no token table of its own; this target's "
                                              "tables have width " +
                                              std::to_string(n_embd));
    }
    if (!has_output && tensor_of(target, "output.weight") == nullptr &&
        tensor_of(target, "token_embd.weight") == nullptr) {
        fail(SPEC_ERR_INCOMPATIBLE_DRAFT, "neither the draft model nor the target has a table that "
                                          "projects to the vocabulary");
    }
}

// A draft with a vocabulary of its own names the target's token of each of its rows; llama.cpp
// ends the process at one that does not exist.
void check_drafted_tokens(const spec_model & target, const spec_model & draft) {
    const ggml_tensor * d2t = tensor_of(draft, "d2t");
    if (d2t == nullptr) {
        return;
    }
    if (d2t->type != GGML_TYPE_I64 || d2t->buffer == nullptr) {
        fail(SPEC_ERR_BAD_MODEL, "the draft model's tensor \"d2t\" is not of 64-bit integers");
    }
    std::vector<int64_t> ids(static_cast<size_t>(ggml_nelements(d2t)));
    ggml_backend_tensor_get(d2t, ids.data(), 0, ids.size() * sizeof(int64_t));
    for (const int64_t id : ids) {
        if (id < 0 || id >= target.n_vocab()) {
            fail(SPEC_ERR_INCOMPATIBLE_DRAFT, "the draft model drafts token " + std::to_string(id) +
                                                  "; this target has " +
                                                  std::to_string(target.n_vocab()));
        }
    }
}

void check_eagle3(const spec_model & target, const spec_model & draft) {
    const llama_model * d = draft.model.get();
    const uint32_t n = llama_model_target_layer_ids_n(d);
    if (draft.arch() != "eagle3" || n != 3) {
        fail(SPEC_ERR_NOT_EAGLE3,
             "the draft model has architecture \"" + draft.arch() + "\" and reads " +
                 std::to_string(n) +
                 " layers of the target; expected an EAGLE-3 model that reads exactly 3");
    }
    check_layers_read(target, draft);
    const std::string width = draft.meta("eagle3.target_hidden_size");
    const int32_t n_embd = llama_model_n_embd(target.model.get());
    if (!width.empty() && width != std::to_string(n_embd)) {
        fail(SPEC_ERR_INCOMPATIBLE_DRAFT, "the EAGLE-3 draft was made for hidden rows of width " +
                                              width + "; this target's have " +
                                              std::to_string(n_embd));
    }
    check_drafted_tokens(target, draft);
}

bool is_dspark(const spec_model & draft) {
    return tensor_of(draft, "markov_w1.weight") != nullptr;
}

// What a block drafter is by its metadata; llama.cpp reads the same keys.
struct block_layout {
    int32_t n_block; // tokens of one block, the last chosen token among them
    bool
        starts_at_anchor; // the last token's own place is drafted from: n_block drafts, else 1 less

    int32_t n_draft_max() const { return starts_at_anchor ? n_block : n_block - 1; }
};

block_layout layout_of(const spec_model & draft) {
    constexpr long N_BLOCK_DEFAULT = 16, N_BLOCK_MAX = 1024;
    const std::string text = draft.meta("dflash.block_size");
    const bool is_spark = is_dspark(draft);
    const std::string anchor = draft.meta("dflash.sample_from_anchor");
    char * end = nullptr;
    const long n = text.empty() ? N_BLOCK_DEFAULT : std::strtol(text.c_str(), &end, 10);
    const long n_least = is_spark && anchor != "false" ? 1 : 2;
    if ((end != nullptr && *end != '\0') || n < n_least || n > N_BLOCK_MAX ||
        (text.empty() && is_spark)) {
        fail(SPEC_ERR_BAD_MODEL, "the draft model's dflash.block_size is " +
                                     (text.empty() ? std::string("missing") : text) +
                                     "; expected [" + std::to_string(n_least) + ", " +
                                     std::to_string(N_BLOCK_MAX) + "]");
    }
    return {static_cast<int32_t>(n), is_spark && anchor != "false"};
}

void check_confidence(const spec_model & draft) {
    const std::string flag = draft.meta("dflash.has_confidence_head");
    if (tensor_of(draft, "conf_proj.weight") == nullptr || (!flag.empty() && flag != "true")) {
        fail(SPEC_ERR_INVALID_ARGUMENT,
             "p_min is above 0, but the DSpark draft has no confidence head that could be compared "
             "with it; set p_min to 0");
    }
}

void check_selector(const spec_model & draft) {
    const int32_t top_k = llama_model_dflash_selector_top_k(draft.model.get());
    const bool has_selector = tensor_of(draft, "selector_hidden.weight") != nullptr;
    if ((top_k > 0) != has_selector || top_k < 0 || top_k > draft.n_vocab()) {
        fail(SPEC_ERR_BAD_MODEL,
             "the draft model's dflash.selector_top_k is " + std::to_string(top_k) +
                 (has_selector ? "; expected [1, the number of tokens]"
                               : ", but it has no selector (tensor \"selector_hidden\")"));
    }
}

// Every demand of llama.cpp's DFlash and DSpark drafters, most of which end the process there.
void check_block_draft(const spec_model & target, const spec_model & draft,
                       const spec_engine_params & p) {
    const bool wants_dspark = p.draft_type == SPEC_DRAFT_DSPARK;
    const std::string wanted = wants_dspark ? "DSpark" : "DFlash";
    const int32_t not_wanted = wants_dspark ? SPEC_ERR_NOT_DSPARK : SPEC_ERR_NOT_DFLASH;
    if (draft.arch() != "dflash") {
        fail(not_wanted, "the draft model has architecture \"" + draft.arch() + "\"; expected a " +
                             wanted + " model, of architecture \"dflash\"");
    }
    if (is_dspark(draft) != wants_dspark) {
        fail(not_wanted, wants_dspark ? "the draft model has no Markov head (tensor "
                                        "\"markov_w1\"): it is a DFlash model, draft type dflash"
                                      : "the draft model has a Markov head: it is a DSpark model, "
                                        "draft type dspark");
    }
    const llama_model * d = draft.model.get();
    if (llama_model_target_layer_ids_n(d) == 0) {
        fail(SPEC_ERR_BAD_MODEL, "the draft model's dflash.target_layers is empty: it reads no "
                                 "layer of the target");
    }
    const int32_t n_embd = llama_model_n_embd(target.model.get());
    if (llama_model_n_embd(d) != n_embd) {
        fail(SPEC_ERR_INCOMPATIBLE_DRAFT, "the " + wanted +
                                              " draft was made for hidden rows of width " +
                                              std::to_string(llama_model_n_embd(d)) +
                                              "; this target's have " + std::to_string(n_embd));
    }
    const llama_token mask = llama_vocab_mask(draft.vocab);
    if (mask < 0 || mask >= target.n_vocab()) {
        fail(SPEC_ERR_BAD_MODEL, "the draft model names no mask token of its vocabulary "
                                 "(tokenizer.ggml.mask_token_id), which stands for the tokens to "
                                 "draft");
    }
    check_layers_read(target, draft);
    check_shared_tables(target, draft);
    check_drafted_tokens(target, draft);
    check_selector(draft);
    layout_of(draft);
    if (wants_dspark && p.p_min > 0.0f) {
        check_confidence(draft);
    }
}

// A draft model that says which target it was trained for is believed.
void check_target_name(const spec_model & target, const spec_model & draft) {
    const std::string wanted = draft.meta("drafthouse.draft.target_name");
    const std::string name = target.meta("general.name");
    if (!wanted.empty() && wanted != name) {
        fail(SPEC_ERR_INCOMPATIBLE_DRAFT, "the draft model was trained for the target \"" + wanted +
                                              "\"; this target is \"" + name + "\"");
    }
}

// Models that do not write one token after the other.
void check_generates(const spec_model & model, const char * which) {
    const std::string what = std::string("the ") + which + " (" + model.arch() + ")";
    if (llama_model_has_encoder(model.model.get())) {
        fail(SPEC_ERR_UNSUPPORTED, what + " has an encoder; only models that decode are supported");
    }
    if (llama_model_is_diffusion(model.model.get())) {
        fail(SPEC_ERR_UNSUPPORTED, what + " is a diffusion model: it fills in a text as a whole, "
                                          "not one token after the other");
    }
}

// The layer that MTP drafts with: it may be missing in the file, or was not loaded.
bool has_mtp_weights(const spec_model & model) {
    const std::string first = "blk." + std::to_string(llama_model_n_layer(model.model.get())) + ".";
    const auto & tensors = llama_internal_get_tensor_map(model.model.get());
    return std::any_of(tensors.begin(), tensors.end(),
                       [&](const auto & named) { return named.first.rfind(first, 0) == 0; });
}

void check_mtp(const spec_model & target) {
    if (llama_model_n_layer_nextn(target.model.get()) <= 0) {
        fail(SPEC_ERR_NO_MTP_HEADS, "the target (" + target.arch() +
                                        ") has no MTP (NextN) heads; choose another draft type");
    }
    if (!has_mtp_weights(target)) {
        fail(SPEC_ERR_NO_MTP_HEADS, "the weights of the target's MTP (NextN) heads were not "
                                    "loaded, or are not in its file");
    }
}

void check_draft(const spec_model & target, const spec_model * draft,
                 const spec_engine_params & p) {
    if (llama_model_target_layer_ids_n(target.model.get()) > 0) {
        fail(SPEC_ERR_UNSUPPORTED,
             "this is a draft model (" + target.arch() + "); it cannot be a target");
    }
    check_generates(target, "target");
    if (p.draft_type == SPEC_DRAFT_MTP) {
        check_mtp(target);
    }
    if (!needs_draft_model(p.draft_type)) {
        if (draft != nullptr) {
            fail(SPEC_ERR_INVALID_ARGUMENT,
                 "a draft model was given, but this draft type uses none");
        }
        return;
    }
    if (draft == nullptr) {
        fail(SPEC_ERR_INVALID_ARGUMENT, "this draft type needs a draft model, but none was given");
    }
    if (draft->vocab_only) {
        fail(SPEC_ERR_INVALID_ARGUMENT, "the draft model was loaded with vocab_only");
    }
    if (p.draft_type == SPEC_DRAFT_EAGLE3) {
        check_eagle3(target, *draft);
    } else if (drafts_blocks(p.draft_type)) {
        check_block_draft(target, *draft, p);
    } else if (llama_model_target_layer_ids_n(draft->model.get()) > 0) {
        fail(SPEC_ERR_INCOMPATIBLE_DRAFT,
             "the draft model is of architecture \"" + draft->arch() +
                 "\", which drafts from the target's hidden states; expected an ordinary model");
    } else {
        check_generates(*draft, "draft model");
    }
    check_target_name(target, *draft);
    if (!common_speculative_are_compatible(target.model.get(), draft->model.get())) {
        fail(SPEC_ERR_INCOMPATIBLE_DRAFT, "the draft model's vocabulary differs from the target's");
    }
}

int32_t all_cores() {
    return cores::find("", "").n_cores;
}

llama_context_params context_params(const spec_engine & engine) {
    const spec_engine_params & p = engine.params;
    llama_context_params c = llama_context_default_params();
    c.n_batch = static_cast<uint32_t>(p.n_batch);
    c.n_ubatch = static_cast<uint32_t>(p.n_ubatch);
    c.n_seq_max = static_cast<uint32_t>(p.n_seq_max);
    c.n_threads = p.n_threads > 0 ? p.n_threads : all_cores();
    c.n_threads_batch = p.n_threads_batch > 0 ? p.n_threads_batch : c.n_threads;
    c.flash_attn_type =
        p.flash_attention ? LLAMA_FLASH_ATTN_TYPE_AUTO : LLAMA_FLASH_ATTN_TYPE_DISABLED;
    c.kv_unified = p.kv_unified;
    return c;
}

// The tokens that every sequence needs when its context is full, rounded up as llama.cpp does for
// separate caches.
int64_t wanted_cells(const spec_engine & engine) {
    const spec_engine_params & p = engine.params;
    const int32_t n_train = llama_model_n_ctx_train(engine.target_model->model.get());
    const int64_t n_seq = p.n_ctx_seq > 0 ? p.n_ctx_seq : n_train;
    return p.n_ctx > 0 ? p.n_ctx : n_seq * p.n_seq_max;
}

// Weights that are not as the file has them, on another device or repacked for wider kernels, are
// multiplied by kernels that have no reference beside them.
void check_plain_weights(const llama_model & model) {
    for (const auto & [name, tensor] : llama_internal_get_tensor_map(&model)) {
        if (tensor->buffer != nullptr && !ggml_backend_buffer_is_host(tensor->buffer)) {
            fail(SPEC_ERR_UNSUPPORTED, "exact needs weights as they are in the file; \"" + name +
                                           "\" lies in " +
                                           ggml_backend_buffer_name(tensor->buffer) +
                                           ": use a model in f16 or f32, without an accelerator");
        }
    }
}

// llama.cpp chooses kernels by the width of a batch: tinyBLAS from two rows on, tiled flash
// attention from 64 queries on, attention split over the cells for a single query. Each sums in an
// order of its own. The reference kernels sum a row alone, always in one order.
void make_exact(const spec_engine & engine, llama_context * context) {
    if (!engine.params.exact) {
        return;
    }
    check_plain_weights(context->get_model());
    ggml_backend_sched_t sched = context->get_sched();
    for (int i = 0; i < ggml_backend_sched_get_n_backends(sched); ++i) {
        ggml_backend_t backend = ggml_backend_sched_get_backend(sched, i);
        if (!ggml_backend_is_cpu(backend)) {
            fail(SPEC_ERR_UNSUPPORTED, std::string("exact holds on the CPU alone; this model also "
                                                   "computes on ") +
                                           ggml_backend_name(backend));
        }
        ggml_backend_cpu_set_use_ref(backend, true);
    }
}

void make_target(spec_engine & engine) {
    const spec_engine_params & p = engine.params;
    llama_context_params c = context_params(engine);
    const int64_t n = wanted_cells(engine);
    if (n > std::numeric_limits<int32_t>::max()) {
        fail(SPEC_ERR_INVALID_ARGUMENT, "n_ctx_seq * n_seq_max is " + std::to_string(n) +
                                            " cells, more than fit into 32 bits");
    }
    const int32_t n_draft = p.draft_type == SPEC_DRAFT_NONE ? 0 : p.n_draft_max;
    const int32_t n_rs_seq = p.n_rs_seq >= 0 ? p.n_rs_seq : std::min(n_draft, N_RS_SEQ_LIMIT);
    // llama.cpp cuts n_ubatch down to the context, and ends the process when a draft and what it
    // may have to take back do not fit.
    const int64_t n_least = 2 + std::max(n_draft, n_rs_seq);
    const int64_t n_cells = p.kv_unified ? n : n / p.n_seq_max;
    if (n_cells < n_least || (p.n_ctx_seq > 0 && p.n_ctx_seq < n_least)) {
        fail(SPEC_ERR_INVALID_ARGUMENT,
             "a sequence has room for " + std::to_string(n_cells) +
                 " tokens (n_ctx_seq, n_ctx); expected at least 2 + n_draft_max = " +
                 std::to_string(n_least));
    }
    c.n_ctx = static_cast<uint32_t>(n);
    c.n_rs_seq = static_cast<uint32_t>(n_rs_seq);
    c.n_outputs_max = static_cast<uint32_t>(p.n_seq_max * (1 + n_draft));
    last_llama_error.clear();
    engine.target.reset(llama_init_from_model(engine.target_model->model.get(), c));
    if (!engine.target) {
        fail(SPEC_ERR_OUT_OF_MEMORY, "the target's context cannot be made" + llama_reason());
    }
    make_exact(engine, engine.target.get());
}

void make_draft(spec_engine & engine, const spec_model * draft) {
    llama_context_params c = context_params(engine);
    c.n_ctx = llama_n_ctx(engine.target.get());
    c.n_rs_seq = 0;
    c.n_outputs_max = static_cast<uint32_t>(engine.params.n_seq_max);
    if (drafts_blocks(engine.params.draft_type)) {
        // Whatever K, a block is computed whole: in one physical batch for all sequences, since
        // llama.cpp ends the process when it is cut, and behind the last token of a full sequence.
        const uint32_t n_block = 1 + static_cast<uint32_t>(engine.params.n_draft_max);
        const uint32_t n_blocks = n_block * c.n_seq_max;
        constexpr uint32_t N_PAD = 256; // llama.cpp rounds the cells of a sequence up to this
        const uint32_t n_seq = llama_n_ctx_seq(engine.target.get()) + n_block;
        c.n_ctx =
            c.kv_unified ? c.n_ctx + n_blocks : (n_seq + N_PAD - 1) / N_PAD * N_PAD * c.n_seq_max;
        c.n_batch = std::max(c.n_batch, n_blocks);
        c.n_ubatch = std::max(c.n_ubatch, n_blocks);
        c.n_outputs_max = n_blocks;
    }
    c.ctx_other = engine.target.get();
    if (engine.params.draft_type == SPEC_DRAFT_MTP) {
        c.ctx_type = LLAMA_CONTEXT_TYPE_MTP;
    }
    llama_model * model = draft != nullptr ? draft->model.get() : engine.target_model->model.get();
    last_llama_error.clear();
    engine.draft.reset(llama_init_from_model(model, c));
    if (!engine.draft) {
        fail(SPEC_ERR_OUT_OF_MEMORY, "the draft's context cannot be made" + llama_reason());
    }
    make_exact(engine, engine.draft.get());
}

// Sliding windows.
//
// A windowed layer reads the last n_swa tokens only, and llama.cpp gives cells up that lie behind
// the window of the sequence's end: a snapshot leaves them out, and in a pool that sequences share
// the tokens of others take their place. A sequence that is cut to fewer tokens needs some of them
// again. So whatever cuts a cache asks `holds_window` first.

bool has_window(const llama_context * context) {
    return context->get_model().hparams.swa_type != LLAMA_SWA_TYPE_NONE;
}

// Tokens that the target's windowed layers look back; 0 where it has none.
int32_t window_of(const llama_context * context) {
    return has_window(context) ? static_cast<int32_t>(context->get_model().hparams.n_swa) : 0;
}

// Whether a sequence has all cells that its token at position n_past would read. It has those from
// the first one on, without a gap; so the one before the first must lie outside the window.
bool holds_window(const llama_context * context, int32_t seq_id, int32_t n_past) {
    if (window_of(context) == 0 || n_past == 0) {
        return true;
    }
    const llama_hparams & hparams = context->get_model().hparams;
    const llama_pos first = llama_memory_seq_pos_min(context->get_memory(), seq_id);
    return first == 0 || (first > 0 && llama_hparams::is_masked_swa(hparams.n_swa, hparams.swa_type,
                                                                    first - 1, n_past));
}

[[noreturn]] void no_window(int32_t n_past) {
    fail(SPEC_ERR_UNSUPPORTED,
         "the sequence cannot be cut to " + std::to_string(n_past) +
             " tokens: the model's sliding window needs cells that llama.cpp has given up since; "
             "end it and compute these tokens again");
}

void check_memory(llama_context * context, const char * which) {
    if (llama_get_memory(context) == nullptr) {
        fail(SPEC_ERR_UNSUPPORTED, std::string("the ") + which +
                                       " keeps no tokens in a cache: it is made for embeddings or "
                                       "the like, not to generate");
    }
}

rollback_kind probe_rollback(llama_context * context, const char * which) {
    check_memory(context, which);
    switch (common_context_can_seq_rm(
        context)) { // clears the context's memory: only here, before the first step
    case COMMON_CONTEXT_SEQ_RM_TYPE_PART:
        return rollback_kind::any;
    case COMMON_CONTEXT_SEQ_RM_TYPE_RS:
        return rollback_kind::bounded;
    case COMMON_CONTEXT_SEQ_RM_TYPE_FULL:
        return rollback_kind::none;
    default:
        fail(SPEC_ERR_UNSUPPORTED,
             std::string("the ") + which + " cannot take tokens back from its memory");
    }
}

void fill_spec_params(spec_engine & engine) {
    common_params_speculative & s = engine.spec_params;
    const spec_engine_params & p = engine.params;
    s.types = {to_common_type(p.draft_type)};
    s.draft.n_max = p.n_draft_max;
    s.draft.n_min = 0; // settle_draft drops short drafts, of all types alike
    s.draft.p_min = p.p_min;
    s.draft.probabilistic = p.probabilistic;
    s.draft.backend_sampling =
        false; // EAGLE-3 drafts wrongly with it when there are several sequences
    s.draft.ctx_tgt = engine.target.get();
    s.draft.ctx_dft = engine.draft.get();
    const uint16_t n_draft = static_cast<uint16_t>(p.n_draft_max);
    s.ngram_simple = {4, std::max<uint16_t>(n_draft, 8), 1}; // it drafts nothing shorter than 4
    s.ngram_map_k = {4, n_draft, 1};
    s.ngram_map_k4v = {4, n_draft, 1};
    s.ngram_mod.n_match = 16;
    s.ngram_mod.n_max = p.n_draft_max;
    s.ngram_mod.n_min = 1;
}

void make_drafter(spec_engine & engine, const spec_model * draft) {
    const int32_t type = engine.params.draft_type;
    fill_spec_params(engine);
    if (!needs_draft_context(type)) {
        return;
    }
    make_draft(engine, draft);
    if (probe_rollback(engine.draft.get(), "draft model") != rollback_kind::any) {
        fail(SPEC_ERR_UNSUPPORTED, "the draft model has recurrent layers; drafts need a model "
                                   "whose cache can be cut anywhere");
    }
    fill_spec_params(engine); // again, with the draft context
    engine.spec.reset(common_speculative_init(engine.spec_params,
                                              static_cast<uint32_t>(engine.params.n_seq_max)));
    if (!engine.spec) {
        fail(SPEC_ERR_UNSUPPORTED, "llama.cpp offers no drafter of this type");
    }
    const llama_cparams & flags = engine.target->get_cparams();
    engine.asked = {flags.embeddings_nextn, flags.embeddings_nextn_masked,
                    flags.embeddings_layer_inp};
}

void fill_limits(spec_engine & engine) {
    const spec_engine_params & p = engine.params;
    const llama_context * ctx = engine.target.get();
    spec_engine_limits & l = engine.limits;
    const int32_t n_train = llama_model_n_ctx_train(engine.target_model->model.get());
    l.draft_type = p.draft_type;
    l.n_ctx = static_cast<int32_t>(llama_n_ctx(ctx));
    l.n_ctx_seq = std::min(static_cast<int32_t>(llama_n_ctx_seq(ctx)),
                           p.n_ctx_seq > 0 ? p.n_ctx_seq : n_train);
    l.n_batch = static_cast<int32_t>(llama_n_batch(ctx));
    l.n_ubatch = static_cast<int32_t>(llama_n_ubatch(ctx));
    l.n_seq_max = p.n_seq_max;
    l.n_draft_max = p.draft_type == SPEC_DRAFT_NONE ? 0 : p.n_draft_max;
    if (engine.spec) {
        l.n_draft_max = std::min(l.n_draft_max, common_speculative_n_max(engine.spec.get()));
    }
    l.n_outputs_max = p.n_seq_max * (1 + l.n_draft_max);
    l.n_rs_seq = engine.target_rollback == rollback_kind::bounded
                     ? static_cast<int32_t>(llama_n_rs_seq(ctx))
                     : 0;
    l.n_vocab = engine.target_model->n_vocab();
    l.kv_unified = p.kv_unified;
    l.n_window = window_of(ctx);
    l.has_checkpoints = engine.target_rollback != rollback_kind::any && l.n_draft_max > l.n_rs_seq;
}

void fill_synth_probs(spec_engine & engine) {
    double before = 1.0;
    for (int32_t i = 0; i < engine.params.n_synth_rates; ++i) {
        const double rate = static_cast<double>(engine.params.synth_rates[i]);
        engine.synth_probs.push_back(before > 0.0 ? rate / before : 0.0);
        before = rate;
    }
    engine.params.synth_rates = nullptr; // the caller's
    if (!engine.synth_probs.empty()) {
        on_llama_log(GGML_LOG_LEVEL_WARN,
                     "BENCHMARK: drafts are accepted at random (synth_rates); what is generated is "
                     "not the model's output\n",
                     nullptr);
    }
}

// Gives both contexts threads that outlive a decode. Without a pool ggml makes one for every
// decode: with OpenMP that costs an allocation, without it the start and the end of every thread.
void attach_pool(spec_engine & engine) {
    llama_context * target = engine.target.get();
    const int32_t n = std::max(llama_n_threads(target), llama_n_threads_batch(target));
    ggml_threadpool_params params = ggml_threadpool_params_default(n);
    engine.pool.reset(ggml_threadpool_new(&params));
    if (!engine.pool) {
        throw std::bad_alloc();
    }
    llama_attach_threadpool(target, engine.pool.get(), nullptr);
    if (engine.draft) {
        llama_attach_threadpool(engine.draft.get(), engine.pool.get(), nullptr);
    }
}

spec_engine * make_engine(const spec_model & target, const spec_model * draft,
                          const spec_engine_params & params) {
    check_engine_params(params);
    if (target.vocab_only) {
        fail(SPEC_ERR_INVALID_ARGUMENT, "the target was loaded with vocab_only");
    }
    check_draft(target, draft, params);
    auto engine = std::make_unique<spec_engine>();
    engine->target_model = &target;
    engine->draft_model = draft;
    engine->params = params;
    make_target(*engine);
    engine->target_rollback = probe_rollback(engine->target.get(), "target");
    make_drafter(*engine, draft);
    fill_limits(*engine);
    fill_synth_probs(*engine);
    engine->batch = common_batch(engine->target.get());
    engine->sampling.init(llama_n_threads(engine->target.get()));
    engine->n_threads = llama_n_threads(engine->target.get());
    engine->n_threads_batch = llama_n_threads_batch(engine->target.get());
    attach_pool(*engine);
    engine->sequences.resize(static_cast<size_t>(params.n_seq_max));
    engine->has_drafted.resize(engine->sequences.size());
    return engine.release();
}

// Life of a sequence.

sequence & at(spec_engine & engine, int32_t seq_id) {
    if (seq_id < 0 || seq_id >= engine.limits.n_seq_max) {
        fail(SPEC_ERR_BAD_SEQ_ID, "seq_id is " + std::to_string(seq_id) + "; expected [0, " +
                                      std::to_string(engine.limits.n_seq_max) + ")");
    }
    return engine.sequences[static_cast<size_t>(seq_id)];
}

sequence & begun(spec_engine & engine, int32_t seq_id) {
    sequence & seq = at(engine, seq_id);
    if (!seq.is_begun) {
        fail(SPEC_ERR_SEQ_IDLE, "sequence " + std::to_string(seq_id) + " has not begun");
    }
    return seq;
}

void clear_memory(spec_engine & engine, int32_t seq_id) {
    llama_memory_seq_rm(engine.target_memory(), seq_id, -1, -1);
    if (engine.draft) {
        llama_memory_seq_rm(engine.draft_memory(), seq_id, -1, -1);
    }
}

// Between separate caches llama.cpp puts the copying of cells off, in both contexts, until each
// decodes next. Here it happens: before a decode, and before cells are read or written otherwise.
void flush_copies(spec_engine & engine) {
    if (!engine.has_copies_due) {
        return;
    }
    engine.has_copies_due = false;
    engine.target->memory_update(false);
    if (engine.draft) {
        engine.draft->memory_update(false);
    }
}

// Gives everything of a sequence back. Safe on an idle one.
void clear_sequence(spec_engine & engine, int32_t seq_id) {
    clear_memory(engine, seq_id);
    engine.sequences[static_cast<size_t>(seq_id)] = sequence{};
}

// A drafter that knows nothing of former sequences.
void begin_drafter(spec_engine & engine, sequence & seq, int32_t seq_id) {
    if (engine.is_ngram()) {
        common_params_speculative params = engine.spec_params;
        seq.ngram_events.clear();
        seq.has_drafter_begun = false;
        seq.ngram.reset(common_speculative_init(params, 1));
        if (!seq.ngram) {
            fail(SPEC_ERR_UNSUPPORTED, "llama.cpp offers no n-gram drafter of this type");
        }
    }
    if (engine.spec) {
        // An empty prompt makes the carried patch drop the hidden rows that the slot's former
        // sequence left behind.
        common_speculative_begin(engine.spec.get(), seq_id, {});
    }
}

// Whether tokens of this id wait, decoded by hand, for `process`.
bool is_unprocessed(const spec_engine & engine, int32_t seq_id) {
    if (!engine.spec || !engine.is_decoded || engine.is_processed) {
        return false;
    }
    const auto & tokens = engine.batch.tokens;
    return std::any_of(tokens.begin(), tokens.end(),
                       [&](const auto & token) { return token.seq_id == seq_id; });
}

void begin_sequence(spec_engine & engine, int32_t seq_id, std::unique_ptr<spec_sampler> sampler) {
    sequence & seq = at(engine, seq_id);
    if (seq.is_begun) {
        fail(SPEC_ERR_SEQ_BUSY, "sequence " + std::to_string(seq_id) + " has begun already");
    }
    if (is_unprocessed(engine, seq_id)) {
        fail(SPEC_ERR_BAD_PLAN, "sequence " + std::to_string(seq_id) +
                                    ": a batch with tokens of its former sequence has not been "
                                    "processed");
    }
    if (sampler->n_vocab != engine.limits.n_vocab) {
        fail(SPEC_ERR_INVALID_ARGUMENT, "the sampler was made for a model with another vocabulary");
    }
    clear_sequence(engine, seq_id);
    begin_drafter(engine, seq, seq_id);
    if (!engine.synth_probs.empty()) {
        seq.synth_rng.seed(engine.n_synth_begun++);
    }
    seq.sampler = std::move(sampler);
    seq.is_begun = true;
}

// Validation of a plan.

[[noreturn]] void bad_plan(int32_t seq_id, const std::string & text) {
    fail(SPEC_ERR_BAD_PLAN, "sequence " + std::to_string(seq_id) + ": " + text);
}

// A generating sequence computes its last emitted token; a resumed one all that it had before, in
// pieces, of which the one with the last emitted token is an output.
void check_known(const sequence & seq, const spec_plan_entry & e, const int32_t * tokens) {
    const int32_t n_after = e.n_past + e.n_tokens;
    for (int32_t i = 0; i < e.n_tokens && e.n_past + i < static_cast<int32_t>(seq.known.size());
         ++i) {
        if (tokens[i] != seq.known[static_cast<size_t>(e.n_past + i)]) {
            bad_plan(e.seq_id, "a resumed sequence must be given the tokens that it had");
        }
    }
    if (!seq.has_emitted) {
        if (e.n_draft > 0) {
            bad_plan(e.seq_id, "n_draft needs a sequence that has emitted a token");
        }
        return;
    }
    const bool is_last = n_after == seq.n_known();
    if (n_after > seq.n_known() || (is_last && tokens[e.n_tokens - 1] != seq.id_last) ||
        e.is_output != (is_last ? 1 : 0)) {
        bad_plan(e.seq_id, "a generating sequence must be given its last emitted token alone, with "
                           "is_output, or what a resumed one lacks up to that token");
    }
    if (e.n_draft > 0 && (!is_last || e.n_tokens != 1)) {
        bad_plan(e.seq_id, "n_draft needs the last emitted token alone");
    }
}

void check_entry(const spec_engine & engine, const sequence & seq, const spec_plan_entry & e,
                 const spec_plan & plan) {
    if (e.n_past != seq.n_past()) {
        bad_plan(e.seq_id, "n_past is " + std::to_string(e.n_past) + ", but its cache holds " +
                               std::to_string(seq.n_past()) + " tokens");
    }
    if (e.n_tokens < 1 || e.token_offset < 0 || e.token_offset > plan.n_tokens - e.n_tokens) {
        bad_plan(e.seq_id, "its tokens lie outside the plan's tokens, or there are none");
    }
    if (e.is_output != 0 && e.is_output != 1) {
        bad_plan(e.seq_id, "is_output is neither 0 nor 1");
    }
    if (e.n_draft < 0 || e.n_draft > engine.limits.n_draft_max) {
        bad_plan(e.seq_id, "n_draft is " + std::to_string(e.n_draft) + "; expected [0, " +
                               std::to_string(engine.limits.n_draft_max) + "]");
    }
    if (int64_t{e.n_past} + e.n_tokens + e.n_draft > engine.limits.n_ctx_seq) {
        bad_plan(e.seq_id,
                 "it would hold " + std::to_string(int64_t{e.n_past} + e.n_tokens + e.n_draft) +
                     " tokens; a sequence has room for " + std::to_string(engine.limits.n_ctx_seq));
    }
    const int32_t * tokens = plan.tokens + e.token_offset;
    for (int32_t i = 0; i < e.n_tokens; ++i) {
        check_token(tokens[i], engine.limits.n_vocab, "plan");
    }
    check_known(seq, e, tokens);
    if (seq.is_proposed) {
        bad_plan(e.seq_id, "a proposal is pending; accept it first");
    }
}

void check_capacity(spec_engine & engine, const spec_plan & plan) {
    int64_t n_batch = 0;
    int64_t n_outputs = 0;
    for (int32_t i = 0; i < plan.n_entries; ++i) {
        n_batch += plan.entries[i].n_tokens + plan.entries[i].n_draft;
        n_outputs += plan.entries[i].is_output != 0 ? 1 + plan.entries[i].n_draft : 0;
    }
    if (n_batch > engine.limits.n_batch) {
        fail(SPEC_ERR_BAD_PLAN, "the plan has " + std::to_string(n_batch) +
                                    " tokens; a step takes " +
                                    std::to_string(engine.limits.n_batch));
    }
    if (n_outputs > engine.limits.n_outputs_max) {
        fail(SPEC_ERR_BAD_PLAN, "the plan samples at " + std::to_string(n_outputs) +
                                    " positions; a step takes " +
                                    std::to_string(engine.limits.n_outputs_max));
    }
    if (!engine.limits.kv_unified) {
        return; // each sequence has cells of its own: n_ctx_seq bounds them
    }
    int64_t n_cells = n_batch;
    for (const sequence & seq : engine.sequences) {
        n_cells += seq.n_past();
    }
    if (n_cells > engine.limits.n_ctx) {
        fail(SPEC_ERR_BAD_PLAN, "the plan needs " + std::to_string(n_cells) +
                                    " KV cells; there are " + std::to_string(engine.limits.n_ctx));
    }
}

// Given drafts are the caller's to choose, but not their place.
void check_given(const spec_engine & engine, const spec_plan & plan) {
    if (plan.n_drafts < 0 || plan.n_drafts > plan.n_entries) {
        fail(SPEC_ERR_BAD_PLAN, "the plan has " + std::to_string(plan.n_drafts) + " drafts and " +
                                    std::to_string(plan.n_entries) + " entries");
    }
    if (plan.n_drafts > 0) {
        deref(plan.drafts, "plan.drafts");
    }
    std::vector<int32_t> n_drafts(engine.sequences.size(), 0);
    for (int32_t i = 0; i < plan.n_entries; ++i) {
        n_drafts[static_cast<size_t>(plan.entries[i].seq_id)] = plan.entries[i].n_draft;
    }
    for (int32_t i = 0; i < plan.n_drafts; ++i) {
        const spec_given_draft & d = plan.drafts[i];
        if (d.seq_id < 0 || d.seq_id >= engine.limits.n_seq_max) {
            bad_plan(d.seq_id, "a draft for a sequence that does not exist");
        }
        int32_t & n_draft = n_drafts[static_cast<size_t>(d.seq_id)];
        if (d.n_tokens < 1 || d.n_tokens > n_draft) {
            bad_plan(d.seq_id, "a draft of " + std::to_string(d.n_tokens) +
                                   " tokens is given; expected one, of [1, n_draft] tokens");
        }
        n_draft = 0; // each once
        if (d.token_offset < 0 || d.token_offset > plan.n_tokens - d.n_tokens) {
            bad_plan(d.seq_id, "its draft lies outside the plan's tokens");
        }
        for (int32_t k = 0; k < d.n_tokens; ++k) {
            check_token(plan.tokens[d.token_offset + k], engine.limits.n_vocab, "draft");
        }
    }
}

void check_run(const spec_plan & plan) {
    if (plan.n_steps < 0 || plan.n_steps > SPEC_RUN_MAX) {
        fail(SPEC_ERR_BAD_PLAN, "n_steps is " + std::to_string(plan.n_steps) + "; expected [0, " +
                                    std::to_string(SPEC_RUN_MAX) + "]");
    }
    for (int32_t i = 0; plan.n_steps > 1 && i < plan.n_entries; ++i) {
        if (plan.entries[i].is_output == 0 || plan.entries[i].n_draft != 0) {
            bad_plan(plan.entries[i].seq_id, "in a run every entry is an output without a draft");
        }
    }
}

void check_plan(spec_engine & engine, const spec_plan & plan) {
    if (plan.n_entries < 0 || plan.n_entries > engine.limits.n_seq_max || plan.n_tokens < 0) {
        fail(SPEC_ERR_BAD_PLAN, "the plan has " + std::to_string(plan.n_entries) + " entries and " +
                                    std::to_string(plan.n_tokens) + " tokens; expected at most " +
                                    std::to_string(engine.limits.n_seq_max) + " entries");
    }
    if (engine.is_decoded && !engine.is_processed && engine.spec) {
        fail(SPEC_ERR_BAD_PLAN, "the last batch decoded by hand has not been processed");
    }
    if (plan.n_entries > 0) {
        deref(plan.entries, "plan.entries");
        deref(plan.tokens, "plan.tokens");
    }
    std::vector<bool> is_seen(engine.sequences.size());
    for (int32_t i = 0; i < plan.n_entries; ++i) {
        const spec_plan_entry & e = plan.entries[i];
        const sequence & seq = begun(engine, e.seq_id);
        const auto id = static_cast<size_t>(e.seq_id);
        if (is_seen[id]) {
            bad_plan(e.seq_id, "it stands in the plan twice");
        }
        is_seen[id] = true;
        check_entry(engine, seq, e, plan);
    }
    check_given(engine, plan);
    check_capacity(engine, plan);
    check_run(plan);
}

// The parts of a step.

common_speculative * drafter_of(spec_engine & engine, sequence & seq) {
    return seq.ngram ? seq.ngram.get() : engine.spec.get();
}

llama_seq_id drafter_id(const sequence & seq, int32_t seq_id) {
    return seq.ngram ? 0 : seq_id;
}

// llama.cpp's n-gram cache reads before the start of a history that is shorter than its n-grams.
bool can_draft(const spec_engine & engine, const sequence & seq) {
    constexpr int32_t N_NGRAM_CACHE = 4;
    const bool is_short = seq.n_past() + 1 < N_NGRAM_CACHE;
    return !seq.is_cold && !(engine.limits.draft_type == SPEC_DRAFT_NGRAM_CACHE && is_short);
}

void arm(spec_engine & engine, sequence & seq, int32_t seq_id, int32_t n_draft,
         llama_token id_last) {
    common_speculative * drafter = drafter_of(engine, seq);
    const llama_seq_id id = drafter_id(seq, seq_id);
    if (!seq.has_drafter_begun) {
        common_speculative_begin(drafter, id, seq.tokens);
        seq.has_drafter_begun = true;
    }
    seq.draft = {};
    if (seq.ngram) {
        seq.ngram_events.push_back({seq.n_past(), id_last, n_draft, -1});
    }
    const bool is_sampled = engine.params.probabilistic && seq.sampler->temperature > 0.0f &&
                            !seq.sampler->is_match_only;
    auto & dp = common_speculative_get_draft_params(drafter, id);
    dp.drafting = true;
    dp.n_max = n_draft;
    dp.pos0 = seq.n_past();
    dp.id_last = id_last;
    dp.prompt = &seq.tokens;
    dp.result = &seq.draft.tokens;
    dp.result_q = is_sampled ? &seq.draft.q : nullptr;
    dp.temp = seq.sampler->temperature;
    dp.seed = seq.sampler->seed;
}

// Whether the drafter, if there is one to follow the sequence, can be told what became of a draft
// that is not its own. MTP and EAGLE-3 must be: they go on from the hidden row of the last accepted
// token. llama.cpp lets them only for an id that they have drafted for before, be it for another
// sequence (`impl_last` of common_speculative is set by a draft, and never reset); before that it
// would end the process. A cold sequence that is awaited has its drafter follow from this very step
// on.
bool can_verify_given(const spec_engine & engine, const sequence & seq, int32_t seq_id) {
    const bool is_followed = engine.spec && (!seq.is_cold || seq.is_awaited);
    return !is_followed || engine.has_drafted[static_cast<size_t>(seq_id)];
}

// Takes a given draft, up to its first end token: nothing follows that. The target's own draws
// verify it, so any cut is exact.
void take_given(const spec_engine & engine, sequence & seq, const int32_t * tokens, int32_t n) {
    const int32_t * end = std::find_if(tokens, tokens + n, [&](llama_token token) {
        return llama_vocab_is_eog(engine.target_model->vocab, token);
    });
    seq.draft.tokens.assign(tokens, end);
    seq.draft.is_given = !seq.draft.tokens.empty();
}

// Tells the drafter how much of the draft was accepted.
void accept_draft(spec_engine & engine, sequence & seq, int32_t seq_id, int32_t n_accepted) {
    if (seq.draft.is_given && (seq.ngram || !engine.spec || seq.is_cold)) {
        return; // drafters that follow the tokens alone need not know
    }
    common_speculative_accept(drafter_of(engine, seq), drafter_id(seq, seq_id),
                              static_cast<uint16_t>(n_accepted));
    if (!seq.ngram_events.empty()) {
        seq.ngram_events.back().n_accepted = n_accepted;
    }
}

// After the drafter ran: what it wrote is made fit for verification, and its KV is undone.
void settle_draft(spec_engine & engine, sequence & seq, int32_t seq_id, int32_t n_draft) {
    llama_tokens & tokens = seq.draft.tokens;
    if (static_cast<int32_t>(tokens.size()) > n_draft) {
        tokens.resize(static_cast<size_t>(n_draft));
    }
    const bool has_q = !tokens.empty() && seq.draft.q.size() >= tokens.size();
    seq.draft.q.resize(has_q ? tokens.size() : 0);
    for (size_t i = 0; i < tokens.size(); ++i) {
        const bool is_valid = tokens[i] >= 0 && tokens[i] < engine.limits.n_vocab;
        if (is_valid && !llama_vocab_is_eog(engine.target_model->vocab, tokens[i])) {
            continue;
        }
        // Nothing follows an end token. Cutting it as well is exact for argmax drafts only: a
        // sampled draft must not be cut by its own value, so there the end token stays and what
        // follows it goes.
        const size_t n_keep = is_valid && has_q ? i + 1 : i;
        tokens.resize(n_keep);
        seq.draft.q.resize(has_q ? n_keep : 0);
        break;
    }
    if (static_cast<int32_t>(tokens.size()) < engine.params.n_min) {
        seq.draft = {};
    }
    if (engine.draft) {
        llama_memory_seq_rm(engine.draft_memory(), seq_id, seq.n_past(), -1);
    }
}

// Counts what the drafts have left in the draft's cache, before it is undone. A pass computes one
// token of each sequence that still drafts, or all their blocks.
void count_work(spec_engine & engine, const std::vector<int32_t> & armed) {
    if (!engine.draft || armed.empty()) {
        return;
    }
    // An EAGLE-3 row pairs a position with the token after it, and so lies one place further ahead.
    const int32_t n_ahead = engine.limits.draft_type == SPEC_DRAFT_EAGLE3 ? 1 : 0;
    int64_t n_most = 0;
    for (const int32_t seq_id : armed) {
        const llama_pos last = llama_memory_seq_pos_max(engine.draft_memory(), seq_id);
        const int32_t n_past = engine.sequences[static_cast<size_t>(seq_id)].n_past() - n_ahead;
        const int64_t n = std::max(last + 1 - n_past, 0);
        engine.draft_work.n_positions += n;
        n_most = std::max(n_most, n);
    }
    engine.draft_work.n_drafts += static_cast<int64_t>(armed.size());
    const bool is_block = drafts_blocks(engine.limits.draft_type);
    engine.draft_work.n_passes += is_block ? std::min<int64_t>(n_most, 1) : n_most;
}

// Orders to draft. They are withdrawn when the drafters have run, or when something fails before:
// one that is left would draft for a sequence that is gone, or end the process beside a given
// draft.
struct draft_orders {
    spec_engine & engine;
    std::vector<int32_t> armed;

    void give(sequence & seq, int32_t seq_id, int32_t n_draft, llama_token id_last) {
        armed.push_back(seq_id); // first: nothing is armed that is not withdrawn
        arm(engine, seq, seq_id, n_draft, id_last);
        if (engine.take_fault(SPEC_FAULT_DRAFT)) {
            throw std::runtime_error("injected fault of a draft");
        }
    }

    ~draft_orders() {
        for (const int32_t seq_id : armed) {
            sequence & seq = engine.sequences[static_cast<size_t>(seq_id)];
            common_speculative_get_draft_params(drafter_of(engine, seq), drafter_id(seq, seq_id))
                .drafting = false;
        }
    }
};

// Drafts for all armed sequences: one batched call, or one call per sequence for the n-gram kinds.
void run_drafters(spec_engine & engine, const std::vector<int32_t> & armed) {
    if (!engine.is_ngram()) {
        if (!armed.empty()) {
            common_speculative_draft(engine.spec.get());
            count_work(engine, armed);
        }
        for (const int32_t seq_id : armed) {
            const auto id = static_cast<size_t>(seq_id);
            engine.has_drafted[id] =
                engine.has_drafted[id] || !engine.sequences[id].draft.tokens.empty();
        }
        return;
    }
    for (const int32_t seq_id : armed) {
        common_speculative_draft(engine.sequences[static_cast<size_t>(seq_id)].ngram.get());
    }
}

void draft_plan(spec_engine & engine, const spec_plan & plan) {
    draft_orders orders{engine, {}};
    for (int32_t i = 0; i < plan.n_entries; ++i) {
        engine.sequences[static_cast<size_t>(plan.entries[i].seq_id)].draft = {};
    }
    for (int32_t i = 0; i < plan.n_drafts; ++i) {
        const spec_given_draft & d = plan.drafts[i];
        sequence & seq = engine.sequences[static_cast<size_t>(d.seq_id)];
        if (can_verify_given(engine, seq, d.seq_id)) {
            take_given(engine, seq, plan.tokens + d.token_offset, d.n_tokens);
        }
    }
    for (int32_t i = 0; i < plan.n_entries; ++i) {
        const spec_plan_entry & e = plan.entries[i];
        sequence & seq = engine.sequences[static_cast<size_t>(e.seq_id)];
        if (e.n_draft > 0 && !seq.draft.is_given && can_draft(engine, seq)) {
            orders.give(seq, e.seq_id, e.n_draft, seq.id_last);
        }
    }
    const std::vector<int32_t> & armed = orders.armed;
    run_drafters(engine, armed);
    for (int32_t i = 0; i < plan.n_entries; ++i) {
        const spec_plan_entry & e = plan.entries[i];
        if (std::find(armed.begin(), armed.end(), e.seq_id) != armed.end()) {
            settle_draft(engine, engine.sequences[static_cast<size_t>(e.seq_id)], e.seq_id,
                         e.n_draft);
        }
    }
}

// The recurrent part of a sequence's state, where the coming draft may have to be taken back
// further than the context can.
void save_checkpoint(spec_engine & engine, sequence & seq, int32_t seq_id) {
    seq.checkpoint.clear();
    if (engine.target_rollback == rollback_kind::any ||
        static_cast<int32_t>(seq.draft.tokens.size()) <= engine.limits.n_rs_seq) {
        return;
    }
    llama_context * ctx = engine.target.get();
    const size_t n = llama_state_seq_get_size_ext(ctx, seq_id, LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY);
    seq.checkpoint.resize(n);
    if (llama_state_seq_get_data_ext(ctx, seq.checkpoint.data(), n, seq_id,
                                     LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY) != n) {
        seq.checkpoint.clear();
        seq.draft = {}; // without a checkpoint nothing can be taken back: decode without the draft
    }
}

// Entries of a plan, by index, that one decode of the target carries.
using group = std::vector<size_t>;

void build_batch(spec_engine & engine, const spec_plan & plan, const group & entries) {
    engine.batch.clear();
    engine.rows.resize(static_cast<size_t>(plan.n_entries));
    for (const size_t i : entries) {
        const spec_plan_entry & e = plan.entries[i];
        const sequence & seq = engine.sequences[static_cast<size_t>(e.seq_id)];
        engine.rows[i] = engine.batch.size();
        int32_t pos = e.n_past;
        for (int32_t k = 0; k < e.n_tokens; ++k) {
            const bool is_output = e.is_output != 0 && k == e.n_tokens - 1;
            engine.batch.add(plan.tokens[e.token_offset + k], pos++, e.seq_id, is_output);
        }
        for (const llama_token token : seq.draft.tokens) {
            engine.batch.add(token, pos++, e.seq_id, true);
        }
    }
}

// The plan's entries by sequence. llama.cpp puts sequences into one ubatch only while their ids
// follow one another, so the order decides how many graphs a decode computes.
group sorted_entries(const spec_plan & plan) {
    group entries(static_cast<size_t>(plan.n_entries));
    std::iota(entries.begin(), entries.end(), size_t{0});
    std::sort(entries.begin(), entries.end(),
              [&](size_t a, size_t b) { return plan.entries[a].seq_id < plan.entries[b].seq_id; });
    return entries;
}

// Tokens that an entry with a draft brings.
size_t n_verified(const spec_engine & engine, const spec_plan & plan, size_t i) {
    const auto id = static_cast<size_t>(plan.entries[i].seq_id);
    return 1 + engine.sequences[id].draft.tokens.size();
}

// Whether an entry fits into the ubatch of a group.
bool joins(const spec_engine & engine, const spec_plan & plan, const group & entries, size_t i) {
    size_t n_tokens = n_verified(engine, plan, i);
    for (const size_t other : entries) {
        n_tokens += n_verified(engine, plan, other);
    }
    if (n_tokens > static_cast<size_t>(engine.limits.n_ubatch)) {
        return false;
    }
    return engine.limits.kv_unified ||
           plan.entries[entries.back()].seq_id + 1 == plan.entries[i].seq_id;
}

// Whether a draft can be taken back only if the decode that verified it was one ubatch. With
// recurrent layers llama.cpp moves the state of a sequence, but not the snapshots that its rollback
// needs, when a later ubatch of the same decode gathers other sequences. In a shared pool a later
// ubatch takes the cells that lie behind the window of the draft's end.
bool needs_one_ubatch(const spec_engine & engine) {
    return engine.target_rollback != rollback_kind::any ||
           (engine.limits.kv_unified && engine.limits.n_window > 0);
}

// Which entries are decoded together. All of them, except where a decode with drafts must be one
// ubatch: then as many as fit; on a target with recurrent layers neighbours with drafts of one
// length. What has no draft is never taken back and goes first.
std::vector<group> make_groups(const spec_engine & engine, const spec_plan & plan) {
    std::vector<group> groups(1);
    std::map<size_t, group> open; // by length of the draft, where that matters
    const bool is_recurrent = engine.target_rollback != rollback_kind::any;
    for (const size_t i : sorted_entries(plan)) {
        const size_t n = n_verified(engine, plan, i);
        if (n == 1 || !needs_one_ubatch(engine)) {
            groups.front().push_back(i);
            continue;
        }
        group & neighbours = open[is_recurrent ? n : 0];
        if (!neighbours.empty() && !joins(engine, plan, neighbours, i)) {
            groups.push_back(std::move(neighbours));
            neighbours.clear();
        }
        neighbours.push_back(i);
    }
    for (auto & [n, entries] : open) {
        groups.push_back(std::move(entries));
    }
    if (groups.front().empty()) {
        groups.erase(groups.begin());
    }
    return groups;
}

// Notes how far the sequences of a batch can go back from here. A recurrent target has the states
// of the tokens of one ubatch, and the tail of a lone sequence always is one; of sequences of
// unlike lengths, or without neighbouring ids in caches of their own, one ubatch may follow
// another, and then the states of the first lie elsewhere.
void note_states(spec_engine & engine) {
    const auto & tokens = engine.batch.tokens;
    const auto n_all = static_cast<int32_t>(tokens.size());
    std::vector<int32_t> counts(engine.sequences.size(), 0);
    int32_t n_seqs = 0;
    for (const auto & token : tokens) {
        int32_t & count = counts[static_cast<size_t>(token.seq_id)];
        n_seqs += count == 0 ? 1 : 0;
        ++count;
    }
    const int32_t n = counts[static_cast<size_t>(tokens.front().seq_id)];
    const int32_t n_ids = tokens.back().seq_id - tokens.front().seq_id + 1;
    bool is_whole = n_seqs == 1 || (n_all <= engine.limits.n_ubatch &&
                                    (engine.limits.kv_unified || n_ids == n_seqs));
    for (const auto & token : tokens) {
        is_whole = is_whole && counts[static_cast<size_t>(token.seq_id)] == n;
    }
    for (const auto & token : tokens) {
        sequence & seq = engine.sequences[static_cast<size_t>(token.seq_id)];
        seq.i_decode = engine.n_decodes;
        seq.n_back_max = is_whole ? std::min(n - 1, engine.limits.n_rs_seq) : 0;
    }
}

// Has the target give the drafter's rows or not. Not by llama.cpp's setters: after these the next
// decode reserves its graphs anew, which takes twice as long as the decode of a small model, and a
// graph without rows fits where one with them does. A graph is used again only while `masked`
// stays as it was, so another is built; without rows it has no other meaning.
void give_rows(spec_engine & engine, bool is_on) {
    auto & flags = const_cast<llama_cparams &>(engine.target->get_cparams());
    const row_flags & asked = engine.asked;
    flags.embeddings_nextn = is_on && asked.has_last;
    flags.embeddings_nextn_masked = is_on ? asked.is_masked : !asked.is_masked;
    for (size_t i = 0; i < asked.layers.size(); ++i) {
        flags.embeddings_layer_inp[i] = is_on && asked.layers[i];
    }
    engine.has_rows = is_on;
}

// Decodes in a row that feed nobody before the target gives no rows. A change costs one more graph.
constexpr int32_t N_UNFED = 8;

// Chooses whether the coming decode gives rows. They cost little where every token is an output; of
// a prompt they make the last layer compute all tokens, not the last one alone.
void choose_rows(spec_engine & engine) {
    if (!engine.spec || !engine.asked.is_any()) {
        return;
    }
    const auto & tokens = engine.batch.tokens;
    const bool is_wanted = std::any_of(tokens.begin(), tokens.end(), [&](const auto & token) {
        return engine.sequences[static_cast<size_t>(token.seq_id)].is_fed();
    });
    engine.n_unfed = is_wanted ? 0 : std::min(engine.n_unfed + 1, N_UNFED);
    const bool is_on = engine.n_unfed < N_UNFED;
    if (is_on != engine.has_rows) {
        give_rows(engine, is_on);
    }
}

// Gives a context the threads that a batch of this width gets.
void set_threads(const spec_engine & engine, llama_context * context) {
    const size_t n_wide = static_cast<size_t>(std::max(2, engine.params.n_wide));
    const bool is_wide = engine.batch.tokens.size() >= n_wide;
    const int32_t n = is_wide ? engine.n_threads_batch : engine.n_threads;
    llama_set_n_threads(context, n, n);
}

int32_t decode_batch(spec_engine & engine) {
    set_threads(engine, engine.target.get());
    choose_rows(engine);
    ++engine.n_decodes;
    if (engine.take_fault(SPEC_FAULT_DECODE_NO_ROOM)) {
        return 1;
    }
    flush_copies(engine);
    const int32_t rc =
        llama_process(engine.target.get(), LLAMA_PROCESS_TYPE_DECODE, engine.batch.get());
    if (rc == 0) {
        llama_synchronize(engine.target.get());
        note_states(engine);
    }
    if (engine.take_fault(SPEC_FAULT_DECODE_THROW)) {
        throw std::runtime_error("injected fault of a decode");
    }
    return engine.take_fault(SPEC_FAULT_DECODE_FATAL) ? -3 : rc;
}

// Takes the drafts of a decode back and builds its batch again without them. False when there were
// none.
bool drop_drafts(spec_engine & engine, const spec_plan & plan, const group & entries) {
    bool has_dropped = false;
    for (const size_t i : entries) {
        sequence & seq = engine.sequences[static_cast<size_t>(plan.entries[i].seq_id)];
        has_dropped = has_dropped || !seq.draft.tokens.empty();
        seq.draft = {};
    }
    if (has_dropped) {
        build_batch(engine, plan, entries);
    }
    return has_dropped;
}

// Whether the draft's cells are in a context of its own: some MTP heads draft inside the target's
// cache. (An EAGLE-3 context names the target too, for its token embeddings only.)
bool has_draft_cells(const spec_engine & engine) {
    return engine.draft && (engine.limits.draft_type != SPEC_DRAFT_MTP ||
                            llama_get_ctx_other(engine.draft.get()) != engine.target.get());
}

// From here on the sequence generates without drafts: its draft state no longer follows the target.
void make_cold(spec_engine & engine, int32_t seq_id) {
    engine.sequences[static_cast<size_t>(seq_id)].is_cold = true;
    engine.sequences[static_cast<size_t>(seq_id)].is_awaited = false;
    if (has_draft_cells(engine)) {
        llama_memory_seq_rm(engine.draft_memory(), seq_id, -1, -1);
    }
}

// Where the drafter's own layers lack the window before n_past, it starts from nothing, as one that
// is taken up. (In a shared pool drafts lose cells at the far end of their window to one another,
// at most a draft's length of them. That costs a little acceptance, and is let be.)
void restart_unless_held(spec_engine & engine, int32_t seq_id, int32_t n_past) {
    sequence & seq = engine.sequences[static_cast<size_t>(seq_id)];
    if (!seq.is_cold && has_draft_cells(engine) &&
        !holds_window(engine.draft.get(), seq_id, n_past)) {
        make_cold(engine, seq_id);
        seq.is_awaited = true;
    }
}

// Tokens that a draft model reads again when it is taken up. The other drafters read the target's
// hidden rows, which are gone: they start from nothing, and are as good as before some tokens
// later.
constexpr int32_t N_CATCH_UP = 256;

// Has the draft model read the end of what comes before a position.
void catch_up(spec_engine & engine, int32_t seq_id, int32_t n_past) {
    const sequence & seq = engine.sequences[static_cast<size_t>(seq_id)];
    llama_context * ctx = engine.draft.get();
    common_batch batch(ctx);
    const int32_t n_most = std::min(N_CATCH_UP, static_cast<int32_t>(llama_n_batch(ctx)));
    for (int32_t pos = std::max(0, n_past - n_most); pos < n_past; ++pos) {
        batch.add(seq.tokens[static_cast<size_t>(pos)], pos, seq_id, false);
    }
    if (batch.size() > 0 && llama_process(ctx, LLAMA_PROCESS_TYPE_DECODE, batch.get()) != 0) {
        llama_memory_seq_rm(engine.draft_memory(), seq_id, -1, -1);
    }
}

// Tells the drafter whom it is fed for, and prepares those that it is fed for again. False when
// there is nobody. Who was taken up, by hand, after a decode without rows waits for the next one.
bool choose_fed(spec_engine & engine) {
    if (!engine.has_rows) {
        return false;
    }
    bool is_wanted = false;
    int32_t before = -1;
    for (const auto & token : engine.batch.tokens) {
        if (token.seq_id == before) {
            continue;
        }
        before = token.seq_id;
        const sequence & seq = engine.sequences[static_cast<size_t>(token.seq_id)];
        common_speculative_set_fed(engine.spec.get(), token.seq_id, seq.is_fed());
        is_wanted = is_wanted || seq.is_fed();
        if (seq.is_awaited) {
            common_speculative_begin(engine.spec.get(), token.seq_id, {});
            if (engine.limits.draft_type == SPEC_DRAFT_SIMPLE) {
                catch_up(engine, token.seq_id, token.pos[0]);
            }
        }
    }
    return is_wanted;
}

// Feeds a cold sequence's drafter again, from its next tokens on; those of a batch that waits for
// `process` are none of them, and may have been taken back. An n-gram drafter reads the sequence's
// tokens: it has missed nothing.
void take_up(spec_engine & engine, int32_t seq_id) {
    sequence & seq = begun(engine, seq_id);
    if (is_unprocessed(engine, seq_id)) {
        bad_plan(seq_id, "its last batch has not been processed");
    }
    if (seq.ngram) {
        seq.is_cold = false;
    }
    seq.is_awaited = seq.is_cold && engine.spec;
}

// Keeps the hidden rows of the last two tokens of each prompt in the batch, while the target still
// holds them: a fork goes on from one of them.
void keep_hidden_rows(spec_engine & engine) {
    if (engine.limits.draft_type != SPEC_DRAFT_MTP ||
        engine.target_rollback != rollback_kind::any) {
        return;
    }
    const auto n_embd =
        static_cast<size_t>(llama_model_n_embd_out(llama_get_model(engine.target.get())));
    const auto & tokens = engine.batch.tokens;
    for (size_t i = 0; i < tokens.size(); ++i) {
        const bool is_end = i + 1 == tokens.size() || tokens[i + 1].seq_id != tokens[i].seq_id;
        const bool is_next_end =
            !is_end && (i + 2 == tokens.size() || tokens[i + 2].seq_id != tokens[i].seq_id);
        sequence & seq = engine.sequences[static_cast<size_t>(tokens[i].seq_id)];
        const bool is_first = i == 0 || tokens[i - 1].seq_id != tokens[i].seq_id;
        if (seq.has_emitted || seq.is_proposed || !(is_end || is_next_end)) {
            continue;
        }
        hidden_rows & rows = seq.hidden;
        if (is_end && is_first) { // the only token of this batch
            rows.before =
                rows.n_past == tokens[i].pos[0] ? std::move(rows.last) : std::vector<float>{};
        }
        const float * row =
            llama_get_embeddings_nextn_ith(engine.target.get(), static_cast<int32_t>(i));
        std::vector<float> & kept = is_end ? rows.last : rows.before;
        kept.clear();
        if (row != nullptr) {
            kept.assign(row, row + n_embd);
        }
        rows.n_past = tokens[i].pos[0] + 1;
    }
}

void process_batch(spec_engine & engine) {
    if (!engine.spec || !choose_fed(engine)) {
        return;
    }
    if (engine.draft) {
        set_threads(engine, engine.draft.get());
    }
    const bool is_failed = engine.take_fault(SPEC_FAULT_PROCESS);
    if (!is_failed && common_speculative_process(engine.spec.get(), engine.batch)) {
        keep_hidden_rows(engine);
        for (const auto & token : engine.batch.tokens) {
            sequence & seq = engine.sequences[static_cast<size_t>(token.seq_id)];
            seq.is_cold = seq.is_cold && !seq.is_awaited;
            seq.is_awaited = false;
        }
        return;
    }
    for (const auto & token : engine.batch.tokens) {
        make_cold(engine, token.seq_id);
    }
}

// Natural log of the sum of exp(logits), less the greatest logit.
double log_sum(const float * logits, int32_t n_vocab, float max_logit) {
    double sum = 0.0;
    for (int32_t i = 0; i < n_vocab; ++i) {
        sum += std::exp(static_cast<double>(logits[i]) - static_cast<double>(max_logit));
    }
    return std::log(sum);
}

// The likeliest tokens of a row; the lower id first where they tie.
void score_top(outcome & out, const float * logits, int32_t n_vocab, int32_t n, int32_t n_columns,
               double log_total) {
    const int32_t n_best = std::min(n, n_vocab);
    std::vector<int32_t> ids(n_best > 0 ? static_cast<size_t>(n_vocab) : 0);
    std::iota(ids.begin(), ids.end(), 0);
    const auto rank = [&](int32_t id) { return std::isnan(logits[id]) ? -INFINITY : logits[id]; };
    std::partial_sort(ids.begin(), ids.begin() + n_best, ids.end(), [&](int32_t a, int32_t b) {
        return rank(a) != rank(b) ? rank(a) > rank(b) : a < b;
    });
    for (int32_t k = 0; k < n_columns; ++k) {
        const bool is_told = k < n_best;
        const int32_t id = is_told ? ids[static_cast<size_t>(k)] : -1;
        out.top_tokens.push_back(id);
        out.top_logprobs.push_back(
            is_told ? static_cast<float>(static_cast<double>(logits[id]) - log_total)
                    : std::numeric_limits<float>::quiet_NaN());
    }
}

// Log-probabilities of an emitted token, as far as its sequence asked for them.
void score(const spec_engine & engine, const spec_sampler & sampler, outcome & out,
           const float * logits, llama_token token) {
    const float nan = std::numeric_limits<float>::quiet_NaN();
    if (!sampler.logprobs && sampler.n_top_logprobs == 0) {
        const auto n_top = static_cast<size_t>(engine.n_top);
        out.logprobs.push_back(nan);
        out.top_tokens.resize(out.top_tokens.size() + n_top, -1);
        out.top_logprobs.resize(out.top_tokens.size(), nan);
        return;
    }
    const int32_t n_vocab = engine.limits.n_vocab;
    const float max_logit = *std::max_element(logits, logits + n_vocab);
    const double log_total = static_cast<double>(max_logit) + log_sum(logits, n_vocab, max_logit);
    const double logprob = static_cast<double>(logits[token]) - log_total;
    out.logprobs.push_back(sampler.logprobs ? static_cast<float>(logprob) : nan);
    score_top(out, logits, n_vocab, sampler.n_top_logprobs, engine.n_top, log_total);
}

[[noreturn]] void nothing_allowed() {
    fail(SPEC_ERR_SAMPLING_FAILED, "no token is allowed here: the grammar, the biases or the "
                                   "temperature leave none a probability");
}

constexpr int32_t LANES = 16;

// The greatest of LANES numbers; NaNs count for nothing. Written so that compilers use vectors.
float greatest_of_lanes(const float * x) {
    float m[LANES];
    std::copy(x, x + LANES, m);
    for (int32_t width = LANES / 2; width > 0; width /= 2) {
        for (int32_t i = 0; i < width; ++i) {
            m[i] = m[i + width] > m[i] ? m[i + width] : m[i];
        }
    }
    return m[0];
}

// The token of the greatest logit, the first one where several tie.
llama_token argmax(const float * logits, int32_t n, const std::vector<llama_token> & banned) {
    float m[LANES];
    std::fill(m, m + LANES, -INFINITY);
    const int32_t n_even = n - n % LANES;
    for (int32_t i = 0; i < n_even; i += LANES) {
        for (int32_t j = 0; j < LANES; ++j) {
            m[j] = logits[i + j] > m[j] ? logits[i + j] : m[j];
        }
    }
    float best = greatest_of_lanes(m);
    for (int32_t i = n_even; i < n; ++i) {
        best = logits[i] > best ? logits[i] : best;
    }
    const float * at = std::find(logits, logits + n, best);
    const auto is_banned = [&](int32_t token) {
        return std::find(banned.begin(), banned.end(), token) != banned.end();
    };
    if (best > -INFINITY && at != logits + n && !is_banned(static_cast<int32_t>(at - logits))) {
        return static_cast<llama_token>(at - logits);
    }
    // Rare: the greatest may not be chosen.
    llama_token chosen = -1;
    for (int32_t i = 0; i < n; ++i) {
        if (logits[i] > (chosen < 0 ? -INFINITY : logits[chosen]) && !is_banned(i)) {
            chosen = i;
        }
    }
    if (chosen < 0) {
        nothing_allowed();
    }
    return chosen;
}

// The n greatest logits as candidates, in the order of their ids as far as llama.cpp minds (it
// sorts what it is given); the lower id first where they tie.
void find_greatest(const float * logits, int32_t n_vocab, int32_t n,
                   std::vector<llama_token_data> & out) {
    const auto is_less = [](const llama_token_data & a, const llama_token_data & b) {
        return a.logit != b.logit ? a.logit > b.logit : a.id < b.id;
    };
    out.clear();
    const auto n_wanted = static_cast<size_t>(n);
    const auto add = [&](int32_t id) {
        if (std::isnan(logits[id])) {
            return; // it has no place in any order
        }
        if (out.size() == n_wanted) {
            if (!(logits[id] > out.front().logit)) {
                return;
            }
            std::pop_heap(out.begin(), out.end(), is_less);
            out.pop_back();
        }
        out.push_back({id, logits[id], 0.0f});
        std::push_heap(out.begin(), out.end(), is_less);
    };
    int32_t i = 0;
    for (; i + LANES <= n_vocab; i += LANES) {
        if (out.size() == n_wanted && !(greatest_of_lanes(logits + i) > out.front().logit)) {
            continue;
        }
        for (int32_t j = i; j < i + LANES; ++j) {
            add(j);
        }
    }
    for (; i < n_vocab; ++i) {
        add(i);
    }
    std::sort(out.begin(), out.end(), is_less);
}

// What a chain has chosen; it may have chosen nothing.
const llama_token_data & choice(const llama_token_data_array & array) {
    if (array.selected < 0 || array.selected >= static_cast<int64_t>(array.size)) {
        nothing_allowed();
    }
    return array.data[array.selected];
}

// Sees that the chain left it a probability: where a grammar, a bias or an overflow leaves none,
// llama.cpp returns any token, and a grammar that is given it aborts.
const llama_token_data & checked_choice(const llama_token_data_array & array) {
    const llama_token_data & chosen = choice(array);
    if (!std::isfinite(chosen.logit)) {
        nothing_allowed();
    }
    return chosen;
}

// Chooses a token with the chain, from the candidates that can be chosen.
llama_token sample_greatest(const spec_sampler & sampler, const float * logits, int32_t n_vocab) {
    thread_local std::vector<llama_token_data> candidates;
    find_greatest(logits, n_vocab, std::min(sampler.n_greatest, n_vocab), candidates);
    if (candidates.empty()) {
        nothing_allowed();
    }
    llama_token_data_array array = {candidates.data(), candidates.size(), -1, false};
    llama_sampler_apply(sampler.samplers(), &array);
    return checked_choice(array).id;
}

// All tokens of a row as candidates: each thread's own, from logits in host memory. The context is
// not asked, so threads share nothing but the logits.
struct row_candidates {
    std::vector<llama_token_data> data;
    llama_token_data_array array = {};

    void fill(const float * logits, int32_t n_vocab) {
        data.resize(static_cast<size_t>(n_vocab));
        for (int32_t id = 0; id < n_vocab; ++id) {
            // What is no number breaks the order that sorting relies on.
            const float logit = std::isnan(logits[id]) ? -INFINITY : logits[id];
            data[static_cast<size_t>(id)] = {id, logit, 0.0f};
        }
        array = {data.data(), data.size(), -1, false};
    }

    // What a position is verified with looks at the likeliest first.
    void sort() {
        if (!array.sorted) {
            std::sort(array.data, array.data + array.size,
                      [](const auto & a, const auto & b) { return a.p > b.p; });
            array.sorted = true;
        }
    }
};

bool is_allowed(const spec_sampler & sampler, llama_token token) {
    if (!sampler.grammar) {
        return true;
    }
    llama_token_data candidate = {token, 1.0f, 0.0f};
    llama_token_data_array array = {&candidate, 1, -1, false};
    llama_sampler_apply(sampler.grammar.get(), &array);
    return candidate.logit != -INFINITY;
}

// Chooses a token of a row with the whole chain, and leaves what it was chosen from in `row`. The
// grammar is slow: only if it forbids the choice, it is asked about all tokens, and the chain
// again.
llama_token sample_row(const spec_sampler & sampler, const float * logits, int32_t n_vocab,
                       row_candidates & row) {
    row.fill(logits, n_vocab);
    llama_sampler_apply(sampler.samplers(), &row.array);
    if (!is_allowed(sampler, choice(row.array).id)) {
        row.fill(logits, n_vocab);
        llama_sampler_apply(sampler.grammar.get(), &row.array);
        llama_sampler_apply(sampler.samplers(), &row.array);
    }
    return checked_choice(row.array).id;
}

// Chooses a token of a row, in the shortest way that its sampler allows.
llama_token sample_checked(const spec_sampler & sampler, const float * logits, int32_t n_vocab) {
    if (sampler.is_argmax) {
        return argmax(logits, n_vocab, sampler.banned);
    }
    if (sampler.n_greatest > 0) {
        return sample_greatest(sampler, logits, n_vocab);
    }
    thread_local row_candidates row;
    return sample_row(sampler, logits, n_vocab, row);
}

// Each position is sampled as without a draft; the draft stands as long as it agrees. So a seed
// draws what it draws without speculation, and samplers that learn from their draws stay right.
void sample_and_match(const spec_engine & engine, const sequence & seq, outcome & out) {
    const llama_tokens & draft = seq.draft.tokens;
    for (size_t i = 0; i < out.rows.size(); ++i) {
        const llama_token id = sample_checked(*seq.sampler, out.rows[i], engine.limits.n_vocab);
        seq.sampler->accept(id, true);
        out.emitted.push_back(id);
        if (i >= draft.size() || id != draft[i] ||
            llama_vocab_is_eog(engine.target_model->vocab, id)) {
            break;
        }
    }
}

// The probability of a token among candidates, 0 where it is none of them.
float probability(const llama_token_data * candidates, size_t n, llama_token token) {
    const auto * end = candidates + n;
    const auto * at =
        std::find_if(candidates, end, [&](const auto & it) { return it.id == token; });
    return at != end ? at->p : 0.0f;
}

// Draws from what the target's distribution has more than the draft's; `otherwise` where it has
// nothing more.
llama_token draw_rest(std::mt19937 & rng, const llama_token_data_array & p,
                      const std::vector<llama_token_data> & q, llama_token otherwise) {
    std::vector<llama_token_data> rest;
    float sum = 0.0f;
    for (size_t k = 0; k < p.size; ++k) {
        const float more = p.data[k].p - probability(q.data(), q.size(), p.data[k].id);
        if (more > 0.0f) {
            rest.push_back({p.data[k].id, 0.0f, more});
            sum += more;
        }
    }
    if (rest.empty()) {
        return otherwise;
    }
    float u = std::uniform_real_distribution<float>(0.0f, 1.0f)(rng) * sum;
    for (const llama_token_data & candidate : rest) {
        u -= candidate.p;
        if (u <= 0.0f) {
            return candidate.id;
        }
    }
    return rest.back().id;
}

// A drafted token stands with probability min(1, p/q); the first that does not is drawn anew from
// the rest, so that what is emitted has the target's distribution (Leviathan et al.,
// arXiv:2211.17192, Alg. 1). Without a grammar: see is_match_only.
void sample_and_reject(const spec_engine & engine, const sequence & seq, outcome & out) {
    thread_local row_candidates row;
    spec_sampler & sampler = *seq.sampler;
    std::uniform_real_distribution<float> uniform(0.0f, 1.0f);
    for (size_t i = 0; i < out.rows.size(); ++i) {
        const llama_token own = sample_row(sampler, out.rows[i], engine.limits.n_vocab, row);
        llama_token emitted = own;
        bool is_accepted = false;
        if (i < seq.draft.tokens.size()) {
            row.sort();
            const llama_token drafted = seq.draft.tokens[i];
            const std::vector<llama_token_data> & draft_q = seq.draft.q[i];
            const float p = probability(row.array.data, row.array.size, drafted);
            const float q = probability(draft_q.data(), draft_q.size(), drafted);
            is_accepted = q > 0.0f && (p >= q || uniform(sampler.rng) < p / q);
            emitted = is_accepted ? drafted : draw_rest(sampler.rng, row.array, draft_q, own);
        }
        sampler.accept(emitted, true);
        out.emitted.push_back(emitted);
        if (!is_accepted) {
            break;
        }
    }
}

// Benchmarks: accepts drafts at the rates asked for. Every position is sampled all the same, as a
// verification would, for its cost. A drafted end token is never accepted: it would end the
// sequence early.
void accept_at_random(const spec_engine & engine, sequence & seq, outcome & out) {
    const llama_tokens & draft = seq.draft.tokens;
    std::uniform_real_distribution<double> uniform(0.0, 1.0);
    for (size_t i = 0; i < out.rows.size(); ++i) {
        const llama_token own = sample_checked(*seq.sampler, out.rows[i], engine.limits.n_vocab);
        const bool is_accepted = i < draft.size() &&
                                 uniform(seq.synth_rng) < engine.synth_probs[i] &&
                                 !llama_vocab_is_eog(engine.target_model->vocab, draft[i]);
        out.emitted.push_back(is_accepted ? draft[i] : own);
        // A drafted token need not fit the grammar; the target's own does.
        seq.sampler->accept(out.emitted.back(), !is_accepted);
        if (!is_accepted) {
            break;
        }
    }
}

// Chooses the tokens that a sequence emits: the accepted part of its draft and one of the target's
// own.
void verify(const spec_engine & engine, sequence & seq, outcome & out) {
    if (!engine.synth_probs.empty()) {
        accept_at_random(engine, seq, out);
    } else if (seq.draft.q.empty()) {
        sample_and_match(engine, seq, out);
    } else {
        sample_and_reject(engine, seq, out);
    }
    for (const llama_token token : out.emitted) {
        seq.heard.push_back(-1 - token);
    }
    for (size_t i = 0; i < out.emitted.size(); ++i) {
        const llama_token token = out.emitted[i];
        if (!std::isfinite(out.rows[i][token])) {
            fail(SPEC_ERR_SAMPLING_FAILED, "the model's output is not finite");
        }
        score(engine, *seq.sampler, out, out.rows[i], token);
        if (llama_vocab_is_eog(engine.target_model->vocab, token)) {
            out.emitted.resize(i + 1); // the rejection rule goes on after an accepted end token
        }
    }
}

// The part of an entry's end that touches its own sequence only, so that threads may share the
// entries. They read the target's logits where find_rows has found them: a context belongs to one
// thread, and even waiting for one writes to it.
void choose(spec_engine & engine, const spec_plan & plan, size_t i_entry) {
    const spec_plan_entry & e = plan.entries[i_entry];
    sequence & seq = engine.sequences[static_cast<size_t>(e.seq_id)];
    for (int32_t k = std::max(seq.n_known() - e.n_past, 0); k < e.n_tokens; ++k) {
        seq.feed(plan.tokens[e.token_offset + k]); // emitted tokens have passed it already, and a
                                                   // resumed sequence's
    }
    seq.n_heard = std::max(seq.n_known(), e.n_past + e.n_tokens);
    if (e.is_output != 0) {
        verify(engine, seq, engine.outcomes[i_entry]);
    }
}

// Finds the logits that an entry's tokens are chosen from.
void find_rows(spec_engine & engine, const spec_plan & plan, size_t i_entry) {
    const spec_plan_entry & e = plan.entries[i_entry];
    const sequence & seq = engine.sequences[static_cast<size_t>(e.seq_id)];
    outcome & out = engine.outcomes[i_entry];
    out.rows.clear();
    out.emitted.clear();
    out.logprobs.clear();
    out.top_tokens.clear();
    out.top_logprobs.clear();
    out.status = SPEC_OK;
    const size_t n_rows = e.is_output != 0 ? seq.draft.tokens.size() + 1 : 0;
    for (size_t i = 0; i < n_rows; ++i) {
        const int32_t i_batch = engine.rows[i_entry] + e.n_tokens - 1 + static_cast<int32_t>(i);
        out.rows.push_back(llama_get_logits_ith(engine.target.get(), i_batch));
        if (out.rows.back() == nullptr) {
            out.status = SPEC_ERR_SAMPLING_FAILED;
            return;
        }
    }
}

// Chooses the tokens of all entries of a decode, on as many threads as it pays.
void choose_all(spec_engine & engine, const spec_plan & plan, const group & entries) {
    constexpr size_t N_LOGITS_PARALLEL = 32768; // below, waking threads takes longer
    size_t n_rows = 0;
    for (const size_t i : entries) {
        find_rows(engine, plan, i);
        n_rows += engine.outcomes[i].rows.size();
    }
    const auto choose_one = [&](size_t k) {
        outcome & out = engine.outcomes[entries[k]];
        if (out.status == SPEC_OK) {
            out.status = guarded([&] { choose(engine, plan, entries[k]); });
        }
    };
    const size_t n_logits = n_rows * static_cast<size_t>(engine.limits.n_vocab);
    engine.sampling.run(entries.size(), n_logits >= N_LOGITS_PARALLEL, choose_one);
}

// Back to the checkpoint, then the tokens that stay are decoded again. Only the target: the draft
// was cut already.
void replay(spec_engine & engine, sequence & seq, int32_t seq_id, int32_t n_past,
            const llama_tokens & kept) {
    llama_context * ctx = engine.target.get();
    const size_t n = llama_state_seq_set_data_ext(ctx, seq.checkpoint.data(), seq.checkpoint.size(),
                                                  seq_id, LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY);
    if (n != seq.checkpoint.size() ||
        !llama_memory_seq_rm(engine.target_memory(), seq_id, n_past, -1)) {
        fail(SPEC_ERR_DECODE_FAILED, "the checkpoint could not be restored");
    }
    common_batch batch(ctx);
    ++engine.n_decodes;
    for (size_t i = 0; i < kept.size(); ++i) {
        batch.add(kept[i], n_past + static_cast<int32_t>(i), seq_id, false);
    }
    if (llama_process(ctx, LLAMA_PROCESS_TYPE_DECODE, batch.get()) != 0) {
        fail(SPEC_ERR_DECODE_FAILED, "the accepted tokens could not be decoded again");
    }
}

// Cuts the draft context to what the target holds. EAGLE-3's rows pair a position with the token
// after it, so the row of the last position was written with the rejected token and goes as well.
void cut_draft(spec_engine & engine, int32_t seq_id, int32_t n_past) {
    if (!engine.draft) {
        return;
    }
    const int32_t n_keep = engine.limits.draft_type == SPEC_DRAFT_EAGLE3 ? n_past - 1 : n_past;
    llama_memory_seq_rm(engine.draft_memory(), seq_id, std::max(n_keep, 0), -1);
}

// Cuts the target's cells, within what its last decode brought. False where it cannot go back.
bool cut_target(spec_engine & engine, int32_t seq_id, int32_t n_past) {
    const bool is_any = engine.target_rollback == rollback_kind::any;
    return (!is_any || holds_window(engine.target.get(), seq_id, n_past)) &&
           llama_memory_seq_rm(engine.target_memory(), seq_id, n_past, -1);
}

// A sequence whose checkpoint must be replayed, after the logits of this step have been read for
// all.
struct pending_replay {
    size_t i_entry;
    int32_t n_past;
    llama_tokens kept;
};

void roll_back(spec_engine & engine, sequence & seq, const spec_plan_entry & e, size_t i_entry,
               int32_t n_new, int32_t n_back, std::vector<pending_replay> & replays) {
    if (n_back <= 0) {
        return;
    }
    cut_draft(engine, e.seq_id, n_new);
    seq.n_back_max = 0; // once per decode
    if (seq.checkpoint.empty() ||
        (engine.target_rollback == rollback_kind::bounded && n_back <= engine.limits.n_rs_seq)) {
        if (!cut_target(engine, e.seq_id, n_new)) {
            fail(SPEC_ERR_DECODE_FAILED, "the rejected draft could not be taken back");
        }
        return;
    }
    replays.push_back(
        {i_entry, e.n_past, llama_tokens(seq.tokens.begin() + e.n_past, seq.tokens.end())});
}

template <typename T> void append(std::vector<T> & all, const std::vector<T> & some) {
    all.insert(all.end(), some.begin(), some.end());
}

void emit(spec_engine & engine, spec_result_entry & r, const outcome & out) {
    r.token_offset = static_cast<int32_t>(engine.out_tokens.size());
    r.n_tokens = static_cast<int32_t>(out.emitted.size());
    append(engine.out_tokens, out.emitted);
    append(engine.out_logprobs, out.logprobs);
    append(engine.out_top_tokens, out.top_tokens);
    append(engine.out_top_logprobs, out.top_logprobs);
    if (llama_vocab_is_eog(engine.target_model->vocab, out.emitted.back())) {
        r.flags |= SPEC_RESULT_EOG;
    }
}

void finish_output(spec_engine & engine, sequence & seq, const spec_plan_entry & e, size_t i_entry,
                   spec_result_entry & r, std::vector<pending_replay> & replays) {
    const int32_t n_draft = static_cast<int32_t>(seq.draft.tokens.size());
    if (!seq.has_emitted) {
        seq.n_prompt = seq.n_past();
    }
    const outcome & out = engine.outcomes[i_entry];
    const int32_t n_acc = static_cast<int32_t>(out.emitted.size()) - 1;
    emit(engine, r, out);
    r.n_drafted = n_draft;
    r.n_accepted = n_acc;
    r.flags |= seq.draft.is_given ? SPEC_RESULT_GIVEN : 0;
    if (n_draft > 0) {
        accept_draft(engine, seq, e.seq_id, n_acc);
    }
    seq.tokens.insert(seq.tokens.end(), out.emitted.begin(), out.emitted.end() - 1);
    seq.id_last = out.emitted.back();
    seq.has_emitted = true;
    seq.n_heard = seq.n_past() + 1;
    seq.known.clear();
    roll_back(engine, seq, e, i_entry, seq.n_past(), n_draft - n_acc, replays);
}

void finish_entry(spec_engine & engine, const spec_plan & plan, size_t i_entry,
                  std::vector<pending_replay> & replays) {
    const spec_plan_entry & e = plan.entries[i_entry];
    sequence & seq = engine.sequences[static_cast<size_t>(e.seq_id)];
    spec_result_entry & r = engine.out_entries[i_entry];
    if (engine.outcomes[i_entry].status != SPEC_OK) {
        fail(engine.outcomes[i_entry].status, "no token could be chosen");
    }
    const int32_t * ids = plan.tokens + e.token_offset;
    seq.tokens.insert(seq.tokens.end(), ids, ids + e.n_tokens);
    if (e.is_output != 0) {
        finish_output(engine, seq, e, i_entry, r, replays);
    }
    r.n_past = seq.n_past();
    r.flags |= seq.is_cold ? SPEC_RESULT_DRAFT_COLD : 0;
    seq.draft = {};
    if (!seq.checkpoint.empty() && (replays.empty() || replays.back().i_entry != i_entry)) {
        seq.checkpoint.clear();
    }
}

void fail_entry(spec_engine & engine, const spec_plan & plan, size_t i_entry, int32_t status) {
    spec_result_entry & r = engine.out_entries[i_entry];
    clear_sequence(engine, plan.entries[i_entry].seq_id);
    r = {};
    r.seq_id = plan.entries[i_entry].seq_id;
    r.status = status;
}

void fail_entries(spec_engine & engine, const spec_plan & plan, const group & entries) {
    for (const size_t i : entries) {
        fail_entry(engine, plan, i, SPEC_ERR_DECODE_FAILED);
    }
}

// One sequence's trouble stays its own: whatever is thrown for it ends it and no other.
template <typename Body>
void isolated(spec_engine & engine, const spec_plan & plan, size_t i_entry, Body && body) {
    const int32_t rc = guarded(body);
    if (rc != SPEC_OK) {
        fail_entry(engine, plan, i_entry,
                   rc == SPEC_ERR_DECODE_FAILED ? rc : SPEC_ERR_SAMPLING_FAILED);
    }
}

void finish_entries(spec_engine & engine, const spec_plan & plan, const group & entries) {
    std::vector<pending_replay> replays;
    choose_all(engine, plan, entries);
    for (const size_t i : entries) {
        isolated(engine, plan, i, [&] { finish_entry(engine, plan, i, replays); });
    }
    for (const pending_replay & r : replays) {
        isolated(engine, plan, r.i_entry, [&] {
            sequence & seq = engine.sequences[static_cast<size_t>(plan.entries[r.i_entry].seq_id)];
            replay(engine, seq, plan.entries[r.i_entry].seq_id, r.n_past, r.kept);
            seq.checkpoint.clear();
            engine.out_entries[r.i_entry].flags |= SPEC_RESULT_REPLAYED;
        });
    }
}

// The step.

void begin_result(spec_engine & engine, const spec_plan & plan) {
    engine.is_decoded = false;
    engine.out_tokens.clear();
    engine.out_logprobs.clear();
    engine.out_top_tokens.clear();
    engine.out_top_logprobs.clear();
    engine.n_top = 0;
    engine.outcomes.resize(std::max(engine.outcomes.size(), static_cast<size_t>(plan.n_entries)));
    engine.out_entries.assign(static_cast<size_t>(plan.n_entries), spec_result_entry{});
    for (int32_t i = 0; i < plan.n_entries; ++i) {
        engine.out_entries[static_cast<size_t>(i)].seq_id = plan.entries[i].seq_id;
        engine.out_entries[static_cast<size_t>(i)].n_past = plan.entries[i].n_past;
        const sequence & seq = engine.sequences[static_cast<size_t>(plan.entries[i].seq_id)];
        engine.n_top = std::max(engine.n_top, seq.sampler->n_top_logprobs);
    }
}

void refuse_entries(spec_engine & engine, const spec_plan & plan, const group & entries) {
    for (const size_t i : entries) {
        engine.out_entries[i].status = SPEC_ERR_NO_ROOM;
        engine.sequences[static_cast<size_t>(plan.entries[i].seq_id)].draft = {};
    }
}

// One decode of the target and all that must happen before the next one.
void run_group(spec_engine & engine, const spec_plan & plan, const group & entries,
               spec_result & out) {
    const int64_t t_begin = now_us();
    build_batch(engine, plan, entries);
    int32_t rc = decode_batch(engine);
    if (rc == 1 && drop_drafts(engine, plan, entries)) {
        rc = decode_batch(engine);
    }
    const int64_t t_decoded = now_us();
    out.t_decode_us += t_decoded - t_begin;
    out.n_batch_tokens += engine.batch.size();
    if (rc == 1) {
        refuse_entries(engine, plan, entries);
        return;
    }
    if (rc != 0) {
        fail(SPEC_ERR_DECODE_FAILED,
             "the target's decode returned " + std::to_string(rc) + llama_reason());
    }
    process_batch(engine);
    const int64_t t_processed = now_us();
    out.t_process_us += t_processed - t_decoded;
    finish_entries(engine, plan, entries);
    out.t_sample_us += now_us() - t_processed;
}

// Order of speculation.md §1.
void run_step(spec_engine & engine, const spec_plan & plan, spec_result & out) {
    const int64_t t_begin = now_us();
    draft_plan(engine, plan);
    for (int32_t i = 0; i < plan.n_entries; ++i) {
        const int32_t seq_id = plan.entries[i].seq_id;
        save_checkpoint(engine, engine.sequences[static_cast<size_t>(seq_id)], seq_id);
    }
    out.t_draft_us += now_us() - t_begin;
    if (engine.take_fault(SPEC_FAULT_THROW)) {
        throw std::runtime_error("injected fault");
    }
    for (const group & entries : make_groups(engine, plan)) {
        if (guarded([&] { run_group(engine, plan, entries, out); }) != SPEC_OK) {
            fail_entries(engine, plan, entries);
        }
    }
}

// One step of a plan that was checked.
void step_once(spec_engine & engine, const spec_plan & plan, spec_result & out) {
    begin_result(engine, plan);
    if (plan.n_entries > 0 && guarded([&] { run_step(engine, plan, out); }) != SPEC_OK) {
        group all(static_cast<size_t>(plan.n_entries));
        std::iota(all.begin(), all.end(), size_t{0});
        fail_entries(engine, plan, all);
    }
    ++out.n_steps;
}

template <typename T>
void append_range(std::vector<T> & all, const std::vector<T> & some, size_t from, size_t n) {
    const auto start = some.begin() + static_cast<std::ptrdiff_t>(from);
    all.insert(all.end(), start, start + static_cast<std::ptrdiff_t>(n));
}

// Adds to each entry's outcome what the last step has emitted for it.
void collect(const spec_engine & engine, std::vector<outcome> & outcomes) {
    const auto n_top = static_cast<size_t>(engine.n_top);
    for (size_t i = 0; i < outcomes.size(); ++i) {
        const auto from = static_cast<size_t>(engine.out_entries[i].token_offset);
        const auto n = static_cast<size_t>(engine.out_entries[i].n_tokens);
        append_range(outcomes[i].emitted, engine.out_tokens, from, n);
        append_range(outcomes[i].logprobs, engine.out_logprobs, from, n);
        append_range(outcomes[i].top_tokens, engine.out_top_tokens, from * n_top, n * n_top);
        append_range(outcomes[i].top_logprobs, engine.out_top_logprobs, from * n_top, n * n_top);
    }
}

// Makes the last step's result that of the whole run.
void tell_run(spec_engine & engine, const std::vector<outcome> & outcomes) {
    engine.out_tokens.clear();
    engine.out_logprobs.clear();
    engine.out_top_tokens.clear();
    engine.out_top_logprobs.clear();
    for (size_t i = 0; i < outcomes.size(); ++i) {
        spec_result_entry & r = engine.out_entries[i];
        r.token_offset = static_cast<int32_t>(engine.out_tokens.size());
        r.n_tokens = static_cast<int32_t>(outcomes[i].emitted.size());
        if (r.status == SPEC_ERR_NO_ROOM) {
            r.status = SPEC_OK; // it is where the step before has left it
            const bool is_cold = engine.sequences[static_cast<size_t>(r.seq_id)].is_cold;
            r.flags = is_cold ? SPEC_RESULT_DRAFT_COLD : 0;
        }
        append(engine.out_tokens, outcomes[i].emitted);
        append(engine.out_logprobs, outcomes[i].logprobs);
        append(engine.out_top_tokens, outcomes[i].top_tokens);
        append(engine.out_top_logprobs, outcomes[i].top_logprobs);
    }
}

// Whether there is nothing to decide between the last step and the next one.
bool may_go_on(const spec_engine & engine) {
    const auto goes_on = [&](const spec_result_entry & r) {
        return r.status == SPEC_OK && (r.flags & SPEC_RESULT_EOG) == 0 &&
               r.n_past < engine.limits.n_ctx_seq;
    };
    return !engine.is_interrupted &&
           std::all_of(engine.out_entries.begin(), engine.out_entries.end(), goes_on);
}

// The further steps of a run: each sequence goes on from the token that it has emitted.
void run_on(spec_engine & engine, const spec_plan & plan, spec_result & out) {
    std::vector<outcome> outcomes(static_cast<size_t>(plan.n_entries));
    std::vector<spec_plan_entry> entries(plan.entries, plan.entries + plan.n_entries);
    std::vector<int32_t> tokens(entries.size());
    spec_plan next = {};
    next.entries = entries.data();
    next.n_entries = plan.n_entries;
    next.tokens = tokens.data();
    next.n_tokens = plan.n_entries;
    collect(engine, outcomes);
    while (out.n_steps < plan.n_steps && may_go_on(engine)) {
        for (size_t i = 0; i < entries.size(); ++i) {
            entries[i].n_past = engine.out_entries[i].n_past;
            entries[i].token_offset = static_cast<int32_t>(i);
            entries[i].n_tokens = 1;
            tokens[i] = outcomes[i].emitted.back();
        }
        step_once(engine, next, out);
        collect(engine, outcomes);
    }
    if (out.n_steps > 1) {
        tell_run(engine, outcomes);
    }
}

void step(spec_engine & engine, const spec_plan & plan, spec_result & out) {
    check_plan(engine, plan);
    out = {};
    const int64_t t_begin = now_us();
    step_once(engine, plan, out);
    if (plan.n_steps > 1) {
        run_on(engine, plan, out);
    }
    engine.is_interrupted = false;
    out.entries = engine.out_entries.data();
    out.n_entries = static_cast<int32_t>(engine.out_entries.size());
    out.tokens = engine.out_tokens.data();
    out.logprobs = engine.out_logprobs.data();
    out.n_tokens = static_cast<int32_t>(engine.out_tokens.size());
    out.top_tokens = engine.out_top_tokens.data();
    out.top_logprobs = engine.out_top_logprobs.data();
    out.n_top = engine.n_top;
    out.t_total_us = now_us() - t_begin;
}

// The same.
// parts, one call at a time

void check_draft_request(spec_engine & engine, const spec_draft_request & r) {
    const sequence & seq = begun(engine, r.seq_id);
    if (!engine.spec && !seq.ngram) {
        fail(SPEC_ERR_UNSUPPORTED, "this engine has no drafter");
    }
    if (r.n_past != seq.n_past() || seq.n_past() == 0) {
        bad_plan(r.seq_id, "n_past is " + std::to_string(r.n_past) + ", but its cache holds " +
                               std::to_string(seq.n_past()) + " tokens");
    }
    if (seq.is_proposed) {
        bad_plan(r.seq_id, "a proposal is pending; accept it first");
    }
    if (r.n_draft < 1 || r.n_draft > engine.limits.n_draft_max) {
        bad_plan(r.seq_id, "n_draft is " + std::to_string(r.n_draft) + "; expected [1, " +
                               std::to_string(engine.limits.n_draft_max) + "]");
    }
    if (int64_t{r.n_past} + 1 + r.n_draft > engine.limits.n_ctx_seq) {
        bad_plan(r.seq_id, "the draft does not fit the sequence's context");
    }
    check_token(r.id_last, engine.limits.n_vocab, "id_last");
}

void draft_by_hand(spec_engine & engine, const spec_draft_request * requests, int32_t n,
                   int32_t * tokens, int32_t * counts) {
    check_range("n_requests", n, 0, engine.limits.n_seq_max);
    if (n > 0) {
        deref(requests, "requests");
        deref(tokens, "tokens");
        deref(counts, "counts");
    }
    if (engine.is_decoded && !engine.is_processed && engine.spec) {
        fail(SPEC_ERR_BAD_PLAN, "the last batch has not been processed");
    }
    std::vector<int32_t> asked;
    for (int32_t i = 0; i < n; ++i) {
        check_draft_request(engine, requests[i]);
        if (std::find(asked.begin(), asked.end(), requests[i].seq_id) != asked.end()) {
            bad_plan(requests[i].seq_id, "it is asked for twice");
        }
        asked.push_back(requests[i].seq_id);
    }
    draft_orders orders{engine, {}};
    for (int32_t i = 0; i < n; ++i) {
        sequence & seq = begun(engine, requests[i].seq_id);
        seq.draft = {};
        if (can_draft(engine, seq)) {
            orders.give(seq, requests[i].seq_id, requests[i].n_draft, requests[i].id_last);
        }
    }
    run_drafters(engine, orders.armed);
    for (int32_t i = 0; i < n; ++i) {
        sequence & seq = begun(engine, requests[i].seq_id);
        settle_draft(engine, seq, requests[i].seq_id, requests[i].n_draft);
        seq.is_proposed = true;
        seq.n_past_proposed = seq.n_past();
        counts[i] = static_cast<int32_t>(seq.draft.tokens.size());
        std::copy(seq.draft.tokens.begin(), seq.draft.tokens.end(),
                  tokens + int64_t{i} * engine.limits.n_draft_max);
    }
}

// By hand, what a step does by grouping is asked of the caller: on a recurrent target a decode that
// verifies drafts must be one ubatch (see make_groups), and short enough to be taken back.
void check_one_ubatch(const spec_engine & engine, const spec_token * tokens, int32_t n) {
    int32_t n_first = 0; // tokens of the first sequence: all must have as many
    while (n_first < n && tokens[n_first].seq_id == tokens[0].seq_id) {
        ++n_first;
    }
    bool is_even = n % n_first == 0 && n <= engine.limits.n_ubatch;
    for (int32_t i = 0; is_even && i < n; ++i) {
        const int32_t n_before = i / n_first;
        const spec_token & head = tokens[n_before * n_first];
        is_even = tokens[i].seq_id == head.seq_id &&
                  (engine.limits.kv_unified || head.seq_id == tokens[0].seq_id + n_before);
    }
    if (!is_even || n_first > engine.limits.n_rs_seq + 1) {
        fail(SPEC_ERR_UNSUPPORTED,
             "on a recurrent target a decode by hand that verifies drafts takes sequences with "
             "ascending neighbouring ids and equally many tokens, at most " +
                 std::to_string(engine.limits.n_rs_seq + 1) + " each and " +
                 std::to_string(engine.limits.n_ubatch) + " together");
    }
}

// Checks that the tokens of each sequence stand together and continue its cache.
void check_tokens(spec_engine & engine, const spec_token * tokens, int32_t n) {
    std::vector<int32_t> next(engine.sequences.size(), -1);
    bool is_verified = false; // whether a draft is among the tokens
    int64_t n_outputs = 0;
    int64_t n_cells = n;
    for (int32_t i = 0; i < n; ++i) {
        const spec_token & t = tokens[i];
        const sequence & seq = begun(engine, t.seq_id);
        const auto id = static_cast<size_t>(t.seq_id);
        if (next[id] >= 0 && tokens[i - 1].seq_id != t.seq_id) {
            bad_plan(t.seq_id, "its tokens do not stand together");
        }
        const int32_t pos = next[id] >= 0 ? next[id] : seq.n_past();
        if (t.pos != pos) {
            bad_plan(t.seq_id,
                     "position is " + std::to_string(t.pos) + "; expected " + std::to_string(pos));
        }
        if (t.pos >= engine.limits.n_ctx_seq) {
            bad_plan(t.seq_id, "a sequence has room for " +
                                   std::to_string(engine.limits.n_ctx_seq) + " tokens");
        }
        check_token(t.token, engine.limits.n_vocab, "batch");
        next[id] = pos + 1;
        n_outputs += t.is_output != 0 ? 1 : 0;
        is_verified = is_verified || (seq.is_proposed && pos > seq.n_past());
    }
    if (is_verified && engine.target_rollback != rollback_kind::any) {
        check_one_ubatch(engine, tokens, n);
    } else if (is_verified && needs_one_ubatch(engine) && n > engine.limits.n_ubatch) {
        fail(SPEC_ERR_UNSUPPORTED,
             "with sliding windows in a shared pool a decode by hand that verifies drafts takes at "
             "most n_ubatch = " +
                 std::to_string(engine.limits.n_ubatch) + " tokens, not " + std::to_string(n));
    }
    for (const sequence & seq : engine.sequences) {
        n_cells += seq.n_past();
    }
    if (n_outputs > engine.limits.n_outputs_max) {
        fail(SPEC_ERR_BAD_PLAN, "the batch has " + std::to_string(n_outputs) +
                                    " outputs; at most " +
                                    std::to_string(engine.limits.n_outputs_max) + " are possible");
    }
    if (engine.limits.kv_unified && n_cells > engine.limits.n_ctx) {
        fail(SPEC_ERR_BAD_PLAN, "the batch needs more KV cells than there are");
    }
}

// After a decode that failed in its midst nobody knows what the cache holds of its sequences.
void clear_batch(spec_engine & engine, const spec_token * tokens, int32_t n) {
    for (int32_t i = 0; i < n; ++i) {
        clear_sequence(engine, tokens[i].seq_id);
    }
}

void decode_by_hand(spec_engine & engine, const spec_token * tokens, int32_t n) {
    check_range("n_tokens", n, 1, engine.limits.n_batch);
    deref(tokens, "tokens");
    if (engine.is_decoded && !engine.is_processed && engine.spec) {
        fail(SPEC_ERR_BAD_PLAN, "the last batch has not been processed");
    }
    check_tokens(engine, tokens, n);
    engine.is_decoded = false;
    engine.batch.clear();
    for (int32_t i = 0; i < n; ++i) {
        engine.batch.add(tokens[i].token, tokens[i].pos, tokens[i].seq_id,
                         tokens[i].is_output != 0);
    }
    int32_t rc = 0;
    try {
        rc = decode_batch(engine);
    } catch (const std::exception & error) {
        clear_batch(engine, tokens, n);
        fail(SPEC_ERR_DECODE_FAILED,
             std::string(error.what()) + "; the batch's sequences were cleared");
    }
    if (rc == 1) {
        fail(SPEC_ERR_NO_ROOM, "no room in the KV cache");
    }
    if (rc != 0) {
        clear_batch(engine, tokens, n);
        fail(SPEC_ERR_DECODE_FAILED, "the decode returned " + std::to_string(rc) +
                                         "; the batch's sequences were cleared" + llama_reason());
    }
    for (int32_t i = 0; i < n; ++i) {
        sequence & seq = begun(engine, tokens[i].seq_id);
        seq.tokens.push_back(tokens[i].token);
        if (!seq.is_proposed && tokens[i].is_output == 0) {
            seq.feed(tokens[i].token);
        }
    }
    engine.is_decoded = true;
    engine.is_processed = false;
}

void check_logits_index(const spec_engine & engine, int32_t i) {
    if (!engine.is_decoded) {
        fail(SPEC_ERR_BAD_PLAN, "nothing has been decoded");
    }
    if (i < 0 || i >= engine.batch.size() || !engine.batch.tokens[static_cast<size_t>(i)].output) {
        fail(SPEC_ERR_INVALID_ARGUMENT,
             "batch index " + std::to_string(i) + " is no output of the last decode");
    }
}

// As in a step, a sequence for which no token can be chosen is cleared: its sampler may have been
// fed in part.
llama_token sample_by_hand(spec_engine & engine, int32_t seq_id, int32_t i) {
    sequence & seq = begun(engine, seq_id);
    try {
        const float * logits = llama_get_logits_ith(engine.target.get(), i);
        const llama_token token = sample_checked(*seq.sampler, logits, engine.limits.n_vocab);
        seq.sampler->accept(token, true);
        seq.heard.push_back(-1 - token);
        seq.id_last = token;
        return token;
    } catch (const std::exception & error) {
        const std::string reason = error.what();
        clear_sequence(engine, seq_id);
        fail(SPEC_ERR_SAMPLING_FAILED, reason + "; the sequence was cleared");
    }
}

void accept_by_hand(spec_engine & engine, int32_t seq_id, int32_t n_accepted) {
    sequence & seq = begun(engine, seq_id);
    if (!seq.is_proposed) {
        bad_plan(seq_id, "no proposal is pending");
    }
    if (engine.spec && !engine.is_processed) {
        bad_plan(seq_id, "the last batch has not been processed");
    }
    const int32_t n_draft = static_cast<int32_t>(seq.draft.tokens.size());
    const int32_t n_decoded = seq.n_past() - seq.n_past_proposed;
    if (n_accepted < 0 || n_accepted > n_draft || n_accepted > n_decoded - 1) {
        bad_plan(seq_id, "n_accepted is " + std::to_string(n_accepted) + "; " +
                             std::to_string(n_draft) + " were drafted and " +
                             std::to_string(std::max(n_decoded - 1, 0)) + " of them decoded");
    }
    const int32_t n_new = seq.n_past_proposed + 1 + n_accepted;
    const int32_t n_back = seq.n_past() - n_new;
    if (n_draft > 0) {
        accept_draft(engine, seq, seq_id, n_accepted);
    }
    seq.is_proposed = false;
    seq.draft = {};
    if (n_back == 0) {
        return;
    }
    seq.n_back_max = 0; // once per decode
    cut_draft(engine, seq_id, n_new);
    if (!cut_target(engine, seq_id, n_new)) {
        clear_sequence(engine, seq_id);
        fail(SPEC_ERR_DECODE_FAILED,
             "the rejected draft could not be taken back; the sequence was cleared");
    }
    seq.tokens.resize(static_cast<size_t>(n_new));
}

void rollback_by_hand(spec_engine & engine, int32_t seq_id, int32_t n_past) {
    sequence & seq = begun(engine, seq_id);
    if (n_past < 0 || n_past > seq.n_past()) {
        bad_plan(seq_id, "n_past is " + std::to_string(n_past) + "; expected [0, " +
                             std::to_string(seq.n_past()) + "]");
    }
    if (n_past == seq.n_past()) {
        seq.is_proposed = false;
        seq.draft = {};
        return;
    }
    const int32_t n_back = seq.n_past() - n_past;
    const int32_t n_back_max = seq.i_decode == engine.n_decodes ? seq.n_back_max : 0;
    if (n_past > 0 && engine.target_rollback != rollback_kind::any && n_back > n_back_max) {
        fail(SPEC_ERR_UNSUPPORTED, "a recurrent target can go back " + std::to_string(n_back_max) +
                                       " tokens here, not " + std::to_string(n_back) +
                                       ": as many as its last decode holds, if no other followed");
    }
    if (engine.target_rollback == rollback_kind::any &&
        !holds_window(engine.target.get(), seq_id, n_past)) {
        no_window(n_past);
    }
    if (!llama_memory_seq_rm(engine.target_memory(), seq_id, n_past > 0 ? n_past : -1, -1)) {
        fail(SPEC_ERR_UNSUPPORTED, "the target cannot go back from here; decode first");
    }
    seq.n_back_max = 0; // once per decode
    seq.is_proposed = false;
    seq.has_emitted = false;
    seq.draft = {};
    if (engine.spec) {
        cut_draft(engine, seq_id, n_past);
        if (!drafts_blocks(engine.limits.draft_type)) {
            make_cold(engine, seq_id); // the draft's hidden rows do not go back with the cache
        }
        restart_unless_held(engine, seq_id, n_past);
    }
    if (engine.is_ngram()) {
        begin_drafter(engine, seq, seq_id); // what it has learnt includes the tokens taken back
    }
    seq.tokens.resize(static_cast<size_t>(n_past));
    seq.hidden = {};
    seq.n_heard = std::min(seq.n_heard, n_past);
    seq.known.clear();
}

// Snapshots.

constexpr char SNAPSHOT_MAGIC[8] = {'D', 'R', 'A', 'F', 'T', 'S', 'E', 'Q'};
constexpr uint32_t SNAPSHOT_FORMAT = 3;
constexpr size_t CHECKSUM_BYTES = sizeof(uint64_t);

// What a snapshot is bound to. All members have 8 bytes, so that there is no padding.
struct snapshot_header {
    char magic[8];
    uint64_t format;
    uint64_t n_bytes; // of the whole
    uint64_t llama_version;
    uint64_t target;
    uint64_t draft;
    int64_t draft_type;
    int64_t n_ctx_seq;
    int64_t n_draft_max;
    int64_t n_rs_seq;
    int64_t n_streams; // separate KV caches; 1 when all sequences share one
    int64_t flash_attention;
    int64_t probabilistic;
    int64_t n_min;
    double p_min;
};

snapshot_header header_of(const spec_engine & engine) {
    const spec_engine_limits & l = engine.limits;
    const char * version = llama_version();
    snapshot_header h = {};
    std::memcpy(h.magic, SNAPSHOT_MAGIC, sizeof h.magic);
    h.format = SNAPSHOT_FORMAT;
    h.llama_version = digest(sizeof(void *), version, std::strlen(version));
    h.target = engine.target_model->fingerprint;
    h.draft = engine.draft_model != nullptr ? engine.draft_model->fingerprint : 0;
    h.draft_type = l.draft_type;
    h.n_ctx_seq = l.n_ctx_seq;
    h.n_draft_max = l.n_draft_max;
    h.n_rs_seq = l.n_rs_seq;
    h.n_streams = l.kv_unified ? 1 : l.n_seq_max;
    h.flash_attention = engine.params.flash_attention;
    h.probabilistic = engine.params.probabilistic;
    h.n_min = engine.params.n_min;
    h.p_min = static_cast<double>(engine.params.p_min);
    return h;
}

// Writes values to a string, or reads them from bytes. Both have the same members, so that one
// function describes the layout of a thing for both ways.
struct snapshot_writer {
    std::string bytes;

    template <typename T> void value(const T & x) {
        static_assert(std::is_arithmetic<T>::value, "no padding, no pointers");
        bytes.append(reinterpret_cast<const char *>(&x), sizeof x);
    }

    template <typename T> void array(const T & items) { // a vector or a string
        using item = typename T::value_type;
        static_assert(std::is_trivially_copyable<item>::value, "written as bytes");
        value(static_cast<uint64_t>(items.size()));
        bytes.append(reinterpret_cast<const char *>(items.data()), items.size() * sizeof(item));
    }
};

struct snapshot_reader {
    const uint8_t * at;
    const uint8_t * end;

    const uint8_t * take(uint64_t n) {
        if (n > static_cast<uint64_t>(end - at)) {
            fail(SPEC_ERR_SNAPSHOT_CORRUPT, "a part of the snapshot reaches beyond its end");
        }
        const uint8_t * start = at;
        at += n;
        return start;
    }

    template <typename T> void value(T & x) { std::memcpy(&x, take(sizeof x), sizeof x); }

    void value(bool & x) {
        uint8_t byte = 0;
        value(byte);
        x = byte != 0; // other bytes are no bool
    }

    template <typename T> void array(T & items) {
        using item = typename T::value_type;
        uint64_t n = 0;
        value(n);
        if (n > static_cast<uint64_t>(end - at) / sizeof(item)) {
            fail(SPEC_ERR_SNAPSHOT_CORRUPT, "a part of the snapshot reaches beyond its end");
        }
        items.resize(static_cast<size_t>(n));
        if (n > 0) {
            std::memcpy(&items[0], take(n * sizeof(item)), static_cast<size_t>(n) * sizeof(item));
        }
    }
};

// A new field of spec_sampler_params belongs into visit_params, or a restored sampler lacks it.
static_assert(sizeof(spec_sampler_params) == 168, "spec_sampler_params and visit_params differ");

template <typename Archive, typename Params> void visit_params(Archive & io, Params & p) {
    io.value(p.seed);
    io.value(p.temperature);
    io.value(p.top_k);
    io.value(p.top_p);
    io.value(p.min_p);
    io.value(p.typical_p);
    io.value(p.top_n_sigma);
    io.value(p.penalty_last_n);
    io.value(p.penalty_repeat);
    io.value(p.penalty_frequency);
    io.value(p.penalty_presence);
    io.value(p.dry_multiplier);
    io.value(p.dry_base);
    io.value(p.dry_allowed_length);
    io.value(p.dry_penalty_last_n);
    io.value(p.n_dry_breakers);
    io.value(p.xtc_probability);
    io.value(p.xtc_threshold);
    io.value(p.ignore_eos);
    io.value(p.logprobs);
    io.value(p.n_top_logprobs);
    io.value(p.min_keep);
    io.value(p.dynatemp_range);
    io.value(p.dynatemp_exponent);
    io.value(p.mirostat);
    io.value(p.mirostat_tau);
    io.value(p.mirostat_eta);
    io.value(p.adaptive_target);
    io.value(p.adaptive_decay);
    io.value(p.n_samplers);
}

void write_source(snapshot_writer & out, const sampler_source & source) {
    visit_params(out, source.params);
    out.array(source.grammar);
    out.array(source.bias);
    out.array(source.samplers);
    for (const std::string & text : source.breakers) {
        out.array(text);
    }
}

sampler_source read_source(snapshot_reader & in) {
    sampler_source source;
    visit_params(in, source.params);
    in.array(source.grammar);
    in.array(source.bias);
    in.array(source.samplers);
    check_range("n_samplers", source.params.n_samplers, -1, 64);
    if (static_cast<int32_t>(source.samplers.size()) != std::max(source.params.n_samplers, 0)) {
        fail(SPEC_ERR_SNAPSHOT_CORRUPT, "the list of samplers has another length than it says");
    }
    check_range("n_dry_breakers", source.params.n_dry_breakers, -1, DRY_BREAKERS_MAX);
    for (int32_t i = 0; i < source.params.n_dry_breakers; ++i) {
        source.breakers.emplace_back();
        in.array(source.breakers.back());
    }
    return source;
}

// A sequence as a snapshot has it: all but the cells, which stay where they are in the bytes.
struct snapshot_parts {
    sequence seq;
    std::string sampler_state;
    std::string drafter_state;
    const uint8_t * target = nullptr;
    uint64_t n_target = 0;
    const uint8_t * draft = nullptr;
    uint64_t n_draft = 0;
};

// Whether the next draft of a sequence depends on more than its cells.
bool has_drafter_state(const spec_engine & engine) {
    return engine.spec && !drafts_blocks(engine.limits.draft_type);
}

template <typename Archive, typename Sequence> void visit_sequence(Archive & io, Sequence & seq) {
    io.value(seq.is_cold);
    io.value(seq.is_awaited);
    io.value(seq.has_emitted);
    io.value(seq.has_drafter_begun);
    io.value(seq.n_prompt);
    io.value(seq.id_last);
    io.array(seq.tokens);
    io.array(seq.heard);
    io.value(seq.n_heard);
    io.array(seq.known);
    io.array(seq.ngram_events);
}

// What a sampler's parameters and tokens do not tell: its random generators and adaptive terms.
std::string write_sampler_state(const spec_sampler & sampler) {
    std::ostringstream rng;
    rng.imbue(std::locale::classic());
    llama_rng_write(rng, sampler.rng);
    std::string rest;
    if (!llama_sampler_get_state(sampler.samplers(), rest)) {
        fail(SPEC_ERR_UNSUPPORTED, "the sequence's sampler has a state that cannot be written");
    }
    return rng.str() + rest;
}

// All of a snapshot between the header and the cells.
std::string write_parts(spec_engine & engine, const sequence & seq, int32_t seq_id) {
    snapshot_writer out;
    visit_sequence(out, seq);
    write_source(out, seq.sampler->source);
    std::string state = write_sampler_state(*seq.sampler);
    out.array(state);
    state.clear();
    if (has_drafter_state(engine) &&
        !common_speculative_seq_save(engine.spec.get(), seq_id, state)) {
        fail(SPEC_ERR_UNSUPPORTED, "the drafter's state cannot be written");
    }
    out.array(state);
    return std::move(out.bytes);
}

// Writes a context's cells of a sequence behind their size and returns the place after them.
uint8_t * write_cells(llama_context * ctx, int32_t seq_id, uint8_t * at, uint64_t n) {
    std::memcpy(at, &n, sizeof n);
    at += sizeof n;
    if (n > 0 && llama_state_seq_get_data_ext(ctx, at, n, seq_id, 0) != n) {
        fail(SPEC_ERR_INTERNAL, "llama.cpp wrote fewer cells than it announced" + llama_reason());
    }
    return at + n;
}

void save_sequence(spec_engine & engine, int32_t seq_id, uint8_t * buf, size_t cap,
                   size_t & n_needed) {
    const sequence & seq = begun(engine, seq_id);
    if (seq.is_proposed) {
        bad_plan(seq_id, "a proposal is pending; accept it first");
    }
    if (is_unprocessed(engine, seq_id)) {
        bad_plan(seq_id, "its last batch has not been processed");
    }
    flush_copies(engine);
    last_llama_error.clear();
    snapshot_header header = header_of(engine);
    const std::string parts = write_parts(engine, seq, seq_id);
    const bool has_draft = has_draft_cells(engine);
    const uint64_t n_target = llama_state_seq_get_size_ext(engine.target.get(), seq_id, 0);
    const uint64_t n_draft =
        has_draft ? llama_state_seq_get_size_ext(engine.draft.get(), seq_id, 0) : 0;
    n_needed =
        sizeof header + parts.size() + 2 * sizeof(uint64_t) + n_target + n_draft + CHECKSUM_BYTES;
    if (buf == nullptr || cap < n_needed) {
        fail(SPEC_ERR_BUFFER_TOO_SMALL, "the snapshot has " + std::to_string(n_needed) + " bytes");
    }
    header.n_bytes = n_needed;
    std::memcpy(buf, &header, sizeof header);
    std::memcpy(buf + sizeof header, parts.data(), parts.size());
    uint8_t * at = buf + sizeof header + parts.size();
    at = write_cells(engine.target.get(), seq_id, at, n_target);
    at = write_cells(engine.draft.get(), seq_id, at, n_draft);
    const uint64_t checksum = digest(0, buf, n_needed - CHECKSUM_BYTES);
    std::memcpy(at, &checksum, sizeof checksum);
}

void check_whole(const uint8_t * buf, size_t n) {
    snapshot_header found;
    if (n < sizeof found + CHECKSUM_BYTES) {
        fail(SPEC_ERR_SNAPSHOT_TRUNCATED,
             "the snapshot has " + std::to_string(n) + " bytes, fewer than any snapshot");
    }
    std::memcpy(&found, buf, sizeof found);
    if (std::memcmp(found.magic, SNAPSHOT_MAGIC, sizeof found.magic) != 0) {
        fail(SPEC_ERR_SNAPSHOT_CORRUPT, "these bytes are no snapshot");
    }
    if (found.format != SNAPSHOT_FORMAT) {
        fail(SPEC_ERR_SNAPSHOT_VERSION, "the snapshot has format " + std::to_string(found.format) +
                                            "; expected " + std::to_string(SNAPSHOT_FORMAT));
    }
    if (found.n_bytes > n) {
        fail(SPEC_ERR_SNAPSHOT_TRUNCATED, "the snapshot has " + std::to_string(n) + " bytes of " +
                                              std::to_string(found.n_bytes));
    }
    uint64_t checksum = 0;
    std::memcpy(&checksum, buf + n - CHECKSUM_BYTES, sizeof checksum);
    if (found.n_bytes != n || checksum != digest(0, buf, n - CHECKSUM_BYTES)) {
        fail(SPEC_ERR_SNAPSHOT_CORRUPT, "the snapshot's checksum or size is wrong");
    }
}

template <typename T> void check_same(const char * name, T found, T wanted) {
    if (found != wanted) {
        fail(SPEC_ERR_SNAPSHOT_OTHER_CONFIG, std::string(name) + " is " + std::to_string(found) +
                                                 " in the snapshot, " + std::to_string(wanted) +
                                                 " in this engine");
    }
}

void check_binding(const snapshot_header & found, const snapshot_header & wanted) {
    if (found.llama_version != wanted.llama_version) {
        fail(SPEC_ERR_SNAPSHOT_VERSION, "the snapshot was written with another llama.cpp");
    }
    check_same("draft_type", found.draft_type, wanted.draft_type);
    if (found.target != wanted.target) {
        fail(SPEC_ERR_SNAPSHOT_OTHER_MODEL, "the snapshot belongs to another target model");
    }
    if (found.draft != wanted.draft) {
        fail(SPEC_ERR_SNAPSHOT_OTHER_MODEL, "the snapshot belongs to another draft model");
    }
    check_same("n_ctx_seq", found.n_ctx_seq, wanted.n_ctx_seq);
    check_same("n_draft_max", found.n_draft_max, wanted.n_draft_max);
    check_same("n_rs_seq", found.n_rs_seq, wanted.n_rs_seq);
    check_same("the number of separate KV caches", found.n_streams, wanted.n_streams);
    check_same("flash_attention", found.flash_attention, wanted.flash_attention);
    check_same("probabilistic", found.probabilistic, wanted.probabilistic);
    check_same("n_min", found.n_min, wanted.n_min);
    check_same("p_min", found.p_min, wanted.p_min);
}

[[noreturn]] void corrupt(const std::string & what) {
    fail(SPEC_ERR_SNAPSHOT_CORRUPT, "the snapshot contradicts itself: " + what);
}

void check_parts(const spec_engine & engine, const sequence & seq) {
    const int32_t n_vocab = engine.limits.n_vocab;
    const auto is_token = [&](int32_t x) { return x >= 0 && x < n_vocab; };
    if (seq.n_past() > engine.limits.n_ctx_seq) {
        corrupt("it has more tokens than its context");
    }
    if (!std::all_of(seq.tokens.begin(), seq.tokens.end(), is_token) ||
        !std::all_of(seq.heard.begin(), seq.heard.end(),
                     [&](int32_t x) { return is_token(x < 0 ? -1 - x : x); }) ||
        (seq.id_last != LLAMA_TOKEN_NULL && !is_token(seq.id_last)) ||
        (seq.has_emitted && seq.id_last == LLAMA_TOKEN_NULL)) {
        corrupt("a token is out of range");
    }
    if (seq.is_awaited && !seq.is_cold) {
        corrupt("it awaits a draft state that it has");
    }
    const int32_t n_tokens_known = static_cast<int32_t>(seq.known.size());
    if (!std::all_of(seq.known.begin(), seq.known.end(), is_token) || seq.n_heard < 0 ||
        seq.n_heard > engine.limits.n_ctx_seq + 1 ||
        (n_tokens_known > 0 ? n_tokens_known != seq.n_heard : seq.n_heard > seq.n_past() + 1)) {
        corrupt("what its sampler knows is out of range");
    }
    int32_t n_before = 0;
    for (const ngram_event & e : seq.ngram_events) {
        if (!engine.is_ngram() || e.n_past < n_before || e.n_past > seq.n_past() ||
            !is_token(e.id_last) || e.n_draft < 1 || e.n_draft > engine.limits.n_draft_max ||
            e.n_accepted < -1 || e.n_accepted > e.n_draft) {
            corrupt("a draft is out of range");
        }
        n_before = e.n_past;
    }
}

// Feeds a new sampler what the old one was fed. A grammar aborts the process on a token that it
// does not allow, so a second one is asked before.
void replay_sampler(const spec_engine & engine, const sequence & seq, const std::string & grammar) {
    const std::unique_ptr<llama_sampler, void (*)(llama_sampler *)> check(
        grammar.empty()
            ? nullptr
            : llama_sampler_init_grammar(engine.target_model->vocab, grammar.c_str(), "root"),
        llama_sampler_free);
    for (const int32_t x : seq.heard) {
        const llama_token token = x < 0 ? -1 - x : x;
        if (check && x < 0) {
            llama_token_data candidate = {token, 1.0f, 0.0f};
            llama_token_data_array candidates = {&candidate, 1, -1, false};
            llama_sampler_apply(check.get(), &candidates);
            if (!std::isfinite(candidate.logit)) {
                corrupt("its tokens do not follow its grammar");
            }
            llama_sampler_accept(check.get(), token);
        }
        seq.sampler->accept(token, x < 0);
    }
}

void read_sampler_state(spec_sampler & sampler, const std::string & state) {
    std::istringstream in(state);
    in.imbue(std::locale::classic());
    llama_rng_read(in, sampler.rng);
    if (!in.good() || !llama_sampler_set_state(sampler.samplers(),
                                               state.substr(static_cast<size_t>(in.tellg())))) {
        corrupt("the sampler's random state does not fit its parameters");
    }
}

void restore_sampler(const spec_engine & engine, snapshot_reader & in, sequence & seq) {
    std::string state;
    try {
        const sampler_source source = read_source(in);
        in.array(state);
        std::vector<const char *> pointers;
        seq.sampler.reset(make_sampler(*engine.target_model, source.view(pointers)));
        replay_sampler(engine, seq, source.grammar);
    } catch (const failure & e) {
        corrupt(e.what()); // parameters that no sampler can have
    }
    read_sampler_state(*seq.sampler, state);
}

// The row that a drafter goes on from. A draft from another position would fail the drafts of all
// sequences in that batch; one that is not finite breaks the order that sorting relies on.
void check_drafter_state(const spec_engine & engine, const sequence & seq,
                         const std::string & state) {
    const bool is_eagle3 = engine.limits.draft_type == SPEC_DRAFT_EAGLE3;
    if (!is_eagle3 && engine.limits.draft_type != SPEC_DRAFT_MTP) {
        return; // no row
    }
    const llama_model * model = llama_get_model(engine.draft.get());
    const int32_t width = is_eagle3 ? llama_model_n_embd(model) : llama_model_n_embd_out(model);
    llama_pos pos = -1;
    const size_t n_pos = is_eagle3 ? sizeof pos : 0;
    std::vector<float> row(static_cast<size_t>(width));
    const size_t n_row = row.size() * sizeof(float);
    if (state.size() < n_pos + n_row) {
        corrupt("the drafter's state has another size");
    }
    std::memcpy(&pos, state.data(), n_pos);
    std::memcpy(row.data(), state.data() + n_pos, n_row);
    if (pos < -1 || pos >= seq.n_past() ||
        !std::all_of(row.begin(), row.end(), [](float x) { return std::isfinite(x); })) {
        corrupt("the drafter's state is out of range");
    }
}

// Everything that can be wrong with a snapshot and shows without touching the contexts.
snapshot_parts read_snapshot(const spec_engine & engine, const uint8_t * buf, size_t n) {
    check_whole(buf, n);
    snapshot_header found;
    std::memcpy(&found, buf, sizeof found);
    check_binding(found, header_of(engine));
    snapshot_reader in{buf + sizeof found, buf + n - CHECKSUM_BYTES};
    snapshot_parts parts;
    visit_sequence(in, parts.seq);
    check_parts(engine, parts.seq);
    restore_sampler(engine, in, parts.seq);
    in.array(parts.drafter_state);
    check_drafter_state(engine, parts.seq, parts.drafter_state);
    in.value(parts.n_target);
    parts.target = in.take(parts.n_target);
    in.value(parts.n_draft);
    parts.draft = in.take(parts.n_draft);
    if (in.at != in.end || (parts.n_draft > 0) != has_draft_cells(engine)) {
        corrupt("its parts do not fill it");
    }
    return parts;
}

// Lets a new n-gram drafter live through the drafts of the old one.
void replay_ngram(spec_engine & engine, sequence & seq, int32_t seq_id) {
    const std::vector<ngram_event> events = std::move(seq.ngram_events);
    const llama_tokens all = std::move(seq.tokens);
    seq.ngram_events.clear();
    seq.tokens.clear();
    seq.has_drafter_begun = false;
    for (const ngram_event & e : events) {
        seq.tokens.insert(seq.tokens.end(), all.begin() + seq.n_past(), all.begin() + e.n_past);
        arm(engine, seq, seq_id, e.n_draft, e.id_last);
        common_speculative_draft(seq.ngram.get());
        if (e.n_accepted > static_cast<int32_t>(seq.draft.tokens.size()) ||
            (e.n_accepted >= 0 && seq.draft.tokens.empty())) {
            corrupt("a draft was accepted that nobody made");
        }
        if (e.n_accepted >= 0) {
            accept_draft(engine, seq, seq_id, e.n_accepted);
        }
    }
    seq.draft = {};
    seq.tokens = all;
}

void restore_cells(llama_context * ctx, int32_t seq_id, const uint8_t * cells, uint64_t n,
                   int32_t n_past) {
    if (llama_state_seq_set_data_ext(ctx, cells, n, seq_id, 0) != n ||
        llama_memory_seq_pos_max(llama_get_memory(ctx), seq_id) >= n_past) {
        fail(SPEC_ERR_SNAPSHOT_CORRUPT, "llama.cpp refuses the snapshot's cells" + llama_reason());
    }
}

void restore_sequence(spec_engine & engine, int32_t seq_id, snapshot_parts & parts) {
    sequence & seq = at(engine, seq_id);
    const int32_t n_past = parts.seq.n_past();
    flush_copies(engine);
    restore_cells(engine.target.get(), seq_id, parts.target, parts.n_target, n_past);
    if (llama_memory_seq_pos_max(engine.target_memory(), seq_id) != n_past - 1) {
        corrupt("it has other cells than tokens");
    }
    if (parts.draft != nullptr && parts.n_draft > 0) {
        restore_cells(engine.draft.get(), seq_id, parts.draft, parts.n_draft, n_past);
    }
    const bool has_begun = parts.seq.has_drafter_begun;
    seq = std::move(parts.seq);
    std::vector<ngram_event> events = std::move(seq.ngram_events);
    begin_drafter(engine, seq, seq_id);
    seq.ngram_events = std::move(events);
    if (seq.ngram) {
        replay_ngram(engine, seq, seq_id);
    }
    seq.has_drafter_begun = has_begun;
    if (has_drafter_state(engine) &&
        !common_speculative_seq_load(engine.spec.get(), seq_id, parts.drafter_state)) {
        corrupt("the drafter's state has another size");
    }
    seq.is_begun = true;
}

void check_cells(const spec_engine & engine, const sequence & seq) {
    int64_t n_cells = seq.n_past();
    for (const sequence & other : engine.sequences) {
        n_cells += other.n_past();
    }
    if (engine.limits.kv_unified && n_cells > engine.limits.n_ctx) {
        fail(SPEC_ERR_NO_ROOM,
             "the snapshot needs " + std::to_string(seq.n_past()) + " KV cells; " +
                 std::to_string(engine.limits.n_ctx - n_cells + seq.n_past()) + " are free");
    }
}

void load_sequence(spec_engine & engine, int32_t seq_id, const uint8_t * buf, size_t n) {
    if (at(engine, seq_id).is_begun) {
        fail(SPEC_ERR_SEQ_BUSY, "sequence " + std::to_string(seq_id) + " has begun already");
    }
    if (is_unprocessed(engine, seq_id)) {
        bad_plan(seq_id, "a batch with tokens of its former sequence has not been processed");
    }
    last_llama_error.clear();
    snapshot_parts parts = read_snapshot(engine, buf, n);
    check_cells(engine, parts.seq);
    try {
        restore_sequence(engine, seq_id, parts);
    } catch (...) {
        clear_sequence(engine, seq_id);
        throw;
    }
}

// Forks.

int32_t prompt_length(const sequence & seq) {
    return seq.has_emitted ? seq.n_prompt : seq.n_past();
}

void check_fork_source(spec_engine & engine, int32_t src, int32_t n_past) {
    const sequence & seq = begun(engine, src);
    if (engine.target_rollback != rollback_kind::any) {
        fail(SPEC_ERR_UNSUPPORTED,
             "the state of a recurrent target cannot be shared; prefill each sequence");
    }
    if (seq.is_proposed) {
        bad_plan(src, "a proposal is pending; accept it first");
    }
    if (engine.is_decoded && !engine.is_processed && engine.spec) {
        fail(SPEC_ERR_BAD_PLAN, "the last batch has not been processed");
    }
    const int32_t n_max = std::min(prompt_length(seq), seq.n_past() - 1);
    if (n_past < 1 || n_past > n_max) {
        bad_plan(src, "n_past is " + std::to_string(n_past) +
                          "; a fork takes tokens of the prompt, all but the last that the source "
                          "holds: [1, " +
                          std::to_string(n_max) + "]");
    }
    if (!holds_window(engine.target.get(), src, n_past)) {
        no_window(n_past);
    }
}

void check_fork(spec_engine & engine, int32_t src, int32_t n_past, const int32_t * dst,
                spec_sampler * const * samplers, int32_t n) {
    check_fork_source(engine, src, n_past);
    check_range("n", n, 0, engine.limits.n_seq_max);
    for (int32_t i = 0; i < n; ++i) {
        const int32_t id = (&deref(dst, "dst"))[i];
        if (at(engine, id).is_begun || std::find(dst, dst + i, id) != dst + i) {
            fail(SPEC_ERR_SEQ_BUSY, "sequence " + std::to_string(id) + " has begun already");
        }
        const spec_sampler & sampler = deref((&deref(samplers, "samplers"))[i], "sampler");
        if (std::find(samplers, samplers + i, &sampler) != samplers + i) {
            fail(SPEC_ERR_INVALID_ARGUMENT, "a sampler is given twice");
        }
        if (sampler.n_vocab != engine.limits.n_vocab) {
            fail(SPEC_ERR_INVALID_ARGUMENT,
                 "the sampler was made for a model with another vocabulary");
        }
    }
}

// Gives a fork the hidden row that its first token pairs with, where it is known.
void carry_hidden_row(spec_engine & engine, const sequence & from, int32_t dst, int32_t n_past) {
    const std::vector<float> & row = from.hidden.at(n_past);
    std::string state;
    if (row.empty() || !common_speculative_seq_save(engine.spec.get(), dst, state)) {
        return;
    }
    const size_t n_bytes = row.size() * sizeof(float);
    if (state.size() < n_bytes) {
        fail(SPEC_ERR_INTERNAL, "the drafter's state is shorter than a hidden row");
    }
    std::memcpy(state.data(), row.data(), n_bytes); // the state begins with it (patch 0003)
    if (!common_speculative_seq_load(engine.spec.get(), dst, state)) {
        fail(SPEC_ERR_INTERNAL, "the drafter refused a hidden row");
    }
}

// Whole sequences are copied and then cut: llama.cpp copies between separate caches only so.
void fork_one(spec_engine & engine, int32_t src, int32_t n_past, int32_t dst,
              std::unique_ptr<spec_sampler> sampler) {
    begin_sequence(engine, dst, std::move(sampler));
    const sequence & from = engine.sequences[static_cast<size_t>(src)];
    sequence & to = engine.sequences[static_cast<size_t>(dst)];
    to.tokens.assign(from.tokens.begin(), from.tokens.begin() + n_past);
    to.is_cold = from.is_cold;
    to.is_awaited = from.is_awaited;
    for (const llama_token token : to.tokens) {
        to.feed(token);
    }
    to.n_heard = n_past;
    llama_memory_seq_cp(engine.target_memory(), src, dst, -1, -1);
    if (engine.draft && !from.is_cold) {
        llama_memory_seq_cp(engine.draft_memory(), src, dst, -1, -1);
        llama_memory_seq_rm(engine.draft_memory(), dst, n_past, -1);
    }
    carry_hidden_row(engine, from, dst, n_past);
    engine.has_copies_due = !engine.limits.kv_unified;
    if (!llama_memory_seq_rm(engine.target_memory(), dst, n_past, -1)) {
        fail(SPEC_ERR_INTERNAL, "the copy could not be cut");
    }
    restart_unless_held(engine, dst, n_past);
}

void fork_sequences(spec_engine & engine, int32_t src, int32_t n_past, const int32_t * dst,
                    spec_sampler ** samplers, int32_t n) {
    if (n_past == -1) {
        const sequence & seq = begun(engine, src);
        n_past = std::min(prompt_length(seq), seq.n_past() - 1);
    }
    check_fork(engine, src, n_past, dst, samplers, n);
    try {
        for (int32_t i = 0; i < n; ++i) {
            std::unique_ptr<spec_sampler> owned(samplers[i]);
            samplers[i] = nullptr;
            fork_one(engine, src, n_past, dst[i], std::move(owned));
        }
    } catch (...) {
        std::for_each(dst, dst + n, [&](int32_t id) { clear_sequence(engine, id); });
        throw;
    }
}

// Starts and parks.

void check_start_source(spec_engine & engine, const spec_start & start) {
    const bool is_copy = start.source != -1;
    const bool is_loaded = start.snapshot != nullptr;
    if (start.n_kept < 0 || start.n_kept >= engine.limits.n_ctx_seq) {
        bad_plan(start.seq_id, "n_kept is " + std::to_string(start.n_kept) + "; expected [0, " +
                                   std::to_string(engine.limits.n_ctx_seq) + ")");
    }
    if ((is_copy && is_loaded) || (start.n_kept == 0 && (is_copy || is_loaded))) {
        bad_plan(start.seq_id, "a source or a snapshot, one of them, is for tokens to be kept");
    }
    if (start.source == start.seq_id) {
        bad_plan(start.seq_id, "it cannot be its own source");
    }
    if (start.n_kept == 0 || is_loaded) {
        return;
    }
    const sequence & from = is_copy ? begun(engine, start.source) : at(engine, start.seq_id);
    if (from.is_proposed) {
        bad_plan(start.seq_id, "a proposal is pending where its tokens are; accept it first");
    }
    if (start.n_kept > from.n_past()) {
        bad_plan(start.seq_id, "n_kept is " + std::to_string(start.n_kept) + "; " +
                                   std::to_string(from.n_past()) + " tokens are there");
    }
}

void check_start_sampler(spec_engine & engine, const spec_start & start,
                         const spec_sampler * sampler) {
    if (sampler == nullptr) {
        if (start.snapshot == nullptr || !start.is_resumed) {
            fail(SPEC_ERR_INVALID_ARGUMENT, "sampler is NULL");
        }
        return;
    }
    if (sampler->n_vocab != engine.limits.n_vocab) {
        fail(SPEC_ERR_INVALID_ARGUMENT, "the sampler was made for a model with another vocabulary");
    }
    const sampler_history & history = sampler->history;
    if (!start.is_resumed && !history.heard.empty()) {
        bad_plan(start.seq_id, "a parked sampler needs is_resumed");
    }
    if (history.has_emitted && start.n_kept >= static_cast<int32_t>(history.known.size())) {
        bad_plan(start.seq_id, "n_kept is " + std::to_string(start.n_kept) +
                                   "; the sampler knows " + std::to_string(history.known.size()) +
                                   " tokens, of which the last must be computed");
    }
}

void check_start(spec_engine & engine, const spec_start & start, const spec_sampler * sampler) {
    at(engine, start.seq_id);
    if (engine.is_decoded && !engine.is_processed && engine.spec) {
        fail(SPEC_ERR_BAD_PLAN, "the last batch decoded by hand has not been processed");
    }
    check_start_source(engine, start);
    check_start_sampler(engine, start, sampler);
}

// Bytes of the hidden rows in a drafter's saved state; the draft sampler's random state follows.
size_t drafter_row_bytes(const spec_engine & engine) {
    switch (engine.limits.draft_type) {
    case SPEC_DRAFT_MTP:
        return static_cast<size_t>(llama_model_n_embd_out(llama_get_model(engine.draft.get()))) *
               sizeof(float);
    case SPEC_DRAFT_SIMPLE:
        return 0;
    default:
        return std::numeric_limits<size_t>::max(); // nothing but rows
    }
}

std::string drafter_state(spec_engine & engine, int32_t seq_id) {
    std::string state;
    if (engine.spec && !common_speculative_seq_save(engine.spec.get(), seq_id, state)) {
        state.clear();
    }
    return state;
}

// The rows that the drafter pairs with the next token of a sequence; empty where there are none.
std::string drafter_rows(spec_engine & engine, int32_t seq_id) {
    const std::string state = drafter_state(engine, seq_id);
    return state.substr(0, std::min(state.size(), drafter_row_bytes(engine)));
}

std::string drafter_rng(spec_engine & engine, int32_t seq_id) {
    const std::string state = drafter_state(engine, seq_id);
    return state.substr(std::min(state.size(), drafter_row_bytes(engine)));
}

// Gives a slot with tokens, or without any, its sampler. A new one is fed the tokens; a resumed one
// goes on where it was.
void adopt_sampler(spec_engine & engine, int32_t seq_id, std::unique_ptr<spec_sampler> sampler) {
    sequence & seq = at(engine, seq_id);
    sampler_history history = std::move(sampler->history);
    sampler->history = {};
    seq.sampler = std::move(sampler);
    seq.heard = std::move(history.heard);
    seq.known = std::move(history.known);
    seq.n_heard = static_cast<int32_t>(seq.known.size());
    seq.has_emitted = history.has_emitted;
    seq.n_prompt = history.n_prompt;
    if (history.has_emitted) {
        seq.id_last = seq.known.back();
    }
    for (int32_t i = seq.n_heard; i < seq.n_past(); ++i) {
        seq.feed(seq.tokens[static_cast<size_t>(i)]);
    }
    seq.n_heard = std::max(seq.n_heard, seq.n_past());
    if (!history.drafter_rng.empty() && engine.spec) {
        const std::string state = drafter_rows(engine, seq_id) + history.drafter_rng;
        seq.has_drafter_begun = history.has_drafter_begun &&
                                common_speculative_seq_load(engine.spec.get(), seq_id, state);
    }
    seq.is_begun = true;
}

// Takes the sampler out of a slot with all that it knows of the sequence. The slot lacks it then.
std::unique_ptr<spec_sampler> park_sampler(spec_engine & engine, int32_t seq_id) {
    sequence & seq = begun(engine, seq_id);
    sampler_history history;
    history.known = static_cast<int32_t>(seq.known.size()) > seq.n_past() ? seq.known : seq.tokens;
    if (seq.has_emitted && history.known.size() == seq.tokens.size()) {
        history.known.push_back(seq.id_last);
    }
    history.heard = seq.heard;
    history.has_emitted = seq.has_emitted;
    history.has_drafter_begun = seq.has_drafter_begun;
    history.n_prompt = seq.n_prompt;
    history.drafter_rng = drafter_rng(engine, seq_id);
    seq.sampler->history = std::move(history);
    return std::move(seq.sampler);
}

std::unique_ptr<spec_sampler> park_sequence(spec_engine & engine, int32_t seq_id) {
    const sequence & seq = begun(engine, seq_id);
    if (seq.is_proposed || is_unprocessed(engine, seq_id)) {
        bad_plan(seq_id, "a proposal is pending, or its last batch was not processed");
    }
    std::unique_ptr<spec_sampler> sampler = park_sampler(engine, seq_id);
    clear_sequence(engine, seq_id);
    return sampler;
}

// A sequence with the first tokens of another, or of itself, and no sampler yet. `rows` belong to
// the last of them and go on with it; without them the drafter's first row is poorer.
void begin_kept(spec_engine & engine, int32_t seq_id, const sequence & from, int32_t n_kept,
                const std::string & rows) {
    llama_tokens tokens(from.tokens.begin(), from.tokens.begin() + n_kept);
    const bool is_cold = from.is_cold;
    const bool is_awaited = from.is_awaited;
    sequence & seq = at(engine, seq_id);
    seq = sequence{};
    begin_drafter(engine, seq, seq_id);
    if (!rows.empty() && !common_speculative_seq_load(engine.spec.get(), seq_id, rows)) {
        fail(SPEC_ERR_INTERNAL, "the drafter's state has another size");
    }
    seq.tokens = std::move(tokens);
    seq.is_cold = is_cold;
    seq.is_awaited = is_awaited;
}

// EAGLE-3's row of the last kept token was written with the token that followed it there. It stays:
// a poorer row is better than none, after which llama.cpp refuses the positions that follow.
void cut_cells(spec_engine & engine, int32_t seq_id, int32_t n_kept) {
    if (!llama_memory_seq_rm(engine.target_memory(), seq_id, n_kept, -1)) {
        fail(SPEC_ERR_UNSUPPORTED, "the target cannot go back from here");
    }
    if (engine.draft) {
        llama_memory_seq_rm(engine.draft_memory(), seq_id, n_kept, -1);
    }
}

// Whether the first tokens of a slot can be kept without the others. The snapshots of a recurrent
// state last until the next decode only.
bool can_keep_part(const spec_engine & engine, int32_t seq_id, int32_t n_kept) {
    return engine.target_rollback == rollback_kind::any &&
           holds_window(engine.target.get(), seq_id, n_kept);
}

// Goes on from the first tokens that the slot holds. False where the target cannot go back.
bool keep_in_place(spec_engine & engine, int32_t seq_id, int32_t n_kept) {
    const sequence & seq = engine.sequences[static_cast<size_t>(seq_id)];
    const bool is_whole = n_kept == seq.n_past();
    if (!is_whole && !can_keep_part(engine, seq_id, n_kept)) {
        return false;
    }
    const std::string rows =
        is_whole && !seq.is_cold ? drafter_rows(engine, seq_id) : std::string();
    if (!is_whole) {
        cut_cells(engine, seq_id, n_kept);
    }
    begin_kept(engine, seq_id, seq, n_kept, rows);
    if (!is_whole) {
        restart_unless_held(engine, seq_id, n_kept);
    }
    return true;
}

// Whole sequences are copied and then cut: llama.cpp copies between separate caches only so.
bool keep_copy(spec_engine & engine, int32_t seq_id, int32_t source, int32_t n_kept) {
    if (engine.target_rollback != rollback_kind::any) {
        return false; // the state of a recurrent target cannot be shared
    }
    const sequence & from = engine.sequences[static_cast<size_t>(source)];
    const bool is_whole = n_kept == from.n_past();
    if (!is_whole && !can_keep_part(engine, source, n_kept)) {
        return false;
    }
    const std::string rows =
        is_whole && !from.is_cold ? drafter_rows(engine, source) : std::string();
    clear_sequence(engine, seq_id);
    llama_memory_seq_cp(engine.target_memory(), source, seq_id, -1, -1);
    if (engine.draft && !from.is_cold) {
        llama_memory_seq_cp(engine.draft_memory(), source, seq_id, -1, -1);
    }
    engine.has_copies_due = !engine.limits.kv_unified;
    if (!is_whole) {
        cut_cells(engine, seq_id, n_kept);
    }
    begin_kept(engine, seq_id, from, n_kept, rows);
    if (!is_whole) {
        restart_unless_held(engine, seq_id, n_kept);
    }
    return true;
}

// Goes on from a snapshot: as it was saved, where its own sampler goes on with all of it.
bool keep_snapshot(spec_engine & engine, const spec_start & start, bool has_sampler) {
    clear_sequence(engine, start.seq_id);
    load_sequence(engine, start.seq_id, static_cast<const uint8_t *>(start.snapshot),
                  start.n_snapshot);
    sequence & seq = at(engine, start.seq_id);
    if (start.n_kept > seq.n_past()) {
        return false;
    }
    if (start.is_resumed && start.n_kept == seq.n_past()) {
        return true; // with what its drafter has learnt
    }
    std::unique_ptr<spec_sampler> own = park_sampler(engine, start.seq_id);
    if (!keep_in_place(engine, start.seq_id, start.n_kept)) {
        return false;
    }
    if (!has_sampler) {
        adopt_sampler(engine, start.seq_id, std::move(own));
    }
    return true;
}

bool keep_tokens(spec_engine & engine, const spec_start & start, bool has_sampler) {
    if (start.n_kept == 0) {
        return false;
    }
    if (start.snapshot != nullptr) {
        return keep_snapshot(engine, start, has_sampler);
    }
    return start.source >= 0 ? keep_copy(engine, start.seq_id, start.source, start.n_kept)
                             : keep_in_place(engine, start.seq_id, start.n_kept);
}

// Whatever goes wrong with the tokens that are to be kept, the slot begins: without them.
int32_t start_sequence(spec_engine & engine, const spec_start & start, spec_sampler *& sampler) {
    check_start(engine, start, sampler);
    std::unique_ptr<spec_sampler> owned(sampler);
    sampler = nullptr;
    bool is_kept = false;
    if (guarded([&] { is_kept = keep_tokens(engine, start, owned != nullptr); }) != SPEC_OK ||
        !is_kept) {
        is_kept = false;
        clear_sequence(engine, start.seq_id);
        if (owned) {
            begin_drafter(engine, at(engine, start.seq_id), start.seq_id);
        }
    }
    if (owned) {
        adopt_sampler(engine, start.seq_id, std::move(owned));
    }
    return is_kept ? start.n_kept : 0;
}

} // namespace

// Decoders.

namespace {

// A node of a draft tree in the cache: it belongs to the sequences of all branches through it, of
// which one is enough to find its ancestors.
struct tree_node {
    int32_t parent; // -1: the end of the sequence
    llama_pos pos;
    llama_seq_id branch;
};

struct decoder_sequence {
    int32_t n_past = 0;
    int32_t n_back_max = 0; // what a recurrent model can still take back
};

} // namespace

struct spec_decoder {
    const spec_model * model = nullptr;
    spec_decoder * target = nullptr; // of an EAGLE-3 decoder: whose hidden states it drafts from
    spec_decoder_limits limits = {};
    llama_context_ptr context;
    rollback_kind rollback = rollback_kind::any;
    common_batch batch;
    std::vector<decoder_sequence> sequences;
    std::vector<bool> wanted_layers; // kept from the next decode on
    std::vector<bool> kept_layers;   // kept by the last decode
    std::vector<bool> read_inputs;   // inputs of layers that an EAGLE-3 decoder reads, by layer
    std::vector<float> states;       // of an EAGLE-3 decoder: rows for the tokens that come next
    int32_t n_rows = 0;              // of the last scored decode
    int32_t n_decoded = 0;           // tokens of the last decode, scored or not

    int32_t tree_owner = -1; // the sequence that the tree hangs on
    std::vector<tree_node> tree;
    int32_t n_branches = 0;

    llama_memory_t memory() const { return llama_get_memory(context.get()); }
    bool is_recurrent() const { return rollback != rollback_kind::any; }
    size_t n_embd() const { return static_cast<size_t>(limits.n_embd); }
};

namespace {

constexpr int32_t N_BATCH_MIN = 16;
constexpr int32_t N_TREE_SPARE = 8;      // nodes that bring tokens of the sequence itself
constexpr int32_t N_SNAPSHOT_LIMIT = 64; // llama.cpp's graphs have room for some hundred nodes more

// Architectures whose graphs mark every layer's input; others abort when asked for it.
bool shows_layers(const std::string & arch) {
    static const char * const NAMES[] = {"llama",     "mimo2",   "qwen3",     "qwen3moe",  "qwen35",
                                         "qwen35moe", "gpt-oss", "qwen3next", "minimax-m2"};
    return std::any_of(std::begin(NAMES), std::end(NAMES),
                       [&](const char * name) { return arch == name; });
}

// Of these, those that mark what comes out of the last layer.
bool shows_last_layer(const std::string & arch) {
    return arch == "mimo2";
}

void check_decoder_params(const spec_decoder_params & p) {
    check_range("n_seq_max", p.n_seq_max, 1, N_SEQ_LIMIT);
    check_range("n_branch_max", p.n_branch_max, 0, N_SEQ_LIMIT - p.n_seq_max);
    check_range("n_batch", p.n_batch, 1, 1 << 20);
    check_range("n_ubatch", p.n_ubatch, 1, p.n_batch);
    check_range("n_outputs_max", p.n_outputs_max, 1, p.n_ubatch);
    check_range("n_ctx_seq", p.n_ctx_seq, 0, 1 << 24);
    check_range("n_rs_seq", p.n_rs_seq, 0, N_SNAPSHOT_LIMIT);
    check_range("n_threads", p.n_threads, 0, 512);
}

void check_decoder_model(const spec_model & model) {
    if (model.vocab_only) {
        fail(SPEC_ERR_INVALID_ARGUMENT, "the model was loaded with vocab_only");
    }
    if (llama_model_target_layer_ids_n(model.model.get()) > 0) {
        fail(SPEC_ERR_UNSUPPORTED, "the model (" + model.arch() +
                                       ") drafts from another model's hidden states and cannot "
                                       "decode on its own");
    }
    check_generates(model, "model");
}

bool is_recurrent_model(const spec_model & model) {
    return llama_model_is_recurrent(model.model.get()) || llama_model_is_hybrid(model.model.get());
}

void make_decoder_context(spec_decoder & decoder, const spec_decoder_params & p) {
    const llama_model * m = decoder.model->model.get();
    const bool has_trees = p.n_branch_max > 0 && !is_recurrent_model(*decoder.model);
    const int32_t n_ctx_seq = p.n_ctx_seq > 0 ? p.n_ctx_seq : llama_model_n_ctx_train(m);
    // A tree's nodes stand beside full sequences.
    const int64_t n_ctx =
        int64_t{n_ctx_seq} * p.n_seq_max + (has_trees ? p.n_outputs_max + N_TREE_SPARE : 0);
    check_range("n_ctx_seq * n_seq_max", static_cast<double>(n_ctx), 1,
                std::numeric_limits<int32_t>::max());
    llama_context_params c = llama_context_default_params();
    // Tiny sizes are kept by our own checks: llama.cpp's probes need room for a few tokens, and
    // its splitter aborts on a ubatch that does not hold the tokens that may be taken back.
    const int32_t n_ubatch = std::max(p.n_ubatch, N_BATCH_MIN + p.n_rs_seq);
    c.n_ctx = static_cast<uint32_t>(std::max(n_ctx, int64_t{n_ubatch}));
    c.n_batch = static_cast<uint32_t>(std::max(p.n_batch, n_ubatch));
    c.n_ubatch = static_cast<uint32_t>(n_ubatch);
    c.n_seq_max = static_cast<uint32_t>(p.n_seq_max + (has_trees ? p.n_branch_max : 0));
    c.n_rs_seq = static_cast<uint32_t>(p.n_rs_seq);
    // llama.cpp makes room for one output of each sequence and aborts where that is too much.
    c.n_outputs_max = std::max(static_cast<uint32_t>(p.n_outputs_max), c.n_seq_max);
    c.n_threads = p.n_threads > 0 ? p.n_threads : all_cores();
    c.n_threads_batch = c.n_threads;
    if (!decoder.model->meta(decoder.model->arch() + ".pooling_type").empty()) {
        c.pooling_type = LLAMA_POOLING_TYPE_NONE; // rows of tokens are wanted, not of sequences
    }
    c.flash_attn_type =
        p.flash_attention ? LLAMA_FLASH_ATTN_TYPE_AUTO : LLAMA_FLASH_ATTN_TYPE_DISABLED;
    c.kv_unified = has_trees; // a node shared by branches is one cell of one pool
    c.ctx_other = decoder.target != nullptr ? decoder.target->context.get() : nullptr;
    last_llama_error.clear();
    decoder.context.reset(llama_init_from_model(decoder.model->model.get(), c));
    if (!decoder.context) {
        fail(SPEC_ERR_OUT_OF_MEMORY, "the decoder's context cannot be made" + llama_reason());
    }
    check_memory(decoder.context.get(), "model");
    decoder.limits.n_ctx_seq = n_ctx_seq;
    const bool is_plain = dynamic_cast<llama_kv_cache *>(decoder.memory()) != nullptr ||
                          dynamic_cast<llama_kv_cache_iswa *>(decoder.memory()) != nullptr;
    decoder.limits.n_branch_max = has_trees && is_plain ? p.n_branch_max : 0;
}

void fill_decoder_limits(spec_decoder & decoder, const spec_decoder_params & p) {
    const llama_model * m = decoder.model->model.get();
    spec_decoder_limits & l = decoder.limits;
    const llama_context * ctx = decoder.context.get();
    l.n_batch = std::min(decoder.is_recurrent() ? p.n_ubatch : p.n_batch,
                         static_cast<int32_t>(llama_n_batch(ctx)));
    l.n_seq_max = p.n_seq_max;
    l.n_outputs_max = std::min(p.n_outputs_max, static_cast<int32_t>(llama_n_ubatch(ctx)));
    l.n_rs_seq = !decoder.is_recurrent() ? -1
                 : decoder.rollback == rollback_kind::bounded
                     ? static_cast<int32_t>(llama_n_rs_seq(ctx))
                     : 0;
    l.n_vocab = decoder.model->n_vocab();
    l.n_embd = llama_model_n_embd(m);
    l.n_embd_out = llama_model_n_embd_out(m);
    l.n_layer = llama_model_n_layer(m);
    l.has_layers = decoder.target == nullptr && shows_layers(decoder.model->arch());
    l.is_last_layer_normed = !shows_last_layer(decoder.model->arch());
}

void begin_decoder(spec_decoder & decoder, const spec_decoder_params & params) {
    fill_decoder_limits(decoder, params);
    decoder.batch = common_batch(decoder.context.get());
    decoder.sequences.resize(static_cast<size_t>(params.n_seq_max));
    decoder.wanted_layers.resize(static_cast<size_t>(decoder.limits.n_layer));
    decoder.kept_layers.resize(static_cast<size_t>(decoder.limits.n_layer));
    decoder.read_inputs.resize(static_cast<size_t>(decoder.limits.n_layer) + 1);
}

spec_decoder * make_decoder(const spec_model & model, const spec_decoder_params & params) {
    check_decoder_params(params);
    check_decoder_model(model);
    auto decoder = std::make_unique<spec_decoder>();
    decoder->model = &model;
    make_decoder_context(*decoder, params);
    decoder->rollback = probe_rollback(decoder->context.get(), "model");
    begin_decoder(*decoder, params);
    return decoder.release();
}

// The target keeps the rows that the draft reads, of every token that it decodes from now on.
void keep_inputs(spec_decoder & target, const llama_model * draft) {
    for (uint32_t i = 0; i < llama_model_target_layer_ids_n(draft); ++i) {
        const int32_t id = llama_model_target_layer_ids(draft)[i];
        if (id == target.limits.n_layer) {
            llama_set_embeddings_nextn(target.context.get(), true, /*masked*/ false);
        } else {
            llama_set_embeddings_layer_inp(target.context.get(), static_cast<uint32_t>(id), true);
        }
        target.read_inputs[static_cast<size_t>(id)] = true;
    }
    target.n_decoded = 0; // what was decoded before has left no such rows
}

spec_decoder * make_eagle3_decoder(const spec_model & model, spec_decoder & target,
                                   const spec_decoder_params & params) {
    check_decoder_params(params);
    if (model.vocab_only) {
        fail(SPEC_ERR_INVALID_ARGUMENT, "the model was loaded with vocab_only");
    }
    if (target.target != nullptr) {
        fail(SPEC_ERR_UNSUPPORTED, "the target is a draft model's decoder itself");
    }
    check_eagle3(*target.model, model);
    check_target_name(*target.model, model);
    if (!common_speculative_are_compatible(target.model->model.get(), model.model.get())) {
        fail(SPEC_ERR_INCOMPATIBLE_DRAFT, "the draft model's vocabulary differs from the target's");
    }
    auto decoder = std::make_unique<spec_decoder>();
    decoder->model = &model;
    decoder->target = &target;
    make_decoder_context(*decoder, params);
    begin_decoder(*decoder, params);
    llama_set_embeddings_nextn(decoder->context.get(), true, /*masked*/ true);
    keep_inputs(target, model.model.get());
    return decoder.release();
}

decoder_sequence & at(spec_decoder & decoder, int32_t seq_id) {
    if (seq_id < 0 || seq_id >= decoder.limits.n_seq_max) {
        fail(SPEC_ERR_BAD_SEQ_ID, "seq_id is " + std::to_string(seq_id) + "; expected [0, " +
                                      std::to_string(decoder.limits.n_seq_max) + ")");
    }
    return decoder.sequences[static_cast<size_t>(seq_id)];
}

void check_no_tree(const spec_decoder & decoder, int32_t seq_id) {
    if (decoder.tree_owner == seq_id) {
        bad_plan(seq_id, "a tree hangs on it; commit a path first");
    }
}

void check_decoder_room(const spec_decoder & decoder, int64_t n_end) {
    if (n_end > decoder.limits.n_ctx_seq) {
        fail(SPEC_ERR_NO_ROOM, "the sequence would hold " + std::to_string(n_end) +
                                   " tokens; it has room for " +
                                   std::to_string(decoder.limits.n_ctx_seq));
    }
}

// An EAGLE-3 decoder's tokens come with as many states.
void check_states(const spec_decoder & decoder, int32_t n) {
    if (decoder.target != nullptr &&
        decoder.states.size() != static_cast<size_t>(n) * decoder.n_embd()) {
        fail(SPEC_ERR_BAD_PLAN, "there are states for " +
                                    std::to_string(decoder.states.size() / decoder.n_embd()) +
                                    " tokens, not for " + std::to_string(n));
    }
}

// Runs the batch. Scored batches are scored whole, so the hidden rows of all tokens can be had.
int32_t run_decoder(spec_decoder & decoder, bool is_output) {
    decoder.n_rows = decoder.n_decoded = 0;
    decoder.kept_layers = decoder.wanted_layers;
    const bool is_draft = decoder.target != nullptr;
    for (int32_t i = 0; is_draft && i < decoder.batch.size(); ++i) {
        float * state = decoder.states.data() + static_cast<size_t>(i) * decoder.n_embd();
        decoder.batch.set_embd(i, {state, 1, decoder.n_embd()});
    }
    llama_set_embeddings(decoder.context.get(), is_output && !is_draft);
    last_llama_error.clear();
    const int32_t rc =
        llama_process(decoder.context.get(), LLAMA_PROCESS_TYPE_DECODE, decoder.batch.get());
    if (rc == 0) {
        llama_synchronize(decoder.context.get());
        decoder.n_decoded = decoder.batch.size();
        decoder.n_rows = is_output ? decoder.n_decoded : 0;
    }
    decoder.states.clear();
    return rc;
}

void decode_sequence(spec_decoder & decoder, int32_t seq_id, const int32_t * tokens, int32_t n,
                     bool is_output) {
    decoder_sequence & seq = at(decoder, seq_id);
    check_range("n_tokens", n, 1,
                is_output ? decoder.limits.n_outputs_max : decoder.limits.n_batch);
    deref(tokens, "tokens");
    for (int32_t i = 0; i < n; ++i) {
        check_token(tokens[i], decoder.limits.n_vocab, "tokens");
    }
    check_no_tree(decoder, seq_id);
    check_states(decoder, n);
    check_decoder_room(decoder, int64_t{seq.n_past} + n);
    decoder.batch.clear();
    for (int32_t i = 0; i < n; ++i) {
        decoder.batch.add(tokens[i], seq.n_past + i, seq_id, is_output);
    }
    const int32_t rc = run_decoder(decoder, is_output);
    if (rc == 1) {
        fail(SPEC_ERR_NO_ROOM, "no room in the KV cache");
    }
    if (rc != 0) {
        llama_memory_seq_rm(decoder.memory(), seq_id, -1, -1);
        seq = {};
        fail(SPEC_ERR_DECODE_FAILED, "the decode returned " + std::to_string(rc) +
                                         "; the sequence was cleared" + llama_reason());
    }
    seq.n_past += n;
    seq.n_back_max = std::min(n - 1, decoder.limits.n_rs_seq); // snapshots of this ubatch only
}

void rollback_decoder(spec_decoder & decoder, int32_t seq_id, int32_t n_past) {
    decoder_sequence & seq = at(decoder, seq_id);
    check_no_tree(decoder, seq_id);
    check_range("n_past", n_past, 0, seq.n_past);
    const int32_t n_back = seq.n_past - n_past;
    if (n_back == 0) {
        return;
    }
    if (n_past > 0 && decoder.is_recurrent() && n_back > seq.n_back_max) {
        fail(SPEC_ERR_UNSUPPORTED, "the model can go back " + std::to_string(seq.n_back_max) +
                                       " tokens here, not " + std::to_string(n_back));
    }
    if (!decoder.is_recurrent() && !holds_window(decoder.context.get(), seq_id, n_past)) {
        no_window(n_past);
    }
    if (!llama_memory_seq_rm(decoder.memory(), seq_id, n_past > 0 ? n_past : -1, -1)) {
        fail(SPEC_ERR_UNSUPPORTED, "the model cannot go back from here");
    }
    seq.n_past = n_past;
    seq.n_back_max = 0; // one rollback per decode
}

void drop_tree(spec_decoder & decoder) {
    for (int32_t i = 0; i < decoder.n_branches; ++i) {
        llama_memory_seq_rm(decoder.memory(), decoder.limits.n_seq_max + i, -1, -1);
    }
    decoder.tree.clear();
    decoder.n_branches = 0;
    decoder.tree_owner = -1;
}

void check_tree(spec_decoder & decoder, int32_t seq_id, const int32_t * tokens,
                const int32_t * parents, int32_t n) {
    at(decoder, seq_id);
    if (decoder.limits.n_branch_max == 0) {
        fail(SPEC_ERR_UNSUPPORTED,
             is_recurrent_model(*decoder.model)
                 ? "a recurrent model has one state per sequence; it cannot score a tree"
                 : "this context was made without branches, or its cache cannot share cells");
    }
    if (decoder.tree_owner >= 0 && decoder.tree_owner != seq_id) {
        bad_plan(seq_id, "a tree hangs on sequence " + std::to_string(decoder.tree_owner));
    }
    const int32_t n_old = static_cast<int32_t>(decoder.tree.size());
    check_range("n_nodes", n, 1,
                std::min(decoder.limits.n_outputs_max,
                         decoder.limits.n_outputs_max + N_TREE_SPARE - n_old));
    deref(tokens, "tokens");
    deref(parents, "parents");
    for (int32_t i = 0; i < n; ++i) {
        check_token(tokens[i], decoder.limits.n_vocab, "tokens");
        check_range("parent of a node", parents[i], -1, n_old + i - 1);
    }
}

// The nodes of the tree and the new ones, with the branches that pass through each new node.
// Nothing in the cache has changed yet.
struct tree_plan {
    std::vector<tree_node> nodes;
    std::vector<std::vector<llama_seq_id>> branches;      // of each new node
    std::vector<std::pair<llama_seq_id, int32_t>> copies; // branch, old node that it begins with
    int32_t n_branches = 0;
};

std::vector<bool> has_children(const std::vector<tree_node> & nodes) {
    std::vector<bool> found(nodes.size());
    for (const tree_node & node : nodes) {
        if (node.parent >= 0) {
            found[static_cast<size_t>(node.parent)] = true;
        }
    }
    return found;
}

// A branch for a leaf: that of the old node that its path begins with, where this node is the
// branch's tip and nobody took it yet, else a new one.
llama_seq_id branch_for(const spec_decoder & decoder, tree_plan & plan, std::vector<bool> & is_tip,
                        int32_t old) {
    if (old >= 0 && is_tip[static_cast<size_t>(old)]) {
        is_tip[static_cast<size_t>(old)] = false;
        return decoder.tree[static_cast<size_t>(old)].branch;
    }
    const llama_seq_id branch = decoder.limits.n_seq_max + plan.n_branches++;
    plan.copies.push_back({branch, old});
    return branch;
}

tree_plan plan_tree(const spec_decoder & decoder, int32_t seq_id, const int32_t * parents,
                    int32_t n) {
    const int32_t n_old = static_cast<int32_t>(decoder.tree.size());
    const int32_t n_past = decoder.sequences[static_cast<size_t>(seq_id)].n_past;
    tree_plan plan;
    plan.nodes = decoder.tree;
    plan.n_branches = decoder.n_branches;
    plan.branches.resize(static_cast<size_t>(n));
    for (int32_t i = 0; i < n; ++i) {
        const llama_pos pos =
            parents[i] < 0 ? n_past : plan.nodes[static_cast<size_t>(parents[i])].pos + 1;
        plan.nodes.push_back({parents[i], pos, -1});
        check_decoder_room(decoder, int64_t{pos} + 1);
    }
    std::vector<bool> is_tip = has_children(decoder.tree);
    is_tip.flip();
    const std::vector<bool> is_inner = has_children(plan.nodes);
    for (int32_t leaf = n_old; leaf < n_old + n; ++leaf) {
        if (is_inner[static_cast<size_t>(leaf)]) {
            continue;
        }
        int32_t old = leaf;
        while (old >= n_old) {
            old = plan.nodes[static_cast<size_t>(old)].parent;
        }
        const llama_seq_id branch = branch_for(decoder, plan, is_tip, old);
        for (int32_t i = leaf; i >= n_old; i = plan.nodes[static_cast<size_t>(i)].parent) {
            plan.branches[static_cast<size_t>(i - n_old)].push_back(branch);
            plan.nodes[static_cast<size_t>(i)].branch =
                plan.branches[static_cast<size_t>(i - n_old)].front();
        }
    }
    if (plan.n_branches > decoder.limits.n_branch_max) {
        fail(SPEC_ERR_INVALID_ARGUMENT, "the tree needs " + std::to_string(plan.n_branches) +
                                            " branches; this context has " +
                                            std::to_string(decoder.limits.n_branch_max));
    }
    return plan;
}

// Whether a branch can be cut to one of its nodes: a tree deeper than the window loses its top.
void check_node_held(const spec_decoder & decoder, const tree_node & node) {
    if (!holds_window(decoder.context.get(), node.branch, node.pos + 1)) {
        no_window(node.pos + 1);
    }
}

void copy_branches(spec_decoder & decoder, int32_t seq_id, const tree_plan & plan) {
    for (const auto & [branch, old] : plan.copies) {
        if (old >= 0) {
            check_node_held(decoder, decoder.tree[static_cast<size_t>(old)]);
        }
    }
    const int32_t n_past = decoder.sequences[static_cast<size_t>(seq_id)].n_past;
    for (const auto & [branch, old] : plan.copies) {
        const bool is_node = old >= 0;
        const tree_node node = is_node ? decoder.tree[static_cast<size_t>(old)] : tree_node{};
        llama_memory_seq_cp(decoder.memory(), is_node ? node.branch : seq_id, branch, 0,
                            is_node ? node.pos + 1 : n_past);
    }
}

void decode_tree(spec_decoder & decoder, int32_t seq_id, const int32_t * tokens,
                 const int32_t * parents, int32_t n) {
    check_tree(decoder, seq_id, tokens, parents, n);
    check_states(decoder, n);
    tree_plan plan = plan_tree(decoder, seq_id, parents, n);
    const size_t n_old = decoder.tree.size();
    copy_branches(decoder, seq_id, plan);
    decoder.n_branches = plan.n_branches;
    decoder.batch.clear();
    for (size_t i = 0; i < static_cast<size_t>(n); ++i) {
        decoder.batch.add(tokens[i], plan.nodes[n_old + i].pos, plan.branches[i], true);
    }
    const int32_t rc = run_decoder(decoder, true);
    if (rc != 0) {
        drop_tree(decoder);
        fail(rc == 1 ? SPEC_ERR_NO_ROOM : SPEC_ERR_DECODE_FAILED,
             "the tree could not be decoded (" + std::to_string(rc) +
                 "); it is gone, the sequence is as it was" + llama_reason());
    }
    decoder.tree = std::move(plan.nodes);
    decoder.tree_owner = seq_id;
}

void check_path(const spec_decoder & decoder, const int32_t * path, int32_t n) {
    check_range("n_path", n, 0, static_cast<double>(decoder.tree.size()));
    int32_t parent = -1;
    for (int32_t i = 0; i < n; ++i) {
        const int32_t node = (&deref(path, "path"))[i];
        check_range("node of the path", node, 0, static_cast<double>(decoder.tree.size()) - 1);
        if (decoder.tree[static_cast<size_t>(node)].parent != parent) {
            fail(SPEC_ERR_INVALID_ARGUMENT,
                 "node " + std::to_string(node) + " does not follow the one before it in the path");
        }
        parent = node;
    }
}

void commit_tree(spec_decoder & decoder, int32_t seq_id, const int32_t * path, int32_t n) {
    decoder_sequence & seq = at(decoder, seq_id);
    if (decoder.tree_owner != seq_id) {
        bad_plan(seq_id, "no tree hangs on it");
    }
    check_path(decoder, path, n);
    if (n > 0) {
        const tree_node & last = decoder.tree[static_cast<size_t>(path[n - 1])];
        check_node_held(decoder, last);
        llama_memory_seq_cp(decoder.memory(), last.branch, seq_id, seq.n_past, last.pos + 1);
        seq.n_past = last.pos + 1;
    }
    drop_tree(decoder);
}

// Where the rows of a layer come from: the input of the next one.
bool is_hidden_row(const spec_decoder & decoder, int32_t what) {
    return what == SPEC_ROWS_HIDDEN ||
           (what == decoder.limits.n_layer - 1 && decoder.limits.is_last_layer_normed);
}

void check_layer(const spec_decoder & decoder, int32_t layer) {
    if (!decoder.limits.has_layers) {
        fail(SPEC_ERR_UNSUPPORTED, "llama.cpp does not show the layers of the architecture \"" +
                                       decoder.model->arch() + "\"");
    }
    check_range("layer", layer, 0, decoder.limits.n_layer - 1);
}

void set_layer(spec_decoder & decoder, int32_t layer, bool is_kept) {
    check_layer(decoder, layer);
    const size_t i = static_cast<size_t>(layer);
    if (!is_hidden_row(decoder, layer) && decoder.wanted_layers[i] != is_kept &&
        !decoder.read_inputs[i + 1]) {
        llama_set_embeddings_layer_inp(decoder.context.get(), static_cast<uint32_t>(layer) + 1,
                                       is_kept);
    }
    decoder.wanted_layers[i] = is_kept;
}

const float * row(spec_decoder & decoder, int32_t what, int32_t i) {
    llama_context * ctx = decoder.context.get();
    if (what == SPEC_ROWS_LOGITS) {
        return llama_get_logits_ith(ctx, i);
    }
    if (is_hidden_row(decoder, what)) {
        return decoder.target != nullptr ? llama_get_embeddings_nextn_ith(ctx, i)
                                         : llama_get_embeddings_ith(ctx, i);
    }
    const float * rows = llama_get_embeddings_layer_inp(ctx, static_cast<uint32_t>(what) + 1);
    return rows + static_cast<ptrdiff_t>(i) * decoder.limits.n_embd;
}

void read_rows(spec_decoder & decoder, int32_t what, float * out, size_t n_out) {
    if (decoder.n_rows == 0) {
        fail(SPEC_ERR_BAD_PLAN, "the last decode scored nothing, or there was none");
    }
    if (what >= 0) {
        check_layer(decoder, what);
        if (!decoder.kept_layers[static_cast<size_t>(what)]) {
            fail(SPEC_ERR_BAD_PLAN, "the last decode did not keep layer " + std::to_string(what));
        }
    }
    check_range("what", what, SPEC_ROWS_LOGITS, decoder.limits.n_layer - 1);
    const spec_decoder_limits & l = decoder.limits;
    const size_t width = static_cast<size_t>(what == SPEC_ROWS_LOGITS       ? l.n_vocab
                                             : is_hidden_row(decoder, what) ? l.n_embd_out
                                                                            : l.n_embd);
    if (n_out != width * static_cast<size_t>(decoder.n_rows)) {
        fail(SPEC_ERR_INVALID_ARGUMENT, "n_out is " + std::to_string(n_out) + "; the " +
                                            std::to_string(decoder.n_rows) + " rows have " +
                                            std::to_string(width) + " values each");
    }
    deref(out, "out");
    for (int32_t i = 0; i < decoder.n_rows; ++i) {
        const float * source = row(decoder, what, i);
        if (source == nullptr) {
            fail(SPEC_ERR_INTERNAL, "the decode left no such rows");
        }
        std::copy(source, source + width, out + static_cast<size_t>(i) * width);
    }
}

void set_states(spec_decoder & decoder, const float * states, int32_t n) {
    if (decoder.target == nullptr) {
        fail(SPEC_ERR_UNSUPPORTED, "only an EAGLE-3 decoder reads states");
    }
    check_range("n_rows", n, 1, decoder.limits.n_batch);
    deref(states, "states");
    decoder.states.assign(states, states + static_cast<size_t>(n) * decoder.n_embd());
}

// Rows of the target's layers, side by side for each token: [n, 3 * width].
std::vector<float> target_features(spec_decoder & target, const llama_model * draft, int32_t n) {
    const uint32_t n_ids = llama_model_target_layer_ids_n(draft);
    const size_t width = target.n_embd();
    std::vector<float> features(static_cast<size_t>(n) * n_ids * width);
    for (uint32_t i = 0; i < n_ids; ++i) {
        const int32_t id = llama_model_target_layer_ids(draft)[i];
        const float * rows =
            id == target.limits.n_layer
                ? llama_get_embeddings_nextn(target.context.get())
                : llama_get_embeddings_layer_inp(target.context.get(), static_cast<uint32_t>(id));
        if (rows == nullptr) {
            fail(SPEC_ERR_INTERNAL,
                 "the target's decode left no rows of layer " + std::to_string(id));
        }
        for (size_t t = 0; t < static_cast<size_t>(n); ++t) {
            std::copy_n(rows + t * width, width, features.data() + (t * n_ids + i) * width);
        }
    }
    return features;
}

// The encoder takes a batch of one ubatch, with positions that it does not use.
void encode_features(spec_decoder & decoder, float * features, size_t width, int32_t n,
                     float * out) {
    llama_context * ctx = decoder.context.get();
    decoder.n_rows = decoder.n_decoded = 0;
    decoder.batch.clear();
    llama_pos pos = llama_memory_seq_pos_max(decoder.memory(), 0) + 1;
    for (int32_t i = 0; i < n; ++i, ++pos) {
        float * row = features + static_cast<size_t>(i) * width;
        decoder.batch.add_embd({row, 1, width}, &pos, 0, /*output*/ true);
    }
    last_llama_error.clear();
    const int32_t rc = llama_process(ctx, LLAMA_PROCESS_TYPE_ENCODE, decoder.batch.get());
    const float * rows = rc == 0 ? llama_get_embeddings_nextn(ctx) : nullptr;
    if (rows == nullptr) {
        fail(SPEC_ERR_DECODE_FAILED, "the encoder returned " + std::to_string(rc) + llama_reason());
    }
    llama_synchronize(ctx);
    std::copy_n(rows, static_cast<size_t>(n) * decoder.n_embd(), out);
}

void encode_target(spec_decoder & decoder, float * out, size_t n_out) {
    if (decoder.target == nullptr) {
        fail(SPEC_ERR_UNSUPPORTED, "only an EAGLE-3 decoder reads a target");
    }
    spec_decoder & target = *decoder.target;
    const int32_t n = target.n_decoded;
    if (n == 0) {
        fail(SPEC_ERR_BAD_PLAN, "the target's last decode failed, or there was none");
    }
    if (n_out != static_cast<size_t>(n) * decoder.n_embd()) {
        fail(SPEC_ERR_INVALID_ARGUMENT, "n_out is " + std::to_string(n_out) + "; the " +
                                            std::to_string(n) + " rows have " +
                                            std::to_string(decoder.n_embd()) + " values each");
    }
    deref(out, "out");
    std::vector<float> features = target_features(target, decoder.model->model.get(), n);
    const size_t width = features.size() / static_cast<size_t>(n);
    const int32_t n_chunk = static_cast<int32_t>(llama_n_ubatch(decoder.context.get()));
    for (int32_t i = 0; i < n; i += n_chunk) {
        const size_t at = static_cast<size_t>(i);
        encode_features(decoder, features.data() + at * width, width, std::min(n_chunk, n - i),
                        out + at * decoder.n_embd());
    }
}

// The model's own tables, multiplied on the device that holds them.

ggml_tensor * find_tensor(const spec_model & model, const std::vector<std::string> & names) {
    for (const std::string & name : names) {
        for (const auto & [found, tensor] : llama_internal_get_tensor_map(model.model.get())) {
            if (found == name && tensor->buffer != nullptr) {
                return tensor;
            }
        }
    }
    fail(SPEC_ERR_UNSUPPORTED, "the model has no tensor \"" + names.front() + "\"");
}

void check_table(const ggml_tensor * table, int64_t width, int64_t n_rows) {
    if (table->ne[0] != width || table->ne[1] != n_rows || ggml_n_dims(table) > 2) {
        fail(SPEC_ERR_UNSUPPORTED,
             std::string("the tensor \"") + table->name + "\" has another shape than expected");
    }
}

ggml_backend_ptr backend_of(const ggml_tensor * tensor) {
    // Memory of the host that an accelerator reads names that device, and is the CPU's to compute.
    ggml_backend_dev_t device =
        ggml_backend_buffer_is_host(tensor->buffer)
            ? nullptr
            : ggml_backend_buft_get_device(ggml_backend_buffer_get_type(tensor->buffer));
    if (device == nullptr) {
        device = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    }
    ggml_backend_ptr backend(device != nullptr ? ggml_backend_dev_init(device, nullptr) : nullptr);
    if (!backend) {
        fail(SPEC_ERR_OUT_OF_MEMORY, "no backend can be made for the model's device");
    }
    if (ggml_backend_is_cpu(backend.get())) {
        static const int32_t n_cores = all_cores(); // dozens of files, in calls of microseconds
        ggml_backend_cpu_set_n_threads(backend.get(), n_cores);
    }
    return backend;
}

// Computes op(table, input), a graph of one node.
template <typename Op>
void multiply(ggml_tensor * table, ggml_type input_type, int64_t width, int64_t n, const void * in,
              float * out, Op && op) {
    const ggml_backend_ptr backend = backend_of(table);
    const size_t n_bytes = 4 * ggml_tensor_overhead() + ggml_graph_overhead();
    const ggml_context_ptr ctx(ggml_init({n_bytes, nullptr, /*no_alloc*/ true}));
    if (!ctx) {
        fail(SPEC_ERR_OUT_OF_MEMORY, "memory could not be allocated");
    }
    ggml_tensor * input = width > 0 ? ggml_new_tensor_2d(ctx.get(), input_type, width, n)
                                    : ggml_new_tensor_1d(ctx.get(), input_type, n);
    ggml_tensor * result = op(ctx.get(), table, input);
    if (!ggml_backend_supports_op(backend.get(), result)) {
        fail(SPEC_ERR_UNSUPPORTED, "the model's device cannot compute this alone");
    }
    const ggml_backend_buffer_ptr buffer(ggml_backend_alloc_ctx_tensors(ctx.get(), backend.get()));
    if (!buffer) {
        fail(SPEC_ERR_OUT_OF_MEMORY, "memory could not be allocated");
    }
    ggml_cgraph * graph = ggml_new_graph(ctx.get());
    ggml_build_forward_expand(graph, result);
    ggml_backend_tensor_set(input, in, 0, ggml_nbytes(input));
    if (ggml_backend_graph_compute(backend.get(), graph) != GGML_STATUS_SUCCESS) {
        fail(SPEC_ERR_INTERNAL, "the computation failed");
    }
    ggml_backend_tensor_get(result, out, 0, ggml_nbytes(result));
}

constexpr int32_t TABLE_ROWS_MAX = 65536;

void check_tables(const spec_model & model, int32_t n) {
    if (model.vocab_only) {
        fail(SPEC_ERR_INVALID_ARGUMENT, "the model was loaded with vocab_only");
    }
    check_range("number of rows", n, 1, TABLE_ROWS_MAX);
}

void embed(const spec_model & model, const int32_t * tokens, int32_t n, float * out) {
    check_tables(model, n);
    for (int32_t i = 0; i < n; ++i) {
        check_token((&deref(tokens, "tokens"))[i], model.n_vocab(), "tokens");
    }
    ggml_tensor * table = find_tensor(model, {"token_embd.weight"});
    check_table(table, llama_model_n_embd(model.model.get()), model.n_vocab());
    multiply(table, GGML_TYPE_I32, 0, n, tokens, &deref(out, "out"), ggml_get_rows);
}

void lm_head(const spec_model & model, const float * hidden, int32_t n, float * out) {
    check_tables(model, n);
    deref(hidden, "hidden");
    ggml_tensor * table = find_tensor(model, {"output.weight", "token_embd.weight"});
    const int32_t width = llama_model_n_embd_out(model.model.get());
    check_table(table, width, model.n_vocab());
    multiply(table, GGML_TYPE_F32, width, n, hidden, &deref(out, "out"), ggml_mul_mat);
}

} // namespace

// Embeddings.

struct spec_embedder {
    spec_embedder_limits limits = {};
    llama_context_ptr context;
    common_batch batch;
};

namespace {

constexpr enum llama_pooling_type POOLING_TYPES[SPEC_POOLING_COUNT] = {
    LLAMA_POOLING_TYPE_UNSPECIFIED, LLAMA_POOLING_TYPE_NONE, LLAMA_POOLING_TYPE_MEAN,
    LLAMA_POOLING_TYPE_CLS,         LLAMA_POOLING_TYPE_LAST, LLAMA_POOLING_TYPE_RANK,
};

void check_embedder(const spec_model & model, const spec_embedder_params & p) {
    check_range("pooling", p.pooling, 0, SPEC_POOLING_COUNT - 1);
    check_range("n_batch", p.n_batch, 1, 65536);
    check_range("n_seq_max", p.n_seq_max, 1, N_SEQ_LIMIT);
    check_range("n_threads", p.n_threads, 0, 512);
    if (model.vocab_only) {
        fail(SPEC_ERR_INVALID_ARGUMENT, "the model was loaded with vocab_only");
    }
    if (llama_model_target_layer_ids_n(model.model.get()) > 0) {
        fail(SPEC_ERR_UNSUPPORTED,
             "this is a draft model (" + model.arch() + "); it has no embeddings of its own");
    }
    if (llama_model_has_encoder(model.model.get()) && llama_model_has_decoder(model.model.get())) {
        fail(SPEC_ERR_UNSUPPORTED, "encoder-decoder models are not supported");
    }
    if (p.pooling == SPEC_POOLING_RANK && model.meta(model.arch() + ".pooling_type") != "4") {
        fail(SPEC_ERR_UNSUPPORTED, "rank pooling needs a reranker: a model with its own "
                                   "classification head");
    }
}

// One cache and one ubatch for all texts of a decode: a pooled row is made inside one ubatch, and
// models without causal attention read all tokens at once.
llama_context_params embedder_context(const spec_embedder_params & p) {
    llama_context_params c = llama_context_default_params();
    c.n_ctx = static_cast<uint32_t>(p.n_batch);
    c.n_batch = static_cast<uint32_t>(p.n_batch);
    c.n_ubatch = static_cast<uint32_t>(p.n_batch);
    // A text has a token at least; llama.cpp ends the process where sequences outnumber outputs.
    c.n_seq_max = static_cast<uint32_t>(std::min(p.n_seq_max, p.n_batch));
    c.n_threads = p.n_threads > 0 ? p.n_threads : all_cores();
    c.n_threads_batch = c.n_threads;
    c.flash_attn_type =
        p.flash_attention ? LLAMA_FLASH_ATTN_TYPE_AUTO : LLAMA_FLASH_ATTN_TYPE_DISABLED;
    c.kv_unified = true;
    c.embeddings = true;
    c.pooling_type = POOLING_TYPES[p.pooling];
    return c;
}

int32_t pooling_of(const llama_context * context) {
    const auto * found = std::find(std::begin(POOLING_TYPES) + 1, std::end(POOLING_TYPES),
                                   llama_pooling_type(context));
    return static_cast<int32_t>(found - std::begin(POOLING_TYPES));
}

spec_embedder * make_embedder(const spec_model & model, const spec_embedder_params & p) {
    check_embedder(model, p);
    auto embedder = std::make_unique<spec_embedder>();
    last_llama_error.clear();
    embedder->context.reset(llama_init_from_model(model.model.get(), embedder_context(p)));
    if (!embedder->context) {
        fail(SPEC_ERR_OUT_OF_MEMORY, "the embedder's context cannot be made" + llama_reason());
    }
    const llama_context * context = embedder->context.get();
    spec_embedder_limits & l = embedder->limits;
    l.pooling = pooling_of(context);
    l.n_batch = static_cast<int32_t>(std::min(llama_n_batch(context), llama_n_ubatch(context)));
    l.n_seq_max = static_cast<int32_t>(llama_n_seq_max(context));
    l.n_vocab = model.n_vocab();
    l.n_embd = l.pooling == SPEC_POOLING_RANK
                   ? static_cast<int32_t>(llama_model_n_cls_out(model.model.get()))
                   : llama_model_n_embd_out(model.model.get());
    embedder->batch = common_batch(embedder->context.get());
    return embedder.release();
}

void check_texts(const spec_embedder & embedder, const int32_t * tokens, int32_t n_tokens,
                 const int32_t * lengths, int32_t n_texts) {
    check_range("n_texts", n_texts, 0, std::numeric_limits<int32_t>::max());
    check_range("n_tokens", n_tokens, n_texts, std::numeric_limits<int32_t>::max());
    int64_t n_sum = 0;
    for (int32_t i = 0; i < n_texts; ++i) {
        const int32_t n = (&deref(lengths, "lengths"))[i];
        if (n < 1 || n > embedder.limits.n_batch) {
            fail(SPEC_ERR_INVALID_ARGUMENT, "text " + std::to_string(i) + " has " +
                                                std::to_string(n) + " tokens; expected [1, " +
                                                std::to_string(embedder.limits.n_batch) + "]");
        }
        n_sum += n;
    }
    if (n_sum != n_tokens) {
        fail(SPEC_ERR_INVALID_ARGUMENT, "the lengths add up to " + std::to_string(n_sum) +
                                            " tokens, not " + std::to_string(n_tokens));
    }
    for (int32_t i = 0; i < n_tokens; ++i) {
        check_token((&deref(tokens, "tokens"))[i], embedder.limits.n_vocab, "text");
    }
}

void copy_row(const spec_embedder & embedder, const float * row, float *& out) {
    const int32_t n = embedder.limits.n_embd;
    const auto is_finite = [](float x) { return std::isfinite(x); };
    if (row == nullptr || !std::all_of(row, row + n, is_finite)) {
        fail(SPEC_ERR_DECODE_FAILED, "the decode left no embeddings, or they are not finite");
    }
    out = std::copy(row, row + n, out);
}

// Decodes what the batch holds, n_texts texts, and appends their rows.
void encode_batch(spec_embedder & embedder, int32_t n_texts, float *& out) {
    llama_context * context = embedder.context.get();
    const llama_memory_t memory = llama_get_memory(context);
    if (memory != nullptr) {
        llama_memory_clear(memory, false);
    }
    last_llama_error.clear();
    const int32_t rc = llama_process(context, LLAMA_PROCESS_TYPE_DECODE, embedder.batch.get());
    if (rc != 0) {
        fail(SPEC_ERR_DECODE_FAILED, "the decode returned " + std::to_string(rc) + llama_reason());
    }
    llama_synchronize(context);
    if (embedder.limits.pooling == SPEC_POOLING_NONE) {
        for (int32_t i = 0; i < embedder.batch.size(); ++i) {
            copy_row(embedder, llama_get_embeddings_ith(context, i), out);
        }
        return;
    }
    for (int32_t i = 0; i < n_texts; ++i) {
        copy_row(embedder, llama_get_embeddings_seq(context, i), out);
    }
}

void encode(spec_embedder & embedder, const int32_t * tokens, int32_t n_tokens,
            const int32_t * lengths, int32_t n_texts, float * rows, size_t cap) {
    check_texts(embedder, tokens, n_tokens, lengths, n_texts);
    const bool is_pooled = embedder.limits.pooling != SPEC_POOLING_NONE;
    const size_t n_rows = static_cast<size_t>(is_pooled ? n_texts : n_tokens);
    if (n_rows * static_cast<size_t>(embedder.limits.n_embd) > cap) {
        fail(SPEC_ERR_BUFFER_TOO_SMALL, "the rows do not fit");
    }
    if (n_rows == 0) {
        return;
    }
    float * out = &deref(rows, "rows");
    int32_t n_open = 0; // texts in the batch
    embedder.batch.clear();
    for (int32_t i = 0; i < n_texts; ++i) {
        if (n_open == embedder.limits.n_seq_max ||
            embedder.batch.size() + lengths[i] > embedder.limits.n_batch) {
            encode_batch(embedder, n_open, out);
            embedder.batch.clear();
            n_open = 0;
        }
        for (int32_t k = 0; k < lengths[i]; ++k) {
            embedder.batch.add(*tokens++, k, n_open, true);
        }
        ++n_open;
    }
    encode_batch(embedder, n_open, out);
}

} // namespace

// The boundary.

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

int32_t spec_find_cores(const char * root, const char * cpus, spec_cores * out) {
    return guarded([&] {
        spec_cores & found = deref(out, "out");
        found = cores::find(root != nullptr ? root : "", cpus != nullptr ? cpus : "");
    });
}

void spec_set_log(spec_log_callback callback, void * user) {
    log_callback.store(nullptr, std::memory_order_release);
    log_user.store(user, std::memory_order_release);
    log_callback.store(callback, std::memory_order_release);
    guarded([] { init_process(); });
}

int32_t spec_model_load(const spec_model_params * params, spec_model ** out) {
    return guarded([&] {
        deref(out, "out") = nullptr;
        *out = load_model(deref(params, "params"));
    });
}

void spec_model_free(spec_model * model) {
    delete model;
}

int32_t spec_model_get_info(const spec_model * model, spec_model_info * out) {
    return guarded([&] { deref(out, "out") = describe(deref(model, "model")); });
}

int32_t spec_model_meta(const spec_model * model, const char * key, char * buf, size_t cap,
                        size_t * n_needed) {
    return guarded([&] {
        const spec_model & m = deref(model, "model");
        char probe[1];
        if (llama_model_meta_val_str(m.model.get(), &deref(key, "key"), probe, sizeof probe) < 0) {
            fail(SPEC_ERR_NOT_FOUND, std::string("the model has no metadata \"") + key + "\"");
        }
        copy_out(m.meta(key), buf, cap, n_needed);
    });
}

int32_t spec_model_text(const spec_model * model, const char * key, char * buf, size_t cap,
                        size_t * n_needed) {
    return guarded([&] {
        copy_out(model_text(deref(model, "model"), &deref(key, "key")), buf, cap, n_needed);
    });
}

int32_t spec_model_tokenize(const spec_model * model, const char * text, size_t n_text,
                            bool add_special, bool parse_special, int32_t * tokens, size_t cap,
                            size_t * n_needed) {
    return guarded([&] {
        const spec_model & m = deref(model, "model");
        deref(n_needed, "n_needed");
        if (n_text > static_cast<size_t>(std::numeric_limits<int32_t>::max())) {
            fail(SPEC_ERR_INVALID_ARGUMENT, "the text is longer than 2 GiB");
        }
        if (llama_vocab_type(m.vocab) == LLAMA_VOCAB_TYPE_NONE) {
            fail(SPEC_ERR_UNSUPPORTED, "the model's file has no tokenizer; give token ids");
        }
        const std::string input(n_text > 0 ? &deref(text, "text") : "", n_text);
        const llama_tokens ids = common_tokenize(m.vocab, input, add_special, parse_special);
        *n_needed = ids.size();
        if (ids.size() > cap || (tokens == nullptr && !ids.empty())) {
            fail(SPEC_ERR_BUFFER_TOO_SMALL,
                 "the text has " + std::to_string(ids.size()) + " tokens");
        }
        std::copy(ids.begin(), ids.end(), tokens);
    });
}

int32_t spec_model_token_bytes(const spec_model * model, int32_t token, bool special, char * buf,
                               size_t cap, size_t * n_needed) {
    return guarded([&] {
        const spec_model & m = deref(model, "model");
        check_token(token, m.n_vocab(), "token");
        copy_out(common_token_to_piece(m.vocab, token, special), buf, cap, n_needed);
    });
}

int32_t spec_model_is_eog(const spec_model * model, int32_t token, bool * out) {
    return guarded([&] {
        const spec_model & m = deref(model, "model");
        check_token(token, m.n_vocab(), "token");
        deref(out, "out") = llama_vocab_is_eog(m.vocab, token);
    });
}

int32_t spec_chat_open(const spec_chat_params * params, spec_chat ** out) {
    return guarded([&] {
        spec_chat *& slot = deref(out, "out");
        slot = nullptr;
        slot = open_chat(deref(params, "params")).release();
    });
}

void spec_chat_free(spec_chat * chat) {
    delete chat;
}

int32_t spec_chat_format(const spec_chat * chat, const char * const * roles,
                         const char * const * contents, size_t n_messages,
                         bool add_generation_prompt, char * buf, size_t cap, size_t * n_needed) {
    return guarded([&] {
        if (n_messages == 0) {
            fail(SPEC_ERR_INVALID_ARGUMENT, "there are no messages");
        }
        copy_out(format_chat(deref(chat, "chat"), &deref(roles, "roles"),
                             &deref(contents, "contents"), n_messages, add_generation_prompt),
                 buf, cap, n_needed);
    });
}

void spec_sampler_default_params(spec_sampler_params * out) {
    if (out == nullptr) {
        return;
    }
    *out = {};
    out->seed = SPEC_SEED_RANDOM;
    out->temperature = 0.8f;
    out->top_k = 40;
    out->top_p = 0.95f;
    out->min_p = 0.05f;
    out->typical_p = 1.0f;
    out->top_n_sigma = -1.0f;
    out->penalty_last_n = 64;
    out->penalty_repeat = 1.0f;
    out->dry_base = 1.75f;
    out->dry_allowed_length = 2;
    out->dry_penalty_last_n = -1;
    out->n_dry_breakers = -1;
    out->xtc_threshold = 0.1f;
    out->dynatemp_exponent = 1.0f;
    out->mirostat_tau = 5.0f;
    out->mirostat_eta = 0.1f;
    out->adaptive_target = -1.0f;
    out->adaptive_decay = 0.9f;
    out->n_samplers = -1;
}

int32_t spec_sampler_init(const spec_model * model, const spec_sampler_params * params,
                          spec_sampler ** out) {
    return guarded([&] {
        deref(out, "out") = nullptr;
        *out = make_sampler(deref(model, "model"), deref(params, "params"));
    });
}

int32_t spec_sampler_get_history(const spec_sampler * sampler, int32_t * n_known,
                                 bool * has_chosen) {
    return guarded([&] {
        const sampler_history & history = deref(sampler, "sampler").history;
        deref(n_known, "n_known") = static_cast<int32_t>(history.known.size());
        deref(has_chosen, "has_chosen") = history.has_emitted;
    });
}

void spec_sampler_free(spec_sampler * sampler) {
    delete sampler;
}

void spec_engine_default_params(spec_engine_params * out) {
    if (out == nullptr) {
        return;
    }
    *out = {};
    out->draft_type = SPEC_DRAFT_NONE;
    out->n_batch = 2048;
    out->n_ubatch = 512;
    out->n_seq_max = 1;
    out->n_draft_max = 3;
    out->n_rs_seq = -1;
    out->flash_attention = true;
    out->n_wide = 2;
}

int32_t spec_engine_init(const spec_model * target, const spec_model * draft,
                         const spec_engine_params * params, spec_engine ** out) {
    return guarded([&] {
        deref(out, "out") = nullptr;
        *out = make_engine(deref(target, "target"), draft, deref(params, "params"));
    });
}

void spec_engine_free(spec_engine * engine) {
    delete engine;
}

int32_t spec_engine_get_limits(const spec_engine * engine, spec_engine_limits * out) {
    return guarded([&] { deref(out, "out") = deref(engine, "engine").limits; });
}

int32_t spec_engine_seq_begin(spec_engine * engine, int32_t seq_id, spec_sampler ** sampler) {
    return guarded([&] {
        std::unique_ptr<spec_sampler> owned(&deref(deref(sampler, "sampler"), "*sampler"));
        *sampler = nullptr;
        begin_sequence(deref(engine, "engine"), seq_id, std::move(owned));
    });
}

int32_t spec_engine_seq_end(spec_engine * engine, int32_t seq_id) {
    return guarded([&] {
        at(deref(engine, "engine"), seq_id);
        clear_sequence(*engine, seq_id);
    });
}

int32_t spec_engine_seq_start(spec_engine * engine, const spec_start * start,
                              spec_sampler ** sampler, int32_t * n_kept) {
    return guarded([&] {
        deref(n_kept, "n_kept") = 0;
        *n_kept = start_sequence(deref(engine, "engine"), deref(start, "start"),
                                 deref(sampler, "sampler"));
    });
}

int32_t spec_engine_seq_park(spec_engine * engine, int32_t seq_id, spec_sampler ** out) {
    return guarded([&] {
        deref(out, "out") = nullptr;
        *out = park_sequence(deref(engine, "engine"), seq_id).release();
    });
}

int32_t spec_engine_seq_n_past(const spec_engine * engine, int32_t seq_id) {
    int32_t n = 0;
    const int32_t rc = guarded(
        [&] { n = at(const_cast<spec_engine &>(deref(engine, "engine")), seq_id).n_past(); });
    return rc == SPEC_OK ? n : rc;
}

int32_t spec_engine_n_cells_used(const spec_engine * engine) {
    int32_t n = 0;
    const int32_t rc = guarded([&] {
        const spec_engine & e = deref(engine, "engine");
        for (int32_t seq_id = 0; seq_id < e.limits.n_seq_max; ++seq_id) {
            const llama_pos target = llama_memory_seq_pos_max(e.target_memory(), seq_id) + 1;
            const llama_pos draft =
                e.draft ? llama_memory_seq_pos_max(e.draft_memory(), seq_id) + 1 : 0;
            n += std::max(target, draft);
        }
    });
    return rc == SPEC_OK ? n : rc;
}

int32_t spec_engine_get_draft_work(const spec_engine * engine, spec_draft_work * out) {
    return guarded([&] { deref(out, "out") = deref(engine, "engine").draft_work; });
}

int32_t spec_engine_step(spec_engine * engine, const spec_plan * plan, spec_result * out) {
    return guarded([&] { step(deref(engine, "engine"), deref(plan, "plan"), deref(out, "out")); });
}

void spec_engine_interrupt(spec_engine * engine) {
    if (engine != nullptr) {
        engine->is_interrupted = true;
    }
}

int32_t spec_engine_seq_draft(spec_engine * engine, const spec_draft_request * requests,
                              int32_t n_requests, int32_t * tokens, int32_t * counts) {
    return guarded(
        [&] { draft_by_hand(deref(engine, "engine"), requests, n_requests, tokens, counts); });
}

int32_t spec_engine_decode(spec_engine * engine, const spec_token * tokens, int32_t n_tokens) {
    return guarded([&] { decode_by_hand(deref(engine, "engine"), tokens, n_tokens); });
}

int32_t spec_engine_process(spec_engine * engine) {
    return guarded([&] {
        spec_engine & e = deref(engine, "engine");
        if (!e.is_decoded || e.is_processed) {
            fail(SPEC_ERR_BAD_PLAN, "there is no decoded batch that has not been processed");
        }
        process_batch(e);
        e.is_processed = true;
        for (const auto & token : e.batch.tokens) { // it wrote cells for ended sequences too
            if (!at(e, token.seq_id).is_begun) {
                clear_memory(e, token.seq_id);
            }
        }
    });
}

int32_t spec_engine_logits(spec_engine * engine, int32_t i, const float ** out) {
    return guarded([&] {
        check_logits_index(deref(engine, "engine"), i);
        deref(out, "out") = llama_get_logits_ith(engine->target.get(), i);
        if (*out == nullptr) {
            fail(SPEC_ERR_INTERNAL, "the decode left no logits");
        }
    });
}

int32_t spec_engine_seq_sample(spec_engine * engine, int32_t seq_id, int32_t i, int32_t * token) {
    return guarded([&] {
        begun(deref(engine, "engine"), seq_id);
        check_logits_index(*engine, i);
        if (engine->batch.tokens[static_cast<size_t>(i)].seq_id != seq_id) {
            fail(SPEC_ERR_INVALID_ARGUMENT,
                 "batch index " + std::to_string(i) + " belongs to another sequence");
        }
        deref(token, "token") = sample_by_hand(*engine, seq_id, i);
    });
}

int32_t spec_engine_seq_accept(spec_engine * engine, int32_t seq_id, int32_t n_accepted) {
    return guarded([&] { accept_by_hand(deref(engine, "engine"), seq_id, n_accepted); });
}

int32_t spec_engine_seq_rollback(spec_engine * engine, int32_t seq_id, int32_t n_past) {
    return guarded([&] { rollback_by_hand(deref(engine, "engine"), seq_id, n_past); });
}

void spec_decoder_default_params(spec_decoder_params * out) {
    if (out == nullptr) {
        return;
    }
    *out = {};
    out->n_seq_max = 1;
    out->n_branch_max = 32;
    out->n_outputs_max = 64;
    out->n_batch = 2048;
    out->n_ubatch = 512;
    out->n_rs_seq = 8;
    out->flash_attention = true;
}

int32_t spec_decoder_init(const spec_model * model, const spec_decoder_params * params,
                          spec_decoder ** out) {
    return guarded([&] {
        deref(out, "out") = nullptr;
        *out = make_decoder(deref(model, "model"), deref(params, "params"));
    });
}

int32_t spec_decoder_init_eagle3(const spec_model * model, spec_decoder * target,
                                 const spec_decoder_params * params, spec_decoder ** out) {
    return guarded([&] {
        deref(out, "out") = nullptr;
        *out = make_eagle3_decoder(deref(model, "model"), deref(target, "target"),
                                   deref(params, "params"));
    });
}

void spec_decoder_free(spec_decoder * decoder) {
    delete decoder;
}

int32_t spec_decoder_get_limits(const spec_decoder * decoder, spec_decoder_limits * out) {
    return guarded([&] { deref(out, "out") = deref(decoder, "decoder").limits; });
}

int32_t spec_decoder_seq_n_past(const spec_decoder * decoder, int32_t seq_id) {
    int32_t n = 0;
    const int32_t rc = guarded(
        [&] { n = at(const_cast<spec_decoder &>(deref(decoder, "decoder")), seq_id).n_past; });
    return rc == SPEC_OK ? n : rc;
}

int32_t spec_decoder_decode(spec_decoder * decoder, int32_t seq_id, const int32_t * tokens,
                            int32_t n_tokens, bool is_output) {
    return guarded(
        [&] { decode_sequence(deref(decoder, "decoder"), seq_id, tokens, n_tokens, is_output); });
}

int32_t spec_decoder_seq_rollback(spec_decoder * decoder, int32_t seq_id, int32_t n_past) {
    return guarded([&] { rollback_decoder(deref(decoder, "decoder"), seq_id, n_past); });
}

int32_t spec_decoder_tree(spec_decoder * decoder, int32_t seq_id, const int32_t * tokens,
                          const int32_t * parents, int32_t n_nodes) {
    return guarded(
        [&] { decode_tree(deref(decoder, "decoder"), seq_id, tokens, parents, n_nodes); });
}

int32_t spec_decoder_tree_commit(spec_decoder * decoder, int32_t seq_id, const int32_t * path,
                                 int32_t n_path) {
    return guarded([&] { commit_tree(deref(decoder, "decoder"), seq_id, path, n_path); });
}

int32_t spec_decoder_read(spec_decoder * decoder, int32_t what, float * out, size_t n_out) {
    return guarded([&] { read_rows(deref(decoder, "decoder"), what, out, n_out); });
}

int32_t spec_decoder_encode(spec_decoder * decoder, float * out, size_t n_out) {
    return guarded([&] { encode_target(deref(decoder, "decoder"), out, n_out); });
}

int32_t spec_decoder_set_states(spec_decoder * decoder, const float * states, int32_t n_rows) {
    return guarded([&] { set_states(deref(decoder, "decoder"), states, n_rows); });
}

int32_t spec_decoder_set_layer(spec_decoder * decoder, int32_t layer, bool is_kept) {
    return guarded([&] { set_layer(deref(decoder, "decoder"), layer, is_kept); });
}

int32_t spec_model_embed(const spec_model * model, const int32_t * tokens, int32_t n_tokens,
                         float * out) {
    return guarded([&] { embed(deref(model, "model"), tokens, n_tokens, out); });
}

int32_t spec_model_lm_head(const spec_model * model, const float * hidden, int32_t n_rows,
                           float * out) {
    return guarded([&] { lm_head(deref(model, "model"), hidden, n_rows, out); });
}

int32_t spec_engine_seq_save(spec_engine * engine, int32_t seq_id, void * buf, size_t cap,
                             size_t * n_needed) {
    return guarded([&] {
        deref(n_needed, "n_needed") = 0;
        save_sequence(deref(engine, "engine"), seq_id, static_cast<uint8_t *>(buf), cap, *n_needed);
    });
}

int32_t spec_engine_seq_load(spec_engine * engine, int32_t seq_id, const void * buf, size_t n) {
    return guarded([&] {
        if (n > 0) {
            deref(static_cast<const uint8_t *>(buf), "buf");
        }
        load_sequence(deref(engine, "engine"), seq_id, static_cast<const uint8_t *>(buf), n);
    });
}

int32_t spec_engine_seq_is_cold(const spec_engine * engine, int32_t seq_id, bool * out) {
    return guarded([&] {
        const sequence & seq = begun(const_cast<spec_engine &>(deref(engine, "engine")), seq_id);
        deref(out, "out") = seq.is_cold;
    });
}

int32_t spec_engine_seq_let_go(spec_engine * engine, int32_t seq_id) {
    return guarded([&] {
        begun(deref(engine, "engine"), seq_id);
        make_cold(*engine, seq_id);
    });
}

int32_t spec_engine_seq_take_up(spec_engine * engine, int32_t seq_id) {
    return guarded([&] { take_up(deref(engine, "engine"), seq_id); });
}

int32_t spec_engine_seq_tokens(const spec_engine * engine, int32_t seq_id, int32_t * tokens,
                               size_t cap, size_t * n_needed, int32_t * id_last) {
    return guarded([&] {
        const sequence & seq = begun(const_cast<spec_engine &>(deref(engine, "engine")), seq_id);
        deref(n_needed, "n_needed") = seq.tokens.size();
        if (id_last != nullptr) {
            *id_last = seq.id_last;
        }
        if (seq.tokens.size() > cap || (tokens == nullptr && !seq.tokens.empty())) {
            fail(SPEC_ERR_BUFFER_TOO_SMALL,
                 "the sequence has " + std::to_string(seq.tokens.size()) + " tokens");
        }
        std::copy(seq.tokens.begin(), seq.tokens.end(), tokens);
    });
}

int32_t spec_engine_inject_fault(spec_engine * engine, int32_t fault, int32_t n_steps) {
    return guarded([&] {
        spec_engine & e = deref(engine, "engine");
        check_range("fault", fault, SPEC_FAULT_NONE, SPEC_FAULT_COUNT - 1);
        check_range("n_steps", n_steps, 0, std::numeric_limits<int32_t>::max());
        e.fault = fault;
        e.n_fault = n_steps;
    });
}

int32_t spec_grammar_check(const char * grammar) {
    return guarded([&] { probe_grammar(*parse_grammar(nullptr, &deref(grammar, "grammar"))); });
}

int32_t spec_grammar_accepts(const char * grammar, const char * text, size_t n_text, bool * out) {
    return guarded([&] {
        const std::string input(n_text > 0 ? &deref(text, "text") : "", n_text);
        deref(out, "out") = grammar_accepts(&deref(grammar, "grammar"), input);
    });
}

int32_t spec_engine_fork(spec_engine * engine, int32_t src, int32_t n_past, const int32_t * dst,
                         spec_sampler ** samplers, int32_t n) {
    return guarded([&] { fork_sequences(deref(engine, "engine"), src, n_past, dst, samplers, n); });
}

void spec_embedder_default_params(spec_embedder_params * out) {
    if (out == nullptr) {
        return;
    }
    *out = {};
    out->n_batch = 2048;
    out->n_seq_max = 16;
    out->flash_attention = true;
}

int32_t spec_embedder_init(const spec_model * model, const spec_embedder_params * params,
                           spec_embedder ** out) {
    return guarded([&] {
        deref(out, "out") = nullptr;
        *out = make_embedder(deref(model, "model"), deref(params, "params"));
    });
}

void spec_embedder_free(spec_embedder * embedder) {
    delete embedder;
}

int32_t spec_embedder_get_limits(const spec_embedder * embedder, spec_embedder_limits * out) {
    return guarded([&] { deref(out, "out") = deref(embedder, "embedder").limits; });
}

int32_t spec_embedder_encode(spec_embedder * embedder, const int32_t * tokens, int32_t n_tokens,
                             const int32_t * lengths, int32_t n_texts, float * rows, size_t cap) {
    return guarded([&] {
        encode(deref(embedder, "embedder"), tokens, n_tokens, lengths, n_texts, rows, cap);
    });
}

} // extern "C"
