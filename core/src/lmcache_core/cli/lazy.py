"""A subcommand whose module is imported when it was chosen, so that `--help` stays light."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any


class LazyParser(argparse.ArgumentParser):
    """Asks `module` for its options (`add_options(parser)`) only when there is something for it to parse."""

    def __init__(self, *args: Any, module: str = "", **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)  # an abbreviation would swallow a setting's name
        super().__init__(*args, **kwargs)
        self._module = module

    def parse_known_args(  # type: ignore[override]  # the stub's overloads say the same thing three times
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        if self._module:
            module, self._module = self._module, ""
            import_module(module).add_options(self)
        return super().parse_known_args(args, namespace)


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
