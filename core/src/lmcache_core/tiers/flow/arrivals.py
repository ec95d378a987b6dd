"""What was committed to the L1 and is on its way to the tiers: before its plan, in order, and after it."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

from lmcache_core.tiers.l1 import CommittedObject, L1Port, Named

PLAN_KEYS = 64  # what is planned at once: larger commits are cut, so that no piece of work holds up the loop
_SHARDS = 64  # a large dictionary that grows stalls the loop: some hundred thousand objects may wait for a tier
NAMESPACE = attrgetter("namespace")


class Arrival(NamedTuple):
    """Committed objects of one namespace. `shielded`: they leave the L1 last meanwhile."""

    objects: Sequence[CommittedObject]
    shielded: bool
    number: int = 0  # they are numbered as they come

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
    """One object after its plan, which its tiers are still to get."""

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
        self.reached = False  # some tier has it, or a clear made an end of it
        self.shielded = False
        self.nbytes_on_tier = 0  # as the last lane that encoded it in vain has found; 0: none has


class Going:
    """Which objects are planned for one tier, and neither stored there nor lost for it yet. A key may be on its way
    more than once: committed again while its former incarnation waits."""

    def __init__(self) -> None:
        self._shards: list[dict[bytes, int]] = [{} for _ in range(_SHARDS)]

    def add(self, tier_key: bytes) -> None:
        shard = self._shards[tier_key[0] % _SHARDS]
        shard[tier_key] = shard.get(tier_key, 0) + 1

    def end(self, tier_keys: Iterable[bytes]) -> None:
        """Each is on its way once less."""
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
    """Who wants an incarnation to leave the L1 last: the arrival that it came in, then its `Dirty`. Each gives back
    what it took. `counts`: what is read again comes in a second arrival, and stays shielded until the last of them."""

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
    """The queue before the plan. `objects` counts what is in it."""

    def __init__(self, l1: L1Port, shields: Shields) -> None:
        self._l1 = l1
        self._shields = shields
        self._queue: deque[Arrival] = deque()
        self.objects = 0
        self.last = 0  # the number of the newest arrival

    def add(self, objects: Sequence[CommittedObject], *, shields: bool) -> None:
        """`shields`: they leave the L1 last from now on."""
        for namespace, group in groupby(objects, key=NAMESPACE):
            batch = list(group)
            for at in range(0, len(batch), PLAN_KEYS):
                self.last += 1
                arrival = Arrival(batch[at : at + PLAN_KEYS], shields, self.last)
                if shields:
                    self._shields.take(namespace, arrival.names)
                self._queue.append(arrival)
                self.objects += len(arrival.objects)

    def take(self) -> Arrival:
        """The oldest. Whoever takes it sees to it that its shield ends."""
        arrival = self._queue.popleft()
        self.objects -= len(arrival.objects)
        return arrival

    def is_taken(self, number: int) -> bool:
        """Whether nothing is left of what came up to the arrival of this number."""
        return not self._queue or self._queue[0].number > number

    def take_if_gone(self) -> Arrival | None:
        """The oldest, if the L1 has nothing of it any more."""
        oldest = self._queue[0]
        gone = self._l1.leading_gone(oldest.namespace, oldest.names)
        return self.take() if gone == len(oldest.objects) else None

    def take_all(self, namespace: int | None) -> Iterator[Arrival]:
        """Those of a namespace, or (None) of all; the others stay in their order."""
        for _ in range(len(self._queue)):
            if namespace in (None, self._queue[0].namespace):
                yield self.take()
            else:
                self._queue.rotate(-1)

    def unshield(self, arrival: Arrival) -> None:
        """Shield nothing of one that was taken."""
        if arrival.shielded:
            self._shields.give_back(arrival.namespace, arrival.names)

    def __bool__(self) -> bool:
        return bool(self._queue)
