/* Reading: never blocked, never torn.
 *
 * Why a copy that passes is whole. A slot has `versions` + 1 buffers, and each next
 * generation of a key goes into the next one, round and round. A writer that is about to touch the bytes of generation W does, in this order:
 *     writing := W             (relaxed)
 *     fence                    (release)
 *     bytes                    (relaxed words)
 *     current := W, live       (release)
 * and a reader does
 *     current -> G, live       (acquire: all bytes of G are visible)
 *     key and bytes            (relaxed words)
 *     fence                    (acquire)
 *     writing -> W             (relaxed)      and keeps the copy if W - G <= versions.
 * If any word that the reader loaded was stored by a later writer, that writer's release fence and the reader's
 * acquire fence synchronise (C11 7.17.4), so the reader's last load sees that writer's announcement or a later one.
 * The first generation that touches the buffer of G is G + versions + 1, and the check refuses it. A slot that is
 * claimed for another key jumps by at least versions + 1 generations before its key bytes are touched, so the same
 * check covers the comparison of the key: key and value are of one incarnation.
 *
 * On x86-64 the fences cost no instruction; on arm64 they are a DMB each.
 */
#ifndef L0_READ_H
#define L0_READ_H

#include "l0_layout.h"
#include "l0_owner.h"
#include "l0_probe.h"
#include "l0_words.h"

#define L0_READ_TRIES 10000 /* each is lost to `versions` writes of this one key during one copy: then we say so */
#define L0_HIT_SAMPLE_SHIFT 58 /* one read in 64 is counted: counting all would bounce lines between readers */
#define L0_HIT_SAMPLE 64u

typedef struct l0_key {
    const unsigned char *bytes;
    size_t n;
    uint64_t hash;
} l0_key;

static inline l0_key l0_key_of(const l0_table *t, const unsigned char *bytes, size_t n) {
    l0_key key = {bytes, n, l0_hash(bytes, n, t->g.hash_seed)};
    return key;
}

/* A value as it was found: it is what it says for as long as l0_intact holds. */
typedef struct l0_found {
    l0_meta *meta;
    uint64_t slot, generation, tag;
    size_t n;
    const unsigned char *bytes;
} l0_found;

typedef enum l0_result {
    L0_DONE = 0,
    L0_MISS,
    L0_FULL,       /* no slot within reach */
    L0_BUSY,       /* a living writer holds the slot of this key */
    L0_UNSETTLED,  /* lost L0_READ_TRIES times in a row */
    L0_OTHER_SIZE, /* the value is not of the size asked for */
    L0_MOVED,      /* insert: the key is there, or the ticket is old */
} l0_result;

static inline bool l0_intact(const l0_table *t, const l0_meta *m, uint64_t generation) {
    atomic_thread_fence(memory_order_acquire);
#ifdef L0_TEST_NO_VALIDATION
    /* The negative control of the torn-read tests: with this they must find torn reads. Never in a real build. */
    (void)t, (void)m, (void)generation;
    return true;
#else
    return atomic_load_explicit(&m->writing, memory_order_relaxed) - generation <= t->g.versions;
#endif
}

static inline bool l0_slot_has_key(const l0_table *t, const l0_meta *m, uint64_t slot, l0_key key) {
    return atomic_load_explicit(&m->hash, memory_order_relaxed) == key.hash &&
           atomic_load_explicit(&m->key_bytes, memory_order_relaxed) == key.n &&
           l0_equal(l0_key_at(t, slot), key.bytes, key.n);
}

/* Find a key that is not longer than key_bytes_max. L0_DONE or L0_MISS. What it found may be in pieces: use it, then
 * ask l0_intact, and look again if that says no. `n` is within the buffer, whatever the file says. */
static inline l0_result l0_look(const l0_table *t, l0_key key, l0_found *found) {
    uint64_t home = l0_home(t, key.hash);
    uint64_t reach = l0_reach(t, atomic_load_explicit(&l0_meta_at(t, home)->bound, memory_order_acquire));
    for (uint64_t d = 0; d < reach; d++) {
        uint64_t slot = l0_position(t, home, d);
        l0_meta *m = l0_meta_at(t, slot);
        uint64_t current = atomic_load_explicit(&m->current, memory_order_acquire);
        if (l0_state(current) != L0_LIVE || !l0_slot_has_key(t, m, slot, key))
            continue;
        uint64_t buffer = l0_buffer_of(t, current);
        l0_value_head *head = l0_value_head_at(t, slot, buffer);
        uint64_t n = atomic_load_explicit(&head->bytes, memory_order_relaxed);
        found->meta = m;
        found->slot = slot;
        found->generation = l0_generation(current);
        found->tag = atomic_load_explicit(&head->tag, memory_order_relaxed);
        found->n = n < t->g.value_bytes_max ? (size_t)n : t->g.value_bytes_max;
        found->bytes = l0_buffer_at(t, slot, buffer);
        return L0_DONE;
    }
    return L0_MISS;
}

/* As l0_look, and what it found is of one piece at that moment (the length can be trusted, bytes may be viewed). */
static inline l0_result l0_find(const l0_table *t, l0_key key, l0_found *found) {
    for (int tries = 0; tries < L0_READ_TRIES; tries++) {
        if (l0_look(t, key, found) == L0_MISS)
            return L0_MISS;
        if (l0_intact(t, found->meta, found->generation))
            return L0_DONE;
        l0_pause();
    }
    return L0_UNSETTLED;
}

/* Copy the value of `key` if it has exactly n bytes. L0_DONE, L0_MISS, L0_OTHER_SIZE, L0_UNSETTLED. */
static inline l0_result l0_get_exactly(const l0_table *t, l0_key key, unsigned char *to, size_t n, l0_found *found) {
    for (int tries = 0; tries < L0_READ_TRIES; tries++) {
        if (l0_look(t, key, found) == L0_MISS)
            return L0_MISS;
        if (found->n == n)
            l0_copy_out(to, found->bytes, n);
        if (l0_intact(t, found->meta, found->generation))
            return found->n == n ? L0_DONE : L0_OTHER_SIZE;
        l0_pause();
    }
    return L0_UNSETTLED;
}

/* Count one read in L0_HIT_SAMPLE, by a private generator (a fixed stride would fall in step with a loop of reads). */
static inline void l0_count_hit(l0_meta *m, uint64_t *dice) {
    *dice = *dice * UINT64_C(0x5851f42d4c957f2d) + UINT64_C(0x14057b7ef767814f);
    if (*dice >> L0_HIT_SAMPLE_SHIFT == 0)
        atomic_fetch_add_explicit(&m->hits, 1, memory_order_relaxed);
}

#endif
