// What llama.cpp offers in its own src/ alone, behind functions: tensors by name, schedulers,
// layers and their rows, the shape of windows, random states. This file, grammar.cpp and masks.cpp
// include src/; no other does, so that a new llama.cpp is met here.

#include "survey.hpp"

#include "../src/llama-context.h"
#include "../src/llama-ext.h"
#include "../src/llama-kv-cache-iswa.h"
#include "../src/llama-kv-cache.h"
#include "../src/llama-memory-hybrid-iswa.h"
#include "../src/llama-memory-hybrid.h"
#include "../src/llama-memory-recurrent.h"
#include "../src/llama-model.h"
#include "../src/llama-rng.h"
#include "../src/llama-sampler.h"
#include "../src/llama-vocab.h"

#include <algorithm>
#include <cstring>
#include <random>
#include <string>
#include <vector>

namespace drafthouse {

namespace {

// Sliding windows.
//
// A windowed layer reads the last n_swa tokens only, and llama.cpp gives cells up that lie behind
// the window of the sequence's end: a snapshot leaves them out, and in a pool that sequences share
// the tokens of others take their place. A sequence that is cut to fewer tokens needs some of them
// again. So whatever cuts a cache asks `holds_window` first.

bool has_window(const llama_context * context) {
    return context->get_model().hparams.swa_type != LLAMA_SWA_TYPE_NONE;
}

} // namespace

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

namespace {

// The cells of a context's attention layers without a window, and those with; null: none, or of a
// kind that is not known.
struct caches {
    const llama_kv_cache * base = nullptr;
    const llama_kv_cache * window = nullptr;
};

caches caches_of(const llama_context * context) {
    const llama_memory_i * memory = context->get_memory();
    if (const auto * hybrid = dynamic_cast<const llama_memory_hybrid *>(memory)) {
        return {hybrid->get_mem_attn(), nullptr};
    }
    if (const auto * hybrid = dynamic_cast<const llama_memory_hybrid_iswa *>(memory)) {
        memory = hybrid->get_mem_attn();
    }
    if (const auto * both = dynamic_cast<const llama_kv_cache_iswa *>(memory)) {
        return {both->get_base(), both->get_swa()};
    }
    return {dynamic_cast<const llama_kv_cache *>(memory), nullptr};
}

} // namespace

// Cells that a sequence has in windowed layers where these have fewer than others, 0 else. In a
// pool of all sequences others may take all that lie behind its window.
int32_t window_cells_of(const llama_context * context) {
    const auto [base, window] = caches_of(context);
    if (!has_window(context) || window == nullptr || window->get_size() >= base->get_size()) {
        return 0;
    }
    const bool is_shared = context->get_cparams().kv_unified;
    return is_shared ? window_of(context) : static_cast<int32_t>(window->get_size());
}

// Where sequences share all cells llama.cpp takes their number for the length of one sequence, and
// by that chooses between two sets of RoPE factors, where a model has them (Phi-3, MiniCPM3).
void set_seq_length(llama_context * context, int32_t n_tokens) {
    constexpr uint32_t N_PAD = 256; // as it rounds where each sequence has cells of its own
    const uint32_t n = (static_cast<uint32_t>(n_tokens) + N_PAD - 1) / N_PAD * N_PAD;
    auto & params = const_cast<llama_cparams &>(context->get_cparams()); // graphs are made by it
    params.n_ctx_seq = std::min(params.n_ctx_seq, n);
}

// How many tokens the sequences of the next decodes may go back, of those that the context can.
void keep_states(llama_context * context, int32_t n_kept) {
    llama_memory_i * memory = context->get_memory();
    auto * states = dynamic_cast<llama_memory_recurrent *>(memory);
    if (const auto * hybrid = dynamic_cast<const llama_memory_hybrid *>(memory)) {
        states = hybrid->get_mem_recr();
    }
    if (const auto * hybrid = dynamic_cast<const llama_memory_hybrid_iswa *>(memory)) {
        states = hybrid->get_mem_recr();
    }
    if (states != nullptr) {
        states->n_rs_keep = std::min(static_cast<uint32_t>(n_kept), states->n_rs_seq);
    }
}

// The width of a head's keys or values; the least, where layers differ. 0 without attention.
int64_t head_width(const spec_model & model, bool is_key) {
    const llama_hparams & h = model.model->hparams;
    int64_t width = 0;
    for (uint32_t i = 0; i < h.n_layer(); ++i) {
        const int64_t n = is_key ? h.n_embd_head_k(i) : h.n_embd_head_v(i);
        width = width == 0 || n < width ? n : width;
    }
    return width;
}

// What a context is, where its parameters left it to the model.
context_setting setting_of(const llama_context * context) {
    const llama_cparams & c = context->get_cparams();
    context_setting out;
    const auto [base, window] = caches_of(context);
    if (base != nullptr && !base->get_layer_ids().empty()) {
        out.type_k = base->type_k();
        // With latent attention (MLA) values are a part of the keys, and have no cells.
        out.type_v = context->get_model().hparams.is_mla() ? -1 : base->type_v();
    }
    out.has_windows = has_window(context) && window != nullptr;
    out.is_swa_full = !out.has_windows || window->get_size() >= base->get_size();
    out.is_flash = c.flash_attn;
    out.rope = {c.rope_scaling_type, c.n_ctx_orig_yarn,  c.rope_freq_base, c.rope_freq_scale,
                c.yarn_ext_factor,   c.yarn_attn_factor, c.yarn_beta_slow, c.yarn_beta_fast};
    return out;
}

std::vector<std::string> devices_of(const llama_model * model) {
    std::vector<std::string> names;
    for (const llama_device & device : model->devices) {
        names.push_back(ggml_backend_dev_name(device.dev));
    }
    return names;
}

llama_split_mode split_of(const llama_model * model) {
    return model->split_mode();
}

// One a device; none where llama.cpp takes their free memory.
std::vector<float> shares_of(const llama_model * model) {
    const float * shares = model->tensor_split();
    return shares == nullptr ? std::vector<float>()
                             : std::vector<float>(shares, shares + model->n_devices());
}

uint32_t layers_on_devices(const llama_model * model) {
    return model->n_gpu_layers();
}

// Has the target give the drafter rows of its last layer or not. Not by llama.cpp's setters: after
// these the next decode reserves its graphs anew, which takes twice as long as the decode of a
// small model, and a graph without rows fits where one with them does. A graph is used again only
// while `masked` stays as it was, so another is built; without rows it has no other meaning. Inputs
// of layers are always given: memory that was reserved for a graph without them is used twice,
// theirs too, by one with them.
void give_rows(spec_engine & engine, bool is_on) {
    auto & flags = const_cast<llama_cparams &>(engine.target->get_cparams());
    const row_flags & asked = engine.asked;
    flags.embeddings_nextn = is_on;
    flags.embeddings_nextn_masked = is_on ? asked.is_masked : !asked.is_masked;
    engine.has_rows = is_on;
}

// The tensors of a model by name.
const named_tensors & tensors_of(const llama_model * model) {
    return llama_internal_get_tensor_map(model);
}

// The layers of its target that a draft model reads; empty of an ordinary model.
std::vector<int32_t> layers_read(const llama_model * draft) {
    const int32_t * ids = llama_model_target_layer_ids(draft);
    return std::vector<int32_t>(ids, ids + llama_model_target_layer_ids_n(draft));
}

// The target's tables that a draft model computes with because it has none of its own.
std::vector<const ggml_tensor *> tables_taken(const llama_model * draft,
                                              const llama_model * target) {
    std::vector<const ggml_tensor *> taken;
    if (draft->tok_embd == nullptr && target->tok_embd != nullptr) {
        taken.push_back(target->tok_embd);
    }
    if (draft->output == nullptr && target->output != nullptr) {
        taken.push_back(target->output);
    }
    return taken;
}

int32_t selector_top_k(const llama_model * draft) {
    return llama_model_dflash_selector_top_k(draft);
}

// The context that another one was made beside, or null.
llama_context * other_context(llama_context * context) {
    return llama_get_ctx_other(context);
}

// The way to the backends of a context.
ggml_backend_sched_t scheduler_of(llama_context * context) {
    return context->get_sched();
}

// Does what llama.cpp has put off until the next decode: the copying of cells. That computes no
// graph, so none has to be reserved again after it, as its own memory_update does.
void copy_ordered(llama_context * context) {
    const auto update = context->get_memory()->init_update(context, false);
    const llama_memory_status status = update->get_status();
    if (status != LLAMA_MEMORY_STATUS_NO_UPDATE &&
        (llama_memory_status_is_fail(status) || !update->apply())) {
        fail(SPEC_ERR_INTERNAL, "llama.cpp did not copy the cells" + llama_reason());
    }
}

// Forgets it.
void drop_ordered(llama_context * context) {
    context->get_memory()->init_update(context, false);
}

// What memory a context takes with its model; of a survey's, what it would take.
std::vector<memory_part> memory_of(const llama_context * context) {
    std::vector<memory_part> found;
    for (const auto & [type, use] : llama_get_memory_breakdown(context)) {
        found.push_back({type, use.model, use.context, use.compute});
    }
    return found;
}

// What a context keeps its graphs in, which llama.cpp's sum leaves out: one that is reserved, and
// of those that were decoded one with outputs and one without. Of some models with recurrent states
// each token of a physical batch has nodes of its own.
size_t graph_bytes(const llama_context * context) {
    constexpr size_t N_GRAPHS = 3;
    const auto n = static_cast<size_t>(context->get_gf_res_reserve()->get_max_nodes());
    return N_GRAPHS * (n * ggml_tensor_overhead() + ggml_graph_overhead_custom(n, false));
}

// Whether the branches of a draft tree can share cells: only the plain caches are known to do so.
bool carries_trees(llama_memory_t memory) {
    return dynamic_cast<llama_kv_cache *>(memory) != nullptr ||
           dynamic_cast<llama_kv_cache_iswa *>(memory) != nullptr;
}

// Has a context give the rows of its last layer: of all tokens, or where masked of its outputs.
void give_last_layer(llama_context * context, bool is_on, bool is_masked) {
    llama_set_embeddings_nextn(context, is_on, is_masked);
}

const float * last_layer_rows(llama_context * context) {
    return llama_get_embeddings_nextn(context);
}

const float * last_layer_row(llama_context * context, int32_t i) {
    return llama_get_embeddings_nextn_ith(context, i);
}

void give_layer_input(llama_context * context, int32_t layer, bool is_on) {
    llama_set_embeddings_layer_inp(context, static_cast<uint32_t>(layer), is_on);
}

const float * layer_input_rows(llama_context * context, int32_t layer) {
    return llama_get_embeddings_layer_inp(context, static_cast<uint32_t>(layer));
}

// The rows that a drafter has asked a target for.
row_flags asked_rows(const llama_context * target) {
    const llama_cparams & flags = target->get_cparams();
    return {flags.embeddings_nextn, flags.embeddings_nextn_masked};
}

// Random generators as text (patch 0003), the same for all standard libraries.
void write_rng(std::ostream & out, const std::mt19937 & rng) {
    llama_rng_write(out, rng);
}

void read_rng(std::istream & in, std::mt19937 & rng) {
    llama_rng_read(in, rng);
}

// What a sampler cannot rebuild from its tokens; false where it is of a kind that is not known.
bool get_sampler_state(const llama_sampler * sampler, std::string & out) {
    return llama_sampler_get_state(sampler, out);
}

bool set_sampler_state(llama_sampler * sampler, const std::string & state) {
    return llama_sampler_set_state(sampler, state);
}

// The tokens in which DRY breakers stand or begin: one walk through the vocabulary for all of them.
std::vector<dry_breaker> find_breakers(const llama_vocab * vocab,
                                       const std::vector<std::string> & texts) {
    try {
        return llama_dry_find_breakers(*vocab, texts);
    } catch (const std::out_of_range &) { // as where a text is tokenized: model.cpp
        fail(SPEC_ERR_UNSUPPORTED, "the model's tokenizer has no token for a part of a DRY "
                                   "breaker, nor one for what it does not know");
    }
}

// Memory that a breaker takes, about.
size_t breaker_bytes(const dry_breaker & breaker) {
    size_t n = sizeof *breaker + breaker->is_whole.size() / 8;
    for (const auto & tail : breaker->tails) {
        n += sizeof tail + tail.second.capacity() * sizeof(llama_token);
    }
    return n;
}

// The DRY sampler of a chain; null where there is none.
llama_sampler * dry_of(llama_sampler * chain) {
    for (int32_t i = 0; i < llama_sampler_chain_n(chain); ++i) {
        llama_sampler * sampler = llama_sampler_chain_get(chain, i);
        if (std::strcmp(llama_sampler_name(sampler), "dry") == 0) {
            return sampler;
        }
    }
    return nullptr;
}

void add_breakers(llama_sampler * dry, const std::vector<dry_breaker> & breakers) {
    if (!llama_sampler_dry_add_breakers(dry, breakers)) {
        fail(SPEC_ERR_INTERNAL, "a sampler called dry is none");
    }
}

// Texts of which parts are plain (patch 0012).
llama_tokens tokenize_plain(const llama_vocab * vocab, const std::string & text, bool add_special,
                            const std::vector<std::pair<size_t, size_t>> & plain) {
    return vocab->tokenize_with_plain(text, add_special, plain);
}

} // namespace drafthouse
