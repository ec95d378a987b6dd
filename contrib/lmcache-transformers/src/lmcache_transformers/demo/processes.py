"""Worker processes of the demo: run one to its end, or hold one that will be killed."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lmcache_transformers.demo.job import Job
from lmcache_transformers.demo.server import DemoError, clean_environment

WORKER_TIMEOUT_S = 600.0  # a safety net: a slow machine with a long document


def _start(job: Job, folder: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "lmcache_transformers.demo.worker", json.dumps(asdict(job))]
    with (folder / "workers.log").open("ab") as log:
        return subprocess.Popen(
            command,
            cwd=folder,
            env=clean_environment() | {"TMPDIR": str(folder)},  # torch leaves a folder of its own there
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
        )


def _failed(job: Job, status: int | None, folder: Path) -> DemoError:
    lines = (folder / "workers.log").read_text(errors="replace").splitlines()
    return DemoError(f"the worker for {job.task!r} ended with status {status}: " + " / ".join(lines[-3:]))


def run_worker(job: Job, folder: Path) -> dict[str, Any]:
    """Run a worker to its end. Returns its report. Raises `DemoError` if it failed."""
    with _start(job, folder) as process:
        try:
            output, _ = process.communicate(timeout=WORKER_TIMEOUT_S)
        except BaseException:
            # Whatever ends us, a time-out or the user, also ends the worker.
            process.kill()
            raise
        if process.returncode != 0:
            raise _failed(job, process.returncode, folder)
    answer: dict[str, Any] = json.loads(output.splitlines()[-1])
    return answer


class HangingWorker:
    """A worker that holds its slots until it is killed."""

    def __init__(self, job: Job, folder: Path) -> None:
        self._process = _start(job, folder)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            status = self._process.wait(WORKER_TIMEOUT_S)
            raise _failed(job, status, folder)
        self.written: dict[str, Any] = json.loads(line)

    def kill(self) -> None:
        """SIGKILL, between prepare and commit."""
        self._process.kill()
        self._process.wait(WORKER_TIMEOUT_S)

    def __enter__(self) -> HangingWorker:
        return self

    def __exit__(self, *_: Any) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.communicate()
