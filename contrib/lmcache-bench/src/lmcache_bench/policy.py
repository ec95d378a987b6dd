"""`lmcache-core bench policy`: the cost per entry of each eviction policy, by the number of residents."""

from __future__ import annotations

import gc
import random
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

from lmcache_core.plugins.components import Kind

if TYPE_CHECKING:
    from lmcache_core.cli.bench.harness import Bench
    from lmcache_core.kernel.contracts import EvictionPolicy
    from lmcache_core.plugins.registry import Registry
    from lmcache_lab.simulation import SimulatedEntry

SUMMARY = "cost an entry of each eviction policy, by the number of residents"

RESIDENTS = (1_000, 10_000, 100_000, 1_000_000)
RESIDENTS_QUICK = (1_000, 100_000)
BATCH_ENTRIES = 64  # what one request brings
BATCHES = 600
NAMESPACES = 4  # so that `isolated` has several tenants
GROWTH_MAX = 3.0  # cost at the most residents ÷ at the fewest: allows cache misses, not work that grows with residents
WITH_SETTINGS: dict[str, dict[str, Any]] = {
    "isolated": {"tenants": {f"t{n}": {"namespaces": [n], "quota_bytes": 1000 * (n + 1)} for n in range(NAMESPACES)}}
}


class _Costs(NamedTuple):
    """Medians in µs per entry."""

    insert: float
    access: float
    evict: float
    hold: float


def add_options(parser: ArgumentParser) -> None:
    """The options of this bench."""
    parser.add_argument(
        "--policy", nargs="+", metavar="NAME", dest="policies", help="only these (default: all that are installed)"
    )


def run(options: Namespace, bench: Bench) -> None:
    """Record insert, access, evict and hold for each policy and each number of residents, and their sum.

    The floor of the sum is the same policy at the fewest residents: the ratio is the cost of more residents.
    """
    from lmcache_core.plugins.loader import load_plugins

    registry = getattr(options, "registry", None) or load_plugins()
    names = options.policies or [
        spec.name
        for spec in registry.components(Kind.EVICTION_POLICY)
        if spec.name in WITH_SETTINGS or not _needs_settings(registry, spec.name)
    ]
    sizes = RESIDENTS_QUICK if bench.quick else RESIDENTS
    bench.steps(len(names) * len(sizes))
    for name in names:
        flat: float | None = None
        for residents in sizes:
            bench.step(f"{name}, {residents:,} residents")
            policy = registry.build(Kind.EVICTION_POLICY, name, WITH_SETTINGS.get(name))
            costs = _measure(policy, residents)
            for operation, cost in costs._asdict().items():
                bench.record(f"{name} {operation}, {residents:,} residents", cost, "us")
            # One operation may be a single memory access, which costs more among a million objects than among a
            # thousand, whatever the policy does; the life of an entry shows what the policy adds.
            bench.record(
                f"{name} life of an entry, {residents:,} residents",
                sum(costs),
                "us",
                floor=flat,
                target=GROWTH_MAX if residents == sizes[-1] else None,
            )
            flat = flat or sum(costs)
        if name == "adaptive":
            _record_shadows(bench, sizes)


def _record_shadows(bench: Bench, sizes: Sequence[int]) -> None:
    """What the shadow caches of `adaptive` add to an access, and the longest step when it changes its order."""
    from lmcache_policies.adaptive import AdaptivePolicy

    for residents in sizes:
        policies = [AdaptivePolicy(), AdaptivePolicy()]
        filled = [_filled(policy, residents) for policy in policies]
        policies[0].sample.mask = (1 << 62) - 1  # none of its keys is in the sample
        times: tuple[list[float], list[float]] = ([], [])
        rng = random.Random(residents)
        with _frozen():
            for _ in range(BATCHES):
                chosen = rng.sample(range(residents), BATCH_ENTRIES)
                for policy, entries, taken in zip(policies, filled, times, strict=True):
                    taken.append(_timed(policy.access, [entries[at] for at in chosen]))
            plain, shadowed = (median(each) / BATCH_ENTRIES * 1e6 for each in times)
            steps = []
            policy = policies[1]
            for order in range(len(policy.sample.orders)):
                policy.order = order
                steps.append(_timed(policy.victims, BATCH_ENTRIES))
        bench.record(f"adaptive access with shadows, {residents:,} residents", shadowed, "us", floor=plain)
        bench.record(f"adaptive, longest step at a change of order, {residents:,} residents", max(steps) * 1e3, "ms")


def _needs_settings(registry: Registry, name: str) -> bool:
    model = registry.settings_model(Kind.EVICTION_POLICY, name)
    return model is not None and any(field.is_required() for field in model.model_fields.values())


def _measure(policy: EvictionPolicy, residents: int) -> _Costs:
    rng = random.Random(residents)
    insert: list[float] = []
    access: list[float] = []
    evict: list[float] = []
    hold: list[float] = []
    entries = _filled(policy, residents)
    with _frozen():
        for _ in range(BATCHES):
            used = rng.sample(entries, BATCH_ENTRIES)
            access.append(_timed(policy.access, used))
            hold.append(_timed(policy.held, used) + _timed(policy.released, used))
        for start in range(residents, residents + BATCHES * BATCH_ENTRIES, BATCH_ENTRIES):
            fresh = [_entry(number) for number in range(start, start + BATCH_ENTRIES)]
            evict.append(_timed(_evict, policy))
            insert.append(_timed(policy.insert, fresh))
    return _Costs(*(median(times) / BATCH_ENTRIES * 1e6 for times in (insert, access, evict, hold)))


def _filled(policy: EvictionPolicy, residents: int) -> list[SimulatedEntry]:
    """It has capacity for so many entries, and has these."""
    policy.resize(residents)
    entries = [_entry(number) for number in range(residents)]
    with _frozen():
        for batch in _batches(entries):
            policy.insert(batch)
    return entries


def _entry(number: int) -> SimulatedEntry:
    from lmcache_core.limits import KEY_BYTES
    from lmcache_lab.simulation import SimulatedEntry

    return SimulatedEntry(number.to_bytes(KEY_BYTES, "big"), 1, number % NAMESPACES)


def _evict(policy: EvictionPolicy) -> None:
    policy.remove(policy.victims(BATCH_ENTRIES))


def _timed(call: Callable[[Any], object], argument: Any) -> float:
    """Seconds of one call."""
    begun = perf_counter()
    call(argument)
    return perf_counter() - begun


def _batches(entries: Sequence[SimulatedEntry]) -> Iterator[Sequence[SimulatedEntry]]:
    for start in range(0, len(entries), BATCH_ENTRIES):
        yield entries[start : start + BATCH_ENTRIES]


@contextmanager
def _frozen() -> Iterator[None]:
    """As in the server: the collector does not scan the residents."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
