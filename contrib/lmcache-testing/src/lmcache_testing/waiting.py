"""How a test waits for what it claims: the limit is a safety net, never a measurement."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

WAIT_S = 60.0
"""What a test waits for normally takes milliseconds to seconds. It may take longer on a busy machine."""

_LOOK_S = 0.002
_V = TypeVar("_V")


def until(condition: Callable[[], _V], what: str | Callable[[], object] = "", wait_s: float = WAIT_S) -> _V:
    """Poll until the condition holds. Returns its value; raises `AssertionError` with `what` after `wait_s`."""
    deadline = time.monotonic() + wait_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited in vain for {what() if callable(what) else what or condition}"
        time.sleep(_LOOK_S)
    return value
