"""Descriptors that a forked child must not keep.

A fork duplicates every descriptor, and with it the lock that its open file description carries: a child
that sleeps on would keep its dead parent "alive", or a dead server's pool name taken. What registers here
is told in the child, before any of the caller's code runs there.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections import deque
from collections.abc import Callable
from typing import Protocol, Self


class ForgottenInChild(Protocol):
    """Something that a forked child has to let go of."""

    def after_fork_in_child(self) -> None:
        """Close descriptors and mark the object as unusable. Must not raise, lock, or touch mapped memory."""
        ...


_registered: weakref.WeakSet[ForgottenInChild] = weakref.WeakSet()


def forget_in_child(owner: ForgottenInChild) -> None:
    """Have `owner.after_fork_in_child()` called in every child that this process forks from now on."""
    _registered.add(owner)


def _in_child() -> None:
    failed: Exception | None = None
    for owner in list(_registered):
        try:
            owner.after_fork_in_child()
        except Exception as error:  # noqa: BLE001 - the others are told all the same: one may hold a life lock
            failed = error
    _registered.clear()
    if failed is not None:
        raise failed


os.register_at_fork(after_in_child=_in_child)


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


class PrivateDescriptor(Descriptor):
    """A descriptor that closes itself in a forked child, and with its last reference. It owns `fd`, and closes it
    once."""

    def __init__(self, fd: int | Descriptor) -> None:
        """Takes it from its owner, if it has one."""
        super().__init__()
        owner = fd if isinstance(fd, Descriptor) else Descriptor.of(fd)
        self.fds, owner.fds = owner.fds, self.fds  # no interrupt comes between the two
        os.set_inheritable(self.fileno(), False)
        forget_in_child(self)

    def after_fork_in_child(self) -> None:
        """Let go of the child's duplicate; the parent's lock is untouched by a close."""
        with contextlib.suppress(OSError):
            self.close()
