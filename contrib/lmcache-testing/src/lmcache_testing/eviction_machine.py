"""A Hypothesis machine: compares an eviction policy with a model of what is resident and what is held."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from lmcache_core.kernel.contracts import EvictionPolicy
from lmcache_testing.cases import drawn


class Resident:
    """A strict entry: setting what is read-only for a policy raises. `looks` counts how often a property of any entry
    was read, or an entry compared or hashed: the cost of a walk, on any machine."""

    __slots__ = ("__weakref__", "_holds", "_key", "_namespace", "_nbytes", "newer", "older", "policy_data")
    looks: ClassVar[int] = 0

    def __init__(self, key: bytes, nbytes: int = 1, namespace: int = 1) -> None:
        self._key = key
        self._nbytes = nbytes
        self._namespace = namespace
        self._holds = 0
        self.older: Any = None
        self.newer: Any = None
        self.policy_data: Any = None

    @property
    def key(self) -> bytes:
        Resident.looks += 1
        return self._key

    @property
    def nbytes(self) -> int:
        Resident.looks += 1
        return self._nbytes

    @property
    def namespace(self) -> int:
        Resident.looks += 1
        return self._namespace

    @property
    def holds(self) -> int:
        Resident.looks += 1
        return self._holds

    def __hash__(self) -> int:
        Resident.looks += 1
        return object.__hash__(self)

    def __eq__(self, other: object) -> bool:
        Resident.looks += 1
        return self is other

    def hold(self, holds: int) -> None:
        """For the owner of the entry only."""
        self._holds = holds

    def __repr__(self) -> str:
        return f"<{int.from_bytes(self._key, 'big')}: {self._nbytes} bytes, {self._holds} holds>"


class EvictionMachine(RuleBasedStateMachine):
    """Inserts, uses, holds, releases, removes and evicts, in any order that the kernel allows."""

    def __init__(self, make: Callable[[], EvictionPolicy], *, never_evicts: bool = False) -> None:
        super().__init__()
        self.policy = make()
        self.never_evicts = never_evicts
        self.resident: list[Resident] = []
        self.made = 0

    @rule(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4))
    def insert(self, sizes: list[int]) -> None:
        fresh = []
        for size in sizes:
            self.made += 1
            fresh.append(Resident(self.made.to_bytes(32, "big"), size, namespace=1 + self.made % 3))
        self.policy.insert(fresh)
        self.resident += fresh

    @rule(number=st.integers(0, 5), size=st.integers(1, 9))
    def insert_again(self, number: int, size: int) -> None:
        """An evicted key comes back: a policy may remember it."""
        key = number.to_bytes(32, "big")
        if all(entry._key != key for entry in self.resident):
            entry = Resident(key, size)
            self.policy.insert([entry])
            self.resident.append(entry)

    @precondition(lambda self: self.resident)
    @rule(picks=st.lists(st.integers(0), min_size=1, max_size=6))
    def access(self, picks: list[int]) -> None:
        self.policy.access(self._picked(picks))

    @precondition(lambda self: self.resident)
    @rule(picks=st.lists(st.integers(0), min_size=1, max_size=6))
    def hold(self, picks: list[int]) -> None:
        risen = [entry for entry in self._picked(picks) if not entry._holds]
        for entry in risen:
            entry.hold(1)
        self.policy.held(risen)

    @precondition(lambda self: self.resident)
    @rule(picks=st.lists(st.integers(0), min_size=1, max_size=6))
    def release(self, picks: list[int]) -> None:
        fallen = [entry for entry in self._picked(picks) if entry._holds]
        for entry in fallen:
            entry.hold(0)
        self.policy.released(fallen)

    @precondition(lambda self: self.resident)
    @rule(picks=st.lists(st.integers(0), min_size=1, max_size=3))
    def remove(self, picks: list[int]) -> None:
        gone = self._picked(picks)
        self.policy.remove(gone)
        self.resident = [entry for entry in self.resident if entry not in gone]

    @rule(nbytes=st.integers(0, 60), evict=st.booleans())
    def victims(self, nbytes: int, evict: bool) -> None:
        named = self.policy.victims(nbytes)
        message = f"asked for {nbytes} bytes with {len(self.resident)} entries resident, it named {len(named)}"
        assert len({id(entry) for entry in named}) == len(named), f"{message}, some of them twice"
        gone = sum(entry not in self.resident for entry in named)
        assert not gone, f"{message}, {gone} of which were removed before"
        held = sum(entry.holds > 0 for entry in named)
        assert not held, f"{message}, {held} of which are held"
        if self.never_evicts:
            assert list(named) == [], f"{message}, and promises never_evicts"
            return
        loose = sum(entry.nbytes for entry in self.resident if not entry.holds)
        covered = sum(entry.nbytes for entry in named)
        assert covered >= min(nbytes, loose), f"{message} of {covered} bytes together, and {loose} bytes are not held"
        if evict:
            self.policy.remove(named)
            self.resident = [entry for entry in self.resident if entry not in named]

    def _picked(self, picks: list[int]) -> list[Resident]:
        return list({id(entry): entry for entry in (self.resident[n % len(self.resident)] for n in picks)}.values())


def run_machine(
    make: Callable[[], EvictionPolicy], *, never_evicts: bool = False, runs: int = 25, shortest: bool = True
) -> None:
    """Raises the machine's assertion with the shortest failing sequence, which may take minutes to find, or without
    `shortest` with the first one."""
    run_state_machine_as_test(
        lambda: EvictionMachine(make, never_evicts=never_evicts),  # type: ignore[arg-type]  # any callable will do, says its documentation
        settings=drawn(runs, steps=40, shortest=shortest),
    )
