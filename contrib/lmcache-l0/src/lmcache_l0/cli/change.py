"""The commands that create or change a table."""

from __future__ import annotations

import argparse
import sys

from lmcache_core.errors import UsageError
from lmcache_l0.cache import SharedCache
from lmcache_l0.cli.attaching import attach, connect, says_what_failed, server_of, warn_if_off
from lmcache_l0.sizing import GIB

_SWITCH = {"enabled": True, "disabled": False}
_WORDS = {"on": True, "true": True, "1": True, "off": False, "false": False, "0": False}


@says_what_failed
def set_command(options: argparse.Namespace) -> int:
    """Switch the table, or store a value."""
    wanted = None if options.key else _wanted(options.name, options.value)
    server = server_of(options.path)
    if server is not None:
        if wanted is None:
            raise UsageError(f"the table of {server!r} is filled by its server: store with ServedCache, into L1")
        with connect(server) as client:
            on = client.operate("l0", "switch", enabled=wanted)["enabled"]
        late = "" if on == wanted else ", as soon as a stopped writer has let go of a key"
        print(f"{options.path} is {'enabled' if wanted else 'disabled'}, in every process that has it attached{late}")
        return 0
    with attach(options.path, read_only=False) as cache:
        if wanted is not None:
            cache.enabled = wanted
            print(f"{options.path} is {'enabled' if wanted else 'disabled'}, in every process that has it attached")
            return 0
        warn_if_off(cache)
        cache.set(options.name, sys.stdin.buffer.read() if options.value is None else options.value.encode())
    return 0


def _wanted(name: str, value: str | None) -> bool | None:
    """What `enabled`, `disabled`, `enabled=false` and `enabled off` mean for the switch; None for a key."""
    switch, _, written = name.partition("=")
    if switch not in _SWITCH or (written and value is not None):
        return None
    text = written or value
    if text is None:
        return _SWITCH[switch]
    if switch != "enabled" or text.lower() not in _WORDS:
        raise UsageError(
            f"{name} {value or ''}: say enabled, disabled, or enabled and on or off; for a key of that name, --key"
        )
    return _WORDS[text.lower()]


@says_what_failed
def delete_command(options: argparse.Namespace) -> int:
    """Delete keys."""
    with attach(options.path, read_only=False) as cache:
        gone = [key for key in options.keys if cache.delete(key)]
    for key in options.keys:
        if key not in gone:
            print(f"lmcache-core l0: {key} is not there", file=sys.stderr)
    return 0 if gone else 1


@says_what_failed
def rehash_command(options: argparse.Namespace) -> int:
    """Make probes as short as in a new table."""
    with attach(options.path, read_only=False) as cache:
        before, moved, after = cache.stats, cache.rehash(), cache.stats
    print(
        f"{options.path}: {moved:,} keys moved; slots looked at for a key that is there, mean: "
        f"{before.found_probes_mean:.2f} before, {after.found_probes_mean:.2f} now; "
        f"99 % within {before.found_probes_p99:,} before, {after.found_probes_p99:,} now"
    )
    return 0


@says_what_failed
def create_command(options: argparse.Namespace) -> int:
    """Create a table at a free path."""
    sizes = ("size_gb", "hash_slots", "max_value_size", "max_key_size", "versions", "spares")
    given = {name: getattr(options, name) for name in sizes}
    with SharedCache(options.path, reserve=not options.sparse, enabled=not options.disabled, **given) as cache:
        print(
            f"{options.path}: {cache.hash_slots:,} slots (plan for {int(cache.hash_slots * 0.7):,} keys), values up to "
            f"{cache.max_value_size:,} bytes, {cache.file_bytes / GIB:.3f} GiB, "
            f"{'enabled' if cache.enabled else 'disabled'}"
        )
    return 0
