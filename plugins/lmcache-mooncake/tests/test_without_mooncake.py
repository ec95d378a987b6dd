"""What holds where Mooncake's wheel is not installed, too."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import socket
import time

import pytest
from pydantic import ValidationError

from lmcache_core.errors import TierError
from lmcache_core.tiers.contract import AdapterContext, Result, StoreItem
from lmcache_mooncake.adapter import MooncakeAdapter
from lmcache_mooncake.client import CallLane, StoreProcess
from lmcache_mooncake.errors import refusal
from lmcache_mooncake.messages import (
    ALIGN,
    BUSY,
    CHECKSUM_BYTES,
    FULL,
    PACKET_BYTES_MAX,
    Request,
    places,
    room_bytes,
)
from lmcache_mooncake.settings import MooncakeSettings


def test_a_wheel_that_is_missing_is_said_with_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with MooncakeAdapter(MooncakeSettings(), AdapterContext(tier="far")) as adapter:
        with pytest.raises(TierError, match=r"pip install 'lmcache-mooncake\[non-cuda\]'") as raised:
            adapter.exists([b"key"], time.monotonic() + 60)
        assert not raised.value.retryable
        (outcome,) = adapter.store([StoreItem(b"key", [memoryview(b"object")])], time.monotonic() + 60)
        assert outcome.result is Result.FAILED
        assert not outcome.retryable
        assert adapter.status() == {"pid": 0, "starts": 0, "late_calls": 0}


def test_a_late_call_that_has_ended_gives_its_memory_back_when_somebody_looks() -> None:
    process = StoreProcess(MooncakeSettings(), "far")
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        with contextlib.closing(CallLane(process, ours, os.memfd_create("objects"))) as lane:
            with pytest.raises(TimeoutError):
                lane.call(Request("exists", ["a"]), time.monotonic() + 0.05)
        assert process.status()["late_calls"] == 1
        theirs.recv(PACKET_BYTES_MAX)
        theirs.send(b"the answer")
        assert process.status()["late_calls"] == 0
        with pytest.raises(ConnectionError):
            theirs.recv(1)


@pytest.mark.parametrize("master", ["", "nowhere", "host:0", "host:70000", "host:1:2"])
def test_a_master_must_be_an_address(master: str) -> None:
    with pytest.raises(ValidationError):
        MooncakeSettings(master=master)


def test_masters_of_an_etcd_are_taken_as_they_are() -> None:
    assert MooncakeSettings(master="etcd://a:2379;b:2379").master == "etcd://a:2379;b:2379"


def test_objects_do_not_meet_in_the_shared_memory() -> None:
    sizes = [0, 1, ALIGN - CHECKSUM_BYTES, ALIGN, 10_000]
    at = places(sizes)
    for begin, nbytes, following in zip(at, sizes, [*at[1:], at[-1] + room_bytes(sizes[-1])], strict=True):
        assert begin % ALIGN == 0
        assert begin + nbytes + CHECKSUM_BYTES <= following


@pytest.mark.parametrize(
    ("code", "result", "retryable"),
    [
        (FULL, Result.FULL, True),
        (BUSY, Result.THROTTLED, True),
        (-900, Result.FAILED, True),
        (-1_234, Result.FAILED, True),
        (-600, Result.FAILED, False),
    ],
)
def test_what_a_code_means(code: int, result: Result, retryable: bool) -> None:
    outcome = refusal("far", "store", code)
    assert outcome.result is result
    assert outcome.retryable is retryable
    assert "'far'" in outcome.error
    assert "l2.NAME" not in outcome.error + outcome.cure
