"""Settings as shown to people and machines: secrets hidden, sizes short, components by name."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, SecretBytes, SecretStr

from lmcache_core.settings.compose import Composed, Provenance
from lmcache_core.settings.model import Component, Settings, TierSettings
from lmcache_core.settings.schema import SettingField
from lmcache_core.settings.sizes import size_text
from lmcache_core.settings.sources import Origin, SettingPath, dotted

HIDDEN = "**********"


class Row(NamedTuple):
    """One setting. `value` is plain data for JSON; `text` is for people."""

    name: str
    value: Any
    text: str
    provenance: Provenance


def rows(composed: Composed) -> list[Row]:
    """Every setting with its value and origin, in the order of the model."""
    found = []
    for path, setting in composed.schema.items():
        value = plain(value_at(composed.settings, path))
        if setting.component and isinstance(value, Mapping):
            value = value["type"]  # its settings have rows of their own
        name = dotted(path)
        if composed.origins[name].origin is Origin.SECRET:
            value = HIDDEN  # whatever its type: who mounts it as a secret wants it to be one
        found.append(Row(name, value, text_of(name, value), composed.origins[name]))
    return found


def value_at(settings: Settings, path: SettingPath) -> Any:
    """The value of one setting."""
    value: Any = settings
    for part in path:
        if isinstance(value, Mapping):
            value = value[part]
        elif isinstance(value, Component | TierSettings) and part not in type(value).model_fields:
            value = getattr(value.settings, part)
        else:
            value = getattr(value, part)
    return value


def plain(value: Any) -> Any:
    """The value as plain data for JSON. Secrets are hidden."""
    if isinstance(value, SecretStr | SecretBytes):
        return HIDDEN
    if isinstance(value, Component):
        own = plain(value.settings) or {}
        return {"type": value.type, **own}
    if isinstance(value, BaseModel):
        return {name: plain(getattr(value, name)) for name in type(value).model_fields}
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, Enum):
        return plain(value.value)
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(each) for each in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def text_of(name: str, value: Any) -> str:
    """A value on one line."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and name.endswith(("_bytes", "_bytes_max")):
        return size_text(value)
    if isinstance(value, list):
        return ", ".join(text_of(name, each) for each in value) or "[]"
    if isinstance(value, dict):
        own = ", ".join(f"{key}={text_of(key, each)}" for key, each in value.items() if key != "type")
        return f"{value['type']}({own})" if own and "type" in value else value.get("type", own or "{}")
    return str(value)


def default_text(setting: SettingField) -> str:
    """A setting's default on one line. A home directory is shown as `~`, so that help is the same for everyone."""
    if setting.secret and setting.default:
        return HIDDEN  # pydantic does not wrap a default: it may be plain text
    value = plain(setting.default)
    if isinstance(setting.default, Path):
        value = str(setting.default).replace(str(Path("~").expanduser()), "~", 1)
    return text_of(setting.path[-1], value)
