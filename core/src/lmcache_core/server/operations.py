"""Calls of operations that plugins add: decoded, run on the loop or in a lane, and answered."""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec

from lmcache_core.errors import CacheError, LimitError, UsageError
from lmcache_core.limits import FRAME_BYTES_MAX, OPERATION_SLOW_S, OPERATION_THREADS, OPERATIONS_WAITING_MAX
from lmcache_core.plugins.components import Kind
from lmcache_core.plugins.registry import Registry
from lmcache_core.protocol import messages as m
from lmcache_core.protocol.codec import error_reply
from lmcache_core.server.l1 import L1
from lmcache_core.server.loop import Loop
from lmcache_core.server.operation import OperationContext, PoolView, ServerOperation
from lmcache_core.server.session import Session

log = logging.getLogger(__name__)

_REPLY_BYTES_MAX = FRAME_BYTES_MAX - 64
_CLOSE_S = 1.0
_Work = Callable[[], None]


class Operations:
    """Lives on the loop's thread, next to its lane."""

    def __init__(
        self, registry: Registry, settings: Mapping[str, Any], server: str, state_dir: Path, l1: L1, loop: Loop
    ) -> None:
        self._loop = loop
        self._view = PoolView(l1)
        self._counts: dict[str, dict[str, int]] = {}
        self._all: dict[str, ServerOperation] = {}
        self._queue: queue.Queue[_Work | None] = queue.Queue(OPERATIONS_WAITING_MAX)
        self._threads: list[threading.Thread] = []
        self._loops_thread: int | None = None
        context = OperationContext(server, state_dir, self._on_loop)
        try:
            for name, own in settings.items():
                self._all[name] = registry.build(Kind.OPERATION, name, own, context)
                self._counts[name] = {"calls": 0, "failed": 0, "slow": 0}
        except BaseException:
            self.close()
            raise

    def call(self, session: Session, request: m.CallOperation) -> m.Message | None:
        """The answer, or None if a lane will send it. Raises `UsageError` and `LimitError`."""
        if session.carrier != "lifeline" or session.uid not in (0, os.geteuid()):
            raise UsageError(
                "only the server's own user may call operations, over the lifeline: run the "
                "command as that user on the server's node"
            )
        operation = self._all.get(request.operation)
        if operation is None:
            there = ", ".join(self._all) or "none"
            raise UsageError(
                f"this server has no operation {request.operation[:80]!r}: it has {there}; to add it, "
                f"install its package and write a table [operations.{request.operation[:80]}]"
            )
        try:
            asked = msgspec.msgpack.decode(request.body, type=operation.request)
        except msgspec.MsgspecError as error:
            raise UsageError(f"{request.operation}: {error}") from error
        counts = self._counts[request.operation]
        counts["calls"] += 1
        if operation.runs == "loop":
            self._loops_thread = threading.get_ident()
            began = time.perf_counter()
            reply = self._answer(request, operation, asked)
            if time.perf_counter() - began > OPERATION_SLOW_S:
                counts["slow"] += 1
            return reply

        def work() -> None:
            reply = self._answer(request, operation, asked)
            self._loop.call(lambda: session.send(reply))

        try:
            self._queue.put_nowait(work)
        except queue.Full:
            raise LimitError(f"{OPERATIONS_WAITING_MAX} operations wait already: try again later") from None
        if len(self._threads) < OPERATION_THREADS:
            thread = threading.Thread(target=self._run, name=f"operation-{len(self._threads)}", daemon=True)
            thread.start()
            self._threads.append(thread)
        return None

    def status(self) -> dict[str, dict[str, Any]]:
        """For `status`."""
        return {name: {"runs": self._all[name].runs, **counts} for name, counts in self._counts.items()}

    def close(self) -> None:
        """Close them; one that hangs is left behind."""
        for _ in self._threads:
            try:
                self._queue.put_nowait(None)
            except queue.Full:
                break
        for thread in self._threads:
            thread.join(_CLOSE_S)
        while self._all:
            name, operation = self._all.popitem()
            try:
                operation.close()
            except Exception:
                log.exception("the operation %s failed while closing", name)

    def _answer(self, request: m.CallOperation, operation: ServerOperation, asked: Any) -> m.Message:
        try:
            reply = operation.handle(asked)
            if not isinstance(reply, operation.reply):
                raise TypeError(f"it returned a {type(reply).__name__} instead of a {operation.reply.__name__}")
            body = msgspec.msgpack.encode(reply)
            if len(body) > _REPLY_BYTES_MAX:
                raise LimitError(f"the answer of {request.operation} has {len(body):,} bytes: ask for less at once")
            return m.OperationReply(request.rid, body)
        except CacheError as error:
            return error_reply(request.rid, error)
        except KeyboardInterrupt:
            raise
        except BaseException:
            log.exception("the operation %s failed", request.operation)
            self._counts[request.operation]["failed"] += 1
            said = f"the operation {request.operation} failed; the server's log has the traceback"
            return m.Error(request.rid, "INTERNAL", said, "never")

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            work()

    def _on_loop(self, look: Callable[[PoolView], Any]) -> Any:
        if threading.get_ident() == self._loops_thread:
            return look(self._view)
        found: Future[Any] = Future()

        def run() -> None:
            try:
                found.set_result(look(self._view))
            except BaseException as error:  # noqa: BLE001 - the waiter is told
                found.set_exception(error)

        self._loop.call(run)
        while not self._loop.ended:
            try:
                return found.result(_CLOSE_S)
            except TimeoutError:
                if found.done():
                    raise
        raise UsageError("the server has ended")
