/* The parts of lmcache_core._native. Each has a file of its own that adds its functions and types to the module.
 * The algorithms are in headers without Python; these files translate.
 */
#ifndef LMCACHE_CORE_MODULE_H
#define LMCACHE_CORE_MODULE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* Each returns 0, or -1 with a Python exception set. */
int hashing_add(PyObject *module);
int copying_add(PyObject *module);
int index_add(PyObject *module);
int adoption_add(PyObject *module);
int marking_add(PyObject *module);
int pages_add(PyObject *module);
int waiting_add(PyObject *module);

#endif
