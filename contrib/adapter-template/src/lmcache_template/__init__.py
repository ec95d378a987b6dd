"""A tier on SQLite. This module only names things: it is imported by every `lmcache-core` command."""

from __future__ import annotations

from collections.abc import Sequence

from lmcache_core import ComponentSpec, Kind, hookimpl


@hookimpl
def lmcache_components() -> Sequence[ComponentSpec]:
    return [
        ComponentSpec(
            Kind.L2_ADAPTER,
            "sqlite",
            factory="lmcache_template.adapter:SqliteAdapter",
            settings="lmcache_template.settings:SqliteSettings",
            summary="objects as rows of one SQLite file",
        )
    ]
