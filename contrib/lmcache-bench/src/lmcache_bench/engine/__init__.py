"""`lmcache-core bench engine`: what an engine on the CPU gains and loses, with a model of random weights.

`--engine vllm`, in an environment with vLLM: time to first token of a prompt that our connector has, in pairs with a
connector that keeps the same blocks in a dict of the engine's own process; loads into the engine's memory beside the
best bare copy of the same blocks; and traffic without any reuse, with our connector and without, in pairs in ABBA order
in one engine whose connector is switched at run time; and conversations of several turns that the engine's own cache
cannot keep, beside vLLM's own offloading, a dict, and no connector. `--engine transformers`: time to first token cold,
from the pool, from a disk, and from a dict of the same tensors. `--quick` skips the tier on a disk and the
conversations. `--peer lmcache` adds an engine with LMCache's own connector and server, in its own environment, in turns
with one that has ours.

Each comparison by pairs is accompanied by pairs of a variant with itself: if those are not within 1.02 the machine is
too busy to tell, and the target is "too noisy", never met.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

from lmcache_bench.engine.models import SHAPES
from lmcache_bench.peer import PEERS
from lmcache_bench.workers import ending_cleanly

if TYPE_CHECKING:
    from lmcache_core.cli.bench.harness import Bench

PARTS = {
    "warm": "time to first token, beside a dict",
    "load": "vLLM: loads into the engine's memory, beside bare copies",
    "loss": "vLLM: prompts without reuse",
    "tier": "vLLM: prompts without reuse, with a tier on a disk",
    "turns": "vLLM: conversations that do not fit its own cache, beside its own offloading and a dict",
    "peer": "vLLM: time to first token beside LMCache's connector and server, with --peer",
}


def add_options(parser: ArgumentParser) -> None:
    """The options of this bench."""
    parser.add_argument("--engine", choices=("vllm", "transformers"), default="vllm", help="default: %(default)s")
    parts = "; ".join(f"{name}: {what}" for name, what in PARTS.items())
    parser.add_argument("--parts", nargs="+", choices=PARTS, help=f"only these ({parts})")
    parser.add_argument("--peer", choices=PEERS, help="vLLM: beside this one's connector and server, too")
    parser.add_argument("--model", choices=SHAPES, help="parameters of the model (default: as fits the part)")
    parser.add_argument("--tokens", type=int, help="tokens of a prompt (default: as fits the part)")
    parser.add_argument("--pairs", type=int, help="pairs of runs (default: 20 warm ones, 80 without reuse)")
    parser.add_argument("--threads", type=int, default=0, help="threads of the engine (0: one for each processor)")
    parser.add_argument("--load", choices=("async", "sync"), default="async", help="vLLM: how both connectors load")
    parser.add_argument(
        "--step-wait-s", type=float, default=0.004, help="vLLM: how long a step of ours waits for the server at most"
    )
    parser.add_argument("--copy-threads", type=int, default=0, help="threads of the client (0: what it takes itself)")


def run(options: Namespace, bench: Bench) -> None:
    """Run the parts of one engine."""
    with ending_cleanly():
        if options.engine == "vllm":
            from lmcache_bench.engine import vllm_bench

            vllm_bench.run(options, bench)
        else:
            from lmcache_bench.engine import transformers_bench

            transformers_bench.run(options, bench)
