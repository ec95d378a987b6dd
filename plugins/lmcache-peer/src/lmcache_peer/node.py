"""The helper's own node: what its pool has, as a client of its server that maps it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import xxhash

from lmcache_core import Client, Status
from lmcache_core.client import ReadLease
from lmcache_core.errors import CacheError
from lmcache_core.native import native
from lmcache_core.pool.layout import Layout
from lmcache_core.serde.chain import CodecChain
from lmcache_core.tiers.object.format import HEADER_BYTES, ObjectKind, build_header, object_kind, split_tier_key
from lmcache_core.tokens.namespace import Namespace, namespace_of_id
from lmcache_peer.digest import NAME_BYTES, PublishedDigest
from lmcache_peer.limits import KINDS_MAX, KINDS_S, SERVER_S
from lmcache_peer.operation import NAMESPACES_MAX, OPERATION, NamespacesReply, NamespacesRequest

CALL_S = 2.0


class Known(NamedTuple):
    """What the server says of a namespace."""

    namespace: Namespace
    kind: ObjectKind
    epoch: int


class Held(NamedTuple):
    """An object of a lease: where it stands among the names that were asked for, and its place in the lease."""

    at: int
    name: bytes
    known: Known
    lease: ReadLease
    position: int

    @property
    def nbytes(self) -> int:
        return self.known.kind.layout.nbytes


class Node:
    """Thread-safe. Its calls raise what the client's raise; without a server nothing is there. It is never closed: the
    process ends as a worker does, and the server, which may be ending itself and answer nothing, frees what it held."""

    def __init__(self, name: str, runtime_dir: Path | None, server_uid: int | None) -> None:
        self.client = Client.connect(
            name, runtime_dir=runtime_dir, client_name="lmcache-peer", call_timeout_s=CALL_S, server_uid=server_uid
        )
        self._lock = threading.Lock()
        self._kinds: dict[int, tuple[float, Known | None]] = {}
        self._answered_at = 0.0  # the server, monotonic

    @property
    def pool_bytes(self) -> int:
        """Bytes of the pool, for objects; 0 while there is none."""
        link = self.client.links.look()
        return 0 if link is None or link.segment is None else link.segment.info.data_bytes

    def digest_into(self, digest: PublishedDigest) -> bool:
        """One pass over the index. False: there is no index."""
        link = self.client.links.look()
        index = None if link is None else link.index
        if index is None or native is None:
            return False
        bits: bytearray | None = digest.blank()
        while bits is not None:
            renewed, objects = bits, index.digest(bits)
            bits = digest.wants(objects) if len(renewed) == digest.nbytes else None
        digest.renew(renewed, objects)
        return True

    def names(self) -> set[bytes] | None:
        """Key and namespace id of all that the index has. None: there is no index."""
        link = self.client.links.look()
        index = None if link is None else link.index
        if index is None or native is None:
            return None
        room = bytearray()
        while (count := index.names(room)) * NAME_BYTES > len(room):
            room = bytearray((count + count // 8 + 64) * NAME_BYTES)
        return {bytes(room[at : at + NAME_BYTES]) for at in range(0, count * NAME_BYTES, NAME_BYTES)}

    # --- objects --------------------------------------------------------------------------------------------
    def hold(self, names: Sequence[bytes]) -> list[Held]:
        """Take read leases on those of these tier keys that are there. Whoever calls ends them (`end`)."""
        groups: dict[int, list[tuple[int, bytes, int]]] = {}
        for at, name in enumerate(names):
            key, namespace, epoch = split_tier_key(name)
            groups.setdefault(namespace, []).append((at, key, epoch))
        # Before the leases: what is there once the epoch is known is of this epoch, or of a later one.
        known = self._known(list(groups))
        held: list[Held] = []
        try:
            for namespace, wanted in groups.items():
                each = known[namespace]
                wanted = [] if each is None else [row for row in wanted if row[2] == each.epoch]
                if each is None or not wanted:
                    continue
                lease = self.client.prepare_retrieve(
                    [key for _, key, _ in wanted], namespace=each.namespace, prefix=False
                )
                held += [
                    Held(at, names[at], each, lease, position)
                    for position, (at, _, _) in enumerate(wanted)
                    if lease.statuses[position] is Status.GRANTED
                ]
                if not lease.granted:
                    lease.close()
        except BaseException:
            end(held)
            raise
        return held

    def parts(self, held: Held) -> tuple[memoryview, memoryview]:
        """Header and payload, as a tier has them. The payload is the slot: let it go before the lease ends."""
        view = held.lease.view(held.position)
        key, namespace, epoch = split_tier_key(held.name)
        page = memoryview(bytearray(HEADER_BYTES))
        build_header(
            page, held.known.kind, key=key, namespace=namespace, epoch=epoch, encoded_bytes=view.nbytes,
            checksum=self._checksum(held, namespace, key, view),
        )  # fmt: skip
        return page, view

    def _checksum(self, held: Held, namespace: int, key: bytes, view: memoryview) -> int:
        """Of the writer, if the index has it for this incarnation; else of what is there."""
        link = self.client.links.look()
        entry = None if link is None or link.index is None else link.index.entry(namespace, key)
        if entry is not None and entry["incarnation"] == held.lease.incarnations[held.position] and entry["checksum"]:
            return int(entry["checksum"])
        return int(xxhash.xxh3_64_intdigest(view))

    # --- namespaces -----------------------------------------------------------------------------------------
    def _known(self, namespaces: Sequence[int]) -> dict[int, Known | None]:
        now = time.monotonic()
        with self._lock:
            found = {each: self._kinds.get(each, (0.0, None)) for each in namespaces}
        stale = [each for each, (until, _) in found.items() if until <= now]
        for first in range(0, len(stale), NAMESPACES_MAX):
            self.refresh(stale[first : first + NAMESPACES_MAX], {})
        with self._lock:
            return {each: self._kinds.get(each, (0.0, None))[1] for each in namespaces}

    def see_server(self) -> None:
        """Raises `CacheError` if the server does not answer: a node that can find nothing must pass no probe."""
        if time.monotonic() - self._answered_at > SERVER_S:
            self.refresh([], {})

    def refresh(self, namespaces: Sequence[int], figures: Mapping[str, int]) -> None:
        """Ask the server what these are, and show it the helper's figures."""
        began = time.monotonic()
        request = NamespacesRequest(list(namespaces), dict(figures))
        reply = self.client.call_operation(OPERATION, request, NamespacesReply)
        with self._lock:
            self._answered_at = max(self._answered_at, began)
            if len(self._kinds) + len(namespaces) > KINDS_MAX:
                self._kinds.clear()
            for namespace, each in zip(namespaces, reply.kinds, strict=True):
                known = None
                if each is not None:
                    layout = Layout(each.dtype, tuple(each.shape), each.memory_format)
                    kind = object_kind(layout, CodecChain(()))
                    known = Known(namespace_of_id(namespace, layout), kind, each.epoch)
                self._kinds[namespace] = (began + KINDS_S, known)


def untouched(held: Sequence[Held]) -> list[bool]:
    """For each of these: whether its slot provably held the same object since the lease was granted."""
    of_lease: dict[ReadLease, list[int]] = {}
    for number, each in enumerate(held):
        of_lease.setdefault(each.lease, []).append(number)
    same = [False] * len(held)
    for lease, numbers in of_lease.items():
        answers = lease.untouched([held[number].position for number in numbers])
        for number, answer in zip(numbers, answers, strict=True):
            same[number] = answer
    return same


def end(held: Sequence[Held]) -> None:
    """Give the slots back. Without a server there is nobody to give them to: it frees them once it sees us again, or
    this process dead."""
    of_lease: dict[ReadLease, list[int]] = {}
    for each in held:
        of_lease.setdefault(each.lease, []).append(each.position)
    for lease, positions in of_lease.items():
        with contextlib.suppress(CacheError):
            lease.finish(sorted({*positions} & {*lease.granted}))
