/* Chunk keys for Python: of ids in buffers, lists and tuples. For anything else, errors included, these functions
 * return None and the Python version takes over; so each message has one place.
 */
#include "chain.h"
#include "module.h"

static sha256_way best; /* chosen once, when the module is first imported */

/* --- token ids --- */

/* The ids of a list or tuple as u32 words. 0, or -1 if one of them is no int that fits. Runs no Python code, so the
 * list cannot change meanwhile. */
static int ids_of_objects(PyObject *const *items, Py_ssize_t count, uint32_t *words) {
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *item = items[i];
#if PY_VERSION_HEX >= 0x030c0000
        if (PyLong_CheckExact(item) && PyUnstable_Long_IsCompact((PyLongObject *)item)) {
            Py_ssize_t id = PyUnstable_Long_CompactValue((PyLongObject *)item);
            if (id < 0)
                return -1;
            words[i] = (uint32_t)id; /* compact: below 2^30 */
            continue;
        }
#else
        if (PyLong_CheckExact(item) && Py_SIZE(item) == 1) { /* positive, of one digit: below 2^30 */
            words[i] = ((PyLongObject *)item)->ob_digit[0];
            continue;
        }
#endif
        int overflow;
        if (!PyLong_Check(item))
            return -1;
        long long id = PyLong_AsLongLongAndOverflow(item, &overflow);
        if (overflow || id < 0 || id > UINT32_MAX)
            return -1;
        words[i] = (uint32_t)id;
    }
    return 0;
}

/* 0, or -1 if it is not a one-dimensional buffer of native 32- or 64-bit integers. */
static int ids_of_buffer(const Py_buffer *view, chain_ids *ids) {
    const char *format = view->format != NULL ? view->format : "B";
    if (*format == '@' || *format == '<')
        format++;
    if (view->ndim != 1 || view->suboffsets != NULL || *format == '\0' || format[1] != '\0')
        return -1;
    int is_signed = strchr("ilqn", *format) != NULL;
    if (!is_signed && strchr("ILQN", *format) == NULL)
        return -1;
    if (view->itemsize == 4)
        ids->kind = is_signed ? CHAIN_I32 : CHAIN_U32;
    else if (view->itemsize == 8)
        ids->kind = is_signed ? CHAIN_I64 : CHAIN_U64;
    else
        return -1;
    ids->first = view->buf;
    ids->count = (size_t)view->shape[0];
    ids->stride_bytes = view->strides[0];
    return 0;
}

/* --- chains --- */

static PyObject *keys_of_bytes(const unsigned char *digests, size_t count) {
    PyObject *keys = PyList_New((Py_ssize_t)count);
    for (size_t i = 0; keys != NULL && i < count; i++) {
        PyObject *key = PyBytes_FromStringAndSize((const char *)digests + i * SHA256_BYTES, SHA256_BYTES);
        if (key == NULL)
            Py_CLEAR(keys);
        else
            PyList_SET_ITEM(keys, (Py_ssize_t)i, key);
    }
    return keys;
}

/* The memory behind `ids` stays where it is until this returns. */
static PyObject *chained(const unsigned char *root, const chain_ids *ids, size_t chunk_ids) {
    size_t count = ids->count / chunk_ids;
    unsigned char *digests = PyMem_RawMalloc(count ? count * SHA256_BYTES : 1);
    if (digests == NULL)
        return PyErr_NoMemory();
    int bad;
    Py_BEGIN_ALLOW_THREADS
    bad = chain_keys(best, root, ids, chunk_ids, digests);
    Py_END_ALLOW_THREADS
    PyObject *keys = bad ? Py_NewRef(Py_None) : keys_of_bytes(digests, count);
    PyMem_RawFree(digests);
    return keys;
}

/* root, tokens, chunk_tokens → root, chunk_ids; -1 with an exception set if they cannot be used. */
static int chain_arguments(const Py_buffer *root, Py_ssize_t chunk_tokens) {
    if (root->len != SHA256_BYTES) {
        PyErr_Format(PyExc_ValueError, "root has %zd bytes: give a key or a namespace's digest, of %d", root->len,
                     SHA256_BYTES);
        return -1;
    }
    if (chunk_tokens < 1) {
        PyErr_Format(PyExc_ValueError, "chunk_tokens is %zd: give 1 or more", chunk_tokens);
        return -1;
    }
    return 0;
}

static PyObject *chained_objects(const unsigned char *root, PyObject *tokens, size_t chunk_ids) {
    Py_ssize_t count = PySequence_Fast_GET_SIZE(tokens);
    uint32_t *words = PyMem_RawMalloc(count ? (size_t)count * sizeof *words : 1);
    if (words == NULL)
        return PyErr_NoMemory();
    PyObject *keys;
    if (ids_of_objects(PySequence_Fast_ITEMS(tokens), count, words) < 0)
        keys = Py_NewRef(Py_None);
    else {
        const chain_ids ids = {(const unsigned char *)words, sizeof *words, (size_t)count, CHAIN_U32};
        keys = chained(root, &ids, chunk_ids);
    }
    PyMem_RawFree(words);
    return keys;
}

static PyObject *chained_buffer(const unsigned char *root, PyObject *tokens, size_t chunk_ids) {
    Py_buffer view;
    if (PyObject_GetBuffer(tokens, &view, PyBUF_FULL_RO) < 0) {
        PyErr_Clear(); /* the Python version meets the same error and reports it */
        Py_RETURN_NONE;
    }
    chain_ids ids;
    PyObject *keys = ids_of_buffer(&view, &ids) < 0 ? Py_NewRef(Py_None) : chained(root, &ids, chunk_ids);
    PyBuffer_Release(&view);
    return keys;
}

PyDoc_STRVAR(chunk_keys_doc,
             "chunk_keys(root, tokens, chunk_tokens, /)\n--\n\n"
             "One key for each whole chunk: a list of bytes. None where the tokens are not a list or tuple of ints or\n"
             "one row of native 32- or 64-bit integers, or where one of them is negative or above 32 bits.");

static PyObject *chunk_keys(PyObject *module, PyObject *args) {
    (void)module;
    Py_buffer root;
    PyObject *tokens, *chunk, *keys = NULL;
    if (!PyArg_ParseTuple(args, "y*OO:chunk_keys", &root, &tokens, &chunk))
        return NULL;
    Py_ssize_t chunk_tokens = PyNumber_AsSsize_t(chunk, NULL); /* clipped: a larger chunk is never full either */
    if (!PyErr_Occurred() && chain_arguments(&root, chunk_tokens) == 0) {
        if (PyList_CheckExact(tokens) || PyTuple_CheckExact(tokens))
            keys = chained_objects(root.buf, tokens, (size_t)chunk_tokens);
        else if (PyObject_CheckBuffer(tokens))
            keys = chained_buffer(root.buf, tokens, (size_t)chunk_tokens);
        else
            keys = Py_NewRef(Py_None);
    }
    PyBuffer_Release(&root);
    return keys;
}

PyDoc_STRVAR(chain_floor_doc,
             "_chain_floor(root, words, chunk_tokens, keys, /)\n--\n\n"
             "The bare loop over a contiguous buffer of u32 words, into a buffer of 32 bytes for each whole chunk: what\n"
             "`bench hash` compares with.");

static PyObject *chain_floor(PyObject *module, PyObject *args) {
    (void)module;
    Py_buffer root, words, keys;
    Py_ssize_t chunk_tokens;
    if (!PyArg_ParseTuple(args, "y*y*nw*:_chain_floor", &root, &words, &chunk_tokens, &keys))
        return NULL;
    PyObject *done = NULL;
    if (chain_arguments(&root, chunk_tokens) == 0) {
        const chain_ids ids = {words.buf, 4, (size_t)words.len / 4, CHAIN_U32};
        if (ids.count / (size_t)chunk_tokens > (size_t)keys.len / SHA256_BYTES)
            PyErr_SetString(PyExc_ValueError, "keys is too short: give 32 bytes for each whole chunk");
        else {
            Py_BEGIN_ALLOW_THREADS
            (void)chain_keys(best, root.buf, &ids, (size_t)chunk_tokens, keys.buf); /* every u32 fits */
            Py_END_ALLOW_THREADS
            done = Py_NewRef(Py_None);
        }
    }
    PyBuffer_Release(&root);
    PyBuffer_Release(&words);
    PyBuffer_Release(&keys);
    return done;
}

/* --- block hashes --- */

PyDoc_STRVAR(block_hash_keys_doc,
             "block_hash_keys(prefix, hashes, hash_bytes_min, /)\n--\n\n"
             "SHA-256(prefix ‖ hash) for each hash of a list or tuple: a list of bytes. None where one of them is not of\n"
             "type bytes, or shorter, or longer than a few KiB.");

static PyObject *block_hash_keys(PyObject *module, PyObject *args) {
    (void)module;
    Py_buffer prefix;
    PyObject *hashes, *held = NULL, *keys = NULL;
    Py_ssize_t bytes_min;
    unsigned char *digests = NULL;
    if (!PyArg_ParseTuple(args, "y*On:block_hash_keys", &prefix, &hashes, &bytes_min))
        return NULL;
    if (!PyList_CheckExact(hashes) && !PyTuple_CheckExact(hashes)) {
        keys = Py_NewRef(Py_None);
        goto end;
    }
    held = PySequence_Tuple(hashes); /* a list may lose its items while other threads run */
    if (held == NULL)
        goto end;
    Py_ssize_t count = PyTuple_GET_SIZE(held);
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *hash = PyTuple_GET_ITEM(held, i);
        if (!PyBytes_CheckExact(hash) || PyBytes_GET_SIZE(hash) < bytes_min ||
            PyBytes_GET_SIZE(hash) > CHAIN_ROOM_BYTES - prefix.len) {
            keys = Py_NewRef(Py_None);
            goto end;
        }
    }
    digests = PyMem_RawMalloc(count ? (size_t)count * SHA256_BYTES : 1);
    if (digests == NULL) {
        PyErr_NoMemory();
        goto end;
    }
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *hash = PyTuple_GET_ITEM(held, i); /* the tuple is immutable, and we hold it */
        chain_block_key(best, prefix.buf, (size_t)prefix.len, PyBytes_AS_STRING(hash), (size_t)PyBytes_GET_SIZE(hash),
                        digests + i * SHA256_BYTES);
    }
    Py_END_ALLOW_THREADS
    keys = keys_of_bytes(digests, (size_t)count);
end:
    PyMem_RawFree(digests);
    Py_XDECREF(held);
    PyBuffer_Release(&prefix);
    return keys;
}

static PyMethodDef methods[] = {
    {"chunk_keys", chunk_keys, METH_VARARGS, chunk_keys_doc},
    {"_chain_floor", chain_floor, METH_VARARGS, chain_floor_doc},
    {"block_hash_keys", block_hash_keys, METH_VARARGS, block_hash_keys_doc},
    {NULL, NULL, 0, NULL},
};

int hashing_add(PyObject *module) {
    best = sha256_best();
    if (PyModule_AddStringConstant(module, "SHA256_BY", best.name) < 0)
        return -1;
    return PyModule_AddFunctions(module, methods);
}
