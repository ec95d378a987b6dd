"""All of them: the bytes come back, or DamagedObjectError, and no memory is allocated for a length from outside."""

from __future__ import annotations

import os
import random
import struct
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable

import lz4.block
import numpy as np
import pytest
import xxhash
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from lmcache_compress.block_serde import BlockSerde
from lmcache_compress.frame import BLOCK_BYTES, HEAD, STORED, frame_bytes, seal
from lmcache_compress.lz4_serde import Lz4Serde
from lmcache_compress.planes_serde import PlanesSerde
from lmcache_compress.settings import Lz4Settings, ZstdSettings
from lmcache_compress.shuffle import shuffled, unshuffled
from lmcache_compress.zstd_serde import ZstdSerde
from lmcache_core.errors import DamagedObjectError
from lmcache_core.plugins.components import Kind
from lmcache_core.pool.layout import Layout

KEY = bytes(range(32))
SERDES: dict[str, BlockSerde] = {
    "zstd": ZstdSerde(ZstdSettings()),
    "zstd-3": ZstdSerde(ZstdSettings(level=3)),
    "zstd-plain": ZstdSerde(ZstdSettings(shuffle=False)),
    "lz4": Lz4Serde(Lz4Settings()),
    "lz4-9": Lz4Serde(Lz4Settings(level=9)),
    "lz4-plain": Lz4Serde(Lz4Settings(shuffle=False)),
    "planes": PlanesSerde(),
}
VALUES = int(os.environ.get("LMCACHE_CORE_PLANES_VALUES", 1 << 22))  # a thousand million take a quarter of an hour


@pytest.fixture(params=list(SERDES))
def serde(request: pytest.FixtureRequest) -> BlockSerde:
    return SERDES[request.param]


def encoded(serde: BlockSerde, data: bytes | bytearray, layout: Layout, key: bytes = KEY) -> bytes:
    (only,) = serde.encode(memoryview(data).toreadonly(), layout, key)
    return bytes(only)


def decoded(serde: BlockSerde, data: bytes, nbytes: int, layout: Layout, key: bytes = KEY) -> bytes:
    out = bytearray(b"\xa5" * nbytes)
    serde.decode(memoryview(data).toreadonly(), memoryview(out), layout, key)
    return bytes(out)


def like_kv(count: int, seed: int = 5) -> bytes:
    """bf16 bits of normal values: exponents that repeat, mantissas that do not."""
    values = np.random.default_rng(seed).standard_normal(count).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype("<u2").tobytes()


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_bytes_come_back_and_the_size_is_bounded(data: st.DataObject) -> None:
    serde = SERDES[data.draw(st.sampled_from(sorted(SERDES)))]
    dtype = data.draw(st.sampled_from(["uint8", "bfloat16", "float32", "int64"]))
    raw = data.draw(
        st.one_of(
            st.binary(max_size=300),
            st.builds(lambda part, times: part * times, st.binary(min_size=1, max_size=9), st.integers(1, 5000)),
            st.builds(lambda seed, n: random.Random(seed).randbytes(n), st.integers(0, 99), st.integers(0, 20_000)),
        )
    )
    layout = Layout(dtype, (max(1, len(raw)),))
    packed = encoded(serde, raw, layout)
    assert len(packed) <= serde.encoded_bytes_max(len(raw), layout)
    assert decoded(serde, packed, len(raw), layout) == raw


@pytest.mark.parametrize("nbytes", [0, 1, 2, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 3 * BLOCK_BYTES + 4])
def test_sizes_about_a_block_come_back(serde: BlockSerde, nbytes: int) -> None:
    raw = like_kv(nbytes // 2 + 1)[:nbytes]
    layout = Layout("bfloat16", (max(1, nbytes // 2),))
    packed = encoded(serde, raw, layout)
    assert decoded(serde, packed, nbytes, layout) == raw


def test_noise_is_stored_as_it_is_and_grows_by_the_frame_alone(serde: BlockSerde) -> None:
    raw = random.Random(1).randbytes(2 * BLOCK_BYTES + 77)
    layout = Layout("bfloat16", (len(raw) // 2,))
    packed = encoded(serde, raw, layout)
    parts = layout.itemsize if serde.name == "planes" else 1
    assert len(packed) <= frame_bytes(len(raw), parts) + len(raw) == serde.encoded_bytes_max(len(raw), layout)
    assert decoded(serde, packed, len(raw), layout) == raw


@pytest.mark.parametrize(("name", "ratio"), [("zstd", 1.45), ("zstd-3", 1.35), ("lz4", 1.15), ("planes", 1.45)])
def test_shuffled_kv_shrinks(name: str, ratio: float) -> None:
    raw = like_kv(1 << 20)
    layout = Layout("bfloat16", (1 << 20,))
    assert len(raw) / len(encoded(SERDES[name], raw, layout)) > ratio
    plain = SERDES.get(f"{name[:4].strip('-')}-plain", SERDES["zstd-plain"])
    assert len(encoded(SERDES[name], raw, layout)) < 0.95 * len(encoded(plain, raw, layout))


def test_long_repetitions_shrink_to_almost_nothing(serde: BlockSerde) -> None:
    layout = Layout("bfloat16", (BLOCK_BYTES,))
    assert len(encoded(serde, bytes(layout.nbytes), layout)) < layout.nbytes // 100


@pytest.mark.parametrize("itemsize", [2, 4, 8])
@pytest.mark.parametrize("rest", [0, 1])
def test_shuffling_puts_bytes_of_equal_weight_together_and_undoes_it(itemsize: int, rest: int) -> None:
    raw = np.frombuffer(random.Random(2).randbytes(itemsize * 1001 + rest), dtype=np.uint8)
    planes, back, words = np.empty_like(raw), np.empty_like(raw), np.empty_like(raw)
    shuffled(raw, itemsize, planes, words)
    for plane in range(itemsize):
        assert planes[plane * 1001 : (plane + 1) * 1001].tobytes() == raw[plane : itemsize * 1001 : itemsize].tobytes()
    assert planes[itemsize * 1001 :].tobytes() == raw[itemsize * 1001 :].tobytes()
    unshuffled(planes, itemsize, back)
    assert back.tobytes() == raw.tobytes()


def test_odd_addresses_do_not_matter(serde: BlockSerde) -> None:
    raw = bytearray(b"!" + like_kv(3000))
    layout = Layout("bfloat16", (3000,))
    (only,) = serde.encode(memoryview(raw)[1:].toreadonly(), layout, KEY)
    moved, out = bytearray(b"!" + bytes(only)), bytearray(1 + layout.nbytes)
    serde.decode(memoryview(moved)[1:].toreadonly(), memoryview(out)[1:], layout, KEY)
    assert out[1:] == raw[1:]


def test_the_source_is_untouched_and_not_part_of_the_answer(serde: BlockSerde) -> None:
    raw = bytearray(random.Random(3).randbytes(5000))
    before = bytes(raw)
    layout = Layout("bfloat16", (2500,))
    (only,) = serde.encode(memoryview(raw).toreadonly(), layout, KEY)
    assert bytes(raw) == before
    raw[:] = bytes(5000)
    assert decoded(serde, bytes(only), 5000, layout) == before


@pytest.mark.parametrize("name", ["zstd", "lz4", "planes"])
def test_every_flipped_bit_and_every_cut_is_damage(name: str) -> None:
    serde, layout = SERDES[name], Layout("bfloat16", (200,))
    packed = encoded(serde, like_kv(200), layout)
    for bit in range(8 * len(packed)):
        flipped = bytearray(packed)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DamagedObjectError, match=KEY.hex()[:16]):
            decoded(serde, bytes(flipped), layout.nbytes, layout)
    for cut in range(len(packed)):
        with pytest.raises(DamagedObjectError):
            decoded(serde, packed[:cut], layout.nbytes, layout)
    with pytest.raises(DamagedObjectError):
        decoded(serde, packed + b"\0", layout.nbytes, layout)


def test_another_key_layout_size_or_codec_is_damage(serde: BlockSerde) -> None:
    layout = Layout("bfloat16", (200,))
    packed = encoded(serde, like_kv(200), layout)
    other = SERDES["lz4" if serde.name == "zstd" else "zstd"]
    wrong = [
        (serde, 400, layout, bytes(32)),
        (serde, 400, Layout("float16", (200,)), KEY),
        (serde, 402, Layout("bfloat16", (201,)), KEY),
        (other, 400, layout, KEY),
    ]
    for decoder, nbytes, read_as, key in wrong:
        with pytest.raises(DamagedObjectError):
            decoded(decoder, packed, nbytes, read_as, key)


def forged(serde: BlockSerde, block: bytes, length: int, nbytes: int, layout: Layout) -> bytes:
    """An object with a right checksum around a block of the forger's."""
    out = np.zeros(frame_bytes(nbytes) + len(block), dtype=np.uint8)
    out[frame_bytes(nbytes) :] = np.frombuffer(block, dtype=np.uint8)
    seal(out, serde.codec, 1, [length], nbytes, layout, KEY)
    return out.tobytes()


def bombs(name: str, nbytes: int) -> list[bytes]:
    """Blocks that hold, or say they hold, far more than `nbytes`."""
    if name == "lz4":
        return [lz4.block.compress(bytes(256 << 20), store_size=False), lz4.block.compress(bytes(2 * nbytes))]
    honest = zstandard.ZstdCompressor().compress(bytes(256 << 20))
    silent = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(256 << 20))
    liar = bytearray(zstandard.ZstdCompressor(write_checksum=False).compress(bytes(300)))
    head = struct.pack("<IB", zstandard.MAGIC_NUMBER, 0b1110_0000)  # content size of eight bytes, single segment
    return [honest, silent, head + struct.pack("<Q", 1 << 60) + bytes(liar[7:])]


@pytest.mark.parametrize("name", ["zstd", "lz4", "planes"])
def test_a_decompression_bomb_is_damage_and_allocates_nothing(name: str) -> None:
    serde, layout = SERDES[name], Layout("uint8", (4096,))
    for block in bombs(name, layout.nbytes):
        packed = forged(serde, block, len(block), layout.nbytes, layout)
        tracemalloc.start()
        with pytest.raises(DamagedObjectError, match="block 0"):
            decoded(serde, packed, layout.nbytes, layout)
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak_bytes < 4 << 20


@pytest.mark.parametrize("name", ["zstd", "lz4", "planes"])
def test_blocks_that_are_garbage_or_short_are_damage(name: str) -> None:
    serde, layout = SERDES[name], Layout("uint8", (4096,))
    short = serde.compress(np.zeros(4095, dtype=np.uint8))
    twice = serde.compress(np.zeros(4096, dtype=np.uint8)) * 2
    for block in (random.Random(4).randbytes(500), b"", short, twice):
        with pytest.raises(DamagedObjectError, match="block 0"):
            decoded(serde, forged(serde, block, len(block), 4096, layout), 4096, layout)
    with pytest.raises(DamagedObjectError, match="block 0"):
        decoded(serde, forged(serde, bytes(4000), 4000 | STORED, 4096, layout), 4096, layout)
    with pytest.raises(DamagedObjectError, match="contradicts"):
        decoded(serde, forged(serde, bytes(100), 99, 4096, layout), 4096, layout)


def test_the_checksum_is_xxh3_over_what_the_frame_documents() -> None:
    layout = Layout("uint8", (64,))
    packed = encoded(SERDES["zstd"], bytes(64), layout)
    codec, version, itemsize, nbytes, checksum = HEAD.unpack_from(packed)
    covered = HEAD.pack(codec, version, itemsize, nbytes, layout.fingerprint) + struct.pack("<I", 32) + KEY
    assert checksum == xxhash.xxh3_64_intdigest(covered + packed[HEAD.size :])


def test_threads_on_one_instance_get_their_own_objects_back(serde: BlockSerde) -> None:
    layout = Layout("bfloat16", (40_000,))
    wrong: list[int] = []

    def work(seed: int) -> None:
        raw = like_kv(40_000, seed)
        for _ in range(5):
            if decoded(serde, encoded(serde, raw, layout), layout.nbytes, layout) != raw:
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


DTYPES = {"bfloat16": 2, "float16": 2, "float32": 4}


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(sorted(DTYPES)), st.integers(1, 700_000), st.integers(0, 2**32 - 1), st.integers(0, 255))
def test_planes_restore_every_bit_whatever_the_values_are(dtype: str, values: int, seed: int, constant: int) -> None:
    """NaNs with their payloads, infinities, denormals, both zeros: all patterns, with a run of equal bytes in front."""
    layout = Layout(dtype, (values,))
    raw = bytearray(np.random.default_rng(seed).bytes(layout.nbytes))
    raw[: layout.nbytes // 3] = bytes([constant]) * (layout.nbytes // 3)
    assert decoded(SERDES["planes"], encoded(SERDES["planes"], raw, layout), layout.nbytes, layout) == raw


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_planes_restore_every_pattern_of_a_half_among_many_values(dtype: str) -> None:
    """LMCACHE_CORE_PLANES_VALUES says how many."""
    rng, count = np.random.default_rng(11), 1 << 21
    layout = Layout(dtype, (count,))
    patterns = np.arange(1 << 16, dtype="<u2")
    for _ in range(max(1, VALUES // count)):
        values = (rng.standard_normal(count) * rng.choice([1e-6, 1.0, 1e4])).astype("<f4")
        if dtype == "float32":
            words = values.view("<u4")
            words[: patterns.size] = patterns.astype("<u4") << 16 | rng.integers(0, 1 << 16, patterns.size, dtype="<u4")
        else:
            words = values.astype("<f2").view("<u2") if dtype == "float16" else (values.view("<u4") >> 16).astype("<u2")
            words[: patterns.size] = patterns
        raw = words.tobytes()
        assert decoded(SERDES["planes"], encoded(SERDES["planes"], raw, layout), layout.nbytes, layout) == raw


def test_a_plane_that_shrinks_is_coded_even_if_it_is_not_the_heaviest() -> None:
    """bf16 in float32 has two planes of zeros."""
    layout = Layout("float32", (1 << 19,))
    wide = (np.frombuffer(like_kv(1 << 19), "<u2").astype("<u4") << 16).tobytes()
    packed = encoded(SERDES["planes"], wide, layout)
    assert len(packed) < 0.36 * len(wide)
    assert decoded(SERDES["planes"], packed, layout.nbytes, layout) == wide


def test_opaque_bytes_are_one_plane() -> None:
    raw = b"state " * 10_000
    layout = Layout("uint8", (len(raw),))
    packed = encoded(SERDES["planes"], raw, layout)
    assert len(packed) < 1000
    assert decoded(SERDES["planes"], packed, len(raw), layout) == raw


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


def test_compression_lets_other_threads_run(serde: BlockSerde) -> None:
    block = np.frombuffer(like_kv(BLOCK_BYTES // 2), dtype=np.uint8)
    planes, words = np.empty_like(block), np.empty_like(block)
    shuffled(block, 2, planes, words)
    packed = memoryview(serde.compress(planes))
    assert lets_others_run(lambda: serde.compress(planes))
    assert lets_others_run(lambda: serde.decompress(packed, BLOCK_BYTES))
    assert lets_others_run(lambda: shuffled(block, 2, planes, words))
    assert not lets_others_run(lambda: bytes(packed), within_s=0.1)  # a call that holds the GIL is told apart


def test_levels_are_the_encoders_business(serde: BlockSerde) -> None:
    assert serde.parameters() == {"format": 2}
    assert serde.lossless
    layout = Layout("bfloat16", (3000,))
    raw = like_kv(3000)
    same_codec = [other for other in SERDES.values() if other.name == serde.name]
    assert {decoded(other, encoded(serde, raw, layout), 6000, layout) for other in same_codec} == {raw}


def test_settings_are_frozen_and_refuse_what_they_do_not_know() -> None:
    for model, wrong in ((ZstdSettings, {"level": 20}), (Lz4Settings, {"level": 13}), (ZstdSettings, {"levl": 1})):
        with pytest.raises(ValidationError):
            model.model_validate(wrong)
    with pytest.raises(ValidationError):
        Lz4Settings().level = 3


def test_the_plugin_module_names_its_components_and_imports_nothing_heavy() -> None:
    code = (
        "import sys, lmcache_compress\n"
        "for spec in lmcache_compress.lmcache_components(): print(spec.kind, spec.name, spec.factory, spec.settings)\n"
        "heavy = ('numpy', 'zstandard', 'lz4', 'pydantic', 'xxhash', 'torch', 'zmq')\n"
        "print([m for m in sys.modules if m.split('.')[0] in heavy or m.startswith('lmcache_compress.')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        f"{Kind.SERDE} zstd lmcache_compress.zstd_serde:ZstdSerde lmcache_compress.settings:ZstdSettings",
        f"{Kind.SERDE} lz4 lmcache_compress.lz4_serde:Lz4Serde lmcache_compress.settings:Lz4Settings",
        f"{Kind.SERDE} planes lmcache_compress.planes_serde:PlanesSerde None",
        "[]",
    ]
