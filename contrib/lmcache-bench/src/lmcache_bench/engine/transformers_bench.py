"""transformers: time to first token cold, from the pool, from a disk, and from a dict of the same tensors."""

from __future__ import annotations

import os
import random
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from lmcache_bench.engine.models import SHAPES, VOCABULARY, make
from lmcache_bench.engine.verdicts import doubt, record_noise
from lmcache_bench.engine.vllm_bench import MIB, TierServer, is_written
from lmcache_bench.pairs import interval, ratios
from lmcache_core.errors import PoolError, UsageError

if TYPE_CHECKING:
    from lmcache_core import Client
    from lmcache_core.cli.bench.harness import Bench

WARM_MAX = 1.05  # times the dict of the same tensors
OURS_MAX = 0.03  # of a cold prefill: our whole cost of loading and storing a prompt
PAIRS, COLD, FROM_DISK = 20, 3, 5
CHUNK_TOKENS = 256


def run(options: Namespace, bench: Bench) -> None:
    """Record everything for one prompt."""
    for module in ("torch", "transformers", "lmcache_transformers", "lmcache_fs"):
        if find_spec(module) is None:
            raise UsageError(f"bench engine --engine transformers needs {module} in this environment")
    model = options.model or ("tiny" if bench.quick else "m300")
    tokens = options.tokens or (1024 if bench.quick else 4096)
    name = f"transformers, {model}, {tokens:,} tokens"
    bench.steps(3)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lmc-engine-")))
        pool = max(256 * MIB, 3 * tokens * SHAPES[model].token_bytes)
        server = stack.enter_context(TierServer(pool, folder))
        client = stack.enter_context(server.client(copy_threads=options.copy_threads))
        engine = _Engine(client, model, tokens, options.threads)
        bench.step("cold")
        cold = _middle([engine.cold() for _ in range(1 if bench.quick else COLD)])
        bench.record(f"{name}: first token, cold", cold.wall_s, "s")
        bench.step("warm, beside a dict")
        _record_warm(engine, bench, name, cold, options.pairs or (6 if bench.quick else PAIRS))
        bench.step("from a disk")
        disk = _middle([engine.from_disk() for _ in range(2 if bench.quick else FROM_DISK)])
        bench.record(f"{name}: first token, from a tier on a disk", disk.wall_s, "s", floor=cold.wall_s)
        bench.record(f"{name}: of that ours", disk.ours_s / disk.wall_s, "x")


def _record_warm(engine: _Engine, bench: Bench, name: str, cold: _Took, pairs: int) -> None:
    """From the pool beside a dict, and a dict beside itself; and our share of that and of the cold prefill."""
    runs: dict[str, list[_Took]] = {"ours": [], "dict": []}

    def first_token_s(kind: str) -> float:
        runs[kind].append(engine.warm() if kind == "ours" else engine.from_dict())
        return runs[kind][-1].wall_s

    for kind in runs:
        first_token_s(kind)
    ours, same = [], []
    for _ in range(pairs // 2):
        ours += ratios(lambda second: first_token_s("ours" if second else "dict"), 2)
        same += ratios(lambda _: first_token_s("dict"), 2)
    found, noise, why = interval(ours), interval(same), doubt(interval(same))
    warm, peer = _middle(runs["ours"]), _middle(runs["dict"])
    what = f"first token, {engine.reused:,} tokens from the pool, beside a dict"
    bench.record(f"{name}: {what}", warm.wall_s, "s", floor=peer.wall_s)
    bench.record(f"{name}: pool ÷ dict, median of {len(ours)} pairs", found.middle, "x", target=WARM_MAX, doubt=why)
    bench.record(f"{name}: the same, upper 95 % bound", found.high, "x")
    record_noise(bench, f"{name}: dict ÷ dict", noise)
    bench.record(f"{name}: of the time from the pool, ours", warm.ours_s / warm.wall_s, "x")
    share = (warm.ours_s + cold.ours_s) / cold.wall_s
    bench.record(f"{name}: lookup, load and store, of the cold prefill", share, "x", target=OURS_MAX)


class _Took(NamedTuple):
    """Time to the first token, and our time within it or beside it."""

    wall_s: float
    ours_s: float


def _middle(runs: Sequence[_Took]) -> _Took:
    return _Took(median(took.wall_s for took in runs), median(took.ours_s for took in runs))


class _Engine:
    """A model, a prompt, and the cache."""

    def __init__(self, client: Client, model: str, tokens: int, threads: int) -> None:
        import torch

        from lmcache_transformers import PrefixCache

        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        if threads:
            torch.set_num_threads(threads)
        self._torch = torch
        self._model = make(model)
        self._client = client
        self._cache = PrefixCache(client, self._model, model_name=f"bench {model}", chunk_tokens=CHUNK_TOKENS)
        self._tokens = tokens
        self._prompt: list[int] = []
        self._tensors: list[tuple[Any, Any]] = []
        self.reused = 0

    def cold(self) -> _Took:
        """A new prompt, computed in chunks as after a hit; then it is stored."""
        from transformers import DynamicCache

        self._prompt = random.Random(os.urandom(8)).choices(range(1, VOCABULARY), k=self._tokens)
        cache = DynamicCache(config=self._model.config)
        began_s = time.perf_counter()
        self._compute(cache, 0)
        wall_s = time.perf_counter() - began_s
        began_s = time.perf_counter()
        stored = self._cache.store(self._prompt, cache)
        store_s = time.perf_counter() - began_s
        if not stored.chunks_written:
            raise PoolError("nothing of the prompt was stored")
        self.reused = (self._tokens - 1) // CHUNK_TOKENS * CHUNK_TOKENS
        layers: Any = cache.layers
        self._tensors = [
            (layer.keys[:, :, : self.reused].clone(), layer.values[:, :, : self.reused].clone()) for layer in layers
        ]
        return _Took(wall_s, store_s)

    def warm(self) -> _Took:
        """Load what the pool has, and compute the rest."""
        began_s = time.perf_counter()
        found = self._cache.load(self._prompt)
        load_s = time.perf_counter() - began_s
        if found.tokens_reused != self.reused:
            raise PoolError(f"{found.tokens_reused:,} of {self.reused:,} tokens were found")
        self._compute(found.cache, self.reused)
        return _Took(time.perf_counter() - began_s, load_s)

    def from_dict(self) -> _Took:
        """The same tensors from this process's memory; only the model itself copies them."""
        from transformers import DynamicCache

        began_s = time.perf_counter()
        cache = DynamicCache(ddp_cache_data=self._tensors, config=self._model.config)
        load_s = time.perf_counter() - began_s
        self._compute(cache, self.reused)
        return _Took(time.perf_counter() - began_s, load_s)

    def from_disk(self) -> _Took:
        """After the tier has it and the pool no longer does."""
        _until(lambda: is_written(self._client.status()["tiers"]["stores"]))
        self._client.clear(self._cache.namespace)
        return self.warm()

    def _compute(self, cache: Any, first: int) -> None:
        from lmcache_transformers import cache_argument

        with self._torch.inference_mode():
            for start in range(first, self._tokens, CHUNK_TOKENS):
                ids = self._torch.tensor([self._prompt[start : start + CHUNK_TOKENS]])
                self._model(ids, use_cache=True, logits_to_keep=1, **cache_argument(self._model, cache))


def _until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.02)
