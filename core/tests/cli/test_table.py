"""Tables: as wide as they are told, one line a row into a pipe, and never a word in two."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_core.cli.table import plain_table
from lmcache_testing.waiting import WAIT_S

COLUMNS = ("", "subject", "finding", "cure")
ROWS = [
    ("ok", "eviction_policy", "a word " * 30, "a cure " * 20),
    ("look", "tier 'cold'", "grows until /mnt/fast/cache/of/the/node is full", "set l2.cold.capacity_bytes"),
    ("NOT OK", "[red]l1[/red]", "no room", ""),
]
SCRIPT = "from lmcache_core.cli.table import print_table; print_table({}, {}, title='a title')"
COLOURS = re.compile(r"\x1b\[[\d;]*m")


def environment(**also: str) -> dict[str, str]:
    """Of a person's shell, without what this test itself runs under."""
    left_out = ("COLUMNS", "NO_COLOR", "FORCE_COLOR", "TERM", "COLORTERM")
    return {name: value for name, value in os.environ.items() if name not in left_out} | {"TERM": "xterm"} | also


def piped(columns: Sequence[str], rows: Sequence[Sequence[str]], **env: str) -> str:
    argv = [sys.executable, "-c", SCRIPT.format(columns, rows)]
    return subprocess.run(argv, env=environment(**env), capture_output=True, text=True, check=True).stdout


def on_a_terminal(width: int, columns: Sequence[str], rows: Sequence[Sequence[str]], *, rich: bool, **env: str) -> str:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 40, width, 0, 0))
    without = "" if rich else "import sys; sys.modules['rich'] = None; "
    argv = [sys.executable, "-c", without + SCRIPT.format(columns, rows)]
    process = subprocess.Popen(argv, stdin=theirs, stdout=theirs, stderr=theirs, env=environment(**env))
    os.close(theirs)
    shown = b""
    try:
        while part := os.read(ours, 65536):
            shown += part
    except OSError:  # the other end was closed
        pass
    finally:
        os.close(ours)
        assert process.wait(WAIT_S) == 0, shown
    return shown.decode().replace("\r\n", "\n")


def words(rows: Sequence[Sequence[str]]) -> set[str]:
    return {word for row in rows for cell in row for word in cell.split()}


def test_into_a_pipe_each_row_is_one_line() -> None:
    title, head, rule, *rows = piped(COLUMNS, ROWS).splitlines()
    assert title == "a title"
    assert head.split() == ["subject", "finding", "cure"]
    assert set(rule) == {"-", " "}
    assert [" ".join(line.split()) for line in rows] == [" ".join(" ".join(row).split()) for row in ROWS]


@pytest.mark.parametrize("width", [50, 70, 120])
def test_COLUMNS_is_followed_without_a_terminal(width: int) -> None:
    lines = piped(COLUMNS, ROWS, COLUMNS=str(width)).splitlines()
    assert max(map(len, lines)) <= width
    assert words(ROWS) <= set(" ".join(lines).split())


@pytest.mark.parametrize("rich", [False, True])
@pytest.mark.parametrize("width", [30, 60, 80, 133])
def test_a_terminals_width_is_followed_and_no_word_is_cut(width: int, rich: bool) -> None:
    if rich:
        pytest.importorskip("rich")
    text = COLOURS.sub("", on_a_terminal(width, COLUMNS, ROWS, rich=rich))
    longest = max(map(len, words(ROWS)))
    assert all(len(line) <= width or longest + 10 > width for line in text.splitlines())
    assert words(ROWS) <= set(re.sub("[│┃┏┓┗┛┡┩└┘├┤─━┳┴╇]", " ", text).split())


def test_COLUMNS_wins_over_the_terminal() -> None:
    text = on_a_terminal(200, COLUMNS, ROWS, rich=False, COLUMNS="60")
    assert max(map(len, text.splitlines())) <= 60


def test_marks_have_colours_on_a_terminal_only_and_NO_COLOR_takes_all() -> None:
    pytest.importorskip("rich")
    for width in (100, 30):
        text = on_a_terminal(width, COLUMNS, ROWS, rich=True)
        found = [re.search(rf"\x1b\[([\d;]+)m *{mark} *\x1b", text) for mark in ("ok", "look", "NOT OK")]
        assert [each and each[1] for each in found] == ["32", "33", "1;31"]
        assert "[red]l1[/red]" in COLOURS.sub("", text)
        assert "\x1b" not in on_a_terminal(width, COLUMNS, ROWS, rich=True, NO_COLOR="1")
    assert "\x1b" not in piped(COLUMNS, ROWS)


def test_columns_that_wrap_share_what_there_is() -> None:
    table = plain_table(COLUMNS, ROWS[:1], width=80)
    first = table.splitlines()[1].split("  ")
    assert [len(dashes) for dashes in first] == [2, 15, 28, 29]


def test_where_the_words_have_no_room_side_by_side_cells_stand_one_below_the_other() -> None:
    text = plain_table(("name", "n"), [("x" * 60, "1"), ("[red]", "22")], title="t", right=(1,), width=40)
    assert text.splitlines() == ["t", "name  " + "x" * 60, "n     1", "", "name  [red]", "n     22"]


@given(
    st.lists(st.lists(st.text("ab /-", max_size=40), min_size=3, max_size=3), max_size=4),
    st.sets(st.integers(0, 2)),
    st.integers(1, 90),
)
def test_every_word_is_there_whole_at_any_width(rows: list[list[str]], right: set[int], width: int) -> None:
    text = plain_table(("one", "two", "three"), rows, right=sorted(right), width=width)
    assert words(rows) <= set(text.split())
