"""Every message of the protocol: MessagePack arrays, tagged, versioned, unknown fields refused.

A request carries `rid`, chosen by the client; the reply carries it back, and replies come in any order. Keys
travel as one blob of n × 32 bytes; replies are positional: one status byte and one u64 offset a key. There is no
pickle anywhere, and nothing in a message is executed or looked up by name.
"""

from __future__ import annotations

from typing import Any

import msgspec

PROTOCOL_VERSION_MIN = 1
PROTOCOL_VERSION_MAX = 1


class Message(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False):
    """Base of all messages."""


# --- requests ----------------------------------------------------------------------------------------------------


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
    """The worker maps the pool: it read `nonce` from its row, whose life lock it holds. `held` are the leases of
    the same client instance whose memory it may still touch; the server settles all its others."""

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


class Lookup(Message, tag="lookup"):
    """Which keys can be served? `wait_s` > 0: the reply may come later, when loads from tiers have ended. `tiers`:
    search these only; None: all; []: none.

    `prefix`: the keys from the first on; without it each key for itself; `window` > 0: the last `window` keys of
    the longest run that ends in them. `deadline_s` > 0: the tiers have so long, whether or not the reply waits for
    them. `pin_s` > 0: pin what is found. `policy`: load by this prefetch policy rather than by the server's.
    `warm_up`: nobody waits for it; everyone else goes first.
    """

    rid: int
    namespace: int
    keys: bytes
    hold: bool = False
    prefix: bool = True
    wait_s: float = 0.0
    tiers: list[str] | None = None
    window: int = 0
    deadline_s: float = 0.0
    pin_s: float = 0.0
    policy: str = ""
    warm_up: bool = False


class Cancel(Message, tag="cancel"):
    """The lookup with this rid is no longer wanted. Answered by `Done`; the lookup itself is answered too."""

    rid: int
    lookup: int


class QueryPrefetchStatus(Message, tag="query_prefetch_status"):
    rid: int
    job: int


class QueryLookupHits(Message, tag="query_lookup_hits"):
    """Answered as soon as it is known what will be a hit, before the loads end."""

    rid: int
    job: int


class FreeLookupLocks(Message, tag="free_lookup_locks"):
    rid: int
    promises: list[int]


class PrepareStore(Message, tag="prepare_store"):
    """`lease` 0 opens a lease; otherwise the keys are the next page of that one."""

    rid: int
    namespace: int
    keys: bytes
    lease: int = 0


class Settle(Message):
    """Settle positions of a lease: `count` of them from `first`, or those packed as u32 in `positions`."""

    rid: int
    lease: int
    first: int = 0
    count: int = 0
    positions: bytes = b""


class CommitStore(Settle, tag="commit_store"):
    pass


class AbortStore(Settle, tag="abort_store"):
    pass


class FinishRead(Settle, tag="finish_read"):
    pass


class PrepareRetrieve(Message, tag="prepare_retrieve"):
    """`prefix`: grant only up to the first key that is not there. `promise` is redeemed by this."""

    rid: int
    namespace: int
    keys: bytes
    lease: int = 0
    promise: int = 0
    prefix: bool = False


class RenewLease(Message, tag="renew_lease"):
    rid: int
    lease: int


class LeaseStatusOf(Message, tag="lease_status"):
    rid: int
    lease: int


class EndSession(Message, tag="end_session"):
    """Release every lease of the session. With `goodbye` the session itself ends, too."""

    rid: int
    goodbye: bool = False


class Clear(Message, tag="clear"):
    """A fence over one namespace, or over all (None). `tiers`: nothing older comes back from a tier either."""

    rid: int
    namespace: int | None
    tiers: bool = False


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


class GetChunkSize(Message, tag="get_chunk_size"):
    rid: int


class Status(Message, tag="status"):
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
    | Lookup
    | Cancel
    | QueryPrefetchStatus
    | QueryLookupHits
    | FreeLookupLocks
    | PrepareStore
    | CommitStore
    | AbortStore
    | FinishRead
    | PrepareRetrieve
    | RenewLease
    | LeaseStatusOf
    | EndSession
    | Clear
    | Pin
    | Unpin
    | Tiers
    | ChangeTier
    | GetChunkSize
    | Status
    | Ping
    | Noop
)

# --- replies -----------------------------------------------------------------------------------------------------


class Welcome(Message, tag="welcome"):
    """The answer to `Hello`. On the lifeline the pool's descriptor travels with it."""

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
    capabilities: list[str] = []


class Attached(Message, tag="attached"):
    """`held`: the leases that go on."""

    rid: int
    held: list[int]


class LayoutRegistered(Message, tag="layout_registered"):
    rid: int
    layout: int
    slot_bytes: int


class Found(Message, tag="found"):
    """Answer to lookups and to queries about them. `hits`: what can be served, now or once `job` has ended. It
    counts keys from the first on; of a lookup without `prefix`, all keys that can be served; of a window it is its
    end. `done`: nothing is being loaded for this lookup any more."""

    rid: int
    statuses: bytes
    reasons: bytes
    hits: int
    done: bool
    promise: int = 0
    deadline_s: float = 0.0
    job: int = 0


class Granted(Message, tag="granted"):
    """Answer to prepare_*. `ttl_s` counts from now; `offsets` are u64, packed, 0 where nothing was granted."""

    rid: int
    lease: int
    ttl_s: float
    statuses: bytes
    reasons: bytes
    offsets: bytes


class SettledReply(Message, tag="settled"):
    """One byte for each position asked for."""

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


class Cleared(Message, tag="cleared"):
    rid: int
    objects: int
    nbytes: int
    doomed: int


class Pinned(Message, tag="pinned"):
    rid: int
    statuses: bytes


class ChunkSize(Message, tag="chunk_size"):
    rid: int
    tokens: int


class StatusReply(Message, tag="status_reply"):
    rid: int
    status: dict[str, Any]


class TiersReply(Message, tag="tiers_reply"):
    """In order. Secrets among the settings are hidden."""

    rid: int
    tiers: list[dict[str, Any]]


class Pong(Message, tag="pong"):
    rid: int
    payload: bytes


class Done(Message, tag="done"):
    rid: int
    count: int = 0


class Error(Message, tag="error"):
    """Every request that is not answered by a result is answered by this. `rid` 0: it could not be read."""

    rid: int
    code: str
    message: str
    retry: str


class LeaseExpired(Message, tag="lease_expired"):
    """A notice: nobody asked. The lease's keys are free; settle it when the last copy has ended."""

    rid: int  # always 0
    lease: int
    kind: str


Reply = (
    Welcome
    | Attached
    | LayoutRegistered
    | Found
    | Granted
    | SettledReply
    | Renewed
    | LeaseState
    | Cleared
    | Pinned
    | ChunkSize
    | StatusReply
    | TiersReply
    | Pong
    | Done
    | Error
    | LeaseExpired
)
