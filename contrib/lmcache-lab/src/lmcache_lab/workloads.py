"""Request traces: the blocks of each request, in order. Read from JSON lines, or generated from a seed.

A trace file has one JSON object on each line, of one of two kinds. Lines of the public Mooncake traces have `hash_ids`,
one id for each block of the request, where equal ids mean an equal prefix up to and including that block, and
`timestamp` in milliseconds. Lines of LMCache's lookup log have `chunk_hashes` instead, hexadecimal texts with the same
meaning within one `model_name`, and `timestamp` in Unix seconds.
"""

from __future__ import annotations

import json
import random
import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import accumulate, count
from math import isfinite
from pathlib import Path
from typing import NamedTuple

from lmcache_core.errors import UsageError

_ID_BITS = 64
_TIME_MAX = 1e15  # milliseconds: beyond any clock's
_HASH = re.compile("(0x)?[0-9a-fA-F]{1,128}")


class Trace(NamedTuple):
    """`requests[i]` are the block ids of request i, first to last."""

    name: str
    requests: list[list[int]]

    @property
    def references(self) -> int:
        return sum(map(len, self.requests))

    @property
    def unique_blocks(self) -> int:
        return len({block for request in self.requests for block in request})


def read_trace(path: Path) -> Trace:
    """The trace in a file, named after it. UsageError names the file and line that are wrong."""
    requests = [blocks for _, blocks in read_requests(path)]
    if not requests:
        raise UsageError(f"{path} has no requests: use a file with one JSON object on each line")
    return Trace(path.stem, requests)


def read_requests(path: Path) -> Iterator[tuple[float, list[int]]]:
    """The time of each request in a file, in milliseconds (0 if it does not say), and its blocks. UsageError as for
    `read_trace`."""
    lines = _Lines()
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield lines.read(line, f"{path}:{number}")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read as a trace ({error}): use a file of JSON lines") from error


class _Lines:
    """Reads lines of either kind."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[object, str], int] = {}  # of hashes, in order of appearance
        self._began_s: float | None = None

    def read(self, line: str, place: str) -> tuple[float, list[int]]:
        """The time in milliseconds, and the blocks."""
        cure = (
            'each line must be a JSON object with "hash_ids", a list of whole numbers from 0 up, of at most 64 bits, '
            'or "chunk_hashes", a list of hexadecimal texts'
        )
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{place} is not JSON ({error}): {cure}") from error
        given = record if isinstance(record, dict) else {}
        at = given.get("timestamp", 0)
        at = at if isinstance(at, int | float) and -_TIME_MAX < at < _TIME_MAX else 0
        if "chunk_hashes" in given:
            hashes = given["chunk_hashes"]
            if not isinstance(hashes, list) or not all(
                isinstance(each, str) and _HASH.fullmatch(each) for each in hashes
            ):
                raise UsageError(f"{place} has no usable chunk_hashes: {cure}")
            if self._began_s is None:
                self._began_s = at
            model = str(given.get("model_name", ""))
            names = [(model, each.removeprefix("0x").lower()) for each in hashes]
            blocks = [self._numbers.setdefault(name, len(self._numbers)) for name in names]
            return max(0.0, 1000 * (at - self._began_s)), blocks
        ids = given.get("hash_ids")
        if not isinstance(ids, list) or not all(type(block) is int and 0 <= block < 1 << _ID_BITS for block in ids):
            raise UsageError(f"{place} has no usable hash_ids: {cure}")
        return at, ids


@dataclass(frozen=True)
class SyntheticSettings:
    """Sessions that share prefixes and return, some much more often than others."""

    sessions: int = 400
    turns: int = 8  # requests of a session on average; each repeats the whole session and extends it
    turn_blocks: int = 6  # blocks that a turn adds, on average
    prefixes: int = 16  # shared prefixes (system prompts, documents)
    prefix_blocks: int = 24  # blocks of a shared prefix, on average
    skew: float = 1.0  # Zipf exponent, of prefixes over sessions and of turns over sessions in progress
    active: int = 40  # sessions in progress at once
    seed: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isfinite(value):
                raise UsageError(f"synthetic trace: {field.name} = {value} is not finite")
            least = 0 if field.name in ("skew", "seed") else 1
            if value < least:
                raise UsageError(f"synthetic trace: {field.name} = {value} is below {least}")


def parse_synthetic(text: str) -> SyntheticSettings:
    """Parses `sessions=400,skew=1.2,seed=7`; names that are missing, or an empty text, keep the defaults."""
    known = {field.name: float if field.name == "skew" else int for field in fields(SyntheticSettings)}
    values: dict[str, float | int] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        name = name.strip()
        if name not in known:
            raise UsageError(f"synthetic trace: {name!r} is not one of {', '.join(known)}")
        try:
            values[name] = known[name](value)
        except ValueError as error:
            raise UsageError(f"synthetic trace: {name} = {value!r} is not a number of the right kind") from error
    return SyntheticSettings(**values)  # type: ignore[arg-type]  # each value was made by its field's own type


def synthetic_trace(settings: SyntheticSettings) -> Trace:
    """The same trace for the same settings, on every machine and Python version."""
    rng = random.Random(settings.seed)
    ids = count()
    # Shared prefixes of prefix_blocks / 2 to prefix_blocks * 3 / 2 blocks.
    prefixes = [_fresh(ids, _around(rng, settings.prefix_blocks)) for _ in range(settings.prefixes)]
    prefix_weights = _zipf(settings.prefixes, settings.skew)
    active: list[tuple[list[int], int]] = []
    waiting = settings.sessions
    requests = []
    while waiting or active:
        while waiting and len(active) < settings.active:
            active.append((list(prefixes[_draw(rng, prefix_weights)]), _around(rng, settings.turns)))
            waiting -= 1
        chosen = _draw(rng, _zipf(len(active), settings.skew))
        blocks, turns_left = active.pop(chosen)
        blocks = blocks + _fresh(ids, _around(rng, settings.turn_blocks))
        requests.append(blocks)
        if turns_left > 1:
            # Returns to its place: a busy session stays busy until it ends.
            active.insert(chosen, (blocks, turns_left - 1))
    return Trace(f"synthetic-{settings.seed}", requests)


def _fresh(ids: count[int], number: int) -> list[int]:
    return [next(ids) for _ in range(number)]


def _around(rng: random.Random, mean: int) -> int:
    """A whole number from about mean / 2 to about mean * 3 / 2, at least 1."""
    low = max(1, mean - mean // 2)
    return low + int(rng.random() * (2 * (mean - low) + 1))


def _zipf(number: int, skew: float) -> list[float]:
    """Cumulated weights of 1 / rank ** skew."""
    return list(accumulate((rank + 1) ** -skew for rank in range(number)))


def _draw(rng: random.Random, cumulated: list[float]) -> int:
    # Only random() itself is guaranteed to return the same numbers in later Python versions.
    return min(bisect_right(cumulated, rng.random() * cumulated[-1]), len(cumulated) - 1)
