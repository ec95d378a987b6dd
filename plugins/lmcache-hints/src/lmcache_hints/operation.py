"""The operation `hints`: what a server does with the envelopes that it is sent."""

from __future__ import annotations

from typing import Any

from lmcache_core.server.operation import OperationContext, ServerOperation
from lmcache_hints.envelope import HintsReply, KvHintsEnvelope
from lmcache_hints.executor import Executor
from lmcache_hints.node import Node
from lmcache_hints.settings import HintsSettings

OPERATION = "hints"


class HintsOperation(ServerOperation):
    """Built by the server, and called over the lifeline or HTTP."""

    request = KvHintsEnvelope
    reply = HintsReply

    def __init__(self, settings: HintsSettings, context: OperationContext) -> None:
        self._node = Node(context)
        self._executor = Executor(settings, self._node, context.clock.read)

    def handle(self, request: KvHintsEnvelope) -> HintsReply:
        """Carry it out."""
        return self._executor.take(request)

    def status(self) -> dict[str, Any]:
        """Outcomes, and what hints keep in memory."""
        return self._executor.status()

    def close(self) -> None:
        """The server stops."""
        self._executor.close()
        self._node.close()
