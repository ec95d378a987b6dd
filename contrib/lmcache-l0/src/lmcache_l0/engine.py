"""The server's side of L0: hot keys of L1 are promoted, cold ones are demoted, and what leaves L1 leaves L0 before any
answer is sent.

Everything runs on the server's loop, which is also where L1 changes: nothing can happen to an object between the check
and its copy in L0, so promotion needs no ticket. Everything in L0 is also in L1, under the key that `records.py` maps
it to: a clear, an eviction or a new value of the key removes it by that mapping, so no list of promoted keys is needed.
L1 learns of reads in L0; otherwise it would evict the hot keys.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import xxhash

from lmcache_core.errors import UsageError
from lmcache_core.server.companion import Companion, CompanionContext
from lmcache_l0.errors import TableBusyError, TableFullError
from lmcache_l0.heat import Heat, Name
from lmcache_l0.keeping import KeptTable
from lmcache_l0.records import HEAD, is_record, l0_key_of, l1_key_of, prefix_of
from lmcache_l0.settings import L0Settings

if TYPE_CHECKING:
    from lmcache_core.kernel.objects import Incarnation

# Bounds of one step, which together stay far below a millisecond of the loop.
PROMOTED_KEYS_A_STEP = 32
PROMOTED_BYTES_A_STEP = 256 << 10  # or one value
REHASHED_BYTES_A_STEP = 256 << 10  # if every slot's key were moved; or one slot
WALKED_KEYS_A_STEP = 256
WALKED_SLOTS_A_STEP = 8192
RETRIED_KEYS_A_STEP = 64
WAITING_KEYS_MAX = 1024  # hot keys that wait for their step; further ones are counted again

WALK_S = 1.0  # for one walk over all slots, if that costs no more than the pauses below
COOLING_WALKS = 10  # the counts are halved in every Nth walk, and in every walk while demoting
WALK_PAUSE_S = 0.01
HURRIED_PAUSE_S = 0.002  # while demoting
RETRY_PAUSE_S = 0.05
NEW_HITS = 2  # the initial count of a promoted key: halved twice before it counts as unread


class L0Engine(Companion):
    """The companion `l0`."""

    def __init__(self, settings: L0Settings, context: CompanionContext) -> None:
        self._context = context
        self._kept = KeptTable(settings, context.server)
        table = self._table = self._kept.table
        self._heat = Heat(settings.promote_after)
        self._demote_at_keys = max(1, int(settings.demote_at * table.hash_slots))
        self._demote_to_keys = min(self._demote_at_keys - 1, int(settings.demote_to * table.hash_slots))
        self._waiting: dict[Name, int] = {}  # hot → generation
        self._stuck: dict[bytes, None] = {}  # keys of L0 that could not be taken out
        self._on_again = False  # once nothing is stuck
        self._reported: frozenset[Name] = frozenset()  # what the last walk reported to L1 as used
        self._demoting = False
        self._retired = False
        self._cursor = self._walks = 0
        self._rehashed_slots = max(1, REHASHED_BYTES_A_STEP // self._table.slot_bytes)
        self._walk_at_s = 0.0
        self._retry_at_s = math.inf
        self.promoted = self.demoted = self.taken_out = self.too_large = self.damaged = self.retries = 0

    # --- events of L1 -------------------------------------------------------------------------------------------

    def committed(self, objects: Sequence[Incarnation]) -> None:
        """Anything in L0 under these keys is now stale."""
        self.left(objects)

    def left(self, objects: Sequence[Incarnation]) -> None:
        """Delete them from L0."""
        for item in objects:
            if self._record_bytes(item.layout_id):
                self.taken_out += self._take_out(l0_key_of(prefix_of(item.namespace), item.key))

    def read(self, objects: Sequence[Incarnation]) -> None:
        """Count uses, including reads by other processes in L1 without a call."""
        if not self._table.enabled:
            return
        now = self._context.now
        for item in objects:
            if self._record_bytes(item.layout_id) and not item.temporary:
                name = (item.namespace, item.key)
                if name in self._reported:
                    continue  # that was L0 itself
                if self._heat.use(name, now) and len(self._waiting) < WAITING_KEYS_MAX:
                    self._waiting[name] = item.generation

    def _record_bytes(self, layout_id: int) -> int:
        """The size of this layout's records; 0 if its objects are not records. Asked each time, because ids are
        reused."""
        # None: adopted, and not yet registered by a session, so nothing of it was promoted
        layout = self._context.layout(layout_id)
        return layout.nbytes if layout is not None and is_record(layout) else 0

    def _take_out(self, key: bytes) -> bool:
        """Delete it at once, or else disable the table until it is done. Returns whether it was there and is gone."""
        try:
            return self._table.delete(key)
        except TableBusyError:
            # Only another process's writer that was stopped in the middle can hold a slot.
            if not self._stuck:
                self._on_again = self._table.enabled
                self._retry_at_s = self._context.now + RETRY_PAUSE_S
            self._table.enabled = False
            self._stuck[key] = None
            return False

    # --- its own work -------------------------------------------------------------------------------------------

    def next_step(self) -> float | None:
        """Now, if keys wait for promotion; else the time of the walk."""
        if self._waiting and not self._demoting and not self._stuck:
            return 0.0
        return min(self._walk_at_s, self._retry_at_s)

    def step(self, now: float) -> None:
        """Do a bounded part of the due work."""
        if self._stuck:
            if now >= self._retry_at_s:
                self._retry(now)
        elif not self._table.enabled:
            self._waiting.clear()
        else:
            self._promote(now)
        if now >= self._walk_at_s:
            self._walk(now)

    def _retry(self, now: float) -> None:
        self.retries += 1
        self._table.enabled = False  # someone has switched it on meanwhile
        for key in list(self._stuck)[:RETRIED_KEYS_A_STEP]:
            try:
                self.taken_out += self._table.delete(key)
            except TableBusyError:
                break
            del self._stuck[key]
        self._retry_at_s = now + RETRY_PAUSE_S if self._stuck else math.inf
        if not self._stuck:
            self._table.enabled = self._on_again

    def _promote(self, now: float) -> None:
        nbytes = 0
        for name in list(self._waiting)[:PROMOTED_KEYS_A_STEP]:
            if len(self._table) >= self._demote_at_keys:
                self._demote(now)
            if self._demoting or nbytes >= PROMOTED_BYTES_A_STEP:
                return
            namespace, key = name
            item = self._context.ready(namespace, [(key, self._waiting.pop(name))])[0]
            if item is not None:
                nbytes += self._promote_one(item, l0_key_of(prefix_of(namespace), key), now)

    def _promote_one(self, item: Incarnation, key: bytes, now: float) -> int:
        """Promote a record's value; returns how many of its bytes were read."""
        record_bytes = self._record_bytes(item.layout_id)
        if key in self._table:
            return 0
        with self._context.view(item, record_bytes) as record:
            length, tag = HEAD.unpack_from(record)
            whole = length <= record_bytes - HEAD.size
            if whole and length > self._table.max_value_size:
                self.too_large += 1
                return HEAD.size
            if not whole or (item.checksum is not None and xxhash.xxh3_64_intdigest(record) != item.checksum):
                self.damaged += 1  # readers of L1 detect that themselves
                return record_bytes
            with record[HEAD.size : HEAD.size + length] as value:
                try:
                    self._table.put(key, value, tag, NEW_HITS)
                except TableFullError:
                    self._demote(now)
                except TableBusyError:
                    pass  # its next reads will bring it here again
                else:
                    self.promoted += 1
        return record_bytes

    def _demote(self, now: float) -> None:
        """Start to demote the least-read keys, until there is room again."""
        self._demoting = True
        self._walk_at_s = now

    def _walk(self, now: float) -> None:
        """Visit some of the slots: report reads to L1, halve the counts now and then, and while demoting remove keys
        whose count is zero."""
        table, first = self._table, self._cursor
        if not len(table) or not table.enabled:  # the table is off: the walk starts over
            self._reported, self._cursor, self._demoting, self._walk_at_s = frozenset(), 0, False, now + WALK_S
            return
        self._cursor, rows = table.scan(first, WALKED_KEYS_A_STEP, WALKED_SLOTS_A_STEP)
        if self._demoting or self._walks % COOLING_WALKS == 0:
            table.cool(first, self._cursor or table.hash_slots)
        table.rehash(slots=self._rehashed_slots)
        self._walks += self._cursor == 0
        used: list[Name] = []
        for key, _, hits in rows:
            name = l1_key_of(key)
            if hits and name is not None:
                used.append(name)
            elif self._demoting and not hits and len(table) > self._demote_to_keys:
                self.demoted += self._take_out(key)
                if name is not None:
                    self._heat.demoted(name, now)
        self._demoting = self._demoting and len(table) > self._demote_to_keys
        self._reported = frozenset(used)
        if used:
            self._context.used(used)  # counted in `read`, after this step
        walked = (self._cursor or table.hash_slots) - first
        pause_s = HURRIED_PAUSE_S if self._demoting else max(WALK_PAUSE_S, WALK_S * walked / table.hash_slots)
        self._walk_at_s = now + pause_s

    # --- for others ---------------------------------------------------------------------------------------------

    def offers(self) -> dict[str, Any]:
        """Where the table is."""
        return {"path": str(self._kept.path.absolute()), "table_id": self._table.table_id}

    def operate(self, operation: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """`switch(enabled)`: turn the table on or off, in every process at once."""
        enabled = arguments.get("enabled")
        if operation != "switch" or set(arguments) != {"enabled"} or not isinstance(enabled, bool):
            raise UsageError(f"l0 has the operation switch(enabled), true or false, and not {operation}({arguments})")
        if self._stuck:
            self._on_again = enabled
        else:
            self._table.enabled = enabled
        return {"enabled": self._table.enabled}

    def status(self) -> dict[str, Any]:
        """Figures."""
        table = self._table
        return {
            "path": str(self._kept.path),
            "enabled": not self._retired and table.enabled,
            "keys": 0 if self._retired else len(table),
            "hash_slots": table.hash_slots,
            "max_value_size": table.max_value_size,
            "file_bytes": table.file_bytes,
            "counts": {
                "promoted": self.promoted,
                "demoted": self.demoted,
                "taken_out": self.taken_out,
                "too_large": self.too_large,
                "damaged": self.damaged,
            },
            "counted_keys": len(self._heat),
            "waiting": len(self._waiting),
            "demoting": self._demoting,
            "stuck": len(self._stuck),
        }

    def abandon(self) -> None:
        """Disable and unlink the table: its contents may become stale."""
        if not self._retired:
            self._retired = True
            self._kept.retire()

    def close(self) -> None:
        """Close the table."""
        self._kept.close()
