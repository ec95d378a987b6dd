"""In front of a server of lmcache-core: the objects of a host in the pool that all hosts of the node share."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

from lmcache_core import Client, Namespace, Status
from lmcache_core.errors import CacheError, DisconnectedError
from lmcache_core.guard import guarded
from lmcache_core.threads import started
from lmcache_hosts.requests import HostKey, HostObject, Request
from lmcache_hosts.tier_objects import Deadlines

__all__ = ["ServerObjects"]

log = logging.getLogger(__name__)

THREADS = 4  # each in one call of the client
WAITING_MAX = 256  # requests: beyond it the answer is no
_CLOSE_S = 5.0
_THERE = (Status.STORED, Status.EXISTS)
_FOUND = (Status.HIT, Status.GRANTED)  # by the index, or by the server

Work = Callable[[], None]


class ServerObjects:
    """As `TierObjects`, over a client. The client ends each of its calls in bounded time, with values, whether or not
    a server is there; so does this. Bytes go straight between the host's memory and the pool."""

    def __init__(self, client: Client, deadlines: Deadlines = Deadlines()) -> None:  # noqa: B008 - frozen
        self.client = client
        self.deadlines = deadlines
        self.counts: Counter[str] = Counter()
        self._calls: queue.SimpleQueue[tuple[Request, Work] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # what is called, and on which threads, is settled before it is closed or after
        self._closed = False
        self._pid = os.getpid()
        self._threads: list[threading.Thread] = []

    def store(self, objects: Sequence[HostObject], on_done: Callable[[Sequence[bool]], None] | None = None) -> Request:
        """Yes: it can be read from the pool now. Its tiers get it from there."""
        return self._ask(Request(len(objects), on_done), lambda request: self._store(objects, request))

    def load(self, objects: Sequence[HostObject], on_done: Callable[[Sequence[bool]], None] | None = None) -> Request:
        """Yes: the object's bytes are in the host's memory. No: the content of its memory is undefined."""
        return self._ask(Request(len(objects), on_done), lambda request: self._load(objects, request))

    def find(self, keys: Sequence[HostKey], on_done: Callable[[Sequence[bool]], None] | None = None) -> Request:
        """Yes: it is in the pool now. What only a tier of the server has is loaded first, for `lookup_s` at most."""
        return self._ask(Request(len(keys), on_done), lambda request: self._find(keys, request))

    def remove(self, keys: Sequence[HostKey], on_done: Callable[[Sequence[bool]], None] | None = None) -> Request:
        """Drop them from the pool and its tiers, for all hosts. Yes: it was there."""
        return self._ask(Request(len(keys), on_done), lambda request: self._remove(keys, request))

    def clear(self, namespaces: Sequence[Namespace]) -> Request:
        """Put everything of these namespaces out of reach, for all hosts and for good. One answer."""
        return self._ask(Request(1), lambda request: self._clear(namespaces, request))

    @property
    def serving(self) -> bool:
        """Whether the server answered last."""
        return not self._closed and not self.client.why_unreachable

    def status(self) -> dict[str, Any]:
        """Plain values. The server's own status is `lmcache-core status`."""
        return {"counts": dict(self.counts), "closed": self._closed, "unreachable": self.client.why_unreachable}

    def close(self, drain_s: float = _CLOSE_S) -> None:
        """End after what was asked before, for so long at most, the end of the client's session included. What has not
        begun by then is answered no; a call that has begun answers when it ends. Idempotent."""
        until = time.monotonic() + drain_s
        if os.getpid() == self._pid:  # a forked child has none of the threads, and whoever held the lock is not there
            with self._lock:
                if self._closed:
                    return
                self._closed = True
                for _ in self._threads:
                    self._calls.put(None)
            for thread in self._threads:
                if thread is not threading.current_thread():  # else it is a host's callback that closes this
                    thread.join(max(0.0, until - time.monotonic()))
            self._refuse_waiting()
        self._closed = True
        self.client.close(max(0.0, until - time.monotonic()))

    # --- on a thread of ours ------------------------------------------------------------------------------
    def _store(self, objects: Sequence[HostObject], request: Request) -> None:
        for namespace, positions in _by_namespace(objects):
            statuses = self.client.store(
                [objects[at].key for at in positions], [objects[at].view for at in positions], namespace=namespace
            ).statuses
            for at, status in zip(positions, statuses, strict=True):
                self.counts[f"store_{status}"] += 1
                request.answer(at, status in _THERE)

    def _load(self, objects: Sequence[HostObject], request: Request) -> None:
        for namespace, positions in _by_namespace(objects):
            keys, views = [objects[at].key for at in positions], [objects[at].view for at in positions]
            statuses = self.client.retrieve(keys, views, namespace=namespace, prefix=False, verify="first").statuses
            for at, status in zip(positions, statuses, strict=True):
                self.counts[f"load_{status}"] += 1
                request.answer(at, status is Status.HIT)

    def _find(self, keys: Sequence[HostKey], request: Request) -> None:
        for namespace, positions in _by_namespace(keys):
            wanted = [keys[at].key for at in positions]
            found = self.client.lookup(wanted, namespace=namespace, prefix=False, wait_s=self.deadlines.lookup_s)
            for at, status in zip(positions, found.statuses, strict=True):
                self.counts[f"find_{status}"] += 1
                request.answer(at, status in _FOUND)

    def _remove(self, keys: Sequence[HostKey], request: Request) -> None:
        for namespace, positions in _by_namespace(keys):
            wanted = [keys[at].key for at in positions]
            found = self.client.lookup(wanted, namespace=namespace, prefix=False, identify=True)
            if not found.incarnations:
                self.counts["remove_unreachable"] += len(wanted)
                continue  # `request` is refused when this ends
            self.client.drop(wanted, namespace=namespace, incarnations=found.incarnations)
            for at, number in zip(positions, found.incarnations, strict=True):
                request.answer(at, bool(number))

    def _clear(self, namespaces: Sequence[Namespace], request: Request) -> None:
        for namespace in namespaces:
            self.client.clear(namespace, tiers=True)
        request.answer(0, True)

    def _ask(self, request: Request, work: Callable[[Request], None]) -> Request:
        if not self._put(request, lambda: work(request)):
            self.counts["refused"] += 1
            request.refuse()
        return request

    def _put(self, request: Request, work: Work) -> bool:
        """Whether a thread of ours takes it."""
        if os.getpid() != self._pid:
            return False
        with self._lock:
            taken = not self._closed and self._calls.qsize() < WAITING_MAX and self._started()
            if taken:
                self._calls.put((request, work))
        return taken

    def _started(self) -> bool:
        if len(self._threads) < THREADS:
            thread = started(self._run, f"host-client-{len(self._threads)}")
            if thread is not None:
                self._threads.append(thread)
        return bool(self._threads)

    def _refuse_waiting(self) -> None:
        ends = 0
        while not self._calls.empty():
            with contextlib.suppress(queue.Empty):  # a thread was faster
                call = self._calls.get_nowait()
                if call is None:
                    ends += 1
                else:
                    call[0].refuse()
        for _ in range(ends):  # for the threads whose calls have not ended
            self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            request, work = call
            guarded(_logged, work)
            request.refuse()  # what has no answer after an error


def _by_namespace(wanted: Sequence[HostKey] | Sequence[HostObject]) -> list[tuple[Namespace, list[int]]]:
    """Positions by namespace, in the order of the host."""
    positions = sorted(range(len(wanted)), key=lambda at: wanted[at].namespace.id)
    return [
        (wanted[group[0]].namespace, group)
        for _, group in ((key, list(some)) for key, some in groupby(positions, key=lambda at: wanted[at].namespace.id))
    ]


def _logged(error: BaseException) -> None:
    if isinstance(error, DisconnectedError):
        return  # the client's own log says so, once
    known = isinstance(error, CacheError)
    log.error("a request of the host was not served: %s", error, exc_info=None if known else error)
