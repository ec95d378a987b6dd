"""The server's log, written by a thread of its own: a full disk or a reader that hangs stalls nobody."""

from __future__ import annotations

import logging
import os
import queue
import threading
import time

from lmcache_core.errors import printable
from lmcache_core.guard import is_interrupt
from lmcache_core.limits import LOG_LINES_MAX, STATE_END_S

log = logging.getLogger(__name__)
_LOST_PAUSE_S = 10.0  # between two lines about lost ones


class TextLines(logging.Formatter):
    """One line for each record, and its traceback on indented ones. Texts from outside can forge no line, nor steer a
    terminal."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line, on which everything is printable."""
        return printable(super().formatMessage(record))

    def formatException(self, *arguments: object) -> str:
        """The traceback, whose lines look like no record's."""
        lines = super().formatException(*arguments).splitlines()  # type: ignore[arg-type]
        return "\n".join(f"  {printable(line)}" for line in lines)


class LogThread(logging.Handler):
    """Writes to a descriptor on a thread. Keeps `LOG_LINES_MAX` records of those that wait: then newer ones are lost,
    and a line says how many. The thread holds no lock of `logging` or of a stream while it writes: both are taken when
    the interpreter ends.
    """

    def __init__(self, fd: int, lines: logging.Formatter) -> None:
        self._fd = os.dup(fd)
        self._records: queue.Queue[logging.LogRecord | None] = queue.Queue(LOG_LINES_MAX)
        self._lost = 0
        self._reported_at_s = 0.0
        self._thread = threading.Thread(target=self._run, name="lmcache-log", daemon=True)
        self._thread.start()
        super().__init__()  # only now: from here on `logging` closes it at the end of the process
        self.setFormatter(lines)

    def emit(self, record: logging.LogRecord) -> None:
        """Called on any thread; never waits. A wrong call of logging is a line that says so: `handleError` would write
        to a stream, whose reader may hang."""
        try:
            message = record.getMessage()  # now: its arguments may change
        except BaseException as error:  # what a plugin's __str__ raises, or `%` for arguments that do not fit
            if is_interrupt(error):
                raise
            message = f"{type(record.msg).__name__} that cannot be formatted: {type(error).__name__} (a wrong log call)"
        record.message = record.msg = message
        record.args = None
        try:
            self._records.put_nowait(record)
        except queue.Full:
            self._lost += 1

    def close(self) -> None:
        """Write what is left, for a second at most."""
        try:
            self._records.put(None, timeout=STATE_END_S)
            self._thread.join(STATE_END_S)
        except queue.Full:  # nobody takes it
            self._lost += 1
        super().close()

    def _run(self) -> None:
        while (record := self._records.get()) is not None:
            self._write(record)
            if time.monotonic() >= self._reported_at_s + _LOST_PAUSE_S:
                self._say_what_was_lost()
        self._say_what_was_lost()
        os.close(self._fd)

    def _say_what_was_lost(self) -> None:
        if self._lost:
            lost, self._lost, self._reported_at_s = self._lost, 0, time.monotonic()
            self._write(_warning(f"{lost} lines of the log were lost: whoever takes it was too slow"))

    def _write(self, record: logging.LogRecord) -> None:
        left = memoryview(self._line(record))
        try:
            while left:
                left = left[os.write(self._fd, left) :]
        except OSError:
            self._lost += 1  # a full disk, or nobody at the other end of the pipe: the next line may go

    def _line(self, record: logging.LogRecord) -> bytes:
        """What is written for this record. Its fields may come from plugins: one that cannot be formatted is replaced
        by a line that says so, and never ends the thread."""
        try:
            return f"{self.format(record)}\n".encode(errors="backslashreplace")
        except BaseException as error:  # noqa: BLE001 - whatever a plugin's __str__ raises
            whose = record.name if type(record.name) is str else "another"
            text = (
                f"a line of the logger {whose} cannot be written, because formatting it raised {type(error).__name__}"
            )
            return f"{self.format(_warning(text))}\n".encode(errors="backslashreplace")


def _warning(text: str) -> logging.LogRecord:
    """A line of the log's own."""
    return logging.LogRecord(log.name, logging.WARNING, __file__, 0, text, None, None)
