"""One contract, two ways: what the index answers without a call is what the server answers when it is asked.

Two clients of one embedded server do the same, one of them with the index; every result is compared.
"""

from __future__ import annotations

import ctypes
from collections import UserList
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lmcache_core.client.client import Client
from lmcache_core.client.move import leases, retrieving
from lmcache_core.client.results import LookupResult, RetrieveResult, Status
from lmcache_core.errors import UsageError
from lmcache_core.kernel.answers import Reason
from lmcache_core.native import native
from lmcache_core.plugins.loader import load_plugins
from lmcache_core.pool.layout import Layout
from lmcache_core.protocol import messages as m
from lmcache_core.server.server import Server
from lmcache_core.tokens.namespace import Namespace

from .conftest import NBYTES, key, keys, payload

pytestmark = pytest.mark.skipif(native is None, reason="the index is read by the C extension alone")

SPACE = Namespace("model", Layout("uint8", (NBYTES,)))
OTHER_SPACE = Namespace("another model", Layout("uint8", (NBYTES,)))
FAT = Layout("uint8", (2 * NBYTES,))
UNTOUCHED = 0xEE


class Ways:
    """An embedded server, a client that reads the index, and one that asks for everything."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.index: Client = server.connect("index")
        self.rpc: Client = server.connect("rpc", use_index=False)

    def store(self, *numbers: int, namespace: Namespace = SPACE) -> None:
        result = self.rpc.store(keys(*numbers), [payload(number) for number in numbers], namespace=namespace)
        assert set(result.statuses) == {Status.STORED}

    def lookup(self, *numbers: int, namespace: Namespace = SPACE, **options: Any) -> LookupResult:
        by_index = self.index.lookup(keys(*numbers), namespace=namespace, **options)
        by_rpc = self.rpc.lookup(keys(*numbers), namespace=namespace, **options)
        assert _plain(by_index) == _plain(by_rpc)
        handle = self.index.lookup_nowait(keys(*numbers)[:1024], namespace=namespace, **options)
        if len(numbers) <= 1024:
            assert _plain(handle.wait(60.0)) == _plain(by_rpc)
        return by_index

    def retrieve(self, *numbers: int, namespace: Namespace = SPACE, **options: Any) -> RetrieveResult:
        results = []
        for client in (self.index, self.rpc):
            into = [bytearray([UNTOUCHED]) * namespace.layout.nbytes for _ in numbers]
            result = client.retrieve(keys(*numbers), into, namespace=namespace, **options)
            results.append(result)
            for number, status, buffer in zip(numbers, result.statuses, into, strict=True):
                wanted = payload(number) if status is Status.HIT else bytes([UNTOUCHED]) * len(buffer)
                assert buffer == wanted
        by_index, by_rpc = results
        assert list(by_index.statuses) == list(by_rpc.statuses)
        assert list(by_index.reasons) == list(by_rpc.reasons)
        assert by_index.hits == by_rpc.hits
        return by_index


def _plain(result: LookupResult) -> tuple[object, ...]:
    return (
        list(result.statuses),
        list(result.reasons),
        result.hits,
        result.done,
        bool(result.promise),
        bool(result.job),
    )


@pytest.fixture
def make_ways(start: Callable[..., Server]) -> Iterator[Callable[..., Ways]]:
    made: list[Ways] = []

    def make(**settings: object) -> Ways:
        made.append(Ways(start(**settings)))
        for client in (made[-1].index, made[-1].rpc):
            for space in (SPACE, OTHER_SPACE):
                client.register_layout(space)
        return made[-1]

    yield make
    for ways in made:
        ways.index.close()
        ways.rpc.close()


@pytest.fixture
def ways(make_ways: Callable[..., Ways]) -> Ways:
    return make_ways()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the requests that any client sends from here on."""
    from lmcache_core.client.link import channel

    names: list[str] = []
    encode = channel.encode_request

    def note(message: m.Message) -> bytes:
        names.append(type(message).__name__)
        return encode(message)

    monkeypatch.setattr(channel, "encode_request", note)
    return names


# --- the same answers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", [True, False])
def test_what_is_there_what_is_not_and_every_mixture(ways: Ways, prefix: bool) -> None:
    ways.store(1, 2, 3, 5, 6)
    for numbers in ([], [1], [9], [1, 2, 3], [1, 2, 3, 4, 5, 6], [4, 1], [1, 4, 2, 8, 3], [1, 1, 2, 2], [7, 8, 9]):
        found = ways.lookup(*numbers, prefix=prefix)
        read = ways.retrieve(*numbers, prefix=prefix)
        assert read.statuses.count(Status.HIT) == found.hits
    assert ways.lookup(1, 2, 3, 4, 5, prefix=prefix).hits == (3 if prefix else 4)
    assert ways.lookup(1, 4).reasons == [Reason.NONE, Reason.NEVER_STORED]


def test_what_is_being_written_is_seen_by_neither(ways: Ways) -> None:
    ways.store(1)
    with ways.rpc.prepare_store(keys(2, 3), namespace=SPACE) as lease:
        assert ways.lookup(1, 2, 3).reasons[1] is Reason.BEING_WRITTEN
        assert ways.retrieve(1, 2, 3).hits == 1
        for position in range(2):
            lease.view(position)[:] = payload(position + 2)
        lease.commit()
    assert ways.lookup(1, 2, 3).hits == ways.retrieve(1, 2, 3).hits == 3


def test_what_was_cleared_dropped_or_evicted_is_gone_at_once_and_both_say_why(make_ways: Callable[..., Ways]) -> None:
    ways = make_ways(l1={"size_bytes": 1 << 20})
    ways.store(1, 2, 3)
    ways.store(4, namespace=OTHER_SPACE)
    ways.index.clear(SPACE)
    assert ways.lookup(1, 2, prefix=False).reasons == [Reason.CLEARED] * 2
    assert ways.retrieve(1).reasons == [Reason.CLEARED]
    assert ways.lookup(4, namespace=OTHER_SPACE).hits == 1
    ways.store(1)
    ways.store(*range(1000, 1256))
    assert ways.lookup(1).reasons == ways.retrieve(1).reasons == [Reason.EVICTED]


def test_a_new_incarnation_of_a_key_is_what_is_read(ways: Ways) -> None:
    ways.store(1)
    for number in range(2, 20):
        ways.index.clear(SPACE)
        ways.rpc.store(keys(1), [payload(number)], namespace=SPACE)
        for client in (ways.index, ways.rpc):
            into = bytearray(NBYTES)
            assert client.retrieve(keys(1), [into], namespace=SPACE).hits == 1
            assert into == payload(number)


def test_two_namespaces_share_keys_and_nothing_else(ways: Ways) -> None:
    ways.store(1, 2)
    ways.store(2, 3, namespace=OTHER_SPACE)
    assert ways.lookup(1, 2, 3, prefix=False).hits == 2
    assert ways.lookup(1, 2, 3, prefix=False, namespace=OTHER_SPACE).hits == 2
    assert ways.retrieve(2, namespace=OTHER_SPACE).hits == 1
    ways.index.clear(OTHER_SPACE)
    assert ways.lookup(1, 2, 3, prefix=False).hits == 2


def test_a_second_layout_for_a_namespace_is_refused_and_its_hits_stay(ways: Ways) -> None:
    ways.store(1, 2)
    for client in (ways.index, ways.rpc):
        client.links.current().remove_binding(OTHER_SPACE)
        with pytest.raises(UsageError, match="give that layout, or another namespace"):
            client.links.current().bind_id(OTHER_SPACE.id, FAT)
    assert ways.retrieve(1, 2).hits == 2


def test_a_batch_of_many_pages(ways: Ways) -> None:
    numbers = range(2500)
    ways.store(*numbers)
    assert ways.lookup(*numbers).hits == ways.retrieve(*numbers).hits == 2500
    assert ways.lookup(*numbers, 9999, prefix=False).hits == 2500
    lease = ways.rpc.links.current().channel.call(m.PrepareRetrieve(0, SPACE.id, key(1500))).lease
    ways.rpc.links.current().channel.call(m.ReportDamaged(0, lease, 0, 1))
    assert ways.lookup(*numbers).hits == ways.retrieve(*numbers).hits == 1500
    assert ways.lookup(*numbers, prefix=False).hits == 2499
    assert ways.retrieve(*numbers, prefix=False).hits == 2499, "all of them, as a lookup's hits"


def test_promises_windows_pins_and_policies_are_the_servers(ways: Ways) -> None:
    ways.store(1, 2, 3)
    for client in (ways.index, ways.rpc):
        held = client.lookup(keys(1, 2), namespace=SPACE, hold=True)
        assert held.promise
        into = [bytearray(NBYTES) for _ in range(2)]
        assert client.retrieve(keys(1, 2), into, namespace=SPACE, promise=held.promise).hits == 2
    assert ways.rpc.status()["l1"]["leases_by_kind"] == {"promise": 0, "read": 0, "write": 0}
    assert ways.lookup(1, 2, 3, 4, window=2).hits == 3
    assert ways.lookup(1, 2, pin_s=60.0).hits == 2
    assert ways.index.unpin(keys(1, 2), namespace=SPACE) == [Status.GRANTED] * 2
    assert ways.lookup(1, 2, policy="retain").hits == 2


def test_the_same_misuse_is_refused_in_the_same_words(ways: Ways) -> None:
    ways.store(1)
    misuses: list[Callable[[Client], object]] = [
        lambda client: client.lookup([b"short"], namespace=SPACE),
        lambda client: client.lookup([key(1), b"short"], namespace=SPACE),
        lambda client: client.lookup(key(1), namespace=SPACE),  # type: ignore[arg-type]
        lambda client: client.lookup([1], namespace=SPACE),  # type: ignore[list-item]
        lambda client: client.lookup(keys(1), namespace=SPACE, wait_s=-1.0),
        lambda client: client.lookup(keys(1), namespace=SPACE, deadline_s=float("nan")),
        lambda client: client.lookup(keys(1), namespace=SPACE, policy="none such"),
        lambda client: client.retrieve(keys(1), [bytes(NBYTES)], namespace=SPACE),
        lambda client: client.retrieve(keys(1), [], namespace=SPACE),
        lambda client: client.retrieve([b"short"], [bytearray(NBYTES)], namespace=SPACE),
        lambda client: client.retrieve(keys(1), [bytearray(NBYTES)], namespace=SPACE, verify="sometimes"),
    ]
    for misuse in misuses:
        said = []
        for client in (ways.index, ways.rpc):
            with pytest.raises(UsageError) as caught:
                misuse(client)
            said.append(str(caught.value))
        assert said[0] == said[1]


@pytest.mark.parametrize("kind", [tuple, list, UserList])
def test_keys_come_in_any_sequence_and_as_any_bytes(ways: Ways, kind: Callable[[list[bytes]], object]) -> None:
    ways.store(1, 2)
    for client in (ways.index, ways.rpc):
        assert client.lookup(kind(keys(1, 2)), namespace=SPACE).hits == 2
        assert client.lookup(kind([bytearray(key(1)), memoryview(key(2))]), namespace=SPACE).hits == 2


def test_tensors_are_read_as_buffers_are(ways: Ways) -> None:
    torch = pytest.importorskip("torch")
    ways.store(1, 2)
    for client in (ways.index, ways.rpc):
        into = [torch.zeros(NBYTES, dtype=torch.uint8) for _ in range(2)]
        assert client.retrieve(keys(1, 2), into, namespace=SPACE).hits == 2
        assert [bytes(tensor.numpy()) for tensor in into] == [payload(1), payload(2)]


# --- without a call -------------------------------------------------------------------------------------------


def test_hits_ask_nobody_and_misses_are_all_that_is_asked_for(
    ways: Ways, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ways.store(1, 2, 3)
    del asked[:]
    into = [bytearray(NBYTES) for _ in range(3)]
    for _ in range(3):
        assert ways.index.lookup(keys(1, 2, 3), namespace=SPACE).hits == 3
        assert ways.index.lookup_nowait(keys(1, 2, 3), namespace=SPACE).done
        assert ways.index.retrieve(keys(1, 2, 3), into, namespace=SPACE).hits == 3
        assert ways.index.retrieve(keys(3, 1), into[:2], namespace=SPACE, prefix=False, verify="always").hits == 2
    assert asked == []
    blobs: list[bytes] = []
    start = ways.index.links.current().channel.start

    def note(request: m.LookupRequest, *more: Any, **options: Any) -> object:
        blobs.append(request.keys)
        return start(request, *more, **options)

    monkeypatch.setattr(ways.index.links.current().channel, "start", note)
    ways.index.lookup(keys(1, 2, 3, 4, 5), namespace=SPACE)
    ways.index.lookup(keys(1, 4, 2, 5), namespace=SPACE, prefix=False)
    monkeypatch.undo()
    assert blobs == [key(4) + key(5)] * 2


def test_a_client_without_the_index_asks_for_every_hit(ways: Ways, asked: list[str]) -> None:
    ways.store(1)
    del asked[:]
    ways.rpc.lookup(keys(1), namespace=SPACE)
    ways.rpc.retrieve(keys(1), [bytearray(NBYTES)], namespace=SPACE)
    assert asked == ["LookupRequest", "PrepareRetrieve", "FinishRead"]


def test_status_counts_what_workers_found(ways: Ways) -> None:
    ways.store(1, 2, 3)
    before = ways.rpc.status()["index"]
    assert before["ready"] == 3
    assert before["entries"] >= 4096
    assert before["unindexed"] == 0
    ways.index.retrieve(keys(1, 2), [bytearray(NBYTES), bytearray(NBYTES)], namespace=SPACE)
    ways.index.lookup(keys(3), namespace=SPACE)  # finding is no use
    while ways.rpc.status()["index"]["hits_by_index"] < before["hits_by_index"] + 2:
        pass
    assert ways.rpc.status()["counters"]["read"] >= 2
    ways.rpc.clear(SPACE)
    assert ways.rpc.status()["index"]["ready"] == 0
    assert ways.rpc.status()["index"]["gone"] <= 3


# --- uses -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("eviction", ["lru", "lfu", "s3fifo"])
def test_what_workers_read_in_place_is_not_the_coldest(make_ways: Callable[..., Ways], eviction: str) -> None:
    """Stores go on while the same objects are read, by index or by lease: in the end the same have survived."""
    from lmcache_core.plugins.components import Kind

    if not load_plugins().offers(Kind.EVICTION_POLICY, eviction):
        pytest.skip(f"the policy {eviction} comes with lmcache-policies")
    survivors = []
    for way in ("index", "rpc"):
        ways = make_ways(l1={"size_bytes": 1 << 20, "eviction": {"type": eviction}, "watermark": 1.0})
        client: Client = getattr(ways, way)
        ways.store(*range(256))
        for turn in range(6):
            hot = range(10, 30)
            into = [bytearray(NBYTES) for _ in hot]
            assert client.retrieve(keys(*hot), into, namespace=SPACE).hits == 20
            ways.store(*range(1000 + 30 * turn, 1030 + 30 * turn))
        found = ways.rpc.lookup(keys(*range(2000)), namespace=SPACE, prefix=False)
        survivors.append([number for number, status in enumerate(found.statuses) if status is Status.GRANTED])
    if eviction == "lru":
        assert survivors[0] == survivors[1]
    assert set(range(10, 30)) <= set(survivors[0])


# --- damage ---------------------------------------------------------------------------------------------------


def _damage(ways: Ways, number: int) -> None:
    index = ways.index.links.current().index
    assert index is not None
    entry = index.entry(SPACE.id, key(number))
    assert entry is not None
    ways.server.parts.segment.view(entry["offset"], NBYTES)[NBYTES // 2] ^= 1


@pytest.mark.parametrize("way", ["index", "rpc"])
@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("verify", ["never", "first", "always"])
def test_damaged_objects_are_misses_to_who_asks_and_then_to_all(
    ways: Ways, way: str, prefix: bool, verify: str
) -> None:
    client: Client = getattr(ways, way)
    ways.store(1, 2, 3)
    _damage(ways, 2)
    into = [bytearray(NBYTES) for _ in range(3)]
    result = client.retrieve(keys(1, 2, 3), into, namespace=SPACE, prefix=prefix, verify=verify)
    hit, miss = Status.HIT, Status.MISS
    if verify == "never":
        assert result.statuses == [hit] * 3
        return
    assert result.statuses == ([hit, miss, miss] if prefix else [hit, miss, hit])
    assert result.reasons == [Reason.NONE, Reason.DAMAGED, Reason.NONE]
    assert into[0] == payload(1)
    assert ways.lookup(1, 2, 3, prefix=False).reasons == [Reason.NONE, Reason.DAMAGED, Reason.NONE]
    assert ways.rpc.status()["counters"]["reported_damaged"] == 1
    ways.store(2)
    assert client.retrieve(keys(1, 2, 3), into, namespace=SPACE, verify=verify).hits == 3


def test_first_looks_at_each_incarnation_once(ways: Ways) -> None:
    ways.store(1)
    into = [bytearray(NBYTES)]
    assert ways.index.retrieve(keys(1), into, namespace=SPACE, verify="first").hits == 1
    _damage(ways, 1)
    assert ways.index.retrieve(keys(1), into, namespace=SPACE, verify="first").hits == 1
    assert ways.index.retrieve(keys(1), into, namespace=SPACE, verify="always").reasons == [Reason.DAMAGED]
    ways.store(1)
    _damage(ways, 1)
    assert ways.index.retrieve(keys(1), into, namespace=SPACE, verify="first").reasons == [Reason.DAMAGED]


def test_what_a_lease_is_read_under_is_checked_as_it_was_copied_and_not_before(
    ways: Ways, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_out = retrieving.copy_out

    def scribbled(base: int, slots: list[tuple[int, int]], *arguments: Any, **options: Any) -> object:
        ctypes.memset(base + slots[0][1] + NBYTES // 2, 0x5A, 8)  # as a worker writes there that has lost its way
        return copy_out(base, slots, *arguments, **options)

    ways.store(1, 2)
    monkeypatch.setattr(retrieving, "copy_out", scribbled)
    into = [bytearray(NBYTES) for _ in range(2)]
    found = ways.rpc.retrieve(keys(1, 2), into, namespace=SPACE, prefix=False, verify="always")
    assert found.statuses == [Status.MISS, Status.HIT]
    assert found.reasons == [Reason.DAMAGED, Reason.NONE]
    assert into[1] == payload(2)
    monkeypatch.undo()
    assert ways.rpc.lookup(keys(1), namespace=SPACE).reasons == [Reason.DAMAGED]


def test_what_was_stored_without_a_checksum_is_no_hit_for_who_checks_always(ways: Ways) -> None:
    with ways.rpc.prepare_store(keys(1), namespace=SPACE) as lease:
        lease.view(0)[:] = payload(1)
        lease.commit(checksums=False)
    for client in (ways.index, ways.rpc):
        found = client.retrieve(keys(1), [bytearray(NBYTES)], namespace=SPACE, verify="always")
        assert found.reasons == [Reason.UNVERIFIABLE]
        assert client.retrieve(keys(1), [bytearray(NBYTES)], namespace=SPACE).hits == 1


def test_a_commit_takes_checksums_by_as_many_threads_as_copy(ways: Ways, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int, int]] = []  # objects, bytes of each, threads
    real = leases.checksums_of

    def counted(addresses: object, nbytes: int, threads: int = 1) -> bytes:
        asked.append((len(addresses), nbytes, threads))
        return real(addresses, nbytes, threads)

    monkeypatch.setattr(leases, "checksums_of", counted)
    with Client(ways.index.links.target, copy_threads=3) as client:
        with client.prepare_store(keys(1, 2, 3), namespace=SPACE) as lease:
            for position in range(3):
                lease.view(position)[:] = payload(position + 1)
            lease.commit([1])
            assert lease.commit() == [Status.STORED] * 3
        assert asked == [(1, NBYTES, 3), (2, NBYTES, 3)]
        into = [bytearray(NBYTES) for _ in range(3)]
        assert client.retrieve(keys(1, 2, 3), into, namespace=SPACE, verify="always").hits == 3
        assert into == [payload(1), payload(2), payload(3)]


def test_the_clients_own_choice_is_the_default(ways: Ways) -> None:
    ways.store(1)
    _damage(ways, 1)
    target = ways.index.links.target
    with Client(target, verify="always") as careful:
        assert careful.retrieve(keys(1), [bytearray(NBYTES)], namespace=SPACE).reasons == [Reason.DAMAGED]
    with pytest.raises(UsageError, match="use 'never'"):
        Client(target, verify="sometimes")


# --- by the index alone, and the index at once -------------------------------------------------------------------


def test_without_asking_the_index_alone_answers(ways: Ways, asked: list[str]) -> None:
    ways.store(1, 2, 4)
    asked.clear()
    found = ways.index.lookup(keys(1, 2, 3, 4), namespace=SPACE, ask=False)
    assert found.statuses == [Status.GRANTED, Status.GRANTED, Status.MISS, Status.MISS]
    assert (found.hits, found.done) == (2, True)
    assert ways.index.lookup(keys(1, 2, 3, 4), namespace=SPACE, ask=False, prefix=False).hits == 3
    named = ways.index.lookup(keys(1, 3), namespace=SPACE, ask=False, identify=True).incarnations
    assert [bool(number) for number in named] == [True, False]
    assert ways.index.lookup(keys(8, 9), namespace=SPACE, ask=False, hold=True).hits == 0
    assert asked == []
    assert ways.rpc.lookup(keys(1), namespace=SPACE, ask=False).hits == 0, "a client without the index has nothing"


def test_hold_costs_a_call_where_something_is_held(ways: Ways, asked: list[str]) -> None:
    ways.store(1, 2, 4)
    asked.clear()
    held = ways.index.lookup(keys(1, 2, 3, 4), namespace=SPACE, ask=False, hold=True)
    assert held.statuses == [Status.GRANTED, Status.GRANTED, Status.MISS, Status.MISS]
    assert held.hits == 2
    assert asked == ["LookupRequest"]
    sparse = ways.index.lookup(keys(3, 1, 4), namespace=SPACE, ask=False, hold=True, prefix=False)
    assert sparse.statuses == [Status.MISS, Status.GRANTED, Status.GRANTED]
    assert asked == ["LookupRequest"] * 2


@pytest.mark.parametrize("options", [{"window": 2}, {"pin_s": 1.0}, {"policy": "retain"}])
def test_what_only_the_server_does_is_not_done_without_asking(ways: Ways, options: dict[str, object]) -> None:
    with pytest.raises(UsageError, match=next(iter(options))):
        ways.index.lookup(keys(1), namespace=SPACE, ask=False, **options)


def test_a_handle_has_at_once_what_the_index_has_and_asks_for_the_rest(
    ways: Ways, monkeypatch: pytest.MonkeyPatch
) -> None:
    ways.store(1, 2, 4)
    sent: list[m.Message] = []
    from lmcache_core.client.link import channel

    encode = channel.encode_request
    monkeypatch.setattr(channel, "encode_request", lambda message: (sent.append(message), encode(message))[1])
    handle = ways.index.lookup_nowait(keys(1, 2, 3, 4), namespace=SPACE)
    assert handle.so_far.hits == 2
    assert handle.so_far.statuses == [Status.GRANTED, Status.GRANTED, Status.MISS, Status.MISS]
    assert [each.keys for each in sent if isinstance(each, m.LookupRequest)] == [key(3) + key(4)]
    result = handle.wait(60.0)
    assert result is not None
    assert _plain(result) == _plain(ways.rpc.lookup(keys(1, 2, 3, 4), namespace=SPACE))
    held = ways.index.lookup_nowait(keys(1, 3), namespace=SPACE, hold=True)
    assert held.so_far.hits == 1
    assert (done := held.wait(60.0)) is not None
    assert done.hits == 1
