"""Nothing of the file system holds up the loop: what hangs is late for its caller, and for nobody else."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from lmcache_core import Layout, Namespace, Server, state_thread
from lmcache_core.errors import CacheError
from lmcache_core.settings.model import Settings
from lmcache_testing.embedded import server_settings
from lmcache_testing.waiting import until

NAMESPACE = Namespace("a model", Layout("uint8", (4096,)))


def settings_for(folder: Path) -> Settings:
    return server_settings(
        folder, name="slow", l1={"size_bytes": "16MiB", "backing": "memfd"}, l2={"mem": {"type": "mock"}}
    )


class Hang:
    """While `on`, who opens a file of this name waits, as on a disk that is away, until `end`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self.on = False
        self._ended = threading.Event()
        opened = os.open

        def hanging(path: os.PathLike[str], *more: Any, **options: Any) -> int:
            if self.on and Path(path).name == name:
                self._ended.wait(60)
            return opened(path, *more, **options)

        monkeypatch.setattr(os, "open", hanging)

    def end(self) -> None:
        self.on = False
        self._ended.set()


@pytest.mark.parametrize("name", ["slow.epochs", "slow.quotas.json"])
def test_a_state_file_that_hangs_is_late_for_its_caller_and_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(state_thread, "STATE_CALL_S", 0.5)
    hang = Hang(monkeypatch, name)
    failed: list[CacheError] = []
    with Server(settings_for(tmp_path)) as server, server.connect() as one, server.connect(maps_pool=False) as other:
        one.store([b"k" * 32], [bytes(4096)], namespace=NAMESPACE)
        one.clear(NAMESPACE, tiers=True)
        hang.on = True

        def change() -> None:
            try:
                if name == "slow.epochs":
                    one.clear(NAMESPACE, tiers=True)
                else:
                    one.quota_set("team", {"l1": {"limit_bytes": 1 << 20}}, [NAMESPACE.id])
            except CacheError as error:
                failed.append(error)

        caller = threading.Thread(target=change)
        caller.start()
        while caller.is_alive():
            other.noop()  # raises if it is not answered
        assert "has not answered" in str(failed[0])
        assert one.store([b"l" * 32], [bytes(4096)], namespace=NAMESPACE).stored == 1
        hang.end()
        one.clear(NAMESPACE, tiers=True)


@pytest.mark.parametrize("name", ["slow.epochs", "slow.quotas.json"])
def test_what_hangs_for_good_in_a_state_file_does_not_keep_later_changes_from_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The directory has come back, and the call that hangs does not return."""
    monkeypatch.setattr(state_thread, "STATE_CALL_S", 0.5)
    state, hang = tmp_path / "state" / name, Hang(monkeypatch, name)
    with Server(settings_for(tmp_path)) as server, server.connect() as client:

        def change(limit: int) -> None:
            if name == "slow.epochs":
                client.clear(NAMESPACE, tiers=True)
            else:
                client.quota_set("team", {"l1": {"limit_bytes": limit}}, [NAMESPACE.id])

        change(1 << 20)
        hang.on = True
        with pytest.raises(CacheError, match="has not answered"):
            change(2 << 20)
        hang.on = False  # for others: the call stays in it
        until(lambda: client.status()["state_directory"]["hung"])
        before = state.read_bytes()
        change(3 << 20)
        after = state.read_bytes()
        assert after.startswith(before)
        assert len(after) > len(before)
        hang.end()
        until(lambda: not client.status()["state_directory"]["hung"])
        assert state.read_bytes() == after, "who was left behind writes nothing more"
    with Server(settings_for(tmp_path)) as server, server.connect() as client:
        if name == "slow.quotas.json":
            (told,) = [each for each in client.quotas() if each["tenant"] == "team"]
            assert told["stores"]["l1"]["limit_bytes"] == 3 << 20


CALLS_OF_THE_LOOP = """
import json, sys, threading
from pathlib import Path

from lmcache_core import Layout, Namespace, Server, make_settings

folder = Path(sys.argv[1])
settings = make_settings(
    name="audited", l1={"size_bytes": "32MiB", "backing": "memfd"},
    l2={"disk": {"type": "fs", "path": str(folder / "disk"), "capacity_bytes": "16MiB", "rescan_s": 1}},
    runtime_dir=str(folder / "run"), state_dir=str(folder / "state"),
)
namespace = Namespace("a model", Layout("uint8", (65536,)))
keys = [number.to_bytes(32, "big") for number in range(600)]
seen, watched, busy = [], [], []

def look(event, arguments):
    if watched and threading.get_ident() == watched[0] and not busy:
        busy.append(1)
        if event == "open" or event.split(".")[0] in ("os", "shutil", "tempfile", "subprocess", "glob"):
            seen.append((event, str(arguments[0]) if arguments else ""))
        elif event in ("socket.getaddrinfo", "socket.gethostbyname", "fcntl.flock", "fcntl.lockf"):
            seen.append((event, ""))
        busy.clear()

sys.addaudithook(look)
with Server(settings) as server:
    server.parts.populator.wait(60)
    loop = next(each for each in threading.enumerate() if each.name == "lmcache-server")
    watched.append(loop.ident)
    with server.connect() as one, server.connect("tool", maps_pool=False) as other:
        for first in range(0, 600, 100):
            one.store(keys[first : first + 100], [bytes(65536)] * 100, namespace=namespace)
        one.wait_stored(keys[-10:], namespace=namespace, timeout_s=60)
        one.lookup(keys, namespace=namespace, wait_s=60)
        one.explain(keys[:3], namespace=namespace)
        other.status()
        other.quota_set("team", {"l1": {"limit_bytes": 1 << 20}}, [namespace.id])
        one.clear(namespace, tiers=True)
        other.tiers_add("mem", {"type": "mock"})
        other.tiers_remove("mem")
    watched.clear()
print(json.dumps(seen))
"""


def test_the_loop_opens_locks_and_asks_nothing_that_may_hang(tmp_path: Path) -> None:
    """By the interpreter's own account of what its thread does."""
    told = subprocess.run(
        [sys.executable, "-c", CALLS_OF_THE_LOOP, str(tmp_path)], stdout=subprocess.PIPE, text=True, check=True
    )
    seen = json.loads(told.stdout)
    assert seen
    assert [(event, what) for event, what in seen if not what.startswith("/proc/")] == []  # of the kernel, in memory


def test_a_log_that_nobody_reads_stalls_neither_start_nor_calls_nor_the_end(tmp_path: Path) -> None:
    from lmcache_core import Client

    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, bytes(4096))
    os.set_blocking(writing, True)
    command = [sys.executable, "-m", "lmcache_core.cli.main", "serve", "--name", "unread", "--log-level", "debug"]
    command += ["--runtime_dir", str(tmp_path / "run"), "--state_dir", str(tmp_path / "state")]
    command += ["--l1.size_bytes", "16MiB", "--l1.backing", "memfd"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=writing, text=True)
    assert server.stdout is not None
    try:
        assert "unread" in server.stdout.readline()
        with Client.connect("unread", runtime_dir=tmp_path / "run") as client:
            for _ in range(100):
                client.noop()
        server.terminate()
        assert server.wait(60) == 0
    finally:
        server.kill()
        server.wait()
        server.stdout.close()
        os.close(reading)
        os.close(writing)
