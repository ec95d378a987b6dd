"""A Hypothesis machine: an adapter and a dictionary get the same calls and must give the same answers."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from lmcache_core.tiers.contract import L2Adapter, LoadItem, Result, StoreItem
from lmcache_testing import material
from lmcache_testing.cases import drawn

NAMES = st.integers(0, 5)  # few, so that objects are overwritten, deleted and asked for again
CONTENTS = st.binary(max_size=64) | st.integers(1, 5000).map(lambda number: material.content(number, number))
ROOM_BYTES = 8192


class AdapterMachine(RuleBasedStateMachine):
    """Batches of stores, loads, deletes and lookups. The keys of one run begin with `prefix`, so that runs may share a
    medium. `forgets`: the medium may drop objects by itself (it evicts, or they expire)."""

    def __init__(self, adapter: L2Adapter, prefix: bytes = b"", *, forgets: bool = False) -> None:
        super().__init__()
        self.adapter = adapter
        self.prefix = prefix
        self.forgets = forgets
        self.model: dict[bytes, bytes] = {}

    def key(self, name: int) -> bytes:
        return self.prefix + b"%d" % name

    @rule(batch=st.dictionaries(NAMES, CONTENTS, max_size=4), cut=st.integers(0, 64))
    def store(self, batch: dict[int, bytes], cut: int) -> None:
        items = [
            StoreItem(self.key(name), [memoryview(content)[:cut], memoryview(content)[cut:]])
            for name, content in batch.items()
        ]
        outcomes = self.adapter.store(items, material.soon())
        assert len(outcomes) == len(items), f"a store of {len(items)} objects gave {len(outcomes)} answers"
        for outcome in outcomes:
            material.expect_result(outcome, Result.DONE, f"asked to store {len(items)} objects in one batch")
        self.model.update({self.key(name): content for name, content in batch.items()})

    @rule(names=st.lists(NAMES, unique=True, max_size=6))
    def load(self, names: list[int]) -> None:
        targets = [bytearray(ROOM_BYTES) for _ in names]
        items = [LoadItem(self.key(name), [memoryview(target)]) for name, target in zip(names, targets, strict=True)]
        outcomes = self.adapter.load(items, material.soon())
        assert len(outcomes) == len(names), f"a load of {len(names)} objects gave {len(outcomes)} answers"
        for name, target, outcome in zip(names, targets, outcomes, strict=True):
            expected = self.model.get(self.key(name))
            if outcome.result is Result.MISS and self.forgets:
                self.model.pop(self.key(name), None)
            elif expected is None:
                material.expect_result(outcome, Result.MISS, "asked to load what is not there")
            else:
                material.expect_result(outcome, Result.DONE, f"asked to load {len(expected):,} bytes that are there")
                found = bytes(target[: outcome.nbytes])
                message = f"a load said DONE with {outcome.nbytes:,} bytes: {material.difference(found, expected)}"
                assert found == expected, message

    @rule(names=st.lists(NAMES, unique=True, max_size=6))
    def delete(self, names: list[int]) -> None:
        if self.adapter.capabilities.delete:
            material.expect_deleted(self.adapter, [self.key(name) for name in names], "some there, and some not")
            for name in names:
                self.model.pop(self.key(name), None)

    @invariant()
    def what_exists_is_what_was_stored(self) -> None:
        keys = [self.key(name) for name in range(6)]
        found = dict(zip(keys, self.adapter.exists(keys, material.soon()), strict=True))
        for key, there in found.items():
            true = key in self.model
            right = there == true or (self.forgets and not there)
            assert right, f"exists says {bool(there)} for {material.shown(key)}, and {true} is true"

    def teardown(self) -> None:
        if self.adapter.capabilities.delete:
            self.adapter.delete([self.key(name) for name in range(6)], material.soon())


def run_machine(adapter: L2Adapter, *, runs: int = 12, steps: int = 20, shortest: bool = True) -> None:
    """Compare an adapter with the dictionary. Raises the machine's assertion with the shortest failing sequence, which
    takes a while to find, or without `shortest` with the first one."""
    number = 0

    def make() -> AdapterMachine:
        nonlocal number
        number += 1
        able = adapter.capabilities
        return AdapterMachine(adapter, b"machine %d " % number, forgets=able.evicts or able.ttl)

    run_state_machine_as_test(
        make,  # type: ignore[arg-type]  # any callable will do, says its documentation
        settings=drawn(runs, steps=steps, shortest=shortest),
    )
