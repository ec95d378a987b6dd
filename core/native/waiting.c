/* A word of the pool that its server counts up, and that workers wait for: a futex, so that neither side makes a call
 * to the other. */
#include "module.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the kernel compares the first four bytes of the word"
#endif

PyDoc_STRVAR(announce_doc,
             "announce(known, word, /)\n--\n\n"
             "Count up a word: `known`, the server's own, and `word`, the same in the pool, both buffers of one u64. Wakes\n"
             "all that wait for it, in any process.");

PyDoc_STRVAR(await_word_doc,
             "await_word(word, seen, seconds, /)\n--\n\n"
             "Wait without the GIL until a buffer's u64 is not `seen` any more, at most so long; what it is then. May\n"
             "return early.");

/* The aligned u64 of a buffer; NULL with an exception set. */
static uint64_t *waiting_word(PyObject *given, Py_buffer *buffer, int flags) {
    if (PyObject_GetBuffer(given, buffer, flags) < 0)
        return NULL;
    if ((uintptr_t)buffer->buf % sizeof(uint64_t) != 0 || buffer->len != (Py_ssize_t)sizeof(uint64_t)) {
        PyErr_SetString(PyExc_ValueError, "this is no buffer of one aligned u64");
        PyBuffer_Release(buffer);
        return NULL;
    }
    return buffer->buf;
}

static PyObject *announce(PyObject *module, PyObject *const *args, Py_ssize_t given) {
    (void)module;
    if (given != 2) {
        PyErr_SetString(PyExc_TypeError, "announce takes the server's word and the pool's");
        return NULL;
    }
    Py_buffer known_buffer, word_buffer;
    uint64_t *known = waiting_word(args[0], &known_buffer, PyBUF_WRITABLE);
    if (known == NULL)
        return NULL;
    uint64_t *word = waiting_word(args[1], &word_buffer, PyBUF_WRITABLE);
    if (word != NULL) {
        *known += 1;
        __atomic_store_n(word, *known, __ATOMIC_RELEASE);
        syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
        PyBuffer_Release(&word_buffer);
    }
    PyBuffer_Release(&known_buffer);
    return word == NULL ? NULL : Py_NewRef(Py_None);
}

static PyObject *await_word(PyObject *module, PyObject *const *args, Py_ssize_t given) {
    (void)module;
    if (given != 3) {
        PyErr_SetString(PyExc_TypeError, "await_word takes the word, what was seen of it, and seconds");
        return NULL;
    }
    uint64_t seen = PyLong_AsUnsignedLongLong(args[1]);
    double seconds = PyErr_Occurred() ? -1 : PyFloat_AsDouble(args[2]);
    if (PyErr_Occurred())
        return NULL;
    if (!(seconds >= 0 && seconds < 1e9)) {
        PyErr_SetString(PyExc_ValueError, "seconds must be from 0 to 1e9");
        return NULL;
    }
    Py_buffer buffer;
    uint64_t *word = waiting_word(args[0], &buffer, PyBUF_SIMPLE);
    if (word == NULL)
        return NULL;
    uint64_t now = __atomic_load_n(word, __ATOMIC_ACQUIRE);
    if (now == seen && seconds > 0) {
        struct timespec left = {.tv_sec = (time_t)seconds, .tv_nsec = (long)((seconds - (double)(time_t)seconds) * 1e9)};
        Py_BEGIN_ALLOW_THREADS
        syscall(SYS_futex, word, FUTEX_WAIT, (uint32_t)seen, &left, NULL, 0);
        now = __atomic_load_n(word, __ATOMIC_ACQUIRE);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&buffer);
    return PyErr_CheckSignals() < 0 ? NULL : PyLong_FromUnsignedLongLong(now);
}

static PyMethodDef waiting_functions[] = {
    {"announce", (PyCFunction)(void (*)(void))announce, METH_FASTCALL, announce_doc},
    {"await_word", (PyCFunction)(void (*)(void))await_word, METH_FASTCALL, await_word_doc},
    {NULL, NULL, 0, NULL},
};

int waiting_add(PyObject *module) { return PyModule_AddFunctions(module, waiting_functions); }
