"""One size that a listing gives is no reason to evict everything else."""

from __future__ import annotations

from lmcache_core.policies.lru import LruEviction
from lmcache_core.tiers.contract import ScanEntry
from lmcache_core.tiers.object.format import TIER_KEY_BYTES
from lmcache_core.tiers.tier.accounting import Accounting
from lmcache_core.tiers.tier.order import Watch

OBJECT_BYTES = 4096


def listed(sizes: list[int]) -> Accounting:
    accounting = Accounting(1 << 30, 0.9, 0.05, LruEviction())
    accounting.scan_begins()
    entries = [
        ScanEntry(number.to_bytes(TIER_KEY_BYTES, "big"), nbytes, float(number)) for number, nbytes in enumerate(sizes)
    ]
    accounting.scan_ended([entries[:50], entries[50:]])
    while not accounting.adopt(64, Watch(), lambda doubts: None):
        pass
    return accounting


def test_a_size_that_no_other_object_comes_near_costs_eight_of_them() -> None:
    for wrong in (1 << 50, 1 << 40, 900 << 20):
        accounting = listed([OBJECT_BYTES] * 100 + [wrong])
        assert accounting.objects == 101
        assert accounting.bytes_used <= (100 + 16) * OBJECT_BYTES
        assert accounting.victims(OBJECT_BYTES) == []


def test_large_objects_among_small_ones_count_with_their_size() -> None:
    accounting = listed([OBJECT_BYTES] * 100 + [1 << 20] * 2)
    assert accounting.bytes_used == 100 * OBJECT_BYTES + (2 << 20)


def test_a_load_shows_the_true_size() -> None:
    accounting = listed([OBJECT_BYTES] * 100 + [1 << 20])
    accounting.add([((100).to_bytes(TIER_KEY_BYTES, "big"), 1 << 20)], ours=True)
    assert accounting.bytes_used == 100 * OBJECT_BYTES + (1 << 20)
