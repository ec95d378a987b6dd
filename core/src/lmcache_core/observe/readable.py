"""Figures formatted for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def size(nbytes: float) -> str:
    """Rounded, in the unit that makes it short."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def duration(seconds: float) -> str:
    """Rounded, in days, hours, minutes or seconds."""
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def hits_of_keys(figures: Mapping[str, Any]) -> str:
    """For the lookups or the retrieves of a `status`, since the server's start."""
    if figures["hit_rate"] is None:
        return "none yet"
    return f"{figures['hit_rate']:.1%} of {figures['keys']:,} keys hit"


def plain(text: str) -> str:
    """Safe for a terminal: names and errors from others may contain codes that move the cursor or change colours."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)
