"""The package as a plugin: settings, entry point, check."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import ValidationError

from lmcache_block.settings import BlockSettings
from lmcache_core.errors import TierError
from lmcache_core.plugins.components import Finding

from .conftest import Tier


def checked(tier: Tier) -> list[Finding]:
    return list(tier.adapter.check(tier.deadline))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"path": "cache"}, "absolute"),
        ({"path": "/m", "size_bytes": "1MiB"}, "4194304"),
        ({"path": "/m", "size_bytes": 8_000_000}, "multiple of 4096"),
        ({"path": "/m", "extent_bytes": "2GiB"}, "1074790400"),
        ({"path": "/m", "fsink": True}, "fsink"),
    ],
)
def test_settings_refuse_what_cannot_be_meant(settings: dict[str, object], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        BlockSettings(**settings)  # type: ignore[arg-type]


def test_check_of_a_missing_file_tries_a_small_one_and_leaves_nothing(
    tier: Callable[..., Tier], tmp_path: Path
) -> None:
    findings = checked(tier(tmp_path / "medium"))
    assert [finding.ok for finding in findings] == [True, True]
    assert "a server will make a file of 0.0 GiB" in findings[-1].message
    assert list(tmp_path.iterdir()) == []


def test_check_of_a_file_that_does_not_fit_has_a_cure(tier: Callable[..., Tier]) -> None:
    last = checked(tier(size_bytes="1000TiB"))[-1]
    assert (last.ok, "l2.nvme.size_bytes" in last.cure) == (False, True)


def test_check_of_an_empty_medium_formats_nothing(tier: Callable[..., Tier], tmp_path: Path) -> None:
    with (tmp_path / "medium").open("wb") as file:
        file.truncate(8 << 20)
    (finding,) = checked(tier(size_bytes=None))
    assert (finding.ok, "a server will format it" in finding.message) == (True, True)
    assert not (tmp_path / "medium").read_bytes().strip(b"\0")


def test_check_of_a_medium_in_use_by_its_process_stores_and_loads(tier: Callable[..., Tier]) -> None:
    one = tier()
    one.store(b"k", os.urandom(5000))
    tried, size = (finding.message for finding in checked(one))
    assert tried == "an object was stored, loaded and deleted"
    assert size.startswith("1 objects on 14 extents of 1 MiB")


def test_check_of_somebody_elses_file_raises_with_the_cure(tier: Callable[..., Tier], tmp_path: Path) -> None:
    (tmp_path / "medium").write_bytes(b"diary" * (1 << 20))
    with pytest.raises(TierError) as raised:
        checked(tier())
    assert "write zeros over its first and last MiB" in raised.value.cure


def test_check_in_a_folder_that_takes_no_file_names_the_folder(tier: Callable[..., Tier], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(TierError):
        checked(tier(tmp_path / "file" / "medium"))
