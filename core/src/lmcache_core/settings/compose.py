"""Compose settings from all sources in two passes: find out which components there are, then build one concrete
model.

Precedence: command line > environment > `.env` file > secrets > file > default. A bare name (`eviction = "lru"`)
replaces a table that a weaker origin gave for another type; settings of the same type are merged.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from lmcache_core.errors import SettingsError
from lmcache_core.paths import absolute_path
from lmcache_core.plugins.loader import load_plugins
from lmcache_core.plugins.registry import Registry
from lmcache_core.settings.choose import choose, component_paths, stated_type
from lmcache_core.settings.concrete import Choices, concrete_model
from lmcache_core.settings.merge import merged
from lmcache_core.settings.model import Settings
from lmcache_core.settings.names import check_names, take_unknown, warnings_about
from lmcache_core.settings.refusals import settings_error
from lmcache_core.settings.schema import Schema, SettingField, read_text, schema_of
from lmcache_core.settings.sources import (
    Leaf,
    Origin,
    SettingPath,
    Source,
    dotted,
    read_secrets,
    read_sources,
    read_values,
)

__all__ = [
    "make_settings",
]

SECRETS_DIR: SettingPath = ("secrets_dir",)


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
    env_file: Path | None = None,
) -> Composed:
    """The settings of a server. `argv_options` are flags such as `--l1.size_bytes`, `8GiB`.

    Raises SettingsError for unknown, missing or wrong settings, and PluginError for a component that is not installed.
    """
    return compose_sources(registry, read_sources(config_path, env_file, argv_options, environ))


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


def known_sources(registry: Registry, sources: Sequence[Source]) -> tuple[list[Source], dict[SettingPath, Leaf]]:
    """The sources with the secrets directories that they name, and without what is not a setting, for warnings."""
    found = list(sources)
    directories = _secrets_directories(sources)
    if directories:
        secrets = read_secrets(directories, {*Settings.model_fields, *registry.tables})
        if SECRETS_DIR in secrets.leaves:
            where = secrets.leaves[SECRETS_DIR].where
            raise SettingsError(f"{where} has no effect there", cure="set secrets_dir in the settings file")
        found.insert(len([each for each in found if each.origin is not Origin.FILE]), secrets)
    return found, take_unknown(found, registry.tables)


def _secrets_directories(sources: Sequence[Source]) -> list[Path]:
    leaf = next((source.leaves[SECRETS_DIR] for source in sources if SECRETS_DIR in source.leaves), None)
    if leaf is None:
        return []
    try:
        named = read_text(tuple[str, ...], leaf.value) if isinstance(leaf.value, str) else leaf.value
        return [absolute_path(each) for each in named]
    except (TypeError, ValueError) as error:
        raise SettingsError(f"secrets_dir ({leaf.where}): {error}") from None


def compose_sources(registry: Registry, sources: Sequence[Source]) -> Composed:
    """`sources`: strongest first."""
    sources, unknown = known_sources(registry, sources)
    schema, model, choices = prepare(registry, sources)
    sources = _without_replaced(sources, choices)
    check_names(schema, sources)
    sources = [Source(source.origin, dict(_as_fields(schema, source))) for source in sources]
    origins = {dotted(path): _provenance(setting, sources) for path, setting in schema.items()}
    try:
        settings = merged(model, sources)
    except ValidationError as error:
        raise settings_error(error, schema, sources) from None
    return Composed(settings, origins, warnings_about(unknown, schema), schema)


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


def _as_fields(schema: Schema, source: Source) -> Iterator[tuple[SettingPath, Leaf]]:
    """The leaves under the names of fields: a component's bare name is its type. An empty text for a setting of which
    an empty one is unset is left out, so a weaker source or the default decides: a pod's variable that is filled from
    an absent key is empty, not absent. In YAML, a table whose lines are all comments is none."""
    for path, leaf in source.leaves.items():
        setting, value = schema.get(path), leaf.value
        if setting is not None and isinstance(value, str):
            if setting.unset_if_empty and not value.strip():
                continue
            if setting.component and value != "none" and not value.lstrip().startswith("{"):
                path = (*path, "type")
        tabled = setting is None or (setting.open and not setting.component and not setting.unset_if_empty)
        yield path, leaf._replace(value={}) if value is None and tabled else leaf


def _provenance(setting: SettingField, sources: Sequence[Source]) -> Provenance:
    path = setting.path
    for source in sources:
        for at, leaf in source.leaves.items():
            below = at in (path, (*path, "type")) if setting.component else at[: len(path)] == path
            if below:
                return Provenance(source.origin, leaf.where)
    return Provenance(Origin.DEFAULT)
