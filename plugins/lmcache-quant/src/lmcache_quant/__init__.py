"""KV in eight and four bits a value, on its way to a tier: keys by channel, values by token.

This module only names things; the kernels are loaded when a serde is built.
"""

from __future__ import annotations

from collections.abc import Sequence

from lmcache_core.plugins.components import ComponentSpec, Kind, PluginInfo
from lmcache_core.plugins.hookspecs import hookimpl

SUMMARIES = {
    "int8": "keys and values in 8 bits; lossy, 0.52 of the bytes of bf16",
    "k8v4": "keys in 8 bits, values in 4; lossy, 0.40 of the bytes of bf16",
    "int4": "keys and values in 4 bits; lossy, 0.28 of the bytes of bf16",
}


@hookimpl
def lmcache_plugin_info() -> PluginInfo:
    return PluginInfo(api=1, summary="int8 and int4 with a step for each channel of keys and each token of values")


@hookimpl
def lmcache_components() -> Sequence[ComponentSpec]:
    return [
        ComponentSpec(
            Kind.SERDE,
            name,
            factory=f"lmcache_quant.serdes:{name.capitalize()}Serde",
            settings="lmcache_quant.settings:QuantSettings",
            summary=summary,
        )
        for name, summary in SUMMARIES.items()
    ]
