/*
 * abi_test.c: spec.h as a C program sees it.
 *
 * Every function gets NULLs and absurd values and must answer with a documented code. With a model
 * as the first argument, a small generation runs through spec_engine_step, and wrong plans are
 * refused.
 */
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "spec.h"

static int n_failed = 0;

static void expect(int32_t got, int32_t wanted, const char * call, int line) {
    if (got != wanted) {
        n_failed++;
        fprintf(stderr, "line %d: %s is %d (%s), expected %d (%s): %s\n", line, call, got,
                spec_status_name(got), wanted, spec_status_name(wanted), spec_last_error());
    } else if (wanted < 0 && spec_last_error()[0] == '\0') {
        n_failed++;
        fprintf(stderr, "line %d: %s left no error text\n", line, call);
    }
}

static void expect_true(bool is_true, const char * what, int line) {
    if (!is_true) {
        n_failed++;
        fprintf(stderr, "line %d: not true: %s\n", line, what);
    }
}

#define EXPECT(call, wanted) expect((call), (wanted), #call, __LINE__)
#define INVALID(call) expect((call), SPEC_ERR_INVALID_ARGUMENT, #call, __LINE__)
#define TRUE(what) expect_true((what), #what, __LINE__)

static void test_names(void) {
    TRUE(strcmp(spec_status_name(SPEC_OK), "OK") == 0);
    TRUE(strcmp(spec_status_name(SPEC_ERR_BAD_PLAN), "BAD_PLAN") == 0);
    TRUE(strcmp(spec_status_name(-9999), "UNKNOWN") == 0);
    TRUE(strcmp(spec_status_name(7), "UNKNOWN") == 0);
    TRUE(spec_abi_version() == SPEC_ABI_VERSION);
    TRUE(spec_build_info()[0] != '\0');
    spec_cores cores;
    INVALID(spec_find_cores(NULL, NULL, NULL));
    EXPECT(spec_find_cores("", "no list", &cores), SPEC_OK);
    EXPECT(spec_find_cores(NULL, NULL, &cores), SPEC_OK);
    TRUE(1 <= cores.n_cores && cores.n_cores <= cores.n_physical);
    TRUE(cores.n_physical <= cores.n_logical && cores.quota >= 0.0);
    TRUE(spec_last_error() != NULL);
    spec_set_log(NULL, NULL);
    spec_on_abort("what to do", 1);
    spec_on_abort(NULL, -1);
}

static void test_model_nulls(void) {
    char buf[8];
    size_t n = 0;
    int32_t tokens[4];
    bool is_eog = false;
    spec_model_info info;
    spec_model * model = NULL;
    spec_model_params params = {0};

    INVALID(spec_model_load(NULL, &model));
    INVALID(spec_model_load(&params, NULL));
    INVALID(spec_model_load(&params, &model)); /* no path */
    params.path = "/nonexistent/model.gguf";
    EXPECT(spec_model_load(&params, &model), SPEC_ERR_NOT_FOUND);
    TRUE(model == NULL);
    INVALID(spec_model_get_info(NULL, &info));
    INVALID(spec_model_setting(NULL, "device", buf, sizeof buf, &n));
    INVALID(spec_model_meta(NULL, "general.name", buf, sizeof buf, &n));
    INVALID(spec_model_text(NULL, "arch", buf, sizeof buf, &n));
    INVALID(spec_model_tokenize(NULL, "x", 1, true, true, tokens, 4, &n));
    INVALID(spec_model_tokenize_plain(NULL, "x", 1, NULL, 0, true, tokens, 4, &n));
    INVALID(spec_model_find_control(NULL, "x", 1, NULL, 0, &n));
    INVALID(spec_model_token_bytes(NULL, 0, true, buf, sizeof buf, &n));
    INVALID(spec_model_is_eog(NULL, 0, &is_eog));
    spec_model_free(NULL);
}

static void test_chat(void) {
    char buf[64];
    size_t n = 0;
    size_t n_input = 0;
    spec_span input[1];
    spec_chat * chat = NULL;
    spec_chat_params params = {"{{ bos_token }}{{ messages[0].content }}", "<s>", "</s>", true,
                               true};
    const char * const roles[1] = {"user"};
    const char * const contents[1] = {"x</s>"};
    const char * const names[2] = {"enable_thinking", "bos_token"};
    const char * const values[2] = {"false", "\"<s>\""};

    INVALID(spec_chat_open(NULL, &chat));
    INVALID(spec_chat_open(&params, NULL));
    INVALID(spec_chat_format(NULL, roles, contents, 1, true, buf, sizeof buf, &n));
    spec_chat_free(NULL);
    EXPECT(spec_chat_open(&params, &chat), SPEC_OK);
    EXPECT(spec_chat_format(chat, roles, contents, 1, true, buf, 1, &n), SPEC_ERR_BUFFER_TOO_SMALL);
    EXPECT(spec_chat_format(chat, roles, contents, 1, true, buf, sizeof buf, &n), SPEC_OK);
    TRUE(n == 2 && strcmp(buf, "x") == 0); /* without what the tokenizer adds */
    INVALID(spec_chat_format(chat, NULL, contents, 1, true, buf, sizeof buf, &n));
    INVALID(spec_chat_format(chat, roles, NULL, 1, true, buf, sizeof buf, &n));
    INVALID(spec_chat_format(chat, roles, contents, 0, true, buf, sizeof buf, &n));
    INVALID(spec_chat_format(chat, roles, contents, 1, true, buf, sizeof buf, NULL));
    EXPECT(spec_chat_format_marked(chat, roles, contents, 1, NULL, NULL, 0, true, buf, sizeof buf,
                                   &n, NULL, 0, &n_input),
           SPEC_ERR_BUFFER_TOO_SMALL);
    TRUE(n == 2 && n_input == 1);
    EXPECT(spec_chat_format_marked(chat, roles, contents, 1, names, values, 1, true, buf,
                                   sizeof buf, &n, input, 1, &n_input),
           SPEC_OK);
    TRUE(n_input == 1 && input[0].begin == 0 && input[0].end == 1);
    INVALID(spec_chat_format_marked(chat, roles, contents, 1, names, values, 2, true, buf,
                                    sizeof buf, &n, input, 1, &n_input)); /* the tokenizer's */
    INVALID(spec_chat_format_marked(chat, roles, contents, 1, NULL, values, 1, true, buf,
                                    sizeof buf, &n, input, 1, &n_input));
    INVALID(spec_chat_format_marked(chat, roles, contents, 1, names, NULL, 1, true, buf, sizeof buf,
                                    &n, input, 1, &n_input));
    INVALID(spec_chat_format_marked(chat, roles, contents, 1, NULL, NULL, 0, true, buf, sizeof buf,
                                    &n, input, 1, NULL));
    spec_chat_free(chat);
    params.source = "{% for %}";
    EXPECT(spec_chat_open(&params, &chat), SPEC_ERR_BAD_TEMPLATE);
    params.source = "";
    INVALID(spec_chat_open(&params, &chat));
    params.source = NULL;
    INVALID(spec_chat_open(&params, &chat));
    params.source = "x";
    params.bos = NULL;
    INVALID(spec_chat_open(&params, &chat));
    TRUE(chat == NULL);
}

static void test_engine_nulls(void) {
    spec_sampler * sampler = NULL;
    spec_engine * engine = NULL;
    spec_engine_limits limits;
    spec_engine_params engine_params;
    spec_sampler_params sampler_params;
    spec_plan plan = {0};
    spec_result result;
    spec_draft_request request = {0};
    spec_token token = {0};
    int32_t id = 0;
    int32_t count = 0;
    const float * logits = NULL;

    spec_sampler_default_params(NULL);
    spec_engine_default_params(NULL);
    spec_sampler_default_params(&sampler_params);
    spec_engine_default_params(&engine_params);
    INVALID(spec_sampler_init(NULL, &sampler_params, &sampler));
    INVALID(spec_sampler_init(NULL, NULL, NULL));
    spec_sampler_free(NULL);
    INVALID(spec_engine_init(NULL, NULL, &engine_params, &engine));
    INVALID(spec_engine_init(NULL, NULL, NULL, NULL));
    TRUE(engine == NULL && sampler == NULL);
    spec_engine_free(NULL);
    char * room = spec_room_take(3u << 20);
    TRUE(room != NULL);
    memset(room, 1, 3u << 20);
    spec_room_give(room, 3u << 20);
    spec_room_give(NULL, 3u << 20);
    INVALID(spec_engine_get_limits(NULL, &limits));
    char setting[8];
    size_t n_setting = 0;
    INVALID(spec_engine_setting(NULL, "swa_full", setting, sizeof setting, &n_setting));
    INVALID(spec_engine_seq_begin(NULL, 0, &sampler));
    INVALID(spec_engine_seq_begin(NULL, 0, NULL));
    int32_t n = 0;
    bool has_chosen = false;
    EXPECT(spec_engine_seq_drafts_off(NULL, 0), SPEC_ERR_INVALID_ARGUMENT);
    EXPECT(spec_engine_seq_drafts_on(NULL, 0), SPEC_ERR_INVALID_ARGUMENT);
    INVALID(spec_sampler_get_history(NULL, &n, &has_chosen));
    INVALID(spec_engine_seq_end(NULL, 0));
    INVALID(spec_engine_seq_n_past(NULL, 0));
    INVALID(spec_engine_n_cells_used(NULL));
    INVALID(spec_engine_get_draft_work(NULL, NULL));
    INVALID(spec_engine_step(NULL, &plan, &result));
    INVALID(spec_engine_seq_draft(NULL, &request, 1, &id, &count));
    INVALID(spec_engine_decode(NULL, &token, 1));
    INVALID(spec_engine_process(NULL));
    INVALID(spec_engine_logits(NULL, 0, &logits));
    INVALID(spec_engine_seq_sample(NULL, 0, 0, &id));
    INVALID(spec_engine_seq_accept(NULL, 0, 0));
    INVALID(spec_engine_seq_rollback(NULL, 0, 0));
    INVALID(spec_engine_inject_fault(NULL, 0, 0));
}

static void test_model(const spec_model * model) {
    char buf[64];
    size_t n = 0;
    int32_t tokens[64];
    bool is_eog = false;
    spec_model_info info;

    EXPECT(spec_model_get_info(model, &info), SPEC_OK);
    INVALID(spec_model_get_info(model, NULL));
    INVALID(spec_model_meta(model, NULL, buf, sizeof buf, &n));
    INVALID(spec_model_meta(model, "general.architecture", buf, sizeof buf, NULL));
    EXPECT(spec_model_meta(model, "no.such.key", buf, sizeof buf, &n), SPEC_ERR_NOT_FOUND);
    EXPECT(spec_model_meta(model, "general.architecture", buf, 1, &n), SPEC_ERR_BUFFER_TOO_SMALL);
    EXPECT(spec_model_meta(model, "general.architecture", NULL, 99, &n), SPEC_ERR_BUFFER_TOO_SMALL);
    EXPECT(spec_model_meta(model, "general.architecture", buf, sizeof buf, &n), SPEC_OK);
    TRUE(strlen(buf) + 1 == n);
    INVALID(spec_model_text(model, "no such text", buf, sizeof buf, &n));
    INVALID(spec_model_tokenize(model, NULL, 4, true, true, tokens, 64, &n));
    INVALID(spec_model_tokenize(model, "x", 1, true, true, tokens, 64, NULL));
    INVALID(spec_model_tokenize(model, "x", SIZE_MAX, true, true, tokens, 64, &n));
    EXPECT(spec_model_tokenize(model, "def f():", 8, true, true, NULL, 0, &n),
           SPEC_ERR_BUFFER_TOO_SMALL);
    EXPECT(spec_model_tokenize(model, NULL, 0, false, true, NULL, 0, &n), SPEC_OK);
    TRUE(n == 0);
    INVALID(spec_model_token_bytes(model, -1, true, buf, sizeof buf, &n));
    INVALID(spec_model_token_bytes(model, info.n_vocab, true, buf, sizeof buf, &n));
    INVALID(spec_model_is_eog(model, INT32_MAX, &is_eog));
    INVALID(spec_model_is_eog(model, 0, NULL));
    spec_breaker_stats stats;
    INVALID(spec_model_get_breaker_stats(NULL, &stats));
    INVALID(spec_model_get_breaker_stats(model, NULL));
    EXPECT(spec_model_get_breaker_stats(model, &stats), SPEC_OK);
}

static void test_sampler(const spec_model * model) {
    spec_sampler * sampler = NULL;
    spec_sampler_params p;
    spec_sampler_default_params(&p);
    INVALID(spec_sampler_init(model, NULL, &sampler));
    INVALID(spec_sampler_init(model, &p, NULL));
    p.temperature = NAN;
    INVALID(spec_sampler_init(model, &p, &sampler));
    p.temperature = -1.0f;
    INVALID(spec_sampler_init(model, &p, &sampler));
    spec_sampler_default_params(&p);
    p.top_p = 0.0f;
    INVALID(spec_sampler_init(model, &p, &sampler));
    spec_sampler_default_params(&p);
    p.n_logit_bias = 1;
    INVALID(spec_sampler_init(model, &p, &sampler)); /* no array */
    const spec_logit_bias bias = {-5, 1.0f};
    p.logit_bias = &bias;
    INVALID(spec_sampler_init(model, &p, &sampler));
    p.n_logit_bias = -1;
    INVALID(spec_sampler_init(model, &p, &sampler));
    spec_sampler_default_params(&p);
    p.grammar = "root ::= (";
    EXPECT(spec_sampler_init(model, &p, &sampler), SPEC_ERR_BAD_GRAMMAR);
    p.grammar = "x ::= \"a\"";
    EXPECT(spec_sampler_init(model, &p, &sampler), SPEC_ERR_BAD_GRAMMAR);
    TRUE(sampler == NULL);
}

static void test_engine_params(const spec_model * model) {
    spec_engine * engine = NULL;
    spec_engine_params p;
    INVALID(spec_engine_init(model, NULL, NULL, &engine));
    spec_engine_default_params(&p);
    INVALID(spec_engine_init(model, NULL, &p, NULL));
    p.draft_type = SPEC_DRAFT_COUNT;
    INVALID(spec_engine_init(model, NULL, &p, &engine));
    spec_engine_default_params(&p);
    p.n_seq_max = 0;
    INVALID(spec_engine_init(model, NULL, &p, &engine));
    p.n_seq_max = 257;
    INVALID(spec_engine_init(model, NULL, &p, &engine));
    spec_engine_default_params(&p);
    p.n_batch = 0;
    INVALID(spec_engine_init(model, NULL, &p, &engine));
    spec_engine_default_params(&p);
    p.n_ubatch = p.n_batch + 1;
    INVALID(spec_engine_init(model, NULL, &p, &engine));
    spec_engine_default_params(&p);
    p.p_min = NAN;
    INVALID(spec_engine_init(model, NULL, &p, &engine));
    spec_engine_default_params(&p);
    p.n_ctx_seq = INT32_MIN;
    INVALID(spec_engine_init(model, NULL, &p, &engine));
    spec_engine_default_params(&p);
    p.draft_type = SPEC_DRAFT_SIMPLE; /* and no draft model */
    INVALID(spec_engine_init(model, NULL, &p, &engine));
    TRUE(engine == NULL);
}

static void begin(const spec_model * model, spec_engine * engine, int32_t seq_id, int32_t wanted) {
    spec_sampler * sampler = NULL;
    spec_sampler_params p;
    spec_sampler_default_params(&p);
    p.temperature = 0.0f;
    EXPECT(spec_sampler_init(model, &p, &sampler), SPEC_OK);
    EXPECT(spec_engine_seq_begin(engine, seq_id, &sampler), wanted);
    TRUE(sampler == NULL);
}

static void test_plans(spec_engine * engine) {
    int32_t tokens[4] = {5, 6, 7, 8};
    spec_plan_entry entry = {0, 0, 0, 2, 0, 0};
    spec_plan plan = {.entries = &entry, .n_entries = 1, .tokens = tokens, .n_tokens = 4};
    spec_result result;
    INVALID(spec_engine_step(engine, NULL, &result));
    INVALID(spec_engine_step(engine, &plan, NULL));
    plan.entries = NULL;
    INVALID(spec_engine_step(engine, &plan, &result));
    plan.entries = &entry;
    plan.n_entries = -1;
    TRUE(spec_engine_step(engine, &plan, &result) < 0);
    plan.n_entries = INT32_MAX;
    TRUE(spec_engine_step(engine, &plan, &result) < 0);
    plan.n_entries = 1;
    entry.seq_id = -1;
    EXPECT(spec_engine_step(engine, &plan, &result), SPEC_ERR_BAD_SEQ_ID);
    entry.seq_id = 1;
    EXPECT(spec_engine_step(engine, &plan, &result), SPEC_ERR_SEQ_IDLE);
    entry = (spec_plan_entry){0, 3, 0, 2, 0, 0};
    EXPECT(spec_engine_step(engine, &plan, &result), SPEC_ERR_BAD_PLAN);
    entry = (spec_plan_entry){0, 0, INT32_MAX, INT32_MAX, 0, 0};
    TRUE(spec_engine_step(engine, &plan, &result) < 0);
    entry = (spec_plan_entry){0, 0, 0, 2, 0, 0};
    plan.n_drafts = 1;
    INVALID(spec_engine_step(engine, &plan, &result));
    spec_external_draft draft = {0, 2, 1}; /* of an entry that wants none */
    plan.drafts = &draft;
    EXPECT(spec_engine_step(engine, &plan, &result), SPEC_ERR_BAD_PLAN);
    plan.n_drafts = 0;
    plan.n_steps = 2; /* a prompt piece */
    EXPECT(spec_engine_step(engine, &plan, &result), SPEC_ERR_BAD_PLAN);
    plan.n_steps = INT32_MIN;
    EXPECT(spec_engine_step(engine, &plan, &result), SPEC_ERR_BAD_PLAN);
    plan.n_steps = SPEC_RUN_MAX + 1;
    EXPECT(spec_engine_step(engine, &plan, &result), SPEC_ERR_BAD_PLAN);
    plan.n_steps = 0;
    spec_engine_interrupt(NULL);
    spec_engine_interrupt(engine);
    EXPECT(spec_engine_set_threads(NULL, 1, 1), SPEC_ERR_INVALID_ARGUMENT);
    EXPECT(spec_engine_set_threads(engine, 0, 1), SPEC_ERR_INVALID_ARGUMENT);
    EXPECT(spec_engine_set_threads(engine, 1, 513), SPEC_ERR_INVALID_ARGUMENT);
    EXPECT(spec_engine_set_threads(engine, INT32_MIN, INT32_MAX), SPEC_ERR_INVALID_ARGUMENT);
    EXPECT(spec_engine_set_threads(engine, 1, 1), SPEC_OK);
    tokens[0] = -1;
    TRUE(spec_engine_step(engine, &plan, &result) < 0);
    TRUE(spec_engine_seq_n_past(engine, 0) == 0);
}

static void test_snapshots(spec_engine * engine) {
    static char buf[1 << 20];
    size_t n = 0;
    INVALID(spec_engine_seq_save(NULL, 0, buf, sizeof buf, &n));
    INVALID(spec_engine_seq_save(engine, 0, buf, sizeof buf, NULL));
    EXPECT(spec_engine_seq_save(engine, -1, buf, sizeof buf, &n), SPEC_ERR_BAD_SEQ_ID);
    EXPECT(spec_engine_seq_save(engine, 0, NULL, 0, &n), SPEC_ERR_BUFFER_TOO_SMALL);
    TRUE(n > 0 && n < sizeof buf);
    EXPECT(spec_engine_seq_save(engine, 0, buf, sizeof buf, &n), SPEC_OK);
    static char bare[1 << 20];
    size_t n_bare = 0;
    INVALID(spec_engine_seq_save_prefix(NULL, 0, bare, sizeof bare, &n_bare));
    INVALID(spec_engine_seq_save_prefix(engine, 0, bare, sizeof bare, NULL));
    EXPECT(spec_engine_seq_save_prefix(engine, -1, bare, sizeof bare, &n_bare),
           SPEC_ERR_BAD_SEQ_ID);
    EXPECT(spec_engine_seq_save_prefix(engine, 0, NULL, 0, &n_bare), SPEC_ERR_BUFFER_TOO_SMALL);
    TRUE(n_bare < n);
    EXPECT(spec_engine_seq_save_prefix(engine, 0, bare, sizeof bare, &n_bare), SPEC_OK);
    INVALID(spec_engine_seq_load(NULL, 0, buf, n));
    EXPECT(spec_engine_seq_load(engine, 99, buf, n), SPEC_ERR_BAD_SEQ_ID);
    EXPECT(spec_engine_seq_load(engine, 0, buf, n), SPEC_ERR_SEQ_BUSY);
    EXPECT(spec_engine_seq_end(engine, 0), SPEC_OK);
    INVALID(spec_engine_seq_load(engine, 0, NULL, n));
    EXPECT(spec_engine_seq_load(engine, 0, NULL, 0), SPEC_ERR_SNAPSHOT_TRUNCATED);
    INVALID(spec_engine_seq_load(engine, 0, bare, n_bare));
    EXPECT(spec_engine_seq_load(engine, 0, buf, n - 1), SPEC_ERR_SNAPSHOT_TRUNCATED);
    buf[n / 2] = (char)(buf[n / 2] ^ 1);
    EXPECT(spec_engine_seq_load(engine, 0, buf, n), SPEC_ERR_SNAPSHOT_CORRUPT);
    buf[n / 2] = (char)(buf[n / 2] ^ 1);
    EXPECT(spec_engine_seq_load(engine, 0, buf, n), SPEC_OK);
    int32_t tokens[8];
    int32_t id_last = 0;
    INVALID(spec_engine_seq_tokens(NULL, 0, tokens, 8, &n, &id_last));
    INVALID(spec_engine_seq_tokens(engine, 0, tokens, 8, NULL, &id_last));
    EXPECT(spec_engine_seq_tokens(engine, 0, tokens, 8, &n, NULL), SPEC_OK);
    TRUE(n == (size_t)spec_engine_seq_n_past(engine, 0));
    bool is_cold = true;
    INVALID(spec_engine_seq_is_cold(engine, 0, NULL));
    EXPECT(spec_engine_seq_is_cold(engine, -1, &is_cold), SPEC_ERR_BAD_SEQ_ID);
    EXPECT(spec_engine_seq_is_cold(engine, 0, &is_cold), SPEC_OK);
    TRUE(!is_cold);
}

/* Room for one snapshot; none where `user` is NULL. */
static void * give_room(int32_t i, size_t n, void * user) {
    static char room[1 << 20];
    TRUE(i == 0 && n <= sizeof room);
    return user != NULL ? room : NULL;
}

/* A plan whose moves are wrong is refused whole: nothing of it is done. */
static void test_wrong_moves(spec_engine * engine, spec_start start) {
    const int32_t begun = 0;
    const int32_t idle = 1;
    const int32_t none = 99;
    spec_result result;
    const spec_start no_slot = {.seq_id = 99, .source = -1, .sampler = start.sampler};
    const spec_start twice[] = {start, start};
    const struct {
        spec_plan plan;
        int32_t wanted;
    } wrong[] = {
        {{.saves = &begun, .n_saves = 1}, SPEC_ERR_INVALID_ARGUMENT}, /* no room */
        {{.saves = &idle, .n_saves = 1, .room = give_room}, SPEC_ERR_SEQ_IDLE},
        {{.saves = &none, .n_saves = 1, .room = give_room}, SPEC_ERR_BAD_SEQ_ID},
        {{.swap_outs = NULL, .n_swap_outs = 1}, SPEC_ERR_INVALID_ARGUMENT},
        {{.swap_outs = &idle, .n_swap_outs = 1}, SPEC_ERR_SEQ_IDLE},
        {{.frees = &none, .n_frees = 1}, SPEC_ERR_BAD_SEQ_ID},
        {{.frees = &begun, .n_frees = -1}, SPEC_ERR_BAD_PLAN},
        {{.frees = &begun, .n_frees = 1000}, SPEC_ERR_BAD_PLAN},
        {{.frees = &begun, .n_frees = 1, .drafts_off = &begun, .n_drafts_off = 1},
         SPEC_ERR_SEQ_IDLE},
        {{.drafts_on = &idle, .n_drafts_on = 1}, SPEC_ERR_SEQ_IDLE},
        {{.starts = &no_slot, .n_starts = 1}, SPEC_ERR_BAD_SEQ_ID},
        {{.starts = twice, .n_starts = 2}, SPEC_ERR_BAD_PLAN},
        /* n_kept of what is freed before it */
        {{.frees = &begun, .n_frees = 1, .starts = &start, .n_starts = 1}, SPEC_ERR_BAD_PLAN},
    };
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; ++i) {
        EXPECT(spec_engine_step(engine, &wrong[i].plan, &result), wrong[i].wanted);
        TRUE(spec_engine_seq_n_past(engine, 0) == 4);
    }
}

/* A start that is refused for each of its fields. Its sampler is still the caller's. */
static void test_wrong_starts(spec_engine * engine, const spec_start * right) {
    spec_start start = *right;
    const spec_plan plan = {.starts = &start, .n_starts = 1};
    spec_result result;
    start.n_kept = 5;
    EXPECT(spec_engine_step(engine, &plan, &result), SPEC_ERR_BAD_PLAN);
    start.n_kept = -1;
    EXPECT(spec_engine_step(engine, &plan, &result), SPEC_ERR_BAD_PLAN);
    start = *right;
    start.source = 0;
    EXPECT(spec_engine_step(engine, &plan, &result), SPEC_ERR_BAD_PLAN);
    start.source = 99;
    EXPECT(spec_engine_step(engine, &plan, &result), SPEC_ERR_BAD_SEQ_ID);
    start = *right;
    start.sampler = NULL;
    EXPECT(spec_engine_step(engine, &plan, &result), SPEC_ERR_BAD_PLAN);
    start = *right;
    start.tag = 8; /* another's tokens */
    EXPECT(spec_engine_step(engine, &plan, &result), SPEC_ERR_BAD_PLAN);
    TRUE(spec_engine_seq_n_past(engine, 0) == 4);
}

/* A sequence with tokens is cut, saved, preempted and resumed. */
static void test_starts(const spec_model * model, spec_engine * engine) {
    int32_t tokens[4] = {5, 6, 7, 8};
    const int32_t zero = 0;
    spec_plan_entry entry = {0, 0, 0, 4, 0, 0};
    spec_start start = {.seq_id = 0, .source = -1, .tag = 7};
    spec_plan plan = {.entries = &entry, .n_entries = 1, .tokens = tokens, .n_tokens = 4};
    const spec_plan again = plan;
    spec_result result;
    spec_sampler_params p;
    int32_t n = -1;
    bool has_chosen = true;
    spec_sampler_default_params(&p);
    EXPECT(spec_engine_seq_end(engine, 0), SPEC_OK);
    EXPECT(spec_sampler_init(model, &p, &start.sampler), SPEC_OK);
    plan.starts = &start;
    plan.n_starts = 1;
    EXPECT(spec_engine_step(engine, &plan, &result), SPEC_OK);
    TRUE(result.n_kept[0] == 0 && result.entries[0].n_past == 4);
    EXPECT(spec_sampler_init(model, &p, &start.sampler), SPEC_OK);
    start.n_kept = 2;
    test_wrong_moves(engine, start);
    test_wrong_starts(engine, &start);

    /* saved without room, and with; then damaged bytes keep nothing, and the entry waits */
    plan = (spec_plan){.saves = &zero, .n_saves = 1, .room = give_room};
    EXPECT(spec_engine_step(engine, &plan, &result), SPEC_OK);
    TRUE(result.n_saved[0] == 0);
    plan.room_user = &plan;
    EXPECT(spec_engine_step(engine, &plan, &result), SPEC_OK);
    TRUE(result.n_saved[0] > 4 && spec_engine_seq_n_past(engine, 0) == 4);
    start.snapshot = tokens;
    start.n_snapshot = sizeof tokens;
    entry.n_past = 2;
    entry.n_tokens = 2;
    plan = again;
    plan.starts = &start;
    plan.n_starts = 1;
    EXPECT(spec_engine_step(engine, &plan, &result), SPEC_OK);
    TRUE(result.n_kept[0] == 0 && result.n_entries == 1 && result.entries[0].status == SPEC_OK);
    TRUE(result.entries[0].n_past == 0 && spec_engine_seq_n_past(engine, 0) == 0);
    entry = (spec_plan_entry){0, 0, 0, 4, 0, 0};
    EXPECT(spec_engine_step(engine, &again, &result), SPEC_OK);
    EXPECT(spec_engine_seq_drafts_off(engine, -1), SPEC_ERR_BAD_SEQ_ID);
    EXPECT(spec_engine_seq_drafts_off(engine, 0), SPEC_OK);
    EXPECT(spec_engine_seq_drafts_on(engine, -1), SPEC_ERR_BAD_SEQ_ID);
    EXPECT(spec_engine_seq_drafts_on(engine, 0), SPEC_OK);

    plan = (spec_plan){.swap_outs = &zero, .n_swap_outs = 1};
    EXPECT(spec_engine_step(engine, &plan, &result), SPEC_OK);
    start = (spec_start){.seq_id = 0, .source = -1, .sampler = result.samplers[0], .tag = 7};
    EXPECT(spec_sampler_get_history(start.sampler, &n, &has_chosen), SPEC_OK);
    INVALID(spec_sampler_get_history(start.sampler, NULL, &has_chosen));
    INVALID(spec_sampler_get_history(start.sampler, &n, NULL));
    TRUE(n == 4 && !has_chosen && spec_engine_n_cells_used(engine) == 0);
    plan = again;
    plan.starts = &start;
    plan.n_starts = 1;
    EXPECT(spec_engine_step(engine, &plan, &result), SPEC_ERR_BAD_PLAN); /* not resumed */
    start.is_resumed = true;
    start.tag = 8;
    EXPECT(spec_engine_step(engine, &plan, &result), SPEC_ERR_BAD_PLAN); /* another's sampler */
    start.tag = 7;
    tokens[1] = 9; /* not what it had */
    EXPECT(spec_engine_step(engine, &plan, &result), SPEC_ERR_BAD_PLAN);
    tokens[1] = 6;
    EXPECT(spec_engine_step(engine, &plan, &result), SPEC_OK);
    TRUE(spec_engine_seq_n_past(engine, 0) == 4);
    EXPECT(spec_engine_seq_end(engine, 0), SPEC_OK);
}

static void test_by_hand(spec_engine * engine) {
    int32_t id = 0;
    int32_t count = 0;
    const float * logits = NULL;
    spec_token token = {0, 5, 3, 1};
    spec_draft_request request = {99, 0, 0, 1};
    EXPECT(spec_engine_process(engine), SPEC_ERR_BAD_PLAN);
    EXPECT(spec_engine_logits(engine, 0, &logits), SPEC_ERR_BAD_PLAN);
    INVALID(spec_engine_decode(engine, NULL, 1));
    INVALID(spec_engine_decode(engine, &token, 0));
    INVALID(spec_engine_decode(engine, &token, INT32_MIN));
    EXPECT(spec_engine_decode(engine, &token, 1), SPEC_ERR_BAD_PLAN); /* not at n_past */
    TRUE(spec_engine_seq_draft(engine, &request, 1, &id, &count) < 0);
    INVALID(spec_engine_seq_draft(engine, NULL, 1, &id, &count));
    EXPECT(spec_engine_seq_accept(engine, 0, 0), SPEC_ERR_BAD_PLAN);
    EXPECT(spec_engine_seq_accept(engine, -1, 0), SPEC_ERR_BAD_SEQ_ID);
    EXPECT(spec_engine_seq_rollback(engine, 0, 7), SPEC_ERR_BAD_PLAN);
    EXPECT(spec_engine_seq_end(engine, 99), SPEC_ERR_BAD_SEQ_ID);
    EXPECT(spec_engine_seq_n_past(engine, -1), SPEC_ERR_BAD_SEQ_ID);
    test_snapshots(engine);
    INVALID(spec_engine_inject_fault(engine, 99, 1));
    INVALID(spec_engine_inject_fault(engine, 0, -1));
}

static void test_generation(spec_engine * engine, const int32_t * prompt, int32_t n_prompt) {
    spec_plan_entry entry = {0, 0, 0, n_prompt, 0, 1};
    spec_plan plan = {.entries = &entry, .n_entries = 1, .tokens = prompt, .n_tokens = n_prompt};
    spec_result result;
    int32_t last = -1;
    for (int i = 0; i < 16; ++i) {
        EXPECT(spec_engine_step(engine, &plan, &result), SPEC_OK);
        TRUE(result.n_entries == 1 && result.entries[0].status == SPEC_OK && result.n_tokens == 1);
        if (n_failed > 0) {
            return;
        }
        last = result.tokens[0];
        entry = (spec_plan_entry){0, result.entries[0].n_past, 0, 1, 0, 1};
        plan = (spec_plan){.entries = &entry, .n_entries = 1, .tokens = &last, .n_tokens = 1};
    }
    TRUE(spec_engine_seq_n_past(engine, 0) == n_prompt + 15);
    EXPECT(spec_engine_seq_end(engine, 0), SPEC_OK);
    EXPECT(spec_engine_seq_end(engine, 0), SPEC_OK);
    TRUE(spec_engine_n_cells_used(engine) == 0);
}

static void test_engine(const spec_model * model) {
    spec_engine * engine = NULL;
    spec_engine_params p;
    int32_t prompt[64];
    size_t n = 0;
    spec_engine_default_params(&p);
    p.n_ctx_seq = 128;
    p.n_seq_max = 2;
    EXPECT(spec_engine_init(model, NULL, &p, &engine), SPEC_OK);
    EXPECT(spec_model_tokenize(model, "def parse(", 10, true, false, prompt, 64, &n), SPEC_OK);
    if (n_failed > 0) {
        return;
    }
    begin(model, engine, 2, SPEC_ERR_BAD_SEQ_ID);
    begin(model, engine, 0, SPEC_OK);
    begin(model, engine, 0, SPEC_ERR_SEQ_BUSY);
    test_plans(engine);
    test_by_hand(engine);
    test_generation(engine, prompt, (int32_t)n);
    test_starts(model, engine);
    spec_engine_free(engine);
}

/* Drafts of the caller's own that are refused: the sequence stays as it was. */
static void test_external_drafts(spec_engine * engine, const int32_t * tokens, int32_t n_past) {
    static const struct {
        spec_external_draft draft;
        int32_t n; /* how often it stands in the plan */
    } WRONG[] = {
        {{-1, 1, 1}, 1}, {{2, 1, 1}, 1},  {{INT32_MAX, 1, 1}, 1}, {{1, 1, 1}, 1}, /* idle */
        {{0, 1, 0}, 1},  {{0, 1, -1}, 1}, {{0, 1, 3}, 1},         {{0, 1, INT32_MAX}, 1},
        {{0, -1, 1}, 1}, {{0, 4, 1}, 1},  {{0, INT32_MAX, 1}, 1}, {{0, INT32_MIN, 2}, 1},
        {{0, 3, 1}, 1}, /* no token of the vocabulary */
        {{0, 1, 1}, 2},  {{0, 1, 1}, -1}, {{0, 1, 1}, INT32_MAX},
    };
    spec_plan_entry entry = {0, n_past, 0, 1, 2, 1};
    spec_plan plan = {.entries = &entry, .n_entries = 1, .tokens = tokens, .n_tokens = 4};
    spec_result result;
    for (size_t i = 0; i < sizeof WRONG / sizeof WRONG[0]; ++i) {
        const spec_external_draft drafts[2] = {WRONG[i].draft, WRONG[i].draft};
        plan.drafts = drafts;
        plan.n_drafts = WRONG[i].n;
        TRUE(spec_engine_step(engine, &plan, &result) < 0);
        TRUE(spec_engine_seq_n_past(engine, 0) == n_past);
    }
    const spec_external_draft draft = {0, 1, 1};
    plan.drafts = &draft;
    plan.n_drafts = 1;
    entry.n_draft = 0; /* it wants none */
    EXPECT(spec_engine_step(engine, &plan, &result), SPEC_ERR_BAD_PLAN);
    entry = (spec_plan_entry){1, 0, 1, 2, 1, 1}; /* its prompt is not done */
    EXPECT(spec_engine_step(engine, &plan, &result), SPEC_ERR_SEQ_IDLE);
    entry = (spec_plan_entry){0, n_past, 0, 1, 2, 1};
    EXPECT(spec_engine_step(engine, &plan, &result), SPEC_OK);
    TRUE(result.n_entries == 1 && result.entries[0].status == SPEC_OK);
}

/* A drafter is given up, and fed again in the right place only. */
static void test_taking_up(spec_engine * engine) {
    const spec_token token = {0, spec_engine_seq_n_past(engine, 0), 5, 1};
    bool is_cold = false;
    EXPECT(spec_engine_seq_drafts_on(engine, 2), SPEC_ERR_BAD_SEQ_ID);
    EXPECT(spec_engine_seq_drafts_on(engine, 1), SPEC_ERR_SEQ_IDLE);
    EXPECT(spec_engine_seq_drafts_off(engine, 1), SPEC_ERR_SEQ_IDLE);
    EXPECT(spec_engine_seq_drafts_on(engine, 0), SPEC_OK); /* never turned off */
    EXPECT(spec_engine_decode(engine, &token, 1), SPEC_OK);
    EXPECT(spec_engine_seq_drafts_off(engine, 0), SPEC_OK);
    EXPECT(spec_engine_seq_drafts_on(engine, 0), SPEC_ERR_BAD_PLAN); /* not processed */
    EXPECT(spec_engine_process(engine), SPEC_OK);
    EXPECT(spec_engine_seq_drafts_on(engine, 0), SPEC_OK);
    EXPECT(spec_engine_seq_drafts_on(engine, 0), SPEC_OK);
    EXPECT(spec_engine_seq_is_cold(engine, 0, &is_cold), SPEC_OK);
    TRUE(is_cold);
}

static void test_drafting(const spec_model * model) {
    spec_engine * engine = NULL;
    spec_engine_params p;
    const int32_t prompt[4] = {5, 6, 7, 8};
    const spec_plan_entry entry = {0, 0, 0, 4, 0, 1};
    const spec_plan plan = {.entries = &entry, .n_entries = 1, .tokens = prompt, .n_tokens = 4};
    spec_result result;
    spec_engine_default_params(&p);
    p.draft_type = SPEC_DRAFT_MTP;
    p.n_ctx_seq = 64;
    p.n_seq_max = 2;
    EXPECT(spec_engine_init(model, NULL, &p, &engine), SPEC_OK);
    if (engine == NULL) {
        return;
    }
    begin(model, engine, 0, SPEC_OK);
    EXPECT(spec_engine_step(engine, &plan, &result), SPEC_OK);
    if (n_failed == 0) {
        const int32_t tokens[4] = {result.tokens[0], 6, 7, INT32_MAX};
        test_external_drafts(engine, tokens, 4);
        test_taking_up(engine);
    }
    spec_engine_free(engine);
}

static void test_extras_nulls(void) {
    spec_embedder * embedder = NULL;
    spec_embedder_limits limits;
    spec_embedder_params params;
    spec_sampler * sampler = NULL;
    const int32_t id = 0;
    const int32_t length = 1;
    bool is_accepted = false;
    float row = 0.0f;

    spec_embedder_default_params(NULL);
    spec_embedder_default_params(&params);
    INVALID(spec_embedder_init(NULL, &params, &embedder));
    INVALID(spec_embedder_init(NULL, NULL, NULL));
    TRUE(embedder == NULL);
    spec_embedder_free(NULL);
    INVALID(spec_embedder_get_limits(NULL, &limits));
    INVALID(spec_embedder_encode(NULL, &id, 1, &length, 1, &row, 1));
    INVALID(spec_engine_fork(NULL, 0, 1, &id, &sampler, 1));
    INVALID(spec_grammar_check(NULL));
    EXPECT(spec_grammar_check("root ::= x"), SPEC_ERR_BAD_GRAMMAR);
    EXPECT(spec_grammar_check("root ::= \"a\" | root \"b\""), SPEC_ERR_BAD_GRAMMAR);
    EXPECT(spec_grammar_check("root ::= \"a\"{3000}"), SPEC_ERR_BAD_GRAMMAR);
    EXPECT(spec_grammar_check("root ::= \"a\"+"), SPEC_OK);
    INVALID(spec_grammar_accepts("root ::= \"a\"", NULL, 1, &is_accepted));
    INVALID(spec_grammar_accepts("root ::= \"a\"", "a", 1, NULL));
    EXPECT(spec_grammar_accepts("root ::= \"a\"", "a", 1, &is_accepted), SPEC_OK);
    TRUE(is_accepted);
    EXPECT(spec_grammar_accepts("root ::= \"a\"", "ab", 2, &is_accepted), SPEC_OK);
    TRUE(!is_accepted);
}

static void test_embedder(const spec_model * model) {
    spec_embedder * embedder = NULL;
    spec_embedder_limits limits;
    spec_embedder_params p;
    const int32_t tokens[5] = {5, 6, 7, 8, 9};
    const int32_t lengths[2] = {2, 3};
    const int32_t wrong[2] = {2, 2};
    float rows[4096];
    spec_embedder_default_params(&p);
    p.pooling = SPEC_POOLING_COUNT;
    INVALID(spec_embedder_init(model, &p, &embedder));
    p.pooling = SPEC_POOLING_RANK;
    EXPECT(spec_embedder_init(model, &p, &embedder), SPEC_ERR_UNSUPPORTED);
    p.pooling = SPEC_POOLING_MEAN;
    p.n_batch = 256;
    EXPECT(spec_embedder_init(model, &p, &embedder), SPEC_OK);
    EXPECT(spec_embedder_get_limits(embedder, &limits), SPEC_OK);
    TRUE(limits.n_embd * 2 <= 4096);
    INVALID(spec_embedder_encode(embedder, tokens, 5, wrong, 2, rows, 4096));
    EXPECT(spec_embedder_encode(embedder, tokens, 5, lengths, 2, rows, 1),
           SPEC_ERR_BUFFER_TOO_SMALL);
    EXPECT(spec_embedder_encode(embedder, tokens, 5, lengths, 2, rows, 4096), SPEC_OK);
    spec_embedder_free(embedder);
}

/* Decoders. */

static void test_decoder_nulls(void) {
    spec_decoder * decoder = NULL;
    spec_decoder_params params;
    spec_decoder_limits limits;
    const int32_t token = 1;
    float row[4];

    spec_decoder_default_params(NULL);
    spec_decoder_default_params(&params);
    INVALID(spec_decoder_init(NULL, &params, &decoder));
    TRUE(decoder == NULL);
    INVALID(spec_decoder_get_limits(NULL, &limits));
    INVALID(spec_decoder_seq_n_past(NULL, 0));
    INVALID(spec_decoder_decode(NULL, 0, &token, 1, true));
    INVALID(spec_decoder_seq_rollback(NULL, 0, 0));
    INVALID(spec_decoder_tree(NULL, 0, &token, &token, 1));
    INVALID(spec_decoder_tree_commit(NULL, 0, &token, 1));
    INVALID(spec_decoder_read(NULL, SPEC_ROWS_LOGITS, row, 4));
    INVALID(spec_decoder_set_layer(NULL, 0, true));
    INVALID(spec_decoder_init_eagle3(NULL, NULL, &params, &decoder));
    INVALID(spec_decoder_encode(NULL, row, 4));
    INVALID(spec_decoder_set_states(NULL, row, 1));
    INVALID(spec_model_embed(NULL, &token, 1, row));
    INVALID(spec_model_lm_head(NULL, row, 1, row));
    spec_decoder_free(NULL);
}

static void test_decoder_params(const spec_model * model) {
    static const struct {
        size_t offset;
        int32_t value;
    } WRONG[] = {
        {offsetof(spec_decoder_params, n_seq_max), 0},
        {offsetof(spec_decoder_params, n_seq_max), 257},
        {offsetof(spec_decoder_params, n_branch_max), -1},
        {offsetof(spec_decoder_params, n_branch_max), 256},
        {offsetof(spec_decoder_params, n_outputs_max), 0},
        {offsetof(spec_decoder_params, n_outputs_max), 513},
        {offsetof(spec_decoder_params, n_ctx_seq), INT32_MAX},
        {offsetof(spec_decoder_params, n_batch), 0},
        {offsetof(spec_decoder_params, n_ubatch), 4096},
        {offsetof(spec_decoder_params, n_rs_seq), 65},
        {offsetof(spec_decoder_params, n_threads), -1},
    };
    for (size_t i = 0; i < sizeof WRONG / sizeof WRONG[0]; ++i) {
        spec_decoder * decoder = NULL;
        spec_decoder_params params;
        spec_decoder_default_params(&params);
        memcpy((char *)&params + WRONG[i].offset, &WRONG[i].value, sizeof(int32_t));
        INVALID(spec_decoder_init(model, &params, &decoder));
        TRUE(decoder == NULL);
    }
}

static void test_decoder_tree(spec_decoder * decoder) {
    const int32_t tokens[4] = {3, 4, 5, 6};
    const int32_t parents[4] = {-1, 0, 0, 2};
    const int32_t forward[1] = {0};
    const int32_t path[2] = {0, 2};
    const int32_t gap[2] = {0, 3};

    INVALID(spec_decoder_tree(decoder, 0, tokens, forward, 1)); /* its own parent */
    INVALID(spec_decoder_tree(decoder, 0, tokens, parents, 65));
    INVALID(spec_decoder_tree(decoder, 0, NULL, parents, 4));
    EXPECT(spec_decoder_tree(decoder, 2, tokens, parents, 4), SPEC_ERR_BAD_SEQ_ID);
    EXPECT(spec_decoder_tree_commit(decoder, 0, path, 2), SPEC_ERR_BAD_PLAN);
    EXPECT(spec_decoder_tree(decoder, 0, tokens, parents, 4), SPEC_OK);
    EXPECT(spec_decoder_tree(decoder, 1, tokens, parents, 4), SPEC_ERR_BAD_PLAN);
    EXPECT(spec_decoder_decode(decoder, 0, tokens, 1, true), SPEC_ERR_BAD_PLAN);
    EXPECT(spec_decoder_seq_rollback(decoder, 0, 0), SPEC_ERR_BAD_PLAN);
    INVALID(spec_decoder_tree_commit(decoder, 0, gap, 2));
    INVALID(spec_decoder_tree_commit(decoder, 0, NULL, 2));
    INVALID(spec_decoder_tree_commit(decoder, 0, path, 5));
    EXPECT(spec_decoder_seq_n_past(decoder, 0), 2);
    EXPECT(spec_decoder_tree_commit(decoder, 0, path, 2), SPEC_OK);
    EXPECT(spec_decoder_seq_n_past(decoder, 0), 4);
}

static void test_decoder(const spec_model * model) {
    const int32_t tokens[2] = {1, 2};
    const int32_t wrong[1] = {-1};
    const int32_t root[1] = {-1};
    spec_decoder * decoder = NULL;
    spec_decoder_params params;
    spec_decoder_limits limits;
    float few[4];

    test_decoder_params(model);
    spec_decoder_default_params(&params);
    params.n_seq_max = 2;
    params.n_ctx_seq = 16;
    params.n_threads = 1;
    INVALID(spec_decoder_init(model, NULL, &decoder));
    EXPECT(spec_decoder_init(model, &params, &decoder), SPEC_OK);
    if (decoder == NULL) {
        return;
    }
    EXPECT(spec_decoder_get_limits(decoder, &limits), SPEC_OK);
    EXPECT(spec_decoder_read(decoder, SPEC_ROWS_LOGITS, few, 4), SPEC_ERR_BAD_PLAN);
    EXPECT(spec_decoder_decode(decoder, -1, tokens, 2, true), SPEC_ERR_BAD_SEQ_ID);
    EXPECT(spec_decoder_seq_n_past(decoder, 2), SPEC_ERR_BAD_SEQ_ID);
    INVALID(spec_decoder_decode(decoder, 0, NULL, 2, true));
    INVALID(spec_decoder_decode(decoder, 0, wrong, 1, true));
    INVALID(spec_decoder_decode(decoder, 0, tokens, 0, true));
    EXPECT(spec_decoder_decode(decoder, 0, tokens, 2, true), SPEC_OK);
    INVALID(spec_decoder_read(decoder, SPEC_ROWS_LOGITS, few, 4));
    INVALID(spec_decoder_read(decoder, SPEC_ROWS_LOGITS, NULL, 2 * (size_t)limits.n_vocab));
    INVALID(spec_decoder_read(decoder, -3, few, 4));
    EXPECT(spec_decoder_read(decoder, 0, few, 4), SPEC_ERR_BAD_PLAN); /* layer 0 was not kept */
    INVALID(spec_decoder_set_layer(decoder, limits.n_layer, true));
    INVALID(spec_decoder_seq_rollback(decoder, 0, 3));
    INVALID(spec_model_embed(model, wrong, 1, few));
    INVALID(spec_model_embed(model, tokens, 0, few));
    INVALID(spec_model_lm_head(model, NULL, 1, few));
    if (limits.n_branch_max > 0) {
        test_decoder_tree(decoder);
    } else {
        EXPECT(spec_decoder_tree(decoder, 0, tokens, root, 1), SPEC_ERR_UNSUPPORTED);
    }
    spec_decoder_free(decoder);
}

static void test_machine_nulls(void) {
    spec_device devices[256];
    spec_survey * survey = NULL;
    spec_model_params params = {.path = "/no/such/file.gguf"};
    size_t n = 0;
    TRUE(strstr(spec_build_facts(), "compiler=") != NULL);
    INVALID(spec_list_devices(devices, 256, NULL));
    int32_t version = 0;
    INVALID(spec_add_rpc_server(NULL));
    INVALID(spec_add_rpc_server("nowhere"));
    INVALID(spec_add_rpc_server("127.0.0.1:99999"));
    INVALID(spec_rpc_version(NULL, &version));
    INVALID(spec_set_numa(99, &version));
    EXPECT(spec_set_numa(SPEC_NUMA_OFF, &version), SPEC_OK);
    EXPECT(spec_list_devices(NULL, 0, &n), SPEC_ERR_BUFFER_TOO_SMALL);
    EXPECT(spec_list_devices(devices, 256, &n), SPEC_OK);
    TRUE(n >= 1);
    INVALID(spec_survey_open(NULL, NULL, &survey));
    INVALID(spec_survey_open(&params, NULL, NULL));
    EXPECT(spec_survey_open(&params, NULL, &survey), SPEC_ERR_NOT_FOUND);
    TRUE(survey == NULL && spec_survey_model(NULL, false) == NULL);
    params.vocab_only = true;
    INVALID(spec_survey_open(&params, NULL, &survey));
    INVALID(spec_survey_measure(NULL, NULL, NULL, 0, &n));
    INVALID(spec_survey_fit(NULL, NULL, false, 1, 0, NULL));
    spec_survey_free(NULL);
}

static void test_survey(const char * path) {
    const spec_model_params params = {.path = path, .n_gpu_layers = -1, .use_mmap = true};
    spec_model_params placed = params;
    spec_survey * survey = NULL;
    spec_engine_params wanted;
    spec_memory_use uses[256];
    spec_fit fit;
    spec_model * model = NULL;
    size_t n = 0;
    EXPECT(spec_survey_open(&params, NULL, &survey), SPEC_OK);
    if (survey == NULL) {
        return;
    }
    TRUE(spec_survey_model(survey, false) != NULL && spec_survey_model(survey, true) == NULL);
    spec_engine_default_params(&wanted);
    wanted.draft_type = SPEC_DRAFT_NONE;
    wanted.n_ctx_seq = 512;
    EXPECT(spec_survey_measure(survey, &wanted, NULL, 0, &n), SPEC_ERR_BUFFER_TOO_SMALL);
    EXPECT(spec_survey_measure(survey, &wanted, uses, 256, &n), SPEC_OK);
    TRUE(n >= 1 && uses[0].device == -1 && uses[0].weights_bytes > 0 && uses[0].cells_bytes > 0);
    INVALID(spec_survey_measure(survey, NULL, uses, 256, &n));
    INVALID(spec_survey_fit(survey, &wanted, false, 0, 0, &fit));
    INVALID(spec_survey_fit(survey, &wanted, false, 256, -1, &fit));
    placed.placed_by = survey;
    INVALID(spec_model_load(&placed, &model)); /* nothing was found yet */
    EXPECT(spec_survey_fit(survey, &wanted, false, 256, 0, &fit), SPEC_OK);
    TRUE(fit.has_fit && fit.n_ctx > 0);
    EXPECT(spec_model_load(&placed, &model), SPEC_OK);
    spec_model_free(model);
    spec_survey_free(survey);
}

static void test_with_model(const char * path) {
    const spec_model_params params = {.path = path, .n_gpu_layers = -1, .use_mmap = true};
    spec_model * model = NULL;
    EXPECT(spec_model_load(&params, &model), SPEC_OK);
    if (model == NULL) {
        return;
    }
    test_model(model);
    test_sampler(model);
    test_engine_params(model);
    test_engine(model);
    test_drafting(model);
    test_embedder(model);
    test_decoder(model);
    test_survey(path);
    spec_model_free(model);
}

int main(int argc, char ** argv) {
    test_names();
    test_model_nulls();
    test_chat();
    test_engine_nulls();
    test_extras_nulls();
    test_decoder_nulls();
    test_machine_nulls();
    if (argc > 1) {
        test_with_model(argv[1]);
    }
    if (n_failed == 0) {
        puts("ok");
    }
    return n_failed == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
