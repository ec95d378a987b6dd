"""Servers that die, are doubled, lose their name, or find no room."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lmcache_core.client.client import Client
from lmcache_core.client.results import Status
from lmcache_core.errors import DisconnectedError, LeaseExpiredError
from lmcache_core.native import native
from lmcache_testing.waiting import until

from ..conftest import Node


def test_a_worker_may_start_before_the_server_and_outlive_it(node: Node) -> None:
    client = node.client()
    keys, sources = [node.key("a")], [node.payload(1)]
    assert client.store(keys, sources, namespace=node.namespace).statuses == [Status.UNREACHABLE]
    assert client.lookup(keys, namespace=node.namespace).statuses == [Status.UNREACHABLE]
    assert client.lookup_nowait(keys, namespace=node.namespace).done
    with pytest.raises(DisconnectedError, match="serve"):
        client.status()
    server = node.serve()
    until(lambda: client.store(keys, sources, namespace=node.namespace).stored == 1)
    server.kill()
    into = [bytearray(65536)]
    missing = [node.key("b")]
    assert client.retrieve(missing, into, namespace=node.namespace).statuses == [Status.UNREACHABLE]
    assert client.store(missing, sources, namespace=node.namespace).statuses == [Status.UNREACHABLE]
    node.serve()
    until(lambda: client.store(keys, sources, namespace=node.namespace).stored == 1)
    assert client.retrieve(keys, into, namespace=node.namespace).hits == 1
    assert bytes(into[0]) == sources[0]


def test_a_killed_server_is_noticed_in_the_middle_of_a_lease(node: Node) -> None:
    server = node.serve()
    client = node.client()
    with client.prepare_store([node.key("a")], namespace=node.namespace) as lease:
        view = lease.view(0)
        server.kill()
        view[:] = node.payload(1)  # the memory stays mapped: no SIGBUS, no SIGSEGV
        with pytest.raises(DisconnectedError):
            lease.commit()
    node.serve()
    until(lambda: client.lookup([node.key("a")], namespace=node.namespace).statuses == [Status.MISS])


@pytest.mark.parametrize("use_index", [True, False])
@pytest.mark.parametrize("then", ["nothing", "adopted", "recreated", "of another plan"])
def test_a_view_across_the_servers_death_is_right_or_refused(node: Node, use_index: bool, then: str) -> None:
    server = node.serve()
    client = node.client(use_index=use_index)
    keys = [node.key("a"), node.key("b")]
    client.store(keys, [node.payload(1), node.payload(2)], namespace=node.namespace)
    options = {
        "nothing": None,
        "adopted": ["--l1.on_stale", "adopt"],
        "recreated": ["--l1.on_stale", "recreate"],
        "of another plan": ["--l1.index_entries", "8192"],
    }[then]

    def read() -> list[bytes]:
        with client.prepare_retrieve(keys, namespace=node.namespace) as lease:
            server.kill()
            if options is not None:
                node.serve(*options)
            return [bytes(lease.view(0)), bytes(lease.view(1))]

    if use_index and native is not None and then in ("nothing", "adopted"):
        assert read() == [node.payload(1), node.payload(2)]
    else:
        with pytest.raises((DisconnectedError, LeaseExpiredError)):  # a successor may have emptied the slots
            read()


@pytest.mark.skipif(native is None, reason="only the index survives a server")
def test_a_view_that_the_next_server_evicted_is_refused(node: Node) -> None:
    server = node.serve()
    client, other = node.client(), node.client()
    client.store([node.key("a")], [node.payload(1)], namespace=node.namespace)
    with client.prepare_retrieve([node.key("a")], namespace=node.namespace) as lease:
        server.kill()
        node.serve("--l1.on_stale", "adopt")
        until(lambda: other.clear(node.namespace).objects == 1)
        with pytest.raises(LeaseExpiredError):
            lease.finish()


def test_a_lease_of_the_former_server_is_refused_by_the_next(node: Node) -> None:
    server = node.serve()
    worker = node.worker("""
lease = client.prepare_store([key('a')], namespace=ns)
lease.view(0)[:] = b'x' * 65536
say('there')
wait()
from lmcache_core.errors import CacheError
while True:
    try:
        client.ping()
        break
    except CacheError:
        time.sleep(0.01)
try:
    lease.commit()
    say('committed')
except CacheError as error:
    say(type(error).__name__)
wait()
""")
    worker.expect("there")
    server.kill()
    node.serve()
    worker.go()
    worker.expect("LeaseExpiredError")
    client = node.client()
    assert client.lookup([node.key("a")], namespace=node.namespace).hits == 0


def test_a_second_server_of_the_same_name_is_refused_and_the_first_serves_on(node: Node) -> None:
    first = node.serve()
    second = node.serve(ready=False)
    assert second.popen.wait(60) == 2
    message = second.popen.stderr.read()
    assert str(first.pid) in message
    assert node.client().ping(b"x") == b"x"
    assert node.shm.exists()


def test_sigterm_ends_the_server_and_leaves_nothing_behind(node: Node) -> None:
    server = node.serve()
    client = node.client()
    client.store([node.key("a")], [node.payload(1)], namespace=node.namespace)
    server.signal(signal.SIGTERM)
    assert server.popen.wait(60) == 0
    assert not node.shm.exists()
    assert not (node.run / node.name).exists()


def test_after_kill_9_of_server_and_worker_clean_removes_what_is_left(node: Node) -> None:
    server = node.serve()
    worker = node.worker("lease = client.prepare_store([key('a')], namespace=ns); say('there'); wait()")
    worker.expect("there")
    server.kill()
    worker.kill()
    assert node.shm.exists()
    cleaned = subprocess.run(
        [sys.executable, "-m", "lmcache_core.cli.main", "clean", node.name, "--runtime-dir", str(node.run)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert cleaned.returncode == 0, cleaned.stderr
    assert not node.shm.exists()


def test_the_pool_of_a_killed_server_is_recreated_while_a_worker_still_maps_it(node: Node) -> None:
    server = node.serve()
    client = node.client()
    client.store([node.key("a")], [node.payload(1)], namespace=node.namespace)
    lease = client.prepare_retrieve([node.key("a")], namespace=node.namespace)
    view = lease.view(0)
    server.kill()
    node.serve("--l1.on_stale", "recreate")
    assert len(bytes(view)) == 65536  # still mapped; what it says is no longer vouched for
    until(lambda: client.store([node.key("b")], [node.payload(2)], namespace=node.namespace).stored == 1)


def test_serving_goes_on_when_the_segments_name_is_deleted(node: Node) -> None:
    node.serve()
    client = node.client()
    client.store([node.key("a")], [node.payload(1)], namespace=node.namespace)
    node.shm.unlink()
    until(lambda: client.status()["pool"]["name_lost"])
    fresh = node.worker("""
into = [bytearray(65536)]
say(client.retrieve([key('a')], into, namespace=ns).hits)
wait()
""")
    fresh.expect("1")


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root to mount a small tmpfs")
def test_a_dev_shm_that_is_too_small_stops_the_start_with_figures_and_cure(node: Node, tmp_path: Path) -> None:
    script = 'mount -t tmpfs -o size=8m tmpfs /dev/shm && exec "$@"'
    serve = [sys.executable, "-m", "lmcache_core.cli.main", "serve", "--name", node.name]
    serve += ["--runtime_dir", str(node.run), "--l1.size_bytes", "1GiB"]
    result = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script, "sh", *serve],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    if "unshare" in result.stderr or "mount:" in result.stderr:
        pytest.skip(f"mounting is refused here: {result.stderr.strip()}")
    assert result.returncode == 2
    assert "--shm-size" in result.stderr
    assert "memfd" in result.stderr
    assert "GiB" in result.stderr
    assert not list(Path(node.run).glob("*/lifeline"))


@pytest.mark.parametrize("backing", ["shm", "memfd"])
def test_every_backing_serves_workers_by_descriptor(node: Node, backing: str) -> None:
    node.serve("--l1.backing", backing)
    worker = node.worker("say(client.store([key('a')], [b'a' * 65536], namespace=ns).stored); wait()")
    worker.expect("1")
    into = [bytearray(65536)]
    assert node.client().retrieve([node.key("a")], into, namespace=node.namespace).hits == 1
    assert bytes(into[0]) == b"a" * 65536


def test_a_worker_that_only_attached_does_not_remove_the_pool_when_it_ends(node: Node) -> None:
    node.serve()
    worker = node.worker("say(client.store([key('a')], [b'a' * 65536], namespace=ns).stored)")
    worker.expect("1")
    assert worker.popen.wait(60) == 0
    assert node.shm.exists()
    with Client.connect(node.name, runtime_dir=node.run) as client:
        assert client.lookup([node.key("a")], namespace=node.namespace).hits == 1
