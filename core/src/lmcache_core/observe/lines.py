"""The server's log as JSON lines, for log collectors."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime


def named(name: str, **fields: object) -> dict[str, object]:
    """The `extra` of an operational log line: a name that stays stable when the wording changes, and its figures."""
    return {"event": {"event": name, **fields}}


class JsonLines(logging.Formatter):
    """One object on each line: `time` (ISO 8601, UTC), `level`, `logger`, `message`; `event` with the stable name and
    the fields of what happened, in operational lines and in those of the subscriber `log`; `exception` with the
    traceback, if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        """The line of one record."""
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        event = getattr(record, "event", None)
        if event is not None:
            line["event"] = event
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        text = json.dumps(line, default=str, ensure_ascii=False)
        return text if text.isprintable() else "".join(map(_escaped, text))


def _escaped(letter: str) -> str:
    """JSON escapes control characters below 32 alone; others end lines, too, or turn the direction of a terminal."""
    return letter if letter.isprintable() else json.dumps(letter)[1:-1]
