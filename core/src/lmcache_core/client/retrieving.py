"""Retrieves: what the index has is read without a call, the rest under a lease."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from lmcache_core.client.copying import Span, copy_out
from lmcache_core.client.hits import DAMAGED, READ, Hits
from lmcache_core.client.leases import ReadLease
from lmcache_core.client.links import Links
from lmcache_core.client.results import RetrieveResult, Status
from lmcache_core.errors import DisconnectedError
from lmcache_core.kernel.answers import Reason
from lmcache_core.limits import BATCH_KEYS_MAX
from lmcache_core.protocol import messages as m
from lmcache_core.protocol.codec import join_keys
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
        promises: Sequence[int],
        verify: int,
    ) -> RetrieveResult:
        """A status a key. `verify`: see `hits.VERIFY`."""
        # A promise is redeemed by who asks the server.
        read = None if any(promises) else self._hits.read(keys, targets, namespace, prefix, verify)
        if read is None:
            return self._under_lease(keys, targets, namespace, prefix, promises, verify)
        count = len(keys)
        statuses, reasons = [Status.HIT] * count, [Reason.NONE] * count
        if read.count(READ) == count:
            return RetrieveResult(statuses, reasons)
        damaged = [at for at, byte in enumerate(read) if byte == DAMAGED]
        if not prefix:
            rest: Sequence[int] = [at for at, byte in enumerate(read) if byte not in (READ, DAMAGED)]
        else:
            hits = len(read) - len(read.lstrip(bytes((READ,))))
            rest = range(0) if damaged else range(hits, count)
        if rest:
            asked = self._under_lease(
                [keys[at] for at in rest], [targets[at] for at in rest], namespace, prefix, (), verify
            )
            for at, status, reason in zip(rest, asked.statuses, asked.reasons, strict=True):
                statuses[at], reasons[at] = status, reason
        if damaged:
            _mark_damaged(damaged, statuses, reasons, prefix)
            self._report(keys, damaged, namespace)
        return RetrieveResult(statuses, reasons)

    def _under_lease(
        self,
        keys: Sequence[bytes],
        targets: Sequence[Span],
        namespace: Namespace,
        prefix: bool,
        promises: Sequence[int],
        verify: int,
    ) -> RetrieveResult:
        damaged: list[int] = []
        with ReadLease(self._links, namespace) as lease:
            for first in range(0, len(keys), BATCH_KEYS_MAX):
                lease.ask(keys[first : first + BATCH_KEYS_MAX], promise_of(promises, first), prefix, verify > 0)
                if lease.granted:
                    damaged += lease.damaged(first)
                    mapping, slots = lease.slots(first)
                    if damaged:
                        slots = [slot for slot in slots if slot[0] not in damaged]
                    copy_out(mapping.address, slots, targets, namespace.layout, threads=self._threads)
                    lease.settle_quietly(m.FinishRead, first)
                if prefix and (damaged or lease.hits < len(lease.statuses)):
                    break
            lease.add_ungranted(Status.MISS, len(keys) - len(lease.statuses))
            statuses, reasons = lease.statuses, lease.reasons
        if damaged:
            _mark_damaged(damaged, statuses, reasons, prefix)
            self._report(keys, damaged, namespace)
        return RetrieveResult(statuses, reasons)

    def _report(self, keys: Sequence[bytes], damaged: Sequence[int], namespace: Namespace) -> None:
        """Have the server drop these. Where there is none now, the next reader reports them again."""
        with contextlib.suppress(DisconnectedError):
            link = self._links.current()
            link.bind(namespace)
            for first in range(0, len(damaged), BATCH_KEYS_MAX):
                blob = join_keys([keys[at] for at in damaged[first : first + BATCH_KEYS_MAX]])
                link.channel.call(lambda rid, blob=blob: m.ReportDamaged(rid, namespace.id, blob))  # type: ignore[misc]


def promise_of(promises: Sequence[int], first: int) -> int:
    """The promise for the page that begins with this key, 0 for none."""
    page = first // BATCH_KEYS_MAX
    return promises[page] if page < len(promises) else 0


def _mark_damaged(damaged: Sequence[int], statuses: list[Status], reasons: list[Reason], prefix: bool) -> None:
    """They are misses; with `prefix`, so is everything behind the first of them."""
    for at in damaged:
        statuses[at], reasons[at] = Status.MISS, Reason.DAMAGED
    if prefix:
        behind = damaged[0] + 1
        statuses[behind:] = [Status.MISS] * (len(statuses) - behind)
        reasons[behind:] = [Reason.NONE] * (len(reasons) - behind)
