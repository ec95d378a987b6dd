/* lmcache_l0._table: the shared table as a Python type. The algorithms stand in the headers beside it and know no
 * Python; here are mapping, arguments, errors, batches, and views.
 *
 * Every method holds the GIL except where it says otherwise, so a handle's own fields need no lock. Work without the
 * GIL is counted in `busy`, views in `exports`: the mapping stays until both are zero, even past close().
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <pthread.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "l0_survey.h"
#include "l0_write.h"

#define SLICE_NS 50000000u            /* without the GIL, between two looks for signals */
#define GIL_BYTES (256u << 10)        /* a copy of this much is worth a release of the GIL */
#define BATCH_KEYS 1024u              /* keys of a batch that are in flight together */
#define SURVEY_SLOTS (1u << 16)       /* slots between two looks for signals */

/* ---- names from Python, fetched once ------------------------------------------------------------------------ */

static PyObject *usage_error, *table_error, *mismatch_error, *damaged_error, *full_error, *busy_error;
static PyObject *too_large_error, *load_warning;
static PyObject *described;           /* dtype-like -> (dtype, itemsize, tag) */
static PyObject *describe_dtype, *array_view_type, *array_type;
static PyObject *dtype_name;

/* numpy's C functions come from its capsule at run time: nothing of numpy is needed to build this, nor to use a table
 * without arrays. The places in its table of functions are part of numpy's ABI; an ABI that is not one of these two
 * is used through Python instead, which costs twice as much. */
enum { NUMPY_ABI_VERSION = 0, NUMPY_NEW_FROM_DESCR = 94, NUMPY_SET_BASE_OBJECT = 282 };
enum { NUMPY_C_CONTIGUOUS = 0x1, NUMPY_ALIGNED = 0x100, NUMPY_WRITEABLE = 0x400, NUMPY_DIMENSIONS_MAX = 32 };
typedef PyObject *(*numpy_new_t)(PyTypeObject *, PyObject *, int, const Py_ssize_t *, const Py_ssize_t *, void *, int,
                                 PyObject *);
typedef int (*numpy_set_base_t)(PyObject *, PyObject *);
static numpy_new_t numpy_new;
static numpy_set_base_t numpy_set_base;

static int import_numpy_functions(PyObject *arrays) {
    PyObject *capsule = PyObject_GetAttrString(arrays, "NUMPY_FUNCTIONS");
    if (capsule == NULL)
        return -1;
    void **table = PyCapsule_CheckExact(capsule) ? PyCapsule_GetPointer(capsule, NULL) : NULL;
    if (table != NULL) {
        unsigned int abi = ((unsigned int (*)(void))table[NUMPY_ABI_VERSION])();
        if (abi == 0x02000000u || abi == 0x01000009u) {
            numpy_set_base = (numpy_set_base_t)table[NUMPY_SET_BASE_OBJECT];
            numpy_new = (numpy_new_t)table[NUMPY_NEW_FROM_DESCR];
        }
    }
    Py_DECREF(capsule); /* numpy's module keeps it */
    return PyErr_Occurred() ? -1 : 0;
}

static int import_arrays(void) {
    if (describe_dtype != NULL)
        return 0;
    PyObject *module = PyImport_ImportModule("lmcache_l0.arrays");
    if (module == NULL)
        return -1;
    array_view_type = PyObject_GetAttrString(module, "ArrayView");
    array_type = PyObject_GetAttrString(module, "ndarray");
    PyObject *describe = PyObject_GetAttrString(module, "describe");
    int failed = import_numpy_functions(module);
    Py_DECREF(module);
    if (array_view_type == NULL || array_type == NULL || describe == NULL || failed)
        return -1;
    describe_dtype = describe;
    return 0;
}

/* The (dtype, itemsize, tag) of a dtype-like; borrowed. */
static PyObject *describe(PyObject *dtype) {
    PyObject *known = PyDict_GetItemWithError(described, dtype);
    if (known != NULL || PyErr_Occurred())
        return known;
    if (import_arrays() < 0)
        return NULL;
    PyObject *made = PyObject_CallOneArg(describe_dtype, dtype);
    if (made == NULL)
        return NULL;
    int failed = PyDict_SetItem(described, dtype, made);
    Py_DECREF(made);
    return failed < 0 ? NULL : PyDict_GetItemWithError(described, dtype);
}

/* ---- the handle --------------------------------------------------------------------------------------------- */

typedef struct Table {
    PyObject_HEAD
    l0_table t;
    size_t mapped;
    int fd;
    bool writable, closed, warned;
    int busy;
    Py_ssize_t exports;
    uint64_t dice, warn_at_keys, wait_ns, hits, misses;
    PyObject *path;
    struct Table *next, **link;        /* every open handle, for the at-fork handler */
} Table;

static Table *handles;

/* In a forked child: the parent's life lock is on an open file description that both now share. Closing our end lets
 * the parent's death be seen; the child takes a row of its own when it first writes. close() is safe here. */
static void after_fork_in_child(void) {
    for (Table *h = handles; h != NULL; h = h->next) {
        if (h->t.lock_fd >= 0)
            close(h->t.lock_fd);
        h->t.lock_fd = -1;
        h->t.me = 0;
        h->busy = 0; /* the threads that were at work are not here */
        h->dice ^= (uint64_t)getpid() << 20;
    }
}

static void unmap_if_unused(Table *self) {
    if (self->closed && self->busy == 0 && self->exports == 0 && self->t.base != NULL) {
        munmap(self->t.base, self->mapped);
        self->t.base = NULL;
    }
}

static void close_handle(Table *self) {
    if (self->link != NULL) {
        *self->link = self->next;
        if (self->next != NULL)
            self->next->link = self->link;
        self->link = NULL;
    }
    if (self->busy == 0 && self->t.lock_fd >= 0) {
        close(self->t.lock_fd);
        self->t.lock_fd = -1;
        self->t.me = 0;
    }
    if (self->fd >= 0)
        close(self->fd);
    self->fd = -1;
    self->closed = true;
    unmap_if_unused(self);
}

static void enter(Table *self) { self->busy++; }

static void leave(Table *self) {
    self->busy--;
    if (self->closed && self->busy == 0)
        close_handle(self);
}

static bool usable(Table *self) {
    if (!self->closed && self->t.base != NULL)
        return true;
    PyErr_Format(usage_error, "the table %V is closed: attach it again", self->path, "?");
    return false;
}

/* Reopen the file for the life lock: by descriptor where the system has such paths (the name may be gone), else by
 * name if that is still the same file. */
static int open_again(Table *self) {
    char by_fd[64];
    snprintf(by_fd, sizeof by_fd, "/proc/self/fd/%d", self->fd);
    int fd = open(by_fd, O_RDWR | O_CLOEXEC);
    if (fd >= 0 || errno == EACCES || errno == EPERM)
        return fd;
    PyObject *path = NULL;
    if (!PyUnicode_FSConverter(self->path, &path))
        return -1;
    fd = open(PyBytes_AS_STRING(path), O_RDWR | O_CLOEXEC);
    Py_DECREF(path);
    struct stat ours, theirs;
    if (fd >= 0 && (fstat(self->fd, &ours) != 0 || fstat(fd, &theirs) != 0 || ours.st_ino != theirs.st_ino ||
                    ours.st_dev != theirs.st_dev)) {
        close(fd);
        errno = ENOENT;
        return -1;
    }
    return fd;
}

static bool ensure_writer(Table *self) {
    if (self->t.me != 0)
        return true;
    if (!self->writable) {
        PyErr_Format(usage_error, "the table %U was attached read-only: attach it with read_only=False to write",
                     self->path);
        return false;
    }
    int fd = open_again(self);
    if (fd < 0) {
        if (!PyErr_Occurred())
            PyErr_Format(table_error,
                         "cannot reopen the table %U to write (%s): its file must belong to the user that writes, "
                         "also after a server has dropped its privileges, and must not have been replaced",
                         self->path, strerror(errno));
        return false;
    }
    int failed = l0_writer_join(&self->t, fd);
    if (failed == 0)
        return true;
    close(fd);
    if (failed == EAGAIN)
        PyErr_Format(table_error, "%u processes write to the table %U already: close some", L0_WRITERS_MAX,
                     self->path);
    else
        PyErr_Format(table_error, "cannot lock a writer's row of the table %U (%s): its file system must support "
                     "byte-range locks, as local ones and tmpfs do", self->path, strerror(failed));
    return false;
}

static int Table_init(Table *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"path", "fd", "writable", "wait_s", "warn_load", NULL};
    PyObject *path;
    int fd, writable;
    double wait_s, warn_load;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "Uipdd:Table", names, &path, &fd, &writable, &wait_s, &warn_load))
        return -1;
    if (self->path != NULL) {
        PyErr_SetString(usage_error, "a table handle is made once: attach again for another");
        return -1;
    }
    struct stat st;
    if (fstat(fd, &st) != 0) {
        PyErr_SetFromErrno(PyExc_OSError);
        return -1;
    }
    uint64_t bytes = st.st_size < 0 ? 0 : (uint64_t)st.st_size;
    if (bytes < L0_HEADER_BYTES) {
        PyErr_Format(damaged_error, "%U has %llu bytes and is no L0 table: remove it, or name another path", path,
                     (unsigned long long)bytes);
        return -1;
    }
    /* One page first: nothing else is mapped before the header has been judged. */
    l0_header *header = mmap(NULL, L0_HEADER_BYTES, PROT_READ, MAP_SHARED, fd, 0);
    if (header == MAP_FAILED) {
        PyErr_SetFromErrno(PyExc_OSError);
        return -1;
    }
    l0_geometry g;
    l0_verdict verdict = l0_header_check(header, bytes, &g);
    uint32_t version = header->layout_version;
    unsigned long long says = header->file_bytes;
    munmap(header, L0_HEADER_BYTES);
    if (verdict == L0_OTHER_VERSION)
        PyErr_Format(mismatch_error, "%U has table layout %u and this library speaks %u: use one version of "
                     "lmcache-l0 everywhere, or remove the file", path, version, L0_LAYOUT_VERSION);
    else if (verdict == L0_OTHER_BYTE_ORDER)
        PyErr_Format(mismatch_error, "%U was made on a machine of another byte order: remove it", path);
    else if (verdict == L0_WRONG_SIZE)
        PyErr_Format(damaged_error, "%U has %llu bytes and its header says %llu: it was cut off; remove it", path,
                     (unsigned long long)bytes, says);
    else if (verdict == L0_NOT_READY)
        PyErr_Format(damaged_error, "%U was never finished: remove it", path);
    else if (verdict != L0_OK_HEADER)
        PyErr_Format(damaged_error, "%U is no L0 table, or its header is damaged: remove it, or name another path",
                     path);
    if (verdict != L0_OK_HEADER)
        return -1;
    void *base = mmap(NULL, g.file_bytes, writable ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED, fd, 0);
    if (base == MAP_FAILED) {
        PyErr_SetFromErrno(PyExc_OSError);
        return -1;
    }
    int own = fcntl(fd, F_DUPFD_CLOEXEC, 3);
    if (own < 0) {
        PyErr_SetFromErrno(PyExc_OSError);
        munmap(base, g.file_bytes);
        return -1;
    }
    self->path = Py_NewRef(path);
    self->t.base = base;
    self->t.g = g;
    self->mapped = g.file_bytes;
    self->fd = own;
    self->writable = writable;
    self->wait_ns = (uint64_t)(wait_s * 1e9);
    self->warn_at_keys = (uint64_t)(warn_load * (double)g.slots);
    self->dice = g.hash_seed ^ (uint64_t)getpid() ^ l0_now_ns();
    self->next = handles;
    self->link = &handles;
    if (handles != NULL)
        handles->link = &self->next;
    handles = self;
    return 0;
}

static PyObject *Table_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    (void)args, (void)kwargs;
    Table *self = (Table *)type->tp_alloc(type, 0);
    if (self != NULL) {
        self->fd = -1;
        self->t.lock_fd = -1;
        self->closed = false;
    }
    return (PyObject *)self;
}

static void Table_dealloc(Table *self) {
    close_handle(self);
    Py_CLEAR(self->path);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyObject *Table_close(Table *self, PyObject *ignored) {
    (void)ignored;
    close_handle(self);
    Py_RETURN_NONE;
}

/* ---- keys, values, and what may go wrong with them ------------------------------------------------------------ */

static bool key_of(Table *self, PyObject *object, l0_key *key) {
    const char *bytes;
    Py_ssize_t n;
    if (PyUnicode_Check(object) && PyUnicode_IS_COMPACT_ASCII(object)) {
        bytes = (const char *)PyUnicode_1BYTE_DATA(object); /* its UTF-8 as it stands */
        n = PyUnicode_GET_LENGTH(object);
    } else if (PyUnicode_Check(object)) {
        bytes = PyUnicode_AsUTF8AndSize(object, &n);
        if (bytes == NULL)
            return false;
    } else if (PyBytes_Check(object)) {
        bytes = PyBytes_AS_STRING(object);
        n = PyBytes_GET_SIZE(object);
    } else {
        PyErr_Format(usage_error, "a key is str or bytes, not %s", Py_TYPE(object)->tp_name);
        return false;
    }
    if (n < 1 || (size_t)n > self->t.g.key_bytes_max) {
        PyErr_Format(usage_error, "a key of %zd bytes: this table takes 1 to %u (max_key_size); hash longer ones", n,
                     self->t.g.key_bytes_max);
        return false;
    }
    *key = l0_key_of(&self->t, (const unsigned char *)bytes, (size_t)n);
    return true;
}

static void say_too_large(Table *self, size_t n) {
    PyErr_Format(too_large_error, "a value of %zu bytes, and this table takes %u: create it with a larger "
                 "max_value_size, or keep such values in L1 (TieredCache does)", n, self->t.g.value_bytes_max);
}

static void say_full(Table *self, PyObject *key) {
    unsigned long long keys = atomic_load(&l0_head(&self->t)->keys), slots = self->t.g.slots;
    PyErr_Format(full_error, "the table %U is full: no free slot for %R; %llu of %llu slots are taken. Create it "
                 "anew with hash_slots=%llu (the keys that it must hold, divided by 0.7), or delete keys", self->path,
                 key, keys, slots, (slots > keys ? slots : keys) * 2);
}

static bool warn_of_load(Table *self) {
    if (self->warned || atomic_load_explicit(&l0_head(&self->t)->keys, memory_order_relaxed) < self->warn_at_keys)
        return true;
    self->warned = true;
    unsigned long long slots = self->t.g.slots;
    return PyErr_WarnFormat(load_warning, 1, "the table %U is 70%% full: probes grow long from here on and it will "
                            "refuse keys when it is full; it has %llu slots, plan for keys / 0.7", self->path,
                            slots) == 0;
}

typedef enum Task { TASK_PUT, TASK_INSERT, TASK_DELETE } Task;

typedef struct Change {
    Task task;
    l0_key key;
    l0_value value;
    uint64_t ticket;
    bool inserted;
} Change;

static l0_result run_change(const l0_table *t, Change *c, uint64_t wait_ns) {
    if (c->task == TASK_PUT)
        return l0_put(t, c->key, c->value, wait_ns, &c->inserted);
    if (c->task == TASK_DELETE)
        return l0_delete(t, c->key, wait_ns);
    l0_result result = l0_insert(t, c->key, c->value, c->ticket, wait_ns);
    c->inserted = result == L0_DONE;
    return result;
}

/* Make one change: at once if it can be, else without the GIL, in slices, for at most wait_s. The result is never
 * L0_BUSY or L0_FULL: those are raised, and L0_UNSETTLED is returned. */
static l0_result change(Table *self, PyObject *key, Change *c) {
    if (!ensure_writer(self))
        return L0_UNSETTLED;
    l0_result result = run_change(&self->t, c, 0);
    uint64_t until = result == L0_BUSY ? l0_now_ns() + self->wait_ns : 0;
    while (result == L0_BUSY && l0_now_ns() < until) {
        enter(self);
        Py_BEGIN_ALLOW_THREADS
        result = run_change(&self->t, c, SLICE_NS < self->wait_ns ? SLICE_NS : self->wait_ns);
        Py_END_ALLOW_THREADS
        leave(self);
        if (PyErr_CheckSignals() < 0 || !usable(self))
            return L0_UNSETTLED;
    }
    if (result == L0_FULL)
        say_full(self, key);
    if (result == L0_BUSY)
        PyErr_Format(busy_error, "the slot of %R in %U has been held for %llu ms by a writer that is alive but does "
                     "not move (stopped, or starved): try again, or end that process", key, self->path,
                     (unsigned long long)(self->wait_ns / 1000000u));
    if (result == L0_FULL || result == L0_BUSY)
        return L0_UNSETTLED;
    if (c->inserted && result == L0_DONE && !warn_of_load(self))
        return L0_UNSETTLED;
    return result;
}

static bool put(Table *self, PyObject *key_object, Py_buffer *value, uint64_t tag) {
    Change c = {.task = TASK_PUT, .value = {value->buf, (size_t)value->len, tag}};
    if (!key_of(self, key_object, &c.key))
        return false;
    if ((size_t)value->len > self->t.g.value_bytes_max) {
        say_too_large(self, (size_t)value->len);
        return false;
    }
    return change(self, key_object, &c) == L0_DONE && !PyErr_Occurred();
}

static PyObject *unsettled(Table *self, PyObject *key) {
    return PyErr_Format(busy_error, "%R in %U was written again and again while it was read, %d times over (or the "
                        "file is damaged): create the table with more versions", key, self->path, L0_READ_TRIES);
}

static inline void count(Table *self, l0_found *found) {
    self->hits++;
    if (self->writable)
        l0_count_hit(found->meta, &self->dice);
}

/* ---- one key -------------------------------------------------------------------------------------------------- */

/* A new bytes or bytearray with the value, or NULL: missed, or an error that is set. */
static PyObject *fetch(Table *self, PyObject *key_object, bool as_bytearray) {
    l0_key key;
    l0_found found;
    if (!usable(self) || !key_of(self, key_object, &key))
        return NULL;
    for (int tries = 0; tries < L0_READ_TRIES; tries++) {
        if (l0_look(&self->t, key, &found) == L0_MISS) {
            self->misses++;
            return NULL;
        }
        PyObject *value = as_bytearray ? PyByteArray_FromStringAndSize(NULL, (Py_ssize_t)found.n)
                                       : PyBytes_FromStringAndSize(NULL, (Py_ssize_t)found.n);
        if (value == NULL)
            return NULL;
        unsigned char *to = (unsigned char *)(as_bytearray ? PyByteArray_AS_STRING(value) : PyBytes_AS_STRING(value));
        if (found.n >= GIL_BYTES) {
            enter(self);
            Py_BEGIN_ALLOW_THREADS
            l0_copy_out(to, found.bytes, found.n);
            Py_END_ALLOW_THREADS
            bool intact = l0_intact(&self->t, found.meta, found.generation);
            if (intact)
                count(self, &found);
            leave(self); /* may unmap, if close() came in between */
            if (intact)
                return value;
            if (!usable(self)) {
                Py_DECREF(value);
                return NULL;
            }
        } else {
            l0_copy_out(to, found.bytes, found.n);
            if (l0_intact(&self->t, found.meta, found.generation)) {
                count(self, &found);
                return value;
            }
        }
        Py_DECREF(value);
    }
    return unsettled(self, key_object);
}

static PyObject *Table_get(Table *self, PyObject *const *args, Py_ssize_t nargs) {
    if (nargs < 1 || nargs > 2)
        return PyErr_Format(PyExc_TypeError, "get(key, default=None) takes 1 or 2 arguments, not %zd", nargs);
    PyObject *value = fetch(self, args[0], false);
    if (value != NULL || PyErr_Occurred())
        return value;
    return Py_NewRef(nargs == 2 ? args[1] : Py_None);
}

static PyObject *Table_set(Table *self, PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 2)
        return PyErr_Format(PyExc_TypeError, "set(key, value) takes 2 arguments, not %zd", nargs);
    Py_buffer value;
    if (!usable(self) || PyObject_GetBuffer(args[1], &value, PyBUF_SIMPLE) < 0)
        return NULL;
    bool stored = put(self, args[0], &value, 0);
    PyBuffer_Release(&value);
    return stored ? Py_NewRef(Py_None) : NULL;
}

static PyObject *Table_delete(Table *self, PyObject *key_object) {
    Change c = {.task = TASK_DELETE};
    if (!usable(self) || !key_of(self, key_object, &c.key))
        return NULL;
    l0_result result = change(self, key_object, &c);
    return PyErr_Occurred() ? NULL : PyBool_FromLong(result == L0_DONE);
}

static PyObject *Table_ticket(Table *self, PyObject *key_object) {
    l0_key key;
    if (!usable(self) || !key_of(self, key_object, &key))
        return NULL;
    return PyLong_FromUnsignedLongLong(l0_ticket(&self->t, key));
}

static PyObject *Table_insert(Table *self, PyObject *args) {
    PyObject *key_object;
    Py_buffer value;
    unsigned long long ticket;
    if (!usable(self) || !PyArg_ParseTuple(args, "Oy*K:insert", &key_object, &value, &ticket))
        return NULL;
    Change c = {.task = TASK_INSERT, .value = {value.buf, (size_t)value.len, 0}, .ticket = ticket};
    l0_result result = L0_UNSETTLED;
    if (key_of(self, key_object, &c.key)) {
        if ((size_t)value.len > self->t.g.value_bytes_max)
            say_too_large(self, (size_t)value.len);
        else
            result = change(self, key_object, &c);
    }
    PyBuffer_Release(&value);
    return PyErr_Occurred() ? NULL : PyBool_FromLong(result == L0_DONE);
}

static int Table_contains(Table *self, PyObject *key_object) {
    l0_key key;
    l0_found found;
    if (!usable(self) || !key_of(self, key_object, &key))
        return -1;
    l0_result result = l0_find(&self->t, key, &found);
    if (result == L0_UNSETTLED)
        unsettled(self, key_object);
    return result == L0_UNSETTLED ? -1 : result == L0_DONE;
}

static Py_ssize_t Table_length(Table *self) {
    if (!usable(self))
        return -1;
    /* A writer killed between a change and its counting leaves it off by one; survey() counts. */
    uint64_t keys = atomic_load_explicit(&l0_head(&self->t)->keys, memory_order_relaxed);
    if (keys >> 63)
        return 0;
    return (Py_ssize_t)(keys < self->t.g.slots ? keys : self->t.g.slots);
}

static PyObject *Table_subscript(Table *self, PyObject *key_object) {
    PyObject *value = fetch(self, key_object, false);
    if (value == NULL && !PyErr_Occurred())
        PyErr_SetObject(PyExc_KeyError, key_object);
    return value;
}

static int Table_ass_subscript(Table *self, PyObject *key_object, PyObject *object) {
    PyObject *result;
    if (object == NULL) {
        result = Table_delete(self, key_object);
        if (result == Py_False)
            PyErr_SetObject(PyExc_KeyError, key_object);
    } else {
        PyObject *args[2] = {key_object, object};
        result = Table_set(self, args, 2);
    }
    Py_XDECREF(result);
    return PyErr_Occurred() ? -1 : 0;
}

/* ---- views ----------------------------------------------------------------------------------------------------- */

typedef struct View {
    PyObject_HEAD
    Table *table;
    l0_found found;
    bool readonly;
} View;

static void View_dealloc(View *self) {
    self->table->exports--;
    unmap_if_unused(self->table);
    Py_DECREF(self->table);
    PyObject_Free(self);
}

static int View_getbuffer(View *self, Py_buffer *buffer, int flags) {
    return PyBuffer_FillInfo(buffer, (PyObject *)self, (void *)(uintptr_t)self->found.bytes,
                             (Py_ssize_t)self->found.n, self->readonly, flags);
}

static PyObject *View_valid(View *self, PyObject *ignored) {
    (void)ignored;
    return PyBool_FromLong(l0_intact(&self->table->t, self->found.meta, self->found.generation));
}

static Py_ssize_t View_length(View *self) { return (Py_ssize_t)self->found.n; }

static PyBufferProcs View_buffer = {(getbufferproc)View_getbuffer, NULL};
static PySequenceMethods View_sequence = {.sq_length = (lenfunc)View_length};
static PyMethodDef View_methods[] = {
    {"valid", (PyCFunction)View_valid, METH_NOARGS, "Whether the bytes are still the ones that were found."},
    {NULL, NULL, 0, NULL},
};
static PyTypeObject View_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "lmcache_l0._table.View",
    .tp_basicsize = sizeof(View),
    .tp_dealloc = (destructor)View_dealloc,
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_doc = "The bytes of one value where they lie in shared memory.",
    .tp_as_buffer = &View_buffer,
    .tp_as_sequence = &View_sequence,
    .tp_methods = View_methods,
};

static PyObject *view_of(Table *self, l0_found *found, bool readonly) {
    View *view = PyObject_New(View, &View_type);
    if (view == NULL)
        return NULL;
    view->table = (Table *)Py_NewRef((PyObject *)self);
    view->found = *found;
    view->readonly = readonly;
    self->exports++;
    count(self, found);
    return (PyObject *)view;
}

static bool may_view(Table *self, bool writable) {
    if (writable && !self->writable)
        PyErr_Format(usage_error, "the table %U was attached read-only and gives no writable view", self->path);
    return usable(self) && !PyErr_Occurred();
}

static PyObject *Table_view(Table *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"key", "writable", NULL};
    PyObject *key_object;
    int writable = 0;
    l0_key key;
    l0_found found;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|$p:view", names, &key_object, &writable) ||
        !may_view(self, writable) || !key_of(self, key_object, &key))
        return NULL;
    l0_result result = l0_find(&self->t, key, &found);
    if (result == L0_UNSETTLED)
        return unsettled(self, key_object);
    if (result == L0_DONE)
        return view_of(self, &found, !writable);
    self->misses++;
    Py_RETURN_NONE;
}

/* ---- arrays ---------------------------------------------------------------------------------------------------- */

/* Bytes of an array of this shape; -1 with an error set. */
static Py_ssize_t bytes_of_shape(PyObject *shape, Py_ssize_t itemsize) {
    if (PyLong_Check(shape)) {
        Py_ssize_t n = PyLong_AsSsize_t(shape);
        if (n >= 0 && n <= (Py_ssize_t)L0_VALUE_BYTES_MAX)
            return n * itemsize;
    } else if (PyTuple_Check(shape)) {
        Py_ssize_t n = itemsize;
        for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(shape); i++) {
            Py_ssize_t side = PyLong_AsSsize_t(PyTuple_GET_ITEM(shape, i));
            if (side < 0 || side > (Py_ssize_t)L0_VALUE_BYTES_MAX || n > (Py_ssize_t)L0_VALUE_BYTES_MAX)
                goto refuse;
            n *= side;
        }
        return n;
    }
refuse:
    if (!PyErr_Occurred())
        PyErr_Format(usage_error, "a shape is an int or a tuple of ints, none negative, of at most %u bytes in all; "
                     "not %R", L0_VALUE_BYTES_MAX, shape);
    return -1;
}

static PyObject *name_of_tag(uint64_t tag) {
    char name[9] = {0};
    memcpy(name, &tag, 8);
    return PyUnicode_DecodeLatin1(name, (Py_ssize_t)strlen(name), NULL);
}

static bool fits(PyObject *key_object, l0_found *found, Py_ssize_t nbytes, PyObject *shape, PyObject *dtype,
                 uint64_t tag) {
    if (found->n != (size_t)nbytes) {
        PyErr_Format(usage_error, "the value of %R has %zu bytes and shape %R of %R has %zd: ask with the shape and "
                     "dtype that it was stored with", key_object, found->n, shape, dtype, nbytes);
        return false;
    }
    if (found->tag != 0 && found->tag != tag) {
        PyObject *stored = name_of_tag(found->tag);
        if (stored != NULL)
            PyErr_Format(usage_error, "the value of %R was stored as %U and is asked for as %R: ask with the dtype "
                         "that it was stored with", key_object, stored, dtype);
        Py_XDECREF(stored);
        return false;
    }
    return true;
}

/* An array of `type` over a buffer, which it keeps. Takes the reference to buffer. */
static PyObject *array_over(PyObject *type, PyObject *shape, PyObject *dtype, PyObject *buffer, unsigned char *bytes,
                            bool writable) {
    Py_ssize_t sides[NUMPY_DIMENSIONS_MAX];
    Py_ssize_t n = PyTuple_Check(shape) ? PyTuple_GET_SIZE(shape) : 1;
    PyObject *array;
    if (numpy_new == NULL || n > NUMPY_DIMENSIONS_MAX) {
        PyObject *parts[3] = {shape, dtype, buffer};
        array = PyObject_Vectorcall(type, parts, 3, NULL);
        Py_DECREF(buffer);
        return array;
    }
    for (Py_ssize_t i = 0; i < n; i++)
        sides[i] = PyLong_AsSsize_t(PyTuple_Check(shape) ? PyTuple_GET_ITEM(shape, i) : shape);
    /* The buffer starts on a cache line, which is aligned for every dtype. */
    array = numpy_new((PyTypeObject *)type, Py_NewRef(dtype), (int)n, sides, NULL, bytes,
                      NUMPY_C_CONTIGUOUS | NUMPY_ALIGNED | (writable ? NUMPY_WRITEABLE : 0), NULL);
    if (array == NULL) {
        Py_DECREF(buffer);
        return NULL;
    }
    if (numpy_set_base(array, buffer) < 0)
        Py_CLEAR(array);
    return array;
}

static PyObject *Table_get_numpy(Table *self, PyObject *const *args, Py_ssize_t nargs, PyObject *names) {
    bool writable = false, snapshot = false;
    if (nargs != 3)
        return PyErr_Format(PyExc_TypeError, "get_numpy(key, shape, dtype, *, writable=False, snapshot=False) takes 3 "
                            "positional arguments, not %zd", nargs);
    for (Py_ssize_t i = 0; names != NULL && i < PyTuple_GET_SIZE(names); i++) {
        PyObject *name = PyTuple_GET_ITEM(names, i);
        int yes = PyObject_IsTrue(args[nargs + i]);
        if (yes < 0)
            return NULL;
        if (PyUnicode_CompareWithASCIIString(name, "writable") == 0)
            writable = yes;
        else if (PyUnicode_CompareWithASCIIString(name, "snapshot") == 0)
            snapshot = yes;
        else
            return PyErr_Format(PyExc_TypeError, "get_numpy() has no argument %R", name);
    }
    PyObject *about = describe(args[2]);
    l0_key key;
    if (about == NULL || !may_view(self, writable && !snapshot) || !key_of(self, args[0], &key))
        return NULL;
    PyObject *dtype = PyTuple_GET_ITEM(about, 0);
    Py_ssize_t nbytes = bytes_of_shape(args[1], PyLong_AsSsize_t(PyTuple_GET_ITEM(about, 1)));
    uint64_t tag = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(about, 2));
    if (nbytes < 0)
        return NULL;
    l0_found found;
    PyObject *buffer;
    if (!snapshot) {
        l0_result result = l0_find(&self->t, key, &found);
        if (result == L0_UNSETTLED)
            return unsettled(self, args[0]);
        if (result == L0_MISS) {
            self->misses++;
            Py_RETURN_NONE;
        }
        if (!fits(args[0], &found, nbytes, args[1], dtype, tag))
            return NULL;
        buffer = view_of(self, &found, !writable);
    } else {
        buffer = PyByteArray_FromStringAndSize(NULL, nbytes);
        if (buffer == NULL)
            return NULL;
        l0_result result = l0_get_exactly(&self->t, key, (unsigned char *)PyByteArray_AS_STRING(buffer),
                                          (size_t)nbytes, &found);
        if (result == L0_UNSETTLED)
            unsettled(self, args[0]);
        if (result == L0_MISS || result == L0_UNSETTLED || !fits(args[0], &found, nbytes, args[1], dtype, tag)) {
            Py_DECREF(buffer);
            self->misses += result == L0_MISS;
            return result == L0_MISS ? Py_NewRef(Py_None) : NULL;
        }
        count(self, &found);
    }
    if (buffer == NULL)
        return NULL;
    unsigned char *bytes = snapshot ? (unsigned char *)PyByteArray_AS_STRING(buffer)
                                    : (unsigned char *)(uintptr_t)found.bytes;
    return array_over(snapshot ? array_type : array_view_type, args[1], dtype, buffer, bytes, snapshot || writable);
}

static PyObject *Table_set_numpy(Table *self, PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 2)
        return PyErr_Format(PyExc_TypeError, "set_numpy(key, array) takes 2 arguments, not %zd", nargs);
    if (!usable(self))
        return NULL;
    PyObject *dtype = PyObject_GetAttr(args[1], dtype_name);
    if (dtype == NULL)
        return NULL;
    PyObject *about = describe(dtype);
    Py_DECREF(dtype);
    Py_buffer value;
    if (about == NULL || PyObject_GetBuffer(args[1], &value, PyBUF_C_CONTIGUOUS) < 0)
        return NULL;
    bool stored = put(self, args[0], &value, PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(about, 2)));
    PyBuffer_Release(&value);
    return stored ? Py_NewRef(Py_None) : NULL;
}

/* ---- batches --------------------------------------------------------------------------------------------------- */

typedef struct Wanted {
    l0_key key;
    l0_found found;
    unsigned char *to;
    size_t n;
    l0_result result;
} Wanted;

/* Memory latency is paid by many keys together: the lines of a key's home are asked for while earlier keys are being
 * copied, first its meta, and a little later, when that has come, the slot that it leads to. */
enum { AHEAD_META = 16, AHEAD_SLOT = 8 };

static inline void ask_meta(const l0_table *t, const l0_key *key) {
    l0_prefetch(l0_meta_at(t, l0_home(t, key->hash)));
}

static inline void ask_slot(const l0_table *t, const l0_key *key) {
    uint64_t home = l0_home(t, key->hash);
    uint64_t current = atomic_load_explicit(&l0_meta_at(t, home)->current, memory_order_relaxed);
    l0_prefetch(l0_slot_at(t, home));
    l0_prefetch(l0_key_at(t, home));
    l0_prefetch(l0_buffer_at(t, home, l0_buffer_of(t, current)));
}

typedef struct Row {
    l0_key key;
    l0_result result;
    uint32_t found_bytes;
} Row;

/* Fill one row of `out` for each key that is there. Needs no GIL. Returns the next state of the dice. */
static uint64_t fill_rows(const l0_table *t, Row *rows, Py_ssize_t n, unsigned char *out, size_t bytes, bool counting,
                          uint64_t dice) {
    l0_found found;
    for (Py_ssize_t i = 0; i < n && i < AHEAD_META; i++)
        ask_meta(t, &rows[i].key);
    for (Py_ssize_t i = 0; i < n; i++) {
        if (i + AHEAD_META < n)
            ask_meta(t, &rows[i + AHEAD_META].key);
        if (i + AHEAD_SLOT < n)
            ask_slot(t, &rows[i + AHEAD_SLOT].key);
        rows[i].result = l0_get_exactly(t, rows[i].key, out + (size_t)i * bytes, bytes, &found);
        if (rows[i].result == L0_DONE && counting)
            l0_count_hit(found.meta, &dice);
        else if (rows[i].result == L0_OTHER_SIZE)
            rows[i].found_bytes = (uint32_t)found.n;
    }
    return dice;
}

/* The bytes of what was found a moment ago, and whether it is still of one piece. */
static void copy_found(const l0_table *t, Wanted *w, Py_ssize_t n) {
    for (Py_ssize_t i = 0; i < n; i++)
        if (w[i].to != NULL) {
            l0_copy_out(w[i].to, w[i].found.bytes, w[i].n);
            w[i].result = l0_intact(t, w[i].found.meta, w[i].found.generation) ? L0_DONE : L0_MOVED;
        }
}

/* One part of get_many: bytes of the sizes that were seen, filled together; what was written too often meanwhile
 * is asked for again, one by one. */
static bool get_part(Table *self, PyObject *keys, Py_ssize_t from, Py_ssize_t n, PyObject *values, Wanted *w) {
    size_t total = 0;
    if (!usable(self))
        return false;
    for (Py_ssize_t i = 0; i < n; i++) {
        if (!key_of(self, PyTuple_GET_ITEM(keys, from + i), &w[i].key))
            return false;
        ask_meta(&self->t, &w[i].key);
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        if (i + AHEAD_SLOT < n)
            ask_slot(&self->t, &w[i + AHEAD_SLOT].key);
        w[i].to = NULL;
        w[i].result = l0_find(&self->t, w[i].key, &w[i].found);
        PyObject *value = NULL;
        if (w[i].result == L0_DONE) {
            value = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)w[i].found.n);
            if (value == NULL)
                return false;
            if (w[i].found.n == 0) {
                count(self, &w[i].found);
            } else {
                w[i].to = (unsigned char *)PyBytes_AS_STRING(value);
                w[i].n = w[i].found.n;
                total += w[i].n;
            }
        } else if (w[i].result == L0_UNSETTLED) {
            unsettled(self, PyTuple_GET_ITEM(keys, from + i));
            return false;
        } else {
            self->misses++;
            value = Py_NewRef(Py_None);
        }
        PyList_SET_ITEM(values, from + i, value);
    }
    bool released = total >= GIL_BYTES;
    if (released) {
        enter(self);
        Py_BEGIN_ALLOW_THREADS
        copy_found(&self->t, w, n);
        Py_END_ALLOW_THREADS
    } else {
        copy_found(&self->t, w, n);
    }
    bool fine = true;
    for (Py_ssize_t i = 0; fine && i < n; i++) {
        if (w[i].to == NULL)
            continue;
        if (w[i].result == L0_DONE) {
            count(self, &w[i].found);
            continue;
        }
        PyObject *value = self->closed ? NULL : fetch(self, PyTuple_GET_ITEM(keys, from + i), false);
        if (value == NULL)
            fine = !PyErr_Occurred() && usable(self);
        if (fine)
            PyList_SetItem(values, from + i, value != NULL ? value : Py_NewRef(Py_None));
    }
    if (released)
        leave(self);
    return fine;
}

static PyObject *Table_get_many(Table *self, PyObject *keys_object) {
    PyObject *keys = PySequence_Tuple(keys_object); /* frozen: others may run while we copy */
    if (keys == NULL)
        return NULL;
    Py_ssize_t n = PyTuple_GET_SIZE(keys);
    PyObject *values = PyList_New(n);
    Wanted *w = PyMem_Malloc(sizeof *w * (n < (Py_ssize_t)BATCH_KEYS ? (size_t)n + 1 : BATCH_KEYS));
    bool fine = values != NULL && w != NULL;
    if (!fine)
        PyErr_NoMemory();
    for (Py_ssize_t from = 0; fine && from < n; from += BATCH_KEYS) {
        Py_ssize_t part = n - from < (Py_ssize_t)BATCH_KEYS ? n - from : (Py_ssize_t)BATCH_KEYS;
        fine = get_part(self, keys, from, part, values, w) && PyErr_CheckSignals() == 0;
    }
    PyMem_Free(w);
    Py_DECREF(keys);
    if (!fine)
        Py_CLEAR(values);
    return values;
}

static bool rows_part(Table *self, PyObject *keys, Py_ssize_t from, Py_ssize_t n, Row *rows, unsigned char *out,
                      size_t bytes, char *flags) {
    for (Py_ssize_t i = 0; i < n; i++)
        if (!key_of(self, PyTuple_GET_ITEM(keys, from + i), &rows[i].key))
            return false;
    bool counting = self->writable;
    uint64_t dice = self->dice;
    if (n == (Py_ssize_t)BATCH_KEYS || bytes * (size_t)n >= GIL_BYTES) {
        enter(self);
        Py_BEGIN_ALLOW_THREADS
        dice = fill_rows(&self->t, rows, n, out, bytes, counting, dice);
        Py_END_ALLOW_THREADS
        leave(self);
    } else {
        dice = fill_rows(&self->t, rows, n, out, bytes, counting, dice);
    }
    self->dice = dice;
    for (Py_ssize_t i = 0; i < n; i++) {
        flags[i] = rows[i].result == L0_DONE;
        if (rows[i].result == L0_DONE)
            self->hits++;
        else if (rows[i].result == L0_MISS)
            self->misses++;
        else if (rows[i].result == L0_OTHER_SIZE)
            return PyErr_Format(usage_error, "the value of %R has %u bytes and a row of out has %zu",
                                PyTuple_GET_ITEM(keys, from + i), rows[i].found_bytes, bytes) != NULL;
        else
            return unsettled(self, PyTuple_GET_ITEM(keys, from + i)) != NULL;
    }
    return PyErr_CheckSignals() == 0;
}

static PyObject *Table_get_many_into(Table *self, PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 2)
        return PyErr_Format(PyExc_TypeError, "get_many_into(keys, out) takes 2 arguments, not %zd", nargs);
    Py_buffer out;
    PyObject *keys = PySequence_Tuple(args[0]);
    if (keys == NULL)
        return NULL;
    if (PyObject_GetBuffer(args[1], &out, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE) < 0) {
        Py_DECREF(keys);
        return NULL;
    }
    Py_ssize_t n = PyTuple_GET_SIZE(keys);
    size_t row = n ? (size_t)(out.len / n) : 0;
    PyObject *flags = PyBytes_FromStringAndSize(NULL, n);
    Row *rows = PyMem_Malloc(sizeof *rows * (n < (Py_ssize_t)BATCH_KEYS ? (size_t)n + 1 : BATCH_KEYS));
    bool fine = flags != NULL && rows != NULL;
    if (!fine)
        PyErr_NoMemory();
    if (fine && n && (out.len % n || row == 0 || row > self->t.g.value_bytes_max)) {
        PyErr_Format(usage_error, "out has %zd bytes and there are %zd keys: give one row of 1 to %u bytes a key",
                     out.len, n, self->t.g.value_bytes_max);
        fine = false;
    }
    for (Py_ssize_t from = 0; fine && from < n; from += BATCH_KEYS) {
        Py_ssize_t part = n - from < (Py_ssize_t)BATCH_KEYS ? n - from : (Py_ssize_t)BATCH_KEYS;
        fine = usable(self) && rows_part(self, keys, from, part, rows, (unsigned char *)out.buf + (size_t)from * row, row,
                                         PyBytes_AS_STRING(flags) + from);
    }
    PyMem_Free(rows);
    PyBuffer_Release(&out);
    Py_DECREF(keys);
    if (!fine)
        Py_CLEAR(flags);
    return flags;
}

typedef struct Given {
    Change change;
    Py_buffer value;
    l0_result result;
} Given;

/* One part of set_many. Returns how many were stored before it failed, or all. */
static Py_ssize_t set_part(Table *self, PyObject *const *pairs, Py_ssize_t n, Given *given, size_t bytes) {
    bool released = bytes >= GIL_BYTES || n >= (Py_ssize_t)(BATCH_KEYS / 2);
    Py_ssize_t done = 0;
    enter(self);
    PyThreadState *state = released ? PyEval_SaveThread() : NULL;
    for (; done < n; done++) {
        given[done].result = run_change(&self->t, &given[done].change, 0);
        if (given[done].result != L0_DONE)
            break;
    }
    if (released)
        PyEval_RestoreThread(state);
    leave(self);
    if (!usable(self) || !warn_of_load(self))
        return done;
    /* The one that could not be done at once is done the patient way, and the caller goes on behind it. */
    if (done < n && change(self, PyTuple_GET_ITEM(pairs[done], 0), &given[done].change) == L0_DONE)
        done++;
    return done;
}

static PyObject *Table_set_many(Table *self, PyObject *pairs_object) {
    if (!usable(self) || !ensure_writer(self))
        return NULL;
    PyObject *list = PyDict_Check(pairs_object) ? PyDict_Items(pairs_object) : PySequence_List(pairs_object);
    if (list == NULL)
        return NULL;
    Py_ssize_t total = PyList_GET_SIZE(list), from = 0;
    Given *given = PyMem_Malloc(sizeof *given * BATCH_KEYS);
    if (given == NULL)
        PyErr_NoMemory();
    while (given != NULL && from < total && !PyErr_Occurred()) {
        PyObject *const *pairs = ((PyListObject *)list)->ob_item + from;
        Py_ssize_t n = 0;
        size_t bytes = 0;
        for (; n < (Py_ssize_t)BATCH_KEYS && from + n < total; n++) {
            Given *g = &given[n];
            memset(g, 0, sizeof *g);
            if (!PyTuple_Check(pairs[n]) || PyTuple_GET_SIZE(pairs[n]) != 2) {
                PyErr_Format(usage_error, "set_many takes a dict or (key, value) tuples, not %R", pairs[n]);
                break;
            }
            if (!key_of(self, PyTuple_GET_ITEM(pairs[n], 0), &g->change.key) ||
                PyObject_GetBuffer(PyTuple_GET_ITEM(pairs[n], 1), &g->value, PyBUF_SIMPLE) < 0)
                break;
            g->change.value = (l0_value){g->value.buf, (size_t)g->value.len, 0};
            bytes += (size_t)g->value.len;
            if ((size_t)g->value.len > self->t.g.value_bytes_max) {
                say_too_large(self, (size_t)g->value.len);
                PyBuffer_Release(&g->value);
                break;
            }
        }
        Py_ssize_t done = 0;
        while (done < n && !PyErr_Occurred())
            done += set_part(self, pairs + done, n - done, given + done, bytes);
        for (Py_ssize_t i = 0; i < n; i++)
            PyBuffer_Release(&given[i].value);
        from += n;
        if (!PyErr_Occurred())
            PyErr_CheckSignals();
    }
    PyMem_Free(given);
    Py_DECREF(list);
    return PyErr_Occurred() ? NULL : PyLong_FromSsize_t(total);
}

/* ---- the whole table ------------------------------------------------------------------------------------------- */

static PyObject *Table_scan(Table *self, PyObject *args) {
    unsigned long long from;
    Py_ssize_t limit;
    if (!usable(self) || !PyArg_ParseTuple(args, "Kn:scan", &from, &limit))
        return NULL;
    PyObject *found = PyList_New(0);
    if (found == NULL)
        return NULL;
    l0_resident r;
    uint64_t slot = from, slots = self->t.g.slots;
    for (uint64_t looked = 0; slot < slots && PyList_GET_SIZE(found) < limit && looked < SURVEY_SLOTS; looked++, slot++) {
        if (!l0_resident_at(&self->t, slot, &r))
            continue;
        PyObject *row = Py_BuildValue("(y#nK)", r.key, (Py_ssize_t)r.key_bytes, (Py_ssize_t)r.value_bytes,
                                      (unsigned long long)r.hits);
        if (row == NULL || PyList_Append(found, row) < 0) {
            Py_XDECREF(row);
            Py_DECREF(found);
            return NULL;
        }
        Py_DECREF(row);
    }
    return Py_BuildValue("(KN)", (unsigned long long)(slot < slots ? slot : 0), found);
}

/* Walk all slots without the GIL, in pieces. */
static bool walk(Table *self, l0_survey *s) {
    for (uint64_t slot = 0; slot < self->t.g.slots; slot += SURVEY_SLOTS) {
        uint64_t end = self->t.g.slots - slot < SURVEY_SLOTS ? self->t.g.slots : slot + SURVEY_SLOTS;
        enter(self);
        Py_BEGIN_ALLOW_THREADS
        if (s != NULL)
            l0_survey_add(&self->t, slot, end, s);
        else
            l0_cool(&self->t, slot, end);
        Py_END_ALLOW_THREADS
        leave(self);
        if (PyErr_CheckSignals() < 0 || !usable(self))
            return false;
    }
    return true;
}

static uint64_t percentile(const l0_survey *s, double share) {
    uint64_t seen = 0, wanted = (uint64_t)((double)s->keys * share);
    for (uint64_t length = 1; length < L0_LENGTHS; length++)
        if ((seen += s->found_lengths[length]) >= wanted && seen)
            return length;
    return s->found_probes_max;
}

static PyObject *Table_survey(Table *self, PyObject *ignored) {
    (void)ignored;
    l0_survey *s = PyMem_Calloc(1, sizeof *s);
    if (s == NULL)
        return PyErr_NoMemory();
    if (!usable(self) || !walk(self, s)) {
        PyMem_Free(s);
        return NULL;
    }
    PyObject *all = Py_BuildValue(
        "{sK sK sK sK sK sK sd sK sK sd sK sK}", "keys", s->keys, "claimed", s->claimed, "locked", s->locked,
        "key_bytes", s->key_bytes, "value_bytes", s->value_bytes, "hits", s->hits, "found_probes_mean",
        s->keys ? (double)s->found_probes / (double)s->keys : 0.0, "found_probes_p99", percentile(s, 0.99),
        "found_probes_max", s->found_probes_max, "miss_probes_mean",
        (double)s->miss_probes / (double)self->t.g.slots, "miss_probes_max", s->miss_probes_max, "recovered",
        atomic_load(&l0_head(&self->t)->recovered));
    PyMem_Free(s);
    return all;
}

static PyObject *Table_cool(Table *self, PyObject *ignored) {
    (void)ignored;
    if (!usable(self) || !ensure_writer(self) || !walk(self, NULL))
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *Table_writers(Table *self, PyObject *ignored) {
    (void)ignored;
    if (!usable(self))
        return NULL;
    PyObject *living = PyList_New(0);
    for (uint64_t row = 0; living != NULL && row < L0_WRITERS_MAX; row++) {
        l0_writer_row *r = l0_row(&self->t, row);
        if (atomic_load(&r->epoch) == 0)
            continue;
        struct flock range;
        l0_row_range(&range, row);
        bool ours = self->t.me != 0 && self->t.me >> 48 == row;
        if (!ours && (fcntl(self->fd, L0_GETLK, &range) != 0 || range.l_type == F_UNLCK))
            continue;
        PyObject *pid = PyLong_FromUnsignedLongLong(atomic_load(&r->pid));
        if (pid == NULL || PyList_Append(living, pid) < 0)
            Py_CLEAR(living);
        Py_XDECREF(pid);
    }
    return living;
}

static PyObject *get_enabled(Table *self, void *ignored) {
    (void)ignored;
    return usable(self) ? PyBool_FromLong(atomic_load(&l0_head(&self->t)->switched_off) == 0) : NULL;
}

static int set_enabled(Table *self, PyObject *value, void *ignored) {
    (void)ignored;
    int yes = value == NULL ? 0 : PyObject_IsTrue(value);
    if (yes < 0 || !usable(self) || !ensure_writer(self))
        return -1;
    atomic_store(&l0_head(&self->t)->switched_off, !yes);
    return 0;
}

static PyObject *get_figure(Table *self, void *which) {
    const l0_geometry *g = &self->t.g;
    uint64_t figures[] = {g->slots, g->slot_bytes, g->value_bytes_max, g->key_bytes_max, g->versions, g->file_bytes,
                          g->table_id, g->created_unix_s, self->hits, self->misses};
    return PyLong_FromUnsignedLongLong(figures[(size_t)(uintptr_t)which]);
}

static PyObject *get_closed(Table *self, void *ignored) {
    (void)ignored;
    return PyBool_FromLong(self->closed);
}

static PyObject *get_path(Table *self, void *ignored) {
    (void)ignored;
    return Py_NewRef(self->path != NULL ? self->path : Py_None);
}

#define FIGURE(name, index, text) {name, (getter)get_figure, NULL, text, (void *)(uintptr_t)(index)}

static PyGetSetDef Table_getset[] = {
    FIGURE("hash_slots", 0, "Slots of the table."),
    FIGURE("slot_bytes", 1, "Bytes of a slot: heads, key, versions + 1 buffers."),
    FIGURE("max_value_size", 2, "The largest value, in bytes."),
    FIGURE("max_key_size", 3, "The longest key, in bytes."),
    FIGURE("versions", 4, "Further writes that a view outlives."),
    FIGURE("file_bytes", 5, "Bytes of the table's file."),
    FIGURE("table_id", 6, "The table's random identity."),
    FIGURE("created_unix_s", 7, "When the table was made."),
    FIGURE("hits", 8, "Reads of this handle that found their key."),
    FIGURE("misses", 9, "Reads of this handle that did not."),
    {"enabled", (getter)get_enabled, (setter)set_enabled, "The switch in the header, for all processes.", NULL},
    {"closed", (getter)get_closed, NULL, "Whether close() was called.", NULL},
    {"path", (getter)get_path, NULL, "The table's file.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMethodDef Table_methods[] = {
    {"get", (PyCFunction)(void (*)(void))Table_get, METH_FASTCALL,
     "get(key, default=None): the value as bytes, a consistent copy."},
    {"set", (PyCFunction)(void (*)(void))Table_set, METH_FASTCALL, "set(key, value): store bytes."},
    {"delete", (PyCFunction)Table_delete, METH_O, "delete(key): whether it was there."},
    {"view", (PyCFunction)(void (*)(void))Table_view, METH_VARARGS | METH_KEYWORDS,
     "view(key, *, writable=False): the bytes where they lie, or None."},
    {"get_numpy", (PyCFunction)(void (*)(void))Table_get_numpy, METH_FASTCALL | METH_KEYWORDS,
     "get_numpy(key, shape, dtype, *, writable=False, snapshot=False): an array, or None."},
    {"set_numpy", (PyCFunction)(void (*)(void))Table_set_numpy, METH_FASTCALL,
     "set_numpy(key, array): store a C-contiguous array."},
    {"get_many", (PyCFunction)Table_get_many, METH_O, "get_many(keys): a list of bytes or None."},
    {"get_many_into", (PyCFunction)(void (*)(void))Table_get_many_into, METH_FASTCALL,
     "get_many_into(keys, out): one row a key; returns one byte a key, 1 where it was found."},
    {"set_many", (PyCFunction)Table_set_many, METH_O, "set_many(items): store a dict or pairs; how many."},
    {"ticket", (PyCFunction)Table_ticket, METH_O, "ticket(key): for insert()."},
    {"insert", (PyCFunction)Table_insert, METH_VARARGS,
     "insert(key, value, ticket): store it if nobody set or deleted it since the ticket."},
    {"scan", (PyCFunction)Table_scan, METH_VARARGS,
     "scan(cursor, limit): (next cursor or 0, [(key, value bytes, hits)])."},
    {"survey", (PyCFunction)Table_survey, METH_NOARGS, "survey(): figures counted over all slots."},
    {"cool", (PyCFunction)Table_cool, METH_NOARGS, "cool(): halve the counts of hits."},
    {"writers", (PyCFunction)Table_writers, METH_NOARGS, "writers(): pids of the living writers."},
    {"close", (PyCFunction)Table_close, METH_NOARGS, "close(): leave the table; views stay readable."},
    {NULL, NULL, 0, NULL},
};

static PyMappingMethods Table_mapping = {(lenfunc)Table_length, (binaryfunc)Table_subscript,
                                         (objobjargproc)Table_ass_subscript};
static PySequenceMethods Table_sequence = {.sq_contains = (objobjproc)Table_contains};

static PyTypeObject Table_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "lmcache_l0._table.Table",
    .tp_basicsize = sizeof(Table),
    .tp_dealloc = (destructor)Table_dealloc,
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .tp_doc = "A mapped table. Made by SharedCache, which opens the file and judges the sizes.",
    .tp_as_mapping = &Table_mapping,
    .tp_as_sequence = &Table_sequence,
    .tp_methods = Table_methods,
    .tp_getset = Table_getset,
    .tp_init = (initproc)Table_init,
    .tp_new = Table_new,
};

/* ---- module ----------------------------------------------------------------------------------------------------- */

static PyObject *module_plan(PyObject *module, PyObject *args) {
    (void)module;
    unsigned long long slots, value, key, versions;
    l0_geometry g;
    if (!PyArg_ParseTuple(args, "KKKK:plan", &slots, &value, &key, &versions))
        return NULL;
    if (!l0_plan(&g, slots, value, key, versions))
        Py_RETURN_NONE;
    return Py_BuildValue("(KK)", (unsigned long long)g.file_bytes, (unsigned long long)g.slot_bytes);
}

static PyObject *module_initialise(PyObject *module, PyObject *args) {
    (void)module;
    int fd;
    unsigned long long slots, value, key, versions, seed, id, now;
    l0_geometry g;
    if (!PyArg_ParseTuple(args, "iKKKKKKK:initialise", &fd, &slots, &value, &key, &versions, &seed, &id, &now))
        return NULL;
    struct stat st;
    if (!l0_plan(&g, slots, value, key, versions) || fstat(fd, &st) != 0 || (uint64_t)st.st_size < g.file_bytes)
        return PyErr_Format(usage_error, "the file is smaller than the table that was planned");
    l0_header *header = mmap(NULL, L0_HEADER_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (header == MAP_FAILED)
        return PyErr_SetFromErrno(PyExc_OSError);
    l0_header_write(header, &g, seed, id, now);
    munmap(header, L0_HEADER_BYTES);
    Py_RETURN_NONE;
}

static PyObject *module_ready(PyObject *module, PyObject *args) {
    (void)module;
    int fd;
    struct stat st;
    if (!PyArg_ParseTuple(args, "i:ready", &fd))
        return NULL;
    if (fstat(fd, &st) != 0)
        return PyErr_SetFromErrno(PyExc_OSError);
    if (st.st_size == 0)
        Py_RETURN_FALSE;
    if (st.st_size < (off_t)L0_HEADER_BYTES)
        Py_RETURN_TRUE; /* something, but no table: attaching says what */
    l0_header *header = mmap(NULL, L0_HEADER_BYTES, PROT_READ, MAP_SHARED, fd, 0);
    if (header == MAP_FAILED)
        return PyErr_SetFromErrno(PyExc_OSError);
    l0_geometry g;
    bool ready = l0_header_check(header, (uint64_t)st.st_size, &g) != L0_NOT_READY;
    munmap(header, L0_HEADER_BYTES);
    return PyBool_FromLong(ready);
}

static PyMethodDef module_methods[] = {
    {"plan", module_plan, METH_VARARGS,
     "plan(slots, value_bytes_max, key_bytes_max, versions): (file bytes, slot bytes), or None beyond the limits."},
    {"initialise", module_initialise, METH_VARARGS, "Write the header of a new, all-zero file."},
    {"ready", module_ready, METH_VARARGS, "Whether somebody has finished the file."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module_def = {PyModuleDef_HEAD_INIT, "_table", "The shared table.", -1, module_methods,
                                        NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__table(void) {
    PyObject *errors = PyImport_ImportModule("lmcache_l0.errors");
    if (errors == NULL)
        return NULL;
    struct { const char *name; PyObject **to; } wanted[] = {
        {"UsageError", &usage_error}, {"TableError", &table_error}, {"TableMismatchError", &mismatch_error},
        {"TableDamagedError", &damaged_error}, {"TableFullError", &full_error}, {"TableBusyError", &busy_error},
        {"ValueTooLargeError", &too_large_error}, {"TableLoadWarning", &load_warning},
    };
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++)
        if ((*wanted[i].to = PyObject_GetAttrString(errors, wanted[i].name)) == NULL)
            return NULL;
    Py_DECREF(errors);
    described = PyDict_New();
    dtype_name = PyUnicode_InternFromString("dtype");
    if (described == NULL || dtype_name == NULL || PyType_Ready(&Table_type) < 0 || PyType_Ready(&View_type) < 0)
        return NULL;
    if (pthread_atfork(NULL, NULL, after_fork_in_child) != 0)
        return PyErr_NoMemory();
    PyObject *module = PyModule_Create(&module_def);
    if (module == NULL)
        return NULL;
    if (PyModule_AddObjectRef(module, "Table", (PyObject *)&Table_type) < 0 ||
        PyModule_AddObjectRef(module, "View", (PyObject *)&View_type) < 0 ||
        PyModule_AddIntConstant(module, "SLOTS_MAX", (long)L0_SLOTS_MAX) < 0 ||
        PyModule_AddIntConstant(module, "VALUE_BYTES_MAX", L0_VALUE_BYTES_MAX) < 0 ||
        PyModule_AddIntConstant(module, "KEY_BYTES_MAX", L0_KEY_BYTES_MAX) < 0 ||
        PyModule_AddIntConstant(module, "VERSIONS_MAX", L0_VERSIONS_MAX) < 0 ||
        PyModule_AddIntConstant(module, "LAYOUT_VERSION", L0_LAYOUT_VERSION) < 0)
        return NULL;
    return module;
}
