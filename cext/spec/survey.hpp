// What surveys need of models and engines: files opened without their weights, contexts that
// compute nothing, and the memory that both take.

#ifndef DRAFTHOUSE_SPEC_SURVEY_HPP
#define DRAFTHOUSE_SPEC_SURVEY_HPP

#include "internal.hpp"

#include <cstddef>
#include <memory>
#include <vector>

namespace drafthouse {

// error.cpp

void hush(bool is_on);

// Nothing is logged on this thread while one of these is there.
struct silence {
    silence() { hush(true); }
    silence(const silence &) = delete;
    silence & operator=(const silence &) = delete;
    ~silence() { hush(false); }
};

// model.cpp

llama_model_params llama_params_of(const spec_model_params & params,
                                   std::unique_ptr<placement> & places);
std::unique_ptr<spec_model> load_model(const spec_model_params & params, bool has_weights);

// engine.cpp

// What a target's context is made with, and the draft's beside it.
struct context_plan {
    llama_context_params target;
    llama_context_params draft;
};

std::unique_ptr<spec_engine> make_contexts(const spec_model & target, const spec_model * draft,
                                           const spec_engine_params & params);
context_plan plan_contexts(const spec_model & target, const spec_model * draft,
                           const spec_engine_params & params);

// upstream.cpp

// Bytes of one kind of memory that a context takes with its model.
struct memory_part {
    ggml_backend_buffer_type_t type;
    size_t n_weights;
    size_t n_cells;
    size_t n_compute;
};

std::vector<memory_part> memory_of(const llama_context * context);
size_t graph_bytes(const llama_context * context);

// survey.cpp

void place_weights(const spec_survey & survey, llama_model_params & params);

} // namespace drafthouse

#endif // DRAFTHOUSE_SPEC_SURVEY_HPP
