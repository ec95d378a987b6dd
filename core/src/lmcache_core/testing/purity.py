"""What a pure component has no business with: clocks, chance, files, sockets, locks; and hashes that differ elsewhere.

Every call into C is seen while a component works, whoever makes it: also those of a library that it uses.
"""

from __future__ import annotations

import gc
import io
import random
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable
from datetime import date
from types import FrameType
from typing import Any

_CLOCKS = {
    name for name in dir(time) if name.partition("_")[0] in ("time", "monotonic", "perf", "process", "thread", "clock")
} | {"sleep", "localtime", "gmtime", "ctime"}  # fmt: skip
_LOCKS = type(threading.Lock()), type(threading.RLock())
_OUTSIDE = {"posix": "the system", "io": "files", "_io": "files", "_socket": "the network", "_thread": "threads"}


def impure_calls(call: Callable[[], Any]) -> list[str]:
    """What `call` asked for in this thread, in words, each once. Call it before, so that imports are done."""
    found: dict[str, None] = {}

    def seen(frame: FrameType, event: str, function: Any) -> None:
        if event == "c_call" and (words := _reason(function)):
            found[words] = None

    before, collects = sys.getprofile(), gc.isenabled()
    gc.disable()  # finalizers and callbacks of others would run in between
    sys.setprofile(seen)
    try:
        call()
    finally:
        sys.setprofile(before)
        if collects:
            gc.enable()
    return list(found)


def _reason(function: Any) -> str:
    """Why it is not pure; nothing: it is."""
    name, owner = getattr(function, "__name__", ""), getattr(function, "__self__", None)
    module = getattr(function, "__module__", None) or getattr(owner, "__name__", "")
    if module == "time" and name in _CLOCKS:
        return f"a clock (time.{name})"
    if isinstance(owner, type) and issubclass(owner, date) and name in ("now", "utcnow", "today"):
        return f"a clock ({owner.__name__}.{name})"
    if name == "urandom" or owner is random._inst:  # the one that all of a process share
        return f"chance that nobody seeded (random.{name})"
    if isinstance(owner, _LOCKS):
        return "a lock"
    if isinstance(owner, io.IOBase) or name == "print":
        return f"a file ({name})"
    if module in _OUTSIDE and name not in ("fspath", "get_ident"):
        return f"{_OUTSIDE[module]} ({name})"
    return ""


def salted(salt: int) -> Callable[[bytes], bytes]:
    """Makes keys equal to those that they are made of, with other hashes: as in another process, where Python's own
    `hash` differs, and with it the order of sets."""

    class Key(bytes):
        __slots__ = ()

        def __hash__(self) -> int:
            return hash((salt, bytes.__hash__(self)))

        def __eq__(self, other: object) -> bool:
            return bytes.__eq__(self, other)

    return Key


def kept_bytes(first: Callable[[], Any], again: Callable[[], Any]) -> int:
    """How much more memory of Python's is in use after `again` than after `first`."""
    tracing = tracemalloc.is_tracing()
    if not tracing:
        tracemalloc.start(1)
    try:
        first()
        before = tracemalloc.get_traced_memory()[0]
        again()
        return tracemalloc.get_traced_memory()[0] - before
    finally:
        if not tracing:
            tracemalloc.stop()


def peak_bytes(call: Callable[[], Any]) -> int:
    """The most memory of Python's that was in use at once during `call`, beyond what was before."""
    tracing = tracemalloc.is_tracing()
    if not tracing:
        tracemalloc.start(1)
    try:
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        call()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        if not tracing:
            tracemalloc.stop()
