"""How the commands come to a table, and how they say that they did not."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

from lmcache_core.errors import CacheError
from lmcache_l0.cache import SharedCache


def says_what_failed(command: Callable[[Any], int]) -> Callable[[Any], int]:
    """A command whose refusals are one line and exit code 1."""

    @wraps(command)
    def run(options: Any) -> int:
        try:
            return command(options)
        except (CacheError, OSError) as error:
            print(f"lmcache-core l0: {error}", file=sys.stderr)
            return 1

    return run


def attach(path: str, *, read_only: bool = True) -> SharedCache:
    """A table that is there."""
    return SharedCache(path, create=False, read_only=read_only)


def warn_if_off(cache: SharedCache) -> None:
    """Say why nothing is found, or stored."""
    if not cache.enabled:
        print(
            f"warning: {cache.path} is switched off, so reads miss and writes store nothing: "
            f"lmcache-core l0 set {cache.path} enabled",
            file=sys.stderr,
        )
