"""The page at `/ui`: static files of this package, the same for everybody. The page fetches its data with its reader's
token. Nothing on it comes from elsewhere, and it has no inline script or style: its Content-Security-Policy enforces
that, and that names and errors are set as text (trusted types).
"""

from __future__ import annotations

import json
from dataclasses import asdict
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import PurePosixPath
from typing import Any

from fastapi import FastAPI
from fastapi.responses import Response

from lmcache_core.client import counted_reasons
from lmcache_http.guard import RefusedError

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".json": "application/json",
}
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}


def add_page(app: FastAPI, guarded: Any) -> None:
    """The routes of the page. They need no right: they reveal nothing about the server."""
    there = page_files()

    @app.get("/ui", dependencies=[guarded], include_in_schema=False)
    async def page() -> Response:
        return _reply("index.html", there["index.html"])

    @app.get("/ui/{name:path}", dependencies=[guarded], include_in_schema=False)
    async def part(name: str) -> Response:
        if name not in there:
            raise RefusedError(404, f"no such file: {name[:80]!r}")
        return _reply(name, there[name])


def page_files() -> dict[str, bytes]:
    """A file of the page, by its name below `/ui/`."""
    reasons = {name: asdict(each) for name, each in counted_reasons().items()}
    return {**_read(files("lmcache_http") / "page", ""), "reasons.json": json.dumps(reasons).encode()}


def _read(folder: Traversable, prefix: str) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for each in folder.iterdir():
        if each.is_dir():
            found |= _read(each, f"{prefix}{each.name}/")
        elif PurePosixPath(each.name).suffix in _TYPES:
            found[prefix + each.name] = each.read_bytes()
    return found


def _reply(name: str, content: bytes) -> Response:
    return Response(content, media_type=_TYPES[PurePosixPath(name).suffix], headers=HEADERS)
