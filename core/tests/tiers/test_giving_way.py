"""What is written back gives way: to the engines' processors, to whoever else uses the disk, and to what is loaded."""

from __future__ import annotations

import ctypes
import platform
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from lmcache_core.pool.cores import usable_cores
from lmcache_core.server.tiers.opening import tier_config
from lmcache_core.settings.model import TierSettings
from lmcache_core.tiers.contract import LoadItem, Outcome, StoreItem
from lmcache_core.tiers.tier.lanes import Lane

from .conftest import Doubles, FunctionCall

IOPRIO_GET = {"x86_64": 252, "aarch64": 31}.get(platform.machine())
IDLE, UNSET = 3, 0
SHARE = 0.001  # of a core: ten milliseconds are saved up, and a store here uses more


def io_class() -> int:
    """Of the calling thread."""
    return int(ctypes.CDLL(None).syscall(ctypes.c_long(IOPRIO_GET or 0), ctypes.c_int(1), ctypes.c_int(0))) >> 13


@pytest.mark.skipif(IOPRIO_GET is None, reason="the number of this system call is not known here")
@pytest.mark.parametrize("idle", [True, False])
def test_only_who_writes_back_waits_for_a_disk_that_others_use(idle: bool) -> None:
    ended = threading.Event()
    lane = Lane("test", 1, lambda call: ended.set(), idle_disk=idle)
    call = FunctionCall(io_class)
    assert lane.submit(call)
    assert ended.wait(20)
    lane.close()
    assert call.result == (IDLE if idle else UNSET)
    assert io_class() == UNSET, "of that thread alone"


@pytest.mark.skipif(IOPRIO_GET is None, reason="the number of this system call is not known here")
@pytest.mark.parametrize(("store_io", "expected"), [("idle", IDLE), ("normal", UNSET)])
def test_a_tier_says_which_of_its_lanes_that_is(doubles: Doubles, store_io: str, expected: int) -> None:
    classes: dict[str, int] = {}

    class Asking(doubles.adapter):  # type: ignore[misc, name-defined]
        def store(self, items: Sequence[StoreItem], deadline: float) -> Sequence[Outcome]:
            classes["store"] = io_class()
            return super().store(items, deadline)  # type: ignore[no-any-return]

        def exists(self, keys: Sequence[bytes], deadline: float) -> Sequence[bool]:
            classes["lookup"] = io_class()
            return super().exists(keys, deadline)  # type: ignore[no-any-return]

        def load(self, items: Sequence[LoadItem], deadline: float) -> Sequence[Outcome]:
            classes["load"] = io_class()
            return super().load(items, deadline)  # type: ignore[no-any-return]

    l1 = doubles.l1()
    loop = doubles.loop(l1, doubles.tier("mem", Asking(), store_io=store_io))
    loop.idle()
    loop.store(doubles.contents(1))
    loop.idle()
    l1.evict(doubles.key(0))
    loop.fetch([doubles.key(0)])
    assert classes["store"] == expected
    assert classes["load"] == classes.get("lookup", UNSET) == UNSET


def busy(adapter: type) -> Any:
    """An adapter whose stores take 30 ms of the processor each."""

    class Busy(adapter):  # type: ignore[misc, valid-type]
        def store(self, items: Sequence[StoreItem], deadline: float) -> Sequence[Outcome]:
            until_s = time.thread_time() + 0.03
            while time.thread_time() < until_s:
                pass
            return super().store(items, deadline)  # type: ignore[no-any-return]

    return Busy()


def test_stores_that_have_used_their_share_wait_until_it_has_come_again(doubles: Doubles) -> None:
    adapter = busy(doubles.adapter)
    loop = doubles.loop(doubles.l1(), doubles.tier("mem", adapter, store_cpu_share=SHARE), stands=True)
    loop.idle()
    loop.store(doubles.contents(1))
    loop.until(lambda: adapter.objects)
    (said,) = loop.tiering.status()["tiers"]
    loop.until(lambda: loop.tiering.status()["tiers"][0]["store_cpu"]["rests"])
    assert said["store_cpu"]["share"] == SHARE
    loop.store(doubles.contents(1, first=1))
    for _ in range(20):
        loop.turn()
    assert len(adapter.objects) == 1
    assert loop.tiering.status()["stores"]["arrived"] == 1, "it waits, unplanned"
    assert loop.now() < loop.tiering.next_deadline() < loop.now() + 60
    loop.jump(60.0)
    loop.until(lambda: len(adapter.objects) == 2)


def test_what_leaves_the_pool_meanwhile_is_counted_as_lost(doubles: Doubles) -> None:
    adapter, l1 = busy(doubles.adapter), doubles.l1()
    loop = doubles.loop(l1, doubles.tier("mem", adapter, store_cpu_share=SHARE), stands=True)
    loop.idle()
    loop.store(doubles.contents(1))
    loop.until(lambda: loop.tiering.status()["tiers"][0]["store_cpu"]["rests"])
    loop.store(doubles.contents(3, first=1))
    for number in (1, 2, 3):
        l1.evict(doubles.key(number))
    loop.jump(60.0)
    loop.until(lambda: loop.tiering.status()["stores"]["reached_no_tier"]["objects"] == 3)
    assert len(adapter.objects) == 1


def test_a_server_that_ends_writes_what_it_owes_without_a_rest(doubles: Doubles) -> None:
    adapter = busy(doubles.adapter)
    loop = doubles.loop(doubles.l1(), doubles.tier("mem", adapter, store_cpu_share=SHARE), stands=True)
    loop.idle()
    loop.store(doubles.contents(1))
    loop.until(lambda: loop.tiering.status()["tiers"][0]["store_cpu"]["rests"])
    loop.store(doubles.contents(1, first=1))
    loop.tiering.begin_drain()
    loop.until(lambda: loop.tiering.drained)
    assert len(adapter.objects) == 2


def test_a_tier_gives_way_to_other_programs_by_default() -> None:
    config = tier_config(TierSettings(type="mem"))
    assert config.store_io == "idle"
    assert config.store_cpu_share == usable_cores() / 4
    assert tier_config(TierSettings(type="mem", store_cpu_share=1.5, store_io="normal")).store_cpu_share == 1.5


def test_a_running_tier_takes_over_another_share(doubles: Doubles) -> None:
    tier = doubles.tier("mem", doubles.adapter(), store_cpu_share=SHARE)
    doubles.loop(doubles.l1(), tier).idle()
    tier.reconfigure(replace(tier.config, store_cpu_share=2.0))
    assert tier.store_cpu.share == 2.0
