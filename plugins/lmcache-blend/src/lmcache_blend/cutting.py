"""Where one chunk of a text ends and the next begins, by the text itself."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lmcache_blend.arrays import words_of
from lmcache_blend.kernels import native
from lmcache_core.errors import UsageError
from lmcache_core.tokens.canonical import Tokens

WINDOW = 32  # tokens that decide about an end: no other edit moves it
CHUNK_TOKENS_MAX = 1 << 20
MARKS_MAX = 65_536  # documents of a text


class Lengths(NamedTuple):
    """Of chunks, in tokens. Text whose ends are all decided by content has chunks of about `mean`."""

    minimum: int = 64
    mean: int = 256
    maximum: int = 1024

    def check(self) -> Lengths:
        """Itself. Raises `UsageError` for lengths out of order."""
        if not all(type(each) is int for each in self) or not 1 <= self[0] <= self[1] <= self[2] <= CHUNK_TOKENS_MAX:
            raise UsageError(
                f"chunks of {self[0]} to {self[2]} tokens with a mean of {self[1]}: use whole numbers from 1 to "
                f"{CHUNK_TOKENS_MAX:,}, in this order"
            )
        return self


LENGTHS = Lengths()


class Span(NamedTuple):
    """Tokens from `first` to `end`, which does not count."""

    first: int
    end: int

    @property
    def tokens(self) -> int:
        """How many."""
        return self.end - self.first


def cut(
    tokens: Tokens,
    minimum: int = LENGTHS.minimum,
    mean: int = LENGTHS.mean,
    maximum: int = LENGTHS.maximum,
    *,
    marks: Sequence[tuple[int, int]] | None = None,
) -> list[Span]:
    """The chunks of a text, in order.

    A chunk ends where the last 32 tokens hash to a small number, between `minimum` and `maximum` tokens behind its
    beginning; so an edit moves the ends near it, and none behind. What follows the last such end is no chunk: with
    other text behind it, it would end elsewhere.

    `marks`: first token and end of each document, in order and apart, at most 65,536. Then each is cut by itself, its
    rest is a chunk however short, and what lies between documents is none. Raises `UsageError`.
    """
    return spans_of(words_of(tokens), Lengths(minimum, mean, maximum).check(), marks)


def spans_of(
    words: npt.NDArray[np.uint32], lengths: Lengths, marks: Sequence[tuple[int, int]] | None = None
) -> list[Span]:
    """The same over 32-bit words."""
    if marks is None:
        ends = np.frombuffer(native().cut(words, *lengths), np.int64).tolist()
        return list(map(Span, [0, *ends], ends))
    found: list[Span] = []
    for first, end in checked_marks(marks, len(words)):
        ends = np.frombuffer(native().cut(words[first:end], *lengths), np.int64) + first
        ends = [*ends.tolist()]
        if not ends or ends[-1] < end:
            ends.append(end)
        found += map(Span, [first, *ends], ends)
    return found


def checked_marks(marks: Sequence[tuple[int, int]], tokens: int) -> list[Span]:
    """As spans. Raises `UsageError` for documents that are empty, overlap, are out of order, or leave the text."""
    if len(marks) > MARKS_MAX:
        raise UsageError(f"{len(marks):,} marks, and the limit is {MARKS_MAX:,}: mark fewer documents, or none")
    found, before = [], 0
    for mark in marks:
        try:
            first, end = map(index, mark)
        except (TypeError, ValueError):
            raise UsageError(f"the mark {mark!r:.80} is not the first token and the end of a document") from None
        if not before <= first < end <= tokens:
            raise UsageError(
                f"the mark {(first, end)!r:.80} is no document behind token {before} in a text of {tokens} tokens: "
                "sort them, apart from each other"
            )
        found.append(Span(first, end))
        before = end
    return found
