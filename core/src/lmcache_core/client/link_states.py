"""The states of a client's link to a server, and the one table that says how it moves between them.

A link is made in steps that wait for nothing: connect, say hello, map the pool, lock our row of it and say so. Every
call that finds it half made takes the next step. Once it is open, silence is not its end: a call that was not answered
in time leaves it SILENT, further calls answer at once that nobody is there, and the first frame that comes opens it
again. Only an end of the connection, or a refusal, ends it; the next link begins after a pause.

The table feeds the code (`Channel.move` looks every step up in it), the diagram in the docs and the tests.
"""

from __future__ import annotations

from enum import IntEnum

from lmcache_core.transitions import Transitions


class LinkState(IntEnum):
    """How far a link has come."""

    CONNECTING = 0  # nothing was said yet; with a full backlog for longer than one step
    GREETING = 1  # hello is sent, the welcome is awaited
    MAPPING = 2  # welcome: the pool is to be mapped, the life lock taken
    ATTACHING = 3  # the server is told so; its answer is awaited
    OPEN = 4  # calls go over it
    SILENT = 5  # a call was not answered in time; the connection stands
    ENDED = 6  # hung up, refused, or closed


class LinkEvent(IntEnum):
    """What happens to a link."""

    CONNECTED = 0
    WELCOMED = 1
    MAPPED = 2
    UNMAPPED = 3  # there is no pool for this client: it did not want one, or cannot have it
    ATTACHED = 4
    QUIET = 5  # a call waited for its time and nothing was heard meanwhile
    HEARD = 6  # a frame came
    END = 7


LINK_TRANSITIONS: Transitions[LinkState, LinkEvent] = Transitions(
    {
        (LinkState.CONNECTING, LinkEvent.CONNECTED): LinkState.GREETING,
        (LinkState.GREETING, LinkEvent.WELCOMED): LinkState.MAPPING,
        (LinkState.MAPPING, LinkEvent.MAPPED): LinkState.ATTACHING,
        (LinkState.MAPPING, LinkEvent.UNMAPPED): LinkState.OPEN,
        (LinkState.ATTACHING, LinkEvent.ATTACHED): LinkState.OPEN,
        (LinkState.OPEN, LinkEvent.QUIET): LinkState.SILENT,
        (LinkState.SILENT, LinkEvent.HEARD): LinkState.OPEN,
        (LinkState.CONNECTING, LinkEvent.END): LinkState.ENDED,
        (LinkState.GREETING, LinkEvent.END): LinkState.ENDED,
        (LinkState.MAPPING, LinkEvent.END): LinkState.ENDED,
        (LinkState.ATTACHING, LinkEvent.END): LinkState.ENDED,
        (LinkState.OPEN, LinkEvent.END): LinkState.ENDED,
        (LinkState.SILENT, LinkEvent.END): LinkState.ENDED,
    }
)
