"""A description of chunks: what is made of it makes the same keys, and what is none is refused in words."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from small_chunks import PREFIX_TOKENS, prefixes, space

from lmcache_blend import Chunks
from lmcache_blend.described import DescribedChunks, chunks_of
from lmcache_core import Client
from lmcache_core.errors import SettingsError

TEXT = np.random.default_rng(7).integers(2, 1000, 400)


@pytest.fixture
def nobody(tmp_path: Path) -> Client:
    return Client.connect("nobody", runtime_dir=tmp_path)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("with_prefixes", [True, False])
def test_described_chunks_have_the_same_keys(nobody: Client, tmp_path: Path, ranks: int, with_prefixes: bool) -> None:
    of = prefixes() if with_prefixes else None
    own = Chunks(nobody, space(kv_ranks=ranks, tenant_salt="secret"), of, PREFIX_TOKENS)
    DescribedChunks.of(own, config={"rope": 1}, extra=b"\x01\xff").write(tmp_path / "chunks.json")
    assert (tmp_path / "chunks.json").stat().st_mode & 0o777 == 0o600
    assert b"secret" not in (tmp_path / "chunks.json").read_bytes()
    about = DescribedChunks.read(tmp_path / "chunks.json")
    assert (about.model, about.weights, about.config) == ("small", "", {"rope": 1})
    other, extra = chunks_of(nobody, about.space), bytes.fromhex(about.extra)
    assert extra == b"\x01\xff"
    found = [[each.keys for each in chunks.find(TEXT, extra=extra).missing] for chunks in (own, other)]
    assert found[0] == found[1]
    assert len(found[0]) > 5
    assert [each.digest for each in other.prefixes] == [each.digest for each in own.prefixes]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"format": 2}, "has format 2"),
        ({"model": None}, "describes no chunks"),
        ({"extra": "zz"}, "describes no chunks"),
        ({"more": 1}, "describes no chunks"),
        ({"space": {"type": "plan"}}, "describes no chunks"),
        ({"space": {"maximum": 100}}, "need 13"),
        ({"space": {"rope_theta": 1e999}}, "describes no chunks"),
        ({"space": {"chunks": [[{"digest": "ab", "layout": "x"}]]}}, "describes no chunks"),
    ],
)
def test_files_that_describe_no_chunks_are_refused(
    nobody: Client, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    good = DescribedChunks.of(Chunks(nobody, space()), config={})
    wrong = json.loads(msgspec.json.encode(good))
    wrong |= changes | ({"space": wrong["space"] | changes["space"]} if "space" in changes else {})
    (tmp_path / "chunks.json").write_text(json.dumps(wrong))
    with pytest.raises(SettingsError, match=words):
        DescribedChunks.read(tmp_path / "chunks.json")


def test_what_cannot_be_read_is_named_with_what_makes_one(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "deep").write_text("[" * 200_000)
    for name, words in (("none", "cannot be read"), ("pipe", "no regular file"), ("deep", "describes no chunks")):
        with pytest.raises(SettingsError, match=words) as raised:
            DescribedChunks.read(tmp_path / name)
        assert "describe_chunks" in raised.value.cure
