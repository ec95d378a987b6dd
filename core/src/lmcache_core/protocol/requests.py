"""A client's requests. The common rules are in `messages.py`, the ranges of all fields in `ranges.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from lmcache_core.limits import BATCH_KEYS_MAX, FRAME_BYTES_MAX
from lmcache_core.protocol import ranges as r

CHUNK_TOKENS = "chunk_tokens="  # begins a capability of a client: so many tokens make one of its keys
LIFE_TOKEN = "life_token"  # capability of a client: it takes a life token with the pool's descriptor, and keeps it
TRACES = "traces"  # capability of a server: it accepts the traces of requests


class Message(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False):
    """Base of all messages. `rid`: of a request, which a client's channel numbers as it sends it."""

    rid: r.U64


class Hello(Message, tag="hello"):
    """The first message of a session. `client_id` names the client instance, across reconnects."""

    version_min: r.Version
    version_max: r.Version
    client_id: r.ClientId
    name: r.SessionName
    pid: r.Pid
    capabilities: r.Names = []


class Attach(Message, tag="attach"):
    """The worker maps the pool: it has read `nonce` there, and holds the life lock of `row`, which is the one that
    `Welcome` named or, if that named none, a free one of its choice. `held`: the leases of the same client instance
    whose memory it may still touch; the server settles all others."""

    row: r.Row
    nonce: r.U64
    held: r.U64s = []


class AttachUnlocked(Attach, tag="attach_unlocked"):
    """The same from a worker that could not lock its row, because somebody else had locked it."""


class RegisterLayout(Message, tag="register_layout"):
    """Name a namespace that this session will use, and the layout of its objects. `label`: what people see instead of
    the id; empty: nothing."""

    namespace: r.U64
    dtype: r.Name
    shape: r.Shape
    memory_format: r.Axes
    fingerprint: r.U64
    label: r.Label = ""


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
    wait_s: r.Seconds = 0.0
    tiers: Annotated[Sequence[r.Word], Meta(max_length=BATCH_KEYS_MAX)] | None = None
    window: r.KeyCount = 0
    deadline_s: r.Seconds = 0.0
    pin_s: r.Seconds = 0.0
    policy: r.Word = ""
    warm_up: bool = False
    identify: bool = False


ORDINARY_LOOKUP = LookupOptions()


class LookupRequest(Message, tag="lookup"):
    """Which keys can be served?"""

    namespace: r.U64
    keys: r.Blob
    options: LookupOptions = ORDINARY_LOOKUP


class TracedLookup(LookupRequest, tag="traced_lookup"):
    """A lookup that belongs to a trace of the caller's: `traceparent` in the format of W3C Trace Context. For servers
    with `TRACES` in their `Welcome`."""

    traceparent: r.Text = ""


class Cancel(Message, tag="cancel"):
    """The lookup, the explanation, the wait for stores or the store with this rid is no longer wanted. Answered by
    `Done`; what it names is answered too, with what there is. Slots that a store was granted are free again."""

    lookup: r.U64


class QueryPrefetchStatus(Message, tag="query_prefetch_status"):
    job: r.U64


class QueryLookupHits(Message, tag="query_lookup_hits"):
    """Answered as soon as the hits are known, before the loads end."""

    job: r.U64


class FreeLookupLocks(Message, tag="free_lookup_locks"):
    promises: r.U64s


class RedeemPromise(Message, tag="redeem_promise"):
    """These keys of a promise were read without a lease: it no longer holds them, but still holds the others. From any
    session of the namespace. Answered by `Done`: how many of the keys were held."""

    promise: r.U64
    namespace: r.U64
    keys: r.Blob


class PrepareStore(Message, tag="prepare_store"):
    """`lease` 0 opens a lease; otherwise the keys are the next page of that one."""

    namespace: r.U64
    keys: r.Blob
    lease: r.U64 = 0


class TracedPrepareStore(PrepareStore, tag="traced_prepare_store"):
    """A store that belongs to a trace. See `TracedLookup`."""

    traceparent: r.Text = ""


class Settle(Message):
    """Settle positions of a lease: `count` of them from `first`, or those packed as u32 in `positions`."""

    lease: r.U64
    first: r.Position = 0
    count: r.KeyCount = 0
    positions: r.KeyU32s = b""


class CommitStore(Settle, tag="commit_store"):
    """`checksums`: the xxh3_64 of each position's bytes as packed u64, 0 if unknown; or empty."""

    checksums: r.KeyU64s = b""


class AbortStore(Settle, tag="abort_store"):
    pass


class FinishRead(Settle, tag="finish_read"):
    pass


class PrepareRetrieve(Message, tag="prepare_retrieve"):
    """`prefix`: grant only up to the first missing key. `promise` is redeemed by this. `verify`: also return the
    checksums; `identify`: also return the granted incarnations."""

    namespace: r.U64
    keys: r.Blob
    lease: r.U64 = 0
    promise: r.U64 = 0
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

    namespace: r.U64
    keys: r.Blob
    incarnations: r.KeyU64s
    tiers: bool = False
    damaged: bool = False


class RenewLease(Message, tag="renew_lease"):
    lease: r.U64


class LeaseStatusOf(Message, tag="lease_status"):
    lease: r.U64


class EndSession(Message, tag="end_session"):
    """Release the session's promises and these leases (None: every lease). With `goodbye` the session itself ends, and
    every lease with it."""

    goodbye: bool = False
    leases: r.U64s | None = None


class Clear(Message, tag="clear"):
    """A fence over one namespace, or over all (None). `tiers`: nothing older comes back from a tier either."""

    namespace: r.U64 | None
    tiers: bool = False


class Explain(Message, tag="explain"):
    """Where are these keys, or why are they missing? Only for namespaces of this session; at most `EXPLAIN_KEYS_MAX`
    keys. The reply waits until the tiers have answered, or for `TIER_LOOKUP_S`."""

    namespace: r.U64
    keys: r.Blob


class WaitStored(Message, tag="wait_stored"):
    """Do the tiers have these keys? Like `Explain`, but from the accounts of the tiers, which are not asked. The reply
    waits until none of the keys is on its way to a tier any more, `wait_s` at most (no longer than
    `STORED_WAIT_S_MAX`). Answered by `Explained`, where a byte of `found` is 2 for a key that is on its way."""

    namespace: r.U64
    keys: r.Blob
    wait_s: r.Seconds = 0.0


class Pin(Message, tag="pin"):
    namespace: r.U64
    keys: r.Blob
    ttl_s: r.Seconds


class Unpin(Message, tag="unpin"):
    namespace: r.U64
    keys: r.Blob


class Tiers(Message, tag="tiers"):
    """The tiers with their status and settings."""


class ChangeTier(Message, tag="change_tier"):
    """`action`: add, drain, remove or reconfigure. `values` as in a table of the settings file, `texts` as in flags,
    by dotted name. Answered by `Done`. Over the lifeline only, and only for the server's own user."""

    action: r.Name
    tier: r.TierName
    values: r.Values = {}
    texts: dict[r.Name, r.Text] = {}


class ReportBlocks(Message, tag="report_blocks"):
    """Which blocks an engine keeps under these keys: `hashes` in prefix order, the same number for each key, and the
    hash before the first of them. For a namespace of this session. Answered by `Done`: how many of the keys were passed
    on; 0 if nobody wants blocks."""

    namespace: r.U64
    keys: r.Blob
    hashes: Annotated[list[r.BlockHash], Meta(max_length=BATCH_KEYS_MAX)]
    parent: r.BlockHash | None
    block_size: r.Positive
    lora_id: r.U64 | None = None
    lora_name: r.Name | None = None
    group: r.U32 | None = None
    token_ids: Annotated[list[r.U32], Meta(max_length=FRAME_BYTES_MAX)] = []


class QuotasRequest(Message, tag="quotas"):
    """The tenants with a quota and what they use, from number `first` on."""

    first: r.U32 = 0


class SetQuota(Message, tag="set_quota"):
    """A tenant's namespaces (None: unchanged) and its quotas in these stores, `l1` or a tier: `reserved_bytes` and
    `limit_bytes`, or None. Stores that are not named stay as they are. Answered by `Done`. Only over the lifeline, and
    only for the server's own user."""

    tenant: r.Name
    namespaces: r.U64s | None = None
    stores: dict[r.TierName, dict[r.Name, r.I63 | None]] = {}


class RemoveQuota(Message, tag="remove_quota"):
    """Remove a tenant. Answered by `Done`. Allowed as for `SetQuota`."""

    tenant: r.Name


class Operate(Message, tag="operate"):
    """Call an operation of a companion by its documented names. Answered by `Operated`. Only over the lifeline, and
    only for the server's own user."""

    companion: r.Name
    operation: r.Name
    arguments: r.Values = {}


class CallOperation(Message, tag="call_operation"):
    """Call an operation that a plugin added. `body`: its own request, as MessagePack. Answered by `OperationReply`.
    Only over the lifeline, and only for the server's own user."""

    operation: r.Name
    body: r.Blob


class GetChunkSize(Message, tag="get_chunk_size"): ...


class StatusRequest(Message, tag="status"): ...


class ConfigRequest(Message, tag="config"):
    """The server's settings, secrets hidden; for its own user."""


class Ping(Message, tag="ping"):
    payload: r.Blob = b""


class Noop(Message, tag="noop"): ...


Request = (
    Hello
    | Attach
    | AttachUnlocked
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
