/* A filter of what the index has, for who may ask no index but wants to know what is worth asking for: another node.
 *
 * A Bloom filter in blocks of one cache line. Of the xxh3_64 of key ‖ namespace id, the upper 19 bits choose the block
 * and five times nine bits below them a bit of it, so that a question touches one line and a change one block. It is
 * made anew from the entries each time: nothing that was counted wrongly, or not noticed, stays in it. An entry that the
 * writer moves meanwhile (`tidy`) may be missed until the next time.
 */
#ifndef LMCACHE_CORE_INDEX_DIGEST_H
#define LMCACHE_CORE_INDEX_DIGEST_H

#include "index.h"
#include "xxh3.h"

enum {
    DIGEST_BLOCK_BYTES = 64,
    DIGEST_BLOCK_SHIFT = 45,
    DIGEST_BLOCKS_MAX = 1 << 19,
    DIGEST_BITS = 5,
};

/* Set the bits of all READY entries; returns how many there are. `blocks` is a power of two. */
static inline uint64_t index_digest(const index_view *view, unsigned char *bits, uint64_t blocks) {
    uint64_t ready = 0;
    for (uint64_t at = 0; at <= view->mask; at++) {
        const index_entry *entry = &view->entries[at];
        uint64_t sequence = atomic_load_explicit((_Atomic uint64_t *)(uintptr_t)&entry->sequence, memory_order_acquire);
        if (index_state(sequence) != INDEX_READY)
            continue;
        index_key key = index_key_at(entry);
        unsigned char name[INDEX_KEY_BYTES + sizeof key.space];
        memcpy(name, key.word, INDEX_KEY_BYTES);
        memcpy(name + INDEX_KEY_BYTES, &key.space, sizeof key.space);
        uint64_t hash = xxh3_64(name, sizeof name);
        unsigned char *block = bits + ((hash >> DIGEST_BLOCK_SHIFT) & (blocks - 1)) * DIGEST_BLOCK_BYTES;
        for (int i = 0; i < DIGEST_BITS; i++, hash >>= 9)
            block[(hash & 511) >> 3] |= (unsigned char)(1u << (hash & 7));
        ready++;
    }
    return ready;
}

enum { INDEX_NAME_BYTES = INDEX_KEY_BYTES + 8 };

/* Key ‖ namespace id of READY entries, as many as have room; returns how many there are. */
static inline uint64_t index_names(const index_view *view, unsigned char *names, uint64_t room) {
    uint64_t ready = 0;
    for (uint64_t at = 0; at <= view->mask; at++) {
        const index_entry *entry = &view->entries[at];
        uint64_t sequence = atomic_load_explicit((_Atomic uint64_t *)(uintptr_t)&entry->sequence, memory_order_acquire);
        if (index_state(sequence) != INDEX_READY)
            continue;
        if (ready < room) {
            index_key key = index_key_at(entry);
            unsigned char *name = names + ready * INDEX_NAME_BYTES;
            memcpy(name, key.word, INDEX_KEY_BYTES);
            memcpy(name + INDEX_KEY_BYTES, &key.space, sizeof key.space);
        }
        ready++;
    }
    return ready;
}

#endif
