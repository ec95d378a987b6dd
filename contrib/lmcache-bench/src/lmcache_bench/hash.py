"""`lmcache-core bench hash`: the keys of a long prompt, for each type that can hold its tokens.

The floor is the C extension's own loop over ids that are already 32-bit words, without making key objects: the cost of
SHA-256 on this processor. hashlib called from Python, chunk by chunk over the same words, is the cost without the
extension. All variants take turns, and the median round counts.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import time
from array import array
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from statistics import median
from typing import TYPE_CHECKING, Any

from lmcache_core.limits import KEY_BYTES
from lmcache_core.native import native, why_not
from lmcache_core.pool.layout import Layout
from lmcache_core.tokens import Namespace, chunk_keys, keys_from_block_hashes

if TYPE_CHECKING:
    from lmcache_core.cli.bench.harness import Bench

TOKENS = 131_072
VOCABULARY = 128_256
HASHING, CALLING = 256, 16  # tokens per chunk: where hashing dominates, and where calls from Python do
TARGET_RATIO = 1.3  # times the floor, in chunks of HASHING
TARGET_RATIO_LIST = 1.6  # its ids are objects all over the heap: reading them is bound by memory, not by our code
TARGET_FASTER = 5.0  # times as fast as hashlib from Python, in chunks of CALLING
BLOCK_HASHES = 8_192

Way = Callable[[], object]


def add_options(parser: argparse.ArgumentParser) -> None:
    """The bench's own options."""
    parser.add_argument("--tokens", type=int, default=TOKENS, help="tokens of the prompt")
    parser.add_argument("--seed", type=int, default=1, help="of the ids")


def run(options: argparse.Namespace, bench: Bench) -> None:
    """Record every token type at each chunk size."""
    chance = random.Random(options.seed)
    ids = [chance.randrange(VOCABULARY) for _ in range(options.tokens)]
    namespace = Namespace("bench", Layout("uint8", (1,)))
    rounds = 40 if bench.quick else 400
    bench.steps(3)
    for chunk_tokens in (HASHING, CALLING):
        bench.step(f"chunks of {chunk_tokens}")
        _chunks(bench, ids, namespace, chunk_tokens, rounds)
    bench.step("block hashes")
    _block_hashes(bench, chance, namespace, rounds)


def _chunks(bench: Bench, ids: list[int], namespace: Namespace, chunk_tokens: int, rounds: int) -> None:
    words = array("I", ids)
    prepared = memoryview(words).cast("B")
    ways: dict[str, Way] = {"hashlib": lambda: _by_hashlib(prepared, namespace, chunk_tokens)}
    for name, held in _holders(ids):
        ways[name] = lambda held=held: chunk_keys(held, namespace, chunk_tokens)  # type: ignore[misc]
    if not why_not:
        keys = bytearray(KEY_BYTES * (len(ids) // chunk_tokens))
        ways["floor"] = lambda: native._chain_floor(namespace.digest, words, chunk_tokens, keys)
    times = _turns(ways, rounds)
    floor, hashed = times.pop("floor", None), times.pop("hashlib")
    title = f"{len(ids):,} tokens in chunks of {chunk_tokens}"
    for name, spent in times.items():
        target = None
        if floor and chunk_tokens == HASHING:
            target = TARGET_RATIO_LIST if name == "list" else TARGET_RATIO
        bench.record(f"{title}: {name}", spent * 1e6, "us", floor=floor and floor * 1e6, target=target)
    bench.record(f"{title}: hashlib from Python", hashed * 1e6, "us", floor=floor and floor * 1e6)
    for name, spent in times.items() if floor and chunk_tokens == CALLING else ():
        title_here = f"{title}: {name}, times as fast as hashlib"
        bench.record(title_here, hashed / spent, "times", target=TARGET_FASTER, lower_is_better=False)


def _holders(ids: list[int]) -> Iterator[tuple[str, Any]]:
    yield "list", ids
    yield "array of uint32", array("I", ids)
    yield "array of int64", array("q", ids)
    if find_spec("numpy"):
        import numpy

        yield "numpy int32", numpy.array(ids, dtype="int32")
    if find_spec("torch"):
        import torch

        yield "tensor of int64", torch.tensor(ids, dtype=torch.int64)


def _by_hashlib(words: memoryview, namespace: Namespace, chunk_tokens: int) -> list[bytes]:
    key, keys, step = namespace.digest, [], 4 * chunk_tokens
    for start in range(0, words.nbytes - step + 1, step):
        state = hashlib.sha256(key)
        state.update(words[start : start + step])
        key = state.digest()
        keys.append(key)
    return keys


def _block_hashes(bench: Bench, chance: random.Random, namespace: Namespace, rounds: int) -> None:
    hashes = [chance.randbytes(32) for _ in range(BLOCK_HASHES)]
    begun = hashlib.sha256(b"prefix" + namespace.digest)

    def by_hashlib() -> list[bytes]:
        keys = []
        for each in hashes:
            state = begun.copy()
            state.update(each)
            keys.append(state.digest())
        return keys

    times = _turns({"ours": lambda: keys_from_block_hashes(hashes, namespace), "hashlib": by_hashlib}, rounds)
    title = f"keys from {BLOCK_HASHES:,} block hashes"
    bench.record(title, times["ours"] * 1e6, "us")
    bench.record(f"{title}: hashlib from Python", times["hashlib"] * 1e6, "us")


def _turns(ways: dict[str, Way], rounds: int) -> dict[str, float]:
    """Median seconds of each variant; they take turns."""
    spent: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 2):
        for name, way in ways.items():
            began = time.perf_counter()
            way()
            if turn >= 2:  # memory is warm and the allocator has settled
                spent[name].append(time.perf_counter() - began)
    return {name: median(each) for name, each in spent.items()}
