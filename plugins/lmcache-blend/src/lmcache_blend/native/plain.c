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
    } else if (exponent == 31) { /* processors make a NaN quiet when they convert it */
        bits = 255u << 23 | mantissa << 13 | (mantissa ? 1u << 22 : 0);
    } else {
        bits = (exponent + 112) << 23 | mantissa << 13;
    }
    bits |= sign;
    memcpy(&value, &bits, 4);
    return value;
}

/* To the nearest half, ties to even; beyond the largest, infinity. */
static uint16_t half_of_float(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    const uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
    bits &= 0x7FFFFFFF;
    if (bits > 0x7F800000)
        return (uint16_t)(sign | 0x7E00 | (bits >> 13 & 0x3FF));
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

#define TARGET
#define FLOAT_OF_HALF float_of_half
#define HALF_OF_FLOAT half_of_float
#define HALVES_FIRST(kind, source, target, cosines, sines, pairs) ((size_t)0)
#define NEIGHBOURS_FIRST(kind, source, target, cosines, sines, pairs) ((size_t)0)
#include "kernels.h"

const blend_kernels blend_plain = KERNELS("plain");
