"""The command that the server runs: this package as a program, with its settings as argument. Tokens stay in their
files."""

from __future__ import annotations

from lmcache_core.server.helper import HelperContext, HelperProcess
from lmcache_http.settings import HttpSettings


def http_helper(settings: HttpSettings, context: HelperContext) -> HelperProcess:
    """The process of these settings."""
    return HelperProcess((context.python, "-m", "lmcache_http", settings.model_dump_json(exclude_defaults=True)))
