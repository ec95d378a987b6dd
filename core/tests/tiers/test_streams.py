"""Many buffers over one socket by a deadline."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_core.tiers.streams import BUFFERS_MAX, advance, left_s, receive_into


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


@settings(deadline=None)
@given(st.lists(st.integers(0, 9), max_size=9), st.data())
def test_whatever_was_moved_the_rest_is_what_was_not(sizes: list[int], data: st.DataObject) -> None:
    whole = bytes(range(sum(sizes)))
    buffers, taken = [], 0
    for size in sizes:
        buffers.append(memoryview(whole)[taken : taken + size])
        taken += size
    at = moved = 0
    while moved < len(whole):
        nbytes = data.draw(st.integers(1, len(whole) - moved))
        at, moved = advance(buffers, at, nbytes), moved + nbytes
        assert b"".join(buffers[at:]) == whole[moved:]
    assert advance(buffers, at, 0) == len(buffers), "what holds nothing is passed over"


def test_a_deadline_that_has_come_is_late_and_one_that_never_comes_is_far(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    with pytest.raises(TimeoutError):
        left_s(time.monotonic() - 1.0)
    pair[0].settimeout(left_s(float("inf")))


def test_nobody_waits_for_a_silent_peer_beyond_the_deadline(pair: tuple[socket.socket, socket.socket]) -> None:
    with pytest.raises(TimeoutError):
        receive_into(pair[0], [memoryview(bytearray(1))], time.monotonic() + 0.01)


def test_all_buffers_are_filled_by_one_call_although_they_come_in_pieces(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = pair
    ours.settimeout(1.0)  # with which Python would return each piece
    buffers = [bytearray(3) for _ in range(BUFFERS_MAX + 1)]
    sent = bytes(i % 251 for i in range(3 * BUFFERS_MAX))

    def send() -> None:
        for at in range(0, len(sent), 100):
            theirs.sendall(sent[at : at + 100])

    thread = threading.Thread(target=send)
    thread.start()
    got = receive_into(ours, [memoryview(each) for each in buffers], time.monotonic() + 60.0, whole=True)
    thread.join()
    assert (got, b"".join(buffers[:BUFFERS_MAX])) == (len(sent), sent)


def test_the_end_of_the_connection_is_no_bytes(pair: tuple[socket.socket, socket.socket]) -> None:
    pair[1].close()
    assert receive_into(pair[0], [memoryview(bytearray(1))], time.monotonic() + 60.0) == 0
