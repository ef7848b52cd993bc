# The only mirror of spec.h, where everything is documented.

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libcpp cimport bool


cdef extern from "spec.h" nogil:
    enum:
        SPEC_ABI_VERSION
        SPEC_OK
        SPEC_ERR_NOT_FOUND
        SPEC_ERR_BAD_SEQ_ID
        SPEC_ERR_BUFFER_TOO_SMALL
        SPEC_ERR_CANCELLED
        SPEC_CACHE_COUNT
        SPEC_DEVICES_MAX
        SPEC_DRAFT_COUNT
        SPEC_LOAD_COUNT
        SPEC_NUMA_COUNT
        SPEC_ROPE_COUNT
        SPEC_SPLIT_COUNT
        SPEC_SAMPLER_COUNT
        SPEC_POOLING_COUNT

    const uint32_t SPEC_SEED_RANDOM

    const char * spec_status_name(int32_t status)
    const char * spec_last_error()
    int32_t spec_abi_version()
    const char * spec_build_info()

    ctypedef struct spec_cores:
        int32_t n_cores
        int32_t n_physical
        int32_t n_logical
        double quota

    int32_t spec_find_cores(const char * root, const char * cpus, spec_cores * out)

    ctypedef void (*spec_log_callback)(int32_t level, const char * text, void * user) noexcept
    void spec_set_log(spec_log_callback callback, void * user)
    void spec_on_abort(const char * words, int32_t exit_code)

    int32_t spec_add_rpc_server(const char * endpoint)
    int32_t spec_rpc_version(int32_t * major, int32_t * minor)
    int32_t spec_set_numa(int32_t numa, int32_t * n_nodes)

    ctypedef struct spec_model:
        pass

    ctypedef bool (*spec_progress_callback)(float progress, void * user) noexcept

    ctypedef struct spec_survey:
        pass

    ctypedef struct spec_model_params:
        const char * path
        int32_t n_gpu_layers
        bool use_mmap
        bool vocab_only
        bool skip_mtp
        spec_progress_callback progress
        void * user
        const spec_survey * placed_by
        const char * devices
        int32_t split_mode
        int32_t main_gpu
        const float * tensor_split
        int32_t n_tensor_split
        const char * override_tensor
        int32_t n_cpu_moe
        int32_t load_mode

    ctypedef struct spec_model_info:
        int64_t n_params
        int64_t size_bytes
        int32_t n_vocab
        int32_t n_ctx_train
        int32_t n_embd
        int32_t n_layer
        int32_t n_layer_nextn
        int32_t token_bos
        int32_t token_eos
        int32_t n_target_layers
        bool add_bos
        bool add_eos
        bool is_recurrent
        bool is_hybrid
        bool has_encoder

    int32_t spec_model_load(const spec_model_params * params, spec_model ** out)
    void spec_model_free(spec_model * model)
    int32_t spec_model_get_info(const spec_model * model, spec_model_info * out)
    int32_t spec_model_meta(
        const spec_model * model, const char * key, char * buf, size_t cap, size_t * n_needed)
    int32_t spec_model_text(
        const spec_model * model, const char * key, char * buf, size_t cap, size_t * n_needed)
    int32_t spec_model_setting(
        const spec_model * model, const char * key, char * buf, size_t cap, size_t * n_needed)
    int32_t spec_model_tokenize(
        const spec_model * model, const char * text, size_t n_text, bool add_special,
        bool parse_special, int32_t * tokens, size_t cap, size_t * n_needed)
    ctypedef struct spec_span:
        size_t begin
        size_t end

    int32_t spec_model_tokenize_plain(
        const spec_model * model, const char * text, size_t n_text, const spec_span * plain,
        size_t n_plain, bool add_special, int32_t * tokens, size_t cap, size_t * n_needed)
    int32_t spec_model_find_control(
        const spec_model * model, const char * text, size_t n_text, spec_span * out, size_t cap,
        size_t * n_needed)
    int32_t spec_model_token_bytes(
        const spec_model * model, int32_t token, bool special, char * buf, size_t cap,
        size_t * n_needed)
    ctypedef struct spec_breaker_stats:
        int64_t n_searched
        int64_t n_bytes
        int32_t n_held

    int32_t spec_model_get_breaker_stats(const spec_model * model, spec_breaker_stats * out)
    int32_t spec_model_is_eog(const spec_model * model, int32_t token, bool * out)

    ctypedef struct spec_chat:
        pass

    ctypedef struct spec_chat_params:
        const char * source
        const char * bos
        const char * eos
        bool add_bos
        bool add_eos

    int32_t spec_chat_open(const spec_chat_params * params, spec_chat ** out)
    void spec_chat_free(spec_chat * chat)
    int32_t spec_chat_format(
        const spec_chat * chat, const char * const * roles, const char * const * contents,
        size_t n_messages, bool add_generation_prompt, char * buf, size_t cap, size_t * n_needed)
    int32_t spec_chat_format_marked(
        const spec_chat * chat, const char * const * roles, const char * const * contents,
        size_t n_messages, const char * const * names, const char * const * values,
        size_t n_arguments, bool add_generation_prompt, char * buf, size_t cap, size_t * n_needed,
        spec_span * input, size_t cap_input, size_t * n_input)

    ctypedef struct spec_sampler:
        pass

    ctypedef struct spec_logit_bias:
        int32_t token
        float bias

    ctypedef struct spec_sampler_params:
        uint32_t seed
        float temperature
        int32_t top_k
        float top_p
        float min_p
        float typical_p
        float top_n_sigma
        int32_t penalty_last_n
        float penalty_repeat
        float penalty_frequency
        float penalty_presence
        float dry_multiplier
        float dry_base
        int32_t dry_allowed_length
        int32_t dry_penalty_last_n
        const char * const * dry_breakers
        int32_t n_dry_breakers
        float xtc_probability
        float xtc_threshold
        const spec_logit_bias * logit_bias
        int32_t n_logit_bias
        const char * grammar
        bool ignore_eos
        bool logprobs
        int32_t n_top_logprobs
        int32_t min_keep
        float dynatemp_range
        float dynatemp_exponent
        int32_t mirostat
        float mirostat_tau
        float mirostat_eta
        float adaptive_target
        float adaptive_decay
        const int32_t * samplers
        int32_t n_samplers
        bool match_only

    void spec_sampler_default_params(spec_sampler_params * out)
    int32_t spec_sampler_init(
        const spec_model * model, const spec_sampler_params * params, spec_sampler ** out)
    int32_t spec_sampler_get_history(
        const spec_sampler * sampler, int32_t * n_known, bool * has_chosen)
    void spec_sampler_free(spec_sampler * sampler)

    ctypedef struct spec_engine:
        pass

    ctypedef struct spec_engine_params:
        int32_t draft_type
        int32_t n_ctx
        int32_t n_ctx_seq
        int32_t n_batch
        int32_t n_ubatch
        int32_t n_seq_max
        int32_t n_draft_max
        int32_t n_rs_seq
        int32_t n_threads
        int32_t n_threads_batch
        float p_min
        bool probabilistic
        bool kv_unified
        bool flash_attention
        int32_t n_min
        bool exact
        const float * synth_rates
        int32_t n_synth_rates
        int32_t n_wide
        bool flash_forced
        int32_t type_k
        int32_t type_v
        int32_t type_k_draft
        int32_t type_v_draft
        int32_t rope_scaling
        float rope_freq_base
        float rope_freq_scale
        int32_t yarn_orig_ctx
        float yarn_ext_factor
        float yarn_attn_factor
        float yarn_beta_slow
        float yarn_beta_fast
        bool swa_small

    ctypedef struct spec_engine_limits:
        int32_t draft_type
        int32_t n_ctx
        int32_t n_ctx_seq
        int32_t n_batch
        int32_t n_ubatch
        int32_t n_seq_max
        int32_t n_draft_max
        int32_t n_outputs_max
        int32_t n_rs_seq
        int32_t n_vocab
        bool kv_unified
        bool has_checkpoints
        int32_t n_window
        int32_t n_window_cells

    void spec_engine_default_params(spec_engine_params * out)
    int32_t spec_engine_init(
        const spec_model * target, const spec_model * draft, const spec_engine_params * params,
        spec_engine ** out)
    void spec_engine_free(spec_engine * engine)
    int32_t spec_engine_setting(
        const spec_engine * engine, const char * key, char * buf, size_t cap, size_t * n_needed)
    int32_t spec_engine_get_limits(const spec_engine * engine, spec_engine_limits * out)
    int32_t spec_engine_seq_begin(spec_engine * engine, int32_t seq_id, spec_sampler ** sampler)
    int32_t spec_engine_seq_end(spec_engine * engine, int32_t seq_id)

    int32_t spec_engine_seq_n_past(const spec_engine * engine, int32_t seq_id)
    ctypedef struct spec_draft_work:
        int64_t n_drafts
        int64_t n_positions
        int64_t n_passes

    int32_t spec_engine_get_draft_work(const spec_engine * engine, spec_draft_work * out)
    int32_t spec_engine_n_cells_used(const spec_engine * engine)

    ctypedef struct spec_plan_entry:
        int32_t seq_id
        int32_t n_past
        int32_t token_offset
        int32_t n_tokens
        int32_t n_draft
        int32_t is_output

    ctypedef struct spec_external_draft:
        int32_t seq_id
        int32_t token_offset
        int32_t n_tokens

    ctypedef struct spec_start:
        int32_t seq_id
        int32_t n_kept
        int32_t source
        bool is_resumed
        const void * snapshot
        size_t n_snapshot
        spec_sampler * sampler
        uint64_t tag

    ctypedef void * (*spec_room_callback)(int32_t i, size_t n, void * user) noexcept
    void * spec_room_take(size_t n) nogil
    void spec_room_give(void * room, size_t n) nogil

    ctypedef struct spec_plan:
        const spec_plan_entry * entries
        int32_t n_entries
        const int32_t * tokens
        int32_t n_tokens
        const spec_external_draft * drafts
        int32_t n_drafts
        int32_t n_steps
        const int32_t * saves
        int32_t n_saves
        spec_room_callback room
        void * room_user
        const int32_t * swap_outs
        int32_t n_swap_outs
        const int32_t * frees
        int32_t n_frees
        const spec_start * starts
        int32_t n_starts
        const int32_t * drafts_off
        int32_t n_drafts_off
        const int32_t * drafts_on
        int32_t n_drafts_on

    ctypedef struct spec_result_entry:
        int32_t seq_id
        int32_t status
        int32_t n_past
        int32_t token_offset
        int32_t n_tokens
        int32_t n_drafted
        int32_t n_accepted
        int32_t flags
        int32_t n_mask_work

    ctypedef struct spec_result:
        const spec_result_entry * entries
        int32_t n_entries
        const int32_t * tokens
        const float * logprobs
        int32_t n_tokens
        int32_t n_batch_tokens
        int64_t t_draft_us
        int64_t t_decode_us
        int64_t t_process_us
        int64_t t_sample_us
        int64_t t_total_us
        const int32_t * top_tokens
        const float * top_logprobs
        int32_t n_top
        int32_t n_steps
        const size_t * n_saved
        spec_sampler ** samplers
        const int32_t * n_kept

    int32_t spec_engine_step(spec_engine * engine, const spec_plan * plan, spec_result * out)
    void spec_engine_interrupt(spec_engine * engine)
    int32_t spec_engine_set_threads(spec_engine * engine, int32_t n_threads,
                                    int32_t n_threads_batch)

    ctypedef struct spec_draft_request:
        int32_t seq_id
        int32_t n_past
        int32_t id_last
        int32_t n_draft

    int32_t spec_engine_seq_draft(
        spec_engine * engine, const spec_draft_request * requests, int32_t n_requests,
        int32_t * tokens, int32_t * counts)

    ctypedef struct spec_token:
        int32_t seq_id
        int32_t pos
        int32_t token
        int32_t is_output

    int32_t spec_engine_decode(spec_engine * engine, const spec_token * tokens, int32_t n_tokens)
    int32_t spec_engine_process(spec_engine * engine)
    int32_t spec_engine_logits(spec_engine * engine, int32_t i, const float ** out)
    int32_t spec_engine_seq_sample(spec_engine * engine, int32_t seq_id, int32_t i, int32_t * token)
    int32_t spec_engine_seq_accept(spec_engine * engine, int32_t seq_id, int32_t n_accepted)
    int32_t spec_engine_seq_rollback(spec_engine * engine, int32_t seq_id, int32_t n_past)
    int32_t spec_engine_inject_fault(spec_engine * engine, int32_t fault, int32_t n_steps)

    ctypedef struct spec_decoder:
        pass

    ctypedef struct spec_decoder_params:
        int32_t n_seq_max
        int32_t n_branch_max
        int32_t n_outputs_max
        int32_t n_ctx_seq
        int32_t n_batch
        int32_t n_ubatch
        int32_t n_rs_seq
        int32_t n_threads
        bool flash_attention

    ctypedef struct spec_decoder_limits:
        int32_t n_ctx_seq
        int32_t n_batch
        int32_t n_seq_max
        int32_t n_branch_max
        int32_t n_outputs_max
        int32_t n_rs_seq
        int32_t n_vocab
        int32_t n_embd
        int32_t n_embd_out
        int32_t n_layer
        bool has_layers
        bool is_last_layer_normed

    void spec_decoder_default_params(spec_decoder_params * out)
    int32_t spec_decoder_init(
        const spec_model * model, const spec_decoder_params * params, spec_decoder ** out)
    int32_t spec_decoder_init_eagle3(
        const spec_model * model, spec_decoder * target, const spec_decoder_params * params,
        spec_decoder ** out)
    void spec_decoder_free(spec_decoder * decoder)
    int32_t spec_decoder_get_limits(const spec_decoder * decoder, spec_decoder_limits * out)
    int32_t spec_decoder_seq_n_past(const spec_decoder * decoder, int32_t seq_id)
    int32_t spec_decoder_decode(
        spec_decoder * decoder, int32_t seq_id, const int32_t * tokens, int32_t n_tokens,
        bool is_output)
    int32_t spec_decoder_seq_rollback(spec_decoder * decoder, int32_t seq_id, int32_t n_past)
    int32_t spec_decoder_tree(
        spec_decoder * decoder, int32_t seq_id, const int32_t * tokens, const int32_t * parents,
        int32_t n_nodes)
    int32_t spec_decoder_tree_commit(
        spec_decoder * decoder, int32_t seq_id, const int32_t * path, int32_t n_path)
    int32_t spec_decoder_read(spec_decoder * decoder, int32_t what, float * out, size_t n_out)
    int32_t spec_decoder_encode(spec_decoder * decoder, float * out, size_t n_out)
    int32_t spec_decoder_set_states(
        spec_decoder * decoder, const float * states, int32_t n_rows)
    int32_t spec_decoder_set_layer(spec_decoder * decoder, int32_t layer, bool is_kept)
    int32_t spec_model_embed(
        const spec_model * model, const int32_t * tokens, int32_t n_tokens, float * out)
    int32_t spec_model_lm_head(
        const spec_model * model, const float * hidden, int32_t n_rows, float * out)
    int32_t spec_engine_seq_save(
        spec_engine * engine, int32_t seq_id, void * buf, size_t cap, size_t * n_needed)
    int32_t spec_engine_seq_save_prefix(
        spec_engine * engine, int32_t seq_id, void * buf, size_t cap, size_t * n_needed)
    int32_t spec_engine_seq_load(
        spec_engine * engine, int32_t seq_id, const void * buf, size_t n)
    int32_t spec_engine_seq_is_cold(const spec_engine * engine, int32_t seq_id, bool * out)
    int32_t spec_engine_seq_drafts_off(spec_engine * engine, int32_t seq_id)
    int32_t spec_engine_seq_drafts_on(spec_engine * engine, int32_t seq_id)
    int32_t spec_engine_seq_tokens(
        const spec_engine * engine, int32_t seq_id, int32_t * tokens, size_t cap, size_t * n_needed,
        int32_t * id_last)
    int32_t spec_grammar_check(const char * grammar)
    int32_t spec_grammar_accepts(
        const char * grammar, const char * text, size_t n_text, bool * out)
    int32_t spec_engine_fork(
        spec_engine * engine, int32_t src, int32_t n_past, const int32_t * dst,
        spec_sampler ** samplers, int32_t n)

    ctypedef struct spec_embedder:
        pass

    ctypedef struct spec_embedder_params:
        int32_t pooling
        int32_t n_batch
        int32_t n_seq_max
        int32_t n_threads
        bool flash_attention

    ctypedef struct spec_embedder_limits:
        int32_t pooling
        int32_t n_batch
        int32_t n_seq_max
        int32_t n_vocab
        int32_t n_embd

    void spec_embedder_default_params(spec_embedder_params * out)
    int32_t spec_embedder_init(
        const spec_model * model, const spec_embedder_params * params, spec_embedder ** out)
    void spec_embedder_free(spec_embedder * embedder)
    int32_t spec_embedder_get_limits(const spec_embedder * embedder, spec_embedder_limits * out)
    int32_t spec_embedder_encode(
        spec_embedder * embedder, const int32_t * tokens, int32_t n_tokens,
        const int32_t * lengths, int32_t n_texts, float * rows, size_t cap)

    const char * spec_build_facts()

    ctypedef struct spec_device:
        char name[64]
        char description[128]
        int32_t kind
        int64_t total_bytes
        int64_t free_bytes

    int32_t spec_list_devices(spec_device * out, size_t cap, size_t * n_needed)

    ctypedef struct spec_memory_use:
        int32_t device
        int64_t weights_bytes
        int64_t mapped_bytes
        int64_t cells_bytes
        int64_t compute_bytes
        int64_t draft_cells_bytes
        int64_t draft_compute_bytes

    int32_t spec_survey_open(
        const spec_model_params * target, const spec_model_params * draft, spec_survey ** out)
    void spec_survey_free(spec_survey * survey)
    const spec_model * spec_survey_model(const spec_survey * survey, bool is_draft)
    int32_t spec_survey_measure(
        spec_survey * survey, const spec_engine_params * params, spec_memory_use * out, size_t cap,
        size_t * n_needed)

    ctypedef struct spec_fit:
        bool has_fit
        int32_t n_gpu_layers
        int32_t n_ctx

    int32_t spec_survey_fit(
        spec_survey * survey, const spec_engine_params * params, bool is_ctx_fixed,
        int32_t n_ctx_seq_min, int64_t margin_bytes, spec_fit * out)
