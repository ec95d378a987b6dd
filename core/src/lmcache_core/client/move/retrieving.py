"""Retrieves: objects in the index are read without a call, the rest under a lease."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from lmcache_core.client.find.hits import READ, Hits, ReadRequest
from lmcache_core.client.link.presence import Presence
from lmcache_core.client.link.reconnecting import Links
from lmcache_core.client.move.copying import Span, copy_out
from lmcache_core.client.move.leases import ReadLease
from lmcache_core.client.promises import frames_of
from lmcache_core.client.results import RetrieveResult, Status
from lmcache_core.kernel.answers import Reason
from lmcache_core.limits import BATCH_KEYS_MAX

_HIT, _NO_REASON = Status.HIT, Reason.NONE  # in Python 3.11 looking up an enum member takes 0.15 µs


class Retriever:
    """Copies objects into the caller's memory. Thread-safe."""

    def __init__(self, links: Links, hits: Hits, copy_threads: int) -> None:
        self._links = links
        self._hits = hits
        self._threads = copy_threads

    def retrieve(self, wanted: ReadRequest) -> RetrieveResult:
        """A status for each key."""
        count, seen = len(wanted.keys), array("Q", bytes(8 * len(wanted.keys)))
        # Only a request to the server redeems a promise.
        read = None if wanted.promise else self._hits.read(wanted, seen)
        statuses, reasons = [_HIT] * count, [_NO_REASON] * count
        # Damaged ones, too: only a lease names the incarnation to drop, and the key may have an intact one.
        if read is None:
            rest: Sequence[int] = range(count)
        elif read.count(READ) == count:
            return RetrieveResult(statuses, reasons, seen)
        elif wanted.prefix:
            rest = range(len(read) - len(read.lstrip(bytes((READ,)))), count)
        else:
            rest = [at for at, byte in enumerate(read) if byte != READ]
        while rest:
            lease = self._under_lease(wanted, rest)
            if len(rest) == count:
                statuses, reasons, seen = lease.statuses, lease.reasons, lease.incarnations
            else:
                for at, status, reason, number in zip(
                    rest, lease.statuses, lease.reasons, lease.incarnations, strict=True
                ):
                    statuses[at], reasons[at], seen[at] = status, reason, number
            # As much at a time as this session may keep from eviction: the rest once the first part has been copied.
            over = over_share(lease.statuses, any_read=_HIT in lease.statuses)
            if not over:
                break
            rest = rest[over[0] :] if wanted.prefix else [rest[at] for at in over]
        return RetrieveResult(statuses, reasons, seen)

    def _under_lease(self, wanted: ReadRequest, positions: Sequence[int]) -> ReadLease:
        """Read these under one lease. Returns it, ended: it says what became of each."""
        keys, targets, prefix = wanted.keys, wanted.targets, wanted.prefix
        if len(positions) < len(keys):
            keys, targets = [keys[at] for at in positions], [targets[at] for at in positions]
        missed: list[int] = []
        with ReadLease(self._links, wanted.namespace, Presence()) as lease:
            for first, end, number in frames_of(keys, wanted.promise, BATCH_KEYS_MAX):
                lease.ask(keys[first:end], number, prefix, wanted.verify > 0)
                if lease.granted:
                    missed += self._copy_out(lease, first, targets, wanted)
                if prefix and lease.hits < len(lease.statuses):
                    break
            if len(lease.statuses) < len(keys):
                lease.add_ungranted(Status.MISS, Reason.NONE, len(keys) - len(lease.statuses))
        if missed and prefix:
            behind = min(missed) + 1
            lease.statuses[behind:] = [Status.MISS] * (len(keys) - behind)
            lease.reasons[behind:] = [Reason.NONE] * (len(keys) - behind)
        return lease

    def _copy_out(self, lease: ReadLease, first: int, targets: Sequence[Span], wanted: ReadRequest) -> list[int]:
        """Copy what was granted from `first` on, and release it. Returns what is a miss all the same."""
        mapping, slots, sums, unverifiable = lease.readable(first, wanted.verify)
        check, damaged = any(sums), []
        seen = copy_out(
            mapping.address, slots, targets, wanted.namespace.layout, threads=self._threads, checksums=check
        )
        if check and seen != sums:
            damaged = [at for (at, _), sum_, is_ in zip(slots, sums, seen, strict=True) if sum_ and is_ != sum_]
        lease.release(first, damaged, unverifiable)
        return damaged + unverifiable


def over_share(statuses: Sequence[Status], *, any_read: bool) -> list[int]:
    """Positions that the server refused because this session held as much as it may, and that should be requested again
    once what was read has been released. If nothing was read, another thread of the session holds it: then none."""
    if not any_read or Status.QUOTA not in statuses:
        return []
    return [at for at, status in enumerate(statuses) if status is Status.QUOTA]
