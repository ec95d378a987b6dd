"""The contract of operations: request types that a package adds to a server.

A plugin offers an operation (`Kind.OPERATION`), and a table with its name in the settings, `[operations.NAME]`, enables
it. Its request and its reply are structs of its own, which travel inside one message of the protocol, so the protocol
itself does not change.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, TypeVar

import msgspec

from lmcache_core.errors import LimitError
from lmcache_core.limits import EXPLAIN_KEYS_MAX, OPERATION_SAMPLE_BYTES_MAX

if TYPE_CHECKING:
    from lmcache_core.server.l1 import L1

__all__ = [
    "ObjectInfo",
    "OperationContext",
    "PoolView",
    "ServerOperation",
]

_T = TypeVar("_T")


class ObjectInfo(NamedTuple):
    """An object that is ready in the pool.

    Attributes:
        nbytes: Bytes of the object.
        dtype: Of its elements.
        shape: In elements.
        memory_format: One letter for each axis, if there are any.
        checksum: xxh3_64 of its bytes, if the writer sent it; else None.
        holds: Leases, promises and pins on it.
        incarnation: The number of this object: a successor under its key has another.
    """

    nbytes: int
    dtype: str
    shape: tuple[int, ...]
    memory_format: str
    checksum: int | None
    holds: int
    incarnation: int


class PoolView:
    """What an operation may read. Only on the loop's thread; from a lane, through `OperationContext.on_loop`."""

    def __init__(self, l1: L1) -> None:
        self._l1 = l1

    def describe(self, namespace: int, keys: Sequence[bytes]) -> list[ObjectInfo | None]:
        """For each key the object that is ready, or None. Raises `LimitError` for more than 256 keys. This does not
        count as a use: the order of eviction stays."""
        if len(keys) > EXPLAIN_KEYS_MAX:
            raise LimitError(f"{len(keys)} keys at once, and the limit is {EXPLAIN_KEYS_MAX}: split the batch")
        found = {item.key: item for item in self._l1.kernel.kept(namespace, keys)}
        return [None if (item := found.get(key)) is None else self._info(item) for key in keys]

    def sample(self, namespace: int, key: bytes, first: int, nbytes: int) -> bytes | None:
        """Bytes of an object from `first` on, as many as there are; None if it is not ready. Raises `LimitError` for
        more than 4 KiB. A worker may have overwritten them, so do not trust them."""
        if first < 0 or not 0 <= nbytes <= OPERATION_SAMPLE_BYTES_MAX:
            raise LimitError(
                f"a sample of {nbytes} bytes from {first} on: at most {OPERATION_SAMPLE_BYTES_MAX}, from 0"
            )
        for item in self._l1.kernel.kept(namespace, [key]):
            layout = self._l1.layouts.get(item.layout_id)
            if layout is not None:
                return bytes(self._l1.view(item.offset, layout.nbytes)[first : first + nbytes])
        return None

    def _info(self, item: Any) -> ObjectInfo | None:
        layout = self._l1.layouts.get(item.layout_id)
        if layout is None:
            return None  # adopted, and no session has registered its layout yet
        return ObjectInfo(
            layout.nbytes, layout.dtype, tuple(layout.shape), layout.memory_format, item.checksum, item.holds,
            item.generation,
        )  # fmt: skip


class OperationContext:
    """What an operation knows about its server. `state_dir` exists or can be made."""

    def __init__(self, server: str, state_dir: Path, on_loop: Callable[[Callable[[PoolView], Any]], Any]) -> None:
        self.server = server  # its name
        self.state_dir = state_dir
        self._on_loop = on_loop

    def on_loop(self, look: Callable[[PoolView], _T]) -> _T:
        """The result of `look`, called on the loop's thread; it must be quick (2 ms), and may raise. A lane waits for
        it; on the loop itself it is called at once."""
        found: _T = self._on_loop(look)
        return found


class ServerOperation(ABC):
    """Built before the server answers requests, as `factory(settings, context)`; raise errors there.

    `request` and `reply` are msgspec structs. Requests with unknown fields or wrong types are refused before `handle`
    is called: `forbid_unknown_fields=True` is part of the contract.

    `runs` says where: "loop", between two messages of others, for work that takes less than 2 ms, and "lane", on one of
    two threads shared by all operations, for everything else; only other operations wait behind it there.

    Only the server's own user (and root) may call operations, over the lifeline.
    """

    request: ClassVar[type[msgspec.Struct]]
    reply: ClassVar[type[msgspec.Struct]]
    runs: ClassVar[Literal["loop", "lane"]] = "lane"

    @abstractmethod
    def handle(self, request: Any) -> msgspec.Struct:
        """Returns the reply. Raises `UsageError` or another `CacheError` with a message for the caller; any other
        exception is a fault, which is logged, and the server continues."""

    def close(self) -> None:  # noqa: B027  # optional
        """The server stops: no more calls follow."""
