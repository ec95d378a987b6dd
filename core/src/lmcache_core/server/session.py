"""One connected client: its peer, its namespaces, its row in the worker table."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

from lmcache_core.pool.tables import NO_ROW
from lmcache_core.protocol.codec import encode
from lmcache_core.protocol.messages import Message


class Peer(ABC):
    """The far end of a carrier. `send` never blocks: who does not read is dropped once the queue is full."""

    carrier: str
    uid: int
    pid: int  # 0 where it is not known, as across pid namespaces
    session: Session | None = None
    can_pass_fd: bool = False

    @abstractmethod
    def send(self, frame: bytes, fd: int = -1) -> None:
        """Queue a frame; with a descriptor where the carrier can pass one."""

    @abstractmethod
    def close(self) -> None:
        """Drop the connection. Idempotent; does not end the session."""


@dataclass(eq=False)
class Session:
    """What the server knows of a client. The kernel holds its leases under `id`."""

    id: int
    peer: Peer | None  # None: the connection ended and the client's death is not proven
    client_id: bytes
    name: str
    uid: int
    pid: int
    carrier: str
    row: int = NO_ROW  # in the pool's worker table
    nonce: int = 0
    attached: bool = False
    namespaces: dict[int, int] = field(default_factory=dict)  # namespace id → layout id
    pidfd: int = -1
    heard_at_s: float = 0.0
    check_at_s: float = 0.0  # when its life lock is looked at next, and how long after the last time
    check_pause_s: float = 0.0

    def send(self, message: Message) -> None:
        """Answer, or tell; nothing happens where nobody listens any more."""
        if self.peer is not None:
            self.peer.send(encode(message))

    def describe(self) -> dict[str, object]:
        """For `status`."""
        return {
            "id": self.id,
            "name": self.name,
            "carrier": self.carrier,
            "pid": self.pid,
            "uid": self.uid,
            "attached": self.attached,
            "connected": self.peer is not None,
        }
