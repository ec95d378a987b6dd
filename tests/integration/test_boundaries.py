"""A hybrid model's common hit where the pool has lost what a tier still has."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmcache_core import CommonHits, KeyGroup, Layout, Namespace, Need
from lmcache_testing.waiting import until

from ..conftest import Node

CHUNKS = 8


@pytest.mark.parametrize("waits", [True, False])
def test_a_hybrid_model_gets_from_the_tiers_what_the_boundary_needs(node: Node, tmp_path: Path, waits: bool) -> None:
    pytest.importorskip("lmcache_fs")
    node.serve("--l2.disk.type", "fs", "--l2.disk.path", str(tmp_path / "disk"))
    client = node.client()
    spaces = [Namespace(name, Layout("uint8", (65536,))) for name in ("full", "sliding", "state")]
    keys = [[node.key(f"{name} {at}") for at in range(CHUNKS)] for name in "abc"]
    for space, each in zip(spaces, keys, strict=True):
        stored = each if space is not spaces[2] else each[: CHUNKS - 1]  # the last state was never stored
        client.store(stored, [bytes(65536)] * len(stored), namespace=space)
    until(lambda: client.status()["tiers"]["tiers"][0]["objects"] == 3 * CHUNKS - 1, "the disk")
    for space, each in zip(spaces, keys, strict=True):
        seen = client.lookup(each, namespace=space, prefix=False, identify=True).incarnations
        client.drop(each, namespace=space, incarnations=seen, tiers=False)

    needs = [Need.PREFIX, Need.last_window(2), Need.LAST]
    groups = [KeyGroup(space, each, need) for space, each, need in zip(spaces, keys, needs, strict=True)]
    assert client.lookup_many(groups, unit_tokens=16, ask=False).tokens == 0
    found: CommonHits | None
    if waits:
        found = client.lookup_many(groups, unit_tokens=16, wait_s=60.0)
    else:
        found = client.lookup_many_nowait(groups, unit_tokens=16, wait_s=60.0, hold=True).wait(60.0)

    assert found is not None
    assert found.done
    assert found.tokens == 16 * (CHUNKS - 1)
    assert [hits[:2] for hits in found.groups] == [(0, 7), (5, 7), (6, 7)]
    for space, each, hits, promise in zip(spaces, keys, found.groups, found.promises, strict=True):
        wanted = each[hits.first : hits.end]
        into = [bytearray(65536) for _ in wanted]
        assert (promise is None) is waits
        assert client.retrieve(wanted, into, namespace=space, promise=promise).hits == len(wanted)
