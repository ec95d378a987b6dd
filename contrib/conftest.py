"""The examples are third-party packages: their tests run where they are installed (nox -s examples)."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore = [
    f"examples/lmcache-{name}" for name in ("memcached", "lmdb", "postgres") if find_spec(f"lmcache_{name}") is None
]
