"""What a server keeps of lookups that have ended: enough to be asked about, in bounded memory."""

from __future__ import annotations

import gc
import os
import socket
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from lmcache_core.client.client import Client
from lmcache_core.client.results import Status
from lmcache_core.errors import UsageError
from lmcache_core.kernel import sessions as kernel_sessions
from lmcache_core.native import native
from lmcache_core.plugins.components import ComponentSpec, Kind
from lmcache_core.plugins.hookspecs import hookimpl
from lmcache_core.plugins.loader import load_plugins
from lmcache_core.protocol import messages as m
from lmcache_core.protocol.codec import join_keys
from lmcache_core.server.peers.session import Session
from lmcache_core.server.server import Server
from lmcache_core.server.tiers import opening as components
from lmcache_core.server.waiting import lookups
from lmcache_core.tokens.namespace import Namespace
from lmcache_testing.embedded import server_settings
from lmcache_testing.waiting import until

from .conftest import keys

lmcache_fs = pytest.importorskip("lmcache_fs.adapter")


@pytest.fixture
def with_tier(start: Callable[..., Server], tmp_path: Path) -> Server:
    return start(l2={"disk": {"type": "fs", "path": str(tmp_path / "disk")}})


def remembered(server: Server) -> list[lookups.Wait]:
    return list(server.parts.lookups.waits.values())


@pytest.fixture
def with_silent_tier(with_tier: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """Its tier answers nothing until the test ends."""
    adapter = lmcache_fs.FsAdapter
    over, exists = threading.Event(), adapter.exists

    def silent(self: Session, keys: Sequence[bytes], deadline: float) -> object:
        over.wait(60)
        return exists(self, keys, deadline)

    monkeypatch.setattr(adapter, "exists", silent)
    yield with_tier
    over.set()


def test_the_first_lookup_after_a_while_of_silence_waits_as_long_as_it_was_told(
    with_silent_tier: Server, namespace: Namespace
) -> None:
    with with_silent_tier.connect() as client:
        client.register_layout(namespace)
        for number in range(4):
            time.sleep(0.15)  # nothing happens: the server's loop waits
            began_s = time.monotonic()
            client.lookup(keys(1, number), namespace=namespace, wait_s=0.2)
            assert time.monotonic() - began_s >= 0.2


@pytest.mark.skipif(native is None, reason="there is no index without the C extension")
def test_what_tiers_brought_is_in_the_index_before_the_answer_goes_out(
    with_tier: Server, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, found = keys(8, 0), []
    send = Session.send
    with with_tier.connect() as client, with_tier.connect() as other:
        client.store(wanted, [bytes(namespace.layout.nbytes)] * 8, namespace=namespace)
        assert all(each.stored for each in client.wait_stored(wanted, namespace=namespace, timeout_s=60))
        assert other.lookup(wanted, namespace=namespace).hits == 8
        client.clear(namespace)

        def sending(self: Session, message: object) -> None:
            if isinstance(message, m.LookupReply) and message.hits:
                found.append(other.lookup(wanted, namespace=namespace, ask=False).hits)
            send(self, message)

        monkeypatch.setattr(Session, "send", sending)
        assert client.lookup(wanted, namespace=namespace, wait_s=60).hits == 8
    assert found == [8]


def test_lookups_that_have_ended_are_remembered_by_their_keys_not_by_their_number(
    with_tier: Server, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookups, "JOB_KEYS_REMEMBERED", 1000)
    with with_tier.connect() as client:
        for number in range(12):
            assert client.lookup(keys(200, 1000 * number), namespace=namespace, wait_s=30).hits == 0
    assert 0 < sum(len(wait.keys) for wait in remembered(with_tier)) <= 1000


def test_a_lookup_that_is_forgotten_is_gone_without_the_collector(
    with_tier: Server, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look(client: Client, number: int) -> None:
        client.lookup(keys(10, 1000 * number), namespace=namespace, wait_s=30)

    with with_tier.connect() as client:
        look(client, 0)
        first = weakref.ref(remembered(with_tier)[0])
        monkeypatch.setattr(lookups, "JOB_KEYS_REMEMBERED", 5)
        gc.disable()
        try:
            look(client, 1)
            look(client, 2)
            assert first() is None
        finally:
            gc.enable()


def test_a_lookup_that_a_tier_works_on_is_not_forgotten_for_those_that_have_ended(
    with_silent_tier: Server, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookups, "JOBS_REMEMBERED", 3)
    monkeypatch.setattr(with_silent_tier.parts.shares.lookups, "total", 8)
    with with_silent_tier.connect() as client:
        slow = client.lookup(keys(1, 0), namespace=namespace)
        assert slow.job
        for number in range(1, 20):
            quick = client.lookup_nowait(keys(1, number), namespace=namespace)
            client.noop()
            quick.cancel()
        assert not client.query_prefetch_status(slow.job).done
    assert sum(wait.job is not None and wait.job.ended for wait in remembered(with_silent_tier)) <= 3


def test_a_client_that_comes_back_while_it_waits_for_hits_is_let_in_and_asks_on(
    with_silent_tier: Server, namespace: Namespace
) -> None:
    with with_silent_tier.connect(use_index=False) as client:
        client.store(keys(1, 0), [bytes(namespace.layout.nbytes)], namespace=namespace)
        lease = client.prepare_retrieve(keys(1, 0), namespace=namespace)
        job = client.lookup(keys(1, 1), namespace=namespace).job
        link = client.links.link
        assert link is not None
        query = link.channel.start(m.QueryLookupHits(0, job))
        client.noop()  # the query has been read
        with socket.socket(fileno=os.dup(link.channel.connection.fileno())) as line:  # type: ignore[attr-defined]
            line.shutdown(socket.SHUT_RDWR)
        while not link.channel.found_lost():
            time.sleep(0.001)
        deadline = time.monotonic() + 60
        while not client.lookup(keys(1, 0), namespace=namespace, hold=True).hits:  # the link is made anew
            assert time.monotonic() < deadline
        assert client.query_prefetch_status(job).job == job
        assert lease.finish() == [Status.HIT]
        assert with_silent_tier.parts.loop.faults == 0
        del query


def test_a_held_back_lookup_whose_session_has_all_its_leases_by_then_is_answered(
    with_silent_tier: Server, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_sessions, "LEASES_PER_SESSION_MAX", 1)
    server, payload = with_silent_tier, bytes(namespace.layout.nbytes)
    with server.connect(use_index=False) as client, server.connect() as other:
        other.store(keys(1, 0), [payload], namespace=namespace)
        with client.prepare_retrieve(keys(1, 0), namespace=namespace) as lease:
            client_link = client.links.current()
            lease.finish()
            held_back = client_link.channel.start(
                m.LookupRequest(0, namespace.id, join_keys(keys(1, 1)), m.LookupOptions(hold=True, wait_s=60.0))
            )
            client.noop()  # the server waits for the tier from here on
        with client.prepare_retrieve(keys(1, 0), namespace=namespace):
            other.store(keys(1, 1), [payload], namespace=namespace)  # a promise of it would be one lease too many
            client_link.channel.call(m.Cancel(0, held_back.rid))
            answer = client_link.channel.wait(held_back)
            assert isinstance(answer, m.LookupReply)
            assert not answer.promise, "nobody waits for it any more"
    assert server.parts.loop.faults == 0
    assert server.tiering is not None
    assert server.tiering.status()["faults"] == 0


def test_an_end_of_a_session_takes_the_promises_so_far_and_ends_no_wait(
    with_silent_tier: Server, namespace: Namespace
) -> None:
    server = with_silent_tier
    with server.connect(use_index=False) as client:
        client.store(keys(1, 0), [bytes(namespace.layout.nbytes)], namespace=namespace)
        channel = client.links.current().channel
        held_back = channel.start(
            m.LookupRequest(0, namespace.id, join_keys(keys(2, 0)), m.LookupOptions(hold=True, wait_s=60.0))
        )
        client.noop()  # the server waits for the tier from here on
        assert client.status()["l1"]["leases_by_kind"]["promise"] == 1
        channel.call(m.EndSession(0, leases=None))
        assert client.status()["l1"]["leases_by_kind"]["promise"] == 0
        assert not held_back.settled, "no wait ends early"
        channel.call(m.Cancel(0, held_back.rid))
        answer = channel.wait(held_back)
        assert isinstance(answer, m.LookupReply)
        assert not answer.promise, "it was cancelled"
        assert client.status()["l1"]["leases_by_kind"]["promise"] == 0


def test_a_cancel_that_crosses_an_answer_frees_its_promise_while_loads_run(
    with_silent_tier: Server, namespace: Namespace
) -> None:
    with with_silent_tier.connect(use_index=False) as client:
        client.store(keys(1, 0), [bytes(namespace.layout.nbytes)], namespace=namespace)
        channel = client.links.current().channel
        options = m.LookupOptions(hold=True, prefix=False)
        asked = channel.start(m.LookupRequest(0, namespace.id, join_keys(keys(2, 0)), options))
        answer = channel.wait(asked)
        assert isinstance(answer, m.LookupReply)
        assert answer.promise
        assert not answer.done
        channel.call(m.Cancel(0, asked.rid))  # it was sent before the answer came
        assert client.status()["l1"]["leases_by_kind"]["promise"] == 0


def test_a_cancel_that_crosses_the_answer_to_a_query_frees_the_promise_that_the_query_made(
    with_tier: Server, namespace: Namespace
) -> None:
    with with_tier.connect(use_index=False) as client:
        client.store(keys(1, 0), [bytes(namespace.layout.nbytes)], namespace=namespace)
        client.wait_stored(keys(1, 0), namespace=namespace, timeout_s=60)
        client.clear(namespace)
        found = client.lookup(keys(1, 0), namespace=namespace, hold=True)
        assert not found.promise
        until(lambda: with_tier.parts.lookups.waits[found.job].job.ended, "its load")  # type: ignore[union-attr]
        channel = client.links.current().channel
        for _ in range(2):  # the next query makes another
            query = channel.start(m.QueryPrefetchStatus(0, found.job))
            answer = channel.wait(query)
            assert isinstance(answer, m.LookupReply)
            assert answer.promise
            channel.call(m.Cancel(0, query.rid))
            assert client.status()["l1"]["leases_by_kind"]["promise"] == 0


class Policies:
    """A plugin whose prefetch policies are made by modules of a test."""

    def __init__(self, *names: str) -> None:
        self.names = names

    @hookimpl
    def lmcache_components(self) -> list[ComponentSpec]:
        return [ComponentSpec(Kind.PREFETCH_POLICY, name, factory=f"{name}:Policy") for name in self.names]


def test_a_lookup_that_names_a_policy_imports_nothing(
    tmp_path: Path, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All are built at the start; for one that fails, or hangs, a lookup is told why it cannot be used."""
    monkeypatch.setattr(components, "START_STEP_S", 0.2)
    monkeypatch.syspath_prepend(str(tmp_path))
    gate, imports = threading.Event(), []
    told = types.ModuleType("policies_of_a_test")
    told.gate, told.imports = gate, imports  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, told.__name__, told)
    begin = f"from {told.__name__} import gate, imports\nimports.append(__name__)\n"
    good = "from lmcache_core.policies.prefetch import DefaultPrefetch as Policy"
    bodies = {
        "policy_broken": "raise ImportError('no such library')",
        "policy_hangs": "gate.wait()",
        "policy_good": good,
    }
    for name, body in bodies.items():
        (tmp_path / f"{name}.py").write_text(begin + body)
    registry = load_plugins()
    registry.register(Policies(*bodies), "test_policies", distribution="lmcache-policies-of-a-test", version="1")
    settings = server_settings(tmp_path, registry, l2={"disk": {"type": "fs", "path": str(tmp_path / "disk")}})
    try:
        with Server(settings, registry) as server, server.connect() as client:
            assert sorted(imports) == sorted(bodies)
            for _ in range(2):
                with pytest.raises(UsageError, match=r"'policy_broken'.* no such library"):
                    client.lookup(keys(1, 0), namespace=namespace, policy="policy_broken")
                with pytest.raises(UsageError, match=r"'policy_hangs'.*lmcache-policies-of-a-test.* has not built it"):
                    client.lookup(keys(1, 0), namespace=namespace, policy="policy_hangs")
                assert not client.lookup(keys(1, 0), namespace=namespace, policy="policy_good", wait_s=30).hits
            assert sorted(imports) == sorted(bodies)
    finally:
        gate.set()
