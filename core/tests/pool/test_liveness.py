"""Three words for each kind of evidence, asked about real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmcache_core.pool.lifelock import LifeLock
from lmcache_core.pool.liveness import Life, by_lock, by_pidfd, by_process, by_token
from lmcache_core.pool.processes import Process, process_of
from lmcache_core.pool.segment import Segment


@pytest.fixture
def worker() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


def end(worker: subprocess.Popen[bytes]) -> None:
    worker.kill()
    worker.wait()


def test_a_process_is_alive_until_it_ends_by_descriptor_and_by_name(worker: subprocess.Popen[bytes]) -> None:
    process, pidfd = process_of(worker.pid), os.pidfd_open(worker.pid)
    assert (by_pidfd(pidfd), by_process(process)) == (Life.ALIVE, Life.ALIVE)
    assert by_process(process._replace(start=process.start + 1)) is Life.DEAD, "its id is another's by now"
    end(worker)
    assert (by_pidfd(pidfd), by_process(process)) == (Life.DEAD, Life.DEAD)
    os.close(pidfd)


@pytest.mark.parametrize("change", [{"pid": 0}, {"start": 0}, {"namespace": 1}, {"namespace": 0}, {"pid": 1 << 40}])
def test_a_name_that_means_nothing_here_proves_nothing(change: dict[str, int]) -> None:
    assert by_process(process_of(os.getpid())._replace(**change)) is Life.UNKNOWN
    assert by_process(Process()) is Life.UNKNOWN
    assert (by_pidfd(-1), by_token(-1)) == (Life.UNKNOWN, Life.UNKNOWN)


def test_a_token_is_alive_until_its_last_copy_is_closed() -> None:
    theirs, ours = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    copy = os.dup(theirs)
    os.close(theirs)
    assert by_token(ours) is Life.ALIVE
    os.close(copy)
    assert by_token(ours) is Life.DEAD
    os.close(ours)


def test_a_lock_that_is_held_proves_nothing_and_a_free_one_death(tmp_path: Path) -> None:
    with Segment.create("life", 4 << 20, "memfd", runtime_dir=tmp_path) as segment:
        lock = LifeLock.acquire(segment, 3)
        assert by_lock(segment.fileno(), segment.life_offset(3)) is Life.UNKNOWN
        lock.close()
        assert by_lock(segment.fileno(), segment.life_offset(3)) is Life.DEAD


def test_any_proof_of_death_is_enough() -> None:
    assert Life.ALIVE.either(Life.DEAD) is Life.DEAD.either(Life.UNKNOWN) is Life.DEAD
    assert Life.ALIVE.either(Life.UNKNOWN) is Life.UNKNOWN.either(Life.ALIVE) is Life.ALIVE
    assert Life.UNKNOWN.either(Life.UNKNOWN) is Life.UNKNOWN
