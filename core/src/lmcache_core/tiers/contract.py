"""The adapter contract: how the kernel speaks to a medium."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import TracebackType
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

from lmcache_core.limits import TIER_BATCH_KEYS_MAX

__all__ = [
    "AdapterContext",
    "Capabilities",
    "L2Adapter",
    "LoadItem",
    "Outcome",
    "Recount",
    "Result",
    "ScanEntry",
    "ScanPage",
    "StoreItem",
    "Usage",
]

T = TypeVar("T")


class Result(StrEnum):
    """What became of one object in a batch.

    Attributes:
        DONE: Stored, loaded or deleted, and so for every reader from now on. Never for what was refused: the server
            takes the object for stored.
        MISS: Of a load: the medium does not have it. For no other call: to delete what is not there is DONE.
        FULL: Of a store: the medium has no room. An ordinary answer: nobody tries again. The tier evicts a share of
            what it has, and this object is not stored there.
        THROTTLED: Of any call: the medium asks for a pause. The lane tries again up to three times while the deadline
            allows, after 50 ms and twice as long each time. Says nothing against the tier's health.
        DAMAGED: Of a load: what is there is longer than the buffers, or fails checks of the medium's own. It is set
            aside, and a miss. Shorter objects are DONE with their length: the server checks what is in them.
        FAILED: Of any call: an error. Tried again as THROTTLED is where `Outcome.retryable` says that it may help.
            After five calls in a row with a FAILED among their outcomes the tier is left alone, and probed until it is
            back.
    """

    DONE = "done"
    MISS = "miss"
    FULL = "full"
    THROTTLED = "throttled"
    DAMAGED = "damaged"
    FAILED = "failed"


class Outcome(NamedTuple):
    """The result for one object.

    Attributes:
        result: One of the six.
        nbytes: Of a load that is DONE: the bytes that it wrote, header and payload together. Of a store it is not read.
        error: What went wrong, in words for an operator: the tier's name, the place, and what the medium said. They
            reach `status` and `explain`, so no secret stands in them.
        retryable: Whether the same call may succeed soon. Read of FAILED alone.
    """

    result: Result
    nbytes: int = 0
    error: str = ""
    retryable: bool = False


class StoreItem(NamedTuple):
    """One object to store: the concatenation of `buffers`.

    Attributes:
        key: 1 to `key_bytes_max` bytes of any value, NULs among them. Those of a server have 44.
        buffers: One after the other; the first is the object's header. Read-only for the adapter, and the caller's
            again when the call returns.
    """

    key: bytes
    buffers: Sequence[memoryview]

    @property
    def nbytes(self) -> int:
        """Bytes of the object."""
        return sum(part.nbytes for part in self.buffers)


class LoadItem(NamedTuple):
    """One object to load: fill `buffers` in order.

    Attributes:
        key: As it was stored.
        buffers: To be filled one after the other. An object shorter than their sum may end inside any of them; what is
            behind its end is left as it was, or not: nobody reads it.
    """

    key: bytes
    buffers: Sequence[memoryview]


class Usage(NamedTuple):
    """What a medium holds. None: it cannot tell, or not cheaply.

    Attributes:
        bytes_used: Bytes of our objects, as near as the medium knows: with its own overhead or without.
        objects: How many there are.
        bytes_free: How much more fits.
    """

    bytes_used: int | None
    objects: int | None
    bytes_free: int | None = None


class ScanEntry(NamedTuple):
    """One object that a scan found.

    Attributes:
        key: As it was stored.
        nbytes: Its bytes, header included, as they were stored.
        used_at_s: Of its last use as far as the medium knows, else of its store: seconds since the epoch by the wall
            clock (`time.time()`), on all servers that share the medium. Orders the first evictions after a start.
    """

    key: bytes
    nbytes: int
    used_at_s: float


class ScanPage(NamedTuple):
    """One page of a scan.

    Attributes:
        entries: Any number of them, none included: an empty page is not the last one.
        cursor: What to ask for the next page with; None: this was the last one.
    """

    entries: Sequence[ScanEntry]
    cursor: str | None


@dataclass(frozen=True)
class Capabilities:
    """What an adapter can do. The conformance kit picks its tests by this record; a claim is tested.

    Attributes:
        thread_safe: Its methods may be called by several threads at once. False: one thread, one call at a time, and a
            call that hangs stops the tier until it returns.
        delete: It can delete. False: `delete` and `set_aside` are never called, the tier evicts nothing (a capacity
            with an eviction policy is refused), and what is damaged or cleared stays, unread.
        scan: It can list what it has. False: `scan` is never called; what a former server stored is found by `exists`
            when it is asked for, but is not accounted, and not evicted by us.
        ttl: The medium expires objects by itself. The kit asks for the fixture `expire`.
        durable: Objects outlive the adapter and its process: a new adapter on the same medium finds them. The kit asks
            for `reopen` and `backdoor`.
        evicts: The medium drops objects by itself when it is full. The kit asks for `small_adapter`.
        shared: Several servers may use the medium at once, and each sees what the others store and delete. The kit asks
            for `reopen`.
        batch_keys_max: Items in one call, at most; never more than 64.
        batch_bytes_max: Bytes in one call beyond which nothing is gained. A larger object comes alone. None: 64 MiB.
        object_bytes_max: The largest object that it stores, header included; what is larger is FAILED, and not
            retryable.
            None: any that there is (4 GiB at most).
        key_bytes_max: The longest key that it takes. A server's keys have 44 bytes: with less it can be no tier.
    """

    thread_safe: bool = True
    delete: bool = True
    scan: bool = True
    ttl: bool = False
    durable: bool = False
    evicts: bool = False
    shared: bool = False
    batch_keys_max: int = TIER_BATCH_KEYS_MAX
    batch_bytes_max: int | None = None
    object_bytes_max: int | None = None
    key_bytes_max: int = 64


def _one_after_the_other(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    return [call() for call in calls]


class Recount:
    """How an adapter says that its medium is not what it was, and is to be counted again: somebody deleted its
    directory, say. Safe from any thread, and cheap: a scan follows, in the background and not too often."""

    def __init__(self) -> None:
        self._wanted = threading.Event()

    def ask(self) -> None:
        """From the adapter."""
        self._wanted.set()

    def take(self) -> bool:
        """From the tier: whether it was asked for since the last time."""
        wanted = self._wanted.is_set()
        if wanted:
            self._wanted.clear()
        return wanted


@dataclass(frozen=True)
class AdapterContext:
    """What an adapter is built with, beside its settings.

    Attributes:
        tier: The tier's name in the settings, for messages.
        connections: Requests that the operator allows at once (`l2.NAME.connections`).
        recount: To be asked where the adapter finds that the medium is not what it was.
        run_parallel: Used by `parallel`.
    """

    tier: str
    connections: int = 4
    recount: Recount = field(default_factory=Recount)
    run_parallel: Callable[[Sequence[Callable[[], Any]]], list[Any]] = field(default=_one_after_the_other)

    def parallel(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        """Run the calls, at most `connections` at a time; results in order. The first exception is raised
        after all calls have ended, so no buffer is in use when this returns."""
        return self.run_parallel(calls)


class L2Adapter(ABC):
    """Speaks to one medium. A few blocking batch methods; threads, retries, format and eviction are the server's.

    Built as `Adapter(settings, context)`, where `settings` is an instance of the settings model that its
    ComponentSpec names. Its constructor must not need the medium to be there: a tier that is down at start is
    used as soon as it is up. Keys are opaque, 1 to 64 bytes, of any value. Every batch method answers in the
    order of its items, one answer each, and sets its time-outs from `deadline` (`time.monotonic()` seconds):
    what is not done by then is FAILED and retryable. A failure of the medium as a whole may raise `TierError`.
    Buffers belong to the caller: they are not kept, and a source is never written to. Retries of the
    underlying library are off: the lane retries what the outcome allows. Keep GIL-holding work short.

    Calls overlap, unless `thread_safe` is False: up to two of `exists` and `scan`, four of `load`, and two of `store`,
    `delete` and `set_aside` together, or `connections` of each where that is less; for each call that hangs past its
    deadline one more, six in all at most. A call may use `AdapterContext.parallel` inside. `close` comes after the last
    of them has returned; the constructor and `medium` come before the first.

    A server names a key once in a batch. A key that is named twice is answered twice, as by two calls; of two stores of
    it one stays, whole. A deadline may be days away, or infinite: cut it down to what your library can count. `usage`,
    `medium`, `try_to_lead` and `close` have none: they come back within a second, whatever the medium does. When a call
    returns, late or not, nothing of the adapter's uses its buffers any more. What another adapter or process stores and
    deletes is seen at once: nothing that was read of the medium, a key that was not there included, may be kept for the
    next call.
    """

    capabilities: ClassVar[Capabilities]

    @abstractmethod
    def __init__(self, settings: Any, context: AdapterContext) -> None:
        """Open nothing, wait for nothing. `capabilities` stands on the class, where `lmcache-core plugins` reads it;
        where it depends on the settings (the largest object, say), set it on the instance here: the server reads
        that."""

    @abstractmethod
    def store(self, items: Sequence[StoreItem], deadline: float) -> Sequence[Outcome]:
        """Publish each object whole or not at all, replacing one of the same key.

        A reader sees the former object until it sees this one: never neither, never a mixture, whoever is killed
        meanwhile. DONE, FULL, THROTTLED or FAILED for each. One that is FAILED may have been stored all the same: the
        server asks `exists`.
        """

    @abstractmethod
    def exists(self, keys: Sequence[bytes], deadline: float) -> Sequence[bool]:
        """Whether each key is there now. Refreshes recency where the medium evicts by itself.

        Raises `TierError` where the medium cannot be asked: a False that is not known is a lie. Also the probe by which
        a tier that failed is found to be back.
        """

    @abstractmethod
    def load(self, items: Sequence[LoadItem], deadline: float) -> Sequence[Outcome]:
        """Fill the buffers of each item, or answer MISS / DAMAGED / FAILED for it.

        DONE, MISS, DAMAGED, THROTTLED or FAILED for each. An object with more bytes than the buffers hold is DAMAGED.
        After an answer that is not DONE the buffers' content is undefined.
        """

    @abstractmethod
    def delete(self, keys: Sequence[bytes], deadline: float) -> Sequence[Outcome]:
        """Remove each object: DONE, THROTTLED or FAILED. One that is not there is DONE: deletes are idempotent."""

    def set_aside(self, keys: Sequence[bytes], deadline: float) -> Sequence[Outcome]:
        """Take damaged objects out of the way. Deletes them, unless the medium has a better place for them."""
        return self.delete(keys, deadline)

    @abstractmethod
    def usage(self) -> Usage:
        """What is stored now, as far as the medium can tell cheaply; within a second, as no deadline is given.

        No server calls it: it counts by `scan` and by its own stores. Commands do (`verify` and `copy`, to show how far
        they are), and `lmcache_check` of your own. Raises `TierError` where the medium cannot be asked.
        """

    @abstractmethod
    def scan(self, cursor: str | None, deadline: float) -> ScanPage:
        """One page of what is there; the first with cursor None. Rebuilds the server's accounts at its start.

        What is there all the while is listed, and once; what is stored or deleted meanwhile may be listed or not. A
        cursor is text that means the same to every adapter on the medium, of another process too: it outlives its
        instance, and the object that it points to. A page that failed is asked for again. Raises `TierError` where the
        medium cannot be asked: an empty page would be a lie.
        """

    def medium(self) -> str | None:
        """A name for what is stored on, the same for every adapter whose objects lie in the same place (one directory;
        one bucket and prefix; one database and key prefix), without a secret in it. None: no other can be on it.

        Asked once, before anything else, and without the medium: one medium is one tier, for two would each take the
        other's objects for its own, and the capacity of one would empty the other.
        """
        return None

    def try_to_lead(self) -> bool:
        """Whether this adapter is the one that keeps headroom on a medium which several servers share.

        Asked before each scan. A medium that allows an election (a lock, a lease) answers True to one adapter at a
        time, and to another once that one is gone. One that does not answers True to all: deletes are idempotent,
        and the price is a share evicted twice now and then.
        """
        return True

    @abstractmethod
    def close(self) -> None:
        """Release everything: connections, descriptors, threads. Idempotent; any other method afterwards raises
        `TierError`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
