"""What a pure component must not use: clocks, chance, files, sockets, locks, and hashes that differ between processes.

Every call into C is observed while a component works, including those of libraries that it uses.
"""

from __future__ import annotations

import gc
import io
import random
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date
from types import FrameType
from typing import Any

_CLOCKS = {
    name for name in dir(time) if name.partition("_")[0] in ("time", "monotonic", "perf", "process", "thread", "clock")
} | {"sleep", "localtime", "gmtime", "ctime"}  # fmt: skip
_LOCKS = type(threading.Lock()), type(threading.RLock())
_OUTSIDE = {"posix": "the system", "io": "files", "_io": "files", "_socket": "the network", "_thread": "threads"}


def impure_calls(call: Callable[[], Any]) -> list[str]:
    """What `call` used in this thread, in words, each once. Run it once before, so that imports are done."""
    found: dict[str, None] = {}

    def seen(frame: FrameType, event: str, function: Any) -> None:
        if event == "c_call" and (reason := _reason(function)):
            found[reason] = None

    before, collects = sys.getprofile(), gc.isenabled()
    gc.disable()  # otherwise finalizers and callbacks of others would run in between
    sys.setprofile(seen)
    try:
        call()
    finally:
        sys.setprofile(before)
        if collects:
            gc.enable()
    return list(found)


def _reason(function: Any) -> str:
    """Why a function is not pure; empty if it is."""
    name, owner = getattr(function, "__name__", ""), getattr(function, "__self__", None)
    module = getattr(function, "__module__", None) or getattr(owner, "__name__", "")
    if module == "time" and name in _CLOCKS:
        return f"a clock (time.{name})"
    if isinstance(owner, type) and issubclass(owner, date) and name in ("now", "utcnow", "today"):
        return f"a clock ({owner.__name__}.{name})"
    if name == "urandom" or owner is random._inst:  # the generator that a process shares
        return f"chance that nobody seeded (random.{name})"
    if isinstance(owner, _LOCKS):
        return "a lock"
    if isinstance(owner, io.IOBase) or name == "print":
        return f"a file ({name})"
    if module in _OUTSIDE and name not in ("fspath", "get_ident"):
        return f"{_OUTSIDE[module]} ({name})"
    return ""


def salted(salt: int) -> Callable[[bytes], bytes]:
    """Makes keys that are equal to the originals but hash differently, as in another process, where Python's `hash` and
    the order of sets differ."""

    class Key(bytes):
        __slots__ = ()

        def __hash__(self) -> int:
            return hash((salt, bytes.__hash__(self)))

        def __eq__(self, other: object) -> bool:
            return bytes.__eq__(self, other)

    return Key


@contextmanager
def _traced() -> Iterator[None]:
    """Python's memory is counted here, and afterwards only if it was before."""
    tracing = tracemalloc.is_tracing()
    if not tracing:
        tracemalloc.start(1)
    try:
        yield
    finally:
        if not tracing:
            tracemalloc.stop()


def kept_bytes(first: Callable[[], Any], again: Callable[[], Any]) -> int:
    """How much more Python memory is in use after `again` than after `first`."""
    with _traced():
        first()
        before = tracemalloc.get_traced_memory()[0]
        again()
        return tracemalloc.get_traced_memory()[0] - before


def peak_bytes(call: Callable[[], Any]) -> int:
    """The peak of Python memory during `call`, beyond what was in use before."""
    with _traced():
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        call()
        return tracemalloc.get_traced_memory()[1] - before
