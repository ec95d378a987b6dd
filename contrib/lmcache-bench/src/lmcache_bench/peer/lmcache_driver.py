"""LMCache's own client, which reads from stdin what to do and time. Run as a file by LMCache's Python.

    python lmcache_driver.py tcp://127.0.0.1:PORT

Each line is a JSON object with the name of a method of `Driver` under "do"; its result comes back as one line. This
file imports nothing of lmcache-core or lmcache-bench, and only this file imports lmcache.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from typing import Any

CHUNK_TOKENS = 256
TIMEOUT_S = 60.0
VOCABULARY = 32_000


def tokens_of(seed: int, chunks: int) -> list[int]:
    """Random tokens, the same on both sides."""
    return random.Random(seed).choices(range(1, VOCABULARY), k=chunks * CHUNK_TOKENS)


class Driver:
    """One worker of an engine, as LMCache's server sees it: two-phase calls, and copies into shared memory."""

    def __init__(self, url: str) -> None:
        from lmcache.v1.multiprocess.transport.factory import RequestClientFactory

        self._client = RequestClientFactory.create(url)
        self._client.noop().result(timeout=TIMEOUT_S)
        self._case = 0
        self._requests = 0

    def begin(self, chunks: int, object_bytes: int) -> None:
        """Set the number of chunks per prompt and the object size from now on."""
        import torch
        from lmcache.v1.distributed.api import MemoryLayoutDesc
        from lmcache.v1.multiprocess.custom_types import RegisterEngineDrivenContextPayload
        from lmcache.v1.multiprocess.transfer_context.base import EngineDrivenContextMetadata
        from lmcache.v1.multiprocess.transfer_context.shm import EngineDrivenContextShm

        self._case += 1
        self._chunks = chunks
        hidden = object_bytes // (2 * CHUNK_TOKENS)
        shape = torch.Size([2, 1, CHUNK_TOKENS, hidden])
        payload = RegisterEngineDrivenContextPayload(
            self._case, f"case-{self._case}", 1, CHUNK_TOKENS, 1, hidden, "uint8", False, CHUNK_TOKENS
        )
        context = self._client.register_kv_cache_engine_driven_context(payload).result(timeout=TIMEOUT_S)
        layout = MemoryLayoutDesc(shapes=[shape], dtypes=[torch.uint8])
        metadata = EngineDrivenContextMetadata(layout_desc=layout, block_size=CHUNK_TOKENS, use_mla=False)
        # LMCache's own factory would fall back to pickled copies if shared memory fails: then there is nothing to
        # measure.
        self._context = EngineDrivenContextShm(metadata, self._client, TIMEOUT_S, context.shm_name, context.pool_size)
        self._sources = [torch.full(tuple(shape), number % 251, dtype=torch.uint8) for number in range(chunks)]
        self._targets = [torch.zeros(tuple(shape), dtype=torch.uint8) for _ in range(chunks)]

    def store(self, seed: int) -> float:
        """Seconds to store a new prompt."""
        key = self._key(seed)
        began_s = time.perf_counter()
        prepared = self._context.prepare_store(key, self._case)
        slots, numbers = prepared
        for slot, number in zip(slots, numbers, strict=True):
            slot.copy_(self._sources[number])
        stored = self._context.commit_store(key, self._case, [])
        took_s = time.perf_counter() - began_s
        if not stored or len(slots) != self._chunks:
            raise RuntimeError(f"LMCache took {len(slots)} of {self._chunks} objects")
        return took_s

    def lookup(self, seed: int) -> float:
        """Seconds until the lookup has found all of it."""
        key = self._key(seed)
        took_s = self._lookup(key)
        self._client.free_lookup_locks(key.no_worker_id_version(), 1).result(timeout=TIMEOUT_S)
        self._client.end_session(key.request_id).result(timeout=TIMEOUT_S)
        return took_s

    def retrieve(self, seed: int) -> float:
        """Seconds to copy all of it out, after the lookup."""
        key = self._key(seed)
        self._lookup(key)
        began_s = time.perf_counter()
        slots = self._context.prepare_retrieve(key, self._case)
        for slot, target in zip(slots or (), self._targets, strict=True):
            target.copy_(slot)
        self._context.commit_retrieve(key, self._case)
        took_s = time.perf_counter() - began_s
        self._client.end_session(key.request_id).result(timeout=TIMEOUT_S)
        return took_s

    def check(self, seed: int) -> None:
        """Check that it returns what was stored."""
        self.retrieve(seed)
        for number, (source, target) in enumerate(zip(self._sources, self._targets, strict=True)):
            if not source.equal(target):
                raise RuntimeError(f"object {number} came back from LMCache with other bytes")

    def clear(self) -> None:
        """Clear everything stored."""
        self._client.clear(True).result(timeout=TIMEOUT_S)

    def _lookup(self, key: Any) -> float:
        shared_key = key.no_worker_id_version()
        began_s = time.perf_counter()
        self._client.lookup(shared_key, 1).result(timeout=TIMEOUT_S)
        found = self._client.wait_prefetch_status(key.request_id, TIMEOUT_S).result(timeout=TIMEOUT_S)
        took_s = time.perf_counter() - began_s
        if found != self._chunks:
            raise RuntimeError(f"LMCache found {found} of {self._chunks} objects")
        return took_s

    def _key(self, seed: int) -> Any:
        from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey

        self._requests += 1
        tokens = tuple(tokens_of(seed, self._chunks))
        return IPCCacheServerKey(
            f"case-{self._case}", 1, 0, tokens, 0, len(tokens), f"request-{self._requests}", num_kv_readers=1
        )


def main() -> None:
    """Answer line by line."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # LMCache's output is not an answer

    def say(value: dict[str, Any]) -> None:
        out.write(json.dumps(value) + "\n")
        out.flush()

    driver = Driver(sys.argv[1])
    say({"said": "ready"})
    for line in sys.stdin:
        request = json.loads(line)
        try:
            say({"said": getattr(driver, request.pop("do"))(**request)})
        except Exception as error:  # noqa: BLE001  # reported to the caller
            say({"error": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    main()
