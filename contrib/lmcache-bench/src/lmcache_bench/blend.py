"""`lmcache-core bench blend`: chunks found by their content, keys moved, prompts planned, and whether reuse lasts.

Keys are moved beside a plain copy of the same bytes, in turns. A prompt of 131,072 tokens is looked up among a million
chunks. Plans are set beside the best of all orders. Ten thousand questions that nobody asked before, over documents
whose popularity follows Zipf's law, go through a real server; beside it a scheme is simulated that stores chunks under
keys chained by prefix and finds them by content, in a pool with room for as many objects.
"""

from __future__ import annotations

import itertools
import time
from argparse import ArgumentParser, Namespace
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

from lmcache_core.errors import PluginError
from lmcache_core.limits import KEY_BYTES, PAGE_BYTES, SLAB_BYTES
from lmcache_core.plugins.suggest import install_command
from lmcache_core.pool.layout import Layout
from lmcache_core.tokens import Namespace as Names
from lmcache_core.tokens import chunk_keys
from lmcache_testing.processes import ServerProcess

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from lmcache_blend import Chunks, ChunkSpace, Rope
    from lmcache_core import Client
    from lmcache_core.cli.bench.harness import Bench

VOCABULARY = 50_000
FIND_TOKENS = 131_072
FIND_CHUNKS, FIND_CHUNKS_QUICK = 1_000_000, 50_000
FIND_MS_MAX = 5.0
MOVE_TARGET = 0.7  # of a plain copy
CUT_GB_S_MIN = 1.0
DOCUMENTS, QUERIES, QUERIES_QUICK = 2_000, 10_000, 1_000
DOCUMENT_TOKENS, PER_QUERY, QUESTION_TOKENS = 600, 4, 40
POINTS_MAX = 0.02
PLANNED, PLAN_CHUNK_TOKENS, PLAN_DOCUMENTS = 300, 64, 200
PLAN_TARGET = 0.975  # of the best of all orders
BATCH = 4096


def add_options(parser: ArgumentParser) -> None:
    """The bench's own options."""
    parser.add_argument("--seed", type=int, default=1, help="of tokens and questions")
    parser.add_argument(
        "--parts", nargs="+", choices=tuple(_PARTS), default=tuple(_PARTS), help="only these (default: all)"
    )


def run(options: Namespace, bench: Bench) -> None:
    """Record the chosen parts. Raises `PluginError` without lmcache-blend."""
    try:
        import lmcache_blend._native  # noqa: F401  # says whether it was built, too
    except ImportError as error:
        cure = install_command("lmcache-blend")
        raise PluginError(f"this bench needs lmcache-blend, built with C: {error}", cure=cure) from error
    bench.steps(len(options.parts))
    for part in options.parts:
        bench.step(part)
        _PARTS[part](options.seed, bench)


# --- bytes ------------------------------------------------------------------------------------------------


def _move(seed: int, bench: Bench) -> None:
    """Keys and values of a chunk of 256 tokens of a model with 30 layers and three heads of 64 values."""
    import numpy as np

    from lmcache_blend.rope import KINDS, move

    rounds, shape = 15 if bench.quick else 60, (30, 3, 256, 64)
    old, new = np.arange(1, 257), np.arange(5001, 5257)
    types = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}
    for interleaved in (False, True):
        rope = _rope(interleaved)
        for kind in KINDS:
            values = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
            raw = (values.view(np.uint32) >> 16).astype(np.uint16) if kind == "bfloat16" else values
            source = raw.astype(types[kind])
            target = np.zeros_like(source)

            def chunk(source: Any = source, target: Any = target, kind: str = kind, rope: Rope = rope) -> None:
                table = rope.turn(old, new)
                move(source, target, table, kind, rope.dimensions, rope.interleaved, 2)
                move(source, target, None, kind, 0, False, 2)

            def copy(source: Any = source, target: Any = target) -> None:
                np.copyto(target, source)
                np.copyto(target, source)

            moved_s, copied_s = _in_turns((chunk, copy), rounds)
            bench.record(
                f"a chunk out, {kind}, {'neighbours' if interleaved else 'halves'} paired",
                2 * source.nbytes / moved_s / 1e9,
                "GB/s",
                floor=2 * source.nbytes / copied_s / 1e9,
                target=MOVE_TARGET,
                lower_is_better=False,
            )


def _cut(seed: int, bench: Bench) -> None:
    import numpy as np

    from lmcache_blend import _native
    from lmcache_blend.cutting import Lengths

    tokens = 1 << 20
    texts = {
        "random": np.random.default_rng(seed).integers(0, VOCABULARY, tokens).astype(np.uint32),
        "all equal": np.full(tokens, 7, np.uint32),
        "of period 63": np.resize(np.arange(63, dtype=np.uint32), tokens),
    }
    for name, words in texts.items():
        seconds, read_s = _in_turns((partial(_native.cut, words, *Lengths()), words.sum), 9 if bench.quick else 40)
        bench.record(
            f"cut, tokens {name}",
            words.nbytes / seconds / 1e9,
            "GB/s",
            floor=words.nbytes / read_s / 1e9,
            target=CUT_GB_S_MIN,
            lower_is_better=False,
            target_on="value",
        )


def _in_turns(calls: tuple[Callable[[], object], Callable[[], object]], rounds: int) -> tuple[float, float]:
    """The median of each."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for call, taken in zip(calls, times, strict=True):
            began = time.perf_counter()
            call()
            taken.append(time.perf_counter() - began)
    return median(times[0]), median(times[1])


# --- finding ----------------------------------------------------------------------------------------------


def _find(seed: int, bench: Bench) -> None:
    import numpy as np

    from lmcache_blend import Chunks

    count = FIND_CHUNKS_QUICK if bench.quick else FIND_CHUNKS
    tokens = np.random.default_rng(seed).integers(0, VOCABULARY, FIND_TOKENS)
    with ServerProcess(count * PAGE_BYTES + 32 * SLAB_BYTES) as server, server.client() as client:
        chunks = Chunks(client, _space(PAGE_BYTES), Names("bench", Layout("uint8", (64,))))
        first = chunks.find(tokens)
        _store_empty(client, chunks, [each.keys[0] for each in first.missing], _rooms(chunks, first))
        rooms = _rooms(chunks, first)
        others = [number.to_bytes(KEY_BYTES, "big") for number in range(count - len(rooms))]
        _store_empty(client, chunks, others, [rooms[at % len(rooms)] for at in range(len(others))])
        stored = client.status()["l1"]["objects_by_state"]["ready"]
        found = chunks.find(tokens)
        if len(found.matches) != len(rooms):
            raise PluginError(f"{len(found.matches)} of {len(rooms)} chunks were found: measured nothing")
        wall_ms, cpu_ms = [], []
        for _ in range(20 if bench.quick else 100):
            began, began_cpu = time.perf_counter(), time.thread_time()
            chunks.find(tokens)
            wall_ms.append((time.perf_counter() - began) * 1e3)
            cpu_ms.append((time.thread_time() - began_cpu) * 1e3)
        keys = chunk_keys(tokens, chunks.prefixes[0])
        hash_s, _ = _in_turns((lambda: chunk_keys(tokens, chunks.prefixes[0]), lambda: None), 20)
    what = f"find {FIND_TOKENS:,} tokens among {stored:,} chunks ({len(rooms)} matches; floor: {len(keys)} prefix keys)"
    bench.record(what, median(wall_ms), "ms", floor=hash_s * 1e3, target=FIND_MS_MAX, target_on="value")
    bench.record("of it, CPU", median(cpu_ms), "ms", floor=hash_s * 1e3, target=FIND_MS_MAX, target_on="value")


def _rooms(chunks: Chunks, found: Any) -> list[int]:
    return [chunks.space.room(each.span.end - each.span.first) for each in found.missing]


def _store_empty(client: Client, chunks: Chunks, keys: list[bytes], rooms: list[int]) -> None:
    """Slots whose bytes are never touched."""
    by_room: dict[int, list[bytes]] = {}
    for key, room in zip(keys, rooms, strict=True):
        by_room.setdefault(room, []).append(key)
    for room, own in by_room.items():
        for first in range(0, len(own), BATCH):
            page = own[first : first + BATCH]
            client.prepare_store(page, namespace=chunks.space.namespace(room)).commit(checksums=False)


# --- does it last? ----------------------------------------------------------------------------------------


def _lasts(seed: int, bench: Bench) -> None:
    import numpy as np

    from lmcache_blend import Chunks, cut

    queries = QUERIES_QUICK if bench.quick else QUERIES
    chance = np.random.default_rng(seed)
    documents = [chance.integers(0, VOCABULARY, DOCUMENT_TOKENS) for _ in range(DOCUMENTS)]
    different = sum(len(cut(each, marks=[(0, len(each))])) for each in documents)
    windows = queries // 10
    ours, theirs, chained = [], [], _Chained(different)
    with ServerProcess(2 * different * PAGE_BYTES + 32 * SLAB_BYTES) as server, server.client() as client:
        chunks = Chunks(client, _space(64))
        for chosen in _zipf(chance, DOCUMENTS, queries):
            parts = [documents[at] for at in chosen]
            ends = np.cumsum([len(part) for part in parts]).tolist()
            marks = list(zip([0, *ends[:-1]], ends, strict=True))
            prompt = np.concatenate([*parts, chance.integers(0, VOCABULARY, QUESTION_TOKENS)])
            found = chunks.find(prompt, marks)
            ours.append(found.matched_tokens / len(prompt))
            _store_empty(client, chunks, [each.keys[0] for each in found.missing], _rooms(chunks, found))
            spans = [(prompt[first:end].tobytes(), end - first) for first, end in cut(prompt, marks=marks)]
            theirs.append(chained.query(spans) / len(prompt))
        stored = client.status()["l1"]["objects_by_state"]["ready"]
    for name, shares in (("ours", ours), ("chained by prefix, simulated", theirs)):
        second, last = np.mean(shares[windows : 2 * windows]), np.mean(shares[-windows:])
        bench.record(f"reused in the second tenth of {queries:,} queries, {name}", float(second), "x")
        bench.record(f"reused in the last tenth, {name}", float(last), "x")
    lost = float(np.mean(ours[windows : 2 * windows]) - np.mean(ours[-windows:]))
    bench.record("share lost from the second tenth to the last, ours", max(0.0, lost), "x", target=POINTS_MAX)
    bench.record("objects stored, ours", stored, "", floor=different, target=1.0)
    bench.record("objects stored, chained by prefix, simulated", chained.stored, "", floor=different)


class _Chained:
    """Chunks stored under keys that depend on all before them, and found by content: the last copy of each. The pool
    evicts what was not used for longest."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._pool: OrderedDict[int, bytes] = OrderedDict()
        self._by_content: dict[bytes, int] = {}
        self.stored = 0

    def query(self, spans: list[tuple[bytes, int]]) -> int:
        """How many tokens of a prompt are found. Its chunks are then stored."""
        reused, key = 0, 0
        found = [self._by_content.get(content) for content, _ in spans]
        for at, (_, tokens) in zip(found, spans, strict=True):
            if at is not None and at in self._pool:
                self._pool.move_to_end(at)
                reused += tokens
        for content, _ in spans:
            key = hash((key, content))
            if key not in self._pool:
                self.stored += 1
            self._pool[key] = content
            self._pool.move_to_end(key)
            self._by_content[content] = key
            if len(self._pool) > self._capacity:
                self._pool.popitem(last=False)
        return reused


def _zipf(chance: np.random.Generator, documents: int, queries: int) -> Iterator[list[int]]:
    """Different documents for each query."""
    import numpy as np

    shares = 1.0 / np.arange(1, documents + 1)
    edges = np.cumsum(shares / shares.sum())
    for _ in range(queries):
        chosen: list[int] = []
        while len(chosen) < PER_QUERY:
            at = min(int(np.searchsorted(edges, chance.random())), documents - 1)
            if at not in chosen:
                chosen.append(at)
        yield chosen


# --- plans ------------------------------------------------------------------------------------------------


def _plan(seed: int, bench: Bench) -> None:
    import numpy as np

    from lmcache_blend import Planner

    chance = np.random.default_rng(seed)
    space = Names("bench plan", Layout("uint8", (PAGE_BYTES,)))
    lengths = chance.integers(200, 800, PLAN_DOCUMENTS)
    documents = [chance.integers(0, VOCABULARY, int(length)) for length in lengths]
    system = chance.integers(0, VOCABULARY, 100)
    planned = given = best = tokens = 0
    times, stored = [], set[bytes]()
    with ServerProcess(64 * SLAB_BYTES) as server, server.client() as client:
        planner = Planner(client, space, PLAN_CHUNK_TOKENS)
        for chosen in _zipf(chance, PLAN_DOCUMENTS, PLANNED // 3 if bench.quick else PLANNED):
            question = chance.integers(0, VOCABULARY, QUESTION_TOKENS)
            parts = [documents[at] for at in chosen]
            began = time.perf_counter()
            plan = planner.plan(system, parts, question)
            times.append((time.perf_counter() - began) * 1e6)
            keys = {order: _prompt_keys(system, parts, order, question, space) for order in _orders(len(parts))}
            reached = {order: _reached(own, stored) for order, own in keys.items()}
            planned, best = planned + plan.reused_tokens, best + max(reached.values())
            given, tokens = given + reached[tuple(range(len(parts)))], tokens + plan.tokens
            stored.update(keys[plan.order])
            client.prepare_store(keys[plan.order], namespace=space).commit(checksums=False)
        evicted = len(stored) - client.status()["l1"]["objects_by_state"]["ready"]
    if evicted:
        raise PluginError(f"{evicted} objects were evicted, so that the best order is not known: measured nothing")
    bench.record("prompt reused, documents as they come", given / tokens, "x")
    bench.record(
        "prompt reused, planned (floor: the best of all orders)",
        planned / tokens,
        "x",
        floor=best / tokens,
        target=PLAN_TARGET,
        lower_is_better=False,
    )
    bench.record(f"a plan of {PER_QUERY} documents", median(times), "us")


def _orders(documents: int) -> Iterator[tuple[int, ...]]:
    return itertools.permutations(range(documents))


def _prompt_keys(system: Any, parts: list[Any], order: tuple[int, ...], question: Any, space: Names) -> list[bytes]:
    import numpy as np

    words: npt.NDArray[Any] = np.concatenate([system, *(parts[at] for at in order), question])
    return chunk_keys(words, space, PLAN_CHUNK_TOKENS)


def _reached(keys: list[bytes], stored: set[bytes]) -> int:
    return next((at for at, key in enumerate(keys) if key not in stored), len(keys)) * PLAN_CHUNK_TOKENS


# --- a model ----------------------------------------------------------------------------------------------


def _rope(interleaved: bool) -> Rope:
    from lmcache_blend import Rope

    return Rope(1e4, 64, interleaved, tuple(1e4 ** (-pair / 32) for pair in range(32)))


def _space(nbytes: int) -> ChunkSpace:
    from lmcache_blend import ChunkSpace

    return ChunkSpace("bench", lambda tokens: Layout("uint8", (nbytes,)), _rope(False), (1,))


_PARTS: dict[str, Callable[[int, Any], None]] = {
    "move": _move,
    "cut": _cut,
    "find": _find,
    "plan": _plan,
    "lasts": _lasts,
}
