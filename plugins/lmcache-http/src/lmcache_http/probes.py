"""The probes' own way in: they are answered whatever other requests are doing.

Other routes run on a pool of threads, and on one client of the server; a server that hangs lets scrapers occupy both.
Probes take none of it: their routes run on the event loop, one question to the server at a time answers all probes that
wait for it, and it has a thread and a client of its own. They are not counted among the requests that may be answered
at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

from lmcache_http.node import Node
from lmcache_http.readiness import why_not_ready
from lmcache_http.refusals import ASGIApp, Receive, Scope, Send, say

PROBES = frozenset({"/livez", "/healthcheck", "/readyz"})
REQUESTS_MAX = 192  # others at once: fewer than connections, so that one of those always waits and can make room
T = TypeVar("T")


class _Shared(Generic[T]):
    """One question at a time: whoever asks meanwhile gets its answer. For the event loop's thread only."""

    def __init__(self, threads: ThreadPoolExecutor, ask: Callable[[], T]) -> None:
        self._threads, self._ask = threads, ask
        self._running: asyncio.Future[T] | None = None

    async def answer(self) -> T:
        if self._running is None or self._running.done():
            self._running = asyncio.get_running_loop().run_in_executor(self._threads, self._ask)
        return await asyncio.shield(self._running)  # a probe that gives up does not end the others' question


class Probes:
    """What probes ask of the server. Raises `DisconnectedError` if it does not answer in time."""

    def __init__(self, node: Node, require_tiers: str) -> None:
        threads = ThreadPoolExecutor(2, "lmcache-http-probe")  # one for each question
        self._alive = _Shared(threads, node.alive)
        self._why_not = _Shared(threads, lambda: why_not_ready(node.probed_status(), require_tiers))

    async def alive(self) -> float:
        """Seconds of a round trip through the server's loop."""
        return await self._alive.answer()

    async def why_not_ready(self) -> list[str]:
        """Empty: it is ready."""
        return await self._why_not.answer()


class RequestLimit:
    """Refuses other requests while `REQUESTS_MAX` are being answered, so that connections stay for probes."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._answering = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http" or scope["path"] in PROBES:
            await self._app(scope, receive, send)
        elif self._answering >= REQUESTS_MAX:
            await say(429, f"{REQUESTS_MAX} requests are being answered, the limit: try again later")(
                scope, receive, send
            )
        else:
            self._answering += 1
            try:
                await self._app(scope, receive, send)
            finally:
                self._answering -= 1
