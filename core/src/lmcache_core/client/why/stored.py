"""Wait until the tiers have what was stored."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from lmcache_core.client.link.channel import expect
from lmcache_core.client.link.link import Link
from lmcache_core.client.link.reconnecting import Links
from lmcache_core.client.why.explaining import L1_NAME, ON_ITS_WAY, KeyExplanation, TierWord, explained
from lmcache_core.errors import UsageError
from lmcache_core.limits import EXPLAIN_KEYS_MAX, STORED_WAIT_S_MAX
from lmcache_core.protocol import messages as m
from lmcache_core.protocol.codec import join_keys
from lmcache_core.tokens.namespace import Namespace


@dataclass(frozen=True)
class StoredKey:
    """What became of one key. `tiers` have it; it is on its way to those `waiting`; `lost` say why they do not have it
    and, unless it is stored again, never will. `why`: all of it in a sentence."""

    key: bytes
    tiers: tuple[str, ...]
    waiting: tuple[str, ...]
    lost: tuple[TierWord, ...]
    why: str

    @property
    def stored(self) -> bool:
        """Whether some tier has it, and every tier that should have it. Tiers to which the store policy does not send
        it, and tiers that lack it for reasons other than a failure, do not count."""
        return bool(self.tiers) and not self.waiting and not self.lost


def wait_stored(links: Links, keys: Sequence[bytes], namespace: Namespace, timeout_s: float) -> list[StoredKey]:
    """Ask one frame at a time; each answer comes when none of its keys is on its way, or at the timeout."""
    if not isinstance(timeout_s, int | float) or not timeout_s >= 0:
        raise UsageError(f"timeout_s is {timeout_s!r}: give seconds, 0 or more")
    end = time.monotonic() + timeout_s
    answers: list[StoredKey] = []
    for first in range(0, len(keys), EXPLAIN_KEYS_MAX):
        page = keys[first : first + EXPLAIN_KEYS_MAX]
        found = _ask(links, page, namespace, end)
        while time.monotonic() < end and any(each.waiting for each in found):
            found = _ask(links, page, namespace, end)
        answers += found
    return answers


def _ask(links: Links, keys: Sequence[bytes], namespace: Namespace, end: float) -> list[StoredKey]:
    blob = join_keys(keys)

    def wait_s() -> float:  # less if the server is asked again because it had forgotten our session
        return min(STORED_WAIT_S_MAX, max(0.0, end - time.monotonic()))

    def ask(link: Link) -> m.Reply:
        return link.channel.call_held_back(m.WaitStored(0, namespace.id, blob, wait_s()), wait_s())

    reply = links.call(lambda link: link.in_namespace(namespace, ask, link), patient=True)
    return [_stored_key(each) for each in explained(expect(reply, m.Explained), keys)]


def _stored_key(explanation: KeyExplanation) -> StoredKey:
    has = tuple(each.tier for each in explanation.tiers if each.found)
    waiting = tuple(each.tier for each in explanation.tiers if each.reason == ON_ITS_WAY)
    lost = tuple(each for each in explanation.tiers if each.reason not in ("", ON_ITS_WAY))
    why = "; ".join(f"tier {each.tier}: {each.why}" for each in explanation.tiers) or "this server has no tier"
    if not has and not waiting and L1_NAME not in explanation.where:
        why = explanation.why if explanation.tiers else f"{explanation.why}; {why}"
    return StoredKey(explanation.key, has, waiting, lost, why)
