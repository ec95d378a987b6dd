"""Who may connect: our uid, or the groups that the settings name."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmcache_core.client.client import Client

from ..conftest import Node

NOBODY = 65534
GIDS = (54321, 54322)
STRANGER = 54399

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")


@pytest.fixture
def node(node: Node) -> Iterator[Node]:
    """As `node`, in a directory that other users can walk to."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        node.run = Path(folder) / "run"
        yield node


def as_user(node: Node, gid: int, *more_gids: int) -> str:
    """What a store says in a process of another user and group."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups(more_gids)
            os.setgid(gid)
            os.setuid(NOBODY)
            client = Client.connect(node.name, runtime_dir=node.run)
            status = client.store([node.key((gid, more_gids))], [node.payload(1)], namespace=node.namespace).statuses[0]
            os.write(writing, str(status).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        said = answer.read()
    os.waitpid(pid, 0)
    return said


def test_groups_that_are_listed_may_store_and_others_may_not(node: Node) -> None:
    node.serve("--l1.access", "group", "--l1.gids", str(list(GIDS)))
    assert as_user(node, GIDS[0]) == "stored"
    assert as_user(node, GIDS[1]) == "stored"
    assert as_user(node, STRANGER, GIDS[1]) == "stored"
    assert as_user(node, STRANGER) == "unreachable"
    assert stat.S_IMODE(node.shm.stat().st_mode) == 0o660


def test_by_default_only_our_own_uid_may_connect(node: Node) -> None:
    node.serve()
    assert as_user(node, GIDS[0]) == "unreachable"
    assert stat.S_IMODE(node.shm.stat().st_mode) == 0o600
    assert stat.S_IMODE((node.run / node.name).stat().st_mode) == 0o700
