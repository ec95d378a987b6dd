"""The medium behind the adapter: durability, other adapters, damage. Inspected through the back door."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from lmcache_core.errors import TierError
from lmcache_core.pool.layout import Layout
from lmcache_core.serde.chain import CodecChain
from lmcache_core.tiers.contract import L2Adapter, LoadItem, Result
from lmcache_core.tiers.object.format import object_kind
from lmcache_core.tiers.object.transfer import Carrier, Loaded, Transfer
from lmcache_testing import material
from lmcache_testing.contract import Contract, missing, not_claimed, not_judged

LAYOUT = Layout("uint8", (20_000,))
NAMESPACE = 0x1234


class MediumTests(Contract):
    """Needs `reopen`, `second`, `backdoor` or `expire`; the capabilities determine which are required."""

    # --- other handles --------------------------------------------------------------------------------------
    @contextmanager
    def _opened(self, adapter: L2Adapter, reopen: Any) -> Iterator[L2Adapter]:
        if reopen is None:
            claims = [name for name in ("durable", "shared") if getattr(adapter.capabilities, name)]
            if claims:
                missing(type(self), "reopen", f"the adapter claims {' and '.join(claims)}")
            not_claimed("durable, shared; a fixture 'reopen' unlocks it all the same")
        with reopen() as fresh:
            assert fresh is not adapter, "the fixture 'reopen' gave the adapter itself: it has to make another"
            yield fresh

    def test_a_fresh_handle_sees_what_the_old_one_saw(self, adapter: L2Adapter, reopen: Any) -> None:
        for number in range(5):
            material.expect_stored(adapter, material.key(number), material.content(number, 5000))
        if adapter.capabilities.delete:
            material.expect_deleted(adapter, [material.key(3)], "five objects stored")
        keys = [material.key(number) for number in range(7)]
        expected = [bool(found) for found in adapter.exists(keys, material.soon())]
        listed = sorted(entry[:2] for entry in material.scan(adapter)) if adapter.capabilities.scan else None
        adapter.close()
        done = "closed and opened again"
        with self._opened(adapter, reopen) as fresh:
            material.expect_exists(fresh, keys, expected, done)
            for number, there in enumerate(expected):
                if there:
                    material.expect_holds(fresh, material.key(number), material.content(number, 5000), done)
                else:
                    material.expect_miss(fresh, material.key(number), done)
            if listed is not None:
                again = sorted(entry[:2] for entry in material.scan(fresh))
                assert again == listed, f"{done}: a scan gave {len(again)} other entries than the {len(listed)} before"

    def test_one_that_closes_leaves_the_others_open(self, adapter: L2Adapter, reopen: Any) -> None:
        """If two adapters of a process share something, such as a connection pool, the first must not close it."""
        with self._opened(adapter, reopen) as other:
            material.expect_stored(other, material.key(1), b"by the other")
        material.expect_stored(adapter, material.key(2), b"afterwards")
        material.expect_holds(adapter, material.key(2), b"afterwards", "another adapter was used and closed")

    def test_the_medium_has_one_name_for_every_adapter_on_it(self, adapter: L2Adapter, reopen: Any) -> None:
        name = adapter.medium()
        assert name is None or (isinstance(name, str) and name), f"medium() said {name!r}: a name, or None"
        with self._opened(adapter, reopen) as fresh:
            assert fresh.medium() == name, f"one adapter calls the medium {name!r}, another {fresh.medium()!r}"
            if fresh.capabilities.shared:
                assert name is not None, "an adapter that claims shared says where it stores: see L2Adapter.medium"

    def test_two_media_have_two_names(self, adapter: L2Adapter, small_adapter: Any) -> None:
        """By this name the server detects that two tiers in the settings are one medium."""
        if small_adapter is None:
            not_judged("a fixture 'small_adapter' unlocks it: an adapter on another medium")
        name = adapter.medium()
        if name is None:
            not_claimed("a name of its medium")
        other = small_adapter.medium()
        assert other != name, f"the medium and another one, of the fixture 'small_adapter', are both called {name!r}"

    @contextmanager
    def _second(self, adapter: L2Adapter, second: Any, reopen: Any) -> Iterator[L2Adapter]:
        """An adapter on the medium, as another server has it."""
        if second is None and not adapter.capabilities.shared:
            not_claimed("shared; a fixture 'second' unlocks it all the same")
        if second is None:
            with self._opened(adapter, reopen) as other:
                yield other
        else:
            with second() as other:
                yield other

    def test_two_handles_agree_while_both_are_open(self, adapter: L2Adapter, second: Any, reopen: Any) -> None:
        with self._second(adapter, second, reopen) as other:
            one, two = material.key(1), material.key(2)
            material.expect_stored(adapter, one, b"by the one")
            material.expect_holds(other, one, b"by the one", "stored by another server")
            material.expect_stored(other, one, b"by the other")
            material.expect_holds(adapter, one, b"by the other", "replaced by another server")
            material.expect_miss(adapter, two, "stored by nobody")
            material.expect_stored(other, two, b"new")
            material.expect_exists(adapter, [two], [True], "stored by another server after a miss here")
            material.expect_holds(adapter, two, b"new", "stored by another server after a miss here")
            if adapter.capabilities.delete:
                material.expect_deleted(adapter, [one], "stored by both")
                material.expect_exists(other, [one], [False], "deleted by another server")
                material.expect_deleted(other, [one], "deleted by another server before")

    def test_no_answer_about_what_is_there_is_kept(self, adapter: L2Adapter, second: Any, reopen: Any) -> None:
        """Neither yes nor no may be cached: other servers store and delete."""
        with self._second(adapter, second, reopen) as other:
            keys = [material.key(number) for number in range(4)]
            for turn in range(3):
                material.expect_exists(adapter, keys, [False] * 4, f"turn {turn}, before another server's store")
                for number, key in enumerate(keys):
                    material.expect_stored(other, key, material.content(number + turn, 500))
                material.expect_exists(adapter, keys, [True] * 4, f"turn {turn}, after another server's store")
                for number, key in enumerate(keys):
                    done = f"turn {turn}, stored by another server"
                    material.expect_holds(adapter, key, material.content(number + turn, 500), done)
                if not adapter.capabilities.delete:
                    return
                material.expect_deleted(other, keys, "stored by the same adapter")
                material.expect_miss(adapter, keys[0], f"turn {turn}, deleted by another server")

    def test_someone_leads_and_another_once_that_one_is_gone(self, adapter: L2Adapter, reopen: Any) -> None:
        if not adapter.capabilities.shared:
            assert adapter.try_to_lead() is True, "an adapter that is alone on its medium did not lead"
            return
        with self._opened(adapter, reopen) as other:
            assert adapter.try_to_lead() is True, "the first adapter that asked to lead got no"
            leads = other.try_to_lead()
            assert isinstance(leads, bool), f"try_to_lead gave {leads!r}: True or False"
            assert adapter.try_to_lead() is True, "the leader got no when it asked again"
            adapter.close()
            assert other.try_to_lead() is True, "the leader is closed, and another adapter that asked got no"

    def test_a_closed_adapter_does_not_lead(self, adapter: L2Adapter, reopen: Any) -> None:
        """If there is an election: otherwise no running server might keep headroom."""
        if not adapter.capabilities.shared:
            not_claimed("shared")
        with self._opened(adapter, reopen) as other:
            adapter.try_to_lead()
            if other.try_to_lead():
                not_claimed("an election: two adapters get the answer that they lead")
            adapter.close()
            try:
                leads = adapter.try_to_lead()
            except TierError:
                return
            raise AssertionError(f"try_to_lead after close answered {leads}, and raises TierError")

    def test_what_expired_is_a_miss(self, adapter: L2Adapter, expire: Any) -> None:
        if expire is None:
            if adapter.capabilities.ttl:
                missing(type(self), "expire", "the adapter claims ttl")
            not_claimed("ttl")
        material.expect_stored(adapter, material.key(1), b"short-lived")
        material.expect_holds(adapter, material.key(1), b"short-lived", "before its end")
        expire()
        material.expect_exists(adapter, [material.key(1)], [False], "after its time to live")
        material.expect_miss(adapter, material.key(1), "after its time to live")
        material.expect_stored(adapter, material.key(1), b"again")
        material.expect_holds(adapter, material.key(1), b"again", "expired and stored again")

    # --- the medium itself ----------------------------------------------------------------------------------
    def _door(self, adapter: L2Adapter, backdoor: Any) -> Any:
        if backdoor is None:
            if adapter.capabilities.durable:
                missing(type(self), "backdoor", "the adapter claims durable: torn objects will happen")
            not_judged("a fixture 'backdoor' unlocks it: a second way to the medium")
        return backdoor

    def test_the_medium_holds_what_was_stored_and_nothing_after_a_delete(
        self, adapter: L2Adapter, backdoor: Any
    ) -> None:
        door = self._door(adapter, backdoor)
        payload = material.content(1, 5000)
        assert door.read(material.key(1)) is None, "the back door finds an object before any was stored"
        material.expect_stored(adapter, material.key(1), payload)
        found = _on_medium(door, material.key(1))
        assert payload in found, "the medium does not hold the bytes as they are: codecs are the kernel's"
        if adapter.capabilities.delete:
            material.expect_deleted(adapter, [material.key(1)], "stored")
            assert door.read(material.key(1)) is None, "a delete was DONE, and the object is still on the medium"

    def test_what_someone_else_removed_is_a_miss(self, adapter: L2Adapter, backdoor: Any) -> None:
        door = self._door(adapter, backdoor)
        material.expect_stored(adapter, material.key(1), b"object")
        material.expect_exists(adapter, [material.key(1)], [True], "stored")
        _on_medium(door, material.key(1))
        door.remove(material.key(1))
        material.expect_exists(adapter, [material.key(1)], [False], "removed by somebody else")
        material.expect_miss(adapter, material.key(1), "removed by somebody else")
        if adapter.capabilities.delete:
            material.expect_deleted(adapter, [material.key(1)], "removed by somebody else")

    def test_every_key_has_a_place_of_its_own_on_the_medium(self, adapter: L2Adapter, backdoor: Any) -> None:
        door = self._door(adapter, backdoor)
        held: dict[bytes, bytes] = {}
        for number, pair in enumerate(material.similar_keys(adapter.capabilities.key_bytes_max)):
            for key in pair:
                held[key] = b"%d of " % number + key
                material.expect_stored(adapter, key, held[key])
        for key, content in held.items():
            assert content in _on_medium(door, key), f"another key's object lies in the place of {material.shown(key)}"

    @pytest.mark.parametrize("keep", [0.0, 0.1, 0.5, 0.99])
    def test_a_torn_object_is_never_called_whole(self, adapter: L2Adapter, backdoor: Any, keep: float) -> None:
        door = self._door(adapter, backdoor)
        whole = material.content(1, 20_000)
        material.expect_stored(adapter, material.key(1), whole)
        on_medium = _on_medium(door, material.key(1))
        door.write(material.key(1), on_medium[: int(len(on_medium) * keep)])
        outcome, found = material.load(adapter, material.key(1), 4096, 20_000 - 4096)
        torn = f"an object of 20,000 bytes was cut to {keep:.0%}"
        if outcome.result is Result.DONE:  # a medium that does not record lengths: then the length must be correct
            assert outcome.nbytes < len(whole), f"{torn}, and a load said DONE with {outcome.nbytes:,} bytes"
            wrong = material.difference(found[: outcome.nbytes], whole[: outcome.nbytes])
            assert found[: outcome.nbytes] == whole[: outcome.nbytes], (
                f"{torn}: of what a load called its bytes {wrong}"
            )
        else:
            legal = outcome.result in (Result.DAMAGED, Result.MISS)
            assert legal, f"{torn}, and a load answered {material.seen(outcome)}: DAMAGED, MISS or a smaller DONE"

    def test_an_object_of_the_kernels_takes_the_place_of_any_other(self, adapter: L2Adapter) -> None:
        """If an object of the kernel's was stored before, either may stay: both serve, and this may save an upload."""
        carrier = Carrier(adapter, CodecChain(), threading.Event())
        contents = [material.content(number, LAYOUT.nbytes) for number in (1, 2)]
        for time_, content in zip(("first", "second"), contents, strict=True):
            done = f"an object of the kernel's format was stored for the {time_} time"
            (outcome,) = carrier.store([_transfer(0, bytearray(content))], material.soon())
            material.expect_result(outcome, Result.DONE, done)
            loaded, found = _loaded(carrier, 0)
            assert loaded.reason is None, f"{done}, and was not read back: {loaded.reason}"
            assert found in contents, f"{done}: a load gave bytes that nobody stored"
        key = _transfer(0).tier_key
        outcome, _ = material.load(adapter, key, 2 * LAYOUT.nbytes)
        stranger = material.content(3, outcome.nbytes)
        material.expect_stored(adapter, key, stranger)
        material.expect_holds(adapter, key, stranger, "bytes of another format were stored over it, just as many")
        (outcome,) = carrier.store([_transfer(0, bytearray(contents[1]))], material.soon())
        done = "an object of the kernel's format was stored over bytes of another format, just as many"
        material.expect_result(outcome, Result.DONE, done)
        loaded, found = _loaded(carrier, 0)
        assert loaded.reason is None, f"{done}, and was not read back: {loaded.reason}"
        assert found == contents[1], f"{done}: {material.difference(found, contents[1])}"

    @pytest.mark.parametrize("damage", ["cut", "emptied", "longer", "flipped", "neighbour", "zeros"])
    def test_a_damaged_object_is_a_miss(self, adapter: L2Adapter, backdoor: Any, damage: str) -> None:
        """In the kernel's own format, read the way the server reads."""
        door = self._door(adapter, backdoor)
        carrier = Carrier(adapter, CodecChain(), threading.Event())
        transfers = [_transfer(number) for number in range(2)]
        for outcome in carrier.store(transfers, material.soon()):
            material.expect_result(outcome, Result.DONE, "asked to store an object of the kernel's format")
        for number in range(2):
            loaded, _ = _loaded(carrier, number)
            assert loaded.reason is None, f"an object of the kernel's format was not read back: {loaded.reason}"
        victim, other = (transfer.tier_key for transfer in transfers)
        content = bytearray(_on_medium(door, victim))
        if damage == "flipped":
            content[len(content) // 2] ^= 4
        elif damage == "neighbour":
            content = bytearray(_on_medium(door, other))
        elif damage == "zeros":
            content = bytearray(len(content))
        else:
            content = {"cut": content[:-1000], "emptied": bytearray(), "longer": content + bytes(500)}[damage]
        door.write(victim, bytes(content))
        loaded, _ = _loaded(carrier, 0)
        assert loaded.reason is not None, f"an object was {damage} on the medium, and was served"
        whole, found = _loaded(carrier, 1)
        assert whole.reason is None, f"one object was {damage}, and the one beside it was not served: {whole.reason}"
        expected = material.content(1, LAYOUT.nbytes)
        assert found == expected, (
            f"one object was {damage}: of the one beside it {material.difference(found, expected)}"
        )

    # --- deletes need proof ---------------------------------------------------------------------------------
    def test_a_load_that_finds_damage_leaves_the_object_where_it_is(self, adapter: L2Adapter, backdoor: Any) -> None:
        """What a read has brought proves nothing about the medium: the server looks again before anything is moved."""
        door = self._door(adapter, backdoor)
        material.expect_stored(adapter, material.key(1), material.content(1, 20_000))
        on_medium = _on_medium(door, material.key(1))
        for what, content in (("cut", on_medium[: len(on_medium) // 2]), ("emptied", b""), ("longer", on_medium * 2)):
            door.write(material.key(1), content)
            for method in (adapter.load, adapter.load_headers):
                buffers = [memoryview(bytearray(size)) for size in (4096, 20_000 - 4096)]
                method([LoadItem(material.key(1), buffers)], material.soon())
            found = door.read(material.key(1))
            assert found == content, f"an object was {what}, a load found that, and changed what the medium holds"

    def test_the_header_alone_is_what_a_load_gives(self, adapter: L2Adapter) -> None:
        sizes = (9000, 4096, 100)
        for number, nbytes in enumerate(sizes):
            material.expect_stored(adapter, material.key(number), material.content(number, nbytes))
        numbers = [*range(len(sizes)), len(sizes)]  # the last one is not there
        pages = [bytearray(4096) for _ in numbers]
        rest = memoryview(bytearray(8192))
        items = [LoadItem(material.key(at), [memoryview(page), rest]) for at, page in zip(numbers, pages, strict=True)]
        outcomes = adapter.load_headers(items, material.soon())
        assert len(outcomes) == len(items), f"load_headers gave {len(outcomes)} outcomes for {len(items)} items"
        for number, nbytes in enumerate(sizes):
            here = min(4096, nbytes)
            done = f"the header of an object of {nbytes:,} bytes"
            material.expect_result(outcomes[number], Result.DONE, done)
            assert outcomes[number].nbytes >= here, f"{done} came with {outcomes[number].nbytes:,} bytes"
            expected = material.content(number, nbytes)[:here]
            assert bytes(pages[number][:here]) == expected, (
                f"{done}: {material.difference(bytes(pages[number]), expected)}"
            )
        material.expect_result(outcomes[-1], Result.MISS, "the header of an object that is not there")

    def test_what_was_replaced_is_not_set_aside(self, adapter: L2Adapter) -> None:
        """If loads give versions: a damaged object may have been replaced by another server since it was read."""
        if not adapter.capabilities.delete:
            not_claimed("delete")
        versions = []
        for number in (1, 2):
            material.expect_stored(adapter, material.key(1), material.content(number, 5000))
            outcome, _ = material.load(adapter, material.key(1), 5000)
            versions.append(outcome.version)
        if not all(versions):
            assert not any(versions), "one load gave a version and another gave none"
            not_claimed("versions")
        assert versions[0] != versions[1], f"two objects under one key have the same version, {versions[0]!r}"
        done = "set aside with the version of an earlier object"
        for _ in range(2):
            outcomes = adapter.set_aside([material.key(1)], material.soon(), [versions[0]])
            material.expect_result(outcomes[0], Result.DONE, done)
            material.expect_holds(adapter, material.key(1), material.content(2, 5000), done)
        outcomes = adapter.set_aside([material.key(1)], material.soon(), [versions[1]])
        material.expect_result(outcomes[0], Result.DONE, "set aside with its version")
        material.expect_miss(adapter, material.key(1), "set aside with its version")

    def test_what_replaces_a_suspect_is_stored_in_any_case(self, adapter: L2Adapter) -> None:
        """Also by an adapter that skips what is there already."""
        carrier = Carrier(adapter, CodecChain(), threading.Event())
        for number, replaces in ((1, False), (2, True)):
            content = material.content(number, LAYOUT.nbytes)
            transfer = _transfer(0, bytearray(content))._replace(replaces=replaces)
            (outcome,) = carrier.store([transfer], material.soon())
            material.expect_result(outcome, Result.DONE, "an object of the kernel's format was stored")
        loaded, found = _loaded(carrier, 0)
        assert loaded.reason is None, f"an object that replaces a suspect was not read back: {loaded.reason}"
        assert found == content, "the object that was to be replaced is still there"


def _on_medium(door: Any, key: bytes) -> bytes:
    """What the back door finds under a key whose store was DONE."""
    found = door.read(key)
    assert found is not None, (
        f"a store of {material.shown(key)} was DONE, and the back door finds nothing under that key: "
        "it lies under another name, or nowhere"
    )
    return bytes(found)


def _transfer(number: int, into: bytearray | None = None) -> Transfer:
    view = memoryview(into if into is not None else bytearray(material.content(number, LAYOUT.nbytes)))
    name = material.key(number, "object ")[:32]
    return Transfer(name, NAMESPACE, 1, object_kind(LAYOUT, CodecChain()), view)


def _loaded(carrier: Carrier, number: int) -> tuple[Loaded, bytes]:
    into = bytearray(LAYOUT.nbytes)
    (loaded,) = carrier.load([_transfer(number, into)], material.soon())
    return loaded, bytes(into)
