"""The command that the server runs: this package as a program, with its settings as argument."""

from __future__ import annotations

import msgspec

from lmcache_copier.options import CopierOptions
from lmcache_copier.settings import CopierSettings
from lmcache_core.server.helper import HelperContext, HelperProcess


def copier_helper(settings: CopierSettings, context: HelperContext) -> HelperProcess:
    """The process of these settings."""
    options = CopierOptions(settings.threads, settings.uids, settings.gids)
    return HelperProcess((context.python, "-m", "lmcache_copier", msgspec.json.encode(options).decode()))
