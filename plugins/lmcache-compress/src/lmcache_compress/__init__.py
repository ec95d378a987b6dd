"""Lossless compression for the objects on their way to a tier: zstd and lz4 with byte shuffling, and planes.

This module only names things; the libraries are loaded when a serde is built.
"""

from __future__ import annotations

from collections.abc import Sequence

from lmcache_core.plugins.components import ComponentSpec, Kind, PluginInfo
from lmcache_core.plugins.hookspecs import hookimpl


@hookimpl
def lmcache_plugin_info() -> PluginInfo:
    return PluginInfo(api=1, summary="lossless serdes: zstd and lz4 with byte shuffling, planes")


@hookimpl
def lmcache_components() -> Sequence[ComponentSpec]:
    return [
        ComponentSpec(
            Kind.SERDE,
            "zstd",
            factory="lmcache_compress.zstd_serde:ZstdSerde",
            settings="lmcache_compress.settings:ZstdSettings",
            summary="zstd with byte shuffling; lossless, smallest",
        ),
        ComponentSpec(
            Kind.SERDE,
            "lz4",
            factory="lmcache_compress.lz4_serde:Lz4Serde",
            settings="lmcache_compress.settings:Lz4Settings",
            summary="lz4 with byte shuffling; lossless",
        ),
        ComponentSpec(
            Kind.SERDE,
            "planes",
            factory="lmcache_compress.planes_serde:PlanesSerde",
            summary="exponents entropy coded, mantissas stored; lossless, quickest of the three",
        ),
    ]
