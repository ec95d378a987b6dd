"""`lmcache-core`: the command line. Each command is one module, imported when it is chosen."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lmcache_core.cli.lazy import CommandParser, LazyParser, add_command
from lmcache_core.errors import CacheError

if TYPE_CHECKING:
    from lmcache_core.plugins.registry import Registry

_HERE = "lmcache_core.cli"

# name → module, summary, whether settings may follow as flags
COMMANDS: dict[str, tuple[str, str, bool]] = {
    "serve": (f"{_HERE}.serve", "run a server", True),
    "status": (f"{_HERE}.status", "show the state of a running server", False),
    "top": (f"{_HERE}.top", "watch a running server on a terminal", False),
    "metrics": (f"{_HERE}.metrics", "print a running server's figures in Prometheus' text format", False),
    "explain": (f"{_HERE}.explain", "show where keys are, or why they missed", False),
    "plugins": (f"{_HERE}.plugins", "list what is installed, what was refused, and why", False),
    "init": (f"{_HERE}.init", "write a settings file to start from", False),
    "size": (f"{_HERE}.size", "estimate how large a pool and a tier must be for a model and its traffic", False),
    "config": (f"{_HERE}.config", "print the settings and where each came from", True),
    "check": (f"{_HERE}.check", "check settings and environment before starting a server", True),
    "tiers": (f"{_HERE}.tiers", "list, add, drain, remove and reconfigure the tiers of a running server", False),
    "quota": (f"{_HERE}.quota", "show and change the quotas of a running server's tenants", False),
    "warm": (f"{_HERE}.warm", "load objects of a tier into the pool, ahead of requests", True),
    "verify": (f"{_HERE}.verify", "read every object of a tier and check it", True),
    "copy": (f"{_HERE}.copy_tiers", "copy the objects of one tier to another", True),
    "clean": (f"{_HERE}.clean", "remove what dead servers left behind", False),
    "trace": (f"{_HERE}.trace", "record the requests to a server, and replay them", False),
    "simulate": (f"{_HERE}.simulate", "replay request traces through eviction policies", False),
    "completion": (f"{_HERE}.completion", "print the script for shell completion", False),
}
# Commands and benches from other packages. Without the package, they say what to install.
ELSEWHERE = {"demo": "lmcache-transformers[demo]"}
BENCHES_ELSEWHERE = dict.fromkeys(
    [
        *("rpc", "copy", "pages", "prompt", "alloc", "clear", "l2", "policy"),
        *("serde", "hash", "lookup", "restart", "engine", "peer", "observe", "hooks", "all"),
    ],
    "lmcache-bench",
)

EXIT_REFUSED = 2  # argparse's own status for a wrong command line
EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit status. An error is one line on standard error. With --json it is also an
    object on standard output, so that scripts always read JSON."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        status = _run(arguments)
        sys.stdout.flush()  # flush here, where a closed pipe is caught
    except CacheError as error:
        said = " ".join(str(error).split())
        print(f"lmcache-core: {said}", file=sys.stderr)
        if "--json" in arguments:
            print(json.dumps({"error": {"code": error.code, "message": said}}))
        return EXIT_REFUSED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # `lmcache-core config | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes again at exit
        return EXIT_REFUSED
    return status


def _run(argv: list[str]) -> int:
    from lmcache_core.plugins.loader import load_plugins

    registry = load_plugins()
    parser = build_parser(registry)
    arguments, rest = parser.parse_known_args(argv)
    if rest and not getattr(arguments, "takes_settings", False):
        arguments.command_parser.error(f"unrecognized arguments: {' '.join(rest)}")
    arguments.registry = registry
    arguments.setting_flags = rest
    status: int = arguments.run(arguments)
    return status


def build_parser(registry: Registry) -> argparse.ArgumentParser:
    """The whole command line, including what the plugins add."""
    from lmcache_core import __version__

    parser = CommandParser(
        prog="lmcache-core",
        description="KV-cache storage for LLM inference: a shared-memory pool, fenced leases, and tiers as plugins.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"lmcache-core {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=LazyParser)
    for name, (module, summary, takes_settings) in COMMANDS.items():
        command = add_command(commands, name, summary, module, add_help=not takes_settings)
        command.set_defaults(takes_settings=takes_settings)
    bench = commands.add_parser("bench", help="measure this machine", description="Measure this machine.")
    benches = bench.add_subparsers(title="benches", metavar="BENCH", required=True, parser_class=LazyParser)
    registry.hook.lmcache_add_commands(subparsers=commands, benches=benches)
    if not benches.choices:
        benches.required = False
        bench.set_defaults(run=_no_bench)
    for what, parsers, elsewhere in (("command", commands, ELSEWHERE), ("bench", benches, BENCHES_ELSEWHERE)):
        for name, requirement in elsewhere.items():
            if name not in parsers.choices:
                _say_where(parsers, what, name, requirement, registry)
    return parser


def _no_bench(arguments: argparse.Namespace) -> int:
    from lmcache_core.errors import PluginError

    raise PluginError("no bench is installed: pip install lmcache-bench")


def _say_where(
    parsers: argparse._SubParsersAction[LazyParser], what: str, name: str, requirement: str, registry: Registry
) -> None:
    """A command that only says what to install. It is left out of the help."""
    package = requirement.partition("[")[0]

    def run(arguments: argparse.Namespace) -> int:
        from lmcache_core.errors import PluginError
        from lmcache_core.plugins.discovery import canonical

        for refusal in registry.refused:
            if canonical(refusal.distribution) == package:
                raise PluginError(f"the {what} {name!r} cannot be used: plugin {refusal}")
        for fault in registry.faults:
            if canonical(fault.plugin.distribution) == package:
                raise PluginError(f"the {what} {name!r} cannot be used: {fault}")
        raise PluginError(f"the {what} {name!r} comes with {package}: pip install '{requirement}'")

    parser = parsers.add_parser(name, add_help=False)
    parser.set_defaults(run=run, takes_settings=True)


if __name__ == "__main__":
    sys.exit(main())
