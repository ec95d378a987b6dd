"""`bench serde` with a registry of its own: its records, and its messages about missing serdes."""

from __future__ import annotations

import zlib
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest

from lmcache_bench import serde as bench_serde
from lmcache_core.cli.bench.harness import Bench
from lmcache_core.errors import PluginError
from lmcache_core.plugins.components import ComponentSpec, Kind
from lmcache_core.pool.layout import Layout
from lmcache_core.serde.contract import Buffer, Serde


class Deflate(Serde):
    """A real serde that needs no package: the fastest level, one block."""

    name = "deflate"
    lossless = True

    def encoded_bytes_max(self, nbytes: int, layout: Layout) -> int:
        return nbytes + nbytes // 1000 + 64

    def encode(self, src: memoryview, layout: Layout, key: bytes) -> Sequence[Buffer]:
        return [zlib.compress(src, 0)]

    def decode(self, src: memoryview, into: memoryview, layout: Layout, key: bytes) -> None:
        into[:] = zlib.decompress(src)


class Holder(Deflate):
    """Keeps the GIL for the whole of a call."""

    name = "holder"

    def encode(self, src: memoryview, layout: Layout, key: bytes) -> Sequence[Buffer]:
        return [bytes(src)]

    def decode(self, src: memoryview, into: memoryview, layout: Layout, key: bytes) -> None:
        into[:] = src


class OwnRegistry:
    """What the bench asks of a registry, over the serdes above."""

    serdes: ClassVar[dict[str, type[Serde]]] = {"deflate": Deflate, "holder": Holder}

    def components(self, kind: Kind) -> list[ComponentSpec]:
        assert kind is Kind.SERDE
        return [ComponentSpec(kind, name, factory="none:none") for name in self.serdes]

    def settings_model(self, kind: Kind, name: str) -> None:
        return None

    def build(self, kind: Kind, name: str, settings: Any = None) -> Serde:
        if name not in self.serdes:
            raise PluginError(f"there is no serde {name!r}")
        return self.serdes[name]()


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_serde, "OBJECTS", 4)
    monkeypatch.setattr(bench_serde, "SHAPE", (2, 1, 64, 8, 128))


def bench_of(*chains: str) -> Bench:
    bench = Bench("serde", quick=True, as_json=True)
    parser = ArgumentParser()
    bench_serde.add_options(parser)
    options = parser.parse_args(["--serde", *chains] if chains else [])
    bench_serde.run(Namespace(**vars(options), registry=OwnRegistry()), bench)
    return bench


def test_each_chain_has_rates_over_the_copy_its_size_and_its_hold_on_the_interpreter() -> None:
    results = {result.name: result for result in bench_of("deflate", "deflate,holder").results}
    for chain in ("deflate", "deflate,holder"):
        for way in ("encode", "decode"):
            rate = results[f"{chain} {way}"]
            assert rate.unit == "GB/s"
            assert rate.floor is not None
            assert rate.value > 0
        assert 1.0 < results[f"{chain} size, of the object"].value < 1.01
        assert results[f"{chain}: Python held up, of a call"].target == bench_serde.GIL_TARGET


def test_serdes_of_ours_that_are_missing_are_named_with_their_package(capsys: pytest.CaptureFixture[str]) -> None:
    bench_of()
    said = capsys.readouterr().err
    for name, package in bench_serde.OURS.items():
        assert f"{name} (pip install {package})" in said


def test_a_serde_that_is_not_there_is_an_error_when_it_was_asked_for() -> None:
    with pytest.raises(PluginError, match="fp9"):
        bench_of("fp9")
