"""The dict connector that ours is compared with, over vLLM's own objects."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest

if find_spec("vllm") is None:
    pytest.skip("vLLM is not installed here: run these with `nox -s vllm`", allow_module_level=True)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what vLLM warns of while it is imported is not ours
    import torch
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    from lmcache_bench.engine import dict_connector
    from lmcache_bench.engine.dict_connector import DictConnector

BLOCK, BLOCKS = 16, 12


@pytest.fixture(params=[True, False], ids=["between steps", "within a step"])
def both(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Connectors]:
    monkeypatch.setattr(dict_connector, "between_steps", request.param)
    yield Connectors()
    dict_connector.KEPT.clear()


class Connectors:
    """Both sides, as one engine has them."""

    def __init__(self) -> None:
        spec = SimpleNamespace(block_size=BLOCK)
        groups = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)])
        config: Any = SimpleNamespace(kv_transfer_config=SimpleNamespace())
        self.scheduler = DictConnector(config, KVConnectorRole.SCHEDULER, groups)
        self.worker = DictConnector(config, KVConnectorRole.WORKER, groups)
        self.memory = {name: torch.rand(BLOCKS, 2, BLOCK, 8) for name in ("first", "second")}
        self.worker.register_kv_caches(self.memory)

    def step(self, request: Any, blocks: list[int], scheduled: int) -> set[str]:
        output = SimpleNamespace(
            scheduled_new_reqs=[SimpleNamespace(req_id="a", num_computed_tokens=request.num_computed_tokens)],
            scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[], new_block_ids=[]),
            num_scheduled_tokens={"a": scheduled} if scheduled else {},
            kv_connector_block_state=SimpleNamespace(get_block_ids=lambda request_id: (blocks,)),
        )
        self.worker.bind_connector_metadata(self.scheduler.build_connector_meta(output))
        self.worker.start_load_kv(None)
        self.worker.wait_for_save()
        return self.worker.get_transfer_results(set()).finished_recving


def asked(tokens: int, computed: int = 0) -> SimpleNamespace:
    hashes = [bytes([number]) * 32 for number in range(tokens // BLOCK)]
    return SimpleNamespace(request_id="a", num_tokens=tokens, num_computed_tokens=computed, block_hashes=hashes)


def test_blocks_come_back_into_other_places(both: Connectors) -> None:
    tokens = 3 * BLOCK + 5
    assert both.scheduler.get_num_new_matched_tokens(asked(tokens), 0) == (0, False)
    assert both.step(asked(tokens), [4, 1, 7, 2], tokens) == set()
    both.scheduler.request_finished(asked(tokens), ())
    before = {name: each[[4, 1, 7]].clone() for name, each in both.memory.items()}
    untouched = {name: each[[0, 9]].clone() for name, each in both.memory.items()}
    for each in both.memory.values():
        each[[4, 1, 7, 2]] = 0
    found = both.scheduler.get_num_new_matched_tokens(asked(tokens), 0)
    assert found == (3 * BLOCK, dict_connector.between_steps)
    both.scheduler.update_state_after_alloc(
        asked(tokens), SimpleNamespace(get_block_ids=lambda: ([3, 5, 8, 6],)), found[0]
    )
    told = both.step(asked(tokens, found[0]), [3, 5, 8, 6], 0)
    assert told == ({"a"} if dict_connector.between_steps else set())
    for name, each in both.memory.items():
        assert torch.equal(each[[3, 5, 8]], before[name])
        assert torch.equal(each[[0, 9]], untouched[name])


def test_one_token_is_always_left_and_a_gap_ends_the_prefix(both: Connectors) -> None:
    both.scheduler.get_num_new_matched_tokens(asked(4 * BLOCK), 0)
    both.step(asked(4 * BLOCK), [1, 2, 3, 4], 4 * BLOCK)
    assert both.scheduler.get_num_new_matched_tokens(asked(4 * BLOCK), 0)[0] == 3 * BLOCK
    assert both.scheduler.get_num_new_matched_tokens(asked(5 * BLOCK), BLOCK)[0] == 3 * BLOCK
    del dict_connector.KEPT[bytes([1]) * 32]
    assert both.scheduler.get_num_new_matched_tokens(asked(5 * BLOCK), 0)[0] == BLOCK


def test_what_is_kept_is_a_copy_of_its_time(both: Connectors) -> None:
    both.scheduler.get_num_new_matched_tokens(asked(BLOCK), 0)
    before = both.memory["first"][6].clone()
    both.step(asked(BLOCK), [6], BLOCK)
    both.memory["first"][6] = 0
    assert torch.equal(dict_connector.KEPT[bytes(32)][0], before)
