"""Sizes in bytes, as people write them: 8GiB, 512 MiB, 1.5TB, or a plain number."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from lmcache_core.errors import SettingsError
from lmcache_core.limits import SIZE_BYTES_MAX

__all__ = [
    "Size",
]

_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{letter}iB".upper(): 1024**power for power, letter in enumerate("KMGT", start=1)}
_UNITS |= {f"{letter}B": 1000**power for power, letter in enumerate("KMGT", start=1)}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)")


def parse_size(value: Any) -> Any:
    """Bytes for a text like `8GiB` (1024³) or `8GB` (1000³); a value that is not a text is returned as it is."""
    if not isinstance(value, str):
        return value
    match = _SIZE.fullmatch(value.strip())
    if match is None or match[2].upper() not in _UNITS:
        cure = "write a number of bytes, or one with KiB, MiB, GiB or TiB"
        raise SettingsError(f"{value!r} is not a size", cure=cure)
    number, unit = match[1], _UNITS[match[2].upper()]
    return int(number) * unit if "." not in number else int(float(number) * unit)


Size = Annotated[int, BeforeValidator(parse_size), Field(ge=0, le=SIZE_BYTES_MAX)]
"""A setting in bytes, also for plugins' settings models."""


def size_text(nbytes: int) -> str:
    """The shortest exact way to write a size: `8GiB`, `1000`."""
    for power, letter in reversed(list(enumerate("KMGT", start=1))):
        if nbytes and nbytes % 1024**power == 0:
            return f"{nbytes // 1024**power}{letter}iB"
    return str(nbytes)
