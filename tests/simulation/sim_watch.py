"""What a server's L1 is asked and says, looked at from outside: the bytes are those of the incarnation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from sim_shadow import OBJECT_BYTES, Shadow
from sim_world import Broken, World

from lmcache_core.kernel.clearing import Clearing
from lmcache_core.kernel.effects import Committed
from lmcache_core.kernel.objects import Incarnation as Resident
from lmcache_core.tiers.l1 import LoadGrant, Loading, LoadWait, Named, StorePin
from lmcache_core.tiers.object.format import payload_checksum

if TYPE_CHECKING:
    from lmcache_core.server.server import Server


class Watch:
    """Of one server. What it finds stands in the world at once: the server's own code holds off what is raised."""

    def __init__(self, world: World, shadow: Shadow, server: Server) -> None:
        self._world = world
        self._shadow = shadow
        self._segment = server.parts.segment
        self._numbers: dict[tuple[int, bytes, int], int] = {}  # namespace, key, generation → which incarnation it is
        self._loads: dict[int, tuple[int, int]] = {}  # lease → namespace, clears that had begun when it was granted
        self._clears: list[int | None] = []
        l1, kernel = server.parts.l1, server.parts.kernel
        self._tell, self._pin, self._begin_load = l1._tell, l1.pin_for_store, l1.begin_load
        self._commit_load, self._begin_clear = l1.commit_load, kernel.begin_clear
        l1._tell, l1.pin_for_store, l1.begin_load = self.tell, self.pin_for_store, self.begin_load  # type: ignore[method-assign]
        l1.commit_load, kernel.begin_clear = self.commit_load, self.begin_clear  # type: ignore[method-assign]

    def bytes_at(self, offset: int) -> bytes:
        return bytes(self._segment.view(offset, OBJECT_BYTES))

    def tell(self, effect: object) -> None:
        if isinstance(effect, Committed) and not effect.loaded:
            for item in effect.objects:
                self._committed(item)
        self._tell(effect)

    def _committed(self, item: Resident) -> None:
        incarnation = self._shadow.committed(self.bytes_at(item.offset)[:16])
        self._numbers[item.namespace, item.key, item.generation] = incarnation.number

    def pin_for_store(self, namespace: int, wanted: Sequence[Named]) -> StorePin:
        pinned = self._pin(namespace, wanted)
        for (key, generation), slot in zip(wanted, pinned.slots, strict=True):
            number = self._numbers.get((namespace, key, generation))
            if slot is None or number is None:
                continue
            content = self.bytes_at(slot.offset)
            found = self._shadow.incarnation(content).number
            if found != number:
                self._broken(f"incarnation {number} was to be held for a tier, and {found} is")
            if slot.checksum and slot.checksum != payload_checksum([content]):
                self._broken(f"incarnation {number} is held for a tier with a checksum of other bytes")
        return pinned

    def begin_load(
        self,
        namespace: int,
        layout_id: int,
        keys: Sequence[bytes],
        deadline: float,
        granted: Callable[[Loading], None],
    ) -> Loading | LoadWait:
        def note(loading: Loading) -> None:
            if LoadGrant.GRANTED in loading.grants:
                self._loads[loading.lease] = (namespace, len(self._clears))

        def granted_later(loading: Loading) -> None:
            note(loading)
            granted(loading)

        answer = self._begin_load(namespace, layout_id, keys, deadline, granted_later)
        if isinstance(answer, Loading):
            note(answer)
        return answer

    def commit_load(
        self, lease: int, positions: Sequence[int], retain: bool, checksums: Sequence[int | None]
    ) -> Sequence[int]:
        ready = self._commit_load(lease, positions, retain, checksums)
        namespace, clears = self._loads[lease]
        if ready and any(cleared in (None, namespace) for cleared in self._clears[clears:]):
            self._broken("what a load brought became ready after a clear that had come in between")
        return ready

    def begin_clear(self, now: float, namespace: int | None = None, **options: Any) -> Clearing:
        self._clears.append(namespace)
        return self._begin_clear(now, namespace, **options)

    def _broken(self, said: str) -> None:
        self._world.failure = self._world.failure or Broken(said)
