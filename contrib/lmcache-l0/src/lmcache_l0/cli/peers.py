"""The peers in the bench's table. Each answers `get(key)` for the same keys; a missing one says why."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.managers import SyncManager
from pathlib import Path
from time import monotonic

Get = Callable[[str], object]
START_S = 20.0


class MissingPeerError(Exception):
    """The peer is not installed here; the message names what is."""


@contextmanager
def lmdb_get(folder: Path, values: Mapping[str, bytes]) -> Iterator[Callable[[bytes], object]]:
    """LMDB with one read transaction held open: its fastest mode. Takes keys as bytes."""
    try:
        import lmdb
    except ImportError:
        raise MissingPeerError("lmdb (pip install lmdb)") from None
    with lmdb.open(str(folder / "lmdb"), map_size=256 << 20, sync=False) as environment:
        with environment.begin(write=True) as transaction:
            for key, value in values.items():
                transaction.put(key.encode(), value)
        with environment.begin(buffers=False) as transaction:
            yield transaction.get


@contextmanager
def manager_get(values: Mapping[str, bytes]) -> Iterator[Get]:
    """`multiprocessing.Manager().dict()`."""
    manager = SyncManager()
    manager.start()
    try:
        shared = manager.dict(values)
        yield shared.get
    finally:
        manager.shutdown()


@contextmanager
def redis_get(folder: Path, values: Mapping[str, bytes]) -> Iterator[Get]:
    """Our own Redis on a Unix socket, ended by its process handle."""
    program = shutil.which("redis-server")
    if program is None:
        raise MissingPeerError("redis-server")
    try:
        import redis
    except ImportError:
        raise MissingPeerError("redis (pip install redis)") from None
    socket = folder / "redis.sock"
    command = [program, "--port", "0", "--unixsocket", str(socket), "--save", "", "--dir", str(folder)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        with redis.Redis(unix_socket_path=str(socket)) as client:
            _wait_for(client.ping, redis.ConnectionError, server)
            client.mset(dict(values))
            yield client.get
    finally:
        server.terminate()
        server.wait()


def _wait_for(ping: Callable[[], object], refused: type[Exception], server: subprocess.Popen[bytes]) -> None:
    until = monotonic() + START_S
    while True:
        try:
            ping()
            return
        except refused:
            if server.poll() is not None or monotonic() > until:
                raise MissingPeerError("a redis-server that starts here") from None
