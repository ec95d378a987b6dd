"""Distributions that exist only on the path: a module and a `*.dist-info` folder, as pip would have left them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent

import pytest

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """`install("lmcache-acme", "acme", source, version="1.0")` puts a plugin distribution on the path."""
    monkeypatch.syspath_prepend(str(tmp_path))
    put_here: list[str] = []

    def put(distribution: str, entry: str, source: str, *, version: str = "1.0", target: str = "") -> None:
        module = target or f"{distribution.replace('-', '_')}_module"
        (tmp_path / f"{module}.py").write_text(dedent(source))
        put_here.append(module)
        info = tmp_path / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[lmcache_core]\n{entry} = {module}\n")
        importlib.invalidate_caches()

    yield put
    for name in put_here:
        sys.modules.pop(name, None)


@pytest.fixture
def offering() -> Callable[..., str]:
    """The source of a module that offers components: `offering(("l2_adapter", "acme"), …)`."""

    def source(*components: tuple[str, str], extra: str = "") -> str:
        specs = ", ".join(f'ComponentSpec(Kind("{kind}"), "{name}", "builtins:dict")' for kind, name in components)
        return (
            "from lmcache_core import ComponentSpec, Kind, PluginInfo, hookimpl\n"
            f"@hookimpl\ndef lmcache_components():\n    return [{specs}]\n" + dedent(extra)
        )

    return source
