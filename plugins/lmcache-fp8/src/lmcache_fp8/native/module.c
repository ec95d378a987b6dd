/* lmcache_fp8._native: whole objects to float8 e4m3fn and back, without the GIL.
 *
 * An object of `outer * tokens * mid` rows of `dim` elements, and `tail` elements more, becomes: one float scale
 * for each (outer, group of `group` tokens, mid), one more for the tail, then one byte for each element in the
 * order of the source. The last group of tokens may be shorter.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

typedef struct {
    size_t outer, tokens, mid, dim, group, tail;
    size_t elements, scales;
    int dtype;
    const fp8_kernels *kernels;
} plan;

/* Rounding mode and flush-to-zero belong to the thread; the bytes of an object must not depend on them. */
typedef struct {
    unsigned int word;
} float_mode;

static float_mode set_float_mode(void) {
    float_mode old = {0};
#if defined(__x86_64__)
    old.word = _mm_getcsr();
    _mm_setcsr(0x1F80); /* to nearest even, denormals kept, no traps */
#endif
    return old;
}

static void restore_float_mode(float_mode old) {
#if defined(__x86_64__)
    _mm_setcsr(old.word);
#endif
    (void)old;
}

/* The largest |x| of a row's finite members. Only for groups that hold something else: rare, element by element. */
static uint32_t finite_absmax(const plan *p, const uint8_t *row) {
    const size_t itemsize = fp8_itemsize[p->dtype];
    const uint32_t magnitude = p->dtype == FP8_FP32 ? 0x7FFFFFFFu : 0x7FFFu;
    uint32_t most = 0;
    for (size_t i = 0; i < p->dim; i++) {
        uint32_t bits = load_bits(p->dtype, row + i * itemsize) & magnitude;
        if (bits < fp8_infinity_bits[p->dtype] && bits > most)
            most = bits;
    }
    return most;
}

static void quantise_finite(const plan *p, const uint8_t *row, float inverse, uint8_t *codes) {
    const size_t itemsize = fp8_itemsize[p->dtype];
    const uint32_t magnitude = p->dtype == FP8_FP32 ? 0x7FFFFFFFu : 0x7FFFu;
    for (size_t i = 0; i < p->dim; i++) {
        uint32_t bits = load_bits(p->dtype, row + i * itemsize);
        int finite = (bits & magnitude) < fp8_infinity_bits[p->dtype];
        codes[i] = finite ? code_of(widen(p->dtype, bits) * inverse) : FP8_NAN;
    }
}

#define TILE_GROUPS 128
#define TILE_BYTES (32u << 10)

/* Encode `groups` neighbouring groups of `rows` rows each. Two passes in the order of memory: the first brings the
 * tile into the cache for the second, and both keep the processor's prefetcher on their side (walking one group
 * at a time, with a stride, cost a quarter of the speed on the way here and half on the way back). */
static void encode_tile(const plan *p, const uint8_t *src, size_t rows, size_t groups, uint8_t *scales, uint8_t *codes) {
    const size_t itemsize = fp8_itemsize[p->dtype], stride = p->mid * p->dim, dim = p->dim;
    uint32_t most[TILE_GROUPS] = {0};
    float inverse[TILE_GROUPS];
    uint8_t finite[TILE_GROUPS];
    for (size_t r = 0; r < rows; r++) {
        for (size_t m = 0; m < groups; m++) {
            uint32_t bits = p->kernels->absmax[p->dtype](src + (r * stride + m * dim) * itemsize, dim);
            most[m] = bits > most[m] ? bits : most[m];
        }
    }
    for (size_t m = 0; m < groups; m++) {
        finite[m] = most[m] < fp8_infinity_bits[p->dtype];
        if (!finite[m]) {
            most[m] = 0;
            for (size_t r = 0; r < rows; r++) {
                uint32_t bits = finite_absmax(p, src + (r * stride + m * dim) * itemsize);
                most[m] = bits > most[m] ? bits : most[m];
            }
        }
        float scale = scale_of(widen(p->dtype, most[m]));
        memcpy(scales + m * 4, &scale, 4);
        inverse[m] = 1.0f / scale;
    }
    for (size_t r = 0; r < rows; r++) {
        for (size_t m = 0; m < groups; m++) {
            size_t first = r * stride + m * dim;
            if (finite[m])
                p->kernels->quantise[p->dtype](src + first * itemsize, dim, inverse[m], codes + first);
            else
                quantise_finite(p, src + first * itemsize, inverse[m], codes + first);
        }
    }
}

/* Encode or decode all groups but the tail. */
static void encode_grid(const plan *p, const uint8_t *src, uint8_t *scales, uint8_t *codes) {
    const size_t itemsize = fp8_itemsize[p->dtype], row = p->mid * p->dim;
    for (size_t o = 0; o < p->outer; o++) {
        for (size_t t = 0, rows; t < p->tokens; t += rows) {
            rows = p->tokens - t < p->group ? p->tokens - t : p->group;
            size_t step = TILE_BYTES / itemsize / p->dim / rows;
            step = step < 1 ? 1 : step > TILE_GROUPS ? TILE_GROUPS : step;
            for (size_t m = 0, groups; m < p->mid; m += groups, scales += groups * 4) {
                groups = p->mid - m < step ? p->mid - m : step;
                size_t first = (o * p->tokens + t) * row + m * p->dim;
                encode_tile(p, src + first * itemsize, rows, groups, scales, codes + first);
            }
        }
    }
}

static void decode_grid(const plan *p, const uint8_t *scales, const uint8_t *codes, uint8_t *out) {
    const size_t pitch = p->dim * fp8_itemsize[p->dtype];
    float scale;
    for (size_t o = 0; o < p->outer; o++) {
        for (size_t t = 0, rows; t < p->tokens; t += rows, scales += p->mid * 4) {
            rows = p->tokens - t < p->group ? p->tokens - t : p->group;
            for (size_t r = 0; r < rows; r++) {
                for (size_t m = 0; m < p->mid; m++, codes += p->dim, out += pitch) {
                    memcpy(&scale, scales + m * 4, 4);
                    p->kernels->dequantise[p->dtype](codes, p->dim, scale, out);
                }
            }
        }
    }
}

/* The tail is an object of its own: one row, one group. */
static plan plan_of_tail(const plan *p) {
    plan tail = *p;
    tail.outer = tail.tokens = tail.mid = tail.group = 1;
    tail.dim = p->tail;
    return tail;
}

static void encode_object(const plan *p, const uint8_t *src, uint8_t *out) {
    const size_t first = p->elements - p->tail;
    uint8_t *codes = out + p->scales * 4;
    encode_grid(p, src, out, codes);
    if (p->tail) {
        plan tail = plan_of_tail(p);
        encode_grid(&tail, src + first * fp8_itemsize[p->dtype], codes - 4, codes + first);
    }
}

static void decode_object(const plan *p, const uint8_t *src, uint8_t *out) {
    const size_t first = p->elements - p->tail;
    const uint8_t *codes = src + p->scales * 4;
    decode_grid(p, src, codes, out);
    if (p->tail) {
        plan tail = plan_of_tail(p);
        decode_grid(&tail, codes - 4, codes + first, out + first * fp8_itemsize[p->dtype]);
    }
}

/* The first scale that no encoder writes, or -1. Written so that a NaN fails. */
static Py_ssize_t bad_scale(const plan *p, const uint8_t *src) {
    const float most = float_of_bits(SCALE_MAX_BITS);
    for (size_t i = 0; i < p->scales; i++) {
        float scale;
        memcpy(&scale, src + i * 4, 4);
        if (!(scale >= SCALE_MIN && scale <= most))
            return (Py_ssize_t)i;
    }
    return -1;
}

static int avx2_here(void) {
#if defined(__x86_64__)
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
#else
    return 0;
#endif
}

static const fp8_kernels *kernels_named(const char *name) {
#if defined(__x86_64__)
    if ((!strcmp(name, "auto") || !strcmp(name, "avx2")) && avx2_here())
        return &fp8_avx2;
#endif
    if (!strcmp(name, "auto") || !strcmp(name, "plain"))
        return &fp8_plain;
    PyErr_Format(PyExc_ValueError, "this machine has no kernels named '%s': use one of isas()", name);
    return NULL;
}

static int multiply(size_t *value, size_t by) { return __builtin_mul_overflow(*value, by, value); }

/* Fill in what follows from the six sizes. 0, or -1 with ValueError set. */
static int complete(plan *p, const char *isa) {
    size_t elements = p->outer, scales = p->outer;
    p->kernels = kernels_named(isa);
    if (!p->kernels)
        return -1;
    if (p->dtype < 0 || p->dtype >= FP8_DTYPES || !p->tokens || !p->mid || !p->dim || !p->group) {
        PyErr_SetString(PyExc_ValueError, "dtype must be 0, 1 or 2, and tokens, mid, dim and group at least 1");
        return -1;
    }
    size_t groups = p->tokens / p->group + (p->tokens % p->group != 0);
    int over = multiply(&elements, p->tokens) || multiply(&elements, p->mid) || multiply(&elements, p->dim) ||
               __builtin_add_overflow(elements, p->tail, &elements) || multiply(&scales, groups) ||
               multiply(&scales, p->mid) || elements > PY_SSIZE_T_MAX / 8 || scales > PY_SSIZE_T_MAX / 16;
    if (over) {
        PyErr_SetString(PyExc_ValueError, "the sizes are beyond what memory can address");
        return -1;
    }
    p->elements = elements;
    p->scales = scales + (p->tail != 0);
    return 0;
}

static int length_is(const char *what, const Py_buffer *buffer, size_t wanted) {
    if ((size_t)buffer->len == wanted)
        return 1;
    PyErr_Format(PyExc_ValueError, "%s has %zd bytes and the sizes ask for %zu", what, buffer->len, wanted);
    return 0;
}

static PyObject *encode(PyObject *module, PyObject *args) {
    Py_buffer src;
    plan p = {0};
    const char *isa = "auto";
    PyObject *out = NULL;
    (void)module;
    if (!PyArg_ParseTuple(args, "y*i(nnnnnn)|s", &src, &p.dtype, &p.outer, &p.tokens, &p.mid, &p.dim, &p.group, &p.tail,
                          &isa))
        return NULL;
    if (complete(&p, isa) == 0 && length_is("src", &src, p.elements * fp8_itemsize[p.dtype]))
        out = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(p.scales * 4 + p.elements));
    if (out) {
        uint8_t *at = (uint8_t *)PyBytes_AsString(out); /* ours alone until it is returned */
        Py_BEGIN_ALLOW_THREADS
        float_mode old = set_float_mode();
        encode_object(&p, src.buf, at);
        restore_float_mode(old);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&src);
    return out;
}

static PyObject *decode(PyObject *module, PyObject *args) {
    Py_buffer src, into;
    plan p = {0};
    const char *isa = "auto";
    PyObject *answer = NULL;
    (void)module;
    if (!PyArg_ParseTuple(args, "y*w*i(nnnnnn)|s", &src, &into, &p.dtype, &p.outer, &p.tokens, &p.mid, &p.dim, &p.group,
                          &p.tail, &isa))
        return NULL;
    if (complete(&p, isa) == 0 && length_is("into", &into, p.elements * fp8_itemsize[p.dtype]) &&
        length_is("src", &src, p.scales * 4 + p.elements)) {
        Py_ssize_t bad;
        Py_BEGIN_ALLOW_THREADS
        float_mode old = set_float_mode();
        bad = bad_scale(&p, src.buf);
        if (bad < 0)
            decode_object(&p, src.buf, into.buf);
        restore_float_mode(old);
        Py_END_ALLOW_THREADS
        answer = PyLong_FromSsize_t(bad);
    }
    PyBuffer_Release(&src);
    PyBuffer_Release(&into);
    return answer;
}

static PyObject *isas(PyObject *module, PyObject *ignored) {
    (void)module;
    (void)ignored;
    if (avx2_here())
        return Py_BuildValue("(ss)", "avx2", "plain");
    return Py_BuildValue("(s)", "plain");
}

static PyMethodDef methods[] = {
    {"encode", encode, METH_VARARGS, "encode(src, dtype, sizes, isa='auto') -> bytes"},
    {"decode", decode, METH_VARARGS, "decode(src, into, dtype, sizes, isa='auto') -> index of a bad scale, or -1"},
    {"isas", isas, METH_NOARGS, "The kernels that run on this machine, best first."},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {
#ifdef Py_MOD_GIL_NOT_USED
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "lmcache_fp8._native", "Float8 e4m3fn kernels.", 0, methods, slots, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&definition); }
