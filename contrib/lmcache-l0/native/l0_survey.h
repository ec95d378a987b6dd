/* Looking at the whole table: one slot for iteration, all of them for the figures. */
#ifndef L0_SURVEY_H
#define L0_SURVEY_H

#include "l0_layout.h"
#include "l0_probe.h"
#include "l0_read.h"
#include "l0_words.h"

typedef struct l0_resident {
    unsigned char key[L0_KEY_BYTES_MAX];
    size_t key_bytes, value_bytes;
    uint64_t hits;
} l0_resident;

/* Read the key of a slot. False: the slot is empty. */
static inline bool l0_resident_at(const l0_table *t, uint64_t slot, l0_resident *r) {
    l0_meta *m = l0_meta_at(t, slot);
    l0_found found;
    for (int tries = 0; tries < L0_READ_TRIES; tries++) {
        uint64_t word = atomic_load_explicit(&m->current, memory_order_acquire);
        if (!l0_there(word))
            return false;
        l0_open(t, slot, word, &found);
        r->key_bytes = atomic_load_explicit(&found.head->bytes, memory_order_relaxed) >> 32;
        if (r->key_bytes > t->g.key_bytes_max)
            r->key_bytes = t->g.key_bytes_max; /* torn, or damaged: refused below, or nobody's key */
        l0_copy_out(r->key, l0_key_at(t, found.head), r->key_bytes);
        r->value_bytes = found.n;
        r->hits = (uint64_t)atomic_load_explicit(&m->hits, memory_order_relaxed) * L0_HIT_SAMPLE;
        if (l0_intact(&found))
            return true;
    }
    return false;
}

#define L0_LENGTHS 256 /* probe lengths are counted one by one up to here, and together beyond */

typedef struct l0_survey {
    uint64_t keys, claimed, locked, key_bytes, value_bytes, hits;
    uint64_t found_probes, found_probes_max, miss_probes, miss_probes_max; /* sums; looked-at slots, at least 1 */
    uint64_t found_lengths[L0_LENGTHS + 1];
} l0_survey;

/* Add the slots [from, to) to the figures. */
static inline void l0_survey_add(const l0_table *t, uint64_t from, uint64_t to, l0_survey *s) {
    for (uint64_t slot = from; slot < to; slot++) {
        l0_meta *m = l0_meta_at(t, slot);
        uint64_t reach = l0_reach(t, atomic_load_explicit(&m->bound, memory_order_relaxed));
        s->miss_probes += reach;
        s->miss_probes_max = reach > s->miss_probes_max ? reach : s->miss_probes_max;
        s->locked += atomic_load_explicit(&m->lock, memory_order_relaxed) != 0;
        uint64_t current = atomic_load_explicit(&m->current, memory_order_acquire);
        s->claimed += l0_state(current) == L0_CLAIMED;
        if (!l0_there(current))
            continue;
        uint64_t home = l0_home(t, atomic_load_explicit(&m->hash, memory_order_relaxed));
        uint64_t length = 1 + (slot >= home ? slot - home : slot + t->g.slots - home);
        l0_found found;
        l0_open(t, slot, current, &found);
        uint64_t key_bytes = atomic_load_explicit(&found.head->bytes, memory_order_relaxed) >> 32;
        s->keys++;
        s->found_probes += length;
        s->found_probes_max = length > s->found_probes_max ? length : s->found_probes_max;
        s->found_lengths[length < L0_LENGTHS ? length : L0_LENGTHS]++;
        s->key_bytes += key_bytes < t->g.key_bytes_max ? key_bytes : t->g.key_bytes_max;
        s->value_bytes += found.n;
        s->hits += (uint64_t)atomic_load_explicit(&m->hits, memory_order_relaxed) * L0_HIT_SAMPLE;
    }
}

/* Halve every count, so that what was hot last week does not stay hot for ever. */
static inline void l0_cool(const l0_table *t, uint64_t from, uint64_t to) {
    for (uint64_t slot = from; slot < to; slot++) {
        l0_meta *m = l0_meta_at(t, slot);
        uint32_t hits = atomic_load_explicit(&m->hits, memory_order_relaxed);
        if (hits)
            atomic_store_explicit(&m->hits, hits / 2, memory_order_relaxed); /* losing a count is harmless */
    }
}

#endif
