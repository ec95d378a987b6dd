"""The tier code without a server: what a host gets from it, and what it never gets."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from gate import NAMESPACE, SHORT, GatedAdapter, content, key, room, stored, tier_over

from lmcache_core.errors import UsageError
from lmcache_core.limits import LANE_NICE
from lmcache_core.native import native
from lmcache_core.policies.lru import LruEviction
from lmcache_core.tiers.object.format import HEADER_BYTES, payload_checksum
from lmcache_core.tiers.tier.breaker_states import BreakerState
from lmcache_hosts import tier_objects
from lmcache_hosts.naming import BlockFormat, object_key
from lmcache_hosts.requests import HostKey, HostObject, LentMemory
from lmcache_hosts.settings import HostSettings, open_objects
from lmcache_hosts.tier_objects import TierObjects
from lmcache_mock.drills.faults import FaultScript, FaultyAdapter
from lmcache_testing.waiting import until


@pytest.fixture
def adapter() -> GatedAdapter:
    return GatedAdapter()


@pytest.fixture
def objects(adapter: GatedAdapter) -> Iterator[TierObjects]:
    hosted = tier_over(adapter)
    yield hosted
    adapter.release()
    hosted.close()


@pytest.fixture
def hasty(adapter: GatedAdapter) -> Iterator[TierObjects]:
    hosted = tier_over(adapter, SHORT)
    yield hosted
    adapter.release()
    hosted.close()


def test_what_was_stored_is_found_and_loaded(objects: TierObjects) -> None:
    assert objects.store([stored(1), stored(2)]).result() == [True, True]
    assert objects.find([key(1), key(2), key(3)]).result() == [True, True, False]
    buffers = [room(2), room(3), room(1)]
    assert objects.load([each for _, each in buffers]).result() == [True, False, True]
    assert bytes(buffers[0][0]) == content(2)
    assert bytes(buffers[2][0]) == content(1)


def test_objects_on_the_medium_have_our_header_and_name(objects: TierObjects, adapter: GatedAdapter) -> None:
    objects.store([stored(1)]).result()
    ((name, (held, _)),) = adapter.objects.items()
    assert name[:32] == key(1).key
    assert bytes(held[:8]) == b"LMCOBJ\r\n"
    assert len(held) == HEADER_BYTES + NAMESPACE.layout.nbytes


def test_a_load_that_hangs_is_a_no_and_leaves_the_hosts_memory_alone(hasty: TierObjects, adapter: GatedAdapter) -> None:
    hasty.store([stored(1)]).result()
    adapter.hold("load")
    buffer, wanted = room(1)
    assert hasty.load([wanted]).result() == [False]
    buffer[:] = b"\xee" * len(buffer)  # the host uses it for something else
    adapter.release()
    until(lambda: not hasty.status()["tier"]["lanes"]["host-load"]["running"], "the late call to return")
    assert bytes(buffer) == b"\xee" * len(buffer)


def test_a_store_that_hangs_does_not_read_the_hosts_memory_later(hasty: TierObjects, adapter: GatedAdapter) -> None:
    adapter.hold("store")
    buffer = bytearray(content(1))
    request = hasty.store([HostObject(*key(1), memoryview(buffer))])
    adapter.entered["store"].acquire()
    buffer[:] = b"\xee" * len(buffer)
    assert request.result() == [False]
    adapter.release()
    until(lambda: hasty.find([key(1)]).result()[0], "the late store to be done")
    back, wanted = room(1)
    assert hasty.load([wanted]).result() == [True]
    assert bytes(back) == content(1)


def test_a_medium_that_hangs_is_not_asked_any_more_and_is_found_again(
    hasty: TierObjects, adapter: GatedAdapter
) -> None:
    hasty.store([stored(1)]).result()
    adapter.hold("load", "exists")
    until(lambda: not any(hasty.load([room(1)[1]]).result()) and not hasty.serving, "the breaker to open")
    asked = adapter.calls["load"]
    assert hasty.load([room(1)[1]]).result() == [False]
    assert hasty.find([key(1)]).result() == [False]
    assert adapter.calls["load"] == asked
    adapter.release()
    until(lambda: hasty.find([key(1)]).result()[0], "the breaker to close")
    assert hasty.load([room(1)[1]]).result() == [True]


@pytest.mark.parametrize("fault", ["flipped_bits", "short_read", "neighbour", "error", "gone"])
def test_a_damaged_or_failed_load_is_a_no(adapter: GatedAdapter, fault: str) -> None:
    script = FaultScript()
    objects = tier_over(FaultyAdapter(adapter, script))
    try:
        assert objects.store([stored(1), stored(2)]).result() == [True, True]
        objects.load([room(2)[1]]).result()
        script.set(f"load {fault}")
        buffer, wanted = room(1)
        answer = objects.load([wanted]).result()
        assert answer == [False] or bytes(buffer) == content(1)
        assert answer == [False]
    finally:
        objects.close()


def test_an_object_that_looked_damaged_is_stored_again(adapter: GatedAdapter) -> None:
    script = FaultScript()
    objects = tier_over(FaultyAdapter(adapter, script))
    try:
        objects.store([stored(1)]).result()
        script.set("load flipped_bits count=1")
        assert objects.load([room(1)[1]]).result() == [False]
        assert objects.find([key(1)]).result() == [False]
        assert objects.store([stored(1)]).result() == [True]
        assert adapter.calls["store"] == 2
        assert objects.load([room(1)[1]]).result() == [True]
    finally:
        objects.close()


def test_one_load_serves_everybody_who_asks_meanwhile(objects: TierObjects, adapter: GatedAdapter) -> None:
    objects.store([stored(1)]).result()
    adapter.hold("load")
    first, second = room(1), room(1)
    one = objects.load([first[1]])
    adapter.entered["load"].acquire()
    other = objects.load([second[1]])
    until(lambda: objects.counts["joined"], "the second to join")
    adapter.release()
    assert one.result() == other.result() == [True]
    assert bytes(first[0]) == bytes(second[0]) == content(1)
    assert adapter.calls["load"] == 1


def test_one_store_serves_everybody_who_stores_the_same_key(objects: TierObjects, adapter: GatedAdapter) -> None:
    adapter.hold("store")
    one = objects.store([stored(1)])
    adapter.entered["store"].acquire()
    other = objects.store([stored(1)])
    until(lambda: objects.counts["joined"], "the second to join")
    adapter.release()
    assert one.result() == other.result() == [True]
    assert objects.store([stored(1)]).result() == [True]
    assert adapter.calls["store"] == 1


def test_the_medium_stays_below_its_capacity(adapter: GatedAdapter) -> None:
    size = HEADER_BYTES + NAMESPACE.layout.nbytes
    objects = tier_over(adapter, capacity_bytes=8 * size, eviction=LruEviction)
    try:
        for number in range(40):
            until(lambda number=number: objects.store([stored(number)]).result()[0], "room")
            assert adapter.usage().bytes_used <= 8 * size
        assert objects.find([key(39), key(0)]).result() == [True, False]
    finally:
        objects.close()


def test_removed_objects_are_not_found_and_leave_the_medium(objects: TierObjects, adapter: GatedAdapter) -> None:
    objects.store([stored(1), stored(2)]).result()
    assert objects.remove([key(1), key(3)]).result() == [True, False]
    assert objects.find([key(1), key(2)]).result() == [False, True]
    assert objects.load([room(1)[1]]).result() == [False]
    until(lambda: len(adapter.objects) == 1, "the delete")
    until(lambda: objects.clear([NAMESPACE]).result()[0], "the medium to be listed")
    until(lambda: not adapter.objects, "the other delete")


def test_what_was_removed_is_not_found_by_a_lookup_that_outlasts_its_deletion(
    objects: TierObjects, adapter: GatedAdapter
) -> None:
    objects.store([stored(1)]).result()
    adapter.hold("delete", "answer")
    assert objects.remove([key(1)]).result() == [True]
    late = objects.find([key(1)])
    adapter.entered["answer"].acquire()  # it saw the object
    adapter.release("delete")
    until(lambda: not objects.tier.accounting.drops, "the end of the deletion")
    adapter.release()
    assert late.result() == [False]


def test_a_buffer_of_another_size_is_a_no(objects: TierObjects) -> None:
    short = HostObject(*key(1), memoryview(bytes(100)))
    assert objects.store([short, stored(2)]).result() == [False, True]
    assert objects.status()["counts"]["wrong_size"] == 1


def test_close_answers_what_is_open(hasty: TierObjects, adapter: GatedAdapter) -> None:
    adapter.hold("store", "load", "exists")
    requests = [hasty.store([stored(1)]), hasty.load([room(2)[1]]), hasty.find([key(3)])]
    hasty.close(drain_s=0.0)
    assert [each.result() for each in requests] == [[False]] * 3
    assert hasty.store([stored(1)]).result() == [False]
    assert not hasty.serving


def test_close_stores_what_waits(objects: TierObjects, adapter: GatedAdapter) -> None:
    request = objects.store([stored(number) for number in range(200)])
    objects.close()
    assert all(request.result())
    assert len(adapter.objects) == 200


@contextmanager
def busy(objects: TierObjects) -> Iterator[None]:
    """Its loop begins nothing meanwhile: a host's callback has not returned."""
    entered, go = threading.Event(), threading.Event()

    def slow(answers: Sequence[bool]) -> None:
        entered.set()
        go.wait()

    objects.remove([key(99)], slow)
    entered.wait()
    try:
        yield
    finally:
        go.set()


@pytest.fixture
def patient(adapter: GatedAdapter, monkeypatch: pytest.MonkeyPatch) -> Iterator[TierObjects]:
    """Nothing but a notice ends the pauses of its loop."""
    monkeypatch.setattr(tier_objects, "_IDLE_TURN_S", 3600.0)
    hosted = tier_over(adapter)
    yield hosted
    adapter.release()
    hosted.close()


def closing(objects: TierObjects) -> threading.Thread:
    thread = threading.Thread(target=objects.close, args=(3600.0,), daemon=True)
    thread.start()
    return thread


def test_close_ends_with_the_last_call(patient: TierObjects, adapter: GatedAdapter) -> None:
    assert patient.store([stored(1)]).result() == [True]
    adapter.hold("delete")
    patient.remove([key(1)])
    adapter.entered["delete"].acquire()
    thread = closing(patient)
    adapter.release()
    until(lambda: not thread.is_alive(), "the close to end")
    assert not adapter.objects


def test_close_is_noticed_by_a_loop_that_is_busy(patient: TierObjects) -> None:
    with busy(patient):
        thread = closing(patient)
        until(lambda: patient.find([key(1)]).done, "the close to begin")  # from then on the answer is no, at once
    until(lambda: not thread.is_alive(), "the close to end")


def test_whoever_waits_for_a_request_goes_on_after_its_callback(objects: TierObjects) -> None:
    """What a host looks at next is what the callback has changed."""
    entered, go = threading.Event(), threading.Event()
    told: list[bool] = []

    def slow(answers: Sequence[bool]) -> None:
        entered.set()
        go.wait()
        told.extend(answers)

    request = objects.find([key(1)], slow)
    entered.wait()
    seen = request.answered, request.done
    go.set()
    assert seen == (True, False)
    assert request.result() == told == [False]


def test_an_error_at_the_beginning_is_a_no_and_leaves_nothing(objects: TierObjects) -> None:
    odd = HostObject(NAMESPACE, cast(bytes, "no name"), memoryview(bytearray(NAMESPACE.layout.nbytes)))
    for request in (
        objects.store([stored(1), odd]),
        objects.load([room(1)[1], odd]),
        objects.find([key(1), HostKey(*odd[:2])]),
    ):
        until(lambda request=request: request.done, "an answer")  # result() would give up, and say no itself
        assert request.result() == [False, False]
    assert objects.store([stored(1)]).result() == [True]
    assert objects.load([room(1)[1]]).result() == [True]


@pytest.mark.parametrize(
    "place", ["make_room", "stores_allowed", "accounting.fits", "order.hung", "order.submit", "accounting.reserve"]
)
def test_an_error_while_stores_are_given_to_the_lanes_is_an_answer_for_those_alone(
    objects: TierObjects, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    *path, name = place.split(".")
    part = getattr(objects.tier, path[0]) if path else objects.tier
    work, faults = getattr(part, name), [RuntimeError("a fault of ours, or of a policy")]

    def failing(*args: object) -> object:
        if faults:
            raise faults.pop()
        return work(*args)

    with busy(objects):
        request = objects.store([stored(number) for number in range(4)])
        monkeypatch.setattr(part, name, failing)
    until(lambda: request.done, "an answer for each")  # long before the deadline of the stores
    assert not faults
    assert objects.store([stored(number) for number in range(4)]).result() == [True] * 4, "joined a dead store"


def test_a_failed_probe_of_ours_leaves_the_breaker_to_the_next_one(
    objects: TierObjects, adapter: GatedAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    breaker, submit = objects.tier.health.stores, objects.tier.order.submit
    faults = [RuntimeError("a fault of ours")]

    def failing(*args: Any) -> bool:
        if faults:
            raise faults.pop()
        return submit(*args)

    with busy(objects):
        request = objects.store([stored(1)])
        breaker.failed(objects.tier.clock.now, "the medium failed", at_once=True)
        breaker.came_back(objects.tier.clock.now)
        monkeypatch.setattr(objects.tier.order, "submit", failing)
    assert request.result() == [False]
    assert not faults
    until(lambda: objects.store([stored(1)]).result()[0], "another probe to close the breaker")


def test_a_callback_of_a_host_that_fails_keeps_no_answer_from_others(objects: TierObjects) -> None:
    def failing(answers: Sequence[bool]) -> None:
        raise RuntimeError("the host's own fault")

    with busy(objects):
        failed = objects.store([stored(1)], failing)
        others = [objects.store([stored(number)]) for number in (1, 2)]
    until(lambda: all(each.done for each in (failed, *others)), "an answer for each")
    assert [each.result() for each in others] == [[True], [True]]


def test_a_callback_of_a_host_may_close_its_objects(objects: TierObjects) -> None:
    closed = threading.Event()

    def close(answers: Sequence[bool]) -> None:
        objects.close()
        closed.set()

    objects.find([key(1)], close)
    until(closed.is_set, "the callback to return")
    until(lambda: objects.status()["closed"], "the loop to end")


def test_a_view_that_its_host_released_is_of_no_harm_to_the_others(objects: TierObjects) -> None:
    assert objects.store([stored(1), stored(2)]).result() == [True, True]
    mine, released = room(1), room(2)
    with busy(objects):
        request = objects.load([mine[1], released[1]])
        released[1].view.release()
    until(lambda: request.done, "an answer")
    assert request.result() == [True, True]  # its memory was lent until now
    assert bytes(released[0]) == content(2)
    assert objects.load([mine[1]]).result() == [True]


def test_nobody_joins_what_its_host_has_given_up(objects: TierObjects) -> None:
    with busy(objects):
        late = [objects.store([stored(1)]), objects.load([room(1)[1]]), objects.find([key(1)])]
        for request in late:
            request.refuse()
        other = objects.store([stored(1)])
    assert other.result() == [True]
    assert [request.result() for request in late] == [[False]] * 3
    with busy(objects):
        objects.remove([key(1)]).refuse()
    assert objects.find([key(1)]).result() == [False]  # what is to go goes, however late


def test_a_forked_child_gets_misses(objects: TierObjects) -> None:
    objects.store([stored(1)]).result()
    child = os.fork()
    if not child:
        os._exit(0 if objects.find([key(1)]).result() == [False] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert objects.find([key(1)]).result() == [True]


def test_a_child_forked_while_a_thread_has_the_lock_gets_misses(
    objects: TierObjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, go, next_deadline = threading.Event(), threading.Event(), objects.tier.next_deadline

    def slow() -> float | None:  # asked by the loop under its lock, before it waits
        entered.set()
        go.wait()
        return next_deadline()

    monkeypatch.setattr(objects.tier, "next_deadline", slow)
    entered.wait()  # the loop turns by itself; who asked it for something could wait for its lock
    child = os.fork()
    if not child:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)  # it ends if it hangs
        answers = objects.find([key(1)]).result()
        objects.close()
        os._exit(0 if answers == [False] else 1)
    status = os.waitpid(child, 0)[1]
    go.set()
    assert os.waitstatus_to_exitcode(status) == 0
    assert objects.store([stored(1)]).result() == [True]


def test_many_threads_get_their_own_bytes(objects: TierObjects) -> None:
    wrong: list[int] = []

    def work(first: int) -> None:
        for number in range(first, first + 40):
            objects.store([stored(number), stored(number + 1)]).result()
            buffer, wanted = room(number)
            if objects.load([wanted]).result() != [True] or bytes(buffer) != content(number):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(20 * each,)) for each in range(6)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not wrong


def test_a_copy_of_the_hosts_memory_comes_with_its_checksum() -> None:
    lent, target = LentMemory(memoryview(content(7))), memoryview(bytearray(8192))
    assert lent.copy_to(target)
    assert bytes(target) == content(7)
    assert lent.checksum == (None if native is None else payload_checksum([target]))


def test_the_host_waits_for_no_thread_that_steps_behind() -> None:
    seen: dict[str, int] = {}

    class Asking(GatedAdapter):
        def _pass(self, name: str) -> None:
            seen[name] = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    held = tier_over(Asking())
    assert held.store([stored(1)]).result() == [True]
    assert held.load([room(1)[1]]).result() == [True]
    assert held.find([key(1)]).result() == [True]
    held.remove([key(1)]).result()
    held.close()
    mine = os.getpriority(os.PRIO_PROCESS, 0)
    assert [seen[name] for name in ("store", "load", "exists")] == [mine] * 3
    assert seen["delete"] == min(19, mine + LANE_NICE), "nobody waits for it"


def test_memory_taken_back_is_not_copied() -> None:
    memory = LentMemory(memoryview(bytearray(8)))
    assert memory.copy_from(memoryview(b"12345678"))
    memory.take_back()
    assert not memory.copy_from(memoryview(b"87654321"))
    with pytest.raises(UsageError, match="gaps"):
        LentMemory(memoryview(bytearray(8))[::2])


def test_one_memory_taken_back_fails_its_own_store(objects: TierObjects) -> None:
    with busy(objects):
        given_up = objects.store([stored(1)])
        request = objects.store([stored(number) for number in range(4) if number != 1])
        given_up.memory[0].take_back()  # as `Request.result` does when its time is over
    assert request.result() == [True] * 3
    assert given_up.result() == [False]
    assert objects.tier.health.counts["store_done"] == 3
    assert objects.tier.health.stores.state is BreakerState.CLOSED
    until(lambda: objects.store([stored(1)]).result()[0], "a later store of it")


def test_a_probe_whose_memory_was_taken_back_says_nothing_of_the_medium(objects: TierObjects) -> None:
    breaker = objects.tier.health.stores
    with busy(objects):
        given_up = objects.store([stored(1)])
        given_up.memory[0].take_back()
        breaker.failed(objects.tier.clock.now, "the medium failed", at_once=True)
        breaker.came_back(objects.tier.clock.now)
    assert given_up.result() == [False]
    until(lambda: breaker.state is not BreakerState.HALF_OPEN, "the probe to end")
    assert breaker.state is BreakerState.OPEN
    until(lambda: objects.store([stored(1)]).result()[0], "another probe to close the breaker")


def test_what_differs_gets_another_key() -> None:
    of = BlockFormat("model", "meaning")
    spaces = [
        of.namespace(64),
        of.namespace(128),
        of.namespace(64, (0, 2)),
        of.namespace(64, salt="tenant"),
        BlockFormat("model", "other").namespace(64),
        BlockFormat("model", "meaning", "v2").namespace(64),
    ]
    keys = {object_key(space, b"h" * 32, part) for space in spaces for part in ("", "group 1")}
    assert len(keys) == 2 * len(spaces)
    with pytest.raises(UsageError, match="too short"):
        object_key(spaces[0], b"1234")


def test_a_tier_of_the_settings_survives_its_process(tmp_path: Path) -> None:
    settings = HostSettings.read({"tier": {"type": "fs", "path": str(tmp_path), "capacity_bytes": "1GiB"}})
    first = open_objects(settings)
    assert first.store([stored(1)]).result() == [True]
    first.close()
    second = open_objects(settings)
    buffer, wanted = room(1)
    assert second.load([wanted]).result() == [True]
    assert bytes(buffer) == content(1)
    second.close()
