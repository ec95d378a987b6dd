"""Keys by the C extension and keys by Python: the same values, the same errors, whatever holds the tokens."""

from __future__ import annotations

import hashlib
import struct
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_core.native import native
from lmcache_core.pool.layout import Layout
from lmcache_core.tokens import Namespace, chunk_keys, keys, keys_from_block_hashes

NAMESPACE = Namespace("m", Layout("bfloat16", (2, 4, 16, 2, 8), "KLTHD"))
WAYS = {"native": native, "python": None}

needs_native = pytest.mark.skipif(native is None, reason="the C extension is not there")


@pytest.fixture(params=[pytest.param("native", marks=needs_native), "python"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(keys, "native", WAYS[request.param])
    return str(request.param)


def said(call: Callable[[], Any]) -> Any:
    """What a call gives, or how it fails."""
    try:
        return call()
    except Exception as error:  # noqa: BLE001 - which one it is, is what is compared
        return type(error), str(error)


def both(call: Callable[[], Any]) -> Any:
    """What the call says both ways, which is the same."""
    with pytest.MonkeyPatch.context() as patch:
        answers = {}
        for name, module in WAYS.items():
            patch.setattr(keys, "native", module)
            answers[name] = said(call)
    assert answers["native"] == answers["python"]
    return answers["python"]


def by_definition(ids: list[int], step: int) -> list[bytes]:
    found = [NAMESPACE.digest]
    for start in range(0, len(ids) - step + 1, step):
        found.append(hashlib.sha256(found[-1] + struct.pack(f"<{step}I", *ids[start : start + step])).digest())
    return found[1:]


def apart(kind: str, ids: list[int], step: int) -> memoryview:
    """Every `step`-th item of a longer array."""
    around = array(kind, [7]) * max(1, abs(step) * len(ids))
    view = memoryview(around)[::step][: len(ids)]
    for place, each in enumerate(ids):
        view[place] = each
    return view


def numpy_of(ids: list[int], dtype: str) -> Any:
    return pytest.importorskip("numpy").array(ids, dtype=dtype)


def tensor_of(ids: list[int], dtype: str) -> Any:
    torch = pytest.importorskip("torch")
    return torch.tensor(ids, dtype=getattr(torch, dtype))


HOLDERS: dict[str, Callable[[list[int]], Any]] = {
    "list": list,
    "tuple": tuple,
    "iterator": iter,
    "list of another class": lambda ids: type("Ids", (list,), {})(ids),
    **{f"array {kind}": lambda ids, kind=kind: array(kind, ids) for kind in "iIlLqQ"},
    **{f"{kind} apart": lambda ids, kind=kind: apart(kind, ids, 3) for kind in "iIqQ"},
    **{f"{kind} backwards": lambda ids, kind=kind: apart(kind, ids, -2) for kind in "iIqQ"},
    "numpy scalars": lambda ids: list(numpy_of(ids, "int64")),
    "numpy int32": lambda ids: numpy_of(ids, "int32"),
    "numpy uint64": lambda ids: numpy_of(ids, "uint64"),
    "numpy column": lambda ids: numpy_of([[each, 1] for each in ids] or [[0, 0]], "int64")[: len(ids), 0],
    "numpy big endian": lambda ids: numpy_of(ids, ">i8"),
    "numpy big endian, unsigned": lambda ids: numpy_of(ids, ">u4"),
    "numpy little endian": lambda ids: numpy_of(ids, "<i8"),
    "numpy unaligned": lambda ids: numpy_of([(1, each) for each in ids], "u1,<i8")["f1"],
    "numpy booleans": lambda ids: numpy_of([each > 7 for each in ids], "bool"),
    **{f"torch {dtype}": lambda ids, d=dtype: tensor_of(ids, d) for dtype in ("int32", "uint32", "int64", "uint64")},
    "torch apart": lambda ids: tensor_of([[each, 1] for each in ids] or [[0, 0]], "int64")[: len(ids), 0],
}
ANY_IDS = st.lists(st.integers(-3, 3) | st.integers(-(2**31), 2**31 - 1) | st.integers(0, 2**32 + 2), max_size=40)
GOOD_IDS = st.lists(st.integers(0, 2**31 - 1), max_size=40)


@needs_native
@pytest.mark.parametrize("holder", HOLDERS)
def test_both_ways_say_the_same_of_any_ids_in_any_holder(holder: str) -> None:
    @settings(deadline=None, max_examples=40)
    @given(ANY_IDS | GOOD_IDS, st.integers(1, 9))
    def check(ids: list[int], step: int) -> None:
        try:
            HOLDERS[holder](ids)
        except (OverflowError, ValueError, RuntimeError, TypeError):
            return  # that holder cannot hold them
        answer = both(lambda: chunk_keys(HOLDERS[holder](ids), NAMESPACE, step))
        if isinstance(answer, list):
            assert answer == by_definition([int(each) for each in HOLDERS[holder](ids)], step)

    check()


ODD: dict[str, Callable[[], object]] = {
    "booleans": lambda: [True, False, True, True],
    "a float": lambda: [1, 2.0, 3],
    "a nested list": lambda: [[1, 2]],
    "an id of 33 bits": lambda: [1, 2**32, -1],
    "a negative id behind the last chunk": lambda: [1, 2, 3, 4, -5],
    "a negative id behind the last chunk, in an array": lambda: array("q", [1, 2, 3, 4, -5]),
    "an enormous id": lambda: [2**200],
    "a text": lambda: "123",
    "bytes": lambda: b"\0\0\0\1",
    "bytes cast to words": lambda: memoryview(bytes(32)).cast("I"),
    "nothing": lambda: None,
    "a set": lambda: {1, 2},
    "two dimensions": lambda: memoryview(array("q", range(4))).cast("B").cast("q", (2, 2)),
    "no dimension": lambda: memoryview(array("q", [4])).cast("B").cast("q", ()),
    "a memoryview that was released": lambda: [view := memoryview(bytes(8)), view.release()][0],
    "16 bits": lambda: array("H", [1, 2]),
    "floats": lambda: array("d", [1.0, 2.0]),
    "an empty array": lambda: array("q"),
    "an empty list": list,
    "an empty tensor": lambda: tensor_of([], "int64"),
    "a float tensor": lambda: tensor_of([1, 2], "float32"),
    "a tensor of two dimensions": lambda: tensor_of([[1, 2]], "int64"),
    "a range": lambda: range(5),
}


@needs_native
@pytest.mark.parametrize("case", ODD)
def test_both_ways_say_the_same_of_odd_tokens(case: str) -> None:
    for step in (1, 2, 3, 2**70):
        both(lambda step=step: chunk_keys(ODD[case](), NAMESPACE, step))


@needs_native
@settings(deadline=None, max_examples=60)
@given(st.lists(st.binary(min_size=28, max_size=80) | st.binary(min_size=32, max_size=32), max_size=8))
def test_both_ways_make_the_same_keys_of_block_hashes(hashes: list[bytes]) -> None:
    for held in (hashes, tuple(hashes), [bytearray(each) for each in hashes], [*hashes, bytes(5000)], [*hashes, 7]):
        both(lambda held=held: keys_from_block_hashes(held, NAMESPACE))
        both(lambda held=held: keys_from_block_hashes(held, NAMESPACE, algorithm="xxhash", seed="7"))


def test_long_prompts_have_the_keys_of_the_definition(way: str) -> None:
    ids = [each * 2_654_435_761 % 2**32 for each in range(6_000)]
    for step in (1, 16, 100, 256, 1016, 1017, 2500):
        expected = by_definition(ids, step)
        for held in (ids, array("I", ids), array("q", ids), array("Q", ids)):
            assert chunk_keys(held, NAMESPACE, step) == expected, way


def test_a_bad_id_is_named_wherever_it_stands(way: str) -> None:
    for position in (0, 1, 255, 256, 5_000, 5_119, 5_120, 5_200):
        for held in ([5] * 5_201, array("q", [5]) * 5_201, array("i", [5]) * 5_201):
            held[position] = -9
            with pytest.raises(keys.UsageError, match=f"^token {position} is -9: "):
                chunk_keys(held, NAMESPACE)


def test_no_token_becomes_an_int_object_on_the_way(way: str) -> None:
    torch = pytest.importorskip("torch")
    tracer: list[int] = []

    def holds() -> Iterator[Any]:
        yield array("q", range(1_000_000, 1_200_000))
        yield torch.arange(1_000_000, 1_200_000)

    for held in holds():
        before = sys.getallocatedblocks()
        found = chunk_keys(held, NAMESPACE)
        tracer.append(sys.getallocatedblocks() - before)
        assert len(found) == 200_000 // 256
        del found
    assert max(tracer) < 200_000 // 16


@needs_native
def test_another_thread_runs_while_a_buffer_is_hashed() -> None:
    """Were the interpreter held, nobody would come in between: it is asked to let go once in a hundred seconds."""
    gate, ran = threading.Lock(), threading.Event()
    gate.acquire()
    thread = threading.Thread(target=lambda: gate.acquire() and ran.set())
    thread.start()
    words = array("I", [1]) * (1 << 20)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(100)
    try:
        gate.release()
        until = time.monotonic() + 60  # on a busy machine the thread comes late
        while not (came := ran.is_set()) and time.monotonic() < until:
            chunk_keys(words, NAMESPACE)
    finally:
        sys.setswitchinterval(interval)
        thread.join()
    assert came
