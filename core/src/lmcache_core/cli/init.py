"""`lmcache-core init`: a settings file to begin with, with every setting in it and what it is for."""

from __future__ import annotations

import argparse
import json
import os
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmcache_core.errors import SettingsError, UsageError

if TYPE_CHECKING:
    from lmcache_core.plugins.registry import Registry
    from lmcache_core.settings.schema import Schema, SettingField

ADAPTERS = {"disk": "fs"}  # what people call a tier, where that is not the adapter's name
WIDTH = 100


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options."""
    parser.add_argument(
        "--tiers",
        default="",
        metavar="NAME,…",
        help="tiers to begin with, fastest first: disk, redis, s3, or any adapter that `lmcache-core plugins` lists",
    )
    parser.add_argument(
        "--output", default="lmcache.toml", metavar="FILE", help="where to (default: %(default)s); - prints it"
    )
    parser.add_argument("--force", action="store_true", help="replace a file that is there")


def run(arguments: argparse.Namespace) -> int:
    """Write; 0. Raises UsageError for a file that is there, SettingsError and PluginError for unknown tiers."""
    names = [name.strip() for name in arguments.tiers.split(",") if name.strip()]
    text = settings_file(arguments.registry, names)
    if arguments.output == "-":
        print(text, end="")
        return 0
    path = Path(arguments.output)
    try:
        _write(path, text, replace=arguments.force)
    except FileExistsError:
        raise UsageError(f"{path} is there already: name another --output, or replace it by --force") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from error
    print(f"{path} written; next: lmcache-core check --config {path}")
    return 0


def _write(path: Path, text: str, *, replace: bool) -> None:
    """All of it or nothing: a full disk leaves what was there."""
    target = path.resolve()
    fresh = target.with_name(f".{target.name}.{os.getpid()}") if replace else path
    with fresh.open("x", encoding="utf-8") as file:
        try:
            file.write(text)
            file.flush()
        except BaseException:
            fresh.unlink()
            raise
    if replace:
        fresh.replace(target)


def settings_file(registry: Registry, tiers: Sequence[str]) -> str:
    """The text of the file: what must be said is there with an example, all else behind `#` with its default."""
    from lmcache_core.settings.compose import prepare
    from lmcache_core.settings.sources import read_flags

    if len(set(tiers)) < len(tiers):
        raise SettingsError(f"--tiers names one twice: {', '.join(tiers)}")
    flags = [word for name in tiers for word in (f"--l2.{name}.type", ADAPTERS.get(name, name))]
    schema, _, _ = prepare(registry, [read_flags(flags)])
    said: dict[tuple[str, ...], Any] = {("l2", name, "type"): ADAPTERS.get(name, name) for name in tiers}
    head = "# The settings of one lmcache-core server. What stands behind # is the default."
    return "\n".join([head, *_tables(schema, said)]) + "\n"


def _tables(schema: Schema, said: Mapping[tuple[str, ...], Any]) -> Iterator[str]:
    """Tables in the order of the models; settings that belong to none of them first, as TOML wants it."""
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
            yield from _lines(setting, said)


def _lines(setting: SettingField, said: Mapping[tuple[str, ...], Any]) -> Iterator[str]:
    yield from textwrap.wrap(
        f"{setting.description} ({setting.type_text})".strip(), WIDTH, initial_indent="# ", subsequent_indent="# "
    )
    name = setting.path[-1]
    if setting.path in said:
        yield f"{name} = {_toml(said[setting.path])}"
    elif setting.required:
        yield f"{name} = {_toml(setting.example)}"
    else:
        default = None if setting.secret else _plain(setting)
        yield f"# {name} = {'…' if default is None else _toml(default)}"


def _plain(setting: SettingField) -> Any:
    """The default as a file has it, sizes with their unit; None where a file has no word for it."""
    from lmcache_core.settings.present import plain
    from lmcache_core.settings.sizes import size_text

    value = plain(setting.default)
    sized = setting.type_text.startswith("size") and isinstance(value, int) and value >= 1024
    return size_text(value).replace(" ", "") if sized else value


def _toml(value: Any) -> str:
    """JSON's words are TOML's for everything that a default can be, but for tables."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name} = {_toml(each)}" for name, each in value.items()) + "}"
    return json.dumps(value, ensure_ascii=False)
