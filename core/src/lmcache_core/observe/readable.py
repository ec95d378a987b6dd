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


def found_in(namespace: Mapping[str, Any]) -> str:
    """For a namespace in the traffic of a `status`: tokens if engines look prompts up in it, else keys."""
    if namespace["prompt_tokens"]:
        return f"{namespace['prompt_hit_tokens']:,} of {namespace['prompt_tokens']:,} tokens"
    return f"{namespace['lookup_hits']:,} of {namespace['lookup_keys']:,} keys"


def hits_of_keys(figures: Mapping[str, Any]) -> str:
    """For the lookups or the retrieves of a `status`, since the server's start."""
    if figures["hit_rate"] is None:
        return "none yet"
    return f"{figures['hit_rate']:.1%} of {figures['keys']:,} keys hit"
