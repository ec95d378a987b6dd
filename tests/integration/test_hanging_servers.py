"""A server that hangs, goes, or comes back costs a client nothing that it need not."""

from __future__ import annotations

import gc
import logging
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lmcache_core.client.client import Client
from lmcache_core.client.link import reconnecting
from lmcache_core.client.link.link_states import LinkState
from lmcache_core.client.promises import Promise
from lmcache_core.client.results import Status
from lmcache_core.errors import DisconnectedError, LeaseExpiredError, UsageError
from lmcache_core.limits import LINK_RETRY_S
from lmcache_core.native import native
from lmcache_core.server.server import Server
from lmcache_testing.waiting import WAIT_S, until

from ..conftest import MovedClock, Node

needs_index = pytest.mark.skipif(native is None, reason="the index is read by the C extension alone")


@contextmanager
def stopped(server: Server) -> Iterator[None]:
    server.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        server.signal(signal.SIGCONT)


class Waits:
    """What a client waits in: every poll of its connections that may take time, and for how long."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from lmcache_core.client.link import connection
        from lmcache_core.client.link.handshake import Handshake

        self.seconds: list[float] = []
        kind = connection.LifelineConnection
        for name in ("poll", "receive", "send"):
            monkeypatch.setattr(kind, name, self._noted(getattr(kind, name)))
        monkeypatch.setattr(Handshake, "wait", self._noted(Handshake.wait))

    def _noted(self, method: Callable[..., Any]) -> Callable[..., object]:
        def noted(this: object, *arguments: Any) -> object:
            began_s = time.monotonic()
            try:
                return method(this, *arguments)
            finally:
                may = arguments[-1] - began_s
                if may > 0:
                    self.seconds.append(may)

        return noted


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Waits:
    return Waits(monkeypatch)


def fill(node: Node, client: Client, count: int = 4) -> list[bytes]:
    keys = [node.key(number) for number in range(count)]
    assert (
        client.store(keys, [node.payload(number) for number in range(count)], namespace=node.namespace).stored == count
    )
    return keys


def store(node: Node, client: Client, number: int) -> Status:
    return client.store([node.key(number)], [node.payload(number)], namespace=node.namespace).statuses[0]


def hits(node: Node, client: Client, keys: list[bytes]) -> int:
    into = [bytearray(node.namespace.layout.nbytes) for _ in keys]
    found = client.retrieve(keys, into, namespace=node.namespace).hits
    assert found == client.lookup(keys, namespace=node.namespace).hits
    return found


# --- a server that hangs --------------------------------------------------------------------------------------


@needs_index
def test_index_hits_never_wait_for_a_server_that_hangs(
    node: Node, waits: Waits, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reconnecting, "LINK_LOOK_S", 0.0)  # every hit looks at the connection
    server = node.serve()
    client = node.client(call_timeout_s=0.05)
    keys = fill(node, client)
    with stopped(server):
        assert store(node, client, 99) is Status.UNREACHABLE
        del waits.seconds[:]
        for _ in range(3):
            assert hits(node, client, keys) == 4
        assert waits.seconds == []
    until(lambda: store(node, client, 99) in (Status.STORED, Status.EXISTS), "the server that goes on")


@needs_index
def test_index_hits_never_wait_while_a_link_is_made(node: Node, waits: Waits, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that was killed, and one in its place that accepts and never answers."""
    monkeypatch.setattr(reconnecting, "LINK_LOOK_S", 0.0)  # every hit looks at the connection
    server = node.serve()
    client = node.client()
    keys = fill(node, client)
    server.kill()
    path = node.run / node.name / "lifeline"
    path.unlink()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as mute:
        mute.bind(str(path))
        mute.listen(8)
        del waits.seconds[:]

        def greeting() -> bool:
            assert hits(node, client, keys) == 4
            making = client.links.making
            return making is not None and making.channel.state is LinkState.GREETING

        until(greeting, "the hello")
        assert waits.seconds == []
        assert store(node, client, 50) is Status.UNREACHABLE
        assert max(waits.seconds) <= 0.02 + 0.001
        del waits.seconds[:]
        for number in range(50, 60):  # the next wait is `wait_s` later
            assert store(node, client, number) is Status.UNREACHABLE
        assert sum(waits.seconds) <= 0.021 * (1 + 10)


def test_a_full_backlog_is_tried_again_and_waited_for_by_nobody(node: Node) -> None:
    directory = node.run / node.name
    directory.mkdir(parents=True)
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as full,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as first,
    ):
        full.bind(str(directory / "lifeline"))
        full.listen(0)
        first.connect(str(directory / "lifeline"))
        client = node.client(connect_timeout_s=0.05)
        assert store(node, client, 1) is Status.UNREACHABLE
        making = client.links.making
        assert making is not None
        assert making.channel.state is LinkState.CONNECTING
        full.accept()[0].close()
        assert store(node, client, 1) is Status.UNREACHABLE
        assert making.channel.state is LinkState.GREETING


def test_after_a_call_that_met_a_hang_the_others_answer_at_once_until_the_server_does(node: Node, waits: Waits) -> None:
    server = node.serve()
    client = node.client(call_timeout_s=0.05, use_index=False)
    keys = fill(node, client)
    with stopped(server):
        assert store(node, client, 99) is Status.UNREACHABLE
        link = client.links.current()
        del waits.seconds[:]
        for _ in range(10):
            assert store(node, client, 99) is Status.UNREACHABLE
            assert client.lookup(keys, namespace=node.namespace).statuses == [Status.UNREACHABLE] * 4
            assert client.lookup(keys, namespace=node.namespace, hold=True).promise is None
            with pytest.raises(DisconnectedError, match="silent"):
                client.status()
            with client.prepare_retrieve(keys, namespace=node.namespace) as lease:
                assert lease.statuses == [Status.UNREACHABLE] * 4
        assert waits.seconds == []
    until(lambda: client.lookup(keys, namespace=node.namespace).hits == 4, "the server that goes on")
    assert client.links.current() is link, "silence was no end of the connection"
    leases = client.status()["l1"]["leases_by_kind"]
    assert leases["promise"] == leases["read"] == 0


def test_a_call_waits_for_its_own_time_out_and_no_longer(node: Node, waits: Waits) -> None:
    server = node.serve()
    client = node.client(call_timeout_s=0.25)
    fill(node, client)
    with stopped(server):
        del waits.seconds[:]
        assert store(node, client, 99) is Status.UNREACHABLE
        assert 0.2 < max(waits.seconds) <= 0.25


def test_nothing_about_a_handle_waits_but_its_wait(node: Node, waits: Waits) -> None:
    server = node.serve()
    client, other = node.client(use_index=False), node.client(use_index=False, call_timeout_s=0.05)
    keys = fill(node, client)
    with stopped(server):
        del waits.seconds[:]
        handle = client.lookup_nowait(keys, namespace=node.namespace, hold=True)
        given_up = client.lookup_nowait(keys, namespace=node.namespace, hold=True)
        assert not handle.done
        given_up.cancel()
        assert waits.seconds == []
        assert handle.wait(0.05) is None
        assert handle.wait(0.0) is None
        fresh = other.lookup_nowait(keys, namespace=node.namespace)
        fresh.cancel()
    found = handle.wait(WAIT_S)
    assert found is not None
    assert found.hits == 4, "the session that waited is the one that is answered"
    assert client.free_lookup_locks(found.promise) == 1
    until(lambda: not client.status()["l1"]["leases_by_kind"]["promise"], "the cancelled one's promise")


def test_a_first_contact_waits_as_long_as_it_was_told_and_later_calls_do_not(node: Node, waits: Waits) -> None:
    server = node.serve()
    with stopped(server):
        client = node.client(connect_timeout_s=0.25, wait_s=1000.0)
        del waits.seconds[:]
        assert store(node, client, 1) is Status.UNREACHABLE
        assert 0.0 < max(waits.seconds) <= 0.25
        assert store(node, client, 1) is Status.UNREACHABLE
        del waits.seconds[:]
        for _ in range(10):
            assert store(node, client, 1) is Status.UNREACHABLE
        assert waits.seconds == []
        with pytest.raises(DisconnectedError, match="not answered"):
            client.status()
    until(lambda: store(node, client, 1) in (Status.STORED, Status.EXISTS), "the server that goes on")


def test_what_was_let_go_of_while_the_server_hung_is_let_go_of_when_it_goes_on(node: Node) -> None:
    server = node.serve()
    client, watcher = node.client(call_timeout_s=0.05), node.client()
    keys = fill(node, client)
    reading = client.prepare_retrieve(keys, namespace=node.namespace)
    writing = client.prepare_store([node.key("new")], namespace=node.namespace)
    with stopped(server):
        with pytest.raises(DisconnectedError):
            writing.abort()  # waits its time, and so is the hang
        with pytest.raises(DisconnectedError):
            reading.renew()
        reading.finish()  # the index says that it stands
        assert reading.statuses == [Status.HIT] * 4
    until(
        lambda: not any(watcher.status()["l1"]["leases_by_kind"].values()),
        "what nobody waited for any more",
    )


# --- a server that goes, and comes back -----------------------------------------------------------------------


@needs_index
def test_hits_go_on_by_the_new_servers_word_before_there_is_a_link_to_it(node: Node) -> None:
    server, clock = node.serve(), MovedClock()
    client = node.client(clock=clock)
    keys = fill(node, client)
    server.kill()
    clock.stop()
    assert hits(node, client, keys) == 4, "now it has looked at its connection, and does so no more: no link is made"
    second = node.serve()
    second.signal(signal.SIGSTOP)  # it has adopted the pool, and answers nobody
    try:
        assert hits(node, client, keys) == 4
    finally:
        second.kill()
    assert hits(node, client, keys) == 4, "nor does it matter that this one died, too"
    node.serve()
    assert hits(node, client, keys) == 4
    clock.go_on()
    until(lambda: store(node, client, 99) in (Status.STORED, Status.EXISTS), "the third server")
    assert hits(node, client, keys) == 4


@needs_index
def test_a_new_serving_word_ends_the_pause_between_attempts(node: Node) -> None:
    server, clock = node.serve(), MovedClock()
    client = node.client(clock=clock)
    fill(node, client)
    server.kill()
    clock.stop()  # the pause has no end; on a busy machine one call may be too short for an attempt
    until(lambda: store(node, client, 99) is Status.UNREACHABLE and client.why_unreachable, "a vain attempt")
    node.serve()
    until(lambda: store(node, client, 99) in (Status.STORED, Status.EXISTS), "the attempt that no pause allows")


def test_the_pause_between_attempts_at_a_local_server_does_not_grow(node: Node) -> None:
    clock = MovedClock()
    client = node.client(clock=clock)
    clock.stop()
    for _ in range(10):
        assert store(node, client, 1) is Status.UNREACHABLE
        clock.jump(LINK_RETRY_S)
    assert store(node, client, 1) is Status.UNREACHABLE
    node.serve()
    assert store(node, client, 1) is Status.UNREACHABLE, "it pauses"
    clock.jump(LINK_RETRY_S)
    until(lambda: store(node, client, 1) in (Status.STORED, Status.EXISTS), "the next attempt")


def test_stores_come_back_with_the_server(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconnecting, "LINK_RETRY_S", 0.0)
    server = node.serve()
    client = node.client()
    fill(node, client)
    server.kill()
    for _ in range(5):
        assert store(node, client, 99) is Status.UNREACHABLE
    node.serve()
    until(lambda: store(node, client, 99) in (Status.STORED, Status.EXISTS), "the next server")


# --- words ----------------------------------------------------------------------------------------------------


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "lmcache_core.client"]


def test_the_log_says_once_that_the_server_cannot_be_reached_and_once_that_it_can_again(
    node: Node, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "lmcache_core.client")
    monkeypatch.setattr(reconnecting, "LINK_RETRY_S", 0.0)
    client = node.client(call_timeout_s=0.05)
    assert client.why_unreachable == ""
    for number in range(5):
        assert store(node, client, number) is Status.UNREACHABLE
    assert len(lines(caplog)) == 1
    assert "cannot reach the lmcache-core server" in lines(caplog)[0]
    assert "start one with `lmcache-core serve" in lines(caplog)[0]
    assert "start one with `lmcache-core serve" in client.why_unreachable
    server = node.serve()
    until(lambda: store(node, client, 1) in (Status.STORED, Status.EXISTS), "the server")
    assert len(lines(caplog)) == 2
    assert "is reachable again" in lines(caplog)[1]
    assert client.why_unreachable == ""
    with stopped(server):
        for number in range(5):
            assert store(node, client, 10 + number) is Status.UNREACHABLE
    assert len(lines(caplog)) == 3
    assert "stopped" in lines(caplog)[2]
    until(lambda: store(node, client, 2) in (Status.STORED, Status.EXISTS), "the server that goes on")
    assert len(lines(caplog)) == 4


def test_a_client_without_a_server_says_so_where_no_log_is_set_up(node: Node) -> None:
    worker = node.worker("""
import contextlib
sys.stderr = sys.stdout
client.store([key(1)], [bytes(65536)], namespace=ns)
say('stored nothing')
wait()
""")
    assert "cannot reach the lmcache-core server" in worker.line()
    worker.expect("stored nothing")


# --- only misuse raises ---------------------------------------------------------------------------------------


def test_a_process_without_descriptors_gets_statuses_and_a_reason(node: Node) -> None:
    node.serve()
    worker = node.worker("""
import resource
soft = len(os.listdir('/proc/self/fd'))
keys = [key(number) for number in range(4)]
outcomes = set()
for more in range(0, 9):
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft + more, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    one = Client.connect(sys.argv[1], runtime_dir=sys.argv[2])
    outcomes |= set(one.store(keys, [bytes(65536)] * 4, namespace=ns).statuses)
    outcomes |= set(one.lookup(keys, namespace=ns, hold=True).statuses)
    outcomes |= set(one.retrieve(keys, [bytearray(65536) for _ in range(4)], namespace=ns).statuses)
    why = one.why_unreachable
    one.close()
    if not why:
        break
    assert 'ulimit -n' in why, why
say(sorted(str(status) for status in outcomes))
wait()
""")
    assert "unreachable" in worker.line()


def test_a_process_without_descriptors_is_not_ended_by_a_client_over_zmq(node: Node) -> None:
    """libzmq aborts where it runs out of them half way."""
    node.serve("--zmq.ipc", "true")
    worker = node.worker("""
import resource, zmq, zmq.utils.monitor
address = f'ipc://{sys.argv[2]}/{sys.argv[1]}/zmq'
soft, hard = len(os.listdir('/proc/self/fd')), resource.getrlimit(resource.RLIMIT_NOFILE)[1]
for more in range(0, 40):
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft + more, hard))
    with Client.connect(address=address, maps_pool=False) as one:
        status = one.lookup([key(0)], namespace=ns).statuses[0]
    if status != 'unreachable':
        break
    assert 'open files' in one.why_unreachable, one.why_unreachable
say(status, more > 3)
wait()
""")
    worker.expect("miss True")


def test_a_newer_server_in_the_middle_of_a_retrieve_is_a_status(
    node: Node, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from lmcache_core.errors import VersionError
    from lmcache_core.protocol import messages as m

    server = node.serve()
    client = node.client(use_index=False)
    keys = fill(node, client)
    server.kill()
    node.serve()
    monkeypatch.setattr(m, "PROTOCOL_VERSION_MIN", 98)
    monkeypatch.setattr(m, "PROTOCOL_VERSION_MAX", 99)
    into = [bytearray(node.namespace.layout.nbytes) for _ in keys]
    until(lambda: "98" in (client.retrieve(keys, into, namespace=node.namespace) and client.why_unreachable), "refusal")
    assert client.retrieve(keys, into, namespace=node.namespace).statuses == [Status.UNREACHABLE] * 4
    assert len(lines(caplog)) == 1
    with pytest.raises(VersionError):
        client.status()


# --- promises without a server --------------------------------------------------------------------------------


@needs_index
def test_a_lookup_that_holds_if_it_can_answers_by_the_index_where_it_cannot(node: Node) -> None:
    server = node.serve()
    client = node.client()
    keys = fill(node, client)
    held = client.lookup(keys, namespace=node.namespace, hold="if_possible")
    assert held.promise
    assert client.free_lookup_locks(held.promise) == 1
    server.kill()
    assert client.lookup(keys, namespace=node.namespace, hold=True).statuses == [Status.UNREACHABLE] * 4
    found = client.lookup([*keys, node.key("no")], namespace=node.namespace, hold="if_possible")
    assert found.statuses == [Status.GRANTED] * 4 + [Status.UNREACHABLE]
    assert found.promise is None
    handle = client.lookup_nowait([*keys, node.key("no")], namespace=node.namespace, hold="if_possible")
    assert handle.result is not None
    assert handle.result.statuses == found.statuses
    assert handle.result.hits == 4


# --- views without a server -----------------------------------------------------------------------------------


@needs_index
def test_an_optimistic_lease_gives_views_without_a_call_while_the_server_is_stopped_or_gone(
    node: Node, waits: Waits
) -> None:
    server = node.serve()
    client = node.client()
    keys = fill(node, client)

    def views() -> list[Status]:
        lease = client.prepare_retrieve([*keys, node.key("no")], namespace=node.namespace, optimistic=True)
        assert lease.hits == 4
        assert [bytes(lease.view(at)) for at in range(4)] == [node.payload(at) for at in range(4)]
        return list(lease.finish())

    wanted = [Status.HIT] * 4 + [Status.MISS]
    assert views() == wanted
    with stopped(server):
        del waits.seconds[:]
        assert views() == wanted
        assert waits.seconds == []
    assert client.status()["l1"]["leases_by_kind"]["read"] == 0
    server.kill()
    assert client.prepare_retrieve(keys, namespace=node.namespace).statuses == [Status.UNREACHABLE] * 4
    assert views() == wanted
    node.serve()
    assert views() == wanted


@needs_index
def test_an_optimistic_lease_tells_what_left_while_it_was_read(node: Node) -> None:
    node.serve()
    client, other = node.client(), node.client()
    keys = fill(node, client)
    lease = client.prepare_retrieve(keys, namespace=node.namespace, optimistic=True)
    assert lease.finish([0]) == [Status.HIT] + [Status.GRANTED] * 3
    other.clear(node.namespace)
    other.store(keys[1:2], [node.payload(77)], namespace=node.namespace)
    assert lease.finish() == [Status.HIT] + [Status.MISS] * 3
    fill(node, other)
    held = client.prepare_retrieve(keys, namespace=node.namespace, optimistic=True)
    assert bytes(held.view(0)[:1]) == node.payload(0)[:1]
    other.clear(node.namespace)
    with pytest.raises(LeaseExpiredError, match="left the pool"):
        held.__exit__(None, None, None)
    assert held.statuses == [Status.MISS] * 4


@needs_index
def test_an_optimistic_lease_that_is_dropped_tells_the_server_nothing(node: Node) -> None:
    node.serve()
    client = node.client()
    keys = fill(node, client)
    lease = client.prepare_retrieve(keys, namespace=node.namespace, optimistic=True)
    view = lease.view(0)
    del lease, view
    gc.collect()
    client.noop()
    assert not any(name.startswith("error") for name in client.status()["counters"])


def test_an_optimistic_lease_is_one_like_any_other_where_there_is_no_index(node: Node) -> None:
    node.serve()
    client = node.client(use_index=False)
    keys = fill(node, client)
    with client.prepare_retrieve(keys, namespace=node.namespace, optimistic=True) as lease:
        assert client.status()["l1"]["leases_by_kind"]["read"] == 1
        assert bytes(lease.view(0)) == node.payload(0)
    assert lease.statuses == [Status.HIT] * 4
    with pytest.raises(UsageError, match="a promise"):
        client.prepare_retrieve(
            keys, namespace=node.namespace, optimistic=True, promise=Promise((7,) * len(keys), tuple(keys), 0.0)
        )


# --- threads --------------------------------------------------------------------------------------------------


def test_many_threads_meet_one_hang_and_all_go_on(node: Node) -> None:
    server = node.serve()
    client = node.client(call_timeout_s=0.2, use_index=False)
    keys = fill(node, client)
    outcomes: list[list[Status]] = []

    def ask() -> None:
        outcomes.append(list(client.lookup(keys, namespace=node.namespace).statuses))

    with stopped(server):
        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
    assert outcomes == [[Status.UNREACHABLE] * 4] * 8
    until(lambda: client.lookup(keys, namespace=node.namespace).hits == 4, "the server that goes on")


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_nothing_is_left_of_attempts_that_found_nobody(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconnecting, "LINK_RETRY_S", 0.0)
    client = node.client()
    store(node, client, 1)
    gc.collect()
    before = descriptors()
    for _ in range(50):
        store(node, client, 1)
    assert descriptors() == before
