// Surveys: what memory models and contexts would take, and what of them fits on the devices.
//
// llama.cpp loads a model without its weights (no_alloc) and reserves its graphs as it would for a
// real one, so this is its own sum, of every architecture. What it does not count is added here:
// its graphs, and the buffer of logits and hidden rows, which grows with the first decode that
// needs it.

#include "survey.hpp"

#include "fit.h"
#include "ggml-backend.h"

#include <limits>
#include <map>
#include <memory>
#include <string>
#include <vector>

struct spec_survey {
    spec_model_params asked = {}; // the target's, which point to the next four
    std::string target_path;
    std::string devices;
    std::string override_tensor;
    std::vector<float> shares;
    std::string draft_path;
    bool is_mapped = false; // the weights that stay as they are in the file
    std::unique_ptr<drafthouse::placement> target_places;
    std::unique_ptr<drafthouse::placement> draft_places;
    llama_model_params target_params = {};
    llama_model_params draft_params = {};
    std::unique_ptr<spec_model> target;
    std::unique_ptr<spec_model> draft; // null: none

    // Of the last fit, which llama.cpp's parameters point to.
    bool has_placement = false;
    int32_t n_gpu_layers = -1;
    std::vector<float> split;
    std::vector<llama_model_tensor_buft_override> overrides;
};

namespace drafthouse {

namespace {

constexpr int32_t HOST = -1;

// The device that memory belongs to. Repacked weights are the CPU's, and memory of the host.
int32_t device_of(ggml_backend_buffer_type_t type) {
    const ggml_backend_dev_t device = ggml_backend_buft_get_device(type);
    if (device == nullptr || ggml_backend_buft_is_host(type)) {
        return HOST;
    }
    const enum ggml_backend_dev_type kind = ggml_backend_dev_type(device);
    if (kind == GGML_BACKEND_DEVICE_TYPE_CPU || kind == GGML_BACKEND_DEVICE_TYPE_ACCEL) {
        return HOST;
    }
    for (size_t i = 0; i < ggml_backend_dev_count(); ++i) {
        if (ggml_backend_dev_get(i) == device) {
            return static_cast<int32_t>(i);
        }
    }
    return HOST;
}

// Graphs, and logits and hidden rows of the outputs, which llama.cpp allocates when a decode has so
// many.
int64_t uncounted_bytes(const llama_context * context, uint32_t n_outputs) {
    const llama_model * model = llama_get_model(context);
    const int64_t n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
    const int64_t width = n_vocab + llama_model_n_embd_out(model);
    const int64_t n_rows = static_cast<int64_t>(n_outputs) * width;
    return static_cast<int64_t>(graph_bytes(context)) +
           n_rows * static_cast<int64_t>(sizeof(float));
}

using uses = std::map<int32_t, spec_memory_use>;

spec_memory_use & use_of(uses & found, int32_t device) {
    spec_memory_use & use = found[device];
    use.device = device;
    return use;
}

void add_weights(uses & found, const memory_part & part, bool is_mapped) {
    spec_memory_use & use = use_of(found, device_of(part.type));
    use.weights_bytes += static_cast<int64_t>(part.n_weights);
    if (is_mapped && ggml_backend_buft_is_host(part.type)) {
        use.mapped_bytes += static_cast<int64_t>(part.n_weights);
    }
}

uses measure(const spec_survey & survey, const spec_engine_params & params) {
    const auto engine = make_contexts(*survey.target, survey.draft.get(), params);
    const context_plan plan = plan_contexts(*survey.target, survey.draft.get(), params);
    uses found;
    use_of(found, HOST).compute_bytes =
        uncounted_bytes(engine->target.get(), plan.target.n_outputs_max);
    for (const memory_part & part : memory_of(engine->target.get())) {
        add_weights(found, part, survey.is_mapped);
        spec_memory_use & use = use_of(found, device_of(part.type));
        use.cells_bytes += static_cast<int64_t>(part.n_cells);
        use.compute_bytes += static_cast<int64_t>(part.n_compute);
    }
    if (!engine->draft) {
        return found;
    }
    use_of(found, HOST).draft_compute_bytes +=
        uncounted_bytes(engine->draft.get(), plan.draft.n_outputs_max);
    for (const memory_part & part : memory_of(engine->draft.get())) {
        if (survey.draft) { // MTP heads are the target's
            add_weights(found, part, survey.is_mapped);
        }
        spec_memory_use & use = use_of(found, device_of(part.type));
        use.draft_cells_bytes += static_cast<int64_t>(part.n_cells);
        use.draft_compute_bytes += static_cast<int64_t>(part.n_compute);
    }
    return found;
}

bool maps_file(const llama_model_params & params) {
    return params.load_mode == LLAMA_LOAD_MODE_AUTO || params.load_mode == LLAMA_LOAD_MODE_MMAP ||
           params.load_mode == LLAMA_LOAD_MODE_MMAP_MLOCK;
}

// Keeps what the target is opened with, to open it again.
void remember(spec_survey & survey, const spec_model_params & target) {
    survey.target_path = &deref(target.path, "path");
    survey.devices = target.devices != nullptr ? target.devices : "";
    survey.override_tensor = target.override_tensor != nullptr ? target.override_tensor : "";
    if (target.n_tensor_split > 0) {
        survey.shares.assign(target.tensor_split, target.tensor_split + target.n_tensor_split);
    }
    survey.asked = target;
    survey.asked.path = survey.target_path.c_str();
    survey.asked.devices = survey.devices.c_str();
    survey.asked.override_tensor = survey.override_tensor.c_str();
    survey.asked.tensor_split = survey.shares.data();
    survey.asked.progress = nullptr;
}

// Opens the target as it will be loaded: where the last fit says, if there was one.
void open_target(spec_survey & survey) {
    survey.asked.placed_by = survey.has_placement ? &survey : nullptr;
    survey.target = load_model(survey.asked, /*has_weights*/ false);
}

std::unique_ptr<spec_survey> open_survey(const spec_model_params & target,
                                         const spec_model_params * draft) {
    if (target.vocab_only || (draft != nullptr && draft->vocab_only)) {
        fail(SPEC_ERR_INVALID_ARGUMENT, "a survey needs the tensors; vocab_only is true");
    }
    auto survey = std::make_unique<spec_survey>();
    survey->target_params = llama_params_of(target, survey->target_places);
    survey->is_mapped = maps_file(survey->target_params) && llama_supports_mmap();
    remember(*survey, target); // its fields were checked by then
    open_target(*survey);
    if (draft != nullptr) {
        survey->draft_path = &deref(draft->path, "path");
        survey->draft_params = llama_params_of(*draft, survey->draft_places);
        survey->draft = load_model(*draft, /*has_weights*/ false);
    }
    return survey;
}

struct fit_request {
    const spec_engine_params & params;
    uint32_t n_ctx_seq_min;
    size_t n_margin;
};

// One search of llama.cpp's. n_ctx 0 lets it choose the cells, too. True where it found a way.
bool search(spec_survey & survey, const fit_request & request, uint32_t n_ctx, spec_fit & out) {
    context_plan plan = plan_contexts(*survey.target, survey.draft.get(), request.params);
    plan.target.n_ctx = n_ctx;
    llama_model_params target = survey.target_params;
    llama_model_params draft = survey.draft ? survey.draft_params : survey.target_params;
    const common_fit_extra_model extra = {
        survey.draft ? survey.draft_path.c_str() : survey.target_path.c_str(), &draft, &plan.draft,
        /*shares_model*/ survey.draft == nullptr};
    const bool has_extra = needs_draft_context(request.params.draft_type);
    std::vector<size_t> margins(std::max<size_t>(llama_max_devices(), 1), request.n_margin);
    survey.split.assign(std::max<size_t>(llama_max_devices(), 1), 0.0f);
    survey.overrides.assign(llama_max_tensor_buft_overrides(), {nullptr, nullptr});
    const common_params_fit_status status =
        common_fit_params(survey.target_path.c_str(), &target, &plan.target, survey.split.data(),
                          survey.overrides.data(), margins.data(), request.n_ctx_seq_min,
                          has_extra ? &extra : nullptr, GGML_LOG_LEVEL_ERROR);
    out.has_fit = status == COMMON_PARAMS_FIT_STATUS_SUCCESS;
    out.n_gpu_layers = target.n_gpu_layers;
    out.n_ctx = static_cast<int32_t>(
        std::min<uint32_t>(plan.target.n_ctx, std::numeric_limits<int32_t>::max()));
    return out.has_fit;
}

spec_fit find_fit(spec_survey & survey, const fit_request & request, bool is_ctx_fixed) {
    const uint32_t n_wish =
        plan_contexts(*survey.target, survey.draft.get(), request.params).target.n_ctx;
    const spec_fit asked = {false, survey.target_params.n_gpu_layers, static_cast<int32_t>(n_wish)};
    spec_fit found = asked;
    if (survey.has_placement) {
        survey.has_placement = false;
        open_target(survey);
    }
    const bool is_found = search(survey, request, n_wish, found);
    if (!is_ctx_fixed && (!is_found || found.n_gpu_layers != asked.n_gpu_layers)) {
        spec_fit smaller = asked;
        // It takes all that fits, which may be more than is wanted.
        if (search(survey, request, 0, smaller)) {
            smaller.n_ctx = std::min(smaller.n_ctx, asked.n_ctx);
            found = smaller;
        } else if (is_found) {
            search(survey, request, n_wish, found); // once more, for what it has written
        }
    }
    if (!found.has_fit) {
        return asked;
    }
    survey.has_placement = true;
    survey.n_gpu_layers = found.n_gpu_layers;
    if (found.n_gpu_layers != asked.n_gpu_layers) {
        open_target(survey); // what is measured from here on is what will be loaded
    }
    return found;
}

} // namespace

// Says where the weights go, as the survey's last fit found.
void place_weights(const spec_survey & survey, llama_model_params & params) {
    if (!survey.has_placement) {
        fail(SPEC_ERR_INVALID_ARGUMENT, "the survey has found no fit; call spec_survey_fit first");
    }
    params.n_gpu_layers = survey.n_gpu_layers;
    params.tensor_split = survey.split.data();
    if (survey.overrides.front().pattern != nullptr) {
        params.tensor_buft_overrides = survey.overrides.data();
    }
}

} // namespace drafthouse

using namespace drafthouse;

extern "C" {

int32_t spec_survey_open(const spec_model_params * target, const spec_model_params * draft,
                         spec_survey ** out) {
    return guarded([&] {
        const silence quiet;
        deref(out, "out") = nullptr;
        *out = open_survey(deref(target, "target"), draft).release();
    });
}

void spec_survey_free(spec_survey * survey) {
    delete survey;
}

const spec_model * spec_survey_model(const spec_survey * survey, bool is_draft) {
    if (survey == nullptr) {
        return nullptr;
    }
    return is_draft ? survey->draft.get() : survey->target.get();
}

int32_t spec_survey_measure(spec_survey * survey, const spec_engine_params * params,
                            spec_memory_use * out, size_t cap, size_t * n_needed) {
    return guarded([&] {
        const silence quiet;
        const uses found = measure(deref(survey, "survey"), deref(params, "params"));
        deref(n_needed, "n_needed") = found.size();
        if (found.size() > cap || out == nullptr) {
            fail(SPEC_ERR_BUFFER_TOO_SMALL,
                 std::to_string(found.size()) + " kinds of memory are used");
        }
        for (const auto & [device, use] : found) {
            *out++ = use;
        }
    });
}

int32_t spec_survey_fit(spec_survey * survey, const spec_engine_params * params, bool is_ctx_fixed,
                        int32_t n_ctx_seq_min, int64_t margin_bytes, spec_fit * out) {
    return guarded([&] {
        const silence quiet;
        deref(out, "out");
        check_range("n_ctx_seq_min", n_ctx_seq_min, 1, std::numeric_limits<int32_t>::max());
        check_range("margin_bytes", static_cast<double>(margin_bytes), 0, 1e15);
        const fit_request request = {deref(params, "params"), static_cast<uint32_t>(n_ctx_seq_min),
                                     static_cast<size_t>(margin_bytes)};
        *out = find_fit(deref(survey, "survey"), request, is_ctx_fixed);
    });
}

} // extern "C"
