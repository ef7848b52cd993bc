/*
 * spec.h: Drafthouse's C boundary over llama.cpp.
 *
 * A spec_model is a loaded GGUF file. A spec_sampler chooses tokens for one sequence. A spec_engine
 * owns the target context, the draft context and up to n_seq_max sequences, each with its own
 * speculative state. Token ids go in, token ids come out; text exists only in the functions of a
 * model (tokenizer, chat template).
 *
 * Threading
 *   const spec_model *: every function may be called from several threads at once.
 *   spec_sampler: built on any thread; handed over to an engine by spec_engine_seq_begin.
 *   spec_engine: one thread at a time; the caller sees to it (the Cython layer checks it).
 *
 * Ownership
 *   *_init gives the caller an object on SPEC_OK and leaves *out NULL on failure. *_free accepts
 * NULL. Models must outlive the samplers and engines made from them. Arrays passed in are read
 * during the call only. Arrays in a spec_result belong to the engine and are valid until its next
 * call.
 *
 * Errors
 *   Every call returns int32_t: SPEC_OK (0) or a negative SPEC_ERR_*. The text is in
 * spec_last_error() of the calling thread and stays valid until that thread's next failing call. No
 * exception leaves this boundary and no argument, however wrong, reaches llama.cpp unchecked. Codes
 * below -100 are unstable.
 *
 * Versioning
 *   spec_abi_version() equals SPEC_ABI_VERSION of the header that the library was built with.
 * Callers compare the two.
 */
#ifndef DRAFTHOUSE_SPEC_H
#define DRAFTHOUSE_SPEC_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define SPEC_ABI_VERSION 2

/* Errors. */

#define SPEC_ERR_MAP(XX)                                                                           \
    XX(INVALID_ARGUMENT, -1, "an argument is out of its range")                                    \
    XX(NOT_FOUND, -2, "the file does not exist or cannot be read")                                 \
    XX(BAD_MODEL, -3, "the file is not a usable GGUF model")                                       \
    XX(NO_MTP_HEADS, -4, "the model has no MTP (NextN) heads")                                     \
    XX(NOT_EAGLE3, -5, "the draft model is not an EAGLE-3 model")                                  \
    XX(INCOMPATIBLE_DRAFT, -6, "the draft model does not fit the target")                          \
    XX(UNSUPPORTED, -7, "this model or build does not support the request")                        \
    XX(OUT_OF_MEMORY, -8, "memory could not be allocated")                                         \
    XX(BAD_GRAMMAR, -9, "the grammar cannot be parsed")                                            \
    XX(BAD_SEQ_ID, -10, "the sequence id is out of range")                                         \
    XX(BAD_PLAN, -11, "the plan contradicts the engine's state")                                   \
    XX(SEQ_BUSY, -12, "the sequence has begun already")                                            \
    XX(SEQ_IDLE, -13, "the sequence has not begun")                                                \
    XX(NO_ROOM, -14, "no room in the KV cache; the sequence is as it was before the step")         \
    XX(DECODE_FAILED, -15, "the decode failed; the sequence was cleared and must begin again")     \
    XX(SAMPLING_FAILED, -16,                                                                       \
       "no token could be chosen; the sequence was cleared and must begin again")                  \
    XX(BUFFER_TOO_SMALL, -17, "the output does not fit; the needed size was returned")             \
    XX(BAD_TEMPLATE, -18, "the chat template failed on these messages")                            \
    XX(CANCELLED, -19, "the progress callback asked to stop")                                      \
    XX(INTERNAL, -20, "an unexpected exception")

#define XX(name, code, text) SPEC_ERR_##name = (code),
enum spec_status { SPEC_OK = 0, SPEC_ERR_MAP(XX) };
#undef XX

/* Name of a status, such as "BAD_PLAN"; "UNKNOWN" for others. Static storage. since ABI 1 */
const char * spec_status_name(int32_t status);
/* Text of the last failure on this thread, "" if none. since ABI 1 */
const char * spec_last_error(void);
/* since ABI 1 */
int32_t spec_abi_version(void);
/* Version of llama.cpp and the CPU features that it was built for. Static storage. since ABI 1 */
const char * spec_build_info(void);

/* Levels as in ggml: 1 debug, 2 info, 3 warn, 4 error. `callback` NULL silences llama.cpp.
 * Process-wide; call before any other function. The callback must not call back into this library.
 * since ABI 1 */
typedef void (*spec_log_callback)(int32_t level, const char * text, void * user);
void spec_set_log(spec_log_callback callback, void * user);

/* Models. */

typedef struct spec_model spec_model;

/* Share of the file that is loaded, [0, 1]; return false to stop (SPEC_ERR_CANCELLED). */
typedef bool (*spec_progress_callback)(float progress, void * user);

typedef struct spec_model_params {
    const char * path;    /* UTF-8 path of a GGUF file */
    int32_t n_gpu_layers; /* layers kept on an accelerator; -1 all; ignored without one */
    bool use_mmap;
    bool vocab_only; /* tokenizer and metadata only; such a model cannot make an engine */
    spec_progress_callback progress; /* may be NULL */
    void * user;
} spec_model_params;

typedef struct spec_model_info {
    int64_t n_params;
    int64_t size_bytes;
    int32_t n_vocab;
    int32_t n_ctx_train;     /* tokens */
    int32_t n_embd;          /* width of a hidden row */
    int32_t n_layer;         /* trunk layers, MTP blocks not counted */
    int32_t n_layer_nextn;   /* MTP (NextN) blocks */
    int32_t token_bos;       /* -1 if none */
    int32_t token_eos;       /* -1 if none */
    int32_t n_target_layers; /* > 0 for EAGLE-3 and DFlash draft models: layers of the target that
                                it reads */
    bool add_bos;
    bool is_recurrent;
    bool is_hybrid;
    bool has_encoder;
} spec_model_info;

/* Loads a model. Errors: INVALID_ARGUMENT, NOT_FOUND, BAD_MODEL, OUT_OF_MEMORY, CANCELLED. since
 * ABI 1 */
int32_t spec_model_load(const spec_model_params * params, spec_model ** out);
void spec_model_free(spec_model * model);

int32_t spec_model_get_info(const spec_model * model, spec_model_info * out);
/* Copies a metadata string, NUL-terminated; *n_needed is its length with the NUL. NOT_FOUND when
 * the key is absent. since ABI 1 */
int32_t spec_model_meta(const spec_model * model, const char * key, char * buf, size_t cap,
                        size_t * n_needed);
/* "" when the model has none. Keys: "arch", "desc", "chat_template". since ABI 1 */
int32_t spec_model_text(const spec_model * model, const char * key, char * buf, size_t cap,
                        size_t * n_needed);

/* Tokenises UTF-8 text. *n_needed is the count; BUFFER_TOO_SMALL when it exceeds cap (nothing is
 * written). since ABI 1 */
int32_t spec_model_tokenize(const spec_model * model, const char * text, size_t n_text,
                            bool add_special, bool parse_special, int32_t * tokens, size_t cap,
                            size_t * n_needed);
/* Bytes of one token (not always valid UTF-8 alone). special: render control tokens too. since ABI
 * 1 */
int32_t spec_model_token_bytes(const spec_model * model, int32_t token, bool special, char * buf,
                               size_t cap, size_t * n_needed);
/* *out is true when the token ends a generation. since ABI 1 */
int32_t spec_model_is_eog(const spec_model * model, int32_t token, bool * out);
/* Formats chat messages with the model's template (Jinja). Errors: BAD_TEMPLATE, UNSUPPORTED (no
 * template). since ABI 1 */
int32_t spec_model_chat(const spec_model * model, const char * const * roles,
                        const char * const * contents, size_t n_messages,
                        bool add_generation_prompt, char * buf, size_t cap, size_t * n_needed);

/* Samplers. */

typedef struct spec_sampler spec_sampler;

typedef struct spec_logit_bias {
    int32_t token;
    float bias; /* added to the logit; -INFINITY forbids the token */
} spec_logit_bias;

/* Fill with spec_sampler_default_params first. */
typedef struct spec_sampler_params {
    uint32_t seed;                     /* SPEC_SEED_RANDOM: drawn at random */
    float temperature;                 /* >= 0; 0 = greedy */
    int32_t top_k;                     /* >= 0; 0 = off */
    float top_p;                       /* (0, 1]; 1 = off */
    float min_p;                       /* [0, 1]; 0 = off */
    float typical_p;                   /* (0, 1]; 1 = off */
    float top_n_sigma;                 /* > 0, or -1 = off */
    int32_t penalty_last_n;            /* tokens looked back; 0 = off, -1 = n_ctx_train */
    float penalty_repeat;              /* > 0; 1 = off */
    float penalty_frequency;           /* 0 = off */
    float penalty_presence;            /* 0 = off */
    float dry_multiplier;              /* >= 0; 0 = off */
    float dry_base;                    /* >= 1 */
    int32_t dry_allowed_length;        /* >= 0 */
    int32_t dry_penalty_last_n;        /* tokens; -1 = n_ctx_train */
    const char * const * dry_breakers; /* NULL with n_dry_breakers < 0: llama.cpp's defaults */
    int32_t n_dry_breakers;
    float xtc_probability; /* [0, 1]; 0 = off */
    float xtc_threshold;   /* [0, 1]; > 0.5 = off */
    const spec_logit_bias * logit_bias;
    int32_t n_logit_bias;
    const char * grammar; /* GBNF with a rule "root"; NULL or "" = off */
    bool ignore_eos;      /* end-of-generation tokens are never chosen */
    bool logprobs;        /* compute log-probabilities of the emitted tokens */
} spec_sampler_params;

#define SPEC_SEED_RANDOM 0xFFFFFFFFu

void spec_sampler_default_params(spec_sampler_params * out);
/* Checks the parameters and compiles the grammar. Errors: INVALID_ARGUMENT, BAD_GRAMMAR,
 * OUT_OF_MEMORY. since ABI 1 */
int32_t spec_sampler_init(const spec_model * model, const spec_sampler_params * params,
                          spec_sampler ** out);
void spec_sampler_free(spec_sampler * sampler);

/* Engines. */

typedef struct spec_engine spec_engine;

enum spec_draft_type {
    SPEC_DRAFT_NONE = 0,
    SPEC_DRAFT_MTP = 1,    /* the target's own MTP heads */
    SPEC_DRAFT_EAGLE3 = 2, /* an EAGLE-3 draft model */
    SPEC_DRAFT_SIMPLE = 3, /* an ordinary small model with the same vocabulary */
    SPEC_DRAFT_NGRAM_SIMPLE = 4,
    SPEC_DRAFT_NGRAM_MAP_K = 5,
    SPEC_DRAFT_NGRAM_MAP_K4V = 6,
    SPEC_DRAFT_NGRAM_MOD = 7,
    SPEC_DRAFT_NGRAM_CACHE = 8,
    SPEC_DRAFT_COUNT
};

/* Fill with spec_engine_default_params first. */
typedef struct spec_engine_params {
    int32_t draft_type;  /* spec_draft_type */
    int32_t n_ctx;       /* KV cells, all sequences together; 0 = n_seq_max * n_ctx_seq */
    int32_t n_ctx_seq;   /* most tokens of one sequence; 0 = the model's training context */
    int32_t n_batch;     /* most tokens of one step; > 0 */
    int32_t n_ubatch;    /* most tokens of one physical batch; > 0, <= n_batch */
    int32_t n_seq_max;   /* sequences at once; [1, 256] */
    int32_t n_draft_max; /* most drafted tokens of one sequence and step; > 0 unless draft_type is
                            NONE */
    int32_t n_rs_seq;    /* recurrent-state snapshots per sequence; -1 = n_draft_max where the model
                            supports them */
    int32_t n_threads;   /* threads of a decode of few tokens; 0 = all cores */
    int32_t n_threads_batch; /* threads of a decode of many tokens; 0 = n_threads */
    float p_min;             /* stop drafting below this probability; [0, 1) */
    bool probabilistic; /* sample drafts and verify by rejection at temperature > 0 (MTP, SIMPLE);
                           else argmax and match */
    bool
        kv_unified; /* one pool of cells for all sequences; else each has its own n_ctx_seq cells */
    bool flash_attention;
    bool exact; /* CPU kernels whose result does not depend on what else is in the batch; slower.
                   Not with kv_unified, accelerators or repacked (quantised) weights. since ABI 2 */
} spec_engine_params;

typedef struct spec_engine_limits {
    int32_t draft_type;
    int32_t n_ctx;     /* cells of all sequences together, as llama.cpp made them */
    int32_t n_ctx_seq; /* most tokens of one sequence */
    int32_t n_batch;
    int32_t n_ubatch;
    int32_t n_seq_max;
    int32_t n_draft_max;
    int32_t n_outputs_max; /* most sampled positions of one step: sum of 1 + K */
    int32_t n_rs_seq;      /* rollback bound of a recurrent target; 0 = none or not recurrent */
    int32_t n_vocab;
    bool kv_unified;
    bool has_checkpoints; /* rollbacks beyond n_rs_seq restore a checkpoint and decode again */
} spec_engine_limits;

void spec_engine_default_params(spec_engine_params * out);
/* Makes the contexts. `draft` is NULL for NONE, MTP and the n-gram kinds.
 * Errors: INVALID_ARGUMENT, NO_MTP_HEADS, NOT_EAGLE3, INCOMPATIBLE_DRAFT, UNSUPPORTED,
 * OUT_OF_MEMORY. since ABI 1 */
int32_t spec_engine_init(const spec_model * target, const spec_model * draft,
                         const spec_engine_params * params, spec_engine ** out);
void spec_engine_free(spec_engine * engine);
int32_t spec_engine_get_limits(const spec_engine * engine, spec_engine_limits * out);

/* Takes a free sequence into use, empty, with a sampler. The engine owns *sampler from then on,
 * also on failure, and sets *sampler to NULL. Errors: BAD_SEQ_ID, SEQ_BUSY. since ABI 1 */
int32_t spec_engine_seq_begin(spec_engine * engine, int32_t seq_id, spec_sampler ** sampler);
/* Frees a sequence: KV cells of both contexts, speculative state, sampler. Harmless when it is
 * idle. Errors: BAD_SEQ_ID. since ABI 1 */
int32_t spec_engine_seq_end(spec_engine * engine, int32_t seq_id);
/* Tokens of the sequence in the target's KV cache, or a negative error. since ABI 1 */
int32_t spec_engine_seq_n_past(const spec_engine * engine, int32_t seq_id);
/* KV cells in use, over all sequences. since ABI 1 */
int32_t spec_engine_n_cells_used(const spec_engine * engine);

/* One sequence's part of a step. A sequence may stand in a plan once. */
typedef struct spec_plan_entry {
    int32_t seq_id;
    int32_t n_past;       /* must equal spec_engine_seq_n_past */
    int32_t token_offset; /* first token in spec_plan.tokens */
    int32_t n_tokens;     /* >= 1: a piece of the prompt, or the last emitted token alone */
    int32_t n_draft;   /* K: draft tokens wanted; 0 = none. > 0 only with is_output and only for the
                          last emitted token */
    int32_t is_output; /* 1: choose a token after the last one given (end of the prompt, or
                          generation); 0: prompt piece */
} spec_plan_entry;

typedef struct spec_plan {
    const spec_plan_entry * entries;
    int32_t n_entries;
    const int32_t * tokens;
    int32_t n_tokens; /* length of tokens */
} spec_plan;

enum spec_result_flags {
    SPEC_RESULT_EOG = 1, /* the last emitted token ends the generation */
    SPEC_RESULT_DRAFT_COLD =
        2, /* the draft state was lost; the sequence goes on without speculation */
    SPEC_RESULT_REPLAYED = 4, /* the rollback went through a checkpoint */
};

typedef struct spec_result_entry {
    int32_t seq_id;
    int32_t status;       /* SPEC_OK, NO_ROOM, DECODE_FAILED or SAMPLING_FAILED */
    int32_t n_past;       /* tokens in the KV cache after the step */
    int32_t token_offset; /* first emitted token in spec_result.tokens and .logprobs */
    int32_t
        n_tokens; /* emitted tokens: accepted drafts and the target's own; 0 when not is_output */
    int32_t n_drafted;  /* draft tokens that were verified */
    int32_t n_accepted; /* of these, accepted */
    int32_t flags;      /* spec_result_flags */
} spec_result_entry;

typedef struct spec_result {
    const spec_result_entry * entries; /* one per plan entry, in the plan's order */
    int32_t n_entries;
    const int32_t * tokens;
    const float * logprobs; /* natural log under the target's unmodified distribution; NaN where not
                               asked for */
    int32_t n_tokens;
    int32_t n_batch_tokens; /* tokens of the target's decode */
    int64_t t_draft_us;
    int64_t t_decode_us;
    int64_t t_process_us;
    int64_t t_sample_us; /* verification, log-probabilities, rollback */
    int64_t t_total_us;
} spec_result;

/* One step for all sequences of the plan: draft, undo the draft's KV, decode prompt pieces, last
 * tokens and drafts at once, process, verify, accept, roll both contexts back. Returns BAD_PLAN,
 * BAD_SEQ_ID, SEQ_IDLE or INVALID_ARGUMENT when the plan is wrong: then nothing has changed.
 * Otherwise SPEC_OK, and each entry's status tells what became of its sequence. since ABI 1 */
int32_t spec_engine_step(spec_engine * engine, const spec_plan * plan, spec_result * out);

/* the
 * same, one call at a time
 *
 * For callers who drive a generation by hand. Order per round: seq_draft -> decode -> process ->
 * choose tokens from logits -> seq_accept. Wrong orders return BAD_PLAN and change nothing. A
 * sequence driven by hand is begun with spec_engine_seq_begin as well; its sampler is used by
 * spec_engine_seq_sample only. */

typedef struct spec_draft_request {
    int32_t seq_id;
    int32_t n_past;  /* must equal spec_engine_seq_n_past */
    int32_t id_last; /* last chosen token, not yet decoded */
    int32_t n_draft; /* K; >= 1, <= n_draft_max */
} spec_draft_request;

/* Drafts for several sequences in one batched call; the draft's KV is undone. tokens: [n_requests *
 * n_draft_max], row i holds counts[i] tokens. since ABI 1 */
int32_t spec_engine_seq_draft(spec_engine * engine, const spec_draft_request * requests,
                              int32_t n_requests, int32_t * tokens, int32_t * counts);

typedef struct spec_token {
    int32_t seq_id;
    int32_t
        pos; /* contiguous from the sequence's n_past; the tokens of a sequence stand together */
    int32_t token;
    int32_t is_output;
} spec_token;

/* One decode of the target. since ABI 1 */
int32_t spec_engine_decode(spec_engine * engine, const spec_token * tokens, int32_t n_tokens);
/* Feeds the last decoded batch to the speculative state; once, before the next decode. since ABI 1
 */
int32_t spec_engine_process(spec_engine * engine);
/* Logits after batch index i of the last decode: [n_vocab], valid until the next decode. since ABI
 * 1 */
int32_t spec_engine_logits(spec_engine * engine, int32_t i, const float ** out);
/* Chooses a token with the sequence's sampler from batch index i of the last decode and feeds it to
 * the sampler. since ABI 1 */
int32_t spec_engine_seq_sample(spec_engine * engine, int32_t seq_id, int32_t i, int32_t * token);
/* Ends a round: n_accepted drafted tokens stay, the rest is rolled back in both contexts. The
 * verified tokens are those decoded for the sequence since its draft; the sequence then holds 1 +
 * n_accepted of them. since ABI 1 */
int32_t spec_engine_seq_accept(spec_engine * engine, int32_t seq_id, int32_t n_accepted);
/* Cuts a sequence to its first n_past tokens. UNSUPPORTED when a recurrent target cannot go back so
 * far. since ABI 1 */
int32_t spec_engine_seq_rollback(spec_engine * engine, int32_t seq_id, int32_t n_past);

/* Fault injection. */

enum spec_fault {
    SPEC_FAULT_NONE = 0,
    SPEC_FAULT_DECODE_NO_ROOM = 1, /* the target's decode reports that no cell is free */
    SPEC_FAULT_DECODE_FATAL = 2,   /* the target's decode fails after it has changed the cache */
    SPEC_FAULT_PROCESS = 3,        /* the draft's process fails */
    SPEC_FAULT_THROW = 4,          /* an exception is thrown inside the step */
};

/* Makes the next `n_steps` steps fail, for tests of the failure paths. since ABI 1 */
int32_t spec_engine_inject_fault(spec_engine * engine, int32_t fault, int32_t n_steps);

#ifdef __cplusplus
}
#endif

#endif /* DRAFTHOUSE_SPEC_H */
