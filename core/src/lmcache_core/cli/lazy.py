"""A subcommand whose module is imported when it is chosen, so that `--help` stays fast."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, NoReturn

from lmcache_core.errors import UsageError

__all__ = ["add_command"]

_Commands = argparse._SubParsersAction  # what `add_subparsers` returns


class CommandParser(argparse.ArgumentParser):
    """Raises an exception for a wrong command line instead of ending the process. `main` prints it, as JSON if asked
    to."""

    commands: _Commands[Any] | None = None  # those below this one
    example: str = ""  # a command line to paste, in the help and after an error
    words: Sequence[str] = ()  # what it parses now

    def add_subparsers(self, **kwargs: Any) -> _Commands[Any]:
        """Remember them: other packages add some."""
        self.commands = super().add_subparsers(**kwargs)
        return self.commands

    def error(self, message: str) -> NoReturn:
        """Print the usage to standard error and raise `UsageError`."""
        self.print_usage(sys.stderr)
        message = self._misspelt() or message
        if self.commands is not None and message.endswith(f" are required: {self.commands.metavar}"):
            shown = [each.dest for each in self.commands._choices_actions]  # as the help has them
            message = f"{str(self.commands.metavar).lower()} is missing: {', '.join(shown)}"
        example = f"for example `{self.example}`; " if self.example else ""
        cure = f"{example}see {self.prog} --help"
        if message.endswith("?"):  # did you mean …?
            raise UsageError(f"{message} {cure[0].upper()}{cure[1:]}")
        raise UsageError(message, cure=cure)

    def _misspelt(self) -> str:
        """The first option that is unknown but near one that is known: it explains any other error."""
        from lmcache_core.plugins.suggest import suggestion

        if self.get_default("takes_settings"):  # settings are looked up, and suggested, later
            return ""
        for word in self.words:
            option = word.partition("=")[0]
            if option == "--":
                return ""
            if option.startswith("--") and option not in self._option_string_actions:
                near = suggestion(option, (each for each in self._option_string_actions if each.startswith("--")))
                if near:
                    return f"there is no option {option}{near}"
        return ""

    def format_help(self) -> str:
        """The help, with the example at its end."""
        return super().format_help() + (f"\nexample:\n  {self.example}\n" if self.example else "")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if isinstance(action, _Commands) and value not in action.choices:
            from lmcache_core.plugins.suggest import suggestion

            near = suggestion(str(value), action.choices)
            raise argparse.ArgumentError(None, f"there is no {str(action.metavar).lower()} {value!r}{near}")
        super()._check_value(action, value)

    def parse_known_args(  # type: ignore[override]  # the stub's overloads say the same thing three times
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Sets `command_parser` to the innermost command, whose usage is the most helpful."""
        self.words = sys.argv[1:] if args is None else args
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

    def parse_known_args(  # type: ignore[override]  # the stub's overloads say the same thing three times
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        self.load()
        return super().parse_known_args(args, namespace)

    def load(self) -> None:
        """Import the module and add its options."""
        if self._module:
            module, self._module = self._module, ""
            import_module(module).add_options(self)


def add_command(
    subparsers: _Commands[Any], name: str, summary: str, module: str, *, takes_settings: bool = False
) -> argparse.ArgumentParser:
    """Add a subcommand implemented by `module`, which has `add_options(parser)` and `run(arguments) -> int`. It is
    imported when the command is chosen. `name` may be two words: "plugins certify" is added below `plugins`.
    `takes_settings`: any setting may follow as a flag; then `module` also adds `--help`, see `cli.compose`.

    Plugin packages call this in their `lmcache_add_commands` hook.
    """
    below, last = place(subparsers, name)
    parser: argparse.ArgumentParser = below.add_parser(
        last, help=summary, description=summary, module=module, add_help=not takes_settings
    )
    parser.set_defaults(run=_runner(module), takes_settings=takes_settings)
    return parser


def place(subparsers: _Commands[Any], name: str) -> tuple[_Commands[Any], str]:
    """Where a command is added, and its last word. Raises `UsageError` if none can be added below the words before."""
    *groups, last = name.split()
    for group in groups:
        below = getattr(subparsers.choices.get(group), "commands", None)
        if below is None:
            raise UsageError(f"command {name!r} cannot be added: none can be added below {group!r}")
        subparsers = below
    return subparsers, last


def _runner(module: str) -> Callable[[argparse.Namespace], int]:
    def run(arguments: argparse.Namespace) -> int:
        status: int = import_module(module).run(arguments)
        return status

    return run
