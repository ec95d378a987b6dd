"""What the scheduler's side tells the server behind the engine's back: each is a call, and no step waits for it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from lmcache_core.client.client import Client
from lmcache_core.client.engine_blocks import EngineBlocks
from lmcache_core.errors import CacheError
from lmcache_core.tokens.namespace import Namespace

log = logging.getLogger("vllm.lmcache_core")

REPORTS_WAITING_MAX = 64  # of a step or a load each: a server that is so far behind hears nothing of later ones


class Messages:
    """One call after another, in a thread that begins with the first."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._closed = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="lmcache-core-messages")
        self._reports = 0  # that wait; the thread counts down
        self._reported = 0

    def give_back(self, numbers: list[int]) -> None:
        """What is still kept under these promises' numbers may be evicted from soon on."""
        if numbers and not self._closed:
            self._thread.submit(self._call, lambda: self._client.free_lookup_locks(numbers))

    def report(self, keys: Sequence[bytes], blocks: EngineBlocks, namespace: Namespace) -> bool:
        """Say which of the engine's blocks these keys hold. False: too many reports wait already, so this one is left
        out."""
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
        except CacheError as error:  # promises end by themselves, and what nobody heard of is looked for in vain
            log.debug("the server could not be told: %s", error)

    def close(self) -> None:
        """Calls that have not begun are left out: what the client was promised ends with it."""
        self._closed = True
        self._thread.shutdown(wait=False, cancel_futures=True)
