/* Copies between private memory and the pool, with or without a checksum on the way.
 *
 * A plain store first reads the line that it will overwrite. For a job that is larger than the caches, that is a third
 * of all traffic for nothing: streaming (non-temporal) stores avoid it. But they bypass the caches, so a small job,
 * whose target is soon read again, is copied with plain stores. arm64 needs no such choice: its cores detect that whole
 * lines are written, and skip the read.
 *
 * The source may change meanwhile: a reader of the pool copies first, then checks the generation, and throws the copy
 * away if it moved. Nothing here depends on what the bytes are. In C11 such a read is a race; builds for a thread
 * sanitizer copy word by word with relaxed atomics, which it understands.
 */
#ifndef LMCACHE_CORE_COPY_H
#define LMCACHE_CORE_COPY_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "xxh3.h"

#if defined(__SANITIZE_THREAD__)
#define COPY_WITNESSED 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define COPY_WITNESSED 1
#endif
#endif

/* Jobs of this size or more are streamed. */
#define COPY_STREAM_BYTES ((size_t)1 << 20)

#ifdef COPY_WITNESSED

#include <stdatomic.h>

/* Copy every byte once, with relaxed atomics as large as the alignment of both sides allows. */
static inline void copy_witnessed(unsigned char *to, const unsigned char *from, size_t n) {
    size_t i = 0;
    if (((uintptr_t)to | (uintptr_t)from) % 8 == 0)
        for (; i + 8 <= n; i += 8)
            __atomic_store_n((uint64_t *)(void *)(to + i),
                             __atomic_load_n((const uint64_t *)(const void *)(from + i), __ATOMIC_RELAXED),
                             __ATOMIC_RELAXED);
    for (; i < n; i++)
        __atomic_store_n(to + i, __atomic_load_n(from + i, __ATOMIC_RELAXED), __ATOMIC_RELAXED);
}

#endif

#if defined(__x86_64__)

/* `n` bytes, a multiple of 256, to a target aligned to 32. */
static inline __attribute__((target("avx2"))) void copy_streamed_avx2(unsigned char *to, const unsigned char *from,
                                                                      size_t n) {
    for (; n; n -= 256, to += 256, from += 256) {
        __m256i part[8];
        for (int i = 0; i < 4; i++) /* the hardware's prefetching stops at page ends; a hint never faults */
            _mm_prefetch((const char *)from + 1024 + 64 * i, _MM_HINT_T0);
        for (int i = 0; i < 8; i++)
            part[i] = _mm256_loadu_si256((const __m256i *)(const void *)(from + 32 * i));
        for (int i = 0; i < 8; i++)
            _mm256_stream_si256((__m256i *)(void *)(to + 32 * i), part[i]);
    }
}

static inline void copy_streamed_sse2(unsigned char *to, const unsigned char *from, size_t n) {
    for (; n; n -= 256, to += 256, from += 256) {
        __m128i part[16];
        for (int i = 0; i < 4; i++)
            _mm_prefetch((const char *)from + 1024 + 64 * i, _MM_HINT_T0);
        for (int i = 0; i < 16; i++)
            part[i] = _mm_loadu_si128((const __m128i *)(const void *)(from + 16 * i));
        for (int i = 0; i < 16; i++)
            _mm_stream_si128((__m128i *)(void *)(to + 16 * i), part[i]);
    }
}

static inline void copy_streamed(unsigned char *to, const unsigned char *from, size_t n) {
    size_t head = -(uintptr_t)to % 64;
    if (head > n)
        head = n;
    memcpy(to, from, head);
    size_t body = (n - head) / 256 * 256;
    if (__builtin_cpu_supports("avx2"))
        copy_streamed_avx2(to + head, from + head, body);
    else
        copy_streamed_sse2(to + head, from + head, body);
    memcpy(to + head + body, from + head + body, n - head - body);
    _mm_sfence(); /* streaming stores are weakly ordered: make them visible before anyone is told of the bytes */
}

#endif

/* Copy n bytes of a job of `job_bytes` in the best way for that job. After this returns, all bytes are visible to any
 * other process that is told of them. */
static inline void copy_bytes_of(void *to, const void *from, size_t n, size_t job_bytes) {
#if defined(COPY_WITNESSED)
    (void)job_bytes;
    copy_witnessed(to, from, n);
#elif defined(__x86_64__)
    if (job_bytes >= COPY_STREAM_BYTES)
        copy_streamed(to, from, n);
    else
        memcpy(to, from, n);
#else
    (void)job_bytes;
    memcpy(to, from, n);
#endif
}

/* The same for n bytes that are the whole job. */
static inline void copy_bytes(void *to, const void *from, size_t n) { copy_bytes_of(to, from, n, n); }

/* Copy n bytes of a job of `job_bytes`, and return their xxh3_64. If the source changes meanwhile, the checksum means
 * nothing. */
static inline uint64_t copy_checksum_of(void *to, const void *from, size_t n, size_t job_bytes) {
#if defined(COPY_WITNESSED)
    copy_bytes_of(to, from, n, job_bytes);
    return xxh3_64(to, n);
#else
    if (n <= XXH3_SHORT_MAX) {
        memcpy(to, from, n);
        return xxh3_64(to, n);
    }
    int how = job_bytes >= COPY_STREAM_BYTES ? XXH3_STREAM : XXH3_COPY;
    uint64_t checksum = xxh3_long(xxh3_chosen(how, to), how, to, from, n);
#if defined(__x86_64__)
    _mm_sfence();
#endif
    return checksum;
#endif
}

static inline uint64_t copy_checksum(void *to, const void *from, size_t n) { return copy_checksum_of(to, from, n, n); }

#endif
