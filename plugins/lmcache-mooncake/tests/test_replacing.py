"""How an object is replaced, when a call of Mooncake fails at any step. Its client is a table here, whose calls fail as
told: a real master cannot be stopped between two calls of one store."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import pytest

from lmcache_mooncake.__main__ import Objects
from lmcache_mooncake.messages import BUSY, CHECKSUM_BYTES, NOT_THERE, room_bytes

AWAY = -900
ABSENT = -704
OLD, NEW = b"o" * 100, b"n" * 100
STEPS_MAX = 8


class Table:
    """As Mooncake answers: a put of a name that is there keeps the old bytes."""

    def __init__(self) -> None:
        self.names: dict[str, bytes] = {}
        self.fails_at = 0  # the number of the call that fails, from 1 on
        self.applied = False  # whether the failing call did its work, and only the answer is lost
        self.calls = 0

    def _answer(self, found: list[int], names: Sequence[str]) -> list[int]:
        return found if self.calls != self.fails_at else [AWAY] * len(names)

    def _works(self) -> bool:
        self.calls += 1
        return self.calls != self.fails_at or self.applied

    def batch_is_exist(self, names: list[str]) -> list[int]:
        self._works()
        return self._answer([int(name in self.names) for name in names], names)

    def batch_put_from(self, names: list[str], addresses: list[int], sizes: list[int], config: object) -> list[int]:
        if self._works():
            for name, address, size in zip(names, addresses, sizes, strict=True):
                self.names.setdefault(name, ctypes.string_at(address, size))
        return self._answer([0] * len(names), names)

    def batch_get_into(self, names: list[str], addresses: list[int], sizes: list[int]) -> list[int]:
        found = [self.names.get(name, b"")[:size] for name, size in zip(names, sizes, strict=True)]
        for address, content in zip(addresses, found, strict=True):
            ctypes.memmove(address, content, len(content))
        return [len(content) or ABSENT for content in found]

    def batch_remove(self, names: list[str], force: bool) -> list[int]:
        works = self._works()
        return self._answer(
            [0 if (self.names.pop(name, None) if works else name in self.names) else ABSENT for name in names], names
        )


class Cache:
    def __init__(self) -> None:
        self.table = Table()
        self.objects = Objects(self.table, None)
        self.memory = bytearray(room_bytes(len(OLD)))
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))

    def store(self, content: bytes) -> int:
        self.memory[: len(content)] = content
        return self.objects.store(["key"], self.base, [len(content)], memoryview(self.memory))[0]

    def load(self) -> bytes | int:
        self.memory[:] = bytes(len(self.memory))
        (code,) = self.objects.load(["key"], self.base, [len(OLD)], memoryview(self.memory))
        return bytes(self.memory[:code]) if code >= 0 else code


def leave(cache: Cache, before: str) -> None:
    assert cache.store(OLD) == 0
    if before == "second":
        assert cache.store(OLD) == 0
        assert list(cache.table.names) == ["key.1"]
    if before == "both":  # as a store that was killed before its removal leaves them
        cache.table.names["key.1"] = cache.table.names["key.0"]


@pytest.mark.parametrize("applied", [False, True], ids=["call lost", "answer lost"])
@pytest.mark.parametrize("step", range(1, STEPS_MAX))
@pytest.mark.parametrize("before", ["first", "second", "both"])
def test_a_store_that_is_answered_with_0_is_what_readers_see(before: str, step: int, applied: bool) -> None:
    cache = Cache()
    leave(cache, before)
    cache.table.calls, cache.table.fails_at, cache.table.applied = 0, step, applied
    code = cache.store(NEW)
    assert (code == AWAY) == (cache.table.calls >= step), "a call that failed is not passed over"
    cache.table.fails_at = 0
    assert cache.load() == NEW if code == 0 else cache.load() in (OLD, NEW)
    assert cache.store(NEW) == 0
    assert cache.load() == NEW
    assert len(cache.table.names) == 1


def test_a_name_that_somebody_else_is_storing_is_busy() -> None:
    class Busy(Table):
        def batch_is_exist(self, names: list[str]) -> list[int]:
            return [0] * len(names)

    cache = Cache()
    cache.objects = Objects(Busy(), None)
    assert cache.store(NEW) == BUSY


def test_what_is_shorter_than_a_checksum_is_damaged_and_not_read() -> None:
    cache = Cache()
    cache.table.names["key.0"] = b"x" * (CHECKSUM_BYTES - 1)
    code = cache.load()
    assert isinstance(code, int)
    assert code < 0
    assert code not in NOT_THERE
