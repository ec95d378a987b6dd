"""Prompts whose documents are put into the order of which most is stored, in a process that is not the engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_keys import BLOCK, Setup
from vllm_engines import Engine, Server, prompt

from lmcache_core import Client
from lmcache_core_vllm.groups import Group, Kind
from lmcache_core_vllm.namespaces import Hashing, namespaces_of
from lmcache_core_vllm.planning import BlockPrefixes, described

SYSTEM, QUESTION = prompt(1, 140), prompt(2, 30)
DOCUMENTS = [prompt(seed, 300 + seed) for seed in range(3, 8)]


def test_a_planned_order_hits_more_and_answers_as_that_order_does(
    start: Callable[..., Engine], serve: Callable[..., Server], llama: Path, tmp_path: Path
) -> None:
    blend = pytest.importorskip("lmcache_blend")
    server, file = serve(), tmp_path / "engine.json"
    plain = start(llama, enable_prefix_caching=False)
    cached = start(llama, server.settings(description=str(file), salt="a secret"))

    def asked(order: Any) -> tuple[int, list[int]]:
        tokens = [*SYSTEM, *(token for at in order for token in DOCUMENTS[at]), *QUESTION]
        (found,) = cached.generate(tokens)
        cached.saved()
        cached.forget()
        return found["cached"], tokens

    assert asked((0, 1, 2))[0] == 0
    prefixes = BlockPrefixes.read(file)
    assert file.stat().st_mode & 0o077 == 0  # whoever reads it can derive keys
    with Client.connect(server.name, runtime_dir=server.runtime_dir) as client:
        planner = blend.Planner(client, prefixes)
        chosen = [2, 4, 1, 0]  # of which three were in a prompt before, in another order
        plan = planner.plan(SYSTEM, [DOCUMENTS[at] for at in chosen], QUESTION)
        planned = [chosen[at] for at in plan.order]
        assert planned == [0, 1, 2, 4]
        hits, tokens = asked(planned)
        assert hits == plan.reused_tokens > 7 * 128
        assert cached.generate(tokens)[0]["tokens"] == plain.generate(tokens)[0]["tokens"]
        assert asked(chosen)[0] == 128  # the system prompt alone
        nothing = blend.Planner(client, BlockPrefixes.read(file, cache_salt="another tenant"))
        assert nothing.plan(SYSTEM, DOCUMENTS, QUESTION).reused_tokens == 0


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor"])
@pytest.mark.parametrize("salt", ["", "a tenant's"])
def test_block_hashes_are_the_engines(llama: Path, monkeypatch: pytest.MonkeyPatch, algorithm: str, salt: str) -> None:
    setup = Setup(llama)
    setup.config.cache_config.prefix_caching_hash_algo = algorithm
    setup.request = {"cache_salt": salt} if salt else {}
    wanted = setup.keys(monkeypatch)  # of three blocks of 16
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core import kv_cache_utils

    hasher = kv_cache_utils.get_request_block_hasher(BLOCK, get_hash_fn_by_name(algorithm))
    hashes = setup.made_request(hasher).block_hashes
    assert len(wanted) == len(hashes) == 3
    namespace = _namespace()
    for per_block in (1, 3):
        groups = [Group(0, Kind.FULL, BLOCK * per_block, per_block)]
        about = described(groups, [[namespace]], Hashing(algorithm, kv_cache_utils.get_none_hash_seed()))
        prefixes = BlockPrefixes(about, salt)
        words = _words(prompt(1, 3 * BLOCK + 5))
        names = prefixes.names(words, None)
        assert names == [bytes(each) for each in hashes][per_block - 1 :: per_block]
        if per_block == 1:
            assert prefixes.names(words[BLOCK:], names[0]) == names[1:]


def _namespace() -> Any:
    from lmcache_core_vllm.namespaces import GroupFacts, RankFacts

    return namespaces_of(RankFacts("tiny", "", (0, 1), True, (GroupFacts((), 4096),)), "")[0]


def _words(tokens: list[int]) -> Any:
    import numpy as np

    return np.array(tokens, np.uint32)
