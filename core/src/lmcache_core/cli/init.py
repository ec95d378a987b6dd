"""`lmcache-core init`: write a settings file to start from, with every setting and its description."""

from __future__ import annotations

import argparse
import json
import os
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmcache_core.errors import SettingsError, UsageError
from lmcache_core.guard import on_failure

if TYPE_CHECKING:
    from lmcache_core.plugins.registry import Registry
    from lmcache_core.settings.schema import Schema, SettingField

ADAPTERS = {"disk": "fs"}  # common names of tiers that differ from the adapter's name
WIDTH = 100


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options."""
    parser.add_argument(
        "--tiers",
        default="",
        metavar="NAME,…",
        help="tiers to start with, fastest first: disk, redis, s3, or any adapter that `lmcache-core plugins` lists",
    )
    parser.add_argument(
        "--output", default="lmcache.toml", metavar="FILE", help="the file to write (default: %(default)s); - prints it"
    )
    parser.add_argument("--force", action="store_true", help="replace an existing file")


def run(arguments: argparse.Namespace) -> int:
    """Write the file; returns 0. Raises UsageError if the file exists, SettingsError and PluginError for unknown
    tiers."""
    names = [name.strip() for name in arguments.tiers.split(",") if name.strip()]
    text = settings_file(arguments.registry, names)
    if arguments.output == "-":
        print(text, end="")
        return 0
    path = Path(arguments.output)
    try:
        _write(path, text, replace=arguments.force)
    except FileExistsError:
        raise UsageError(f"{path} already exists: choose another --output, or replace it with --force") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from error
    print(f"{path} written; next: lmcache-core check --config {path}")
    return 0


def _write(path: Path, text: str, *, replace: bool) -> None:
    """Write all of the file or nothing: a full disk leaves the old one intact."""
    target = path.resolve()
    fresh = target.with_name(f".{target.name}.{os.getpid()}") if replace else path
    with fresh.open("x", encoding="utf-8") as file:
        with on_failure(fresh.unlink):
            file.write(text)
            file.flush()
    if replace:
        fresh.replace(target)


def settings_file(registry: Registry, tiers: Sequence[str]) -> str:
    """The text of the file. Required settings have an example; all others are commented out with their default."""
    from lmcache_core.settings.compose import prepare
    from lmcache_core.settings.sources import read_flags

    if len(set(tiers)) < len(tiers):
        raise SettingsError(f"--tiers names a tier twice: {', '.join(tiers)}")
    flags = [flag for name in tiers for flag in (f"--l2.{name}.type", ADAPTERS.get(name, name))]
    schema, _, _ = prepare(registry, [read_flags(flags)])
    given: dict[tuple[str, ...], Any] = {("l2", name, "type"): ADAPTERS.get(name, name) for name in tiers}
    head = "# The settings of one lmcache-core server. Commented lines show the defaults."
    return "\n".join([head, *_tables(schema, given)]) + "\n"


def _tables(schema: Schema, given: Mapping[tuple[str, ...], Any]) -> Iterator[str]:
    """Tables in the order of the models. TOML needs settings outside any table to come first."""
    tables: dict[tuple[str, ...], list[SettingField]] = {(): []}
    for setting in schema.values():
        tables.setdefault(setting.path[:-1], []).append(setting)
    for at, settings in tables.items():
        if at:
            yield ""
            yield f"[{'.'.join(at)}]"
        for number, setting in enumerate(settings):
            if number or not at:
                yield ""
            yield from _lines(setting, given)


def _lines(setting: SettingField, given: Mapping[tuple[str, ...], Any]) -> Iterator[str]:
    yield from textwrap.wrap(
        f"{setting.description} ({setting.type_text})".strip(), WIDTH, initial_indent="# ", subsequent_indent="# "
    )
    name = setting.path[-1]
    if setting.path in given:
        yield f"{name} = {_toml(given[setting.path])}"
    elif setting.required:
        yield f"{name} = {_toml(setting.example)}"
    else:
        yield f"# {name} = {default_text(setting) or '…'}"


def default_text(setting: SettingField) -> str:
    """The default as a file has it; empty for a secret, and if TOML cannot express it."""
    default = None if setting.secret else _plain(setting)
    return "" if default is None else _toml(default)


def _plain(setting: SettingField) -> Any:
    """The default as a file has it, sizes with their unit; None if TOML cannot express it."""
    from lmcache_core.settings.present import plain
    from lmcache_core.settings.sizes import size_text

    value = plain(setting.default)
    sized = setting.type_text.startswith("size") and isinstance(value, int) and value >= 1024
    return size_text(value).replace(" ", "") if sized else value


def _toml(value: Any) -> str:
    """JSON is valid TOML for every default except tables."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name} = {_toml(each)}" for name, each in value.items()) + "}"
    return json.dumps(value, ensure_ascii=False)
