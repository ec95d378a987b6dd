"""The tables in front of the data: layouts, workers, slabs, slots.

While the server lives, its own memory is the truth (`pool/master.py`). The tables are what it publishes for tools and
for the next server, which validates them like any input. One writer: the server's loop thread.

    layout row   u64 fingerprint, u64 nbytes, u64 1 when in use, u64 bytes of its text, 96 bytes for that text (dtype,
                 shape and memory format; none if it is longer); the row's number is the layout id
    worker row   u64 state (low byte: the life lock's byte; its content is free to change), u64 nonce,
                 u64 pid, u64 claimed at (Unix ns), u64 the process's start, u64 its pid namespace (0: unknown),
                 16 bytes reserved
    tally        16 u64, all zero when a worker takes the row; `pool/tally.py` says what each counts
    slab word    bits 0-31 pages of its class's objects, 0 for none; bits 32-63 slab length in SLAB_BYTES_MIN,
                 rounded up
    slot word    bits 0-7 state, bits 8-23 the worker row that owns it; the word of the slot's first page
"""

from __future__ import annotations

import secrets
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from lmcache_core.errors import LimitError, PoolError, UsageError
from lmcache_core.limits import PAGE_BYTES, SLAB_BYTES_MIN
from lmcache_core.native import native
from lmcache_core.pool.header import LAYOUT_ROW_BYTES, TALLY_BYTES, WORKER_ROW_BYTES, Header
from lmcache_core.pool.master import Master
from lmcache_core.pool.processes import UNKNOWN, Process

NO_ROW = 0xFFFF  # the owner of a slot that belongs to no worker: the server itself, or one of its lanes
_PID_MAX = 1 << 30  # more than the system gives
_PAGE_SHIFT = PAGE_BYTES.bit_length() - 1

_LAYOUT = struct.Struct("<QQQ")
_LAYOUT_TEXT_BYTES_MAX = LAYOUT_ROW_BYTES - 32
_LAYOUT_TEXT = struct.Struct(f"<Q{_LAYOUT_TEXT_BYTES_MAX}s")
_WORKER = struct.Struct("<QQQQQQ")
_NONCE_OFFSET = 8
_U64 = struct.Struct("<Q")
_CLAIMED = 1
_UNLOCKED = 2  # beside _CLAIMED: the row's lock was another's when its worker came, so it proves nothing


class SlotState(IntEnum):
    """What the slot table says of a slot. An adopting server touches no slot that is not FREE."""

    FREE = 0
    WRITING = 1
    READY = 2
    DOOMED = 3
    QUARANTINED = 4
    LOADING = 5


def mark_slots_plainly(known: memoryview, words: memoryview, offsets: list[int], data_offset: int, word: int) -> None:
    """As `_native.mark_slots`."""
    # A negative index would silently wrap around to the end of the table.
    if offsets and not data_offset <= min(offsets) <= max(offsets) < data_offset + len(words) * PAGE_BYTES:
        raise IndexError
    first_page = data_offset >> _PAGE_SHIFT
    for offset in offsets:
        at = (offset >> _PAGE_SHIFT) - first_page
        known[at] = word
        words[at] = word


_mark_slots = mark_slots_plainly if native is None else native.mark_slots


@dataclass(frozen=True)
class LayoutRow:
    """A registered layout: what both sides compare, and the bytes of one object."""

    fingerprint: int
    nbytes: int


class WorkerRow(NamedTuple):
    """A row of the worker table. Of a dead server it is untrusted input."""

    claimed: bool
    locked: bool  # its worker holds the row's lock, for as long as it may touch a slot
    process: Process


class Tables:
    """Reads and writes the tables of a mapped segment. `buffer` is the whole mapping.

    The owner passes its `master`: then nothing is read from the pool, and writes go to both.
    """

    def __init__(self, buffer: memoryview, header: Header, master: Master | None = None) -> None:
        self._header = header
        self._buffer = buffer
        self._known = buffer if master is None else master.buffer
        slots = slice(header.slots_offset, header.slots_offset + header.slot_rows * 8)
        slabs = slice(header.slabs_offset, header.slabs_offset + header.slab_rows * 8)
        self._slots, self._known_slots = buffer[slots].cast("Q"), self._known[slots].cast("Q")
        self._slabs, self._known_slabs = buffer[slabs].cast("Q"), self._known[slabs].cast("Q")
        self._next_row = 0

    def _pack(self, form: struct.Struct, offset: int, *values: int | bytes) -> None:
        form.pack_into(self._known, offset, *values)
        form.pack_into(self._buffer, offset, *values)

    def mark_slots(self, offsets: Sequence[int], state: int, row: int | None = NO_ROW) -> None:
        """Write the slot word of each offset; with `row` None each keeps its row. The caller names starts of slots
        inside the data area.

        About 12 ns per slot, 90 ns without the C extension. An offset outside the data raises `UsageError`, and then
        nothing is marked.
        """
        if row is None:
            by_row: dict[int, list[int]] = {}
            for offset in offsets:
                by_row.setdefault(self.slot(offset)[1], []).append(offset)
            for kept, of_row in by_row.items():
                self.mark_slots(of_row, state, kept)
            return
        word, data_offset = state | row << 8, self._header.data_offset
        try:
            _mark_slots(self._known_slots, self._slots, list(offsets), data_offset, word)
        except IndexError:
            outside = min(offsets) if min(offsets) < data_offset else max(offsets)
            raise UsageError(
                f"slot offset {outside} lies outside the data, which starts at {data_offset} and ends with the "
                f"segment at {self._header.segment_bytes}"
            ) from None

    def slot(self, offset: int) -> tuple[int, int]:
        """(state, row) of the slot that starts at `offset`."""
        word = self._known_slots[self._index(offset, PAGE_BYTES)]
        return word & 0xFF, word >> 8 & 0xFFFF

    def mark_slab(self, offset: int, slab_bytes: int, object_bytes: int) -> None:
        """Publish which size class a slab serves: objects of `object_bytes` (whole pages), 0 for none."""
        if slab_bytes < 0 or slab_bytes % PAGE_BYTES or object_bytes % PAGE_BYTES:
            raise UsageError(
                f"a slab of {slab_bytes} bytes for objects of {object_bytes}: both are whole multiples of {PAGE_BYTES}"
            )
        index = self._index(offset, SLAB_BYTES_MIN)
        # The pool's last slab may be shorter than whole rows of this table: it ends where the pool ends.
        word = object_bytes // PAGE_BYTES | -(-slab_bytes // SLAB_BYTES_MIN) << 32
        self._known_slabs[index] = word
        self._slabs[index] = word

    def slab(self, offset: int) -> tuple[int, int]:
        """(slab_bytes, object_bytes) of the slab that starts at `offset`."""
        word = self._known_slabs[self._index(offset, SLAB_BYTES_MIN)]
        return (word >> 32) * SLAB_BYTES_MIN, (word & 0xFFFFFFFF) * PAGE_BYTES

    def _index(self, offset: int, unit: int) -> int:
        inside = offset - self._header.data_offset
        if inside < 0 or inside >= self._header.data_bytes or inside % unit:
            raise UsageError(
                f"offset {offset} is not a multiple of {unit} within the data, which starts at "
                f"{self._header.data_offset} and has {self._header.data_bytes} bytes"
            )
        return inside // unit

    # --- layouts ----------------------------------------------------------------------------------------

    def add_layout(self, layout_id: int, fingerprint: int, nbytes: int, text: str = "") -> None:
        """Publish a layout. An id may be used again with the same layout, or after its removal. `text`: what the next
        server reads to know what the bytes are."""
        if not 0 <= layout_id < self._header.layout_rows:
            raise LimitError(f"layout id {layout_id} is over the pool's {self._header.layout_rows} layouts")
        row = LayoutRow(fingerprint, nbytes)
        known = self._layout(layout_id)
        if known is not None and known != row:
            raise UsageError(f"layout id {layout_id} is {known} and cannot become {row}")
        self._pack(_LAYOUT, self._layout_offset(layout_id), fingerprint, nbytes, 1)
        self._pack_text(layout_id, text.encode())

    def _pack_text(self, layout_id: int, text: bytes) -> None:
        fits = text if len(text) <= _LAYOUT_TEXT_BYTES_MAX else b""
        self._pack(_LAYOUT_TEXT, self._layout_offset(layout_id) + 24, len(fits), fits)

    def take_layout_texts(self) -> dict[int, str]:
        """The texts that a dead server left in the pool, by layout id: input that nobody has checked. They are cleared
        there: `add_layout` publishes those that are good."""
        texts: dict[int, str] = {}
        for layout_id in range(self._header.layout_rows):
            count, text = _LAYOUT_TEXT.unpack_from(self._buffer, self._layout_offset(layout_id) + 24)
            if count or any(text):
                texts[layout_id] = text[: min(count, len(text))].decode("ascii", "replace")
                self._pack_text(layout_id, b"")
        return texts

    def remove_layout(self, layout_id: int) -> None:
        """Remove a layout: its id may be given to another one."""
        self._pack(_LAYOUT, self._layout_offset(layout_id), 0, 0, 0)
        self._pack_text(layout_id, b"")

    @property
    def layouts(self) -> dict[int, LayoutRow]:
        """Every registered layout by its id."""
        rows = ((layout_id, self._layout(layout_id)) for layout_id in range(self._header.layout_rows))
        return {layout_id: row for layout_id, row in rows if row is not None}

    def _layout_offset(self, layout_id: int) -> int:
        return self._header.layouts_offset + layout_id * LAYOUT_ROW_BYTES

    def _layout(self, layout_id: int) -> LayoutRow | None:
        fingerprint, nbytes, used = _LAYOUT.unpack_from(self._known, self._layout_offset(layout_id))
        return LayoutRow(fingerprint, nbytes) if used == 1 else None

    # --- workers ----------------------------------------------------------------------------------------

    def life_offset(self, row: int) -> int:
        """The segment offset of the byte that a worker's life lock covers."""
        if not 0 <= row < self._header.worker_rows:
            raise UsageError(f"worker row {row} is outside the table of {self._header.worker_rows}")
        return self._header.workers_offset + row * WORKER_ROW_BYTES

    def tally_offset(self, row: int) -> int:
        """Segment offset of a row's tally line."""
        if not 0 <= row < self._header.tally_rows:
            raise UsageError(f"worker row {row} is outside the table of {self._header.tally_rows}")
        return self._header.tallies_offset + row * TALLY_BYTES

    def tally(self, row: int) -> memoryview:
        """The tally line of this row's worker, format Q. Only that worker writes to it, and it clears what the row's
        former worker left. Anybody may read it."""
        start = self.tally_offset(row)
        return self._buffer[start : start + TALLY_BYTES].cast("Q")

    def claim_row(self, pid: int, row: int, process: Process = UNKNOWN, *, locked: bool = True) -> int:
        """Fill in a free row and return its nonce. A worker that can repeat the nonce maps the pool. `pid`: for
        messages, if the process is unknown."""
        nonce, state = secrets.randbits(64) or 1, _CLAIMED if locked else _CLAIMED | _UNLOCKED
        named = (process.pid or max(pid, 0), time.time_ns(), process.start, process.namespace)
        self._pack(_WORKER, self.life_offset(row), state, nonce, *named)
        return nonce

    def note_unlocked(self, row: int) -> None:
        """The worker of a claimed row could not lock it."""
        self._pack(_U64, self.life_offset(row), _CLAIMED | _UNLOCKED)

    def worker_row(self, row: int) -> WorkerRow:
        """What the owner knows about a row."""
        return self._worker_row(self._known, row)

    def found_row(self, row: int) -> WorkerRow:
        """What a dead server left in the row."""
        return self._worker_row(self._buffer, row)

    def _worker_row(self, words: memoryview, row: int) -> WorkerRow:
        state, _, pid, _, start, namespace = _WORKER.unpack_from(words, self.life_offset(row))
        return WorkerRow(state != 0, not state & _UNLOCKED, Process(min(pid, _PID_MAX), start, namespace))

    def free_rows(self) -> Iterator[int]:
        """Rows that nobody claims, starting after the one released last."""
        rows = self._header.worker_rows
        for step in range(rows):
            row = (self._next_row + step) % rows
            if not self.row_claimed(row):
                yield row

    def row_claimed(self, row: int) -> bool:
        """True between claim and release."""
        return bool(_U64.unpack_from(self._known, self.life_offset(row))[0])

    def release_row(self, row: int) -> None:
        """Free a row. The caller knows that its life lock is free, or was never taken."""
        if not self.row_claimed(row):
            raise PoolError(f"worker row {row} is released and nobody holds it")
        self.clear_row(row)
        self._next_row = (row + 1) % self._header.worker_rows

    def clear_row(self, row: int) -> None:
        """Free a dead server's row, whatever it contains. The caller knows that its life lock is free."""
        self._pack(_WORKER, self.life_offset(row), 0, 0, 0, 0, 0, 0)

    def row_nonce(self, row: int) -> int:
        """The nonce of a claimed row, 0 of a free one. A worker reads it through its own mapping."""
        nonce: int = _U64.unpack_from(self._known, self.life_offset(row) + _NONCE_OFFSET)[0]
        return nonce
