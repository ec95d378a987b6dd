"""The bases of adapters: what becomes of errors, of a deadline, of connections."""

from __future__ import annotations

import time

import pytest

from lmcache_core.errors import TierError
from lmcache_core.tiers.blocking import BlockingAdapter, Connections
from lmcache_core.tiers.contract import AdapterContext, Capabilities, LoadItem, Outcome, Result, StoreItem


class BrokenError(Exception):
    pass


class Line:
    def __init__(self, deadline: float) -> None:
        self.closed = False

    def close(self) -> None:
        self.closed = True


class Small(BlockingAdapter):
    capabilities = Capabilities(object_bytes_max=10, scan=False)
    errors = (BrokenError,)
    cure = "mend it"

    def __init__(self) -> None:
        self.lines = Connections(Line)
        super().__init__(AdapterContext(tier="t"), self.lines)

    def store_one(self, item: StoreItem, deadline: float) -> None:
        if item.key == b"late":
            raise TimeoutError
        if item.key == b"broken":
            raise BrokenError("it is broken")

    def load_one(self, item: LoadItem, deadline: float) -> Outcome:
        return Outcome(Result.MISS)

    def exists_one(self, key: bytes, deadline: float) -> bool:
        raise BrokenError("it is broken")


def soon() -> float:
    return time.monotonic() + 30.0


def test_each_object_has_its_own_outcome() -> None:
    content = [memoryview(bytes(10))]
    items = [StoreItem(key, content) for key in (b"well", b"late", b"broken")]
    well, late, broken, large = Small().store([*items, StoreItem(b"large", [*content, *content])], soon())
    assert well == Outcome(Result.DONE, 10)
    assert (late.result, late.retryable) == (Result.FAILED, True)
    assert broken == Outcome.of(TierError("tier 't' cannot store: it is broken", cure="mend it"))
    assert (large.result, large.retryable) == (Result.FAILED, False)
    assert [each.retryable for each in Small().store(items, time.monotonic())] == [True] * 3, "none is begun"


def test_a_call_without_outcomes_raises_for_all_and_after_the_end() -> None:
    adapter = Small()
    with pytest.raises(TierError, match="cannot look up: it is broken: mend it"):
        adapter.exists([b"k"], soon())
    with pytest.raises(TierError, match="lists nothing"):
        adapter.scan(None, soon())
    adapter.close()
    for call in (lambda: adapter.usage(), lambda: adapter.load([], soon()), lambda: adapter.scan(None, soon())):
        with pytest.raises(TierError, match="is closed"):
            call()


def test_a_connection_is_used_again_unless_its_call_failed() -> None:
    lines = Connections(Line, keeps=(BrokenError,))
    with lines.one(soon()) as first, lines.one(soon()) as second:
        assert first is not second
    with pytest.raises(BrokenError), lines.one(soon()) as kept:
        raise BrokenError
    with pytest.raises(ValueError, match="odd"), lines.one(soon()) as lost:
        raise ValueError("odd")
    assert kept is lost is first or kept is lost is second
    assert lost.closed
    with lines.one(soon()) as out:
        lines.close()
        assert not out.closed
    assert out.closed


def test_a_connection_that_cannot_be_prepared_is_closed() -> None:
    made: list[Line] = []

    def fails(line: Line, deadline: float) -> None:
        made.append(line)
        raise BrokenError

    with pytest.raises(BrokenError), Connections(Line, fails).one(soon()):
        pass
    assert [line.closed for line in made] == [True]
