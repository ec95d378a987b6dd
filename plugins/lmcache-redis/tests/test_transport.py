"""Both ways of moving payloads, the same results; and what of redis-py the direct one relies on."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable

import pytest
import redis

import lmcache_redis.transport.exchange
from lmcache_core.errors import TierError
from lmcache_core.tiers.contract import LoadItem, Outcome, Result, StoreItem
from lmcache_redis.adapter import RedisAdapter

from .conftest import RedisServer

Make = Callable[..., RedisAdapter]
SIZES = [0, 1, 4095, 4096, 4097, 100_000, 1 << 20, (3 << 20) + 17]


def soon() -> float:
    return time.monotonic() + 60


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def store(adapter: RedisAdapter, contents: dict[int, bytes]) -> list[Outcome]:
    items = [StoreItem(key(n), [memoryview(c)[:4096], memoryview(c)[4096:]]) for n, c in contents.items()]
    return list(adapter.store(items, soon()))


def load(adapter: RedisAdapter, rooms: dict[int, int]) -> list[tuple[Outcome, bytes]]:
    buffers = [bytearray(room) for room in rooms.values()]
    views = [[memoryview(buffer)[:4096], memoryview(buffer)[4096:]] for buffer in buffers]
    outcomes = adapter.load([LoadItem(key(n), parts) for n, parts in zip(rooms, views, strict=True)], soon())
    return [(outcome, bytes(b[: outcome.nbytes])) for outcome, b in zip(outcomes, buffers, strict=True)]


@pytest.mark.parametrize("protocol", [2, 3])
def test_both_transports_give_the_same_results(server: RedisServer, tier: Make, protocol: int) -> None:
    contents = {number: os.urandom(size) for number, size in enumerate(SIZES)}
    rooms = {**dict(enumerate(SIZES)), 99: 5000}
    smaller, larger = {5: 50_000, 6: 1 << 20, 98: 10}, {number: size + 100 for number, size in enumerate(SIZES)}
    seen = []
    for transport in ("direct", "plain"):
        adapter = tier(port=server.port, transport=transport, protocol=protocol, key_prefix=f"{transport}:")
        stored = store(adapter, contents)
        seen.append([stored, *(load(adapter, wanted) for wanted in (rooms, smaller, larger))])
    texts = [str(each).replace("direct:", "").replace("plain:", "") for each in seen]
    assert texts[0] == texts[1]
    stored, exact, small, large = seen[0]
    assert {outcome.result for outcome in stored} == {Result.DONE}
    assert [content for _, content in exact[:-1]] == list(contents.values())
    assert exact[-1][0].result is Result.MISS
    assert [outcome.result for outcome, _ in small] == [Result.DAMAGED, Result.DONE, Result.MISS]
    assert [content for _, content in large] == list(contents.values())


def test_each_transport_reads_what_the_other_stored(server: RedisServer, tier: Make) -> None:
    content = os.urandom(300_000)
    direct, plain = (tier(port=server.port, transport=transport) for transport in ("direct", "plain"))
    store(direct, {1: content})
    store(plain, {2: content})
    with server.door() as door:
        assert door.get(b"lmcache:" + key(1).hex().encode()) == content
    assert load(plain, {1: len(content)})[0][1] == load(direct, {2: len(content)})[0][1] == content


@pytest.fixture
def hidden(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From then on, a redis-py that keeps its sockets elsewhere."""
    return lambda: monkeypatch.setattr(lmcache_redis.transport.exchange, "direct_socket", lambda connection: None)


def test_auto_falls_back_to_plain_calls_with_the_same_results_and_says_so(
    server: RedisServer, tier: Make, hidden: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    hidden()
    adapter = tier(port=server.port, transport="auto")
    content = os.urandom(2_000_000)
    with caplog.at_level(logging.WARNING, "lmcache_redis"):
        assert store(adapter, {1: content})[0].result is Result.DONE
        assert load(adapter, {1: len(content)}) == [(Outcome(Result.DONE, len(content)), content)]
    assert [record.getMessage() for record in caplog.records if "hides its sockets" in record.getMessage()] != []


def test_without_a_socket_the_deadline_still_holds(
    own_server: Callable[..., RedisServer], tier: Make, hidden: Callable[[], None]
) -> None:
    server = own_server()
    adapter = tier(port=server.port, transport="auto")
    store(adapter, {1: b"x"})
    hidden()
    with server.door() as door:
        door.client_pause(60_000)
    outcome = adapter.load([LoadItem(key(1), [memoryview(bytearray(10))])], time.monotonic() + 0.2)[0]
    assert outcome.result is Result.FAILED
    assert outcome.retryable
    server.kill()


def test_direct_that_cannot_be_had_is_an_error_that_names_the_cure(
    server: RedisServer, tier: Make, hidden: Callable[[], None]
) -> None:
    hidden()
    with pytest.raises(
        TierError, match=rf'redis-py {redis.__version__} hides its socket: set l2.shared.transport = "auto"'
    ):
        store(tier(port=server.port, transport="direct"), {1: b"x"})


def test_the_installed_redis_py_lets_payloads_go_directly(server: RedisServer, tier: Make) -> None:
    """The day a new redis-py hides its socket, this says so; until then `auto` means direct."""
    adapter = tier(port=server.port)
    store(adapter, {1: os.urandom(100_000)})
    assert not adapter.client.fell_back


def test_a_connection_is_used_again_after_a_full_exchange_and_never_after_a_broken_one(
    server: RedisServer, tier: Make
) -> None:
    adapter = tier(port=server.port)
    with server.door() as door:
        store(adapter, {1: bytes(500_000)})
        first = int(door.info("stats")["total_connections_received"])
        for _ in range(5):
            load(adapter, {1: 500_000})
        assert int(door.info("stats")["total_connections_received"]) == first
        ours = {each["id"] for each in door.client_list()} - {str(door.client_id())}
        for each in ours:
            door.client_kill_filter(_id=each)
        assert load(adapter, {1: 500_000})[0][0].result is Result.DONE, "a closed connection is replaced at once"
