"""The serde as a tier's chain sees it: sizes, errors, threads, and what the error of quantisation is."""

from __future__ import annotations

import math
import random
import struct
import subprocess
import sys
import threading

import pytest
from pydantic import ValidationError

from lmcache_core.errors import DamagedObjectError, PluginError, UsageError
from lmcache_core.plugins.components import Kind
from lmcache_core.pool.layout import Layout
from lmcache_fp8 import kernels as kernels_module
from lmcache_fp8.serde import Fp8Serde
from lmcache_fp8.settings import Fp8Settings

KEY = bytes(range(32))
FLOAT32 = Layout("float32", (2, 2, 64, 4, 64), "KLTHD")
# What the README promises, relative to the value and to the largest value of its group: half a step of three
# mantissa bits, then the rounding to the value's own type; half a step of e4m3's denormals.
RELATIVE_BOUND = {"float32": 2**-4 + 2**-20, "float16": 2**-4 + 2**-10, "bfloat16": 2**-4 + 2**-8}
ABSOLUTE_BOUND = 2**-10 / 448 * (1 + 2**-6)


def data_with_outliers(layout: Layout, seed: int) -> list[float]:
    """Normal values; in one of fifty tokens a few channels are a thousand times larger, as attention sinks are."""
    rng = random.Random(seed)
    values = []
    dim = layout.shape[-1]
    for _ in range(math.prod(layout.shape[:-1])):
        row = [rng.gauss(0, 1) for _ in range(dim)]
        if rng.random() < 0.02:
            for channel in rng.sample(range(dim), 3):
                row[channel] *= 1000
        values += row
    return values


def packed(values: list[float]) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def narrowed(values: list[float], dtype: str) -> bytes:
    if dtype != "bfloat16":
        return struct.pack(f"<{len(values)}{'e' if dtype == 'float16' else 'f'}", *values)
    words = struct.unpack(f"<{len(values)}I", packed(values))
    return struct.pack(f"<{len(words)}H", *(word >> 16 for word in words))


def widened(data: bytes, dtype: str) -> list[float]:
    if dtype != "bfloat16":
        return [one for (one,) in struct.iter_unpack("<e" if dtype == "float16" else "<f", data)]
    words = [word << 16 for (word,) in struct.iter_unpack("<H", data)]
    return list(struct.unpack(f"<{len(words)}f", struct.pack(f"<{len(words)}I", *words)))


def round_trip(serde: Fp8Serde, data: bytes | bytearray, layout: Layout) -> bytes:
    encoded = b"".join(bytes(part) for part in serde.encode(memoryview(data).toreadonly(), layout, KEY))
    out = bytearray(layout.nbytes)
    serde.decode(memoryview(encoded).toreadonly(), memoryview(out), layout, KEY)
    return bytes(out)


def relative_rms(wanted: list[float], got: list[float]) -> float:
    error = math.fsum((a - b) ** 2 for a, b in zip(wanted, got, strict=True))
    return math.sqrt(error / math.fsum(a * a for a in wanted))


@pytest.mark.parametrize("group_tokens", [1, 8, 64])
def test_data_with_outliers_keeps_its_values_where_a_plain_cast_loses_them(group_tokens: int) -> None:
    values = list(struct.unpack(f"<{FLOAT32.nbytes // 4}f", packed(data_with_outliers(FLOAT32, seed=7))))
    back = round_trip(Fp8Serde(Fp8Settings(group_tokens=group_tokens)), packed(values), FLOAT32)
    got = list(struct.unpack(f"<{len(values)}f", back))
    plain_cast = [math.copysign(min(abs(one), 448.0), one) for one in values]  # even before its own rounding
    assert relative_rms(values, got) < 0.03
    assert relative_rms(values, plain_cast) > 0.1
    # The outliers cannot hide the rest: the small values alone are as good.
    small = [i for i, one in enumerate(values) if abs(one) < 5]
    assert relative_rms([values[i] for i in small], [got[i] for i in small]) < 0.03


@pytest.mark.parametrize("dtype", sorted(RELATIVE_BOUND))
def test_every_element_stays_within_the_documented_bound(dtype: str) -> None:
    rng = random.Random(11)
    dim, rows = 128, 64
    layout = Layout(dtype, (rows, 1, dim), "THD")
    values = [rng.gauss(0, 1) * 2.0 ** rng.uniform(-12, 6) for _ in range(rows * dim)]
    data = narrowed(values, dtype)
    back = round_trip(Fp8Serde(Fp8Settings(group_tokens=1)), data, layout)
    wanted, got = widened(data, dtype), widened(back, dtype)
    for row in range(rows):
        at = slice(row * dim, (row + 1) * dim)
        most = max(abs(one) for one in wanted[at])
        for a, b in zip(wanted[at], got[at], strict=True):
            assert abs(a - b) <= RELATIVE_BOUND[dtype] * abs(a) + ABSOLUTE_BOUND * most


def test_a_second_round_trip_changes_little_and_the_source_is_untouched() -> None:
    data = bytearray(packed(data_with_outliers(Layout("float32", (8, 2, 64), "THD"), seed=1)))
    before = bytes(data)
    layout = Layout("float32", (8, 2, 64), "THD")
    serde = Fp8Serde(Fp8Settings())
    once = round_trip(serde, data, layout)
    assert bytes(data) == before
    twice = round_trip(serde, once, layout)
    a, b = (struct.unpack("<1024f", one) for one in (once, twice))
    assert all(abs(x - y) <= abs(x) * 2**-20 for x, y in zip(a, b, strict=True))


def test_the_encoded_size_is_exact_and_half_of_bf16() -> None:
    layout = Layout("bfloat16", (2, 4, 256, 8, 128), "KLTHD")
    serde = Fp8Serde(Fp8Settings())
    (encoded,) = serde.encode(memoryview(bytes(layout.nbytes)), layout, KEY)
    size = memoryview(encoded).nbytes
    assert size == serde.encoded_bytes_max(layout.nbytes, layout)
    assert size == layout.nbytes // 2 + 4 * 2 * 4 * 32 * 8
    assert size / layout.nbytes < 0.503
    assert serde.encoded_layout(layout, size) == Layout("uint8", (size,))


@pytest.mark.parametrize(("shape", "axes"), [((1,), ""), ((1 << 20,), ""), ((1, 1), "TD")])
def test_one_element_and_large_objects_come_back(shape: tuple[int, ...], axes: str) -> None:
    layout = Layout("float32", shape, axes)
    data = struct.pack("<f", -3.0) * (layout.nbytes // 4)
    back = struct.unpack(f"<{layout.nbytes // 4}f", round_trip(Fp8Serde(Fp8Settings()), data, layout))
    assert all(abs(one + 3.0) < 1e-5 for one in back)


@pytest.mark.parametrize("cut", [0, 1, -1, 5])
def test_an_object_of_another_length_is_damage(cut: int) -> None:
    layout = Layout("bfloat16", (16, 2, 64), "THD")
    serde = Fp8Serde(Fp8Settings())
    (encoded,) = serde.encode(memoryview(bytes(layout.nbytes)), layout, KEY)
    wrong = bytes(encoded)[:cut] if cut < 1 else bytes(encoded) + bytes(cut)
    with pytest.raises(DamagedObjectError, match=KEY.hex()[:16]):
        serde.decode(memoryview(wrong), memoryview(bytearray(layout.nbytes)), layout, KEY)


def test_integers_and_short_sources_are_misuse() -> None:
    serde = Fp8Serde(Fp8Settings())
    with pytest.raises(UsageError, match="int8"):
        serde.encode(memoryview(bytes(4)), Layout("int8", (4,)), KEY)
    with pytest.raises(UsageError, match="every element"):
        serde.encode(memoryview(bytes(6)), Layout("float16", (4,)), KEY)
    with pytest.raises(UsageError, match="target"):
        serde.decode(memoryview(bytes(8)), memoryview(bytearray(6)), Layout("float16", (4,)), KEY)


def test_threads_on_one_instance_get_their_own_objects_back() -> None:
    serde = Fp8Serde(Fp8Settings())
    layout = Layout("float32", (32, 4, 64), "THD")
    wrong: list[int] = []

    def work(seed: int) -> None:
        data = packed([float(seed)] * (layout.nbytes // 4))
        for _ in range(20):
            back = struct.unpack(f"<{layout.nbytes // 4}f", round_trip(serde, data, layout))
            if any(abs(one - seed) > 1e-4 * seed for one in back[::97]):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(1, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_parameters_name_what_a_decoder_must_agree_on_and_not_who_computes() -> None:
    assert Fp8Serde(Fp8Settings(group_tokens=4)).parameters() == {"format": 1, "group_tokens": 4}
    assert (Fp8Serde.name, Fp8Serde.lossless) == ("fp8", False)


def test_settings_are_frozen_and_refuse_what_they_do_not_know() -> None:
    with pytest.raises(ValidationError):
        Fp8Settings.model_validate({"group": 3})
    with pytest.raises(ValidationError):
        Fp8Settings(group_tokens=0)
    with pytest.raises(ValidationError):
        Fp8Settings().group_tokens = 3


def test_without_a_kernel_the_error_names_both_cures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lmcache_fp8._native", None)
    monkeypatch.delattr("lmcache_fp8._native", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    for choice in ("auto", "native", "torch"):
        with pytest.raises(PluginError, match="C compiler is found") as caught:
            kernels_module.kernel_for(choice)
        assert "lmcache-fp8[torch]" in str(caught.value)


def test_without_the_c_kernel_auto_takes_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.setitem(sys.modules, "lmcache_fp8._native", None)
    monkeypatch.delattr("lmcache_fp8._native", raising=False)
    assert type(kernels_module.kernel_for("auto")).__name__ == "TorchKernel"


def test_the_plugin_module_names_its_component_and_imports_nothing_heavy() -> None:
    code = (
        "import sys, lmcache_fp8; spec, = lmcache_fp8.lmcache_components();"
        "print(spec.kind, spec.name, spec.factory, spec.settings);"
        "print(sorted(m for m in sys.modules if m.split('.')[0] in ('torch', 'numpy', 'pydantic', 'zmq')"
        " or m.startswith('lmcache_fp8.')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        f"{Kind.SERDE} fp8 lmcache_fp8.serde:Fp8Serde lmcache_fp8.settings:Fp8Settings",
        "[]",
    ]
