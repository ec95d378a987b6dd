"""What the package adds to lmcache-core: `lmcache-core check --engine vllm`. The server uses none of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lmcache_core import Finding, PluginInfo, hookimpl

if TYPE_CHECKING:
    from lmcache_core.settings.model import Settings


@hookimpl
def lmcache_plugin_info() -> PluginInfo:
    """The generation of hooks that this plugin was written for."""
    return PluginInfo(api=1, summary="a KV connector for vLLM, and check --engine vllm")


@hookimpl
def lmcache_check(settings: Settings) -> Sequence[Finding]:
    """Whether an engine of this environment can use the server that the settings name."""
    from lmcache_core_vllm.checking import findings

    return findings(settings)
