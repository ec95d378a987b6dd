"""One connected client: its peer, its state, its namespaces, its row in the worker table."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from lmcache_core.pool.tables import NO_ROW
from lmcache_core.protocol.codec import encode
from lmcache_core.protocol.messages import Message
from lmcache_core.server.session_states import SESSION_TRANSITIONS, SessionEvent, SessionState


class Peer(ABC):
    """The far end of a carrier. `send` never blocks: who does not read is dropped once the queue is full."""

    carrier: str
    uid: int
    pid: int  # 0 where it is not known, as across pid namespaces
    origin: str  # whom the caps count together: a uid, a CURVE key, an address
    session: Session | None = None  # once it has said hello
    can_pass_fd: bool = False

    @abstractmethod
    def send(self, frame: bytes, fd: int = -1) -> None:
        """Queue a frame; with a descriptor where the carrier can pass one."""

    @abstractmethod
    def close(self) -> None:
        """Drop the connection. Idempotent; does not end the session."""


@dataclass(eq=False)
class Session:
    """What the server knows of a client. The kernel holds its leases under `id`, from its hello on."""

    id: int
    peer: Peer | None  # None: the connection ended
    uid: int
    pid: int
    carrier: str
    origin: str
    state: SessionState = SessionState.CONNECTED
    client_id: bytes = b""
    name: str = ""
    row: int = NO_ROW  # in the pool's worker table
    nonce: int = 0
    wants_pool: bool = False  # it said so in its hello
    maps_pool: bool = False  # it has shown so; stays true when it is lost
    ended_by: str = ""  # once it has ended: goodbye, die, …
    namespaces: dict[int, int] = field(default_factory=dict)  # namespace id → layout id
    storing: Counter[int] = field(default_factory=Counter)  # of these, into which a store waits: not to be forgotten
    pidfd: int = -1
    heard_at_s: float = 0.0
    check_at_s: float = 0.0  # when its life lock is looked at next, and how long after the last time
    check_pause_s: float = 0.0
    listeners: tuple[Callable[[Session, Message], None], ...] = ()  # hear what it is answered later

    def move(self, event: SessionEvent) -> None:
        """The only way to another state. A step that is not in the table is a bug of the caller's: `KeyError`."""
        self.state = SESSION_TRANSITIONS[self.state, event]

    @property
    def attached(self) -> bool:
        """It is given slots."""
        return self.state is SessionState.ATTACHED

    def send(self, message: Message) -> None:
        """Answer, or tell; nothing happens where nobody listens any more."""
        for listener in self.listeners:
            listener(self, message)
        if self.peer is not None:
            self.peer.send(encode(message))

    def listen(self, listener: Callable[[Session, Message], None]) -> None:
        """Have somebody hear what it is answered later, from now on."""
        if listener not in self.listeners:
            self.listeners += (listener,)

    def unlisten(self, listener: Callable[[Session, Message], None]) -> None:
        """Who listened does so no more."""
        self.listeners = tuple(each for each in self.listeners if each != listener)

    def describe(self) -> dict[str, object]:
        """For `status`."""
        return {
            "id": self.id,
            "name": self.name,
            "state": self.state.name.lower(),
            "carrier": self.carrier,
            "pid": self.pid,
            "uid": self.uid,
            "origin": self.origin,
            "attached": self.attached,
            "connected": self.peer is not None,
        }
