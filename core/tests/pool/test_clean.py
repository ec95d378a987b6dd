"""Clean-up takes from the dead and never from the living."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lmcache_core.errors import UsageError
from lmcache_core.pool.backing import FILE_PREFIX, segment_path
from lmcache_core.pool.clean import CleanState, clean
from lmcache_core.pool.segment import Segment, name_exists

from .conftest import Child

MIB = 1 << 20
Make = Callable[..., Segment]

SERVE = """
    import socket, sys
    from pathlib import Path
    from lmcache_core.pool.segment import Segment
    name, run, shm = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    segment = Segment.create(name, 4 << 20, runtime_dir=run, shm_dir=shm)
    segment.view(segment.info.data_offset, 1 << 20)[:] = bytes([1]) * (1 << 20)
    print("serving", flush=True)
    input()
"""


@pytest.fixture
def shm_dir(tmp_path: Path) -> Path:
    """A directory of this test's own in place of /dev/shm, so that no other pool on the machine is touched."""
    directory = tmp_path / "shm"
    directory.mkdir()
    return directory


def test_a_dead_servers_segment_and_claims_are_removed(
    spawn: Callable[..., Child], pool_name: str, runtime_dir: Path, shm_dir: Path
) -> None:
    server = spawn(SERVE, pool_name, runtime_dir, shm_dir)
    server.read()
    server.kill()
    segment, (claim,) = segment_path(pool_name, shm_dir), runtime_dir.iterdir()

    planned = clean(runtime_dir, dry_run=True, shm_dir=shm_dir)
    assert [(c.path, c.state) for c in planned] == [
        (segment, CleanState.WOULD_REMOVE),
        (claim, CleanState.WOULD_REMOVE),
    ]
    assert segment.exists()
    assert claim.exists()

    done = clean(runtime_dir, shm_dir=shm_dir)
    assert [(c.path, c.state) for c in done] == [(segment, CleanState.REMOVED), (claim, CleanState.REMOVED)]
    assert done[0].nbytes >= MIB
    assert not segment.exists()
    assert not claim.exists()
    assert not list(shm_dir.iterdir())
    assert clean(runtime_dir, shm_dir=shm_dir) == []


def test_a_living_server_is_left_alone(make: Make, runtime_dir: Path, shm_dir: Path) -> None:
    segment = make(shm_dir=shm_dir)
    for dry_run in (True, False):
        found = clean(runtime_dir, dry_run=dry_run, shm_dir=shm_dir)
        assert {c.state for c in found} == {CleanState.OWNER_LIVES}
        assert len(found) == 2
    assert name_exists(segment)


def test_memory_comes_back_even_where_a_worker_still_maps_it(
    spawn: Callable[..., Child], small_mount: Callable[[int], Path], pool_name: str, runtime_dir: Path
) -> None:
    mount = small_mount(32)
    server = spawn(SERVE, pool_name, runtime_dir, mount)
    server.read()
    with Segment.attach_name(pool_name, shm_dir=mount):
        server.kill()
        before = os.statvfs(mount).f_bavail
        clean(names=[pool_name], shm_dir=mount)
        assert (os.statvfs(mount).f_bavail - before) * 4096 >= MIB


def test_names_limit_what_is_cleaned(shm_dir: Path) -> None:
    for name in ("one", "two"):
        segment_path(name, shm_dir).write_bytes(b"stale")
    assert [c.path for c in clean(names=["two"], shm_dir=shm_dir)] == [segment_path("two", shm_dir)]
    assert segment_path("one", shm_dir).exists()
    with pytest.raises(UsageError, match="pool name"):
        clean(names=["No/Name"], shm_dir=shm_dir)


def test_files_of_others_are_left_alone(shm_dir: Path, runtime_dir: Path) -> None:
    runtime_dir.mkdir()
    strangers = [
        shm_dir / "psm_1234",
        shm_dir / f"{FILE_PREFIX}NOT.OURS",
        shm_dir / f"{FILE_PREFIX}pool",
        runtime_dir / "App.lock",
    ]
    for path in strangers:
        path.write_bytes(b"theirs")
    target = shm_dir / "target"
    target.write_bytes(b"precious")
    segment_path("link", shm_dir).symlink_to(target)
    found = clean(runtime_dir, shm_dir=shm_dir)
    assert [c.state for c in found] == [CleanState.REFUSED]
    assert all(path.exists() for path in strangers)
    assert target.read_bytes() == b"precious"


@pytest.mark.parametrize("own_directory", [True, False])
def test_what_a_dead_server_of_a_former_version_left_is_removed(
    runtime_dir: Path, shm_dir: Path, own_directory: bool
) -> None:
    directory = runtime_dir / "p" if own_directory else runtime_dir
    directory.mkdir(parents=True)
    lock = directory / "p.lock"
    lock.write_text("1\n")
    gone = [directory / "lifeline", directory / "p.sock"] if own_directory else [directory / "p.sock"]
    stays = directory / ("notes.txt" if own_directory else "other.sock")
    for path in [*gone, *([] if own_directory else [stays])]:
        fd = os.open(directory, os.O_RDONLY)  # a socket's path is limited to 108 bytes
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(f"/proc/self/fd/{fd}/{path.name}")
        os.close(fd)
    stays.touch()
    (runtime_dir / "q").mkdir()
    (runtime_dir / "q" / "q.lock").write_text("1\n")
    clean(runtime_dir, shm_dir=shm_dir)
    assert not (runtime_dir / "q").exists()
    assert not lock.exists()
    assert not any(path.exists() for path in gone)
    assert stays.exists()


@pytest.mark.parametrize(("answer", "options", "removed"), [("n", [], False), ("y", [], True), ("", ["--yes"], True)])
def test_a_person_is_asked_before_a_pool_is_removed(
    spawn: Callable[..., Child], pool_name: str, runtime_dir: Path, answer: str, options: list[str], removed: bool
) -> None:
    server = spawn(SERVE, pool_name, runtime_dir, "/dev/shm")
    server.read()
    server.kill()
    argv = [sys.executable, "-m", "lmcache_core", "clean", pool_name, "--runtime-dir", str(runtime_dir), *options]
    person, terminal = os.openpty()
    try:
        os.write(person, f"{answer}\n".encode())
        done = subprocess.run(argv, stdin=terminal, capture_output=True, text=True, timeout=60, check=True)
    finally:
        os.close(person)
        os.close(terminal)
    assert ("[y/N]" in done.stdout) is (not options)
    assert segment_path(pool_name).exists() is not removed
