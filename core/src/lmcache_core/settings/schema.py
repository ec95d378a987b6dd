"""A flat view of a concrete model: every setting with its path. It is used to check names, parse texts and write
help."""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, SecretBytes, SecretStr

from lmcache_core.settings.concrete import Concrete
from lmcache_core.settings.model import Component, Settings, TierSettings
from lmcache_core.settings.sources import SettingPath

_INNER = (Component, TierSettings)  # their `settings` stand in the same table as their own fields


@dataclass(frozen=True)
class SettingField:
    """One setting. `default` is None if `required`; `example`: the model's example for a new settings file."""

    path: SettingPath
    annotation: Any
    default: Any
    required: bool
    description: str
    example: Any = None

    @property
    def secret(self) -> bool:
        """Whether its value is hidden."""
        return any(_is_class(each, (SecretStr, SecretBytes)) for each in parts(self.annotation))

    @property
    def unset_if_empty(self) -> bool:
        """Whether an empty text means that it is not set: paths, and whatever may be none."""
        alternatives = _alternatives(self.annotation)
        return types.NoneType in alternatives or any(_is_class(each, Path) for each in alternatives)

    @property
    def type_text(self) -> str:
        """A short name of its type, for people."""
        text = annotation_text(self.annotation)
        return text.replace("int", "size") if self.path[-1].endswith(("_bytes", "_bytes_max")) else text

    @property
    def component(self) -> bool:
        """Whether it names one policy."""
        return any(_is_class(each, Component) for each in _alternatives(self.annotation))

    @property
    def open(self) -> bool:
        """Whether names below its path are values rather than settings, as in a mapping."""
        return is_open(self.annotation)


Schema = dict[SettingPath, SettingField]


def schema_of(concrete: Concrete) -> Schema:
    """Every setting of a configuration, in the order of the models."""
    found = _walk(concrete.model, ())
    tiers = [one for name, model in concrete.tiers.items() for one in _walk(model, ("l2", name))]
    rows = [
        one
        for table, models in concrete.rows.items()
        for name, model in models.items()
        for one in _walk(model, (table, name))
    ]
    return {one.path: one for one in (*found, *tiers, *rows)}


def fields_of(model: type[BaseModel], at: SettingPath = ()) -> list[SettingField]:
    """The settings of one model, for a plugin's own settings."""
    return list(_walk(model, at))


def _walk(model: type[BaseModel], at: SettingPath) -> Iterator[SettingField]:
    inner = "settings" if issubclass(model, _INNER) else None
    for name, info in model.model_fields.items():
        annotation, path = info.annotation, (*at, name)
        if name == inner:
            if _is_class(annotation, BaseModel):
                yield from _walk(typing.cast(type[BaseModel], annotation), at)
            continue
        if issubclass(model, Component) and name == "type":
            continue
        if issubclass(model, Settings) and name in ("l2", "subscribers", "operations"):
            continue  # their tables are walked one by one
        below = _section(annotation)
        default = None if info.is_required() else info.get_default(call_default_factory=True, validated_data={})
        if below is None or issubclass(below, Component):
            if below is not None and issubclass(below, Component):
                default = default.type if isinstance(default, Component) else below.model_fields["type"].default
            example = info.examples[0] if info.examples else None
            yield SettingField(path, annotation, default, info.is_required(), info.description or "", example)
        if below is not None:
            yield from _walk(below, path)


def _section(annotation: Any) -> type[BaseModel] | None:
    models = [each for each in _alternatives(annotation) if each is not types.NoneType]
    return models[0] if len(models) == 1 and _is_class(models[0], BaseModel) else None


def _is_class(annotation: Any, kinds: Any) -> bool:
    return isinstance(annotation, type) and not get_args(annotation) and issubclass(annotation, kinds)


def _alternatives(annotation: Any) -> list[Any]:
    origin = get_origin(annotation)
    if origin is typing.Annotated:
        return _alternatives(get_args(annotation)[0])
    if origin in (typing.Union, types.UnionType):
        return [inner for each in get_args(annotation) for inner in _alternatives(each)]
    return [annotation]


def is_open(annotation: Any) -> bool:
    """Whether a value may be a table: a mapping, a model, or anything."""
    kinds = (Mapping, BaseModel)
    return any(each is Any or _is_class(get_origin(each) or each, kinds) for each in _alternatives(annotation))


def parts(annotation: Any) -> Iterator[Any]:
    """Every type that an annotation mentions."""
    yield annotation
    for each in get_args(annotation):
        if get_origin(annotation) is not Literal:
            yield from parts(each)


def annotation_text(annotation: Any) -> str:
    """A short name of a type: `int`, `text`, `shm|memfd|hugetlb`, `list of text`, …"""
    named = {str: "text", int: "int", float: "number", bool: "true|false", Path: "path", types.NoneType: "none"}
    texts = []
    for each in _alternatives(annotation):
        origin, arguments = get_origin(each), get_args(each)
        if origin is Literal:
            texts += [str(value) for value in arguments]
        elif _is_class(each, (SecretStr, SecretBytes)):
            texts.append("secret")
        elif _is_class(each, Component):
            texts.append("name or table")
        elif _is_class(each, Enum):
            texts += [str(member.value) for member in each]
        elif _is_class(origin or each, Mapping):
            texts.append("table")
        elif _is_class(origin, Collection):
            texts.append(f"list of {annotation_text(arguments[0])}" if arguments else "list")
        else:
            texts.append(named.get(each, getattr(each, "__name__", str(each))))
    return "|".join(dict.fromkeys(texts))


def read_text(annotation: Any, text: str) -> Any:
    """Parse a text from a flag, variable or secret if pydantic would not: lists, tables, none. Raises ValueError."""
    alternatives = _alternatives(annotation)
    takes_text = any(_is_class(each, (str, bytes, SecretStr, SecretBytes)) for each in alternatives)
    if not takes_text and text.strip().lower() in ("none", "null") and types.NoneType in alternatives:
        return None
    listed = (
        any(_is_class(get_origin(each) or each, (Sequence, AbstractSet)) for each in alternatives) and not takes_text
    )
    if (listed and text.lstrip().startswith("[")) or (is_open(annotation) and text.lstrip().startswith("{")):
        return read_json(text)
    return [part.strip() for part in text.split(",") if part.strip()] if listed else text


def read_json(text: str) -> Any:
    """Raises ValueError that says where the text is no longer JSON."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        where = f"{error.msg} at character {error.pos}"
    except RecursionError:
        where = "it is nested too deeply"
    raise ValueError(f"it looks like JSON and cannot be parsed: {where}")
