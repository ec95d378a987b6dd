"""A time budget for a whole call, however many addresses, waits and receives it takes.

Libraries that adapters use limit each wait, not the call: to them, a server that sends one byte a second is never late.
So the budget belongs to the thread, and the sockets, which all of a library's waits go through, obey it:

    with within(deadline):
        library.call()  # on connections whose sockets are made here

A thread without a budget waits as long as its sockets allow.
"""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

__all__ = [
    "BudgetSocket",
    "BudgetTlsSocket",
    "connect",
    "left_s",
    "locked",
    "within",
]

T = TypeVar("T")
_NEVER = float("inf")


class _OfThread(threading.local):
    deadline = _NEVER


_budget = _OfThread()


@contextmanager
def within(deadline: float) -> Iterator[None]:
    """Everything that this thread waits for inside, on sockets and locks of this module, ends by `deadline` (monotonic
    seconds), or fails with `TimeoutError`. If nested, the earlier one applies."""
    before = _budget.deadline
    _budget.deadline = min(before, deadline)
    try:
        yield
    finally:
        _budget.deadline = before


def left_s() -> float:
    """Seconds left to this thread; infinite without a budget. Raises `TimeoutError` when there are none."""
    if _budget.deadline == _NEVER:
        return _NEVER
    left = _budget.deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("the deadline has passed")
    return left


@contextmanager
def locked(lock: threading.Lock) -> Iterator[None]:
    """Hold the lock, after waiting no longer than the budget. Raises `TimeoutError`."""
    left = left_s()
    if not lock.acquire(timeout=-1 if left == _NEVER else min(left, threading.TIMEOUT_MAX)):
        raise TimeoutError("another call held the lock until the deadline")
    try:
        yield
    finally:
        lock.release()


def _bounded(sock: socket.socket, call: Callable[..., T], *arguments: Any) -> T:
    """The call on a socket that waits no longer than the budget and its own time-out."""
    left = left_s()
    limit = sock.gettimeout()
    if left == _NEVER or (limit is not None and limit <= left):
        return call(*arguments)
    sock.settimeout(left)
    try:
        return call(*arguments)
    finally:
        if sock.fileno() >= 0:
            sock.settimeout(limit)


class BudgetSocket(socket.socket):
    """A socket for libraries whose waits must stay within the waiting thread's budget."""

    __slots__ = ()

    def recv(self, *arguments: Any) -> bytes:
        return _bounded(self, super().recv, *arguments)

    def recv_into(self, *arguments: Any) -> int:
        return _bounded(self, super().recv_into, *arguments)

    def send(self, *arguments: Any) -> int:
        return _bounded(self, super().send, *arguments)

    def sendall(self, *arguments: Any) -> None:
        _bounded(self, super().sendall, *arguments)


class BudgetTlsSocket(ssl.SSLSocket):
    """The same over TLS: `context.sslsocket_class = BudgetTlsSocket`."""

    def read(self, *arguments: Any) -> Any:
        return _bounded(self, super().read, *arguments)

    def send(self, *arguments: Any) -> int:
        return _bounded(self, super().send, *arguments)

    def do_handshake(self, *arguments: Any) -> None:
        _bounded(self, super().do_handshake, *arguments)


def connect(host: str, port: int, deadline: float) -> BudgetSocket:
    """A TCP connection to one of the host's addresses, tried in order; each gets an equal part of the remaining time.
    Its time-out is unset. Raises `OSError`, and `TimeoutError` at the deadline."""
    addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    failed: OSError = OSError(f"{host} has no address")
    for position, (family, kind, protocol, _, address) in enumerate(addresses):
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"{position} of {len(addresses)} addresses were tried in time")
        sock = BudgetSocket(family, kind, protocol)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.settimeout(left / (len(addresses) - position))
            sock.connect(address)
            sock.settimeout(None)
        except OSError as error:
            sock.close()
            failed = error
            continue
        except BaseException:
            sock.close()
            raise
        return sock
    raise failed
