"""`lmcache-core simulate`: the hit rate that each eviction policy would have had on a request trace."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lmcache_core.cli.table import print_table, rich_or_none
from lmcache_core.errors import UsageError
from lmcache_core.plugins.components import Kind
from lmcache_core.plugins.suggest import install_command

if TYPE_CHECKING:
    from lmcache_core.plugins.registry import Registry
    from lmcache_lab.simulation import SimulationResult
    from lmcache_lab.tiered import TieredResult
    from lmcache_lab.workloads import Trace

SUMMARY = "replay request traces through eviction policies and show their hit rates"

_BAR_CELLS = 30


def add_options(parser: ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("traces", nargs="*", type=Path, metavar="TRACE", help="JSON lines with hash_ids, or recordings")
    parser.add_argument(
        "--synthetic",
        action="append",
        default=[],
        metavar="SPEC",
        help="generate a trace: `default`, or any of sessions=400,turns=8,turn_blocks=6,prefixes=16,prefix_blocks=24,"
        "skew=1.0,active=40,seed=0",
    )
    parser.add_argument(
        "--policy",
        nargs="+",
        action="extend",
        required=True,
        metavar="POLICY",
        dest="policies",
        help="eviction policies, with or without settings: s3fifo:small_fraction=0.2,promote_uses=1",
    )
    parser.add_argument(
        "--capacity",
        nargs="+",
        action="extend",
        required=True,
        type=_blocks,
        metavar="N",
        dest="capacities",
        help="capacities of the cache, in blocks",
    )
    parser.add_argument(
        "--order",
        choices=["forward", "suffix-first"],
        default="forward",
        help="order of the blocks within a request (the server uses suffix-first); default %(default)s",
    )
    parser.add_argument(
        "--tier",
        nargs="+",
        action="extend",
        default=[],
        type=_blocks,
        metavar="N",
        dest="tiers",
        help="capacities of a tier behind the cache, in blocks: what it would hit, and what would be written for it",
    )
    parser.add_argument(
        "--store-policy",
        nargs="+",
        action="extend",
        metavar="POLICY",
        dest="store_policies",
        help="store policies of the tier, as --policy; default: default",
    )
    parser.add_argument(
        "--optimum", action="store_true", help="also what a policy that knows the future would have had, block by block"
    )
    parser.add_argument("--json", action="store_true", help="print records of trace, policy, capacity, hit_rate")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw the curves (needs lmcache-lab[plot])")


def _blocks(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is not a number of blocks; traces go before the options") from None


def run(options: Namespace) -> int:
    """Replay, then print; returns 0. Raises UsageError for a trace, a policy or a capacity that cannot be used."""
    from lmcache_core.plugins.loader import load_plugins

    if options.plot is not None:
        _matplotlib()  # fail now rather than after the work
    if options.tiers and (options.plot is not None or options.optimum):
        raise UsageError("--tier goes with neither --plot nor --optimum")
    if options.store_policies and not options.tiers:
        raise UsageError("--store-policy is about a tier: add --tier with its capacity in blocks")
    traces = _traces(options)
    registry = getattr(options, "registry", None) or load_plugins()
    choices = [_parse_choice(text, "--policy") for text in options.policies]
    stores = [_parse_choice(text, "--store-policy") for text in options.store_policies or ["default"]]
    for kind, texts in ((Kind.EVICTION_POLICY, choices), (Kind.STORE_POLICY, stores)):
        for choice in texts:
            _build(registry, kind, choice)
    if options.tiers:
        return _replay_tiers(options, registry, traces, choices, stores)
    results = _replay_all(options, registry, traces, choices)
    if options.json:
        fields = ("trace", "policy", "capacity")
        records = [
            {**{field: getattr(result, field) for field in fields}, "hit_rate": round(result.hit_rate, 6)}
            for result in results
        ]
        print(json.dumps(records, indent=2))
    else:
        _print_tables(options, traces, results)
    if options.plot is not None:
        _plot(options.plot, results)
    return 0


class _Choice(NamedTuple):
    """One `--policy` or `--store-policy`. Results are labelled with the text as given."""

    option: str
    text: str
    name: str
    settings: dict[str, Any]


def _parse_choice(text: str, option: str) -> _Choice:
    name, _, rest = text.partition(":")
    settings: dict[str, Any] = {}
    for part in filter(None, rest.split(",")):
        field, equals, value = part.partition("=")
        if not equals:
            raise UsageError(f"{option} {text}: {part!r} is not a setting: write {name}:FIELD=VALUE,…")
        settings[field] = value  # still text: the settings model converts it
    return _Choice(option, text, name, settings)


def _build(registry: Registry, kind: Kind, choice: _Choice) -> Any:
    from pydantic import ValidationError

    if choice.settings and registry.settings_model(kind, choice.name) is None:
        raise UsageError(f"{choice.option} {choice.text}: {choice.name} has no settings")
    try:
        return registry.build(kind, choice.name, choice.settings)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or choice.name
        raise UsageError(f"{choice.option} {choice.text}: {where}: {first['msg']}") from error


def _traces(options: Namespace) -> list[Trace]:
    from lmcache_lab.recordings import is_recording
    from lmcache_lab.workloads import parse_synthetic, read_trace, synthetic_trace

    traces = [_recorded(path) if is_recording(path) else read_trace(path) for path in options.traces]
    for spec in options.synthetic:
        traces.append(synthetic_trace(parse_synthetic("" if spec == "default" else spec)))
    if not traces:
        raise UsageError("nothing to replay: name a trace file, or use --synthetic default")
    return traces


def _recorded(path: Path) -> Trace:
    """The requests in a recording of a server."""
    from lmcache_lab.recordings import read_recording, requests_of
    from lmcache_lab.workloads import Trace

    requests = [blocks for _, blocks in requests_of(read_recording(path)[1])]
    if not requests:
        raise UsageError(f"{path} has no lookups: record again while clients look keys up")
    return Trace(path.stem, requests)


def _replay_all(
    options: Namespace, registry: Registry, traces: list[Trace], choices: list[_Choice]
) -> list[SimulationResult]:
    from lmcache_lab.simulation import Order, optimum, replay

    runs = [(trace, choice, capacity) for trace in traces for choice in choices for capacity in options.capacities]
    total = sum(len(trace.requests) for trace, _, _ in runs)
    done = 0
    results = []
    with _progress(total) as report:
        for trace, choice, capacity in runs:
            policy = _build(registry, Kind.EVICTION_POLICY, choice)  # policies keep state: each run has its own
            label = f"{trace.name} {choice.text} {capacity}"
            report(done, label)

            def advanced(requests: int, before: int = done, label: str = label) -> None:
                report(before + requests, label)

            results.append(replay(trace, choice.text, policy, capacity, Order(options.order), advanced))
            done += len(trace.requests)
    if options.optimum:
        results += [optimum(trace, capacity) for trace in traces for capacity in options.capacities]
    return results


def _replay_tiers(
    options: Namespace, registry: Registry, traces: list[Trace], choices: list[_Choice], stores: list[_Choice]
) -> int:
    from lmcache_lab.simulation import Order
    from lmcache_lab.tiered import replay_tiered

    runs = list(product(traces, choices, options.capacities, options.tiers, stores))
    results = []
    with _progress(len(runs)) as report:
        for done, (trace, choice, capacity, tier, store) in enumerate(runs):
            report(done, f"{trace.name} {choice.text} {store.text} {capacity} {tier}")
            policies = _build(registry, Kind.EVICTION_POLICY, choice), _build(registry, Kind.STORE_POLICY, store)
            names = choice.text, store.text
            results.append(replay_tiered(trace, names, *policies, capacity, tier, Order(options.order)))
    if options.json:
        print(json.dumps([_tier_record(result) for result in results], indent=2))
    else:
        for trace in traces:
            _print_tiers(trace, [each for each in results if each.trace == trace.name])
    return 0


def _tier_record(result: TieredResult) -> dict[str, Any]:
    fields = ("trace", "policy", "store_policy", "capacity", "tier")
    rates = ("hit_rate", "tier_hit_rate", "writes_per_hit")
    found = {rate: getattr(result, rate) for rate in rates}
    return {field: getattr(result, field) for field in fields} | {
        rate: None if value is None else round(value, 6) for rate, value in found.items()
    }


def _print_tiers(trace: Trace, results: list[TieredResult]) -> None:
    columns = ("policy", "store policy", "capacity", "tier", "hits", "of the tier", "writes a hit")
    rows = []
    for each in results:
        rates = f"{each.hit_rate:.4f}", f"{each.tier_hit_rate:.4f}"
        writes = "-" if each.writes_per_hit is None else f"{each.writes_per_hit:.2f}"
        rows.append((each.policy, each.store_policy, f"{each.capacity:,}", f"{each.tier:,}", *rates, writes))
    title = f"{trace.name}: {len(trace.requests):,} requests, {trace.references:,} blocks; capacities in blocks"
    print_table(columns, rows, title=title, right=range(2, len(columns)))


@contextmanager
def _progress(total: int) -> Iterator[Callable[[int, str], None]]:
    """`report(requests done, label)`: a bar on a terminal (if rich is installed), otherwise nothing."""
    rich = rich_or_none(sys.stderr)
    if rich is not None:
        from rich.progress import Progress

        with Progress(console=rich.console.Console(stderr=True), transient=True) as bar:
            task = bar.add_task("simulate", total=total)
            yield lambda done, label: bar.update(task, completed=done, description=label)
    elif sys.stderr.isatty():

        def report(done: int, label: str) -> None:
            cells = _BAR_CELLS * done // max(1, total)
            print(f"\r[{'#' * cells:<{_BAR_CELLS}}] {label:<50}", end="", file=sys.stderr, flush=True)

        try:
            yield report
        finally:
            print(f"\r{'':<{_BAR_CELLS + 53}}\r", end="", file=sys.stderr, flush=True)
    else:
        yield lambda done, label: None


def _print_tables(options: Namespace, traces: list[Trace], results: list[SimulationResult]) -> None:
    by_run = {(result.trace, result.policy, result.capacity): result.hit_rate for result in results}
    columns = ("policy", *(f"{capacity:,}" for capacity in options.capacities))
    for trace in traces:
        rows = [
            (policy, *(f"{by_run[trace.name, policy, capacity]:.4f}" for capacity in options.capacities))
            for policy in [*options.policies, *(["optimum"] if options.optimum else [])]
        ]
        title = (
            f"{trace.name}: {len(trace.requests):,} requests, {trace.references:,} blocks, "
            f"{trace.unique_blocks:,} unique; hit rate by capacity in blocks, {options.order}"
        )
        print_table(columns, rows, title=title, right=range(1, len(columns)))


def _matplotlib() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError("--plot needs matplotlib", cure=install_command("lmcache-lab[plot]")) from error
    return Figure


def _plot(path: Path, results: list[SimulationResult]) -> None:
    """One panel for each trace, one curve for each policy."""
    traces = list(dict.fromkeys(result.trace for result in results))
    figure = _matplotlib()(figsize=(6.4 * len(traces), 4.8), layout="constrained")
    panels = figure.subplots(1, len(traces), squeeze=False)[0]
    for panel, trace in zip(panels, traces, strict=True):
        for policy in dict.fromkeys(result.policy for result in results):
            points = sorted((r.capacity, r.hit_rate) for r in results if (r.trace, r.policy) == (trace, policy))
            panel.plot(*zip(*points, strict=True), marker="o", markersize=3, label=policy)
        panel.set(title=trace, xlabel="capacity (blocks)", ylabel="hit rate", xscale="log", ylim=(0, None))
        panel.grid(alpha=0.3)
        panel.legend()
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"the plot cannot be written to {path}: {error}") from error
