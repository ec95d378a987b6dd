"""An adapter that does not keep its contract fails by name, whatever it answers, and leaves nothing half done."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from lmcache_core.errors import DamagedObjectError, TierError, UsageError
from lmcache_core.pool.layout import Layout
from lmcache_core.serde.chain import CodecChain
from lmcache_core.serde.contract import Serde
from lmcache_core.serde.scratch import Scratch
from lmcache_core.tiers.answers import LOAD_RESULTS, STORE_RESULTS, found_of, page_of
from lmcache_core.tiers.contract import Outcome, Result, ScanEntry, ScanPage
from lmcache_core.tiers.retry import call_batch

DONE = Outcome(Result.DONE, 8)
KEY = b"k" * 44


def untyped(*values: Any, **more: Any) -> Outcome:
    return Outcome(*values, **more)


NO_OUTCOMES: list[Any] = [
    untyped("done", 8), untyped("bogus"), untyped(None), None, 3, True, ("done", 8, "", False, "", ""),
    untyped(Result.DONE, "8"), untyped(Result.DONE, -1), untyped(Result.DONE, 1 << 80), untyped(Result.DONE, None),
    untyped(Result.DONE, 8.0), untyped(Result.FAILED, error=None), untyped(Result.FAILED, error=b"no"),
    untyped(Result.FAILED, error=object()), untyped(Result.DONE, 8, version=5), untyped(Result.DONE, 8, cure=[]),
]  # fmt: skip


def store(answer: Any, count: int = 2, allowed: Any = STORE_RESULTS) -> list[Outcome]:
    def store(items: Any, deadline: float) -> Any:
        return answer

    return call_batch(store, list(range(count)), time.monotonic(), threading.Event(), allowed)


@pytest.mark.parametrize("bad", NO_OUTCOMES, ids=repr)
def test_what_is_no_outcome_fails_its_object_and_no_other(bad: Any) -> None:
    first, second = store([bad, DONE])
    assert first.result is Result.FAILED
    assert "store returned" in first.error
    assert second == DONE


@pytest.mark.parametrize(
    "bad", [None, 5, "xx", iter([DONE, DONE]), {0: DONE, 1: DONE}, [DONE], [DONE] * 3, DONE, b"ab"]
)
def test_what_is_no_list_of_outcomes_fails_the_whole_call(bad: Any) -> None:
    for outcome in store(bad):
        assert outcome.result is Result.FAILED
        assert "store returned" in outcome.error


@pytest.mark.parametrize(
    ("allowed", "result"),
    [(STORE_RESULTS, Result.MISS), (STORE_RESULTS, Result.DAMAGED), (LOAD_RESULTS, Result.FULL)],
)
def test_a_result_that_is_no_answer_to_the_call_is_a_failure(allowed: Any, result: Result) -> None:
    (outcome,) = store([Outcome(result, error="why")], 1, allowed)
    assert outcome.result is Result.FAILED
    assert outcome.error == "why"
    (silent,) = store([Outcome(result)], 1, allowed)
    assert (silent.result, silent.error.endswith(f"{result}, which is no answer to it")) == (Result.FAILED, True)


def exists(*arguments: Any) -> None:
    """The call that is named."""


@pytest.mark.parametrize("bad", [["no", True], [None, True], [object(), True], [2, True], [True], [True] * 3])
def test_exists_answers_true_or_false_for_each_key(bad: Any) -> None:
    with pytest.raises(TierError, match="exists returned") as error:
        found_of(exists, bad, 2)
    assert not error.value.retryable
    assert found_of(exists, (1, False), 2) == [True, False]


@pytest.mark.parametrize(
    "bad",
    [
        None,
        ([], None),
        ScanPage([], 7),
        *(
            ScanPage([entry], None)
            for entry in (
                "x", ScanEntry("k" * 44, 5, 0.0), ScanEntry(b"", 5, 0.0), ScanEntry(b"k" * 65, 5, 0.0),
                ScanEntry(KEY, -5, 0.0), ScanEntry(KEY, 1 << 90, 0.0), ScanEntry(KEY, None, 0.0),
                ScanEntry(KEY, 5, math.nan), ScanEntry(KEY, 5, None), (KEY, 5, 0.0),
            )
        ),
    ],
    ids=repr,
)  # fmt: skip
def test_a_page_of_a_scan_has_entries_that_can_be_counted(bad: Any) -> None:
    with pytest.raises(TierError, match="exists returned"):
        page_of(exists, bad)
    page = page_of(exists, ScanPage(iter([ScanEntry(KEY, 5, 0.0)]), "next"))
    assert page == ScanPage([ScanEntry(KEY, 5, 0.0)], "next")


@pytest.mark.parametrize("bad", NO_OUTCOMES, ids=repr)
def test_stores_that_answer_nonsense_are_over_and_owed_again(doubles: Any, bad: Any) -> None:
    adapter = doubles.adapter()

    def store(items: Any, deadline: float) -> Any:
        return [bad] * len(items)

    adapter.store = store
    loop = doubles.loop(doubles.l1(64), doubles.tier("mem", adapter))
    loop.idle()
    loop.store(doubles.contents(3))
    loop.until(lambda: loop.tiering.status()["stores"]["counts"].get("lost_tier_error", 0) >= 3)
    assert loop.l1.held == 0, "no slot is held by a store that is over"
    assert "store returned" in loop.tiering.status()["tiers"][0]["last_error"]
    assert loop.tiering.status()["faults"] == 0


def test_a_file_that_is_larger_than_any_object_evicts_nothing(doubles: Any) -> None:
    adapter = doubles.adapter()
    adapter.scan = lambda cursor, deadline: ScanPage([ScanEntry(KEY, 1 << 50, 0.0)], None)
    loop = doubles.loop(doubles.l1(64), doubles.tier("mem", adapter))
    loop.idle()
    assert loop.tiering.status()["tiers"][0]["bytes_used"] == 0


# --- serdes ---------------------------------------------------------------------------------------------------

LAYOUT = Layout("uint8", (10_000,))


class Odd(Serde):
    """Encodes and decodes as it is told."""

    name = "odd"
    lossless = True

    def __init__(self, made: Callable[[bytes], Any] = lambda source: [source], fills: slice = slice(None)) -> None:
        self._made, self._fills = made, fills

    def encoded_bytes_max(self, nbytes: int, layout: Layout) -> int:
        return nbytes

    def encode(self, src: memoryview, layout: Layout, key: bytes) -> Any:
        return self._made(bytes(src))

    def decode(self, src: memoryview, into: memoryview, layout: Layout, key: bytes) -> None:
        into[self._fills] = src[self._fills]


@pytest.mark.parametrize(
    "fills", [slice(0), slice(10), slice(9_992), slice(8, None), slice(5_000, None), slice(3_000, 9_000)]
)
@pytest.mark.parametrize("place", [0, 1])
def test_a_decoder_that_leaves_what_was_there_before_has_decoded_nothing(fills: slice, place: int) -> None:
    chain = CodecChain([Odd(fills=fills), Odd()] if place else [Odd(), Odd(fills=fills)])
    content, scratch = bytes(range(250)) * 40, Scratch()
    encoded = chain.encode(memoryview(content), LAYOUT, KEY, scratch)
    source = memoryview(b"".join(encoded.buffers))
    into = memoryview(bytearray(b"of another tenant".ljust(10_000)))
    with pytest.raises(DamagedObjectError, match="'odd' filled only a part"):
        chain.decode(source, into, LAYOUT, KEY, encoded.lengths, scratch)
    whole = CodecChain([Odd(), Odd()])
    whole.decode(source, into, LAYOUT, KEY, encoded.lengths, scratch)
    assert into == content


@pytest.mark.parametrize("nbytes", [1, 7, 8, 9, 4095, 4096, 4097, 4103])
def test_what_is_decoded_whole_is_taken_at_every_size(nbytes: int) -> None:
    chain, layout, scratch = CodecChain([Odd()]), Layout("uint8", (nbytes,)), Scratch()
    into = memoryview(bytearray(nbytes))
    chain.decode(memoryview(bytes(range(255)) * 17)[:nbytes], into, layout, KEY, [nbytes], scratch)
    assert bytes(into) == (bytes(range(255)) * 17)[:nbytes]


@pytest.mark.parametrize("made", [lambda _: [], lambda _: [b""], lambda source: [source, b"x"]])
def test_what_no_decoder_would_accept_is_not_stored(made: Callable[[bytes], Any]) -> None:
    with pytest.raises(UsageError, match="serde 'odd' made"):
        CodecChain([Odd(made)]).encode(memoryview(bytes(10_000)), LAYOUT, KEY, Scratch())


def test_an_encoder_may_return_buffers_of_other_items() -> None:
    words = memoryview(bytes(10_000)).cast("I")
    encoded = CodecChain([Odd(lambda source: [words])]).encode(memoryview(bytes(10_000)), LAYOUT, KEY, Scratch())
    assert (list(encoded.lengths), [part.nbytes for part in encoded.buffers]) == ([10_000], [10_000])
