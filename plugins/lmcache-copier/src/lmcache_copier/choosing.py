"""Who copies: the engine itself, or the copier of the server."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Sequence
from typing import Literal

from lmcache_copier.copying import measured_s, own_engine
from lmcache_copier.limits import AUTO_BYTES, AUTO_RATIO
from lmcache_copier.pages import ServerPages, SharedFile
from lmcache_core import Client, PageGroup
from lmcache_core.client import Pages
from lmcache_core.errors import CacheError, DisconnectedError, UsageError

log = logging.getLogger("lmcache_copier")

Transfer = Literal["engine", "server", "auto"]
TRANSFERS = ("engine", "server", "auto")


def register_pages(
    client: Client,
    groups: Sequence[PageGroup],
    transfer: Transfer = "auto",
    files: Sequence[SharedFile] = (),
    say: Callable[..., None] = log.info,
    patient: bool = False,
) -> Pages | ServerPages:
    """Register pages, as `Client.register_pages`, and choose who copies them.

    "engine": this process. "server": the copier beside the server; raises `UsageError` with the cure where it cannot
    reach this memory, and `DisconnectedError` where there is none. "auto": measures both once, takes the copier unless
    it needs more than twice as long, and says so (`say`: a logger's method, or the like); where the copier cannot be
    used it is the engine, with a warning. `files`: see `ServerPages`. `patient`: a copier that is not there yet is no
    error for "server": until it is there nothing is stored, and everything is a miss.
    """
    if transfer not in TRANSFERS:
        raise UsageError(f"transfer is {transfer!r}: use {', '.join(map(repr, TRANSFERS))}")
    own = client.register_pages(groups)
    if transfer == "engine":
        return own
    if transfer == "server":
        there = ServerPages(client, own, files)
        try:
            there.registration()
        except DisconnectedError as error:
            if not patient:
                raise
            log.warning("%s: until then nothing is stored or found", error)
        return there
    try:
        there = ServerPages(client, own, files)
        engine_s, server_s, nbytes = measured(own, there)
    except CacheError as error:
        log.warning("the engine copies its pages itself: %s", error)
        return own
    takes = server_s <= AUTO_RATIO * engine_s
    say(
        "%s copies the pages: %.2f GB/s by the copier, %.2f by the engine itself, in objects of %d bytes",
        "the copier" if takes else "the engine",
        nbytes / server_s / 1e9,
        nbytes / engine_s / 1e9,
        own.groups[0].object_bytes,
    )
    if takes:
        return there
    there.close()
    return own


def measured(own: Pages, there: ServerPages) -> tuple[float, float, int]:
    """Seconds to read objects of the first group by the engine and by the copier, and how many bytes. Each way once
    before it counts, as the first touch of memory costs more. Raises as the calls do."""
    if own.tables.device is not None:
        raise UsageError('memory of a GPU is not measured: say "server" for the copier')
    group = own.groups[0]
    pages = [each for each in range(group.pages) if each != group.null_page]
    per_object = group.pages_per_object
    count = min(max(1, AUTO_BYTES // group.object_bytes), len(pages) // per_object)
    if not count:
        raise UsageError("there are too few pages to measure with")
    ids = array("q", pages[: count * per_object])
    nbytes = count * group.object_bytes

    tables = own_engine.PageTables(own.tables.words())

    def by_engine() -> float:
        return measured_s(own_engine, tables, 0, count, ids.tobytes(), group.object_bytes)

    by_engine()
    there.measure(0, ids)
    return max(by_engine(), 1e-9), max(there.measure(0, ids), 1e-9), nbytes
