"""The built-in subscribers, by the contract that everyone's passes, and by what they write."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from lmcache_core.observe.events import LeaseTimedOut, ServerFault
from lmcache_core.observe.files import JsonlEvents, JsonlSettings
from lmcache_core.observe.logs import LogEvents, LogSettings
from lmcache_core.observe.subscriber import SubscriberContext
from lmcache_testing import EventSubscriberContract
from lmcache_testing.subscriber import samples


class TestLog(EventSubscriberContract):
    component = "log"


class TestJsonl(EventSubscriberContract):
    component = "jsonl"


class TestStream(EventSubscriberContract):
    component = "stream"


def test_a_line_is_json_with_the_name_the_time_and_keys_as_digits(tmp_path: Path) -> None:
    subscriber = JsonlEvents(JsonlSettings(), SubscriberContext("node", tmp_path / "not" / "there"))
    subscriber.hear(samples())
    subscriber.close()
    lines = [json.loads(line) for line in (tmp_path / "not/there/node-events.jsonl").read_text().splitlines()]
    assert [line["event"] for line in lines] == [event.name for event in samples()]
    assert all(line["at_s"] == 1_700_000_000.0 for line in lines)
    assert lines[0]["keys"][0] == "01" * 32
    assert lines[0]["namespace"] == f"{7:016x}"


@pytest.mark.parametrize("files", [1, 3])
def test_files_are_rotated_and_only_so_many_are_kept(tmp_path: Path, files: int) -> None:
    path = tmp_path / "events.jsonl"
    settings = JsonlSettings(path=path, rotate_bytes=1, files=files)
    subscriber = JsonlEvents(settings, SubscriberContext("node", tmp_path))
    for at_s in range(6):
        subscriber.hear([samples(float(at_s))[0]])
    subscriber.close()
    left = sorted(tmp_path.glob("events.jsonl*"))
    assert len(left) == files
    times = [json.loads(line)["at_s"] for each in reversed(left) for line in each.read_text().splitlines()]
    assert times == ([5.0] if files == 1 else [3.0, 4.0, 5.0])


def test_a_full_disk_is_told_with_the_path_of_the_file_and_once() -> None:
    subscriber = JsonlEvents(JsonlSettings(path=Path("/dev/full")), SubscriberContext("node", Path("/")))
    with pytest.raises(OSError, match=r"No space left on device: '/dev/full'"):
        subscriber.hear(samples())
    subscriber.close()


def test_the_log_leaves_objects_out_and_says_trouble_louder(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    caplog.set_level(logging.DEBUG, "lmcache_core.events")
    LogEvents(LogSettings(level="debug"), SubscriberContext("node", tmp_path)).hear(samples())
    said = {record.getMessage().split()[0]: record.levelname for record in caplog.records}
    assert "admitted" not in said
    assert "lookup" not in said
    assert said["session_opened"] == "DEBUG"
    assert said["fault"] == "WARNING"
    caplog.clear()
    LogEvents(LogSettings(objects=True), SubscriberContext("node", tmp_path)).hear(samples())
    assert "admitted namespace=0000000000000007 keys=8 nbytes=7" in caplog.text


def test_the_log_counts_what_comes_too_often(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    caplog.set_level(logging.DEBUG, "lmcache_core.events")
    subscriber = LogEvents(LogSettings(lines_max=3), SubscriberContext("node", tmp_path))

    def lines(at_s: float, count: int) -> list[str]:
        caplog.clear()
        subscriber.hear([LeaseTimedOut(at_s=at_s, session=1, lease=2, kind="read")] * count)
        return [record.getMessage() for record in caplog.records]

    shown = "lease_expired session=1 lease=2 kind=read"
    assert lines(100.0, 5) == [shown] * 3
    assert lines(109.0, 5) == []
    assert lines(110.0, 1) == ["left_out of=lease_expired events=7", shown]
    assert lines(50.0, 4) == [shown] * 3, "a clock that was set back begins anew"
    caplog.clear()
    subscriber.hear([ServerFault(at_s=60.0, where="the loop")])
    said = [record.getMessage() for record in caplog.records]
    assert said == ["fault where=the loop", "left_out of=lease_expired events=1"], "another kind has lines of its own"
    lines(61.0, 4)
    caplog.clear()
    subscriber.close()
    assert [record.getMessage() for record in caplog.records] == ["left_out of=lease_expired events=1"]
