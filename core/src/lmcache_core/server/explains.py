"""Explanations: the kernel says how a key was lost, and tiers say in their lanes whether they have it."""

from __future__ import annotations

import time
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lmcache_core.errors import LimitError, UnknownNamespaceError
from lmcache_core.kernel.explain import Explanation
from lmcache_core.kernel.kernel import Kernel
from lmcache_core.limits import (
    ERROR_EXCERPT_CHARS_MAX,
    EXPLAIN_KEYS_MAX,
    EXPLAIN_TIERS_MAX,
    EXPLAINS_PER_SESSION_MAX,
)
from lmcache_core.protocol import messages as m
from lmcache_core.protocol.codec import split_keys
from lmcache_core.server.l1 import L1
from lmcache_core.server.session import Session
from lmcache_core.server.shares import Share
from lmcache_core.tiers.flow.whereabouts import TierAnswer, Whereabouts
from lmcache_core.tiers.tier.trouble import TierLoss

_WORDS_MAX = 16  # distinct words of all tiers in one reply, which is one frame
_NAMES_MAX = 16
_NAME_CHARS_MAX = 64


@dataclass(eq=False)
class _ExplanationWait:
    """An explanation that waits for the tiers."""

    session: Session
    rid: int
    told: Explanation
    whereabouts: Whereabouts | None = None


class Explains:
    """Lives on the loop's thread. Only the reply waits for the tiers."""

    def __init__(
        self, kernel: Kernel, l1: L1, policy_name: str, session_name: Callable[[int], str | None], share: Share
    ) -> None:
        self._kernel = kernel
        self._l1 = l1
        self._policy_name = policy_name
        self._session_name = session_name
        self._share = share
        self._open: dict[_ExplanationWait, None] = {}
        self._by_session: Counter[int] = Counter()  # of those

    def explain(self, session: Session, request: m.Explain) -> m.Message | None:
        """The answer, or None: it follows when the tiers have answered, or at their deadline. Only for namespaces that
        this session has registered: a stranger must not learn what others have stored, and when."""
        keys = split_keys(request.keys)
        told = self.look(session, request.namespace, keys)
        tiering = self._l1.tiering
        if tiering is None or not keys:
            return self.reply(request.rid, told, [])
        if self._by_session[session.id] >= EXPLAINS_PER_SESSION_MAX or self._share.full_for(session.origin):
            raise LimitError(
                f"{self._by_session[session.id]} explanations of this session wait for the tiers, "
                f"{self._share.of(session.origin)} of {session.origin} and {self._share.taken} of all: wait for one of "
                "them"
            )
        asked = _ExplanationWait(session, request.rid, told)
        whereabouts = asked.whereabouts = tiering.whereabouts(request.namespace, keys, lambda _: self._answer(asked))
        if not whereabouts.pending:
            return self.reply(request.rid, told, whereabouts.answers)
        self._open[asked] = None
        self._by_session[session.id] += 1
        self._share.take(session.origin)
        return None

    def cancel(self, session: Session, rid: int) -> int:
        """Nobody wants the session's explanation of this request id any more: it is answered with what has come.
        Returns how many there were."""
        mine = [asked for asked in self._open if asked.session is session and asked.rid == rid]
        for asked in mine:
            self._answer(asked)
        return len(mine)

    def session_ended(self, session: Session) -> None:
        """Nobody waits for its explanations any more."""
        for asked in [asked for asked in self._open if asked.session is session]:
            self._leave(asked)

    def _leave(self, asked: _ExplanationWait) -> None:
        del self._open[asked]
        self._by_session -= Counter([asked.session.id])
        self._share.free(asked.session.origin)

    def _answer(self, asked: _ExplanationWait) -> None:
        """Nothing where nobody waits for it any more: the tiers answer all the same."""
        if asked in self._open and asked.whereabouts is not None:
            self._leave(asked)
            asked.session.send(self.reply(asked.rid, asked.told, asked.whereabouts.answers))

    def look(self, session: Session, namespace: int, keys: Sequence[bytes]) -> Explanation:
        """What the L1 knows about a frame of keys. Raises `UnknownNamespaceError` and `LimitError`."""
        layout_id = session.namespaces.get(namespace)
        if layout_id is None:
            raise UnknownNamespaceError(
                f"namespace {namespace:016x} is not registered in this session, so its keys are not "
                "explained to it: register_layout first"
            )
        if len(keys) > EXPLAIN_KEYS_MAX:
            raise LimitError(f"{len(keys)} keys to explain in one frame, and the limit is {EXPLAIN_KEYS_MAX}")
        tiers = 0 if self._l1.tiering is None else len(self._l1.tiering.names)
        if tiers > EXPLAIN_TIERS_MAX:
            raise LimitError(f"{tiers} tiers, and a reply has room for the words of {EXPLAIN_TIERS_MAX}")
        return self._kernel.explain(session.id, namespace, layout_id, keys, self._l1.clock.now)

    def reply(self, rid: int, told: Explanation, answers: Sequence[TierAnswer]) -> m.Message:
        """The reply to send."""
        now, now_unix_s = self._l1.clock.now, time.time()
        since = now_unix_s - now  # from the kernel's clock to Unix time
        names: dict[int, str] = {}
        for session_id in dict.fromkeys(told.session_ids):
            name = self._session_name(session_id)
            if name and len(names) < _NAMES_MAX:
                names[session_id] = name[:_NAME_CHARS_MAX]
        words_max = max(1, _WORDS_MAX // max(1, len(answers)))
        return m.Explained(
            rid,
            now_unix_s,
            bytes(told.statuses),
            bytes(told.reasons),
            array("d", [at_s and since + at_s for at_s in told.at_s]).tobytes(),
            told.session_ids.tobytes(),
            names,
            self._policy_name,
            0.0 if told.since_s is None else since + told.since_s,
            [_say(answer, since, words_max) for answer in answers],
        )


def _say(answer: TierAnswer, since: float, words_max: int) -> m.TierExplained:
    words: dict[str, int] = {"": 0}

    def word(loss: TierLoss | None) -> int:
        text = "" if loss is None else loss.text
        if len(words) <= words_max:
            words.setdefault(text, len(words))
        return words.get(text, 0)

    return m.TierExplained(
        answer.name,
        None if answer.found is None else bytes(answer.found),
        answer.reason or "",
        answer.text[:ERROR_EXCERPT_CHARS_MAX],
        ["" if loss is None else loss.reason.value for loss in answer.losses],
        array("d", [0.0 if loss is None else since + loss.at_s for loss in answer.losses]).tobytes(),
        bytes([word(loss) for loss in answer.losses]),
        list(words),
    )
