"""Objects that were committed to the L1 and are to be stored on tiers: queued before their plan, tracked after it."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

from lmcache_core.tiers.l1 import CommittedObject, L1Port, Named

PLAN_KEYS = 64  # planned at once: larger commits are cut, so that no single plan blocks the loop
_SHARDS = 64  # a large dictionary stalls the loop when it grows, and some 100,000 objects may wait for a tier
NAMESPACE = attrgetter("namespace")


class Arrival(NamedTuple):
    """Committed objects of one namespace. `shielded`: the L1 evicts them last until they are stored."""

    objects: Sequence[CommittedObject]
    shielded: bool
    number: int = 0  # in order of arrival
    # Tier → the positions that it lacks, of objects that were committed before; None: just committed, no tier has them.
    lacking: Mapping[str, Set[int]] | None = None

    @property
    def namespace(self) -> int:
        return self.objects[0].namespace

    @property
    def keys(self) -> list[bytes]:
        return [item.key for item in self.objects]

    @property
    def names(self) -> list[Named]:
        return [item.named for item in self.objects]


class Dirty:
    """One object after its plan, with the tiers that do not have it yet."""

    __slots__ = (
        "drop",
        "epoch",
        "failed",
        "nbytes_on_tier",
        "object",
        "reached",
        "shielded",
        "targets_left",
        "tier_key",
    )

    def __init__(self, committed: CommittedObject, epoch: int, tier_key: bytes, drop: bool) -> None:
        self.object = committed
        self.epoch = epoch
        self.tier_key = tier_key
        self.targets_left = 0
        self.drop = drop
        self.failed = False
        self.reached = False  # some tier has it, or a clear removed it
        self.shielded = False
        self.nbytes_on_tier = 0  # as the last lane measured that encoded it and found no room; 0: not measured


class Going:
    """The objects that are planned for one tier, and neither stored there nor lost yet. A key may be in here more than
    once: if it is committed again while its former incarnation waits."""

    def __init__(self) -> None:
        self._shards: list[dict[bytes, int]] = [{} for _ in range(_SHARDS)]

    def add(self, tier_key: bytes) -> None:
        shard = self._shards[tier_key[0] % _SHARDS]
        shard[tier_key] = shard.get(tier_key, 0) + 1

    def end(self, tier_keys: Iterable[bytes]) -> None:
        """Count each key once less."""
        for tier_key in tier_keys:
            shard = self._shards[tier_key[0] % _SHARDS]
            left = shard.pop(tier_key, 0) - 1
            if left > 0:
                shard[tier_key] = left

    def __contains__(self, tier_key: bytes) -> bool:
        return tier_key in self._shards[tier_key[0] % _SHARDS]

    def __len__(self) -> int:
        return sum(map(len, self._shards))


class Shields:
    """Who shields an incarnation (the L1 evicts it last): first its arrival, then its `Dirty`. Each releases its own
    share. `counts`: an object that is read again comes in a second arrival, and stays shielded until both are done."""

    def __init__(self, l1: L1Port, *, counts: bool) -> None:
        self._l1 = l1
        self._takers: Counter[tuple[int, Named]] | None = Counter() if counts else None

    def take(self, namespace: int, names: Sequence[Named]) -> None:
        self._l1.shield(namespace, names)
        if self._takers is not None:
            self._takers.update((namespace, name) for name in names)

    def give_back(self, namespace: int, names: Sequence[Named]) -> None:
        if self._takers is not None:
            names = [name for name in names if self._was_last(namespace, name)]
        self._l1.unshield(namespace, names)

    def _was_last(self, namespace: int, name: Named) -> bool:
        assert self._takers is not None
        self._takers[namespace, name] -= 1
        if self._takers[namespace, name] > 0:
            return False
        del self._takers[namespace, name]
        return True


class Arrivals:
    """The queue before the plan. `objects` is the number of objects in it."""

    def __init__(self, l1: L1Port, shields: Shields) -> None:
        self._l1 = l1
        self._shields = shields
        self._queue: deque[Arrival] = deque()
        self.objects = 0
        self.last = 0  # the number of the newest arrival

    def add(self, objects: Sequence[CommittedObject], *, shields: bool) -> None:
        """`shields`: the L1 evicts them last from now on."""
        for namespace, group in groupby(objects, key=NAMESPACE):
            batch = list(group)
            for at in range(0, len(batch), PLAN_KEYS):
                self.last += 1
                arrival = Arrival(batch[at : at + PLAN_KEYS], shields, self.last)
                if shields:
                    self._shields.take(namespace, arrival.names)
                self._queue.append(arrival)
                self.objects += len(arrival.objects)

    def add_owed(self, objects: Sequence[CommittedObject], lacking: Mapping[str, Set[int]], *, shields: bool) -> None:
        """As `add`, for up to `PLAN_KEYS` objects of one namespace that some tiers lack."""
        self.last += 1
        arrival = Arrival(objects, shields, self.last, lacking)
        if shields:
            self._shields.take(arrival.namespace, arrival.names)
        self._queue.append(arrival)
        self.objects += len(objects)

    def take(self) -> Arrival:
        """Remove and return the oldest. The caller must end its shield."""
        arrival = self._queue.popleft()
        self.objects -= len(arrival.objects)
        return arrival

    def is_taken(self, number: int) -> bool:
        """Whether every arrival up to this number has left the queue."""
        return not self._queue or self._queue[0].number > number

    def take_if_gone(self) -> Arrival | None:
        """The oldest, if all its objects have left the L1."""
        oldest = self._queue[0]
        gone = self._l1.leading_gone(oldest.namespace, oldest.names)
        return self.take() if gone == len(oldest.objects) else None

    def take_all(self, namespace: int | None) -> Iterator[Arrival]:
        """Those of a namespace, or all (None); the others stay in order."""
        for _ in range(len(self._queue)):
            if namespace in (None, self._queue[0].namespace):
                yield self.take()
            else:
                self._queue.rotate(-1)

    def unshield(self, arrival: Arrival) -> None:
        """End the shield of an arrival that was taken."""
        if arrival.shielded:
            self._shields.give_back(arrival.namespace, arrival.names)

    def __bool__(self) -> bool:
        return bool(self._queue)
