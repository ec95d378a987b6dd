"""What an engine's jobs may keep in the copier, answered or not."""

from __future__ import annotations

import os
import queue
import socket
import threading
from array import array

import pytest

from lmcache_copier import messages as m
from lmcache_copier.budget import Budget, Budgets, Share
from lmcache_copier.channel import Incoming, send
from lmcache_copier.copying import CopyThreads
from lmcache_copier.engine import Engine, EngineJob
from lmcache_copier.link import Mark
from lmcache_core import Layout
from lmcache_core.buffers import address_of

KEYS = 1000
PAGE = 4096


def test_a_cancelled_job_counts_until_its_thread_has_dropped_it() -> None:
    """The threads of jobs are busy, so that cancelled ones stay in the queue with all that they have."""
    ours, theirs = socket.socketpair()
    waiting: queue.SimpleQueue[EngineJob] = queue.SimpleQueue()
    jobs = Budget("bytes", 10 * KEYS * 40, 4 * KEYS * 40)
    shares = Budgets().shares()._replace(job_bytes=Share(jobs))
    engine = Engine(theirs, None, waiting.put, CopyThreads(0), lambda *_: None, shares)  # type: ignore[arg-type]
    thread = threading.Thread(target=engine.run, daemon=True)
    thread.start()
    incoming = Incoming(ours, m.CopierReply)

    def answer() -> object:
        while True:
            for each in incoming.messages():
                return each
            if not incoming.receive():
                pytest.fail("the copier hung up")

    answer()
    view, mark = memoryview(bytearray(256 * PAGE)), Mark()
    layout = Layout("uint8", (PAGE,))
    group = m.GroupOf(1, "uint8", [PAGE], layout.memory_format, [m.RegionOf(0, 0, PAGE, PAGE, 256)], 1)
    piece = m.MemoryPiece(address_of(view), view.nbytes, -1, False)
    send(ours, m.RegisterMemory(1, mark.at, mark.value, [piece], [group]))
    registered = answer()
    assert isinstance(registered, m.MemoryRegistered), registered

    def store_and_cancel(rid: int) -> object:
        entry = m.JobEntry(0, os.urandom(32 * KEYS), array("q", [0] * KEYS).tobytes())
        send(ours, m.StorePages(rid, registered.registration, [entry], None, False))
        send(ours, m.CancelJob(rid))
        return answer()

    taken = 0
    while isinstance(store_and_cancel(2 + taken), m.JobFinished):
        taken += 1
        assert taken <= 4, "cancelled jobs are not counted"
    assert taken == waiting.qsize() > 0
    while not waiting.empty():
        waiting.get().run()
    assert isinstance(store_and_cancel(99), m.JobFinished)
    ours.close()
    thread.join()
