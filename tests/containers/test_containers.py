"""As a container sees it: namespaces of its own, a small /dev/shm, a read-only root, no root, no capabilities.

No container engine is needed: `unshare` makes what one would make. Root is, so this is skipped for others.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

import lmcache_core

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

# In a user namespace where the node's root is nobody, `/` is nobody's, too, and is not to be trusted: so a root of its
# own, as an image is, made by the node's root, with the shared folder at /sockets.
IMAGE = """
set -e
mount --make-rprivate /
mount -t tmpfs -o mode=755 tmpfs "$OWN"
mkdir "$OWN/sockets" "$OWN/tmp"
for each in $FOLDERS; do
    mkdir -p "$OWN$each"
    chmod 755 "$OWN$each"
done
chown -R {first}:{first} "$OWN"
for each in $FOLDERS; do mount --rbind "$each" "$OWN$each"; done
for each in /*; do [ ! -L "$each" ] || cp -P "$each" "$OWN/"; done
mount --bind "$SHARED" "$OWN/sockets"
"""
USER_INSIDE = """
set -e
mount -t proc proc "$OWN/proc"
mount -t tmpfs -o size=64m,mode=1777 tmpfs "$OWN/dev/shm"
cd "$OWN"
exec chroot "$OWN" \\
    setpriv --reuid {uid} --regid {uid} --clear-groups --no-new-privs --bounding-set -all --inh-caps=-all "$@"
"""
FIRST_UID = 200_000  # of the node: 0 in such a namespace
CLONE_NEWUSER, CLONE_NEWNS = 0x10000000, 0x20000

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

    def __init__(
        self,
        shared: Path,
        own: Path,
        argv: list[str],
        uid: int = UID,
        group: Path | None = None,
        *,
        maps_users: bool = False,
    ) -> None:
        """`maps_users`: in a user namespace of its own, too, where `FIRST_UID` and on have names, and root has none."""
        self._group = group
        self._maps_users = maps_users
        inside = USER_INSIDE if maps_users else INSIDE
        environment = {"PATH": os.environ["PATH"], "SHARED": str(shared), "OWN": str(own), "HOME": str(own)}
        if maps_users:
            environment |= {"HOME": "/tmp", "FOLDERS": " ".join(_image_folders())}
        self._environment = environment
        self.popen = subprocess.Popen(
            ["unshare", "--mount", "--pid", "--ipc", "--net", "--fork", *([] if maps_users else ["--mount-proc"]),
             "sh", "-c", inside.format(uid=uid), "sh", *argv],
            env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            preexec_fn=self._join,
        )  # fmt: skip

    def _join(self) -> None:
        if self._group is not None:
            (self._group / "cgroup.procs").write_text(str(os.getpid()))
        if self._maps_users:
            _unshare(CLONE_NEWNS)
            subprocess.run(["sh", "-c", IMAGE.format(first=FIRST_UID)], env=self._environment, check=True)
            _enter_user_namespace()

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


def _image_folders() -> list[str]:
    """What Python and our packages are in, and the system's own folders; none within another."""
    ours = {sys.prefix, sys.base_prefix, str(Path(lmcache_core.__file__).parent)}
    ours |= {str(Path(each).resolve()) for each in sys.path if each and Path(each).is_dir()}
    system = [each for each in ("/usr", "/etc", "/dev", "/proc", "/lib", "/lib64") if not Path(each).is_symlink()]
    folders = sorted(each for each in {*system, *ours} if Path(each).is_dir() and each != "/")
    return [each for each in folders if not any(each.startswith(f"{other}/") for other in folders)]


def _unshare(flags: int) -> None:
    if ctypes.CDLL(None, use_errno=True).unshare(flags):
        raise OSError(ctypes.get_errno(), "unshare")


def _enter_user_namespace() -> None:
    """Whoever writes the map has to stand outside."""
    entered, entering = os.pipe()
    inner = os.getpid()
    outside = os.fork()
    if outside == 0:
        os.close(entering)
        if os.read(entered, 1):
            for name in ("uid_map", "gid_map"):
                Path(f"/proc/{inner}/{name}").write_text(f"0 {FIRST_UID} 65536")
        os._exit(0)
    _unshare(CLONE_NEWUSER)
    os.write(entering, b"!")
    os.waitpid(outside, 0)
    os.setgroups([])
    os.setgid(0)
    os.setuid(0)


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


class UserPods(Pods):
    """The same in user namespaces."""

    def _folder(self, parent: Path, name: str) -> Path:
        folder = super()._folder(parent, name)
        os.chown(folder, FIRST_UID + UID, FIRST_UID + UID)
        return folder

    def start(self, *argv: object, uid: int = UID, group: Path | None = None) -> Container:
        own = self._folder(self._tmp_path, uuid4().hex)
        told = ["/sockets" if each == self.shared else str(each) for each in argv]
        self.running.append(Container(self.shared, own, told, uid, group, maps_users=True))
        return self.running[-1]


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


@pytest.fixture
def user_pods(tmp_path: Path, pods: Pods) -> Iterator[UserPods]:
    (tmp_path / "users").mkdir()
    found = UserPods(tmp_path / "users")
    try:
        status, said = found.start("true").end()
    except (OSError, subprocess.SubprocessError) as error:  # what preexec_fn raised
        status, said = 1, str(error)
    if status:
        pytest.skip(f"NOT CHECKED: no user namespace without root of the node can be had here: {said.strip()}")
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


def test_pods_whose_user_namespace_has_no_root_of_the_node_share_a_pool(user_pods: UserPods) -> None:
    server = user_pods.serve("--l1.size_bytes", "128MiB", "--l1.backing", "memfd", "--state_dir", "/sockets/state")
    assert "ready" in server.line()
    writer = user_pods.engine("print(client.store(keys, objects, namespace=ns).stored, flush=True); client.close()")
    assert writer.line() == "8"
    reader = user_pods.engine(
        "into = [bytearray(65536) for _ in keys]\n"
        "hits = client.retrieve(keys, into, namespace=ns).hits\n"
        "print(hits, into == objects, open('/proc/self/uid_map').read().split(), flush=True)"
    )
    assert reader.line() == f"8 True {['0', str(FIRST_UID), '65536']}"


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
