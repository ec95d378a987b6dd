"""The machines' processes: a server with its real loop body, clients with the real library, each in virtual time."""

from __future__ import annotations

import contextlib
import os
import random
import select
import threading
import weakref
from collections.abc import Callable, Sequence

from sim_isolation import Store, watched
from sim_shadow import Place, Shadow
from sim_tier import SimulatedTier, beside, check_lanes
from sim_watch import Watch
from sim_wire import SimulatedConnection, SimulatedPeer, Socket
from sim_world import Broken, World

from lmcache_core.client.client import Client
from lmcache_core.client.link.link import Target
from lmcache_core.clock import Clock
from lmcache_core.kernel.answers import LeaseKind
from lmcache_core.pool.lifelock import LifeLock
from lmcache_core.protocol import messages as m
from lmcache_core.protocol.codec import decode_reply, read_request, unpack_positions, unpack_u64
from lmcache_core.server.server import Server

LATE_S = 0.002  # what an answer that was due may take on a server that runs


class ServerProcess:
    """What the threads of one server's lanes belong to."""

    def __init__(self, node: ServerNode) -> None:
        self.world = node.world
        self.dead = False
        self._node = node

    @property
    def stopped_until(self) -> float:
        return self._node.stopped_until

    def turn(self) -> None:
        if not self.dead:
            self._node.turn()

    def kill(self) -> None:
        self.dead = True
        for task in self.world.tasks:
            if task.node is self and not task.done:
                self.world.soon(task.resume)


class ServerNode:
    """One server after the other, of one name."""

    def __init__(self, world: World, shadow: Shadow, build: Callable[[Clock], Server], tiers: Sequence[SimulatedTier]):
        self.world = world
        self.shadow = shadow
        self._build = build
        self.tiers = tiers
        self.server: Server | None = None
        self.process = ServerProcess(self)
        self.incarnation = 0
        self.stopped_until = 0.0
        self.ran_since = 0.0  # without having been stopped
        self._sockets: list[Socket] = []
        self._stores: list[Store] = []  # that tenants share
        self._wake = 0
        self._asked: dict[tuple[int, int], tuple[float, m.Request]] = {}  # what is not answered: when it came
        self._clears: dict[tuple[int, int], tuple[int, m.Clear]] = {}  # the same: at which step it came
        self.granted: dict[int, list[Place | None]] = {}  # write leases: where their positions are

    def start(self) -> None:
        if self.server is not None:
            return
        self.incarnation += 1
        self.world.note("server", f"starts, the {self.incarnation}th")
        self.process = self.world.process = ServerProcess(self)
        server = self._build(Clock(lambda: self.world.now))
        Watch(self.world, self.shadow, server)
        assert server.parts.populator.wait(60)
        server.parts.kernel.add_memory(server.parts.segment.info.data_bytes)
        server.parts.kernel._releases.step_objects = 2  # so that something comes between two steps
        server._thread = threading.current_thread()  # one among others: what is dropped here is not frozen
        self._stores = watched(self.world, server, [tier.attach(server) for tier in self.tiers])
        if self.tiers:
            beside(server, self.process)
        self.server = server
        self.ran_since = self.shadow.server_since = self.world.now
        self._asked.clear()
        self._clears.clear()
        self.turn()

    def check_tenants(self) -> None:
        """Who has how much of pool and tiers is what their policies believe."""
        for store in self._stores:
            store.check()

    def kill(self) -> None:
        """kill -9: no line of its runs any more, and what it left in shared memory stays."""
        server, self.server = self.server, None
        if server is None:
            return
        self.world.note("server", "is killed")
        server.parts.state_thread.close()
        self._wake += 1
        claims, server.parts.segment.claims = server.parts.segment.claims, ()
        for claim in claims:
            claim.close()
        for session in server.parts.sessions:
            if session.pidfd >= 0:
                os.close(session.pidfd)
        with contextlib.suppress(OSError):
            server.parts.listener._sock.close()
        os.close(server.parts.listener._spare_fd)
        if server.parts.adopting is not None:
            server.parts.adopting.former.close()
        if server.parts.l1.index is not None:
            server.parts.l1.index.close()
        server.parts.segment._unmap()
        server.parts.loop.close()
        self.shadow.forget(self.process)
        self.process.kill()
        for socket in self._sockets:
            socket.to_client.lose()
        self._sockets.clear()

    def stop(self, seconds: float) -> None:
        """SIGSTOP, and SIGCONT after a while."""
        self.world.note("server", f"is stopped for {seconds:.3f} s")
        self.stopped_until = max(self.stopped_until, self.world.now + seconds)
        self.ran_since = self.stopped_until

    # --- turns of the loop --------------------------------------------------------------------------------

    def accept(self, socket: Socket) -> None:
        """A client connects, as far as the kernel is concerned."""
        self._sockets.append(socket)
        self.arrives(socket.peer, b"", end=False)

    def arrives(self, peer: SimulatedPeer, thing: object, *, end: bool) -> None:
        if not peer.of_now:
            return
        peer.inbox.append(None if end else thing)

        def serve(server: Server) -> None:
            if peer.closed or not peer.of_now:
                return
            frame = peer.inbox.popleft()
            if not peer.admitted:
                peer.admitted = True
                server.admit(peer)
            elif frame is None:
                peer.closed = True
                server.peer_ended(peer)
            else:
                self._watch_request(peer, frame)
                server.dispatch.on_frame(peer, memoryview(frame))

        self.turn(serve)

    def fires(self, fd: int) -> None:
        """A pidfd that the server watches; or one of its predecessor's, whose number may be another's by now."""
        if self.server is None or (handler := self.server.parts.loop._handlers.get(fd)) is None:
            return
        ready = select.poll()
        ready.register(fd, select.POLLIN)
        if ready.poll(0):
            self.turn(
                lambda server: handler(select.EPOLLIN) if server.parts.loop._handlers.get(fd) is handler else None
            )

    def turn(self, work: Callable[[Server], None] = lambda server: None) -> None:
        """One turn of the server's loop with one thing that is ready, once the process runs."""
        server = self.server
        if server is None:
            return
        if self.stopped_until > self.world.now:
            incarnation = self.incarnation
            self.world.at(self.stopped_until, lambda: self.turn(work) if self.incarnation == incarnation else None)
            return
        server.parts.clock.turn()
        server.parts.loop._run_calls()
        work(server)
        next_s = server._tick()
        server.parts.state_thread.wait(lambda: None)  # what it writes is written before anything else happens …
        server.parts.loop._run_calls()  # … and what waited for that is answered
        check_lanes(server)
        self._check_turn(server)
        self._wake += 1
        wake = self._wake
        if next_s is not None:
            self.world.at(next_s, lambda: self.turn() if wake == self._wake else None)

    # --- what must hold -----------------------------------------------------------------------------------

    def _check_turn(self, server: Server) -> None:
        now = self.world.now
        due = server.parts.kernel.next_deadline()
        if due is not None and due < now:
            raise Broken(f"a lease or pin that was due {now - due:.6f} s ago has not ended")
        for lease in server.parts.kernel.leases.by_id.values():
            if lease.kind is LeaseKind.PROMISE and lease.deadline < now:
                raise Broken(f"a promise has outlived its time by {now - lease.deadline:.6f} s")
        for wait in server.parts.lookups.timed:
            if wait.reply_at_s < now:
                raise Broken(f"a lookup that was to be answered {now - wait.reply_at_s:.6f} s ago still waits")
        for store in server.parts.tier_waits.waits:
            if store.reply_at_s < now:
                raise Broken(f"a store that was to be answered {now - store.reply_at_s:.6f} s ago still waits")

    def _watch_request(self, peer: SimulatedPeer, frame: bytes) -> None:
        request = read_request(memoryview(frame))
        self.world.note("server", f"{peer.socket.name} {type(request).__name__}")
        if isinstance(request, m.LookupRequest | m.PrepareStore):
            self._asked[id(peer), request.rid] = (self.world.now, request)
        elif isinstance(request, m.Clear):
            self._clears[id(peer), request.rid] = (self.world.steps, request)

    def answers(self, peer: SimulatedPeer, frame: bytes) -> None:
        """Every frame that the server sends comes by here."""
        reply = decode_reply(memoryview(bytes(frame)))
        self.world.note("server", f"to {peer.socket.name} {type(reply).__name__}")
        if isinstance(reply, m.LeaseExpiredNotice):
            return
        asked = self._clears.pop((id(peer), reply.rid), None)
        if asked is not None and isinstance(reply, m.ClearedReply):
            self.shadow.cleared(asked[1].namespace, asked[0], tiers=asked[1].tiers)
        came, request = self._asked.pop((id(peer), reply.rid), (0.0, None))
        if isinstance(reply, m.Granted) and request is not None:
            assert self.server is not None
            inode = os.fstat(self.server.parts.segment.fileno()).st_ino
            places = self.granted.setdefault(reply.lease, [])
            places += [(inode, offset) if offset else None for offset in unpack_u64(reply.offsets)]
        elif isinstance(reply, m.LookupReply) and isinstance(request, m.LookupRequest) and request.options.wait_s > 0:
            waited, wait_s = self.world.now - came, request.options.wait_s
            if not reply.done and waited < wait_s - 1e-6:
                raise Broken(f"a lookup was to wait for {wait_s} s, and was answered undone after {waited:.6f} s")
            if waited > wait_s + LATE_S and self.ran_since <= came:
                raise Broken(f"a lookup was to wait for {wait_s} s, and was answered after {waited:.6f} s")


class ClientNode:
    """One process that uses the library: one client after the other, used by any number of its threads."""

    def __init__(self, world: World, shadow: Shadow, server: ServerNode, number: int, chance: random.Random) -> None:
        self.world = world
        self.shadow = shadow
        self.server = server
        self.name = f"client{number}"
        self.uid = os.geteuid() if chance.random() < 0.5 else 1000 + number
        self.pid = 10_000 + number
        self.dead = False
        self.stopped_until = 0.0
        self.sockets: list[Socket] = []
        self.life_locks: list[weakref.ref[LifeLock]] = []
        self._alive = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._has_pidfd = chance.random() < 0.5
        self._watched: list[int] = []
        self.use_index = chance.random() < 0.5
        self.client: Client | None = None

    def __str__(self) -> str:
        return self.name

    def connect(self) -> Client:
        """A new client instance of this process."""
        target = Target(self.name, None, None, None, self.name, True, self._open, self.use_index)
        self.client = Client(target, 1)
        return self.client

    def _open(self) -> SimulatedConnection:
        return SimulatedConnection(self.world, self, self.server)

    def pidfd(self) -> int:
        if not self._has_pidfd:
            return -1
        fd = os.dup(self._alive)
        self._watched.append(fd)
        return fd

    def kill(self) -> None:
        """kill -9."""
        if self.dead:
            return
        self.world.note(self.name, "is killed")
        self.dead = True
        self.shadow.forget(self)
        self.close_descriptors()
        os.eventfd_write(self._alive, 1)
        for fd in self._watched:
            self.world.soon(lambda fd=fd: self.server.fires(fd))  # type: ignore[misc]
        for task in self.world.tasks:
            if task.node is self and not task.done:
                self.world.soon(task.resume)

    def stop(self, seconds: float) -> None:
        if not self.dead:
            self.world.note(self.name, f"is stopped for {seconds:.3f} s")
            self.stopped_until = max(self.stopped_until, self.world.now + seconds)

    def cut(self) -> None:
        """Its connection is lost."""
        for socket in self.sockets[-1:]:
            self.world.note(self.name, "loses its connection")
            socket.cut()

    def close_descriptors(self) -> None:
        """As the kernel does for a process that is dead."""
        for lock in self.life_locks:
            if (held := lock()) is not None:
                held.close()
        for socket in self.sockets:
            socket.close()

    def close(self) -> None:
        os.close(self._alive)

    # --- what it says -------------------------------------------------------------------------------------

    def sends(self, frame: bytes) -> None:
        """Every frame that it sends comes by here."""
        request = read_request(memoryview(bytes(frame)))
        if isinstance(request, m.CommitStore):
            places = self.server.granted.get(request.lease, [])
            positions = (
                range(request.first, request.first + request.count)
                if request.count
                else unpack_positions(request.positions)
            )
            for position in positions:
                if position < len(places) and places[position] is not None:
                    self.shadow.published(self, places[position])  # type: ignore[arg-type]
