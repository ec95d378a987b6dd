"""Serdes with one realistic fault each, and the contract test that has to notice it (`caught_by`)."""

from __future__ import annotations

import array
import ctypes
import hashlib
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import pytest

from lmcache_core.errors import DamagedObjectError, UsageError
from lmcache_core.pool.layout import Layout
from lmcache_core.serde.contract import Buffer, Serde
from lmcache_testing import SerdeContract


class Sealed(Serde):
    """Correct: zlib, and a digest over bytes, key and layout. The faults below are changes to it."""

    name = "sealed"
    lossless = True

    def encoded_bytes_max(self, nbytes: int, layout: Layout) -> int:
        return nbytes + nbytes // 100 + 100

    def seal(self, packed: bytes, layout: Layout, key: bytes) -> bytes:
        return hashlib.sha256(packed + key + layout.fingerprint.to_bytes(8, "big")).digest()

    def encode(self, src: memoryview, layout: Layout, key: bytes) -> Sequence[Buffer]:
        packed = zlib.compress(src, 1)
        return [self.seal(packed, layout, key), packed]

    def decode(self, src: memoryview, into: memoryview, layout: Layout, key: bytes) -> None:
        packed = bytes(src[32:])
        if bytes(src[:32]) != self.seal(packed, layout, key):
            raise DamagedObjectError("fails its seal")
        plain = zlib.decompress(packed)
        if len(plain) != into.nbytes:
            raise DamagedObjectError("has another length")
        into[:] = plain


class Wrong(SerdeContract):
    caught_by: ClassVar[str]
    faulty: ClassVar[type[Serde]]
    authenticates = True

    @pytest.fixture
    def make_serde(self) -> Callable[[], Serde]:
        return self.faulty


class TestIgnoresTheKey(Wrong):
    caught_by = "test_an_object_is_not_passed_off_as_another"

    class faulty(Sealed):
        def seal(self, packed: bytes, layout: Layout, key: bytes) -> bytes:
            return super().seal(packed, layout, b"")


class TestBindsTheObjectsKeyAlone(Wrong):
    caught_by = "test_an_object_is_not_passed_off_as_another"

    class faulty(Sealed):
        def seal(self, packed: bytes, layout: Layout, key: bytes) -> bytes:
            return super().seal(packed, layout, key[:32])  # neither namespace nor epoch


class TestIgnoresTheLayout(Wrong):
    caught_by = "test_an_object_is_not_passed_off_as_another"

    class faulty(Sealed):
        def seal(self, packed: bytes, layout: Layout, key: bytes) -> bytes:
            return hashlib.sha256(packed + key).digest()


class TestChecksNothing(Wrong):
    caught_by = "test_a_flipped_bit_is_damage_or_a_wrong_value_and_never_a_crash"

    class faulty(Sealed):
        def decode(self, src: memoryview, into: memoryview, layout: Layout, key: bytes) -> None:
            into[:] = zlib.decompress(bytes(src[32:]))


class TestRaisesItsLibrarysErrors(Wrong):
    caught_by = "test_noise_is_refused_or_decoded_and_never_a_crash"
    authenticates = False

    class faulty(Sealed):
        def decode(self, src: memoryview, into: memoryview, layout: Layout, key: bytes) -> None:
            into[:] = zlib.decompress(bytes(src[32:]))  # zlib.error


class TestTakesACutObject(Wrong):
    caught_by = "test_another_length_is_damage"
    authenticates = False

    class faulty(Sealed):
        def decode(self, src: memoryview, into: memoryview, layout: Layout, key: bytes) -> None:
            plain = zlib.decompressobj().decompress(bytes(src[32:]))
            into[: len(plain)] = plain[: into.nbytes]


class TestBreaksItsBound(Wrong):
    caught_by = "test_the_encoded_size_keeps_its_bound"

    class faulty(Sealed):
        def encoded_bytes_max(self, nbytes: int, layout: Layout) -> int:
            return nbytes  # "it compresses"


class TestRounds(Wrong):
    caught_by = "test_what_was_encoded_is_decoded"

    class faulty(Sealed):
        def encode(self, src: memoryview, layout: Layout, key: bytes) -> Sequence[Buffer]:
            return super().encode(memoryview(bytes(byte & 0xFE for byte in src)), layout, key)


class TestForgetsTheTail(Wrong):
    caught_by = "test_the_target_is_written_wholly_and_alone"

    class faulty(Sealed):
        def decode(self, src: memoryview, into: memoryview, layout: Layout, key: bytes) -> None:
            whole = into.nbytes // 64 * 64
            plain = zlib.decompress(bytes(src[32:]))
            into[:whole] = plain[:whole]


class TestKeepsTheSource(Wrong):
    caught_by = "test_the_source_is_neither_changed_nor_kept"

    class faulty(Sealed):
        def encode(self, src: memoryview, layout: Layout, key: bytes) -> Sequence[Buffer]:
            self.last = src
            return super().encode(src, layout, key)


class TestRemembersInsteadOfWriting(Wrong):
    caught_by = "test_what_was_encoded_is_decoded"

    class faulty(Sealed):
        def __init__(self) -> None:
            self.lengths: dict[bytes, int] = {}

        def encode(self, src: memoryview, layout: Layout, key: bytes) -> Sequence[Buffer]:
            self.lengths[key] = src.nbytes
            return super().encode(src, layout, key)

        def decode(self, src: memoryview, into: memoryview, layout: Layout, key: bytes) -> None:
            if self.lengths.get(key) != into.nbytes:
                raise DamagedObjectError("was never seen")
            super().decode(src, into, layout, key)


class TestSharesAScratchBuffer(Wrong):
    caught_by = "test_one_serde_serves_eight_threads"

    class faulty(Sealed):
        def encode(self, src: memoryview, layout: Layout, key: bytes) -> Sequence[Buffer]:
            self.scratch = bytes(src)
            time.sleep(0.001)  # the heavy work, without the GIL
            return super().encode(memoryview(self.scratch), layout, key)


class TestParametersThatChange(Wrong):
    caught_by = "test_it_says_what_it_is"

    class faulty(Sealed):
        def parameters(self) -> Mapping[str, Any]:
            return {"instance": id(self)}


class TestIsLossyAndSaysNothing(Wrong):
    caught_by = "test_what_was_encoded_is_decoded"

    class faulty(Sealed):
        lossless = False


class TestComparesFourBytesOfTheSeal(Wrong):
    caught_by = "test_a_flipped_bit_is_damage_or_a_wrong_value_and_never_a_crash"

    class faulty(Sealed):
        def decode(self, src: memoryview, into: memoryview, layout: Layout, key: bytes) -> None:
            packed = bytes(src[32:])
            if bytes(src[:4]) != self.seal(packed, layout, key)[:4]:
                raise DamagedObjectError("fails its seal")
            into[:] = zlib.decompress(packed)


class TestKeepsWhatItDecoded(Wrong):
    caught_by = "test_the_encoded_bytes_are_neither_changed_nor_kept"

    class faulty(Sealed):
        def decode(self, src: memoryview, into: memoryview, layout: Layout, key: bytes) -> None:
            self.last = src
            super().decode(src, into, layout, key)


class TestDecodesInPlace(Wrong):
    caught_by = "test_the_encoded_bytes_are_neither_changed_nor_kept"

    class faulty(Sealed):
        def decode(self, src: memoryview, into: memoryview, layout: Layout, key: bytes) -> None:
            super().decode(src, into, layout, key)
            if not src.readonly:
                src[0] ^= 0xFF


class TestTakesEverythingForNumbers(Wrong):
    caught_by = "test_any_bytes_survive_a_lossless_serde"

    class faulty(Sealed):
        def encode(self, src: memoryview, layout: Layout, key: bytes) -> Sequence[Buffer]:
            plain = bytes(src).replace(b"\xff", b"\xfe")  # no number of ours has it
            return super().encode(memoryview(plain), layout, key)


class TestRefusesWithoutAWord(Wrong):
    caught_by = "test_every_layout_works_or_is_refused_in_words"

    class faulty(Sealed):
        def encode(self, src: memoryview, layout: Layout, key: bytes) -> Sequence[Buffer]:
            if layout.nbytes % 64:
                raise UsageError("")
            return super().encode(src, layout, key)


class TestLosesTheRestOfOddShapes(Wrong):
    caught_by = "test_every_layout_works_or_is_refused_in_words"

    class faulty(Sealed):
        def encode(self, src: memoryview, layout: Layout, key: bytes) -> Sequence[Buffer]:
            rest = src.nbytes % 8
            plain = bytes(src[: src.nbytes - rest]) + bytes(rest)
            return super().encode(memoryview(plain), layout, key)


class TestStoresNothingForZeros(Wrong):
    caught_by = "test_the_encoded_size_keeps_its_bound"

    class faulty(Sealed):
        def encode(self, src: memoryview, layout: Layout, key: bytes) -> Sequence[Buffer]:
            return super().encode(src, layout, key) if any(src) else []


class TestHasNoName(Wrong):
    caught_by = "test_it_says_what_it_is"

    class faulty(Sealed):
        name = ""


class TestReadsPastNothing(Wrong):
    caught_by = "test_another_length_is_damage"
    authenticates = False

    class faulty(Sealed):
        def decode(self, src: memoryview, into: memoryview, layout: Layout, key: bytes) -> None:
            if src[0] > 255:
                raise DamagedObjectError("is of another version")
            super().decode(src, into, layout, key)


class TestTakesWhatFollowsForPadding(Wrong):
    caught_by = "test_another_length_is_damage"
    authenticates = False

    class faulty(Sealed):
        def decode(self, src: memoryview, into: memoryview, layout: Layout, key: bytes) -> None:
            try:
                plain = zlib.decompressobj().decompress(bytes(src[32:]))
            except zlib.error as error:
                raise DamagedObjectError(str(error)) from error
            if len(plain) != into.nbytes:
                raise DamagedObjectError("has another length")
            into[:] = plain


class TestForgetsItsParametersInAChain(Wrong):
    caught_by = "test_a_chain_undoes_it_in_reverse"

    class faulty(Sealed):
        def encoded_bytes_max(self, nbytes: int, layout: Layout) -> int:
            return nbytes // 2

        def encode(self, src: memoryview, layout: Layout, key: bytes) -> Sequence[Buffer]:
            return [self.seal(bytes(src), layout, key), bytes(src)]


# --- bounds and parameters ------------------------------------------------------------------------------------------
class TestBoundsByWhatItGaveLast(Wrong):
    caught_by = "test_its_bound_follows_from_the_layout_alone"

    class faulty(Sealed):
        last = 0

        def encoded_bytes_max(self, nbytes: int, layout: Layout) -> int:
            return self.last or super().encoded_bytes_max(nbytes, layout)

        def encode(self, src: memoryview, layout: Layout, key: bytes) -> Sequence[Buffer]:
            buffers = super().encode(src, layout, key)
            self.last = sum(map(len, buffers))
            return buffers


class TestPromisesAHalfAndMeasuresLater(Wrong):
    caught_by = "test_the_encoded_size_keeps_its_bound"

    class faulty(Sealed):
        largest = 0

        def encoded_bytes_max(self, nbytes: int, layout: Layout) -> int:
            return max(nbytes // 2, self.largest)  # of those that went through this instance

        def encode(self, src: memoryview, layout: Layout, key: bytes) -> Sequence[Buffer]:
            buffers = super().encode(src, layout, key)
            self.largest = max(self.largest, sum(map(len, buffers)))
            return buffers


class TestBoundsNothing(Wrong):
    caught_by = "test_its_bound_follows_from_the_layout_alone"

    class faulty(Sealed):
        def encoded_bytes_max(self, nbytes: int, layout: Layout) -> int:
            return 1 << 40


class TestBoundsByAFraction(Wrong):
    caught_by = "test_its_bound_follows_from_the_layout_alone"

    class faulty(Sealed):
        def encoded_bytes_max(self, nbytes: int, layout: Layout) -> float:
            return nbytes * 1.01 + 100


class TestCountsInItsParameters(Wrong):
    caught_by = "test_its_parameters_stay_as_they_are"

    class faulty(Sealed):
        encoded = 0

        def parameters(self) -> Mapping[str, Any]:
            return {"dictionary": self.encoded // 2}

        def encode(self, src: memoryview, layout: Layout, key: bytes) -> Sequence[Buffer]:
            self.encoded += 1
            return super().encode(src, layout, key)


class TestScramblesByTheHashOfTheKey(Wrong):
    caught_by = "test_another_process_decodes_it"

    class faulty(Sealed):
        def seal(self, packed: bytes, layout: Layout, key: bytes) -> bytes:
            return hashlib.sha256(packed + key + hash((key, layout)).to_bytes(8, "big", signed=True)).digest()


# --- buffers --------------------------------------------------------------------------------------------------------
class TestReusesItsOutput(Wrong):
    caught_by = "test_encoded_objects_stay_as_they_are_while_others_are_encoded"

    class faulty(Sealed):
        def __init__(self) -> None:
            self.out = bytearray(1 << 20)

        def encode(self, src: memoryview, layout: Layout, key: bytes) -> Sequence[Buffer]:
            whole = b"".join(super().encode(src, layout, key))
            self.out[: len(whole)] = whole
            return [memoryview(self.out)[: len(whole)]]


class TestGivesBytesForBuffers(Wrong):
    caught_by = "test_what_was_encoded_is_decoded"

    class faulty(Sealed):
        def encode(self, src: memoryview, layout: Layout, key: bytes) -> bytes:
            return b"".join(super().encode(src, layout, key))


class TestGivesAViewOfWords(Wrong):
    caught_by = "test_what_was_encoded_is_decoded"

    class faulty(Sealed):
        def encode(self, src: memoryview, layout: Layout, key: bytes) -> Sequence[Buffer]:
            seal, packed = super().encode(src, layout, key)
            return [memoryview(seal).cast("I"), packed]


class TestKeepsWhatItRefused(Wrong):
    caught_by = "test_the_encoded_bytes_are_neither_changed_nor_kept"

    class faulty(Sealed):
        def decode(self, src: memoryview, into: memoryview, layout: Layout, key: bytes) -> None:
            try:
                super().decode(src, into, layout, key)
            except DamagedObjectError:
                self.refused = src  # to be looked at by somebody
                raise


class TestWritesWholeBlocks(Wrong):
    caught_by = "test_the_target_is_written_wholly_and_alone"

    class faulty(Sealed):
        def decode(self, src: memoryview, into: memoryview, layout: Layout, key: bytes) -> None:
            super().decode(src, into, layout, key)
            address = ctypes.addressof(ctypes.c_char.from_buffer(into))
            ctypes.memset(address + into.nbytes, 0, -into.nbytes % 64)  # its blocks have 64 bytes


class TestLeavesZerosToOthers(Wrong):
    caught_by = "test_what_was_encoded_is_decoded"

    class faulty(Sealed):
        def decode(self, src: memoryview, into: memoryview, layout: Layout, key: bytes) -> None:
            plain = bytearray(into.nbytes)
            super().decode(src, memoryview(plain), layout, key)
            if any(plain):  # fresh memory is zero
                into[:] = plain


# --- types ----------------------------------------------------------------------------------------------------------
class TestTakesEveryTypeForFloats(Wrong):
    caught_by = "test_every_layout_works_or_is_refused_in_words"
    authenticates = False

    def assert_close(self, before: bytes, after: bytes, layout: Layout) -> None:
        if layout.dtype == "float32":
            pairs = zip(array.array("f", before), array.array("f", after), strict=True)
            assert all(abs(one - other) <= abs(one) / 128 for one, other in pairs)
        else:
            assert after == before, f"{layout.dtype} came back otherwise"

    class faulty(Sealed):
        """The upper half of each float, whatever the type is."""

        name = "halves"
        lossless = False

        def encode(self, src: memoryview, layout: Layout, key: bytes) -> Sequence[Buffer]:
            if layout.itemsize != 4:
                raise UsageError("of four bytes each")
            plain = bytearray(src)
            plain[0::4] = plain[1::4] = bytes(len(plain) // 4)
            return super().encode(memoryview(plain), layout, key)


# --- hostile objects ------------------------------------------------------------------------------------------------
class TestAllocatesWhatItsHeaderSays(Wrong):
    caught_by = "test_a_damaged_length_allocates_nothing"
    authenticates = False

    class faulty(Sealed):
        def encode(self, src: memoryview, layout: Layout, key: bytes) -> Sequence[Buffer]:
            return [src.nbytes.to_bytes(8, "little"), zlib.compress(src, 1)]

        def decode(self, src: memoryview, into: memoryview, layout: Layout, key: bytes) -> None:
            plain = bytearray(int.from_bytes(src[:8], "little"))
            try:
                unpacked = zlib.decompress(src[8:])
            except zlib.error as error:
                raise DamagedObjectError(str(error)) from error
            if not len(plain) == len(unpacked) == into.nbytes:
                raise DamagedObjectError("has another length")
            into[:] = unpacked


class TestUnpacksAllBeforeItLooks(Wrong):
    caught_by = "test_what_unpacks_to_more_than_its_object_is_refused_before_it_does"
    authenticates = False

    class faulty(Sealed):
        def decode(self, src: memoryview, into: memoryview, layout: Layout, key: bytes) -> None:
            try:
                plain = zlib.decompress(src[32:])
            except zlib.error as error:
                raise DamagedObjectError(str(error)) from error
            if len(plain) != into.nbytes:
                raise DamagedObjectError("has another length")
            into[:] = plain


# --- threads --------------------------------------------------------------------------------------------------------
class TestSharesAScratchForAMoment(Wrong):
    caught_by = "test_two_encodes_do_not_meet"

    class faulty(Sealed):
        def encode(self, src: memoryview, layout: Layout, key: bytes) -> Sequence[Buffer]:
            self.scratch = bytes(src)
            plain = memoryview(self.scratch)
            return super().encode(plain, layout, key)


class TestSharesItsTargetForAMoment(Wrong):
    caught_by = "test_two_decodes_do_not_meet"

    class faulty(Sealed):
        def decode(self, src: memoryview, into: memoryview, layout: Layout, key: bytes) -> None:
            self.plain = bytearray(into.nbytes)
            super().decode(src, memoryview(self.plain), layout, key)
            into[:] = self.plain


class TestRefusesALayoutWithItsFirstObject(Wrong):
    """The server accepted the layout, and the tier loses every object."""

    caught_by = "test_a_layout_is_refused_before_the_first_object"

    class faulty(Sealed):
        def encode(self, src: memoryview, layout: Layout, key: bytes) -> Sequence[Buffer]:
            if layout.dtype in ("uint8", "int8"):
                raise UsageError(f"{layout} is no KV")
            return super().encode(src, layout, key)


class TestRoundsWhatHasNoAxes(Wrong):
    caught_by = "test_values_in_an_order_that_nobody_knows_come_back_in_it"

    class faulty(Sealed):
        def encode(self, src: memoryview, layout: Layout, key: bytes) -> Sequence[Buffer]:
            kept = src if layout.memory_format else memoryview(bytes(byte & 0xFE for byte in src))
            return super().encode(kept, layout, key)
