"""What is remembered of one object's uses, and the classes that follow from it.

Time is counted in uses of any object: a policy has no clock.
"""

from __future__ import annotations

from typing import Any

USES_CLASSES = 4  # used 0, 1 to 2, 3 to 6 and more times since it came
GAP_CLASSES = 22  # no gap yet, then one for each doubling of the gap between its last two uses
CLASSES = GAP_CLASSES * USES_CLASSES


class Past:
    """The uses of one object.

    `last`: when it was used last; `gap`: the time between its last two uses, 0 after only one; `uses`: how often it was
    used again; `grade`: its class; `number`: 64 bits of its key. `before` and `began_with` are the `Direction`'s.
    """

    __slots__ = ("before", "began_with", "gap", "grade", "last", "number", "uses")

    def __init__(self, number: int) -> None:
        self.number = number
        self.last = -1
        self.gap = 0
        self.uses = 0
        self.grade = 0
        self.before = 0
        self.began_with = 0

    def use(self, now: int) -> None:
        """It is used now."""
        if self.last >= 0:
            self.gap = now - self.last
            self.uses += 1
            gap_class = self.gap.bit_length()
            uses_class = (self.uses + 1).bit_length() - 1
            self.grade = USES_CLASSES * (gap_class if gap_class < GAP_CLASSES else GAP_CLASSES - 1) + (
                uses_class if uses_class < USES_CLASSES else USES_CLASSES - 1
            )
        self.last = now

    def used_at(self, now: int) -> Past:
        """A copy, as it would be if it were used then."""
        copy = Past(self.number)
        copy.last, copy.gap, copy.uses, copy.grade = self.last, self.gap, self.uses, self.grade
        copy.use(now)
        return copy


class SampledPast(Past):
    """Of an object in the sample. `seats[i]`: its place in the shadow cache of order i, None if it is not there."""

    __slots__ = ("nbytes", "newer", "older", "seats")

    def __init__(self, number: int, nbytes: int, orders: int) -> None:
        super().__init__(number)
        self.nbytes = nbytes
        self.seats: list[Any] = [None] * orders
        self.older: Any = None
        self.newer: Any = None
