"""Judges the storage backends of other KV caches: subclass `HostBackendContract` and bring a `HostBackend`.

A `HostBackend` is a reverse shim: it turns one host's interface (SGLang's `HiCacheStorage`, LMCache's
`L2AdapterInterface`, vLLM's `SecondaryTierManager`) into these few calls. `lmcache-hosts` has one for each.

    class TestTheirs(HostBackendContract):
        @pytest.fixture
        def open_backend(self, tmp_path):
            return lambda model="model": TheirBackend(tmp_path, model)

        @pytest.fixture
        def files(self, tmp_path):
            return lambda: sorted(path for path in tmp_path.rglob("*.bin"))

The claims are those of `L2AdapterContract` that such an interface can make. What an interface lacks is left out by name
(`cannot`), and stands as a skip that says so.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import pytest

from lmcache_testing.waiting import until

__all__ = ["HostBackend", "HostBackendContract"]

OpenBackend = Callable[..., "HostBackend"]
Files = Callable[[], Sequence[Path]]


class HostBackend(ABC):
    """One backend of a host, opened. Keys are 32 bytes of a hash, objects have `NBYTES`."""

    NBYTES: ClassVar[int] = 65536

    @abstractmethod
    def store(self, objects: Mapping[bytes, bytes]) -> bool:
        """Store a batch. Whether the host would take it as stored, all of it."""

    @abstractmethod
    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Whether the host would take each key as there."""

    @abstractmethod
    def load(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The bytes that the host would use; None where it would take the load as failed. Raises what the backend
        raises into the host."""

    @abstractmethod
    def close(self) -> None:
        """Release everything."""


def key(number: int) -> bytes:
    """A key for each number."""
    return hashlib.sha256(b"key %d" % number).digest()


def content(number: int, nbytes: int = HostBackend.NBYTES) -> bytes:
    """An object for each number."""
    return hashlib.shake_128(b"content %d" % number).digest(nbytes)


class HostBackendContract:
    """What a host relies on, whatever its backend.

    Attributes:
        cannot: Claims that the interface or the kind of backend cannot make: the test's name without `test_`, and why.
        faults: Claims that the backend is known not to keep, in the same form; one that it keeps after all fails.
    """

    cannot: ClassVar[Mapping[str, str]] = {}
    faults: ClassVar[Mapping[str, str]] = {}

    @pytest.fixture(autouse=True)
    def _exceptions(self, request: pytest.FixtureRequest) -> None:
        names = [name.removeprefix("test_") for name in (request.node.name, request.function.__name__)]
        for name in names:
            if name in self.cannot:
                pytest.skip(f"left out: {self.cannot[name]}")
            if name in self.faults:
                request.applymarker(pytest.mark.xfail(reason=self.faults[name], strict=True))

    @pytest.fixture
    def open_backend(self) -> OpenBackend:
        """Callable: a backend on the test's own medium; `model` is the name of its model."""
        pytest.fail(f"{type(self).__name__} has no fixture 'open_backend': return a callable that opens the backend")

    @pytest.fixture
    def files(self) -> Files | None:
        """Callable: the files of the objects on the medium, past the backend. Without it damage is not judged."""
        return None

    @pytest.fixture
    def backend(self, open_backend: OpenBackend) -> Iterator[HostBackend]:
        opened = open_backend()
        yield opened
        opened.close()

    # --- values -------------------------------------------------------------------------------------------
    def test_what_was_stored_comes_back(self, backend: HostBackend) -> None:
        objects = {key(number): content(number) for number in range(8)}
        _store(backend, objects)
        _loads(backend, objects)

    def test_exists_and_load_agree(self, backend: HostBackend) -> None:
        _store(backend, {key(1): content(1)})
        _exist(backend, {key(1): True, key(2): False})
        _loads(backend, {key(1): content(1), key(2): None})

    def test_a_batch_with_a_missing_object_gives_the_others(self, backend: HostBackend) -> None:
        _store(backend, {key(number): content(number) for number in (0, 2)})
        _loads(backend, {key(0): content(0), key(1): None, key(2): content(2)})

    def test_a_second_store_of_a_key_does_no_harm(self, backend: HostBackend) -> None:
        _store(backend, {key(1): content(1)})
        _store(backend, {key(1): content(1)})
        _loads(backend, {key(1): content(1)})

    # --- other handles ------------------------------------------------------------------------------------
    def test_the_next_process_finds_it(self, open_backend: OpenBackend) -> None:
        first = open_backend()
        _store(first, {key(1): content(1)})
        first.close()
        second = open_backend()
        _exist(second, {key(1): True})
        _loads(second, {key(1): content(1)})
        second.close()

    @pytest.mark.parametrize(
        ("one", "other"), [("org/name", "org-name"), ("org/name", "org_name"), ("org/name", "org-SEP-name")]
    )
    def test_two_models_never_share_an_object(self, open_backend: OpenBackend, one: str, other: str) -> None:
        first, second = open_backend(model=one), open_backend(model=other)
        _store(first, {key(1): content(1)})
        _loads(second, {key(1): None})
        first.close()
        second.close()

    # --- the medium ---------------------------------------------------------------------------------------
    def _one_file(self, backend: HostBackend, files: Files | None, number: int = 1) -> Path:
        if files is None:
            pytest.skip("not judged: a fixture 'files' unlocks it")
        before = set(files())
        _store(backend, {key(number): content(number)})
        (made,) = until(lambda: set(files()) - before, "the object's file")
        return made

    def test_a_flipped_bit_is_not_served(self, backend: HostBackend, files: Files | None) -> None:
        path = self._one_file(backend, files)
        held = bytearray(path.read_bytes())
        held[len(held) // 2] ^= 1
        path.write_bytes(held)
        _loads(backend, {key(1): None})

    def test_the_bytes_of_another_object_are_not_served(self, backend: HostBackend, files: Files | None) -> None:
        path, other = self._one_file(backend, files), self._one_file(backend, files, 2)
        path.write_bytes(other.read_bytes())
        _loads(backend, {key(1): None})

    def test_a_file_that_is_too_long_is_not_served(self, backend: HostBackend, files: Files | None) -> None:
        path = self._one_file(backend, files)
        path.write_bytes(os.urandom(4096) + path.read_bytes())
        _loads(backend, {key(1): None})

    def test_a_cut_file_is_a_miss_and_no_exception(self, backend: HostBackend, files: Files | None) -> None:
        path = self._one_file(backend, files)
        path.write_bytes(path.read_bytes()[:-4096])
        _loads(backend, {key(1): None})

    def test_a_damaged_object_is_replaced_by_the_next_store(self, backend: HostBackend, files: Files | None) -> None:
        path = self._one_file(backend, files)
        path.write_bytes(path.read_bytes()[:-4096])
        with contextlib.suppress(Exception):  # another claim is about that
            backend.load([key(1)])
        backend.store({key(1): content(1)})
        _loads(backend, {key(1): content(1)})

    # --- many at once -------------------------------------------------------------------------------------
    def test_stores_of_one_key_at_once_do_not_mix(self, open_backend: OpenBackend) -> None:
        """Two processes of a host, as two handles here: whichever wins, the object is one of them, whole."""
        wanted = [content(100 + which) for which in range(2)]
        for number in range(20):
            handles = [open_backend(), open_backend()]
            together = threading.Barrier(2)
            threads = [
                threading.Thread(target=_store_together, args=(together, handle, {key(number): held}))
                for handle, held in zip(handles, wanted, strict=True)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            (found,) = handles[0].load([key(number)])
            for handle in handles:
                handle.close()
            assert found is None or found in wanted, (
                f"two stores of key {number} at once gave {_words(found)}, of neither"
            )

    def test_many_threads_get_their_own_bytes(self, backend: HostBackend) -> None:
        wrong: list[int] = []

        def work(first: int) -> None:
            for number in range(first, first + 20):
                backend.store({key(number): content(number)})
                (found,) = backend.load([key(number)])
                if found not in (None, content(number)):
                    wrong.append(number)

        threads = [threading.Thread(target=work, args=(10 * each,)) for each in range(4)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        assert not wrong, f"other bytes than were stored came back for the keys {wrong}"

    def test_descriptors_do_not_pile_up(self, backend: HostBackend) -> None:
        def open_now() -> int:
            return len(list(Path("/proc/self/fd").iterdir()))

        for number in range(3):
            backend.store({key(number): content(number)})
            backend.load([key(number)])
        before = open_now()
        for number in range(60):
            backend.store({key(number): content(number)})
            backend.load([key(number), key(1000 + number)])
        now = open_now()
        assert now <= before + 2, f"{now - before} more descriptors are open after 60 stores and loads"


def _store(backend: HostBackend, objects: Mapping[bytes, bytes]) -> None:
    assert backend.store(objects), f"the store of {len(objects)} objects was refused"


def _exist(backend: HostBackend, expected: Mapping[bytes, bool]) -> None:
    found = backend.exists(list(expected))
    assert found == list(expected.values()), f"exists answered {found}, and {list(expected.values())} is true"


def _loads(backend: HostBackend, expected: Mapping[bytes, bytes | None]) -> None:
    found = backend.load(list(expected))
    wanted = list(expected.values())
    seen, true = ", ".join(map(_words, found)), ", ".join(map(_words, wanted))
    assert found == wanted, f"load gave {seen}, and {true} is right; the bytes differ where the lengths do not"


def _words(found: bytes | None) -> str:
    return "a miss" if found is None else f"{len(found):,} bytes"


def _store_together(together: threading.Barrier, backend: HostBackend, objects: Mapping[bytes, bytes]) -> None:
    together.wait()
    backend.store(objects)
