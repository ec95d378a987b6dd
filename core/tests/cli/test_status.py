"""`status` as a person sees it: on a terminal, and into a pipe."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable

import pytest

from lmcache_core.cli.status import lines_of, summary
from lmcache_core.client.client import Client
from lmcache_core.observe.troubles import with_troubles
from lmcache_core.pool.layout import Layout
from lmcache_core.server.server import Server
from lmcache_core.tokens.namespace import Namespace
from lmcache_testing.waiting import WAIT_S

NBYTES = 65536
SPACE = Namespace("watched", Layout("uint8", (NBYTES,)))
COMMAND = [sys.executable, "-m", "lmcache_core.cli.main", "status"]


@pytest.fixture
def server(start: Callable[..., Server]) -> Server:
    return start(l1={"size_bytes": 16 << 20, "backing": "memfd"})


def where(server: Server) -> list[str]:
    return ["--name", server.parts.settings.name, "--runtime-dir", str(server.parts.settings.runtime_dir)]


def six_stored(client: Client) -> None:
    keys = [number.to_bytes(32, "big") for number in range(6)]
    assert client.store(keys, [bytes(NBYTES)] * 6, namespace=SPACE).stored == 6


def widest(lines: list[str]) -> int:
    """In columns, but for addresses, which stay whole."""
    return max(len(line) for line in lines if not any(len(word) > 60 for word in line.split()))


def test_status_is_ten_lines(server: Server) -> None:
    done = subprocess.run([*COMMAND, *where(server)], capture_output=True, text=True, check=True).stdout
    lines = done.splitlines()
    assert len(lines) == 8
    assert [line.split()[0] for line in lines if line[0] != " "] == [
        "server", "at", "pool", "lookups", "retrieves", "stores", "clients", "trouble",
    ]  # fmt: skip


def test_status_names_namespaces_by_their_labels(server: Server) -> None:
    with server.connect() as client:
        for number in range(7):
            client.register_layout(Namespace("m", SPACE.layout, format=str(number), label=f"llama-3-8b/bf16 {number}"))
        done = subprocess.run([*COMMAND, *where(server)], capture_output=True, text=True, check=True).stdout
    shown = [line for line in done.splitlines() if line.startswith("namespace")]
    assert shown[0] == "namespace llama-3-8b/bf16 6: 1 session"
    assert shown[-1] == "namespace and 2 more: see --all"
    assert len(shown) == 6


def test_lines_fit_80_columns_and_no_name_moves_the_cursor(server: Server) -> None:
    with server.connect() as client:
        status = client.status()
    large = 123_456_789_012
    traffic = status["traffic"]
    traffic["lookups"] |= {"keys": large, "hits": large - 7, "hit_rate": 0.999, "hits_by_index": large - 9}
    traffic["retrieves"] |= {"keys": large, "hits": large, "hit_rate": 1.0, "bytes": large**2 // 10**9}
    status["server"] |= {"also_at": ["ipc:///run/user/1000/lmcache-core/default/zmq", "tcp://10.0.0.1:5555"]}
    status["pool"]["population_error"] = "\x1b]0;owned\x07 " + "many words " * 12
    lines = [line for name, text in summary(with_troubles(status)) for line in lines_of(name, text, 80)]
    assert widest(lines) <= 80
    assert "owned" in "".join(lines)
    assert not [line for line in lines if "\x1b" in line or "\x07" in line]


def test_status_watches_on_a_terminal(server: Server) -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 40, 80, 0, 0))
    process = subprocess.Popen(
        [*COMMAND, "--watch", "0.1", *where(server)], stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    )
    os.close(theirs)
    shown = b""

    def until(text: bytes) -> None:
        nonlocal shown
        end = time.monotonic() + WAIT_S
        while text not in shown:
            assert select.select([ours], [], [], max(0.0, end - time.monotonic()))[0], shown
            shown += os.read(ours, 65536)

    try:
        until(b"0 objects stored")
        with server.connect() as client:
            six_stored(client)
            until(b"6 objects stored")
        assert b"\x1b[H\x1b[2J" in shown
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_S) == 130
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def test_the_json_of_status_has_its_troubles(server: Server) -> None:
    done = subprocess.run([*COMMAND, "--json", *where(server)], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["troubles"] == []
