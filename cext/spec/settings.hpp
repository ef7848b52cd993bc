// Where weights lie, how a context keeps its cells and turns its positions, and the cores that it
// computes on.

#ifndef DRAFTHOUSE_SPEC_SETTINGS_HPP
#define DRAFTHOUSE_SPEC_SETTINGS_HPP

#include "spec.h"

#include "ggml-backend.h"
#include "llama.h"

#include <cstdint>
#include <list>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace drafthouse {

// What llama_model_params point to.
struct placement {
    bool is_chosen = false; // by name
    std::vector<ggml_backend_dev_t> devices;
    std::vector<float> shares;
    std::list<std::string> patterns; // which do not move
    std::vector<llama_model_tensor_buft_override> overrides;
};

// Of llama.cpp's own context, where 0 and -1 have become the model's.
struct rope_setting {
    int32_t scaling = 0; // llama_rope_scaling_type
    int64_t orig_ctx = 0;
    float freq_base = 0.0f;
    float freq_scale = 0.0f;
    float ext_factor = 0.0f;
    float attn_factor = 0.0f;
    float beta_slow = 0.0f;
    float beta_fast = 0.0f;

    std::vector<std::pair<const char *, float>> numbers() const {
        return {{"rope_freq_base", freq_base},   {"rope_freq_scale", freq_scale},
                {"yarn_ext_factor", ext_factor}, {"yarn_attn_factor", attn_factor},
                {"yarn_beta_slow", beta_slow},   {"yarn_beta_fast", beta_fast}};
    }
};

struct context_setting {
    int32_t type_k = -1; // ggml_type; -1: no attention, or no context
    int32_t type_v = -1;
    bool has_windows = false;
    bool is_swa_full = true;
    bool is_flash = false;
    rope_setting rope;
};

// cores.cpp

int32_t all_cores();

// devices.cpp

std::unique_ptr<placement> place(const spec_model_params & from, llama_model_params & params);

// settings.cpp

void check_context_settings(const spec_engine_params & p);
void set_context_settings(const spec_model & model, const spec_engine_params & p, bool is_draft,
                          llama_context_params & c);
std::string shortest(float value);

// upstream.cpp

using named_tensors = std::vector<std::pair<std::string, ggml_tensor *>>;

int64_t head_width(const spec_model & model, bool is_key);
context_setting setting_of(const llama_context * context);
std::vector<std::string> devices_of(const llama_model * model);
llama_split_mode split_of(const llama_model * model);
std::vector<float> shares_of(const llama_model * model);
uint32_t layers_on_devices(const llama_model * model);
const named_tensors & tensors_of(const llama_model * model);
std::vector<const ggml_tensor *> tables_taken(const llama_model * draft,
                                              const llama_model * target);

} // namespace drafthouse

#endif
