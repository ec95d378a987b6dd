"""What goes to which tier."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from lmcache_core import Client, Kind, Layout, Namespace
from lmcache_core.plugins.loader import load_plugins
from lmcache_core.policies import StoreCandidate, StorePolicy, TierView
from lmcache_testing.embedded import NAMELESS, Json, embedded_server
from lmcache_testing.waiting import until

TIERS = [TierView("ssd", True), TierView("cold", True)]


def build(name: str, **values: Any) -> StorePolicy:
    policy: StorePolicy = load_plugins().build(Kind.STORE_POLICY, name, values)
    return policy


def made(*numbers: int) -> list[StoreCandidate]:
    return [StoreCandidate(bytes([n]) * 32, 1, 100 + n) for n in numbers]


def read(*numbers: int) -> list[StoreCandidate]:
    return [candidate._replace(reused=True) for candidate in made(*numbers)]


def twice(**values: Any) -> StorePolicy:
    """Stores only what was asked for twice."""
    return build("wear_aware", writes_per_hit_max=0, **values)


def test_wear_aware_plans_at_the_first_read_and_at_each_later_one() -> None:
    policy = twice()
    assert policy.wants_reuse
    assert policy.plan(made(1, 2, 3), TIERS).targets == {}
    plan = policy.plan(read(2, 3), TIERS)
    assert plan.targets == {"ssd": [0, 1], "cold": [0, 1]}
    assert list(plan.drop) == []
    again = policy.plan(read(3, 2, 1), TIERS).targets
    assert again == {"ssd": [0, 1, 2], "cold": [0, 1, 2]}, "a store may have failed: the tiers know what they have"


def test_wear_aware_takes_being_computed_again_for_the_second_request() -> None:
    policy = twice()
    policy.plan(made(1), TIERS)
    assert policy.plan(made(1), TIERS).targets == {"ssd": [0], "cold": [0]}
    assert policy.plan(made(1), TIERS).targets == {"ssd": [0], "cold": [0]}, "no tier gave it back"


def test_a_tier_that_comes_while_the_server_runs_gets_what_is_read_again(tmp_path: Path) -> None:
    pytest.importorskip("lmcache_fs")
    space = Namespace("wear", Layout("uint8", (4096,)))
    keys = [bytes([n]) * 32 for n in range(8)]

    def files(name: str) -> int:
        return len([*(tmp_path / name / "objects").glob("*/*")])

    def read(client: Client) -> None:
        assert client.retrieve(keys, [bytearray(4096) for _ in keys], namespace=space).hits == len(keys)

    disks = {name: {"type": "fs", "path": str(tmp_path / name)} for name in ("one", "two")}
    wear: Json = {"type": "wear_aware", "writes_per_hit_max": 0}
    with (
        embedded_server(tmp_path, l1=NAMELESS, l2={"one": disks["one"]}, store_policy=wear) as server,
        server.connect() as client,
    ):
        client.store(keys, [bytes(4096)] * len(keys), namespace=space)
        read(client)
        until(lambda: files("one") == len(keys), "they are read, and stored")
        client.tiers_add("two", disks["two"])
        read(client)
        until(lambda: files("two") == len(keys), "the new tier gets them when they are read again")
        client.tiers_remove("one")
        shutil.rmtree(tmp_path / "one")
        client.tiers_add("one", disks["one"])
        read(client)
        until(lambda: files("one") == len(keys), "it is empty under the same name")


def test_wear_aware_tells_namespaces_apart_and_forgets_the_oldest() -> None:
    policy = twice(remembered_keys_max=2)
    policy.plan(made(1), TIERS)
    other = [made(1)[0]._replace(namespace=2)]
    assert policy.plan(other, TIERS).targets == {}
    policy.plan(made(2), TIERS)  # the first is forgotten
    assert policy.plan(made(1), TIERS).targets == {}


def asks(numbers: Iterable[int], generation: int, *, reused: bool = False) -> list[StoreCandidate]:
    return [StoreCandidate(n.to_bytes(32, "big"), 1, 100, reused, generation) for n in numbers]


def settle(policy: StorePolicy, coming_back: int, capacity_bytes: int | None, first: int = 0) -> bool:
    """Whether what is new is stored, after many rounds in which 64 objects are computed, and so many of them are asked
    for once more, when the L1 has lost them."""
    tiers = [TierView("ssd", True, capacity_bytes)]
    for turn in range(first, first + 2000):
        at_once = policy.plan(asks(range(64 * turn, 64 * turn + 64), 2 * turn), tiers).targets
        if turn >= first + 16:  # by now the L1 has lost them; a tier returns what it was given
            before = range(64 * (turn - 16), 64 * (turn - 16) + coming_back)
            policy.plan(asks(before, 2 * turn + 1, reused=bool(at_once)), tiers)
    return bool(at_once)


@pytest.mark.parametrize(
    ("coming_back", "capacity_bytes", "writes_per_hit_max", "stored"),
    [
        (60, None, 1.0, True),  # nearly all come back
        (4, None, 8.0, False),  # one in sixteen: 15 written in vain for each hit
        (4, None, 20.0, True),
        (60, 64 * 100 * 8, 20.0, False),  # they come back after the tier has lost them
        (60, 64 * 100 * 40, 20.0, True),
    ],
)
def test_wear_aware_stores_at_once_where_a_hit_is_worth_its_writes(
    coming_back: int, capacity_bytes: int | None, writes_per_hit_max: float, stored: bool
) -> None:
    policy = build("wear_aware", writes_per_hit_max=writes_per_hit_max)
    assert settle(policy, coming_back, capacity_bytes) is stored


def test_wear_aware_follows_a_load_that_changes() -> None:
    policy = build("wear_aware", writes_per_hit_max=4.0)
    assert settle(policy, 60, None)
    assert not settle(policy, 2, None, first=2000)
    assert settle(policy, 60, None, first=4000)


def test_size_aware_routes_by_size_and_bounds_belong_to_the_range() -> None:
    policy = build("size_aware", tiers={"ssd": {"max_bytes": 102}, "cold": {"min_bytes": 102, "max_bytes": "104"}})
    tiers = [*TIERS, TierView("any", True)]
    assert policy.plan(made(1, 2, 3, 5), tiers).targets == {"ssd": [0, 1], "cold": [1, 2], "any": [0, 1, 2, 3]}
    assert policy.plan(made(5), TIERS).targets == {}


@settings(max_examples=50, deadline=None, derandomize=True, database=None)
@given(sizes=st.lists(st.integers(0, 50), unique=True), low=st.integers(0, 50), width=st.integers(0, 50))
def test_size_aware_names_a_position_exactly_when_it_fits(sizes: list[int], low: int, width: int) -> None:
    policy = build("size_aware", tiers={"ssd": {"min_bytes": low, "max_bytes": low + width}})
    plan = policy.plan([StoreCandidate(bytes([n]) * 32, 0, n) for n in sizes], TIERS[:1])
    named = [sizes[position] for position in plan.targets.get("ssd", ())]
    assert named == [n for n in sizes if low <= n <= low + width]


def test_an_empty_range_is_refused() -> None:
    with pytest.raises(ValidationError, match="no object fits"):
        build("size_aware", tiers={"ssd": {"min_bytes": 5, "max_bytes": 4}})
