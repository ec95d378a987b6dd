"""Known faults of such caches, each as a test from outside that we do not have it."""

from __future__ import annotations

import ast
import contextlib
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from array import array
from pathlib import Path

import pytest

import lmcache_core
from lmcache_core.client.results import Status
from lmcache_core.errors import DisconnectedError
from lmcache_core.kernel.answers import Reason
from lmcache_core.limits import FRAME_BYTES_MAX
from lmcache_core.pool.layout import Layout
from lmcache_core.protocol import messages as m
from lmcache_core.protocol.codec import decode_reply, encode
from lmcache_core.tokens.namespace import Namespace
from lmcache_testing.waiting import WAIT_S, until

from ..conftest import Node

NO_LEASES = {"promise": 0, "read": 0, "write": 0}


# --- leases ------------------------------------------------------------------------------------------------------


def test_a_late_finish_releases_nobody_elses_hold(node: Node) -> None:
    node.serve("--lease.read_ttl_s", "0.2")
    late, client = node.client(), node.client()
    client.store([node.key("a")], [node.payload(1)], namespace=node.namespace)
    first = late.prepare_retrieve([node.key("a")], namespace=node.namespace)
    until(lambda: late.lease_status(first.id).state == "expired", "the first reader's expiry")
    with client.prepare_retrieve([node.key("a")], namespace=node.namespace) as second:
        first.finish()
        first_again = late.lease_status(first.id)
        assert first_again.open_positions == 0
        client.store([node.key(i) for i in range(400)], [node.payload(9)] * 400, namespace=node.namespace)
        assert second.view(0) == node.payload(1)  # the pool was overwritten around it
    assert client.status()["l1"]["leases_by_kind"] == NO_LEASES


def test_no_hold_outlives_a_lookup_whose_session_ends_or_two_reads_at_once(node: Node) -> None:
    node.serve()
    client = node.client()
    client.store([node.key("a")], [node.payload(1)], namespace=node.namespace)
    with node.client(maps_pool=False) as scheduler:
        assert scheduler.lookup([node.key("a")], namespace=node.namespace, hold=True).promise
        assert client.status()["l1"]["leases_by_kind"]["promise"] == 1
    assert client.status()["l1"]["leases_by_kind"] == NO_LEASES
    with (
        client.prepare_retrieve([node.key("a")], namespace=node.namespace) as one,
        client.prepare_retrieve([node.key("a")], namespace=node.namespace) as other,
    ):
        assert one.view(0) == other.view(0)
    assert client.status()["l1"]["leases_by_kind"] == NO_LEASES
    client.clear()
    assert client.status()["l1"]["used_bytes"] == 0  # nothing was pinned any more


def test_a_full_pool_grants_what_fits_and_says_full_which_is_not_exists(node: Node) -> None:
    node.serve()
    client = node.client()
    keys = [node.key(i) for i in range(300)]
    with client.prepare_store(keys, namespace=node.namespace) as lease:
        granted = lease.statuses.count(Status.GRANTED)
        slots = client.status()["l1"]["pool_bytes"] // node.namespace.layout.nbytes
        assert granted == slots < len(keys)
        assert lease.statuses[granted:] == [Status.FULL] * (len(keys) - granted)
        lease.commit()
    assert client.store(keys[:1], [node.payload(0)], namespace=node.namespace).statuses == [Status.EXISTS]
    missed = client.lookup(keys[granted : granted + 1], namespace=node.namespace)
    assert missed.reasons == [Reason.NO_ROOM]


def test_sustained_stores_far_over_capacity_are_all_stored(node: Node) -> None:
    node.serve()
    client = node.client()
    for batch in range(40):
        keys = [node.key((batch, i)) for i in range(64)]
        assert client.store(keys, [node.payload(batch)] * 64, namespace=node.namespace).stored == 64
        assert client.lookup(keys, namespace=node.namespace).hits == 64


def test_quarantine_at_its_cap_refuses_the_culprit_alone_and_names_it(node: Node) -> None:
    node.serve("--lease.write_ttl_s", "0.3")
    culprit, other = node.client(client_name="culprit"), node.client(client_name="other")
    late = culprit.prepare_store([node.key(i) for i in range(48)], namespace=node.namespace)  # 3 of 16 MiB
    until(lambda: other.status()["l1"]["quarantine_by_session"], "quarantine")
    with culprit.prepare_store([node.key("x")], namespace=node.namespace) as lease:
        assert lease.statuses == [Status.QUOTA]
    assert other.store([node.key("y")], [node.payload(1)], namespace=node.namespace).statuses == [Status.STORED]
    status = other.status()
    named = {str(each["id"]): each["name"] for each in status["sessions"]}
    assert [named[blamed] for blamed in status["l1"]["quarantine_by_session"]] == ["culprit"]
    assert late.expired or culprit.ping() == b""  # the notice comes with the next frame
    assert late.expired
    late.abort()
    with culprit.prepare_store([node.key("x")], namespace=node.namespace) as lease:
        assert lease.statuses == [Status.GRANTED]


def test_a_layout_is_never_read_as_another_of_the_same_size(node: Node) -> None:
    node.serve()
    client = node.client()
    one, other = Layout("float32", (64,)), Layout("int8", (256,))
    assert one.nbytes == other.nbytes
    client.store([node.key("a")], [array("f", [0.0] * 64)], namespace=Namespace("m", one))
    assert client.lookup([node.key("a")], namespace=Namespace("m", other)).hits == 0


# --- the server dies, hangs, or is overrun -----------------------------------------------------------------------


def test_eight_threads_that_wait_for_a_server_that_dies_all_go_on(node: Node) -> None:
    server = node.serve()
    client = node.client()
    client.ping()
    server.signal(signal.SIGSTOP)
    outcomes: list[str] = []

    def ask(number: int) -> None:
        if number % 2:
            outcomes.append(str(client.lookup([node.key("a")], namespace=node.namespace).statuses[0]))
            return
        try:
            client.ping()
        except DisconnectedError:
            outcomes.append("unreachable")

    threads = [threading.Thread(target=ask, args=(number,), daemon=True) for number in range(8)]
    for thread in threads:
        thread.start()
    channel = client.links.current().channel
    until(lambda: channel.waiting == 8, "eight threads in line")
    server.kill()
    for thread in threads:
        thread.join(WAIT_S)
    assert outcomes == ["unreachable"] * 8
    node.serve()
    until(lambda: client.store([node.key("a")], [node.payload(1)], namespace=node.namespace).stored, "the next one")


def test_an_idle_client_finds_the_next_server_with_its_first_question(node: Node) -> None:
    server = node.serve()
    client = node.client()
    client.ping()
    server.kill()
    node.serve()
    time.sleep(0.02)  # idle for longer than within a series of calls
    assert client.status()["server"]["pid"] != server.pid


RETRIEVE_IN_THE_MIDDLE = """
from lmcache_core.client.move import retrieving as room
client = Client.connect(sys.argv[1], runtime_dir=sys.argv[2], use_index=False)  # under a lease, not by the index
copy_out = room.copy_out
def late(*arguments, **options):
    say('copying')
    wait()
    return copy_out(*arguments, **options)
room.copy_out = late
into = [bytearray(65536)]
result = client.retrieve([key('a')], into, namespace=ns)
say(result.statuses[0], result.hits)
room.copy_out = copy_out
"""


@pytest.mark.parametrize("restarted", [False, True], ids=["gone", "restarted, its old memory given back"])
def test_a_server_that_dies_under_a_copy_makes_it_a_miss_and_never_a_hit_of_zeros(node: Node, restarted: bool) -> None:
    server = node.serve()
    node.client().store([node.key("a")], [node.payload(1)], namespace=node.namespace)
    worker = node.worker(RETRIEVE_IN_THE_MIDDLE + "wait()")
    worker.expect("copying")
    server.kill()
    if restarted:
        node.serve()
    worker.go()
    assert worker.line() in {"unreachable 0", "expired 0"}


def test_a_server_that_dies_between_two_pages_of_a_store_stores_nothing_of_the_second(node: Node) -> None:
    server = node.serve()
    worker = node.worker("""
small = Namespace("small", Layout("uint8", (64,)))
from lmcache_core.client.move import leases as room
copy_in, pages = room.copy_in, []
def second_late(*arguments, **options):
    copied = copy_in(*arguments, **options)
    pages.append(1)
    if len(pages) == 2:
        say('second page')
        wait()
    return copied
room.copy_in = second_late
keys = [key(i) for i in range(1000)]
result = client.store(keys, [b'x' * 64] * 1000, namespace=small)
say(result.stored, result.statuses[-1])
wait()
""")
    worker.expect("second page")
    server.kill()
    node.serve()
    worker.go()
    assert worker.line() == "512 expired"


def test_sigterm_while_the_pool_is_populated_ends_at_once_and_leaves_nothing(node: Node) -> None:
    argv = [sys.executable, "-m", "lmcache_core.cli.main", "serve", "--name", node.name]
    argv += ["--runtime_dir", str(node.run), "--l1.size_bytes", "768MiB"]
    server = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with server:
        try:
            assert server.stdout is not None
            assert server.stdout.readline()  # it serves, and goes on populating
            server.send_signal(signal.SIGTERM)
            server.send_signal(signal.SIGTERM)  # an impatient one changes nothing
            assert server.wait(WAIT_S) == 0
        finally:
            server.kill()
    assert not node.shm.exists()
    assert not (node.run / node.name).exists()


def test_a_hung_tier_delays_neither_hits_nor_pings_nor_the_end(node: Node) -> None:
    pytest.importorskip("lmcache_mock")
    server = node.serve("--l2.slow.type", "mock", "--l2.slow.faults", '["any hang"]', "--drain_s", "0.5")
    client = node.client()
    client.store([node.key("a")], [node.payload(1)], namespace=node.namespace)
    handles = [
        client.lookup_nowait([node.key(("nowhere", i))], namespace=node.namespace, wait_s=600.0) for i in range(12)
    ]
    into = [bytearray(65536)]
    assert client.retrieve([node.key("a")], into, namespace=node.namespace).hits == 1
    assert client.ping(b"x") == b"x"
    server.signal(signal.SIGTERM)
    server.signal(signal.SIGTERM)
    assert server.popen.wait(WAIT_S) == 0
    assert not node.shm.exists()
    for handle in handles:
        assert handle.wait(WAIT_S).hits == 0


def test_a_server_out_of_descriptors_hangs_up_on_newcomers_and_serves_the_others(node: Node) -> None:
    server = node.serve()
    client = node.client()
    client.ping()
    used = len(list(Path(f"/proc/{server.pid}/fd").iterdir()))
    limits = resource.prlimit(server.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (used, limits[1]))
    poller = select.poll()
    for newcomer in [node.socket() for _ in range(8)]:  # some may still get descriptors that others gave back
        poller.register(newcomer, select.POLLRDHUP)
    # Hung up on, rather than waiting in a backlog that wakes the loop for ever.
    assert poller.poll(WAIT_S * 1000)
    assert client.ping(b"x") == b"x"
    resource.prlimit(server.pid, resource.RLIMIT_NOFILE, limits)
    welcome = node.socket()
    welcome.send(
        encode(m.Hello(1, m.PROTOCOL_VERSION_MIN, m.PROTOCOL_VERSION_MAX, os.urandom(16), "later", os.getpid()))
    )
    assert isinstance(decode_reply(welcome.recv(FRAME_BYTES_MAX)), m.Welcome)


# --- pool, bytes, secrets ----------------------------------------------------------------------------------------


def test_huge_pages_that_are_not_reserved_stop_the_start_with_the_cure(node: Node) -> None:
    free = int(Path("/proc/meminfo").read_text().split("HugePages_Free:")[1].split()[0])
    if free:
        pytest.skip(f"{free} huge pages are reserved here: the pool's own tests serve from them")
    server = node.serve("--l1.backing", "hugetlb", ready=False)
    assert server.popen.wait(WAIT_S) == 2
    message = server.popen.stderr.read()
    assert "nr_hugepages" in message
    assert "Traceback" not in message


def test_clean_leaves_a_living_server_alone(node: Node) -> None:
    node.serve()
    client = node.client()
    client.store([node.key("a")], [node.payload(1)], namespace=node.namespace)
    subprocess.run(
        [sys.executable, "-m", "lmcache_core.cli.main", "clean", node.name, "--runtime-dir", str(node.run)], check=True
    )
    assert node.shm.exists()
    fresh = node.worker("into = [bytearray(65536)]; say(client.retrieve([key('a')], into, namespace=ns).hits)")
    fresh.expect("1")


def test_nothing_that_comes_from_outside_is_unpickled_or_executed() -> None:
    root = Path(lmcache_core.__file__).parent
    banned = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle"}
    found = []
    for path in root.rglob("*.py"):
        tree = ast.parse(path.read_text())
        for each in ast.walk(tree):
            names = [alias.name for alias in each.names] if isinstance(each, ast.Import | ast.ImportFrom) else []
            if isinstance(each, ast.ImportFrom):
                names.append(each.module or "")
            called = each.func.id if isinstance(each, ast.Call) and isinstance(each.func, ast.Name) else ""
            if banned & {name.split(".")[0] for name in names} or called in ("eval", "exec"):
                found.append(f"{path.relative_to(root)}:{getattr(each, 'lineno', 0)}")
    assert found == []


def test_status_shows_no_secret_and_no_environment(node: Node) -> None:
    os.environ["LMCACHE_TEST_SENTINEL"] = "hunter2-sentinel"
    try:
        node.serve()
        assert "hunter2-sentinel" not in str(node.client().status())
    finally:
        del os.environ["LMCACHE_TEST_SENTINEL"]


def test_a_server_opens_no_connection_to_anywhere(node: Node) -> None:
    server = node.serve()
    inodes = set()
    for fd in Path(f"/proc/{server.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed since it was listed
            inodes.add(str(fd.readlink()))
    assert any(inode.startswith("socket:") for inode in inodes)
    for family in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/{server.pid}/net/{family}").read_text().splitlines()[1:]:
            assert f"socket:[{line.split()[9]}]" not in inodes
