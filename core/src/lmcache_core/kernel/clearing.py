"""A clear under way: what it removed from the table at once and has not freed yet."""

from __future__ import annotations

from collections.abc import Iterable

from lmcache_core.kernel.answers import ClearedCount
from lmcache_core.kernel.objects import Incarnation, NamespaceTable


class Clearing:
    """The tables that one clear detached, less what it has processed since. Nobody can find any of it. Ready objects
    are still in their slots and known to the policy. What is being written or loaded goes on, and is doomed when the
    clear reaches it. `cleared` grows meanwhile, and is complete once the clear is `done`.
    """

    __slots__ = ("_shard", "at_s", "cleared", "done", "session_id", "tables")

    def __init__(self, tables: dict[int, NamespaceTable], at_s: float, session_id: int) -> None:
        self.tables = tables
        self.at_s = at_s
        self.session_id = session_id
        self.cleared = ClearedCount(0, 0, 0)
        self.done = False
        self._shard = 0  # of the last table: the first shard that may still hold something

    def find(self, namespace: int, key: bytes) -> Incarnation | None:
        """What the clear removed under this key."""
        table = self.tables.get(namespace)
        return None if table is None else table.get(key)

    def take(self, objects: Iterable[Incarnation]) -> list[Incarnation]:
        """Those of the objects that it still has; the caller frees or dooms them."""
        taken = []
        for item in objects:
            table = self.tables.get(item.namespace)
            if table is not None and table.get(item.key) is item:
                table.remove(item.key)
                taken.append(item)
        return taken

    def take_some(self, objects_max: int) -> list[Incarnation]:
        """The next objects; the caller frees or dooms them. Empty if none are left."""
        taken: list[Incarnation] = []
        tables = self.tables
        while tables and len(taken) < objects_max:
            shards = next(reversed(tables.values())).shards
            while self._shard < len(shards) and len(taken) < objects_max:
                shard = shards[self._shard]
                while shard and len(taken) < objects_max:
                    taken.append(shard.popitem()[1])
                if not shard:
                    shards[self._shard] = {}  # an emptied dictionary would keep its memory
                    self._shard += 1
            if self._shard == len(shards):
                tables.popitem()
                self._shard = 0
        return taken
