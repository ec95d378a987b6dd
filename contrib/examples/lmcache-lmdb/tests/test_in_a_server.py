"""The tier in a real server; a second process writes; the largest key that LMDB takes is far beyond ours."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from lmcache_core import Layout, Namespace, Server, make_settings

NAMESPACE = Namespace("a model", Layout("uint8", (65536,)))
KEYS = [number.to_bytes(32, "big") for number in range(4)]
WRITER = """
import sys, time
from pathlib import Path
from lmcache_core.tiers.contract import AdapterContext, StoreItem
from lmcache_lmdb.adapter import LmdbAdapter
from lmcache_lmdb.settings import LmdbSettings
settings = LmdbSettings(path=Path(sys.argv[1]), map_bytes=64 << 20)
with LmdbAdapter(settings, AdapterContext(tier="other")) as adapter:
    for turn in range(200):
        items = [StoreItem(b"%d-%d" % (int(sys.argv[2]), turn), [memoryview(bytes(1000))])]
        print(adapter.store(items, time.monotonic() + 60)[0].result)
"""


def test_what_was_stored_comes_back_from_the_file(tmp_path: Path) -> None:
    settings = make_settings(
        name="lmdb-test",
        l1={"size_bytes": "16MiB", "backing": "memfd"},
        l2={"mine": {"type": "lmdb", "path": str(tmp_path / "kv.mdb"), "map_bytes": "64MiB"}},
        runtime_dir=str(tmp_path / "run"),
        state_dir=str(tmp_path / "state"),
    )
    contents = [bytes([number]) * 65536 for number in range(4)]
    with Server(settings) as server, server.connect() as client:
        assert server.parts.populator.wait(60)
        assert client.store(KEYS, contents, namespace=NAMESPACE).stored == 4
        assert all(each.stored for each in client.wait_stored(KEYS, namespace=NAMESPACE, timeout_s=60))
        client.clear(NAMESPACE)
        back = [bytearray(65536) for _ in KEYS]
        client.lookup(KEYS, namespace=NAMESPACE, wait_s=60)
        assert client.retrieve(KEYS, back, namespace=NAMESPACE).hits == 4
    assert back == contents


def test_processes_that_write_at_once_wait_for_each_other(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITER, str(tmp_path / "kv.mdb")]
    writers = [subprocess.Popen([*command, str(number)], stdout=subprocess.PIPE, text=True) for number in range(3)]
    told = [writer.communicate(timeout=120)[0].split() for writer in writers]
    assert told == [["done"] * 200] * 3
