"""Frames that wait because their peers do not read: bounded in bytes, by connection, by holder and in all."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self

from lmcache_core.kernel.memory import Memory, MemoryAccount, MemorySort
from lmcache_core.limits import UNREAD_PAUSE_BYTES, UNREAD_PAUSE_FRAMES, UNREAD_PAUSE_HOLDER_BYTES

FRAME_OVERHEAD_BYTES = 165  # of a waiting frame: the objects around its bytes


class Backlog(ABC):
    """The frames that wait for one peer."""

    unread: MemoryAccount

    @abstractmethod
    def drop(self) -> None:
        """Let go of the frames, and end the connection soon: not within this call, which may be another peer's."""


class Unread:
    """Decides which frames may wait. If a holder, or all together, have no room, the peer with the most frames is
    dropped: peers that read are never in that place."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._backlogs: dict[Backlog, None] = {}
        self.dropped = 0  # peers

    @classmethod
    def within(cls, connection_bytes: int, holder_bytes: int, all_bytes: int) -> Self:
        """For sockets beside the server's own: so much may wait for one connection, for one holder, and for all."""
        return cls(Memory({MemorySort.UNREAD.name.lower(): (connection_bytes, holder_bytes, all_bytes)}))

    def open(self, holder: str) -> MemoryAccount:
        """The account of a new connection."""
        return self._memory.open(MemorySort.UNREAD, holder)

    def keep(self, backlog: Backlog, frame_bytes: int) -> bool:
        """Charge a frame that has to wait. False: it may not, and its peer was dropped."""
        nbytes, account = frame_bytes + FRAME_OVERHEAD_BYTES, backlog.unread
        while (full := account.full_for(nbytes)) is not None:
            of_it = [each for each in self._backlogs if each.unread.is_part_of(full)]
            worst = max(of_it, key=lambda each: each.unread.nbytes, default=backlog)
            if worst.unread.nbytes <= account.nbytes:
                worst = backlog
            self.free(worst)
            self.dropped += 1
            worst.drop()
            if worst is backlog:
                return False
        account.charge(nbytes)
        self._backlogs[backlog] = None
        return True

    @staticmethod
    def pauses(backlog: Backlog, frames: int) -> bool:
        """Whether its peer must read some of these frames before its next request is read. So whoever asks and does
        not read waits for itself, and nobody is dropped for it."""
        own, holder = backlog.unread, backlog.unread.wholes[0]
        return frames > 0 and (
            own.nbytes >= UNREAD_PAUSE_BYTES
            or frames >= UNREAD_PAUSE_FRAMES
            or holder.nbytes >= UNREAD_PAUSE_HOLDER_BYTES
        )

    def sent(self, backlog: Backlog, frame_bytes: int) -> None:
        """A frame that has waited is gone."""
        backlog.unread.charge(-frame_bytes - FRAME_OVERHEAD_BYTES)
        if not backlog.unread.nbytes:
            self._backlogs.pop(backlog, None)

    def free(self, backlog: Backlog) -> None:
        """Nothing waits for this peer any more."""
        backlog.unread.charge(-backlog.unread.nbytes)
        self._backlogs.pop(backlog, None)
