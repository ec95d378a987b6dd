"""Hits that no server is asked for: while it is stopped, when it is dead, across forks, restarts and orderly ends."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest
import xxhash

from lmcache_core.client.client import Client
from lmcache_core.client.results import Status
from lmcache_core.errors import UsageError
from lmcache_core.native import native
from lmcache_testing.waiting import until

from ..conftest import MovedClock, Node

pytestmark = pytest.mark.skipif(native is None, reason="the index is read by the C extension alone")


def fill(node: Node, client: Client, count: int = 4) -> list[bytes]:
    keys = [node.key(number) for number in range(count)]
    result = client.store(keys, [node.payload(number) for number in range(count)], namespace=node.namespace)
    assert result.stored == count
    return keys


def read(node: Node, client: Client, keys: list[bytes], **options: object) -> list[int]:
    """The first byte of each, after a look at all of them."""
    into = [bytearray(node.namespace.layout.nbytes) for _ in keys]
    assert client.retrieve(keys, into, namespace=node.namespace, **options).hits == len(keys)
    assert all(buffer == buffer[:1] * len(buffer) for buffer in into)
    return [buffer[0] for buffer in into]


# --- no call, no system call ----------------------------------------------------------------------------------


def test_a_second_process_reads_hits_while_the_server_is_stopped(node: Node) -> None:
    server = node.serve()
    fill(node, node.client())
    worker = node.worker("""
keys = [key(number) for number in range(4)]
into = [bytearray(65536) for _ in keys]
client.register_layout(ns)
say('bound')
wait()
for _ in range(3):
    found, read = client.lookup(keys, namespace=ns), client.retrieve(keys, into, namespace=ns, verify='always')
    time.sleep(0.12)  # past the look at the connection
say(found.hits, read.hits, [buffer[0] for buffer in into])
wait()
""")
    worker.expect("bound")
    server.signal(signal.SIGSTOP)
    try:
        worker.go()
        worker.expect("4 4 [1, 2, 3, 4]")
    finally:
        server.signal(signal.SIGCONT)


# After `strict()` every system call but read, write and exit is the end of the process. A filter, since seccomp's own
# strict mode takes the clock away, too.
STRICT = """
import ctypes, os, struct, time
def strict():
    read, write, end = {'x86_64': (0, 1, 231), 'aarch64': (63, 64, 94)}[os.uname().machine]
    step = struct.Struct('HBBI').pack
    program = b''.join([
        step(0x20, 0, 0, 0), step(0x15, 3, 0, read), step(0x15, 2, 0, write), step(0x15, 1, 0, end),
        step(0x06, 0, 0, 0x80000000), step(0x06, 0, 0, 0x7fff0000),
    ])
    held = ctypes.create_string_buffer(program)
    fprog = struct.pack('HxxxxxxP', 6, ctypes.addressof(held))
    libc = ctypes.CDLL(None)
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    assert libc.prctl(22, 2, fprog, 0, 0) == 0
"""


def _strict(code: str) -> bytes:
    """What a process says that runs under the filter."""
    return subprocess.run(
        [sys.executable, "-c", f"{STRICT}\nstrict()\n{code}"],
        capture_output=True,
        check=False,
        stdin=subprocess.DEVNULL,
    ).stdout


def test_a_hit_makes_no_system_call(node: Node) -> None:
    if _strict("[time.monotonic() for _ in range(100)]\nos.write(1, b'alive')") != b"alive":
        pytest.skip("reading the clock is a system call here, or seccomp is refused")
    assert _strict("os.getppid()\nos.write(1, b'alive')") == b"", "the filter lets nothing through"
    node.serve()
    fill(node, node.client())
    worker = node.worker(
        STRICT
        + """
keys = [key(number) for number in range(4)]
into = [bytearray(65536) for _ in keys]
from dataclasses import replace
now = time.monotonic()
client = Client(replace(client.links.target, clock=lambda: now))  # the look at the connection, every 100 ms, is one
client.register_layout(ns)
def work():
    hits = 0
    for _ in range(100):
        hits += client.lookup(keys, namespace=ns).hits + client.lookup_nowait(keys, namespace=ns).result.hits
        hits += client.retrieve(keys, into, namespace=ns, verify='always').hits
    return b'%d\\n' % hits
work()
strict()
os.write(1, work())
os.read(0, 1)
"""
    )
    worker.expect("1200")


def test_the_server_hears_nothing_of_a_hit_but_in_the_end_its_use(node: Node) -> None:
    node.serve("--l1.watermark", "1.0")
    client, watcher = node.client(), node.client(maps_pool=False)
    keys = fill(node, client)
    before = watcher.status()
    for _ in range(100):
        read(node, client, keys)
    status = until(
        lambda: (now := watcher.status())["index"]["hits_by_index"] >= before["index"]["hits_by_index"] + 4 and now,
        "the marks",
    )
    assert status["l1"]["leases_by_kind"] == {"promise": 0, "read": 0, "write": 0}
    assert status["counters"]["read"] >= before["counters"].get("read", 0) + 4


# --- servers that come and go ---------------------------------------------------------------------------------


def test_hits_outlive_a_killed_server_and_misses_say_that_nobody_is_there(node: Node) -> None:
    server = node.serve()
    client, asker = node.client(), node.client(use_index=False)
    keys = fill(node, client)
    asker.register_layout(node.namespace)
    server.kill()
    unknown = node.key("unknown")
    for _ in range(3):
        assert read(node, client, keys, verify="always") == [1, 2, 3, 4]
        found = client.lookup([*keys, unknown], namespace=node.namespace)
        assert found.statuses == [Status.GRANTED] * 4 + [Status.UNREACHABLE]
        assert found.hits == 4
        sparse = client.lookup([unknown, *keys], namespace=node.namespace, prefix=False)
        assert sparse.statuses == [Status.UNREACHABLE] + [Status.GRANTED] * 4
        into = [bytearray(65536) for _ in range(5)]
        partly = client.retrieve([*keys, unknown], into, namespace=node.namespace)
        assert partly.statuses == [Status.HIT] * 4 + [Status.UNREACHABLE]
        assert asker.lookup(keys, namespace=node.namespace).statuses == [Status.UNREACHABLE] * 4
        assert asker.retrieve(keys, into[:4], namespace=node.namespace).statuses == [Status.UNREACHABLE] * 4
        time.sleep(0.12)  # past the look at the connection


def test_what_the_next_server_has_cleared_is_no_hit_in_a_pool_without_a_name(node: Node) -> None:
    server = node.serve("--l1.backing", "memfd")
    client = node.client()
    keys = fill(node, client)
    assert read(node, client, keys) == [1, 2, 3, 4]
    server.kill()
    node.serve("--l1.backing", "memfd")  # which takes longer than a client's pause between two looks at its connection
    node.client().clear(node.namespace)
    assert client.lookup(keys, namespace=node.namespace).hits == 0
    assert client.retrieve(keys, [bytearray(65536) for _ in keys], namespace=node.namespace).hits == 0
    fill(node, client)
    assert read(node, client, keys) == [1, 2, 3, 4]


def test_until_it_notices_a_client_reads_what_the_dead_server_had_and_nothing_in_between(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes of incarnations that have ended, whole: no successor writes to a pool that it cannot find."""
    monkeypatch.setattr(
        "lmcache_core.client.link.reconnecting.LINK_LOOK_S", 3600.0
    )  # it does not look at its connection
    server, clock = node.serve("--l1.backing", "memfd"), MovedClock()
    client = node.client(clock=clock)
    keys = fill(node, client)
    assert read(node, client, keys) == [1, 2, 3, 4]
    server.kill()
    node.serve("--l1.backing", "memfd")
    payloads = [node.payload(number) for number in (4, 5, 6, 7)]
    until(lambda: node.client().store(keys, payloads, namespace=node.namespace).stored == 4, "the new pool")
    assert read(node, client, keys) == [1, 2, 3, 4]
    clock.jump(3600.0)  # now it looks
    into = [bytearray(node.namespace.layout.nbytes) for _ in keys]
    seen = lambda: [buffer[0] for buffer in into]  # noqa: E731
    until(lambda: client.retrieve(keys, into, namespace=node.namespace).hits == 4 and seen()[0] == 5, "the new server")
    assert seen() == [5, 6, 7, 8]


def test_after_an_orderly_end_nothing_is_vouched_for(node: Node) -> None:
    server = node.serve()
    client = node.client()
    keys = fill(node, client)
    assert read(node, client, keys) == [1, 2, 3, 4]
    server.signal(signal.SIGTERM)
    assert server.popen.wait(60) == 0
    assert client.lookup(keys, namespace=node.namespace).statuses == [Status.UNREACHABLE] * 4
    into = [bytearray(65536) for _ in keys]
    assert client.retrieve(keys, into, namespace=node.namespace).statuses == [Status.UNREACHABLE] * 4


def test_a_client_that_only_hits_finds_the_next_server_by_itself(node: Node) -> None:
    server = node.serve()
    client = node.client()
    keys = fill(node, client, 1)
    server.kill()
    assert read(node, client, keys) == [1]
    node.serve()

    def from_the_next() -> bool:
        client.lookup(keys, namespace=node.namespace)
        link = client.links.look()
        return link is not None and not link.channel.lost

    until(from_the_next, "the next server")
    assert read(node, client, keys) == [1], "it has adopted the pool"
    assert client.status()["index"]["ready"] == 1


def test_a_pool_that_is_made_anew_over_the_old_one_gives_no_old_bytes(node: Node) -> None:
    server = node.serve()
    client = node.client()
    keys = fill(node, client, 1)
    server.kill()
    node.serve("--l1.index_entries", "8192")  # of another plan: it cannot go on with the old one
    into = [bytearray(65536)]
    for _ in range(100):
        result = client.retrieve(keys, into, namespace=node.namespace)
        assert result.statuses in ([Status.MISS], [Status.UNREACHABLE])
    until(lambda: client.store(keys, [node.payload(8)], namespace=node.namespace).stored, "the new pool")
    assert read(node, client, keys) == [9]


# --- forks, ends, carriers ------------------------------------------------------------------------------------


def test_a_child_never_touches_its_parents_index_and_has_one_of_its_own(node: Node) -> None:
    node.serve()
    fill(node, node.client())
    worker = node.worker("""
from dataclasses import replace
keys = [key(number) for number in range(4)]
into = [bytearray(65536) for _ in keys]
stands_at_s = []
clock = lambda: stands_at_s[0] if stands_at_s else time.monotonic()
client = Client(replace(client.links.target, clock=clock))
say(client.retrieve(keys, into, namespace=ns).hits, client.retrieve(keys, into, namespace=ns).hits)
pid = os.fork()
if pid == 0:
    say(client.lookup(keys, namespace=ns).hits, client.retrieve(keys, into, namespace=ns).hits)
    stands_at_s.append(time.monotonic())  # nor does it look at the connection
    client.noop()
    from lmcache_core.client.link import channel
    channel.encode_request = None  # whoever asks now fails
    say(client.retrieve(keys, into, namespace=ns).hits)
    os._exit(0)
say(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
say(client.retrieve(keys, into, namespace=ns).hits)
wait()
""")
    for line in ("4 4", "4 4", "4", "0", "4"):
        worker.expect(line)


def test_a_closed_client_raises_whatever_the_index_has(node: Node) -> None:
    node.serve()
    client = node.client()
    keys = fill(node, client)
    client.close()
    for call in (
        lambda: client.lookup(keys, namespace=node.namespace),
        lambda: client.retrieve(keys[:1], [bytearray(65536)], namespace=node.namespace),
    ):
        with pytest.raises(UsageError, match="closed"):
            call()


def test_who_maps_no_pool_asks(node: Node) -> None:
    node.serve()
    keys = fill(node, node.client())
    scheduler = node.client(maps_pool=False)
    assert scheduler.lookup(keys, namespace=node.namespace).hits == 4
    assert scheduler.lookup(keys, namespace=node.namespace).hits == 4


def test_a_zmq_client_on_the_node_reads_the_index_too(node: Node) -> None:
    server = node.serve("--zmq.ipc", "true")
    keys = fill(node, node.client())
    address = node.client().status()["server"]["also_at"][0]
    from lmcache_core.client.client import Client

    with Client.connect(address=address) as client:
        assert read(node, client, keys) == [1, 2, 3, 4]
        server.signal(signal.SIGSTOP)
        try:
            assert read(node, client, keys) == [1, 2, 3, 4]
        finally:
            server.signal(signal.SIGCONT)


def test_everything_goes_by_calls_without_the_extension(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMCACHE_CORE_NATIVE", "off")
    server = node.serve()
    client = node.client()  # this process has the extension, and finds no index that anybody vouches for
    keys = fill(node, client)
    assert client.status()["index"] is None
    assert read(node, client, keys) == [1, 2, 3, 4]
    plain = node.worker("""
keys = [key(number) for number in range(4)]
into = [bytearray(65536) for _ in keys]
say(client.lookup(keys, namespace=ns).hits, client.retrieve(keys, into, namespace=ns, verify='always').hits)
wait()
""")
    plain.expect("4 4")
    server.kill()
    assert client.lookup(keys, namespace=node.namespace).statuses == [Status.UNREACHABLE] * 4


# --- tiers ----------------------------------------------------------------------------------------------------

TIER = ["--l2.cold.type", "mock"]


def in_tier(client: Client, count: int) -> None:
    until(lambda: client.status()["tiers"]["tiers"][0]["objects"] >= count, f"{count} objects in the tier")


@pytest.mark.parametrize("use_index", [True, False])
@pytest.mark.parametrize("prefix", [True, False])
def test_a_lookup_of_which_the_index_had_a_part_tells_of_all_keys_until_it_is_done(
    node: Node, use_index: bool, prefix: bool
) -> None:
    node.serve(*TIER)
    client = node.client(use_index=use_index)
    keys = fill(node, client, 8)
    in_tier(client, 8)
    client.clear(node.namespace)
    there = keys[:4] if prefix else keys[1::2]
    assert client.lookup(there, namespace=node.namespace, wait_s=30.0, policy="retain").hits == 4
    found = client.lookup(keys, namespace=node.namespace, prefix=prefix)
    assert [found.statuses[keys.index(key)] for key in there] == [Status.GRANTED] * 4
    assert found.hits >= 4
    assert found.job
    assert client.query_lookup_hits(found.job).hits == 8
    last = until(lambda: (now := client.query_prefetch_status(found.job)).done and now, "the loads")
    assert last.hits == 8
    assert list(last.statuses) == [0] * 8
    client.clear(node.namespace)
    last = client.query_prefetch_status(found.job)
    assert last.hits == 0
    assert len(last.statuses) == len(last.reasons) == 8
    assert 0 not in last.statuses


def test_what_was_loaded_for_one_reader_goes_once_that_has_read_it_in_place(node: Node) -> None:
    node.serve(*TIER, "--l1.eviction", "noop")  # else it stays while there is room
    client = node.client()
    keys = fill(node, client, 4)
    in_tier(client, 4)
    client.clear(node.namespace)
    assert client.lookup(keys, namespace=node.namespace, wait_s=30.0).hits == 4
    held = client.prepare_retrieve(keys[:1], namespace=node.namespace)
    assert read(node, client, keys, verify="always") == [1, 2, 3, 4]
    until(lambda: client.status()["counters"].get("removed_dropped", 0) == 3, "the sweep")
    assert bytes(held.view(0)[:1]) == b"\x01", "somebody was still reading it"
    held.finish()
    until(lambda: client.status()["counters"]["removed_dropped"] == 4, "the last reader")
    assert client.status()["index"]["ready"] == 0


def test_checksums_come_back_from_a_tier_with_their_objects(node: Node) -> None:
    node.serve(*TIER)
    client = node.client()
    keys = fill(node, client, 1)
    checksum = xxhash.xxh3_64_intdigest(node.payload(0))
    index = client.links.look().index
    assert index.entry(node.namespace.id, keys[0])["checksum"] == checksum
    in_tier(client, 1)
    client.clear(node.namespace)
    assert index.entry(node.namespace.id, keys[0])["state"] == "gone"
    assert client.lookup(keys, namespace=node.namespace, wait_s=30.0).hits == 1
    assert index.entry(node.namespace.id, keys[0])["checksum"] == checksum
