/* The kernels with AVX2 and F16C: the operations of kernels.h, eight lanes at a time, in the same order.
 *
 * The instruction sets are asked for function by function, so the file is built with the machine's base set and
 * nothing here runs unless the processor has said that it may. FMA stays off: see kernels.h.
 */
#include "kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define AVX2 __attribute__((target("avx2,f16c")))
#define AVX2_INLINE static inline __attribute__((always_inline, target("avx2,f16c")))
#define CODES_BIAS (NORMAL_MIN_BITS >> 20)

AVX2_INLINE uint32_t largest_u16(__m256i v) {
    /* minpos finds the least of eight: of the complements, that is the largest. */
    __m128i half = _mm_max_epu16(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    __m128i least = _mm_minpos_epu16(_mm_xor_si128(half, _mm_set1_epi16(-1)));
    return 0xFFFFu ^ (uint32_t)_mm_extract_epi16(least, 0);
}

AVX2_INLINE uint32_t absmax_u16(int dtype, const uint8_t *row, size_t n) {
    const __m256i magnitude = _mm256_set1_epi16(0x7FFF);
    __m256i a = _mm256_setzero_si256(), b = a;
    size_t i = 0;
    for (; i + 32 <= n; i += 32) {
        a = _mm256_max_epu16(a, _mm256_and_si256(magnitude, _mm256_loadu_si256((const void *)(row + 2 * i))));
        b = _mm256_max_epu16(b, _mm256_and_si256(magnitude, _mm256_loadu_si256((const void *)(row + 2 * i + 32))));
    }
    uint32_t most = largest_u16(_mm256_max_epu16(a, b));
    uint32_t rest = plain_absmax(dtype, row + 2 * i, n - i);
    return rest > most ? rest : most;
}

AVX2 static uint32_t absmax_bf16(const uint8_t *row, size_t n) { return absmax_u16(FP8_BF16, row, n); }
AVX2 static uint32_t absmax_fp16(const uint8_t *row, size_t n) { return absmax_u16(FP8_FP16, row, n); }

AVX2 static uint32_t absmax_fp32(const uint8_t *row, size_t n) {
    const __m256i magnitude = _mm256_set1_epi32(0x7FFFFFFF);
    __m256i a = _mm256_setzero_si256(), b = a;
    size_t i = 0;
    for (; i + 16 <= n; i += 16) {
        a = _mm256_max_epu32(a, _mm256_and_si256(magnitude, _mm256_loadu_si256((const void *)(row + 4 * i))));
        b = _mm256_max_epu32(b, _mm256_and_si256(magnitude, _mm256_loadu_si256((const void *)(row + 4 * i + 32))));
    }
    a = _mm256_max_epu32(a, b);
    __m128i four = _mm_max_epu32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    four = _mm_max_epu32(four, _mm_shuffle_epi32(four, 0x4E));
    four = _mm_max_epu32(four, _mm_shuffle_epi32(four, 0xB1));
    uint32_t most = (uint32_t)_mm_cvtsi128_si32(four);
    uint32_t rest = plain_absmax(FP8_FP32, row + 4 * i, n - i);
    return rest > most ? rest : most;
}

/* code_of without the sign, plus CODES_BIAS (taken away later, for more lanes at once). */
AVX2_INLINE __m256i biased_codes(__m256 scaled) {
    __m256i bits = _mm256_and_si256(_mm256_castps_si256(scaled), _mm256_set1_epi32(0x7FFFFFFF));
    __m256i power = _mm256_and_si256(bits, _mm256_set1_epi32((int)EXPONENT_BITS));
    power = _mm256_max_epi32(power, _mm256_set1_epi32((int)NORMAL_MIN_BITS));
    __m256i magic = _mm256_add_epi32(power, _mm256_set1_epi32((int)MAGIC_STEP));
    __m256 sum = _mm256_add_ps(_mm256_castsi256_ps(bits), _mm256_castsi256_ps(magic));
    __m256i steps = _mm256_sub_epi32(_mm256_castps_si256(sum), magic);
    return _mm256_add_epi32(steps, _mm256_srli_epi32(power, 20));
}

/* Sixteen bf16 as they lie: the even ones are floats once moved up, the odd ones once the even ones are cleared,
 * so the codes meet again in 16-bit lanes in their old order. */
AVX2_INLINE __m256i codes_of_bf16(__m256i pairs, __m256 inverse) {
    __m256 even = _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
    __m256 odd = _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32((int)0xFFFF0000u)));
    __m256i low = biased_codes(_mm256_mul_ps(even, inverse));
    __m256i high = biased_codes(_mm256_mul_ps(odd, inverse));
    __m256i codes = _mm256_or_si256(low, _mm256_slli_epi32(high, 16));
    codes = _mm256_sub_epi16(codes, _mm256_set1_epi16(CODES_BIAS));
    __m256i sign = _mm256_and_si256(_mm256_srli_epi16(pairs, 8), _mm256_set1_epi16(0x80));
    return _mm256_or_si256(codes, sign);
}

AVX2 static void quantise_bf16(const uint8_t *row, size_t n, float inverse, uint8_t *codes) {
    const __m256 factor = _mm256_set1_ps(inverse);
    size_t i = 0;
    for (; i + 32 <= n; i += 32) {
        __m256i a = codes_of_bf16(_mm256_loadu_si256((const void *)(row + 2 * i)), factor);
        __m256i b = codes_of_bf16(_mm256_loadu_si256((const void *)(row + 2 * i + 32)), factor);
        __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi16(a, b), 0xD8);
        _mm256_storeu_si256((void *)(codes + i), packed);
    }
    plain_quantise(FP8_BF16, row + 2 * i, n - i, inverse, codes + i);
}

AVX2_INLINE __m256i codes_of_floats(__m256 scaled) {
    __m256i codes = _mm256_sub_epi32(biased_codes(scaled), _mm256_set1_epi32((int)CODES_BIAS));
    __m256i sign = _mm256_srli_epi32(_mm256_castps_si256(scaled), 24);
    return _mm256_or_si256(codes, _mm256_and_si256(sign, _mm256_set1_epi32(0x80)));
}

AVX2_INLINE __m256 load_floats(int dtype, const uint8_t *at) {
    if (dtype == FP8_FP32)
        return _mm256_loadu_ps((const void *)at);
    return _mm256_cvtph_ps(_mm_loadu_si128((const void *)at));
}

AVX2_INLINE void quantise_floats(int dtype, const uint8_t *row, size_t n, float inverse, uint8_t *codes) {
    const size_t itemsize = dtype == FP8_FP32 ? 4 : 2;
    const __m256 factor = _mm256_set1_ps(inverse);
    const __m256i in_order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    size_t i = 0;
    for (; i + 32 <= n; i += 32) {
        const uint8_t *at = row + i * itemsize;
        __m256i a = codes_of_floats(_mm256_mul_ps(load_floats(dtype, at), factor));
        __m256i b = codes_of_floats(_mm256_mul_ps(load_floats(dtype, at + 8 * itemsize), factor));
        __m256i c = codes_of_floats(_mm256_mul_ps(load_floats(dtype, at + 16 * itemsize), factor));
        __m256i d = codes_of_floats(_mm256_mul_ps(load_floats(dtype, at + 24 * itemsize), factor));
        __m256i packed = _mm256_packus_epi16(_mm256_packs_epi32(a, b), _mm256_packs_epi32(c, d));
        _mm256_storeu_si256((void *)(codes + i), _mm256_permutevar8x32_epi32(packed, in_order));
    }
    plain_quantise(dtype, row + i * itemsize, n - i, inverse, codes + i);
}

AVX2 static void quantise_fp16(const uint8_t *row, size_t n, float inverse, uint8_t *codes) {
    quantise_floats(FP8_FP16, row, n, inverse, codes);
}

AVX2 static void quantise_fp32(const uint8_t *row, size_t n, float inverse, uint8_t *codes) {
    quantise_floats(FP8_FP32, row, n, inverse, codes);
}

/* value_256th of sixteen codes, still as halves. The sign's copy in bit 14 is cleared: no code reaches it. */
AVX2_INLINE __m256i halves_of_codes(__m128i codes) {
    __m256i wide = _mm256_slli_epi16(_mm256_cvtepi8_epi16(codes), 7);
    return _mm256_and_si256(wide, _mm256_set1_epi16((short)0xBFFF));
}

AVX2_INLINE int any_nan(__m128i codes) {
    const __m128i magnitude = _mm_set1_epi8(0x7F);
    return _mm_movemask_epi8(_mm_cmpeq_epi8(_mm_and_si128(codes, magnitude), magnitude));
}

AVX2_INLINE __m256i rounded_to_bf16(__m256 value) {
    __m256i bits = _mm256_castps_si256(value);
    __m256i even = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    return _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), even);
}

AVX2_INLINE void dequantise_16(int dtype, __m128i codes, __m256 factor, uint8_t *at) {
    if (dtype == FP8_BF16) /* even codes first, so that they meet the odd ones again without a shuffle */
        codes = _mm_shuffle_epi8(codes, _mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15));
    __m256i halves = halves_of_codes(codes);
    __m256 a = _mm256_mul_ps(_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), factor);
    __m256 b = _mm256_mul_ps(_mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1)), factor);
    if (dtype == FP8_BF16) {
        __m256i even = _mm256_srli_epi32(rounded_to_bf16(a), 16);
        _mm256_storeu_si256((void *)at, _mm256_blend_epi16(even, rounded_to_bf16(b), 0xAA));
    } else if (dtype == FP8_FP16) {
        _mm_storeu_si128((void *)at, _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
        _mm_storeu_si128((void *)(at + 16), _mm256_cvtps_ph(b, _MM_FROUND_TO_NEAREST_INT));
    } else {
        _mm256_storeu_ps((void *)at, a);
        _mm256_storeu_ps((void *)(at + 32), b);
    }
}

AVX2_INLINE void dequantise_rows(int dtype, const uint8_t *codes, size_t n, float scale, uint8_t *row) {
    const size_t itemsize = dtype == FP8_FP32 ? 4 : 2;
    const __m256 factor = _mm256_set1_ps(scale * 256.0f);
    size_t i = 0;
    for (; i + 16 <= n; i += 16) {
        __m128i some = _mm_loadu_si128((const void *)(codes + i));
        if (__builtin_expect(any_nan(some), 0))
            plain_dequantise(dtype, codes + i, 16, scale, row + i * itemsize);
        else
            dequantise_16(dtype, some, factor, row + i * itemsize);
    }
    plain_dequantise(dtype, codes + i, n - i, scale, row + i * itemsize);
}

AVX2 static void dequantise_bf16(const uint8_t *codes, size_t n, float scale, uint8_t *row) {
    dequantise_rows(FP8_BF16, codes, n, scale, row);
}

AVX2 static void dequantise_fp16(const uint8_t *codes, size_t n, float scale, uint8_t *row) {
    dequantise_rows(FP8_FP16, codes, n, scale, row);
}

AVX2 static void dequantise_fp32(const uint8_t *codes, size_t n, float scale, uint8_t *row) {
    dequantise_rows(FP8_FP32, codes, n, scale, row);
}

const fp8_kernels fp8_avx2 = {
    "avx2",
    {absmax_bf16, absmax_fp16, absmax_fp32},
    {quantise_bf16, quantise_fp16, quantise_fp32},
    {dequantise_bf16, dequantise_fp16, dequantise_fp32},
};
#endif
