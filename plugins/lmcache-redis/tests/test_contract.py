"""The conformance kit, over both transports."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar

import pytest
import redis

from lmcache_core.tiers.contract import AdapterContext
from lmcache_redis.adapter import RedisAdapter
from lmcache_redis.settings import RedisSettings
from lmcache_testing import Backdoor, L2AdapterContract, StallingProxy

from .conftest import RedisServer


class Door(Backdoor):
    """redis-py, on keys as the documentation names them."""

    def __init__(self, client: redis.Redis, prefix: str) -> None:
        self._client = client
        self._prefix = prefix

    def read(self, key: bytes) -> bytes | None:
        found = self._client.get(self._prefix + key.hex())
        assert found is None or isinstance(found, bytes)
        return found

    def write(self, key: bytes, content: bytes) -> None:
        self._client.set(self._prefix + key.hex(), content)

    def remove(self, key: bytes) -> None:
        assert self._client.delete(self._prefix + key.hex()) == 1


class RedisContract(L2AdapterContract):
    """What both transports have in common."""

    component = "redis"
    tells_last_use = True
    prefix: ClassVar[str] = "lmcache:"

    settings: ClassVar[dict[str, object]]

    @pytest.fixture
    def made(self, server: RedisServer) -> Callable[..., RedisAdapter]:
        return lambda **more: RedisAdapter(
            RedisSettings(**{"port": server.port, **self.settings, **more}), AdapterContext(tier="shared")
        )

    @pytest.fixture
    def proxy(self, server: RedisServer) -> Iterator[StallingProxy]:
        with StallingProxy("127.0.0.1", server.port) as proxy:
            yield proxy

    @pytest.fixture
    def adapter(self, request: pytest.FixtureRequest, made: Callable[..., RedisAdapter]) -> Iterator[RedisAdapter]:
        behind = {"stall", "outage"} & set(request.fixturenames)  # tests without trouble need no proxy
        where = {"port": request.getfixturevalue("proxy").port} if behind else {}
        with made(ttl_s=3600, **where) as adapter:
            yield adapter

    @pytest.fixture
    def stall(self, proxy: StallingProxy) -> AbstractContextManager[None]:
        return proxy.stall()

    @pytest.fixture
    def outage(self, proxy: StallingProxy) -> AbstractContextManager[None]:
        return proxy.outage()

    @pytest.fixture
    def lock(self, door: redis.Redis) -> AbstractContextManager[None]:
        @contextmanager
        def paused() -> Iterator[None]:
            door.execute_command("CLIENT", "PAUSE", 600_000, "WRITE")
            try:
                yield
            finally:
                door.execute_command("CLIENT", "UNPAUSE")

        return paused()

    @pytest.fixture
    def busy(self, door: redis.Redis) -> AbstractContextManager[None]:
        """NOPERM, to everything but what ends it."""

        @contextmanager
        def forbidden() -> Iterator[None]:
            door.execute_command("ACL", "SETUSER", "default", "-@all", "+acl")
            try:
                yield
            finally:
                door.execute_command("ACL", "SETUSER", "default", "+@all")

        return forbidden()

    @pytest.fixture
    def reopen(self, made: Callable[..., RedisAdapter]) -> Callable[..., RedisAdapter]:
        return made

    @pytest.fixture
    def door(self, server: RedisServer) -> Iterator[redis.Redis]:
        with server.door() as door:
            yield door

    @pytest.fixture
    def backdoor(self, door: redis.Redis) -> Door:
        return Door(door, self.prefix)

    @pytest.fixture
    def litter(self, door: redis.Redis) -> Callable[[bytes], None]:
        """Names that are spelled otherwise than ours, and a value of another kind in the place of an object."""

        def litter(key: bytes) -> None:
            for name in ("notes", "", "CAFE", "ca fe", "caf", "\u00e9\u00e9", "ca\ufeff"):
                door.set(self.prefix + name, b"somebody's")
            for name in ("elsewhere", self.prefix.upper() + "cafe", self.prefix.replace("*", "any") + "cafe"):
                if not name.startswith(self.prefix):
                    door.set(name, b"without the prefix")
            door.rpush(self.prefix + key.hex(), b"a list")

        return litter

    @pytest.fixture
    def wipe(self, door: redis.Redis) -> Callable[[], None]:
        return lambda: door.flushall()

    @pytest.fixture
    def leftovers(self, door: redis.Redis) -> Callable[[], list[bytes]]:
        ours = re.compile(re.escape(self.prefix).encode() + rb"(?:[0-9a-f]{2})+")
        return lambda: [name for name in door.scan_iter() if not ours.fullmatch(name)]

    @pytest.fixture
    def expire(self, door: redis.Redis) -> Callable[[], None]:
        def expire() -> None:
            for key in door.scan_iter():
                assert 0 < door.pttl(key) <= 3_600_000, "stored without its time to live"
                door.pexpire(key, -1)

        return expire

    @pytest.fixture
    def hang(self, server: RedisServer) -> AbstractContextManager[None]:
        @contextmanager
        def stopped() -> Iterator[None]:
            server.signal(signal.SIGSTOP)
            try:
                yield
            finally:
                server.signal(signal.SIGCONT)

        return stopped()

    @pytest.fixture
    def unreachable(self, made: Callable[..., RedisAdapter]) -> Iterator[RedisAdapter]:
        with made(port=1) as adapter:
            yield adapter

    @pytest.fixture
    def small_adapter(self, own_server: Callable[..., RedisServer]) -> Iterator[RedisAdapter]:
        small = own_server("--maxmemory", "5mb", "--maxmemory-policy", "allkeys-lru")
        with RedisAdapter(RedisSettings(port=small.port, **self.settings), AdapterContext(tier="shared")) as adapter:
            yield adapter


class TestDirect(RedisContract):
    settings: ClassVar[dict[str, object]] = {"transport": "direct"}


class TestPlain(RedisContract):
    settings: ClassVar[dict[str, object]] = {"transport": "plain", "protocol": 2}


class TestUnixSocket(RedisContract):
    """And with a prefix of characters that have a meaning to SCAN."""

    prefix = "a*[b]?^\\:"
    settings: ClassVar[dict[str, object]] = {"transport": "direct", "protocol": 2, "key_prefix": prefix}

    @pytest.fixture
    def made(self, server: RedisServer) -> Callable[..., RedisAdapter]:
        def make(**more: Any) -> RedisAdapter:
            where = {} if "port" in more else {"unix_socket": server.path}
            return RedisAdapter(RedisSettings(**where, **self.settings, **more), AdapterContext(tier="shared"))

        return make
