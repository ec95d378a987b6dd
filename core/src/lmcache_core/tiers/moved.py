"""Moved modules: a former name works for one more release, and warns with the new one."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any


def moved(former: str, now: str) -> Callable[[str], Any]:
    """The `__getattr__` of the module `former`, which now has the contents of the module `now`."""

    def attribute(name: str) -> Any:
        if name.startswith("__"):  # the import system asks modules for these
            raise AttributeError(f"module {former!r} has no attribute {name!r}")
        value = getattr(import_module(now), name)
        said = f"import {name} from {now}: {former} goes in 0.2"
        warnings.warn(said, DeprecationWarning, stacklevel=2)
        return value

    return attribute
