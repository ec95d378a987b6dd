"""The kit in a process of its own: an adapter may crash its interpreter, or hang in spite of every interrupt."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from lmcache_testing.card import FAILED, JUDGED_NOT, Line
from lmcache_testing.journal import Journal

CRASHES_MAX = 3  # after this many crashed interpreters, the remaining claims are not tested
STOP_S = 20.0  # for the fixtures to clean up
_INTERRUPTED = 2  # pytest's exit status
_NOT_OURS = ("PYTEST_ADDOPTS", "PYTEST_DISABLE_PLUGIN_AUTOLOAD")  # set by the caller's environment


def run_kit(options: Sequence[str], folder: Path, out: IO[str]) -> tuple[list[Line], int]:
    """Run pytest with these options. Returns what it found for each claim, and its exit status (the worst of several).

    If the interpreter crashes, the claim under test has failed, and another interpreter continues after it. Raises
    KeyboardInterrupt when this process is interrupted or terminated; the kit then leaves nothing behind.
    """
    journal = Journal(folder / "journal")
    command = [sys.executable, "-m", "pytest", *options, f"--kit-journal={folder / 'journal'}"]
    died: list[Line] = []
    worst = 0
    while True:
        ended = _run(command, folder, out)
        story = journal.read()
        if story.over is not None or not story.tests:
            if story.over == _INTERRUPTED or ended < 0:
                died.append(Line("", "the run of the kit", FAILED, f"it was interrupted ({_ending(ended)})"))
            return [*story.lines, *died], worst or ended
        worst = 1
        if story.under_way is not None:
            _, subject, claim = story.under_way
            died.append(Line(subject, claim, FAILED, f"the interpreter ended in the middle of it ({_ending(ended)})"))
        if len(died) >= CRASHES_MAX or story.under_way is None:
            why = f"not run, because the interpreter ended {len(died)} times"
            left = [each for each in story.expected if each.test not in set(story.tests)]
            return [*story.lines, *died, *(Line(each.subject, each.claim, JUDGED_NOT, why) for each in left)], worst


def _ending(ended: int) -> str:
    return signal.Signals(-ended).name if ended < 0 else f"exit status {ended}"


def _run(command: Sequence[str], folder: Path, out: IO[str]) -> int:
    """The exit status. It runs in its own process group: an interrupt from the terminal is passed to it once."""
    ours = {name: value for name, value in os.environ.items() if name not in _NOT_OURS}
    env = {**ours, "HYPOTHESIS_STORAGE_DIRECTORY": str(folder / "hypothesis")}
    with _terminated_is_interrupted():
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, env=env, process_group=0)
        try:
            return process.wait()
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_S)
            raise
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # whatever it left behind
            process.wait()


@contextmanager
def _terminated_is_interrupted() -> Iterator[None]:
    """In the main thread; no other can receive it."""

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGTERM, interrupt)
    except ValueError:
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
