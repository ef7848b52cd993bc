// How a context keeps its cells and turns its positions: types, RoPE, windows; asked for, and as
// llama.cpp has made them.

#include "internal.hpp"

#include <cstdio>
#include <cstdlib>
#include <string>
#include <tuple>

namespace drafthouse {

namespace {

constexpr ggml_type CACHE_TYPES[SPEC_CACHE_COUNT] = {
    GGML_TYPE_F16,  GGML_TYPE_F32,    GGML_TYPE_BF16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0,
    GGML_TYPE_Q4_1, GGML_TYPE_IQ4_NL, GGML_TYPE_Q5_0, GGML_TYPE_Q5_1};

constexpr llama_rope_scaling_type ROPE_SCALINGS[SPEC_ROPE_COUNT] = {
    LLAMA_ROPE_SCALING_TYPE_UNSPECIFIED, LLAMA_ROPE_SCALING_TYPE_NONE,
    LLAMA_ROPE_SCALING_TYPE_LINEAR, LLAMA_ROPE_SCALING_TYPE_YARN};

void check_or_model(const char * name, float value) {
    if (value != -1.0f) {
        check_range(name, static_cast<double>(value), 0, 1e6);
    }
}

// What llama.cpp itself refuses, with the answer that no context can be made.
void check_types(const spec_model & model, const spec_engine_params & p, ggml_type k, ggml_type v,
                 const std::string & which) {
    if (ggml_is_quantized(v) && !p.flash_attention) {
        fail(SPEC_ERR_INVALID_ARGUMENT, "cache_type_v" + which + " is " + ggml_type_name(v) +
                                            ", and quantised values need flash attention");
    }
    for (const auto & [type, width, name] :
         {std::make_tuple(k, head_width(model, true), "cache_type_k"),
          std::make_tuple(v, head_width(model, false), "cache_type_v")}) {
        const int64_t n_block = ggml_blck_size(type);
        if (width % n_block != 0) {
            fail(SPEC_ERR_INVALID_ARGUMENT,
                 name + which + " is " + ggml_type_name(type) + ", of blocks of " +
                     std::to_string(n_block) + "; the model has heads of width " +
                     std::to_string(width) + ", which that does not divide");
        }
    }
}

} // namespace

void check_context_settings(const spec_engine_params & p) {
    check_range("type_k", p.type_k, 0, SPEC_CACHE_COUNT - 1);
    check_range("type_v", p.type_v, 0, SPEC_CACHE_COUNT - 1);
    check_range("type_k_draft", p.type_k_draft, 0, SPEC_CACHE_COUNT - 1);
    check_range("type_v_draft", p.type_v_draft, 0, SPEC_CACHE_COUNT - 1);
    check_range("rope_scaling", p.rope_scaling, 0, SPEC_ROPE_COUNT - 1);
    check_range("rope_freq_base", static_cast<double>(p.rope_freq_base), 0, 1e12);
    if (p.rope_freq_scale != 0.0f) {
        check_range("rope_freq_scale", static_cast<double>(p.rope_freq_scale), 1e-6, 1e6);
    }
    check_range("yarn_orig_ctx", p.yarn_orig_ctx, 0, 1 << 28);
    check_or_model("yarn_ext_factor", p.yarn_ext_factor);
    check_or_model("yarn_attn_factor", p.yarn_attn_factor);
    check_or_model("yarn_beta_slow", p.yarn_beta_slow);
    check_or_model("yarn_beta_fast", p.yarn_beta_fast);
}

void set_context_settings(const spec_model & model, const spec_engine_params & p, bool is_draft,
                          llama_context_params & c) {
    c.type_k = CACHE_TYPES[is_draft ? p.type_k_draft : p.type_k];
    c.type_v = CACHE_TYPES[is_draft ? p.type_v_draft : p.type_v];
    check_types(model, p, c.type_k, c.type_v, is_draft ? "_draft" : "");
    c.rope_scaling_type = ROPE_SCALINGS[p.rope_scaling];
    c.rope_freq_base = p.rope_freq_base;
    c.rope_freq_scale = p.rope_freq_scale;
    c.yarn_orig_ctx = static_cast<uint32_t>(p.yarn_orig_ctx);
    c.yarn_ext_factor = p.yarn_ext_factor;
    c.yarn_attn_factor = p.yarn_attn_factor;
    c.yarn_beta_slow = p.yarn_beta_slow;
    c.yarn_beta_fast = p.yarn_beta_fast;
    c.swa_full = !p.swa_small;
}

// The number with as few digits as tell it from others.
std::string shortest(float value) {
    char text[32];
    for (int n = 6; n <= 9; ++n) {
        std::snprintf(text, sizeof text, "%.*g", n, static_cast<double>(value));
        if (std::strtof(text, nullptr) == value) {
            break;
        }
    }
    return text;
}

namespace {

std::string type_text(int32_t type) {
    return type < 0 ? "" : ggml_type_name(static_cast<ggml_type>(type));
}

std::string rope_text(const rope_setting & rope, const std::string & key) {
    if (key == "rope_scaling") {
        switch (rope.scaling) {
        case LLAMA_ROPE_SCALING_TYPE_LINEAR:
            return "linear";
        case LLAMA_ROPE_SCALING_TYPE_YARN:
            return "yarn";
        case LLAMA_ROPE_SCALING_TYPE_LONGROPE:
            return "longrope";
        default:
            return "none";
        }
    }
    if (key == "yarn_orig_ctx") {
        return std::to_string(rope.orig_ctx);
    }
    for (const auto & [name, value] : rope.numbers()) {
        if (key == name) {
            return shortest(value);
        }
    }
    fail(SPEC_ERR_INVALID_ARGUMENT, "an engine has no setting \"" + key + "\"");
}

std::string engine_setting(const spec_engine & engine, const std::string & key) {
    const context_setting target = setting_of(engine.target.get());
    const context_setting draft = engine.draft ? setting_of(engine.draft.get()) : context_setting{};
    if (key == "cache_type_k") {
        return type_text(target.type_k);
    }
    if (key == "cache_type_v") {
        return type_text(target.type_v);
    }
    if (key == "cache_type_k_draft") {
        return type_text(draft.type_k);
    }
    if (key == "cache_type_v_draft") {
        return type_text(draft.type_v);
    }
    if (key == "swa_full") {
        return target.has_windows ? (target.is_swa_full ? "true" : "false") : "";
    }
    if (key == "flash_attn") {
        return target.is_flash ? "true" : "false";
    }
    return rope_text(target.rope, key);
}

} // namespace

} // namespace drafthouse

using namespace drafthouse;

extern "C" {

int32_t spec_engine_setting(const spec_engine * engine, const char * key, char * buf, size_t cap,
                            size_t * n_needed) {
    return guarded([&] {
        copy_out(engine_setting(deref(engine, "engine"), &deref(key, "key")), buf, cap, n_needed);
    });
}

} // extern "C"
