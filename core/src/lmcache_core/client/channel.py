"""Calls over one connection, many at once, without a thread of its own.

Whoever waits first reads the connection for everybody and hands over when its own reply is there: a single caller
pays no wake-up beyond the one that the carrier costs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from itertools import count
from typing import TypeVar

from lmcache_core.client.connection import Connection
from lmcache_core.errors import CacheError, DisconnectedError, by_code
from lmcache_core.limits import CALL_TIMEOUT_S
from lmcache_core.protocol.codec import decode_reply, encode_request
from lmcache_core.protocol.messages import Error, LeaseExpired, Message, Reply

_M = TypeVar("_M", bound=Message)


class Pending:
    """A call whose reply has not been looked at."""

    __slots__ = ("error", "reply", "rid", "wake")

    def __init__(self, rid: int) -> None:
        self.rid = rid
        self.reply: Reply | None = None
        self.error: CacheError | None = None
        self.wake: threading.Event | None = None  # made only where another thread is reading

    @property
    def settled(self) -> bool:
        return self.reply is not None or self.error is not None


class Channel:
    """Requests out, replies in, matched by id. Thread-safe."""

    def __init__(self, connection: Connection, on_notice: Callable[[LeaseExpired], None]) -> None:
        self.connection = connection
        self._on_notice = on_notice
        self._rids = count(1)
        self._pending: dict[int, Pending] = {}
        self._lock = threading.Lock()
        self._reading = False
        self._lost: DisconnectedError | None = None

    @property
    def lost(self) -> bool:
        """The connection has ended; every further call raises."""
        return self._lost is not None

    def call(self, make: Callable[[int], Message], timeout_s: float = CALL_TIMEOUT_S) -> Reply:
        """Send the request that `make(rid)` gives and wait for its reply.

        Raises what the server answered as an error, or `DisconnectedError` when the connection ends or the
        server is silent for `timeout_s`.
        """
        return self.wait(self.start(make), timeout_s)

    def start(self, make: Callable[[int], Message]) -> Pending:
        """Send a request; its reply is for `wait`, `poll` or `abandon`."""
        rid = next(self._rids)
        pending = Pending(rid)
        frame = encode_request(make(rid))
        with self._lock:
            if self._lost is not None:
                raise DisconnectedError(str(self._lost))
            self._pending[rid] = pending
        try:
            self.connection.send(frame)
        except DisconnectedError as error:
            self._fail(error)
            raise
        return pending

    def wait(self, pending: Pending, timeout_s: float) -> Reply:
        """The reply. A silence of `timeout_s` is an end of the connection: nothing on it can be trusted to come."""
        deadline = time.monotonic() + timeout_s
        self._serve(pending, deadline)
        if not pending.settled:
            self._fail(DisconnectedError(f"the server did not answer within {timeout_s:g} s"))
        return self._result(pending)

    def poll(self, pending: Pending) -> Reply | None:
        """The reply if it has come. Reads what is there, waits for nothing."""
        if not pending.settled:
            self._serve(pending, 0.0)
        return self._result(pending) if pending.settled else None

    def abandon(self, pending: Pending) -> None:
        """Nobody will ask for this reply."""
        with self._lock:
            self._pending.pop(pending.rid, None)

    def close(self, why: str = "the client was closed") -> None:
        """End the connection and every call on it."""
        self._fail(DisconnectedError(why))

    def _result(self, pending: Pending) -> Reply:
        if pending.error is not None:
            raise pending.error
        reply = pending.reply
        assert reply is not None
        if isinstance(reply, Error):
            raise by_code(reply.code)(reply.message)
        return reply

    def _serve(self, pending: Pending, deadline: float) -> None:
        """Read for everybody, or wait for whoever does, until the reply is there or time is up."""
        while not pending.settled:
            with self._lock:
                leading = not self._reading
                if leading:
                    self._reading = True
                else:
                    pending.wake = pending.wake or threading.Event()
                    pending.wake.clear()
            if leading:
                try:
                    self._read_until(pending, deadline)
                finally:
                    self._hand_over()
                return
            left = deadline - time.monotonic()
            assert pending.wake is not None
            if left <= 0 or not pending.wake.wait(left):
                return

    def _read_until(self, pending: Pending, deadline: float) -> None:
        try:
            while not pending.settled:
                frame = self.connection.receive(deadline)
                if frame is None:
                    return
                self._deliver(decode_reply(frame))
        except DisconnectedError as error:
            self._fail(error)
        except CacheError as error:  # the server speaks something else: this connection is of no use
            self._fail(DisconnectedError(str(error)))

    def _deliver(self, reply: Reply) -> None:
        if isinstance(reply, LeaseExpired):
            self._on_notice(reply)
            return
        with self._lock:
            pending = self._pending.pop(reply.rid, None)
            if pending is not None:
                pending.reply = reply
                if pending.wake is not None:
                    pending.wake.set()

    def _hand_over(self) -> None:
        with self._lock:
            self._reading = False
            for pending in self._pending.values():
                if pending.wake is not None:
                    pending.wake.set()  # it finds no reply and reads on, for everybody
                    return

    def _fail(self, error: DisconnectedError) -> None:
        with self._lock:
            self._lost = self._lost or error
            failed = list(self._pending.values())
            self._pending.clear()
            for pending in failed:
                pending.error = error
                if pending.wake is not None:
                    pending.wake.set()
        self.connection.close()


def expect(reply: Reply, kind: type[_M]) -> _M:
    """The reply as the kind that was asked for."""
    if not isinstance(reply, kind):
        raise DisconnectedError(f"the server answered {type(reply).__name__} where {kind.__name__} was due")
    return reply
