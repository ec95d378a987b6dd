"""The sources of settings: command line, environment, file, a caller's own values. Each is read into flat leaves, path
→ value, so that origins are known and one check of names covers all of them.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

from lmcache_core.errors import SettingsError
from lmcache_core.native import BUILD_VARIABLES, MODE_VARIABLE
from lmcache_core.plugins.discovery import ALLOW_LIST
from lmcache_core.trust import SERVER_UID_VARIABLE

PREFIX = "LMCACHE_CORE_"
DEFAULT_FILE = "lmcache.toml"
ELSEWHERE = frozenset({ALLOW_LIST, MODE_VARIABLE, SERVER_UID_VARIABLE, *BUILD_VARIABLES})  # ours, but not settings

SettingPath = tuple[str, ...]


class Origin(StrEnum):
    """Where a value came from, strongest first."""

    FLAG = "flag"
    ENVIRONMENT = "environment"
    FILE = "file"
    GIVEN = "given"  # by a program that embeds the server
    DEFAULT = "default"


class Leaf(NamedTuple):
    """One value, and the name under which its source has it. `text`: it is not parsed as its type yet."""

    value: Any
    where: str
    text: bool = False


@dataclass
class Source:
    """Everything from one origin."""

    origin: Origin
    leaves: dict[SettingPath, Leaf] = field(default_factory=dict)


def dotted(path: SettingPath) -> str:
    """`l2.cold.bucket`."""
    return ".".join(path)


def spelled(path: SettingPath, origin: Origin) -> str:
    """How a setting's name is written in that origin."""
    if origin is Origin.ENVIRONMENT:
        return PREFIX + "__".join(path).upper()
    return f"--{dotted(path)}" if origin is Origin.FLAG else dotted(path)


# --- command line -------------------------------------------------------------------------------------------


def read_flags(argv: Sequence[str]) -> Source:
    """`--l2.cold.bucket=b`, `--l2.cold.bucket b`, and `--zmq.ipc` alone for true."""
    source = Source(Origin.FLAG)
    waiting = list(argv)
    while waiting:
        flag = waiting.pop(0)
        if not flag.startswith("--") or len(flag) == 2:
            raise SettingsError(f"{flag!r} is not a setting", cure="settings look like --l1.size_bytes 8GiB")
        name, given, value = flag.partition("=")
        if not given:
            value = waiting.pop(0) if waiting and not waiting[0].startswith("--") else "true"
        path = tuple(name[2:].replace("-", "_").split("."))
        if path in source.leaves:
            raise SettingsError(f"{name} is given twice", cure="give it once")
        source.leaves[path] = Leaf(value, name, text=True)
    return source


# --- environment --------------------------------------------------------------------------------------------

_KUBERNETES_NAME = re.compile(r"(^|_)(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)$")
_KUBERNETES_PORT = re.compile(r"(^|_)PORT$")
_KUBERNETES_URL = re.compile(r"(tcp|udp|sctp)://")


def from_kubernetes(name: str, value: str) -> bool:
    """Whether Kubernetes sets such a variable in every pod, for a Service called lmcache-core-…"""
    return bool(_KUBERNETES_NAME.search(name) or (_KUBERNETES_PORT.search(name) and _KUBERNETES_URL.match(value)))


def read_environment(environ: Mapping[str, str]) -> Source:
    """`LMCACHE_CORE_L2__COLD__BUCKET`; two underscores separate tables. Names are lower-cased."""
    source = Source(Origin.ENVIRONMENT)
    for name in sorted(environ):
        if name.startswith(PREFIX) and name not in ELSEWHERE:
            path = tuple(name[len(PREFIX) :].lower().split("__"))
            source.leaves[path] = Leaf(environ[name], name, text=True)
    return source


# --- file ---------------------------------------------------------------------------------------------------


def find_file(given: str | Path | None) -> Path | None:
    """The file to read: the given one, else `lmcache.toml` in the current directory, else None."""
    if given is not None:
        return Path(given)
    here = Path(DEFAULT_FILE)
    return here if here.is_file() else None


def read_file(path: Path | None) -> Source:
    """A TOML file. Raises SettingsError if it is missing or is not valid TOML."""
    source = Source(Origin.FILE)
    if path is None:
        return source
    try:
        with path.open("rb") as file:
            table = tomllib.load(file)
    except OSError as error:
        raise SettingsError(f"the settings file {path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"the settings file {path} is not valid TOML: {error}") from error
    source.leaves.update((at, Leaf(value, str(path))) for at, value in _flattened(table, ()))
    return source


def read_values(values: Mapping[str, Any]) -> Source:
    """The keyword values of a program that embeds the server."""
    leaves = {at: Leaf(value, dotted(at)) for at, value in _flattened(values, ())}
    return Source(Origin.GIVEN, leaves)


def _flattened(table: Mapping[str, Any], at: SettingPath) -> Iterator[tuple[SettingPath, Any]]:
    for name, value in table.items():
        if isinstance(value, Mapping) and value:
            yield from _flattened(value, (*at, str(name)))
        else:
            yield (*at, str(name)), value


def tree_of(leaves: Mapping[SettingPath, Any]) -> dict[str, Any]:
    """Leaves back in their tables. If a path has both a table and a value, the table is kept."""
    tree: dict[str, Any] = {}
    for path, value in leaves.items():
        table = tree
        for part in path[:-1]:
            below = table.get(part)
            if not isinstance(below, dict):
                below = table[part] = {}
            table = below
        if not (isinstance(table.get(path[-1]), dict) and not isinstance(value, dict)):
            table[path[-1]] = value
    return tree


def overlaid(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two trees: tables are merged, and values of `above` override those of `below`."""
    tree = dict(below)
    for name, value in above.items():
        there = tree.get(name)
        tree[name] = overlaid(there, value) if isinstance(there, dict) and isinstance(value, dict) else value
    return tree
