"""Calls of operations that plugins add: decoded, run on the loop or in a lane, and answered."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import msgspec

from lmcache_core.errors import CacheError, LimitError, SettingsError, UsageError
from lmcache_core.guard import guarded, on_failure
from lmcache_core.limits import (
    FRAME_BYTES_MAX,
    OPERATION_SLOW_S,
    OPERATION_THREADS,
    OPERATIONS_PER_SESSION_MAX,
    OPERATIONS_WAITING_MAX,
    START_STEP_S,
)
from lmcache_core.plugins.components import Kind
from lmcache_core.plugins.registry import Registry
from lmcache_core.protocol import messages as m
from lmcache_core.protocol.codec import UNREADABLE, error_reply, plain
from lmcache_core.server.extensions.request_watch import RequestWatch
from lmcache_core.server.operation import OperationContext, PoolView, ServerOperation
from lmcache_core.server.peers.session import Session
from lmcache_core.server.pool.l1 import L1
from lmcache_core.server.pool.namespaces import Namespaces
from lmcache_core.server.process.loop import Loop
from lmcache_core.settings.model import Settings
from lmcache_core.state_thread import within
from lmcache_core.threads import started
from lmcache_core.tiers.object.epochs import Epochs

log = logging.getLogger(__name__)

_REPLY_BYTES_MAX = FRAME_BYTES_MAX - 64
_CLOSE_S = 1.0
_Work = Callable[[], None]


class RunningOperations:
    """Lives on the loop's thread, next to its lane."""

    def __init__(
        self,
        registry: Registry,
        settings: Settings,
        l1: L1,
        namespaces: Namespaces,
        epochs: Epochs,
        loop: Loop,
        watch: RequestWatch,
    ) -> None:
        self._loop = loop
        self._view = PoolView(l1, namespaces, epochs)
        self._counts: dict[str, dict[str, int]] = {}
        self._all: dict[str, ServerOperation] = {}
        self._queue: queue.Queue[_Work | None] = queue.Queue(OPERATIONS_WAITING_MAX)
        self._by_session: Counter[int] = Counter()  # calls that a lane has or will have
        self._threads: list[threading.Thread] = []
        self._loops_thread: int | None = None
        self._closed = False
        self._loop_runs = False  # before that, and at the end, whoever calls has the pool for itself
        context = OperationContext(settings, l1.clock, self._on_loop, watch.begin)
        always: dict[str, Any] = {each.name: None for each in registry.components(Kind.OPERATION) if each.always}
        with on_failure(self.close):
            for name, own in (always | dict(settings.operations)).items():
                self._all[name] = within(
                    START_STEP_S,
                    partial(registry.build, Kind.OPERATION, name, own, context),
                    SettingsError(
                        f"operations.{name} has not come up within {START_STEP_S:g} s: see whether a disk, mount or "
                        "service that its settings name hangs"
                    ),
                    ServerOperation.close,
                )
                self._counts[name] = {"calls": 0, "failed": 0, "slow": 0}
        self._loop_runs = True

    def call(self, session: Session, request: m.CallOperation) -> m.Message | None:
        """The answer, or None if a lane will send it. Raises `UsageError` and `LimitError`."""
        session.check_operates("call operations")
        operation = self._all.get(request.operation)
        if operation is None:
            there = ", ".join(self._all) or "none"
            raise UsageError(
                f"this server has no operation {request.operation[:80]!r}: it has {there}; to add it, "
                f"install its package and write a table [operations.{request.operation[:80]}]"
            )
        try:
            decoded = msgspec.msgpack.decode(request.body, type=operation.request)
        except UNREADABLE as error:
            raise UsageError(f"{request.operation}: {error}") from error
        counts = self._counts[request.operation]
        counts["calls"] += 1
        if operation.runs == "loop":
            self._loops_thread = threading.get_ident()
            began = time.perf_counter()
            reply = self._answer(request, operation, decoded)
            if time.perf_counter() - began > OPERATION_SLOW_S:
                counts["slow"] += 1
            return reply
        if self._by_session[session.id] >= OPERATIONS_PER_SESSION_MAX:
            raise LimitError(
                f"{OPERATIONS_PER_SESSION_MAX} operations of this session wait already: wait for one of them"
            )

        def work() -> None:
            reply = self._answer(request, operation, decoded)
            self._loop.call(lambda: self._answered(session, reply))

        if len(self._threads) < OPERATION_THREADS:
            thread = started(self._run, f"operation-{len(self._threads)}")
            if thread is not None:
                self._threads.append(thread)
            elif not self._threads:
                raise LimitError("the system gives no thread to run operations on: try again later")
        try:
            self._queue.put_nowait(work)
        except queue.Full:
            raise LimitError(f"{OPERATIONS_WAITING_MAX} operations wait already: try again later") from None
        self._by_session[session.id] += 1
        return None

    def _answered(self, session: Session, reply: m.Message) -> None:
        self._by_session -= Counter([session.id])
        session.send(reply)

    def status(self) -> dict[str, dict[str, Any]]:
        """For `status`."""
        return {
            name: {"runs": self._all[name].runs, **counts, **guarded(_failed_status, plain, self._all[name].status)}
            for name, counts in self._counts.items()
        }

    def close(self) -> None:
        """Close them; one that hangs is left behind. On the loop's thread, once the loop has stopped."""
        self._loops_thread = threading.get_ident()
        self._loop_runs, self._closed = False, True
        for _ in self._threads:
            try:
                self._queue.put_nowait(None)
            except queue.Full:
                break
        for thread in self._threads:
            thread.join(_CLOSE_S)
        while self._all:
            name, operation = self._all.popitem()
            late = UsageError(f"its close has not ended within {_CLOSE_S:g} s: it is left behind")
            guarded(partial(_failed_closing, name), within, _CLOSE_S, partial(self._close, operation), late)

    def _close(self, operation: ServerOperation) -> None:
        self._loops_thread = threading.get_ident()  # nobody else has the pool by now
        operation.close()

    def _answer(self, request: m.CallOperation, operation: ServerOperation, decoded: Any) -> m.Message:
        def answered() -> m.Message:
            reply = operation.handle(decoded)
            if not isinstance(reply, operation.reply):
                raise TypeError(f"it returned a {type(reply).__name__} instead of a {operation.reply.__name__}")
            body = msgspec.msgpack.encode(reply)
            if len(body) > _REPLY_BYTES_MAX:
                raise LimitError(f"the answer of {request.operation} has {len(body):,} bytes: ask for less at once")
            return m.OperationReply(request.rid, body)

        def failed(error: BaseException) -> m.Message:
            if isinstance(error, CacheError):
                return error_reply(request.rid, error)
            log.error("the operation %s failed", request.operation, exc_info=error)
            self._counts[request.operation]["failed"] += 1
            text = f"the operation {request.operation} failed; the server's log has the traceback"
            return m.Error(request.rid, "INTERNAL", text, "never")

        return guarded(failed, answered)

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            work()

    def _on_loop(self, look: Callable[[PoolView], Any]) -> Any:
        if self._closed and threading.get_ident() != self._loops_thread:
            raise UsageError("the server has ended")
        if not self._loop_runs or threading.get_ident() == self._loops_thread:
            return look(self._view)
        found: Future[Any] = Future()

        def run() -> None:
            try:
                found.set_result(look(self._view))
            except BaseException as error:  # noqa: BLE001 - raised in the lane that waits, an interrupt too
                found.set_exception(error)

        self._loop.call(run)
        while not self._loop.ended:
            try:
                return found.result(_CLOSE_S)
            except TimeoutError:
                if found.done():
                    raise
        raise UsageError("the server has ended")


def _failed_closing(name: str, error: BaseException) -> None:
    log.error("the operation %s failed while closing", name, exc_info=error)


def _failed_status(error: BaseException) -> dict[str, Any]:
    return {"error": f"{type(error).__name__}: {error}"}
