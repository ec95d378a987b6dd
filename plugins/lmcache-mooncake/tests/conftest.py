"""A real master and a node for each session of tests, emptied for each test."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

# The cluster is a service of the matrix.
sys.path.insert(0, str(Path(__file__).parents[3] / "tests" / "matrix"))

from services.mooncake_cluster import MooncakeCluster


@pytest.fixture(scope="session")
def any_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeCluster]:
    need_wheel()
    cluster = MooncakeCluster(tmp_path_factory.mktemp("mooncake"))
    yield cluster
    cluster.close()


@pytest.fixture
def cluster(any_cluster: MooncakeCluster) -> MooncakeCluster:
    any_cluster.door().ask("wipe")
    return any_cluster


@pytest.fixture
def own_cluster(tmp_path: Path) -> Iterator[Callable[..., MooncakeCluster]]:
    """Clusters that a test may break."""
    need_wheel()
    made: list[MooncakeCluster] = []

    def make(node_bytes: int = 64 << 20, nodes: int = 1, *options: str) -> MooncakeCluster:
        made.append(MooncakeCluster(tmp_path, node_bytes, nodes, *options))
        return made[-1]

    yield make
    for cluster in made:
        cluster.close()


def need_wheel() -> None:
    if find_spec("mooncake") is None:
        words = "Mooncake is not installed (pip install mooncake-transfer-engine-non-cuda)"
        if os.environ.get("LMCACHE_CORE_MATRIX"):
            pytest.fail(words)
        pytest.skip(words)
