"""Recordings of a real server: nothing in them tells a prompt, and what they replay hits as the traffic itself did."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest

from lmcache_core.cli.main import main
from lmcache_core.client.client import Client
from lmcache_core.errors import UsageError
from lmcache_core.policies.lru import LruEviction
from lmcache_core.pool.layout import Layout
from lmcache_core.server.server import Server
from lmcache_core.tokens.namespace import Namespace
from lmcache_lab.record import start_recording, stop_recording
from lmcache_lab.recorder import MAGIC, Operation
from lmcache_lab.recordings import read_recording, requests_of
from lmcache_lab.replaying import replay_trace
from lmcache_lab.simulation import Order, replay
from lmcache_lab.workloads import SyntheticSettings, read_trace, synthetic_trace
from lmcache_testing.processes import ServerProcess
from lmcache_testing.waiting import until

from ..conftest import Node

SPACE = Namespace("secret model", Layout("uint8", (4096,)))
POOL = 8 << 20
TRAFFIC = SyntheticSettings(sessions=60, turns=6, turn_blocks=12, prefixes=6, active=12, seed=3)
# As LMCache writes them.
LOOKUP_HASH_FIELDS = {
    "timestamp", "request_id", "model_name", "chunk_size", "seq_len", "dtypes", "shapes", "chunk_hashes",
}  # fmt: skip
WITHIN = 0.005  # half a point


def key(block: int) -> bytes:
    return hashlib.sha256(b"block %d" % block).digest()


@pytest.fixture
def serve(start: Callable[..., Server]) -> Iterator[Callable[..., tuple[Server, Client]]]:
    with ExitStack() as stack:

        def serve(**more: object) -> tuple[Server, Client]:
            server = start(l1={"size_bytes": POOL, "backing": "memfd", "watermark": 1.0}, **more)
            return server, stack.enter_context(server.connect())

        yield serve


def traffic(client: Client) -> tuple[int, int]:
    """What an engine would do with the requests of a trace; keys and hits."""
    keys = hits = 0
    source = bytes(4096)
    for request in synthetic_trace(TRAFFIC).requests:
        names = [key(block) for block in request]
        found = client.lookup(names, namespace=SPACE).hits
        if found:
            client.retrieve(names[:found], [bytearray(4096) for _ in range(found)], namespace=SPACE)
        client.store(names, [source] * len(names), namespace=SPACE)
        keys, hits = keys + len(names), hits + found
    return keys, hits


def test_live_recorded_replayed_and_simulated_hit_rates_are_the_same(
    serve: Callable[..., Server], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, client = serve()
    slots = client.status()["l1"]["pool_bytes"] // 4096
    start_recording(client, tmp_path / "trace")
    keys, hits = traffic(client)
    stop_recording(client)
    operations = list(read_recording(tmp_path / "trace")[1])
    live = hits / keys
    assert 0.2 < live < 0.9
    lookups = [each for each in operations if each.kind == "lookup"]
    assert sum(each.hits for each in lookups) / sum(len(each.keys) // 8 for each in lookups) == pytest.approx(live)
    assert main(["trace", "convert", str(tmp_path / "trace"), str(tmp_path / "out.jsonl")]) == 0
    capsys.readouterr()
    assert main(["trace", "convert", str(tmp_path / "trace"), str(tmp_path / "out.jsonl")]) == 2
    assert capsys.readouterr().err.endswith("out.jsonl exists: name another file, or remove it\n")
    trace = read_trace(tmp_path / "out.jsonl")
    assert trace.requests == [request for _, request in requests_of(operations)]
    logged = tmp_path / "lookups.jsonl"
    assert main(["trace", "convert", str(tmp_path / "trace"), str(logged), "--format", "lookup_hash"]) == 0
    assert read_trace(logged).requests == trace.requests
    first = json.loads(logged.read_text().splitlines()[0])
    assert first["seq_len"] == first["chunk_size"] * len(first["chunk_hashes"])
    assert set(first) == LOOKUP_HASH_FIELDS
    assert main(["trace", "convert", str(logged), str(tmp_path / "back.jsonl")]) == 0
    assert read_trace(tmp_path / "back.jsonl").requests == trace.requests
    simulated = replay(trace, "lru", LruEviction(), slots, Order.SUFFIX_FIRST).hit_rate
    assert simulated == pytest.approx(live, abs=WITHIN)
    simulate = ["simulate", str(tmp_path / "trace"), "--policy", "lru", "--capacity", str(slots), "--json"]
    assert main([*simulate, "--order", "suffix-first"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["hit_rate"] == pytest.approx(live, abs=WITHIN)
    fresh, _ = serve()
    again = replay_trace(operations, fresh.connect, speed=0)
    assert again.hit_rate == pytest.approx(live, abs=WITHIN)
    assert again.recorded_hit_rate == pytest.approx(live)
    assert again.refused == 0


def test_a_recording_has_no_key_no_namespace_and_no_byte(serve: Callable[..., Server], tmp_path: Path) -> None:
    _, client = serve()
    for name in ("one", "two"):
        start_recording(client, tmp_path / name)
        client.store([key(1)], [b"\x5a" * 4096], namespace=SPACE)
        stop_recording(client)
    one, two = (next((tmp_path / name).iterdir()).read_bytes() for name in ("one", "two"))
    secrets = [key(1), key(1)[:8], b"secret model", b"\x5a" * 16]
    secrets += [SPACE.id.to_bytes(8, "big"), SPACE.id.to_bytes(8, "little")]
    assert not [secret for secret in secrets if secret in one]
    ids = [next(read_recording(tmp_path / name)[1]).keys for name in ("one", "two")]
    assert ids[0] != ids[1], "two recordings cannot be put together"
    assert len(one) < 400
    assert two.startswith(MAGIC)


def by_calls(client: Client) -> int:
    lookups = client.status()["traffic"]["lookups"]
    return int(lookups["calls"] - lookups["calls_by_index"])


def test_hits_by_the_index_are_recorded_too_and_cost_no_call_afterwards(
    serve: Callable[..., Server], tmp_path: Path
) -> None:
    _, client = serve()
    names = [key(block) for block in range(8)]
    client.store(names, [bytes(4096)] * 8, namespace=SPACE)
    start_recording(client, tmp_path / "trace")
    assert client.lookup(names, namespace=SPACE).hits == 8
    assert client.status()["operations"]["record"]["dir"] == str(tmp_path / "trace")
    stop_recording(client)
    (only,) = (each for each in read_recording(tmp_path / "trace")[1] if each.kind == "lookup")
    assert (only.hits, len(only.keys)) == (8, 64)
    assert client.status()["operations"]["record"]["dir"] is None
    before = by_calls(client)
    assert client.lookup(names, namespace=SPACE).hits == 8
    assert by_calls(client) == before + (client.status()["index"] is None)


def test_a_recording_is_bounded_and_the_oldest_goes(serve: Callable[..., Server], tmp_path: Path) -> None:
    _, client = serve()
    start_recording(client, tmp_path / "trace", file_bytes=4096, files=3)
    for block in range(0, 4000, 800):
        client.store([key(n) for n in range(block, block + 800)], [bytes(4096)] * 800, namespace=SPACE)
        while client.status()["operations"]["record"]["waiting"]:
            pass
    stop_recording(client)
    files = sorted((tmp_path / "trace").iterdir())
    assert len(files) == 3
    assert files[0].name != "000000.lmctrace"
    assert sum(each.stat().st_size for each in files) < 3 * (4096 + 8192)
    assert list(read_recording(tmp_path / "trace")[1])


def test_what_a_kill_leaves_can_be_read(tmp_path: Path) -> None:
    with ServerProcess(POOL) as server:
        with server.client() as client:
            start_recording(client, tmp_path / "trace")
            for block in range(0, 500, 50):
                client.store([key(n) for n in range(block, block + 50)], [bytes(4096)] * 50, namespace=SPACE)
            end = time.monotonic() + 60
            while client.status()["operations"]["record"]["operations"] < 5:
                assert time.monotonic() < end
        os.kill(server.pid, signal.SIGKILL)
    path = next((tmp_path / "trace").iterdir())
    whole = list(read_recording(path)[1])
    assert len(whole) >= 5
    there = path.read_bytes()
    path.write_bytes(there[:-7])
    assert list(read_recording(path)[1]) == whole[:-1]
    path.with_name("000001.lmctrace").touch()  # the next file had just been created
    assert list(read_recording(path.parent)[1]) == whole[:-1]
    path.write_bytes(there + bytes(4096))  # a power failure leaves zeros
    assert list(read_recording(path.parent)[1]) == whole
    path.write_bytes(there + b"\xff" * 100)
    with pytest.raises(UsageError, match="is damaged at byte"):
        list(read_recording(path.parent)[1])


def test_workers_are_as_many_as_were_recorded_and_go_at_their_speed(
    serve: Callable[..., Server], tmp_path: Path
) -> None:
    server, client = serve(operations={"record": {"dir": str(tmp_path / "trace")}})
    with server.connect() as other:
        for worker, first in ((client, 0), (other, 100)):
            worker.store([key(n) for n in range(first, first + 10)], [bytes(4096)] * 10, namespace=SPACE)
    stop_recording(client)
    operations = list(read_recording(tmp_path / "trace")[1])
    assert {each.worker for each in operations} == {0, 1}
    fresh, _ = serve()
    began: list[str] = []

    def connect() -> Client:
        began.append(threading.current_thread().name)
        return fresh.connect()

    late = [Operation(int(n * 2e5), 0, n, "store", 1, 4096, key(n)[:8], False, 1, b"") for n in range(3)]
    result = replay_trace(late, connect, speed=2.0)
    assert len(set(began)) == 3
    assert result.seconds >= 0.2, "the last begins at 0.4 s, at twice the speed"
    assert result.operations == 3


def test_the_command_records_tells_and_replays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with ServerProcess(POOL) as server:
        where = ["--name", server.name, "--runtime-dir", str(server.runtime_dir)]
        assert main(["trace", "start", str(tmp_path / "trace"), *where]) == 0
        begun = f"{server.name} records its requests into {tmp_path / 'trace'}; until `lmcache-core trace stop`"
        assert capsys.readouterr().out.startswith(begun)
        assert main(["trace", "start", str(tmp_path / "more"), *where]) == 2
        assert "already" in capsys.readouterr().err
        with server.client() as client:
            client.store([key(1)], [bytes(4096)], namespace=SPACE)
            client.lookup([key(1), key(2)], namespace=SPACE)
        assert main(["trace", "stop", *where]) == 0
        ended = f"{server.name} has stopped recording: 2 requests are in {tmp_path / 'trace'}\n"
        assert capsys.readouterr().out == ended
        assert main(["trace", "info", str(tmp_path / "trace"), "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert (told["operations"], told["hit_rate"]) == ({"store": 1, "lookup": 1}, 0.5)
        assert main(["trace", "replay", str(tmp_path / "trace"), "--speed", "100", "--json", *where]) == 0
        told = json.loads(capsys.readouterr().out)
        assert (told["hit_rate"], told["recorded_hit_rate"]) == (0.5, 0.5)
        public = tmp_path / "mooncake.jsonl"
        lines = [{"timestamp": 100 * n, "input_length": 1, "output_length": 1, "hash_ids": [0, n]} for n in range(1, 5)]
        public.write_text("".join(json.dumps(line) + "\n" for line in lines))
        assert main(["trace", "replay", str(public), "--speed", "max", "--json", *where]) == 0
        told = json.loads(capsys.readouterr().out)
        assert (told["operations"], told["keys"], told["hit_rate"]) == (4, 8, 0.375)
        assert main(["trace", "stop", *where]) == 2


def test_an_invalid_recording_is_refused_with_a_message(serve: Callable[..., Server], tmp_path: Path) -> None:
    _, client = serve()
    start_recording(client, tmp_path / "trace")
    stop_recording(client)
    with pytest.raises(UsageError, match="choose another directory"):
        start_recording(client, tmp_path / "trace")
    with pytest.raises(UsageError, match="cannot be recorded"):
        start_recording(client, tmp_path / "new", files=0)
    with pytest.raises(UsageError, match="it does not begin with"):
        read_recording(Path(__file__))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="is not a recording"):
        read_recording(tmp_path / "empty")


def test_operations_of_clients_that_die_before_the_answer_are_recorded_without_one(node: Node, tmp_path: Path) -> None:
    pytest.importorskip("lmcache_mock", reason="needs a tier that hangs")
    node.serve("--l2.m.type", "mock", "--l2.m.faults", '["exists hang"]', "--record", str(tmp_path / "trace"))
    client = node.client()
    for number in range(3):
        worker = node.worker(f"client.lookup([key({number})], namespace=ns, wait_s=600)")
        until(lambda: client.status()["lookups_waiting"])
        worker.kill()
        until(lambda number=number: client.status()["operations"]["record"]["operations"] == number + 1)
    worker = node.worker("client.lookup([key(4)], namespace=ns, wait_s=600)")
    until(lambda: client.status()["lookups_waiting"])
    stop_recording(client)
    operations = list(read_recording(tmp_path / "trace")[1])
    assert [(each.kind, len(each.keys) // 8, each.hits, each.statuses) for each in operations] == [
        ("lookup", 1, 0, b"")
    ] * 4
    assert all(each.nbytes == node.namespace.layout.nbytes for each in operations)


def test_a_forged_recording_is_refused_in_words_and_never_printed_raw(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def framed(raw: bytes) -> bytes:
        return len(raw).to_bytes(4, "little") + raw

    def forged(about: dict[str, object] | None = None, server: str = "s", **more: object) -> str:
        header = {"began_at_s": 1.0, "server": server, "version": "1", "about": about or {}}
        told = {"kind": "lookup", "space": 5, "nbytes": 1, "keys": bytes(16), "prefix": True, "hits": 1} | more
        operation = [1, 1, 0, *told.values(), b""]
        path = tmp_path / "forged.lmctrace"
        path.write_bytes(MAGIC + b"".join(framed(msgspec.msgpack.encode(each)) for each in (header, operation)))
        return str(path)

    for wrong in ({"hits": 3}, {"hits": -1}, {"keys": bytes(9)}, {"nbytes": -1}, {"kind": "\033[2J"}):
        assert main(["trace", "info", forged(**wrong)]) == 2
        assert "is damaged at byte" in capsys.readouterr().err
    assert main(["trace", "info", forged(server="\033[2J")]) == 0
    assert "\033" not in capsys.readouterr().out
    out = tmp_path / "out"
    assert main(["trace", "convert", "--format", "lookup_hash", forged({"chunk_tokens": "x"}), str(out)]) == 2
    assert "chunk_tokens = 'x'" in capsys.readouterr().err
    assert not out.exists()
    assert main(["trace", "convert", "--format", "lookup_hash", forged(), str(out)]) == 0
    nested = tmp_path / "nested.lmctrace"
    nested.write_bytes(MAGIC + framed(b"\x81\xa5about" + b"\x91" * 100_000 + b"\xc0"))
    assert main(["trace", "info", str(nested)]) == 2
    assert "cannot be read as a recording" in capsys.readouterr().err
