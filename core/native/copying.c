/* Copies of whole batches, and checksums, for Python.
 *
 * Addresses are plain numbers here, as the client knows them: the caller keeps the memory alive and vouches for its
 * length. We check what we can: shapes, overflow, and that no address is 0 (which is what a tensor on a device has).
 */
#include "module.h"

#include <errno.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "copy.h"
#include "team.h"

/* A thread takes this many bytes at once: a part of a large object, or several small ones. */
#define COPYING_PIECE_BYTES ((size_t)1 << 20)

/* Less than this is done before another thread could take over the interpreter. */
#define COPYING_GIL_BYTES ((size_t)64 << 10)

typedef struct {
    const uint64_t *targets; /* NULL: only compute checksums */
    const uint64_t *sources;
    uint64_t *checksums; /* NULL: only copy */
    size_t count;
    size_t nbytes;
    size_t objects_per_item; /* 0: an item is a piece of one object */
    size_t pieces;           /* of one object, if so */
} copying_batch;

static void copying_object(const copying_batch *batch, size_t i) {
    const void *from = (const void *)(uintptr_t)batch->sources[i];
    if (!batch->targets) {
        batch->checksums[i] = xxh3_64(from, batch->nbytes);
        return;
    }
    void *to = (void *)(uintptr_t)batch->targets[i];
    size_t job_bytes = batch->count * batch->nbytes;
    if (batch->checksums)
        batch->checksums[i] = copy_checksum_of(to, from, batch->nbytes, job_bytes);
    else
        copy_bytes_of(to, from, batch->nbytes, job_bytes);
}

static void copying_item(void *ctx, size_t item) {
    const copying_batch *batch = ctx;
    if (batch->objects_per_item) {
        size_t first = item * batch->objects_per_item, last = first + batch->objects_per_item;
        for (size_t i = first; i < last && i < batch->count; i++)
            copying_object(batch, i);
        return;
    }
    size_t i = item / batch->pieces, at = item % batch->pieces * COPYING_PIECE_BYTES;
    size_t n = batch->nbytes - at < COPYING_PIECE_BYTES ? batch->nbytes - at : COPYING_PIECE_BYTES;
    copy_bytes_of((unsigned char *)(uintptr_t)batch->targets[i] + at,
                  (const unsigned char *)(uintptr_t)batch->sources[i] + at, n, batch->count * batch->nbytes);
}

/* Release the interpreter's lock if it is worth it. */
static void copying_run(copying_batch *batch, unsigned threads) {
    size_t bytes = batch->count * batch->nbytes, items;
    if (!batch->checksums && batch->nbytes > COPYING_PIECE_BYTES) {
        batch->pieces = (batch->nbytes + COPYING_PIECE_BYTES - 1) / COPYING_PIECE_BYTES;
        items = batch->count * batch->pieces;
    } else { /* a checksum reads an object from start to end */
        size_t fit = batch->nbytes ? COPYING_PIECE_BYTES / batch->nbytes : 1;
        batch->objects_per_item = fit ? fit : 1;
        items = (batch->count + batch->objects_per_item - 1) / batch->objects_per_item;
    }
    if (bytes < COPYING_GIL_BYTES) {
        for (size_t item = 0; item < items; item++)
            copying_item(batch, item);
        return;
    }
    Py_BEGIN_ALLOW_THREADS
    team_run(items, team_size(bytes, threads), copying_item, batch);
    Py_END_ALLOW_THREADS
}

/* --- arguments -------------------------------------------------------------------------------------------- */

/* A buffer of addresses, each of `nbytes`. -1 with an exception; otherwise the caller releases the buffer. */
static int copying_addresses(PyObject *given, Py_buffer *found, Py_ssize_t nbytes, const char *what) {
    if (PyObject_GetBuffer(given, found, PyBUF_C_CONTIGUOUS) < 0)
        return -1;
    if (found->len % 8 || (found->len && (uintptr_t)found->buf % 8)) { /* an empty one may be unaligned */
        PyErr_Format(PyExc_ValueError, "%s has %zd bytes at %p: give 8 aligned bytes for each address, as "
                     "array('Q', ...) has", what, found->len, found->buf);
        PyBuffer_Release(found);
        return -1;
    }
    const uint64_t *addresses = found->buf;
    for (Py_ssize_t i = 0; i < found->len / 8; i++)
        if (addresses[i] == 0 || addresses[i] > UINT64_MAX - (uint64_t)nbytes) {
            PyErr_Format(PyExc_ValueError, "%s[%zd] is the address %llu, and no object of %zd bytes lies there: give "
                         "host memory", what, i, (unsigned long long)addresses[i], nbytes);
            PyBuffer_Release(found);
            return -1;
        }
    return 0;
}

static int copying_sizes(Py_ssize_t nbytes, int threads) {
    if (nbytes < 0) {
        PyErr_Format(PyExc_ValueError, "nbytes is %zd: it is the length of each object", nbytes);
        return -1;
    }
    if (threads < 0) {
        PyErr_Format(PyExc_ValueError, "threads is %d: give how many may copy at once", threads);
        return -1;
    }
    return 0;
}

/* Checksums that Python gets as bytes; NULL with an exception if there is no memory. */
static PyObject *copying_checksums(size_t count) {
    return PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(count * 8));
}

static PyObject *copying_overflow(size_t count, Py_ssize_t nbytes) {
    return PyErr_Format(PyExc_ValueError, "%zu objects of %zd bytes are more than the address space", count, nbytes);
}

/* --- functions -------------------------------------------------------------------------------------------- */

PyDoc_STRVAR(copy_many_doc,
             "copy_many(targets, sources, nbytes, threads=1, checksums=False)\n--\n\n"
             "Copy objects of nbytes between addresses (buffers of u64), by at most so many threads, without the GIL.\n"
             "The caller holds the memory. With checksums, returns the xxh3_64 of each as u64; else None.");

static PyObject *copy_many(PyObject *module, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"targets", "sources", "nbytes", "threads", "checksums", NULL};
    PyObject *given_targets, *given_sources, *result = NULL;
    Py_buffer targets, sources;
    Py_ssize_t nbytes;
    int threads = 1, checksums = 0;
    (void)module;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOn|ip:copy_many", names, &given_targets, &given_sources, &nbytes,
                                     &threads, &checksums) ||
        copying_sizes(nbytes, threads) < 0)
        return NULL;
    if (copying_addresses(given_targets, &targets, nbytes, "targets") < 0)
        return NULL;
    if (copying_addresses(given_sources, &sources, nbytes, "sources") < 0) {
        PyBuffer_Release(&targets);
        return NULL;
    }
    size_t count = (size_t)sources.len / 8;
    if (targets.len != sources.len)
        PyErr_Format(PyExc_ValueError, "%zd targets for %zd sources: give one for each", targets.len / 8,
                     sources.len / 8);
    else if (nbytes && count > (size_t)PY_SSIZE_T_MAX / (size_t)nbytes)
        copying_overflow(count, nbytes);
    else if ((result = checksums ? copying_checksums(count) : Py_NewRef(Py_None)) != NULL) {
        copying_batch batch = {
            .targets = targets.buf, .sources = sources.buf, .count = count, .nbytes = (size_t)nbytes};
        if (checksums)
            batch.checksums = (uint64_t *)(void *)PyBytes_AS_STRING(result);
        copying_run(&batch, (unsigned)threads);
    }
    PyBuffer_Release(&targets);
    PyBuffer_Release(&sources);
    return result;
}

PyDoc_STRVAR(checksum_many_doc,
             "checksum_many(addresses, nbytes, threads=1)\n--\n\n"
             "The xxh3_64 of each object of nbytes at these addresses (a buffer of u64), as u64, without the GIL.\n"
             "The caller holds the memory.");

static PyObject *checksum_many(PyObject *module, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"addresses", "nbytes", "threads", NULL};
    PyObject *given, *result = NULL;
    Py_buffer addresses;
    Py_ssize_t nbytes;
    int threads = 1;
    (void)module;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "On|i:checksum_many", names, &given, &nbytes, &threads) ||
        copying_sizes(nbytes, threads) < 0 || copying_addresses(given, &addresses, nbytes, "addresses") < 0)
        return NULL;
    size_t count = (size_t)addresses.len / 8;
    if (nbytes && count > (size_t)PY_SSIZE_T_MAX / (size_t)nbytes)
        copying_overflow(count, nbytes);
    else if ((result = copying_checksums(count)) != NULL) {
        copying_batch batch = {.sources = addresses.buf, .count = count, .nbytes = (size_t)nbytes};
        batch.checksums = (uint64_t *)(void *)PyBytes_AS_STRING(result);
        copying_run(&batch, (unsigned)threads);
    }
    PyBuffer_Release(&addresses);
    return result;
}

PyDoc_STRVAR(unreachable_doc,
             "unreachable(addresses, nbytes, writes=False)\n--\n\n"
             "The position of the first object of nbytes at these addresses (a buffer of u64) that cannot be read (or\n"
             "with `writes`, written), because a part of it is mapped no more, lies behind the end of its file, is\n"
             "read-only, or would need memory that there is not; -1: none. Changes no byte.");

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif

/* A futex operation that wakes and moves nobody, and adds 0: the kernel looks at the word as we would, but answers EFAULT
 * where we would get a signal. */
static int reaches_word(uintptr_t address, int writes) {
    static uint32_t own;
    void *word = (void *)(address & ~(uintptr_t)3);
    long answer = writes ? syscall(SYS_futex, &own, FUTEX_WAKE_OP_PRIVATE, 0, NULL, word,
                                   FUTEX_OP(FUTEX_OP_ADD, 0, FUTEX_OP_CMP_EQ, 0))
                         : syscall(SYS_futex, word, FUTEX_CMP_REQUEUE_PRIVATE, 0, NULL, &own, 0);
    return answer >= 0 || errno != EFAULT;
}

/* Touches every page as the copy will, also those that have to be allocated first: a page of a full tmpfs is a signal, too.
 * Systems before Linux 5.14 look at a word in each page instead. */
static int reaches(uintptr_t address, size_t nbytes, int writes) {
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), first = address & ~(page - 1), last = address + nbytes - 1;
    int kept = errno, reached;
    if (madvise((void *)first, last - first + 1, writes ? MADV_POPULATE_WRITE : MADV_POPULATE_READ) == 0)
        reached = 1;
    else if (errno != EINVAL)
        reached = errno != EFAULT && errno != ENOMEM;
    else
        for (reached = 1, address = first; reached && address <= last; address += page)
            reached = reaches_word(address > last - 3 ? last : address, writes);
    errno = kept;
    return reached;
}

static PyObject *unreachable(PyObject *module, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"addresses", "nbytes", "writes", NULL};
    PyObject *given;
    Py_buffer addresses;
    Py_ssize_t nbytes, first = -1;
    int writes = 0;
    (void)module;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "On|p:unreachable", names, &given, &nbytes, &writes) ||
        copying_sizes(nbytes, 1) < 0 || copying_addresses(given, &addresses, nbytes, "addresses") < 0)
        return NULL;
    const uint64_t *starts = addresses.buf;
    for (Py_ssize_t i = 0; nbytes && first < 0 && i < addresses.len / 8; i++)
        if (!reaches((uintptr_t)starts[i], (size_t)nbytes, writes))
            first = i;
    PyBuffer_Release(&addresses);
    return PyLong_FromSsize_t(first);
}

PyDoc_STRVAR(xxh3_64_doc, "xxh3_64(buffer, /)\n--\n\n"
                          "The checksum of a buffer's bytes, as xxhash.xxh3_64_intdigest gives it.");

static PyObject *xxh3_64_of(PyObject *module, PyObject *given) {
    Py_buffer found;
    uint64_t checksum;
    (void)module;
    if (PyObject_GetBuffer(given, &found, PyBUF_C_CONTIGUOUS) < 0)
        return NULL;
    if ((size_t)found.len < COPYING_GIL_BYTES)
        checksum = xxh3_64(found.buf, (size_t)found.len);
    else {
        Py_BEGIN_ALLOW_THREADS
        checksum = xxh3_64(found.buf, (size_t)found.len);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&found);
    return PyLong_FromUnsignedLongLong(checksum);
}

static PyMethodDef copying_functions[] = {
    {"copy_many", (PyCFunction)(void (*)(void))copy_many, METH_VARARGS | METH_KEYWORDS, copy_many_doc},
    {"checksum_many", (PyCFunction)(void (*)(void))checksum_many, METH_VARARGS | METH_KEYWORDS, checksum_many_doc},
    {"unreachable", (PyCFunction)(void (*)(void))unreachable, METH_VARARGS | METH_KEYWORDS, unreachable_doc},
    {"xxh3_64", xxh3_64_of, METH_O, xxh3_64_doc},
    {NULL, NULL, 0, NULL},
};

int copying_add(PyObject *module) { return PyModule_AddFunctions(module, copying_functions); }
