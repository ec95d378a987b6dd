"""The contract of an L2 adapter, as tests: subclass `L2AdapterContract` and bring an adapter.

    class TestAcmeAdapter(L2AdapterContract):
        @pytest.fixture
        def adapter(self, adapter_context):
            with AcmeAdapter(AcmeSettings(bucket="t"), adapter_context) as adapter:
                yield adapter

The medium must be empty at the start of each test, and the test's own. More fixtures unlock more tests:

    reopen         callable: one more adapter on the same medium; the kit closes what it made
    second         callable: another server's adapter on the medium; `reopen` will do if shared is claimed
    backdoor       a `Backdoor`: the medium itself, past the adapter
    small_adapter  an adapter whose medium holds between 1 and 4 MiB
    compact        callable: the medium of `small_adapter` gives back what was deleted, if it does not do so by itself
    expire         callable: makes the time to live of all objects on the medium end
    unreachable    an adapter whose medium is not there
    hang           context manager: within it the medium accepts requests and answers none
    stall          context manager: within it answers begin and do not end
    outage         context manager: within it the medium is away; afterwards it is back, with its objects
    lock           context manager: within it the medium accepts no store
    busy           context manager: within it the medium answers every request with a refusal
    litter         callable: puts things on the medium that are no objects, one of them, where that is possible, in the
                   place of the key that it is given
    wipe           callable: empties the medium, past the adapter
    filled         callable: others put so many objects on the medium; their keys and bytes, for an adapter that never
                   stores
    leftovers      callable: lists what is on the medium besides objects and must be gone once nobody uses it

`StallingProxy` gives `hang`, `stall` and `outage` to any medium behind TCP. `durable` and `shared` ask for `reopen`,
`durable` also for `backdoor`; `evicts` asks for `small_adapter`, `ttl` for `expire`, `stores=False` for `filled`: a
claim without its fixture is a failure. What is not claimed is a skip that says so; what no fixture makes possible is
*not judged*, and says what would unlock it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import pytest

from lmcache_core.tiers.contract import L2Adapter
from lmcache_testing.adapter_accounts import AccountTests
from lmcache_testing.adapter_answers import AnswerTests
from lmcache_testing.adapter_batches import BatchTests
from lmcache_testing.adapter_chaos import ChaosTests
from lmcache_testing.adapter_keys import KeyTests
from lmcache_testing.adapter_late import LateTests
from lmcache_testing.adapter_leaks import LeakTests
from lmcache_testing.adapter_loads import LoadOnlyTests
from lmcache_testing.adapter_medium import MediumTests
from lmcache_testing.adapter_races import RaceTests
from lmcache_testing.adapter_remains import RemainsTests
from lmcache_testing.adapter_trouble import TroubleTests
from lmcache_testing.adapter_values import ValueTests


class Backdoor(ABC):
    """The medium itself, as seen with another tool. Bytes are those on the medium, including what the adapter adds to
    an object: the kit cuts, flips and swaps them without knowing their meaning."""

    @abstractmethod
    def read(self, key: bytes) -> bytes | None:
        """What the medium holds for a key, or None."""

    @abstractmethod
    def write(self, key: bytes, content: bytes) -> None:
        """Replace the object's bytes, as they are. Those of a split object are its pieces, one after another: each
        piece takes as many bytes as it had, the last one the rest, and what the adapter keeps beside them (a head, a
        count) stays as it was, as after a torn write."""

    @abstractmethod
    def remove(self, key: bytes) -> None:
        """Remove the object. It exists."""


class L2AdapterContract(
    ValueTests,
    KeyTests,
    AnswerTests,
    BatchTests,
    AccountTests,
    MediumTests,
    RemainsTests,
    RaceTests,
    LeakTests,
    TroubleTests,
    LateTests,
    ChaosTests,
    LoadOnlyTests,
):
    """What the kernel relies on, whatever the medium."""

    largest_object_bytes: ClassVar[int] = 16 << 20  # the largest to test; less if the capabilities say so
    scan_objects: ClassVar[int] = 40  # stored, replaced and deleted one by one
    scan_pages_objects: ClassVar[int] = 1100  # of a byte or two: more than one page of a scan holds
    quick_scan_pages_objects: ClassVar[int | None] = None  # with --kit=quick, if a store takes milliseconds
    scan_wait_s: ClassVar[float] = 2.5  # between two scans: more than twice the medium's clock resolution
    tells_last_use: ClassVar[bool] = False  # True: a scan shows when an object was loaded, not only when it was stored

    @pytest.fixture
    def adapter(self) -> L2Adapter:
        """The adapter under test; its creator closes it."""
        pytest.fail(f"{type(self).__name__} has no fixture 'adapter': return, or yield, the adapter under test")

    @pytest.fixture
    def reopen(self) -> Any:
        return None

    @pytest.fixture
    def second(self) -> Any:
        return None

    @pytest.fixture
    def backdoor(self) -> Any:
        return None

    @pytest.fixture
    def lock(self) -> Any:
        return None

    @pytest.fixture
    def busy(self) -> Any:
        return None

    @pytest.fixture
    def litter(self) -> Any:
        return None

    @pytest.fixture
    def wipe(self) -> Any:
        return None

    @pytest.fixture
    def leftovers(self) -> Any:
        return None

    @pytest.fixture
    def outage(self) -> Any:
        return None

    @pytest.fixture
    def stall(self) -> Any:
        return None

    @pytest.fixture
    def hang(self) -> Any:
        return None

    @pytest.fixture
    def unreachable(self) -> Any:
        return None

    @pytest.fixture
    def small_adapter(self) -> Any:
        return None

    @pytest.fixture
    def compact(self) -> Any:
        return None

    @pytest.fixture
    def expire(self) -> Any:
        return None
