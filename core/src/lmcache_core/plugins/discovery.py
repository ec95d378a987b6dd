"""Finds the packages that claim to be plugins, without importing them."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Mapping
from typing import NamedTuple

from lmcache_core.plugins.hookspecs import PROJECT

ALLOW_LIST = "LMCACHE_CORE_PLUGINS"


class Candidate(NamedTuple):
    """One entry point of the group `lmcache_core`."""

    name: str
    target: str
    distribution: str
    version: str


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
    found: set[Candidate] = set()
    for distribution in importlib.metadata.distributions():
        # Check the text first: parsing the metadata of everything installed would take longer than the rest of a start.
        text = distribution.read_text("entry_points.txt")
        if text is None or PROJECT not in text:
            continue
        told = distribution.metadata  # checked first: Python 3.14 warns about missing fields, and later versions raise
        name = str(told["Name"]) if "Name" in told else ""
        if not name or _is_shadowed(name, text):
            continue
        version = str(told["Version"]) if "Version" in told else "of unknown version"
        for entry in distribution.entry_points:
            if entry.group == PROJECT:
                found.add(Candidate(entry.name, entry.value, name, version))
    return sorted(found)


def _is_shadowed(name: str, text: str) -> bool:
    """Whether another copy of the distribution comes earlier on the path, and so is the one that an import finds."""
    try:
        return importlib.metadata.distribution(name).read_text("entry_points.txt") != text
    except importlib.metadata.PackageNotFoundError:
        return False
