"""Spans, as a collector gets them: a small one on loopback, which decodes what arrives."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from lmcache_core.client.client import Client
from lmcache_testing.embedded import Json

pytest.importorskip("lmcache_otel", reason="traces need the package that makes spans")

from opentelemetry import context as otel_context
from opentelemetry import trace as otel
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from lmcache_core import make_settings
from lmcache_core.client.move.pages import PageEntry
from lmcache_core.client.move.regions import PageGroup, Region
from lmcache_core.client.results import Status
from lmcache_core.errors import SettingsError, UsageError
from lmcache_core.observe import bus
from lmcache_core.plugins.loader import load_plugins
from lmcache_core.protocol import messages as m
from lmcache_core.protocol.traceparent import parse_traceparent
from lmcache_core.server.server import Server
from lmcache_core.tokens.namespace import Namespace
from lmcache_otel import limits, tracer
from lmcache_otel.spans import LOOKUP, SPANS, SpanEnded, SpanExporter, table
from lmcache_testing.waiting import until

from ..conftest import Node

NBYTES = 65536
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
ENGINES = f"00-{TRACE}-{SPAN}-01"
ATTRIBUTES = {each.name: set(each.attributes) for each in SPANS}
ENDED = SpanEnded(
    at_s=1.0, type=LOOKUP, trace=1, span=2, parent=0, remote=False, began_s=1.0, ended_s=2.0, attributes={}
)


class OddCollector:
    """Answers as it is told."""

    def __init__(self, how: str) -> None:
        self.how = how
        self.redirected = 0  # requests that came where it redirects to
        self._stopping = threading.Event()
        odd = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                with contextlib.suppress(OSError):  # the exporter hangs up
                    getattr(odd, f"_{odd.how}")(self)

            def do_GET(self) -> None:
                odd.redirected += 1
                odd._answer(self, 200)

            def log_message(self, format: str, *args: object) -> None:
                del format, args

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._stopping.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _answer(self, to: BaseHTTPRequestHandler, code: int, body: bytes = b"", **headers: str) -> None:
        to.send_response(code)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            to.send_header(name.replace("_", "-"), value)
        to.end_headers()
        to.wfile.write(body)

    def _repeat(self, to: BaseHTTPRequestHandler, text: bytes, pause_s: float = 0.01) -> None:
        """Longer than anybody has patience."""
        while not self._stopping.wait(pause_s):
            to.wfile.write(text)
            to.wfile.flush()

    def _well(self, to: BaseHTTPRequestHandler) -> None:
        self._answer(to, 200, Content_Type="application/x-protobuf")

    def _terse(self, to: BaseHTTPRequestHandler) -> None:
        self._answer(to, 200, b"OK", Content_Type="text/plain")

    def _endless(self, to: BaseHTTPRequestHandler) -> None:
        to.send_response(200)
        to.end_headers()
        self._repeat(to, bytes(65536), 0)

    def _refuses(self, to: BaseHTTPRequestHandler) -> None:
        self._answer(to, 400)

    def _fails(self, to: BaseHTTPRequestHandler) -> None:
        self._answer(to, 503, Retry_After="100")

    def _redirects(self, to: BaseHTTPRequestHandler) -> None:
        self._answer(to, 302, Location=f"{self.url}/login")

    def _rejects(self, to: BaseHTTPRequestHandler, spans: int = 1 << 40) -> None:
        said = ExportTraceServiceResponse()
        said.partial_success.rejected_spans = spans
        said.partial_success.error_message = "over your quota\n"
        self._answer(to, 200, said.SerializeToString(), Content_Type="application/x-protobuf")

    def _rejects_one(self, to: BaseHTTPRequestHandler) -> None:
        self._rejects(to, 1)

    def _hangs_up(self, to: BaseHTTPRequestHandler) -> None:
        to.close_connection = True

    def _garbage(self, to: BaseHTTPRequestHandler) -> None:
        to.wfile.write(bytes(range(128, 256)) * 4)
        to.close_connection = True

    def _half(self, to: BaseHTTPRequestHandler) -> None:
        to.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nabc")
        to.close_connection = True

    def _drips(self, to: BaseHTTPRequestHandler) -> None:
        to.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 60000\r\n\r\n")
        self._repeat(to, b"x")

    def _drips_headers(self, to: BaseHTTPRequestHandler) -> None:
        to.wfile.write(b"HTTP/1.1 200 OK\r\n")
        self._repeat(to, b"X: y\r\n", 0.2)

    def _continues(self, to: BaseHTTPRequestHandler) -> None:
        self._repeat(to, b"HTTP/1.1 100 Continue\r\n\r\n")

    def _silent(self, to: BaseHTTPRequestHandler) -> None:
        del to
        self._stopping.wait()


@pytest.fixture
def odd() -> Iterator[Callable[[str], OddCollector]]:
    with contextlib.ExitStack() as stack:

        def start(how: str) -> OddCollector:
            collector = OddCollector(how)
            stack.callback(collector.close)
            return collector

        yield start


def look(node: Node, client: Client, times: int = 20) -> int:
    """Look up, which ends a span each; how many."""
    for _ in range(times):
        client.lookup([node.key("nowhere")], namespace=node.namespace)
    return times


def fates(client: Client, ended: int) -> Json:
    """What became of the spans once none waits; at each moment the figures add up."""

    def all_known() -> Json | bool:
        told = client.status()["tracing"]
        assert told["exported"] + told["failed"] + told["waiting"] + told["dropped"] == ended
        return told["waiting"] == 0 and told

    return dict(until(all_known))


def test_spans_that_a_collector_took_are_counted_as_exported(node: Node, odd: Callable[[str], OddCollector]) -> None:
    node.serve("--otel.endpoint", odd("well").url)
    client = node.client()
    told = fates(client, look(node, client))
    assert (told["exported"], told["failed"], told["disabled"]) == (20, 0, "")


@pytest.mark.parametrize("how", ["terse", "endless"])
def test_an_exporter_counts_spans_that_a_collector_took_in_its_own_way_as_exported(
    odd: Callable[[str], OddCollector], how: str
) -> None:
    exporter = SpanExporter(make_settings(otel={"endpoint": odd(how).url}).otel, "server")
    exporter.hear([ENDED] * 20)
    exporter.close()
    assert exporter.fates == (20, 0)


@pytest.mark.parametrize(
    "how",
    ["refuses", "fails", "redirects", "rejects", "hangs_up", "garbage", "half", "drips", "drips_headers", "continues"],
)
def test_an_exporter_counts_spans_that_a_collector_did_not_take_as_failed_and_sends_the_next_ones(
    odd: Callable[[str], OddCollector], how: str
) -> None:
    collector = odd(how)
    exporter = SpanExporter(make_settings(otel={"endpoint": collector.url, "timeout_s": 0.5}).otel, "server")
    exporter.hear([ENDED] * 20)
    assert exporter.fates == (0, 20)
    collector.how = "well"

    def exports() -> bool:  # half a second may pass on a busy machine
        exporter.hear([ENDED])
        return exporter.fates.exported > 0

    until(exports)
    exporter.close()
    assert collector.redirected == 0


def test_spans_that_a_collector_did_not_take_are_counted_as_failed_and_the_next_ones_are_sent(
    node: Node, odd: Callable[[str], OddCollector]
) -> None:
    collector = odd("silent")
    node.serve("--otel.endpoint", collector.url, "--otel.timeout_s", "1")
    client = node.client()
    ended = look(node, client)
    told = fates(client, ended)
    assert (told["exported"], told["failed"], told["disabled"]) == (0, ended, "")
    collector.how = "well"

    def exports() -> object:  # a whole second may pass on a busy machine
        nonlocal ended
        ended += look(node, client)
        return fates(client, ended)["exported"]

    assert until(exports)


def test_of_a_batch_that_a_collector_took_in_part_only_the_rest_has_failed_and_the_log_has_its_words_once(
    odd: Callable[[str], OddCollector], caplog: pytest.LogCaptureFixture
) -> None:
    settings = make_settings(otel={"endpoint": odd("rejects_one").url, "timeout_s": limits.TIMEOUT_S_MAX}).otel
    exporter = SpanExporter(settings, "server")
    for _ in range(2):
        exporter.hear([ENDED] * 3)
    exporter.close()
    assert exporter.fates == (4, 2)
    [said] = [record.getMessage() for record in caplog.records if "collector" in record.getMessage()]
    assert "1 of 3 spans" in said
    assert r"'over your quota\n'" in said


def test_spans_of_a_batch_that_the_exporter_was_given_up_with_have_failed(
    tmp_path: Path, node: Node, odd: Callable[[str], OddCollector], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bus, "SUBSCRIBER_HANG_S", 0.01)
    otel = {"endpoint": odd("silent").url, "timeout_s": limits.TIMEOUT_S_MAX}
    l1 = {"size_bytes": "8MiB", "backing": "memfd"}
    settings = make_settings(name=node.name, runtime_dir=tmp_path, state_dir=tmp_path, l1=l1, otel=otel)
    server = Server(settings, load_plugins()).start()
    try:
        with server.connect() as client:
            ended = look(node, client)
            until(lambda: client.status()["tracing"]["disabled"])
            ended += look(node, client)
            assert fates(client, ended)["failed"] == ended
    finally:
        server.stop()


def test_the_span_of_a_store_whose_client_dies_while_it_waits_ends_as_failed(node: Node, collector: Collector) -> None:
    pytest.importorskip("lmcache_mock", reason="needs a tier that hangs")
    tier = ("--l2.m.type", "mock", "--l2.m.faults", '["store hang"]', "--dirty", "wait", "--store_wait_s", "5")
    node.serve("--otel.endpoint", collector.url, *tier, size="8MiB")
    worker = node.worker("n = 0\nwhile True: n += 1; client.store([key(n)], [bytes(65536)], namespace=ns)")
    client = node.client()
    until(lambda: client.status()["stores_waiting"])
    worker.kill()
    [failed] = until(lambda: [span for span in collector.named("lmcache.store") if span.status.code == 2])
    assert failed.status.message == "unanswered"
    assert values(failed.attributes)["lmcache.granted"] == 0


class Collector:
    """Takes spans over OTLP (http/protobuf)."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.bodies: list[bytes] = []
        self.headers: list[Any] = []
        self.resource: dict[str, object] = {}
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                collector.take(self.path, self.headers, body)
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                del format, args

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def take(self, path: str, headers: object, body: bytes) -> None:
        assert path == "/v1/traces"
        request = ExportTraceServiceRequest.FromString(body)
        self.bodies.append(body)
        self.headers.append(headers)
        for group in request.resource_spans:
            self.resource = values(group.resource.attributes)
            for scope in group.scope_spans:
                self.spans += scope.spans

    def named(self, name: str, count: int = 1) -> list[Any]:
        """The spans of this name, once there are so many."""
        return until(lambda: (f := [s for s in self.spans if s.name == name]) and len(f) >= count and f, name)

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def values(attributes: Any) -> Json:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


def test_a_store_and_a_lookup_hang_under_the_engines_span_with_their_tiers_below(
    node: Node, collector: Collector, tmp_path: Path
) -> None:
    pytest.importorskip("lmcache_fs", reason="needs the disk tier")
    node.serve("--otel.endpoint", collector.url, "--l2.disk.type", "fs", "--l2.disk.path", str(tmp_path / "disk"))
    client = node.client()
    space = Namespace("model", node.namespace.layout, tenant_salt="correct-horse-battery")
    keys = [node.key(f"secret {number}") for number in range(6)]
    client.store(keys, [node.payload(7)] * 6, namespace=space, traceparent=ENGINES)
    [store] = collector.named("lmcache.store")
    until(lambda: sum(values(s.attributes)["lmcache.stored"] for s in collector.named("lmcache.tier.store")) == 6)
    client.clear(space)
    found = client.lookup(keys, namespace=space, wait_s=30.0, traceparent=ENGINES)
    assert found.hits == 6
    [lookup] = collector.named("lmcache.lookup")
    loads, commits = collector.named("lmcache.tier.load"), collector.named("lmcache.commit")

    assert {span.trace_id.hex() for span in collector.spans} == {TRACE}
    assert store.parent_span_id.hex() == lookup.parent_span_id.hex() == SPAN
    stores = collector.named("lmcache.tier.store")
    assert {span.parent_span_id for span in stores} == {store.span_id}
    assert {span.parent_span_id for span in loads} == {lookup.span_id}
    assert {span.parent_span_id for span in commits} == {span.span_id for span in loads}
    assert len({span.span_id for span in collector.spans}) == len(collector.spans)
    named = {"lmcache.namespace": f"{space.id:016x}"}
    assert values(store.attributes) == named | {"lmcache.keys": 6, "lmcache.granted": 6, "lmcache.committed": 6}
    assert values(lookup.attributes) == named | {"lmcache.keys": 6, "lmcache.hits": 6, "lmcache.loaded": 6}
    assert sum(values(span.attributes)["lmcache.bytes"] for span in loads) == 6 * NBYTES
    assert {values(span.attributes)["lmcache.tier"] for span in [*loads, *stores]} == {"disk"}
    for span in collector.spans:
        assert set(values(span.attributes)) == ATTRIBUTES[span.name]
        assert span.start_time_unix_nano <= span.end_time_unix_nano
        assert span.status.code == 0
    assert collector.resource["service.name"] == "lmcache-core"
    assert collector.resource["lmcache.server"] == node.name
    sent = b"".join(collector.bodies)
    for content in (b"secret", *(key.hex().encode() for key in keys), b"correct-horse", node.payload(7)[:16]):
        assert content not in sent


def test_what_one_store_of_pages_takes_from_several_requests_stands_in_the_trace_of_each(
    node: Node, collector: Collector
) -> None:
    server = node.serve("--otel.endpoint", collector.url, "--otel.sample_ratio", "0")
    memory = bytearray(4 * NBYTES)
    with server.client() as client:
        pages = client.register_pages([PageGroup(node.namespace, [Region(memory, 0, NBYTES, NBYTES, 4)], 1)])
        other = f"00-{TRACE[::-1]}-{SPAN}-01"
        entries = [
            PageEntry(0, [node.key(at)], [at], traceparent=trace) for at, trace in enumerate((ENGINES, other, "", ""))
        ]
        assert pages.store(entries[:3]).statuses == [[Status.STORED]] * 3
        assert pages.store(entries[3:], traceparent=ENGINES).statuses == [[Status.STORED]]
    stores = collector.named("lmcache.store", 3)
    assert sorted(span.trace_id.hex() for span in stores) == sorted([TRACE, TRACE, TRACE[::-1]])


def test_a_client_that_is_asked_to_takes_the_current_context_along(node: Node, collector: Collector) -> None:
    node.serve("--otel.endpoint", collector.url)
    context = otel.SpanContext(int(TRACE, 16), int(SPAN, 16), False, otel.TraceFlags(1))
    key = [node.key(1)]
    with node.client(trace=True) as client, node.client() as plain:
        token = otel_context.attach(otel.set_span_in_context(otel.NonRecordingSpan(context)))
        try:
            plain.lookup(key, namespace=node.namespace)
            handle = client.lookup_nowait(key, namespace=node.namespace)
        finally:
            otel_context.detach(token)
        assert handle.wait(60.0)
        client.lookup(key, namespace=node.namespace)  # nothing is current any more
    parents = [span.parent_span_id.hex() for span in collector.named("lmcache.lookup", 3)]
    assert sorted(parents) == ["", "", SPAN]


def test_whether_a_trace_is_recorded_is_its_callers_decision(node: Node, collector: Collector) -> None:
    node.serve("--otel.endpoint", collector.url, "--otel.sample_ratio", "0")
    client = node.client()
    keys = [node.key(1)]
    client.lookup(keys, namespace=node.namespace)
    client.lookup(keys, namespace=node.namespace, traceparent=f"00-{TRACE}-{SPAN}-00")
    client.store(keys, [node.payload(1)], namespace=node.namespace, traceparent="no trace at all")
    lease = client.prepare_store([node.key(2), node.key(3)], namespace=node.namespace, traceparent=ENGINES)
    lease.commit([0])
    lease.abort()
    [span] = collector.named("lmcache.store")  # and nothing of what was asked before
    assert len(collector.spans) == 1
    assert values(span.attributes)["lmcache.committed"] == 1
    assert values(span.attributes)["lmcache.granted"] == 2
    with pytest.raises(UsageError, match="W3C"):
        client.lookup(keys, namespace=node.namespace, traceparent=b"bytes")  # type: ignore[arg-type]


def test_a_header_goes_to_the_collector_and_stays_out_of_every_status(node: Node, collector: Collector) -> None:
    server = node.serve("--otel.endpoint", collector.url, "--otel.headers.authorization", "Bearer hunter2")
    client = node.client()
    client.lookup([node.key(1)], namespace=node.namespace)
    collector.named("lmcache.lookup")
    assert collector.headers[0]["authorization"] == "Bearer hunter2"
    with server.client(maps_pool=False) as looker:
        until(lambda: looker.status()["tracing"]["exported"] == 1)
        assert "hunter2" not in json.dumps([looker.status(), looker.config()])


@pytest.mark.parametrize("how", ["dead", "hangs"])
def test_a_collector_that_does_not_answer_holds_nobody_up(node: Node, how: str) -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        if how == "hangs":
            listening.listen(64)  # whoever connects waits for an answer
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        node.serve("--otel.endpoint", url, "--otel.timeout_s", "0.2")
        client = node.client()
        keys = [node.key(number) for number in range(4)]
        client.store(keys, [node.payload(1)] * 4, namespace=node.namespace)
        while client.status()["tracing"]["failed"] < 2:  # calls go on, whatever becomes of their spans
            assert client.lookup([node.key("nowhere")], namespace=node.namespace).hits == 0
        assert client.lookup(keys, namespace=node.namespace).hits == 4
        assert client.status()["tracing"]["disabled"] == ""


def test_spans_beyond_what_may_wait_are_dropped_and_counted(
    tmp_path: Path, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracer, "SPANS_WAITING_MAX", 20)
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(64)
        endpoint = f"http://127.0.0.1:{listening.getsockname()[1]}"
        settings = make_settings(
            name=node.name,
            runtime_dir=tmp_path,
            state_dir=tmp_path,
            l1={"size_bytes": "8MiB", "backing": "memfd"},
            otel={"endpoint": endpoint, "timeout_s": limits.TIMEOUT_S_MAX},
        )
        server = Server(settings, load_plugins()).start()
        try:
            with server.connect() as client:
                asked = 0
                while not (told := client.status()["tracing"])["dropped"]:
                    client.lookup([node.key("nowhere")], namespace=node.namespace)
                    asked += 1
                assert told["waiting"] <= 2 * 20  # those of a batch under way among them
                assert told["dropped"] + told["waiting"] + told["failed"] + told["exported"] == asked
        finally:
            server.stop()


def test_a_server_without_a_collector_imports_and_takes_nothing_of_it(node: Node) -> None:
    node.serve()
    client = node.client()
    client.lookup([node.key(1)], namespace=node.namespace, traceparent=ENGINES)
    link = client.links.current()
    request = m.LookupRequest(1, node.namespace.id, node.key(1))
    assert link.traced(request, ENGINES) is request
    assert client.status()["tracing"] is None
    code = "import sys, lmcache_core.server.server, lmcache_core.client.client\n"
    code += "sys.exit(any(name.startswith('opentelemetry') or name.startswith('lmcache_otel')"
    code += " for name in sys.modules))"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_the_sdk_the_error_says_what_to_install(
    tmp_path: Path, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    l1 = {"size_bytes": "8MiB", "backing": "memfd"}
    settings = make_settings(name=node.name, runtime_dir=tmp_path, l1=l1, otel={"endpoint": "http://127.0.0.1:1"})
    with pytest.raises(SettingsError, match="pip install lmcache-otel"):
        Server(settings, load_plugins())


@pytest.mark.parametrize(
    "text",
    [
        "",
        "00",
        ENGINES[:-1],
        ENGINES.upper(),
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"{ENGINES}-more",
        ENGINES + "\n",
    ],
)
def test_what_is_no_trace_context_is_ignored(text: str) -> None:
    assert parse_traceparent(text) is None


def test_a_later_version_of_the_standard_is_read_as_far_as_it_is_known() -> None:
    found = parse_traceparent(f"01-{TRACE}-{SPAN}-03-what-comes-then")
    assert found == (int(TRACE, 16), int(SPAN, 16), True)


def test_the_table_in_the_docs_is_the_codes() -> None:
    page = (Path(__file__).parents[2] / "docs/operating/tracing.md").read_text()
    assert table() in page
