"""Buffers whose memory may go away although there is a view of them.

Python keeps the memory of a view: a bytearray that has one cannot be resized. But a mapped file may be truncated, a
tensor may lie over a mapping that was closed, a sparse file may find no room for its pages, and numpy resizes an array
with views if it is told to (`resize(refcheck=False)`). Whoever touches such memory gets a signal. So before a copy the
kernel is asked to touch it, and numpy arrays are held in a way that makes numpy refuse to resize them.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import weakref
from array import array
from typing import Any, NamedTuple

from lmcache_core.errors import UsageError
from lmcache_core.native import native
from lmcache_core.tensors import TensorMemory, check_span, storage_memory

_KEPT = (bytes, bytearray, array)  # the memory of these stays as long as there is a view
_WITHOUT_FILE: dict[int, bool] = {}  # by the id of each mapping that was looked up, while it lives
_STRIDES = 0x18  # PyBUF_STRIDES: also of a view with gaps


class _PyBuffer(ctypes.Structure):
    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


def address_of(view: memoryview) -> int:
    """The address of a buffer's first item, also of a read-only one. The caller keeps `view` while it uses it."""
    found = _PyBuffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(view), ctypes.byref(found), ctypes.c_int(_STRIDES))
    try:
        return int(found.buf or 0)
    finally:
        ctypes.pythonapi.PyBuffer_Release(ctypes.byref(found))


class HeldBuffer(NamedTuple):
    """A view, and what keeps numpy from resizing the arrays that it is of: numpy refuses while there is a weak
    reference. `stays`: its memory cannot go away while this is held."""

    view: memoryview
    ties: tuple[Any, ...]
    stays: bool


def held(view: memoryview) -> memoryview | HeldBuffer:
    """What to keep for as long as the view's address is used: the view itself, if its memory stays with it."""
    owner: Any = view.obj
    if _stays(owner):
        return view
    ties = []
    while hasattr(type(owner), "__array_interface__"):
        ties.append(weakref.ref(owner))
        base = owner.base
        if base is None:
            return HeldBuffer(view, tuple(ties), bool(owner.flags.owndata))
        owner = base.obj if type(base) is memoryview else base
    return HeldBuffer(view, tuple(ties), _stays(owner))


def _stays(owner: object) -> bool:
    """Whether the memory of this object stays as long as there is a view of it."""
    return type(owner) in _KEPT or (type(owner) is mmap.mmap and _has_no_file(owner))


def _has_no_file(mapping: mmap.mmap) -> bool:
    """Whether nobody can take its memory away: Python does not close or resize a mapping that has views, and there is
    no file to truncate. Looked up once for each mapping, as the list of all takes tens of microseconds: a program that
    later protects its pages, or maps something over them, past Python is not noticed."""
    known = _WITHOUT_FILE.get(id(mapping))
    if known is None:
        with memoryview(mapping) as whole:
            known = _WITHOUT_FILE[id(mapping)] = _is_anonymous(address_of(whole), whole.nbytes)
        weakref.finalize(mapping, _WITHOUT_FILE.pop, id(mapping), None).atexit = False
    return known


def _is_anonymous(address: int, nbytes: int) -> bool:
    """Whether these bytes are mapped from no file, and may be read. False where the system does not tell."""
    end = address + nbytes
    try:
        with open("/proc/self/maps", "rb") as maps:
            for line in maps:
                bounds, may, _, _, inode = line.split(maxsplit=5)[:5]
                first, last = (int(each, 16) for each in bounds.split(b"-"))
                if first <= address < last:
                    if inode != b"0" or not may.startswith(b"r"):
                        return False
                    address = last
                if address >= end:
                    return True
    except OSError:
        return False
    return False


def may_vanish(owner: Any) -> bool:
    """Whether `first_unreachable` is due before a copy. `owner`: what `held` returned, or a tensor's storage."""
    if type(owner) is HeldBuffer:
        return not owner.stays
    # What torch has allocated for itself stays. What others gave it, and what is mapped from a file or shared, may not.
    return type(owner) is not memoryview and (owner.is_shared() or not owner.resizable())


def first_unreachable(addresses: array[int], nbytes: int, *, writes: bool = False) -> int:
    """The position of the first of these objects that cannot be read (with `writes`: written); -1: none. Changes no
    byte. Allocates the pages that the copy would allocate."""
    way = _first_unreachable_plainly if native is None else native.unreachable
    return way(addresses, nbytes, writes)


def _first_unreachable_plainly(addresses: array[int], nbytes: int, writes: bool) -> int:
    return next((at for at, each in enumerate(addresses) if nbytes and not _reaches(each, nbytes, writes)), -1)


def check_reachable(name: str, address: int, nbytes: int) -> None:
    """Raises `UsageError` if a buffer that is about to be read is not there any more."""
    if first_unreachable(array("Q", [address]), nbytes) >= 0:
        raise unreachable(name)


def check_tensor(given: Any, name: str) -> TensorMemory:
    """The memory of a tensor that torch is about to read. Raises `UsageError` if some of it is not there."""
    found = storage_memory(given, name)
    nbytes = check_span(found, name)
    if nbytes and found.address and may_vanish(found.tensor.untyped_storage()):
        check_reachable(name, found.address, nbytes)
    return found


def unreachable(name: str, *, writes: bool = False) -> UsageError:
    """The error for memory that `first_unreachable` has found."""
    what = ("written", " or is read-only") if writes else ("read", "")
    return UsageError(
        f"{name} has memory that cannot be {what[0]}: its mapping was closed{what[1]}, its file was truncated, or its "
        "file system has no room for it; pass memory that is there"
    )


def _reaches(address: int, nbytes: int, writes: bool) -> bool:
    """As `reaches` of core/native/copying.c; before Linux 5.14 every object is believed to be there."""
    libc = ctypes.CDLL(None, use_errno=True)
    first = address & ~(mmap.PAGESIZE - 1)
    length = ctypes.c_size_t(address + nbytes - first)
    answer = libc.madvise(ctypes.c_void_p(first), length, ctypes.c_int(23 if writes else 22))  # MADV_POPULATE_*
    return answer == 0 or ctypes.get_errno() not in (errno.EFAULT, errno.ENOMEM)
