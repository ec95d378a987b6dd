"""The block tier of lmcache-core. This module only names things: the adapter is imported when a tier uses it."""

from __future__ import annotations

from collections.abc import Sequence

from lmcache_core.plugins.components import ComponentSpec, Kind
from lmcache_core.plugins.hookspecs import hookimpl


@hookimpl
def lmcache_components() -> Sequence[ComponentSpec]:
    return [
        ComponentSpec(
            Kind.L2_ADAPTER,
            "block",
            factory="lmcache_block.adapter:BlockAdapter",
            settings="lmcache_block.settings:BlockSettings",
            summary="slabs in one preallocated file or on a raw block device, past the page cache",
        )
    ]
