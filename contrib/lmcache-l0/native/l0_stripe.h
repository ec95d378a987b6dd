/* Which buffer a write goes into, and which one it retires.
 *
 * Every slot owns one buffer of its stripe; the spares are the rest, in the order in which they were retired. A write
 * takes the oldest, and the buffer that its slot owned until then becomes the newest. So the bytes of a version stay
 * until its key is written again and `spares` - 1 more writes have happened in its stripe.
 *
 * Both steps are under the stripe's lock, which is held across the write. Taking changes nothing: the ring still names
 * the buffer, and moves on only after the slot's word has. So wherever the owner of the lock was killed, the spares are
 * the buffers that no slot names. Whoever takes the lock over rebuilds the ring from that: the spares that it names
 * already, in their order, then the one that it lacks.
 *
 * The ring is one word: L0_RING_USED, and `spares` numbers of 8 bits, the oldest lowest. Zero is a stripe that was never
 * written: its spares stand behind the buffers of its slots.
 *
 * A stripe of one slot needs neither: its lock is the slot's, and its buffers are taken round and round.
 */
#ifndef L0_STRIPE_H
#define L0_STRIPE_H

#include "l0_layout.h"
#include "l0_owner.h"

#define L0_RING_USED (UINT64_C(1) << 63)

/* Slots of the stripe: the last one may be short. */
static inline uint64_t l0_stripe_slots(const l0_table *t, uint64_t slot) {
    uint64_t first = slot - l0_place(t, slot), left = t->g.slots - first;
    return left < UINT64_C(1) << t->g.stripe_shift ? left : UINT64_C(1) << t->g.stripe_shift;
}

static inline uint64_t l0_ring(const l0_table *t, uint64_t slot) {
    uint64_t ring = atomic_load_explicit(&l0_stripe_of(t, slot)->ring, memory_order_relaxed);
    if (ring != 0)
        return ring;
    for (uint64_t i = 0, slots = l0_stripe_slots(t, slot); i < t->g.spares; i++)
        ring |= (slots + i) << (8 * i);
    return ring | L0_RING_USED;
}

static inline void l0_ring_repair(const l0_table *t, uint64_t slot) {
    bool taken[128] = {false};
    uint64_t first = slot - l0_place(t, slot), slots = l0_stripe_slots(t, slot), old = l0_ring(t, slot);
    uint64_t buffers = slots + t->g.spares, ring = L0_RING_USED, found = 0;
    for (uint64_t i = 0; i < slots; i++)
        taken[l0_buffer_of(t, first + i, atomic_load(&l0_meta_at(t, first + i)->current))] = true;
    for (uint64_t i = 0; i < t->g.spares; i++) {
        uint64_t buffer = old >> (8 * i) & 127;
        if (buffer < buffers && !taken[buffer]) {
            taken[buffer] = true;
            ring |= buffer << (8 * found++);
        }
    }
    for (uint64_t buffer = 0; buffer < buffers && found < t->g.spares; buffer++)
        if (!taken[buffer])
            ring |= buffer << (8 * found++);
    atomic_store_explicit(&l0_stripe_of(t, slot)->ring, ring, memory_order_relaxed);
}

/* Choose the buffer for a write of `slot`, whose lock we hold. False: another writer held the stripe for wait_ns. */
static inline bool l0_take(const l0_table *t, uint64_t slot, uint64_t owned, uint64_t wait_ns, uint64_t *buffer) {
    if (t->g.versions) {
        *buffer = owned + 1 < t->g.stripe_buffers ? owned + 1 : 0;
        return true;
    }
    l0_locked locked = l0_lock(t, &l0_stripe_of(t, slot)->lock, wait_ns);
    if (locked == L0_LOCK_BUSY)
        return false;
    if (locked == L0_LOCKED_FROM_DEAD)
        l0_ring_repair(t, slot);
    *buffer = l0_ring(t, slot) & 127;
    return true;
}

/* The slot's word now names the new buffer: the one that it named before becomes a spare. */
static inline void l0_retire(const l0_table *t, uint64_t slot, uint64_t owned) {
    if (t->g.versions)
        return;
    l0_stripe *stripe = l0_stripe_of(t, slot);
    uint64_t ring = (l0_ring(t, slot) & ~L0_RING_USED) >> 8 | owned << (8 * (t->g.spares - 1));
    atomic_store_explicit(&stripe->ring, ring | L0_RING_USED, memory_order_relaxed);
    l0_unlock(&stripe->lock);
}

#endif
