"""`lmcache-core plugins new NAME --kind KIND`: write a package for one component, with tests, from templates in this
wheel."""

from __future__ import annotations

import argparse
import ast
import importlib.metadata
import os
import re
import shlex
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
_SUFFIX = ".tmpl"  # so that test runners, type checkers and linters do not take a template for a module
_FOR_ALL_KINDS = "package"
_MODULE = "src/module/"  # becomes the new package's folder


class _Template(NamedTuple):
    """The template of one kind: its files are in the folder named like the `--kind`."""

    kind: Kind
    summary: str


TEMPLATES: Mapping[str, _Template] = {
    "l2_adapter": _Template(Kind.L2_ADAPTER, "objects on @Name@"),
    "eviction": _Template(Kind.EVICTION_POLICY, "evicts large objects first, and the least recently used among them"),
    "serde": _Template(Kind.SERDE, "the bytes of an object, sorted into planes"),
    "store": _Template(Kind.STORE_POLICY, "small objects to the first tier alone, large ones to every tier"),
    "prefetch": _Template(Kind.PREFETCH_POLICY, "loads from the first healthy tier; the start of a prompt stays in L1"),
    "subscriber": _Template(Kind.EVENT_SUBSCRIBER, "counts events by kind"),
    "operation": _Template(Kind.OPERATION, "shows an object of the pool"),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="the name of the component")
    parser.add_argument("--kind", choices=list(TEMPLATES), help="the kind of component")
    parser.add_argument(
        "--directory",
        type=Path,
        default=Path(),
        metavar="DIR",
        help="where to make the package's folder (default: here)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Write the package and say how to go on; returns 0. Raises what `write_package` raises."""
    if arguments.name is None or arguments.kind is None:
        raise PluginError(f"no name or kind given: lmcache-core plugins new NAME --kind {'|'.join(TEMPLATES)}")
    folder = write_package(arguments.registry, arguments.name, arguments.kind, arguments.directory)
    go_there = f"cd {shlex.quote(str(folder))}"
    print(f"wrote {folder}; its README has the next steps; first: {go_there} && pip install -e '.[testing]' && pytest")
    return 0


def write_package(registry: Registry, name: str, kind: str, parent: Path) -> Path:
    """Write the package and return its folder, `parent/lmcache-NAME`, which must not exist yet. Raises `PluginError`
    for an unusable name and `SettingsError` if the folder cannot be written."""
    template = TEMPLATES[kind]
    fields = _names(registry, name, template)
    filled = [(path.replace(_MODULE, f"src/{fields['module']}/"), _filled(text, fields)) for path, text in _files(kind)]
    _expect_one_meaning_each(name, filled)
    folder = parent / fields["distribution"]
    if os.path.lexists(folder):
        raise SettingsError(f"{folder} already exists: remove it, or choose another name or --directory")
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=parent) as beside:
            whole = Path(beside) / folder.name
            whole.mkdir()  # with the permissions that the caller's folders have
            for path, text in filled:
                target = whole / path
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(text, encoding="utf-8")
            whole.rename(folder)  # all or nothing: half a package would be in the way of the next attempt
    except OSError as error:
        raise SettingsError(
            f"{folder} cannot be written: {error.strerror}: choose a writable folder with --directory"
        ) from error
    return folder


def _names(registry: Registry, name: str, template: _Template) -> dict[str, str]:
    """Every word that the templates are filled in with."""
    given, name = name, re.sub("^lmcache[-_]", "", name).replace("-", "_")
    if not COMPONENT_NAME.fullmatch(name) or len(name) > _NAME_CHARS_MAX:
        raise PluginError(
            f"{given[:_NAME_CHARS_MAX]!r}{'…' * (len(given) > _NAME_CHARS_MAX)} is not a valid component name: use "
            f"up to {_NAME_CHARS_MAX} letters from a to z and digits, a letter first, and single _ between words"
            + _similar(name)
        )
    if name.startswith("test"):
        raise PluginError(f"pytest would take classes named after {name!r} for tests: choose another name")
    for spec in registry.components(template.kind):
        if spec.name == name:
            owner = registry.owner(template.kind, name)
            raise PluginError(
                f"{template.kind} {name!r} exists in {owner}, and two with one name are both refused: choose another"
            )
    for record in registry.plugins:
        if record.name == name:
            raise PluginError(f"plugin {record} has that name, and two with one name are both refused: choose another")
    fields = {
        "name": name,
        "Name": "".join(part.capitalize() for part in name.split("_")),
        "module": f"lmcache_{name}",
        "distribution": f"lmcache-{name.replace('_', '-')}",
        "api": str(API_GENERATION),
        "bounds": _bounds(importlib.metadata.version("lmcache-core")),
    }
    if find_spec(fields["module"]) is not None:
        raise PluginError(f"a package {fields['module']} is already installed: choose another name, or uninstall it")
    return {**fields, "summary": _filled(template.summary, fields)}


def _similar(name: str) -> str:
    """A similar valid name, as advice; "" if there is none."""
    near = re.sub("[^a-z0-9]+", "_", name.lower()).strip("_")
    usable = COMPONENT_NAME.fullmatch(near) and len(near) <= _NAME_CHARS_MAX and name.isascii()
    return f": {near!r}, for example" if usable else ""


def _expect_one_meaning_each(name: str, filled: Sequence[tuple[str, str]]) -> None:
    """No class may get the name of one that its module imports: an adapter `blocking` would derive from itself."""
    for path, text in filled:
        if not path.endswith(".py"):
            continue
        parts = list(ast.walk(ast.parse(text)))
        imported = [alias.name for part in parts if isinstance(part, ast.ImportFrom) for alias in part.names]
        meanings = Counter([*imported, *(part.name for part in parts if isinstance(part, ast.ClassDef))])
        twice = sorted(each for each, count in meanings.items() if count > 1)
        if twice:
            raise PluginError(
                f"{name!r} would name a class {twice[0]}, which lmcache-core already has: choose another name"
            )


def _bounds(version: str) -> str:
    """This version and those compatible with it: a minor version may change contracts."""
    major, minor = re.match(r"(\d+)\.(\d+)", version).groups()  # type: ignore[union-attr]  # PEP 440
    return f">={major}.{minor},<{major}.{int(minor) + 1}"


def _files(kind: str) -> Iterator[tuple[str, str]]:
    """Path in the package and text of every template: the shared ones, and those of the kind."""
    for folder in (_FOR_ALL_KINDS, kind):
        yield from _below(files("lmcache_testing") / "templates" / folder, PurePosixPath())


def _below(folder: Traversable, at: PurePosixPath) -> Iterator[tuple[str, str]]:
    for each in sorted(folder.iterdir(), key=lambda each: each.name):
        if each.is_dir():
            yield from _below(each, at / each.name)
        elif each.name.endswith(_SUFFIX):
            yield str(at / each.name.removesuffix(_SUFFIX)), each.read_text(encoding="utf-8")


def _filled(text: str, fields: Mapping[str, str]) -> str:
    for word, value in fields.items():
        text = text.replace(f"@{word}@", value)
    return text
