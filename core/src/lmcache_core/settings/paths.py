"""The types of settings that are paths, also for plugins' settings models."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator

from lmcache_core.paths import absolute_path, path_or_none

__all__ = [
    "AbsolutePath",
    "OptionalPath",
]


def _absolute(value: Any) -> Any:
    return str(absolute_path(value)) if isinstance(value, str | os.PathLike) else value  # a text: JSON has no paths


def _optional(value: Any) -> Any:
    if not isinstance(value, str | os.PathLike):
        return value
    path = None if str(value).strip().lower() == "none" else path_or_none(value)
    return None if path is None else str(path)


AbsolutePath = Annotated[Path, BeforeValidator(_absolute)]
"""A path that is set: `~` is expanded, and a relative or empty one is refused."""

OptionalPath = Annotated[Path | None, BeforeValidator(_optional)]
"""A path that may be unset; an empty text means the same as None, and so does `none`."""
