"""`lmcache-core bench serde`: what each codec chain costs, beside the best plain copy of the same bytes."""

from __future__ import annotations

import array
import ctypes
import mmap
import random
import secrets
import sys
import threading
from argparse import ArgumentParser, Namespace
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from statistics import NormalDist, median
from time import perf_counter, sleep
from typing import TYPE_CHECKING, Any

from lmcache_core.plugins.components import Kind

if TYPE_CHECKING:
    from lmcache_core.cli.bench.harness import Bench
    from lmcache_core.plugins.registry import Registry
    from lmcache_core.pool.layout import Layout
    from lmcache_core.serde.chain import CodecChain

SUMMARY = "codec chains against a plain copy of the same bytes"

OURS = {
    "fp8": "lmcache-fp8",
    **dict.fromkeys(("int8", "k8v4", "int4"), "lmcache-quant"),
    **dict.fromkeys(("zstd", "lz4", "planes"), "lmcache-compress"),
    "aesgcm": "lmcache-crypto",
}
CHAINS = ("fp8,zstd", "zstd,aesgcm", "fp8,zstd,aesgcm")  # measured if all their serdes are installed
OBJECTS = 16  # with their targets, four times the cache share of a large server core: nothing stays cached
ROUNDS = 7
ROUNDS_QUICK = 3
SHAPE, AXES = (2, 4, 256, 8, 128), "KLTHD"  # 8 MiB of bf16: 256 tokens of four layers
ENCODE_TARGETS = {"fp8": 0.35, "int8": 0.5, "k8v4": 0.5, "int4": 0.5}  # of the speed of a plain copy
DECODE_TARGETS = {"fp8": 0.5, "int8": 0.7, "k8v4": 0.5, "int4": 0.5}
GIL_TARGET = 0.9  # of a call: 0.97 if the GIL is kept; 0.3 if it is released, or 0.7 on a busy machine
GIL_S = 0.3
STEP_S = 5e-5  # the kernel's shortest sleep
SWITCH_INTERVAL_S = 1e-4  # the server's


def add_options(parser: ArgumentParser) -> None:
    """The options of this bench."""
    parser.add_argument(
        "--serde",
        nargs="+",
        metavar="CHAIN",
        dest="chains",
        help="only these: a serde, or several with commas between (default: all that are installed, and some chains)",
    )


def run(options: Namespace, bench: Bench) -> None:
    """Record encode and decode in GB/s of the object (floor: the copy), the encoded size, and how
    long the serde holds up Python in other threads."""
    from lmcache_core.plugins.loader import load_plugins
    from lmcache_core.pool.layout import Layout

    registry = getattr(options, "registry", None) or load_plugins()
    layout = Layout("bfloat16", SHAPE, AXES)
    names = options.chains or _default_chains(registry)
    objects = _Objects(layout)
    bench.steps(len(names))
    for name in names:
        bench.step(name)
        chain = _chain(registry, name)
        if chain.is_identity:
            continue  # nothing to measure: the object's own bytes go to the tier
        measured = _measure(chain, objects, ROUNDS_QUICK if bench.quick else ROUNDS)
        rates = (("encode", measured.encode_s, ENCODE_TARGETS), ("decode", measured.decode_s, DECODE_TARGETS))
        for way, seconds, targets in rates:
            bench.record(
                f"{name} {way}",
                objects.nbytes / seconds / 1e9,
                "GB/s",
                floor=objects.nbytes / measured.copy_s / 1e9,
                target=targets.get(name),
                lower_is_better=False,
            )
        bench.record(f"{name} size, of the object", measured.encoded_bytes / layout.nbytes, "x")
        bench.record(f"{name}: Python held up, of a call", _held_share(chain, objects), "x", target=GIL_TARGET)


# --- what is measured -------------------------------------------------------------------------------------


def _default_chains(registry: Registry) -> list[str]:
    there = [spec.name for spec in registry.components(Kind.SERDE) if spec.name != "identity"]
    for name, package in OURS.items():
        if name not in there:
            print(f"not measured, because it is not installed: {name} (pip install {package})", file=sys.stderr)
    usable = [name for name in there if name in OURS or not _needs_settings(registry, name)]
    for name in sorted(set(there) - set(usable)):
        print(f"not measured, because it needs settings: {name}", file=sys.stderr)
    return usable + [chain for chain in CHAINS if set(chain.split(",")) <= set(usable)]


def _needs_settings(registry: Registry, name: str) -> bool:
    model = registry.settings_model(Kind.SERDE, name)
    return model is not None and any(field.is_required() for field in model.model_fields.values())


def _chain(registry: Registry, names: str) -> CodecChain:
    from lmcache_core.serde.chain import CodecChain

    settings: dict[str, dict[str, Any]] = {"aesgcm": {"keys": secrets.token_hex(32)}}
    return CodecChain([registry.build(Kind.SERDE, name, settings.get(name)) for name in names.split(",")])


class _Objects:
    """Sources and targets, larger than the processor's cache, and populated."""

    def __init__(self, layout: Layout) -> None:
        from lmcache_core.tiers.object.format import SERDE_KEY_BYTES

        self.layout = layout
        self.key = bytes(range(SERDE_KEY_BYTES))
        self.nbytes = OBJECTS * layout.nbytes
        values = _normal_bf16(layout.nbytes // 2)
        self.sources = [_filled(values) for _ in range(OBJECTS)]
        self.targets = [_filled(bytes(layout.nbytes)) for _ in range(OBJECTS)]


def _normal_bf16(count: int) -> bytes:
    """bf16 of a normal distribution, drawn from a table of its quantiles: needs no numpy, and exponents and mantissas
    are distributed as in KV."""
    distribution = NormalDist()
    quantiles = array.array("f", (distribution.inv_cdf((i + 0.5) / 65536) for i in range(65536)))
    words = [word >> 16 for word in memoryview(quantiles).cast("B").cast("I")]
    draws = array.array("H", random.Random(1).randbytes(2 * count))
    return array.array("H", map(words.__getitem__, draws)).tobytes()


def _filled(data: bytes) -> memoryview:
    view = memoryview(mmap.mmap(-1, len(data), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    view[:] = data
    return view


# --- how it is measured -----------------------------------------------------------------------------------


@dataclass
class _Measured:
    """Seconds for all objects (the best round), and bytes of one encoded object."""

    copy_s: float
    encode_s: float
    decode_s: float
    encoded_bytes: int


def _measure(chain: CodecChain, objects: _Objects, rounds: int) -> _Measured:
    """Copy, encode and decode take turns, so that a busy neighbour slows all three."""
    from lmcache_core.serde.scratch import Scratch

    scratch = Scratch()
    stored, lengths = _encoded(chain, objects, scratch)
    copies = _copies(objects)
    copy_s: list[float] = []
    encode_s: list[float] = []
    decode_s: list[float] = []
    for _ in range(rounds):
        copy_s += [_timed(copy) for copy in copies]
        encode_s.append(_timed(lambda: _encode_all(chain, objects, scratch)))
        decode_s.append(_timed(lambda: _decode_all(chain, objects, stored, lengths, scratch)))
    return _Measured(min(copy_s), min(encode_s), min(decode_s), stored.nbytes)


def _encoded(chain: CodecChain, objects: _Objects, scratch: Any) -> tuple[memoryview, list[int]]:
    source = objects.sources[0].toreadonly()
    buffers, lengths = chain.encode(source, objects.layout, objects.key, scratch)
    stored = b"".join(bytes(part) for part in buffers)
    scratch.reset()
    return memoryview(stored), list(lengths)


def _encode_all(chain: CodecChain, objects: _Objects, scratch: Any) -> None:
    for source in objects.sources:
        chain.encode(source.toreadonly(), objects.layout, objects.key, scratch)
        scratch.reset()


def _decode_all(chain: CodecChain, objects: _Objects, stored: memoryview, lengths: Sequence[int], scratch: Any) -> None:
    for target in objects.targets:
        chain.decode(stored, target, objects.layout, objects.key, lengths, scratch)
        scratch.reset()


def _copies(objects: _Objects) -> list[Callable[[], None]]:
    """The plain ways to copy; the best of them is the floor."""
    pairs = list(zip(objects.sources, objects.targets, strict=True))
    addresses = [tuple(ctypes.addressof(ctypes.c_char.from_buffer(view)) for view in pair) for pair in pairs]

    def by_slice() -> None:
        for source, target in pairs:
            target[:] = source

    def by_memmove() -> None:
        for (source, target), (view, _) in zip(addresses, pairs, strict=True):
            ctypes.memmove(target, source, view.nbytes)

    return [by_slice, by_memmove]


def _timed(call: Callable[[], None]) -> float:
    begun = perf_counter()
    call()
    return perf_counter() - begun


def _held_share(chain: CodecChain, objects: _Objects) -> float:
    """The longest time that Python was blocked in another thread during a call, divided by the length of that call; the
    median of all calls. Near 1 if a serde holds the GIL throughout, near 0 if it does not."""
    from lmcache_core.serde.scratch import Scratch

    stored, lengths = _encoded(chain, objects, Scratch())
    calls: list[tuple[float, float]] = []
    done = threading.Event()

    def timed(call: Callable[..., object], *arguments: object) -> None:
        begun = perf_counter()
        call(*arguments)
        calls.append((begun, perf_counter()))

    def lane() -> None:
        scratch = Scratch()
        until = perf_counter() + GIL_S
        while perf_counter() < until:
            for source, target in zip(objects.sources[:4], objects.targets[:4], strict=True):
                timed(chain.encode, source.toreadonly(), objects.layout, objects.key, scratch)
                scratch.reset()
                timed(chain.decode, stored, target, objects.layout, objects.key, lengths, scratch)
                scratch.reset()
        done.set()

    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    thread = threading.Thread(target=lane, daemon=True)
    try:
        thread.start()
        stops = _standstills(done)
    finally:
        done.set()
        thread.join()
        sys.setswitchinterval(interval_s)
    return median(_longest_within(begun, ended, stops) / (ended - begun) for begun, ended in calls)


def _standstills(done: threading.Event) -> list[tuple[float, float]]:
    """The times between two steps of this thread, until `done`. It sleeps in between, as the server's loop does: a
    thread that wakes gets its processor at once even if the lane has no free one, and then needs only the GIL."""
    stops = []
    last = perf_counter()
    while not done.is_set():
        sleep(STEP_S)
        now = perf_counter()
        stops.append((last, now))
        last = now
    return stops


def _longest_within(begun: float, ended: float, stops: Sequence[tuple[float, float]]) -> float:
    first, last = bisect_right(stops, begun, key=itemgetter(1)), bisect_left(stops, ended, key=itemgetter(0))
    return max((min(ended, until) - max(begun, since) for since, until in stops[first:last]), default=0.0)
