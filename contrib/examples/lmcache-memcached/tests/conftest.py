"""A memcached of the tests' own. Where there is none they are skipped, loudly, or fail if everything must be there."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import pytest


class Memcached:
    """One process on a port of its own choice."""

    def __init__(self, folder: Path, *options: str) -> None:
        program = shutil.which("memcached")
        if program is None:
            missing = "NOT TESTED: there is no memcached here: apt-get install memcached"
            if os.environ.get("LMCACHE_CORE_MATRIX"):
                pytest.fail(missing)
            pytest.skip(missing)
        port_file = folder / "port"
        command = [program, "-l", "127.0.0.1", "-p", "-1", "-U", "0", *options]
        if os.geteuid() == 0:
            command += ["-u", "root"]
        self.process = subprocess.Popen(command, env={**os.environ, "MEMCACHED_PORT_FILENAME": str(port_file)})
        end = time.monotonic() + 60
        while not port_file.exists():
            assert self.process.poll() is None, f"{' '.join(command)} ended"
            assert time.monotonic() < end, "memcached does not say its port"
            time.sleep(0.01)
        self.port = int(port_file.read_text().splitlines()[0].rpartition(":")[2])

    def ask(self, *parts: bytes) -> bytes:
        """What it answers to a command, past the adapter."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=60) as connection:
            connection.sendall(b"".join(parts) + b"quit\r\n")
            answer = b""
            while part := connection.recv(1 << 20):
                answer += part
            return answer

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """It takes connections and answers nothing."""
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="session")
def memcached(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Memcached]:
    made = Memcached(tmp_path_factory.mktemp("memcached"), "-m", "256")
    yield made
    made.end()


@pytest.fixture(scope="session")
def small_memcached(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Memcached]:
    made = Memcached(tmp_path_factory.mktemp("small"), "-m", "2")
    yield made
    made.end()


@pytest.fixture
def prefix() -> str:
    """Of this test's keys: after a flush_all memcached goes on counting what it has not come across yet."""
    return f"{uuid4().hex}:"
