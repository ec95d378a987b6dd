"""The client that workers and schedulers call. Thread-safe; connects when needed and reconnects by itself."""

from __future__ import annotations

import math
import sys
import time
import warnings
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Literal, Self, TypeVar

import msgspec

from lmcache_core.client.engine_blocks import EngineBlocks
from lmcache_core.client.find.group_lookups import CommonHandle, CommonHits, CommonLookups, KeyGroup
from lmcache_core.client.find.hits import Hits, ReadRequest, checked_keys, verify_level
from lmcache_core.client.find.lookups import ClientLookupOptions, ClientLookups, LookupHandle
from lmcache_core.client.link.address import CurveKeys
from lmcache_core.client.link.channel import expect
from lmcache_core.client.link.link import Link, Target
from lmcache_core.client.link.presence import Presence
from lmcache_core.client.link.reconnecting import Links
from lmcache_core.client.move.copying import CopyThreads, copying_threads, spans
from lmcache_core.client.move.leases import ReadLease, WriteLease
from lmcache_core.client.move.page_jobs import PagesResult
from lmcache_core.client.move.pages import PageEntry, Pages
from lmcache_core.client.move.regions import PageGroup, Region
from lmcache_core.client.move.retrieving import Retriever
from lmcache_core.client.promises import Promise, frames_of
from lmcache_core.client.results import LookupResult, RetrieveResult, Status, StoreResult, grant_statuses
from lmcache_core.client.tracing import check_traceparent, trace_context
from lmcache_core.client.why.explaining import KeyExplanation, explain_pages
from lmcache_core.client.why.stored import StoredKey, wait_stored
from lmcache_core.devices.pinning import pin_for_cuda
from lmcache_core.errors import DisconnectedError, ForgottenError, LimitError, PoolError, UsageError
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
from lmcache_core.pool.layout import Layout
from lmcache_core.pool.tally import Tally
from lmcache_core.protocol import messages as m
from lmcache_core.protocol.address import check_address, default_name, given_root
from lmcache_core.protocol.codec import join_keys, pack_u64
from lmcache_core.tokens.canonical import Tokens
from lmcache_core.tokens.keys import chunk_keys
from lmcache_core.tokens.namespace import Namespace

_Reply = TypeVar("_Reply")


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
        name: str = "",
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
        chunk_tokens: int | None = None,
        call_timeout_s: float = CALL_TIMEOUT_S,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        wait_s: float = LINK_WAIT_PAUSE_S,
        trace: bool = False,
    ) -> Client:
        """A client of the server `name` on this node (empty: `LMCACHE_CORE_NAME`, or else "default"), or of the one at
        a ZMQ `address`.

        Returns at once, whether or not the server is there. While it is not, lookups miss and stores are not stored.
        `maps_pool=False` is for a scheduler that only looks up. `copy_threads`: how many threads may copy the bytes of
        one call. "auto": one for each 4 MiB, at most four, and at most the number of processors that are idle when the
        copy begins; 0: half of the processors available to this process, at most four; or a number. Small batches take
        fewer. `use_index=False` asks the server for every hit; by default hits are found in the pool without a call,
        even after the server has died. `verify`: the default of `retrieve`. `server_uid`: the user that the server runs
        as, if neither ours nor root (None: `LMCACHE_CORE_SERVER_UID`, if set). Nothing is sent to a server of any other
        user, or through a directory that others may write to. `chunk_tokens`: how many tokens make one of this client's
        keys. The server cannot know it: it counts the tokens of hits only of clients that declare it. `explain` derives
        keys with it, too.

        `call_timeout_s`: how long a call waits for its answer. After a timeout the server counts as silent: further
        calls end at once until it answers again. `connect_timeout_s`: how long the first call, and later questions,
        wait for a server that is there but has not answered yet. Other calls that find no link wait 20 ms for one, and
        no two of these waits begin within `wait_s`.

        `trace`: lookups and stores that reach the server belong to the trace that is current in the calling thread, as
        `lmcache-otel` or another package knows it (without one: `UsageError`), unless they are given a `traceparent`,
        the text of W3C Trace Context. Nothing of it is sent to servers that do not trace.
        """
        root = given_root(runtime_dir)
        target = Target(
            name or default_name(),
            root,
            None if address is None else check_address(address),
            curve,
            client_name,
            maps_pool,
            use_index=use_index,
            server_uid=server_uid,
            chunk_tokens=chunk_tokens,
            call_timeout_s=call_timeout_s,
            connect_timeout_s=connect_timeout_s,
            wait_s=wait_s,
            trace=trace_context() if trace else None,
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

    def look(self) -> bool:
        """Whether a server is there. If none is, this takes the next step towards one, and waits for nothing: who looks
        now and then has a link when a call cannot wait for one. Makes no call."""
        link = self.links.look()
        return link is not None and not link.channel.lost

    @property
    def published(self) -> int | None:
        """A number that changes whenever the server has published objects in the pool's index, for `wait_published`.
        None without a mapped pool or the C extension. Makes no call."""
        link = self.links.look()
        segment = None if link is None or link.index is None else link.segment
        return None if segment is None else segment.published

    def wait_published(self, seen: int, timeout_s: float) -> bool:
        """Wait until anybody's objects are published, at most that long: until `published` is no longer `seen`. Read
        that before you look for what you wait for, so that nothing is missed in between. Makes no call: the server
        wakes its workers through the pool. Returns whether it has changed; False at once without a mapped pool or the C
        extension. Without a change it may return early."""
        if not 0 <= timeout_s < 1e9:
            raise UsageError(f"timeout_s is {timeout_s}: give seconds from 0 to 1e9")
        link = self.links.look()
        segment = None if link is None or link.index is None else link.segment
        return segment is not None and segment.wait_published(seen, timeout_s) != seen

    # --- whole operations ---------------------------------------------------------------------------------

    def register_layout(self, namespace: Namespace) -> bool:
        """Register a namespace and its layout now rather than on first use.

        Returns whether a server got it; if none did, it is sent once one is there. Raises `UsageError` if no
        object of that layout fits into the pool (each store would answer `TOO_LARGE`).
        """

        def register(link: Link) -> Link:
            link.bind(namespace)
            return link

        try:
            link = self.links.call(register, patient=True)
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
        `traceparent`: the trace that this belongs to; see `connect`. No thread may resize a source's storage
        (`untyped_storage().resize_`) before this returns: torch frees it although a copy reads it, which is a SIGSEGV.

        Returns a status for each key. Raises `UsageError` for objects that do not have the layout.
        """
        keys = list(checked_keys(keys))  # ours: each key stays with its object
        found = spans(sources, len(keys), namespace.layout, writable=False)
        if blocks is not None:
            self.report_block_allocation(keys, blocks, namespace=namespace)
        trace, threads = check_traceparent(traceparent), self._copy_threads
        with WriteLease(self.links, namespace, Presence(), threads=threads, traceparent=trace) as lease:
            for first in range(0, len(keys), STORE_PAGE_KEYS):
                lease.ask(keys[first : first + STORE_PAGE_KEYS])
                lease.fill(first, found)
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
        evicted or proved damaged during the copy is not a hit, and its target's content is undefined. No thread may
        resize a target's storage before this returns, as with `store`.

        `verify`: compare the bytes with the checksum of the store: "never", "first" (each object once in this process;
        without the index: always) or "always". A damaged object is a miss, and the server drops it.
        """
        keys = list(checked_keys(keys))  # ours: each key stays with its object
        found = spans(into, len(keys), namespace.layout, writable=True)
        level = self._verify if verify is None else verify_level(verify)
        return self._retriever.retrieve(ReadRequest(keys, found, namespace, prefix, promise, level))

    # --- an engine's pages --------------------------------------------------------------------------------

    def register_pages(self, groups: Sequence[PageGroup]) -> Pages:
        """Register pages of the caller's own memory. `store` gathers objects from them and `retrieve` scatters objects
        into them, without a copy in between. The memory must not move, and no
        storage be resized, while a job of the `Pages` runs; in between, memory that has gone is an error.

        Raises `UsageError` for regions that do not fit into their buffers, overlapping pages within a group, and a
        layout whose size differs from that of an object's pages. Groups may share memory.
        """
        return Pages.of(self.links, self._hits, groups, self._copy_threads, self._verify)

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
            bool(hold), True, wait_s, tiers, 0, deadline_s, 0.0, policy, False, False, hold == "if_possible",
            check_traceparent(traceparent),
        )  # fmt: skip
        return self._common.lookup(groups, unit_tokens, options, ask)

    def lookup_many_nowait(
        self,
        groups: Sequence[KeyGroup | tuple[Any, ...]],
        *,
        unit_tokens: int | Sequence[int],
        hold: bool | Literal["if_possible"] = False,
        wait_s: float = 30.0,
        tiers: Sequence[str] | None = None,
        deadline_s: float = 0.0,
        policy: str = "",
        traceparent: str = "",
    ) -> CommonHandle:
        """Like `lookup_many`, for callers that must not block. The server is asked for all groups at once. `hold`:
        everything is asked for and held by the same calls, so that nothing leaves in between. That is more than what is
        to be loaded; freeing the promise of the result frees it all. Apart from its `wait`, neither this method nor the
        handle ever waits for the server."""
        options = ClientLookupOptions(
            bool(hold), True, wait_s, tiers, 0, deadline_s, 0.0, policy, False, False, hold == "if_possible",
            check_traceparent(traceparent),
        )  # fmt: skip
        return self._common.start(groups, unit_tokens, options)

    def count_prompt(self, tokens: int, hit_tokens: int, *, from_tiers: int = 0, not_asked: Sequence[int] = ()) -> None:
        """Count a prompt that `lookup_many` was asked for, so that the server's figures have what this client found,
        whoever answered: `hit_tokens` of `tokens`, and how many of these tiers had to load.

        Call it once for each prompt, when it is known what its caller uses; `lookup_many` itself counts no tokens, and
        with `ask=False` nothing at all. `not_asked`: if the server was not asked, and so has counted no key, the
        `unit_tokens` of each group. The prompt counts in every namespace of this client, and no key of it may stand for
        declared `chunk_tokens`, which would count again. Makes no call, and does nothing without a mapped pool or the C
        extension.
        """
        for number in (tokens, hit_tokens, from_tiers):
            if type(number) is not int or not 0 <= number <= tokens:
                raise UsageError(f"{hit_tokens!r} of {tokens!r} tokens, {from_tiers!r} from tiers: give counts")
        if self.links.target.chunk_tokens is not None:
            raise UsageError("this client has declared chunk_tokens, by which its lookups are counted already")
        for unit in not_asked:
            if type(unit) is not int or unit < 1:
                raise UsageError(f"not_asked is {not_asked!r}: give the tokens of a key, 1 or more, for each group")
        hits = sum(hit_tokens // unit for unit in not_asked)
        self._hits.count(
            {
                Tally.PROMPTS: 1,
                Tally.PROMPT_TOKENS: tokens,
                Tally.TIER_HIT_TOKENS: min(from_tiers, hit_tokens),
                Tally.INDEX_HIT_TOKENS if not_asked else Tally.L1_HIT_TOKENS: max(0, hit_tokens - from_tiers),
                Tally.LOOKUPS: bool(not_asked),
                Tally.LOOKUP_HITS: hits,
                Tally.LOOKUP_MISSES: sum(tokens // unit for unit in not_asked) - hits,
            }
        )

    def count_dropped_stores(self, objects: int) -> None:
        """Count objects that this client could have stored, and gave up because the server was slow or away: the server
        cannot see those, and shows them in `status` once it looks. Makes no call, and does nothing without a mapped
        pool or the C extension."""
        if type(objects) is not int or objects < 0:
            raise UsageError(f"{objects!r} objects: give a count")
        self._hits.count({Tally.DROPPED_STORES: objects})

    # --- the two phases -----------------------------------------------------------------------------------

    def prepare_store(self, keys: Sequence[bytes], *, namespace: Namespace, traceparent: str = "") -> WriteLease:
        """Get slots to write these keys into, for those that are granted. Commit or abort the lease. `traceparent`: the
        trace that this belongs to; see `connect`."""
        keys = checked_keys(keys)
        trace = check_traceparent(traceparent)
        lease = WriteLease(self.links, namespace, threads=self._copy_threads, traceparent=trace)
        try:
            for first in range(0, len(keys), STORE_PAGE_KEYS):
                lease.ask(keys[first : first + STORE_PAGE_KEYS])
        except BaseException:  # not `on_failure`: an interrupt between two of its own lines would lose the lease
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
        except BaseException:  # as in `prepare_store`
            lease.close()
            raise
        if len(lease.statuses) < len(keys):
            lease.add_ungranted(Status.MISS, Reason.NONE, len(keys) - len(lease.statuses))
        return lease

    def free_lookup_locks(self, promise: Promise | Sequence[int] | None) -> int:
        """Give back an unredeemed promise of this client, including all slices of it, or promises by the server's ids.
        Returns how many of the ids still held something. Without a server returns 0; it is sent once there is
        one."""
        if promise is None:
            return 0
        numbers = promise.numbers if isinstance(promise, Promise) else list(promise)
        if not all(type(number) is int and 0 <= number < 1 << 64 for number in numbers):
            raise UsageError(f"{promise!r} is neither a promise nor a list of promise ids: pass one promise per call")
        try:
            return expect(self._ask(m.FreeLookupLocks(0, numbers)), m.Done).count
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
            reply = self._ask(m.RenewLease(0, number))
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

    @property
    def pool_is_pinned(self) -> bool | None:
        """Whether this process's mapping of the pool is registered with CUDA; None: it maps none now. Waits for
        nothing."""
        link = self.links.look()
        segment = None if link is None else link.segment
        try:
            return None if segment is None else segment.mapping.pinned
        except PoolError:  # it was closed meanwhile
            return None

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
            return expect(self._ask(m.Clear(0, None, tiers)), m.ClearedReply)
        # Registered first: only the server's own user may clear a namespace that it has not registered.
        return expect(self.links.call_in(namespace, m.Clear(0, namespace.id, tiers)), m.ClearedReply)

    def clear_by_id(self, namespace_id: int | None, *, tiers: bool = False) -> m.ClearedReply:
        """The same for the server's own user, who may name a namespace by its id."""
        return expect(self._ask(m.Clear(0, namespace_id, tiers)), m.ClearedReply)

    def drop(
        self, keys: Sequence[bytes], *, namespace: Namespace, incarnations: Sequence[int], tiers: bool = True
    ) -> int:
        """Stop serving these objects, because they are wrong or no longer wanted. Returns how many were in the pool.

        `incarnations`: which ones, from the result of a retrieve, or of a lookup with `identify`; positions with 0 are
        skipped. An object stored later under the same key stays. With `tiers` the objects with these keys are
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
            request = m.Drop(0, namespace.id, blob, numbers, tiers, damaged)
            dropped += expect(self.links.call_in(namespace, request), m.Done).count
        return dropped

    def explain(
        self,
        keys: Sequence[bytes] | None = None,
        *,
        namespace: Namespace,
        tokens: Tokens | None = None,
        chunk_tokens: int | None = None,
    ) -> list[KeyExplanation]:
        """Where keys are, or why they are missing: in the pool, and on every tier, each of which is asked.

        Give `keys`, or `tokens`, from which keys are derived in chunks of `chunk_tokens` (None: those that this client
        declared in `connect`, else the server's setting). If this client has not used the namespace yet, it is
        registered first.
        """
        if (keys is None) == (tokens is None):
            raise UsageError("explain takes either keys or tokens, and exactly one of them")
        size = self.links.target.chunk_tokens if chunk_tokens is None else chunk_tokens

        def explain(link: Link) -> list[KeyExplanation]:
            chosen = keys
            if tokens is not None:
                chosen = chunk_keys(tokens, namespace, link.chunk_tokens if size is None else size)
            assert chosen is not None
            return link.in_namespace(namespace, explain_pages, link, checked_keys(chosen), namespace.id)

        return self.links.call(explain, patient=True)

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

        return self.links.call(explain, patient=True)

    def pin(self, keys: Sequence[bytes], *, namespace: Namespace, ttl_s: float = PIN_TTL_S) -> list[Status]:
        """Keep objects from being evicted for `ttl_s`. Pins belong to the server and outlive this client."""
        return self._pages(keys, namespace, lambda blob: m.Pin(0, namespace.id, blob, ttl_s))

    def pin_by_id(
        self, namespace_id: int, layout: Layout, keys: Sequence[bytes], *, ttl_s: float = PIN_TTL_S
    ) -> list[Status]:
        """The same for tools that know only an id and a layout; at most one frame of keys."""
        blob = join_keys(checked_keys(keys))
        reply = self._by_id(namespace_id, layout, m.Pin(0, namespace_id, blob, ttl_s))
        return grant_statuses(expect(reply, m.PinnedReply).statuses, len(keys))

    def drop_by_id(self, namespace_id: int, layout: Layout, incarnations: Mapping[bytes, int]) -> int:
        """`drop`, from the pool only, for tools that know only an id and a layout; at most one frame of keys. Returns
        how many were in the pool."""
        blob, numbers = join_keys(checked_keys(list(incarnations))), pack_u64(array("Q", incarnations.values()))
        reply = self._by_id(namespace_id, layout, m.Drop(0, namespace_id, blob, numbers, tiers=False))
        return expect(reply, m.Done).count

    def _by_id(self, namespace_id: int, layout: Layout, request: m.Message) -> m.Reply:
        def ask(link: Link) -> m.Reply:
            link.bind_id(namespace_id, layout)
            return link.channel.call(request)

        return self.links.call(ask, patient=True)

    def config(self) -> dict[str, Any]:
        """The server's settings, secrets hidden. For the server's own user; raises `UsageError` for others."""
        return expect(self._ask(m.ConfigRequest(0)), m.StatusReply).status

    def unpin(self, keys: Sequence[bytes], *, namespace: Namespace) -> list[Status]:
        """End pins before they expire."""
        return self._pages(keys, namespace, lambda blob: m.Unpin(0, namespace.id, blob))

    def query_prefetch_status(self, job: int) -> m.LookupReply:
        """Progress of the loads of a lookup; `done` when they have ended. For a lookup with `hold` that found nothing
        at first, the first query after its loads makes the promise, which the caller owns."""
        return self._lookups.status_of(job)

    def query_lookup_hits(self, job: int) -> m.LookupReply:
        """What will be a hit. Available as soon as the tiers have answered, before the loads end."""
        return self._lookups.whole(expect(self._ask(m.QueryLookupHits(0, job)), m.LookupReply))

    def lease_status(self, lease_id: int) -> m.LeaseState:
        """What the server knows of a lease of this client."""
        return expect(self._ask(m.LeaseStatusOf(0, lease_id)), m.LeaseState)

    def get_chunk_size(self) -> int:
        """The server's chunk size, in tokens."""
        return expect(self._ask(m.GetChunkSize(0)), m.ChunkSize).tokens

    def status(self) -> dict[str, Any]:
        """The server's status, as a nested dict."""
        return expect(self._ask(m.StatusRequest(0)), m.StatusReply).status

    def tiers_list(self) -> list[dict[str, Any]]:
        """The tiers in order, with their status and their settings; secrets are hidden."""
        return expect(self._ask(m.Tiers(0)), m.TiersReply).tiers

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
        self._ask(m.ChangeTier(0, action, tier, dict(settings or {}), dict(texts or {})))

    def report_block_allocation(self, keys: Sequence[bytes], blocks: EngineBlocks, *, namespace: Namespace) -> int:
        """Report which of an engine's blocks these keys hold, in prefix order, so that routers that listen to the
        server's KV events learn it. May be called before or after the store, and for objects on tiers, too. Returns the
        number of keys that were passed on; 0 if nobody listens, and nothing needs to be reported for now.
        `wants_blocks` says that without a call.

        Raises `UsageError` if `blocks` does not have the same number of hashes for each key.
        """
        keys = checked_keys(keys)
        counted = 0
        for first, part in blocks.pages(len(keys)):
            request = part.message(namespace.id, join_keys(keys[first : first + part.keys]))
            counted += expect(self.links.call_in(namespace, request), m.Done).count
        return counted

    def quotas(self) -> list[dict[str, Any]]:
        """The tenants with a quota: `tenant`, `namespaces` as hexadecimal text, and `stores`, each with `used_bytes`,
        `reserved_bytes` and `limit_bytes`. The entry without a name covers all namespaces without a tenant."""
        found: list[dict[str, Any]] = []
        while True:
            first = len(found)
            reply = expect(self._ask(m.QuotasRequest(0, first)), m.QuotasReply)
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
        by_store = {store: dict(figures) for store, figures in stores.items()}
        ids = None if namespaces is None else list(namespaces)
        self._ask(m.SetQuota(0, tenant, ids, by_store))

    def quota_remove(self, tenant: str) -> None:
        """Remove a tenant's quotas; its objects stay. Raises `UsageError` for an unknown tenant."""
        self._ask(m.RemoveQuota(0, tenant))

    def companions(self) -> Mapping[str, Mapping[str, Any]] | None:
        """What the server's companions offer to workers, by name, from the server's welcome. None if no server has
        answered this client yet. Makes no call."""
        link = self.links.look()
        return None if link is None else link.companions

    def operate(self, companion: str, operation: str, /, **arguments: Any) -> dict[str, Any]:
        """Call an operation of a companion, as its package documents it. Raises `UsageError` if there is no such
        companion or operation, and for everybody except the server's own user over the lifeline."""
        return expect(self._ask(m.Operate(0, companion, operation, arguments)), m.Operated).result

    def call_operation(
        self, operation: str, request: msgspec.Struct | Mapping[str, Any], reply: type[_Reply]
    ) -> _Reply:
        """Call an operation that a plugin added to the server, with its own request and reply types. Raises
        `UsageError` if there is no such operation, for a request that it does not understand, and for everybody except
        the server's own user over the lifeline."""
        try:
            body = msgspec.msgpack.encode(request)
        except (OverflowError, TypeError, ValueError) as error:
            raise UsageError(f"this request of {operation} cannot be sent: {error}") from error
        answer = expect(self._ask(m.CallOperation(0, operation, body)), m.OperationReply)
        try:
            return msgspec.msgpack.decode(answer.body, type=reply)
        except msgspec.MsgspecError as error:
            kind = getattr(reply, "__name__", reply)
            raise UsageError(f"the reply of {operation} is not a {kind}: {error}") from error

    def warm(
        self, namespace_id: int, layout: Layout, keys: Sequence[bytes], tiers: Sequence[str] | None, wait_s: float
    ) -> int:
        """Load objects into the pool and keep them, ahead of requests, which have priority. `tiers`: from where (None:
        any). Returns how many of the keys are in the pool now.

        For tools that found the keys on a tier and know only an id and a layout. At most one frame of keys.
        """
        keys = checked_keys(keys)
        blob = join_keys(keys)
        named = None if tiers is None else list(tiers)
        options = m.LookupOptions(prefix=False, wait_s=wait_s, tiers=named, policy="retain", warm_up=True)

        def warm(link: Link) -> m.Reply:
            link.bind_id(namespace_id, layout)
            return link.channel.call(m.LookupRequest(0, namespace_id, blob, options), wait_s)

        return expect(self.links.call(warm, patient=True), m.LookupReply).hits

    def ping(self, payload: bytes = b"") -> bytes:
        """A round trip with a payload."""
        return expect(self._ask(m.Ping(0, payload)), m.Pong).payload

    def noop(self) -> None:
        """A round trip without a payload."""
        self._ask(m.Noop(0))

    def _ask(self, request: m.Message) -> m.Reply:
        try:
            return self.links.current(patient=True).channel.call(request)
        except ForgottenError:  # see `Links.call`, which would cost each call 0.2 µs
            return self.links.current(patient=True).channel.call(request)

    def _pages(self, keys: Sequence[bytes], namespace: Namespace, make: Callable[[bytes], m.Message]) -> list[Status]:
        keys = checked_keys(keys)
        statuses: list[Status] = []
        for first in range(0, len(keys), BATCH_KEYS_MAX):
            page = keys[first : first + BATCH_KEYS_MAX]
            reply = self.links.call_in(namespace, make(join_keys(page)))
            statuses += grant_statuses(expect(reply, m.PinnedReply).statuses, len(page))
        return statuses

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """End the session: release every lease, invalidate every view. Idempotent.

        Waits up to `timeout_s`: for copies by other threads, then for the server's answer. Copies that have not ended
        by then, and tensors and arrays that are still referenced, keep their slots reserved until they are dropped.
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


def _caller() -> str:
    """FILE:LINE of the calling code outside this library."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith("lmcache_core."):
        frame = frame.f_back
    return "?" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"
