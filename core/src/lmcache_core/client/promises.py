"""A promise: what a lookup found stays in the pool until it is read, given back, or expires."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Promise:
    """The result of `lookup(hold=True)` for the keys that it found, however many. A plain value: pickle it, and let any
    worker of the same namespace redeem it, or a `slice` of it, with `retrieve` or `prepare_retrieve`.

    `ids`: for each key the id under which the server holds it, 0 if it does not. `expires_at`: when it ends, on
    `time.monotonic()`, which all processes of a machine share; `Client.renew` returns one that ends later.
    """

    ids: tuple[int, ...]
    keys: tuple[bytes, ...]
    expires_at: float

    def __bool__(self) -> bool:
        """Whether it holds anything."""
        return any(self.ids)

    @property
    def numbers(self) -> list[int]:
        """The server's ids, each once."""
        return [number for number in dict.fromkeys(self.ids) if number]

    def slice(self, first: int, end: int) -> Promise:
        """The part for `keys[first:end]`, for example for one rank of many."""
        return Promise(self.ids[first:end], self.keys[first:end], self.expires_at)

    def ids_of(self, keys: Sequence[bytes]) -> Sequence[int]:
        """For each of these keys the id that holds it, 0 for none."""
        if len(keys) <= len(self.keys) and tuple(keys) == self.keys[: len(keys)]:
            return self.ids[: len(keys)]
        by_key = dict(zip(self.keys, self.ids, strict=True))
        return [by_key.get(bytes(key), 0) for key in keys]

    @staticmethod
    def none(count: int) -> Promise:
        """That so many keys are not held, so that the promises around it can be separated again."""
        return Promise((0,) * count, (b"",) * count, math.inf)

    @staticmethod
    def joined(parts: Sequence[Promise]) -> Promise | None:
        """One promise for all their keys; None if nothing is held."""
        if not any(parts):
            return None
        ids = tuple(each for part in parts for each in part.ids)
        keys = tuple(key for part in parts for key in part.keys)
        return Promise(ids, keys, min(part.expires_at for part in parts if part))


def frames_of(keys: Sequence[Any], promise: Promise | None, size: int) -> Iterator[tuple[int, int, int]]:
    """Parts of the keys, of at most `size`, each held by one id: (first, end, id)."""
    if not promise:
        for first in range(0, len(keys), size):
            yield first, min(first + size, len(keys)), 0
        return
    ids = promise.ids_of(keys)
    first = 0
    while first < len(keys):
        end = first + 1
        while end < len(keys) and end - first < size and ids[end] == ids[first]:
            end += 1
        yield first, end, ids[first]
        first = end
