"""The wrappers around adapters, by themselves."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Sequence

import pytest

from lmcache_core.errors import TierError, UsageError
from lmcache_core.tiers.contract import AdapterContext, Capabilities, L2Adapter, LoadItem, Outcome, Result, StoreItem
from lmcache_mock.drills.wrapper import AdapterWrapper
from lmcache_mock.memory import MemoryAdapter
from lmcache_testing import (
    AdapterMachine,
    Fault,
    FaultRule,
    FaultScript,
    FaultyAdapter,
    LatencyAdapter,
    RecordingAdapter,
    material,
)
from lmcache_testing.machine import run_machine


def test_the_kit_is_imported_when_it_is_used_and_not_before() -> None:
    code = (
        "import sys, lmcache_testing.pytest_plugin; "
        "heavy = {'hypothesis', 'pydantic', 'numpy', 'torch', 'zmq', 'lmcache_testing.adapter'}; "
        "print(sorted(heavy & set(sys.modules))); "
        "from lmcache_testing import ServerProcess; print('hypothesis' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.split("\n")[:2] == ["[]", "False"]


def test_wrappers_need_no_pytest() -> None:
    code = "import sys; sys.modules['pytest'] = None; from lmcache_testing import FaultyAdapter, LatencyAdapter"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_exported_name_is_there() -> None:
    import lmcache_testing as kit

    for name in kit.__all__:
        assert getattr(kit, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = kit.Nothing


def test_the_context_runs_requests_in_parallel(adapter_context: AdapterContext) -> None:
    barrier = threading.Barrier(3)
    assert adapter_context.parallel([lambda: barrier.wait(60) >= 0] * 3) == [True] * 3


# --- rules --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "text",
    ["any hang", "load flipped_bits rate=0.1", "store full skip=20 count=5", "exists slow s=0.25", "delete error"],
)
def test_a_rule_is_written_as_it_is_read(text: str) -> None:
    assert str(FaultRule.parse(text)) == text
    assert FaultRule.parse(f"  {text}  ") == FaultRule.parse(text)


@pytest.mark.parametrize(
    "text",
    ["", "hang", "all hang", "load explode", "load full", "store neighbour", "any error rate", "any error rate=1.5",
     "any error count=-1", "any error count=x", "any error speed=1"],
)  # fmt: skip
def test_a_rule_that_is_none_says_how_to_write_one(text: str) -> None:
    with pytest.raises(UsageError, match=r"fault of|OPERATION FAULT"):
        FaultRule.parse(text)


def test_every_fault_can_be_asked_for() -> None:
    for fault in Fault:
        assert FaultRule.parse(f"any {fault}").fault is fault


def test_the_first_rule_that_strikes_decides() -> None:
    script = FaultScript(["store error count=1", "store full"])
    struck = [script.draw("store", whole_call=False) for _ in range(3)]
    assert [rule.fault for rule in struck if rule] == [Fault.ERROR, Fault.FULL, Fault.FULL]
    assert script.draw("load", whole_call=False) is None
    script.set()
    assert script.draw("store", whole_call=False) is None


def test_a_faulty_adapter_without_rules_is_the_adapter() -> None:
    adapter = FaultyAdapter(MemoryAdapter())
    run_machine(adapter)
    assert adapter.capabilities == adapter.inner.capabilities


def test_what_fails_whole_and_has_no_outcomes_raises() -> None:
    adapter = FaultyAdapter(MemoryAdapter(), FaultScript(["exists error", "scan slow s=10"]))
    with pytest.raises(TierError, match="exists error"):
        adapter.exists([b"k"], material.soon())
    with pytest.raises(TierError, match="deadline"):
        adapter.scan(None, time.monotonic() + 0.01)


# --- latency and recording ----------------------------------------------------------------------------------
def test_latency_is_spent_and_a_deadline_that_comes_first_is_kept() -> None:
    adapter = LatencyAdapter(MemoryAdapter(), latency_s=0.05)
    began = time.monotonic()
    assert material.store(adapter, b"k", b"x").result is Result.DONE
    assert time.monotonic() - began >= 0.05
    late = adapter.store([StoreItem(b"j", [memoryview(b"x")])], time.monotonic() + 0.01)[0]
    assert (late.result, late.retryable) == (Result.FAILED, True)
    assert adapter.exists([b"j"], material.soon()) == [False]


def test_close_ends_the_waits() -> None:
    adapter = LatencyAdapter(MemoryAdapter(), latency_s=1000.0)
    ended: list[BaseException] = []

    def work() -> None:
        try:
            adapter.exists([b"k"], time.monotonic() + 2000.0)
        except TierError as error:
            ended.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    adapter.close()
    thread.join(60)
    assert not thread.is_alive()
    assert len(ended) == 1


def test_a_recording_has_every_call_its_answers_and_no_buffer() -> None:
    adapter = RecordingAdapter(MemoryAdapter())
    material.store(adapter, b"k", b"object")
    material.load(adapter, b"missing", 10)
    adapter.exists([b"k", b"j"], material.soon())
    adapter.close()
    with pytest.raises(TierError):
        adapter.delete([b"k"], material.soon())
    assert [call.operation for call in adapter.calls] == ["store", "load", "exists", "close", "delete"]
    assert adapter.of("exists")[0].answers == (True, False)
    assert adapter.of("load")[0].answers == (Outcome(Result.MISS),)
    assert isinstance(adapter.of("delete")[0].error, TierError)
    source = bytearray(b"object")
    adapter = RecordingAdapter(MemoryAdapter())
    adapter.store([StoreItem(b"k", [memoryview(source)])], material.soon())
    source.append(0)  # refused while anyone exports it


# --- the machine --------------------------------------------------------------------------------------------
def test_the_machine_finds_a_fault_that_needs_a_story() -> None:
    class Resurrects(MemoryAdapter):
        """A key that is stored again after a delete comes back with its first content."""

        def __init__(self) -> None:
            super().__init__()
            self.first: dict[bytes, bytes] = {}
            self.deleted: set[bytes] = set()

        def store_one(self, item: StoreItem, deadline: float) -> Outcome:
            content = self.first.setdefault(item.key, b"".join(item.buffers))
            if item.key in self.deleted:
                return super().store_one(StoreItem(item.key, [memoryview(content)]), deadline)
            return super().store_one(item, deadline)

        def delete(self, keys: Sequence[bytes], deadline: float) -> Sequence[Outcome]:
            self.deleted |= {key for key in keys if key in self.objects}
            return super().delete(keys, deadline)

    with pytest.raises(AssertionError):
        run_machine(Resurrects(), runs=100, steps=30, shortest=False)


def test_the_machine_allows_a_medium_that_forgets_only_where_it_says_so() -> None:
    class Forgets(MemoryAdapter):
        capabilities = Capabilities(evicts=True)

        def load(self, items: Sequence[LoadItem], deadline: float) -> Sequence[Outcome]:
            outcomes = super().load(items, deadline)
            self.delete([item.key for item in items], deadline)
            return outcomes

    run_machine(Forgets())
    says_nothing = Forgets()
    says_nothing.capabilities = Capabilities()  # type: ignore[misc]
    with pytest.raises(AssertionError):
        run_machine(says_nothing, shortest=False)


def test_the_machine_can_be_driven_by_hand() -> None:
    machine = AdapterMachine(MemoryAdapter(), b"prefix ")
    machine.store({1: b"one"}, 2)
    machine.load([1, 2])
    machine.what_exists_is_what_was_stored()
    machine.teardown()
    assert machine.adapter.exists([b"prefix 1"], material.soon()) == [False]


def test_the_memory_adapter_shares_nothing_with_its_callers() -> None:
    adapter = MemoryAdapter(medium_bytes=10)
    target = bytearray(5)
    assert material.store(adapter, b"k", b"12345678901").result is Result.FULL
    assert material.store(adapter, b"k", b"12345").result is Result.DONE
    assert adapter.load([LoadItem(b"k", [memoryview(target)])], material.soon())[0].result is Result.DONE
    assert (bytes(target), adapter.usage().bytes_free) == (b"12345", 5)


def test_a_wrapper_passes_on_every_method_of_the_contract() -> None:
    contract = {name for name, each in vars(L2Adapter).items() if callable(each) and name[0] != "_"}
    assert contract - set(vars(AdapterWrapper)) == set()
