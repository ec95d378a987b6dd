"""`TieredCache`: the server's L1 pool below, the shared table above it for what is read often.

L1 objects are written once, as everything in L1 is: a key names one value for as long as L1 has it. What is hot
is copied up into L0; what is cold there is deleted, and stays in L1. So nothing in L0 can be newer than L1, and a
lost L0 loses nothing.
"""

from __future__ import annotations

import hashlib
import struct
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lmcache_core.errors import UsageError
from lmcache_core.pool.layout import Layout
from lmcache_core.tokens.namespace import Namespace
from lmcache_l0.cache import SharedCache
from lmcache_l0.errors import TableFullError, TableLoadWarning, ValueTooLargeError

if TYPE_CHECKING:
    from lmcache_core.client.client import Client
    from lmcache_core.client.results import Status

VALUE_CLASSES_BYTES = (4 << 10, 64 << 10, 1 << 20)
COUNTED_KEYS_MAX = 1 << 16  # keys that are counted but not yet hot; beyond it the counting starts over
_LENGTH = struct.Struct("<Q")


class TieredCache:
    """Values of many processes in L1, the hot ones also in L0. Not for threads to share; forked children make their
    own, with a client of their own.

    `name` is the namespace: caches of one name on one server share their values. `classes_bytes` are the sizes of L1
    objects: a value takes the smallest that holds it, and all processes must name the same ones. A key that this
    process has read `promote_after` times from L1 goes up into L0, if its value fits there. Once L0 is filled to
    `demote_at`, its least-read keys are deleted until `demote_to` is left.
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
        self._rooms = [(size, Namespace(name, Layout("uint8", (_LENGTH.size + size,)))) for size in classes_bytes]
        self._reads: dict[bytes, int] = {}

    @property
    def enabled(self) -> bool:
        """Whether L0 is used: one switch, in the table's header, for all processes that have it attached."""
        return self.l0.enabled

    @enabled.setter
    def enabled(self, on: bool) -> None:
        self.l0.enabled = on

    def get(self, key: str | bytes) -> bytes | None:
        """The value, from L0 if it is there, else from L1; None where neither has it (or no server answers)."""
        used = self.l0.enabled
        if used:
            value = self.l0.get(key)
            if value is not None:
                return value
            ticket = self.l0.ticket(key)  # before L1 is read: what changes from here on makes it old
        value = self._from_l1(_l1_key(key))
        if used and value is not None and self._is_hot(key):
            self._promote(key, value, ticket)
        return value

    def set(self, key: str | bytes, value: bytes) -> Status:
        """Store a value in L1 under a key that L1 does not have. `EXISTS`: it has one, and that one stays.

        Other statuses are L1's own: nothing was stored. Raises ValueTooLargeError beyond the largest class.
        """
        from lmcache_core.client.results import Status

        fitting = [(size, room) for size, room in self._rooms if len(value) <= size]
        if not fitting:
            raise ValueTooLargeError(
                f"a value of {len(value):,} bytes, and the largest class has {self._rooms[-1][0]:,}: name a larger one "
                "in classes_bytes, in every process"
            )
        size, room = fitting[0]
        name = _l1_key(key)
        for _, other in self._rooms:
            if other is not room and self._client.lookup([name], namespace=other).hits:
                return Status.EXISTS
        packed = _LENGTH.pack(len(value)) + value + bytes(size - len(value))
        status = self._client.store([name], [packed], namespace=room).statuses[0]
        if status is Status.STORED:
            # L1 may have evicted an older value that L0 still has. Also with the switch off: L0 must not be wrong
            # when it is on again.
            self.l0.delete(key)
        return status

    def demote(self) -> int:
        """Delete the least-read keys of L0 until `demote_to` of its slots are left, and halve all counts. They stay in
        L1. Returns how many went."""
        residents = sorted(self.l0.residents(), key=lambda row: row[2])
        surplus = residents[: max(0, len(residents) - self._demote_to_keys)]
        gone = sum(self.l0.delete(key) for key, _, _ in surplus)
        self.l0.cool()
        return gone

    def _from_l1(self, name: bytes) -> bytes | None:
        for size, room in self._rooms:
            packed = bytearray(_LENGTH.size + size)
            if self._client.retrieve([name], [packed], namespace=room).hits:
                length = _LENGTH.unpack_from(packed)[0]
                return bytes(packed[_LENGTH.size : _LENGTH.size + length])
        return None

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
            warnings.simplefilter("ignore", TableLoadWarning)  # the load is ours to keep, by demotion
            try:
                self.l0.insert(key, value, ticket)
            except TableFullError:
                self.demote()  # others have filled it: this key's next reads find room


def _l1_key(key: str | bytes) -> bytes:
    return hashlib.sha256(key.encode() if isinstance(key, str) else key).digest()
