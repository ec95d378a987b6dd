from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lmcache_core_vllm.groups import Group, Kind, boundary_step

FULL = Group(0, Kind.FULL, 32, 2)
WINDOW = Group(1, Kind.WINDOW, 16, 1, window_tokens=40)
STATE = Group(2, Kind.STATE, 64, 4)


def test_boundaries_are_where_all_groups_have_whole_blocks() -> None:
    assert boundary_step([FULL, Group(1, Kind.WINDOW, 48, 3, 10)]) == 96


def test_a_window_needs_the_blocks_of_its_last_tokens() -> None:
    assert WINDOW.first_needed(160) == 7  # tokens 121 to 159
    assert Group(0, Kind.WINDOW, 16, 1, window_tokens=1).first_needed(32) == 2


@given(st.integers(2, 500), st.integers(1, 20))
def test_windows_need_as_many_blocks_before_every_boundary(window: int, blocks: int) -> None:
    group = Group(0, Kind.WINDOW, 16, 1, window)
    needed = blocks - group.first_needed(16 * blocks)
    assert needed == min(blocks, group.need.window)


def test_a_state_is_one_block() -> None:
    assert STATE.first_needed(256) == 3


def test_a_block_has_the_hash_of_its_last_tokens() -> None:
    hashes = [bytes([number]) * 32 for number in range(9)]
    assert STATE.block_hashes(hashes, range(2)) == [hashes[3], hashes[7]]
    assert STATE.hashed_blocks(hashes) == 2
