/*
 * step_bench.c: the bare step loop in C, the measure of what the service adds.
 *
 * It asks of the engine what the scheduler asks: a freed slot takes the next prompt at once, the
 * budget of a step goes to generating sequences first and to pieces of prompts next. It prints one
 * line of JSON.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "spec.h"

typedef struct options {
    const char * model;
    const char * draft_model;
    const char * draft_type;
    const char * prompts;
    int32_t n_seq;
    int32_t n_draft;
    int32_t n_gen;
    int32_t n_requests;
    int32_t n_ctx_seq;
    int32_t n_batch;
    int32_t n_ubatch;
    int32_t threads;
    int32_t ignore_eos;
    int32_t kv_unified;
    int32_t drafts_off;
} options;

typedef struct prompt {
    int32_t * tokens;
    int32_t n_tokens;
} prompt;

typedef struct slot {
    const prompt * prompt; /* NULL: free */
    int32_t n_past;
    int32_t n_emitted;
    int32_t last;
    double t_start;
} slot;

typedef struct totals {
    int64_t n_steps;
    int64_t n_tokens;
    int64_t n_prompt_tokens;
    int64_t n_drafted;
    int64_t n_accepted;
    int64_t t_draft_us;
    int64_t t_decode_us;
    int64_t t_process_us;
    int64_t t_sample_us;
    int64_t t_total_us;
    double * ttft_s; /* one per request that has emitted */
    int32_t n_ttft;
} totals;

typedef struct bench {
    options options;
    spec_model * model;
    spec_model * draft;
    spec_engine * engine;
    spec_engine_limits limits;
    prompt * prompts;
    int32_t n_prompts;
    int32_t n_started;
    int32_t n_done;
    slot * slots;
    spec_plan_entry * entries;
    int32_t * tokens;
    totals totals;
} bench;

static void die(const char * what, const char * detail) {
    fprintf(stderr, "step_bench: %s: %s\n", what, detail);
    exit(1);
}

static void check(int32_t rc, const char * what) {
    if (rc != SPEC_OK) {
        die(what, spec_last_error());
    }
}

static double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void * allocate(size_t n, size_t size) {
    void * memory = calloc(n > 0 ? n : 1, size);
    if (memory == NULL) {
        die("memory", "could not be allocated");
    }
    return memory;
}

/* ---------------------------------------------------------------------------------- arguments */

static const char * const draft_types[SPEC_DRAFT_COUNT] = {
    "none",          "mtp",       "eagle3",      "simple", "ngram-simple", "ngram-map-k",
    "ngram-map-k4v", "ngram-mod", "ngram-cache", "dflash", "dspark",
};

static int32_t draft_type_of(const char * name) {
    for (int32_t i = 0; i < SPEC_DRAFT_COUNT; ++i) {
        if (strcmp(name, draft_types[i]) == 0) {
            return i;
        }
    }
    die("unknown draft type", name);
    return -1;
}

static int32_t integer_of(const char * text) {
    char * end = NULL;
    const long value = strtol(text, &end, 10);
    if (end == text || *end != '\0' || value < 0 || value > INT32_MAX) {
        die("not a count", text);
    }
    return (int32_t)value;
}

static options read_options(int argc, char ** argv) {
    options o = {.draft_type = "none",
                 .n_seq = 1,
                 .n_draft = 3,
                 .n_gen = 128,
                 .n_requests = 1,
                 .n_batch = 512,
                 .n_ubatch = 512};
    const struct {
        const char * name;
        const char ** text;
        int32_t * count;
    } known[] = {
        {"--model", &o.model, NULL},           {"--draft-model", &o.draft_model, NULL},
        {"--draft-type", &o.draft_type, NULL}, {"--prompts", &o.prompts, NULL},
        {"--n-seq", NULL, &o.n_seq},           {"--n-draft", NULL, &o.n_draft},
        {"--n-gen", NULL, &o.n_gen},           {"--n-requests", NULL, &o.n_requests},
        {"--n-ctx-seq", NULL, &o.n_ctx_seq},   {"--n-batch", NULL, &o.n_batch},
        {"--n-ubatch", NULL, &o.n_ubatch},     {"--threads", NULL, &o.threads},
        {"--ignore-eos", NULL, &o.ignore_eos}, {"--kv-unified", NULL, &o.kv_unified},
        {"--let-go", NULL, &o.drafts_off},
    };
    const size_t n_known = sizeof known / sizeof known[0];
    for (int i = 1; i + 1 < argc; i += 2) {
        size_t k = 0;
        while (k < n_known && strcmp(argv[i], known[k].name) != 0) {
            k++;
        }
        if (k == n_known) {
            die("unknown option", argv[i]);
        }
        if (known[k].text != NULL) {
            *known[k].text = argv[i + 1];
        } else {
            *known[k].count = integer_of(argv[i + 1]);
        }
    }
    if (o.model == NULL || o.prompts == NULL || argc % 2 == 0) {
        die("usage", "step_bench --model FILE --prompts FILE [--draft-type TYPE] [--draft-model "
                     "FILE] [--n-seq N] "
                     "[--n-draft K] [--n-gen N] [--n-requests N] [--n-ctx-seq N] [--n-batch N] "
                     "[--n-ubatch N] "
                     "[--threads N] [--ignore-eos 0|1] [--kv-unified 0|1] [--let-go 0|1]; a line "
                     "of the prompts "
                     "file is token ids");
    }
    return o;
}

/* ------------------------------------------------------------------------------------ prompts */

static char * read_file(const char * path) {
    FILE * file = fopen(path, "rb");
    if (file == NULL) {
        die("cannot read", path);
    }
    size_t n = 0;
    size_t cap = 1 << 16;
    char * text = allocate(cap, 1);
    for (size_t got; (got = fread(text + n, 1, cap - n - 1, file)) > 0; n += got) {
        if (cap - n - got < 2) {
            cap *= 2;
            char * larger = realloc(text, cap);
            if (larger == NULL) {
                die("memory", "could not be allocated");
            }
            text = larger;
        }
    }
    fclose(file);
    text[n] = '\0';
    return text;
}

static prompt prompt_of(char * line) {
    prompt p = {.tokens = allocate(strlen(line) / 2 + 1, sizeof(int32_t)), .n_tokens = 0};
    for (char * rest = line;;) {
        char * end = NULL;
        const long token = strtol(rest, &end, 10);
        if (end == rest) {
            return p;
        }
        p.tokens[p.n_tokens++] = (int32_t)token;
        rest = end;
    }
}

static void read_prompts(bench * b) {
    char * text = read_file(b->options.prompts);
    size_t n = 1;
    for (const char * c = text; *c != '\0'; ++c) {
        n += *c == '\n';
    }
    b->prompts = allocate(n, sizeof(prompt));
    for (char * line = text; line != NULL && *line != '\0';) {
        char * next = strchr(line, '\n');
        if (next != NULL) {
            *next++ = '\0';
        }
        prompt p = prompt_of(line);
        if (p.n_tokens > 0) {
            b->prompts[b->n_prompts++] = p;
        } else {
            free(p.tokens);
        }
        line = next;
    }
    free(text);
    if (b->n_prompts == 0) {
        die("no prompts in", b->options.prompts);
    }
}

/* --------------------------------------------------------------------------------------- loop */

static spec_model * load(const char * path) {
    if (path == NULL) {
        return NULL;
    }
    const spec_model_params params = {.path = path, .n_gpu_layers = -1, .use_mmap = true};
    spec_model * model = NULL;
    check(spec_model_load(&params, &model), "load");
    return model;
}

static void open_engine(bench * b) {
    const options * o = &b->options;
    spec_engine_params params;
    spec_engine_default_params(&params);
    params.draft_type = draft_type_of(o->draft_type);
    params.n_ctx_seq = o->n_ctx_seq;
    params.n_batch = o->n_batch;
    params.n_ubatch = o->n_ubatch < o->n_batch ? o->n_ubatch : o->n_batch;
    params.n_seq_max = o->n_seq;
    params.n_draft_max = o->n_draft;
    params.n_threads = o->threads;
    params.kv_unified = o->kv_unified != 0;
    b->model = load(o->model);
    b->draft = load(o->draft_model);
    check(spec_engine_init(b->model, b->draft, &params, &b->engine), "engine");
    check(spec_engine_get_limits(b->engine, &b->limits), "limits");
    b->slots = allocate((size_t)b->limits.n_seq_max, sizeof(slot));
    b->entries = allocate((size_t)b->limits.n_seq_max, sizeof(spec_plan_entry));
    b->tokens = allocate((size_t)b->limits.n_batch, sizeof(int32_t));
    b->totals.ttft_s = allocate((size_t)o->n_requests, sizeof(double));
}

static void start(bench * b, int32_t seq_id) {
    spec_sampler_params params;
    spec_sampler * sampler = NULL;
    spec_sampler_default_params(&params);
    params.temperature = 0.0f;
    params.ignore_eos = b->options.ignore_eos != 0;
    check(spec_sampler_init(b->model, &params, &sampler), "sampler");
    check(spec_engine_seq_begin(b->engine, seq_id, &sampler), "begin");
    if (b->options.drafts_off != 0) {
        check(spec_engine_seq_drafts_off(b->engine, seq_id), "turned off");
    }
    const prompt * p = &b->prompts[b->n_started++ % b->n_prompts];
    b->slots[seq_id] = (slot){.prompt = p, .t_start = now_s()};
}

static int32_t least(int32_t a, int32_t b) {
    return a < b ? a : b;
}

/* K that neither the output length nor the context forbids. */
static int32_t n_draft_of(const bench * b, const slot * s) {
    const int32_t n_left =
        least(b->options.n_gen - s->n_emitted, b->limits.n_ctx_seq - s->n_past) - 1;
    return n_left > 0 ? least(least(b->options.n_draft, b->limits.n_draft_max), n_left) : 0;
}

static void plan_generation(bench * b, spec_plan * plan, int32_t * budget) {
    for (int32_t i = 0; i < b->limits.n_seq_max; ++i) {
        const slot * s = &b->slots[i];
        if (s->prompt == NULL || s->n_emitted == 0 || *budget < 1) {
            continue;
        }
        const int32_t n_draft = least(n_draft_of(b, s), *budget - 1);
        b->tokens[plan->n_tokens] = s->last;
        b->entries[plan->n_entries++] =
            (spec_plan_entry){i, s->n_past, plan->n_tokens++, 1, n_draft, 1};
        *budget -= 1 + n_draft;
    }
}

static void plan_prompts(bench * b, spec_plan * plan, int32_t * budget) {
    for (int32_t i = 0; i < b->limits.n_seq_max; ++i) {
        const slot * s = &b->slots[i];
        if (s->prompt == NULL || s->n_emitted > 0 || *budget < 1) {
            continue;
        }
        const int32_t n = least(s->prompt->n_tokens - s->n_past, *budget);
        const int32_t is_last = s->n_past + n == s->prompt->n_tokens;
        memcpy(b->tokens + plan->n_tokens, s->prompt->tokens + s->n_past,
               (size_t)n * sizeof(int32_t));
        b->entries[plan->n_entries++] =
            (spec_plan_entry){i, s->n_past, plan->n_tokens, n, 0, is_last};
        plan->n_tokens += n;
        *budget -= n;
        b->totals.n_prompt_tokens += n;
    }
}

static void commit(bench * b, const spec_result * result, const spec_result_entry * e) {
    slot * s = &b->slots[e->seq_id];
    if (e->status != SPEC_OK) {
        die("a sequence failed", spec_status_name(e->status));
    }
    if (s->n_emitted == 0 && e->n_tokens > 0) {
        b->totals.ttft_s[b->totals.n_ttft++] = now_s() - s->t_start;
    }
    s->n_past = e->n_past;
    s->n_emitted += e->n_tokens;
    if (e->n_tokens > 0) {
        s->last = result->tokens[e->token_offset + e->n_tokens - 1];
    }
    b->totals.n_tokens += e->n_tokens;
    b->totals.n_drafted += e->n_drafted;
    b->totals.n_accepted += e->n_accepted;
    const int is_full = s->n_past >= b->limits.n_ctx_seq;
    if (e->n_tokens > 0 &&
        (s->n_emitted >= b->options.n_gen || (e->flags & SPEC_RESULT_EOG) != 0 || is_full)) {
        check(spec_engine_seq_end(b->engine, e->seq_id), "end");
        s->prompt = NULL;
        b->n_done++;
    }
}

static void step(bench * b) {
    for (int32_t i = 0; i < b->limits.n_seq_max && b->n_started < b->options.n_requests; ++i) {
        if (b->slots[i].prompt == NULL) {
            start(b, i);
        }
    }
    spec_plan plan = {.entries = b->entries, .tokens = b->tokens};
    int32_t budget = b->limits.n_batch;
    plan_generation(b, &plan, &budget);
    plan_prompts(b, &plan, &budget);
    spec_result result;
    check(spec_engine_step(b->engine, &plan, &result), "step");
    for (int32_t i = 0; i < result.n_entries; ++i) {
        commit(b, &result, &result.entries[i]);
    }
    totals * t = &b->totals;
    t->n_steps++;
    t->t_draft_us += result.t_draft_us;
    t->t_decode_us += result.t_decode_us;
    t->t_process_us += result.t_process_us;
    t->t_sample_us += result.t_sample_us;
    t->t_total_us += result.t_total_us;
}

static int ascending(const void * a, const void * b) {
    const double x = *(const double *)a;
    const double y = *(const double *)b;
    return (x > y) - (x < y);
}

static void print_totals(const bench * b, double seconds) {
    const totals * t = &b->totals;
    qsort(t->ttft_s, (size_t)t->n_ttft, sizeof(double), ascending);
    const double ttft_p50_s = t->n_ttft > 0 ? t->ttft_s[t->n_ttft / 2] : 0.0;
    printf(
        "{\"draft_type\": \"%s\", \"n_seq\": %d, \"n_draft\": %d, \"n_requests\": %d, \"tokens\": "
        "%lld, "
        "\"prompt_tokens\": %lld, \"seconds\": %.6f, \"tokens_per_s\": %.3f, \"ttft_p50_s\": %.6f, "
        "\"n_drafted\": %lld, \"n_accepted\": %lld, \"acceptance\": %.4f, \"n_steps\": %lld, "
        "\"draft_us\": %lld, \"decode_us\": %lld, \"process_us\": %lld, \"sample_us\": %lld, "
        "\"step_us\": %lld}\n",
        b->options.draft_type, b->options.n_seq, b->options.n_draft, b->n_done,
        (long long)t->n_tokens, (long long)t->n_prompt_tokens, seconds,
        (double)t->n_tokens / seconds, ttft_p50_s, (long long)t->n_drafted,
        (long long)t->n_accepted,
        t->n_drafted > 0 ? (double)t->n_accepted / (double)t->n_drafted : 0.0,
        (long long)t->n_steps, (long long)t->t_draft_us, (long long)t->t_decode_us,
        (long long)t->t_process_us, (long long)t->t_sample_us, (long long)t->t_total_us);
}

static void close_bench(bench * b) {
    spec_engine_free(b->engine);
    spec_model_free(b->draft);
    spec_model_free(b->model);
    for (int32_t i = 0; i < b->n_prompts; ++i) {
        free(b->prompts[i].tokens);
    }
    free(b->prompts);
    free(b->slots);
    free(b->entries);
    free(b->tokens);
    free(b->totals.ttft_s);
}

int main(int argc, char ** argv) {
    bench b = {.options = read_options(argc, argv)};
    spec_set_log(NULL, NULL);
    read_prompts(&b);
    open_engine(&b);
    for (int32_t i = 0; i < b.n_prompts; ++i) {
        if (b.prompts[i].n_tokens >= b.limits.n_ctx_seq) {
            die("a prompt does not fit the context in", b.options.prompts);
        }
    }
    const double t_start = now_s();
    while (b.n_done < b.options.n_requests) {
        step(&b);
    }
    print_totals(&b, now_s() - t_start);
    close_bench(&b);
    return 0;
}
