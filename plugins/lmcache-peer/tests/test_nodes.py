"""Real servers beside each other, each with its helper: what one has is a hit on the others, whatever happens."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lmcache_core import Namespace
from lmcache_testing.processes import ServerProcess
from lmcache_testing.proxy import StallingProxy
from lmcache_testing.waiting import WAIT_S, until

from .conftest import NAMESPACE, StartNode, TestNode, content, free_port, key


def _two(node: StartNode, *objects: int, **tier: object) -> tuple[TestNode, TestNode]:
    """a, which has these objects, and b, which loads from it."""
    port = free_port()
    a = node("a", serve={"port": port})
    b = node("b", tier={"nodes": [f"127.0.0.1:{port}"], **tier})
    a.store(*objects)
    b.sees("a", len(objects))
    return a, b


@contextmanager
def _stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_what_one_node_stored_is_a_hit_on_another(node: StartNode) -> None:
    a, b = _two(node, 1, 2, 3)
    assert b.load(1, 2, 3, 4) == [1, 2, 3]
    assert b.peer("a")["loaded"] == 3
    assert b.tier["stores"] is False
    until(lambda: a.serving.get("read") == 3 and a.serving["locked_objects"] == 0, "figures of what was served")
    assert a.held == 0


def test_explain_names_the_node_that_has_a_key(node: StartNode) -> None:
    _, b = _two(node, 1)
    (there, absent) = b.client.explain([key(1), key(2)], namespace=NAMESPACE)
    assert (there.where, there.why) == (("peers",), "there: peers (on node a)")
    assert there.tiers[0].why == "has it on node a"
    assert not absent.hit


def test_a_lookup_of_what_nobody_has_asks_nobody(node: StartNode) -> None:
    _, b = _two(node, 1)
    assert b.load(*range(100, 150)) == []
    assert b.peer("a")["lookups"] == b.peer("a")["false_hits"], "only false hits of the filter cost a question"


def test_what_the_owner_evicted_is_a_miss(node: StartNode) -> None:
    a, b = _two(node, 1, 2)
    a.drop(1)
    assert b.load(1, 2) == [2]


def test_another_object_under_the_same_key_is_loaded_as_it_is_now(node: StartNode) -> None:
    a, b = _two(node, 1, 2)
    a.drop(1)
    a.client.store([key(1)], [content(7)], namespace=NAMESPACE)
    assert b.load(2) == [2]
    target = content(0)
    b.client.lookup([key(1)], namespace=NAMESPACE, wait_s=10.0)
    assert b.client.retrieve([key(1)], [target], namespace=NAMESPACE).statuses[0].name == "HIT"
    assert target.equal(content(7))


def test_three_nodes_find_each_others_objects(node: StartNode) -> None:
    ports = {name: free_port() for name in "abc"}
    nodes = {}
    for name, port in ports.items():
        others = [f"127.0.0.1:{other}" for other in ports.values()]
        nodes[name] = node(name, serve={"port": port}, tier={"nodes": others})
    for number, each in enumerate(nodes.values()):
        each.store(10 + number)
    for each in nodes.values():
        for other in set(nodes) - {each.name}:
            each.sees(other, 1)
        others = set(nodes) - {each.name}  # a node knows its own address once it has answered
        until(lambda each=each, others=others: set(each.tier["adapter"]["parts"]) == others, "nobody asks itself")
    assert nodes["a"].load(11, 12) == [11, 12]
    assert nodes["b"].load(10, 12) == [10, 12]
    nodes["c"].sees("a", 3)
    assert nodes["c"].load(10, 11) == [10, 11]


def test_a_cleared_namespace_does_not_come_back_from_another_node(node: StartNode) -> None:
    _, b = _two(node, 1, 2)
    assert b.load(1) == [1]
    b.client.clear(NAMESPACE, tiers=True)
    assert b.load(1, 2) == []


def test_a_paused_peer_costs_its_patience_once_and_serves_again_unaided(node: StartNode) -> None:
    port, other = free_port(), free_port()
    a, c = node("a", serve={"port": port}), node("c", serve={"port": other})
    b = node("b", tier={"nodes": [f"127.0.0.1:{port}", f"127.0.0.1:{other}"], "patience_s": 0.3})
    a.store(1, 2, 3)
    c.store(3, 4)
    b.sees("a", 3)
    b.sees("c", 2)
    with _stopped(a.helper):
        assert b.load(1, 3, 4) == [3, 4], "the others go on"
        until(lambda: not b.peer("a")["usable"], "its breaker")
        late = b.peer("a")["late"]
        assert b.load(2) == []
        assert b.peer("a")["late"] - late <= 2, "nobody but probes asks it"
        assert b.tier["reads"]["breaker"] == "closed"
    until(lambda: b.peer("a")["usable"], "a probe that succeeds")
    assert b.load(1, 2) == [1, 2]


class _Owner(ServerProcess):
    """A server that can be stopped, with its helper."""

    def __init__(self, port: int) -> None:
        super().__init__(32 << 20)
        self._port = port

    def _command(self) -> list[str]:
        return [*super()._command(), "--peer.port", str(self._port), "--peer.node", "a"]


def test_a_node_whose_server_hangs_passes_no_probe_though_its_helper_lives(node: StartNode) -> None:
    port = free_port()
    with _Owner(port) as owner, owner.client() as client:
        client.store([key(1), key(2)], [content(1), content(2)], namespace=NAMESPACE)
        b = node("b", tier={"nodes": [f"127.0.0.1:{port}"], "patience_s": 0.3})
        b.sees("a", 2)
        with _stopped(owner.pid):
            assert b.load(1) == []
            until(lambda: b.peer("a")["late"] + b.peer("a")["failed"] >= 4, "probes that fail")
            assert not b.peer("a")["usable"]
        until(lambda: b.peer("a")["usable"], "a probe that succeeds")
        assert b.load(1, 2) == [1, 2]


def test_a_killed_helper_is_started_again_and_serves(node: StartNode) -> None:
    a, b = _two(node, 1, 2, 3)
    assert b.load(1) == [1]
    pid = a.helper
    os.kill(pid, signal.SIGKILL)
    until(lambda: a.client.status()["helpers"]["peer"]["pid"] not in (None, pid), "another helper")
    until(lambda: b.peer("a")["usable"] and b.load(2) == [2], "the new one serves")
    until(lambda: a.held == 0, "nothing stays of the dead one's leases")


@pytest.mark.parametrize("trouble", ["hang", "stall", "outage"])
def test_a_connection_in_trouble_is_a_miss_in_time_and_passes(node: StartNode, trouble: str) -> None:
    port = free_port()
    a = node("a", serve={"port": port})
    with StallingProxy("127.0.0.1", port) as proxy:
        b = node("b", tier={"nodes": [f"127.0.0.1:{proxy.port}"], "patience_s": 0.3})
        a.store(1, 2)
        b.sees("a", 2)
        with getattr(proxy, trouble)():
            assert b.load(1) == []
            until(lambda: not b.peer("a")["usable"], "its breaker")
        until(lambda: b.peer("a")["usable"], "it is back")
        assert b.load(1, 2) == [1, 2]


def test_a_reader_is_free_at_once_when_its_peer_dies_in_the_middle_of_a_transfer(node: StartNode) -> None:
    """The object is larger than what the sockets on its way hold: the helper is still sending when it is killed."""
    port = free_port()
    a = node("a", serve={"port": port}, l1={"size_bytes": 96 << 20})
    large = Namespace("large", type(NAMESPACE.layout)("uint8", (16 << 20,)))
    import torch

    a.client.store([key(1)], [torch.ones(16 << 20, dtype=torch.uint8)], namespace=large)
    with _MiddleMan(port, passes=4 << 20) as man:
        # Its patience and its deadline are far away: only the end of the connection can free it.
        b = node("b", tier={"nodes": [f"127.0.0.1:{man.port}"], "patience_s": 30.0}, l1={"size_bytes": 96 << 20})
        b.sees("a", 1)
        done = threading.Event()

        def load() -> None:
            b.client.lookup([key(1)], namespace=large, wait_s=60.0)
            done.set()

        thread = threading.Thread(target=load)
        thread.start()
        assert man.halfway.wait(30)
        assert not done.is_set()
        os.kill(a.helper, signal.SIGKILL)
        man.goes_on.set()
        thread.join(30)
        assert done.is_set()
        assert b.client.lookup([key(1)], namespace=large, wait_s=0.0).hits == 0
    until(lambda: a.held == 0, "the dead helper's lease to end")


class _MiddleMan:
    """Passes so many bytes of answers on, the rest once it may, and takes nobody else from then on."""

    def __init__(self, port: int, passes: int) -> None:
        self._target, self._passes = port, passes
        self.halfway, self.goes_on = threading.Event(), threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._socks = [self._listener]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.socket()
            far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)  # else it takes megabytes before they are read
            try:
                if self.halfway.is_set():
                    raise ConnectionRefusedError
                far.connect(("127.0.0.1", self._target))
            except OSError:  # who is to answer is dead, or restarted
                far.close()
                near.close()
                continue
            self._socks += [near, far]
            threading.Thread(target=self._pass_on, args=(near, far, None), daemon=True).start()
            threading.Thread(target=self._pass_on, args=(far, near, self._passes), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, most: int | None) -> None:
        passed = 0
        try:
            while piece := source.recv(65536):
                passed += len(piece)
                if most is not None and passed > most:
                    self.halfway.set()
                    self.goes_on.wait(WAIT_S)
                sink.sendall(piece)
        except OSError:  # the other direction has ended
            pass
        for sock in (source, sink):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> _MiddleMan:
        return self

    def __exit__(self, *_: object) -> None:
        for sock in self._socks:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()


def test_a_full_pool_at_the_reader_is_a_miss_and_harms_nobody(node: StartNode, tmp_path: Path) -> None:
    port = free_port()
    a = node("a", serve={"port": port})
    b = node("b", tier={"nodes": [f"127.0.0.1:{port}"]}, l1={"size_bytes": 8 << 20})
    a.store(*range(200))
    b.sees("a", 200)
    held = b.client.prepare_store([key(1000 + number) for number in range(200)], namespace=NAMESPACE)
    assert b.load(1, 2) == []
    held.close()
    assert b.load(1, 2) == [1, 2]
