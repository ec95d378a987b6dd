"""What every author of an adapter for a blocking library would write again: errors as values, `TierError` after
`close`, scans page by page, connections that are used again, and, where the library moves one object at a time, a batch
object by object until its deadline."""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import ClassVar, Generic, Protocol, TypeVar

from lmcache_core.errors import TierError
from lmcache_core.tiers.contract import (
    AdapterContext,
    L2Adapter,
    LoadItem,
    Outcome,
    Result,
    ScanEntry,
    ScanPage,
    StoreItem,
    Usage,
)

__all__ = ["BatchAdapter", "BlockingAdapter", "Connections", "filled"]

Item = TypeVar("Item")
Answer = TypeVar("Answer")


class Closable(Protocol):
    """What has an end."""

    def close(self) -> object: ...


Connection = TypeVar("Connection", bound=Closable)

_SCAN_PAGE_ENTRIES = 1000
_LATE = TierError("not started by its deadline")


class BatchAdapter(L2Adapter):
    """An adapter whose library moves whole batches: `together` makes an outcome for each object of what it raises, and
    `whole` a `TierError`. Both take what the call does, in words for a message: "store", "look up", …

    Attributes:
        errors: What the medium's library raises. Anything else is a fault of the adapter, but for `TimeoutError`: no
            time was left.
        cure: What an operator can do if the medium does not answer. The tier's name replaces `NAME` in `l2.NAME`.
    """

    errors: ClassVar[tuple[type[Exception], ...]] = ()
    cure: ClassVar[str] = ""

    def __init__(self, context: AdapterContext, *parts: Closable) -> None:
        """`parts`: what is closed with the adapter."""
        self._context = context
        self._tier = context.tier
        self._parts = parts
        self._closed = False

    def refused(self, what: str, error: Exception) -> Outcome:
        """What one of `errors` means for an object. By default a second try may do."""
        return Outcome.of(
            TierError(
                f"tier {self._tier!r} cannot {what}: {error}", cure=self.cure.replace("l2.NAME", f"l2.{self._tier}")
            )
        )

    def entries_after(self, key: bytes, count: int, deadline: float) -> Sequence[ScanEntry]:
        """The next objects in the order of their keys, `count` at most. For `scan`, unless the adapter has its own."""
        raise TierError(f"tier {self._tier!r}: the medium lists nothing", retryable=False)

    def scan(self, cursor: str | None, deadline: float) -> ScanPage:
        """In the order of the keys; the cursor is the last key of the page, whether or not it is still there."""
        last = bytes.fromhex(cursor or "")
        entries = self.whole("scan", lambda: self.entries_after(last, _SCAN_PAGE_ENTRIES, deadline))
        return ScanPage(entries, entries[-1].key.hex() if len(entries) >= _SCAN_PAGE_ENTRIES else None)

    def usage(self) -> Usage:
        """Not known."""
        self.check_open()
        return Usage(None, None)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            for part in self._parts:
                part.close()

    def together(self, what: str, count: int, call: Callable[[], list[Outcome]]) -> list[Outcome]:
        """The outcomes of a call for `count` objects, which is done for all of them or for none."""
        self.check_open()
        try:
            return call()
        except self.errors as error:
            return [self.refused(what, error)] * count
        except TimeoutError:
            return [Outcome.of(_LATE)] * count

    def whole(self, what: str, call: Callable[[], Answer]) -> Answer:
        """The answer of a call that has no outcomes. One of `errors` becomes a `TierError`."""
        self.check_open()
        try:
            return call()
        except self.errors as error:
            raise self.refused(what, error).as_error() from error
        except TimeoutError as error:
            raise TierError(f"tier {self._tier!r} cannot {what}: {_LATE}") from error

    def check_open(self) -> None:
        """Raises `TierError` after `close`."""
        if self._closed:
            raise TierError(f"tier {self._tier!r} is closed", retryable=False)


class BlockingAdapter(BatchAdapter):
    """An adapter that moves one object at a time: write `store_one`, `load_one`, `delete_one`, `exists_one` and
    `entries_after`. A call that the medium takes for many objects at once goes through `whole`.

    Attributes:
        parallel: The objects of a batch move at once, up to the tier's `connections`.
    """

    parallel: ClassVar[bool] = False

    @abstractmethod
    def store_one(self, item: StoreItem, deadline: float) -> Outcome | None:
        """Publish one object, whole or not at all. None: DONE. It is no larger than `object_bytes_max`."""

    @abstractmethod
    def load_one(self, item: LoadItem, deadline: float) -> Outcome:
        """Fill the item's buffers (`filled`), or answer MISS."""

    def delete_one(self, key: bytes, deadline: float) -> Outcome | None:
        """Remove one object, or find none; None: DONE. For `delete`, unless the adapter has its own."""
        raise NotImplementedError(f"{type(self).__name__} has neither `delete_one` nor a `delete` of its own")

    def exists_one(self, key: bytes, deadline: float) -> bool:
        """For `exists`, unless the adapter has its own."""
        raise NotImplementedError(f"{type(self).__name__} has neither `exists_one` nor an `exists` of its own")

    def store(self, items: Sequence[StoreItem], deadline: float) -> Sequence[Outcome]:
        return self.each("store", self._store_one, items, deadline)

    def exists(self, keys: Sequence[bytes], deadline: float) -> Sequence[bool]:
        return self.whole("look up", lambda: self._run(lambda key: self.exists_one(key, deadline), keys))

    def load(self, items: Sequence[LoadItem], deadline: float) -> Sequence[Outcome]:
        return self.each("load", self.load_one, items, deadline)

    def delete(self, keys: Sequence[bytes], deadline: float) -> Sequence[Outcome]:
        return self.each("delete", self.delete_one, keys, deadline)

    def each(
        self, what: str, call: Callable[[Item, float], Outcome | None], items: Sequence[Item], deadline: float
    ) -> list[Outcome]:
        """The outcome of the call for each item. What is not begun by the deadline is FAILED."""
        self.check_open()

        def one(item: Item) -> Outcome:
            if time.monotonic() >= deadline:
                return Outcome.of(_LATE)
            try:
                return call(item, deadline) or Outcome(Result.DONE)
            except self.errors as error:
                return self.refused(what, error)
            except TimeoutError:
                return Outcome.of(_LATE)

        return self._run(one, items)

    def _store_one(self, item: StoreItem, deadline: float) -> Outcome:
        most = self.capabilities.object_bytes_max
        if most is not None and item.nbytes > most:
            return Outcome(Result.FAILED, error=f"{item.nbytes:,} bytes, and an object has {most:,} here at most")
        return self.store_one(item, deadline) or Outcome(Result.DONE, item.nbytes)

    def _run(self, call: Callable[[Item], Answer], items: Sequence[Item]) -> list[Answer]:
        if self.parallel:
            return self._context.parallel([partial(call, item) for item in items])
        return [call(item) for item in items]


class Connections(Generic[Connection]):
    """Connections that are not in use, and as many more as threads ask for. `connect(deadline)` makes one, and
    `prepare(connection, deadline)` is what has to be done on each new one. An error closes the connection of its call,
    since nobody knows what has become of it; those in `keeps` do not."""

    def __init__(
        self,
        connect: Callable[[float], Connection],
        prepare: Callable[[Connection, float], object] = lambda connection, deadline: None,
        keeps: tuple[type[Exception], ...] = (),
    ) -> None:
        self._connect = connect
        self._prepare = prepare
        self._keeps = keeps
        self._lock = threading.Lock()
        self._idle: list[Connection] = []
        self._closed = False

    @contextmanager
    def one(self, deadline: float) -> Iterator[Connection]:
        """For one call."""
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        new, connection = connection is None, connection or self._connect(deadline)
        try:
            if new:
                self._prepare(connection, deadline)
            yield connection
        except BaseException as error:
            if isinstance(error, self._keeps):
                self._give_back(connection)
            else:
                connection.close()
            raise
        self._give_back(connection)

    def _give_back(self, connection: Connection) -> None:
        with self._lock:
            if not self._closed:
                self._idle.append(connection)
                return
        connection.close()

    def close(self) -> None:
        """Close those that are not in use, and the others when they are given back."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()


def filled(item: LoadItem, content: bytes | memoryview) -> Outcome:
    """Of a load: `content` in the buffers of `item`, or DAMAGED if they cannot hold it."""
    room, content = sum(buffer.nbytes for buffer in item.buffers), memoryview(content)
    if content.nbytes > room:
        return Outcome(Result.DAMAGED, error=f"it has {content.nbytes:,} bytes, and {room:,} were expected")
    at = 0
    for buffer in item.buffers:
        part = content[at : at + buffer.nbytes]
        buffer[: part.nbytes] = part
        at += part.nbytes
    return Outcome(Result.DONE, content.nbytes)
