"""Objects that lie encoded in the pool: half as large, or a quarter, for a lossy codec's work on both ways.

The server knows nothing of it. The namespace is another one, with opaque bytes of a fixed size as its layout and the
codec in its format: whoever does not decode cannot find the objects. Tiers get the encoded bytes.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lmcache_core import Client, Layout, Namespace, Status
from lmcache_core.errors import DamagedObjectError, UsageError
from lmcache_core.limits import AGREEMENT_MIN, DIVERGENCE_MAX
from lmcache_core.serde.certificate import certificate_for
from lmcache_core.serde.contract import Buffer, Serde
from lmcache_core.tokens.namespace import label_from

BATCH_BYTES = 1 << 20  # of encoded objects that are copied out and then decoded: they stay in the processor's cache
FORMAT = 1  # incremented when the meaning of the bytes in the pool changes


class _Rows(threading.local):
    """Memory of each thread for a batch of encoded objects."""

    def __init__(self) -> None:
        self._row = memoryview(b"")

    def take(self, nbytes: int) -> memoryview:
        if self._row.nbytes < nbytes:
            self._row = memoryview(bytearray(nbytes))
        return self._row[:nbytes]


class Dense:
    """Stores and retrieves objects of one namespace, encoded by a serde whose objects have a fixed size (`int8`,
    `k8v4`, `int4`, `fp8`).

    `namespace` is the one in which they lie: look keys up, and derive them, there. An object that the serde cannot
    encode (see its page: one with a NaN) is not stored. `certificate`: a file of `lmcache-core quality` that the serde
    must have, for this model. Raises `UsageError` for a layout that the serde does not take, or a serde whose objects
    have no fixed size, and `SettingsError` for a certificate that does not do. Any number of threads may use it.
    """

    def __init__(self, client: Client, namespace: Namespace, serde: Serde, certificate: Path | None = None) -> None:
        self.client = client
        self.plain = namespace
        self._serde = serde
        self._rows = _Rows()
        self._nbytes = self._fixed_bytes()
        if certificate is not None:
            described = [(serde.name, serde.parameters())]
            measured = certificate_for(described, certificate, DIVERGENCE_MAX, AGREEMENT_MIN, f"codec {serde.name}")
            measured.check(namespace.layout, namespace.public_label)
        codec = json.dumps([FORMAT, serde.name, dict(serde.parameters()), namespace.layout.text], sort_keys=True)
        self.namespace = replace(
            namespace,
            layout=Layout("uint8", (self._nbytes,)),
            format=f"{namespace.format} in the pool as {codec}",
            label=label_from(namespace.public_label, f" {serde.name}"),
        )

    def store(self, keys: Sequence[bytes], sources: Sequence[Buffer]) -> list[Status]:
        """Encode objects into the pool, each from a buffer of the plain layout. Returns a status for each key:
        `ABORTED` for one that cannot be encoded, the others as `Client.store` has them."""
        with self.client.prepare_store(keys, namespace=self.namespace) as lease:
            written = [at for at in lease.granted if self._put(sources[at], keys[at], lease.view(at))]
            refused = set(lease.granted).difference(written)
            if refused:
                lease.abort(sorted(refused))
            return list(lease.commit(written))

    def retrieve(
        self, keys: Sequence[bytes], into: Sequence[memoryview], *, prefix: bool = True, verify: str | None = None
    ) -> list[Status]:
        """Decode objects out of the pool, each into a buffer of the plain layout. `prefix` and `verify` are those of
        `Client.retrieve`. Targets whose status is not `HIT` have undefined content. An object that proves damaged is a
        miss, and the server drops it."""
        statuses: list[Status] = []
        step = max(1, BATCH_BYTES // self._nbytes)
        for first in range(0, len(keys), step):
            statuses += self._batch(keys[first : first + step], into[first : first + step], prefix, verify)
            if prefix and statuses[-1] is not Status.HIT:
                break
        return statuses + [Status.MISS] * (len(keys) - len(statuses))

    def _batch(
        self, keys: Sequence[bytes], into: Sequence[memoryview], prefix: bool, verify: str | None
    ) -> list[Status]:
        row = self._rows.take(len(keys) * self._nbytes)
        encoded = [row[at * self._nbytes : (at + 1) * self._nbytes] for at in range(len(keys))]
        got = self.client.retrieve(keys, encoded, namespace=self.namespace, prefix=prefix, verify=verify)
        statuses = list(got.statuses)
        for at, status in enumerate(statuses):
            if status is Status.HIT:
                try:
                    self._serde.decode(encoded[at], into[at], self.plain.layout, keys[at])
                except DamagedObjectError:
                    statuses[at] = Status.MISS
                    found = [got.incarnations[at]]
                    self.client.report_damaged([keys[at]], namespace=self.namespace, incarnations=found)
        if prefix and Status.HIT in statuses:
            hits = next((at for at, status in enumerate(statuses) if status is not Status.HIT), len(statuses))
            statuses[hits:] = [Status.MISS] * (len(statuses) - hits)
        return statuses

    def _put(self, source: Buffer, key: bytes, slot: memoryview) -> bool:
        parts = [memoryview(part) for part in self._encoded(memoryview(source).cast("B").toreadonly(), key)]
        if sum(part.nbytes for part in parts) != self._nbytes:
            return False
        at = 0
        for part in parts:
            slot[at : at + part.nbytes] = part
            at += part.nbytes
        return True

    def _encoded(self, source: memoryview, key: bytes) -> Sequence[Buffer]:
        return self._serde.encode(source, self.plain.layout, key)

    def _fixed_bytes(self) -> int:
        """The size of every object: of one of zeros, and of one of values that all differ in their bits."""
        nbytes = self.plain.layout.nbytes
        sizes = {
            sum(memoryview(part).nbytes for part in self._encoded(memoryview(probe), bytes(32)))
            for probe in (bytes(nbytes), (bytes(range(48, 64)) * (nbytes // 16 + 1))[:nbytes])
        }
        if len(sizes) > 1 or self._serde.lossless:
            raise UsageError(
                f"objects of {self._serde.name} have no fixed size, and the pool's must: use int8, k8v4, int4 or fp8"
            )
        return sizes.pop()
