/* SHA-256 (FIPS 180-4), as much of it as chaining needs: whole blocks, and the end of a message. By the processor's own instructions where it
 * has them (x86-64 SHA, arm64 SHA2), in plain C elsewhere; `sha256_best` asks the processor.
 */
#ifndef LMCACHE_CORE_SHA256_H
#define LMCACHE_CORE_SHA256_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#include <sys/auxv.h>
#endif

enum { SHA256_BYTES = 32, SHA256_BLOCK_BYTES = 64, SHA256_END_BYTES = 72 };

/* Fold whole blocks of 64 bytes, of any alignment, into the state. With a `head`, its eight words stand for the first 32
 * bytes of the data: a digest is the next message's beginning in a chain, and so need not become bytes in between. */
typedef void sha256_blocks(uint32_t state[8], const uint32_t *head, const unsigned char *data, size_t blocks);

/* A way to do it, and the name of what it needs. */
typedef struct {
    sha256_blocks *blocks;
    const char *name;
} sha256_way;

/* --- the constants: fractional parts of the square and cube roots of the first primes --- */

static const uint32_t SHA256_START[8] = {
    0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19,
};

static const uint32_t SHA256_ROUND[64] __attribute__((aligned(16))) = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

/* --- plain C --- */

static inline uint32_t sha256_turned(uint32_t word, int by) { return word >> by | word << (32 - by); }

static inline uint32_t sha256_big_endian(const unsigned char *at) {
    return (uint32_t)at[0] << 24 | (uint32_t)at[1] << 16 | (uint32_t)at[2] << 8 | at[3];
}

static void sha256_blocks_plain(uint32_t state[8], const uint32_t *head, const unsigned char *data, size_t blocks) {
    for (; blocks > 0; blocks--, data += SHA256_BLOCK_BYTES, head = NULL) {
        uint32_t w[64];
        for (int t = 0; t < 16; t++)
            w[t] = head != NULL && t < 8 ? head[t] : sha256_big_endian(data + 4 * t);
        for (int t = 16; t < 64; t++) {
            uint32_t near = sha256_turned(w[t - 2], 17) ^ sha256_turned(w[t - 2], 19) ^ w[t - 2] >> 10;
            uint32_t far = sha256_turned(w[t - 15], 7) ^ sha256_turned(w[t - 15], 18) ^ w[t - 15] >> 3;
            w[t] = near + w[t - 7] + far + w[t - 16];
        }
        uint32_t a = state[0], b = state[1], c = state[2], d = state[3];
        uint32_t e = state[4], f = state[5], g = state[6], h = state[7];
        for (int t = 0; t < 64; t++) {
            uint32_t mixed = sha256_turned(e, 6) ^ sha256_turned(e, 11) ^ sha256_turned(e, 25);
            uint32_t one = h + mixed + ((e & f) ^ (~e & g)) + SHA256_ROUND[t] + w[t];
            uint32_t other = sha256_turned(a, 2) ^ sha256_turned(a, 13) ^ sha256_turned(a, 22);
            uint32_t two = other + ((a & b) ^ (a & c) ^ (b & c));
            h = g, g = f, f = e, e = d + one;
            d = c, c = b, b = a, a = one + two;
        }
        state[0] += a, state[1] += b, state[2] += c, state[3] += d;
        state[4] += e, state[5] += f, state[6] += g, state[7] += h;
    }
}

/* --- x86-64: sha256rnds2 does two rounds, on the state kept as (f e b a) and (h g d c) --- */

#if defined(__x86_64__)
#define SHA256_HARDWARE "x86-64 SHA"

#define SHA256_TARGET __attribute__((target("sha,sse4.1")))

SHA256_TARGET static void sha256_blocks_hardware(uint32_t state[8], const uint32_t *head, const unsigned char *data,
                                                 size_t blocks) {
    const __m128i big_endian = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
    const __m128i *rounds = (const __m128i *)SHA256_ROUND;
    __m128i badc = _mm_shuffle_epi32(_mm_loadu_si128((const __m128i *)state), 0xb1);
    __m128i fehg = _mm_shuffle_epi32(_mm_loadu_si128((const __m128i *)(state + 4)), 0xb1);
    __m128i abef = _mm_unpacklo_epi64(fehg, badc), cdgh = _mm_unpackhi_epi64(fehg, badc);
    for (; blocks > 0; blocks--, data += SHA256_BLOCK_BYTES, head = NULL) {
        const __m128i abef_before = abef, cdgh_before = cdgh;
        __m128i w[4]; /* the sixteen words of the schedule that the coming rounds need */
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++)
            w[i] = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)data + i), big_endian);
        if (head != NULL) {
            w[0] = _mm_loadu_si128((const __m128i *)head);
            w[1] = _mm_loadu_si128((const __m128i *)head + 1);
        }
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) {
            __m128i fed = _mm_add_epi32(w[i & 3], _mm_load_si128(rounds + i));
            cdgh = _mm_sha256rnds2_epu32(cdgh, abef, fed);
            abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(fed, 0x0e));
            if (i < 12) {
                __m128i last = w[(i + 3) & 3], seventh = _mm_alignr_epi8(last, w[(i + 2) & 3], 4);
                __m128i sum = _mm_add_epi32(_mm_sha256msg1_epu32(w[i & 3], w[(i + 1) & 3]), seventh);
                w[i & 3] = _mm_sha256msg2_epu32(sum, last);
            }
        }
        abef = _mm_add_epi32(abef, abef_before);
        cdgh = _mm_add_epi32(cdgh, cdgh_before);
    }
    badc = _mm_unpackhi_epi64(abef, cdgh), fehg = _mm_unpacklo_epi64(abef, cdgh);
    _mm_storeu_si128((__m128i *)state, _mm_shuffle_epi32(badc, 0xb1));
    _mm_storeu_si128((__m128i *)(state + 4), _mm_shuffle_epi32(fehg, 0xb1));
}

static inline int sha256_has_hardware(void) {
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_SSSE3) || !(c & bit_SSE4_1))
        return 0;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & 1u << 29);
}

/* --- arm64: sha256h and sha256h2 do four rounds, on (a b c d) and (e f g h) --- */

#elif defined(__aarch64__)
#define SHA256_HARDWARE "arm64 SHA2"
#if defined(__clang__)
#define SHA256_TARGET __attribute__((target("sha2")))
#else
#define SHA256_TARGET __attribute__((target("+crypto")))
#endif

SHA256_TARGET static void sha256_blocks_hardware(uint32_t state[8], const uint32_t *head, const unsigned char *data,
                                                 size_t blocks) {
    uint32x4_t abcd = vld1q_u32(state), efgh = vld1q_u32(state + 4);
    for (; blocks > 0; blocks--, data += SHA256_BLOCK_BYTES, head = NULL) {
        const uint32x4_t abcd_before = abcd, efgh_before = efgh;
        uint32x4_t w[4];
        for (int i = 0; i < 4; i++)
            w[i] = vreinterpretq_u32_u8(vrev32q_u8(vld1q_u8(data + 16 * i)));
        if (head != NULL) {
            w[0] = vld1q_u32(head);
            w[1] = vld1q_u32(head + 4);
        }
        for (int i = 0; i < 16; i++) {
            const uint32x4_t fed = vaddq_u32(w[i & 3], vld1q_u32(SHA256_ROUND + 4 * i)), old = abcd;
            abcd = vsha256hq_u32(abcd, efgh, fed);
            efgh = vsha256h2q_u32(efgh, old, fed);
            if (i < 12)
                w[i & 3] = vsha256su1q_u32(vsha256su0q_u32(w[i & 3], w[(i + 1) & 3]), w[(i + 2) & 3], w[(i + 3) & 3]);
        }
        abcd = vaddq_u32(abcd, abcd_before);
        efgh = vaddq_u32(efgh, efgh_before);
    }
    vst1q_u32(state, abcd);
    vst1q_u32(state + 4, efgh);
}

static inline int sha256_has_hardware(void) { return (getauxval(AT_HWCAP) & 1u << 6) != 0; /* HWCAP_SHA2 */ }
#endif

/* The quickest way that this processor can go. */
static inline sha256_way sha256_best(void) {
#ifdef SHA256_HARDWARE
    if (sha256_has_hardware())
        return (sha256_way){sha256_blocks_hardware, SHA256_HARDWARE};
#endif
    return (sha256_way){sha256_blocks_plain, "plain C"};
}

/* --- ends --- */

/* End a message of `total_bytes`: whole blocks of it are in the state, the other `used` bytes stand in `room` (the first
 * 32 perhaps in `head`), which has room for SHA256_END_BYTES more. The state becomes the digest's words. */
static inline void sha256_end(sha256_way way, uint32_t state[8], const uint32_t *head, unsigned char *room, size_t used,
                              uint64_t total_bytes) {
    const size_t blocks = (used + 1 + 8 + SHA256_BLOCK_BYTES - 1) / SHA256_BLOCK_BYTES;
    const uint64_t bits = __builtin_bswap64(total_bytes * 8);
    room[used] = 0x80;
    memset(room + used + 1, 0, blocks * SHA256_BLOCK_BYTES - 8 - used - 1);
    memcpy(room + blocks * SHA256_BLOCK_BYTES - 8, &bits, 8);
    way.blocks(state, head, room, blocks);
}

/* The digest as bytes. */
static inline void sha256_bytes(const uint32_t state[8], unsigned char digest[SHA256_BYTES]) {
    for (int i = 0; i < 8; i++) {
        uint32_t word = __builtin_bswap32(state[i]);
        memcpy(digest + 4 * i, &word, 4);
    }
}

#endif
