"""The server's own memory: how much of it is kept for whom, and how much may be.

What a peer can make the server keep is charged before it is kept, at what it costs in bytes: to its connection, to its
holder (a uid, or over ZMQ a CURVE key or an address), and to all. Each of the three has a cap for each sort, so nobody
takes what others need. The ledger beside this counts bytes of the pool; this counts bytes of the process.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from weakref import WeakValueDictionary

from lmcache_core.limits import MEMORY_BYTES_MAX


class MemorySort(IntEnum):
    """Why something is kept."""

    UNREAD = 0  # frames for a peer that does not read them
    LEASES = 1  # open leases and promises, with their positions
    REQUESTS = 2  # lookups that tiers are working on
    SESSIONS = 3  # sessions, with the namespaces that they use
    HOLDS = 4  # beside an object: its pin, and the table of its holders where it has several


class MemoryAccount:
    """Bytes of one sort. A connection's account is part of its holder's, and that of everybody's: `wholes`."""

    __slots__ = ("__weakref__", "name", "nbytes", "nbytes_max", "wholes")

    def __init__(self, name: str, nbytes_max: int, whole: MemoryAccount | None = None) -> None:
        self.name = name  # of whom, for messages
        self.nbytes = 0
        self.nbytes_max = nbytes_max
        self.wholes: tuple[MemoryAccount, ...] = () if whole is None else (whole, *whole.wholes)

    def full_for(self, nbytes: int) -> MemoryAccount | None:
        """Which of the three has no room for so many bytes more; None: they fit."""
        if self.nbytes + nbytes > self.nbytes_max:
            return self
        for each in self.wholes:
            if each.nbytes + nbytes > each.nbytes_max:
                return each
        return None

    def charge(self, nbytes: int) -> None:
        """Add so many bytes, which were checked before; negative: they are free again."""
        self.nbytes += nbytes
        for each in self.wholes:
            each.nbytes += nbytes

    def is_part_of(self, other: MemoryAccount) -> bool:
        """Whether what is charged to this one is charged to the other, too."""
        return self is other or other in self.wholes


class Memory:
    """The accounts of everybody. A holder's live as long as a connection or something charged refers to them."""

    def __init__(self, caps: dict[str, tuple[int, int, int]] = MEMORY_BYTES_MAX) -> None:
        """`caps`: by the sort's name, for one connection, for one holder, and for all; nothing of a sort that has
        none."""
        self._caps = [caps.get(sort.name.lower(), (0, 0, 0)) for sort in MemorySort]
        self.all = [MemoryAccount("all", most) for _, _, most in self._caps]
        self._holders: WeakValueDictionary[tuple[MemorySort, str], MemoryAccount] = WeakValueDictionary()

    def open(self, sort: MemorySort, holder: str) -> MemoryAccount:
        """The account of a new connection of this holder."""
        own, of_holder, _ = self._caps[sort]
        whole = self._holders.get((sort, holder))
        if whole is None:
            whole = self._holders[sort, holder] = MemoryAccount(holder, of_holder, self.all[sort])
        return MemoryAccount(f"one connection of {holder}", own, whole)

    def restart(self, sort: MemorySort, connections: Iterable[MemoryAccount]) -> None:
        """Nothing of a sort is charged any more: whoever counts anew what is kept charges all of it again.
        `connections`: all accounts of the sort that `open` made and that somebody may still charge."""
        holders = [account for (each, _), account in self._holders.items() if each is sort]
        for account in (*connections, *holders, self.all[sort]):
            account.nbytes = 0

    def describe(self, holder: str) -> dict[str, int]:
        """Bytes that are kept for a holder, by sort, for `status`."""
        found = [self._holders.get((sort, holder)) for sort in MemorySort]
        return {f"{sort.name.lower()}_memory_bytes": 0 if each is None else each.nbytes
                for sort, each in zip(MemorySort, found, strict=True)}  # fmt: skip
