"""`lmcache-core bench rpc`, `copy` and `prompt`, reduced: the records, and what they leave behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lmcache_bench.echo import serve_seqpacket
from lmcache_bench.rounds import Rounds
from lmcache_bench.workers import WorkerProcess, orders
from lmcache_core.errors import DisconnectedError
from lmcache_core.native import native
from lmcache_core.pool.backing import segment_path
from lmcache_core.pool.cores import usable_cores
from lmcache_testing.processes import ServerProcess, cpu_s

FIELDS = {"name", "value", "unit", "floor", "ratio", "target", "met", "doubt"}
TIMEOUT_S = 300  # a safety net
MIB = 1 << 20


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "lmcache_core.cli.main", "bench", *words]


def bench(tmp_path: Path, *words: str) -> dict[str, dict[str, Any]]:
    """The records of a run, by name."""
    run = subprocess.run(
        command(*words, "--quick", "--json"), cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert run.returncode == 0, run.stderr[-3000:]
    found = json.loads(run.stdout)
    assert set(found) == {"bench", "machine", "results"}
    assert found["bench"] == words[0]
    assert all(set(result) == FIELDS for result in found["results"])
    # A server that was not asked for anything may have had no processor time at all.
    assert all(result["value"] > 0 or "server cpu" in result["name"] for result in found["results"])
    return {result["name"]: result for result in found["results"]}


def pools() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob(f"lmcache-core.{os.geteuid()}.trial-*")}


def children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def server_name(pid: int) -> str:
    """The name that a server process was given; none for what is no server (yet)."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return ""
    return words[words.index("--name") + 1] if "--name" in words else ""


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.mark.parametrize("group", ["free", "cpu", "hits"])
def test_what_clears_the_pool_clears_its_own_namespace_over_zmq(tmp_path: Path, group: str) -> None:
    """Over tcp nobody is the server's own user, who alone may clear everything."""
    records = bench(tmp_path, "rpc", "--only", group, "--carriers", "zmq tcp")
    assert records
    assert all(name.endswith(", zmq tcp") for name in records)


@pytest.mark.parametrize("carrier", ["lifeline", "zmq ipc", "zmq tcp", "embedded"])
def test_each_carriers_round_trip_stands_beside_a_bare_echo(tmp_path: Path, carrier: str) -> None:
    (noop,) = bench(tmp_path, "rpc", "--only", "noop", "--carriers", carrier).items()
    name, record = noop
    assert name == f"noop {carrier}"
    assert record["unit"] == "us"
    assert record["ratio"] == pytest.approx(record["value"] / record["floor"])
    assert record["target"] == 2.0
    assert record["met"] == (record["ratio"] <= 2.0)


def test_the_two_phases_are_timed_in_free_space_and_in_a_full_pool(tmp_path: Path) -> None:
    records = bench(tmp_path, "rpc", "--only", "free", "full", "cpu", "--carriers", "lifeline")
    sizes = ["1 key", "16 keys", "128 keys", "512 keys", "4096 keys"]
    free = {f"store {size}, free, lifeline" for size in sizes} | {f"retrieve {size}, lifeline" for size in sizes}
    full = {f"store {size}, full, lifeline" for size in sizes}
    cpu = {f"server cpu a key stored, {state}, lifeline" for state in ("free", "full")}
    assert set(records) == free | full | cpu
    targets = {name: record["target"] for name, record in records.items() if record["target"] is not None}
    assert targets == {
        "store 512 keys, free, lifeline": 2.5,
        "retrieve 512 keys, lifeline": 1.5,
        "store 512 keys, full, lifeline": 4.0,
        "server cpu a key stored, free, lifeline": 5.0,
        "server cpu a key stored, full, lifeline": 5.0,
    }


def test_calls_a_second_are_counted_for_one_two_and_four_clients(tmp_path: Path) -> None:
    records = bench(tmp_path, "rpc", "--only", "calls", "beside", "--carriers", "lifeline")
    words = ["1 client", "2 clients", "4 clients"]
    p99 = "noop p99 beside 4096-key stores, lifeline"
    assert set(records) == {f"calls lifeline, {each}" for each in words} | {p99}
    assert all(records[f"calls lifeline, {each}"]["floor"] > 0 for each in words)
    assert records[p99]["unit"] == "ms"
    assert records[p99]["target"] == 5.0


def test_store_and_retrieve_stand_beside_a_plain_copy(tmp_path: Path) -> None:
    groups = ("store", "retrieve", "alone", "first", "single")
    records = bench(tmp_path, "copy", "--only", *groups, "--sizes", "64 KiB", "16 MiB")
    alone = {name: records.pop(name)["target"] for name in list(records) if name.startswith("alone")}
    expected = {"alone 64 KiB": 0.85, "alone 16 MiB": 0.95}
    expected |= {f"alone {size}, checksums": 0.9 for size in ("64 KiB", "16 MiB")}
    if usable_cores() > 1:
        expected |= {f"alone {size}, two threads of one": 1.5 for size in ("64 KiB", "16 MiB")}
    assert alone == ({} if native is None else expected)
    targets = {name: record["target"] for name, record in records.items()}
    assert targets == {
        "store 64 KiB": 0.55,
        "retrieve 64 KiB": 0.85,
        "store 16 MiB": 0.9,
        "retrieve 16 MiB": 0.95,
        "first store 1 MiB": 0.8,
        "store one 64 KiB": None,
        "retrieve one 64 KiB": None,
        "store one 16 MiB": None,
        "retrieve one 16 MiB": None,
    }
    assert all(record["floor"] > 0 and record["unit"] == "GB/s" for record in records.values())


def test_checksums_of_slots_filled_in_place_stand_beside_one_more_read(tmp_path: Path) -> None:
    records = bench(tmp_path, "copy", "--only", "inplace", "--sizes", "1 MiB")
    plain = "in place 1 MiB"
    others = {f"{plain}, checksums": 0.9, f"{plain}, one more read": None}
    expected = {plain: None, **others, f"{plain}, CPU": None, **{f"{name}, CPU": None for name in others}}
    assert {name: record["target"] for name, record in records.items()} == expected
    for unit in ("", ", CPU"):
        for name in others:
            assert records[name + unit]["floor"] == records[plain + unit]["value"]


def test_a_prompt_is_moved_by_workers_at_once_and_its_record_says_how_long_it_was(tmp_path: Path) -> None:
    records = bench(tmp_path, "prompt", "--tokens", "1024", "--workers", "1", "2")
    what = "1,024 of 131,072 tokens x 70 KB"
    assert set(records) == {
        f"{group} {what}, {words}" for group in ("store", "retrieve") for words in ("1 worker", "2 workers")
    }
    assert all(record["floor"] > 0 for record in records.values())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_bench_that_is_interrupted_leaves_no_pool_and_no_process(tmp_path: Path, number: signal.Signals) -> None:
    with subprocess.Popen(
        command("copy", "--json"), cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    ) as run:
        ours: dict[int, str] = {}  # pool by the server's process id: others may run benches here, too
        deadline = time.monotonic() + TIMEOUT_S
        while not set(ours.values()) & pools():
            assert run.poll() is None
            assert time.monotonic() < deadline
            ours = {pid: segment_path(name).name for pid in children(run.pid) if (name := server_name(pid))}
        run.send_signal(number)
        run.communicate(timeout=TIMEOUT_S)
        assert run.returncode != 0
    assert not set(ours.values()) & pools()
    assert not any(alive(pid) for pid in ours)


def test_a_server_of_a_bench_is_gone_with_its_block_also_after_an_error() -> None:
    server = ServerProcess(16 * MIB)
    with contextlib.suppress(ZeroDivisionError), server:
        with server.client(maps_pool=False) as client:
            assert client.status()["server"]["pid"] == server.pid
        assert segment_path(server.name).name in pools()
        assert 0 < server.cpu_s() < TIMEOUT_S
        raise ZeroDivisionError
    assert segment_path(server.name).name not in pools()
    assert not alive(server.pid)
    assert not server.directory.exists()


def _answering(connection: Any) -> None:
    for order in orders(connection):
        if order == "end":
            os._exit(3)
        connection.send((os.getpid(), order))


def test_a_worker_answers_from_its_own_process_until_it_is_let_go() -> None:
    with WorkerProcess(_answering) as worker:
        assert worker.ask("one") == (worker.pid, "one")
        assert worker.pid != os.getpid()
        assert cpu_s(worker.pid) > 0
    assert not alive(worker.pid)


def test_a_worker_that_ends_is_an_error_and_not_a_wait() -> None:
    with WorkerProcess(_answering) as worker, pytest.raises(DisconnectedError, match="ended"):
        worker.ask("end")


def test_an_echo_server_ends_with_its_bench(tmp_path: Path) -> None:
    with WorkerProcess(serve_seqpacket, str(tmp_path / "echo")) as echo:
        assert alive(echo.pid)
    assert not alive(echo.pid)


def test_a_quick_run_counts_one_round_at_least(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmcache_bench.rounds.QUICK_S", -1.0)
    assert list(Rounds(quick=True).of(5)) == [False, True]
    assert list(Rounds(quick=False).of(3)) == [False, True, True, True]
