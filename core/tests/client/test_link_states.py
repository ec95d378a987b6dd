"""The transition table is the only way between the states of a client's link."""

from __future__ import annotations

import itertools
import threading

import pytest

from core.tests.client.test_channel import Script
from lmcache_core.client.link.channel import Channel
from lmcache_core.client.link.handshake import STEPS
from lmcache_core.client.link.link_states import LINK_TRANSITIONS, LinkEvent, LinkState


def channel(state: LinkState) -> Channel:
    return Channel(Script(), lambda notice: None, state=state)


def test_every_link_is_reached_from_connecting_and_can_end_in_each_state() -> None:
    seen, todo = {LinkState.CONNECTING}, [LinkState.CONNECTING]
    while todo:
        here = todo.pop()
        for (before, _), after in LINK_TRANSITIONS.items():
            if before is here and after not in seen:
                seen.add(after)
                todo.append(after)
    assert seen == set(LinkState)
    for state in set(LinkState) - {LinkState.ENDED}:
        assert LINK_TRANSITIONS[state, LinkEvent.END] is LinkState.ENDED


def test_nothing_leads_out_of_the_end_and_silence_is_no_end() -> None:
    for (before, event), after in LINK_TRANSITIONS.items():
        assert before is not LinkState.ENDED
        if after is LinkState.ENDED:
            assert event is LinkEvent.END


def test_a_link_is_silent_only_from_open_and_open_again_by_being_heard() -> None:
    assert [key for key, after in LINK_TRANSITIONS.items() if after is LinkState.SILENT] == [
        (LinkState.OPEN, LinkEvent.QUIET)
    ]
    assert LINK_TRANSITIONS[LinkState.SILENT, LinkEvent.HEARD] is LinkState.OPEN


def test_each_state_on_the_way_has_its_step_and_no_other_state_has_one() -> None:
    assert set(STEPS) == set(LinkState) - {LinkState.OPEN, LinkState.SILENT, LinkState.ENDED}


def test_a_step_that_is_not_in_the_table_is_refused() -> None:
    for before, event in itertools.product(LinkState, LinkEvent):
        made = channel(before)
        if (before, event) in LINK_TRANSITIONS:
            made.move(event)
            assert made.state is LINK_TRANSITIONS[before, event]
        else:
            with pytest.raises(KeyError):
                made.move(event)
            assert made.state is before


def test_a_link_ends_once_whoever_ends_it() -> None:
    made = channel(LinkState.OPEN)
    threads = [threading.Thread(target=made.close) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert made.state is LinkState.ENDED


def test_the_diagram_has_every_event() -> None:
    assert "CONNECTING --> GREETING: connected" in LINK_TRANSITIONS.diagram()
    for event in LinkEvent:
        assert event.name.lower() in LINK_TRANSITIONS.diagram()
