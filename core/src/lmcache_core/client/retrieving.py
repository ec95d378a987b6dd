"""Retrieves: objects in the index are read without a call, the rest under a lease."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from lmcache_core.client.copying import Span, copy_out
from lmcache_core.client.hits import READ, VERIFY, Hits
from lmcache_core.client.leases import ReadLease
from lmcache_core.client.links import Links
from lmcache_core.client.presence import Presence
from lmcache_core.client.promises import Promise, frames_of
from lmcache_core.client.results import RetrieveResult, Status
from lmcache_core.kernel.answers import Reason
from lmcache_core.limits import BATCH_KEYS_MAX
from lmcache_core.pool.layout import Layout
from lmcache_core.protocol import messages as m
from lmcache_core.tokens.namespace import Namespace


class Retriever:
    """Copies objects into the caller's memory. Thread-safe."""

    def __init__(self, links: Links, hits: Hits, copy_threads: int) -> None:
        self._links = links
        self._hits = hits
        self._threads = copy_threads

    def retrieve(
        self,
        keys: Sequence[bytes],
        targets: Sequence[Span],
        namespace: Namespace,
        prefix: bool,
        promise: Promise | None,
        verify: int,
    ) -> RetrieveResult:
        """A status for each key. `verify`: see `hits.VERIFY`."""
        # Only a request to the server redeems a promise.
        seen = array("Q", bytes(8 * len(keys)))
        read = None if promise else self._hits.read(keys, targets, namespace, prefix, verify, seen)
        if read is None:
            return self._under_lease(keys, targets, namespace, prefix, promise, verify)
        count = len(keys)
        found = RetrieveResult([Status.HIT] * count, [Reason.NONE] * count, seen)
        if read.count(READ) == count:
            return found
        if not prefix:
            rest: Sequence[int] = [at for at, byte in enumerate(read) if byte != READ]
        else:
            rest = range(len(read) - len(read.lstrip(bytes((READ,)))), count)
        # Damaged ones, too: only a lease names the incarnation to drop, and the key may have an intact one.
        asked = self._under_lease(
            [keys[at] for at in rest], [targets[at] for at in rest], namespace, prefix, None, verify
        )
        return _with(found, rest, asked)

    def _under_lease(
        self,
        keys: Sequence[bytes],
        targets: Sequence[Span],
        namespace: Namespace,
        prefix: bool,
        promise: Promise | None,
        verify: int,
    ) -> RetrieveResult:
        """Read as much at a time as this session may keep from eviction; the rest is requested again once the first
        part has been copied."""
        found = asked = self._one_lease(keys, targets, namespace, prefix, promise, verify)
        while over := over_share(found.statuses, any_read=Status.HIT in asked.statuses):
            rest: Sequence[int] = range(over[0], len(keys)) if prefix else over
            asked = self._one_lease(
                [keys[at] for at in rest], [targets[at] for at in rest], namespace, prefix, promise, verify
            )
            found = _with(found, rest, asked)
        return found

    def _one_lease(
        self,
        keys: Sequence[bytes],
        targets: Sequence[Span],
        namespace: Namespace,
        prefix: bool,
        promise: Promise | None,
        verify: int,
    ) -> RetrieveResult:
        damaged: list[int] = []
        unverifiable: list[int] = []
        with ReadLease(self._links, namespace, Presence()) as lease:
            for first, end, number in frames_of(keys, promise, BATCH_KEYS_MAX):
                lease.ask(keys[first:end], number, prefix, verify > 0)
                if lease.granted:
                    unknown = lease.unverifiable(first) if verify == VERIFY["always"] else []
                    found = self._copy_out(lease, first, unknown, targets, namespace.layout)
                    if found:
                        lease.report_damaged(found)
                    lease.settle_quietly(m.FinishRead, first)
                    damaged += found
                    unverifiable += unknown
                if prefix and (damaged or unverifiable or lease.hits < len(lease.statuses)):
                    break
            lease.add_ungranted(Status.MISS, Reason.NONE, len(keys) - len(lease.statuses))
            statuses, reasons, seen = lease.statuses, lease.reasons, lease.incarnations
        if damaged or unverifiable:
            _make_misses(damaged, unverifiable, statuses, reasons, prefix)
        return RetrieveResult(statuses, reasons, seen)

    def _copy_out(
        self, lease: ReadLease, first: int, without: Sequence[int], targets: Sequence[Span], layout: Layout
    ) -> list[int]:
        """Copy what was granted from `first` on, except positions `without`. Returns those whose copy has the wrong
        checksum."""
        mapping, slots = lease.slots(first)
        if without:
            slots = [slot for slot in slots if slot[0] not in without]
        wanted = lease.checksums_at(position for position, _ in slots)
        check = any(wanted)
        seen = copy_out(mapping.address, slots, targets, layout, threads=self._threads, checksums=check)
        if not check or seen == wanted:
            return []
        return [slot[0] for slot, want, sum_ in zip(slots, wanted, seen, strict=True) if want and sum_ != want]


def over_share(statuses: Sequence[Status], *, any_read: bool) -> list[int]:
    """Positions that the server refused because this session held as much as it may, and that should be requested again
    once what was read has been released. If nothing was read, another thread of the session holds it: then none."""
    if not any_read or Status.QUOTA not in statuses:
        return []
    return [at for at, status in enumerate(statuses) if status is Status.QUOTA]


def _with(whole: RetrieveResult, positions: Sequence[int], part: RetrieveResult) -> RetrieveResult:
    """`whole`, with the results of `part` at these positions."""
    statuses, reasons, seen = list(whole.statuses), list(whole.reasons), array("Q", whole.incarnations)
    for at, status, reason, one in zip(positions, part.statuses, part.reasons, part.incarnations, strict=True):
        statuses[at], reasons[at], seen[at] = status, reason, one
    return RetrieveResult(statuses, reasons, seen)


def _make_misses(
    damaged: Sequence[int],
    unverifiable: Sequence[int],
    statuses: list[Status],
    reasons: list[Reason],
    prefix: bool,
) -> None:
    """Turn them into misses; with `prefix`, everything after the first of them, too."""
    for at in damaged:
        statuses[at], reasons[at] = Status.MISS, Reason.DAMAGED
    for at in unverifiable:
        statuses[at], reasons[at] = Status.MISS, Reason.UNVERIFIABLE
    if prefix:
        behind = min(*damaged, *unverifiable, len(statuses) - 1) + 1
        statuses[behind:] = [Status.MISS] * (len(statuses) - behind)
        reasons[behind:] = [Reason.NONE] * (len(reasons) - behind)
