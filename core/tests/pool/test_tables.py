"""The tables, read back from the file itself."""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_core.errors import LimitError, UsageError
from lmcache_core.limits import LAYOUTS_MAX, PAGE_BYTES, SLAB_BYTES_MIN
from lmcache_core.native import native
from lmcache_core.pool import header as headers
from lmcache_core.pool.backing import Backing
from lmcache_core.pool.layout import Layout
from lmcache_core.pool.segment import Segment
from lmcache_core.pool.tables import NO_ROW, LayoutRow, SlotState, Tables, mark_slots_plainly

MIB = 1 << 20
Make = Callable[..., Segment]
PLAN = headers.plan("p", 4 * MIB, Backing.SHM, boot_id=1)


def word_in_file(segment: Segment, offset: int) -> int:
    raw = os.pread(segment.fileno(), 8, offset)
    return int(struct.unpack("<Q", raw)[0])


def test_a_marked_slot_stands_in_the_segment_before_the_call_returns(make: Make) -> None:
    segment = make()
    start = segment.info.data_offset
    offsets = [start, start + 5 * PAGE_BYTES, segment.info.nbytes - PAGE_BYTES]
    segment.mark_slots(offsets, SlotState.WRITING, 7)
    for page in (0, 5, segment.header.slot_rows - 1):
        assert word_in_file(segment, segment.header.slots_offset + 8 * page) == SlotState.WRITING | 7 << 8
    assert word_in_file(segment, segment.header.slots_offset + 8) == 0
    with Segment.attach_name(segment.info.name) as other:
        assert other.tables.slot(offsets[1]) == (SlotState.WRITING, 7)


def test_a_slot_may_change_its_state_and_keep_its_row(make: Make) -> None:
    segment = make()
    offsets = [segment.info.data_offset + page * PAGE_BYTES for page in range(4)]
    for offset, row in zip(offsets, (7, 8, 7, NO_ROW), strict=True):
        segment.mark_slots([offset], SlotState.WRITING, row)
    segment.mark_slots(offsets, SlotState.QUARANTINED, None)
    assert [segment.tables.slot(offset) for offset in offsets] == [
        (SlotState.QUARANTINED, row) for row in (7, 8, 7, NO_ROW)
    ]
    with pytest.raises(UsageError):
        segment.mark_slots([PLAN.data_offset - PAGE_BYTES], SlotState.READY, None)


@settings(deadline=None)
@given(
    st.dictionaries(
        st.integers(0, PLAN.slot_rows - 1),
        st.tuples(st.sampled_from(SlotState), st.integers(0, NO_ROW)),
        max_size=50,
    )
)
def test_slot_words_do_not_disturb_one_another(marks: dict[int, tuple[SlotState, int]]) -> None:
    tables = Tables(memoryview(bytearray(PLAN.index_offset)), PLAN)
    for page, (state, row) in marks.items():
        tables.mark_slots([PLAN.data_offset + page * PAGE_BYTES], state, row)
    for page in range(PLAN.slot_rows):
        assert tables.slot(PLAN.data_offset + page * PAGE_BYTES) == marks.get(page, (0, 0))


@pytest.mark.parametrize("offset", [0, PLAN.data_offset - PAGE_BYTES, PLAN.segment_bytes, 1 << 60, -PAGE_BYTES])
def test_a_slot_outside_the_data_is_refused(make: Make, offset: int) -> None:
    segment = make()
    assert segment.header.data_offset == PLAN.data_offset
    before = os.pread(segment.fileno(), PLAN.index_offset, 0)
    with pytest.raises(UsageError, match=f"slot offset {offset} lies outside"):
        segment.mark_slots([PLAN.data_offset, offset], SlotState.READY, 1)
    assert os.pread(segment.fileno(), PLAN.index_offset, 0) == before


@pytest.mark.skipif(native is None, reason="there is no C extension here")
@given(st.lists(st.integers(-2, 10).map(lambda page: 8 * PAGE_BYTES + page * PAGE_BYTES)), st.integers(0, 2**64 - 1))
def test_c_and_python_mark_the_same_slots_or_none(offsets: list[int], word: int) -> None:
    marked = []
    for mark in (native.mark_slots, mark_slots_plainly):
        known, words = (memoryview(bytearray(8 * 8)).cast("Q") for _ in range(2))
        with contextlib.suppress(IndexError):
            mark(known, words, offsets, 8 * PAGE_BYTES, word)
        assert known == words
        marked.append(words.tolist())
    assert marked[0] == marked[1]
    fits = all(8 <= offset // PAGE_BYTES < 16 for offset in offsets)
    assert any(marked[0]) == (fits and bool(offsets) and word > 0)


@pytest.mark.parametrize("offset", [PLAN.data_offset + 1, PLAN.data_offset - PAGE_BYTES, PLAN.segment_bytes])
def test_an_unaligned_slot_has_no_state_to_read(make: Make, offset: int) -> None:
    with pytest.raises(UsageError, match="not a multiple"):
        make().tables.slot(offset)


def test_a_slab_says_its_class(make: Make) -> None:
    segment = make(8 * MIB)
    start = segment.info.data_offset
    segment.tables.mark_slab(start + 2 * SLAB_BYTES_MIN, 4 * SLAB_BYTES_MIN, 3 * PAGE_BYTES)
    with Segment.attach_name(segment.info.name) as other:
        assert other.tables.slab(start + 2 * SLAB_BYTES_MIN) == (4 * SLAB_BYTES_MIN, 3 * PAGE_BYTES)
        assert other.tables.slab(start) == (0, 0)
    for wrong in [(start + 1, SLAB_BYTES_MIN, 0), (start, SLAB_BYTES_MIN + 1, 0), (start, SLAB_BYTES_MIN, 5)]:
        with pytest.raises(UsageError):
            segment.tables.mark_slab(*wrong)


def test_what_a_layout_is_outlives_the_server_and_is_published_only_by_the_next(make: Make) -> None:
    segment = make()
    layout = Layout("bfloat16", (2, 32, 256, 8, 128), "KLTHD")
    segment.add_layout(3, layout.fingerprint, layout.nbytes, layout.text)
    segment.add_layout(4, 1, 2, "x" * 97)  # longer than its field: nobody can know what it is
    texts = segment.tables.take_layout_texts()
    assert texts == {3: layout.text}
    assert Layout.from_text(texts[3]) == layout
    assert segment.tables.take_layout_texts() == {}
    assert segment.layouts[3] == LayoutRow(layout.fingerprint, layout.nbytes)


@pytest.mark.parametrize("text", ["", "uint8", "uint8|", "uint8|4,|", "uint8|-4|", "uint8|4|KL", "rm|4|", "uint8|४|"])
def test_words_that_are_no_layout_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        Layout.from_text(text)


def test_layouts_are_seen_by_every_process_and_never_change(make: Make) -> None:
    segment = make()
    segment.add_layout(0, 2**64 - 1, 4096)
    segment.add_layout(9, 5, 1 << 20)
    segment.add_layout(9, 5, 1 << 20)
    with Segment.attach_name(segment.info.name) as other:
        assert other.layouts == {0: LayoutRow(2**64 - 1, 4096), 9: LayoutRow(5, 1 << 20)}
    with pytest.raises(UsageError, match="layout id 9"):
        segment.add_layout(9, 6, 1 << 20)
    for layout_id in (-1, LAYOUTS_MAX):
        with pytest.raises(LimitError, match="layout id"):
            segment.add_layout(layout_id, 1, 1)
