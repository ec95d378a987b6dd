"""The C part, which nothing here works without; a server whose build has left it out starts all the same."""

from __future__ import annotations

from types import ModuleType

from lmcache_core.errors import UsageError

try:
    from lmcache_blend import _native as _found
except ImportError as error:  # built where there was no compiler
    _built: ModuleType | None = None
    _why = str(error)
else:
    _built, _why = _found, ""


def native() -> ModuleType:
    """`lmcache_blend._native`. Raises `UsageError` if it is not there."""
    if _built is None:
        raise UsageError(
            f"lmcache-blend has no C part here ({_why}): install its wheel, or build it with "
            "LMCACHE_CORE_BLEND_NATIVE=require, which says what is missing"
        )
    return _built
