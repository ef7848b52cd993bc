// spec.cpp: the only file that includes llama.cpp. See spec.h for the contract.
//
// Reading order: errors and log; checks of arguments; models; samplers; engine construction;
// validation of a plan; the parts of a step; the step; the same parts one call at a time.

#include "spec.h"

#include "chat.h"
#include "common.h"
#include "llama.h"
#include "log.h"
#include "sampling.h"
#include "speculative.h"

// Staging API of llama.cpp: the layers that an EAGLE-3 draft reads.
#include "../src/llama-ext.h"
// Internal, for its scheduler: the way to the CPU backend of a context.
#include "../src/llama-context.h"
#include "ggml-cpu.h"
#include "gguf.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace {

// Errors and log.

thread_local std::string last_error;
thread_local std::string last_llama_error;

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

void on_llama_log(ggml_log_level level, const char * text, void * /*user*/) {
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
    mutable std::mutex chat_mutex; // guards `chat`, made at first use
    mutable common_chat_templates_ptr chat;

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

// A number of a GGUF header, or the default where it is absent or of another type.
uint32_t header_u32(const gguf_context * header, const std::string & key, uint32_t otherwise) {
    const int64_t id = gguf_find_key(header, key.c_str());
    const bool is_there = id >= 0 && gguf_get_kv_type(header, id) == GGUF_TYPE_UINT32;
    return is_there ? gguf_get_val_u32(header, id) : otherwise;
}

// Refuses numbers on which llama.cpp ends the process instead of refusing them itself: found by
// tests/bench/malformed.py.
void check_header(const std::string & path) {
    constexpr uint32_t N_LAYERS_MAX = 512; // LLAMA_MAX_LAYERS
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
    const uint32_t n_layer = number(".block_count", 1);
    const uint32_t n_rot = number(".rope.dimension_count", 0);
    const char * reason = nullptr;
    if (n_layer < 1 || n_layer > N_LAYERS_MAX) {
        reason = "block_count is not in [1, 512]";
    } else if (number(".nextn_predict_layers", 0) > n_layer) {
        reason = "nextn_predict_layers is above block_count";
    } else if (n_rot % 2 != 0 || n_rot > number(".attention.key_length", n_rot)) {
        reason = "rope.dimension_count is odd or above attention.key_length";
    }
    if (reason != nullptr) {
        fail(SPEC_ERR_BAD_MODEL, path + " is damaged: " + arch + "." + reason);
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
    mparams.load_mtp = true; // MTP heads are part of the model; whether they draft is chosen later
    mparams.progress_callback = on_progress;
    mparams.progress_callback_user_data = &progress;

    last_llama_error.clear();
    auto model = std::make_unique<spec_model>();
    model->model.reset(llama_model_load_from_file(path.c_str(), mparams));
    if (progress.is_cancelled) {
        fail(SPEC_ERR_CANCELLED, "loading " + path + " was stopped");
    }
    if (!model->model) {
        fail(SPEC_ERR_BAD_MODEL, path + " cannot be loaded" + llama_reason());
    }
    model->vocab = llama_model_get_vocab(model->model.get());
    model->vocab_only = params.vocab_only;
    return model.release();
}

spec_model_info describe(const spec_model & model) {
    const llama_model * m = model.model.get();
    spec_model_info info = {};
    info.n_vocab = model.n_vocab();
    info.token_bos = llama_vocab_bos(model.vocab);
    info.token_eos = llama_vocab_eos(model.vocab);
    info.add_bos = llama_vocab_get_add_bos(model.vocab);
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

std::string format_chat(const spec_model & model, const char * const * roles,
                        const char * const * contents, size_t n, bool add_generation_prompt) {
    if (llama_model_chat_template(model.model.get(), nullptr) == nullptr) {
        fail(SPEC_ERR_UNSUPPORTED, "the model has no chat template");
    }
    common_chat_templates_inputs inputs;
    inputs.add_generation_prompt = add_generation_prompt;
    inputs.use_jinja = true;
    for (size_t i = 0; i < n; ++i) {
        common_chat_msg message;
        message.role = &deref(roles[i], "role");
        message.content = &deref(contents[i], "content");
        inputs.messages.push_back(std::move(message));
    }
    const std::lock_guard<std::mutex> lock(model.chat_mutex);
    try {
        if (!model.chat) {
            model.chat = common_chat_templates_init(model.model.get(), "");
        }
        return common_chat_templates_apply(model.chat.get(), inputs).prompt;
    } catch (const std::exception & e) {
        fail(SPEC_ERR_BAD_TEMPLATE, std::string("the chat template failed: ") + e.what());
    }
}

} // namespace

// Samplers.

struct spec_sampler {
    common_sampler_ptr chain;
    float temperature = 0.0f;
    uint32_t seed = 0;
    bool logprobs = false;
    int32_t n_vocab = 0; // of the model that it was made for
};

namespace {

constexpr int32_t N_SEQ_LIMIT = 256; // llama.cpp's own bound
constexpr size_t GRAMMAR_BYTES_MAX = 65536;
constexpr int32_t GRAMMAR_DEPTH_MAX = 128; // llama.cpp's parser recurses once per open parenthesis
constexpr int32_t LOOK_BACK_MAX = 65536;
constexpr int32_t LOGIT_BIAS_MAX = 65536;
constexpr int32_t DRY_BREAKERS_MAX = 256;
constexpr size_t DRY_BREAKER_BYTES_MAX = 1024;

void check_grammar(const std::string & grammar) {
    if (grammar.size() > GRAMMAR_BYTES_MAX) {
        fail(SPEC_ERR_BAD_GRAMMAR, "the grammar has " + std::to_string(grammar.size()) +
                                       " bytes; at most " + std::to_string(GRAMMAR_BYTES_MAX) +
                                       " are accepted");
    }
    int32_t depth = 0;
    for (const char c : grammar) {
        depth += c == '(' ? 1 : c == ')' ? -1 : 0;
        if (depth > GRAMMAR_DEPTH_MAX) {
            fail(SPEC_ERR_BAD_GRAMMAR, "the grammar nests parentheses deeper than " +
                                           std::to_string(GRAMMAR_DEPTH_MAX) + " levels");
        }
    }
    if (grammar.compare(0, 11, "%llguidance") == 0) {
        fail(SPEC_ERR_BAD_GRAMMAR, "llguidance grammars are not supported; expected GBNF");
    }
}

// Compiles the grammar once on its own: where it is wrong, common_sampler_init would leak.
void check_grammar_compiles(const spec_model & model, const std::string & grammar) {
    if (grammar.empty()) {
        return;
    }
    last_llama_error.clear();
    llama_sampler * sampler = llama_sampler_init_grammar(model.vocab, grammar.c_str(), "root");
    if (sampler == nullptr) {
        fail(SPEC_ERR_BAD_GRAMMAR, "the grammar cannot be parsed" + llama_reason());
    }
    llama_sampler_free(sampler);
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
    if (p.grammar != nullptr && p.grammar[0] != '\0') {
        s.grammar = {COMMON_GRAMMAR_TYPE_USER, p.grammar};
    }
    return s;
}

spec_sampler * make_sampler(const spec_model & model, const spec_sampler_params & params) {
    check_sampler_params(params, model.n_vocab());
    const std::string grammar = params.grammar != nullptr ? params.grammar : "";
    check_grammar(grammar);
    if (!grammar.empty() && params.ignore_eos) {
        fail(SPEC_ERR_INVALID_ARGUMENT,
             "ignore_eos with a grammar: a finished grammar allows no token but the end");
    }
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
        fail(grammar.empty() ? SPEC_ERR_INVALID_ARGUMENT : SPEC_ERR_BAD_GRAMMAR,
             e.what() + llama_reason());
    }
    sampler->temperature = p.temperature;
    sampler->seed = p.seed;
    sampler->logprobs = p.logprobs;
    sampler->n_vocab = model.n_vocab();
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
};

struct sequence {
    bool is_begun = false;
    bool is_cold = false;     // draft state lost: no more drafts
    bool has_emitted = false; // a step has chosen a token: generation
    bool has_drafter_begun = false;
    llama_token id_last = LLAMA_TOKEN_NULL;
    llama_tokens tokens; // those in the target's KV cache
    std::unique_ptr<spec_sampler> sampler;
    common_speculative_ptr
        ngram;      // n-gram drafters keep tokens: one per sequence, made anew for each
    proposal draft; // of this step or round
    std::vector<uint8_t> checkpoint;

    // one call at a time
    bool is_proposed = false;
    int32_t n_past_proposed = 0;

    int32_t n_past() const { return static_cast<int32_t>(tokens.size()); }
};

} // namespace

struct spec_engine {
    const spec_model * target_model = nullptr;
    spec_engine_limits limits = {};
    spec_engine_params params = {};
    llama_context_ptr target;
    llama_context_ptr draft; // null for NONE and the n-gram kinds
    common_params_speculative spec_params;
    common_speculative_ptr spec; // null for NONE and the n-gram kinds; freed before the contexts
    rollback_kind target_rollback = rollback_kind::any;
    std::vector<sequence> sequences;
    common_batch batch;

    std::vector<int32_t> rows; // batch index of each plan entry's first token
    std::vector<spec_result_entry> out_entries;
    std::vector<int32_t> out_tokens;
    std::vector<float> out_logprobs;

    bool is_decoded = false; // by hand: a batch is there for logits and process
    bool is_processed = false;
    int32_t fault = SPEC_FAULT_NONE;
    int32_t n_fault = 0;

    llama_memory_t target_memory() const { return llama_get_memory(target.get()); }
    llama_memory_t draft_memory() const { return llama_get_memory(draft.get()); }

    bool is_ngram() const { return limits.draft_type >= SPEC_DRAFT_NGRAM_SIMPLE; }

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
    default:
        return COMMON_SPECULATIVE_TYPE_NONE;
    }
}

bool needs_draft_model(int32_t type) {
    return type == SPEC_DRAFT_EAGLE3 || type == SPEC_DRAFT_SIMPLE;
}

bool needs_draft_context(int32_t type) {
    return type == SPEC_DRAFT_MTP || needs_draft_model(type);
}

void check_engine_params(const spec_engine_params & p) {
    check_range("draft_type", p.draft_type, 0, SPEC_DRAFT_COUNT - 1);
    check_range("n_ctx", p.n_ctx, 0, std::numeric_limits<int32_t>::max());
    check_range("n_ctx_seq", p.n_ctx_seq, 0, std::numeric_limits<int32_t>::max());
    check_range("n_batch", p.n_batch, 1, 1 << 20);
    check_range("n_ubatch", p.n_ubatch, 1, p.n_batch);
    check_range("n_seq_max", p.n_seq_max, 1, N_SEQ_LIMIT);
    check_range("n_draft_max", p.n_draft_max, p.draft_type == SPEC_DRAFT_NONE ? 0 : 1, 256);
    check_range("n_rs_seq", p.n_rs_seq, -1, 256);
    check_range("n_threads", p.n_threads, 0, 512);
    check_range("n_threads_batch", p.n_threads_batch, 0, 512);
    check_range("p_min", p.p_min, 0.0, 0.999999);
    const int32_t n_draft = p.draft_type == SPEC_DRAFT_NONE ? 0 : p.n_draft_max;
    if (p.n_batch < p.n_seq_max * (1 + n_draft)) {
        fail(SPEC_ERR_INVALID_ARGUMENT,
             "n_batch is " + std::to_string(p.n_batch) +
                 "; expected at least n_seq_max * (1 + n_draft_max) = " +
                 std::to_string(p.n_seq_max * (1 + n_draft)) +
                 ", so that every sequence can verify a draft in one step");
    }
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

void check_eagle3(const spec_model & target, const spec_model & draft) {
    const llama_model * d = draft.model.get();
    const uint32_t n = llama_model_target_layer_ids_n(d);
    if (draft.arch() != "eagle3" || n != 3) {
        fail(SPEC_ERR_NOT_EAGLE3,
             "the draft model has architecture \"" + draft.arch() + "\" and reads " +
                 std::to_string(n) +
                 " layers of the target; expected an EAGLE-3 model that reads exactly 3");
    }
    const int32_t n_layer = llama_model_n_layer(target.model.get());
    for (uint32_t i = 0; i < n; ++i) {
        const int32_t id = llama_model_target_layer_ids(d)[i];
        if (id < 0 || id > n_layer) {
            fail(SPEC_ERR_INCOMPATIBLE_DRAFT,
                 "the EAGLE-3 draft reads layer " + std::to_string(id) +
                     " of its target; this target has " + std::to_string(n_layer));
        }
    }
    const std::string width = draft.meta("eagle3.target_hidden_size");
    const int32_t n_embd = llama_model_n_embd(target.model.get());
    if (!width.empty() && width != std::to_string(n_embd)) {
        fail(SPEC_ERR_INCOMPATIBLE_DRAFT, "the EAGLE-3 draft was made for hidden rows of width " +
                                              width + "; this target's have " +
                                              std::to_string(n_embd));
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

void check_draft(const spec_model & target, const spec_model * draft,
                 const spec_engine_params & p) {
    if (llama_model_has_encoder(target.model.get())) {
        fail(SPEC_ERR_UNSUPPORTED, "encoder-decoder models are not supported as targets");
    }
    if (llama_model_target_layer_ids_n(target.model.get()) > 0) {
        fail(SPEC_ERR_UNSUPPORTED,
             "this is a draft model (" + target.arch() + "); it cannot be a target");
    }
    if (p.draft_type == SPEC_DRAFT_MTP && llama_model_n_layer_nextn(target.model.get()) <= 0) {
        fail(SPEC_ERR_NO_MTP_HEADS, "the target (" + target.arch() +
                                        ") has no MTP (NextN) heads; choose another draft type");
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
    } else if (llama_model_target_layer_ids_n(draft->model.get()) > 0) {
        fail(SPEC_ERR_INCOMPATIBLE_DRAFT,
             "the draft model is of architecture \"" + draft->arch() +
                 "\", which drafts from the target's hidden states; expected an ordinary model");
    }
    check_target_name(target, *draft);
    if (!common_speculative_are_compatible(target.model.get(), draft->model.get())) {
        fail(SPEC_ERR_INCOMPATIBLE_DRAFT, "the draft model's vocabulary differs from the target's");
    }
}

int32_t all_cores() {
    return std::max(1, static_cast<int32_t>(std::thread::hardware_concurrency()));
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

// llama.cpp chooses kernels by the width of a batch: tinyBLAS from two rows on, tiled flash
// attention from 64 queries on, attention split over the cells for a single query. Each sums in an
// order of its own. The reference kernels sum a row alone, always in one order.
void make_exact(const spec_engine & engine, llama_context * context) {
    if (!engine.params.exact) {
        return;
    }
    ggml_backend_sched_t sched = context->get_sched();
    for (int i = 0; i < ggml_backend_sched_get_n_backends(sched); ++i) {
        ggml_backend_t backend = ggml_backend_sched_get_backend(sched, i);
        if (ggml_backend_is_cpu(backend)) {
            ggml_backend_cpu_set_use_ref(backend, true);
        }
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
    c.n_ctx = static_cast<uint32_t>(n);
    c.n_rs_seq = static_cast<uint32_t>(p.n_rs_seq >= 0 ? p.n_rs_seq : n_draft);
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

rollback_kind probe_rollback(llama_context * context, const char * which) {
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
    s.draft.n_min = 0; // above 1 it is not lossless with sampled drafts
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
    l.has_checkpoints = engine.target_rollback != rollback_kind::any && l.n_draft_max > l.n_rs_seq;
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
    engine->params = params;
    make_target(*engine);
    engine->target_rollback = probe_rollback(engine->target.get(), "target");
    make_drafter(*engine, draft);
    fill_limits(*engine);
    engine->batch = common_batch(engine->target.get());
    engine->sequences.resize(static_cast<size_t>(params.n_seq_max));
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

// Gives everything of a sequence back. Safe on an idle one.
void clear_sequence(spec_engine & engine, int32_t seq_id) {
    clear_memory(engine, seq_id);
    engine.sequences[static_cast<size_t>(seq_id)] = sequence{};
}

// N-gram drafters hold what they have seen of one sequence and cannot unsee it: some end the
// process when the history has become shorter.
void make_ngram(spec_engine & engine, sequence & seq) {
    common_params_speculative params = engine.spec_params;
    seq.ngram.reset(common_speculative_init(params, 1));
    if (!seq.ngram) {
        fail(SPEC_ERR_UNSUPPORTED, "llama.cpp offers no n-gram drafter of this type");
    }
    seq.has_drafter_begun = false;
}

void begin_sequence(spec_engine & engine, int32_t seq_id, std::unique_ptr<spec_sampler> sampler) {
    sequence & seq = at(engine, seq_id);
    if (seq.is_begun) {
        fail(SPEC_ERR_SEQ_BUSY, "sequence " + std::to_string(seq_id) + " has begun already");
    }
    if (sampler->n_vocab != engine.limits.n_vocab) {
        fail(SPEC_ERR_INVALID_ARGUMENT, "the sampler was made for a model with another vocabulary");
    }
    clear_sequence(engine, seq_id);
    if (engine.is_ngram()) {
        make_ngram(engine, seq);
    }
    if (engine.spec) {
        // An empty prompt makes the carried patch drop the hidden rows that the slot's former
        // sequence left behind.
        common_speculative_begin(engine.spec.get(), seq_id, {});
    }
    seq.sampler = std::move(sampler);
    seq.is_begun = true;
}

// Validation of a plan.

[[noreturn]] void bad_plan(int32_t seq_id, const std::string & text) {
    fail(SPEC_ERR_BAD_PLAN, "sequence " + std::to_string(seq_id) + ": " + text);
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
    if (seq.has_emitted) {
        if (e.n_tokens != 1 || e.is_output != 1 || tokens[0] != seq.id_last) {
            bad_plan(
                e.seq_id,
                "a generating sequence must be given its last emitted token alone, with is_output");
        }
    } else if (e.n_draft > 0) {
        bad_plan(e.seq_id, "n_draft needs a sequence that has emitted a token");
    }
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

void check_plan(spec_engine & engine, const spec_plan & plan) {
    if (plan.n_entries < 0 || plan.n_entries > engine.limits.n_seq_max || plan.n_tokens < 0) {
        fail(SPEC_ERR_BAD_PLAN, "the plan has " + std::to_string(plan.n_entries) + " entries and " +
                                    std::to_string(plan.n_tokens) + " tokens; expected at most " +
                                    std::to_string(engine.limits.n_seq_max) + " entries");
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
    check_capacity(engine, plan);
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
    const bool is_sampled = engine.params.probabilistic && seq.sampler->temperature > 0.0f;
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
    if (engine.draft) {
        llama_memory_seq_rm(engine.draft_memory(), seq_id, seq.n_past(), -1);
    }
}

// Drafts for all armed sequences: one batched call, or one call per sequence for the n-gram kinds.
void run_drafters(spec_engine & engine, const std::vector<int32_t> & armed) {
    if (!engine.is_ngram()) {
        if (!armed.empty()) {
            common_speculative_draft(engine.spec.get());
        }
        return;
    }
    for (const int32_t seq_id : armed) {
        common_speculative_draft(engine.sequences[static_cast<size_t>(seq_id)].ngram.get());
    }
}

void draft_plan(spec_engine & engine, const spec_plan & plan) {
    std::vector<int32_t> armed;
    for (int32_t i = 0; i < plan.n_entries; ++i) {
        const spec_plan_entry & e = plan.entries[i];
        sequence & seq = engine.sequences[static_cast<size_t>(e.seq_id)];
        seq.draft = {};
        if (e.n_draft > 0 && can_draft(engine, seq)) {
            arm(engine, seq, e.seq_id, e.n_draft, seq.id_last);
            armed.push_back(e.seq_id);
        }
    }
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

// Whether an entry fits into the ubatch of a group whose entries have drafts of the same length.
bool joins(const spec_engine & engine, const spec_plan & plan, const group & entries, size_t i,
           size_t n_draft) {
    if ((entries.size() + 1) * (1 + n_draft) > static_cast<size_t>(engine.limits.n_ubatch)) {
        return false;
    }
    return engine.limits.kv_unified ||
           plan.entries[entries.back()].seq_id + 1 == plan.entries[i].seq_id;
}

// Which entries are decoded together. All of them, except on a target with recurrent layers: there
// llama.cpp moves the state of a sequence, but not the snapshots that its rollback needs, when a
// later ubatch of the same decode gathers other sequences. So a decode with drafts is one ubatch:
// neighbours with drafts of one length, as many as fit. What has no draft is never taken back and
// goes first.
std::vector<group> make_groups(const spec_engine & engine, const spec_plan & plan) {
    std::vector<group> groups(1);
    std::map<size_t, group> open; // by length of the draft
    for (const size_t i : sorted_entries(plan)) {
        const auto id = static_cast<size_t>(plan.entries[i].seq_id);
        const size_t n_draft = engine.sequences[id].draft.tokens.size();
        if (engine.target_rollback == rollback_kind::any || n_draft == 0) {
            groups.front().push_back(i);
            continue;
        }
        group & neighbours = open[n_draft];
        if (!neighbours.empty() && !joins(engine, plan, neighbours, i, n_draft)) {
            groups.push_back(std::move(neighbours));
            neighbours.clear();
        }
        neighbours.push_back(i);
    }
    for (auto & [n_draft, entries] : open) {
        groups.push_back(std::move(entries));
    }
    if (groups.front().empty()) {
        groups.erase(groups.begin());
    }
    return groups;
}

int32_t decode_batch(spec_engine & engine) {
    if (engine.take_fault(SPEC_FAULT_DECODE_NO_ROOM)) {
        return 1;
    }
    const int32_t rc =
        llama_process(engine.target.get(), LLAMA_PROCESS_TYPE_DECODE, engine.batch.get());
    if (rc == 0) {
        llama_synchronize(engine.target.get());
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

// From here on the sequence generates without drafts: its draft state no longer follows the target.
void make_cold(spec_engine & engine, int32_t seq_id) {
    engine.sequences[static_cast<size_t>(seq_id)].is_cold = true;
    const bool is_shared = llama_get_ctx_other(engine.draft.get()) == engine.target.get();
    if (!is_shared) { // some MTP heads draft inside the target's own cache
        llama_memory_seq_rm(engine.draft_memory(), seq_id, -1, -1);
    }
}

void process_batch(spec_engine & engine) {
    if (!engine.spec) {
        return;
    }
    const bool is_failed = engine.take_fault(SPEC_FAULT_PROCESS);
    if (!is_failed && common_speculative_process(engine.spec.get(), engine.batch)) {
        return;
    }
    for (const auto & token : engine.batch.tokens) {
        make_cold(engine, token.seq_id);
    }
}

float logprob(spec_engine & engine, int32_t i_batch, llama_token token) {
    const float * logits = llama_get_logits_ith(engine.target.get(), i_batch);
    if (logits == nullptr) {
        fail(SPEC_ERR_SAMPLING_FAILED, "the decode left no logits");
    }
    const float max_logit = *std::max_element(logits, logits + engine.limits.n_vocab);
    double sum = 0.0;
    for (int32_t i = 0; i < engine.limits.n_vocab; ++i) {
        sum += std::exp(static_cast<double>(logits[i]) - static_cast<double>(max_logit));
    }
    return static_cast<float>(static_cast<double>(logits[token]) - static_cast<double>(max_logit) -
                              std::log(sum));
}

// Where a grammar or the biases allow no token at all, llama.cpp chooses a forbidden one.
void check_allowed(common_sampler * sampler) {
    const llama_token_data_array * c = common_sampler_get_candidates(sampler, false);
    if (c->selected < 0 || !(c->data[c->selected].logit > -INFINITY)) {
        fail(SPEC_ERR_SAMPLING_FAILED, "the grammar and the biases allow no token here");
    }
}

// Chooses the tokens that a sequence emits: the accepted part of its draft and one of the target's
// own.
llama_tokens verify(spec_engine & engine, sequence & seq, int32_t i_first) {
    std::vector<int> idxs(seq.draft.tokens.size() + 1);
    for (size_t i = 0; i < idxs.size(); ++i) {
        idxs[i] = i_first + static_cast<int>(i);
        if (llama_get_logits_ith(engine.target.get(), idxs[i]) == nullptr) {
            fail(SPEC_ERR_SAMPLING_FAILED, "the decode left no logits");
        }
    }
    common_sampler * sampler = seq.sampler->chain.get();
    llama_tokens emitted =
        seq.draft.q.empty()
            ? common_sampler_sample_and_accept_n(sampler, engine.target.get(), idxs,
                                                 seq.draft.tokens)
            : common_sampler_sample_and_accept_n_rejection(sampler, engine.target.get(), idxs,
                                                           seq.draft.tokens, seq.draft.q);
    check_allowed(sampler);
    for (size_t i = 0; i < emitted.size(); ++i) {
        const float logit = llama_get_logits_ith(engine.target.get(), idxs[i])[emitted[i]];
        if (!std::isfinite(logit)) {
            fail(SPEC_ERR_SAMPLING_FAILED, "the model's output is not finite");
        }
        if (llama_vocab_is_eog(engine.target_model->vocab, emitted[i])) {
            emitted.resize(i + 1); // the rejection rule goes on after an accepted end token
        }
    }
    return emitted;
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
    if (seq.checkpoint.empty() ||
        (engine.target_rollback == rollback_kind::bounded && n_back <= engine.limits.n_rs_seq)) {
        if (!llama_memory_seq_rm(engine.target_memory(), e.seq_id, n_new, -1)) {
            fail(SPEC_ERR_DECODE_FAILED, "the rejected draft could not be taken back");
        }
        return;
    }
    replays.push_back(
        {i_entry, e.n_past, llama_tokens(seq.tokens.begin() + e.n_past, seq.tokens.end())});
}

void emit(spec_engine & engine, const sequence & seq, spec_result_entry & r,
          const llama_tokens & emitted, int32_t i_first) {
    r.token_offset = static_cast<int32_t>(engine.out_tokens.size());
    r.n_tokens = static_cast<int32_t>(emitted.size());
    for (size_t i = 0; i < emitted.size(); ++i) {
        engine.out_tokens.push_back(emitted[i]);
        engine.out_logprobs.push_back(
            seq.sampler->logprobs ? logprob(engine, i_first + static_cast<int32_t>(i), emitted[i])
                                  : std::numeric_limits<float>::quiet_NaN());
    }
    if (llama_vocab_is_eog(engine.target_model->vocab, emitted.back())) {
        r.flags |= SPEC_RESULT_EOG;
    }
}

void finish_output(spec_engine & engine, sequence & seq, const spec_plan_entry & e, size_t i_entry,
                   spec_result_entry & r, std::vector<pending_replay> & replays) {
    const int32_t n_draft = static_cast<int32_t>(seq.draft.tokens.size());
    const int32_t i_first = engine.rows[i_entry] + e.n_tokens - 1;
    const llama_tokens emitted = verify(engine, seq, i_first);
    const int32_t n_acc = static_cast<int32_t>(emitted.size()) - 1;
    emit(engine, seq, r, emitted, i_first);
    r.n_drafted = n_draft;
    r.n_accepted = n_acc;
    if (n_draft > 0) {
        common_speculative_accept(drafter_of(engine, seq), drafter_id(seq, e.seq_id),
                                  static_cast<uint16_t>(n_acc));
    }
    seq.tokens.insert(seq.tokens.end(), emitted.begin(), emitted.end() - 1);
    seq.id_last = emitted.back();
    seq.has_emitted = true;
    roll_back(engine, seq, e, i_entry, seq.n_past(), n_draft - n_acc, replays);
}

void finish_entry(spec_engine & engine, const spec_plan & plan, size_t i_entry,
                  std::vector<pending_replay> & replays) {
    const spec_plan_entry & e = plan.entries[i_entry];
    sequence & seq = engine.sequences[static_cast<size_t>(e.seq_id)];
    spec_result_entry & r = engine.out_entries[i_entry];
    const int32_t * ids = plan.tokens + e.token_offset;
    if (!seq.has_emitted) { // emitted tokens have passed the sampler already
        for (int32_t k = 0; k < e.n_tokens; ++k) {
            common_sampler_accept(seq.sampler->chain.get(), ids[k], false);
        }
    }
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
    engine.out_entries.assign(static_cast<size_t>(plan.n_entries), spec_result_entry{});
    for (int32_t i = 0; i < plan.n_entries; ++i) {
        engine.out_entries[static_cast<size_t>(i)].seq_id = plan.entries[i].seq_id;
        engine.out_entries[static_cast<size_t>(i)].n_past = plan.entries[i].n_past;
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
    out.t_draft_us = now_us() - t_begin;
    if (engine.take_fault(SPEC_FAULT_THROW)) {
        throw std::runtime_error("injected fault");
    }
    for (const group & entries : make_groups(engine, plan)) {
        if (guarded([&] { run_group(engine, plan, entries, out); }) != SPEC_OK) {
            fail_entries(engine, plan, entries);
        }
    }
}

void step(spec_engine & engine, const spec_plan & plan, spec_result & out) {
    check_plan(engine, plan);
    out = {};
    const int64_t t_begin = now_us();
    begin_result(engine, plan);
    if (plan.n_entries > 0 && guarded([&] { run_step(engine, plan, out); }) != SPEC_OK) {
        group all(static_cast<size_t>(plan.n_entries));
        std::iota(all.begin(), all.end(), size_t{0});
        fail_entries(engine, plan, all);
    }
    out.entries = engine.out_entries.data();
    out.n_entries = static_cast<int32_t>(engine.out_entries.size());
    out.tokens = engine.out_tokens.data();
    out.logprobs = engine.out_logprobs.data();
    out.n_tokens = static_cast<int32_t>(engine.out_tokens.size());
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
    std::vector<int32_t> armed;
    for (int32_t i = 0; i < n; ++i) {
        check_draft_request(engine, requests[i]);
        if (std::find(armed.begin(), armed.end(), requests[i].seq_id) != armed.end()) {
            bad_plan(requests[i].seq_id, "it is asked for twice");
        }
        armed.push_back(requests[i].seq_id);
    }
    for (int32_t i = 0; i < n; ++i) {
        sequence & seq = begun(engine, requests[i].seq_id);
        seq.draft = {};
        if (!can_draft(engine, seq)) {
            armed.erase(std::find(armed.begin(), armed.end(), requests[i].seq_id));
        } else {
            arm(engine, seq, requests[i].seq_id, requests[i].n_draft, requests[i].id_last);
        }
    }
    run_drafters(engine, armed);
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
    const int32_t rc = decode_batch(engine);
    if (rc == 1) {
        fail(SPEC_ERR_NO_ROOM, "no room in the KV cache");
    }
    if (rc != 0) {
        for (int32_t i = 0; i < n; ++i) {
            clear_sequence(engine, tokens[i].seq_id);
        }
        fail(SPEC_ERR_DECODE_FAILED, "the decode returned " + std::to_string(rc) +
                                         "; the batch's sequences were cleared" + llama_reason());
    }
    for (int32_t i = 0; i < n; ++i) {
        sequence & seq = begun(engine, tokens[i].seq_id);
        seq.tokens.push_back(tokens[i].token);
        if (!seq.is_proposed && tokens[i].is_output == 0) {
            common_sampler_accept(seq.sampler->chain.get(), tokens[i].token, false);
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
        common_speculative_accept(drafter_of(engine, seq), drafter_id(seq, seq_id),
                                  static_cast<uint16_t>(n_accepted));
    }
    seq.is_proposed = false;
    seq.draft = {};
    if (n_back == 0) {
        return;
    }
    cut_draft(engine, seq_id, n_new);
    if (!llama_memory_seq_rm(engine.target_memory(), seq_id, n_new, -1)) {
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
        return;
    }
    const int32_t n_back = seq.n_past() - n_past;
    if (n_past > 0 && engine.target_rollback != rollback_kind::any &&
        n_back > engine.limits.n_rs_seq) {
        fail(SPEC_ERR_UNSUPPORTED, "a recurrent target can go back " +
                                       std::to_string(engine.limits.n_rs_seq) + " tokens, not " +
                                       std::to_string(n_back));
    }
    if (!llama_memory_seq_rm(engine.target_memory(), seq_id, n_past > 0 ? n_past : -1, -1)) {
        fail(SPEC_ERR_UNSUPPORTED, "the target cannot go back from here; decode first");
    }
    seq.is_proposed = false;
    seq.has_emitted = false;
    seq.draft = {};
    if (engine.spec) {
        // The draft's hidden rows do not go back with the cache.
        cut_draft(engine, seq_id, n_past);
        make_cold(engine, seq_id);
    } else if (seq.ngram) {
        make_ngram(engine, seq);
    }
    seq.tokens.resize(static_cast<size_t>(n_past));
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

int32_t spec_model_chat(const spec_model * model, const char * const * roles,
                        const char * const * contents, size_t n_messages,
                        bool add_generation_prompt, char * buf, size_t cap, size_t * n_needed) {
    return guarded([&] {
        if (n_messages == 0) {
            fail(SPEC_ERR_INVALID_ARGUMENT, "there are no messages");
        }
        copy_out(format_chat(deref(model, "model"), &deref(roles, "roles"),
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
}

int32_t spec_sampler_init(const spec_model * model, const spec_sampler_params * params,
                          spec_sampler ** out) {
    return guarded([&] {
        deref(out, "out") = nullptr;
        *out = make_sampler(deref(model, "model"), deref(params, "params"));
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

int32_t spec_engine_step(spec_engine * engine, const spec_plan * plan, spec_result * out) {
    return guarded([&] { step(deref(engine, "engine"), deref(plan, "plan"), deref(out, "out")); });
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
        sequence & seq = begun(deref(engine, "engine"), seq_id);
        check_logits_index(*engine, i);
        if (engine->batch.tokens[static_cast<size_t>(i)].seq_id != seq_id) {
            fail(SPEC_ERR_INVALID_ARGUMENT,
                 "batch index " + std::to_string(i) + " belongs to another sequence");
        }
        common_sampler * sampler = seq.sampler->chain.get();
        deref(token, "token");
        const llama_token chosen = common_sampler_sample(sampler, engine->target.get(), i);
        check_allowed(sampler);
        *token = chosen;
        common_sampler_accept(sampler, *token, true);
    });
}

int32_t spec_engine_seq_accept(spec_engine * engine, int32_t seq_id, int32_t n_accepted) {
    return guarded([&] { accept_by_hand(deref(engine, "engine"), seq_id, n_accepted); });
}

int32_t spec_engine_seq_rollback(spec_engine * engine, int32_t seq_id, int32_t n_past) {
    return guarded([&] { rollback_by_hand(deref(engine, "engine"), seq_id, n_past); });
}

int32_t spec_engine_inject_fault(spec_engine * engine, int32_t fault, int32_t n_steps) {
    return guarded([&] {
        spec_engine & e = deref(engine, "engine");
        check_range("fault", fault, SPEC_FAULT_NONE, SPEC_FAULT_THROW);
        check_range("n_steps", n_steps, 0, std::numeric_limits<int32_t>::max());
        e.fault = fault;
        e.n_fault = n_steps;
    });
}

} // extern "C"
