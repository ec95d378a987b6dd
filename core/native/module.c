/* lmcache_core._native: what Python is too slow for. Each part has a slower Python version with the same
 * results, so the package works without it. */
#include "module.h"

static int module_exec(PyObject *module) {
    if (hashing_add(module) < 0 || copying_add(module) < 0 || index_add(module) < 0 || adoption_add(module) < 0 ||
        marking_add(module) < 0 || pages_add(module) < 0 || waiting_add(module) < 0)
        return -1;
    return 0;
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, module_exec}, {0, NULL}};

static struct PyModuleDef module_def = {
    PyModuleDef_HEAD_INIT,
    .m_name = "lmcache_core._native",
    .m_doc = "The index and the slot words of the pool, copies and checksums, chunk hashing: in C.",
    .m_slots = module_slots,
};

PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&module_def); }
