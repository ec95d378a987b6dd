"""A clear under way: what it took out of the table at once, and has not freed yet."""

from __future__ import annotations

from collections.abc import Iterable

from lmcache_core.kernel.answers import ClearedCount
from lmcache_core.kernel.objects import Incarnation, NamespaceTable


class Clearing:
    """The tables that one clear detached, less what it has come to since. Nobody finds any of it. Ready objects are
    still in their slots and still with the policy; what was being written or loaded is so still, and is doomed once
    the clear comes to it. `cleared` grows meanwhile, and is whole once it is `done`.
    """

    __slots__ = ("_shard", "at_s", "cleared", "done", "session_id", "tables")

    def __init__(self, tables: dict[int, NamespaceTable], at_s: float, session_id: int) -> None:
        self.tables = tables
        self.at_s = at_s
        self.session_id = session_id
        self.cleared = ClearedCount(0, 0, 0)
        self.done = False
        self._shard = 0  # of the last table: the first that may still hold something

    def find(self, namespace: int, key: bytes) -> Incarnation | None:
        """What the clear took out under this key."""
        table = self.tables.get(namespace)
        return None if table is None else table.get(key)

    def take(self, objects: Iterable[Incarnation]) -> list[Incarnation]:
        """Those of the objects that it still has; they are the caller's to free or to doom."""
        taken = []
        for item in objects:
            table = self.tables.get(item.namespace)
            if table is not None and table.get(item.key) is item:
                table.remove(item.key)
                taken.append(item)
        return taken

    def take_some(self, objects_max: int) -> list[Incarnation]:
        """The next ones; they are the caller's to free or to doom. None left: an empty list."""
        taken: list[Incarnation] = []
        tables = self.tables
        while tables and len(taken) < objects_max:
            shards = next(reversed(tables.values())).shards
            while self._shard < len(shards) and len(taken) < objects_max:
                shard = shards[self._shard]
                while shard and len(taken) < objects_max:
                    taken.append(shard.popitem()[1])
                if not shard:
                    shards[self._shard] = {}  # an emptied dictionary keeps its room
                    self._shard += 1
            if self._shard == len(shards):
                tables.popitem()
                self._shard = 0
        return taken
