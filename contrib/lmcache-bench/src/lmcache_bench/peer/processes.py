"""LMCache's server, and programs that take commands line by line: each in its own process."""

from __future__ import annotations

import contextlib
import json
import select
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from uuid import uuid4

from lmcache_bench.peer.environment import environment
from lmcache_core.errors import DisconnectedError, PoolError
from lmcache_testing.processes import cpu_s, end_process

HOST = "127.0.0.1"
READY_S = 120.0
REPLY_S = 600.0  # a safety net


class LMCacheServer:
    """LMCache's multiprocess server with shared memory, observability off. Use as a context manager.

    `size_bytes`: of its memory, all allocated at the start, as ours does; whole mebibytes.
    """

    def __init__(self, python: Path, size_bytes: int, chunk_tokens: int = 256) -> None:
        self._python = python
        self._size_bytes = size_bytes
        self._chunk_tokens = chunk_tokens
        self._stack = ExitStack()
        self.pid = 0
        self.port = 0

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lmc-peer-")))
            name = f"lmcpeer-{uuid4().hex[:12]}"
            stack.callback((Path("/dev/shm") / name).unlink, missing_ok=True)  # if it had to be killed
            self.port = _free_port()
            log = folder / "log"
            with log.open("wb") as stream:
                process = subprocess.Popen(
                    [str(self._python), "-m", "lmcache.v1.multiprocess.server", *self._options(name)],
                    env=environment(), cwd=folder, stdout=stream, stderr=stream, start_new_session=True,
                )  # fmt: skip
            stack.callback(end_process, process, session=True)
            self.pid = process.pid
            self._wait(process, log)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def cpu_s(self) -> float:
        """CPU seconds of all its threads so far."""
        return cpu_s(self.pid)

    def _options(self, name: str) -> list[str]:
        options = {
            "host": HOST, "port": self.port, "chunk-size": self._chunk_tokens, "shm-name": name,
            "l1-size-gb": self._size_bytes / 2**30, "supported-transfer-mode": "engine_driven",
            "eviction-policy": "LRU",
        }  # fmt: skip
        flags = [argument for option, value in options.items() for argument in (f"--{option}", str(value))]
        return [*flags, "--no-l1-use-lazy", "--disable-observability"]

    def _wait(self, process: subprocess.Popen[bytes], log: Path) -> None:
        deadline_s = time.monotonic() + READY_S
        while True:
            with contextlib.suppress(OSError), socket.create_connection((HOST, self.port), timeout=1.0):
                return
            if process.poll() is not None or time.monotonic() > deadline_s:
                lines = log.read_text(errors="replace").strip().splitlines() or ["nothing"]
                raise DisconnectedError(f"LMCache's server did not come up; the last that it said: {lines[-1]}")
            time.sleep(0.05)


class LineProcess:
    """One of our programs, run as a file by a given Python, that answers in lines of JSON. Its errors are raised
    here."""

    def __init__(self, python: Path | str, script: Path, *arguments: str, env: Mapping[str, str]) -> None:
        self._command = [str(python), str(script), *arguments]
        self._env = dict(env)
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._popen = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=self._env, cwd="/", start_new_session=True
        )
        self._stack.callback(end_process, self._popen, signal.SIGKILL, session=True)
        try:
            self._hear()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def ask(self, do: str, **arguments: Any) -> Any:
        """Run a method there and return its result. Raises `PoolError` with the error there."""
        assert self._popen.stdin is not None
        self._popen.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
        self._popen.stdin.flush()
        return self._hear()

    def _hear(self) -> Any:
        assert self._popen.stdout is not None
        ready = select.select([self._popen.stdout], [], [], REPLY_S)[0]
        line = self._popen.stdout.readline() if ready else b""
        if not line:
            raise DisconnectedError(f"{self._command[1]} ended or hangs; standard error says why")
        answer = json.loads(line)
        if "error" in answer:
            raise PoolError(answer["error"])
        return answer["said"]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])
