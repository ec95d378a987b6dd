/* The kernels for processors with AVX2 and F16C. Nothing here runs unless module.c has asked the processor. FMA stays
 * off: it would round once where the plain kernels round twice. */
#if defined(__x86_64__)
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#define TARGET __attribute__((target("avx2,f16c")))

static inline __attribute__((always_inline)) TARGET void floats_of_halves(const uint8_t *row, size_t n, float *floats) {
    size_t d = 0;
    for (; d + 8 <= n; d += 8)
        _mm256_storeu_ps(floats + d, _mm256_cvtph_ps(_mm_loadu_si128((const void *)(row + 2 * d))));
    for (; d < n; d++) {
        uint16_t half;
        memcpy(&half, row + 2 * d, 2);
        floats[d] = _cvtsh_ss(half);
    }
}

static inline __attribute__((always_inline)) TARGET void halves_of_floats(const float *floats, size_t n, uint8_t *row) {
    size_t d = 0;
    for (; d + 8 <= n; d += 8)
        _mm_storeu_si128((void *)(row + 2 * d), _mm256_cvtps_ph(_mm256_loadu_ps(floats + d), 0));
    for (; d < n; d++) {
        uint16_t half = _cvtss_sh(floats[d], 0);
        memcpy(row + 2 * d, &half, 2);
    }
}

#define FLOATS_OF_HALVES floats_of_halves
#define HALVES_OF_FLOATS halves_of_floats
#include "kernels.h"

const quant_kernels quant_avx2 = KERNELS("avx2");
#endif
