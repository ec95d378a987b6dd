"""Finds the packages that claim to be plugins, without importing them."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from lmcache_core.plugins.hookspecs import PROJECT
from lmcache_core.plugins.requirement import asks_for_us

ALLOW_LIST = "LMCACHE_CORE_PLUGINS"


class Candidate(NamedTuple):
    """One entry point of the group `lmcache_core`."""

    name: str
    target: str
    distribution: str
    version: str
    wanted: tuple[str, ...] = ()  # its requirements of lmcache-core


def canonical(distribution: str) -> str:
    """The form in which distribution names are compared: `LMCache_S3` and `lmcache-s3` are the same."""
    return re.sub(r"[-_.]+", "-", distribution.strip()).lower()


def allowed_distributions(environ: Mapping[str, str]) -> frozenset[str] | None:
    """The allow-list of `LMCACHE_CORE_PLUGINS`: None allows all, an empty value none but the built-ins."""
    if ALLOW_LIST not in environ:
        return None
    return frozenset(canonical(name) for name in environ[ALLOW_LIST].split(",") if name.strip())


def find_candidates() -> list[Candidate]:
    """Every entry point of every installed distribution, sorted, so that the order never depends on the file system."""
    copies: dict[str, list[importlib.metadata.Distribution]] = defaultdict(list)
    for distribution in importlib.metadata.distributions():
        # Check the text first: parsing the metadata of everything installed would take longer than the rest of a start.
        text = distribution.read_text("entry_points.txt")
        if text is None or PROJECT not in text:
            continue
        metadata = distribution.metadata
        # Checked first: Python 3.14 warns about missing fields, and later versions raise.
        if "Name" in metadata and metadata["Name"]:  # noqa: RUF019  # its type has no get
            copies[canonical(str(metadata["Name"]))].append(distribution)
    return sorted(one for each in copies.values() for one in _entries(_in_force(each)))


def _entries(distribution: importlib.metadata.Distribution) -> Iterator[Candidate]:
    metadata = distribution.metadata
    version = str(metadata["Version"]) if "Version" in metadata else "of unknown version"
    wanted = tuple(each for each in distribution.requires or () if asks_for_us(each))
    for entry in distribution.entry_points:
        if entry.group == PROJECT:
            yield Candidate(entry.name, entry.value, str(metadata["Name"]), version, wanted)


def _in_force(copies: Sequence[importlib.metadata.Distribution]) -> importlib.metadata.Distribution:
    """The copy of one distribution whose code Python would import; others are leftovers of other versions.

    It lies where the import finds the module; of several that do, or where none does (an editable installation), the
    one that pip has recorded as installed, then the first on the path, then the newest.
    """
    if len(copies) == 1:
        return copies[0]

    def rank(copy: importlib.metadata.Distribution) -> tuple[bool, bool, int, list[int]]:
        folder = Path(str(copy.locate_file(""))).resolve()
        first_on_path = -min((at for at, each in enumerate(sys.path) if Path(each).resolve() == folder), default=9999)
        metadata = copy.metadata
        version = [int(part) for part in re.findall(r"\d+", str(metadata["Version"]) if "Version" in metadata else "")]
        return _has_module(copy, folder), copy.read_text("RECORD") is not None, first_on_path, version

    return max(copies, key=rank)


def _has_module(copy: importlib.metadata.Distribution, folder: Path) -> bool:
    """Whether an import finds the plugin's top package beside this copy's metadata. It imports nothing."""
    for entry in copy.entry_points:
        if entry.group == PROJECT:
            with contextlib.suppress(ImportError, ValueError, AttributeError):
                spec = importlib.util.find_spec(entry.module.partition(".")[0])
                where = [spec.origin or "", *(spec.submodule_search_locations or ())] if spec is not None else []
                return any(each and folder in Path(each).resolve().parents for each in where)
    return False
