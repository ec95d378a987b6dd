"""How long to pause after the server did not answer in time."""

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
