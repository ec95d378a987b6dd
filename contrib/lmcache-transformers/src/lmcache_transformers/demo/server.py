"""The demo's server: a separate process, started, killed and started again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from lmcache_core import Client
from lmcache_core.errors import CacheError, DisconnectedError

TIER = "disk"
START_TIMEOUT_S = 120.0  # a safety net: seconds are usual
STOP_TIMEOUT_S = 60.0

T = TypeVar("T")


class DemoError(CacheError):
    """A step of the demo failed, so the following ones cannot be shown."""

    code = "DEMO"


def clean_environment() -> dict[str, str]:
    """Our environment, without settings for another server, and without network access."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("LMCACHE_CORE_")}
    # Waiting threads must yield their core: several processes share this machine, and a spinning one makes the others'
    # first tokens ten times slower.
    kept.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    kept.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's threads always spin
    return kept | {"HF_HUB_OFFLINE": "1"}


def wait_for(what: str, look: Callable[[], T | None], timeout_s: float) -> T:
    """Poll until the result is true. Raises `DemoError` that names what did not happen."""
    end_s = time.monotonic() + timeout_s
    while (found := look()) is None:
        if time.monotonic() > end_s:
            raise DemoError(f"waited {timeout_s:.0f} s in vain: {what}")
        time.sleep(0.02)
    return found


class ServerProcess:
    """`lmcache-core serve` with a pool and a disk tier below one folder."""

    def __init__(self, folder: Path, pool_bytes: int, backing: str, chunk_tokens: int) -> None:
        self.folder = folder
        self.name = f"demo-{os.getpid()}"  # unique: it names a pool in shared memory on the whole node
        self.runtime_dir = folder / "run"
        self.tier_dir = folder / "disk"
        self._flags = {
            "name": self.name,
            "runtime_dir": self.runtime_dir,
            "state_dir": folder / "state",
            "l1.size_bytes": pool_bytes,
            "l1.backing": backing,
            "chunk_tokens": chunk_tokens,
            f"l2.{TIER}.type": "fs",
            f"l2.{TIER}.path": self.tier_dir,
        }
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def log_path(self) -> Path:
        return self.folder / "server.log"

    def start(self) -> float:
        """Start it; returns the seconds until it answered and its whole pool was there."""
        command = [sys.executable, "-m", "lmcache_core.cli.main", "serve"]
        command += [f"--{name}={value}" for name, value in self._flags.items()]
        started_s = time.perf_counter()
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                command, cwd=self.folder, env=clean_environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        with self.observer() as client:
            wait_for("the server to be ready", lambda: self._ready(client), START_TIMEOUT_S)
        return time.perf_counter() - started_s

    def observer(self) -> Client:
        """A client for queries, without a mapping of the pool."""
        return Client.connect(self.name, runtime_dir=self.runtime_dir, client_name="demo", maps_pool=False)

    def _ready(self, client: Client) -> bool | None:
        assert self._process is not None
        if (status := self._process.poll()) is not None:
            lines = self.log_path.read_text(errors="replace").splitlines()
            raise DemoError(f"the server ended with status {status}: " + " / ".join(lines[-3:]))
        try:
            usage = client.status()["l1"]
        except DisconnectedError:
            return None
        return usage["populated_bytes"] == usage["pool_bytes"] or None

    def kill(self) -> None:
        """SIGKILL: no chance to tidy up."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(STOP_TIMEOUT_S)

    def stop(self) -> int:
        """SIGTERM, and wait: it drains and leaves nothing behind. Returns its exit status."""
        if self._process is None:
            return 0
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise DemoError(f"the server did not end within {STOP_TIMEOUT_S:.0f} s of SIGTERM") from None

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *_: Any) -> None:
        if self._process is not None and self._process.poll() is None:
            self.kill()
