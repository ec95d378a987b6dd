"""The server's answers and notices. The common rules are in `messages.py`."""

from __future__ import annotations

from typing import Any

import msgspec

from lmcache_core.protocol.requests import Message

WANTS_BLOCKS = "wants_blocks"  # capability of a server: somebody wants to know which engine blocks its objects hold


class Welcome(Message, tag="welcome"):
    """The answer to `Hello`. On the lifeline the pool's descriptor travels with it. `epoch`: the server's own, new at
    each start; lease ids begin with it, and it stands in the pool while the index there is reliable. `uid`: the
    server's, as it appears in the name of the pool's segment. `companions`: by name, what each of them offers to
    workers. `capabilities`: `TRACES` if the server accepts the traces of requests, and `WANTS_BLOCKS`."""

    rid: int
    version: int
    session: int
    server: str
    epoch: int
    pool: list[Any]  # the fields of PoolInfo, in order
    row: int
    chunk_tokens: int
    write_ttl_s: float
    read_ttl_s: float
    capabilities: list[str] = msgspec.field(default_factory=list)
    uid: int = 0
    companions: dict[str, dict[str, Any]] = msgspec.field(default_factory=dict)


class Attached(Message, tag="attached"):
    """`held`: the leases that continue."""

    rid: int
    held: list[int]


class LayoutRegistered(Message, tag="layout_registered"):
    rid: int
    layout: int
    slot_bytes: int


class LookupReply(Message, tag="found"):
    """Answer to lookups and to queries about them. `hits`: what can be served, now or once `job` has ended. It counts
    keys from the first on; without `prefix`, all keys that can be served; for a window it is its end. `done`: nothing
    is being loaded for this lookup any more. `incarnations`, if requested: a packed u64 for each key, 0 if there is
    none."""

    rid: int
    statuses: bytes
    reasons: bytes
    hits: int
    done: bool
    promise: int = 0
    deadline_s: float = 0.0
    job: int = 0
    incarnations: bytes = b""


class Granted(Message, tag="granted"):
    """Answer to prepare_*. `ttl_s` counts from now; `offsets` are packed u64, 0 if nothing was granted. `checksums`, if
    requested: the xxh3_64 of each object, packed as u64, 0 if unknown. `incarnations` as in `LookupReply`."""

    rid: int
    lease: int
    ttl_s: float
    statuses: bytes
    reasons: bytes
    offsets: bytes
    checksums: bytes = b""
    incarnations: bytes = b""


class SettledReply(Message, tag="settled"):
    """One byte for each requested position."""

    rid: int
    outcomes: bytes


class Renewed(Message, tag="renewed"):
    rid: int
    ttl_s: float


class LeaseState(Message, tag="lease_state"):
    """`state`: open, expired, settled or unknown."""

    rid: int
    state: str
    kind: str
    ttl_s: float
    positions: int
    open_positions: int


class ClearedReply(Message, tag="cleared"):
    rid: int
    objects: int
    nbytes: int
    doomed: int


class TierExplained(Message):
    """What one tier says about the keys of an `Explain`. `found`: one byte for each key (1: it has it; 2, only for
    `WaitStored`: it is on its way there), or None if the tier did not answer, for `reason`, in its own `words`.
    `losses`: how it lost each key, or never got it, as far as it remembers: the reason (empty: unknown), the time
    (Unix, f64, packed), and an index into `loss_words`."""

    tier: str
    found: bytes | None
    reason: str
    words: str
    losses: list[str]
    lost_at: bytes
    lost_words: bytes
    loss_words: list[str]


class Explained(Message, tag="explained"):
    """The answer to `Explain` and to `WaitStored`. Times are Unix time, packed f64, 0 if unknown. `sessions` (packed
    u64): who lost a key or displaced it, 0 for the server itself; `session_names` of those that are still connected.
    `remembers_since`: earlier losses are forgotten; 0: none are."""

    rid: int
    now: float
    statuses: bytes
    reasons: bytes
    lost_at: bytes
    sessions: bytes
    session_names: dict[int, str]
    eviction_policy: str
    remembers_since: float
    tiers: list[TierExplained]


class PinnedReply(Message, tag="pinned"):
    rid: int
    statuses: bytes


class ChunkSize(Message, tag="chunk_size"):
    rid: int
    tokens: int


class StatusReply(Message, tag="status_reply"):
    rid: int
    status: dict[str, Any]


class TiersReply(Message, tag="tiers_reply"):
    """The tiers in order. Secrets in the settings are hidden."""

    rid: int
    tiers: list[dict[str, Any]]


class QuotasReply(Message, tag="quotas_reply"):
    """Each row has a tenant (the last one, without a name, covers all namespaces without a tenant), its namespaces and
    its stores. `more`: ask again for the rest."""

    rid: int
    tenants: list[dict[str, Any]]
    more: bool = False


class Operated(Message, tag="operated"):
    """The result of the companion's operation, as plain values."""

    rid: int
    result: dict[str, Any]


class OperationReply(Message, tag="operation_reply"):
    """`body`: the operation's own reply, as MessagePack."""

    rid: int
    body: bytes


class Pong(Message, tag="pong"):
    rid: int
    payload: bytes


class Done(Message, tag="done"):
    rid: int
    count: int = 0


class Error(Message, tag="error"):
    """The answer to every request that has no result. `rid` 0: the request could not be read."""

    rid: int
    code: str
    message: str
    retry: str


class LeaseExpiredNotice(Message, tag="lease_expired"):
    """A notice, sent without a request. The lease's keys are free; settle it when the last copy has ended."""

    rid: int  # always 0
    lease: int
    kind: str


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
