/* Rounding between floats and float8 e4m3fn, once, for every instruction set.
 *
 * Both sets of kernels and the vectorised torch way must give the same bytes, so what a value becomes is defined
 * here, in scalar form, and the vector code repeats it operation by operation. Build with -ffp-contract=off: a
 * fused multiply-add rounds once where this file says twice.
 *
 * A group's scale is absmax * fl(1/448), held between SCALE_MIN and SCALE_MAX. A finite x is stored as
 * e4m3(x * fl(1/scale)), to nearest, ties to even; it comes back as e4m3 * scale, rounded to its own type.
 * Anything that is not finite is stored as 0x7F and comes back as the one quiet NaN of its type.
 */
#ifndef LMCACHE_FP8_KERNELS_H
#define LMCACHE_FP8_KERNELS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "objects are little-endian: build without the native kernel on this machine"
#endif

#define FP8_INLINE static inline __attribute__((always_inline, unused))

enum { FP8_BF16 = 0, FP8_FP16 = 1, FP8_FP32 = 2, FP8_DTYPES = 3 };

#define FP8_NAN 0x7Fu
#define SCALE_MIN 0x1p-126f            /* the smallest normal float: 1 / scale stays finite */
#define SCALE_MAX_BITS 0x7B124924u     /* the largest float that times 448 is finite */
#define ONE_448TH 0x1.24924ap-9f       /* fl(1 / 448) */
#define EXPONENT_BITS 0x7F800000u
#define NORMAL_MIN_BITS 0x3C800000u    /* 2^-6, the smallest normal of e4m3, as a float */
#define MAGIC_STEP (20u << 23)         /* 2^20: a + 2^20 * 2^e drops all but three bits of mantissa */

/* One instruction set. `n` counts elements; rows need no alignment. */
typedef struct {
    const char *name;
    /* The largest |x| of a row, as the bits of its own type: anything at or above infinity's bits is not finite. */
    uint32_t (*absmax[FP8_DTYPES])(const uint8_t *row, size_t n);
    /* Encode a row of finite values with |x| * inverse below 464. */
    void (*quantise[FP8_DTYPES])(const uint8_t *row, size_t n, float inverse, uint8_t *codes);
    void (*dequantise[FP8_DTYPES])(const uint8_t *codes, size_t n, float scale, uint8_t *row);
} fp8_kernels;

extern const fp8_kernels fp8_plain;
extern const fp8_kernels fp8_avx2;

static const size_t fp8_itemsize[FP8_DTYPES] = {2, 2, 4};
static const uint32_t fp8_infinity_bits[FP8_DTYPES] = {0x7F80u, 0x7C00u, 0x7F800000u};

FP8_INLINE float float_of_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

FP8_INLINE uint32_t bits_of_float(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

FP8_INLINE uint32_t load_bits(int dtype, const uint8_t *at) {
    uint32_t wide = 0;
    memcpy(&wide, at, dtype == FP8_FP32 ? 4 : 2);
    return wide;
}

FP8_INLINE float float_of_half(uint32_t half) {
    uint32_t sign = (half & 0x8000u) << 16;
    uint32_t rest = half & 0x7FFFu;
    if (rest >= 0x7C00u)
        return float_of_bits(sign | EXPONENT_BITS | (rest & 0x3FFu) << 13);
    if (rest >= 0x400u)
        return float_of_bits(sign | ((rest << 13) + (112u << 23)));
    /* A denormal is an integer count of 2^-24. */
    return float_of_bits(sign | bits_of_float((float)rest * 0x1p-24f));
}

FP8_INLINE float widen(int dtype, uint32_t bits) {
    if (dtype == FP8_BF16)
        return float_of_bits(bits << 16);
    if (dtype == FP8_FP16)
        return float_of_half(bits);
    return float_of_bits(bits);
}

FP8_INLINE uint32_t half_of_float(float value) {
    uint32_t bits = bits_of_float(value);
    uint32_t sign = (bits >> 16) & 0x8000u;
    uint32_t rest = bits & 0x7FFFFFFFu;
    if (rest >= 0x47800000u) /* 65536 and above, for which half has no exponent */
        return sign | 0x7C00u;
    if (rest < 0x38800000u) /* below 2^-14: adding 0.5 leaves the count of 2^-24 in the low bits, rounded */
        return sign | (bits_of_float(float_of_bits(rest) + 0.5f) - 0x3F000000u);
    rest += 0xFFFu + ((rest >> 13) & 1u);
    return sign | ((rest - (112u << 23)) >> 13);
}

FP8_INLINE void store_float(int dtype, uint8_t *at, float value) {
    if (dtype == FP8_BF16) {
        uint32_t bits = bits_of_float(value);
        uint16_t narrow = (uint16_t)((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
        memcpy(at, &narrow, 2);
    } else if (dtype == FP8_FP16) {
        uint16_t narrow = (uint16_t)half_of_float(value);
        memcpy(at, &narrow, 2);
    } else {
        memcpy(at, &value, 4);
    }
}

FP8_INLINE void store_nan(int dtype, uint8_t *at) {
    static const uint32_t quiet[FP8_DTYPES] = {0x7FC0u, 0x7E00u, 0x7FC00000u};
    memcpy(at, &quiet[dtype], dtype == FP8_FP32 ? 4 : 2);
}

/* e4m3 of a scaled value with |x| < 464. Adding 2^20 times x's own power of two (or 2^-6, below which e4m3 has
 * equal steps) leaves x in steps of e4m3 in the low bits of the sum, rounded as the processor rounds: to nearest
 * even. Those bits count on from the exponent's eight steps, for normal and denormal results alike. */
FP8_INLINE uint8_t code_of(float scaled) {
    uint32_t bits = bits_of_float(scaled);
    uint32_t sign = (bits >> 24) & 0x80u;
    bits &= 0x7FFFFFFFu;
    uint32_t power = bits & EXPONENT_BITS;
    if (power < NORMAL_MIN_BITS)
        power = NORMAL_MIN_BITS;
    uint32_t magic = power + MAGIC_STEP;
    uint32_t steps = bits_of_float(float_of_bits(bits) + float_of_bits(magic)) - magic;
    return (uint8_t)(sign | (steps + ((power - NORMAL_MIN_BITS) >> 20)));
}

/* 2^-8 times the value of a code that is not NaN: its bits, moved, are a half of that value. */
FP8_INLINE float value_256th(uint8_t code) {
    return float_of_half((uint32_t)(code & 0x80u) << 8 | (uint32_t)(code & 0x7Fu) << 7);
}

FP8_INLINE float scale_of(float absmax) {
    float scale = absmax * ONE_448TH;
    float most = float_of_bits(SCALE_MAX_BITS);
    scale = scale > most ? most : scale;
    return scale < SCALE_MIN ? SCALE_MIN : scale;
}

FP8_INLINE uint32_t plain_absmax(int dtype, const uint8_t *row, size_t n) {
    const uint32_t magnitude = dtype == FP8_FP32 ? 0x7FFFFFFFu : 0x7FFFu;
    const size_t itemsize = dtype == FP8_FP32 ? 4 : 2;
    uint32_t most = 0;
    for (size_t i = 0; i < n; i++) {
        uint32_t bits = load_bits(dtype, row + i * itemsize) & magnitude;
        most = bits > most ? bits : most;
    }
    return most;
}

FP8_INLINE void plain_quantise(int dtype, const uint8_t *row, size_t n, float inverse, uint8_t *codes) {
    const size_t itemsize = dtype == FP8_FP32 ? 4 : 2;
    for (size_t i = 0; i < n; i++)
        codes[i] = code_of(widen(dtype, load_bits(dtype, row + i * itemsize)) * inverse);
}

FP8_INLINE void plain_dequantise(int dtype, const uint8_t *codes, size_t n, float scale, uint8_t *row) {
    const size_t itemsize = dtype == FP8_FP32 ? 4 : 2;
    const float scale_256 = scale * 256.0f; /* exact: SCALE_MAX leaves the room */
    for (size_t i = 0; i < n; i++) {
        if ((codes[i] & 0x7Fu) == FP8_NAN)
            store_nan(dtype, row + i * itemsize);
        else
            store_float(dtype, row + i * itemsize, value_256th(codes[i]) * scale_256);
    }
}

#endif
