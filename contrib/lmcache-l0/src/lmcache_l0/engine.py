"""The server's side of L0: what is hot in L1 goes up, what is not comes down, and what leaves L1 leaves L0 before
anybody is told.

Everything runs on the server's loop, which is also where L1 changes: between the look at an object and its copy in L0
nothing can happen to it, so promotion needs no ticket. What L0 holds is always in L1 as well, under the key that
`records.py` maps it to: a clear, an eviction or a new value of the key takes it out by that mapping, and nothing needs
to be remembered of what went up. L1 hears of what is read in L0, or it would evict the keys that are hot.
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
WAITING_KEYS_MAX = 1024  # hot keys that wait for their step; more are counted anew

WALK_S = 1.0  # for one look at all slots, where that costs no more than the pauses below
COOLING_WALKS = 10  # the counts are halved in one walk of so many, and in all while demoting
WALK_PAUSE_S = 0.01
HURRIED_PAUSE_S = 0.002  # while demoting
RETRY_PAUSE_S = 0.05
NEW_HITS = 2  # what a promoted key has: halved twice before it counts as unread


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
        self._told: frozenset[Name] = frozenset()  # what the last walk told L1 to have been used
        self._demoting = False
        self._retired = False
        self._cursor = self._walks = 0
        self._rehashed_slots = max(1, REHASHED_BYTES_A_STEP // self._table.slot_bytes)
        self._walk_at_s = 0.0
        self._retry_at_s = math.inf
        self.promoted = self.demoted = self.taken_out = self.too_large = self.damaged = self.retries = 0

    # --- what is heard ------------------------------------------------------------------------------------------

    def committed(self, objects: Sequence[Incarnation]) -> None:
        """Whatever L0 has under these keys is older."""
        self.left(objects)

    def left(self, objects: Sequence[Incarnation]) -> None:
        """Delete what L0 has of them."""
        for item in objects:
            if self._record_bytes(item.layout_id):
                self.taken_out += self._take_out(l0_key_of(prefix_of(item.namespace), item.key))

    def read(self, objects: Sequence[Incarnation]) -> None:
        """Count uses. Those of other processes, too: what they read in L1 without a call is heard here."""
        if not self._table.enabled:
            return
        now = self._context.now
        for item in objects:
            if self._record_bytes(item.layout_id) and not item.temporary:
                name = (item.namespace, item.key)
                if name in self._told:
                    continue  # that was L0 itself
                if self._heat.use(name, now) and len(self._waiting) < WAITING_KEYS_MAX:
                    self._waiting[name] = item.generation

    def _record_bytes(self, layout_id: int) -> int:
        """The size of this layout's records; 0 where its objects are none. Asked each time: ids are used again."""
        layout = self._context.layout(layout_id)  # None: adopted, and of no session so far, so nothing of it went up
        return layout.nbytes if layout is not None and is_record(layout) else 0

    def _take_out(self, key: bytes) -> bool:
        """At once, or nobody is served from the table until it is done. Whether it was there and is gone."""
        try:
            return self._table.delete(key)
        except TableBusyError:
            # Only a writer that is not the server's, and that was stopped in the middle, can hold a slot.
            if not self._stuck:
                self._on_again = self._table.enabled
                self._retry_at_s = self._context.now + RETRY_PAUSE_S
            self._table.enabled = False
            self._stuck[key] = None
            return False

    # --- its own work -------------------------------------------------------------------------------------------

    def next_step(self) -> float | None:
        """Now, where keys wait to go up; else the walk's time."""
        if self._waiting and not self._demoting and not self._stuck:
            return 0.0
        return min(self._walk_at_s, self._retry_at_s)

    def step(self, now: float) -> None:
        """A bounded part of what is due."""
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
        self._table.enabled = False  # whoever has switched it on meanwhile did not know
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
        """Copy a record's value up; how many bytes of it were looked at."""
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
                self.damaged += 1  # readers of L1 find that out for themselves
                return record_bytes
            with record[HEAD.size : HEAD.size + length] as value:
                try:
                    self._table.put(key, value, tag, NEW_HITS)
                except TableFullError:
                    self._demote(now)
                except TableBusyError:
                    pass  # its next reads bring it here again
                else:
                    self.promoted += 1
        return record_bytes

    def _demote(self, now: float) -> None:
        """From now on the least read leave, until there is room again."""
        self._demoting = True
        self._walk_at_s = now

    def _walk(self, now: float) -> None:
        """One look at some of the slots: L1 hears of what was read there, counts are halved now and then, and while
        demoting those whose count is used up leave."""
        table, first = self._table, self._cursor
        if not len(table) or not table.enabled:  # nothing to see: a walk that was under way begins anew
            self._told, self._cursor, self._demoting, self._walk_at_s = frozenset(), 0, False, now + WALK_S
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
        self._told = frozenset(used)
        if used:
            self._context.used(used)  # heard of in `read`, once this step is over
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
        """Switched off and without a name: what it holds may grow old."""
        if not self._retired:
            self._retired = True
            self._kept.retire()

    def close(self) -> None:
        """Let go of the table."""
        self._kept.close()
