/* The kernels for processors with AVX2 and F16C. Nothing here runs unless module.c has asked the processor. */
#if defined(__x86_64__)
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#include "blend.h"

#define TARGET __attribute__((target("avx2,f16c")))
#define FLOAT_OF_HALF(word) _cvtsh_ss(word)
#define HALF_OF_FLOAT(value) _cvtss_sh(value, 0)
#define EIGHT static inline __attribute__((always_inline)) TARGET

EIGHT __m256 load(int kind, const uint8_t *row, size_t at) {
    if (kind == BLEND_F32)
        return _mm256_loadu_ps((const void *)(row + 4 * at));
    const __m128i words = _mm_loadu_si128((const void *)(row + 2 * at));
    if (kind == BLEND_F16)
        return _mm256_cvtph_ps(words);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(words), 16));
}

EIGHT __m256i rounded(__m256 values) { /* as put_value does, in the high half of each word */
    const __m256i bits = _mm256_castps_si256(values), odd = _mm256_srli_epi32(_mm256_slli_epi32(bits, 15), 31);
    return _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), odd);
}

EIGHT __m256 apart(const float *floats) { /* four, and the four that come four behind them */
    return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(floats)), _mm_loadu_ps(floats + 8), 1);
}

EIGHT void store(int kind, uint8_t *row, size_t at, __m256 values) {
    if (kind == BLEND_F32) {
        _mm256_storeu_ps((void *)(row + 4 * at), values);
    } else if (kind == BLEND_F16) {
        _mm_storeu_si128((void *)(row + 2 * at), _mm256_cvtps_ph(values, 0));
    } else {
        const __m256i words = _mm256_srli_epi32(rounded(values), 16);
        _mm_storeu_si128((void *)(row + 2 * at), _mm_packus_epi32(_mm256_castsi256_si128(words),
                                                                  _mm256_extracti128_si256(words, 1)));
    }
}

#define FIRST_OF(x, y, c, s) _mm256_sub_ps(_mm256_mul_ps(x, c), _mm256_mul_ps(y, s))
#define SECOND_OF(x, y, c, s) _mm256_add_ps(_mm256_mul_ps(y, c), _mm256_mul_ps(x, s))

EIGHT size_t halves_first(int kind, const uint8_t *source, uint8_t *target, const float *cosines, const float *sines,
                          size_t pairs) {
    size_t p = 0;
    const __m256i zero = _mm256_setzero_si256();
    for (; kind == BLEND_BF16 && p + 16 <= pairs; p += 16) {
        /* Unpacking and packing both work on halves of registers, so cosines and sines come in the order between. */
        const __m256i xs = _mm256_loadu_si256((const void *)(source + 2 * p));
        const __m256i ys = _mm256_loadu_si256((const void *)(source + 2 * (p + pairs)));
        const __m256 x = _mm256_castsi256_ps(_mm256_unpacklo_epi16(zero, xs));
        const __m256 y = _mm256_castsi256_ps(_mm256_unpacklo_epi16(zero, ys));
        const __m256 c = apart(cosines + p), s = apart(sines + p);
        const __m256 x_high = _mm256_castsi256_ps(_mm256_unpackhi_epi16(zero, xs));
        const __m256 y_high = _mm256_castsi256_ps(_mm256_unpackhi_epi16(zero, ys));
        const __m256 c_high = apart(cosines + p + 4), s_high = apart(sines + p + 4);
        const __m256i first = _mm256_packus_epi32(
            _mm256_srli_epi32(rounded(FIRST_OF(x, y, c, s)), 16),
            _mm256_srli_epi32(rounded(FIRST_OF(x_high, y_high, c_high, s_high)), 16));
        const __m256i second = _mm256_packus_epi32(
            _mm256_srli_epi32(rounded(SECOND_OF(x, y, c, s)), 16),
            _mm256_srli_epi32(rounded(SECOND_OF(x_high, y_high, c_high, s_high)), 16));
        _mm256_storeu_si256((void *)(target + 2 * p), first);
        _mm256_storeu_si256((void *)(target + 2 * (p + pairs)), second);
    }
    for (; p + 8 <= pairs; p += 8) {
        const __m256 x = load(kind, source, p), y = load(kind, source, p + pairs);
        const __m256 c = _mm256_loadu_ps(cosines + p), s = _mm256_loadu_ps(sines + p);
        store(kind, target, p, FIRST_OF(x, y, c, s));
        store(kind, target, p + pairs, SECOND_OF(x, y, c, s));
    }
    return p;
}

/* Eight pairs of bf16 are eight words, the first of each pair in the low half. Else four pairs at once: x0 y0 x1 y1 …
 * times c0 c0 c1 c1 …, and y0 x0 y1 x1 … times s0 s0 s1 s1 …, subtracted where the first of a pair is made and added
 * where the other is. */
EIGHT size_t neighbours_first(int kind, const uint8_t *source, uint8_t *target, const float *cosines,
                              const float *sines, size_t pairs) {
    const __m256i twice = _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3);
    size_t p = 0;
    for (; kind == BLEND_BF16 && p + 8 <= pairs; p += 8) {
        const __m256i words = _mm256_loadu_si256((const void *)(source + 4 * p));
        const __m256 x = _mm256_castsi256_ps(_mm256_slli_epi32(words, 16));
        const __m256 y = _mm256_castsi256_ps(_mm256_and_si256(words, _mm256_set1_epi32((int)0xFFFF0000)));
        const __m256 c = _mm256_loadu_ps(cosines + p), s = _mm256_loadu_ps(sines + p);
        const __m256i first = _mm256_srli_epi32(rounded(FIRST_OF(x, y, c, s)), 16);
        _mm256_storeu_si256((void *)(target + 4 * p),
                            _mm256_blend_epi16(first, rounded(SECOND_OF(x, y, c, s)), 0xAA));
    }
    for (; p + 4 <= pairs; p += 4) {
        const __m256 values = load(kind, source, 2 * p), swapped = _mm256_permute_ps(values, 0xB1);
        const __m256 c = _mm256_permutevar8x32_ps(_mm256_castps128_ps256(_mm_loadu_ps(cosines + p)), twice);
        const __m256 s = _mm256_permutevar8x32_ps(_mm256_castps128_ps256(_mm_loadu_ps(sines + p)), twice);
        store(kind, target, 2 * p, _mm256_addsub_ps(_mm256_mul_ps(values, c), _mm256_mul_ps(swapped, s)));
    }
    return p;
}

#define HALVES_FIRST halves_first
#define NEIGHBOURS_FIRST neighbours_first
#include "kernels.h"

const blend_kernels blend_avx2 = KERNELS("avx2");
#endif
