"""The C extension, if it is built: `native` is the module or None, and `why_not` says why it is missing.

Everything that it does has a way without it, with the same results. LMCACHE_CORE_NATIVE decides, at run time as at
build time: `auto` (the default) takes it where it was built, `off` does without, `require` refuses to start without.
"""

from __future__ import annotations

import os

from lmcache_core.errors import UsageError

__all__ = ["BUILD_VARIABLES", "COST_WITHOUT", "MODE_VARIABLE", "cure", "mode", "native", "why_not"]

MODE_VARIABLE = "LMCACHE_CORE_NATIVE"
BUILD_VARIABLES = (f"{MODE_VARIABLE}_SANITIZE", f"{MODE_VARIABLE}_DEFINES")  # read by setup.py alone
COST_WITHOUT = "workers ask the server for each hit, restarts are cold, hashing and copies are slower"
_MODES = ("auto", "require", "off")

why_not = ""
mode = os.environ.get(MODE_VARIABLE, "auto")
if mode not in _MODES:
    raise UsageError(f"{MODE_VARIABLE} is {mode!r}: use {', '.join(_MODES)}")
try:
    if mode == "off":
        raise ImportError(f"{MODE_VARIABLE} is off")
    from lmcache_core import _native as native
except ImportError as error:
    if mode == "require":
        raise UsageError(
            f"{MODE_VARIABLE} is require, and the C extension is not there ({error}): install lmcache-core where "
            f"there is a C compiler, or set {MODE_VARIABLE} to auto"
        ) from error
    native = None  # type: ignore[assignment]
    why_not = f"the C extension is not in use: {error}"


def cure() -> str:
    """How to have it, where `why_not` says something."""
    if mode == "off":
        return f"unset {MODE_VARIABLE}"
    return f"install lmcache-core again where gcc and Python.h are, with {MODE_VARIABLE}=require"
