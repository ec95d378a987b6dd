/* What module.c and the kernels share. */
#ifndef BLEND_H
#define BLEND_H

#include <stddef.h>
#include <stdint.h>

enum { BLEND_F32, BLEND_F16, BLEND_BF16, BLEND_KINDS };

/* One head of `tokens` tokens, strides in bytes: `pairs` pairs turned by `table` (for each token the cosines, then the
 * sines), and the `rest` values behind them copied. `source` and `target` are the same, or apart. */
typedef void blend_rows(const uint8_t *source, ptrdiff_t source_stride, uint8_t *target, ptrdiff_t target_stride,
                        const float *table, size_t tokens, size_t pairs, size_t rest);

typedef struct {
    const char *name;
    blend_rows *rows[BLEND_KINDS][2]; /* by type of the values; halves or neighbours paired */
} blend_kernels;

extern const blend_kernels blend_plain;
#if defined(__x86_64__)
extern const blend_kernels blend_avx2;
#endif

#endif
