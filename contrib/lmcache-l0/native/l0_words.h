/* Hashing, and copies between private and shared memory.
 *
 * Shared bytes may change while they are read. That is by design: the check of the stamp rejects such a copy. In C11 it
 * is a race, and so undefined, unless the accesses are atomic. So shared memory is read and written in relaxed 8-byte
 * atomics, which cost the same as plain loads and stores, and which thread sanitizers understand. Keys and buffers in
 * the table are 8-aligned and padded to 8 bytes.
 */
#ifndef L0_WORDS_H
#define L0_WORDS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

static inline uint64_t l0_load_word(const unsigned char *shared) {
    return atomic_load_explicit((const _Atomic uint64_t *)(const void *)shared, memory_order_relaxed);
}

static inline void l0_store_word(unsigned char *shared, uint64_t word) {
    atomic_store_explicit((_Atomic uint64_t *)(void *)shared, word, memory_order_relaxed);
}

static inline uint64_t l0_unaligned(const unsigned char *p) {
    uint64_t w;
    memcpy(&w, p, 8);
    return w;
}

/* The first n (0..8) bytes of p as a word, the rest zero, never reading past them: two loads that may overlap,
 * because a memcpy of a length that the compiler does not know is a call. */
static inline uint64_t l0_tail_word(const unsigned char *p, size_t n) {
    if (n >= 8)
        return l0_unaligned(p);
    if (n >= 4) {
        uint32_t low, high;
        memcpy(&low, p, 4);
        memcpy(&high, p + n - 4, 4);
        return low | (uint64_t)high << (8 * (n - 4));
    }
    if (n >= 2) {
        uint16_t low, high;
        memcpy(&low, p, 2);
        memcpy(&high, p + n - 2, 2);
        return low | (uint64_t)high << (8 * (n - 2));
    }
    return n ? p[0] : 0;
}

static inline void l0_copy_out(unsigned char *private_to, const unsigned char *shared, size_t n) {
    size_t i = 0;
    for (; i + 32 <= n; i += 32) {
        uint64_t a = l0_load_word(shared + i), b = l0_load_word(shared + i + 8);
        uint64_t c = l0_load_word(shared + i + 16), d = l0_load_word(shared + i + 24);
        memcpy(private_to + i, &a, 8);
        memcpy(private_to + i + 8, &b, 8);
        memcpy(private_to + i + 16, &c, 8);
        memcpy(private_to + i + 24, &d, 8);
    }
    for (; i + 8 <= n; i += 8) {
        uint64_t a = l0_load_word(shared + i);
        memcpy(private_to + i, &a, 8);
    }
    if (i < n) {
        uint64_t a = l0_load_word(shared + i);
        memcpy(private_to + i, &a, n - i);
    }
}

static inline void l0_copy_in(unsigned char *shared, const unsigned char *private_from, size_t n) {
    size_t i = 0;
    for (; i + 32 <= n; i += 32) {
        uint64_t w[4];
        memcpy(w, private_from + i, 32);
        l0_store_word(shared + i, w[0]);
        l0_store_word(shared + i + 8, w[1]);
        l0_store_word(shared + i + 16, w[2]);
        l0_store_word(shared + i + 24, w[3]);
    }
    for (; i + 8 <= n; i += 8)
        l0_store_word(shared + i, l0_unaligned(private_from + i));
    if (i < n)
        l0_store_word(shared + i, l0_tail_word(private_from + i, n - i));
}

static inline bool l0_equal(const unsigned char *shared, const unsigned char *private_key, size_t n) {
    size_t i = 0;
    for (; i + 8 <= n; i += 8)
        if (l0_load_word(shared + i) != l0_unaligned(private_key + i))
            return false;
    /* Keys are stored with a zeroed tail, so the last word compares whole. */
    return i == n || l0_load_word(shared + i) == l0_tail_word(private_key + i, n - i);
}

static inline uint64_t l0_fold(uint64_t a, uint64_t b) {
    unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

/* Keyed by the table's random seed, so that nobody can prepare keys that all share one home. Little-endian tables only
 * (the header says so), so the words need no conversion. */
static inline uint64_t l0_hash(const unsigned char *key, size_t n, uint64_t seed) {
    uint64_t state = seed ^ (UINT64_C(0xa5bc01b5eaf65d07) * (n + 1));
    size_t i = 0;
    for (; i + 8 < n; i += 8)
        state = l0_fold(state ^ l0_unaligned(key + i), UINT64_C(0xfe07a7c2ff6c74b5) ^ seed >> 7);
    /* The last word overlaps the one before it where it can: the length is already in the state. */
    uint64_t last = n >= 8 ? l0_unaligned(key + n - 8) : l0_tail_word(key, n);
    state = l0_fold(state ^ last, UINT64_C(0xe3621863d48d1c67) ^ (seed << 9 | 1));
    return l0_fold(state ^ seed, UINT64_C(0xc04b32278b93df33));
}

static inline void l0_prefetch(const void *p) { __builtin_prefetch(p, 0, 3); }

#endif
