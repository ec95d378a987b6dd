"""The routes. Each says what right it needs; everything else comes from the server."""

from __future__ import annotations

import html
import re
from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Query, Request
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from fastapi.security import HTTPBearer
from pydantic import BaseModel, ConfigDict, Field, SecretStr

from lmcache_core import __version__
from lmcache_core.errors import UsageError
from lmcache_core.limits import (
    CHUNK_TOKENS_MAX,
    EXPLAIN_KEYS_MAX,
    LABEL_CHARS_MAX,
    PIN_TTL_S,
    TENANT_NAMESPACES_MAX,
)
from lmcache_core.observe.troubles import with_troubles
from lmcache_core.pool.layout import DTYPE_BYTES, Layout
from lmcache_core.protocol import ranges
from lmcache_core.tokens.namespace import Namespace
from lmcache_http.events import TYPE as EVENTS_TYPE
from lmcache_http.events import EventStreams
from lmcache_http.explaining import ID, Known, id_of, known_layout, named, prompt_keys
from lmcache_http.guard import Guard, RefusedError, Right
from lmcache_http.node import Node
from lmcache_http.probes import Probes, RequestLimit
from lmcache_http.ranges import within
from lmcache_http.refusals import BodyLimit, Refusal, add_error_handlers, refusals
from lmcache_http.settings import HttpSettings
from lmcache_http.ui import add_page

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# In the schema, but not enforced by it: our own messages are better.
KEY = "^[0-9a-fA-F]{64}$"
_KEY = re.compile(KEY)
STORES_MAX = 64
Bytes = Annotated[int, within(ranges.I63, strict=True)]
Name = Annotated[str, within(ranges.Name)]
TierName = Annotated[str, within(ranges.TierName)]
Values = Annotated[dict[Name, Any], within(ranges.Values)]
Plain = dict[str, Any]
PROBED = refusals(403, 421, 500, 503)
READ = refusals(401, 403, 421, 429, 500, 503)
ASKED = refusals(400, 401, 403, 413, 421, 422, 429, 500, 503)


def _pattern_or_none(schema: dict[str, Any]) -> None:
    schema["anyOf"] = [{"type": "string", "pattern": ID}, {"type": "null"}]


def _dtype_or_none(schema: dict[str, Any]) -> None:
    schema["anyOf"] = [{"type": "string", "enum": [*DTYPE_BYTES]}, {"type": "null"}]


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
    """Keys of a namespace. The layout of its objects is needed only if the server does not know the namespace."""

    namespace: str = Field(
        min_length=1, max_length=LABEL_CHARS_MAX, description="its label, or its id: 16 hexadecimal digits"
    )
    keys: list[Annotated[str, Field(json_schema_extra={"pattern": KEY})]] = Field(
        default=[], max_length=EXPLAIN_KEYS_MAX, description="64 hexadecimal digits each"
    )
    dtype: str | None = Field(
        default=None, description="of the objects, as torch calls it", json_schema_extra=_dtype_or_none
    )
    shape: list[Annotated[int, within(ranges.Dimension)]] = within(ranges.Shape, default=[], description="of an object")
    memory_format: str = within(ranges.Axes, default="", description="its axes, a letter each, or nothing")

    def space(self, known: Known) -> tuple[int, Layout]:
        """The id of the namespace, and its layout."""
        namespace = named(self.namespace, known)
        if self.dtype is None:
            return namespace, known_layout(namespace, known)
        return namespace, Layout(self.dtype, tuple(self.shape), self.memory_format)

    def key_bytes(self) -> list[bytes]:
        for key in self.keys:
            if not _KEY.fullmatch(key):
                raise UsageError(f"{key[:80]!r} is not a key: give its 64 hexadecimal digits")
        return [bytes.fromhex(key) for key in self.keys]


class PinBody(KeysBody):
    """What to keep, and for how long."""

    ttl_s: float = within(ranges.Seconds, default=PIN_TTL_S, ge=None, gt=0, allow_inf_nan=False)


class ExplainBody(KeysBody):
    """Keys, or the tokens of a prompt together with what its namespace is made of."""

    tokens: list[Annotated[int, within(ranges.U32, strict=True)]] | None = Field(
        default=None, description="instead of keys: they are derived from these"
    )
    chunk_tokens: Annotated[int, Field(strict=True, ge=1, le=CHUNK_TOKENS_MAX)] | None = Field(
        default=None, description="tokens that make one key; without it the server's chunk_tokens"
    )
    model: str = Field(default="", description="the model's name, as the engine passes it")
    weights_version: str = Field(default="", description="the version of its weights, if the engine passes one")
    kv_shard: str = Field(default="0/1", pattern="^[0-9]{1,5}/[0-9]{1,5}$", description="which part of the KV")
    tenant_salt: SecretStr = Field(default=SecretStr(""), description="the tenant's salt, if it has one")
    format: str = Field(default="", description="the engine's name for the format of an opaque layout")

    def keys_in(self, namespace: int, layout: Layout, chunk_tokens: int) -> list[bytes]:
        """The keys that are asked about."""
        if bool(self.keys) == bool(self.tokens):
            raise UsageError("give either keys or token ids")
        if not self.tokens:
            return self.key_bytes()
        if not self.model:
            raise UsageError("the keys of tokens depend on what their namespace is made of: give its model, too")
        part, parts = map(int, self.kv_shard.split("/"))
        salt = self.tenant_salt.get_secret_value()
        space = Namespace(self.model, layout, self.weights_version, (part, parts), salt, self.format)
        return prompt_keys(self.tokens, space, namespace, self.chunk_tokens or chunk_tokens)


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
    settings: Values = {}


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
    stores: dict[TierName, StoreQuota] = Field(
        default={}, max_length=STORES_MAX, description="a table for l1, and for each tier, by name"
    )


def make_app(node: Node, settings: HttpSettings, guard: Guard, streams: EventStreams) -> FastAPI:
    """The application. It talks only to the server, and its pages only to it."""
    app = FastAPI(title="lmcache-core", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(BodyLimit)
    app.add_middleware(RequestLimit)
    token = Depends(HTTPBearer(auto_error=False, description="of token_file, or to read of read_token_file"))

    def needs(right: Right) -> Any:
        async def check(request: Request) -> None:  # on the event loop, as probes must not wait for a thread
            guard.check(request.headers, right)

        def check_token(request: Request, scheme: Any = token) -> None:  # for the schema to name it
            del scheme
            guard.check(request.headers, right)

        return Depends(check if right is Right.NONE else check_token)

    add_error_handlers(app)
    add_page(app, needs(Right.NONE))
    _probes(app, node, settings, needs)
    _rights(app, guard, needs)
    _reading(app, node, streams, needs)
    _changing(app, node, needs)
    return app


def _probes(app: FastAPI, node: Node, settings: HttpSettings, needs: Callable[[Right], Any]) -> None:
    """For orchestrators: needs no token, and reveals nothing."""
    none = [needs(Right.NONE)]
    probes = Probes(node, settings.require_tiers)

    @app.head("/livez", dependencies=none, include_in_schema=False)
    @app.head("/healthcheck", dependencies=none, include_in_schema=False)
    @app.get("/livez", dependencies=none, responses=PROBED)
    @app.get("/healthcheck", dependencies=none, responses=PROBED)
    async def livez() -> Plain:
        """200: the server's loop has just turned. 503: it did not within a second."""
        return {"status": "ok", "round_trip_s": round(await probes.alive(), 6)}

    @app.head("/readyz", dependencies=none, include_in_schema=False)
    @app.get("/readyz", dependencies=none, responses={**PROBED, 503: {"model": Readiness | Refusal}})
    async def readyz() -> Any:
        """200: it lives, the whole pool is populated, and the tiers that `require_tiers` asks for are up."""
        reasons = await probes.why_not_ready()
        readiness = Readiness(status="not ready" if reasons else "ok", why=reasons)
        return JSONResponse(readiness.model_dump(), 503 if reasons else 200)


def _rights(app: FastAPI, guard: Guard, needs: Callable[[Right], Any]) -> None:
    @app.get("/rights", dependencies=[needs(Right.NONE)], responses=refusals(403, 421, 500))
    def rights(request: Request) -> Rights:
        """Whether the token of the request allows reading and changes, and why not."""
        refused = guard.refusals(request.headers)
        why_not = {right.value: why for right, why in refused.items()}
        return Rights(read=Right.READ not in refused, change=Right.CHANGE not in refused, why_not=why_not)


def _reading(app: FastAPI, node: Node, streams: EventStreams, needs: Callable[[Right], Any]) -> None:
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
        return PlainTextResponse(node.metrics(), media_type=METRICS_TYPE)

    @app.get("/history", dependencies=read, response_model=Plain, responses={**READ, **refusals(422)})
    def history(after: Annotated[float, Query(description="only what is later, in Unix seconds")] = 0) -> JSONResponse:
        """The past hour: times, and for each chart of the page its lines, with null where there is no value."""
        return JSONResponse(node.history.since(after))  # plain already, and long: not walked through once more

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
    def quota(tenant: Name) -> Plain:
        """One tenant's."""
        for row in node.client.quotas():
            if row["tenant"] == tenant:
                return row
        raise RefusedError(404, f"there is no tenant {tenant[:80]!r}")

    @app.get(
        "/events",
        dependencies=read,
        response_class=StreamingResponse,
        responses={200: {"content": {EVENTS_TYPE: {}}}, **READ, **refusals(404)},
    )
    def events() -> StreamingResponse:
        """The server's events from now on, as server-sent events. A slow reader loses some, and gets their number."""
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(streams.open(node.client.config()), media_type=EVENTS_TYPE, headers=headers)

    @app.post("/explain", dependencies=read, responses=ASKED)
    def explain(body: ExplainBody) -> list[Plain]:
        """Where keys are, or why they are not there: in the pool and on every tier."""
        space = body.space(node.known(body.namespace))
        explanations = node.client.explain_by_id(*space, body.keys_in(*space, node.status()["chunk_tokens"]))
        return [{**asdict(each), "key": each.key.hex()} for each in explanations]


def _changing(app: FastAPI, node: Node, needs: Callable[[Right], Any]) -> None:
    change = [needs(Right.CHANGE)]

    @app.post("/clear", dependencies=change, responses=ASKED)
    @app.post("/clear-cache", dependencies=change, responses=ASKED)
    def clear(body: ClearBody = ClearBody()) -> Plain:  # noqa: B008 - not changed
        """Forget a namespace, or everything."""
        namespace = None if body.namespace is None else id_of(body.namespace)
        found = node.client.clear_by_id(namespace, tiers=body.tiers)
        node.changed()
        return {"objects": found.objects, "nbytes": found.nbytes, "doomed": found.doomed}

    @app.post("/pin", dependencies=change, responses=ASKED)
    def pin(body: PinBody) -> list[str]:
        """Keep objects from being evicted for a while. Returns a word for each key."""
        keys = body.key_bytes()
        statuses = node.client.pin_by_id(*body.space(node.known(body.namespace)), keys, ttl_s=body.ttl_s)
        node.changed()
        return [status.name for status in statuses]

    @app.put("/quota/{tenant}", dependencies=change, responses=ASKED)
    def set_quota(tenant: Name, body: QuotaBody) -> Plain:
        """Set or change a tenant's quotas: they are saved now, and enforced as fast as objects can leave."""
        ids = None if body.namespaces is None else [id_of(each) for each in body.namespaces]
        stores = {store: each.model_dump() for store, each in body.stores.items()}
        node.client.quota_set(tenant, stores, ids)
        node.changed()
        return {"tenant": tenant, "done": "set"}

    @app.delete("/quota/{tenant}", dependencies=change, responses=ASKED)
    def remove_quota(tenant: Name) -> Plain:
        """Remove a tenant's quotas. Its objects stay."""
        node.client.quota_remove(tenant)
        node.changed()
        return {"tenant": tenant, "done": "removed"}

    @app.post("/tiers/{name}", dependencies=change, responses=ASKED)
    def change_tier(name: TierName, body: TierBody) -> Plain:
        """Add a tier, or drain, remove or reconfigure one."""
        client = node.client
        if body.action in ("add", "reconfigure"):
            (client.tiers_add if body.action == "add" else client.tiers_reconfigure)(name, body.settings)
        else:
            (client.tiers_drain if body.action == "drain" else client.tiers_remove)(name)
        node.changed()
        return {"tier": name, "done": body.action}

    @app.post("/operations/{name}", dependencies=change, responses=ASKED)
    def call_operation(name: Name, request: Values) -> Plain:
        """Call an operation that a package added to the server, as `hints`, with its request."""
        reply = node.client.call_operation(name, request, dict[str, Any])
        node.changed()
        return reply

    @app.post("/companions/{name}/{operation}", dependencies=change, responses=ASKED)
    def operate(name: Name, operation: Name, arguments: Values) -> Plain:
        """Call an operation of a companion, with its arguments: `l0/switch`, `{"enabled": true}`."""
        result = node.client.operate(name, operation, **arguments)
        node.changed()
        return result


def _page(app: FastAPI, server: str) -> str:
    """An index of the routes, without scripts or external requests."""
    rows = []
    for path, methods in app.openapi()["paths"].items():
        for method, operation in methods.items():
            about = html.escape(operation.get("description", "").split("\n")[0])
            rows.append(f"<tr><td><code>{method.upper()} {html.escape(path)}</code></td><td>{about}</td></tr>")
    title = f"lmcache-core {html.escape(server)}"
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title>"
        "<style>body{font:16px/1.5 system-ui;max-width:60em;margin:2em auto;padding:0 1em;color-scheme:light dark}"
        f"td{{padding:.2em 1em .2em 0}}</style><h1>{title}</h1><table>{''.join(rows)}</table>"
        "<p>For people: <a href=/ui>ui</a>. The schema: <a href=/openapi.json>openapi.json</a></p></html>"
    )
