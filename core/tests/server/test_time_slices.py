"""The loop asks for short slices; the lanes step behind it. Looked at through the kernel's own answers."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import threading
from collections.abc import Callable
from typing import TypeVar

import pytest

from lmcache_core.limits import LANE_NICE, LOOP_SLICE_S
from lmcache_core.server.process.time_slices import ask_for_short_slices
from lmcache_core.tiers.tier.lanes import WRITE_BACK, Call, Lane

SCHED_GETATTR = {"x86_64": 315, "aarch64": 275}


V = TypeVar("V")


def on_a_thread(work: Callable[[], V]) -> V:
    """What it returns on a thread of its own: slices and niceness are the thread's."""
    answers: list[object] = []
    thread = threading.Thread(target=lambda: answers.append(work()))
    thread.start()
    thread.join()
    return answers[0]


def nice() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def slice_s() -> float:
    attributes = ctypes.create_string_buffer(48)
    number = ctypes.c_long(SCHED_GETATTR[platform.machine()])
    assert ctypes.CDLL(None).syscall(number, 0, attributes, 48, 0) == 0
    return float(struct.unpack("=IIQiIQQQ", attributes.raw)[5]) / 1e9


def test_a_short_slice_changes_neither_policy_nor_niceness_and_stays_with_its_thread() -> None:
    def work() -> tuple[bool, int, int, float, float]:
        given = ask_for_short_slices()
        policy = os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK
        return given, policy, nice(), slice_s(), on_a_thread(slice_s)

    before = slice_s()
    given, policy, niceness, own_s, childs_s = on_a_thread(work)
    assert (policy, niceness) == (os.SCHED_OTHER, nice())
    assert slice_s() == before, "the thread of another is kept"
    if not given or own_s == 0.0:
        pytest.skip("this kernel gives no slices to ask for")
    assert own_s == pytest.approx(LOOP_SLICE_S)
    assert childs_s != own_s, "lanes have the usual ones: the loop waits for the one that has the GIL"


def test_a_policy_of_somebodys_choice_is_left_alone() -> None:
    def work() -> tuple[bool, int]:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        return ask_for_short_slices(), os.sched_getscheduler(0)

    assert on_a_thread(work) == (False, os.SCHED_BATCH)


class AsksForItsNiceness(Call):
    def work(self) -> int:
        return nice()

    def ended(self) -> None: ...

    def late(self) -> None: ...


def test_a_lane_steps_behind_whoever_gives_it_work() -> None:
    ended = threading.Event()
    lane = Lane("test", 1, lambda call: ended.set())
    call = AsksForItsNiceness(float("inf"), WRITE_BACK)
    assert lane.submit(call)
    assert ended.wait(20)
    lane.close()
    assert call.result == min(19, nice() + LANE_NICE)
