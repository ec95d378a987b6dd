"""`lmcache-core plugins new NAME --kind KIND`: a package for one component, tests included, written from this wheel."""

from __future__ import annotations

import importlib.metadata
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from importlib.resources import files
from importlib.resources.abc import Traversable
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from lmcache_core.errors import PluginError, SettingsError
from lmcache_core.plugins.components import API_GENERATION, Kind
from lmcache_core.plugins.examine import COMPONENT_NAME
from lmcache_core.plugins.registry import Registry

_NAME_CHARS_MAX = 40
_SUFFIX = ".tmpl"  # so that no test runner, type checker or linter takes a template for a module
_FOR_ALL_KINDS = "package"
_MODULE = "src/module/"  # the folder that becomes the package's own


class _Template(NamedTuple):
    """What is written for one kind: the folder of its files has the name that is given to `--kind`."""

    kind: Kind
    summary: str


TEMPLATES: Mapping[str, _Template] = {
    "l2_adapter": _Template(Kind.L2_ADAPTER, "objects on @Name@"),
    "eviction": _Template(Kind.EVICTION_POLICY, "large objects go first, and the least recently used of them"),
    "serde": _Template(Kind.SERDE, "the bytes of an object, sorted into planes"),
    "store": _Template(Kind.STORE_POLICY, "small objects to the first tier alone, large ones to every tier"),
    "prefetch": _Template(Kind.PREFETCH_POLICY, "from the first healthy tier; what a prompt begins with stays in L1"),
    "subscriber": _Template(Kind.EVENT_SUBSCRIBER, "counts events by kind"),
    "operation": _Template(Kind.OPERATION, "shows an object of the pool"),
}


def write_package(registry: Registry, name: str, kind: str, parent: Path) -> Path:
    """The package's folder, `parent/lmcache-NAME`, which was not there. Raises `PluginError` for a name that cannot be
    used, and `SettingsError` for a folder that cannot be written."""
    template = TEMPLATES[kind]
    words = _names(registry, name, template)
    folder = parent / words["distribution"]
    if os.path.lexists(folder):
        raise SettingsError(f"{folder} is there already: remove it, choose another name, or --directory")
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=parent) as beside:
            whole = Path(beside) / folder.name
            whole.mkdir()  # with the rights that a folder of the caller's has
            for path, text in _files(kind):
                target = whole / path.replace(_MODULE, f"src/{words['module']}/")
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(_filled(text, words), encoding="utf-8")
            whole.rename(folder)  # all of it or nothing: a half is in the way of the next try
    except OSError as error:
        raise SettingsError(f"{folder} cannot be written: {error.strerror}") from error
    return folder


def _names(registry: Registry, name: str, template: _Template) -> dict[str, str]:
    """Every word that the files are filled in with."""
    name = name.removeprefix("lmcache-").replace("-", "_")
    if not COMPONENT_NAME.fullmatch(name) or len(name) > _NAME_CHARS_MAX:
        raise PluginError(f"{name!r} is no name: use up to {_NAME_CHARS_MAX} lower-case letters, digits and single _")
    for spec in registry.components(template.kind):
        if spec.name == name:
            owner = registry.owner(template.kind, name)
            raise PluginError(
                f"{template.kind} {name!r} is {owner}'s: two of one name are both refused; choose another"
            )
    for record in registry.plugins:
        if record.name == name:
            raise PluginError(f"plugin {record} has that name: two of one name are both refused; choose another")
    words = {
        "name": name,
        "Name": "".join(part.capitalize() for part in name.split("_")),
        "module": f"lmcache_{name}",
        "distribution": f"lmcache-{name.replace('_', '-')}",
        "api": str(API_GENERATION),
        "bounds": _bounds(importlib.metadata.version("lmcache-core")),
    }
    if find_spec(words["module"]) is not None:
        raise PluginError(f"a package {words['module']} is installed here: choose another name, or uninstall it")
    return {**words, "summary": _filled(template.summary, words)}


def _bounds(version: str) -> str:
    """This version and what is compatible with it: a minor version may change contracts."""
    major, minor = re.match(r"(\d+)\.(\d+)", version).groups()  # type: ignore[union-attr]  # PEP 440
    return f">={major}.{minor},<{major}.{int(minor) + 1}"


def _files(kind: str) -> Iterator[tuple[str, str]]:
    """Path in the package and text of every template: those of all packages, and those of the kind."""
    for folder in (_FOR_ALL_KINDS, kind):
        yield from _below(files("lmcache_core.cli") / "templates" / folder, PurePosixPath())


def _below(folder: Traversable, at: PurePosixPath) -> Iterator[tuple[str, str]]:
    for each in sorted(folder.iterdir(), key=lambda each: each.name):
        if each.is_dir():
            yield from _below(each, at / each.name)
        elif each.name.endswith(_SUFFIX):
            yield str(at / each.name.removesuffix(_SUFFIX)), each.read_text(encoding="utf-8")


def _filled(text: str, words: Mapping[str, str]) -> str:
    for word, value in words.items():
        text = text.replace(f"@{word}@", value)
    return text
