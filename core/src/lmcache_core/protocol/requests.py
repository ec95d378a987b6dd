"""A client's requests. The common rules are in `messages.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

TRACES = "traces"  # capability of a server: it accepts the traces of requests


class Message(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False):
    """Base of all messages."""


class Hello(Message, tag="hello"):
    """The first message of a session. `client_id` names the client instance, across reconnects."""

    rid: int
    version_min: int
    version_max: int
    client_id: bytes
    name: str
    pid: int
    capabilities: list[str] = []


class Attach(Message, tag="attach"):
    """The worker maps the pool: it has read `nonce` there, and holds the life lock of `row`, which is the one that
    `Welcome` named or, if that named none, a free one of its choice. `held`: the leases of the same client instance
    whose memory it may still touch; the server settles all others."""

    rid: int
    row: int
    nonce: int
    held: list[int] = []


class RegisterLayout(Message, tag="register_layout"):
    """Name a namespace that this session will use, and the layout of its objects."""

    rid: int
    namespace: int
    dtype: str
    shape: list[int]
    memory_format: str
    fingerprint: int
    label: str = ""


class LookupOptions(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True, gc=False):
    """The options of a lookup, from the client's call to the tiers.

    `hold`: promise what is found. `prefix`: the keys from the first on; without it every key is independent; `window` >
    0: the last `window` keys of the longest run that ends in them. `wait_s` > 0: the reply may come later, when loads
    from tiers have ended. `tiers`: search only these; None: all; []: none. `deadline_s` > 0: the time limit for the
    tiers, whether or not the reply waits for them. `pin_s` > 0: pin what is found. `policy`: load by this prefetch
    policy instead of the server's. `warm_up`: nobody waits for it, so all other requests go first. `identify`: say
    which incarnations were found.
    """

    hold: bool = False
    prefix: bool = True
    wait_s: float = 0.0
    tiers: Sequence[str] | None = None
    window: int = 0
    deadline_s: float = 0.0
    pin_s: float = 0.0
    policy: str = ""
    warm_up: bool = False
    identify: bool = False


ORDINARY_LOOKUP = LookupOptions()


class LookupRequest(Message, tag="lookup"):
    """Which keys can be served?"""

    rid: int
    namespace: int
    keys: bytes
    options: LookupOptions = ORDINARY_LOOKUP


class TracedLookup(LookupRequest, tag="traced_lookup"):
    """A lookup that belongs to a trace of the caller's: `traceparent` in the format of W3C Trace Context. For servers
    with `TRACES` in their `Welcome`."""

    traceparent: str = ""


class Cancel(Message, tag="cancel"):
    """The lookup, the explanation or the wait for stores with this rid is no longer wanted. Answered by `Done`; what it
    names is answered too, with what there is."""

    rid: int
    lookup: int


class QueryPrefetchStatus(Message, tag="query_prefetch_status"):
    rid: int
    job: int


class QueryLookupHits(Message, tag="query_lookup_hits"):
    """Answered as soon as the hits are known, before the loads end."""

    rid: int
    job: int


class FreeLookupLocks(Message, tag="free_lookup_locks"):
    rid: int
    promises: list[int]


class RedeemPromise(Message, tag="redeem_promise"):
    """These keys of a promise were read without a lease: it no longer holds them, but still holds the others. From any
    session of the namespace. Answered by `Done`: how many of the keys were held."""

    rid: int
    promise: int
    namespace: int
    keys: bytes


class PrepareStore(Message, tag="prepare_store"):
    """`lease` 0 opens a lease; otherwise the keys are the next page of that one."""

    rid: int
    namespace: int
    keys: bytes
    lease: int = 0


class TracedPrepareStore(PrepareStore, tag="traced_prepare_store"):
    """A store that belongs to a trace. See `TracedLookup`."""

    traceparent: str = ""


class Settle(Message):
    """Settle positions of a lease: `count` of them from `first`, or those packed as u32 in `positions`."""

    rid: int
    lease: int
    first: int = 0
    count: int = 0
    positions: bytes = b""


class CommitStore(Settle, tag="commit_store"):
    """`checksums`: the xxh3_64 of each position's bytes as packed u64, 0 if unknown; or empty."""

    checksums: bytes = b""


class AbortStore(Settle, tag="abort_store"):
    pass


class FinishRead(Settle, tag="finish_read"):
    pass


class PrepareRetrieve(Message, tag="prepare_retrieve"):
    """`prefix`: grant only up to the first missing key. `promise` is redeemed by this. `verify`: also return the
    checksums; `identify`: also return the granted incarnations."""

    rid: int
    namespace: int
    keys: bytes
    lease: int = 0
    promise: int = 0
    prefix: bool = False
    verify: bool = False
    identify: bool = False


class ReportDamaged(Settle, tag="report_damaged"):
    """The objects at these positions of a read lease do not have the checksum of their store, so they must not be
    served. Ends the lease's hold on them. By lease, because the key may have an intact successor by now."""


class Drop(Message, tag="drop"):
    """Stop serving these incarnations, a packed u64 for each key; a key's successor stays. `tiers`: also delete the
    objects with these keys from the tiers. `damaged`: their bytes are not what was stored. Answered by `Done`: how many
    were in the pool."""

    rid: int
    namespace: int
    keys: bytes
    incarnations: bytes
    tiers: bool = False
    damaged: bool = False


class RenewLease(Message, tag="renew_lease"):
    rid: int
    lease: int


class LeaseStatusOf(Message, tag="lease_status"):
    rid: int
    lease: int


class EndSession(Message, tag="end_session"):
    """Release the session's promises and these leases (None: every lease). With `goodbye` the session itself ends, and
    every lease with it."""

    rid: int
    goodbye: bool = False
    leases: list[int] | None = None


class Clear(Message, tag="clear"):
    """A fence over one namespace, or over all (None). `tiers`: nothing older comes back from a tier either."""

    rid: int
    namespace: int | None
    tiers: bool = False


class Explain(Message, tag="explain"):
    """Where are these keys, or why are they missing? Only for namespaces of this session; at most `EXPLAIN_KEYS_MAX`
    keys. The reply waits until the tiers have answered, or for `TIER_LOOKUP_S`."""

    rid: int
    namespace: int
    keys: bytes


class WaitStored(Message, tag="wait_stored"):
    """Do the tiers have these keys? Like `Explain`, but from the accounts of the tiers, which are not asked. The reply
    waits until none of the keys is on its way to a tier any more, `wait_s` at most (no longer than
    `STORED_WAIT_S_MAX`). Answered by `Explained`, where a byte of `found` is 2 for a key that is on its way."""

    rid: int
    namespace: int
    keys: bytes
    wait_s: float = 0.0


class Pin(Message, tag="pin"):
    rid: int
    namespace: int
    keys: bytes
    ttl_s: float


class Unpin(Message, tag="unpin"):
    rid: int
    namespace: int
    keys: bytes


class Tiers(Message, tag="tiers"):
    """The tiers with their status and settings."""

    rid: int


class ChangeTier(Message, tag="change_tier"):
    """`action`: add, drain, remove or reconfigure. `values` as in a table of the settings file, `texts` as in flags,
    by dotted name. Answered by `Done`. Over the lifeline only, and only for the server's own user."""

    rid: int
    action: str
    tier: str
    values: dict[str, Any] = {}
    texts: dict[str, str] = {}


class ReportBlocks(Message, tag="report_blocks"):
    """Which blocks an engine keeps under these keys: `hashes` in prefix order, the same number for each key, and the
    hash before the first of them. For a namespace of this session. Answered by `Done`: how many of the keys were passed
    on; 0 if nobody wants blocks."""

    rid: int
    namespace: int
    keys: bytes
    hashes: list[bytes]
    parent: bytes | None
    block_size: int
    lora_id: int | None = None
    lora_name: str | None = None
    group: int | None = None
    token_ids: list[int] = []


class ChangeRecording(Message, tag="change_recording"):
    """Record the server's requests into `dir`, on its machine; None: stop. `settings` as in the table [record].
    Answered by `Done`. Only over the lifeline, and only for the server's own user."""

    rid: int
    dir: str | None
    settings: dict[str, Any] = {}


class QuotasRequest(Message, tag="quotas"):
    """The tenants with a quota and what they use, from number `first` on."""

    rid: int
    first: int = 0


class SetQuota(Message, tag="set_quota"):
    """A tenant's namespaces (None: unchanged) and its quotas in these stores, `l1` or a tier: `reserved_bytes` and
    `limit_bytes`, or None. Stores that are not named stay as they are. Answered by `Done`. Only over the lifeline, and
    only for the server's own user."""

    rid: int
    tenant: str
    namespaces: list[int] | None = None
    stores: dict[str, dict[str, int | None]] = {}


class RemoveQuota(Message, tag="remove_quota"):
    """Remove a tenant. Answered by `Done`. Allowed as for `SetQuota`."""

    rid: int
    tenant: str


class Operate(Message, tag="operate"):
    """Call an operation of a companion by its documented names. Answered by `Operated`. Only over the lifeline, and
    only for the server's own user."""

    rid: int
    companion: str
    operation: str
    arguments: dict[str, Any] = {}


class CallOperation(Message, tag="call_operation"):
    """Call an operation that a plugin added. `body`: its own request, as MessagePack. Answered by `OperationReply`.
    Only over the lifeline, and only for the server's own user."""

    rid: int
    operation: str
    body: bytes


class GetChunkSize(Message, tag="get_chunk_size"):
    rid: int


class StatusRequest(Message, tag="status"):
    rid: int


class ConfigRequest(Message, tag="config"):
    """The server's settings, secrets hidden; for its own user."""

    rid: int


class Ping(Message, tag="ping"):
    rid: int
    payload: bytes = b""


class Noop(Message, tag="noop"):
    rid: int


Request = (
    Hello
    | Attach
    | RegisterLayout
    | LookupRequest
    | TracedLookup
    | Cancel
    | QueryPrefetchStatus
    | QueryLookupHits
    | FreeLookupLocks
    | RedeemPromise
    | PrepareStore
    | TracedPrepareStore
    | CommitStore
    | AbortStore
    | FinishRead
    | PrepareRetrieve
    | ReportDamaged
    | RenewLease
    | LeaseStatusOf
    | EndSession
    | Clear
    | Drop
    | Explain
    | WaitStored
    | Pin
    | Unpin
    | Tiers
    | ChangeTier
    | ReportBlocks
    | ChangeRecording
    | QuotasRequest
    | SetQuota
    | RemoveQuota
    | Operate
    | CallOperation
    | GetChunkSize
    | StatusRequest
    | ConfigRequest
    | Ping
    | Noop
)
