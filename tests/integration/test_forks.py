"""Forks: what a child inherits of a client or an embedded server ends in words, never in a signal or a long wait."""

from __future__ import annotations

import os
import signal
import time

import pytest

from lmcache_core.client.client import Client

from ..conftest import Node

# Runs `child()` in a forked child and says what came of it.
IN_A_CHILD = """
def in_a_child(child):
    pid = os.fork()
    if pid == 0:
        try:
            said = child()
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        say(said)
        sys.stdout.flush()
        os._exit(0)
    say("exit", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
VIEWS = """
client.store([key('a')], [b'a' * 65536], namespace=ns)
reading = client.prepare_retrieve([key('a')], namespace=ns)
seen = reading.view(0)
part = seen[:10]
writing = client.prepare_store([key('b')], namespace=ns)
written = writing.view(0)
"""


# What a forked child does with what it inherits, and what it says then.
INHERITED = [
    ("bytes(seen[:3])", "b'aaa'"),
    ("bytes(part)", "b'aaaaaaaaaa'"),
    ("written[0]", "ValueError: operation forbidden on released memoryview object"),
    ("reading.view(0)", "it belongs to the parent of this forked process"),
    ("writing.view(0)", "it belongs to the parent of this forked process"),
    ("writing.commit()", "it belongs to the parent of this forked process"),
    ("reading.renew()", "it belongs to the parent of this forked process"),
    ("client.retrieve([key('a')], [bytearray(65536)], namespace=ns).hits", "1"),
]


def in_children(node: Node, before: str, inherited: list[tuple[str, str]]) -> None:
    """Each code runs in a forked child of one worker, which then goes on as if nothing had been."""
    node.serve()
    children = "".join(f"in_a_child(lambda: {code})\n" for code, _ in inherited)
    again = "written[:] = b'b' * 65536\nsay(*writing.commit())\nsay(bytes(seen[:3]))\nwait()"
    worker = node.worker(f"{IN_A_CHILD}{VIEWS}{before}{children}{again}")
    for code, words in inherited:
        said = worker.line()
        assert words in said, (code, said)
        worker.expect("exit 0")
    worker.expect("stored")
    worker.expect("b'aaa'")


def test_what_a_forked_child_inherits_stays_readable_or_says_whose_it_is(node: Node) -> None:
    in_children(node, "", INHERITED)


def test_a_tensor_that_a_forked_child_inherits_stays_readable(node: Node) -> None:
    pytest.importorskip("torch")
    in_children(node, "tensor = reading.tensor(0)\n", [("int(tensor.sum()) == 65536 * ord('a')", "True")])


def test_what_a_forked_child_writes_reaches_nobody(node: Node) -> None:
    node.serve()
    worker = node.worker(IN_A_CHILD + VIEWS
                         + """
kept = written[:4]
def child():
    kept[:] = b'evil'
    return bytes(kept)
written[:4] = b'good'
in_a_child(child)
say(bytes(kept))
wait()
""")  # fmt: skip
    worker.expect("b'evil'")
    worker.expect("exit 0")
    worker.expect("b'good'")


def test_a_child_keeps_neither_connection_nor_life_lock_of_its_parent(node: Node) -> None:
    node.serve()
    worker = node.worker(
        VIEWS
        + """
pid = os.fork()
if pid == 0:
    bytes(part)
    time.sleep(600)
say(pid)
wait()
"""
    )
    child = int(worker.line())
    try:
        watcher = node.client()
        worker.kill()
        deadline = time.monotonic() + 60
        while any(watcher.status()["l1"]["leases_by_kind"].values()):
            assert time.monotonic() < deadline
    finally:
        os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("carrier", ["lifeline", "ipc"])
def test_the_child_of_a_dead_embedded_server_lets_nobody_wait(node: Node, carrier: str) -> None:
    worker = node.worker(f"""
from lmcache_core.plugins.loader import load_plugins
from lmcache_core.server.server import Server
from lmcache_core.settings.compose import make_settings
settings = make_settings(name=sys.argv[1], runtime_dir=sys.argv[2], state_dir=sys.argv[2] + '-state',
                         l1={{"size_bytes": 16 << 20}}, zmq={{"ipc": {carrier == "ipc"}}})
server = Server(settings, load_plugins()).start()
say('there')
wait()
pid = os.fork()
if pid == 0:
    time.sleep(600)
say(pid)
wait()
""")
    worker.expect("there")
    address = f"ipc://{node.run}/{node.name}/zmq" if carrier == "ipc" else None
    patient = {"maps_pool": False, "call_timeout_s": 10_000.0}  # a call that nobody answers would never end
    connected = Client.connect(node.name, runtime_dir=node.run, address=address, **patient)
    connected.noop()
    worker.go()
    child = int(worker.line())
    try:
        connected.noop()
        worker.kill()
        late = Client.connect(node.name, runtime_dir=node.run, address=address, **patient)
        for client in (connected, late):
            assert client.lookup([node.key("a")], namespace=node.namespace).statuses == ["unreachable"]
            client.close()
    finally:
        os.kill(child, signal.SIGKILL)
