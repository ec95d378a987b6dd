"""The operation `record`: starts and stops a recording of the requests to the server that it runs in.

The server's loop queues each request with its answer; a thread beside it writes them.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from lmcache_core import __version__
from lmcache_core.errors import UsageError
from lmcache_core.limits import KEY_BYTES, STATE_CALL_S
from lmcache_core.observe.bus import EventBus
from lmcache_core.server.operation import AnsweredRequest, OperationContext, ServerOperation
from lmcache_core.state_thread import within
from lmcache_lab.recorder import Recorder, RecordingHeader, RecordSettings, recorded

if TYPE_CHECKING:
    from lmcache_core import Client

OPERATION = "record"
REQUESTS_WAITING_MAX = 10_000  # to be written; further ones are dropped, and counted


class RecordRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`start` records into `dir`, on the server's machine, with `settings` as in the table [operations.record]."""

    action: Literal["start", "stop", "describe"]
    dir: str = ""
    settings: dict[str, Any] = {}


class RecordReply(msgspec.Struct, frozen=True):
    """The recording that has begun, ended or runs: what was written, and what was lost for lack of time or room. `dir`
    is None if there is none."""

    server: str
    dir: str | None
    operations: int = 0
    dropped: int = 0
    missed: int = 0


class Recording:
    """One of them, from its beginning to its end."""

    def __init__(self, settings: RecordSettings, context: OperationContext) -> None:
        """Raises `UsageError` for a directory that cannot be used."""
        assert settings.dir is not None
        self.dir = settings.dir
        header = RecordingHeader(time.time(), context.server, __version__, _about(context))
        began_s = context.clock.now
        late = UsageError(
            f"cannot record into {self.dir}: it has not answered for {STATE_CALL_S:g} s; see whether its disk or "
            "mount hangs"
        )
        try:
            self._recorder = within(
                STATE_CALL_S, lambda: Recorder(settings, header, began_s), late, lambda recorder: recorder.close()
            )
        except OSError as error:
            raise UsageError(f"cannot record into {self.dir}: {error.strerror}") from error
        self._bus = EventBus({OPERATION: self._recorder}, REQUESTS_WAITING_MAX, context.clock)
        try:
            self._unwatch = context.watch(self._answered)
        except BaseException:  # somebody else watches, or the server has ended meanwhile
            self._bus.close()
            raise

    def _answered(self, request: AnsweredRequest) -> None:
        self._bus.emit(recorded, request, keeps=len(request.keys) // KEY_BYTES)
        self._bus.check()  # a recorder that hangs is disabled

    def close(self) -> None:
        """End it, and wait until all of it is written; for a moment if its disk hangs."""
        self._unwatch()
        self._bus.close()

    def status(self) -> dict[str, Any]:
        """Where it is, and how far."""
        bus = self._bus.status()
        recorder = bus["subscribers"][OPERATION]
        return {
            "dir": str(self.dir),
            "operations": self._recorder.operations,
            "waiting": bus["queue"],
            "dropped": bus["dropped"],
            "missed": recorder["missed"],
            "disabled": recorder["disabled"],
        }


_NONE = {"dir": None, "operations": 0, "waiting": 0, "dropped": 0, "missed": 0, "disabled": ""}


class RecordOperation(ServerOperation):
    """Starts and stops recordings, one at a time."""

    request = RecordRequest
    reply = RecordReply
    runs = "lane"

    def __init__(self, settings: RecordSettings, context: OperationContext) -> None:
        self._context = context
        self._changing = threading.Lock()
        self._recording = None if settings.dir is None else Recording(settings, context)

    def handle(self, request: RecordRequest) -> RecordReply:
        """Raises `UsageError` if there is a recording already, or none to stop."""
        if request.action == "describe":
            return self._reply(self.status())
        if not self._changing.acquire(blocking=False):
            raise UsageError("a recording is being started or stopped: try again in a moment")
        try:
            return self._stop() if request.action == "stop" else self._start(request.dir, request.settings)
        finally:
            self._changing.release()

    def _start(self, directory: str, settings: dict[str, Any]) -> RecordReply:
        if self._recording is not None:
            raise UsageError(f"the server is already recording into {self._recording.dir}: stop that first")
        try:
            checked = RecordSettings.model_validate({**settings, "dir": directory})
        except ValueError as error:
            raise UsageError(f"this cannot be recorded: {error}") from error
        self._recording = Recording(checked, self._context)
        return self._reply(self._recording.status())

    def _stop(self) -> RecordReply:
        recording, self._recording = self._recording, None
        if recording is None:
            raise UsageError("the server is not recording")
        recording.close()
        return self._reply(recording.status())

    def _reply(self, status: dict[str, Any]) -> RecordReply:
        return RecordReply(self._context.server, *(status[name] for name in ("dir", "operations", "dropped", "missed")))

    def status(self) -> dict[str, Any]:
        """The current recording; its `dir` is None if there is none."""
        recording = self._recording
        return dict(_NONE) if recording is None else recording.status()

    def close(self) -> None:
        """The server stops: what waits is written."""
        if self._recording is not None:
            self._recording.close()


def _about(context: OperationContext) -> dict[str, Any]:
    """What a recording says about its server."""
    settings = context.settings
    return {
        "pool_bytes": settings.l1.size_bytes,
        "eviction_policy": settings.l1.eviction.type,
        "watermark": settings.l1.watermark,
        "chunk_tokens": settings.chunk_tokens,
        "tiers": list(settings.l2),
    }


def start_recording(client: Client, directory: str | Path, **settings: Any) -> RecordReply:
    """Make the client's server record its requests into a directory on its machine that has no recording yet.
    `settings`: as in the table [operations.record]. Until the recording ends, hits cost a call. Raises `UsageError`
    with the server's message."""
    request = RecordRequest("start", str(Path(directory).absolute()), settings)
    return client.call_operation(OPERATION, request, RecordReply)


def stop_recording(client: Client) -> RecordReply:
    """End the recording; when this returns, all of it is written. Raises `UsageError` if there is none."""
    return client.call_operation(OPERATION, RecordRequest("stop"), RecordReply)
