"""How far the scans of a tier's medium have come, and the one table of their transitions (`Rebuild.move`).

The first scan counts everything, and enters it once the list is complete; each later scan corrects the accounts.
"""

from __future__ import annotations

from enum import Enum, StrEnum, auto

from lmcache_core.transitions import Transitions


class RebuildState(StrEnum):
    """The current step."""

    OFF = "off"  # the medium cannot be scanned
    SCANNING = "scanning"
    ADOPTING = "adopting"
    DONE = "done"
    RESCANNING = "rescanning"  # the accounts stay in use; what others stored is added
    FORGETTING = "forgetting"  # what others deleted is removed


class RebuildEvent(Enum):
    """What moves it on."""

    LISTED = auto()  # the last page has arrived
    REFUSED = auto()  # the medium does not let itself be listed: the tier serves all the same
    FINISHED = auto()  # everything listed is in the accounts
    AGAIN = auto()  # the next scan is due, or somebody asked for one


REBUILD_TRANSITIONS: Transitions[RebuildState, RebuildEvent] = Transitions(
    {
        (RebuildState.SCANNING, RebuildEvent.LISTED): RebuildState.ADOPTING,
        (RebuildState.SCANNING, RebuildEvent.REFUSED): RebuildState.ADOPTING,
        (RebuildState.RESCANNING, RebuildEvent.REFUSED): RebuildState.DONE,
        (RebuildState.ADOPTING, RebuildEvent.FINISHED): RebuildState.DONE,
        (RebuildState.DONE, RebuildEvent.AGAIN): RebuildState.RESCANNING,
        (RebuildState.RESCANNING, RebuildEvent.LISTED): RebuildState.FORGETTING,
        (RebuildState.FORGETTING, RebuildEvent.FINISHED): RebuildState.DONE,
    }
)
