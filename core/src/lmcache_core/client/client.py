"""The client: what a worker or a scheduler calls. Thread-safe; connects when it must, and again when it must."""

from __future__ import annotations

import math
import sys
import time
import warnings
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Literal, Self, TypeVar

import msgspec

from lmcache_core.client.address import CurveKeys
from lmcache_core.client.boundaries import CommonHits, CommonLookups, KeyGroup
from lmcache_core.client.channel import expect
from lmcache_core.client.copying import CopyThreads, copy_in, copying_threads, spans
from lmcache_core.client.engine_blocks import EngineBlocks
from lmcache_core.client.explaining import KeyExplanation, explain_pages
from lmcache_core.client.hits import Hits, checked_keys, verify_level
from lmcache_core.client.leases import ReadLease, WriteLease
from lmcache_core.client.link import Link, Target
from lmcache_core.client.links import Links
from lmcache_core.client.lookups import ClientLookupOptions, ClientLookups, LookupHandle
from lmcache_core.client.page_jobs import PagesResult
from lmcache_core.client.pages import PageEntry, Pages
from lmcache_core.client.presence import Presence
from lmcache_core.client.promises import Promise, frames_of
from lmcache_core.client.regions import PageGroup, Region
from lmcache_core.client.results import LookupResult, RetrieveResult, Status, StoreResult, grant_statuses
from lmcache_core.client.retrieving import Retriever
from lmcache_core.client.stored import StoredKey, wait_stored
from lmcache_core.client.tracing import check_traceparent
from lmcache_core.errors import DisconnectedError, ForgottenError, LimitError, UnknownNamespaceError, UsageError
from lmcache_core.kernel.answers import Reason
from lmcache_core.limits import (
    BATCH_KEYS_MAX,
    CALL_TIMEOUT_S,
    CLOSE_TIMEOUT_S,
    CONNECT_TIMEOUT_S,
    LINK_WAIT_PAUSE_S,
    PIN_TTL_S,
    STORE_PAGE_KEYS,
)
from lmcache_core.pool.cuda import pin_for_cuda
from lmcache_core.pool.layout import Layout
from lmcache_core.protocol import messages as m
from lmcache_core.protocol.address import check_address
from lmcache_core.protocol.codec import join_keys, pack_u64
from lmcache_core.tokens.canonical import Tokens
from lmcache_core.tokens.keys import chunk_keys
from lmcache_core.tokens.namespace import Namespace

_Reply = TypeVar("_Reply", bound=msgspec.Struct)


class Client:
    """One client instance. Made by `Client.connect`; use it as a context manager, or `close` it.

    Losing the server ends an operation in bounded time with a value (`Status.UNREACHABLE`); the next one works
    once the server is back. Only misuse raises, and questions that have no such value (`status`, `clear`, …)
    raise `DisconnectedError`, or what the server refused this client with. The logger `lmcache_core.client` has one
    line when the server cannot be reached for the first time, and one when it can again.
    """

    def __init__(self, target: Target, copy_threads: CopyThreads = "auto", verify: str = "never") -> None:
        self._links = Links(target)
        self._name = target.address or target.name
        self._made_at = _caller()
        self._copy_threads = copying_threads(copy_threads)
        self._verify = verify_level(verify)
        self._hits = Hits(self._links, self._copy_threads)
        self._lookups = ClientLookups(self._links, self._hits, trace=target.trace)
        self._common = CommonLookups(self._lookups, self._hits)
        self._retriever = Retriever(self._links, self._hits, self._copy_threads)

    @classmethod
    def connect(
        cls,
        name: str = "default",
        *,
        runtime_dir: str | Path | None = None,
        address: str | None = None,
        curve: CurveKeys | None = None,
        client_name: str = "",
        maps_pool: bool = True,
        copy_threads: CopyThreads = "auto",
        use_index: bool = True,
        verify: str = "never",
        server_uid: int | None = None,
        call_timeout_s: float = CALL_TIMEOUT_S,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        wait_s: float = LINK_WAIT_PAUSE_S,
        trace: bool = False,
    ) -> Client:
        """A client of the server `name` on this node, or of the one at a ZMQ `address`.

        Returns at once, whether or not the server is there: until it is, lookups miss and stores are not stored.
        `maps_pool=False` is for a scheduler that only looks up. `copy_threads`: how many threads may copy the bytes
        of one call. "auto": one for each 4 MiB, up to four, and no more than processors have nothing to do when the
        copy begins; 0: half of the processors that are ours, up to four; or a number. Small batches take fewer.
        `use_index=False` asks the server for every hit, which otherwise is found in the pool without a call, and
        outlives a server that dies. `verify`: the default of `retrieve`. `server_uid`: the user whom the server runs
        as, where that is neither ours nor root (None: `LMCACHE_CORE_SERVER_UID`, if it is set); to any other server,
        and through any directory that others may write, nothing is said.

        `call_timeout_s`: how long a call waits for its answer. After one that waited in vain the server counts as
        silent: further calls end at once, until it is heard again. `connect_timeout_s`: how long the first call, and
        later questions, wait for a server that is there and has not answered yet. Other calls that find no link wait
        20 ms for one, and no two of these waits begin within `wait_s`.

        `trace`: lookups and stores that the server is asked for belong to the trace that OpenTelemetry calls current in
        the calling thread (where its API is installed), unless they are given a `traceparent`, the text of W3C Trace
        Context. Servers that export no traces are told nothing of it.
        """
        root = Path(runtime_dir) if runtime_dir is not None else None
        target = Target(
            name,
            root,
            None if address is None else check_address(address),
            curve,
            client_name,
            maps_pool,
            use_index=use_index,
            server_uid=server_uid,
            call_timeout_s=call_timeout_s,
            connect_timeout_s=connect_timeout_s,
            wait_s=wait_s,
            trace=trace,
        )
        return cls(target, copy_threads, verify)

    @property
    def why_unreachable(self) -> str:
        """Why the server cannot be reached, in words; empty while it can, and before anything was asked of it."""
        return self._links.why_unreachable

    @property
    def wants_blocks(self) -> bool:
        """Whether the server asks which of an engine's blocks objects hold (`report_block_allocation`); False while
        there is none. Makes no call."""
        link = self._links.look()
        return link is not None and link.wants_blocks and not link.channel.lost

    # --- whole operations ---------------------------------------------------------------------------------

    def register_layout(self, namespace: Namespace) -> bool:
        """Tell the server of a namespace and its layout now, rather than at its first use.

        Returns whether a server heard it; where none did, it will be told once it is there. Raises `UsageError`
        where no object of that layout fits into the pool (each store would answer `TOO_LARGE`).
        """

        def register(link: Link) -> Link:
            link.bind(namespace)
            return link

        try:
            link = self._links.asked(register, patient=True)
        except DisconnectedError:
            return False
        layout, pool_bytes = namespace.layout, link.pool.data_bytes
        if layout.nbytes > pool_bytes:
            raise UsageError(
                f"an object of layout {layout} has {layout.nbytes:,} bytes and the pool {link.pool.name!r} only "
                f"{pool_bytes:,}: raise l1.size_bytes, or use fewer tokens a chunk"
            )
        return True

    def store(
        self,
        keys: Sequence[bytes],
        sources: Sequence[Any],
        *,
        namespace: Namespace,
        blocks: EngineBlocks | None = None,
        traceparent: str = "",
    ) -> StoreResult:
        """Store one object a key. `sources`: torch tensors or contiguous buffers of the namespace's layout. `blocks`:
        which of an engine's blocks these are, for routers; see `report_block_allocation`, which it calls first.
        `traceparent`: the trace that this belongs to; see `connect`.

        Returns a status for each key. Raises `UsageError` for objects that do not have the layout.
        """
        keys = checked_keys(keys)
        layout = namespace.layout
        found = spans(sources, len(keys), layout, writable=False)
        if blocks is not None:
            self.report_block_allocation(keys, blocks, namespace=namespace)
        with WriteLease(self._links, namespace, Presence()) as lease:
            lease.traceparent = check_traceparent(traceparent)
            for first in range(0, len(keys), STORE_PAGE_KEYS):
                lease.ask(keys[first : first + STORE_PAGE_KEYS])
                if lease.granted:
                    mapping, slots = lease.slots(first)
                    checksums = copy_in(
                        mapping.address, slots, found, layout, threads=self._copy_threads, checksums=True
                    )
                    lease.settle_quietly(m.CommitStore, first, checksums)
            return StoreResult(lease.statuses)

    def retrieve(
        self,
        keys: Sequence[bytes],
        into: Sequence[Any],
        *,
        namespace: Namespace,
        prefix: bool = True,
        promise: Promise | None = None,
        verify: str | None = None,
    ) -> RetrieveResult:
        """Copy objects out, each into its own tensor or buffer of the namespace's layout.

        With `prefix` it ends at the first key that is not there; otherwise every key stands for itself. `promise`
        (of a `lookup(hold=True)` of these keys) is redeemed. What was not there is not written to; an object
        that left, or proved damaged, while it was copied is no hit, and leaves anything behind in its target.

        `verify`: compare the bytes with the checksum that they were stored with: "never", "first" (each object once
        in this process; without the index: always) or "always". A damaged one is a miss, and the server drops it.
        """
        keys = checked_keys(keys)
        found = spans(into, len(keys), namespace.layout, writable=True)
        level = self._verify if verify is None else verify_level(verify)
        return self._retriever.retrieve(keys, found, namespace, prefix, promise, level)

    # --- an engine's pages --------------------------------------------------------------------------------

    def register_pages(self, groups: Sequence[PageGroup]) -> Pages:
        """Pages of the caller's own memory, from which `store` gathers objects and into which `retrieve` scatters them,
        without a copy in between. The memory must stay where it is for as long as the `Pages` are used.

        Raises `UsageError` for regions that do not fit into their buffers, pages of a group that lie over one another,
        and a layout that is not as large as an object's pages. Groups may share memory.
        """
        return Pages(self._links, self._hits, groups, self._copy_threads, self._verify)

    def store_strided(
        self,
        keys: Sequence[bytes],
        regions: Sequence[Region],
        page_ids: Any,
        *,
        namespace: Namespace,
        pages_per_object: int = 1,
        valid_pages: int | None = None,
    ) -> StoreResult:
        """Store objects out of memory that is not registered, as it moves from call to call. See `Pages.store`."""
        pages = self.register_pages([PageGroup(namespace, regions, pages_per_object)])
        return StoreResult(pages.store([PageEntry(0, keys, page_ids, 0, valid_pages)]).statuses[0])

    def retrieve_strided(
        self,
        keys: Sequence[bytes],
        regions: Sequence[Region],
        page_ids: Any,
        *,
        namespace: Namespace,
        pages_per_object: int = 1,
        skip_pages: int = 0,
        valid_pages: int | None = None,
        promise: Promise | None = None,
        verify: str | None = None,
    ) -> PagesResult:
        """Copy objects into memory that is not registered. Each key stands for itself. See `Pages.retrieve`."""
        pages = self.register_pages([PageGroup(namespace, regions, pages_per_object)])
        entry = PageEntry(0, keys, page_ids, skip_pages, valid_pages)
        return pages.retrieve([entry], promises=[promise], verify=verify)

    # --- what is there --------------------------------------------------------------------------------------

    def lookup(
        self,
        keys: Sequence[bytes],
        *,
        namespace: Namespace,
        hold: bool | Literal["if_possible"] = False,
        prefix: bool = True,
        wait_s: float = 0.0,
        tiers: Sequence[str] | None = None,
        window: int = 0,
        deadline_s: float = 0.0,
        pin_s: float = 0.0,
        policy: str = "",
        identify: bool = False,
        ask: bool = True,
        traceparent: str = "",
    ) -> LookupResult:
        """Which keys can be served? Missing ones are looked for on the tiers (or on those named) and loaded.

        `wait_s`: wait that long for the loads. `hold`: keep the hits until the promise is redeemed or expires; the
        server alone can promise, so without it the answer is `UNREACHABLE`. With `"if_possible"` the index answers
        then, and there is no promise.
        `deadline_s`: how long the loads may take, where that is not `wait_s` (0: 30 s in the background).
        `prefix=False`: each key for itself. `window`: only the last so many keys of the longest run that ends in
        them are worth loading (layers with sliding attention). `pin_s`: pin the hits for so long. `policy`: a
        prefetch policy for this lookup alone, by name; `"retain"` keeps what it loads. `identify`: the result says
        which incarnations were found, for `drop`; a retrieve's always does. `ask=False`: go by the index alone; what it
        does not have is a miss. Then no call is made, but one where something was found that is to be held.
        `traceparent`: the trace that this belongs to; see `connect`.
        """
        keys = checked_keys(keys)
        if traceparent:
            traceparent = check_traceparent(traceparent)
        # By position, in the order of their declaration: by name it would cost each lookup 0.2 µs.
        options = ClientLookupOptions(
            bool(hold), prefix, wait_s, tiers, window, deadline_s, pin_s, policy, False, identify,
            hold == "if_possible", traceparent,
        )  # fmt: skip
        if not ask:
            return self._lookups.by_index(keys, namespace, options)
        if identify:
            return self._lookups.identified(keys, namespace, options)
        return self._lookups.lookup(keys, namespace, options)

    def lookup_nowait(
        self,
        keys: Sequence[bytes],
        *,
        namespace: Namespace,
        hold: bool | Literal["if_possible"] = False,
        prefix: bool = True,
        wait_s: float = 30.0,
        tiers: Sequence[str] | None = None,
        window: int = 0,
        deadline_s: float = 0.0,
        pin_s: float = 0.0,
        policy: str = "",
        identify: bool = False,
        traceparent: str = "",
    ) -> LookupHandle:
        """As `lookup`, for callers that must not block: the handle has `so_far` at once, which is what the index has,
        and `done`, `result`, `wait` and `cancel` for the rest, which the server is asked for. One frame of keys at
        most. Neither this nor the handle ever waits for the server, but for `wait`."""
        keys = checked_keys(keys)
        if len(keys) > BATCH_KEYS_MAX:
            raise LimitError(f"{len(keys)} keys in lookup_nowait, and it takes {BATCH_KEYS_MAX}: ask in pages")
        if traceparent:
            traceparent = check_traceparent(traceparent)
        # By position, in the order of their declaration: by name it would cost each lookup 0.2 µs.
        options = ClientLookupOptions(
            bool(hold), prefix, wait_s, tiers, window, deadline_s, pin_s, policy, False, identify,
            hold == "if_possible", traceparent,
        )  # fmt: skip
        return self._lookups.start(keys, namespace, options)

    def lookup_many(
        self,
        groups: Sequence[KeyGroup | tuple[Any, ...]],
        *,
        unit_tokens: int | Sequence[int],
        hold: bool | Literal["if_possible"] = False,
        ask: bool = True,
        wait_s: float = 0.0,
        tiers: Sequence[str] | None = None,
        deadline_s: float = 0.0,
        policy: str = "",
        traceparent: str = "",
    ) -> CommonHits:
        """The longest prefix of a prompt, in tokens, that all KV groups of all ranks can serve: `found.tokens`.

        `groups`: namespace, keys and `Need` of each (see `KeyGroup`); the i-th key stands for the i-th chunk of the
        prompt. `unit_tokens`: the tokens of a chunk, of all groups or of each. The boundary is a multiple of all of
        them. `found.groups` says which keys each group has to load, with start and end in tokens.

        The index answers first. The server is asked, and through it the tiers, for what a group lacks to reach the
        boundary of the others, unless `ask` is false: then no call is made. `hold`: a call for each group that has
        something to load keeps that in the pool; `found.promise` is one for all, `found.promises` has it by group. The
        other options are those of `lookup`.
        """
        options = ClientLookupOptions(
            hold=bool(hold),
            wait_s=wait_s,
            tiers=tiers,
            deadline_s=deadline_s,
            policy=policy,
            if_possible=hold == "if_possible",
            traceparent=check_traceparent(traceparent) if traceparent else "",
        )
        return self._common.lookup(groups, unit_tokens, options, ask)

    # --- the two phases -----------------------------------------------------------------------------------

    def prepare_store(self, keys: Sequence[bytes], *, namespace: Namespace, traceparent: str = "") -> WriteLease:
        """Slots to write these keys into, for those that are granted. Commit or abort the lease. `traceparent`: the
        trace that this belongs to; see `connect`."""
        keys = checked_keys(keys)
        lease = WriteLease(self._links, namespace, threads=self._copy_threads)
        try:
            lease.traceparent = check_traceparent(traceparent)
            for first in range(0, len(keys), STORE_PAGE_KEYS):
                lease.ask(keys[first : first + STORE_PAGE_KEYS])
        except BaseException:
            lease.close()
            raise
        return lease

    def prepare_retrieve(
        self,
        keys: Sequence[bytes],
        *,
        namespace: Namespace,
        promise: Promise | None = None,
        prefix: bool = True,
        optimistic: bool = False,
    ) -> ReadLease:
        """Slots to read these keys in place. Finish the lease soon: it keeps them from being evicted.

        `optimistic`: what the index has is read without a call, also while the server is gone or hangs, and nothing
        keeps it from being evicted meanwhile. `finish` says of each position whether what was read there stands; use
        nothing of it before. What the index does not have is a `MISS`. Where there is no index to go by, as before the
        first call in the namespace, it is a lease like any other.
        """
        keys = checked_keys(keys)
        if optimistic and promise:
            raise UsageError("a promise is redeemed with the server: give it without optimistic=True")
        lease = ReadLease(self._links, namespace)
        try:
            if optimistic and lease.find(self._hits, keys, prefix):
                return lease
            for first, end, number in frames_of(keys, promise, BATCH_KEYS_MAX):
                lease.ask(keys[first:end], number, prefix)
                lease.watch(keys[first:end])
                lease.drop_damaged(first)
                if prefix and lease.hits < len(lease.statuses):
                    break
        except BaseException:
            lease.close()
            raise
        if len(lease.statuses) < len(keys):
            lease.add_ungranted(Status.MISS, Reason.NONE, len(keys) - len(lease.statuses))
        return lease

    def free_lookup_locks(self, promise: Promise | Sequence[int] | None) -> int:
        """Give a promise of this client back unredeemed, as a whole also where it was sliced; or the server's numbers
        of promises. Returns how many of the numbers still kept something; 0 where no server is, which hears of it as
        soon as there is one."""
        if promise is None:
            return 0
        numbers = promise.numbers if isinstance(promise, Promise) else list(promise)
        if not all(type(number) is int and 0 <= number < 1 << 64 for number in numbers):
            raise UsageError(
                f"{promise!r} is neither a promise nor a list of numbers of promises: give one promise a call"
            )
        try:
            return expect(self._ask(lambda rid: m.FreeLookupLocks(rid, numbers)), m.Done).count
        except (DisconnectedError, LimitError):
            self._links.free_later(numbers)
            return 0

    def _free_later(self, promises: Sequence[int]) -> None:
        """With the next call. Takes no lock: a finalizer may call this."""
        self._links.free_later(promises)

    def renew(self, promise: Promise) -> Promise:
        """The same promise with its time begun anew, and with it that of all its slices. Raises `LeaseExpiredError`
        where some of it keeps nothing any more, as it was redeemed, given back, or too old, and `DisconnectedError`. A
        promise is renewed by the client that it was made to."""
        ttl_s = math.inf
        for number in promise.numbers:
            reply = self._ask(partial(_renewal, number))
            ttl_s = min(ttl_s, expect(reply, m.Renewed).ttl_s)
        return promise if ttl_s == math.inf else replace(promise, expires_at=time.monotonic() + ttl_s)

    def pin_memory(self) -> bool:
        """Register this process's mapping of the pool with CUDA: GPUs then read and write slots directly, and copies
        with `non_blocking=True` are asynchronous. Lasts until the last view of the mapping is gone.

        False: it was registered already, so calling this again costs nothing; after a reconnect to a new pool it is
        needed again. Raises `UsageError` without torch or a GPU, `PoolError` where CUDA refuses, `NotAttachedError`
        where this client does not map the pool, and `DisconnectedError`.
        """
        return pin_for_cuda(self._links.current(patient=True).mapped().mapping)

    # --- everything else ----------------------------------------------------------------------------------

    def end_session(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Release every lease and promise of this client; views die. It can go on with new ones.

        Waits up to `timeout_s` for copies that other threads make; what has not ended by then keeps its lease until it
        has. Raises `DisconnectedError`.
        """
        self._links.end_session(timeout_s)

    def clear(self, namespace: Namespace | None = None, *, tiers: bool = False) -> m.ClearedReply:
        """Forget a namespace (None: everything), as a fence; with `tiers`, there too. Everything is for the server's
        own user and root to clear: `UsageError` for others."""
        if namespace is None:
            return expect(self._ask(lambda rid: m.Clear(rid, None, tiers)), m.ClearedReply)
        # Registered first: only the server's own user clears what it has not registered.
        chosen = namespace.id
        make = partial(_ask_in, namespace, lambda rid: m.Clear(rid, chosen, tiers))
        return expect(self._links.asked(make, patient=True), m.ClearedReply)

    def clear_by_id(self, namespace_id: int | None, *, tiers: bool = False) -> m.ClearedReply:
        """The same for the server's own user, who may name a namespace by its id alone."""
        return expect(self._ask(lambda rid: m.Clear(rid, namespace_id, tiers)), m.ClearedReply)

    def drop(
        self, keys: Sequence[bytes], *, namespace: Namespace, incarnations: Sequence[int], tiers: bool = True
    ) -> int:
        """These objects are not to be served again: they proved wrong, or nobody wants them. How many were in the pool.

        `incarnations`: which ones, as the result of a retrieve, or of a lookup with `identify`, has them; positions
        where it has 0 are left alone. What has been stored under the same key since stays. With `tiers` what tiers
        have under these keys is deleted, too, in the background: a tier does not know incarnations. One whose medium
        allows no deletes keeps them, and the next lookup may load them again: there only `clear` helps. Raises
        `UsageError` for a namespace that is not this client's, and `DisconnectedError`.
        """
        return self._drop(keys, namespace, incarnations, tiers=tiers, damaged=False)

    def report_damaged(self, keys: Sequence[bytes], *, namespace: Namespace, incarnations: Sequence[int]) -> int:
        """The bytes of these objects in the pool are not what was stored: nobody is given them any more, and later
        misses say `DAMAGED`. How many were in the pool. What tiers have was checked on its way and stays. See
        `drop`."""
        return self._drop(keys, namespace, incarnations, tiers=False, damaged=True)

    def _drop(
        self, keys: Sequence[bytes], namespace: Namespace, incarnations: Sequence[int], *, tiers: bool, damaged: bool
    ) -> int:
        keys = checked_keys(keys)
        if len(keys) != len(incarnations):
            raise UsageError(f"{len(incarnations)} incarnations for {len(keys)} keys: give one for each key")
        for number in incarnations:
            if type(number) is not int or not 0 <= number < 1 << 64:
                raise UsageError(f"{number!r} is not an incarnation: give those that a retrieve or a lookup has found")
        chosen = [at for at, number in enumerate(incarnations) if number]
        dropped = 0
        for first in range(0, len(chosen), BATCH_KEYS_MAX):
            page = chosen[first : first + BATCH_KEYS_MAX]
            blob = join_keys([keys[at] for at in page])
            numbers = pack_u64(array("Q", [incarnations[at] for at in page]))

            def make(rid: int, blob: bytes = blob, numbers: bytes = numbers) -> m.Message:
                return m.Drop(rid, namespace.id, blob, numbers, tiers, damaged)

            reply = self._links.asked(partial(_ask_in, namespace, make), patient=True)
            dropped += expect(reply, m.Done).count
        return dropped

    def explain(
        self, keys: Sequence[bytes] | None = None, *, namespace: Namespace, tokens: Tokens | None = None
    ) -> list[KeyExplanation]:
        """Where keys are, or why they are not there: in the pool and on every tier, which are asked for it.

        Give `keys`, or `tokens`, from which they are derived with the server's chunk size. A namespace that this
        client has not used yet is registered by the question: who can say all of it may ask about it.
        """
        if (keys is None) == (tokens is None):
            raise UsageError("explain takes either keys or tokens: give one of them")
        return self._links.asked(lambda link: _explain(link, keys, namespace, tokens), patient=True)

    def wait_stored(self, keys: Sequence[bytes], *, namespace: Namespace, timeout_s: float = 30.0) -> list[StoredKey]:
        """Wait until the tiers have these keys, or never will: one `StoredKey` for each, in their order.

        Returns when nothing of them is on its way to a tier any more, at the latest after `timeout_s`; the server holds
        its answer back until then. By the tiers' books: no medium is asked (`explain` asks them). `stored` says whether
        every tier that was to have the key has it; `lost` and `why` say what was in the way. What was stored before
        this call counts, by any client; a store of `client.store` that has returned was. Raises `DisconnectedError`
        where there is no server, or it goes meanwhile; of one that is stopped and answers nothing, `call_timeout_s` of
        `connect` (10 s) after its answer was due: a server that pauses for less is not taken for dead. Raises
        `UsageError` for a `timeout_s` that is no time.
        """
        return wait_stored(self._links, checked_keys(keys), namespace, timeout_s)

    def explain_by_id(self, namespace_id: int, layout: Layout, keys: Sequence[bytes]) -> list[KeyExplanation]:
        """The same for tools that know an id and a layout and no more; it is registered by that."""
        keys = checked_keys(keys)

        def explain(link: Link) -> list[KeyExplanation]:
            link.bind_id(namespace_id, layout)
            return explain_pages(link, keys, namespace_id)

        return self._links.asked(explain, patient=True)

    def pin(self, keys: Sequence[bytes], *, namespace: Namespace, ttl_s: float = PIN_TTL_S) -> list[Status]:
        """Keep objects from being evicted for `ttl_s`. Pins belong to the server and outlive this client."""
        return self._pages(keys, namespace, lambda blob, rid: m.Pin(rid, namespace.id, blob, ttl_s))

    def pin_by_id(
        self, namespace_id: int, layout: Layout, keys: Sequence[bytes], *, ttl_s: float = PIN_TTL_S
    ) -> list[Status]:
        """The same for tools that know an id and a layout and no more; one frame of keys."""
        blob = join_keys(checked_keys(keys))

        def pin(link: Link) -> m.Reply:
            link.bind_id(namespace_id, layout)
            return link.channel.call(lambda rid: m.Pin(rid, namespace_id, blob, ttl_s))

        return grant_statuses(expect(self._links.asked(pin, patient=True), m.PinnedReply).statuses)

    def config(self) -> dict[str, Any]:
        """The server's settings, secrets hidden. For the server's own user; raises `UsageError` for others."""
        return expect(self._ask(m.ConfigRequest), m.StatusReply).status

    def unpin(self, keys: Sequence[bytes], *, namespace: Namespace) -> list[Status]:
        """End pins before their time."""
        return self._pages(keys, namespace, lambda blob, rid: m.Unpin(rid, namespace.id, blob))

    def query_prefetch_status(self, job: int) -> m.LookupReply:
        """How far the loads of a lookup are; `done` when they have ended. Of a lookup with `hold` that found nothing at
        first, the first query after its loads makes the promise, which is the caller's."""
        return self._lookups.status_of(job)

    def query_lookup_hits(self, job: int) -> m.LookupReply:
        """What will be a hit, as soon as the tiers have answered and before the loads end."""
        return self._lookups.whole(expect(self._ask(lambda rid: m.QueryLookupHits(rid, job)), m.LookupReply))

    def lease_status(self, lease_id: int) -> m.LeaseState:
        """What the server knows of a lease of this client."""
        return expect(self._ask(lambda rid: m.LeaseStatusOf(rid, lease_id)), m.LeaseState)

    def get_chunk_size(self) -> int:
        """The server's chunk size, in tokens."""
        return expect(self._ask(m.GetChunkSize), m.ChunkSize).tokens

    def status(self) -> dict[str, Any]:
        """The server's account of itself."""
        return expect(self._ask(m.StatusRequest), m.StatusReply).status

    def tiers_list(self) -> list[dict[str, Any]]:
        """The tiers in order, with their status and their settings; secrets are hidden."""
        return expect(self._ask(m.Tiers), m.TiersReply).tiers

    def tiers_add(self, tier: str, settings: Mapping[str, Any], texts: Mapping[str, str] | None = None) -> None:
        """Use one more tier, as the last in order. `settings`: its table, as in the file; `texts`: settings as in
        flags, by dotted name. Raises `SettingsError`, `PluginError` or `UsageError` with the server's words."""
        self._change_tier("add", tier, settings, texts)

    def tiers_reconfigure(self, tier: str, settings: Mapping[str, Any], texts: Mapping[str, str] | None = None) -> None:
        """Change settings of a tier; those not named stay. One that was drained is stored to again."""
        self._change_tier("reconfigure", tier, settings, texts)

    def tiers_drain(self, tier: str) -> None:
        """Store nothing more there. What waits for it still goes out; what it has is served."""
        self._change_tier("drain", tier)

    def tiers_remove(self, tier: str) -> None:
        """Forget a tier at once; its objects stay on the medium."""
        self._change_tier("remove", tier)

    def _change_tier(
        self,
        action: str,
        tier: str,
        settings: Mapping[str, Any] | None = None,
        texts: Mapping[str, str] | None = None,
    ) -> None:
        self._ask(lambda rid: m.ChangeTier(rid, action, tier, dict(settings or {}), dict(texts or {})))

    def report_block_allocation(self, keys: Sequence[bytes], blocks: EngineBlocks, *, namespace: Namespace) -> int:
        """Say which of an engine's blocks these keys hold, in the order of a prefix, so that routers which hear the
        server's KV events learn it. Before or after the store; for objects that are on tiers, too. Of how many keys
        somebody is told: 0 where nobody asks, and nothing need be reported for now; `wants_blocks` says that without a
        call.

        Raises `UsageError` where `blocks` does not have as many hashes for each key.
        """
        keys = checked_keys(keys)
        told = 0
        for first, part in blocks.pages(len(keys)):
            make = partial(part.message, namespace_id=namespace.id, keys=join_keys(keys[first : first + part.keys]))
            asked = self._links.asked(partial(_ask_in, namespace, make), patient=True)
            told += expect(asked, m.Done).count
        return told

    def record_start(self, directory: str | Path, **settings: Any) -> None:
        """Have the server record what it is asked for into a directory of its machine, which has no recording yet.
        `settings`: as in the table [record]. Until it ends, hits cost a call. Raises `UsageError` with its words."""
        where = str(Path(directory).absolute())
        self._ask(lambda rid: m.ChangeRecording(rid, where, settings))

    def record_stop(self) -> None:
        """End the recording; all of it is written when this returns. Raises `UsageError` where there is none."""
        self._ask(lambda rid: m.ChangeRecording(rid, None))

    def quotas(self) -> list[dict[str, Any]]:
        """The tenants with a quota: `tenant`, `namespaces` as hexadecimal text, and `stores`: of each `used_bytes`,
        `reserved_bytes`, `limit_bytes`. The one without a name is all namespaces that no tenant has."""
        found: list[dict[str, Any]] = []
        while True:
            first = len(found)
            reply = expect(self._ask(lambda rid: m.QuotasRequest(rid, first)), m.QuotasReply)  # noqa: B023 - at once
            found += reply.tenants
            if not reply.more:
                return found

    def quota_set(
        self,
        tenant: str,
        stores: Mapping[str, Mapping[str, int | None]],
        namespaces: Sequence[int] | None = None,
    ) -> None:
        """Set or change a tenant's quotas. `stores`: by `l1` or a tier's name `reserved_bytes` and `limit_bytes`;
        stores that are not named stay as they are, and so do `namespaces`, where they are None. It is kept when this
        returns, and done in steps. Raises `UsageError` or `SettingsError` with the server's words."""
        told = {store: dict(figures) for store, figures in stores.items()}
        ids = None if namespaces is None else list(namespaces)
        self._ask(lambda rid: m.SetQuota(rid, tenant, ids, told))

    def quota_remove(self, tenant: str) -> None:
        """End a tenant's quotas; what it has stays. Raises `UsageError` for an unknown one."""
        self._ask(lambda rid: m.RemoveQuota(rid, tenant))

    def companions(self) -> Mapping[str, Mapping[str, Any]] | None:
        """What the server's companions have for workers, by name, as its hello said. None: no server has answered this
        client yet. Makes no call."""
        link = self._links.look()
        return None if link is None else link.companions

    def operate(self, companion: str, operation: str, /, **arguments: Any) -> dict[str, Any]:
        """Call an operation of a companion, as its package documents it. Raises `UsageError` where there is no such
        companion or operation, and for anyone but the server's own user over the lifeline."""
        return expect(self._ask(lambda rid: m.Operate(rid, companion, operation, arguments)), m.Operated).result

    def call_operation(self, operation: str, request: msgspec.Struct, reply: type[_Reply]) -> _Reply:
        """Call an operation that a package brought to the server, with its own request and reply. Raises `UsageError`
        where there is no such operation, for a request that it does not understand, and for anyone but the server's own
        user over the lifeline."""
        body = msgspec.msgpack.encode(request)
        answer = expect(self._ask(lambda rid: m.CallOperation(rid, operation, body)), m.OperationReply)
        try:
            return msgspec.msgpack.decode(answer.body, type=reply)
        except msgspec.MsgspecError as error:
            raise UsageError(f"the reply of {operation} is not a {reply.__name__}: {error}") from error

    def warm(
        self, namespace_id: int, layout: Layout, keys: Sequence[bytes], tiers: Sequence[str], wait_s: float
    ) -> int:
        """Have objects loaded and kept ahead of requests, which all go first; how many of the keys are there now.

        For tools that found them on a tier, with an id and a layout and no more. One frame of keys at most.
        """
        keys = checked_keys(keys)
        blob = join_keys(keys)
        options = m.LookupOptions(prefix=False, wait_s=wait_s, tiers=list(tiers), policy="retain", warm_up=True)

        def warm(link: Link) -> m.Reply:
            link.bind_id(namespace_id, layout)
            return link.channel.call(lambda rid: m.LookupRequest(rid, namespace_id, blob, options), wait_s)

        return expect(self._links.asked(warm, patient=True), m.LookupReply).hits

    def ping(self, payload: bytes = b"") -> bytes:
        """Round trip with a payload."""
        return expect(self._ask(lambda rid: m.Ping(rid, payload)), m.Pong).payload

    def noop(self) -> None:
        """Round trip without one."""
        self._ask(m.Noop)

    def _ask(self, make: Callable[[int], m.Message]) -> m.Reply:
        try:
            return self._links.current(patient=True).channel.call(make)
        except ForgottenError:  # see `Links.asked`, which would cost each call 0.2 µs
            return self._links.current(patient=True).channel.call(make)

    def _pages(
        self, keys: Sequence[bytes], namespace: Namespace, make: Callable[[bytes, int], m.Message]
    ) -> list[Status]:
        keys = checked_keys(keys)
        statuses: list[Status] = []
        for first in range(0, len(keys), BATCH_KEYS_MAX):
            blob = join_keys(keys[first : first + BATCH_KEYS_MAX])
            reply = self._links.asked(partial(_ask_in, namespace, partial(make, blob)), patient=True)
            statuses += grant_statuses(expect(reply, m.PinnedReply).statuses)
        return statuses

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """End the session: every lease is released, every view dies. Idempotent.

        Waits up to `timeout_s` for copies that other threads make. What has not ended by then, and tensors and arrays
        that somebody still has, keep their slots from everybody until they are dropped.
        """
        self._links.close(timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        """Dropped without `close`, its descriptors close with the last view or tensor, which tells the server: the
        connection has ended and the life lock is free. Nothing is sent and no lock is taken, for this may run inside
        any."""
        if not sys.is_finalizing() and hasattr(self, "_made_at") and self._links.connected:
            warnings.warn(
                f"a client of {self._name!r} was dropped and not closed; it was made at {self._made_at}",
                ResourceWarning,
                source=self,
                stacklevel=2,
            )


def _renewal(number: int, rid: int) -> m.Message:
    return m.RenewLease(rid, number)


def _ask_in(namespace: Namespace, make: Callable[[int], m.Message], link: Link) -> m.Reply:
    return link.ask(namespace, make)


def _explain(
    link: Link, keys: Sequence[bytes] | None, namespace: Namespace, tokens: Tokens | None
) -> list[KeyExplanation]:
    if tokens is not None:
        keys = chunk_keys(tokens, namespace, link.chunk_tokens)
    assert keys is not None
    keys = checked_keys(keys)
    link.bind(namespace)
    try:
        return explain_pages(link, keys, namespace.id)
    except UnknownNamespaceError:
        link.remove_binding(namespace)
        link.bind(namespace)
        return explain_pages(link, keys, namespace.id)


def _caller() -> str:
    """FILE:LINE of the code that is not ours."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith("lmcache_core."):
        frame = frame.f_back
    return "?" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"
