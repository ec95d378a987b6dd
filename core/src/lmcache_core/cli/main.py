"""`lmcache-core`: the command line. Each command is one module, imported when it is chosen."""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from lmcache_core.cli.lazy import CommandParser, LazyParser, add_command, place
from lmcache_core.errors import CacheError, printable
from lmcache_core.threads import NO_THREAD

if TYPE_CHECKING:
    from lmcache_core.plugins.registry import Registry

_HERE = "lmcache_core.cli"

# name → module, summary, whether settings may follow as flags. The second word of a name is below the first.
COMMANDS: dict[str, tuple[str, str, bool]] = {
    "serve": (f"{_HERE}.serve", "run a server", True),
    "status": (f"{_HERE}.status", "show the state of a running server", False),
    "explain": (f"{_HERE}.explain", "show where keys are, or why they missed", False),
    "plugins": (f"{_HERE}.plugins", "list what is installed, what was refused, and why", False),
    "plugins list": (f"{_HERE}.plugins", "list what is installed (as without an action)", False),
    "plugins show": (f"{_HERE}.show_plugin", "show a plugin or a component, with its settings", False),
    "init": (f"{_HERE}.init", "write a settings file to start from", False),
    "config": (f"{_HERE}.config", "print the settings and where each came from", True),
    "check": (f"{_HERE}.check", "check settings and environment before starting a server", True),
    "tiers": (f"{_HERE}.tiers", "list, add, drain, remove and reconfigure the tiers of a running server", False),
    "quota": (f"{_HERE}.quota", "show and change the quotas of a running server's tenants", False),
    "clean": (f"{_HERE}.clean", "remove what dead servers left behind", False),
}
GROUPS = {"plugins"}  # below these there are others, also of other packages
# Commands of other packages, benches among them. Without the package, they say what to install.
_BENCHES = "rpc copy pages prompt alloc clear l2 policy serde hash lookup restart engine peer "
_BENCHES += "peer-tier transfer backing gpu observe hints blend hooks all"
ELSEWHERE = {
    "demo": "lmcache-transformers[demo]",
    **dict.fromkeys(("plugins new", "plugins certify"), "lmcache-testing"),
    "metrics": "lmcache-http",
    **dict.fromkeys(("top", "size", "warm", "verify", "copy", "completion"), "lmcache-tools"),
    **dict.fromkeys(("trace", "simulate"), "lmcache-lab"),
    "hint": "lmcache-hints",
    "quality": "lmcache-transformers[demo]",
    "bench mlperf-kv": "lmcache-hosts",
    **{f"bench {name}": "lmcache-bench" for name in _BENCHES.split()},
}

EXIT_REFUSED = 2  # argparse's own status for a wrong command line
EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit status. An error is one line on standard error. With --json it is also an
    object on standard output, so that scripts always read JSON."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    _open_standard_streams()
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:], "--help"]
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal of ASCII or Latin-1 shows \\xf7 for what it lacks
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        status = _run(arguments)
        sys.stdout.flush()  # flush here, where a closed pipe is caught
    except CacheError as error:
        text = printable(" ".join(str(error).split()))
        print(f"lmcache-core: {text}", file=sys.stderr)
        if "--json" in arguments:
            print(json.dumps({"error": {"code": error.code, "message": text}}))
        return EXIT_REFUSED
    except RuntimeError as error:
        if str(error) != NO_THREAD:
            raise
        print(
            "lmcache-core: the system gives no more threads: raise the user's limit of processes (ulimit -u, TasksMax) "
            "or that of the control group (pids.max)",
            file=sys.stderr,
        )
        return EXIT_REFUSED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # `lmcache-core config | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes again at exit
        return EXIT_REFUSED
    return status


def _open_standard_streams() -> None:
    """Whoever starts us may have closed some of descriptors 0 to 2. They lead nowhere then: otherwise the next file or
    socket that is opened would get such a number, and whatever a helper prints."""
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
            setattr(sys, name, open(opened, "w" if fd else "r", closefd=False))  # noqa: SIM115  # for good


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
        command = add_command(commands, name, summary, module, takes_settings=takes_settings)
        if name in GROUPS:
            command.add_subparsers(title="actions", metavar="ACTION", parser_class=LazyParser)
    bench = commands.add_parser("bench", help="measure this machine", description="Measure this machine.")
    benches = bench.add_subparsers(title="benches", metavar="BENCH", required=True, parser_class=LazyParser)
    registry.hook.lmcache_add_commands(subparsers=commands, benches=benches)
    if not benches.choices:
        benches.required = False
        bench.set_defaults(run=_no_bench)
    for name, requirement in ELSEWHERE.items():
        group, last = place(commands, name)
        if last not in group.choices:
            group.add_parser(last, add_help=False).set_defaults(
                run=_says_where(name, requirement, registry), takes_settings=True
            )
    return parser


def _no_bench(arguments: argparse.Namespace) -> int:
    from lmcache_core.errors import PluginError
    from lmcache_core.plugins.suggest import install_command

    raise PluginError("no bench is installed", cure=install_command("lmcache-bench"))


def _says_where(name: str, requirement: str, registry: Registry) -> Callable[[argparse.Namespace], int]:
    """A command that only says what to install. It is left out of the help."""
    package = requirement.partition("[")[0]

    def run(arguments: argparse.Namespace) -> int:
        from lmcache_core.errors import PluginError
        from lmcache_core.plugins.discovery import canonical
        from lmcache_core.plugins.suggest import install_command

        for refusal in registry.refused:
            if canonical(refusal.distribution) == package:
                raise PluginError(f"the command {name!r} cannot be used: plugin {refusal}")
        for fault in registry.faults:
            if canonical(fault.plugin.distribution) == package:
                raise PluginError(f"the command {name!r} cannot be used: {fault}")
        raise PluginError(f"the command {name!r} comes with {package}", cure=install_command(requirement))

    return run


if __name__ == "__main__":
    sys.exit(main())
