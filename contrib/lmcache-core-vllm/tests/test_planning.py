"""What an engine stores, as programs without it read it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lmcache_core import Layout, Namespace, Server
from lmcache_core.errors import SettingsError, UsageError
from lmcache_core_vllm.groups import Group, Kind
from lmcache_core_vllm.namespaces import Hashing
from lmcache_core_vllm.planning import BlockPrefixes, Describer, described

GROUP = Group(0, Kind.FULL, 16, 2)
RANKS = [[Namespace("tiny", Layout("uint8", (4096,)), kv_shard=(rank, 2), tenant_salt="secret")] for rank in range(2)]
HASHING = Hashing("sha256", "seed")


def written(path: Path, groups: list[Group] | None = None, hashing: Hashing = HASHING) -> Path:
    Describer(str(path)).describe(groups or [GROUP], RANKS, lambda: hashing)
    return path


def test_prefixes_count_where_all_ranks_have_them(start: Callable[..., Server], tmp_path: Path) -> None:
    np: Any = pytest.importorskip("numpy")
    prefixes = BlockPrefixes.read(written(tmp_path / "engine.json"))
    assert prefixes.chunk_tokens == 16
    names = prefixes.names(np.arange(70, dtype=np.uint32), None)
    assert len(names) == 4
    with start(l1={"size_bytes": 8 << 20, "backing": "memfd"}).connect() as client:
        prefixes.register(client)
        assert prefixes.stored(client, names) == 0
        for (namespace,), count in zip(RANKS, (4, 3), strict=True):
            keys = HASHING.keys(names[:count], namespace)
            client.prepare_store(keys, namespace=namespace).commit(checksums=False)
        assert prefixes.stored(client, names) == 3
        assert prefixes.stored(client, names[1:]) == 2
        assert prefixes.names(np.arange(16, 70, dtype=np.uint32), names[0]) == names[1:]


def test_a_description_is_written_when_the_engine_changes_and_is_its_users_alone(tmp_path: Path) -> None:
    path = tmp_path / "new" / "engine.json"
    describer = Describer(str(path))
    describer.describe([GROUP], [], lambda: HASHING)  # the workers have not reported
    assert not path.exists()
    describer.describe([GROUP], RANKS, lambda: HASHING)
    assert path.stat().st_mode & 0o777 == 0o600
    first = path.stat().st_ino
    describer.describe([GROUP], RANKS, lambda: HASHING)
    assert path.stat().st_ino == first  # nothing has changed
    path.unlink()
    describer.describe([GROUP], RANKS, lambda: HASHING)
    assert len(BlockPrefixes.read(path).about.ranks) == 2  # somebody tidied up
    describer.describe([GROUP], RANKS[:1], lambda: HASHING)
    assert len(BlockPrefixes.read(path).about.ranks) == 1
    assert b"secret" not in path.read_bytes()


def test_engines_whose_prefixes_cannot_be_searched_are_not_described(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for groups in ([Group(0, Kind.WINDOW, 16, 1, 64)], [GROUP, Group(1, Kind.FULL, 16, 2)]):
        with pytest.raises(UsageError, match="one KV group, of full attention"):
            described(groups, RANKS, HASHING)
        assert not written(tmp_path / "engine.json", groups).exists()
        assert "is not written" in caplog.text
    (tmp_path / "file").touch()
    written(tmp_path / "file" / "engine.json")  # no folder: the engine goes on
    assert "file/engine.json is not written" in caplog.text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"format": 2}, "has format 2"),
        ({"hash_tokens": 5}, "no description of an engine"),
        ({"hash_tokens": 0}, "no description of an engine"),
        ({"ranks": []}, "no description of an engine"),
        ({"ranks": [{"digest": "ab", "layout": "uint8[1]"}]}, "no description of an engine"),
        ({"ranks": [{"digest": "a" * 64, "layout": "nonsense"}]}, "no description of an engine"),
        ({"algorithm": "xxhash"}, "plans know sha256 and sha256_cbor"),
        ({"seed": None}, "no description of an engine"),
    ],
)
def test_files_that_describe_no_engine_are_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    path = written(tmp_path / "engine.json")
    path.write_text(json.dumps(msgspec.json.decode(path.read_bytes()) | changes))
    with pytest.raises(SettingsError, match=words):
        BlockPrefixes.read(path)


def test_a_missing_file_is_named_with_what_makes_one(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="cannot be read") as raised:
        BlockPrefixes.read(tmp_path / "none.json")
    assert '"description" in kv_connector_extra_config' in raised.value.cure
    (tmp_path / "text").write_text("not JSON")
    with pytest.raises(SettingsError, match="no description"):
        BlockPrefixes.read(tmp_path / "text")
    (tmp_path / "deep").write_text("[" * 200_000)
    with pytest.raises(SettingsError, match="no description"):
        BlockPrefixes.read(tmp_path / "deep")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SettingsError, match="no regular file"):  # and does not wait for a writer
        BlockPrefixes.read(tmp_path / "pipe")
