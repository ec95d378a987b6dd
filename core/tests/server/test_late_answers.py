"""What is kept for a request that is answered later is given back exactly once."""

from __future__ import annotations

from itertools import count

import pytest

from lmcache_core.protocol import messages as m
from lmcache_core.server.peers import late_answers
from lmcache_core.server.peers.late_answers import LateAnswers
from lmcache_core.server.peers.session import Session

NUMBERS = count(1)


def connected() -> Session:
    return Session(next(NUMBERS), peer=None, uid=0, pid=0, carrier="lifeline", origin="0")


class Watched:
    def __init__(self) -> None:
        self.done: list[tuple[str, m.Message | None]] = []
        self.late = LateAnswers[str](lambda kept, answer: self.done.append((kept, answer)))


@pytest.fixture
def watched() -> Watched:
    return Watched()


def test_it_comes_back_with_the_answer_and_only_with_the_first(watched: Watched) -> None:
    session, other = connected(), connected()
    watched.late.keep(session, 1, "one")
    watched.late.keep(session, 2, "two")
    other.send(m.Done(1))
    session.send(m.Done(3))
    assert watched.done == []
    session.send(m.Done(2))
    session.send(m.Done(2))
    session.tell_end()
    assert watched.done == [("two", m.Done(2)), ("one", None)]


def test_it_comes_back_at_the_sessions_end_and_nothing_is_kept_of_that_session(watched: Watched) -> None:
    session, other = connected(), connected()
    watched.late.keep(session, 1, "one")
    watched.late.keep(other, 1, "another's")
    session.tell_end()
    assert watched.done == [("one", None)]
    assert (len(watched.late), session.listeners) == (1, ())


def test_for_a_session_that_has_ended_nothing_is_kept(watched: Watched) -> None:
    session = connected()
    session.ended_by = "die"
    watched.late.keep(session, 1, "one")
    assert (watched.done, len(watched.late)) == ([("one", None)], 0)


def test_a_second_request_of_the_same_number_gives_the_first_back(watched: Watched) -> None:
    session = connected()
    watched.late.keep(session, 1, "one")
    watched.late.keep(session, 1, "again")
    session.send(m.Done(1))
    assert watched.done == [("one", None), ("again", m.Done(1))]


def test_beyond_the_limit_the_oldest_comes_back(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(late_answers, "LATE_ANSWERS_MAX", 2)
    session = connected()
    for number in range(5):
        watched.late.keep(session, number, str(number))
    assert watched.done == [("0", None), ("1", None), ("2", None)]
    assert len(watched.late) == 2


def test_when_nobody_watches_any_more_everything_comes_back_at_once(watched: Watched) -> None:
    session = connected()
    watched.late.keep(session, 1, "one")
    watched.late.end()
    session.send(m.Done(1))
    assert (watched.done, session.listeners) == ([("one", None)], ())
