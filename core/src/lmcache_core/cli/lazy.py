"""A subcommand whose module is imported when it is chosen, so that `--help` stays fast."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, NoReturn

from lmcache_core.errors import UsageError


class CommandParser(argparse.ArgumentParser):
    """Raises an exception for a wrong command line instead of ending the process. `main` prints it, as JSON if asked
    to."""

    def error(self, message: str) -> NoReturn:
        """Print the usage to standard error and raise `UsageError`."""
        self.print_usage(sys.stderr)
        raise UsageError(message, cure=f"see {self.prog} --help")

    def parse_known_args(  # type: ignore[override]  # the stub's overloads say the same thing three times
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Sets `command_parser` to the innermost command, whose usage is the most helpful."""
        found, rest = super().parse_known_args(args, namespace)
        if not hasattr(found, "command_parser"):
            found.command_parser = self
        return found, rest


class LazyParser(CommandParser):
    """Asks `module` for its options (`add_options(parser)`) only when there is a command line to parse."""

    def __init__(self, *args: Any, module: str = "", **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)  # an abbreviation could swallow a setting's name
        super().__init__(*args, **kwargs)
        self._module = module
        self.mixes_words = False  # True: an optional word may also follow options

    def parse_known_args(  # type: ignore[override]  # the stub's overloads say the same thing three times
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        self.load()
        if self.mixes_words:
            self.mixes_words = False  # argparse calls this method again, for the options and for the words
            return self.parse_known_intermixed_args(args, namespace)
        return super().parse_known_args(args, namespace)

    def load(self) -> None:
        """Import the module and add its options."""
        if self._module:
            module, self._module = self._module, ""
            import_module(module).add_options(self)


def add_command(
    subparsers: argparse._SubParsersAction[Any], name: str, summary: str, module: str, **kwargs: Any
) -> argparse.ArgumentParser:
    """A subcommand implemented by `module`, which has `add_options(parser)` and `run(arguments) -> int`."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        name, help=summary, description=summary, module=module, **kwargs
    )
    parser.set_defaults(run=_runner(module))
    return parser


def _runner(module: str) -> Callable[[argparse.Namespace], int]:
    def run(arguments: argparse.Namespace) -> int:
        status: int = import_module(module).run(arguments)
        return status

    return run
