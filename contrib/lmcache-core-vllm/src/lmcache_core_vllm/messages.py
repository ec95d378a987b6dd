"""Calls of the scheduler's side to the server in the background: no step waits for them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from lmcache_core import Client
from lmcache_core.client import EngineBlocks
from lmcache_core.errors import CacheError
from lmcache_core.tokens.namespace import Namespace

log = logging.getLogger("vllm.lmcache_core")

REPORTS_WAITING_MAX = 64  # one for each step or load: a server that is so far behind gets no later ones


class Messages:
    """One call after another, in a thread that begins with the first."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._closed = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="lmcache-core-messages")
        self._reports = 0  # that wait; the thread counts down
        self._reported = 0

    def give_back(self, numbers: list[int]) -> None:
        """Free these promises: soon, what they still hold may be evicted."""
        if numbers and not self._closed:
            self._thread.submit(self._call, lambda: self._client.free_lookup_locks(numbers))

    def report(self, keys: Sequence[bytes], blocks: EngineBlocks, namespace: Namespace) -> bool:
        """Report which of the engine's blocks these keys hold. False: too many reports wait already, so this one is
        dropped."""
        if self._closed or self._reports - self._reported >= REPORTS_WAITING_MAX:
            return False
        self._reports += 1
        self._thread.submit(self._report, keys, blocks, namespace)
        return True

    def _report(self, keys: Sequence[bytes], blocks: EngineBlocks, namespace: Namespace) -> None:
        self._reported += 1  # of this thread alone
        self._call(lambda: self._client.report_block_allocation(keys, blocks, namespace=namespace))

    @staticmethod
    def _call(call: Callable[[], object]) -> None:
        try:
            call()
        except CacheError as error:  # promises expire by themselves, and unreported blocks are only not found
            log.debug("the server could not be told: %s", error)

    def close(self) -> None:
        """Drops calls that have not begun: the client's promises end with it."""
        self._closed = True
        self._thread.shutdown(wait=False, cancel_futures=True)
