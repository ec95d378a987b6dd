"""What a process holds: descriptors and threads, before and after an action was repeated."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from lmcache_testing.contract import not_judged

CYCLES = 10
WARM = 2  # pools open lazily: what is there after the second cycle stays
_OURS = ("kit-", "tier-", "pytest")  # threads of the kit or the kernel


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
            continue  # opened by the listing itself
        if target != f"/proc/{os.getpid()}/fd":
            kinds[target.partition(":")[0] if not target.startswith("/") else "files"] += 1
    threads = threading.enumerate()
    names = Counter(thread.name.rstrip("0123456789-_()") for thread in threads if not thread.name.startswith(_OURS))
    names["C"] = max(0, len(os.listdir("/proc/self/task")) - len(threads))  # noqa: PTH208
    return Held(kinds, names)


def expect_level(cycle: Callable[[], None], slack: int, done: str, settle_s: float) -> None:
    """Nothing grows by more than `slack` between the second and the tenth cycle; threads have `settle_s` to end."""
    if not Path("/proc/self/fd").is_dir():
        not_judged("descriptors and threads are counted in /proc, which is not here")
    for _ in range(WARM):
        cycle()
    before = held()
    for _ in range(CYCLES - WARM):
        cycle()
    end = time.monotonic() + settle_s
    while grown := {what: n for what, n in held().more_than(before).items() if n > slack}:
        more = ", ".join(f"{n} more {what}" for what, n in grown.items())
        assert time.monotonic() < end, (
            f"{done} {CYCLES - WARM} times: the process holds {more} than before, after settle_s = {settle_s:g} s"
        )
        time.sleep(0.02)
