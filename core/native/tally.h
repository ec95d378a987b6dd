/* What one worker counts for itself: a line of the pool that only it writes, sixteen words in two cache lines.
 *
 * The caller holds the GIL, so one thread at a time adds: a relaxed load and a relaxed store, with no locked
 * instruction. The server reads each word whole, and distrusts values that cannot be true.
 *
 * A clock costs more than a small lookup may: one in TALLY_SAMPLE of those is timed, and counts for all.
 */
#ifndef LMCACHE_CORE_TALLY_H
#define LMCACHE_CORE_TALLY_H

#include <stdatomic.h>
#include <stdint.h>
#include <time.h>

/* In the order of pool/tally.py. */
enum {
    TALLY_LOOKUPS = 0, /* calls that were answered completely */
    TALLY_LOOKUP_HITS, /* keys */
    TALLY_LOOKUP_NS,
    TALLY_READS, /* calls */
    TALLY_READ_HITS,
    TALLY_READ_BYTES,
    TALLY_READ_NS,
    TALLY_PROMPTS, /* from here on Python says how many: `Index.count` */
    TALLY_PROMPT_TOKENS,
    TALLY_INDEX_HIT_TOKENS,
    TALLY_L1_HIT_TOKENS,
    TALLY_TIER_HIT_TOKENS,
    TALLY_LOOKUP_MISSES, /* keys */
    TALLY_DROPPED_STORES, /* objects */
    TALLY_WORDS = 16,
};

enum {
    TALLY_SMALL_KEYS = 64, /* a lookup of fewer keys is small: some 2 µs at most */
    TALLY_SAMPLE = 16,
};

typedef struct {
    _Atomic uint64_t *line; /* NULL: nothing is counted */
    unsigned turn;          /* of small lookups */
} tally;

static inline uint64_t tally_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * UINT64_C(1000000000) + (uint64_t)now.tv_nsec;
}

static inline void tally_add(const tally *t, int word, uint64_t n) {
    uint64_t before = atomic_load_explicit(&t->line[word], memory_order_relaxed);
    atomic_store_explicit(&t->line[word], before + n, memory_order_relaxed);
}

/* The start time of a lookup of `keys`; 0: it is not timed. `weight`: how many lookups it counts for. */
static inline uint64_t tally_begin(tally *t, uint64_t keys, unsigned *weight) {
    *weight = keys < TALLY_SMALL_KEYS ? TALLY_SAMPLE : 1;
    if (!t->line || (keys < TALLY_SMALL_KEYS && t->turn++ % TALLY_SAMPLE != 0))
        return 0;
    return tally_now();
}

#endif
