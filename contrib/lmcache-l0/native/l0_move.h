/* Moving keys nearer to their home, while others read and write.
 *
 * Deletes free slots, and a key that was inserted far from its home stays there when a nearer one becomes free: under
 * inserts and deletes that never end, probes grow. l0_rehash moves such keys, one at a time. A move of a key from slot S to T,
 * which is nearer to their home, under the locks of both:
 *     T := a copy, state ARRIVING       from here on readers find it at T, which they look at first
 *     the home's bound moves
 *     S := FREE
 *     T := LIVE
 * A reader that looked at T before and at S after that finds the bound moved, and looks again; so does everyone who
 * concludes that a key is absent. So no look misses the key, and none sees it twice, because a look ends at T.
 *
 * If the mover is killed, S and T may both have the key. Readers stop at T. Whoever locks T finds ARRIVING: only a dead
 * mover leaves that, so it frees S and makes T LIVE (l0_settle). Whoever locks S has looked at T too early, and must
 * not write there. Taking a lock from a dead writer moves the bound before the lock is released, so this writer finds
 * it moved, and looks again. Locks are tried, never waited for. The exception is a settler, which waits for S while it
 * holds T; it waits for nobody who waits for T.
 *
 * tests/test_moves.py explores all interleavings of this, with kills.
 */
#ifndef L0_MOVE_H
#define L0_MOVE_H

#include "l0_write.h"

/* Copy a version that does not change into a buffer that no slot names: like l0_fill, from shared memory. */
static inline void l0_fill_from(const l0_table *t, l0_buffer_head *head, uint64_t stamp, l0_buffer_head *source) {
    uint64_t bytes = atomic_load_explicit(&source->bytes, memory_order_relaxed);
    uint64_t key = bytes >> 32, value = bytes & UINT32_MAX;
    key = key < t->g.key_bytes_max ? key : t->g.key_bytes_max; /* whatever the file says */
    value = value < t->g.value_bytes_max ? value : t->g.value_bytes_max;
    atomic_store_explicit(&head->stamp, 0, memory_order_relaxed);
    atomic_thread_fence(memory_order_release);
    atomic_store_explicit(&head->bytes, key << 32 | value, memory_order_relaxed);
    atomic_store_explicit(&head->tag, atomic_load_explicit(&source->tag, memory_order_relaxed), memory_order_relaxed);
    /* Both are padded to whole words. */
    for (uint64_t i = 0; i < key; i += 8)
        l0_store_word(l0_key_at(t, head) + i, l0_load_word(l0_key_at(t, source) + i));
    for (uint64_t i = 0; i < value; i += 8)
        l0_store_word(l0_value_at(t, head) + i, l0_load_word(l0_value_at(t, source) + i));
    atomic_store_explicit(&head->stamp, stamp, memory_order_release);
}

/* We hold the locks of both slots; the key lives in `from`, and `to` is free. False: the stripe of `to` is busy. */
static inline bool l0_move_locked(const l0_table *t, uint64_t home, uint64_t from, uint64_t to, uint64_t near) {
    l0_meta *left = l0_meta_at(t, from), *taken = l0_meta_at(t, to);
    uint64_t source = l0_buffer_of(t, from, atomic_load(&left->current)), word = atomic_load(&taken->current), buffer;
    uint64_t owned = l0_buffer_of(t, to, word), generation = l0_generation(word) + 1;
    if (!l0_take(t, to, owned, 0, &buffer))
        return false;
    l0_fill_from(t, l0_buffer_at(t, to, buffer), l0_stamp(t, to, generation), l0_buffer_at(t, from, source));
    atomic_store_explicit(&taken->hash, atomic_load(&left->hash), memory_order_release);
    atomic_store_explicit(&taken->hits, atomic_load(&left->hits), memory_order_relaxed);
    atomic_store(&taken->current, l0_word(generation, buffer, L0_ARRIVING));
    l0_retire(t, to, owned);
    l0_bound_raise(t, home, near);
    l0_turn(t, from, L0_FREE);
    l0_turn(t, to, L0_LIVE);
    return true;
}

/* Does a slot nearer to the home have the key of this hash, too? A mover that died may have left it there. */
static inline bool l0_copied(const l0_table *t, uint64_t home, uint64_t far, uint64_t hash) {
    for (uint64_t d = 0; d < far; d++) {
        l0_meta *m = l0_meta_at(t, l0_position(t, home, d));
        if (l0_there(atomic_load(&m->current)) && atomic_load(&m->hash) == hash)
            return true;
    }
    return false;
}

/* Move what lives at distance `far` of this home to the free slot at `near`. False: not now. */
static inline bool l0_move(const l0_table *t, uint64_t home, uint64_t far, uint64_t near) {
    uint64_t from = l0_position(t, home, far), to = l0_position(t, home, near);
    l0_meta *left = l0_meta_at(t, from), *taken = l0_meta_at(t, to);
    bool moved = false;
    if (!l0_lock_try(t, &left->lock))
        return false;
    uint64_t hash = atomic_load(&left->hash);
    if (l0_state(atomic_load(&left->current)) == L0_LIVE && l0_home(t, hash) == home &&
        !l0_copied(t, home, far, hash) && l0_lock_try(t, &taken->lock)) {
        if (l0_state(atomic_load(&taken->current)) == L0_FREE)
            moved = l0_move_locked(t, home, from, to, near);
        l0_unlock(&taken->lock);
    }
    l0_unlock(&left->lock);
    return moved;
}

/* Move the keys of the homes [first, end) to the nearest free slots. Returns how many. The caller has joined as a
 * writer. */
static inline uint64_t l0_rehash(const l0_table *t, uint64_t first, uint64_t end) {
    uint64_t all = 0;
    for (uint64_t home = first; home < end; home++) {
        uint64_t reach = l0_reach(t, atomic_load(&l0_meta_at(t, home)->bound)), near = 0, moved = 0;
        for (uint64_t d = 1; d < reach; d++) {
            l0_meta *m = l0_meta_at(t, l0_position(t, home, d));
            if (l0_state(atomic_load(&m->current)) != L0_LIVE || l0_home(t, atomic_load(&m->hash)) != home)
                continue;
            for (; near < d; near++) {
                l0_meta *free = l0_meta_at(t, l0_position(t, home, near));
                if (l0_state(atomic_load(&free->current)) == L0_FREE && atomic_load(&free->lock) == 0)
                    break;
            }
            if (near < d)
                moved += l0_move(t, home, d, near++);
        }
        if (moved)
            l0_bound_lower(t, home);
        all += moved;
    }
    return all;
}

#endif
