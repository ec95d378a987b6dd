/* The kernels for any processor, with half floats converted bit by bit. */
#include <stdint.h>
#include <string.h>

static float float_of_half(uint16_t half) {
    const uint32_t sign = (uint32_t)(half & 0x8000) << 16, exponent = (half >> 10) & 31, mantissa = half & 1023;
    uint32_t bits;
    float value;
    if (exponent == 0) { /* zero, or a multiple of 2^-24 */
        value = (float)mantissa * (1.0f / 16777216.0f);
        memcpy(&bits, &value, 4);
    } else {
        bits = (exponent == 31 ? 255u << 23 : (exponent + 112) << 23) | mantissa << 13;
    }
    bits |= sign;
    memcpy(&value, &bits, 4);
    return value;
}

/* To the nearest half, ties to even; beyond the largest, infinity. NaN is not asked for. */
static uint16_t half_of_float(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    const uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
    bits &= 0x7FFFFFFF;
    if (bits >= 0x477FF000) /* 65520: half way from the largest half to what would be the next */
        return sign | 0x7C00;
    if (bits < 0x38800000) { /* below 2^-14 halves are multiples of 2^-24: adding 0.5 leaves just those bits */
        float sum;
        memcpy(&sum, &bits, 4);
        sum += 0.5f;
        memcpy(&bits, &sum, 4);
        return (uint16_t)(sign | (bits - 0x3F000000));
    }
    bits += 0xFFF + (bits >> 13 & 1);
    return (uint16_t)(sign | ((bits >> 13) - (112 << 10)));
}

static void floats_of_halves(const uint8_t *row, size_t n, float *floats) {
    for (size_t d = 0; d < n; d++) {
        uint16_t half;
        memcpy(&half, row + 2 * d, 2);
        floats[d] = float_of_half(half);
    }
}

static void halves_of_floats(const float *floats, size_t n, uint8_t *row) {
    for (size_t d = 0; d < n; d++) {
        uint16_t half = half_of_float(floats[d]);
        memcpy(row + 2 * d, &half, 2);
    }
}

#define TARGET
#define FLOATS_OF_HALVES floats_of_halves
#define HALVES_OF_FLOATS halves_of_floats
#define ROW_FIRST16(nibbles, row, n, low, high) ((size_t)0)
#define ROW_FIRST32(nibbles, row, n, low, high) ((size_t)0)
#define TO_INT8_FIRST(dtype, row, n, each, inverse, codes) ((size_t)0)
#define TO_INT4_FIRST(dtype, row, paired, half, each, offset, inverse, codes) ((size_t)0)
#include "kernels.h"

const quant_kernels quant_plain = KERNELS("plain");
