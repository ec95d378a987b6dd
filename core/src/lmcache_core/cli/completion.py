"""`lmcache-core completion`: the script with which a shell completes command lines, including settings as flags."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from lmcache_core.cli.lazy import LazyParser
from lmcache_core.errors import UsageError

if TYPE_CHECKING:
    from lmcache_core.plugins.registry import Registry


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options."""
    parser.add_argument("shell", choices=["bash", "zsh", "tcsh"])


def run(arguments: argparse.Namespace) -> int:
    """Print the script; returns 0. Raises `UsageError` without shtab, which writes it."""
    try:
        import shtab
    except ImportError as error:
        raise UsageError("completion needs shtab", cure="pip install 'lmcache-core[cli]'") from error
    print(shtab.complete(whole_parser(arguments.registry), arguments.shell))
    return 0


def whole_parser(registry: Registry) -> argparse.ArgumentParser:
    """The command line, including everything that is otherwise loaded late."""
    from lmcache_core.cli.main import build_parser

    parser = build_parser(registry)
    _load(parser, _flags(registry))
    return parser


def _load(parser: argparse.ArgumentParser, settings: dict[str, str]) -> None:
    if isinstance(parser, LazyParser):
        parser.load()
    if parser.get_default("takes_settings"):
        for flag, description in settings.items():
            parser.add_argument(flag, help=description)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for pseudo in action._choices_actions:  # those that the help lists
                _load(action.choices[pseudo.dest], settings)


def _flags(registry: Registry) -> dict[str, str]:
    """The settings of any server, without tiers: users choose the names of those."""
    from lmcache_core.settings.compose import prepare
    from lmcache_core.settings.sources import dotted

    schema, _, _ = prepare(registry, [])
    return {f"--{dotted(setting.path)}": setting.description.replace("%", "%%") for setting in schema.values()}
