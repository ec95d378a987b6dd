"""Blocks that come back from a real redis-server."""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest
from vllm_engines import Engine, Server, is_written, prompt

from lmcache_testing.waiting import until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("lmcache_redis") is None, reason="lmcache-redis is not installed here"),
]
BLOCK = 128


@pytest.fixture
def port(tmp_path: Path) -> Iterator[int]:
    with redis_server(tmp_path) as number:
        yield number


@contextmanager
def redis_server(folder: Path) -> Iterator[int]:
    """The port of one that is gone at the end."""
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed here")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        number = int(free.getsockname()[1])
    command = ["redis-server", "--port", str(number), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
    popen = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        until(lambda: listens(number))
        yield number
    finally:
        popen.kill()
        popen.wait()


def listens(port: int) -> bool:
    with socket.socket() as ours:
        return ours.connect_ex(("127.0.0.1", port)) == 0


def test_blocks_come_back_from_redis_and_are_held_until_they_are_read(
    start: Callable[..., Engine], llama: Path, serve: Callable[..., Server], port: int
) -> None:
    server = serve("--l2.shared.type", "redis", "--l2.shared.url", f"redis://127.0.0.1:{port}/0")
    cached = start(llama, server.settings())
    tokens = prompt(1, 1100)
    (expected,) = cached.generate(tokens)
    cached.saved()
    cached.forget()
    with server.client() as client:
        until(lambda: is_written(client.status()["tiers"]["stores"]))
        client.clear()  # of the pool
        cached.figures()
        assert cached.generate(tokens) == [{"tokens": expected["tokens"], "cached": 8 * BLOCK}]
        figures = cached.figures()
        assert figures["load_blocks"] == 8
        assert figures["lookup_held"] == 1
        until(lambda: not client.status()["l1"]["leases_by_kind"]["promise"])  # and given back
    cached.end()
