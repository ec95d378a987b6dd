"""One object that cannot be read is one object."""

from __future__ import annotations

import pytest

from lmcache_core.limits import OBJECT_BYTES_MAX
from lmcache_core.serde.chain import CodecChain
from lmcache_core.tiers.contract import AdapterContext, ScanEntry
from lmcache_core.tiers.object.format import TIER_KEY_BYTES
from lmcache_tools.walk import Walker

memory = pytest.importorskip("lmcache_mock.memory")


def test_a_file_that_is_larger_than_any_object_is_a_strangers_and_is_not_read() -> None:
    with memory.MemoryAdapter(None, AdapterContext(tier="near")) as adapter:
        walker = Walker(adapter, CodecChain(), deadline_s=60.0)
        found = walker.read(ScanEntry(bytes(TIER_KEY_BYTES), 1 << 43, 0.0))
        assert "8,796,093,022,208 bytes" in found.problem
        assert not found.damaged
        assert not found.unreadable
        largest = walker.read(ScanEntry(bytes(TIER_KEY_BYTES), OBJECT_BYTES_MAX, 0.0))
        assert largest.problem == "gone"
