"""Keys and namespaces against values that were computed by hand from the written-down format."""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path

import pytest

from lmcache_core.pool.layout import Layout
from lmcache_core.tokens import Namespace, chunk_keys, keys_from_block_hashes

NAMESPACE = Namespace(
    model="llama",
    layout=Layout("bfloat16", (2, 4, 4, 2, 8), "KLTHD"),
    weights_version="w1",
    kv_shard=(1, 2),
    tenant_salt="sälz",
)
TOKENS = [0, 1, 128_255, 4_294_967_295, 5, 6, 7, 8, 9]


def test_the_namespace_has_the_digest_that_other_builds_computed() -> None:
    assert NAMESPACE.digest.hex() == "86ce6fa6ac40a72c6040ad87c28de9b45188ac37ae9f2a549d7d7fdc9ff8a802"
    assert NAMESPACE.id == 3217611569050406534


def test_chunk_keys_are_the_ones_that_other_builds_computed() -> None:
    assert [key.hex() for key in chunk_keys(TOKENS, NAMESPACE, chunk_tokens=4)] == [
        "386718e41922361d135ec8dd740f11db85b0185f014df18764ca020256c28fdb",
        "c3e84320c8cd7cb1f6f63e434f8a613d4fa5ecb19304b08b5911d7d8002c05a4",
    ]


def test_keys_from_block_hashes_are_the_ones_that_other_builds_computed() -> None:
    assert [key.hex() for key in keys_from_block_hashes([bytes(range(32))], NAMESPACE)] == [
        "c75acd03d017b23da62e0abb1e1b0bef65e8b30609338169e4207b97b9d1b62b"
    ]


def test_the_canonical_bytes_are_every_field_behind_its_length() -> None:
    fields = [
        b"lmcache-core namespace 1",
        b"llama",
        b"w1",
        b"bfloat16",
        struct.pack("<5Q", 2, 4, 4, 2, 8),
        b"KLTHD",
        struct.pack("<2Q", 1, 2),
        "sälz".encode(),
    ]
    assert NAMESPACE.canonical == b"".join(struct.pack("<Q", len(field)) + field for field in fields)


def test_a_chunk_key_hashes_its_predecessor_and_little_endian_words() -> None:
    first = hashlib.sha256(NAMESPACE.digest + struct.pack("<4I", *TOKENS[:4])).digest()
    second = hashlib.sha256(first + struct.pack("<4I", *TOKENS[4:8])).digest()
    assert chunk_keys(TOKENS, NAMESPACE, chunk_tokens=4) == [first, second]


def test_the_guide_prints_the_same_answers() -> None:
    guide = Path(__file__).parents[3] / "docs" / "engines" / "keys.md"
    if not guide.exists():
        pytest.skip("the guide is not part of this copy")
    text = guide.read_text()
    keys = chunk_keys(TOKENS, NAMESPACE, chunk_tokens=4) + keys_from_block_hashes([bytes(range(32))], NAMESPACE)
    for value in (NAMESPACE.digest.hex(), str(NAMESPACE.id), *(key.hex() for key in keys)):
        assert value in text
