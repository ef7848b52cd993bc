// Models: loading, description, tokenizer, and the tables at both ends.

#include "survey.hpp"

#include "ggml-backend.h"
#include "ggml-cpu.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace drafthouse {

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

// Tells files apart: all of a small one; of a large one its size, its head, where metadata and
// tensor table lie, and pieces spread over the rest.
uint64_t file_fingerprint(const std::string & path, std::streamoff n_head) {
    constexpr std::streamoff PIECE_BYTES = 64 << 10;
    constexpr int N_PIECES = 128;
    std::ifstream file(path, std::ios::binary | std::ios::ate);
    const std::streamoff n = file.tellg();
    std::vector<char> buf(static_cast<size_t>(std::min(std::max<std::streamoff>(n, 0), n_head)));
    uint64_t h = static_cast<uint64_t>(n);
    const auto add = [&](std::streamoff at, std::streamoff size) {
        file.clear(); // a piece at the end may have been cut short
        file.seekg(at);
        file.read(buf.data(), size);
        h = digest(h, buf.data(), static_cast<size_t>(file.gcount()));
    };
    add(0, static_cast<std::streamoff>(buf.size()));
    for (int i = 1; n > n_head && i <= N_PIECES; ++i) {
        const std::streamoff end = n_head + (n - n_head) / N_PIECES * i;
        add(std::max(end - PIECE_BYTES, n_head), PIECE_BYTES);
    }
    return h;
}

// The files of a model, the given one first; several where it is split.
std::vector<std::string> files_of(const spec_model & model, const std::string & path) {
    std::vector<std::string> files = {path};
    const std::string count = model.meta("split.count");
    const auto n = static_cast<int32_t>(std::strtol(count.c_str(), nullptr, 10));
    std::vector<char> prefix(path.size() + 1);
    std::vector<char> file(path.size() + 32);
    if (n > 1 && llama_split_prefix(prefix.data(), prefix.size(), path.c_str(), 0, n) > 0) {
        for (int32_t i = 1; i < n; ++i) {
            llama_split_path(file.data(), file.size(), prefix.data(), i, n);
            files.emplace_back(file.data());
        }
    }
    return files;
}

// Tells models apart, by all their files.
uint64_t fingerprint_of(const spec_model & model, const std::string & path) {
    constexpr std::streamoff HEAD_BYTES = 32 << 20;
    constexpr std::streamoff HEAD_BYTES_OF_OTHERS = 1 << 20; // they have no metadata
    const std::vector<std::string> files = files_of(model, path);
    uint64_t h = file_fingerprint(path, HEAD_BYTES);
    for (size_t i = 1; i < files.size(); ++i) {
        const uint64_t other = file_fingerprint(files[i], HEAD_BYTES_OF_OTHERS);
        h = digest(h, &other, sizeof other);
    }
    return h;
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

bool ends_with(const std::string & name, std::string_view end) {
    return name.size() >= end.size() &&
           name.compare(name.size() - end.size(), end.size(), end) == 0;
}

// Whether what computes with a tensor takes numbers of its type. Products take what the CPU has a
// kernel for, on every device; what scales or shifts them is float32 on a CPU.
bool is_computable(const std::string & name, const ggml_tensor & tensor) {
    constexpr std::string_view INDICES[] = {"d2t", "ffn_gate_tid2eid.weight"};
    constexpr std::string_view FACTORS[] = {"norm.weight", ".bias", ".ssm_a", "ssm_conv1d.weight",
                                            "shortconv.conv.weight"};
    const auto is_of = [&](std::string_view end) { return ends_with(name, end); };
    if (std::any_of(std::begin(INDICES), std::end(INDICES), is_of)) {
        return true;
    }
    if (std::any_of(std::begin(FACTORS), std::end(FACTORS), is_of)) {
        const bool is_host = tensor.buffer == nullptr || ggml_backend_buffer_is_host(tensor.buffer);
        return tensor.type == GGML_TYPE_F32 || (tensor.type == GGML_TYPE_F16 && !is_host);
    }
    return ggml_get_type_traits_cpu(tensor.type)->vec_dot != nullptr;
}

// llama.cpp ends the process where it is to compute with others, at the first token.
void check_tensor_types(const llama_model * model, const std::string & path) {
    for (const auto & [name, tensor] : tensors_of(model)) {
        if (!is_computable(name, *tensor)) {
            fail(SPEC_ERR_UNSUPPORTED, path + " cannot be computed: its tensor \"" + name +
                                           "\" has the type " + ggml_type_name(tensor->type) +
                                           ", which llama.cpp does not take there");
        }
    }
}

// The spellings of the tokens that are read as such only where control tokens are parsed. One that
// begins with another is left out: where it stands, the other stands too.
std::vector<std::string> control_spellings(const llama_vocab * vocab) {
    std::vector<std::string> spellings;
    if (llama_vocab_type(vocab) == LLAMA_VOCAB_TYPE_NONE) {
        return spellings; // llama.cpp ends the process when it is asked about a token then
    }
    for (llama_token id = 0; id < llama_vocab_n_tokens(vocab); ++id) {
        const llama_token_attr attr = llama_vocab_get_attr(vocab, id);
        const std::string text = llama_vocab_get_text(vocab, id);
        if ((attr & (LLAMA_TOKEN_ATTR_CONTROL | LLAMA_TOKEN_ATTR_UNKNOWN)) && !text.empty()) {
            spellings.push_back(text);
        }
    }
    std::sort(spellings.begin(), spellings.end());
    std::vector<std::string> shortest;
    for (const std::string & text : spellings) {
        if (shortest.empty() || text.compare(0, shortest.back().size(), shortest.back()) != 0) {
            shortest.push_back(text);
        }
    }
    return shortest;
}

// Where spellings stand in a text, without overlap. Of all that a text could begin with, only the
// greatest that is not greater than the text can be its beginning: none begins with another.
std::vector<spec_span> find_spellings(const std::vector<std::string> & spellings,
                                      std::string_view text) {
    std::vector<spec_span> found;
    std::array<bool, 256> is_first{};
    size_t n_longest = 0;
    for (const std::string & spelling : spellings) {
        is_first[static_cast<unsigned char>(spelling[0])] = true;
        n_longest = std::max(n_longest, spelling.size());
    }
    for (size_t at = 0; at < text.size();) {
        size_t n = 0;
        if (is_first[static_cast<unsigned char>(text[at])]) {
            const std::string_view rest = text.substr(at, n_longest);
            const auto after = std::upper_bound(spellings.begin(), spellings.end(), rest);
            if (after != spellings.begin() &&
                rest.substr(0, std::prev(after)->size()) == *std::prev(after)) {
                n = std::prev(after)->size();
                found.push_back({at, at + n});
            }
        }
        at += std::max<size_t>(n, 1);
    }
    return found;
}

// llama.cpp ends the process when it is asked for the texts of tokens that have none.
void check_tokenizer(const spec_model & model, const std::string & what) {
    if (llama_vocab_type(model.vocab) == LLAMA_VOCAB_TYPE_NONE) {
        fail(SPEC_ERR_UNSUPPORTED, "the model's file has no tokenizer" + what);
    }
}

std::string checked_text(const spec_model & model, const char * text, size_t n_text) {
    if (n_text > static_cast<size_t>(std::numeric_limits<int32_t>::max())) {
        fail(SPEC_ERR_INVALID_ARGUMENT, "the text is longer than 2 GiB");
    }
    check_tokenizer(model, "; give token ids");
    return std::string(n_text > 0 ? &deref(text, "text") : "", n_text);
}

// A tokenizer without bytes and without a token for what it does not know throws, or gives −1.
template <typename Tokenize> llama_tokens known_tokens(Tokenize && tokenize) {
    llama_tokens ids = {LLAMA_TOKEN_NULL};
    try {
        ids = tokenize();
    } catch (const std::out_of_range &) { // llama.cpp's own look-up
    }
    if (std::find(ids.begin(), ids.end(), LLAMA_TOKEN_NULL) != ids.end()) {
        fail(SPEC_ERR_UNSUPPORTED, "the model's tokenizer has no token for a part of the text, nor "
                                   "one for what it does not know");
    }
    return ids;
}

void give_tokens(const llama_tokens & ids, int32_t * tokens, size_t cap, size_t * n_needed) {
    deref(n_needed, "n_needed") = ids.size();
    if (ids.size() > cap || (tokens == nullptr && !ids.empty())) {
        fail(SPEC_ERR_BUFFER_TOO_SMALL, "the text has " + std::to_string(ids.size()) + " tokens");
    }
    std::copy(ids.begin(), ids.end(), tokens);
}

std::vector<std::pair<size_t, size_t>> checked_spans(const spec_span * spans, size_t n_spans,
                                                     size_t n_text) {
    std::vector<std::pair<size_t, size_t>> checked;
    size_t end = 0;
    for (size_t i = 0; i < n_spans; ++i) {
        const spec_span & span = (&deref(spans, "plain"))[i];
        if (span.begin < end || span.end <= span.begin || span.end > n_text) {
            fail(SPEC_ERR_INVALID_ARGUMENT,
                 "plain spans must be in order, apart and within the text");
        }
        checked.emplace_back(span.begin, span.end);
        end = span.end;
    }
    return checked;
}

} // namespace

// What llama.cpp is told of a model, but for the progress; `places` must live as long as the
// result.
llama_model_params llama_params_of(const spec_model_params & params,
                                   std::unique_ptr<placement> & places) {
    llama_model_params mparams = llama_model_default_params();
    mparams.vocab_only = params.vocab_only;
    mparams.load_mtp = !params.skip_mtp;
    places = place(params, mparams);
    return mparams;
}

// llama.cpp tells in words alone why a load has failed. Most reasons are the file; these are not.
[[noreturn]] void fail_load(const std::string & path) {
    const std::string reason = llama_reason();
    const auto tells = [&](const char * words) { return reason.find(words) != std::string::npos; };
    const std::string message = path + " cannot be loaded" + reason;
    if (tells("unable to allocate")) {
        fail(SPEC_ERR_OUT_OF_MEMORY, message);
    }
    if (tells("SPLIT_MODE_TENSOR not implemented")) {
        fail(SPEC_ERR_INVALID_ARGUMENT, message);
    }
    fail(SPEC_ERR_BAD_MODEL, message);
}

// has_weights false: for a survey, which asks what memory they would take.
std::unique_ptr<spec_model> load_model(const spec_model_params & params, bool has_weights) {
    init_process(); // `place` asks for the devices, where there are weights to be placed
    const std::string path = &deref(params.path, "path");
    check_gguf_magic(path);
    check_header(path);

    load_progress progress{params.progress, params.user, false};
    auto model = std::make_unique<spec_model>();
    llama_model_params mparams = llama_params_of(params, model->places);
    if (params.placed_by != nullptr) {
        place_weights(*params.placed_by, mparams);
    }
    if (!has_weights) {
        mparams.no_alloc = true;
        mparams.load_mode = LLAMA_LOAD_MODE_NONE;
    }
    mparams.progress_callback = on_progress;
    mparams.progress_callback_user_data = &progress;

    forget_llama_reason();
    expect_unused_mtp(params.skip_mtp);
    model->model.reset(llama_model_load_from_file(path.c_str(), mparams));
    expect_unused_mtp(false);
    if (progress.is_cancelled) {
        fail(SPEC_ERR_CANCELLED, "loading " + path + " was stopped");
    }
    if (!model->model) {
        fail_load(path);
    }
    model->vocab = llama_model_get_vocab(model->model.get());
    model->control = control_spellings(model->vocab);
    check_special_tokens(*model->vocab, path);
    check_tensor_types(model->model.get(), path);
    model->vocab_only = params.vocab_only;
    model->fingerprint = params.vocab_only || !has_weights ? 0 : fingerprint_of(*model, path);
    return model;
}

namespace {

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
    info.n_target_layers = static_cast<int32_t>(layers_read(m).size());
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

// The model's own tables, multiplied on the device that holds them.

ggml_tensor * find_tensor(const spec_model & model, const std::vector<std::string> & names) {
    for (const std::string & name : names) {
        for (const auto & [found, tensor] : tensors_of(model.model.get())) {
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

} // namespace drafthouse

using namespace drafthouse;

extern "C" {

int32_t spec_model_load(const spec_model_params * params, spec_model ** out) {
    return guarded([&] {
        deref(out, "out") = nullptr;
        *out = load_model(deref(params, "params"), /*has_weights*/ true).release();
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
        const std::string input = checked_text(m, text, n_text);
        const llama_tokens ids = known_tokens(
            [&] { return common_tokenize(m.vocab, input, add_special, parse_special); });
        give_tokens(ids, tokens, cap, n_needed);
    });
}

int32_t spec_model_tokenize_plain(const spec_model * model, const char * text, size_t n_text,
                                  const spec_span * plain, size_t n_plain, bool add_special,
                                  int32_t * tokens, size_t cap, size_t * n_needed) {
    return guarded([&] {
        const spec_model & m = deref(model, "model");
        deref(n_needed, "n_needed");
        const std::string input = checked_text(m, text, n_text);
        const auto spans = checked_spans(plain, n_plain, n_text);
        const llama_tokens ids =
            known_tokens([&] { return tokenize_plain(m.vocab, input, add_special, spans); });
        give_tokens(ids, tokens, cap, n_needed);
    });
}

int32_t spec_model_find_control(const spec_model * model, const char * text, size_t n_text,
                                spec_span * out, size_t cap, size_t * n_needed) {
    return guarded([&] {
        const spec_model & m = deref(model, "model");
        size_t & n_found = deref(n_needed, "n_needed");
        const std::vector<spec_span> found =
            find_spellings(m.control, {n_text > 0 ? &deref(text, "text") : "", n_text});
        n_found = found.size();
        if (n_found > cap || (out == nullptr && n_found > 0)) {
            fail(SPEC_ERR_BUFFER_TOO_SMALL,
                 "the text has " + std::to_string(n_found) + " control tokens");
        }
        std::copy(found.begin(), found.end(), out);
    });
}

int32_t spec_model_token_bytes(const spec_model * model, int32_t token, bool special, char * buf,
                               size_t cap, size_t * n_needed) {
    return guarded([&] {
        const spec_model & m = deref(model, "model");
        check_token(token, m.n_vocab(), "token");
        check_tokenizer(m, ": its tokens have no texts");
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

int32_t spec_model_embed(const spec_model * model, const int32_t * tokens, int32_t n_tokens,
                         float * out) {
    return guarded([&] { embed(deref(model, "model"), tokens, n_tokens, out); });
}

int32_t spec_model_lm_head(const spec_model * model, const float * hidden, int32_t n_rows,
                           float * out) {
    return guarded([&] { lm_head(deref(model, "model"), hidden, n_rows, out); });
}

} // extern "C"
