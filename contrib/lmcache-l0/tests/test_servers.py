"""The examples, run as their texts say: real servers, real loaders, real processes."""

from __future__ import annotations

import http.client
import importlib.util
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from lmcache_l0 import SharedCache
from lmcache_l0.errors import TableMismatchError

EXAMPLES = Path(__file__).parent.parent / "examples"


class UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=60)
        self.path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(60)
        self.sock.connect(self.path)


def ask(path: str, method: str, url: str, body: bytes | None = None) -> tuple[int, bytes, dict[str, str]]:
    """Once more where the worker that had accepted us died: its connection is gone, the server is not."""
    until = time.monotonic() + 60
    while True:
        connection = UnixConnection(path)
        try:
            connection.request(method, url, body)
            reply = connection.getresponse()
            return reply.status, reply.read(), dict(reply.headers)
        except (ConnectionError, FileNotFoundError):
            if time.monotonic() > until:
                raise
            time.sleep(0.05)
        finally:
            connection.close()


def test_uvicorn_workers_share_what_one_of_them_stored_and_survive_each_other(folder):
    for module in ("uvicorn", "fastapi"):
        pytest.importorskip(module, reason=f"{module} is not installed")
    address = str(folder / "http.sock")
    environ = {**os.environ, "FEATURES_PATH": str(folder / "features.l0")}
    command = [sys.executable, "-m", "uvicorn", "feature_server:app", "--workers", "2", "--uds", address]
    with open(folder / "log", "wb") as log:
        server = subprocess.Popen(command, env=environ, cwd=EXAMPLES, stdout=log, stderr=log, start_new_session=True)
    try:
        features = np.arange(64, dtype=np.float32)
        assert ask(address, "PUT", "/features/a", features.tobytes())[0] == 204
        assert ask(address, "PUT", "/features/b", features.tobytes())[0] == 204
        workers = set()
        until = time.monotonic() + 60
        while len(workers) < 2 and time.monotonic() < until:
            status, body, headers = ask(address, "GET", "/features/a")
            assert (status, body) == (200, features.tobytes())
            workers.add(int(headers["x-worker"]))
        assert len(workers) == 2, (folder / "log").read_text()
        assert json.loads(ask(address, "GET", "/score?keys=a,b,absent")[1]) == {"score": 4032.0, "found": 2}
        with SharedCache(folder / "features.l0", create=False) as outside:
            assert set(outside.writers()) <= workers
            os.kill(outside.writers()[0], signal.SIGKILL)
            assert ask(address, "PUT", "/features/c", features.tobytes())[0] == 204
            assert outside.get("c") == features.tobytes()
            outside.set_numpy("outside", features)
            assert ask(address, "GET", "/features/outside")[1] == features.tobytes()
            assert ask(address, "GET", "/features/absent")[0] == 404
    finally:
        os.killpg(server.pid, signal.SIGKILL)  # a session of its own: the server and its workers, nobody else
        server.wait(60)


def test_gunicorn_workers_share_what_one_of_them_stored_and_survive_each_other(folder):
    pytest.importorskip("gunicorn", reason="gunicorn is not installed")
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
        first = int(ask(address, "PUT", "/features/k", b"shared")[2]["X-Worker"])
        readers = set()
        while len(readers) < 2 and time.monotonic() < until:
            status, body, headers = ask(address, "GET", "/features/k")
            assert (status, body) == (200, b"shared")
            readers.add(int(headers["X-Worker"]))
        assert len(readers) >= 2
        assert ask(address, "GET", "/features/absent")[0] == 404
        os.kill(first, signal.SIGKILL)  # the writer; gunicorn starts another
        assert ask(address, "PUT", "/features/k", b"still writable")[0] == 204
        with SharedCache(table) as outside:
            assert outside.get("k") == b"still writable"
            outside.set("from outside", b"seen inside")
        assert ask(address, "GET", "/features/from%20outside")[1] == b"seen inside"
    finally:
        master.terminate()
        master.wait(60)
    assert not table.exists(), (folder / "log").read_text()


def example(name: str, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *words], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_the_processes_of_multiprocessing_share_a_table(method):
    lines = example("processes.py", method).split("\n")[:2]
    assert all(line.startswith("HELLO from ") for line in lines)
    assert len({line.split()[-1] for line in lines}) == 2


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_the_workers_of_a_data_loader_share_a_table(method):
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    assert float(example("dataloader.py", method)) == 128 * sum(range(1000))


def test_a_handle_is_handed_over_by_its_path_and_only_to_the_same_table(make):
    cache = make()
    cache.set("k", b"v")
    other = pickle.loads(pickle.dumps(cache))
    assert other.get("k") == b"v"
    other.close()
    handed = pickle.dumps(cache)
    cache.unlink()
    with pytest.raises(FileNotFoundError):
        pickle.loads(handed)
    make(cache.path, hash_slots=64, max_value_size=256)
    with pytest.raises(TableMismatchError, match="made since"):
        pickle.loads(handed)
