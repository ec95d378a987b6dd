"""What the cache has of a request, asked without making a step of the engine wait."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from lmcache_core.client.client import Client
from lmcache_core.client.lookups import LookupHandle
from lmcache_core.client.results import Status
from lmcache_core.limits import BATCH_KEYS_MAX
from lmcache_core.tokens.namespace import Namespace
from lmcache_core_vllm.groups import Group, Kind, longest_boundary

_THERE = (Status.GRANTED, Status.HIT)


class Found(NamedTuple):
    """The cache has a request's blocks from `start` tokens on up to `boundary`."""

    start: int
    boundary: int
    tokens: int  # of the request, when it was looked up
    at_s: float
    reachable: bool


class Lookup:
    """One request's question to all groups and ranks. Look at `found` until it is there; nothing here waits but
    `wait`."""

    def __init__(
        self,
        client: Client,
        groups: Sequence[Group],
        ranks: Sequence[Sequence[Namespace]],
        keys_of: Callable[[Sequence[bytes], Namespace], list[bytes]],
        hashes: Sequence[bytes],
        bounds: tuple[int, int, int],
        wait_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`bounds`: the tokens that the engine has, the last boundary that may be a hit, and the request's tokens."""
        self.began_s = clock()
        self._clock = clock
        self._groups = groups
        self._start, self._limit, self._tokens = bounds
        self._handles: list[list[list[LookupHandle]]] = []  # by group, rank, frame of keys
        for group in groups:
            first, end = self._start // group.block_tokens, self._limit // group.block_tokens
            chosen = group.block_hashes(hashes, first, end)
            of_group = []
            for namespaces in ranks:
                keys = keys_of(chosen, namespaces[group.number])
                of_group.append(_ask(client, keys, namespaces[group.number], group.kind is Kind.FULL, wait_s))
            self._handles.append(of_group)

    def wait(self, timeout_s: float) -> None:
        """Until the answer is there, at most for that long."""
        until = self._clock() + timeout_s
        for handle in self._all():
            if not handle.done:
                left = until - self._clock()
                if left <= 0:
                    return
                handle.wait(left)

    @property
    def found(self) -> Found | None:
        """None: the server has not answered yet."""
        if not all(handle.done for handle in self._all()):
            return None
        reachable = True
        there = []
        for of_group in self._handles:
            had: list[bool] | None = None
            for handles in of_group:
                of_rank: list[bool] = []
                for handle in handles:
                    result = handle.result
                    assert result is not None
                    reachable &= Status.UNREACHABLE not in result.statuses
                    of_rank += [status in _THERE for status in result.statuses]
                had = of_rank if had is None else [a and b for a, b in zip(had, of_rank, strict=True)]
            there.append(had or [])
        boundary = longest_boundary(self._groups, there, self._start, self._limit)
        return Found(self._start, boundary, self._tokens, self._clock(), reachable)

    def cancel(self) -> None:
        """Nobody wants to know any more."""
        for handle in self._all():
            handle.cancel()

    def _all(self) -> list[LookupHandle]:
        return [handle for of_group in self._handles for of_rank in of_group for handle in of_rank]


def _ask(
    client: Client, keys: Sequence[bytes], namespace: Namespace, prefix: bool, wait_s: float
) -> list[LookupHandle]:
    return [
        client.lookup_nowait(keys[first : first + BATCH_KEYS_MAX], namespace=namespace, prefix=prefix, wait_s=wait_s)
        for first in range(0, len(keys), BATCH_KEYS_MAX)
    ]
