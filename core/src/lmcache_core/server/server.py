"""The server: owns the pool, runs the loop, and leaves nothing behind.

`Server(settings, registry).run()` serves in this thread until SIGTERM or SIGINT. `start()` is embedded mode: the same
server on a thread of the caller's process; `connect()` makes clients of it without any socket path.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from lmcache_core import native as extension
from lmcache_core.clock import Clock
from lmcache_core.errors import UntrustedError, UsageError
from lmcache_core.limits import (
    HOUSEKEEPING_S,
    INDEX_SWEEP_PAUSE_S,
    LIMIT_WARNING_PAUSE_S,
    READY_WAIT_S,
    SWITCH_INTERVAL_S,
)
from lmcache_core.observe.lines import named
from lmcache_core.plugins.loader import load_plugins
from lmcache_core.plugins.registry import Registry
from lmcache_core.pool.segment import name_exists
from lmcache_core.protocol import messages as m
from lmcache_core.protocol.codec import encode
from lmcache_core.server.build import build
from lmcache_core.server.dispatch import Dispatch
from lmcache_core.server.end_signals import EndSignals
from lmcache_core.server.lifeline import LifelinePeer
from lmcache_core.server.service_manager import ServiceManager
from lmcache_core.server.status import describe
from lmcache_core.settings.model import Settings
from lmcache_core.trust import words_for_stranger

if TYPE_CHECKING:
    from lmcache_core.server.parts import Parts
    from lmcache_core.server.session import Peer
    from lmcache_core.tiers.tiering import Tiering

log = logging.getLogger(__name__)


class Server:
    """Built completely from settings, or not at all: the constructor raises before anything is served."""

    def __init__(self, settings: Settings, registry: Registry | None = None, clock: Clock | None = None) -> None:
        """`registry`: None for all installed plugins."""
        with contextlib.ExitStack() as undo:
            parts = build(settings, load_plugins() if registry is None else registry, clock or Clock(), undo)
            self._take(parts)
            self.listener.serve(self._accept)
            self.populator.start()
            self.l1.serve_index(True)
            if settings.record.dir is not None:
                self.recording.start(settings.record)
            undo.pop_all()

    def _take(self, parts: Parts) -> None:
        self.settings = parts.settings
        self.registry = parts.registry
        self.clock = parts.clock
        self.segment = parts.segment
        self.loop = parts.loop
        self.kernel = parts.kernel
        self.shares = parts.shares
        self.l1 = parts.l1
        self.adopting = parts.adopting
        self.tiers = parts.tiers
        self.events = parts.events
        self.tracing = parts.tracing
        self.companions = parts.companions
        self.quotas = parts.quotas
        self.lookups = parts.lookups
        self.namespaces = parts.namespaces
        self.store_waits = parts.store_waits
        self.stores = parts.stores
        self.sessions = parts.sessions
        self.clears = parts.clears
        self.stored_waits = parts.stored_waits
        self.recording = parts.recording
        self.operations = parts.operations
        self.listener = parts.listener
        self.carriers = parts.carriers
        self.helpers = parts.helpers
        self.populator = parts.populator
        self._housekeeping = parts.housekeeping
        self._directory = parts.directory
        self.service_manager = ServiceManager()
        self.dispatch = Dispatch(parts, lambda: describe(self))
        self.started_at_s = time.time()
        self.name_lost = False
        self._refusal_told_at_s = -LIMIT_WARNING_PAUSE_S
        self.draining = False
        self.longest_turn_objects = 0  # touched in one turn of the loop, at most
        self.end_faults = 0  # steps of the shutdown that failed; the others were done
        self._scribbled = False
        self._lanes_ended = True
        self._keeps_pool = False
        self._thread: threading.Thread | None = None
        self._arrivals: deque[socket.socket] = deque()  # clients in this process, until the loop accepts them
        self.drain_until_s: float | None = None
        self._chores_at_s = 0.0

    @property
    def tiering(self) -> Tiering | None:
        """None: there has never been a tier."""
        return self.l1.tiering

    @property
    def address(self) -> str:
        """Where clients on the node connect."""
        return str(self.listener.path)

    # --- running ------------------------------------------------------------------------------------------

    def run(self, on_ready: Callable[[str], None] | None = None, signals: EndSignals | None = None) -> int:
        """Serve in this thread until SIGTERM or SIGINT; returns the exit status. Only in the main thread. `signals`:
        from a caller that has handled them since before this server was made."""
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        # A full garbage collection over a million residents stalls for 160 ms, and one of 50,000 young objects for 4.
        # Current objects are frozen; young ones are collected a few at a time, and again in housekeeping; the data path
        # makes no longer-lived cycles.
        gc.collect()
        gc.freeze()
        gc.set_threshold(1_000, 1_000_000, 1_000_000)
        with contextlib.ExitStack() as stack:
            (signals or stack.enter_context(EndSignals())).tell(lambda: self.loop.call(self.begin_drain))
            try:
                self._started()
                if on_ready is not None:
                    self.populator.wait_begun(READY_WAIT_S)  # callers that wait for this store at once
                    on_ready(self.address)
                self.service_manager.ready()
            except BaseException:
                self._close()
                raise
            self._serve()
        return 1 if self.end_faults else 0

    def start(self, *, wait: bool = False) -> Self:
        """Embedded mode: serve on a thread of this process until `stop`. Only once: UsageError after that. `wait`:
        until all of the pool is populated, so that no store is answered WARMING; raises `PoolError` if there is not
        enough memory."""
        if self._thread is not None:
            raise UsageError(f"server {self.settings.name!r} was already started: make a new Server")
        self._thread = threading.Thread(target=self._serve, name="lmcache-server", daemon=True)
        self._thread.start()
        try:
            self._started()
            if wait:
                self.populator.wait_heard()
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Drain and end; in embedded mode, waits for that. Safe from any thread and from signal handlers."""
        self.loop.call(self.begin_drain)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def connect(self, client_name: str = "embedded", *, maps_pool: bool = True, use_index: bool = True) -> Any:
        """A client of this server over a socket pair, without anything in the file system."""
        from lmcache_core.client.client import Client
        from lmcache_core.client.link import Target

        target = Target(self.settings.name, None, None, None, client_name, maps_pool, self._open_pair, use_index)
        return Client(target)

    def _open_pair(self) -> Any:
        from lmcache_core.client.connection import LifelineConnection
        from lmcache_core.errors import DisconnectedError

        theirs, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        self._arrivals.append(ours)
        self.loop.call(self._accept_arrivals)
        if self.loop.ended:  # perhaps just now: it runs nothing any more
            self._close_arrivals()
            theirs.close()
            raise DisconnectedError(f"the embedded server {self.settings.name!r} has ended")
        return LifelineConnection(theirs)

    def _accept_arrivals(self) -> None:
        while self._arrivals:
            self._accept(self._arrivals.popleft())

    def _close_arrivals(self) -> None:
        """Clients that came too late get an end of file."""
        with contextlib.suppress(IndexError):
            while True:
                self._arrivals.popleft().close()

    def _serve(self) -> None:
        try:
            self.loop.run(self._tick)
        finally:
            self._close()

    # --- a turn of the loop -------------------------------------------------------------------------------

    def _tick(self) -> float | None:
        now, kernel, tiering = self.clock.now, self.kernel, self.tiering
        more = False
        if kernel.clearing or self.clears.waiting:  # most turns have nothing to do here, and calls cost time
            more |= self.clears.step()
        if kernel.working or self.l1.preparing:
            more |= self.l1.make_room()
        make = None
        if self.adopting is not None:
            make = self.adopting.due
            if make is not None and make <= now:
                more |= self.adopting.step(now)
                make = self.adopting.due
        for carrier in self.carriers:
            more |= carrier.pump(self.dispatch.on_frame)
        reply = room = tiers = work = stored = None
        if tiering is not None:
            tiering.step()
            self.lookups.after_step()
            more |= self.store_waits.step()
            self.stored_waits.step()
        due = kernel.next_deadline()
        if due is not None and due <= now:
            kernel.expire(now)
            due = kernel.next_deadline()
        check = self.sessions.next_check()
        if check is not None and check <= now:
            self.sessions.check(now)
            check = self.sessions.next_check()
        if now >= self._housekeeping.at_s:
            self._keep_house(now)
        if self.l1.companions is not None:
            self.companions.step(now)
        self.l1.apply()
        if self.drain_until_s is not None and self._drained(now):
            self.loop.stop()
        touched = kernel.take_touched()
        if touched > self.longest_turn_objects:
            self.longest_turn_objects = touched
        if more:
            return now
        if tiering is not None:  # without tiers nobody waits for one, or for room
            reply, room, tiers = self.lookups.next_reply_s, self.store_waits.next_at_s, tiering.next_deadline()
            stored = self.stored_waits.next_at_s
        if self.l1.companions is not None:
            work = self.companions.next_step()
        next_s = self._housekeeping.at_s
        for each in (due, check, make, reply, room, tiers, work, stored):
            if each is not None and each < next_s:  # every turn of the loop comes here: min() costs 1 µs more
                next_s = each
        return next_s

    def _keep_house(self, now: float) -> None:
        """Report reads, evict for headroom, and check the pool's name. The first two go in bounded steps. While there
        is more to evict, the next turn comes at once, after everybody's next message; reads are reported with pauses,
        so that they never become the server's main work, however much workers read in place."""
        self.service_manager.alive(now)
        more = self.l1.note_uses()
        freed = self.kernel.trim(now)
        self._housekeeping.at_s = now if freed else now + (INDEX_SWEEP_PAUSE_S if more else HOUSEKEEPING_S)
        if not freed and now >= self._chores_at_s:
            self._chores_at_s = now + HOUSEKEEPING_S
            if self._thread is None and self.adopting is not None and self.adopting.makes_objects:
                gc.freeze()  # a hundred thousand of them in this time: scanning them took up to 18 ms
            elif gc.get_count()[1]:  # young cycles, before they get too old for the collector to scan
                gc.collect(1)
            if self.l1.index is not None:
                self.l1.index.keep_places(self.kernel.adoption.under_way)
                self.l1.index.tidy()
            if self.name_lost != (not name_exists(self.segment)):
                self.name_lost = not self.name_lost
                if self.name_lost:
                    words, told = "the name of pool %r was deleted: serving goes on by descriptor", "name_lost"
                else:
                    words, told = "the name of pool %r is back: clients may attach by it again", "name_back"
                log.warning(words, self.settings.name, extra=named(told))
            self._repair()
            if self.l1.taps is not None:
                self.l1.taps.look(self.loop.faults + self.dispatch.counters["internal_errors"])
            self.listener.resume()
            self.recording.check()
            if self.tracing is not None:
                self.tracing.check()
            self.sessions.drop_silent(now)

    def _repair(self) -> None:
        """Workers map the pool writable: rewrite what one has overwritten."""
        if self.segment.repair() and not self._scribbled:
            self._scribbled = True
            log.warning(
                "pool %r: another process has overwritten its tables; they are repaired, and status "
                "counts it: look for a "
                "worker that writes outside its slots",
                self.settings.name,
            )

    def _drained(self, now: float) -> bool:
        idle = not self.kernel.clearing and not self.kernel.working and (self.tiering is None or self.tiering.drained)
        return idle or self.drain_until_s is None or now >= self.drain_until_s

    def begin_drain(self) -> None:
        """Accept nothing new, and write everything that is waiting for tiers. Whatever these steps do, the server ends
        within `drain_s`."""
        if self.drain_until_s is None:
            self.draining = True
            self.drain_until_s = self.clock.now + self.settings.drain_s
            name, drain_s = self.settings.name, self.settings.drain_s
            told = named("draining", drain_s=drain_s)
            log.info("%r drains, for %g s at most: new stores are refused", name, drain_s, extra=told)
            if self.l1.taps is not None:
                self.l1.taps.drain_begun(self.settings.drain_s)
            self._end_by(
                ("telling the service manager", self.service_manager.stopping),
                ("refusing new stores", self.kernel.begin_drain),
                ("answering the stores that wait", self.store_waits.end),
                ("telling the plugins", self.registry.hook.lmcache_stopping),
                ("draining the tiers", self._drain_tiers),
            )

    def _started(self) -> None:
        l1, tiers = self.settings.l1, [] if self.tiering is None else sorted(self.settings.l2)
        log.info(
            "%r serves a pool of %s bytes (%s, %s) with %s at %s",
            self.settings.name,
            f"{self.kernel.usage().pool_bytes:,}",
            l1.backing,
            l1.eviction.type,
            f"tiers {', '.join(tiers)}" if tiers else "no tier",
            ", ".join([self.address, *(carrier.address for carrier in self.carriers)]),
            extra=named("serving", pool_bytes=self.kernel.usage().pool_bytes, backing=l1.backing, tiers=tiers),
        )
        if extension.why_not:
            level = logging.INFO if extension.mode == "off" else logging.WARNING
            why, cost, cure = extension.why_not, extension.COST_WITHOUT, extension.cure()
            log.log(level, "%s; so %s. To have it: %s", why, cost, cure, extra=named("no_c_extension", why=why))
        self.helpers.start()
        self.registry.hook.lmcache_started(settings=self.settings, address=self.address)

    def _accept(self, sock: socket.socket) -> None:
        try:
            peer = LifelinePeer(sock, self.loop, self.dispatch.on_frame, self.peer_ended)
        except OSError:  # it has already hung up
            sock.close()
            return
        self.admit(peer)

    def admit(self, peer: LifelinePeer) -> None:
        """Let a connected peer say hello, or refuse it."""
        ours = peer.uid in (0, os.geteuid())
        in_group = self.settings.l1.access == "group" and not peer.gids().isdisjoint(self.settings.l1.gids)
        if not ours and not in_group:
            self.dispatch.counters["refused_peers"] += 1
            peer.turn_away(encode(m.Error(0, UntrustedError.code, words_for_stranger(peer.uid), "never")))
            self._tell_of_refusal(peer)
        self.sessions.connected(peer, self.clock.now)

    def _tell_of_refusal(self, peer: LifelinePeer) -> None:
        now, refused = self.clock.now, self.dispatch.counters["refused_peers"]
        if now - self._refusal_told_at_s >= LIMIT_WARNING_PAUSE_S:
            self._refusal_told_at_s = now
            told = named("peer_refused", uid=peer.uid, pid=peer.pid, refused=refused)
            words = "a process of user %s (pid %s) was turned away; refused so far: %d"
            log.warning(words, peer.uid, peer.pid, refused, extra=told)

    def peer_ended(self, peer: Peer) -> None:
        """Its connection has ended."""
        self.sessions.lost(peer, self.clock.now)
        self.l1.apply()

    # --- the end ------------------------------------------------------------------------------------------

    def _end_by(self, *steps: tuple[str, Callable[[], object]]) -> None:
        """Take all these steps, even if some of them fail."""
        for what, step in steps:
            try:
                step()
            except BaseException:
                self.end_faults += 1
                log.exception("pool %r: %s failed; the shutdown continues", self.settings.name, what)

    def _close(self) -> None:
        """Close everything that was opened, in reverse order; the mapping itself ends with its last view."""
        log.info("%r ends%s", self.settings.name, self._owed(), extra=named("ending"))
        self._end_by(
            ("ending the recording", self.recording.stop),
            ("saying that nobody answers for the index", lambda: self.segment.serve(0)),
            ("ending the population", lambda: self.populator.stop(timeout_s=5.0)),
            ("ending the helpers", self.helpers.close),
            ("closing the lifeline", self.listener.close),
            *(("closing a carrier", carrier.close) for carrier in self.carriers),
            ("ending the sessions", self.sessions.close),
            ("ending the operations", self.operations.close),
            ("ending the companions", self.companions.close),
            ("closing the tiers", self._close_tiers),
            ("freeing what was cleared", self._free_cleared),
            ("carrying out what was decided", self.l1.apply),
            ("ending the event subscribers", self._close_events),
            ("ending the traces", self._close_tracing),
            ("deciding whether to keep the pool", self._decide_keeping),
            ("closing the loop", self.loop.close),
            ("turning away who came too late", self._close_arrivals),
            ("closing what was adopted", self._close_former),
            ("closing the index", self._close_index),
            ("closing the pool", lambda: self.segment.close(keep=self._keeps_pool)),
            ("removing the directory", self._remove_directory),
        )

    def _owed(self) -> str:
        """The objects of the pool that no tier has, in words."""
        owed = {} if self.tiering is None else self.tiering.owed
        said = ", ".join(f"{objects:,} that tier {tier} does not have" for tier, objects in owed.items() if objects)
        return f"; of its objects there are {said}" if said else ""

    def _drain_tiers(self) -> None:
        if self.tiering is not None:
            self.tiering.begin_drain()

    def _close_events(self) -> None:
        if self.events is not None:
            self.events.close()

    def _close_tracing(self) -> None:
        if self.tracing is not None:
            self.tracing.close()

    def _close_index(self) -> None:
        if self.l1.index is not None:
            self.l1.index.close()  # it keeps the mapping

    def _close_former(self) -> None:
        if self.adopting is not None:
            self.adopting.close()

    def _close_tiers(self) -> None:
        self._lanes_ended = False  # until it is known that no call may touch the pool
        self._lanes_ended = self.tiering is None or self.tiering.close()
        if not self._lanes_ended:
            log.warning("a tier's call has not returned: its thread is abandoned, with the memory that it may touch")

    def _free_cleared(self) -> None:
        while self.settings.l1.keep_pool and self.kernel.clearing:
            self.kernel.free_cleared(self.clock.now)  # otherwise the next server would find what was cleared here

    def _remove_directory(self) -> None:
        with contextlib.suppress(OSError):  # another server may already be here, or a user's file
            self._directory.rmdir()

    def _decide_keeping(self) -> None:
        """Keep the pool for the next server, if requested and nothing of ours can touch it any more."""
        if not self.settings.l1.keep_pool:
            return
        why_not = ""
        if not self._lanes_ended:
            why_not = "a tier's call has not returned and may write to it"
        elif self.end_faults:
            why_not = "its shutdown was not clean"
        elif self.l1.index is None:
            why_not = "without the C extension it has no index"
        elif self.name_lost or not name_exists(self.segment):
            why_not = "its name was deleted"
        self._keeps_pool = not why_not
        if why_not:
            told = named("not_kept", why=why_not)
            log.warning(
                "pool %r is not kept, and the next server begins cold: %s", self.settings.name, why_not, extra=told
            )

    def __enter__(self) -> Self:
        return self.start() if self._thread is None else self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
