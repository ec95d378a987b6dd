"""As a container sees it: namespaces of its own, a small /dev/shm, a read-only root, no root, no capabilities.

No container engine is needed: `unshare` makes what one would make. Root is, so this is skipped for others.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

UID = 2000
NAME = "default"
WAIT_S = 60.0
MEMORY_GROUPS = Path("/sys/fs/cgroup/memory")  # version 1

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None or shutil.which("setpriv") is None,
    reason="NOT CHECKED: fresh namespaces need root, unshare and setpriv",
)

# Mounts are made inside: everything read-only but the folders that are named, and a /dev/shm as Docker gives it.
INSIDE = """
set -e
mount --make-rprivate /
mount -t tmpfs -o size=64m,mode=1777 tmpfs /dev/shm
for folder in "$SHARED" "$OWN"; do mount --bind "$folder" "$folder"; done
mount -o remount,bind,ro /
for folder in "$SHARED" "$OWN"; do mount -o remount,bind,rw "$folder"; done
cd "$OWN"
exec setpriv --reuid {uid} --regid {uid} --clear-groups --no-new-privs --bounding-set -all --inh-caps=-all "$@"
"""

ENGINE = """
import sys, time
from lmcache_core import Client, Layout, Namespace
ns = Namespace("model", Layout("uint8", (65536,)))
keys = [str(at).encode().rjust(32, b"0") for at in range(8)]
objects = [bytes([at + 1]) * 65536 for at in range(8)]
client = Client.connect("default", runtime_dir=sys.argv[1])
deadline = time.monotonic() + 60
def until(condition):
    while not condition() and time.monotonic() < deadline: time.sleep(0.01)
until(lambda: (found := client.status())["pool"]["populated_bytes"] >= found["l1"]["pool_bytes"])
"""


class Container:
    """A process in namespaces of its own: mounts, processes, IPC and network."""

    def __init__(self, shared: Path, own: Path, argv: list[str], uid: int = UID, group: Path | None = None) -> None:
        self._group = group
        environment = {"PATH": os.environ["PATH"], "SHARED": str(shared), "OWN": str(own), "HOME": str(own)}
        self.popen = subprocess.Popen(
            ["unshare", "--mount", "--pid", "--ipc", "--net", "--fork", "--mount-proc",
             "sh", "-c", INSIDE.format(uid=uid), "sh", *argv],
            env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            preexec_fn=self._join,
        )  # fmt: skip

    def _join(self) -> None:
        if self._group is not None:
            (self._group / "cgroup.procs").write_text(str(os.getpid()))

    def line(self) -> str:
        assert self.popen.stdout is not None
        text = self.popen.stdout.readline().strip()
        if not text and self.popen.stderr is not None:
            raise AssertionError(f"it ended: {self.popen.stderr.read()[-3000:]}")
        return text

    def go(self) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.write("\n")
        self.popen.stdin.flush()

    def kill(self) -> None:
        """SIGKILL for the first process of its namespace, and with it for all of them."""
        pid = self.popen.pid
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
                os.kill(int(child), signal.SIGKILL)

    def end(self) -> tuple[int, str]:
        """Wait for it. Its status, and what it said on standard error."""
        _, said = self.popen.communicate(timeout=WAIT_S)
        return self.popen.returncode, said


class Pods:
    """A folder of the node that all pods share, and one for each of them."""

    def __init__(self, tmp_path: Path) -> None:
        self.shared = self._folder(tmp_path, "sockets")
        self._tmp_path = tmp_path
        self.running: list[Container] = []

    def _folder(self, parent: Path, name: str) -> Path:
        folder = parent / name
        folder.mkdir()
        os.chown(folder, UID, UID)
        folder.chmod(0o750)
        return folder

    def start(self, *argv: object, uid: int = UID, group: Path | None = None) -> Container:
        own = self._folder(self._tmp_path, uuid4().hex)
        container = Container(self.shared, own, [str(each) for each in argv], uid, group)
        self.running.append(container)
        return container

    def serve(self, *options: str, group: Path | None = None) -> Container:
        return self.start(
            sys.executable, "-m", "lmcache_core.cli.main", "serve", "--runtime_dir", self.shared, *options, group=group
        )

    def engine(self, code: str, uid: int = UID) -> Container:
        return self.start(sys.executable, "-c", ENGINE + code, self.shared, uid=uid)


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[Pods]:
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.geteuid() and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o111)  # on the way to what is theirs
    found = Pods(tmp_path)
    yield found
    for container in found.running:
        container.kill()
        container.popen.communicate(timeout=WAIT_S)


def test_pods_without_root_or_capabilities_share_a_pool_over_nothing_but_a_socket_folder(pods: Pods) -> None:
    server = pods.serve("--l1.size_bytes", "128MiB", "--l1.backing", "memfd")
    assert "ready" in server.line()
    writer = pods.engine("print(client.store(keys, objects, namespace=ns).stored, flush=True); client.close()")
    assert writer.line() == "8"
    reader = pods.engine(
        "into = [bytearray(65536) for _ in keys]\n"
        "hits = client.retrieve(keys, into, namespace=ns).hits\n"
        "print(hits, into == objects, flush=True)"
    )
    assert reader.line() == "8 True"


def test_a_killed_engine_in_another_pid_namespace_gives_its_slots_back(pods: Pods) -> None:
    server = pods.serve("--l1.size_bytes", "128MiB", "--l1.backing", "memfd")
    assert "ready" in server.line()
    engine = pods.engine("lease = client.prepare_store(keys, namespace=ns); print('holds', flush=True); input()")
    assert engine.line() == "holds"
    other = pods.engine(
        "print(client.store(keys, objects, namespace=ns).stored, flush=True)\n"
        "input()\n"
        "until(lambda: client.store(keys, objects, namespace=ns).stored)\n"
        "print(client.lookup(keys, namespace=ns).hits, flush=True)"
    )
    assert other.line() == "0"  # somebody is writing these
    engine.kill()
    other.go()
    assert other.line() == "8"


def test_a_pool_that_does_not_fit_into_the_containers_shm_is_refused_with_the_cure(pods: Pods) -> None:
    status, said = pods.serve("--l1.size_bytes", "128MiB").end()
    assert status == 2
    assert "0.06 GiB" in said
    assert "shm-size" in said or "memfd" in said


@pytest.mark.skipif(
    not (MEMORY_GROUPS / "cgroup.procs").exists(), reason="NOT CHECKED: no memory control group, version 1"
)
def test_a_pool_that_exceeds_the_memory_limit_is_refused_before_the_kernel_kills_it(pods: Pods) -> None:
    group = MEMORY_GROUPS / f"lmcache-core-{uuid4().hex[:10]}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(256 << 20))
        status, said = pods.serve("--l1.size_bytes", "512MiB", "--l1.backing", "memfd", group=group).end()
        assert status == 2
        assert "control group" in said
    finally:
        group.rmdir()
