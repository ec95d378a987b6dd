"""Bytes between the caller's tensors or buffers and the pool's slots.

The C extension copies CPU tensors and buffers, a batch in one call: with non-temporal stores and several threads if
that is faster, and with a checksum on the way if requested. Without the extension, each object is one `memmove`, which
needs neither torch nor numpy and also releases the GIL. torch copies tensors on a device.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Iterable, Sequence
from itertools import pairwise
from operator import sub
from typing import Any, Literal

import xxhash

from lmcache_core.buffers import HeldBuffer, address_of, first_unreachable, held, may_vanish, unreachable
from lmcache_core.errors import UsageError
from lmcache_core.limits import COPY_THREADS_AUTO_MAX, COPY_THREADS_MAX
from lmcache_core.native import native
from lmcache_core.pool.cores import usable_cores
from lmcache_core.pool.layout import Layout
from lmcache_core.tensors import dense_memory, is_tensor, still_there

__all__ = ["CopyThreads", "tensor_of", "threads_to_copy"]

_BYTES = ("B", "c")  # plain bytes, of layouts that no buffer format describes: uint8 and float8
# The buffer formats for each dtype. None exists for bfloat16: arrays carry it as uint16.
_FORMATS = {
    "float64": ("d",),
    "float32": ("f",),
    "float16": ("e",),
    "bfloat16": ("H",),
    "int64": ("q", "l"),
    "int32": ("i",),
    "int16": ("h",),
    "int8": ("b",),
    "bool": ("?",),
}
_HELD = (memoryview, HeldBuffer)  # what `held` returns: all else is a tensor
_addressof, _from_buffer = ctypes.addressof, ctypes.c_char.from_buffer


Span = tuple[int, Any, Any]
"""One of the caller's objects: its address on the host (0: on a device), the buffer or tensor that it is, and for a
tensor the storage, which keeps its memory.

A plain tuple: a named one takes 0.2 µs longer to make, for each object of a batch.
"""


def spans(objects: Sequence[Any], count: int, layout: Layout, *, writable: bool) -> list[Span]:
    """Check the caller's objects against the layout. Raises `UsageError` that names the position and the cure."""
    given = list(objects)  # a sequence may say one length and have another
    if len(given) != count:
        raise UsageError(f"{len(given)} objects for {count} keys: give one for each key")
    found = [_span(each, position, layout, writable) for position, each in enumerate(given)]
    if writable and found:
        _check_apart([address for address, _, _ in found], layout.nbytes)
        _check_reachable(range(count), found, layout.nbytes, writes=True)
    return found


def _check_apart(addresses: Sequence[int], nbytes: int) -> None:
    if len(addresses) == 1:
        return
    order = sorted(filter(None, addresses))
    if min(map(sub, order[1:], order), default=nbytes) < nbytes:
        near = next(before for before, after in pairwise(order) if after - before < nbytes)
        raise UsageError(
            f"object {addresses.index(near)} shares memory with another one: give each key a target of its own, since "
            "one would overwrite the other"
        )


def _check_there(slots: Sequence[tuple[int, int]], found: Sequence[Span], layout: Layout, *, writes: bool) -> None:
    """Raises `UsageError` where memory was freed or moved since `spans`: the server was asked meanwhile, and other
    threads ran."""
    for position, _ in slots:
        address, owner, _ = found[position]
        if type(owner) not in _HELD and not still_there(owner, address):
            raise UsageError(
                f"tensor {position} has moved during the call, or has less memory: keep its storage as it is until the "
                "call returns"
            )
    _check_reachable([position for position, _ in slots], found, layout.nbytes, writes=writes)


def _may_vanish(owner: Any) -> bool:
    return may_vanish(owner if type(owner) in _HELD else owner.untyped_storage())


def _check_reachable(positions: Sequence[int], found: Sequence[Span], nbytes: int, *, writes: bool) -> None:
    shaky = [
        at for at in positions if type(found[at][1]) is not memoryview and found[at][0] and _may_vanish(found[at][1])
    ]
    if shaky and (at := first_unreachable(array("Q", [found[each][0] for each in shaky]), nbytes, writes=writes)) >= 0:
        raise unreachable(f"object {shaky[at]}", writes=writes)


def _span(each: Any, position: int, layout: Layout, writable: bool) -> Span:
    if is_tensor(each):
        return _tensor_span(each, position, layout)
    try:
        view = memoryview(each)
    except TypeError:
        raise UsageError(
            f"object {position} is a {type(each).__name__}: pass a torch tensor or an object with a buffer"
        ) from None
    except (ValueError, BufferError) as error:  # an array of a type that buffers cannot express, such as bfloat16
        raise UsageError(
            f"object {position} has no buffer ({error}): view it as integers (array.view('uint16'))"
        ) from None
    if not view.c_contiguous:
        raise UsageError(f"object {position} is not contiguous: copy it first (numpy.ascontiguousarray)")
    if view.nbytes != layout.nbytes:
        raise UsageError(f"object {position} has {view.nbytes:,} bytes and its layout {layout} has {layout.nbytes:,}")
    if view.format not in _FORMATS.get(layout.dtype, _BYTES):
        raise UsageError(
            f"object {position} has items of format {view.format!r} and its layout is {layout}: convert it, say what "
            f"it is (memoryview(…).cast({_FORMATS.get(layout.dtype, _BYTES)[0]!r})), or use a uint8 layout for opaque "
            "bytes"
        )
    if view.ndim > 1 and view.itemsize == layout.itemsize and view.shape != layout.shape:
        raise UsageError(f"object {position} has shape {view.shape} and its layout is {layout}: reshape it")
    if not view.readonly:
        return _addressof(_from_buffer(view)), held(view), None  # 0.15 µs; `address_of`, which takes all, needs 0.8
    if writable:
        raise UsageError(f"object {position} is read-only: retrieve needs writable buffers")
    return address_of(view), held(view), None


def _tensor_span(given: Any, position: int, layout: Layout) -> Span:
    name = f"tensor {position}"
    address, _, tensor, storage = dense_memory(given, name)
    if (dtype := str(tensor.dtype).removeprefix("torch.")) != layout.dtype:
        raise UsageError(f"{name} is {dtype} and its layout is {layout}: convert it, or register its dtype")
    shape = tensor.shape
    if shape != layout.shape and (len(shape) > 1 or tensor.nbytes != layout.nbytes):
        raise UsageError(f"{name} has shape {tuple(shape)} and its layout is {layout}")
    return address, tensor, storage


CopyThreads = int | Literal["auto"]
_FREE = 1 << 16  # TEAM_FREE of core/native/team.h


def copying_threads(wanted: CopyThreads) -> int:
    """The extension's argument for `Client.connect(copy_threads=wanted)`. Raises `UsageError`.

    "auto": at most four, limited by the size of the job and the number of processors that are idle when it begins.
    """
    if wanted == "auto":
        return _FREE + max(1, min(COPY_THREADS_AUTO_MAX, usable_cores()))
    return threads_to_copy(wanted)


def threads_to_copy(wanted: int) -> int:
    """How many threads may copy at once: `wanted`, or a default for this machine if that is 0. Raises `UsageError`.

    The default is half of the processors available to this process, since the engine and the server need theirs; a few
    saturate any memory bus.
    """
    if not isinstance(wanted, int) or not 0 <= wanted <= COPY_THREADS_MAX:
        raise UsageError(
            f'copy_threads is {wanted!r}: use 1 to {COPY_THREADS_MAX}, 0 for half of the processors, or "auto"'
        )
    return wanted or max(1, min(COPY_THREADS_AUTO_MAX, usable_cores() // 2))


def copy_in(
    base: int,
    slots: Iterable[tuple[int, int]],
    found: Sequence[Span],
    layout: Layout,
    *,
    threads: int = 1,
    checksums: bool = False,
) -> bytes:
    """Copy the caller's objects into their slots: (position, offset from `base`) of each.

    With `checksums` returns the xxh3_64 of what was copied, a u64 for each of `slots` in order; else an empty result.
    """
    chosen = list(slots)
    _check_there(chosen, found, layout, writes=False)
    targets = array("Q", [base + offset for _, offset in chosen])
    sources = array("Q", [found[position][0] for position, _ in chosen])
    if 0 not in sources:
        return _copy(targets, sources, layout.nbytes, threads, checksums)
    for at, (position, offset) in enumerate(chosen):
        if not sources[at]:
            _slot_tensor(base + offset, layout).copy_(found[position][1].reshape(layout.shape))
    _copy(*_of_hosts(targets, sources), layout.nbytes, threads, False)
    return checksums_of(targets, layout.nbytes, threads) if checksums else b""


def copy_out(
    base: int,
    slots: Iterable[tuple[int, int]],
    found: Sequence[Span],
    layout: Layout,
    *,
    threads: int = 1,
    checksums: bool = False,
) -> array[int]:
    """Copy slots, (position, offset from `base`) of each, to the caller's objects.

    With `checksums` returns the xxh3_64 of each copy, in the order of `slots`: computed on the copy, because a slot may
    be written to at any time. Else an empty result.
    """
    chosen = list(slots)
    _check_there(chosen, found, layout, writes=True)
    sources = array("Q", [base + offset for _, offset in chosen])
    targets = array("Q", [found[position][0] for position, _ in chosen])
    if 0 not in targets:
        return array("Q", _copy(targets, sources, layout.nbytes, threads, checksums))
    on_host = [at for at, target in enumerate(targets) if target]
    sums = array("Q", bytes(8 * len(chosen) if checksums else 0))
    for at, (position, offset) in enumerate(chosen):
        if not targets[at]:
            slot, owner = _slot_tensor(base + offset, layout), found[position][1]
            if checksums:  # device memory is not read back for it
                slot = slot.clone()
                sums[at] = array("Q", checksums_of(array("Q", [slot.data_ptr()]), layout.nbytes, threads))[0]
            owner.copy_(slot.reshape(owner.shape))
    hosts = _copy(*_of_hosts(targets, sources), layout.nbytes, threads, checksums)
    for at, checksum in zip(on_host, array("Q", hosts), strict=False):
        sums[at] = checksum
    return sums


def _of_hosts(targets: array[int], sources: array[int]) -> tuple[array[int], array[int]]:
    """The pairs in which neither side is on a device."""
    pairs = [(target, source) for target, source in zip(targets, sources, strict=True) if target and source]
    return array("Q", [target for target, _ in pairs]), array("Q", [source for _, source in pairs])


def _copy(targets: array[int], sources: array[int], nbytes: int, threads: int, checksums: bool) -> bytes:
    if not targets:
        return b""
    way = _copy_plainly if native is None else native.copy_many
    return way(targets, sources, nbytes, threads, checksums) or b""


def checksums_of(addresses: array[int], nbytes: int, threads: int = 1) -> bytes:
    """The xxh3_64 of `nbytes` at each address, as u64."""
    way = _checksums_plainly if native is None else native.checksum_many
    return way(addresses, nbytes, threads)


def _copy_plainly(targets: array[int], sources: array[int], nbytes: int, threads: int, checksums: bool) -> bytes:
    memmove = ctypes.memmove
    for target, source in zip(targets, sources, strict=True):
        memmove(target, source, nbytes)
    return _checksums_plainly(targets, nbytes, threads) if checksums else b""


def _checksums_plainly(addresses: array[int], nbytes: int, threads: int) -> bytes:
    del threads  # the fallback would need a Python thread pool for it
    kind, checksum = ctypes.c_char * nbytes, xxhash.xxh3_64_intdigest
    return array("Q", [checksum(kind.from_address(address)) for address in addresses]).tobytes()


def _slot_tensor(address: int, layout: Layout) -> Any:
    return tensor_of(memoryview((ctypes.c_char * layout.nbytes).from_address(address)).cast("B"), layout)


def tensor_of(view: memoryview, layout: Layout) -> Any:
    """A torch tensor of the layout over these bytes, without a copy. Only this function imports torch."""
    import torch

    return torch.frombuffer(view, dtype=getattr(torch, layout.dtype)).reshape(layout.shape)
