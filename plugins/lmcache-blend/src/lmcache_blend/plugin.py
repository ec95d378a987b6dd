"""What this package adds to lmcache-core: the operation `blend`. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence

from lmcache_core import ComponentSpec, Kind, PluginInfo, hookimpl


@hookimpl
def lmcache_plugin_info() -> PluginInfo:
    """The hook API that this was written for."""
    return PluginInfo(api=1, summary="finds chunks of prompts by their content, and plans prompts")


@hookimpl
def lmcache_components() -> Sequence[ComponentSpec]:
    """The operation, which every server has that has this package."""
    return [
        ComponentSpec(
            Kind.OPERATION,
            "blend",
            "lmcache_blend.operation:BlendOperation",
            summary="finds the prefix and the chunks of a prompt, and plans the order of its documents",
            always=True,
        )
    ]
