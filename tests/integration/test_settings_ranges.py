"""Every time and size of the settings has its range in its type: nothing that a server could not keep or send."""

from __future__ import annotations

import importlib.util
import inspect
import math
import pkgutil
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from typing import Annotated, Any

import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from lmcache_core.limits import SECONDS_MAX, SIZE_BYTES_MAX


def models() -> Iterator[type[BaseModel]]:
    """The settings models of all packages of ours that are installed."""
    for name in sorted(packages_distributions()):
        if not name.startswith("lmcache_") or (package := importlib.util.find_spec(name)) is None:
            continue
        for found in pkgutil.walk_packages(package.submodule_search_locations, f"{name}."):
            if found.name.rpartition(".")[2] in ("settings", "model", "server_settings", "tier"):
                module = importlib.import_module(found.name)
                yield from {
                    each
                    for each in vars(module).values()
                    if inspect.isclass(each) and issubclass(each, BaseModel) and each.__module__ == found.name
                }


FIELDS = [
    pytest.param(info, id=f"{model.__module__.split('.')[0]}-{model.__name__}-{name}")
    for model in models()
    for name, info in model.model_fields.items()
    if name.endswith(("_s", "_bytes")) and ("int" in str(info.annotation) or "float" in str(info.annotation))
]


def accepts(info: FieldInfo, value: Any) -> bool:
    kind: Any = Annotated[(info.annotation, *info.metadata)] if info.metadata else info.annotation
    try:
        TypeAdapter(kind).validate_python(value)
    except ValidationError:
        return False
    return True


def test_there_are_such_settings_of_many_packages() -> None:
    assert len({str(each.id).split("-")[0] for each in FIELDS}) > 8


@pytest.mark.parametrize("info", FIELDS)
def test_no_time_or_size_is_accepted_that_no_server_can_keep(info: FieldInfo) -> None:
    for value in (math.inf, math.nan, -1, 10 * SECONDS_MAX if "float" in str(info.annotation) else SIZE_BYTES_MAX + 1):
        assert not accepts(info, value)
