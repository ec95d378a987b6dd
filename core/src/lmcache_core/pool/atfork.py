"""Descriptors that a forked child must not keep.

A fork duplicates every descriptor, and with it the lock on its open file description: a sleeping child would keep its
dead parent "alive", or a dead server's pool name taken. Objects registered here are called in the child before any of
the caller's code runs there.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from typing import Protocol

from lmcache_core.descriptors import Descriptor


class ForgottenInChild(Protocol):
    """Something that a forked child must release."""

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
        except Exception as error:  # noqa: BLE001 - the others are called all the same: one may hold a life lock
            failed = error
    _registered.clear()
    if failed is not None:
        raise failed


os.register_at_fork(after_in_child=_in_child)


class PrivateDescriptor(Descriptor):
    """A descriptor that closes itself in a forked child, and with its last reference. It owns `fd`, and closes it
    once."""

    def __init__(self, fd: int | Descriptor) -> None:
        """Takes `fd` over from its owner, if it has one."""
        super().__init__()
        owner = fd if isinstance(fd, Descriptor) else Descriptor.of(fd)
        self.fds, owner.fds = owner.fds, self.fds  # no interrupt comes between the two
        os.set_inheritable(self.fileno(), False)
        forget_in_child(self)

    def after_fork_in_child(self) -> None:
        """Close the child's duplicate; that does not affect the parent's lock."""
        with contextlib.suppress(OSError):
            self.close()
