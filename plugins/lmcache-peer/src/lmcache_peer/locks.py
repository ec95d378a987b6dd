"""What other nodes keep from eviction: between their lookup and their load, and while it is sent to them."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from lmcache_peer.limits import LOCK_S, LOCKS_OF_NODE_MAX
from lmcache_peer.node import Held, end


class _Lock(NamedTuple):
    held: Held
    connection: int
    until: float


class Share:
    """How much of the pool may be under way to other nodes at once. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._nbytes = 0
        self.nbytes_max = 0  # once the pool is known

    @contextmanager
    def of(self, held: Sequence[Held]) -> Iterator[list[Held]]:
        """Those that fit; the rest is given back at once, and these at the end."""
        within: list[Held] = []
        over: list[Held] = []
        with self._lock:
            for each in held:
                fits = self._nbytes + each.nbytes <= self.nbytes_max
                (within if fits else over).append(each)
                self._nbytes += each.nbytes * fits
        try:
            end(over)
            yield within
        finally:
            with self._lock:
                self._nbytes -= sum(each.nbytes for each in within)
            end(within)


class Locks:
    """For each node, by name. A lock ends when it is given back, with its connection, or by itself. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of_node: defaultdict[str, dict[bytes, list[_Lock]]] = defaultdict(dict)
        self._count: defaultdict[str, int] = defaultdict(int)
        self.nbytes = 0
        self.nbytes_max = 0  # a share of the pool, once it is known

    @property
    def objects(self) -> int:
        return sum(self._count.values())

    def keep(self, node: str, connection: int, held: Sequence[Held]) -> None:
        """These stay, as far as this node may keep that much; the rest is given back at once."""
        until, over = time.monotonic() + LOCK_S, []
        with self._lock:
            for each in held:
                if self._count[node] >= LOCKS_OF_NODE_MAX or self.nbytes + each.nbytes > self.nbytes_max:
                    over.append(each)
                    continue
                self._of_node[node].setdefault(each.name, []).append(_Lock(each, connection, until))
                self._count[node] += 1
                self.nbytes += each.nbytes
        end(over)

    def give_back(self, node: str, names: Sequence[bytes]) -> None:
        """This node has loaded these, or will not."""
        with self._lock:
            locks = self._of_node.get(node, {})
            gone = [locks[name][0] for name in dict.fromkeys(names) if name in locks]
            self._forget(node, gone)
        end([each.held for each in gone])

    def connection_ended(self, node: str, connection: int) -> None:
        """Whoever locked over it is gone, or will lock again."""
        self._end_those(node, lambda lock: lock.connection == connection)

    def expire(self) -> None:
        """End those whose time has come."""
        now = time.monotonic()
        for node in list(self._of_node):
            self._end_those(node, lambda lock: lock.until <= now)

    def _end_those(self, node: str, chosen: Callable[[_Lock], bool]) -> None:
        with self._lock:
            gone = [lock for locks in self._of_node.get(node, {}).values() for lock in locks if chosen(lock)]
            self._forget(node, gone)
        end([each.held for each in gone])

    def _forget(self, node: str, gone: Sequence[_Lock]) -> None:
        for lock in gone:
            locks = self._of_node[node][lock.held.name]
            locks.remove(lock)
            if not locks:
                del self._of_node[node][lock.held.name]
            self._count[node] -= 1
            self.nbytes -= lock.held.nbytes
        if node in self._count and not self._count[node]:
            del self._count[node]
            self._of_node.pop(node, None)
