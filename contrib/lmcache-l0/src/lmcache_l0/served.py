"""`ServedCache`: values that all workers of a server share, read from the server's L0 if they are hot, else from L1.
This class does not promote: the server counts what all workers read, and decides.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from lmcache_core.errors import UsageError
from lmcache_core.tokens.namespace import Namespace
from lmcache_l0 import _table
from lmcache_l0.cache import SharedCache
from lmcache_l0.errors import TableBusyError, TableError, ValueTooLargeError
from lmcache_l0.records import HEAD, SHORT_BYTES_MAX, l1_key, prefix_of, record_layout

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

    from lmcache_core import Client, Status

MAX_VALUE_SIZE = 4096 - HEAD.size  # with its head, a page of L1
log = logging.getLogger(__name__)
_NONE_SEEN = -1
_NO_TABLE = {"path": "", "table_id": 0}
_Default = TypeVar("_Default")


class ServedCache:
    """Values under names: str (encoded as UTF-8) or bytes, of 1 byte or more. Thread-safe; a forked child creates its
    own, with its own client.

    Caches of one `name`, `max_value_size` (bytes, up to 1 MiB), `weights_version` and `tenant_salt` on one server share
    their values. Each takes `max_value_size` and 16 bytes in L1, rounded up to 4 KiB, whatever its own size is. A name
    has one value for as long as L1 has it: to give it another, clear, or use another `weights_version`. If the server
    keeps no table, or one that this process may not attach to (`why_no_l0` says so), only L1 is read.
    """

    def __init__(
        self,
        client: Client,
        name: str = "l0",
        *,
        max_value_size: int = MAX_VALUE_SIZE,
        weights_version: str = "",
        tenant_salt: str = "",
    ) -> None:
        layout = record_layout(max_value_size)
        self.namespace = Namespace(name, layout, weights_version=weights_version, tenant_salt=tenant_salt)
        self.max_value_size = max_value_size
        self.why_no_l0 = "no server has answered yet"
        self._client = client
        self.prefix = prefix_of(self.namespace.id)
        self._l0: SharedCache | None = None
        self._table_id = _NONE_SEEN  # of the table that was attached, or tried; 0: the server has none
        self._closed = False
        self._following = threading.Lock()

    @property
    def l0(self) -> SharedCache | None:
        """The server's table, once something was read; only for inspection."""
        return self._l0

    # --- reading ------------------------------------------------------------------------------------------------

    def get(self, key: str | bytes, default: _Default | None = None) -> bytes | _Default | None:
        """The value's bytes, or `default` if neither L0 nor L1 has it (or no server answers)."""
        # inlined here and below: a call would cost as much as the get
        name = key.encode() if isinstance(key, str) else bytes(key)
        l0 = self._l0
        if l0 is not None:
            try:
                value = l0.get(self.prefix + (name if len(name) <= SHORT_BYTES_MAX else l1_key(name)))
            except TableBusyError:  # rewritten faster than it can be copied
                value = None
            if value is not None:
                return value
        record = self._records([name])[0]
        return default if record is None else _value(record)

    def get_many(self, keys: Iterable[str | bytes]) -> list[bytes | None]:
        """Several `get` at once: what L0 lacks is read from L1 in one batch."""
        names = [key.encode() if isinstance(key, str) else bytes(key) for key in keys]
        found: list[bytes | None] = [None] * len(names)
        l0 = self._l0
        if l0 is not None:
            with contextlib.suppress(TableBusyError):  # as above
                prefix = self.prefix
                found = l0.get_many(
                    [prefix + (name if len(name) <= SHORT_BYTES_MAX else l1_key(name)) for name in names]
                )
        missing = [at for at, value in enumerate(found) if value is None]
        if missing:
            for at, record in zip(missing, self._records([names[at] for at in missing]), strict=True):
                found[at] = None if record is None else _value(record)
        return found

    def get_numpy(
        self, key: str | bytes, shape: int | tuple[int, ...], dtype: npt.DTypeLike, *, snapshot: bool = False
    ) -> npt.NDArray[Any] | None:
        """The value as an array of this shape and dtype; None if it is not there. From L0 it is a read-only view of the
        table's memory, like that of `SharedCache.get_numpy`: call `valid()` after the work. From L1 it is a read-only
        array with its own memory, whose `valid()` is always True. With `snapshot=True` it has its own memory and may be
        written. Raises UsageError if the value has another dtype or size.
        """
        return self._array(key, shape, dtype, snapshot, False)

    def get_torch(
        self, key: str | bytes, shape: int | tuple[int, ...], dtype: torch.dtype, *, snapshot: bool = False
    ) -> torch.Tensor | None:
        """The value as a tensor of this shape and dtype; None if it is not there. From L0 it is the table's own memory,
        like that of `SharedCache.get_torch`: call `valid()` after the work, and do not write into it. From L1, and with
        `snapshot=True`, it has its own memory, and `valid()` is always True. Raises UsageError if the value has another
        dtype or size.
        """
        from lmcache_l0.tensors import tensor_of

        return tensor_of(lambda stored: self._array(key, shape, stored, snapshot, not snapshot), dtype)

    # --- writing ------------------------------------------------------------------------------------------------

    def set(self, key: str | bytes, value: bytes) -> Status:
        """Store bytes under a name that L1 does not have. `EXISTS`: L1 has a value, and keeps it. Other statuses are
        L1's own: nothing was stored. Raises ValueTooLargeError."""
        return self._store([_name(key)], [self._record(memoryview(value).cast("B"), 0)])[0]

    def set_numpy(self, key: str | bytes, array: np.ndarray[Any, Any]) -> Status:
        """Store a C-contiguous array, and its dtype with it. Otherwise as `set`."""
        return self._store([_name(key)], [self._record_of_array(array)])[0]

    def set_many(self, items: Mapping[str, bytes] | Mapping[bytes, bytes]) -> list[Status]:
        """Store several, in order, in one batch; returns the status of each."""
        records = [self._record(memoryview(value).cast("B"), 0) for value in items.values()]
        return self._store([_name(key) for key in items], records)

    def clear(self) -> int:
        """Remove all values of this cache, from L1 and L0: once this returns nobody reads one of them. Returns how many
        L1 had. Raises what `Client.clear` raises, and then some may still be there."""
        return self._client.clear(self.namespace).objects

    def close(self) -> None:
        """Detach from the table; views stay readable. The client stays open."""
        with self._following:
            if self._l0 is not None:
                self._l0.close()
            self._l0, self._closed, self.why_no_l0 = None, True, "the cache was closed"

    # --- inside -------------------------------------------------------------------------------------------------

    def _store(self, names: Sequence[bytes], records: Sequence[bytes]) -> list[Status]:
        keys = [l1_key(name) for name in names]
        return list(self._client.store(keys, records, namespace=self.namespace).statuses)

    def _array(
        self, key: str | bytes, shape: int | tuple[int, ...], dtype: npt.DTypeLike, snapshot: bool, writable: bool
    ) -> npt.NDArray[Any] | None:
        name = _name(key)
        l0 = self._l0
        if l0 is not None:
            try:
                array = l0.get_numpy(
                    self.prefix + (name if len(name) <= SHORT_BYTES_MAX else l1_key(name)),
                    shape,
                    dtype,
                    snapshot=snapshot,
                    writable=writable,
                )
            except TableBusyError:
                array = None
            if array is not None:
                return array
        record = self._records([name])[0]
        return None if record is None else _array(key, record, shape, dtype, snapshot=snapshot or writable)

    def _records(self, names: Sequence[bytes]) -> list[bytearray | None]:
        nbytes = self.namespace.layout.nbytes
        records = [bytearray(nbytes) for _ in names]
        keys = [l1_key(name) for name in names]
        read = self._client.retrieve(keys, records, namespace=self.namespace, prefix=False)
        self._follow()
        return [record if status.name == "HIT" else None for record, status in zip(records, read.statuses, strict=True)]

    def _record(self, value: memoryview, tag: int) -> bytes:
        if len(value) > self.max_value_size:
            raise ValueTooLargeError(
                f"a value of {len(value):,} bytes, and the cache {self.namespace.model!r} takes "
                f"{self.max_value_size:,}: give it a larger max_value_size, in every process"
            )
        return HEAD.pack(len(value), tag) + value + bytes(self.max_value_size - len(value))

    def _record_of_array(self, array: np.ndarray[Any, Any]) -> bytes:
        if not array.flags.c_contiguous:
            raise UsageError("set_numpy takes C-contiguous arrays: use np.ascontiguousarray(array)")
        return self._record(memoryview(array.tobytes()), _table.tag_of(array.dtype))

    def _follow(self) -> None:
        """Attach to the table that the server offers now. The offer was fetched a moment ago, so this does not wait."""
        companions = self._client.companions()
        if companions is None:
            return  # no server: the attached table was right when it died, and nobody can make it wrong
        offer = companions.get("l0", _NO_TABLE)
        if offer["table_id"] == self._table_id:
            return
        with self._following:
            if self._closed or offer["table_id"] == self._table_id:
                return
            self._table_id = offer["table_id"]
            self._l0 = None  # views and calls in progress keep the old one
            if not self._table_id:
                self.why_no_l0 = "the server keeps no table: its settings have no [l0]"
                return
            try:
                # Writable, because reads are counted in it.
                table = SharedCache(offer["path"], create=False)
            except (TableError, OSError) as error:
                self.why_no_l0 = f"the server's table cannot be attached: {error}"
                log.warning("L1 alone is read: %s", self.why_no_l0)
                return
            if table.table_id == self._table_id:
                self._l0, self.why_no_l0 = table, ""
            else:
                self.why_no_l0 = f"{offer['path']} is not the server's table any more"
                table.close()


def _name(key: str | bytes) -> bytes:
    return key.encode() if isinstance(key, str) else bytes(key)


def _value(record: bytearray) -> bytes:
    return bytes(record[HEAD.size : HEAD.size + HEAD.unpack_from(record)[0]])


def _array(
    key: str | bytes, record: bytearray, shape: int | tuple[int, ...], dtype: npt.DTypeLike, *, snapshot: bool
) -> npt.NDArray[Any]:
    import numpy as np

    from lmcache_l0.arrays import ArrayView

    length, tag = HEAD.unpack_from(record)
    wanted = np.dtype(dtype)
    if tag not in (0, _table.tag_of(wanted)):
        raise UsageError(
            f"the value of {key!r} was stored as another type and is asked for as {wanted!r}: ask with the dtype that "
            "it was stored with"
        )
    flat = np.frombuffer(_value(record), wanted) if length % wanted.itemsize == 0 else None
    sides = (shape,) if isinstance(shape, int) else tuple(shape)
    if flat is None or flat.size != np.prod(sides, dtype=np.int64):
        raise UsageError(f"the value of {key!r} has {length:,} bytes, which is no {wanted!r} of shape {sides}")
    array = flat.reshape(sides)
    return array.copy() if snapshot else array.view(ArrayView)
