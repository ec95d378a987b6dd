"""The tier in a real server, and what is left of stores that were killed."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from lmcache_etcd.adapter import EtcdAdapter
from lmcache_etcd.client import Etcd, EtcdError
from lmcache_etcd.settings import PARTS_MAX, EtcdSettings

from lmcache_core import Layout, Namespace, Server, make_settings
from lmcache_core.errors import TierError
from lmcache_core.settings.model import Settings
from lmcache_core.tiers.contract import AdapterContext, LoadItem, Result, StoreItem

NBYTES = 3 << 20
NAMESPACE = Namespace("a model", Layout("uint8", (NBYTES,)))
KEYS = [number.to_bytes(32, "big") for number in range(4)]

if TYPE_CHECKING:
    from conftest import Etcd as EtcdServer


def settings_for(folder: Path, port: int) -> Settings:
    return make_settings(
        name="etcd-test",
        l1={"size_bytes": "32MiB", "backing": "memfd"},
        l2={"mine": {"type": "etcd", "endpoint": f"http://127.0.0.1:{port}", "prefix": f"{folder.name}/"}},
        runtime_dir=str(folder / "run"),
        state_dir=str(folder / "state"),
    )


def test_objects_of_several_parts_come_back_from_etcd_alone(tmp_path: Path, etcd: EtcdServer) -> None:
    settings = settings_for(tmp_path, etcd.port)
    contents = [bytes([number]) * NBYTES for number in range(4)]
    with Server(settings) as server, server.connect() as client:
        assert server.parts.populator.wait(60)
        assert client.store(KEYS, contents, namespace=NAMESPACE).stored == 4
        assert all(each.stored for each in client.wait_stored(KEYS, namespace=NAMESPACE, timeout_s=60))
        client.clear(NAMESPACE)
        back = [bytearray(NBYTES) for _ in KEYS]
        client.lookup(KEYS, namespace=NAMESPACE, wait_s=60)
        assert client.retrieve(KEYS, back, namespace=NAMESPACE).hits == 4
    assert back == contents


def test_the_check_says_what_to_do_where_nothing_listens() -> None:
    with EtcdAdapter(EtcdSettings(endpoint="http://127.0.0.1:1"), AdapterContext(tier="mine")) as adapter:
        with pytest.raises(TierError) as raised:
            list(adapter.check(time.monotonic() + 60))
    assert "start etcd" in raised.value.cure


def test_parts_of_a_store_that_died_go_with_its_lease(etcd: EtcdServer, prefix: str) -> None:
    """The store gives up at its last step, and cannot end its lease either: as after a kill."""
    settings = EtcdSettings(endpoint=f"http://127.0.0.1:{etcd.port}", prefix=prefix, part_bytes=1024)
    leases = []

    class Dies(Etcd):
        def call(self, path: str, body: dict[str, Any], deadline: float) -> dict[str, Any]:
            if path in ("kv/txn", "lease/revoke"):
                raise EtcdError("killed")
            answer = super().call(path, body, deadline)
            if path == "lease/grant":
                leases.append(answer["ID"])
            return answer

    with EtcdAdapter(settings, AdapterContext(tier="mine")) as adapter:
        adapter._etcd = Dies(*settings.address)
        (outcome,) = adapter.store([StoreItem(b"k", [memoryview(bytes(5000))])], time.monotonic() + 60)
        assert outcome.result is Result.FAILED
    assert len(etcd.below(prefix)) == 4
    etcd.ask("lease/revoke", ID=leases[0])  # its time is over
    assert etcd.below(prefix) == {}


def test_an_object_whose_store_came_through_hangs_on_no_lease(etcd: EtcdServer, prefix: str) -> None:
    settings = EtcdSettings(endpoint=f"http://127.0.0.1:{etcd.port}", prefix=prefix, part_bytes=1024)
    with EtcdAdapter(settings, AdapterContext(tier="mine")) as adapter:
        (outcome,) = adapter.store([StoreItem(b"k", [memoryview(bytes(5000))])], time.monotonic() + 60)
    assert outcome.result is Result.DONE
    name = prefix.encode()
    found = etcd.ask("kv/range", key=name, range_end=name[:-1] + b"0", keys_only=True)["kvs"]
    assert [each.get("lease") for each in found] == [None] * 6


def test_the_largest_object_that_is_claimed_is_stored_and_comes_back(etcd: EtcdServer, prefix: str) -> None:
    settings = EtcdSettings(endpoint=f"http://127.0.0.1:{etcd.port}", prefix=prefix, part_bytes=4096)
    content = bytes(range(256)) * (PARTS_MAX * 16)
    with EtcdAdapter(settings, AdapterContext(tier="mine")) as adapter:
        assert len(content) == adapter.capabilities.object_bytes_max
        (stored,) = adapter.store([StoreItem(b"k", [memoryview(content)])], time.monotonic() + 60)
        back = bytearray(len(content))
        (loaded,) = adapter.load([LoadItem(b"k", [memoryview(back)])], time.monotonic() + 60)
    assert (stored.result, loaded.result) == (Result.DONE, Result.DONE)
    assert back == content
