"""The longest boundary of many groups, against a search in plain Python that looks at every boundary there is."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmcache_core import KeyGroup, Need
from lmcache_core.client.boundaries import CommonHits
from lmcache_core.client.client import Client
from lmcache_core.errors import UsageError
from lmcache_core.native import native
from lmcache_core.plugins.loader import load_plugins
from lmcache_core.pool.layout import Layout
from lmcache_core.server.server import Server
from lmcache_core.settings.compose import make_settings
from lmcache_core.tokens.namespace import Namespace

NBYTES = 4096
SPACES = [Namespace(f"group {number}", Layout("uint8", (NBYTES,))) for number in range(4)]


def keys_of(group: int, count: int, run: int = 0) -> list[bytes]:
    return [hashlib.sha256(f"{run} {group} {at}".encode()).digest() for at in range(count)]


def longest(groups: list[tuple[list[bool], int, int]]) -> int:
    """The model: of each group which keys are there, how many it needs in front of a boundary (0: all), its unit."""
    step = math.lcm(*[unit for _, _, unit in groups])
    end = min(len(there) * unit for there, _, unit in groups)
    for boundary in range(end - end % step, 0, -step):
        if all(
            all(there[max(0, boundary // unit - window) if window else 0 : boundary // unit])
            for there, window, unit in groups
        ):
            return boundary
    return 0


class Groups:
    """A server, a client that reads the index, and one that asks."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.clients = {"index": server.connect("index"), "calls": server.connect("calls", use_index=False)}
        self.run = 0
        for client in self.clients.values():
            for space in SPACES:
                client.register_layout(space)

    def store(self, group: int, keys: list[bytes], there: list[bool]) -> None:
        chosen = [key for key, is_there in zip(keys, there, strict=True) if is_there]
        if chosen:
            stored = self.clients["calls"].store(chosen, [bytes(NBYTES)] * len(chosen), namespace=SPACES[group])
            assert stored.stored == len(chosen)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Groups]:
    path: Path = tmp_path_factory.mktemp("boundaries")
    composed = make_settings(
        name=f"b{os.urandom(4).hex()}", runtime_dir=str(path / "run"), state_dir=str(path / "state"),
        l1={"size_bytes": 64 << 20},
    )  # fmt: skip
    server = Server(composed, load_plugins())
    assert server.populator.wait(60)
    server.start()
    made = Groups(server)
    yield made
    for client in made.clients.values():
        client.close()
    server.stop()


def ways(world: Groups) -> list[tuple[Client, bool]]:
    """Client, and whether it asks."""
    asking = [(world.clients["index"], True), (world.clients["calls"], True)]
    return asking if native is None else [*asking, (world.clients["index"], False)]


GROUP = st.tuples(
    st.lists(st.sampled_from([True, True, True, False]), max_size=24), st.integers(0, 5), st.integers(1, 4)
)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(GROUP, min_size=1, max_size=4))
def test_every_mix_of_groups_has_the_boundary_of_the_model(
    world: Groups, drawn: list[tuple[list[bool], int, int]]
) -> None:
    world.run += 1
    groups = []
    for number, (there, window, _) in enumerate(drawn):
        keys = keys_of(number, len(there), world.run)
        world.store(number, keys, there)
        groups.append(KeyGroup(SPACES[number], keys, Need(window)))
    units = [unit for _, _, unit in drawn]
    expected = longest(drawn)
    for client, ask in ways(world):
        found = client.lookup_many(groups, unit_tokens=units, ask=ask)
        assert found.tokens == expected
        assert found.done
        for (there, window, unit), hits in zip(drawn, found.groups, strict=True):
            assert hits.end == expected // unit
            assert hits.first == (max(0, hits.end - window) if window else 0)
            assert all(there[hits.first : hits.end])
            assert hits.chunks == [(at * unit, at * unit + unit) for at in range(hits.first, hits.end)]


def test_a_window_far_below_the_end_is_found(world: Groups) -> None:
    world.run += 1
    there = [at < 700 for at in range(3000)]
    keys = keys_of(0, 3000, world.run)
    world.store(0, keys, there)
    for client, ask in ways(world):
        found = client.lookup_many([(SPACES[0], keys, Need.last_window(100))], unit_tokens=16, ask=ask)
        assert found.tokens == 700 * 16
        assert found.groups[0].first == 600


def test_what_makes_no_sense_is_refused(world: Groups) -> None:
    client, key = world.clients["index"], keys_of(0, 1)

    def refused(match: str, groups: Any, units: Any) -> None:
        with pytest.raises(UsageError, match=match):
            client.lookup_many(groups, unit_tokens=units)

    refused("unit_tokens is 0", [(SPACES[0], key)], 0)
    refused("2 figures for 1 groups", [(SPACES[0], key)], [1, 2])
    refused("one bytes object", [(SPACES[0], key[0])], 1)
    refused("group 0 needs 'prefix': give Need.PREFIX", [(SPACES[0], key, "prefix")], 1)
    refused(r"give \(namespace, keys\)", [(SPACES[0],)], 1)
    with pytest.raises(UsageError, match="window"):
        Need.last_window(0)
    with pytest.raises(UsageError, match="window"):
        Need(-1)
    assert client.lookup_many([], unit_tokens=16) == CommonHits(0, [])
    assert client.lookup_many([(SPACES[0], [])], unit_tokens=16).tokens == 0


def test_without_asking_no_call_is_made(world: Groups, monkeypatch: pytest.MonkeyPatch) -> None:
    from lmcache_core.client import channel

    def send(*_: Any, **__: Any) -> None:
        raise AssertionError("a call was made")

    keys = keys_of(0, 4, -1)
    monkeypatch.setattr(channel.Channel, "start", send)
    monkeypatch.setattr(channel.Channel, "call", send)
    assert world.clients["index"].lookup_many([(SPACES[0], keys, Need.LAST)], unit_tokens=1, ask=False).tokens == 0
    with pytest.raises(AssertionError, match="a call was made"):
        world.clients["index"].lookup_many([(SPACES[0], keys, Need.LAST)], unit_tokens=1)


def test_one_promise_keeps_all_groups_and_is_split_for_their_workers(world: Groups) -> None:
    world.run += 1
    keys = [keys_of(group, 8, world.run) for group in range(3)]
    for group, each in enumerate(keys):
        world.store(group, each, [True] * 8)
    groups = [(SPACES[0], keys[0]), (SPACES[1], keys[1], Need.last_window(3)), (SPACES[2], keys[2], Need.LAST)]
    for client, ask in ways(world):
        found = client.lookup_many(groups, unit_tokens=16, hold=True, ask=ask)
        assert found.tokens == 8 * 16
        assert found.promise is not None
        assert found.promise.keys == (*keys[0], *keys[1][5:], keys[2][7])
        for space, promise, hits, each in zip(SPACES, found.promises, found.groups, keys, strict=False):
            assert promise is not None
            wanted = each[hits.first : hits.end]
            assert promise.keys == tuple(wanted)
            into = [bytearray(NBYTES) for _ in wanted]
            assert world.clients["calls"].retrieve(wanted, into, namespace=space, promise=promise).hits == len(wanted)
        assert client.free_lookup_locks(found.promise) == 0, "all of it was redeemed"
        assert client.lookup_many([(SPACES[3], keys[0])], unit_tokens=16, hold=True, ask=ask).promise is None
