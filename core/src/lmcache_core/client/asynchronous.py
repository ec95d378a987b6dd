"""The client for asyncio: what waits in `Client` is awaited here, and nothing else differs.

A client has no thread of its own (decision 0001), and this one makes none either (decision 0028): lookups and page
jobs are the ones that never wait, looked at now and then by the event loop; calls that are one question and one answer
wait in the loop's own executor. What the index answers is answered at once, in the event loop, without giving it away.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import partial, wraps
from pathlib import Path
from types import TracebackType
from typing import Any, Concatenate, Literal, ParamSpec, Protocol, Self, TypeVar

import msgspec

from lmcache_core.client.boundaries import CommonHits
from lmcache_core.client.client import Client
from lmcache_core.client.leases import Lease
from lmcache_core.client.page_jobs import PagesResult
from lmcache_core.client.pages import PageEntry, Pages
from lmcache_core.client.promises import Promise
from lmcache_core.client.regions import PageGroup, Region
from lmcache_core.client.results import LookupResult, StoreResult
from lmcache_core.limits import BATCH_KEYS_MAX
from lmcache_core.protocol.messages import LookupReply
from lmcache_core.tokens.namespace import Namespace

_TURNS = 16  # of the loop, before a look costs a pause: a round trip takes some tens of µs
_PAUSE_S = 0.0001
_PAUSE_S_MAX = 0.005  # what a tier or a large copy may find its waiter late by

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R", bound=msgspec.Struct)
Entries = Sequence[PageEntry | tuple[Any, ...]]


class _UnderWay(Protocol):
    def cancel(self) -> None: ...


async def _until(done: Callable[[], bool], under_way: _UnderWay) -> None:
    """Look until it is done, at growing distances. Given up where the task is cancelled: then nothing is written any
    more."""
    turns, pause_s = 0, _PAUSE_S
    try:
        while not done():
            if turns < _TURNS:
                turns += 1
                await asyncio.sleep(0)
            else:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _PAUSE_S_MAX)
    except BaseException:  # cancelled, or closed after its event loop has ended
        under_way.cancel()
        raise


async def _elsewhere(call: Callable[[], T], give_back: Callable[[T], object] | None = None) -> T:
    """In the loop's executor. A task that is cancelled meanwhile ends when the call has: until then it may write into
    the caller's memory. `give_back` is called there with a result that nobody gets then."""
    loop = asyncio.get_running_loop()
    running = loop.run_in_executor(None, call)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await _ended(running)
        if not running.cancelled() and running.exception() is None and give_back is not None:
            await _ended(loop.run_in_executor(None, partial(give_back, running.result())))
        raise


async def _ended(running: asyncio.Future[Any]) -> None:
    """Wait for it, however often the task is cancelled."""
    while not running.done():
        try:
            await asyncio.wait([running])
        except asyncio.CancelledError:
            continue  # asked twice: the answer is the same


def _free(client: Client, found: LookupResult | CommonHits) -> None:
    client.free_lookup_locks(found.promise)


def _free_made(client: Client, found: LookupReply) -> None:
    """A promise that has time left was made by this answer; of any other, somebody has heard before."""
    if found.promise and found.deadline_s > 0:
        client.free_lookup_locks([found.promise])


def _close(client: Client, lease: Lease) -> None:
    lease.close()


def _awaited(
    method: Callable[Concatenate[Client, P], T], give_back: Callable[[Client, T], object] | None = None
) -> Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]]:
    @wraps(method)
    async def call(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await _elsewhere(
            partial(method, self.client, *args, **kwargs),
            None if give_back is None else partial(give_back, self.client),
        )

    return call


class AsyncPages:
    """As `Pages`; what waits there is awaited."""

    def __init__(self, pages: Pages) -> None:
        self.pages = pages

    async def store(self, entries: Entries, *, deadline_s: float | None = None, traceparent: str = "") -> PagesResult:
        """As `Pages.store`. The copies are made in the loop's executor, the commits are awaited."""
        start = partial(self.pages.store_start, entries, deadline_s=deadline_s, traceparent=traceparent)
        job = await _elsewhere(start)
        await _until(job.done, job)
        return _whole(job.result)

    async def retrieve(
        self,
        entries: Entries,
        *,
        promises: Sequence[Promise | None] = (),
        order: Literal["region", "object"] = "object",
        deadline_s: float | None = None,
        verify: str | None = None,
    ) -> PagesResult:
        """As `Pages.retrieve`: threads of the extension copy, and the event loop looks at the job. Of a task that is
        cancelled no thread writes any more when it ends."""
        job = self.pages.retrieve_start(entries, promises=promises, order=order, deadline_s=deadline_s, verify=verify)
        await _until(job.done, job)
        return _whole(job.result)

    @property
    def groups(self) -> tuple[PageGroup, ...]:
        """As they were registered."""
        return self.pages.groups


class AsyncClient:
    """A `Client` for one event loop. Every method is that of `Client`, of the same name and with the same parameters;
    what may wait there is a coroutine here. `client` is the one beneath, for whatever never waits.

    A coroutine that the index answers as a whole ends without giving the event loop away: `lookup`, and with
    `ask=False` always. A cancelled task ends when nothing of its call writes any more; a promise
    that it would have got is freed, and a lease is closed.
    """

    def __init__(self, client: Client) -> None:
        self.client = client

    @classmethod
    def connect(cls, name: str = "default", **options: Any) -> AsyncClient:
        """As `Client.connect`, which never waits. Use the result in an `async with`, or `close` it."""
        return cls(Client.connect(name, **options))

    @property
    def why_unreachable(self) -> str:
        """As `Client.why_unreachable`."""
        return self.client.why_unreachable

    async def lookup(
        self, keys: Sequence[bytes], *, namespace: Namespace, ask: bool = True, **options: Any
    ) -> LookupResult:
        """As `Client.lookup`. What the index has is found at once; the event loop goes on while the server, and
        through it the tiers, are asked for the rest. More keys than one frame (1,024) are asked for in the loop's
        executor."""
        if not ask and not options.get("hold"):
            return self.client.lookup(keys, namespace=namespace, ask=False, **options)
        if not ask or len(keys) > BATCH_KEYS_MAX:
            call = partial(self.client.lookup, keys, namespace=namespace, ask=ask, **options)
            return await _elsewhere(call, partial(_free, self.client))
        handle = self.client.lookup_nowait(keys, namespace=namespace, **{"wait_s": 0.0} | options)
        await _until(lambda: handle.done, handle)
        return _whole(handle.result)

    def register_pages(self, groups: Sequence[PageGroup]) -> AsyncPages:
        """As `Client.register_pages`, which never waits."""
        return AsyncPages(self.client.register_pages(groups))

    async def store_strided(
        self,
        keys: Sequence[bytes],
        regions: Sequence[Region],
        page_ids: Any,
        *,
        namespace: Namespace,
        pages_per_object: int = 1,
        valid_pages: int | None = None,
    ) -> StoreResult:
        """As `Client.store_strided`."""
        pages = self.register_pages([PageGroup(namespace, regions, pages_per_object)])
        return StoreResult((await pages.store([PageEntry(0, keys, page_ids, 0, valid_pages)])).statuses[0])

    async def retrieve_strided(
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
        """As `Client.retrieve_strided`."""
        pages = self.register_pages([PageGroup(namespace, regions, pages_per_object)])
        entry = PageEntry(0, keys, page_ids, skip_pages, valid_pages)
        return await pages.retrieve([entry], promises=[promise], verify=verify)

    async def operate(self, companion: str, operation: str, **arguments: Any) -> dict[str, Any]:
        """As `Client.operate`."""
        return await _elsewhere(partial(self.client.operate, companion, operation, **arguments))

    async def call_operation(self, operation: str, request: msgspec.Struct, reply: type[R]) -> R:
        """As `Client.call_operation`."""
        return await _elsewhere(partial(self.client.call_operation, operation, request, reply))

    async def record_start(self, directory: str | Path, **settings: Any) -> None:
        """As `Client.record_start`."""
        await _elsewhere(partial(self.client.record_start, directory, **settings))

    # One question and one answer, or a copy that lets others run: in the loop's executor.
    store = _awaited(Client.store)
    retrieve = _awaited(Client.retrieve)
    register_layout = _awaited(Client.register_layout)
    lookup_many = _awaited(Client.lookup_many, _free)
    prepare_store = _awaited(Client.prepare_store, _close)
    prepare_retrieve = _awaited(Client.prepare_retrieve, _close)
    free_lookup_locks = _awaited(Client.free_lookup_locks)
    renew = _awaited(Client.renew)
    pin_memory = _awaited(Client.pin_memory)
    end_session = _awaited(Client.end_session)
    clear = _awaited(Client.clear)
    clear_by_id = _awaited(Client.clear_by_id)
    drop = _awaited(Client.drop)
    report_damaged = _awaited(Client.report_damaged)
    explain = _awaited(Client.explain)
    explain_by_id = _awaited(Client.explain_by_id)
    wait_stored = _awaited(Client.wait_stored)
    pin = _awaited(Client.pin)
    pin_by_id = _awaited(Client.pin_by_id)
    unpin = _awaited(Client.unpin)
    config = _awaited(Client.config)
    query_prefetch_status = _awaited(Client.query_prefetch_status, _free_made)
    query_lookup_hits = _awaited(Client.query_lookup_hits)
    lease_status = _awaited(Client.lease_status)
    get_chunk_size = _awaited(Client.get_chunk_size)
    status = _awaited(Client.status)
    tiers_list = _awaited(Client.tiers_list)
    tiers_add = _awaited(Client.tiers_add)
    tiers_reconfigure = _awaited(Client.tiers_reconfigure)
    tiers_drain = _awaited(Client.tiers_drain)
    tiers_remove = _awaited(Client.tiers_remove)
    report_block_allocation = _awaited(Client.report_block_allocation)
    record_stop = _awaited(Client.record_stop)
    quotas = _awaited(Client.quotas)
    quota_set = _awaited(Client.quota_set)
    quota_remove = _awaited(Client.quota_remove)
    warm = _awaited(Client.warm)
    ping = _awaited(Client.ping)
    noop = _awaited(Client.noop)
    close = _awaited(Client.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def _whole(result: T | None) -> T:
    assert result is not None
    return result
