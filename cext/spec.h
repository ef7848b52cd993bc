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
 *   spec_sampler: built on any thread; handed over to an engine by spec_engine_seq_begin or by a
 * start of a plan.
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

#define SPEC_ABI_VERSION 9

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
    XX(INTERNAL, -20, "an unexpected exception")                                                   \
    XX(NOT_DFLASH, -21, "the draft model is not a DFlash model")                                   \
    XX(NOT_DSPARK, -22, "the draft model is not a DSpark model")                                   \
    XX(GRAMMAR_TOO_COSTLY, -23,                                                                    \
       "the grammar takes too many comparisons for one token; the sequence was cleared")           \
    XX(NO_TOKEN_ALLOWED, -24,                                                                      \
       "the grammar and the biases allow no token; the sequence was cleared")                      \
    XX(SNAPSHOT_TRUNCATED, -31, "the snapshot is shorter than it says")                            \
    XX(SNAPSHOT_CORRUPT, -32, "the snapshot is damaged, or no snapshot")                           \
    XX(SNAPSHOT_VERSION, -33, "the snapshot was written by another version")                       \
    XX(SNAPSHOT_OTHER_MODEL, -34, "the snapshot belongs to other models")                          \
    XX(SNAPSHOT_OTHER_CONFIG, -35, "the snapshot belongs to an engine of another configuration")

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

/* What this process may compute on. since ABI 7 */
typedef struct spec_cores {
    int32_t n_cores;    /* threads that "all cores" means: n_physical, at most quota, rounded down;
                           at least 1 */
    int32_t n_physical; /* cores behind n_logical; of a processor with two kinds, the quick ones */
    int32_t n_logical;  /* hardware threads in the calling thread's affinity mask */
    double quota;       /* cores' worth of time that its cgroups grant; 0 = no limit */
} spec_cores;

/* Finds them. root: put before /proc and /sys; cpus: hardware threads, "0-3,8", in place of the
 * affinity mask; both NULL or "" but in tests. since ABI 7 */
int32_t spec_find_cores(const char * root, const char * cpus, spec_cores * out);

/* Levels as in ggml: 1 debug, 2 info, 3 warn, 4 error. `callback` NULL silences llama.cpp.
 * Process-wide; call before any other function. The callback must not call back into this library.
 * since ABI 1 */
typedef void (*spec_log_callback)(int32_t level, const char * text, void * user);
void spec_set_log(spec_log_callback callback, void * user);

/* What the process says, and how it ends, where llama.cpp or ggml gives up (GGML_ASSERT,
 * GGML_ABORT), which nothing can catch: their line, then `words`, cut to 1,023 bytes, on standard
 * error; then exit_code, at once and without a word to anybody, or SIGABRT where it is negative.
 * NULL or "": their line alone. With an exit_code so does a fault (SIGSEGV, SIGBUS, SIGFPE,
 * SIGILL), as where a damaged model lacks what is read: for the time in which one is loaded. No
 * debugger is started, as ggml does by itself. Process-wide; at any time, from any thread. since
 * ABI 9 */
void spec_on_abort(const char * words, int32_t exit_code);

/* Devices of other machines, and when devices are asked. since ABI 9
 *
 * llama.cpp makes its list of backends, for which those of accelerators ask their drivers, with the
 * first call of this chapter, spec_list_devices, spec_build_info, a survey or a load, not when the
 * library is loaded, nor for a chat template or the check of a grammar. No device is asked for
 * anything before a model with weights is loaded, but by spec_list_devices and spec_add_rpc_server.
 */

/* Makes the devices of one of llama.cpp's RPC servers devices of this process, until it ends; known
 * ones are left as they are. endpoint: "host:port". The protocol has neither authentication nor
 * encryption. Ask before whether a server answers there: llama.cpp ends the process where none
 * does, where it speaks another version, and where it dies later. Errors: INVALID_ARGUMENT,
 * UNSUPPORTED (built without it, or the server has no device). Thread: one at a time. */
int32_t spec_add_rpc_server(const char * endpoint);
/* Version of the RPC protocol that this library speaks; UNSUPPORTED where it was built without. A
 * server of the same major version and of no later minor one is understood. */
int32_t spec_rpc_version(int32_t * major, int32_t * minor);

enum spec_numa {
    SPEC_NUMA_OFF = 0,
    SPEC_NUMA_DISTRIBUTE = 1, /* threads are spread evenly over all nodes */
    SPEC_NUMA_ISOLATE = 2,    /* threads stay on the node on which this is called */
    SPEC_NUMA_NUMACTL = 3,    /* as numactl says */
    SPEC_NUMA_COUNT
};

/* Chooses how the CPU's threads are placed on a machine with several memory nodes, for the whole
 * process and once: before the first model is loaded. *n_nodes, which may be NULL, is 1 where
 * llama.cpp sees no more than one node, else 2. BAD_PLAN: chosen before, and otherwise. */
int32_t spec_set_numa(int32_t numa, int32_t * n_nodes);

/* Models. */

typedef struct spec_model spec_model;

/* Share of the file that is loaded, [0, 1]; return false to stop (SPEC_ERR_CANCELLED). */
typedef bool (*spec_progress_callback)(float progress, void * user);

typedef struct spec_model_params {
    const char * path;    /* UTF-8 path of a GGUF file */
    int32_t n_gpu_layers; /* layers kept on an accelerator; -1 all; ignored without one */
    bool use_mmap;
    bool vocab_only; /* tokenizer and metadata only; such a model cannot make an engine */
    bool skip_mtp;   /* leave the weights of MTP layers out: without SPEC_DRAFT_MTP they are of no
                        use. since ABI 7 */
    spec_progress_callback progress; /* may be NULL */
    void * user;
    const struct spec_survey * placed_by; /* NULL, or the survey of this file whose last
                                             spec_survey_fit says which weights lie where, instead
                                             of n_gpu_layers; read during the call. since ABI 8 */

    /* Where the weights lie. All zero: whole layers, over all devices by their free memory.
     * since ABI 9 */
    const char * devices; /* names of devices, "," between; "none": the CPU alone; NULL or "": all.
                             With vocab_only the model lies on no device, whatever this says */
    int32_t split_mode;   /* spec_split_mode */
    int32_t main_gpu;     /* with SPLIT_NONE: which of the devices, >= 0 */
    const float *
        tensor_split;       /* shares of the devices, in their order, >= 0; NULL: by free memory */
    int32_t n_tensor_split; /* [0, SPEC_DEVICES_MAX] */
    const char * override_tensor; /* "PATTERN=BUFFER TYPE", "," between: tensors whose name holds
                                     the regular expression lie in that memory; NULL or "": none */
    int32_t n_cpu_moe; /* the experts of the first so many layers stay with the CPU; -1: of all */
    int32_t load_mode; /* spec_load_mode */
} spec_model_params;

#define SPEC_DEVICES_MAX 16

/* How a model is split over several devices. since ABI 9 */
enum spec_split_mode {
    SPEC_SPLIT_LAYER = 0,  /* whole layers and their cells */
    SPEC_SPLIT_NONE = 1,   /* one device, main_gpu */
    SPEC_SPLIT_ROW = 2,    /* rows of matrices, where the devices can */
    SPEC_SPLIT_TENSOR = 3, /* weights and cells; experimental in llama.cpp */
    SPEC_SPLIT_COUNT
};

/* How a file gets into memory. since ABI 9 */
enum spec_load_mode {
    SPEC_LOAD_DEFAULT = 0, /* as use_mmap says: AUTO, else READ */
    SPEC_LOAD_AUTO = 1,    /* mapped, unless a device cannot */
    SPEC_LOAD_READ = 2,
    SPEC_LOAD_MMAP = 3,
    SPEC_LOAD_MLOCK = 4, /* read, and kept out of swap; a warning where that is not permitted */
    SPEC_LOAD_MMAP_MLOCK = 5,
    SPEC_LOAD_DIRECT_IO = 6, /* read past the page cache, where the file system can */
    SPEC_LOAD_COUNT
};

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
    bool add_eos;
    bool is_recurrent;
    bool is_hybrid;
    bool has_encoder;
} spec_model_info;

/* Loads a model. Errors: INVALID_ARGUMENT, NOT_FOUND, BAD_MODEL, UNSUPPORTED (MTP layers without
 * their model), OUT_OF_MEMORY, CANCELLED. since ABI 1 */
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

/* What llama.cpp has made of the parameters of a load, as text: "device" (names, "," between;
 * empty: the CPU alone), "split_mode", "tensor_split" (empty: by free memory), "gpu_layers",
 * "buffers" ("TYPE=BYTES", "," between), "host_bytes" (of the weights that the CPU computes with)
 * and "buffer:NAME", the buffer type that the tensor NAME lies in (NOT_FOUND where there is none).
 * since ABI 9 */
int32_t spec_model_setting(const spec_model * model, const char * key, char * buf, size_t cap,
                           size_t * n_needed);

/* Tokenises UTF-8 text. *n_needed is the count; BUFFER_TOO_SMALL when it exceeds cap (nothing is
 * written). since ABI 1 */
int32_t spec_model_tokenize(const spec_model * model, const char * text, size_t n_text,
                            bool add_special, bool parse_special, int32_t * tokens, size_t cap,
                            size_t * n_needed);
/* Bytes [begin, end) of a text. since ABI 8 */
typedef struct spec_span {
    size_t begin;
    size_t end;
} spec_span;

/* As spec_model_tokenize with parse_special, but where the spelling of a control token touches one
 * of the spans of `plain`, it is read as text. They are in order, apart, and within the text; else
 * INVALID_ARGUMENT. since ABI 8 */
int32_t spec_model_tokenize_plain(const spec_model * model, const char * text, size_t n_text,
                                  const spec_span * plain, size_t n_plain, bool add_special,
                                  int32_t * tokens, size_t cap, size_t * n_needed);
/* Finds the spellings of control tokens in a text, from its beginning on, without overlap.
 * *n_needed is their number; BUFFER_TOO_SMALL when it exceeds cap (nothing is written). since ABI 8
 */
int32_t spec_model_find_control(const spec_model * model, const char * text, size_t n_text,
                                spec_span * out, size_t cap, size_t * n_needed);
/* Bytes of one token (not always valid UTF-8 alone). special: render control tokens too.
 * UNSUPPORTED: the file has no tokenizer. since ABI 1 */
int32_t spec_model_token_bytes(const spec_model * model, int32_t token, bool special, char * buf,
                               size_t cap, size_t * n_needed);
/* *out is true when the token ends a generation. since ABI 1 */
int32_t spec_model_is_eog(const spec_model * model, int32_t token, bool * out);

/* What finding the breakers of DRY samplers has cost. Those of the 256 texts used last are kept
 * with the model, in 32 MiB at most. since ABI 8 */
typedef struct spec_breaker_stats {
    int64_t n_searched; /* texts that the vocabulary was searched for */
    int64_t n_bytes;    /* kept */
    int32_t n_held;     /* texts that are kept */
} spec_breaker_stats;

/* since ABI 8 */
int32_t spec_model_get_breaker_stats(const spec_model * model, spec_breaker_stats * out);

/* Chat templates (Jinja). A template is a program that a model's file brings, and llama.cpp's
 * interpreter does not bound what it does: a hostile one ends the process or never ends. Open and
 * format in a process of its own, as chat_process.py does. One thread at a time. since ABI 6 */

typedef struct spec_chat spec_chat;

typedef struct spec_chat_params {
    const char * source; /* the template's text */
    const char * bos;    /* spelling of the token; "" when there is none */
    const char * eos;
    bool add_bos; /* the tokenizer adds the token, so one in front of a chat is taken away */
    bool add_eos; /* likewise at the end */
} spec_chat_params;

/* Parses a template and runs it on examples. Errors: INVALID_ARGUMENT, BAD_TEMPLATE. */
int32_t spec_chat_open(const spec_chat_params * params, spec_chat ** out);
void spec_chat_free(spec_chat * chat);
/* Formats messages, as a NUL-terminated text; *n_needed is its length with the NUL. Errors:
 * INVALID_ARGUMENT, BAD_TEMPLATE, BUFFER_TOO_SMALL (nothing is written). */
int32_t spec_chat_format(const spec_chat * chat, const char * const * roles,
                         const char * const * contents, size_t n_messages,
                         bool add_generation_prompt, char * buf, size_t cap, size_t * n_needed);
/* Likewise, with the spans of the text that the messages brought, in order and apart: roles that
 * are words (letters, digits, _ and -) are the template's own. *n_input is their number; where it
 * exceeds cap_input, BUFFER_TOO_SMALL, and both numbers are written. Where llama.cpp has changed
 * the text after the template made it, there are none. since ABI 8
 * Arguments of the template are variables such as enable_thinking, values in JSON that nest at
 * most 64 levels: their texts are input, too. None sets what messages or the tokenizer say. Of two
 * of one name the last counts. Arrays of none may be NULL. since ABI 9 */
int32_t spec_chat_format_marked(const spec_chat * chat, const char * const * roles,
                                const char * const * contents, size_t n_messages,
                                const char * const * names, const char * const * values,
                                size_t n_arguments, bool add_generation_prompt, char * buf,
                                size_t cap, size_t * n_needed, spec_span * input, size_t cap_input,
                                size_t * n_input);

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
    const char * grammar; /* GBNF with a rule "root"; NULL or "" = off. One that takes more than
                             2^22 + 64 n_vocab comparisons for one token ends its sequence
                             (GRAMMAR_TOO_COSTLY) */
    bool ignore_eos;      /* end-of-generation tokens are never chosen */
    bool logprobs;        /* compute log-probabilities of the emitted tokens */

    /* since ABI 2 */
    int32_t n_top_logprobs;  /* [0, 32]: likeliest tokens told with each emitted token; 0 = off */
    int32_t min_keep;        /* >= 0: fewest tokens that top_p, min_p, typical_p and XTC leave */
    float dynatemp_range;    /* >= 0: the temperature follows the entropy within +- this; 0 = off */
    float dynatemp_exponent; /* >= 0 */
    int32_t mirostat;        /* 0 = off, 1 or 2: replaces all filters but the temperature */
    float mirostat_tau;      /* >= 0; target surprise in bits */
    float mirostat_eta;      /* [0, 1]; learning rate */
    float adaptive_target;   /* [0, 1]: tokens near this probability are chosen; -1 = off */
    float adaptive_decay;    /* [0, 0.99] */
    const int32_t * samplers; /* spec_sampler_kind in order, each once */
    int32_t n_samplers;       /* -1: llama.cpp's default order */
    bool match_only;          /* drafts stand where they are what is drawn without them: a seed
                                 draws the same tokens whatever is drafted. since ABI 9 */
} spec_sampler_params;

/* What a chain can be made of, in spec_sampler_params.samplers. since ABI 2 */
enum spec_sampler_kind {
    SPEC_SAMPLER_PENALTIES = 0,
    SPEC_SAMPLER_DRY = 1,
    SPEC_SAMPLER_TOP_N_SIGMA = 2,
    SPEC_SAMPLER_TOP_K = 3,
    SPEC_SAMPLER_TYPICAL_P = 4,
    SPEC_SAMPLER_TOP_P = 5,
    SPEC_SAMPLER_MIN_P = 6,
    SPEC_SAMPLER_XTC = 7,
    SPEC_SAMPLER_TEMPERATURE = 8,
    SPEC_SAMPLER_INFILL = 9, /* fill-in-the-middle; after a top_k of [1, 1024], without a grammar */
    SPEC_SAMPLER_COUNT
};

#define SPEC_TOP_LOGPROBS_MAX 32

#define SPEC_SEED_RANDOM 0xFFFFFFFFu

void spec_sampler_default_params(spec_sampler_params * out);
/* Checks the parameters and compiles the grammar. Errors: INVALID_ARGUMENT, BAD_GRAMMAR,
 * UNSUPPORTED (a grammar or infill, and a model without tokenizer; a DRY breaker that the tokenizer
 * has no tokens for), OUT_OF_MEMORY. since ABI 1 */
int32_t spec_sampler_init(const spec_model * model, const spec_sampler_params * params,
                          spec_sampler ** out);
void spec_sampler_free(spec_sampler * sampler);
/* What a preempted sampler knows: *n_known tokens of its sequence, and whether it chose the last of
 * them; 0 and false of a new one. since ABI 2 */
int32_t spec_sampler_get_history(const spec_sampler * sampler, int32_t * n_known,
                                 bool * has_chosen);

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
    SPEC_DRAFT_DFLASH = 9,  /* a DFlash model: a block of tokens in one pass. since ABI 2 */
    SPEC_DRAFT_DSPARK = 10, /* a DSpark model: the same, tokens depend on another. since ABI 2 */
    SPEC_DRAFT_COUNT
};

/* Fill with spec_engine_default_params first. */
typedef struct spec_engine_params {
    int32_t draft_type;  /* spec_draft_type */
    int32_t n_ctx;       /* KV cells, all sequences together; 0 = n_seq_max * n_ctx_seq */
    int32_t n_ctx_seq;   /* most tokens of one sequence; 0 = the model's training context. Of a
                            model that has learned its positions one by one no more than these */
    int32_t n_batch;     /* most tokens of one step; > 0 */
    int32_t n_ubatch;    /* most tokens of one physical batch; > 0, <= n_batch */
    int32_t n_seq_max;   /* sequences at once; [1, 256] */
    int32_t n_draft_max; /* most drafted tokens of one sequence and step; > 0 unless draft_type is
                            NONE; DFLASH and DSPARK draft no more than their model's block holds */
    int32_t n_rs_seq;    /* recurrent-state snapshots per sequence; -1 = n_draft_max where the model
                            supports them */
    int32_t n_threads;   /* threads of a narrow decode; 0 = spec_cores.n_cores */
    int32_t n_threads_batch; /* threads of a wide decode; 0 = n_threads */
    float p_min;             /* stop drafting below this probability; [0, 1) */
    bool probabilistic; /* sample drafts and verify by rejection at temperature > 0 (MTP, SIMPLE);
                           else argmax and match */
    bool kv_unified;    /* one pool of cells for all sequences; else n_ctx_seq cells for each */
    bool flash_attention;
    int32_t n_min; /* shorter drafts are dropped; [0, n_draft_max], [0, 1] with probabilistic, where
                      more would change the distribution. since ABI 2 */
    bool exact;    /* CPU kernels whose result does not depend on what else is in the batch; slower.
                      UNSUPPORTED on accelerators and with weights that llama.cpp has repacked, as it
                      does with some quantised ones; INVALID_ARGUMENT with kv_unified. A snapshot
                      puts the cells of windows elsewhere: where these keep their cells alone (no
                      swa_full), or without flash_attention, sums differ by their rounding after
                      it. since ABI 2 */
    /* BENCHMARKS ONLY: drafts are accepted at random instead of verified, as llama-server does with
     * --spec-synth-rates, so that random weights show what a step costs at a given acceptance; what
     * is generated is not the model's. Entry i is the probability that the first i + 1 drafted
     * tokens are all accepted: [0, 1], never rising, n_draft_max of them. Read by
     * spec_engine_init only. since ABI 3 */
    const float * synth_rates;
    int32_t n_synth_rates; /* 0 = off */
    int32_t n_wide;        /* a decode of so many tokens is wide; >= 0, 0 = 2. since ABI 7 */
    bool flash_forced; /* with flash_attention: without asking whether model and device allow it.
                          since ABI 7 */

    /* since ABI 9 */
    int32_t type_k;       /* spec_cache_type of the target's cells */
    int32_t type_v;       /* a quantised one needs flash_attention */
    int32_t type_k_draft; /* of the drafter's cells */
    int32_t type_v_draft;
    int32_t rope_scaling;   /* spec_rope_scaling */
    float rope_freq_base;   /* >= 0; 0 = the model's */
    float rope_freq_scale;  /* >= 0; 0 = the model's; 1 / N stretches the context N times */
    int32_t yarn_orig_ctx;  /* tokens that the model was trained with; >= 0; 0 = the model's */
    float yarn_ext_factor;  /* >= 0, 0 = interpolation alone; -1 = the model's */
    float yarn_attn_factor; /* >= 0; -1 = the model's */
    float yarn_beta_slow;   /* >= 0; -1 = the model's */
    float yarn_beta_fast;   /* >= 0; -1 = the model's */
    bool swa_small; /* layers with a sliding window keep its cells and n_ubatch more, not n_ctx_seq:
                       less memory; what lies behind the window can be neither cut to nor copied */
} spec_engine_params;

/* What a cell's numbers are kept as. since ABI 9 */
enum spec_cache_type {
    SPEC_CACHE_F16 = 0,
    SPEC_CACHE_F32 = 1,
    SPEC_CACHE_BF16 = 2,
    SPEC_CACHE_Q8_0 = 3,
    SPEC_CACHE_Q4_0 = 4,
    SPEC_CACHE_Q4_1 = 5,
    SPEC_CACHE_IQ4_NL = 6,
    SPEC_CACHE_Q5_0 = 7,
    SPEC_CACHE_Q5_1 = 8,
    SPEC_CACHE_COUNT
};

/* since ABI 9 */
enum spec_rope_scaling {
    SPEC_ROPE_MODEL = 0, /* as the model says */
    SPEC_ROPE_NONE = 1,
    SPEC_ROPE_LINEAR = 2,
    SPEC_ROPE_YARN = 3,
    SPEC_ROPE_COUNT
};

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
    int32_t n_window; /* tokens that the target's sliding windows look back; 0 = no such layers. A
                         snapshot holds no more of these layers: what was loaded from one with more
                         tokens can be kept whole, or but for its last token. since ABI 7 */
    int32_t n_window_cells; /* cells that a sequence has in such layers, which keep its last tokens
                               alone (swa_small); 0 = as many as in others. since ABI 9 */
} spec_engine_limits;

void spec_engine_default_params(spec_engine_params * out);
/* Makes the contexts. `draft` is NULL for NONE, MTP and the n-gram kinds.
 * Errors: INVALID_ARGUMENT, NO_MTP_HEADS, NOT_EAGLE3, INCOMPATIBLE_DRAFT, UNSUPPORTED,
 * OUT_OF_MEMORY. since ABI 1 */
int32_t spec_engine_init(const spec_model * target, const spec_model * draft,
                         const spec_engine_params * params, spec_engine ** out);
void spec_engine_free(spec_engine * engine);
int32_t spec_engine_get_limits(const spec_engine * engine, spec_engine_limits * out);
/* What llama.cpp has made of the engine's parameters, as text: "cache_type_k", "cache_type_v", the
 * same with "_draft" (empty: no draft context, or no attention), "rope_scaling", "rope_freq_base",
 * "rope_freq_scale", "yarn_orig_ctx", "yarn_ext_factor", "yarn_attn_factor", "yarn_beta_slow",
 * "yarn_beta_fast", "swa_full" (true, false; empty: the target has no windows) and "flash_attn".
 * since ABI 9 */
int32_t spec_engine_setting(const spec_engine * engine, const char * key, char * buf, size_t cap,
                            size_t * n_needed);

/* Takes a free sequence into use, empty, with a sampler. The engine owns *sampler from then on,
 * also on failure, and sets *sampler to NULL. Errors: BAD_SEQ_ID, SEQ_BUSY, BAD_PLAN (an
 * unprocessed batch has tokens of this id, or the sampler was preempted: see spec_start). since
 * ABI 1 */
int32_t spec_engine_seq_begin(spec_engine * engine, int32_t seq_id, spec_sampler ** sampler);
/* Frees a sequence: KV cells of both contexts, speculative state, sampler. Harmless when it is
 * idle. Errors: BAD_SEQ_ID. since ABI 1 */
int32_t spec_engine_seq_end(spec_engine * engine, int32_t seq_id);
/* Tokens of the sequence in the target's KV cache, or a negative error. since ABI 1 */
int32_t spec_engine_seq_n_past(const spec_engine * engine, int32_t seq_id);
/* KV cells in use, over all sequences. since ABI 1 */
int32_t spec_engine_n_cells_used(const spec_engine * engine);

/* What drafting has cost since the engine was made, as the draft context shows it; all 0 without
 * one. */
typedef struct spec_draft_work {
    int64_t n_drafts;    /* drafts asked for, over all sequences */
    int64_t n_positions; /* tokens that the draft model computed for them */
    int64_t n_passes;    /* decodes of the draft model: sequences that draft together share them */
} spec_draft_work;

/* since ABI 2 */
int32_t spec_engine_get_draft_work(const spec_engine * engine, spec_draft_work * out);

/* One sequence's part of a step. A sequence may stand in a plan once. */
typedef struct spec_plan_entry {
    int32_t seq_id;
    int32_t n_past;       /* must equal spec_engine_seq_n_past */
    int32_t token_offset; /* first token in spec_plan.tokens */
    int32_t n_tokens;     /* >= 1: a piece of the prompt, or the last emitted token alone; of a
                             resumed sequence a piece of what it had, up to that token */
    int32_t n_draft; /* K: draft tokens wanted, or at most given; 0 = none. > 0 only with is_output
                        and only for the last emitted token */
    int32_t is_output; /* 1: choose a token after the last one given (end of the prompt, or
                          generation); 0: prompt piece */
} spec_plan_entry;

/* A draft that the caller proposes for one entry of a plan, for instance out of the sequence's own
 * text. It is verified instead of one of the engine's drafter, which goes on following the
 * sequence; a sequence without a draft state may be external drafts too. Each position is sampled
 * from the target and the draft stands as long as it agrees, so an external draft changes no token,
 * whatever it is. It ends before its first end token. The drafter is asked after all, for the
 * entry's n_draft tokens, where nothing is left of the external draft, and for the first draft of
 * each seq_id in an engine's life. since ABI 4 */
typedef struct spec_external_draft {
    int32_t seq_id;       /* of an entry with n_draft > 0; each once */
    int32_t token_offset; /* first token in spec_plan.tokens */
    int32_t n_tokens;     /* [1, the entry's n_draft] */
} spec_external_draft;

/* A start of a plan: takes a sequence into use, idle or not, with the first n_kept tokens of a
 * snapshot, of another sequence, or else of what it holds itself; the rest of that is gone.
 *
 * A new sampler is fed the tokens that stay. A resumed one is not fed what it knows: once it has
 * chosen a token, the plans' entries compute the sequence's tokens again up to that one, which is
 * the first output. Drafts go on; the first may be poorer where not all of a sequence is kept,
 * since the hidden row of the last kept token is not at hand. since ABI 8 */
typedef struct spec_start {
    int32_t seq_id;
    int32_t n_kept;  /* tokens that stay; [0, what is held there]; 0 begins empty */
    int32_t source;  /* another begun sequence, whose first tokens are copied; -1 = none. It is
                        read as the starts before have left it */
    bool is_resumed; /* the sampler was preempted, or is the snapshot's */
    const void * snapshot;  /* written by a save of a plan, or spec_engine_seq_save; NULL = none */
    size_t n_snapshot;      /* its bytes */
    spec_sampler * sampler; /* the engine's from then on, if the step returns SPEC_OK, else still
                               the caller's; NULL with is_resumed: the snapshot's own. Where it is
                               given, the snapshot's is not made */
    uint64_t tag;           /* opaque: whose sequence it is; 0 = nobody's. The sequence, its copies,
                               its snapshots and its preempted sampler carry the tag; a start that would
                               go on from another's is BAD_PLAN */
} spec_start;

/* Gives the room that a save of a plan is written to: n bytes for plan.saves[i], valid until the
 * step returns; NULL: it is not written. Called by spec_engine_step, on its thread; must not call
 * this library, but for spec_room_take. since ABI 8 */
typedef void * (*spec_room_callback)(int32_t i, size_t n, void * user);
/* Memory for such a room; NULL: there is none. What is given back, with the same n, is kept for the
 * next one: as many bytes as the last one had, or a quarter of what is taken, at most, and with
 * that no more than was taken at once. It holds what was there before. Any thread. since ABI 9 */
void * spec_room_take(size_t n);
void spec_room_give(void * room, size_t n);

typedef struct spec_plan {
    const spec_plan_entry * entries;
    int32_t n_entries;
    const int32_t * tokens;
    int32_t n_tokens; /* length of tokens */

    /* since ABI 4 */
    const spec_external_draft * drafts; /* may be NULL when n_drafts is 0 */
    int32_t n_drafts;

    /* since ABI 5 */
    int32_t n_steps; /* most steps of a run, [0, SPEC_RUN_MAX]; 0 and 1: the plan alone. More only
                        where every entry is an output without a draft: each goes on from the token
                        that it has just emitted, as if the caller had planned it so */

    /* What is done before the entries, in this order; the entries, and each of these, are checked
     * against what those before will have made of the sequences. Each array may be NULL when it is
     * empty, and has n_seq_max items at most. since ABI 8 */
    const int32_t * saves; /* sequences that are written as snapshots; they stay as they are. One
                              that is preempted too with its sampler, others for prefix reuse: as
                              spec_engine_seq_save_prefix */
    int32_t n_saves;
    spec_room_callback room; /* where to; may be NULL when n_saves is 0 */
    void * room_user;
    const int32_t * swap_outs; /* sequences freed but for their samplers, which keep history and
                              random state (of sampled drafts too), for a start with is_resumed */
    int32_t n_swap_outs;
    const int32_t * frees; /* sequences given back, as spec_engine_seq_end does; idle ones too */
    int32_t n_frees;
    const spec_start * starts; /* each sequence once */
    int32_t n_starts;
    const int32_t * drafts_off; /* as spec_engine_seq_drafts_off */
    int32_t n_drafts_off;
    const int32_t * drafts_on; /* as spec_engine_seq_drafts_on */
    int32_t n_drafts_on;
} spec_plan;

/* Most steps of a run. since ABI 5 */
#define SPEC_RUN_MAX 64

enum spec_result_flags {
    SPEC_RESULT_EOG = 1, /* the last emitted token ends the generation */
    SPEC_RESULT_DRAFT_COLD =
        2, /* the draft state was lost; the sequence goes on without speculation */
    SPEC_RESULT_REPLAYED = 4, /* the rollback went through a checkpoint */
    SPEC_RESULT_EXTERNAL = 8, /* the draft that was verified is the plan's. since ABI 4 */
};

typedef struct spec_result_entry {
    int32_t seq_id;
    int32_t status;       /* SPEC_OK, NO_ROOM, DECODE_FAILED, SAMPLING_FAILED,
                             GRAMMAR_TOO_COSTLY (since ABI 8) or NO_TOKEN_ALLOWED (since ABI 9) */
    int32_t n_past;       /* tokens in the KV cache after the step */
    int32_t token_offset; /* first emitted token in spec_result.tokens and .logprobs */
    int32_t
        n_tokens; /* emitted tokens: accepted drafts and the target's own; 0 when not is_output */
    int32_t n_drafted;   /* draft tokens that were verified */
    int32_t n_accepted;  /* of these, accepted */
    int32_t flags;       /* spec_result_flags */
    int32_t n_mask_work; /* comparisons that the sequence's grammar took, of a sequence that failed
                            too, and its samplers that sort a large vocabulary; INT32_MAX where they
                            are more. since ABI 8 */
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

    /* since ABI 2 */
    const int32_t * top_tokens; /* [n_tokens, n_top], likeliest first; -1 where not asked for */
    const float * top_logprobs; /* [n_tokens, n_top]; natural log under the target's unmodified
                                   distribution; NaN where not asked for */
    int32_t n_top; /* greatest n_top_logprobs of the plan's sequences; 0: both arrays are empty */

    /* since ABI 5 */
    int32_t n_steps; /* steps that were run; counts and times are their sums */

    /* since ABI 8 */
    const size_t * n_saved; /* one per save: bytes written; 0: it could not be written, as its
                               sampler has a state that cannot be, or memory or room was lacking */
    spec_sampler * const * samplers; /* one per preempt; each is the caller's. NULL: it is lost, for
                                        lack of memory; the sequence was freed all the same */
    const int32_t * n_kept; /* one per start: tokens kept; fewer than it says, 0, where they cannot
                               be: a recurrent target goes on only from all that a sequence or
                               snapshot holds, and copies from no other; a snapshot may be damaged
                               or of another engine. Then the sequence has begun, empty; with the
                               snapshot's own sampler it stays idle */
} spec_result;

/* One step for all sequences of the plan: what it does before its entries, in the order of its
 * fields; then draft, undo the draft's KV, decode prompt pieces, last tokens and drafts at once,
 * process, verify, accept, roll both contexts back. Returns BAD_PLAN, BAD_SEQ_ID, SEQ_IDLE or
 * INVALID_ARGUMENT when anything in the plan is wrong (OUT_OF_MEMORY when it cannot be checked):
 * then nothing has changed. Otherwise SPEC_OK, and each entry's status tells what became of its
 * sequence. An entry whose start kept fewer tokens than it said is not computed: n_past tells what
 * is kept, the status is SPEC_OK, or DECODE_FAILED where the sequence is idle; the plan is run once
 * then, whatever its n_steps.
 *
 * With n_steps the engine goes on without its caller, whose part between two steps takes as long as
 * the step of a small model. The run ends early with the first step in which a sequence emits an
 * end token, fails, finds no room or fills its context, or after which spec_engine_interrupt was
 * called. An entry's tokens are those of all steps; one that found no room after its first step is
 * SPEC_OK with fewer than the others. since ABI 1, runs since ABI 5 */
int32_t spec_engine_step(spec_engine * engine, const spec_plan * plan, spec_result * out);

/* Ends the run in flight, or else the next one, after the step that it is in. Any thread, as long
 * as the engine is not freed; NULL is harmless. since ABI 5 */
void spec_engine_interrupt(spec_engine * engine);

/* Changes the threads of decodes from the next one on, as where others use the cores. Each is at
 * least 1, and at most the greater of what the engine was made with. Sums over a long context may
 * round otherwise than with another number. since ABI 9 */
int32_t spec_engine_set_threads(spec_engine * engine, int32_t n_threads, int32_t n_threads_batch);

/* The parts of a step, one call at a time.
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

/* One decode of the target. A sequence's sampler is fed its tokens, but for those that it chose or
 * knows, and for drafted ones, which it is to verify. since ABI 1 */
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
 * n_accepted of them. Where they came in several decodes, and the last that stays is none of the
 * last decode's, the next draft of MTP is poorer, and EAGLE-3 has none; a recurrent target has no
 * state of that token: UNSUPPORTED, and nothing has changed. since ABI 1 */
int32_t spec_engine_seq_accept(spec_engine * engine, int32_t seq_id, int32_t n_accepted);
/* Cuts a sequence to its first n_past tokens. UNSUPPORTED when a recurrent target cannot go back so
 * far: more than n_rs_seq tokens, more than the longest draft of a step, all tokens of its last
 * decode, twice, or after a decode without it; or when a sliding window needs cells that are gone
 * (see n_window); n_past = 0 always works. since ABI 1 */
int32_t spec_engine_seq_rollback(spec_engine * engine, int32_t seq_id, int32_t n_past);

/* Decoders: one model over one context, several sequences, no sampler and no speculation.
 *
 * A spec_decoder owns a context with n_seq_max sequences and n_branch_max further ones for the
 * branches of a draft tree. A sequence is a cache of tokens that decode extends and rollback cuts.
 * A tree hangs on the end of one sequence at a time; its nodes are not part of the sequence until
 * spec_decoder_tree_commit. One thread at a time, as a spec_engine. */

typedef struct spec_decoder spec_decoder;

/* Fill with spec_decoder_default_params first. */
typedef struct spec_decoder_params {
    int32_t n_seq_max;    /* sequences at once; [1, 256] */
    int32_t n_branch_max; /* most leaves of a draft tree; [0, 256 - n_seq_max]; recurrent models
                             have no trees */
    int32_t
        n_outputs_max; /* most scored tokens of one decode, or nodes of one tree; [1, n_ubatch] */
    int32_t n_ctx_seq; /* most tokens of one sequence; 0 = the model's training context */
    int32_t n_batch;   /* most tokens of one decode; > 0 */
    int32_t n_ubatch;  /* most tokens of one physical batch; > 0, <= n_batch */
    int32_t n_rs_seq;  /* recurrent-state snapshots per sequence; [0, 64] */
    int32_t n_threads; /* 0 = spec_cores.n_cores */
    bool flash_attention;
} spec_decoder_params;

typedef struct spec_decoder_limits {
    int32_t n_ctx_seq; /* most tokens of one sequence */
    int32_t n_batch;   /* most tokens of one decode; n_ubatch on a recurrent model */
    int32_t n_seq_max;
    int32_t n_branch_max; /* 0 = no trees */
    int32_t n_outputs_max;
    int32_t n_rs_seq; /* rollback bound of a recurrent model; -1 = not recurrent, any rollback */
    int32_t n_vocab;
    int32_t n_embd;     /* width of a layer's row */
    int32_t n_embd_out; /* width of a hidden row */
    int32_t n_layer;
    bool has_layers;           /* whether llama.cpp shows this architecture's layers */
    bool is_last_layer_normed; /* whether the row "after the last layer" is the hidden row, that is,
                                  after the final norm: llama.cpp shows no other here */
} spec_decoder_limits;

void spec_decoder_default_params(spec_decoder_params * out);
/* Makes the context. The model must outlive it. Errors: INVALID_ARGUMENT, UNSUPPORTED (encoders,
 * models that draft from another model's hidden states, architectures of which llama.cpp gives no
 * hidden rows beside logits), OUT_OF_MEMORY. since ABI 2 */
int32_t spec_decoder_init(const spec_model * model, const spec_decoder_params * params,
                          spec_decoder ** out);
/* Makes a decoder of an EAGLE-3 draft model beside a decoder of its target, which must outlive it
 * and keeps, from now on, the hidden states that the draft reads. Each of its tokens comes with a
 * state (spec_decoder_set_states) and stands one position before its own: position p takes the
 * token at p + 1 and the target's state at p; further down a draft, the draft's own hidden row
 * (SPEC_ROWS_HIDDEN, before the final norm here) of the token before. Errors: as
 * spec_decoder_init, NOT_EAGLE3, INCOMPATIBLE_DRAFT. since ABI 2 */
int32_t spec_decoder_init_eagle3(const spec_model * model, spec_decoder * target,
                                 const spec_decoder_params * params, spec_decoder ** out);
void spec_decoder_free(spec_decoder * decoder);
int32_t spec_decoder_get_limits(const spec_decoder * decoder, spec_decoder_limits * out);
/* Tokens in a sequence's cache, or a negative error. since ABI 2 */
int32_t spec_decoder_seq_n_past(const spec_decoder * decoder, int32_t seq_id);

/* Appends tokens to a sequence. is_output: all of them are scored (at most n_outputs_max), else
 * none. NO_ROOM: nothing has changed. DECODE_FAILED: the sequence is empty. BAD_PLAN: a tree hangs
 * on it. since ABI 2 */
int32_t spec_decoder_decode(spec_decoder * decoder, int32_t seq_id, const int32_t * tokens,
                            int32_t n_tokens, bool is_output);
/* Cuts a sequence to its first n_past tokens. UNSUPPORTED when a recurrent model cannot go back so
 * far: more than n_rs_seq tokens, all tokens of the last decode, or twice without a decode in
 * between; or when a sliding window needs cells that are gone; n_past = 0 always works. since
 * ABI 2 */
int32_t spec_decoder_seq_rollback(spec_decoder * decoder, int32_t seq_id, int32_t n_past);

/* Decodes n_nodes tree nodes at once, all scored, each seeing the sequence and its own ancestors
 * only. Nodes are numbered from 0 in the order given, over all calls since the tree began;
 * parents[i] is the number of an earlier node, or -1 for the end of the sequence. Errors:
 * UNSUPPORTED (no trees), INVALID_ARGUMENT (more leaves than branches, parents not before
 * children), BAD_PLAN (the tree hangs on another sequence), NO_ROOM, DECODE_FAILED (the tree is
 * gone, the sequence as it was). since ABI 2 */
int32_t spec_decoder_tree(spec_decoder * decoder, int32_t seq_id, const int32_t * tokens,
                          const int32_t * parents, int32_t n_nodes);
/* Ends the tree: the nodes of the path, from a root downwards, become part of the sequence without
 * being decoded again; all others are dropped. An empty path drops all. UNSUPPORTED: the tree is
 * deeper than the model's sliding window and has lost its top; it still hangs. since ABI 2 */
int32_t spec_decoder_tree_commit(spec_decoder * decoder, int32_t seq_id, const int32_t * path,
                                 int32_t n_path);

enum spec_rows {
    SPEC_ROWS_LOGITS = -2, /* [n_vocab] each */
    SPEC_ROWS_HIDDEN = -1, /* [n_embd_out] each: after the final norm, what the vocabulary
                              projection reads */
};

/* Copies rows of the last scored decode: one per token, in order. `what` is one of spec_rows, or
 * l >= 0 for the residual stream after layer l, [n_embd] each; that needs spec_decoder_set_layer
 * before the decode. n_out must be the number of floats of all rows. since ABI 2 */
int32_t spec_decoder_read(spec_decoder * decoder, int32_t what, float * out, size_t n_out);
/* Of an EAGLE-3 decoder: encodes the states of all tokens of the target's last decode or tree,
 * scored or not, in their order: out [n_tokens, n_embd]; n_out is its number of floats. BAD_PLAN:
 * there was no such decode since the decoder was made. DECODE_FAILED: nothing has changed. since
 * ABI 2 */
int32_t spec_decoder_encode(spec_decoder * decoder, float * out, size_t n_out);
/* Of an EAGLE-3 decoder: the states of the tokens of the next decode or tree, as many as these:
 * states [n_rows, n_embd]. since ABI 2 */
int32_t spec_decoder_set_states(spec_decoder * decoder, const float * states, int32_t n_rows);
/* Chooses whether the rows of a layer in [0, n_layer) are kept from the next decode on. UNSUPPORTED
 * without has_layers. since ABI 2 */
int32_t spec_decoder_set_layer(spec_decoder * decoder, int32_t layer, bool is_kept);

/* Rows of the token embedding table, before any scale that the architecture applies:
 * out [n_tokens * n_embd]. since ABI 2 */
int32_t spec_model_embed(const spec_model * model, const int32_t * tokens, int32_t n_tokens,
                         float * out);
/* Product of hidden rows [n_rows * n_embd_out] and the output matrix, tied or not, before any scale
 * or cap that the architecture applies: out [n_rows * n_vocab]. since ABI 2 */
int32_t spec_model_lm_head(const spec_model * model, const float * hidden, int32_t n_rows,
                           float * out);
/* Snapshots.
 *
 * A snapshot is one sequence whole, as bytes: its tokens, the cells of both contexts, the drafter's
 * state, the sampler with its parameters, history and random state. Loaded into the same or another
 * engine, in this or another process, the sequence goes on with the tokens and the drafts that it
 * would have had.
 *
 * It is bound to the models (a digest of their files, taken when they are loaded), to the engine's
 * parameters that shape a sequence, and to the version of llama.cpp. Any sequence id will do. A
 * checksum over the whole guards against damage, not against forgery: keep snapshots where only you
 * can write. */

/* Writes a snapshot of a sequence, whatever other sequences are doing. *n_needed is its size;
 * BUFFER_TOO_SMALL when that exceeds cap. Errors: BAD_SEQ_ID, SEQ_IDLE, BAD_PLAN (a proposal of
 * this sequence is pending, or its last batch was not processed), UNSUPPORTED (its sampler has a
 * state that cannot be written). since ABI 2 */
int32_t spec_engine_seq_save(spec_engine * engine, int32_t seq_id, void * buf, size_t cap,
                             size_t * n_needed);
/* As spec_engine_seq_save, but without the sampler and what it chose, as far as that is not in the
 * tokens: for other sequences with the same tokens, which bring their own, and for a preempted
 * sampler (spec_start). A snapshot with a sampler holds what its request asked for. since ABI 8 */
int32_t spec_engine_seq_save_prefix(spec_engine * engine, int32_t seq_id, void * buf, size_t cap,
                                    size_t * n_needed);
/* Takes an idle sequence into use as a snapshot left it. Errors: BAD_SEQ_ID, SEQ_BUSY, BAD_PLAN (an
 * unprocessed batch has tokens of this id), NO_ROOM, SNAPSHOT_*, INVALID_ARGUMENT (it holds no
 * sampler); then nothing has changed. since ABI 2 */
int32_t spec_engine_seq_load(spec_engine * engine, int32_t seq_id, const void * buf, size_t n);
/* *out is true when the sequence has lost its draft state and goes on without drafts. Errors:
 * BAD_SEQ_ID, SEQ_IDLE. since ABI 2 */
int32_t spec_engine_seq_is_cold(const spec_engine * engine, int32_t seq_id, bool * out);
/* Gives up a sequence's draft state: it goes on without drafts, and nothing is computed for them
 * any more. Errors: BAD_SEQ_ID, SEQ_IDLE. since ABI 2 */
int32_t spec_engine_seq_drafts_off(spec_engine * engine, int32_t seq_id);
/* Has a sequence without draft state (turned off, or lost) fed to its drafter again, from its next
 * tokens on; after them it is cold no more and can draft. Drafts are as good as before some ten
 * tokens later: what lies before is missing. A draft model reads the last 256 tokens again, an
 * n-gram drafter all, and at once. No-op where the sequence has its draft state. Errors:
 * BAD_SEQ_ID, SEQ_IDLE, BAD_PLAN (its last batch was not processed). since ABI 4 */
int32_t spec_engine_seq_drafts_on(spec_engine * engine, int32_t seq_id);
/* Copies the tokens that a sequence has in the target's KV cache; *n_needed is their count.
 * *id_last, which may be NULL, is the last chosen token, -1 before the first. Errors: BAD_SEQ_ID,
 * SEQ_IDLE, BUFFER_TOO_SMALL. since ABI 2 */
int32_t spec_engine_seq_tokens(const spec_engine * engine, int32_t seq_id, int32_t * tokens,
                               size_t cap, size_t * n_needed, int32_t * id_last);

/* Fault injection. */

enum spec_fault {
    SPEC_FAULT_NONE = 0,
    SPEC_FAULT_DECODE_NO_ROOM = 1, /* the target's decode reports that no cell is free */
    SPEC_FAULT_DECODE_FATAL = 2,   /* the target's decode fails after it has changed the cache */
    SPEC_FAULT_PROCESS = 3,        /* the draft's process fails */
    SPEC_FAULT_THROW = 4,          /* an exception is thrown inside the step */
    SPEC_FAULT_DRAFT = 5,          /* a drafter throws as it is told to draft. since ABI 7 */
    SPEC_FAULT_DECODE_THROW = 6,   /* the decode throws after it has changed the cache */
    SPEC_FAULT_COUNT
};

/* Makes the next `n_steps` steps fail, for tests of the failure paths. since ABI 1 */
int32_t spec_engine_inject_fault(spec_engine * engine, int32_t fault, int32_t n_steps);

/* Constraints, forks and embeddings. since ABI 2 */

/* Checks a GBNF grammar without a model: size, expansion, left recursion, ambiguity. Errors:
 * BAD_GRAMMAR. since ABI 2 */
int32_t spec_grammar_check(const char * grammar);
/* *out is true when the grammar generates exactly the UTF-8 text. Errors: BAD_GRAMMAR,
 * INVALID_ARGUMENT (longer than 64 KiB). since ABI 2 */
int32_t spec_grammar_accepts(const char * grammar, const char * text, size_t n_text, bool * out);

/* Begins n idle sequences dst with the first n_past tokens of src: tokens of its prompt, and not
 * the last that it holds; -1 takes as many as possible. What follows in dst is decoded by the
 * caller, at least one token. Drafts go on in dst. MTP's first is as good as the source's where
 * n_past is the end of the source's prompt or one token before, else poorer: the hidden row of the
 * token before is kept for these two. The engine owns samplers[0..n) on SPEC_OK only, and sets
 * them to NULL. Errors: UNSUPPORTED (recurrent target, or a sliding window needs cells that are
 * gone), BAD_SEQ_ID, SEQ_IDLE, SEQ_BUSY, BAD_PLAN,
 * INVALID_ARGUMENT; then nothing has changed. since ABI 2 */
int32_t spec_engine_fork(spec_engine * engine, int32_t src, int32_t n_past, const int32_t * dst,
                         spec_sampler ** samplers, int32_t n);

typedef struct spec_embedder spec_embedder;

enum spec_pooling {
    SPEC_POOLING_MODEL = 0, /* what the model was trained for; NONE when it does not say */
    SPEC_POOLING_NONE = 1,  /* one row for each token */
    SPEC_POOLING_MEAN = 2,
    SPEC_POOLING_CLS = 3,  /* the first token's row */
    SPEC_POOLING_LAST = 4, /* the last token's row */
    SPEC_POOLING_RANK = 5, /* scores of a reranker's classification head */
    SPEC_POOLING_COUNT
};

/* Fill with spec_embedder_default_params first. */
typedef struct spec_embedder_params {
    int32_t pooling;   /* spec_pooling */
    int32_t n_batch;   /* most tokens of one decode, and so of one text; [1, 65536] */
    int32_t n_seq_max; /* most texts of one decode; [1, 256] */
    int32_t n_threads; /* 0 = spec_cores.n_cores */
    bool flash_attention;
} spec_embedder_params;

typedef struct spec_embedder_limits {
    int32_t pooling; /* spec_pooling, not MODEL */
    int32_t n_batch;
    int32_t n_seq_max;
    int32_t n_vocab;
    int32_t n_embd; /* floats of one row */
} spec_embedder_limits;

void spec_embedder_default_params(spec_embedder_params * out);
/* Makes a context of its own over the model. Errors: INVALID_ARGUMENT, UNSUPPORTED, OUT_OF_MEMORY.
 * Thread: as spec_engine. since ABI 2 */
int32_t spec_embedder_init(const spec_model * model, const spec_embedder_params * params,
                           spec_embedder ** out);
void spec_embedder_free(spec_embedder * embedder);
int32_t spec_embedder_get_limits(const spec_embedder * embedder, spec_embedder_limits * out);
/* Embeds n_texts texts; text i has lengths[i] tokens, >= 1 and <= n_batch, and no more than a model
 * that has learned its positions one by one has of them; one after the other in tokens[n_tokens].
 * rows: with NONE [n_tokens, n_embd], else [n_texts, n_embd]; cap is its number of floats. Errors:
 * INVALID_ARGUMENT, BUFFER_TOO_SMALL, DECODE_FAILED. since ABI 2 */
int32_t spec_embedder_encode(spec_embedder * embedder, const int32_t * tokens, int32_t n_tokens,
                             const int32_t * lengths, int32_t n_texts, float * rows, size_t cap);

/* Machines, and what fits on them. since ABI 8 */

/* How the library was built: lines "key=value", of the keys compiler, target, cpu, kernels,
 * patches, backends, build_type. Static storage. since ABI 8 */
const char * spec_build_facts(void);

enum spec_device_kind {
    SPEC_DEVICE_CPU = 0,
    SPEC_DEVICE_GPU = 1,
    SPEC_DEVICE_IGPU = 2,  /* shares the host's memory */
    SPEC_DEVICE_ACCEL = 3, /* works in the host's memory */
    SPEC_DEVICE_OTHER = 4
};

typedef struct spec_device {
    char name[64];
    char description[128];
    int32_t kind;        /* spec_device_kind */
    int64_t total_bytes; /* 0 where the device does not tell */
    int64_t free_bytes;
} spec_device;

/* What llama.cpp can compute on, in its own order; the host's CPU is one of them. *n_needed is
 * their number; BUFFER_TOO_SMALL when it exceeds cap (nothing is written). since ABI 8 */
int32_t spec_list_devices(spec_device * out, size_t cap, size_t * n_needed);

/* A survey tells what memory models and contexts would take, without taking it: metadata and
 * vocabulary are read, weights are not. (Of recurrent targets the states are allocated for the time
 * of the call.) One thread at a time. */
typedef struct spec_survey spec_survey;

/* Bytes on one device. */
typedef struct spec_memory_use {
    int32_t device;        /* index in spec_list_devices; -1: the host's memory */
    int64_t weights_bytes; /* of target and draft model */
    int64_t mapped_bytes;  /* the part of them that is mapped from the files: the system can drop
                              it and read it again */
    int64_t cells_bytes;   /* of the target's context: KV cells and recurrent states */
    int64_t compute_bytes; /* of the target's context: intermediate results and logits */
    int64_t draft_cells_bytes;
    int64_t draft_compute_bytes;
} spec_memory_use;

/* Opens the files. draft: NULL where there is no draft model. `vocab_only` must be false. Errors:
 * as spec_model_load. since ABI 8 */
int32_t spec_survey_open(const spec_model_params * target, const spec_model_params * draft,
                         spec_survey ** out);
void spec_survey_free(spec_survey * survey);
/* The target or the draft model as far as it was read: for spec_model_get_info, spec_model_meta,
 * spec_model_text and spec_model_setting alone. NULL without such a model. The survey's. since ABI
 * 8 */
const spec_model * spec_survey_model(const spec_survey * survey, bool is_draft);
/* Measures what an engine of these parameters would take: a row for the host, then one for each
 * other device in use. *n_needed is their number; BUFFER_TOO_SMALL when it exceeds cap (nothing is
 * written). Errors: as spec_engine_init. since ABI 8 */
int32_t spec_survey_measure(spec_survey * survey, const spec_engine_params * params,
                            spec_memory_use * out, size_t cap, size_t * n_needed);

typedef struct spec_fit {
    bool has_fit;         /* false: it fits in no way that llama.cpp knows; the rest is as asked */
    int32_t n_gpu_layers; /* -1: all */
    int32_t n_ctx;        /* KV cells, all sequences together */
} spec_fit;

/* Finds what of an engine fits on the devices beside the draft model, by llama.cpp's own search
 * (common_fit_params): first with the cells asked for and, where these are not fixed and would push
 * layers off the devices, with fewer cells. `n_ctx_seq_min`: least cells of one sequence;
 * `margin_bytes` are left free on each device. Without a device other than the CPU it looks at the
 * host's whole memory instead. What is measured afterwards has the weights where they were found to
 * fit, and the model of spec_survey_model is another one. Errors: as spec_engine_init. since ABI 8
 */
int32_t spec_survey_fit(spec_survey * survey, const spec_engine_params * params, bool is_ctx_fixed,
                        int32_t n_ctx_seq_min, int64_t margin_bytes, spec_fit * out);

#ifdef __cplusplus
}
#endif

#endif /* DRAFTHOUSE_SPEC_H */
