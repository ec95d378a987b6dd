"""The sockets that routers connect to, and the thread that owns them."""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from weakref import WeakSet

from lmcache_core.errors import CacheError, SettingsError
from lmcache_core.protocol.zmtp import Bounds, Turns, Unread, ZmtpListener, encode_message
from lmcache_kv_events.batches import in_batches, merged
from lmcache_kv_events.format import END_SEQ, KvEvent, encode_batch
from lmcache_kv_events.limits import (
    BATCH_OVERHEAD_BYTES,
    CLOSE_S,
    CONNECTIONS_MAX,
    EVENTS_A_TURN,
    KEPT_BYTES_MAX,
    PAUSE_S,
    REQUEST_BYTES_MAX,
    SNAPSHOTS_MAX,
    TEND_S,
    UNREAD_BYTES_MAX,
)
from lmcache_kv_events.settings import KvEventsSettings, offset_endpoint

log = logging.getLogger(__name__)

SNAPSHOT = b"lmcache.snapshot"  # used instead of a sequence number, and longer than one
_BOUNDS = Bounds(REQUEST_BYTES_MAX, 2 * REQUEST_BYTES_MAX, CONNECTIONS_MAX)


class Snapshot:
    """What was stored at one time: all routers that ask soon after are answered from it. `seq` is the number of the
    last batch that it includes; `events` makes its events anew for each of them."""

    def __init__(self, seq: int, events: Callable[[], Iterable[KvEvent]]) -> None:
        self.seq = seq
        self._events = events

    def batches(self) -> Iterator[list[KvEvent]]:
        """At least one, for the number."""
        found = in_batches(merged(self._events()))
        yield next(found, [])
        yield from found


class Publisher:
    """The listeners, and the thread that owns them. A subscriber that reads too slowly misses batches, sees a gap in
    their numbers, and asks for a replay."""

    def __init__(self, settings: KvEventsSettings, snapshot: Callable[[], Snapshot]) -> None:
        self._settings = settings
        self._snapshot = snapshot
        self._snapshots: WeakSet[Snapshot] = WeakSet()  # from which somebody is being answered
        self._topic = settings.topic.encode()
        self._kept: OrderedDict[int, bytes] = OrderedDict()  # payloads by number; for the publisher's thread only
        self._kept_bytes = 0
        self._queue: deque[tuple[int, bytes]] = deque()
        self.last_seq = -1
        self._queue_bytes = 0
        self._turns = Turns()
        self._unread = Unread.within(*UNREAD_BYTES_MAX)
        self._listeners: list[ZmtpListener] = []
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock = threading.Lock()  # guards the next two and the use of `_wake`, briefly
        self._ended = False  # the thread, which has closed `_wake`
        self._failure: Exception | None = None
        self._stopping = threading.Event()
        self._woke = 0  # events of the last turn that were not a router's
        try:
            self._turns.add(self._wake, select.EPOLLIN, self._woken)
            self._pub = self._listen(b"PUB", settings.endpoint)
            replay = settings.replay_endpoint
            self._router = None if replay is None else self._listen(b"ROUTER", replay)
        except BaseException:
            self._close()
            raise
        self._thread = threading.Thread(target=self._run, name="lmcache-kv-events", daemon=True)
        self._thread.start()

    def _listen(self, kind: bytes, endpoint: str) -> ZmtpListener:
        address = offset_endpoint(endpoint, self._settings.dp_rank)
        try:
            made = ZmtpListener(kind, address, self._turns, self._unread, time.monotonic, _BOUNDS)
        except OSError as error:
            raise SettingsError(
                f"KV events cannot be published at {address}: {error.strerror}; choose another "
                "subscribers.kv_events.endpoint or replay_endpoint"
            ) from error
        self._listeners.append(made)
        return made

    def _close(self) -> None:
        for listener in self._listeners:
            listener.close()
            listener.remove_name()
        self._turns.close()
        os.close(self._wake)

    def publish(self, at_s: float, events: list[KvEvent]) -> None:
        """Queue one batch for the thread; never waits. Raises an error once the thread has failed."""
        if self._failure is not None:
            raise CacheError(f"nothing is published any more: {self._failure}") from self._failure
        self.last_seq += 1
        settings = self._settings
        payload = encode_batch(at_s, events, settings.dp_rank, settings.format)
        with self._lock:
            self._queue.append((self.last_seq, payload))
            self._queue_bytes += len(payload) + BATCH_OVERHEAD_BYTES
            while self._queue_bytes > KEPT_BYTES_MAX:  # the numbers show what is missing
                self._queue_bytes -= len(self._queue.popleft()[1]) + BATCH_OVERHEAD_BYTES
        self._wake_up()

    def close(self) -> None:
        """Publish the rest; waits only briefly. In a forked child there is no such thread, and nothing to do."""
        if self._thread.is_alive():
            self._stopping.set()
            self._wake_up()
            self._thread.join(2 * CLOSE_S)

    def _wake_up(self) -> None:
        with self._lock:
            if not self._ended:
                os.eventfd_write(self._wake, 1)

    # --- the thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping.is_set() or self._queue:
                self._turn()
            self._linger()
        except Exception as error:  # whatever it is: the bus learns of it from the next batch, and `status` shows it
            log.exception("KV events have stopped: routers get no more of them")
            self._failure = error
        finally:
            with self._lock:
                self._ended = True
                self._close()

    def _turn(self) -> None:
        """Publish what there is, and then go on with each answer: what is new comes before the rest of an old one."""
        self._publish_all()
        more = [listener.pump() for listener in self._listeners]
        more.append(self._router is not None and self._router.answer(self._answer_to))
        events = self._turns.turn(0.0 if any(more) else TEND_S, EVENTS_A_TURN)
        for listener in self._listeners:
            listener.tend()
        if events > self._woke:
            self._stopping.wait(PAUSE_S)
        self._woke = 0

    def _woken(self, mask: int) -> None:
        os.eventfd_read(self._wake)
        self._woke = 1

    def _publish_all(self) -> None:
        while (batch := self._next()) is not None:
            seq, payload = batch
            self._kept[seq] = payload
            self._kept_bytes += len(payload) + BATCH_OVERHEAD_BYTES
            while len(self._kept) > self._settings.batches_kept or self._kept_bytes > KEPT_BYTES_MAX:
                self._kept_bytes -= len(self._kept.popitem(last=False)[1]) + BATCH_OVERHEAD_BYTES
            self._pub.publish(self._topic, encode_message(self._topic, seq.to_bytes(8, "big"), payload))

    def _next(self) -> tuple[int, bytes] | None:
        with self._lock:
            if not self._queue:
                return None
            self._queue_bytes -= len(self._queue[0][1]) + BATCH_OVERHEAD_BYTES
            return self._queue.popleft()

    def _linger(self) -> None:
        """Wait, briefly, until what was published has been read."""
        end = time.monotonic() + CLOSE_S
        while self._pub.waits and (left := end - time.monotonic()) > 0:
            self._turns.turn(left, EVENTS_A_TURN)

    def _answer_to(self, frames: list[bytes]) -> Iterator[bytes]:
        """The messages of an answer, made one by one as the router reads them."""
        if len(frames) != 2 or frames[0] or (len(frames[1]) != 8 and frames[1] != SNAPSHOT):
            return  # not one of our requests: its sender expects nothing that we could answer
        for seq, payload in self._shot() if frames[1] == SNAPSHOT else self._since(int.from_bytes(frames[1], "big")):
            yield encode_message(b"", self._topic, seq.to_bytes(8, "big", signed=seq < 0), payload)
        yield encode_message(b"", b"", END_SEQ, b"")

    def _since(self, seq: int) -> Iterator[tuple[int, bytes]]:
        """The kept batches from this one on. What comes meanwhile is not among them: it was published."""
        last = next(reversed(self._kept), -1)
        while seq <= last:
            seq = max(seq, next(iter(self._kept)))  # a slow reader may find that the next ones are gone
            yield seq, self._kept[seq]
            seq += 1

    def _shot(self) -> Iterator[tuple[int, bytes]]:
        if len(self._snapshots) < SNAPSHOTS_MAX:
            snapshot = self._snapshot()
            self._snapshots.add(snapshot)
        else:
            snapshot = max(self._snapshots, key=lambda each: each.seq)
        for batch in snapshot.batches():
            yield snapshot.seq, encode_batch(0.0, batch, self._settings.dp_rank, self._settings.format)
