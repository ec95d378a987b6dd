"""What came as calls is counted by namespace and reason, without a look at every key in Python."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from lmcache_core.kernel.answers import Grant, Reason
from lmcache_core.limits import TRAFFIC_NAMESPACES_MAX, TRAFFIC_NAMESPACES_SHOWN_MAX, TRAFFIC_TIERS_MAX
from lmcache_core.server.pool.traffic import BEHIND, Traffic, missed

OUTCOMES = st.sampled_from(
    [(Grant.GRANTED, 0), (Grant.LOADING, 0), (Grant.QUOTA, 0), *((Grant.MISS, reason) for reason in Reason)]
)


@given(outcomes=st.lists(OUTCOMES, max_size=60))
def test_misses_by_reason_are_those_of_a_plain_count(outcomes: list[tuple[Grant, int]]) -> None:
    plain: Counter[str] = Counter()
    for status, reason in outcomes:
        if status is Grant.LOADING:
            plain["loading"] += 1
        elif status is Grant.MISS:
            plain[BEHIND if reason == Reason.NONE else Reason(reason).name.lower()] += 1
    statuses, reasons = bytearray(s for s, _ in outcomes), bytearray(r for _, r in outcomes)
    assert missed(statuses, reasons) == plain
    traffic = Traffic()
    traffic.retrieved(5, statuses, reasons, 100, begins=True)
    told = traffic.status()["retrieves"]
    hits = sum(status is Grant.GRANTED for status, _ in outcomes)
    asked = sum(status is not Grant.QUOTA for status, _ in outcomes)
    assert (told["keys"], told["hits"], told["bytes"], told["misses"]) == (asked, hits, 100 * hits, plain)


def test_namespaces_beyond_the_limit_are_counted_together() -> None:
    traffic = Traffic()
    many = TRAFFIC_NAMESPACES_MAX + 10
    for namespace in range(1, many + 1):
        traffic.looked_up(namespace, keys=2, hits=1)
    traffic.loaded(many, keys=3, hits=3, loaded=2, reasons={}, duration_s=0.1)
    told = traffic.status()
    assert len(traffic.namespaces) == TRAFFIC_NAMESPACES_MAX + 1
    assert len(told["namespaces"]) == TRAFFIC_NAMESPACES_SHOWN_MAX + 1
    assert sum(row["lookup_keys"] for row in told["namespaces"].values()) == told["lookups"]["keys"] == 2 * many + 3
    assert told["lookups"]["loaded"] == 2
    assert told["lookups"]["waited"]["seconds"] == 0.1


def test_what_tiers_brought_is_counted_by_tier_and_never_goes_back() -> None:
    traffic = Traffic()
    names = [f"t{number}" for number in range(TRAFFIC_TIERS_MAX + 5)]
    for name in names:
        before = traffic.status()["lookups"]["loaded_from"]
        traffic.loaded(1, 3, 3, loaded=2, reasons={}, duration_s=0.1, came_from=[name, name])
        told = traffic.status()["lookups"]["loaded_from"]
        assert all(told[tier] >= number for tier, number in before.items())
    assert len(told) == TRAFFIC_TIERS_MAX + 1
    assert (told["t0"], told["other"]) == (2, 10)
