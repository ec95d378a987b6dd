"""Why did it miss? Combines what the server and its tiers say about each key."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lmcache_core.client.link.channel import expect
from lmcache_core.client.link.link import Link
from lmcache_core.kernel.answers import Grant, Reason
from lmcache_core.limits import EXPLAIN_KEYS_MAX, TIER_LOOKUP_S
from lmcache_core.protocol import messages as m
from lmcache_core.protocol.codec import join_keys
from lmcache_core.tiers.l1 import Stored, TierReason

__all__ = ["KeyExplanation", "MissReason", "TierWord", "counted_reasons"]

L1_NAME = "l1"
ON_ITS_WAY = "on_its_way"
# For these, the L1 knows more than any tier; after the others, a tier was the key's last chance.
_L1_HAS_THE_WORD = {
    Reason.BEING_WRITTEN, Reason.OTHER_LAYOUT, Reason.CLEARED, Reason.EXPIRED, Reason.WRITER_DIED, Reason.ABORTED,
    Reason.QUOTA, Reason.NO_ROOM,
}  # fmt: skip
_SENTENCES = {
    Reason.NONE: "it is not in the pool",
    Reason.NEVER_STORED: "it was never stored through this server{since}{unknown}",
    Reason.EVICTED: "evicted from the pool {age} by {policy}{pushed}",
    Reason.EXPIRED: "its writer{who} did not commit in time: its lease expired {age}",
    Reason.CLEARED: "cleared {age}{by}",
    Reason.QUOTA: "refused {age}: its tenant, or the session{who}, was at its quota",
    Reason.TIER_ERROR: "its load from a tier failed {age}",
    Reason.LATE: "its load from a tier was not done in time {age}",
    Reason.DAMAGED: "found damaged {age}",
    Reason.DROPPED: "removed from the pool {age} by the store policy, or after a temporary load",
    Reason.WRITER_DIED: "its writer{who} died before the commit {age}",
    Reason.BEING_WRITTEN: "it is being written now",
    Reason.NO_ROOM: "refused {age}: the pool was full and nothing could be evicted, or the object is too large for it",
    Reason.OTHER_LAYOUT: "the pool has it with another layout than this session registered",
    Reason.ABORTED: "its writer{who} gave up {age}",
    Reason.UNVERIFIABLE: "its reader wants all objects verified, but it has no checksum",
}
_TOO_SLOW = "it left the pool before it was stored there"
_TIER_SENTENCES: dict[str, str] = {
    TierReason.THROTTLED: "dropped by its full queue {age}",
    TierReason.EVICTED: "evicted {age}{words}",
    TierReason.NO_ROOM: "it had no room {age}",
    TierReason.TIER_ERROR: "failed {age}{words}",
    TierReason.DAMAGED: "damaged there, found {age}{words}",
    TierReason.LATE: "not done in time {age}{words}",
    TierReason.GONE: "gone from it {age}",
}

_UNKNOWN = "nobody else uses this namespace, and the pool has nothing of it"

# The cure for a reason, if there is one: docs/operating/why-did-it-miss.md has the same table.
_HELPS = {
    "never_stored": "compare namespaces; look at the engine's side",
    "evicted": "a larger pool or tier; another policy (`lmcache-core simulate`)",
    "throttled": 'a faster tier, more `connections`; `dirty = "wait"`',
    "tier_error": "see `lmcache-core status` and the tier's logs",
    "late": "see `lmcache-core status` and the tier's logs",
    "damaged": "check the medium for errors",
    "no_room": "look for leases and pins that are never ended",
    "quota": "`status` names the culprit (`l1.tenants`, `l1.holders`)",
    "expired": "look at the worker's logs",
    "writer_died": "look at the worker's logs",
    "aborted": "look at the worker's logs",
    "other_layout": "use one layout for each namespace",
    "gone": "find out what deletes objects on the tier's medium",
    "unverifiable": "make writers pass checksums, or relax `verify`",
}
# Counted, but not the answer about a single key: the name → its meaning, and whose advice applies.
_COUNTED = {
    "behind_a_miss": ("it follows the first miss of its prefix, so it was not looked up", ""),
    "loading": ("it is on its way from a tier", ""),
}


@dataclass(frozen=True)
class MissReason:
    """A reason by which misses are counted: `word` is what `explain` says, `means` a sentence, and `helps` what to do
    about it, empty if nothing is wrong."""

    word: str
    means: str
    helps: str


def counted_reasons() -> dict[str, MissReason]:
    """By the names under which `status` and the metrics count misses."""
    meanings = sentences()
    reasons = [
        str(reason) for reason in Reason if reason not in (Reason.NONE, Reason.UNVERIFIABLE)
    ]  # only clients say that
    found = {reason: MissReason(reason, meanings[reason], _HELPS.get(reason, "")) for reason in reasons}
    return found | {name: MissReason(name, means, helps) for name, (means, helps) in _COUNTED.items()}


def sentences() -> dict[str, str]:
    """What each reason means: the word → the sentences of the pool and the tiers, without details of a single case."""
    general = dict.fromkeys(("since", "unknown", "pushed", "who", "by", "words"), "") | {
        "age": "before",
        "policy": "the eviction policy",
    }
    found: dict[str, list[str]] = {}
    for reason, sentence in _SENTENCES.items():
        found.setdefault(str(reason), []).append(sentence.format(**general))
    for word, sentence in _TIER_SENTENCES.items():
        found.setdefault(word, []).append("a tier: " + sentence.format(**general))
    return {word: "; ".join(each) for word, each in found.items()}


@dataclass(frozen=True)
class TierWord:
    """What one tier says about one key. `found` is None if the tier did not answer. `reason`: why not, or how it lost
    the key (empty: it knows nothing about it), at `at_unix_s`, `age_s` ago. `words` are the tier's own."""

    tier: str
    found: bool | None
    reason: str = ""
    at_unix_s: float | None = None
    age_s: float | None = None
    words: str = ""
    why: str = ""


@dataclass(frozen=True)
class KeyExplanation:
    """Where one key is, or why it is missing.

    `where`: "l1" and the tiers that have it; any of them makes it a hit. `reason`: one word for a miss ("loading" if it
    is on its way), with its time if one is remembered. `by`: the eviction policy or session that caused it. `why`: all
    of this in a sentence. `namespace_known`: whether any other session uses its namespace, or the pool has objects of
    it; if not, it is probably not the namespace in which the engine stores.
    """

    key: bytes
    hit: bool
    where: tuple[str, ...]
    reason: str
    why: str
    at_unix_s: float | None = None
    age_s: float | None = None
    by: str = ""
    tiers: tuple[TierWord, ...] = ()
    namespace_known: bool = True


def explain_pages(link: Link, keys: Sequence[bytes], namespace_id: int) -> list[KeyExplanation]:
    """Explain any number of keys, one frame at a time. The server refuses namespaces that the session has not
    registered."""
    explanations: list[KeyExplanation] = []
    for first in range(0, len(keys), EXPLAIN_KEYS_MAX):
        page = keys[first : first + EXPLAIN_KEYS_MAX]
        blob = join_keys(page)
        reply = link.channel.call_held_back(m.Explain(0, namespace_id, blob), TIER_LOOKUP_S)
        explanations += explained(expect(reply, m.Explained), page)
    return explanations


def explained(reply: m.Explained, keys: Sequence[bytes]) -> list[KeyExplanation]:
    """What a reply says about the requested keys."""
    lost_at, sessions = array("d", reply.lost_at), array("Q", reply.sessions)
    tiers = [(tier, array("d", tier.lost_at)) for tier in reply.tiers]
    explanations = []
    for at, key in enumerate(keys):
        tier_words = tuple(_word(reply.now, tier, times, at) for tier, times in tiers)
        explanation = _explain(reply, at, key, lost_at[at], sessions[at], tier_words)
        explanations.append(replace(explanation, namespace_known=reply.known))
    return explanations


def _explain(
    reply: m.Explained, at: int, key: bytes, lost_at: float, session: int, tiers: tuple[TierWord, ...]
) -> KeyExplanation:
    status, reason = Grant(reply.statuses[at]), Reason(reply.reasons[at])
    there = (L1_NAME,) if status is Grant.GRANTED else ()
    where = there + tuple(each.tier for each in tiers if each.found)
    if where:
        words = [*there, *(f"{word.tier} ({word.words})" if word.words else word.tier for word in tiers if word.found)]
        return KeyExplanation(key, True, where, "", f"there: {', '.join(words)}", tiers=tiers)
    if status is Grant.LOADING:
        return KeyExplanation(key, False, (), "loading", "on its way from a tier", tiers=tiers)
    at_unix_s = lost_at or None
    age_s = None if at_unix_s is None else max(0.0, reply.now - at_unix_s)
    session_name = _session(reply, session)
    by = reply.eviction_policy if reason is Reason.EVICTED else session_name
    since = f", or so long ago that it was forgotten (over {_for(reply.now - reply.remembers_since)})"
    sentence = _SENTENCES[reason].format(
        age=_ago(age_s),
        policy=reply.eviction_policy,
        since=since if reply.remembers_since else "",
        unknown="" if reply.known else f": {_UNKNOWN}",
        who=f" ({session_name})" if session else "",
        by=f" by {session_name}" if session else "",
        pushed=f" to make room for {session_name}" if session else " to keep headroom",
    )
    why = "; ".join([sentence, *(f"tier {each.tier}: {each.why}" for each in tiers)])
    if reason not in _L1_HAS_THE_WORD:
        last = max((each for each in tiers if each.reason), key=lambda each: each.at_unix_s or reply.now, default=None)
        if last is not None:
            return KeyExplanation(key, False, (), last.reason, why, last.at_unix_s, last.age_s, last.tier, tiers)
    return KeyExplanation(key, False, (), str(reason), why, at_unix_s, age_s, by, tiers)


def _word(now: float, tier: m.TierExplained, times: array[float], at: int) -> TierWord:
    if tier.found is not None and tier.found[at]:
        if tier.found[at] == Stored.YES:
            place = tier.loss_words[tier.lost_words[at]]
            return TierWord(tier.tier, True, words=place, why=f"has it {place}".rstrip())
        trouble = f"; the tier says: {tier.words}" if tier.words else ""
        return TierWord(tier.tier, False, ON_ITS_WAY, words=tier.words, why=f"it is on its way{trouble}")
    found = None if tier.found is None else False
    if found is None:
        name = "late" if tier.reason == TierReason.LATE else "tier_error"
        words = f": {tier.words}" if tier.words else ""
        return TierWord(tier.tier, None, name, None, None, tier.words, f"did not answer ({name}){words}")
    if not tier.losses[at]:
        return TierWord(tier.tier, found, why="does not have it")
    age_s, words = max(0.0, now - times[at]), tier.loss_words[tier.lost_words[at]]
    reason = tier.losses[at]
    if reason == TierReason.EVICTED and not words:  # by no policy of the tier: it left the pool before its turn
        return TierWord(tier.tier, found, TierReason.THROTTLED, times[at], age_s, why=f"{_TOO_SLOW} {_ago(age_s)}")
    sentence = _TIER_SENTENCES.get(reason, f"{reason} {{age}}{{words}}")
    detail = f" by {words}" if reason == TierReason.EVICTED and words else f": {words}" if words else ""
    return TierWord(tier.tier, found, reason, times[at], age_s, words, sentence.format(age=_ago(age_s), words=detail))


def _session(reply: m.Explained, session: int) -> str:
    if not session:
        return ""
    name = reply.session_names.get(session, "")
    return f"session {session}" + (f", {name}" if name else "")


def _ago(age_s: float | None) -> str:
    return "some time ago" if age_s is None else f"{_for(age_s)} ago"


def _for(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
