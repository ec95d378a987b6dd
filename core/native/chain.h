/* Chunk keys: k_i = SHA-256(k_{i-1} ‖ tokens_i), tokens as little-endian u32, all chunks of a prompt in one call. */
#ifndef LMCACHE_CORE_CHAIN_H
#define LMCACHE_CORE_CHAIN_H

#include "sha256.h"

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "token ids are hashed as they lie in memory, little-endian; other machines hash in Python"
#endif

/* A message, or this much of it, is laid out in one piece and hashed in one call. It stays on the stack and in the
 * nearest cache. */
enum { CHAIN_ROOM_BYTES = 4096 };
_Static_assert(CHAIN_ROOM_BYTES % SHA256_BLOCK_BYTES == 0, "a full room is whole blocks");

typedef enum { CHAIN_U32, CHAIN_I32, CHAIN_U64, CHAIN_I64 } chain_kind;

/* The caller's token ids, with any alignment. */
typedef struct {
    const unsigned char *first;
    ptrdiff_t stride_bytes; /* bytes from one id to the next; may be negative */
    size_t count;
    chain_kind kind;
} chain_ids;

/* Write n ids from position `from` on as u32 words to `room`, of any alignment. 0, or not 0 if one is negative or needs
 * more than 32 bits. Each id is read once, so what was checked is what is hashed. */
static inline uint64_t chain_take(const chain_ids *ids, size_t from, size_t n, unsigned char *room) {
    const unsigned char *at = ids->first + (ptrdiff_t)from * ids->stride_bytes;
    const ptrdiff_t stride = ids->stride_bytes;
    uint64_t excess = 0, pair;
    uint32_t word;
    if (ids->kind == CHAIN_U32 && stride == 4)
        memcpy(room, at, 4 * n);
    else if (ids->kind == CHAIN_I32 && stride == 4) /* constant strides let the compiler take several ids at once */
        for (size_t i = 0; i < n; i++) {
            memcpy(&word, at + 4 * i, 4);
            memcpy(room + 4 * i, &word, 4);
            excess |= word >> 31;
        }
    else if (ids->kind <= CHAIN_I32)
        for (size_t i = 0; i < n; i++) {
            memcpy(&word, at + (ptrdiff_t)i * stride, 4);
            memcpy(room + 4 * i, &word, 4);
            excess |= ids->kind == CHAIN_I32 ? word >> 31 : 0;
        }
    else if (stride == 8) /* 64 bits: the high half of a negative id is not zero either */
        for (size_t i = 0; i < n; i++) {
            memcpy(&pair, at + 8 * i, 8);
            word = (uint32_t)pair;
            memcpy(room + 4 * i, &word, 4);
            excess |= pair >> 32;
        }
    else
        for (size_t i = 0; i < n; i++) {
            memcpy(&pair, at + (ptrdiff_t)i * stride, 8);
            word = (uint32_t)pair;
            memcpy(room + 4 * i, &word, 4);
            excess |= pair >> 32;
        }
    return excess;
}

/* One key of 32 bytes for each whole chunk, at `keys` (room for count / chunk_ids of them). `previous` is the key
 * before the first. Returns 0, or -1 if an id does not fit, even one behind the last whole chunk. */
static inline int chain_keys(sha256_way way, const unsigned char previous[SHA256_BYTES], const chain_ids *ids,
                             size_t chunk_ids, unsigned char *keys) {
    unsigned char room[CHAIN_ROOM_BYTES + SHA256_END_BYTES];
    const uint64_t message_bytes = SHA256_BYTES + 4 * (uint64_t)chunk_ids;
    uint32_t key[8], state[8];
    uint64_t excess = 0;
    size_t at = 0, n;
    for (int i = 0; i < 8; i++)
        key[i] = sha256_big_endian(previous + 4 * i);
    for (size_t chunks = ids->count / chunk_ids; chunks > 0; chunks--, keys += SHA256_BYTES) {
        const uint32_t *head = key;
        size_t used = SHA256_BYTES, left = chunk_ids;
        memcpy(state, SHA256_START, sizeof state);
        for (; (n = (CHAIN_ROOM_BYTES - used) / 4) < left; at += n, left -= n, used = 0, head = NULL) {
            excess |= chain_take(ids, at, n, room + used);
            way.blocks(state, head, room, CHAIN_ROOM_BYTES / SHA256_BLOCK_BYTES);
        }
        excess |= chain_take(ids, at, left, room + used);
        if (excess)
            return -1;
        at += left;
        sha256_end(way, state, head, room, used + 4 * left, message_bytes);
        memcpy(key, state, sizeof key);
        sha256_bytes(state, keys);
    }
    for (; at < ids->count; at += n) {
        n = ids->count - at < CHAIN_ROOM_BYTES / 4 ? ids->count - at : CHAIN_ROOM_BYTES / 4;
        excess |= chain_take(ids, at, n, room);
    }
    return excess ? -1 : 0;
}

/* SHA-256(prefix ‖ hash), for messages of at most CHAIN_ROOM_BYTES. */
static inline void chain_block_key(sha256_way way, const void *prefix, size_t prefix_bytes, const void *hash,
                                   size_t hash_bytes, unsigned char key[SHA256_BYTES]) {
    unsigned char room[CHAIN_ROOM_BYTES + SHA256_END_BYTES];
    uint32_t state[8];
    memcpy(state, SHA256_START, sizeof state);
    memcpy(room, prefix, prefix_bytes);
    memcpy(room + prefix_bytes, hash, hash_bytes);
    sha256_end(way, state, NULL, room, prefix_bytes + hash_bytes, prefix_bytes + hash_bytes);
    sha256_bytes(state, key);
}

#endif
