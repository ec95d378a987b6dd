/* Copies between an engine's pages and slots, for Python: the types PageTables, PageBatch and PageJob.
 *
 * A table is what was registered. A batch is the pages of one call, checked completely before any is touched. A job is
 * some of its objects being copied, by threads without Python. Addresses are plain numbers here, as in copying.c: the
 * client vouches for the memory of the regions and of the slots, and what it passes as `keep` lives as long as the job.
 */
#include "module.h"

#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include "index_lent.h"
#include "pages.h"

/* --- buffers ----------------------------------------------------------------------------------------------- */

/* `count` words of eight bytes (-1: any number). -1 with an exception; otherwise the caller releases them. */
static int words_of(PyObject *given, Py_buffer *found, Py_ssize_t count, const char *what) {
    if (PyObject_GetBuffer(given, found, PyBUF_C_CONTIGUOUS) < 0)
        return -1;
    if (found->len % 8 == 0 && (count < 0 || found->len == count * 8) &&
        (!found->len || (uintptr_t)found->buf % 8 == 0))
        return 0;
    if (count < 0)
        PyErr_Format(PyExc_ValueError, "%s has %zd bytes: give aligned words of 8 bytes", what, found->len);
    else
        PyErr_Format(PyExc_ValueError, "%s has %zd bytes: give %zd aligned words of 8 bytes", what, found->len, count);
    PyBuffer_Release(found);
    return -1;
}

/* --- PageTables -------------------------------------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    pages_group *groups;
    size_t count;
    size_t regions; /* of all groups */
    uint64_t classes;
    device device;
} PageTables;

static void tables_dealloc(PageTables *self) {
    PyTypeObject *type = Py_TYPE(self);
    for (size_t i = 0; i < self->count; i++)
        PyMem_RawFree((void *)(uintptr_t)self->groups[i].regions);
    PyMem_RawFree(self->groups);
    type->tp_free(self);
    Py_DECREF(type);
}

/* What is wrong with this region, or NULL. */
static const char *region_fault(const pages_region *region, uint64_t pages, uint64_t per_object) {
    uint64_t span, whole;
    if (!region->base || !region->page_bytes || !pages || !per_object)
        return "an address, page_bytes, pages and pages_per_object must not be 0";
    if (region->page_stride < region->page_bytes)
        return "page_stride is smaller than page_bytes";
    if (__builtin_mul_overflow(pages - 1, region->page_stride, &span) ||
        __builtin_add_overflow(span, region->page_bytes, &span) ||
        __builtin_add_overflow((uint64_t)(uintptr_t)region->base, span, &span) ||
        __builtin_mul_overflow(per_object, region->page_bytes, &whole) || whole > UINT64_C(1) << 48)
        return "the region is larger than the address space";
    return NULL;
}

/* (regions: words of base, page_bytes, page_stride each; pages, pages_per_object, null_page or None, alias, exact) */
static int read_group(PageTables *self, PyObject *given, pages_group *group) {
    PyObject *words, *null_page;
    unsigned long long pages, per_object, alias;
    int exact;
    Py_buffer found;
    if (!PyArg_ParseTuple(given, "OKKOKp:PageTables", &words, &pages, &per_object, &null_page, &alias, &exact))
        return -1;
    group->pages = pages;
    group->pages_per_object = per_object;
    group->alias = alias;
    group->exact = exact;
    group->first = self->regions;
    group->has_null = null_page != Py_None;
    if (group->has_null && (group->null_page = PyLong_AsLongLong(null_page)) == -1 && PyErr_Occurred())
        return -1;
    if (words_of(words, &found, -1, "regions") < 0)
        return -1;
    size_t count = (size_t)found.len / 24;
    const uint64_t *numbers = found.buf;
    const char *fault = count && found.len % 24 == 0 ? NULL : "a group has at least one region, of three words each";
    pages_region *regions = fault ? NULL : PyMem_RawCalloc(count, sizeof *regions);
    for (size_t i = 0; regions && !fault && i < count; i++) {
        regions[i] = (pages_region){.base = (unsigned char *)(uintptr_t)numbers[3 * i],
                                    .page_bytes = numbers[3 * i + 1],
                                    .page_stride = numbers[3 * i + 2],
                                    .slot_at = group->object_bytes};
        fault = region_fault(&regions[i], pages, per_object);
        group->object_bytes += fault ? 0 : regions[i].page_bytes * per_object;
        if (group->object_bytes > UINT64_C(1) << 48)
            fault = "an object is larger than the address space";
    }
    PyBuffer_Release(&found);
    group->regions = regions;
    group->count = count;
    self->regions += count;
    if (alias >= self->classes)
        self->classes = alias + 1;
    if (fault)
        PyErr_SetString(PyExc_ValueError, fault);
    else if (!regions)
        PyErr_NoMemory();
    return fault || !regions ? -1 : 0;
}

/* The device that has the memory, see device_read, and in which of its allocations each region is. */
static int read_device(PageTables *self, PyObject *given, PyObject *allocations) {
    Py_buffer found;
    if (words_of(allocations, &found, (Py_ssize_t)self->regions, "allocations") < 0)
        return -1;
    const uint64_t *number = found.buf;
    for (size_t group = 0; group < self->count; group++)
        for (size_t i = 0; i < self->groups[group].count; i++)
            ((pages_region *)self->groups[group].regions)[i].allocation = *number++;
    PyBuffer_Release(&found);
    if (words_of(given, &found, -1, "device") < 0)
        return -1;
    int fits = device_read(&self->device, found.buf, (size_t)found.len / 8);
    PyBuffer_Release(&found);
    if (!fits)
        PyErr_SetString(PyExc_ValueError, "device is six calls, a context, a step that is a power of two, and streams, none of them 0");
    return fits ? 0 : -1;
}

static PyObject *tables_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"groups", "device", "allocations", NULL};
    PyObject *given, *device = Py_None, *allocations = Py_None;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!|OO:PageTables", names, &PyTuple_Type, &given, &device,
                                     &allocations))
        return NULL;
    PageTables *self = (PageTables *)type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    size_t count = (size_t)PyTuple_GET_SIZE(given);
    self->groups = PyMem_RawCalloc(count ? count : 1, sizeof *self->groups);
    if (!self->groups)
        PyErr_NoMemory();
    for (; self->groups && self->count < count && !PyErr_Occurred(); self->count++)
        read_group(self, PyTuple_GET_ITEM(given, (Py_ssize_t)self->count), &self->groups[self->count]);
    if (!PyErr_Occurred() && device != Py_None)
        read_device(self, device, allocations);
    if (!PyErr_Occurred() && self->classes > count)
        PyErr_SetString(PyExc_ValueError, "alias is not below the number of groups");
    if (PyErr_Occurred())
        Py_CLEAR(self);
    return (PyObject *)self;
}

/* --- PageBatch --------------------------------------------------------------------------------------------- */

typedef struct {
    const pages_group *group;
    size_t keys;
    int64_t *ids; /* keys * pages_per_object; PAGES_UNTOUCHED for pages left out */
} batch_entry;

typedef struct {
    PyObject_HEAD
    PageTables *tables;
    batch_entry *entries;
    size_t count;
    bool writes;
} PageBatch;

static void batch_dealloc(PageBatch *self) {
    PyTypeObject *type = Py_TYPE(self);
    for (size_t i = 0; i < self->count; i++)
        PyMem_RawFree(self->entries[i].ids);
    PyMem_RawFree(self->entries);
    Py_XDECREF(self->tables);
    type->tp_free(self);
    Py_DECREF(type);
}

/* (group, keys, page_ids, skip_pages, valid_pages) */
static int read_entry(PageBatch *self, PyObject *given, batch_entry *entry, Py_ssize_t number) {
    Py_ssize_t group, keys, skip, valid;
    PyObject *words;
    Py_buffer found;
    if (!PyArg_ParseTuple(given, "nnOnn:PageBatch", &group, &keys, &words, &skip, &valid))
        return -1;
    if (group < 0 || (size_t)group >= self->tables->count) {
        PyErr_Format(PyExc_ValueError, "entry %zd: no group %zd; %zu are registered", number, group,
                     self->tables->count);
        return -1;
    }
    entry->group = &self->tables->groups[group];
    Py_ssize_t per_object = (Py_ssize_t)entry->group->pages_per_object, all;
    if (keys < 0 || __builtin_mul_overflow(keys, per_object, &all) || all > PY_SSIZE_T_MAX / 8) {
        PyErr_Format(PyExc_ValueError, "entry %zd: %zd keys are too many", number, keys);
        return -1;
    }
    if (valid < 0 || valid > all || skip < 0 || skip > per_object || (skip && !keys)) {
        PyErr_Format(PyExc_ValueError,
                     "entry %zd: skip_pages %zd and valid_pages %zd do not fit %zd keys of %zd pages each", number, skip,
                     valid, keys, per_object);
        return -1;
    }
    if (words_of(words, &found, -1, "page_ids") < 0)
        return -1;
    if (found.len / 8 != valid && found.len / 8 != all) {
        PyErr_Format(PyExc_ValueError,
                     "entry %zd: page_ids has %zd ids: give %zd, one for each page of the keys, or %zd, one for each "
                     "valid page",
                     number, found.len / 8, all, valid);
        PyBuffer_Release(&found);
        return -1;
    }
    entry->keys = (size_t)keys;
    entry->ids = PyMem_RawMalloc((size_t)(all ? all : 1) * 8);
    if (!entry->ids) {
        PyBuffer_Release(&found);
        PyErr_NoMemory();
        return -1;
    }
    const int64_t *ids = found.buf;
    int failed = 0;
    for (Py_ssize_t i = 0; i < all; i++) {
        int64_t id = i < valid ? ids[i] : PAGES_UNTOUCHED;
        bool untouched = i < skip || i >= valid || (entry->group->has_null && id == entry->group->null_page);
        entry->ids[i] = untouched ? PAGES_UNTOUCHED : id;
        if (!failed && !untouched && (id < 0 || (uint64_t)id >= entry->group->pages)) {
            PyErr_Format(PyExc_ValueError, "entry %zd: page_ids[%zd] is %lld, and the group has pages 0 to %llu", number,
                         i, (long long)id, (unsigned long long)(entry->group->pages - 1));
            failed = -1;
        }
    }
    PyBuffer_Release(&found);
    return failed;
}

/* For groups in which pages share memory exactly if their ids are equal. */
static int check_ids(const PageBatch *self) {
    uint64_t most = 0, classes = self->tables->classes;
    for (size_t i = 0; i < self->tables->count; i++)
        if (self->tables->groups[i].pages > most)
            most = self->tables->groups[i].pages;
    size_t row = (size_t)(most / 8 + 1);
    uint8_t **seen = PyMem_RawCalloc((size_t)classes + 1, sizeof *seen);
    int failed = seen ? 0 : -1;
    for (size_t e = 0; !failed && e < self->count; e++) {
        const batch_entry *entry = &self->entries[e];
        uint8_t **bits = &seen[entry->group->alias];
        if (!*bits && !(*bits = PyMem_RawCalloc(row, 1)))
            failed = -1;
        for (size_t i = 0; !failed && i < entry->keys * entry->group->pages_per_object; i++) {
            int64_t id = entry->ids[i];
            if (id == PAGES_UNTOUCHED)
                continue;
            if ((*bits)[id / 8] >> id % 8 & 1) {
                PyErr_Format(PyExc_ValueError,
                             "entry %zu: page %lld is to be written twice in this call: a page belongs to one object", e,
                             (long long)id);
                failed = -1;
            }
            (*bits)[id / 8] |= (uint8_t)(1u << id % 8);
        }
    }
    for (uint64_t i = 0; seen && i < classes; i++)
        PyMem_RawFree(seen[i]);
    PyMem_RawFree(seen);
    if (failed && !PyErr_Occurred())
        PyErr_NoMemory();
    return failed;
}

/* For groups that share memory in other ways, and for duplicates in them: compares the places of all pages. */
static int check_places(const PageBatch *self) {
    size_t room = 0, count = 0;
    for (size_t e = 0; e < self->count; e++)
        if (self->entries[e].group->exact)
            room += self->entries[e].keys * self->entries[e].group->pages_per_object * self->entries[e].group->count;
    pages_span *spans = PyMem_RawMalloc((room ? room : 1) * sizeof *spans);
    if (!spans) {
        PyErr_NoMemory();
        return -1;
    }
    for (size_t e = 0; e < self->count; e++) {
        const pages_group *group = self->entries[e].group;
        for (size_t i = 0; group->exact && i < self->entries[e].keys * group->pages_per_object; i++)
            for (size_t r = 0; self->entries[e].ids[i] != PAGES_UNTOUCHED && r < group->count; r++) {
                const pages_region *region = &group->regions[r];
                uintptr_t from = (uintptr_t)region->base + (uint64_t)self->entries[e].ids[i] * region->page_stride;
                spans[count++] = (pages_span){from, from + region->page_bytes};
            }
    }
    bool meet = pages_spans_meet(spans, count);
    PyMem_RawFree(spans);
    if (meet)
        PyErr_SetString(PyExc_ValueError, "two pages of this call overlap, because groups share memory: "
                                          "use a page in one group at a time");
    return meet ? -1 : 0;
}

static PyObject *batch_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"tables", "entries", "writes", NULL};
    PyObject *tables, *given;
    int writes;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO!p:PageBatch", names, &tables, &PyTuple_Type, &given, &writes))
        return NULL;
    if (Py_TYPE(tables)->tp_dealloc != (destructor)tables_dealloc)
        return PyErr_Format(PyExc_TypeError, "tables must be PageTables, not %s", Py_TYPE(tables)->tp_name);
    PageBatch *self = (PageBatch *)type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    self->tables = (PageTables *)Py_NewRef(tables);
    self->writes = writes;
    size_t count = (size_t)PyTuple_GET_SIZE(given);
    self->entries = PyMem_RawCalloc(count ? count : 1, sizeof *self->entries);
    int failed = self->entries ? 0 : -1;
    for (; !failed && self->count < count; self->count++)
        failed = read_entry(self, PyTuple_GET_ITEM(given, (Py_ssize_t)self->count), &self->entries[self->count],
                            (Py_ssize_t)self->count);
    if (!failed && writes && (check_ids(self) < 0 || check_places(self) < 0))
        failed = -1;
    if (failed) {
        if (!PyErr_Occurred())
            PyErr_NoMemory();
        Py_CLEAR(self);
    }
    return (PyObject *)self;
}

static PyObject *batch_ids(PageBatch *self, PyObject *given) {
    Py_ssize_t number = PyNumber_AsSsize_t(given, PyExc_OverflowError);
    if (number == -1 && PyErr_Occurred())
        return NULL;
    if (number < 0 || (size_t)number >= self->count)
        return PyErr_Format(PyExc_IndexError, "there is no entry %zd", number);
    const batch_entry *entry = &self->entries[number];
    return PyBytes_FromStringAndSize((const char *)entry->ids,
                                     (Py_ssize_t)(entry->keys * entry->group->pages_per_object * 8));
}

static PyMethodDef batch_methods[] = {
    {"ids", (PyCFunction)batch_ids, METH_O, "The page ids of an entry, as i64; -1 for those that are not touched."},
    {NULL, NULL, 0, NULL},
};

/* --- PageJob ----------------------------------------------------------------------------------------------- */

typedef struct {
    PyObject *index; /* lent until the job is freed; NULL: slots were given */
    size_t first, count;
} job_part;

typedef struct {
    PyObject_HEAD
    PageBatch *batch;
    PyObject *keep;
    pages_job job;
    job_part *parts;
    size_t parts_count, parts_room;
    team_job *team;
    pid_t pid;
    bool ready, started;
} PageJob;

static bool job_elsewhere(const PageJob *self) { return self->pid != getpid(); }

static void job_dealloc(PageJob *self) {
    PyTypeObject *type = Py_TYPE(self);
    bool theirs = job_elsewhere(self); /* a forked child lacks the threads, and they may have held the locks */
    if (self->team && !theirs) {
        atomic_store_explicit(&self->job.stop, true, memory_order_relaxed);
        team_close(self->team);
    }
    if (self->ready && !theirs) {
        pthread_mutex_destroy(&self->job.lock);
        pthread_cond_destroy(&self->job.moved);
    }
    for (size_t i = 0; i < self->parts_count; i++)
        if (self->parts[i].index) {
            index_take_back(self->parts[i].index);
            Py_DECREF(self->parts[i].index);
        }
    PyMem_RawFree(self->parts);
    PyMem_RawFree(self->job.objects);
    PyMem_RawFree((void *)self->job.regions_left);
    free(self->job.items);
    Py_XDECREF(self->batch);
    Py_XDECREF(self->keep);
    type->tp_free(self);
    Py_DECREF(type);
}

/* The object of an entry's key at `position`. */
static int take_object(PageJob *self, const batch_entry *entry, uint64_t position, pages_object **object) {
    if (position >= entry->keys) {
        PyErr_Format(PyExc_ValueError, "there is no position %llu among %zu keys", (unsigned long long)position,
                     entry->keys);
        return -1;
    }
    *object = &self->job.objects[self->job.count++];
    (*object)->group = entry->group;
    (*object)->ids = entry->ids + position * entry->group->pages_per_object;
    return 0;
}

/* Slots at addresses, with their expected checksums (0: none). */
static int take_slots(PageJob *self, const batch_entry *entry, const Py_buffer *positions, PyObject *given_slots,
                      PyObject *given_sums) {
    Py_ssize_t count = positions->len / 8;
    Py_buffer slots, sums = {.obj = NULL};
    if (words_of(given_slots, &slots, count, "slots") < 0)
        return -1;
    int failed = given_sums != Py_None ? words_of(given_sums, &sums, count, "checksums") : 0;
    for (Py_ssize_t i = 0; !failed && i < count; i++) {
        pages_object *object;
        failed = take_object(self, entry, ((const uint64_t *)positions->buf)[i], &object);
        if (failed)
            break;
        object->slot = (unsigned char *)(uintptr_t)((const uint64_t *)slots.buf)[i];
        object->checksum = sums.obj ? ((const uint64_t *)sums.buf)[i] : 0;
        object->check = object->checksum != 0;
    }
    PyBuffer_Release(&sums);
    PyBuffer_Release(&slots);
    return failed;
}

typedef struct {
    const index_view *view;
    _Atomic uint32_t *verified;
    uint64_t space, layout;
    int verify;
} found_by;

/* Where the index has a key, if this reader can use it. */
static void find_object(pages_object *object, const found_by *by, const unsigned char *bytes) {
    const index_view *view = by->view;
    index_key key = index_key_of(bytes, by->space);
    index_place place;
    if (index_find(view, &key, index_home(view, &key), by->layout, &place) != INDEX_HIT)
        return;
    const index_entry *entry = &view->entries[place.at];
    uint64_t checksum = index_load(&entry->checksum), nbytes = index_load(&entry->nbytes);
    uint64_t flags = index_load(&entry->flags), size = object->group->object_bytes;
    uint64_t incarnation = index_load(&entry->incarnation);
    bool known = flags & INDEX_CHECKSUM_KNOWN, adopted = flags & INDEX_UNVERIFIED;
    if (!index_unchanged(view, &place) || nbytes != size || !index_in_data(view, place.offset, size))
        return;
    if (!known && (adopted || by->verify == INDEX_VERIFY_ALWAYS))
        return; /* if everything must be verified, an object without a checksum is a miss: the server may know more */
    object->view = view;
    object->place = place;
    object->slot = view->base + place.offset;
    object->checksum = checksum;
    object->incarnation = incarnation;
    object->check = known && (adopted || by->verify != INDEX_VERIFY_NEVER);
    if (!object->check || by->verify == INDEX_VERIFY_ALWAYS)
        return;
    object->verified = &by->verified[place.at];
    object->check = atomic_load_explicit(object->verified, memory_order_relaxed) != index_verified_tag(place.sequence);
}

static int take_found(PageJob *self, const batch_entry *entry, const Py_buffer *positions, const found_by *by,
                      PyObject *keys) {
    Py_ssize_t count = positions->len / 8;
    if (!PyList_Check(keys) || PyList_GET_SIZE(keys) != count) {
        PyErr_Format(PyExc_ValueError, "keys must be a list of %zd keys", count);
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *key = PyList_GET_ITEM(keys, i);
        pages_object *object;
        if (!PyBytes_Check(key) || PyBytes_GET_SIZE(key) != INDEX_KEY_BYTES) {
            PyErr_Format(PyExc_ValueError, "key %zd is not %d bytes: derive keys with lmcache_core.tokens", i,
                         INDEX_KEY_BYTES);
            return -1;
        }
        if (take_object(self, entry, ((const uint64_t *)positions->buf)[i], &object) < 0)
            return -1;
        find_object(object, by, (const unsigned char *)PyBytes_AS_STRING(key));
    }
    return 0;
}

/* (entry, positions, slots, checksums or None) or (entry, positions, keys, index, namespace, layout, verify) */
static int read_part(PageJob *self, PyObject *given) {
    PyObject *positions_given, *slots, *sums, *keys, *index = NULL;
    unsigned long long space, layout;
    Py_ssize_t number;
    Py_buffer positions;
    found_by by = {.view = NULL};
    bool found = PyTuple_Check(given) && PyTuple_GET_SIZE(given) == 7;
    if (found) {
        if (!PyArg_ParseTuple(given, "nOOOKKi", &number, &positions_given, &keys, &index, &space, &layout, &by.verify))
            return -1;
    } else if (!PyArg_ParseTuple(given, "nOOO", &number, &positions_given, &slots, &sums))
        return -1;
    if (number < 0 || (size_t)number >= self->batch->count || by.verify < 0 || by.verify > INDEX_VERIFY_ALWAYS) {
        PyErr_Format(PyExc_ValueError, "there is no entry %zd, or no such verify as %d", number, by.verify);
        return -1;
    }
    const batch_entry *entry = &self->batch->entries[number];
    if (words_of(positions_given, &positions, -1, "positions") < 0)
        return -1;
    job_part *part = &self->parts[self->parts_count];
    part->first = self->job.count;
    int failed = 0;
    if ((size_t)positions.len / 8 > entry->keys) {
        PyErr_SetString(PyExc_ValueError, "more positions than keys");
        failed = -1;
    } else if (found) {
        failed = index_lend(index, &by.view, &by.verified);
        if (!failed) {
            part->index = Py_NewRef(index);
            self->parts_count++;
            by.space = space;
            by.layout = layout;
            failed = take_found(self, entry, &positions, &by, keys);
        }
    } else {
        self->parts_count++;
        failed = take_slots(self, entry, &positions, slots, sums);
    }
    part->count = self->job.count - part->first;
    PyBuffer_Release(&positions);
    return failed;
}

/* The most objects in all parts together. */
static Py_ssize_t objects_in(PyObject *parts) {
    Py_ssize_t all = 0;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(parts); i++) {
        PyObject *part = PyTuple_GET_ITEM(parts, i);
        Py_buffer positions;
        if (!PyTuple_Check(part) || PyTuple_GET_SIZE(part) < 4) {
            PyErr_SetString(PyExc_TypeError, "a part is a tuple of 4 or 7");
            return -1;
        }
        if (words_of(PyTuple_GET_ITEM(part, 1), &positions, -1, "positions") < 0)
            return -1;
        all += positions.len / 8;
        PyBuffer_Release(&positions);
    }
    return all;
}

static int job_prepare(PageJob *self, PyObject *parts) {
    Py_ssize_t all = objects_in(parts);
    if (all < 0)
        return -1;
    size_t count = (size_t)PyTuple_GET_SIZE(parts);
    pthread_condattr_t clock;
    pthread_condattr_init(&clock); /* with such attributes, none of these can fail */
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_mutex_init(&self->job.lock, NULL);
    pthread_cond_init(&self->job.moved, &clock);
    pthread_condattr_destroy(&clock);
    self->ready = true;
    self->job.regions = self->batch->tables->regions;
    self->parts = PyMem_RawCalloc(count ? count : 1, sizeof *self->parts);
    self->job.objects = PyMem_RawCalloc(all ? (size_t)all : 1, sizeof *self->job.objects);
    self->job.regions_left = PyMem_RawCalloc(self->job.regions + 1, sizeof *self->job.regions_left);
    if (!self->parts || !self->job.objects || !self->job.regions_left) {
        PyErr_NoMemory();
        return -1;
    }
    for (size_t i = 0; i < count; i++)
        if (read_part(self, PyTuple_GET_ITEM(parts, (Py_ssize_t)i)) < 0)
            return -1;
    return 0;
}

static PyObject *job_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"batch", "parts", "gather", "by_region", "keep", "event", NULL};
    PyObject *batch, *parts, *keep;
    unsigned long long event = 0;
    int gather, by_region;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO!ppO|K:PageJob", names, &batch, &PyTuple_Type, &parts, &gather,
                                     &by_region, &keep, &event))
        return NULL;
    if (Py_TYPE(batch)->tp_dealloc != (destructor)batch_dealloc)
        return PyErr_Format(PyExc_TypeError, "batch must be a PageBatch, not %s", Py_TYPE(batch)->tp_name);
    if (!gather && !((PageBatch *)batch)->writes)
        return PyErr_Format(PyExc_ValueError, "this batch was checked for reading its pages alone");
    PageJob *self = (PageJob *)type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    self->pid = getpid();
    self->batch = (PageBatch *)Py_NewRef(batch);
    self->keep = Py_NewRef(keep);
    self->job.gather = gather;
    self->job.event = (void *)(uintptr_t)event;
    if (self->batch->tables->device.streams_count)
        self->job.device = &self->batch->tables->device;
    int failed = job_prepare(self, parts);
    if (!failed && !pages_plan(&self->job, by_region)) {
        PyErr_NoMemory();
        failed = -1;
    }
    if (!failed && !(self->team = team_open(self->job.items_count, pages_do_item, &self->job))) {
        PyErr_NoMemory();
        failed = -1;
    }
    if (failed)
        Py_CLEAR(self);
    return (PyObject *)self;
}

/* Work until `region` (their number: all of it) is done, the job is stopped, or it is `until`. Needs no GIL. Who has a
 * limit does not work for a device: the engine's queue may be longer than that. */
static bool job_help(PageJob *self, size_t region, const struct timespec *until) {
    pages_job *job = &self->job;
    bool more = !(job->device && until) && team_enter(self->team);
    while (more && !pages_done(job, region)) {
        struct timespec now;
        if (until && clock_gettime(CLOCK_MONOTONIC, &now) == 0 &&
            (now.tv_sec > until->tv_sec || (now.tv_sec == until->tv_sec && now.tv_nsec >= until->tv_nsec)))
            break;
        if (!team_work_on_one(self->team))
            break;
    }
    if (more)
        team_leave(self->team);
    pthread_mutex_lock(&job->lock);
    while (!pages_done(job, region) && !atomic_load_explicit(&job->stop, memory_order_relaxed)) {
        if (!until)
            pthread_cond_wait(&job->moved, &job->lock);
        else if (pthread_cond_timedwait(&job->moved, &job->lock, until) != 0)
            break;
    }
    pthread_mutex_unlock(&job->lock);
    return pages_done(job, region);
}

static PyObject *job_start(PageJob *self, PyObject *args) {
    int threads, waits;
    if (!PyArg_ParseTuple(args, "ip:start", &threads, &waits))
        return NULL;
    if (job_elsewhere(self) || self->started)
        return PyErr_Format(PyExc_ValueError, "a job is started once, by the process that made it");
    self->started = true;
    unsigned wanted = team_size(self->job.bytes, threads > 0 ? (unsigned)threads : 1);
    bool small = self->job.bytes < PAGES_PIECE_BYTES && !self->job.device; /* a device has other things to do first */
    bool here = waits || small;
    if (wanted > self->job.items_count)
        wanted = (unsigned)self->job.items_count;
    Py_BEGIN_ALLOW_THREADS
    unsigned called = wanted > here ? team_call_up(self->team, wanted - here) : 0;
    if (here || !called)
        job_help(self, self->job.regions, NULL);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *job_wait(PageJob *self, PyObject *args) {
    double seconds;
    Py_ssize_t region = -1;
    if (!PyArg_ParseTuple(args, "d|n:wait", &seconds, &region))
        return NULL;
    if (region >= (Py_ssize_t)self->job.regions || region < -1)
        return PyErr_Format(PyExc_IndexError, "no region %zd; %zu are registered", region, self->job.regions);
    size_t which = region < 0 ? self->job.regions : (size_t)region;
    if (pages_done(&self->job, which))
        Py_RETURN_TRUE;
    if (job_elsewhere(self) || !(seconds > 0))
        Py_RETURN_FALSE;
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    if (seconds > 1e6)
        seconds = 1e6;
    until.tv_sec += (time_t)seconds;
    until.tv_nsec += (long)((seconds - (double)(time_t)seconds) * 1e9);
    if (until.tv_nsec >= 1000000000) {
        until.tv_sec++;
        until.tv_nsec -= 1000000000;
    }
    bool done;
    Py_BEGIN_ALLOW_THREADS
    done = job_help(self, which, &until);
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(done);
}

/* Takes any argument, because a weak reference's callback gets that reference. */
static PyObject *job_ask_to_stop(PageJob *self, PyObject *Py_UNUSED(arguments)) {
    atomic_store_explicit(&self->job.stop, true, memory_order_relaxed);
    Py_RETURN_NONE;
}

static PyObject *job_stop(PageJob *self, PyObject *Py_UNUSED(none)) {
    if (!job_elsewhere(self)) {
        Py_BEGIN_ALLOW_THREADS
        atomic_store_explicit(&self->job.stop, true, memory_order_relaxed);
        pages_tell(&self->job); /* waiting callers need not wait longer */
        team_shut(self->team);
        Py_END_ALLOW_THREADS
    }
    Py_RETURN_NONE;
}

static int part_of(const PageJob *self, PyObject *given, const job_part **part) {
    Py_ssize_t number = PyNumber_AsSsize_t(given, PyExc_OverflowError);
    if (number == -1 && PyErr_Occurred())
        return -1;
    if (number < 0 || (size_t)number >= self->parts_count) {
        PyErr_Format(PyExc_IndexError, "there is no part %zd", number);
        return -1;
    }
    *part = &self->parts[number];
    return 0;
}

/* One byte per object: see PAGE_… in the stub. */
static PyObject *job_statuses(PageJob *self, PyObject *given) {
    const job_part *part;
    if (part_of(self, given, &part) < 0)
        return NULL;
    PyObject *result = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)part->count);
    for (size_t i = 0; result && i < part->count; i++) {
        pages_object *object = &self->job.objects[part->first + i];
        bool complete = atomic_load_explicit(&object->left, memory_order_acquire) == 0;
        unsigned found = atomic_load_explicit(&object->found, memory_order_relaxed);
        int status = found & PAGES_MISSED    ? INDEX_MISS
                     : found & PAGES_CHANGED ? INDEX_CHANGED
                     : !complete             ? 4
                     : found & PAGES_DAMAGED ? INDEX_DAMAGED
                                             : INDEX_HIT;
        PyBytes_AS_STRING(result)[i] = (char)(status | (found & PAGES_WRITTEN ? 16 : 0));
    }
    return result;
}

static PyObject *job_checksums(PageJob *self, PyObject *given) {
    const job_part *part;
    if (part_of(self, given, &part) < 0)
        return NULL;
    PyObject *result = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(part->count * 8));
    for (size_t i = 0; result && i < part->count; i++)
        memcpy(PyBytes_AS_STRING(result) + 8 * i, &self->job.objects[part->first + i].checksum, 8);
    return result;
}

/* 0 if the index was not asked, or does not know. */
static PyObject *job_incarnations(PageJob *self, PyObject *given) {
    const job_part *part;
    if (part_of(self, given, &part) < 0)
        return NULL;
    PyObject *result = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(part->count * 8));
    for (size_t i = 0; result && i < part->count; i++)
        memcpy(PyBytes_AS_STRING(result) + 8 * i, &self->job.objects[part->first + i].incarnation, 8);
    return result;
}

/* Whether a thread may be inside a slot or a page. */
static PyObject *get_running(PageJob *self, void *Py_UNUSED(none)) {
    bool running = false;
    if (!job_elsewhere(self) && self->started && !pages_done(&self->job, self->job.regions)) {
        running = true;
        pthread_mutex_lock(&self->team->lock); /* held only for a few instructions */
        if (!self->team->working && (self->team->closed || atomic_load(&self->job.stop)))
            running = false; /* later threads find it closed, or stopped */
        pthread_mutex_unlock(&self->team->lock);
    }
    return PyBool_FromLong(running);
}

static PyObject *get_nbytes(PageJob *self, void *Py_UNUSED(none)) {
    return PyLong_FromUnsignedLongLong(self->job.bytes);
}

static PyObject *get_device_s(PageJob *self, void *Py_UNUSED(none)) {
    return PyFloat_FromDouble((double)atomic_load(&self->job.device_ns) * 1e-9);
}

static PyObject *get_fault(PageJob *self, void *Py_UNUSED(none)) {
    return PyLong_FromLong(atomic_load(&self->job.fault));
}

static PyGetSetDef job_getters[] = {
    {"running", (getter)get_running, NULL, "Whether a thread may be inside a slot or a page.", NULL},
    {"nbytes", (getter)get_nbytes, NULL, "Bytes to copy.", NULL},
    {"device_s", (getter)get_device_s, NULL, "What its threads have spent on a device's copies, and their sums.", NULL},
    {"fault", (getter)get_fault, NULL, "What the device said when it refused; 0: it did not.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMethodDef job_methods[] = {
    {"start", (PyCFunction)job_start, METH_VARARGS, "Begin, by so many threads; with `waits` until all is done."},
    {"wait", (PyCFunction)job_wait, METH_VARARGS, "Help until a region, or all of it, is done, for so long."},
    {"ask_to_stop", (PyCFunction)job_ask_to_stop, METH_VARARGS, "Have the threads leave soon. Waits for nothing."},
    {"stop", (PyCFunction)job_stop, METH_NOARGS, "Have the threads leave, and wait until they have."},
    {"statuses", (PyCFunction)job_statuses, METH_O, "What became of the objects of a part, a byte each."},
    {"incarnations", (PyCFunction)job_incarnations, METH_O, "The numbers of a part's objects, as u64."},
    {"checksums", (PyCFunction)job_checksums, METH_O, "The checksums of the objects of a part, as u64."},
    {NULL, NULL, 0, NULL},
};

/* --- the types --------------------------------------------------------------------------------------------- */

static PyType_Slot tables_slots[] = {
    {Py_tp_doc, "Regions of pages, in groups."}, {Py_tp_new, tables_new}, {Py_tp_dealloc, tables_dealloc}, {0, NULL}};
static PyType_Slot batch_slots[] = {{Py_tp_doc, "The pages of one call, checked."},
                                    {Py_tp_new, batch_new},
                                    {Py_tp_dealloc, batch_dealloc},
                                    {Py_tp_methods, batch_methods},
                                    {0, NULL}};
static PyType_Slot job_slots[] = {{Py_tp_doc, "Objects on their way between slots and pages."},
                                  {Py_tp_new, job_new},
                                  {Py_tp_dealloc, job_dealloc},
                                  {Py_tp_methods, job_methods},
                                  {Py_tp_getset, job_getters},
                                  {0, NULL}};

#define SPEC(type, parts) {"lmcache_core._native." #type, sizeof(type), 0, PAGES_TYPE_FLAGS, parts}
#define PAGES_TYPE_FLAGS (Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE)
static PyType_Spec specs[] = {SPEC(PageTables, tables_slots), SPEC(PageBatch, batch_slots), SPEC(PageJob, job_slots)};

int pages_add(PyObject *module) {
    for (size_t i = 0; i < sizeof specs / sizeof *specs; i++) {
        PyObject *type = PyType_FromModuleAndSpec(module, &specs[i], NULL);
        int failed = type ? PyModule_AddType(module, (PyTypeObject *)type) : -1;
        Py_XDECREF(type);
        if (failed)
            return -1;
    }
    return 0;
}
