"""The contracts of what this package brings: its tier, its helper, its operation."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from lmcache_core.tiers.contract import AdapterContext
from lmcache_core.tiers.object.format import HEADER_BYTES, tier_key
from lmcache_peer.adapter import PeerAdapter
from lmcache_peer.operation import NamespacesRequest
from lmcache_peer.settings import PeerTierSettings
from lmcache_testing import HelperContract, L2AdapterContract, OperationContract
from lmcache_testing.waiting import until

from .conftest import NAMESPACE, StartNode, TestNode, free_port, key


class TestPeerTier(L2AdapterContract):
    component = "peer"

    @pytest.fixture
    def port(self) -> int:
        return free_port()

    @pytest.fixture
    def adapter(self, port: int, adapter_context: AdapterContext) -> Iterator[PeerAdapter]:
        settings = PeerTierSettings(nodes=(f"127.0.0.1:{port}",))
        with PeerAdapter(settings, adapter_context) as adapter:
            yield adapter

    @pytest.fixture
    def filled(self, port: int, node: StartNode, adapter: PeerAdapter) -> Callable[[int], dict[bytes, bytes]]:
        """By a client of the node that serves. What is expected is what the node sends, header and all, checked against
        the bytes that were stored."""

        def put(count: int) -> dict[bytes, bytes]:
            owner: TestNode = node("a", serve={"port": port})
            owner.store(*range(count))
            names = [tier_key(key(number), NAMESPACE.id, 0) for number in range(count)]
            until(lambda: all(adapter.exists(names, time.monotonic() + 10)), "the node's digest")
            return {name: self._object(adapter, name) for name in names}

        return put

    @staticmethod
    def _object(adapter: PeerAdapter, name: bytes) -> bytes:
        from lmcache_core.tiers.contract import LoadItem

        room = bytearray(HEADER_BYTES + NAMESPACE.layout.nbytes)
        view = memoryview(room)
        adapter.load([LoadItem(name, [view[:HEADER_BYTES], view[HEADER_BYTES:]])], time.monotonic() + 10)
        return bytes(room)


class TestPeerHelper(HelperContract):
    component = "peer"

    @pytest.fixture
    def helper_settings(self) -> dict[str, Any]:
        return {"port": 0}


class TestPeerOperation(OperationContract):
    component = "peer"

    @pytest.fixture
    def sample_request(self) -> msgspec.Struct:
        return NamespacesRequest([1, 2], {"read": 1})
