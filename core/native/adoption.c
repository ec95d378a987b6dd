/* Adoption for Python: construction reads the whole pool (adoption.h), then objects come one batch at a time. */
#include "adoption.h"

#include "module.h"

static const char *const CAUSES[DROP_CAUSES] = {
    [DROP_UNFINISHED] = "unfinished", [DROP_UNINDEXED] = "unindexed",   [DROP_HALF_CHANGED] = "half_changed",
    [DROP_MISPLACED] = "misplaced",   [DROP_LAYOUT] = "layout",         [DROP_NOT_READY] = "not_ready",
    [DROP_DUPLICATE] = "duplicate",   [DROP_UNVERIFIABLE] = "unverifiable",   [DROP_SLABS] = "slabs",
};

typedef struct {
    PyObject_HEAD
    Py_buffer buffer; /* keeps the mapping */
    adoption state;
} AdoptionObject;

/* --- construction -------------------------------------------------------------------------------------------- */

/* What is wrong with the geometry, or NULL. The header with it was compared with our own plan: a caller that gets this
 * is broken, and must not make us read outside the mapping. */
static const char *check_input(const adoption_input *in, uint64_t index_offset) {
    uint64_t data_bytes = in->data_bytes;
    struct {
        uint64_t offset, rows, row_bytes;
    } tables[] = {{in->layouts_offset, in->layout_rows, ADOPTION_LAYOUT_ROW},
                  {in->slabs_offset, in->slab_rows, 8},
                  {in->slots_offset, in->slot_rows, 8}};
    for (size_t i = 0; i < sizeof tables / sizeof *tables; i++) {
        uint64_t room = tables[i].offset <= index_offset ? index_offset - tables[i].offset : 0;
        if (tables[i].offset % 8 != 0 || tables[i].rows > room / tables[i].row_bytes)
            return "a table does not lie in front of the index";
    }
    if (in->view.mask >= CLAIM_ENTRIES_MAX || in->layout_rows > 1 << 20 || in->worker_rows > ADOPTION_NO_ROW)
        return "too many rows";
    if (data_bytes == 0 || data_bytes % ADOPTION_PAGE != 0 || in->slot_rows != data_bytes / ADOPTION_PAGE)
        return "slot_rows must be one for each page of data";
    if (in->slab_bytes_min == 0 || in->slab_bytes_min % ADOPTION_PAGE != 0 || in->unit_bytes == 0 ||
        in->unit_bytes % in->slab_bytes_min != 0 || in->slab_rows != adoption_round_up(data_bytes, in->slab_bytes_min) / in->slab_bytes_min ||
        data_bytes / in->unit_bytes >= UINT32_MAX)
        return "slab_rows must be one for each slab_bytes_min of data, and unit_bytes a multiple of it";
    return NULL;
}

static PyObject *adoption_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"buffer",         "living",       "index_offset", "entries",      "data_offset",
                            "segment_bytes",  "serving_offset", "layouts_offset", "layout_rows",  "slabs_offset",
                            "slab_rows",      "slots_offset", "slot_rows",    "unit_bytes",   "slab_bytes_min",
                            "object_bytes_max", "master",       "distrust",     "torn",         "stored_after", NULL};
    Py_buffer buffer, living, master = {.obj = NULL};
    PyObject *known;
    int distrust, torn;
    unsigned long long stored_after;
    unsigned long long index_offset, entries, data_offset, segment_bytes, serving_offset;
    unsigned long long layouts_offset, layout_rows, slabs_offset, slab_rows, slots_offset, slot_rows;
    unsigned long long unit_bytes, slab_bytes_min, object_bytes_max;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "w*y*$KKKKKKKKKKKKKKOppK:Adoption", names, &buffer, &living,
                                     &index_offset, &entries, &data_offset, &segment_bytes, &serving_offset,
                                     &layouts_offset, &layout_rows, &slabs_offset, &slab_rows, &slots_offset,
                                     &slot_rows, &unit_bytes, &slab_bytes_min, &object_bytes_max, &known, &distrust,
                                     &torn, &stored_after))
        return NULL;
    if (known != Py_None && PyObject_GetBuffer(known, &master, PyBUF_WRITABLE) < 0) {
        PyBuffer_Release(&living);
        PyBuffer_Release(&buffer);
        return NULL;
    }
    adoption_input in = {.base = buffer.buf,
                         .data_bytes = segment_bytes > data_offset ? segment_bytes - data_offset : 0,
                         .unit_bytes = unit_bytes,
                         .layouts_offset = layouts_offset,
                         .layout_rows = layout_rows,
                         .slabs_offset = slabs_offset,
                         .slab_rows = slab_rows,
                         .slots_offset = slots_offset,
                         .slot_rows = slot_rows,
                         .worker_rows = (uint64_t)living.len,
                         .object_bytes_max = object_bytes_max,
                         .slab_bytes_min = slab_bytes_min,
                         .living = living.buf,
                         .distrust = distrust != 0,
                         .torn = torn != 0,
                         .stored_after = stored_after,
                         .master = master.obj != NULL ? master.buf : NULL};
    const char *wrong = (uint64_t)buffer.len < segment_bytes ? "the buffer is shorter than the segment" : NULL;
    if (wrong == NULL)
        wrong = index_view_make(&in.view, buffer.buf, segment_bytes, index_offset, entries, data_offset, serving_offset);
    if (wrong == NULL)
        wrong = check_input(&in, index_offset);
    if (wrong == NULL && master.obj != NULL && ((uint64_t)master.len < index_offset || (uintptr_t)master.buf % 8 != 0))
        wrong = "the master copy is shorter than the front, or not aligned";
    AdoptionObject *self = NULL;
    if (wrong != NULL) {
        PyErr_Format(PyExc_ValueError, "this pool cannot be adopted: %s", wrong);
    } else if ((self = (AdoptionObject *)type->tp_alloc(type, 0)) != NULL) {
        bool good;
        Py_BEGIN_ALLOW_THREADS
        good = adoption_scan(&self->state, &in);
        Py_END_ALLOW_THREADS
        self->state.in.living = NULL;
        self->state.in.master = NULL;
        if (good) {
            self->buffer = buffer;
            PyBuffer_Release(&living);
            PyBuffer_Release(&master);
            return (PyObject *)self;
        }
        Py_CLEAR(self);
        PyErr_NoMemory();
    }
    PyBuffer_Release(&living);
    PyBuffer_Release(&master);
    PyBuffer_Release(&buffer);
    return NULL;
}

static void adoption_dealloc(AdoptionObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    adoption_free(&self->state);
    if (self->buffer.obj != NULL)
        PyBuffer_Release(&self->buffer);
    type->tp_free(self);
    Py_DECREF(type);
}

/* --- objects, on first touch --------------------------------------------------------------------------------- */

/* (key or None, namespace, offset, layout, checksum or None, incarnation) */
static int append_object(PyObject *list, const adopted_object *object) {
    PyObject *row = NULL;
    if (object->lost) {
        row = Py_BuildValue("OKKKOK", Py_None, 0ULL, (unsigned long long)object->offset, 0ULL, Py_None, 0ULL);
    } else {
        PyObject *key = PyBytes_FromStringAndSize((const char *)object->key.word, INDEX_KEY_BYTES);
        PyObject *checksum = object->has_checksum ? PyLong_FromUnsignedLongLong(object->checksum) : Py_NewRef(Py_None);
        if (key == NULL || checksum == NULL) {
            Py_XDECREF(key);
            Py_XDECREF(checksum);
            return -1;
        }
        row = Py_BuildValue("NKKKNK", key, (unsigned long long)object->key.space, (unsigned long long)object->offset,
                            (unsigned long long)object->layout, checksum,
                            (unsigned long long)object->incarnation);
    }
    if (row == NULL)
        return -1;
    int failed = PyList_Append(list, row);
    Py_DECREF(row);
    return failed;
}

static PyObject *adoption_touch_keys(AdoptionObject *self, PyObject *args) {
    unsigned long long space;
    PyObject *keys;
    if (!PyArg_ParseTuple(args, "KO:touch", &space, &keys))
        return NULL;
    PyObject *row = PySequence_Fast(keys, "touch takes a sequence of keys");
    PyObject *found = row != NULL ? PyList_New(0) : NULL;
    for (Py_ssize_t i = 0; found != NULL && self->state.pending != 0 && i < PySequence_Fast_GET_SIZE(row); i++) {
        PyObject *key = PySequence_Fast_GET_ITEM(row, i);
        /* Something that is no key belongs to nobody: the kernel tells the caller. */
        if (!PyBytes_Check(key) || PyBytes_GET_SIZE(key) != INDEX_KEY_BYTES)
            continue;
        index_key wanted = index_key_of((const unsigned char *)PyBytes_AS_STRING(key), space);
        adopted_object object;
        if (adoption_touch(&self->state, &wanted, &object) && append_object(found, &object) < 0)
            Py_CLEAR(found);
    }
    Py_XDECREF(row);
    return found;
}

static PyObject *adoption_take(AdoptionObject *self, PyObject *args) {
    Py_ssize_t most;
    if (!PyArg_ParseTuple(args, "n:take", &most))
        return NULL;
    PyObject *found = PyList_New(0);
    adopted_object object;
    while (found != NULL && most-- > 0 && adoption_next(&self->state, &object))
        if (append_object(found, &object) < 0)
            Py_CLEAR(found);
    return found;
}

static PyObject *adoption_slab(AdoptionObject *self, PyObject *args) {
    unsigned long long offset;
    Py_ssize_t most;
    if (!PyArg_ParseTuple(args, "Kn:slab", &offset, &most))
        return NULL;
    PyObject *found = PyList_New(0);
    const adopted_slab *slab = adoption_slab_at(&self->state, offset);
    for (uint64_t slot = 0; found != NULL && slab != NULL && slot < slab->slots && most > 0; slot++) {
        uint64_t number = slab->first + slot;
        if (self->state.claim[number] >= CLAIM_ENTRIES_MAX)
            continue;
        adopted_object object;
        adoption_take_slot(&self->state, number, slab->start + slot * slab->slot_bytes, &object);
        most--;
        if (append_object(found, &object) < 0)
            Py_CLEAR(found);
    }
    return found;
}

/* --- what was found ------------------------------------------------------------------------------------------ */

/* (start, nbytes, slot_bytes, used, unmade, fresh, [free offsets below fresh]) */
static PyObject *slab_row(const adoption *a, const adopted_slab *slab) {
    PyObject *offsets = PyList_New(0);
    unsigned long long unmade = 0;
    for (uint64_t slot = 0; offsets != NULL && slot < slab->slots; slot++) {
        uint32_t claim = a->claim[slab->first + slot];
        uint64_t start = slab->start + slot * slab->slot_bytes;
        unmade += claim < CLAIM_ENTRIES_MAX;
        if (claim != CLAIM_NONE || start >= slab->fresh)
            continue;
        PyObject *offset = PyLong_FromUnsignedLongLong(start);
        if (offset == NULL || PyList_Append(offsets, offset) < 0)
            Py_CLEAR(offsets);
        Py_XDECREF(offset);
    }
    if (offsets == NULL)
        return NULL;
    return Py_BuildValue("KKKKKKN", (unsigned long long)slab->start, (unsigned long long)slab->nbytes,
                         (unsigned long long)slab->slot_bytes, (unsigned long long)slab->used, unmade,
                         (unsigned long long)slab->fresh, offsets);
}

static PyObject *adoption_slabs(AdoptionObject *self, PyObject *unused) {
    (void)unused;
    PyObject *rows = PyList_New(0);
    for (uint64_t i = 0; rows != NULL && i < self->state.slab_count; i++) {
        if (self->state.slabs[i].used == 0)
            continue;
        PyObject *row = slab_row(&self->state, &self->state.slabs[i]);
        if (row == NULL || PyList_Append(rows, row) < 0)
            Py_CLEAR(rows);
        Py_XDECREF(row);
    }
    return rows;
}

static PyObject *adoption_waiting(AdoptionObject *self, PyObject *unused) {
    (void)unused;
    PyObject *rows = PyList_New(0);
    for (uint64_t i = 0; rows != NULL && i < self->state.wait_count; i++) {
        const adopted_wait *wait = &self->state.waits[i];
        PyObject *row = Py_BuildValue("KII", (unsigned long long)wait->offset, wait->state, wait->row);
        if (row == NULL || PyList_Append(rows, row) < 0)
            Py_CLEAR(rows);
        Py_XDECREF(row);
    }
    return rows;
}

static PyObject *adoption_layouts(AdoptionObject *self, PyObject *unused) {
    (void)unused;
    PyObject *rows = PyDict_New();
    for (uint64_t id = 0; rows != NULL && id < self->state.in.layout_rows; id++) {
        const adopted_layout *layout = &self->state.layouts[id];
        if (layout->nbytes == 0)
            continue;
        PyObject *number = PyLong_FromUnsignedLongLong(id);
        PyObject *row = Py_BuildValue("KK", (unsigned long long)layout->fingerprint, (unsigned long long)layout->nbytes);
        if (number == NULL || row == NULL || PyDict_SetItem(rows, number, row) < 0)
            Py_CLEAR(rows);
        Py_XDECREF(number);
        Py_XDECREF(row);
    }
    return rows;
}

static PyObject *adoption_layout_of_space(AdoptionObject *self, PyObject *namespace) {
    unsigned long long space = PyLong_AsUnsignedLongLong(namespace);
    if (space == (unsigned long long)-1 && PyErr_Occurred())
        return NULL;
    return PyLong_FromUnsignedLongLong(adoption_layout_of(&self->state, space));
}

static PyObject *adoption_dropped(AdoptionObject *self, void *unused) {
    (void)unused;
    PyObject *counts = PyDict_New();
    for (int cause = 0; counts != NULL && cause < DROP_CAUSES; cause++) {
        PyObject *count = PyLong_FromUnsignedLongLong(self->state.dropped[cause]);
        if (count == NULL || PyDict_SetItemString(counts, CAUSES[cause], count) < 0)
            Py_CLEAR(counts);
        Py_XDECREF(count);
    }
    return counts;
}

static PyObject *adoption_number(AdoptionObject *self, void *which) {
    return PyLong_FromUnsignedLongLong(*(uint64_t *)(void *)((char *)self + (uintptr_t)which));
}

/* --- the type ------------------------------------------------------------------------------------------------ */

static PyMethodDef adoption_methods[] = {
    {"touch", (PyCFunction)adoption_touch_keys, METH_VARARGS, "Take the objects of these keys that nobody has taken."},
    {"take", (PyCFunction)adoption_take, METH_VARARGS, "Take up to n of the oldest objects that nobody has taken."},
    {"slab", (PyCFunction)adoption_slab, METH_VARARGS, "Take up to n that nobody has taken in the slab at an offset."},
    {"slabs", (PyCFunction)adoption_slabs, METH_NOARGS, "The slabs in which something stands."},
    {"waiting", (PyCFunction)adoption_waiting, METH_NOARGS, "Slots that wait for former workers."},
    {"layouts", (PyCFunction)adoption_layouts, METH_NOARGS, "Layout id to (fingerprint, nbytes)."},
    {"layout_of", (PyCFunction)adoption_layout_of_space, METH_O, "The layout of what a namespace has pending, or 0."},
    {NULL, NULL, 0, NULL},
};

#define NUMBER(name, field)                                                                                            \
    {name, (getter)adoption_number, NULL, NULL, (void *)(uintptr_t)(offsetof(AdoptionObject, state) + offsetof(adoption, field))}
static PyGetSetDef adoption_properties[] = {
    NUMBER("objects", objects),
    NUMBER("nbytes", nbytes),
    NUMBER("pending", pending),
    NUMBER("ready", ready),
    NUMBER("gone", gone),
    {"dropped", (getter)adoption_dropped, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot adoption_slots[] = {
    {Py_tp_new, adoption_new},
    {Py_tp_dealloc, adoption_dealloc},
    {Py_tp_methods, adoption_methods},
    {Py_tp_getset, adoption_properties},
    {Py_tp_doc, "The pool of a dead server, read and put right; its objects are made on first touch."},
    {0, NULL},
};

static PyType_Spec adoption_spec = {
    .name = "lmcache_core._native.Adoption",
    .basicsize = sizeof(AdoptionObject),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = adoption_slots,
};

int adoption_add(PyObject *module) {
    PyObject *type = PyType_FromModuleAndSpec(module, &adoption_spec, NULL);
    if (type == NULL)
        return -1;
    int failed = PyModule_AddType(module, (PyTypeObject *)type);
    Py_DECREF(type);
    return failed;
}
