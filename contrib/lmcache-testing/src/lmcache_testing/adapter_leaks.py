"""An adapter returns what it takes from its process: descriptors, connections, threads, memory."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from lmcache_core.errors import TierError
from lmcache_core.tiers.contract import L2Adapter, LoadItem, Result
from lmcache_testing import material
from lmcache_testing.adapter_trouble import calls_of
from lmcache_testing.contract import Contract, not_judged
from lmcache_testing.held import CYCLES, WARM, expect_level
from lmcache_testing.purity import kept_bytes
from lmcache_testing.speeds import Kit

USED_BYTES = 16 << 20


def _again(call: Callable[[], None], turns: int, own: list[int]) -> None:
    """Repeat the call, and append the memory that the process then has."""
    for _ in range(turns):
        call()
    own.append(_own_bytes())


def _own_bytes() -> int:
    """Anonymous memory of this process."""
    gc.collect()
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return sum(1024 * int(fields[1]) for fields in lines if fields[0] in ("RssAnon:", "RssShmem:"))


class LeakTests(Contract):
    """Descriptors and threads are compared between the second and the tenth cycle."""

    settle_s: ClassVar[float] = 5.0  # for a thread that must end, and a descriptor whose owner was collected

    def test_opening_and_closing_leaves_nothing_behind(self, reopen: Any) -> None:
        if reopen is None:
            not_judged("a fixture 'reopen' unlocks it")

        def cycle() -> None:
            with reopen() as fresh:
                _use(fresh)

        expect_level(cycle, 0, "opened, used and closed", self.settle_s)

    def test_use_takes_no_more_and_more(self, adapter: L2Adapter) -> None:
        # A connection pool may still grow by one or two; a real leak grows by eight.
        done = "stored, looked up, loaded, deleted and missed"
        expect_level(lambda: _use(adapter), (CYCLES - WARM) // 2 - 1, done, self.settle_s)

    def test_use_keeps_no_objects_in_memory(self, adapter: L2Adapter, kit: Kit) -> None:
        """Objects stay with the caller or the medium. Checked: Python's memory, and that of the process."""
        nbytes = material.fitting(adapter, 1 << 20)
        turns = min(512, (USED_BYTES if kit.quick else 8 * USED_BYTES) // nbytes)
        if turns * nbytes < USED_BYTES // 4 or not Path("/proc/self/status").exists():
            not_judged("objects are too small to be seen in the process's memory, or /proc is not here")
        content, target = material.content(1, nbytes), bytearray(nbytes)

        def load() -> None:
            outcome = adapter.load([LoadItem(material.key(1), [memoryview(target)])], material.soon())[0]
            material.expect_result(outcome, Result.DONE, f"asked to load an object of {nbytes:,} bytes")

        for name, call in (
            ("stored", lambda: material.expect_stored(adapter, material.key(1), content)),
            ("loaded", load),
        ):
            own: list[int] = []
            traced = kept_bytes(partial(_again, call, WARM, own), partial(_again, call, turns, own))
            more = max(traced, own[1] - own[0])
            assert more < turns * nbytes // 2, (
                f"one object of {nbytes:,} bytes was {name} {turns} times: {more:,} more bytes are in memory now"
            )

    def test_failures_leave_nothing_behind(self, unreachable: Any) -> None:
        if unreachable is None:
            not_judged("a fixture 'unreachable' unlocks it: an adapter whose medium is not there")

        def cycle() -> None:
            for name in ("store", "exists", "load", "scan", "usage"):
                with contextlib.suppress(TierError):  # the answers are tested by another claim
                    calls_of(unreachable, time.monotonic() + 5.0)[name]()

        expect_level(cycle, (CYCLES - WARM) // 2 - 1, "asked for a medium that is not there", self.settle_s)


def _use(adapter: L2Adapter) -> None:
    """Everything that opens something: hits, misses, an object that is too large for its buffers."""
    for number in range(3):
        material.expect_stored(adapter, material.key(number), material.content(number, 5000))
    keys = [material.key(number) for number in range(4)]
    adapter.exists(keys, material.soon())
    for key in keys:
        material.load(adapter, key, 5000)
    material.load(adapter, keys[0], 100)
    if adapter.capabilities.scan:
        material.scan(adapter)
    adapter.usage()
    if adapter.capabilities.delete:
        adapter.delete(keys, material.soon())
