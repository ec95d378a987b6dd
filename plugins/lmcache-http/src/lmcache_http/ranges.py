"""The protocol's ranges for routes: what a route takes, a message can carry."""

from __future__ import annotations

from typing import Any, get_args

from msgspec import Meta
from pydantic import Field


def within(kind: Any, **more: Any) -> Any:
    """Pydantic's constraint of a type of `lmcache_core.protocol.ranges`, so that the schema says it, too. `more`: other
    arguments of `Field`."""
    (meta,) = (each for each in get_args(kind) if isinstance(each, Meta))
    bounds: dict[str, Any] = {"ge": meta.ge, "gt": meta.gt, "le": meta.le, "lt": meta.lt}
    bounds |= {"min_length": meta.min_length, "max_length": meta.max_length}
    if meta.pattern is not None:  # a schema knows no \A and \Z
        bounds["pattern"] = meta.pattern.replace(r"\A", "^").replace(r"\Z", "$")
    return Field(**{name: value for name, value in bounds.items() if value is not None} | more)
