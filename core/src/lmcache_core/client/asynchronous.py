"""The client for asyncio: calls that wait in `Client` are coroutines here; everything else is the same.

A client has no thread of its own (decision 0001), and this one starts none either (decision 0028). Lookups and page
jobs never wait; the event loop polls them from time to time. Calls with one request and one answer wait in the loop's
executor. If the index has the answer, it is returned at once, without yielding to the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import partial, wraps
from types import TracebackType
from typing import Any, Concatenate, Generic, Literal, ParamSpec, Self, TypeVar

import msgspec

from lmcache_core.client.client import Client
from lmcache_core.client.find.group_lookups import CommonHits
from lmcache_core.client.move.leases import Lease
from lmcache_core.client.move.page_jobs import PagesResult
from lmcache_core.client.move.pages import PageEntry, Pages
from lmcache_core.client.move.regions import PageGroup, Region
from lmcache_core.client.promises import Promise
from lmcache_core.client.results import LookupResult, StoreResult
from lmcache_core.limits import BATCH_KEYS_MAX
from lmcache_core.protocol.messages import LookupReply
from lmcache_core.tokens.namespace import Namespace

_TURNS = 16  # turns of the loop before the first pause: a round trip takes some tens of µs
_PAUSE_S = 0.0001
_PAUSE_S_MAX = 0.005  # a waiter may notice a tier's answer or the end of a large copy this much later

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R", bound=msgspec.Struct)
Entries = Sequence[PageEntry | tuple[Any, ...]]


async def _until(
    done: Callable[[], bool], cancel: Callable[[], object], leave: Callable[[], object] | None = None
) -> None:
    """Poll with growing pauses until it is done. If the task is cancelled, `cancel` is called; afterwards nothing is
    written. If the task is closed or collected without its event loop, `leave` is called, which takes no lock, because
    that can happen inside any lock."""
    turns, pause_s = 0, _PAUSE_S
    try:
        while not done():
            if turns < _TURNS:
                turns += 1
                await asyncio.sleep(0)
            else:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _PAUSE_S_MAX)
    except GeneratorExit:
        if leave is not None:
            leave()
        raise
    except BaseException:  # cancelled, most of all: nobody waits for the call any more
        cancel()
        raise


class _Untaken(Generic[T]):
    """The result of a call in the executor, until somebody takes it. Promises that nobody takes are freed, and leases
    settled, with the client's next call: a task may be closed or collected without its event loop at any time, and
    inside any lock."""

    def __init__(self, client: Client, value: T) -> None:
        self._client = client
        self._value = value
        self._taken = False

    def take(self) -> T:
        """Hand the result to the caller."""
        self._taken = True
        return self._value

    @property
    def holds(self) -> bool:
        """Whether the server holds something for it."""
        return isinstance(self._value, Lease) or bool(_promises(self._value))

    def free(self) -> None:
        """Free what nobody will take. Waits for the server."""
        value = self.take()
        if isinstance(value, Lease):
            value.close()
        elif promises := _promises(value):
            self._client.free_lookup_locks(promises)

    def __del__(self) -> None:
        if not self._taken and (promises := _promises(self._value)):
            self._client._free_later(promises)


def _promises(answer: object) -> Sequence[int]:
    """The server's ids of promises that this answer made: those have time left. Other promises were reported before."""
    if isinstance(answer, LookupResult | CommonHits):
        return () if answer.promise is None else answer.promise.numbers
    made = isinstance(answer, LookupReply) and answer.promise and answer.deadline_s > 0
    return [answer.promise] if made and isinstance(answer, LookupReply) else ()


async def elsewhere(client: Client, call: Callable[[], T]) -> T:
    """Run the call in the loop's executor. A cancelled task ends when the call has returned, because the call may write
    to the caller's memory until then, and its result has been given back."""
    loop = asyncio.get_running_loop()
    running = loop.run_in_executor(None, lambda: _Untaken(client, call()))
    try:
        return (await asyncio.shield(running)).take()
    except asyncio.CancelledError:
        await _ended(running)
        if not running.cancelled() and running.exception() is None and running.result().holds:
            await _ended(loop.run_in_executor(None, running.result().free))
        raise


async def _ended(running: asyncio.Future[Any]) -> None:
    """Wait until it has ended, even if the task is cancelled again."""
    while not running.done():
        try:
            await asyncio.wait([running])
        except asyncio.CancelledError:
            continue  # a repeated poll gives the same answer


def _awaited(
    method: Callable[Concatenate[Client, P], T],
) -> Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]]:
    @wraps(method)
    async def call(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await elsewhere(self.client, partial(method, self.client, *args, **kwargs))

    return call


class AsyncPages:
    """Like `Pages`, with coroutines for calls that wait."""

    def __init__(self, client: Client, pages: Pages) -> None:
        self.pages = pages
        self._client = client

    async def store(
        self, entries: Entries, *, deadline_s: float | None = None, traceparent: str = "", stream: int | None = None
    ) -> PagesResult:
        """As `Pages.store`. The copies are made in the loop's executor, the commits are awaited. Its threads have
        current streams of their own in torch: give `stream` for pages on a GPU."""
        pages = self.pages
        start = partial(pages.store_start, entries, deadline_s=deadline_s, traceparent=traceparent, stream=stream)
        job = await elsewhere(self._client, start)
        await _until(job.done, job.cancel, job.leave)
        return _whole(job.result)

    async def retrieve(
        self,
        entries: Entries,
        *,
        promises: Sequence[Promise | None] = (),
        order: Literal["region", "object"] = "object",
        deadline_s: float | None = None,
        verify: str | None = None,
        stream: int | None = None,
    ) -> PagesResult:
        """As `Pages.retrieve`: threads of the extension copy, and the event loop looks at the job. Of a task that is
        cancelled no thread writes any more when it ends."""
        job = self.pages.retrieve_start(
            entries, promises=promises, order=order, deadline_s=deadline_s, verify=verify, stream=stream
        )
        await _until(job.done, job.cancel, job.leave)
        return _whole(job.result)

    @property
    def groups(self) -> tuple[PageGroup, ...]:
        """The groups as registered."""
        return self.pages.groups


class AsyncClient:
    """A `Client` for one event loop. It has all methods of `Client`, with the same names and parameters; those that may
    wait are coroutines. `client` is the underlying client, for calls that never wait.

    A coroutine that the index answers completely ends without yielding to the event loop: `lookup`, always with
    `ask=False`. A cancelled task ends when nothing of its call writes any more; its promise, if any, is freed, and its
    lease is closed.
    """

    def __init__(self, client: Client) -> None:
        self.client = client

    @classmethod
    def connect(cls, name: str = "", **options: Any) -> AsyncClient:
        """Like `Client.connect`, which never waits. Use the result in an `async with`, or `close` it."""
        return cls(Client.connect(name, **options))

    @property
    def why_unreachable(self) -> str:
        """Like `Client.why_unreachable`."""
        return self.client.why_unreachable

    @property
    def published(self) -> int | None:
        """Like `Client.published`."""
        return self.client.published

    @property
    def wants_blocks(self) -> bool:
        """Like `Client.wants_blocks`."""
        return self.client.wants_blocks

    async def lookup(
        self, keys: Sequence[bytes], *, namespace: Namespace, ask: bool = True, **options: Any
    ) -> LookupResult:
        """Like `Client.lookup`. Hits in the index are found at once; the event loop runs on while the server, and
        through it the tiers, are asked for the rest. More keys than fit into one frame (1,024) are looked up in the
        loop's executor."""
        if not ask and not options.get("hold"):
            return self.client.lookup(keys, namespace=namespace, ask=False, **options)
        if not ask or len(keys) > BATCH_KEYS_MAX:
            call = partial(self.client.lookup, keys, namespace=namespace, ask=ask, **options)
            return await elsewhere(self.client, call)
        handle = self.client.lookup_nowait(keys, namespace=namespace, **{"wait_s": 0.0} | options)
        await _until(lambda: handle.done, handle.cancel)
        return _whole(handle.result)

    def register_pages(self, groups: Sequence[PageGroup]) -> AsyncPages:
        """Like `Client.register_pages`, which never waits."""
        return AsyncPages(self.client, self.client.register_pages(groups))

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
        """Like `Client.store_strided`."""
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
        """Like `Client.retrieve_strided`."""
        pages = self.register_pages([PageGroup(namespace, regions, pages_per_object)])
        entry = PageEntry(0, keys, page_ids, skip_pages, valid_pages)
        return await pages.retrieve([entry], promises=[promise], verify=verify)

    async def operate(self, companion: str, operation: str, /, **arguments: Any) -> dict[str, Any]:
        """Like `Client.operate`."""
        return await elsewhere(self.client, partial(self.client.operate, companion, operation, **arguments))

    async def call_operation(self, operation: str, request: msgspec.Struct, reply: type[R]) -> R:
        """Like `Client.call_operation`."""
        return await elsewhere(self.client, partial(self.client.call_operation, operation, request, reply))

    # One request and one answer, or a copy that releases the GIL: these run in the loop's executor.
    store = _awaited(Client.store)
    retrieve = _awaited(Client.retrieve)
    register_layout = _awaited(Client.register_layout)
    lookup_many = _awaited(Client.lookup_many)
    count_prompt = _awaited(Client.count_prompt)
    count_dropped_stores = _awaited(Client.count_dropped_stores)
    prepare_store = _awaited(Client.prepare_store)
    prepare_retrieve = _awaited(Client.prepare_retrieve)
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
    wait_published = _awaited(Client.wait_published)
    pin = _awaited(Client.pin)
    pin_by_id = _awaited(Client.pin_by_id)
    drop_by_id = _awaited(Client.drop_by_id)
    unpin = _awaited(Client.unpin)
    config = _awaited(Client.config)
    query_prefetch_status = _awaited(Client.query_prefetch_status)
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
