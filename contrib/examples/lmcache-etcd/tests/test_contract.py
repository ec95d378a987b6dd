"""The kit against this adapter, on a real etcd: with objects of one part, and with objects of many."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, ClassVar

import pytest
from lmcache_etcd.adapter import EtcdAdapter
from lmcache_etcd.settings import EtcdSettings

from lmcache_core.tiers.contract import AdapterContext
from lmcache_testing import Backdoor, L2AdapterContract, StallingProxy

if TYPE_CHECKING:
    from conftest import Etcd


class TestEtcd(L2AdapterContract):
    component = "etcd"
    part_bytes: ClassVar[int] = 1 << 20

    @pytest.fixture
    def proxy(self, etcd: Etcd) -> Iterator[StallingProxy]:
        with StallingProxy("127.0.0.1", etcd.port) as proxy:
            yield proxy

    @pytest.fixture
    def settings(self, proxy: StallingProxy, prefix: str) -> EtcdSettings:
        return EtcdSettings(endpoint=f"http://127.0.0.1:{proxy.port}", prefix=prefix, part_bytes=self.part_bytes)

    @pytest.fixture
    def adapter(self, settings: EtcdSettings, adapter_context: AdapterContext) -> Iterator[EtcdAdapter]:
        with EtcdAdapter(settings, adapter_context) as adapter:
            yield adapter

    @pytest.fixture
    def reopen(self, settings: EtcdSettings, adapter_context: AdapterContext) -> Callable[[], EtcdAdapter]:
        return lambda: EtcdAdapter(settings, adapter_context)

    @pytest.fixture
    def backdoor(self, etcd: Etcd, prefix: str) -> Backdoor:
        return Parts(etcd, prefix)

    @pytest.fixture
    def litter(self, etcd: Etcd, prefix: str) -> Callable[[bytes], None]:
        def put(key: bytes) -> None:
            for name in ("o/", "o/no key", "o/AB", "p/00/orphan/0", "q", f"p/{key.hex()}/orphan/0"):
                etcd.ask("kv/put", key=(prefix + name).encode(), value=b"somebody else's")
            etcd.ask("kv/put", key=f"{prefix}o/{key.hex()}".encode(), value=b"no head")

        return put

    @pytest.fixture
    def small_adapter(self, small_etcd: Etcd, adapter_context: AdapterContext) -> Iterator[EtcdAdapter]:
        small = EtcdSettings(endpoint=f"http://127.0.0.1:{small_etcd.port}", part_bytes=self.part_bytes)
        with EtcdAdapter(small, adapter_context) as adapter:
            yield adapter

    @pytest.fixture
    def compact(self, small_etcd: Etcd) -> Callable[[], None]:
        return small_etcd.compact

    @pytest.fixture
    def hang(self, etcd: Etcd) -> contextlib.AbstractContextManager[None]:
        return etcd.stopped()

    @pytest.fixture
    def stall(self, proxy: StallingProxy) -> contextlib.AbstractContextManager[None]:
        return proxy.stall()

    @pytest.fixture
    def outage(self, proxy: StallingProxy) -> contextlib.AbstractContextManager[None]:
        return proxy.outage()

    @pytest.fixture
    def unreachable(self, adapter_context: AdapterContext) -> Iterator[EtcdAdapter]:
        with socket.socket() as taken:  # bound, and nobody listens
            taken.bind(("127.0.0.1", 0))
            nowhere = EtcdSettings(endpoint=f"http://127.0.0.1:{taken.getsockname()[1]}")
            with EtcdAdapter(nowhere, adapter_context) as adapter:
                yield adapter


class TestEtcdInManyParts(TestEtcd):
    """Where nearly every object of the kit is split."""

    part_bytes = 1024
    largest_object_bytes = 100 << 10


class Parts(Backdoor):
    """By another connection: the parts of an object one after the other."""

    def __init__(self, etcd: Etcd, prefix: str) -> None:
        self._etcd = etcd
        self._prefix = prefix

    def read(self, key: bytes) -> bytes | None:
        parts = self._parts(key)
        return b"".join(parts.values()) if parts else None

    def write(self, key: bytes, content: bytes) -> None:
        """Each part takes as many bytes as it had, the last one what is left: the head stays as it is."""
        parts = self._parts(key)
        for at, (name, value) in enumerate(parts.items()):
            part = content if at == len(parts) - 1 else content[: len(value)]
            content = content[len(part) :]
            self._etcd.ask("kv/put", key=(self._prefix + name).encode(), value=part)

    def remove(self, key: bytes) -> None:
        self._etcd.ask("kv/deleterange", key=f"{self._prefix}o/{key.hex()}".encode())

    def _parts(self, key: bytes) -> dict[str, bytes]:
        head = self._etcd.below(f"{self._prefix}o/{key.hex()}").get("")
        if head is None:
            return {}
        below = f"p/{key.hex()}/{head[12:28].hex()}/"
        found = self._etcd.below(self._prefix + below)
        return {below + name: found[name] for name in sorted(found, key=int)}
