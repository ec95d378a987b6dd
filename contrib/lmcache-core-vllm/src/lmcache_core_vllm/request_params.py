"""What one request may load and store, by its `kv_transfer_params`: the names that vLLM's own offloading has for it.

The dictionary belongs to all connectors of an engine, so names of others are ignored.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lmcache_core.errors import UsageError, excerpt
from lmcache_core.limits import TIER_NAME_CHARS_MAX

NAMES = ("max_load_tokens", "max_offload_tokens", "kv_load_tiers", "store_chunk")
REFUSED = "lmcache_core_refused"  # in the `kv_transfer_params` of the answer
CHUNK_REFUSED = "lmcache_core_chunk_refused"  # as well
NAMES_MAX = 64  # of all connectors: each is compared with ours, on the thread that schedules every request
NAME_CHARS = 32  # of each that are compared
TIERS_MAX = 64  # that one request names
MEDIA = ("CPU", "STORAGE")  # vLLM's: here the pool, which is always read, and the tiers


@dataclass(frozen=True)
class RequestParams:
    """`max_load_tokens`: at most so many tokens are loaded; `max_offload_tokens`: blocks beyond the first so many
    tokens of the request are not stored; None: no limit. `tiers`: the names of those that are asked, None for all.
    `refused`: why the request is computed without the cache, and nothing of it is stored; else empty. `store_chunk`:
    the prompt is one document behind the prefix tokens, and is stored as a chunk, too."""

    max_load_tokens: int | None = None
    max_offload_tokens: int | None = None
    tiers: tuple[str, ...] | None = None
    refused: str = ""
    store_chunk: bool = False

    @classmethod
    def of(cls, params: Mapping[str, Any] | None) -> RequestParams:
        """A request with bad values is refused rather than served without its limits: what it keeps out of the cache
        may be content that others must not find. So is one that another engine has refused: routers pass its answer
        on in place of what the client sent."""
        try:
            return UNLIMITED if not params else _parsed(params)
        except UsageError as error:
            return cls.refuse(str(error))

    @classmethod
    def refuse(cls, why: str) -> RequestParams:
        """Those of a request that nothing is loaded for and nothing stored of. `why` may have what its client sent: it
        is logged, and answered."""
        return cls(0, 0, (), excerpt(why))

    def load_end(self, computed: int, limit: int) -> int:
        """The last token that may be loaded behind the `computed` ones, at most `limit`."""
        return limit if self.max_load_tokens is None else min(limit, computed + self.max_load_tokens)

    def store_end(self, tokens: int) -> int:
        """How many of the first `tokens` may be stored."""
        return tokens if self.max_offload_tokens is None else min(tokens, self.max_offload_tokens)


UNLIMITED = RequestParams()


def _parsed(params: Mapping[str, Any]) -> RequestParams:
    if not isinstance(params, Mapping):
        raise UsageError(f"kv_transfer_params is {params!r}: give an object")
    if params.get(REFUSED):
        raise UsageError(str(params[REFUSED]))
    if len(params) > NAMES_MAX:
        raise UsageError(f"kv_transfer_params has {len(params):,} names: at most {NAMES_MAX} are looked at")
    for name in params:
        near = () if name in NAMES else difflib.get_close_matches(str(name)[:NAME_CHARS], NAMES, 1, 0.9)
        if near:
            raise UsageError(f"kv_transfer_params has no {name!r}: did you mean {near[0]!r}?")
    tiers = params.get("kv_load_tiers")
    chunk = params.get("store_chunk", False)
    if type(chunk) is not bool:
        raise UsageError(f"kv_transfer_params: store_chunk is {chunk!r}: give true or false")
    limits = _count(params, "max_load_tokens"), _count(params, "max_offload_tokens")
    return RequestParams(*limits, _tiers(tiers), store_chunk=chunk)


def _count(params: Mapping[str, Any], name: str) -> int | None:
    given = params.get(name)
    if given is not None and (type(given) is not int or given < 0):
        raise UsageError(f"kv_transfer_params: {name} is {given!r}: give a number of tokens, 0 or more")
    return given


def _tiers(given: object) -> tuple[str, ...] | None:
    if given is None:
        return None
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise UsageError(f'kv_transfer_params: kv_load_tiers is {given!r}: give a list, such as [{{"tier": "disk"}}]')
    if len(given) > TIERS_MAX:
        raise UsageError(f"kv_transfer_params: kv_load_tiers has {len(given):,} entries: give {TIERS_MAX} at most")
    named = [_tier(each) for each in given]
    return None if None in named else tuple(name for name in named if name)


def _tier(entry: object) -> str | None:
    """The name of a tier; None for all of them, and empty for the pool."""
    if not isinstance(entry, Mapping) or set(entry) - {"tier", "medium"} or len(entry) > 1:
        raise UsageError(
            f'kv_transfer_params: kv_load_tiers has {entry!r}: give {{"tier": NAME}}, {{"medium": "STORAGE"}} for all '
            'tiers, or {"medium": "CPU"} for the pool alone; where a tier lies is known only to who named it'
        )
    name, medium = entry.get("tier"), entry.get("medium")
    if "tier" in entry:
        # Another one cannot be sent: that would count as a server that refuses everybody.
        if not isinstance(name, str) or not 0 < len(name) <= TIER_NAME_CHARS_MAX or not name.isprintable():
            raise UsageError(f"kv_transfer_params: kv_load_tiers names the tier {name!r}: give its name in the server")
        return name
    if medium is None:
        return None
    if not isinstance(medium, str) or medium.upper() not in MEDIA:
        raise UsageError(f"kv_transfer_params: kv_load_tiers has the medium {medium!r}: use {' or '.join(MEDIA)}")
    return "" if medium.upper() == "CPU" else None
