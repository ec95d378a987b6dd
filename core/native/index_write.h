/* Changing the index: the server's loop thread only, one process at a time (the owner of the pool).
 *
 * index_find.h explains the order of stores. The writer only compares what is in an entry and overwrites it: a damaged
 * region can make it lose entries, but never write elsewhere.
 */
#ifndef LMCACHE_CORE_INDEX_WRITE_H
#define LMCACHE_CORE_INDEX_WRITE_H

#include "index.h"

typedef struct {
    index_view view;
    uint64_t ready, gone; /* entries in that state, as far as this writer made or counted them */
    uint64_t tidy_at;     /* walks downwards */
    uint64_t marks_at;    /* walks upwards */
} index_writer;

typedef struct {
    index_key key;
    uint64_t offset, layout, nbytes, checksum, flags, incarnation;
} index_object;

/* --- one entry -------------------------------------------------------------------------------------------- */

static inline uint64_t index_sequence(const index_writer *w, uint64_t at) {
    return index_load(&w->view.entries[at].sequence);
}

/* From here on nobody uses the entry as it was; its fields may change. */
static inline uint64_t index_begin(index_writer *w, uint64_t at) {
    index_entry *entry = &w->view.entries[at];
    uint64_t sequence = index_load(&entry->sequence), next = ((sequence >> 2) + 1) << 2;
    w->ready -= index_state(sequence) == INDEX_READY && w->ready;
    w->gone -= index_state(sequence) == INDEX_GONE && w->gone;
    index_store(&entry->sequence, next | INDEX_BUSY);
    atomic_thread_fence(memory_order_release);
    return next;
}

static inline void index_end(index_writer *w, uint64_t at, uint64_t next, unsigned state) {
    w->ready += state == INDEX_READY;
    w->gone += state == INDEX_GONE;
    atomic_store_explicit(&w->view.entries[at].sequence, next | state, memory_order_release);
}

/* Make the change visible to everyone, before the caller tells anybody. */
static inline void index_settle(void) { atomic_thread_fence(memory_order_seq_cst); }

static inline void index_make_ready(index_writer *w, uint64_t at, const index_object *object, uint64_t stored_s) {
    index_entry *entry = &w->view.entries[at];
    uint64_t next = index_begin(w, at);
    for (int i = 0; i < 4; i++)
        index_store(&entry->key[i], object->key.word[i]);
    index_store(&entry->space, object->key.space);
    index_store(&entry->offset, object->offset);
    index_store(&entry->layout, object->layout);
    index_store(&entry->nbytes, object->nbytes);
    index_store(&entry->checksum, object->checksum);
    index_store(&entry->flags, object->flags);
    index_store(&entry->incarnation, object->incarnation);
    index_store(&entry->stored_s, stored_s);
    index_store(&entry->seal, index_seal_of(entry));
    index_store(&entry->reason, 0);
    index_store(&entry->gone_s, 0);
    index_end(w, at, next, INDEX_READY);
}

static inline void index_make_gone(index_writer *w, uint64_t at, uint64_t reason, uint64_t gone_s) {
    index_entry *entry = &w->view.entries[at];
    uint64_t next = index_begin(w, at);
    index_store(&entry->reason, reason);
    index_store(&entry->gone_s, gone_s);
    index_end(w, at, next, INDEX_GONE);
}

static inline void index_make_empty(index_writer *w, uint64_t at) {
    index_end(w, at, index_begin(w, at), INDEX_EMPTY);
}

/* --- adding and removing objects -------------------------------------------------------------------------- */

/* True, or false if the key's window is full. An existing entry of the key is reused. */
static inline bool index_publish(index_writer *w, const index_object *object, uint64_t home, uint64_t now_s) {
    const uint64_t none = UINT64_MAX;
    uint64_t place = none;
    bool had = false;
    for (uint64_t d = 0; d < INDEX_WINDOW; d++) {
        uint64_t at = (home + d) & w->view.mask;
        unsigned state = index_state(index_sequence(w, at));
        if (state == INDEX_READY) {
            if (!index_same_key(&w->view.entries[at], &object->key))
                continue;
            if (had) /* a second one: left by a writer that died while it moved the entry */
                index_make_gone(w, at, 0, 0);
            else
                place = at, had = true;
        } else if (place == none) {
            place = at; /* the first free one; the key may still be further on */
        }
        if (state == INDEX_EMPTY)
            break;
    }
    if (place == none)
        return false;
    index_make_ready(w, place, object, now_s);
    atomic_store_explicit(&w->view.marks[place], 0, memory_order_relaxed);
    return true;
}

/* Remove the object in this slot. A newer one of the same key, in another slot, stays. */
static inline bool index_remove(index_writer *w, const index_key *key, uint64_t offset, uint64_t home, uint64_t reason,
                                uint64_t now_s) {
    bool had = false;
    for (uint64_t d = 0; d < INDEX_WINDOW; d++) {
        uint64_t at = (home + d) & w->view.mask;
        unsigned state = index_state(index_sequence(w, at));
        if (state == INDEX_EMPTY)
            break;
        const index_entry *entry = &w->view.entries[at];
        if (state == INDEX_READY && index_same_key(entry, key) && index_load(&entry->offset) == offset) {
            index_make_gone(w, at, had ? 0 : reason, had ? 0 : now_s);
            had = true; /* go on: a writer that died may have left it twice */
        }
    }
    return had;
}

/* This object's bytes were found to match its checksum: nobody needs to verify them again. Its generation stays,
 * because nothing else changes. */
static inline bool index_mark_verified(index_writer *w, const index_object *object, uint64_t home) {
    for (uint64_t d = 0; d < INDEX_WINDOW; d++) {
        index_entry *entry = &w->view.entries[(home + d) & w->view.mask];
        unsigned state = index_state(index_load(&entry->sequence));
        if (state == INDEX_EMPTY)
            return false;
        if (state != INDEX_READY || !index_same_key(entry, &object->key))
            continue;
        if (index_load(&entry->offset) != object->offset || index_load(&entry->checksum) != object->checksum)
            return false; /* overwritten: it stays as it is, and its readers verify it */
        index_store(&entry->flags, object->flags);
        return true;
    }
    return false;
}

/* Remove every entry that names this slot. Looks at all entries: for when the key is no help. */
static inline uint64_t index_remove_slot(index_writer *w, uint64_t offset) {
    uint64_t removed = 0;
    for (uint64_t at = 0; at <= w->view.mask; at++) {
        unsigned state = index_state(index_sequence(w, at));
        if (state == INDEX_READY && index_load(&w->view.entries[at].offset) == offset) {
            index_make_gone(w, at, 0, 0);
            removed++;
        }
    }
    return removed;
}

/* Where a key's entry is: the READY one, else the tombstone that says why it is gone. False: neither. */
static inline bool index_entry_of(const index_writer *w, const index_key *key, uint64_t *place) {
    uint64_t home = index_home(&w->view, key);
    bool tombstone = false;
    for (uint64_t d = 0; d < INDEX_WINDOW; d++) {
        uint64_t at = (home + d) & w->view.mask;
        const index_entry *entry = &w->view.entries[at];
        unsigned state = index_state(index_sequence(w, at));
        if (state == INDEX_EMPTY)
            break;
        if (state == INDEX_BUSY || !index_same_key(entry, key))
            continue;
        if (state == INDEX_READY) {
            *place = at;
            return true;
        }
        if (!tombstone && index_load(&entry->gone_s) != 0) {
            *place = at;
            tombstone = true;
        }
    }
    return tombstone;
}

/* --- tombstones ------------------------------------------------------------------------------------------- */

/* The nearest READY entry behind `hole` that a probe reaches only across it. False: no probe needs the hole. */
static inline bool index_next_across(const index_writer *w, uint64_t hole, uint64_t *looks, uint64_t *from) {
    for (uint64_t d = 1; d < INDEX_WINDOW; d++) {
        uint64_t at = (hole + d) & w->view.mask;
        unsigned state = index_state(index_sequence(w, at));
        *looks += 1;
        if (state == INDEX_EMPTY)
            return false;
        if (state != INDEX_READY)
            continue;
        index_key key = index_key_at(&w->view.entries[at]);
        uint64_t distance = (at - index_home(&w->view, &key)) & w->view.mask;
        /* No probe finds it further than a window from its home: nobody needs to reach it. */
        if (distance >= d && distance < INDEX_WINDOW) {
            *from = at;
            return true;
        }
    }
    return false;
}

/* Copy the entry into the hole, then make its old place the hole. In between it is there twice, both times valid. */
static inline void index_move(index_writer *w, uint64_t from, uint64_t hole) {
    const index_entry *entry = &w->view.entries[from];
    index_object object = {
        .key = index_key_at(entry),
        .offset = index_load(&entry->offset),
        .layout = index_load(&entry->layout),
        .nbytes = index_load(&entry->nbytes),
        .checksum = index_load(&entry->checksum),
        .flags = index_load(&entry->flags),
        .incarnation = index_load(&entry->incarnation),
    };
    index_make_ready(w, hole, &object, index_load(&entry->stored_s));
    uint16_t mark = atomic_load_explicit(&w->view.marks[from], memory_order_relaxed);
    atomic_store_explicit(&w->view.marks[hole], mark, memory_order_relaxed);
    atomic_store_explicit(&w->view.marks[from], 0, memory_order_relaxed);
    index_make_gone(w, from, 0, 0);
}

/* Turn a tombstone (or what a dead writer left) into an EMPTY entry, and move up entries that need it to be found. The
 * hole may move on; after about `looks_max` looks it is left where it is. True: one more entry is EMPTY. */
static inline bool index_close_hole(index_writer *w, uint64_t hole, uint64_t *looks, uint64_t looks_max) {
    uint64_t from;
    while (index_next_across(w, hole, looks, &from)) {
        index_move(w, from, hole);
        hole = from;
        if (*looks >= looks_max)
            return false;
    }
    index_make_empty(w, hole);
    return true;
}

/* Walk on over `entries_max` entries, or fewer if those cost more, and close the holes there. It walks downwards: the
 * holes behind a hole are closed already, so a run of them costs one look each. Returns how many became EMPTY. */
static inline uint64_t index_tidy(index_writer *w, uint64_t entries_max) {
    const uint64_t looks_max = entries_max + 4 * INDEX_WINDOW;
    uint64_t looks = 0, emptied = 0;
    if (entries_max > w->view.mask + 1)
        entries_max = w->view.mask + 1;
    for (uint64_t i = 0; i < entries_max && looks < looks_max; i++) {
        w->tidy_at = (w->tidy_at - 1) & w->view.mask;
        __builtin_prefetch(&w->view.entries[(w->tidy_at - 8) & w->view.mask], 0, 3);
        unsigned state = index_state(index_sequence(w, w->tidy_at));
        looks++;
        if (state == INDEX_GONE || state == INDEX_BUSY)
            emptied += index_close_hole(w, w->tidy_at, &looks, looks_max);
    }
    index_settle();
    return emptied;
}

/* How much to tidy after `removed` removals: nothing below an eighth of tombstones; above it, enough that the walk
 * comes round before another eighth is added. So tombstones never slow probing down for long, even if nobody calls
 * index_tidy. */
static inline uint64_t index_tidy_owed(const index_writer *w, uint64_t removed) {
    return w->gone > (w->view.mask + 1) / 8 ? 16 * removed : 0;
}

/* --- adoption and marks ----------------------------------------------------------------------------------- */

/* Count the entries that an earlier writer left. */
static inline void index_recount(index_writer *w) {
    w->ready = w->gone = 0;
    for (uint64_t at = 0; at <= w->view.mask; at++) {
        unsigned state = index_state(index_sequence(w, at));
        w->ready += state == INDEX_READY;
        w->gone += state == INDEX_GONE;
    }
}

/* The next marked entry among the `*left` in front of the cursor; its mark is cleared. False: there is none. */
static inline bool index_next_mark(index_writer *w, uint64_t *left, uint64_t *place, uint16_t *mark) {
    while (*left) {
        uint64_t at = w->marks_at;
        if (at % 4 == 0 && *left >= 4 &&
            __atomic_load_n((uint64_t *)(void *)&w->view.marks[at], __ATOMIC_RELAXED) == 0) {
            w->marks_at = (at + 4) & w->view.mask;
            *left -= 4;
            continue;
        }
        w->marks_at = (at + 1) & w->view.mask;
        *left -= 1;
        *mark = atomic_load_explicit(&w->view.marks[at], memory_order_relaxed);
        if (*mark == 0)
            continue;
        atomic_store_explicit(&w->view.marks[at], 0, memory_order_relaxed);
        if (index_state(index_sequence(w, at)) == INDEX_READY) {
            *place = at;
            return true;
        }
    }
    return false;
}

#endif
