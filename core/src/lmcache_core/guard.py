"""One guard between us and the code of others: plugins, policies, serdes, adapters, callbacks.

Whatever that code raises is its own fault, and must not end the thread of ours that called it, nor keep it from
settling what it holds. A panic in a Rust library counts, though it is no `Exception`, and so does an exit. Only an
interrupt by the user passes: Python raises it on the main thread alone; on any other it is a fault like the rest.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import ParamSpec, TypeVar

__all__ = ["guarded", "is_interrupt", "on_failure"]

_Answer = TypeVar("_Answer")
_Instead = TypeVar("_Instead")
_P = ParamSpec("_P")


def is_interrupt(error: BaseException) -> bool:
    """Whether the user has interrupted the call: then it is nobody's fault, and passes."""
    return isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread()


def guarded(
    instead: Callable[[BaseException], _Instead],
    call: Callable[_P, _Answer],
    /,
    *args: _P.args,
    **kwargs: _P.kwargs,
) -> _Answer | _Instead:
    """The result of `call`, or of `instead(error)` if it raises.

    `instead` logs or counts the fault and gives the answer to go on with, or raises an error of ours. It must not keep
    the error: its traceback has the frames of the callers, and they have views of the pool.
    """
    try:
        return call(*args, **kwargs)
    except BaseException as error:  # the code of others may raise whatever it likes
        if is_interrupt(error):
            raise
        return instead(error)


@contextmanager
def on_failure(*ends: Callable[[], object]) -> Iterator[None]:
    """If the block raises, whatever it is, call all of these in order, and let it pass: nothing half done is left."""
    try:
        yield
    except BaseException:
        with ExitStack() as last_to_first:
            for end in reversed(ends):
                last_to_first.callback(end)
        raise
