"""One connected client: its peer, its state, its namespaces, its row in the worker table."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from lmcache_core.errors import UsageError
from lmcache_core.limits import PROMISES_CANCELLED_MAX
from lmcache_core.pool.tables import NO_ROW
from lmcache_core.protocol.codec import encode
from lmcache_core.protocol.messages import Message
from lmcache_core.server.peers.session_states import SESSION_TRANSITIONS, SessionEvent, SessionState


class Peer(ABC):
    """The far end of a carrier. `send` never blocks. The next request of a peer that does not read waits until it has
    read some of its replies; it is dropped only if the memory for unread frames is full."""

    carrier: str
    uid: int
    pid: int  # 0 if unknown, as across pid namespaces
    origin: str  # what limits are counted by: a uid, a CURVE key, an address
    session: Session | None = None  # once it has said hello
    can_pass_fd: bool = False

    @abstractmethod
    def send(self, frame: bytes, fd: int = -1, token_fd: int = -1) -> None:
        """Queue a frame; with one or two descriptors if the carrier can pass them."""

    @abstractmethod
    def close(self) -> None:
        """Drop the connection. Idempotent; does not end the session."""


class SessionListener(ABC):
    """Hears of a session's later answers, and of its end."""

    @abstractmethod
    def answered(self, session: Session, message: Message) -> None:
        """This message is about to be sent."""

    @abstractmethod
    def session_ended(self, session: Session) -> None:
        """No message follows."""


class GrantedPage(NamedTuple):
    """Of a write lease: the position of its first key, and which keys were granted."""

    lease_id: int
    first: int
    statuses: bytearray


@dataclass(eq=False)
class Session:
    """What the server knows about a client. The kernel knows its leases under `id`, from its hello on."""

    id: int
    peer: Peer | None  # None: the connection ended
    uid: int
    pid: int
    carrier: str
    origin: str
    state: SessionState = SessionState.CONNECTED
    client_id: bytes = b""
    name: str = ""
    chunk_tokens: int = 0  # that make one of its keys; 0: it has not reported it
    row: int = NO_ROW  # in the pool's worker table
    nonce: int = 0
    wants_pool: bool = False  # according to its hello
    maps_pool: bool = False  # it has proved it; stays true when it is lost
    ended_by: str = ""  # once it has ended: goodbye, die, …
    namespaces: dict[int, int] = field(default_factory=dict)  # namespace id → layout id
    labels: dict[int, str] = field(default_factory=dict)  # of these, as it has given them
    storing: Counter[int] = field(default_factory=Counter)  # of these, those that stores wait for: not to be forgotten
    pidfd: int = -1
    life_fd: int = -1  # our end of its life token: in error once the worker's end is closed
    takes_token: bool = False  # and gets one with its welcome
    locked: bool = True  # it holds its row's life lock, according to itself
    seen_at_s: float = 0.0
    check_at_s: float = 0.0  # when its life lock is checked next, and the pause since the last check
    check_pause_s: float = 0.0
    promised: dict[int, int] = field(default_factory=dict)  # request → promise of its answer, the latest ones
    granted: dict[int, GrantedPage | None] = field(default_factory=dict)  # request → its slots; None: given up
    listeners: tuple[SessionListener, ...] = ()

    def move(self, event: SessionEvent) -> None:
        """The only way to change the state. A step that is not in the table is a bug of the caller's: `KeyError`."""
        self.state = SESSION_TRANSITIONS[self.state, event]

    @property
    def attached(self) -> bool:
        """Whether it may get slots."""
        return self.state is SessionState.ATTACHED

    @property
    def operates(self) -> bool:
        """Whether it is our own user's, or root's, who run the command line."""
        return self.uid in (0, os.geteuid())

    def check_operates(self, what: str) -> None:
        """Raises `UsageError` unless it is our own user's, or root's, and on this node."""
        if self.carrier != "lifeline" or not self.operates:
            raise UsageError(
                f"only the server's own user may {what}, over the lifeline: run the command as that user on the "
                "server's node"
            )

    def send(self, message: Message) -> None:
        """Send a message; does nothing if the peer is gone."""
        for listener in self.listeners:
            listener.answered(self, message)
        if self.peer is not None:
            self.peer.send(encode(message))

    def note_promise(self, rid: int, promise: int) -> None:
        """The answer to this request makes a promise: a cancel that crosses it on its way frees the promise."""
        self.promised[rid] = promise
        if len(self.promised) > PROMISES_CANCELLED_MAX:
            del self.promised[next(iter(self.promised))]

    def note_granted(self, rid: int, page: GrantedPage | None) -> None:
        """The answer to this store grants slots, which a cancel that crosses it gives back. None: it was cancelled, and
        may still be waiting for room."""
        self.granted[rid] = page
        if len(self.granted) > PROMISES_CANCELLED_MAX:
            del self.granted[next(iter(self.granted))]

    def listen(self, listener: SessionListener) -> None:
        """Tell `listener` of every later answer from now on, and of the end."""
        if listener not in self.listeners:
            self.listeners += (listener,)

    def unlisten(self, listener: SessionListener) -> None:
        """Tell `listener` nothing more."""
        self.listeners = tuple(each for each in self.listeners if each is not listener)

    def tell_end(self) -> None:
        """It has ended: the listeners let go of it."""
        listeners, self.listeners = self.listeners, ()
        for listener in listeners:
            listener.session_ended(self)

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
