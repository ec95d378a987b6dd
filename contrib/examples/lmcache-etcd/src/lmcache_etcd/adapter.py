"""The tier: an object is a head and its parts, since etcd takes 1.5 MiB in a request.

    PREFIX o/KEY            the head: length, number of parts, the store that wrote them
    PREFIX p/KEY/STORE/N    part N, below a number that each store draws anew

**Whole or not at all**: all parts but the last are written ahead. One transaction writes the last one and the head, if
the head is still the one that was seen, and removes the parts of the former object. **A reader sees one object**: it
reads the head, and the parts as they were at its revision, which etcd keeps until a compaction. **Nothing is left
behind**: parts that are written ahead hang on a lease, and the transaction takes them off it. Those of a store that was
killed go when its lease ends.
"""

from __future__ import annotations

import math
import os
import struct
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

from lmcache_core.tiers.blocking import BlockingAdapter
from lmcache_core.tiers.contract import (
    AdapterContext,
    Capabilities,
    LoadItem,
    Outcome,
    Result,
    ScanEntry,
    ScanPage,
    StoreItem,
    Usage,
)
from lmcache_etcd.client import COMPACTED, OUT_OF_SPACE, Etcd, EtcdError, raw, text
from lmcache_etcd.settings import PARTS_MAX, EtcdSettings

_USAGE_S = 1.0
_PAGE_KEYS = 1000
_LEASE_S_MAX = 600  # of parts whose store may take until doomsday
_HEAD = struct.Struct("<QI16sd")  # bytes, parts, the store, when


class _Head(NamedTuple):
    nbytes: int
    parts: int
    store: bytes
    at_s: float


class EtcdAdapter(BlockingAdapter):
    """Objects below `settings.prefix` of the etcd at `settings.endpoint`."""

    capabilities: ClassVar[Capabilities] = Capabilities(durable=True, shared=True)

    errors = (EtcdError,)
    parallel = True
    cure = "start etcd there, or say where it is with l2.NAME.endpoint"

    def __init__(self, settings: EtcdSettings, context: AdapterContext) -> None:
        self._settings = settings
        self._etcd = Etcd(*settings.address)
        super().__init__(context, self._etcd)
        self.capabilities = Capabilities(  # type: ignore[misc]  # the largest object depends on the settings
            durable=True, shared=True, object_bytes_max=PARTS_MAX * settings.part_bytes
        )

    # --- what the server calls, from several threads at once --------------------------------------------------
    def exists(self, keys: Sequence[bytes], deadline: float) -> Sequence[bool]:
        reads = [{"request_range": {"key": text(self._head_name(key)), "count_only": True}} for key in keys]
        answer = self._answer("look up", "kv/txn", {"success": reads}, deadline)
        return [bool(int(each["response_range"].get("count", 0))) for each in answer.get("responses", [])]

    def usage(self) -> Usage:
        """etcd counts keys, and bytes only of everything that it holds."""
        everything = self._below("o/") | {"count_only": True}
        answer = self._answer("tell its usage", "kv/range", everything, time.monotonic() + _USAGE_S)
        return Usage(None, int(answer.get("count", 0)))

    def scan(self, cursor: str | None, deadline: float) -> ScanPage:
        """Heads in the order of their keys; the cursor is the last one."""
        page = self._below("o/") | {"limit": str(_PAGE_KEYS), "sort_order": "ASCEND", "sort_target": "KEY"}
        if cursor is not None:
            page["key"] = text(self._name(f"o/{cursor}\0"))
        answer = self._answer("scan", "kv/range", page, deadline)
        entries, last, start = [], None, len(self._name("o/"))
        for each in answer.get("kvs", []):
            last = raw(each["key"])[start:].decode("latin-1")
            head = _head(each)
            if head is not None and (key := _key(last)) is not None:
                entries.append(ScanEntry(key, head.nbytes, head.at_s))
        return ScanPage(entries, last if answer.get("more") else None)

    def medium(self) -> str:
        return f"etcd {self._settings.endpoint}, prefix {self._settings.prefix!r}"

    # --- one object -------------------------------------------------------------------------------------------
    def store_one(self, item: StoreItem, deadline: float) -> None:
        count = max(1, math.ceil(item.nbytes / self._settings.part_bytes))
        head = _Head(item.nbytes, count, os.urandom(16), time.time())
        names = [self._part_name(item.key, head, number) for number in range(count)]
        parts = _parts(item.buffers, self._settings.part_bytes)
        lease = self._leased(deadline) if count > 1 else "0"
        try:
            for name in names[:-1]:
                put = {"key": text(name), "value": text(next(parts)), "lease": lease}
                self._etcd.call("kv/put", put, deadline)
            writes: list[dict[str, Any]] = [
                {"request_put": {"key": text(name), "ignore_value": True}} for name in names[:-1]
            ]
            writes.append({"request_put": {"key": text(names[-1]), "value": text(next(parts, b""))}})
            writes.append({"request_put": {"key": text(self._head_name(item.key)), "value": text(_HEAD.pack(*head))}})
            try:
                self._replace(item.key, writes, deadline, known=None)
            except EtcdError as error:
                # The write that fills an etcd is answered so although it was made.
                if error.code != OUT_OF_SPACE or self._stored_by(item.key, deadline) != head.store:
                    raise
        finally:
            if lease != "0":
                self._end(lease)

    def load_one(self, item: LoadItem, deadline: float) -> Outcome:
        while True:
            answer = self._etcd.call("kv/range", {"key": text(self._head_name(item.key))}, deadline)
            if not answer.get("kvs"):
                return Outcome(Result.MISS)
            head = _head(answer["kvs"][0])
            if head is None:
                return Outcome(Result.DAMAGED, error="its head is none of ours")
            room = sum(buffer.nbytes for buffer in item.buffers)
            if head.nbytes > room:
                return Outcome(Result.DAMAGED, error=f"it has {head.nbytes:,} bytes, and {room:,} were expected")
            try:
                return self._load_parts(item, head, answer["header"]["revision"], deadline)
            except EtcdError as error:
                if error.code != COMPACTED:  # else: as it is now
                    raise

    def _load_parts(self, item: LoadItem, head: _Head, revision: str, deadline: float) -> Outcome:
        into, left = _Scattered(item.buffers), head.nbytes
        for number in range(head.parts):
            wanted = {"key": text(self._part_name(item.key, head, number)), "revision": revision}
            found = self._etcd.call("kv/range", wanted, deadline).get("kvs")
            part = raw(found[0].get("value", "")) if found else b""
            if len(part) > left:
                break
            into.write(part)
            left -= len(part)
        if left:
            return Outcome(Result.DAMAGED, error=f"its parts do not make up {head.nbytes:,} bytes")
        return Outcome(Result.DONE, head.nbytes)

    def delete_one(self, key: bytes, deadline: float) -> None:
        writes = [{"request_delete_range": {"key": text(self._head_name(key))}}]
        answer = self._etcd.call("kv/range", {"key": text(self._head_name(key))}, deadline)
        if answer.get("kvs"):
            self._replace(key, writes, deadline, known=answer["kvs"][0])

    def _replace(self, key: bytes, writes: list[dict[str, Any]], deadline: float, known: dict[str, Any] | None) -> None:
        """Do the writes in one step with the removal of the parts of the object that is there. `known`: its head, as
        far as the caller knows; if it is another one by now, once more."""
        name = text(self._head_name(key))
        while True:
            revision = known["mod_revision"] if known else "0"
            former = _head(known) if known else None
            removed = [self._removal(key, former)] if former else []
            answer = self._etcd.call(
                "kv/txn",
                {
                    "compare": [{"key": name, "target": "MOD", "result": "EQUAL", "mod_revision": revision}],
                    "success": removed + writes,
                    "failure": [{"request_range": {"key": name}}],
                },
                deadline,
            )
            if answer.get("succeeded"):
                return
            found = answer["responses"][0]["response_range"].get("kvs")
            known = found[0] if found else None

    def _stored_by(self, key: bytes, deadline: float) -> bytes | None:
        """The store whose object is there."""
        found = self._etcd.call("kv/range", {"key": text(self._head_name(key))}, deadline).get("kvs")
        head = _head(found[0]) if found else None
        return head.store if head else None

    def _removal(self, key: bytes, head: _Head) -> dict[str, Any]:
        of_store = self._name(f"p/{key.hex()}/{head.store.hex()}/")
        return {"request_delete_range": {"key": text(of_store), "range_end": text(_after(of_store))}}

    def _leased(self, deadline: float) -> str:
        left_s = min(_LEASE_S_MAX, max(0.0, deadline - time.monotonic()))
        answer = self._etcd.call("lease/grant", {"TTL": str(math.ceil(left_s) + 10)}, deadline)
        return str(answer["ID"])

    def _end(self, lease: str) -> None:
        """Remove what still hangs on the lease: of a store that came through, nothing."""
        try:
            self._etcd.call("lease/revoke", {"ID": lease}, time.monotonic() + _USAGE_S)
        except EtcdError:
            return  # it ends by itself

    # --- names ------------------------------------------------------------------------------------------------
    def _name(self, rest: str) -> bytes:
        return (self._settings.prefix + rest).encode()

    def _head_name(self, key: bytes) -> bytes:
        return self._name(f"o/{key.hex()}")

    def _part_name(self, key: bytes, head: _Head, number: int) -> bytes:
        return self._name(f"p/{key.hex()}/{head.store.hex()}/{number}")

    def _below(self, rest: str) -> dict[str, Any]:
        name = self._name(rest)
        return {"key": text(name), "range_end": text(_after(name))}

    # --- what went wrong --------------------------------------------------------------------------------------
    def refused(self, what: str, error: Exception) -> Outcome:
        outcome, code = super().refused(what, error), getattr(error, "code", None)
        if code is None:
            return outcome
        result = Result.FULL if code == OUT_OF_SPACE else Result.FAILED
        retryable = code not in (OUT_OF_SPACE, 3)  # INVALID_ARGUMENT: larger than etcd takes
        return Outcome(result, error=f"tier {self._tier!r} cannot {what}: {error}", retryable=retryable)

    def _answer(self, what: str, path: str, body: dict[str, Any], deadline: float) -> dict[str, Any]:
        return self.whole(what, partial(self._etcd.call, path, body, deadline))


class _Scattered:
    """Buffers that are filled one after another."""

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        self._left = list(buffers)

    def write(self, content: bytes) -> None:
        """The caller has made sure that there is room."""
        view = memoryview(content)
        while view:
            count = min(len(view), self._left[0].nbytes)
            self._left[0][:count] = view[:count]
            view, self._left[0] = view[count:], self._left[0][count:]
            if not self._left[0].nbytes:
                self._left.pop(0)


def _parts(buffers: Sequence[memoryview], nbytes: int) -> Iterator[bytes]:
    """The concatenation of the buffers in parts of `nbytes`, the last one shorter."""
    part = bytearray()
    for buffer in buffers:
        while buffer:
            taken = buffer[: nbytes - len(part)]
            part += taken
            buffer = buffer[len(taken) :]
            if len(part) == nbytes:
                yield bytes(part)
                part.clear()
    if part:
        yield bytes(part)


def _head(found: dict[str, Any]) -> _Head | None:
    """The head in a value; None if it is none of ours."""
    value = raw(found.get("value", ""))
    return _Head(*_HEAD.unpack(value)) if len(value) == _HEAD.size else None


def _key(name: str) -> bytes | None:
    """The key of a head's name; None for a name that this adapter does not give."""
    try:
        key = bytes.fromhex(name)
    except ValueError:
        return None
    return key if key.hex() == name else None


def _after(name: bytes) -> bytes:
    """The end of the range of all names that begin with this one."""
    return name[:-1] + bytes([name[-1] + 1])
