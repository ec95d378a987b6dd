"""Messages that never end, sent over TCP by a process with an admitted key: libzmq keeps all of their parts."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq.auth

from lmcache_core.client.client import Client

from ..conftest import Node, Process, ServerProcess

MIB = 1 << 20

# What every attacker begins with. Whoever has a ROUTING_ID of somebody who has left comes as that one.
ATTACKER = """
import os, socket, sys, threading, time
import zmq, zmq.auth
from lmcache_core.protocol import messages as m
from lmcache_core.protocol.codec import encode
server_key, secret_key, port = sys.argv[1], sys.argv[2], int(sys.argv[3])
context = zmq.Context()
context.set(zmq.MAX_SOCKETS, 4000)
kept = []
def dealer(name=b"", port=port):
    sock = context.socket(zmq.DEALER)
    sock.curve_publickey, sock.curve_secretkey = zmq.auth.load_certificate(secret_key)
    sock.curve_serverkey = zmq.auth.load_certificate(server_key)[0]
    sock.setsockopt(zmq.SNDHWM, 0)
    sock.setsockopt(zmq.RCVTIMEO, 10_000)
    sock.linger = 0
    if name:
        sock.setsockopt(zmq.ROUTING_ID, name)
    sock.connect(f"tcp://127.0.0.1:{port}")
    kept.append(sock)
    return sock
def hello(sock):
    versions = m.PROTOCOL_VERSION_MIN, m.PROTOCOL_VERSION_MAX
    sock.send(encode(m.Hello(1, *versions, os.urandom(16), "raw", os.getpid(), [])))
    sock.recv()
def without_end(sock, parts=6000):
    part = bytes(60_000)
    threading.Thread(target=lambda: sock.send_multipart([part] * parts), daemon=True).start()
def say(*words): print(*words, flush=True)
"""

MANY = """
def stalls(limit):
    # The library sends whole messages only, and what stands in between sends `limit` bytes of what it gets.
    listener = socket.create_server(("127.0.0.1", 0))
    def pump(source, target, left):
        try:
            while left and (some := source.recv(min(65536, left))):
                target.sendall(some)
                left -= len(some)
        except OSError:
            pass
    def serve():
        while True:
            source, target = listener.accept()[0], socket.create_connection(("127.0.0.1", port))
            kept.append((source, target))
            threading.Thread(target=pump, args=(source, target, limit), daemon=True).start()
            threading.Thread(target=pump, args=(target, source, 1 << 60), daemon=True).start()
    threading.Thread(target=serve, daemon=True).start()
    return listener.getsockname()[1]
through = stalls(3 << 20)
for number in range(150):
    sock = dealer(port=through)
    if number % 2:
        hello(sock)
    else:
        sock.send(b"x")
    without_end(sock, 60)
say("sent")
time.sleep(60)
"""

BEHIND_A_FLOOD = """
flood, endless = dealer(), dealer()
flood.setsockopt(zmq.SNDHWM, 2000)
endless.send(b"x")
def floods():
    while True:
        flood.send(b"x")
threading.Thread(target=floods, daemon=True).start()
time.sleep(0.5)
without_end(endless)
say("sent")
time.sleep(60)
"""

STALE_DESCRIPTOR = """
before = dealer(b"one")
hello(before)
before.close()
time.sleep(0.3)
endless = dealer(b"two")  # as a rule with the descriptor of the one that has left
endless.send(b"x")
time.sleep(0.3)
back = dealer(b"one")
hello(back)
without_end(endless)
say("sent")
while True:
    back.send(encode(m.Ping(5, b"")))
    back.recv()
    time.sleep(0.005)
"""


def memory_of(server: ServerProcess) -> int:
    """Bytes that the server has of its own: the pool is shared memory."""
    lines = Path(f"/proc/{server.pid}/status").read_text().splitlines()
    return int(next(each for each in lines if each.startswith("RssAnon:")).split()[1]) << 10


@pytest.fixture
def attack(node: Node, tmp_path: Path) -> Iterator[Callable[[str], int]]:
    """Runs an attack for some seconds; by how much the server has grown at the most."""
    for folder, name in (("curve", "server"), ("curve/clients", "friend")):
        (tmp_path / folder).mkdir()
        zmq.auth.create_certificates(tmp_path / folder, name)
    curve = tmp_path / "curve"
    options = ["--zmq.curve_secret_key_file", str(curve / "server.key_secret")]
    options += ["--zmq.curve_clients_dir", str(curve / "clients")]
    server = node.serve("--zmq.tcp", "127.0.0.1:0", *options)
    (address,) = node.client(maps_pool=False).status()["server"]["also_at"]
    keys = [str(curve / "server.key"), str(curve / "clients/friend.key_secret")]
    attackers: list[Process] = []

    def run(code: str) -> int:
        before, most = memory_of(server), 0
        attackers.append(Process([sys.executable, "-c", ATTACKER + code, *keys, address.rsplit(":", 1)[1]]))
        until_s = time.monotonic() + 6.0
        with server.client(maps_pool=False) as bystander:
            while time.monotonic() < until_s:
                bystander.ping()
                most = max(most, memory_of(server) - before)
                time.sleep(0.01)
        attackers[-1].expect("sent")
        return most

    yield run
    for attacker in attackers:
        attacker.end()


@pytest.mark.parametrize("code", [MANY, BEHIND_A_FLOOD, STALE_DESCRIPTOR], ids=["many", "flood", "stale_descriptor"])
def test_messages_without_end_take_a_bounded_part_of_the_memory(
    attack: Callable[[str], int], node: Node, code: str
) -> None:
    assert attack(code) < 128 * MIB  # they send 450 MiB and 343 MiB
    with Client.connect(node.name, runtime_dir=node.run, maps_pool=False) as client:
        assert client.ping(b"x") == b"x"
