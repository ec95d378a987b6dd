"""A medium whose power can be cut: what was not synced is lost, kept, torn or reordered, sector by sector."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from lmcache_block.medium.format import SECTOR_BYTES


class PowerCutError(BaseException):
    """The process is gone: nothing of it goes on."""


class CutMedium:
    """The calls of a `Medium`, on memory. `calls_left`: the power is cut within the call after so many writes, syncs
    and discards; None: never. `in_sync` is run in each sync, before anything is durable: what other threads do."""

    direct = True

    def __init__(self, nbytes: int, seed: int = 0) -> None:
        self._durable = bytearray(nbytes)
        self._now = bytearray(nbytes)
        self._unsynced: dict[int, list[bytes]] = {}  # the versions that each sector has had since the last sync
        self._random = random.Random(seed)
        self.calls_left: int | None = None
        self.calls = 0
        self.in_sync: Callable[[], object] = lambda: None
        self.is_on = True

    @property
    def nbytes(self) -> int:
        return len(self._now)

    def read(self, at: int, parts: Sequence[memoryview]) -> None:
        self._expect_power()
        for part in parts:
            assert at % SECTOR_BYTES == part.nbytes % SECTOR_BYTES == 0, "not aligned"
            part[:] = self._now[at : at + part.nbytes]
            at += part.nbytes

    def write(self, at: int, parts: Sequence[memoryview]) -> None:
        ends = self._counted()
        content = b"".join(parts)
        assert at % SECTOR_BYTES == len(content) % SECTOR_BYTES == 0, "not aligned"
        assert at + len(content) <= self.nbytes, "beyond the end"
        sectors = list(range(0, len(content), SECTOR_BYTES))
        if ends:  # torn: any of its sectors
            sectors = [sector for sector in sectors if self._random.random() < 0.5]
        for sector in sectors:
            number, piece = (at + sector) // SECTOR_BYTES, content[sector : sector + SECTOR_BYTES]
            self._unsynced.setdefault(number, []).append(piece)
            self._now[at + sector : at + sector + SECTOR_BYTES] = piece
        self._end(ends)

    def sync(self) -> None:
        ends = self._counted()
        self.in_sync()
        if not ends:
            for number in self._unsynced:
                at = number * SECTOR_BYTES
                self._durable[at : at + SECTOR_BYTES] = self._now[at : at + SECTOR_BYTES]
            self._unsynced.clear()
        self._end(ends)

    def discard(self, at: int, nbytes: int) -> None:
        self.write(at, [memoryview(bytes(nbytes))])

    def allocate(self) -> None:
        """It is."""

    def is_at(self, path: str) -> bool:
        return True

    def close(self) -> None:
        """Nothing is open."""

    # --- trouble ----------------------------------------------------------------------------------------------
    def fill(self, at: int, nbytes: int, seed: int) -> None:
        """With bytes of a former user, which are durable."""
        content = random.Random(seed).randbytes(nbytes)
        self._now[at : at + nbytes] = self._durable[at : at + nbytes] = content

    def killed(self) -> CutMedium:
        """What a new process finds after this one was killed: everything that was written."""
        return self._as(self._now)

    def cut(self) -> CutMedium:
        """What a new process finds after a power cut: of each sector a version since the last sync, or that before."""
        found = bytearray(self._durable)
        for number, versions in self._unsynced.items():
            at = number * SECTOR_BYTES
            found[at : at + SECTOR_BYTES] = self._random.choice([bytes(found[at : at + SECTOR_BYTES]), *versions])
        return self._as(found)

    def _as(self, content: bytearray) -> CutMedium:
        after = CutMedium(0, self._random.randrange(1 << 30))
        after._durable, after._now = bytearray(content), bytearray(content)
        return after

    def _counted(self) -> bool:
        """Whether this call is the last one."""
        self._expect_power()
        self.calls += 1
        if self.calls_left is None:
            return False
        self.calls_left -= 1
        return self.calls_left < 0

    def _end(self, ends: bool) -> None:
        if ends:
            self.is_on = False
            raise PowerCutError

    def _expect_power(self) -> None:
        if not self.is_on:
            raise PowerCutError
