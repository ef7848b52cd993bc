// Decoders: one model, decoded by hand, with its hidden rows; EAGLE-3 drafts beside a target.

#include "internal.hpp"

#include <algorithm>
#include <iterator>
#include <limits>
#include <memory>
#include <string>
#include <vector>

namespace drafthouse {

namespace {

constexpr int32_t N_BATCH_MIN = 16;
constexpr int32_t DECODE_THREW = std::numeric_limits<int32_t>::min(); // no code of llama.cpp's

void check_decoder_params(const spec_decoder_params & p) {
    check_range("n_seq_max", p.n_seq_max, 1, N_SEQ_LIMIT);
    check_range("n_branch_max", p.n_branch_max, 0, N_SEQ_LIMIT - p.n_seq_max);
    check_range("n_batch", p.n_batch, 1, 1 << 20);
    check_range("n_ubatch", p.n_ubatch, 1, p.n_batch);
    check_range("n_outputs_max", p.n_outputs_max, 1, p.n_ubatch);
    check_range("n_ctx_seq", p.n_ctx_seq, 0, 1 << 24);
    check_range("n_rs_seq", p.n_rs_seq, 0, N_RS_SEQ_LIMIT);
    check_range("n_threads", p.n_threads, 0, 512);
}

void check_decoder_model(const spec_model & model) {
    if (model.vocab_only) {
        fail(SPEC_ERR_INVALID_ARGUMENT, "the model was loaded with vocab_only");
    }
    if (!layers_read(model.model.get()).empty()) {
        fail(SPEC_ERR_UNSUPPORTED, "the model (" + model.arch() +
                                       ") drafts from another model's hidden states and cannot "
                                       "decode on its own");
    }
    check_generates(model, "model");
    check_hidden_rows(model, /*has_logits*/ true);
}

// What a decoder asks of llama.cpp; a tree's nodes stand beside full sequences.
llama_context_params decoder_context_params(const spec_model & model, const spec_decoder_params & p,
                                            int32_t n_ctx_seq, bool has_trees) {
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
    if (!model.meta(model.arch() + ".pooling_type").empty()) {
        c.pooling_type = LLAMA_POOLING_TYPE_NONE; // rows of tokens are wanted, not of sequences
    }
    c.flash_attn_type =
        p.flash_attention ? LLAMA_FLASH_ATTN_TYPE_AUTO : LLAMA_FLASH_ATTN_TYPE_DISABLED;
    c.kv_unified = has_trees; // a node shared by branches is one cell of one pool
    return c;
}

void make_decoder_context(spec_decoder & decoder, const spec_decoder_params & p) {
    llama_model * m = decoder.model->model.get();
    const bool has_trees = p.n_branch_max > 0 && !is_recurrent_model(*decoder.model);
    const int32_t n_ctx_seq = std::min(p.n_ctx_seq > 0 ? p.n_ctx_seq : llama_model_n_ctx_train(m),
                                       positions_of(*decoder.model));
    llama_context_params c = decoder_context_params(*decoder.model, p, n_ctx_seq, has_trees);
    c.ctx_other = decoder.target != nullptr ? decoder.target->context.get() : nullptr;
    forget_llama_reason();
    decoder.context.reset(llama_init_from_model(m, c));
    if (!decoder.context) {
        fail_context("the decoder's");
    }
    check_memory(decoder.context.get(), "model");
    set_seq_length(decoder.context.get(), n_ctx_seq);
    decoder.limits.n_ctx_seq = n_ctx_seq;
    decoder.limits.n_branch_max = has_trees && carries_trees(decoder.memory()) ? p.n_branch_max : 0;
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
    const layer_marks * marks = marks_of(decoder.model->arch());
    const bool is_shown = marks != nullptr && marks->is_residual;
    l.has_layers = decoder.target == nullptr && is_shown;
    l.is_last_layer_normed = !(is_shown && marks->has_last);
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
    for (const int32_t id : layers_read(draft)) {
        if (id == target.limits.n_layer) {
            give_last_layer(target.context.get(), true, /*masked*/ false);
        } else {
            give_layer_input(target.context.get(), id, true);
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
    give_last_layer(decoder->context.get(), true, /*masked*/ true);
    keep_inputs(target, model.model.get());
    return decoder.release();
}

void check_no_tree(const spec_decoder & decoder, int32_t seq_id) {
    if (decoder.tree_owner == seq_id) {
        bad_plan(seq_id, "a tree hangs on it; commit a path first");
    }
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
        fail(SPEC_ERR_DECODE_FAILED,
             decode_reason(rc) + "; the sequence was cleared" + llama_reason());
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
        give_layer_input(decoder.context.get(), layer + 1, is_kept);
    }
    decoder.wanted_layers[i] = is_kept;
}

const float * row(spec_decoder & decoder, int32_t what, int32_t i) {
    llama_context * ctx = decoder.context.get();
    if (what == SPEC_ROWS_LOGITS) {
        return llama_get_logits_ith(ctx, i);
    }
    if (is_hidden_row(decoder, what)) {
        return decoder.target != nullptr ? last_layer_row(ctx, i)
                                         : llama_get_embeddings_ith(ctx, i);
    }
    const float * rows = layer_input_rows(ctx, what + 1);
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
    const std::vector<int32_t> ids = layers_read(draft);
    const size_t width = target.n_embd();
    std::vector<float> features(static_cast<size_t>(n) * ids.size() * width);
    for (size_t i = 0; i < ids.size(); ++i) {
        const int32_t id = ids[i];
        const float * rows = id == target.limits.n_layer
                                 ? last_layer_rows(target.context.get())
                                 : layer_input_rows(target.context.get(), id);
        if (rows == nullptr) {
            fail(SPEC_ERR_INTERNAL,
                 "the target's decode left no rows of layer " + std::to_string(id));
        }
        for (size_t t = 0; t < static_cast<size_t>(n); ++t) {
            std::copy_n(rows + t * width, width, features.data() + (t * ids.size() + i) * width);
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
    forget_llama_reason();
    const int32_t rc = llama_process(ctx, LLAMA_PROCESS_TYPE_ENCODE, decoder.batch.get());
    const float * rows = rc == 0 ? last_layer_rows(ctx) : nullptr;
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

} // namespace

bool is_recurrent_model(const spec_model & model) {
    return llama_model_is_recurrent(model.model.get()) || llama_model_is_hybrid(model.model.get());
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
// Throws nothing: what threw in its midst may have left cells, which the caller clears as after any
// decode that failed.
int32_t run_decoder(spec_decoder & decoder, bool is_output) noexcept {
    decoder.n_rows = decoder.n_decoded = 0;
    int32_t rc = 0;
    const int32_t status = guarded([&] {
        decoder.kept_layers = decoder.wanted_layers;
        const bool is_draft = decoder.target != nullptr;
        for (int32_t i = 0; is_draft && i < decoder.batch.size(); ++i) {
            float * state = decoder.states.data() + static_cast<size_t>(i) * decoder.n_embd();
            decoder.batch.set_embd(i, {state, 1, decoder.n_embd()});
        }
        llama_set_embeddings(decoder.context.get(), is_output && !is_draft);
        forget_llama_reason();
        rc = llama_process(decoder.context.get(), LLAMA_PROCESS_TYPE_DECODE, decoder.batch.get());
        if (rc == 0) {
            llama_synchronize(decoder.context.get());
            decoder.n_decoded = decoder.batch.size();
            decoder.n_rows = is_output ? decoder.n_decoded : 0;
        }
    });
    decoder.states.clear();
    return status == SPEC_OK ? rc : DECODE_THREW;
}

// Why a decode failed, on the thread that ran it.
std::string decode_reason(int32_t rc) {
    return rc == DECODE_THREW ? std::string("the decode failed: ") + spec_last_error()
                              : "the decode returned " + std::to_string(rc);
}

} // namespace drafthouse

using namespace drafthouse;

extern "C" {

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
    const int32_t rc = guarded([&] { n = at(deref(decoder, "decoder"), seq_id).n_past; });
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

} // extern "C"
