"""One contract, whatever the carrier."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq.auth

from lmcache_core.client.client import Client
from lmcache_core.client.link.address import CurveKeys
from lmcache_core.client.results import Status
from lmcache_core.errors import LeaseExpiredError, NotAttachedError, UsageError
from lmcache_core.kernel.answers import Reason
from lmcache_core.pool.layout import Layout
from lmcache_core.protocol import messages as m
from lmcache_core.protocol.codec import decode_reply, encode
from lmcache_core.server.server import Server
from lmcache_core.tokens.namespace import Namespace
from lmcache_testing.waiting import WAIT_S, until

from .conftest import buffers, keys_of, payload

CARRIERS = ["embedded", "lifeline", "zmq-ipc", "zmq-tcp"]


@pytest.fixture(params=CARRIERS)
def client(request: pytest.FixtureRequest, start: Callable[..., Server], tmp_path: Path) -> Iterator[Client]:
    with open_client(request.param, start, tmp_path) as client:
        yield client


def open_client(carrier: str, start: Callable[..., Server], tmp_path: Path) -> Client:
    if carrier == "embedded":
        return start().connect()
    if carrier == "lifeline":
        server = start()
        return Client.connect(server.parts.settings.name, runtime_dir=server.parts.settings.runtime_dir)
    if carrier == "zmq-ipc":
        server = start(zmq={"ipc": True})
        return Client.connect(address=server.parts.carriers[0].address)
    server, keys = start_with_curve(start, tmp_path, "client")
    curve = CurveKeys.from_files(keys / "server.key", keys / "clients" / "client.key_secret")
    return Client.connect(address=server.parts.carriers[0].address, curve=curve)


def start_with_curve(start: Callable[..., Server], tmp_path: Path, *names: str) -> tuple[Server, Path]:
    """A server that admits clients of these names, and the folder with all keys."""
    keys = tmp_path / "curve"
    clients = keys / "clients"
    clients.mkdir(parents=True)
    zmq.auth.create_certificates(keys, "server")
    for name in names:
        zmq.auth.create_certificates(clients, name)
    server = start(
        zmq={
            "tcp": "127.0.0.1:0",
            "curve_secret_key_file": str(keys / "server.key_secret"),
            "curve_clients_dir": str(clients),
        }
    )
    return server, keys


def test_what_was_stored_is_what_is_retrieved(client: Client, namespace: Namespace) -> None:
    keys = keys_of(*range(5))
    stored = client.store(keys, [payload(namespace, i) for i in range(5)], namespace=namespace)
    assert stored.statuses == [Status.STORED] * 5
    into = buffers(namespace, 5)
    result = client.retrieve(keys, into, namespace=namespace)
    assert result.hits == 5
    assert [bytes(each) for each in into] == [payload(namespace, i) for i in range(5)]


def test_a_retrieve_ends_at_the_first_missing_key_and_touches_nothing_behind_it(
    client: Client, namespace: Namespace
) -> None:
    keys = keys_of("a", "b", "c")
    client.store([keys[0], keys[2]], [payload(namespace, 1), payload(namespace, 3)], namespace=namespace)
    into = buffers(namespace, 3)
    result = client.retrieve(keys, into, namespace=namespace)
    assert result.statuses == [Status.HIT, Status.MISS, Status.MISS]
    assert result.reasons[1] is Reason.NEVER_STORED
    assert not any(into[2])
    assert client.status()["l1"]["leases_by_kind"]["read"] == 0
    sparse = client.retrieve(keys, into, namespace=namespace, prefix=False)
    assert sparse.statuses == [Status.HIT, Status.MISS, Status.HIT]
    assert bytes(into[2]) == payload(namespace, 3)


def test_nothing_is_visible_before_its_commit(client: Client, namespace: Namespace) -> None:
    keys = keys_of("a", "b")
    with client.prepare_store(keys, namespace=namespace) as lease:
        for position in lease.granted:
            lease.view(position)[:] = payload(namespace, position)
        assert client.lookup(keys, namespace=namespace).hits == 0
        assert lease.commit([1])[1] is Status.STORED
        assert client.retrieve(keys, buffers(namespace, 2), namespace=namespace, prefix=False).statuses == [
            Status.MISS,
            Status.HIT,
        ]
    assert client.lookup(keys[:1], namespace=namespace).reasons == [Reason.ABORTED]


def test_a_batch_larger_than_a_frame_is_paged_under_one_lease(client: Client) -> None:
    from lmcache_core.pool.layout import Layout

    small = Namespace("small", Layout("uint8", (64,)))
    keys = keys_of(*range(2500))
    sources = [i.to_bytes(4, "little") * 16 for i in range(2500)]
    with client.prepare_store(keys, namespace=small) as lease:
        assert len(lease.granted) == 2500
        for position in lease.granted:
            lease.view(position)[:] = sources[position]
        lease.commit()
    into = [bytearray(64) for _ in keys]
    found = client.lookup(keys, namespace=small, hold=True)
    assert found.hits == 2500
    assert found.promise is not None
    assert found.promise.keys == tuple(keys)
    assert client.retrieve(keys, into, namespace=small, promise=found.promise).hits == 2500
    assert [bytes(each) for each in into] == sources
    assert client.status()["l1"]["leases_by_kind"] == {"promise": 0, "read": 0, "write": 0}


def test_a_lease_ends_once_and_its_views_with_it(client: Client, namespace: Namespace) -> None:
    keys = keys_of("a")
    client.store(keys, [payload(namespace, 1)], namespace=namespace)
    lease = client.prepare_retrieve(keys, namespace=namespace)
    view = lease.view(0)
    assert view.readonly
    assert view == payload(namespace, 1)
    lease.finish()
    with pytest.raises(ValueError, match="released"):
        view[0]
    with pytest.raises(LeaseExpiredError, match="has ended"):
        lease.view(0)
    assert client.lease_status(lease.id).state == "settled"


def test_a_promise_keeps_what_was_found_until_it_is_given_back(client: Client, namespace: Namespace) -> None:
    keys = keys_of("a")
    client.store(keys, [payload(namespace, 1)], namespace=namespace)
    found = client.lookup(keys, namespace=namespace, hold=True)
    assert client.status()["l1"]["leases_by_kind"]["promise"] == 1
    assert client.free_lookup_locks(found.promise) == 1
    assert client.status()["l1"]["leases_by_kind"]["promise"] == 0


def test_clear_reaches_what_is_being_written(client: Client, namespace: Namespace) -> None:
    keys = keys_of("a", "b")
    client.store(keys[:1], [payload(namespace, 1)], namespace=namespace)
    with client.prepare_store(keys[1:], namespace=namespace) as lease:
        cleared = client.clear(namespace)
        assert (cleared.objects, cleared.doomed) == (1, 1)
        assert lease.commit() == [Status.CLEARED]
    assert client.lookup(keys, namespace=namespace).hits == 0
    assert client.status()["l1"]["used_bytes"] == 0


def test_pins_outlive_the_lease_and_end_on_request(client: Client, namespace: Namespace) -> None:
    keys = keys_of("a", "b")
    client.store(keys[:1], [payload(namespace, 1)], namespace=namespace)
    assert client.pin(keys, namespace=namespace) == [Status.GRANTED, Status.MISS]
    assert client.status()["l1"]["pinned_objects"] == 1
    assert client.unpin(keys, namespace=namespace) == [Status.GRANTED, Status.MISS]
    assert client.status()["l1"]["pinned_objects"] == 0


def test_end_session_releases_everything_it_held(client: Client, namespace: Namespace) -> None:
    keys = keys_of("a", "b")
    client.store(keys[:1], [payload(namespace, 1)], namespace=namespace)
    client.lookup(keys, namespace=namespace, hold=True)
    write = client.prepare_store(keys[1:], namespace=namespace)
    client.prepare_retrieve(keys[:1], namespace=namespace)
    client.end_session()
    with pytest.raises(LeaseExpiredError):
        write.view(0)
    assert client.status()["l1"]["leases_by_kind"] == {"promise": 0, "read": 0, "write": 0}
    assert client.lookup(keys, namespace=namespace).hits == 1


def test_a_lease_can_be_renewed_and_asked_about(client: Client, namespace: Namespace) -> None:
    with client.prepare_store(keys_of("a"), namespace=namespace) as lease:
        assert lease.renew() == pytest.approx(600, abs=5)
        state = client.lease_status(lease.id)
        assert (state.state, state.kind, state.open_positions) == ("open", "write", 1)


def test_noop_ping_and_status_are_answered_over_each_carrier(client: Client) -> None:
    client.noop()
    payload = os.urandom(1000)
    assert client.ping(payload) == payload
    assert client.get_chunk_size() == 256
    assert client.status()["server"]["version"]


def test_bad_objects_are_named_with_their_cure(client: Client, namespace: Namespace) -> None:
    good = payload(namespace, 1)
    with pytest.raises(UsageError, match="object 1 has 3 bytes"):
        client.store(keys_of("a", "b"), [good, b"abc"], namespace=namespace)
    with pytest.raises(UsageError, match="1 objects for 2 keys"):
        client.store(keys_of("a", "b"), [good], namespace=namespace)
    with pytest.raises(UsageError, match="key 0 has 3 bytes"):
        client.store([b"abc"], [good], namespace=namespace)
    with pytest.raises(UsageError, match="read-only"):
        client.retrieve(keys_of("a"), [good], namespace=namespace)
    with pytest.raises(UsageError, match="one bytes object"):
        client.lookup(b"x" * 32, namespace=namespace)


def test_who_does_not_map_the_pool_gets_answers_and_no_slots(
    start: Callable[..., Server], namespace: Namespace
) -> None:
    server = start(zmq={"ipc": True})
    with server.connect() as worker:
        worker.store(keys_of("a"), [payload(namespace, 1)], namespace=namespace)
        with Client.connect(address=server.parts.carriers[0].address, maps_pool=False) as remote:
            assert remote.lookup(keys_of("a"), namespace=namespace).hits == 1
            with pytest.raises(NotAttachedError):
                remote.prepare_store(keys_of("b"), namespace=namespace)
            assert remote.clear(namespace).objects == 1


def test_a_newcomer_is_answered_though_hundreds_of_strangers_came_before_it(
    start: Callable[..., Server], tmp_path: Path
) -> None:
    server, keys = start_with_curve(start, tmp_path, "client")
    address = server.parts.carriers[0].address
    host, port = address.removeprefix("tcp://").split(":")
    turn, waits = threading.Event(), threading.Event()
    server.parts.loop.call(lambda: (waits.set(), turn.wait(WAIT_S)))  # a long turn, in which all of this comes
    assert waits.wait(WAIT_S)
    for _ in range(200):
        socket.create_connection((host, int(port))).close()
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer, contextlib.ExitStack() as stack:
        dealer.curve_publickey, dealer.curve_secretkey = zmq.auth.load_certificate(keys / "clients/client.key_secret")
        dealer.curve_serverkey = zmq.auth.load_certificate(keys / "server.key")[0]
        seen = stack.enter_context(contextlib.closing(dealer.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)))
        dealer.connect(address)
        dealer.send(encode(m.Hello(1, m.PROTOCOL_VERSION_MIN, m.PROTOCOL_VERSION_MAX, bytes(16), "raw", 1, [])))
        assert seen.poll(1000 * WAIT_S), "what it has sent is on its way from here on"
        turn.set()
        assert dealer.poll(1000 * WAIT_S), "the first answer was not dropped"
        dealer.disable_monitor()


def test_a_session_is_of_the_key_that_opened_it_whoever_shows_its_routing_id(
    start: Callable[..., Server], tmp_path: Path
) -> None:
    server, keys = start_with_curve(start, tmp_path, "member", "other")
    carrier = server.parts.carriers[0]
    hello = m.Hello(1, m.PROTOCOL_VERSION_MIN, m.PROTOCOL_VERSION_MAX, bytes(16), "raw", os.getpid(), [])
    layout = Layout("uint8", (4096,))

    def dealer(context: zmq.Context[zmq.Socket[bytes]], name: str) -> zmq.Socket[bytes]:
        made = context.socket(zmq.DEALER)
        made.linger, made.routing_id, made.rcvtimeo = 0, b"scheduler", 10_000
        made.curve_publickey, made.curve_secretkey = zmq.auth.load_certificate(keys / f"clients/{name}.key_secret")
        made.curve_serverkey = zmq.auth.load_certificate(keys / "server.key")[0]
        made.connect(carrier.address)
        return made

    with zmq.Context() as context:
        with dealer(context, "member") as member:
            for request in (hello, m.RegisterLayout(2, 7, "uint8", [4096], "", layout.fingerprint)):
                member.send(encode(request))
                assert not isinstance(decode_reply(member.recv()), m.Error)

        (session,) = server.parts.sessions

        # A routing id is free once the library has noticed that its last owner is away.
        def is_garbage() -> bool:
            with dealer(context, "other") as other:
                for _ in range(20):
                    sent = threading.Event()
                    server.parts.loop.call(lambda: session.send(m.Done(9)))
                    server.parts.loop.call(sent.set)
                    assert sent.wait(WAIT_S)
                    assert not other.poll(10), "no late answer to another key's request"
                before = carrier.garbage
                other.send(encode(m.Clear(3, 7)))
                assert not other.poll(200), "no answer of another key's session"
                return carrier.garbage > before

        def goes_on() -> bool:
            with dealer(context, "member") as member:
                member.send(encode(m.Noop(4)))
                return bool(member.poll(200)) and decode_reply(member.recv()) == m.Done(4)

        until(is_garbage)
        until(goes_on)
