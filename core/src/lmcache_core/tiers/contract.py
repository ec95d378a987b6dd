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

T = TypeVar("T")


class Result(StrEnum):
    """What became of one object in a batch."""

    DONE = "done"  # stored, loaded or deleted
    MISS = "miss"  # not on the medium
    FULL = "full"  # the medium has no room; an ordinary answer, never retried
    THROTTLED = "throttled"  # the medium asks for a pause; retried by the lane
    DAMAGED = "damaged"  # what came back is shorter or longer than it should be, or fails its own checks
    FAILED = "failed"  # an error; `Outcome.retryable` says whether trying again may help


class Outcome(NamedTuple):
    """The result for one object. `nbytes` counts what a load wrote: header and payload together."""

    result: Result
    nbytes: int = 0
    error: str = ""
    retryable: bool = False


class StoreItem(NamedTuple):
    """One object to store: the concatenation of `buffers` (the first is the object's header)."""

    key: bytes
    buffers: Sequence[memoryview]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.buffers)


class LoadItem(NamedTuple):
    """One object to load: fill `buffers` in order. An object shorter than their sum may end inside the last."""

    key: bytes
    buffers: Sequence[memoryview]


class Usage(NamedTuple):
    """What a medium holds. `None`: it cannot tell."""

    bytes_used: int | None
    objects: int | None
    bytes_free: int | None = None


class ScanEntry(NamedTuple):
    key: bytes
    nbytes: int
    used_at_s: float  # seconds since the epoch, of the last use known to the medium; orders the first evictions


class ScanPage(NamedTuple):
    entries: Sequence[ScanEntry]
    cursor: str | None  # None: this was the last page


@dataclass(frozen=True)
class Capabilities:
    """What an adapter can do. The conformance kit picks its tests by this record; a claim is tested."""

    thread_safe: bool = True  # False: one lane, one call at a time
    delete: bool = True
    scan: bool = True
    ttl: bool = False  # the medium expires objects by itself
    durable: bool = False  # objects outlive the adapter: a new one over the same medium finds them
    evicts: bool = False  # the medium drops objects by itself when it is full
    shared: bool = False  # several servers may use the medium at once
    batch_keys_max: int = TIER_BATCH_KEYS_MAX
    batch_bytes_max: int | None = None  # more in one call gains nothing (one object is always allowed)
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
    """What the kernel side gives an adapter."""

    tier: str  # the tier's name in the settings, for messages
    connections: int = 4  # requests that may be under way at once
    recount: Recount = field(default_factory=Recount)
    run_parallel: Callable[[Sequence[Callable[[], Any]]], list[Any]] = field(default=_one_after_the_other)

    def parallel(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        """Run the calls, at most `connections` at a time; results in order. The first exception is raised
        after all calls have ended, so no buffer is in use when this returns."""
        return self.run_parallel(calls)


class L2Adapter(ABC):
    """Speaks to one medium. A few blocking batch methods; threads, retries, format and eviction are the kernel's.

    Built as `Adapter(settings, context)`, where `settings` is an instance of the settings model that its
    ComponentSpec names. Its constructor must not need the medium to be there: a tier that is down at start is
    used as soon as it is up. Keys are opaque, 1 to 64 bytes, of any value. Every batch method answers in the
    order of its items, one answer each, and sets its time-outs from `deadline` (`time.monotonic()` seconds):
    what is not done by then is FAILED and retryable. A failure of the medium as a whole may raise `TierError`.
    Buffers belong to the caller: they are not kept, and a source is never written to. Retries of the
    underlying library are off: the lane retries what the outcome allows. Keep GIL-holding work short.
    """

    capabilities: ClassVar[Capabilities]

    @abstractmethod
    def __init__(self, settings: Any, context: AdapterContext) -> None: ...

    @abstractmethod
    def store(self, items: Sequence[StoreItem], deadline: float) -> Sequence[Outcome]:
        """Publish each object whole or not at all, replacing one of the same key."""

    @abstractmethod
    def exists(self, keys: Sequence[bytes], deadline: float) -> Sequence[bool]:
        """Whether each key is there now. Refreshes recency where the medium evicts by itself."""

    @abstractmethod
    def load(self, items: Sequence[LoadItem], deadline: float) -> Sequence[Outcome]:
        """Fill the buffers of each item, or answer MISS / DAMAGED / FAILED for it.

        An object with more bytes than the buffers hold is DAMAGED. After an answer that is not DONE the
        buffers' content is undefined.
        """

    @abstractmethod
    def delete(self, keys: Sequence[bytes], deadline: float) -> Sequence[Outcome]:
        """Remove each object. One that is not there is DONE: deletes are idempotent."""

    def set_aside(self, keys: Sequence[bytes], deadline: float) -> Sequence[Outcome]:
        """Take damaged objects out of the way. Deletes them, unless the medium has a better place for them."""
        return self.delete(keys, deadline)

    @abstractmethod
    def usage(self) -> Usage:
        """What is stored now, as far as the medium can tell cheaply."""

    @abstractmethod
    def scan(self, cursor: str | None, deadline: float) -> ScanPage:
        """One page of what is there; the first with cursor None. Rebuilds accounting at start."""

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
        """Release everything. Idempotent; any other method afterwards raises `TierError`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
