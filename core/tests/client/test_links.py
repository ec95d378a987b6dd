"""Links to servers: what a new one is told of the one before, and what is left of that."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from lmcache_core.client.client import Client
from lmcache_core.client.link.channel import Pending
from lmcache_core.client.link.handshake import Handshake
from lmcache_core.client.link.link import Link
from lmcache_core.client.link.reconnecting import Links
from lmcache_core.client.results import Status
from lmcache_core.errors import DisconnectedError
from lmcache_core.limits import HANDSHAKE_S_MAX, HELLO_S, LINK_LOOK_S
from lmcache_core.pool.layout import Layout
from lmcache_core.protocol import messages as m
from lmcache_core.server.server import Server
from lmcache_core.tokens.namespace import Namespace
from lmcache_core.trust import Trust
from lmcache_testing.waiting import until

from .conftest import cut

NBYTES = 1 << 20
SPACE = Namespace("model", Layout("uint8", (NBYTES,)))
KEYS = [number.to_bytes(32, "big") for number in range(4)]


def lose(client: Client) -> Link:
    """End the connection; the new link, which is there when this returns."""
    client.links.current().channel.close("the test ended it")
    return client.links.current(patient=True)


@pytest.mark.parametrize("kind", [m.PrepareStore, m.PrepareRetrieve])
def test_what_was_granted_and_not_yet_declared_when_the_link_was_made_anew_is_not_used(
    server: Server, client: Client, monkeypatch: pytest.MonkeyPatch, kind: type[m.Message]
) -> None:
    client.store(KEYS[:1], [bytes(NBYTES)], namespace=SPACE)
    channel = client.links.current().channel
    wait = channel.wait

    def interrupted(pending: Pending, *timeout_s: float) -> object:
        reply = wait(pending, *timeout_s)
        if isinstance(reply, m.Granted):
            lose(client)  # another thread's doing, before this one has looked at its reply
        return reply

    monkeypatch.setattr(channel, "wait", interrupted)
    if kind is m.PrepareStore:
        lease = client.prepare_store(KEYS[1:2], namespace=SPACE)
    else:
        lease = client.prepare_retrieve(KEYS[:1], namespace=SPACE)
    with server.connect() as other:
        assert not any(other.status()["l1"]["leases_by_kind"].values())  # what was not declared is settled
        assert list(lease.statuses) == [Status.UNREACHABLE]
        assert not lease.granted
        assert other.store(KEYS[1:], [bytes(NBYTES)] * 3, namespace=SPACE).stored == 3


def test_a_lease_that_was_declared_goes_on_over_the_new_link(client: Client) -> None:
    lease = client.prepare_store(KEYS[:1], namespace=SPACE)
    lose(client)
    lease.view(0)[:] = b"x" * NBYTES
    assert list(lease.commit()) == [Status.STORED]


def test_nothing_is_left_of_links_that_nobody_needs(server: Server) -> None:
    with server.connect() as client:
        locks = []
        for _ in range(3):
            client.lookup(KEYS, namespace=SPACE)
            lock = client.links.current().life_lock
            assert lock is not None
            locks.append(weakref.ref(lock))
            del lock
            lose(client)
        assert not any(lock() for lock in locks)


def test_over_ipc_nothing_is_connected_to_a_socket_that_could_not_be_looked_at(tmp_path: Path) -> None:
    with pytest.raises(DisconnectedError, match="is it running"):  # who made it after the look might be anybody
        Trust.of_client().check_ipc(f"ipc://{tmp_path}/zmq")


class Late:
    """Links of a caller that computes between two looks. `late_s`: how long it has, so far."""

    def __init__(self, client: Client) -> None:
        self.late_s = 0.0
        self.links = Links(replace(client.links.target, clock=lambda: time.monotonic() + self.late_s))
        self.links.current(patient=True).channel.close("the test ended it")
        self.late_s += LINK_LOOK_S

    def making(self) -> Handshake:
        """It has said hello to the next server, whose welcome is there."""
        self.links.look()
        making = self.links.making
        assert making is not None
        making.wait(self.links.now() + 5)
        return making


@pytest.fixture
def late(client: Client) -> Iterator[Late]:
    caller = Late(client)
    yield caller
    caller.links.close(0.0)


def test_the_time_that_a_caller_takes_between_two_looks_is_not_the_servers_silence(late: Late) -> None:
    late.making()
    late.late_s += 3 * HANDSHAKE_S_MAX
    until(late.links.step, "the link, without an error")
    assert not late.links.why_unreachable


def test_a_handshake_that_failed_while_nobody_looked_is_begun_again_at_once(late: Late) -> None:
    cut(late.making().channel.connection)  # as a server does with those that say nothing for long
    late.late_s += HELLO_S
    until(late.links.step, "the link, without an error")
    assert not late.links.why_unreachable
