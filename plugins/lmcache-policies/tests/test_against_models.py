"""Every policy against a plain model of the same rules: lists, no links, no care for speed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmcache_core.policies.contracts import EvictionPolicy
from lmcache_lab.simulation import SimulatedEntry as Block
from lmcache_policies.arc import ArcPolicy
from lmcache_policies.fifo import FifoPolicy
from lmcache_policies.lfu import LfuPolicy
from lmcache_policies.lruk import LrukPolicy
from lmcache_policies.mru import MruPolicy
from lmcache_policies.s3fifo import SECOND_CHANCES_MAX, S3FifoPolicy

KEYS = 24
CAPACITY_BYTES = 40


class Fifo:
    """The base of all: an order, what is off it for its holds (`parked`), and one way to walk candidates."""

    def __init__(self) -> None:
        self.order: list[Block] = []
        self.parked: list[Block] = []

    def insert(self, blocks: Sequence[Block]) -> None:
        self.order += blocks

    def access(self, blocks: Sequence[Block]) -> None:
        pass

    def victims(self, nbytes: int) -> list[Block]:
        return self.take(list(self.order), nbytes)

    def take(self, candidates: Sequence[Block], nbytes: int) -> list[Block]:
        """The first without holds until `nbytes` are covered; those met with holds are parked."""
        found: list[Block] = []
        for block in candidates:
            if sum(b.nbytes for b in found) >= nbytes:
                break
            if block.holds:
                self.leave(block)
                self.parked.append(block)
            else:
                found.append(block)
        return found

    def leave(self, block: Block) -> None:
        self.order.remove(block)

    def back(self, block: Block) -> None:
        self.order.insert(0, block)

    def released(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            if block in self.parked:
                self.parked.remove(block)
                self.back(block)

    def drop(self, block: Block) -> None:
        if block in self.parked:
            self.parked.remove(block)
        else:
            self.leave(block)

    def remove(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            self.drop(block)

    def resize(self, capacity: int) -> None:
        self.capacity = capacity
        self.trim()

    def trim(self) -> None:
        pass


class Mru(Fifo):
    def access(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            self.drop(block)
            self.order.append(block)

    def victims(self, nbytes: int) -> list[Block]:
        return self.take(self.order[::-1], nbytes)

    def back(self, block: Block) -> None:
        self.order.append(block)


class Lfu(Fifo):
    def __init__(self) -> None:
        super().__init__()
        self.count: dict[Block, int] = {}

    def insert(self, blocks: Sequence[Block]) -> None:
        super().insert(blocks)
        self.count.update(dict.fromkeys(blocks, 1))

    def access(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            self.drop(block)
            self.order.append(block)
            self.count[block] += 1

    def victims(self, nbytes: int) -> list[Block]:
        return self.take(sorted(self.order, key=self.count.__getitem__), nbytes)


class Segments(Fifo):
    def __init__(self, *names: str) -> None:
        super().__init__()
        self.lists: dict[str, list[Block]] = {name: [] for name in names}
        self.of: dict[Block, str] = {}  # parked ones too

    def nbytes(self, name: str) -> int:
        return sum(block.nbytes for block, where in self.of.items() if where == name)

    def move(self, block: Block, name: str) -> None:
        self.of[block] = name
        self.lists[name].append(block)

    def leave(self, block: Block) -> None:
        self.lists[self.of[block]].remove(block)

    def back(self, block: Block) -> None:
        self.lists[self.of[block]].insert(0, block)


class Arc(Segments):
    def __init__(self) -> None:
        super().__init__("once", "again")
        self.gone: dict[str, list[tuple[bytes, int]]] = {"once": [], "again": []}
        self.target = 0

    def gone_bytes(self, name: str) -> int:
        return sum(size for _, size in self.gone[name])

    def insert(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            where = "once"
            once, again = self.gone_bytes("once"), self.gone_bytes("again")
            for name, sign, ratio in (("once", 1, again // max(1, once)), ("again", -1, once // max(1, again))):
                for ghost in [g for g in self.gone[name] if g[0] == block.key]:
                    self.gone[name].remove(ghost)
                    self.target += sign * block.nbytes * max(1, ratio)
                    self.target = max(0, min(self.capacity, self.target))
                    where = "again"
            self.move(block, where)
        self.trim()

    def access(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            self.drop(block)
            self.move(block, "again")

    def remove(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            self.drop(block)
            self.gone[self.of.pop(block)].append((block.key, block.nbytes))
        self.trim()

    def trim(self) -> None:
        self.target = min(self.target, self.capacity)
        while self.gone["once"] and self.nbytes("once") + self.gone_bytes("once") > self.capacity:
            self.gone["once"].pop(0)
        while self.gone["again"] and self.gone_bytes("again") > 2 * self.capacity - sum(
            map(self.nbytes, self.lists)
        ) - self.gone_bytes("once"):
            self.gone["again"].pop(0)

    def victims(self, nbytes: int) -> list[Block]:
        found: list[Block] = []
        once, again = list(self.lists["once"]), list(self.lists["again"])
        while (once or again) and sum(b.nbytes for b in found) < nbytes:
            left = self.nbytes("once") - sum(b.nbytes for b in found if self.of[b] == "once")
            found += self.take([(once if once and (left > self.target or not again) else again).pop(0)], 1)
        return found


class S3Fifo(Segments):
    def __init__(self) -> None:
        super().__init__("small", "main", "named")
        self.uses: dict[Block, int] = {}
        self.newcomers: set[Block] = set()
        self.gone: list[tuple[bytes, int]] = []

    def insert(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            again = [ghost for ghost in self.gone if ghost[0] == block.key]
            self.gone = [ghost for ghost in self.gone if ghost not in again]
            self.uses[block] = 0
            if not again:
                self.newcomers.add(block)
            self.move(block, "main" if again else "small")

    def access(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            self.uses[block] = min(3, self.uses[block] + 1)
            if self.of[block] == "named":
                self.drop(block)
                self.newcomers.discard(block)
                self.move(block, "main")

    def remove(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            self.drop(block)
            del self.of[block]
            if block in self.newcomers:
                self.gone.append((block.key, block.nbytes))
        self.trim()

    def trim(self) -> None:
        while self.gone and sum(size for _, size in self.gone) > self.capacity - max(1, self.capacity // 10):
            self.gone.pop(0)

    def victims(self, nbytes: int) -> list[Block]:
        found = self.take(list(self.lists["named"]), nbytes)
        while sum(b.nbytes for b in found) < nbytes:
            victim = self.choose()
            if victim is None:
                break
            found.append(victim)
        return found

    def choose(self) -> Block | None:
        name = "small" if self.nbytes("small") >= max(1, self.capacity // 10) else "main"
        while self.lists["small"] or self.lists["main"]:
            if not self.lists[name]:
                name = "main" if name == "small" else "small"
            for block in self.take(self.lists[name][:1], 1):
                self.leave(block)
                if self.uses[block] >= (2 if name == "small" else 1):
                    self.uses[block] = 0 if name == "small" else self.uses[block] - 1
                    self.newcomers.discard(block)
                    self.move(block, "main")
                else:
                    self.move(block, "named")
                    return block
        return None


@dataclass(eq=False)
class Use:
    """When an object was used, among all uses. None: a walk has passed it."""

    rank: float | None


class Lru2(Fifo):
    """`order` holds what was used once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.past = 0
        self.before: dict[Block, Use] = {}
        self.last: dict[Block, Use] = {}
        self.gone: list[tuple[bytes, int, Use]] = []

    def use(self) -> Use:
        self.now += 1
        return Use(self.now)

    def placed(self, use: Use) -> Use:
        if use.rank is None:
            self.past -= 1
            use.rank = self.past
        return use

    def insert(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            ghost = next((g for g in self.gone if g[0] == block.key), None)
            if ghost is None:
                self.order.append(block)
            else:
                self.gone.remove(ghost)
                self.before[block] = self.placed(ghost[2])
            self.last[block] = self.use()

    def access(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            if block not in self.before and block not in self.parked:
                self.order.remove(block)
            if block in self.parked:
                self.parked.remove(block)
            self.before[block] = self.placed(self.last[block])
            self.last[block] = self.use()

    def leave(self, block: Block) -> None:
        if block not in self.before:
            self.order.remove(block)

    def back(self, block: Block) -> None:
        if block in self.before:
            self.placed(self.before[block])
        else:
            self.order.insert(0, block)

    def remove(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            self.drop(block)
            self.before.pop(block, None)
            self.gone.append((block.key, block.nbytes, self.last.pop(block)))
        self.trim()

    def trim(self) -> None:
        while self.gone and sum(ghost[1] for ghost in self.gone) > 4 * self.capacity:
            self.gone.pop(0)

    def victims(self, nbytes: int) -> list[Block]:
        found = self.take(list(self.order), nbytes)
        missing = nbytes - sum(block.nbytes for block in found)
        if missing <= 0:
            return found
        twice = sorted(
            (b for b, use in self.before.items() if use.rank is not None), key=lambda b: self.before[b].rank or 0
        )
        more = self.take(twice, missing)
        found += more
        enough = sum(block.nbytes for block in more) >= missing
        passed = (self.before[more[-1]].rank or 0) if enough else float("inf")
        walked = [use for _, _, use in self.gone]
        for block in self.parked:
            walked += [self.last[block], *([self.before[block]] if block in self.before else [])]
        for use in walked:
            if use.rank is not None and use.rank < passed:
                use.rank = None
        return found


PAIRS: dict[str, tuple[Any, Any]] = {
    "fifo": (FifoPolicy, Fifo),
    "mru": (MruPolicy, Mru),
    "lfu": (LfuPolicy, Lfu),
    "arc": (ArcPolicy, Arc),
    "s3fifo": (S3FifoPolicy, S3Fifo),
    "lruk": (LrukPolicy, Lru2),
}
VERBS = st.sampled_from(("insert", "access", "hold", "release", "name", "evict", "evict", "delete", "resize"))
OPERATION = st.tuples(VERBS, st.integers(0, (1 << KEYS) - 1), st.integers(1, 30))


def apply(policy: EvictionPolicy, residents: dict[int, Block], verb: str, bits: int, amount: int) -> list[bytes]:
    """One operation on a policy or a model, and the keys that it named."""
    named: list[Block] = []
    chosen = [block for number, block in residents.items() if bits >> number & 1]
    if verb == "insert":
        number = bits % KEYS
        batch = [n for n in range(number, min(KEYS, number + 1 + amount % 3)) if n not in residents]
        residents.update({n: Block(bytes([n]) * 32, 1 + (n + amount) % 7) for n in batch})
        policy.insert([residents[n] for n in batch])
    elif verb == "access":
        policy.access(chosen)
    elif verb == "hold":
        fresh = [block for block in chosen if not block.holds]
        for block in fresh:
            block.holds = 1
        getattr(policy, "held", list)(fresh)
    elif verb == "release":
        idle = [block for block in chosen if block.holds]
        for block in idle:
            block.holds = 0
        policy.released(idle)
    elif verb == "resize":
        policy.resize(amount * 3)
    else:
        named = chosen[::3] if verb == "delete" else policy.victims(amount)
        if verb != "name":
            policy.remove(named)
            for block in named:
                del residents[block.key[0]]
    return [block.key for block in named]


@pytest.mark.parametrize("name", PAIRS)
@settings(max_examples=80, deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow])
@given(operations=st.lists(OPERATION, min_size=50, max_size=150))
def test_a_policy_names_what_its_plain_model_names(name: str, operations: list[tuple[str, int, int]]) -> None:
    assert SECOND_CHANCES_MAX > 3 * KEYS  # so that the model of s3fifo needs no bound
    policy, model = (make() for make in PAIRS[name])
    seen: dict[int, Block] = {}
    modelled: dict[int, Block] = {}
    for one in (policy, model):
        one.resize(CAPACITY_BYTES)
    for operation in operations:
        assert apply(policy, seen, *operation) == apply(model, modelled, *operation), operation
    total = sum(block.nbytes for block in seen.values()) + 1
    named = policy.victims(total)
    assert [block.key for block in named] == [block.key for block in model.victims(total)]
    assert {block.key for block in named} == {block.key for block in seen.values() if not block.holds}
