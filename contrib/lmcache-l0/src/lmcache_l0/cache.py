"""`SharedCache`: opens or creates the table's file, checks the sizes, and adds to the C type what need not be fast."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from lmcache_l0 import _table
from lmcache_l0.errors import TableMismatchError, UsageError
from lmcache_l0.making import open_or_make, open_table
from lmcache_l0.sizing import GIB, LOAD_MAX, plan_table

if TYPE_CHECKING:
    import torch

_SCAN_KEYS = 1024
WAIT_S = 10.0


@dataclass(frozen=True)
class Stats:
    """The figures of a table, counted over all slots; `hits` and `misses` are this handle's own."""

    path: str
    keys: int
    hash_slots: int
    load: float
    key_bytes: int
    value_bytes: int
    file_bytes: int
    slot_bytes: int
    max_value_size: int
    versions: int
    spares: int
    found_probes_mean: float
    found_probes_p99: int
    found_probes_max: int
    miss_probes_mean: float
    miss_probes_max: int
    counted_hits: int
    claimed: int
    locked: int
    recovered: int
    writers: int
    enabled: bool
    hits: int
    misses: int

    def as_dict(self) -> dict[str, Any]:
        """All fields by name."""
        return asdict(self)


class SharedCache(_table.Table):
    """One table in shared memory, used by many processes. Keys are str (encoded as UTF-8) or bytes; values are bytes.

    Creates the table if there is no file at `path`, and attaches to it otherwise. `size_gb` (GiB), `max_value_size`
    (bytes) and `hash_slots`: any two determine the third; the defaults are 1 GiB and 4,096. When attaching, given sizes
    must be the table's. `versions`: give every key its own buffers, so that a view survives that many further writes of
    its key (and only those end it), at the price of their memory. `spares`: spare buffers of a stripe of 64 slots, if
    buffers are shared; 2 by default.

    `create=False` only attaches; so does `read_only=True`, for a process that never writes. Memory is allocated at once
    (`reserve=False`: when it is first touched, which may end in a bus error on a full mount). `wait_s` (seconds) is the
    longest wait for another process: one that creates this table, or one that writes the same key or stripe.
    `huge_pages=True` collapses the table's memory into huge pages, at about 0.5 s a GiB; see the guide.

    Every handle may be used by all threads of a process, and by the children that it forks. While the table is
    switched off (`enabled`), reads miss and writes store nothing, in every process that has it attached.

    Raises SizesError, TableRoomError, TableMismatchError, TableDamagedError, TableError (not this user's own file),
    TableBusyError (another process creates it and does not finish); FileNotFoundError if there is nothing to attach to.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        size_gb: float | None = None,
        max_value_size: int | None = None,
        hash_slots: int | None = None,
        *,
        versions: int | None = None,
        spares: int | None = None,
        max_key_size: int | None = None,
        create: bool | None = None,
        read_only: bool = False,
        reserve: bool = True,
        enabled: bool = True,
        huge_pages: bool = False,
        wait_s: float = WAIT_S,
    ) -> None:
        figures = {
            "size_gb": size_gb,
            "max_value_size": max_value_size,
            "hash_slots": hash_slots,
            "versions": versions,
            "spares": spares,
            "max_key_size": max_key_size,
        }
        given: dict[str, Any] = {name: figure for name, figure in figures.items() if figure is not None}
        if create and read_only:
            raise UsageError("create=True and read_only=True: a table that cannot be written cannot be made")
        if not 0 < wait_s <= _table.WAIT_S_MAX:
            raise UsageError(f"wait_s={wait_s} must be above zero and at most {_table.WAIT_S_MAX:,} seconds")
        name = os.fspath(path)
        if create is False or read_only:
            try:
                fd = open_table(Path(name), read_only=read_only)
            except FileNotFoundError:
                raise FileNotFoundError(
                    f"there is no table at {name}: make one, SharedCache(path, size_gb=…) or lmcache-core l0 create"
                ) from None
        else:
            fd = open_or_make(Path(name), plan_table(**given), reserve=reserve, enabled=enabled, wait_s=wait_s)
        try:
            super().__init__(name, fd, not read_only, wait_s, LOAD_MAX, huge_pages)
        finally:
            os.close(fd)
        self._rehashed = 0
        self._again = {"read_only": read_only, "huge_pages": huge_pages, "wait_s": wait_s}
        try:
            _compare(self, given)
            if huge_pages:
                self.collapse()
        except BaseException:
            self.close()
            raise

    @property
    def stats(self) -> Stats:
        """Load, probe lengths, bytes, writers: a walk over all slots, without the GIL."""
        found = self.survey()
        return Stats(
            path=self.path,
            keys=found["keys"],
            hash_slots=self.hash_slots,
            load=found["keys"] / self.hash_slots,
            key_bytes=found["key_bytes"],
            value_bytes=found["value_bytes"],
            file_bytes=self.file_bytes,
            slot_bytes=self.slot_bytes,
            max_value_size=self.max_value_size,
            versions=self.versions,
            spares=self.spares,
            found_probes_mean=found["found_probes_mean"],
            found_probes_p99=found["found_probes_p99"],
            found_probes_max=found["found_probes_max"],
            miss_probes_mean=found["miss_probes_mean"],
            miss_probes_max=found["miss_probes_max"],
            counted_hits=found["hits"],
            claimed=found["claimed"],
            locked=found["locked"],
            recovered=found["recovered"],
            writers=len(self.writers()),
            enabled=self.enabled,
            hits=self.hits,
            misses=self.misses,
        )

    def get_torch(
        self, key: str | bytes, shape: int | tuple[int, ...], dtype: torch.dtype, *, snapshot: bool = False
    ) -> torch.Tensor | None:
        """The value as a tensor of this shape and dtype, in the table's own memory; None if it is not there.
        `tensor.valid()` says whether its bytes are still those of the value that was found: call it after the work.
        torch has no read-only tensors, so do not write into it in place; with `snapshot=True`, and on a handle that was
        attached read-only, it has its own memory, stays valid and may be written.
        """
        from lmcache_l0.tensors import tensor_of

        apart = snapshot or self.read_only
        return tensor_of(lambda stored: self.get_numpy(key, shape, stored, snapshot=apart, writable=not apart), dtype)

    def rehash(self, slots: int | None = None) -> int:
        """Move keys nearer to their homes, into slots that became free, while others read and write; returns how many.

        Goes through `slots` of the table, from where this handle's last call ended, or through all of it. Never waits:
        slots that others hold are left for the next time. Moving a key ends its views as a write does.
        """
        if slots is not None and slots < 1:
            raise UsageError(f"slots={slots} must be 1 or more")
        if slots is None:
            return self.rehash_slots(0, self.hash_slots)
        first = self._rehashed if self._rehashed < self.hash_slots else 0
        self._rehashed = first + slots
        return self.rehash_slots(first, self._rehashed)

    def residents(self) -> Iterator[tuple[bytes, int, int]]:
        """(key, bytes of its value, sampled count of reads) of every key, in no order. A key that is there from
        beginning to end is returned once; a key that comes or goes meanwhile may be.
        """
        cursor = 0
        while True:
            cursor, rows = self.scan(cursor, _SCAN_KEYS)
            yield from rows
            if cursor == 0:
                return

    def __iter__(self) -> Iterator[bytes]:
        for key, _, _ in self.residents():
            yield key

    def keys(self) -> Iterator[bytes]:
        """Every key, as bytes."""
        return iter(self)

    def items(self) -> Iterator[tuple[bytes, bytes]]:
        """Every key with a consistent copy of its value; a key that is gone by then is left out."""
        for key in self:
            value = self.get(key)
            if value is not None:
                yield key, value

    def clear(self) -> None:
        """Delete every key that is there now."""
        for key in self:
            self.delete(key)

    def unlink(self) -> None:
        """Remove the table's file. Processes that have it attached keep it until they close it."""
        with contextlib.suppress(FileNotFoundError):
            Path(self.path).unlink()

    def __reduce__(self) -> tuple[Any, ...]:
        """For spawned processes: they attach by the path, only to this table."""
        if type(self) is not SharedCache:
            raise TypeError(f"{type(self).__name__} says itself how it is pickled, or pickle its path")
        return _attach_again, (str(Path(self.path).absolute()), self.table_id, self._again)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{len(self):,} of {self.hash_slots:,} slots"
        return f"SharedCache({self.path!r}, {state})"


def _attach_again(path: str, table_id: int, again: dict[str, Any]) -> SharedCache:
    cache = SharedCache(path, create=False, **again)
    if cache.table_id != table_id:
        cache.close()
        raise TableMismatchError(
            f"{path} is not the table that was handed over, but one that was made since: hand over the new one"
        )
    return cache


def _compare(table: SharedCache, given: dict[str, Any]) -> None:
    """Raise TableMismatchError unless the table has these sizes."""
    found = {
        name: getattr(table, name) for name in ("max_value_size", "hash_slots", "versions", "spares", "max_key_size")
    }
    differs = [
        f"{name}={figure:,}, not {given[name]:,}" for name, figure in found.items() if given.get(name, figure) != figure
    ]
    size_gb = given.get("size_gb")
    if not differs and size_gb is not None:
        sizes = {name: figure for name, figure in found.items() if name != "hash_slots" or name in given}
        plan = plan_table(**sizes, size_gb=size_gb)
        if plan.file_bytes != table.file_bytes:
            differs.append(f"{table.file_bytes / GIB:.3f} GiB, not {size_gb:.3f}")
    if differs:
        raise TableMismatchError(
            f"the table {table.path} has {'; '.join(differs)}: attach with its sizes or with none, or remove the "
            "file to make it anew"
        )
