/* lmcache_l0._table: the shared table as a Python type. The algorithms stand in the headers beside it and know no
 * Python; here are mapping, arguments, errors, batches, and views.
 *
 * Anything that runs Python (an iterator, a signal handler, a warning's filter, a finalizer) may close the table, or
 * fork. So no method looks at the table by itself: it asks to_read() or to_write() for it, which answer for as long as
 * no Python runs, and asks again behind whatever may have run some.
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

#include "l0_given.h"
#include "l0_move.h"
#include "l0_survey.h"
#include "l0_write.h"

#define SLICE_NS 50000000u            /* without the GIL, between two looks for signals */
#define GIL_BYTES (256u << 10)        /* a copy of this much is worth a release of the GIL */
#define BATCH_KEYS 1024u              /* keys of a batch that are in flight together */
#define HUGE_BYTES (2u << 20)
#define COLLAPSE_BYTES (32u << 20)    /* collapsed between two looks for signals: some 10 ms */
#define WAIT_S_MAX 86400
#define SURVEY_SLOTS (1u << 16)       /* slots between two looks for signals */
#define SCAN_TRIES 100                /* of one home whose keys come and go; then what was met is given */
#define REHASH_SLOTS (1u << 12)       /* the same, where keys may be moved */

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
enum { NUMPY_C_CONTIGUOUS = 0x1, NUMPY_OWNDATA = 0x4, NUMPY_ALIGNED = 0x100, NUMPY_WRITEABLE = 0x400, NUMPY_DIMENSIONS_MAX = 32 };
typedef PyObject *(*numpy_new_t)(PyTypeObject *, PyObject *, int, const Py_ssize_t *, const Py_ssize_t *, void *, int,
                                 PyObject *);
typedef int (*numpy_set_base_t)(PyObject *, PyObject *);
static numpy_new_t numpy_new;
static numpy_set_base_t numpy_set_base;

/* An array's own fields, as both ABIs have them. */
typedef struct NumpyArray {
    PyObject_HEAD
    char *data;
    int nd;
    Py_ssize_t *dimensions, *strides;
    PyObject *base, *descr;
    int flags;
} NumpyArray;

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
    if (known != NULL)
        return known;
    bool hashable = !PyErr_Occurred();
    PyErr_Clear();
    if (import_arrays() < 0)
        return NULL;
    PyObject *made = PyObject_CallOneArg(describe_dtype, dtype);
    if (made == NULL)
        return NULL;
    PyObject *kept = hashable ? dtype : PyTuple_GET_ITEM(made, 0); /* a list of fields is kept by what it means */
    int failed = PyDict_SetItem(described, kept, made);
    known = failed < 0 ? NULL : PyDict_GetItemWithError(described, kept);
    Py_DECREF(made);
    return known;
}

/* ---- the handle --------------------------------------------------------------------------------------------- */

typedef struct Table {
    PyObject_HEAD
    l0_table t;                        /* by to_read() and to_write() only */
    size_t mapped;
    uint64_t page_bytes;               /* more than L0_HEADER_BYTES: a hugetlbfs */
    bool writable, closed, warned;
    int busy;
    Py_ssize_t exports;
    uint64_t dice, warn_at_keys, wait_ns, hits, misses;
    PyObject *path;
    struct Table *next, **link;        /* every open handle, for the at-fork handler */
} Table;

static Table *handles;

/* In a forked child. The child takes a row of its own when it first writes. */
static void after_fork_in_child(void) {
    for (Table *h = handles; h != NULL; h = h->next) {
        l0_writer_forked(&h->t);
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
    if (self->busy == 0) {
        l0_writer_leave(&self->t);
        if (l0_same_file(&self->t, self->t.ask_fd))
            close(self->t.ask_fd);
        self->t.ask_fd = -1;
    }
    self->closed = true;
    unmap_if_unused(self);
}

static void enter(Table *self) { self->busy++; }

static void leave(Table *self) {
    self->busy--;
    if (self->closed && self->busy == 0)
        close_handle(self);
}

/* The table, until Python runs again; NULL with an error set. */
static l0_table *to_read(Table *self) {
    if (!self->closed && self->t.base != NULL)
        return &self->t;
    PyErr_Format(usage_error, "the table %V is closed: attach it again", self->path, "?");
    return NULL;
}

/* An open description of our own of the table's file: by descriptor where the system has such paths (the name may be
 * gone), else by name. Never another file that has come to stand in their place. */
static int open_again(Table *self, int flags) {
    char by_fd[64];
    if (l0_same_file(&self->t, self->t.ask_fd)) {
        snprintf(by_fd, sizeof by_fd, "/proc/self/fd/%d", self->t.ask_fd);
        int fd = open(by_fd, flags | O_CLOEXEC);
        if (l0_same_file(&self->t, fd))
            return fd;
        if (fd >= 0)
            close(fd);
        else if (errno == EACCES || errno == EPERM)
            return -1;
    }
    PyObject *path = NULL;
    if (!PyUnicode_FSConverter(self->path, &path))
        return -1;
    int fd = open(PyBytes_AS_STRING(path), flags | O_CLOEXEC | O_NOFOLLOW);
    Py_DECREF(path);
    if (fd < 0 || l0_same_file(&self->t, fd))
        return fd;
    close(fd);
    errno = ENOENT;
    return -1;
}

/* Somebody in the process may have closed every descriptor, ours too: then get another. */
static void ensure_asking(Table *self) {
    if (l0_same_file(&self->t, self->t.ask_fd))
        return;
    self->t.ask_fd = open_again(self, self->writable ? O_RDWR : O_RDONLY);
    PyErr_Clear(); /* without one no owner is proven dead: the wait says that it was in vain */
}

static bool join(Table *self) {
    if (!self->writable) {
        PyErr_Format(usage_error, "the table %U was attached read-only: attach it with read_only=False to write",
                     self->path);
        return false;
    }
    int fd = open_again(self, O_RDWR);
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

/* The table, with a writer's row that is this process's own, until Python runs again; NULL with an error set. */
static l0_table *to_write(Table *self) {
    l0_table *t = to_read(self);
    return t != NULL && (t->me != 0 || join(self)) ? t : NULL;
}

/* A mapping whose offsets are whole huge pages where its addresses are: nothing else can be mapped by them. */
static void *map_aligned(int fd, size_t bytes, int protection) {
    unsigned char *room = mmap(NULL, bytes + HUGE_BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANON, -1, 0);
    if (room == MAP_FAILED)
        return MAP_FAILED;
    size_t ahead = (HUGE_BYTES - (uintptr_t)room % HUGE_BYTES) % HUGE_BYTES;
    void *base = mmap(room + ahead, bytes, protection, MAP_SHARED | MAP_FIXED, fd, 0);
    if (base == MAP_FAILED) {
        int failed = errno;
        munmap(room, bytes + HUGE_BYTES);
        errno = failed;
        return MAP_FAILED;
    }
    if (ahead)
        munmap(room, ahead);
    munmap(room + ahead + bytes, HUGE_BYTES - ahead);
    return base;
}

static int Table_init(Table *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"path", "fd", "writable", "wait_s", "warn_load", "huge_pages", NULL};
    PyObject *path;
    int fd, writable, huge_pages;
    double wait_s, warn_load;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "Uipddp:Table", names, &path, &fd, &writable, &wait_s, &warn_load,
                                     &huge_pages))
        return -1;
    if (self->path != NULL) {
        PyErr_SetString(usage_error, "a table handle is made once: attach again for another");
        return -1;
    }
    if (!(wait_s > 0 && wait_s <= WAIT_S_MAX)) {
        PyErr_Format(usage_error, "wait_s must be above zero and at most %d", WAIT_S_MAX);
        return -1;
    }
    struct stat st;
    if (fstat(fd, &st) != 0) {
        PyErr_SetFromErrno(PyExc_OSError);
        return -1;
    }
    uint64_t bytes = st.st_size < 0 ? 0 : (uint64_t)st.st_size;
    if (bytes < L0_HEADER_BYTES) {
        PyErr_Format(damaged_error, "%U has %llu bytes and is no L0 table: name another path, or remove "
                     "it if it is yours to remove", path,
                     (unsigned long long)bytes);
        return -1;
    }
    /* One page first: nothing else is mapped before the header has been judged. */
    uint64_t page_bytes = l0_page_bytes(fd);
    l0_header *header = mmap(NULL, page_bytes, PROT_READ, MAP_SHARED, fd, 0);
    if (header == MAP_FAILED) {
        PyErr_SetFromErrno(PyExc_OSError);
        return -1;
    }
    l0_geometry g;
    l0_verdict verdict = l0_header_check(header, bytes, &g);
    uint32_t version = header->layout_version;
    unsigned long long says = header->file_bytes;
    munmap(header, page_bytes);
    if (verdict == L0_OTHER_VERSION)
        PyErr_Format(mismatch_error, "%U has table layout %u and this library speaks %u: use one version of "
                     "lmcache-l0 everywhere, or remove the file", path, version, L0_LAYOUT_VERSION);
    else if (verdict == L0_OTHER_BYTE_ORDER)
        PyErr_Format(mismatch_error, "%U was made on a machine of another byte order: remove it", path);
    else if (verdict == L0_WRONG_SIZE)
        PyErr_Format(damaged_error, "%U has %llu bytes and its header says %llu: it was cut off; remove it", path,
                     (unsigned long long)bytes, says);
    else if (verdict == L0_NOT_READY)
        PyErr_Format(damaged_error, "%U is no finished L0 table (none of this version is ever seen unfinished): remove it if "
                     "it is yours to remove, or name another path", path);
    else if (verdict != L0_OK_HEADER)
        PyErr_Format(damaged_error, "%U is no L0 table, or its header is damaged: name another path, or remove it if it is "
                     "yours to remove", path);
    if (verdict != L0_OK_HEADER)
        return -1;
    int protection = writable ? PROT_READ | PROT_WRITE : PROT_READ;
    bool by_advice = huge_pages && g.file_bytes >= HUGE_BYTES && page_bytes == L0_HEADER_BYTES;
    size_t mapped = l0_round_up(g.file_bytes, page_bytes);
    void *base = by_advice ? map_aligned(fd, mapped, protection) : mmap(NULL, mapped, protection, MAP_SHARED, fd, 0);
    if (base == MAP_FAILED) {
        PyErr_SetFromErrno(PyExc_OSError);
        return -1;
    }
    int own = fcntl(fd, F_DUPFD_CLOEXEC, 3);
    if (own < 0) {
        PyErr_SetFromErrno(PyExc_OSError);
        munmap(base, mapped);
        return -1;
    }
    self->path = Py_NewRef(path);
    self->t.base = base;
    self->t.g = g;
    self->mapped = mapped;
    self->page_bytes = page_bytes;
    self->t.dev = (uint64_t)st.st_dev;
    self->t.ino = (uint64_t)st.st_ino;
    self->t.ask_fd = own;
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
        self->t.ask_fd = -1;
        self->t.life_fd = -1;
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
    l0_table *t = to_read(self);
    if (t == NULL)
        return;
    unsigned long long keys = atomic_load(&l0_head(t)->keys), slots = t->g.slots;
    PyErr_Format(full_error, "the table %U is full: no free slot for %R; %llu of %llu slots are taken. Create it "
                 "anew with hash_slots=%llu (the keys that it must hold, divided by 0.7), or delete keys", self->path,
                 key, keys, slots, (slots > keys ? slots : keys) * 2);
}

static bool warn_of_load(Table *self) {
    l0_table *t = self->warned ? NULL : to_read(self);
    if (t == NULL)
        return !PyErr_Occurred();
    if (atomic_load_explicit(&l0_head(t)->keys, memory_order_relaxed) < self->warn_at_keys)
        return true;
    self->warned = true;
    unsigned long long slots = t->g.slots;
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

/* Off, a set stores nothing: it takes the older value away, which would be wrong when the table is on again. */
static l0_result run_change(const l0_table *t, Change *c, uint64_t wait_ns) {
    c->inserted = false;
    if (c->task == TASK_DELETE)
        return l0_delete(t, c->key, wait_ns);
    if (!l0_enabled(t)) {
        if (c->task == TASK_INSERT)
            return L0_MOVED;
        l0_result gone = l0_delete(t, c->key, wait_ns);
        return gone == L0_MISS ? L0_DONE : gone;
    }
    if (c->task == TASK_PUT)
        return l0_put(t, c->key, c->value, wait_ns, &c->inserted);
    l0_result result = l0_insert(t, c->key, c->value, c->ticket, wait_ns);
    c->inserted = result == L0_DONE;
    return result;
}

/* Make one change: at once if it can be, else without the GIL, in slices, for at most wait_s. False with an error set. */
static bool change(Table *self, PyObject *key, Change *c, l0_result *result) {
    uint64_t until = 0;
    for (uint64_t wait_ns = 0;; wait_ns = SLICE_NS < self->wait_ns ? SLICE_NS : self->wait_ns) {
        l0_table *t = to_write(self);
        if (t == NULL)
            return false;
        if (wait_ns == 0 && c->value.n < GIL_BYTES) {
            *result = run_change(t, c, 0);
        } else {
            ensure_asking(self);
            enter(self);
            Py_BEGIN_ALLOW_THREADS
            *result = run_change(t, c, wait_ns);
            Py_END_ALLOW_THREADS
            leave(self);
        }
        if (*result != L0_BUSY)
            break;
        uint64_t now = l0_now_ns();
        until = until ? until : now + self->wait_ns;
        if (now >= until)
            break;
        if (PyErr_CheckSignals() < 0)
            return false;
    }
    if (*result == L0_FULL)
        say_full(self, key);
    if (*result == L0_BUSY)
        PyErr_Format(busy_error, "the slot of %R in %U, or its stripe, has been held for %llu ms by a writer that is "
                     "alive but does not move (stopped, or starved): try again, or end that process", key, self->path,
                     (unsigned long long)(self->wait_ns / 1000000u));
    return *result != L0_FULL && *result != L0_BUSY && (!c->inserted || warn_of_load(self));
}

static bool put(Table *self, PyObject *key_object, Py_buffer *value, uint64_t tag) {
    Change c = {.task = TASK_PUT, .value = {value->buf, (size_t)value->len, tag}};
    l0_result result;
    if (!key_of(self, key_object, &c.key))
        return false;
    if ((size_t)value->len > self->t.g.value_bytes_max) {
        say_too_large(self, (size_t)value->len);
        return false;
    }
    return change(self, key_object, &c, &result);
}

static PyObject *unsettled(Table *self, PyObject *key) {
    return PyErr_Format(busy_error, "%R in %U was written again and again while it was read, %d times over (or the "
                        "file is damaged): create the table with versions=2, or more of them", key, self->path, L0_READ_TRIES);
}

static inline void count(Table *self, l0_found *found) {
    self->hits++;
    if (self->writable)
        l0_count_hit(found->meta, &self->dice);
}

/* ---- arguments -------------------------------------------------------------------------------------------------- */

/* What a method takes, by place or by name; the first `required` must be given. */
typedef struct Signature {
    const char *name;
    int required, places, count; /* names beyond `places` are by name only */
    const char *names[6];
} Signature;

static bool no_such_call(const Signature *s, const char *trouble, PyObject *name) {
    PyObject *all = PyUnicode_FromString("");
    for (int i = 0; all != NULL && i < s->count; i++) {
        PyObject *longer = PyUnicode_FromFormat(i < s->required ? "%U%s%s" : "%U%s%s=...", all,
                                                i == 0 ? "" : i == s->places ? ", *, " : ", ", s->names[i]);
        Py_SETREF(all, longer);
    }
    if (all != NULL && name != NULL)
        PyErr_Format(PyExc_TypeError, "%s(%U) has %s %R", s->name, all, trouble, name);
    else if (all != NULL)
        PyErr_Format(PyExc_TypeError, "%s(%U): %s", s->name, all, trouble);
    Py_XDECREF(all);
    return false;
}

/* Sort the arguments of a vectorcall into `to`, by `s`; what is not given is NULL. */
static bool sorted_arguments(const Signature *s, PyObject *const *args, Py_ssize_t nargs, PyObject *names,
                             PyObject **to) {
    if (nargs > s->places)
        return no_such_call(s, "too many arguments", NULL);
    for (int i = 0; i < s->count; i++)
        to[i] = i < nargs ? args[i] : NULL;
    for (Py_ssize_t n = 0; names != NULL && n < PyTuple_GET_SIZE(names); n++) {
        PyObject *name = PyTuple_GET_ITEM(names, n);
        int i = 0;
        while (i < s->count && PyUnicode_CompareWithASCIIString(name, s->names[i]) != 0)
            i++;
        if (i == s->count)
            return no_such_call(s, "no argument", name);
        if (to[i] != NULL)
            return no_such_call(s, "twice the argument", name);
        to[i] = args[nargs + n];
    }
    for (int i = 0; i < s->required; i++)
        if (to[i] == NULL)
            return no_such_call(s, "an argument is missing", NULL);
    return true;
}

static inline __attribute__((always_inline)) bool arguments(const Signature *s, PyObject *const *args,
                                                            Py_ssize_t nargs, PyObject *names, PyObject **to) {
    if (names == NULL && nargs == s->required) { /* as most calls are; a loop of known length, since this is inline */
        for (int i = 0; i < s->count; i++)
            to[i] = i < s->required ? args[i] : NULL;
        return true;
    }
    return sorted_arguments(s, args, nargs, names, to);
}

/* Does a buffer's format have Python objects in it? Their bytes are pointers. Names of fields stand between colons. */
static bool has_objects(const char *format) {
    for (; format != NULL && *format; format++) {
        if (*format == 'O')
            return true;
        if (*format == ':')
            format = strchr(format + 1, ':');
        if (format == NULL)
            break;
    }
    return false;
}

/* ---- memory that others have given ------------------------------------------------------------------------------ */

enum { OWNERS_MAX = 16 };
static PyTypeObject View_type; /* over the table's own memory */

/* Whether it is an array whose fields we know. numpy is imported only where its arrays come. */
static bool is_array(PyObject *owner) {
    if (array_type == NULL && strcmp(Py_TYPE(owner)->tp_name, "numpy.ndarray") == 0 && import_arrays() < 0)
        PyErr_Clear(); /* the system is asked */
    return array_type != NULL && numpy_new != NULL && PyObject_TypeCheck(owner, (PyTypeObject *)array_type);
}

/* Whether memory stays as long as there is a buffer over it: Python's own and numpy's does, a mapped file's may not. */
static bool stays(PyObject *owner) {
    for (int i = 0; owner != NULL && i < OWNERS_MAX; i++) {
        if (PyBytes_CheckExact(owner) || PyByteArray_CheckExact(owner) || Py_IS_TYPE(owner, &View_type))
            return true;
        if (PyMemoryView_Check(owner))
            owner = PyMemoryView_GET_BASE(owner);
        else if (is_array(owner)) {
            if (((NumpyArray *)owner)->flags & NUMPY_OWNDATA)
                return true;
            owner = ((NumpyArray *)owner)->base;
        } else
            return false; /* also torch's: what it lends to numpy does not say whose it is */
    }
    return false;
}

/* False, with an error: who touches this memory would get a signal. */
static bool reachable(PyObject *owner, const Py_buffer *buffer, bool writes) {
    if (buffer->len == 0 || stays(owner) || l0_reaches(buffer->buf, (size_t)buffer->len, writes))
        return true;
    PyErr_Format(usage_error, "%s has memory that cannot be %s: its mapping was closed or is read-only, its file was "
                 "truncated, or its file system has no room; pass memory that is there",
                 Py_TYPE(owner)->tp_name, writes ? "written" : "read");
    return false;
}

/* The bytes of a value, and by `tag`, if wanted, what they are. numpy's dates have no format: asked for by their dtype. */
static bool any_buffer_of(PyObject *object, int flags, Py_buffer *buffer, uint64_t *tag) {
    PyObject *about = NULL;
    if (PyObject_GetBuffer(object, buffer, flags | PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) == 0) {
        if (has_objects(buffer->format)) {
            PyErr_Format(usage_error, "%s holds Python objects, which are not shared: use a type of plain bytes",
                         Py_TYPE(object)->tp_name);
            PyBuffer_Release(buffer);
            return false;
        }
        if (tag == NULL)
            return true;
        *tag = 0;
        if (buffer->format == NULL || strcmp(buffer->format, "B") == 0)
            return true;
        PyObject *type = PyObject_HasAttr(object, dtype_name) ? PyObject_GetAttr(object, dtype_name)
                                                              : PyUnicode_FromString(buffer->format);
        about = type != NULL ? describe(type) : NULL;
        Py_XDECREF(type);
    } else {
        PyObject *type = PyErr_ExceptionMatches(PyExc_ValueError) ? PyObject_GetAttr(object, dtype_name) : NULL;
        if (type == NULL)
            return false;
        PyErr_Clear();
        about = describe(type);
        Py_DECREF(type);
        if (about == NULL || PyObject_GetBuffer(object, buffer, flags | PyBUF_C_CONTIGUOUS) < 0)
            return false;
    }
    if (about == NULL) {
        PyBuffer_Release(buffer);
        return false;
    }
    if (tag != NULL)
        *tag = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(about, 2));
    return true;
}

/* As `any_buffer_of`, of memory that is there. */
static bool buffer_of(PyObject *object, int flags, Py_buffer *buffer, uint64_t *tag) {
    if (!any_buffer_of(object, flags, buffer, tag))
        return false;
    if (reachable(object, buffer, flags & PyBUF_WRITABLE))
        return true;
    PyBuffer_Release(buffer);
    return false;
}

/* ---- one key -------------------------------------------------------------------------------------------------- */

/* Copy what was found, without the GIL where it is much, and say whether it is of one piece. */
static bool copy(Table *self, l0_found *found, unsigned char *to) {
    if (found->n < GIL_BYTES) {
        l0_copy_out(to, found->bytes, found->n);
        return l0_intact(found);
    }
    enter(self);
    Py_BEGIN_ALLOW_THREADS
    l0_copy_out(to, found->bytes, found->n);
    Py_END_ALLOW_THREADS
    bool intact = l0_intact(found);
    leave(self); /* may unmap, if close() came in between */
    return intact;
}

/* A new bytes with the value, or NULL: missed, or an error that is set. */
static PyObject *fetch(Table *self, PyObject *key_object) {
    l0_key key;
    l0_found found;
    if (!key_of(self, key_object, &key))
        return NULL;
    for (int tries = 0; tries < L0_READ_TRIES; tries++) {
        l0_table *t = to_read(self);
        if (t == NULL)
            return NULL;
        l0_result result = l0_enabled(t) ? l0_look(t, key, &found) : L0_MISS;
        if (result == L0_MISS) {
            self->misses++;
            return NULL;
        }
        if (result == L0_UNSETTLED)
            break;
        PyObject *value = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)found.n);
        if (value == NULL)
            return NULL;
        if (copy(self, &found, (unsigned char *)PyBytes_AS_STRING(value))) {
            count(self, &found);
            return value;
        }
        Py_DECREF(value);
    }
    return unsettled(self, key_object);
}

static PyObject *Table_get(Table *self, PyObject *const *args, Py_ssize_t nargs, PyObject *names) {
    static const Signature signature = {"get", 1, 2, 2, {"key", "default"}};
    PyObject *to[2] = {NULL, NULL};
    if (names == NULL && nargs == 1)
        to[0] = args[0];
    else if (!arguments(&signature, args, nargs, names, to))
        return NULL;
    PyObject *value = fetch(self, to[0]);
    if (value != NULL || PyErr_Occurred())
        return value;
    return Py_NewRef(to[1] != NULL ? to[1] : Py_None);
}

static bool set(Table *self, PyObject *key, PyObject *object) {
    Py_buffer value;
    if (!buffer_of(object, 0, &value, NULL))
        return false;
    bool stored = put(self, key, &value, 0);
    PyBuffer_Release(&value);
    return stored;
}

static PyObject *Table_set(Table *self, PyObject *const *args, Py_ssize_t nargs, PyObject *names) {
    static const Signature signature = {"set", 2, 2, 2, {"key", "value"}};
    PyObject *to[2];
    if (!arguments(&signature, args, nargs, names, to) || !set(self, to[0], to[1]))
        return NULL;
    Py_RETURN_NONE;
}

/* For a server, which stores on behalf of others: what the value is comes with it, and so many hits as if it had been
 * read that often, so that a new key is not the coldest. */
static PyObject *Table_put(Table *self, PyObject *args) {
    PyObject *key_object, *object;
    unsigned long long tag;
    unsigned int hits;
    Py_buffer value;
    l0_key key;
    l0_found found;
    if (!PyArg_ParseTuple(args, "OOKI:put", &key_object, &object, &tag, &hits) || !buffer_of(object, 0, &value, NULL))
        return NULL;
    bool stored = put(self, key_object, &value, tag);
    PyBuffer_Release(&value);
    if (!stored || !key_of(self, key_object, &key))
        return NULL;
    l0_table *t = to_write(self);
    if (t == NULL)
        return NULL;
    if (l0_find(t, key, &found) == L0_DONE)
        atomic_store_explicit(&found.meta->hits, hits, memory_order_relaxed);
    Py_RETURN_NONE;
}

/* 1: it was there; 0: it was not; -1: an error is set. */
static int drop(Table *self, PyObject *key_object) {
    Change c = {.task = TASK_DELETE};
    l0_result result;
    if (!key_of(self, key_object, &c.key) || !change(self, key_object, &c, &result))
        return -1;
    return result == L0_DONE;
}

static PyObject *Table_delete(Table *self, PyObject *const *args, Py_ssize_t nargs, PyObject *names) {
    static const Signature signature = {"delete", 1, 1, 1, {"key"}};
    PyObject *key_object;
    int there = arguments(&signature, args, nargs, names, &key_object) ? drop(self, key_object) : -1;
    return there < 0 ? NULL : PyBool_FromLong(there);
}

static PyObject *Table_ticket(Table *self, PyObject *const *args, Py_ssize_t nargs, PyObject *names) {
    static const Signature signature = {"ticket", 1, 1, 1, {"key"}};
    PyObject *key_object;
    l0_key key;
    if (!arguments(&signature, args, nargs, names, &key_object) || !key_of(self, key_object, &key))
        return NULL;
    l0_table *t = to_read(self);
    return t != NULL ? PyLong_FromUnsignedLongLong(l0_ticket(t, key)) : NULL;
}

static PyObject *Table_insert(Table *self, PyObject *const *args, Py_ssize_t nargs, PyObject *names) {
    static const Signature signature = {"insert", 3, 3, 3, {"key", "value", "ticket"}};
    PyObject *to[3];
    Py_buffer value;
    if (!arguments(&signature, args, nargs, names, to))
        return NULL;
    unsigned long long ticket = PyLong_AsUnsignedLongLong(to[2]);
    if (PyErr_Occurred() || !buffer_of(to[1], 0, &value, NULL))
        return NULL;
    Change c = {.task = TASK_INSERT, .value = {value.buf, (size_t)value.len, 0}, .ticket = ticket};
    l0_result result = L0_MOVED;
    bool fine = key_of(self, to[0], &c.key);
    if (fine && (size_t)value.len > self->t.g.value_bytes_max) {
        say_too_large(self, (size_t)value.len);
        fine = false;
    }
    fine = fine && change(self, to[0], &c, &result);
    PyBuffer_Release(&value);
    return fine ? PyBool_FromLong(result == L0_DONE) : NULL;
}

static int Table_contains(Table *self, PyObject *key_object) {
    l0_key key;
    l0_found found;
    if (!key_of(self, key_object, &key))
        return -1;
    l0_table *t = to_read(self);
    if (t == NULL)
        return -1;
    l0_result result = l0_enabled(t) ? l0_find(t, key, &found) : L0_MISS;
    if (result == L0_UNSETTLED)
        unsettled(self, key_object);
    return result == L0_UNSETTLED ? -1 : result == L0_DONE;
}

static Py_ssize_t Table_length(Table *self) {
    l0_table *t = to_read(self);
    if (t == NULL)
        return -1;
    /* A writer killed between a change and its counting leaves it off by one; survey() counts. */
    uint64_t keys = atomic_load_explicit(&l0_head(t)->keys, memory_order_relaxed);
    if (keys >> 63)
        return 0;
    return (Py_ssize_t)(keys < t->g.slots ? keys : t->g.slots);
}

static PyObject *Table_subscript(Table *self, PyObject *key_object) {
    PyObject *value = fetch(self, key_object);
    if (value == NULL && !PyErr_Occurred())
        PyErr_SetObject(PyExc_KeyError, key_object);
    return value;
}

static int Table_ass_subscript(Table *self, PyObject *key_object, PyObject *object) {
    if (object != NULL)
        return set(self, key_object, object) ? 0 : -1;
    int there = drop(self, key_object);
    if (there == 0)
        PyErr_SetObject(PyExc_KeyError, key_object);
    return there == 1 ? 0 : -1;
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
    return PyBool_FromLong(l0_intact(&self->found)); /* the mapping stays for as long as a view does */
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

/* Find a value to look at. L0_UNSETTLED: an error is set. */
static l0_result to_view(Table *self, PyObject *key_object, bool writable, l0_found *found) {
    l0_key key;
    if (writable && !self->writable) {
        PyErr_Format(usage_error, "the table %U was attached read-only and gives no writable view", self->path);
        return L0_UNSETTLED;
    }
    if (!key_of(self, key_object, &key))
        return L0_UNSETTLED;
    l0_table *t = to_read(self);
    if (t == NULL)
        return L0_UNSETTLED;
    l0_result result = l0_enabled(t) ? l0_find(t, key, found) : L0_MISS;
    if (result == L0_UNSETTLED)
        unsettled(self, key_object);
    self->misses += result == L0_MISS;
    return result;
}

static PyObject *Table_view(Table *self, PyObject *const *args, Py_ssize_t nargs, PyObject *names) {
    static const Signature signature = {"view", 1, 1, 2, {"key", "writable"}};
    PyObject *to[2];
    l0_found found;
    if (!arguments(&signature, args, nargs, names, to))
        return NULL;
    int writable = to[1] != NULL ? PyObject_IsTrue(to[1]) : 0;
    if (writable < 0)
        return NULL;
    l0_result result = to_view(self, to[0], writable, &found);
    if (result == L0_DONE)
        return view_of(self, &found, !writable);
    return result == L0_MISS ? Py_NewRef(Py_None) : NULL;
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
    if (tag >> 63)
        return PyUnicode_FromString("another, composed type"); /* a hash: see arrays.py */
    char name[9] = {0};
    memcpy(name, &tag, 8);
    return PyUnicode_DecodeLatin1(name, (Py_ssize_t)strlen(name), NULL);
}

static bool say_other_size(PyObject *key_object, l0_found *found, Py_ssize_t nbytes, PyObject *shape, PyObject *dtype) {
    PyErr_Format(usage_error, "the value of %R has %zu bytes and shape %R of %R has %zd: ask with the shape and "
                 "dtype that it was stored with", key_object, found->n, shape, dtype, nbytes);
    return false;
}

static bool say_other_type(PyObject *key_object, uint64_t stored, PyObject *asked) {
    PyObject *name = name_of_tag(stored);
    if (name != NULL)
        PyErr_Format(usage_error, "the value of %R was stored as %U and is asked for as %R: ask with the dtype "
                     "that it was stored with", key_object, name, asked);
    Py_XDECREF(name);
    return false;
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

/* An own copy of the value. L0_UNSETTLED: an error is set. */
static l0_result snapshot_of(Table *self, PyObject *key_object, unsigned char *to, Py_ssize_t nbytes, uint64_t tag,
                             l0_found *found) {
    l0_key key;
    if (!key_of(self, key_object, &key))
        return L0_UNSETTLED;
    l0_table *t = to_read(self);
    if (t == NULL)
        return L0_UNSETTLED;
    l0_result result = L0_MISS;
    if (l0_enabled(t) && nbytes < (Py_ssize_t)GIL_BYTES) {
        result = l0_get_exactly(t, key, to, (size_t)nbytes, tag, found);
    } else if (l0_enabled(t)) {
        enter(self);
        Py_BEGIN_ALLOW_THREADS
        result = l0_get_exactly(t, key, to, (size_t)nbytes, tag, found);
        Py_END_ALLOW_THREADS
        if (result == L0_DONE)
            count(self, found);
        leave(self);
    }
    if (result == L0_DONE && nbytes < (Py_ssize_t)GIL_BYTES)
        count(self, found);
    self->misses += result == L0_MISS;
    if (result == L0_UNSETTLED)
        unsettled(self, key_object);
    return result;
}

static PyObject *Table_get_numpy(Table *self, PyObject *const *args, Py_ssize_t nargs, PyObject *names) {
    static const Signature signature = {"get_numpy", 3, 3, 5, {"key", "shape", "dtype", "writable", "snapshot"}};
    PyObject *to[5];
    if (!arguments(&signature, args, nargs, names, to))
        return NULL;
    int writable = to[3] != NULL ? PyObject_IsTrue(to[3]) : 0, snapshot = to[4] != NULL ? PyObject_IsTrue(to[4]) : 0;
    PyObject *about = writable < 0 || snapshot < 0 ? NULL : describe(to[2]);
    if (about == NULL)
        return NULL;
    PyObject *dtype = PyTuple_GET_ITEM(about, 0);
    Py_ssize_t nbytes = bytes_of_shape(to[1], PyLong_AsSsize_t(PyTuple_GET_ITEM(about, 1)));
    uint64_t tag = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(about, 2));
    if (nbytes < 0)
        return NULL;
    l0_found found;
    l0_result result;
    PyObject *buffer = NULL;
    unsigned char *bytes = NULL;
    if (snapshot) {
        buffer = PyByteArray_FromStringAndSize(NULL, nbytes);
        if (buffer == NULL)
            return NULL;
        bytes = (unsigned char *)PyByteArray_AS_STRING(buffer);
        result = snapshot_of(self, to[0], bytes, nbytes, tag, &found);
    } else {
        result = to_view(self, to[0], writable, &found);
        if (result == L0_DONE && found.n != (size_t)nbytes)
            result = L0_OTHER_SIZE;
        else if (result == L0_DONE && found.tag != 0 && found.tag != tag)
            result = L0_OTHER_TYPE;
        if (result == L0_DONE) {
            bytes = (unsigned char *)(uintptr_t)found.bytes;
            buffer = view_of(self, &found, !writable);
        }
    }
    if (result == L0_OTHER_SIZE)
        say_other_size(to[0], &found, nbytes, to[1], dtype);
    if (result == L0_OTHER_TYPE)
        say_other_type(to[0], found.tag, dtype);
    if (result != L0_DONE || buffer == NULL) {
        Py_XDECREF(buffer);
        return result == L0_MISS ? Py_NewRef(Py_None) : NULL;
    }
    return array_over(snapshot ? array_type : array_view_type, to[1], dtype, buffer, bytes, snapshot || writable);
}

/* The memory of a plain numpy array, without the buffer that numpy would make for it (a third of a set's time). False: it
 * lies in pieces, which the way by its buffer says. */
static bool memory_of(NumpyArray *array, Py_ssize_t itemsize, Py_buffer *value) {
    if (!(array->flags & NUMPY_C_CONTIGUOUS))
        return false;
    value->buf = array->data;
    value->len = itemsize;
    for (int i = 0; i < array->nd; i++)
        value->len *= array->dimensions[i];
    return true;
}

static PyObject *Table_set_numpy(Table *self, PyObject *const *args, Py_ssize_t nargs, PyObject *names) {
    static const Signature signature = {"set_numpy", 2, 2, 2, {"key", "array"}};
    PyObject *to[2];
    if (!arguments(&signature, args, nargs, names, to))
        return NULL;
    NumpyArray *array = numpy_new != NULL && (PyObject *)Py_TYPE(to[1]) == array_type ? (NumpyArray *)to[1] : NULL;
    PyObject *dtype = array != NULL ? Py_NewRef(array->descr) : PyObject_GetAttr(to[1], dtype_name);
    if (dtype == NULL)
        return NULL;
    PyObject *about = describe(dtype); /* may run Python, so the array is looked at behind it */
    Py_DECREF(dtype);
    if (about == NULL)
        return NULL;
    uint64_t tag = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(about, 2));
    Py_buffer value;
    if (array != NULL && memory_of(array, PyLong_AsSsize_t(PyTuple_GET_ITEM(about, 1)), &value))
        return reachable(to[1], &value, false) && put(self, to[0], &value, tag) ? Py_NewRef(Py_None) : NULL;
    if (PyObject_GetBuffer(to[1], &value, PyBUF_C_CONTIGUOUS) < 0)
        return NULL;
    bool stored = reachable(to[1], &value, false) && put(self, to[0], &value, tag);
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
    uint64_t word = atomic_load_explicit(&l0_meta_at(t, home)->current, memory_order_relaxed);
    l0_buffer_head *head = l0_buffer_at(t, home, l0_buffer_of(t, home, word));
    l0_prefetch(head);
    l0_prefetch(l0_value_at(t, head));
}

typedef struct Row {
    l0_key key;
    l0_result result;
    uint64_t found_bytes, found_tag;
} Row;

/* Fill one row of `out` for each key that is there. Needs no GIL. Returns the next state of the dice. */
static uint64_t fill_rows(const l0_table *t, Row *rows, Py_ssize_t n, unsigned char *out, size_t bytes, uint64_t tag,
                          bool counting, uint64_t dice) {
    l0_found found;
    for (Py_ssize_t i = 0; i < n && i < AHEAD_META; i++)
        ask_meta(t, &rows[i].key);
    for (Py_ssize_t i = 0; i < n; i++) {
        if (i + AHEAD_META < n)
            ask_meta(t, &rows[i + AHEAD_META].key);
        if (i + AHEAD_SLOT < n)
            ask_slot(t, &rows[i + AHEAD_SLOT].key);
        rows[i].result = l0_get_exactly(t, rows[i].key, out + (size_t)i * bytes, bytes, tag, &found);
        if (rows[i].result == L0_DONE && counting)
            l0_count_hit(found.meta, &dice);
        if (rows[i].result == L0_OTHER_SIZE || rows[i].result == L0_OTHER_TYPE) {
            rows[i].found_bytes = found.n;
            rows[i].found_tag = found.tag;
        }
    }
    return dice;
}

/* The bytes of what was found a moment ago, and whether it is still of one piece. */
static void copy_found(Wanted *w, Py_ssize_t n) {
    for (Py_ssize_t i = 0; i < n; i++)
        if (w[i].to != NULL) {
            l0_copy_out(w[i].to, w[i].found.bytes, w[i].n);
            w[i].result = l0_intact(&w[i].found) ? L0_DONE : L0_MOVED;
        }
}

/* One part of get_many: bytes of the sizes that were seen, filled together; what was written too often meanwhile
 * is asked for again, one by one. */
static bool get_part(Table *self, PyObject *keys, Py_ssize_t from, Py_ssize_t n, PyObject *values, Wanted *w) {
    size_t total = 0;
    for (Py_ssize_t i = 0; i < n; i++)
        if (!key_of(self, PyTuple_GET_ITEM(keys, from + i), &w[i].key))
            return false;
    /* From here to the copy no Python runs: making bytes is no call of anything, and collects no garbage. */
    l0_table *t = to_read(self);
    if (t == NULL)
        return false;
    bool enabled = l0_enabled(t);
    for (Py_ssize_t i = 0; enabled && i < n; i++)
        ask_meta(t, &w[i].key);
    for (Py_ssize_t i = 0; i < n; i++) {
        if (enabled && i + AHEAD_SLOT < n)
            ask_slot(t, &w[i + AHEAD_SLOT].key);
        w[i].to = NULL;
        w[i].result = enabled ? l0_find(t, w[i].key, &w[i].found) : L0_MISS;
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
        copy_found(w, n);
        Py_END_ALLOW_THREADS
    } else {
        copy_found(w, n);
    }
    for (Py_ssize_t i = 0; i < n; i++)
        if (w[i].to != NULL && w[i].result == L0_DONE)
            count(self, &w[i].found);
    if (released)
        leave(self);
    for (Py_ssize_t i = 0; i < n; i++) {
        if (w[i].to == NULL || w[i].result == L0_DONE)
            continue;
        PyObject *value = fetch(self, PyTuple_GET_ITEM(keys, from + i));
        if (value == NULL && PyErr_Occurred())
            return false;
        PyList_SetItem(values, from + i, value != NULL ? value : Py_NewRef(Py_None));
    }
    return true;
}

static PyObject *Table_get_many(Table *self, PyObject *const *args, Py_ssize_t nargs, PyObject *names) {
    static const Signature signature = {"get_many", 1, 1, 1, {"keys"}};
    PyObject *keys_object;
    if (!arguments(&signature, args, nargs, names, &keys_object))
        return NULL;
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
                      size_t bytes, uint64_t tag, char *flags, PyObject *out_object) {
    for (Py_ssize_t i = 0; i < n; i++)
        if (!key_of(self, PyTuple_GET_ITEM(keys, from + i), &rows[i].key))
            return false;
    l0_table *t = to_read(self);
    if (t == NULL)
        return false;
    bool counting = self->writable;
    uint64_t dice = self->dice;
    if (!l0_enabled(t)) {
        for (Py_ssize_t i = 0; i < n; i++)
            rows[i].result = L0_MISS;
    } else if (n == (Py_ssize_t)BATCH_KEYS || bytes * (size_t)n >= GIL_BYTES) {
        enter(self);
        Py_BEGIN_ALLOW_THREADS
        dice = fill_rows(t, rows, n, out, bytes, tag, counting, dice);
        Py_END_ALLOW_THREADS
        leave(self);
    } else {
        dice = fill_rows(t, rows, n, out, bytes, tag, counting, dice);
    }
    self->dice = dice;
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *key_object = PyTuple_GET_ITEM(keys, from + i);
        flags[i] = rows[i].result == L0_DONE;
        switch (rows[i].result) {
        case L0_DONE:
            self->hits++;
            break;
        case L0_MISS:
            self->misses++;
            break;
        case L0_OTHER_SIZE:
            return PyErr_Format(usage_error, "the value of %R has %zu bytes and a row of out has %zu", key_object,
                                (size_t)rows[i].found_bytes, bytes) != NULL;
        case L0_OTHER_TYPE: {
            PyObject *type = PyObject_HasAttr(out_object, dtype_name) ? PyObject_GetAttr(out_object, dtype_name)
                                                                      : Py_NewRef((PyObject *)Py_TYPE(out_object));
            if (type != NULL)
                say_other_type(key_object, rows[i].found_tag, type);
            Py_XDECREF(type);
            return false;
        }
        default:
            return unsettled(self, key_object) != NULL;
        }
    }
    return PyErr_CheckSignals() == 0;
}

static PyObject *Table_get_many_into(Table *self, PyObject *const *args, Py_ssize_t nargs, PyObject *names) {
    static const Signature signature = {"get_many_into", 2, 2, 2, {"keys", "out"}};
    PyObject *to[2];
    if (!arguments(&signature, args, nargs, names, to))
        return NULL;
    Py_buffer out;
    uint64_t tag;
    PyObject *keys = PySequence_Tuple(to[0]);
    if (keys == NULL)
        return NULL;
    if (!buffer_of(to[1], PyBUF_WRITABLE, &out, &tag)) {
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
        fine = rows_part(self, keys, from, part, rows, (unsigned char *)out.buf + (size_t)from * row, row, tag,
                         PyBytes_AS_STRING(flags) + from, to[1]);
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

/* One part of set_many. How many were stored before it failed (then an error is set), or before one that needs
 * patience. */
static Py_ssize_t set_part(Table *self, PyObject *const *pairs, Py_ssize_t n, Given *given, size_t bytes) {
    bool released = bytes >= GIL_BYTES || n >= (Py_ssize_t)(BATCH_KEYS / 2);
    Py_ssize_t done = 0;
    l0_table *t = to_write(self);
    if (t == NULL)
        return 0;
    enter(self);
    PyThreadState *state = released ? PyEval_SaveThread() : NULL;
    for (; done < n; done++) {
        given[done].result = run_change(t, &given[done].change, 0);
        if (given[done].result != L0_DONE)
            break;
    }
    if (released)
        PyEval_RestoreThread(state);
    leave(self);
    if (!warn_of_load(self))
        return done;
    /* The one that could not be done at once is done the patient way, and the caller goes on behind it. */
    l0_result result;
    if (done < n && change(self, PyTuple_GET_ITEM(pairs[done], 0), &given[done].change, &result))
        done++;
    return done;
}

/* Take one pair's key and value. On failure nothing is held. */
static bool given_of(Table *self, PyObject *pair, Given *g) {
    memset(g, 0, sizeof *g);
    if (!PyTuple_Check(pair) || PyTuple_GET_SIZE(pair) != 2) {
        PyErr_Format(usage_error, "set_many takes a dict or (key, value) tuples, not %R", pair);
        return false;
    }
    if (!key_of(self, PyTuple_GET_ITEM(pair, 0), &g->change.key) ||
        !buffer_of(PyTuple_GET_ITEM(pair, 1), 0, &g->value, NULL))
        return false;
    g->change.value = (l0_value){g->value.buf, (size_t)g->value.len, 0};
    if ((size_t)g->value.len <= self->t.g.value_bytes_max)
        return true;
    say_too_large(self, (size_t)g->value.len);
    PyBuffer_Release(&g->value);
    return false;
}

static PyObject *Table_set_many(Table *self, PyObject *const *args, Py_ssize_t nargs, PyObject *names) {
    static const Signature signature = {"set_many", 1, 1, 1, {"items"}};
    PyObject *items;
    if (!arguments(&signature, args, nargs, names, &items) || to_write(self) == NULL)
        return NULL;
    PyObject *list = PyDict_Check(items) ? PyDict_Items(items) : PySequence_List(items);
    if (list == NULL)
        return NULL;
    PyObject *frozen = PyList_AsTuple(list); /* nobody else's to change while we hold pointers into it */
    Py_DECREF(list);
    Given *given = PyMem_Malloc(sizeof *given * BATCH_KEYS);
    if (frozen != NULL && given == NULL)
        PyErr_NoMemory();
    Py_ssize_t total = frozen != NULL ? PyTuple_GET_SIZE(frozen) : 0, from = 0;
    while (from < total && !PyErr_Occurred()) {
        PyObject *const *pairs = &PyTuple_GET_ITEM(frozen, from);
        Py_ssize_t n = 0, done = 0;
        size_t bytes = 0;
        for (; n < (Py_ssize_t)BATCH_KEYS && from + n < total && given_of(self, pairs[n], &given[n]); n++)
            bytes += given[n].change.value.n;
        while (done < n && !PyErr_Occurred())
            done += set_part(self, pairs + done, n - done, given + done, bytes);
        for (Py_ssize_t i = 0; i < n; i++)
            PyBuffer_Release(&given[i].value);
        from += n;
        if (!PyErr_Occurred())
            PyErr_CheckSignals();
    }
    PyMem_Free(given);
    Py_XDECREF(frozen);
    return PyErr_Occurred() ? NULL : PyLong_FromSsize_t(total);
}

/* ---- the whole table ------------------------------------------------------------------------------------------- */

/* Add the keys of a home to the rows. A key's home never changes, so one that is moved meanwhile is met once; a
 * home whose bound has moved is looked at again. */
static bool residents_of(Table *self, uint64_t home, PyObject *rows) {
    Py_ssize_t before = PyList_GET_SIZE(rows);
    l0_resident r;
    for (int tries = 0; tries < SCAN_TRIES; tries++) {
        l0_table *t = to_read(self);
        if (t == NULL)
            return false;
        uint64_t bound = atomic_load(&l0_meta_at(t, home)->bound), reach = l0_reach(t, bound), copied = 0;
        for (uint64_t d = 0; d < reach; d++) {
            t = to_read(self); /* again each time: rows are containers, and those set off the garbage collector */
            if (t == NULL)
                return false;
            uint64_t slot = l0_position(t, home, d), hash = atomic_load(&l0_meta_at(t, slot)->hash);
            if (l0_home(t, hash) != home || (copied && hash == copied) || !l0_resident_at(t, slot, &r) ||
                l0_home(t, l0_hash(r.key, r.key_bytes, t->g.hash_seed)) != home)
                continue;
            if (l0_state(atomic_load(&l0_meta_at(t, slot)->current)) == L0_ARRIVING)
                copied = hash; /* its mover died: the key may stand farther away, too */
            PyObject *row = Py_BuildValue("(y#nK)", r.key, (Py_ssize_t)r.key_bytes, (Py_ssize_t)r.value_bytes,
                                          (unsigned long long)r.hits);
            int failed = row == NULL ? -1 : PyList_Append(rows, row);
            Py_XDECREF(row);
            if (failed)
                return false;
        }
        t = to_read(self);
        if (t == NULL)
            return false;
        if (atomic_load(&l0_meta_at(t, home)->bound) == bound)
            break;
        if (tries + 1 < SCAN_TRIES && PyList_SetSlice(rows, before, PyList_GET_SIZE(rows), NULL) < 0)
            return false;
    }
    return true;
}

static PyObject *Table_scan(Table *self, PyObject *args) {
    unsigned long long from, most = SURVEY_SLOTS;
    Py_ssize_t limit;
    if (!PyArg_ParseTuple(args, "Kn|K:scan", &from, &limit, &most))
        return NULL;
    PyObject *found = PyList_New(0);
    if (found == NULL)
        return NULL;
    uint64_t home = from, slots = self->t.g.slots;
    for (uint64_t looked = 0; home < slots && PyList_GET_SIZE(found) < limit && looked < most; looked++, home++)
        if (!residents_of(self, home, found)) {
            Py_DECREF(found);
            return NULL;
        }
    return Py_BuildValue("(KN)", (unsigned long long)(home < slots ? home : 0), found);
}

typedef enum Walk { WALK_SURVEY, WALK_COOL, WALK_REHASH } Walk;

/* Walk the slots [from, to) without the GIL, in pieces. */
static bool walk(Table *self, uint64_t from, uint64_t to, Walk what, l0_survey *s, uint64_t *moved) {
    uint64_t piece = what == WALK_REHASH ? REHASH_SLOTS : SURVEY_SLOTS;
    to = to < self->t.g.slots ? to : self->t.g.slots;
    for (uint64_t slot = from, end; slot < to; slot = end) {
        end = to - slot < piece ? to : slot + piece;
        l0_table *t = what == WALK_SURVEY ? to_read(self) : to_write(self);
        if (t == NULL)
            return false;
        enter(self);
        Py_BEGIN_ALLOW_THREADS
        if (what == WALK_SURVEY)
            l0_survey_add(t, slot, end, s);
        else if (what == WALK_COOL)
            l0_cool(t, slot, end);
        else
            *moved += l0_rehash(t, slot, end);
        Py_END_ALLOW_THREADS
        leave(self);
        if (PyErr_CheckSignals() < 0)
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
    l0_table *t = walk(self, 0, UINT64_MAX, WALK_SURVEY, s, NULL) ? to_read(self) : NULL;
    if (t == NULL) {
        PyMem_Free(s);
        return NULL;
    }
    PyObject *all = Py_BuildValue(
        "{sK sK sK sK sK sK sd sK sK sd sK sK}", "keys", s->keys, "claimed", s->claimed, "locked", s->locked,
        "key_bytes", s->key_bytes, "value_bytes", s->value_bytes, "hits", s->hits, "found_probes_mean",
        s->keys ? (double)s->found_probes / (double)s->keys : 0.0, "found_probes_p99", percentile(s, 0.99),
        "found_probes_max", s->found_probes_max, "miss_probes_mean",
        (double)s->miss_probes / (double)self->t.g.slots, "miss_probes_max", s->miss_probes_max, "recovered",
        (unsigned long long)atomic_load(&l0_head(t)->recovered));
    PyMem_Free(s);
    return all;
}

static PyObject *Table_cool(Table *self, PyObject *args) {
    unsigned long long from = 0, to = ULLONG_MAX;
    if (!PyArg_ParseTuple(args, "|KK:cool", &from, &to))
        return NULL;
    return walk(self, from, to, WALK_COOL, NULL, NULL) ? Py_NewRef(Py_None) : NULL;
}

static PyObject *Table_rehash_slots(Table *self, PyObject *args) {
    unsigned long long from, to;
    uint64_t moved = 0;
    if (!PyArg_ParseTuple(args, "KK:rehash_slots", &from, &to) || !walk(self, from, to, WALK_REHASH, NULL, &moved))
        return NULL;
    return PyLong_FromUnsignedLongLong(moved);
}

/* Gather the file's memory into huge pages, for everybody who has it mapped, without a moment in which it could not be
 * read or written. Linux 6.1; how much was gathered, as far as it went. */
static PyObject *Table_collapse(Table *self, PyObject *ignored) {
    (void)ignored;
    if (self->page_bytes != L0_HEADER_BYTES)
        return PyLong_FromSize_t(self->mapped); /* it never had others */
    uint64_t done = 0, bytes = self->t.g.file_bytes / HUGE_BYTES * HUGE_BYTES;
#ifdef __linux__
    while (done < bytes) {
        l0_table *t = to_read(self);
        if (t == NULL)
            return NULL;
        size_t step = bytes - done < COLLAPSE_BYTES ? bytes - done : COLLAPSE_BYTES;
        enter(self);
        int failed;
        Py_BEGIN_ALLOW_THREADS
        madvise(t->base + done, step, 14 /* MADV_HUGEPAGE */);
        failed = madvise(t->base + done, step, 25 /* MADV_COLLAPSE */);
        Py_END_ALLOW_THREADS
        leave(self);
        if (PyErr_CheckSignals() < 0)
            return NULL;
        if (failed)
            break; /* no memory in one piece, or no such call: what was gathered stays */
        done += step;
    }
#endif
    return PyLong_FromUnsignedLongLong(bytes < done ? bytes : done);
}

static PyObject *Table_writers(Table *self, PyObject *ignored) {
    (void)ignored;
    PyObject *living = PyList_New(0);
    for (uint64_t row = 0; living != NULL && row < L0_WRITERS_MAX; row++) {
        l0_table *t = to_read(self);
        if (t == NULL) {
            Py_CLEAR(living);
            break;
        }
        l0_writer_row *r = l0_row(t, row);
        if (atomic_load(&r->epoch) == 0)
            continue;
        ensure_asking(self);
        struct flock range;
        l0_row_range(&range, row);
        bool ours = t->me != 0 && t->me >> 48 == row;
        if (!ours && (t->ask_fd < 0 || fcntl(t->ask_fd, L0_GETLK, &range) != 0 || range.l_type == F_UNLCK))
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
    l0_table *t = to_read(self);
    return t != NULL ? PyBool_FromLong(l0_enabled(t)) : NULL;
}

static int set_enabled(Table *self, PyObject *value, void *ignored) {
    (void)ignored;
    int yes = value == NULL ? 0 : PyObject_IsTrue(value);
    l0_table *t = yes < 0 ? NULL : to_write(self);
    if (t == NULL)
        return -1;
    atomic_store(&l0_head(t)->switched_off, !yes);
    return 0;
}

/* What one slot costs, with its share of the spares, rounded. */
static uint64_t bytes_of_slot(const l0_geometry *g) {
    uint64_t slots = UINT64_C(1) << g->stripe_shift;
    return L0_LINE_BYTES + (g->stripe_buffers * g->buffer_bytes + slots / 2) / slots;
}

static PyObject *get_figure(Table *self, void *which) {
    const l0_geometry *g = &self->t.g;
    uint64_t figures[] = {g->slots, bytes_of_slot(g), g->value_bytes_max, g->key_bytes_max, g->versions, g->file_bytes,
                          g->table_id, g->created_unix_s, self->hits, self->misses, g->spares};
    return PyLong_FromUnsignedLongLong(figures[(size_t)(uintptr_t)which]);
}

static PyObject *get_closed(Table *self, void *ignored) {
    (void)ignored;
    return PyBool_FromLong(self->closed);
}

static PyObject *get_read_only(Table *self, void *ignored) {
    (void)ignored;
    return PyBool_FromLong(!self->writable);
}

static PyObject *get_path(Table *self, void *ignored) {
    (void)ignored;
    return Py_NewRef(self->path != NULL ? self->path : Py_None);
}

#define FIGURE(name, index, text) {name, (getter)get_figure, NULL, text, (void *)(uintptr_t)(index)}

static PyGetSetDef Table_getset[] = {
    FIGURE("hash_slots", 0, "Slots of the table."),
    FIGURE("slot_bytes", 1, "Bytes of a slot: its line, its buffer, its share of the spare ones."),
    FIGURE("max_value_size", 2, "The largest value, in bytes."),
    FIGURE("max_key_size", 3, "The longest key, in bytes."),
    FIGURE("versions", 4, "Further writes of its key that a view outlives; 0: the buffers are shared by stripes."),
    FIGURE("file_bytes", 5, "Bytes of the table's file."),
    FIGURE("table_id", 6, "The table's random identity."),
    FIGURE("created_unix_s", 7, "When the table was made."),
    FIGURE("hits", 8, "Reads of this handle that found their key."),
    FIGURE("misses", 9, "Reads of this handle that did not."),
    FIGURE("spares", 10, "Spare buffers of a stripe."),
    {"enabled", (getter)get_enabled, (setter)set_enabled, "The switch in the header, for all processes.", NULL},
    {"closed", (getter)get_closed, NULL, "Whether close() was called.", NULL},
    {"read_only", (getter)get_read_only, NULL, "Whether the handle was attached without the right to write.", NULL},
    {"path", (getter)get_path, NULL, "The table's file.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMethodDef Table_methods[] = {
    {"get", (PyCFunction)(void (*)(void))Table_get, METH_FASTCALL | METH_KEYWORDS,
     "get(key, default=None): the value as bytes, a consistent copy."},
    {"set", (PyCFunction)(void (*)(void))Table_set, METH_FASTCALL | METH_KEYWORDS, "set(key, value): store bytes."},
    {"delete", (PyCFunction)(void (*)(void))Table_delete, METH_FASTCALL | METH_KEYWORDS, "delete(key): whether it was there."},
    {"view", (PyCFunction)(void (*)(void))Table_view, METH_FASTCALL | METH_KEYWORDS,
     "view(key, *, writable=False): the bytes where they lie, or None."},
    {"get_numpy", (PyCFunction)(void (*)(void))Table_get_numpy, METH_FASTCALL | METH_KEYWORDS,
     "get_numpy(key, shape, dtype, *, writable=False, snapshot=False): an array, or None."},
    {"set_numpy", (PyCFunction)(void (*)(void))Table_set_numpy, METH_FASTCALL | METH_KEYWORDS,
     "set_numpy(key, array): store a C-contiguous array."},
    {"get_many", (PyCFunction)(void (*)(void))Table_get_many, METH_FASTCALL | METH_KEYWORDS, "get_many(keys): a list of bytes or None."},
    {"get_many_into", (PyCFunction)(void (*)(void))Table_get_many_into, METH_FASTCALL | METH_KEYWORDS,
     "get_many_into(keys, out): one row a key; returns one byte a key, 1 where it was found."},
    {"set_many", (PyCFunction)(void (*)(void))Table_set_many, METH_FASTCALL | METH_KEYWORDS, "set_many(items): store a dict or pairs; how many."},
    {"ticket", (PyCFunction)(void (*)(void))Table_ticket, METH_FASTCALL | METH_KEYWORDS, "ticket(key): for insert()."},
    {"insert", (PyCFunction)(void (*)(void))Table_insert, METH_FASTCALL | METH_KEYWORDS,
     "insert(key, value, ticket): store it if nobody set or deleted it since the ticket."},
    {"scan", (PyCFunction)Table_scan, METH_VARARGS,
     "scan(cursor, limit, slots=65536): (next cursor or 0, [(key, value bytes, hits)]); looks at no more than so many slots."},
    {"survey", (PyCFunction)Table_survey, METH_NOARGS, "survey(): figures counted over all slots."},
    {"cool", (PyCFunction)Table_cool, METH_VARARGS,
     "cool(first=0, end=all of them): halve the counts of hits of these slots."},
    {"rehash_slots", (PyCFunction)Table_rehash_slots, METH_VARARGS,
     "rehash_slots(first, end): move keys whose homes are these slots nearer to them; how many were moved."},
    {"put", (PyCFunction)Table_put, METH_VARARGS,
     "put(key, value, tag, hits): store bytes as what the tag says, as if they had been counted so often."},
    {"collapse", (PyCFunction)Table_collapse, METH_NOARGS,
     "collapse(): gather the memory of a handle with huge_pages into huge pages; how many bytes were."},
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
    unsigned long long slots, value, key, versions, spares;
    l0_geometry g;
    if (!PyArg_ParseTuple(args, "KKKKK:plan", &slots, &value, &key, &versions, &spares))
        return NULL;
    if (!l0_plan(&g, slots, value, key, versions, spares))
        Py_RETURN_NONE;
    return Py_BuildValue("(KK)", (unsigned long long)g.file_bytes, (unsigned long long)bytes_of_slot(&g));
}

static PyObject *module_initialise(PyObject *module, PyObject *args) {
    (void)module;
    int fd, enabled;
    unsigned long long slots, value, key, versions, spares, seed, id, now;
    l0_geometry g;
    if (!PyArg_ParseTuple(args, "iKKKKKKKKp:initialise", &fd, &slots, &value, &key, &versions, &spares, &seed, &id,
                          &now, &enabled))
        return NULL;
    struct stat st;
    if (!l0_plan(&g, slots, value, key, versions, spares) || fstat(fd, &st) != 0 ||
        (uint64_t)st.st_size < g.file_bytes)
        return PyErr_Format(usage_error, "the file is smaller than the table that was planned");
    uint64_t page_bytes = l0_page_bytes(fd);
    l0_header *header = mmap(NULL, page_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (header == MAP_FAILED)
        return PyErr_SetFromErrno(PyExc_OSError);
    l0_header_write(header, &g, seed, id, now, enabled);
    munmap(header, page_bytes);
    Py_RETURN_NONE;
}

static PyObject *module_tag_of(PyObject *module, PyObject *dtype) {
    (void)module;
    PyObject *about = describe(dtype);
    return about != NULL ? Py_NewRef(PyTuple_GET_ITEM(about, 2)) : NULL;
}

static PyObject *module_page_bytes(PyObject *module, PyObject *args) {
    (void)module;
    int fd;
    return PyArg_ParseTuple(args, "i:page_bytes", &fd) ? PyLong_FromUnsignedLongLong(l0_page_bytes(fd)) : NULL;
}

static PyMethodDef module_methods[] = {
    {"page_bytes", module_page_bytes, METH_VARARGS, "page_bytes(fd): what a file's length is a multiple of there."},
    {"tag_of", module_tag_of, METH_O, "tag_of(dtype): the number that stands for a dtype beside a value's bytes."},
    {"plan", module_plan, METH_VARARGS,
     "plan(slots, value_bytes_max, key_bytes_max, versions, spares): (file bytes, slot bytes); None beyond the limits."},
    {"initialise", module_initialise, METH_VARARGS, "Write the header of a new, all-zero file."},
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
        PyModule_AddIntConstant(module, "SPARES", L0_SPARES) < 0 ||
        PyModule_AddIntConstant(module, "SPARES_MAX", L0_SPARES_MAX) < 0 ||
        PyModule_AddIntConstant(module, "STRIPE_SLOTS", L0_STRIPE_SLOTS) < 0 ||
        PyModule_AddIntConstant(module, "WAIT_S_MAX", WAIT_S_MAX) < 0 ||
        PyModule_AddIntConstant(module, "LAYOUT_VERSION", L0_LAYOUT_VERSION) < 0)
        return NULL;
    return module;
}
