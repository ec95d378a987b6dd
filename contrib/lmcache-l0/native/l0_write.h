/* Writing: next to the current version, made visible in one step, one writer per slot.
 *
 * A slot is changed only under its lock (l0_owner.h), so writers of one key take turns; the buffer for a write is chosen
 * and filled under the lock of the stripe (l0_stripe.h), so writers of one stripe take turns while they copy. A stripe's
 * lock is taken last and nothing is waited for under it. What a killed writer leaves behind is harmless wherever it was
 * stopped: a spare buffer with half a value in it and no stamp, or with a stamp that no slot's word has (the next write
 * of the slot has the same generation again: nobody has ever been given it), a claim (nothing of it was visible;
 * whoever needs the slot frees it), or a finished write with its locks still taken.
 *
 * Two writers that insert one new key at one time must not end in two slots. Each claims a free slot, which shows the
 * key's hash, moves the home's bound, and then looks at the whole reach of the home again. All three steps are
 * sequentially consistent, so of two claims at least the later one sees the other. The claim nearer to the
 * home goes on; the farther one gives way; the nearer one waits until the farther one is settled. A writer waits
 * only for claims farther than its own, so no circle of waiting can close.
 */
#ifndef L0_WRITE_H
#define L0_WRITE_H

#include "l0_layout.h"
#include "l0_owner.h"
#include "l0_probe.h"
#include "l0_read.h"
#include "l0_stripe.h"
#include "l0_words.h"

typedef struct l0_value {
    const unsigned char *bytes;
    size_t n;
    uint64_t tag;
} l0_value;

/* Put a version into a buffer that no slot names: see l0_read.h. */
static inline void l0_fill(const l0_table *t, l0_buffer_head *head, uint64_t stamp, l0_key key, l0_value value) {
    atomic_store_explicit(&head->stamp, 0, memory_order_relaxed);
    atomic_thread_fence(memory_order_release);
    atomic_store_explicit(&head->bytes, (uint64_t)key.n << 32 | value.n, memory_order_relaxed);
    atomic_store_explicit(&head->tag, value.tag, memory_order_relaxed);
    l0_copy_in(l0_key_at(t, head), key.bytes, key.n);
    l0_copy_in(l0_value_at(t, head), value.bytes, value.n);
    atomic_store_explicit(&head->stamp, stamp, memory_order_release);
}

/* Write the next version of a slot that we have locked, and make it live. L0_DONE, or L0_BUSY for its stripe. */
static inline l0_result l0_write(const l0_table *t, uint64_t slot, l0_key key, l0_value value, uint64_t wait_ns) {
    l0_meta *m = l0_meta_at(t, slot);
    uint64_t word = atomic_load_explicit(&m->current, memory_order_relaxed), buffer;
    uint64_t owned = l0_buffer_of(t, slot, word), generation = l0_generation(word) + 1;
    if (!l0_take(t, slot, owned, wait_ns, &buffer))
        return L0_BUSY;
    l0_fill(t, l0_buffer_at(t, slot, buffer), l0_stamp(t, slot, generation), key, value);
    atomic_store_explicit(&m->current, l0_word(generation, buffer, L0_LIVE), memory_order_release);
    l0_retire(t, slot, owned);
    return L0_DONE;
}

/* The state of a slot that we have locked; its buffer stays its own. */
static inline void l0_turn(const l0_table *t, uint64_t slot, uint64_t state) {
    l0_meta *m = l0_meta_at(t, slot);
    uint64_t word = atomic_load(&m->current);
    atomic_store(&m->current, l0_word(l0_generation(word), l0_buffer_of(t, slot, word), state));
}

/* Give a claim up. The slot stays locked by us. */
static inline void l0_unclaim(const l0_table *t, uint64_t slot) {
    uint64_t home = l0_home(t, atomic_load(&l0_meta_at(t, slot)->hash));
    l0_turn(t, slot, L0_FREE);
    l0_bound_lower(t, home);
}

/* Lock the slot and clear what a dead owner left. BUSY where l0_lock says so. */
static inline l0_locked l0_lock_clean(const l0_table *t, uint64_t slot, uint64_t wait_ns) {
    l0_meta *m = l0_meta_at(t, slot);
    l0_locked locked = l0_lock(t, &m->lock, wait_ns);
    if (locked == L0_LOCK_BUSY)
        return locked;
    /* A claim whose lock could be taken has no living owner. */
    if (l0_state(atomic_load(&m->current)) == L0_CLAIMED)
        l0_unclaim(t, slot);
    if (locked == L0_LOCKED_FROM_DEAD)
        atomic_fetch_add(&l0_head(t)->recovered, 1);
    return locked;
}

/* Our lock is on a copy of the key whose mover has died (l0_move.h): free the other copy, if it is there still. False: a
 * writer has held that one for wait_ns. */
static inline bool l0_settle(const l0_table *t, uint64_t home, uint64_t mine, l0_key key, uint64_t wait_ns) {
    uint64_t reach = l0_reach(t, atomic_load(&l0_meta_at(t, home)->bound));
    l0_found found;
    for (uint64_t d = mine + 1; d < reach; d++) {
        uint64_t slot = l0_position(t, home, d);
        l0_meta *m = l0_meta_at(t, slot);
        if (l0_look_at(t, slot, key, &found) != L0_DONE)
            continue;
        l0_locked locked = l0_lock(t, &m->lock, wait_ns);
        if (locked == L0_LOCK_BUSY)
            return false;
        if (locked == L0_LOCKED_FROM_DEAD)
            l0_bound_raise(t, home, 0);
        if (l0_look_at(t, slot, key, &found) == L0_DONE)
            l0_turn(t, slot, L0_FREE);
        l0_unlock(&m->lock);
        break;
    }
    l0_turn(t, l0_position(t, home, mine), L0_LIVE);
    return true;
}

/* Lock the slot in which the key lives. L0_DONE, L0_MISS, or L0_BUSY. Waits for a writer that is inserting it. What was
 * looked at is believed only if the bound has not moved meanwhile: a key that is moved, and a lock that is taken from
 * the dead, which may have been moving a key, move it. */
static inline l0_result l0_lock_key(const l0_table *t, l0_key key, uint64_t wait_ns, uint64_t *slot_of_key) {
    uint64_t home = l0_home(t, key.hash);
    l0_found found;
    for (int tries = 0; tries < L0_READ_TRIES; tries++) {
        uint64_t bound = atomic_load(&l0_meta_at(t, home)->bound), reach = l0_reach(t, bound);
        uint64_t d = 0;
        for (; d < reach; d++) {
            uint64_t slot = l0_position(t, home, d);
            l0_meta *m = l0_meta_at(t, slot);
            uint64_t state = l0_state(atomic_load(&m->current));
            if (state == L0_FREE || atomic_load(&m->hash) != key.hash)
                continue;
            if (state >= L0_LIVE && l0_look_at(t, slot, key, &found) == L0_MISS)
                continue;
            l0_locked locked = l0_lock_clean(t, slot, wait_ns);
            if (locked == L0_LOCK_BUSY)
                return L0_BUSY;
            if (locked == L0_LOCKED_FROM_DEAD)
                l0_bound_raise(t, home, 0);
            uint64_t word = atomic_load(&m->current); /* under the lock it stands still, and so does its buffer */
            bool same = l0_there(word) && atomic_load(&m->hash) == key.hash;
            bool still = atomic_load(&l0_meta_at(t, home)->bound) == bound;
            if (still && same && l0_has_key(t, l0_buffer_at(t, slot, l0_buffer_of(t, slot, word)), key)) {
                if (l0_state(word) == L0_ARRIVING && !l0_settle(t, home, d, key, wait_ns)) {
                    l0_unlock(&m->lock);
                    return L0_BUSY;
                }
                *slot_of_key = slot;
                return L0_DONE;
            }
            l0_unlock(&m->lock);
            if (still && same)
                continue; /* another key with this hash */
            break; /* it was settled otherwise while we waited: look again */
        }
        if (d == reach && atomic_load(&l0_meta_at(t, home)->bound) == bound)
            return L0_MISS;
    }
    return L0_BUSY;
}

/* Lock the nearest free slot. Only with time to wait does it ask whether owners of others are dead. */
static inline l0_result l0_lock_free(const l0_table *t, uint64_t home, uint64_t wait_ns, uint64_t *distance) {
    for (uint64_t d = 0; d < t->g.probe_max; d++) {
        l0_meta *m = l0_meta_at(t, l0_position(t, home, d));
        if (l0_state(atomic_load_explicit(&m->current, memory_order_relaxed)) != L0_FREE ||
            atomic_load_explicit(&m->lock, memory_order_relaxed) != 0 || !l0_lock_try(t, &m->lock))
            continue;
        *distance = d;
        if (l0_state(atomic_load(&m->current)) == L0_FREE)
            return L0_DONE;
        l0_unlock(&m->lock);
    }
    if (wait_ns == 0)
        return L0_BUSY;
    for (uint64_t d = 0; d < t->g.probe_max; d++) {
        uint64_t slot = l0_position(t, home, d);
        l0_meta *m = l0_meta_at(t, slot);
        uint64_t owner = atomic_load(&m->lock);
        if (l0_there(atomic_load(&m->current)) || (owner != 0 && !l0_owner_dead(t, owner)))
            continue;
        if (l0_lock_clean(t, slot, 1) == L0_LOCK_BUSY)
            continue;
        *distance = d;
        if (l0_state(atomic_load(&m->current)) == L0_FREE)
            return L0_DONE;
        l0_unlock(&m->lock);
    }
    return L0_FULL;
}

/* One look for others than our claim at `mine`. */
static inline l0_result l0_look_for_others(const l0_table *t, l0_key key, uint64_t home, uint64_t mine, uint64_t reach,
                                           uint64_t wait_ns) {
    l0_found found;
    for (uint64_t d = 0; d < reach; d++) {
        uint64_t slot = l0_position(t, home, d);
        l0_meta *m = l0_meta_at(t, slot);
        uint64_t state = l0_state(atomic_load(&m->current));
        if (d == mine || state == L0_FREE || atomic_load(&m->hash) != key.hash)
            continue;
        if (state >= L0_LIVE) {
            l0_result there = l0_look_at(t, slot, key, &found);
            if (there != L0_MISS)
                return there == L0_DONE ? L0_MOVED : L0_BUSY;
            continue;
        }
        if (d < mine)
            return L0_MOVED;
        if (l0_lock_clean(t, slot, wait_ns) == L0_LOCK_BUSY)
            return L0_BUSY;
        bool there = l0_look_at(t, slot, key, &found) == L0_DONE;
        l0_unlock(&m->lock);
        if (there)
            return L0_MOVED;
    }
    return L0_DONE;
}

/* Is our claim at `mine` the one that may go on? L0_DONE: yes. L0_MOVED: give way and look again. L0_BUSY. */
static inline l0_result l0_claim_stands(const l0_table *t, l0_key key, uint64_t home, uint64_t mine,
                                        uint64_t wait_ns) {
    uint64_t bound = atomic_load(&l0_meta_at(t, home)->bound);
    for (int tries = 0; tries < L0_READ_TRIES; tries++) {
        l0_result result = l0_look_for_others(t, key, home, mine, l0_reach(t, bound), wait_ns);
        uint64_t seen = bound;
        bound = atomic_load(&l0_meta_at(t, home)->bound);
        if (result != L0_DONE || bound == seen)
            return result;
    }
    return L0_BUSY;
}

/* Insert a key that was not there a moment ago. L0_MOVED: it may be there now (or the ticket is old). */
static inline l0_result l0_put_new(const l0_table *t, l0_key key, l0_value value, uint64_t wait_ns,
                                   const uint64_t *ticket) {
    uint64_t home = l0_home(t, key.hash), distance;
    l0_result result = l0_lock_free(t, home, wait_ns, &distance);
    if (result != L0_DONE)
        return result;
    uint64_t slot = l0_position(t, home, distance);
    l0_meta *m = l0_meta_at(t, slot);
    atomic_store_explicit(&m->hash, key.hash, memory_order_release); /* who sees it sees what has left the slot */
    l0_turn(t, slot, L0_CLAIMED);
    if (ticket == NULL)
        l0_bound_raise(t, home, distance);
    else if (!l0_bound_raise_from(t, home, distance, *ticket))
        result = L0_MOVED;
    if (result == L0_DONE)
        result = l0_claim_stands(t, key, home, distance, wait_ns);
    if (result == L0_DONE) {
        atomic_store_explicit(&m->hits, 0, memory_order_relaxed);
        result = l0_write(t, slot, key, value, wait_ns);
    }
    if (result == L0_DONE)
        atomic_fetch_add_explicit(&l0_head(t)->keys, 1, memory_order_relaxed);
    else
        l0_unclaim(t, slot);
    l0_unlock(&m->lock);
    return result;
}

/* Set a key. The caller has joined as a writer; key and value are within the table's limits. L0_DONE; L0_FULL; or
 * L0_BUSY: a living writer has held this key's slot, or its stripe, for wait_ns. With wait_ns 0 it makes no system
 * call, and L0_BUSY means: ask again with time to wait. `inserted` says whether the key is new. */
static inline l0_result l0_put(const l0_table *t, l0_key key, l0_value value, uint64_t wait_ns, bool *inserted) {
    for (int tries = 0; tries < L0_READ_TRIES; tries++) {
        uint64_t slot;
        l0_result result = l0_lock_key(t, key, wait_ns, &slot);
        *inserted = result == L0_MISS;
        if (result == L0_DONE) {
            result = l0_write(t, slot, key, value, wait_ns);
            l0_unlock(&l0_meta_at(t, slot)->lock);
        } else if (result == L0_MISS) {
            result = l0_put_new(t, key, value, wait_ns, NULL);
        }
        if (result != L0_MOVED)
            return result;
    }
    return L0_BUSY;
}

/* What to hand to l0_insert later: it moves whenever a key of this home is inserted or deleted. */
static inline uint64_t l0_ticket(const l0_table *t, l0_key key) {
    return atomic_load(&l0_meta_at(t, l0_home(t, key.hash))->bound);
}

/* Set a key if it is not there and the ticket still holds, else L0_MOVED. */
static inline l0_result l0_insert(const l0_table *t, l0_key key, l0_value value, uint64_t ticket, uint64_t wait_ns) {
    uint64_t slot;
    l0_result result = l0_lock_key(t, key, wait_ns, &slot);
    if (result == L0_DONE) {
        l0_unlock(&l0_meta_at(t, slot)->lock);
        return L0_MOVED;
    }
    return result == L0_MISS ? l0_put_new(t, key, value, wait_ns, &ticket) : result;
}

/* Delete a key. L0_DONE, L0_MISS, L0_BUSY. Its bytes stay as they are until the slot is used again. */
static inline l0_result l0_delete(const l0_table *t, l0_key key, uint64_t wait_ns) {
    uint64_t slot, home = l0_home(t, key.hash);
    /* First make every ticket of this home old: an insert that is past that check is a claim that we wait for. */
    l0_bound_raise(t, home, 0);
    l0_result result = l0_lock_key(t, key, wait_ns, &slot);
    if (result != L0_DONE)
        return result;
    l0_turn(t, slot, L0_FREE);
    atomic_fetch_sub_explicit(&l0_head(t)->keys, 1, memory_order_relaxed);
    l0_unlock(&l0_meta_at(t, slot)->lock);
    l0_bound_lower(t, home);
    return L0_DONE;
}

#endif
