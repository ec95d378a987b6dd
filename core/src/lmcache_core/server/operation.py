"""The contract of operations: request types that a package adds to a server.

A plugin offers an operation (`Kind.OPERATION`), and a table with its name in the settings, `[operations.NAME]`, enables
it; with `ComponentSpec(always=True)` every server that has the package has it. Its request and its reply are structs of
its own, which travel inside one message of the protocol, so the protocol itself does not change.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, TypeVar

import msgspec

from lmcache_core.errors import LimitError
from lmcache_core.limits import EXPLAIN_KEYS_MAX, OPERATION_SAMPLE_BYTES_MAX

if TYPE_CHECKING:
    from lmcache_core.clock import Clock
    from lmcache_core.pool.layout import Layout
    from lmcache_core.server.pool.l1 import L1
    from lmcache_core.server.pool.namespaces import Namespaces
    from lmcache_core.settings.model import Settings
    from lmcache_core.tiers.object.epochs import Epochs

__all__ = [
    "AnsweredRequest",
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


class AnsweredRequest(NamedTuple):
    """A request to the server, with its answer.

    Attributes:
        asked_at_s: When it came, on the server's clock.
        took_s: Until its answer.
        session: A number for each client.
        kind: `lookup`, `store`, `retrieve` or `clear`.
        namespace: 64 bits; 0 for a clear of everything.
        nbytes: Bytes of one object; 0 if unknown.
        keys: 32 bytes each.
        prefix: A lookup of keys that count up to the first miss.
        hits: Of a lookup or a retrieve, or slots granted to a store.
        statuses: A status for each key, as the protocol has them; empty if there was none, also because the client
            died before its answer, or nobody watches any more.
    """

    asked_at_s: float
    took_s: float
    session: int
    kind: str
    namespace: int
    nbytes: int
    keys: bytes
    prefix: bool
    hits: int
    statuses: bytes


class PoolView:
    """The pool as operations see it. Only on the loop's thread; from a lane, through `OperationContext.on_loop`."""

    def __init__(self, l1: L1, namespaces: Namespaces, epochs: Epochs) -> None:
        self._l1 = l1
        self._namespaces = namespaces
        self._epochs = epochs

    @property
    def nbytes(self) -> int:
        """Bytes of the pool, for objects."""
        return self._l1.segment.info.data_bytes

    def namespaces_of(self, label: str) -> list[int]:
        """The ids of all namespaces that have this label, in use or not."""
        return self._namespaces.labelled(label)

    def layout(self, namespace: int) -> Layout | None:
        """The layout of the namespace's objects; None if no session uses it and the pool has nothing of it."""
        layout_id = self._namespaces.layout_of(namespace)
        return None if layout_id is None else self._l1.layouts.get(layout_id)

    def epoch(self, namespace: int) -> int | None:
        """The epoch of what the pool has of a namespace, as in the keys of tiers. None: a clear is under way, and there
        is something of an earlier one."""
        cleared = self._l1.segment.clears == self._epochs.digest
        return self._epochs.of(namespace) if cleared else None

    def tenant(self, namespace: int) -> str:
        """The tenant in whose quota the namespace counts; empty for those without one."""
        return self._l1.kernel.tenant_of(namespace)

    def used(self, namespace: int, keys: Sequence[bytes]) -> list[bytes]:
        """Count a use of each of these keys that is ready, in the order of a prompt. Returns those. Raises `LimitError`
        for more than 128 keys."""
        there = [item.key for item in self._l1.kernel.kept(namespace, _page(keys))]
        self._l1.kernel.used([(namespace, key) for key in reversed(there)], self._l1.clock.now)
        return there

    def describe(self, namespace: int, keys: Sequence[bytes]) -> list[ObjectInfo | None]:
        """For each key the object that is ready, or None. Raises `LimitError` for more than 128 keys. This does not
        count as a use: the order of eviction stays."""
        found = {item.key: item for item in self._l1.kernel.kept(namespace, _page(keys))}
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


def _page(keys: Sequence[bytes]) -> Sequence[bytes]:
    if len(keys) > EXPLAIN_KEYS_MAX:
        raise LimitError(f"{len(keys)} keys at once, and the limit is {EXPLAIN_KEYS_MAX}: split the batch")
    return keys


class OperationContext:
    """What an operation knows about its server. `state_dir` exists or can be made; `clock` is that of its loop."""

    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        on_loop: Callable[[Callable[[PoolView], Any]], Any],
        watch: Callable[[Callable[[AnsweredRequest], None]], Callable[[], None]],
    ) -> None:
        self.server = settings.name
        self.state_dir = settings.state_dir
        self.settings = settings
        self.clock = clock
        self._on_loop = on_loop
        self._watch = watch

    def on_loop(self, look: Callable[[PoolView], _T]) -> _T:
        """The result of `look`, called on the loop's thread; it must be quick (2 ms), and may raise. A lane waits for
        it; on the loop itself it is called at once."""
        found: _T = self._on_loop(look)
        return found

    def watch(self, answered: Callable[[AnsweredRequest], None]) -> Callable[[], None]:
        """Have `answered` called with each lookup, store, retrieve and clear from now on, on the loop's thread: it must
        be quick. Meanwhile every hit costs its client a call, or it would not be seen. Returns what ends that; at the
        end, and at the server's, `answered` gets those that still wait, without a status. If it raises, it is not
        called again. Raises `UsageError` if somebody else watches."""
        end = self._on_loop(lambda view: self._watch(answered))
        return lambda: self._on_loop(lambda view: end())


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

    def status(self) -> dict[str, Any]:
        """Plain values for `status`, beside its counts of calls: on the loop's thread, and cheap. Names must not change
        while the server runs."""
        return {}

    def close(self) -> None:  # noqa: B027  # optional
        """The server stops: no more calls follow."""
