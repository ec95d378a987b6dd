"""`lmcache-core warm`: load objects of a tier into the pool ahead of requests. The server loads them in the
background."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import islice
from typing import TYPE_CHECKING, Any

from lmcache_core.cli.connecting import add_server_uid_option
from lmcache_core.errors import UsageError
from lmcache_tools.walking import (
    EXIT_INTERRUPTED,
    Progress,
    add_shared_options,
    ending_between_objects,
    open_walker,
    report,
    settings_of,
)

if TYPE_CHECKING:
    from lmcache_core import Client
    from lmcache_core.pool.layout import Layout
    from lmcache_core.tiers.contract import ScanEntry
    from lmcache_tools.walk import Walker

_KEYS_AT_ONCE = 64
_WAIT_S = 60.0  # for one batch of loads: requests go first and may take up all of the tier's time


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options other than settings."""
    parser.add_argument("--tier", required=True, metavar="TIER", help="the tier, as the settings name it")
    parser.add_argument(
        "--namespace",
        action="append",
        default=[],
        metavar="ID",
        help="only this namespace (16 hexadecimal digits); repeatable (default: all)",
    )
    parser.add_argument(
        "--limit-bytes",
        metavar="SIZE",
        help="bytes to load at most (default: what fits into the pool without evicting anything)",
    )
    add_server_uid_option(parser)
    add_shared_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Returns 0. The most recently used objects are loaded first. Objects already in the pool are skipped, so a second
    run continues where the first ended."""
    from lmcache_core import Client

    settings = settings_of(arguments)
    chosen = {_namespace(text) for text in arguments.namespace}
    with ExitStack() as stack:
        walker = open_walker(arguments, settings, arguments.tier, stack)
        client = stack.enter_context(
            Client.connect(
                settings.name,
                runtime_dir=settings.runtime_dir,
                client_name="lmcache-core warm",
                maps_pool=False,
                server_uid=arguments.server_uid,
            )
        )
        interrupted = stack.enter_context(ending_between_objects())
        limit_bytes = _limit(arguments.limit_bytes, client.status(), settings.l1.watermark)
        entries = _newest(walker, chosen, limit_bytes)
        counts = {"objects": len(entries), "loaded": 0, "there_already": 0, "not_loaded": 0}
        layouts: dict[int, Layout | None] = {}
        with Progress(f"warm from {arguments.tier}", len(entries)) as progress:
            for namespace, batch in _batches(entries):
                if interrupted.is_set():
                    break
                if namespace not in layouts:
                    layouts[namespace] = _layout(walker, batch)
                layout = layouts[namespace]
                if layout is None:
                    counts["not_loaded"] += len(batch)
                else:
                    _load(client, arguments.tier, namespace, layout, batch, counts)
                progress.advance(len(batch))
    report(counts, arguments, interrupted=interrupted.is_set())
    return EXIT_INTERRUPTED if interrupted.is_set() else 0


def _namespace(text: str) -> int:
    try:
        return int(text, 16)
    except ValueError:
        raise UsageError(f"--namespace {text!r} is not an id: give its 16 hexadecimal digits") from None


def _limit(text: str | None, status: dict[str, Any], watermark: float) -> int:
    from lmcache_core.settings.sizes import parse_size

    if text is None:
        l1 = status["l1"]
        return max(0, int(watermark * l1["pool_bytes"]) - int(l1["used_bytes"]))
    try:
        return int(parse_size(text))
    except ValueError as error:
        raise UsageError(f"--limit-bytes: {error}") from None


def _newest(walker: Walker, namespaces: set[int], limit_bytes: int) -> list[ScanEntry]:
    from lmcache_core.tiers.object.format import HEADER_BYTES, TIER_KEY_BYTES, split_tier_key

    found = [entry for page in walker.pages() for entry in page.entries if len(entry.key) == TIER_KEY_BYTES]
    chosen = []
    for entry in sorted(found, key=lambda entry: -entry.used_at_s):
        if namespaces and split_tier_key(entry.key)[1] not in namespaces:
            continue
        limit_bytes -= max(0, entry.nbytes - HEADER_BYTES)
        if limit_bytes < 0:
            break
        chosen.append(entry)
    return chosen


def _batches(entries: Sequence[ScanEntry]) -> Iterator[tuple[int, list[ScanEntry]]]:
    """One namespace after another, in the order of their newest objects."""
    from lmcache_core.tiers.object.format import split_tier_key

    by_namespace: dict[int, list[ScanEntry]] = {}
    for entry in entries:
        by_namespace.setdefault(split_tier_key(entry.key)[1], []).append(entry)
    for namespace, group in by_namespace.items():
        walk = iter(group)
        while some := list(islice(walk, _KEYS_AT_ONCE)):
            yield namespace, some


def _layout(walker: Walker, batch: Sequence[ScanEntry]) -> Layout | None:
    """The layout that the namespace's objects describe; None if none of them can be read."""
    from lmcache_tools.walk import layout_of

    headers = (found.header for entry in batch if (found := walker.read(entry)).header is not None)
    header = next(headers, None)
    return None if header is None else layout_of(header)


def _load(
    client: Client, tier: str, namespace: int, layout: Layout, batch: Sequence[ScanEntry], counts: dict[str, int]
) -> None:
    from lmcache_core.tiers.object.format import split_tier_key

    keys = list(dict.fromkeys(split_tier_key(entry.key)[0] for entry in batch))
    before = client.warm(namespace, layout, keys, [], 0.0)
    after = client.warm(namespace, layout, keys, [tier], _WAIT_S) if before < len(keys) else before
    counts["there_already"] += before
    counts["loaded"] += max(0, after - before)
    counts["not_loaded"] += len(batch) - max(before, after)
