"""Tables for people. They are as wide as COLUMNS or the terminal says, and no word is ever cut; where neither says
anything (a pipe, a file), each row is one line. On a terminal, rich (extra `cli`) draws and colours them."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, TextIO

from lmcache_core.errors import printable

MARKS = {"ok": "green", "look": "yellow", "NOT OK": "bold red"}  # colours of these words in the first column
_GAP = 2


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


def width_of(stream: TextIO) -> int | None:
    """How many columns there are: COLUMNS, or those of the terminal. None: a line may have any length."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns):
        return int(columns)
    try:
        return os.get_terminal_size(stream.fileno()).columns or None  # some terminals do not know
    except (OSError, ValueError):
        return None


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
    rows = [[printable(cell) for cell in row] for row in rows]
    rich, width = rich_or_none(out), width_of(out)
    if rich is None:
        out.write(plain_table(columns, rows, title=title, right=right, width=width))
        return
    from rich.table import Table
    from rich.text import Text

    # Not rich's NO_COLOR, which leaves bold letters; TERM and the rest are its own.
    colours = {"color_system": None} if os.environ.get("NO_COLOR") else {}
    console = rich.console.Console(file=out, width=width, highlight=False, **colours)
    # rich would cut words, so the widths are ours. Each column has a border and two spaces.
    widths = _widths(columns, rows, right, console.width - 3 * len(columns) - 1)
    if widths is None:
        for line in _one_below_the_other(columns, rows, title, console.width):
            name, gap, text = line.partition(" ")
            console.print(Text(name + gap) + Text(text, MARKS.get(text.strip(), "")), soft_wrap=True)
        return
    # Text: [brackets] in a value are not markup.
    table = Table(title=Text(title) if title else None, title_justify="left")
    for position, (column, column_width) in enumerate(zip(columns, widths, strict=True)):
        table.add_column(Text(column), justify="right" if position in right else "left", width=column_width)
    for row in rows:
        table.add_row(Text(row[0], MARKS.get(row[0], "")), *map(Text, row[1:]))
    console.print(table)


def plain_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    title: str = "",
    right: Sequence[int] = (),
    width: int | None = None,
) -> str:
    """Aligned lines of at most `width` characters (None: any number), with two spaces between columns. Long cells
    continue below, except figures. If not even the longest words of all columns have room side by side, the cells of a
    row stand one below the other."""
    widths = _widths(columns, rows, right, None if width is None else width - _GAP * (len(columns) - 1))
    if widths is None:
        return "\n".join(_one_below_the_other(columns, rows, title, width)) + "\n"
    lines = wrapped(title, width) if title else []
    ruled = widths if width is not None else [*widths[:-1], len(columns[-1])]  # nothing is aligned with the last one
    for row in (columns, ["-" * column_width for column_width in ruled], *rows):
        cells = [wrapped(cell, column_width) for cell, column_width in zip(row, widths, strict=True)]
        for part in zip_longest(*cells, fillvalue=""):
            aligned = [
                cell.rjust(column_width) if position in right else cell.ljust(column_width)
                for position, (cell, column_width) in enumerate(zip(part, widths, strict=True))
            ]
            lines.append((" " * _GAP).join(aligned).rstrip())
    return "\n".join(lines) + "\n"


def wrapped(text: str, width: int | None, *, first: str = "", rest: str = "") -> list[str]:
    """Lines of at most `width` characters, unless a word is longer. They begin with `first` and `rest`."""
    if width is None or len(first) + len(text) <= width:
        return [first + text]
    return textwrap.wrap(
        text, width, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    ) or [first]


def _one_below_the_other(
    columns: Sequence[str], rows: Sequence[Sequence[str]], title: str, width: int | None
) -> list[str]:
    names = max(map(len, columns)) + _GAP
    lines = wrapped(title, width) if title else []
    for row in rows:
        for name, cell in zip(columns, row, strict=True):
            lines += wrapped(cell, width, first=name.ljust(names), rest=" " * names)
        lines.append("")
    return [line.rstrip() for line in lines[:-1]]


def _widths(
    columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int], room: int | None
) -> list[int] | None:
    """The width of each column, in characters, so that all together have `room`; None if their words have none. The
    widest columns that may wrap shrink first, and the first column, which says what a row is about, last."""
    longest = [max((len(row[i]) for row in rows), default=0) for i in range(len(columns))]
    widths = [max(inside, len(name)) for inside, name in zip(longest, columns, strict=True)]
    # The header of a column of figures wraps, too, if the figures are shorter.
    least = [
        max(longest[i], _longest_word(name))
        if i in right
        else _longest_word(" ".join([name, *(row[i] for row in rows)]))
        for i, name in enumerate(columns)
    ]
    if room is None:
        return widths
    if sum(least) > room:
        return None
    over = sum(widths) - room
    while over > 0:
        gives = [i for i in range(1, len(widths)) if widths[i] > least[i]] or [0]
        widest = max(gives, key=lambda i: widths[i])
        next_to_it = max([widths[i] for i in gives if i != widest], default=0)  # equally wide columns take turns
        by = min(over, max(1, widths[widest] - max(next_to_it, least[widest])))
        widths[widest] -= by
        over -= by
    return widths


def _longest_word(text: str) -> int:
    return max(map(len, text.split()), default=0)
