"""The example, run as its text says: real gunicorn workers that share one table."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from lmcache_l0 import SharedCache

EXAMPLES = Path(__file__).parent.parent / "examples"
pytest.importorskip("gunicorn", reason="gunicorn is not installed")


class UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=30)
        self.path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(30)
        self.sock.connect(self.path)


def ask(path: str, method: str, key: str, body: bytes | None = None) -> tuple[int, bytes, int]:
    connection = UnixConnection(path)
    try:
        connection.request(method, f"/features/{key}", body)
        reply = connection.getresponse()
        return reply.status, reply.read(), int(reply.headers["X-Worker"])
    finally:
        connection.close()


def test_workers_share_what_one_of_them_stored_and_survive_each_other(folder):
    address = str(folder / "http.sock")
    table = folder / "features.l0"
    environ = {
        **os.environ,
        "FEATURES_BIND": f"unix:{address}",
        "FEATURES_WORKERS": "3",
        "FEATURES_PATH": str(table),
    }
    command = [sys.executable, "-m", "gunicorn", "-c", str(EXAMPLES / "gunicorn.conf.py"), "features:app"]
    with open(folder / "log", "wb") as log:
        master = subprocess.Popen(command, env=environ, cwd=EXAMPLES, stdout=log, stderr=log)
    try:
        until = time.monotonic() + 60
        while not Path(address).exists():  # bound before the workers start; connections wait for them
            assert master.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < until
            time.sleep(0.02)
        _, _, first = ask(address, "PUT", "k", b"shared")
        readers = set()
        while len(readers) < 2 and time.monotonic() < until:
            status, body, worker = ask(address, "GET", "k")
            assert (status, body) == (200, b"shared")
            readers.add(worker)
        assert len(readers) >= 2
        assert ask(address, "GET", "absent")[0] == 404
        os.kill(first, signal.SIGKILL)  # the writer; gunicorn starts another
        assert ask(address, "PUT", "k", b"still writable")[0] == 204
        with SharedCache(table) as outside:
            assert outside.get("k") == b"still writable"
            outside.set("from outside", b"seen inside")
        assert ask(address, "GET", "from%20outside")[1] == b"seen inside"
    finally:
        master.terminate()
        master.wait(60)
    assert not table.exists(), (folder / "log").read_text()
