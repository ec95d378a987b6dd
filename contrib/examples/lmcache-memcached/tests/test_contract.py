"""The kit against this adapter, on a real memcached."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest
from lmcache_memcached.adapter import MemcachedAdapter
from lmcache_memcached.settings import MemcachedSettings

from lmcache_core.tiers.contract import AdapterContext
from lmcache_testing import Backdoor, L2AdapterContract, StallingProxy

if TYPE_CHECKING:
    from conftest import Memcached


class TestMemcached(L2AdapterContract):
    component = "memcached"

    @pytest.fixture
    def proxy(self, memcached: Memcached) -> Iterator[StallingProxy]:
        with StallingProxy("127.0.0.1", memcached.port) as proxy:
            yield proxy

    @pytest.fixture
    def adapter(self, proxy: StallingProxy, prefix: str, adapter_context: AdapterContext) -> Iterator[MemcachedAdapter]:
        with MemcachedAdapter(MemcachedSettings(port=proxy.port, prefix=prefix), adapter_context) as adapter:
            yield adapter

    @pytest.fixture
    def reopen(
        self, proxy: StallingProxy, prefix: str, adapter_context: AdapterContext
    ) -> Callable[[], MemcachedAdapter]:
        return lambda: MemcachedAdapter(MemcachedSettings(port=proxy.port, prefix=prefix), adapter_context)

    @pytest.fixture
    def backdoor(self, memcached: Memcached, prefix: str) -> Backdoor:
        return Values(memcached, prefix)

    @pytest.fixture
    def small_adapter(self, small_memcached: Memcached, adapter_context: AdapterContext) -> Iterator[MemcachedAdapter]:
        with MemcachedAdapter(MemcachedSettings(port=small_memcached.port), adapter_context) as adapter:
            yield adapter

    @pytest.fixture
    def hang(self, memcached: Memcached) -> contextlib.AbstractContextManager[None]:
        return memcached.stopped()

    @pytest.fixture
    def stall(self, proxy: StallingProxy) -> contextlib.AbstractContextManager[None]:
        return proxy.stall()

    @pytest.fixture
    def outage(self, proxy: StallingProxy) -> contextlib.AbstractContextManager[None]:
        return proxy.outage()

    @pytest.fixture
    def unreachable(self, adapter_context: AdapterContext) -> Iterator[MemcachedAdapter]:
        with socket.socket() as taken:  # bound, and nobody listens
            taken.bind(("127.0.0.1", 0))
            with MemcachedAdapter(MemcachedSettings(port=taken.getsockname()[1]), adapter_context) as adapter:
                yield adapter


class Values(Backdoor):
    """By another connection."""

    def __init__(self, memcached: Memcached, prefix: str) -> None:
        self._memcached = memcached
        self._prefix = prefix.encode()

    def read(self, key: bytes) -> bytes | None:
        answer: bytes = self._memcached.ask(b"get %s\r\n" % self._name(key))
        if answer == b"END\r\n":
            return None
        head, _, rest = answer.partition(b"\r\n")
        return rest[: int(head.split(b" ")[3])]

    def write(self, key: bytes, content: bytes) -> None:
        answer = self._memcached.ask(b"set %s 0 0 %d\r\n" % (self._name(key), len(content)), content, b"\r\n")
        assert answer == b"STORED\r\n", answer

    def remove(self, key: bytes) -> None:
        assert self._memcached.ask(b"delete %s\r\n" % self._name(key)) == b"DELETED\r\n"

    def _name(self, key: bytes) -> bytes:
        return self._prefix + key.hex().encode()
