/* xxh3_64 with seed 0 and the default secret: the checksum of objects, in the pool and on tiers.
 *
 * Written from the published specification; gives the same results as the `xxhash` package. Up to 240 bytes it is
 * scalar. Longer inputs go through eight 64-bit lanes in stripes of 64 bytes, scrambled after each block of 16 stripes.
 * That loop has an AVX2, an SSE2, a NEON and a portable form, chosen at run time. Each form can also copy the bytes,
 * because it has them in registers: the checksum of a copy then costs next to nothing.
 */
#ifndef LMCACHE_CORE_XXH3_H
#define LMCACHE_CORE_XXH3_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the pool's words are little-endian, and so is this code"
#endif

enum {
    XXH3_SECRET_BYTES = 192,
    XXH3_STRIPE_BYTES = 64,
    XXH3_STRIPES = 16, /* in a block: each uses the secret 8 bytes further on, until its end */
    XXH3_BLOCK_BYTES = XXH3_STRIPES * XXH3_STRIPE_BYTES,
    XXH3_SCRAMBLE_AT = XXH3_SECRET_BYTES - XXH3_STRIPE_BYTES,
    XXH3_LAST_AT = XXH3_SECRET_BYTES - XXH3_STRIPE_BYTES - 7,
    XXH3_SHORT_MAX = 240,
};

/* What the long loop does with the bytes besides hashing them. */
enum {
    XXH3_HASH = 0,
    XXH3_COPY = 1,
    XXH3_STREAM = 2, /* bypasses the caches: the target is aligned to 32 bytes for AVX2, to 16 for SSE2 */
};

#define XXH3_P32_1 0x9E3779B1u
#define XXH3_P32_2 0x85EBCA77u
#define XXH3_P32_3 0xC2B2AE3Du
#define XXH3_P64_1 0x9E3779B185EBCA87u
#define XXH3_P64_2 0xC2B2AE3D27D4EB4Fu
#define XXH3_P64_3 0x165667B19E3779F9u
#define XXH3_P64_4 0x85EBCA77C2B2AE63u
#define XXH3_P64_5 0x27D4EB2F165667C5u
#define XXH3_MIX_1 0x165667919E3779F9u
#define XXH3_MIX_2 0x9FB21C651E98DF25u

_Alignas(64) static const unsigned char xxh3_secret[XXH3_SECRET_BYTES] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

/* --- words ------------------------------------------------------------------------------------------------ */

static inline uint64_t xxh3_u64(const unsigned char *p) {
    uint64_t word;
    memcpy(&word, p, 8);
    return word;
}

static inline uint32_t xxh3_u32(const unsigned char *p) {
    uint32_t word;
    memcpy(&word, p, 4);
    return word;
}

static inline uint64_t xxh3_rotated(uint64_t word, int bits) { return word << bits | word >> (64 - bits); }

/* Both halves of a 128-bit product, folded into one word. */
static inline uint64_t xxh3_folded(uint64_t a, uint64_t b) {
    unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static inline uint64_t xxh3_avalanche(uint64_t h) {
    h ^= h >> 37;
    h *= XXH3_MIX_1;
    return h ^ h >> 32;
}

/* The finish of the older 64-bit hash, which the shortest inputs use. */
static inline uint64_t xxh3_avalanche_short(uint64_t h) {
    h ^= h >> 33;
    h *= XXH3_P64_2;
    h ^= h >> 29;
    h *= XXH3_P64_3;
    return h ^ h >> 32;
}

static inline uint64_t xxh3_mixed(const unsigned char *p, size_t secret_at) {
    const unsigned char *secret = xxh3_secret + secret_at;
    return xxh3_folded(xxh3_u64(p) ^ xxh3_u64(secret), xxh3_u64(p + 8) ^ xxh3_u64(secret + 8));
}

/* --- up to 240 bytes -------------------------------------------------------------------------------------- */

static inline uint64_t xxh3_to_16(const unsigned char *p, size_t n) {
    if (n > 8) {
        uint64_t low = xxh3_u64(p) ^ xxh3_u64(xxh3_secret + 24) ^ xxh3_u64(xxh3_secret + 32);
        uint64_t high = xxh3_u64(p + n - 8) ^ xxh3_u64(xxh3_secret + 40) ^ xxh3_u64(xxh3_secret + 48);
        return xxh3_avalanche(n + __builtin_bswap64(low) + high + xxh3_folded(low, high));
    }
    if (n >= 4) {
        uint64_t h = xxh3_u32(p + n - 4) + ((uint64_t)xxh3_u32(p) << 32);
        h ^= xxh3_u64(xxh3_secret + 8) ^ xxh3_u64(xxh3_secret + 16);
        h ^= xxh3_rotated(h, 49) ^ xxh3_rotated(h, 24);
        h *= XXH3_MIX_2;
        h ^= (h >> 35) + n;
        h *= XXH3_MIX_2;
        return h ^ h >> 28;
    }
    if (n) {
        uint32_t h = (uint32_t)p[0] << 16 | (uint32_t)p[n >> 1] << 24 | p[n - 1] | (uint32_t)n << 8;
        return xxh3_avalanche_short((uint64_t)(h ^ xxh3_u32(xxh3_secret) ^ xxh3_u32(xxh3_secret + 4)));
    }
    return xxh3_avalanche_short(xxh3_u64(xxh3_secret + 56) ^ xxh3_u64(xxh3_secret + 64));
}

static inline uint64_t xxh3_to_240(const unsigned char *p, size_t n) {
    uint64_t h = n * XXH3_P64_1;
    if (n <= 128) { /* pairs of 16 bytes, one from each end, towards the middle */
        for (size_t i = (n - 1) / 32 + 1; i-- > 0;) {
            h += xxh3_mixed(p + 16 * i, 32 * i);
            h += xxh3_mixed(p + n - 16 * (i + 1), 32 * i + 16);
        }
        return xxh3_avalanche(h);
    }
    for (size_t i = 0; i < 8; i++)
        h += xxh3_mixed(p + 16 * i, 16 * i);
    h = xxh3_avalanche(h);
    for (size_t i = 8; i < n / 16; i++)
        h += xxh3_mixed(p + 16 * i, 16 * (i - 8) + 3);
    h += xxh3_mixed(p + n - 16, 136 - 17);
    return xxh3_avalanche(h);
}

/* --- the long loop ---------------------------------------------------------------------------------------- */

/* Every form of it takes `stripes` stripes of `from` into the lanes, starting at a block, and scrambles after each full
 * block. With `how` other than XXH3_HASH, it also writes the bytes to `to`. `how` is a constant at each call. */

static inline __attribute__((always_inline)) void xxh3_stripes_portable(uint64_t lanes[8], const unsigned char *from,
                                                                        size_t stripes, unsigned char *to, int how) {
    for (size_t stripe = 0; stripe < stripes; stripe++, from += XXH3_STRIPE_BYTES) {
        const unsigned char *secret = xxh3_secret + 8 * (stripe % XXH3_STRIPES);
        uint64_t words[8];
        memcpy(words, from, sizeof words);
        if (how != XXH3_HASH) {
            memcpy(to, words, sizeof words);
            to += XXH3_STRIPE_BYTES;
        }
        for (int i = 0; i < 8; i++) {
            uint64_t keyed = words[i] ^ xxh3_u64(secret + 8 * i);
            lanes[i ^ 1] += words[i];
            lanes[i] += (keyed & 0xFFFFFFFFu) * (keyed >> 32);
        }
        if (stripe % XXH3_STRIPES == XXH3_STRIPES - 1)
            for (int i = 0; i < 8; i++) {
                uint64_t lane = lanes[i] ^ lanes[i] >> 47 ^ xxh3_u64(xxh3_secret + XXH3_SCRAMBLE_AT + 8 * i);
                lanes[i] = lane * XXH3_P32_1;
            }
    }
}

#if defined(__x86_64__)

static inline __attribute__((always_inline, target("avx2"))) __m256i xxh3_taken_avx2(__m256i lanes, __m256i words,
                                                                                    const unsigned char *secret) {
    __m256i keyed = _mm256_xor_si256(words, _mm256_loadu_si256((const __m256i *)(const void *)secret));
    __m256i product = _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32));
    __m256i swapped = _mm256_shuffle_epi32(words, _MM_SHUFFLE(1, 0, 3, 2));
    return _mm256_add_epi64(lanes, _mm256_add_epi64(product, swapped));
}

static inline __attribute__((always_inline, target("avx2"))) __m256i xxh3_scrambled_avx2(__m256i lanes,
                                                                                        const unsigned char *secret) {
    __m256i prime = _mm256_set1_epi32((int)XXH3_P32_1);
    lanes = _mm256_xor_si256(lanes, _mm256_srli_epi64(lanes, 47));
    lanes = _mm256_xor_si256(lanes, _mm256_loadu_si256((const __m256i *)(const void *)secret));
    __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(lanes, 32), prime);
    return _mm256_add_epi64(_mm256_mul_epu32(lanes, prime), _mm256_slli_epi64(high, 32));
}

static inline __attribute__((always_inline, target("avx2"))) void
xxh3_stripes_avx2(uint64_t lanes[8], const unsigned char *from, size_t stripes, unsigned char *to, int how) {
    __m256i low = _mm256_loadu_si256((const __m256i *)(const void *)lanes);
    __m256i high = _mm256_loadu_si256((const __m256i *)(const void *)(lanes + 4));
    while (stripes) {
        size_t count = stripes < XXH3_STRIPES ? stripes : XXH3_STRIPES;
        const unsigned char *secret = xxh3_secret;
        for (size_t i = 0; i < count; i++, secret += 8, from += XXH3_STRIPE_BYTES) {
            /* The hardware's own prefetching stops at pages; a hint faults nowhere. */
            _mm_prefetch((const char *)from + 1024, _MM_HINT_T0);
            __m256i a = _mm256_loadu_si256((const __m256i *)(const void *)from);
            __m256i b = _mm256_loadu_si256((const __m256i *)(const void *)(from + 32));
            if (how == XXH3_STREAM) {
                _mm256_stream_si256((__m256i *)(void *)to, a);
                _mm256_stream_si256((__m256i *)(void *)(to + 32), b);
                to += XXH3_STRIPE_BYTES;
            } else if (how == XXH3_COPY) {
                _mm256_storeu_si256((__m256i *)(void *)to, a);
                _mm256_storeu_si256((__m256i *)(void *)(to + 32), b);
                to += XXH3_STRIPE_BYTES;
            }
            low = xxh3_taken_avx2(low, a, secret);
            high = xxh3_taken_avx2(high, b, secret + 32);
        }
        if (count == XXH3_STRIPES) {
            low = xxh3_scrambled_avx2(low, xxh3_secret + XXH3_SCRAMBLE_AT);
            high = xxh3_scrambled_avx2(high, xxh3_secret + XXH3_SCRAMBLE_AT + 32);
        }
        stripes -= count;
    }
    _mm256_storeu_si256((__m256i *)(void *)lanes, low);
    _mm256_storeu_si256((__m256i *)(void *)(lanes + 4), high);
}

static inline __attribute__((always_inline)) void xxh3_stripes_sse2(uint64_t lanes[8], const unsigned char *from,
                                                                    size_t stripes, unsigned char *to, int how) {
    __m128i part[4], prime = _mm_set1_epi32((int)XXH3_P32_1);
    for (int i = 0; i < 4; i++)
        part[i] = _mm_loadu_si128((const __m128i *)(const void *)(lanes + 2 * i));
    for (size_t stripe = 0; stripe < stripes; stripe++) {
        const unsigned char *secret = xxh3_secret + 8 * (stripe % XXH3_STRIPES);
        for (int i = 0; i < 4; i++, from += 16) {
            __m128i words = _mm_loadu_si128((const __m128i *)(const void *)from);
            if (how == XXH3_STREAM)
                _mm_stream_si128((__m128i *)(void *)to, words);
            else if (how == XXH3_COPY)
                _mm_storeu_si128((__m128i *)(void *)to, words);
            if (how != XXH3_HASH)
                to += 16;
            __m128i keyed = _mm_xor_si128(words, _mm_loadu_si128((const __m128i *)(const void *)(secret + 16 * i)));
            __m128i product = _mm_mul_epu32(keyed, _mm_srli_epi64(keyed, 32));
            __m128i swapped = _mm_shuffle_epi32(words, _MM_SHUFFLE(1, 0, 3, 2));
            part[i] = _mm_add_epi64(part[i], _mm_add_epi64(product, swapped));
        }
        if (stripe % XXH3_STRIPES == XXH3_STRIPES - 1)
            for (int i = 0; i < 4; i++) {
                __m128i key = _mm_loadu_si128((const __m128i *)(const void *)(xxh3_secret + XXH3_SCRAMBLE_AT + 16 * i));
                __m128i lane = _mm_xor_si128(_mm_xor_si128(part[i], _mm_srli_epi64(part[i], 47)), key);
                __m128i high = _mm_mul_epu32(_mm_srli_epi64(lane, 32), prime);
                part[i] = _mm_add_epi64(_mm_mul_epu32(lane, prime), _mm_slli_epi64(high, 32));
            }
    }
    for (int i = 0; i < 4; i++)
        _mm_storeu_si128((__m128i *)(void *)(lanes + 2 * i), part[i]);
}

#elif defined(__aarch64__)

static inline __attribute__((always_inline)) void xxh3_stripes_neon(uint64_t lanes[8], const unsigned char *from,
                                                                    size_t stripes, unsigned char *to, int how) {
    uint64x2_t part[4];
    for (int i = 0; i < 4; i++)
        part[i] = vld1q_u64(lanes + 2 * i);
    for (size_t stripe = 0; stripe < stripes; stripe++) {
        const unsigned char *secret = xxh3_secret + 8 * (stripe % XXH3_STRIPES);
        for (int i = 0; i < 4; i++, from += 16) {
            uint8x16_t bytes = vld1q_u8(from);
            if (how != XXH3_HASH) {
                vst1q_u8(to, bytes);
                to += 16;
            }
            uint64x2_t words = vreinterpretq_u64_u8(bytes);
            uint64x2_t keyed = veorq_u64(words, vreinterpretq_u64_u8(vld1q_u8(secret + 16 * i)));
            part[i] = vaddq_u64(part[i], vextq_u64(words, words, 1));
            part[i] = vmlal_u32(part[i], vmovn_u64(keyed), vshrn_n_u64(keyed, 32));
        }
        if (stripe % XXH3_STRIPES == XXH3_STRIPES - 1)
            for (int i = 0; i < 4; i++) {
                uint64x2_t key = vreinterpretq_u64_u8(vld1q_u8(xxh3_secret + XXH3_SCRAMBLE_AT + 16 * i));
                uint64x2_t lane = veorq_u64(veorq_u64(part[i], vshrq_n_u64(part[i], 47)), key);
                uint32x2_t prime = vdup_n_u32(XXH3_P32_1);
                uint64x2_t high = vshlq_n_u64(vmull_u32(vshrn_n_u64(lane, 32), prime), 32);
                part[i] = vmlal_u32(high, vmovn_u64(lane), prime);
            }
    }
    for (int i = 0; i < 4; i++)
        vst1q_u64(lanes + 2 * i, part[i]);
}

#endif

/* One function per form and use of the bytes, so that `how` is a constant in each. */
typedef void xxh3_stripes(uint64_t lanes[8], const unsigned char *from, size_t stripes, unsigned char *to);

#define XXH3_FORM(form, name, how, attributes)                                                                        \
    attributes static void xxh3_##form##_##name(uint64_t lanes[8], const unsigned char *from, size_t stripes,         \
                                                unsigned char *to) {                                                  \
        xxh3_stripes_##form(lanes, from, stripes, to, how);                                                           \
    }
#define XXH3_FORMS(form, attributes)                                                                                  \
    XXH3_FORM(form, hash, XXH3_HASH, attributes)                                                                      \
    XXH3_FORM(form, copy, XXH3_COPY, attributes)                                                                      \
    XXH3_FORM(form, stream, XXH3_STREAM, attributes)

XXH3_FORMS(portable, __attribute__((unused)))
#if defined(__x86_64__)
XXH3_FORMS(avx2, __attribute__((target("avx2"))))
XXH3_FORMS(sse2, )
#elif defined(__aarch64__)
XXH3_FORMS(neon, )
#endif

/* The best form of this processor for that use. A stream to a target that is not aligned for it becomes a copy. */
static inline xxh3_stripes *xxh3_chosen(int how, const void *to) {
#if defined(__x86_64__)
    if (how == XXH3_STREAM && (uintptr_t)to % 16)
        how = XXH3_COPY;
    if (__builtin_cpu_supports("avx2") && !(how == XXH3_STREAM && (uintptr_t)to % 32))
        return how == XXH3_HASH ? xxh3_avx2_hash : how == XXH3_COPY ? xxh3_avx2_copy : xxh3_avx2_stream;
    return how == XXH3_HASH ? xxh3_sse2_hash : how == XXH3_COPY ? xxh3_sse2_copy : xxh3_sse2_stream;
#elif defined(__aarch64__)
    (void)to;
    return how == XXH3_HASH ? xxh3_neon_hash : how == XXH3_COPY ? xxh3_neon_copy : xxh3_neon_stream;
#else
    (void)to;
    return how == XXH3_HASH ? xxh3_portable_hash : how == XXH3_COPY ? xxh3_portable_copy : xxh3_portable_stream;
#endif
}

/* Finish the lanes when all stripes are taken. `last`: the last 64 of the n bytes. They are always a stripe of their
 * own, with their own secret. */
static inline uint64_t xxh3_finished(uint64_t lanes[8], const unsigned char *last, size_t n) {
    for (int i = 0; i < 8; i++) {
        uint64_t word = xxh3_u64(last + 8 * i);
        uint64_t keyed = word ^ xxh3_u64(xxh3_secret + XXH3_LAST_AT + 8 * i);
        lanes[i ^ 1] += word;
        lanes[i] += (keyed & 0xFFFFFFFFu) * (keyed >> 32);
    }
    uint64_t h = n * XXH3_P64_1;
    for (int i = 0; i < 8; i += 2)
        h += xxh3_folded(lanes[i] ^ xxh3_u64(xxh3_secret + 11 + 8 * i),
                         lanes[i + 1] ^ xxh3_u64(xxh3_secret + 19 + 8 * i));
    return xxh3_avalanche(h);
}

/* The checksum of n > 240 bytes by that form, which also writes the bytes to `to` unless it only hashes. */
static inline uint64_t xxh3_long(xxh3_stripes *take, int how, unsigned char *to, const unsigned char *from, size_t n) {
    uint64_t lanes[8] = {XXH3_P32_3, XXH3_P64_1, XXH3_P64_2, XXH3_P64_3,
                         XXH3_P64_4, XXH3_P32_2, XXH3_P64_5, XXH3_P32_1};
    size_t stripes = (n - 1) / XXH3_STRIPE_BYTES, taken = stripes * XXH3_STRIPE_BYTES;
    take(lanes, from, stripes, to);
    if (how != XXH3_HASH)
        memcpy(to + taken, from + taken, n - taken);
    return xxh3_finished(lanes, from + n - XXH3_STRIPE_BYTES, n);
}

static inline uint64_t xxh3_short(const unsigned char *p, size_t n) {
    return n <= 16 ? xxh3_to_16(p, n) : xxh3_to_240(p, n);
}

/* The checksum of n bytes. */
static inline uint64_t xxh3_64(const void *p, size_t n) {
    if (n <= XXH3_SHORT_MAX)
        return xxh3_short(p, n);
    return xxh3_long(xxh3_chosen(XXH3_HASH, NULL), XXH3_HASH, NULL, p, n);
}

#endif
