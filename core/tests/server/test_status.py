"""What `status` answers where there is most to say: one frame, and what was left out for that."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import pytest

from lmcache_core.limits import ERROR_CHARS_MAX, FRAME_BYTES_MAX, SESSION_NAME_BYTES_MAX, TIER_NAME_CHARS_MAX
from lmcache_core.protocol import messages as m
from lmcache_core.protocol.codec import encode
from lmcache_core.server.peers.session import Peer
from lmcache_core.server.server import Server
from lmcache_core.server.status import describe

SESSIONS, TIERS, NAMESPACES = 150, 16, 60
U64_MAX = (1 << 64) - 1


class Remote(Peer):
    """Somebody with a key of his own, as over ZMQ."""

    carrier = "zmq"
    uid = 1 << 31
    pid = 0

    def __init__(self, number: int) -> None:
        self.origin = f"key {number:040d}"

    def send(self, frame: bytes, fd: int = -1) -> None:
        """Nobody reads."""

    def close(self) -> None:
        """There is nothing to close."""


def crowd(server: Server) -> None:
    """As many as there may be, each with the longest name. On the loop's thread."""
    now = server.parts.loop.clock.now
    for number in range(SESSIONS):
        name = f"{number:03d}".ljust(SESSION_NAME_BYTES_MAX, "n")
        server.parts.sessions.open(Remote(number), bytes([number]) * 16, name, U64_MAX >> 32, now, wants_pool=False)
    for number in range(NAMESPACES):
        server.parts.observer.figures.looked_up(U64_MAX - number, 1 << 40, 1 << 39, {"never_stored": 1 << 39})


def on_the_loop(server: Server, *works: Callable[[Server], None]) -> None:
    done = threading.Event()
    for work in works:
        server.parts.loop.call(partial(work, server))
    server.parts.loop.call(done.set)
    assert done.wait(60)


def troubled(server: Server) -> None:
    assert server.tiering is not None
    for tier in server.tiering.tiers:
        tier.health.trouble.note("store", "é" * ERROR_CHARS_MAX, server.parts.clock.now)
        tier.reclaim.last_error = "é" * ERROR_CHARS_MAX
        for latency in tier.health.latencies.values():
            latency.counts[:] = [U64_MAX] * len(latency.counts)


@pytest.fixture
def crowded(start: Callable[..., Server]) -> Server:
    pytest.importorskip("lmcache_mock")
    tiers = {f"t{number:02d}".ljust(TIER_NAME_CHARS_MAX, "t"): {"type": "mock"} for number in range(TIERS)}
    server = start(l2=tiers, drain_s=0.1)
    on_the_loop(server, crowd, troubled)
    return server


def test_with_the_most_there_can_be_to_say_the_answer_is_one_frame_and_says_what_is_left_out(crowded: Server) -> None:
    with crowded.connect() as client:
        told = client.status()
    assert len(encode(m.StatusReply(U64_MAX, told))) <= FRAME_BYTES_MAX
    assert len(told["tiers"]["tiers"]) == TIERS, "what metrics are made of is all there"
    assert len(told["traffic"]["namespaces"]) == 51
    assert told["not_shown"]["texts"] == 2 * TIERS
    assert told["tiers"]["tiers"][0]["last_error"].endswith("é…")
    sessions, holders = len(told["sessions"]), len(told["l1"]["holders"])
    assert 0 < sessions < SESSIONS
    assert 0 < holders < SESSIONS
    assert sessions + told["not_shown"]["sessions"] == SESSIONS + 1  # and who asks
    assert holders + told["not_shown"]["l1.holders"] == SESSIONS + 1


def test_a_companion_with_much_to_say_costs_others_nothing_but_rows(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.parts.companions, "status", lambda: {"talker": {str(n): n for n in range(20_000)}})
    told = describe(server)
    assert len(encode(told)) <= FRAME_BYTES_MAX
    assert told["companions"] == {}
    assert told["not_shown"] == {"companions": 1}


def test_an_ordinary_answer_leaves_nothing_out(server: Server) -> None:
    with server.connect() as client:
        assert client.status()["not_shown"] == {}
