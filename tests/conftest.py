"""Real servers and real workers, as processes of their own, that tests may kill."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from lmcache_core.client.client import Client
from lmcache_core.pool.backing import segment_path
from lmcache_core.pool.layout import Layout
from lmcache_core.tokens.namespace import Namespace
from lmcache_testing.waiting import until

# What every worker begins with. It talks to the test over stdin and stdout, line by line.
PRELUDE = """
import os, sys, threading, time
from lmcache_core.client.client import Client
from lmcache_core.pool.backing import segment_path
from lmcache_core.pool.layout import Layout
from lmcache_core.tokens.namespace import Namespace
ns = Namespace("model", Layout("uint8", (65536,)))
def key(name): return str(name).encode().rjust(32, b"\\0")
def say(*words): print(*words, flush=True)
def wait(): return sys.stdin.readline().strip()
client = Client.connect(sys.argv[1], runtime_dir=sys.argv[2])
"""


class Process:
    """A child that talks in lines."""

    def __init__(self, argv: list[str], env: dict[str, str] | None = None) -> None:
        self.popen = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
        )
        self.pid = self.popen.pid

    def line(self) -> str:
        """Its next line; what it said on stderr if there is none."""
        assert self.popen.stdout is not None
        text = self.popen.stdout.readline().strip()
        if not text and self.popen.poll() is not None:
            assert self.popen.stderr is not None
            raise AssertionError(f"the process ended: {self.popen.stderr.read()[-3000:]}")
        return text

    def expect(self, text: str) -> None:
        found = self.line()
        assert found == text, found

    def go(self, text: str = "") -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.write(text + "\n")
        self.popen.stdin.flush()

    def signal(self, number: int) -> None:
        self.popen.send_signal(number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.popen.wait()

    def end(self) -> None:
        if self.popen.poll() is None:
            self.kill()
        for pipe in (self.popen.stdin, self.popen.stdout, self.popen.stderr):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


class ServerProcess(Process):
    """`lmcache-core serve`."""

    def __init__(self, name: str, run: Path, options: list[str]) -> None:
        env = {**os.environ, "HOME": str(run.parent)}
        argv = [sys.executable, "-m", "lmcache_core.cli.main", "serve", "--name", name]
        argv += ["--runtime_dir", str(run), "--state_dir", str(run.parent / "state"), *options]
        super().__init__(argv, env)
        self.name = name
        self.run = run

    def ready(self) -> ServerProcess:
        """Wait until it answers and its pool is populated."""
        self.line()
        with self.client(maps_pool=False) as client:
            until(lambda: client.status()["pool"]["populated_bytes"] >= client.status()["l1"]["pool_bytes"], "pool")
        return self

    def client(self, **options: Any) -> Client:
        return Client.connect(self.name, runtime_dir=self.run, **options)


class MovedClock:
    """A client's own time: the machine's, until a test stops it or moves it on."""

    def __init__(self) -> None:
        self._ahead_s = 0.0
        self._stands_at_s: float | None = None

    def __call__(self) -> float:
        return (time.monotonic() if self._stands_at_s is None else self._stands_at_s) + self._ahead_s

    def stop(self) -> None:
        self._stands_at_s = time.monotonic()

    def go_on(self) -> None:
        self._stands_at_s = None

    def jump(self, seconds: float) -> None:
        self._ahead_s += seconds


class Node:
    """One machine's worth of servers and workers for a test; ends them all."""

    def __init__(self, tmp_path: Path, stack: ExitStack, server: ServerProcess | None = None) -> None:
        """`server`: of another node, which ends it."""
        self.run = tmp_path / "run"
        self.name = server.name if server else f"t{uuid4().hex[:10]}"
        self.shm = segment_path(self.name)
        self.namespace = Namespace("model", Layout("uint8", (65536,)))
        self._stack = stack

    def serve(self, *options: str, size: str = "16MiB", ready: bool = True) -> ServerProcess:
        server = ServerProcess(self.name, self.run, ["--l1.size_bytes", size, *options])
        self._stack.callback(server.end)
        return server.ready() if ready else server

    def worker(self, code: str) -> Process:
        """A process that runs PRELUDE and `code`."""
        worker = Process([sys.executable, "-c", PRELUDE + code, self.name, str(self.run)])
        self._stack.callback(worker.end)
        return worker

    def socket(self) -> socket.socket:
        """A bare connection to the lifeline, for those who say what no client would."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._stack.callback(sock.close)
        sock.connect(str(self.run / self.name / "lifeline"))
        return sock

    def client(self, clock: Callable[[], float] | None = None, **options: Any) -> Client:
        client = Client.connect(self.name, runtime_dir=self.run, **options)
        if clock is not None:
            client = Client(replace(client.links.target, clock=clock))
        return self._stack.enter_context(client)

    def key(self, name: object) -> bytes:
        return str(name).encode().rjust(32, b"\0")

    def payload(self, number: int) -> bytes:
        return bytes([number % 251 + 1]) * self.namespace.layout.nbytes


@contextmanager
def node_in(folder: Path) -> Iterator[Node]:
    with ExitStack() as stack:
        node = Node(folder, stack)
        stack.callback(node.shm.unlink, missing_ok=True)  # of servers that a test killed
        yield node


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with node_in(tmp_path) as node:
        yield node


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Of all tests of a module that take it, with the usual settings."""
    with node_in(tmp_path_factory.mktemp("shared")) as node:
        yield node.serve()


@pytest.fixture
def shared_node(shared_server: ServerProcess) -> Iterator[Node]:
    """The node of `shared_server`, where nothing is stored yet. What a test makes on it ends with the test."""
    with ExitStack() as stack:
        yield Node(shared_server.run.parent, stack, shared_server)
    with shared_server.client(maps_pool=False) as client:
        client.clear()
