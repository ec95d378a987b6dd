"""`lmcache-core bench`: what the machine can do, and how close we come. A bench module is imported when chosen.

A bench module offers `add_options(parser)` and `run(options, bench)`, where `bench` is a
`lmcache_core.cli.bench.harness.Bench`. Its summary stands here, so that `--help` imports none of them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from importlib import import_module
from typing import Any

_HERE = "lmcache_core.cli.bench"

BENCHES: dict[str, tuple[str, str]] = {
    "rpc": (f"{_HERE}.rpc", "round trips and two-phase calls on each carrier, against a bare echo"),
    "copy": (f"{_HERE}.copy", "store and retrieve end to end, against the best plain copy"),
    "prompt": (
        f"{_HERE}.prompt",
        "a long prompt stored and retrieved by several workers, against pickle over ZMQ",
    ),
    "alloc": (f"{_HERE}.alloc", "allocate and free, up to a million residents"),
    "clear": (f"{_HERE}.clear", "a clear of a million objects, and what others notice of it"),
    "l2": (f"{_HERE}.l2", "a disk tier against plain writes and reads of the same bytes"),
    "policy": (f"{_HERE}.policy", "eviction policies: cost of an operation against residents"),
    "serde": (f"{_HERE}.serde", "codec chains against a plain copy of the same bytes"),
    "hash": (f"{_HERE}.hash", "the keys of a long prompt, against the bare hash loop in C and hashlib"),
    "lookup": (f"{_HERE}.lookup", "512 hits in one call, against a dict, up to 16 million entries"),
    "restart": (f"{_HERE}.restart", "a million objects adopted from a dead server's pool, to the first hit"),
    "hooks": (f"{_HERE}.hooks", "a hook call against a direct method"),
}


def add_bench(benches: argparse._SubParsersAction[Any], name: str, summary: str, module: str) -> None:
    """Add the bench `name`, implemented by `module` (an import path), to `lmcache-core bench`.

    For the `lmcache_add_commands` hook of plugin packages too. Imports nothing until the bench is chosen.
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
