"""The serdes of the project in one chain, as a tier runs them: fp8, then zstd or lz4, then aesgcm."""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence

import pytest
from pydantic import SecretStr

from lmcache_core.errors import DamagedObjectError
from lmcache_core.pool.layout import Layout
from lmcache_core.serde.chain import CodecChain
from lmcache_core.serde.contract import Serde
from lmcache_core.serde.scratch import Scratch
from lmcache_crypto.serde import AesGcmSerde
from lmcache_crypto.settings import AesGcmSettings

fp8 = pytest.importorskip("lmcache_fp8.serde", reason="lmcache-fp8 is not installed")
fp8_settings = pytest.importorskip("lmcache_fp8.settings")
zstd = pytest.importorskip("lmcache_compress.zstd_serde", reason="lmcache-compress is not installed")
lz4 = pytest.importorskip("lmcache_compress.lz4_serde")
compress_settings = pytest.importorskip("lmcache_compress.settings")

KEY = bytes(range(32))
LAYOUT = Layout("bfloat16", (2, 3, 40, 2, 64), "KLTHD")


def aesgcm(secret: bytes = bytes(range(32))) -> Serde:
    return AesGcmSerde(AesGcmSettings(keys=SecretStr(secret.hex())))


def all_serdes() -> dict[str, Serde]:
    return {
        "fp8": fp8.Fp8Serde(fp8_settings.Fp8Settings()),
        "zstd": zstd.ZstdSerde(compress_settings.ZstdSettings()),
        "lz4": lz4.Lz4Serde(compress_settings.Lz4Settings()),
        "aesgcm": aesgcm(),
    }


def chain_of(names: Sequence[str]) -> CodecChain:
    serdes = all_serdes()
    return CodecChain([serdes[name] for name in names])


def bf16(layout: Layout, seed: int) -> bytes:
    rng = random.Random(seed)
    words = struct.unpack(
        f"<{layout.nbytes // 2}I",
        struct.pack(f"<{layout.nbytes // 2}f", *(rng.gauss(0, 1) for _ in range(layout.nbytes // 2))),
    )
    return struct.pack(f"<{len(words)}H", *(word >> 16 for word in words))


def through(chain: CodecChain, data: bytes) -> tuple[bytes, list[int], bytes]:
    scratch = Scratch()
    encoded = chain.encode(memoryview(data).toreadonly(), LAYOUT, KEY, scratch)
    stored = b"".join(bytes(part) for part in encoded.buffers)
    lengths = list(encoded.lengths)
    scratch.reset()
    out = bytearray(b"\xa5" * LAYOUT.nbytes)
    chain.decode(memoryview(stored).toreadonly(), memoryview(out), LAYOUT, KEY, lengths, scratch)
    return stored, lengths, bytes(out)


@pytest.mark.parametrize(
    "names", [["zstd", "aesgcm"], ["lz4", "aesgcm"], ["aesgcm", "zstd"], ["zstd", "lz4"], ["aesgcm"]]
)
def test_lossless_chains_return_the_very_bytes(names: list[str]) -> None:
    chain, data = chain_of(names), bf16(LAYOUT, 1)
    stored, _, back = through(chain, data)
    assert chain.lossless
    assert back == data
    assert len(stored) <= chain.encoded_bytes_max(LAYOUT)


@pytest.mark.parametrize("names", [["fp8", "zstd", "aesgcm"], ["fp8", "lz4", "aesgcm"], ["fp8", "aesgcm"]])
def test_what_follows_fp8_changes_nothing_of_its_result(names: list[str]) -> None:
    chain, data = chain_of(names), bf16(LAYOUT, 2)
    stored, lengths, back = through(chain, data)
    _, _, alone = through(chain_of(["fp8"]), data)
    assert not chain.lossless
    assert back == alone != data
    assert len(stored) < 0.6 * len(data)
    assert len(lengths) == len(names)


def test_a_wrong_key_or_a_foreign_object_at_the_end_of_a_chain_is_damage() -> None:
    chain, data = chain_of(["fp8", "zstd", "aesgcm"]), bf16(LAYOUT, 3)
    stored, lengths, _ = through(chain, data)
    out = memoryview(bytearray(LAYOUT.nbytes))
    stranger = CodecChain([*chain.serdes[:2], aesgcm(bytes(32))])
    for other, key, held in (
        (stranger, KEY, stored),
        (chain, bytes(32), stored),
        (chain, KEY, stored[:-1] + bytes([stored[-1] ^ 1])),
    ):
        with pytest.raises(DamagedObjectError):
            other.decode(memoryview(held), out, LAYOUT, key, lengths, Scratch())
