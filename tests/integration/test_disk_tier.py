"""End to end with a disk behind the pool: store, tier, evicted, prefetched, read; and what may go wrong there."""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path

import pytest

from lmcache_core.client.client import Client
from lmcache_core.client.results import Status
from lmcache_core.kernel.answers import Reason
from lmcache_core.pool.layout import Layout
from lmcache_core.tokens.namespace import Namespace
from lmcache_testing.waiting import until

from ..conftest import Node

KEYS = 20


@pytest.fixture
def disk(tmp_path: Path) -> list[str]:
    return ["--l2.disk.type", "fs", "--l2.disk.path", str(tmp_path / "disk")]


def files(tmp_path: Path) -> list[Path]:
    """Objects on the medium itself; not those that are still being written under a temporary name."""
    return [path for path in (tmp_path / "disk" / "objects").rglob("*") if file_bytes(path) > 65536]


def file_bytes(path: Path) -> int:
    """0 for a folder, and for a file that an eviction has just deleted."""
    try:
        return path.stat().st_size if path.is_file() else 0
    except FileNotFoundError:
        return 0


def stored_objects(client: Client) -> int:
    return int(client.status()["tiers"]["tiers"][0]["objects"])


def fill(node: Node, client: Client, first: int = 0, count: int = KEYS) -> list[bytes]:
    keys = [node.key(i) for i in range(first, first + count)]
    sources = [node.payload(i) for i in range(first, first + count)]
    assert client.store(keys, sources, namespace=node.namespace).stored == count
    return keys


def read_back(node: Node, client: Client, keys: list[bytes], wait_s: float = 30.0) -> int:
    """Look up, wait for the loads, retrieve; the hits, with every byte checked."""
    found = client.lookup(keys, namespace=node.namespace, hold=True, wait_s=wait_s)
    into = [bytearray(65536) for _ in keys]
    result = client.retrieve(keys, into, namespace=node.namespace, promise=found.promise)
    assert result.hits == found.hits
    for at in range(result.hits):
        assert bytes(into[at]) == node.payload(int(keys[at].lstrip(b"\0") or b"0"))
    return int(result.hits)


@pytest.mark.parametrize("in_pool", [0, 1])
def test_a_hold_that_is_answered_in_the_background_makes_one_promise_which_its_holder_is_told_of(
    node: Node, tmp_path: Path, disk: list[str], in_pool: int
) -> None:
    node.serve(*disk)
    client = node.client()
    keys = fill(node, client)
    until(lambda: len(files(tmp_path)) == KEYS, "the files")
    client.clear(node.namespace)
    fill(node, client, count=in_pool)
    found = client.lookup(keys, namespace=node.namespace, hold=True)  # answered now, and loaded afterwards
    held = found.promise.numbers if found.promise else []
    assert len(held) == in_pool
    until(lambda: client.lookup(keys, namespace=node.namespace, tiers=[]).hits == KEYS, "the loads")
    count = lambda: client.status()["l1"]["leases_by_kind"]["promise"]  # noqa: E731
    assert count() == in_pool
    told = {client.query_prefetch_status(found.job).promise for _ in range(3)}
    assert count() == 1
    assert set(held) <= told
    # What was loaded is kept by that promise: the pool cannot be filled over it.
    client.store([node.key(at) for at in range(1000, 1300)], [node.payload(1)] * 300, namespace=node.namespace)
    assert client.lookup(keys, namespace=node.namespace, tiers=[]).hits == KEYS
    assert client.free_lookup_locks(list(told)) == 1
    assert count() == 0


def test_what_left_the_pool_is_read_from_disk(node: Node, tmp_path: Path, disk: list[str]) -> None:
    node.serve(*disk)
    client = node.client()
    keys = fill(node, client)
    until(lambda: len(files(tmp_path)) == KEYS, "the files")
    client.clear(node.namespace)
    assert client.lookup(keys, namespace=node.namespace, tiers=[]).hits == 0
    assert read_back(node, client, keys) == KEYS
    assert client.status()["counters"]["loaded"] == KEYS


def test_a_pool_that_overflows_serves_all_of_it_from_the_disk(node: Node, tmp_path: Path, disk: list[str]) -> None:
    node.serve(*disk)
    client = node.client()
    keys: list[bytes] = []

    def keeps_up() -> bool:
        return len(files(tmp_path)) >= len(keys)

    for first in range(0, 600, 50):  # 37 MiB through a pool of 16
        keys += fill(node, client, first, 50)
        until(keeps_up, "the disk to keep up")
    assert client.status()["counters"]["evicted"] > 0
    for first in range(0, 600, 100):
        assert read_back(node, client, keys[first : first + 100]) == 100


def test_after_kill_9_of_the_server_the_next_one_reads_from_disk(node: Node, tmp_path: Path, disk: list[str]) -> None:
    server = node.serve(*disk)
    client = node.client()
    keys = fill(node, client)
    until(lambda: len(files(tmp_path)) == KEYS, "the files")
    server.kill()
    node.serve(*disk)
    until(lambda: client.lookup(keys, namespace=node.namespace).statuses[0] is not Status.UNREACHABLE)
    assert read_back(node, client, keys) == KEYS


def test_sigterm_flushes_what_was_not_stored_yet(node: Node, tmp_path: Path, disk: list[str]) -> None:
    server = node.serve(*disk)
    client = node.client()
    fill(node, client, count=100)
    server.signal(signal.SIGTERM)
    assert server.popen.wait(60) == 0
    assert len(files(tmp_path)) == 100


def test_a_flipped_bit_is_a_miss_with_its_reason_and_is_set_aside(node: Node, tmp_path: Path, disk: list[str]) -> None:
    node.serve(*disk)
    client = node.client()
    keys = fill(node, client, count=3)
    until(lambda: len(files(tmp_path)) == 3, "the files")
    client.clear(node.namespace)
    victim = next(path for path in files(tmp_path) if keys[1].hex() in str(path).replace(os.sep, ""))
    content = bytearray(victim.read_bytes())
    content[-100] ^= 4
    victim.write_bytes(content)
    found = client.lookup(keys, namespace=node.namespace, wait_s=30)
    assert found.hits == 1
    assert found.reasons[1] is Reason.DAMAGED
    assert read_back(node, client, keys) == 1


def test_clear_with_tiers_is_for_good_also_after_a_restart(node: Node, tmp_path: Path, disk: list[str]) -> None:
    server = node.serve(*disk)
    client = node.client()
    keys = fill(node, client)
    until(lambda: len(files(tmp_path)) == KEYS, "the files")
    client.clear(node.namespace, tiers=True)
    assert client.lookup(keys, namespace=node.namespace, wait_s=30).hits == 0
    server.kill()
    node.serve(*disk)
    until(lambda: client.lookup(keys, namespace=node.namespace).statuses[0] is not Status.UNREACHABLE)
    assert client.lookup(keys, namespace=node.namespace, wait_s=30).hits == 0


def test_a_capacity_in_bytes_is_kept_by_evicting_on_the_disk(node: Node, tmp_path: Path, disk: list[str]) -> None:
    node.serve(*disk, "--l2.disk.capacity_bytes", "2MiB")
    client = node.client()
    fill(node, client, count=100)
    until(lambda: client.status()["tiers"]["tiers"][0]["bytes_used"] > 0, "stores")

    def settled() -> bool:
        tier = client.status()["tiers"]["tiers"][0]
        on_disk = sum(map(file_bytes, files(tmp_path)))
        return tier["bytes_used"] <= 2 << 20 and on_disk <= 2 << 20 and not tier["lanes"]["disk-store"]["queued"]

    until(settled, "the capacity")


def test_a_lookup_can_be_asked_about_while_it_loads(node: Node, tmp_path: Path, disk: list[str]) -> None:
    node.serve(*disk)
    client = node.client()
    keys = fill(node, client)
    until(lambda: len(files(tmp_path)) == KEYS, "the files")
    client.clear(node.namespace)
    found = client.lookup(keys, namespace=node.namespace)
    assert found.job
    assert client.query_lookup_hits(found.job).hits == KEYS
    until(lambda: client.query_prefetch_status(found.job).done, "the loads")
    assert client.lookup(keys, namespace=node.namespace, tiers=[]).hits == KEYS


def test_lookup_nowait_answers_when_the_loads_have_ended(node: Node, tmp_path: Path, disk: list[str]) -> None:
    node.serve(*disk)
    client = node.client()
    keys = fill(node, client)
    until(lambda: len(files(tmp_path)) == KEYS, "the files")
    client.clear(node.namespace)
    handle = client.lookup_nowait(keys, namespace=node.namespace)
    until(lambda: handle.done, "the handle")
    assert handle.result is not None
    assert handle.result.hits == KEYS
    cancelled = client.lookup_nowait([node.key("nowhere")], namespace=node.namespace)
    cancelled.cancel()
    assert cancelled.done


def test_buffer_only_mode_drops_from_the_pool_what_the_disk_has(node: Node, tmp_path: Path, disk: list[str]) -> None:
    node.serve(*disk, "--store_policy", "skip_l1", "--l1.eviction", "noop")
    client = node.client()
    keys: list[bytes] = []
    for first in range(0, 500, 50):  # twice the pool, and its eviction policy never evicts
        until(lambda: client.status()["l1"]["used_bytes"] < 8 << 20, "the disk to keep up")
        keys += fill(node, client, first, 50)
    until(lambda: client.status()["l1"]["used_bytes"] == 0, "the drops")
    assert len(files(tmp_path)) == 500
    assert read_back(node, client, keys[:100]) == 100


def test_two_servers_may_share_one_directory(node: Node, tmp_path: Path, disk: list[str]) -> None:
    from lmcache_core.client.client import Client

    node.serve(*disk)
    client = node.client()
    keys = fill(node, client)
    until(lambda: len(files(tmp_path)) == KEYS, "the files")
    first_name, node.name = node.name, node.name + "b"
    node.serve(*disk)
    with Client.connect(node.name, runtime_dir=node.run) as other:
        assert read_back(node, other, keys) == KEYS
    node.name = first_name


def test_status_is_plain_json(node: Node, disk: list[str]) -> None:
    node.serve(*disk)
    status = node.client().status()
    assert json.loads(json.dumps(status)) == status


def test_a_server_with_another_key_misses_and_leaves_the_objects_to_who_has_theirs(
    node: Node, tmp_path: Path, disk: list[str]
) -> None:
    pytest.importorskip("lmcache_crypto")
    for name in ("ours", "another"):
        (tmp_path / name).write_text(os.urandom(32).hex())

    def sealed(name: str) -> list[str]:
        return [*disk, "--l2.disk.serde", json.dumps([{"type": "aesgcm", "key_file": str(tmp_path / name)}])]

    def read_by(name: str, expected: int) -> None:
        server = node.serve(*sealed(name))
        with server.client() as client:
            assert read_back(node, client, keys) == expected
        server.signal(signal.SIGTERM)
        assert server.popen.wait(60) == 0

    first = node.serve(*sealed("ours"))
    with first.client() as client:
        keys = fill(node, client, count=4)
    first.signal(signal.SIGTERM)
    assert first.popen.wait(60) == 0
    read_by("another", 0)
    read_by("ours", 4)


def test_what_fits_on_a_small_tier_once_it_is_compressed_evicts_nothing(
    node: Node, tmp_path: Path, disk: list[str]
) -> None:
    pytest.importorskip("lmcache_compress")
    objects, nbytes, capacity = 60, 1 << 20, 8 << 20
    namespace = Namespace("m", Layout("uint8", (nbytes,)))
    node.serve(*disk, "--l2.disk.capacity_bytes", str(capacity), "--l2.disk.serde", "zstd", size="80MiB")
    client = node.client()
    rng = random.Random(0)
    contents = {
        node.key(i): (rng.randbytes(90_000 + 100 * i) + bytes(nbytes))[:nbytes] for i in range(objects)
    }  # 5.7 MB encoded, of the 6.7 MB below the watermark
    for first in range(0, objects, 20):
        keys = list(contents)[first : first + 20]
        client.store(keys, [contents[key] for key in keys], namespace=namespace)
    until(lambda: stored_objects(client) == objects, "the stores")
    (tier,) = client.status()["tiers"]["tiers"]
    assert tier["deletes"]["evicted"] == 0
    assert tier["bytes_reserved"] == 0
    on_disk = [path.stat().st_size for path in (tmp_path / "disk" / "objects").glob("*/*")]
    assert len(on_disk) == objects
    assert sum(on_disk) - 16 * objects == tier["bytes_used"] < 0.8 * capacity  # each file has a trailer
    client.clear(namespace)
    into = [bytearray(nbytes) for _ in range(objects)]
    client.lookup(list(contents), namespace=namespace, wait_s=30.0)
    assert client.retrieve(list(contents), into, namespace=namespace).hits == objects
    assert all(bytes(got) == content for got, content in zip(into, contents.values(), strict=True))
