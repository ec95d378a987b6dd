/* Where a key may be: its home, and how far from it the keys of that home live.
 *
 * Open addressing, linear probing. Each home keeps in `bound` the distance of its farthest key, so a probe ends there,
 * not at an empty slot, and a delete just frees its slot: there are no tombstones, and nothing accumulates.
 *
 * The bound is one word: a counter of moves, and the distance. It is raised after a slot was claimed and before
 * its key can be seen; it is lowered after a delete by whoever has looked at every slot of the home, if no move
 * came in between. A claim that the scan did not see has yet to move the word, and moves it even where the
 * distance stays, so a lowering that missed it fails; one that saw it does not go below it.
 *
 * The counter has a second use: `l0_ticket` before a slow read elsewhere and `l0_insert` with that ticket make "insert,
 * if nobody has inserted or deleted this key since" one step.
 */
#ifndef L0_PROBE_H
#define L0_PROBE_H

#include "l0_layout.h"

#define L0_DISTANCE_BITS 24
#define L0_DISTANCE_MASK ((UINT64_C(1) << L0_DISTANCE_BITS) - 1)

static inline uint64_t l0_home(const l0_table *t, uint64_t hash) {
    return (uint64_t)(((unsigned __int128)hash * t->g.slots) >> 64);
}

static inline uint64_t l0_position(const l0_table *t, uint64_t home, uint64_t distance) {
    uint64_t at = home + distance; /* distance < probe_max <= slots */
    return at < t->g.slots ? at : at - t->g.slots;
}

/* How many slots a probe of this home looks at. Never more than probe_max, whatever is in the file. */
static inline uint64_t l0_reach(const l0_table *t, uint64_t bound_word) {
    uint64_t distance = bound_word & L0_DISTANCE_MASK;
    return distance < t->g.probe_max ? distance + 1 : t->g.probe_max;
}

static inline uint64_t l0_bound_moved(uint64_t word, uint64_t distance) {
    return ((word >> L0_DISTANCE_BITS) + 1) << L0_DISTANCE_BITS | distance;
}

/* Move the word, and raise its distance to at least this. */
static inline void l0_bound_raise(const l0_table *t, uint64_t home, uint64_t distance) {
    l0_meta *m = l0_meta_at(t, home);
    uint64_t word = atomic_load(&m->bound), far;
    do {
        far = word & L0_DISTANCE_MASK;
    } while (!atomic_compare_exchange_weak(&m->bound, &word, l0_bound_moved(word, far > distance ? far : distance)));
}

/* The same, if the word is still the ticket. */
static inline bool l0_bound_raise_from(const l0_table *t, uint64_t home, uint64_t distance, uint64_t ticket) {
    uint64_t far = ticket & L0_DISTANCE_MASK;
    return atomic_compare_exchange_strong(&l0_meta_at(t, home)->bound, &ticket,
                                          l0_bound_moved(ticket, far > distance ? far : distance));
}

#define L0_LOWER_TRIES 4 /* others are working on this home: one of them will lower it */

static inline void l0_bound_lower(const l0_table *t, uint64_t home) {
    l0_meta *m = l0_meta_at(t, home);
    for (int tries = 0; tries < L0_LOWER_TRIES; tries++) {
        uint64_t word = atomic_load(&m->bound);
        uint64_t distance = l0_reach(t, word) - 1;
        for (; distance > 0; distance--) {
            l0_meta *other = l0_meta_at(t, l0_position(t, home, distance));
            if (l0_state(atomic_load(&other->current)) != L0_FREE && l0_home(t, atomic_load(&other->hash)) == home)
                break;
        }
        if (distance == (word & L0_DISTANCE_MASK))
            return;
        if (atomic_compare_exchange_strong(&m->bound, &word, l0_bound_moved(word, distance)))
            return;
    }
}

#endif
