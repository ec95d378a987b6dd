/* The kernels in plain C: what runs where there is no AVX2. */
#include "kernels.h"

#define PLAIN(suffix, dtype)                                                                              \
    static uint32_t absmax_##suffix(const uint8_t *row, size_t n) { return plain_absmax(dtype, row, n); } \
    static void quantise_##suffix(const uint8_t *row, size_t n, float inverse, uint8_t *codes) {          \
        plain_quantise(dtype, row, n, inverse, codes);                                                    \
    }                                                                                                     \
    static void dequantise_##suffix(const uint8_t *codes, size_t n, float scale, uint8_t *row) {          \
        plain_dequantise(dtype, codes, n, scale, row);                                                    \
    }

PLAIN(bf16, FP8_BF16)
PLAIN(fp16, FP8_FP16)
PLAIN(fp32, FP8_FP32)

const fp8_kernels fp8_plain = {
    "plain",
    {absmax_bf16, absmax_fp16, absmax_fp32},
    {quantise_bf16, quantise_fp16, quantise_fp32},
    {dequantise_bf16, dequantise_fp16, dequantise_fp32},
};
