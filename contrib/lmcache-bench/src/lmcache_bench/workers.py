"""Worker processes of a bench, and the cleanup of a bench that is interrupted."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Self

from lmcache_core.errors import DisconnectedError

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

REPLY_S = 300.0  # a safety net: a worker's tasks take seconds


class WorkerProcess:
    """A fresh interpreter that runs `target(connection, *arguments)`. It sends one message once it is ready."""

    def __init__(self, target: Callable[..., None], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")  # a fork would share clients, threads and locks
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=target, args=(theirs, *arguments), daemon=True)
        self._process.start()
        theirs.close()
        self.ready: Any = None

    def __enter__(self) -> Self:
        try:
            self.ready = self.receive()
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid or 0

    def send(self, message: Any) -> None:
        """Send it a message."""
        self._connection.send(message)

    def receive(self) -> Any:
        """Its next message. Raises `DisconnectedError` if it has ended instead."""
        try:
            if not self._connection.poll(REPLY_S):
                raise DisconnectedError(f"a worker of the bench said nothing for {REPLY_S:g} s")
            return self._connection.recv()
        except (EOFError, ConnectionResetError) as error:
            raise DisconnectedError("a worker of the bench ended; standard error says why") from error

    def ask(self, message: Any) -> Any:
        """Send and receive."""
        self.send(message)
        return self.receive()

    def end(self) -> None:
        """End it and wait for that."""
        self._connection.close()  # makes its next receive raise, which ends it
        self._process.join(1.0)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def orders(connection: Connection) -> Iterator[Any]:
    """In a worker: its parent's requests, until the parent ends. Ctrl-C is left to the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection.send("ready")
    with contextlib.suppress(EOFError, OSError):
        while True:
            yield connection.recv()


@contextmanager
def ending_cleanly() -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP unwind the stack, so that pools and processes are removed."""
    noted: list[int] = []

    def leave(number: int, frame: FrameType | None) -> None:
        noted.append(number)
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, leave) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
        if noted:  # it arrived inside a library that swallows any exception, as imports in C do
            raise SystemExit(128 + noted[0])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
