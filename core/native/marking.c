/* Slot words: the state of each slot, in the server's own memory and in the pool. */
#include "module.h"

#include <stdbool.h>
#include <stdint.h>

enum { MARKING_PAGE_BITS = 12 };

PyDoc_STRVAR(mark_slots_doc,
             "mark_slots(known, words, offsets, data_offset, word, /)\n--\n\n"
             "Write the word of the slot at each offset (a list) to both tables, buffers of u64 with one for each page\n"
             "from data_offset on. IndexError for an offset outside of them, and then nothing is written.");

/* A writable buffer of aligned u64 as a table, and its length; NULL with an exception set. */
static uint64_t *marking_table(PyObject *given, Py_buffer *buffer, size_t *count) {
    if (PyObject_GetBuffer(given, buffer, PyBUF_WRITABLE) < 0)
        return NULL;
    if ((uintptr_t)buffer->buf % sizeof(uint64_t) != 0 || buffer->len % (Py_ssize_t)sizeof(uint64_t) != 0) {
        PyErr_SetString(PyExc_ValueError, "a table of slots is not an aligned buffer of u64");
        PyBuffer_Release(buffer);
        return NULL;
    }
    *count = (size_t)buffer->len / sizeof(uint64_t);
    return buffer->buf;
}

/* The index of an offset's word, or `count` with an exception set. */
static size_t marking_place(PyObject *offset, uint64_t data_offset, size_t count) {
    uint64_t value = PyLong_AsUnsignedLongLong(offset);
    if (value == UINT64_MAX && PyErr_Occurred()) {
        if (PyErr_ExceptionMatches(PyExc_OverflowError)) /* below 0, or far past the end */
            PyErr_Format(PyExc_IndexError, "%S", offset);
        return count;
    }
    size_t at = value < data_offset ? count : (size_t)((value - data_offset) >> MARKING_PAGE_BITS);
    if (at >= count) {
        PyErr_Format(PyExc_IndexError, "%S", offset);
        return count;
    }
    return at;
}

static PyObject *mark_slots(PyObject *module, PyObject *const *args, Py_ssize_t given) {
    (void)module;
    if (given != 5 || !PyList_Check(args[2])) {
        PyErr_SetString(PyExc_TypeError, "mark_slots takes two buffers, a list of offsets, data_offset and the word");
        return NULL;
    }
    uint64_t data_offset = PyLong_AsUnsignedLongLong(args[3]), word = PyLong_AsUnsignedLongLong(args[4]);
    if (PyErr_Occurred())
        return NULL;
    Py_buffer known_buffer, words_buffer;
    size_t count, known_count;
    PyObject *offsets = args[2];
    uint64_t *known = marking_table(args[0], &known_buffer, &known_count);
    if (known == NULL)
        return NULL;
    uint64_t *words = marking_table(args[1], &words_buffer, &count);
    if (words == NULL) {
        PyBuffer_Release(&known_buffer);
        return NULL;
    }
    bool good = known_count == count;
    if (!good)
        PyErr_SetString(PyExc_ValueError, "the two tables differ in length");
    /* No Python code runs from here on, so the list cannot change. */
    for (Py_ssize_t i = 0; good && i < PyList_GET_SIZE(offsets); i++)
        good = marking_place(PyList_GET_ITEM(offsets, i), data_offset, count) < count;
    for (Py_ssize_t i = 0; good && i < PyList_GET_SIZE(offsets); i++) {
        size_t at = marking_place(PyList_GET_ITEM(offsets, i), data_offset, count);
        known[at] = word;
        __atomic_store_n(&words[at], word, __ATOMIC_RELAXED); /* other processes read it */
    }
    PyBuffer_Release(&words_buffer);
    PyBuffer_Release(&known_buffer);
    return good ? Py_NewRef(Py_None) : NULL;
}

static PyMethodDef marking_functions[] = {
    {"mark_slots", (PyCFunction)(void (*)(void))mark_slots, METH_FASTCALL, mark_slots_doc},
    {NULL, NULL, 0, NULL},
};

int marking_add(PyObject *module) { return PyModule_AddFunctions(module, marking_functions); }
