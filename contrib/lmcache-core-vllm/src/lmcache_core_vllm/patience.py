"""How long to wait for the server, and to pause after it did not answer in time."""

from __future__ import annotations

from collections.abc import Callable

FIRST_PAUSE_S = 0.05


class Patience:
    """Doubles the pause after each call that was not answered, up to `longest_s`; an answer ends it."""

    def __init__(self, longest_s: float, clock: Callable[[], float]) -> None:
        self._longest_s = longest_s
        self._clock = clock
        self._pause_s = 0.0
        self._until = 0.0

    @property
    def over(self) -> bool:
        """Whether to skip the server now."""
        return self._clock() < self._until

    def answered(self) -> None:
        """The server has answered."""
        self._pause_s = self._until = 0.0

    def waited_in_vain(self) -> None:
        """The server did not answer in time. Of concurrent calls, the first one counts."""
        if not self.over:
            self._pause_s = min(self._longest_s, max(FIRST_PAUSE_S, 2 * self._pause_s))
            self._until = self._clock() + self._pause_s


class Allowance:
    """Seconds that may be spent waiting: `most_s` at first, and again at `share` seconds a second."""

    def __init__(self, most_s: float, share: float, clock: Callable[[], float]) -> None:
        self._most_s = self._left_s = most_s
        self._share = share
        self._clock = clock
        self._at_s = clock()

    @property
    def left_s(self) -> float:
        """What may be spent now."""
        now = self._clock()
        self._left_s = min(self._most_s, self._left_s + self._share * (now - self._at_s))
        self._at_s = now
        return max(0.0, self._left_s)

    def spend(self, seconds: float) -> None:
        """So much was spent, perhaps more than was left."""
        self._left_s -= seconds
