from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lmcache_core_vllm.groups import Group, Kind, boundary_step, longest_boundary

FULL = Group(0, Kind.FULL, 32, 2)
WINDOW = Group(1, Kind.WINDOW, 16, 1, window_tokens=40)
STATE = Group(2, Kind.STATE, 64, 4)


def served(groups: list[Group], there: list[set[int]], start: int, boundary: int) -> bool:
    """Whether every group has, or is in the engine with, each block that the token after `boundary` needs."""
    return all(
        block in had or block < start // group.block_tokens
        for group, had in zip(groups, there, strict=True)
        for block in range(group.first_needed(boundary), boundary // group.block_tokens)
    )


@given(st.data())
def test_the_boundary_is_the_last_that_every_group_can_go_on_from(data: st.DataObject) -> None:
    groups = data.draw(st.permutations([FULL, WINDOW, STATE]).map(lambda order: order[: data.draw(st.integers(1, 3))]))
    step = boundary_step(groups)
    limit = step * data.draw(st.integers(0, 8))
    start = step * data.draw(st.integers(0, 3))
    there = [data.draw(st.sets(st.integers(0, max(0, limit // group.block_tokens)))) for group in groups]
    asked = [
        [block in had for block in range(start // group.block_tokens, max(start, limit) // group.block_tokens)]
        for group, had in zip(groups, there, strict=True)
    ]
    expected = max([start, *(b for b in range(start + step, limit + 1, step) if served(groups, there, start, b))])
    assert longest_boundary(groups, asked, start, max(start, limit)) == expected


def test_boundaries_are_where_all_groups_have_whole_blocks() -> None:
    assert boundary_step([FULL, Group(1, Kind.WINDOW, 48, 3, 10)]) == 96


def test_a_window_needs_the_blocks_of_its_last_tokens() -> None:
    assert WINDOW.first_needed(160) == 7  # tokens 121 to 159
    assert Group(0, Kind.WINDOW, 16, 1, window_tokens=1).first_needed(32) == 2


@given(st.integers(2, 500), st.integers(1, 20))
def test_windows_need_as_many_blocks_before_every_boundary(window: int, blocks: int) -> None:
    group = Group(0, Kind.WINDOW, 16, 1, window)
    needed = blocks - group.first_needed(16 * blocks)
    assert needed == min(blocks, group.window_blocks)


def test_a_state_is_one_block() -> None:
    assert STATE.first_needed(256) == 3


def test_a_block_has_the_hash_of_its_last_tokens() -> None:
    hashes = [bytes([number]) * 32 for number in range(9)]
    assert STATE.block_hashes(hashes, 0, 2) == [hashes[3], hashes[7]]
    assert STATE.hashed_blocks(hashes) == 2
