"""Chunks of a real server: what is found is what was stored, and nothing else, whatever happens in between."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_chunks import HEADS, PREFIX_TOKENS, SIZE, kv, layout_of, prefixes, space, store_missing, targets

from lmcache_blend import Chunks, ChunkSpace, Lengths, Match, Planner, Rope, cut
from lmcache_blend import chunks as module
from lmcache_blend.rope import move
from lmcache_core import Client, Layout, Status
from lmcache_core.errors import UsageError
from lmcache_core.tokens.keys import chunk_keys
from lmcache_testing.embedded import embedded_server
from lmcache_testing.processes import ServerProcess

TEXT = np.random.default_rng(7).integers(2, 1000, 400)


def check_read(chunks: Chunks, tokens: np.ndarray, matches: tuple[Match, ...]) -> None:
    """Every match comes back as the KV of its tokens at their place in this prompt."""
    into = targets_of(matches)
    assert chunks.read(matches, into) == [True] * len(matches)
    for match, layers in zip(matches, into, strict=True):
        own = tokens[match.new_start : match.new_start + match.tokens]
        for (keys, values), (right_keys, right_values) in zip(layers, kv(own.tolist(), match.new_start), strict=True):
            assert np.allclose(keys, right_keys, atol=2e-5)
            assert np.array_equal(values, right_values)


def targets_of(matches: tuple[Match, ...]) -> list:
    return [
        [tuple(np.full((HEADS, match.tokens, SIZE), np.nan, np.float32) for _ in "kv") for _ in range(2)]
        for match in matches
    ]


def test_a_text_is_found_at_another_place_with_its_keys_moved(chunks: Chunks) -> None:
    first = chunks.find(TEXT)
    assert not first.matches
    assert [each.span for each in first.missing] == cut(TEXT, 8, 20, 40)
    assert set(store_missing(chunks, TEXT, first)) == {Status.STORED}
    moved = np.concatenate([[1], np.arange(2000, 2017), TEXT[50:]])
    found = chunks.find(moved)
    assert found.matched_tokens > 250
    assert all(match.old_start == 1 and match.offset == 0 and not match.exact for match in found.matches)
    check_read(chunks, moved, found.matches)
    assert set(store_missing(chunks, TEXT, first)) == {Status.EXISTS}


def test_a_marked_document_is_found_at_any_place(chunks: Chunks) -> None:
    document = TEXT[:90]
    found = chunks.find(document, [(0, 90)])
    assert found.missing[-1].span.end == 90
    store_missing(chunks, document, found)
    for before in (0, 1, 33):
        prompt = np.concatenate([np.arange(1, before + 1), document, TEXT[300:310]])
        found = chunks.find(prompt, [(before, before + 90)])
        assert found.matched_tokens == 90
        assert found.matches[0].exact == (before == 1)
        check_read(chunks, prompt, found.matches)


def test_a_chunk_that_a_text_repeats_is_stored_once(chunks: Chunks) -> None:
    text, marks = np.tile(TEXT[:30], 4), [(at, at + 30) for at in range(0, 120, 30)]
    found = chunks.find(text, marks)
    own = len(found.missing) // 4
    statuses = store_missing(chunks, text, found)
    assert statuses == [Status.STORED] * own + [Status.EXISTS] * 3 * own
    again = chunks.find(text, marks)
    assert again.matched_tokens == 120
    check_read(chunks, text, again.matches)
    assert store_missing(chunks, text, found) == [Status.EXISTS] * 4 * own


def test_matches_begin_behind_the_prefix(chunks: Chunks) -> None:
    prompt = np.concatenate([[1], TEXT])
    store_missing(chunks, prompt, chunks.find(prompt, [(1, 101)]))
    keys = chunk_keys(prompt, prefixes(), PREFIX_TOKENS)[:2]
    data = [np.zeros(layout_of(PREFIX_TOKENS).shape, np.float32)] * 2
    assert chunks.client.store(keys, data, namespace=prefixes()).stored == 2
    found = chunks.find(prompt, [(1, 101)])
    assert found.prefix_tokens == 32
    assert found.prefix_keys == tuple(keys)
    first = next(span for span in cut(prompt, 8, 20, 40, marks=[(1, 101)]) if span.end > 32)
    assert found.matches[0].new_start == 32
    assert found.matches[0].old_start == 33 - first.first
    assert found.matches[0].offset == 32 - first.first
    assert found.matched_tokens == 69
    check_read(chunks, prompt, found.matches)
    assert chunks.find(prompt, [(1, 101)], prefix_hits=0).matched_tokens == 100


def test_every_other_model_salt_prefix_or_rope_has_keys_of_its_own(client: Client) -> None:
    spaces = [
        space(),
        space(tenant_salt="other"),
        space(weights_version="2"),
        space(prefix_tokens=(2,)),
        space(prefix_tokens=()),
        space(format="x"),
        space(lengths=Lengths(8, 20, 48)),
        ChunkSpace("small", layout_of, Rope(100.0, 6, True, (1.0, 0.3, 0.01)), (1,), Lengths(8, 20, 40), 8),
    ]
    store_missing(Chunks(client, spaces[0]), TEXT, Chunks(client, spaces[0]).find(TEXT))
    seen = [Chunks(client, each).find(TEXT).matched_tokens for each in spaces]
    assert seen[0] > 350
    assert seen[6] > 150  # lengths only say where to cut
    assert [*seen[1:6], seen[7]] == [0] * 6
    assert Chunks(client, spaces[0]).find(TEXT, extra=b"adapter").matched_tokens == 0


def test_a_match_counts_where_all_ranks_have_it(client: Client) -> None:
    chunks = Chunks(client, space(kv_ranks=2))
    first = chunks.find(TEXT)
    store_missing(chunks, TEXT, first, rank=0)
    half = chunks.find(TEXT)
    assert not half.matches
    assert half.rank_hits == (len(first.missing), 0)
    assert {each.ranks for each in half.missing} == {(1,)}
    store_missing(chunks, TEXT, half, rank=1)
    assert len(chunks.find(TEXT).matches) == len(first.missing)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_find_is_what_a_look_at_every_chunk_of_every_cut_finds(chunks: Chunks, data: st.DataObject) -> None:
    """The model: a set of (tokens) that were stored, and cuts made by slicing."""
    small = st.lists(st.integers(0, 3), min_size=0, max_size=120)
    texts = data.draw(st.lists(small, min_size=1, max_size=4))
    chunks.client.clear()
    stored = set()
    for text in texts:
        tokens = np.array(text, np.int64)
        store_missing(chunks, tokens, chunks.find(tokens))
        stored |= {tuple(text[first:end]) for first, end in cut(tokens, 8, 20, 40)}
    prompt = [each for text in data.draw(st.permutations(texts)) for each in text]
    tokens = np.array(prompt, np.int64)
    found = chunks.find(tokens)
    spans = [(match.new_start, match.new_start + match.tokens) for match in found.matches]
    assert spans == [span for span in cut(tokens, 8, 20, 40) if tuple(prompt[span[0] : span[1]]) in stored]
    check_read(chunks, tokens, found.matches)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_stored_document_is_found_at_every_mark_and_nowhere_else(chunks: Chunks, data: st.DataObject) -> None:
    """The model: which pieces of documents were stored. Between the marks lies any text, stored documents too."""
    small = st.lists(st.integers(0, 3), min_size=1, max_size=70)
    documents = data.draw(st.lists(small, min_size=1, max_size=3))
    chunks.client.clear()
    stored = set()
    for document in documents[: data.draw(st.integers(1, len(documents)))]:
        tokens, marks = np.array(document, np.int64), [(0, len(document))]
        store_missing(chunks, tokens, chunks.find(tokens, marks))
        stored |= {tuple(document[first:end]) for first, end in cut(tokens, 8, 20, 40, marks=marks)}
    prompt: list[int] = []
    marks = []
    for document, marked in data.draw(st.lists(st.tuples(st.sampled_from(documents) | small, st.booleans()))):
        if marked:
            marks.append((len(prompt), len(prompt) + len(document)))
        prompt += document
    tokens = np.array(prompt, np.int64)
    found = chunks.find(tokens, marks)
    spans = cut(tokens, 8, 20, 40, marks=marks)
    seen = [(match.new_start, match.new_start + match.tokens) for match in found.matches]
    assert seen == [span for span in spans if tuple(prompt[span[0] : span[1]]) in stored]
    check_read(chunks, tokens, found.matches)


@pytest.mark.parametrize("how", ["clear", "evict", "drop"])
def test_what_leaves_between_find_and_read_is_a_miss(chunks: Chunks, how: str) -> None:
    store_missing(chunks, TEXT, chunks.find(TEXT))
    found = chunks.find(TEXT)
    client = chunks.client
    if how == "clear":
        client.clear()
    elif how == "drop":
        for match in found.matches:
            namespace = chunks.space.namespace(match.room)
            seen = client.lookup([match.key], namespace=namespace, identify=True)
            client.drop([match.key], namespace=namespace, incarnations=seen.incarnations)
    else:
        large = prefixes()
        for number in range(64):
            keys = [bytes([number, at]) * 16 for at in range(64)]
            client.store(keys, [np.ones(large.layout.shape, np.float32)] * 64, namespace=large)
    into = targets(found)
    read = chunks.read(found.matches, into)
    now = {match.key for match in chunks.find(TEXT).matches}
    assert len(now) < len(found.matches)
    assert all(not done or match.key in now for done, match in zip(read, found.matches, strict=True))


def test_without_a_server_nothing_is_found_or_stored(tmp_path: Path) -> None:
    with Client.connect("nobody", runtime_dir=tmp_path) as client:
        chunks = Chunks(client, space(), prefixes(), PREFIX_TOKENS)
        found = chunks.find(TEXT)
        assert not found.matches
        assert set(store_missing(chunks, TEXT, found)) == {Status.UNREACHABLE}


def test_a_slot_s_rest_does_not_show_what_was_there_before(chunks: Chunks) -> None:
    secret = np.full(layout_of(8).shape, 7.0, np.float32)
    namespace = chunks.space.namespace(8)
    chunks.client.store([b"s" * 32], [secret], namespace=namespace)
    chunks.client.clear()
    found = chunks.find(TEXT[:3], [(0, 3)])
    store_missing(chunks, TEXT[:3], found)
    into = np.full(layout_of(8).shape, np.nan, np.float32)
    assert chunks.client.retrieve([found.missing[0].keys[0]], [into], namespace=namespace).hits == 1
    assert not into[:, :, :, 3:].any()


@pytest.mark.parametrize(
    ("layers", "says"),
    [
        (1, "1 layers"),
        ("heads", "are asked for"),
        ("dtype", "dtype"),
        ("device", "give a numpy array"),
    ],
)
def test_sources_that_are_no_chunk_are_refused_before_a_slot_is_taken(
    chunks: Chunks, layers: object, says: str
) -> None:
    found = chunks.find(TEXT[:8], [(0, 8)])
    good = kv(TEXT[:8].tolist(), 1)
    wrong = {
        1: good[:1],
        "heads": [(keys[:1], values) for keys, values in good],
        "dtype": [(keys.astype(np.float64), values) for keys, values in good],
        "device": [("keys", values) for keys, values in good],
    }[layers]  # type: ignore[index]
    with pytest.raises(UsageError, match=says):
        chunks.store(found.missing, [wrong])  # type: ignore[list-item]
    assert chunks.store(found.missing, [good]) == [Status.STORED]


def test_layouts_that_are_not_known_are_left_to_their_owner(client: Client) -> None:
    opaque = ChunkSpace("small", lambda tokens: Layout("uint8", (tokens * 100,)), space().rope)
    chunks = Chunks(client, opaque)
    found = chunks.find(TEXT[:80], [(0, 80)])
    with pytest.raises(UsageError, match="copied by their owner"):
        chunks.store(found.missing[:1], [[]])


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_server_that_is_killed_or_stopped_between_find_and_read_changes_no_byte(how: signal.Signals) -> None:
    with ServerProcess(8 << 20) as server, server.client() as client:
        chunks = Chunks(client, space())
        store_missing(chunks, TEXT, chunks.find(TEXT))
        found = chunks.find(TEXT)
        assert found.matched_tokens > 350
        os.kill(server.pid, how)
        try:
            check_read(chunks, TEXT, found.matches)  # the pool outlives it, and nobody writes there
            again = chunks.find(TEXT)
            assert again.matches == found.matches
        finally:
            if how is signal.SIGSTOP:
                os.kill(server.pid, signal.SIGCONT)


def test_who_only_looks_finds_what_others_store_with_every_next_server(tmp_path: Path) -> None:
    """Another session stores: this one has nothing that would register its namespaces with a new server."""
    tables: dict[str, Any] = {"name": "again", "l1": {"size_bytes": 8 << 20, "backing": "memfd"}}
    with Client.connect("again", runtime_dir=tmp_path / "run") as client:
        looking, planner = (
            Chunks(client, space(), prefixes(), PREFIX_TOKENS),
            Planner(client, prefixes(), PREFIX_TOKENS),
        )
        for _ in range(2):
            with embedded_server(tmp_path, None, **tables) as server, server.connect() as other:
                own = Chunks(other, space(), prefixes(), PREFIX_TOKENS)
                store_missing(own, TEXT, own.find(TEXT))
                keys = chunk_keys(TEXT, prefixes(), PREFIX_TOKENS)
                data = [np.zeros(layout_of(PREFIX_TOKENS).shape, np.float32)] * len(keys)
                assert other.store(keys, data, namespace=prefixes()).stored == len(keys)
                assert looking.find(TEXT).prefix_tokens == 400
                assert looking.find(TEXT, prefix_hits=0).matched_tokens > 350
                assert planner.plan([], [TEXT]).reused_tokens == 400


@pytest.mark.parametrize("way", ["store", "read"])
def test_a_server_that_dies_during_a_copy_is_a_status_and_no_error(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with ServerProcess(8 << 20) as server, server.client() as client:
        chunks = Chunks(client, space())
        found = chunks.find(TEXT)
        if way == "read":
            store_missing(chunks, TEXT, found)
            found = chunks.find(TEXT)

        def killing(*arguments: Any) -> None:
            os.kill(server.pid, signal.SIGKILL)
            move(*arguments)

        monkeypatch.setattr(module, "move", killing)
        if way == "read":
            check_read(chunks, TEXT, found.matches)  # nobody has taken the pool over
        else:
            assert set(store_missing(chunks, TEXT, found)) <= {Status.UNREACHABLE, Status.EXPIRED}
            assert not chunks.find(TEXT).matches


def test_what_another_session_clears_during_a_copy_is_a_miss(chunks: Chunks, monkeypatch: pytest.MonkeyPatch) -> None:
    store_missing(chunks, TEXT, chunks.find(TEXT))
    found = chunks.find(TEXT)

    def clearing(*arguments: Any) -> None:
        move(*arguments)
        chunks.client.clear()

    monkeypatch.setattr(module, "move", clearing)
    assert not any(chunks.read(found.matches, targets(found)))
