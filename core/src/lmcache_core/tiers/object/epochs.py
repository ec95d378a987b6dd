"""Epochs of namespaces: part of every tier key, so that what was cleared can never come back from a medium."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import msgspec
import xxhash

from lmcache_core.errors import SettingsError
from lmcache_core.files import SharedLines, is_torn, reason_of
from lmcache_core.limits import KEY_BYTES, STATE_COMPACT_LINES, STATE_LINE_NAMESPACES, STATE_TRIES_MAX
from lmcache_core.state_thread import StateThread, check_not_left
from lmcache_core.tiers.object.format import split_tier_key

Epoch = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]  # four bytes of a tier key


class EpochLine(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, frozen=True):
    """What a line of the file says: epochs are at least these. `by`: of the clear that wrote it, to find it again."""

    everything: Epoch = 0
    namespaces: dict[int, Epoch] = {}
    by: str = ""

    @property
    def scopes(self) -> list[int | None]:
        """Whose epochs they are: namespaces, or everything (None)."""
        return [*([None] if self.everything else ()), *self.namespaces]


_U64 = (1 << 64) - 1
_DECODER = msgspec.json.Decoder(EpochLine, strict=False)


def _mark(namespace: int | None, epoch: int) -> int:
    return xxhash.xxh3_64_intdigest(f"{namespace} {epoch}".encode())


class _Highest:
    """The highest epochs of all lines. What the loop's thread asks of it does not grow with the namespaces."""

    def __init__(self) -> None:
        self.everything = 0
        self.namespaces: dict[
            int, int
        ] = {}  # also those that `everything` has reached: to look for them would take long
        self._highest = 0  # of all
        self._above = 0  # the sum of the marks of all namespaces above `everything`

    def of(self, namespace: int) -> int:
        return max(self.everything, self.namespaces.get(namespace, 0))

    def copy(self) -> _Highest:
        other = _Highest()
        other.everything, other.namespaces, other._highest = self.everything, self.namespaces.copy(), self._highest
        other._above = self._above
        return other

    @property
    def digest(self) -> int:
        """A u64 that differs where epochs differ; 0 before the first clear."""
        return (self._above + (_mark(None, self.everything) if self.everything else 0)) & _U64

    def take(self, line: EpochLine) -> EpochLine | None:
        """The epochs that have risen; None if none has."""
        risen = {}
        everything = line.everything if line.everything > self.everything else 0
        if everything:
            self.everything = everything
            above = self.line().namespaces if everything < self._highest else {}
            self._above = sum(map(_mark, above.keys(), above.values()))
            self._highest = max(self._highest, everything)
        for name, epoch in line.namespaces.items():
            former = self.namespaces.get(name, 0)
            if epoch > self.everything and epoch > former:
                self._above += _mark(name, epoch) - (_mark(name, former) if former > self.everything else 0)
                self.namespaces[name] = risen[name] = epoch
                self._highest = max(self._highest, epoch)
        return EpochLine(everything, risen, line.by) if everything or risen else None

    def next(self, namespace: int | None, by: str = "") -> EpochLine:
        """The line of a clear of a namespace, or of all (None)."""
        if namespace is None:
            return EpochLine(self._highest + 1, by=by)
        return EpochLine(namespaces={namespace: self.of(namespace) + 1}, by=by)

    def line(self) -> EpochLine:
        """All of it, as one line. Takes long."""
        above = {name: epoch for name, epoch in self.namespaces.items() if epoch > self.everything}
        return EpochLine(self.everything, above)

    def lines(self) -> bytes:
        """All of it, in lines that nobody takes long to decode."""
        above = iter(self.line().namespaces.items())
        made = [EpochLine(self.everything)]
        while part := dict(islice(above, STATE_LINE_NAMESPACES)):
            made.append(EpochLine(namespaces=part))
        return b"\n".join(map(msgspec.json.encode, made))


class EpochFile:
    """The epochs in a file that the servers of a tier share. Blocks: use it on the state thread.

    A clear is a line. Whoever reads the file takes the highest epochs, so that no order and no repetition matters, and
    of two clears at once the later line moves on. Where the file was removed or replaced, what it lacks is written
    again: a restart must not bring back what was cleared. What is new goes to `found`, for the loop's thread: also what
    a call finds whose caller no longer waits.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found: deque[EpochLine] = deque()
        self._shared = SharedLines(path)
        self._known = _Highest()
        self._lines = 0

    def renewed(self, known: _Highest) -> EpochFile:
        """Another one on the same file, for the thread that takes over while a call hangs in this one. It begins with
        what is `known`, and reads the file from its start. What this one finds after all still goes to `found`."""
        renewed = EpochFile(self.path)
        renewed.found = self.found
        renewed._known, renewed._lines = known.copy(), self._lines
        return renewed

    def open(self) -> None:
        """Read the file. Raises `SettingsError` if it cannot be read."""
        try:
            self.changes()
            live = len(self._known.line().namespaces) + 1
            if self._lines > STATE_COMPACT_LINES and self._lines > 4 * live:
                self._shared.compact(self._known.lines())
        except (OSError, msgspec.MsgspecError) as error:
            raise SettingsError(
                f"cannot read the epochs of the namespaces from {self._shared.path}: {error}. Restore the file, or "
                "clear the tiers by hand and delete it: without it cleared objects would come back"
            ) from error

    def changes(self) -> list[EpochLine]:
        """What is new in the file. Raises `OSError`, and, once the others are taken, `MsgspecError` for a line that is
        none of ours."""
        found, lines, strange = [], self._shared.read(), None
        knew = self._lines > 0
        self._lines += len(lines)
        for line in lines:
            try:
                found.append(_decoded(line))
            except msgspec.MsgspecError as error:
                if not is_torn(error) or self._lines == 1:
                    strange = error
        self.found += filter(None, map(self._known.take, found))
        if knew and self._shared.anew and _lacks(found, self._known):
            self._shared.append(self._known.lines(), check_not_left)
        if strange is not None:
            raise strange
        return found

    def move(self, namespace: int | None, mark: str) -> None:
        """Move a namespace, or all (None), to its next epoch, by lines that carry the mark. Raises `SettingsError` if
        it cannot be kept."""
        try:
            self.changes()
            for number in range(STATE_TRIES_MAX):
                own = self._known.next(namespace, f"{mark}.{number}")
                line = msgspec.json.encode(own)
                _decoded(line)  # beyond the last epoch no start could read it
                self._shared.append(line, check_not_left)
                new = self.changes()
                at = next((at for at, line in enumerate(new) if line.by == own.by), None)
                if at is not None and not any(_overtakes(line, own) for line in new[:at]):
                    return
            raise OSError(None, f"what is written to it is not found there, {STATE_TRIES_MAX} times")
        except (OSError, msgspec.MsgspecError) as error:
            reason = reason_of(error, self._shared.path.parent) if isinstance(error, OSError) else error
            raise SettingsError(
                f"the tiers are not cleared: their new epoch cannot be kept in {self._shared.path}: {reason}; "
                "let the server write there, or set state_dir to a directory where it may"
            ) from error


class Epochs:
    """One number for each namespace, never below that of `everything`. Lives on the loop's thread.

    With a file, an epoch is used once it is kept there: a crash can lose an answer to `clear`, never a clear that was
    answered. Servers that share a tier should share the file, too, or they stop sharing with the first clear. `state`:
    the thread that reads and writes the file; None: the caller's own, which waits for it.

    The functions in `on_risen` are called with the scopes (None: everything) that another server has cleared, before
    anything else can ask for their new epochs.
    """

    def __init__(self, path: str | Path | None = None, state: StateThread | None = None) -> None:
        self.on_risen: list[Callable[[Sequence[int | None]], None]] = []
        self._known = _Highest()
        self._file = None if path is None else EpochFile(Path(path))
        self._state = state
        self._reading = False
        self._moving: set[str] = set()  # the marks of moves that are not answered
        if self._file is not None:
            (self._file.open if state is None else partial(state.wait, self._file.open))()
            if state is not None:
                state.on_left.append(self._renew)
            self._take()

    def _renew(self) -> None:
        assert self._file is not None
        self._tell(self._take())
        self._file = self._file.renewed(self._known)

    def of(self, namespace: int) -> int:
        return self._known.of(namespace)

    @property
    def digest(self) -> int:
        """A u64 that differs where epochs differ; 0 before the first clear."""
        return self._known.digest

    def refresh(self) -> None:
        """Take over the changes of other servers. If the file cannot be read now, nothing changes, and a later refresh
        takes them over."""

        def done(_: Any, error: Exception | None) -> None:
            self._reading = False
            self._tell(self._take())

        if self._file is not None and not self._reading:
            self._reading = True
            self._ask(lambda: self._the_file.changes(), done)

    def move(self, namespace: int | None, on_done: Callable[[Exception | None], None] | None = None) -> None:
        """Move a namespace, or all (None), to its next epoch; `on_done` gets a `SettingsError` if it cannot be kept,
        which is raised if there is no `on_done`. The epoch rises just before that call: whoever clears has no moment
        in which what is to be cleared can be stored under the new epoch."""
        mark = os.urandom(8).hex()

        def done(_: Any, error: Exception | None) -> None:
            risen = self._take()
            self._moving.discard(mark)
            own = self._take()  # a move that failed may stand in the file all the same, and whoever called gives it up
            self._tell(risen if error is None else risen + own)
            if on_done is not None:
                on_done(error)
            elif error is not None:
                raise error

        if self._file is not None:
            self._moving.add(mark)
            self._ask(lambda: self._the_file.move(namespace, mark), done)
        else:
            self._known.take(self._known.next(namespace))
            done(None, None)

    @property
    def _the_file(self) -> EpochFile:
        """Of the thread that runs calls now: asked when one begins."""
        assert self._file is not None
        return self._file

    def _ask(self, call: Callable[[], Any], on_done: Callable[[Any, Exception | None], None]) -> None:
        failed: Exception | None = None
        try:
            if self._state is not None:
                self._state.ask(call, on_done)
                return
            call()
        except (OSError, msgspec.MsgspecError, SettingsError) as error:
            failed = error
        on_done(None, failed)

    def _tell(self, scopes: Sequence[int | None]) -> None:
        if scopes:
            for listener in self.on_risen:
                listener(scopes)

    def _take(self) -> list[int | None]:
        """Take over what the file has shown, without moves that are not answered. Returns whose epochs have risen."""
        risen: dict[int | None, None] = {}
        early = []
        while self._file is not None and self._file.found:
            line = self._file.found.popleft()
            if line.by.partition(".")[0] in self._moving:
                early.append(line)
            elif (higher := self._known.take(line)) is not None:
                risen |= dict.fromkeys(higher.scopes)
        if self._file is not None:
            self._file.found += early
        return list(risen)


def _decoded(line: bytes) -> EpochLine:
    return _DECODER.decode(line)


def _lacks(lines: Sequence[EpochLine], known: _Highest) -> bool:
    """Whether these lines, which are a whole file, say less than is known."""
    there = _Highest()
    for line in lines:
        there.take(line)
    return there.take(known.line()) is not None


def _overtakes(line: EpochLine, own: EpochLine) -> bool:
    """Whether another clear has taken the epoch that `own` was to move to."""
    if own.namespaces:
        return any(
            max(line.everything, line.namespaces.get(name, 0)) >= own.namespaces[name] for name in own.namespaces
        )
    return max(line.everything, *line.namespaces.values(), 0) >= own.everything


def former_epochs(tier_keys: Sequence[bytes], epochs: Epochs) -> list[bytes]:
    """Those of former epochs: a clear has made them unreachable."""
    former: dict[bytes, bool] = {}  # by the suffix after the key: a batch usually has one namespace and one epoch
    for tier_key in tier_keys:
        if tier_key[KEY_BYTES:] not in former:
            _, namespace, epoch = split_tier_key(tier_key)
            former[tier_key[KEY_BYTES:]] = epoch < epochs.of(namespace)
    if not any(former.values()):
        return []
    return [tier_key for tier_key in tier_keys if former[tier_key[KEY_BYTES:]]]
