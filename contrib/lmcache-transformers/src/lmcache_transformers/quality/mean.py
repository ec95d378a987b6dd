"""A mean and its spread."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Mean:
    """Over windows of text, or prompts."""

    mean: float
    deviation: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Mean:
        return cls(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0)

    def __format__(self, digits: str) -> str:
        return f"{self.mean:{digits}} ± {self.deviation:{digits}}"
