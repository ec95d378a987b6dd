"""What was measured of each prompt, in a file to which it is written at once: a measurement takes hours, and goes on
where it ended."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import IO, Any

import msgspec

from lmcache_core.errors import UsageError


class Outcome(msgspec.Struct, frozen=True):
    """Of one prompt at one share. Over the tokens of the question and of the answer: the cosine of the logits; the
    Kullback-Leibler divergence in nats a token; how often the most likely token is the same. `same_answer`: 1 if greedy
    generation gives the same tokens, else 0. `deviation`: of the tokens that were kept, in the second layer, on
    average."""

    cosine: float
    divergence: float
    agreement: float
    same_answer: float
    deviation: float


class Tried(msgspec.Struct, frozen=True):
    """Of one prompt. `digest`: of all that the outcomes depend on; `shortest`, `longest`: tokens of its chunks;
    `outcomes`: one for each share."""

    digest: str
    shortest: int
    longest: int
    outcomes: list[Outcome]


_BEGINS = b'{"digest":'  # each line


class Outcomes:
    """A file of JSON lines, one for each prompt; without a path, in memory alone. A last line that is not whole is
    removed: whoever wrote it was killed. Raises `UsageError` for other lines that are none of a prompt."""

    def __init__(self, path: Path | None) -> None:
        self._known: dict[str, Tried] = {}
        self._file: IO[bytes] | None = None
        if path is None:
            return
        try:
            self._file = path.open("a+b")
        except OSError as error:
            raise UsageError(f"{path} cannot be written: {error.strerror}") from error
        with contextlib.ExitStack() as unless_read:
            unless_read.enter_context(self._file)
            self._file.seek(0)
            whole, _, torn = self._file.read().rpartition(b"\n")
            if torn and not torn.startswith(_BEGINS[: len(torn)]):
                raise UsageError(f"{path} has another content than outcomes: give a new file")
            for number, line in enumerate(whole.split(b"\n") if whole else (), 1):
                try:
                    tried = msgspec.json.decode(line, type=Tried)
                except ValueError as error:
                    raise UsageError(
                        f"{path}, line {number}: {error}: give a file of outcomes, or a new one"
                    ) from error
                self._known[tried.digest] = tried
            if torn:
                self._file.truncate(len(whole) + bool(whole))
            unless_read.pop_all()

    def __enter__(self) -> Outcomes:
        return self

    def __exit__(self, *exc_info: Any) -> None:
        if self._file is not None:
            self._file.close()

    def __contains__(self, digest: str) -> bool:
        return digest in self._known

    def add(self, tried: Tried) -> None:
        """Keep it, whatever happens to this process from now on."""
        self._known[tried.digest] = tried
        if self._file is not None:
            self._file.write(msgspec.json.encode(tried) + b"\n")
            self._file.flush()

    def __getitem__(self, digest: str) -> Tried:
        return self._known[digest]
