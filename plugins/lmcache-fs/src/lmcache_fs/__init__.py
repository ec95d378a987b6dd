"""The disk tier of lmcache-core. This module only names things: the adapter is imported when a tier uses it."""

from __future__ import annotations

from collections.abc import Sequence

from lmcache_core.plugins.components import ComponentSpec, Kind
from lmcache_core.plugins.hookspecs import hookimpl


@hookimpl
def lmcache_components() -> Sequence[ComponentSpec]:
    return [
        ComponentSpec(
            Kind.L2_ADAPTER,
            "fs",
            factory="lmcache_fs.adapter:FsAdapter",
            settings="lmcache_fs.settings:FsSettings",
            summary="one file for each object, in a directory that several servers may share",
        )
    ]
