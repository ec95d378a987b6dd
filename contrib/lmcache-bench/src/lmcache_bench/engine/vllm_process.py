"""A vLLM engine in its own process, which a bench tells what to measure. Its output goes to standard error."""

from __future__ import annotations

import os
import random
import threading
import time
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lmcache_bench.copy import fresh_keys
from lmcache_bench.engine.models import VOCABULARY
from lmcache_bench.workers import orders
from lmcache_core import Client, PageEntry, PageGroup, Region, Status
from lmcache_core.buffers import address_of
from lmcache_core.client import threads_to_copy
from lmcache_core.errors import PoolError
from lmcache_core.native import native
from lmcache_core.pool.layout import Layout
from lmcache_core.tokens.namespace import Namespace

if TYPE_CHECKING:
    from multiprocessing.connection import Connection


SPIN_S = 0.02  # the engine's threads spin for some ms after a run
SAVES_MAX = 10  # runs within which our connector may save a prompt
SAVE_PAUSE_S = 1.0  # after each, so that its share of a core recovers


class Plan(NamedTuple):
    """How to start an engine. `runtime_dir`, `server`: where our connector finds its server. `threads`: of the engine;
    0 uses all processors."""

    model: Path
    max_tokens: int
    kv_bytes: int
    server: str
    runtime_dir: Path
    load: str
    threads: int
    copy_threads: int
    step_wait_s: float


class Took(NamedTuple):
    """One run of the engine: wall time, and CPU seconds of the whole process and of our code in it."""

    wall_s: float
    cpu_s: float
    ours_cpu_s: float
    cached_tokens: int


def serve(connection: Connection, plan: Plan) -> None:
    """Run the engine: every message is the name of a method of `Engine`, and its arguments."""
    os.dup2(2, 1)  # vLLM's output is not a result
    os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="ERROR")
    cores = sorted(os.sched_getaffinity(0))[: plan.threads or None]
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    engine = Engine(plan)
    for method, *arguments in orders(connection):
        connection.send(getattr(engine, method)(*arguments))


class Engine:
    """vLLM with the switchable connector."""

    def __init__(self, plan: Plan) -> None:
        from vllm import LLM

        self._plan = plan
        settings = {"server": plan.server, "runtime_dir": str(plan.runtime_dir), "load": plan.load}
        self._llm = LLM(
            str(plan.model),
            dtype="float32",
            enforce_eager=True,
            skip_tokenizer_init=True,
            max_model_len=plan.max_tokens + 128,
            kv_cache_memory_bytes=plan.kv_bytes,
            enable_prefix_caching=False,  # it would hide our connector's effect
            disable_log_stats=True,
            distributed_executor_backend="uni",
            seed=0,
            kv_transfer_config={
                "kv_connector": "SwitchConnector",
                "kv_connector_module_path": "lmcache_bench.engine.switch",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {
                    **settings,
                    "copy_threads": plan.copy_threads,
                    "step_wait_s": plan.step_wait_s,
                },
            },
        )
        self._chooser = random.Random(os.urandom(8))
        self._prompts: dict[int, list[int]] = {}

    def fresh(self, kind: str, batches: int, prompts: int, tokens: int) -> Took:
        """Batches of new prompts, each up to its first token."""
        made = [[self._prompt(tokens) for _ in range(prompts)] for _ in range(batches)]
        return self._run(kind, made)

    def remember(self, number: int, tokens: int, load: bool) -> Took:
        """Run a prompt until both connectors have it. `load`: whether loads of the dict continue between steps."""
        from lmcache_bench.engine import dict_connector

        dict_connector.between_steps = load
        self._prompts[number] = self._prompt(tokens)
        cold = self.warm("", number)
        self.warm("dict", number)
        wanted = self.warm("dict", number).cached_tokens
        # Our connector saves a bounded amount at a time: of a long prompt it may save only a part in each run.
        for _ in range(SAVES_MAX):
            if self.warm("ours", number).cached_tokens == wanted:
                return cold
            time.sleep(SAVE_PAUSE_S)
        raise PoolError(f"our connector did not save {wanted} tokens in {SAVES_MAX} runs: {self.figures()}")

    def warm(self, kind: str, number: int) -> Took:
        """The same prompt again."""
        return self._run(kind, [[self._prompts[number]]])

    def figures(self) -> dict[str, float]:
        """Our connector's counters since the last call."""
        from lmcache_bench.engine import switch

        found: dict[str, float] = dict(switch.figures)
        switch.figures.clear()
        return found

    def forget(self) -> None:
        """Drop the dict's blocks."""
        from lmcache_bench.engine import dict_connector

        dict_connector.KEPT.clear()
        self._prompts.clear()

    def _prompt(self, tokens: int) -> list[int]:
        return self._chooser.choices(range(1, VOCABULARY), k=tokens)

    def _run(self, kind: str, batches: Sequence[Sequence[list[int]]]) -> Took:
        from vllm import SamplingParams

        from lmcache_bench.engine import switch

        sampling = SamplingParams(temperature=0, max_tokens=1, detokenize=False, ignore_eos=True)
        switch.chosen, cached = kind, 0
        before, ended_s = switch.ours_cpu_s, _ended_threads_cpu_s()
        cpu_s, began_s = time.process_time(), time.perf_counter()
        for batch in batches:
            inputs: Any = [{"prompt_token_ids": each} for each in batch]
            for output in self._llm.generate(inputs, sampling, use_tqdm=False):
                cached += output.num_cached_tokens or 0
        wall_s, cpu_s = time.perf_counter() - began_s, time.process_time() - cpu_s
        ours_s = switch.ours_cpu_s - before + _ended_threads_cpu_s() - ended_s
        switch.chosen = ""
        return Took(wall_s, cpu_s, ours_s if kind == "ours" else 0.0, cached)

    def loads(self, nbytes: int, rounds: int) -> dict[str, list[float]]:
        """Seconds to load this many bytes into the engine's memory: with our client, and with bare copies of the same
        blocks. "bytes" has the bytes per load."""
        from lmcache_bench.engine import switch
        from lmcache_core_vllm.tensors import layer_regions

        layers = layer_regions(list(switch.memory), switch.memory, switch.blocks)
        regions = [region for layer in layers for region in layer.regions]
        with Client.connect(
            self._plan.server, runtime_dir=self._plan.runtime_dir, copy_threads=self._plan.copy_threads
        ) as client:
            return _Loads(client, regions, switch.blocks, nbytes, threads_to_copy(self._plan.copy_threads)).times(
                rounds
            )


def _ended_threads_cpu_s() -> float:
    """CPU seconds of this process's threads that have ended, such as copy threads, and of the thread that returns
    promises. The rest belongs to the engine, whose threads still spin for a while after a run: what they use while they
    are read one by one would count as ended."""
    time.sleep(SPIN_S)
    alive_ns, ours_ns = 0, 0
    ours = {each.native_id for each in threading.enumerate() if each.name.startswith("lmcache-core")}
    total_ns = time.clock_gettime_ns(time.CLOCK_PROCESS_CPUTIME_ID)
    for path in Path("/proc/self/task").iterdir():
        try:
            used_ns = int((path / "schedstat").read_text().split()[0])
        except OSError:  # it has just ended
            continue
        alive_ns += used_ns
        ours_ns += used_ns if int(path.name) in ours else 0
    return (total_ns - alive_ns + ours_ns) / 1e9


class _Loads:
    """Random blocks of the engine's memory, read from the pool by our client and by plain copies."""

    def __init__(self, client: Client, regions: Sequence[Region], blocks: int, nbytes: int, threads: int) -> None:
        self._client = client
        self._regions = regions
        self._threads = threads
        block_bytes = sum(region.page_bytes for region in regions)
        self._count = max(1, min(blocks - 1, nbytes // block_bytes))
        self.nbytes = self._count * block_bytes
        self._ids = random.Random(1).sample(range(1, blocks), self._count)
        self._namespace = Namespace("bench engine", Layout("uint8", (block_bytes,)))
        self._pages = client.register_pages([PageGroup(self._namespace, regions, 1)])

    def times(self, rounds: int) -> dict[str, list[float]]:
        found: dict[str, list[float]] = {"ours": [], "bare": [], "bytes": [float(self.nbytes)]}
        keys = fresh_keys(self._count)
        entry = PageEntry(0, keys, self._ids)
        _expect(self._pages.store([entry]).statuses[0], Status.STORED)
        with self._client.prepare_store(fresh_keys(self._count), namespace=self._namespace) as lease:
            _expect(lease.statuses, Status.GRANTED)
            slots = [lease.view(at) for at in range(self._count)]
            groups = self._addresses([address_of(slot) for slot in slots])
            self._bare(groups)  # this process's first access to the slots
            for number in range(rounds + 1):
                for name in ("ours", "bare") if number % 2 else ("bare", "ours"):
                    time.sleep(SPIN_S)
                    began_s = time.perf_counter()
                    if name == "ours":
                        result = self._pages.retrieve([entry], order="object")
                        took_s = time.perf_counter() - began_s
                        _expect(result.statuses[0], Status.HIT)
                    else:
                        self._bare(groups)
                        took_s = time.perf_counter() - began_s
                    if number:
                        found[name].append(took_s)
            del slots
        self._client.clear(self._namespace)
        return found

    def _addresses(self, slots: Sequence[int]) -> dict[int, tuple[array[int], array[int]]]:
        """By piece size: the addresses of the pieces in the engine, and in the slots."""
        groups: dict[int, tuple[array[int], array[int]]] = {}
        for slot, block in zip(slots, self._ids, strict=True):
            for region in self._regions:
                outside, inside = groups.setdefault(region.page_bytes, (array("Q"), array("Q")))
                outside.append(region.buffer.data_ptr() + region.offset + block * region.page_stride)
                inside.append(slot)
                slot += region.page_bytes
        return groups

    def _bare(self, groups: dict[int, tuple[array[int], array[int]]]) -> None:
        for nbytes, (outside, inside) in groups.items():
            native.copy_many(outside, inside, nbytes, self._threads)


def _expect(statuses: Sequence[Status], wanted: Status) -> None:
    others = [status for status in statuses if status is not wanted]
    if others:
        raise PoolError(f"{len(others)} of {len(statuses)} blocks were not {wanted}: {others[0]}")
