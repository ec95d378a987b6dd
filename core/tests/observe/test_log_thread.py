from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Iterator

import pytest

from lmcache_core.limits import LOG_LINES_MAX
from lmcache_core.observe.lines import JsonLines, named
from lmcache_core.observe.log_thread import LogThread, TextLines


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def logger(handler: logging.Handler) -> logging.Logger:
    made = logging.Logger("test")
    made.addHandler(handler)
    return made


def read_until(fd: int, text: str) -> str:
    found = b""
    while text.encode() not in found:
        found += os.read(fd, 1 << 16)
    return found.decode()


def test_a_log_that_nobody_takes_stalls_nobody_and_says_what_was_lost(pipe: tuple[int, int]) -> None:
    thread = LogThread(pipe[1], TextLines())
    log = logger(thread)
    for number in range(LOG_LINES_MAX + 5_000):  # a pipe takes 64 KiB of them
        log.warning("line %d", number)
    told = read_until(pipe[0], "lines of the log were lost")
    assert "line 0" in told
    closing = threading.Thread(target=thread.close)
    closing.start()
    end, found = threading.Thread(target=lambda: (closing.join(), os.write(pipe[1], b"END"))), told
    end.start()
    while not found.endswith("END"):
        found += os.read(pipe[0], 1 << 16).decode()
    end.join()
    lost = [int(line.split(": ")[1].split()[0]) for line in found.splitlines() if "lines of the log were lost" in line]
    assert sum(lost) + found.count(" line ") == LOG_LINES_MAX + 5_000, "also what was lost last is told"


def test_a_wrong_call_of_logging_is_a_line_and_waits_for_no_stream(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Hangs:
        def write(self, text: str) -> None:
            raise AssertionError("its reader may hang")

    monkeypatch.setattr(sys, "stderr", Hangs())
    thread = LogThread(pipe[1], TextLines())

    class Panic(BaseException):
        """Of an extension in another language."""

    class Unspeakable:
        def __str__(self) -> str:
            raise Panic

    logger(thread).warning("%d objects", None)
    logger(thread).warning("%s", Unspeakable())
    logger(thread).warning("well")
    told = read_until(pipe[0], "well")
    assert "str that cannot be formatted: TypeError (a wrong log call)" in told
    assert "str that cannot be formatted: Panic (a wrong log call)" in told
    thread.close()


def test_a_text_from_outside_forges_no_line_and_steers_no_terminal(pipe: tuple[int, int]) -> None:
    thread = LogThread(pipe[1], TextLines())
    forged = "no room\n2026-11-26 12:00:00,000 ERROR root: all is lost\x1b[2J\u2028\u202e"
    try:
        raise ValueError(forged)
    except ValueError:
        logger(thread).exception("tier %s", forged)
    thread.close()
    text = os.read(pipe[0], 1 << 16).decode()
    first, *rest = text.rstrip("\n").split("\n")
    assert first.endswith("tier no room?2026-11-26 12:00:00,000 ERROR root: all is lost?[2J??")
    assert rest
    assert all(line.startswith("  ") for line in rest)
    assert not {"\x1b", "\u2028", "\u202e"} & set(text)


class Odd:
    def __str__(self) -> str:
        raise SystemExit


@pytest.mark.parametrize(
    ("lines", "fields"),
    [
        (JsonLines(), {"extra": named("odd", by_key={b"k": 1})}),
        (JsonLines(), {"extra": named("odd", size=Odd())}),
        (TextLines(), {"exc_info": ("no", "such", "error")}),
    ],
)
def test_a_record_that_cannot_be_written_is_replaced_and_later_ones_follow(
    pipe: tuple[int, int], lines: logging.Formatter, fields: dict[str, object]
) -> None:
    thread = LogThread(pipe[1], lines)
    log = logger(thread)
    log.warning("before")
    log.warning("odd", **fields)
    log.warning("after")
    thread.close()
    before, odd, after = os.read(pipe[0], 1 << 16).decode().splitlines()
    assert "before" in before
    assert "a line of the logger test cannot be written" in odd
    assert "after" in after
