/* The kernels, built once for each instruction set: plain.c and avx2.c include this file, with TARGET,
 * FLOATS_OF_HALVES and HALVES_OF_FLOATS defined. Every operation is on single floats in a fixed order, so all builds
 * give the same bytes (contraction into FMA is off), and the loops are written for the compiler to vectorise. Where it
 * does that badly, ..._FIRST does the beginning of a run with the instruction set's own means, and says how far it got.
 *
 * A unit is a run of tokens at one place of the other axes. Keys: each channel of the unit has its own grid of values,
 * over all of the unit's tokens. Values: each token has its own, for each of its heads.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "quant.h"

#define INLINE static inline __attribute__((always_inline)) TARGET
#define HALF_MOST 65504.0f
#define TO_NEAREST 12582912.0f /* 1.5 * 2^23: a float this large has no fraction, so adding it rounds to even */

INLINE float float_of_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

INLINE uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

INLINE float element(int dtype, const uint8_t *row, size_t at) {
    if (dtype == QUANT_BF16) {
        uint16_t word;
        memcpy(&word, row + 2 * at, 2);
        return float_of_bits((uint32_t)word << 16);
    }
    float value;
    memcpy(&value, row + 4 * at, 4);
    return value;
}

INLINE void put_element(int dtype, uint8_t *row, size_t at, float value) {
    if (dtype == QUANT_BF16) {
        uint32_t bits = bits_of(value);
        uint16_t word = (uint16_t)((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
        memcpy(row + 2 * at, &word, 2);
    } else {
        memcpy(row + 4 * at, &value, 4);
    }
}

/* The bounds of a grid are found in integers: the bits of a float, all but the sign flipped if it is negative, are in
 * the order of the floats. Grids of eight bits need the greatest magnitude alone. */
#define FLIPPED16(word) ((int16_t)((word) ^ (((word) >> 15) & 0x7FFF)))
#define FLIPPED32(word) ((int32_t)((word) ^ (((word) >> 31) & 0x7FFFFFFF)))

#define WIDEN(WIDTH)                                                                                                   \
    INLINE void widen##WIDTH(int nibbles, const uint8_t *row, size_t at, int##WIDTH##_t *low, int##WIDTH##_t *high) {  \
        int##WIDTH##_t word;                                                                                           \
        memcpy(&word, row + at * (WIDTH / 8), WIDTH / 8);                                                              \
        int##WIDTH##_t key = nibbles ? FLIPPED##WIDTH(word) : (int##WIDTH##_t)(word & INT##WIDTH##_MAX);               \
        if (nibbles)                                                                                                   \
            *low = key < *low ? key : *low;                                                                            \
        *high = key > *high ? key : *high;                                                                             \
    }                                                                                                                  \
    /* Of each channel over this row and those before it. */                                                           \
    INLINE void channels##WIDTH(int nibbles, const uint8_t *row, size_t n, int##WIDTH##_t *restrict low,               \
                                int##WIDTH##_t *restrict high) {                                                       \
        for (size_t d = 0; d < n; d++)                                                                                 \
            widen##WIDTH(nibbles, row, d, low + d, high + d);                                                          \
    }                                                                                                                  \
    /* Of all values of a row: in lanes, or one after another behind those that the instruction set takes at once. */  \
    INLINE void row##WIDTH(int nibbles, const uint8_t *row, size_t n, int##WIDTH##_t *low, int##WIDTH##_t *high) {     \
        int##WIDTH##_t lows[LANES], highs[LANES];                                                                      \
        size_t d = ROW_FIRST##WIDTH(nibbles, row, n, low, high);                                                       \
        if (d + LANES <= n) {                                                                                          \
            for (size_t lane = 0; lane < LANES; lane++)                                                                \
                lows[lane] = *low, highs[lane] = *high;                                                                \
            for (; d + LANES <= n; d += LANES)                                                                         \
                channels##WIDTH(nibbles, row + d * (WIDTH / 8), LANES, lows, highs);                                   \
            for (size_t lane = 0; lane < LANES; lane++) {                                                              \
                *low = lows[lane] < *low ? lows[lane] : *low;                                                          \
                *high = highs[lane] > *high ? highs[lane] : *high;                                                     \
            }                                                                                                          \
        }                                                                                                              \
        for (; d < n; d++)                                                                                             \
            widen##WIDTH(nibbles, row, d, low, high);                                                                  \
    }                                                                                                                  \
    /* The bounds of all grids of a unit. */                                                                           \
    INLINE void bounds##WIDTH(int nibbles, int keys, const uint8_t *src, size_t rows, size_t stride, size_t width,     \
                              size_t dim, size_t grids, int##WIDTH##_t *restrict low, int##WIDTH##_t *restrict high) { \
        const size_t heads = width / dim;                                                                              \
        for (size_t g = 0; g < grids; g++)                                                                             \
            low[g] = INT##WIDTH##_MAX, high[g] = INT##WIDTH##_MIN;                                                     \
        for (size_t r = 0; r < rows; r++) {                                                                            \
            if (keys)                                                                                                  \
                channels##WIDTH(nibbles, src + r * stride, width, low, high);                                          \
            for (size_t h = 0; !keys && h < heads; h++)                                                                \
                row##WIDTH(nibbles, src + r * stride + h * dim * (WIDTH / 8), dim, low + r * heads + h,                \
                           high + r * heads + h);                                                                      \
        }                                                                                                              \
    }                                                                                                                  \
    /* As bits of floats again. Returns whether one is not finite. */                                                  \
    INLINE uint32_t turn_back##WIDTH(int nibbles, size_t n, int##WIDTH##_t infinite, int##WIDTH##_t *restrict low,     \
                                     int##WIDTH##_t *restrict high) {                                                  \
        uint32_t odd = 0;                                                                                              \
        for (size_t i = 0; i < n; i++) {                                                                               \
            odd |= (uint32_t)(high[i] >= infinite) | (uint32_t)(nibbles && low[i] <= ~infinite);                       \
            low[i] = FLIPPED##WIDTH(low[i]), high[i] = FLIPPED##WIDTH(high[i]);                                        \
        }                                                                                                              \
        return odd;                                                                                                    \
    }

#define LANES 16
WIDEN(16)
WIDEN(32)

/* The floats of halves or bf16. */
INLINE void widened(int dtype, const int16_t *words, size_t n, float *restrict floats) {
    if (dtype == QUANT_F16) {
        FLOATS_OF_HALVES((const uint8_t *)words, n, floats);
    } else {
        for (size_t i = 0; i < n; i++)
            floats[i] = float_of_bits((uint32_t)(uint16_t)words[i] << 16);
    }
}

/* The bounds of all grids of a unit, as floats (`least` only for nibbles); `room` is for one float a grid. Returns
 * whether one is not finite. */
INLINE uint32_t bounds(int dtype, int nibbles, int keys, const uint8_t *src, size_t rows, size_t stride, size_t width,
                       size_t dim, size_t grids, float *least, float *most, float *room) {
    if (dtype == QUANT_F32) {
        int32_t *low = (int32_t *)(void *)least, *high = (int32_t *)(void *)most;
        bounds32(nibbles, keys, src, rows, stride, width, dim, grids, low, high);
        return turn_back32(nibbles, grids, 0x7F800000, low, high);
    }
    int16_t *low = (int16_t *)(void *)room, *high = low + grids;
    bounds16(nibbles, keys, src, rows, stride, width, dim, grids, low, high);
    if (turn_back16(nibbles, grids, dtype == QUANT_F16 ? 0x7C00 : 0x7F80, low, high))
        return 1;
    widened(dtype, high, grids, most);
    if (nibbles)
        widened(dtype, low, grids, least);
    return 0;
}

/* Round the halves of `floats` away from zero's side that would lose a value: up, or down if `down`. */
INLINE void bound_halves(int down, const float *restrict floats, size_t n, float *restrict back,
                         uint16_t *restrict halves) {
    HALVES_OF_FLOATS(floats, n, (uint8_t *)halves);
    FLOATS_OF_HALVES((const uint8_t *)halves, n, back);
    for (size_t i = 0; i < n; i++) {
        uint16_t half = halves[i];
        uint16_t up = (uint16_t)(half + 1);
        uint16_t less = half == 0 ? 0x8001 : (uint16_t)(half & 0x8000 ? half + 1 : half - 1);
        halves[i] = down ? (back[i] > floats[i] ? less : half) : (back[i] < floats[i] ? up : half);
    }
    FLOATS_OF_HALVES((const uint8_t *)halves, n, back);
}

/* From the bounds of `n` channels or rows (in eight bits only the greatest magnitudes) their grids: the steps, and with nibbles the least values behind them. Left
 * behind for quantising: the grid's own least value in `least`, one over the step in `most`. Returns whether halves can
 * hold all of it. */
INLINE int choose(int nibbles, size_t n, float *restrict least, float *restrict most, float *restrict spare,
                  uint8_t *grid) {
    uint16_t *steps = (uint16_t *)(void *)grid;
    int32_t beyond = 0;
    if (nibbles) {
        bound_halves(1, least, n, spare, steps + n);
        for (size_t i = 0; i < n; i++) {
            beyond |= !(spare[i] >= -HALF_MOST);
            least[i] = spare[i];
            most[i] = (most[i] - spare[i]) * (1.0f / 15.0f);
        }
    } else {
        for (size_t i = 0; i < n; i++)
            most[i] *= 1.0f / 127.0f;
    }
    bound_halves(0, most, n, spare, steps);
    for (size_t i = 0; i < n; i++) {
        beyond |= !(spare[i] <= HALF_MOST);
        most[i] = spare[i] > 0.0f ? 1.0f / spare[i] : 0.0f;
    }
    return !beyond;
}

/* In range, since steps and least values were rounded to the side that keeps it so. */
INLINE int32_t code_of(float x, float offset, float inverse) {
    return (int32_t)(bits_of((x - offset) * inverse + TO_NEAREST) - bits_of(TO_NEAREST));
}

/* In the four that follow, `each` is 1 where every channel has a grid of its own, and 0 where all share one. */
INLINE void to_int8(int dtype, const uint8_t *row, size_t n, size_t each, const float *restrict inverse,
                    uint8_t *restrict codes) {
    for (size_t d = TO_INT8_FIRST(dtype, row, n, each, inverse, codes); d < n; d++)
        codes[d] = (uint8_t)code_of(element(dtype, row, d), 0.0f, inverse[d * each]);
}

INLINE void from_int8(int dtype, const uint8_t *restrict codes, size_t n, size_t each, const float *restrict scale,
                      uint8_t *restrict row) {
    for (size_t d = 0; d < n; d++)
        put_element(dtype, row, d, (float)(int8_t)codes[d] * scale[d * each]);
}

/* Two codes a byte: channel d below, channel d + half above; without a partner the upper four bits are zero. */
INLINE void to_int4(int dtype, const uint8_t *row, size_t n, size_t each, const float *restrict offset,
                    const float *restrict inverse, uint8_t *restrict codes) {
    const size_t half = (n + 1) / 2, paired = n / 2;
    for (size_t d = TO_INT4_FIRST(dtype, row, paired, half, each, offset, inverse, codes); d < paired; d++) {
        size_t e = d + half;
        int32_t low = code_of(element(dtype, row, d), offset[d * each], inverse[d * each]);
        int32_t high = code_of(element(dtype, row, e), offset[e * each], inverse[e * each]);
        codes[d] = (uint8_t)(low | high << 4);
    }
    if (paired < half) {
        const size_t d = paired;
        codes[d] = (uint8_t)code_of(element(dtype, row, d), offset[d * each], inverse[d * each]);
    }
}

INLINE void from_int4(int dtype, const uint8_t *restrict codes, size_t n, size_t each, const float *restrict offset,
                      const float *restrict scale, uint8_t *restrict row) {
    const size_t half = (n + 1) / 2, paired = n / 2;
    for (size_t d = 0; d < half; d++)
        put_element(dtype, row, d, (float)(codes[d] & 15) * scale[d * each] + offset[d * each]);
    for (size_t d = 0; d < paired; d++) {
        size_t e = half + d;
        put_element(dtype, row, e, (float)(codes[d] >> 4) * scale[e * each] + offset[e * each]);
    }
}

/* Compilers do not vectorise loads and stores of half floats: rows of them pass through `floats`. */
INLINE const uint8_t *opened(int dtype, const uint8_t *row, size_t n, float *floats) {
    if (dtype != QUANT_F16)
        return row;
    FLOATS_OF_HALVES(row, n, floats);
    return (const uint8_t *)floats;
}

#define KIND(dtype) ((dtype) == QUANT_F16 ? QUANT_F32 : (dtype))

INLINE void quantise(int dtype, int nibbles, size_t each, const uint8_t *row, size_t n, float *floats,
                     const float *offset, const float *inverse, uint8_t *codes) {
    const uint8_t *from = opened(dtype, row, n, floats);
    if (nibbles)
        to_int4(KIND(dtype), from, n, each, offset, inverse, codes);
    else
        to_int8(KIND(dtype), from, n, each, inverse, codes);
}

/* Whether a grid reaches beyond the largest half: its step may have been rounded up. */
INLINE int reaches_beyond(int nibbles, size_t n, const float *restrict offset, const float *restrict scale) {
    int32_t beyond = 0;
    for (size_t i = 0; i < n; i++)
        beyond |= scale[i] * (nibbles ? 15.0f : 128.0f) + (nibbles ? offset[i] : 0.0f) > HALF_MOST;
    return beyond;
}

INLINE void restore(int dtype, int nibbles, int beyond, size_t each, const uint8_t *codes, size_t n, float *floats,
                    const float *offset, const float *scale, uint8_t *row) {
    uint8_t *to = dtype == QUANT_F16 ? (uint8_t *)floats : row;
    if (nibbles)
        from_int4(KIND(dtype), codes, n, each, offset, scale, to);
    else
        from_int8(KIND(dtype), codes, n, each, scale, to);
    if (dtype != QUANT_F16)
        return;
    for (size_t d = 0; beyond && d < n; d++) {
        float most = floats[d] > HALF_MOST ? HALF_MOST : floats[d];
        floats[d] = most < -HALF_MOST ? -HALF_MOST : most;
    }
    HALVES_OF_FLOATS(floats, n, row);
}

/* One unit: `rows` tokens, `stride` bytes apart, of `width` channels in heads of `dim`. Grids are for channels, or for
 * each head of each token; `scratch` has room for three floats of each grid and for a row. */
INLINE int encode_unit(int dtype, int nibbles, int keys, const uint8_t *src, size_t rows, size_t stride, size_t width,
                       size_t dim, float *scratch, uint8_t *grid, uint8_t *codes) {
    const size_t itemsize = dtype == QUANT_F32 ? 4 : 2, heads = width / dim, grids = keys ? width : rows * heads;
    const size_t run = keys ? width : dim, run_bytes = nibbles ? (run + 1) / 2 : run;
    float *least = scratch, *most = scratch + grids, *spare = most + grids, *floats = spare + grids;
    if (bounds(dtype, nibbles, keys, src, rows, stride, width, dim, grids, least, most, spare) ||
        !choose(nibbles, grids, least, most, spare, grid))
        return 0;
    for (size_t r = 0; r < rows; r++) {
        for (size_t at = 0, g = keys ? 0 : r * heads; at < width; at += run, g++, codes += run_bytes)
            quantise(dtype, nibbles, (size_t)keys, src + r * stride + at * itemsize, run, floats, least + g, most + g,
                     codes);
    }
    return 1;
}

INLINE void decode_unit(int dtype, int nibbles, int keys, const uint8_t *grid, const uint8_t *codes, size_t rows,
                        size_t stride, size_t width, size_t dim, float *scratch, uint8_t *out) {
    const size_t itemsize = dtype == QUANT_F32 ? 4 : 2, heads = width / dim, grids = keys ? width : rows * heads;
    const size_t run = keys ? width : dim, run_bytes = nibbles ? (run + 1) / 2 : run;
    float *scale = scratch, *offset = scratch + grids, *floats = offset + grids;
    FLOATS_OF_HALVES(grid, grids, scale);
    if (nibbles)
        FLOATS_OF_HALVES(grid + 2 * grids, grids, offset);
    const int beyond = dtype == QUANT_F16 && reaches_beyond(nibbles, grids, offset, scale);
    for (size_t r = 0; r < rows; r++) {
        for (size_t at = 0, g = keys ? 0 : r * heads; at < width; at += run, g++, codes += run_bytes)
            restore(dtype, nibbles, beyond, (size_t)keys, codes, run, floats, offset + g, scale + g,
                    out + r * stride + at * itemsize);
    }
}

#define BOTH(NAME, DTYPE, NIBBLES, KEYS)                                                                               \
    TARGET static int NAME##_encode(const uint8_t *src, size_t rows, size_t stride, size_t width, size_t dim,          \
                                    float *scratch, uint8_t *grid, uint8_t *codes) {                                   \
        return encode_unit(DTYPE, NIBBLES, KEYS, src, rows, stride, width, dim, scratch, grid, codes);                 \
    }                                                                                                                  \
    TARGET static void NAME##_decode(const uint8_t *grid, const uint8_t *codes, size_t rows, size_t stride,            \
                                     size_t width, size_t dim, float *scratch, uint8_t *out) {                         \
        decode_unit(DTYPE, NIBBLES, KEYS, grid, codes, rows, stride, width, dim, scratch, out);                        \
    }

#define ALL_OF(DTYPE, NAME)                                                                                            \
    BOTH(NAME##_values8, DTYPE, 0, 0)                                                                                  \
    BOTH(NAME##_keys8, DTYPE, 0, 1)                                                                                    \
    BOTH(NAME##_values4, DTYPE, 1, 0)                                                                                  \
    BOTH(NAME##_keys4, DTYPE, 1, 1)

ALL_OF(QUANT_BF16, bf16)
ALL_OF(QUANT_F16, f16)
ALL_OF(QUANT_F32, f32)

#define PAIR(NAME) {NAME##_encode, NAME##_decode}
#define TABLE(NAME) {{PAIR(NAME##_values8), PAIR(NAME##_keys8)}, {PAIR(NAME##_values4), PAIR(NAME##_keys4)}}
#define KERNELS(ISA) {ISA, {TABLE(bf16), TABLE(f16), TABLE(f32)}}
