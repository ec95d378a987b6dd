"""Keys that must not collide: keys that differ in one byte, and keys with the same short hash."""

from __future__ import annotations

from collections.abc import Sequence

from lmcache_core.tiers.contract import L2Adapter, LoadItem, Result, StoreItem
from lmcache_testing import material
from lmcache_testing.adapter_batches import expect_all_stored
from lmcache_testing.contract import Contract


class KeyTests(Contract):
    """Every byte of a key counts. A whole group of keys is stored, and then each is checked."""

    def test_keys_that_differ_in_one_byte_do_not_meet(self, adapter: L2Adapter) -> None:
        """Wherever that byte is: an adapter that skips the middle of a long key, or a bit of each byte, mixes objects
        up."""
        longest = adapter.capabilities.key_bytes_max
        _expect_apart(adapter, material.keys_one_byte_apart(longest), "of keys that differ in one byte")

    def test_keys_that_a_short_hash_takes_for_one_do_not_meet(self, adapter: L2Adapter) -> None:
        """32 bits are too few for names: among 77,000 objects two are likely to have the same hash. Only the usual
        hashes are tested."""
        for name, pair in material.COLLIDING_KEYS.items():
            _expect_apart(adapter, pair, f"of two keys with the same {name}")


def _expect_apart(adapter: L2Adapter, keys: Sequence[bytes], which: str) -> None:
    """After all are stored, each holds its own object; then each is deleted in turn, and the others remain."""
    groups = [keys[some.start : some.stop] for some in material.batches(adapter, len(keys), 64)]
    for group in groups:
        expect_all_stored(adapter, [StoreItem(key, [memoryview(b"of " + key)]) for key in group])
    for group in groups:
        material.expect_exists(adapter, group, [True] * len(group), f"{which}, all were stored")
        targets = [bytearray(3 + len(key)) for key in group]
        items = [LoadItem(key, [memoryview(target)]) for key, target in zip(group, targets, strict=True)]
        for key, target, outcome in zip(group, targets, adapter.load(items, material.soon()), strict=True):
            material.expect_result(outcome, Result.DONE, f"{which}, all were stored: asked to load one")
            assert target[3:] == key, (
                f"{which}, all were stored: asked to load one, it gave {_another(target[3:], key)}"
            )
    if adapter.capabilities.delete and len(keys) > 1:
        gone, *left = keys
        material.expect_deleted(adapter, [gone], f"{which}, all were stored")
        for some in material.batches(adapter, len(left), 64):
            group = left[some.start : some.stop]
            material.expect_exists(adapter, group, [True] * len(group), f"{which}, another one was deleted")
        for some in material.batches(adapter, len(left), 64):
            material.expect_deleted(adapter, left[some.start : some.stop], f"{which}, at the end")


def _another(found: bytes | bytearray, key: bytes) -> str:
    """Says which key that object belongs to."""
    if len(found) != len(key):
        return "bytes that belong to none of them"
    places = [at for at, (one, other) in enumerate(zip(found, key, strict=True)) if one != other]
    return f"the object of a key that differs from it in {len(places)} of {len(key)} bytes, the first at {places[0]}"
