"""Material for contract tests: keys, contents, and short helpers for one object."""

from __future__ import annotations

import array
import base64
import hashlib
import random
import struct
import time
from collections.abc import Iterator, Sequence

from lmcache_core.pool.layout import Layout
from lmcache_core.tiers.contract import L2Adapter, LoadItem, Outcome, Result, ScanEntry, ScanPage, StoreItem

DEADLINE_S = 60.0  # a safety net; nothing here takes that long
FILL = 0xA5  # the content of targets before a load

# Keys that have broken media: separators, terminators, wildcards, names with a meaning, bytes that are not text.
DIFFICULT_KEYS = (
    b"\0", b"\0" * 44, b"\xff" * 44, b".", b"..", b"/", b"../../etc/passwd", b"a/b", b"a//b", b"a\\b", b"a b", b" a ",
    b"a\nb", b"a\r\n", b"a\tb", b"a\0b", b"'; drop table objects; --", b'"quoted"', b"%s%n", b"%2e%2e%2f", b"*", b"?",
    b"[a-z]", b"~", b"-rf", b"CON", b"con", b"a:b", b"a|b", b"{tag}", b"#", b"\xc3\xa9", b"e\xcc\x81", b"\xed\xa0\x80",
    b"\x80", b"\xfe\xff", bytes(range(44)), b"tmp", b"damaged", b"None", b"0",
)  # fmt: skip

# Pairs that a careless medium confuses: by prefix, case, trailing bytes, normalisation, number.
SIMILAR_KEYS = (
    (b"key", b"key\0"), (b"key", b"key "), (b"key", b"KEY"), (b"key", b"ke"), (b"\0key", b"key"), (b"01", b"1"),
    (b"\xc3\xa9", b"e\xcc\x81"), (b"a/b", b"a_b"), (b"a\nb", b"a"), (b"6b", b"k"), (bytes(44), bytes(43)),
    (b"a.", b"a"), (b"a/", b"a"), (b"/a", b"a"), (b"a//b", b"a/b"), (b"a/./b", b"a/b"), (b"a/../b", b"b"),
    (b"../a", b"a"), (b"a\\b", b"a/b"), (b"%41", b"A"), (b"a+b", b"a b"), (b"\x80", b"\x81"),
    ("\N{LATIN SMALL LETTER SHARP S}".encode(), b"ss"), ("\N{LATIN SMALL LIGATURE FI}".encode(), b"fi"),
    ("\N{KELVIN SIGN}".encode(), b"k"), (base64.b64decode(b"A" * 59 + b"="), base64.b64decode(b"a" + b"A" * 58 + b"=")),
)  # fmt: skip


def similar_keys(longest: int) -> list[tuple[bytes, bytes]]:
    """Pairs that must be kept apart, also at the length of the kernel's keys and at the largest length claimed."""
    pairs = [pair for pair in SIMILAR_KEYS if max(map(len, pair)) <= longest]
    for length in sorted({44, longest}):
        stem = b"k" * (length - 1)
        pairs += [(stem + b"1", stem + b"2"), (stem + b"\0", stem), (b"\0" + stem, stem)]
    return pairs


def keys_one_byte_apart(longest: int) -> list[bytes]:
    """A key like the kernel's, and one of the largest length, each with all keys that differ from it in one byte: in
    the case bit, the lowest bit, or the highest bit."""
    found = []
    for stem, first in ((key(5), 0), (b"k" * longest, 44)):
        changed = [(at, (0x20, 0x01, 0x80)[at % 3]) for at in range(first, len(stem))]
        found += [stem, *(stem[:at] + bytes([stem[at] ^ bit]) + stem[at + 1 :] for at, bit in changed)]
    return list(dict.fromkeys(found))


def key(number: int, name: str = "") -> bytes:
    """A key like the kernel's: 44 bytes of any value."""
    return hashlib.sha384(f"{name}{number}".encode()).digest()[:44]


# Two keys each (numbers for `key`) with the same 32-bit hash.
_COLLIDING_NUMBERS = {
    "CRC-32": (23409, 65174), "Adler-32": (774, 1517), "FNV-1a of 32 bits": (83349, 104869),
    "MurmurHash3 of 32 bits": (5649, 58684), "XXH32": (11745, 102752),
    "low half of an XXH64": (72078, 99624), "low half of an XXH3": (48239, 54993),
    "four bytes of an MD5": (13425, 61745), "four bytes of a SHA-1": (118038, 161533),
    "four bytes of a SHA-256": (58482, 149675), "four bytes of a BLAKE2b": (34785, 44028),
}  # fmt: skip
COLLIDING_KEYS = {name: [key(number) for number in pair] for name, pair in _COLLIDING_NUMBERS.items()}


def content(number: int, nbytes: int) -> bytes:
    """Pseudo-random bytes, equal for equal arguments."""
    return random.Random(number).randbytes(nbytes)


def soon() -> float:
    """A deadline that will not be reached."""
    return time.monotonic() + DEADLINE_S


def batches(adapter: L2Adapter, count: int, most: int = 512) -> Iterator[range]:
    """0 to `count`, in batches that the adapter takes."""
    step = max(1, min(most, adapter.capabilities.batch_keys_max))
    for start in range(0, count, step):
        yield range(start, min(count, start + step))


def fitting(adapter: L2Adapter, nbytes: int) -> int:
    """`nbytes`, or the adapter's largest object if that is smaller."""
    largest = adapter.capabilities.object_bytes_max
    return nbytes if largest is None else min(nbytes, largest)


def store(adapter: L2Adapter, key: bytes, *parts: bytes) -> Outcome:
    """Store one object made of `parts`."""
    (outcome,) = adapter.store([StoreItem(key, [memoryview(part) for part in parts])], soon())
    return outcome


def load(adapter: L2Adapter, key: bytes, *sizes: int) -> tuple[Outcome, bytes]:
    """Load one object into fresh buffers of these sizes. Returns their joined content."""
    targets = [bytearray([FILL]) * size for size in sizes]
    (outcome,) = adapter.load([LoadItem(key, [memoryview(target) for target in targets])], soon())
    return outcome, b"".join(targets)


def holds(adapter: L2Adapter, key: bytes, expected: bytes) -> bool:
    """Whether the object comes back with exactly these bytes."""
    outcome, found = load(adapter, key, len(expected))
    return outcome.result is Result.DONE and outcome.nbytes == len(expected) and found == expected


def results(outcomes: Sequence[Outcome]) -> list[Result]:
    return [outcome.result for outcome in outcomes]


def page_of(adapter: L2Adapter, cursor: str | None) -> ScanPage:
    """One page of a scan; checks that it has the types in the contract."""
    page = adapter.scan(cursor, soon())
    assert isinstance(page, ScanPage), f"scan gave a {type(page).__name__}, and has to give a ScanPage"
    if page.cursor is not None:
        _expect_type("a scan gave the cursor", page.cursor, str)
    for entry in page.entries:
        assert isinstance(entry, ScanEntry), f"a page of a scan holds a {type(entry).__name__}, and not a ScanEntry"
        _expect_type("a scan gave the key", entry.key, bytes)
        _expect_type("a scan gave the length", entry.nbytes, int)
        _expect_type("a scan gave the last use", entry.used_at_s, float, int)
    return page


def scan(adapter: L2Adapter, pages_max: int = 10_000) -> list[ScanEntry]:
    """Every entry of every page."""
    found: list[ScanEntry] = []
    cursor: str | None = None
    for _ in range(pages_max):
        page = page_of(adapter, cursor)
        found += page.entries
        cursor = page.cursor
        if cursor is None:
            return found
    raise AssertionError(f"the scan gave {pages_max} pages and no end: its last page has the cursor None")


# --- what was seen, in words ----------------------------------------------------------------------------------------
def shown(key: bytes) -> str:
    """A key for people: short keys in full, the kernel's by their first bytes."""
    return repr(key) if len(key) <= 24 else f"{key[:8]!r}… of {len(key)} bytes"


def seen(outcome: Outcome) -> str:
    """An outcome for people."""
    why = f" ({outcome.error[:200]!r}{', retryable' if outcome.retryable else ''})" if outcome.error else ""
    return f"{outcome.result.upper()}{why}"


def difference(found: bytes, expected: bytes) -> str:
    """How two byte strings differ, without their bytes."""
    if len(found) != len(expected):
        return f"{len(found):,} bytes and not {len(expected):,}"
    wrong = [at for at, (one, other) in enumerate(zip(found, expected, strict=True)) if one != other]
    if not wrong:
        return "the same bytes"
    return f"{len(wrong):,} of {len(expected):,} bytes are wrong, the first at {wrong[0]:,}"


def expect_types(outcome: Outcome, done: str) -> None:
    """Check that an outcome's values have the types in the contract."""
    assert isinstance(outcome, Outcome), f"{done}, it answered {outcome!r:.100}, and has to answer an Outcome"
    for name, wanted in _OUTCOME_TYPES.items():
        _expect_type(f"{done}, it answered {name} =", getattr(outcome, name), wanted)


def _expect_type(claim: str, value: object, *wanted: type) -> None:
    legal = " or ".join(each.__name__ for each in wanted)
    assert type(value) in wanted, f"{claim} {value!r:.80} ({type(value).__name__}), and it has to be {legal}"


_OUTCOME_TYPES = {"result": Result, "nbytes": int, "error": str, "retryable": bool}


def expect_result(outcome: Outcome, expected: Result, done: str) -> None:
    """`done`: what was done before, as a clause."""
    expect_types(outcome, done)
    assert outcome.result is expected, f"{done}, it answered {seen(outcome)} and not {expected.upper()}"


def expect_stored(adapter: L2Adapter, key: bytes, *parts: bytes) -> None:
    """Store an object; it must be DONE."""
    nbytes = sum(map(len, parts))
    expect_result(store(adapter, key, *parts), Result.DONE, f"asked to store {nbytes:,} bytes under {shown(key)}")


def use(adapter: L2Adapter) -> None:
    """Store an object, or look for one if it never stores: it has connected."""
    if adapter.capabilities.stores:
        expect_stored(adapter, key(1), b"object")
    else:
        adapter.exists([key(1)], soon())


def expect_holds(adapter: L2Adapter, key: bytes, expected: bytes, done: str, *sizes: int) -> None:
    """A load into buffers of these sizes (default: one that fits) gives exactly these bytes."""
    outcome, found = load(adapter, key, *(sizes or (len(expected),)))
    expect_result(outcome, Result.DONE, f"{done}: asked to load {shown(key)}")
    assert outcome.nbytes == len(expected), (
        f"{done}: a load of {shown(key)} said {outcome.nbytes:,} bytes, and the object has {len(expected):,}"
    )
    found = found[: len(expected)]
    assert found == expected, f"{done}: a load of {shown(key)} said DONE, and {difference(found, expected)}"


def expect_miss(adapter: L2Adapter, key: bytes, done: str) -> None:
    """A load answers MISS."""
    expect_result(load(adapter, key, 4096)[0], Result.MISS, f"{done}: asked to load {shown(key)}")


def expect_exists(adapter: L2Adapter, keys: Sequence[bytes], expected: Sequence[bool], done: str) -> None:
    """One answer for each key, in order."""
    found = [bool(one) for one in adapter.exists(keys, soon())]
    assert len(found) == len(keys), f"{done}: exists gave {len(found)} answers for {len(keys)} keys"
    wrong = [at for at, (one, other) in enumerate(zip(found, expected, strict=True)) if one != other]
    assert not wrong, (
        f"{done}: exists said {found[wrong[0]]} for key {wrong[0]} of {len(keys)}, {shown(keys[wrong[0]])}, "
        f"and {expected[wrong[0]]} is true ({len(wrong)} wrong in all)"
    )


def expect_deleted(adapter: L2Adapter, keys: Sequence[bytes], done: str) -> None:
    """Each delete is DONE."""
    outcomes = adapter.delete(keys, soon())
    assert len(outcomes) == len(keys), f"{done}: delete gave {len(outcomes)} answers for {len(keys)} keys"
    for key, outcome in zip(keys, outcomes, strict=True):
        expect_result(outcome, Result.DONE, f"{done}: asked to delete {shown(key)}")


def sample(layout: Layout, seed: int) -> bytes:
    """Finite values of the layout's type, distributed like KV: normal, mostly small, a few outliers."""
    rng = random.Random(seed)
    count = layout.nbytes // layout.itemsize
    if layout.dtype == "bool":
        return bytes(rng.getrandbits(1) for _ in range(count))
    if layout.dtype.startswith("float8"):
        return bytes(rng.randrange(0x60) | rng.getrandbits(1) << 7 for _ in range(count))
    if layout.dtype in ("float64", "float32", "float16", "bfloat16"):
        values = [rng.gauss(0.0, 1.0) * (20.0 if rng.random() < 0.01 else 1.0) for _ in range(count)]
        if layout.dtype == "bfloat16":
            bits = array.array("I", array.array("f", values).tobytes())
            return array.array("H", [word >> 16 for word in bits]).tobytes()
        return struct.pack(f"<{count}{ {'float64': 'd', 'float32': 'f', 'float16': 'e'}[layout.dtype] }", *values)
    return rng.randbytes(layout.nbytes)
