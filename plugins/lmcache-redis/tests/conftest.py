"""A real Redis for each session of tests, emptied for each test."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

# The servers that misbehave are services of the matrix.
sys.path.insert(0, str(Path(__file__).parents[3] / "tests" / "matrix"))

from lmcache_core.tiers.contract import AdapterContext
from lmcache_redis.adapter import RedisAdapter
from lmcache_redis.settings import RedisSettings

START_S = 60.0


class RedisServer:
    """One `redis-server` in the foreground, on a free port and a Unix socket, stopped by pid."""

    def __init__(self, folder: Path, *options: str) -> None:
        binary = shutil.which("redis-server") or shutil.which("redis-server", path="/usr/sbin:/usr/local/bin")
        if binary is None:
            words = "redis-server is not installed (Debian: apt-get install redis-server)"
            if os.environ.get("LMCACHE_CORE_MATRIX"):
                pytest.fail(words)
            pytest.skip(words)
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            self.port: int = sock.getsockname()[1]
        self.path = folder / "redis.sock"
        self.log = folder / "redis.log"
        common = ["--bind", "127.0.0.1", "--port", str(self.port), "--unixsocket", str(self.path), "--dir", str(folder)]
        quiet = ["--save", "", "--appendonly", "no", "--logfile", str(self.log)]
        self._argv = [binary, *common, *quiet, *options]
        self.start()

    def start(self) -> None:
        self._popen = subprocess.Popen(self._argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + START_S
        while True:
            try:
                with self.door() as door:
                    door.ping()
                return
            except redis.exceptions.AuthenticationError:
                return
            except redis.exceptions.RedisError:
                words = self.log.read_text() if self.log.exists() else ""
                assert self._popen.poll() is None, f"redis-server ended: {words[-2000:]}"
                assert time.monotonic() < deadline, "redis-server does not answer"
                time.sleep(0.01)

    def door(self, **options: Any) -> redis.Redis:
        """The second door: redis-py, as anybody uses it."""
        return redis.Redis(port=self.port, **options)

    def signal(self, number: int) -> None:
        self._popen.send_signal(number)

    def kill(self) -> None:
        self._popen.kill()
        self._popen.wait()

    def stop(self) -> None:
        self._popen.terminate()
        try:
            self._popen.wait(20)
        except subprocess.TimeoutExpired:
            self.kill()


@pytest.fixture(scope="session")
def session_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.stop()


@pytest.fixture
def server(session_server: RedisServer) -> RedisServer:
    """The session's server, empty."""
    with session_server.door() as door:
        door.flushall()
        door.config_set("maxmemory", 0)
        deadline = time.monotonic() + START_S
        # What another test has unlinked is freed by a thread of the server's, and would count in this one's usage.
        while int(door.info("memory")["lazyfree_pending_objects"]) or len(door.client_list()) > 1:
            assert time.monotonic() < deadline, "the server does not come to rest"
            time.sleep(0.01)
    return session_server


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[Callable[..., RedisServer]]:
    """Servers of a test's own, with options, that it may kill."""
    made: list[RedisServer] = []

    def make(*options: str) -> RedisServer:
        folder = tmp_path / f"redis{len(made)}"
        folder.mkdir()
        made.append(RedisServer(folder, *options))
        return made[-1]

    yield make
    for server in made:
        server.stop()


@pytest.fixture
def tier() -> Iterator[Callable[..., RedisAdapter]]:
    """Adapters from settings; closed at the end."""
    made: list[RedisAdapter] = []

    def make(**settings: Any) -> RedisAdapter:
        made.append(RedisAdapter(RedisSettings(**settings), AdapterContext(tier="shared")))
        return made[-1]

    yield make
    for adapter in made:
        adapter.close()
