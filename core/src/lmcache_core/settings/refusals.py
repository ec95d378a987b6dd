"""pydantic's errors, reworded to name the setting, its origin and the cure, and never a secret."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import ValidationError

from lmcache_core.errors import SettingsError
from lmcache_core.settings.merge import ROOT
from lmcache_core.settings.names import near
from lmcache_core.settings.schema import Schema
from lmcache_core.settings.sources import Origin, SettingPath, Source, dotted, spelled

_HIDDEN = "**********"
_SECRET_CHARS_MIN = 4  # a shorter one stands in other words, too: hiding it there would spoil the message


def settings_error(error: ValidationError, schema: Schema, sources: Sequence[Source]) -> SettingsError:
    """One SettingsError for everything that pydantic found."""
    problems = []
    details = error.errors(include_url=False, include_input=False)
    for detail in details:
        path = _as_written(detail["loc"], schema)
        if detail["type"] == "missing" and len(details) == 1:
            return SettingsError(f"{dotted(path)} is missing", cure=_how_to_set(path))
        problems.append(_sentence(detail["type"], detail["msg"], path, schema, sources))
    # A validator's own error, ours or a plugin's, may say what to do.
    cure = getattr(details[0].get("ctx", {}).get("error"), "cure", "") if len(details) == 1 else ""
    text = "; ".join(dict.fromkeys(problems)).removesuffix(f": {cure}")
    for secret in sorted(_secrets(schema, sources), key=len, reverse=True):
        text, cure = text.replace(secret, _HIDDEN), cure.replace(secret, _HIDDEN)
    return SettingsError(text, cure=cure)


def _sentence(kind: str, message: str, path: SettingPath, schema: Schema, sources: Sequence[Source]) -> str:
    known = next((path[:length] for length in range(len(path), 0, -1) if path[:length] in schema), path)
    # pydantic appends either an index, which is worth showing, or the branch of a union, which is not.
    name = dotted(known if path[len(known) :] and not path[len(known)].isdigit() else path)
    if kind == "missing":
        return f"{dotted(path)} is missing: {_how_to_set(path)}"
    if kind == "extra_forbidden":
        return f"{dotted(path)} is not a setting{near(path, schema, Origin.DEFAULT)}"
    where = next(
        (leaf.where for source in sources for at, leaf in source.leaves.items() if at[: len(known)] == known), ""
    )
    text = _plain(message)
    return f"{name} ({where}): {text}" if where and where != name else f"{name}: {text}"


def _how_to_set(path: SettingPath) -> str:
    return f"set it in the file, by {spelled(path, Origin.FLAG)} or by {spelled(path, Origin.ENVIRONMENT)}"


def _plain(message: str) -> str:
    """pydantic's message without the parts that describe its own work."""
    text = message.removeprefix("Value error, ").partition(", unable to ")[0]
    return "must" + text.removeprefix("Input should") if text.startswith("Input should ") else text


def _as_written(location: Sequence[int | str], schema: Schema) -> SettingPath:
    """pydantic's location without the attributes that hold a component's own settings."""
    path: SettingPath = ()
    for part in map(str, location[1:]):  # the first is the root
        if part != ROOT or not _gathers(path, schema):
            path = (*path, part)
    return path


def _gathers(path: SettingPath, schema: Schema) -> bool:
    """Whether the table at `path` has a component's own settings beside ours."""
    tier = path[:1] == ("l2",)
    return (path in schema and schema[path].component) or (tier and (len(path) == 2 or path[2:3] == ("serde",)))


def _secrets(schema: Schema, sources: Sequence[Source]) -> set[str]:
    found: set[str] = set()
    for source in sources:
        for path, leaf in source.leaves.items():
            setting = schema.get(path)
            if setting is not None and setting.secret:
                found |= set(_texts(leaf.value))
            elif source.origin is Origin.SECRET and len(leaf.value) >= _SECRET_CHARS_MIN:
                found.add(leaf.value)
    return found


def _texts(value: Any) -> Iterable[str]:
    if isinstance(value, (list, tuple)):
        return [text for each in value for text in _texts(each)]
    return [value] if isinstance(value, str) and value else []
