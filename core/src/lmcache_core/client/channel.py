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
_LOOK_AFTER_S = 0.01  # a look costs 2 µs, a tenth of a call: not within a series of calls
_WAIT_S_MAX = 3600.0  # a lock's own timeout has a limit; whoever waits longer comes back


class Pending:
    """A call whose reply has not been looked at."""

    __slots__ = ("error", "reply", "rid", "waiters")

    def __init__(self, rid: int) -> None:
        self.rid = rid
        self.reply: Reply | None = None
        self.error: CacheError | None = None
        self.waiters: tuple[threading.Lock, ...] = ()  # of threads that wait for it while another one reads

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
        self._waiting: dict[threading.Lock, None] = {}  # taken locks: releasing one wakes its thread
        self._lock = threading.Lock()
        self._reading = False
        self._quiet_since_s = 0.0
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
        """The reply is not wanted any more. A thread that waits for it gets a `DisconnectedError`."""
        with self._lock:
            if self._pending.pop(pending.rid, None) is not None:
                pending.error = DisconnectedError("this call was cancelled")
                for waiter in pending.waiters:
                    self._wake(waiter)

    def found_lost(self) -> bool:
        """As `lost`; after a pause it looks whether the connection has ended meanwhile. Waits for nothing."""
        if self._lost is not None:
            return True
        if self._reading or time.monotonic() - self._quiet_since_s < _LOOK_AFTER_S:
            return False
        if self.connection.ended():
            self._fail(DisconnectedError("the server closed the connection"))
        return self._lost is not None

    def close(self, why: str = "the client was closed") -> None:
        """End the connection and every call on it."""
        self._fail(DisconnectedError(why))

    def _result(self, pending: Pending) -> Reply:
        if pending.error is not None:
            raise pending.error
        reply = pending.reply
        assert reply is not None
        if isinstance(reply, Error):
            error = by_code(reply.code)(reply.message)
            if isinstance(error, DisconnectedError):  # another server answers there now, or it has forgotten us
                self._fail(error)
            raise error
        return reply

    def _serve(self, pending: Pending, deadline: float) -> None:
        """Read for everybody, or wait for whoever does, until the reply is there or time is up."""
        try:
            while True:
                waiter = None
                with self._lock:
                    if pending.settled:
                        return
                    if self._reading:
                        waiter = threading.Lock()
                        waiter.acquire()
                        pending.waiters += (waiter,)
                        self._waiting[waiter] = None
                    else:
                        self._reading = True
                if waiter is None:
                    self._lead(pending, deadline)
                    return
                if self._follow(pending, waiter, deadline):
                    return
        except BaseException:
            # Interrupted: the reply may be a lease, and nobody would answer for it. The next connection tells the
            # server what is still held.
            self._fail(DisconnectedError("a call on this connection was interrupted"))
            raise

    def _lead(self, pending: Pending, deadline: float) -> None:
        """Read for everybody until our reply is there or time is up."""
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
        finally:
            with self._lock:
                self._reading = False
                self._wake_one()
            self._quiet_since_s = time.monotonic()

    def _follow(self, pending: Pending, waiter: threading.Lock, deadline: float) -> bool:
        """Wait to be woken: by the reply, or because whoever read has gone and we are to read on. False: read on."""
        woken = False
        try:
            left = min(deadline - time.monotonic(), _WAIT_S_MAX)
            woken = left > 0 and waiter.acquire(timeout=left)
        finally:
            with self._lock:
                self._waiting.pop(waiter, None)
                pending.waiters = tuple(each for each in pending.waiters if each is not waiter)
                if not self._reading and (not woken or pending.settled):
                    self._wake_one()  # we may have been the one to read on, and will not
        return time.monotonic() >= deadline if not woken else pending.settled

    def _deliver(self, reply: Reply) -> None:
        if isinstance(reply, LeaseExpired):
            self._on_notice(reply)
            return
        with self._lock:
            pending = self._pending.pop(reply.rid, None)
            if pending is not None:
                pending.reply = reply
                for waiter in pending.waiters:
                    self._wake(waiter)

    def _wake(self, waiter: threading.Lock) -> None:
        if self._waiting.pop(waiter, self) is None:  # it was there: each is woken once
            waiter.release()

    def _wake_one(self) -> None:
        """Somebody who waits is to read on, for everybody. The caller holds the lock."""
        for waiter in self._waiting:
            self._wake(waiter)
            return

    def _fail(self, error: DisconnectedError) -> None:
        with self._lock:
            self._lost = self._lost or error
            failed = list(self._pending.values())
            self._pending.clear()
            for pending in failed:
                pending.error = error
            for waiter in list(self._waiting):
                self._wake(waiter)
        self.connection.close()


def expect(reply: Reply, kind: type[_M]) -> _M:
    """The reply as the kind that was asked for."""
    if not isinstance(reply, kind):
        raise DisconnectedError(f"the server answered {type(reply).__name__} where {kind.__name__} was due")
    return reply
