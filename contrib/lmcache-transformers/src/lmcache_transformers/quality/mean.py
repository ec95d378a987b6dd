"""A mean and its spread."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from lmcache_core.errors import UsageError


def finite(values: Sequence[float]) -> Sequence[float]:
    """Themselves. Raises `UsageError` if one is none that can be compared: then nothing certifies the model."""
    for each in values:
        if not math.isfinite(each):
            raise UsageError(
                f"a figure of this measurement is {each}: the model computes NaN or infinite numbers, and such answers "
                "are not certified; try another --dtype"
            )
    return values


@dataclass(frozen=True)
class Mean:
    """Over windows of text, or prompts."""

    mean: float
    deviation: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Mean:
        """Raises `UsageError` if one is not finite."""
        return cls(statistics.fmean(finite(values)), statistics.stdev(values) if len(values) > 1 else 0.0)

    def __format__(self, digits: str) -> str:
        return f"{self.mean:{digits}} ± {self.deviation:{digits}}"
