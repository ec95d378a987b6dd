"""One exchange with one server: send pipelined commands, receive replies. Direct, or through redis-py's own calls. Both
give the same replies. After an incomplete exchange the connection is closed: the state of its stream is unknown, and a
late reply must never be mistaken for another one, or written into memory that has been reused.
"""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from typing import Any, TypeVar

from redis import exceptions
from redis.connection import ConnectionPool

from lmcache_core.errors import TierError
from lmcache_core.tiers import budget
from lmcache_core.tiers.streams import left_s
from lmcache_redis.errors import NO_CONNECTION_CURES
from lmcache_redis.transport.channel import channel_on
from lmcache_redis.transport.commands import Broken, Command, Received, Refusal, Reply
from lmcache_redis.transport.connections import direct_socket, take
from lmcache_redis.transport.wire import WireError, converse

E = TypeVar("E", bound=BaseException)
_CODES: tuple[tuple[type[Exception], str], ...] = (
    (exceptions.MovedError, "MOVED"),  # before ASK, of which it is a kind
    (exceptions.AskError, "ASK"),
    (exceptions.TryAgainError, "TRYAGAIN"),
    (exceptions.ClusterDownError, "CLUSTERDOWN"),
    (exceptions.MasterDownError, "MASTERDOWN"),
    (exceptions.ReadOnlyError, "READONLY"),
    (exceptions.BusyLoadingError, "LOADING"),
    (exceptions.OutOfMemoryError, "OOM"),
    (exceptions.NoPermissionError, "NOPERM"),
)


class Exchanger:
    """Talks to servers with the configured transport. Shared by threads."""

    def __init__(self, tier: str, transport: str) -> None:
        self._tier = tier
        self._transport = transport
        self.fell_back = False  # auto has found unknown internals
        self._closed = False

    def close(self) -> None:
        """From now on no connection is kept: its user closes it when done. After this the caller empties the pools."""
        self._closed = True

    def exchange(self, pool: ConnectionPool, commands: Sequence[Command], deadline: float) -> list[Reply]:
        """One reply for each command; those that got none are `Broken`. Raises `TierError` only if the transport
        `direct` is asked for and cannot be had."""
        replies: list[Reply] = []
        connection = None
        complete = False
        try:
            with budget.within(deadline):
                connection = take(pool)
                self._run(connection, commands, deadline, replies)
            complete = True
        except (exceptions.RedisError, OSError, WireError) as error:
            broken = broken_by(error)
            replies += [broken] * (len(commands) - len(replies))
        finally:
            if connection is not None:
                if not complete:
                    connection.disconnect()
                pool.release(connection)
            if self._closed:  # checked after the release: this thread or `close` finds the connection in the pool
                pool.disconnect(inuse_connections=False)
        return replies

    def _run(self, connection: Any, commands: Sequence[Command], deadline: float, replies: list[Reply]) -> None:
        moves = any(command.payload or command.into is not None for command in commands)
        if moves and self._transport != "plain":
            sock = direct_socket(connection)
            if sock is not None:
                with channel_on(sock, deadline) as channel:
                    converse(channel, commands, replies)
                return
            if self._transport == "direct":
                from redis import __version__

                raise TierError(
                    f"tier {self._tier!r} cannot move payloads directly: redis-py {__version__} hides its socket: set "
                    f'l2.{self._tier}.transport = "auto", or install another redis',
                    retryable=False,
                )
            self.fell_back = True
        _plain(connection, commands, deadline, replies)


def _plain(connection: Any, commands: Sequence[Command], deadline: float, replies: list[Reply]) -> None:
    """redis-py's own packing and parsing, with copies."""
    _limit(connection, deadline)
    packed = [(*command.arguments, *_value(command), *command.options) for command in commands]
    connection.send_packed_command(connection.pack_commands(packed), check_health=False)
    for command in commands:
        # If we cannot reach the socket, it keeps the time-out of the connect; then this enforces the deadline.
        if not _limit(connection, deadline) and not connection.can_read(timeout=left_s(deadline)):
            raise TimeoutError("the deadline has come")
        connection.reply_bytes_max = command.room_bytes + command.reply_bytes_max
        try:
            value = connection.read_response(disable_decoding=True)
        except (exceptions.ResponseError, exceptions.BusyLoadingError) as error:
            replies.append(_refusal(error))
            if isinstance(error, exceptions.ConnectionError):  # redis-py has closed the connection
                replies += [_refusal(error)] * (len(commands) - len(replies))
                return
            continue
        except exceptions.ConnectionError as error:
            if command.into is not None and _cause(error, budget.TooManyBytesError) is not None:
                replies.append(Received(connection.reply_bytes_max, False))  # and nothing can be read behind it
            raise
        if command.into is None or value is None:
            replies.append(value)
        elif isinstance(value, bytes):
            replies.append(_placed(value, command))
        else:
            raise WireError(f"an object was requested, and {str(value)[:40]!r} came")


def _value(command: Command) -> tuple[bytes, ...]:
    return (b"".join(command.payload),) if command.payload else ()


def _placed(value: bytes, command: Command) -> Received:
    if len(value) > command.room_bytes:
        return Received(len(value), False)
    at, content = 0, memoryview(value)
    for part in command.into or ():
        piece = content[at : at + part.nbytes]
        part.cast("B")[: piece.nbytes] = piece
        at += piece.nbytes
    return Received(len(value), True)


def _limit(connection: Any, deadline: float) -> bool:
    """Limit the socket's waits to the deadline. False: the socket cannot be reached."""
    sock = direct_socket(connection)
    if sock is not None:
        sock.settimeout(left_s(deadline))
    return sock is not None


def _refusal(error: exceptions.RedisError) -> Refusal:
    text = str(error)
    for kind, code in _CODES:
        if isinstance(error, kind):
            return Refusal(code, text.removeprefix(f"{code} "))
    code, _, rest = text.partition(" ")
    return Refusal(code, rest) if code.isupper() else Refusal("ERR", text)


def broken_by(error: Exception) -> Broken:
    """Why there was no answer, without secrets, and with the cure if only a person can help."""
    refused = _cause(error, ssl.SSLCertVerificationError)
    if refused is not None:
        return _closed_to_us(f"the server's certificate was refused ({refused.verify_message})", "certificate")
    if isinstance(error, exceptions.AuthenticationError):
        return _closed_to_us(f"the server refused user and password ({error})", "user")
    if isinstance(error, exceptions.NoPermissionError):
        return _closed_to_us(f"the user may not connect ({error})", "rights")
    if isinstance(error, TimeoutError | exceptions.TimeoutError):
        return Broken("no answer in time", late=True)
    if isinstance(error, exceptions.ResponseError):
        return _closed_to_us(f"the server refused the connection ({error})", "protocol")
    return Broken(str(error) or type(error).__name__)


def _cause(error: BaseException, kind: type[E]) -> E | None:
    """The first of this kind that led to the error."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, kind):
        cause = cause.__cause__ or cause.__context__
    return cause


def _closed_to_us(text: str, why: str) -> Broken:
    return Broken(text, retryable=False, cure=NO_CONNECTION_CURES[why])
