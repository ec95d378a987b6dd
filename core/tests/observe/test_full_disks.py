"""Files of events and recordings on a disk that is full for a while: nothing torn, and on they go."""

from __future__ import annotations

import json
import os
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lmcache_core.clock import Clock
from lmcache_core.observe import bus as bus_module
from lmcache_core.observe.bus import EventBus
from lmcache_core.observe.events import CacheEvent, DrainBegun
from lmcache_core.observe.files import JsonlEvents, JsonlSettings
from lmcache_core.observe.subscriber import EventSubscriber, SubscriberContext
from lmcache_core.observe.traces import LOOKUP, OperationServed, TraceRecorder, header_of, read_recording
from lmcache_core.settings.model import RecordSettings


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


@contextmanager
def room_for(nbytes: int) -> Iterator[None]:
    """No file of this process grows beyond that: a write ends in the middle, and the next one fails, as on a full
    disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def drain(number: int) -> list[CacheEvent]:
    return [DrainBegun(at_s=1.0, drain_s=float(number))]


def lookup(number: int) -> list[CacheEvent]:
    return [
        OperationServed(
            at_s=1.0, asked_at_s=float(number), took_s=0.0, worker=1, kind=LOOKUP, namespace=7, nbytes=4096,
            keys=bytes(32 * 64), prefix=True, hits=0, statuses=bytes(64),
        )
    ]  # fmt: skip


def fails_in_the_middle(subscriber: EventSubscriber, events: list[CacheEvent], file: Path) -> None:
    before = file.read_bytes()
    with room_for(len(before) + 10), pytest.raises(OSError, match=file.name):
        subscriber.hear(events)
    assert file.read_bytes() == before


def test_lines_are_whole_however_often_the_disk_was_full(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    subscriber = JsonlEvents(JsonlSettings(path=path), SubscriberContext("node", tmp_path))
    for number in range(3):
        subscriber.hear(drain(number))
        fails_in_the_middle(subscriber, drain(100 + number), path)
    subscriber.close()
    assert [json.loads(line)["drain_s"] for line in path.read_text().splitlines()] == [0.0, 1.0, 2.0]


def test_lines_are_whole_also_in_a_file_that_another_program_has_cut(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    subscriber = JsonlEvents(JsonlSettings(path=path), SubscriberContext("node", tmp_path))
    subscriber.hear(drain(1))
    before = path.stat().st_size
    os.truncate(path, 0)
    with room_for(before + 10), pytest.raises(OSError, match=path.name):
        subscriber.hear(3 * drain(2))
    assert path.read_bytes() == b""
    subscriber.hear(drain(3))
    subscriber.close()
    assert json.loads(path.read_text())["drain_s"] == 3.0


def test_a_file_of_lines_that_could_not_be_rotated_goes_on_once_there_is_room(tmp_path: Path) -> None:
    folder = tmp_path / "events"
    path = folder / "events.jsonl"
    subscriber = JsonlEvents(JsonlSettings(path=path, rotate_bytes=1), SubscriberContext("node", tmp_path))
    folder.rename(tmp_path / "elsewhere")  # nothing can be made there, for root neither
    subscriber.hear(drain(1))  # it is in a file that is still open, so this is no failure
    for _ in range(2):
        with pytest.raises(OSError, match=r"events\.jsonl"):
            subscriber.hear(drain(2))
    folder.mkdir()
    subscriber.hear(drain(3))
    subscriber.close()
    assert json.loads((tmp_path / "elsewhere" / "events.jsonl").read_text())["drain_s"] == 1.0
    assert json.loads(path.read_text())["drain_s"] == 3.0


def recorder(folder: Path, file_bytes: int = 1 << 20) -> TraceRecorder:
    return TraceRecorder(RecordSettings(dir=folder, file_bytes=file_bytes), header_of("node", "1", {}), 0.0)


def test_a_recording_is_whole_however_often_the_disk_was_full(tmp_path: Path) -> None:
    made = recorder(tmp_path)
    (path,) = tmp_path.iterdir()
    for number in range(3):
        made.hear(lookup(number))
        fails_in_the_middle(made, lookup(100 + number), path)
    made.close()
    assert made.operations == 3
    assert [each.at_us for each in read_recording(tmp_path)[1]] == [0, 1_000_000, 2_000_000]


def test_a_recording_that_could_not_begin_its_next_file_goes_on_in_one_later(tmp_path: Path) -> None:
    folder = tmp_path / "trace"
    made = recorder(folder, file_bytes=1)
    folder.rename(tmp_path / "elsewhere")  # nothing can be made there, for root neither
    made.hear(lookup(1))  # it is in a file that is still open, so this is no failure
    for number in (2, 3):
        with pytest.raises(OSError, match="lmctrace"):
            made.hear(lookup(number))
    folder.mkdir()
    made.hear(lookup(4))
    made.close()
    assert [each.at_us for each in read_recording(tmp_path / "elsewhere")[1]] == [1_000_000]
    assert [each.at_us for each in read_recording(folder)[1]] == [4_000_000]


def test_a_recording_comes_back_by_itself_and_what_it_missed_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bus_module, "SUBSCRIBER_RETRY_S", 0.0)
    made = recorder(tmp_path)
    bus = EventBus({"record": made}, 100, Clock())
    (path,) = tmp_path.iterdir()
    with room_for(path.stat().st_size + 10):
        bus.emit(lambda at_s: lookup(1))
        until(lambda: "lmctrace" in bus.status()["subscribers"]["record"]["aside"])
    bus.emit(lambda at_s: lookup(2))
    until(lambda: made.operations)
    bus.close()
    assert bus.status()["subscribers"]["record"] == {"events": 1, "missed": 1, "aside": ""}
    assert [each.at_us for each in read_recording(tmp_path)[1]] == [2_000_000]
