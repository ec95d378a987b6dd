"""The longest boundary of many groups, against a search in plain Python that looks at every boundary there is."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmcache_core import KeyGroup, Need
from lmcache_core.client.client import Client
from lmcache_core.client.find import group_lookups
from lmcache_core.client.find.group_lookups import BoundarySearch, CommonHandle, CommonHits, GroupHits, Questions
from lmcache_core.client.find.lookups import ClientLookupOptions
from lmcache_core.client.promises import Promise
from lmcache_core.client.results import LookupResult, Status
from lmcache_core.errors import UsageError
from lmcache_core.native import native
from lmcache_core.pool.layout import Layout
from lmcache_core.server.server import Server
from lmcache_core.tokens.namespace import Namespace
from lmcache_testing.embedded import embedded_server
from lmcache_testing.waiting import until

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
    with embedded_server(tmp_path_factory.mktemp("boundaries"), l1={"size_bytes": 64 << 20}) as server:
        made = Groups(server)
        yield made
        for client in made.clients.values():
            client.close()


def ways(world: Groups) -> list[tuple[Client, bool]]:
    """Client, and whether it asks."""
    asking = [(world.clients["index"], True), (world.clients["calls"], True)]
    return asking if native is None else [*asking, (world.clients["index"], False)]


def handled(client: Client, groups: Any, units: Any) -> CommonHits:
    """What handles find, with and without promises, which hold what is to be loaded."""
    plain, held = (client.lookup_many_nowait(groups, unit_tokens=units, hold=hold).wait(60) for hold in (False, True))
    assert plain is not None
    assert held is not None
    for group, hits, promise in zip(groups, held.groups, held.promises, strict=True):
        keys = group[1][hits.first : hits.end]
        assert promise is None or promise.keys == tuple(keys)
        assert all(promise.ids if promise else [not keys])
    if held.promise:
        assert client.free_lookup_locks(held.promise) > 0
    assert promised(client) == 0
    assert replace(held, promise=None) == plain
    return plain


def promised(client: Client) -> int:
    return sum(each["promised_bytes"] for each in client.status()["l1"]["holders"].values())


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
        assert found == handled(client, groups, units) or not ask
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
    refused("unit_tokens is None", [(SPACES[0], key)], None)
    refused("unit_tokens is 1.5", [(SPACES[0], key)], 1.5)
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
    from lmcache_core.client.link import channel

    def send(*_: object, **__: object) -> None:
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


def test_a_handle_that_is_cancelled_or_dropped_holds_nothing(world: Groups) -> None:
    world.run += 1
    keys = keys_of(0, 8, world.run)
    world.store(0, keys, [True] * 8)
    client = world.clients["index"]

    def answered() -> CommonHandle:
        handle = client.lookup_many_nowait([(SPACES[0], keys)], unit_tokens=16, hold=True)
        until(lambda: handle.done)
        assert promised(client) == 8 * NBYTES
        return handle

    answered()
    assert promised(client) == 0
    handle = answered()
    handle.cancel()
    assert promised(client) == 0
    assert handle.result == CommonHits(0, [GroupHits(0, 0, 16)])


def test_without_a_server_a_handle_has_what_the_index_has_if_that_is_asked_for(tmp_path: Path) -> None:
    client = Client.connect("nobody", runtime_dir=str(tmp_path))
    keys = keys_of(0, 4)
    for hold in (False, True, "if_possible"):
        handle = client.lookup_many_nowait([(SPACES[0], keys, Need.LAST)], unit_tokens=16, hold=hold)  # type: ignore[arg-type]
        found = handle.wait(60)
        assert found is not None
        assert (found.tokens, found.served, found.promise) == (0, False, None)
    client.close()


def test_what_the_server_refuses_is_raised_with_the_result_however_fast_it_answers(tmp_path: Path) -> None:
    pytest.importorskip("lmcache_fs", reason="needs a server with a tier")
    tables = {"l2": {"disk": {"type": "fs", "path": str(tmp_path / "disk")}}}
    with embedded_server(tmp_path, **tables) as server, server.connect("asks") as client:
        for run in range(30):  # most answers are there before the call returns
            handle = client.lookup_many_nowait([(SPACES[0], keys_of(0, 4, run))], unit_tokens=16, tiers=["attic"])
            if run % 3:
                with pytest.raises(UsageError, match="no tier is named 'attic': there are disk"):
                    handle.wait(60)
            handle.cancel()
            assert handle.result == CommonHits(0, [GroupHits(0, 0, 16)])


@dataclass(eq=False)
class ModelAnswer:
    """A question to the model of a server, which answers when it is told to."""

    keys: int
    coming: LookupResult
    answer: LookupResult | None = None
    cancelled: bool = False
    sent: bool = True

    @property
    def done(self) -> bool:
        return self.answer is not None

    def cancel(self) -> None:
        self.cancelled = True


class ModelServer:
    """Its pool has some keys, and a tier all those that are there. It loads what a question needs, and no more."""

    def __init__(self, there: set[bytes], pool: set[bytes]) -> None:
        self.there = there
        self.pool = pool
        self.asked: list[ModelAnswer] = []

    def now(self) -> float:
        return 0.0

    def start(self, keys: Sequence[bytes], namespace: Namespace, options: Any) -> ModelAnswer:
        assert len(keys) <= group_lookups.BATCH_KEYS_MAX
        window = options.window or len(keys)
        runs = [end for end in range(len(keys), 0, -1) if self.there.issuperset(keys[max(0, end - window) : end])]
        if options.window:
            hits = runs[0] if runs else 0
        else:
            hits = next((at for at, key in enumerate(keys) if key not in self.there), len(keys))
        self.pool.update(keys[max(0, hits - window) : hits])
        statuses = [Status.GRANTED if key in self.pool else Status.MISS for key in keys]
        number = len(self.asked) + 1
        held = Promise(tuple(number * (each is Status.GRANTED) for each in statuses), tuple(keys), 1.0)
        made = ModelAnswer(len(keys), LookupResult(statuses, [], hits, True, held if options.hold else None))
        self.asked.append(made)
        return made


class NoIndex:
    def find(self, *_: object) -> None:
        return None


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(GROUP, min_size=1, max_size=4), st.integers(1, 2), st.booleans(), st.booleans(), st.integers(5, 9),
    st.data(),
)  # fmt: skip
def test_answers_in_any_order_lead_to_the_boundary_of_the_model(
    monkeypatch: pytest.MonkeyPatch,
    drawn: list[tuple[list[bool], int, int]],
    ranks: int,
    together: bool,
    hold: bool,
    frame: int,
    data: st.DataObject,
) -> None:
    monkeypatch.setattr(group_lookups, "BATCH_KEYS_MAX", frame)
    drawn = [each for each in drawn for _ in range(ranks)]
    keys = [keys_of(number, len(there)) for number, (there, _, _) in enumerate(drawn)]
    there = {key for each, (flags, _, _) in zip(keys, drawn, strict=True) for key in itertools.compress(each, flags)}
    pool = {key for key in sorted(there) if data.draw(st.booleans())}
    server: Any = ModelServer(there, pool)
    questions = Questions(server, ClientLookupOptions(hold=hold), together=together)
    groups = [KeyGroup(SPACES[0], each, Need(window)) for each, (_, window, _) in zip(keys, drawn, strict=True)]
    search = BoundarySearch(NoIndex(), questions, groups, [unit for _, _, unit in drawn])  # type: ignore[arg-type]
    while not search.advance():
        waiting = [each for each in server.asked if not each.done and not each.cancelled]
        assert together or len(waiting) == 1
        chosen = data.draw(st.sampled_from(waiting))
        chosen.answer = chosen.coming
    found = search.found()
    assert found.tokens == longest(drawn)
    for each, hits, promise in zip(keys, found.groups, found.promises, strict=True):
        wanted = each[hits.first : hits.end]
        assert there.issuperset(wanted)
        assert server.pool.issuperset(wanted), "the tier has loaded what the boundary needs"
        if hold and found.tokens:
            assert promise is not None
            assert promise.keys == tuple(wanted)
            numbers = {server.asked[number - 1] for number in promise.ids}
            assert all(promise.ids)
            assert not any(each.cancelled for each in numbers)
    used = set() if found.promise is None else {*found.promise.numbers}
    for number, each in enumerate(server.asked, 1):
        if each.coming.promise:
            assert each.cancelled is (number not in used), "what is of no use is given up"


def test_what_was_held_is_freed_if_the_server_has_no_room_for_the_rest() -> None:
    keys = [keys_of(0, 4), keys_of(1, 4)]
    server: Any = ModelServer({*keys[0], *keys[1]}, set())
    groups = [KeyGroup(space, each) for space, each in zip(SPACES, keys, strict=False)]
    questions = Questions(server, ClientLookupOptions(hold=True), together=True)
    index: Any = NoIndex()
    search, by_index = (BoundarySearch(index, each, groups, 16) for each in (questions, None))
    handle = CommonHandle(search, by_index, server.now)
    held, refused = server.asked
    held.answer = held.coming
    refused.answer = LookupResult([Status.QUOTA] * 4, [], 0)
    found = handle.result
    assert found is not None
    assert (found.tokens, found.served, found.promise) == (0, False, None)
    assert held.cancelled
    assert handle.asked  # though both questions have been given up
