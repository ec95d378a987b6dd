"""What a tier was to have and does not have: found again with its reason, and never more than so much of it."""

from __future__ import annotations

from lmcache_core.clock import Clock
from lmcache_core.tiers.l1 import TierReason
from lmcache_core.tiers.tier.trouble import Losses


def test_the_last_loss_of_a_key_is_found_with_its_time_and_words() -> None:
    clock = Clock(lambda: 1.0)
    losses = Losses(clock)
    losses.note([b"a", b"b"], TierReason.THROTTLED)
    clock.now = 2.0
    losses.note([b"a"], TierReason.TIER_ERROR, "connection refused " * 100)
    found = losses.find(b"a")
    assert found is not None
    assert (found.reason, found.at_s) == (TierReason.TIER_ERROR, 2.0)
    assert found.text.startswith("connection refused")
    assert len(found.text) <= 200
    other = losses.find(b"b")
    assert other is not None
    assert (other.reason, other.at_s, other.text) == (TierReason.THROTTLED, 1.0, "")
    assert losses.find(b"c") is None


def test_losses_are_bounded_and_the_last_half_of_them_is_always_there() -> None:
    losses = Losses(Clock(), remembered_max=100)
    for number in range(10_000):
        losses.note([b"%d" % number], TierReason.EVICTED)
        assert len(losses) <= 100
    assert all(losses.find(b"%d" % number) for number in range(9_950, 10_000))
    assert losses.find(b"9000") is None
