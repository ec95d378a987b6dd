"""Start and end: each step runs or is undone, whatever the others did; and what is scribbled into the tables decides
nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

from lmcache_core.client.results import Status
from lmcache_core.errors import SettingsError, UsageError
from lmcache_core.limits import LAYOUTS_MAX, WORKERS_MAX
from lmcache_core.native import native
from lmcache_core.plugins.loader import load_plugins
from lmcache_core.pool.backing import segment_path
from lmcache_core.pool.header import LAYOUT_ROW_BYTES, SERVING_OFFSET, WORKER_ROW_BYTES
from lmcache_core.pool.layout import Layout
from lmcache_core.server.server import Server
from lmcache_core.tokens.namespace import Namespace
from lmcache_testing.embedded import server_settings
from lmcache_testing.waiting import until

from .conftest import buffers, keys_of, payload

Start = Callable[..., Server]


class Panic(BaseException):
    """What an extension in another language may raise: no `Exception`."""


def nothing_left(server: Server) -> bool:
    path = segment_path(server.parts.settings.name)
    return not path.exists() and not Path(server.address).exists()


def test_a_start_whose_last_word_cannot_be_said_leaves_nothing(tmp_path: Path) -> None:
    server = Server(server_settings(tmp_path))

    def nobody_listens(address: str) -> None:
        raise BrokenPipeError("nobody reads our output")

    with pytest.raises(BrokenPipeError):
        server.run(on_ready=nobody_listens)
    assert nothing_left(server)


def test_an_embedded_server_is_served_by_one_thread_however_it_is_started(tmp_path: Path) -> None:
    def serving() -> int:
        return sum(thread.name == "lmcache-server" for thread in threading.enumerate())

    before = serving()
    with Server(server_settings(tmp_path)).start() as server:
        assert serving() == before + 1
        with pytest.raises(UsageError, match="was already started"):
            server.start()
        with server.connect() as client:
            client.noop()
    assert serving() == before
    assert nothing_left(server)


def test_an_orderly_end_leaves_no_socket_and_none_that_another_has_made_goes(tmp_path: Path) -> None:
    pytest.importorskip("zmq")
    ours, others = tmp_path / "ours", tmp_path / "others"
    for path in (ours, others):
        server = Server(server_settings(tmp_path, zmq={"ipc": str(path)})).start()
        assert path.is_socket()
        if path is others:  # whoever binds there next replaces what is there
            path.unlink()
            path.touch()
        server.stop()
        assert nothing_left(server)
    assert not ours.exists()
    assert others.exists()


def test_a_client_that_connects_as_the_server_ends_finds_an_end_of_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server(server_settings(tmp_path)).start()
    connect, late = server.connect(), []

    def close() -> None:  # the loop turns no more, and says not yet that it has ended
        late.append(connect.links.target.connection())
        ends()

    ends = server.parts.loop.close
    monkeypatch.setattr(server.parts.loop, "close", close)
    server.stop()
    (connection,) = late
    assert connection.ended()
    connection.close()


def test_a_start_that_fails_late_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_threads(self: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("lmcache_core.pool.populate.Populator.start", no_threads)
    settings = server_settings(tmp_path)
    with pytest.raises(RuntimeError, match="new thread"):
        Server(settings)
    assert not segment_path(settings.name).exists()
    assert not list((tmp_path / "run").rglob("lifeline"))


def test_a_start_whose_second_carrier_cannot_be_served_leaves_no_socket_of_the_first(tmp_path: Path) -> None:
    (tmp_path / "clients").mkdir()
    (tmp_path / "no.key_secret").touch()
    zmq = {
        "ipc": True,
        "tcp": "127.0.0.1:0",
        "curve_secret_key_file": str(tmp_path / "no.key_secret"),
        "curve_clients_dir": str(tmp_path / "clients"),
    }
    with pytest.raises(SettingsError, match="key"):
        Server(server_settings(tmp_path, zmq=zmq))
    assert not [path for path in (tmp_path / "run").rglob("*") if path.is_socket()]


@pytest.mark.parametrize("step", ["lmcache_started", "lmcache_stopping"])
def test_a_plugin_that_panics_changes_nothing_about_start_and_end(tmp_path: Path, step: str) -> None:
    registry = load_plugins()
    server = Server(server_settings(tmp_path), registry)
    registry.call = _panicking(registry.call, step)  # type: ignore[method-assign]
    with pytest.raises(Panic) if step == "lmcache_started" else nullcontext():
        server.start()
        server.stop()
    assert server.drain_until_s is not None
    assert nothing_left(server)


def _panicking(call: Callable[..., object], step: str) -> Callable[..., object]:
    def panics(hook: str, *args: object, **kwargs: object) -> object:
        if hook == step:
            raise Panic(step)
        return call(hook, *args, **kwargs)

    return panics


@pytest.mark.parametrize("step", ["listener.close", "sessions.close", "l1.apply", "loop.close"])
def test_a_step_of_the_end_that_fails_keeps_no_other_from_being_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    server = Server(server_settings(tmp_path))
    owner, name = step.split(".")
    part = getattr(server.parts, owner)
    real, serve = getattr(part, name), server.parts.segment.serve
    ending, failed = threading.Event(), threading.Event()

    def fails() -> None:
        real()
        if ending.is_set():
            failed.set()
            raise RuntimeError("this step has a fault")

    def first_step(epoch: int) -> None:
        serve(epoch)
        ending.set()

    with server:
        monkeypatch.setattr(server.parts.segment, "serve", first_step)
        monkeypatch.setattr(part, name, fails)
    assert failed.is_set()
    assert server.end_faults == 1
    assert nothing_left(server)


def test_a_server_that_drains_takes_nothing_new(start: Start, namespace: Namespace) -> None:
    server = start(drain_s=60)
    with server.connect() as client:
        assert client.store(keys_of("a"), [payload(namespace, 1)], namespace=namespace).statuses == [Status.STORED]
        done = threading.Event()
        server.parts.loop.call(lambda: (server.parts.kernel.begin_drain(), done.set()))
        assert done.wait(60)
        statuses = client.store(keys_of("a", "b"), [payload(namespace, 1)] * 2, namespace=namespace).statuses
        assert statuses == [Status.EXISTS, Status.DRAINING]
        assert client.retrieve(keys_of("a"), buffers(namespace, 1), namespace=namespace).hits == 1


# --- scribbles ----------------------------------------------------------------------------------------------


def scribble_rows(server: Server, data: bytes) -> None:
    header = server.parts.segment.header
    end = header.workers_offset + WORKERS_MAX * WORKER_ROW_BYTES
    server.parts.segment.buffer[header.workers_offset : end] = data * (end - header.workers_offset)


def scribble_layouts(server: Server, data: bytes) -> None:
    header = server.parts.segment.header
    end = header.layouts_offset + LAYOUTS_MAX * LAYOUT_ROW_BYTES
    server.parts.segment.buffer[header.layouts_offset : end] = data * (end - header.layouts_offset)


def scribble_front(server: Server, data: bytes) -> None:
    server.parts.segment.buffer[: server.parts.segment.header.index_offset] = (
        data * server.parts.segment.header.index_offset
    )


@pytest.mark.parametrize("data", [b"\0", b"\xff", b"\x01"])
@pytest.mark.parametrize("scribble", [scribble_rows, scribble_layouts, scribble_front])
def test_scribbled_tables_decide_nothing(
    start: Start, namespace: Namespace, scribble: Callable[[Server, bytes], None], data: bytes
) -> None:
    server = start()
    with server.connect("before") as before:
        assert before.store(keys_of("a"), [payload(namespace, 1)], namespace=namespace).stored == 1
        repaired = _repaired(server, lambda: scribble(server, data))
        other = Namespace("other", Layout("uint8", (4096,)))
        with server.connect("after") as after:
            assert after.store(keys_of("b"), [payload(other, 2)], namespace=other).stored == 1
            assert after.retrieve(keys_of("a"), buffers(namespace, 1), namespace=namespace).hits == 1
            status = after.status()
        assert 0 < repaired <= status["pool"]["repaired_words"]
        assert before.retrieve(keys_of("a"), buffers(namespace, 1), namespace=namespace).hits == 1
    server.stop()
    assert server.end_faults == 0
    assert nothing_left(server)


def test_a_scribbled_worker_table_is_none_of_the_end_s_business(start: Start, namespace: Namespace) -> None:
    server = start()
    with server.connect() as client:
        assert client.store(keys_of("a"), [payload(namespace, 1)], namespace=namespace).stored == 1
        stopping = threading.Event()

        def scribble_and_stop() -> None:
            scribble_rows(server, b"\0")
            server.begin_drain()
            stopping.set()

        server.parts.loop.call(scribble_and_stop)
        assert stopping.wait(60)
    server.stop()
    assert server.end_faults == 0
    assert nothing_left(server)


@pytest.mark.skipif(native is None, reason="there is no index without the C extension")
def test_a_zeroed_serving_word_is_written_again(start: Start, namespace: Namespace) -> None:
    server = start()

    def zero() -> None:
        server.parts.segment.buffer[SERVING_OFFSET : SERVING_OFFSET + 8] = bytes(8)

    assert _repaired(server, zero) == 1
    assert server.parts.segment.serving == server.parts.kernel.epoch


def _repaired(server: Server, scribble: Callable[[], object]) -> int:
    """Words that the next housekeeping puts right after this, with none in between."""
    master = server.parts.segment.master
    assert master is not None
    before: list[int] = []

    def begin() -> None:
        scribble()
        before.append(master.repaired)

    server.parts.loop.call(begin)
    until(lambda: before and master.repaired != before[0], "the next housekeeping")
    return master.repaired - before[0]
