"""The pool of a server as a host's store: what is closed or forked while it is asked."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gate import content, key, room, stored

from lmcache_core.threads import started
from lmcache_hosts import server_objects
from lmcache_hosts.server_objects import THREADS, ServerObjects
from lmcache_testing.embedded import NAMELESS, embedded_server
from lmcache_testing.waiting import until


@pytest.fixture
def objects(tmp_path: Path) -> Iterator[ServerObjects]:
    with embedded_server(tmp_path, l1=NAMELESS) as server:
        hosted = ServerObjects(server.connect())
        yield hosted
        hosted.close()


class LateStart:
    """In place of `started`: once armed, whoever would start a thread stays there until `go`."""

    def __init__(self, gets_thread: bool) -> None:
        self.entered, self.go = threading.Event(), threading.Event()
        self.threads: list[threading.Thread] = []
        self.armed = False
        self._gets_thread = gets_thread

    def __call__(self, run: Callable[[], object], name: str) -> threading.Thread | None:
        if self.armed:
            self.entered.set()
            self.go.wait()
            if not self._gets_thread:
                return None  # as where the system has no more
        thread = started(run, name)
        if thread is not None:
            self.threads.append(thread)
        return thread


@pytest.fixture(params=[True, False], ids=["another thread", "no other thread"])
def late(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[LateStart]:
    start = LateStart(request.param)
    monkeypatch.setattr(server_objects, "started", start)
    yield start
    start.go.set()


def test_what_was_stored_is_found_and_loaded(objects: ServerObjects) -> None:
    assert objects.store([stored(1), stored(2)]).result() == [True, True]
    assert objects.find([key(1), key(3)]).result() == [True, False]
    buffer, wanted = room(2)
    assert objects.load([wanted]).result() == [True]
    assert bytes(buffer) == content(2)


def test_without_its_server_a_removal_is_a_no_and_no_fault(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with embedded_server(tmp_path, l1=NAMELESS) as server:
        objects = ServerObjects(server.connect())
        assert objects.store([stored(1)]).result() == [True]
    assert objects.remove([key(1), key(2)]).result() == [False, False]
    assert "was not served" not in caplog.text
    objects.close()


def test_close_answers_who_asks_meanwhile_and_ends_every_thread(late: LateStart, objects: ServerObjects) -> None:
    assert objects.store([stored(1)]).result() == [True]
    late.armed = True
    told = threading.Event()
    asking = threading.Thread(target=lambda: objects.find([key(1)], lambda _: told.set()), daemon=True)
    asking.start()
    late.entered.wait()
    closing = threading.Thread(target=objects.close)
    closing.start()
    closing.join(0.2)  # as far as it comes meanwhile
    late.go.set()
    closing.join(60)
    until(told.is_set, "an answer", 20)
    until(lambda: not any(thread.is_alive() for thread in late.threads), "the end of every thread", 20)
    assert objects.find([key(1)]).result() == [False]
    assert objects.status()["closed"]


def test_close_has_one_deadline_for_its_threads_and_its_session(
    objects: ServerObjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, allowed, ended, inside = threading.Event(), list[float](), list[bool](), list[bool]()
    join, close, lookup = threading.Thread.join, objects.client.close, objects.client.lookup

    def held(*args: Any, **options: Any) -> object:
        inside.append(True)
        go.wait()
        return lookup(*args, **options)

    def noted_join(thread: threading.Thread, timeout: float | None = None) -> None:
        if timeout is not None:
            allowed.append(timeout)
        join(thread, timeout)

    def noted_close(timeout_s: float) -> None:
        allowed.append(timeout_s)
        close(timeout_s)

    monkeypatch.setattr(objects.client, "lookup", held)
    monkeypatch.setattr(objects.client, "close", noted_close)
    requests = [objects.find([key(1)], lambda _: ended.append(True)) for _ in range(THREADS + 3)]
    until(lambda: len(inside) == THREADS, "a call on each thread")
    monkeypatch.setattr(threading.Thread, "join", noted_join)
    objects.close(drain_s=0.2)
    monkeypatch.undo()
    assert len(allowed) == THREADS + 1
    assert sum(allowed) <= 0.2
    assert len(ended) == 3, "what had not begun was left without an answer"
    go.set()
    assert [each.result() for each in requests] == [[False]] * (THREADS + 3)


def test_a_callback_of_a_host_may_close_its_objects(objects: ServerObjects) -> None:
    closed = threading.Event()

    def close(answers: object) -> None:
        objects.close()
        closed.set()

    objects.find([key(1)], close)
    until(closed.is_set, "the callback to return")


def test_a_child_forked_while_a_thread_asks_gets_misses(late: LateStart, objects: ServerObjects) -> None:
    assert objects.store([stored(1)]).result() == [True]
    late.armed = True
    asking = threading.Thread(target=lambda: objects.find([key(1)]), daemon=True)
    asking.start()
    late.entered.wait()
    child = os.fork()
    if not child:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)  # it ends if it hangs
        answers = objects.find([key(1)]).result()
        objects.close()
        os._exit(0 if answers == [False] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    late.go.set()
    asking.join(60)
    assert objects.find([key(1)]).result() == [True]
