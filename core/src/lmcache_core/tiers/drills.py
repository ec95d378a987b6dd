"""Wrappers around a real tier, named in its settings, for drills. lmcache-mock has `latency`, `faults` and `record`;
any package can have more, as entry points of the group `lmcache_core.wrappers`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points

from lmcache_core.errors import UsageError
from lmcache_core.tiers.contract import L2Adapter

log = logging.getLogger(__name__)

GROUP = "lmcache_core.wrappers"
Wrap = Callable[[str, L2Adapter], L2Adapter]


def parse_wrap(text: str) -> Wrap:
    """The wrapper for one word of `wrap`, `KIND` or `KIND:TEXT`. Its entry point is called with the text, None without
    a colon. Raises `UsageError` that says what is wrong with it."""
    kind, colon, rest = text.partition(":")
    found = entry_points(group=GROUP)
    for entry in found.select(name=kind.strip()):
        try:
            make: Callable[[str | None], Wrap] = entry.load()
        except (ImportError, AttributeError) as error:
            raise UsageError(f"wrap {text!r} cannot be used: {entry.value}: {error}") from error
        return make(rest if colon else None)
    known = ", ".join(sorted(found.names))
    cure = f"use one of {known}" if known else "pip install lmcache-mock, which has latency, faults and record"
    raise UsageError(f"wrap {text!r} is not known: {cure}")


def wrapped(tier: str, adapter: L2Adapter, wrap: Sequence[str]) -> L2Adapter:
    """The adapter in its wrappers: the first word is the outermost one, which the server calls."""
    if wrap:
        log.warning("tier %s is wrapped for a drill: %s", tier, " | ".join(wrap))
    for text in reversed(wrap):
        adapter = parse_wrap(text)(tier, adapter)
    return adapter
