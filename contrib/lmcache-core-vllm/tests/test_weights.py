"""Which weights an engine computes with, without vLLM: what its configuration says, what lies there, and what changes
while it runs."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lmcache_core.client.client import Client
from lmcache_core_vllm.config import ConnectorConfig
from lmcache_core_vllm.namespaces import GroupFacts, Hashing, RankFacts
from lmcache_core_vllm.steps import Blocks, Load, Step
from lmcache_core_vllm.tensors import layer_regions
from lmcache_core_vllm.weights import Adapters, Weights, weights_of
from lmcache_core_vllm.worker import WorkerSide
from lmcache_testing.processes import ServerProcess

SETTINGS = ConnectorConfig(step_wait_s=20, load_timeout_s=20, lookup_timeout_s=20)


class Revision(str):
    """As huggingface_hub has it: a name that knows its commit."""

    resolved = "c" * 40


@dataclass
class Model:
    """The fields of vLLM's `ModelConfig` that are used."""

    model: Any
    revision: str | None = None
    model_weights: str = ""

    @property
    def hf_config(self) -> SimpleNamespace:
        return SimpleNamespace(architectures=["LlamaForCausalLM"])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def found(model: Any, load_format: str = "auto", /, **settings: Any) -> tuple[str, str]:
    weights = weights_of(model, load_format, ConnectorConfig.parse(settings))
    return weights.model, weights.version


def test_a_folder_is_its_content_and_no_path(folder: Path, tmp_path: Path) -> None:
    before = found(Model(folder))
    assert before[0] == "LlamaForCausalLM"
    assert found(Model(shutil.copytree(folder, tmp_path / "copy"))) == before
    (folder / "model.safetensors").write_bytes(b"other weights")
    assert found(Model(folder))[1] != before[1]
    assert weights_of(Model(folder), "auto", ConnectorConfig()).name == str(folder)


def test_a_repository_is_its_name_and_commit() -> None:
    assert found(Model("organisation/model", Revision("main"))) == ("organisation/model", "c" * 40)


def test_what_the_operator_says_counts(folder: Path) -> None:
    assert found(Model(folder), model="ours", weights_version="7") == ("ours", "7")
    assert found(Model(folder), model="ours")[0] == "ours"
    assert found(Model(folder), model="ours") != found(Model(folder), model="ours", weights_fingerprint="whole")
    assert found(Model(folder, "r1"), weights_fingerprint="off") == (str(folder), "r1")


def test_weights_that_nobody_can_look_at_are_known_by_name_with_a_warning(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert found(Model(folder), "dummy") == (str(folder), "")
    assert not caplog.messages
    assert found(Model(folder, model_weights="s3://bucket/model")) == (str(folder), "")
    assert found(Model(tmp_path / "none")) == (str(tmp_path / "none"), "")
    for message in caplog.messages:
        assert "unless you give each a weights_version in kv_connector_extra_config" in message
    assert "the weights at s3://bucket/model cannot be looked at" in caplog.messages[0]
    assert len(caplog.messages) == 2


@dataclass
class Adapter:
    """The fields of vLLM's `LoRARequest`."""

    path: str
    adapter_id: int = 1
    name: str = "one"
    load_inplace: bool = False


def test_an_adapter_is_what_the_engine_has_loaded(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    adapters, file = Adapters(ConnectorConfig()), folder / "model.safetensors"
    first = adapters.version_of(Adapter(str(folder)))
    assert first
    assert adapters.version_of(Adapter(str(folder))) == first
    file.write_bytes(b"other weights")
    for _ in range(2):  # who knows which of the two the engine has
        assert adapters.version_of(Adapter(str(folder))) is None
    (message,) = caplog.messages
    assert message.startswith("nothing of the adapter one is cached: its files have changed")
    file.write_bytes(b"weights")
    assert adapters.version_of(Adapter(str(folder))) is None
    assert adapters.version_of(Adapter(str(folder), 2)) == first
    assert adapters.version_of(Adapter(str(folder), load_inplace=True)) == first
    shutil.rmtree(folder)
    assert adapters.version_of(Adapter(str(folder), 2)) is None
    assert "cannot be read" in caplog.messages[1]


def test_an_adapter_without_files_here_is_its_name() -> None:
    assert Adapters(ConnectorConfig()).version_of(None) == ""
    assert Adapters(ConnectorConfig()).version_of(Adapter("organisation/adapter")) == ""
    assert Adapters(ConnectorConfig(weights_fingerprint="off")).version_of(Adapter("/none")) == ""


# --- while the engine runs ------------------------------------------------------------------------------------------

torch = pytest.importorskip("torch")
BLOCKS, BYTES = 8, 4096
HASHING = Hashing("sha256", "0")
OLD, NEW = Weights("m", "old", "m", "/m"), Weights("m", "new", "m", "/m2")
RANK = RankFacts("", "", (0, 1), True, (GroupFacts((), BYTES),)).computing_with(OLD)


@pytest.fixture
def worker() -> Iterator[WorkerSide]:
    memory = {"a": torch.randint(0, 256, (BLOCKS, 1, 1, BYTES), dtype=torch.uint8)}
    with ServerProcess(16 << 20) as server:
        client: Client = server.client()
        worker = WorkerSide(SETTINGS, client, RANK, [layer_regions(["a"], memory, BLOCKS)], path="/m")
        yield worker
        worker.close()


def saved(worker: WorkerSide, step: Step, path: str) -> dict[str, float]:
    worker.begin_step(step, path)
    worker.end_step(step)
    for each in worker.saving:
        each.job.wait()
    worker.hear_saves()
    return worker.counters.take()


def loads(worker: WorkerSide, step: Step, path: str) -> set[str]:
    worker.begin_step(step, path)
    worker.start_loads(step)
    for loading in worker.loading.values():
        if loading.job is not None:
            loading.job.wait()
    worker.end_step(step)
    return worker.arrived((), idle=True).failed


def test_blocks_of_other_weights_are_others_and_of_unknown_ones_none(
    worker: WorkerSide, caplog: pytest.LogCaptureFixture
) -> None:
    blocks = [Blocks(0, [b"h" * 32], [1])]
    with caplog.at_level(logging.WARNING):
        assert saved(worker, Step(HASHING, number=1, saves=blocks), "/m")["save_blocks"] == 1
        # Reloaded from elsewhere, which the scheduler does not know of yet.
        for number in (2, 3):
            assert saved(worker, Step(HASHING, number=number, saves=blocks), "/m2") == {"save_tainted_blocks": 1}
        assert loads(worker, Step(HASHING, number=4, loads=[Load("a", False, blocks, 1)]), "/m2") == {"a"}
        assert [each for each in caplog.messages if each.startswith("nothing is cached")] == [
            "nothing is cached: the engine's weights are from /m2 now, and were from /m"
        ]
    new = {"weights": NEW}
    assert loads(worker, Step(HASHING, number=5, loads=[Load("b", False, blocks, 2)], **new), "/m2") == {"b"}
    worker.counters.take()
    assert saved(worker, Step(HASHING, number=6, saves=blocks, **new), "/m2")["save_blocks"] == 1
    assert loads(worker, Step(HASHING, number=7, loads=[Load("c", False, blocks, 3)], **new), "/m2") == set()


def test_blocks_of_an_adapter_have_keys_of_its_version(worker: WorkerSide) -> None:
    plain, one, two = (Blocks(0, [b"h" * 32], [1], adapter=each) for each in ("", "1", "2"))
    keys = [each.entry(HASHING, worker.namespaces).keys[0] for each in (plain, one, two)]
    assert len(set(keys)) == 3
    assert keys[0] == HASHING.keys([b"h" * 32], worker.namespaces[0])[0]
