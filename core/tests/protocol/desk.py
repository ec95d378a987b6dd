"""A whole server whose loop does not run, and peers without sockets: every frame is served here and now."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

from lmcache_core.limits import FRAME_BYTES_MAX
from lmcache_core.pool.layout import Layout
from lmcache_core.pool.lifelock import LifeLock
from lmcache_core.pool.segment import Segment
from lmcache_core.protocol import messages as m
from lmcache_core.protocol.codec import decode_reply, encode
from lmcache_core.server.peers.session import Peer
from lmcache_core.server.server import Server
from lmcache_testing.embedded import server_settings

LAYOUT = Layout("uint8", (4096,))
NAMESPACE = 77

Answer = TypeVar("Answer", bound=m.Message)


class Mouth(Peer):
    """A peer without a socket: what it is sent is kept."""

    carrier = "lifeline"
    uid = os.geteuid()
    pid = 0
    origin = "a test"

    def __init__(self) -> None:
        self.replies: list[m.Reply] = []
        self.closed = False
        self.life_lock: LifeLock | None = None  # close it, where there are many peers

    def send(self, frame: bytes, fd: int = -1) -> None:
        assert len(frame) <= FRAME_BYTES_MAX
        self.replies.append(decode_reply(frame))

    def close(self) -> None:
        self.closed = True


class Desk:
    """A whole server whose loop does not run: every frame is served here and now."""

    step_s = 0.01  # of the loop's clock, with each message

    def __init__(self, tmp_path: Path, stack: ExitStack, **settings: object) -> None:
        self.server = Server(server_settings(tmp_path, l1={"size_bytes": 4 << 20}, **settings))
        stack.callback(self.server._close)
        assert self.server.parts.populator.wait(60)
        self.server.parts.kernel.add_memory(self.server.parts.segment.info.data_bytes)
        self.segment = stack.enter_context(
            Segment.attach_fd(self.server.parts.segment.worker_fd(), self.server.parts.segment.info)
        )
        self.stack = stack

    def turn(self) -> None:
        """A turn of the loop, without its messages."""
        self.server.parts.loop._run_calls()
        self.server._tick()

    def say(self, peer: Mouth, request: m.Message) -> m.Reply | None:
        """The reply to this request; None where it closed the session."""
        self.server.parts.clock.now += self.step_s
        self.turn()
        before = len(peer.replies)
        self.server.dispatch.on_frame(peer, memoryview(encode(request)))
        answers = [reply for reply in peer.replies[before:] if not isinstance(reply, m.LeaseExpiredNotice)]
        assert len(answers) == 1, (request, answers)
        assert answers[0].rid == getattr(request, "rid", 0)
        return answers[0]

    def ask(self, peer: Mouth, request: m.Message, kind: type[Answer]) -> Answer:
        """The reply, which has to be of this kind."""
        reply = self.say(peer, request)
        assert isinstance(reply, kind), reply
        return reply

    def peer(self, *, attached: bool) -> Mouth:
        peer = Mouth()
        welcome = self.say(
            peer,
            m.Hello(
                1,
                m.PROTOCOL_VERSION_MIN,
                m.PROTOCOL_VERSION_MAX,
                os.urandom(16),
                "fuzz",
                0,
                ["maps_pool"] if attached else [],
            ),
        )
        assert isinstance(welcome, m.Welcome)
        if attached:
            lock = LifeLock.acquire(self.segment, welcome.row)
            self.stack.callback(lock.close)
            peer.life_lock = lock
            attach = m.Attach(2, lock.row, self.segment.shown(lock.row))
            assert isinstance(self.say(peer, attach), m.Attached)
        layout = m.RegisterLayout(3, NAMESPACE, LAYOUT.dtype, list(LAYOUT.shape), "", LAYOUT.fingerprint)
        assert isinstance(self.say(peer, layout), m.LayoutRegistered)
        return peer
