"""The routes. Each says what right it needs; everything else comes from the server."""

from __future__ import annotations

import html
import re
from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from fastapi.security import HTTPBearer
from pydantic import BaseModel, ConfigDict, Field, field_validator

from lmcache_core import __version__
from lmcache_core.errors import UsageError
from lmcache_core.limits import EXPLAIN_KEYS_MAX, PIN_TTL_S, TENANT_NAMESPACES_MAX
from lmcache_core.observe.exposition import text_of
from lmcache_core.observe.troubles import with_troubles
from lmcache_core.pool.layout import DTYPE_BYTES, Layout
from lmcache_core.protocol.codec import encode
from lmcache_http.events import TYPE as EVENTS_TYPE
from lmcache_http.events import EventStreams
from lmcache_http.guard import Guard, RefusedError, Right
from lmcache_http.node import Node
from lmcache_http.readiness import why_not_ready
from lmcache_http.refusals import BodyLimit, Refusal, answer_in_words, refusals
from lmcache_http.settings import HttpSettings
from lmcache_http.ui import add_page

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# In the schema, but not enforced by it: our own messages are better.
ID, KEY = "^(0x)?[0-9a-fA-F]{1,16}$", "^[0-9a-fA-F]{64}$"
_ID, _KEY = re.compile(ID), re.compile(KEY)
SHAPE_MAX = 16
STORES_MAX = 64
Bytes = Annotated[int, Field(ge=0, le=1 << 60, strict=True)]
Plain = dict[str, Any]
PROBED = refusals(403, 421, 500, 503)
READ = refusals(401, 403, 421, 429, 500, 503)
ASKED = refusals(400, 401, 403, 413, 421, 422, 429, 500, 503)


def _pattern_or_none(schema: dict[str, Any]) -> None:
    schema["anyOf"] = [{"type": "string", "pattern": ID}, {"type": "null"}]


class Body(BaseModel):
    """A request body; unknown names are refused."""

    model_config = ConfigDict(extra="forbid")


class ClearBody(Body):
    """What to clear."""

    namespace: str | None = Field(
        default=None, description="its id, 16 hexadecimal digits; none: everything", json_schema_extra=_pattern_or_none
    )
    tiers: bool = Field(default=False, description="on the tiers, too")


class KeysBody(Body):
    """Keys of a namespace, which is named by its id and the layout of its objects."""

    namespace: str = Field(description="its id, 16 hexadecimal digits", json_schema_extra={"pattern": ID})
    keys: list[Annotated[str, Field(json_schema_extra={"pattern": KEY})]] = Field(
        max_length=EXPLAIN_KEYS_MAX, description="64 hexadecimal digits each"
    )
    dtype: str = Field(description="of the objects, as torch calls it", json_schema_extra={"enum": [*DTYPE_BYTES]})
    shape: list[Annotated[int, Field(ge=1)]] = Field(min_length=1, max_length=SHAPE_MAX, description="of an object")
    memory_format: str = Field(default="", max_length=SHAPE_MAX, description="its axes, a letter each, or nothing")

    def layout(self) -> Layout:
        return Layout(self.dtype, tuple(self.shape), self.memory_format)

    def key_bytes(self) -> list[bytes]:
        for key in self.keys:
            if not _KEY.fullmatch(key):
                raise UsageError(f"{key[:80]!r} is not a key: give its 64 hexadecimal digits")
        return [bytes.fromhex(key) for key in self.keys]


class PinBody(KeysBody):
    """What to keep, and for how long."""

    ttl_s: float = Field(default=PIN_TTL_S, gt=0, allow_inf_nan=False)


class Readiness(BaseModel):
    """Whether it is ready, and why not."""

    status: str
    why: list[str]


class Rights(BaseModel):
    """What the token of the request allows, or a request without one."""

    read: bool
    change: bool
    why_not: dict[str, str] = Field(description="by right, where it is not given")


class TierBody(Body):
    """What to do with a tier. Settings as in the file, for add and reconfigure."""

    action: str = Field(pattern="^(add|drain|remove|reconfigure)$")
    settings: dict[str, Any] = {}

    @field_validator("settings")
    @classmethod
    def _sendable(cls, settings: dict[str, Any]) -> dict[str, Any]:
        _can_be_sent(settings)
        return settings


class StoreQuota(Body):
    """The quota in one store. Fields that are left out do not change."""

    reserved_bytes: Bytes | None = Field(default=None, description="bytes that no other tenant can take")
    limit_bytes: Bytes | None = Field(default=None, description="what the tenant never exceeds")


class QuotaBody(Body):
    """A tenant's quotas. Stores that are not named stay as they are."""

    namespaces: list[Annotated[str, Field(json_schema_extra={"pattern": ID})]] | None = Field(
        default=None,
        max_length=TENANT_NAMESPACES_MAX,
        description="namespace ids; required for a new tenant; replaces those of an old one",
    )
    stores: dict[str, StoreQuota] = Field(
        default={}, max_length=STORES_MAX, description="a table for l1, and for each tier, by name"
    )

    @field_validator("stores")
    @classmethod
    def _named(cls, stores: dict[str, StoreQuota]) -> dict[str, StoreQuota]:
        _can_be_sent(dict.fromkeys(stores))
        return stores


def _can_be_sent(values: dict[str, Any]) -> None:
    try:
        encode(values)
    except (ValueError, OverflowError, RecursionError) as error:
        raise UsageError(f"the server does not accept these values: {error}") from error


def make_app(node: Node, settings: HttpSettings, guard: Guard) -> FastAPI:
    """The application. It talks only to the server, and its pages only to it."""
    app = FastAPI(title="lmcache-core", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(BodyLimit)
    token = Depends(HTTPBearer(auto_error=False, description="of token_file, or to read of read_token_file"))

    def needs(right: Right) -> Any:
        def check(request: Request) -> None:
            guard.check(request.headers, right)

        def check_token(request: Request, said: Any = token) -> None:  # for the schema to name it
            del said
            guard.check(request.headers, right)

        return Depends(check if right is Right.NONE else check_token)

    answer_in_words(app)
    add_page(app, needs(Right.NONE))
    _probes(app, node, settings, needs)
    _rights(app, guard, needs)
    _reading(app, node, needs)
    _changing(app, node, needs)
    return app


def _probes(app: FastAPI, node: Node, settings: HttpSettings, needs: Callable[[Right], Any]) -> None:
    """For orchestrators: needs no token, and reveals nothing."""
    none = [needs(Right.NONE)]

    @app.get("/livez", dependencies=none, responses=PROBED)
    @app.get("/healthcheck", dependencies=none, responses=PROBED)
    def livez() -> Plain:
        """200: the server's loop has just turned. 503: it did not within a second."""
        return {"status": "ok", "round_trip_s": round(node.alive(), 6)}

    @app.get("/readyz", dependencies=none, responses={**PROBED, 503: {"model": Readiness | Refusal}})
    def readyz() -> Any:
        """200: it lives, the whole pool is populated, and the tiers that `require_tiers` asks for are up."""
        node.alive()
        reasons = why_not_ready(node.status(), settings.require_tiers)
        said = Readiness(status="not ready" if reasons else "ok", why=reasons)
        return JSONResponse(said.model_dump(), 503 if reasons else 200)


def _rights(app: FastAPI, guard: Guard, needs: Callable[[Right], Any]) -> None:
    @app.get("/rights", dependencies=[needs(Right.NONE)], responses=refusals(403, 421, 500))
    def rights(request: Request) -> Rights:
        """Whether the token of the request allows reading and changes, and why not."""
        refused = guard.refusals(request.headers)
        why_not = {right.value: why for right, why in refused.items()}
        return Rights(read=Right.READ not in refused, change=Right.CHANGE not in refused, why_not=why_not)


def _reading(app: FastAPI, node: Node, needs: Callable[[Right], Any]) -> None:
    read = [needs(Right.READ)]

    @app.get("/", dependencies=read, include_in_schema=False)
    @app.get("/docs", dependencies=read, include_in_schema=False)
    def docs() -> HTMLResponse:
        return HTMLResponse(_page(app, node.name))

    @app.get("/openapi.json", dependencies=read, include_in_schema=False)
    def schema() -> Plain:
        return app.openapi()

    @app.get("/status", dependencies=read, responses=READ)
    def status() -> Plain:
        """As `lmcache-core status --json`, a second old at most."""
        return with_troubles(node.status())

    @app.get("/metrics", dependencies=read, response_class=PlainTextResponse, responses=READ)
    def metrics() -> Response:
        """As `lmcache-core metrics`, a second old at most."""
        return PlainTextResponse(text_of(node.status()), media_type=METRICS_TYPE)

    @app.get("/config", dependencies=read, responses=READ)
    def config() -> Plain:
        """The server's settings; secrets are hidden."""
        return node.client.config()

    @app.get("/tiers", dependencies=read, responses=READ)
    def tiers() -> list[Plain]:
        """The tiers in their order, with their settings; secrets are hidden."""
        return node.client.tiers_list()

    @app.get("/quota", dependencies=read, responses=READ)
    def quotas() -> list[Plain]:
        """The tenants with a quota: what they use, reserve and may have in each store; and all other namespaces
        together."""
        return node.client.quotas()

    @app.get("/quota/{tenant}", dependencies=read, responses={**READ, **refusals(404, 422)})
    def quota(tenant: str) -> Plain:
        """One tenant's."""
        for row in node.client.quotas():
            if row["tenant"] == tenant:
                return row
        raise RefusedError(404, f"there is no tenant {tenant[:80]!r}")

    streams = EventStreams(node.server_uid)

    @app.get(
        "/events",
        dependencies=read,
        response_class=StreamingResponse,
        responses={200: {"content": {EVENTS_TYPE: {}}}, **READ, **refusals(404)},
    )
    def events() -> StreamingResponse:
        """The server's events from now on, as server-sent events. A slow reader loses some, and is told how many."""
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(streams.open(node.client.config()), media_type=EVENTS_TYPE, headers=headers)

    @app.post("/explain", dependencies=read, responses=ASKED)
    def explain(body: KeysBody) -> list[Plain]:
        """Where keys are, or why they are not there: in the pool and on every tier."""
        told = node.client.explain_by_id(_id(body.namespace), body.layout(), body.key_bytes())
        return [{**asdict(each), "key": each.key.hex()} for each in told]


def _changing(app: FastAPI, node: Node, needs: Callable[[Right], Any]) -> None:
    change = [needs(Right.CHANGE)]

    @app.post("/clear", dependencies=change, responses=ASKED)
    @app.post("/clear-cache", dependencies=change, responses=ASKED)
    def clear(body: ClearBody = ClearBody()) -> Plain:  # noqa: B008 - not changed
        """Forget a namespace, or everything."""
        namespace = None if body.namespace is None else _id(body.namespace)
        found = node.client.clear_by_id(namespace, tiers=body.tiers)
        node.changed()
        return {"objects": found.objects, "nbytes": found.nbytes, "doomed": found.doomed}

    @app.post("/pin", dependencies=change, responses=ASKED)
    def pin(body: PinBody) -> list[str]:
        """Keep objects from being evicted for a while. Returns a word for each key."""
        keys = body.key_bytes()
        statuses = node.client.pin_by_id(_id(body.namespace), body.layout(), keys, ttl_s=body.ttl_s)
        node.changed()
        return [status.name for status in statuses]

    @app.put("/quota/{tenant}", dependencies=change, responses=ASKED)
    def set_quota(tenant: str, body: QuotaBody) -> Plain:
        """Set or change a tenant's quotas: they are saved now, and enforced as fast as objects can leave."""
        ids = None if body.namespaces is None else [_id(each) for each in body.namespaces]
        stores = {store: each.model_dump() for store, each in body.stores.items()}
        node.client.quota_set(tenant, stores, ids)
        node.changed()
        return {"tenant": tenant, "done": "set"}

    @app.delete("/quota/{tenant}", dependencies=change, responses=ASKED)
    def remove_quota(tenant: str) -> Plain:
        """Remove a tenant's quotas. Its objects stay."""
        node.client.quota_remove(tenant)
        node.changed()
        return {"tenant": tenant, "done": "removed"}

    @app.post("/tiers/{name}", dependencies=change, responses=ASKED)
    def change_tier(name: str, body: TierBody) -> Plain:
        """Add a tier, or drain, remove or reconfigure one."""
        client = node.client
        if body.action in ("add", "reconfigure"):
            (client.tiers_add if body.action == "add" else client.tiers_reconfigure)(name, body.settings)
        else:
            (client.tiers_drain if body.action == "drain" else client.tiers_remove)(name)
        node.changed()
        return {"tier": name, "done": body.action}

    @app.post("/companions/{name}/{operation}", dependencies=change, responses=ASKED)
    def operate(name: str, operation: str, arguments: dict[str, Any]) -> Plain:
        """Call an operation of a companion, with its arguments: `l0/switch`, `{"enabled": true}`."""
        _can_be_sent(arguments)
        result = node.client.operate(name, operation, **arguments)
        node.changed()
        return result


def _id(text: str) -> int:
    if not _ID.fullmatch(text):
        raise UsageError(f"{text[:80]!r} is not a namespace id: give its 16 hexadecimal digits")
    return int(text, 16)


def _page(app: FastAPI, server: str) -> str:
    """An index of the routes, without scripts or external requests."""
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
        "<p>For people: <a href=/ui>ui</a>. The schema: <a href=/openapi.json>openapi.json</a></p></html>"
    )
