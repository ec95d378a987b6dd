"""Two nodes: what an engine has computed on one of them is a hit on the other, over the peer tier."""

from __future__ import annotations

import socket
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from vllm_engines import Engine, Server, prompt

from lmcache_core.client.client import Client
from lmcache_testing.embedded import Json
from lmcache_testing.waiting import until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("lmcache_peer") is None, reason="lmcache-peer is not installed here"),
]
BLOCK = 128
TOKENS = 1100  # eight blocks, and a rest that is always computed


def test_a_prompt_computed_on_one_node_is_a_hit_on_the_other(
    start: Callable[..., Engine],
    llama: Path,
    serve: Callable[..., Server],
    record_property: Callable[[str, object], None],
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    a = serve("--peer.port", str(port), "--peer.node", "a")
    b = serve("--l2.peers.type", "peer", "--l2.peers.node", "b", "--l2.peers.nodes", f"127.0.0.1:{port}",
              "--l2.peers.patience_s", "10")  # fmt: skip
    first, second = (start(llama, each.settings()) for each in (a, b))
    for engine in (first, second):
        engine.generate(prompt(0, TOKENS))  # what an engine does once
        engine.saved()
    tokens = prompt(1, TOKENS)
    with a.client() as at_a:
        until(lambda: digest_objects(at_a) > 0, "the first node's digest")
        before = digest_objects(at_a)
    cold, cold_s = timed(first, tokens)
    assert cold["cached"] == 0
    first.saved()
    with a.client() as at_a, b.client() as at_b:
        # Each prompt has as many objects as the other.
        until(lambda: digest_objects(at_a) == 2 * before, "all of it in the first node's digest")
        until(lambda: peer_of(at_b.status()).get("objects") == 2 * before, "the second node to know of it")
        second.figures()
        from_peer, peer_s = timed(second, tokens)
        assert from_peer == {"tokens": cold["tokens"], "cached": 8 * BLOCK}
        assert second.figures()["load_blocks"] == 8
        loaded = peer_of(at_b.status())["loaded"]
        assert loaded > 0
        second.forget()
        from_own, own_s = timed(second, tokens)
        assert from_own == from_peer
        assert peer_of(at_b.status())["loaded"] == loaded, "the second time it is in its own pool"
        until(lambda: not any(at_a.status()["l1"]["leases_by_kind"].values()), "nothing to be held")
    for name, seconds in (("cold_s", cold_s), ("from_peer_s", peer_s), ("from_own_memory_s", own_s)):
        record_property(name, round(seconds, 3))
    print(f"first token: {cold_s:.3f} s cold, {peer_s:.3f} s from the peer, {own_s:.3f} s from its own memory")


def digest_objects(client: Client) -> int:
    return int(client.status()["operations"]["peer"]["serving"].get("digest_objects", 0))


def peer_of(status: Json) -> Json:
    row: Json = status["tiers"]["tiers"][0]["adapter"]["parts"].get("a", {})
    return row


def timed(engine: Engine, tokens: list[int]) -> tuple[Json, float]:
    """One token, and the seconds until it was there."""
    source = f"import time\nbegan = time.perf_counter()\nmade = generate([{tokens!r}], 1)\n"
    made, seconds = engine.run(f"{source}said = [made[0], time.perf_counter() - began]")
    return made, float(seconds)
