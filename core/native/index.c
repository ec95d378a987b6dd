/* The type Index: the pool's index for Python. index.h describes it; index_find.h says why reading it is safe. */
#include "module.h"

#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>

#include "index_digest.h"
#include "index_find.h"
#include "index_lent.h"
#include "index_write.h"
#include "tally.h"

/* Up to this many keys are looked up with the GIL held: 2,048 of them take about 20 µs. */
#define HELD_KEYS_MAX 2048
/* Keys whose pointers fit on the stack. */
#define STACK_KEYS 1024

static struct {
    PyObject *key, *namespace, *offset, *layout_id, *checksum, *generation;
} names;

typedef struct {
    PyObject_HEAD
    Py_buffer buffer;
    index_writer writer;
    _Atomic uint32_t *verified; /* NULL until a read verifies for the first time */
    unsigned users;             /* calls under way, some of them without the GIL */
    bool open, held;            /* open: calls are allowed; held: we hold the buffer */
    bool keeps_places;          /* somebody refers to entries by their places: none may be moved */
    tally counts;               /* in the buffer, where this process counts */
} Index;

/* --- arguments -------------------------------------------------------------------------------------------- */

static int as_u64(PyObject *value, const char *what, uint64_t *out) {
    unsigned long long number = PyLong_Check(value) ? PyLong_AsUnsignedLongLong(value) : (unsigned long long)-1;
    if (number == (unsigned long long)-1 && (!PyLong_Check(value) || PyErr_Occurred())) {
        PyErr_Format(PyLong_Check(value) ? PyExc_ValueError : PyExc_TypeError,
                     "%s is %R and must be an int from 0 to 2**64 - 1", what, value);
        return -1;
    }
    *out = number;
    return 0;
}

/* Sort positional and keyword arguments into `out` by `parameters` (NULL-ended); the first `required` must be there.
 * Borrowed references. */
static int sort_arguments(const char *function, const char *const *parameters, Py_ssize_t required,
                          PyObject *const *arguments, Py_ssize_t positional, PyObject *keywords, PyObject **out) {
    Py_ssize_t count = 0;
    while (parameters[count])
        out[count++] = NULL;
    if (positional > count) {
        PyErr_Format(PyExc_TypeError, "%s takes %zd arguments and got %zd", function, count, positional);
        return -1;
    }
    for (Py_ssize_t i = 0; i < positional; i++)
        out[i] = arguments[i];
    for (Py_ssize_t k = 0; keywords && k < PyTuple_GET_SIZE(keywords); k++) {
        PyObject *name = PyTuple_GET_ITEM(keywords, k);
        Py_ssize_t i = 0;
        while (i < count && PyUnicode_CompareWithASCIIString(name, parameters[i]) != 0)
            i++;
        if (i == count || out[i]) {
            PyErr_Format(PyExc_TypeError, i == count ? "%s has no argument %R" : "%s got its argument %R twice",
                         function, name);
            return -1;
        }
        out[i] = arguments[positional + k];
    }
    for (Py_ssize_t i = 0; i < required; i++)
        if (!out[i]) {
            PyErr_Format(PyExc_TypeError, "%s needs its argument '%s'", function, parameters[i]);
            return -1;
        }
    return 0;
}

/* The keys of a call: a list or tuple of 32-byte keys, or one buffer of n * 32 bytes. */
typedef struct {
    index_batch batch;
    Py_buffer blob;
    void *heap;
    const unsigned char *stack[STACK_KEYS];
} given_keys;

static void keys_release(given_keys *keys) {
    PyBuffer_Release(&keys->blob);
    PyMem_RawFree(keys->heap);
}

static int wrong_key(PyObject *key, Py_ssize_t at) {
    if (PyBytes_Check(key))
        PyErr_Format(PyExc_ValueError, "key %zd is %zd bytes long, not %d: derive keys with lmcache_core.tokens", at,
                     PyBytes_GET_SIZE(key), INDEX_KEY_BYTES);
    else
        PyErr_Format(PyExc_ValueError, "key %zd is a %s, not %d bytes: derive keys with lmcache_core.tokens", at,
                     Py_TYPE(key)->tp_name, INDEX_KEY_BYTES);
    return -1;
}

static int keys_of_items(given_keys *keys, PyObject *const *items, Py_ssize_t n, bool keep) {
    const unsigned char **pointers = keys->stack;
    if (keep || n > STACK_KEYS) {
        keys->heap = PyMem_RawMalloc((size_t)(n ? n : 1) * (keep ? INDEX_KEY_BYTES : sizeof(void *)));
        if (!keys->heap) {
            PyErr_NoMemory();
            return -1;
        }
        pointers = keys->heap;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        if (i + 8 < n)
            __builtin_prefetch(items[i + 8], 0, 3);
        PyObject *key = items[i];
        if (!PyBytes_Check(key) || PyBytes_GET_SIZE(key) != INDEX_KEY_BYTES)
            return wrong_key(key, i);
        const unsigned char *bytes = (const unsigned char *)PyBytes_AS_STRING(key);
        if (keep)
            memcpy((unsigned char *)keys->heap + i * INDEX_KEY_BYTES, bytes, INDEX_KEY_BYTES);
        else
            pointers[i] = bytes;
    }
    if (keep)
        keys->batch.in_a_row = keys->heap;
    else
        keys->batch.one_by_one = pointers;
    return 0;
}

/* With `keep`, the keys may be used without the GIL, while other threads may empty the list. */
static int keys_take(given_keys *keys, PyObject *given, bool keep) {
    memset(&keys->batch, 0, sizeof keys->batch);
    keys->blob.obj = NULL;
    keys->heap = NULL;
    if (PyList_Check(given) || PyTuple_Check(given)) {
        Py_ssize_t n = PySequence_Fast_GET_SIZE(given);
        keys->batch.n = (uint64_t)n;
        if (keys_of_items(keys, PySequence_Fast_ITEMS(given), n, keep || n > HELD_KEYS_MAX) == 0)
            return 0;
        keys_release(keys);
        return -1;
    }
    if (PyObject_GetBuffer(given, &keys->blob, PyBUF_SIMPLE) < 0) {
        if (PyErr_ExceptionMatches(PyExc_TypeError))
            PyErr_Format(PyExc_TypeError, "keys is a %s: give a list or tuple of bytes, or one buffer",
                         Py_TYPE(given)->tp_name);
        return -1;
    }
    if (keys->blob.len % INDEX_KEY_BYTES != 0) {
        PyErr_Format(PyExc_ValueError, "keys is a buffer of %zd bytes, and %d bytes make a key", keys->blob.len,
                     INDEX_KEY_BYTES);
        keys_release(keys);
        return -1;
    }
    keys->batch.in_a_row = keys->blob.buf;
    keys->batch.n = (uint64_t)(keys->blob.len / INDEX_KEY_BYTES);
    return 0;
}

/* --- making and closing ----------------------------------------------------------------------------------- */

static bool is_open(const Index *self) {
    if (!self->open)
        PyErr_SetString(PyExc_ValueError, "the index is closed: attach to the pool again");
    return self->open;
}

static void let_go(Index *self) {
    if (self->open || self->users || !self->held)
        return;
    if (self->verified)
        munmap((void *)self->verified, (self->writer.view.mask + 1) * sizeof(uint32_t));
    self->verified = NULL;
    self->counts.line = NULL;
    self->held = false;
    PyBuffer_Release(&self->buffer);
}

/* A reader's call runs between these two: another thread's `close` (or code behind an argument) must not free the
 * memory under it. */
static bool enter(Index *self) {
    if (!is_open(self))
        return false;
    self->users++;
    return true;
}

static void leave(Index *self) {
    self->users--;
    let_go(self);
}

static PyObject *index_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *parameters[] = {"buffer",        "index_offset",   "entries", "data_offset",
                                 "segment_bytes", "serving_offset", NULL};
    PyObject *buffer, *given[5];
    uint64_t number[5];
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O$OOOOO:Index", parameters, &buffer, &given[0], &given[1],
                                     &given[2], &given[3], &given[4]))
        return NULL;
    for (int i = 0; i < 5; i++) {
        if (!given[i]) {
            PyErr_Format(PyExc_TypeError, "Index needs its argument '%s'", parameters[i + 1]);
            return NULL;
        }
        if (as_u64(given[i], parameters[i + 1], &number[i]) < 0)
            return NULL;
    }
    Index *self = (Index *)type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    if (PyObject_GetBuffer(buffer, &self->buffer, PyBUF_WRITABLE) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    self->open = self->held = true;
    const char *wrong = "segment_bytes is not the buffer's length";
    if (number[3] == (uint64_t)self->buffer.len)
        wrong = index_view_make(&self->writer.view, self->buffer.buf, number[3], number[0], number[1], number[2],
                                number[4]);
    if (wrong) {
        PyErr_Format(PyExc_ValueError,
                     "%s (index_offset %llu, entries %llu, data_offset %llu, segment_bytes %llu, serving_offset %llu, "
                     "buffer of %zd bytes)",
                     wrong, (unsigned long long)number[0], (unsigned long long)number[1],
                     (unsigned long long)number[2], (unsigned long long)number[3], (unsigned long long)number[4],
                     self->buffer.len);
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static PyObject *index_close(Index *self, PyObject *Py_UNUSED(none)) {
    self->open = false;
    let_go(self);
    Py_RETURN_NONE;
}

static void index_dealloc(Index *self) {
    PyTypeObject *type = Py_TYPE(self);
    self->open = false;
    let_go(self);
    type->tp_free(self);
    Py_DECREF(type);
}

/* --- readers ---------------------------------------------------------------------------------------------- */

/* The first arguments of every reader's call. */
typedef struct {
    uint64_t epoch, space, layout;
    int prefix;
} asked;

static int read_asked(PyObject *const *given, PyObject *prefix, asked *ask) {
    if (as_u64(given[0], "epoch", &ask->epoch) < 0 || as_u64(given[1], "namespace", &ask->space) < 0 ||
        as_u64(given[2], "layout", &ask->layout) < 0)
        return -1;
    ask->prefix = PyObject_IsTrue(prefix);
    return ask->prefix < 0 ? -1 : 0;
}

static int take_batch(given_keys *keys, PyObject *given, const asked *ask, bool keep) {
    if (keys_take(keys, given, keep) < 0)
        return -1;
    keys->batch.space = ask->space;
    keys->batch.layout = ask->layout;
    keys->batch.prefix = ask->prefix;
    return 0;
}

/* What `find` counts: nothing, what it found, or that only if everything was found, because otherwise the server is
 * asked for all of it. */
enum { COUNT_NOTHING = 0, COUNT_HITS = 1, COUNT_IF_ALL = 2 };

static void count_lookup(Index *self, const index_batch *batch, uint64_t hits, int counts, uint64_t began,
                         unsigned weight) {
    bool whole = hits == batch->n;
    if (!self->counts.line || !hits || (counts == COUNT_IF_ALL && !whole))
        return;
    if (whole)
        tally_add(&self->counts, TALLY_LOOKUPS, 1);
    tally_add(&self->counts, TALLY_LOOKUP_HITS, hits);
    if (began)
        tally_add(&self->counts, TALLY_LOOKUP_NS, (tally_now() - began) * weight);
}

static PyObject *find_batch(Index *self, const index_batch *batch, bool mark, int counts) {
    index_place *places = mark ? PyMem_RawMalloc((batch->n ? batch->n : 1) * sizeof *places) : NULL;
    PyObject *result = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)batch->n);
    if (!result || (mark && !places)) {
        Py_XDECREF(result);
        PyMem_RawFree(places);
        return PyErr_NoMemory();
    }
    uint8_t *statuses = (uint8_t *)PyBytes_AS_STRING(result);
    unsigned weight = 0;
    uint64_t began = counts ? tally_begin(&self->counts, batch->n, &weight) : 0, hits = 0;
    PyThreadState *state = batch->n > HELD_KEYS_MAX ? PyEval_SaveThread() : NULL;
    uint64_t count = index_find_batch(&self->writer.view, batch, statuses, places);
    for (uint64_t i = 0; i < count; i++) {
        statuses[i] = statuses[i] == INDEX_HIT;
        hits += statuses[i];
        if (mark && statuses[i])
            index_mark(&self->writer.view, places[i].at, i);
    }
    if (state)
        PyEval_RestoreThread(state);
    PyMem_RawFree(places);
    if (counts)
        count_lookup(self, batch, hits, counts, began, weight);
    if (count < batch->n)
        _PyBytes_Resize(&result, (Py_ssize_t)count);
    return result;
}

static PyObject *index_find_keys(Index *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    static const char *const parameters[] = {"epoch", "namespace", "layout", "keys", "prefix", "mark", "counts", NULL};
    PyObject *given[7], *result = NULL;
    given_keys keys;
    asked ask;
    int mark = 0;
    uint64_t counts = COUNT_NOTHING;
    if (sort_arguments("find", parameters, 5, args, nargs, kwnames, given) < 0 ||
        read_asked(given, given[4], &ask) < 0 || (given[5] && (mark = PyObject_IsTrue(given[5])) < 0) ||
        (given[6] && as_u64(given[6], "counts", &counts) < 0))
        return NULL;
    if (counts > COUNT_IF_ALL)
        return PyErr_Format(PyExc_ValueError, "counts must be 0 (nothing), 1 (hits) or 2 (if all are hits)");
    if (!enter(self))
        return NULL;
    if (!index_served(&self->writer.view, ask.epoch)) {
        result = Py_NewRef(Py_None);
    } else if (take_batch(&keys, given[3], &ask, false) == 0) {
        result = find_batch(self, &keys.batch, mark, (int)counts);
        keys_release(&keys);
    }
    leave(self);
    return result;
}

/* Call it before and after reading the slots at `offsets`: equal numbers mean that their content did not change. */
static PyObject *generations_of(const Index *self, const index_batch *batch, const uint64_t *offsets) {
    size_t n = (size_t)batch->n;
    PyObject *result = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(n * 8));
    index_place *places = PyMem_RawMalloc((n ? n : 1) * sizeof *places);
    uint8_t *statuses = PyMem_RawMalloc(n ? n : 1);
    if (result && places && statuses) {
        /* Ordered after everything that the caller has read in those slots, as in index_unchanged. */
        atomic_thread_fence(memory_order_seq_cst);
        index_find_batch(&self->writer.view, batch, statuses, places);
        for (size_t i = 0; i < n; i++) {
            bool same = statuses[i] == INDEX_HIT && places[i].offset == offsets[i];
            /* Generations are each entry's own: the place is a part of the number, or the key's next incarnation
             * could have the same in an entry nearer to its home. */
            uint64_t entries = self->writer.view.mask + 1;
            uint64_t number = same ? (places[i].sequence >> 2) * entries + places[i].at : 0;
            memcpy(PyBytes_AS_STRING(result) + 8 * i, &number, 8);
        }
    } else {
        Py_CLEAR(result);
        PyErr_NoMemory();
    }
    PyMem_RawFree(places);
    PyMem_RawFree(statuses);
    return result;
}

static PyObject *index_generations(Index *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    static const char *const parameters[] = {"namespace", "layout", "keys", "offsets", NULL};
    PyObject *given[4], *result = NULL;
    Py_buffer offsets;
    given_keys keys;
    asked ask = {.prefix = false};
    if (sort_arguments("generations", parameters, 4, args, nargs, kwnames, given) < 0 ||
        as_u64(given[0], "namespace", &ask.space) < 0 || as_u64(given[1], "layout", &ask.layout) < 0 ||
        PyObject_GetBuffer(given[3], &offsets, PyBUF_SIMPLE) < 0)
        return NULL;
    if (enter(self)) {
        if (take_batch(&keys, given[2], &ask, false) == 0) {
            if ((uint64_t)offsets.len == keys.batch.n * 8 && (uintptr_t)offsets.buf % 8 == 0)
                result = generations_of(self, &keys.batch, offsets.buf);
            else
                PyErr_Format(PyExc_ValueError, "offsets has %zd bytes for %llu keys: give 8 aligned bytes for each",
                             offsets.len, (unsigned long long)keys.batch.n);
            keys_release(&keys);
        }
        leave(self);
    }
    PyBuffer_Release(&offsets);
    return result;
}

/* The number of each key's present object, or 0. With `prefix` it ends at the first 0. */
static PyObject *incarnations_of(const Index *self, const index_batch *batch) {
    size_t n = (size_t)batch->n;
    PyObject *result = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(n * 8));
    index_place *places = PyMem_RawMalloc((n ? n : 1) * sizeof *places);
    uint8_t *statuses = PyMem_RawMalloc(n ? n : 1);
    uint64_t count = 0;
    if (result && places && statuses) {
        const index_view *view = &self->writer.view;
        count = index_find_batch(view, batch, statuses, places);
        for (uint64_t i = 0; i < count; i++) {
            uint64_t number = 0;
            if (statuses[i] == INDEX_HIT) {
                number = index_load(&view->entries[places[i].at].incarnation);
                number = index_unchanged(view, &places[i]) ? number : 0;
            }
            memcpy(PyBytes_AS_STRING(result) + 8 * i, &number, 8);
            if (batch->prefix && !number)
                count = i;
        }
    } else {
        Py_CLEAR(result);
        PyErr_NoMemory();
    }
    PyMem_RawFree(places);
    PyMem_RawFree(statuses);
    if (result && count < n)
        _PyBytes_Resize(&result, (Py_ssize_t)(count * 8));
    return result;
}

static PyObject *index_incarnations(Index *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    static const char *const parameters[] = {"epoch", "namespace", "layout", "keys", "prefix", NULL};
    PyObject *given[5], *result = NULL;
    given_keys keys;
    asked ask;
    if (sort_arguments("incarnations", parameters, 5, args, nargs, kwnames, given) < 0 ||
        read_asked(given, given[4], &ask) < 0 || !enter(self))
        return NULL;
    if (!index_served(&self->writer.view, ask.epoch)) {
        result = Py_NewRef(Py_None);
    } else if (take_batch(&keys, given[3], &ask, false) == 0) {
        result = incarnations_of(self, &keys.batch);
        keys_release(&keys);
    }
    leave(self);
    return result;
}

/* A tag for each entry, in memory that costs only what is touched. */
static int make_verified(Index *self) {
    if (self->verified)
        return 0;
    size_t n = (self->writer.view.mask + 1) * sizeof(uint32_t);
    void *memory = mmap(NULL, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
        PyErr_NoMemory();
        return -1;
    }
    self->verified = memory;
    return 0;
}

int index_lend(PyObject *index, const index_view **view, _Atomic uint32_t **verified) {
    if (Py_TYPE(index)->tp_dealloc != (destructor)index_dealloc) {
        PyErr_Format(PyExc_TypeError, "index is a %s, not an Index", Py_TYPE(index)->tp_name);
        return -1;
    }
    Index *self = (Index *)index;
    if (!enter(self))
        return -1;
    if (make_verified(self) < 0) {
        leave(self);
        return -1;
    }
    *view = &self->writer.view;
    *verified = self->verified;
    return 0;
}

void index_take_back(PyObject *index) { leave((Index *)index); }

static int check_targets(const Py_buffer *targets, uint64_t n) {
    if ((uint64_t)targets->len != n * 8 || (uintptr_t)targets->buf % 8 != 0) {
        PyErr_Format(PyExc_ValueError,
                     "targets has %zd bytes for %llu keys: give one 8-byte address for each, in aligned memory",
                     targets->len, (unsigned long long)n);
        return -1;
    }
    const uint64_t *addresses = targets->buf;
    for (uint64_t i = 0; i < n; i++)
        if (addresses[i] == 0) {
            PyErr_Format(PyExc_ValueError, "target %llu is address 0", (unsigned long long)i);
            return -1;
        }
    return 0;
}

static void count_read(Index *self, uint64_t hits, uint64_t nbytes, uint64_t ns) {
    if (!self->counts.line || !hits)
        return;
    tally_add(&self->counts, TALLY_READS, 1);
    tally_add(&self->counts, TALLY_READ_HITS, hits);
    tally_add(&self->counts, TALLY_READ_BYTES, hits * nbytes);
    tally_add(&self->counts, TALLY_READ_NS, ns);
}

static PyObject *read_batch(Index *self, index_reading *reading, unsigned threads) {
    uint64_t n = reading->batch->n;
    PyObject *result = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)n);
    reading->places = PyMem_RawMalloc((n ? n : 1) * sizeof *reading->places);
    if (!result || !reading->places) {
        Py_XDECREF(result);
        PyMem_RawFree(reading->places);
        return PyErr_NoMemory();
    }
    reading->statuses = (uint8_t *)PyBytes_AS_STRING(result);
    uint64_t began = self->counts.line ? tally_now() : 0, hits = 0;
    PyThreadState *state = PyEval_SaveThread();
    uint64_t count = index_read_batch(reading, threads);
    PyEval_RestoreThread(state);
    PyMem_RawFree(reading->places);
    if (began) {
        for (uint64_t i = 0; i < count; i++)
            hits += reading->statuses[i] == INDEX_HIT;
        count_read(self, hits, reading->nbytes, tally_now() - began);
    }
    if (count < n)
        _PyBytes_Resize(&result, (Py_ssize_t)count);
    return result;
}

static int take_incarnations(index_reading *reading, PyObject *given, Py_buffer *numbers) {
    if (PyObject_GetBuffer(given, numbers, PyBUF_WRITABLE) < 0)
        return -1;
    if ((uint64_t)numbers->len == reading->batch->n * 8 && (uintptr_t)numbers->buf % 8 == 0) {
        reading->incarnations = numbers->buf;
        return 0;
    }
    PyErr_Format(PyExc_ValueError, "incarnations has %zd bytes for %llu keys: give 8 aligned bytes for each",
                 numbers->len, (unsigned long long)reading->batch->n);
    PyBuffer_Release(numbers);
    return -1;
}

static PyObject *read_to_targets(Index *self, index_reading *reading, PyObject *given, PyObject *incarnations,
                                 unsigned threads) {
    Py_buffer targets, numbers = {.obj = NULL};
    PyObject *result = NULL;
    if (make_verified(self) < 0)
        return NULL;
    if (incarnations && take_incarnations(reading, incarnations, &numbers) < 0)
        return NULL;
    if (PyObject_GetBuffer(given, &targets, PyBUF_SIMPLE) < 0) {
        PyBuffer_Release(&numbers);
        return NULL;
    }
    reading->view = &self->writer.view;
    reading->targets = targets.buf;
    reading->verified = self->verified;
    if (check_targets(&targets, reading->batch->n) == 0)
        result = read_batch(self, reading, threads);
    PyBuffer_Release(&targets);
    PyBuffer_Release(&numbers);
    return result;
}

static PyObject *index_read_keys(Index *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    static const char *const parameters[] = {"epoch",   "namespace", "layout", "nbytes",  "keys",
                                             "targets", "prefix",    "verify", "threads", "incarnations", NULL};
    PyObject *given[10], *result = NULL;
    uint64_t nbytes, verify, threads;
    given_keys keys;
    asked ask;
    if (sort_arguments("read", parameters, 9, args, nargs, kwnames, given) < 0 ||
        read_asked(given, given[6], &ask) < 0 || as_u64(given[3], "nbytes", &nbytes) < 0 ||
        as_u64(given[7], "verify", &verify) < 0 || as_u64(given[8], "threads", &threads) < 0)
        return NULL;
    if (nbytes == 0 || verify > INDEX_VERIFY_ALWAYS)
        return PyErr_Format(PyExc_ValueError, nbytes == 0 ? "nbytes is 0: objects have at least one byte"
                                                          : "verify must be 0 (never), 1 (first) or 2 (always)");
    if (!enter(self))
        return NULL;
    if (!index_served(&self->writer.view, ask.epoch)) {
        result = Py_NewRef(Py_None);
    } else if (take_batch(&keys, given[4], &ask, true) == 0) {
        index_reading reading = {.batch = &keys.batch, .nbytes = nbytes, .verify = (int)verify};
        result = read_to_targets(self, &reading, given[5], given[9] == Py_None ? NULL : given[9],
                                 threads < UINT32_MAX ? (unsigned)threads : UINT32_MAX);
        keys_release(&keys);
    }
    leave(self);
    return result;
}

/* A filter of all READY entries, into `bits`: whole blocks, a power of two of them. */
static PyObject *index_digest_entries(Index *self, PyObject *given) {
    Py_buffer bits;
    if (PyObject_GetBuffer(given, &bits, PyBUF_WRITABLE) < 0)
        return NULL;
    uint64_t blocks = (uint64_t)bits.len / DIGEST_BLOCK_BYTES, ready = 0;
    PyObject *result = NULL;
    if (bits.len % DIGEST_BLOCK_BYTES || !blocks || blocks & (blocks - 1) || blocks > DIGEST_BLOCKS_MAX) {
        PyErr_Format(PyExc_ValueError, "%zd bytes for a digest: it takes %d times a power of two, at most %d",
                     bits.len, DIGEST_BLOCK_BYTES, DIGEST_BLOCK_BYTES * DIGEST_BLOCKS_MAX);
    } else if (enter(self)) {
        Py_BEGIN_ALLOW_THREADS
        memset(bits.buf, 0, (size_t)bits.len);
        ready = index_digest(&self->writer.view, bits.buf, blocks);
        Py_END_ALLOW_THREADS
        leave(self);
        result = PyLong_FromUnsignedLongLong(ready);
    }
    PyBuffer_Release(&bits);
    return result;
}

/* The names of READY entries, into a buffer of 40 bytes for each. */
static PyObject *index_names_into(Index *self, PyObject *given) {
    Py_buffer names;
    if (PyObject_GetBuffer(given, &names, PyBUF_WRITABLE) < 0)
        return NULL;
    PyObject *result = NULL;
    if (enter(self)) {
        uint64_t ready;
        Py_BEGIN_ALLOW_THREADS
        ready = index_names(&self->writer.view, names.buf, (uint64_t)names.len / INDEX_NAME_BYTES);
        Py_END_ALLOW_THREADS
        leave(self);
        result = PyLong_FromUnsignedLongLong(ready);
    }
    PyBuffer_Release(&names);
    return result;
}

/* Where this process counts what it finds and reads: a line of the buffer, before the index. None: nowhere. */
static PyObject *index_count_in(Index *self, PyObject *given) {
    uint64_t offset;
    if (!is_open(self))
        return NULL;
    if (given == Py_None) {
        self->counts.line = NULL;
        Py_RETURN_NONE;
    }
    if (as_u64(given, "offset", &offset) < 0)
        return NULL;
    const index_view *view = &self->writer.view;
    uint64_t front = (uint64_t)((unsigned char *)view->marks - view->base);
    if (offset % 8 != 0 || offset > front || front - offset < TALLY_WORDS * 8)
        return PyErr_Format(PyExc_ValueError, "offset %llu is no place for a line of counts in front of the index",
                            (unsigned long long)offset);
    self->counts.line = (_Atomic uint64_t *)(void *)(view->base + offset);
    Py_RETURN_NONE;
}

/* Add to words of the line what Python has counted: a dict of amounts by word. */
static PyObject *index_count(Index *self, PyObject *amounts) {
    uint64_t sums[TALLY_WORDS] = {0}, word, amount;
    PyObject *key, *value;
    Py_ssize_t at = 0;
    if (!PyDict_Check(amounts))
        return PyErr_Format(PyExc_TypeError, "give a dict of amounts by word");
    while (PyDict_Next(amounts, &at, &key, &value)) {
        if (as_u64(key, "word", &word) < 0 || as_u64(value, "amount", &amount) < 0)
            return NULL;
        if (word >= TALLY_WORDS)
            return PyErr_Format(PyExc_ValueError, "the line has %d words", (int)TALLY_WORDS);
        sums[word] += amount;
    }
    for (int i = 0; self->counts.line && i < TALLY_WORDS; i++)
        if (sums[i])
            tally_add(&self->counts, i, sums[i]);
    Py_RETURN_NONE;
}

/* Count one read, for objects read in place or copied by jobs of pages. */
static PyObject *index_count_read(Index *self, PyObject *args) {
    unsigned long long hits, nbytes;
    if (!PyArg_ParseTuple(args, "KK:count_read", &hits, &nbytes))
        return NULL;
    count_read(self, hits, nbytes, 0);
    Py_RETURN_NONE;
}

/* --- the writer ------------------------------------------------------------------------------------------- */

static int u64_of(PyObject *object, PyObject *name, uint64_t *out) {
    PyObject *value = PyObject_GetAttr(object, name);
    if (!value)
        return -1;
    int failed = as_u64(value, PyUnicode_AsUTF8(name), out);
    Py_DECREF(value);
    return failed;
}

/* Key, namespace and offset of one of the kernel's objects. */
static int read_object(PyObject *item, Py_ssize_t at, index_object *object) {
    uint64_t space;
    PyObject *key = PyObject_GetAttr(item, names.key);
    if (!key)
        return -1;
    int failed = PyBytes_Check(key) && PyBytes_GET_SIZE(key) == INDEX_KEY_BYTES ? 0 : wrong_key(key, at);
    if (!failed)
        failed = u64_of(item, names.namespace, &space);
    if (!failed)
        object->key = index_key_of((const unsigned char *)PyBytes_AS_STRING(key), space);
    Py_DECREF(key);
    return failed ? -1 : u64_of(item, names.offset, &object->offset);
}

/* None, or no such attribute: the checksum is unknown. */
static int read_checksum(PyObject *item, index_object *object) {
    object->checksum = object->flags = 0;
    PyObject *checksum = PyObject_GetAttr(item, names.checksum);
    if (!checksum) {
        if (!PyErr_ExceptionMatches(PyExc_AttributeError))
            return -1;
        PyErr_Clear();
        return 0;
    }
    int failed = 0;
    if (checksum != Py_None) {
        object->flags = INDEX_CHECKSUM_KNOWN;
        failed = as_u64(checksum, "checksum", &object->checksum);
    }
    Py_DECREF(checksum);
    return failed;
}

/* No such attribute: the incarnation is unknown. */
static int read_incarnation(PyObject *item, index_object *object) {
    object->incarnation = 0;
    PyObject *generation = PyObject_GetAttr(item, names.generation);
    if (!generation) {
        if (!PyErr_ExceptionMatches(PyExc_AttributeError))
            return -1;
        PyErr_Clear();
        return 0;
    }
    int failed = as_u64(generation, "generation", &object->incarnation);
    Py_DECREF(generation);
    return failed;
}

static int nbytes_of_layout(PyObject *nbytes_by_layout, uint64_t layout, uint64_t *nbytes) {
    PyObject *id = PyLong_FromUnsignedLongLong(layout);
    PyObject *found = id ? PyDict_GetItemWithError(nbytes_by_layout, id) : NULL;
    int failed = found ? as_u64(found, "nbytes", nbytes) : -1;
    if (!found && !PyErr_Occurred())
        PyErr_Format(PyExc_ValueError, "layout %R is not in nbytes_by_layout: register it first", id);
    Py_XDECREF(id);
    return failed;
}

typedef struct {
    PyObject *nbytes_by_layout;
    uint64_t layout, nbytes; /* of the previous object: most have the same layout */
    bool known;
} layout_sizes;

static int read_placed(const Index *self, PyObject *item, Py_ssize_t at, layout_sizes *sizes, index_object *object) {
    if (read_object(item, at, object) < 0 || read_checksum(item, object) < 0 ||
        read_incarnation(item, object) < 0 || u64_of(item, names.layout_id, &object->layout) < 0)
        return -1;
    if (!sizes->known || sizes->layout != object->layout) {
        if (nbytes_of_layout(sizes->nbytes_by_layout, object->layout, &sizes->nbytes) < 0)
            return -1;
        sizes->layout = object->layout;
        sizes->known = true;
    }
    object->nbytes = sizes->nbytes;
    if (object->nbytes && index_in_data(&self->writer.view, object->offset, object->nbytes))
        return 0;
    PyErr_Format(PyExc_ValueError, "object %zd of %llu bytes at offset %llu is not inside the pool's data", at,
                 (unsigned long long)object->nbytes, (unsigned long long)object->offset);
    return -1;
}

/* Take up to INDEX_BLOCK objects from `at` on, and prefetch the lines of their entries. -1: an exception. */
static int take_block(const Index *self, PyObject *items, Py_ssize_t at, layout_sizes *sizes, index_object *objects,
                      uint64_t *homes) {
    int count = 0;
    /* The list may change under us: reading an attribute may run code. */
    for (; count < INDEX_BLOCK && at + count < PySequence_Fast_GET_SIZE(items); count++) {
        PyObject *item = PySequence_Fast_GET_ITEM(items, at + count);
        Py_INCREF(item);
        int failed = sizes ? read_placed(self, item, at + count, sizes, &objects[count])
                           : read_object(item, at + count, &objects[count]);
        Py_DECREF(item);
        if (failed)
            return -1;
        homes[count] = index_home(&self->writer.view, &objects[count].key);
        __builtin_prefetch(&self->writer.view.entries[homes[count]], 1, 3);
        __builtin_prefetch((char *)&self->writer.view.entries[homes[count]] + 64, 1, 3);
    }
    return count;
}

static PyObject *index_publish_objects(Index *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    static const char *const parameters[] = {"objects", "nbytes_by_layout", "now_s", NULL};
    PyObject *given[3];
    uint64_t now_s, homes[INDEX_BLOCK], published = 0;
    index_object objects[INDEX_BLOCK];
    if (sort_arguments("publish", parameters, 3, args, nargs, kwnames, given) < 0 ||
        as_u64(given[2], "now_s", &now_s) < 0 || !is_open(self))
        return NULL;
    if (!PyDict_Check(given[1]))
        return PyErr_Format(PyExc_TypeError, "nbytes_by_layout must be a dict from layout id to bytes");
    PyObject *items = PySequence_Fast(given[0], "objects must be a sequence");
    if (!items)
        return NULL;
    layout_sizes sizes = {.nbytes_by_layout = given[1]};
    int count = 0;
    for (Py_ssize_t at = 0; (count = take_block(self, items, at, &sizes, objects, homes)) > 0; at += count) {
        if (!is_open(self)) {
            count = -1;
            break;
        }
        for (int i = 0; i < count; i++)
            published += index_publish(&self->writer, &objects[i], homes[i], now_s);
    }
    index_settle();
    Py_DECREF(items);
    return count < 0 ? NULL : PyLong_FromUnsignedLongLong(published);
}

static PyObject *index_remove_objects(Index *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    static const char *const parameters[] = {"objects", "reason", "now_s", NULL};
    PyObject *given[3];
    uint64_t reason, now_s, homes[INDEX_BLOCK], removed = 0;
    index_object objects[INDEX_BLOCK];
    if (sort_arguments("remove", parameters, 3, args, nargs, kwnames, given) < 0 ||
        as_u64(given[1], "reason", &reason) < 0 || as_u64(given[2], "now_s", &now_s) < 0 || !is_open(self))
        return NULL;
    PyObject *items = PySequence_Fast(given[0], "objects must be a sequence");
    if (!items)
        return NULL;
    int count = 0;
    for (Py_ssize_t at = 0; (count = take_block(self, items, at, NULL, objects, homes)) > 0; at += count) {
        if (!is_open(self)) {
            count = -1;
            break;
        }
        for (int i = 0; i < count; i++)
            removed += index_remove(&self->writer, &objects[i].key, objects[i].offset, homes[i], reason, now_s);
    }
    index_settle();
    Py_DECREF(items);
    if (count < 0)
        return NULL;
    uint64_t owed = index_tidy_owed(&self->writer, removed);
    if (owed && !self->keeps_places)
        index_tidy(&self->writer, owed);
    return PyLong_FromUnsignedLongLong(removed);
}

static PyObject *index_mark_objects_verified(Index *self, PyObject *objects) {
    PyObject *items = PySequence_Fast(objects, "objects must be a sequence");
    if (!items)
        return NULL;
    uint64_t marked = 0;
    bool failed = false;
    for (Py_ssize_t at = 0; !failed && at < PySequence_Fast_GET_SIZE(items); at++) {
        index_object object;
        PyObject *item = Py_NewRef(PySequence_Fast_GET_ITEM(items, at));
        failed = read_object(item, at, &object) < 0 || read_checksum(item, &object) < 0 || !is_open(self);
        Py_DECREF(item);
        if (!failed && object.flags & INDEX_CHECKSUM_KNOWN)
            marked += index_mark_verified(&self->writer, &object, index_home(&self->writer.view, &object.key));
    }
    Py_DECREF(items);
    return failed ? NULL : PyLong_FromUnsignedLongLong(marked);
}

static PyObject *index_remove_slot_entries(Index *self, PyObject *slot_offset) {
    uint64_t offset;
    if (as_u64(slot_offset, "offset", &offset) < 0 || !is_open(self))
        return NULL;
    uint64_t removed = index_remove_slot(&self->writer, offset);
    index_settle();
    return PyLong_FromUnsignedLongLong(removed);
}

typedef struct {
    uint64_t at;
    uint16_t mark;
} marked;

static int larger_mark_first(const void *a, const void *b) {
    return (int)((const marked *)b)->mark - (int)((const marked *)a)->mark;
}

static PyObject *marked_objects(const Index *self, const marked *found, size_t count) {
    PyObject *result = PyList_New((Py_ssize_t)count);
    for (size_t i = 0; result && i < count; i++) {
        index_key key = index_key_at(&self->writer.view.entries[found[i].at]);
        PyObject *pair = Py_BuildValue("Ky#", (unsigned long long)key.space, (const char *)key.word,
                                       (Py_ssize_t)INDEX_KEY_BYTES);
        if (!pair)
            Py_CLEAR(result);
        else
            PyList_SET_ITEM(result, (Py_ssize_t)i, pair);
    }
    return result;
}

static PyObject *index_take_marks(Index *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    static const char *const parameters[] = {"entries_max", "keys_max", NULL};
    PyObject *given[2];
    uint64_t left, keys_max = UINT64_MAX;
    if (sort_arguments("take_marks", parameters, 1, args, nargs, kwnames, given) < 0 ||
        as_u64(given[0], "entries_max", &left) < 0 || (given[1] && as_u64(given[1], "keys_max", &keys_max) < 0) ||
        !is_open(self))
        return NULL;
    if (left > self->writer.view.mask + 1)
        left = self->writer.view.mask + 1;
    marked *found = NULL, next;
    size_t count = 0, room = 0;
    while (count < keys_max && index_next_mark(&self->writer, &left, &next.at, &next.mark)) {
        if (count == room) {
            room = room ? 2 * room : 256;
            marked *grown = PyMem_RawRealloc(found, room * sizeof *found);
            if (!grown) {
                PyMem_RawFree(found);
                return PyErr_NoMemory();
            }
            found = grown;
        }
        found[count++] = next;
    }
    if (count)
        qsort(found, count, sizeof *found, larger_mark_first);
    PyObject *result = marked_objects(self, found, count);
    PyMem_RawFree(found);
    return result;
}

static PyObject *index_tidy_entries(Index *self, PyObject *entries_max) {
    uint64_t most;
    if (as_u64(entries_max, "entries_max", &most) < 0 || !is_open(self))
        return NULL;
    return PyLong_FromUnsignedLongLong(self->keeps_places ? 0 : index_tidy(&self->writer, most));
}

static PyObject *index_recount_entries(Index *self, PyObject *Py_UNUSED(none)) {
    if (!is_open(self))
        return NULL;
    index_recount(&self->writer);
    return Py_BuildValue("KK", (unsigned long long)self->writer.ready, (unsigned long long)self->writer.gone);
}

static PyObject *index_entry_dict(Index *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    static const char *const parameters[] = {"namespace", "key", NULL};
    PyObject *given[2];
    uint64_t space, at;
    if (sort_arguments("entry", parameters, 2, args, nargs, kwnames, given) < 0 ||
        as_u64(given[0], "namespace", &space) < 0 || !is_open(self))
        return NULL;
    if (!PyBytes_Check(given[1]) || PyBytes_GET_SIZE(given[1]) != INDEX_KEY_BYTES) {
        wrong_key(given[1], 0);
        return NULL;
    }
    const index_view *view = &self->writer.view;
    index_key key = index_key_of((const unsigned char *)PyBytes_AS_STRING(given[1]), space);
    if (!index_entry_of(&self->writer, &key, &at))
        Py_RETURN_NONE;
    const index_entry *entry = &view->entries[at];
    uint64_t sequence = index_sequence(&self->writer, at), flags = index_load(&entry->flags);
    PyObject *checksum = flags & INDEX_CHECKSUM_KNOWN ? PyLong_FromUnsignedLongLong(index_load(&entry->checksum))
                                                      : Py_NewRef(Py_None);
    return Py_BuildValue("{s:s,s:K,s:K,s:K,s:K,s:K,s:N,s:N,s:K,s:K,s:K,s:K,s:I,s:K,s:K}", "state",
                         index_state(sequence) == INDEX_READY ? "ready" : "gone", "generation",
                         (unsigned long long)(sequence >> 2), "namespace", (unsigned long long)space, "offset",
                         (unsigned long long)index_load(&entry->offset), "layout",
                         (unsigned long long)index_load(&entry->layout), "nbytes",
                         (unsigned long long)index_load(&entry->nbytes), "checksum", checksum, "unverified",
                         PyBool_FromLong((flags & INDEX_UNVERIFIED) != 0), "stored_s",
                         (unsigned long long)index_load(&entry->stored_s), "reason",
                         (unsigned long long)index_load(&entry->reason), "gone_s",
                         (unsigned long long)index_load(&entry->gone_s), "incarnation",
                         (unsigned long long)index_load(&entry->incarnation), "mark",
                         (unsigned)atomic_load_explicit(&view->marks[at], memory_order_relaxed), "place",
                         (unsigned long long)at, "home", (unsigned long long)index_home(view, &key));
}

/* --- for the bench: millions of entries, and the loop in C alone --------------------------------------------- */

static PyObject *index_publish_row(Index *self, PyObject *args) {
    unsigned long long space, layout, nbytes, offset, now_s;
    Py_buffer row;
    if (!PyArg_ParseTuple(args, "KKKKKy*:_publish_row", &space, &layout, &nbytes, &offset, &now_s, &row))
        return NULL;
    uint64_t published = 0, n = (uint64_t)row.len / INDEX_KEY_BYTES;
    bool usable = is_open(self);
    if (usable && !index_in_data(&self->writer.view, offset, nbytes)) {
        PyErr_SetString(PyExc_ValueError, "the object is not inside the pool's data");
        usable = false;
    }
    for (uint64_t i = 0; usable && i < n; i++) {
        index_object object = {.key = index_key_of((unsigned char *)row.buf + i * INDEX_KEY_BYTES, space),
                               .offset = offset,
                               .layout = layout,
                               .nbytes = nbytes};
        published += index_publish(&self->writer, &object, index_home(&self->writer.view, &object.key), now_s);
    }
    PyBuffer_Release(&row);
    return usable ? PyLong_FromUnsignedLongLong(published) : NULL;
}

static PyObject *index_find_row(Index *self, PyObject *args) {
    unsigned long long space, layout, batch_keys;
    Py_buffer row;
    if (!PyArg_ParseTuple(args, "KKKy*:_find_row", &space, &layout, &batch_keys, &row))
        return NULL;
    uint64_t n = (uint64_t)row.len / INDEX_KEY_BYTES, hits = 0;
    uint8_t *statuses = PyMem_RawMalloc(batch_keys ? batch_keys : 1);
    bool usable = is_open(self) && batch_keys;
    struct timespec start, end;
    clock_gettime(CLOCK_MONOTONIC, &start);
    for (uint64_t first = 0; usable && statuses && first < n; first += batch_keys) {
        index_batch batch = {.in_a_row = (unsigned char *)row.buf + first * INDEX_KEY_BYTES,
                             .n = n - first < batch_keys ? n - first : batch_keys,
                             .space = space,
                             .layout = layout};
        index_find_batch(&self->writer.view, &batch, statuses, NULL);
        for (uint64_t i = 0; i < batch.n; i++)
            hits += statuses[i] == INDEX_HIT;
    }
    clock_gettime(CLOCK_MONOTONIC, &end);
    PyBuffer_Release(&row);
    bool memory = statuses != NULL;
    PyMem_RawFree(statuses);
    if (!memory)
        return PyErr_NoMemory();
    if (!usable)
        return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_ValueError, "batch_keys is 0");
    double seconds = (double)(end.tv_sec - start.tv_sec) + (double)(end.tv_nsec - start.tv_nsec) / 1e9;
    return Py_BuildValue("Kd", (unsigned long long)hits, seconds);
}

/* --- the type --------------------------------------------------------------------------------------------- */

static PyObject *get_entries(Index *self, void *Py_UNUSED(none)) {
    return PyLong_FromUnsignedLongLong(self->writer.view.mask + 1);
}

static PyObject *get_ready(Index *self, void *Py_UNUSED(none)) {
    return PyLong_FromUnsignedLongLong(self->writer.ready);
}

static PyObject *get_gone(Index *self, void *Py_UNUSED(none)) {
    return PyLong_FromUnsignedLongLong(self->writer.gone);
}

static PyObject *get_keeps_places(Index *self, void *Py_UNUSED(none)) {
    return PyBool_FromLong(self->keeps_places);
}

static int set_keeps_places(Index *self, PyObject *value, void *Py_UNUSED(none)) {
    int truth = value ? PyObject_IsTrue(value) : 0;
    if (truth < 0)
        return -1;
    self->keeps_places = truth;
    return 0;
}

static PyGetSetDef getters[] = {
    {"entries", (getter)get_entries, NULL, "Entries in all.", NULL},
    {"ready", (getter)get_ready, NULL, "READY entries, by this writer's count.", NULL},
    {"gone", (getter)get_gone, NULL, "Tombstones, by this writer's count.", NULL},
    {"keeps_places", (getter)get_keeps_places, (setter)set_keeps_places, "While true, no entry is moved.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

#define FAST METH_FASTCALL | METH_KEYWORDS
#define FUNCTION(name) (PyCFunction)(void (*)(void))name
static PyMethodDef methods[] = {
    {"find", FUNCTION(index_find_keys), FAST, "Which keys are there: one byte a key, 1 for a hit."},
    {"generations", FUNCTION(index_generations), FAST, "A number for what stands in each key's slot, or 0."},
    {"incarnations", FUNCTION(index_incarnations), FAST, "The number of the object that each key has now, or 0."},
    {"read", FUNCTION(index_read_keys), FAST, "Copy objects out: one status byte a key."},
    {"publish", FUNCTION(index_publish_objects), FAST, "Writer: make objects visible; how many got an entry."},
    {"remove", FUNCTION(index_remove_objects), FAST, "Writer: take objects out; how many were there."},
    {"mark_verified", FUNCTION(index_mark_objects_verified), METH_O, "Writer: nobody needs to check these; how many."},
    {"remove_slot", FUNCTION(index_remove_slot_entries), METH_O, "Writer: take out what stands in a slot, by a scan."},
    {"take_marks", FUNCTION(index_take_marks), FAST, "Writer: what readers used since, last of a prompt first."},
    {"tidy", FUNCTION(index_tidy_entries), METH_O, "Writer: turn tombstones into empty entries; how many."},
    {"recount", FUNCTION(index_recount_entries), METH_NOARGS, "Writer: count what an earlier one left."},
    {"entry", FUNCTION(index_entry_dict), FAST, "What stands there for a key, or None."},
    {"names", FUNCTION(index_names_into), METH_O, "Fill a buffer with the names of what is there; how many there are."},
    {"digest", FUNCTION(index_digest_entries), METH_O, "Fill a buffer with a filter of what is there; how many there are."},
    {"count_in", FUNCTION(index_count_in), METH_O, "Count what is found and read in the line at an offset, or nowhere."},
    {"count", FUNCTION(index_count), METH_O, "Add amounts, by word, to the line of counts."},
    {"count_read", FUNCTION(index_count_read), METH_VARARGS, "Count objects, of so many bytes each, that were read."},
    {"close", FUNCTION(index_close), METH_NOARGS, "Let the buffer go, once no call uses it any more."},
    {"_publish_row", FUNCTION(index_publish_row), METH_VARARGS, "For the bench."},
    {"_find_row", FUNCTION(index_find_row), METH_VARARGS, "For the bench."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "The index of a mapped pool. Readers: any process, any thread. Writer methods: the owner only."},
    {Py_tp_new, index_new},
    {Py_tp_dealloc, index_dealloc},
    {Py_tp_methods, methods},
    {Py_tp_getset, getters},
    {0, NULL},
};

static PyType_Spec spec = {
    .name = "lmcache_core._native.Index",
    .basicsize = sizeof(Index),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = slots,
};

int index_add(PyObject *module) {
    if (!names.key) {
        names.key = PyUnicode_InternFromString("key");
        names.namespace = PyUnicode_InternFromString("namespace");
        names.offset = PyUnicode_InternFromString("offset");
        names.layout_id = PyUnicode_InternFromString("layout_id");
        names.checksum = PyUnicode_InternFromString("checksum");
        names.generation = PyUnicode_InternFromString("generation");
    }
    if (!names.key || !names.namespace || !names.offset || !names.layout_id || !names.checksum ||
        !names.generation)
        return -1;
    PyObject *type = PyType_FromModuleAndSpec(module, &spec, NULL);
    if (!type)
        return -1;
    int failed = PyModule_AddType(module, (PyTypeObject *)type);
    Py_DECREF(type);
    return failed;
}
