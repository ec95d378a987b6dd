"""Compose settings from all sources in two passes: find out which components there are, then build one concrete
model.

Precedence: command line > environment > file > default. A bare name (`eviction = "lru"`) replaces a table that a
weaker origin gave for another type; settings of the same type are merged.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from lmcache_core.errors import SettingsError
from lmcache_core.plugins.loader import load_plugins
from lmcache_core.plugins.registry import Registry
from lmcache_core.settings.choose import choose, component_paths, stated_type
from lmcache_core.settings.concrete import Choices, concrete_model
from lmcache_core.settings.model import Settings
from lmcache_core.settings.names import check_names, take_unknown_variables, warnings_about
from lmcache_core.settings.refusals import settings_error
from lmcache_core.settings.schema import Schema, SettingField, read_text, read_text_within, schema_of
from lmcache_core.settings.sources import (
    Leaf,
    Origin,
    Source,
    dotted,
    overlaid,
    read_environment,
    read_file,
    read_flags,
    read_values,
    tree_of,
)

__all__ = [
    "make_settings",
]


class Provenance(NamedTuple):
    """Where a value came from: the kind of place, and the flag, variable or file itself."""

    origin: Origin
    where: str = ""

    def __str__(self) -> str:
        return f"{self.origin} {self.where}" if self.where else str(self.origin)


@dataclass(frozen=True)
class Composed:
    """Valid settings. `origins` has the dotted name of every setting; `warnings` are lines for people."""

    settings: Settings
    origins: Mapping[str, Provenance]
    warnings: Sequence[str]
    schema: Schema = field(repr=False)


def compose(
    registry: Registry,
    argv_options: Sequence[str] = (),
    environ: Mapping[str, str] = os.environ,
    config_path: Path | None = None,
) -> Composed:
    """The settings of a server. `argv_options` are flags such as `--l1.size_bytes`, `8GiB`.

    Raises SettingsError for unknown, missing or wrong settings, and PluginError for a component that is not installed.
    """
    return compose_sources(registry, [read_flags(argv_options), read_environment(environ), read_file(config_path)])


def compose_from(registry: Registry, values: Mapping[str, Any]) -> Composed:
    """The same from a program's own values; the environment and files are not read."""
    return compose_sources(registry, [read_values(values)])


def make_settings(registry: Registry | None = None, **values: Any) -> Settings:
    """`make_settings(name="a", l1={"size_bytes": "64MiB"}, l2={"disk": {"type": "fs", "path": "/d"}})`."""
    return compose_from(registry or load_plugins(), values).settings


def prepare(registry: Registry, sources: Sequence[Source]) -> tuple[Schema, type[Settings], Choices]:
    """The first pass and the concrete model, without values, for a help page."""
    choices = choose(sources, registry.tables)
    concrete = concrete_model(registry, choices)
    return schema_of(concrete), concrete.model, choices


def compose_sources(registry: Registry, sources: Sequence[Source]) -> Composed:
    """`sources`: strongest first."""
    unknown = take_unknown_variables(sources, registry.tables)
    schema, model, choices = prepare(registry, sources)
    sources = _without_replaced(sources, choices)
    check_names(schema, sources)
    origins = {dotted(path): _provenance(setting, sources) for path, setting in schema.items()}
    try:
        settings = model.model_validate(_merged(schema, sources))
    except ValidationError as error:
        raise settings_error(error, schema, sources) from None
    return Composed(settings, origins, warnings_about(unknown, schema), schema)


def _merged(schema: Schema, sources: Sequence[Source]) -> dict[str, Any]:
    """One tree of all sources, with texts parsed as their types."""
    tree: dict[str, Any] = {}
    for source in reversed(sources):
        leaves = {}
        for path, leaf in source.leaves.items():
            setting, value = schema.get(path), leaf.value
            if leaf.text:
                value = _read(schema, path, leaf)
            if setting is not None and setting.component and isinstance(value, str) and value != "none":
                path = (*path, "type")
            leaves[path] = value
        tree = overlaid(tree, tree_of(leaves))
    return tree


def _read(schema: Schema, path: tuple[str, ...], leaf: Leaf) -> Any:
    setting = schema.get(path)
    tables = (schema.get(path[:length]) for length in range(len(path) - 1, 0, -1))
    try:
        if setting is not None:
            return read_text(setting, leaf.value)
        table = next((each for each in tables if each is not None and each.open), None)
        return leaf.value if table is None else read_text_within(table, leaf.value)
    except ValueError as error:
        raise SettingsError(f"{dotted(path)} ({leaf.where}): {error}") from None


def _without_replaced(sources: Sequence[Source], choices: Choices) -> list[Source]:
    """Drop what weaker sources say about a component if a stronger source chose another one."""
    kept = [Source(source.origin, dict(source.leaves)) for source in sources]
    for path in component_paths(choices):
        stated: str | None = None
        for source in kept:
            here = stated_type(source, path)
            if stated is None:
                stated = here
            elif here is not None and here != stated:
                for leaf in [leaf for leaf in source.leaves if leaf[: len(path)] == path]:
                    del source.leaves[leaf]
    return kept


def _provenance(setting: SettingField, sources: Sequence[Source]) -> Provenance:
    path = setting.path
    for source in sources:
        for at, leaf in source.leaves.items():
            below = at in (path, (*path, "type")) if setting.component else at[: len(path)] == path
            if below:
                return Provenance(source.origin, leaf.where)
    return Provenance(Origin.DEFAULT)
