"""What is wrong with a server, in words, derived from its own figures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lmcache_core.observe.readable import size


def with_troubles(status: Mapping[str, Any]) -> dict[str, Any]:
    """A `status` with one more entry: `troubles`, a list of sentences."""
    return {**status, "troubles": list(troubles_of(status))}


def troubles_of(status: Mapping[str, Any]) -> Iterator[str]:
    """Problems that somebody should look into, in words; nothing if all is well."""
    pool, l1, index, counters = status["pool"], status["l1"], status["index"] or {}, status["counters"]
    if lost := status.get("server", {}).get("names_lost"):
        yield f"the server's names were removed and cannot be made again, so no new client finds it: {lost}"
    if pool["population_error"]:
        yield f"the pool's memory could not be allocated: {pool['population_error']}"
    if pool["name_lost"]:
        yield "the pool's name was deleted: new clients cannot attach by it"
    if pool["repaired_words"]:
        yield f"{pool['repaired_words']:,} words of the pool's tables were overwritten by another process, and repaired"
    if index.get("unindexed"):
        yield (
            f"{index['unindexed']:,} objects have no entry in the index, so each hit on them costs a call: set "
            f"l1.index_entries = {index['entries_wanted']}"
        )
    if l1["bytes_by_state"]["quarantined"]:
        yield f"{size(l1['bytes_by_state']['quarantined'])} wait for workers that did not answer in time"
    if l1["policy_error"]:
        yield f"the eviction policy failed: {l1['policy_error']}"
    if status["traffic"]["implausible_counts"]:
        yield (
            f"{status['traffic']['implausible_counts']:,} times a worker's counts were implausible and ignored: "
            "look for one that writes outside its slots"
        )
    if hung := status.get("state_directory", {}).get("hung"):
        yield f"{hung} calls on the state directory have not returned: see whether its disk or mount hangs"
    for label, why in status.get("namespaces_refused", {}).items():
        yield f"objects of {label} are refused: {why}"
    for name, helper in status["helpers"].items():
        if helper["pid"] is None:
            yield f"helper {name} is not running: {helper['last_end']}"
    for name, row in ((status["events"] or {}).get("subscribers", {})).items():
        if row["disabled"]:
            yield f"event subscriber {name}: disabled: {row['disabled']}"
    if counters.get("loop_faults") or counters.get("internal_errors"):
        yield "the server had an internal error; its log has the traceback"
    for name, companion in status["companions"].items():
        if isinstance(companion, Mapping) and companion.get("error"):
            yield f"companion {name}: {companion['error']}"
        if isinstance(companion, Mapping) and companion.get("disabled"):
            yield f"companion {name} failed and is disabled: {companion['disabled']}; the log has the traceback"
    for tier in (status["tiers"] or {}).get("tiers", []):
        closed = [what for what in ("reads", "writes") if tier[what]["breaker"] != "closed"]
        if closed or tier["last_error"]:
            stopped = f"circuit breaker open for {' and '.join(closed)}; " if closed else ""
            yield f"tier {tier['name']}: {stopped}{tier['last_error'] or 'no error is known'}"
    lost = (status["tiers"] or {}).get("stores", {}).get("reached_no_tier", {})
    if lost.get("objects"):
        yield f"{lost['objects']:,} objects have left the pool before any tier had them ({size(lost['bytes'])})"
    if status["stores_waited_in_vain"]:
        yield f"{status['stores_waited_in_vain']:,} stores waited for room and got none"
