"""The three serdes against numpy: bounds, sizes, what shares a step, and every order of the axes."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from lmcache_core.errors import DamagedObjectError, UsageError
from lmcache_core.pool.layout import Layout
from lmcache_quant.serdes import Int4Serde, Int8Serde, K8v4Serde, QuantSerde
from lmcache_quant.settings import QuantSettings
from lmcache_quant.walk import OUTER_AXES_MAX, walk_of

_native = pytest.importorskip("lmcache_quant._native", reason="built without C")

Floats = NDArray[np.float64]
SERDES = {"int8": Int8Serde, "k8v4": K8v4Serde, "int4": Int4Serde}
KEY = bytes(range(60))
ROUNDING = {"float32": 2**-22, "float16": 2**-10, "bfloat16": 2**-8}  # of the restored value, to its own type
LEAST_STEP = 2**-24  # of halves


def stored(values: Floats, dtype: str) -> bytes:
    """As an engine has them; bf16 is cut."""
    if dtype == "bfloat16":
        return (values.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()
    return values.astype({"float16": "<f2", "float32": "<f4"}[dtype]).tobytes()


def loaded(data: bytes | bytearray, layout: Layout) -> Floats:
    if layout.dtype == "bfloat16":
        flat = (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")
    else:
        flat = np.frombuffer(data, {"float16": "<f2", "float32": "<f4"}[layout.dtype])
    return flat.astype(np.float64).reshape(layout.shape)


def encoded(serde: QuantSerde, data: bytes, layout: Layout) -> bytes:
    return b"".join(bytes(part) for part in serde.encode(memoryview(data), layout, KEY))


def decoded(serde: QuantSerde, data: bytes, layout: Layout) -> bytes:
    out = bytearray(b"\xa5" * layout.nbytes)
    serde.decode(memoryview(data), memoryview(out), layout, KEY)
    return bytes(out)


def made(name: str, group_tokens: int = 64, isa: str = "auto") -> QuantSerde:
    return SERDES[name](QuantSettings(group_tokens=group_tokens), isa)


def halves(values: Floats, layout: Layout) -> tuple[Floats, Floats]:
    """Keys as [tokens, places, channels], values as [tokens, places, channels]; views."""
    axes = layout.memory_format
    moved = np.moveaxis(values, (axes.index("K"), axes.index("T")), (0, 1))
    return tuple(half.reshape(half.shape[0], -1, half.shape[-1]) for half in moved)  # type: ignore[return-value]


def reach(part: Floats, axis: int, bits: int) -> Floats:
    """The distance of two neighbouring values of a grid that holds all of `part` along the axis, at most."""
    if bits == 8:
        exact = np.abs(part).max(axis=axis, keepdims=True) / 127
        return exact * (1 + 2**-10) + LEAST_STEP
    least = part.min(axis=axis, keepdims=True)
    span = part.max(axis=axis, keepdims=True) - least + np.abs(least) * 2**-10 + LEAST_STEP
    return span / 15 * (1 + 2**-10) + LEAST_STEP


def bounds(values: Floats, layout: Layout, serde: QuantSerde, group_tokens: int) -> tuple[Floats, Floats]:
    """How far a value may be off: half a step."""
    keys, rows = halves(values, layout)
    runs = [keys[at : at + group_tokens] for at in range(0, len(keys), group_tokens)]
    of_keys = np.concatenate([np.broadcast_to(reach(run, 0, serde.key_bits), run.shape) for run in runs])
    return of_keys / 2, np.broadcast_to(reach(rows, 2, serde.value_bits), rows.shape) / 2


def assert_within(values: Floats, back: Floats, layout: Layout, serde: QuantSerde, group_tokens: int) -> None:
    for was, now, bound in zip(
        halves(values, layout), halves(back, layout), bounds(values, layout, serde, group_tokens), strict=True
    ):
        allowed = bound * (1 + 2**-10) + (np.abs(was) + bound) * ROUNDING[layout.dtype]
        if layout.dtype == "float16":
            allowed = allowed + LEAST_STEP
        assert (np.abs(now - was) <= allowed).all()


def kv(shape: tuple[int, ...], seed: int = 1) -> Floats:
    """Normal values, with a few channels that are a hundred times larger, as keys have them."""
    rng = np.random.default_rng(seed)
    scale = np.where(rng.random(shape[-1]) < 0.1, 100.0, 1.0)
    return rng.standard_normal(shape) * scale


@st.composite
def objects(draw: st.DrawFn) -> tuple[Layout, int]:
    """A layout of any order of axes, and a group of tokens."""
    others = draw(st.lists(st.sampled_from("LHB"), max_size=3, unique=True))
    axes = draw(st.permutations(["K", "T", *others]))
    sizes = {"K": 2, "T": draw(st.integers(1, 20)), "D": draw(st.sampled_from([1, 2, 3, 7, 8, 16, 17, 33, 64]))}
    sizes |= {axis: draw(st.integers(1, 3)) for axis in others}
    shape = tuple(sizes[axis] for axis in [*axes, "D"])
    layout = Layout(draw(st.sampled_from(sorted(ROUNDING))), shape, "".join(axes) + "D")
    return layout, draw(st.sampled_from([1, 3, 8, 64]))


@given(objects(), st.sampled_from(sorted(SERDES)), st.integers(0, 2**32 - 1))
def test_every_value_is_within_half_a_step_in_any_order_of_the_axes(
    given: tuple[Layout, int], name: str, seed: int
) -> None:
    layout, group_tokens = given
    data = stored(kv(layout.shape, seed), layout.dtype)
    values = loaded(data, layout)
    results = []
    for isa in _native.isas():
        serde = made(name, group_tokens, isa)
        packed = encoded(serde, data, layout)
        walk = walk_of(layout, group_tokens, name)
        assert len(packed) == 4 + walk.encoded_bytes(serde.key_bits, serde.value_bits)
        back = decoded(serde, packed, layout)
        assert_within(values, loaded(back, layout), layout, serde, group_tokens)
        results.append((packed, back))
    assert all(each == results[0] for each in results)


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=8, max_size=8))
def test_any_finite_value_is_within_its_bound_or_the_object_is_unchanged(eight: list[float]) -> None:
    layout = Layout("float32", (2, 2, 2), "KTD")
    data = stored(np.array(eight), "float32")
    for name in SERDES:
        for isa in _native.isas():
            serde = made(name, isa=isa)
            packed = encoded(serde, data, layout)
            back = decoded(serde, packed, layout)
            if packed[3]:
                assert_within(loaded(data, layout), loaded(back, layout), layout, serde, 64)
            else:
                assert back == data


@pytest.mark.parametrize("name", sorted(SERDES))
@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf, 3e38, -3e38])
@pytest.mark.parametrize("half", [0, 1])
def test_an_object_with_a_value_that_no_step_can_hold_is_kept_as_it_is(name: str, odd: float, half: int) -> None:
    layout = Layout("float32", (2, 5, 3, 16), "KTHD")
    values = kv(layout.shape)
    values[half, 3, 1, 7] = odd
    data = stored(values, "float32")
    for isa in _native.isas():
        packed = encoded(made(name, isa=isa), data, layout)
        assert decoded(made(name, isa=isa), packed, layout) == data
        assert len(packed) == made(name).encoded_bytes_max(layout.nbytes, layout)


@pytest.mark.parametrize("name", sorted(SERDES))
def test_the_largest_halves_stay_finite(name: str) -> None:
    layout = Layout("float16", (2, 3, 11), "KTD")  # whole vectors, and what is left
    for isa in _native.isas():
        serde = made(name, isa=isa)
        for top in np.arange(64000, 65505, 32):
            for low in (-65504.0, -float(top), 0.0, float(top)):
                values = np.full(layout.shape, float(top))
                values[:, :, ::2] = low
                back = loaded(decoded(serde, encoded(serde, stored(values, "float16"), layout), layout), layout)
                assert np.isfinite(back).all(), (top, low)


@pytest.mark.parametrize("name", sorted(SERDES))
def test_a_large_channel_of_keys_costs_its_neighbours_nothing(name: str) -> None:
    layout = Layout("float32", (2, 64, 1, 32), "KTHD")
    values = np.random.default_rng(3).standard_normal(layout.shape)
    values[0, :, 0, 5] *= 10_000
    serde = made(name)
    back = loaded(decoded(serde, encoded(serde, stored(values, "float32"), layout), layout), layout)
    others = [channel for channel in range(32) if channel != 5]
    worst = np.abs(back - values)[0, :, 0, others].max()
    assert worst < (0.03 if serde.key_bits == 8 else 0.3)


@pytest.mark.parametrize("name", sorted(SERDES))
def test_a_large_token_costs_the_values_of_others_nothing(name: str) -> None:
    layout = Layout("float32", (2, 64, 1, 32), "KTHD")
    values = np.random.default_rng(3).standard_normal(layout.shape)
    values[1, 0] *= 10_000
    serde = made(name)
    back = loaded(decoded(serde, encoded(serde, stored(values, "float32"), layout), layout), layout)
    assert np.abs(back - values)[1, 1:].max() < (0.03 if serde.value_bits == 8 else 0.3)


@pytest.mark.parametrize(("name", "share"), [("int8", 0.52), ("k8v4", 0.40), ("int4", 0.29)])
def test_an_object_takes_the_share_of_bf16_that_the_readme_promises(name: str, share: float) -> None:
    layout = Layout("bfloat16", (30, 2, 256, 3, 64), "LKTHD")
    packed = encoded(made(name), stored(kv(layout.shape), "bfloat16"), layout)
    assert share - 0.02 < len(packed) / layout.nbytes < share


@pytest.mark.parametrize(
    "layout",
    [
        Layout("bfloat16", (4, 64)),
        Layout("bfloat16", (2, 4, 64), "KHD"),
        Layout("bfloat16", (3, 4, 64), "KTD"),
        Layout("bfloat16", (2, 64, 4), "KDT"),
        Layout("bfloat16", (2, 4, 4, 64), "KTTD"),
        Layout("uint8", (2, 4, 64), "KTD"),
    ],
)
def test_a_layout_whose_axes_are_unknown_is_refused_with_what_would_do(layout: Layout) -> None:
    for call in (
        lambda: made("int8").encoded_bytes_max(layout.nbytes, layout),
        lambda: encoded(made("int8"), bytes(layout.nbytes), layout),
    ):
        with pytest.raises(UsageError, match=r"int8 takes bfloat16|such as KLTHD"):
            call()


def test_the_walk_has_no_more_outer_axes_than_the_kernels_take() -> None:
    letters = "KLTHBD"
    for axes in permutations(letters[:-1]):
        layout = Layout("float32", tuple(2 for _ in letters), "".join(axes) + "D")
        assert len(walk_of(layout, 64, "int8").outer) <= OUTER_AXES_MAX


def wrong_sizes() -> Iterator[bytes]:
    walk = walk_of(Layout("float32", (2, 5, 3, 16), "KTHD"), 64, "int8")
    good = np.frombuffer(walk.packed, "=u8")
    yield from (b"", walk.packed[:-1], walk.packed + bytes(16))
    for at in range(len(good)):
        for number in (0, good[at] + 1, 2**32, 2**63, 2**64 - 1):
            if number != good[at]:
                changed = good.copy()
                changed[at] = number
                yield changed.tobytes()


def test_sizes_that_would_leave_the_object_are_refused_by_the_kernels() -> None:
    data, out = bytes(2 * 5 * 3 * 16 * 4), bytearray(2 * 5 * 3 * 16 * 4)
    packed = _native.encode(data, 2, False, False, walk_of(Layout("float32", (2, 5, 3, 16), "KTHD"), 64, "x").packed)
    for sizes in wrong_sizes():
        try:
            coded = _native.encode(data, 2, False, False, sizes)
        except ValueError:
            with pytest.raises(ValueError, match=r"sizes|every count|has \d+ bytes"):
                _native.decode(packed, memoryview(out), 2, False, False, sizes)
        else:  # another group, or rows that lie otherwise within the object
            assert coded is None or _native.decode(coded, memoryview(out), 2, False, False, sizes) == -1


@pytest.mark.parametrize("name", sorted(SERDES))
def test_a_step_that_no_encoder_writes_is_damage_and_writes_nothing(name: str) -> None:
    layout = Layout("bfloat16", (2, 4, 8), "KTD")
    serde = made(name)
    packed = bytearray(encoded(serde, stored(kv(layout.shape), "bfloat16"), layout))
    packed[4:6] = b"\x00\x7c"
    out = bytearray(b"\xa5" * layout.nbytes)
    with pytest.raises(DamagedObjectError, match="number 0 of its steps"):
        serde.decode(memoryview(packed), memoryview(out), layout, KEY)
    assert out == b"\xa5" * layout.nbytes


@pytest.mark.parametrize("head", [b"qkv\x02", b"\0\0\0\0", b"qkv\x00"])
def test_another_head_is_damage(head: bytes) -> None:
    layout = Layout("bfloat16", (2, 4, 8), "KTD")
    packed = bytearray(encoded(made("int4"), stored(kv(layout.shape), "bfloat16"), layout))
    packed[:4] = head
    with pytest.raises(DamagedObjectError, match="are no object of"):
        decoded(made("int4"), bytes(packed), layout)


def test_the_bytes_do_not_depend_on_the_thread_that_makes_them() -> None:
    layout = Layout("bfloat16", (2, 2, 100, 2, 16), "LKTHD")
    data = stored(kv(layout.shape), "bfloat16")
    serde, found = made("int4"), []
    threads = [threading.Thread(target=lambda: found.append(encoded(serde, data, layout))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1
