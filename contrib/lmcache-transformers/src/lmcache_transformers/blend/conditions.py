"""Under which conditions blending was measured, and under which a generator blends: one description for both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

NAME = "blend"
FORMAT = 2  # of what is described, and of how tokens are chosen: what was measured otherwise certifies nothing
FIRST_TOKENS = 4  # of each chunk: those that took it for the beginning of a text

Lossy = Sequence[tuple[str, Mapping[str, str | int | float]]]


@dataclass(frozen=True)
class Conditions:
    """What changes how much answers change. `share`: of the tokens of chunks, how many are recomputed. `shortest`,
    `longest`: tokens of a chunk. `prefix_tokens`: how many stand in front of a chunk when its KV is computed."""

    share: float
    shortest: int
    longest: int
    prefix_tokens: int

    def lossy(self) -> Lossy:
        """As a certificate names it."""
        return [(NAME, {"format": FORMAT, "first_tokens": FIRST_TOKENS, **_fields(self)})]

    @classmethod
    def read(cls, lossy: Lossy) -> Conditions | None:
        """What a certificate names; None if it is another thing, or was measured in another way."""
        if len(lossy) != 1 or lossy[0][0] != NAME:
            return None
        given: dict[str, Any] = dict(lossy[0][1])
        if given.pop("format", 0) != FORMAT or given.pop("first_tokens", -1) != FIRST_TOKENS:
            return None
        kinds = {name: type(value) for name, value in given.items()}
        share = kinds.pop("share", None)
        if share not in (int, float) or kinds != dict.fromkeys(("shortest", "longest", "prefix_tokens"), int):
            return None
        return cls(**given)

    def __str__(self) -> str:
        lengths = str(self.shortest) if self.shortest == self.longest else f"{self.shortest} to {self.longest}"
        return f"a share of {self.share:g} of chunks of {lengths} tokens behind {self.prefix_tokens}"


def _fields(conditions: Conditions) -> dict[str, int | float]:
    return {
        "share": float(conditions.share),
        "shortest": conditions.shortest,
        "longest": conditions.longest,
        "prefix_tokens": conditions.prefix_tokens,
    }


def covering(wanted: Conditions, measured: Sequence[Conditions]) -> list[Conditions]:
    """Which of the measured conditions are those of a generator: of its share, behind no more tokens than its own, and
    with chunks of its lengths, from the longest of those that are not longer than its shortest, up to the shortest of
    those that are not shorter than its longest. Empty if there are none on one of the two sides."""
    same = [each for each in measured if each.share == wanted.share and each.prefix_tokens <= wanted.prefix_tokens]
    below = [each.shortest for each in same if each.shortest <= wanted.shortest]
    above = [each.longest for each in same if each.longest >= wanted.longest]
    if not below or not above:
        return []
    return [each for each in same if each.longest >= max(below) and each.shortest <= min(above)]
