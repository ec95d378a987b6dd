"""A real server for tests and benches, in a process of its own. It is always cleaned up at the end."""

from __future__ import annotations

import contextlib
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from uuid import uuid4

from lmcache_core import Client
from lmcache_core.errors import PoolError
from lmcache_core.pool.backing import segment_path

if TYPE_CHECKING:
    from lmcache_core.client import CurveKeys

READY_S = 30.0  # until the server says that it serves, and between two signs of progress while its pool is populated
STOP_S = 10.0  # until a server that was asked to stop is killed
_TCP_LOOPBACK = "127.0.0.1:0"


class ServerProcess:
    """`lmcache-core serve` on every requested carrier, in a temporary directory, under a name of its own.

    The user's settings do not reach it, so that every run measures the same server. Use as a context manager.
    """

    def __init__(self, size_bytes: int, *, zmq: bool = False, ready_populated: bool = True) -> None:
        self._size_bytes = size_bytes
        self._zmq = zmq
        self._ready_populated = ready_populated
        self._stack = ExitStack()
        self.name = f"trial-{uuid4().hex[:12]}"
        self.pid = 0
        self.tcp_address = ""

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self.directory = Path(stack.enter_context(temporary_directory()))
            self.runtime_dir = self.directory / "run"
            stack.callback(segment_path(self.name).unlink, missing_ok=True)  # of a server that had to be killed
            command = self._command()
            with (self.directory / "log").open("wb") as log:
                process = subprocess.Popen(
                    command, cwd=self.directory, env=_environment(), stdout=subprocess.PIPE, stderr=log
                )
            self.pid = process.pid
            stack.callback(end_process, process)
            self._wait_ready(process)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def client(self, address: str | None = None, **options: Any) -> Client:
        """A client over the lifeline, or over ZMQ if an address is given."""
        return Client.connect(
            self.name, runtime_dir=self.runtime_dir, address=address, curve=self.curve(address), **options
        )

    @property
    def ipc_address(self) -> str:
        """Of the ZMQ carrier."""
        return f"ipc://{self.runtime_dir / self.name / 'zmq'}"

    def curve(self, address: str | None) -> CurveKeys | None:
        """The keys of a client, if its address needs them."""
        if address is None or not address.startswith("tcp:"):
            return None
        from lmcache_core.client import CurveKeys

        keys = self.directory / "keys"
        return CurveKeys.from_files(keys / "server.key", keys / "client.key_secret")

    def cpu_s(self) -> float:
        """CPU seconds of all its threads so far."""
        return cpu_s(self.pid)

    def _command(self) -> list[str]:
        options = {
            "name": self.name,
            "runtime_dir": str(self.runtime_dir),
            "state_dir": str(self.directory / "state"),
            "l1.size_bytes": str(self._size_bytes),
            # No headroom is made in the background: the cost of a full pool shows in the call that needs the room.
            "l1.watermark": "1.0",
        }
        if self._zmq:
            options |= {"zmq.ipc": "true", "zmq.tcp": _TCP_LOOPBACK, **self._make_keys()}
        flags = [argument for name, value in options.items() for argument in (f"--{name}", value)]
        return [sys.executable, "-m", "lmcache_core.cli.main", "serve", "--log-level", "error", *flags]

    def _make_keys(self) -> dict[str, str]:
        from zmq.auth import create_certificates

        keys, allowed = self.directory / "keys", self.directory / "allowed"
        for path in (keys, allowed):
            path.mkdir()
        for name in ("server", "client"):
            create_certificates(keys, name)
        shutil.copy(keys / "client.key", allowed)
        return {
            "zmq.curve_secret_key_file": str(keys / "server.key_secret"),
            "zmq.curve_clients_dir": str(allowed),
        }

    def _wait_ready(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None, "it was started with a pipe"
        if not select.select([process.stdout], [], [], READY_S)[0] or not process.stdout.readline():
            raise PoolError(f"the server did not start: {self._last_lines()}")
        with self.client(maps_pool=False) as client:
            status = client.status()
            self.tcp_address = next((each for each in status["server"]["also_at"] if each.startswith("tcp:")), "")
            if self._ready_populated:
                self._wait_populated(client)

    def _wait_populated(self, client: Client) -> None:
        populated, grown_at_s = 0, time.monotonic()
        while (status := client.status())["pool"]["populated_bytes"] < status["l1"]["pool_bytes"]:
            if status["pool"]["population_error"]:
                raise PoolError(f"the pool got no memory: {status['pool']['population_error']}")
            if status["pool"]["populated_bytes"] > populated:
                populated, grown_at_s = status["pool"]["populated_bytes"], time.monotonic()
            if time.monotonic() - grown_at_s > READY_S:
                raise PoolError(f"the pool stays at {populated:,} bytes: is the machine out of memory?")
            time.sleep(0.01)

    def _last_lines(self) -> str:
        lines = (self.directory / "log").read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"


@contextmanager
def temporary_directory() -> Iterator[str]:
    """Like the standard library's, with a short name: socket paths hold 108 bytes."""
    with tempfile.TemporaryDirectory(prefix="lmc-", ignore_cleanup_errors=True) as path:
        yield path


def cpu_s(pid: int) -> float:
    """CPU seconds of all threads of a process: in nanoseconds if the kernel records them, else in ticks."""
    total_ns = 0
    for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):  # a thread that has just ended
            total_ns += int(path.read_text().split()[0])
    if total_ns:
        return total_ns / 1e9
    fields = re.sub(r".*\) ", "", Path(f"/proc/{pid}/stat").read_text()).split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _environment() -> dict[str, str]:
    kept = {"LMCACHE_CORE_PLUGINS"}  # which distributions may be plugins depends on this machine, not on this server
    return {name: value for name, value in os.environ.items() if not name.startswith("LMCACHE_CORE_") or name in kept}


def end_process(process: subprocess.Popen[bytes], number: int = signal.SIGTERM, *, session: bool = False) -> None:
    """Send it a signal, kill it if that does not end it, and close its pipes. `session`: signal the whole session that
    it leads, which also ends its children, even if the process itself has ended."""

    def send(number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            if session:
                os.killpg(process.pid, number)
            else:
                process.send_signal(number)  # no effect if it has ended

    send(number)
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        send(signal.SIGKILL)
        process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
