"""A load of blocks that another engine is still computing: each is read once it is in the pool.

The index in shared memory says which blocks are there, and a word beside it changes when any are published. So a wait
makes no call: between steps of the engine that word is compared, and while the engine has nothing to compute, a futex
wakes it when the word changes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from lmcache_core import Client, KeyGroup, Need, PageEntry, Status
from lmcache_core.client import PagesResult, RetrieveJob
from lmcache_core.errors import CacheError
from lmcache_core.kernel.answers import Reason
from lmcache_core.tokens.namespace import Namespace

if TYPE_CHECKING:
    from lmcache_copier import ServerRetrieve


class Arrivals:
    """Reads the entries' blocks in their order, as they come. Ends when all have been read, when one cannot be read, or
    when none has come for `wait_s`. The same methods as a `RetrieveJob`; for one thread."""

    def __init__(
        self,
        client: Client,
        namespaces: Sequence[Namespace],
        entries: Sequence[PageEntry],
        start: Callable[[Sequence[PageEntry]], RetrieveJob | ServerRetrieve],
        wait_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`namespaces`: of the groups. `start`: begins to read blocks that are there."""
        self._client = client
        self._namespaces = namespaces
        self._entries = entries
        self._start = start
        self._wait_s = wait_s
        self._clock = clock
        self._job: RetrieveJob | ServerRetrieve | None = None
        self._reading: list[int] = []  # how many blocks of each entry the job reads
        self._read = [0] * len(entries)  # of each entry, so far
        self._seen: int | None = -1  # what was published when the index was searched last
        self._until = clock() + wait_s
        self._ended = False
        self.result: PagesResult | None = None

    def done(self) -> bool:
        """Whether it has ended; begins to read what has come since the last time."""
        while not self._ended and not self._advance():
            pass
        return self._ended

    def _advance(self) -> bool:
        """One step; returns whether there is nothing to do until something happens."""
        if self._job is not None:
            if not self._job.done():
                return True
            return self._note(self._job)
        if self._all_read:
            self._end()
            return True
        seen = self._client.published
        if seen is None or seen != self._seen:
            self._seen = seen
            if self._begin():
                return False
        if self._clock() >= self._until:
            self._end()
        return True

    @property
    def arrived(self) -> int:
        """Blocks that have been read."""
        return sum(self._read)

    @property
    def _all_read(self) -> bool:
        return all(read == len(entry.keys) for read, entry in zip(self._read, self._entries, strict=True))

    def _begin(self) -> bool:
        """Begin to read what is there; returns whether anything is."""
        there = [self._there(entry, read) for entry, read in zip(self._entries, self._read, strict=True)]
        if not any(there):
            return False
        chosen = [
            PageEntry(entry.group, entry.keys[read : read + count], entry.page_ids[read : read + count])
            for entry, read, count in zip(self._entries, self._read, there, strict=True)
        ]
        try:
            self._job = self._start([each for each in chosen if each.keys])
        except CacheError:  # what is missing is computed
            self._end()
            return False
        self._reading = there
        return True

    def _there(self, entry: PageEntry, read: int) -> int:
        """How many blocks after the first `read` can be read now."""
        left = entry.keys[read:]
        if not left:
            return 0
        wanted = KeyGroup(self._namespaces[entry.group], left, Need.PREFIX)
        return self._client.lookup_many([wanted], unit_tokens=1, ask=False).tokens

    def _note(self, job: RetrieveJob | ServerRetrieve) -> bool:
        """A job has ended. Returns False: there may be more to read."""
        result, self._job = job.result, None
        statuses = iter(() if result is None else result.statuses)
        for at, count in enumerate(self._reading):
            if count:
                hits = list(next(statuses, ()))
                whole = next((n for n, status in enumerate(hits) if status is not Status.HIT), len(hits))
                self._read[at] += whole
                if whole < count:  # it has left the pool again, and may never come back
                    self._end()
        self._until = self._clock() + self._wait_s
        return False

    def wait(self, seconds: float) -> bool:
        """Wait until something comes, at most so long; returns whether all has ended."""
        if self.done():
            return True
        if self._job is not None:
            self._job.wait(seconds)
        elif self._seen is not None:
            self._client.wait_published(self._seen, seconds)
        else:  # no pool to look at: until there is one, or the time is over
            time.sleep(seconds)
        return self.done()

    def cancel(self) -> None:
        """Give the rest up; what is being read is waited for."""
        if self._job is not None:
            self._job.cancel()
            self._job = None
        self._end(Status.ABORTED)

    def _end(self, rest: Status = Status.MISS) -> None:
        if self._ended:
            return
        self._ended = True
        counts = [(read, len(entry.keys) - read) for read, entry in zip(self._read, self._entries, strict=True)]
        self.result = PagesResult(
            [[Status.HIT] * read + [rest] * missing for read, missing in counts],
            [[Reason.NONE] * (read + missing) for read, missing in counts],
            [[] for _ in counts],
            [[0] * (read + missing) for read, missing in counts],
        )
