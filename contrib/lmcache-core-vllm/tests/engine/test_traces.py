"""A request of vLLM's with a trace: what is saved of it is a span of that trace, as a collector gets it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest

from lmcache_core import make_settings
from lmcache_core.plugins.loader import load_plugins
from lmcache_core.server.server import Server
from lmcache_core_vllm.config import ConnectorConfig
from lmcache_core_vllm.groups import Group, Kind
from lmcache_core_vllm.namespaces import GroupFacts, Hashing, RankFacts
from lmcache_core_vllm.scheduler import SchedulerSide
from lmcache_core_vllm.steps import Step
from lmcache_core_vllm.tensors import layer_regions
from lmcache_core_vllm.worker import WorkerSide
from lmcache_testing.waiting import WAIT_S

torch = pytest.importorskip("torch")
proto = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")

BLOCK, BYTES = 16, 4096
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HASHING = Hashing("sha256", "0")


@pytest.fixture
def collected() -> Iterator[tuple[str, list[object]]]:
    """The address of a collector, and the spans that it has."""
    spans: list[object] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = proto.ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["Content-Length"])))
            spans.extend(span for group in request.resource_spans for each in group.scope_spans for span in each.spans)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            del format, args

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", spans
        server.shutdown()
        thread.join()


def request_of(name: str, first: int, headers: dict[str, str] | None) -> Any:
    """vLLM's own request, of two blocks."""
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.request import Request

    kv_cache_utils.init_none_hash(sha256)
    return Request(
        request_id=name,
        prompt_token_ids=list(range(first, first + 2 * BLOCK)),
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        block_hasher=kv_cache_utils.get_request_block_hasher(BLOCK, sha256),
        trace_headers=headers,
    )


def step_of(tables: dict[str, list[int]]) -> SimpleNamespace:
    """What vLLM says of a step that computes both blocks of each request."""
    return SimpleNamespace(
        total_num_scheduled_tokens=2 * BLOCK * len(tables),
        scheduled_new_reqs=[SimpleNamespace(req_id=name, num_computed_tokens=0, block_ids=([],)) for name in tables],
        scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[], new_block_ids=[]),
        scheduled_spec_decode_tokens={},
        num_scheduled_tokens=dict.fromkeys(tables, 2 * BLOCK),
        kv_connector_block_state=SimpleNamespace(
            get_block_ids=lambda name: (tables[name],), boundary_state_offloads={}
        ),
    )


def test_what_is_saved_of_a_request_stands_in_the_trace_of_its_caller(
    collected: tuple[str, list[object]], tmp_path: Path
) -> None:
    pytest.importorskip("lmcache_otel", reason="the server exports with it")
    url, spans = collected
    settings = ConnectorConfig(step_wait_s=20, load_timeout_s=20, lookup_timeout_s=20)
    rank = RankFacts("m", "", (0, 1), True, (GroupFacts((), BYTES),))
    memory = torch.randint(0, 256, (8, 1, 1, BYTES), dtype=torch.uint8)
    values = {"name": f"traces-{uuid4().hex[:8]}", "runtime_dir": str(tmp_path / "run"), "state_dir": str(tmp_path)}
    made = make_settings(**values, l1={"size_bytes": 16 << 20}, otel={"endpoint": url, "sample_ratio": 0.0})
    with Server(made, load_plugins()) as server, server.connect() as asks, server.connect() as stores:
        assert server.parts.populator.wait(WAIT_S)
        scheduler = SchedulerSide(settings, [Group(0, Kind.FULL, BLOCK, 1)], asks, lambda: HASHING)
        scheduler.know_ranks([rank])
        worker = WorkerSide(settings, stores, rank, [layer_regions(["a"], {"a": memory}, 8)])
        headers = {"traceparent": f"00-{TRACE}-{SPAN}-01"}
        for request in (request_of("traced", 0, headers), request_of("plain", 500, None)):
            scheduler.match(request, 0)
        step = scheduler.step(step_of({"plain": [1, 2], "traced": [3, 4]}))
        worker.save(step)
        for saving in worker.saving:
            saving.job.wait()
        worker.save(Step(HASHING))  # counts what has been answered
        end = time.monotonic() + WAIT_S
        while not (stored := [span for span in spans if span.name == "lmcache.store"]):
            assert time.monotonic() < end, [span.name for span in spans]
            time.sleep(0.01)
    assert [(span.trace_id.hex(), span.parent_span_id.hex()) for span in stored] == [(TRACE, SPAN)]
    assert worker.counters.take()["save_blocks"] == 4
