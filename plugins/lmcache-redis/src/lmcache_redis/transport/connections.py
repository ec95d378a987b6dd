"""redis-py's connections, as this adapter needs them: no retries, time limits from each call's deadline.

Everything about reaching a server (sockets, TLS, HELLO and AUTH, the pool) is redis-py's own. Works with redis-py 5 to
7, whose pools differ in a few arguments.
"""

from __future__ import annotations

import inspect
import math
import socket
import ssl
import time
from typing import Any, NamedTuple

from redis import connection as redis_connection
from redis import exceptions
from redis.backoff import NoBackoff
from redis.connection import Connection, ConnectionPool, SSLConnection, UnixDomainSocketConnection
from redis.retry import Retry
from redis.sentinel import Sentinel

from lmcache_core.protocol.hostport import HostPort
from lmcache_core.tiers import budget
from lmcache_redis.settings import RedisSettings
from lmcache_redis.transport.commands import REPLY_BYTES_MAX

_SERVICES_BYTES_MAX = 1 << 20  # all services of a Sentinel, at 1.2 KiB each
_READ_AHEAD_BYTES = 64 << 10  # redis-py receives so much at once, of this reply or of later ones
# Not hiredis: it makes a list as long as a reply's head says. redis-py puts its parser of RESP3 in this one's place.
_PARSER = getattr(redis_connection, "_RESP2Parser", redis_connection.DefaultParser)
_CONNECT_MAX_S = 60.0  # if no limit is set
_NAMES_COMMAND = inspect.signature(ConnectionPool.get_connection).parameters.get("command_name")
_ASKS_FOR_NAME = _NAMES_COMMAND is not None and _NAMES_COMMAND.default is inspect.Parameter.empty


class Address(NamedTuple):
    """Where a server listens. Port 0: `host` is the path of a Unix socket."""

    host: str
    port: int

    def __str__(self) -> str:
        return str(HostPort(self.host, self.port)) if self.port else self.host


def address_of(text: str) -> Address:
    """`HOST:PORT`; IPv6 with or without brackets. Raises `ValueError` for anything else."""
    host, colon, port = text.rpartition(":")
    if not colon or not (port.isascii() and port.isdigit()) or not 0 < int(port[:6]) < 65536 or " " in host:
        raise ValueError(f"{text[:80]!r} is not HOST:PORT")
    return Address(host.strip("[]"), int(port))


class _Budgeted:
    """Opened, authenticated and used within the thread's budget: redis-py fixes its limits when a pool is made, and
    they bound each wait separately. Every reply that redis-py reads comes through `read_response`."""

    connect_timeout_s = 2.0
    reply_bytes_max = REPLY_BYTES_MAX  # of the reply that is read next

    def __init__(self, **options: Any) -> None:
        super().__init__(parser_class=_PARSER, **options)  # type: ignore[call-arg]  # of the redis-py class

    def connect(self) -> None:
        limit = min(budget.left_s(), self.connect_timeout_s)
        for name in ("socket_connect_timeout", "socket_timeout"):  # attributes, or properties, of redis-py's class
            setattr(self, name, limit)
        with budget.within(time.monotonic() + limit):
            super().connect()  # type: ignore[misc]  # of the redis-py class this is mixed into

    def read_response(self, *arguments: Any, **options: Any) -> Any:
        """One reply, as redis-py's parser reads it. Raises `InvalidResponse` for what it cannot read."""
        try:
            with budget.within(math.inf, self.reply_bytes_max + _READ_AHEAD_BYTES):
                return super().read_response(*arguments, **options)  # type: ignore[misc]
        except (ValueError, TypeError, ArithmeticError, LookupError, RecursionError, MemoryError) as error:
            raise exceptions.InvalidResponse(
                f"redis-py cannot read a reply ({type(error).__name__}: {error})"
            ) from error

    def _connect(self) -> Any:
        sock = super()._connect()  # type: ignore[misc]
        # redis-py creates sockets and TLS contexts without a way to choose their class.
        if isinstance(sock, ssl.SSLSocket):
            sock.__class__ = budget.BudgetTlsSocket
        elif isinstance(sock, socket.socket):
            sock.__class__ = budget.BudgetSocket
        return sock


class _AllAddresses(Connection):
    """TCP with one limit for all addresses of a host."""

    def _connect(self) -> Any:
        limit = min(budget.left_s(), self.socket_connect_timeout or _CONNECT_MAX_S)
        sock = budget.connect(self.host, self.port, time.monotonic() + limit)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.settimeout(self.socket_timeout)
        return sock


class _Tcp(_Budgeted, _AllAddresses):
    pass


class _Tls(_Budgeted, SSLConnection, _AllAddresses):
    pass


class _Unix(_Budgeted, UnixDomainSocketConnection):
    pass


def make_pool(settings: RedisSettings, address: Address) -> ConnectionPool:
    """A pool for one server; nothing is connected yet."""
    kind: type[Any] = _Tls if settings.encrypted else _Tcp
    where: dict[str, Any] = {"host": address.host, "port": address.port, "socket_keepalive": True}
    if not address.port:
        kind, where = _Unix, {"path": address.host}
    username, password = settings.credentials
    limited = type(kind.__name__, (kind,), {"connect_timeout_s": settings.connect_timeout_s})
    return ConnectionPool(
        connection_class=limited,
        db=settings.database,
        username=username,
        password=password,
        protocol=settings.protocol,
        retry=Retry(NoBackoff(), 0),
        socket_timeout=settings.connect_timeout_s,
        **_no_notices(),
        **where,
        **(tls_options(settings) if kind is _Tls else {}),
    )


def take(pool: ConnectionPool) -> Any:
    """A connection that is open and idle. Return it with `pool.release`."""
    return pool.get_connection("_") if _ASKS_FOR_NAME else pool.get_connection()


def direct_socket(connection: Any) -> socket.socket | None:
    """The socket of a connection, if payloads may bypass redis-py: it is a real socket, and redis-py has buffered
    nothing from it (the pool checks that when it hands out a connection). None: redis-py's internals are unknown."""
    sock = getattr(connection, "_sock", None)
    return sock if isinstance(sock, socket.socket) and sock.fileno() >= 0 else None


def tls_options(settings: RedisSettings) -> dict[str, Any]:
    """redis-py's arguments for our TLS settings."""
    options: dict[str, Any] = {
        "ssl_cert_reqs": "none" if settings.tls_verify == "none" else "required",
        "ssl_check_hostname": settings.tls_verify == "full",
    }
    names = {"ssl_ca_certs": settings.tls_ca, "ssl_certfile": settings.tls_cert, "ssl_keyfile": settings.tls_key}
    return options | {name: str(path) for name, path in names.items() if path is not None}


def find_primary(settings: RedisSettings, timeout_s: float) -> Address:
    """The primary that the Sentinels name. Raises `redis.exceptions.RedisError` if they cannot be reached, or name
    none."""
    secret = settings.sentinel_password
    options: dict[str, Any] = {
        "username": settings.sentinel_username,
        "password": secret.get_secret_value() if secret is not None else None,
        "protocol": 2,  # redis-py 7 does not understand what Sentinels answer in RESP3
        "retry": Retry(NoBackoff(), 0),
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        **({"ssl": True, **tls_options(settings)} if settings.encrypted else {}),
    }
    make: Any = Sentinel  # untyped in redis-py
    limits = {"connect_timeout_s": timeout_s, "reply_bytes_max": _SERVICES_BYTES_MAX}
    kind = type("_OfSentinel", (_Tls if settings.encrypted else _Tcp,), limits)
    sentinels = make([tuple(address_of(node)) for node in settings.nodes], sentinel_kwargs=options)
    for sentinel in sentinels.sentinels:
        sentinel.connection_pool.connection_class = kind
    try:
        host, port = sentinels.discover_master(settings.sentinel_service)
    finally:
        for sentinel in sentinels.sentinels:
            sentinel.close()
    return Address(host, int(port))


def _no_notices() -> dict[str, Any]:
    """Newer versions subscribe to maintenance notices, and then no longer check that a connection is idle."""
    try:
        from redis.maint_notifications import MaintNotificationsConfig
    except ImportError:
        return {}
    return {"maint_notifications_config": MaintNotificationsConfig(enabled=False)}
