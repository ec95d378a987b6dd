"""Directories that the server's user may not use. Root may use them all, so as root these tests become another user."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lmcache_core.errors import TierError
from lmcache_core.tiers.contract import AdapterContext, LoadItem, StoreItem
from lmcache_fs.adapter import FsAdapter
from lmcache_fs.settings import FsSettings
from lmcache_testing.embedded import Json

NOBODY = 65534


@pytest.fixture
def folder() -> Iterator[Path]:
    """A directory that other users can walk to, with a tier's directory of theirs in it."""
    with tempfile.TemporaryDirectory() as path:
        Path(path).chmod(0o755)
        tier = Path(path) / "tier"
        tier.mkdir(mode=0o700)
        if os.geteuid() == 0:
            os.chown(tier, NOBODY, NOBODY)
        yield tier


def unprivileged(work: Callable[[], Json]) -> Json:
    """What `work` returns in a child process that may do no more than any user."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reading)
            if os.geteuid() == 0:
                os.setgroups([])
                os.setresgid(NOBODY, NOBODY, NOBODY)
                os.setresuid(NOBODY, NOBODY, NOBODY)
            os.write(writing, json.dumps(work()).encode())
        except BaseException as error:  # noqa: BLE001 - said by the parent, in which a test can fail
            os.write(writing, json.dumps({"error": repr(error)}).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        said = answer.read()
    os.waitpid(pid, 0)
    return json.loads(said)


def everything(folder: Path) -> Callable[[], Json]:
    """Every method's answer on this directory: outcome, words, and whether the lane would try again."""

    def work() -> Json:
        said: Json = {"uid": os.geteuid()}
        deadline = time.monotonic() + 60
        with FsAdapter(FsSettings(path=folder), AdapterContext(tier="disk")) as adapter:
            stored = adapter.store([StoreItem(b"k", [memoryview(b"content")])], deadline)[0]
            said["store"] = [str(stored.result), stored.error, stored.retryable]
            back = bytearray(7)
            loaded = adapter.load([LoadItem(b"k", [memoryview(back)])], deadline)[0]
            said["load"] = [str(loaded.result), loaded.error, loaded.retryable]
            try:
                said["scan"] = ["done", len(adapter.scan(None, deadline).entries), False]
            except TierError as error:
                said["scan"] = ["failed", str(error), error.retryable]
        return said

    return work


def test_a_directory_that_may_not_be_written_to_is_named_with_the_right_it_needs(folder: Path) -> None:
    folder.chmod(0o500)
    said = unprivileged(everything(folder))
    assert said["uid"] != 0
    result, words, retryable = said["store"]
    assert (result, retryable) == ("failed", False)
    assert "right to read and write" in words
    assert str(folder) in words
    assert said["load"][0] == "miss", "what is not there is not there"
    folder.chmod(0o700)
    assert unprivileged(everything(folder))["store"][0] == "done", "no restart was needed"


def test_a_directory_that_may_not_be_read_is_no_empty_one(folder: Path) -> None:
    assert unprivileged(everything(folder))["scan"] == ["done", 1, False]
    (folder / "objects").chmod(0)
    result, words, _ = unprivileged(everything(folder))["scan"]
    assert result == "failed"
    assert "right to read and write" in words
    (folder / "objects").chmod(0o700)
    assert unprivileged(everything(folder))["scan"] == ["done", 1, False]


def test_a_shard_that_may_not_be_entered_costs_only_what_is_in_it(folder: Path) -> None:
    keys = [b"a" * 44, b"b" * 44]

    def work() -> Json:
        deadline = time.monotonic() + 60
        with FsAdapter(FsSettings(path=folder), AdapterContext(tier="disk")) as adapter:
            adapter.store([StoreItem(key, [memoryview(b"content")]) for key in keys], deadline)
            shut = next(folder.glob(f"objects/*/{keys[0].hex()}")).parent
            shut.chmod(0)
            found = list(adapter.exists(keys, deadline))
            loaded = adapter.load([LoadItem(key, [memoryview(bytearray(7))]) for key in keys], deadline)
            try:
                alone = str(adapter.exists(keys[:1], deadline))
            except TierError as error:
                alone = str(error)
            shut.chmod(0o700)
        return {"found": found, "loaded": [str(each.result) for each in loaded], "alone": alone}

    said = unprivileged(work)
    assert said["found"] == [False, True], said
    assert said["loaded"] == ["failed", "done"]
    assert "give the server's user the right to read and write" in said["alone"]


def test_a_directory_that_is_missing_and_cannot_be_made_is_no_empty_one(folder: Path) -> None:
    folder.chmod(0o500)
    inside = folder / "deeper"
    result, words, _ = unprivileged(everything(inside))["scan"]
    assert result == "failed"
    assert str(inside) in words
    folder.chmod(0o700)
    assert unprivileged(everything(inside))["scan"][0] == "done"


def test_check_finds_a_directory_that_may_not_be_written_to(folder: Path) -> None:
    folder.chmod(0o500)

    def work() -> str:
        with FsAdapter(FsSettings(path=folder), AdapterContext(tier="disk")) as adapter:
            with pytest.raises(TierError) as raised:
                list(adapter.check(time.monotonic() + 60))
        return raised.value.cure

    assert unprivileged(work) == f"make {folder} a directory that user {_user()} may read and write"


def _user() -> int:
    return NOBODY if os.geteuid() == 0 else os.getuid()
