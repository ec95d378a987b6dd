"""Whatever a peer says in the protocol's own words, it gets an answer, and the server's own code never fails on it."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmcache_core.kernel.answers import Grant, Reason, Settled
from lmcache_core.limits import KEY_BYTES, LEASES_PER_SESSION_MAX
from lmcache_core.pool.layout import DTYPE_BYTES, Layout
from lmcache_core.protocol import messages as m
from lmcache_core.protocol.codec import encode

from .desk import LAYOUT, NAMESPACE, Desk, Mouth


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    with ExitStack() as stack:
        yield Desk(tmp_path_factory.mktemp("desk"), stack)


wire_int = st.one_of(st.integers(0, 40), st.integers(-(2**63), 2**64 - 1))
keys = st.one_of(
    st.lists(st.integers(0, 30).map(lambda n: n.to_bytes(KEY_BYTES, "big")), max_size=40).map(b"".join),
    st.integers(0, 1100).map(lambda n: os.urandom(16) * 2 * n),
    st.binary(max_size=100),
)
namespace = st.one_of(st.just(NAMESPACE), wire_int)
seconds = st.one_of(st.floats(), st.floats(0, 5))
text = st.text(max_size=30)
shape = st.lists(st.one_of(st.integers(1, 300), wire_int), max_size=6)


def settle(kind: type[m.Settle], lease: st.SearchStrategy[int]) -> st.SearchStrategy[m.Message]:
    positions = st.one_of(st.binary(max_size=40), st.lists(st.integers(0, 9), max_size=9).map(packed))
    return st.builds(kind, rid, lease, wire_int, wire_int, positions)


def packed(positions: list[int]) -> bytes:
    return b"".join(position.to_bytes(4, "little") for position in positions)


rid = st.integers(1, 2**32)
lookup_options = st.builds(
    m.LookupOptions, st.booleans(), st.booleans(), seconds, st.none() | st.lists(text, max_size=3)
)


def registered(rid: int, namespace: int, dimensions: list[int]) -> m.RegisterLayout:
    """A layout that is registered correctly, whatever its size."""
    layout = Layout("int8", tuple(dimensions))
    return m.RegisterLayout(rid, namespace, layout.dtype, dimensions, "", layout.fingerprint)


leases: list[int] = []  # that were given out in this example, promises among them
# By its distance from the end: how many there are depends on the server, and the choices must not.
lease = st.one_of(st.integers(0, 5).map(lambda back: leases[-back] if 0 < back <= len(leases) else 0), wire_int)
# Any request; ids are often those that were given out before. Made once: hypothesis reads the hints of each class.
requests = st.one_of(
    st.builds(m.PrepareStore, rid, namespace, keys, lease),
    st.builds(m.PrepareRetrieve, rid, namespace, keys, lease, lease, st.booleans()),
    *(settle(kind, lease) for kind in (m.CommitStore, m.AbortStore, m.FinishRead)),
    st.builds(m.LookupRequest, rid, namespace, keys, lookup_options),
    st.builds(m.TracedLookup, rid, namespace, keys, traceparent=text),
    st.builds(m.TracedPrepareStore, rid, namespace, keys, lease, traceparent=text),
    st.builds(m.RegisterLayout, rid, wire_int, st.sampled_from([*DTYPE_BYTES, "x"]), shape, text, wire_int),
    st.builds(registered, rid, wire_int, st.lists(st.integers(1, 1600), min_size=1, max_size=3)),
    st.builds(m.Pin, rid, namespace, keys, seconds),
    st.builds(m.Unpin, rid, namespace, keys),
    st.builds(m.RenewLease, rid, lease),
    st.builds(m.LeaseStatusOf, rid, lease),
    st.builds(m.FreeLookupLocks, rid, st.lists(lease, max_size=5)),
    st.builds(m.RedeemPromise, rid, lease, namespace, keys),
    st.builds(m.QueryPrefetchStatus, rid, wire_int),
    st.builds(m.QueryLookupHits, rid, wire_int),
    st.builds(m.Cancel, rid, wire_int),
    st.builds(m.Clear, rid, st.one_of(st.none(), namespace), st.booleans()),
    st.builds(m.EndSession, rid, st.just(False)),
    st.builds(m.Attach, rid, wire_int, wire_int, st.lists(lease, max_size=5)),
    st.builds(m.Hello, rid, wire_int, wire_int, st.binary(max_size=20), text, wire_int),
    st.builds(m.Ping, rid, st.binary(max_size=100)),
    st.builds(m.StatusRequest, rid),
    st.builds(m.ConfigRequest, rid),
    st.builds(m.GetChunkSize, rid),
)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(data=st.data())
def test_every_request_is_answered_and_the_server_never_fails_on_one(desk: Desk, data: st.DataObject) -> None:
    peers = [desk.peer(attached=True), desk.peer(attached=False)]
    leases.clear()
    try:
        for _ in range(data.draw(st.integers(1, 40))):
            peer = data.draw(st.sampled_from(peers))
            reply = desk.say(peer, data.draw(requests))
            leases.extend(number for name in ("lease", "promise") if (number := getattr(reply, name, 0)))
            assert not (isinstance(reply, m.Error) and reply.code == "INTERNAL"), reply
    finally:
        for peer in peers:
            desk.say(peer, m.EndSession(9, goodbye=True))
    assert all(peer.closed for peer in peers)
    usage = desk.server.parts.kernel.usage()
    assert sum(usage.leases_by_kind.values()) == 0
    assert usage.sessions == 0


@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(hello=st.builds(m.Hello, rid, wire_int, wire_int, st.binary(max_size=20), text, wire_int, st.lists(text)))
def test_any_hello_is_answered(desk: Desk, hello: m.Hello) -> None:
    peer = Mouth()
    reply: Any = desk.say(peer, hello)
    assert reply.rid == hello.rid
    if isinstance(reply, m.Welcome):
        desk.say(peer, m.EndSession(9, goodbye=True))
    assert desk.server.dispatch.counters["internal_errors"] == 0


def test_a_request_that_cannot_be_read_is_answered_under_its_own_id(desk: Desk) -> None:
    peer = desk.peer(attached=False)
    bent = encode(m.Ping(4711, b"x")).replace(b"\xc4\x01x", b"\xcb" + bytes(8))  # a float where bytes are due
    desk.server.dispatch.on_frame(peer, memoryview(bent))
    reply = peer.replies[-1]
    assert isinstance(reply, m.Error)
    assert (reply.rid, reply.code) == (4711, "PROTOCOL")
    desk.say(peer, m.EndSession(9, goodbye=True))


def test_checksums_of_a_commit_come_back_to_who_verifies(desk: Desk) -> None:
    peer = desk.peer(attached=True)
    keys = b"".join(os.urandom(KEY_BYTES) for _ in range(3))
    granted = desk.ask(peer, m.PrepareStore(5, NAMESPACE, keys), m.Granted)
    checksums = struct.pack("<3Q", 11, 0, 2**64 - 1)
    desk.say(peer, m.CommitStore(6, granted.lease, 0, 3, b"", checksums))
    plain = desk.ask(peer, m.PrepareRetrieve(7, NAMESPACE, keys), m.Granted)
    careful = desk.ask(peer, m.PrepareRetrieve(8, NAMESPACE, keys, verify=True), m.Granted)
    assert (plain.checksums, careful.checksums) == (b"", checksums)
    desk.say(peer, m.EndSession(9, goodbye=True))


@pytest.mark.parametrize("checksums", [b"x", bytes(7), bytes(8), bytes(24)])
def test_checksums_that_fit_no_positions_are_refused_and_the_lease_lives(desk: Desk, checksums: bytes) -> None:
    peer = desk.peer(attached=True)
    keys = b"".join(os.urandom(KEY_BYTES) for _ in range(2))
    granted = desk.ask(peer, m.PrepareStore(5, NAMESPACE, keys), m.Granted)
    refused = desk.ask(peer, m.CommitStore(6, granted.lease, 0, 2, b"", checksums), m.Error)
    assert isinstance(refused, m.Error)
    settled: Any = desk.say(peer, m.CommitStore(7, granted.lease, 0, 2))
    assert settled.outcomes == bytes([Settled.COMMITTED] * 2)
    desk.say(peer, m.EndSession(9, goodbye=True))


def test_a_namespace_has_one_layout_for_the_whole_server_and_a_second_one_is_refused_with_both_named(
    desk: Desk,
) -> None:
    first, second = desk.peer(attached=False), desk.peer(attached=False)
    space, small, alike = 4711, Layout("uint8", (100,)), Layout("float16", (2048,))

    def register(peer: Mouth, layout: Layout) -> Any:
        return desk.say(peer, m.RegisterLayout(5, space, layout.dtype, list(layout.shape), "", layout.fingerprint))

    assert isinstance(register(first, LAYOUT), m.LayoutRegistered)
    assert isinstance(register(second, LAYOUT), m.LayoutRegistered)
    assert alike.nbytes == LAYOUT.nbytes
    for peer in (first, second):
        for other in (small, alike):
            refused = register(peer, other)
            named = str(LAYOUT) in refused.message and str(other) in refused.message
            assert (refused.code, named) == ("USAGE", True)
    desk.say(first, m.EndSession(6, goodbye=True))
    assert isinstance(register(second, small), m.Error)
    desk.say(second, m.EndSession(6, goodbye=True))
    third = desk.peer(attached=False)
    assert isinstance(register(third, small), m.LayoutRegistered), "nobody uses it, and there is nothing of it"
    desk.say(third, m.EndSession(6, goodbye=True))


def test_a_namespace_keeps_its_layout_for_as_long_as_the_pool_has_an_object_of_it(desk: Desk) -> None:
    first = desk.peer(attached=True)
    key = os.urandom(KEY_BYTES)
    granted = desk.ask(first, m.PrepareStore(5, NAMESPACE, key), m.Granted)
    desk.say(first, m.CommitStore(6, granted.lease, 0, 1))
    desk.say(first, m.EndSession(7, goodbye=True))
    second = Mouth()
    desk.say(second, m.Hello(1, m.PROTOCOL_VERSION_MIN, m.PROTOCOL_VERSION_MAX, os.urandom(16), "fuzz", 0, []))
    other = Layout("uint8", (100,))
    refused = desk.ask(second, m.RegisterLayout(3, NAMESPACE, other.dtype, [100], "", other.fingerprint), m.Error)
    assert isinstance(refused, m.Error)
    desk.say(second, m.EndSession(8, goodbye=True))


def test_damage_is_reported_of_what_a_lease_holds_and_never_hits_a_successor(desk: Desk) -> None:
    peer = desk.peer(attached=True)
    key = os.urandom(KEY_BYTES)

    def store() -> None:
        granted = desk.ask(peer, m.PrepareStore(5, NAMESPACE, key), m.Granted)
        desk.say(peer, m.CommitStore(6, granted.lease, 0, 1))

    def hold() -> int:
        held = desk.ask(peer, m.PrepareRetrieve(7, NAMESPACE, key, verify=True), m.Granted)
        return int(held.lease)

    def hits() -> int:
        found = desk.ask(peer, m.LookupRequest(8, NAMESPACE, key), m.LookupReply)
        return int(found.hits)

    store()
    foreign = desk.ask(peer, m.ReportDamaged(9, 12345, 0, 1), m.Error)
    assert (type(foreign), foreign.code) == (m.Error, "LEASE_EXPIRED")
    former, again = hold(), hold()
    beyond = desk.ask(peer, m.ReportDamaged(10, former, 0, 2), m.Error)
    assert isinstance(beyond, m.Error)
    assert hits() == 1
    told: Any = desk.say(peer, m.ReportDamaged(11, former, 0, 1))
    assert told.outcomes == bytes([Settled.FINISHED])
    gone = desk.ask(peer, m.LookupRequest(12, NAMESPACE, key), m.LookupReply)
    assert gone.reasons == bytes([Reason.DAMAGED])
    store()
    assert isinstance(desk.say(peer, m.ReportDamaged(13, again, 0, 1)), m.SettledReply)
    assert hits() == 1, "what was reported again is the former incarnation"
    desk.say(peer, m.EndSession(14, goodbye=True))


def test_leases_of_a_session_are_bounded_and_nobody_else_is_refused(desk: Desk) -> None:
    greedy, modest = desk.peer(attached=True), desk.peer(attached=True)
    key = os.urandom(KEY_BYTES)
    granted = desk.ask(greedy, m.PrepareStore(5, NAMESPACE, key), m.Granted)
    desk.say(greedy, m.CommitStore(6, granted.lease, 0, 1))
    replies: list[Any] = [
        desk.say(greedy, m.LookupRequest(7, NAMESPACE, key, m.LookupOptions(hold=True)))
        for _ in range(LEASES_PER_SESSION_MAX + 1)
    ]
    assert all(reply.promise for reply in replies[:-1])
    assert replies[-1].code == "LIMIT"
    held = desk.ask(modest, m.LookupRequest(8, NAMESPACE, key, m.LookupOptions(hold=True)), m.LookupReply)
    assert held.promise
    freed = desk.ask(greedy, m.FreeLookupLocks(9, [reply.promise for reply in replies[:3]]), m.Done)
    assert freed.count == 3
    again = desk.ask(greedy, m.LookupRequest(10, NAMESPACE, key, m.LookupOptions(hold=True)), m.LookupReply)
    assert again.promise
    for peer in (greedy, modest):
        desk.say(peer, m.EndSession(11, goodbye=True))


def test_sessions_that_hold_something_are_bounded_and_a_goodbye_makes_room(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lmcache_core.server.peers.session_table.SESSIONS_MAX", 3)
    writer = desk.peer(attached=True)
    key = os.urandom(32)
    granted = desk.ask(writer, m.PrepareStore(5, NAMESPACE, key), m.Granted)
    desk.say(writer, m.CommitStore(6, granted.lease, count=1))
    desk.say(writer, m.PrepareRetrieve(7, NAMESPACE, key))
    holders = [desk.peer(attached=False) for _ in range(2)]
    for peer in holders:
        promised = desk.ask(peer, m.LookupRequest(8, NAMESPACE, key, m.LookupOptions(hold=True)), m.LookupReply)
        assert promised.promise
    late = Mouth()
    refused = desk.say(late, m.Hello(1, m.PROTOCOL_VERSION_MIN, m.PROTOCOL_VERSION_MAX, os.urandom(16), "late", 0))
    assert isinstance(refused, m.Error)
    assert refused.code == "LIMIT"
    desk.say(holders.pop(), m.EndSession(2, goodbye=True))
    assert isinstance(
        desk.say(late, m.Hello(3, m.PROTOCOL_VERSION_MIN, m.PROTOCOL_VERSION_MAX, os.urandom(16), "late", 0)), m.Welcome
    )
    for peer in (late, writer, *holders):
        desk.say(peer, m.EndSession(4, goodbye=True))


def test_a_policy_that_raises_costs_its_call_and_nothing_else(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    peer = desk.peer(attached=True)
    policy = desk.server.parts.kernel.residents.policy

    def broken(*arguments: object) -> None:
        raise RuntimeError("a plugin's bug")

    desk.say(peer, m.Clear(4, None))
    keys = b"".join(os.urandom(KEY_BYTES) for _ in range(1024))
    desk.say(peer, m.PrepareStore(5, NAMESPACE, keys))  # all the memory there is
    with monkeypatch.context() as patch:
        patch.setattr(type(policy), "victims", broken)
        desk.server.dispatch.on_frame(peer, memoryview(encode(m.PrepareStore(6, NAMESPACE, os.urandom(KEY_BYTES)))))
        failed: Any = peer.replies[-1]
        assert (failed.rid, failed.code) == (6, "INTERNAL")
    assert "a plugin's bug" in caplog.text
    desk.say(peer, m.EndSession(7))
    granted = desk.ask(peer, m.PrepareStore(8, NAMESPACE, os.urandom(KEY_BYTES)), m.Granted)
    assert granted.statuses == bytes([Grant.GRANTED])
    desk.say(peer, m.EndSession(9, goodbye=True))
