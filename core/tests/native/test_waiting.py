"""The word that workers wait for: what is no such word is refused, whatever it is."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from lmcache_core.native import native

if native is None:
    pytest.skip("the C extension is not in use", allow_module_level=True)

WORDS: list[Any] = [bytearray(4), bytearray(16), memoryview(bytearray(16))[1:9], 5]


def word(value: int = 0) -> memoryview:
    return memoryview(bytearray(value.to_bytes(8, "little")))


@pytest.mark.parametrize("given", [*WORDS, bytes(8)])
def test_a_buffer_that_is_no_writable_word_is_not_counted_up(given: Any) -> None:
    good = word(7)
    with pytest.raises((TypeError, ValueError, BufferError)):
        native.announce(given, good)
    with pytest.raises((TypeError, ValueError, BufferError)):
        native.announce(good, given)
    assert good == word(7)


@pytest.mark.parametrize("given", WORDS)
def test_a_buffer_that_is_no_word_is_not_waited_for(given: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        native.await_word(given, 0, 1.0)


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf"), 1e9])
def test_times_without_an_end_are_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match="seconds must be"):
        native.await_word(word(), 0, seconds)


@pytest.mark.parametrize("seen", [-1, 1 << 64])
def test_what_was_seen_is_a_u64(seen: int) -> None:
    with pytest.raises(OverflowError):
        native.await_word(word(), seen, 1.0)


def test_the_servers_word_wins_over_what_stands_in_the_pool() -> None:
    known, pool = word(3), word(99)
    native.announce(known, pool)
    assert known == pool == word(4)


def test_other_threads_run_while_one_waits() -> None:
    known, pool = word(), word()
    waiter = threading.Thread(target=native.await_word, args=(pool, 0, 60.0))
    waiter.start()
    began = time.monotonic()
    while waiter.is_alive() and time.monotonic() - began < 60:
        native.announce(known, pool)
        waiter.join(0.01)
    assert not waiter.is_alive()
