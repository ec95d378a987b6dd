"""Free means dead: the life lock across kill -9, forks and passed descriptors."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from lmcache_core.errors import LimitError, PoolError, UsageError
from lmcache_core.limits import WORKERS_MAX
from lmcache_core.pool.backing import Backing
from lmcache_core.pool.lifelock import LifeLock, life_lock_free
from lmcache_core.pool.segment import Segment

from .conftest import Child

MIB = 1 << 20
Make = Callable[..., Segment]
Eventually = Callable[[Callable[[], bool]], None]

WORK = """
    import os, sys
    from lmcache_core.pool.lifelock import LifeLock
    from lmcache_core.pool.segment import Segment
    segment = Segment.attach_name(sys.argv[1])
    row = int(sys.argv[2])
    life = LifeLock.acquire(segment, row)
    print(segment.row_nonce(row), flush=True)
"""


def test_the_lock_is_free_at_once_when_its_worker_is_killed(make: Make, spawn: Callable[..., Child]) -> None:
    segment = make()
    row, nonce = segment.claim_row()
    assert life_lock_free(segment, row)
    worker = spawn(WORK + "    input()\n", segment.info.name, row)
    assert worker.read() == str(nonce), "the worker reads its nonce through its own mapping"
    assert not life_lock_free(segment, row)
    worker.kill()
    # The process has been waited for: nothing else may have to happen before the lock is free.
    assert life_lock_free(segment, row)


@pytest.mark.parametrize("cause", ["close", "exit"])
def test_the_lock_is_free_when_its_worker_leaves(make: Make, spawn: Callable[..., Child], cause: str) -> None:
    segment = make()
    row, _ = segment.claim_row()
    ending = "    life.close(); print('closed', flush=True); input()\n" if cause == "close" else ""
    worker = spawn(WORK + ending, segment.info.name, row)
    worker.read()
    if cause == "close":
        assert worker.read() == "closed"
    else:
        assert worker.wait() == 0
    assert life_lock_free(segment, row)


def test_a_forked_child_does_not_keep_its_killed_parent_alive(
    make: Make, spawn: Callable[..., Child], eventually: Eventually
) -> None:
    segment = make()
    row, _ = segment.claim_row()
    fork = """
    pid = os.fork()
    if pid == 0:
        print(os.getpid(), life.closed, flush=True)
        sys.stdin.read()
        os._exit(0)
    input()
    """
    worker = spawn(WORK + fork, segment.info.name, row)
    worker.read()
    child_pid, child_has_let_go = worker.read().split()
    try:
        assert child_has_let_go == "True"
        assert not life_lock_free(segment, row), "the child's close has freed its parent's lock"
        worker.kill()
        eventually(lambda: life_lock_free(segment, row))
        state = Path(f"/proc/{child_pid}/stat").read_text().rpartition(")")[2].split()[0]
        assert state != "Z", "the child was to be alive"
    finally:
        os.kill(int(child_pid), signal.SIGKILL)


@pytest.mark.parametrize("backing", [Backing.SHM, Backing.MEMFD])
def test_the_lock_holds_within_one_process_too(make: Make, backing: Backing) -> None:
    segment = make(backing=backing)
    row, _ = segment.claim_row()
    with Segment.attach_fd(segment.worker_fd(), segment.info) as worker:
        life = LifeLock.acquire(worker, row)
        assert not life_lock_free(segment, row)
        with pytest.raises(PoolError, match=f"row {row}.*held by another"):
            LifeLock.acquire(worker, row)
        life.close()
        life.close()
        assert life_lock_free(segment, row)


def test_closing_the_passed_descriptor_keeps_the_lock(make: Make) -> None:
    segment = make()
    row, _ = segment.claim_row()
    worker = Segment.attach_fd(segment.worker_fd(), segment.info)
    life = LifeLock.acquire(worker, row)
    worker.close()
    assert not life_lock_free(segment, row)
    life.close()


def test_locks_of_other_rows_do_not_matter(make: Make) -> None:
    segment = make()
    first, _ = segment.claim_row()
    second, _ = segment.claim_row()
    assert first != second
    with Segment.attach_name(segment.info.name) as worker:
        life = LifeLock.acquire(worker, first)
        assert life_lock_free(segment, second)
        life.close()


def test_a_row_whose_lock_is_still_held_is_not_given_to_another(make: Make) -> None:
    segment = make()
    row, _ = segment.claim_row()
    with Segment.attach_name(segment.info.name) as worker:
        life = LifeLock.acquire(worker, row)
        segment.release_row(row)
        claimed = {segment.claim_row()[0] for _ in range(WORKERS_MAX - 1)}
        assert row not in claimed
        with pytest.raises(LimitError, match="worker rows"):
            segment.claim_row()
        life.close()
        assert segment.claim_row()[0] == row


def test_nonces_name_an_incarnation_of_a_row(make: Make) -> None:
    segment = make()
    row, nonce = segment.claim_row()
    assert segment.row_nonce(row) == nonce != 0
    segment.release_row(row)
    assert segment.row_nonce(row) == 0
    with pytest.raises(PoolError, match="nobody holds it"):
        segment.release_row(row)
    nonces = {segment.claim_row()[1] for _ in range(50)}
    assert len(nonces) == 50
    assert nonce not in nonces


@pytest.mark.parametrize("row", [-1, WORKERS_MAX])
def test_a_row_outside_the_table_is_refused(make: Make, row: int) -> None:
    segment = make()
    with pytest.raises(UsageError, match="outside the table"):
        LifeLock.acquire(segment, row)
    with pytest.raises(UsageError, match="outside the table"):
        segment.row_nonce(row)
