"""Records an adapter's calls and answers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

from lmcache_core.tiers.contract import L2Adapter, Outcome, ScanPage
from lmcache_mock.drills.wrapper import AdapterWrapper, Answer, Item


class Recorded(NamedTuple):
    """One call. `answers` is what it returned, None if it raised `error`."""

    operation: str
    keys: tuple[bytes, ...]
    answers: tuple[Any, ...] | None
    error: BaseException | None = None


class RecordingAdapter(AdapterWrapper):
    """`calls` has every call with a deadline, or the last `calls_max`, in the order of their ends. `tell` is called
    with each. Keeps no buffers."""

    def __init__(
        self, inner: L2Adapter, *, calls_max: int | None = None, tell: Callable[[Recorded], None] | None = None
    ) -> None:
        super().__init__(inner)
        self._calls_max = calls_max
        self._tell = tell
        self.calls: list[Recorded] = []
        self._lock = threading.Lock()

    def of(self, operation: str) -> list[Recorded]:
        """The calls of one method."""
        with self._lock:
            return [call for call in self.calls if call.operation == operation]

    def batch(
        self,
        operation: str,
        items: Sequence[Item],
        deadline: float,
        call: Callable[[Sequence[Item]], Sequence[Outcome]],
    ) -> Sequence[Outcome]:
        keys = [item if isinstance(item, bytes) else item.key for item in cast("Sequence[Any]", items)]
        return self._noted(operation, keys, lambda: call(items))

    def ask(self, operation: str, keys: Sequence[bytes], deadline: float, call: Callable[[], Answer]) -> Answer:
        return self._noted(operation, keys, call)

    def close(self) -> None:
        self._keep(Recorded("close", (), ()))
        super().close()

    def _noted(self, operation: str, keys: Sequence[bytes], call: Callable[[], Answer]) -> Answer:
        try:
            answer = call()
        except BaseException as error:  # whatever it is: it is recorded, and raised
            self._keep(Recorded(operation, tuple(keys), None, error))
            raise
        answers = answer.entries if isinstance(answer, ScanPage) else cast("Sequence[Any]", answer)
        self._keep(Recorded(operation, tuple(keys), tuple(answers)))
        return answer

    def _keep(self, call: Recorded) -> None:
        with self._lock:
            self.calls.append(call)
            if self._calls_max is not None:
                del self.calls[: -self._calls_max]
        if self._tell is not None:
            self._tell(call)
