"""Plans against a real server, and against a look at every order."""

from __future__ import annotations

import itertools
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmcache_blend import Planner
from lmcache_blend.planning import BRANCH_TOKENS, KEY_TOKENS, WALKED_TOKENS_MAX
from lmcache_core import Client, Layout, Namespace
from lmcache_core.errors import UsageError
from lmcache_core.tokens.keys import chunk_keys

CHUNK = 4
SPACE = Namespace("small", Layout("uint8", (64,)))


def store(client: Client, tokens: list[int], chunks: int | None = None) -> None:
    keys = chunk_keys(tokens, SPACE, CHUNK)[:chunks]
    client.store(keys, [bytes(64)] * len(keys), namespace=SPACE)


def reused(client: Client, tokens: list[int]) -> int:
    keys = chunk_keys(tokens, SPACE, CHUNK)
    return client.lookup(keys, namespace=SPACE).hits * CHUNK if keys else 0


def joined(system: list[int], documents: list[list[int]], order: tuple[int, ...], question: list[int]) -> list[int]:
    return [*system, *(token for at in order for token in documents[at]), *question]


text = st.lists(st.integers(0, 2), max_size=9)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_order_of_three_documents_reuses_more(client: Client, data: st.DataObject) -> None:
    client.clear()
    system, question = data.draw(text), data.draw(text)
    documents = data.draw(st.lists(text, max_size=3))
    orders = list(itertools.permutations(range(len(documents))))
    for order in data.draw(st.lists(st.sampled_from(orders), max_size=4)):
        store(client, joined(system, documents, order, question), data.draw(st.none() | st.integers(0, 6)))
    plan = Planner(client, SPACE, CHUNK).plan(system, documents, question)
    assert sorted(plan.order) == list(range(len(documents)))
    prompt = joined(system, documents, plan.order, question)
    assert plan.tokens == len(prompt)
    assert plan.reused_tokens == reused(client, prompt)
    assert plan.reused_tokens == max(reused(client, joined(system, documents, order, question)) for order in orders)


def test_a_plan_of_one_large_chunk_keeps_no_copies_of_its_documents(client: Client) -> None:
    """Nothing is a whole chunk, so every order stays open, and has all of its tokens behind the last chunk."""
    documents = [np.full(200, number) for number in range(64)]
    tracemalloc.start()
    plan = Planner(client, SPACE, 1 << 20).plan(np.zeros(20_000, np.uint32), documents)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (plan.reused_tokens, sorted(plan.order)) == (0, list(range(64)))
    assert peak < 64 << 20  # copies take 80 kB for each of some 16,000 branches


def test_a_stored_order_of_sixteen_is_found_again_from_any_other(client: Client) -> None:
    rng = np.random.default_rng(3)
    documents = [rng.integers(0, 1000, int(length)) for length in rng.integers(3, 30, 16)]
    stored = rng.permutation(16).tolist()
    store(client, np.concatenate([[1, 2, 3], *(documents[at] for at in stored)]))
    plan = Planner(client, SPACE, CHUNK).plan([1, 2, 3], documents, [9] * 10)
    whole = sum(map(len, documents)) + 3
    assert plan.reused_tokens == whole // CHUNK * CHUNK
    assert plan.steps <= 4 * 17
    assert plan.branches <= 17 * 68


def test_what_is_not_stored_goes_by_how_often_it_was_seen(client: Client) -> None:
    planner = Planner(client, SPACE, CHUNK)
    assert planner.plan([], [[1] * 8, [2] * 8]).order == (0, 1)
    assert planner.plan([], [[3] * 8, [2] * 8]).order == (1, 0)
    assert planner.plan([], [[3] * 8, [1] * 8, [2] * 8]).order == (2, 0, 1)


def test_an_adapter_has_prefixes_of_its_own(client: Client) -> None:
    tokens = [*range(40)]
    keys = chunk_keys(tokens, SPACE, CHUNK, extra=b"adapter")
    client.store(keys, [bytes(64)] * len(keys), namespace=SPACE)
    assert Planner(client, SPACE, CHUNK).plan([], [tokens]).reused_tokens == 0
    planned = Planner(client, SPACE, CHUNK, extra=b"adapter").plan([], [tokens[20:], tokens[:20]])
    assert planned == ((1, 0), 40, 40, 3, 6)


def test_nothing_is_reused_without_a_server(tmp_path: Path) -> None:
    with Client.connect("nobody", runtime_dir=tmp_path) as client:
        plan = Planner(client, SPACE, CHUNK).plan([1] * 9, [[2] * 9, [3] * 9], [4])
    assert plan[:3] == ((0, 1), 0, 28)


def test_too_many_documents_are_refused(client: Client) -> None:
    with pytest.raises(UsageError, match="257 documents"):
        Planner(client, SPACE).plan([], [[1]] * 257)


class Everywhere:
    """Prefixes of which everything is stored, in chunks of one token. `named`: how many keys were asked for."""

    chunk_tokens = 1

    def __init__(self) -> None:
        self.named = 0

    def register(self, client: Client) -> None:
        """Nothing to do."""

    def names(self, words: np.ndarray, previous: bytes | None) -> list[bytes]:
        self.named += len(words)
        return [b""] * len(words)

    def stored(self, client: Client, names: list[bytes]) -> int:
        return len(names)


def test_a_walk_is_bounded_by_its_keys_and_branches(tmp_path: Path) -> None:
    with Client.connect("nobody", runtime_dir=tmp_path) as client:
        everywhere = Everywhere()
        plan = Planner(client, everywhere).plan([], [[1] * 230] * 256)
        assert (sorted(plan.order), plan.reused_tokens) == ([*range(256)], 256 * 230)
        assert everywhere.named < WALKED_TOKENS_MAX // KEY_TOKENS + 2 * 256 * 230  # one step more, and the whole prompt
        assert Planner(client, everywhere).plan([], [[]] * 256).branches <= WALKED_TOKENS_MAX // BRANCH_TOKENS + 258


def test_a_plan_counts_as_no_lookup(client: Client) -> None:
    store(client, [*range(40)])
    Planner(client, SPACE, CHUNK).plan([], [[*range(20)], [*range(20, 40)]])
    assert client.status()["traffic"]["lookups"]["keys"] == 0
