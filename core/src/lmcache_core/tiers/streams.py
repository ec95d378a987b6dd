"""Many buffers over one socket by a deadline, for adapters that speak the protocol of their medium themselves.

A plain socket blocks in the kernel, which also keeps the time: one call moves many buffers whole, without polling
before each. A socket with a Python time-out is non-blocking, and returns with every piece that arrives. TLS has no such
calls: with TLS, `left_s` bounds each call.
"""

from __future__ import annotations

import socket
import struct
import time

from lmcache_core.limits import WAIT_S_MAX

__all__ = ["BUFFERS_MAX", "advance", "left_s", "limit", "receive_into"]

BUFFERS_MAX = 512  # in one call; the system allows 1,024
_TIMEVAL = struct.Struct("@ll")
_TIME_MIN_S = 0.001


def left_s(deadline: float) -> float:
    """Seconds until the deadline (monotonic), as a socket takes them. Raises `TimeoutError` once it has passed."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("the deadline has come")
    return min(max(left, _TIME_MIN_S), WAIT_S_MAX)


def limit(sock: socket.socket, which: int, deadline: float) -> None:
    """Have the kernel end calls of this socket at the deadline, with `BlockingIOError`. `which`: `SO_SNDTIMEO` or
    `SO_RCVTIMEO`. Raises `TimeoutError` once the deadline has passed."""
    left = left_s(deadline)
    if sock.gettimeout() is not None:
        sock.settimeout(None)
    sock.setsockopt(socket.SOL_SOCKET, which, _TIMEVAL.pack(int(left), int(left % 1 * 1e6)))


def receive_into(sock: socket.socket, buffers: list[memoryview], deadline: float, *, whole: bool = False) -> int:
    """Receive what has arrived into the buffers of a plain socket, at least one byte; with `whole`, fill all buffers,
    or the first `BUFFERS_MAX` of them. Returns the bytes received; 0 at the end of the connection. Raises `OSError`,
    and `TimeoutError` at the deadline."""
    limit(sock, socket.SO_RCVTIMEO, deadline)
    try:
        return sock.recvmsg_into(buffers[:BUFFERS_MAX], 0, socket.MSG_WAITALL if whole else 0)[0]
    except BlockingIOError:
        raise TimeoutError("the deadline has come") from None


def advance(buffers: list[memoryview], at: int, nbytes: int) -> int:
    """Returns where to go on in `buffers` after `nbytes` from index `at` were moved. Cuts a buffer that was moved in
    part."""
    while at < len(buffers) and nbytes >= buffers[at].nbytes:
        nbytes -= buffers[at].nbytes
        at += 1
    if nbytes:
        buffers[at] = buffers[at][nbytes:]
    return at
