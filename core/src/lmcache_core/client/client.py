"""The client that workers and schedulers call. Thread-safe; connects when needed and reconnects by itself."""

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

    If the server is lost, an operation ends in bounded time with a value (`Status.UNREACHABLE`); the next one works
    once the server is back. Only misuse raises. Questions that have no such value (`status`, `clear`, …) raise
    `DisconnectedError`, or the error with which the server refused this client. The logger `lmcache_core.client` gets
    one line when the server becomes unreachable, and one when it is reachable again.
    """

    def __init__(self, target: Target, copy_threads: CopyThreads = "auto", verify: str = "never") -> None:
        self.links = Links(target)  # for those who send requests that no method here sends
        self._name = target.address or target.name
        self._made_at = _caller()
        self._copy_threads = copying_threads(copy_threads)
        self._verify = verify_level(verify)
        self._hits = Hits(self.links, self._copy_threads)
        self._lookups = ClientLookups(self.links, self._hits, trace=target.trace)
        self._common = CommonLookups(self._lookups, self._hits)
        self._retriever = Retriever(self.links, self._hits, self._copy_threads)

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

        Returns at once, whether or not the server is there. While it is not, lookups miss and stores are not stored.
        `maps_pool=False` is for a scheduler that only looks up. `copy_threads`: how many threads may copy the bytes of
        one call. "auto": one for each 4 MiB, at most four, and at most the number of processors that are idle when the
        copy begins; 0: half of the processors available to this process, at most four; or a number. Small batches take
        fewer. `use_index=False` asks the server for every hit; by default hits are found in the pool without a call,
        even after the server has died. `verify`: the default of `retrieve`. `server_uid`: the user that the server runs
        as, if neither ours nor root (None: `LMCACHE_CORE_SERVER_UID`, if set). Nothing is sent to a server of any other
        user, or through a directory that others may write to.

        `call_timeout_s`: how long a call waits for its answer. After a timeout the server counts as silent: further
        calls end at once until it is heard again. `connect_timeout_s`: how long the first call, and later questions,
        wait for a server that is there but has not answered yet. Other calls that find no link wait 20 ms for one, and
        no two of these waits begin within `wait_s`.

        `trace`: lookups and stores that reach the server belong to OpenTelemetry's current trace in the calling thread
        (if its API is installed), unless they are given a `traceparent`, the text of W3C Trace Context. Nothing of it
        is sent to servers that do not export traces.
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
        """Why the server is unreachable; empty while it is reachable, and before the first request."""
        return self.links.why_unreachable

    @property
    def wants_blocks(self) -> bool:
        """Whether the server wants to know which of an engine's blocks objects hold (`report_block_allocation`); False
        without a server. Makes no call."""
        link = self.links.look()
        return link is not None and link.wants_blocks and not link.channel.lost

    # --- whole operations ---------------------------------------------------------------------------------

    def register_layout(self, namespace: Namespace) -> bool:
        """Register a namespace and its layout now rather than on first use.

        Returns whether a server was told; if none was, it will be told once it is there. Raises `UsageError` if no
        object of that layout fits into the pool (each store would answer `TOO_LARGE`).
        """

        def register(link: Link) -> Link:
            link.bind(namespace)
            return link

        try:
            link = self.links.asked(register, patient=True)
        except DisconnectedError:
            return False
        layout, pool_bytes = namespace.layout, link.pool.data_bytes
        if layout.nbytes > pool_bytes:
            raise UsageError(
                f"an object of layout {layout} has {layout.nbytes:,} bytes, but the pool {link.pool.name!r} only "
                f"{pool_bytes:,}: raise l1.size_bytes, or use fewer tokens per chunk"
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
        """Store one object for each key. `sources`: torch tensors or contiguous buffers of the namespace's layout.
        `blocks`: which of an engine's blocks these are, for routers; reported first, with `report_block_allocation`.
        `traceparent`: the trace that this belongs to; see `connect`.

        Returns a status for each key. Raises `UsageError` for objects that do not have the layout.
        """
        keys = checked_keys(keys)
        layout = namespace.layout
        found = spans(sources, len(keys), layout, writable=False)
        if blocks is not None:
            self.report_block_allocation(keys, blocks, namespace=namespace)
        with WriteLease(self.links, namespace, Presence()) as lease:
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

        With `prefix` it ends at the first missing key; otherwise every key is independent. `promise` (of a
        `lookup(hold=True)` of these keys) is redeemed. Targets of missing keys are not written to. An object that was
        evicted or proved damaged during the copy is not a hit, and its target's content is undefined.

        `verify`: compare the bytes with the checksum of the store: "never", "first" (each object once in this process;
        without the index: always) or "always". A damaged object is a miss, and the server drops it.
        """
        keys = checked_keys(keys)
        found = spans(into, len(keys), namespace.layout, writable=True)
        level = self._verify if verify is None else verify_level(verify)
        return self._retriever.retrieve(keys, found, namespace, prefix, promise, level)

    # --- an engine's pages --------------------------------------------------------------------------------

    def register_pages(self, groups: Sequence[PageGroup]) -> Pages:
        """Register pages of the caller's own memory. `store` gathers objects from them and `retrieve` scatters objects
        into them, without a copy in between. The memory must not move while the `Pages` are in use.

        Raises `UsageError` for regions that do not fit into their buffers, overlapping pages within a group, and a
        layout whose size differs from that of an object's pages. Groups may share memory.
        """
        return Pages(self.links, self._hits, groups, self._copy_threads, self._verify)

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
        """Store objects from memory that is not registered because it changes with each call. See `Pages.store`."""
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
        """Copy objects into memory that is not registered. Every key is independent. See `Pages.retrieve`."""
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
        """Which keys can be served? Missing ones are looked up on the tiers (or on the named ones) and loaded.

        `wait_s`: how long to wait for the loads. `hold`: keep the hits until the promise is redeemed or expires; only
        the server can promise, so without it the answer is `UNREACHABLE`. With `"if_possible"` the index answers in
        that case, without a promise. `deadline_s`: how long the loads may take, if not `wait_s` (0: 30 s in the
        background). `prefix=False`: every key is independent. `window`: only the last `window` keys of the longest run
        that ends in them are worth loading (layers with sliding attention). `pin_s`: pin the hits for this long.
        `policy`: the name of a prefetch policy for this lookup only; `"retain"` keeps what it loads. `identify`: the
        result says which incarnations were found, for `drop`; a retrieve's always does. `ask=False`: use only the
        index; what it does not have is a miss. Then the only call is the one that holds hits, if any. `traceparent`:
        the trace that this belongs to; see `connect`.
        """
        keys = checked_keys(keys)
        if traceparent:
            traceparent = check_traceparent(traceparent)
        # Positional, in the order of their declaration: keywords would cost each lookup 0.2 µs.
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
        """Like `lookup`, for callers that must not block. The handle has `so_far`, what the index has, at once, and
        `done`, `result`, `wait` and `cancel` for the rest, which the server is asked for. At most one frame of keys.
        Apart from `wait`, neither this method nor the handle ever waits for the server."""
        keys = checked_keys(keys)
        if len(keys) > BATCH_KEYS_MAX:
            raise LimitError(f"lookup_nowait takes at most {BATCH_KEYS_MAX} keys, got {len(keys)}: split the batch")
        if traceparent:
            traceparent = check_traceparent(traceparent)
        # Positional, in the order of their declaration: keywords would cost each lookup 0.2 µs.
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
        prompt. `unit_tokens`: tokens in a chunk, one figure for all groups or one for each. The boundary is a multiple
        of all of them. `found.groups` says which keys each group must load, with start and end in tokens.

        The index answers first. The server, and through it the tiers, are asked for what a group lacks to reach the
        boundary of the others, unless `ask` is false: then no call is made. `hold`: one call for each group that has
        something to load keeps those objects in the pool; `found.promise` covers all groups, and `found.promises`
        splits it by group. The other options are those of `lookup`.
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
        """Get slots to write these keys into, for those that are granted. Commit or abort the lease. `traceparent`: the
        trace that this belongs to; see `connect`."""
        keys = checked_keys(keys)
        lease = WriteLease(self.links, namespace, threads=self._copy_threads)
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
        """Get slots to read these keys in place. Finish the lease soon: it keeps them from being evicted.

        `optimistic`: objects in the index are read without a call, even while the server is gone or hangs, and may be
        evicted meanwhile. `finish` says for each position whether the bytes read there are valid; use nothing before
        that. What the index does not have is a `MISS`. Without a usable index, as before the first call in the
        namespace, the lease is an ordinary one.
        """
        keys = checked_keys(keys)
        if optimistic and promise:
            raise UsageError("a promise is redeemed with the server: give it without optimistic=True")
        lease = ReadLease(self.links, namespace)
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
        """Give back an unredeemed promise of this client, including all slices of it, or promises by the server's ids.
        Returns how many of the ids still held something. Without a server returns 0; the server is told once there is
        one."""
        if promise is None:
            return 0
        numbers = promise.numbers if isinstance(promise, Promise) else list(promise)
        if not all(type(number) is int and 0 <= number < 1 << 64 for number in numbers):
            raise UsageError(f"{promise!r} is neither a promise nor a list of promise ids: pass one promise per call")
        try:
            return expect(self._ask(lambda rid: m.FreeLookupLocks(rid, numbers)), m.Done).count
        except (DisconnectedError, LimitError):
            self.links.free_later(numbers)
            return 0

    def _free_later(self, promises: Sequence[int]) -> None:
        """Free them with the next call. Takes no lock: a finalizer may call this."""
        self.links.free_later(promises)

    def renew(self, promise: Promise) -> Promise:
        """The same promise with a new term, which all its slices share. Raises `LeaseExpiredError` if part of it no
        longer holds anything because it was redeemed, given back, or expired, and `DisconnectedError`. Only the client
        that got a promise can renew it."""
        ttl_s = math.inf
        for number in promise.numbers:
            reply = self._ask(partial(_renewal, number))
            ttl_s = min(ttl_s, expect(reply, m.Renewed).ttl_s)
        return promise if ttl_s == math.inf else replace(promise, expires_at=time.monotonic() + ttl_s)

    def pin_memory(self) -> bool:
        """Register this process's mapping of the pool with CUDA: GPUs then read and write slots directly, and copies
        with `non_blocking=True` are asynchronous. Lasts until the last view of the mapping is gone.

        Returns False if it was registered already, so repeated calls are free; after a reconnect to a new pool, call it
        again. Raises `UsageError` without torch or a GPU, `PoolError` if CUDA refuses, `NotAttachedError` if this
        client does not map the pool, and `DisconnectedError`.
        """
        return pin_for_cuda(self.links.current(patient=True).mapped().mapping)

    # --- everything else ----------------------------------------------------------------------------------

    def end_session(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Release every lease and promise of this client; views become invalid. The client can continue with new ones.

        Waits up to `timeout_s` for copies by other threads; an unfinished copy keeps its lease until it ends. Raises
        `DisconnectedError`.
        """
        self.links.end_session(timeout_s)

    def clear(self, namespace: Namespace | None = None, *, tiers: bool = False) -> m.ClearedReply:
        """Clear a namespace (None: everything), as a fence; with `tiers`, on the tiers, too. Only the server's own user
        and root may clear everything: `UsageError` for others."""
        if namespace is None:
            return expect(self._ask(lambda rid: m.Clear(rid, None, tiers)), m.ClearedReply)
        # Registered first: only the server's own user may clear a namespace that it has not registered.
        chosen = namespace.id
        make = partial(_ask_in, namespace, lambda rid: m.Clear(rid, chosen, tiers))
        return expect(self.links.asked(make, patient=True), m.ClearedReply)

    def clear_by_id(self, namespace_id: int | None, *, tiers: bool = False) -> m.ClearedReply:
        """The same for the server's own user, who may name a namespace by its id."""
        return expect(self._ask(lambda rid: m.Clear(rid, namespace_id, tiers)), m.ClearedReply)

    def drop(
        self, keys: Sequence[bytes], *, namespace: Namespace, incarnations: Sequence[int], tiers: bool = True
    ) -> int:
        """Stop serving these objects, because they are wrong or no longer wanted. Returns how many were in the pool.

        `incarnations`: which ones, from the result of a retrieve, or of a lookup with `identify`; positions with 0 are
        left alone. An object stored later under the same key stays. With `tiers` the objects with these keys are
        deleted from the tiers, too, in the background; tiers do not know incarnations. A tier whose medium allows no
        deletes keeps them, and the next lookup may load them again: only `clear` helps there. Raises `UsageError` for a
        namespace that this client has not registered, and `DisconnectedError`.
        """
        return self._drop(keys, namespace, incarnations, tiers=tiers, damaged=False)

    def report_damaged(self, keys: Sequence[bytes], *, namespace: Namespace, incarnations: Sequence[int]) -> int:
        """Report that the bytes of these objects in the pool are not what was stored: they are no longer served, and
        later misses say `DAMAGED`. Returns how many were in the pool. Objects on tiers stay: each is checked when it is
        loaded. See `drop`."""
        return self._drop(keys, namespace, incarnations, tiers=False, damaged=True)

    def _drop(
        self, keys: Sequence[bytes], namespace: Namespace, incarnations: Sequence[int], *, tiers: bool, damaged: bool
    ) -> int:
        keys = checked_keys(keys)
        if len(keys) != len(incarnations):
            raise UsageError(f"{len(incarnations)} incarnations for {len(keys)} keys: give one for each key")
        for number in incarnations:
            if type(number) is not int or not 0 <= number < 1 << 64:
                raise UsageError(f"{number!r} is not an incarnation: use those that a retrieve or lookup returned")
        chosen = [at for at, number in enumerate(incarnations) if number]
        dropped = 0
        for first in range(0, len(chosen), BATCH_KEYS_MAX):
            page = chosen[first : first + BATCH_KEYS_MAX]
            blob = join_keys([keys[at] for at in page])
            numbers = pack_u64(array("Q", [incarnations[at] for at in page]))

            def make(rid: int, blob: bytes = blob, numbers: bytes = numbers) -> m.Message:
                return m.Drop(rid, namespace.id, blob, numbers, tiers, damaged)

            reply = self.links.asked(partial(_ask_in, namespace, make), patient=True)
            dropped += expect(reply, m.Done).count
        return dropped

    def explain(
        self, keys: Sequence[bytes] | None = None, *, namespace: Namespace, tokens: Tokens | None = None
    ) -> list[KeyExplanation]:
        """Where keys are, or why they are missing: in the pool, and on every tier, each of which is asked.

        Give `keys`, or `tokens`, from which keys are derived with the server's chunk size. If this client has not used
        the namespace yet, it is registered first.
        """
        if (keys is None) == (tokens is None):
            raise UsageError("explain takes either keys or tokens, and exactly one of them")
        return self.links.asked(lambda link: _explain(link, keys, namespace, tokens), patient=True)

    def wait_stored(self, keys: Sequence[bytes], *, namespace: Namespace, timeout_s: float = 30.0) -> list[StoredKey]:
        """Wait until the tiers have these keys or never will. Returns one `StoredKey` for each key, in order.

        Returns when none of the keys is on its way to a tier any more, after `timeout_s` at the latest; the server
        holds its answer back until then. This uses the server's accounts of the tiers; `explain` asks the media.
        `stored` says whether every tier that should have the key has it; `lost` and `why` give the reasons if not.
        Everything stored before this call counts, by any client, including a `client.store` that has returned. Raises
        `DisconnectedError` without a server, or if it goes away meanwhile; for a server that is stopped,
        `call_timeout_s` of `connect` (10 s) after its answer was due, so that a shorter pause is not taken for its
        death. Raises `UsageError` for an invalid `timeout_s`.
        """
        return wait_stored(self.links, checked_keys(keys), namespace, timeout_s)

    def explain_by_id(self, namespace_id: int, layout: Layout, keys: Sequence[bytes]) -> list[KeyExplanation]:
        """The same for tools that know only an id and a layout, with which the namespace is registered."""
        keys = checked_keys(keys)

        def explain(link: Link) -> list[KeyExplanation]:
            link.bind_id(namespace_id, layout)
            return explain_pages(link, keys, namespace_id)

        return self.links.asked(explain, patient=True)

    def pin(self, keys: Sequence[bytes], *, namespace: Namespace, ttl_s: float = PIN_TTL_S) -> list[Status]:
        """Keep objects from being evicted for `ttl_s`. Pins belong to the server and outlive this client."""
        return self._pages(keys, namespace, lambda blob, rid: m.Pin(rid, namespace.id, blob, ttl_s))

    def pin_by_id(
        self, namespace_id: int, layout: Layout, keys: Sequence[bytes], *, ttl_s: float = PIN_TTL_S
    ) -> list[Status]:
        """The same for tools that know only an id and a layout; at most one frame of keys."""
        blob = join_keys(checked_keys(keys))

        def pin(link: Link) -> m.Reply:
            link.bind_id(namespace_id, layout)
            return link.channel.call(lambda rid: m.Pin(rid, namespace_id, blob, ttl_s))

        return grant_statuses(expect(self.links.asked(pin, patient=True), m.PinnedReply).statuses)

    def config(self) -> dict[str, Any]:
        """The server's settings, secrets hidden. For the server's own user; raises `UsageError` for others."""
        return expect(self._ask(m.ConfigRequest), m.StatusReply).status

    def unpin(self, keys: Sequence[bytes], *, namespace: Namespace) -> list[Status]:
        """End pins before they expire."""
        return self._pages(keys, namespace, lambda blob, rid: m.Unpin(rid, namespace.id, blob))

    def query_prefetch_status(self, job: int) -> m.LookupReply:
        """Progress of the loads of a lookup; `done` when they have ended. For a lookup with `hold` that found nothing
        at first, the first query after its loads makes the promise, which the caller owns."""
        return self._lookups.status_of(job)

    def query_lookup_hits(self, job: int) -> m.LookupReply:
        """What will be a hit. Available as soon as the tiers have answered, before the loads end."""
        return self._lookups.whole(expect(self._ask(lambda rid: m.QueryLookupHits(rid, job)), m.LookupReply))

    def lease_status(self, lease_id: int) -> m.LeaseState:
        """What the server knows of a lease of this client."""
        return expect(self._ask(lambda rid: m.LeaseStatusOf(rid, lease_id)), m.LeaseState)

    def get_chunk_size(self) -> int:
        """The server's chunk size, in tokens."""
        return expect(self._ask(m.GetChunkSize), m.ChunkSize).tokens

    def status(self) -> dict[str, Any]:
        """The server's status, as a nested dict."""
        return expect(self._ask(m.StatusRequest), m.StatusReply).status

    def tiers_list(self) -> list[dict[str, Any]]:
        """The tiers in order, with their status and their settings; secrets are hidden."""
        return expect(self._ask(m.Tiers), m.TiersReply).tiers

    def tiers_add(self, tier: str, settings: Mapping[str, Any], texts: Mapping[str, str] | None = None) -> None:
        """Add a tier as the last in the order. `settings`: its table, as in the file; `texts`: settings as in flags, by
        dotted name. Raises `SettingsError`, `PluginError` or `UsageError` with the server's message."""
        self._change_tier("add", tier, settings, texts)

    def tiers_reconfigure(self, tier: str, settings: Mapping[str, Any], texts: Mapping[str, str] | None = None) -> None:
        """Change settings of a tier; the others stay as they are. A drained tier accepts stores again."""
        self._change_tier("reconfigure", tier, settings, texts)

    def tiers_drain(self, tier: str) -> None:
        """Stop storing to a tier. What is waiting for it is still written, and its objects are still served."""
        self._change_tier("drain", tier)

    def tiers_remove(self, tier: str) -> None:
        """Remove a tier at once; its objects stay on the medium."""
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
        """Report which of an engine's blocks these keys hold, in prefix order, so that routers that listen to the
        server's KV events learn it. May be called before or after the store, and for objects on tiers, too. Returns the
        number of keys that were passed on; 0 if nobody listens, and nothing needs to be reported for now.
        `wants_blocks` says that without a call.

        Raises `UsageError` if `blocks` does not have the same number of hashes for each key.
        """
        keys = checked_keys(keys)
        told = 0
        for first, part in blocks.pages(len(keys)):
            make = partial(part.message, namespace_id=namespace.id, keys=join_keys(keys[first : first + part.keys]))
            asked = self.links.asked(partial(_ask_in, namespace, make), patient=True)
            told += expect(asked, m.Done).count
        return told

    def record_start(self, directory: str | Path, **settings: Any) -> None:
        """Make the server record its requests into a directory on its machine that has no recording yet. `settings`: as
        in the table [record]. Until the recording ends, hits cost a call. Raises `UsageError` with the server's
        message."""
        where = str(Path(directory).absolute())
        self._ask(lambda rid: m.ChangeRecording(rid, where, settings))

    def record_stop(self) -> None:
        """End the recording; when this returns, all of it is written. Raises `UsageError` if there is none."""
        self._ask(lambda rid: m.ChangeRecording(rid, None))

    def quotas(self) -> list[dict[str, Any]]:
        """The tenants with a quota: `tenant`, `namespaces` as hexadecimal text, and `stores`, each with `used_bytes`,
        `reserved_bytes` and `limit_bytes`. The entry without a name covers all namespaces without a tenant."""
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
        """Set or change a tenant's quotas. `stores`: `reserved_bytes` and `limit_bytes`, by `l1` or a tier's name;
        stores that are not named stay as they are, and so do `namespaces` if None. When this returns, the change is
        saved; it is carried out in steps. Raises `UsageError` or `SettingsError` with the server's message."""
        told = {store: dict(figures) for store, figures in stores.items()}
        ids = None if namespaces is None else list(namespaces)
        self._ask(lambda rid: m.SetQuota(rid, tenant, ids, told))

    def quota_remove(self, tenant: str) -> None:
        """Remove a tenant's quotas; its objects stay. Raises `UsageError` for an unknown tenant."""
        self._ask(lambda rid: m.RemoveQuota(rid, tenant))

    def companions(self) -> Mapping[str, Mapping[str, Any]] | None:
        """What the server's companions offer to workers, by name, from the server's welcome. None if no server has
        answered this client yet. Makes no call."""
        link = self.links.look()
        return None if link is None else link.companions

    def operate(self, companion: str, operation: str, /, **arguments: Any) -> dict[str, Any]:
        """Call an operation of a companion, as its package documents it. Raises `UsageError` if there is no such
        companion or operation, and for everybody except the server's own user over the lifeline."""
        return expect(self._ask(lambda rid: m.Operate(rid, companion, operation, arguments)), m.Operated).result

    def call_operation(self, operation: str, request: msgspec.Struct, reply: type[_Reply]) -> _Reply:
        """Call an operation that a plugin added to the server, with its own request and reply types. Raises
        `UsageError` if there is no such operation, for a request that it does not understand, and for everybody except
        the server's own user over the lifeline."""
        body = msgspec.msgpack.encode(request)
        answer = expect(self._ask(lambda rid: m.CallOperation(rid, operation, body)), m.OperationReply)
        try:
            return msgspec.msgpack.decode(answer.body, type=reply)
        except msgspec.MsgspecError as error:
            raise UsageError(f"the reply of {operation} is not a {reply.__name__}: {error}") from error

    def warm(
        self, namespace_id: int, layout: Layout, keys: Sequence[bytes], tiers: Sequence[str], wait_s: float
    ) -> int:
        """Load objects into the pool and keep them, ahead of requests, which have priority. Returns how many of the
        keys are in the pool now.

        For tools that found the keys on a tier and know only an id and a layout. At most one frame of keys.
        """
        keys = checked_keys(keys)
        blob = join_keys(keys)
        options = m.LookupOptions(prefix=False, wait_s=wait_s, tiers=list(tiers), policy="retain", warm_up=True)

        def warm(link: Link) -> m.Reply:
            link.bind_id(namespace_id, layout)
            return link.channel.call(lambda rid: m.LookupRequest(rid, namespace_id, blob, options), wait_s)

        return expect(self.links.asked(warm, patient=True), m.LookupReply).hits

    def ping(self, payload: bytes = b"") -> bytes:
        """A round trip with a payload."""
        return expect(self._ask(lambda rid: m.Ping(rid, payload)), m.Pong).payload

    def noop(self) -> None:
        """A round trip without a payload."""
        self._ask(m.Noop)

    def _ask(self, make: Callable[[int], m.Message]) -> m.Reply:
        try:
            return self.links.current(patient=True).channel.call(make)
        except ForgottenError:  # see `Links.asked`, which would cost each call 0.2 µs
            return self.links.current(patient=True).channel.call(make)

    def _pages(
        self, keys: Sequence[bytes], namespace: Namespace, make: Callable[[bytes, int], m.Message]
    ) -> list[Status]:
        keys = checked_keys(keys)
        statuses: list[Status] = []
        for first in range(0, len(keys), BATCH_KEYS_MAX):
            blob = join_keys(keys[first : first + BATCH_KEYS_MAX])
            reply = self.links.asked(partial(_ask_in, namespace, partial(make, blob)), patient=True)
            statuses += grant_statuses(expect(reply, m.PinnedReply).statuses)
        return statuses

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """End the session: release every lease, invalidate every view. Idempotent.

        Waits up to `timeout_s` for copies by other threads. Copies that have not ended by then, and tensors and arrays
        that are still referenced, keep their slots reserved until they are dropped.
        """
        self.links.close(timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        """If a client is dropped without `close`, its descriptors close with the last view or tensor. That tells the
        server: the connection has ended and the life lock is free. Nothing is sent and no lock is taken, because this
        may run inside any lock."""
        if not sys.is_finalizing() and hasattr(self, "_made_at") and self.links.connected:
            warnings.warn(
                f"a client of {self._name!r} was dropped without close(); it was made at {self._made_at}",
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
    """FILE:LINE of the calling code outside this library."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith("lmcache_core."):
        frame = frame.f_back
    return "?" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"
