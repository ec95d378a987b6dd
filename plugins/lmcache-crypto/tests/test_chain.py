"""The serdes of the project in one chain, as a tier runs them: fp8, then zstd or lz4, then aesgcm."""

from __future__ import annotations

import itertools
import random
import struct
import threading
import time
from collections.abc import Sequence

import pytest
from pydantic import SecretStr

from lmcache_core.errors import DamagedObjectError
from lmcache_core.pool.layout import Layout
from lmcache_core.serde.chain import CodecChain
from lmcache_core.serde.contract import Serde
from lmcache_core.serde.scratch import Scratch
from lmcache_core.tiers.l1 import TierReason
from lmcache_core.tiers.object.format import (
    HEADER_BYTES,
    ObjectKind,
    build_header,
    object_kind,
    payload_checksum,
    read_header,
)
from lmcache_core.tiers.object.transfer import Carrier, Loaded, Transfer
from lmcache_crypto.serde import AesGcmSerde
from lmcache_crypto.settings import AesGcmSettings
from lmcache_mock.memory import MemoryAdapter

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


def _carried(chain: CodecChain, held: bytes, wanted: Transfer) -> Loaded:
    """What a tier makes of `held` when it is asked for `wanted`."""
    adapter = MemoryAdapter()
    adapter.objects[wanted.tier_key] = (held, 0.0)
    (loaded,) = Carrier(adapter, chain, threading.Event()).load([wanted], time.monotonic() + 60)
    return loaded


def _stored(chain: CodecChain, transfer: Transfer) -> bytes:
    adapter = MemoryAdapter()
    Carrier(adapter, chain, threading.Event()).store([transfer], time.monotonic() + 60)
    return bytes(adapter.objects[transfer.tier_key][0])


def _with_header_of(held: bytes, wanted: Transfer, lengths: Sequence[int] | None = None) -> bytes:
    """The payload under a header as anybody can write one who can write to the medium."""
    payload, page = held[HEADER_BYTES:], memoryview(bytearray(HEADER_BYTES))
    found = read_header(memoryview(held)[:HEADER_BYTES])
    build_header(
        page, wanted.kind, key=wanted.key, namespace=wanted.namespace, epoch=wanted.epoch,
        encoded_bytes=len(payload), checksum=payload_checksum([payload]), lengths=lengths or found.lengths,
    )  # fmt: skip
    return bytes(page) + payload


def _transfer(kind: ObjectKind, data: bytes, key: bytes = KEY, namespace: int = 5, epoch: int = 0) -> Transfer:
    return Transfer(key, namespace, epoch, kind, memoryview(bytearray(data)))


@pytest.mark.parametrize("names", [["aesgcm"], ["zstd", "aesgcm"], ["fp8", "aesgcm"], ["aesgcm", "lz4"]])
@pytest.mark.parametrize("change", ["key", "namespace", "epoch", "layout"])
def test_an_object_with_another_header_is_not_the_object_of_that_header(names: list[str], change: str) -> None:
    chain, data = chain_of(names), bf16(LAYOUT, 4)
    kind = object_kind(LAYOUT, chain)
    held = _stored(chain, _transfer(kind, data))
    again = _transfer(kind, data)
    assert _carried(chain, held, again).reason is None  # as it was stored it is loaded
    other = {
        "key": _transfer(kind, data, key=bytes(32)),
        "namespace": _transfer(kind, data, namespace=6),
        "epoch": _transfer(kind, data, epoch=1),
        "layout": _transfer(object_kind(Layout("float16", LAYOUT.shape, LAYOUT.memory_format), chain), data),
    }[change]
    assert _carried(chain, _with_header_of(held, other), other).reason is TierReason.DAMAGED


def test_no_chain_of_ours_allocates_by_a_forged_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any order of zstd, lz4 and aesgcm, after fp8 and without it."""
    taken: list[int] = []
    take = Scratch.take
    monkeypatch.setattr(Scratch, "take", lambda self, nbytes: taken.append(nbytes) or take(self, nbytes))
    data = bf16(LAYOUT, 5)
    orders = [order for count in (1, 2, 3) for order in itertools.permutations(("zstd", "lz4", "aesgcm"), count)]
    for names in [["fp8", *order] for order in orders] + [[*order] for order in orders if len(order) > 1]:
        chain = chain_of(names)
        wanted = _transfer(object_kind(LAYOUT, chain), data)
        held = _stored(chain, wanted)
        lengths = list(read_header(memoryview(held)[:HEADER_BYTES]).lengths)
        for place in range(len(lengths) - 1):
            forged = [*lengths[:place], 1 << 30, *lengths[place + 1 :]]
            taken.clear()
            loaded = _carried(chain, _with_header_of(held, wanted, forged), wanted)
            assert loaded.reason is TierReason.DAMAGED, names
            assert "at most" in loaded.error, names
            assert max(taken) <= chain.encoded_bytes_max(LAYOUT), names


def test_a_bomb_behind_fp8_is_refused_by_its_length() -> None:
    """59 KB that decompress to 1 GiB: as much as a header says that fp8 gave."""
    chain = chain_of(["fp8", "zstd"])
    kind = object_kind(LAYOUT, chain)
    nbytes = 64 << 20
    (bomb,) = chain.serdes[1].encode(memoryview(bytes(nbytes)), Layout("uint8", (nbytes,)), KEY)
    assert len(bomb) < chain.encoded_bytes_max(LAYOUT)
    wanted = _transfer(kind, bytes(LAYOUT.nbytes))
    page = memoryview(bytearray(HEADER_BYTES))
    build_header(
        page, kind, key=KEY, namespace=5, epoch=0, encoded_bytes=len(bomb), checksum=payload_checksum([bomb]),
        lengths=[nbytes, len(bomb)],
    )  # fmt: skip
    loaded = _carried(chain, bytes(page) + bytes(bomb), wanted)
    assert loaded.reason is TierReason.DAMAGED
    assert "fp8" in loaded.error
