/* What module.c knows of the kernels. */
#ifndef LMCACHE_QUANT_H
#define LMCACHE_QUANT_H

#include <stddef.h>
#include <stdint.h>

enum { QUANT_BF16, QUANT_F16, QUANT_F32, QUANT_DTYPES };

typedef struct {
    /* Returns 0 where a value is not finite, or beyond what the grid's halves can hold. */
    int (*encode)(const uint8_t *src, size_t rows, size_t stride, size_t width, size_t dim, float *scratch,
                  uint8_t *grid, uint8_t *codes);
    void (*decode)(const uint8_t *grid, const uint8_t *codes, size_t rows, size_t stride, size_t width, size_t dim,
                   float *scratch, uint8_t *out);
} quant_unit;

typedef struct {
    const char *name;
    quant_unit units[QUANT_DTYPES][2][2]; /* by dtype; in eight bits or four; of values or keys */
} quant_kernels;

extern const quant_kernels quant_plain;
#if defined(__x86_64__)
extern const quant_kernels quant_avx2;
#endif

#endif
