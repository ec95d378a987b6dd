"""KV is not the same bit for bit between two runs: equal keys, other bytes, over a tier that is always behind."""

from __future__ import annotations

import random
import time
from pathlib import Path

import xxhash

from lmcache_core.client.results import Status

from ..conftest import Node

KEYS = 300  # more than the pool holds
ROUNDS = 40


def test_what_is_stored_evicted_and_stored_again_with_other_bytes_is_never_damaged(node: Node, tmp_path: Path) -> None:
    node.serve("--l2.disk.type", "fs", "--l2.disk.path", str(tmp_path / "disk"), "--l2.disk.capacity_bytes", "32MiB",
               "--l2.disk.connections", "1")  # fmt: skip
    rng, client = random.Random(11), node.client()
    nbytes = node.namespace.layout.nbytes
    written: dict[bytes, set[int]] = {}

    def store() -> None:
        chosen = [node.key(number) for number in rng.sample(range(KEYS), 290)]
        sources = [rng.randbytes(nbytes) for _ in chosen]
        result = client.store(chosen, sources, namespace=node.namespace)
        for key, source, status in zip(chosen, sources, result.statuses, strict=True):
            if status is Status.STORED:
                written.setdefault(key, set()).add(xxhash.xxh3_64_intdigest(source))

    def read() -> int:
        chosen = [node.key(number) for number in rng.sample(range(KEYS), 60)]
        found = client.lookup(chosen, namespace=node.namespace, hold=True, wait_s=60.0, prefix=False)
        into = [bytearray(nbytes) for _ in chosen]
        got = client.retrieve(chosen, into, namespace=node.namespace, promise=found.promise, prefix=False)
        for key, buffer, status in zip(chosen, into, got.statuses, strict=True):
            assert status is not Status.HIT or xxhash.xxh3_64_intdigest(buffer) in written[key]
        return got.statuses.count(Status.HIT)

    hits = 0
    for _ in range(ROUNDS):
        store()
        hits += read()
    tier = client.status()["tiers"]["tiers"][0]

    assert hits > 0
    assert tier["counts"]["loaded"] > 0
    assert tier["counts"].get("load_damaged", 0) == 0
    deadline = time.monotonic() + 60
    while client.status()["tiers"]["stores"]["in_flight_bytes"]:
        assert time.monotonic() < deadline
