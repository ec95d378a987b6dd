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
from typing import Any, Concatenate, Generic, Literal, ParamSpec, Self, TypeVar

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


async def _until(
    done: Callable[[], bool], cancel: Callable[[], object], leave: Callable[[], object] | None = None
) -> None:
    """Look until it is done, at growing distances. `cancel` gives it up where the task is cancelled: then nothing is
    written any more. `leave` does, and takes no lock, where the task is closed or collected without its event loop:
    that happens inside of any lock."""
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
    except BaseException:
        cancel()
        raise


class _Untaken(Generic[T]):
    """What a call in the executor gave, until it is taken. Promises that nobody takes are freed with the client's next
    call, and leases settled: a task may be closed or collected without its event loop at any time, and inside of any
    lock."""

    def __init__(self, client: Client, value: T) -> None:
        self._client = client
        self._value = value
        self._taken = False

    def take(self) -> T:
        """It is the caller's from now on."""
        self._taken = True
        return self._value

    @property
    def holds(self) -> bool:
        """Whether the server keeps something for it."""
        return isinstance(self._value, Lease) or bool(_promises(self._value))

    def free(self) -> None:
        """Nobody gets it. Waits for the server."""
        value = self.take()
        if isinstance(value, Lease):
            value.close()
        elif promises := _promises(value):
            self._client.free_lookup_locks(promises)

    def __del__(self) -> None:
        if not self._taken and (promises := _promises(self._value)):
            self._client._free_later(promises)


def _promises(answer: object) -> Sequence[int]:
    """The server's numbers of those that this answer made: they have time left. Of any other, somebody has heard
    before."""
    if isinstance(answer, LookupResult | CommonHits):
        return () if answer.promise is None else answer.promise.numbers
    made = isinstance(answer, LookupReply) and answer.promise and answer.deadline_s > 0
    return [answer.promise] if made and isinstance(answer, LookupReply) else ()


async def _elsewhere(client: Client, call: Callable[[], T]) -> T:
    """In the loop's executor. A task that is cancelled meanwhile ends when the call has, until when it may write into
    the caller's memory, and when what it gave has been given back."""
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
    """Wait for it, however often the task is cancelled."""
    while not running.done():
        try:
            await asyncio.wait([running])
        except asyncio.CancelledError:
            continue  # asked twice: the answer is the same


def _awaited(
    method: Callable[Concatenate[Client, P], T],
) -> Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]]:
    @wraps(method)
    async def call(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await _elsewhere(self.client, partial(method, self.client, *args, **kwargs))

    return call


class AsyncPages:
    """As `Pages`; what waits there is awaited."""

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
        job = await _elsewhere(self._client, start)
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

    @property
    def wants_blocks(self) -> bool:
        """As `Client.wants_blocks`."""
        return self.client.wants_blocks

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
            return await _elsewhere(self.client, call)
        handle = self.client.lookup_nowait(keys, namespace=namespace, **{"wait_s": 0.0} | options)
        await _until(lambda: handle.done, handle.cancel)
        return _whole(handle.result)

    def register_pages(self, groups: Sequence[PageGroup]) -> AsyncPages:
        """As `Client.register_pages`, which never waits."""
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

    async def operate(self, companion: str, operation: str, /, **arguments: Any) -> dict[str, Any]:
        """As `Client.operate`."""
        return await _elsewhere(self.client, partial(self.client.operate, companion, operation, **arguments))

    async def call_operation(self, operation: str, request: msgspec.Struct, reply: type[R]) -> R:
        """As `Client.call_operation`."""
        return await _elsewhere(self.client, partial(self.client.call_operation, operation, request, reply))

    async def record_start(self, directory: str | Path, **settings: Any) -> None:
        """As `Client.record_start`."""
        await _elsewhere(self.client, partial(self.client.record_start, directory, **settings))

    # One question and one answer, or a copy that lets others run: in the loop's executor.
    store = _awaited(Client.store)
    retrieve = _awaited(Client.retrieve)
    register_layout = _awaited(Client.register_layout)
    lookup_many = _awaited(Client.lookup_many)
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
    pin = _awaited(Client.pin)
    pin_by_id = _awaited(Client.pin_by_id)
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
