"""The second pass over the sources, by pydantic-settings: it nests the leaves, has texts read as their types, merges
the sources, and validates the whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args, get_origin

from pydantic import BeforeValidator, Field, create_model
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, EnvSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict
from typing_extensions import is_typeddict

from lmcache_core.errors import SettingsError
from lmcache_core.settings.concrete import kept
from lmcache_core.settings.model import Component, Settings, TierSettings
from lmcache_core.settings.schema import read_text
from lmcache_core.settings.sources import Source, dotted

ROOT = "settings"  # the one field of the model that pydantic-settings fills
_SOURCES = "sources"
_BETWEEN = "\0"  # no name contains it


def merged(model: type[Settings], sources: Sequence[Source]) -> Settings:
    """The settings from `sources`, strongest first. Raises SettingsError and pydantic's ValidationError."""
    try:
        settings: Settings = _root_of(model)(**{_SOURCES: sources}).settings
    except _UnreadableError as error:
        raise SettingsError(str(error)) from None
    return settings


@kept
def _root_of(model: type[Settings]) -> Any:
    fields: dict[str, Any] = {ROOT: (model, Field(default={}))}
    return create_model("Settings", __base__=_Merged, **fields)


class _Merged(BaseSettings):
    """Filled from the sources that it is called with, and from nothing else."""

    model_config = SettingsConfigDict(
        env_nested_delimiter=_BETWEEN, case_sensitive=True, extra="forbid", hide_input_in_errors=True
    )

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], init_settings: Any, *_: PydanticBaseSettingsSource, **__: Any
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return tuple(_Leaves(settings_cls, source) for source in init_settings.init_kwargs[_SOURCES])


class _UnreadableError(Exception):
    """Not a ValueError, which pydantic-settings would replace by one that names neither setting nor place."""


class _Text(str):
    """A text with the setting that it is for, and its place. An empty one is a value, too."""

    name: str

    def __bool__(self) -> bool:
        return True


class _Leaves(EnvSettingsSource):
    """Leaves as if they were variables: pydantic-settings finds the field of each, and nests them."""

    def __init__(self, settings_cls: type[BaseSettings], source: Source) -> None:
        super().__init__(settings_cls)
        variables: dict[str, Any] = {}
        for path in sorted(source.leaves, key=len):  # a table as JSON before what stands in it
            leaf = source.leaves[path]
            value = leaf.value
            if leaf.text:
                value = _Text(value)
                value.name = f"{dotted(path)} ({leaf.where})"
            variables[_BETWEEN.join((ROOT, *path))] = value
        self.env_vars = variables

    def next_field(self, field: FieldInfo | Any | None, key: str, case_sensitive: bool | None = None) -> Any:
        """Also in tables whose names users choose, and among a component's own settings, which stand beside ours."""
        annotation = field.annotation if isinstance(field, FieldInfo) else field
        if is_typeddict(annotation):
            found = annotation.__annotations__.get(key)
        elif isinstance(origin := get_origin(annotation), type) and issubclass(origin, Mapping):
            found = get_args(annotation)[1]
        else:
            found = super().next_field(field, key, case_sensitive)
        if found is None and isinstance(annotation, type) and issubclass(annotation, Component | TierSettings):
            return self.next_field(annotation.model_fields["settings"], key, case_sensitive)
        return found if found is None or isinstance(found, FieldInfo) else FieldInfo.from_annotation(found)

    def field_is_complex(self, field: FieldInfo) -> bool:
        """Each text is read as its field's type by `decode_complex_value`."""
        return True

    def decode_complex_value(self, field_name: str, field: FieldInfo, value: Any) -> Any:
        """By our rules: lists with commas, `none`, and JSON only where it is asked for."""
        if not isinstance(value, _Text):
            return value
        reads_itself = any(isinstance(each, BeforeValidator) for each in field.metadata)
        if reads_itself and not value.lstrip().startswith("["):  # a command line, for example, has its own words
            return str(value)
        try:
            return read_text(field.annotation, str(value))
        except ValueError as error:
            raise _UnreadableError(f"{value.name}: {error}") from None
