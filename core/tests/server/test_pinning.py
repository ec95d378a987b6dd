"""A client pins its own mapping of the pool, by one call."""

from __future__ import annotations

from typing import ClassVar

import pytest

from lmcache_core.client.client import Client
from lmcache_core.errors import NotAttachedError
from lmcache_core.server.server import Server


class Runtime:
    """Takes everything, and remembers what."""

    registered: ClassVar[list[tuple[int, int]]] = []

    def register(self, address: int, nbytes: int) -> int:
        self.registered.append((address, nbytes))
        return 0

    def unregister(self, address: int) -> int:
        self.registered.remove(next(each for each in self.registered if each[0] == address))
        return 0


def test_the_mapping_is_pinned_once_for_as_long_as_it_is_there(
    server: Server, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lmcache_core.devices.pinning._TorchRuntime", Runtime)
    assert client.pin_memory()
    assert [nbytes for _, nbytes in Runtime.registered] == [server.parts.segment.header.segment_bytes]
    assert not client.pin_memory()
    assert len(Runtime.registered) == 1
    client.close()
    assert Runtime.registered == []


def test_who_does_not_map_the_pool_has_nothing_to_pin(server: Server) -> None:
    with server.connect(maps_pool=False) as watcher, pytest.raises(NotAttachedError):
        watcher.pin_memory()
