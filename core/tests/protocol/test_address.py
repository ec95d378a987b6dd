"""Where a server puts its sockets, and what it says where it cannot."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lmcache_core.errors import UsageError
from lmcache_core.pool.backing import Access
from lmcache_core.protocol.address import make_server_directory


def test_a_runtime_directory_that_cannot_be_made_is_an_error_with_its_cure(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file where a directory should be")
    with pytest.raises(UsageError, match="set runtime_dir"):
        make_server_directory("node", tmp_path / "taken")


def test_a_directory_closed_above_the_servers_own_is_named_when_groups_shall_reach_it(tmp_path: Path) -> None:
    root = tmp_path / "run"
    root.mkdir(mode=0o700)
    with pytest.raises(UsageError, match=f"{root} is closed"):
        make_server_directory("node", root, Access.GROUP, [os.getgid()])
    assert make_server_directory("node", root).stat().st_mode & 0o777 == 0o700  # for us alone it will do
