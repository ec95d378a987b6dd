"""Concurrent requests of one adapter, bounded by the tier's `connections`."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from lmcache_core.threads import started
from lmcache_core.tiers.contract import AdapterContext


class _Batch:
    """Calls that belong together. The caller and any idle worker take them one by one."""

    def __init__(self, calls: Sequence[Callable[[], Any]]) -> None:
        self._calls = calls
        self._lock = threading.Lock()
        self._next = 0
        self._left = len(calls)
        self._done = threading.Event()
        self._errors: dict[int, BaseException] = {}
        self.results: list[Any] = [None] * len(calls)

    def run_one(self) -> bool:
        """Run the next call. False: none is left to start."""
        with self._lock:
            position = self._next
            if position >= len(self._calls):
                return False
            self._next += 1
        try:
            self.results[position] = self._calls[position]()
        except BaseException as error:  # noqa: BLE001 - raised again by `wait`, in the caller's thread
            self._errors[position] = error
        with self._lock:
            self._left -= 1
            if self._left == 0:
                self._done.set()
        return True

    def wait(self) -> list[Any]:
        self._done.wait()
        if self._errors:
            raise self._errors[min(self._errors)]
        return self.results


class Parallel:
    """Runs calls on at most `connections` threads, including the caller's.

    Threads are daemons and start on demand; the caller always works too, so a busy or hung pool can make a batch slower
    but never stop it.
    """

    def __init__(self, name: str, connections: int) -> None:
        self._name = name
        self._workers_max = max(0, connections - 1)
        self._wakeup = threading.Condition()
        self._batches: deque[_Batch] = deque()
        self._idle = 0
        self._workers = 0

    def run(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        """Results in order. The first exception is raised after all calls have ended."""
        batch = _Batch(calls)
        if not calls:
            return []
        if len(calls) > 1 and self._workers_max:
            with self._wakeup:
                self._batches.append(batch)
                wanted = len(calls) - 1
                self._wakeup.notify(min(wanted, self._idle))
                for _ in range(min(wanted - self._idle, self._workers_max - self._workers)):
                    self._workers += 1
                    if started(self._work, f"tier-{self._name}-conn") is None:  # those that run do it, and this one
                        self._workers -= 1
                        break
        while batch.run_one():
            pass
        with self._wakeup:
            if batch in self._batches:
                self._batches.remove(batch)
        return batch.wait()

    def _work(self) -> None:
        while True:
            with self._wakeup:
                while not self._batches:
                    self._idle += 1
                    self._wakeup.wait()
                    self._idle -= 1
                batch = self._batches[0]
            if not batch.run_one():
                with self._wakeup:
                    if batch in self._batches:
                        self._batches.remove(batch)
            del batch  # an idle worker must not keep views of the pool alive


def adapter_context(name: str, connections: int, server: str = "") -> AdapterContext:
    """The context to build an adapter with: `factory(settings, adapter_context(name, config.connections))`."""
    return AdapterContext(
        tier=name, connections=connections, run_parallel=Parallel(name, connections).run, server=server
    )
