"""Encryption for the objects on their way to a tier: AES-256-GCM, bound to each object's key and layout.

This module only names things; the library is loaded when the serde is built.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lmcache_core.plugins.components import ComponentSpec, Finding, Kind, PluginInfo
from lmcache_core.plugins.hookspecs import hookimpl

if TYPE_CHECKING:
    from lmcache_core.settings.model import Settings

SUMMARY = "AES-256-GCM; an object cannot be read without its key, nor replaced by another"


@hookimpl
def lmcache_plugin_info() -> PluginInfo:
    return PluginInfo(api=1, summary=SUMMARY)


@hookimpl
def lmcache_components() -> Sequence[ComponentSpec]:
    return [
        ComponentSpec(
            Kind.SERDE,
            "aesgcm",
            factory="lmcache_crypto.serde:AesGcmSerde",
            settings="lmcache_crypto.settings:AesGcmSettings",
            summary=SUMMARY,
        )
    ]


@hookimpl
def lmcache_check(settings: Settings) -> Sequence[Finding]:
    from lmcache_crypto.check import check_keys

    return check_keys(settings)
