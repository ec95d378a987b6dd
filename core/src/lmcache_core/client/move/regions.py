"""An engine's registered memory: regions of strided pages, in groups that may share memory."""

from __future__ import annotations

import math
import re
import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from operator import index as whole
from typing import Any, NamedTuple

from lmcache_core.buffers import address_of, first_unreachable, held, may_vanish
from lmcache_core.devices.contract import Device
from lmcache_core.devices.cuda import allocation_at, device_at
from lmcache_core.errors import StaleRegionError, UsageError
from lmcache_core.tensors import is_tensor, storage_memory
from lmcache_core.tokens.namespace import Namespace

DEVICES = ("cpu", "pinned", "cuda")
_DLPACK_HOST = (1, 3)  # kDLCPU and kDLCUDAHost
_DLPACK_CUDA = (2,)  # kDLCUDA


@dataclass(frozen=True)
class Region:
    """Pages of `page_bytes` each, `page_stride` bytes apart; the first starts `offset` bytes after the start of
    `buffer`.

    `buffer`: a torch tensor (its storage counts, from its first element on, so it may be a strided view), anything with
    a contiguous buffer (numpy, bytearray, mmap, memoryview) or a contiguous `__cuda_array_interface__`, or anything
    with DLPack. The region keeps it alive. `device`: "cpu"; "pinned" for host memory that is registered with CUDA,
    which is copied in the same way; "cuda" for memory of any GPU.
    """

    buffer: Any
    offset: int
    page_bytes: int
    page_stride: int
    pages: int
    device: str = "cpu"


@dataclass(frozen=True)
class PageGroup:
    """Regions that are read and written together: an object of `namespace` consists of `pages_per_object` pages from
    each region in order. Its layout has exactly that many bytes.

    All regions have the same number of pages; a page id stands for one page in each of them. `null_page`: an id that
    stands for no page and is never read or written.
    """

    namespace: Namespace
    regions: Sequence[Region]
    pages_per_object: int
    null_page: int | None = None

    @property
    def pages(self) -> int:
        """The number of pages in each region."""
        return self.regions[0].pages

    @property
    def object_bytes(self) -> int:
        """The size of one object: all its pages in all regions."""
        return self.pages_per_object * sum(region.page_bytes for region in self.regions)


class Place(NamedTuple):
    """Where a region is. `owner` keeps the memory alive."""

    base: int
    page_bytes: int
    page_stride: int
    pages: int
    readonly: bool
    owner: Any

    @property
    def end(self) -> int:
        """The address after its last page."""
        return self.base + (self.pages - 1) * self.page_stride + self.page_bytes


Memory = Callable[[str, Any], tuple[int, int, bool, Any]]
"""Where a region's buffer is: of its name (for errors) and the buffer the address, the length in bytes, whether it is
read-only, and what keeps it alive."""


class GroupPages(NamedTuple):
    """Pages of one group, by id: int64, as an array or its bytes."""

    group: int
    ids: bytes | array[int]


class RegionTables(NamedTuple):
    """Groups with their places, and how they share memory. `alias`: groups with the same number are known to share
    exactly the pages of equal ids; `exact`: whether two pages of different groups share memory is determined by their
    places. `device`: of all the memory; None: host memory."""

    groups: tuple[PageGroup, ...]
    places: tuple[tuple[Place, ...], ...]
    alias: tuple[int, ...]
    exact: tuple[bool, ...]
    device: Device | None
    watched: tuple[tuple[str, Callable[[], object], object], ...]  # memory, and how to tell that it is unchanged
    shaky: tuple[tuple[tuple[str, Place], ...], ...]  # by group, whose memory may go away although we hold it
    allocations: array[int]  # of a device, by region, which of its allocations it is in

    @classmethod
    def of(cls, groups: Sequence[PageGroup], memory: Memory | None = None) -> RegionTables:
        """Check the groups. `memory`: for regions that are not in this process's own memory, where they are; then
        nothing is looked at there, now or later. Raises `UsageError` that names the region, the fault and the cure."""
        given = tuple(groups)
        if not given:
            raise UsageError("no groups: give at least one PageGroup")
        places = tuple(_places(number, group, memory) for number, group in enumerate(given))
        if memory is not None:
            return cls(given, places, *_sharing(places), None, (), tuple(() for _ in given), array("Q"))
        device = _device_of(given, places)
        watched = _watched(places, device is not None)
        shaky = tuple(() if device is not None else _shaky(number, own) for number, own in enumerate(places))
        flat = [] if device is None else [place for own in places for place in own]
        allocations = array("Q", [allocation_at(place.base) % 2**64 for place in flat])
        return cls(given, places, *_sharing(places), device, watched, shaky, allocations)

    def check_there(self, pages: Sequence[GroupPages] = (), *, writes: bool = False) -> None:
        """Raises `StaleRegionError` if memory was freed since registration, or these pages cannot be read (written).
        The last thing before pages are copied."""
        for name, look, seen in self.watched:
            if look() != seen:
                raise StaleRegionError(
                    f"{name}: its memory was given back, or moved, after it was registered, as that of an engine that "
                    "sleeps is: call register_pages again once it is there"
                )
        for number, ids in pages:
            for name, place in self.shaky[number]:
                _check_reachable(name, place, self.groups[number].null_page, ids, writes)

    @property
    def first_regions(self) -> list[int]:
        """The number of each group's first region among all groups' regions."""
        return [sum(len(group.regions) for group in self.groups[:number]) for number in range(len(self.groups))]

    def words(self) -> tuple[tuple[Any, ...], ...]:
        """The arguments for the extension: see `_native.PageTables`."""
        return tuple(
            (
                array("Q", [word for place in places for word in place[:3]]),
                group.pages,
                group.pages_per_object,
                group.null_page,
                alias,
                exact,
            )
            for group, places, alias, exact in zip(self.groups, self.places, self.alias, self.exact, strict=True)
        )


def _places(number: int, group: PageGroup, memory: Memory | None) -> tuple[Place, ...]:
    name = f"group {number}"
    if not group.regions:
        raise UsageError(f"{name} has no regions: give at least one")
    if type(group.pages_per_object) is not int or group.pages_per_object < 1:
        raise UsageError(f"{name}: pages_per_object is {group.pages_per_object!r}: give 1 or more")
    if group.null_page is not None and type(group.null_page) is not int:
        raise UsageError(f"{name}: null_page is {group.null_page!r}: give a page id, or None")
    places = tuple(_place(f"{name}, region {at}", region, memory) for at, region in enumerate(group.regions))
    for at, place in enumerate(places):
        if place.pages != places[0].pages:
            raise UsageError(
                f"{name}, region {at} has {place.pages} pages and region 0 has {places[0].pages}: "
                "a page id stands for one page of each region"
            )
    for left, right in _near(places):
        if _differences(places[left], places[right]) != set():
            raise UsageError(f"{name}: pages of regions {left} and {right} overlap")
    if group.object_bytes != group.namespace.layout.nbytes:
        raise UsageError(
            f"{name}: an object has {group.object_bytes:,} bytes ({group.pages_per_object} pages of each region), but "
            f"its namespace's layout {group.namespace.layout} has {group.namespace.layout.nbytes:,}: opaque pages have "
            f'Layout("uint8", ({group.object_bytes},))'
        )
    return places


def _place(name: str, region: Region, memory: Memory | None) -> Place:
    for field in ("offset", "page_bytes", "page_stride", "pages"):
        value = getattr(region, field)
        if type(value) is not int or value < (field != "offset"):
            raise UsageError(
                f"{name}: {field} is {value!r}: give a whole number of {'0' if field == 'offset' else '1'} or more"
            )
    if region.page_stride < region.page_bytes:
        raise UsageError(
            f"{name}: page_stride is {region.page_stride:,} and page_bytes {region.page_bytes:,}: pages would overlap"
        )
    _check_device(name, region)
    memory = memory or (_device_memory if region.device == "cuda" else _memory)
    address, nbytes, readonly, owner = memory(name, region.buffer)
    place = Place(address + region.offset, region.page_bytes, region.page_stride, region.pages, readonly, owner)
    if place.end > address + nbytes:
        raise UsageError(
            f"{name}: {region.pages} pages of {region.page_bytes:,} bytes at a stride of {region.page_stride:,} from "
            f"offset {region.offset:,} on end at {place.end - address:,}, and the buffer has {nbytes:,} bytes"
        )
    return place


def _check_device(name: str, region: Region) -> None:
    if region.device not in DEVICES:
        raise UsageError(f"{name}: device is {region.device!r}: give one of {', '.join(map(repr, DEVICES))}")
    if region.device == "pinned":
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_available():
            raise UsageError(f'{name}: device is "pinned", but torch with CUDA is not available: use "cpu"')
        if not getattr(region.buffer, "is_pinned", lambda: False)():
            raise UsageError(f'{name}: device is "pinned", but the buffer is not a pinned tensor: call .pin_memory()')


def _memory(name: str, buffer: Any) -> tuple[int, int, bool, Any]:
    """Address, length, whether it is read-only, and the object that keeps it alive."""
    if is_tensor(buffer):
        address, nbytes, tensor, storage = storage_memory(buffer, f"{name}: the tensor")
        if not tensor.is_cpu:
            raise UsageError(f'{name}: the tensor is on {tensor.device}: say device="cuda" for memory of a GPU')
        # The storage stays, whatever becomes of the tensor. No tensor knows whether its memory is read-only.
        last = array("Q", [address + nbytes - 1] if address and nbytes > 0 else [])
        return address, nbytes, first_unreachable(last, 1, writes=True) >= 0, storage
    try:
        view = memoryview(buffer)
    except TypeError:
        if hasattr(buffer, "__dlpack__"):
            return _memory(name, _by_dlpack(name, buffer))
        raise UsageError(
            f"{name}: the buffer is a {type(buffer).__name__}: pass a torch tensor, or an object with a buffer or "
            "DLPack"
        ) from None
    except ValueError as error:
        raise UsageError(f"{name}: the buffer cannot be used: {error}") from error
    if not view.contiguous:
        raise UsageError(f"{name}: the buffer is not contiguous: pass the whole array, with an offset")
    if "O" in re.sub(":[^:]*:", "", view.format):  # without the names of fields
        raise UsageError(f"{name}: the buffer holds Python objects: pass memory of plain bytes")
    return address_of(view) if view.nbytes else 0, view.nbytes, view.readonly, held(view)


def _device_memory(name: str, buffer: Any) -> tuple[int, int, bool, Any]:
    """The same for GPU memory."""
    if is_tensor(buffer):
        address, nbytes, tensor, storage = storage_memory(buffer, f"{name}: the tensor")
        if not tensor.is_cuda:
            raise UsageError(f'{name}: device is "cuda", and the tensor is on {tensor.device}')
        return address, nbytes, False, storage
    found = getattr(buffer, "__cuda_array_interface__", None)
    if found is None and hasattr(buffer, "__dlpack__"):
        return _device_memory(name, _by_dlpack(name, buffer, _DLPACK_CUDA))
    if found is None:
        raise UsageError(
            f'{name}: device is "cuda", and the buffer is a {type(buffer).__name__}: give a torch tensor, or something '
            "with __cuda_array_interface__ or DLPack"
        )
    try:
        item, shape = int(found["typestr"][2:]), tuple(map(whole, found["shape"]))
        address, readonly = whole(found["data"][0]), bool(found["data"][1])
        dense = tuple(item * math.prod(shape[at + 1 :]) for at in range(len(shape)))
        apart = found.get("strides") not in (None, dense)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{name}: its __cuda_array_interface__ makes no sense ({error!r}): give a tensor") from error
    if apart:
        raise UsageError(f"{name}: the buffer is not contiguous: give the array that it is a part of, with an offset")
    return address, item * math.prod(shape), readonly, buffer


def _by_dlpack(name: str, buffer: Any, kinds: Sequence[int] = _DLPACK_HOST) -> Any:
    try:
        device = whole(buffer.__dlpack_device__()[0])
    except Exception as error:  # whatever the object does
        raise UsageError(f"{name}: its DLPack names no device ({error!r}): give a tensor or an array") from error
    if device not in kinds:
        raise UsageError(
            f"{name}: DLPack says that the memory is on device {device}: give host memory, or say "
            'device="cuda" for memory of a GPU'
        )
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")  # the owner of such memory has imported one
    library = torch if kinds is _DLPACK_CUDA else torch or numpy
    if library is None:
        raise UsageError(
            f"{name}: DLPack is read by torch here, or that of host memory by numpy: import it, or give something with "
            "a buffer or __cuda_array_interface__"
        )
    try:
        return library.from_dlpack(buffer)
    except Exception as error:  # whatever the object does
        raise UsageError(f"{name}: its DLPack cannot be read ({error!r}): give a tensor or an array") from error


def _device_of(groups: Sequence[PageGroup], places: Sequence[Sequence[Place]]) -> Device | None:
    """The GPU that all regions are on, or None for host memory."""
    found = {
        device_at(place.base) if region.device == "cuda" else None
        for group, own in zip(groups, places, strict=True)
        for region, place in zip(group.regions, own, strict=True)
    }
    if len(found) > 1:
        raise UsageError("regions of one registration lie on several devices: register those of each by themselves")
    return found.pop()


def _watched(places: Sequence[Sequence[Place]], device: bool) -> tuple[tuple[str, Callable[[], object], object], ...]:
    """Once for each piece of memory. A torch storage can move; a buffer stays where it is while it is held."""
    looks: dict[int, tuple[str, Callable[[], object]]] = {}
    for number, own in enumerate(places):
        for at, place in enumerate(own):
            storage = place.owner if hasattr(place.owner, "nbytes") and hasattr(place.owner, "data_ptr") else None
            if storage is not None or device:
                start = place.base if storage is None else storage.data_ptr()
                looks.setdefault(start, (f"group {number}, region {at}", partial(_state_of, storage, start, device)))
    return tuple((name, look, look()) for name, look in looks.values())


def _shaky(number: int, places: Sequence[Place]) -> tuple[tuple[str, Place], ...]:
    """Places whose memory may go away although we hold it. Raises `StaleRegionError` if the end of one has gone."""
    found = tuple((f"group {number}, region {at}", each) for at, each in enumerate(places) if may_vanish(each.owner))
    for name, place in found:
        _check_reachable(name, place, None, array("q", [place.pages - 1]), writes=False)
    return found


def _check_reachable(name: str, place: Place, null_page: int | None, ids: bytes | array[int], writes: bool) -> None:
    numbers = array("q", ids)
    starts = [place.base + at * place.page_stride for at in numbers if 0 <= at < place.pages and at != null_page]
    if first_unreachable(array("Q", starts), place.page_bytes, writes=writes) >= 0:
        raise StaleRegionError(
            f"{name}: its memory cannot be {'written' if writes else 'read'}: its mapping was closed, its file "
            "truncated, or its file system has no room for it; call register_pages with memory that is there"
        )


def _state_of(storage: Any, start: int, device: bool) -> object:
    memory = None if storage is None else (storage.data_ptr(), storage.nbytes())
    return memory, allocation_at(start) if device else 0


# --- which pages share memory -----------------------------------------------------------------------------------


def _differences(a: Place, b: Place) -> set[int] | None:
    """The differences between ids of pages in `b` and of the pages in `a` that they share memory with; None: too many
    different ones. Empty: nothing is shared."""
    if a.base >= b.end or b.base >= a.end:
        return set()
    if a.page_stride != b.page_stride:
        return None if _meet(a, b) else set()
    stride, apart = a.page_stride, b.base - a.base
    low, high = math.floor((-b.page_bytes - apart) / stride), math.ceil((a.page_bytes - apart) / stride)
    return {
        step
        for step in range(low, high + 1)
        if -a.pages < step < b.pages and -b.page_bytes < apart + step * stride < a.page_bytes
    }


def _meet(a: Place, b: Place) -> bool:
    """Whether any page of one shares memory with any page of the other."""
    left = right = 0
    while left < a.pages and right < b.pages:
        first, second = a.base + left * a.page_stride, b.base + right * b.page_stride
        if first + a.page_bytes <= second:
            left += max(1, (second - first - a.page_bytes) // a.page_stride)
        elif second + b.page_bytes <= first:
            right += max(1, (first - second - b.page_bytes) // b.page_stride)
        else:
            return True
    return False


def _near(places: Sequence[Place]) -> Iterator[tuple[int, int]]:
    """Pairs of places that overlap: few, if regions follow each other."""
    order = sorted(range(len(places)), key=lambda at: places[at].base)
    for index, left in enumerate(order):
        for right in order[index + 1 :]:
            if places[right].base >= places[left].end:
                break
            yield (left, right) if left < right else (right, left)


def _sharing(places: Sequence[Sequence[Place]]) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    """See `RegionTables`. Groups that share pages with equal ids form one alias, if that holds for any two of them; all
    other sharing groups are compared by the places of their pages."""
    flat = [(number, place) for number, group in enumerate(places) for place in group]
    shared: dict[tuple[int, int], set[int] | None] = {}
    for left, right in _near([place for _, place in flat]):
        (mine, a), (theirs, b) = flat[left], flat[right]
        if mine != theirs:
            before, by = shared.get((mine, theirs), set()), _differences(a, b)
            shared[mine, theirs] = None if before is None or by is None else before | by
    alias = list(range(len(places)))
    for (mine, theirs), by in shared.items():
        if by == {0}:
            alias = [alias[mine] if number == alias[theirs] else number for number in alias]
    exact = [False] * len(places)
    for mine, theirs in combinations(range(len(places)), 2):
        by = shared.get((mine, theirs), set())
        if (alias[mine] == alias[theirs]) != (by == {0}) or by not in (set(), {0}):
            exact[mine] = exact[theirs] = True
    return tuple(at if exact[at] else number for at, number in enumerate(alias)), tuple(exact)
