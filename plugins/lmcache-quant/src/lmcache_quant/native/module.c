/* lmcache_quant._native: whole objects to eight or four bits a value and back, without the GIL.
 *
 * An encoded object: the grids of all units, then the codes of all units, in the order of `walk`: for every place of
 * the outer axes the keys, then the values, each in runs of `group` tokens. A grid is half floats: the step, and with
 * four bits the least value after it.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "quant.h"

#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define OUTER_MAX 8

typedef struct {
    int dtype, nibbles[2]; /* of values, and of keys */
    uint64_t half_stride, tokens, token_stride, width, dim, group, outer_axes;
    uint64_t count[OUTER_MAX], stride[OUTER_MAX];
    size_t places, elements, grid_bytes, code_bytes;
    const quant_kernels *kernels;
} plan;

static const size_t itemsizes[QUANT_DTYPES] = {2, 2, 4};

/* Rounding mode and flush-to-zero belong to the thread; the bytes of an object must not depend on them. */
static unsigned int set_float_mode(void) {
#if defined(__x86_64__)
    unsigned int old = _mm_getcsr();
    _mm_setcsr(0x1F80); /* to nearest even, denormals kept, no traps */
    return old;
#else
    return 0;
#endif
}

static void restore_float_mode(unsigned int old) {
#if defined(__x86_64__)
    _mm_setcsr(old);
#endif
    (void)old;
}

static size_t grids_of(const plan *p, int keys, size_t rows) {
    return (p->nibbles[keys] ? 4 : 2) * (keys ? p->width : rows * (p->width / p->dim));
}

static size_t codes_of(const plan *p, int keys, size_t rows) {
    const size_t run = keys ? p->width : p->dim, runs = keys ? 1 : p->width / p->dim;
    return rows * runs * (p->nibbles[keys] ? (run + 1) / 2 : run);
}

/* Where the place begins, in elements. */
static size_t start_of(const plan *p, size_t place) {
    size_t at = 0;
    for (size_t axis = p->outer_axes; axis-- > 0; place /= p->count[axis])
        at += place % p->count[axis] * p->stride[axis];
    return at;
}

/* All units in their order on the medium: encoded from `object` if `encoding`, else decoded into it. 0 if an object
 * cannot be encoded. */
static int walk(const plan *p, int encoding, uint8_t *object, uint8_t *grids, uint8_t *codes, float *scratch) {
    const size_t itemsize = itemsizes[p->dtype], stride = p->token_stride * itemsize;
    for (size_t place = 0; place < p->places; place++) {
        for (int keys = 1; keys >= 0; keys--) {
            const quant_unit *unit = &p->kernels->units[p->dtype][p->nibbles[keys]][keys];
            size_t first = start_of(p, place) + (keys ? 0 : p->half_stride);
            for (size_t t = 0, rows; t < p->tokens; t += rows) {
                rows = p->tokens - t < p->group ? p->tokens - t : p->group;
                uint8_t *at = object + (first + t * p->token_stride) * itemsize;
                if (!encoding)
                    unit->decode(grids, codes, rows, stride, p->width, p->dim, scratch, at);
                else if (!unit->encode(at, rows, stride, p->width, p->dim, scratch, grids, codes))
                    return 0;
                grids += grids_of(p, keys, rows);
                codes += codes_of(p, keys, rows);
            }
        }
    }
    return 1;
}

static int avx2_here(void) {
#if defined(__x86_64__)
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
#else
    return 0;
#endif
}

static const quant_kernels *kernels_named(const char *name) {
#if defined(__x86_64__)
    if ((!strcmp(name, "auto") || !strcmp(name, "avx2")) && avx2_here())
        return &quant_avx2;
#endif
    if (!strcmp(name, "auto") || !strcmp(name, "plain"))
        return &quant_plain;
    PyErr_Format(PyExc_ValueError, "this machine has no kernels named '%s': use one of isas()", name);
    return NULL;
}

static int times(size_t *value, uint64_t by) { return __builtin_mul_overflow(*value, (size_t)by, value); }

static int reach(size_t *value, uint64_t count, uint64_t stride) {
    size_t step = (size_t)stride;
    return times(&step, count - 1) || __builtin_add_overflow(*value, step, value);
}

/* Read the sizes, and prove that no unit ends behind the object. 0, or -1 with ValueError set. */
static int complete(plan *p, const Py_buffer *sizes, const char *isa) {
    uint64_t field[7];
    const char *wrong = "sizes are seven numbers of 64 bits, and two more for each of at most eight outer axes";
    p->kernels = kernels_named(isa);
    if (!p->kernels)
        return -1;
    if (sizes->len < (Py_ssize_t)sizeof field)
        goto refused;
    memcpy(field, sizes->buf, sizeof field);
    p->half_stride = field[0], p->tokens = field[1], p->token_stride = field[2], p->width = field[3];
    p->dim = field[4], p->group = field[5], p->outer_axes = field[6];
    if (p->outer_axes > OUTER_MAX || (size_t)sizes->len != sizeof field + 16 * (size_t)p->outer_axes)
        goto refused;
    wrong = "dtype must be 0, 1 or 2, every count at least 1, and the width a multiple of dim";
    if (p->dtype < 0 || p->dtype >= QUANT_DTYPES || !p->tokens || !p->dim || !p->width || !p->group ||
        p->width % p->dim)
        goto refused;
    size_t end = (size_t)p->width;
    int over = reach(&end, 2, p->half_stride) || reach(&end, p->tokens, p->token_stride);
    p->places = 1;
    for (size_t axis = 0; axis < p->outer_axes; axis++) {
        memcpy(&p->count[axis], (const char *)sizes->buf + sizeof field + 16 * axis, 8);
        memcpy(&p->stride[axis], (const char *)sizes->buf + sizeof field + 16 * axis + 8, 8);
        if (!p->count[axis])
            goto refused;
        over |= times(&p->places, p->count[axis]) || reach(&end, p->count[axis], p->stride[axis]);
    }
    p->elements = 2;
    over |= times(&p->elements, p->places) || times(&p->elements, p->tokens) || times(&p->elements, p->width);
    wrong = "the sizes are beyond what memory can address, or leave an object's end";
    if (over || p->elements > PY_SSIZE_T_MAX / 16 || end > p->elements)
        goto refused;
    size_t groups = (size_t)(p->tokens / p->group), rest = (size_t)(p->tokens % p->group);
    p->grid_bytes = p->code_bytes = 0;
    for (int keys = 0; keys < 2; keys++) {
        size_t whole = groups * grids_of(p, keys, (size_t)p->group) + (rest ? grids_of(p, keys, rest) : 0);
        p->grid_bytes += p->places * whole;
        p->code_bytes += p->places * codes_of(p, keys, (size_t)p->tokens);
    }
    return 0;
refused:
    PyErr_SetString(PyExc_ValueError, wrong);
    return -1;
}

static int length_is(const char *what, const Py_buffer *buffer, size_t wanted) {
    if ((size_t)buffer->len == wanted)
        return 1;
    PyErr_Format(PyExc_ValueError, "%s has %zd bytes and the sizes ask for %zu", what, buffer->len, wanted);
    return 0;
}

/* What a unit needs: see encode_unit. A unit's grids are no more than an object has values. */
static float *scratch_of(const plan *p) {
    size_t rows = (size_t)(p->tokens < p->group ? p->tokens : p->group);
    size_t heads = rows * (size_t)(p->width / p->dim), grids = heads > p->width ? heads : (size_t)p->width;
    float *scratch = malloc(sizeof(float) * (3 * grids + (size_t)p->width));
    if (!scratch)
        PyErr_NoMemory();
    return scratch;
}

static PyObject *encode(PyObject *module, PyObject *args) {
    Py_buffer src, sizes;
    plan p = {0};
    const char *isa = "auto";
    PyObject *out = NULL;
    float *scratch = NULL;
    (void)module;
    if (!PyArg_ParseTuple(args, "y*ippy*|s", &src, &p.dtype, &p.nibbles[1], &p.nibbles[0], &sizes, &isa))
        return NULL;
    if (complete(&p, &sizes, isa) == 0 && length_is("src", &src, p.elements * itemsizes[p.dtype]) &&
        (scratch = scratch_of(&p)))
        out = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(p.grid_bytes + p.code_bytes));
    if (out) {
        uint8_t *at = (uint8_t *)PyBytes_AsString(out); /* ours alone until it is returned */
        int fits;
        Py_BEGIN_ALLOW_THREADS
        unsigned int old = set_float_mode();
        fits = walk(&p, 1, src.buf, at, at + p.grid_bytes, scratch);
        restore_float_mode(old);
        Py_END_ALLOW_THREADS
        if (!fits) {
            Py_DECREF(out);
            out = Py_None;
            Py_INCREF(out);
        }
    }
    free(scratch);
    PyBuffer_Release(&src);
    PyBuffer_Release(&sizes);
    return out;
}

/* The first half float of the grids that no encoder writes, or -1. */
static Py_ssize_t bad_grid(const plan *p, const uint8_t *grids) {
    for (size_t at = 0; at < p->grid_bytes; at += 2) {
        uint16_t half;
        memcpy(&half, grids + at, 2);
        if ((half & 0x7C00) == 0x7C00)
            return (Py_ssize_t)(at / 2);
    }
    return -1;
}

static PyObject *decode(PyObject *module, PyObject *args) {
    Py_buffer src, into, sizes;
    plan p = {0};
    const char *isa = "auto";
    PyObject *answer = NULL;
    float *scratch = NULL;
    (void)module;
    if (!PyArg_ParseTuple(args, "y*w*ippy*|s", &src, &into, &p.dtype, &p.nibbles[1], &p.nibbles[0], &sizes, &isa))
        return NULL;
    if (complete(&p, &sizes, isa) == 0 && length_is("into", &into, p.elements * itemsizes[p.dtype]) &&
        length_is("src", &src, p.grid_bytes + p.code_bytes) && (scratch = scratch_of(&p))) {
        Py_ssize_t bad;
        uint8_t *at = src.buf;
        Py_BEGIN_ALLOW_THREADS
        unsigned int old = set_float_mode();
        bad = bad_grid(&p, at);
        if (bad < 0)
            walk(&p, 0, into.buf, at, at + p.grid_bytes, scratch);
        restore_float_mode(old);
        Py_END_ALLOW_THREADS
        answer = PyLong_FromSsize_t(bad);
    }
    free(scratch);
    PyBuffer_Release(&src);
    PyBuffer_Release(&into);
    PyBuffer_Release(&sizes);
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
    {"encode", encode, METH_VARARGS, "encode(src, dtype, k_nibbles, v_nibbles, sizes, isa='auto') -> bytes, or None"},
    {"decode", decode, METH_VARARGS, "decode(src, into, dtype, k_nibbles, v_nibbles, sizes, isa='auto') -> -1, or bad"},
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
    PyModuleDef_HEAD_INIT, "lmcache_quant._native", "KV in eight and four bits.", 0, methods, slots, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&definition); }
