"""Residents in chains by class, and the orders in which they may be evicted.

Every order is a view of the same chains: it looks at one end of each, where the entry stands that was used longest ago
of its class (or last), and says which of these goes first. So to change the order costs nothing, and loses nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heapreplace
from typing import Any, ClassVar

from lmcache_policies.chain import Chain, unlink
from lmcache_policies.expected_reuse import ExpectedReuse
from lmcache_policies.ghosts import Ghosts
from lmcache_policies.pasts import CLASSES, USES_CLASSES, Past

LAST = float(1 << 62)  # later than any time
NAMED_AHEAD_MAX = 16  # victims that one look at all classes names

Score = Callable[[Past, int], float]


class Shelf:
    """The residents of one cache. A node has `policy_data`, its `Past`, and the links of a chain.

    `once_bytes`: of residents that were not used again.
    """

    __slots__ = ("_chains", "_lanes", "_named", "_occupied", "count", "nbytes", "once_bytes")

    def __init__(self, lanes: Sequence[int] = range(CLASSES)) -> None:
        """`lanes[grade]`: the chain for a class; an order that asks for less needs fewer chains."""
        self._lanes = lanes
        self._chains = [Chain() for _ in range(max(lanes) + 1)]
        self._occupied: dict[int, Chain] = {}
        self._named = Chain()  # chosen already: they go first, unless they are used before
        self.count = 0
        self.nbytes = 0
        self.once_bytes = 0

    def add(self, node: Any) -> None:
        """A newcomer, whose past has been told of its use."""
        grade = node.policy_data.grade
        self.count += 1
        self.nbytes += node.nbytes
        if not grade % USES_CLASSES:
            self.once_bytes += node.nbytes
        self._append(node, grade)

    def use(self, node: Any, left: int) -> None:
        """A resident that was of class `left` until it was used now."""
        if node.newer is not None:
            unlink(node)
        grade = node.policy_data.grade
        if not left % USES_CLASSES and grade % USES_CLASSES:
            self.once_bytes -= node.nbytes
        self._append(node, grade)

    def drop(self, node: Any) -> None:
        if node.newer is not None:
            unlink(node)
        self.count -= 1
        self.nbytes -= node.nbytes
        if not node.policy_data.grade % USES_CLASSES:
            self.once_bytes -= node.nbytes

    def put_back(self, node: Any) -> None:
        """It was found held, and is not held any more: to the old end of its class."""
        lane = self._lanes[node.policy_data.grade]
        chain = self._chains[lane]
        chain.prepend(node)
        self._occupied[lane] = chain

    def _append(self, node: Any, grade: int) -> None:
        lane = self._lanes[grade]
        chain = self._chains[lane]
        if chain.newer is chain:
            self._occupied[lane] = chain
        chain.append(node)

    def name(self, nbytes: int, order: Order, now: int, found: list[Any]) -> int:
        """Append those that go first to `found` until `nbytes` are covered; returns the bytes still missing (≤ 0:
        none). Parks every held node that it meets (`put_back`)."""
        node = self._named.newer
        while nbytes > 0:
            if node is self._named:
                last = self._named.older
                if not self._choose(order, now):
                    break
                node = last.newer
                continue
            newer = node.newer
            if node.holds:
                unlink(node)
            else:
                found.append(node)
                nbytes -= node.nbytes
            node = newer
        return nbytes

    def _choose(self, order: Order, now: int) -> bool:
        """Name some more. False: there are no more."""
        order.begin(self)
        score, newest = order.score, order.newest
        heads = []
        for lane, chain in list(self._occupied.items()):
            node = _end(chain, newest)
            if node is None:
                del self._occupied[lane]
            else:
                heads.append((score(node.policy_data, now), lane))
        if not heads:
            return False
        heapify(heads)
        named = self._named
        for _ in range(max(1, min(NAMED_AHEAD_MAX, self.count // 32))):
            lane = heads[0][1]
            chain = self._chains[lane]
            node = chain.older if newest else chain.newer
            unlink(node)
            named.append(node)
            following = _end(chain, newest)
            if following is not None:
                heapreplace(heads, (score(following.policy_data, now), lane))
            else:
                heappop(heads)
                if not heads:
                    break
        return True


def _end(chain: Chain, newest: bool) -> Any:
    """The first node from that end that is not held; those that are, are parked. None: there is none."""
    while True:
        node = chain.older if newest else chain.newer
        if node is chain:
            return None
        if not node.holds:
            return node
        unlink(node)


class Order(ABC):
    """What goes first: the least score. `newest`: it looks at those of each class that were used last."""

    name = ""
    newest = False
    doubt = 0.0  # standard deviations more that it must lead by, and that another need not lead it by
    lanes: ClassVar[Sequence[int]] = (0,) * CLASSES  # those that a shelf of its own needs

    def begin(self, shelf: Shelf) -> None:  # noqa: B027
        """Scores are about to be asked for."""

    @abstractmethod
    def score(self, past: Past, now: int) -> float:
        """The least one goes first. `now`: the time, as the pasts count it."""

    def came(self, past: Past, nbytes: int) -> None:  # noqa: B027
        """A shadow cache did not have this one."""

    def left(self, past: Past, nbytes: int) -> None:  # noqa: B027
        """A shadow cache has evicted this one."""


class LruOrder(Order):
    """What was used longest ago."""

    name = "lru"

    def score(self, past: Past, now: int) -> float:
        return past.last


class LrukOrder(Order):
    """What was used once, then what has the oldest second-to-last use."""

    name = "lruk"
    lanes = tuple(grade // USES_CLASSES for grade in range(CLASSES))

    def score(self, past: Past, now: int) -> float:
        return past.last - past.gap if past.uses else past.last - LAST


class MruOrder(Order):
    """What was used last."""

    name = "mru"
    newest = True
    doubt = 2.0  # right for loops, and very wrong for anything else

    def score(self, past: Past, now: int) -> float:
        return -past.last


class ReuseOrder(Order):
    """What is expected to give the fewest hits for the time that it stays."""

    name = "reuse"
    lanes = range(CLASSES)

    def __init__(self, expected: ExpectedReuse) -> None:
        self._expected = expected
        self._rates = expected.rates

    def score(self, past: Past, now: int) -> float:
        age = (now - past.last).bit_length()
        rates = self._rates[past.grade]
        return rates[age] if age < len(rates) else rates[-1]


class ArcOrder(Order):
    """Divides a store between what was used once and what was used again; its shadow learns the division.

    Source: as `ArcPolicy`. The order of the store itself has the shadow's division, by `share`.
    """

    name = "arc"
    lanes = tuple(min(1, grade % USES_CLASSES) for grade in range(CLASSES))

    def __init__(self, teacher: ArcOrder | None = None) -> None:
        self._teacher = teacher
        self.capacity_bytes = 0
        self._target_bytes = 0
        self._gone_once = Ghosts()
        self._gone_again = Ghosts()
        self._once_first = True
        self._nbytes = 0
        self._once_bytes = 0

    @property
    def share(self) -> float:
        """Of the capacity, for what was used once."""
        return self._target_bytes / self.capacity_bytes if self.capacity_bytes else 0.0

    def begin(self, shelf: Shelf) -> None:
        share = self.share if self._teacher is None else self._teacher.share
        self._once_first = shelf.once_bytes > share * shelf.nbytes
        self._nbytes, self._once_bytes = shelf.nbytes, shelf.once_bytes

    def score(self, past: Past, now: int) -> float:
        return past.last - LAST if (past.uses == 0) is self._once_first else past.last

    def came(self, past: Past, nbytes: int) -> None:
        once, again = self._gone_once, self._gone_again
        once_bytes, again_bytes = max(1, once.nbytes), max(1, again.nbytes)
        if once.take_fingerprint(past.number) is not None:
            step = nbytes * max(1, again_bytes // once_bytes)
            self._target_bytes = min(self.capacity_bytes, self._target_bytes + step)
        elif again.take_fingerprint(past.number) is not None:
            self._target_bytes = max(0, self._target_bytes - nbytes * max(1, once_bytes // again_bytes))

    def left(self, past: Past, nbytes: int) -> None:
        gone = self._gone_again if past.uses else self._gone_once
        gone.put_fingerprint(past.number, nbytes)
        once, again = self._gone_once, self._gone_again
        once.trim(max(0, self.capacity_bytes - self._once_bytes))
        again.trim(max(0, 2 * self.capacity_bytes - self._nbytes - once.nbytes))
