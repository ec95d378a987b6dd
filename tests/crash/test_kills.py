"""`kill -9` of servers and workers at random moments, hundreds of times, with adoption after each.

Every byte that anyone reads says whose it is, so wrong ones cannot hide; after each adoption the pool's tables are
compared with what the server says, and with each other. LMCACHE_CORE_KILLS=10000 makes it a long run.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from lmcache_testing.embedded import Json

sys.path.insert(0, str(Path(__file__).parent))

from restarts import KEYS, NAMESPACES, count_in, key

from lmcache_core.client.client import Client
from lmcache_core.errors import CacheError
from lmcache_core.native import native
from lmcache_core.pool.backing import segment_path
from lmcache_core.pool.segment import Segment
from lmcache_core.pool.tables import SlotState

KILLS = int(os.environ.get("LMCACHE_CORE_KILLS", "300"))
PATIENCE_S = 60.0


class Zygote:
    """Forks servers and workers."""

    def __init__(self, run: Path) -> None:
        self.run = run
        script = Path(__file__).with_name("restarts.py")
        self._popen = subprocess.Popen(
            [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.children: set[int] = set()

    def _ask(self, *words: object) -> str:
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        print(*words, file=self._popen.stdin, flush=True)
        answer = self._popen.stdout.readline().strip()
        assert answer, "the zygote has ended"
        return answer

    def fork(self, *words: object) -> int:
        child = int(self._ask(*words))
        self.children.add(child)
        return child

    def kill(self, child: int) -> None:
        assert self._ask("kill", child) == "gone"
        self.children.discard(child)

    def close(self) -> None:
        for child in list(self.children):
            self.kill(child)
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        self._popen.stdin.close()
        self._popen.wait(PATIENCE_S)
        self._popen.stdout.close()


@pytest.fixture
def zygote(tmp_path: Path) -> Iterator[Zygote]:
    zygote = Zygote(tmp_path)
    yield zygote
    zygote.close()


def answered(client: Client) -> Json:
    """The status of the server, as soon as one answers."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return client.status()
        except CacheError:
            assert time.monotonic() < deadline, "no server came"
            time.sleep(0.002)


def check_tables(name: str, status: Json) -> None:
    """No worker lives: all that is used is ready, no slot is lost, and the tables say the same as the server."""
    usage = status["l1"]
    assert usage["used_bytes"] == usage["bytes_by_state"]["ready"], usage
    with Segment.attach_name(name) as segment:
        tables, header = segment.tables, segment.header
        states = [0] * 8
        used_bytes, offset = 0, header.data_offset
        while offset < header.segment_bytes:
            slab_bytes, object_bytes = tables.slab(offset)
            if not object_bytes:
                offset += 1 << 20
                continue
            for slot in range(min(slab_bytes, header.segment_bytes - offset) // object_bytes):
                state, _ = tables.slot(offset + slot * object_bytes)
                states[state] += 1
                used_bytes += object_bytes if state != SlotState.FREE else 0
            offset += slab_bytes
    assert states[SlotState.READY] == usage["objects_by_state"]["ready"]
    assert sum(states[1:]) == states[SlotState.READY], states
    assert used_bytes == usage["used_bytes"]


def check_bytes(client: Client) -> int:
    """Read everything that is there."""
    hits = 0
    for namespace in NAMESPACES:
        keys = [key(number) for number in range(KEYS)]
        into = [bytearray(namespace.layout.nbytes) for _ in keys]
        found = client.retrieve(keys, into, namespace=namespace, prefix=False)
        for number, data, status in zip(range(KEYS), into, found.statuses, strict=True):
            if status == "hit":
                hits += 1
                count_in(bytes(data), number)
    return hits


@pytest.mark.skipif(native is None, reason="adoption needs the C extension")
@pytest.mark.timeout(max(300, KILLS))
def test_no_kill_at_any_moment_costs_more_than_what_was_under_way(zygote: Zygote, tmp_path: Path) -> None:
    chance = random.Random(20260)
    name = f"k{uuid4().hex[:10]}"
    run = tmp_path / "run"
    run.mkdir(mode=0o700)
    (run / "state").mkdir()
    seeds = iter(range(1, 1 << 31))
    kills = adopted_objects = adoptions = hits = 0
    server = zygote.fork("server", name, run)
    with Client.connect(name, runtime_dir=run, maps_pool=False) as client:
        answered(client)  # from here on there is a pool, and it is adopted whatever happens
    workers = [zygote.fork("worker", name, run, next(seeds)) for _ in range(2)]
    try:
        while kills < KILLS:
            time.sleep(chance.uniform(0.0, 0.12))
            for worker in list(workers):  # now and then a worker dies as well, before the server or after it
                if chance.random() < 0.15:
                    zygote.kill(worker)
                    workers.remove(worker)
                    workers.append(zygote.fork("worker", name, run, next(seeds)))
                    kills += 1
            zygote.kill(server)
            kills += 1
            alone = chance.random() < 0.25  # everything dies: then nothing may be left waiting
            if alone:
                for worker in workers:
                    zygote.kill(worker)
                kills += len(workers)
                workers = []
            server = zygote.fork("server", name, run)
            if alone:
                with Client.connect(name, runtime_dir=run, maps_pool=True) as client:
                    status = answered(client)
                    report = status["pool"]["adopted"]
                    assert report is not None, status["pool"]["why_cold"]
                    adoptions += 1
                    adopted_objects += report["objects"]
                    dropped = report["dropped"]
                    assert dropped["slabs"] == dropped["misplaced"] == dropped["layout"] == report["lost"] == 0, report
                    hits += check_bytes(client)
                    check_tables(name, answered(client))
                workers = [zygote.fork("worker", name, run, next(seeds)) for _ in range(2)]
            failed = [path.read_text() for path in run.glob("failed-*")]
            assert not failed, failed
        assert adoptions > 5
        assert hits > adoptions, "there was something to lose"
    finally:
        for child in list(zygote.children):
            zygote.kill(child)
        segment_path(name).unlink(missing_ok=True)
    print(f"{kills} kills, {adoptions} adoptions looked into: {adopted_objects} objects adopted, {hits} hits read")
