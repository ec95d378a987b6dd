"""The command that the server runs: this package as a program, with its settings as argument. Secrets stay in their
files."""

from __future__ import annotations

from lmcache_core.server.helper import HelperContext, HelperProcess
from lmcache_peer.settings import ServingSettings


def peer_helper(settings: ServingSettings, context: HelperContext) -> HelperProcess:
    """The process of these settings."""
    return HelperProcess((context.python, "-m", "lmcache_peer", settings.model_dump_json(exclude_defaults=True)))
