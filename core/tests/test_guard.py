"""The guard: what others raise ends with them, and an interrupt by the user does not."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest

from lmcache_core.guard import guarded


class Panic(BaseException):
    """As of a Rust library: no `Exception`."""


def raising(error: BaseException) -> int:
    raise error


def test_a_guarded_call_that_returns_gives_its_own_answer() -> None:
    assert guarded(lambda error: -1, max, 3, 7) == 7
    assert guarded(lambda error: -1, int, "11", base=2) == 3


@pytest.mark.parametrize("error", [ValueError("no"), Panic("index out of range"), SystemExit(1), MemoryError()])
def test_whatever_a_guarded_call_raises_the_handler_answers_instead(error: BaseException) -> None:
    assert guarded(lambda seen: (seen is error, "instead"), raising, error) == (True, "instead")


def test_an_interrupt_on_the_main_thread_passes_the_guard() -> None:
    with pytest.raises(KeyboardInterrupt):
        guarded(lambda error: 0, raising, KeyboardInterrupt())


def test_an_interrupt_that_a_plugin_raises_on_another_thread_is_a_fault() -> None:
    answers: list[int] = []
    thread = threading.Thread(target=lambda: answers.append(guarded(lambda error: 1, raising, KeyboardInterrupt())))
    thread.start()
    thread.join(60)
    assert answers == [1]


def test_a_handler_may_raise_an_error_of_its_own() -> None:
    def refuse(error: BaseException) -> int:
        raise LookupError("it is broken") from error

    with pytest.raises(LookupError) as caught:
        guarded(refuse, raising, Panic("index out of range"))
    assert isinstance(caught.value.__cause__, Panic)


def test_a_fault_keeps_nothing_of_its_caller_alive() -> None:
    # The server's collector does not scan old objects, and a caller's frame has views of the pool.
    class View: ...

    def fail() -> None:
        raise ValueError("no")

    def work() -> weakref.ref[View]:
        view = View()
        guarded(lambda error: None, fail)
        return weakref.ref(view)

    gc.disable()
    try:
        assert work()() is None
    finally:
        gc.enable()
