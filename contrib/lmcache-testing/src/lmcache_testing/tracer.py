"""The contract of tracers, as tests: each in a real server, embedded in the test's process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from lmcache_core.clock import Clock
from lmcache_core.observe.tracer import RequestTracer, TracerContext
from lmcache_core.plugins.components import Kind
from lmcache_core.pool.layout import Layout
from lmcache_core.tokens.namespace import Namespace
from lmcache_testing.contract import Contract
from lmcache_testing.embedded import NAMELESS, embedded_server

if TYPE_CHECKING:
    from lmcache_core.server.server import Server

_SPACE = Namespace("kit", Layout("uint8", (4096,)))
_TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class TracerContract(Contract):
    """For a tracer whose package is installed. `component` is its name, and the fixture `tracer_settings` gives the
    settings in its table, with which it traces; what it sends to need not be there."""

    @pytest.fixture
    def tracer_settings(self) -> dict[str, Any]:
        return {}

    @pytest.fixture
    def tracer(self, tracer_settings: dict[str, Any]) -> Iterator[RequestTracer]:
        from lmcache_core.plugins.loader import load_plugins

        context = TracerContext("kit", Clock(), lambda namespace, keys: ())
        made = load_plugins().build(Kind.TRACER, self.component, tracer_settings, context)
        assert isinstance(made, RequestTracer), f"a {type(made).__name__} is no RequestTracer"
        yield made
        made.close()

    @pytest.fixture
    def tracer_server(self, tmp_path: Path, tracer_settings: dict[str, Any]) -> Iterator[Server]:
        """A server with this tracer."""

        with embedded_server(tmp_path, l1=NAMELESS, **{self.component: tracer_settings}) as server:
            yield server

    def test_it_takes_any_trace_context(self, tracer: RequestTracer) -> None:
        """It comes from a user's header."""
        for text in ("", _TRACE, _TRACE[:-2] + "00", "no trace at all", "00-é", "0" * 10_000):
            hash(tracer.begin(text))

    def test_leases_that_it_does_not_know_are_nothing_to_it(self, tracer: RequestTracer) -> None:
        """Those of reads, and of stores that are not traced."""
        tracer.settled(12345, range(3), bytes(3))
        tracer.check()

    def test_its_status_is_plain(self, tracer: RequestTracer) -> None:
        trace = tracer.begin(_TRACE)
        if trace is not None:
            tracer.store_refused(trace, 1, bytes(32), "full")
        msgspec.msgpack.encode(tracer.status())

    def test_requests_that_it_follows_are_answered_as_others(self, tracer_server: Server) -> None:
        keys, payload = [bytes([number]) * 32 for number in range(1, 4)], bytes(4096)
        with tracer_server.connect(use_index=False) as client:
            assert client.store(keys, [payload] * 3, namespace=_SPACE, traceparent=_TRACE).stored == 3, (
                "nothing is stored"
            )
            assert client.lookup(keys, namespace=_SPACE, traceparent=_TRACE).hits == 3, "what was stored is not found"
            lease = client.prepare_store([b"\xff" * 32], namespace=_SPACE, traceparent=_TRACE)
            lease.abort()
            assert client.lookup([b"\xff" * 32], namespace=_SPACE).hits == 0, "a store that was aborted is found"
            assert client.status()["counters"].get("internal_errors", 0) == 0, "it has raised in the server"

    def test_it_ends_with_its_server(self, tracer_server: Server) -> None:
        before = set(threading.enumerate())
        tracer_server.stop()
        left = [thread.name for thread in threading.enumerate() if thread in before and thread.name == "lmcache-events"]
        assert not left, "its thread is still there after its server"
