"""What an engine sees of the client: views, promises, notices, forks, both carriers, a server that comes and goes."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.auth

from lmcache_core.client.client import Client
from lmcache_core.client.link.address import CurveKeys
from lmcache_core.client.results import Status
from lmcache_core.errors import DisconnectedError, LeaseExpiredError, UsageError
from lmcache_core.pool.layout import Layout
from lmcache_core.protocol import messages as m
from lmcache_core.protocol.codec import encode
from lmcache_core.server.server import Server
from lmcache_core.tokens.namespace import Namespace
from lmcache_testing.embedded import embedded_server, server_settings
from lmcache_testing.waiting import WAIT_S, until

from ..conftest import Node

NO_LEASES = {"promise": 0, "read": 0, "write": 0}


# --- views and promises ------------------------------------------------------------------------------------------


def test_views_and_tensors_die_with_their_lease_and_a_slice_keeps_only_the_mapping(node: Node) -> None:
    torch = pytest.importorskip("torch")
    node.serve()
    client = node.client()
    client.store([node.key("a")], [node.payload(7)], namespace=node.namespace)
    lease = client.prepare_retrieve([node.key("a")], namespace=node.namespace)
    view, tensor = lease.view(0), lease.tensor(0)
    part = view[:10]
    assert torch.all(tensor == node.payload(7)[0])
    lease.finish()
    assert tensor.numel() == 0
    assert len(bytes(part)) == 10  # a slice that the caller kept is still mapped: no SIGSEGV
    with pytest.raises(LeaseExpiredError, match="has ended"):
        lease.tensor(0)
    client.close()
    del view, part, tensor, lease, client
    gc.collect()  # what an engine kept is what keeps the mapping, and nothing else
    assert not any(node.name in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_a_promise_is_redeemed_by_another_session_of_its_namespace_only(node: Node) -> None:
    node.serve()
    worker = node.client()
    stranger_space = Namespace("another model", node.namespace.layout)
    keys = [node.key("a"), node.key("b")]
    worker.store(keys, [node.payload(1), node.payload(2)], namespace=node.namespace)
    scheduler = node.client(maps_pool=False)
    promised = scheduler.lookup(keys, namespace=node.namespace, hold=True).promise
    count = lambda: worker.status()["l1"]["leases_by_kind"]["promise"]  # noqa: E731
    assert count() == 1
    into = [bytearray(65536), bytearray(65536)]
    stranger = node.client()
    assert stranger.retrieve(keys, into, namespace=stranger_space, promise=promised).hits == 0
    assert count() == 1  # another namespace redeems nothing
    assert stranger.free_lookup_locks(promised) == 0  # nor may another session give it back
    assert worker.retrieve(keys, into, namespace=node.namespace, promise=promised).hits == 2
    assert count() == 0
    assert worker.retrieve(keys, into, namespace=node.namespace, promise=promised).hits == 2  # it was only a hint


def test_a_promise_keeps_its_objects_through_an_overflow_and_ends_by_itself(node: Node) -> None:
    node.serve("--lease.promise_ttl_s", "1.5")
    client = node.client()
    client.store([node.key("a")], [node.payload(1)], namespace=node.namespace)
    client.lookup([node.key("a")], namespace=node.namespace, hold=True)
    client.store([node.key(i) for i in range(300)], [node.payload(2)] * 300, namespace=node.namespace)
    if client.status()["l1"]["leases_by_kind"]["promise"]:  # it was fast enough
        assert client.lookup([node.key("a")], namespace=node.namespace).hits == 1
    until(lambda: client.status()["l1"]["leases_by_kind"] == NO_LEASES, "its end")


def test_a_lease_learns_from_the_next_frame_that_it_expired(node: Node) -> None:
    node.serve("--lease.write_ttl_s", "0.2")
    client, watcher = node.client(), node.client()
    lease = client.prepare_store([node.key("a")], namespace=node.namespace)
    until(lambda: watcher.status()["l1"]["bytes_by_state"]["quarantined"], "the expiry")
    client.noop()
    assert lease.expired
    with pytest.raises(LeaseExpiredError):
        lease.commit()
    assert watcher.status()["l1"]["bytes_by_state"]["quarantined"] == 0


def test_whoever_waits_for_ready_can_store_at_once(node: Node) -> None:
    server = node.serve(ready=False)
    server.line()
    with server.client() as client:
        keys, objects = [node.key(at) for at in range(8)], [node.payload(at) for at in range(8)]
        assert client.store(keys, objects, namespace=node.namespace).stored == 8


def test_what_is_asked_before_the_pool_is_populated_is_warming_and_stored_later(node: Node, tmp_path: Path) -> None:
    from lmcache_core.pool.populate import Populator

    start, waiting = Populator.start, list[Populator]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Populator, "start", lambda populator: waiting.append(populator))
        server = Server(server_settings(tmp_path))
    with server, server.connect() as client:
        keys, objects = [node.key("a")], [node.payload(1)]
        assert client.store(keys, objects, namespace=node.namespace).statuses == [Status.WARMING]
        assert client.prepare_store(keys, namespace=node.namespace).statuses == [Status.WARMING]
        start(waiting[0])
        until(lambda: client.store(keys, objects, namespace=node.namespace).stored, "population")


def test_threads_that_share_a_client_store_and_read_their_own_bytes(node: Node) -> None:
    node.serve()
    client = node.client()
    wrong: list[str] = []

    def work(number: int) -> None:
        for turn in range(25):
            key, payload = node.key((number, turn)), node.payload(number * 31 + turn)
            if client.store([key], [payload], namespace=node.namespace).stored != 1:
                wrong.append(f"{number} {turn} not stored")
            handle = client.lookup_nowait([key], namespace=node.namespace)
            into = [bytearray(65536)]
            if client.retrieve([key], into, namespace=node.namespace).hits and into[0] != payload:
                wrong.append(f"{number} {turn} read another's bytes")
            handle.wait(WAIT_S)

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []
    assert client.status()["l1"]["leases_by_kind"] == NO_LEASES


# --- zmq ---------------------------------------------------------------------------------------------------------

ZMQ_WORKER = """
client.close()
client = Client.connect(address=sys.argv[2] and open(sys.argv[2] + '/../address').read())
"""


@pytest.fixture
def address(node: Node, tmp_path: Path) -> str:
    """Of a server that also serves ZMQ over ipc."""
    node.zmq_server = node.serve("--zmq.ipc", "true")
    address: str = node.client().status()["server"]["also_at"][0]
    (tmp_path / "address").write_text(address)
    return address


def test_a_zmq_worker_that_is_killed_frees_its_slots(node: Node, address: str) -> None:
    worker = node.worker(
        ZMQ_WORKER + "lease = client.prepare_store([key('a')], namespace=ns); say(lease.statuses[0]); wait()"
    )
    worker.expect("granted")
    client = node.client()
    assert client.status()["l1"]["bytes_by_state"]["writing"] == 65536
    worker.kill()
    until(lambda: client.status()["deaths"] == 1, "its death, told by its life lock alone")
    assert client.status()["l1"]["used_bytes"] == 0


def test_a_zmq_client_goes_on_with_the_next_server(node: Node, address: str) -> None:
    with Client.connect(address=address) as client:
        assert client.store([node.key("a")], [node.payload(1)], namespace=node.namespace).stored == 1
        node.zmq_server.kill()
        into = [bytearray(65536)]
        assert client.retrieve([node.key("b")], into, namespace=node.namespace).hits == 0
        with pytest.raises(DisconnectedError):
            client.ping()
        node.serve("--zmq.ipc", "true")
        until(lambda: client.store([node.key("b")], [node.payload(2)], namespace=node.namespace).stored, "the next")
        assert client.retrieve([node.key("b")], into, namespace=node.namespace).hits == 1
        assert bytes(into[0]) == node.payload(2)


def test_a_zmq_client_whose_server_is_not_there_costs_its_callers_nothing(tmp_path: Path) -> None:
    space = Namespace("model", Layout("uint8", (64,)))
    with Client.connect(address=f"ipc://{tmp_path}/nobody") as client:
        before = len(list(Path("/proc/self/fd").iterdir()))
        for _ in range(5):
            assert client.lookup([bytes(32)], namespace=space).statuses == [Status.UNREACHABLE]
            time.sleep(0.06)  # past the pause between two attempts
        with pytest.raises(DisconnectedError, match="does not answer"):
            client.ping()
        until(lambda: len(list(Path("/proc/self/fd").iterdir())) <= before + 2, "descriptors given back")


def test_a_child_of_a_zmq_client_connects_by_itself(node: Node, address: str) -> None:
    worker = node.worker(
        ZMQ_WORKER
        + """
say(client.store([key('a')], [b'a' * 65536], namespace=ns).stored)
pid = os.fork()
if pid == 0:
    say(client.store([key('b')], [b'b' * 65536], namespace=ns).stored)
    os._exit(0)
os.waitpid(pid, 0)
into = [bytearray(65536), bytearray(65536)]
say(client.retrieve([key('a'), key('b')], into, namespace=ns).hits, into[1][:1])
wait()
"""
    )
    worker.expect("1")
    worker.expect("1")
    worker.expect("2 bytearray(b'b')")


def test_identities_that_never_say_hello_are_not_kept_and_nobody_is_locked_out(node: Node, address: str) -> None:
    with Client.connect(address=address, maps_pool=False) as client:
        for first in (0, 100, 200):  # more at once than may be unproven would push each other out, unread
            context = zmq.Context()
            for number in range(first, first + 100):
                with context.socket(zmq.DEALER) as dealer:
                    dealer.setsockopt(zmq.LINGER, -1)  # the context ends once all have been sent
                    dealer.setsockopt(zmq.IDENTITY, f"ephemeral {number}".encode())
                    dealer.connect(address)
                    dealer.send(b"nonsense")
            context.term()
            until(lambda least=first + 100: client.status()["counters"].get("garbage", 0) >= least, "all of them")
        assert client.ping(b"x") == b"x"
        assert client.status()["l1"]["sessions"] <= 2


def memory_of(node: Node) -> int:
    """Bytes that the server has of its own: the pool is shared memory."""
    pid = node.client().status()["server"]["pid"]
    (line,) = [each for each in Path(f"/proc/{pid}/status").read_text().splitlines() if each.startswith("RssAnon:")]
    return int(line.split()[1]) << 10


def test_only_keys_that_are_listed_come_in_over_tcp(node: Node, tmp_path: Path) -> None:
    for folder, names in (("curve", ["server"]), ("curve/clients", ["friend"]), ("elsewhere", ["stranger", "other"])):
        (tmp_path / folder).mkdir()
        for name in names:
            zmq.auth.create_certificates(tmp_path / folder, name)
    curve = tmp_path / "curve"
    node.serve(
        "--zmq.tcp",
        "127.0.0.1:0",
        "--zmq.curve_secret_key_file",
        str(curve / "server.key_secret"),
        "--zmq.curve_clients_dir",
        str(curve / "clients"),
    )
    address = node.client().status()["server"]["also_at"][0]
    friend = CurveKeys.from_files(curve / "server.key", curve / "clients/friend.key_secret")
    stranger = CurveKeys.from_files(curve / "server.key", tmp_path / "elsewhere/stranger.key_secret")
    misled = CurveKeys.from_files(tmp_path / "elsewhere/other.key", curve / "clients/friend.key_secret")
    with Client.connect(address=address, curve=friend, maps_pool=False) as client:
        assert client.ping(b"x") == b"x"
    with zmq.Context() as context, ExitStack() as stack:

        def connected(name: bytes) -> zmq.Socket[bytes]:
            dealer = stack.enter_context(context.socket(zmq.DEALER))
            dealer.curve_publickey, dealer.curve_secretkey = zmq.auth.load_certificate(
                curve / "clients/friend.key_secret"
            )
            dealer.curve_serverkey = zmq.auth.load_certificate(curve / "server.key")[0]
            dealer.setsockopt(zmq.ROUTING_ID, name)
            dealer.setsockopt(zmq.RCVTIMEO, int(WAIT_S * 1000))
            dealer.connect(address)
            return dealer

        hello = m.Hello(1, m.PROTOCOL_VERSION_MIN, m.PROTOCOL_VERSION_MAX, bytes(16), "raw", os.getpid(), [])
        descriptors = Path(f"/proc/{node.client().status()['server']['pid']}/fd")
        before = len(list(descriptors.iterdir()))
        with connected(b"one") as leaves:
            leaves.send(encode(hello))
            assert leaves.recv()
        until(lambda: len(list(descriptors.iterdir())) == before, "its descriptor")
        endless = connected(b"two")  # as a rule with the descriptor of the one that has left
        endless.send(b"nonsense")
        until(lambda: node.client().status()["counters"].get("garbage", 0) == 1)
        back, kept = connected(b"one"), memory_of(node)
        endless.send_multipart([bytes(60_000)] * 8_000)  # the library keeps all parts until the last has come
        endless.send(b"nonsense")

        def over() -> bool:
            back.send(encode(m.Ping(2, b"")))
            assert back.recv()
            return node.client().status()["counters"].get("garbage", 0) >= 2  # what followed it

        until(over)
        assert memory_of(node) - kept < 128 << 20
    for keys in (stranger, misled):
        with Client.connect(address=address, curve=keys, maps_pool=False) as client:
            with pytest.raises(DisconnectedError):
                client.ping()
            assert client.lookup([bytes(32)], namespace=node.namespace).statuses == [Status.UNREACHABLE]
    with pytest.raises(UsageError, match="needs CURVE keys"):
        Client.connect(address=address).ping()
    assert node.client().status()["sessions_connected"] >= 1


def test_an_idle_zmq_worker_is_never_reaped(tmp_path: Path) -> None:
    from lmcache_core.limits import SILENT_SESSION_S

    with embedded_server(tmp_path, zmq={"ipc": True}) as server:
        address = server.parts.carriers[0].address
        with Client.connect(address=address) as worker, Client.connect(address=address, maps_pool=False) as asker:
            worker.ping()
            asker.ping()
            swept = threading.Event()

            def much_later() -> None:
                server.parts.sessions.drop_silent(server.parts.clock.now + 2 * SILENT_SESSION_S)
                swept.set()

            server.parts.loop.call(much_later)
            assert swept.wait(WAIT_S)
            assert [session.attached for session in server.parts.sessions] == [True]  # the one that only asks is gone
            worker.ping()
            asker.ping()  # in a session of its own again
            assert len(list(server.parts.sessions)) == 2


def test_a_lookup_beyond_what_may_wait_is_answered_from_the_pool_alone(tmp_path: Path, node: Node) -> None:
    pytest.importorskip("lmcache_fs")
    from lmcache_core.kernel.answers import Reason

    disk = {"type": "fs", "path": str(tmp_path / "disk")}
    keys = [node.key("a"), node.key("nowhere")]
    with embedded_server(tmp_path, l2={"disk": disk}) as server, server.connect() as client:
        until(lambda: client.store(keys[:1], [node.payload(1)], namespace=node.namespace).stored, "the pool")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(server.parts.shares.lookups, "total", 0)
            found = client.lookup(keys, namespace=node.namespace, wait_s=WAIT_S)
        assert found.statuses == [Status.GRANTED, Status.MISS]
        assert (found.hits, found.done, found.reasons[1]) == (1, True, Reason.LATE)
        assert client.status()["lookups_throttled"] == 1
        assert client.lookup(keys, namespace=node.namespace, wait_s=WAIT_S).reasons[1] is Reason.NEVER_STORED
        with pytest.raises(UsageError, match="no_such_tier"):
            client.lookup(keys, namespace=node.namespace, hold=True, tiers=["no_such_tier"])
        assert client.status()["l1"]["leases_by_kind"]["promise"] == 0  # the store to the disk may still read


def test_one_session_cannot_take_all_the_lookups_that_may_wait(start: Callable[..., Server], node: Node) -> None:
    pytest.importorskip("lmcache_mock")
    from lmcache_core.kernel.answers import Reason
    from lmcache_core.limits import LOOKUPS_PER_SESSION_MAX, LOOKUPS_WAITING_MAX

    assert LOOKUPS_PER_SESSION_MAX <= LOOKUPS_WAITING_MAX // 2
    slow = {"type": "mock", "faults": ["exists hang"], "deadline_s": 600}
    server = start(l2={"slow": slow}, drain_s=0.1)
    with server.connect() as greedy, server.connect() as modest:
        ask = lambda client, name: client.lookup_nowait([node.key(name)], namespace=node.namespace, wait_s=WAIT_S)  # noqa: E731
        waiting = [ask(greedy, number) for number in range(LOOKUPS_PER_SESSION_MAX)]
        refused = ask(greedy, "one more").wait(WAIT_S)
        assert (refused.statuses, refused.reasons) == ([Status.MISS], [Reason.LATE])
        other = ask(modest, "mine")
        until(
            # A handle gets on when it is looked at: this is the client's first call, and nobody waits for its link.
            lambda: not other.done and server.parts.lookups.under_way == LOOKUPS_PER_SESSION_MAX + 1,
            "the other session's lookup",
        )
        assert not other.done
        waiting.pop().cancel()
        again = ask(greedy, "and one more")
        modest.noop()
        assert not again.done, "what was given up makes room"
        for handle in (*waiting, other, again):
            handle.cancel()
        until(lambda: not server.parts.lookups.under_way, "their end")


def test_an_eviction_policy_that_fails_costs_stores_and_no_lookups(start: Callable[..., Server], node: Node) -> None:
    server = start(l1={"size_bytes": 16 << 20})
    with server.connect() as client:
        keys = [node.key(number) for number in range(400)]
        payloads = [node.payload(number) for number in range(400)]
        policy: Any = server.parts.kernel.residents.policy

        def broken(nbytes: int) -> list[Any]:
            raise RuntimeError("the policy's own fault")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(policy.inner, "victims", broken)
            statuses = client.store(keys, payloads, namespace=node.namespace).statuses
            there = statuses.count(Status.STORED)
            assert 0 < there < 400
            assert statuses[there:] == [Status.FULL] * (400 - there)
            assert client.lookup(keys, namespace=node.namespace).hits == there
            into = [bytearray(65536) for _ in range(there)]
            assert client.retrieve(keys[:there], into, namespace=node.namespace).hits == there
        status = client.status()
        assert status["l1"]["eviction_policy"] == "lru"
        assert status["l1"]["counters"]["policy_faults"] >= 1
        assert "the policy's own fault" in status["l1"]["policy_error"]
        assert status["counters"].get("internal_errors", 0) == 0
        assert client.store(keys[there:], payloads[there:], namespace=node.namespace).stored == 400 - there
