"""Workers that die, that fork, that come back, that stay silent: nobody reads garbage, nothing leaks."""

from __future__ import annotations

import os
import signal

import pytest

from lmcache_core.client.results import Status
from lmcache_core.kernel.answers import Reason
from lmcache_testing.waiting import until

from ..conftest import Node

STORE_STEPS = {
    "after prepare": "lease = client.prepare_store([key('a'), key('b')], namespace=ns); say('there'); wait()",
    "while writing": (
        "lease = client.prepare_store([key('a'), key('b')], namespace=ns)\n"
        "view = lease.view(0); view[:100] = b'x' * 100; say('there'); wait()"
    ),
    "between commits": (
        "lease = client.prepare_store([key('b'), key('a')], namespace=ns)\n"
        "lease.view(0)[:] = b'b' * 65536; lease.view(1)[:] = b'a' * 65536\n"
        "lease.commit([0]); say('there'); wait()"
    ),
}


@pytest.mark.parametrize("forked", [False, True], ids=["alone", "with a forked child"])
@pytest.mark.parametrize("step", STORE_STEPS, ids=str)
def test_a_dead_writer_frees_its_slots_at_once_and_its_keys_are_absent(node: Node, step: str, forked: bool) -> None:
    node.serve()
    client = node.client()
    fork = "pid = os.fork()\nif pid == 0:\n    time.sleep(600)\nsay(pid)\n" if forked else ""
    worker = node.worker("client.ping()\n" + fork + STORE_STEPS[step])
    child = int(worker.line()) if forked else 0
    worker.expect("there")
    try:
        assert client.status()["l1"]["bytes_by_state"]["writing"] > 0
        worker.kill()
        until(lambda: client.status()["deaths"] == 1, "the death")
        usage = client.status()["l1"]
        assert usage["bytes_by_state"]["writing"] == 0
        assert usage["bytes_by_state"]["quarantined"] == 0
        found = client.lookup([node.key("a")], namespace=node.namespace)
        assert found.hits == 0
        assert found.reasons == [Reason.WRITER_DIED]
        committed = client.lookup([node.key("b")], namespace=node.namespace).hits
        assert committed == (1 if step == "between commits" else 0)
        assert usage["used_bytes"] == 65536 * committed
    finally:
        if child:
            os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("forked", [False, True], ids=["alone", "with a forked child"])
def test_a_dead_reader_releases_its_pins_at_once(node: Node, forked: bool) -> None:
    node.serve()
    client = node.client()
    client.store([node.key("a")], [node.payload(1)], namespace=node.namespace)
    fork = "pid = os.fork()\nif pid == 0:\n    time.sleep(600)\nsay(pid)\n" if forked else ""
    worker = node.worker(
        "client.ping()\n" + fork + "lease = client.prepare_retrieve([key('a')], namespace=ns); say('there'); wait()"
    )
    child = int(worker.line()) if forked else 0
    worker.expect("there")
    try:
        assert client.status()["l1"]["leases_by_kind"]["read"] == 1
        worker.kill()
        until(lambda: client.status()["l1"]["leases_by_kind"]["read"] == 0, "the pins")
        assert client.lookup([node.key("a")], namespace=node.namespace).hits == 1
    finally:
        if child:
            os.kill(child, signal.SIGKILL)


def test_a_forked_child_connects_by_itself_and_cannot_touch_the_parents_lease(node: Node) -> None:
    node.serve()
    worker = node.worker("""
lease = client.prepare_store([key('a')], namespace=ns)
pid = os.fork()
if pid == 0:
    try:
        lease.view(0)
        say('the child got a view')
    except Exception as error:
        say(type(error).__name__)
    say(client.store([key('c')], [b'c' * 65536], namespace=ns).statuses[0])
    os._exit(0)
os.waitpid(pid, 0)
lease.view(0)[:] = b'p' * 65536
say(lease.commit()[0])
wait()
""")
    assert worker.line() in {"PoolError", "LeaseExpiredError"}
    worker.expect("stored")
    worker.expect("stored")
    assert node.client().lookup([node.key("a"), node.key("c")], namespace=node.namespace).hits == 2


def test_a_client_that_reconnects_keeps_the_lease_its_other_thread_still_writes(node: Node) -> None:
    node.serve()
    worker = node.worker("""
lease = client.prepare_store([key('a')], namespace=ns)
view = lease.view(0)
view[:32768] = b'1' * 32768
connection = client.links.current().channel.connection
import socket
socket.socket(fileno=os.dup(connection.fileno())).shutdown(socket.SHUT_RDWR)  # the line drops under the writer
from lmcache_core.errors import DisconnectedError
try:
    client.ping()
except DisconnectedError:  # it depends on the time since the last call whether the end was seen before this one
    client.ping()
say('back')
wait()
view[32768:] = b'2' * 32768
say(lease.commit()[0])
wait()
""")
    worker.expect("back")
    client = node.client()
    other = client.store([node.key("a")], [node.payload(9)], namespace=node.namespace)
    assert other.statuses == [Status.BUSY]  # the lease lives on, so nobody else gets the key
    assert client.status()["l1"]["bytes_by_state"]["writing"] == 65536
    worker.go()
    worker.expect("stored")
    into = [bytearray(65536)]
    assert client.retrieve([node.key("a")], into, namespace=node.namespace).hits == 1
    assert bytes(into[0]) == b"1" * 32768 + b"2" * 32768


def test_a_reconnected_client_answers_for_what_it_does_not_declare(node: Node) -> None:
    node.serve()
    worker = node.worker("""
lease = client.prepare_store([key('a')], namespace=ns)
for holding in client.links.occupancy.holdings:
    client.links.occupancy.ended(holding)  # as after an operation whose copies have ended
connection = client.links.current().channel.connection
import socket; socket.socket(fileno=os.dup(connection.fileno())).shutdown(socket.SHUT_RDWR)
from lmcache_core.errors import DisconnectedError
try:
    client.ping()
except DisconnectedError:  # it depends on the time since the last call whether the end was seen before this one
    client.ping()
say('back')
wait()
""")
    worker.expect("back")
    usage = node.client().status()["l1"]
    assert usage["used_bytes"] == 0
    assert usage["sessions_lost"] == 0


def test_a_silent_writer_loses_its_key_but_not_its_slot_until_it_answers(node: Node) -> None:
    node.serve("--lease.write_ttl_s", "0.3")
    client = node.client()
    worker = node.worker("""
from lmcache_core.errors import LeaseExpiredError
lease = client.prepare_store([key('a')], namespace=ns)
view = lease.view(0)
view[:] = b'1' * 65536
say('there')
wait()
view[:] = b'!' * 65536  # it still may write, and nobody else has this memory
try:
    lease.commit()
    say('committed')
except LeaseExpiredError:
    say('expired')
wait()
""")
    worker.expect("there")
    until(lambda: client.status()["l1"]["bytes_by_state"]["quarantined"] == 65536, "quarantine")
    assert client.status()["l1"]["quarantine_by_session"]
    stored = client.store([node.key("a")], [node.payload(2)], namespace=node.namespace)
    assert stored.statuses == [Status.STORED]
    worker.go()
    worker.expect("expired")
    until(lambda: client.status()["l1"]["bytes_by_state"]["quarantined"] == 0, "the answer")
    into = [bytearray(65536)]
    assert client.retrieve([node.key("a")], into, namespace=node.namespace).hits == 1
    assert bytes(into[0]) == node.payload(2)


def test_a_stopped_writer_holds_only_its_quarantine_and_frees_it_when_it_dies(node: Node) -> None:
    node.serve("--lease.write_ttl_s", "0.3")
    client = node.client()
    worker = node.worker("lease = client.prepare_store([key('a')], namespace=ns); say('there'); wait()")
    worker.expect("there")
    worker.signal(signal.SIGSTOP)
    until(lambda: client.status()["l1"]["bytes_by_state"]["quarantined"] == 65536, "quarantine")
    assert client.status()["deaths"] == 0  # silence is no death
    worker.kill()
    until(lambda: client.status()["l1"]["used_bytes"] == 0, "its death")


def test_a_reader_past_its_ttl_still_reads_what_it_was_given(node: Node) -> None:
    node.serve("--lease.read_ttl_s", "0.2")
    client = node.client()
    client.store([node.key("a")], [node.payload(1)], namespace=node.namespace)
    with client.prepare_retrieve([node.key("a")], namespace=node.namespace) as lease:
        view = lease.view(0)
        until(lambda: client.lease_status(lease.id).state == "expired", "the expiry")
        many = [node.key(i) for i in range(400)]  # more than the pool holds: everything else is evicted
        client.store(many, [node.payload(i) for i in range(400)], namespace=node.namespace)
        assert view == node.payload(1)
        assert client.lookup([node.key("a")], namespace=node.namespace).hits == 1
    until(lambda: client.status()["l1"]["leases_by_kind"]["read"] == 0, "the late finish")


def test_clear_under_a_reader_leaves_its_bytes_alone(node: Node) -> None:
    node.serve()
    client = node.client()
    client.store([node.key("a")], [node.payload(1)], namespace=node.namespace)
    with client.prepare_retrieve([node.key("a")], namespace=node.namespace) as lease:
        view = lease.view(0)
        assert client.clear().objects == 1
        assert client.lookup([node.key("a")], namespace=node.namespace).hits == 0
        many = [node.key(i) for i in range(400)]
        client.store(many, [node.payload(i + 5) for i in range(400)], namespace=node.namespace)
        assert view == node.payload(1)
    assert client.status()["l1"]["bytes_by_state"]["doomed"] == 0


def test_a_worker_that_writes_to_what_it_reads_dies_and_harms_nobody(node: Node) -> None:
    pytest.importorskip("torch")
    node.serve()
    client = node.client()
    client.store([node.key("a")], [node.payload(1)], namespace=node.namespace)
    worker = node.worker("""
lease = client.prepare_retrieve([key('a')], namespace=ns)
tensor = lease.tensor(0)
say(int(tensor[0]))
wait()
tensor.fill_(0)
say('written')
""")
    before = bytes(node.payload(1))
    worker.expect(str(before[0]))
    worker.go()
    assert worker.popen.wait(60) == -signal.SIGSEGV
    into = [bytearray(65536)]
    assert client.retrieve([node.key("a")], into, namespace=node.namespace).hits == 1
    assert bytes(into[0]) == before
    until(lambda: client.status()["l1"]["leases_by_kind"]["read"] == 0, "the pins")
