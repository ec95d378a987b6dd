"""What the request in progress has changed, so that a handler that raises leaves nothing behind.

Whoever reserves something (claims a key, places an object, opens a lease, holds, pins, takes a place in a limit) adds
the call that takes it back, in the same breath. `back` makes these calls, newest first. What cannot be taken back (a
slot that was freed, an object that was published) comes last in its call, which then says `keep`: it stands, whatever
happens to the rest of the request, and a request that is repeated gets its answer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Undo:
    """The steps back, oldest first. `Dispatch` begins it with each request; the kernel's calls in between, from timers
    and tiers, each begin with nothing to take back."""

    __slots__ = ("_steps", "add", "in_request")

    def __init__(self) -> None:
        self._steps: list[tuple[Callable[..., object], tuple[Any, ...]]] = []
        self.in_request = False
        # add((step, arguments)): a bound method of the list, for every request comes here.
        self.add = self._steps.append

    def begin(self) -> None:
        """A request begins: nothing has changed."""
        self._steps.clear()
        self.in_request = True

    def end(self) -> None:
        """It is answered: everything stands."""
        self._steps.clear()
        self.in_request = False

    def forget(self) -> None:
        """A call that belongs to no request begins."""
        if not self.in_request:
            self._steps.clear()

    def mark(self) -> int:
        """Where a call begins, for `keep` and `back`."""
        return len(self._steps)

    def keep(self, mark: int) -> None:
        """What was done since then stands."""
        del self._steps[mark:]

    def back(self, mark: int = 0) -> None:
        """Take back what was done since then. All of it, even if a step fails: then the first failure is raised."""
        failure: BaseException | None = None
        steps = self._steps
        while len(steps) > mark:
            step, arguments = steps.pop()
            try:
                step(*arguments)
            except BaseException as error:  # noqa: BLE001 - raised below
                failure = failure or error
        if failure is not None:
            raise failure
