"""The states of a client's link to a server, and the one table that says how it moves between them.

A link is made in steps that never wait: connect, say hello, map the pool, lock our row, tell the server. Every call
that finds the link unfinished takes the next step. Once it is open, silence does not end it: a call that times out
makes it SILENT, further calls are answered at once as unreachable, and the first frame that arrives opens it again.
Only the end of the connection, or a refusal, ends it; the next link begins after a pause.

The table feeds the code (`Channel.move` looks every step up in it), the diagram in the docs and the tests.
"""

from __future__ import annotations

from enum import IntEnum

from lmcache_core.transitions import Transitions


class LinkState(IntEnum):
    """How far a link has come."""

    CONNECTING = 0  # nothing was sent yet; longer than one step if the backlog is full
    GREETING = 1  # hello is sent; waiting for the welcome
    MAPPING = 2  # welcome received: map the pool and take the life lock
    ATTACHING = 3  # the request is sent; waiting for its answer
    OPEN = 4  # calls go over it
    SILENT = 5  # a call timed out; the connection stands
    ENDED = 6  # hung up, refused, or closed


class LinkEvent(IntEnum):
    """What happens to a link."""

    CONNECTED = 0
    WELCOMED = 1
    MAPPED = 2
    UNMAPPED = 3  # this client has no pool: it did not want one, or cannot map it
    ATTACHED = 4
    QUIET = 5  # a call timed out and nothing arrived meanwhile
    HEARD = 6  # a frame arrived
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
