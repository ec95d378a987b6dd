"""AsyncClient against a real server: the same answers, and an event loop that goes on meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from lmcache_core import AsyncClient, Client, Layout, Namespace, PageGroup, Region, Server
from lmcache_core.client.asynchronous import elsewhere
from lmcache_core.client.find.lookups import LookupHandle
from lmcache_core.client.move.page_jobs import RetrieveJob
from lmcache_core.client.results import Status
from lmcache_core.errors import CacheError
from lmcache_core.native import native

from .conftest import locks_of

NBYTES = 4096
SPACE = Namespace("asynchronous", Layout("uint8", (NBYTES,)))
KEYS = [bytes([number]) * 32 for number in range(8)]
AT_ONCE = {
    "lookup_nowait",
    "lookup_many_nowait",
    "companions",
    "look",
}  # of Client, what never waits and is called there


def content(key: bytes) -> bytes:
    return key * (NBYTES // len(key))


@pytest.fixture
def server(start: Callable[..., Server]) -> Server:
    return start(l1={"backing": "memfd"}, drain_s=0.1)


def connect(server: Server, **options: Any) -> AsyncClient:
    return AsyncClient.connect(server.parts.settings.name, runtime_dir=server.parts.settings.runtime_dir, **options)


def test_every_method_of_a_client_is_there_with_its_parameters() -> None:
    for name, method in inspect.getmembers(Client, inspect.isfunction):
        if name.startswith("_") or name in AT_ONCE:
            continue
        ours = getattr(AsyncClient, name, None)
        assert ours is not None, f"AsyncClient lacks {name}: one more line in client/asynchronous.py"
        if name != "register_pages":
            assert inspect.iscoroutinefunction(ours), name
        theirs = set(inspect.signature(method).parameters)
        if name != "lookup":  # which passes its options on
            assert set(inspect.signature(ours).parameters) == theirs, name


def test_what_is_stored_is_found_and_read(server: Server) -> None:
    async def run() -> None:
        async with connect(server) as client:
            stored = await client.store(KEYS, [content(key) for key in KEYS], namespace=SPACE)
            assert stored.stored == len(KEYS)
            found = await client.lookup([*KEYS, b"x" * 32], namespace=SPACE)
            assert found.hits == len(KEYS)
            into = [bytearray(NBYTES) for _ in KEYS]
            assert (await client.retrieve(KEYS, into, namespace=SPACE)).hits == len(KEYS)
            assert [bytes(each) for each in into] == [content(key) for key in KEYS]
            held = await client.lookup(KEYS, namespace=SPACE, hold=True)
            assert await client.free_lookup_locks(held.promise) == 1
            assert (await client.lookup(KEYS * 200, namespace=SPACE)).hits == 200 * len(KEYS)
            assert (await client.status())["l1"]["used_bytes"] == len(KEYS) * NBYTES

    asyncio.run(run())


@pytest.mark.parametrize("use_index", [True, False])
def test_async_pages_store_and_retrieve_the_same_bytes(server: Server, use_index: bool) -> None:
    async def run() -> None:
        memory = bytearray(b"".join(map(content, KEYS)))
        regions = [Region(memory, 0, NBYTES, NBYTES, len(KEYS))]
        async with connect(server, use_index=use_index) as client:
            pages = client.register_pages([PageGroup(SPACE, regions, 1)])
            assert (await pages.store([(0, KEYS, range(len(KEYS)))])).stored == len(KEYS)
            before = bytes(memory)
            memory[:] = bytes(len(memory))
            assert (await pages.retrieve([(0, KEYS, range(len(KEYS)))])).hits == len(KEYS)
            assert bytes(memory) == before
            memory[:] = bytes(len(memory))
            got = await client.retrieve_strided(KEYS, regions, range(len(KEYS)), namespace=SPACE)
            assert got.hits == len(KEYS)
            assert bytes(memory) == before
            again = await client.store_strided(KEYS[:2], regions, [0, 1], namespace=SPACE)
            assert list(again.statuses) == [Status.EXISTS] * 2

    asyncio.run(run())


def test_a_hit_by_the_index_does_not_give_the_event_loop_away(server: Server) -> None:
    async def run() -> None:
        async with connect(server) as client:
            await client.store(KEYS, [content(key) for key in KEYS], namespace=SPACE)
            if not client.client.lookup(KEYS, namespace=SPACE, ask=False).hits:
                pytest.skip("there is no index without the C extension")
            for ask in (True, False):
                coroutine = client.lookup(KEYS, namespace=SPACE, ask=ask)
                with pytest.raises(StopIteration) as ended:
                    coroutine.send(None)  # to its end, without one turn of the loop
                assert ended.value.value.hits == len(KEYS)

    asyncio.run(run())


@pytest.fixture
def stopped(tmp_path: Path) -> Iterator[Any]:
    """A server in a process of its own that can be made to hang; a connected client."""
    name = f"h{os.urandom(4).hex()}"
    command = [sys.executable, "-m", "lmcache_core.cli.main", "serve", f"--name={name}", "--l1.backing=memfd"]
    command += [f"--runtime_dir={tmp_path / 'run'}", f"--state_dir={tmp_path / 'state'}", "--l1.size_bytes=16MiB"]
    with (tmp_path / "log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            yield process, name, tmp_path / "run"
        finally:
            process.send_signal(signal.SIGCONT)
            process.kill()


def test_the_event_loop_goes_on_while_a_hung_server_is_waited_for(stopped: Server) -> None:
    process, name, runtime_dir = stopped

    async def run() -> None:
        async with AsyncClient.connect(name, runtime_dir=runtime_dir, call_timeout_s=60) as client:
            while not await client.register_layout(SPACE):
                await asyncio.sleep(0.02)
            process.send_signal(signal.SIGSTOP)
            asked = [
                asyncio.ensure_future(client.lookup(KEYS, namespace=SPACE)),
                asyncio.ensure_future(client.status()),
            ]
            for _ in range(100):
                await asyncio.sleep(0.001)  # would never end if either held the loop
            assert not any(each.done() for each in asked)
            process.send_signal(signal.SIGCONT)
            found, status = await asyncio.gather(*asked)
            assert found.hits == 0
            assert "l1" in status

    asyncio.run(run())


def test_a_cancelled_call_ends_when_it_writes_no_more(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    written, go_on = threading.Event(), threading.Event()
    retrieve = Client.retrieve

    async def run() -> None:
        async with connect(server) as client:
            await client.store(KEYS, [content(key) for key in KEYS], namespace=SPACE)

            def slowly(*arguments: Any, **options: Any) -> Any:
                assert go_on.wait(60)
                result = retrieve(client.client, *arguments, **options)
                written.set()
                return result

            into = [bytearray(NBYTES) for _ in KEYS]
            task = asyncio.ensure_future(_call(slowly, KEYS, into))
            await asyncio.sleep(0)
            for _ in range(3):  # impatiently
                task.cancel()
                await asyncio.sleep(0)
            assert not task.done()
            go_on.set()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert written.is_set()

    async def _call(slowly: Any, keys: Sequence[bytes], into: Any) -> Any:
        from functools import partial

        return await elsewhere(Client.connect("nobody"), partial(slowly, keys, into, namespace=SPACE))

    asyncio.run(run())


@pytest.mark.parametrize("way", ["of many keys", "of what the index has", "of many groups"])
def test_a_promise_that_a_cancelled_task_would_have_got_is_given_back(server: Server, way: str) -> None:
    if way == "of what the index has" and native is None:
        pytest.skip("there is no index without the C extension")
    many = [number.to_bytes(2, "big") * 16 for number in range(1100)]  # more than a frame

    async def run() -> None:
        async with connect(server) as client:
            await client.store(many, [bytes(NBYTES)] * len(many), namespace=SPACE)
            asked: dict[str, Any] = {
                "of many keys": lambda: client.lookup(many, namespace=SPACE, hold=True),
                "of what the index has": lambda: client.lookup(many[:8], namespace=SPACE, hold=True, ask=False),
                "of many groups": lambda: client.lookup_many([(SPACE, many[:8])], unit_tokens=16, hold=True),
            }
            task = asyncio.ensure_future(asked[way]())
            await asyncio.sleep(0)  # it is in the executor
            for _ in range(3):
                task.cancel()
                await asyncio.sleep(0)
            with pytest.raises(asyncio.CancelledError):
                await task
            assert (await client.status())["l1"]["leases_by_kind"]["promise"] == 0
            held = await asked[way]()  # and one that is not cancelled keeps its own
            assert held.promise
            assert (await client.status())["l1"]["leases_by_kind"]["promise"] > 0

    asyncio.run(run())


@pytest.mark.parametrize("way", ["prepare_store", "prepare_retrieve"])
def test_a_lease_that_a_cancelled_task_would_have_got_is_closed(server: Server, way: str) -> None:
    """By the time that the task has ended, also if its client makes no other call, and somebody keeps the task."""

    async def run() -> None:
        async with connect(server, use_index=False) as client, connect(server, maps_pool=False) as watcher:
            await client.store(KEYS[:4], [content(key) for key in KEYS[:4]], namespace=SPACE)
            keys = KEYS[4:] if way == "prepare_store" else KEYS[:4]
            task = asyncio.ensure_future(getattr(client, way)(keys, namespace=SPACE))
            await asyncio.sleep(0)  # it is in the executor
            task.cancel()
            with pytest.raises(asyncio.CancelledError) as caught:
                await task
            leases = (await watcher.status())["l1"]["leases_by_kind"]
            assert leases == {"promise": 0, "read": 0, "write": 0}, caught
            lease = await getattr(client, way)(keys, namespace=SPACE)
            assert lease.granted == [0, 1, 2, 3]  # and one that is not cancelled keeps its own
            lease.close()

    asyncio.run(run())


def test_a_failure_that_nobody_waits_for_any_more_is_not_reported_as_forgotten(server: Server) -> None:
    complaints: list[dict[str, object]] = []

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        async with connect(server) as client:
            task = asyncio.ensure_future(client.clear("no namespace"))  # type: ignore[arg-type]
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            del task
            gc.collect()

    asyncio.run(run())
    assert complaints == []


def test_pages_of_a_task_that_is_closed_without_its_loop_are_not_written_any_more(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = bytearray(NBYTES)
    cancelled: list[Any] = []
    with connect(server).client as client:
        client.store(KEYS[:1], [content(KEYS[0])], namespace=SPACE)
        pages = AsyncClient(client).register_pages([PageGroup(SPACE, [Region(buffer, 0, NBYTES, NBYTES, 1)], 1)])
        monkeypatch.setattr(RetrieveJob, "done", lambda job: bool(cancelled))
        monkeypatch.setattr(RetrieveJob, "leave", lambda job: cancelled.append(job))
        task = pages.retrieve([(0, KEYS[:1], [0])])
        task.send(None)
        task.close()
    assert len(cancelled) == 1


def test_a_promise_is_given_back_that_comes_when_the_event_loop_is_gone(server: Server) -> None:
    go_on, answered = threading.Event(), threading.Event()
    with connect(server).client as client:
        client.store(KEYS, [content(key) for key in KEYS], namespace=SPACE)

        def slowly() -> Any:
            assert go_on.wait(60)
            try:
                return client.lookup(KEYS, namespace=SPACE, hold=True)
            finally:
                answered.set()

        loop = asyncio.new_event_loop()
        executor = ThreadPoolExecutor(1)
        loop.set_default_executor(executor)
        task = elsewhere(client, slowly)
        waiting = loop.create_task(task)
        loop.run_until_complete(asyncio.sleep(0))
        loop.run_until_complete(asyncio.sleep(0))  # it is in the executor
        go_on.set()
        assert answered.wait(60)
        executor.shutdown(wait=True)
        assert client.status()["l1"]["leases_by_kind"]["promise"] == 1
        loop.set_exception_handler(lambda *_: None)  # it tells of a task that was dropped, which is what this is about
        loop.close()
        del waiting, task
        gc.collect()
        assert client.status()["l1"]["leases_by_kind"]["promise"] == 0


@pytest.mark.parametrize("what", ["lookup", "pages"])
def test_a_task_that_is_collected_inside_of_a_lock_holds_nobody_up(
    server: Server, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forgotten event loop and its tasks are collected wherever something is allocated, inside of any lock."""
    with connect(server, use_index=False).client as client:
        client.store(KEYS, [content(key) for key in KEYS], namespace=SPACE)
        awaited = AsyncClient(client)
        monkeypatch.setattr(RetrieveJob, "done", lambda job: False)
        monkeypatch.setattr(LookupHandle, "done", False)
        pages = awaited.register_pages([PageGroup(SPACE, [Region(bytearray(NBYTES), 0, NBYTES, NBYTES, 1)], 1)])
        task = {
            "lookup": lambda: awaited.lookup(KEYS, namespace=SPACE, hold=True),
            "pages": lambda: pages.retrieve([(0, KEYS[:1], [0])]),
        }[what]()
        task.send(None)
        cycle: list[object] = [task]
        cycle.append(cycle)
        del task, cycle
        link = client.links.current()

        def collect() -> None:
            with contextlib.ExitStack() as taken:
                for lock in locks_of(link.channel, client.links):
                    taken.enter_context(lock)
                gc.collect()

        thread = threading.Thread(target=collect, daemon=True)
        thread.start()
        thread.join(60)
        assert not thread.is_alive()
        client.status()  # whatever came of it is taken back behind this
        assert client.status()["l1"]["leases_by_kind"] == dict.fromkeys(client.status()["l1"]["leases_by_kind"], 0)


def test_one_client_serves_two_event_loops_and_is_closed_in_one_of_them(stopped: Server) -> None:
    process, name, runtime_dir = stopped
    client = AsyncClient.connect(name, runtime_dir=runtime_dir, call_timeout_s=60)
    read, hung, ended = threading.Event(), threading.Event(), []

    async def connected() -> None:
        while not await client.register_layout(SPACE):
            await asyncio.sleep(0.02)
        await client.store(KEYS, [content(key) for key in KEYS], namespace=SPACE)

    async def ask() -> None:
        into = [bytearray(NBYTES) for _ in KEYS]
        assert (await client.retrieve(KEYS, into, namespace=SPACE)).hits == len(KEYS)
        assert [bytes(each) for each in into] == [content(key) for key in KEYS]
        assert (await client.lookup([b"x" * 32], namespace=SPACE)).hits == 0
        read.set()
        while not hung.is_set():
            await asyncio.sleep(0.001)
        asked = [client.lookup([b"y" * 32], namespace=SPACE, hold=True), client.status(), client.clear(SPACE)]
        ended.extend(await asyncio.gather(*asked, return_exceptions=True))

    asyncio.run(connected())
    other = threading.Thread(target=asyncio.run, args=(ask(),))
    other.start()
    asyncio.run(connected())
    assert read.wait(60)
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)  # until then it may answer
    hung.set()

    async def close() -> None:
        await asyncio.sleep(0.05)
        await client.close()

    asyncio.run(close())
    other.join(60)
    assert not other.is_alive()
    assert ended[0].hits == 0 if not isinstance(ended[0], BaseException) else isinstance(ended[0], CacheError)
    assert all(isinstance(each, CacheError) for each in ended[1:])


def test_a_cancelled_lookup_is_cancelled_at_the_server(stopped: Server) -> None:
    process, name, runtime_dir = stopped

    async def run() -> None:
        async with AsyncClient.connect(name, runtime_dir=runtime_dir) as client:
            while not await client.register_layout(SPACE):
                await asyncio.sleep(0.02)
            process.send_signal(signal.SIGSTOP)
            task = asyncio.ensure_future(client.lookup(KEYS, namespace=SPACE, hold=True))
            await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            process.send_signal(signal.SIGCONT)
            assert (await client.lookup(KEYS, namespace=SPACE)).hits == 0
            assert (await client.status())["l1"]["leases_by_kind"]["promise"] == 0

    asyncio.run(run())


def test_without_a_server_everything_is_a_value(tmp_path: Path) -> None:
    async def run() -> None:
        async with AsyncClient.connect("nobody", runtime_dir=tmp_path, connect_timeout_s=0.1) as client:
            assert (await client.lookup(KEYS, namespace=SPACE)).hits == 0
            assert (await client.store(KEYS[:1], [content(KEYS[0])], namespace=SPACE)).stored == 0
            assert client.why_unreachable

    asyncio.run(run())
