"""Objects encoded in the pool, of a real server in this process."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from lmcache_core import Client, Server, Status
from lmcache_core.errors import SettingsError, UsageError
from lmcache_core.pool.layout import Layout
from lmcache_core.serde.identity import IdentitySerde
from lmcache_core.tokens.namespace import Namespace
from lmcache_quant.dense import Dense
from lmcache_quant.serdes import Int4Serde, Int8Serde
from lmcache_quant.settings import QuantSettings

pytest.importorskip("lmcache_quant._native", reason="built without C")

LAYOUT = Layout("float32", (2, 64, 2, 16), "KTHD")
SPACE = Namespace("small", LAYOUT, "0123456789abcdef")
KEYS = [bytes([at]) * 32 for at in range(1, 5)]
INT8 = Int8Serde(QuantSettings())


@pytest.fixture
def client(start: Callable[..., Server]) -> Iterator[Client]:
    with start(l1={"size_bytes": 4 << 20, "backing": "memfd"}).connect() as client:
        yield client


def values(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(LAYOUT.shape).astype("<f4")


def targets(count: int = 4) -> list[np.ndarray]:
    return [np.zeros(LAYOUT.shape, "<f4") for _ in range(count)]


def views(arrays: list[np.ndarray]) -> list[memoryview]:
    return [memoryview(each).cast("B") for each in arrays]


def test_objects_come_back_as_the_serde_restores_them_and_take_its_size(client: Client) -> None:
    dense, into = Dense(client, SPACE, INT8), targets()
    assert dense.store(KEYS, views([values(at) for at in range(4)])) == [Status.STORED] * 4
    assert dense.retrieve(KEYS, views(into)) == [Status.HIT] * 4
    for at, found in enumerate(into):
        expected = bytearray(LAYOUT.nbytes)
        packed = b"".join(bytes(part) for part in INT8.encode(memoryview(values(at)).cast("B"), LAYOUT, KEYS[at]))
        INT8.decode(memoryview(packed), memoryview(expected), LAYOUT, KEYS[at])
        assert found.tobytes() == expected
    assert dense.namespace.layout.nbytes < 0.3 * LAYOUT.nbytes
    assert dense.store(KEYS, views(into)) == [Status.EXISTS] * 4


def test_many_batches_end_at_the_first_missing_key(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    dense = Dense(client, SPACE, INT8)
    monkeypatch.setattr("lmcache_quant.dense.BATCH_BYTES", 2 * dense.namespace.layout.nbytes)
    keys = [bytes([at]) * 32 for at in range(9)]
    present = [at for at in range(9) if at != 5]
    dense.store([keys[at] for at in present], views([values(at) for at in present]))
    hit, miss = Status.HIT, Status.MISS
    assert dense.retrieve(keys, views(targets(9))) == [hit] * 5 + [miss] * 4
    assert dense.retrieve(keys, views(targets(9)), prefix=False) == [hit] * 5 + [miss] + [hit] * 3
    assert dense.retrieve([], []) == []


def test_nobody_else_finds_them(client: Client) -> None:
    dense = Dense(client, SPACE, INT8)
    others = [
        Dense(client, SPACE, Int4Serde(QuantSettings())),
        Dense(client, SPACE, Int8Serde(QuantSettings(group_tokens=8))),
    ]
    dense.store(KEYS, views([values(at) for at in range(4)]))
    assert client.lookup(KEYS, namespace=SPACE).hits == 0
    assert len({each.namespace.id for each in [dense, *others]} | {SPACE.id}) == 4
    for other in others:
        assert other.retrieve(KEYS, views(targets())) == [Status.MISS] * 4


def test_an_object_that_cannot_be_encoded_is_not_stored(client: Client) -> None:
    dense, odd = Dense(client, SPACE, INT8), values(1)
    odd[1, 3, 1, 2] = math.nan
    sources = views([values(0), odd, values(2), values(3)])
    assert dense.store(KEYS, sources) == [Status.STORED, Status.ABORTED, Status.STORED, Status.STORED]
    hit, miss = Status.HIT, Status.MISS
    assert dense.retrieve(KEYS, views(targets()), prefix=False) == [hit, miss, hit, hit]
    assert dense.retrieve(KEYS, views(targets()))[:2] == [hit, miss]


def test_a_damaged_object_is_a_miss_and_is_dropped(client: Client) -> None:
    dense = Dense(client, SPACE, INT8)
    damaged = b"\0" * dense.namespace.layout.nbytes
    client.store(KEYS[:1], [damaged], namespace=dense.namespace)
    assert dense.retrieve(KEYS[:1], views(targets(1))) == [Status.MISS]
    assert client.lookup(KEYS[:1], namespace=dense.namespace).hits == 0
    assert dense.store(KEYS[:1], views([values(1)])) == [Status.STORED]


def test_a_serde_whose_objects_differ_in_size_is_refused(client: Client) -> None:
    planes = pytest.importorskip("lmcache_compress.planes_serde")
    for serde in (planes.PlanesSerde(), IdentitySerde()):
        with pytest.raises(UsageError, match="no fixed size"):
            Dense(client, SPACE, serde)


def test_a_certificate_is_asked_for(client: Client, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="cannot be read"):
        Dense(client, SPACE, INT8, tmp_path / "none")
    spread = {"mean": 0.0, "deviation": 0.0}
    chain = {"lossy": [["int8", dict(INT8.parameters())]], "divergence": spread, "agreement": spread | {"mean": 1.0}}
    whole = {"format": 1, "model": "small", "weights": SPACE.weights_version, "dtype": "float32", "chains": [chain]}
    (tmp_path / "c").write_text(json.dumps(whole))
    Dense(client, SPACE, INT8, tmp_path / "c")
    with pytest.raises(UsageError, match="for the model small"):
        Dense(client, Namespace("large", LAYOUT, "f" * 16), INT8, tmp_path / "c")
