"""How much the kit does."""

from __future__ import annotations

from typing import NamedTuple


class Kit(NamedTuple):
    """`--kit`, `--kit-seconds` and `--kit-seed`. Each speed does what `quick` does, and more."""

    speed: str = "quick"
    seconds: float = 60.0
    seed: int = 0

    @property
    def quick(self) -> bool:
        return self.speed == "quick"
