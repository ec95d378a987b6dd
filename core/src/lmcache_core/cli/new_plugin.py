"""`lmcache-core plugins new NAME --kind KIND`: a package for one component, tests included, written from this wheel."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
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
    filled = [(path.replace(_MODULE, f"src/{words['module']}/"), _filled(text, words)) for path, text in _files(kind)]
    _expect_one_meaning_each(name, filled)
    folder = parent / words["distribution"]
    if os.path.lexists(folder):
        raise SettingsError(f"{folder} is there already: remove it, choose another name, or --directory")
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=parent) as beside:
            whole = Path(beside) / folder.name
            whole.mkdir()  # with the rights that a folder of the caller's has
            for path, text in filled:
                target = whole / path
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(text, encoding="utf-8")
            whole.rename(folder)  # all of it or nothing: a half is in the way of the next try
    except OSError as error:
        raise SettingsError(
            f"{folder} cannot be written: {error.strerror}: name a folder where you may write by --directory"
        ) from error
    return folder


def _names(registry: Registry, name: str, template: _Template) -> dict[str, str]:
    """Every word that the files are filled in with."""
    given, name = name, re.sub("^lmcache[-_]", "", name).replace("-", "_")
    if not COMPONENT_NAME.fullmatch(name) or len(name) > _NAME_CHARS_MAX:
        raise PluginError(
            f"{given[:_NAME_CHARS_MAX]!r}{'…' * (len(given) > _NAME_CHARS_MAX)} cannot be the name of a component: use "
            f"up to {_NAME_CHARS_MAX} letters from a to z and digits, a letter first, and single _ between words"
            + _similar(name)
        )
    if name.startswith("test"):
        raise PluginError(f"{name!r} would make classes that pytest takes for tests: choose another name")
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


def _similar(name: str) -> str:
    """A name that would do, as advice; "": none is near."""
    near = re.sub("[^a-z0-9]+", "_", name.lower()).strip("_")
    usable = COMPONENT_NAME.fullmatch(near) and len(near) <= _NAME_CHARS_MAX and name.isascii()
    return f": {near!r}, for example" if usable else ""


def _expect_one_meaning_each(name: str, filled: Sequence[tuple[str, str]]) -> None:
    """No class is to be called as one that its module imports: `l2` would give an L2Adapter that is an L2Adapter."""
    for path, text in filled:
        if not path.endswith(".py"):
            continue
        parts = list(ast.walk(ast.parse(text)))
        imported = [alias.name for part in parts if isinstance(part, ast.ImportFrom) for alias in part.names]
        meanings = Counter([*imported, *(part.name for part in parts if isinstance(part, ast.ClassDef))])
        twice = sorted(each for each, count in meanings.items() if count > 1)
        if twice:
            raise PluginError(
                f"{name!r} would make a class {twice[0]}, and lmcache-core has one of that name: choose another name"
            )


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
