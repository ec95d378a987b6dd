"""pydantic's errors, reworded to name the setting, its origin and the cure, and never a secret."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import ValidationError

from lmcache_core.errors import SettingsError
from lmcache_core.settings.names import near
from lmcache_core.settings.schema import Schema
from lmcache_core.settings.sources import Origin, SettingPath, Source, dotted, spelled

_HIDDEN = "**********"


def settings_error(error: ValidationError, schema: Schema, sources: Sequence[Source]) -> SettingsError:
    """One SettingsError for everything that pydantic found."""
    problems = []
    details = error.errors(include_url=False, include_context=False, include_input=False)
    for detail in details:
        path = _as_written(detail["loc"])
        if detail["type"] == "missing" and len(details) == 1:
            return SettingsError(f"{dotted(path)} is missing", cure=_how_to_set(path))
        problems.append(_sentence(detail["type"], detail["msg"], path, schema, sources))
    text = "; ".join(dict.fromkeys(problems))
    for secret in sorted(_secrets(schema, sources), key=len, reverse=True):
        text = text.replace(secret, _HIDDEN)
    if len(details) == 1 and details[0]["type"] == "value_error" and ": " in details[0]["msg"]:
        said, _, cure = text.rpartition(": ")  # a validator's message, ours or a plugin's, ends with what to do
        return SettingsError(said, cure=cure)
    return SettingsError(text)


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
    said = _in_our_words(message)
    return f"{name} ({where}): {said}" if where and where != name else f"{name}: {said}"


def _how_to_set(path: SettingPath) -> str:
    return f"set it in the file, by {spelled(path, Origin.FLAG)} or by {spelled(path, Origin.ENVIRONMENT)}"


def _in_our_words(message: str) -> str:
    """pydantic's message without the parts that describe its own work."""
    said = message.removeprefix("Value error, ").partition(", unable to ")[0]
    return "must" + said.removeprefix("Input should") if said.startswith("Input should ") else said


def _as_written(location: Sequence[int | str]) -> SettingPath:
    """pydantic's location without the attributes that hold a component's own settings."""
    path = [str(part) for part in location]
    if path[:1] == ["l2"] and path[2:3] == ["settings"]:
        del path[2]
    for at in _component_ends(path):
        if path[at : at + 1] == ["settings"]:
            del path[at]
    return tuple(path)


def _component_ends(path: Sequence[str]) -> Iterable[int]:
    if path[:2] == ["l1", "eviction"]:
        return (2,)
    if path[:1] in (["store_policy"], ["prefetch_policy"]):
        return (1,)
    if path[:1] == ["l2"] and path[2:3] == ["eviction"]:
        return (3,)
    return (4,) if path[:1] == ["l2"] and path[2:3] == ["serde"] else ()


def _secrets(schema: Schema, sources: Sequence[Source]) -> set[str]:
    found: set[str] = set()
    for source in sources:
        for path, leaf in source.leaves.items():
            setting = schema.get(path)
            if setting is not None and setting.secret:
                found |= set(_texts(leaf.value))
    return found


def _texts(value: Any) -> Iterable[str]:
    if isinstance(value, (list, tuple)):
        return [text for each in value for text in _texts(each)]
    return [value] if isinstance(value, str) and value else []
