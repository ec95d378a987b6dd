"""The range of every number, and the length of every text and list, that a message may have.

The decoder refuses what is outside of them, so no handler ever sees it: nothing has changed by then. A struct of the
protocol has no plain `int`, `float`, `str`, `bytes` or list; a test looks at every field of every message.

MessagePack itself ends integers at 2⁶⁴ − 1, so `ge=0` makes a u64. A NaN is in no range.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from lmcache_core.limits import (
    BATCH_KEYS_MAX,
    BLOCK_HASH_BYTES_MAX,
    CLIENT_ID_BYTES,
    DIMENSIONS_MAX,
    ERROR_CHARS_MAX,
    FRAME_BYTES_MAX,
    LABEL_CHARS_MAX,
    LEASE_KEYS_MAX,
    OBJECT_BYTES_MAX,
    PID_MAX,
    SECONDS_MAX,
    SESSION_NAME_BYTES_MAX,
    TIER_NAME_CHARS_MAX,
    WORDS_CHARS_MAX,
)
from lmcache_core.tokens.namespace import LABEL_LETTERS

# Not `\w`: names are people's, in any script. A control character would forge lines in logs and on terminals, as other
# ends of lines and marks of the writing direction would, and a NUL ends a path.
_PRINTABLE = r"\A[^\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]*\Z"

# --- numbers
U64 = Annotated[int, Meta(ge=0)]  # ids: of requests, namespaces, leases, promises, jobs, incarnations
U32 = Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]
I63 = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]  # bytes, and running counts
Epoch = Annotated[int, Meta(ge=0, le=(1 << 24) - 1)]  # of a server
Version = Annotated[int, Meta(ge=0, le=(1 << 16) - 1)]
Pid = Annotated[int, Meta(ge=0, le=PID_MAX)]
Row = Annotated[int, Meta(ge=0, le=0xFFFF)]  # of the worker table, or `NO_ROW`
Position = Annotated[int, Meta(ge=0, le=LEASE_KEYS_MAX)]  # in a lease, or how many it has
KeyCount = Annotated[int, Meta(ge=0, le=BATCH_KEYS_MAX)]  # of one frame
Dimension = Annotated[int, Meta(ge=1, le=OBJECT_BYTES_MAX)]  # in elements; `Layout` bounds their product
Positive = Annotated[int, Meta(ge=1, le=(1 << 31) - 1)]
Seconds = Annotated[float, Meta(ge=0.0, le=SECONDS_MAX)]  # a duration
UnixTime = Annotated[float, Meta(ge=0.0, le=1e12)]

# --- texts and bytes; a frame bounds what has no bound of its own
Text = Annotated[str, Meta(max_length=FRAME_BYTES_MAX)]  # words for people, or a value that its reader checks
Word = Annotated[str, Meta(max_length=WORDS_CHARS_MAX)]  # looked up among known ones; patterns are slow
Name = Annotated[str, Meta(max_length=WORDS_CHARS_MAX, pattern=_PRINTABLE)]
SessionName = Annotated[str, Meta(max_length=SESSION_NAME_BYTES_MAX, pattern=_PRINTABLE)]
Label = Annotated[str, Meta(max_length=LABEL_CHARS_MAX, pattern=rf"\A[{LABEL_LETTERS}]*\Z")]
TierName = Annotated[str, Meta(max_length=TIER_NAME_CHARS_MAX, pattern=_PRINTABLE)]
Axes = Annotated[str, Meta(max_length=DIMENSIONS_MAX, pattern=_PRINTABLE)]
ErrorText = Annotated[str, Meta(max_length=ERROR_CHARS_MAX)]
Blob = Annotated[bytes, Meta(max_length=FRAME_BYTES_MAX)]  # keys, or what its reader checks
ClientId = Annotated[bytes, Meta(min_length=CLIENT_ID_BYTES, max_length=CLIENT_ID_BYTES)]
BlockHash = Annotated[bytes, Meta(min_length=1, max_length=BLOCK_HASH_BYTES_MAX)]
KeyBytes = Annotated[bytes, Meta(max_length=BATCH_KEYS_MAX)]  # one byte for each key of a frame
KeyU32s = Annotated[bytes, Meta(max_length=4 * BATCH_KEYS_MAX)]  # a packed u32 for each
KeyU64s = Annotated[bytes, Meta(max_length=8 * BATCH_KEYS_MAX)]  # a packed u64, or f64, for each

# --- lists; each entry takes a byte of its frame, so none is longer
U64s = Annotated[list[U64], Meta(max_length=FRAME_BYTES_MAX)]
Shape = Annotated[list[Dimension], Meta(max_length=DIMENSIONS_MAX)]
Names = Annotated[list[Name], Meta(max_length=FRAME_BYTES_MAX)]
Values = Annotated[dict[Name, Any], Meta(max_length=FRAME_BYTES_MAX)]  # checked by whoever knows the names
