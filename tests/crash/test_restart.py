"""A server that takes over an old pool: hits at once, and slots that others may touch are not reused."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from lmcache_core.client.client import Client
from lmcache_core.client.results import Status
from lmcache_core.errors import CacheError, DisconnectedError, LeaseExpiredError, PoolError
from lmcache_core.native import native
from lmcache_core.pool.segment import Segment
from lmcache_core.protocol import messages as m
from lmcache_testing.embedded import Json
from lmcache_testing.waiting import until

from ..conftest import Node

pytestmark = pytest.mark.skipif(native is None, reason="adoption needs the C extension")


def adopted(client: Client) -> Json:
    found: Json = status(client)["pool"]["adopted"]
    return found


def status(client: Client) -> Json:
    """The server's, once the client has found it."""

    def ask() -> Json | None:
        try:
            return client.status()
        except DisconnectedError:
            return None

    found: Json = until(ask)
    return found


def store(client: Client, node: Node, numbers: range) -> None:
    keys = [node.key(number) for number in numbers]
    stored = client.store(keys, [node.payload(number) for number in numbers], namespace=node.namespace)
    assert stored.stored == len(keys)


def check(client: Client, node: Node, numbers: range) -> None:
    """All of them hit at the first try, and are right."""
    keys = [node.key(number) for number in numbers]
    into = [bytearray(node.namespace.layout.nbytes) for _ in keys]
    assert client.retrieve(keys, into, namespace=node.namespace).hits == len(keys)
    assert [bytes(each) for each in into] == [node.payload(number) for number in numbers]


def test_a_killed_servers_objects_are_hit_in_its_successor(node: Node) -> None:
    server = node.serve()
    client = node.client()
    store(client, node, range(100))
    server.kill()
    node.serve()
    until(lambda: client.lookup([node.key(0)], namespace=node.namespace).hits)
    check(client, node, range(100))
    report = adopted(client)
    assert report["objects"] == 100
    assert report["nbytes"] == 100 * 65536
    assert not any(report["dropped"].values())
    store(client, node, range(100, 140))  # and it goes on as any pool does
    check(client, node, range(140))


def test_sigterm_with_keep_pool_leaves_the_pool_to_the_next_server(node: Node) -> None:
    server = node.serve("--keep-pool")
    client = node.client()
    store(client, node, range(20))
    mapping = client.links.current().mapped().mapping  # the mapping itself must go on, not only its content
    server.signal(signal.SIGTERM)
    assert server.popen.wait(60) == 0
    assert node.shm.exists()
    assert not (node.run / node.name).exists()
    node.serve("--keep-pool")
    until(lambda: client.lookup([node.key(0)], namespace=node.namespace).hits)
    check(client, node, range(20))
    assert client.links.current().mapped().mapping is mapping


def test_sigterm_without_keep_pool_leaves_nothing(node: Node) -> None:
    server = node.serve()
    client = node.client()
    store(client, node, range(3))
    server.signal(signal.SIGTERM)
    assert server.popen.wait(60) == 0
    assert not node.shm.exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--l1.index_entries", "8192"), ("index_entries is 4,096 there", "8,192 in the settings")),
        (("--l1.on_stale", "recreate"), ("l1.on_stale",)),
    ],
)
def test_a_changed_setting_begins_cold_and_says_why(
    node: Node, options: tuple[str, ...], words: tuple[str, ...]
) -> None:
    server = node.serve()
    client = node.client()
    store(client, node, range(3))
    server.kill()
    node.serve(*options)
    why_cold = status(client)["pool"]["why_cold"]
    for word in words:
        assert word in why_cold
    assert client.lookup([node.key(0)], namespace=node.namespace).statuses == [Status.MISS]
    store(client, node, range(3))
    check(client, node, range(3))


def test_without_the_extension_the_next_server_begins_cold_and_says_why(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = node.serve()
    client = node.client()
    store(client, node, range(3))
    server.kill()
    monkeypatch.setenv("LMCACHE_CORE_NATIVE", "off")
    node.serve()
    assert "C extension" in status(client)["pool"]["why_cold"]
    assert client.lookup([node.key(0)], namespace=node.namespace).hits == 0


def test_on_stale_refuse_leaves_the_pool_to_the_operator(node: Node) -> None:
    server = node.serve()
    server.kill()
    refused = node.serve("--l1.on_stale", "refuse", ready=False)
    assert refused.popen.wait(60) == 2
    assert "lmcache-core clean" in refused.popen.stderr.read()
    assert node.shm.exists()


def test_what_a_living_writer_may_still_write_waits_for_it(node: Node) -> None:
    server = node.serve()
    client = node.client()
    store(client, node, range(3))
    worker = node.worker("""
lease = client.prepare_store([key('a'), key('b')], namespace=ns)
view = lease.view(0)
say('there')
wait()
""")
    worker.expect("there")
    server.kill()
    node.serve()
    until(lambda: client.lookup([node.key(0)], namespace=node.namespace).hits)
    quarantined = client.status()["l1"]["objects_by_state"]["quarantined"]
    assert quarantined == 2
    assert adopted(client)["waiting_for_workers"] >= 1
    store(client, node, range(3, 20))  # nothing else waits
    check(client, node, range(20))
    worker.kill()
    until(lambda: client.status()["l1"]["objects_by_state"]["quarantined"] == 0)
    until(lambda: adopted(client)["waiting_for_workers"] == 0)


def test_a_thread_that_copies_across_the_restart_keeps_its_slot_and_its_commit_is_refused(node: Node) -> None:
    server = node.serve()
    watcher = node.client(maps_pool=False)
    worker = node.worker("""
import queue
from lmcache_core.errors import CacheError, LeaseExpiredError
go, told = queue.Queue(), queue.Queue()
def copy():
    with client.prepare_store([key('a')], namespace=ns) as lease:
        view = lease.view(0)
        told.put('copying')
        go.get()
        view[:] = b'z' * 65536      # it writes on, whatever became of the server
        told.put('written')
        go.get()
        try:
            lease.commit()
            told.put('committed')
        except LeaseExpiredError:
            told.put('refused')
thread = threading.Thread(target=copy)
thread.start()
say(told.get())
wait()
while True:                         # another thread has reconnected long before the copy ends
    try:
        client.ping()
        break
    except CacheError:
        time.sleep(0.01)
say('reconnected')
wait(); go.put(1); say(told.get())
wait(); go.put(1); say(told.get())
wait()
""")
    worker.expect("copying")
    server.kill()
    node.serve()
    worker.go()
    worker.expect("reconnected")
    assert status(watcher)["l1"]["objects_by_state"]["quarantined"] == 1
    client = node.client()
    store(client, node, range(200))  # more than there is room for: whatever may be reused is
    worker.go()
    worker.expect("written")
    newest = range(190, 200)
    check(client, node, newest)
    assert watcher.status()["l1"]["objects_by_state"]["quarantined"] == 1
    worker.go()
    worker.expect("refused")
    until(lambda: watcher.status()["l1"]["objects_by_state"]["quarantined"] == 0)


def test_a_view_held_across_the_restart_is_right_while_nothing_changed(node: Node) -> None:
    server = node.serve()
    client = node.client()
    store(client, node, range(1))
    with client.prepare_retrieve([node.key(0)], namespace=node.namespace) as lease:
        view = lease.view(0)
        server.kill()
        node.serve()
        until(lambda: client.lookup([node.key(0)], namespace=node.namespace).hits)
        assert bytes(view) == node.payload(0)


def test_a_view_held_across_the_restart_is_refused_once_its_object_has_gone(node: Node) -> None:
    server = node.serve()
    client = node.client()
    store(client, node, range(1))
    lease = client.prepare_retrieve([node.key(0)], namespace=node.namespace)
    view = lease.view(0)
    server.kill()
    node.serve()
    until(lambda: client.lookup([node.key(0)], namespace=node.namespace).hits)
    client.clear(node.namespace)
    assert bytes(view) in (node.payload(0), bytes(65536))  # it is mapped, and nobody has written there
    with pytest.raises(LeaseExpiredError):
        lease.finish()


def test_a_clear_takes_what_was_adopted_and_never_touched(node: Node) -> None:
    server = node.serve()
    client = node.client()
    store(client, node, range(50))
    server.kill()
    node.serve()
    cleared = until(lambda: _cleared(client, node))
    assert cleared.objects == 50
    assert client.lookup([node.key(7)], namespace=node.namespace).hits == 0
    assert client.status()["l1"]["used_bytes"] == 0


def _cleared(client: Client, node: Node) -> m.ClearedReply | None:
    try:
        return client.clear(node.namespace)
    except CacheError:
        return None


def test_adopted_objects_make_room_for_new_ones(node: Node) -> None:
    server = node.serve()
    client = node.client()
    store(client, node, range(150))
    server.kill()
    node.serve()
    until(lambda: client.lookup([node.key(149)], namespace=node.namespace).hits)
    store(client, node, range(1000, 1200))
    check(client, node, range(1150, 1200))
    usage = client.status()["l1"]
    assert usage["used_bytes"] == usage["bytes_by_state"]["ready"]


def test_another_layout_gets_another_id_and_the_same_one_its_own(node: Node) -> None:
    from lmcache_core.pool.layout import Layout
    from lmcache_core.tokens.namespace import Namespace

    other = Namespace("other", Layout("uint8", (4096,)))
    server = node.serve()
    client = node.client()
    assert client.store([node.key("o")], [b"o" * 4096], namespace=other).stored == 1
    store(client, node, range(5))
    server.kill()
    node.serve()
    third = Namespace("third", Layout("float32", (1024,)))  # registered first, as large as the first one
    until(lambda: client.store([node.key("t")], [memoryview(b"t" * 4096).cast("f")], namespace=third).stored)
    check(client, node, range(5))
    into = [bytearray(4096)]
    assert client.retrieve([node.key("o")], into, namespace=other).hits == 1
    assert bytes(into[0]) == b"o" * 4096


def test_two_kept_restarts_in_a_row_with_the_worker_of_the_first(node: Node) -> None:
    client = node.client()
    for turn in range(3):
        server = node.serve("--keep-pool")
        if turn:
            until(lambda: client.lookup([node.key(0)], namespace=node.namespace).hits)
            check(client, node, range(10 * turn))
        else:
            until(
                lambda: (
                    client.store([node.key(0)], [node.payload(0)], namespace=node.namespace).statuses[0]
                    in (Status.STORED, Status.EXISTS)
                )
            )
        store(client, node, range(10 * turn, 10 * turn + 10)) if turn else store_rest(client, node)
        server.signal(signal.SIGTERM)
        assert server.popen.wait(60) == 0


def store_rest(client: Client, node: Node) -> None:
    store(client, node, range(1, 10))


def test_another_users_file_is_neither_adopted_nor_removed(tmp_path: Path, node: Node) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    server = node.serve()
    server.kill()
    os.chown(node.shm, 12345, -1)
    refused = node.serve(ready=False)
    _, said = refused.popen.communicate(timeout=60)
    assert refused.popen.returncode != 0
    assert f"{node.shm} belongs to uid 12345" in said
    assert node.shm.stat().st_uid == 12345


def test_a_kept_pool_is_cleaned_only_by_name(node: Node) -> None:
    from lmcache_core.pool.clean import CleanState, clean

    server = node.serve("--keep-pool")
    server.signal(signal.SIGTERM)
    assert server.popen.wait(60) == 0
    found = [each for each in clean(dry_run=True) if each.path == node.shm]
    assert [each.state for each in found] == [CleanState.KEPT]
    assert node.shm.exists()
    found = [each for each in clean(names=[node.name]) if each.path == node.shm]
    assert [each.state for each in found] == [CleanState.REMOVED]
    with pytest.raises(PoolError):
        Segment.attach_name(node.name)


def test_what_a_killed_server_owed_its_tier_reaches_it_before_anybody_asks(node: Node, tmp_path: Path) -> None:
    disk = ("--l2.disk.type", "fs", "--l2.disk.path", str(tmp_path / "disk"))
    server = node.serve(*disk)
    client = node.client()
    keys = [node.key(number) for number in range(100)]
    store(client, node, range(50))
    assert all(each.stored for each in client.wait_stored(keys[:50], namespace=node.namespace))
    client.tiers_reconfigure("disk", {"wrap": ["faults:store hang"]})
    store(client, node, range(50, 100))
    server.kill()
    client.close()
    node.serve(*disk)
    onlooker = node.client(maps_pool=False)  # and names no namespace: nobody says what the objects are
    until(lambda: onlooker.status()["tiers"]["stores"]["dirty"] == {"disk": 0})
    assert onlooker.status()["tiers"]["tiers"][0]["objects"] == 100
    assert onlooker.status()["tiers"]["stores"]["counts"]["stored"] == 50
    again = node.client()
    again.clear()
    assert again.lookup(keys, namespace=node.namespace, wait_s=30.0).hits == 100
    check(again, node, range(100))
