"""Files of events on a disk that is full for a while: nothing torn, and on they go."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lmcache_core.observe.events import CacheEvent, DrainBegun
from lmcache_core.observe.files import JsonlEvents, JsonlSettings
from lmcache_core.observe.subscriber import EventSubscriber, SubscriberContext


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
