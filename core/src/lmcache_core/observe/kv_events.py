"""KV events for routers: which engine blocks this server's cache has, published in vLLM's format.

Keys cannot be turned back into an engine's hashes, so engines report them (`client.report_block_allocation`); the
server keeps a report as long as the object is in the pool or on a tier. A router that subscribes learns what is stored
and removed from then on, and can ask for what it missed (`replay`) or for everything there is (`snapshot`, which vLLM
lacks).
"""

from __future__ import annotations

import logging
import os
import threading
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any, Literal, NamedTuple

import zmq
from pydantic import Field, field_validator

from lmcache_core.errors import CacheError, SettingsError
from lmcache_core.limits import KV_EVENT_BATCH_HASHES, KV_EVENTS_PENDING_MAX
from lmcache_core.observe.events import (
    BlocksReported,
    CacheCleared,
    CacheEvent,
    EventsMissed,
    ObjectsAdmitted,
    ObjectsEvicted,
    ObjectsLoaded,
    ObjectsRemoved,
    ObjectsTiered,
    ObjectsUntiered,
    TierListChanged,
)
from lmcache_core.observe.kv_format import (
    END_SEQ,
    KvAllCleared,
    KvBlocksRemoved,
    KvBlocksStored,
    KvEvent,
    as_hash,
    encode_batch,
)
from lmcache_core.observe.subscriber import EventSubscriber, SubscriberContext
from lmcache_core.pool.atfork import forget_in_child
from lmcache_core.settings.model import Section

log = logging.getLogger(__name__)

SNAPSHOT = b"lmcache.snapshot"  # used instead of a sequence number, and longer than one
_CPU, _STORAGE = 1, 2
_MEDIA = ((_CPU, "CPU"), (_STORAGE, "STORAGE"))
_CLOSE_S = 1.0
_REQUESTS_MAX = 100  # of one router, before they are read
_REQUEST_BYTES_MAX = 1024  # of one frame: a number, or a topic of 256 letters; who sends more is disconnected
_Key = tuple[int, bytes]


class KvEventsSettings(Section):
    """Where routers connect, and what they get."""

    endpoint: str = Field(
        default="tcp://127.0.0.1:5557", description="address of the PUB socket: tcp or ipc; port + dp_rank"
    )
    replay_endpoint: str | None = Field(
        default="tcp://127.0.0.1:5558",
        description="address of the ROUTER socket for replays and snapshots; none: no such socket",
    )
    topic: str = Field(default="", max_length=256, description="topic at the start of each message")
    dp_rank: int | None = Field(default=None, ge=0, le=4095, description="data parallel rank in each batch")
    format: Literal["map", "array"] = Field(
        default="map", description="format of events: maps (vLLM 0.32), or tagged arrays"
    )
    hashes: Literal["int", "bytes"] = Field(default="int", description="block hashes: low 64 bits, or all bytes")
    token_ids: bool = Field(default=False, description="pass on the tokens of blocks; they are content")
    batches_kept: int = Field(default=10_000, ge=1, le=1_000_000, description="batches kept for replays")
    blocks_max: int = Field(
        default=1_000_000, ge=1, description="objects whose blocks are remembered; the oldest are dropped"
    )

    @field_validator("endpoint", "replay_endpoint")
    @classmethod
    def _an_address(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith(("tcp://", "ipc://")):
            raise ValueError(f"{value!r} is not an endpoint: write tcp://HOST:PORT or ipc:///PATH")
        return value


class _Blocks(NamedTuple):
    """An engine's report about one object."""

    hashes: tuple[bytes, ...]
    parent: bytes | None
    block_size: int
    lora_id: int | None
    lora_name: str | None
    group: int | None
    token_ids: tuple[int, ...]


class _KnownBlocks:
    __slots__ = ("blocks", "media")

    def __init__(self, blocks: _Blocks) -> None:
        self.blocks = blocks
        self.media = 0


class KvEvents(EventSubscriber):
    """Turns events about objects into events about an engine's blocks. `hear` makes and queues batches; a separate
    thread owns the sockets."""

    wants_blocks = True

    def __init__(self, settings: KvEventsSettings, context: SubscriberContext) -> None:
        self.wants_tokens = settings.token_ids
        self._settings = settings
        self._known: OrderedDict[_Key, _KnownBlocks] = OrderedDict()
        self._pending: OrderedDict[_Key, None] = OrderedDict()  # reported, and not stored anywhere yet
        self._lock = threading.Lock()  # of `_known`: a snapshot reads it
        self._publisher = _Publisher(settings, self._snapshot)
        forget_in_child(self)

    def after_fork_in_child(self) -> None:
        """The sockets are the parent's."""
        self._publisher.forget()

    def hear(self, events: Sequence[CacheEvent]) -> None:
        told: list[KvEvent] = []
        with self._lock:
            for event in events:
                self._take(event, told)
            if told:
                self._publisher.publish(events[-1].at_s, list(_merged(told)))

    def close(self) -> None:
        self._publisher.close()

    # --- what it means for blocks ---------------------------------------------------------------------------

    def _take(self, event: CacheEvent, told: list[KvEvent]) -> None:
        match event:
            case BlocksReported():
                self._reported(event, told)
            case ObjectsAdmitted() | ObjectsLoaded():
                self._arrived(event.namespace, event.keys, _CPU, told)
            case ObjectsTiered():
                self._arrived(event.namespace, event.keys, _STORAGE, told)
            case ObjectsEvicted() | ObjectsRemoved():
                self._left(event.namespace, event.keys, _CPU, told)
            case ObjectsUntiered():
                self._left(event.namespace, event.keys, _STORAGE, told)
            case CacheCleared(tiers=True, namespace=None):
                self._forget_all(told)
            case CacheCleared(tiers=True, namespace=int(namespace)):
                keys = [key for owner, key in self._known if owner == namespace]
                self._left(namespace, keys, _STORAGE, told)
            case EventsMissed():
                self._forget_all(told)  # better to report too little than something wrong
            case TierListChanged(action="remove" | "replace"):
                for owner, key in list(self._known):  # which tier had what is not recorded: engines report again
                    self._left(owner, [key], _STORAGE, told)

    def _reported(self, event: BlocksReported, told: list[KvEvent]) -> None:
        each = len(event.hashes) // len(event.keys)
        tokens = each * event.block_size
        for at, key in enumerate(event.keys):
            first = at * each
            blocks = _Blocks(
                tuple(event.hashes[first : first + each]),
                event.hashes[first - 1] if first else event.parent,
                event.block_size,
                event.lora_id,
                event.lora_name,
                event.group,
                tuple(event.token_ids[at * tokens : (at + 1) * tokens]),
            )
            name = (event.namespace, key)
            known = self._known.get(name)
            if known is not None and known.blocks == blocks:
                continue
            if known is not None:
                self._forget(name, told)
            self._make_room(told)
            self._known[name] = known = _KnownBlocks(blocks)
            if event.media[at]:
                for medium, _ in _MEDIA:
                    if event.media[at] & medium:
                        self._arrive(name, known, medium, told)
            else:
                self._pending[name] = None
                if len(self._pending) > KV_EVENTS_PENDING_MAX:
                    self._forget(self._pending.popitem(last=False)[0], told)

    def _make_room(self, told: list[KvEvent]) -> None:
        if len(self._known) >= self._settings.blocks_max:
            self._forget(next(iter(self._known)), told)

    def _arrived(self, namespace: int, keys: Iterable[bytes], medium: int, told: list[KvEvent]) -> None:
        for key in keys:
            known = self._known.get((namespace, key))
            if known is not None and not known.media & medium:
                self._arrive((namespace, key), known, medium, told)

    def _arrive(self, name: _Key, known: _KnownBlocks, medium: int, told: list[KvEvent]) -> None:
        if not known.media:
            self._pending.pop(name, None)
        known.media |= medium
        told.append(self._stored(known.blocks, medium))

    def _left(self, namespace: int, keys: Iterable[bytes], medium: int, told: list[KvEvent]) -> None:
        for key in keys:
            known = self._known.get((namespace, key))
            if known is not None and known.media & medium:
                known.media &= ~medium
                told.append(self._removed(known.blocks, medium))
                if not known.media:
                    del self._known[namespace, key]

    def _forget(self, name: _Key, told: list[KvEvent]) -> None:
        known = self._known.pop(name)
        self._pending.pop(name, None)
        told += [self._removed(known.blocks, medium) for medium, _ in _MEDIA if known.media & medium]

    def _forget_all(self, told: list[KvEvent]) -> None:
        self._known.clear()
        self._pending.clear()
        told[:] = [KvAllCleared()]

    def _stored(self, blocks: _Blocks, medium: int) -> KvBlocksStored:
        shape = self._settings.hashes
        return KvBlocksStored(
            [as_hash(each, shape) for each in blocks.hashes],
            None if blocks.parent is None else as_hash(blocks.parent, shape),
            list(blocks.token_ids),
            blocks.block_size,
            blocks.lora_id,
            dict(_MEDIA)[medium],
            blocks.lora_name,
            group_idx=blocks.group,
        )

    def _removed(self, blocks: _Blocks, medium: int) -> KvBlocksRemoved:
        shape = self._settings.hashes
        return KvBlocksRemoved([as_hash(each, shape) for each in blocks.hashes], dict(_MEDIA)[medium], blocks.group)

    def _snapshot(self) -> tuple[int, Iterator[KvEvent]]:
        """Everything that is stored, and the number of the last batch it includes; -1: none."""
        with self._lock:  # briefly, also where a million objects are known: `hear` waits for it
            there = [(known.blocks, known.media) for known in self._known.values()]
            seq = self._publisher.last_seq
        return seq, _merged(
            self._stored(blocks, medium) for blocks, media in there for medium, _ in _MEDIA if media & medium
        )


def _merged(events: Iterable[KvEvent]) -> Iterator[KvEvent]:
    """Consecutive runs joined into one event; nothing else changes."""
    last: KvEvent | None = None
    for event in events:
        if isinstance(last, KvBlocksStored) and isinstance(event, KvBlocksStored) and _follows(last, event):
            last.block_hashes += event.block_hashes
            last.token_ids += event.token_ids
        elif (
            isinstance(last, KvBlocksRemoved)
            and isinstance(event, KvBlocksRemoved)
            and (last.medium, last.group_idx) == (event.medium, event.group_idx)
            and len(last.block_hashes) < KV_EVENT_BATCH_HASHES
        ):
            last.block_hashes += event.block_hashes
        else:
            if last is not None:
                yield last
            last = event
    if last is not None:
        yield last


def _follows(last: KvBlocksStored, event: KvBlocksStored) -> bool:
    return (
        event.parent_block_hash == last.block_hashes[-1]
        and (event.block_size, event.lora_id, event.lora_name, event.medium, event.group_idx)
        == (last.block_size, last.lora_id, last.lora_name, last.medium, last.group_idx)
        and bool(event.token_ids) == bool(last.token_ids)
        and len(last.block_hashes) < KV_EVENT_BATCH_HASHES
    )


class _Publisher:
    """The sockets, and the thread that owns them. A subscriber that reads too slowly misses batches, sees a gap in
    their numbers, and asks for a replay."""

    def __init__(self, settings: KvEventsSettings, snapshot: Any) -> None:
        self._settings = settings
        self._snapshot = snapshot
        self._topic = settings.topic.encode()
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=settings.batches_kept)  # for the publisher's thread only
        self._queue: deque[tuple[int, bytes]] = deque()
        self.last_seq = -1
        self._context = zmq.Context()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock = threading.Lock()  # guards the next two and the use of `_wake`, briefly
        self._ended = False  # the thread, which has closed `_wake`
        self._failure: Exception | None = None
        self._stopping = False
        try:
            self._pub = self._bound(zmq.PUB, settings.endpoint)
            replay = settings.replay_endpoint
            self._router = None if replay is None else self._bound(zmq.ROUTER, replay)
        except BaseException:
            self._context.destroy(linger=0)
            os.close(self._wake)
            raise
        self._thread = threading.Thread(target=self._run, name="lmcache-kv-events", daemon=True)
        self._thread.start()

    def _bound(self, kind: int, endpoint: str) -> zmq.Socket[bytes]:
        address = offset_endpoint(endpoint, self._settings.dp_rank)
        sock = self._context.socket(kind)
        sock.sndhwm = self._settings.batches_kept
        sock.rcvhwm = _REQUESTS_MAX
        sock.maxmsgsize = _REQUEST_BYTES_MAX
        try:
            sock.bind(address)
        except zmq.ZMQError as error:
            raise SettingsError(
                f"KV events cannot be published at {address}: {error.strerror}; choose another "
                "subscribers.kv_events.endpoint or replay_endpoint"
            ) from error
        return sock

    def publish(self, at_s: float, events: list[KvEvent]) -> None:
        """Queue one batch for the thread; never waits. Raises an error once the thread has failed."""
        if self._failure is not None:
            raise CacheError(f"nothing is published any more: {self._failure}") from self._failure
        self.last_seq += 1
        settings = self._settings
        self._queue.append((self.last_seq, encode_batch(at_s, events, settings.dp_rank, settings.format)))
        self._wake_up()

    def close(self) -> None:
        """Publish the rest; waits only briefly."""
        if not self._stopping:
            self._stopping = True
            self._wake_up()
            self._thread.join(_CLOSE_S)

    def _wake_up(self) -> None:
        with self._lock:
            if not self._ended:
                os.eventfd_write(self._wake, 1)

    def forget(self) -> None:
        """In a child: the thread does not exist here, and closing would end the parent's connections."""
        self._stopping = True

    # --- the thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake, zmq.POLLIN)
        if self._router is not None:
            poller.register(self._router, zmq.POLLIN)
        try:
            while not (self._stopping and not self._queue):
                for source, _ in poller.poll():
                    if source == self._wake:
                        os.eventfd_read(self._wake)
                self._publish_all()
                if self._router is not None:
                    self._answer_one(self._router)
        except Exception as error:
            log.exception("KV events have stopped: routers get no more of them")
            self._failure = error
        finally:
            with self._lock:
                self._ended = True
                os.close(self._wake)
            self._context.destroy(linger=int(1e3 * _CLOSE_S))

    def _publish_all(self) -> None:
        while self._queue:
            seq, payload = self._queue.popleft()
            self._kept.append((seq, payload))
            self._pub.send_multipart((self._topic, seq.to_bytes(8, "big"), payload), zmq.DONTWAIT)

    def _answer_one(self, router: zmq.Socket[bytes]) -> None:
        """Not all that wait: what is new is published before the next answer."""
        if not int(router.get(zmq.EVENTS)) & zmq.POLLIN:
            return
        frames = router.recv_multipart(zmq.DONTWAIT)
        if len(frames) != 3 or frames[1] or (len(frames[2]) != 8 and frames[2] != SNAPSHOT):
            return  # not one of our requests: its sender expects nothing that we could answer
        for seq, payload in self._asked_for(frames[2]):
            self._answer(router, frames[0], self._topic, seq.to_bytes(8, "big", signed=seq < 0), payload)
            self._publish_all()  # an answer may be long
        self._answer(router, frames[0], b"", END_SEQ, b"")

    def _asked_for(self, what: bytes) -> Iterator[tuple[int, bytes]]:
        if what != SNAPSHOT:
            first = int.from_bytes(what, "big")
            yield from [(seq, payload) for seq, payload in self._kept if seq >= first]
            return
        settings = self._settings
        seq, events = self._snapshot()
        parts = iter(lambda: list(islice(events, KV_EVENT_BATCH_HASHES)), [])
        for part in chain([next(parts, [])], parts):  # at least one, for the number
            yield seq, encode_batch(0.0, part, settings.dp_rank, settings.format)

    @staticmethod
    def _answer(router: zmq.Socket[bytes], who: bytes, *frames: bytes) -> None:
        try:
            router.send_multipart((who, b"", *frames), zmq.DONTWAIT)
        except zmq.Again:  # it asks for more than it reads: the numbers show what is missing
            return


def offset_endpoint(endpoint: str, rank: int | None) -> str:
    """Each data parallel rank has its own port or path."""
    if not rank:
        return endpoint
    if endpoint.startswith("ipc://"):
        return f"{endpoint}_dp{rank}"
    base, _, port = endpoint.rpartition(":")
    if not port.isdigit():
        raise SettingsError(f"{endpoint!r} has no port to add dp_rank to: write tcp://HOST:PORT")
    return f"{base}:{int(port) + rank}"
