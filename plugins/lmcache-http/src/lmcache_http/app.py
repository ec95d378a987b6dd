"""The routes. Each says what right it takes; all else is asked of the server."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from fastapi import Depends, FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from pydantic import BaseModel, ConfigDict, Field

from lmcache_core import __version__
from lmcache_core.errors import CacheError, DisconnectedError, LimitError, UsageError
from lmcache_core.limits import EXPLAIN_KEYS_MAX, PIN_TTL_S
from lmcache_core.observe.exposition import text_of
from lmcache_core.pool.layout import Layout
from lmcache_http.guard import Guard, RefusedError, Right
from lmcache_http.node import Node
from lmcache_http.readiness import why_not_ready
from lmcache_http.settings import HttpSettings

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_ID = re.compile(r"(0x)?[0-9a-fA-F]{1,16}")
_KEY = re.compile(r"[0-9a-fA-F]{64}")
Plain = dict[str, Any]


class Body(BaseModel):
    """What is sent; unknown names are refused."""

    model_config = ConfigDict(extra="forbid")


class ClearBody(Body):
    """What to clear."""

    namespace: str | None = Field(default=None, description="its id, 16 hexadecimal digits; none: everything")
    tiers: bool = Field(default=False, description="on the tiers, too")


class KeysBody(Body):
    """Keys of a namespace, which is named by its id and the layout of its objects."""

    namespace: str = Field(description="its id, 16 hexadecimal digits")
    keys: list[str] = Field(max_length=EXPLAIN_KEYS_MAX, description="64 hexadecimal digits each")
    dtype: str
    shape: list[int]
    memory_format: str = ""

    def layout(self) -> Layout:
        return Layout(self.dtype, tuple(self.shape), self.memory_format)

    def key_bytes(self) -> list[bytes]:
        for key in self.keys:
            if not _KEY.fullmatch(key):
                raise UsageError(f"{key[:80]!r} is no key: give its 64 hexadecimal digits")
        return [bytes.fromhex(key) for key in self.keys]


class PinBody(KeysBody):
    """What to keep, and for how long."""

    ttl_s: float = Field(default=PIN_TTL_S, gt=0, allow_inf_nan=False)


class TierBody(Body):
    """What to do with a tier. Settings as in the file, for add and reconfigure."""

    action: str = Field(pattern="^(add|drain|remove|reconfigure)$")
    settings: dict[str, Any] = {}


def make_app(node: Node, settings: HttpSettings, guard: Guard) -> FastAPI:
    """The application. It asks nobody but the server, and its pages ask nobody at all."""
    app = FastAPI(title="lmcache-core", version=__version__, docs_url=None, redoc_url=None)

    def needs(right: Right) -> Any:
        def check(request: Request) -> None:
            guard.check(request.headers, right)

        return Depends(check)

    @app.exception_handler(RefusedError)
    def refused(request: Request, error: RefusedError) -> JSONResponse:
        headers = {"WWW-Authenticate": "Bearer"} if error.status == 401 else {}
        return _said(error.status, error.detail, headers)

    @app.exception_handler(CacheError)
    def failed(request: Request, error: CacheError) -> JSONResponse:
        statuses: tuple[tuple[type[CacheError], int], ...] = (
            (DisconnectedError, 503),
            (LimitError, 429),
            (UsageError, 400),
        )
        return _said(next((status for kind, status in statuses if isinstance(error, kind)), 500), str(error))

    _probes(app, node, settings, needs)
    _reading(app, node, needs)
    _changing(app, node, needs)
    return app


def _said(status: int, detail: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    return JSONResponse({"detail": detail}, status, dict(headers or {}))


def _probes(app: FastAPI, node: Node, settings: HttpSettings, needs: Callable[[Right], Any]) -> None:
    """For orchestrators: no token, and nothing to be learnt."""
    none = [needs(Right.NONE)]

    @app.get("/livez", dependencies=none)
    @app.get("/healthcheck", dependencies=none)
    def livez() -> Plain:
        """200: the server's loop has just turned. 503: it did not within a second."""
        return {"status": "ok", "round_trip_s": round(node.alive(), 6)}

    @app.get("/readyz", dependencies=none)
    def readyz() -> JSONResponse:
        """200: it lives, all of the pool is populated, and the tiers are as `require_tiers` wants them."""
        node.alive()
        reasons = why_not_ready(node.status(), settings.require_tiers)
        return JSONResponse({"status": "not ready" if reasons else "ok", "why": reasons}, 503 if reasons else 200)


def _reading(app: FastAPI, node: Node, needs: Callable[[Right], Any]) -> None:
    read = [needs(Right.READ)]

    @app.get("/", dependencies=read, include_in_schema=False)
    @app.get("/docs", dependencies=read, include_in_schema=False)
    def docs() -> HTMLResponse:
        return HTMLResponse(_page(app, node.name))

    @app.get("/status", dependencies=read)
    def status() -> Plain:
        """As `lmcache-core status --json`, a second old at most."""
        return dict(node.status())

    @app.get("/metrics", dependencies=read)
    def metrics() -> Response:
        """As `lmcache-core metrics`, a second old at most."""
        return PlainTextResponse(text_of(node.status()), media_type=METRICS_TYPE)

    @app.get("/config", dependencies=read)
    def config() -> Plain:
        """The server's settings; secrets are hidden."""
        return node.client.config()

    @app.get("/tiers", dependencies=read)
    def tiers() -> list[Plain]:
        """The tiers in their order, with their settings; secrets are hidden."""
        return node.client.tiers_list()

    @app.post("/explain", dependencies=read)
    def explain(body: KeysBody) -> list[Plain]:
        """Where keys are, or why they are not there: in the pool and on every tier."""
        told = node.client.explain_by_id(_id(body.namespace), body.layout(), body.key_bytes())
        return [{**asdict(each), "key": each.key.hex()} for each in told]


def _changing(app: FastAPI, node: Node, needs: Callable[[Right], Any]) -> None:
    change = [needs(Right.CHANGE)]

    @app.post("/clear", dependencies=change)
    @app.post("/clear-cache", dependencies=change)
    def clear(body: ClearBody = ClearBody()) -> Plain:  # noqa: B008 - not changed
        """Forget a namespace, or everything."""
        namespace = None if body.namespace is None else _id(body.namespace)
        found = node.client.clear_by_id(namespace, tiers=body.tiers)
        return {"objects": found.objects, "nbytes": found.nbytes, "doomed": found.doomed}

    @app.post("/pin", dependencies=change)
    def pin(body: PinBody) -> list[str]:
        """Keep objects from being evicted for a while. A word for each key."""
        keys = body.key_bytes()
        statuses = node.client.pin_by_id(_id(body.namespace), body.layout(), keys, ttl_s=body.ttl_s)
        return [status.name for status in statuses]

    @app.post("/tiers/{name}", dependencies=change)
    def change_tier(name: str, body: TierBody) -> Plain:
        """Add a tier, or drain, remove or reconfigure one."""
        client = node.client
        if body.action in ("add", "reconfigure"):
            (client.tiers_add if body.action == "add" else client.tiers_reconfigure)(name, body.settings)
        else:
            (client.tiers_drain if body.action == "drain" else client.tiers_remove)(name)
        return {"tier": name, "done": body.action}


def _id(text: str) -> int:
    if not _ID.fullmatch(text):
        raise UsageError(f"{text[:80]!r} is no namespace's id: give its 16 hexadecimal digits")
    return int(text, 16)


def _page(app: FastAPI, server: str) -> str:
    """What there is, without a script and without a request to anywhere."""
    rows = []
    for path, methods in app.openapi()["paths"].items():
        for method, told in methods.items():
            about = html.escape(told.get("description", "").split("\n")[0])
            rows.append(f"<tr><td><code>{method.upper()} {html.escape(path)}</code></td><td>{about}</td></tr>")
    title = f"lmcache-core {html.escape(server)}"
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title>"
        "<style>body{font:16px/1.5 system-ui;max-width:60em;margin:2em auto;padding:0 1em;color-scheme:light dark}"
        f"td{{padding:.2em 1em .2em 0}}</style><h1>{title}</h1><table>{''.join(rows)}</table>"
        "<p>The schema: <a href=/openapi.json>openapi.json</a></p></html>"
    )
