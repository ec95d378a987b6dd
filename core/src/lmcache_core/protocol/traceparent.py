"""The trace that a request belongs to, as a text of W3C Trace Context: `00-TRACE-SPAN-FLAGS`."""

from __future__ import annotations

import re
from typing import NamedTuple

_FORM = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.{0,200})?")
_SAMPLED = 1


class TraceParent(NamedTuple):
    """`trace` and `span` as numbers of 128 and 64 bits; `sampled`: whether the trace's originator records it."""

    trace: int
    span: int
    sampled: bool


def parse_traceparent(text: str) -> TraceParent | None:
    """The parsed text; None if it is not a valid trace, which the standard says to ignore."""
    found = _FORM.fullmatch(text)
    if found is None or found[1] == "ff" or (found[1] == "00" and found[5]):
        return None
    trace, span = int(found[2], 16), int(found[3], 16)
    return TraceParent(trace, span, bool(int(found[4], 16) & _SAMPLED)) if trace and span else None
