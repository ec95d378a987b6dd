"""The adapter against a dictionary, with a power cut or a kill in any call."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from lmcache_block.adapter import BlockAdapter
from lmcache_block.errors import Errors
from lmcache_block.medium.opening import superblock_of
from lmcache_block.medium.store import BlockStore
from lmcache_block.settings import BlockSettings
from lmcache_core.tiers.contract import AdapterContext, LoadItem, Result, StoreItem

from .cut_medium import CutMedium, PowerCutError

EXTENT_BYTES = 256 << 10
SETTINGS = BlockSettings(path="/dev/never", extent_bytes=EXTENT_BYTES)  # type: ignore[arg-type]
KEYS = [b"key %d" % number for number in range(6)]
SIZES = (0, 1, 4096, 4097, 30_000, 65_536, 100_000)


def soon() -> float:
    return time.monotonic() + 60


class _Opened:
    """In the place of the adapter's share: a store on a medium of the tests."""

    path = "/dev/never"

    def __init__(self, store: BlockStore) -> None:
        self._store = store

    @contextmanager
    def using(self, deadline: float) -> Iterator[BlockStore]:
        yield self._store

    def opened(self) -> BlockStore:
        return self._store

    def close(self) -> None:
        """The medium outlives it."""


class BlockMachine(RuleBasedStateMachine):
    """`known`: what is there. `doubtful`: what the last batch has replaced, or would have stored: a power cut may bring
    any of it, and a crash in a call what the call was about."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[bytes, bytes] = {}
        self.doubtful: dict[bytes, set[bytes | None]] = {}
        self.number = 0

    @initialize(seed=st.integers(0, 1 << 20), extents=st.integers(1, 5))
    def begin(self, seed: int, extents: int) -> None:
        self.medium = CutMedium((2 << 20) + extents * EXTENT_BYTES, seed)
        self.open()

    def open(self) -> None:
        store = BlockStore(self.medium, superblock_of(self.medium, SETTINGS, Errors("cut", SETTINGS)))
        store.recover()
        self.adapter = BlockAdapter(
            SETTINGS, AdapterContext(tier="cut", run_parallel=lambda calls: [c() for c in calls])
        )
        self.adapter.shared.close()
        self.adapter.shared = _Opened(store)  # type: ignore[assignment]

    # --- calls ------------------------------------------------------------------------------------------------
    @rule(keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=4, unique=True), data=st.data())
    def store(self, keys: list[bytes], data: st.DataObject) -> None:
        objects = {key: self._content(data.draw(st.sampled_from(SIZES))) for key in keys}
        self._store(objects)

    def _store(self, objects: dict[bytes, bytes]) -> None:
        for key, content in objects.items():
            self.doubtful.setdefault(key, set()).update((content, self.known.get(key)))
        outcomes = self.adapter.store([StoreItem(key, [memoryview(each)]) for key, each in objects.items()], soon())
        done = {key: objects[key] for key, each in zip(objects, outcomes, strict=True) if each.result is Result.DONE}
        if done:  # with a sync before the records: only this batch is in doubt
            self.doubtful = {key: {self.known.get(key)} for key in done}
        self.known |= done
        assert all(each.result in (Result.DONE, Result.FULL) for each in outcomes)

    @rule(keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=3, unique=True))
    def delete(self, keys: list[bytes]) -> None:
        for key in keys:
            self.doubtful.setdefault(key, set()).update((None, self.known.get(key)))
        outcomes = self.adapter.delete(keys, soon())
        assert all(each.result is Result.DONE for each in outcomes)
        if any(key in self.known for key in keys):
            self.doubtful = {}
        for key in keys:
            self.known.pop(key, None)

    # --- crashes ----------------------------------------------------------------------------------------------
    @rule(calls=st.integers(0, 12), killed=st.booleans(), keys=st.lists(st.sampled_from(KEYS), min_size=1, unique=True))
    def crash_in_a_store(self, calls: int, killed: bool, keys: list[bytes]) -> None:
        objects = {key: self._content(SIZES[(self.number + calls) % len(SIZES)]) for key in keys}
        self._crash(calls, killed, lambda: self._store(objects))

    @rule(calls=st.integers(0, 6), killed=st.booleans(), keys=st.lists(st.sampled_from(KEYS), min_size=1, unique=True))
    def crash_in_a_delete(self, calls: int, killed: bool, keys: list[bytes]) -> None:
        self._crash(calls, killed, lambda: self.delete(keys))

    @rule(killed=st.booleans())
    def crash_between_calls(self, killed: bool) -> None:
        self._crash(None, killed, lambda: None)

    def _crash(self, calls: int | None, killed: bool, call: Callable[[], None]) -> None:
        self.medium.calls_left = calls
        interrupted = False
        try:
            call()
        except PowerCutError:
            interrupted = True
        if killed and not interrupted:
            self.doubtful = {}
        self.medium = self.medium.killed() if killed else self.medium.cut()
        self.open()
        for key in KEYS:
            found = self._load(key)
            possible = {self.known.get(key)} | self.doubtful.get(key, set())
            assert found in possible, f"{key!r}: {found and len(found)} bytes that nobody stored there last"
            self.known.pop(key, None)
            if found is not None:
                self.known[key] = found
        self.doubtful = {}

    # --- what holds at any time -------------------------------------------------------------------------------
    @invariant()
    def holds_what_it_should(self) -> None:
        if not hasattr(self, "adapter"):
            return
        assert {key: each for key in KEYS if (each := self._load(key)) is not None} == self.known
        assert list(self.adapter.exists(KEYS, soon())) == [key in self.known for key in KEYS]
        entries, cursor = [], None
        while cursor is not None or not entries:
            page = self.adapter.scan(cursor, soon())
            entries += [(entry.key, entry.nbytes) for entry in page.entries]
            cursor = page.cursor
            if cursor is None:
                break
        assert sorted(entries) == sorted((key, len(each)) for key, each in self.known.items())
        usage = self.adapter.usage()
        assert (usage.objects, usage.bytes_used) == (len(self.known), sum(map(len, self.known.values())))

    def _load(self, key: bytes) -> bytes | None:
        into = bytearray(max(SIZES))
        outcome = self.adapter.load([LoadItem(key, [memoryview(into)])], soon())[0]
        assert outcome.result in (Result.DONE, Result.MISS), outcome.error
        return bytes(into[: outcome.nbytes]) if outcome.result is Result.DONE else None

    def _content(self, nbytes: int) -> bytes:
        self.number += 1
        return random.Random(self.number).randbytes(nbytes)


BlockMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestBlockMachine = BlockMachine.TestCase
