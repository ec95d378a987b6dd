"""Encoder outputs of one engine, found by another: over vLLM's own factory, mixin of the workers, and requests.

No multimodal model runs here, so the tests do what vLLM's scheduler and model runner do, in their order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_engines import Server, is_written

from lmcache_core.errors import SettingsError
from lmcache_testing.waiting import until


@pytest.fixture(scope="module")
def server(serve: Callable[..., Server], tmp_path_factory: pytest.TempPathFactory) -> Server:
    return serve("--l2.disk.type", "fs", "--l2.disk.path", str(tmp_path_factory.mktemp("disk")))


class Instance:
    """An engine's two connectors, made by vLLM, and a cache of its own."""

    def __init__(self, folder: Path, server: Server, role: str, device: str, /, **settings: Any) -> None:
        from vllm.config import CacheConfig, DeviceConfig, ECTransferConfig, ModelConfig, ParallelConfig, VllmConfig
        from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole
        from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory

        found = {"server": server.name, "runtime_dir": str(server.runtime_dir), "lookup_timeout_s": 30.0, **settings}
        self.config = VllmConfig(
            model_config=ModelConfig(model=str(folder), dtype="float32", skip_tokenizer_init=True),
            cache_config=CacheConfig(block_size=16),
            parallel_config=ParallelConfig(),
            device_config=DeviceConfig(device="cpu"),
            ec_transfer_config=ECTransferConfig(
                ec_connector="LMCacheCoreECConnector",
                ec_connector_module_path="lmcache_core_vllm",
                ec_role="ec_both",
                ec_connector_extra_config=found,
            ),
        )
        self.config.ec_transfer_config.ec_role = role  # type: ignore[union-attr]  # vLLM wants a real model of producers
        self.config.device_config.device_type = device
        make = ECConnectorFactory.create_connector
        self.scheduler: Any = make(self.config, ECConnectorRole.SCHEDULER)
        self.worker: Any = make(self.config, ECConnectorRole.WORKER)
        self.cache: dict[str, Any] = {}

    def step(self, request: Any, monkeypatch: pytest.MonkeyPatch, encode: Callable[[str], Any]) -> list[str]:
        """One step with one request; returns what the encoder had to compute."""
        from vllm.distributed.ec_transfer import ec_transfer_state
        from vllm.v1.worker.ec_connector_model_runner_mixin import ECConnectorModelRunnerMixin as Mixin

        monkeypatch.setattr(ec_transfer_state, "_EC_CONNECTOR_AGENT", self.worker)
        until(lambda: self.scheduler.ensure_cache_available(request, 0))
        to_encode = []
        for index, feature in enumerate(request.mm_features):
            if not self.scheduler.has_cache_item(feature.identifier):
                to_encode.append(feature.identifier)
            self.scheduler.update_state_after_alloc(request, index)
        output = SimpleNamespace(finished_req_ids=set(), ec_connector_metadata=None)
        output.ec_connector_metadata = self.scheduler.build_connector_meta(output)
        with Mixin.maybe_get_ec_connector_output(output, encoder_cache=self.cache):
            for name in to_encode:
                self.cache[name] = encode(name)
                Mixin.maybe_save_ec_to_connector(self.cache, name)
        assert self.scheduler.request_finished(request) == (False, None)
        return to_encode

    def end(self) -> None:
        for each in (self.scheduler, self.worker):
            each.shutdown()


@pytest.fixture
def instance(llama: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Instance]]:
    from lmcache_core_vllm import encoder

    monkeypatch.setattr(encoder, "get_tp_group", lambda: SimpleNamespace(rank_in_group=0))  # no ranks are set up here
    made: list[Instance] = []

    def make(role: str = "ec_both", device: str = "cpu", **settings: Any) -> Instance:
        made.append(Instance(llama, server, role, device, **settings))
        return made[-1]

    yield make
    for each in made:
        each.end()


def request_of(*names: str) -> Any:
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    features = [
        MultiModalFeatureSpec(None, "image", name, PlaceholderRange(offset=4 + 40 * at, length=32))
        for at, name in enumerate(names)
    ]
    return Request("a", list(range(4 + 40 * len(names))), SamplingParams(max_tokens=1), None, mm_features=features)


def encoded(name: str, tokens: int = 700, width: int = 512, dtype: str = "float32") -> Any:
    """What an encoder makes of it; always the same."""
    import torch

    torch.manual_seed(int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little"))
    return torch.randn(tokens, width).to(getattr(torch, dtype))


@pytest.mark.parametrize(("tokens", "dtype"), [(1, "float32"), (700, "float32"), (700, "bfloat16")])
def test_what_one_engine_has_encoded_another_one_reads(
    instance: Callable[..., Instance], monkeypatch: pytest.MonkeyPatch, tokens: int, dtype: str
) -> None:
    import torch

    names = [f"cat {tokens} {dtype}", f"dog {tokens} {dtype}"]

    def encode(name: str) -> Any:
        return encoded(name, tokens, dtype=dtype)

    producer, consumer = instance("ec_producer"), instance("ec_consumer")
    assert producer.step(request_of(*names), monkeypatch, encode) == names
    assert producer.scheduler.has_cache_item(names[0])  # which is not encoded again
    third = f"bird {tokens} {dtype}"
    assert consumer.step(request_of(*names, third), monkeypatch, encode) == [third]
    for name in names:
        assert consumer.cache[name].dtype == getattr(torch, dtype)
        assert torch.equal(consumer.cache[name], encode(name))
    assert not producer.scheduler.has_cache_item(third)  # a consumer stores nothing


def test_outputs_come_back_from_a_tier(
    instance: Callable[..., Instance], server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    engine = instance()
    assert engine.step(request_of("tree"), monkeypatch, encoded) == ["tree"]
    with server.client() as client:
        until(lambda: is_written(client.status()["tiers"]["stores"]))
        client.clear()  # of the pool
    engine.cache.clear()
    assert engine.step(request_of("tree"), monkeypatch, encoded) == []
    assert torch.equal(engine.cache["tree"], encoded("tree"))


def test_an_output_of_which_a_piece_is_gone_is_encoded(
    instance: Callable[..., Instance], server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = instance(salt="pieces")
    engine.step(request_of("house"), monkeypatch, encoded)
    outputs = engine.scheduler.outputs
    count = outputs.size("house")
    assert count > 2
    key = outputs.keys("house", range(2, 3))
    found = outputs.client.lookup(key, namespace=outputs.namespace, identify=True)
    with server.client() as client:
        until(lambda: is_written(client.status()["tiers"]["stores"]))
    assert outputs.client.drop(key, namespace=outputs.namespace, incarnations=found.incarnations) == 1
    engine.cache.clear()
    assert engine.step(request_of("house"), monkeypatch, encoded) == ["house"]
    engine.cache.clear()
    assert engine.step(request_of("house"), monkeypatch, encoded) == []  # the missing piece was stored again


def test_what_was_promised_is_there_though_the_pool_is_cleared_before_the_step(
    instance: Callable[..., Instance], server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    engine, request = instance(salt="promised"), request_of("river")
    engine.step(request, monkeypatch, encoded)
    engine.cache.clear()
    promise = engine.scheduler.update_state_after_alloc

    def cleared(*given: Any) -> None:
        with server.client() as client:
            client.clear(tiers=True)
        promise(*given)

    engine.scheduler.update_state_after_alloc = cleared
    assert engine.step(request, monkeypatch, encoded) == []
    assert torch.equal(engine.cache["river"], encoded("river"))


def test_other_weights_salts_and_identifiers_share_nothing(
    instance: Callable[..., Instance], monkeypatch: pytest.MonkeyPatch
) -> None:
    instance().step(request_of("hill"), monkeypatch, encoded)
    for other in (instance(salt="s"), instance(weights_version="2"), instance(model="another")):
        assert other.step(request_of("hill"), monkeypatch, encoded) == ["hill"]
    assert instance().step(request_of("hills"), monkeypatch, encoded) == ["hills"]


def test_without_a_server_everything_is_encoded(
    instance: Callable[..., Instance], monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = instance(server="nobody", lookup_timeout_s=0.2)
    for _ in range(2):
        assert alone.step(request_of("sea"), monkeypatch, encoded) == ["sea"]


def test_an_output_that_is_too_large_is_not_stored(
    instance: Callable[..., Instance], monkeypatch: pytest.MonkeyPatch
) -> None:
    from lmcache_core_vllm.encoder_outputs import OUTPUT_BYTES_MAX

    engine = instance()

    def large(name: str) -> Any:
        return encoded(name, OUTPUT_BYTES_MAX // 4 // 4096 + 1, 4096)

    assert engine.step(request_of("film"), monkeypatch, large) == ["film"]
    assert engine.step(request_of("film"), monkeypatch, large) == ["film"]


def test_settings_of_kv_are_refused_by_name(instance: Callable[..., Instance]) -> None:
    with pytest.raises(SettingsError, match="ec_connector_extra_config has no setting 'kv_shards'"):
        instance(kv_shards=4)


def test_outputs_on_a_gpu_are_refused_unless_one_wants_to_try(instance: Callable[..., Instance]) -> None:
    with pytest.raises(SettingsError, match=r"on cuda: .*unproven_ok.*ec_connector_extra_config"):
        instance(device="cuda")
    instance(device="cuda", unproven_ok=True)
