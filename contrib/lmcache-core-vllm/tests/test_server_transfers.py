"""The workers' side where the copier of the server copies: the same results, whoever dies."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from lmcache_core.client.client import Client
from lmcache_core_vllm.steps import Load, Step
from lmcache_testing.processes import ServerProcess
from lmcache_testing.waiting import until

from .test_worker import HASHING, Rank, blocks

torch = pytest.importorskip("torch")
pytest.importorskip("lmcache_copier")


class CopyingServer(ServerProcess):
    def _command(self) -> list[str]:
        return [*super()._command(), "--copier.threads", "1"]


@pytest.fixture
def server() -> Iterator[CopyingServer]:
    with CopyingServer(64 << 20) as process:
        yield process


def copier(client: Client) -> int:
    """Its process, once it answers."""
    until(lambda: client.status()["operations"]["copier"]["copier"], "the copier's figures")
    return int(client.status()["helpers"]["copier"]["pid"])


@pytest.mark.parametrize("transfer", ["server", "auto"])
def test_blocks_are_stored_and_loaded_by_the_copier_or_by_whom_auto_chose(server: CopyingServer, transfer: str) -> None:
    with server.client() as client:
        copier(client)
        rank = Rank(client, 2, transfer, settings={"transfer": transfer})
        rank.save(Step(HASHING, saves=blocks(rank, [1, 3, 2, 9])))
        kept = [each[[1, 3, 2, 9]].clone() for each in rank.memory]
        for each in rank.memory:
            each.zero_()
        assert rank.load(Step(HASHING, loads=[Load("a", False, blocks(rank, [5, 6, 7, 8]))])) == ({"a"}, set(), set())
        for each, before in zip(rank.memory, kept, strict=True):
            assert torch.equal(each[[5, 6, 7, 8]], before)
            assert not each[:5].any()


def test_a_load_whose_copier_dies_has_failed_and_the_next_one_is_served(server: CopyingServer) -> None:
    with server.client() as client:
        pid = copier(client)
        rank = Rank(client, 1, "dies", settings={"transfer": "server"})
        rank.save(Step(HASHING, saves=blocks(rank, [1, 3, 2, 9])))
        kept = rank.memory[0][[1, 3, 2, 9]].clone()
        os.kill(pid, signal.SIGSTOP)
        rank.side.start_loads(Step(HASHING, loads=[Load("a", False, blocks(rank, [5, 6, 7, 8]))]))
        os.kill(pid, signal.SIGKILL)
        job = rank.side.loading["a"].job
        assert job is not None
        assert job.wait(60)
        told = rank.side.arrived((), idle=True)
        assert (told.failed, told.invalid) == ({"a"}, {5, 6, 7, 8})

        def loaded() -> bool:
            return not rank.load(Step(HASHING, loads=[Load("b", False, blocks(rank, [5, 6, 7, 8]))]))[1]

        until(loaded, "another copier")
        assert torch.equal(rank.memory[0][[5, 6, 7, 8]], kept)
        rank.side.unregister()
        assert rank.side.sleeps
