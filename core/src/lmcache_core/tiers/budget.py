"""A budget of time and bytes for a whole call, however many addresses, waits and receives it takes.

Libraries that adapters use limit each wait, not the call: to them, a server that sends one byte a second is never late.
They also keep what a server sends until an answer ends, however long it is. So the budget belongs to the thread, and
the sockets, which all of a library's waits go through, obey it:

    with within(deadline, received_bytes_max=1 << 20):
        library.call()  # on connections whose sockets are made here

A thread without a budget waits as long as its sockets allow, and receives whatever comes.
"""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, TypeVar

from lmcache_core.limits import WAIT_S_MAX
from lmcache_core.threads import started

__all__ = [
    "BudgetSocket",
    "BudgetTlsSocket",
    "TooManyBytesError",
    "connect",
    "left_s",
    "locked",
    "within",
]

T = TypeVar("T")
_NEVER = float("inf")
_NAMES_MAX = 64  # that the name service owes an answer for, a thread each


class TooManyBytesError(OSError):
    """More came than `received_bytes_max`: the connection is in the middle of an answer."""


class _OfThread(threading.local):
    deadline = _NEVER
    received_bytes = 0  # on the sockets of this module
    received_bytes_max = _NEVER  # of `received_bytes`


_budget = _OfThread()


@contextmanager
def within(deadline: float, received_bytes_max: float = _NEVER) -> Iterator[None]:
    """Everything that this thread waits for inside, on sockets and locks of this module, ends by `deadline` (monotonic
    seconds), or fails with `TimeoutError`. A receive by which more than `received_bytes_max` have come fails with
    `TooManyBytesError`. If nested, the earlier deadline and the smaller rest of bytes apply."""
    before = _budget.deadline, _budget.received_bytes_max
    _budget.deadline = min(_budget.deadline, deadline)
    _budget.received_bytes_max = min(_budget.received_bytes_max, _budget.received_bytes + received_bytes_max)
    try:
        yield
    finally:
        _budget.deadline, _budget.received_bytes_max = before


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
    if not lock.acquire(timeout=-1 if left == _NEVER else min(left, WAIT_S_MAX)):
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
    sock.settimeout(min(left, WAIT_S_MAX))
    try:
        return call(*arguments)
    finally:
        if sock.fileno() >= 0:
            sock.settimeout(limit)


def _counted(nbytes: int) -> None:
    _budget.received_bytes += nbytes
    if _budget.received_bytes > _budget.received_bytes_max:
        raise TooManyBytesError("an answer is longer than what was asked for can be")


class BudgetSocket(socket.socket):
    """A socket for libraries whose waits and receives must stay within the calling thread's budget."""

    __slots__ = ()

    def recv(self, *arguments: Any) -> bytes:
        received = _bounded(self, super().recv, *arguments)
        _counted(len(received))
        return received

    def recv_into(self, *arguments: Any) -> int:
        nbytes = _bounded(self, super().recv_into, *arguments)
        _counted(nbytes)
        return nbytes

    def send(self, *arguments: Any) -> int:
        return _bounded(self, super().send, *arguments)

    def sendall(self, *arguments: Any) -> None:
        _bounded(self, super().sendall, *arguments)


class BudgetTlsSocket(ssl.SSLSocket):
    """The same over TLS: `context.sslsocket_class = BudgetTlsSocket`."""

    def read(self, *arguments: Any) -> Any:
        received: Any = _bounded(self, super().read, *arguments)  # bytes, or how many went into a buffer
        _counted(received if isinstance(received, int) else len(received))
        return received

    def send(self, *arguments: Any) -> int:
        return _bounded(self, super().send, *arguments)

    def do_handshake(self, *arguments: Any) -> None:
        _bounded(self, super().do_handshake, *arguments)


def connect(host: str, port: int, deadline: float) -> BudgetSocket:
    """A TCP connection to one of the host's addresses, tried in order; each gets an equal part of the remaining time
    after the name service's answer.
    Its time-out is unset. Raises `OSError`, and `TimeoutError` at the deadline."""
    addresses = _addresses(host, port, deadline)
    failed: OSError = OSError(f"{host} has no address")
    for position, (family, kind, protocol, _, address) in enumerate(addresses):
        left = min(deadline - time.monotonic(), WAIT_S_MAX)
        if left <= 0:
            raise TimeoutError(f"{position} of {len(addresses)} addresses were tried in time")
        try:
            with ExitStack() as until_connected:
                sock = BudgetSocket(family, kind, protocol)
                until_connected.callback(sock.close)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock.settimeout(left / (len(addresses) - position))
                sock.connect(address)
                sock.settimeout(None)
                until_connected.pop_all()
                return sock
        except OSError as error:
            failed = error
    raise failed


class _NameService:
    """The system's name service has no time-out to be set, so it is asked by threads that may hang: one for each name,
    however many wait for it. For any thread."""

    def __init__(self) -> None:
        self._empty()
        os.register_at_fork(after_in_child=self._empty)  # the threads are the parent's, and the lock may be theirs

    def _empty(self) -> None:
        self._lock = threading.Lock()
        self._asked: dict[tuple[str, int], Future[list[Any]]] = {}

    def answer(self, host: str, port: int) -> Future[list[Any]]:
        """What `socket.getaddrinfo` will say. Raises `OSError` if it is not asked."""
        name = (host, port)
        with self._lock:
            answer = self._asked.get(name)
            if answer is None:
                if len(self._asked) >= _NAMES_MAX:
                    raise OSError(
                        f"the name service owes answers for {_NAMES_MAX} names, and is not asked for {host!r}"
                    )
                answer = Future()
                if started(partial(self._ask, name, answer), "name-service") is None:
                    raise OSError(f"no thread to ask the name service for {host!r}")
                self._asked[name] = answer
        return answer

    def _ask(self, name: tuple[str, int], answer: Future[list[Any]]) -> None:
        try:
            found = socket.getaddrinfo(*name, type=socket.SOCK_STREAM)
        except BaseException as error:  # noqa: BLE001 - raised again in whoever waits
            answer.set_exception(error)
        else:
            answer.set_result(found)
        with self._lock:
            self._asked.pop(name, None)


_name_service = _NameService()


def _addresses(host: str, port: int, deadline: float) -> list[Any]:
    """Raises `OSError`, and `TimeoutError` at the deadline."""
    with contextlib.suppress(OSError, UnicodeError):  # most are no names
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    answer = _name_service.answer(host, port)
    try:
        return answer.result(max(0.0, min(deadline - time.monotonic(), WAIT_S_MAX)))
    except UnicodeError as error:  # a part that is empty, or too long for the name service
        raise OSError(f"{host!r} cannot be a host name") from error
    except FutureTimeoutError:
        raise TimeoutError(f"the name service did not answer for {host!r} in time") from None
