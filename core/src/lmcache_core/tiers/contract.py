"""The adapter contract: how the server talks to a medium."""

from __future__ import annotations

import contextlib
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import TracebackType
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

from lmcache_core.errors import TierError
from lmcache_core.limits import TIER_BATCH_KEYS_MAX
from lmcache_core.plugins.components import Finding

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
_CHECK_PREFIX = b"lmcache-check"  # no server's keys begin so, or are as long: none takes the object for its own
_CHECK_BYTES = 1 << 20


class Result(StrEnum):
    """What became of one object in a batch.

    Attributes:
        DONE: Stored, loaded or deleted, and visible to every reader from now on. Never for a refused object: the server
            considers it stored.
        MISS: Of a load: the medium does not have it. Of no other call: deleting what is not there is DONE.
        FULL: Of a store: the medium has no room. An ordinary answer that is not retried. The tier evicts a part of its
            objects, and this object is not stored there. A medium may go on answering FULL after deletes, until it
            compacts.
        THROTTLED: Of any call: the medium asks for a pause. The lane retries up to three times within the deadline,
            after 50 ms and twice as long each time. This does not count against the tier's health.
        DAMAGED: Of a load: the object is longer than the buffers, fails the medium's own checks, or is the one that the
            medium cannot read (a bad sector). It counts as a miss, and the next store of its key replaces it; the
            server looks at it again before it is set aside. Shorter objects are DONE with their length: the server
            checks their content.
        FAILED: Of any call: an error. Retried like THROTTLED if `Outcome.retryable` is set. After five calls in a row
            with a FAILED outcome, or that return after their deadline or not at all, the tier's circuit breaker opens:
            only probes are made until it is back.
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
        nbytes: Of a load that is DONE: the bytes that it wrote, header and payload together. Ignored for a store.
        error: What went wrong, for an operator: the tier's name, the place, and what the medium said. It
            appears in `status` and `explain`, so it must not contain secrets.
        retryable: Whether the same call may succeed soon. Only read for FAILED.
        version: Of a load: what the medium calls this state of the object, another after each store (an ETag, an inode
            and its time). Empty: it has no name for it. A load that fills only the header gives the same.
        cure: The end of `error` that says what an operator can do, if the adapter knows it. `Outcome.of(error)` sets
            both from a `TierError`.
    """

    result: Result
    nbytes: int = 0
    error: str = ""
    retryable: bool = False
    version: str = ""
    cure: str = ""

    @classmethod
    def of(cls, error: TierError, result: Result = Result.FAILED) -> Outcome:
        """For one object, what the error would tell of a whole call."""
        return cls(result, error=str(error), retryable=error.retryable, cure=error.cure)

    def as_error(self) -> TierError:
        """The error of a whole call, from the outcome of one object."""
        happened = self.error.removesuffix(f": {self.cure}") or f"the tier answered {self.result}"
        return TierError(happened, cure=self.cure, retryable=self.retryable or self.result is Result.THROTTLED)


class StoreItem(NamedTuple):
    """One object to store: the concatenation of `buffers`.

    Attributes:
        key: 1 to `key_bytes_max` bytes of any value, including NULs. A server's keys have 44.
        buffers: One after another; the first is the object's header. Read-only for the adapter, which must not use them
            after the call returns.
        replaces: What the medium may have under the key is not to be trusted: store this in any case. Only matters to
            an adapter that skips what is there already.
    """

    key: bytes
    buffers: Sequence[memoryview]
    replaces: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the object."""
        return sum(part.nbytes for part in self.buffers)


class LoadItem(NamedTuple):
    """One object to load: fill `buffers` in order.

    Attributes:
        key: The key of the store.
        buffers: To be filled one after another. An object shorter than their total may end inside any of them; the rest
            may have any content, because nobody reads it.
    """

    key: bytes
    buffers: Sequence[memoryview]


class Usage(NamedTuple):
    """What a medium holds. None: it cannot tell, or not cheaply.

    Attributes:
        bytes_used: Bytes of our objects, as far as the medium knows, with or without its own overhead.
        objects: How many there are.
        bytes_free: How much more fits.
    """

    bytes_used: int | None
    objects: int | None
    bytes_free: int | None = None


class ScanEntry(NamedTuple):
    """One object that a scan found.

    Attributes:
        key: The key of the store.
        nbytes: Its bytes as stored, including the header.
        used_at_s: The time of its last use if the medium knows it, else of its store: seconds since the epoch on the
            wall clock (`time.time()`), of all servers that share the medium. Orders the first evictions after a start.
    """

    key: bytes
    nbytes: int
    used_at_s: float


class ScanPage(NamedTuple):
    """One page of a scan.

    Attributes:
        entries: Any number, even none: an empty page is not necessarily the last one.
        cursor: The cursor for the next page; None: this was the last one.
    """

    entries: Sequence[ScanEntry]
    cursor: str | None


@dataclass(frozen=True)
class Capabilities:
    """What an adapter can do. The conformance kit picks its tests by this record, and tests every claim.

    Attributes:
        thread_safe: Its methods may be called by several threads at once. False: one thread, one call at a time, and a
            call that hangs stops the tier until it returns.
        stores: It can store. False: others put the objects there, as other nodes do into their pools; `store` is never
            called, nothing is owed to the tier, and serdes are refused: what others have is not encoded.
        delete: It can delete. False: `delete` and `set_aside` are never called, the tier evicts nothing (a capacity
            with an eviction policy is refused), and damaged or cleared objects stay, unread.
        scan: It can list its objects. False: `scan` is never called; objects of a former server are found by `exists`
            when they are requested, but are not accounted for, and not evicted by us.
        ttl: The medium expires objects by itself. The kit asks for the fixture `expire`.
        durable: Objects outlive the adapter and its process: a new adapter on the same medium finds them. The kit asks
            for `reopen` and `backdoor`.
        evicts: The medium drops objects by itself when it is full. The kit asks for `small_adapter`.
        shared: Several servers may use the medium at once, and each sees what the others store and delete. The kit asks
            for `reopen`.
        private: Nobody but servers stores in its place (a directory of its own), so that a name in our form proves that
            an object is ours. False on a shared medium: the header of an object that this server has neither stored nor
            loaded is read before it is evicted, and an object without our header is never deleted.
        batch_keys_max: Items in one call, at most; never more than 64.
        batch_bytes_max: Bytes in one call beyond which larger calls gain nothing. A larger object comes alone. None: 64
            MiB.
        object_bytes_max: The largest object that it stores, including the header; larger ones are FAILED, and not
            retryable. None: no limit (objects have at most 4 GiB).
        key_bytes_max: The longest key that it accepts. A server's keys have 44 bytes: an adapter with less cannot be a
            tier.
    """

    thread_safe: bool = True
    stores: bool = True
    delete: bool = True
    scan: bool = True
    ttl: bool = False
    durable: bool = False
    evicts: bool = False
    shared: bool = False
    private: bool = False
    batch_keys_max: int = TIER_BATCH_KEYS_MAX
    batch_bytes_max: int | None = None
    object_bytes_max: int | None = None
    key_bytes_max: int = 64


def _one_after_the_other(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    return [call() for call in calls]


class Recount:
    """With this an adapter says that its medium has changed unexpectedly and must be counted again, for example because
    somebody deleted its directory. Safe from any thread, and cheap: a scan follows, in the background and not too
    often."""

    def __init__(self) -> None:
        self._wanted = threading.Event()

    def ask(self) -> None:
        """Request a recount; called by the adapter."""
        self._wanted.set()

    def take(self) -> bool:
        """Whether a recount was requested since the last call; called by the tier."""
        wanted = self._wanted.is_set()
        if wanted:
            self._wanted.clear()
        return wanted


@dataclass(frozen=True)
class AdapterContext:
    """What an adapter is built with, besides its settings.

    Attributes:
        tier: The tier's name in the settings, for messages.
        server: The server's name; empty outside of one.
        connections: The number of concurrent requests that the operator allows (`l2.NAME.connections`).
        recount: Ask it if the adapter finds that the medium has changed unexpectedly.
        run_parallel: Used by `parallel`.
    """

    tier: str
    connections: int = 4
    recount: Recount = field(default_factory=Recount)
    run_parallel: Callable[[Sequence[Callable[[], Any]]], list[Any]] = field(default=_one_after_the_other)
    server: str = ""

    def parallel(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        """Run the calls, at most `connections` at a time; results in order. The first exception is raised after all
        calls have ended, so no buffer is in use when this returns."""
        return self.run_parallel(calls)


class L2Adapter(ABC):
    """Speaks to one medium. A few blocking batch methods; threads, retries, format and eviction are the server's.

    Built as `Adapter(settings, context)`, where `settings` is an instance of the settings model that its ComponentSpec
    names. Its constructor must not need the medium: a tier that is down at the start is used as soon as it is up. Keys
    are opaque, 1 to 64 bytes, of any value. Every batch method answers in the order of its items, one answer each, and
    sets its time-outs from `deadline` (`time.monotonic()` seconds): what is not done by then is FAILED and retryable.
    If the medium fails as a whole, it may raise `TierError`. Buffers belong to the caller: do not keep them, and never
    write to a source. Turn off retries in the underlying library: the lane retries what the outcome allows. Keep work
    that holds the GIL short.

    Calls overlap, unless `thread_safe` is False: up to two of `exists` and `scan`, four of `load`, two of `store` and
    `set_aside`, and two of `delete`, or `connections` of each if that is less; for each call that hangs past its
    deadline one more, two more of each kind at most. A call may use `AdapterContext.parallel` inside. `close` comes
    after the last of them has returned; the constructor and `medium` come before the first.

    A server names a key once in a batch. A key that is named twice is answered twice, as by two calls; of two stores of
    it one is kept, completely. A deadline may be days away, or infinite: reduce it to what your library can express.
    `usage`, `medium`, `try_to_lead` and `close` have none: they return within a second, whatever the medium does. When
    a call returns, late or not, nothing of the adapter may use its buffers any more. Changes by another adapter or
    process must be seen at once: nothing read from the medium, including a missing key, may be cached for the next
    call.

    An object is one object, also where the medium needs several pieces for it: only its last step makes it visible to
    `load`, `exists` and `scan`, and a `delete` takes it away in one step, too. Pieces of a store that was killed, or
    that another store overtook, are no object: nobody lists or counts them, they do not stay for good (a lease, a time
    to live, the next store of the key), and whoever removes them spares those of a store that is under way. A delete
    that meets a store of its key comes before it or after it: then nothing is there, or all of the new object.
    """

    capabilities: ClassVar[Capabilities]

    @abstractmethod
    def __init__(self, settings: Any, context: AdapterContext) -> None:
        """Open nothing, wait for nothing. `capabilities` is an attribute of the class, where `lmcache-core plugins`
        reads it; if it depends on the settings (for example the largest object), set it on the instance here: the
        server reads that."""

    @abstractmethod
    def store(self, items: Sequence[StoreItem], deadline: float) -> Sequence[Outcome]:
        """Publish each object whole or not at all, replacing one of the same key.

        A reader sees the former object until it sees this one: never neither, never a mixture, even if a process is
        killed meanwhile. DONE, FULL, THROTTLED or FAILED for each. A FAILED object may have been stored anyway: the
        server asks `exists`.
        """

    @abstractmethod
    def exists(self, keys: Sequence[bytes], deadline: float) -> Sequence[bool]:
        """Whether each key is there now. Refreshes recency if the medium evicts by itself.

        Raises `TierError` if the medium cannot be asked: never answer False for an unknown key. The server also uses
        this to probe whether a failed tier is back.
        """

    @abstractmethod
    def load(self, items: Sequence[LoadItem], deadline: float) -> Sequence[Outcome]:
        """Fill the buffers of each item, or answer MISS / DAMAGED / FAILED for it.

        DONE, MISS, DAMAGED, THROTTLED or FAILED for each. An object with more bytes than the buffers hold is DAMAGED.
        After an answer that is not DONE the buffers' content is undefined. Never deletes or moves an object, whatever
        it looks like: a read proves nothing about what the medium holds.
        """

    def load_headers(self, items: Sequence[LoadItem], deadline: float) -> Sequence[Outcome]:
        """As `load`, but only the first buffer of each item has to be filled, and `nbytes` may stop there. Tells the
        server whose an object is before it is evicted. Loads it whole, unless the medium can give a part.
        """
        return self.load(items, deadline)

    @abstractmethod
    def delete(self, keys: Sequence[bytes], deadline: float) -> Sequence[Outcome]:
        """Remove each object: DONE, THROTTLED or FAILED. One that is not there is DONE: deletes are idempotent."""

    def set_aside(self, keys: Sequence[bytes], deadline: float, versions: Sequence[str] = ()) -> Sequence[Outcome]:
        """Remove damaged objects from service. Deletes them, unless the medium has a better place for them.

        `versions`: those that loads of these keys gave; never passed to an adapter whose loads give none. An object
        that has another version by now stays where it is, and is DONE: somebody has replaced it.
        """
        return self.delete(keys, deadline)

    @abstractmethod
    def usage(self) -> Usage:
        """What is stored now, as far as the medium can tell cheaply; within a second, because there is no deadline.

        The server never calls it: it counts with `scan` and its own stores. Commands call it (`verify` and `copy`, to
        show their progress; `check`, for the tier's capacity). Raises `TierError` if the medium cannot be asked.
        """

    @abstractmethod
    def scan(self, cursor: str | None, deadline: float) -> ScanPage:
        """One page of the stored objects; the first with cursor None. Rebuilds the server's accounts at its start.

        Objects that exist throughout the scan are listed exactly once; those stored or deleted meanwhile may be listed
        or not. A cursor is text with the same meaning for every adapter on the medium, also in another process: it
        outlives its instance, and the object that it points to. A failed page is requested again. Raises `TierError` if
        the medium cannot be asked: never answer with an empty page instead.
        """

    def medium(self) -> str | None:
        """A name for the place of the objects, the same for every adapter that stores in the same place (one directory;
        one bucket and prefix; one database and key prefix), without secrets. None: no other adapter can share it.

        Asked once, before anything else, and without access to the medium. A medium can only be one tier: two would
        each consider the other's objects their own, and the capacity of one would empty the other.
        """
        return None

    def try_to_lead(self) -> bool:
        """Whether this adapter is the one that keeps headroom on a medium shared by several servers.

        Asked before each scan. On a medium that allows an election (a lock, a lease) it returns True for one adapter at
        a time, and for another once that one is gone. Otherwise it returns True for all: deletes are idempotent, and
        the only cost is that a part is sometimes evicted twice.
        """
        return True

    def status(self) -> dict[str, Any]:
        """What an operator wants to know of the medium now, as plain values: it stands in `status` under the tier's
        `adapter`, and its numbers become metrics (`tier_adapter_figures`). On the server's loop, so it must be cheap:
        it waits for nothing and asks no medium. A table `parts` has a row for each part of the medium, by its name
        (another node, for example), which may come and go; other names must not change while the server runs."""
        return {}

    def places(self, keys: Sequence[bytes]) -> Sequence[str]:
        """Where on the medium each key was found by the last `exists`, in words for `explain` ("on node b"); empty: not
        known, or a medium has only one place. From memory, on the server's loop, as `status`."""
        return [""] * len(keys)

    def check(self, deadline: float) -> Iterator[Finding]:
        """What `lmcache-core check` reports before a server starts. Stores, looks up, lists, loads, compares and
        deletes one object under a key that nobody else has; of a medium that stores or deletes nothing it only asks
        whether the object is there. Raises `TierError` for the first thing that goes wrong, with a `cure` if the
        adapter knows one; the object is deleted in that case, too.

        Extend it by what else can be wrong with your medium (`yield from super().check(deadline)`). A finding without a
        subject is about the tier.
        """
        key = _CHECK_PREFIX + os.urandom(16)
        if not (self.capabilities.stores and self.capabilities.delete):
            self.exists([key], deadline)
            why = "deletes" if self.capabilities.stores else "stores"
            yield Finding(True, "", f"it answers; nothing was stored, since it {why} nothing")
            return
        content = os.urandom(min(_CHECK_BYTES, self.capabilities.object_bytes_max or _CHECK_BYTES))
        with contextlib.ExitStack() as unless_well:
            unless_well.callback(self._clear_away, key, deadline)  # a failed store may have stored it
            self._there_and_back(key, content, deadline)
            unless_well.pop_all()
        _expect_done(self.delete([key], deadline)[0])
        yield Finding(True, "", "an object was stored, loaded and deleted")

    def _there_and_back(self, key: bytes, content: bytes, deadline: float) -> None:
        _expect_done(self.store([StoreItem(key, [memoryview(content)])], deadline)[0])
        if not self.exists([key], deadline)[0]:
            raise TierError("an object that was just stored is not found")
        if self.capabilities.scan:
            self.scan(None, deadline)
        back = bytearray(len(content))
        loaded = self.load([LoadItem(key, [memoryview(back)])], deadline)[0]
        if loaded.result is not Result.DONE and not loaded.error:
            raise TierError(f"an object that was just stored came back as {loaded.result}")
        _expect_done(loaded)
        if back != content:
            raise TierError("an object came back with different bytes", cure="do not use this medium", retryable=False)

    def _clear_away(self, key: bytes, deadline: float) -> None:
        with contextlib.suppress(TierError):  # what went wrong before says more
            self.delete([key], deadline)

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


def _expect_done(outcome: Outcome) -> None:
    if outcome.result is not Result.DONE:
        raise outcome.as_error()
