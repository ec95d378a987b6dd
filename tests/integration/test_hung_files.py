"""Whatever path of a server hangs, at whichever call: it is late for whoever asked for it, and for nobody else.

A library between the server and libc (hung_files.c) holds every call below one path, and notes what a thread asks of
any file system or name service: also what the interpreter's audit does not see, as `stat`, `fsync` and calls from C.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lmcache_core import Client, Layout, Namespace
from lmcache_core.errors import CacheError
from lmcache_lab.record import start_recording, stop_recording
from lmcache_testing.waiting import until

pytest.importorskip("lmcache_fs")
COMPILER = shutil.which("gcc") or shutil.which("cc")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is no C compiler")

NBYTES = 65536
NAMESPACE = Namespace("a model", Layout("uint8", (NBYTES,)))
KEYS = [number.to_bytes(32, "big") for number in range(300)]
FOLDERS = ("run", "state", "disk", "events", "recording")
IN_MEMORY = ("/proc/", "/dev/shm/", "/sys/fs/cgroup/", "anon_inode:", "/dev/null")  # the kernel's own: they do not hang
# Limits are read by name when a module is loaded.
QUICK = (
    "from lmcache_core import limits; limits.STATE_CALL_S = limits.START_STEP_S = 1.0; limits.NAME_REMOVE_S = 0.5; "
    "from lmcache_core.cli.main import main; raise SystemExit(main())"
)


class Page(ctypes.Structure):
    """`struct page` of hung_files.c."""

    _fields_ = [
        ("armed", ctypes.c_uint),
        ("hanging", ctypes.c_uint),
        ("watched", ctypes.c_uint),
        ("noted", ctypes.c_uint),
        ("below", ctypes.c_char * 4096),
        ("notes", ctypes.c_char * (1 << 20)),
    ]


class SlowNode:
    """A server whose file systems the test holds."""

    def __init__(self, folder: Path, library: Path) -> None:
        self.folder = folder
        for name in FOLDERS:
            (folder / name).mkdir(mode=0o700)
        path = folder / "page"
        path.write_bytes(bytes(ctypes.sizeof(Page)))
        with path.open("r+b") as file:
            self._mapped = mmap.mmap(file.fileno(), ctypes.sizeof(Page))
        self.page = Page.from_buffer(self._mapped)
        self._environment = {**os.environ, "LD_PRELOAD": str(library), "HUNG_FILES": str(path)}
        self.process: subprocess.Popen[str] | None = None

    def hang(self, below: str) -> None:
        """From now on."""
        self.page.below = below.encode()
        self.page.armed = 1

    def begin(self, *options: str) -> subprocess.Popen[str]:
        """Start it; it is its own main thread's id."""
        at = self.folder
        command = [sys.executable, "-c", QUICK, "serve", "--name", "held", "--drain_s", "1"]
        command += ["--runtime_dir", f"{at}/run", "--state_dir", f"{at}/state"]
        command += ["--l1.size_bytes", "32MiB", "--l1.backing", "memfd", "--zmq.ipc", "true"]
        command += ["--l2.disk.type", "fs", "--l2.disk.path", f"{at}/disk", "--l2.disk.capacity_bytes", "16MiB"]
        command += ["--subscribers.jsonl.path", f"{at}/events/lines.jsonl", *options]
        self.process = subprocess.Popen(
            command, env=self._environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        return self.process

    def serve(self, *options: str) -> subprocess.Popen[str]:
        process = self.begin(*options)
        assert process.stdout is not None
        assert process.stderr is not None
        assert "ready" in process.stdout.readline() or pytest.fail(process.stderr.read())
        return process

    def client(self, **more: Any) -> Client:
        return Client.connect("held", runtime_dir=self.folder / "run", **more)

    def close(self) -> None:
        self.page.armed = 0
        if self.process is not None:
            self.process.kill()
            self.process.communicate()


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = tmp_path_factory.mktemp("hung") / "hung_files.so"
    source = Path(__file__).with_name("hung_files.c")
    subprocess.run([str(COMPILER), "-shared", "-fPIC", "-O1", "-Wall", "-o", built, source, "-ldl"], check=True)
    return built


@pytest.fixture
def node(tmp_path: Path, library: Path) -> Iterator[SlowNode]:
    made = SlowNode(tmp_path, library)
    yield made
    made.close()


def test_the_loop_asks_nothing_of_a_file_system_through_a_whole_day_and_its_end(node: SlowNode) -> None:
    process = node.serve()
    with node.client() as one, node.client(maps_pool=False) as tool:
        one.store(KEYS[:1], [bytes(NBYTES)], namespace=NAMESPACE)
        node.page.watched = process.pid
        for first in range(0, 300, 100):
            one.store(KEYS[first : first + 100], [bytes(NBYTES)] * 100, namespace=NAMESPACE)
        one.lookup(KEYS, namespace=NAMESPACE, wait_s=60)
        one.explain(KEYS[:3], namespace=NAMESPACE)
        start_recording(tool, node.folder / "recording")
        one.lookup(KEYS, namespace=NAMESPACE, wait_s=60)
        stop_recording(tool)
        tool.quota_set("team", {"l1": {"limit_bytes": 1 << 20}}, [NAMESPACE.id])
        tool.quota_remove("team")
        one.clear(NAMESPACE, tiers=True)
        tool.tiers_add("spare", {"type": "mock"})
        tool.tiers_drain("spare")
        tool.tiers_remove("spare")
        with pytest.raises(CacheError):
            tool.tiers_add("wrong", {"type": "no such type"})
        with node.client(use_index=False) as late:
            late.lookup(KEYS[:2], namespace=NAMESPACE)
        tool.status()
    process.terminate()
    assert process.wait(60) == 0
    assert 0 < node.page.noted < 1 << 20
    noted = [line.split(" ", 1) for line in node.page.notes.decode().splitlines()]
    assert [(call, path) for call, path in noted if not path.startswith(IN_MEMORY)] == []


def cleared(client: Client, folder: Path) -> None:
    client.clear(NAMESPACE, tiers=True)


def limited(client: Client, folder: Path) -> None:
    client.quota_set("team", {"l1": {"limit_bytes": 1 << 20}}, [NAMESPACE.id])


def recorded(client: Client, folder: Path) -> None:
    start_recording(client, folder / "recording")


def stored(client: Client, folder: Path) -> None:
    client.store(KEYS[100:110], [bytes(NBYTES)] * 10, namespace=NAMESPACE)


@pytest.mark.parametrize(
    ("below", "asks", "words"),
    [
        ("state/held.epochs", cleared, "the state directory has not answered"),
        ("state/held.quotas.json", limited, "the state directory has not answered"),
        ("recording", recorded, "it has not answered for 1 s"),
        ("run", stored, ""),
        ("disk", stored, ""),
        ("events", stored, ""),
    ],
)
def test_a_path_that_hangs_is_late_for_who_asked_and_keeps_no_server_from_its_end(
    node: SlowNode, below: str, asks: Callable[[Client, Path], None], words: str
) -> None:
    process = node.serve()
    answers: list[str] = []
    with node.client() as one, node.client(maps_pool=False) as other:
        stored(one, node.folder)
        node.hang(f"{node.folder}/{below}")

        def ask() -> None:
            try:
                asks(one, node.folder)
                answers.append("")
            except CacheError as error:
                answers.append(str(error))

        caller = threading.Thread(target=ask)
        caller.start()
        until(lambda: node.page.hanging)
        for _ in range(50):
            other.noop()  # raises if it is not answered
        assert node.page.hanging, "the other client's calls were answered while it hung"
        caller.join(60)
        assert words in answers[0]
        assert bool(words) == bool(answers[0])
        assert node.page.hanging
    process.terminate()
    assert process.wait(60) == 0
    assert node.page.armed


def test_a_tier_whose_name_service_hangs_costs_nobody_else_anything(node: SlowNode) -> None:
    pytest.importorskip("lmcache_redis")
    node.hang("slow.example")
    process = node.serve("--l2.far.type", "redis", "--l2.far.host", "slow.example")
    with node.client() as one, node.client(maps_pool=False) as other:
        stored(one, node.folder)
        until(lambda: node.page.hanging)
        for _ in range(50):
            other.noop()
        assert node.page.hanging
    process.terminate()
    assert process.wait(60) == 0


@pytest.mark.parametrize(
    ("below", "names"),
    [
        ("run", "runtime_dir"),
        ("state", "the state directory"),
        ("disk", "tier 'disk'"),
        ("events", "subscribers.jsonl"),
        ("recording", "operations.record has not come up|cannot record into"),  # whichever limit comes first
    ],
)
def test_a_start_fails_in_words_when_a_path_of_the_settings_hangs(node: SlowNode, below: str, names: str) -> None:
    node.hang(f"{node.folder}/{below}")
    options = ("--record", f"{node.folder}/recording") if below == "recording" else ()
    _, told = node.begin(*options).communicate(timeout=60)
    assert any(name in told.splitlines()[-1] for name in names.split("|"))
    assert "hangs" in told.splitlines()[-1]
    assert node.process is not None
    assert node.process.returncode == 2
