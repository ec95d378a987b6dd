/* The kernels, built once for each instruction set: plain.c and avx2.c include this file with TARGET, conversions of half
 * floats, and ..._FIRST, which does the beginning of a row with the instruction set's own means and says how far it got. Each value is computed in single floats, by two products and a sum (contraction into FMA is
 * off), so all builds give the same bytes. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "blend.h"

#define INLINE static inline __attribute__((always_inline)) TARGET

static const size_t itemsizes[BLEND_KINDS] = {4, 2, 2};

INLINE float value_at(int kind, const uint8_t *row, size_t at) {
    float value;
    uint16_t word;
    uint32_t bits;
    if (kind == BLEND_F32) {
        memcpy(&value, row + 4 * at, 4);
        return value;
    }
    memcpy(&word, row + 2 * at, 2);
    if (kind == BLEND_F16)
        return FLOAT_OF_HALF(word);
    bits = (uint32_t)word << 16;
    memcpy(&value, &bits, 4);
    return value;
}

INLINE void put_value(int kind, uint8_t *row, size_t at, float value) {
    uint16_t word;
    uint32_t bits;
    if (kind == BLEND_F32) {
        memcpy(row + 4 * at, &value, 4);
        return;
    }
    if (kind == BLEND_F16) {
        word = HALF_OF_FLOAT(value);
    } else {
        memcpy(&bits, &value, 4); /* a NaN comes from one of bf16, so rounding leaves it one */
        word = (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
    }
    memcpy(row + 2 * at, &word, 2);
}

INLINE void row_of(int kind, int neighbours, const uint8_t *source, uint8_t *target, const float *table, size_t pairs,
                   size_t rest) {
    const float *cosines = table, *sines = table + pairs;
    const size_t item = itemsizes[kind];
    for (size_t p = neighbours ? NEIGHBOURS_FIRST(kind, source, target, cosines, sines, pairs)
                               : HALVES_FIRST(kind, source, target, cosines, sines, pairs);
         p < pairs; p++) {
        const size_t one = neighbours ? 2 * p : p, other = neighbours ? 2 * p + 1 : p + pairs;
        const float x = value_at(kind, source, one), y = value_at(kind, source, other);
        put_value(kind, target, one, x * cosines[p] - y * sines[p]);
        put_value(kind, target, other, y * cosines[p] + x * sines[p]);
    }
    if (rest && source != target)
        memcpy(target + 2 * pairs * item, source + 2 * pairs * item, rest * item);
}

#define ROWS(NAME, KIND, NEIGHBOURS)                                                                                   \
    TARGET static void NAME(const uint8_t *source, ptrdiff_t source_stride, uint8_t *target, ptrdiff_t target_stride,  \
                            const float *table, size_t tokens, size_t pairs, size_t rest) {                            \
        for (; tokens; tokens--, source += source_stride, target += target_stride, table += 2 * pairs)                 \
            row_of(KIND, NEIGHBOURS, source, target, table, pairs, rest);                                              \
    }
ROWS(halves_f32, BLEND_F32, 0)
ROWS(halves_f16, BLEND_F16, 0)
ROWS(halves_bf16, BLEND_BF16, 0)
ROWS(neighbours_f32, BLEND_F32, 1)
ROWS(neighbours_f16, BLEND_F16, 1)
ROWS(neighbours_bf16, BLEND_BF16, 1)

#define KERNELS(NAME)                                                                                                  \
    {                                                                                                                  \
        NAME, {{halves_f32, neighbours_f32}, {halves_f16, neighbours_f16}, {halves_bf16, neighbours_bf16}},           \
    }
