"""A real server in the test's own process, for tests of what runs in a server or beside it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

if TYPE_CHECKING:
    from lmcache_core.plugins.registry import Registry
    from lmcache_core.server.server import Server
    from lmcache_core.settings.model import Settings

Json = dict[str, Any]
"""What `status` gives, and commands with `--json`: a test knows what lies where."""

NAMELESS = {"backing": "memfd"}
"""Of an L1 that leaves nothing behind, whatever ends the test, and takes no room of /dev/shm."""

_L1_BYTES = 32 << 20


def server_settings(folder: Path, registry: Registry | None = None, /, **tables: Any) -> Settings:
    """Of a small server with a name of its own, all of whose files lie in `folder`. `tables` go on top of that."""
    from lmcache_core.settings.compose import make_settings

    own = {"name": f"t{uuid4().hex[:10]}", "runtime_dir": str(folder / "run"), "state_dir": str(folder / "state")}
    tables["l1"] = {"size_bytes": _L1_BYTES} | tables.get("l1", {})
    return make_settings(registry, **own | tables)


@contextmanager
def embedded_server(folder: Path, registry: Registry | None = None, /, **tables: Any) -> Iterator[Server]:
    """With only these tables in its settings; its pool is populated."""
    from lmcache_core.plugins.loader import load_plugins
    from lmcache_core.server.server import Server

    registry = registry or load_plugins()
    with Server(server_settings(folder, registry, **tables), registry).start(wait=True) as server:
        yield server
