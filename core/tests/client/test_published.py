"""Waiting for what others store: the server wakes its workers through the pool, and nobody calls anybody."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from lmcache_core import Client, Layout, Namespace, UsageError
from lmcache_core.native import native
from lmcache_core.pool.header import PUBLISHED_OFFSET
from lmcache_core.server.server import Server
from lmcache_testing.waiting import WAIT_S, until

pytestmark = pytest.mark.skipif(native is None, reason="without the C extension workers have no index")

SPACE = Namespace("published", Layout("uint8", (4096,)))


@pytest.fixture
def reader(server: Server) -> Iterator[Client]:
    with server.connect() as reader:
        assert reader.register_layout(SPACE)
        yield reader


def key(number: int) -> bytes:
    return number.to_bytes(32, "little")


def store(client: Client, number: int) -> None:
    assert client.store([key(number)], [bytes(4096)], namespace=SPACE).stored == 1


def found(client: Client, number: int) -> bool:
    return client.lookup([key(number)], namespace=SPACE, ask=False).hits == 1


def seen_by(client: Client) -> int:
    seen = client.published
    assert seen is not None
    return seen


def test_a_waiter_is_woken_when_an_object_is_there_to_be_found(reader: Client, client: Client) -> None:
    seen, woken = seen_by(reader), threading.Event()
    results: list[bool] = []

    def wait() -> None:
        while not (changed := reader.wait_published(seen, WAIT_S)):
            pass
        results.extend([changed, found(reader, 1)])
        woken.set()

    waiter = threading.Thread(target=wait)
    waiter.start()
    store(client, 1)
    assert woken.wait(WAIT_S)
    waiter.join()
    assert results == [True, True]


def test_what_is_published_before_the_wait_is_not_missed(reader: Client, client: Client) -> None:
    seen = seen_by(reader)
    store(client, 1)
    assert reader.wait_published(seen, WAIT_S)
    assert seen_by(reader) != seen


def test_every_waiter_is_woken(server: Server, client: Client) -> None:
    with server.connect() as one, server.connect() as another:
        assert one.register_layout(SPACE)
        assert another.register_layout(SPACE)
        seen = seen_by(one)
        waiters = [threading.Thread(target=each.wait_published, args=(seen, WAIT_S)) for each in (one, another)]
        for waiter in waiters:
            waiter.start()
        store(client, 1)
        for waiter in waiters:
            waiter.join()


def test_without_a_change_a_wait_ends_in_time(reader: Client) -> None:
    assert not reader.wait_published(seen_by(reader), 0.01)
    assert not reader.wait_published(seen_by(reader), 0.0)


def test_a_wait_needs_no_server(reader: Client, server: Server) -> None:
    seen = seen_by(reader)
    server.stop()
    assert not reader.wait_published(seen, 0.01)


def test_a_word_that_was_overwritten_is_repaired_and_wakes_once_too_often(
    reader: Client, client: Client, server: Server
) -> None:
    seen = seen_by(reader)
    segment = server.parts.segment
    segment.buffer[PUBLISHED_OFFSET : PUBLISHED_OFFSET + 8] = b"\xff" * 8
    assert reader.wait_published(seen, WAIT_S)
    store(client, 2)
    until(lambda: seen_by(reader) == seen + 1, "the server's own count")


def test_without_a_mapped_pool_nobody_waits(start: Callable[..., Server]) -> None:
    server = start()
    with Client.connect(
        server.parts.settings.name, runtime_dir=server.parts.settings.runtime_dir, maps_pool=False
    ) as client:
        client.noop()
        assert client.published is None
        began = time.monotonic()
        assert not client.wait_published(0, WAIT_S)
        assert time.monotonic() - began < WAIT_S


def test_a_wait_needs_a_sensible_time(reader: Client) -> None:
    with pytest.raises(UsageError, match="seconds from 0"):
        reader.wait_published(0, -1.0)
    with pytest.raises(UsageError, match="seconds from 0"):
        reader.wait_published(0, float("nan"))
