"""A read lease that nobody was asked for: what it has, and what it says of itself at its end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from lmcache_core.client.client import Client
from lmcache_core.client.move.leases import ReadLease
from lmcache_core.client.results import Status
from lmcache_core.errors import LeaseExpiredError, UsageError
from lmcache_core.kernel.answers import Reason
from lmcache_core.native import native
from lmcache_core.pool.layout import Layout
from lmcache_core.protocol import messages as m
from lmcache_core.server.server import Server
from lmcache_core.tokens.namespace import Namespace

from .conftest import NBYTES, keys, payload

pytestmark = pytest.mark.skipif(native is None, reason="the index is read by the C extension alone")

SPACE = Namespace("model", Layout("uint8", (NBYTES,)))


@pytest.fixture
def server(start: Callable[..., Server]) -> Server:
    return start(l1={"size_bytes": 4 << 20, "watermark": 1.0})


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with server.connect() as client:
        client.register_layout(SPACE)
        yield client


def store(client: Client, *numbers: int) -> None:
    result = client.store(keys(*numbers), [payload(number) for number in numbers], namespace=SPACE)
    assert set(result.statuses) == {Status.STORED}


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


@pytest.mark.parametrize("prefix", [True, False], ids=["a prefix", "each for itself"])
def test_what_the_index_has_is_read_without_a_call_and_the_rest_is_missing(
    client: Client, asked: list[str], prefix: bool
) -> None:
    store(client, 1, 2, 4)
    asked.clear()
    with client.prepare_retrieve(keys(1, 2, 3, 4), namespace=SPACE, prefix=prefix, optimistic=True) as lease:
        there = [0, 1] if prefix else [0, 1, 3]
        assert lease.id == 0
        assert lease.granted == there
        assert lease.hits == 2
        assert [at for at, status in enumerate(lease.statuses) if status is Status.GRANTED] == there
        assert [status for at, status in enumerate(lease.statuses) if at not in there] == [Status.MISS] * (
            4 - len(there)
        )
        assert lease.reasons == [Reason.NONE] * 4
        assert [at for at, number in enumerate(lease.incarnations) if number] == there
        assert len(lease.incarnations) == 4
        for at in there:
            assert bytes(lease.view(at)) == payload((1, 2, 3, 4)[at])
        with pytest.raises(UsageError, match="has no slot"):
            lease.view(2)
        assert lease.untouched(there) == [True] * len(there)
        assert lease.finish(there[:1])[0] is Status.HIT
        assert lease.granted == there[1:]
    assert [at for at, status in enumerate(lease.statuses) if status is Status.HIT] == there
    assert asked == []


def test_its_incarnations_are_those_that_a_lease_of_the_server_names(client: Client) -> None:
    store(client, 1, 2)
    with (
        client.prepare_retrieve(keys(1, 2), namespace=SPACE, optimistic=True) as found,
        client.prepare_retrieve(keys(1, 2), namespace=SPACE) as granted,
    ):
        assert list(found.incarnations) == list(granted.incarnations)


def test_it_counts_what_it_reads(client: Client) -> None:
    store(client, 1, 2)
    with client.prepare_retrieve(keys(1, 2, 3), namespace=SPACE, optimistic=True):
        pass
    retrieves = client.status()["traffic"]["retrieves"]
    assert (retrieves["hits_by_index"], retrieves["bytes"]) == (2, 2 * NBYTES)


def leaves(client: Client, how: str) -> None:
    if how == "cleared":
        client.clear(SPACE)
    else:
        client.clear(SPACE)
        store(client, 1, 2)


@pytest.mark.parametrize("how", ["cleared", "stored anew"])
def test_what_left_while_it_was_read_is_a_miss_at_the_end(client: Client, how: str) -> None:
    store(client, 1, 2)
    lease = client.prepare_retrieve(keys(1, 2), namespace=SPACE, optimistic=True)
    assert lease.finish([0])[0] is Status.HIT
    leaves(client, how)
    assert lease.untouched([1]) == [False]
    assert lease.finish() == [Status.HIT, Status.MISS]
    assert lease.granted == []
    with pytest.raises(LeaseExpiredError):
        lease.view(1)


@pytest.mark.parametrize("how", ["cleared", "stored anew"])
def test_the_end_of_the_block_says_which_positions_left_while_they_were_read(client: Client, how: str) -> None:
    store(client, 1, 2)
    with (
        pytest.raises(LeaseExpiredError, match=r"positions \[0, 1\] left the pool"),
        client.prepare_retrieve(keys(1, 2), namespace=SPACE, optimistic=True),
    ):
        leaves(client, how)


def test_what_the_block_raises_is_what_is_raised(client: Client) -> None:
    store(client, 1)
    lease = client.prepare_retrieve(keys(1), namespace=SPACE, optimistic=True)

    def read() -> None:
        with lease:
            client.clear(SPACE)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        read()
    with pytest.raises(LeaseExpiredError):
        lease.view(0)


@pytest.mark.parametrize("why", ["no index", "not registered"])
def test_where_there_is_no_index_to_go_by_it_is_a_lease_like_any_other(
    server: Server, client: Client, why: str
) -> None:
    store(client, 1)
    with server.connect(use_index=why != "no index") as other:
        other.noop()
        with other.prepare_retrieve(keys(1), namespace=SPACE, optimistic=True) as lease:
            assert lease.id
            assert bytes(lease.view(0)) == payload(1)
            assert client.status()["l1"]["leases_by_kind"]["read"] == 1
        assert lease.statuses == [Status.HIT]
    assert client.status()["l1"]["leases_by_kind"]["read"] == 0


def test_a_lease_that_the_server_keeps_stands_though_its_key_was_stored_anew(client: Client) -> None:
    store(client, 1)
    with client.prepare_retrieve(keys(1), namespace=SPACE) as lease:
        leaves(client, "stored anew")
        assert bytes(lease.view(0)) == payload(1)
    assert lease.statuses == [Status.HIT]


@pytest.mark.parametrize("left", [False, True], ids=["as it was", "changed meanwhile"])
def test_after_the_death_of_its_server_a_lease_stands_by_what_the_index_shows(
    server: Server, client: Client, left: bool
) -> None:
    store(client, 1)
    lease = client.prepare_retrieve(keys(1), namespace=SPACE)
    if left:
        client.clear(SPACE)
    number = lease.id
    # What a server answers that knows no such lease, as the next one after a crash does.
    client.links.current().channel.call(m.FinishRead(0, number, 0, 1, b""))
    lease.holding.id = number + 1
    finished: Callable[[], object] = lease.finish
    if left:
        with pytest.raises(LeaseExpiredError):
            finished()
    else:
        assert finished() == [Status.HIT]


def test_two_threads_may_finish_it_at_once(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    store(client, 1, 2, 3)
    lease = client.prepare_retrieve(keys(1, 2, 3), namespace=SPACE, optimistic=True)
    untouched, others = ReadLease._untouched, []

    def look(lease: ReadLease, positions: list[int]) -> bool:
        if not others:  # the other thread comes while this one looks
            others.append(threading.Thread(target=lease.finish))
            others[0].start()
            others[0].join()
        return untouched(lease, positions)

    monkeypatch.setattr(ReadLease, "_untouched", look)
    assert lease.finish() == [Status.HIT] * 3
    assert lease.granted == []


def test_an_optimistic_lease_says_that_there_is_nothing_to_renew(client: Client) -> None:
    store(client, 1)
    with (
        client.prepare_retrieve(keys(1), namespace=SPACE, optimistic=True) as lease,
        pytest.raises(LeaseExpiredError, match="nothing to renew"),
    ):
        lease.renew()
