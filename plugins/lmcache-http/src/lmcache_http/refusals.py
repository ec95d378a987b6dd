"""The answer to a request that is not served: one field, `detail`, in words, as in the schema."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field

from lmcache_core.errors import (
    CacheError,
    DisconnectedError,
    LimitError,
    PluginError,
    SettingsError,
    TierError,
    UsageError,
)
from lmcache_http.guard import RefusedError

BODY_BYTES_MAX = 256 << 10  # ten times the longest sensible body, some hundred keys
_THROWN_AWAY_MAX = 8 << 20  # of what is too long, …
_THROWN_AWAY_S_MAX = 5.0  # … and for how long
_SAID_MAX = 5  # things that are wrong with one body

# As ASGI has them.
Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]

log = logging.getLogger(__name__)


class Refusal(BaseModel):
    """Why not."""

    detail: str = Field(description="what went wrong, and what to do")


WHY = {
    400: "the server refuses this request",
    401: "no token, or not the right one",
    403: "the token does not allow this, changes are disabled, or the request comes from another origin",
    404: "not found",
    413: f"the body is larger than {BODY_BYTES_MAX:,} bytes",
    421: "this Host is not served",
    422: "the body is not JSON, or does not match the schema",
    429: "a limit of the server is reached: try again later",
    500: "an internal error of the server or of this process; its log has the trace",
    503: "the server does not answer",
}
_STATUSES: tuple[tuple[type[CacheError], int], ...] = (
    (DisconnectedError, 503),
    (TierError, 503),
    (LimitError, 429),
    (UsageError, 400),
    (SettingsError, 400),
    (PluginError, 400),
)


def refusals(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """For a route's `responses`."""
    return {status: {"model": Refusal, "description": WHY[status]} for status in statuses}


def say(status: int, detail: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """The answer."""
    return JSONResponse({"detail": detail}, status, dict(headers or {}))


def add_error_handlers(app: FastAPI) -> None:
    """The answer to any exception. The handlers run on the event loop: probes fail without a thread, too."""

    @app.exception_handler(RefusedError)
    async def refused(request: Request, error: RefusedError) -> JSONResponse:
        return say(error.status, error.detail, {"WWW-Authenticate": "Bearer"} if error.status == 401 else {})

    @app.exception_handler(CacheError)
    async def failed(request: Request, error: CacheError) -> JSONResponse:
        return say(next((status for kind, status in _STATUSES if isinstance(error, kind)), 500), str(error))

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        wrong = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()[:_SAID_MAX]]
        more = len(error.errors()) - len(wrong)
        return say(422, "; ".join(wrong) + (f"; and {more} more" if more else ""))

    @app.exception_handler(Exception)
    async def fault(request: Request, error: Exception) -> JSONResponse:
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return say(500, WHY[500])


class BodyLimit:
    """Refuses bodies that are too large before they are in memory, with or without a Content-Length."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        body: list[Message] | None = []
        if int(headers.get(b"content-length", b"0")) > BODY_BYTES_MAX:
            body = None
        elif b"transfer-encoding" in headers:  # it says nothing of its length
            body = await _read(receive)
        if body is None:
            await _refuse(receive, send)
        else:
            await self._app(scope, _again(body, receive), send)


async def _read(receive: Receive) -> list[Message] | None:
    """A body to its end; None for one that is too long."""
    messages, left = [], BODY_BYTES_MAX
    while True:
        message = await receive()
        messages.append(message)
        left -= len(message.get("body", b""))
        if left < 0:
            return None
        if not message.get("more_body"):
            return messages


def _again(messages: list[Message], receive: Receive) -> Receive:
    """Receive what was read, and then the rest."""
    waiting = iter(messages)

    async def received() -> Message:
        message = next(waiting, None)
        return await receive() if message is None else message

    return received


async def _refuse(receive: Receive, send: Send) -> None:
    """Answer at once. A client that is still sending could not read that from a connection that is closed on it: what
    it sends is thrown away, within bounds."""
    detail = JSONResponse({"detail": WHY[413]})
    headers = [*detail.raw_headers, (b"connection", b"close")]
    await send({"type": "http.response.start", "status": 413, "headers": headers})
    await send({"type": "http.response.body", "body": detail.body, "more_body": True})
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_THROWN_AWAY_S_MAX):
            await _throw_away(receive)
    await send({"type": "http.response.body", "body": b""})


async def _throw_away(receive: Receive) -> None:
    left = _THROWN_AWAY_MAX
    while left > 0:
        message = await receive()
        left -= len(message.get("body", b""))
        if not message.get("more_body"):
            return
