"""Other nodes' pools as a tier of lmcache-core, and the helper that serves this node's. This module only names
things."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lmcache_core.plugins.components import ComponentSpec, Finding, Kind
from lmcache_core.plugins.hookspecs import hookimpl

if TYPE_CHECKING:
    from lmcache_core.settings.model import Settings


@hookimpl
def lmcache_components() -> Sequence[ComponentSpec]:
    return [
        ComponentSpec(
            Kind.L2_ADAPTER,
            "peer",
            factory="lmcache_peer.adapter:PeerAdapter",
            settings="lmcache_peer.settings:PeerTierSettings",
            summary="loads from the memory of other nodes; never stores",
        ),
        ComponentSpec(
            Kind.HELPER,
            "peer",
            factory="lmcache_peer.helper:peer_helper",
            settings="lmcache_peer.settings:ServingSettings",
            summary="serves this node's memory to the other nodes",
        ),
        ComponentSpec(
            Kind.OPERATION,
            "peer",
            factory="lmcache_peer.operation:PeerOperation",
            summary="what the helper of peers must know of namespaces, and its figures",
            always=True,
        ),
    ]


@hookimpl
def lmcache_check(settings: Settings) -> Sequence[Finding]:
    from lmcache_peer.check import check

    serving = settings.plugin_helpers().get("peer")
    return [] if serving is None else check(serving, settings.name)
