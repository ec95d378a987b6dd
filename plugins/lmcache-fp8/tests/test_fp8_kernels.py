"""One contract over every implementation: the C kernel with AVX2, the C kernel without, and torch."""

from __future__ import annotations

import bisect
import contextlib
import math
import random
import struct
import sys
import threading
import time
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_core.errors import DamagedObjectError, PluginError
from lmcache_core.pool.layout import Layout
from lmcache_fp8.grouping import Grouping, grouping_of
from lmcache_fp8.kernels import DTYPES, Kernel, NativeKernel, kernel_for

ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4}
INFINITY = {"bfloat16": 0x7F80, "float16": 0x7C00, "float32": 0x7F800000}
QUIET_NAN = {"bfloat16": 0x7FC0, "float16": 0x7E00, "float32": 0x7FC00000}


def native_kernels() -> dict[str, Kernel]:
    try:
        from lmcache_fp8 import _native
    except ImportError:
        return {}
    return {isa: NativeKernel(isa) for isa in _native.isas()}


def all_kernels() -> dict[str, Kernel]:
    found = native_kernels()
    with contextlib.suppress(PluginError):  # torch is an extra: the contract runs over what is installed
        found["torch"] = kernel_for("torch")
    return found


KERNELS = all_kernels()


@pytest.fixture(params=list(KERNELS))
def kernel(request: pytest.FixtureRequest) -> Kernel:
    return KERNELS[request.param]


# --- an oracle that shares nothing with the kernels: a table of all e4m3 values, and a search ------------------


def f32(value: float) -> float:
    """Rounded to float32; beyond its range, infinite."""
    try:
        return float(struct.unpack("<f", struct.pack("<f", value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)


def value_of_code(code: int) -> float:
    exponent, mantissa = (code >> 3) & 15, code & 7
    magnitude = (8 + mantissa) * 2.0 ** (exponent - 10) if exponent else mantissa * 2.0**-9
    return -magnitude if code & 0x80 else magnitude


POSITIVE = [value_of_code(code) for code in range(0x7F)]


def code_of(value: float) -> int:
    """The nearest of the table; of two equally near, the one with the even code; at most 448."""
    sign = 0x80 if math.copysign(1.0, value) < 0 else 0
    magnitude = abs(value)
    above = min(bisect.bisect_left(POSITIVE, magnitude), 0x7E)
    below = max(0, above - 1)
    up, down = abs(POSITIVE[above] - magnitude), abs(magnitude - POSITIVE[below])
    nearest = above if up < down or (up == down and above % 2 == 0) else below
    return sign | nearest


def floats_of(data: bytes, dtype: str) -> list[float]:
    if dtype == "float16":
        return list(struct.unpack(f"<{len(data) // 2}e", data))
    if dtype == "float32":
        return list(struct.unpack(f"<{len(data) // 4}f", data))
    halves = struct.unpack(f"<{len(data) // 2}H", data)
    return list(struct.unpack(f"<{len(halves)}f", struct.pack(f"<{len(halves)}I", *(h << 16 for h in halves))))


def group_of_element(grouping: Grouping) -> list[int]:
    """The scale's index for each element, by walking the axes one by one."""
    found = []
    token_groups = -(-grouping.tokens // grouping.group)
    for outer in range(grouping.outer):
        for token in range(grouping.tokens):
            for mid in range(grouping.mid):
                index = (outer * token_groups + token // grouping.group) * grouping.mid + mid
                found += [index] * grouping.dim
    return found + [grouping.scales - 1] * grouping.tail


def expected_encoding(data: bytes, dtype: str, grouping: Grouping) -> bytes:
    values, groups = floats_of(data, dtype), group_of_element(grouping)
    most = [0.0] * grouping.scales
    for value, group in zip(values, groups, strict=True):
        if math.isfinite(value):
            most[group] = max(most[group], abs(value))
    ceiling = float.fromhex("0x1.249248p+119")
    scales = [min(max(f32(one * f32(1 / 448)), 2.0**-126), ceiling) for one in most]
    codes = bytearray()
    for value, group in zip(values, groups, strict=True):
        codes.append(code_of(f32(value * f32(1 / scales[group]))) if math.isfinite(value) else 0x7F)
    return struct.pack(f"<{len(scales)}f", *scales) + bytes(codes)


def rounded(value: float, dtype: str) -> int:
    """The bits of a float32 value in `dtype`, to nearest even."""
    if dtype == "float32":
        return int(struct.unpack("<I", struct.pack("<f", value))[0])
    if dtype == "float16":
        return int(struct.unpack("<H", struct.pack("<e", value))[0])
    bits = int(struct.unpack("<I", struct.pack("<f", value))[0])
    low, high = bits & 0xFFFF, bits >> 16
    return high + (low > 0x8000 or (low == 0x8000 and high % 2 == 1))


def expected_decoding(encoded: bytes, dtype: str, grouping: Grouping) -> bytes:
    scales = struct.unpack_from(f"<{grouping.scales}f", encoded)
    codes = encoded[grouping.scales * 4 :]
    bits = [
        QUIET_NAN[dtype] if code & 0x7F == 0x7F else rounded(f32(value_of_code(code) * scales[group]), dtype)
        for code, group in zip(codes, group_of_element(grouping), strict=True)
    ]
    return struct.pack(f"<{len(bits)}{'I' if dtype == 'float32' else 'H'}", *bits)


def decoded(kernel: Kernel, encoded: bytes, dtype: str, grouping: Grouping) -> bytes:
    out = bytearray(b"\xa5" * (grouping.elements * ITEMSIZE[dtype]))
    kernel.decode(memoryview(encoded).toreadonly(), memoryview(out), dtype, grouping)
    return bytes(out)


def ordinary(elements: int, dtype: str, seed: int) -> bytes:
    """Normal values over thirty octaves, so that every code and the rounding of all types are met."""
    rng = random.Random(seed)
    values = [rng.gauss(0, 1) * 2.0 ** rng.randint(-14, 8) for _ in range(elements)]
    bits = [rounded(f32(value), dtype) for value in values]
    return struct.pack(f"<{elements}{'I' if dtype == 'float32' else 'H'}", *bits)


# --- claims ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_bit_pattern_of_a_16_bit_float_is_encoded_as_the_oracle_says(kernel: Kernel, dtype: str) -> None:
    finite = [bits for bits in range(1 << 16) if bits & 0x7FFF < INFINITY[dtype]]
    finite.sort(key=lambda bits: bits & 0x7FFF)  # neighbours share a group: every scale from the least to the most
    data = struct.pack(f"<{len(finite)}H", *finite)
    grouping = grouping_of(Layout(dtype, (len(finite),)), 1)
    encoded = bytes(kernel.encode(memoryview(data), dtype, grouping))
    assert encoded == expected_encoding(data, dtype, grouping)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_code_at_many_scales_is_decoded_as_the_oracle_says(kernel: Kernel, dtype: str) -> None:
    rng = random.Random(3)
    most = 2.0**6 if dtype == "float16" else float.fromhex("0x1.249248p+119")
    scales = [2.0**-126, most, 1.0, *(f32(2.0 ** rng.uniform(-60, 6)) for _ in range(30))]
    grouping = Grouping(len(scales), 1, 1, 256, 1, 0)
    encoded = struct.pack(f"<{len(scales)}f", *scales) + bytes(range(256)) * len(scales)
    assert decoded(kernel, encoded, dtype, grouping) == expected_decoding(encoded, dtype, grouping)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "axes", "group_tokens"),
    [
        ((2, 3, 5, 3, 40), "KLTHD", 2),  # a shorter last group of tokens, rows that no vector divides
        ((2, 3, 9, 64), "LHTD", 4),  # tokens of one head lie together
        ((9, 2, 2, 33), "TLHD", 4),  # layers inside the tokens
        ((7, 256), "TD", 3),  # heads side by side, not named
        ((7, 100), "TD", 3),
        ((3, 4, 32), "BHD", 8),  # no tokens
        ((4, 150), "", 8),  # nothing known: runs of 128 and a tail
        ((3, 1, 2), "TDH", 8),
        ((1,), "", 8),
    ],
)
def test_shapes_are_grouped_as_the_oracle_walks_them(
    kernel: Kernel, dtype: str, shape: tuple[int, ...], axes: str, group_tokens: int
) -> None:
    layout = Layout(dtype, shape, axes)
    grouping = grouping_of(layout, group_tokens)
    assert grouping.elements * layout.itemsize == layout.nbytes
    data = ordinary(grouping.elements, dtype, seed=len(axes))
    encoded = bytes(kernel.encode(memoryview(data), dtype, grouping))
    assert encoded == expected_encoding(data, dtype, grouping)
    assert decoded(kernel, encoded, dtype, grouping) == expected_decoding(encoded, dtype, grouping)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_all_kernels_give_the_same_bytes_for_any_bytes(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(DTYPES))
    grouping = Grouping(*(data.draw(st.integers(1, most)) for most in (3, 9, 3, 70, 4, 40)))
    grouping = grouping._replace(tail=data.draw(st.integers(0, 40)))
    rng = random.Random(data.draw(st.integers(0, 1 << 32)))
    nbytes = grouping.elements * ITEMSIZE[dtype]
    anything = (
        rng.randbytes(nbytes) if data.draw(st.booleans()) else ordinary(grouping.elements, dtype, rng.randint(0, 9))
    )
    encodings = {name: bytes(each.encode(memoryview(anything), dtype, grouping)) for name, each in KERNELS.items()}
    assert set(encodings.values()) == {expected_encoding(anything, dtype, grouping)}, list(encodings)
    scales = next(iter(encodings.values()))[: grouping.scales * 4]
    stored = scales + rng.randbytes(grouping.elements)
    decodings = {name: decoded(each, stored, dtype, grouping) for name, each in KERNELS.items()}
    assert len(set(decodings.values())) == 1, list(decodings)


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_keep_their_sign_and_what_is_not_finite_becomes_one_nan(kernel: Kernel, dtype: str) -> None:
    code, sign = ("I", 1 << 31) if dtype == "float32" else ("H", 1 << 15)
    infinity, nan = INFINITY[dtype], QUIET_NAN[dtype]
    one = rounded(1.0, dtype)
    words = [0, sign, infinity, sign | infinity, nan, sign | nan, infinity + 1, one] * 8
    data = struct.pack(f"<64{code}", *words)
    grouping = Grouping(1, 1, 1, 64, 1, 0)
    encoded = bytes(kernel.encode(memoryview(data), dtype, grouping))
    assert encoded[4:12] == bytes([0, 0x80, 0x7F, 0x7F, 0x7F, 0x7F, 0x7F, 0x7E])
    back = struct.unpack(f"<64{code}", decoded(kernel, encoded, dtype, grouping))
    assert back == tuple([0, sign, nan, nan, nan, nan, nan, one] * 8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_group_of_denormals_or_of_nothing_finite_has_the_smallest_scale(kernel: Kernel, dtype: str) -> None:
    code = "I" if dtype == "float32" else "H"
    grouping = Grouping(1, 2, 1, 32, 1, 0)
    words = [1] * 32 + [INFINITY[dtype]] * 32
    encoded = bytes(kernel.encode(memoryview(struct.pack(f"<64{code}", *words)), dtype, grouping))
    scales = struct.unpack_from("<2f", encoded)
    assert scales[1] == 2.0**-126
    assert scales[0] == (f32(2.0**-24 * f32(1 / 448)) if dtype == "float16" else 2.0**-126)
    assert struct.unpack(f"<64{code}", decoded(kernel, encoded, dtype, grouping))[32:] == (QUIET_NAN[dtype],) * 32


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_values_of_a_type_come_back_finite(kernel: Kernel, dtype: str) -> None:
    code = "I" if dtype == "float32" else "H"
    most = INFINITY[dtype] - 1
    data = struct.pack(f"<40{code}", *[most] * 40)
    grouping = Grouping(1, 1, 1, 40, 1, 0)
    encoded = bytes(kernel.encode(memoryview(data), dtype, grouping))
    assert encoded[4:] == b"\x7e" * 40
    back = floats_of(decoded(kernel, encoded, dtype, grouping), dtype)
    wanted = floats_of(data, dtype)[0]
    assert all(math.isfinite(one) and abs(one / wanted - 1) < 2**-20 for one in back)


@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, math.inf, 2.0**-127, 2.0**120])
def test_a_scale_that_no_encoder_writes_is_damage(kernel: Kernel, scale: float) -> None:
    encoded = struct.pack("<2f", 1.0, scale) + bytes(64)
    out = bytearray(b"\xa5" * 128)
    with pytest.raises(DamagedObjectError, match="scale 1 "):
        kernel.decode(memoryview(encoded), memoryview(out), "bfloat16", Grouping(2, 1, 1, 32, 1, 0))
    assert out == b"\xa5" * 128


def lets_others_run(call: Callable[[], object], within_s: float = 60.0) -> bool:
    """Whether another thread runs during one of the calls. Nobody is made to give up the GIL meanwhile, so one that
    runs was let run; on a busy machine it comes too late for most calls, so they are repeated until it has come."""
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        ran: list[bool] = []
        gate = threading.Lock()
        gate.acquire()
        thread = threading.Thread(target=lambda: gate.acquire() and ran.append(True))
        thread.start()
        gate.release()
        until = time.monotonic() + within_s
        call()
        while not ran and time.monotonic() < until:
            call()
        seen = bool(ran)
        thread.join()
        return seen
    finally:
        sys.setswitchinterval(interval_s)


@pytest.mark.parametrize("isa", list(native_kernels()))
def test_the_c_kernels_let_other_threads_run(isa: str) -> None:
    kernel, grouping = KERNELS[isa], Grouping(512, 8, 8, 128, 8, 0)
    data = memoryview(bytes(grouping.elements * 2))
    encoded, out = memoryview(kernel.encode(data, "bfloat16", grouping)), memoryview(bytearray(data.nbytes))
    assert lets_others_run(lambda: kernel.encode(data, "bfloat16", grouping))
    assert lets_others_run(lambda: kernel.decode(encoded, out, "bfloat16", grouping))
    assert not lets_others_run(lambda: bytes(data), within_s=0.1)  # a call that holds the GIL is told apart


@pytest.mark.skipif(not native_kernels(), reason="the C kernel was not built here")
class TestTheCModule:
    def test_it_checks_every_length_before_it_touches_memory(self) -> None:
        from lmcache_fp8 import _native

        sizes = (1, 1, 1, 32, 1, 0)
        for src in (b"", bytes(63), bytes(65)):
            with pytest.raises(ValueError, match="64"):
                _native.encode(src, 0, sizes)
        with pytest.raises(ValueError, match="36"):
            _native.decode(bytes(35), bytearray(64), 0, sizes)
        with pytest.raises(ValueError, match="64"):
            _native.decode(bytes(36), bytearray(63), 0, sizes)

    @pytest.mark.parametrize(
        "sizes",
        [
            (1 << 62, 1, 1, 4, 1, 0),
            (1 << 32, 1 << 32, 1, 1, 1, 0),
            (-1, 1, 1, 1, 1, 0),
            (1, -1, 1, 1, 1, 0),
            (1, 1, 1, 1, 0, 0),
            (1, 1, 1, 0, 1, 0),
            (1, 1, 1, 1, 1, -1),
        ],
    )
    def test_sizes_that_overflow_or_make_no_sense_are_refused(self, sizes: tuple[int, int, int, int, int, int]) -> None:
        from lmcache_fp8 import _native

        with pytest.raises(ValueError):
            _native.encode(b"", 0, sizes)

    def test_unknown_kernels_and_types_are_refused(self) -> None:
        from lmcache_fp8 import _native

        with pytest.raises(ValueError, match="sse9"):
            _native.encode(bytes(64), 0, (1, 1, 1, 32, 1, 0), "sse9")
        for dtype in (-1, 3):
            with pytest.raises(ValueError, match="dtype"):
                _native.encode(bytes(64), dtype, (1, 1, 1, 32, 1, 0))

    def test_a_read_only_target_is_refused(self) -> None:
        from lmcache_fp8 import _native

        with pytest.raises((TypeError, BufferError)):
            _native.decode(bytes(36), memoryview(bytes(64)), 0, (1, 1, 1, 32, 1, 0))
