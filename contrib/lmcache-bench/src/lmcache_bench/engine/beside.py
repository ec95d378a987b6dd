"""vLLM with our connector and server beside vLLM with LMCache's: time to first token, cold and warm, in turns.

Two engines, each in a process of its own with the same options, model and prompts; the one with LMCache runs in
LMCache's environment, which shares this one's vLLM and torch. Prompts are a little longer than a multiple of LMCache's
chunk of 256 tokens, so that both reuse the same number of tokens. Both servers have the same amount of memory.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import time
from argparse import Namespace
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from lmcache_bench.engine.models import SHAPES, VOCABULARY, save
from lmcache_bench.pairs import interval, ratios
from lmcache_bench.peer import tell
from lmcache_bench.peer.environment import environment, lmcache_python
from lmcache_bench.peer.processes import LineProcess, LMCacheServer
from lmcache_core.errors import PoolError
from lmcache_testing.processes import ServerProcess

if TYPE_CHECKING:
    from lmcache_core.cli.bench.harness import Bench

DRIVER = Path(__file__).with_name("beside_driver.py")
MIB = 1 << 20
CHUNK_TOKENS = 256
BEYOND_TOKENS = 64  # part of the last chunk, which both compute
WARM_PAIRS, COLD_PAIRS = 20, 4
QUICK_PAIRS = 4
SAVES_MAX = 12  # runs within which a connector may save a prompt
SAVE_PAUSE_S = 1.0  # after each: our connector saves a bounded amount at a time
REST_S = 0.25  # before each run: the other engine's threads still spin for a while after theirs


def run(options: Namespace, bench: Bench, model: str, tokens: int) -> None:
    """Start both engines, then run cold pairs, each with a new prompt, then warm pairs."""
    python = lmcache_python(tell)
    tokens = tokens // CHUNK_TOKENS * CHUNK_TOKENS + BEYOND_TOKENS
    bench.step(f"{model}, {tokens:,} tokens, beside LMCache's connector and server")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lmc-beside-")))
        size_bytes = max(512 * MIB, 8 * tokens * SHAPES[model].token_bytes) // MIB * MIB
        ours = stack.enter_context(ServerProcess(size_bytes))
        theirs = stack.enter_context(LMCacheServer(python, size_bytes, CHUNK_TOKENS))
        plan = {
            "model": str(save(model, folder / "model")),
            "max_tokens": tokens,
            "kv_bytes": max(128 * MIB, 2 * tokens * SHAPES[model].token_bytes),
            "threads": options.threads,
        }
        mine = {
            "server": ours.name, "runtime_dir": str(ours.runtime_dir), "load": options.load,
            "step_wait_s": options.step_wait_s, "copy_threads": options.copy_threads,
        }  # fmt: skip
        engines = {
            True: _engine(sys.executable, plan, our_connector(mine), os.environ),
            False: _engine(python, plan, lmcache_connector(theirs.port), environment()),
        }
        beside = _Beside({side: stack.enter_context(engine) for side, engine in engines.items()}, tokens)
        beside.record(bench, f"vLLM, {model}, {tokens:,} tokens", options.pairs)


def our_connector(settings: dict[str, Any]) -> dict[str, Any]:
    """Part of vLLM's `kv_transfer_config`."""
    return {
        "kv_connector": "LMCacheCoreConnector",
        "kv_connector_module_path": "lmcache_core_vllm",
        "kv_connector_extra_config": settings,
    }


def lmcache_connector(port: int) -> dict[str, Any]:
    """The same for LMCache's own connector, from its own package."""
    return {
        "kv_connector": "LMCacheMPConnector",
        "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
        "kv_connector_extra_config": {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": port},
    }


def _engine(python: str | Path, plan: dict[str, Any], connector: dict[str, Any], env: Any) -> LineProcess:
    return LineProcess(python, DRIVER, json.dumps({**plan, "connector": connector}), env=env)


class _Beside:
    """Two engines that take turns: True is ours."""

    def __init__(self, engines: dict[bool, LineProcess], tokens: int) -> None:
        self._engines = engines
        self._tokens = tokens
        self._took: dict[bool, list[float]] = {True: [], False: []}
        self._prompt: list[int] = []
        self._reused = 0
        self._runs = 0

    def record(self, bench: Bench, name: str, pairs: int | None) -> None:
        """Cold: a new prompt, including the time to save it; warm: the last of them again."""
        few, many = (QUICK_PAIRS, QUICK_PAIRS) if bench.quick else (COLD_PAIRS, WARM_PAIRS)
        self._prompt = self._fresh()
        for side in self._engines:
            self._run(side)  # the first run of an engine takes longer
        self._record(bench, f"{name}: first token, cold, beside LMCache", self._cold, min(few, pairs or few))
        reused = self._remember()
        self._record(
            bench, f"{name}: first token, {reused:,} tokens from the pool, beside LMCache", self._warm, pairs or many
        )

    def _record(self, bench: Bench, name: str, measure: Any, pairs: int) -> None:
        self._took = {True: [], False: []}
        found = interval(ratios(measure, pairs))
        ours_s, theirs_s = (median(self._took[side]) for side in (True, False))
        bench.record(name, ours_s, "s", floor=theirs_s)
        bench.record(f"{name}: ours ÷ LMCache of {pairs} pairs, 95 % from", found.low, "x")
        bench.record(f"{name}: to", found.high, "x")

    def _cold(self, ours: bool) -> float:
        if self._runs % 2 == 0:  # both runs of a pair use the same prompt
            self._prompt = self._fresh()
        self._runs += 1
        took = self._run(ours)
        if took["cached_tokens"]:
            raise PoolError(f"a prompt that is new was found: {took['cached_tokens']} tokens of it")
        self._took[ours].append(took["wall_s"])
        return float(took["wall_s"])

    def _warm(self, ours: bool) -> float:
        took = self._run(ours)
        if took["cached_tokens"] != self._reused:
            raise PoolError(f"{took['cached_tokens']} tokens were found, and {self._reused} before")
        self._took[ours].append(took["wall_s"])
        return float(took["wall_s"])

    def _remember(self) -> int:
        """Run until both have the whole prompt. Both must have the same number of tokens, and the same next token."""
        self._reused = (self._tokens - 1) // CHUNK_TOKENS * CHUNK_TOKENS
        tokens = set()
        for side in self._engines:
            for _ in range(SAVES_MAX):
                took = self._run(side)
                if took["cached_tokens"] == self._reused:
                    break
                time.sleep(SAVE_PAUSE_S)
            else:
                whose = "our connector" if side else "LMCache"
                raise PoolError(f"{whose} has {took['cached_tokens']} of {self._reused} tokens after {SAVES_MAX} runs")
            tokens.add(took["token"])
        if len(tokens) > 1:
            raise PoolError("the engines go on with different tokens after the same prompt")
        return self._reused

    def _run(self, ours: bool) -> dict[str, Any]:
        time.sleep(REST_S)
        found: dict[str, Any] = self._engines[ours].ask("run", prompt=self._prompt)
        return found

    def _fresh(self) -> list[int]:
        return random.Random(os.urandom(8)).choices(range(1, VOCABULARY), k=self._tokens)
