"""What workers claim to have read: summed as far as it may be true, and kept when they go."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_core.limits import TALLY_HITS_PER_S_MAX
from lmcache_core.pool.segment import Segment
from lmcache_core.pool.tally import Tally
from lmcache_core.server.peers.tallies import OTHER, WorkerTallies


@pytest.fixture(scope="module")
def segment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Segment]:
    path: Path = tmp_path_factory.mktemp("run")
    with Segment.create("tallies", 1 << 20, "memfd", runtime_dir=path) as made:
        yield made


def write(segment: Segment, row: int, **words: int) -> None:
    line = [0] * 16
    for name, value in words.items():
        line[Tally[name]] = value
    segment.tables.tally(row)[:] = memoryview(struct.pack("16Q", *line)).cast("Q")


def test_rows_are_summed_and_kept_when_they_are_released(segment: Segment) -> None:
    tallies = WorkerTallies(segment)
    for row in (1, 2):
        tallies.watch(row)
        write(segment, row, LOOKUPS=1, LOOKUP_HITS=10 * row, READ_BYTES=100)
    assert tallies.totals()[Tally.LOOKUP_HITS] == 30
    write(segment, 1, LOOKUPS=2, LOOKUP_HITS=15, READ_BYTES=150)
    tallies.fold(1)
    write(segment, 1, LOOKUP_HITS=5)  # the next worker's, which nobody watches yet
    totals = tallies.totals()
    assert (totals[Tally.LOOKUPS], totals[Tally.LOOKUP_HITS], totals[Tally.READ_BYTES]) == (3, 35, 250)
    assert tallies.doubted == 0


def test_a_row_begins_at_nought_whatever_stood_there(segment: Segment) -> None:
    write(segment, 3, LOOKUP_HITS=99)
    tallies = WorkerTallies(segment)
    tallies.watch(3)
    assert tallies.totals()[Tally.LOOKUP_HITS] == 0
    write(segment, 4, LOOKUP_HITS=7)
    tallies.watch(4, chosen=True)  # its worker has cleared the line, and counted to seven since
    assert tallies.totals()[Tally.LOOKUP_HITS] == 7


def test_what_was_counted_before_a_worker_named_its_namespace_is_its_namespaces(segment: Segment) -> None:
    tallies, mine = WorkerTallies(segment), set[int]()
    tallies.watch(6, chosen=True, namespaces=mine)
    tallies.watch(7, namespaces=set())
    for row in (6, 7):
        write(segment, row, LOOKUP_HITS=13, PROMPTS=1, PROMPT_TOKENS=1664, INDEX_HIT_TOKENS=1664)
    assert tallies.totals()[Tally.PROMPT_TOKENS] == 3328
    assert tallies.by_namespace().keys() == {OTHER}
    assert tallies.by_namespace()[OTHER].prompt_hit_tokens == 3328
    tallies.look(6)  # it registers two namespaces, and nobody counts anything meanwhile
    mine.add(77)
    tallies.look(6)
    mine.add(78)
    tallies.fold(7)
    tallies.totals()
    assert {name: row.prompt_hit_tokens for name, row in tallies.by_namespace().items()} == {
        OTHER: 1664,
        77: 1664,
        78: 1664,
    }


def test_what_was_counted_for_a_former_server_is_not_counted_again(segment: Segment) -> None:
    write(segment, 5, LOOKUP_HITS=1000)
    tallies = WorkerTallies(segment)
    tallies.adopt([5])
    write(segment, 5, LOOKUP_HITS=1001)
    tallies.fold(5)
    assert tallies.totals()[Tally.LOOKUP_HITS] == 1


@given(lines=st.lists(st.lists(st.integers(0, (1 << 64) - 1), min_size=16, max_size=16), max_size=8))
def test_totals_never_go_back_nor_further_than_can_be(segment: Segment, lines: list[list[int]]) -> None:
    tallies = WorkerTallies(segment)
    tallies.watch(6)
    before = tallies.totals()
    for line in lines:
        segment.tables.tally(6)[:] = memoryview(struct.pack("16Q", *line)).cast("Q")
        after = tallies.totals()
        assert all(after[word] >= before[word] for word in Tally)
        assert after[Tally.LOOKUP_HITS] - before[Tally.LOOKUP_HITS] <= 3600 * TALLY_HITS_PER_S_MAX
        before = after


def test_one_wrong_word_makes_the_whole_look_doubtful(segment: Segment) -> None:
    tallies = WorkerTallies(segment)
    tallies.watch(7)
    write(segment, 7, LOOKUP_HITS=5, READ_BYTES=1 << 63)
    assert tallies.totals()[Tally.LOOKUP_HITS] == 0
    assert tallies.doubted == 1
    write(segment, 7, LOOKUP_HITS=8, READ_BYTES=(1 << 63) + 10)  # compared with what stood there
    assert tallies.totals()[Tally.LOOKUP_HITS] == 3
    assert tallies.doubted == 1


def test_the_tally_fields_are_those_of_the_extension() -> None:
    text = (Path(__file__).parents[2] / "native/tally.h").read_text()
    names = [
        part.split("=")[0].split(",")[0].strip() for part in text.splitlines() if part.strip().startswith("TALLY_")
    ]
    assert [name.removeprefix("TALLY_") for name in names[: len(Tally)]] == [word.name for word in Tally]
