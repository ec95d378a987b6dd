"""The nouns and verbs of these tests: numbers for keys, and what a test does with a kernel again and again."""

from __future__ import annotations

from collections.abc import Sequence

from lmcache_core.kernel import Grant, Grants, Kernel, Settled
from lmcache_core.kernel.effects import SlotsMarked
from lmcache_core.kernel.states import State

MIB = 1 << 20
WORKER, OTHER = 1, 2  # sessions
LAYOUT, BIG = 1, 2  # objects of 1 and of 2 MiB
NS, NS2 = 0xA, 0xB


def keys(*numbers: int) -> list[bytes]:
    return [number.to_bytes(32, "little") for number in numbers]


def offer(kernel: Kernel, *numbers: int, session: int = WORKER, layout: int = LAYOUT, now: float = 0.0) -> Grants:
    """prepare_store."""
    return kernel.prepare_store(session, NS, layout, keys(*numbers), now)


def store(kernel: Kernel, *numbers: int, session: int = WORKER, layout: int = LAYOUT, now: float = 0.0) -> list[int]:
    """Store whole; the offsets."""
    grants = offer(kernel, *numbers, session=session, layout=layout, now=now)
    assert not any(grants.statuses), [Grant(status).name for status in grants.statuses]
    assert set(kernel.commit_store(session, grants.lease_id, now)) == {Settled.COMMITTED}
    return list(grants.offsets)


def load(kernel: Kernel, *numbers: int, now: float = 0.0, ttl_s: float = 5.0) -> Grants:
    """A lane's prepare_store."""
    return kernel.prepare_store(0, NS, LAYOUT, keys(*numbers), now, loading=True, ttl_s=ttl_s)


def read(kernel: Kernel, *numbers: int, session: int = WORKER, now: float = 0.0) -> Grants:
    """prepare_retrieve."""
    return kernel.prepare_retrieve(session, NS, keys(*numbers), now)


def found(kernel: Kernel, *numbers: int, now: float = 0.0, namespace: int = NS) -> list[bool]:
    """What a lookup sees, by someone who holds nothing."""
    return [status == Grant.GRANTED for status in kernel.lookup(OTHER, namespace, keys(*numbers), now).statuses]


def reasons(kernel: Kernel, *numbers: int, now: float = 0.0) -> list[int]:
    return list(kernel.lookup(OTHER, NS, keys(*numbers), now).reasons)


def used(kernel: Kernel) -> int:
    """Slots of 1 MiB that are not free."""
    return kernel.usage().used_bytes // MIB


def names(statuses: Sequence[int]) -> list[str]:
    return [Grant(status).name for status in statuses]


def marks(kernel: Kernel) -> dict[int, tuple[State, int]]:
    """The slots marked since the last look: offset → state and row."""
    return {
        offset: (effect.state, effect.row)
        for effect in kernel.take_effects()
        if isinstance(effect, SlotsMarked)
        for offset in effect.offsets
    }
