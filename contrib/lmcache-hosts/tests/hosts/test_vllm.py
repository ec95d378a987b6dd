"""Our tier behind the primary one of vLLM's own tiering manager: `nox -s "host(vllm)"`."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here")
from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager
from vllm_host import CHUNK_BYTES, Offloading, content, hosted, spec, vllm_over

from lmcache_core.errors import SettingsError
from lmcache_hosts.vllm_tier import INTERFACE, HostedTier
from lmcache_mock.control import write_rules
from lmcache_mock.drills.faults import FaultRule
from lmcache_testing.waiting import until

if TYPE_CHECKING:
    from lmcache_core.server.server import Server

HASTY = {"lookup_s": 0.3, "load_s": 0.3, "store_s": 0.3}


def disk(path: Path, **more: Any) -> dict[str, Any]:
    return hosted(tier={"type": "fs", "path": str(path)}, **more)


def mock(path: Path) -> dict[str, Any]:
    return hosted(tier={"type": "mock", "control": str(path / "faults")}, **HASTY)


def faults(path: Path, *rules: str) -> None:
    write_rules(path / "faults", [FaultRule.parse(rule) for rule in rules])


def equal(found: dict[int, bytes], numbers: range) -> bool:
    return list(found) == list(numbers) and all(found[number] == content(number) for number in numbers)


def test_what_left_the_primary_tier_comes_back_from_ours(tmp_path: Path) -> None:
    with vllm_over(disk(tmp_path)) as host:
        host.store(range(8))
        assert equal(host.read(range(10)), range(8))


def test_the_next_engine_finds_it_and_another_model_or_dtype_does_not(tmp_path: Path) -> None:
    with vllm_over(disk(tmp_path)) as host:
        host.store(range(4))
    with vllm_over(disk(tmp_path)) as host:
        assert equal(host.read(range(4)), range(4))
    for other in (spec(model="other"), spec(dtype="float16")):
        with vllm_over(disk(tmp_path), other) as host:
            assert host.read(range(4)) == {}


@pytest.mark.parametrize("fault", ["flipped_bits", "short_read", "neighbour", "error", "gone", "hang"])
def test_a_failed_load_is_a_miss_and_vllm_goes_on(tmp_path: Path, fault: str) -> None:
    with vllm_over(mock(tmp_path)) as host:
        host.store(range(4))
        faults(tmp_path, f"load {fault}")
        assert host.read(range(1, 4)) == {}
        faults(tmp_path)
        until(lambda: equal(host.read(range(1)), range(1)), "the tier to be used again")


def test_a_medium_that_hangs_neither_holds_chunks_nor_the_end(tmp_path: Path) -> None:
    with vllm_over(mock(tmp_path)) as host:
        host.store(range(2))
        faults(tmp_path, "any hang")
        host.write(range(2, 6))
        assert host.read(range(1)) == {}
        host.forget()  # waits for every job, and asserts that none is left
        faults(tmp_path)
        until(lambda: equal(host.read(range(2)), range(2)), "the tier to be used again")
        faults(tmp_path, "any hang")
        host.write(range(6, 8))


def test_a_partly_failed_load_keeps_what_is_good(tmp_path: Path) -> None:
    with vllm_over(disk(tmp_path)) as host:
        host.store(range(3))
        (one, *_) = sorted(path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size > CHUNK_BYTES)
        damaged = bytearray(one.read_bytes())
        damaged[-1] ^= 1
        one.write_bytes(damaged)
        found = host.read(range(3))
        assert len(found) == 2
        assert all(held == content(number) for number, held in found.items())


def test_a_key_that_is_too_short_is_a_miss(tmp_path: Path) -> None:
    with vllm_over(disk(tmp_path)) as host:
        context = ReqContext("odd")
        assert host.tier.lookup(make_offload_key(b"short", 0), context) is LookupResult.MISS


def test_groups_of_one_hash_are_apart(tmp_path: Path) -> None:
    with vllm_over(disk(tmp_path)) as host:
        host.store(range(1))
        context = ReqContext("other group")

        def answer() -> LookupResult | None:
            found = host.tier.lookup(make_offload_key(b"\0" * 32, 1), context)
            host.step()
            return None if found is LookupResult.RETRY else found

        assert until(answer, "an answer") is LookupResult.MISS


def test_a_killed_engine_leaves_whole_chunks_alone(tmp_path: Path) -> None:
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from vllm_host import *\n"
        "host = Offloading(hosted(tier={'type': 'fs', 'path': sys.argv[2]}))\n"
        "os.unlink(host.region.mmap_path)\n"
        "for number in range(1000):\n"
        "    host.store([number])\n"
        "    print('stored', number + 1, flush=True)\n"
    )
    command = [sys.executable, "-c", script, str(Path(__file__).parent), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for line in child.stdout:
            if line.strip() == "stored 3":
                break
        child.send_signal(signal.SIGKILL)
        child.wait()
    with vllm_over(disk(tmp_path)) as host:
        assert equal(host.read(range(3)), range(3))
        later = host.read(range(3, 20))
        assert all(held == content(number) for number, held in later.items())


def test_two_engines_share_the_pool_of_our_server(start: Callable[..., Server]) -> None:
    settings = start(l1={"size_bytes": "64MiB"}).parts.settings
    tier = hosted(server={"name": settings.name, "runtime_dir": str(settings.runtime_dir)})
    with vllm_over(tier) as one, vllm_over(tier) as other:
        one.store(range(4))
        until(lambda: equal(other.read(range(4)), range(4)), "the other to be connected")


def test_without_its_server_vllm_misses(tmp_path: Path) -> None:
    with vllm_over(hosted(server={"name": "nobody", "runtime_dir": str(tmp_path)}, **HASTY)) as host:
        host.store(range(2))
        assert host.read(range(2)) == {}


def test_another_interface_is_refused_with_a_cure() -> None:
    class Changed(SecondaryTierManager):
        def lookup(self, keys: Any, req_context: Any) -> Any:
            return keys

    with pytest.raises(SettingsError, match=r"lookup\(\) takes keys, req_context.*install vLLM 0\.32\.0"):
        INTERFACE.check(Changed, HostedTier)


def test_wrong_settings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="known settings"):
        Offloading(hosted(tier={"type": "fs", "path": str(tmp_path)}, root_dir="/x"))
