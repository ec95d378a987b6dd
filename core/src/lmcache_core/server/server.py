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

from lmcache_core import limits
from lmcache_core import native as extension
from lmcache_core.clock import Clock
from lmcache_core.errors import UntrustedError, UsageError
from lmcache_core.guard import on_failure
from lmcache_core.observe.lines import named
from lmcache_core.plugins.loader import load_plugins
from lmcache_core.plugins.registry import Registry
from lmcache_core.pool.backing import Access
from lmcache_core.pool.segment import name_exists
from lmcache_core.protocol import messages as m
from lmcache_core.protocol.address import make_server_directory
from lmcache_core.protocol.codec import encode
from lmcache_core.server.build import build
from lmcache_core.server.dispatch import Dispatch
from lmcache_core.server.peers.ipc_carrier import IpcCarrier
from lmcache_core.server.peers.lifeline import LifelinePeer
from lmcache_core.server.process.end_signals import EndSignals
from lmcache_core.server.process.names import Names
from lmcache_core.server.process.service_manager import ServiceManager
from lmcache_core.server.status import describe
from lmcache_core.settings.model import Settings
from lmcache_core.state_thread import remove_name
from lmcache_core.trust import refusal_message

if TYPE_CHECKING:
    from lmcache_core.server.peers.session import Peer
    from lmcache_core.tiers.tiering import Tiering

log = logging.getLogger(__name__)


class Server:
    """Built completely from settings, or not at all: the constructor raises before anything is served."""

    def __init__(self, settings: Settings, registry: Registry | None = None, clock: Clock | None = None) -> None:
        """`registry`: None for all installed plugins."""
        with contextlib.ExitStack() as undo:
            self.parts = parts = build(
                settings, load_plugins() if registry is None else registry, clock or Clock(), undo
            )
            parts.loop.on_fault = parts.kernel.put_right
            self.names = Names(
                [parts.listener, *(carrier for carrier in parts.carriers if isinstance(carrier, IpcCarrier))],
                lambda: parts.segment.claims,
                self._make_directory,
                parts.loop.call,
            )
            self.service_manager = ServiceManager()
            self.dispatch = Dispatch(parts, lambda: describe(self))
            self.started_at_s = time.time()
            self.name_lost = False
            self._refusal_logged_at_s = -limits.LIMIT_WARNING_PAUSE_S
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
            parts.segment.begin()
            parts.listener.serve(self._accept)
            parts.populator.start()
            parts.l1.serve_index(not parts.request_watch.on)
            undo.pop_all()

    def _make_directory(self) -> None:
        settings = self.parts.settings
        make_server_directory(settings.name, settings.runtime_dir, Access(settings.l1.access), settings.l1.gids)

    @property
    def tiering(self) -> Tiering | None:
        """None: there has never been a tier."""
        return self.parts.l1.tiering

    @property
    def address(self) -> str:
        """Where clients on the node connect."""
        return str(self.parts.listener.path)

    # --- running ------------------------------------------------------------------------------------------

    def run(self, on_ready: Callable[[str], None] | None = None, signals: EndSignals | None = None) -> int:
        """Serve in this thread until SIGTERM or SIGINT; returns the exit status. Only in the main thread. `signals`:
        from a caller that has handled them since before this server was made."""
        sys.setswitchinterval(limits.SWITCH_INTERVAL_S)
        # A full garbage collection over a million residents stalls for 160 ms, and one of 50,000 young objects for 4.
        # Current objects are frozen; young ones are collected a few at a time, and again in housekeeping; the data path
        # makes no longer-lived cycles.
        gc.collect()
        gc.freeze()
        gc.set_threshold(1_000, 1_000_000, 1_000_000)
        with contextlib.ExitStack() as stack:
            loop = self.parts.loop
            (signals or stack.enter_context(EndSignals())).tell(
                lambda: loop.call(self.begin_drain), lambda: loop.call(self.end_drain)
            )
            with on_failure(self._close):
                self._started()
                if on_ready is not None:
                    self.parts.populator.wait_begun(limits.READY_WAIT_S)  # callers that wait for this store at once
                    on_ready(self.address)
                self.service_manager.ready()
            self._serve()
        return 1 if self.end_faults else 0

    def start(self, *, wait: bool = False) -> Self:
        """Embedded mode: serve on a thread of this process until `stop`. Only once: UsageError after that. `wait`:
        until all of the pool is populated, so that no store is answered WARMING; raises `PoolError` if there is not
        enough memory."""
        if self._thread is not None:
            raise UsageError(f"server {self.parts.settings.name!r} was already started: make a new Server")
        self._thread = threading.Thread(target=self._serve, name="lmcache-server", daemon=True)
        self._thread.start()
        with on_failure(self.stop):
            self._started()
            if wait:
                self.parts.populator.wait_known()
        return self

    def stop(self) -> None:
        """Drain and end; in embedded mode, waits for that. Safe from any thread and from signal handlers."""
        self.parts.loop.call(self.begin_drain)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def connect(self, client_name: str = "embedded", *, maps_pool: bool = True, use_index: bool = True) -> Any:
        """A client of this server over a socket pair, without anything in the file system."""
        from lmcache_core.client.client import Client
        from lmcache_core.client.link.link import Target

        target = Target(self.parts.settings.name, None, None, None, client_name, maps_pool, self._open_pair, use_index)
        return Client(target)

    def _open_pair(self) -> Any:
        from lmcache_core.client.link.connection import LifelineConnection
        from lmcache_core.errors import DisconnectedError

        theirs, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        self._arrivals.append(ours)
        self.parts.loop.call(self._accept_arrivals)
        if self.parts.loop.ended:  # perhaps just now: it runs nothing any more
            self._close_arrivals()
            theirs.close()
            raise DisconnectedError(f"the embedded server {self.parts.settings.name!r} has ended")
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
            self.parts.loop.run(self._tick)
        finally:
            self._close()

    # --- a turn of the loop -------------------------------------------------------------------------------

    def _tick(self) -> float | None:
        parts = self.parts
        now, kernel, l1 = parts.clock.now, parts.kernel, parts.l1
        tiering = l1.tiering
        more = False
        clears = parts.clears  # most turns have nothing to do here, and calls cost time
        if kernel.clearing or clears.waiting or clears.unnoted:
            more |= clears.step()
        if kernel.working or l1.preparing:
            more |= l1.make_room()
        make = None
        if parts.adopting is not None:
            make = parts.adopting.due
            if make is not None and make <= now:
                more |= parts.adopting.step(now)
                make = parts.adopting.due
        for carrier in parts.carriers:
            more |= carrier.pump(self.dispatch.on_frame)
        if tiering is not None:
            tiering.step()
            parts.lookups.after_step()
            more |= parts.tier_waits.step()
            parts.stored_waits.step()
        due = kernel.next_deadline()
        if due is not None and due <= now:
            kernel.expire(now)
            due = kernel.next_deadline()
        check = parts.sessions.next_check()
        if check is not None and check <= now:
            parts.sessions.check(now)
            check = parts.sessions.next_check()
        if now >= parts.housekeeping.at_s:
            self._keep_house(now)
        parts.companions.step(now)
        l1.apply()
        if self.drain_until_s is not None and self._drained(now):
            parts.loop.stop()
        touched = kernel.take_touched()
        if touched > self.longest_turn_objects:
            self.longest_turn_objects = touched
        if more:
            return now
        next_s = parts.housekeeping.at_s
        deadlines: tuple[float | None, ...] = (due, check, make, parts.companions.next_step())
        if tiering is not None:  # without tiers nobody waits for one, or for room
            deadlines += (
                parts.lookups.next_reply_s,
                parts.tier_waits.next_at_s,
                parts.stored_waits.next_at_s,
                tiering.next_deadline(),
            )
        if parts.carriers:
            deadlines += tuple(carrier.next_check for carrier in parts.carriers)
        for each in deadlines:
            if each is not None and each < next_s:  # every turn of the loop comes here: min() costs 1 µs more
                next_s = each
        return next_s

    def _keep_house(self, now: float) -> None:
        """Report reads, evict for headroom, and check the pool's name. The first two go in bounded steps. While there
        is more to evict, the next turn comes at once, after everybody's next message; reads are reported with pauses,
        so that they never become the server's main work, however much workers read in place."""
        parts = self.parts
        self.service_manager.alive(now)
        parts.state_thread.step(now)
        more = parts.l1.note_uses()
        freed = parts.kernel.trim(now)
        parts.housekeeping.at_s = (
            now if freed else now + (limits.INDEX_SWEEP_PAUSE_S if more else limits.HOUSEKEEPING_S)
        )
        if not freed and now >= self._chores_at_s:
            self._chores_at_s = now + limits.HOUSEKEEPING_S
            if self._thread is None and parts.adopting is not None and parts.adopting.makes_objects:
                gc.freeze()  # a hundred thousand of them in this time: scanning them took up to 18 ms
            elif gc.get_count()[1]:  # young cycles, before they get too old for the collector to scan
                gc.collect(1)
            if parts.l1.index is not None:
                parts.l1.index.keep_places(parts.kernel.adoption.under_way)
                parts.l1.index.tidy()
            if self.name_lost != (not name_exists(parts.segment)):
                self.name_lost = not self.name_lost
                if self.name_lost:
                    text, fields = "the name of pool %r was deleted: serving goes on by descriptor", "name_lost"
                else:
                    text, fields = "the name of pool %r is back: clients may attach by it again", "name_back"
                log.warning(text, parts.settings.name, extra=named(fields))
            self._repair()
            parts.observer.check(parts.loop.faults + self.dispatch.counters["internal_errors"])
            parts.listener.resume()
            parts.populator.tend(now)
            parts.sessions.drop_silent(now)

    def _repair(self) -> None:
        """Workers map the pool writable: rewrite what one has overwritten."""
        if self.parts.segment.repair() and not self._scribbled:
            self._scribbled = True
            log.warning(
                "pool %r: another process has overwritten its tables; they are repaired, and status "
                "counts it: look for a "
                "worker that writes outside its slots",
                self.parts.settings.name,
            )

    def _drained(self, now: float) -> bool:
        idle = (
            not self.parts.kernel.clearing
            and not self.parts.kernel.working
            and (self.tiering is None or self.tiering.drained)
        )
        return idle or self.drain_until_s is None or now >= self.drain_until_s

    def begin_drain(self) -> None:
        """Accept nothing new, and write everything that is waiting for tiers. Whatever these steps do, the server ends
        within `drain_s`."""
        parts = self.parts
        if self.drain_until_s is None:
            self.draining = True
            self.drain_until_s = parts.clock.now + parts.settings.drain_s
            name, drain_s = parts.settings.name, parts.settings.drain_s
            fields = named("draining", drain_s=drain_s)
            log.info(
                "%r is shutting down: it drains for %g s at most, and refuses new stores",
                name,
                drain_s,
                extra=fields,
            )
            parts.observer.drain_begun(parts.settings.drain_s)
            self._end_by(
                ("telling the service manager", self.service_manager.stopping),
                ("refusing new stores", parts.kernel.begin_drain),
                ("answering the stores that wait", parts.tier_waits.end),
                ("telling the plugins", parts.registry.hook.lmcache_stopping),
                ("draining the tiers", self._drain_tiers),
            )

    def end_drain(self) -> None:
        """What is not on the tiers by now stays behind."""
        if self.drain_until_s is not None and self.drain_until_s > self.parts.clock.now:
            log.warning("%r was asked to end again: it waits for no tier any more", self.parts.settings.name)
            self.drain_until_s = self.parts.clock.now

    def _started(self) -> None:
        parts = self.parts
        l1, tiers = parts.settings.l1, [] if self.tiering is None else sorted(parts.settings.l2)
        log.info(
            "%r serves a pool of %s bytes (%s, %s) with %s at %s",
            parts.settings.name,
            f"{parts.kernel.usage().pool_bytes:,}",
            l1.backing,
            l1.eviction.type,
            f"tiers {', '.join(tiers)}" if tiers else "no tier",
            ", ".join([self.address, *(carrier.address for carrier in parts.carriers)]),
            extra=named("serving", pool_bytes=parts.kernel.usage().pool_bytes, backing=l1.backing, tiers=tiers),
        )
        if extension.why_not:
            level = logging.INFO if extension.mode == "off" else logging.WARNING
            why, cost, cure = extension.why_not, extension.COST_WITHOUT, extension.cure()
            log.log(level, "%s; so %s. To have it: %s", why, cost, cure, extra=named("no_c_extension", why=why))
        self.names.start()
        parts.helpers.start()
        parts.registry.hook.lmcache_started(settings=parts.settings, address=self.address)

    def _accept(self, sock: socket.socket) -> None:
        try:
            peer = LifelinePeer(sock, self.parts.loop, self.dispatch.on_frame, self.peer_ended, self.parts.unread)
        except OSError:  # it has already hung up
            sock.close()
            return
        self.admit(peer)

    def admit(self, peer: LifelinePeer) -> None:
        """Let a connected peer say hello, or refuse it."""
        parts = self.parts
        ours = peer.uid in (0, os.geteuid())
        in_group = parts.settings.l1.access == "group" and not peer.gids().isdisjoint(parts.settings.l1.gids)
        if not ours and not in_group:
            self.dispatch.counters["refused_peers"] += 1
            peer.turn_away(encode(m.Error(0, UntrustedError.code, refusal_message(peer.uid), "never")))
            self._log_refusal(peer)
        parts.sessions.connected(peer, parts.clock.now)

    def _log_refusal(self, peer: LifelinePeer) -> None:
        now, refused = self.parts.clock.now, self.dispatch.counters["refused_peers"]
        if now - self._refusal_logged_at_s >= limits.LIMIT_WARNING_PAUSE_S:
            self._refusal_logged_at_s = now
            fields = named("peer_refused", uid=peer.uid, pid=peer.pid, refused=refused)
            text = "a process of user %s (pid %s) was turned away; refused so far: %d"
            log.warning(text, peer.uid, peer.pid, refused, extra=fields)

    def peer_ended(self, peer: Peer) -> None:
        """Its connection has ended."""
        self.parts.sessions.lost(peer, self.parts.clock.now)
        self.parts.l1.apply()

    # --- the end ------------------------------------------------------------------------------------------

    def _end_by(self, *steps: tuple[str, Callable[[], object]]) -> None:
        """Take all these steps, even if some of them fail."""
        for what, step in steps:
            try:
                step()
            except BaseException:  # an interrupt, too: whoever sends it wants this end
                self.end_faults += 1
                log.exception("pool %r: %s failed; the shutdown continues", self.parts.settings.name, what)

    def _close(self) -> None:
        """Close everything that was opened, in reverse order; the mapping itself ends with its last view."""
        parts = self.parts
        freed = ""
        if parts.segment.path is not None and not self._keeps_pool:
            freed = "; its pool is freed (l1.keep_pool, or serve --keep-pool, keeps it)"
        log.info("%r closes%s%s", parts.settings.name, self._owed(), freed, extra=named("ending"))
        self._end_by(
            ("ending the watch on requests", parts.request_watch.close),
            ("saying that nobody answers for the index", lambda: parts.segment.serve(0)),
            ("ending the population", lambda: parts.populator.stop(timeout_s=5.0)),
            ("ending the helpers", parts.helpers.close),
            ("ending the watch on its names", self.names.stop),
            ("closing the lifeline", parts.listener.close),
            *(("closing a carrier", carrier.close) for carrier in parts.carriers),
            ("ending the sessions", parts.sessions.close),
            ("ending the operations", parts.operations.close),
            ("ending the companions", parts.companions.close),
            ("closing the tiers", self._close_tiers),
            ("freeing what was cleared", self._free_cleared),
            ("carrying out what was decided", parts.l1.apply),
            ("ending the event subscribers and the tracer", parts.observer.close),
            ("deciding whether to keep the pool", self._decide_keeping),
            ("ending the work on state files", parts.state_thread.close),
            ("closing the loop", parts.loop.close),
            ("turning away who came too late", self._close_arrivals),
            ("closing what was adopted", self._close_former),
            ("closing the index", self._close_index),
            ("closing the pool", lambda: parts.segment.close(keep=self._keeps_pool)),
            ("removing the directory", self._remove_directory),
        )

    def _owed(self) -> str:
        """What the tiers lack of the pool, and what they should not have any more, in words."""
        if self.tiering is None:
            return ""
        owed, left = self.tiering.owed, self.tiering.owed_deletes
        lacking = ", ".join(f"{objects:,} that tier {tier} does not have" for tier, objects in owed.items() if objects)
        had = ", ".join(f"tier {tier} may still have {objects:,}" for tier, objects in left.items() if objects)
        given_up = "".join(f"; tier {tier} was given up: {error}" for tier, error in self.tiering.given_up.items())
        return (
            (f"; of its objects there are {lacking}" if lacking else "")
            + (f"; of what was dropped {had}" if had else "")
            + (given_up if lacking or had else "")
        )

    def _drain_tiers(self) -> None:
        if self.tiering is not None:
            self.tiering.begin_drain()

    def _close_index(self) -> None:
        if self.parts.l1.index is not None:
            self.parts.l1.index.close()  # it keeps the mapping

    def _close_former(self) -> None:
        if self.parts.adopting is not None:
            self.parts.adopting.close()

    def _close_tiers(self) -> None:
        self._lanes_ended = False  # until it is known that no call may touch the pool
        self._lanes_ended = self.tiering is None or self.tiering.close()
        if not self._lanes_ended:
            log.warning("a tier's call has not returned: its thread and the memory that it may touch are left behind")

    def _free_cleared(self) -> None:
        parts = self.parts
        while parts.settings.l1.keeps_pool and parts.kernel.clearing:
            parts.kernel.free_cleared(parts.clock.now)  # otherwise the next server would find what was cleared here

    def _remove_directory(self) -> None:
        with contextlib.suppress(OSError):  # another server may already be here, or a user's file
            remove_name(self.parts.directory, self.parts.directory.rmdir)

    def _decide_keeping(self) -> None:
        """Keep the pool for the next server, if requested and nothing of ours can touch it any more."""
        parts = self.parts
        if not parts.settings.l1.keeps_pool:
            return
        why_not = ""
        if not self._lanes_ended:
            why_not = "a tier's call has not returned and may write to it"
        elif self.end_faults:
            why_not = "its shutdown was not clean"
        elif parts.l1.index is None:
            why_not = "without the C extension it has no index"
        elif self.name_lost or not name_exists(parts.segment):
            why_not = "its name was deleted"
        self._keeps_pool = not why_not
        if why_not:
            fields = named("not_kept", why=why_not)
            log.warning(
                "pool %r is not kept, and the next server starts cold: %s", parts.settings.name, why_not, extra=fields
            )

    def __enter__(self) -> Self:
        return self.start() if self._thread is None else self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
