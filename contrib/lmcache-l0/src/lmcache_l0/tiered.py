"""`TieredCache`: the server's L1 pool below, the shared table above it for what is read often.

L1 objects are written once, as everything in L1 is: a key names one value for as long as L1 has it. Hot values are
copied into L0; cold ones are deleted there, and stay in L1. So nothing in L0 can be newer than L1, and losing L0 loses
nothing.

A key has one record in L1: an object of the smallest class, which holds the value, or names the class and the object
that do. The process that gets the record's slot writes the key; for all others it is being written, or exists. So one
of many setters of a key stores it, whatever the sizes, and one that dies before it commits its record has stored
nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import struct
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lmcache_core.errors import CacheError, UsageError
from lmcache_core.pool.layout import Layout
from lmcache_core.tokens.namespace import Namespace
from lmcache_l0.cache import SharedCache
from lmcache_l0.errors import TableFullError, TableLoadWarning, ValueTooLargeError

if TYPE_CHECKING:
    from lmcache_core import Client, Status

VALUE_CLASSES_BYTES = (4 << 10, 64 << 10, 1 << 20)
COUNTED_KEYS_MAX = 1 << 16  # keys that are counted but not yet hot; beyond it counting starts over
_LENGTH = struct.Struct("<Q")
_RECORD = struct.Struct("<QQ16s")  # bytes of the value, its class, and the unique part of its object's name


class TieredCache:
    """Values of many processes in L1, the hot ones also in L0. Not thread-safe; forked children create their own, with
    their own client.

    `name` is the namespace: caches of one name on one server share their values. `classes_bytes` are the sizes of L1
    objects: a value takes the smallest that holds it, and all processes must name the same ones. A key that this
    process has read `promote_after` times from L1 is promoted into L0, if it and its value fit there and this handle of
    L0 may write. Once L0 is filled to `demote_at`, its least-read keys are deleted until `demote_to` is left.
    """

    def __init__(
        self,
        l0: SharedCache,
        client: Client,
        *,
        name: str = "l0",
        classes_bytes: Sequence[int] = VALUE_CLASSES_BYTES,
        promote_after: int = 2,
        demote_at: float = 0.65,
        demote_to: float = 0.5,
    ) -> None:
        if not classes_bytes or sorted(set(classes_bytes)) != list(classes_bytes) or classes_bytes[0] < 1:
            raise UsageError(f"classes_bytes {classes_bytes!r} must be sizes in bytes, each larger than the one before")
        if promote_after < 1:
            raise UsageError(f"promote_after={promote_after} must be 1 or more")
        if not 0 < demote_to < demote_at <= 1:
            raise UsageError(f"demote_to={demote_to} and demote_at={demote_at}: 0 < demote_to < demote_at <= 1")
        self.l0 = l0
        self._client = client
        self._promote_after = promote_after
        self._demote_at_keys = max(1, int(demote_at * l0.hash_slots))
        self._demote_to_keys = int(demote_to * l0.hash_slots)
        self._classes = list(classes_bytes)
        # The first class lies in its records.
        self.rooms = [
            Namespace(name, Layout("uint8", (size + (_LENGTH.size if i else _RECORD.size),)))
            for i, size in enumerate(classes_bytes)
        ]
        self._reads: dict[bytes, int] = {}

    @property
    def enabled(self) -> bool:
        """Whether L0 is used: one switch, in the table's header, for all processes that have it attached."""
        return self.l0.enabled

    @enabled.setter
    def enabled(self, on: bool) -> None:
        self.l0.enabled = on

    def get(self, key: str | bytes) -> bytes | None:
        """The value, from L0 if it is there, else from L1; None if neither has it (or no server answers)."""
        used = self.l0.enabled and self._fits_l0(key)
        if used:
            value = self.l0.get(key)
            if value is not None:
                return value
            ticket = self.l0.ticket(key)  # before L1 is read: a change from here on makes it stale
        value = self._from_l1(_l1_name(key))
        if used and value is not None and not self.l0.read_only and self._is_hot(key):
            self._promote(key, value, ticket)
        return value

    def set(self, key: str | bytes, value: bytes) -> Status:
        """Store a value in L1 under a key that L1 does not have. `EXISTS`: L1 has a value, and keeps it. `BUSY`:
        another process is storing one. Other statuses are L1's own: nothing was stored. Raises ValueTooLargeError
        beyond the largest class, and UsageError if L0 was attached read-only, because its older value could not be
        removed.
        """
        value = memoryview(value).tobytes()  # whatever its items are: from here on its length is its bytes
        fitting = [i for i, size in enumerate(self._classes) if len(value) <= size]
        if not fitting:
            raise ValueTooLargeError(
                f"a value of {len(value):,} bytes, and the largest class has {self._classes[-1]:,}: name a larger one "
                "in classes_bytes, in every process"
            )
        if self.l0.read_only:
            raise UsageError(
                f"the table {self.l0.path} was attached read-only: set() must take the key's older value out of it, "
                "so attach it with read_only=False"
            )
        # L1 may have evicted an older value that L0 still has. Delete it before the store, so that a process that dies
        # after it leaves no stale value in L0; and after it, whatever the answer, for a promotion meanwhile. Also while
        # the table is off: L0 must not be wrong when it is on again.
        self._take_out(key)
        try:
            return self._to_l1(_l1_name(key), value, fitting[0])
        finally:
            self._take_out(key)

    def demote(self) -> int:
        """Delete the least-read keys of L0 until `demote_to` of its slots are left, and halve all counts. They stay in
        L1. Returns how many were deleted."""
        residents = sorted(self.l0.residents(), key=lambda row: row[2])
        surplus = residents[: max(0, len(residents) - self._demote_to_keys)]
        gone = sum(self.l0.delete(key) for key, _, _ in surplus)
        self.l0.cool()
        return gone

    def _fits_l0(self, key: str | bytes) -> bool:
        return 0 < len(key.encode() if isinstance(key, str) else key) <= self.l0.max_key_size

    def _take_out(self, key: str | bytes) -> None:
        if self._fits_l0(key):
            self.l0.delete(key)

    def _to_l1(self, name: bytes, value: bytes, room: int) -> Status:
        from lmcache_core import Status

        nonce = secrets.token_bytes(16)
        with self._client.prepare_store([name], namespace=self.rooms[0]) as lease:
            if lease.statuses[0] is Status.EXISTS:
                return self._again(name, value)
            if lease.statuses[0] is not Status.GRANTED:
                return lease.statuses[0]
            if room:
                stored = self._object_to_l1(name, nonce, value, room)
                if stored is not Status.STORED:
                    return stored
            slot = lease.view(0)
            _RECORD.pack_into(slot, 0, len(value), room, nonce)
            if not room:
                slot[_RECORD.size : _RECORD.size + len(value)] = value
            with contextlib.suppress(CacheError):  # the server went away, or cleared: return its status
                lease.commit()
            return lease.statuses[0]

    def _again(self, name: bytes, value: bytes) -> Status:
        """The key has a record. It is valid, unless L1 has evicted the object that it names: then a value that fits its
        class replaces that object. FULL: this value does not fit, and can be set once the record is evicted too."""
        from lmcache_core import Status

        record = self._record(name)
        if record is None or record[1] == 0:
            return Status.EXISTS
        _, room, nonce = record
        if self._client.lookup([_object_name(name, nonce)], namespace=self.rooms[room]).hits:
            return Status.EXISTS
        if len(value) > self._classes[room]:
            return Status.FULL
        return self._object_to_l1(name, nonce, value, room)

    def _object_to_l1(self, name: bytes, nonce: bytes, value: bytes, room: int) -> Status:
        packed = _LENGTH.pack(len(value)) + value
        packed += bytes(self.rooms[room].layout.nbytes - len(packed))
        return self._client.store([_object_name(name, nonce)], [packed], namespace=self.rooms[room]).statuses[0]

    def _record(self, name: bytes) -> tuple[bytearray, int, bytes] | None:
        """The record's bytes, and the class and object that it names."""
        record = bytearray(self.rooms[0].layout.nbytes)
        if not self._client.retrieve([name], [record], namespace=self.rooms[0]).hits:
            return None
        _, room, nonce = _RECORD.unpack_from(record)
        if room >= len(self.rooms):
            raise UsageError(
                f"a value of class {room} and classes_bytes names {len(self.rooms)}: name the same in every process"
            )
        return record, room, nonce

    def _from_l1(self, name: bytes) -> bytes | None:
        record = self._record(name)
        if record is None:
            return None
        held, room, nonce = record
        if room == 0:
            length = _RECORD.unpack_from(held)[0]
            return bytes(held[_RECORD.size : _RECORD.size + length])
        packed = bytearray(self.rooms[room].layout.nbytes)
        if not self._client.retrieve([_object_name(name, nonce)], [packed], namespace=self.rooms[room]).hits:
            return None
        return bytes(packed[_LENGTH.size : _LENGTH.size + _LENGTH.unpack_from(packed)[0]])

    def _is_hot(self, key: str | bytes) -> bool:
        name = key.encode() if isinstance(key, str) else key
        reads = self._reads.pop(name, 0) + 1
        if reads >= self._promote_after:
            return True
        if len(self._reads) >= COUNTED_KEYS_MAX:
            self._reads.clear()
        self._reads[name] = reads
        return False

    def _promote(self, key: str | bytes, value: bytes, ticket: int) -> None:
        if len(value) > self.l0.max_value_size:
            return
        if len(self.l0) >= self._demote_at_keys:
            self.demote()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", TableLoadWarning)  # we keep the load, by demotion
            try:
                self.l0.insert(key, value, ticket)
            except TableFullError:
                self.demote()  # others have filled it: the next reads of this key will find room


def _l1_name(key: str | bytes) -> bytes:
    return hashlib.sha256(key.encode() if isinstance(key, str) else key).digest()


def _object_name(name: bytes, nonce: bytes) -> bytes:
    return hashlib.sha256(name + nonce).digest()
