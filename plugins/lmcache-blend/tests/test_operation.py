"""The operation in a real server, with a disk: what it answers is what the library finds."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import socket
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from small_chunks import PREFIX_TOKENS, layout_of, prefixes, space, store_missing

from lmcache_blend import Chunks, ChunkSpace, Lengths, Rope, described, operation
from lmcache_blend.chunks import ANSWER_S
from lmcache_blend.described import registration
from lmcache_blend.messages import (
    LISTED_MAX,
    WAIT_S_MAX,
    Answer,
    BlendRequest,
    ListSpaces,
    PlanPrompt,
    RegisterRope,
    Space,
    UnifiedLookup,
    UnregisterRope,
)
from lmcache_blend.operation import OPERATION, SPACES_MAX
from lmcache_core import Client, Namespace, Server
from lmcache_core.errors import LimitError, UsageError
from lmcache_core.limits import CALL_TIMEOUT_S
from lmcache_core.tokens.keys import chunk_keys
from lmcache_testing import OperationContract
from lmcache_testing.embedded import embedded_server
from lmcache_testing.waiting import WAIT_S, until

pytest.importorskip("lmcache_fs")

TEXT = np.random.default_rng(7).integers(2, 1000, 400)


@pytest.fixture
def client(start: Callable[..., Server], tmp_path: Path) -> Iterator[Client]:
    server = start(
        l1={"size_bytes": 8 << 20, "backing": "memfd"}, l2={"disk": {"type": "fs", "path": str(tmp_path / "disk")}}
    )
    with server.connect() as client:
        yield client


def call(client: Client, request: msgspec.Struct) -> Answer:
    return client.call_operation(OPERATION, BlendRequest(request), Answer)  # type: ignore[arg-type]


def drop(chunks: Chunks) -> None:
    """From the pool, once they are on the disk."""
    found = chunks.find(TEXT)
    for match in found.matches:
        for rank, key in enumerate(match.keys):
            namespace = chunks.space.namespace(match.room, rank)
            assert all(each.stored for each in chunks.client.wait_stored([key], namespace=namespace))
            seen = chunks.client.lookup([key], namespace=namespace, identify=True)
            chunks.client.drop([key], namespace=namespace, incarnations=seen.incarnations, tiers=False)


def test_chunks_on_a_tier_are_loaded_by_one_lookup_of_all_ranks(client: Client) -> None:
    chunks = Chunks(client, space(kv_ranks=2), prefixes(), PREFIX_TOKENS)
    first = chunks.find(TEXT)
    for rank in range(2):
        store_missing(chunks, TEXT, first, rank)
    drop(chunks)
    assert not chunks.find(TEXT).matches
    assert call(client, registration(chunks, "small")).rooms == [8, 16, 24, 32, 40]
    gone = call(client, UnifiedLookup(space="small", tokens=TEXT.tolist()))
    assert [(each.first, each.end) for each in gone.missing] == [each.span for each in first.missing]
    assert {tuple(each.ranks) for each in gone.missing} == {(0, 1)}
    found = call(client, UnifiedLookup(space="small", tokens=TEXT.tolist(), wait_s=WAIT_S_MAX))
    assert found.rank_hits == [len(first.missing)] * 2
    assert [(each.new_start, each.keys[1]) for each in found.matches] == [
        (each.new_start, each.keys[1].hex()) for each in chunks.find(TEXT).matches
    ]


def test_a_lookup_is_answered_before_its_caller_gives_the_server_up(client: Client) -> None:
    assert WAIT_S_MAX + ANSWER_S < CALL_TIMEOUT_S
    call(client, registration(Chunks(client, space(), prefixes(), PREFIX_TOKENS), "small"))
    with pytest.raises(UsageError, match="wait_s"):
        call(client, UnifiedLookup(space="small", tokens=[1], wait_s=CALL_TIMEOUT_S))


def test_the_library_loads_from_tiers_too(client: Client) -> None:
    chunks = Chunks(client, space())
    store_missing(chunks, TEXT, chunks.find(TEXT))
    drop(chunks)
    assert not chunks.find(TEXT).matches
    assert not chunks.find(TEXT, wait_s=20.0).missing


def test_a_prefix_counts_as_far_as_all_ranks_have_it_and_plans_follow_the_first(client: Client) -> None:
    chunks = Chunks(client, space(kv_ranks=2), prefixes(), PREFIX_TOKENS)
    call(client, registration(chunks, "small"))
    for rank, count in ((0, 5), (1, 3)):
        namespace = chunks.prefixes[rank]
        keys = chunk_keys(TEXT, namespace, PREFIX_TOKENS)[:count]
        data = [np.zeros(layout_of(PREFIX_TOKENS).shape, np.float32)] * count
        assert client.store(keys, data, namespace=namespace).stored == count
    found = call(client, UnifiedLookup(space="small", tokens=TEXT.tolist()))
    assert (found.prefix_tokens, found.prefix_rank_tokens) == (48, [80, 48])
    documents = [TEXT[40:60].tolist(), TEXT[10:40].tolist()]
    plan = call(client, PlanPrompt(space="small", system=TEXT[:10].tolist(), documents=documents, question=[1]))
    assert (plan.order, plan.reused_tokens, plan.tokens) == ([1, 0], 48, 61)
    status = client.status()["operations"]["blend"]
    assert (status["spaces"], status["plans"], status["lookups"]) == (1, 1, 1)


def test_what_cannot_be_registered_or_is_not_is_refused(client: Client) -> None:
    chunks = Chunks(client, space(), prefixes(), PREFIX_TOKENS)
    good = registration(chunks, "small")
    with pytest.raises(UsageError, match="not registered"):
        call(client, UnifiedLookup(space="small", tokens=[1]))
    replaced = msgspec.structs.replace
    for wrong, says in (
        (replaced(good, rope_inv_freq=[1.0]), "frequencies"),
        (replaced(good, maximum=100), "need 13"),
        (replaced(good, minimum=50), "in this order"),
        (replaced(good, chunks=good.chunks * 2), "for 2 ranks"),
        (replaced(good, chunks=[*good.chunks, good.chunks[0][1:]]), "differ"),
        (replaced(good, chunks=[[replaced(good.chunks[0][0], layout="x")]]), "no layout"),
        (replaced(good, step_tokens=1 << 21), "1048576"),
    ):
        with pytest.raises(UsageError, match=says):
            call(client, wrong)
    for number in range(SPACES_MAX):
        call(client, replaced(good, space=f"{number}"))
    with pytest.raises(LimitError, match="the limit"):
        call(client, good)
    call(client, UnregisterRope(space="0"))
    call(client, good)
    with pytest.raises(UsageError, match="not registered"):
        call(client, UnregisterRope(space="0"))


def test_all_spaces_can_be_listed_and_freed_whatever_they_are_called(client: Client) -> None:
    good = registration(Chunks(client, space(), prefixes(), PREFIX_TOKENS), "small")
    names = [f"{number:02}" + 254 * "\U0001f600" for number in range(SPACES_MAX)]
    for name in names[::-1]:
        call(client, msgspec.structs.replace(good, space=name, by=64 * "\U0001f600"))
    listed: list[str] = []
    while page := call(client, ListSpaces(after=listed[-1] if listed else "")).spaces:
        assert len(page) <= LISTED_MAX
        listed += [each.space for each in page]
    assert listed == names
    for name in listed:
        call(client, UnregisterRope(space=name))
    call(client, good)


def test_nobody_replaces_a_space_that_another_has_registered(start: Callable[..., Server]) -> None:
    server = start(l1={"size_bytes": 8 << 20, "backing": "memfd"})
    with server.connect() as first, server.connect() as second:
        chunks = Chunks(first, space(tenant_salt="one"), prefixes(), PREFIX_TOKENS)
        good = registration(chunks, "small", by="the first engine")
        call(first, good)
        store_missing(chunks, TEXT, chunks.find(TEXT))
        there = len(call(first, UnifiedLookup(space="small", tokens=TEXT.tolist())).matches)
        assert there == len(chunks.find(TEXT).matches) > 5
        for other, says in (
            (space(), "chunks"),
            (space(tenant_salt="one", lengths=Lengths(8, 25, 40)), "mean"),
            (
                dataclasses.replace(space(tenant_salt="one"), rope=Rope(99.0, 6, False, (1.0, 0.3, 0.01))),
                "rope_theta, chunks",
            ),
        ):
            wrong = registration(Chunks(second, other, prefixes(), PREFIX_TOKENS), "small", by="the second")
            with pytest.raises(UsageError, match=f"by 'the first engine' with another {says}: use another name"):
                call(second, wrong)
        assert call(second, msgspec.structs.replace(good, by="the second")).rooms == [8, 16, 24, 32, 40]
        assert call(second, ListSpaces()).spaces == [Space("small", "the first engine")]
        assert len(call(second, UnifiedLookup(space="small", tokens=TEXT.tolist())).matches) == there
        call(second, UnregisterRope(space="small"))
        assert not call(first, ListSpaces()).spaces


def test_a_plan_of_a_space_whose_name_is_anothers_meanwhile_leaves_that_one_nothing(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {salt: dataclasses.replace(prefixes(), tenant_salt=salt) for salt in ("one", "two")}
    calls = {
        salt: registration(Chunks(client, space(tenant_salt=salt), each, PREFIX_TOKENS), "small")
        for salt, each in own.items()
    }
    keys = chunk_keys(TEXT, own["two"], PREFIX_TOKENS)[:3]
    client.store(keys, [np.zeros(layout_of(PREFIX_TOKENS).shape, np.float32)] * 3, namespace=own["two"])
    wanted = PlanPrompt(space="small", documents=[TEXT[:60].tolist()])
    waiting = ["a plan"]

    class Looked(tuple[Namespace, ...]):
        """The prefixes of the first space: a plan looks at them once it has found the space."""

        def __len__(self) -> int:
            if waiting and waiting.pop():
                call(client, UnregisterRope(space="small"))
                call(client, calls["two"])
            return super().__len__()

    def chunks_of(own: Client, request: RegisterRope) -> Chunks:
        made = described.chunks_of(own, request)
        if request == calls["one"]:
            made.prefixes = Looked(made.prefixes)
        return made

    monkeypatch.setattr(operation, "chunks_of", chunks_of)
    call(client, calls["one"])
    assert call(client, wanted).reused_tokens == 0
    assert call(client, wanted).reused_tokens == 3 * PREFIX_TOKENS


def test_two_salts_never_find_each_others_chunks(client: Client) -> None:
    """Neither by the library nor in the server; and a name is a space: whoever may call it looks with its salt."""
    salts = ("", "one", "two")
    texts = {salt: np.random.default_rng(at).integers(2, 1000, 300) for at, salt in enumerate(salts)}
    every = {salt: Chunks(client, space(tenant_salt=salt), prefixes(), PREFIX_TOKENS) for salt in salts}
    for salt, chunks in every.items():
        call(client, registration(chunks, f"of {salt}"))
        store_missing(chunks, texts[salt], chunks.find(texts[salt]))
    for salt, chunks in every.items():
        for stored, text in texts.items():
            asked = call(client, UnifiedLookup(space=f"of {salt}", tokens=text.tolist()))
            assert bool(chunks.find(text).matches) == bool(asked.matches) == (stored == salt)
    keys = [{key for each in chunks.find(TEXT).missing for key in each.keys} for chunks in every.values()]
    assert len(set.union(*keys)) == sum(map(len, keys))


def test_a_lookup_of_more_than_an_answer_holds_is_refused_before_it_is_made(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    keys = ChunkSpace.keys
    monkeypatch.setattr(
        ChunkSpace, "keys", lambda self, words, spans, *more: made.append(len(spans)) or keys(self, words, spans, *more)
    )
    one = space(lengths=Lengths(1, 1, 1), step_tokens=1, kv_ranks=64)
    call(client, registration(Chunks(client, one, prefixes(), PREFIX_TOKENS), "one"))
    with pytest.raises(LimitError, match="1,000 chunks for 64 ranks are 64,000 keys, and the limit is 960"):
        call(client, UnifiedLookup(space="one", tokens=[5] * 1000))
    call(client, registration(Chunks(client, one, prefixes(), 1), "every token"))
    with pytest.raises(LimitError, match="has 1,280,000 keys, and the limit is 65,536"):
        call(client, UnifiedLookup(space="every token", tokens=[5] * 20_000))
    assert not made
    assert len(call(client, UnifiedLookup(space="one", tokens=[5] * 14)).missing) == 14
    assert made == [14] * 64


class TestBlend(OperationContract):
    component = "blend"

    @pytest.fixture
    def sample_request(self, tmp_path: Path) -> BlendRequest:
        with Client.connect("nobody", runtime_dir=tmp_path) as client:
            return BlendRequest(registration(Chunks(client, space(), prefixes(), PREFIX_TOKENS), "small"))


def answers(port: int) -> bool:
    with contextlib.suppress(OSError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/livez", timeout=WAIT_S).close()
        return True
    return False


def test_a_plan_comes_over_http(tmp_path: Path) -> None:
    pytest.importorskip("lmcache_http")
    token = tmp_path / "token"
    token.write_text("secret-of-the-test\n")
    token.chmod(0o600)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    tables = {"http": {"host": "127.0.0.1", "port": port, "token_file": str(token)}}

    def post(request: msgspec.Struct) -> Any:
        sent = urllib.request.Request(
            f"http://127.0.0.1:{port}/operations/{OPERATION}",
            msgspec.json.encode(BlendRequest(request)),  # type: ignore[arg-type]
            {"Authorization": "Bearer secret-of-the-test", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(sent, timeout=WAIT_S) as answer:
            return json.load(answer)

    with embedded_server(tmp_path, None, **tables) as server, server.connect() as client:
        until(lambda: answers(port), "the HTTP helper")
        chunks = Chunks(client, space(), prefixes(), PREFIX_TOKENS)
        assert post(registration(chunks, "small"))["rooms"] == [8, 16, 24, 32, 40]
        keys = chunk_keys(TEXT, prefixes(), PREFIX_TOKENS)[:3]
        data = [np.zeros(layout_of(PREFIX_TOKENS).shape, np.float32)] * 3
        client.store(keys, data, namespace=prefixes())
        documents = [TEXT[40:60].tolist(), TEXT[:40].tolist()]
        assert post(PlanPrompt(space="small", documents=documents))["order"] == [1, 0]
