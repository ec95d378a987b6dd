"""Large objects in parallel ranges: where to cut, and what the answers mean together."""

from __future__ import annotations

from collections.abc import Sequence

from lmcache_s3.errors import Answer
from lmcache_s3.transport.payloads import Span

_PAGE = 4096


def plan_ranges(room_bytes: int, ways: int, range_bytes: int) -> list[Span]:
    """At most `ways` spans of equal size, none smaller than `range_bytes`. One span: do not cut."""
    count = min(ways, room_bytes // range_bytes) if range_bytes else 1
    if count < 2:
        return [Span(0, room_bytes)]
    step = -(-room_bytes // count // _PAGE) * _PAGE
    return [Span(start, min(start + step, room_bytes)) for start in range(0, room_bytes, step)]


def views_of(buffers: Sequence[memoryview], span: Span) -> list[memoryview]:
    """The memory of a span of the concatenated buffers."""
    found, at = [], 0
    for view in buffers:
        start, stop = max(span.start - at, 0), min(span.stop - at, view.nbytes)
        if start < stop:
            found.append(view[start:stop])
        at += view.nbytes
    return found


def join_ranges(spans: Sequence[Span], answers: Sequence[Answer]) -> Answer | None:
    """One answer for all: the object's length, or the first error. None: ask for the whole object, because it was
    replaced between two answers, or is so short that it has no first range."""
    first = answers[0]
    if first.status == 416:
        return None
    total = _total_bytes(first)
    for span, answer in zip(spans, answers, strict=True):
        if answer.status == 416 and total is not None and span.start >= total:
            continue  # the object ends before this range
        if not answer.ok:
            return answer
        same = answer.status == 206 and answer.headers.get("etag") == first.headers.get("etag")
        if not same or total is None or _total_bytes(answer) != total:
            return None
        if answer.nbytes != min(span.stop, total) - span.start:
            return None
    return first._replace(status=200, nbytes=total or 0)


def _total_bytes(answer: Answer) -> int | None:
    """Of the whole object, from `Content-Range: bytes 0-99/1234`."""
    text = answer.headers.get("content-range", "").rpartition("/")[2]
    return int(text) if text.isdigit() else None
