"""Any sequence of operations, through several handles, against a dict; and through other processes."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from typing import ClassVar

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule
from lmcache_l0 import SharedCache
from lmcache_l0.errors import TableFullError

SLOTS = 12
KEYS = st.sampled_from([f"key {i}".encode() * (1 + i % 3) for i in range(16)])
VALUES = st.binary(max_size=100)


class TableAgainstDict(RuleBasedStateMachine):
    """Two handles of this process, of a table whose slots share their buffers."""

    sizes: ClassVar[dict[str, int]] = {"spares": 1}
    tickets: Bundle[tuple[bytes, int, int]] = Bundle("tickets")

    def __init__(self) -> None:
        super().__init__()
        self.path = f"/dev/shm/l0-model-{os.getpid()}-{id(self)}"
        self.handles = [SharedCache(self.path, hash_slots=SLOTS, max_value_size=100, **self.sizes)]
        self.handles.append(SharedCache(self.path))
        self.model: dict[bytes, bytes] = {}
        self.touched: dict[bytes, int] = {}
        self.turn = 0

    def handle(self) -> SharedCache:
        self.turn += 1
        return self.handles[self.turn % 2]

    def touch(self, key: bytes) -> None:
        self.touched[key] = self.touched.get(key, 0) + 1

    @rule(key=KEYS, value=VALUES)
    def set(self, key: bytes, value: bytes) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                self.handle().set(key, value)
            except TableFullError:
                assert key not in self.model
                assert len(self.model) == SLOTS
                return
        self.touch(key)
        self.model[key] = value

    @rule(key=KEYS)
    def delete(self, key: bytes) -> None:
        assert self.handle().delete(key) == (self.model.pop(key, None) is not None)
        self.touch(key)

    @rule(target=tickets, key=KEYS)
    def ticket(self, key: bytes) -> tuple[bytes, int, int]:
        return key, self.handle().ticket(key), self.touched.get(key, 0)

    @rule(ticket=tickets, value=VALUES)
    def insert(self, ticket: tuple[bytes, int, int], value: bytes) -> None:
        key, number, touched = ticket
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                stored = self.handle().insert(key, value, number)
            except TableFullError:
                assert len(self.model) == SLOTS
                return
        if stored:  # it may be refused for a neighbour's sake, but never accepted late
            assert key not in self.model
            assert touched == self.touched.get(key, 0)
            self.model[key] = value
            self.touch(key)

    @rule(keys=st.lists(KEYS, max_size=20))
    def get_many(self, keys: list[bytes]) -> None:
        assert self.handle().get_many(keys) == [self.model.get(key) for key in keys]

    @rule(pairs=st.lists(st.tuples(KEYS, VALUES), max_size=4))
    def set_many(self, pairs: list[tuple[bytes, bytes]]) -> None:
        if len({*self.model, *(key for key, _ in pairs)}) > SLOTS:
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.handle().set_many(pairs)
        for key, value in pairs:
            self.touch(key)
            self.model[key] = value

    @rule()
    def attach_again(self) -> None:
        self.handles.pop(0).close()
        self.handles.append(SharedCache(self.path))

    @invariant()
    def both_handles_hold_the_model(self) -> None:
        for handle in self.handles:
            assert dict(handle.items()) == self.model
            assert len(handle) == len(self.model)
            assert all(handle.get(key) == value for key, value in self.model.items())

    def teardown(self) -> None:
        self.handles[0].unlink()
        for handle in self.handles:
            handle.close()


TableAgainstDict.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None, derandomize=True)
TestTableAgainstDict = TableAgainstDict.TestCase


class TableOfVersionsAgainstDict(TableAgainstDict):
    """The same where every key has buffers of its own."""

    sizes: ClassVar[dict[str, int]] = {"versions": 1}


TableOfVersionsAgainstDict.TestCase.settings = TableAgainstDict.TestCase.settings
TestTableOfVersionsAgainstDict = TableOfVersionsAgainstDict.TestCase


SEEN_FROM_OUTSIDE = """
import sys
from lmcache_l0 import SharedCache
cache = SharedCache(sys.argv[1])
print(sorted(cache.items()))
cache.set("from the child", cache.get("0"))
cache.delete("1")
"""


def test_an_unrelated_process_sees_the_same_and_writes_back(make):
    cache = make()
    model = {f"{i}".encode(): os.urandom(i) for i in range(30)}
    cache.set_many(model)
    child = subprocess.run(
        [sys.executable, "-c", SEEN_FROM_OUTSIDE, cache.path], capture_output=True, text=True, check=True, timeout=60
    )
    assert child.stdout.strip() == str(sorted(model.items()))
    model[b"from the child"] = model[b"0"]
    del model[b"1"]
    assert dict(cache.items()) == model


def test_a_forked_child_sees_the_same_and_writes_back(make):
    cache = make()
    model = {f"{i}".encode(): os.urandom(i) for i in range(30)}
    cache.set_many(model)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            if dict(cache.items()) == model:
                cache.set("from the child", model[b"0"])
                cache.delete("1")
                status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    model[b"from the child"] = model[b"0"]
    del model[b"1"]
    assert dict(cache.items()) == model
