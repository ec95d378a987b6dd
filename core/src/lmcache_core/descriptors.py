"""Open file descriptors, and who closes them."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from typing import Self


class Descriptor:
    """Owns a descriptor: closes it once, with the last reference at the latest.

    A number held only by a local variable is lost on an interrupt. So opening a descriptor and storing it here is one
    call into C, and so is taking it out and closing it: an interrupt comes before or after.
    """

    fds: deque[int] = deque()  # noqa: RUF012 - of one that an interrupt kept from being made; never filled

    def __init__(self, opens: Callable[..., int] | None = None, *arguments: object) -> None:
        """Owns the descriptor that `opens(*arguments)` returns, or nothing without `opens`, which must be written in
        C."""
        self.fds = deque()  # at most one
        if opens is not None:
            self.fds.extend(map(opens, *[(each,) for each in arguments]))

    @classmethod
    def of(cls, fd: int) -> Self:
        """The owner of an open descriptor."""
        owner = cls()
        owner.fds.append(fd)
        return owner

    @property
    def closed(self) -> bool:
        """Whether there is no open descriptor."""
        return not self.fds

    def fileno(self) -> int:
        """The descriptor; -1 once closed."""
        return self.fds[0] if self.fds else -1

    def detach(self) -> int:
        """Return the descriptor and give its ownership to the caller."""
        return self.fds.pop()

    def close(self) -> None:
        """Close the descriptor. Does nothing if it is closed."""
        if self.fds:
            _exhaust(map(os.close, map(deque.pop, (self.fds,))))

    def __del__(self) -> None:
        self.close()


_exhaust = deque[None](maxlen=0).extend
