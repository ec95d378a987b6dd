"""Who is at the other end: several users on one machine, each a process of its own, and none can pass for another.

Runs as root only, for only root can become others. CI is root.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import stat
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from lmcache_core.client.client import Client
from lmcache_core.client.results import Status
from lmcache_core.errors import CacheError, PoolError, UntrustedError, UsageError
from lmcache_core.native import native
from lmcache_core.plugins.loader import load_plugins
from lmcache_core.pool.backing import segment_path
from lmcache_core.pool.clean import CleanState, clean
from lmcache_core.pool.layout import Layout
from lmcache_core.pool.segment import OnStale, Segment
from lmcache_core.protocol import messages as m
from lmcache_core.protocol.address import make_server_directory
from lmcache_core.server.peers import zmq_carrier
from lmcache_core.server.server import Server
from lmcache_core.settings.compose import make_settings
from lmcache_core.tokens.namespace import Namespace
from lmcache_core.trust import Trust, overflow_uid
from lmcache_testing.waiting import WAIT_S

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0,
    reason="NOT TESTED: who is trusted and who is not. Run as root: only root can become several users",
)

needs_native = pytest.mark.skipif(native is None, reason="adoption needs the C extension")
ALICE, BOB, MALLORY = 54001, 54002, 54666
GROUP = 54321
MIB = 1 << 20
NAMESPACE = Namespace("private", Layout("uint8", (4096,)))
KEY = b"k" * 32
PAYLOAD = b"p" * 4096
assert zmq_carrier  # and all that it imports, before a process becomes somebody who may not read this environment


class Users:
    """Processes of other users, forked and not executed: they need nothing that only root can read."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._registry = load_plugins()

    def ask(
        self, uid: int, question: Callable[[], object], gids: tuple[int, ...] = (), maps: tuple[int, ...] | None = None
    ) -> Any:
        """What the function gives in a process of that user; its error as "Name: words" if it is one of ours. `maps`:
        in a user namespace of its own, in which these uids have their names, and no others."""
        return self._fork(uid, gids, question, maps=maps)[0]

    def serve(
        self,
        uid: int,
        root: Path,
        name: str,
        gids: tuple[int, ...] = (),
        maps: tuple[int, ...] | None = None,
        **values: Any,
    ) -> int:
        """A server of that user; the pid."""

        def run() -> None:
            settings = make_settings(name=name, runtime_dir=str(root), state_dir=str(root), **values)
            server = Server(settings, self._registry)
            assert server.parts.populator.wait(WAIT_S)
            with server:
                answered("ready")
                signal.pause()

        said, pid = self._fork(uid, gids, run, stays=True, maps=maps)
        assert said == "ready", said
        return pid

    def stay(self, uid: int, do: Callable[[], object]) -> int:
        """A process of that user that does this, and stays; the pid."""

        def run() -> None:
            kept = do()
            answered("ready")
            signal.pause()
            del kept

        said, pid = self._fork(uid, (), run, stays=True)
        assert said == "ready", said
        return pid

    def _fork(
        self,
        uid: int,
        gids: tuple[int, ...],
        run: Callable[[], object],
        *,
        stays: bool = False,
        maps: tuple[int, ...] | None = None,
    ) -> tuple[object, int]:
        global answer_fd
        reading, writing = os.pipe()
        entered, entering = os.pipe()
        mapped, mapping = os.pipe()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                os.close(reading)
                answer_fd = writing
                if maps:  # as root, who may become each of them in there
                    enter_user_namespace()
                    os.write(entering, b"x")
                    os.read(mapped, 1)
                os.setgroups(gids)
                os.setgid(uid)
                os.setuid(uid)
                if maps == ():
                    enter_user_namespace()
                said = run()
                if not stays:
                    answered(said)
                status = 0
            except CacheError as error:
                answered(f"{type(error).__name__}: {error}")
            except BaseException:  # noqa: BLE001 - whatever it is, the test says it
                answered(traceback.format_exc())
            finally:
                os._exit(status)
        os.close(writing)
        if maps:
            os.read(entered, 1)
            for kind in ("gid_map", "uid_map"):
                Path(f"/proc/{pid}/{kind}").write_text("".join(f"{each} {each} 1\n" for each in maps))
            os.write(mapping, b"x")
        for fd in (entered, entering, mapped, mapping):
            os.close(fd)
        if stays:
            self._stack.callback(end, pid)
        with os.fdopen(reading) as answer:
            said = json.loads(answer.readline() or '"it said nothing"')
        if not stays:
            os.waitpid(pid, 0)
        return said, pid


def enter_user_namespace() -> None:
    """One of this process's own, in which no uid has a name yet."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(0x10000000) != 0:  # CLONE_NEWUSER
        raise OSError(ctypes.get_errno(), "unshare")


def may_enter_user_namespace() -> bool:
    pid = os.fork()
    if pid == 0:
        try:
            enter_user_namespace()
        except OSError:
            os._exit(1)
        os._exit(0)
    return os.waitpid(pid, 0)[1] == 0


in_user_namespaces = pytest.mark.skipif(
    os.geteuid() == 0 and not may_enter_user_namespace(),
    reason="NOT TESTED: users of other user namespaces. This machine lets not even root make one",
)


answer_fd = -1


def answered(said: str | None) -> None:
    os.write(answer_fd, (json.dumps(said) + "\n").encode())


def end(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@pytest.fixture
def users() -> Iterator[Users]:
    with ExitStack() as stack:
        yield Users(stack)


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory as /tmp is: everybody may make something in it, and nobody may replace what is another's."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o1777)
        yield Path(folder)


@pytest.fixture
def name() -> Iterator[str]:
    name = f"t{uuid4().hex[:10]}"
    yield name
    for uid in (0, ALICE, BOB, MALLORY, overflow_uid()):
        segment_path(name, uid=uid).unlink(missing_ok=True)


def store(name: str, root: Path | None = None, *, key: bytes = b"", **options: Any) -> str:
    with Client.connect(name, runtime_dir=root, **options) as client:
        return str(client.store([key or os.urandom(32)], [PAYLOAD], namespace=NAMESPACE).statuses[0])


def ping(name: str, root: Path | None = None, **options: Any) -> str:
    with Client.connect(name, runtime_dir=root, maps_pool=False, **options) as client:
        client.ping()
    return "answered"


def fails(question: Callable[[], object]) -> str:
    with pytest.raises(CacheError) as caught:
        question()
    return str(caught.value)


def belongs_to(path: Path, uid: int) -> Path:
    os.chown(path, uid, uid, follow_symlinks=False)
    return path


# --- directories and sockets ------------------------------------------------------------------------------


def test_a_client_says_nothing_to_a_server_in_the_directory_of_another_user(
    users: Users, shared: Path, name: str
) -> None:
    users.serve(MALLORY, shared / "run", name)  # whoever comes first makes it
    said = fails(lambda: ping(name, shared / "run"))
    assert f"{shared}/run belongs to uid {MALLORY}" in said
    assert f"server_uid={MALLORY}" in said
    assert store(name, shared / "run") == "unreachable"
    assert users.ask(BOB, lambda: store(name, shared / "run")) == "unreachable"
    assert store(name, shared / "run", server_uid=MALLORY) == "stored"  # who says whom it means gets there


def test_the_server_may_be_named_in_the_environment(
    users: Users, shared: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    users.serve(ALICE, shared / "run", name)
    monkeypatch.setenv("LMCACHE_CORE_SERVER_UID", str(ALICE))
    assert ping(name, shared / "run") == "answered"
    monkeypatch.setenv("LMCACHE_CORE_SERVER_UID", "alice")
    with pytest.raises(UsageError, match="must be a numeric uid"):
        ping(name, shared / "run")


def test_a_socket_of_another_user_is_not_connected_to(users: Users, shared: Path, name: str) -> None:
    directory = shared / name
    directory.mkdir()
    directory.chmod(0o1777)  # ours, and everybody may put something into it

    def listen() -> object:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.bind(str(directory / "lifeline"))
        sock.listen()
        return sock

    users.stay(MALLORY, listen)
    assert f"{directory}/lifeline belongs to uid {MALLORY}" in fails(lambda: ping(name, shared))


def test_a_process_of_another_user_behind_our_own_socket_is_told_nothing(users: Users, shared: Path, name: str) -> None:
    (shared / name).mkdir(mode=0o755)
    ours = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.bind(str(shared / name / "lifeline"))
    (shared / name / "lifeline").chmod(0o700)

    def listen() -> object:
        ours.listen()  # from here on the kernel names this process
        return ours

    users.stay(MALLORY, listen)
    said = fails(lambda: ping(name, shared))
    assert f"runs as uid {MALLORY}, not as your uid" in said
    accepted, _ = ours.accept()
    accepted.settimeout(WAIT_S)
    assert accepted.recv(100) == b""  # not even a hello
    accepted.close()
    ours.close()


def test_a_default_directory_that_everybody_may_write_is_not_walked_through(
    users: Users, shared: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = shared / "lmcache-core"
    monkeypatch.delenv("LMCACHE_CORE_RUNTIME_DIR", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(shared))  # of the system's choice, not of ours
    users.serve(0, run, name)
    assert ping(name, None) == "answered"
    run.chmod(0o777)
    assert "is writable by everybody" in fails(lambda: ping(name, None))
    assert "is writable by everybody" in fails(lambda: make_server_directory("other", None))
    run.chmod(0o775)
    os.chown(run, 0, GROUP)
    assert f"is writable by all of group {GROUP}" in fails(lambda: ping(name, None))
    os.chown(run, 0, 0)
    assert ping(name, None) == "answered"


@pytest.mark.parametrize("mode", [0o777, 0o2777, 0o775])
@pytest.mark.parametrize("below", ["", "lmcache-core"])
def test_a_pods_volume_that_everybody_may_write_is_a_runtime_directory_for_a_server_that_is_not_root(
    users: Users, shared: Path, name: str, mode: int, below: str
) -> None:
    """As the kubelet mounts an emptyDir: root's, without the sticky bit, with `fsGroup` in its group."""
    volume = shared / "volume"
    volume.mkdir()
    os.chown(volume, 0, GROUP)
    volume.chmod(mode)
    root = volume / below
    users.serve(ALICE, root, name, gids=(GROUP,), zmq={"ipc": True})
    assert users.ask(ALICE, lambda: ping(name, root), gids=(GROUP,)) == "answered"
    address = f"ipc://{root / name / 'zmq'}"
    assert users.ask(ALICE, lambda: ping(name, root, address=address), gids=(GROUP,)) == "answered"
    assert "not to us" in users.ask(MALLORY, lambda: ping(name, root), gids=(GROUP,))


def test_what_another_user_puts_into_a_pods_volume_is_refused(users: Users, shared: Path, name: str) -> None:
    volume = shared / "volume"
    volume.mkdir()
    volume.chmod(0o777)
    users.serve(MALLORY, volume, name)
    said = users.ask(ALICE, lambda: ping(name, volume))
    assert f"belongs to uid {MALLORY}, not to us" in said
    users.serve(ALICE, volume, "alices")
    (volume / "alices").rename(volume / "moved")  # whoever may write there may do that, or put a link
    (volume / "alices").symlink_to(volume / name)
    os.lchown(volume / "alices", MALLORY, MALLORY)
    assert f"belongs to uid {MALLORY}, not to us" in users.ask(ALICE, lambda: ping("alices", volume))


def test_a_volume_below_a_directory_that_is_closed_to_others_needs_no_name(
    users: Users, shared: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = shared / "closed"
    (closed / "volume").mkdir(parents=True)
    (closed / "volume").chmod(0o777)
    closed.chmod(0o700)
    monkeypatch.delenv("LMCACHE_CORE_RUNTIME_DIR", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(closed / "volume"))
    users.serve(0, closed / "volume" / "lmcache-core", name)
    assert ping(name, None) == "answered"
    closed.chmod(0o711)  # it can be entered now
    assert "is writable by everybody" in fails(lambda: ping(name, None))


@pytest.mark.parametrize("step", ["above", "root", "server", "socket"])
def test_a_symbolic_link_of_another_user_is_followed_at_no_step(
    users: Users, shared: Path, name: str, step: str
) -> None:
    users.serve(0, shared / "real" / "run", name)
    link, target = {
        "above": (shared / "link", shared / "real"),
        "root": (shared / "run", shared / "real" / "run"),
        "server": (shared / "run" / name, shared / "real" / "run" / name),
        "socket": (shared / "run" / name / "lifeline", shared / "real" / "run" / name / "lifeline"),
    }[step]
    link.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    link.symlink_to(target)
    root = shared / "link" / "run" if step == "above" else shared / "run"
    if step == "socket":  # a socket is a socket, whoever made the link
        assert "is not a socket" in fails(lambda: ping(name, root))
    else:
        assert ping(name, root) == "answered"  # our own may point where it likes
    belongs_to(link, MALLORY)
    assert f"belongs to uid {MALLORY}" in fails(lambda: ping(name, root))
    if step != "socket":
        with pytest.raises(UsageError, match=f"belongs to uid {MALLORY}"):
            make_server_directory(name, root)


def test_a_server_makes_nothing_through_a_link_of_another_user(users: Users, shared: Path, name: str) -> None:
    (shared / "precious").mkdir(mode=0o700)
    users.ask(MALLORY, lambda: (shared / "run").symlink_to(shared / "precious"))
    with pytest.raises(UsageError, match=f"the symbolic link .* belongs to uid {MALLORY}"):
        make_server_directory(name, shared / "run")
    assert not list((shared / "precious").iterdir())


def test_a_uid_that_this_user_namespace_does_not_map_is_named_as_what_it_is(
    users: Users, shared: Path, name: str
) -> None:
    users.serve(overflow_uid(), shared / "run", name)  # as a server of another user namespace shows up
    said = fails(lambda: ping(name, shared / "run"))
    assert "every user that is not mapped into this user namespace" in said
    assert "run both sides in the same user namespace" in said
    assert "server_uid" not in said  # it would name every stranger at once


@in_user_namespaces
def test_a_client_in_a_user_namespace_hears_that_it_cannot_tell_who_the_server_is(
    users: Users, shared: Path, name: str
) -> None:
    """Neither root, to whom / belongs, nor the server's user has a name in there."""
    users.serve(ALICE, shared / "run", name)
    said = users.ask(BOB, lambda: fails(lambda: ping(name, shared / "run")), maps=(BOB,))
    assert f"belongs to uid {overflow_uid()}" in said
    assert "every user that is not mapped into this user namespace" in said
    assert "map that user into this one" in said
    assert users.ask(BOB, lambda: store(name, shared / "run"), maps=(BOB,)) == "unreachable"


@in_user_namespaces
def test_the_cure_for_user_namespaces_is_one(users: Users, shared: Path, name: str) -> None:
    users.serve(ALICE, shared / "run", name)
    assert users.ask(ALICE, lambda: store(name, shared / "run"), maps=(0, ALICE)) == "stored"


@in_user_namespaces
@pytest.mark.parametrize("uid", [BOB, overflow_uid()])
def test_a_client_whose_own_user_has_no_name_in_its_namespace_takes_no_stranger_for_itself(
    users: Users, shared: Path, name: str, uid: int
) -> None:
    """Everybody shows up there under the number that it has itself."""
    users.serve(MALLORY, shared / "run", name)
    for path in (shared / "run", shared / "run" / name):
        path.chmod(0o755)
    (shared / "run" / name / "lifeline").chmod(0o666 & ~0o002)
    os.chown(shared / "run" / name / "lifeline", MALLORY, uid)
    said = users.ask(uid, lambda: fails(lambda: ping(name, shared / "run")), maps=())
    assert "every user that is not mapped into this user namespace" in said
    with pytest.raises(AssertionError, match="every user that is not mapped into this user namespace"):
        users.serve(uid, shared / "other", name, maps=())


@in_user_namespaces
def test_a_server_in_a_user_namespace_says_why_it_turns_strangers_away(users: Users, shared: Path, name: str) -> None:
    users.serve(ALICE, shared / "run", name, maps=(0, ALICE))
    assert users.ask(ALICE, lambda: store(name, shared / "run")) == "stored"
    for path in (shared / "run", shared / "run" / name):
        path.chmod(0o755)
    (shared / "run" / name / "lifeline").chmod(0o666 & ~0o002)
    os.chown(shared / "run" / name / "lifeline", ALICE, BOB)
    said = users.ask(BOB, lambda: fails(lambda: ping(name, shared / "run", server_uid=ALICE)))
    assert f"the server sees this process as uid {overflow_uid()}" in said
    assert "run both sides in the same user namespace" in said


# --- segments ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [b"", b"LMCPOOL\0" + bytes(1 << 16)])
def test_a_segment_that_another_user_made_first_is_neither_used_nor_removed(
    users: Users, shared: Path, name: str, content: bytes
) -> None:
    path = segment_path(name, uid=0)

    def make() -> None:
        path.write_bytes(content)
        path.chmod(0o666)

    users.ask(MALLORY, make)
    for on_stale in OnStale:
        with pytest.raises(PoolError, match=f"{path} belongs to uid {MALLORY} but this process runs as uid 0"):
            Segment.create(name, 2 * MIB, runtime_dir=shared / "run", on_stale=on_stale)
    found = path.stat()
    assert (found.st_uid, stat.S_IMODE(found.st_mode), path.read_bytes()) == (MALLORY, 0o666, content)
    (cleaned,) = clean(names=[name])
    assert cleaned.state is CleanState.REFUSED
    assert f"uid {MALLORY}" in cleaned.reason
    assert path.exists()


def test_a_file_that_somebody_may_have_open_is_never_filled(shared: Path, name: str) -> None:
    path = segment_path(name)
    path.touch()
    path.chmod(0o666)
    with path.open("r+b") as before, Segment.create(name, 2 * MIB, runtime_dir=shared / "run") as segment:
        assert os.fstat(before.fileno()).st_ino != path.stat().st_ino
        assert os.fstat(before.fileno()).st_size == 0
        assert not segment.recreated


def test_a_worker_maps_no_segment_of_another_user_by_its_name(users: Users, shared: Path, name: str) -> None:
    def make() -> object:
        return Segment.create(name, 2 * MIB, runtime_dir=shared / "theirs")

    users.stay(MALLORY, make)
    segment_path(name, uid=MALLORY).rename(segment_path(name, uid=0))
    with pytest.raises(PoolError, match=f"belongs to uid {MALLORY}"):
        Segment.attach_name(name)
    Segment.attach_name(name, trust=Trust.of_client(MALLORY)).close()


def test_two_users_have_servers_of_one_name(users: Users, shared: Path, name: str) -> None:
    users.serve(ALICE, shared / "alice", name)
    users.serve(BOB, shared / "bob", name)
    assert users.ask(ALICE, lambda: store(name, shared / "alice")) == "stored"
    assert users.ask(BOB, lambda: store(name, shared / "bob")) == "stored"
    assert segment_path(name, uid=ALICE).stat().st_uid == ALICE
    assert segment_path(name, uid=BOB).stat().st_uid == BOB


# --- who may connect, and what they may do ----------------------------------------------------------------


def test_a_group_that_is_listed_may_connect_and_others_may_not(users: Users, shared: Path, name: str) -> None:
    (shared / "run").mkdir(mode=0o755)
    belongs_to(shared / "run", ALICE)
    users.serve(ALICE, shared / "run", name, (GROUP,), l1={"access": "group", "gids": (GROUP,)})
    # Both sides have to trust: the server lists the group, and the client names the server's uid.
    assert users.ask(BOB, lambda: store(name, shared / "run", server_uid=ALICE), (GROUP,)) == "stored"
    assert users.ask(BOB, lambda: store(name, shared / "run"), (GROUP,)) == "unreachable"
    assert users.ask(BOB, lambda: store(name, shared / "run", server_uid=ALICE)) == "unreachable"
    assert users.ask(ALICE, lambda: store(name, shared / "run")) == "stored"
    assert store(name, shared / "run", server_uid=ALICE) == "stored"  # root


def test_who_is_turned_away_hears_why(users: Users, shared: Path, name: str) -> None:
    def say() -> str:
        return fails(lambda: ping(name, shared / "run"))

    users.serve(0, shared / "run", name)
    for path in (shared / "run", shared / "run" / name):
        path.chmod(0o755)
    (shared / "run" / name / "lifeline").chmod(0o666 & ~0o002 | 0o060)
    os.chown(shared / "run" / name / "lifeline", 0, GROUP)
    assert f"refuses uid {BOB}:" in users.ask(BOB, say, (GROUP,))
    assert "every user that is not mapped into its user namespace" in users.ask(overflow_uid(), say, (GROUP,))
    with Client.connect(name, runtime_dir=shared / "run", maps_pool=False) as client:
        status = client.status()
    assert status["counters"]["refused_peers"] >= 2
    assert [each["uid"] for each in status["sessions"]] == [0]


def test_a_session_clears_what_it_has_registered_and_nothing_else(users: Users, shared: Path, name: str) -> None:
    (shared / "run").mkdir(mode=0o755)
    belongs_to(shared / "run", ALICE)
    users.serve(ALICE, shared / "run", name, (GROUP,), l1={"access": "group", "gids": (GROUP,)})
    assert users.ask(ALICE, lambda: store(name, shared / "run", key=KEY)) == "stored"
    other = Namespace("bob's own", Layout("uint8", (4096,)))

    def try_all() -> dict[str, str]:
        said = {}
        with Client.connect(name, runtime_dir=shared / "run", server_uid=ALICE) as client:
            requests: dict[str, m.Message] = {
                "everything": m.Clear(0, None),
                "theirs": m.Clear(0, NAMESPACE.id),
                "dropped": m.Drop(0, NAMESPACE.id, KEY, bytes(8), tiers=True),
                "damaged": m.ReportDamaged(0, 1 << 40 | 1, count=1),
                "pin": m.Pin(0, NAMESPACE.id, KEY, 60.0),
                "unpin": m.Unpin(0, NAMESPACE.id, KEY),
            }
            for what, request in requests.items():
                try:
                    client.links.current(patient=True).channel.call(request)
                    said[what] = "done"
                except CacheError as error:
                    said[what] = str(error)
            client.store([KEY], [PAYLOAD], namespace=other)
            said["seen"] = json.dumps(client.status()) + json.dumps(client.quotas())
            said["own"] = str(client.clear(other).objects)
        return said

    said = users.ask(BOB, try_all, (GROUP,))
    assert "this session may not clear everything" in said["everything"]
    assert f"uid {ALICE}" in said["everything"]
    assert "register_layout first" in said["theirs"]
    assert "this session may not drop" in said["dropped"]
    assert "lease" in said["damaged"]  # by a lease of its own, for what it has read
    for what in ("pin", "unpin"):
        assert "is not registered in this session" in said[what]
    assert said["own"] == "1"
    assert f"{other.id:016x}" in said["seen"]
    assert f"{NAMESPACE.id:016x}" not in said["seen"]

    def clear_all() -> int:
        with Client.connect(name, runtime_dir=shared / "run", maps_pool=False) as client:
            return client.links.current(patient=True).channel.call(m.Clear(0, NAMESPACE.id)).objects

    assert users.ask(ALICE, clear_all) == 1  # the server's own user need not know it


# --- over ZMQ ---------------------------------------------------------------------------------------------


def test_over_ipc_the_server_hears_nothing_from_other_users(users: Users, shared: Path, name: str) -> None:
    path = shared / "zmq"
    users.serve(ALICE, shared / "run", name, zmq={"ipc": str(path)})
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o660)
    os.chown(path, ALICE, GROUP)  # even where the socket itself were open to them
    address = f"ipc://{path}"

    def lookup(**options: Any) -> str:
        with Client.connect(address=address, maps_pool=False, **options) as client:
            return str(client.lookup([KEY], namespace=NAMESPACE).statuses[0])

    assert users.ask(BOB, lambda: lookup(server_uid=ALICE), (GROUP,)) == str(Status.UNREACHABLE)
    assert users.ask(ALICE, lookup) == str(Status.MISS)
    assert lookup(server_uid=ALICE) == str(Status.MISS)  # root


def test_over_ipc_a_client_connects_to_no_socket_of_another_user(users: Users, shared: Path, name: str) -> None:
    users.serve(MALLORY, shared / "run", name, zmq={"ipc": str(shared / "zmq")})
    with Client.connect(address=f"ipc://{shared}/zmq", maps_pool=False) as client:
        assert f"{shared}/zmq belongs to uid {MALLORY}" in fails(client.ping)
    with Client.connect(address="ipc://@abstract", maps_pool=False) as client:
        assert "no owner to check" in fails(client.ping)


def test_over_ipc_a_worker_maps_the_pool_of_the_server_that_it_trusts(users: Users, shared: Path, name: str) -> None:
    users.serve(ALICE, shared / "run", name, zmq={"ipc": str(shared / "zmq")})
    address = f"ipc://{shared}/zmq"
    assert users.ask(ALICE, lambda: store(name, address=address)) == "stored"
    assert store(name, address=address, server_uid=ALICE) == "stored"


def test_an_untrusted_end_is_an_unreachable_one_to_whoever_does_not_ask(users: Users, shared: Path, name: str) -> None:
    users.serve(MALLORY, shared / "run", name)
    with Client.connect(name, runtime_dir=shared / "run") as client:
        assert client.lookup([KEY], namespace=NAMESPACE).statuses[0] is Status.UNREACHABLE
    with pytest.raises(UntrustedError):
        Trust.of_client().open_socket_directory(shared / "run" / name / "lifeline")
