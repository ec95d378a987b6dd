"""Where keys are, or how they were lost. It only looks: it holds nothing and does not tell the policy."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from lmcache_core.kernel.answers import Grant, Reason
from lmcache_core.kernel.residents import Residents
from lmcache_core.kernel.states import State


@dataclass(slots=True)
class Explanation:
    """All columns are positional with the keys. `at_s` (the kernel's clock) and `session_ids` are 0 if nothing is
    remembered. The session is the one that lost, cleared or pushed out the key; 0 is the server itself.

    `since_s`: losses at or before that time may be forgotten. None: none is forgotten.
    """

    statuses: bytearray
    reasons: bytearray
    at_s: array[float]
    session_ids: array[int]
    since_s: float | None


def explain(residents: Residents, namespace: int, layout_id: int, keys: Sequence[bytes]) -> Explanation:
    """`layout_id`: that of the namespace in the asking session. Objects of another layout are no hit."""
    table = residents.table.of(namespace)
    count = len(keys)
    explanation = Explanation(
        bytearray(count),
        bytearray(count),
        array("d", bytes(8 * count)),
        array("Q", bytes(8 * count)),
        residents.reasons.since_s,
    )
    for at, key in enumerate(keys):
        there = table.get(key)
        if there is None:
            explanation.statuses[at] = Grant.MISS
            loss = residents.lost(namespace, key)
            explanation.reasons[at] = Reason.NEVER_STORED if loss is None else loss.reason
            if loss is not None:
                explanation.at_s[at], explanation.session_ids[at] = loss.at_s, loss.session_id
        elif there.state is State.LOADING:
            explanation.statuses[at] = Grant.LOADING
        elif there.state is State.WRITING:
            explanation.statuses[at], explanation.reasons[at] = Grant.MISS, Reason.BEING_WRITTEN
        elif there.layout_id != layout_id:
            explanation.statuses[at], explanation.reasons[at] = Grant.MISS, Reason.OTHER_LAYOUT
    return explanation
