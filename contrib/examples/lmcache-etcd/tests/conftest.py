"""An etcd of the tests' own. Where there is none they are skipped, loudly, or fail if everything must be there."""

from __future__ import annotations

import base64
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest


class Etcd:
    """One process, on ports that were free a moment ago."""

    def __init__(self, folder: Path, *options: str) -> None:
        program = shutil.which("etcd")
        if program is None:
            missing = "NOT TESTED: there is no etcd here: apt-get install etcd-server"
            if os.environ.get("LMCACHE_CORE_MATRIX"):
                pytest.fail(missing)
            pytest.skip(missing)
        with socket.socket() as one, socket.socket() as other:
            one.bind(("127.0.0.1", 0))
            other.bind(("127.0.0.1", 0))
            self.port, peers = one.getsockname()[1], other.getsockname()[1]
        clients, members = f"http://127.0.0.1:{self.port}", f"http://127.0.0.1:{peers}"
        command = [program, "--data-dir", str(folder / "data"), "--log-level", "error"]
        command += ["--listen-client-urls", clients, "--advertise-client-urls", clients]
        command += ["--listen-peer-urls", members, "--initial-advertise-peer-urls", members]
        command += ["--initial-cluster", f"default={members}", *options]
        self.log = folder / "log"
        self._compacted = ""
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        end = time.monotonic() + 60
        while not self._is_up():
            assert self.process.poll() is None, f"{' '.join(command)} ended: {self.log.read_text()}"
            assert time.monotonic() < end, "etcd does not answer"
            time.sleep(0.02)

    def _is_up(self) -> bool:
        try:
            return self.ask("kv/range", key=b"is it up") is not None
        except (OSError, http.client.HTTPException, AssertionError):
            return False

    def ask(self, path: str, **fields: Any) -> Any:
        """What it answers, past the adapter."""
        body = {
            name: base64.b64encode(each).decode() if isinstance(each, bytes) else each for name, each in fields.items()
        }
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request("POST", f"/v3/{path}", json.dumps(body))
            response = connection.getresponse()
            text = response.read()
            assert response.status == http.client.OK, text
            return json.loads(text)
        finally:
            connection.close()

    def below(self, prefix: str) -> dict[str, bytes]:
        """Every key that begins so, without the prefix, and its value; in the order of the keys."""
        name = prefix.encode()
        found = self.ask("kv/range", key=name, range_end=name[:-1] + bytes([name[-1] + 1])).get("kvs", [])
        pairs = [(base64.b64decode(each["key"]), base64.b64decode(each.get("value", ""))) for each in found]
        return {key[len(name) :].decode(): value for key, value in pairs}

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """It takes connections and answers nothing."""
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def compact(self) -> None:
        """Give back what was deleted, and take stores again: what an operator does after `database space exceeded`."""
        revision = self.ask("kv/range", key=b"which revision")["header"]["revision"]
        if revision != self._compacted:  # etcd refuses to compact twice at one
            self.ask("kv/compaction", revision=revision, physical=True)
            self._compacted = revision
        self.ask("maintenance/defragment")
        for alarm in self.ask("maintenance/alarm", action="GET").get("alarms", []):
            self.ask("maintenance/alarm", action="DEACTIVATE", **alarm)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="session")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    made = Etcd(tmp_path_factory.mktemp("etcd"))
    yield made
    made.end()


@pytest.fixture
def small_etcd(tmp_path: Path) -> Iterator[Etcd]:
    # It knows its size as of its last commit: without one for each write it takes half as much again as its quota.
    made = Etcd(tmp_path, "--quota-backend-bytes", str(3 << 20), "--backend-batch-limit", "1")
    yield made
    made.end()


@pytest.fixture
def prefix() -> str:
    """Of this test's keys."""
    return f"{uuid4().hex}/"
