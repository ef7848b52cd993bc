// Which engine parameters are possible, which draft fits which target.

#include "internal.hpp"

#include "ggml-backend.h"

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <limits>
#include <string>
#include <vector>

namespace drafthouse {

namespace {

bool needs_draft_model(int32_t type) {
    return type == SPEC_DRAFT_EAGLE3 || type == SPEC_DRAFT_SIMPLE || drafts_blocks(type);
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

// A tensor of a model by its name, or null.
const ggml_tensor * tensor_of(const spec_model & model, const std::string & name) {
    for (const auto & [found, tensor] : tensors_of(model.model.get())) {
        if (found == name) {
            return tensor;
        }
    }
    return nullptr;
}

// Architectures whose graphs mark the input of every layer; on others llama.cpp ends the process
// when asked for one. In all, other models can draft on these rows. Not qwen4exp: what it marks is
// several rows wide, at which llama.cpp ends the process, too.
constexpr layer_marks LAYER_MARKS[] = {
    {"bailingmoe3", false, false},   {"deepseek4", false, true},   {"gemma4", false, false},
    {"gpt-oss", true, false},        {"hunyuan_vl", false, false}, {"k2-horizon", false, false},
    {"lfm2", false, false},          {"lfm2moe", false, false},    {"llama", true, false},
    {"mimo2", true, true},           {"minimax-01", false, false}, {"minimax-m2", true, false},
    {"muse-glimmer", false, false},  {"nanbeige", false, false},   {"nemotron_h", false, true},
    {"nemotron_h_moe", false, true}, {"qwen3", true, false},       {"qwen35", true, false},
    {"qwen35moe", true, false},      {"qwen3moe", true, false},    {"qwen3next", true, false},
};

// Each layer that the draft reads must be one that the target shows.
void check_layers_read(const spec_model & target, const spec_model & draft) {
    const std::string arch = target.arch();
    const layer_marks * marks = marks_of(arch);
    if (marks == nullptr) {
        fail(SPEC_ERR_UNSUPPORTED, "the draft model (" + draft.arch() +
                                       ") reads the target's layers, which llama.cpp does not show "
                                       "of the architecture \"" +
                                       arch + "\"; choose another draft type");
    }
    const int32_t n_layer = llama_model_n_layer(target.model.get());
    const int32_t n_shown = marks->has_last ? n_layer : n_layer - 1;
    for (const int32_t id : layers_read(draft.model.get())) {
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

// llama.cpp ends the process at a tensor that none of a context's devices can read, so what a draft
// model takes from its target must lie where it computes itself: in the host's memory, which every
// context reads, or on a device of its own.
void check_table_places(const spec_model & target, const spec_model & draft) {
    const std::vector<std::string> own = devices_of(draft.model.get());
    for (const ggml_tensor * table : tables_taken(draft.model.get(), target.model.get())) {
        if (table->buffer == nullptr || ggml_backend_buffer_is_host(table->buffer)) {
            continue;
        }
        const ggml_backend_dev_t device =
            ggml_backend_buft_get_device(ggml_backend_buffer_get_type(table->buffer));
        if (device == nullptr || ggml_backend_dev_type(device) == GGML_BACKEND_DEVICE_TYPE_CPU) {
            continue; // weights that were put in another order for the CPU
        }
        const std::string name = ggml_backend_dev_name(device);
        if (std::find(own.begin(), own.end(), name) == own.end()) {
            fail(SPEC_ERR_INVALID_ARGUMENT,
                 std::string("the draft model has no \"") + ggml_get_name(table) +
                     "\" of its own and takes the target's, which lies on " + name +
                     "; the draft model's devices must hold " + name + ", too");
        }
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
    if (d2t->data == nullptr) {
        return; // a survey's model, without weights
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

bool is_dspark(const spec_model & draft) {
    return tensor_of(draft, "markov_w1.weight") != nullptr;
}

// What a block drafter is by its metadata; llama.cpp reads the same keys.
struct block_layout {
    int32_t n_block; // tokens of one block, the last chosen token among them
    // The last token's own place is drafted from: n_block drafts, else one less.
    bool starts_at_anchor;

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
    const int32_t top_k = selector_top_k(draft.model.get());
    const bool has_selector = tensor_of(draft, "selector_hidden.weight") != nullptr;
    if ((top_k > 0) != has_selector || top_k < 0 || top_k > draft.n_vocab()) {
        fail(SPEC_ERR_BAD_MODEL,
             "the draft model's dflash.selector_top_k is " + std::to_string(top_k) +
                 (has_selector ? "; expected [1, the number of tokens]"
                               : ", but it has no selector (tensor \"selector_hidden\")"));
    }
}

void check_block_kind(const spec_model & draft, bool wants_dspark) {
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
    if (layers_read(draft.model.get()).empty()) {
        fail(SPEC_ERR_BAD_MODEL, "the draft model's dflash.target_layers is empty: it reads no "
                                 "layer of the target");
    }
}

// The rows that it reads and the mask that it fills in must be the target's.
void check_block_rows(const spec_model & target, const spec_model & draft, bool wants_dspark) {
    const std::string wanted = wants_dspark ? "DSpark" : "DFlash";
    const int32_t n_embd = llama_model_n_embd(target.model.get());
    const int32_t n_embd_draft = llama_model_n_embd(draft.model.get());
    if (n_embd_draft != n_embd) {
        fail(SPEC_ERR_INCOMPATIBLE_DRAFT,
             "the " + wanted + " draft was made for hidden rows of width " +
                 std::to_string(n_embd_draft) + "; this target's have " + std::to_string(n_embd));
    }
    const llama_token mask = llama_vocab_mask(draft.vocab);
    if (mask < 0 || mask >= target.n_vocab()) {
        fail(SPEC_ERR_BAD_MODEL, "the draft model names no mask token of its vocabulary "
                                 "(tokenizer.ggml.mask_token_id), which stands for the tokens to "
                                 "draft");
    }
}

// Every demand of llama.cpp's DFlash and DSpark drafters, most of which end the process there.
void check_block_draft(const spec_model & target, const spec_model & draft,
                       const spec_engine_params & p) {
    const bool wants_dspark = p.draft_type == SPEC_DRAFT_DSPARK;
    check_block_kind(draft, wants_dspark);
    check_block_rows(target, draft, wants_dspark);
    check_layers_read(target, draft);
    check_shared_tables(target, draft);
    check_table_places(target, draft);
    check_drafted_tokens(target, draft);
    check_selector(draft);
    layout_of(draft);
    if (wants_dspark && p.p_min > 0.0f) {
        check_confidence(draft);
    }
}

// The layer that MTP drafts with: it may be missing in the file, or was not loaded.
bool has_mtp_weights(const spec_model & model) {
    const std::string first = "blk." + std::to_string(llama_model_n_layer(model.model.get())) + ".";
    const auto & tensors = tensors_of(model.model.get());
    return std::any_of(tensors.begin(), tensors.end(),
                       [&](const auto & named) { return named.first.rfind(first, 0) == 0; });
}

// Architectures whose graphs take several MTP blocks, of which each drafts one token more; on the
// others llama.cpp ends the process. Read from its graphs; tests/cext/test_malformed_models.py
// compares.
constexpr const char * SEVERAL_MTP[] = {"hy_v3", "mimo2", "step35"};

void check_mtp(const spec_model & target) {
    if (llama_model_n_layer_nextn(target.model.get()) <= 0) {
        fail(SPEC_ERR_NO_MTP_HEADS, "the target (" + target.arch() +
                                        ") has no MTP (NextN) heads; choose another draft type");
    }
    if (!has_mtp_weights(target)) {
        fail(SPEC_ERR_NO_MTP_HEADS, "the weights of the target's MTP (NextN) heads were not "
                                    "loaded, or are not in its file");
    }
    const int32_t n_heads = llama_model_n_layer_nextn(target.model.get());
    const std::string arch = target.arch();
    if (n_heads > 1 &&
        std::find(std::begin(SEVERAL_MTP), std::end(SEVERAL_MTP), arch) == std::end(SEVERAL_MTP)) {
        fail(SPEC_ERR_UNSUPPORTED, "the target (" + arch + ") has " + std::to_string(n_heads) +
                                       " MTP (NextN) heads, and llama.cpp drafts with one only on "
                                       "this architecture; choose another draft type");
    }
}

void check_draft_model(const spec_model & target, const spec_model & draft,
                       const spec_engine_params & p) {
    if (draft.vocab_only) {
        fail(SPEC_ERR_INVALID_ARGUMENT, "the draft model was loaded with vocab_only");
    }
    if (p.draft_type == SPEC_DRAFT_EAGLE3) {
        check_eagle3(target, draft);
    } else if (drafts_blocks(p.draft_type)) {
        check_block_draft(target, draft, p);
    } else if (!layers_read(draft.model.get()).empty()) {
        fail(SPEC_ERR_INCOMPATIBLE_DRAFT,
             "the draft model is of architecture \"" + draft.arch() +
                 "\", which drafts from the target's hidden states; expected an ordinary model");
    } else {
        check_generates(draft, "draft model");
    }
    check_target_name(target, draft);
    if (!common_speculative_are_compatible(target.model.get(), draft.model.get())) {
        fail(SPEC_ERR_INCOMPATIBLE_DRAFT, "the draft model's vocabulary differs from the target's");
    }
}

void check_engine_ranges(const spec_engine_params & p) {
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
}

void check_batch_room(const spec_engine_params & p) {
    const int32_t n_draft = p.draft_type == SPEC_DRAFT_NONE ? 0 : p.n_draft_max;
    if (p.n_batch < p.n_seq_max * (1 + n_draft)) {
        fail(SPEC_ERR_INVALID_ARGUMENT,
             "n_batch is " + std::to_string(p.n_batch) +
                 "; expected at least n_seq_max * (1 + n_draft_max) = " +
                 std::to_string(p.n_seq_max * (1 + n_draft)) +
                 ", so that every sequence can verify a draft in one step");
    }
}

void check_ubatch_room(const spec_engine_params & p) {
    const int32_t n_draft = p.draft_type == SPEC_DRAFT_NONE ? 0 : p.n_draft_max;
    const int32_t n_rollback = std::max(n_draft, p.n_rs_seq);
    if (p.n_ubatch < 2 + n_rollback) {
        fail(SPEC_ERR_INVALID_ARGUMENT,
             "n_ubatch is " + std::to_string(p.n_ubatch) + "; expected at least " +
                 (n_draft > 0 ? "2 + n_draft_max = " : "") + std::to_string(2 + n_rollback) +
                 (n_draft > 0 ? ": a draft is verified inside one ubatch" : ""));
    }
}

} // namespace

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

// Positions that a model has, where it has learned them one by one: llama.cpp ends the process at
// one beyond.
int32_t positions_of(const spec_model & model) {
    const ggml_tensor * table = tensor_of(model, "position_embd.weight");
    return table != nullptr ? static_cast<int32_t>(table->ne[1])
                            : std::numeric_limits<int32_t>::max();
}

bool needs_draft_context(int32_t type) {
    return type == SPEC_DRAFT_MTP || needs_draft_model(type);
}

// What llama.cpp marks of an architecture; null: nothing.
const layer_marks * marks_of(const std::string & arch) {
    const auto * found = std::find_if(std::begin(LAYER_MARKS), std::end(LAYER_MARKS),
                                      [&](const layer_marks & it) { return arch == it.arch; });
    return found != std::end(LAYER_MARKS) ? found : nullptr;
}

void check_engine_params(const spec_engine_params & p) {
    check_engine_ranges(p);
    check_context_settings(p);
    check_batch_room(p);
    check_synth_rates(p);
    if (p.exact && p.kv_unified) {
        fail(SPEC_ERR_INVALID_ARGUMENT,
             "exact with kv_unified: where a sequence's cells lie depends on the others");
    }
    check_ubatch_room(p);
}

void check_eagle3(const spec_model & target, const spec_model & draft) {
    const llama_model * d = draft.model.get();
    const size_t n = layers_read(d).size();
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
    check_table_places(target, draft);
    check_drafted_tokens(target, draft);
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
    // Its graph has no `inp_out_ids`: of a batch it gives the logits of the first tokens, whichever
    // are asked for. Prompts of one token, one sequence at a time, are right; the rest is not.
    if (model.arch() == "cogvlm") {
        fail(SPEC_ERR_UNSUPPORTED, what + " cannot be computed: this llama.cpp gives the logits of "
                                          "a batch's first tokens in place of those asked for");
    }
}

// Architectures of which llama.cpp does not give the hidden rows after the final norm, or not with
// logits beside them.
void check_hidden_rows(const spec_model & model, bool has_logits) {
    const std::string arch = model.arch();
    if (arch == "deepseek4" || arch == "qwen4exp") {
        // It copies rows of the residual stream's width, several times that of these, and ends the
        // process there.
        fail(SPEC_ERR_UNSUPPORTED, "the model (" + arch +
                                       ") keeps its residual stream in several rows for a token; "
                                       "this llama.cpp cannot give the hidden rows behind them");
    }
    if (has_logits && (arch == "lfm2" || arch == "lfm2moe")) {
        fail(SPEC_ERR_UNSUPPORTED, "the model (" + arch +
                                       ") gives either hidden rows or logits in this llama.cpp, "
                                       "and a decoder needs both; an engine gives its logits, an "
                                       "embedder its hidden rows");
    }
}

void check_draft(const spec_model & target, const spec_model * draft,
                 const spec_engine_params & p) {
    if (!layers_read(target.model.get()).empty()) {
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
    check_draft_model(target, *draft, p);
}

} // namespace drafthouse
