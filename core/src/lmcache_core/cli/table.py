"""Tables for people: by rich on a terminal where it is installed (extra `cli`), plain aligned lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, TextIO


def rich_or_none(stream: TextIO) -> Any:
    """The rich package, where it is installed and `stream` is a terminal: piped output stays plain."""
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
        table.add_row(*(Text(cell) for cell in row))  # Text: a value with [brackets] is no markup
    rich.console.Console(file=out).print(table)


def plain_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], *, title: str = "", right: Sequence[int] = ()
) -> str:
    """Aligned lines, two spaces between columns, nothing cut off."""
    widths = [max(len(line[i]) for line in (columns, *rows)) for i in range(len(columns))]
    lines = [title] if title else []
    for row in (columns, ["-" * width for width in widths], *rows):
        cells = [
            cell.rjust(width) if position in right else cell.ljust(width)
            for position, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines) + "\n"
