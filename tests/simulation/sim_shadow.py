"""What is true, whoever believes what: who is inside which bytes of which pool, and which bytes may be read.

Each object that is written is an incarnation with a number of its own, and every 16 bytes of it carry key and number.
"""

from __future__ import annotations

import os
import struct
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sim_world import Broken, World

from lmcache_core.pool.layout import Layout
from lmcache_core.tiers.tier.lanes import Lane
from lmcache_core.tokens.namespace import Namespace

OBJECT_BYTES = 65536
LAYOUT = Layout("uint8", (OBJECT_BYTES,))
NAMESPACES = [Namespace(f"model {number}", LAYOUT) for number in range(2)]
_WORD = struct.Struct("<IIQ")
Place = tuple[int, int]  # inode of the segment, offset


@dataclass(eq=False)
class Incarnation:
    number: int
    namespace: int
    key: int
    writer: str
    complete: bool = False  # every byte of it has been written
    published: bool = False  # its writer has sent the commit
    committed_step: int = 0  # of the schedule, at which a server made it visible
    gone_step: int = 0  # at which a clear was answered that it may not outlive


_LOADED = Incarnation(-1, -1, -1, "a lane")


class Shadow:
    """Watches every copy into and out of pools."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._incarnations: list[Incarnation] = []
        self._writers: dict[Place, tuple[Any, Incarnation, Callable[[], bool]]] = {}
        self.server_since = 0.0  # when the server of now began: reads under leases of former ones are not protected
        self._readers: dict[Place, list[Any]] = {}
        self._last: dict[Place, Incarnation] = {}
        self._mappings: list[tuple[int, int, int]] = []  # address, length, inode
        self.reads = self.writes = 0
        self.outside = False  # there are tiers, from which what was cleared in the pool alone may come back
        self._namespaces: dict[int, int] = {}  # id → number
        self.told: set[int] = set()  # promises that somebody was told of

    def mapped(self, address: int, nbytes: int, fd: int) -> None:
        """A process maps a segment."""
        self._mappings = [
            each for each in self._mappings if each[0] + each[1] <= address or each[0] >= address + nbytes
        ]
        self._mappings.append((address, nbytes, os.fstat(fd).st_ino))
        self._mappings.sort()

    def place(self, address: int) -> Place:
        at = bisect_right(self._mappings, (address, 1 << 62, 0)) - 1
        start, nbytes, inode = self._mappings[at]
        assert start <= address < start + nbytes, "no pool is mapped there"
        return inode, address - start

    # --- bytes --------------------------------------------------------------------------------------------

    def make(self, writer: str, namespace: int, key: int) -> bytes:
        """The bytes of a new incarnation."""
        incarnation = Incarnation(len(self._incarnations), namespace, key, writer)
        self._incarnations.append(incarnation)
        return _WORD.pack(namespace, key, incarnation.number) * (OBJECT_BYTES // _WORD.size)

    def incarnation(self, content: bytes | bytearray | memoryview) -> Incarnation:
        _, _, number = _WORD.unpack_from(content)
        if number >= len(self._incarnations):
            raise Broken(f"bytes that nobody ever wrote: {bytes(content[:16]).hex()}")
        return self._incarnations[number]

    def namespaces(self, ids: Sequence[int]) -> None:
        self._namespaces = {id_: number for number, id_ in enumerate(ids)}

    def named(self, namespace: int, key: bytes) -> tuple[int, int]:
        """The numbers that stand for a namespace's id and a key."""
        return self._namespaces[namespace], int.from_bytes(key, "big")

    def committed(self, content: bytes | bytearray | memoryview) -> Incarnation:
        """A server has made it visible."""
        incarnation = self.incarnation(content)
        incarnation.committed_step = self._world.steps
        return incarnation

    def cleared(self, namespace: int | None, asked_step: int, *, tiers: bool) -> None:
        """A clear of this namespace's id (None: of all) that was asked for at that step has been answered."""
        if self.outside and not tiers:
            return
        for incarnation in self._incarnations:
            in_scope = namespace is None or incarnation.namespace == self._namespaces[namespace]
            if in_scope and 0 < incarnation.committed_step < asked_step and not incarnation.gone_step:
                incarnation.gone_step = self._world.steps

    def check(
        self,
        content: bytes | bytearray | memoryview,
        namespace: int,
        key: int,
        reader: str,
        since_step: int = 0,
    ) -> Incarnation:
        """Somebody was served this for that key, and had begun to ask at that step."""
        self.reads += 1
        incarnation = self.incarnation(content)
        if bytes(content) != bytes(content[:16]) * (OBJECT_BYTES // 16):
            raise Broken(f"{reader} read torn bytes of key {key}: incarnation {incarnation.number} and others")
        if (incarnation.namespace, incarnation.key) != (namespace, key):
            raise Broken(
                f"{reader} read key {incarnation.key} of namespace {incarnation.namespace} under {key} of {namespace}"
            )
        if not incarnation.published:
            raise Broken(f"{reader} read incarnation {incarnation.number} of key {key}, which was never committed")
        if 0 < incarnation.gone_step < since_step:
            raise Broken(f"{reader} read incarnation {incarnation.number} of key {key}, which had been cleared")
        return incarnation

    # --- who is where -------------------------------------------------------------------------------------

    def begin_write(
        self,
        who: str,
        address: int,
        content: bytes | bytearray | memoryview,
        able: Callable[[], bool] = lambda: True,
    ) -> Place:
        """`able`: whether it can still touch them; a view that has been taken from it cannot."""
        place = self.place(address)
        self._nobody_else(who, place, "to write")
        self._writers[place] = (who, self.incarnation(content), able)
        self.writes += 1
        return place

    def end_write(self, who: str, place: Place, *, complete: bool) -> None:
        if place not in self._writers or self._writers[place][0] is not who:
            return  # another has been given the slot since this one's view of it died
        incarnation = self._writers.pop(place)[1]
        incarnation.complete = complete
        self._last[place] = incarnation

    def begin_read(self, who: str, address: int) -> Place:
        place = self.place(address)
        if place in self._writers:
            writer, incarnation, _ = self._writers[place]
            raise Broken(f"{who} was given a slot to read while {writer} writes {incarnation.number} to it")
        self._readers.setdefault(place, []).append(who)
        return place

    def end_read(self, who: str, place: Place) -> None:
        readers = self._readers.get(place, [])
        if who in readers:
            readers.remove(who)
        if not readers:
            self._readers.pop(place, None)

    def lane_begins(self, lane: Any, address: int) -> Place:
        """A tier's lane puts an object into a slot, of whatever bytes."""
        place = self.place(address)
        self._nobody_else(lane, place, "to load into")
        self._writers[place] = (lane, _LOADED, lambda: True)
        return place

    def lane_ends(self, lane: Lane, place: Place) -> None:
        if place in self._writers and self._writers[place][0] is lane:
            del self._writers[place]
            self._last.pop(place, None)

    def published(self, who: str, place: Place) -> None:
        """A commit of what is there has been sent."""
        incarnation = self._last.get(place)
        if incarnation is not None and incarnation.writer == str(who) and incarnation.complete:
            incarnation.published = True

    def forget(self, node: object) -> None:
        """A process has died: none of its threads is anywhere any more."""
        for place in [place for place, (who, *_) in self._writers.items() if who.node is node]:
            del self._writers[place]
        for place, readers in list(self._readers.items()):
            self._readers[place] = [who for who in readers if who.node is not node]
            if not self._readers[place]:
                del self._readers[place]

    @property
    def inside(self) -> int:
        """Threads that are inside a slot now."""
        return len(self._writers) + len(self._readers)

    def _nobody_else(self, who: str, place: Place, what: str) -> None:
        if place in self._writers and not self._writers[place][2]():
            del self._writers[place]
        if place in self._writers:
            writer, incarnation, _ = self._writers[place]
            raise Broken(
                f"{who} was given a slot {what} while {writer} writes incarnation {incarnation.number} to it: "
                "one slot in two hands"
            )
        for reader in self._readers.get(place, []):
            if reader.busy_since > self.server_since:
                raise Broken(f"{who} was given a slot {what} while {reader} reads it under a lease")
