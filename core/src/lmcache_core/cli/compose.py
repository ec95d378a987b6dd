"""Shared by commands that read settings: their options, and the composed settings."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from lmcache_core.settings.files import DEFAULT_FILE, ENV_FILE_VARIABLE, find_file

if TYPE_CHECKING:
    from lmcache_core.settings.compose import Composed
    from lmcache_core.settings.schema import Schema
    from lmcache_core.settings.sources import Source


def add_settings_options(parser: ArgumentParser) -> None:
    """`--config`, and a `--help` that knows the configured tiers."""
    add_file_options(parser)
    parser.add_argument("-h", "--help", action="store_true", help="show this help and every setting, and exit")
    parser.usage = f"{parser.prog} [--config FILE] [--SETTING VALUE ...]"
    parser.set_defaults(format_help=parser.format_help)


def add_file_options(parser: ArgumentParser) -> None:
    """`--config` and `--env-file`."""
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help=f"settings file, TOML, or YAML if called so (default: {DEFAULT_FILE} here, if there)",
    )
    parser.add_argument(
        "--env-file", type=Path, metavar="FILE", help=f"file of variables (default: {ENV_FILE_VARIABLE}, if set)"
    )


def _print_warning(warning: str) -> None:
    print(f"lmcache-core: warning: {warning}", file=sys.stderr)


def composed(arguments: Namespace, warn: Callable[[str], None] = _print_warning) -> Composed:
    """The settings of a command line. `warn` is called with each warning."""
    from lmcache_core.settings.compose import compose_sources

    found = compose_sources(arguments.registry, sources_of(arguments))
    for warning in found.warnings:
        warn(warning)
    return found


def print_settings_help(arguments: Namespace) -> None:
    """The command's help, then every setting of the configuration, with its type and default."""
    from lmcache_core.settings.compose import known_sources, prepare

    sources, _ = known_sources(arguments.registry, sources_of(arguments))
    schema, _, choices = prepare(arguments.registry, sources)
    print(arguments.format_help())
    print("settings (as flags; in the file: tables; in the environment: LMCACHE_CORE_L1__SIZE_BYTES);")
    print("flags override the environment, then --env-file, --secrets_dir and --config; the rest have their defaults:")
    print(settings_lines(schema))
    if not choices.tiers:
        print("\nno tier is configured: --l2.NAME.type ADAPTER adds one; `lmcache-core plugins` lists the adapters")


def settings_lines(schema: Schema) -> str:
    """Two lines for each setting."""
    from lmcache_core.settings.present import default_text
    from lmcache_core.settings.sources import dotted

    lines = []
    for setting in schema.values():
        lines.append(f"  --{dotted(setting.path)} <{setting.type_text}>")
        default = "required" if setting.required else f"default {default_text(setting)}"
        lines.append(f"      {setting.description + '; ' if setting.description else ''}{default}")
    return "\n".join(lines)


def sources_of(arguments: Namespace) -> list[Source]:
    """What a command line and its environment say, strongest first."""
    from lmcache_core.settings.sources import read_sources

    return read_sources(find_file(arguments.config), arguments.env_file, arguments.setting_flags)
