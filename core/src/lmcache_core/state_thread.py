"""Work on the files that outlive the server, on a thread of its own: a file system that hangs stalls nobody else."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from lmcache_core.errors import CacheError, SettingsError
from lmcache_core.limits import (
    NAME_REMOVE_S,
    START_STEP_S,
    STATE_CALL_S,
    STATE_CALLS_MAX,
    STATE_END_S,
    STATE_THREADS_LEFT_MAX,
)

__all__ = ["StateThread", "check_not_left", "remove_name", "within"]

log = logging.getLogger(__name__)
T = TypeVar("T")
Done = Callable[[Any, Exception | None], None]


class _StateCall:
    """`answered` is written on the loop's thread alone; a state thread reads it before it begins."""

    def __init__(self, call: Callable[[], Any], on_done: Done, deadline: float) -> None:
        self.call = call
        self.on_done = on_done
        self.deadline = deadline
        self.answered = False


class _StateWorker(threading.Thread):
    """Runs calls until it is left behind: then it ends with the call that it is in, which may write nothing more."""

    def __init__(self, run: Callable[[_StateWorker], None], directory: Path | None = None) -> None:
        """`directory`: one to look at before the first call."""
        super().__init__(name="lmcache-state", daemon=True)
        self._run_calls = run
        self.directory = directory
        self._lock = threading.Lock()  # guards the change of the next two
        self.call: _StateCall | None = None  # the one that it is in
        self.left = False  # set only while it is in a call: so it takes no other one

    def run(self) -> None:
        self._run_calls(self)

    def leave(self) -> bool:
        """Leave it behind if it is in a call that is late. Returns whether it is left behind."""
        with self._lock:
            self.left = self.left or (self.call is not None and self.call.answered)
            return self.left

    def keep(self) -> None:
        """Nobody could take over: it goes on after its call, unless it has ended by now."""
        with self._lock:
            self.left = self.call is None

    def returned(self) -> None:
        """Its call has returned: from now on nobody leaves it behind."""
        with self._lock:
            self.call = None


def check_not_left() -> None:
    """For calls, before they write. Raises `SettingsError` if another thread has taken over from this one."""
    if getattr(threading.current_thread(), "left", False):
        raise SettingsError(_LATE)


class StateThread:
    """Runs calls one after another, and answers each of them once on the loop's thread: with what it returned or
    raised, or with an error when its deadline passes. A call that is late may have its effect all the same; one that
    has not begun by then never begins.

    A thread whose call is late is left behind, as a lane's is, and another takes over once it has found `directory` to
    answer: so at most one waits for a directory that hangs, besides those that hang in a call. What a call writes after
    its thread was left behind it checks by `check_not_left`; what it keeps in memory belongs to that thread for good:
    `on_left` functions, on the loop's thread, put something new in its place.

    `post` runs a function on the loop's thread, soon, and may be called from any thread.
    """

    def __init__(self, post: Callable[[Callable[[], None]], None], directory: Path | None = None) -> None:
        self._post = post
        self._directory = directory
        self.on_left: list[Callable[[], None]] = []
        self._left: list[_StateWorker] = []  # that have not returned
        self._waiting: deque[_StateCall] = deque()  # in the order of their deadlines
        self._queue: queue.SimpleQueue[_StateCall | None] = queue.SimpleQueue()
        self._thread = _StateWorker(self._run)
        self._thread.start()

    def status(self) -> dict[str, int]:
        """For `status`."""
        return {"waiting": len(self._waiting), "hung": self.hung}

    @property
    def hung(self) -> int:
        """Threads that have not returned from a call whose time is over."""
        late = bool(self._thread.call and self._thread.call.answered)
        return sum(each.is_alive() for each in self._left) + late

    def ask(self, call: Callable[[], T], on_done: Callable[[T | None, Exception | None], None]) -> None:
        """Run `call` on the state thread, then `on_done` on the loop's. Raises `SettingsError` if too many wait."""
        if len(self._waiting) >= STATE_CALLS_MAX:
            raise SettingsError(
                f"{STATE_CALLS_MAX} changes wait for the state directory already, which does not answer: see whether "
                "its disk or mount hangs"
            )
        made = _StateCall(call, on_done, time.monotonic() + STATE_CALL_S)
        self._waiting.append(made)
        self._queue.put(made)

    def wait(self, call: Callable[[], T]) -> T:
        """What `call` returns or raises, for callers who have no loop yet. Raises `SettingsError` if it is late."""
        made = _AwaitedCall(call)
        self._queue.put(_StateCall(made.run, lambda _, error: None, time.monotonic() + START_STEP_S))
        late = f"the state directory has not answered for {START_STEP_S:g} s: see whether its disk or mount hangs"
        return made.result(START_STEP_S, SettingsError(f"{late}, or set state_dir"))

    def step(self, now: float) -> None:
        """Answer what is late, and leave a thread behind that is in it. Call it on the loop's thread, in
        housekeeping."""
        while self._waiting and self._waiting[0].deadline <= now:
            self._answer(self._waiting[0], None, SettingsError(_LATE))
        self._left = [each for each in self._left if each.is_alive()]
        if len(self._left) < STATE_THREADS_LEFT_MAX and self._thread.leave():  # otherwise calls wait for it
            self._take_over()

    def _take_over(self) -> None:
        """Another thread. If none can be started, `step` tries again."""
        former, thread = self._thread, _StateWorker(self._run, self._directory)
        for renew in self.on_left:  # before the new thread takes a call
            renew()
        try:
            thread.start()
        except RuntimeError as error:  # a limit of the user's processes, or of the control group's
            log.warning("no other thread for the state directory: %s", error)
            former.keep()
            return
        self._left.append(former)
        self._thread = thread
        log.warning("a call on the state directory has not returned within %g s: another thread goes on", STATE_CALL_S)

    def close(self) -> None:
        """End after the calls that wait; a thread that hangs is left behind."""
        self._queue.put(None)
        self._thread.join(STATE_END_S)

    def _run(self, worker: _StateWorker) -> None:
        if worker.directory is not None:
            with contextlib.suppress(OSError):  # which the next call tells its caller
                list(worker.directory.iterdir())
        while not worker.left and (call := self._queue.get()) is not None:
            if call.answered:
                continue
            worker.call = call
            result, failed = None, None
            try:
                result = call.call()
            except Exception as error:  # noqa: BLE001 - the answer, on the loop's thread
                failed = error
            worker.returned()
            self._post(partial(self._answer, call, result, failed))

    def _answer(self, call: _StateCall, result: Any, error: Exception | None) -> None:
        if call.answered or call not in self._waiting:
            return
        call.answered = True
        self._waiting.remove(call)
        call.on_done(result, error)


def within(seconds: float, call: Callable[[], T], late: CacheError, undo: Callable[[T], object] | None = None) -> T:
    """What `call` returns or raises, from a thread of its own. Raises `late` if that takes longer; the thread is left
    behind, and `undo` gets there what the call returns after all."""
    made = _AwaitedCall(call, undo)
    try:
        threading.Thread(target=made.run, name="lmcache-within", daemon=True).start()
    except RuntimeError:  # no more threads, or the interpreter ends
        made.run()
    return made.result(seconds, late)


def remove_name(path: Path, remove: Callable[[], object]) -> None:
    """Remove a name of a server that ends, by `remove`. A directory that hangs keeps it, and the log says so: the next
    server of that name replaces it. Raises what `remove` raises."""
    late = SettingsError(
        f"{path} is left behind: its directory has not answered for {NAME_REMOVE_S:g} s; see whether its disk or mount "
        "hangs"
    )
    try:
        within(NAME_REMOVE_S, remove, late)
    except SettingsError as error:
        if error is not late:
            raise
        log.warning("%s", late)


class _AwaitedCall(Generic[T]):
    """One call on another thread, and who waits for it."""

    def __init__(self, call: Callable[[], T], undo: Callable[[T], object] | None = None) -> None:
        self._call = call
        self._undo = undo
        self._lock = threading.Lock()  # guards the next two
        self._left = False
        self._done = threading.Event()
        self._results: list[T] = []
        self._failed: BaseException | None = None

    def run(self) -> None:
        try:
            self._results.append(self._call())
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits
            self._failed = error
        with self._lock:
            self._done.set()
            left = self._left
        if left and self._undo is not None and self._results:
            self._undo(self._results[0])

    def result(self, seconds: float, late: CacheError) -> T:
        self._done.wait(seconds)
        with self._lock:
            self._left = not self._done.is_set()
        if self._left:
            raise late
        failed, self._failed = self._failed, None
        if failed is not None:
            try:
                raise failed
            finally:
                del failed  # its traceback names this frame: a cycle otherwise
        return self._results[0]


_LATE = (
    f"the state directory has not answered for {STATE_CALL_S:g} s, so the change is not known to be kept: see whether "
    "its disk or mount hangs, and try again"
)
