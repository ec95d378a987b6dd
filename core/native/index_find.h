/* Finding and reading: any process, any thread, no lock, no system call. Never blocked, never torn.
 *
 * Why a copy that passes is whole. A reader does
 *
 *     sequence → s                  (acquire)   refused unless READY
 *     key, offset, layout, nbytes   (relaxed)   checked against what was asked for, and against the segment's bounds
 *     bytes of the slot             (plain)
 *     fence                         (acquire)
 *     sequence → s again            (relaxed)   or everything read so far is thrown away
 *
 * and the writer, before anything of an entry or of the slot behind it may change,
 *
 *     sequence := next generation, BUSY             (relaxed)
 *     fence                                         (release)
 *     fields                                        (relaxed)
 *     sequence := same generation, READY or GONE    (release)
 *
 * 1. Fields. If one word that the reader loaded was stored by a later change than the one that `s` stands for, that
 *    change's release fence and the reader's acquire fence synchronise (C11 7.17.4), so the reader's last load sees
 *    that change's BUSY or something later. Generations only grow (they outlive reuse, tidying, servers and
 *    adoption), so the same number never comes back, and the reader throws away what it has.
 * 2. Bytes. A slot is given to a new owner only after its entry has left READY: the server stores the sequence,
 *    fences (index_settle), and then answers the worker that asked for room. The answer travels through the operating
 *    system (a socket, whose locks release on one side and acquire on the other), so the store of the sequence
 *    happens before the worker's first store to the bytes. A reader that sees one byte of the new owner therefore
 *    sees the moved sequence behind its acquire fence. On x86-64 loads keep their order, and so do stores: the fence
 *    is no instruction. arm64 is multi-copy atomic: what the worker was told, everyone can see by then, and the
 *    reader's DMB keeps its last load behind the copy. A lane that loads from a tier, and the server itself, are the
 *    same case without the socket.
 * 3. The other way round: an object is published after its worker's commit has come in, so its bytes happen before
 *    READY (release), and a reader's first load (acquire) brings them all. Workers that store by streaming
 *    instructions fence them before they commit (copy.h): a release alone does not order those.
 * 4. Copying. memcpy may use string instructions; what x86-64 promises about the order of their loads is vague, and
 *    an LFENCE behind the copy waits for all of them. C11 calls a plain load that races with a store undefined: the
 *    compiler sees a call on memory it knows nothing of and a fence behind it, and builds for the thread sanitizer
 *    copy by relaxed words (copy.h).
 * 5. A writer that dies leaves BUSY behind: no reader takes it, the next writer calls it free. One that dies between
 *    two entries leaves each of them whole. A reader that dies leaves nothing at all.
 *
 * A probe looks at no more than INDEX_WINDOW entries and restarts at most INDEX_TRIES times; then the reader asks the
 * server. While the writer moves an entry nearer to its home, a reader may miss a key that is there: that costs a
 * question to the server, but never gives a wrong byte.
 */
#ifndef LMCACHE_CORE_INDEX_FIND_H
#define LMCACHE_CORE_INDEX_FIND_H

#include "copy.h"
#include "index.h"
#include "team.h"

enum { INDEX_MISS = 0, INDEX_HIT = 1, INDEX_CHANGED = 2, INDEX_DAMAGED = 3 };
enum { INDEX_VERIFY_NEVER = 0, INDEX_VERIFY_FIRST = 1, INDEX_VERIFY_ALWAYS = 2 };
enum {
    INDEX_TRIES = 8,  /* each change of this key costs one; eight during one copy is far from normal */
    INDEX_BLOCK = 64, /* keys whose lines are prefetched together: more misses than a core can have in flight */
    INDEX_FAR_ENTRIES = 1 << 15, /* from this size on (4 MiB), also prefetch the next entries */
};

/* Where a key was found. Valid while the entry's sequence is the same. */
typedef struct {
    uint64_t at; /* the entry's number */
    uint64_t sequence;
    uint64_t offset;
} index_place;

static inline bool index_served(const index_view *view, uint64_t epoch) {
    return epoch != 0 && atomic_load_explicit(view->serving, memory_order_acquire) == epoch;
}

/* Everything loaded before this call is loaded before the sequence is checked again. */
static inline bool index_unchanged(const index_view *view, const index_place *place) {
    atomic_thread_fence(memory_order_acquire);
#ifdef LMCACHE_CORE_INDEX_NO_VALIDATION
    /* The negative control of the torn-read hunt: with this it must find torn reads. Never in a real build. */
    (void)view, (void)place;
    return true;
#else
    return index_load(&view->entries[place->at].sequence) == place->sequence;
#endif
}

/* INDEX_HIT and the place, INDEX_MISS, or INDEX_CHANGED. */
static inline int index_find(const index_view *view, const index_key *key, uint64_t home, uint64_t layout,
                             index_place *place) {
    for (int tries = 0; tries < INDEX_TRIES; tries++) {
        bool changed = false;
        for (uint64_t d = 0; d < INDEX_WINDOW; d++) {
            uint64_t at = (home + d) & view->mask;
            const index_entry *entry = &view->entries[at];
            uint64_t sequence = atomic_load_explicit((_Atomic uint64_t *)(uintptr_t)&entry->sequence, memory_order_acquire);
            if (index_state(sequence) == INDEX_EMPTY)
                return INDEX_MISS;
            if (index_state(sequence) != INDEX_READY || !index_same_key(entry, key))
                continue;
            place->at = at;
            place->sequence = sequence;
            place->offset = index_load(&entry->offset);
            bool fits = index_load(&entry->layout) == layout;
            if (!index_unchanged(view, place)) {
                changed = true;
                break;
            }
            return fits && index_in_data(view, place->offset, 1) ? INDEX_HIT : INDEX_MISS;
        }
        if (!changed)
            return INDEX_MISS;
    }
    return INDEX_CHANGED;
}

/* Mark the entry as used. Written only if it changes the mark: readers of one prompt share these lines. */
static inline void index_mark(const index_view *view, uint64_t at, uint64_t position) {
    uint16_t mark = (uint16_t)(position < INDEX_MARK_MAX ? position + 1 : INDEX_MARK_MAX);
    if (atomic_load_explicit(&view->marks[at], memory_order_relaxed) != mark)
        atomic_store_explicit(&view->marks[at], mark, memory_order_relaxed);
}

/* The keys of one call. `one_by_one`: pointers to 32 bytes each; otherwise they are contiguous. */
typedef struct {
    const unsigned char *const *one_by_one;
    const unsigned char *in_a_row;
    uint64_t n;
    uint64_t space;
    uint64_t layout;
    bool prefix; /* nothing behind the first miss is needed */
} index_batch;

static inline const unsigned char *index_batch_key(const index_batch *batch, uint64_t i) {
    return batch->one_by_one ? batch->one_by_one[i] : batch->in_a_row + i * INDEX_KEY_BYTES;
}

/* A status for each key, and places if they are asked for. Returns how many keys were answered: with `prefix`, the
 * number of hits in front; the status of the key behind them is filled in as well. */
static inline uint64_t index_find_batch(const index_view *view, const index_batch *batch, uint8_t *statuses,
                                        index_place *places) {
    bool far = view->mask >= INDEX_FAR_ENTRIES;
    for (uint64_t first = 0; first < batch->n; first += INDEX_BLOCK) {
        index_key keys[INDEX_BLOCK];
        uint64_t homes[INDEX_BLOCK];
        uint64_t count = batch->n - first < INDEX_BLOCK ? batch->n - first : INDEX_BLOCK;
        for (uint64_t i = 0; i < count; i++) {
            keys[i] = index_key_of(index_batch_key(batch, first + i), batch->space);
            homes[i] = index_home(view, &keys[i]);
            __builtin_prefetch(&view->entries[homes[i]], 0, 3);
        }
        for (uint64_t i = 0; far && i < count; i++) {
            /* One key in three is not at home. If that means two misses, they should not come one after the other. */
            const index_entry *entry = &view->entries[homes[i]];
            if (index_load(&entry->key[0]) != keys[i].word[0] || index_load(&entry->key[3]) != keys[i].word[3]) {
                __builtin_prefetch(&view->entries[(homes[i] + 1) & view->mask], 0, 3);
                __builtin_prefetch(&view->entries[(homes[i] + 2) & view->mask], 0, 3);
            }
        }
        for (uint64_t i = 0; i < count; i++) {
            index_place place = {0, 0, 0};
            int status = index_find(view, &keys[i], homes[i], batch->layout, &place);
            statuses[first + i] = (uint8_t)status;
            if (batch->prefix && status != INDEX_HIT)
                return first + i;
            if (places)
                places[first + i] = place;
        }
    }
    return batch->n;
}

/* --- reading: find, copy, check again ---------------------------------------------------------------------- */

/* The generations whose checksum this process has verified: 31 bits of the generation per entry, never 0. */
static inline uint32_t index_verified_tag(uint64_t sequence) { return (uint32_t)(sequence >> 2) | UINT32_C(1) << 31; }

typedef struct {
    const index_view *view;
    const index_batch *batch;
    uint64_t nbytes;            /* of each object */
    const uint64_t *targets;    /* an address for each key */
    int verify;                 /* INDEX_VERIFY_… */
    _Atomic uint32_t *verified; /* a tag for each entry */
    uint64_t job_bytes;         /* of all copies together: large jobs bypass the caches */
    index_place *places;
    uint8_t *statuses;
    uint64_t *incarnations; /* of what was read, or NULL if nobody asks */
} index_reading;

/* Copy the object found at `place` to `target`, and check that it stayed the same object throughout. INDEX_HIT,
 * INDEX_MISS (not of this size, or a damaged entry), INDEX_DAMAGED (checksum), INDEX_CHANGED. `seen`: which one. */
static inline int index_copy_out(const index_reading *r, const index_place *place, void *target, uint64_t *seen) {
    const index_entry *entry = &r->view->entries[place->at];
    uint64_t checksum = index_load(&entry->checksum);
    bool fits = index_load(&entry->nbytes) == r->nbytes && index_in_data(r->view, place->offset, r->nbytes);
    uint64_t flags = index_load(&entry->flags);
    bool known = flags & INDEX_CHECKSUM_KNOWN, adopted = flags & INDEX_UNVERIFIED;
    bool check = known && (adopted || r->verify != INDEX_VERIFY_NEVER);
    uint32_t tag = index_verified_tag(place->sequence);
    /* If everything must be verified, an object without a checksum is a miss: the server may know more. */
    fits = fits && (known || !(adopted || r->verify == INDEX_VERIFY_ALWAYS));
    if (check && r->verify != INDEX_VERIFY_ALWAYS)
        check = atomic_load_explicit(&r->verified[place->at], memory_order_relaxed) != tag;
    if (fits) {
        const unsigned char *slot = r->view->base + place->offset;
        if (check) /* of the copied bytes: the slot may have others by now */
            check = copy_checksum_of(target, slot, r->nbytes, r->job_bytes) != checksum;
        else
            copy_bytes_of(target, slot, r->nbytes, r->job_bytes);
#ifdef __x86_64__
        __builtin_ia32_lfence();
#endif
    }
    uint64_t incarnation = r->incarnations ? index_load(&entry->incarnation) : 0;
    if (!index_unchanged(r->view, place))
        return INDEX_CHANGED;
    *seen = incarnation;
    if (!fits)
        return INDEX_MISS;
    if (check)
        return INDEX_DAMAGED;
    if (adopted || r->verify == INDEX_VERIFY_FIRST)
        atomic_store_explicit(&r->verified[place->at], tag, memory_order_relaxed);
    return INDEX_HIT;
}

/* Read the i-th object of a reading. If it changes, copy it again, up to INDEX_TRIES times. */
static inline void index_read_one(void *reading, size_t i) {
    const index_reading *r = reading;
    int status = INDEX_CHANGED;
    uint64_t seen = 0;
    for (int tries = 0; tries < INDEX_TRIES; tries++) {
        status = index_copy_out(r, &r->places[i], (void *)(uintptr_t)r->targets[i], &seen);
        if (status != INDEX_CHANGED)
            break;
        index_key key = index_key_of(index_batch_key(r->batch, i), r->batch->space);
        status = index_find(r->view, &key, index_home(r->view, &key), r->batch->layout, &r->places[i]);
        if (status != INDEX_HIT)
            break;
        status = INDEX_CHANGED;
    }
    r->statuses[i] = (uint8_t)status;
    if (r->incarnations)
        r->incarnations[i] = seen;
}

static inline void index_read_if_found(void *reading, size_t i) {
    const index_reading *r = reading;
    if (r->statuses[i] == INDEX_HIT)
        index_read_one(reading, i);
}

/* Fill in `r->statuses` and `r->places` (room for the whole batch each) and all targets that are hits, with at most
 * `threads` threads. Returns the number of statuses: with `prefix`, the first one that is no hit is the last. Targets
 * behind it may have been written to. */
static inline uint64_t index_read_batch(index_reading *r, unsigned threads) {
    const index_batch *batch = r->batch;
    uint64_t found = index_find_batch(r->view, batch, r->statuses, r->places);
    r->job_bytes = found * r->nbytes;
    team_run(found, team_size(r->job_bytes, threads), index_read_if_found, r);
    uint64_t count = found + (found < batch->n); /* the miss that ended a prefix has a status, too */
    for (uint64_t i = 0; i < count; i++) {
        if (r->statuses[i] == INDEX_HIT)
            index_mark(r->view, r->places[i].at, i);
        else if (batch->prefix)
            return i + 1;
    }
    return count;
}

#endif
