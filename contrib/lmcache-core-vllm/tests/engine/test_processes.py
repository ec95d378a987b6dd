"""Engines as they are deployed: scheduler and workers in processes of their own, several engines on one server."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from vllm_engines import Engine, Server, prompt

from lmcache_testing.embedded import Json
from lmcache_testing.waiting import until

BLOCK = 128
KILLS_S = float(os.environ.get("LMCACHE_CORE_VLLM_KILLS_S", "20"))  # two minutes show more, and take them
LOG_LINES = """
import logging
from vllm.config.logging import LoggingConfig
from vllm.logger import configure_logging
configure_logging(LoggingConfig())
from lmcache_core_vllm.connector import log_as_vllm
log_as_vllm()
logging.getLogger("lmcache_core.client.link.reconnecting").info("the server is reachable again")
"""


@pytest.fixture(scope="module")
def server(serve: Callable[..., Server]) -> Server:
    return serve()


def test_one_engine_reads_what_another_stored_and_outlives_it(
    start: Callable[..., Engine], llama: Path, server: Server
) -> None:
    tokens = prompt(1, 1000)
    first = start(llama, server.settings())
    (expected,) = first.generate(tokens)
    first.saved()
    first.end()
    second = start(llama, server.settings())
    (found,) = second.generate(tokens)
    assert found == {"tokens": expected["tokens"], "cached": 7 * BLOCK}
    second.end()


@pytest.mark.slow  # it imports vLLM once more
def test_check_says_that_an_engine_is_connected_and_what_it_missed(
    start: Callable[..., Engine], llama: Path, server: Server
) -> None:
    engine = start(llama, server.settings(salt="check"))
    engine.generate(prompt(9, 1000))
    command = [sys.executable, "-m", "lmcache_core.cli.main", "check", "--engine", "vllm", "--json"]
    command += ["--name", server.name, "--runtime_dir", str(server.runtime_dir)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = {each["subject"]: each for each in json.loads(done.stdout)["findings"]}
    assert said["connector"]["ok"], done.stdout
    assert "vllm-scheduler" in said["engines"]["message"]
    assert "vllm-worker-0" in said["engines"]["message"]
    assert any(engine_namespace in said for engine_namespace in namespaces(engine))
    assert said["misses"]["ok"]
    assert done.returncode == 0
    engine.end()


def namespaces(engine: Engine) -> list[str]:
    return [f"namespace {each}" for each in engine.run("said = ['%016x' % each.id for each in worker.namespaces]")]


@pytest.mark.slow
def test_two_engines_answer_rightly_beside_a_server_that_is_killed(
    start: Callable[..., Engine], llama: Path, serve: Callable[..., Server]
) -> None:
    server = serve()
    plain = start(llama, enable_prefix_caching=False)
    prompts = [prompt(60 + number, 300 + 200 * number) for number in range(4)]
    expected = [each["tokens"] for each in plain.generate(*prompts)]
    plain.end()
    engines = [start(llama, server.settings(), enable_prefix_caching=False) for _ in range(2)]
    until_s, rounds, cached = time.monotonic() + KILLS_S, 0, 0
    while time.monotonic() < until_s or not cached:
        asked = f"said = generate({prompts!r}, 12)"
        for engine in engines:
            engine.tell(asked)
        if rounds % 4 == 3:  # while both are at it
            server.end()
            server.start()
        for engine in engines:
            found = engine.hear()
            assert [each["tokens"] for each in found] == expected
            cached += sum(each["cached"] for each in found)
        rounds += 1
    print(f"{rounds} rounds, {cached} tokens of both engines from the cache")
    for engine in engines:
        engine.end()


@pytest.mark.slow
def test_two_ranks_share_what_both_have(start: Callable[..., Engine], llama: Path, server: Server) -> None:
    tokens = prompt(2, 1000)
    ranks = {"tensor_parallel_size": 2, "bind": "0|1", "processes": True}
    engine = start(llama, server.settings(), **ranks)
    (expected,) = engine.generate(tokens)
    found: list[Json] = []

    def again() -> bool:  # the last answer to a save may be on its way
        engine.forget()
        found[:] = engine.generate(tokens)
        return bool(found[0]["cached"] == 7 * BLOCK)

    until(again)
    assert found[0]["tokens"] == expected["tokens"]
    engine.end()
    another = start(llama, server.settings())
    assert another.generate(tokens)[0]["cached"] == 0  # one rank's blocks are others
    another.end()


def test_figures_reach_vllms_own_metrics(start: Callable[..., Engine], llama: Path, server: Server) -> None:
    engine = start(llama, server.settings(salt="figures"), disable_log_stats=False)
    tokens = prompt(3, 1000)
    engine.generate(tokens)
    engine.saved()
    engine.forget()
    engine.generate(tokens)
    engine.generate(prompt(4, 10))  # figures travel with a step
    engine.run("ours = [each for each in llm.get_metrics() if 'lmcache_core' in each.name]")
    told = engine.run("said = {each.name: each.count if hasattr(each, 'count') else each.value for each in ours}")
    assert told["vllm:lmcache_core_load_blocks"] == 7
    assert told["vllm:lmcache_core_save_blocks"] >= 7
    assert told["vllm:lmcache_core_lookup_hit_tokens"] == 7 * BLOCK
    assert told["vllm:lmcache_core_load_latency_seconds"] == 1
    assert told["vllm:lmcache_core_lookup_latency_seconds"] == told["vllm:lmcache_core_lookup_requests"] == 2
    by_source = "{each.labels['source']: each.value for each in llm.get_metrics() if each.name == 'vllm:%s'}"
    assert engine.run(f"said = {by_source % 'prompt_tokens_cached_by_source'}")["host"] == 7 * BLOCK
    engine.end()


def test_the_clients_lines_go_where_vllms_go() -> None:
    argv = [sys.executable, "-c", LOG_LINES]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=True)
    (line,) = [each for each in (done.stdout + done.stderr).splitlines() if "is reachable again" in each]
    assert re.search(r"INFO \d\d-\d\d \d\d:\d\d:\d\d \[", line), line


def test_figures_of_ranks_add_up_and_are_told_in_words() -> None:
    from lmcache_core_vllm.connector import LMCacheCoreConnector

    times = {"load_latency_seconds": [0.002, 0.498]}
    one = LMCacheCoreConnector.build_kv_connector_stats({"load_bytes": 2e6, "load_seconds": 0.5, **times})
    two = LMCacheCoreConnector.build_kv_connector_stats({"load_bytes": 1e6, "save_blocks": 2})
    assert one is not None
    assert two is not None
    both = one.aggregate(two)
    assert both.reduce() == {
        "load_bytes": 3e6,
        "load_seconds": 0.5,
        "save_blocks": 2,
        "load_MB_per_s": 6.0,
        "load_p99_ms": 498.0,
    }
    both.reset()
    assert both.is_empty()
