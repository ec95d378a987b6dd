"""The wire between a client and the server: frames in order on each connection, late as the seed wants, and ends."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sim_world import Broken, Killed, World

from lmcache_core.client.link.connection import Connection
from lmcache_core.descriptors import Descriptor
from lmcache_core.errors import DisconnectedError
from lmcache_core.server.peers.lifeline import LifelinePeer

if TYPE_CHECKING:
    from sim_nodes import ClientNode, ServerNode

_END = object()


class Wire:
    """One direction: what is sent arrives in order, each part after a while of its own."""

    def __init__(self, world: World, deliver: Callable[[Any], None]) -> None:
        self._world = world
        self._deliver = deliver
        self._under_way: deque[object] = deque()
        self.cut = False

    def send(self, thing: object) -> None:
        if self.cut:
            return
        self._under_way.append(thing)
        self._world.soon(self._arrive)

    def end(self) -> None:
        """Nothing is sent after this; what is under way arrives, and then the end."""
        self.send(_END)

    def lose(self) -> None:
        """What is under way is lost, and the end arrives."""
        if self.cut:
            return  # it has been lost once, and its end is under way
        kept = self._world.chance.randrange(len(self._under_way) + 1)
        while len(self._under_way) > kept:
            self._under_way.pop()
        self.end()
        self.cut = True

    def _arrive(self) -> None:
        if self._under_way:
            self._deliver(self._under_way.popleft())


class Socket:
    """The client's end, as its kernel has it. It ends with its process, or when nothing of the process refers to it."""

    def __init__(self, world: World, node: ClientNode, server: ServerNode) -> None:
        self.world = world
        self.node = node
        self.name = f"{node.name}/{len(node.sockets)}"
        self.inbox: deque[tuple[bytes, int]] = deque()
        self.ended = self.closed = False
        self.to_client = Wire(world, self._deliver)
        self.peer = SimulatedPeer(world, self, server)
        self.to_server = Wire(world, self.peer.deliver)
        self._wakers: list[Callable[[], None]] = []
        node.sockets.append(self)

    def send(self, frame: bytes) -> None:
        self.living()
        if self.closed or self.to_server.cut:
            raise DisconnectedError("the server went away")
        self.node.sends(frame)
        self.to_server.send(bytes(frame))

    def wait(self, until: float) -> None:
        """Until something comes, or the end, or the moment."""
        task = self.world.task
        assert task is not None
        if task.quick:
            raise Broken(f"{task.quick} waits for the server")
        task.wait(until, self._wakers.append)

    def living(self) -> None:
        if self.node.dead:
            raise Killed

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.to_server.end()
            self.to_client.cut = True
            for _, fd in self.inbox:
                if fd >= 0:
                    os.close(fd)
            self.inbox.clear()
            self._wake()

    def cut(self) -> None:
        """The connection is lost, as both sides find out in their own time."""
        self.to_server.lose()
        self.to_client.lose()

    def _deliver(self, thing: Any) -> None:
        if thing is _END:
            self.ended = True
        elif not self.closed:
            self.inbox.append(thing)
        elif thing[1] >= 0:
            os.close(thing[1])
        self._wake()

    def _wake(self) -> None:
        wakers, self._wakers = self._wakers, []
        for wake in wakers:
            wake()


class SimulatedConnection(Connection):
    """What the library holds of a socket."""

    carrier = "lifeline"

    def __init__(self, world: World, node: ClientNode, server: ServerNode) -> None:
        self._world = world
        self._node = node
        self._server = server
        self._socket: Socket | None = None
        self._closed = False
        self._fd = -1

    def connect(self) -> bool:
        self._living()
        if self._socket is None:
            if self._server.server is None:
                raise DisconnectedError("no server answers: nobody listens")
            if self._server.stopped_until > self._world.now and self._world.chance.random() < 0.3:
                return False  # its backlog is full
            self._socket = Socket(self._world, self._node, self._server)
            self._server.accept(self._socket)
        return True

    def poll(self, deadline: float, also_fd: int = -1) -> None:
        self._living()
        socket, task = self._socket, self._world.task
        assert task is not None
        if socket is None and task.quick:
            raise Broken(f"{task.quick} waits for a server to listen")
        if socket is None:
            task.wait(min(deadline, self._world.now + 0.001))
        elif not socket.inbox and not socket.ended and deadline > self._world.now:
            socket.wait(deadline)

    def send(self, frame: bytes, deadline: float = 0.0) -> bool:
        self._living().send(frame)
        task = self._world.task
        if task is not None and task.node is self._node:
            task.breathe()
        return True

    def receive(self, deadline: float) -> memoryview | None:
        socket = self._living()
        while True:
            socket.living()
            if socket.inbox:
                return memoryview(socket.inbox[0][0])
            if socket.ended:
                raise DisconnectedError("the server closed the connection")
            if self._world.now >= deadline:
                return None
            socket.wait(deadline)
            self._living()

    def received(self) -> None:
        if self._socket is not None and self._socket.inbox:
            fd = self._socket.inbox.popleft()[1]
            if fd >= 0:
                self._fd = fd

    def send_waiting(self, frames: deque[bytes]) -> None:
        while frames and self.send(frames[0]):
            frames.popleft()

    def take_fd(self) -> Descriptor:
        fd, self._fd = self._fd, -1
        return Descriptor.of(fd) if fd >= 0 else Descriptor()

    def ended(self) -> bool:
        return self._closed or self._socket is None or self._socket.ended

    def close_in_child(self) -> None:
        self.close()

    def close(self) -> None:
        self._closed = True
        self.take_fd().close()
        if self._socket is not None:
            self._socket.close()

    def _living(self) -> Socket:
        """The socket, if it is one of a living process that has not closed it."""
        if self._node.dead:
            raise Killed
        if self._closed:
            raise DisconnectedError("the connection is closed")
        return self._socket  # type: ignore[return-value]  # before it is connected nobody uses it

    def __del__(self) -> None:
        self.close()


class SimulatedPeer(LifelinePeer):
    """The server's end: what its sessions see of the connection."""

    carrier = "lifeline"
    can_pass_fd = True

    def __init__(self, world: World, socket: Socket, server: ServerNode) -> None:
        self._world = world
        self.socket = socket
        self._server = server
        self._incarnation = server.incarnation
        self.uid = socket.node.uid
        self.pid = socket.node.pid
        self.origin = f"uid {self.uid}"
        self.closed = self.admitted = False
        self.session = None
        self.inbox: deque[bytes | None] = deque()  # what its server has not come to; None: the end

    def gids(self) -> set[int]:
        return {os.getegid()}  # whatever its uid: the server lets our group in

    def pidfd(self) -> int:
        return self.socket.node.pidfd()

    def send(self, frame: bytes, fd: int = -1) -> None:
        if not self.closed:
            self._server.answers(self, frame)
            self.socket.to_client.send((bytes(frame), os.dup(fd) if fd >= 0 else -1))

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.socket.to_client.end()

    def turn_away(self, frame: bytes) -> None:
        self.send(frame)
        self.close()  # what was sent arrives before the end does

    def deliver(self, thing: object) -> None:
        """Something has arrived at the server's machine."""
        self._server.arrives(self, thing, end=thing is _END)

    @property
    def of_now(self) -> bool:
        """Whether the server that it was connected to still runs."""
        return self._incarnation == self._server.incarnation
