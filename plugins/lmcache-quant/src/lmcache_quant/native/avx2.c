/* The kernels for processors with AVX2 and F16C. Nothing here runs unless module.c has asked the processor. FMA stays
 * off: it would round once where the plain kernels round twice. */
#if defined(__x86_64__)
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#include "quant.h"

#define TARGET __attribute__((target("avx2,f16c")))
#define INLINED static inline __attribute__((always_inline)) TARGET

INLINED void floats_of_halves(const uint8_t *row, size_t n, float *floats) {
    size_t d = 0;
    for (; d + 8 <= n; d += 8)
        _mm256_storeu_ps(floats + d, _mm256_cvtph_ps(_mm_loadu_si128((const void *)(row + 2 * d))));
    for (; d < n; d++) {
        uint16_t half;
        memcpy(&half, row + 2 * d, 2);
        floats[d] = _cvtsh_ss(half);
    }
}

INLINED void halves_of_floats(const float *floats, size_t n, uint8_t *row) {
    size_t d = 0;
    for (; d + 8 <= n; d += 8)
        _mm_storeu_si128((void *)(row + 2 * d), _mm256_cvtps_ph(_mm256_loadu_ps(floats + d), 0));
    for (; d < n; d++) {
        uint16_t half = _cvtss_sh(floats[d], 0);
        memcpy(row + 2 * d, &half, 2);
    }
}

/* The bounds of the whole vectors of a row of 16-bit keys: see WIDEN. */
INLINED size_t row_first16(int nibbles, const uint8_t *row, size_t n, int16_t *low, int16_t *high) {
    const __m256i magnitude = _mm256_set1_epi16(INT16_MAX);
    const __m128i lowest_first = _mm_set1_epi16(INT16_MIN), greatest_first = _mm_set1_epi16(INT16_MAX);
    __m256i lows = magnitude, highs = _mm256_set1_epi16(INT16_MIN);
    size_t d = 0;
    for (; d + 16 <= n; d += 16) {
        __m256i word = _mm256_loadu_si256((const void *)(row + 2 * d));
        if (nibbles) {
            word = _mm256_xor_si256(word, _mm256_and_si256(_mm256_srai_epi16(word, 15), magnitude));
            lows = _mm256_min_epi16(lows, word);
        } else {
            word = _mm256_and_si256(word, magnitude);
        }
        highs = _mm256_max_epi16(highs, word);
    }
    if (d) { /* the processor finds the least of eight unsigned words: signs are turned for it */
        __m128i half = _mm_max_epi16(_mm256_castsi256_si128(highs), _mm256_extracti128_si256(highs, 1));
        *high = (int16_t)(_mm_extract_epi16(_mm_minpos_epu16(_mm_xor_si128(half, greatest_first)), 0) ^ INT16_MAX);
        half = _mm_min_epi16(_mm256_castsi256_si128(lows), _mm256_extracti128_si256(lows, 1));
        *low = (int16_t)(_mm_extract_epi16(_mm_minpos_epu16(_mm_xor_si128(half, lowest_first)), 0) ^ 0x8000);
    }
    return d;
}

INLINED __m256 eight_floats(int dtype, const uint8_t *row, size_t at) {
    if (dtype == QUANT_F32)
        return _mm256_loadu_ps((const float *)(const void *)(row + 4 * at));
    return _mm256_castsi256_ps(
        _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)(row + 2 * at))), 16));
}

INLINED __m256 eight_of(const float *grids, size_t at, size_t each) {
    return each ? _mm256_loadu_ps(grids + at) : _mm256_set1_ps(grids[0]);
}

/* Of 32 values, in their order. Rounds to even, as set_float_mode asks for. */
INLINED __m256i codes_of_32(int dtype, const uint8_t *row, size_t at, size_t each, const float *offset,
                            const float *inverse) {
    __m256i code[4];
    for (size_t part = 0; part < 4; part++) {
        size_t d = at + 8 * part;
        __m256 x = eight_floats(dtype, row, d);
        if (offset)
            x = _mm256_sub_ps(x, eight_of(offset, d, each));
        code[part] = _mm256_cvtps_epi32(_mm256_mul_ps(x, eight_of(inverse, d, each)));
    }
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7); /* packing works on halves of registers */
    return _mm256_permutevar8x32_epi32(
        _mm256_packs_epi16(_mm256_packs_epi32(code[0], code[1]), _mm256_packs_epi32(code[2], code[3])), order);
}

INLINED size_t to_int8_first(int dtype, const uint8_t *row, size_t n, size_t each, const float *inverse,
                             uint8_t *codes) {
    size_t d = 0;
    for (; d + 32 <= n; d += 32)
        _mm256_storeu_si256((void *)(codes + d), codes_of_32(dtype, row, d, each, NULL, inverse));
    return d;
}

INLINED size_t to_int4_first(int dtype, const uint8_t *row, size_t paired, size_t half, size_t each,
                             const float *offset, const float *inverse, uint8_t *codes) {
    size_t d = 0;
    for (; d + 32 <= paired; d += 32) {
        __m256i low = codes_of_32(dtype, row, d, each, offset, inverse);
        __m256i high = codes_of_32(dtype, row, d + half, each, offset, inverse);
        _mm256_storeu_si256((void *)(codes + d), _mm256_or_si256(low, _mm256_slli_epi16(high, 4)));
    }
    return d;
}

#define FLOATS_OF_HALVES floats_of_halves
#define HALVES_OF_FLOATS halves_of_floats
#define ROW_FIRST16 row_first16
#define ROW_FIRST32(nibbles, row, n, low, high) ((size_t)0)
#define TO_INT8_FIRST to_int8_first
#define TO_INT4_FIRST to_int4_first
#include "kernels.h"

const quant_kernels quant_avx2 = KERNELS("avx2");
#endif
