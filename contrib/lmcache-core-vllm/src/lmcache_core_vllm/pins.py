"""The pool, registered with CUDA: without it, a device copies through a buffer of the driver, and slower."""

from __future__ import annotations

import logging
import threading

from lmcache_core import Client
from lmcache_core.errors import CacheError, DisconnectedError

log = logging.getLogger("vllm.lmcache_core")


class PoolPins:
    """Registers each pool that the client maps, on a thread of its own: a large one takes seconds, and comes anew with
    each restart of the server. Until then, and where CUDA refuses, copies are made all the same."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._thread: threading.Thread | None = None
        self._refused = False

    def look(self) -> None:
        """Begin where there is a pool that is not registered. Waits for nothing."""
        if self._refused or self._client.pool_is_pinned is not False or (self._thread and self._thread.is_alive()):
            return
        self._thread = threading.Thread(target=self._pin, name="lmcache-core-pin", daemon=True)
        self._thread.start()

    def _pin(self) -> None:
        try:
            self._client.pin_memory()
        except DisconnectedError:
            return  # the next step looks again
        except CacheError as error:
            self._refused = True
            log.warning("the pool is not registered with CUDA, so its copies are slower: %s", error)
        else:
            log.info("the pool is registered with CUDA")
