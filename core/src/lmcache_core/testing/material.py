"""What contract tests are made of: keys, contents, and short words for one object."""

from __future__ import annotations

import array
import hashlib
import random
import struct
import time
from collections.abc import Sequence

from lmcache_core.pool.layout import Layout
from lmcache_core.tiers.contract import L2Adapter, LoadItem, Outcome, Result, ScanEntry, StoreItem

DEADLINE_S = 60.0  # a safety net; nothing here takes as long
FILL = 0xA5  # what targets hold before a load

# Keys that have broken media: separators, terminators, wildcards, names with a meaning, bytes that are no text.
DIFFICULT_KEYS = (
    b"\0", b"\0" * 44, b"\xff" * 44, b".", b"..", b"/", b"../../etc/passwd", b"a/b", b"a//b", b"a\\b", b"a b", b" a ",
    b"a\nb", b"a\r\n", b"a\tb", b"a\0b", b"'; drop table objects; --", b'"quoted"', b"%s%n", b"%2e%2e%2f", b"*", b"?",
    b"[a-z]", b"~", b"-rf", b"CON", b"con", b"a:b", b"a|b", b"{tag}", b"#", b"\xc3\xa9", b"e\xcc\x81", b"\xed\xa0\x80",
    b"\x80", b"\xfe\xff", bytes(range(44)), b"tmp", b"damaged", b"None", b"0",
)  # fmt: skip

# Pairs that a careless medium takes for one: by prefix, case, trailing bytes, normalisation, number.
SIMILAR_KEYS = (
    (b"key", b"key\0"), (b"key", b"key "), (b"key", b"KEY"), (b"key", b"ke"), (b"\0key", b"key"), (b"01", b"1"),
    (b"\xc3\xa9", b"e\xcc\x81"), (b"a/b", b"a_b"), (b"a\nb", b"a"), (b"6b", b"k"), (bytes(44), bytes(43)),
)  # fmt: skip


def key(number: int, name: str = "") -> bytes:
    """A key as the kernel makes them: 44 bytes of any value."""
    return hashlib.sha384(f"{name}{number}".encode()).digest()[:44]


def content(number: int, nbytes: int) -> bytes:
    """Bytes that look like nothing else's, equal for equal arguments."""
    return random.Random(number).randbytes(nbytes)


def soon() -> float:
    """A deadline that is not reached."""
    return time.monotonic() + DEADLINE_S


def store(adapter: L2Adapter, key: bytes, *parts: bytes) -> Outcome:
    """Store one object made of `parts`."""
    (outcome,) = adapter.store([StoreItem(key, [memoryview(part) for part in parts])], soon())
    return outcome


def load(adapter: L2Adapter, key: bytes, *sizes: int) -> tuple[Outcome, bytes]:
    """Load one object into fresh buffers of these sizes; their content, one after the other."""
    targets = [bytearray([FILL]) * size for size in sizes]
    (outcome,) = adapter.load([LoadItem(key, [memoryview(target) for target in targets])], soon())
    return outcome, b"".join(targets)


def holds(adapter: L2Adapter, key: bytes, expected: bytes) -> bool:
    """Whether the object comes back with exactly these bytes."""
    outcome, found = load(adapter, key, len(expected))
    return outcome.result is Result.DONE and outcome.nbytes == len(expected) and found == expected


def results(outcomes: Sequence[Outcome]) -> list[Result]:
    return [outcome.result for outcome in outcomes]


def scan(adapter: L2Adapter, pages_max: int = 10_000) -> list[ScanEntry]:
    """Every entry of every page."""
    found: list[ScanEntry] = []
    cursor: str | None = None
    for _ in range(pages_max):
        page = adapter.scan(cursor, soon())
        found += page.entries
        cursor = page.cursor
        if cursor is None:
            return found
    raise AssertionError(f"the scan gave {pages_max} pages and no end: its last page has the cursor None")


def sample(layout: Layout, seed: int) -> bytes:
    """Finite values of the layout's type, as KV has them: normal, mostly small, a few outliers."""
    rng = random.Random(seed)
    count = layout.nbytes // layout.itemsize
    if layout.dtype == "bool":
        return bytes(rng.getrandbits(1) for _ in range(count))
    if layout.dtype.startswith("float8"):
        return bytes(rng.randrange(0x60) | rng.getrandbits(1) << 7 for _ in range(count))
    if layout.dtype in ("float64", "float32", "float16", "bfloat16"):
        values = [rng.gauss(0.0, 1.0) * (20.0 if rng.random() < 0.01 else 1.0) for _ in range(count)]
        if layout.dtype == "bfloat16":
            words = array.array("I", array.array("f", values).tobytes())
            return array.array("H", [word >> 16 for word in words]).tobytes()
        return struct.pack(f"<{count}{ {'float64': 'd', 'float32': 'f', 'float16': 'e'}[layout.dtype] }", *values)
    return rng.randbytes(layout.nbytes)
