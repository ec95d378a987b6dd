"""What an adapter takes from its process, it gives back: descriptors, connections, threads."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from lmcache_core.errors import TierError
from lmcache_core.testing import material
from lmcache_core.testing.adapter_trouble import calls_of
from lmcache_core.testing.contract import Contract, not_judged
from lmcache_core.tiers.contract import L2Adapter

CYCLES = 10
WARM = 2  # pools open lazily: what is there after the second cycle is there for good
_OURS = ("kit-", "tier-", "pytest")  # threads that are the kit's or the kernel's


class Held(NamedTuple):
    """What a process holds."""

    descriptors: Counter[str]
    threads: Counter[str]

    def more_than(self, before: Held) -> dict[str, int]:
        grown = {f"descriptors of {kind}": n for kind, n in (self.descriptors - before.descriptors).items()}
        return grown | {f"threads like {name}": n for name, n in (self.threads - before.threads).items()}


def held() -> Held:
    """By kind: files, sockets, pipes; threads by name, those of C without one."""
    gc.collect()
    kinds: Counter[str] = Counter()
    for number in os.listdir("/proc/self/fd"):  # noqa: PTH208 - names are numbers
        try:
            target = os.readlink(f"/proc/self/fd/{number}")  # noqa: PTH115
        except OSError:
            continue  # the listing's own
        if target != f"/proc/{os.getpid()}/fd":
            kinds[target.partition(":")[0] if not target.startswith("/") else "files"] += 1
    threads = threading.enumerate()
    names = Counter(thread.name.rstrip("0123456789-_()") for thread in threads if not thread.name.startswith(_OURS))
    names["C"] = max(0, len(os.listdir("/proc/self/task")) - len(threads))  # noqa: PTH208
    return Held(kinds, names)


class LeakTests(Contract):
    """Descriptors and threads are compared between the second and the tenth cycle."""

    settle_s: ClassVar[float] = 5.0  # for a thread that was told to end, and a descriptor whose owner was collected

    def test_opening_and_closing_leaves_nothing_behind(self, reopen: Any) -> None:
        if reopen is None:
            not_judged("a fixture 'reopen' unlocks it")

        def cycle() -> None:
            with reopen() as fresh:
                _use(fresh)

        self._expect_level(cycle, 0, "opened, used and closed")

    def test_use_takes_no_more_and_more(self, adapter: L2Adapter) -> None:
        # A pool of connections may still grow by one here and there; what is lost each time is lost eight times.
        self._expect_level(
            lambda: _use(adapter), (CYCLES - WARM) // 2 - 1, "stored, looked up, loaded, deleted and missed"
        )

    def test_failures_leave_nothing_behind(self, unreachable: Any) -> None:
        if unreachable is None:
            not_judged("a fixture 'unreachable' unlocks it: an adapter whose medium is not there")

        def cycle() -> None:
            for name in ("store", "exists", "load", "scan", "usage"):
                with contextlib.suppress(TierError):  # what it answers is another claim's
                    calls_of(unreachable, time.monotonic() + 5.0)[name]()

        self._expect_level(cycle, (CYCLES - WARM) // 2 - 1, "asked for a medium that is not there")

    def _expect_level(self, cycle: Callable[[], None], slack: int, done: str) -> None:
        if not Path("/proc/self/fd").is_dir():
            not_judged("descriptors and threads are counted in /proc, which is not here")
        for _ in range(WARM):
            cycle()
        before = held()
        for _ in range(CYCLES - WARM):
            cycle()
        end = time.monotonic() + self.settle_s
        while grown := {what: n for what, n in held().more_than(before).items() if n > slack}:
            words = ", ".join(f"{n} more {what}" for what, n in grown.items())
            assert time.monotonic() < end, f"{done} {CYCLES - WARM} times: the process holds {words} than before"
            time.sleep(0.02)


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
