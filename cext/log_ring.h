/*
 * log_ring.h: log lines of llama.cpp on their way to Python.
 *
 * llama.cpp logs from any thread, also while the interpreter shuts down; a callback that takes the
 * GIL there can hang or abort. So lines are stored here without Python, and the extension collects
 * them at the end of each of its calls. When the store is full the newest lines are dropped and
 * counted.
 */
#ifndef DRAFTHOUSE_LOG_RING_H
#define DRAFTHOUSE_LOG_RING_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>

enum { LOG_RING_BYTES = 1 << 16 };

static struct {
    pthread_mutex_t lock;
    _Atomic int32_t level; /* records below it are dropped */
    _Atomic size_t n_used; /* bytes of `bytes` in use */
    size_t n_dropped;
    char bytes[LOG_RING_BYTES]; /* records: one byte of level, text, NUL */
} log_ring = {.lock = PTHREAD_MUTEX_INITIALIZER, .level = 3};

static void log_ring_put(int32_t level, const char * text, void * user) {
    (void)user;
    if (text == NULL || level < atomic_load(&log_ring.level)) {
        return;
    }
    const size_t n = strlen(text) + 2;
    pthread_mutex_lock(&log_ring.lock);
    const size_t used = atomic_load(&log_ring.n_used);
    if (n > LOG_RING_BYTES - used) {
        log_ring.n_dropped++;
    } else {
        log_ring.bytes[used] = (char)level;
        memcpy(log_ring.bytes + used + 1, text, n - 1);
        atomic_store(&log_ring.n_used, used + n);
    }
    pthread_mutex_unlock(&log_ring.lock);
}

static int log_ring_is_empty(void) {
    return atomic_load(&log_ring.n_used) == 0;
}

static void log_ring_set_level(int32_t level) {
    atomic_store(&log_ring.level, level);
}

/* Moves all records to `out` ([LOG_RING_BYTES]); returns their bytes. *n_dropped counts the records
 * lost since the last call. */
static size_t log_ring_take(char * out, size_t * n_dropped) {
    pthread_mutex_lock(&log_ring.lock);
    const size_t used = atomic_load(&log_ring.n_used);
    memcpy(out, log_ring.bytes, used);
    atomic_store(&log_ring.n_used, 0);
    *n_dropped = log_ring.n_dropped;
    log_ring.n_dropped = 0;
    pthread_mutex_unlock(&log_ring.lock);
    return used;
}

#endif /* DRAFTHOUSE_LOG_RING_H */
