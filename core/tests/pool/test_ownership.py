"""One server for one pool name, whoever dies and however."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from lmcache_core.errors import PoolBusyError, PoolError
from lmcache_core.limits import CLAIM_BACKLOG
from lmcache_core.pool import header
from lmcache_core.pool.backing import segment_path
from lmcache_core.pool.claim import Claim, listener_at
from lmcache_core.pool.clean import CleanState, clean
from lmcache_core.pool.header import PoolInfo
from lmcache_core.pool.lifelock import LifeLock
from lmcache_core.pool.segment import OnStale, Segment, name_exists

from .conftest import Child

MIB = 1 << 20
Make = Callable[..., Segment]

SERVE = """
    import os, sys
    from pathlib import Path
    from lmcache_core.pool.segment import Segment
    from lmcache_core.pool.populate import Populator
    name, data_mib, run, shm = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4])
    segment = Segment.create(name, data_mib << 20, sys.argv[5], runtime_dir=run, shm_dir=shm)
    populator = Populator(segment, on_progress=lambda n: None, on_error=print)
    populator.start()
    populator.wait()
    print(populator.done, segment.recreated, flush=True)
"""
WAIT = "    input()\n"
DEV_SHM = Path("/dev/shm")


@pytest.mark.parametrize(
    ("backing", "words"), [("shm", "an orderly end .* l1.keep_pool"), ("memfd", 'l1.backing is "memfd"')]
)
def test_a_pool_that_nobody_left_says_why_it_is_cold(make: Make, backing: str, words: str) -> None:
    assert re.search(words, make(backing=backing).why_cold)


@pytest.mark.parametrize("backing", ["shm", "memfd"])
def test_a_second_server_is_refused_and_told_who_lives(
    spawn: Callable[..., Child], pool_name: str, runtime_dir: Path, backing: str
) -> None:
    server = spawn(SERVE + WAIT, pool_name, 4, runtime_dir, DEV_SHM, backing)
    assert server.read() == "True False"
    with pytest.raises(PoolBusyError, match=f"pid {server.pid}"):
        Segment.create(pool_name, 4 * MIB, backing, runtime_dir=runtime_dir)
    # The loser has left everything as it was.
    with pytest.raises(PoolBusyError):
        Segment.create(pool_name, 4 * MIB, backing, runtime_dir=runtime_dir)


def test_a_server_with_another_runtime_directory_is_refused_too(make: Make, tmp_path: Path) -> None:
    segment = make()
    with pytest.raises(PoolBusyError, match=f"pid {os.getpid()}"):
        Segment.create(segment.info.name, 4 * MIB, runtime_dir=tmp_path / "elsewhere")
    assert name_exists(segment)
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_killed_servers_pool_is_recreated_within_one_pools_memory(
    spawn: Callable[..., Child], small_mount: Callable[[int], Path], pool_name: str, runtime_dir: Path
) -> None:
    shm = small_mount(64)  # holds one pool of 48 MiB, and never two
    server = spawn(SERVE + WAIT, pool_name, 48, runtime_dir, shm, "shm")
    assert server.read() == "True False"
    with Segment.attach_name(pool_name, shm_dir=shm) as worker:
        old = worker.view(worker.info.data_offset, worker.info.data_bytes)
        old[:4] = b"mine"
        server.kill()
        successor = spawn(SERVE + WAIT, pool_name, 48, runtime_dir, shm, "shm")
        assert successor.read() == "True True"
        # The old mapping reads zeros to its end, without a SIGBUS, and shares nothing with the new one. Only
        # a part of it is read: each page costs the mount one again, and there is no room for all of them.
        assert not any(old[:: 64 * 4096])
        assert not name_exists(worker)
        with Segment.attach_name(pool_name, shm_dir=shm) as again:
            assert again.info.boot_id != worker.info.boot_id
        del old


def test_a_stale_pool_of_another_size_is_recreated(
    spawn: Callable[..., Child], make: Make, pool_name: str, runtime_dir: Path
) -> None:
    server = spawn(SERVE + WAIT, pool_name, 8, runtime_dir, DEV_SHM, "shm")
    server.read()
    server.kill()
    segment = make(2 * MIB)
    assert segment.recreated
    assert segment_path(pool_name).stat().st_size == segment.info.nbytes


@pytest.mark.parametrize("garbage", [b"", b"x", bytes(5000), b"LMCPOOL\0" + bytes(9000)])
def test_garbage_under_the_pools_name_is_replaced(make: Make, pool_name: str, garbage: bytes) -> None:
    segment_path(pool_name).write_bytes(garbage)
    segment = make()
    assert segment.recreated == bool(garbage)
    Segment.attach_name(pool_name, segment.info).close()


def test_a_stale_pool_is_refused_where_settings_say_so(
    spawn: Callable[..., Child], make: Make, pool_name: str, runtime_dir: Path
) -> None:
    server = spawn(SERVE + WAIT, pool_name, 4, runtime_dir, DEV_SHM, "shm")
    server.read()
    server.kill()
    with pytest.raises(PoolError, match="lmcache-core clean"):
        make(on_stale=OnStale.REFUSE)
    assert segment_path(pool_name).exists()


@pytest.mark.parametrize("backing", ["shm", "memfd"])
def test_a_descriptor_with_a_worker_does_not_keep_a_dead_server_alive(
    spawn: Callable[..., Child], make: Make, pool_name: str, runtime_dir: Path, backing: str
) -> None:
    script = """
        import array, socket, time
        ends = socket.socket(fileno=int(sys.argv[6]))
        fd = segment.worker_fd()
        ends.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))])
        input()
    """
    ours, theirs = socket.socketpair()
    arguments = [pool_name, "4", str(runtime_dir), str(DEV_SHM), backing, str(theirs.fileno())]
    source = textwrap.dedent(SERVE) + textwrap.dedent(script)
    with (
        ours,
        theirs,
        subprocess.Popen(
            [sys.executable, "-c", source, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
        ) as server,
    ):
        _, (fd,), _, _ = socket.recv_fds(ours, 1, 1)
        server.kill()
        server.wait(60)
    info = _info_of(fd)
    with Segment.attach_fd(fd, info) as worker:
        life = LifeLock.acquire(worker, 0)
        segment = make(backing=backing)
        assert segment.info.boot_id != worker.info.boot_id
        life.close()


def _info_of(fd: int) -> PoolInfo:
    return header.decode(os.pread(fd, header.HEADER_BYTES, 0)).info


def test_of_many_servers_at_once_exactly_one_wins(
    spawn: Callable[..., Child], pool_name: str, runtime_dir: Path
) -> None:
    dead = spawn(SERVE + WAIT, pool_name, 4, runtime_dir, DEV_SHM, "shm")
    dead.read()
    dead.kill()
    script = """
        import sys
        from pathlib import Path
        from lmcache_core.errors import PoolBusyError
        from lmcache_core.pool.segment import Segment
        print("ready", flush=True)
        input()
        try:
            segment = Segment.create(sys.argv[1], 4 << 20, runtime_dir=Path(sys.argv[2]))
            print(segment.info.boot_id, flush=True)
        except PoolBusyError:
            print("refused", flush=True)
        input()
    """
    # Each with a directory of its own: only the segment's own lock can tell them apart.
    rivals = [spawn(script, pool_name, runtime_dir / str(i)) for i in range(6)]
    for rival in rivals:
        rival.read()
    for rival in rivals:
        rival.tell()
    answers = [rival.read() for rival in rivals]
    assert answers.count("refused") == 5
    (winner,) = [answer for answer in answers if answer != "refused"]
    with Segment.attach_name(pool_name) as found:
        assert str(found.info.boot_id) == winner


def test_a_forked_child_neither_keeps_nor_removes_its_parents_pool(
    spawn: Callable[..., Child], make: Make, pool_name: str, runtime_dir: Path
) -> None:
    fork = """
        pid = os.fork()
        if pid == 0:
            segment.close()
            print(os.getpid(), os.path.exists(segment.path), flush=True)
            sys.stdin.read()
            os._exit(0)
        os.waitpid(pid, 0)
    """
    server = spawn(textwrap.dedent(SERVE) + textwrap.dedent(fork), pool_name, 4, runtime_dir, DEV_SHM, "shm")
    assert server.read() == "True False"
    child_pid, still_there = server.read().split()
    assert still_there == "True"
    server.kill()
    try:
        os.kill(int(child_pid), 0)
        assert make().recreated
    finally:
        os.kill(int(child_pid), signal.SIGKILL)


LOCK = """
    import fcntl, os, struct, sys
    from pathlib import Path
    held = []
    for root in map(Path, sys.argv[1:]):
        for path in [root, *root.rglob("*")] if root.is_dir() else [root]:
            if path.is_socket():
                continue
            fd = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
            fcntl.flock(fd, fcntl.LOCK_EX)
            if not path.is_dir():
                whole = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
                again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
                fcntl.fcntl(again, fcntl.F_OFD_SETLK, whole)
            held.append(fd)
    print(len(held), flush=True)
    input()
"""


@pytest.mark.parametrize("backing", ["shm", "memfd"])
@pytest.mark.parametrize("stopped", [False, True])
def test_a_process_that_locks_every_file_keeps_no_server_out(
    spawn: Callable[..., Child], make: Make, pool_name: str, runtime_dir: Path, backing: str, stopped: bool
) -> None:
    server = spawn(SERVE + WAIT, pool_name, 4, runtime_dir, DEV_SHM, backing)
    assert server.read() == "True False"
    names = [segment_path(pool_name), runtime_dir] if backing == "shm" else [runtime_dir]
    locker = spawn(LOCK, *names)
    assert int(locker.read()) >= len(names)
    if stopped:
        os.kill(locker.pid, signal.SIGSTOP)
    with pytest.raises(PoolBusyError, match=f"pid {server.pid}"):
        Segment.create(pool_name, 4 * MIB, backing, runtime_dir=runtime_dir)
    server.kill()
    assert {each.state for each in clean(runtime_dir, [pool_name], dry_run=True)} == {CleanState.WOULD_REMOVE}
    assert make(backing=backing).recreated == (backing == "shm")
    with pytest.raises(PoolBusyError, match=f"pid {os.getpid()}"):
        Segment.create(pool_name, 4 * MIB, backing, runtime_dir=runtime_dir)


def test_a_stopped_server_that_nobody_can_reach_any_more_is_alive(
    spawn: Callable[..., Child], pool_name: str, runtime_dir: Path
) -> None:
    server = spawn(SERVE + WAIT, pool_name, 4, runtime_dir, DEV_SHM, "shm")
    server.read()
    os.kill(server.pid, signal.SIGSTOP)
    for _ in range(CLAIM_BACKLOG + 5):
        with pytest.raises(PoolBusyError, match="belongs to a living server"):
            Segment.create(pool_name, 4 * MIB, runtime_dir=runtime_dir)


def test_a_claim_is_its_makers_until_it_withdraws_or_dies(tmp_path: Path, spawn: Callable[..., Child]) -> None:
    first = Claim.take(tmp_path, "x")
    other = Claim.take(tmp_path, "y")
    with pytest.raises(PoolBusyError):
        Claim.take(tmp_path, "x")
    first.withdraw()
    other.withdraw()
    assert not list(tmp_path.iterdir())
    script = """
        import sys
        from pathlib import Path
        from lmcache_core.pool.claim import Claim
        claim = Claim.take(Path(sys.argv[1]), "x")
        print(claim.path, flush=True)
        input()
    """
    child = spawn(script, tmp_path)
    path = Path(child.read())
    assert listener_at(path) is not None
    child.kill()
    assert listener_at(path) is None
    assert path.exists()
    second = Claim.take(tmp_path, "x")
    assert not path.exists(), "the claim of a dead process goes with the next one"
    second.withdraw()


def test_a_claim_whose_name_was_removed_is_not_made_again_beside_a_living_one(tmp_path: Path) -> None:
    claim = Claim.take(tmp_path, "x")
    claim.path.unlink()
    other = Claim.take(tmp_path, "x")
    with pytest.raises(PoolBusyError, match="another living server"):
        claim.renew()
    assert list(tmp_path.iterdir()) == [other.path]
    other.withdraw()
    claim.renew()
    assert claim.stands
    claim.withdraw()


def test_a_claim_whose_name_was_removed_is_made_again(tmp_path: Path) -> None:
    claim = Claim.take(tmp_path, "x")
    claim.path.unlink()
    assert not claim.stands
    claim.renew()
    assert claim.stands
    with pytest.raises(PoolBusyError):
        Claim.take(tmp_path, "x")
    former = claim.path
    claim.renew()
    assert claim.path == former, "it stood"
    claim.withdraw()
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file to another user")
def test_a_claim_of_another_user_says_nothing(tmp_path: Path) -> None:
    trap = Claim.take(tmp_path, "x")
    os.chown(trap.path, 4242, 4242)
    ours = Claim.take(tmp_path, "x")
    assert trap.path.exists(), "it is not ours to remove"
    ours.withdraw()
    trap.close()


def test_a_symbolic_link_under_the_pools_name_is_not_followed(make: Make, pool_name: str, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    segment_path(pool_name).symlink_to(victim)
    with pytest.raises(PoolError, match="cannot be opened"):
        make()
    assert victim.read_bytes() == b"precious"


def test_a_refused_creation_leaves_nothing_behind(
    small_mount: Callable[[int], Path], pool_name: str, runtime_dir: Path
) -> None:
    shm = small_mount(8)
    with pytest.raises(PoolError, match="needs"):
        Segment.create(pool_name, 64 * MIB, runtime_dir=runtime_dir, shm_dir=shm)
    assert not list(shm.iterdir())
    assert not list(runtime_dir.iterdir())
