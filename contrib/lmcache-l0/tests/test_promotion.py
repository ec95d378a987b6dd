"""Promotion by a real server, with real workers, all of them killed at any moment: L0 never gives what L1 has lost."""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from lmcache_l0 import SharedCache

sys.path.insert(0, str(Path(__file__).parent))

import promoter  # found through the line above
from promoter import CACHES, CLEARS, READ, READERS, WORDS, words_of


class Zygote:
    """`promoter.py` as a process."""

    def __init__(self, run: Path) -> None:
        self.run, self.name = run, f"l0-{uuid4().hex[:10]}"
        self.children: dict[str, int] = {}
        self._process = subprocess.Popen(
            [sys.executable, promoter.__file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def start(self, role: str) -> None:
        kind, _, number = role.partition(" ")
        self.children[role] = int(self._ask(f"{kind} {self.name} {self.run} {number}"))

    def kill(self, role: str) -> None:
        assert self._ask(f"kill {self.children.pop(role)}") == "gone"

    def check(self) -> None:
        failed = [file.read_text() for file in self.run.glob("failed-*")]
        assert not failed, failed

    def close(self) -> None:
        for role in list(self.children):
            self.kill(role)
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()

    def _ask(self, wish: str) -> str:
        self._process.stdin.write(f"{wish}\n")
        self._process.stdin.flush()
        return self._process.stdout.readline().strip()


@pytest.fixture
def zygote(folder) -> Iterator[Zygote]:
    (folder / "words").write_bytes(bytes(8 * WORDS * CACHES))
    with contextlib.closing(Zygote(folder)) as zygote:
        zygote.start("server")
        for number in range(CACHES):
            zygote.start(f"writer {number}")
        for number in range(READERS):
            zygote.start(f"reader {number}")
        yield zygote
    for left in Path("/dev/shm").glob(f"lmcache-core.*{zygote.name}*"):
        left.unlink()  # the pool that the last kill has left


def counts(words: memoryview) -> tuple[int, int, int]:
    """Read in L0, read in L1, clears that were answered."""
    caches = [words[WORDS * each : WORDS * (each + 1)].tolist() for each in range(CACHES)]
    read = [sum(sum(cache[READ + way :: 2]) for cache in caches) for way in (0, 1)]
    return read[0], read[1], sum(cache[CLEARS] for cache in caches)


def progress(zygote: Zygote, words: memoryview, above: int, below: int, clears: int) -> None:
    """Wait until so much more has been read and cleared."""
    before, end = counts(words), time.monotonic() + 120
    while any(now - then < more for now, then, more in zip(counts(words), before, (above, below, clears), strict=True)):
        zygote.check()
        assert time.monotonic() < end, (before, counts(words))
        time.sleep(0.01)


@pytest.mark.parametrize("kills", [4, pytest.param(60, marks=pytest.mark.slow)])
def test_no_reader_gets_what_was_cleared_whoever_is_killed(zygote, kills):
    words, chance = words_of(zygote.run), random.Random(7)
    progress(zygote, words, 100, 20, 20)
    for turn in range(kills):
        role = "server" if turn % 2 == 0 else chance.choice(list(zygote.children))
        time.sleep(chance.random() * 0.05)  # the moment of the kill is the chance of this test
        zygote.kill(role)
        zygote.start(role)
        progress(zygote, words, 50, 10, 6)
    zygote.check()


def test_no_reader_gets_what_was_cleared_while_the_switch_is_thrown(zygote):
    words = words_of(zygote.run)
    progress(zygote, words, 20, 20, 5)
    with SharedCache((zygote.run / "table").read_text(), create=False) as table:
        for _ in range(20):
            for on in (False, True):
                table.enabled = on
                progress(zygote, words, 10 if on else 0, 5, 2)
        before, until = table.hits, time.monotonic() + 0.3
        while time.monotonic() < until:  # as fast as it goes
            table.enabled = not table.enabled
        table.enabled = True
        assert table.hits == before
    progress(zygote, words, 20, 5, 2)
    zygote.check()
    assert Path(table.path).exists()
