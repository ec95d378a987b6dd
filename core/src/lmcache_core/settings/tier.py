"""The settings of a single tier, composed like those of a whole server, for tiers that are added or changed later."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, SecretBytes, SecretStr

from lmcache_core.plugins.registry import Registry
from lmcache_core.settings.compose import compose_sources
from lmcache_core.settings.model import Component, TierSettings, check_tier_name
from lmcache_core.settings.sources import Leaf, Origin, Source, read_table, read_values

# A running tier can take over changes of these settings; any other change needs a new adapter, new lanes or a new codec
# chain.
FIGURES = frozenset({"capacity_bytes", "watermark", "evict_ratio", "deadline_s", "rescan_s", "store_cpu_share"})


def tier_settings(
    registry: Registry,
    name: str,
    values: Mapping[str, Any],
    texts: Mapping[str, str],
    before: TierSettings | None = None,
) -> TierSettings:
    """Settings from values (as in a file's table) and texts (as in flags, by dotted name), on top of those of `before`.

    Raises SettingsError for unknown, missing or wrong settings, and PluginError for a component that is not installed.
    """
    check_tier_name(name)
    flags = Source(Origin.FLAG)
    for setting, text in texts.items():
        flags.leaves["l2", name, *setting.split(".")] = Leaf(text, setting, text=True)
    given = read_values({"l2": {name: dict(values)}})
    sources = [flags, given]
    if before is not None:
        type_now = texts.get("type", values.get("type", before.type))
        old = read_values({"l2": {name: values_of(before, own=type_now == before.type)}})
        old.leaves.pop(("l2", name, "type"), None)
        old.leaves["l2", name, "type"] = Leaf(type_now, f"l2.{name}.type")
        sources.append(Source(Origin.FILE, old.leaves))
    settings: TierSettings = compose_sources(registry, sources).settings.l2[name]
    return settings


def tier_table(path: Path, name: str) -> Mapping[str, Any]:
    """The table [l2.NAME] of a settings file; empty if it has none."""
    tiers = read_table(path).get("l2")
    table = tiers.get(name) if isinstance(tiers, Mapping) else None
    return table if isinstance(table, Mapping) else {}


def values_of(settings: TierSettings, *, own: bool = True) -> dict[str, Any]:
    """The explicitly set values as one table. `own`: include the adapter's settings. Secrets are in clear text, so that
    they can be recognized and left out of error messages. Never show this."""
    values = {name: getattr(settings, name) for name in settings.model_fields_set if name != "settings"}
    if "eviction" in values:
        values["eviction"] = "none" if settings.eviction is None else _component(settings.eviction)
    if "serde" in values:
        values["serde"] = [_component(each) for each in settings.serde]
    return {**values, **(_set(settings.settings) if own else {})}


def same_but_for_figures(one: TierSettings, other: TierSettings) -> bool:
    """Whether a running tier can change from the one settings to the other."""
    return all(_plain(one, name) == _plain(other, name) for name in TierSettings.model_fields if name not in FIGURES)


def _plain(settings: TierSettings, name: str) -> Any:
    value = getattr(settings, name)  # each composition makes new models, so compare their contents
    if isinstance(value, BaseModel):
        return value.model_dump()
    return [each.model_dump() for each in value] if name == "serde" else value


def _component(component: Component) -> dict[str, Any]:
    return {"type": component.type, **_set(component.settings)}


def _set(model: BaseModel | None) -> dict[str, Any]:
    return {} if model is None else {name: _open(getattr(model, name)) for name in model.model_fields_set}


def _open(value: Any) -> Any:
    if isinstance(value, SecretStr | SecretBytes):
        return value.get_secret_value()
    if isinstance(value, BaseModel):
        return _set(value)
    if isinstance(value, Mapping):
        return {key: _open(each) for key, each in value.items()}
    return [_open(each) for each in value] if isinstance(value, list | tuple) else value
