"""Events as JSON lines in a rotated file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
from pydantic import Field

from lmcache_core.files import append_whole
from lmcache_core.limits import KEY_BYTES
from lmcache_core.observe.events import BlocksReported, CacheEvent, ObjectsOnTiers
from lmcache_core.observe.subscriber import EventSubscriber, SubscriberContext
from lmcache_core.settings.model import Section
from lmcache_core.settings.paths import OptionalPath
from lmcache_core.settings.sizes import Size


class JsonlSettings(Section):
    """Where the lines go."""

    path: OptionalPath = Field(default=None, description="the file; none: NAME-events.jsonl in state_dir")
    rotate_bytes: Annotated[Size, Field(gt=0)] = Field(default=64 << 20, description="begin a new file at this size")
    files: int = Field(default=4, ge=1, le=1000, description="files kept: the current one, and .1, .2, … before it")


class JsonlEvents(EventSubscriber):
    """One line an event: `{"event": "evicted", "at_s": …, "keys": ["<hex>", …], …}`. A file is never larger than
    `rotate_bytes` and one batch. A batch is written whole or, on a full disk, not at all."""

    may_recover = True

    def __init__(self, settings: JsonlSettings, context: SubscriberContext) -> None:
        self._settings = settings
        self._path = settings.path or context.state_dir / f"{context.server}-events.jsonl"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("ab", buffering=0)

    def hear(self, events: Sequence[CacheEvent]) -> None:
        if self._file.closed:  # the last rotation had no room for a new one
            self._file = self._path.open("ab", buffering=0)
        # Before the lines: where the next file cannot begin, they are missed, and must not be in the last one.
        if os.fstat(self._file.fileno()).st_size >= self._settings.rotate_bytes:
            self._rotate()
        append_whole(self._file, b"".join(line_of(event) for event in events))

    def close(self) -> None:
        self._file.close()

    def _rotate(self) -> None:
        self._file.close()
        for number in range(self._settings.files - 1, 0, -1):
            former = self._numbered(number - 1)
            if former.exists():
                former.replace(self._numbered(number))
        self._file = self._path.open("wb" if self._settings.files == 1 else "ab", buffering=0)

    def _numbered(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}") if number else self._path


def line_of(event: CacheEvent) -> bytes:
    """One event as a line of JSON; keys as hexadecimal digits, as commands take them."""
    return msgspec.json.encode(plain(event)) + b"\n"


def plain(event: CacheEvent) -> Any:
    """An event as plain values. Keys and namespaces are hexadecimal, as they are shown everywhere."""
    fields = msgspec.to_builtins(event, builtin_types=(bytes,))
    if "keys" in fields and isinstance(fields["keys"], list):
        fields["keys"] = b"".join(fields["keys"]).hex(",", KEY_BYTES).split(",") if fields["keys"] else []
    if isinstance(event, BlocksReported):
        fields |= {"hashes": [each.hex() for each in event.hashes], "media": list(event.media)}
        fields["parent"] = None if event.parent is None else event.parent.hex()
        del fields["token_ids"]  # content
    if isinstance(event, ObjectsOnTiers):
        fields["there"] = list(event.there)
    if isinstance(fields.get("namespace"), int):
        fields["namespace"] = f"{fields['namespace']:016x}"
    return fields
