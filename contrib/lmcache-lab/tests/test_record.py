"""The recorder on a disk that is full for a while, and what the server finds in its operation."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from lmcache_core.clock import Clock
from lmcache_core.errors import UsageError
from lmcache_core.observe import bus as bus_module
from lmcache_core.observe.bus import EventBus
from lmcache_core.observe.events import CacheEvent
from lmcache_core.server.operation import AnsweredRequest
from lmcache_lab.record import RecordRequest, start_recording, stop_recording
from lmcache_lab.recorder import LOOKUP, MAGIC, Operation, Recorder, RecordingHeader, RecordSettings, recorded
from lmcache_testing import OperationContract
from lmcache_testing.embedded import embedded_server
from lmcache_testing.waiting import until


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


def lookup(number: int) -> list[CacheEvent]:
    keys, statuses = bytes(32 * 64), bytes(64)
    return list(recorded(1.0, AnsweredRequest(float(number), 0.0, 1, LOOKUP, 7, 4096, keys, True, 0, statuses)))


def times(recording: Path) -> list[int]:
    """When each operation was, of files that are whole to their last byte."""
    found = []
    for path in sorted(recording.iterdir()):
        with path.open("rb") as file:
            assert file.read(len(MAGIC)) == MAGIC
            msgspec.msgpack.decode(file.read(int.from_bytes(file.read(4), "little")), type=RecordingHeader)
            while size := file.read(4):
                operation = msgspec.msgpack.decode(file.read(int.from_bytes(size, "little")), type=Operation)
                found.append(operation.at_us)
    return found


def recorder(folder: Path, file_bytes: int = 1 << 20) -> Recorder:
    return Recorder(RecordSettings(dir=folder, file_bytes=file_bytes), RecordingHeader(0.0, "node", "1", {}), 0.0)


def test_a_recording_is_whole_however_often_the_disk_was_full(tmp_path: Path) -> None:
    made = recorder(tmp_path)
    (path,) = tmp_path.iterdir()
    for number in range(3):
        made.hear(lookup(number))
        before = path.read_bytes()
        with room_for(len(before) + 10), pytest.raises(OSError, match=path.name):
            made.hear(lookup(100 + number))
        assert path.read_bytes() == before
    made.close()
    assert made.operations == 3
    assert times(tmp_path) == [0, 1_000_000, 2_000_000]


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
    assert times(tmp_path / "elsewhere") == [1_000_000]
    assert times(folder) == [4_000_000]


def test_a_recording_comes_back_by_itself_and_what_it_missed_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bus_module, "SUBSCRIBER_RETRY_S", 0.0)
    made = recorder(tmp_path)
    bus = EventBus({"record": made}, 100, Clock())
    (path,) = tmp_path.iterdir()
    with room_for(path.stat().st_size + 10):
        bus.emit(lambda at_s: lookup(1))
        until(lambda: "lmctrace" in bus.status()["subscribers"]["record"]["disabled"])
    bus.emit(lambda at_s: lookup(2))
    until(lambda: made.operations)
    bus.close()
    assert bus.status()["subscribers"]["record"] == {"events": 1, "missed": 1, "disabled": ""}
    assert times(tmp_path) == [2_000_000]


class TestRecord(OperationContract):
    component = "record"

    @pytest.fixture
    def sample_request(self) -> RecordRequest:
        return RecordRequest("describe")

    def test_a_server_has_it_without_a_table(self, tmp_path: Path, operation_registry) -> None:
        with embedded_server(tmp_path, operation_registry) as server, server.connect() as client:
            begun = start_recording(client, tmp_path / "trace")
            assert (begun.server, begun.dir) == (server.parts.settings.name, str(tmp_path / "trace"))
            with pytest.raises(UsageError, match="already recording"):
                start_recording(client, tmp_path / "more")
            client.clear()
            ended = stop_recording(client)
            assert (ended.dir, ended.operations, ended.dropped, ended.missed) == (begun.dir, 1, 0, 0)
            with pytest.raises(UsageError, match="is not recording"):
                stop_recording(client)
