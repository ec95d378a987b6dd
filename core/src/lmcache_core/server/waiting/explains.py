"""Explanations: the kernel says how a key was lost, and tiers say in their lanes whether they have it."""

from __future__ import annotations

import time
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lmcache_core import limits
from lmcache_core.errors import LimitError, UnknownNamespaceError
from lmcache_core.kernel.explain import Explanation
from lmcache_core.kernel.kernel import Kernel
from lmcache_core.protocol import messages as m
from lmcache_core.protocol.codec import split_keys
from lmcache_core.server.peers.session import Session
from lmcache_core.server.peers.shares import Share
from lmcache_core.server.pool.l1 import L1
from lmcache_core.tiers.flow.whereabouts import TierAnswer, Whereabouts

_TEXTS_MAX = 16  # distinct words of all tiers in one reply, which is one frame
_NAMES_MAX = 16
_NAME_CHARS_MAX = 64


@dataclass(eq=False)
class _ExplanationWait:
    """An explanation that waits for the tiers."""

    session: Session
    rid: int
    explanation: Explanation
    known: bool
    whereabouts: Whereabouts | None = None


class Explains:
    """Lives on the loop's thread. Only the reply waits for the tiers."""

    def __init__(
        self,
        kernel: Kernel,
        l1: L1,
        policy_name: str,
        session_name: Callable[[int], str | None],
        is_known: Callable[[int, Session], bool],
        share: Share,
    ) -> None:
        """`is_known`: whether anybody but this session uses a namespace, or the pool has objects of it."""
        self._kernel = kernel
        self._l1 = l1
        self._policy_name = policy_name
        self._session_name = session_name
        self._is_known = is_known
        self._share = share
        self._open: dict[_ExplanationWait, None] = {}
        self._by_session: Counter[int] = Counter()  # of those

    def explain(self, session: Session, request: m.Explain) -> m.Message | None:
        """The answer, or None: it follows when the tiers have answered, or at their deadline. Only for namespaces that
        this session has registered: a stranger must not learn what others have stored, and when."""
        keys = split_keys(request.keys)
        explanation = self.look(session, request.namespace, keys)
        known = self._is_known(request.namespace, session)
        tiering = self._l1.tiering
        if tiering is None or not keys:
            return self.reply(request.rid, explanation, [], known=known)
        if self._by_session[session.id] >= limits.EXPLAINS_PER_SESSION_MAX or self._share.full_for(session.origin):
            raise LimitError(
                f"{self._by_session[session.id]} explanations of this session wait for the tiers, "
                f"{self._share.of(session.origin)} of {session.origin} and {self._share.taken} of all: wait for one of "
                "them"
            )
        wait = _ExplanationWait(session, request.rid, explanation, known)
        whereabouts = wait.whereabouts = tiering.whereabouts(request.namespace, keys, lambda _: self._answer(wait))
        if not whereabouts.pending:
            wait.whereabouts = None
            return self.reply(request.rid, explanation, whereabouts.answers, known=known)
        self._take_place(wait)
        return None

    def _take_place(self, wait: _ExplanationWait) -> None:
        self._open[wait] = None
        self._by_session[wait.session.id] += 1
        self._share.take(wait.session.origin)
        self._kernel.undo.add((self._leave, (wait,)))

    def cancel(self, session: Session, rid: int) -> int:
        """Nobody wants the session's explanation of this request id any more: it is answered with what has come.
        Returns how many there were."""
        mine = [wait for wait in self._open if wait.session is session and wait.rid == rid]
        for wait in mine:
            self._answer(wait)
        return len(mine)

    def session_ended(self, session: Session) -> None:
        """Nobody waits for its explanations any more."""
        for wait in [wait for wait in self._open if wait.session is session]:
            self._leave(wait)

    def _leave(self, wait: _ExplanationWait) -> None:
        del self._open[wait]
        self._by_session -= Counter([wait.session.id])
        self._share.free(wait.session.origin)

    def _answer(self, wait: _ExplanationWait) -> None:
        """Nothing where nobody waits for it any more: the tiers answer all the same."""
        if wait in self._open and wait.whereabouts is not None:
            self._leave(wait)
            answers = wait.whereabouts.answers
            wait.session.send(self.reply(wait.rid, wait.explanation, answers, known=wait.known))

    def look(self, session: Session, namespace: int, keys: Sequence[bytes]) -> Explanation:
        """What the L1 knows about a frame of keys. Raises `UnknownNamespaceError` and `LimitError`."""
        layout_id = session.namespaces.get(namespace)
        if layout_id is None:
            raise UnknownNamespaceError(
                f"namespace {namespace:016x} is not registered in this session, so its keys are not "
                "explained to it: register_layout first"
            )
        if len(keys) > limits.EXPLAIN_KEYS_MAX:
            raise LimitError(f"{len(keys)} keys to explain in one frame, and the limit is {limits.EXPLAIN_KEYS_MAX}")
        tiers = 0 if self._l1.tiering is None else len(self._l1.tiering.names)
        if tiers > limits.EXPLAIN_TIERS_MAX:
            raise LimitError(f"{tiers} tiers, and a reply has room for the words of {limits.EXPLAIN_TIERS_MAX}")
        return self._kernel.explain(session.id, namespace, layout_id, keys, self._l1.clock.now)

    def reply(
        self, rid: int, explanation: Explanation, answers: Sequence[TierAnswer], *, known: bool = True
    ) -> m.Message:
        """The reply to send."""
        now, now_unix_s = self._l1.clock.now, time.time()
        since = now_unix_s - now  # from the kernel's clock to Unix time
        names: dict[int, str] = {}
        for session_id in dict.fromkeys(explanation.session_ids):
            name = self._session_name(session_id)
            if name and len(names) < _NAMES_MAX:
                names[session_id] = name[:_NAME_CHARS_MAX]
        texts_max = max(1, _TEXTS_MAX // max(1, len(answers)))
        return m.Explained(
            rid,
            now_unix_s,
            bytes(explanation.statuses),
            bytes(explanation.reasons),
            array("d", [at_s and since + at_s for at_s in explanation.at_s]).tobytes(),
            explanation.session_ids.tobytes(),
            names,
            self._policy_name,
            0.0 if explanation.since_s is None else since + explanation.since_s,
            [_tier_explained(answer, since, texts_max) for answer in answers],
            known,
        )


def _tier_explained(answer: TierAnswer, since: float, texts_max: int) -> m.TierExplained:
    texts: dict[str, int] = {"": 0}

    def text_number(text: str) -> int:
        if len(texts) <= texts_max:
            texts.setdefault(text, len(texts))
        return texts.get(text, 0)

    shown = ["" if loss is None else loss.text for loss in answer.losses]
    if answer.places and answer.found is not None:
        rows = zip(answer.found, answer.places, shown, strict=True)
        shown = [place[: limits.ERROR_EXCERPT_CHARS_MAX] if found else text for found, place, text in rows]
    return m.TierExplained(
        answer.name,
        None if answer.found is None else bytes(answer.found),
        answer.reason or "",
        answer.text[: limits.ERROR_EXCERPT_CHARS_MAX],
        ["" if loss is None else loss.reason.value for loss in answer.losses],
        array("d", [0.0 if loss is None else since + loss.at_s for loss in answer.losses]).tobytes(),
        bytes(map(text_number, shown)),
        list(texts),
    )
