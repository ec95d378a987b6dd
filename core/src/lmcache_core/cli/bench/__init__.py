"""`lmcache-core bench NAME`: how a package adds a bench. Benches of the core itself are in lmcache-bench.

A bench is a module with `add_options(parser)` and `run(options, bench)`, where `bench` is a
`lmcache_core.cli.bench.harness.Bench`. The module is imported when a user chooses the bench, so `--help` imports none.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from importlib import import_module
from typing import Any

__all__ = ["add_bench"]


def add_bench(benches: argparse._SubParsersAction[Any], name: str, summary: str, module: str) -> None:
    """Add the bench `name`, implemented by `module` (an import path), to `lmcache-core bench`.

    Plugin packages call this in their `lmcache_add_commands` hook. Nothing is imported until the bench is chosen.
    """
    parser = benches.add_parser(
        name,
        help=summary,
        description=summary,
        module=module,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--quick", action="store_true", help="end within 30 seconds")
    parser.add_argument("--strict", action="store_true", help="exit with status 1 when a target is missed")
    parser.set_defaults(run=_runner(name, module))


def _runner(name: str, module: str) -> Callable[[argparse.Namespace], int]:
    def run(options: argparse.Namespace) -> int:
        from lmcache_core.cli.bench.harness import Bench

        with Bench(name, quick=options.quick, as_json=options.json) as bench:
            import_module(module).run(options, bench)
        return 1 if options.strict and not bench.met else 0

    return run
