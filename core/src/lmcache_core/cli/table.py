"""Tables for people: drawn by rich (extra `cli`) on a terminal, otherwise plain aligned lines."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, TextIO

WIDTH_CHARS = 80  # width in a pipe, or without rich
COLUMN_CHARS_MIN = 8  # columns that wrap are at least this wide
WORD_CHARS_MAX = 20  # words up to this length are not broken, if the columns can be made to fit


def rich_or_none(stream: TextIO) -> Any:
    """The rich package, if it is installed and `stream` is a terminal: output into a pipe stays plain."""
    if not stream.isatty():
        return None
    try:
        import rich
        import rich.console
    except ImportError:
        return None
    return rich


def print_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    title: str = "",
    right: Sequence[int] = (),
    stream: TextIO | None = None,
) -> None:
    """Print `rows` under `columns`; the columns numbered in `right` are right-aligned (figures)."""
    out = sys.stdout if stream is None else stream
    rich = rich_or_none(out)
    if rich is None:
        out.write(plain_table(columns, rows, title=title, right=right))
        return
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title or None, title_justify="left")
    for position, column in enumerate(columns):
        table.add_column(column, justify="right" if position in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))  # Text: [brackets] in a value are not markup
    rich.console.Console(file=out).print(table)


def plain_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], *, title: str = "", right: Sequence[int] = ()
) -> str:
    """Aligned lines of at most 80 characters, with two spaces between columns. Nothing is cut off: long cells continue
    below, except figures."""
    widths = _widths(columns, rows, right)
    lines = textwrap.wrap(title, WIDTH_CHARS) if title else []
    for row in (columns, ["-" * width for width in widths], *rows):
        wrapped = [_lines_of(cell, width) for cell, width in zip(row, widths, strict=True)]
        for part in zip_longest(*wrapped, fillvalue=""):
            cells = [
                cell.rjust(width) if position in right else cell.ljust(width)
                for position, (cell, width) in enumerate(zip(part, widths, strict=True))
            ]
            lines.append("  ".join(cells).rstrip())
    return "\n".join(lines) + "\n"


def _widths(columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int]) -> list[int]:
    """The width of each column, in characters. The widest columns that may wrap shrink first, and the first column,
    which says what a row is about, last."""
    longest = [max(len(line[i]) for line in rows) if rows else 0 for i in range(len(columns))]
    # The header of a column of figures wraps, too, if the figures are shorter.
    widths = [max(inside, len(name)) for inside, name in zip(longest, columns, strict=True)]
    least = [
        max(longest[i], _longest_word(name)) if i in right else min(widths[i], COLUMN_CHARS_MIN)
        for i, name in enumerate(columns)
    ]
    words = [_longest_word(" ".join(cell[i] for cell in (columns, *rows))) for i in range(len(columns))]
    for most in range(WORD_CHARS_MAX, COLUMN_CHARS_MIN, -1):
        whole = [max(at_least, min(most, word)) for at_least, word in zip(least, words, strict=True)]
        if sum(whole) + 2 * (len(widths) - 1) <= WIDTH_CHARS:
            least = whole
            break
    over = sum(widths) + 2 * (len(widths) - 1) - WIDTH_CHARS
    while over > 0:
        gives = [i for i in range(1, len(widths)) if widths[i] > least[i]] or [0]
        if widths[gives[0]] <= least[gives[0]]:
            break
        widest = max(gives, key=lambda i: widths[i])
        next_to_it = max([widths[i] for i in gives if i != widest], default=0)  # equally wide columns take turns
        by = min(over, max(1, widths[widest] - max(next_to_it, least[widest])))
        widths[widest] -= by
        over -= by
    return widths


def _longest_word(text: str) -> int:
    return max(map(len, text.split()), default=0)


def _lines_of(cell: str, width: int) -> list[str]:
    if len(cell) <= width:
        return [cell]
    return textwrap.wrap(cell, width, break_on_hyphens=False) or [""]
