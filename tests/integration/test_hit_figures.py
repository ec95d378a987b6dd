"""One truth for hits: what an engine's scheduler finds, by the index or from the server, is the same in its own
figures, in `status`, on /metrics, in the dashboard's queries, in `check --engine vllm` and in `explain`. The test
counts outside of all of them, from what it has stored. tests/engine of lmcache-core-vllm does the same with vLLM.
"""

from __future__ import annotations

import json
import re
import signal
import socket
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lmcache_http", reason="needs /metrics")
pytest.importorskip("lmcache_core_vllm", reason="needs the scheduler's side of the connector")

from prometheus_client.parser import text_string_to_metric_families

from lmcache_core.cli.main import main
from lmcache_core.native import native
from lmcache_testing.waiting import until

from ..conftest import Node, Process, ServerProcess

pytestmark = pytest.mark.skipif(native is None, reason="the index is read by the C extension alone")

BLOCK = 16
STORED = 6  # blocks of each prompt
ENGINE = """
import hashlib, json
from types import SimpleNamespace
from lmcache_core_vllm.config import ConnectorConfig
from lmcache_core_vllm.groups import Group, Kind
from lmcache_core_vllm.namespaces import GroupFacts, Hashing, RankFacts
from lmcache_core_vllm.scheduler import SchedulerSide
shape = json.loads(wait())
client.close()
kinds = [Kind.FULL, Kind.WINDOW][:shape["groups"]]
groups = [Group(at, kind, 16, 1, 48) for at, kind in enumerate(kinds)]
facts = tuple(GroupFacts((("group", str(at)),), 4096) for at in range(len(groups)))
ranks = [RankFacts("m", "", (at, shape["ranks"]), True, facts) for at in range(shape["ranks"])]
hashing = Hashing("sha256", "0")
timeout_s = shape["timeout_s"]
client = Client.connect(sys.argv[1], runtime_dir=sys.argv[2], client_name="vllm-scheduler", call_timeout_s=timeout_s)
config = ConnectorConfig(lookup_timeout_s=timeout_s, step_wait_s=2 * timeout_s, retry_s=60.0)
no_more = SimpleNamespace(req_ids=[], num_computed_tokens=[], new_block_ids=[])
empty = SimpleNamespace(
    total_num_scheduled_tokens=0, scheduled_new_reqs=[], num_scheduled_tokens={}, scheduled_spec_decode_tokens={},
    scheduled_cached_reqs=no_more, kv_connector_block_state=None,
)
side = SchedulerSide(config, groups, client, lambda: hashing)
side.know_ranks(ranks)
figures = {}
def hashes(seed, blocks):
    return [hashlib.sha256(f"{seed} {at}".encode()).digest() for at in range(blocks)]
def store(seed, blocks):
    for namespace in (each for rank in side.namespaces for each in rank):
        keys = hashing.keys(hashes(seed, blocks), namespace)
        assert client.store(keys, [bytes(4096)] * blocks, namespace=namespace).stored == blocks
def prompt(name, seed, tokens):
    request = SimpleNamespace(
        request_id=str(name), num_tokens=tokens, num_prompt_tokens=tokens, num_computed_tokens=0, all_token_ids=[],
        block_hashes=hashes(seed, tokens // 16), lora_request=None, skip_reading_prefix_cache=False,
        kv_transfer_params=None,
    )
    while (found := side.match(request, 0)[0]) is None:
        side.step(empty)
    for _ in range(3):
        assert side.match(request, 0)[0] == found  # no room in the engine: it is looked at again, and not counted
    side.finished(request)
    return found
def missing(seed, blocks):
    told = []
    for namespace in (each for rank in side.namespaces for each in rank):
        keys = hashing.keys(hashes(seed, blocks), namespace)
        told += [not each.hit for each in client.explain(keys, namespace=namespace)]
    return sum(told)
say("ready")
while True:
    value = eval(wait())
    for name, count in side.counters.take().items():
        figures[name] = figures.get(name, type(count)()) + count  # numbers, and lists of times
    say(json.dumps(value))
"""


class Engine:
    """A scheduler in a process of its own, and what it must have found."""

    def __init__(self, node: Node, **shape: Any) -> None:
        self._process: Process = node.worker(ENGINE)
        self._process.go(json.dumps({"groups": 1, "ranks": 1, "timeout_s": 5.0, **shape}))
        self._process.expect("ready")
        self.spaces = shape.get("groups", 1) * shape.get("ranks", 1)
        self.prompts = self.tokens = self.hit_tokens = 0

    def run(self, expression: str) -> Any:
        self._process.go(expression)
        return json.loads(self._process.line())

    def ask(self, seed: str, blocks: int, stored: int) -> None:
        """A prompt of so many blocks and a token, of which the first `stored` have been stored."""
        hit_tokens = BLOCK * min(blocks, stored)
        assert self.run(f"prompt({self.prompts}, {seed!r}, {blocks * BLOCK + 1})") == hit_tokens
        self.prompts += 1
        self.tokens += blocks * BLOCK
        self.hit_tokens += hit_tokens


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


def scraped(port: int) -> dict[str, float]:
    """The sum of all samples of each name, over HTTP."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            text = answer.read().decode()
    except OSError:  # its process is not there yet
        return {}
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    return sums


def panel(title: str, sums: dict[str, float]) -> float:
    """What the dashboard's query shows, over the whole life of the server: each rate is then a figure's growth."""
    board = json.loads((Path(__file__).parents[2] / "contrib/dashboards/grafana.json").read_text())
    (query,) = [each["targets"][0]["expr"] for each in board["panels"] if each["title"] == title]
    numbers = re.sub(r"sum \(rate\((\w+)\{[^}]*\}\[[^]]*\]\)\)", lambda found: str(sums[found[1]]), query)
    return float(eval(numbers))  # figures and a division, or it is no number


def checked(server: ServerProcess, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    capsys.readouterr()
    main(["check", "--engine", "vllm", "--json", "--name", server.name, "--runtime_dir", str(server.run)])
    return {each["subject"]: each["message"] for each in json.loads(capsys.readouterr().out)["findings"]}


@pytest.fixture
def compare(capsys: pytest.CaptureFixture[str]) -> Callable[[Engine, ServerProcess, int], None]:
    """All figures with the engine's model of them."""

    def compared(engine: Engine, server: ServerProcess, port: int) -> None:
        own = engine.run("figures")
        assert (own["lookup_requests"], own["lookup_hit_tokens"]) == (engine.prompts, engine.hit_tokens)
        assert own["lookup_hit_tokens"] + own["lookup_missed_tokens"] == engine.tokens
        keys, hits = (engine.spaces * each // BLOCK for each in (engine.tokens, engine.hit_tokens))
        with server.client(maps_pool=False) as client:
            until(lambda: client.status()["traffic"]["lookups"]["keys"] == keys, lambda: client.status()["traffic"])
            status = client.status()
        lookups, rows = status["traffic"]["lookups"], status["traffic"]["namespaces"]
        assert (lookups["prompts"], lookups["tokens"]) == (engine.prompts, engine.tokens)
        assert (lookups["hit_tokens"], lookups["hits"], sum(lookups["misses"].values())) == (
            engine.hit_tokens,
            hits,
            keys - hits,
        )
        assert sum(row["lookup_keys"] for row in rows.values()) == keys
        assert sum(row["lookup_hits"] for row in rows.values()) == hits
        of_engine = [row for row in rows.values() if row["prompt_tokens"]]
        assert len(of_engine) == engine.spaces
        for row in of_engine:
            assert (row["prompt_tokens"], row["prompt_hit_tokens"]) == (engine.tokens, engine.hit_tokens)
        until(lambda: scraped(port).get("lmcache_core_prompts_total") == engine.prompts)
        sums = scraped(port)
        assert (sums["lmcache_core_lookup_tokens_total"], sums["lmcache_core_lookup_hit_tokens_total"]) == (
            engine.tokens,
            engine.hit_tokens,
        )
        assert sums["lmcache_core_lookup_keys_total"] == keys
        assert sums["lmcache_core_lookup_hits_total"] == hits
        assert panel("Hit rate, in keys", sums) == pytest.approx(engine.hit_tokens / engine.tokens)
        assert panel("Tokens found", sums) == engine.hit_tokens
        said = checked(server, capsys)
        found = f"{engine.hit_tokens:,} of {engine.tokens:,} tokens were found"
        assert said["prompts"].startswith(found)
        named = [message for subject, message in said.items() if subject.startswith("namespace ")]
        assert named == [found] * engine.spaces

    return compared


@pytest.mark.parametrize(("groups", "ranks"), [(1, 1), (2, 2)])
def test_all_figures_are_what_was_counted_outside(
    node: Node, compare: Callable[[Engine, ServerProcess, int], None], groups: int, ranks: int
) -> None:
    port = free_port()
    server = node.serve("--http.port", str(port))
    engine = Engine(node, groups=groups, ranks=ranks)
    engine.ask("never", STORED, 0)  # two times nothing, as before any engine has stored
    engine.ask("never", 1, 0)
    for seed in ("a", "b"):
        engine.run(f"store({seed!r}, {STORED})")
    for _ in range(9):
        engine.ask("a", STORED, STORED)  # by the index alone: no message
        engine.ask("b", STORED - 2, STORED)
    for blocks in (STORED + 1, STORED + 4):
        engine.ask("a", blocks, STORED)  # its end is asked for
    assert engine.hit_tokens / engine.tokens > 0.8
    compare(engine, server, port)
    assert engine.run("figures")["lookup_held"] == 2  # the others were no calls
    spaces = groups * ranks  # `explain` finds the same blocks there, and misses the same
    assert engine.run(f"missing('a', {STORED + 4})") == 4 * spaces
    assert engine.run("missing('never', 3)") == 3 * spaces


def test_what_is_found_while_the_server_hangs_is_counted_once(
    node: Node, compare: Callable[[Engine, ServerProcess, int], None]
) -> None:
    port = free_port()
    server = node.serve("--http.port", str(port))
    engine = Engine(node, timeout_s=0.5)
    engine.run(f"store('a', {STORED})")
    engine.ask("a", STORED, STORED)
    server.signal(signal.SIGSTOP)
    try:
        engine.ask("a", STORED + 1, STORED)  # asked in vain: the server finds the question when it goes on
        engine.ask("a", STORED + 2, STORED)  # not asked, and so its misses are counted by the engine alone
        engine.ask("a", STORED, STORED)
    finally:
        server.signal(signal.SIGCONT)
    compare(engine, server, port)
    with server.client(maps_pool=False) as client:
        assert client.status()["traffic"]["lookups"]["misses"]["not_asked"] == 2
