"""The server's answers and notices. The common rules are in `messages.py`, the ranges of all fields in
`ranges.py`."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from lmcache_core.limits import BATCH_KEYS_MAX, FRAME_BYTES_MAX
from lmcache_core.protocol import ranges as r
from lmcache_core.protocol.requests import Message

WANTS_BLOCKS = "wants_blocks"  # capability of a server: somebody wants to know which engine blocks its objects hold


class Welcome(Message, tag="welcome"):
    """The answer to `Hello`. On the lifeline the pool's descriptor travels with it. `epoch`: the server's own, new at
    each start; lease ids begin with it, and it stands in the pool while the index there is reliable. `uid`: the
    server's, as it appears in the name of the pool's segment. `companions`: by name, what each of them offers to
    workers. `capabilities`: `TRACES` if the server accepts the traces of requests, and `WANTS_BLOCKS`."""

    version: r.Version
    session: r.U64
    server: r.Name
    epoch: r.Epoch
    pool: Annotated[list[r.Name | r.U64], Meta(max_length=16)]  # the fields of PoolInfo, in order
    row: r.Row
    chunk_tokens: r.Positive
    write_ttl_s: r.Seconds
    read_ttl_s: r.Seconds
    capabilities: r.Names = msgspec.field(default_factory=list)
    uid: r.U32 = 0
    companions: dict[r.Name, r.Values] = msgspec.field(default_factory=dict)


class Attached(Message, tag="attached"):
    """`held`: the leases that continue."""

    held: r.U64s


class LayoutRegistered(Message, tag="layout_registered"):
    layout: r.U32
    slot_bytes: r.I63


class LookupReply(Message, tag="found"):
    """Answer to lookups and to queries about them. `hits`: what can be served, now or once `job` has ended. It counts
    keys from the first on; without `prefix`, all keys that can be served; for a window it is its end. `done`: nothing
    is being loaded for this lookup any more. `incarnations`, if requested: a packed u64 for each key, 0 if there is
    none."""

    statuses: r.KeyBytes
    reasons: r.KeyBytes
    hits: r.KeyCount
    done: bool
    promise: r.U64 = 0
    deadline_s: r.Seconds = 0.0
    job: r.U64 = 0
    incarnations: r.KeyU64s = b""


class Granted(Message, tag="granted"):
    """Answer to prepare_*. `ttl_s` counts from now; `offsets` are packed u64, 0 if nothing was granted. `checksums`, if
    requested: the xxh3_64 of each object, packed as u64, 0 if unknown. `incarnations` as in `LookupReply`."""

    lease: r.U64
    ttl_s: r.Seconds
    statuses: r.KeyBytes
    reasons: r.KeyBytes
    offsets: r.KeyU64s
    checksums: r.KeyU64s = b""
    incarnations: r.KeyU64s = b""


class SettledReply(Message, tag="settled"):
    """One byte for each requested position."""

    outcomes: r.KeyBytes


class Renewed(Message, tag="renewed"):
    ttl_s: r.Seconds


class LeaseState(Message, tag="lease_state"):
    """`state`: open, expired, settled or unknown."""

    state: r.Name
    kind: r.Name
    ttl_s: r.Seconds
    positions: r.Position
    open_positions: r.Position


class ClearedReply(Message, tag="cleared"):
    objects: r.I63
    nbytes: r.I63
    doomed: r.I63


class TierExplained(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False):
    """What one tier says about the keys of an `Explain`. `found`: one byte for each key (1: it has it; 2, only for
    `WaitStored`: it is on its way there), or None if the tier did not answer, for `reason`, in its own `words`.
    `losses`: how it lost each key, or never got it, as far as it remembers: the reason (empty: unknown), the time
    (Unix, f64, packed), and an index into `loss_words`; for a key that it has, these say where on its medium."""

    tier: r.TierName
    found: r.KeyBytes | None
    reason: r.Name
    words: r.Text
    losses: Annotated[list[r.Name], Meta(max_length=BATCH_KEYS_MAX)]
    lost_at: r.KeyU64s
    lost_words: r.KeyBytes
    loss_words: Annotated[list[r.Text], Meta(max_length=BATCH_KEYS_MAX)]


class Explained(Message, tag="explained"):
    """The answer to `Explain` and to `WaitStored`. Times are Unix time, packed f64, 0 if unknown. `sessions` (packed
    u64): who lost a key or displaced it, 0 for the server itself; `session_names` of those that are still connected.
    `remembers_since`: earlier losses are forgotten; 0: none are. `known`: False if no other session uses
    the namespace and the pool has nothing of it."""

    now: r.UnixTime
    statuses: r.KeyBytes
    reasons: r.KeyBytes
    lost_at: r.KeyU64s
    sessions: r.KeyU64s
    session_names: dict[r.U64, r.Text]
    eviction_policy: r.Name
    remembers_since: r.UnixTime
    tiers: Annotated[list[TierExplained], Meta(max_length=BATCH_KEYS_MAX)]
    known: bool = True


class PinnedReply(Message, tag="pinned"):
    statuses: r.KeyBytes


class ChunkSize(Message, tag="chunk_size"):
    tokens: r.Positive


class StatusReply(Message, tag="status_reply"):
    status: r.Values


class TiersReply(Message, tag="tiers_reply"):
    """The tiers in order. Secrets in the settings are hidden."""

    tiers: Annotated[list[r.Values], Meta(max_length=FRAME_BYTES_MAX)]


class QuotasReply(Message, tag="quotas_reply"):
    """Each row has a tenant (the last one, without a name, covers all namespaces without a tenant), its namespaces and
    its stores. `more`: ask again for the rest."""

    tenants: Annotated[list[r.Values], Meta(max_length=FRAME_BYTES_MAX)]
    more: bool = False


class Operated(Message, tag="operated"):
    """The result of the companion's operation, as plain values."""

    result: r.Values


class OperationReply(Message, tag="operation_reply"):
    """`body`: the operation's own reply, as MessagePack."""

    body: r.Blob


class Pong(Message, tag="pong"):
    payload: r.Blob


class Done(Message, tag="done"):
    count: r.I63 = 0


class Error(Message, tag="error"):
    """The answer to every request that has no result. `rid` 0: the request could not be read."""

    code: r.Name
    message: r.ErrorText
    retry: r.Name


class LeaseExpiredNotice(Message, tag="lease_expired"):
    """A notice, sent without a request (`rid` is 0). The lease's keys are free; settle it when the last copy has
    ended."""

    lease: r.U64
    kind: r.Name


Reply = (
    Welcome
    | Attached
    | LayoutRegistered
    | LookupReply
    | Granted
    | SettledReply
    | Renewed
    | LeaseState
    | ClearedReply
    | Explained
    | PinnedReply
    | ChunkSize
    | StatusReply
    | TiersReply
    | QuotasReply
    | Operated
    | OperationReply
    | Pong
    | Done
    | Error
    | LeaseExpiredNotice
)
