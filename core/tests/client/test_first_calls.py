"""No thread waits for a handshake that another one has finished, and no cancelled lookup leaves a promise behind."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

import pytest

from lmcache_core.client.asynchronous import AsyncClient
from lmcache_core.client.client import Client
from lmcache_core.client.link.handshake import STEPS, Handshake
from lmcache_core.client.link.link_states import LinkEvent, LinkState
from lmcache_core.pool.layout import Layout
from lmcache_core.server.server import Server
from lmcache_core.tokens.namespace import Namespace
from lmcache_testing.waiting import WAIT_S, until

NBYTES = 4096
SPACE = Namespace("first calls", Layout("uint8", (NBYTES,)))
KEYS = [bytes([at]) * 32 for at in range(4)]


def promises(watcher: Client) -> int:
    count: int = watcher.status()["l1"]["leases_by_kind"]["promise"]
    return count


def test_a_thread_that_waits_for_a_link_goes_on_when_another_thread_has_made_it(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other thread reads the last answer of the handshake: no frame comes after it."""
    attach, waits = STEPS[LinkState.ATTACHING], threading.Event()
    wait: Callable[[Handshake, float], None] = Handshake.wait

    def waiting(making: Handshake, deadline: float) -> None:
        waits.set()
        wait(making, time.monotonic() + WAIT_S)  # far longer than a test takes, if nothing wakes it

    def not_yet(making: Handshake) -> LinkEvent | None:
        return attach(making) if waits.is_set() and threading.current_thread() is not waiter else None

    monkeypatch.setattr(Handshake, "wait", waiting)
    monkeypatch.setitem(STEPS, LinkState.ATTACHING, not_yet)
    with server.connect() as client:
        answers: list[object] = []
        waiter = threading.Thread(target=lambda: answers.append(client.links.current()))
        waiter.start()
        assert waits.wait(WAIT_S)
        until(lambda: client.links.step() is not None, "the link")
        waiter.join(WAIT_S / 2)
        assert answers == [client.links.link]


def test_a_held_lookup_that_is_cancelled_after_its_answer_frees_its_promise_at_once(server: Server) -> None:
    with server.connect() as client, server.connect(maps_pool=False) as watcher:
        client.store(KEYS, [bytes(NBYTES)] * len(KEYS), namespace=SPACE)
        for fetched in (False, True):
            handle = client.lookup_nowait(KEYS, namespace=SPACE, hold=True)
            until(lambda: promises(watcher) == 1, "the promise")
            assert not fetched or handle.done
            handle.cancel()
            until(lambda: promises(watcher) == 0, "its end, without another call of the client")
        handle = client.lookup_nowait(KEYS, namespace=SPACE, hold=True)
        until(lambda: handle.done, "the answer")
        assert handle.result is not None
        handle.cancel()  # too late: the promise is the caller's
        assert client.free_lookup_locks(handle.result.promise) == 1


def test_a_cancelled_task_frees_the_promise_of_its_lookup(server: Server) -> None:
    with server.connect() as client, server.connect(maps_pool=False) as watcher:
        client.store(KEYS, [bytes(NBYTES)] * len(KEYS), namespace=SPACE)

        async def cancelled(turns: int) -> None:
            task = asyncio.ensure_future(AsyncClient(client).lookup(KEYS, namespace=SPACE, hold=True))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            (found,) = await asyncio.gather(task, return_exceptions=True)
            if not isinstance(found, BaseException):  # the answer was quicker, and is ours
                client.free_lookup_locks(found.promise)

        asyncio.run(cancelled(1))
        until(lambda: promises(watcher) == 0, "the end of its promise")
