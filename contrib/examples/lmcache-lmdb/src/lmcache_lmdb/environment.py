"""One LMDB environment for each file and process, however many adapters use it: LMDB allows no second one."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lmdb

_READERS_MAX = 512
_PAUSE_S = 0.002  # between two looks at another process's lock


class Environment:
    """An open file. Readers never wait. Writers wait for each other here, because LMDB itself has no time-out."""

    def __init__(self, path: Path, map_bytes: int, sync: bool) -> None:
        self.users = 0
        self.lmdb = lmdb.open(
            str(path), map_size=map_bytes, subdir=False, sync=sync, metasync=sync, max_readers=_READERS_MAX, max_dbs=0
        )
        self.lmdb.reader_check()  # slots of processes that died
        self._writing = threading.Lock()
        self._turn = os.open(f"{path}.writers", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)

    def close(self) -> None:
        self.lmdb.close()
        os.close(self._turn)

    @contextmanager
    def read(self) -> Iterator[Any]:
        """A transaction. It returns views of the map, which are valid until it ends."""
        with self.lmdb.begin(buffers=True) as transaction:
            yield transaction

    @contextmanager
    def write(self, deadline: float) -> Iterator[Any]:
        """A transaction, committed at the end. Raises `TimeoutError` where others write until the deadline."""
        left_s = max(0.0, deadline - time.monotonic())
        if not self._writing.acquire(timeout=min(left_s, threading.TIMEOUT_MAX)):
            raise TimeoutError("another thread is writing")
        try:
            while True:
                try:
                    fcntl.flock(self._turn, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() >= deadline:
                        raise TimeoutError("another process is writing") from None
                    time.sleep(_PAUSE_S)
            try:
                with self.lmdb.begin(write=True) as transaction:
                    yield transaction
            finally:
                fcntl.flock(self._turn, fcntl.LOCK_UN)
        finally:
            self._writing.release()


_opening = threading.Lock()
_open: dict[Path, Environment] = {}


def opened(path: Path, map_bytes: int, sync: bool) -> Environment:
    """The file's environment; `closed` ends the use. Raises `lmdb.Error` and `OSError`."""
    with _opening:
        environment = _open.get(path)
        if environment is None:
            environment = _open[path] = Environment(path, map_bytes, sync)
        environment.users += 1
        return environment


def closed(path: Path, environment: Environment) -> None:
    """It is used once less."""
    with _opening:
        environment.users -= 1
        if not environment.users:
            del _open[path]
            environment.close()
