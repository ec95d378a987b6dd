from __future__ import annotations

import os
import subprocess
import sys
from array import array
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_core.errors import UsageError
from lmcache_core.pool.layout import Layout
from lmcache_core.tokens import Namespace, chunk_keys, keys_from_block_hashes

NAMESPACE = Namespace("m", Layout("bfloat16", (2, 4, 16, 2, 8), "KLTHD"))
OTHER = Namespace("m", Layout("bfloat16", (2, 4, 16, 2, 8), "KLTHD"), tenant_salt="other")
IDS = st.lists(st.integers(0, 2**32 - 1), max_size=64)


def as_numpy(dtype: str) -> Callable[[list[int]], Any]:
    return lambda ids: pytest.importorskip("numpy").array(ids, dtype=dtype)


def as_tensor(dtype: str) -> Callable[[list[int]], Any]:
    def build(ids: list[int]) -> Any:
        torch = pytest.importorskip("torch")
        return torch.tensor(ids, dtype=getattr(torch, dtype))

    return build


def strided(ids: list[int]) -> memoryview:
    both = array("q", [0]) * (2 * len(ids))
    both[::2] = array("q", ids)
    return memoryview(both)[::2]


HOLDERS: dict[str, Callable[[list[int]], object]] = {
    "tuple": tuple,
    "iterator": iter,
    "array I": lambda ids: array("I", ids),
    "array q": lambda ids: array("q", ids),
    "array Q": lambda ids: array("Q", ids),
    "array l": lambda ids: array("l", ids),
    "bytes cast to I": lambda ids: memoryview(array("I", ids).tobytes()).cast("I") if ids else memoryview(array("I")),
    "strided view": strided,
    "numpy int64": as_numpy("int64"),
    "numpy uint64": as_numpy("uint64"),
    "numpy uint32": as_numpy("uint32"),
    "numpy strided": lambda ids: as_numpy("int64")([x for i in ids for x in (i, 0)])[::2],
    "torch int64": as_tensor("int64"),
    "torch uint32": as_tensor("uint32"),
    "torch strided": lambda ids: as_tensor("int64")([x for i in ids for x in (i, 0)])[::2],
}
SIGNED_32 = {
    "array i": lambda ids: array("i", ids),
    "numpy int32": as_numpy("int32"),
    "numpy int32 strided": lambda ids: as_numpy("int32")([x for i in ids for x in (i, 0)])[::2],
    "torch int32": as_tensor("int32"),
}


@pytest.mark.parametrize("holder", [*HOLDERS, *SIGNED_32])
def test_equal_ids_give_equal_keys_whatever_holds_them(holder: str) -> None:
    build = (HOLDERS | SIGNED_32)[holder]

    @settings(deadline=None)
    @given(IDS, st.integers(1, 9))
    def check(ids: list[int], chunk_tokens: int) -> None:
        if holder in SIGNED_32:
            ids = [i >> 1 for i in ids]
        assert chunk_keys(build(ids), NAMESPACE, chunk_tokens) == chunk_keys(ids, NAMESPACE, chunk_tokens)

    check()


def test_a_range_and_a_long_array_give_the_keys_of_their_list() -> None:
    ids = range(3, 30_000)  # long enough for several passes of the narrowing
    expected = chunk_keys(list(ids), NAMESPACE)
    assert chunk_keys(ids, NAMESPACE) == expected
    assert chunk_keys(array("q", ids), NAMESPACE) == expected
    assert len(expected) == (30_000 - 3) // 256


@settings(deadline=None)
@given(IDS, IDS, st.integers(1, 9))
def test_two_prompts_share_exactly_the_keys_of_their_common_chunks(a: list[int], b: list[int], step: int) -> None:
    shared = a[: len(a) // 2]
    one, two = shared + a, shared + b
    keys_one, keys_two = chunk_keys(one, NAMESPACE, step), chunk_keys(two, NAMESPACE, step)
    assert len(keys_one) == len(one) // step
    for i, (x, y) in enumerate(zip(keys_one, keys_two, strict=False)):
        end = (i + 1) * step
        assert (x == y) == (one[:end] == two[:end])


@settings(deadline=None)
@given(IDS, st.integers(1, 9))
def test_different_namespaces_never_share_a_key(ids: list[int], step: int) -> None:
    assert not set(chunk_keys(ids, NAMESPACE, step)) & set(chunk_keys(ids, OTHER, step))


@settings(deadline=None)
@given(IDS, st.integers(1, 9), st.integers(0, 8))
def test_a_sequence_goes_on_from_a_given_key(ids: list[int], step: int, done: int) -> None:
    whole = chunk_keys(ids, NAMESPACE, step)
    done = min(done, len(whole))
    previous = whole[done - 1] if done else None
    assert chunk_keys(ids[done * step :], NAMESPACE, step, previous=previous) == whole[done:]


def test_another_process_with_another_hash_seed_gets_the_same_keys() -> None:
    program = (
        "from lmcache_core.pool.layout import Layout\n"
        "from lmcache_core.tokens import Namespace, chunk_keys\n"
        "import sys\n"
        "n = Namespace('m', Layout('bfloat16', (2, 4, 16, 2, 8), 'KLTHD'))\n"
        "print(n.id, b''.join(chunk_keys(range(64), n, 16)).hex())\n"
        "assert not {'numpy', 'torch'} & set(sys.modules)\n"
    )
    expected = f"{NAMESPACE.id} {b''.join(chunk_keys(range(64), NAMESPACE, 16)).hex()}"
    for seed in ("0", "1", "4711"):
        done = subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        assert done.stdout.strip() == expected


@pytest.mark.parametrize(
    ("holder", "bad"),
    [
        *[("list", bad) for bad in (-1, 2**32, 2**70, -(2**70))],
        *[(holder, -1) for holder in ("iterator", "array q", "array l", "array i", "strided view")],
        *[(holder, -7) for holder in ("numpy int64", "numpy int32", "torch int64", "torch int32", "torch strided")],
        *[(holder, 2**32) for holder in ("array q", "array Q", "numpy int64", "numpy uint64", "torch int64")],
        ("array Q", 2**63),
        ("array q", -(2**63)),
    ],
)
def test_an_id_outside_32_bits_is_refused_with_its_position_and_value(holder: str, bad: int) -> None:
    build = ({"list": list} | HOLDERS | SIGNED_32)[holder]
    for position in (0, 3, 5000):
        ids = [1] * 5001
        ids[position] = bad
        with pytest.raises(UsageError, match=f"token {position} is {bad}:"):
            chunk_keys(build(ids), NAMESPACE)


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        (b"\x01\0\0\0", "format 'B'"),
        (array("d", [1.0]), "format 'd'"),
        (array("H", [1]), "format 'H'"),
        ("1 2 3", "are a str"),
        (None, "are a NoneType"),
        ({1: 2}, "are a dict"),
        ({1, 2}, "are a set"),
        ([[1, 2]], "token 0 is a list"),
        ([1, 2.0], "token 1 is a float"),
        (memoryview(array("q", [1, 2])).cast("B").cast("q", (2, 1)), "one dimension"),
    ],
)
def test_what_is_not_a_row_of_ids_is_refused_with_what_to_give(tokens: object, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        chunk_keys(tokens, NAMESPACE)


def test_a_batch_of_one_and_a_float_tensor_are_refused() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(UsageError, match="one dimension"):
        chunk_keys(torch.zeros((1, 300), dtype=torch.int64), NAMESPACE)
    with pytest.raises(UsageError, match="float32"):
        chunk_keys(torch.zeros(300), NAMESPACE)


def test_a_chunk_of_no_tokens_and_a_previous_that_is_no_key_are_refused() -> None:
    with pytest.raises(UsageError, match="chunk_tokens must be 1 or more, got 0"):
        chunk_keys([1], NAMESPACE, 0)
    with pytest.raises(UsageError, match="previous has 31 bytes"):
        chunk_keys([1], NAMESPACE, 1, previous=bytes(31))
    with pytest.raises(UsageError, match="previous has 64 bytes"):
        chunk_keys([1], NAMESPACE, 1, previous=array("H", bytes(64)))  # of 32 items
    with pytest.raises(UsageError, match="previous is a list"):
        chunk_keys([1], NAMESPACE, 1, previous=[0] * 32)
    (key,) = chunk_keys([1], NAMESPACE, 1, previous=bytes(32))
    assert chunk_keys([1], NAMESPACE, 1, previous=array("H", bytes(32))) == [key]


def test_keys_from_block_hashes_differ_by_hash_and_by_namespace_and_are_no_chunk_keys() -> None:
    hashes = [bytes([i]) * 32 for i in range(4)] + [bytes(64)]
    keys = keys_from_block_hashes(hashes, NAMESPACE)
    assert all(len(key) == 32 for key in keys)
    assert len({*keys, *keys_from_block_hashes(hashes, OTHER)}) == 10
    # Eight tokens are as long as a hash: the same bytes must not make the same key.
    words = memoryview(hashes[1]).cast("I")
    assert chunk_keys(words, NAMESPACE, 8)[0] != keys[1]


def test_block_hashes_too_weak_to_stand_for_a_prompt_are_refused() -> None:
    with pytest.raises(UsageError, match="block hash 1 has 8 bytes"):
        keys_from_block_hashes([bytes(32), bytes(8)], NAMESPACE)
    with pytest.raises(UsageError, match="block hash 0 is a int"):
        keys_from_block_hashes([hash((1, 2))], NAMESPACE)  # type: ignore[list-item]


def test_hashes_of_16_bytes_are_taken_from_an_algorithm_that_is_named() -> None:
    hashes = [bytes([number]) * 16 for number in range(3)]
    with pytest.raises(UsageError, match="name the algorithm"):
        keys_from_block_hashes(hashes, NAMESPACE)
    assert len(set(keys_from_block_hashes(hashes, NAMESPACE, algorithm="xxhash"))) == 3
    with pytest.raises(UsageError, match="block hash 0 has 15 bytes and 16"):
        keys_from_block_hashes([bytes(15)], NAMESPACE, algorithm="xxhash")


def test_algorithm_and_seed_of_the_engine_are_part_of_keys_from_its_hashes() -> None:
    def key_by(**how: Any) -> bytes:
        return keys_from_block_hashes([bytes(32)], NAMESPACE, **how)[0]

    ways: list[dict[str, object]] = [
        {}, {"algorithm": "sha256"}, {"algorithm": "sha256_cbor"}, {"seed": b"0"}, {"seed": "0"},
        {"algorithm": "sha256", "seed": b"0"}, {"algorithm": "sha256", "seed": "0"}, {"algorithm": "sha2", "seed":
        "560"},
    ]  # fmt: skip
    assert len({key_by(**how) for how in ways}) == len(ways)
    with pytest.raises(UsageError, match="seed"):
        key_by(seed=7)


TOKEN_ROWS = st.lists(st.integers(0, 2**32 - 1), max_size=40)
EXTRAS = st.dictionaries(st.integers(0, 12), st.binary(min_size=1, max_size=4), max_size=4)


@given(TOKEN_ROWS, st.integers(1, 5), EXTRAS, EXTRAS)
def test_an_extra_is_in_the_keys_of_its_chunk_and_of_all_behind_it(
    tokens: list[int], size: int, one: dict[int, bytes], two: dict[int, bytes]
) -> None:
    keys = [chunk_keys(tokens, NAMESPACE, size, extra=extra) for extra in (one, two)]
    for at in range(len(tokens) // size):
        same = {n: each for n, each in one.items() if n <= at} == {n: each for n, each in two.items() if n <= at}
        assert (keys[0][at] == keys[1][at]) == same
    assert chunk_keys(array("q", tokens), NAMESPACE, size, extra=one) == keys[0]


def test_an_extra_of_the_whole_prompt_is_one_of_its_first_chunk() -> None:
    tokens = list(range(12))
    keys = chunk_keys(tokens, NAMESPACE, 4, extra=b"adapter 7")
    assert keys == chunk_keys(tokens, NAMESPACE, 4, extra={0: b"adapter 7"})
    assert not set(keys) & set(chunk_keys(tokens, NAMESPACE, 4))
    assert chunk_keys(tokens, NAMESPACE, 4, extra=b"") == chunk_keys(tokens, NAMESPACE, 4)


@given(TOKEN_ROWS, st.integers(1, 5), EXTRAS, st.integers(0, 8))
def test_a_sequence_with_extras_is_continued(
    tokens: list[int], size: int, extra: dict[int, bytes], chunks: int
) -> None:
    keys = chunk_keys(tokens, NAMESPACE, size, extra=extra)
    chunks = min(chunks, len(keys))
    if chunks:
        rest = {number - chunks: each for number, each in extra.items() if number >= chunks}
        assert keys[chunks:] == chunk_keys(
            tokens[chunks * size :], NAMESPACE, size, previous=keys[chunks - 1], extra=rest
        )


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({-1: b"x"}, "chunk -1"),
        ({True: b"x"}, "chunk True"),
        ({0: "x"}, "chunk 0 is a str"),
        ("lora", "extra is a str"),
    ],
)
def test_an_extra_of_no_chunk_is_refused(extra: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        chunk_keys([1, 2], NAMESPACE, 1, extra=extra)


def test_an_extra_of_the_whole_prompt_is_not_given_again_to_its_continuation() -> None:
    with pytest.raises(UsageError, match="previous includes it"):
        chunk_keys([1, 2], NAMESPACE, 1, previous=bytes(32), extra=b"adapter 7")
