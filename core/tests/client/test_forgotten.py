"""A session that its server has dropped, over ZMQ, where the connection stands: nothing was done of what is asked then,
so the call itself opens the next session and asks again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from lmcache_core.client.client import Client
from lmcache_core.client.results import Status
from lmcache_core.errors import LeaseExpiredError
from lmcache_core.pool.layout import Layout
from lmcache_core.server.peers import session_table as sessions
from lmcache_core.server.server import Server
from lmcache_core.tokens.namespace import Namespace
from lmcache_testing.waiting import WAIT_S

pytest.importorskip("zmq")

NBYTES = 4096
SPACE = Namespace("model", Layout("uint8", (NBYTES,)))
KEYS = [number.to_bytes(32, "big") for number in range(4)]


@pytest.fixture
def server(start: Callable[..., Server], tmp_path: Path) -> Server:
    server = start(l1={"size_bytes": 4 << 20}, drain_s=0.1, zmq={"ipc": str(tmp_path / "zmq")})
    with server.connect() as other:
        assert other.store(KEYS, [b"o" * NBYTES] * len(KEYS), namespace=SPACE).stored == len(KEYS)
    return server


@pytest.fixture(params=[True, False], ids=["maps the pool", "maps no pool"])
def client(server: Server, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Client]:
    """One that asks for every hit."""
    with closing(Client.connect(address=f"ipc://{tmp_path}/zmq", maps_pool=request.param, use_index=False)) as client:
        client.register_layout(SPACE)
        yield client


def drop(server: Server) -> None:
    """The server makes room, as it does at its limit of sessions."""
    before = server.parts.sessions.dropped
    with pytest.MonkeyPatch.context() as patch, server.connect(maps_pool=False) as newcomer:
        patch.setattr(sessions, "SESSIONS_MAX", len(list(server.parts.sessions)))
        newcomer.noop()
    assert server.parts.sessions.dropped == before + 1


def lookup(client: Client) -> int:
    return client.lookup(KEYS, namespace=SPACE).hits


def held_lookup(client: Client) -> int:
    found = client.lookup(KEYS, namespace=SPACE, hold=True)
    assert client.free_lookup_locks(found.promise) == 1
    return found.hits


def lookup_nowait(client: Client) -> int:
    result = client.lookup_nowait(KEYS, namespace=SPACE).wait(WAIT_S)
    assert result is not None
    return result.hits


def retrieve(client: Client) -> Any:
    return client.retrieve(KEYS, [bytearray(NBYTES) for _ in KEYS], namespace=SPACE).hits


def store(client: Client) -> list[Status]:
    return client.store([b"n" * 32], [b"n" * NBYTES], namespace=SPACE).statuses


def read_in_place(client: Client) -> int:
    with client.prepare_retrieve(KEYS, namespace=SPACE) as lease:
        return len(lease.granted)


def pin(client: Client) -> int:
    return len([status for status in client.pin(KEYS, namespace=SPACE) if status is Status.GRANTED])


def explain(client: Client) -> int:
    return len(client.explain(KEYS, namespace=SPACE))


def ping(client: Client) -> bytes:
    return client.ping(b"x")


def clear(client: Client) -> int:
    return client.clear(SPACE).objects


def end_session(client: Client) -> None:
    return client.end_session()


ANYBODY = {lookup: 4, held_lookup: 4, lookup_nowait: 4, pin: 4, explain: 4, ping: b"x", clear: 4, end_session: None}
WORKERS = {retrieve: 4, store: [Status.STORED], read_in_place: 4}


@pytest.mark.parametrize("call", [*ANYBODY, *WORKERS], ids=lambda call: call.__name__)
def test_a_call_in_a_session_that_was_dropped_is_answered_all_the_same(
    server: Server, client: Client, call: Callable[[Client], Any]
) -> None:
    if call in WORKERS and not client.links.target.maps_pool:
        pytest.skip("needs the pool")
    before = client.links.link
    drop(server)
    assert call(client) == {**ANYBODY, **WORKERS}[call]
    assert client.links.link is not before


def test_calls_of_other_threads_that_meet_the_same_end_are_answered_too(server: Server, client: Client) -> None:
    for _ in range(20):
        drop(server)
        found: list[int] = []
        threads = [threading.Thread(target=lambda: found.append(lookup(client))) for _ in range(4)]  # noqa: B023
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        assert found == [4] * 4


def test_a_lease_of_a_session_that_was_dropped_is_not_asked_for_anew(server: Server, tmp_path: Path) -> None:
    """Its slots are nobody's to say: the next page may not stand under another lease."""
    with closing(Client.connect(address=f"ipc://{tmp_path}/zmq", use_index=False)) as client:
        lease = client.prepare_store([b"w" * 32], namespace=SPACE)
        lease.view(0)[:] = b"w" * NBYTES
        ended = threading.Event()

        def end() -> None:  # with what it holds, which no limit would do
            (session,) = server.parts.sessions
            server.parts.sessions.goodbye(session, server.parts.clock.now)
            ended.set()

        server.parts.loop.call(end)
        assert ended.wait(WAIT_S)
        lease.ask([b"x" * 32])
        assert lease.statuses[1] is Status.UNREACHABLE
        with pytest.raises(LeaseExpiredError):
            lease.commit()
