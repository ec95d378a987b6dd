/* lmcache_blend._native: keys moved to other positions, and where chunks of a text end, without the GIL. */
#define PY_SSIZE_T_CLEAN
#define _GNU_SOURCE /* sincos */
#include <Python.h>

#include "blend.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define AXES_MAX 8
#define STEP_TOKENS 64 /* of one head at a time: the table of so many stays in the first cache */

static const Py_ssize_t itemsizes[BLEND_KINDS] = {4, 2, 2};

/* Rounding mode and flush-to-zero belong to the thread; bytes must not depend on them. */
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

static int avx2_here(void) {
#if defined(__x86_64__)
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
#else
    return 0;
#endif
}

static const blend_kernels *kernels_named(const char *name) {
#if defined(__x86_64__)
    if ((!strcmp(name, "auto") || !strcmp(name, "avx2")) && avx2_here())
        return &blend_avx2;
#endif
    if (!strcmp(name, "auto") || !strcmp(name, "plain"))
        return &blend_plain;
    PyErr_Format(PyExc_ValueError, "this machine has no kernels named '%s': use one of isas()", name);
    return NULL;
}

/* --- angles -------------------------------------------------------------------------------------------- */

#define NEAR_RADIANS 0x1p17f /* up to here the products of single floats are within 2^-7 of what they stand for */

/* Tokens that all move equally far. The model's angles are products of single floats, and so each difference is off
 * that of the run by a little: only the run's own has to be looked up. */
static void turn_run(const int64_t *from, const int64_t *to, size_t run, const float *inv_freq, size_t pairs,
                     float *restrict at) {
    const int64_t first = from[0] > to[0] ? from[0] : to[0];
    int64_t most = first;
    for (size_t t = 1; t < run; t++) {
        const int64_t larger = from[t] > to[t] ? from[t] : to[t];
        most = larger > most ? larger : most;
    }
    for (size_t p = 0; p < pairs; p++) {
        const float each = inv_freq[p];
        const double whole = (double)(to[0] - from[0]) * (double)each, c = cos(whole), s = sin(whole);
        const int near = run > 1 && (float)most * fabsf(each) < NEAR_RADIANS;
        for (size_t t = 0; near && t < run; t++) {
            const float before = (float)from[t] * each, after = (float)to[t] * each;
            const double off = ((double)after - (double)before) - whole, square = off * off;
            const double c_off = 1.0 - square * (0.5 - square / 24.0), s_off = off * (1.0 - square / 6.0);
            at[2 * t * pairs + p] = (float)(c * c_off - s * s_off);
            at[(2 * t + 1) * pairs + p] = (float)(s * c_off + c * s_off);
        }
        for (size_t t = 0; !near && t < run; t++) {
            const float before = (float)from[t] * each, after = (float)to[t] * each;
            const double angle = (double)after - (double)before;
            at[2 * t * pairs + p] = (float)cos(angle), at[(2 * t + 1) * pairs + p] = (float)sin(angle);
        }
    }
}

static PyObject *turn(PyObject *module, PyObject *args) {
    Py_buffer freq, old, new, table;
    PyObject *answer = NULL;
    (void)module;
    if (!PyArg_ParseTuple(args, "y*y*y*w*", &freq, &old, &new, &table))
        return NULL;
    const size_t pairs = (size_t)freq.len / 4, tokens = (size_t)old.len / 8;
    size_t wanted;
    if (freq.len % 4 || old.len % 8 || old.len != new.len || !pairs ||
        __builtin_mul_overflow(tokens * 8, pairs, &wanted) || (size_t)table.len != wanted) {
        PyErr_SetString(PyExc_ValueError, "the table has no cosine and sine for each pair at each position");
    } else {
        const float *inv_freq = freq.buf;
        const int64_t *from = old.buf, *to = new.buf;
        float *at = table.buf;
        Py_BEGIN_ALLOW_THREADS
        unsigned int mode = set_float_mode();
        for (size_t t = 0, run; t < tokens; t += run, at += 2 * pairs * run) {
            for (run = 1; t + run < tokens && to[t + run] - from[t + run] == to[t] - from[t]; run++)
                ;
            turn_run(from + t, to + t, run, inv_freq, pairs, at);
        }
        restore_float_mode(mode);
        Py_END_ALLOW_THREADS
        answer = Py_None;
        Py_INCREF(answer);
    }
    PyBuffer_Release(&freq), PyBuffer_Release(&old), PyBuffer_Release(&new), PyBuffer_Release(&table);
    return answer;
}

/* --- keys ---------------------------------------------------------------------------------------------- */

typedef struct {
    const uint8_t *source;
    uint8_t *target;
    const float *table; /* NULL: a copy */
    size_t pairs, rest, row_bytes, tokens;
    Py_ssize_t source_token, target_token; /* strides, in bytes */
    int axes;                              /* the others, without the values of a head */
    Py_ssize_t count[AXES_MAX], source_step[AXES_MAX], target_step[AXES_MAX];
    blend_rows *rows;
} job;

/* A run of tokens at every place of the other axes, so that the table is read from memory once. */
static void walk(const job *j, size_t first, size_t end) {
    Py_ssize_t at[AXES_MAX] = {0};
    const uint8_t *source = j->source + (Py_ssize_t)first * j->source_token;
    uint8_t *target = j->target + (Py_ssize_t)first * j->target_token;
    for (;;) {
        const uint8_t *from = source;
        uint8_t *to = target;
        if (j->table) {
            j->rows(from, j->source_token, to, j->target_token, j->table + 2 * j->pairs * first, end - first, j->pairs,
                    j->rest);
        } else if (j->source_token == (Py_ssize_t)j->row_bytes && j->target_token == j->source_token) {
            memcpy(to, from, j->row_bytes * (end - first));
        } else {
            for (size_t t = first; t < end; t++)
                memcpy(to, from, j->row_bytes), from += j->source_token, to += j->target_token;
        }
        int axis = j->axes - 1;
        for (; axis >= 0; axis--) {
            source += j->source_step[axis], target += j->target_step[axis];
            if (++at[axis] < j->count[axis])
                break;
            source -= at[axis] * j->source_step[axis], target -= at[axis] * j->target_step[axis];
            at[axis] = 0;
        }
        if (axis < 0)
            return;
    }
}

/* The bytes that an array touches, from `low` to `high`. */
static void reach_of(const Py_buffer *array, uintptr_t *low, uintptr_t *high) {
    *low = *high = (uintptr_t)array->buf;
    for (int axis = 0; axis < array->ndim; axis++) {
        const Py_ssize_t span = (array->shape[axis] - 1) * array->strides[axis];
        if (span < 0)
            *low -= (uintptr_t)-span;
        else
            *high += (uintptr_t)span;
    }
    *high += (uintptr_t)array->itemsize;
}

static const char *wrong_with(const Py_buffer *source, const Py_buffer *target, int kind, int axis, int dimensions) {
    const int last = source->ndim - 1;
    if (kind < 0 || kind >= BLEND_KINDS || source->itemsize != itemsizes[kind] || target->itemsize != itemsizes[kind])
        return "the arrays' items are not of this kind";
    if (last < 1 || last > AXES_MAX || target->ndim != source->ndim || axis < 0 || axis >= last)
        return "the arrays need the same axes, at most 9 of them, tokens on one that is not the last";
    for (int each = 0; each <= last; each++)
        if (source->shape[each] != target->shape[each])
            return "the arrays differ in shape";
    if (dimensions < 0 || dimensions % 2 || dimensions > source->shape[last])
        return "so many values of a head cannot be rotated";
    for (const Py_buffer *each = source; each; each = each == source ? target : NULL)
        if (each->shape[last] > 1 && each->strides[last] != each->itemsize)
            return "the values of a head do not lie in a row";
    return NULL;
}

/* Whether two arrays share bytes without being the same. */
static int overlaps(const Py_buffer *source, const Py_buffer *target) {
    uintptr_t low, high, other_low, other_high;
    reach_of(source, &low, &high);
    reach_of(target, &other_low, &other_high);
    if (high <= other_low || other_high <= low)
        return 0;
    return source->buf != target->buf ||
           memcmp(source->strides, target->strides, sizeof *source->strides * (size_t)source->ndim) != 0;
}

static const char *prepared(job *j, const Py_buffer *source, const Py_buffer *target, const Py_buffer *table,
                            int kind, int dimensions, int axis) {
    const char *wrong = wrong_with(source, target, kind, axis, table->buf ? dimensions : 0);
    if (wrong)
        return wrong;
    const int last = source->ndim - 1;
    const size_t head = (size_t)source->shape[last];
    j->tokens = (size_t)source->shape[axis];
    j->source = source->buf, j->target = target->buf, j->table = table->buf;
    j->pairs = (size_t)dimensions / 2, j->rest = head - 2 * j->pairs, j->row_bytes = head * (size_t)source->itemsize;
    j->source_token = source->strides[axis], j->target_token = target->strides[axis];
    for (int each = 0; each < last; each++) {
        if (each == axis)
            continue;
        j->count[j->axes] = source->shape[each];
        j->source_step[j->axes] = source->strides[each], j->target_step[j->axes++] = target->strides[each];
    }
    if (table->buf && (size_t)table->len != j->tokens * j->pairs * 8)
        return "the table has no cosine and sine for each pair of each token";
    if (source->len && overlaps(source, target))
        return "the arrays overlap and are not the same";
    return NULL;
}

static PyObject *move(PyObject *module, PyObject *args) {
    PyObject *given_source, *given_target, *given_table, *answer = NULL;
    Py_buffer source = {0}, target = {0}, table = {0};
    int kind, dimensions, neighbours, axis;
    const char *isa = "auto", *wrong;
    job j = {0};
    (void)module;
    if (!PyArg_ParseTuple(args, "OOOiipi|s", &given_source, &given_target, &given_table, &kind, &dimensions,
                          &neighbours, &axis, &isa))
        return NULL;
    const blend_kernels *kernels = kernels_named(isa);
    if (kernels && PyObject_GetBuffer(given_source, &source, PyBUF_STRIDES) == 0 &&
        PyObject_GetBuffer(given_target, &target, PyBUF_STRIDES | PyBUF_WRITABLE) == 0 &&
        (given_table == Py_None || PyObject_GetBuffer(given_table, &table, PyBUF_SIMPLE) == 0)) {
        wrong = prepared(&j, &source, &target, &table, kind, dimensions, axis);
        if (wrong) {
            PyErr_SetString(PyExc_ValueError, wrong);
        } else {
            j.rows = kernels->rows[kind][neighbours];
            Py_BEGIN_ALLOW_THREADS
            unsigned int mode = set_float_mode();
            if (source.len && (j.table || j.source != j.target))
                for (size_t t = 0, end; t < j.tokens; t = end) {
                    end = !j.table || j.tokens - t < STEP_TOKENS ? j.tokens : t + STEP_TOKENS;
                    walk(&j, t, end);
                }
            restore_float_mode(mode);
            Py_END_ALLOW_THREADS
            answer = Py_None;
            Py_INCREF(answer);
        }
    }
    for (Py_buffer *each = &source; each; each = each == &source ? &target : each == &target ? &table : NULL)
        if (each->obj)
            PyBuffer_Release(each);
    return answer;
}

/* --- chunks -------------------------------------------------------------------------------------------- */

/* Spreads a token over 64 bits, so that those near each other look unrelated. */
static inline uint64_t mixed(uint32_t token) {
    uint64_t word = ((uint64_t)token + 1) * 0x9E3779B97F4A7C15u;
    return (word ^ word >> 32) * 0xD6E8FEB86659FD93u;
}

/* A token's part moves up by two bits a step: 32 steps later it is gone. */
static size_t ends_of(const uint32_t *words, size_t n, size_t minimum, uint64_t below, size_t maximum, int64_t *ends) {
    uint64_t hash = 0;
    size_t count = 0, first = 0;
    for (size_t at = 0; at < n; at++) {
        hash = (hash << 2) + mixed(words[at]);
        const size_t length = at + 1 - first;
        if (length >= minimum && (hash < below || length >= maximum))
            ends[count++] = (int64_t)(first = at + 1);
    }
    return count;
}

static PyObject *cut(PyObject *module, PyObject *args) {
    Py_buffer words;
    Py_ssize_t minimum, mean, maximum;
    PyObject *answer = NULL;
    (void)module;
    if (!PyArg_ParseTuple(args, "y*nnn", &words, &minimum, &mean, &maximum))
        return NULL;
    if (words.len % 4 || minimum < 1 || mean < minimum || maximum < mean) {
        PyErr_SetString(PyExc_ValueError, "the text has no whole words, or the lengths are out of order");
    } else {
        const size_t n = (size_t)words.len / 4;
        int64_t *ends = malloc((n / (size_t)minimum + 1) * sizeof *ends);
        if (!ends) {
            PyErr_NoMemory();
        } else {
            const uint64_t below = mean > minimum ? UINT64_MAX / (uint64_t)(mean - minimum) : UINT64_MAX;
            size_t count;
            Py_BEGIN_ALLOW_THREADS
            count = ends_of(words.buf, n, (size_t)minimum, below, (size_t)maximum, ends);
            Py_END_ALLOW_THREADS
            answer = PyBytes_FromStringAndSize((const char *)ends, (Py_ssize_t)(count * sizeof *ends));
            free(ends);
        }
    }
    PyBuffer_Release(&words);
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
    {"turn", turn, METH_VARARGS, "turn(inv_freq, old_positions, new_positions, table): fill the table."},
    {"move", move, METH_VARARGS, "move(source, target, table, kind, dimensions, interleaved, token_axis, isa='auto')"},
    {"cut", cut, METH_VARARGS, "cut(words, minimum, mean, maximum) -> ends, as 64-bit numbers"},
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
    PyModuleDef_HEAD_INIT, "lmcache_blend._native", "Keys moved, texts cut.", 0, methods, slots, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&definition); }
