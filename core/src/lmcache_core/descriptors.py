"""Open descriptors, and who closes them."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from typing import Self


class Descriptor:
    """What owns a descriptor: it closes with its last reference, and once.

    A number that only a local variable knows is lost with an interrupt. So what opens a descriptor and notes it here
    is one call into C, and so is what takes it out and closes it: an interrupt comes before or after.
    """

    fds: deque[int] = deque()  # noqa: RUF012 - of one that an interrupt kept from being made; never filled

    def __init__(self, opens: Callable[..., int] | None = None, *arguments: object) -> None:
        """Owns what `opens(*arguments)`, which is written in C, returns; nothing without it."""
        self.fds = deque()  # none, or one
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
        """Whether there is none, or none any more."""
        return not self.fds

    def fileno(self) -> int:
        """The descriptor, -1 once closed."""
        return self.fds[0] if self.fds else -1

    def detach(self) -> int:
        """The descriptor, which is the caller's now."""
        return self.fds.pop()

    def close(self) -> None:
        """Close it. Again: nothing happens."""
        if self.fds:
            _exhaust(map(os.close, map(deque.pop, (self.fds,))))

    def __del__(self) -> None:
        self.close()


_exhaust = deque[None](maxlen=0).extend
