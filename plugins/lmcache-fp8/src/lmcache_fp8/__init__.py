"""Float8 e4m3 for the objects on their way to a tier: half the bytes of bf16, at a bounded error.

This module only names things; the kernel and torch are loaded when the serde is built.
"""

from __future__ import annotations

from collections.abc import Sequence

from lmcache_core.plugins.components import ComponentSpec, Kind, PluginInfo
from lmcache_core.plugins.hookspecs import hookimpl

SUMMARY = "float8 e4m3 with absmax scales for each (token group × head); lossy, half the bytes of bf16"


@hookimpl
def lmcache_plugin_info() -> PluginInfo:
    return PluginInfo(api=1, summary=SUMMARY)


@hookimpl
def lmcache_components() -> Sequence[ComponentSpec]:
    return [
        ComponentSpec(
            Kind.SERDE,
            "fp8",
            factory="lmcache_fp8.serde:Fp8Serde",
            settings="lmcache_fp8.settings:Fp8Settings",
            summary=SUMMARY,
        )
    ]
