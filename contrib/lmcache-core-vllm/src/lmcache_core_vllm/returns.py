"""Promises go back to the server behind the engine's back: each is a call, and no step waits for it."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor

from lmcache_core.client.client import Client
from lmcache_core.errors import CacheError

log = logging.getLogger("vllm.lmcache_core")


class Returns:
    """Gives promises back, one call after another, in a thread that begins with the first."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._closed = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="lmcache-core-returns")

    def give_back(self, numbers: list[int]) -> None:
        """What is still kept under these numbers may be evicted from soon on."""
        if numbers and not self._closed:
            self._thread.submit(self._call, numbers)

    def _call(self, numbers: list[int]) -> None:
        try:
            self._client.free_lookup_locks(numbers)
        except CacheError as error:  # they end by themselves
            log.debug("promises could not be given back: %s", error)

    def close(self) -> None:
        """Calls that have not begun are left out: what the client was promised ends with it."""
        self._closed = True
        self._thread.shutdown(wait=False, cancel_futures=True)
