"""Which keys are hot: uses are counted over two windows, the current one and the one before."""

from __future__ import annotations

WINDOW_S = 30.0
COUNTED_KEYS_MAX = 1 << 14  # a window with more keys ends early, which bounds memory and the time to forget it

Name = tuple[int, bytes]  # namespace and key in L1


class Heat:
    """Counts uses. A key that has just been demoted needs twice as many as another, so that keys do not flap."""

    def __init__(self, hot_at: int) -> None:
        self._hot_at = hot_at
        self._now: dict[Name, int] = {}
        self._before: dict[Name, int] = {}
        self._ends_s = 0.0

    def __len__(self) -> int:
        return len(self._now) + len(self._before)

    def use(self, name: Name, now: float) -> bool:
        """One more use. True: the key is hot, and its count restarts."""
        self._turn(now)
        uses = self._now.get(name, 0) + 1
        if uses + self._before.get(name, 0) >= self._hot_at:
            self._now.pop(name, None)
            self._before.pop(name, None)
            return True
        self._now[name] = uses
        return False

    def demoted(self, name: Name, now: float) -> None:
        """The key was demoted because others were read more."""
        self._turn(now)
        self._before.pop(name, None)
        self._now[name] = -self._hot_at

    def _turn(self, now: float) -> None:
        if now >= self._ends_s or len(self._now) >= COUNTED_KEYS_MAX:
            self._before, self._now = self._now, {}
            self._ends_s = now + WINDOW_S
