"""Replay of a recording, or of a public trace of requests, against a running server."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from lmcache_core import Client, Status
from lmcache_core.errors import DisconnectedError
from lmcache_core.limits import KEY_BYTES
from lmcache_core.pool.layout import Layout
from lmcache_core.tokens.namespace import Namespace
from lmcache_lab.recorder import CLEAR, LOOKUP, RETRIEVE, STORE, Operation

REQUEST = "request"  # of a public trace: look up, read what is there, store the rest


@dataclass
class ReplayResult:
    """The result of a replay. `hit_rate` counts keys of lookups, as the recording's own does."""

    operations: int = 0
    keys: int = 0
    hits: int = 0
    recorded_keys: int = 0
    recorded_hits: int = 0
    refused: int = 0  # objects that a store was not granted and that were not there already
    seconds: float = 0.0
    late_s: float = 0.0  # the longest delay of an operation
    took_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    @property
    def hit_rate(self) -> float:
        return self.hits / self.keys if self.keys else 0.0

    @property
    def recorded_hit_rate(self) -> float | None:
        """None if the trace does not say."""
        return self.recorded_hits / self.recorded_keys if self.recorded_keys else None


def replay_trace(
    operations: Iterable[Operation],
    connect: Callable[[], Client],
    *,
    speed: float,
    object_bytes: int | None = None,
    retrieves: bool = True,
) -> ReplayResult:
    """Repeat the operations with as many clients as were recorded, `speed` times as fast; 0: one after another without
    pauses, in the recorded order, so that every run gives the same hits. `object_bytes`: the size of every object,
    instead of the recorded one. Raises what a client raises."""
    result = ReplayResult()
    lock = threading.Lock()
    by_worker: dict[int, list[Operation]] = defaultdict(list)
    for operation in operations:
        by_worker[0 if speed == 0 else operation.worker].append(operation)
    errors: list[BaseException] = []
    began = time.monotonic()

    def work(own: Sequence[Operation]) -> None:
        try:
            with connect() as client:
                worker = _Worker(client, object_bytes, retrieves=retrieves)
                for operation in own:
                    if speed and (wait := began + operation.at_us / 1e6 / speed - time.monotonic()) > 0:
                        time.sleep(wait)
                    late = time.monotonic() - (began + operation.at_us / 1e6 / speed) if speed else 0.0
                    worker.do(operation, late, result, lock)
        except BaseException as error:  # noqa: BLE001 - raised by the caller's thread
            errors.append(error)

    threads = [threading.Thread(target=work, args=(own,), name=f"replay-{n}") for n, own in by_worker.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    result.seconds = time.monotonic() - began
    if errors:
        raise errors[0]
    return result


class _Worker:
    """One client, with the operations of one recorded worker."""

    def __init__(self, client: Client, object_bytes: int | None, *, retrieves: bool) -> None:
        self._client = client
        self._object_bytes = object_bytes
        self._retrieves = retrieves
        self._buffers: dict[int, bytearray] = {}

    def do(self, operation: Operation, late_s: float, result: ReplayResult, lock: threading.Lock) -> None:
        nbytes = self._object_bytes or operation.nbytes
        if operation.kind == CLEAR or not operation.keys or not nbytes:
            if operation.kind == CLEAR and nbytes:
                self._client.clear(_namespace(operation.space, nbytes))
            return
        namespace = _namespace(operation.space, nbytes)
        keys = [blake2b(each, digest_size=KEY_BYTES).digest() for each in operation.ids()]
        began = time.monotonic()
        hits = refused = 0
        if operation.kind in (LOOKUP, REQUEST):
            hits = self._client.lookup(keys, namespace=namespace, prefix=operation.prefix).hits
        if operation.kind == RETRIEVE or (operation.kind == REQUEST and hits and self._retrieves):
            wanted = keys if operation.kind == RETRIEVE else keys[:hits]
            self._client.retrieve(wanted, [bytearray(nbytes) for _ in wanted], namespace=namespace, prefix=False)
        if operation.kind in (STORE, REQUEST):
            refused = self._store(keys, namespace, nbytes)
        took = time.monotonic() - began
        with lock:
            result.operations += 1
            result.refused += refused
            result.late_s = max(result.late_s, late_s)
            result.took_s[operation.kind].append(took)
            if operation.kind in (LOOKUP, REQUEST):
                result.keys += len(keys)
                result.hits += hits
            if operation.kind == LOOKUP:
                result.recorded_keys += len(keys)
                result.recorded_hits += operation.hits

    def _store(self, keys: list[bytes], namespace: Namespace, nbytes: int) -> int:
        source = self._buffers.setdefault(nbytes, bytearray(nbytes))
        statuses = self._client.store(keys, [source] * len(keys), namespace=namespace).statuses
        if Status.UNREACHABLE in statuses:
            raise DisconnectedError("the server went away during the replay")
        return sum(status not in (Status.STORED, Status.EXISTS) for status in statuses)


def _namespace(space: int, nbytes: int) -> Namespace:
    return Namespace(f"replay {space:016x}", Layout("uint8", (nbytes,)))
