"""`lmcache-core bench hooks`: why no hook is on the data path."""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable

from lmcache_core.cli.bench.harness import Bench
from lmcache_core.plugins.hookspecs import hookimpl
from lmcache_core.plugins.registry import Registry

PLUGINS = (1, 5, 20)
_BATCH_CALLS = 1_000


class _Listener:
    """A plugin that implements one hook and does nothing in it."""

    @hookimpl
    def lmcache_stopping(self) -> None:
        return None


def add_options(parser: ArgumentParser) -> None:
    """The options."""
    parser.add_argument("--seconds", type=float, default=1.0, help="time for each figure (default: %(default)s)")


def run(options: Namespace, bench: Bench) -> None:
    """A direct method, pluggy's own hook call, and our relay that isolates plugins from each other."""
    seconds = min(options.seconds, 0.2) if bench.quick else options.seconds
    bench.steps(1 + 2 * len(PLUGINS))
    bench.step("direct method")
    direct_ns = _best_ns(_Listener().lmcache_stopping, seconds)
    bench.record("direct method", direct_ns, "ns")
    for count in PLUGINS:
        registry = Registry()
        for number in range(count):
            registry.register(_Listener(), f"listener_{number}")
        bench.step(f"pluggy, {count} plugins")
        bare_ns = _best_ns(registry.manager.hook.lmcache_stopping, seconds)
        bench.record(f"pluggy hook, {count} plugins", bare_ns, "ns", floor=direct_ns)
        bench.step(f"isolated, {count} plugins")
        isolated_ns = _best_ns(registry.hook.lmcache_stopping, seconds)
        bench.record(f"isolated hook, {count} plugins", isolated_ns, "ns", floor=direct_ns)


def _best_ns(call: Callable[[], object], seconds: float) -> float:
    """Nanoseconds per call, the best of many batches: the cost of the code, without the machine's other work."""
    best = float("inf")
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        began = time.perf_counter_ns()
        for _ in range(_BATCH_CALLS):
            call()
        best = min(best, (time.perf_counter_ns() - began) / _BATCH_CALLS)
    return best
