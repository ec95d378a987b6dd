"""Engines without our library."""

from __future__ import annotations

import socket

import msgspec

from lmcache_copier import messages as m
from lmcache_copier.channel import Incoming, send

from .copier_nodes import Node


class Stranger:
    """An engine without our library."""

    def __init__(self, node: Node) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(60)
        self.sock.connect(str(node.path))
        self._incoming: Incoming[m.CopierReply] = Incoming(self.sock, m.CopierReply)
        self._waiting: list[m.CopierReply] = []
        self._numbers: list[int] = []  # what it has registered
        assert isinstance(self.hear(), m.CopierWelcome)

    def __enter__(self) -> Stranger:
        return self

    def __exit__(self, *_: object) -> None:
        self._incoming.close()
        self.sock.close()

    def hear(self) -> m.CopierReply | None:
        """Its next answer; None: it has hung up."""
        while not self._waiting:
            try:
                if not self._incoming.receive():
                    return None
            except ConnectionResetError:
                return None
            self._waiting += self._incoming.messages()
        return self._waiting.pop(0)

    def forget(self) -> None:
        """Unregister all that it has registered."""
        for number in self._numbers:
            assert isinstance(self.ask(m.UnregisterMemory(1, number)), m.CopierDone)
        self._numbers.clear()

    def ask(self, message: msgspec.Struct) -> m.CopierReply | None:
        send(self.sock, message)
        return self.heard()

    def heard(self) -> m.CopierReply | None:
        """The same, and remembers what is registered."""
        reply = self.hear()
        if isinstance(reply, m.MemoryRegistered):
            self._numbers.append(reply.registration)
        return reply
