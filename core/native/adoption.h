/* Adoption: a new server takes over a dead server's pool. Its tables and index are untrusted input, like any packet.
 *
 * The former server wrote what is found there, and may have died in the middle of a change. And every worker maps the
 * pool, so anything may be anywhere. Nothing read here is followed before it was checked, and what was checked is kept
 * in our own memory: slabs, layouts, and which slot belongs to which object.
 *
 *     slab     counts if it starts on a unit, ends on one (or with the pool), and overlaps no other
 *     slot     READY: kept if exactly one entry of the index claims it. WRITING, LOADING, QUARANTINED: waits while the
 *              life lock of its row is held, else it is free. DOOMED: waits while any former worker lives
 *     entry    READY counts if it stands where a probe finds it first, its offset is the start of a READY slot, its
 *              layout is in the table with its nbytes, and the slot is of the class of that size. BUSY never counts
 *     space    has one layout: that of its first entry that counts. An entry of another one does not count
 *     slot that two keys claim: neither can be believed, so both are dropped
 *
 * Whatever does not count is repaired on the way, so that the tables say what the new server believes: entries become
 * GONE (their generation moves on, so a reader in the middle of a copy sees it), slots FREE, slab words 0.
 *
 * The server's own steps are ordered so that a death at any moment leaves such an input: a slot is READY in the table
 * before its entry is READY, and an entry leaves READY before its slot becomes anything else.
 */
#ifndef LMCACHE_CORE_ADOPTION_H
#define LMCACHE_CORE_ADOPTION_H

#include <stdlib.h>

#include "index.h"

enum {
    SLOT_FREE = 0,
    SLOT_WRITING = 1,
    SLOT_READY = 2,
    SLOT_DOOMED = 3,
    SLOT_QUARANTINED = 4,
    SLOT_LOADING = 5,
};
enum { ADOPTION_PAGE = 4096, ADOPTION_NO_ROW = 0xFFFF, ADOPTION_LAYOUT_ROW = 128 };

/* What `claim` says about a slot: an entry's number, or one of these. */
enum {
    CLAIM_NONE = 0xFFFFFFFF,     /* free */
    CLAIM_WAITING = 0xFFFFFFFE,  /* waits for a former worker */
    CLAIM_OPEN = 0xFFFFFFFD,     /* READY, and no entry has claimed it yet */
    CLAIM_CONFLICT = 0xFFFFFFFC, /* two keys have claimed it */
    CLAIM_TAKEN = 0xFFFFFFFB,    /* the kernel has its object, or was told that it is lost */
    CLAIM_ENTRIES_MAX = 0xFFFFFFF0,
};

/* Why something was not kept. */
enum {
    DROP_UNFINISHED, /* slots whose writer is dead */
    DROP_UNINDEXED,  /* READY slots that no entry claims */
    DROP_HALF_CHANGED, /* entries that were half changed at the death */
    DROP_MISPLACED,  /* entries that no probe reaches, or whose offset is no slot's */
    DROP_LAYOUT,     /* entries of an unknown layout, not of its size, or not of their namespace's */
    DROP_NOT_READY,  /* entries whose slot is not READY */
    DROP_DUPLICATE,  /* entries of a key that has one nearer to its home, or of a slot that another key claims */
    DROP_UNVERIFIABLE, /* entries without a checksum, when everything must be verified; or perhaps cleared */
    DROP_SLABS,      /* slab words that make no sense */
    DROP_CAUSES,
};

typedef struct {
    uint64_t start, nbytes; /* from the start of the segment */
    uint64_t slot_bytes, slots;
    uint64_t first; /* number of its first slot among all slots of all slabs */
    uint64_t used;  /* slots that are not free */
    uint64_t fresh; /* offset behind the last slot that is not free */
} adopted_slab;

typedef struct {
    uint64_t offset;
    uint32_t state, row;
} adopted_wait;

typedef struct {
    uint64_t fingerprint, nbytes; /* nbytes 0: no such layout */
    uint64_t objects;
} adopted_layout;

/* A namespace, and its one layout. */
typedef struct {
    uint64_t space;
    uint32_t layout;
    uint32_t objects; /* objects that nobody has taken yet */
} adopted_space;

typedef struct {
    index_view view;
    unsigned char *base;
    uint64_t data_bytes, unit_bytes;
    uint64_t layouts_offset, layout_rows, slabs_offset, slab_rows, slots_offset, slot_rows;
    uint64_t worker_rows;
    uint64_t object_bytes_max, slab_bytes_min;
    const unsigned char *living; /* one byte per worker row: 1 if its life lock is held */
    bool distrust;               /* keep only objects with a checksum, and make every reader verify them */
    bool torn;                   /* pages may be from different moments: keep only entries that have their seal */
    uint64_t stored_after;       /* Unix seconds: what was stored up to then may have been cleared */
    unsigned char *master;       /* the new server's own tables, zeroed, or NULL: checked words are copied here */
} adoption_input;

typedef struct {
    adoption_input in;
    adopted_layout *layouts;
    uint32_t *unit_slab; /* slab number + 1 of each unit, 0: none */
    uint64_t units;
    adopted_slab *slabs;
    uint64_t slab_count, slot_count;
    uint32_t *claim;
    uint32_t *stored; /* Unix second in which a slot's object was published */
    adopted_wait *waits;
    uint64_t wait_count, wait_room;
    uint64_t *order; /* slot numbers of the objects, oldest first */
    uint64_t objects, nbytes, cursor, pending;
    uint64_t ready, gone; /* entries of the index */
    uint64_t dropped[DROP_CAUSES];
    adopted_space *spaces; /* in the order in which they were found */
    uint32_t *space_at;    /* hash table of their numbers + 1: a power of two of rows, at most half full */
    uint64_t space_count, space_rows;
    uint32_t *space_of; /* number of each slot's namespace, if an entry claims the slot */
    bool no_memory;
} adoption;

static inline uint64_t adoption_round_up(uint64_t n, uint64_t unit) { return (n + unit - 1) / unit * unit; }

static inline void adoption_free(adoption *a) {
    free(a->layouts);
    free(a->unit_slab);
    free(a->slabs);
    free(a->claim);
    free(a->stored);
    free(a->waits);
    free(a->order);
    free(a->spaces);
    free(a->space_at);
    free(a->space_of);
    memset(a, 0, sizeof *a);
}

/* Tools read these words at any time: load and store them whole. */
static inline uint64_t adoption_word(const adoption *a, uint64_t offset) {
    return index_load((const _Atomic uint64_t *)(const void *)(a->in.base + offset));
}

static inline void adoption_set_word(const adoption *a, uint64_t offset, uint64_t value) {
    _Atomic uint64_t *word = (_Atomic uint64_t *)(void *)(a->in.base + offset);
    if (index_load(word) != value) /* not writing to a page costs no fault */
        index_store(word, value);
    uint64_t *known = a->in.master != NULL ? (uint64_t *)(void *)(a->in.master + offset) : NULL;
    if (known != NULL && *known != value)
        *known = value;
}

/* Take an entry out of the index for good. No reader is told a reason: nobody knows what it was. */
static inline void adoption_reset_entry(adoption *a, uint64_t at) {
    index_entry *entry = &a->in.view.entries[at];
    uint64_t generation = (index_load(&entry->sequence) >> 2) + 1;
    index_store(&entry->sequence, generation << 2 | INDEX_BUSY);
    atomic_thread_fence(memory_order_release);
    index_store(&entry->reason, 0);
    index_store(&entry->gone_s, 0);
    atomic_store_explicit(&entry->sequence, generation << 2 | INDEX_GONE, memory_order_release);
}

/* --- layouts and slabs --------------------------------------------------------------------------------------- */

static inline void adoption_read_layouts(adoption *a) {
    for (uint64_t row = 0; row < a->in.layout_rows; row++) {
        uint64_t at = a->in.layouts_offset + row * ADOPTION_LAYOUT_ROW;
        uint64_t fingerprint = adoption_word(a, at), nbytes = adoption_word(a, at + 8);
        /* Id 0 means "any layout" in a call: no object has it. */
        bool good = row != 0 && adoption_word(a, at + 16) == 1 && nbytes > 0 && nbytes <= a->in.object_bytes_max;
        a->layouts[row].fingerprint = good ? fingerprint : 0;
        a->layouts[row].nbytes = good ? nbytes : 0;
        adoption_set_word(a, at, a->layouts[row].fingerprint);
        adoption_set_word(a, at + 8, a->layouts[row].nbytes);
        adoption_set_word(a, at + 16, good);
    }
}

/* Whether row i of the table is a valid slab; its figures in *slab. */
static inline bool adoption_slab_of(const adoption *a, uint64_t i, uint64_t word, adopted_slab *slab) {
    uint64_t least = a->in.slab_bytes_min, inside = i * least;
    uint64_t slot_bytes = (word & 0xFFFFFFFF) * ADOPTION_PAGE, nbytes = (word >> 32) * least;
    if (slot_bytes == 0 || nbytes == 0 || inside % a->in.unit_bytes != 0 || inside >= a->in.data_bytes)
        return false;
    uint64_t room = a->in.data_bytes - inside;
    if (nbytes > room) { /* only a last slab that was rounded up to whole rows of the table */
        if (nbytes != adoption_round_up(room, least))
            return false;
        nbytes = room;
    }
    if ((nbytes % a->in.unit_bytes != 0 && nbytes != room) || slot_bytes > nbytes ||
        slot_bytes > adoption_round_up(a->in.object_bytes_max, ADOPTION_PAGE))
        return false;
    slab->start = a->in.view.data_offset + inside;
    slab->nbytes = nbytes;
    slab->slot_bytes = slot_bytes;
    slab->slots = nbytes / slot_bytes;
    slab->used = 0;
    slab->fresh = slab->start;
    return true;
}

static inline void adoption_read_slabs(adoption *a) {
    for (uint64_t i = 0; i < a->in.slab_rows; i++) {
        uint64_t at = a->in.slabs_offset + i * 8, word = adoption_word(a, at);
        if (word == 0)
            continue;
        adopted_slab slab;
        bool good = adoption_slab_of(a, i, word, &slab);
        if (good) {
            uint64_t first = (slab.start - a->in.view.data_offset) / a->in.unit_bytes;
            uint64_t units = (slab.nbytes + a->in.unit_bytes - 1) / a->in.unit_bytes;
            for (uint64_t u = first; u < first + units && good; u++)
                good = a->unit_slab[u] == 0;
            if (good) {
                slab.first = a->slot_count;
                a->slot_count += slab.slots;
                a->slabs[a->slab_count++] = slab;
                for (uint64_t u = first; u < first + units; u++)
                    a->unit_slab[u] = (uint32_t)a->slab_count;
                adoption_set_word(a, at, word);
            }
        }
        if (!good) {
            a->dropped[DROP_SLABS] += (word & 0xFFFFFFFF) != 0; /* otherwise it was given back properly */
            adoption_set_word(a, at, 0);
        }
    }
}

/* The slab that contains `offset`, or NULL. */
static inline adopted_slab *adoption_slab_at(const adoption *a, uint64_t offset) {
    if (offset < a->in.view.data_offset || offset - a->in.view.data_offset >= a->in.data_bytes)
        return NULL;
    uint32_t number = a->unit_slab[(offset - a->in.view.data_offset) / a->in.unit_bytes];
    return number ? &a->slabs[number - 1] : NULL;
}

/* The number of the slot that starts at `offset`, and its slab; false if none starts there. */
static inline bool adoption_slot_at(const adoption *a, uint64_t offset, uint64_t *number, adopted_slab **slab) {
    adopted_slab *found = adoption_slab_at(a, offset);
    if (found == NULL || (offset - found->start) % found->slot_bytes != 0)
        return false;
    uint64_t slot = (offset - found->start) / found->slot_bytes;
    if (slot >= found->slots)
        return false;
    *number = found->first + slot;
    *slab = found;
    return true;
}

static inline uint64_t adoption_slot_word_at(const adoption *a, uint64_t offset) {
    return a->in.slots_offset + (offset - a->in.view.data_offset) / ADOPTION_PAGE * 8;
}

/* --- slots --------------------------------------------------------------------------------------------------- */

static inline bool adoption_wait(adoption *a, uint64_t offset, uint32_t state, uint32_t row) {
    if (a->wait_count == a->wait_room) {
        uint64_t room = a->wait_room ? 2 * a->wait_room : 256;
        adopted_wait *more = realloc(a->waits, room * sizeof *more);
        if (more == NULL)
            return false;
        a->waits = more;
        a->wait_room = room;
    }
    a->waits[a->wait_count++] = (adopted_wait){offset, state, row};
    return true;
}

static inline bool adoption_read_slot(adoption *a, uint64_t offset, uint32_t *claim, bool anyone_lives) {
    uint64_t at = adoption_slot_word_at(a, offset), word = adoption_word(a, at);
    uint32_t state = word & 0xFF, row = word >> 8 & 0xFFFF;
    *claim = CLAIM_NONE;
    switch (state) {
    case SLOT_READY:
        *claim = CLAIM_OPEN;
        adoption_set_word(a, at, SLOT_READY | (uint64_t)ADOPTION_NO_ROW << 8);
        return true;
    case SLOT_WRITING:
    case SLOT_LOADING:
    case SLOT_QUARANTINED:
        /* A row that is no worker's is the former server's own lane, which died with it. */
        if (row < a->in.worker_rows && a->in.living[row]) {
            *claim = CLAIM_WAITING;
            adoption_set_word(a, at, SLOT_QUARANTINED | (uint64_t)row << 8);
            return adoption_wait(a, offset, SLOT_QUARANTINED, row);
        }
        a->dropped[DROP_UNFINISHED]++;
        break;
    case SLOT_DOOMED:
        /* The table does not say who reads it. */
        if (anyone_lives) {
            *claim = CLAIM_WAITING;
            adoption_set_word(a, at, SLOT_DOOMED | (uint64_t)ADOPTION_NO_ROW << 8);
            return adoption_wait(a, offset, SLOT_DOOMED, ADOPTION_NO_ROW);
        }
        break;
    default:
        break;
    }
    adoption_set_word(a, at, SLOT_FREE);
    return true;
}

/* All words of the table: those of slots are read, all others become FREE. */
static inline bool adoption_read_slots(adoption *a) {
    bool anyone_lives = false;
    for (uint64_t row = 0; row < a->in.worker_rows; row++)
        anyone_lives |= a->in.living[row] != 0;
    uint64_t offset = a->in.view.data_offset, end = offset + a->in.data_bytes;
    while (offset < end) {
        adopted_slab *slab = adoption_slab_at(a, offset);
        if (slab == NULL) {
            adoption_set_word(a, adoption_slot_word_at(a, offset), SLOT_FREE);
            offset += ADOPTION_PAGE;
            continue;
        }
        for (uint64_t slot = 0; slot < slab->slots; slot++) {
            uint64_t start = slab->start + slot * slab->slot_bytes;
            if (!adoption_read_slot(a, start, &a->claim[slab->first + slot], anyone_lives))
                return false;
            for (uint64_t page = ADOPTION_PAGE; page < slab->slot_bytes; page += ADOPTION_PAGE)
                adoption_set_word(a, adoption_slot_word_at(a, start + page), SLOT_FREE);
        }
        for (uint64_t page = slab->start + slab->slots * slab->slot_bytes; page < slab->start + slab->nbytes;
             page += ADOPTION_PAGE)
            adoption_set_word(a, adoption_slot_word_at(a, page), SLOT_FREE);
        offset = slab->start + slab->nbytes;
    }
    return true;
}

/* --- namespaces ---------------------------------------------------------------------------------------------- */

/* The hash-table row of this namespace, or the free row that it would get. There is one unless the table is full. */
static inline uint32_t *adoption_space_row(const adoption *a, uint64_t space) {
    uint64_t row = index_fold(space ^ UINT64_C(0x9fb21c651e98df25), UINT64_C(0xd6e8feb86659fd93));
    while (a->space_at[row & (a->space_rows - 1)] != 0 &&
           a->spaces[a->space_at[row & (a->space_rows - 1)] - 1].space != space)
        row++;
    return &a->space_at[row & (a->space_rows - 1)];
}

static inline bool adoption_more_spaces(adoption *a) {
    uint64_t rows = a->space_rows ? 2 * a->space_rows : 64;
    adopted_space *spaces = realloc(a->spaces, rows / 2 * sizeof *spaces);
    if (spaces != NULL)
        a->spaces = spaces;
    uint32_t *at = calloc(rows, sizeof *at);
    if (spaces == NULL || at == NULL) {
        free(at);
        return false;
    }
    free(a->space_at);
    a->space_at = at;
    a->space_rows = rows;
    for (uint64_t i = 0; i < a->space_count; i++)
        *adoption_space_row(a, a->spaces[i].space) = (uint32_t)i + 1;
    return true;
}

/* The namespace; a new one gets that layout. NULL: no memory. */
static inline adopted_space *adoption_space(adoption *a, uint64_t space, uint64_t layout) {
    if (a->space_count == a->space_rows / 2 && !adoption_more_spaces(a))
        return NULL;
    uint32_t *row = adoption_space_row(a, space);
    if (*row == 0) {
        a->spaces[a->space_count] = (adopted_space){.space = space, .layout = (uint32_t)layout};
        *row = (uint32_t)++a->space_count;
    }
    return &a->spaces[*row - 1];
}

/* The layout of the namespace's objects that nobody has taken yet; 0 if there are none. */
static inline uint64_t adoption_layout_of(const adoption *a, uint64_t space) {
    uint32_t row = a->space_rows ? *adoption_space_row(a, space) : 0;
    return row != 0 && a->spaces[row - 1].objects != 0 ? a->spaces[row - 1].layout : 0;
}

/* --- entries ------------------------------------------------------------------------------------------------- */

/* Whether a probe for the entry's key reaches it before any other READY entry of that key. -1, or a cause. */
static inline int adoption_reach(const adoption *a, uint64_t at, const index_key *key) {
    const index_view *view = &a->in.view;
    uint64_t home = index_home(view, key), distance = (at - home) & view->mask;
    if (distance >= INDEX_WINDOW)
        return DROP_MISPLACED;
    for (uint64_t d = 0; d < distance; d++) {
        const index_entry *entry = &view->entries[(home + d) & view->mask];
        unsigned state = index_state(index_load(&entry->sequence));
        if (state == INDEX_EMPTY)
            return DROP_MISPLACED;
        if (state == INDEX_READY && index_same_key(entry, key))
            return DROP_DUPLICATE;
    }
    return -1;
}

/* Whether layout, size and slab of an entry agree: -1, the slot's number and the layout, or a cause. */
static inline int adoption_fit(const adoption *a, const index_entry *entry, uint64_t *number, uint64_t *found) {
    adopted_slab *slab;
    uint64_t offset = index_load(&entry->offset), layout = index_load(&entry->layout);
    *found = layout;
    uint64_t nbytes = index_load(&entry->nbytes);
    if (!adoption_slot_at(a, offset, number, &slab))
        return DROP_MISPLACED;
    if (layout >= a->in.layout_rows || nbytes == 0 || a->layouts[layout].nbytes != nbytes ||
        adoption_round_up(nbytes, ADOPTION_PAGE) != slab->slot_bytes)
        return DROP_LAYOUT;
    return -1;
}

static inline void adoption_read_entry(adoption *a, uint64_t at) {
    const index_entry *entry = &a->in.view.entries[at];
    unsigned state = index_state(index_load(&entry->sequence));
    if (state == INDEX_EMPTY)
        return;
    if (state == INDEX_GONE) {
        a->gone++;
        return;
    }
    int cause = DROP_HALF_CHANGED;
    if (state == INDEX_READY) {
        index_key key = index_key_at(entry);
        uint64_t number = 0, layout = 0;
        adopted_space *space = NULL;
        cause = adoption_reach(a, at, &key);
        if (cause < 0)
            cause = adoption_fit(a, entry, &number, &layout);
        uint64_t flags = index_load(&entry->flags);
        if (cause < 0 && a->in.torn && index_load(&entry->seal) != index_seal_of(entry))
            cause = DROP_HALF_CHANGED;
        if (cause < 0 && a->in.stored_after && index_load(&entry->stored_s) <= a->in.stored_after)
            cause = DROP_UNVERIFIABLE;
        if (cause < 0 && a->in.distrust && !(flags & INDEX_CHECKSUM_KNOWN))
            cause = DROP_UNVERIFIABLE;
        if (cause < 0) {
            space = adoption_space(a, key.space, layout);
            a->no_memory |= space == NULL;
            if (space != NULL && space->objects == 0) /* what it had before was not kept */
                space->layout = (uint32_t)layout;
            if (space == NULL || space->layout != layout)
                cause = DROP_LAYOUT;
        }
        if (cause < 0) {
            uint32_t claim = a->claim[number];
            if (claim == CLAIM_OPEN) {
                uint64_t stored = index_load(&entry->stored_s);
                index_store(&a->in.view.entries[at].flags,
                            (flags & INDEX_CHECKSUM_KNOWN) | (a->in.distrust ? INDEX_UNVERIFIED : 0));
                a->claim[number] = (uint32_t)at;
                a->stored[number] = stored > UINT32_MAX ? UINT32_MAX : (uint32_t)stored;
                a->layouts[layout].objects++;
                a->space_of[number] = (uint32_t)(space - a->spaces);
                space->objects++;
                a->ready++;
                return;
            }
            cause = DROP_NOT_READY;
            if (claim < CLAIM_ENTRIES_MAX) { /* two keys, one slot: nobody can tell whose bytes they are */
                adoption_reset_entry(a, claim);
                a->claim[number] = CLAIM_CONFLICT;
                a->spaces[a->space_of[number]].objects--;
                a->ready--;
                a->gone++;
                a->dropped[DROP_DUPLICATE]++;
            }
            if (claim < CLAIM_ENTRIES_MAX || claim == CLAIM_CONFLICT)
                cause = DROP_DUPLICATE;
        }
    }
    a->dropped[cause]++;
    a->gone++;
    adoption_reset_entry(a, at);
}

/* --- the sums, and the order --------------------------------------------------------------------------------- */

static inline void adoption_sum_slab(adoption *a, adopted_slab *slab) {
    for (uint64_t slot = 0; slot < slab->slots; slot++) {
        uint32_t *claim = &a->claim[slab->first + slot];
        uint64_t start = slab->start + slot * slab->slot_bytes;
        if (*claim == CLAIM_OPEN || *claim == CLAIM_CONFLICT) {
            a->dropped[DROP_UNINDEXED] += *claim == CLAIM_OPEN;
            adoption_set_word(a, adoption_slot_word_at(a, start), SLOT_FREE);
            *claim = CLAIM_NONE;
        }
        if (*claim == CLAIM_NONE)
            continue;
        slab->used++;
        slab->fresh = start + slab->slot_bytes;
        if (*claim < CLAIM_ENTRIES_MAX) {
            a->objects++;
            a->nbytes += slab->slot_bytes;
        }
    }
    if (slab->used == 0)
        adoption_set_word(a, a->in.slabs_offset + (slab->start - a->in.view.data_offset) / a->in.slab_bytes_min * 8, 0);
}

/* Slot numbers by the age of their objects: a stable sort, by 11 bits of the seconds at a time. */
static inline bool adoption_sort(adoption *a) {
    enum { BITS = 11, BUCKETS = 1 << BITS };
    typedef struct {
        uint64_t number;
        uint32_t stored;
    } row;
    row *from = malloc((a->objects + 1) * sizeof *from), *to = malloc((a->objects + 1) * sizeof *to);
    a->order = malloc((a->objects + 1) * sizeof *a->order);
    bool good = from != NULL && to != NULL && a->order != NULL;
    if (good) {
        uint64_t n = 0;
        for (uint64_t s = 0; s < a->slab_count; s++)
            for (uint64_t i = a->slabs[s].first; i < a->slabs[s].first + a->slabs[s].slots; i++)
                if (a->claim[i] < CLAIM_ENTRIES_MAX)
                    from[n++] = (row){i, a->stored[i]};
        for (int shift = 0; shift < 33; shift += BITS) {
            uint64_t starts[BUCKETS + 1] = {0};
            for (uint64_t i = 0; i < n; i++)
                starts[(from[i].stored >> shift & (BUCKETS - 1)) + 1]++;
            for (int b = 0; b < BUCKETS; b++)
                starts[b + 1] += starts[b];
            for (uint64_t i = 0; i < n; i++)
                to[starts[from[i].stored >> shift & (BUCKETS - 1)]++] = from[i];
            row *swap = from;
            from = to, to = swap;
        }
        for (uint64_t i = 0; i < n; i++)
            a->order[i] = from[i].number;
        a->pending = n;
    }
    free(from);
    free(to);
    return good;
}

/* A layout id that no object has (or only objects lost to a conflict) may stand for another layout from now on. */
static inline void adoption_forget_layouts(adoption *a) {
    for (uint64_t row = 0; row < a->in.layout_rows; row++) {
        if (a->layouts[row].nbytes == 0 || a->layouts[row].objects != 0)
            continue;
        a->layouts[row].nbytes = 0;
        adoption_set_word(a, a->in.layouts_offset + row * ADOPTION_LAYOUT_ROW + 16, 0);
    }
}

/* Read and repair the whole pool. false: no memory; then the result means nothing. The caller has checked that the
 * regions lie in the segment and are 8-byte aligned, and keeps `in->living` until this returns. */
static inline bool adoption_scan(adoption *a, const adoption_input *in) {
    memset(a, 0, sizeof *a);
    a->in = *in;
    a->units = (in->data_bytes + in->unit_bytes - 1) / in->unit_bytes;
    a->layouts = calloc(in->layout_rows + 1, sizeof *a->layouts);
    a->unit_slab = calloc(a->units + 1, sizeof *a->unit_slab);
    a->slabs = calloc(a->units + 1, sizeof *a->slabs);
    if (a->layouts == NULL || a->unit_slab == NULL || a->slabs == NULL)
        return false;
    adoption_read_layouts(a);
    adoption_read_slabs(a);
    a->claim = malloc((a->slot_count + 1) * sizeof *a->claim);
    a->stored = malloc((a->slot_count + 1) * sizeof *a->stored);
    a->space_of = malloc((a->slot_count + 1) * sizeof *a->space_of);
    if (a->claim == NULL || a->stored == NULL || a->space_of == NULL || !adoption_read_slots(a))
        return false;
    for (uint64_t at = 0; at <= in->view.mask; at++)
        adoption_read_entry(a, at);
    if (a->no_memory)
        return false;
    for (uint64_t s = 0; s < a->slab_count; s++)
        adoption_sum_slab(a, &a->slabs[s]);
    adoption_forget_layouts(a);
    bool sorted = adoption_sort(a);
    free(a->stored);
    a->stored = NULL;
    return sorted;
}

/* --- one object at a time ------------------------------------------------------------------------------------ */

typedef struct {
    uint64_t offset;
    bool lost; /* its entry was changed since the scan: only the offset is valid */
    index_key key;
    uint64_t layout, checksum, incarnation;
    bool has_checksum;
} adopted_object;

/* Take the object of a slot that an entry claims. The entry is checked again: workers map it, too. */
static inline void adoption_take_slot(adoption *a, uint64_t number, uint64_t offset, adopted_object *object) {
    uint32_t at = a->claim[number];
    const index_entry *entry = &a->in.view.entries[at];
    adopted_space *space = &a->spaces[a->space_of[number]];
    uint64_t found;
    a->claim[number] = CLAIM_TAKEN;
    a->pending--;
    space->objects--;
    object->offset = offset;
    object->key = index_key_at(entry);
    object->has_checksum = index_load(&entry->flags) & INDEX_CHECKSUM_KNOWN;
    object->checksum = index_load(&entry->checksum);
    object->incarnation = index_load(&entry->incarnation);
    object->lost = index_state(index_load(&entry->sequence)) != INDEX_READY || index_load(&entry->offset) != offset ||
                   adoption_reach(a, at, &object->key) >= 0 || adoption_fit(a, entry, &found, &object->layout) >= 0 ||
                   found != number || object->key.space != space->space || object->layout != space->layout ||
                   (a->in.distrust && !object->has_checksum);
    /* The entry is removed with its slot, unless it points to another one by now. */
    if (object->lost && index_load(&entry->offset) == offset)
        adoption_reset_entry(a, at);
}

/* The object of a key, if it is here and has not been taken. */
static inline bool adoption_touch(adoption *a, const index_key *key, adopted_object *object) {
    const index_view *view = &a->in.view;
    uint64_t home = index_home(view, key);
    for (uint64_t d = 0; d < INDEX_WINDOW; d++) {
        uint64_t at = (home + d) & view->mask, number;
        const index_entry *entry = &view->entries[at];
        unsigned state = index_state(index_load(&entry->sequence));
        if (state == INDEX_EMPTY)
            return false;
        if (state != INDEX_READY || !index_same_key(entry, key))
            continue;
        adopted_slab *slab;
        uint64_t offset = index_load(&entry->offset);
        if (!adoption_slot_at(a, offset, &number, &slab) || a->claim[number] != at)
            return false;
        adoption_take_slot(a, number, offset, object);
        return true;
    }
    return false;
}

/* The next of the oldest objects that nobody has taken. */
static inline bool adoption_next(adoption *a, adopted_object *object) {
    while (a->cursor < a->objects) {
        uint64_t number = a->order[a->cursor++];
        if (a->claim[number] >= CLAIM_ENTRIES_MAX)
            continue;
        uint64_t low = 0, high = a->slab_count - 1; /* the last slab that begins at or before it */
        while (low < high) {
            uint64_t middle = (low + high + 1) / 2;
            if (a->slabs[middle].first <= number)
                low = middle;
            else
                high = middle - 1;
        }
        const adopted_slab *slab = &a->slabs[low];
        adoption_take_slot(a, number, slab->start + (number - slab->first) * slab->slot_bytes, object);
        return true;
    }
    return false;
}

#endif
