/* What index.c lends to its neighbours: the view that copies read through. */
#ifndef LMCACHE_CORE_INDEX_LENT_H
#define LMCACHE_CORE_INDEX_LENT_H

#include "module.h"

#include "index.h"

/* The memory stays until `index_take_back`, even if the index is closed meanwhile. `verified` has a tag for each entry.
 * -1 with an exception if it is closed, or is no index. Both need the GIL. */
int index_lend(PyObject *index, const index_view **view, _Atomic uint32_t **verified);
void index_take_back(PyObject *index);

#endif
