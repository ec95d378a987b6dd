"""Where chunks end: a rule that anybody can evaluate at one place, in one pass, whatever the tokens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_blend import Lengths, cut
from lmcache_blend.cutting import WINDOW
from lmcache_core.errors import UsageError

WORD = (1 << 64) - 1


def mixed(token: int) -> int:
    word = (token + 1) * 0x9E3779B97F4A7C15 & WORD
    return (word ^ word >> 32) * 0xD6E8FEB86659FD93 & WORD


def plainly(tokens: list[int], lengths: Lengths) -> list[tuple[int, int]]:
    """The rule, evaluated from the last tokens at each place anew."""
    below = WORD // (lengths.mean - lengths.minimum) if lengths.mean > lengths.minimum else WORD
    spans, first = [], 0
    for end in range(1, len(tokens) + 1):
        window = tokens[max(0, end - WINDOW) : end]
        small = sum(mixed(token) << 2 * at for at, token in enumerate(reversed(window))) & WORD < below
        if end - first >= lengths.minimum and (small or end - first >= lengths.maximum):
            spans.append((first, end))
            first = end
    return spans


lengths = st.lists(st.integers(1, 60), min_size=3, max_size=3).map(sorted).map(lambda three: Lengths(*three))
texts = st.lists(st.integers(0, 5) | st.integers(0, (1 << 32) - 1), max_size=300)


@given(texts, lengths)
def test_cut_follows_the_rule(tokens: list[int], lengths: Lengths) -> None:
    assert cut(tokens, *lengths) == plainly(tokens, lengths)
    assert cut(np.array(tokens, np.int64), *lengths) == plainly(tokens, lengths)


@given(texts, lengths, st.data())
def test_marked_documents_are_covered_and_cut_by_themselves(
    tokens: list[int], lengths: Lengths, data: st.DataObject
) -> None:
    edges = sorted(data.draw(st.sets(st.integers(0, len(tokens)), max_size=6)))
    marks = list(zip(edges[::2], edges[1::2], strict=False))
    found = cut(tokens, *lengths, marks=marks)
    assert [at for first, end in found for at in range(first, end)] == [
        at for first, end in marks for at in range(first, end)
    ]
    assert all(end - first <= lengths.maximum for first, end in found)
    alone = [
        (first + at, first + end)
        for first, last in marks
        for at, end in cut(tokens[first:last], *lengths, marks=[(0, last - first)])
    ]
    assert found == alone


def test_an_inserted_line_moves_only_the_ends_near_it() -> None:
    text = np.random.default_rng(1).integers(0, 50_000, 20_000).tolist()
    edited = text[:5000] + [7] * 13 + text[5000:]
    before = {tuple(text[first:end]) for first, end in cut(text)}
    after = {tuple(edited[first:end]) for first, end in cut(edited)}
    assert len(before - after) <= 4


def test_the_mean_is_about_what_was_asked_for() -> None:
    text = np.random.default_rng(2).integers(0, 50_000, 200_000)
    found = [end - first for first, end in cut(text, 64, 256, 4096)]
    assert 240 < np.mean(found) < 272
    assert min(found) >= 64


@pytest.mark.parametrize("period", [1, 2, 3, 64, 65, 1000])
def test_hostile_tokens_make_no_more_chunks_than_the_minimum_allows(period: int) -> None:
    """And no fewer than the maximum does: the pass has no other loop, so it is linear."""
    tokens = np.resize(np.arange(period), 100_000)
    found = cut(tokens)
    assert 100_000 // 1024 <= len(found) <= 100_000 // 64
    assert all(64 <= end - first <= 1024 for first, end in found)


def test_tokens_that_make_every_place_an_end_are_cut_at_the_minimum() -> None:
    """Found by search: with one token again and again the hash stands still, here below the threshold."""
    token = next(
        token for token in range(1 << 20) if sum(mixed(token) << 2 * at for at in range(WINDOW)) & WORD < WORD // 192
    )
    assert {end - first for first, end in cut([token] * 10_000)[1:]} == {64}


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"minimum": 0}, "0 to 1024"),
        ({"minimum": 300}, "300 to 1024"),
        ({"maximum": 100}, "64 to 100"),
        ({"maximum": 1 << 21}, "in this order"),
        ({"minimum": 1.5}, "whole numbers"),
        ({"marks": [(0, 3), (2, 4)]}, "no document"),
        ({"marks": [(3, 3)]}, "no document"),
        ({"marks": [(0, 11)]}, "in a text of 10"),
        ({"marks": [(0, 1, 2)]}, "not the first token and the end"),
        ({"marks": [(4, 6), (0, 2)]}, "is no document behind token 6"),
        ({"marks": [(-1, 2)]}, "sort them"),
        ({"marks": [(0.5, 3.5)]}, "not the first token and the end"),
        ({"marks": ["ab"]}, "not the first token and the end"),
        ({"marks": [3, 5]}, "not the first token and the end"),
        ({"marks": [(0, 10**30)]}, "in a text of 10"),
        ({"marks": [(0, 1)] * 1_000_000}, "1,000,000 marks, and the limit is 65,536"),
    ],
)
def test_what_makes_no_sense_is_refused(asked: dict, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        cut(range(10), **asked)


def test_tokens_that_are_none_are_refused() -> None:
    with pytest.raises(UsageError, match="token 1 is -1"):
        cut(np.array([5, -1]))
    with pytest.raises(UsageError, match="shape"):
        cut(np.zeros((2, 2), np.int64))
