/* Reading: never blocked, never torn.
 *
 * Why a copy that passes is whole. A version is a slot and a generation; no two versions of a stripe are the same. Its
 * key, lengths, tag and bytes lie in one buffer, which is stamped with it. A writer that puts version V into a buffer,
 * which no slot names at that time, does in this order:
 *     stamp := 0               (relaxed)
 *     fence                    (release)
 *     key, bytes               (relaxed words)
 *     stamp := V               (release)
 *     current := V, buffer     (release)
 * and a reader does
 *     current -> V, buffer     (acquire: all words of V are visible)
 *     key, bytes               (relaxed words)
 *     fence                    (acquire)
 *     stamp -> V ?             (relaxed)      and keeps the copy only then.
 * If any word that the reader loaded was stored by a later writer of that buffer, that writer's release fence and the
 * reader's acquire fence synchronise (C11 7.17.4), so the reader's last load sees that writer's 0 or something later;
 * and nothing later is V. The key is compared in the same buffer, so the same check covers it: that a key is *not* the
 * one looked for is believed only after it, too.
 *
 * On x86-64 the fences cost no instruction; on arm64 they are a DMB each.
 */
#ifndef L0_READ_H
#define L0_READ_H

#include "l0_layout.h"
#include "l0_owner.h"
#include "l0_probe.h"
#include "l0_words.h"

#define L0_READ_TRIES 10000 /* each costs a writer that took the buffer during one copy; after so many, report it */
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

/* A value as found. It is valid as long as l0_intact holds. */
typedef struct l0_found {
    l0_meta *meta;
    l0_buffer_head *head;
    uint64_t slot, stamp, tag;
    size_t n;
    const unsigned char *bytes;
} l0_found;

typedef enum l0_result {
    L0_DONE = 0,
    L0_MISS,
    L0_FULL,       /* no slot in reach */
    L0_BUSY,       /* a living writer holds the slot of this key, or its stripe */
    L0_UNSETTLED,  /* lost L0_READ_TRIES times in a row */
    L0_OTHER_SIZE, /* the value is not of the size asked for */
    L0_OTHER_TYPE, /* or not of the type */
    L0_MOVED,      /* insert: the key is there, or the ticket is old */
} l0_result;

static inline bool l0_intact(const l0_found *found) {
    atomic_thread_fence(memory_order_acquire);
#ifdef L0_TEST_NO_VALIDATION
    /* The negative control of the torn-read tests: with this they must find torn reads. Never in a real build. */
    (void)found;
    return true;
#else
    return atomic_load_explicit(&found->head->stamp, memory_order_relaxed) == found->stamp;
#endif
}

/* What a live slot's word leads to. It may be torn: ask l0_intact after use. `n` is within the buffer, whatever is in
 * the file. */
static inline void l0_open(const l0_table *t, uint64_t slot, uint64_t word, l0_found *found) {
    l0_buffer_head *head = l0_buffer_at(t, slot, l0_buffer_of(t, slot, word));
    uint64_t n = atomic_load_explicit(&head->bytes, memory_order_relaxed) & UINT32_MAX;
    found->meta = l0_meta_at(t, slot);
    found->head = head;
    found->slot = slot;
    found->stamp = l0_stamp(t, slot, l0_generation(word));
    found->tag = atomic_load_explicit(&head->tag, memory_order_relaxed);
    found->n = n < t->g.value_bytes_max ? (size_t)n : t->g.value_bytes_max;
    found->bytes = l0_value_at(t, head);
}

static inline bool l0_has_key(const l0_table *t, l0_buffer_head *head, l0_key key) {
    return atomic_load_explicit(&head->bytes, memory_order_relaxed) >> 32 == key.n &&
           l0_equal(l0_key_at(t, head), key.bytes, key.n);
}

/* Does this key live in the slot? L0_DONE (`found` may be torn), L0_MISS (proven), L0_UNSETTLED. */
static inline l0_result l0_look_at(const l0_table *t, uint64_t slot, l0_key key, l0_found *found) {
    l0_meta *m = l0_meta_at(t, slot);
    for (int tries = 0; tries < L0_READ_TRIES; tries++) {
        uint64_t word = atomic_load_explicit(&m->current, memory_order_acquire);
        if (!l0_there(word) || atomic_load_explicit(&m->hash, memory_order_relaxed) != key.hash)
            return L0_MISS;
        l0_open(t, slot, word, found);
        if (l0_has_key(t, found->head, key))
            return L0_DONE;
        if (l0_intact(found))
            return L0_MISS;
        l0_pause();
    }
    return L0_UNSETTLED;
}

#ifdef L0_TEST_PAUSE /* for the races with moves: a reader stops between two slots */
#define L0_BETWEEN_LOOKS() sched_yield()
#else
#define L0_BETWEEN_LOOKS() ((void)0)
#endif

/* Find a key that is not longer than key_bytes_max. The result may be torn: use it, then ask l0_intact, and look again
 * if that says no. */
static inline l0_result l0_look(const l0_table *t, l0_key key, l0_found *found) {
    uint64_t home = l0_home(t, key.hash);
    const _Atomic uint64_t *bound = &l0_meta_at(t, home)->bound;
    uint64_t word = atomic_load_explicit(bound, memory_order_acquire);
    for (int tries = 0; tries < L0_READ_TRIES; tries++) {
        uint64_t reach = l0_reach(t, word), seen = word;
        for (uint64_t d = 0; d < reach; d++) {
            l0_result result = l0_look_at(t, l0_position(t, home, d), key, found);
            if (result != L0_MISS)
                return result;
            L0_BETWEEN_LOOKS();
        }
        /* A key that moved from a slot ahead of us to one behind us moved the bound before it left the former. */
        atomic_thread_fence(memory_order_acquire);
#ifdef L0_TEST_ONE_LOOK
        return L0_MISS; /* the negative control of the races with moves: with this they must miss a key. Never in a real build. */
#endif
        word = atomic_load_explicit(bound, memory_order_acquire);
        if (word == seen)
            return L0_MISS;
    }
    return L0_UNSETTLED;
}

/* As l0_look, but the result is not torn at that moment (the length can be trusted, bytes may be viewed). */
static inline l0_result l0_find(const l0_table *t, l0_key key, l0_found *found) {
    for (int tries = 0; tries < L0_READ_TRIES; tries++) {
        l0_result result = l0_look(t, key, found);
        if (result != L0_DONE || l0_intact(found))
            return result;
        l0_pause();
    }
    return L0_UNSETTLED;
}

/* May a value with this tag be read as that type? Bytes may be read as anything, and anything as bytes (0). */
static inline bool l0_type_fits(uint64_t stored, uint64_t asked) {
    return stored == 0 || asked == 0 || stored == asked;
}

/* Copy the value of `key` if it has exactly n bytes of this type. L0_DONE, L0_MISS, L0_OTHER_SIZE, L0_OTHER_TYPE,
 * L0_UNSETTLED. It writes only a copy that succeeds, or that is repeated. */
static inline l0_result l0_get_exactly(const l0_table *t, l0_key key, unsigned char *to, size_t n, uint64_t tag,
                                       l0_found *found) {
    for (int tries = 0; tries < L0_READ_TRIES; tries++) {
        l0_result result = l0_look(t, key, found);
        if (result != L0_DONE)
            return result;
        if (found->n != n)
            result = L0_OTHER_SIZE;
        else if (!l0_type_fits(found->tag, tag))
            result = L0_OTHER_TYPE;
        else
            l0_copy_out(to, found->bytes, n);
        if (l0_intact(found))
            return result;
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
