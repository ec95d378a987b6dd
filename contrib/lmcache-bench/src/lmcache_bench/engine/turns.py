"""Conversations of several turns whose KV does not fit the engine's own cache: what each way to keep it brings.

Four engines with the same model, options and prompts, each in a process of its own, take turns: one without any
connector, whose own prefix cache is all it has; one with vLLM's own offloading to the memory of its process; one with a
dict there; and one with our connector and server. The conversations take turns, too, so when one comes back the engine
has computed all others, and its own cache has nothing of it left. Every engine is given the same text, in which the
answers are those of the first one; how many answers of the others differ from it is reported.
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
from itertools import product
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from lmcache_bench.engine.beside import DRIVER, REST_S, our_connector
from lmcache_bench.engine.models import SHAPES, VOCABULARY, save
from lmcache_bench.pairs import interval
from lmcache_bench.peer.processes import LineProcess
from lmcache_testing.processes import ServerProcess

if TYPE_CHECKING:
    from lmcache_core.cli.bench.harness import Bench

MIB = 1 << 20
ALONE, OFFLOADING, DICT, OURS = "no connector", "vLLM's offloading", "a dict", "ours"
KINDS = (ALONE, OFFLOADING, DICT, OURS)
WARM_MAX = 1.05  # times the dict's time to first token
OWN_SHARE = 0.3  # of all conversations' KV that the engine's own cache can keep
ANSWER_TOKENS = 32
MORE_TOKENS = 384  # that an engine wants room for, beyond the longest prompt: `max_model_len` and two blocks


class Talk(NamedTuple):
    """How much is said."""

    conversations: int
    turns: int
    question_tokens: int

    @property
    def tokens(self) -> int:
        """Of one conversation, at its end."""
        return self.turns * (self.question_tokens + ANSWER_TOKENS)


TALK, TALK_QUICK = Talk(6, 4, 480), Talk(3, 3, 224)


def run(options: Namespace, bench: Bench, model: str) -> None:
    """All turns of all conversations, on each engine."""
    talk = TALK_QUICK if bench.quick else TALK
    if options.tokens:
        talk = talk._replace(question_tokens=max(ANSWER_TOKENS, options.tokens // talk.turns - ANSWER_TOKENS))
    bench.step(f"{model}, {talk.conversations} conversations of {talk.turns} turns, {talk.tokens:,} tokens each")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lmc-turns-")))
        all_bytes = talk.conversations * talk.tokens * SHAPES[model].token_bytes
        size_bytes = max(256 * MIB, 2 * all_bytes) // MIB * MIB
        server = stack.enter_context(ServerProcess(size_bytes))
        connectors: dict[str, dict[str, Any] | None] = {
            ALONE: None,
            OFFLOADING: _offloading(size_bytes),
            DICT: _dict(),
            OURS: our_connector(
                {"server": server.name, "runtime_dir": str(server.runtime_dir), "load": options.load,
                 "step_wait_s": options.step_wait_s, "copy_threads": options.copy_threads}
            ),
        }  # fmt: skip
        plan = {
            "model": str(save(model, folder / "model")),
            "max_tokens": talk.tokens,
            "kv_bytes": max((talk.tokens + MORE_TOKENS) * SHAPES[model].token_bytes, int(OWN_SHARE * all_bytes)),
            "threads": options.threads,
            "prefix_caching": True,
        }
        engines = {
            kind: stack.enter_context(
                LineProcess(sys.executable, DRIVER, json.dumps({**plan, "connector": connector}), env=os.environ)
            )
            for kind, connector in connectors.items()
        }
        name = f"vLLM, {model}, turns"
        _Turns(engines, talk).record(bench, name)
        with server.client(maps_pool=False) as client:
            status = client.status()
        bench.record(f"{name}: blocks that ours stored", float(status["counters"].get("stored_objects", 0)), "n")
        bench.record(f"{name}: blocks that ours dropped", float(status["traffic"]["dropped_stores"]), "n")


def _offloading(size_bytes: int) -> dict[str, Any]:
    """Part of vLLM's `kv_transfer_config`."""
    return {
        "kv_connector": "OffloadingConnector",
        "kv_connector_module_path": "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector",
        "kv_connector_extra_config": {
            "cpu_bytes_to_use": size_bytes, "spec_name": "MemorySpec",
            "spec_module_path": "lmcache_bench.engine.offloading",
            "offload_prompt_only": False,  # answers are part of the next turn's prompt
        },
    }  # fmt: skip


def _dict() -> dict[str, Any]:
    return {
        "kv_connector": "DictConnector",
        "kv_connector_module_path": "lmcache_bench.engine.dict_connector",
        "kv_connector_extra_config": {},
    }


class _Turns:
    """What was measured, by kind and turn."""

    def __init__(self, engines: dict[str, LineProcess], talk: Talk) -> None:
        self._engines = engines
        self._talk = talk
        self._chooser = random.Random(os.urandom(8))
        self._first_s: dict[tuple[str, int], list[float]] = {}
        self._reused: dict[tuple[str, int], int] = {}
        self._differ = dict.fromkeys(KINDS, 0)

    def record(self, bench: Bench, name: str) -> None:
        talk = self._talk
        for kind in KINDS:  # the first run of an engine takes longer
            self._engines[kind].ask("answer", prompt=self._words(ANSWER_TOKENS), count=2)
        texts: list[list[int]] = [[] for _ in range(talk.conversations)]
        prompt_tokens = [0] * talk.turns
        for turn, (number, text) in product(range(talk.turns), enumerate(texts)):
            text += self._words(talk.question_tokens)
            prompt_tokens[turn] += len(text)
            text += self._ask_all(turn, number, list(text))
        for turn in range(talk.turns):
            for kind in KINDS:
                where = f"{name}: turn {turn + 1}, {kind}"
                bench.record(f"{where}: first token, median", median(self._first_s[kind, turn]), "s")
                bench.record(
                    f"{where}: of the prompts' tokens reused", self._reused[kind, turn] / prompt_tokens[turn], "x"
                )
        for other, target in ((DICT, WARM_MAX), (OFFLOADING, None), (ALONE, None)):
            found = interval([mine / its for turn in range(1, talk.turns) for mine, its in self._pairs(turn, other)])
            bench.record(f"{name}: turns from the second on, ours ÷ {other}, median", found.middle, "x", target=target)
            bench.record(f"{name}: the same, upper 95 % bound", found.high, "x")
        for kind in KINDS[1:]:
            bench.record(f"{name}: answers of {kind} that differ from {ALONE}'s", float(self._differ[kind]), "n")

    def _pairs(self, turn: int, other: str) -> list[tuple[float, float]]:
        return list(zip(self._first_s[OURS, turn], self._first_s[other, turn], strict=True))

    def _ask_all(self, turn: int, number: int, prompt: list[int]) -> list[int]:
        """One turn of one conversation, on each engine, each time in another order. Returns the answer."""
        first = (turn + number) % len(KINDS)
        answers: dict[str, list[int]] = {}
        for kind in KINDS[first:] + KINDS[:first]:
            time.sleep(REST_S)  # the other engine's threads still spin for a while
            took = self._engines[kind].ask("answer", prompt=prompt, count=ANSWER_TOKENS)
            self._first_s.setdefault((kind, turn), []).append(took["first_s"])
            self._reused[kind, turn] = self._reused.get((kind, turn), 0) + took["cached_tokens"]
            answers[kind] = took["tokens"]
        for kind in KINDS:
            self._differ[kind] += answers[kind] != answers[ALONE]
        return answers[ALONE]

    def _words(self, count: int) -> list[int]:
        return self._chooser.choices(range(1, VOCABULARY), k=count)
