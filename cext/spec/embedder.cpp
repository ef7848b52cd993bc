// Embeddings of texts.

#include "internal.hpp"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <memory>
#include <string>

struct spec_embedder {
    spec_embedder_limits limits = {};
    int32_t n_text_max = 0; // most tokens of one text
    llama_context_ptr context;
    common_batch batch;
};

namespace drafthouse {

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
    if (!layers_read(model.model.get()).empty()) {
        fail(SPEC_ERR_UNSUPPORTED,
             "this is a draft model (" + model.arch() + "); it has no embeddings of its own");
    }
    if (llama_model_has_encoder(model.model.get()) && llama_model_has_decoder(model.model.get())) {
        fail(SPEC_ERR_UNSUPPORTED, "encoder-decoder models are not supported");
    }
    check_hidden_rows(model, /*has_logits*/ false);
    if (p.pooling == SPEC_POOLING_RANK && model.meta(model.arch() + ".pooling_type") != "4") {
        fail(SPEC_ERR_UNSUPPORTED, "rank pooling needs a reranker: a model with its own "
                                   "classification head");
    }
}

// One cache and one ubatch for all texts of a decode: a pooled row is made inside one ubatch, and
// models without causal attention read all tokens at once.
llama_context_params embedder_context(const spec_embedder_params & p) {
    llama_context_params c = llama_context_default_params();
    // A text has a token at least; llama.cpp ends the process where sequences outnumber outputs,
    // and where what it means over is no multiple of them.
    c.n_seq_max = static_cast<uint32_t>(std::min(p.n_seq_max, p.n_batch));
    const auto n_batch = static_cast<uint32_t>(p.n_batch);
    c.n_ubatch = (n_batch + c.n_seq_max - 1) / c.n_seq_max * c.n_seq_max;
    c.n_batch = c.n_ctx = c.n_ubatch;
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
    forget_llama_reason();
    embedder->context.reset(llama_init_from_model(model.model.get(), embedder_context(p)));
    if (!embedder->context) {
        fail_context("the embedder's");
    }
    llama_context * context = embedder->context.get();
    set_seq_length(context, p.n_batch);
    spec_embedder_limits & l = embedder->limits;
    l.pooling = pooling_of(context);
    l.n_batch = p.n_batch;
    l.n_seq_max = static_cast<int32_t>(llama_n_seq_max(context));
    l.n_vocab = model.n_vocab();
    embedder->n_text_max = std::min(l.n_batch, positions_of(model));
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
        if (n < 1 || n > embedder.n_text_max) {
            fail(SPEC_ERR_INVALID_ARGUMENT, "text " + std::to_string(i) + " has " +
                                                std::to_string(n) + " tokens; expected [1, " +
                                                std::to_string(embedder.n_text_max) + "]");
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
    forget_llama_reason();
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

} // namespace drafthouse

using namespace drafthouse;

extern "C" {

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
