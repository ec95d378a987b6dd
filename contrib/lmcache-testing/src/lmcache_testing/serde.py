"""The contract of a serde, as tests.

    class TestAcmeSerde(SerdeContract):
        @pytest.fixture
        def make_serde(self):
            return lambda: AcmeSerde(AcmeSettings())

A lossy serde must also say how close it comes: `assert_close(before, after, layout)`.
"""

from __future__ import annotations

import gc
import json
import math
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import ClassVar

import pytest

from lmcache_core.errors import CacheError, DamagedObjectError, UsageError
from lmcache_core.pool.layout import DTYPE_BYTES, Layout
from lmcache_core.serde.chain import CodecChain
from lmcache_core.serde.contract import Buffer, Serde
from lmcache_core.serde.scratch import Scratch
from lmcache_core.tiers.object.format import object_kind, serde_key
from lmcache_testing import material
from lmcache_testing.contract import Contract, not_claimed, not_judged, raised
from lmcache_testing.purity import peak_bytes, salted
from lmcache_testing.stepping import Stepped, own_modules

Make = Callable[[], Serde]
THREADS = 8
STOPS_MAX = 60  # lines of one call at which another call runs
GROWTH_MAX = 8  # times the object: a larger encoded form is no use to anybody
ROOM_BYTES = 1 << 20
UNPACKED_BYTES = 8 << 20


def _object_key(number: int, namespace: int = 7, epoch: int = 3, chain: Sequence[Serde] = ()) -> bytes:
    """The key of an object as a chain passes it to its serdes."""
    kind = object_kind(Layout("uint8", (1,)), CodecChain(chain))
    return serde_key(kind, material.key(number)[:32], namespace, epoch)


KEY = _object_key(1)


def joined(buffers: Sequence[Buffer]) -> bytes:
    """The encoded object as it is on a medium."""
    kind = type(buffers).__name__
    listed = isinstance(buffers, Sequence) and not isinstance(buffers, str | Buffer)
    assert listed, f"encode gave a {kind}, and has to give a list of buffers"
    for part in buffers:
        assert isinstance(part, Buffer), f"encode gave a {type(part).__name__} among its buffers: bytes, or a view"
        if isinstance(part, memoryview):
            message = f"encode gave a view of format {part.format!r} in {part.ndim} dimensions: bytes, in one run"
            assert part.format == "B" and part.ndim == 1 and part.contiguous, message  # noqa: PT018
    return b"".join(buffers)


def encoded(serde: Serde, source: bytes, layout: Layout, key: bytes = KEY) -> bytes:
    return joined(serde.encode(memoryview(source).toreadonly(), layout, key))


def decoded(serde: Serde, source: bytes, layout: Layout, key: bytes = KEY) -> bytes:
    into = bytearray([material.FILL]) * layout.nbytes
    serde.decode(memoryview(source).toreadonly(), memoryview(into), layout, key)
    return bytes(into)


class SerdeContract(Contract):
    """What a codec chain relies on. `make_serde` gives a new serde, always with the same settings."""

    layouts: ClassVar[Sequence[Layout]] = (
        Layout("bfloat16", (2, 2, 64, 4, 16), "KLTHD"),
        Layout("float16", (2, 100, 3, 8), "KTHD"),
        Layout("float32", (3, 50, 2, 16), "LTHD"),
        Layout("float32", (1001,)),
    )
    authenticates: ClassVar[bool] = False  # True: any other byte, key, namespace, epoch or layout is refused

    @pytest.fixture
    def make_serde(self) -> Make:
        pytest.fail(f"{type(self).__name__} has no fixture 'make_serde': return a callable that makes a serde")

    @pytest.fixture
    def serde(self, make_serde: Make) -> Serde:
        return make_serde()

    def assert_close(self, before: bytes, after: bytes, layout: Layout) -> None:
        """Raise AssertionError if a lossy serde is further off than it promises."""
        pytest.fail(
            f"{type(self).__name__}: the serde is lossy, so say how near it comes: "
            "def assert_close(self, before, after, layout)",
            pytrace=False,
        )

    def contents(self, layout: Layout) -> list[bytes]:
        """Objects of one layout: realistic KV, all zeros, one repeated value."""
        one = material.sample(layout, 3)[: layout.itemsize]
        found = [material.sample(layout, 1), material.sample(layout, 2), bytes(layout.nbytes)]
        return [*found, one * (layout.nbytes // layout.itemsize)]

    def test_it_says_what_it_is(self, make_serde: Make) -> None:
        serde = make_serde()
        assert isinstance(serde, Serde), f"a {type(serde).__name__} is no Serde"
        assert isinstance(serde.name, str) and serde.name, f"its name is {serde.name!r}: a word"  # noqa: PT018
        assert isinstance(serde.lossless, bool), f"lossless is {serde.lossless!r}: True or False"
        parameters = dict(serde.parameters())
        try:
            recorded = json.loads(json.dumps(parameters))
        except (TypeError, ValueError) as error:
            raise AssertionError(f"its parameters are recorded as JSON, which refuses them: {error}") from error
        changed = [name for name, value in parameters.items() if recorded.get(name) != value]
        assert recorded == parameters, (
            f"its parameters come back from JSON otherwise: {', '.join(map(str, changed)) or 'their names'}"
        )
        again = dict(make_serde().parameters())
        other = sorted(str(name) for name in {*again, *parameters} if again.get(name) != parameters.get(name))
        assert not other, f"two serdes of equal settings have other parameters: {', '.join(other)}"
        for layout in self.layouts:
            object_kind(layout, CodecChain([serde]))  # they must fit into an object's header

    def test_what_was_encoded_is_decoded(self, make_serde: Make) -> None:
        serde = make_serde()
        for layout in self.layouts:
            for content in self.contents(layout):
                after = decoded(make_serde(), encoded(serde, content, layout), layout)
                if serde.lossless:
                    assert after == content, f"{layout}, encoded and decoded: {material.difference(after, content)}"
                else:
                    self.assert_close(content, after, layout)

    def test_any_bytes_survive_a_lossless_serde(self, serde: Serde) -> None:
        if not serde.lossless:
            not_claimed("lossless")
        for layout in self.layouts:
            content = material.content(4, layout.nbytes)
            after = decoded(serde, encoded(serde, content, layout), layout)
            assert after == content, f"{layout} of random bytes: {material.difference(after, content)}"

    def test_the_encoded_size_keeps_its_bound(self, serde: Serde, make_serde: Make) -> None:
        """A fresh serde is asked: the server that decodes has not encoded."""
        for layout in self.layouts:
            for content in (*self.contents(layout), material.content(5, layout.nbytes)):
                nbytes = len(encoded(serde, content, layout))
                bound = make_serde().encoded_bytes_max(layout.nbytes, layout)
                assert 0 < nbytes <= bound, (
                    f"{layout} was encoded to {nbytes:,} bytes; encoded_bytes_max says {bound:,}"
                )
                again = serde.encoded_layout(layout, nbytes).nbytes
                assert again >= 1, f"{layout}: encoded_layout has {again} bytes"

    def test_its_bound_follows_from_the_layout_alone(self, serde: Serde, make_serde: Make) -> None:
        """Memory is allocated by it, for lengths read from a medium."""
        for layout in self.layouts:
            before = serde.encoded_bytes_max(layout.nbytes, layout)
            assert type(before) is int, (
                f"encoded_bytes_max gave {before!r} ({type(before).__name__}), and has to give a whole number"
            )
            most = GROWTH_MAX * layout.nbytes + ROOM_BYTES
            assert before <= most, (
                f"encoded_bytes_max allows {before:,} bytes for an object of {layout.nbytes:,}: memory is allocated by "
                f"any length up to it that stands on a medium, so it has to be near what encode gives (here {most:,})"
            )
            for content in self.contents(layout):
                encoded(serde, content, layout)
            after = [one.encoded_bytes_max(layout.nbytes, layout) for one in (serde, make_serde())]
            assert after == [before] * 2, f"encoded_bytes_max said {before:,}, after some encodes {after[0]:,}"

    def test_its_parameters_stay_as_they_are(self, serde: Serde) -> None:
        """Any serde with equal parameters decodes an object, so the parameters must follow from the settings."""
        before = dict(serde.parameters())
        for layout in self.layouts:
            decoded(serde, encoded(serde, material.sample(layout, 1), layout), layout)
        after = dict(serde.parameters())
        assert after == before, f"after some encodes and decodes its parameters are {after}, and were {before}"

    def test_another_process_decodes_it(self, make_serde: Make) -> None:
        """Python's `hash` of the key differs there."""
        layout = self.layouts[0]
        content = material.sample(layout, 1)
        one, other = salted(1)(KEY), salted(2)(KEY)
        packed = encoded(make_serde(), content, layout, one)
        expected = decoded(make_serde(), packed, layout, one)
        try:
            after = decoded(make_serde(), packed, layout, other)
        except DamagedObjectError as error:
            raise AssertionError(
                f"where hash(key) is another, as in another process, decode refused it: {error}"
            ) from None
        message = f"where hash(key) is another, as in another process: {material.difference(after, expected)}"
        assert after == expected, message

    def test_every_layout_works_or_is_refused_in_words(self, serde: Serde) -> None:
        for dtype in DTYPE_BYTES:
            for shape, axes in (((37,), ""), ((2, 3, 8, 2, 4), "KLTHD"), ((1,), ""), ((8, 128), "TD")):
                layout = Layout(dtype, shape, axes)
                content = material.sample(layout, 6)
                try:
                    packed = encoded(serde, content, layout)
                except UsageError as error:
                    if not str(error):
                        raise AssertionError(f"{layout} is refused without a word") from error
                    continue
                after = decoded(serde, packed, layout)
                if serde.lossless:
                    right = after == content
                    assert right, f"{layout} was taken, and came back otherwise: {material.difference(after, content)}"
                elif after != content:
                    self.assert_close(content, after, layout)  # a serde that cannot come close for a type refuses it

    def test_a_layout_is_refused_before_the_first_object(self, serde: Serde) -> None:
        """A server asks for the bound when a layout is registered. What encode refuses only later, with the object in
        its hand, would be accepted and then be lost for the tier."""
        for dtype in DTYPE_BYTES:
            for shape, axes in (((4096,), ""), ((2, 3, 8, 2, 4), "KLTHD")):
                layout = Layout(dtype, shape, axes)
                early = _refusal(partial(serde.encoded_bytes_max, layout.nbytes, layout))
                later = _refusal(partial(encoded, serde, material.sample(layout, 7), layout))
                assert (not early) == (not later), (
                    f"{layout}: encoded_bytes_max {'refuses it' if early else 'gives a bound'}, and encode "
                    f"{'refuses it' if later else 'takes it'} ({early or later}): let encoded_bytes_max raise "
                    "UsageError for exactly those that encode refuses"
                )

    def test_values_in_an_order_that_nobody_knows_come_back_in_it(self, serde: Serde) -> None:
        """As in an engine's blocks: heads and tokens lie as its backend wants, and the layout has no memory format."""
        named = self.layouts[0]
        layout = Layout(named.dtype, (math.prod(named.shape),))
        if _refusal(partial(serde.encoded_bytes_max, layout.nbytes, layout)):
            not_claimed("values without a memory format")
        content = material.sample(named, 8)
        turned = b"".join(content[at : at + layout.itemsize] for at in _turned(layout))
        after = decoded(serde, encoded(serde, turned, layout), layout)
        if serde.lossless:
            assert after == turned, f"{layout}: {material.difference(after, turned)}"
        else:
            self.assert_close(turned, after, layout)

    # --- buffers --------------------------------------------------------------------------------------------
    def test_the_source_is_neither_changed_nor_kept(self, serde: Serde) -> None:
        layout = self.layouts[0]
        content = material.sample(layout, 1)
        source = bytearray(content)
        kept = _encode_and_forget(serde, source, layout)
        changed = material.difference(bytes(source), content)
        assert source == content, f"after encode, of the source {changed}"
        gc.collect()
        assert kept() is None, "a view of the source is still referred to after its encoded form has gone"
        _assert_not_exported(source, "an object was encoded, and its encoded form has gone")

    def test_encoded_objects_stay_as_they_are_while_others_are_encoded(self, serde: Serde) -> None:
        """A batch is encoded before it is sent: a serde that returns its own memory needs separate memory for each
        object."""
        layout = self.layouts[0]
        contents = [material.sample(layout, seed) for seed in range(3)]
        expected = [decoded(serde, encoded(serde, content, layout), layout) for content in contents]
        sent = [serde.encode(memoryview(content).toreadonly(), layout, KEY) for content in contents]
        for number, buffers in enumerate(sent):
            done = f"three objects were encoded, one after the other, and then number {number + 1} was decoded"
            try:
                after = decoded(serde, joined(buffers), layout)
            except DamagedObjectError as error:
                raise AssertionError(f"{done}: it was refused: {error}") from None
            assert after == expected[number], f"{done}: {material.difference(after, expected[number])}"

    def test_the_target_is_written_wholly_and_alone(self, serde: Serde) -> None:
        for layout in self.layouts:
            packed = encoded(serde, material.sample(layout, 1), layout)
            found = []
            for fill in (0x00, 0xFF):
                memory = bytearray([fill]) * (layout.nbytes + 200)
                serde.decode(memoryview(packed), memoryview(memory)[100:-100], layout, KEY)
                beside = sum(byte != fill for byte in (*memory[:100], *memory[-100:]))
                assert not beside, (
                    f"{layout}, decoded into the middle of a buffer: {beside} bytes beside it were changed"
                )
                found.append(bytes(memory[100:-100]))
                _assert_not_exported(memory, "an object was decoded")
            left = material.difference(*found)
            assert found[0] == found[1], (
                f"{layout}, decoded over zeros and over ones: not all of it was written, {left}"
            )

    def test_the_encoded_bytes_are_neither_changed_nor_kept(self, serde: Serde) -> None:
        layout = self.layouts[0]
        packed = bytearray(encoded(serde, material.sample(layout, 1), layout))
        before = bytes(packed)
        into = bytearray(layout.nbytes)
        serde.decode(memoryview(packed), memoryview(into), layout, KEY)
        assert packed == before, f"after decode, of the encoded bytes {material.difference(bytes(packed), before)}"
        gc.collect()
        for buffer, name in ((packed, "encoded bytes"), (into, "target")):
            _assert_not_exported(buffer, f"an object was decoded: its {name}")
        packed[len(packed) // 2] ^= 0xFF
        with suppress(CacheError):  # the exceptions are tested by another claim
            serde.decode(memoryview(packed), memoryview(into), layout, KEY)
        gc.collect()
        for buffer, name in ((packed, "encoded bytes"), (into, "target")):
            _assert_not_exported(buffer, f"a damaged object was given to decode: its {name}")

    # --- damage ---------------------------------------------------------------------------------------------
    @pytest.mark.parametrize("change", ["one byte less", "one byte more", "nothing", "half", "twice"])
    def test_another_length_is_damage(self, serde: Serde, change: str) -> None:
        for layout in self.layouts:
            packed = encoded(serde, material.sample(layout, 1), layout)
            other = {
                "one byte less": packed[:-1],
                "one byte more": packed + b"\0",
                "nothing": b"",
                "half": packed[: len(packed) // 2],
                "twice": packed + packed,
            }[change]
            _expect_damage(serde, other, layout, KEY, f"{len(packed):,} encoded bytes of {layout}, {change}")

    def test_a_flipped_bit_is_damage_or_a_wrong_value_and_never_a_crash(self, serde: Serde) -> None:
        layout = self.layouts[0]
        packed = encoded(serde, material.sample(layout, 1), layout)
        places = {0, 1, 4, 8, 16, 24, 32, 48, 64, len(packed) - 1, len(packed) // 2, len(packed) // 3}
        for place in sorted(place for place in places if place < len(packed)):
            for bit in (0, 3, 7):
                other = bytearray(packed)
                other[place] ^= 1 << bit
                if self.authenticates:
                    _expect_damage(serde, bytes(other), layout, KEY, f"bit {bit} of encoded byte {place} was flipped")
                else:
                    _refused_or_decoded(serde, bytes(other), layout, f"bit {bit} of encoded byte {place} was flipped")

    def test_noise_is_refused_or_decoded_and_never_a_crash(self, serde: Serde) -> None:
        layout = self.layouts[0]
        size = len(encoded(serde, material.sample(layout, 1), layout))
        for seed in range(20):
            _refused_or_decoded(serde, material.content(seed, size), layout, f"given {size:,} random bytes")
        _refused_or_decoded(serde, bytes(size), layout, f"given {size:,} zeros")
        _refused_or_decoded(serde, b"\xff" * size, layout, f"given {size:,} bytes of 255")

    def test_a_damaged_length_allocates_nothing(self, serde: Serde) -> None:
        """Lengths in an object are input: compare them with the layout before allocating."""
        layout = self.layouts[0]
        packed = encoded(serde, material.sample(layout, 1), layout)
        most = 4 * (layout.nbytes + len(packed)) + ROOM_BYTES
        for place in range(min(96, len(packed))):
            other = bytearray(packed)
            other[place] ^= 0x40
            done = f"encoded byte {place} was changed"
            try:
                taken = peak_bytes(partial(_refused_or_decoded, serde, bytes(other), layout, done))
            except MemoryError:
                raise AssertionError(f"encoded byte {place} was changed, and decode ran out of memory") from None
            assert taken <= most, (
                f"encoded byte {place} of an object of {layout.nbytes:,} bytes was changed, and decode took {taken:,} "
                "bytes of memory"
            )

    def test_what_unpacks_to_more_than_its_object_is_refused_before_it_does(self, serde: Serde) -> None:
        """A small object on the medium could be crafted to fill the memory of the server that loads it."""
        like = self.layouts[0]
        small, large = (Layout(like.dtype, (nbytes // like.itemsize,)) for nbytes in (4096, UNPACKED_BYTES))
        try:
            packed = encoded(serde, bytes(large.nbytes), large)
            decoded(serde, encoded(serde, bytes(small.nbytes), small), small)
        except UsageError:
            not_claimed("layouts of one dimension")
        if len(packed) > UNPACKED_BYTES // 16:
            not_claimed("compression")
        done = f"{len(packed):,} encoded bytes of {large}, decoded as {small}"
        taken = peak_bytes(lambda: _expect_damage(serde, packed, small, KEY, done))
        assert taken < UNPACKED_BYTES // 4, f"{done}: it was refused, after {taken:,} bytes of memory had been taken"

    def test_an_object_is_not_passed_off_as_another(self, serde: Serde) -> None:
        if not self.authenticates:
            not_claimed("authenticates")
        for layout in self.layouts:
            packed = encoded(serde, material.sample(layout, 1), layout, KEY)
            for other in _other_keys():
                _expect_damage(serde, packed, layout, other, "encoded under one key, decoded under another")
            other_layout = Layout("uint8", (layout.nbytes,))
            _expect_damage(serde, packed, other_layout, KEY, f"encoded as {layout}, decoded as {other_layout}")

    # --- threads and chains ---------------------------------------------------------------------------------
    def test_one_serde_serves_eight_threads(self, serde: Serde) -> None:
        layout = self.layouts[0]
        faults: list[str] = []
        expected = {n: decoded(serde, encoded(serde, material.sample(layout, n), layout), layout) for n in range(4)}
        start = threading.Barrier(THREADS)

        def work(me: int) -> None:
            try:
                start.wait(material.DEADLINE_S)
                for turn in range(6):
                    number = (me + turn) % 4
                    key = _object_key(number)
                    packed = encoded(serde, material.sample(layout, number), layout, key)
                    found = decoded(serde, packed, layout, key)
                    if found != expected[number]:
                        faults.append(f"what was encoded came back with {material.difference(found, expected[number])}")
            except Exception as error:  # noqa: BLE001 - of a thread: raised by the test
                faults.append(f"a call raised {raised(error)}")

        threads = [threading.Thread(target=work, args=(me,), daemon=True) for me in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * material.DEADLINE_S)
        late = sum(thread.is_alive() for thread in threads)
        assert not late, f"{THREADS} threads encoded and decoded at once, and {late} did not come back"
        assert not faults, f"{len(faults)} times in {THREADS} threads, at first: {faults[0]}"

    def test_two_encodes_do_not_meet(self, serde: Serde) -> None:
        """One call stops at each of its lines while another runs from end to end: shared state shows."""
        layout = self.layouts[0]
        one, other = (material.sample(layout, seed) for seed in (1, 2))
        expected = [decoded(serde, encoded(serde, content, layout), layout) for content in (one, other)]

        def look() -> None:
            found = decoded(serde, encoded(serde, other, layout), layout)
            assert found == expected[1], f"encoded beside another: {material.difference(found, expected[1])}"

        packed = _stepped(serde, lambda: encoded(serde, one, layout), look)
        try:
            found = decoded(serde, packed, layout)
        except DamagedObjectError as error:
            raise AssertionError(
                f"another encode ran at each line of one, and what that gave is refused: {error}"
            ) from None
        message = f"another encode ran at each line of one, which gave: {material.difference(found, expected[0])}"
        assert found == expected[0], message

    def test_two_decodes_do_not_meet(self, serde: Serde) -> None:
        layout = self.layouts[0]
        packed = [encoded(serde, material.sample(layout, seed), layout) for seed in (1, 2)]
        expected = [decoded(serde, each, layout) for each in packed]

        def look() -> None:
            found = decoded(serde, packed[1], layout)
            assert found == expected[1], f"decoded beside another: {material.difference(found, expected[1])}"

        found = _stepped(serde, lambda: decoded(serde, packed[0], layout), look)
        message = f"another decode ran at each line of one, which gave: {material.difference(found, expected[0])}"
        assert found == expected[0], message

    def test_a_chain_undoes_it_in_reverse(self, make_serde: Make) -> None:
        layout = self.layouts[0]
        content = material.sample(layout, 1)
        alone = decoded(make_serde(), encoded(make_serde(), content, layout), layout)
        chain = CodecChain([make_serde(), _Complement()])
        scratch = Scratch()
        packed = chain.encode(memoryview(content).toreadonly(), layout, KEY, scratch)
        on_medium = joined(packed.buffers)
        bound = chain.encoded_bytes_max(layout)
        assert len(on_medium) <= bound, f"a chain with it gave {len(on_medium):,} bytes, and {bound:,} is its bound"
        into = bytearray(layout.nbytes)
        chain.decode(memoryview(on_medium), memoryview(into), layout, KEY, packed.lengths, Scratch())
        assert into == alone, f"a chain with it, undone in reverse: {material.difference(bytes(into), alone)}"


def _stepped(serde: Serde, call: Callable[[], bytes], look: Callable[[], None]) -> bytes:
    scheduler = Stepped(call, own_modules(serde, Serde), look, STOPS_MAX)
    answer = scheduler.run(material.DEADLINE_S)
    if scheduler.stops == 0:
        not_judged("no line of Python ran in the call: what happens within C cannot be stopped")
    return answer


def _other_keys() -> list[bytes]:
    """Keys that differ from KEY in one part: key, namespace, epoch, codec chain."""
    return [
        _object_key(2),
        _object_key(1, namespace=8),
        _object_key(1, epoch=4),
        _object_key(1, chain=[_Complement()]),
    ]


class _Complement(Serde):
    """Inverts every bit: a chain in the wrong order gives nonsense."""

    name = "complement"
    lossless = True

    def encoded_bytes_max(self, nbytes: int, layout: Layout) -> int:
        return nbytes

    def encode(self, src: memoryview, layout: Layout, key: bytes) -> Sequence[Buffer]:
        return [bytes(src).translate(_TURNED)]

    def decode(self, src: memoryview, into: memoryview, layout: Layout, key: bytes) -> None:
        into[:] = bytes(src).translate(_TURNED)


_TURNED = bytes(255 - byte for byte in range(256))


def _expect_damage(serde: Serde, packed: bytes, layout: Layout, key: bytes, done: str) -> None:
    try:
        decoded(serde, packed, layout, key)
    except DamagedObjectError:
        return
    except Exception as error:
        raise AssertionError(f"{done}: decode raised {raised(error)}, and DamagedObjectError is due") from error
    raise AssertionError(f"{done}: decode gave an object, and DamagedObjectError is due")


def _refused_or_decoded(serde: Serde, packed: bytes, layout: Layout, done: str) -> None:
    try:
        decoded(serde, packed, layout)
    except DamagedObjectError:
        pass
    except MemoryError:
        raise  # memory use is tested by another claim
    except Exception as error:
        raise AssertionError(
            f"{done}: decode raised {raised(error)}, and a DamagedObjectError is due, or any object"
        ) from error


def _encode_and_forget(serde: Serde, source: bytearray, layout: Layout) -> weakref.ref[memoryview]:
    view = memoryview(source).toreadonly()
    joined(serde.encode(view, layout, KEY))
    return weakref.ref(view)


def _assert_not_exported(buffer: bytearray, done: str) -> None:
    try:
        buffer.append(0)
        buffer.pop()
    except BufferError as error:
        raise AssertionError(f"{done}: something still refers to the caller's buffer after the call") from error


def _refusal(call: Callable[[], object]) -> str:
    """What a serde says of a layout that it does not take; empty if it does."""
    try:
        call()
    except UsageError as error:
        return str(error) or "without a word"
    return ""


def _turned(layout: Layout) -> Iterator[int]:
    """Where the values lie if rows of 64 of them become columns."""
    rows = -(-layout.shape[0] // 64)
    for column in range(64):
        for at in range(column, 64 * rows, 64):
            if at < layout.shape[0]:
                yield at * layout.itemsize
